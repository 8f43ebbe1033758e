"""
Commands that are allowed because they only look are run for real, and show neither secrets nor what is outside.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from stepengine import ToolCall
from stepengine.permissions import Command, Policy, Rule, read_only_commands
from stepengine.permissions.commands import CommandForm
from stepengine.tools.bundled import shell_tools
from stepengine.workspace import withheld_files
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.root import Root
from tests.phrases import OUTSIDE_ROOT

from .runs import run_calls

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
    (root / "sub" / "deep").mkdir(parents=True)
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
        "project/tracked.txt": "delta\n",
        "project/sub/tracked.txt": "delta\n",
        "project/sub/deep/SERVER.PEM": f"{SECRET}\n",
        "outside/plan.txt": f"{OUTSIDE} 5\n",
        "top.txt": f"{OUTSIDE} top\n",
    }
    for name, text in files.items():
        (top / name).write_text(text)
    git(top, "init", "-q")
    git(top, "add", "-f", ".")
    git(top, "commit", "-qm", "first")
    git(top, "tag", "-a", "v1", "-m", "one")
    git(top, "branch", "side")
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
    (root / "itself").symlink_to(".")
    os.link(root / "key.pem", root / "twin.txt")
    for name, other in (("tracked.txt", "key.pem"), ("sub/tracked.txt", "vaults/list.txt")):
        (root / name).unlink()
        os.link(root / other, root / name)
    (root / "fake" / "objects").mkdir(parents=True)
    (root / "fake" / "refs").mkdir()
    (root / "fake" / "HEAD").write_text("ref: refs/heads/main\n")
    (root / "fake" / "config").write_text(f"[core]\n\tbare = false\n\tworktree = {top / 'outside'}\n")
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
    place = {"cwd": cwd} if cwd else {}
    calls = [ToolCall("run_terminal_command", {"command": command.split(" "), **place}) for command in commands]
    policy = Policy([*read_only_commands(), *rules], "dont_ask")
    return dict(zip(commands, run_calls(shell_tools(root), calls, policy), strict=True))


def listings() -> list[str]:
    """
    Return commands that name files, and could name what they must not.
    """
    ls = ["", "-a", "-A", "-R", "-aR", "-R .", "-R sub", "-A sub", "-a sub/deep", "--all --recursive", "-i", "-1", "-F", "-p", "-t", "-S", "-r", "-R itself/", "itself/", "-RA1 sub itself/", "-- -R", "-R --", "--color=never -a"]  # fmt: skip
    found = ["", ".", "./", ". -name *.pem", ". -iname *.PEM", ". -type f", "-type f", ". -print", ". -print -name zzz", ". -not -name zzz", ". -path *vaults*", ". -ipath *VAULTS*", ". -maxdepth 2", ". -maxdepth 3 -type f", ". -mindepth 2", "sub", "sub/", "sub -type f", ". -newer a.txt", ". -size -10", ". -mtime -1", ". -name zzz , -print", ". ( -name zzz , -print )", ". ( -print )", ". ! -name zzz", "itself/", "itself/ -type f", "-name *.pem", "sub/deep . -type f", ". -not -empty -type f", "./sub/.", "sub//deep", ". -name id_?sa", ". -mindepth 1 -maxdepth 1 -name k*", "-- ."]  # fmt: skip
    shown = ["rg -l .", "rg -c .", "rg -l . sub", "rg -l . itself/", "git diff --name-only", "git diff --name-status HEAD", "git diff --stat", "git log --stat", "git log --name-only --all", "git log --name-status -n 1", "git show --name-only", "git show HEAD^{tree}", "git show main^{tree}", "git status -s -u", "git status --porcelain --ignored", "git grep -l .", "git grep -c . HEAD"]  # fmt: skip
    return [f"ls {words}".strip() for words in ls] + [f"find {words}".strip() for words in found] + shown


def more_attacks(root: Path) -> list[str]:
    """
    Return commands that reach the same by other names of commits, trees, folders and files.
    """
    tree, sub = git(root, "rev-parse", "HEAD^{tree}"), git(root, "rev-parse", "HEAD:project/sub")
    files = [
        f"{program} {name}"
        for program in (
            "cat",
            "cat -A",
            "head -c 100",
            "tail -n +1",
            "sort -u",
            "sort --key=1",
            "rg .",
            "rg -c .",
            "rg -F CANARY",
        )
        for name in (
            "tracked.txt",
            "sub/tracked.txt",
            "itself/key.pem",
            "itself/tracked.txt",
            "./key.pem",
            "key.pem/",
            "sub/deep/SERVER.PEM",
        )
    ]
    objects = ["stash", "stash@{0}", "refs/stash", "stash^2", "HEAD@{0}", "@", "@{0}", "v1", "v1^{}", "v1^{tree}", tree, f"{tree} {sub}", sub, "HEAD^{tree}", "HEAD^!", "HEAD^@", "HEAD^-", "HEAD~0", ":/first", "HEAD^{/first}", "side", "main..side", "main...side", "..side", "^HEAD", "main side"]  # fmt: skip
    paths = ["-- .", "-- **", "-- **/*.pem", "-- sub/", "sub", "itself", "-- itself/key.pem", "tracked.txt", "-- tracked.txt", "-- sub/tracked.txt", "-- [k]ey.pem", "-- key?pem", "-- \\key.pem", "-- :", "-- :(literal)key.pem", "-- :(attr:x)key.pem", "-- :(prefix:0)key.pem", "-- :(top,icase)PROJECT/KEY.PEM", "-- :/project/key.pem"]  # fmt: skip
    git_words = [
        f"{deed} {words}"
        for deed in ("git diff", "git show", "git log -p", "git grep CANARY")
        for words in (*objects, *paths)
    ]
    options = ["git diff -w", "git diff --unified=9", "git diff --word-diff HEAD", "git diff --no-renames", "git diff --staged -U9", "git log --graph -p", "git log --all --patch --reverse", "git log -p --since=2000", "git log --format=%B%n%b -p", "git log --max-count=1 -p", "git show -U100 --oneline", "git grep -E C.N", "git grep -n -i canary", "git grep -w CANARY", "rg CANARY -g *", "rg -g tracked.txt CANARY", "rg CANARY itself/", "rg -U CANARY -- .", "rg -x .*"]  # fmt: skip
    return [*files, *git_words, *options]


def names_in(found: dict[str, str]) -> dict[str, str]:
    """
    Return the commands whose output names a file that must not be named; what a refusal repeats is no output.
    """
    said = {c: json.loads(text) for c, text in found.items() if text.startswith("{")}
    shown = {c: f"{one.get('stdout', '')}{one.get('stderr', '')}" for c, one in said.items()}
    return {
        c: text
        for c, text in shown.items()
        if any(n in text for n in ("key.pem", "id_rsa", ".npmrc", "SERVER.PEM", "list.txt"))
    }


@pytest.mark.deep
@pytest.mark.spec("requirements:X70", "reliability:PM12")
@pytest.mark.parametrize("cwd", [None, "sub"])
def test_read_only_commands_show_no_withheld_file(repository: Path, cwd: str | None) -> None:
    listed = outcomes(repository, listings(), cwd, Rule.deny_path("vaults/**"))
    tried = [*attacks(repository), *more_attacks(repository)]
    shown = outcomes(repository, tried, cwd, Rule.deny_path("vaults/**"))

    assert {} == names_in(listed)
    assert {} == {c: text for c, text in {**listed, **shown}.items() if any(canary in text for canary in CANARIES)}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70")
def test_listings_omit_withheld_names_and_keep_the_rest(repository: Path) -> None:
    commands = {"ls -R": "b.py", "ls -a": "a.txt", "find": "./sub/b.py", "find itself/ -type f -maxdepth 3": "itself/sub/b.py", "find sub -maxdepth 1 -not -name b.py": "sub/tracked.txt", "find . -name zzz , -print": "is not supported"}  # fmt: skip

    found = outcomes(repository, list(commands), None, Rule.deny_path("vaults"))

    assert {} == names_in(found)
    assert {} == {command: found[command] for command, kept in commands.items() if kept not in found[command]}
    assert "are left out" in found["find"]
    assert "warning" not in found["find itself/ -type f -maxdepth 3"]


def stdout_of(text: str) -> str:
    """
    Return what a program printed; fail for one that was refused.
    """
    assert text.startswith("{"), text
    return str(json.loads(text).get("stdout", ""))


SEARCHES = ("find", "ls -R", "rg -l hit")
STARTS = ["src//", ".//src", "src/.", "./.", "src/./deep//"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize(("cwd", "starts"), [(None, STARTS), ("desk", ["src//", "./.", "src/./deep//"])])
def test_no_spelling_of_a_folder_makes_a_search_leak(tmp_path: Path, starts: list[str], cwd: str | None) -> None:
    (tmp_path / "desk/src/deep").mkdir(parents=True)
    for name in ("src/shut.txt", "src/open.txt", "src/deep/shut.txt", "src/deep/open.txt"):
        (tmp_path / "desk" / name).write_text("hit")
    root = tmp_path if cwd else tmp_path / "desk"
    rules = [Rule.deny_path(f"{'desk/' if cwd else ''}{name}") for name in ("src/shut.txt", "src/deep/shut.txt")]

    found = outcomes(root, [f"{search} {start}" for start in starts for search in SEARCHES], cwd, *rules)

    for start in starts:
        files, listed, searched = (found[f"{search} {start}"] for search in SEARCHES)
        assert [True, False] == [name in stdout_of(files) for name in ("open.txt", "shut.txt")], start
        assert [True, False] == [name in stdout_of(listed) for name in ("open.txt", "shut.txt")], start
        assert "shut.txt" not in searched, start
        assert "open.txt" in searched or "not in its normal form" in searched, start


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X70")
def test_a_listing_hides_no_namesake_of_a_withheld_file(tmp_path: Path) -> None:
    for name in ("secrets", "docs", "src"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text("x")
    (tmp_path / "secrets/plan").write_text("x")
    (tmp_path / "src/a").write_text("x")
    refused = ["ls -R", "ls --recursive", "ls secrets docs", "ls -R docs secrets", "ls -laR ."]
    fine = {"ls docs": "README.md", "ls docs src": "README.md", "ls secrets src": "plan", "ls secrets": "plan"}

    one = Rule.deny_path("secrets/README.md")
    found = outcomes(tmp_path, [*refused, "ls docs", "ls docs src", "ls secrets", "find"], None, one)

    assert [] == [c for c in refused if "use find" not in found[c] or "README" in found[c]]
    assert [] == [c for c in found if c in fine and fine[c] not in stdout_of(found[c])]
    assert "README.md" not in stdout_of(found["ls secrets"])
    assert ["./docs/README.md", "./src/README.md"] == sorted(
        [line for line in stdout_of(found["find"]).splitlines() if "README" in line]
    )
    (listed,) = outcomes(tmp_path, ["ls -R"], None, Rule.deny_path("secrets/plan")).values()
    assert "plan" not in stdout_of(listed)
    assert "README.md" in stdout_of(listed)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X70")
def test_a_search_of_one_folder_ignores_withheld_files_below(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for at in range(600):
        (tmp_path / f"deep/shut{at}").write_text("x")
    for name in ("shut", "a.txt"):
        (tmp_path / name).write_text("x")
    fine = ["find -maxdepth 1", "find . -type f -maxdepth 1", "find . -maxdepth 0 -maxdepth 1"]
    refused = ["find . -maxdepth 2", "find . -maxdepth 1 -maxdepth 2", "find . -maxdepth +2"]

    found = outcomes(tmp_path, [*fine, *refused], None, Rule.deny_path("**/shut*"))

    assert [] == [c for c in fine if "a.txt" not in stdout_of(found[c]) or "shut" in stdout_of(found[c])]
    assert [] == [c for c in refused if "the limit is 500" not in found[c]]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize("command", ["git diff", "git diff -- tracked.txt"])
def test_no_diff_shows_a_tracked_hard_link_of_a_secret(repository: Path, command: str) -> None:
    (text,) = outcomes(repository, [command], None, Rule.deny_path("vaults/**")).values()

    assert [] == [canary for canary in CANARIES if canary in text]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize(("limit", "is_run"), [(1, False), (10, False), (23, False), (24, True)])
def test_searches_in_a_too_large_tree_show_no_linked_secret(
    tmp_path: Path, limit: int, is_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    for name in ("a/copy.txt", *[f"file{at:02}.txt" for at in range(20)]):
        (root / name).write_text("alpha\n")
    git(root, "init", "-q", f"--separate-git-dir={tmp_path}/git")
    git(root, "add", ".")
    (root / "a/copy.txt").write_text(f"{SECRET}\n")
    os.link(root / "a/copy.txt", root / "z.pem")
    monkeypatch.setattr(withheld_files, "SECRET_SCAN_ENTRIES", limit)

    found = outcomes(root, ["rg .", "git diff"], None)

    assert [] == [command for command, text in found.items() if SECRET in text]
    assert is_run == ("alpha" in found["rg ."])
    assert [not is_run] * 2 == [f"stopped after {limit} entries" in text for text in found.values()]


@pytest.mark.spec("requirements:X70")
def test_a_listing_of_a_changing_tree_hides_no_visible_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(20):
        (tmp_path / f"file{at:02}.txt").write_text("alpha\n")
    (tmp_path / "z.txt").write_text("x")
    seen = []
    with closing(Root(tmp_path, PathPolicy())) as root:
        opened = root.open_folder(".")
        for limit in (100, 10):
            monkeypatch.setattr(withheld_files, "SECRET_SCAN_ENTRIES", limit)
            seen += [withheld_files.has_visible_entry(root, opened, [name], deep=True) for name in ("z.txt", "none")]
        os.close(opened.fd)

    assert [True, False, True, True] == seen


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize("glob", ["sub/b.py", "sub/**", "**/b.py"])
def test_a_search_in_a_folder_obeys_rules_from_the_root(repository: Path, glob: str) -> None:
    commands = ["rg beta", "git diff", "find"]
    if glob == "sub/b.py":  # the others differ only in how git and rg understand them
        commands += ["rg beta .", "rg -g * beta", "rg beta b.py", "git grep beta", "ls"]

    found = outcomes(repository, commands, "sub", Rule.deny_path(glob))

    said = {command: json.loads(text).get("stdout", "") for command, text in found.items() if text.startswith("{")}
    assert [] == [command for command, text in said.items() if "beta" in text or "b.py" in text]
    assert (glob != "sub/**") == ({"rg beta", "git diff"} <= set(said))


@pytest.mark.spec("requirements:X70", "reliability:PM12")
@pytest.mark.parametrize("cwd", [None, "desk"])
def test_a_search_through_a_link_omits_withheld_files(tmp_path: Path, cwd: str | None) -> None:
    for name in ("private/keys/a.txt", "private/open.txt", ".git/config", ".git/description"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"canary in {name}")
    (tmp_path / "desk").mkdir()
    folder = tmp_path / (cwd or "")
    for name, target in (("pub", "private"), ("again", "pub"), ("store", ".git")):
        (folder / name).symlink_to(target if name == "again" else tmp_path / target)

    found = outcomes(tmp_path, ["rg canary pub again/ store"], cwd, Rule.deny_path("private/keys/**"))

    (text,) = map(stdout_of, found.values())
    assert ["again/open.txt", "pub/open.txt", "store/description"] == sorted(
        [line.partition(":")[0] for line in text.splitlines()]
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70", "reliability:PM12")
@pytest.mark.parametrize(
    ("rule", "is_shown"),
    [
        (Rule.ask_for_path("vaults/**", priority=1), False),
        (Rule.deny_path("vaults/**", tool="run_*"), False),
        (Rule.ask_for_path("vaults/**"), True),
        (Rule.deny_path("vaults/**", tool="write_file"), True),
    ],
    ids=["asked", "denied", "allowed before", "of another tool"],
)
def test_searches_and_reads_withhold_the_same_files(repository: Path, rule: Rule, is_shown: bool) -> None:
    commands = ["cat vaults/list.txt", "rg CANARY.denied", "git grep CANARY.denied", "git diff", "git log -p"]

    found = outcomes(repository, commands, None, rule)

    assert dict.fromkeys(commands, is_shown) == {command: DENIED in text for command, text in found.items()}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70", "reliability:PM14")
def test_files_that_a_model_wrote_as_a_repository_lead_nowhere(repository: Path) -> None:
    commands = ["git status -s -- .", "git diff -- .", "git grep -l . -- .", "git log -p -- .", "git show"]

    found = outcomes(repository, commands, "fake")

    assert [] == [text for text in found.values() if "plan.txt" in text or OUTSIDE in text]


@pytest.mark.deep
@pytest.mark.spec("requirements:X70")
def test_read_only_commands_show_the_rest_and_report_omissions(repository: Path) -> None:
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
    ["cat plan", "cat shown.txt", "git diff -- :(top)a.txt"],
)
def test_a_command_that_would_leak_is_refused_with_a_reason(repository: Path, command: str) -> None:
    (text,) = outcomes(repository, [command], None).values()

    assert any(word in text for word in (OUTSIDE_ROOT, "may hold secrets", "only git understands")), text


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("git", "usage"),
        ("git diff", "+alpha"),
        ("git -p diff", "remove it"),
        ("git show HEAD:top.txt", "only git"),
    ],
)
def test_a_rule_for_git_alone_is_confined_like_specific_ones(repository: Path, command: str, said: str) -> None:
    rule = Rule("allow", Command(CommandForm(["git"], operands="paths")))

    (text,) = outcomes(repository, [command], None, rule, Rule.deny_path("vaults/**")).values()

    assert said in text
    assert [] == [canary for canary in CANARIES if canary in text], text
