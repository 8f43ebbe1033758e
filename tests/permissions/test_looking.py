"""
Commands that are allowed because they only look are run for real, and show neither secrets nor what is outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, Limits, ToolCall
from stepengine.permissions import Command, Policy, Rule, read_only_commands
from stepengine.permissions.commands import CommandForm
from stepengine.tools import shell_tools

SECRET = "CANARY-inside"
OUTSIDE = "CANARY-outside"
DENIED = "CANARY-denied"
CANARIES = (SECRET, OUTSIDE, DENIED)
WHO = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")


def git(folder: Path, *words: str) -> str:
    """
    Run git and return what it printed.
    """
    return subprocess.run(["git", *WHO, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(autouse=True)
def ripgrep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    It is installed beside the interpreter, which the search path need not name.
    """
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A repository that has committed its secrets, and links that lead to them and out; what is outside is in it, too.
    """
    top = tmp_path_factory.mktemp("looking") / "repository"
    root = top / "project"
    (root / "sub").mkdir(parents=True)
    (root / "vaults").mkdir()
    (top / "outside").mkdir()
    files = {
        "project/a.txt": "alpha\nCANARY-free\n",
        "project/sub/b.py": "beta = 1\n",
        "project/key.pem": f"{SECRET} pem\n",
        "project/id_rsa": f"{SECRET} rsa\n",
        "project/.env": f"KEY={SECRET}\n",
        "project/sub/.npmrc": f"{SECRET}\n",
        "project/vaults/list.txt": f"{DENIED}\n",
        "outside/plan.txt": f"{OUTSIDE} 5\n",
        "top.txt": f"{OUTSIDE} top\n",
    }
    for name, text in files.items():
        (top / name).write_text(text)
    git(top, "init", "-q")
    git(top, "add", "-f", ".")
    git(top, "commit", "-qm", "first")
    for name, text in files.items():
        (top / name).write_text(text + text)
    (root / "out").symlink_to("../outside")
    (root / "plan").symlink_to("../outside/plan.txt")
    (root / "5").symlink_to("../outside/plan.txt")
    (root / "shown.txt").symlink_to("key.pem")
    (root / "hidden").symlink_to(".env")
    (root / "to_vaults").symlink_to("vaults")
    (root / "absolute").symlink_to(top / "outside")
    (root / "sub" / "up").symlink_to("../..")
    os.link(root / "key.pem", root / "twin.txt")
    return root


def attacks(root: Path) -> list[str]:
    """
    Return commands that the rules for looking allow, each of which could show what it must not.
    """
    blob, vaults = git(root, "rev-parse", "HEAD:project/key.pem"), git(root, "rev-parse", "HEAD:project/vaults")
    free = git(root, "rev-parse", "HEAD:project/sub")
    links = ("out", "out/plan.txt", "plan", "shown.txt", "hidden", "to_vaults", "to_vaults/list.txt", "absolute", "sub/up", "sub/up/top.txt", "twin.txt", "vaults", "vaults/list.txt")  # fmt: skip
    files = [
        f"{program} {link}"
        for program in ("cat", "head -n 5", "tail -c 100", "sort", "rg CANARY", "rg -n CANARY", "ls -l", "wc")
        for link in links
    ]
    # What looks like the value of an option is a file for a program that gives the option none.
    numbered = ["cat -n 5", "cat -s 5", "sort -n 5", "sort -k 5", "wc -c 5", "ls -l -C 5", "rg -n 5 plan", "rg -c 5 plan", "rg -U 5 plan", "rg -s 5 hidden", "rg -n -- 5 plan"]  # fmt: skip
    rg = ["rg CANARY", "rg CANARY .", "rg -F CANARY sub .", "rg -g *.pem CANARY", "rg -g id_rsa CANARY", "rg -g !x CANARY", "rg -t txt CANARY", "rg -U CANARY", "rg -v zzz", "rg -- CANARY .", "rg -i canary vaults sub"]  # fmt: skip
    shows = [
        "git diff", "git diff HEAD", "git diff -- .", "git diff HEAD -- key.pem", "git diff -- *.pem", "git diff -- *", "git diff k*.pem", "git diff -- :(top)", "git diff -- :/",
        "git diff -- :(glob)**/*.pem", "git diff -- :!x", "git diff -- :(exclude)x", "git diff :(icase)KEY.PEM", "git diff -- :^x", "git diff -- KEY.PEM", "git diff --cached", "git diff -- key.*",
        "git diff -- shown.txt", "git diff -- vaults", "git diff vaults/list.txt", "git diff HEAD -- vault*", "git diff -U5", "git diff --stat -p", "git diff --word-diff",
        "git log -p", "git log --patch", "git log -p -n 1", "git log -n 1 -p --all", "git log -p -- key.pem", "git log -p -- k*", "git log -p -- :/", "git log -p -- :(top)outside", "git log -p HEAD",
        "git log -p --follow key.pem", "git log -p vaults", "git log --patch --reverse", "git log --format=%h -p",
        "git show", "git show HEAD", "git show -p HEAD", "git show main", "git show HEAD:project/key.pem", "git show HEAD:./key.pem", "git show :key.pem", "git show :0:project/key.pem",
        f"git show {blob}", f"git show {blob[:10]}", "git show HEAD -- key.pem", "git show HEAD -- *", "git show HEAD:project/vaults/list.txt", "git show HEAD:top.txt", "git show HEAD:outside/plan.txt",
        "git grep CANARY", "git grep -n CANARY HEAD", "git grep -i canary", "git grep --cached CANARY", "git grep CANARY -- *.pem", "git grep CANARY -- :/", "git grep CANARY -- :(top)", "git grep CANARY main",
        f"git grep CANARY {blob}", f"git grep CANARY {vaults}", f"git grep CANARY {blob[:12]}", f"git diff {free} {vaults}", f"git diff {free}..{vaults}", f"git diff {vaults}", f"git log -p {vaults}",
        f"git show {blob}..", f"git diff {blob} {vaults}", "git grep -n 5 plan", "git grep -c 5 to_vaults",
        "git grep CANARY vaults", "git grep -F CANARY HEAD -- vaults", "git grep -w CANARY HEAD -- id_rsa", "git grep -- CANARY", "git status -u",
    ]  # fmt: skip
    return [*files, *numbered, *rg, *shows]


def outcomes(root: Path, commands: list[str], cwd: str | None, *rules: Rule) -> dict[str, str]:
    """
    Run commands under the rules for looking and return what a model would see of each.
    """
    found: dict[str, str] = {}

    def handle_steps(ctx: Any) -> Any:
        for command in commands:
            turn = yield ToolCall(
                "run_terminal_command", {"command": command.split(" "), **({"cwd": cwd} if cwd else {})}
            )
            found[command] = str(turn.tool_result.text)

    agent = AgentDefinition("looker", tools=shell_tools(root), handle_steps=handle_steps)
    policy = Policy([*read_only_commands(), *rules], "dont_ask")
    with Engine([agent], permissions=policy, limits=Limits(max_denials=10_000, max_actions=10_000)) as engine:
        engine.run_sync("looker").unwrap()
    return found


@pytest.mark.deep
@pytest.mark.spec("requirements:X70", "reliability:PM12", "reliability:PM21")
@pytest.mark.parametrize("cwd", [None, "sub"])
def test_what_only_looks_shows_neither_secrets_nor_denied_files_nor_what_is_outside(
    repository: Path, cwd: str | None
) -> None:
    found = outcomes(repository, attacks(repository), cwd, Rule.deny_path("vaults/**"))

    assert {} == {command: text for command, text in found.items() if any(canary in text for canary in CANARIES)}


@pytest.mark.spec("requirements:X70")
def test_what_only_looks_still_shows_the_rest_and_says_that_something_is_left_out(repository: Path) -> None:
    shown = {
        "cat a.txt": "alpha", "rg CANARY": "CANARY-free", "git diff": "+alpha", "git diff a.txt": "+alpha", "git diff HEAD -- a.txt sub": "+beta = 1",
        "git log -p -n 1": "+alpha", "git log --oneline -n 1": "first", "git show HEAD": "+alpha", "git grep -n alpha": "a.txt:1:alpha", "git status -s": "M a.txt",
        "git log -n 1 --stat": "a.txt", "git grep beta -- sub": "b.py", "rg beta sub": "beta = 1", "ls sub": "b.py",
        "git grep -n 1 sub": "b.py:1:beta = 1", "git grep alpha HEAD": "a.txt:alpha", "git grep -- alpha": "a.txt:alpha", "git diff HEAD..HEAD": '"exit_code":0',
        "rg -m 1 alpha a.txt": "alpha",
    }  # fmt: skip

    found = outcomes(repository, list(shown), None)

    assert {} == {command: found[command] for command, text in shown.items() if text not in found[command]}
    assert [] == [text for text in found.values() if SECRET in text or OUTSIDE in text]
    assert "are left out" in found["git diff"]
    assert "are left out" not in found["cat a.txt"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize(
    "command",
    ["cat plan", "cat shown.txt", "git diff -- :(top)a.txt", "git show HEAD:project/a.txt", "rg x out", "cat twin.txt"],
)
def test_a_command_that_leads_to_what_it_must_not_show_is_refused_with_a_reason(repository: Path, command: str) -> None:
    (text,) = outcomes(repository, [command], None).values()

    assert any(word in text for word in ("outside of the root", "may hold secrets", "only git understands")), text


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("git", "usage"),
        ("git diff", "+alpha"),
        ("git -p diff", "leave it out"),
        ("git show HEAD:top.txt", "only git"),
    ],
)
def test_a_rule_that_names_git_alone_is_confined_like_those_that_name_what_it_does(
    repository: Path, command: str, said: str
) -> None:
    rule = Rule("allow", Command(CommandForm(["git"], operands="paths")))

    (text,) = outcomes(repository, [command], None, rule, Rule.deny_path("vaults/**")).values()

    assert said in text
    assert [] == [canary for canary in CANARIES if canary in text], text
