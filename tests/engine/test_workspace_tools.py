"""Agents get the bundled tools that they name from the engine's workspace, as far as it allows them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from stepengine import AgentDefinition, Engine, StepContext, Steps, ToolCall, Workspace, tool
from stepengine.errors import DefinitionError
from stepengine.journal import FileJournal
from stepengine.permissions import PolicyFile
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import file_tools
from stepengine.tools.makers import WORKSPACE_TOOLS

GIVEN = re.compile(r"pass the engine workspace=(.*?), with `(from [^`]+)`")
SEARXNG = "http://localhost:8080"
BY_OPTION: dict[str, dict[str, Any]] = {
    "": {},
    "write": {"write": True},
    "shell": {"shell": True},
    "web": {"web": SEARXNG},
}


def naming(*names: str) -> AgentDefinition:
    return AgentDefinition("worker", model="test/model", tools=names)


def refused(*names: str, **options: Any) -> str:
    with pytest.raises(DefinitionError) as caught:
        Engine([naming(*names)], **options)
    return caught.value.message


def workspace_in(message: str, **names: object) -> Workspace:
    """Return the workspace that the line of a message makes."""
    found = GIVEN.search(message)
    assert found is not None, message
    known: dict[str, Any] = {**names}
    exec(f"{found[2]}\nmade = {found[1]}", known)
    made = known["made"]
    assert isinstance(made, Workspace)
    return made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text("prices = {}\n")
    return tmp_path


@pytest.mark.spec("requirements:X14")
@pytest.mark.parametrize("option", BY_OPTION)
def test_each_workspace_option_gives_its_tools_and_no_others(option: str) -> None:
    given = [name for name, needed in WORKSPACE_TOOLS.items() if needed in ("", option)]
    others = [name for name in WORKSPACE_TOOLS if name not in given]
    place = Workspace(".", **BY_OPTION[option])

    with Engine([naming(*given)], workspace=place) as engine:
        assert "worker" == engine.agent("worker").id
    for name in others:
        assert f"'worker' lists the tool '{name}', which the engine does not have" in refused(name, workspace=place)


@pytest.mark.spec("requirements:X14")
@pytest.mark.parametrize("name", WORKSPACE_TOOLS)
def test_error_without_a_workspace_has_the_line_giving_the_tool(name: str) -> None:
    place = workspace_in(refused(name))

    assert BY_OPTION[WORKSPACE_TOOLS[name]] == {
        key: value for key in ("write", "shell", "web") if (value := getattr(place, key))
    }
    with Engine([naming(name)], workspace=place) as engine:
        assert "worker" == engine.agent("worker").id


@pytest.mark.spec("requirements:X14")
def test_error_of_a_restricted_workspace_keeps_its_restrictions(folder: Path) -> None:
    (folder / 'it\'s a "shop"').mkdir()
    place = Workspace('it\'s a "shop"', write=True, web="http://search.test")
    message = refused("write_file", "run_terminal_command", workspace=place)

    assert "lists the tool 'run_terminal_command', which" in message
    assert Workspace(place.root, write=True, shell=True, web="http://search.test") == workspace_in(message)
    lines = Workspace(folder, shell="bash")
    assert Workspace(folder, shell="bash", write=True) == workspace_in(refused("write_file", workspace=lines))


@pytest.mark.spec("requirements:X14", "reliability:HP3")
@pytest.mark.parametrize(("shell", "said"), [(True, 'Workspace(shell="bash")'), ("bash", "after")])
def test_a_workspace_with_bash_runs_command_lines(folder: Path, shell: Any, said: str) -> None:
    line = tool_call("run_terminal_command", {"command": "grep -q x /dev/null; echo after | cat"})
    place = Workspace(folder, shell=shell)
    with Engine([naming("run_terminal_command")], models=ScriptedModel([line, "Done."]), workspace=place) as engine:
        result = engine.run_sync("worker", "Go")

    (call,) = result.tool_calls
    assert (shell != "bash") is call.result.is_error
    assert said in call.result.text


@pytest.mark.spec("requirements:X14")
def test_workspace_tools_use_their_own_engines_folder(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "name.txt").write_text(name)
    asked = [
        tool_call("read_files", {"paths": ["name.txt"]}),
        tool_call("write_file", {"path": "new.txt", "content": "new"}),
        text("Done."),
    ]
    agent = naming("read_files", "write_file")
    with (
        Engine([agent], models=ScriptedModel(asked), workspace=Workspace("one", write=True)) as one,
        Engine([agent], models=ScriptedModel(asked), workspace=Workspace("two", write=True)) as two,
    ):
        results = [engine.run_sync("worker", "Go") for engine in (one, two)]

    assert ["one", "two"] == [result.tool_calls[0].result.data[0]["content"] for result in results]
    assert [True, True, False] == [(folder / name / "new.txt").exists() for name in ("one", "two", ".")]


@pytest.mark.spec("requirements:X14")
def test_folder_alone_allows_reading_tools(folder: Path) -> None:
    model = ScriptedModel([tool_call("code_search", {"pattern": "prices"}), text("Done.")])
    with Engine([naming("code_search")], models=model, workspace=folder) as engine:
        result = engine.run_sync("worker", "Go")

    assert 1 == result.tool_calls[0].result.data["count"]
    assert "write=True" in refused("str_replace", workspace=str(folder))


@pytest.mark.spec("requirements:X14")
def test_handler_and_tool_have_the_workspace_tools_they_name() -> None:
    @tool(uses=["list_directory"])
    def look() -> Steps[str]:
        """Look."""
        listed = yield from ToolCall("list_directory", {"path": "."})
        return listed.data["files"][0]

    def handle_steps(ctx: StepContext) -> Steps[object]:
        read = yield from ToolCall("read_files", {"paths": ["shop.py"]})
        looked = yield from ToolCall("look", {})
        return [read.data[0]["content"], looked.text]

    agent = AgentDefinition("worker", tools=["read_files", look], handle_steps=handle_steps)
    with Engine(workspace=".") as engine:
        assert ["prices = {}\n", "shop.py"] == engine.run_sync(agent).output
    with pytest.raises(DefinitionError, match="the tool 'look' of agent 'worker' uses 'list_directory'"):
        Engine([agent], file_tools(".")[:1])


@pytest.mark.spec("requirements:X14")
def test_tools_of_engine_or_agent_precede_those_of_the_workspace() -> None:
    @tool
    def read_files() -> str:
        """Read nothing."""
        return "mine"

    for options in ({"tools": [read_files]}, {}):
        agent = naming("read_files") if options else AgentDefinition("worker", model="test/model", tools=[read_files])
        model = ScriptedModel([tool_call("read_files", {}), text("Done.")])
        with Engine([agent], models=model, workspace=".", **options) as engine:
            assert "mine" == engine.run_sync("worker", "Go").tool_calls[0].result.text


@pytest.mark.spec("requirements:X14")
def test_workspace_is_opened_only_for_agents_naming_its_tools() -> None:
    wide, gone = Workspace("/"), Workspace.from_command(["false"], name="gone")
    for place in (wide, gone):
        with Engine([naming()], workspace=place) as engine:
            assert "worker" == engine.agent("worker").id

    assert re.fullmatch(
        "read_files cannot work in the engine's workspace: .* contains the home folder; name a project folder, such as .*",
        refused("read_files", workspace=wide),
    )
    with Engine([naming("sleep")], workspace=wide) as engine:
        assert "worker" == engine.agent("worker").id


@pytest.mark.spec("requirements:X14")
def test_a_place_elsewhere_has_the_tools_that_with_access_allows(folder: Path) -> None:
    with Workspace.from_command(["env"], folder, python=sys.executable) as place:
        message = refused("write_file", workspace=place)
        allowed = workspace_in(message, workspace=place)
        model = ScriptedModel([tool_call("write_file", {"path": "new.txt", "content": "n"}), text("Done.")])
        with Engine([naming("write_file")], models=model, workspace=allowed) as engine:
            engine.run_sync("worker", "Go")

    assert place.with_access(write=True) == allowed
    assert "n" == (folder / "new.txt").read_text()


@pytest.mark.spec("requirements:X14")
def test_policy_file_and_signing_key_are_unreachable_for_workspace_tools(folder: Path) -> None:
    (folder / "policy.json").write_text("{}")
    with pytest.raises(
        DefinitionError, match="the workspace of the engine has the tool 'write_file', which works in the"
    ):
        Engine([naming("write_file")], permissions=PolicyFile("policy.json"), workspace=Workspace(".", write=True))

    key = folder / "key"
    secret = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    key.write_bytes(secret)
    key.chmod(0o600)
    with (
        Engine([naming("read_files")], models=ScriptedModel(["Done."]), workspace=".") as engine,
        pytest.raises(DefinitionError, match="works in a folder with the signing key"),
    ):
        engine.run_sync("worker", "Go", journal=FileJournal(folder / "run.jsonl", sign=key))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"write": 1}, "Workspace(write=...) must be True or False, not 1"),
        (
            {"shell": None},
            'Workspace(shell=...) must be True for single programs, "bash" for command lines, or False, not None',
        ),
        (
            {"shell": "sh"},
            """Workspace(shell=...) must be True for single programs, "bash" for command lines, or False, not 'sh'""",
        ),
        ({"web": True}, "Workspace(web=...) must be text or None, not True"),
        ({"web": "localhost"}, "'localhost' is not the address of a search service"),
        ({"trusted": "README*"}, "patterns of files must be a list: expected a list, not 'README*'; write ['README*']"),
    ],
)
def test_invalid_workspace_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DefinitionError, match=re.escape(said)):
        Workspace(".", **options)
