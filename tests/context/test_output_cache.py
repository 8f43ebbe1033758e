"""
``output_cache``: which outputs are trimmed, that the record keeps them, and how they are read again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import (
    AgentDefinition,
    AgentState,
    AssistantMessage,
    Hooks,
    Limits,
    ToolContext,
    ToolMessage,
    UserMessage,
    call,
)
from stepengine.context import output_cache
from stepengine.context.outputs import find_output
from stepengine.data.codec import from_json, to_json
from stepengine.data.messages import ImagePart, TextPart, ToolCallPart
from stepengine.data.transcript import Transcript
from stepengine.errors import ToolError
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from tests.context.worlds import MODEL, Worker, context, digging, engine

PROMPT = UserMessage("dig", ("USER_PROMPT",))


def exchange(number: int, *content: Any, status: Any = "ok") -> tuple[AssistantMessage, ToolMessage]:
    asked = AssistantMessage((ToolCallPart(f"c{number}", "dig", {"depth": number}),))
    return asked, ToolMessage(f"c{number}", "dig", content, status)


def view_of(change: Any, ctx: Any) -> Transcript:
    return ctx.state.view if change is None else change.view


def texts(view: Any) -> dict[str, str]:
    return {m.tool_call_id: m.text for m in view if isinstance(m, ToolMessage)}


sizes = st.lists(st.integers(0, 70) | st.integers(110, 900), max_size=12)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:I15")
@given(sizes, st.integers(0, 3_000), st.sampled_from([0.0, 0.25, 0.5, 0.99]), st.booleans())
def test_output_cache_trims_oldest_seen_outputs_first(
    lengths: list[int], limit: int, free_ratio: float, answered: bool
) -> None:
    rest = [AssistantMessage("so far")] if answered else []
    messages = [PROMPT, *[m for n, size in enumerate(lengths) for m in exchange(n, "x" * size)], *rest]
    ctx = context(*messages)
    change = output_cache(limit, free_ratio=free_ratio)(ctx)
    before, after = texts(ctx.state.view), texts(view_of(change, ctx))
    total = sum(map(len, before.values()))

    assert change is None or change.messages is None
    assert list(before) == list(after)
    assert change is None or total > limit
    trimmed = [name for name in before if before[name] != after[name]]
    worth = [name for name in before if len(before[name]) > 100]
    unseen = set() if answered else set(list(before)[-1:])
    assert not unseen & set(trimmed)
    candidates = [name for name in worth if name not in unseen]
    assert candidates[: len(trimmed)] == trimmed
    for name in trimmed:
        assert name in after[name]
        assert f"{len(before[name]):,} characters" in after[name]
        assert len(after[name]) < len(before[name])
    if total > limit:
        left = sum(map(len, after.values()))
        assert left <= limit * (1 - free_ratio) or set(candidates) <= set(trimmed)
    again = context(state=attrs.evolve(ctx.state, view=view_of(change, ctx)))
    second = output_cache(limit, free_ratio=free_ratio)(again)
    assert second is None or sum(map(len, after.values())) > limit


@pytest.mark.spec("reliability:RS13")
async def test_trimmed_outputs_use_no_disk_besides_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The journal holds the outputs, so the cache needs no files: none to limit, and none to delete when the run has ended.
    """
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kept, seen = output_cache(5_000), []

    def files() -> list[str]:
        return [path.name for path in tmp_path.rglob("*")]

    def cache(ctx: Any) -> Any:
        change = kept(ctx)
        seen.append((files(), change is not None))
        return change

    agent = AgentDefinition(
        "worker", model=MODEL, tools=[digging()], hooks=Hooks(pre_step=[cache]), limits=Limits(max_steps=100)
    )
    async with engine(Worker(40)) as built:
        result = await built.run(agent, "dig", journal=tmp_path / "run.jsonl")

    assert "completed" == result.status
    assert any(trimmed for _, trimmed in seen)
    assert [["run.jsonl"]] * len(seen) == [names for names, _ in seen]
    assert ["run.jsonl"] == files()


@pytest.mark.spec("requirements:I14")
async def test_trimmed_outputs_are_readable_after_session_is_loaded() -> None:
    cache, seen = output_cache(50), []
    hooks = Hooks(pre_step=[cache])
    first = AgentDefinition("worker", model=MODEL, tools=[digging(), cache.read_output], hooks=hooks)
    script = [tool_calls(tool_call("dig", {"depth": 5}), tool_call("dig", {"depth": 6})), text("so far"), text("done")]
    result = await engine(ScriptedModel(script)).run(first, "dig")
    stored = json.dumps(to_json(result.state))

    def handle(ctx: Any) -> Any:
        seen.append((yield from call(cache.read_output, "c1")))
        with pytest.raises(ToolError, match="no tool output with the reference id 'c99'"):
            yield from call(cache.read_output, "c99")
        from stepengine import STEP_ALL

        yield STEP_ALL

    second = AgentDefinition(
        "worker", model=MODEL, tools=[digging(), cache.read_output], hooks=hooks, handle_steps=handle
    )
    model = ScriptedModel(
        [
            tool_call("read_output", {"reference_id": "c1", "offset": 4, "limit": 10}),
            tool_call("read_output", {"reference_id": "nothing"}),
            text("done"),
        ]
    )
    again = await engine(model).run(second, "and?", previous=from_json(json.loads(stored)))

    trimmed = texts(model.calls[0].messages)
    assert "reference_id 'c1'" in trimmed["c1"]
    whole = texts(again.state.message_history)["c1"]
    assert whole.startswith("5 xxx")
    assert whole in seen[0].text
    found = [m for m in again.state.message_history if isinstance(m, ToolMessage) and m.tool_name == "read_output"][-2:]
    assert f"{whole[3:13]}\n[{len(whole) - 13:,} more characters; go on with offset=14]" == found[0].text
    assert found[1].is_error
    assert "'nothing'" in found[1].text


@pytest.mark.spec("requirements:I14")
async def test_trimmed_output_is_read_in_pieces_with_images() -> None:
    image = ImagePart("https://example.com/a.png")
    history = [PROMPT, *exchange(1, "abcdefghij", image), *exchange(2, "no", status="error"), *exchange(3, "z" * 300)]
    state = AgentState.from_messages(history)
    change = output_cache(0)(context(*history, AssistantMessage("ok")))
    read = output_cache().read_output
    ctx = ToolContext.for_test(agent_state=state)

    assert [TextPart] == [type(p) for p in change.view[2].content]
    assert "error" == change.view[4].status
    whole = read.fn(ctx, "c1")
    pieces = [read.fn(ctx, "c1", offset, 4).text.split("\n")[0] for offset in (1, 5, 9)]
    assert [TextPart, ImagePart] == [type(p) for p in whole.content]
    assert "abcdefghij" == whole.text == "".join(pieces)
    assert find_output(state, "c3").text == "z" * 300
    assert find_output(state, "c4") is None
