"""``propose_write_file`` and ``propose_str_replace``: diffs that stack within a run and change nothing on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, StepContext, Steps, ToolCall
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import file_tools

NAMES = ("propose_write_file", "propose_str_replace", "read_files")


def replace(path: str, old: str, new: str) -> Any:
    return tool_call("propose_str_replace", {"path": path, "replacements": [{"old_string": old, "new_string": new}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_bytes(b"one\r\ntwo\r\n")
    return tmp_path


def engine_with(folder: Path, *replies: Any) -> Engine:
    return Engine(
        [AgentDefinition("proposer", model="test/model", tools=NAMES)],
        file_tools(folder, propose=True),
        ScriptedModel(replies),
    )


@pytest.mark.spec("generator-contract:T8", "generator-contract:T6")
async def test_proposals_stack_within_a_run_and_write_nothing(folder: Path) -> None:
    new = tool_call("propose_write_file", {"path": "sub/new.py", "content": "x = 1\n"})
    first = tool_calls(replace("a.py", "one", "1"), replace("a.py", "1", "uno"), new)
    async with engine_with(folder, first, replace("a.py", "uno\ntwo", "all"), text("done")) as engine:
        result = await engine.run("proposer", "go")

    diffs = [call.result.data for call in result.tool_calls]
    assert [d["file"] for d in diffs] == ["a.py", "a.py", "sub/new.py", "a.py"]  # type: ignore[index,call-overload]
    assert diffs[1]["unified_diff"].startswith("--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n-1\r\n+uno\r\n")  # type: ignore[index,call-overload,union-attr]
    assert "@@ -0,0 +1 @@\n+x = 1" in diffs[2]["unified_diff"]  # type: ignore[index,call-overload,operator]
    assert "-uno\r\n-two\r\n+all\r\n" in diffs[3]["unified_diff"]  # type: ignore[index,call-overload,operator]
    assert b"one\r\ntwo\r\n" == (folder / "a.py").read_bytes()
    assert not (folder / "sub").exists()
    assert "nothing was written" in diffs[0]["message"]  # type: ignore[index,call-overload,operator]


@pytest.mark.spec("generator-contract:T8")
async def test_proposals_are_forgotten_when_the_run_ends(folder: Path) -> None:
    async with engine_with(
        folder, replace("a.py", "one", "1"), text("a"), replace("a.py", "two", "2"), text("b")
    ) as engine:
        first = await engine.run("proposer", "go")
        second = await engine.run("proposer", "more", previous=first.state)

    assert " one\r\n-two\r\n+2\r\n" in second.tool_calls[0].result.data["unified_diff"]  # type: ignore[index,call-overload,operator]
    assert 1 == len([name for name in second.state.context if name.startswith("proposed:")])


@pytest.mark.spec("generator-contract:T8")
async def test_proposals_replay_without_files_and_fork_with_their_state(folder: Path) -> None:
    def handle_steps(ctx: StepContext) -> Steps[list[str]]:
        diffs = []
        for old, new in (("one", "1"), ("1", "uno"), ("uno", "un")):
            done = yield from ToolCall(
                "propose_str_replace", {"path": "a.py", "replacements": [{"old_string": old, "new_string": new}]}
            )
            diffs.append(done.data["unified_diff"])
        return diffs

    agent = AgentDefinition("proposer", tools=NAMES, handle_steps=handle_steps)
    journal = MemoryJournal()
    async with Engine([agent], file_tools(folder, propose=True)) as engine:
        result = await engine.run("proposer", journal=journal)
        (folder / "a.py").unlink()
        assert (await engine.replay(journal)).output == result.output
        (folder / "a.py").write_text("something else")
        cut = await engine.fork(journal, at="#2")
    assert result.unwrap()[2] == cut.unwrap()[2]


@pytest.mark.spec("generator-contract:T8", "reliability:FP4", "reliability:FP1")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        (".env", "may hold secrets"),
        (".git/hooks/x", "protected"),
        ("link/x", "symbolic link"),
        (".", "root folder itself"),
        ("binary", "no text"),
    ],
)
async def test_a_path_that_cannot_be_written_cannot_be_proposed(folder: Path, path: str, why: str) -> None:
    (folder / "link").symlink_to("/tmp")
    (folder / "binary").write_bytes(b"\xff\xfe\xff\x00\xd8")
    content = tool_call("propose_write_file", {"path": path, "content": "x"})
    async with engine_with(folder, tool_calls(content, replace(path, "a", "b")), text("done")) as engine:
        result = await engine.run("proposer", "go")

    assert all(call.is_error and why in call.result.text for call in result.tool_calls), result.tool_calls


@pytest.mark.spec("generator-contract:T8", "reliability:FP5")
async def test_proposals_have_a_size_limit(folder: Path) -> None:
    big = [tool_call("propose_write_file", {"path": f"{n}.txt", "content": "é" * 1_500_000}) for n in range(3)]
    huge = tool_call("propose_write_file", {"path": "huge.txt", "content": "x" * 4_194_305})
    async with engine_with(folder, *big, huge, text("done")) as engine:
        result = await engine.run("proposer", "go")

    assert [call.is_error for call in result.tool_calls] == [False, False, True, True]
    assert "at most 8,388,608 are kept" in result.tool_calls[2].result.text
