"""One cap for the depth of values, when they are written and when they are read: an error names the record."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stepengine import AgentCall, AgentDefinition, Engine, Limits, Tool, ToolCall
from stepengine.cli.app import app
from stepengine.data.json import MAX_DEPTH_LEVELS, compact, is_nested_deeper, is_text_nested_deeper
from stepengine.errors import DataError, InputError
from stepengine.journal import FileJournal, check
from stepengine.testing import ScriptedModel
from tests import strategies
from tests.journal.mutants import resealed
from tests.journal.test_reading_limit import FP, HEAD, written

COMMANDS = [["show"], ["show", "--json"], ["show", "--html", "-o", "PAGE"], ["journal", "check"]]


def invoke(command: list[str], *paths: Path) -> Any:
    """Invoke a command with journals; a page is written beside the first."""
    words = [str(paths[0].with_name("p.html")) if word == "PAGE" else word for word in command]
    return CliRunner().invoke(app, [*words, *map(str, paths)])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def recorded(path: Path, value: Any, params: Any = "mark") -> Path:
    def handle_steps(ctx: Any) -> Any:
        yield ToolCall("shout", {"text": value})
        return "done"

    shout = Tool(name="shout", description="Shout.", input_schema={"type": "object"}, run=lambda _: "HI")
    agent = AgentDefinition("desk", system_prompt="You help.", tools=[shout], handle_steps=handle_steps)
    async with Engine([agent], models=ScriptedModel([])) as engine:
        await engine.run("desk", "Hi", params={"p": [params]}, journal=FileJournal(path, link=False))
    return path


def deepened(path: Path, mark: str, depth: int) -> Path:
    """Put a deep value in place of a mark, with right checksums."""
    deep = path.read_bytes().replace(b'["%s"]' % mark.encode(), b"[" * depth + b"1" + b"]" * depth)
    path.write_bytes(resealed(deep, link=False))
    return path


@pytest.mark.spec("replay:J51")
@pytest.mark.parametrize(
    ("command", "mark", "record", "depth"),
    [
        *[(COMMANDS[0], "input", "record 3", depth) for depth in (400, 900, 100_000)],
        *[(command, "mark", "record 2", 400) for command in COMMANDS],
    ],
)
async def test_too_deep_journal_is_rejected_by_record_number(
    tmp_path: Path, depth: int, mark: str, record: str, command: list[str]
) -> None:
    path = deepened(await recorded(tmp_path / "run.jsonl", ["input"]), mark, depth)

    result = invoke(command, path)

    said = " ".join((result.stdout + result.stderr).split())
    assert result.exit_code in (1, 2), said
    assert record in said
    assert "nested deeper than 232 levels" in said
    assert not isinstance(result.exception, RecursionError)


@pytest.mark.spec("replay:J51")
async def test_value_of_maximum_depth_is_written_and_read(tmp_path: Path) -> None:
    path = await recorded(tmp_path / "run.jsonl", nested(MAX_DEPTH_LEVELS - 2))

    assert check(FileJournal(path))
    for command in COMMANDS:
        result = invoke(command, path)
        assert 0 == result.exit_code, (command, result.stderr)


@pytest.mark.spec("replay:J51")
@pytest.mark.parametrize("depth", [201, 100_000])
async def test_too_deep_params_are_rejected_before_recording(tmp_path: Path, depth: int) -> None:
    with pytest.raises((DataError, InputError), match="nested deeper than 200 levels"):
        await recorded(tmp_path / "run.jsonl", "plain", nested(depth))
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.spec("replay:J51")
async def test_depth_of_a_blob_counts_where_it_is_used(tmp_path: Path) -> None:
    path = await recorded(tmp_path / "run.jsonl", "deep mark")
    head, *rest = path.read_bytes().splitlines()
    deep = b"[" * 180
    blob = b'{"kind":"blob","fp":"%s","data":%s1%s,"crc":"00000000"}' % (b"0" * 32, deep, b"]" * 180)
    used = b'%s{"$blob":"%s"}%s' % (deep, b"0" * 32, b"]" * 180)
    rest = [line.replace(b'"deep mark"', used) for line in rest]
    path.write_bytes(resealed(b"\n".join([head, blob, *rest]), link=False))

    result = CliRunner().invoke(app, ["show", str(path), "--json"])

    assert 1 == result.exit_code
    assert "record 4" in result.stderr
    assert "nested deeper than 232 levels" in result.stderr


@pytest.mark.spec("replay:J51")
def test_the_depth_of_a_text_counts_brackets_outside_of_strings() -> None:
    assert not is_text_nested_deeper(b'{"a":"%s"}' % (b"[{" * 500), 200)
    assert not is_text_nested_deeper(b'{"a":"\\"%s"}' % (b"[{" * 500), 200)
    assert not is_text_nested_deeper(b"[]" * 500, 200)
    assert is_text_nested_deeper(b'{"a":"]]]]","b":%s' % (b"[" * 200), 200)
    assert not is_text_nested_deeper(b'{"a":%s' % (b"[" * 199), 200)


@pytest.mark.spec("replay:J51")
@given(depth=st.integers(0, 8), value=strategies.json_values(), levels=st.integers(0, 8))
def test_depth_of_a_value_equals_the_depth_of_its_text(depth: int, value: Any, levels: int) -> None:
    for _ in range(depth):
        value = [value]

    assert is_text_nested_deeper(compact(value).encode(errors="replace"), levels) == is_nested_deeper(value, levels)


@pytest.mark.speed
@pytest.mark.parametrize("piece", [b"[", b'\\"', b"{[]"])
def test_depth_check_is_linear_in_text_length(piece: bytes) -> None:
    start = time.process_time()
    is_text_nested_deeper(b"[" * 201 + (piece * 1_000_000)[:1_000_000], 10**9)
    is_text_nested_deeper(b'"\\"' + b"[" * 1_000 + (piece * 1_000_000)[:1_000_000], 200)

    assert time.process_time() - start < 2


# --- runs below runs --------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:SP01")
@pytest.mark.parametrize(
    ("command", "levels"),
    [
        (["show"], 1_100),
        *[(command, 101) for command in [*COMMANDS, ["compare", "diff"], ["journal", "repair", "--seal"]]],
    ],
)
def test_too_deeply_nested_runs_are_rejected_by_record_number(tmp_path: Path, levels: int, command: list[str]) -> None:
    start = {"type": "agent_call", "agent_id": "a", "prompt": "go", "params": None, "run_id": "r"}
    addresses = [("", -1), *[(".".join(["0"] * level), 0) for level in range(levels + 1)]]
    calls = [{"kind": "intent", "path": path, "seq": n, "fp": FP, "effect": start} for path, n in addresses]
    path = written(tmp_path / "run.jsonl", [HEAD, *calls])

    result = invoke(command, *[path] * (2 if "diff" in command else 1))

    said = " ".join((result.stdout + result.stderr).split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert "PAGE" in command or "record 104" in said
    assert "PAGE" in command or "runs are nested deeper than 100 levels" in said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SP01")
async def test_children_below_the_maximum_depth_fail(tmp_path: Path) -> None:
    deepest: list[Any] = []
    deep = nested(MAX_DEPTH_LEVELS - 10)

    def handle_steps(ctx: Any) -> Any:
        # Only the last levels hold deep values: the text that a command shows grows with both depths.
        level = ctx.params["level"]
        asked = yield AgentCall("desk", params={"level": level + 1, "value": deep if level >= 98 else None})
        if asked.value.error is not None:
            deepest.append(asked.value.error)
            yield ToolCall("shout", {"text": deep})
        return "done"

    shout = Tool(name="shout", description="Shout.", input_schema={"type": "object"}, run=lambda _: "HI")
    limits = Limits(max_depth=10_000, max_total_children=10_000)
    agent = AgentDefinition("desk", tools=[shout], spawnable_agents=["desk"], handle_steps=handle_steps, limits=limits)
    journal = FileJournal(tmp_path / "run.jsonl")
    async with Engine([agent], models=ScriptedModel([])) as engine:
        await engine.run("desk", params={"level": 0}, journal=journal)

    assert ["depth"] == [error.kind for error in deepest]
    assert "more than 100 levels below the root" in str(deepest[0])
    ended = invoke(["show", "--json"], journal.path)
    assert 0 == ended.exit_code, ended.stderr
