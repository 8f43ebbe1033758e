"""
Whether code of a folder that somebody else made runs: only after a person trusted it, and it says what it did not run.
"""

from __future__ import annotations

import json
import os
import py_compile
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stepengine import AgentDefinition, Engine, load_agent, load_agents
from stepengine.cli import code_trust
from stepengine.cli.app import app
from stepengine.cli.screen import confirm
from stepengine.data.outcomes import Value
from stepengine.data.state import ChildResult
from stepengine.engine import trust, trust_folder
from stepengine.errors import DefinitionError
from stepengine.journal import FileJournal, MemoryJournal, records
from stepengine.workspace.environment import MARKER
from stepengine.workspace.user_state import get_user_state_folder
from tests.cli.command import command
from tests.cli.recordings import copy_recording, recording

AGENT = """\
from pathlib import Path
from stepengine import AgentDefinition
Path({ran!r}).touch()
def handle_steps(ctx):
    return ctx.prompt
    yield
agent = AgentDefinition({id!r}, handle_steps=handle_steps)
"""


@pytest.fixture(autouse=True)
def folders_are_trusted() -> None:
    """
    Nothing is, in place of what the other tests of commands have.
    """


class Place:
    """
    A working folder that somebody else made: `mine` and another `coder`, each of which leaves `ran` when it is loaded.
    """

    def __init__(self, path: Path, ran: Path) -> None:
        self.path, self.ran = path, ran

    def write(self, file: str, agent_id: str) -> Path:
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(AGENT.format(ran=str(self.ran), id=agent_id))
        return path

    def type(self, *words: str, code: int | None = None, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, list(words), input=stdin)
        assert code is None or code == result.exit_code, f"{result.exit_code}\n{result.output}"
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def handle_steps(ctx: Any) -> Any:
        return ctx.prompt
        yield

    path = tmp_path_factory.mktemp("journal") / "run.jsonl"
    with Engine([AgentDefinition("mine", handle_steps=handle_steps)]) as engine:
        engine.run_sync("mine", "Go.", journal=str(path)).unwrap()
    return path


@pytest.fixture
def place(tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path / "above/clone", tmp_path / "ran")
    made.path.mkdir(parents=True)
    (made.path / ".git").mkdir()
    made.write("agents/mine.py", "mine")
    made.write("agents/coder.py", "coder")
    shutil.copy(journal, made.path / "run.jsonl")
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(made.path)
    return made


# --- 900 attacks ------------------------------------------------------------------------------------------------------

COMMANDS = {
    "run an id": "run mine Go -q",
    "run a shipped id": "run coder Go -q",
    "run with a published id": "run somebody/coder@1.0.0 Go -q",
    "chat": "chat --plain",
    "agents": "agents list",
    "agents as a tree": "agents list --tree",
    "doctor": "config doctor",
    "replay": "replay run.jsonl -q",
    "resume": "resume run.jsonl -q",
    "debug": "debug run.jsonl --exec 'print ctx.prompt'",
    "show as a page": "show run.jsonl --html -o run.html --force",
    "impact": "compare impact run.jsonl",
    "test": "test run.jsonl",
    "test as JSON": "test run.jsonl --json",
    "extend": "resume run.jsonl --on-divergence extend -q",
    "fork": "fork run.jsonl --at -1 --into fork.jsonl -q",
    "pin": "compare pin run.jsonl --check 'status == completed'",
    "policy": "config policy policy.json --agent mine --against run.jsonl",
    "chat with it": "chat mine Hello --plain",
    "replay by id": "replay run.jsonl --agent mine",
    "resume by id": "resume run.jsonl --agent mine",
    "extend by id": "resume run.jsonl --on-divergence extend --agent mine -q",
    "debug by id": "debug run.jsonl --agent mine --exec 'print ctx.prompt'",
    "impact by id": "compare impact run.jsonl --agent mine",
    "pin by id": "compare pin run.jsonl --agent mine --check 'status == completed'",
    "chaos": "test --chaos mine --seed 1 -n 3",
    "chaos of a shipped id": "test --chaos coder --seed 1 -n 3",
    "import": "journal import run.jsonl --db postgresql://127.0.0.1:9/none",
    "import with the folder": "journal import run.jsonl --agents agents --db postgresql://127.0.0.1:9/none",
    "export": "journal export run-1 --db postgresql://127.0.0.1:9/none",
}


