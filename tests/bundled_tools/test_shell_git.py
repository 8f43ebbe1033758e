"""Git commands that only look run no program that the repository names, whatever its settings are called (reliability 3.7)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import attrs
import pytest

from stepengine import ToolContext
from stepengine.permissions.commands import READ_ONLY
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import shell_tools
from stepengine.tools.bundled.shell import commands
from stepengine.workspace import environment

LOOKS = ("git status", "git diff", "git log -p", "git show", "git blame -- a.txt")
SIGNATURE = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n aGVsbG8=\n -----END PGP SIGNATURE-----\n"


@attrs.frozen
class Foreign:
    """
    A repository that somebody else configured, with a changed file, a signed commit and a submodule.

    What it names stands in its own ``.git``: in a sandbox there is nothing beside the root that could be run.
    """

    root: Path
    evil: Path
    canary: Path

    def git(self, *words: str, cwd: str = ".", given: str | None = None) -> str:
        """Run git as anybody would, with nothing overridden."""
        person = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(
            ["git", *words], cwd=self.root / cwd, env={**os.environ, **person, **nobody}, input=given,
            capture_output=True, encoding="utf-8", check=False,
        )  # fmt: skip
        return done.stdout.strip()

    def ran(self) -> list[str]:
        """Return what ran since the last look."""
        found = self.canary.read_text().split() if self.canary.exists() else []
        self.canary.unlink(missing_ok=True)
        return found

    async def shell(self, command: str | list[str]) -> str:
        """Run a command with the shell tool."""
        tools = ToolRegistry(shell_tools(self.root))
        result = await tools.execute("run_terminal_command", {"command": command}, ToolContext.for_test())
        assert not result.is_error, result.text
        assert result.data["exit_code"] == 0, result.text
        return str(result.data["stdout"])


@pytest.fixture(scope="session")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    The folder of a repository to copy: eleven processes make it.
    """
    folder = tmp_path_factory.mktemp("foreign")
    made = Foreign(folder / "root", folder / "evil", folder / "canary")
    (made.root / "sub").mkdir(parents=True)
    for folder in ("sub", "."):
        made.git("init", "-q", cwd=folder)
        (made.root / folder / "a.txt").write_text("before\n")
        (made.root / folder / ".gitattributes").write_text("* filter=x diff=x\n")
        made.git("add", ".", cwd=folder)
        made.git("commit", "-q", "-m", "first", cwd=folder)
    signed = made.git("cat-file", "commit", "HEAD").replace("\n\n", f"\n{SIGNATURE}\n", 1)
    made.git("reset", "-q", made.git("hash-object", "-t", "commit", "-w", "--stdin", given=signed))
    for folder in ("sub", "."):  # as long as it was, so that git has to look inside
        (made.root / folder / "a.txt").write_text("behind\n")
    return made.root


@pytest.fixture
def foreign(configured: Path, tmp_path: Path) -> Foreign:
    planted = tmp_path / "root" / ".git" / "planted"
    made = Foreign(tmp_path / "root", planted / "evil", planted / "canary")
    shutil.copytree(configured, made.root, symlinks=True)
    planted.mkdir()
    made.evil.write_text(f'#!/bin/sh\necho ${{0##*/}} >> {made.canary}\nexec cat "$@"\n')
    made.evil.chmod(0o755)
    return made


PLANTS = {
    "clean": {"filter.x.clean": "{evil}"},
    "process": {"filter.x.process": "{evil}"},
    "smudge": {"filter.x.clean": "{evil}", "filter.x.smudge": "{evil}", "filter.x.required": "true"},
    "external": {"diff.external": "{evil}"},
    "command": {"diff.x.command": "{evil}"},
    "textconv": {"diff.x.textconv": "{evil}"},
    "fsmonitor": {"core.fsmonitor": "{evil}"},
    "hooks": {"core.hooksPath": "{hooks}"},
    "signature": {"gpg.program": "{evil}", "log.showSignature": "true"},
    "format": {"gpg.program": "{evil}", "format.pretty": "%G? %s"},
    "fetch": {
        "remote.origin.url": "{root}", "remote.origin.uploadpack": "{evil}", "remote.origin.promisor": "true",
        "extensions.partialClone": "origin", "core.repositoryFormatVersion": "1",
    },
    "network": {
        "core.sshCommand": "{evil}", "core.gitProxy": "{evil}", "credential.helper": "{evil}", "core.pager": "{evil}",
        "core.editor": "{evil}", "alias.status": "!{evil}", "pager.log": "{evil}",
    },
}  # fmt: skip
MORE_PLANTS = {"merge": {"merge.x.driver": "{evil} %A"}, "none": {}}
"""What only some options of these commands start."""
INERT = {"network"}
"""What git itself does not run for these commands, without a terminal."""


