"""
Commands in the terminals of an editor: what is run there, what it gives, and what is not run there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine
from stepengine.errors import DefinitionError, ToolError
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools.bundled import shell_tools
from stepengine.workspace.terminals import TerminalResult

pytestmark = pytest.mark.spec("interfaces:IF52")


def is_there(path: str) -> bool:
    return Path(path).exists()


class Editor:
    """
    An editor whose terminals give what they are told to, and which keeps what was run in them.
    """

    def __init__(self, gives: TerminalResult | ToolError | None) -> None:
        self.gives = gives
        self.ran: list[tuple[list[str], dict[str, Any]]] = []

    async def run(self, argv: Any, **about: Any) -> TerminalResult | None:
        assert is_there(about["env"]["HOME"])
        self.ran.append((list(argv), about))
        if isinstance(self.gives, ToolError):
            raise self.gives
        return self.gives


async def called(root: Path, editor: Editor, *inputs: dict[str, Any], **options: Any) -> list[Any]:
    bot = AgentDefinition("bot", model="m/m", tools=["run_terminal_command"])
    calls = [tool_call("run_terminal_command", given) for given in inputs]
    async with Engine(
        [bot], shell_tools(root, terminals=editor, **options), ScriptedModel([*calls, "Done."])
    ) as engine:
        result = await engine.run(bot, "go")
    return [message.result for message in result.state.message_history if message.role == "tool"]


async def test_a_terminal_command_gets_the_usual_folder_environment_and_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SECRET", "x")
    (tmp_path / "docs").mkdir()
    editor = Editor(TerminalResult(output="hello\n", code=3))
    (result,) = await called(tmp_path, editor, {"command": ["echo", "a b"], "cwd": "docs", "timeout_seconds": 7})
    ((argv, about),) = editor.ran

    assert ("echo", ["a b"]) == (Path(argv[0]).name, argv[1:])
    assert Path(argv[0]).is_absolute()
    assert (str((tmp_path / "docs").resolve()), 7.0, "", "c1") == tuple(
        about[name] for name in ("cwd", "seconds", "path", "call_id")
    )
    assert not {"OWN_SECRET"} & about["env"].keys()
    assert not is_there(about["env"]["HOME"])
    told = dict(result.data)
    assert 0 <= told.pop("duration_seconds")
    assert {"command": "echo 'a b'", "exit_code": 3, "stdout": "hello\n", "truncated": False} == told


@pytest.mark.parametrize(
    ("ran", "wanted"),
    [
        (
            TerminalResult(output="a", in_time=False, signal="SIGKILL"),
            {"is_error": True, "truncated": False, "signal": "SIGKILL"},
        ),
        (TerminalResult(output="a", is_cut=True, code=0), {"is_error": False, "truncated": True}),
        (TerminalResult(output="a\n" * 60_000, code=0), {"is_error": False, "truncated": True}),
    ],
)
async def test_timeout_and_cut_output_of_a_terminal_are_reported(
    tmp_path: Path, ran: TerminalResult, wanted: dict[str, Any]
) -> None:
    (result,) = await called(tmp_path, Editor(ran), {"command": ["echo"]})

    assert wanted == {"is_error": result.is_error, **{k: v for k, v in result.data.items() if k in wanted}}
    assert ("longer than 30 s" in result.data.get("message", "")) == (not ran.in_time)
    assert len(result.text) <= 100_000


async def test_scripts_jobs_and_declined_commands_run_in_own_processes(
    tmp_path: Path,
) -> None:
    editor = Editor(None)
    script, job, own = await called(
        tmp_path, editor, {"command": "echo a | cat"}, {"command": ["sleep", "60"], "process_type": "BACKGROUND"}, {"command": ["echo", "b"]},
        shell="bash",
    )  # fmt: skip

    assert ("a\n", "b\n") == (script.data["stdout"], own.data["stdout"])
    assert "job_id" in job.data
    assert [["b"]] == [argv[1:] for argv, _ in editor.ran]


async def test_failures_of_an_editor_terminal_are_tool_errors(
    tmp_path: Path,
) -> None:
    editor = Editor(ToolError("the editor did not run it"))
    refused, missing, outside = await called(
        tmp_path, editor, {"command": ["echo"]}, {"command": ["no-such-program"]}, {"command": ["echo"], "cwd": ".."}
    )

    assert "the editor did not run it" in refused.text
    assert "no program of that name" in missing.text
    assert outside.is_error
    assert 1 == len(editor.ran)


@pytest.mark.parametrize(
    "options", [{"limits": {"processes": 5}}, {"runner": lambda launch: launch}, {"sandbox": True}]
)
def test_options_without_effect_in_a_terminal_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match="have no effect in an editor's terminals"):
        shell_tools(tmp_path, terminals=Editor(None), **options)