def _nothing(place: Place) -> None:
    """A plain clone."""


def _linked_folder(place: Place) -> None:
    place.path.joinpath("agents").rename(place.path / "elsewhere")
    place.path.joinpath("agents").symlink_to("elsewhere")


def _linked_file(place: Place) -> None:
    for name in ("mine", "coder"):
        place.path.joinpath(f"agents/{name}.py").rename(place.path / f"{name}_far.py")
        place.path.joinpath(f"agents/{name}.py").symlink_to(f"../{name}_far.py")


def _named_like_an_id(place: Place) -> None:
    """A file that is called like an id, without a suffix, beside a module of that name."""
    for name in ("mine", "coder"):
        place.path.joinpath(name).write_text("")
        place.write(f"{name}.py", name)


def _only_bytecode_is_bad(place: Place) -> None:
    """Bytecode in the cache says that it needs no check against the source."""
    for name in ("mine", "coder"):
        file = place.path / f"agents/{name}.py"
        py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True)
        file.write_text(f"from stepengine import AgentDefinition\nagent = AgentDefinition({name!r})\n")


def _settings(name: str, text: str) -> Callable[[Place], None]:
    def write(place: Place) -> None:
        place.path.joinpath("agents").rename(place.path / "more")
        place.path.joinpath(name).write_text(text)

    return write


def _relative_in_the_environment(place: Place) -> None:
    place.path.joinpath("agents").rename(place.path / "more")
    os.environ["STEPENGINE_AGENTS"] = "more"


def _record(place: Place, state: Path, **changes: Any) -> Path:
    real = (place.path / "agents").resolve()
    file = state / "trusted" / trust._make_record_file_name(real)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"path": str(real), "owner": real.stat().st_uid, **changes}))
    return file


def _state() -> Path:
    found = get_user_state_folder()
    assert found is not None
    return found


def _brings_its_state(place: Place) -> None:
    """The folder brings trust in itself, where the environment would look for it."""
    os.environ["STEPENGINE_STATE_DIR"] = ".state"
    _record(place, place.path / ".state")


def _brings_its_state_at_the_top(place: Place) -> None:
    os.environ["STEPENGINE_STATE_DIR"] = str(place.path / ".state")
    below = place.path / "packages/one"
    below.mkdir(parents=True)
    place.path.joinpath("agents").rename(below / "agents")
    shutil.copy("run.jsonl", below)
    os.chdir(below)
    place.path = below
    _record(place, Path(os.environ["STEPENGINE_STATE_DIR"]))


def _another_owner(place: Place) -> None:
    _record(place, _state(), owner=os.getuid() + 1)


def _another_path(place: Place) -> None:
    """A record that was moved: it stands under this folder's name and says another one."""
    _record(place, _state(), path=str(place.path / "other"))


def _others_write_the_state(place: Place) -> None:
    _record(place, _state())
    (_state() / "trusted").chmod(0o777)


def _above_is_trusted(place: Place) -> None:
    above = place.path.parent / "agents"
    above.mkdir()
    trust.trust_folder(above)


def _renamed_after_trust(place: Place) -> None:
    trust.trust_folder(place.path / "agents")
    moved = place.path.with_name("moved")
    place.path.rename(moved)
    os.chdir(moved)
    place.path = moved


def _linked_after_trust(place: Place) -> None:
    """What was trusted is replaced by a link to something else."""
    trust.trust_folder(place.path / "agents")
    _linked_folder(place)


def _made_a_project(place: Place) -> None:
    """Whoever makes a project in a clone trusts what that makes, and nothing that was there."""
    place.type("init", ".", code=0)
    place.path.joinpath("agents/todos.py").unlink()


def _in_a_trusted_folder(place: Place) -> None:
    """The folder is a link to one below a folder that is trusted."""
    own = place.path.parent / "own/agents"
    own.mkdir(parents=True)
    place.path.joinpath("agents").rename(own / "below")
    trust.trust_folder(own)
    place.path.joinpath("agents").symlink_to(own / "below")


def _put_in_place(place: Place) -> None:
    """What is trusted elsewhere is moved here, with what was trusted."""
    other = place.path.parent / "other"
    other.mkdir()
    place.path.joinpath("agents").rename(other / "agents")
    trust.trust_folder(other / "agents")
    (other / "agents").rename(place.path / "agents")