def plant(foreign: Foreign, name: str, *options: str, cwd: str = ".") -> None:
    hooks = foreign.evil.with_name("hooks")
    hooks.mkdir(exist_ok=True)
    if not (hooks / "post-index-change").exists():
        (hooks / "post-index-change").symlink_to(foreign.evil)
    for key, value in {**PLANTS, **MORE_PLANTS}[name].items():
        foreign.git("config", *options, key, value.format(evil=foreign.evil, hooks=hooks, root=foreign.root), cwd=cwd)


def lose_a_blob(foreign: Foreign) -> None:
    blob = foreign.git("rev-parse", "HEAD:a.txt")
    (foreign.root / ".git/objects" / blob[:2] / blob[2:]).unlink()


@pytest.mark.deep
@pytest.mark.spec("reliability:PM14")
@pytest.mark.parametrize("name", [name for name in PLANTS if name != "fetch"])
async def test_read_only_git_command_runs_no_program_of_the_repository(foreign: Foreign, name: str) -> None:
    plant(foreign, name)
    shown = [await foreign.shell(command) for command in LOOKS]

    assert foreign.ran() == []
    assert "modified:   a.txt" in shown[0]
    assert "+behind" in shown[1]
    assert all("+before" in text for text in shown[2:4])

    os.utime(foreign.root / ".gitattributes", (1, 1))  # so that git has an index to write, which a hook is told of
    for command in LOOKS:
        foreign.git(*command.split()[1:])
    assert bool(foreign.ran()) == (name not in INERT)


OPTIONS = [
    ("external", "git diff --ext-diff"),
    ("external", "git log -p --ext-diff"),
    ("command", "git diff --no-ext-diff --ext-diff HEAD"),
    ("textconv", "git diff --textconv"),
    ("textconv", "git blame --textconv a.txt"),
    ("textconv", "git grep --textconv b"),
    ("textconv", "git status -v -v"),
    ("clean", "git status --ignore-submodules=none"),
    ("clean", "git diff --ignore-submodules=none"),
    ("external", "git log -p --submodule=diff"),
    ("merge", "git log -p --remerge-diff"),
    ("merge", "git show --diff-merges=remerge"),
    ("merge", "git show --diff-merges r"),
    ("merge", "git -c log.diffMerges=remerge log -m -p"),
    ("none", "git -c include.path={root}/more diff"),
    ("none", "git -c includeIf.gitdir:**.path={root}/more status"),
]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:PM14")
@pytest.mark.parametrize(("name", "command"), OPTIONS, ids=[command for _, command in OPTIONS])
async def test_read_only_git_runs_no_repository_program_by_any_option(
    foreign: Foreign, name: str, command: str
) -> None:
    foreign.git("commit", "-q", "-a", "-m", "second", cwd="sub")
    branch = foreign.git("branch", "--show-current")
    foreign.git("checkout", "-q", "-f", "-b", "other")
    for place, text in ((branch, "ours\n"), ("other", "theirs\n")):
        foreign.git("checkout", "-q", "-f", place)
        (foreign.root / "a.txt").write_text(text)
        (foreign.root / ".gitattributes").write_text("* filter=x diff=x merge=x\n")
        foreign.git("commit", "-q", "-a", "-m", place)
    foreign.git("merge", branch)
    (foreign.root / "a.txt").write_text("both\n")
    foreign.git("commit", "-q", "-a", "-m", "merged")
    for folder in (".", "sub"):
        (foreign.root / folder / "a.txt").write_text("before\n")  # as long as it was: git has to look inside
    (foreign.root / "more").write_text(f'[filter "x"]\nclean = {foreign.evil}\n[core]\nfsmonitor = {foreign.evil}\n')
    plant(foreign, name, cwd="sub" if "submodule" in command else ".")
    words = command.format(root=foreign.root).split()
    await ToolRegistry(shell_tools(foreign.root)).execute("run_terminal_command", {"command": words})

    assert foreign.ran() == []
    foreign.git(*words[1:])
    assert foreign.ran()


