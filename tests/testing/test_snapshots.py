"""
A run as text that people review: what stands in it, what never does, and that nothing but the run changes it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Parallel,
    ToolCall,
    ToolResult,
    tool,
)
from stepengine.data.messages import ImagePart, TextPart, ThinkingPart, ToolCallPart
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.errors import DataError, ModelError
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.testing import ScriptedModel, failure, text, tool_call
from stepengine.testing.cassette_files import RecordedRequest
from stepengine.testing.snapshots import (
    EventsSnapshot,
    RequestSnapshot,
    RunJsonSnapshot,
    RunSnapshot,
    run_to_snapshot_tree,
)

KEY = "sk-proj-PLANT7aaaabbbbccccdddd9"
HERE = str(Path.cwd())
LONG = "x" * 3_000
PNG = b"\x89PNG\r\n\x1a\n" + bytes(2_000)


@tool
def look(path: str, deep: Any = None) -> ToolResult:
    """Look at a file."""
    return ToolResult.parts([f"{path}\r\n\n two  \nkey {KEY}\tin {HERE}/a.py", ImagePart(data=PNG)])


helper = AgentDefinition("helper", system_prompt="You are small.", model="test/h")


def handle_steps(ctx: Any) -> Any:
    yield Parallel([AgentCall(helper, "first"), AgentCall(helper, "second")])
    yield from ToolCall("look", {"path": tempfile.gettempdir() + "/b", "deep": {"n": [1, 2]}}, include_tool_call=False)
    yield STEP_ALL
    yield from Ask("Ship it?", options=["yes", "no"])
    return {"files": 1}


desk = AgentDefinition(
    "desk", model="test/m", system_prompt="You help.\nAlways.", tools=[look], spawnable_agents=[helper],
    handle_steps=handle_steps,
)  # fmt: skip


def journal_of(journal: Any, **options: Any) -> Any:
    reply = ModelReply(
        [
            ThinkingPart("hm", provider_data={"provider": "p", "signature": "s" * 40}),
            TextPart("I look.\x1b[2J"),
            ToolCallPart("", "look", {"path": "a\nb"}),
        ],
        usage=Usage(400, 5, 12),
        cost=Decimal("0.001"),
        request_id="req_1",
    )
    broken = failure(ModelError("busy", retryable=True, status=429, retry_after=0.001))
    script = [text("h1"), text("h2"), broken, reply, text(LONG)]
    with Engine(models={"test": ScriptedModel(script)}, **options) as engine:
        return engine.run_sync(desk, "Review the parser.", journal=journal)


TRANSCRIPT = """\
run desk  suspended  9 effects  4 model calls  tokens at least 412 in / 5 out
prompt
  Review the parser.
#0  spawn helper
     prompt
       first
     0#0  model test/h  step 1  messages 1 (+1)
          system
            You are small.
          user
            first
        -> text
             h1
           stop end_turn
   -> completed
      output
        "h1"
#1  spawn helper
     prompt
       second
     1#0  model test/h  step 1  messages 1 (+1)
          system
            You are small.
          user
            second
        -> text
             h2
           stop end_turn
   -> completed
      output
        "h2"
#2  tool look  c1  by handler
     path: "<tmp>/b"
     deep: {"n": [1, 2]}
   -> text
        <tmp>/b\\r

         two\u2420\u2420
        key <redacted:provider-key>\\tin <cwd>/a.py
      image/png 2,008 bytes sha256:3e42873f