def _names_that_look_alike(place: Place) -> None:
    for name in ("Agents", "agents ", "agents\n", "agents.", "\u0430gents"):
        place.path.joinpath(name).mkdir()
        trust.trust_folder(place.path / name)


def _a_package(place: Place) -> None:
    for name in (
        "agents/__init__.py",
        "agents/_help.py",
        "conftest.py",
        "tests/conftest.py",
        "sitecustomize.py",
        "mine/__init__.py",
        "setup.py",
    ):
        place.write(name, "mine")


def _pipes_and_circles_in_it(place: Place) -> None:
    for name in ("agents/pipe.py", "agents/zz.py"):
        os.mkfifo(place.path / name)
    place.path.joinpath("agents/me.py").symlink_to("me.py")
    place.path.joinpath("agents/up").symlink_to("..")


def _servers_and_skills(place: Place) -> None:
    """Files that other programs, or agents, take for settings."""
    starts = json.dumps({"mcpServers": {"x": {"command": "touch", "args": [str(place.ran)]}}})
    for name in (".mcp.json", "mcp.json", ".stepengine/settings.json", ".agents/settings.json", ".cursor/mcp.json"):
        place.path.joinpath(name).parent.mkdir(exist_ok=True)
        place.path.joinpath(name).write_text(starts)
    place.path.joinpath(".env").write_text(f"STEPENGINE_STATE_DIR={place.path}/.state\nSTEPENGINE_AGENTS=agents\n")
    _record(place, place.path / ".state")
    skill = place.path / ".agents/skills/x/SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text(f"---\nname: x\ndescription: x\n---\n!`touch {place.ran}`\n")


def _the_journal_names_a_file(place: Place) -> None:
    place.path.joinpath("agents").rename(place.path / "far")
    journal = place.path / "run.jsonl"
    journal.write_text(journal.read_text().replace('"mine"', '"./far/mine.py"'))


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"path": 1, "owner": 0}', '{"path": "/a"}', '{"path": "/a", "owner": true}'],
)  # fmt: skip
def test_invalid_trust_record_trusts_nothing_and_hides_no_other(place: Place, text: str) -> None:
    good = place.path / "more"
    good.mkdir()
    trust.trust_folder(good)
    _record(place, _state()).write_text(text)

    assert not trust.is_trusted(place.path / "agents")
    assert [good.resolve()] == trust.list_trusted_folders()