@pytest.mark.spec("reliability:PM14")
async def test_git_options_that_start_programs_are_refused_by_name(foreign: Foreign) -> None:
    tools = ToolRegistry(shell_tools(foreign.root))
    refused = await tools.execute("run_terminal_command", {"command": "git diff --ext-diff"})
    fine = await tools.execute("run_terminal_command", {"command": "git diff --text --submodule=log -- --ext-diff"})

    assert (True, False) == (refused.is_error, fine.is_error)
    assert "its option '--ext-diff' may start programs" in refused.text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:PM14")
async def test_missing_objects_of_a_partial_clone_are_not_fetched(foreign: Foreign) -> None:
    plant(foreign, "fetch")
    lose_a_blob(foreign)
    tools = ToolRegistry(shell_tools(foreign.root))
    for command in LOOKS:
        await tools.execute("run_terminal_command", {"command": command}, ToolContext.for_test())

    assert foreign.ran() == []
    foreign.git("show")
    assert foreign.ran()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:PM14")
@pytest.mark.parametrize("where", ["include", "worktree", "submodule", "elsewhere", "options"])
async def test_repository_programs_stay_unused_wherever_they_are_configured(foreign: Foreign, where: str) -> None:
    commands: list[list[str]] = [["git", "status"], ["git", "diff"]]
    if where == "include":
        plant(foreign, "clean", "--file", "more")
        foreign.git("config", "includeIf.gitdir:**.path", str(foreign.root / "more"))
    elif where == "worktree":
        foreign.git("config", "extensions.worktreeConfig", "true")
        plant(foreign, "clean", "--worktree")
    elif where == "submodule":
        plant(foreign, "clean", cwd="sub")
        foreign.git("config", "diff.submodule", "diff")
        foreign.git("config", "status.submoduleSummary", "true")
        foreign.git("config", "submodule.sub.ignore", "none")
    elif where == "elsewhere":
        plant(foreign, "clean", cwd="sub")
        commands = [["git", "-C", "sub", "--no-pager", "status"], ["git", "--no-pager", "-C", "sub", "diff"]]
    else:
        plant(foreign, "clean")
        commands = [["git", f"--git-dir={foreign.root}/.git", "--work-tree", str(foreign.root), "status"]]
    for command in commands:
        await foreign.shell(command)

    assert foreign.ran() == []
    for command in commands:
        foreign.git(*command[1:])
    assert foreign.ran()


@pytest.mark.spec("reliability:PM14")
async def test_a_filter_name_of_arbitrary_bytes_is_overridden(foreign: Foreign) -> None:
    name = "\u00e9.b=c".encode("latin-1")
    with (foreign.root / ".git/config").open("ab") as config:
        config.write(b'[filter "' + name + b'"]\nclean = ' + bytes(foreign.evil) + b"\n")
    (foreign.root / ".gitattributes").write_bytes(b"* filter=" + name + b"\n")
    await foreign.shell("git status")

    assert foreign.ran() == []
    foreign.git("status")
    assert foreign.ran()


@pytest.mark.spec("reliability:PM14")
async def test_git_command_that_writes_keeps_the_filters_of_the_repository(foreign: Foreign) -> None:
    """Without its filter a file would be stored as it must not be: unencrypted, or large."""
    plant(foreign, "clean")
    plant(foreign, "hooks")
    await foreign.shell("git add a.txt")
    assert set(foreign.ran()) == {"evil"}