#3  model test/m  step 1  messages 1 (+1)  tools look  retries 1: ModelError 429
     system
       You help.
       Always.
     user
       Review the parser.
   -> thinking  signature sha256:3923fb83
        hm
      text
        I look.\\x1b[2J
      call look
        path: |
          a
          b
#4  tool look  c2
     path: |
       a
       b
     deep: null
   -> text
        a
        b\\r

         two\u2420\u2420
        key <redacted:provider-key>\\tin <cwd>/a.py
      image/png 2,008 bytes sha256:3e42873f
#5  model test/m  step 2  messages 3 (+2)
   -> text
        @LONG@
        ... (cut: 3,000 characters, sha256:e1630f84)
      stop end_turn
#6  ask
     q6  options "yes", "no"
       Ship it?
   -> (no result yet)
waits for an answer to q6  options "yes", "no"
  Ship it?
""".replace("@LONG@", "x" * 2_000)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:F20", "replay:F23", "reliability:UI01", "requirements:P5", "replay:K1")
def test_a_run_reads_as_stable_facts_one_per_line(tmp_path: Path) -> None:
    result = journal_of(FileJournal(tmp_path / "r.jsonl"))
    for given_ in (result, result.journal, str(tmp_path / "r.jsonl"), tmp_path / "r.jsonl"):
        assert RunSnapshot().serialize(given_) == TRANSCRIPT
    written = RunJsonSnapshot().serialize(result)
    assert json.loads(written)["steps"][0]["steps"][0]["name"] == "test/h"
    for secret in (KEY, HERE, tempfile.gettempdir(), "req_1", "0.001", "\x1b", "\t"):
        assert secret not in TRANSCRIPT + written
    assert "cost $0.001" not in TRANSCRIPT


def test_a_transcript_shows_the_cost_on_request() -> None:
    async def run() -> Any:
        model = ScriptedModel([ModelReply("ok", usage=Usage(1, 2), cost=Decimal("0.25"))])
        async with Engine(models={"test": model}) as engine:
            return await engine.run(AgentDefinition("a", model="test/m"), "hi", journal=MemoryJournal())

    result = asyncio.run(run())
    assert "cost $0.25" in RunSnapshot().serialize(run_to_snapshot_tree(result, cost=True)).splitlines()[0]
    assert "0.25" not in RunSnapshot().serialize(result)


@tool
async def nap(ms: int) -> str:
    """Wait."""
    await asyncio.sleep(ms / 1000)
    return f"{'long' if ms else 'short'} nap"


@pytest.mark.spec("replay:F23")
def test_children_that_end_in_another_order_give_the_same_transcript() -> None:
    def run(last: int) -> MemoryJournal:
        other_has_ended = asyncio.Event()

        @tool(name="nap")
        async def napping(ms: int) -> str:
            """Wait."""
            if ms == last:
                await other_has_ended.wait()
            return "rested"

        def sleeping(ctx: Any) -> Any:
            yield from ToolCall("nap", {"ms": int(ctx.prompt)}, include_tool_call=False)
            other_has_ended.set()

        child = AgentDefinition("child", model="test/m", tools=[napping], handle_steps=sleeping)

        def both(ctx: Any) -> Any:
            yield Parallel([AgentCall(child, "1"), AgentCall(child, "2")])

        parent = AgentDefinition("parent", model="test/m", spawnable_agents=[child], handle_steps=both)
        journal = MemoryJournal()
        with Engine(models={"test": ScriptedModel([])}) as engine:
            engine.run_sync(parent, "go", journal=journal)
        return journal

    one, other = run(last=2), run(last=1)
    order = [[(r.kind, getattr(r, "path", "")) for r in j.records()] for j in (one, other)]
    assert order[0] != order[1]
    assert RunSnapshot().serialize(one) == RunSnapshot().serialize(other)


def test_a_result_without_a_journal_shows_its_messages() -> None:
    with Engine(models={"test": ScriptedModel([tool_call("nap", {"ms": 0}), text("done")])}) as engine:
        result = engine.run_sync(AgentDefinition("a", model="test/m", tools=[nap]), "hi")
    lines = RunSnapshot().serialize(result).splitlines()
    assert lines == [
        "run a  completed", "user", "  hi", "assistant", "  call nap  c1", "    ms: 0", "tool  nap  c1", "  short nap",
        "assistant", "  done",
    ]  # fmt: skip
    with pytest.raises(DataError, match="takes a RunResult, a journal or the path of one, not a int"):
        RunSnapshot().serialize(7)


@pytest.mark.spec("replay:F23")
def test_a_result_without_a_journal_shows_how_its_children_ended() -> None:
    def handle_steps(ctx: Any) -> Any:
        yield AgentCall("kid", "one")

    kid = AgentDefinition("kid", model="test/m")
    boss = AgentDefinition("boss", spawnable_agents=[kid], handle_steps=handle_steps)
    with Engine([boss], models=ScriptedModel([text("done")])) as engine:
        lines = RunSnapshot().serialize(engine.run_sync("boss")).splitlines()
    assert lines == ["run boss  completed", "child kid  completed", "  output", '    "done"']


@pytest.mark.spec("replay:F23")
def test_prompts_are_shown_once_unless_repeated_or_changed() -> None:
    def handle_steps(ctx: Any) -> Any:
        for _ in range(2):
            yield ToolCall("add_message", {"role": "user", "content": "go on"}, include_tool_call=False)
            yield STEP

    def transcript(**hooks: Any) -> str:
        replies = [tool_call("nap", {"ms": 0}), text("done")]
        with Engine(models={"test": ScriptedModel(replies)}, hooks=Hooks(**hooks)) as engine:
            agent = AgentDefinition("a", model="test/m", tools=[nap], handle_steps=handle_steps)
            return RunSnapshot().serialize(engine.run_sync(agent, "hi", journal=MemoryJournal()))

    plain = transcript()
    assert plain.count("go on") == 2
    assert plain.count("short nap") == 1
    changed = transcript(post_tool=lambda ctx, call, result: ToolResult.text("a changed nap"))
    assert "a changed nap" in changed


@pytest.mark.spec("replay:F21", "replay:K1")
def test_a_request_reads_as_ordered_json_without_secrets() -> None:
    body = {"model": "m", "b": [1], "a": {"api_key": "hunter22222", "text": f"my {KEY}\x7f"}}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = httpx2.Request("POST", "https://api.test/v1", json=body, headers=headers)
    recorded = RecordedRequest("POST", "https://api.test/v1", tuple(headers.items()), json.dumps(body).encode())
    for given_ in (request, recorded, json.dumps(body), json.dumps(body).encode(), body):
        written = RequestSnapshot().serialize(given_)
        assert written.index('"model"') < written.index('"b"') < written.index('"a"')
        assert json.loads(written)["a"]["text"].startswith("my <redacted")
        assert not [secret for secret in (KEY, "hunter22222", "\x7f") if secret in written]
        assert written.count("\n") > 6
    assert RequestSnapshot().serialize(b"plain\xff") == '"plain\\\\xff"\n'


@pytest.mark.spec("replay:F22")
async def test_events_read_as_names_and_addresses_without_deltas() -> None:
    async with Engine(models={"test": ScriptedModel([tool_call("nap", {"ms": 0}), text("done")])}) as engine:
        stream = engine.stream(AgentDefinition("a", model="test/m", tools=[nap]), "hi")
        events = [event async for event in stream]
    lines = EventsSnapshot().serialize(events).splitlines()
    assert lines[0].endswith("RunStarted")
    assert lines[-1].endswith("RunFinished")
    assert [line for line in lines if "ToolStarted" in line] == ["#1  ToolStarted"]
    assert not [line for line in lines if "Delta" in line]
    assert any("TextDelta" in type(event).__name__ for event in events)