ATTACKS: dict[str, Callable[[Place], None]] = {
    "a plain clone": _nothing,
    "a link for a folder": _linked_folder,
    "a link for a file": _linked_file,
    "a file called like an id": _named_like_an_id,
    "bytecode": _only_bytecode_is_bad,
    "stepengine.toml": _settings("stepengine.toml", 'agents = ["more"]\n'),
    "the environment": _relative_in_the_environment,
    "its own state": _brings_its_state,
    "its own state at the top": _brings_its_state_at_the_top,
    "another owner": _another_owner,
    "another path": _another_path,
    "others write the state": _others_write_the_state,
    "trust above": _above_is_trusted,
    "renamed": _renamed_after_trust,
    "replaced by a link": _linked_after_trust,
    "init": _made_a_project,
    "below a trusted one": _in_a_trusted_folder,
    "moved into place": _put_in_place,
    "names that look alike": _names_that_look_alike,
    "a package": _a_package,
    "pipes and circles in it": _pipes_and_circles_in_it,
    "servers and skills": _servers_and_skills,
    "a journal that names a file": _the_journal_names_a_file,
}
FAST = {attack: [*COMMANDS][number % 23 :: 23] for number, attack in enumerate(ATTACKS)}


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(
    ("attack", "commands"),
    [
        *[pytest.param(attack, some, id=attack) for attack, some in FAST.items()],
        *[pytest.param(attack, COMMANDS, id=f"{attack}, all commands", marks=pytest.mark.deep) for attack in ATTACKS],
    ],
)
def test_no_command_runs_untrusted_code(
    place: Place, attack: str, commands: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    All commands of an attack work in one folder, in which nothing may run.
    """
    monkeypatch.setenv("STEPENGINE_AGENTS", "")  # an attack sets it, and it is restored
    monkeypatch.delenv("STEPENGINE_AGENTS")
    place.path.joinpath("policy.json").write_text('{"version": 1, "rules": []}')
    ATTACKS[attack](place)
    for name in commands:
        place.type(*shlex.split(COMMANDS[name]), stdin="")
        assert not place.ran.exists(), name


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[] if name in ("run an id", "resume", "import") else pytest.mark.deep)
        for name in COMMANDS
    ],
)
def test_every_command_runs_trusted_code(place: Place, command: str) -> None:
    """
    The same commands, so that none of the attacks fails for another reason.
    """
    place.path.joinpath("policy.json").write_text('{"version": 1, "rules": []}')
    place.type("agents", "trust", code=0)
    place.type(*shlex.split(COMMANDS[command]), stdin="")

    assert place.ran.exists()


# --- what is said, and what trust is ----------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X72")
def test_untrusted_folder_is_named_with_both_ways_to_trust(place: Place) -> None:
    said = place.type("run", "mine", "Go", code=2).stderr
    content = trust.hash_folder(place.path / "agents")

    assert f"not run, because it is not trusted: '{place.path / 'agents'}' ('coder.py', 'mine.py')" in said
    assert f"stepengine agents trust {place.path}" in said
    assert f"--trust={content}" in said
    assert "Go\n" == place.type("run", "mine", "Go", "-q", f"--trust={content}", code=0).stdout
    assert not trust.is_trusted(place.path / "agents")


def test_trust_hint_is_quoted_for_any_folder_name(place: Place) -> None:
    """
    It is there to be copied.
    """
    odd = place.path.with_name("a; touch ran #$(touch ran)")
    place.path.rename(odd)
    os.chdir(odd)

    assert (
        f"Check its files, then run: stepengine agents trust {shlex.quote(str(odd))}\n"
        in place.type("agents", "list").stderr
    )


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(
    "change",
    [
        lambda agents: (agents / "mine.py").write_text("pass\n"),
        lambda agents: (agents / "mine.py").rename(agents / "other.py"),
        lambda agents: (agents / "helper.py").write_text(""),
        lambda agents: (agents / "coder.py").unlink(),
        lambda agents: ((agents / "lib").mkdir(), (agents / "lib/deep.py").write_text("")),
        lambda agents: (agents / "mine.pyc").write_bytes(b""),
        lambda agents: (agents / "data.json").write_text("{}"),
        lambda agents: (agents / "lib").symlink_to(".."),
    ],
    ids=["edited", "renamed", "added", "removed", "below", "bytecode", "data", "link"],
)
def test_trust_by_content_ends_with_any_change(place: Place, change: Callable[[Path], Any]) -> None:
    content = trust.hash_folder(place.path / "agents")
    change(place.path / "agents")
    place.type("run", "mine", "Go", f"--trust={content}", code=2)

    assert not place.ran.exists()


def test_folder_over_the_size_limit_is_trusted_only_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "MAX_CONTENT_BYTES", 10)
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("1 + 23")
    with pytest.raises(DefinitionError, match=r"more than .* 10 bytes, and can be trusted only by its path"):
        trust.hash_folder(tmp_path)


@pytest.mark.spec("requirements:X72")
def test_trusted_source_runs_in_place_of_its_bytecode(place: Place) -> None:
    _only_bytecode_is_bad(place)
    file = place.path / "agents/mine.py"
    file.write_text(AGENT.format(ran=str(place.path / "good"), id="mine"))
    content = trust.hash_folder(place.path / "agents")

    assert "Go\n" == place.type("run", "mine", "Go", "-q", f"--trust={content}", code=0).stdout
    assert (place.path / "good").exists()
    assert not place.ran.exists()


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("given", ["yes", "sha256:", "sha256:" + "0" * 63, "SHA256:" + "0" * 64, "sha256:" + "0" * 64])
def test_invalid_trust_hash_trusts_nothing(place: Place, given: str) -> None:
    assert "--trust is " in place.type("run", "mine", "Go", f"--trust={given}", code=2).stderr
    assert not place.ran.exists()


@pytest.mark.spec("requirements:X72")
def test_trusted_folder_may_change_until_forgotten(place: Place) -> None:
    assert place.type("agents", "trust", code=0).stdout.startswith(
        f"{place.path / 'agents'} is trusted: coder.py, mine.py\n"
    )
    place.write("agents/new.py", "new")
    assert [str(place.path / "agents")] == json.loads(place.type("agents", "trust", "--list", "--json").stdout)
    assert "Go\n" == place.type("run", "new", "Go", "-q", code=0).stdout
    assert "forgotten\n" == place.type("agents", "trust", "--forget", code=0).stdout
    assert "the folder was not trusted\n" == place.type("agents", "trust", "--forget", code=0).stdout

    place.type("run", "new", "Go", "-q", code=2)


@pytest.mark.spec("requirements:X72")
def test_trusted_local_agent_hides_a_bundled_one_with_a_warning(place: Place) -> None:
    foreign = json.loads(place.type("agents", "list", "--json").stdout)
    place.type("agents", "trust")
    told = place.type("run", "coder", "Go", "-q", code=0)

    assert not [each for each in foreign if str(place.path) in each["source"]]
    assert "Go\n" == told.stdout
    assert "the agent 'coder' is loaded from agents/coder.py, not from stepengine" in told.stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("is_trusted", [True, False], ids=["a trusted folder", "an empty folder"])
@pytest.mark.parametrize("agent_id", ["../evil", "../agents/../evil", "below/evil", "_evil", "/evil"])
def test_ids_lead_to_the_trusted_files_alone(place: Place, agent_id: str, is_trusted: bool) -> None:
    """Neither a typed id nor one that an agent names leads elsewhere, and a folder without agent files has none."""
    for name in ("mine", "coder"):
        place.path.joinpath(f"agents/{name}.py").unlink()
    for name in ("evil.py", "agents/below/evil.py", "agents/_evil.py"):
        place.write(name, "evil")
    agent_id = str(place.path / "evil") if agent_id == "/evil" else agent_id
    leads = f"AgentDefinition('leads', tools=['spawn_agents'], spawnable_agents=[{agent_id!r}])"
    for name in ("agents/leads.py", "far/leads.py") if is_trusted else ("far/leads.py",):
        place.write(name, "leads").write_text(f"from stepengine import AgentDefinition\nagent = {leads}\n")
    place.type("agents", "trust", code=0 if is_trusted else None)
    for named in (agent_id, "leads", "./far/leads.py"):
        place.type("run", named, "Go", "-q", "--no-journal", code=2)

    assert not place.ran.exists()


@pytest.mark.spec("requirements:X72")
def test_file_given_by_path_needs_no_trust(place: Place) -> None:
    assert "Go\n" == place.type("run", "agents/mine.py", "Go", "-q", code=0).stdout
    assert not trust.is_trusted(place.path / "agents")


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 2), ("\n", 2), ("", 2)])
def test_a_person_at_a_terminal_is_asked_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr(code_trust, "can_ask_at_terminal", lambda: True)
    first = place.type("run", "mine", "Go", "-q", stdin=answer, code=code)
    second = place.type("run", "mine", "Go", "-q", stdin="n\n", code=code)

    assert "is not trusted" in first.stderr
    assert (code != 0) == ("is not trusted" in second.stderr)
    assert (code == 0) == place.ran.exists()


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("marker", ["", "0" * 32])
def test_a_command_of_a_tool_asks_for_no_confirmation(monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    stream = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(confirm, "sys", SimpleNamespace(stdin=stream, stderr=stream))
    monkeypatch.setenv(MARKER, marker)

    assert confirm.can_ask_at_terminal() == (not marker)


@pytest.mark.spec("requirements:X72")
def test_the_question_names_every_agent_file_and_their_number_last(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not shown would run after the answer, too."""
    monkeypatch.setattr(code_trust, "can_ask_at_terminal", lambda: True)
    for number in range(30):
        place.write(f"agents/a{number:02}.py", f"a{number:02}")
    place.write("agents/zz\x1b[2K_evil.py", "evil")
    asked = place.type("run", "mine", "Go", "-q", stdin="n\n", code=2).stderr.partition("[y/N]")[0]

    assert all(f"'a{number:02}.py'" in asked for number in range(30))
    assert "_evil.py" in asked
    assert "\x1b" not in asked
    assert "33 agent files" in asked.partition("_evil.py")[2]


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(
    "words",
    [
        ("agents", "trust"),
        ("agents", "trust", "--forget"),
        ("run", "mine", "Go", "--trust=sha256:" + "0" * 64),
        ("resume", "run.jsonl", "--answer", "q0=yes"),
        ("resume", "run.jsonl", "--trust-journal"),
        ("resume", "run.jsonl", "--on-divergence", "extend", "--trust-journal"),
        ("replay", "run.jsonl", "--live", "tool_call", "--trust-journal"),
        ("fork", "run.jsonl", "--at", "-1", "--answer", "q0=yes"),
        ("resume", "run.jsonl", "--on-divergence", "extend", "--answer", "q0=yes"),
        ("send", "run-1", "--answer", "q0=yes", "--db", "postgresql://127.0.0.1:9/none"),
        ("send", "run-1", "Go on", "--db", "postgresql://127.0.0.1:9/none"),
    ],
)
def test_commands_for_people_are_rejected_inside_a_tool(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv(MARKER, "0" * 32)
    before = place.path.joinpath("run.jsonl").read_bytes()
    said = place.type(*words, code=2)

    assert "is only for people, and a tool of an agent called it" in said.stderr
    assert before == place.path.joinpath("run.jsonl").read_bytes()
    assert not trust.is_trusted(place.path / "agents")


def test_trust_folder_is_rejected_inside_a_tool(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARKER, "0" * 32)

    with pytest.raises(DefinitionError, match="trust_folder is only for people, and a tool of an agent called it"):
        trust_folder(place.path / "agents")
    assert not trust.is_trusted(place.path / "agents")


def test_missing_folder_cannot_be_trusted(place: Place) -> None:
    with pytest.raises(DefinitionError, match=r"there is no folder '.*nowhere' of agent files; create it"):
        trust_folder(place.path / "nowhere")
    assert (
        "there is no folder 'nowhere/agents' of agent files" in place.type("agents", "trust", "nowhere", code=2).stderr
    )


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X72")
def test_program_loads_local_agents_only_beside_its_own_code(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """
    Its main file lies there, Python imports from there, or tests run; nothing is gained by asking then.
    """
    path = [entry for entry in sys.path if entry and Path(entry).resolve() != place.path]
    main = sys.modules["__main__"]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "tool.py"), raising=False)
    assert load_agent("mine") is not None
    monkeypatch.delitem(sys.modules, trust.PLUGIN)
    trust._RAN.clear()
    with pytest.raises(DefinitionError, match=r"Not searched, because it is not trusted.*stepengine agents trust"):
        load_agent("mine")
    assert load_agent("coder").description
    monkeypatch.setattr(sys, "path", [*path, ""])
    assert "mine" == load_agent("mine").id
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(main, "__file__", str(place.path / "scripts/tool.py"), raising=False)
    assert "mine" == load_agent("mine").id
    monkeypatch.setattr(main, "__file__", str(tmp_path / "tool.py"), raising=False)
    assert ["coder", "mine"] == [agent.id for agent in load_agents("agents")]
    assert "mine" == load_agent("mine", folders=[place.path / "agents"]).id
    assert "mine" == load_agent(place.path / "agents/mine.py").id
    assert "mine" == load_agent("mine").id


# --- journals ---------------------------------------------------------------------------------------------------------

PAYER = """\
from stepengine import AgentDefinition, ToolCall, tool

@tool(category="write")
def pay(x: int) -> str:
    '''Pay.'''
    with open("paid.txt", "a") as file:
        file.write(f"{x};")
    return "paid"

def handle_steps(ctx):
    yield ToolCall("pay", {"x": 1})
    yield ToolCall("pay", {"x": 2})

agent = AgentDefinition("payer", tools=[pay], handle_steps=handle_steps)
"""


def _paid(place: Place) -> str:
    file = place.path / "paid.txt"
    return file.read_text() if file.exists() else ""


def without_macs(lines: list[bytes]) -> MemoryJournal:
    """Return a journal with these lines as somebody writes it who has not the user's key."""
    journal = MemoryJournal(lines)
    journal.macs = "none"
    return MemoryJournal(journal.lines())


RULES = '[permissions]\nversion = 1\nmode = "default"\nrules = []\n'


def write_settings() -> None:
    config = Path(os.environ["XDG_CONFIG_HOME"], "stepengine/config.toml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(RULES)


@pytest.fixture(scope="module")
def paying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A folder with an agent that pays twice, a run that was answered once, and a journal that ends with the yes, as a forger's would.
    """
    folder = tmp_path_factory.mktemp("paying")
    with recording(folder):
        write_settings()
        Path("payer.py").write_text(PAYER)
        command("run", "payer.py", "Go", "--journal", "whole.jsonl", "-q", code=3)
        command("resume", "whole.jsonl", "--agent", "payer.py", "--answer", "q0=yes", "-q", code=3)
        assert "1;" == Path("paid.txt").read_text()
        Path("paid.txt").unlink()
        lines = FileJournal("whole.jsonl").lines()
        yes = next(number for number, line in enumerate(lines) if b'"answer"' in line)
        cut = without_macs(lines[: yes + 1])
        cut.copy_to(FileJournal("cut.jsonl"))
        end = records.Result("", -1, 99, Value(ChildResult(agent_id="payer", run_id=cut.records()[0].run), 99))
        FileJournal("ended.jsonl").replace([*cut.records(), end])
    return folder


@pytest.fixture
def payer(place: Place, paying: Path) -> Place:
    """
    A copy of that folder, under settings that ask.
    """
    write_settings()
    copy_recording(paying, place.path)
    return place


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("resume", "cut.jsonl"), 3, "q0 is asked again"),
        (("resume", "cut.jsonl", "--on-divergence", "extend"), 3, "q0 is asked again"),
        (("fork", "cut.jsonl", "--at", "0"), 2, "(q0) would allow calls that you did not approve"),
        (("fork", "whole.jsonl", "--at", "0", "--allow-repeat"), 2, "(q0) would allow calls that you did not approve"),
        (("fork", "cut.jsonl", "--at", "0", "--edit", "no"), 3, ""),
        (
            ("fork", "whole.jsonl", "--tools", "working-copy"),
            2,
            "its approvals would allow calls that you did not approve",
        ),
        (("resume", "ended.jsonl", "--on-divergence", "extend"), 3, "--answer q0=TEXT"),
        (("replay", "whole.jsonl", "--live", "tool_call"), 1, "nobody here allowed; a replay asks nobody"),
    ],
    ids=[
        "resume",
        "extend",
        "fork",
        "fork of more",
        "fork that says it anew",
        "fork that performs what is not recorded",
        "extend of an end",
        "replay that does it",
    ],
)
def test_self_approving_journal_runs_nothing(payer: Place, words: tuple[str, ...], code: int, said: str) -> None:
    # Somebody else's: nothing here knows it.
    os.environ["STEPENGINE_STATE_DIR"] += "-of-another"
    told = payer.type(*words, "--agent", "payer.py", "-q", code=code)

    assert said in told.stderr
    assert "" == _paid(payer)


@pytest.mark.spec("requirements:X72")
def test_self_approving_journal_is_not_imported_without_consent(payer: Place) -> None:
    words = ("journal", "import", "cut.jsonl", "--agents", "payer.py", "--db", "postgresql://127.0.0.1:9/none")

    assert "(q0) would allow calls that you did not approve" in payer.type(*words, code=2).stderr
    assert "nobody here allowed" not in payer.type(*words, "--trust-journal").stderr
    assert "" == _paid(payer)


@pytest.mark.spec("requirements:X72")
def test_foreign_journal_with_a_started_call_is_not_imported(payer: Place) -> None:
    lines = FileJournal("whole.jsonl").lines()
    begun = next(number for number, line in enumerate(lines) if b'"effect":{"type":"tool_call"' in line)
    payer.path.joinpath("begun.jsonl").write_bytes(b"".join(lines[: begun + 1]))
    words = ("journal", "import", "begun.jsonl", "--agents", "payer.py", "--db", "postgresql://127.0.0.1:9/none")
    asked = "would run calls that you did not request or approve"

    assert asked not in payer.type(*words).stderr
    os.environ["STEPENGINE_STATE_DIR"] += "-of-another"
    assert asked in payer.type(*words, code=2).stderr
    assert asked not in payer.type(*words, "--trust-journal").stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X72")
def test_trust_journal_accepts_recorded_approvals(payer: Place) -> None:
    payer.type("resume", "cut.jsonl", "--agent", "payer.py", "--trust-journal", "-q", code=3)
    payer.type(
        "resume", "ended.jsonl", "--on-divergence", "extend", "--agent", "payer.py", "--trust-journal", "-q", code=3
    )
    payer.type("replay", "whole.jsonl", "--agent", "payer.py", "--live", "tool_call", "--trust-journal", "-q", code=3)

    assert "1;1;1;" == _paid(payer)