@pytest.mark.usefixtures("soon")
@pytest.mark.spec("reliability:PM14")
@pytest.mark.parametrize("problem", ["broken", pytest.param("endless", marks=pytest.mark.deep), "many"])
async def test_read_only_git_command_is_refused_if_configuration_is_unreadable(
    foreign: Foreign, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = foreign.root / ".git/config"
    if problem == "broken":
        config.write_text("[filter\n")
    elif problem == "endless":
        monkeypatch.setattr(commands, "READ_SECONDS", 0.3)
        os.mkfifo(foreign.root / "more")
        foreign.git("config", "include.path", "../more")
    else:
        config.write_text(config.read_text() + "".join(f'[filter "x{n}"]\nclean = x\n' for n in range(1_001)))
    tools = ToolRegistry(shell_tools(foreign.root))
    result = await tools.execute("run_terminal_command", {"command": "git status"}, ToolContext.for_test())

    assert result.is_error
    assert "was not executed" in result.text
    said = {"broken": "bad config", "endless": "longer than 0.3 s", "many": "1,001"}
    assert said[problem] in result.text


def test_every_git_command_of_the_read_only_policy_is_recognized() -> None:
    forms = [form.prefix for form in READ_ONLY if form.prefix[0] == "git"]
    assert all(environment.parse_git_query(prefix) for prefix in forms)
    assert all(
        environment.parse_git_query(words) is None
        for words in [("git",), ("git", "commit"), ("git", "-C", "status"), ("ls",)]
    )


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root folder, and a user with a configuration of git that holds more than a name."""
    config = tmp_path / "gitconfig"
    config.write_text(
        "[user]\nname = Ada Lovelace\nemail = ada@example.com\nsigningkey = CANARY\n"
        '[credential]\nhelper = CANARY\n[url "CANARY"]\ninsteadOf = x\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


async def committed(root: Path) -> tuple[str, str]:
    """Commit with the shell tool; return who did, and the variables of the command."""
    tools = ToolRegistry(shell_tools(root, shell="bash"))
    script = "git init -q\necho a >a\ngit add a\ngit commit -qm a\ngit log --format='%an <%ae> %cn <%ce>'\n"
    lines = []
    for command in (script, "env; git config --list"):
        result = await tools.execute("run_terminal_command", {"command": command}, ToolContext.for_test())
        assert result.data["exit_code"] == 0, result.text
        lines.append(str(result.data["stdout"]).strip())
    return lines[0], lines[1]


@pytest.mark.spec("reliability:HP2")
async def test_a_commit_gets_only_the_users_name_and_address(
    person: Path,
) -> None:
    """
    In codebuff, whose commands see the real home folder, a commit has the same author.
    """
    codebuff = "Ada Lovelace <ada@example.com> Ada Lovelace <ada@example.com>"
    who, seen = await committed(person)

    assert who == codebuff
    assert "CANARY" not in seen


@pytest.mark.spec("reliability:HP2")
async def test_git_identity_of_the_repository_overrides_that_of_the_user(person: Path) -> None:
    own = "[core]\nrepositoryformatversion = 0\n[user]\nemail = ada@work.example\n"
    for folder in ("objects", "refs"):
        (person / ".git" / folder).mkdir(parents=True)
    (person / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (person / ".git" / "config").write_text(own)

    assert (await committed(person))[0] == "Ada Lovelace <ada@work.example> Ada Lovelace <ada@work.example>"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:HP2")
@pytest.mark.parametrize("folder", ["bin", "./bin", "root/../bin", ""])
async def test_the_git_of_a_project_never_reads_the_identity(
    person: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = person.parent
    for top, canary in ((here, ""), (person, f"echo >>{here}/canary\n")):
        for name in ("bin/git", "git"):
            (top / name).parent.mkdir(exist_ok=True)
            (top / name).write_text(f'#!/bin/sh\n{canary}exec {shutil.which("git")} "$@"\n')
            (top / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(here)

    assert (await committed(person))[0].startswith("Ada Lovelace")
    assert not (here / "canary").exists()


@pytest.mark.spec("reliability:HP2")
async def test_without_a_user_name_git_gets_no_author(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    tools = ToolRegistry(shell_tools(person))
    result = await tools.execute("run_terminal_command", {"command": "env"}, ToolContext.for_test())

    assert "GIT_AUTHOR" not in result.text
    assert "GIT_COMMITTER" not in result.text
