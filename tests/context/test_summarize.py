"""
``summarize`` and ``compact``: what the model is asked, what it sees afterwards, what is recorded.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    AgentState,
    Ask,
    AssistantMessage,
    Complete,
    Hooks,
    Limits,
    ModelSettings,
    Perform,
    RunStatus,
    ToolMessage,
    UserMessage,
)
from stepengine.context import compact, summarize
from stepengine.data.codec import from_json, to_json
from stepengine.data.estimate import transcript_tokens
from stepengine.data.hooks import Change
from stepengine.data.messages import TextPart, ThinkingPart, ToolCallPart, ToolResult
from stepengine.data.transcript import Transcript
from stepengine.errors import ContextOverflow, DefinitionError
from stepengine.events import Compacted
from stepengine.journal import MemoryJournal
from stepengine.runtime.sizes import estimate_request_tokens
from stepengine.testing import ScriptedModel, failure, text, tool_call
from tests.context.worlds import MODEL, Worker, assert_paired, context, digging, engine
from tests.models.wires import FOUR, provider_of
from tests.models.wires import MODEL as NAMES

LIMITS = Limits(max_steps=500)


def worker(*policies: Any, **fields: Any) -> AgentDefinition[Any]:
    options = {"model": MODEL, "tools": [digging()], "system_prompt": "You dig.", "limits": LIMITS, **fields}
    return AgentDefinition("worker", hooks=Hooks(pre_step=list(policies)), **options)


def exchange(number: int, said: str = "x" * 400) -> tuple[AssistantMessage, ToolMessage]:
    asked = AssistantMessage((TextPart("next"), ToolCallPart(f"c{number}", "dig", {"depth": number})))
    return asked, ToolMessage(f"c{number}", "dig", said)


def played(policy: Any, ctx: Any, reply: str = "the summary") -> tuple[list[Any], Any]:
    """
    Drive a hook by hand; return what it yielded and what it returned.
    """
    work, asked = policy(ctx), []
    if work is None or isinstance(work, Change):
        return asked, work
    try:
        asked.append(next(work))
        while True:
            asked.append(work.send(_answer(ctx.state, asked[-1], reply)))
    except StopIteration as stop:
        return asked, stop.value


def _answer(state: AgentState, asked: Any, reply: str) -> Any:
    from stepengine import StepResult

    return StepResult(state, value=text(reply) if isinstance(asked, Complete) else "performed")


# --- a long run -----------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec(
    "requirements:I2",
    "requirements:I8",
    "requirements:I9",
    "requirements:I11",
    "requirements:X28",
    "requirements:X45",
)
@pytest.mark.parametrize(
    ("reports", "steps", "window"), [(True, 400, 6_000), (False, 100, 1_500)], ids=["reported", "estimated"]
)
async def test_summarize_keeps_400_steps_under_window_and_replays(reports: bool, steps: int, window: int) -> None:
    journal = MemoryJournal()
    model = Worker(steps - 1, report=estimate_request_tokens if reports else None)
    agent = worker(summarize())
    lab = engine(model, window)
    events = [event async for event in lab.stream(agent, "dig deep", journal=journal)]
    result = events[-1].result

    assert RunStatus.COMPLETED is result.status
    assert steps == result.state.step_index
    assert max(estimate_request_tokens(request) for request in model.requests) <= window
    assert_paired(model.requests)
    assert 8 < len(model.summaries) < 20
    assert steps + len(model.summaries) == result.usage.requests
    if reports:
        assert sum(estimate_request_tokens(request) for request in model.requests) == result.usage.input_tokens

    compacted = [event for event in events if isinstance(event, Compacted)]

    assert len(model.summaries) == len(compacted)
    assert all(e.messages_after == 1 and not e.record and e.by == "summarize" for e in compacted)
    assert all(e.tokens_after < e.tokens_before / 10 for e in compacted)
    assert 2 * steps == len(result.state.message_history)
    assert "summary number" in result.state.view[0].text

    again = await engine(Worker(0), window).replay(journal, agent=agent)

    assert to_json(result.state) == to_json(again.state)
    assert journal.lines() == again.journal.lines()


@pytest.mark.spec("requirements:I8", "requirements:G10")
@pytest.mark.parametrize("wire", FOUR)
async def test_summary_request_extends_the_previous_request_bytes(wire: str) -> None:
    model = Worker(60)
    await engine(model, 3_000).run(worker(summarize(), settings=ModelSettings(temperature=0.5)), "dig")
    provider = provider_of(wire)

    def sent(request: Any) -> bytes:
        return provider._encode(attrs.evolve(request, model=f"{wire}/{NAMES[wire]}"), stream=True).content

    checked = 0
    for before, asked in zip(model.requests, model.requests[1:], strict=False):
        if asked not in model.summaries:
            continue
        checked += 1
        assert before.messages[:] == asked.messages[: len(before.messages)]
        assert (before.system_prompt, before.tools, before.settings) == (
            asked.system_prompt,
            asked.tools,
            asked.settings,
        )
        old, new = sent(before), sent(asked)
        same = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        assert set(old[same:]) <= set(b"]}"), (old[same:], new[same : same + 80])
    assert checked > 2


# --- one compaction -------------------------------------------------------------------------------------------------

PROMPT = UserMessage("dig here", ("USER_PROMPT",))
FRESH = UserMessage("and there?", ("USER_PROMPT",))
RULES = UserMessage("Be quick.", ("INSTRUCTIONS_PROMPT",))


def after(*messages: Any, **options: Any) -> list[Any]:
    _, change = played(summarize(max_tokens=50, **options), context(*messages))
    return [] if change is None else list(change.view)


@pytest.mark.spec("requirements:I9", "requirements:I8")
@pytest.mark.parametrize(
    ("before", "kept", "options"),
    [
        ((PROMPT, *exchange(1), *exchange(2)), (), {}),
        ((PROMPT, *exchange(1), AssistantMessage("done"), FRESH), (FRESH,), {}),
        ((PROMPT, *exchange(1), AssistantMessage("done"), FRESH, RULES), (FRESH, RULES), {}),
        ((PROMPT, RULES, *exchange(1), *exchange(2)), (RULES,), {}),
        ((PROMPT, *exchange(1), *exchange(2)), exchange(2), {"keep_last": 1}),
        ((PROMPT, *exchange(1), *exchange(2), *exchange(3)), (*exchange(2), *exchange(3)), {"keep_last": 3}),
        ((PROMPT, *exchange(1), AssistantMessage("done"), FRESH), (FRESH,), {"keep_last": 1}),
    ],
    ids=["in a turn", "new prompt", "instructions", "old instructions", "last", "whole exchanges", "last is new"],
)
def test_compaction_leaves_one_summary_and_required_messages(before: Any, kept: Any, options: dict[str, Any]) -> None:
    summary, *rest = after(*before, **options)

    assert ("SUMMARY",) == summary.tags
    assert "<summary>\nthe summary\n</summary>" in summary.text
    assert list(kept) == rest


@pytest.mark.spec("requirements:I9")
@pytest.mark.parametrize(
    "messages",
    [
        (),
        (UserMessage("x" * 4_000, ("USER_PROMPT",)),),
        (UserMessage("s" * 4_000, ("SUMMARY",)), RULES, FRESH),
        (UserMessage("s" * 4_000, ("SUMMARY",)),),
    ],
    ids=["nothing", "a prompt", "a summary and a prompt", "a summary"],
)
def test_nothing_to_summarise_calls_no_model(messages: Any) -> None:
    asked, change = played(summarize(1), context(*messages))

    assert ([], None) == (asked, change)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:I9")
@given(
    st.lists(st.sampled_from(["prompt", "say", "call", "pending"]), max_size=12),
    st.integers(0, 6),
    st.sampled_from([1, 200, 2_000]),
)
def test_summarized_history_is_paired_and_keeps_its_end(kinds: list[str], keep: int, limit: int) -> None:
    messages: list[Any] = []
    for number, kind in enumerate(kinds):
        if kind == "prompt":
            messages.append(UserMessage(f"prompt {number}", ("USER_PROMPT",)))
        elif kind == "say":
            messages.append(AssistantMessage((ThinkingPart("hm"), TextPart(f"said {number} " + "y" * 300))))
        else:
            asked, result = exchange(number)
            pending = ToolMessage.from_result(
                attrs.evolve(ToolResult.make_pending("q1"), tool_call_id=f"c{number}", tool_name="dig")
            )
            messages += [asked, pending if kind == "pending" else result]
    ctx = context(*messages)
    policy = summarize(limit, keep_last=keep)
    asked, change = played(policy, ctx)
    for request in asked:
        assert Transcript(request.messages)
        assert list(request.messages[:-1]) == messages[: len(request.messages) - 1]
        assert ("SUMMARY_REQUEST",) == request.messages[-1].tags
    if change is None:
        return
    view = Transcript(list(change.view))

    assert transcript_tokens(view) < transcript_tokens(ctx.state.view)
    assert ("SUMMARY",) == view[0].tags
    assert list(view[1:]) == messages[len(messages) - len(view) + 1 :]
    again = context(state=attrs.evolve(ctx.state, view=view))
    if transcript_tokens(view) <= limit:
        assert ([], None) == played(policy, again)


@pytest.mark.spec("requirements:I9")
@pytest.mark.parametrize("wire", FOUR)
async def test_pending_calls_have_results_in_a_summary_request(wire: str) -> None:
    asked = AssistantMessage((ToolCallPart("c1", "ask_user", {"question": "Where?"}),))
    waiting = ToolMessage.from_result(
        attrs.evolve(ToolResult.make_pending("q1"), tool_call_id="c1", tool_name="ask_user")
    )
    state = AgentState.from_messages([PROMPT, asked, waiting])
    model = ScriptedModel([text("the summary"), text("done")])
    result = await engine(model).run(worker(summarize(1, model=f"{MODEL}")), "go on", previous=state)

    assert RunStatus.COMPLETED is result.status
    request = attrs.evolve(model.calls[0], model=f"{wire}/{NAMES[wire]}")
    said = json.loads(provider_of(wire)._encode(request, stream=False).content)
    assert "waiting for the answer" in json.dumps(said)
    assert_paired(model.calls)


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:I8", "requirements:X28", "requirements:I2", "requirements:H16")
def test_summarize_threshold_defaults_to_share_of_window_or_100k() -> None:
    def acts(policy: summarize, tokens: int, **fields: Any) -> bool:
        said = "x" * (4 * (tokens - len(("overhead",)) * 30))
        return bool(played(policy, context(PROMPT, *exchange(1, said), **fields))[0])

    assert summarize() == summarize(enabled=True, auto=True, window_ratio=0.8, directives="")
    assert [False, True] == [acts(summarize(max_tokens=1_000), n, context_window=9) for n in (990, 1_100)]
    assert [False, True] == [acts(summarize(), n, context_window=10_000) for n in (7_900, 8_100)]
    assert [False, True] == [acts(summarize(window_ratio=0.5), n, context_window=10_000) for n in (4_900, 5_100)]
    assert [False, True] == [acts(summarize(), n) for n in (99_900, 100_100)]
    assert [False, False] == [acts(summarize(**off), 200_000) for off in ({"enabled": False}, {"auto": False})]


@pytest.mark.spec("requirements:X53")
def test_a_summary_holds_no_thoughts() -> None:
    _, change = played(summarize(10), context(PROMPT, *exchange(1)), "<think>what matters?</think>\nThey dig.")

    assert "<summary>\nThey dig.\n</summary>" in change.view[0].text


@pytest.mark.spec("requirements:I8")
def test_directives_and_model_are_those_of_the_request() -> None:
    ctx = context(PROMPT, *exchange(1))
    (asked,), _ = played(summarize(10, directives="Keep every depth.", model="test/small"), ctx)

    assert asked.messages[-1].text.endswith("\n\nKeep every depth.")
    assert "test/small" == asked.model


def test_custom_summarizer_is_a_function_or_a_generator() -> None:
    def plain(messages: Any) -> str:
        return f"{len(messages)} messages"

    def working(messages: Any) -> Any:
        return (yield from Perform(len, messages)) + "!"

    ctx = context(PROMPT, *exchange(1))
    for summariser, expected, effects in ((plain, "3 messages", 0), (working, "performed!", 1)):
        asked, change = played(summarize(10, summarizer=summariser), ctx)

        assert effects == len(asked)
        assert f"<summary>\n{expected}\n</summary>" in change.view[0].text
    assert summarize(max_tokens=10, summarizer=plain) == summarize(10, summarizer=plain)


def test_invalid_summarizer_loses_no_conversation() -> None:
    async def waiting(messages: Any) -> str:
        return "text"

    for wrong in (waiting, "text"):
        with pytest.raises(DefinitionError, match="a summarizer must be a function that returns text, or a generator"):
            summarize(10, summarizer=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returned a int; it must return text"):
        played(summarize(10, summarizer=len), context(PROMPT, *exchange(1)))  # type: ignore[arg-type]


@pytest.mark.spec("requirements:I8", "requirements:I15")
@pytest.mark.parametrize("record", [False, True])
async def test_summarize_changes_view_or_record(record: bool) -> None:
    model = Worker(30)
    lab = engine(model, 3_000)
    events = [e async for e in lab.stream(worker(summarize(replace_record=record)), "dig")]
    state = events[-1].result.state

    assert {record} == {event.record for event in events if isinstance(event, Compacted)}
    assert (state.view is state.message_history) is record
    assert ("SUMMARY" in state.message_history[0].tags) is record
    assert record or 62 == len(state.message_history)
    assert state == from_json(to_json(state))


@pytest.mark.spec("requirements:I8", "requirements:I11")
async def test_handler_compacts_on_demand() -> None:
    def handle(ctx: Any) -> Any:
        for _ in range(4):
            turn = yield STEP
        state = yield from compact(turn.agent_state, summarize(auto=False))
        assert state.view is state.message_history
        nothing = yield from compact(state, summarize(enabled=False))
        assert nothing is state
        yield STEP
        return [m.tags for m in state.message_history]

    model, journal = Worker(10), MemoryJournal()
    agent = worker(summarize(auto=False), handle_steps=handle)
    events = [e async for e in engine(model).stream(agent, "dig", journal=journal)]
    result = events[-1].result

    assert [("SUMMARY",)] == result.output
    assert [("set_messages", True, 9, 1)] == [
        (e.by, e.record, e.messages_before, e.messages_after) for e in events if isinstance(e, Compacted)
    ]
    assert ["SUMMARY"] == [*model.requests[-1].messages[0].tags]
    assert (await engine(Worker(0)).replay(journal, agent=agent)).state == result.state


@pytest.mark.spec("requirements:I8")
@pytest.mark.parametrize("is_on_demand", [False, True])
async def test_summary_request_omits_settings_that_prevent_text(is_on_demand: bool) -> None:
    def handle(ctx: Any) -> Any:
        for _ in range(20):
            turn = yield STEP
        yield from compact(turn.agent_state)

    settings = ModelSettings(tool_choice="required", response_schema={"type": "object"}, temperature=0.1)
    model = Worker(40)
    options = {"handle_steps": handle} if is_on_demand else {}
    agent = worker(summarize(auto=not is_on_demand), settings=settings, limits=Limits(max_steps=30), **options)
    await engine(model, 3_000).run(agent, "dig")
    asked = model.summaries[0]

    assert ("none", "none", None, 0.1) == (
        asked.tool_choice,
        asked.settings.tool_choice,
        asked.settings.response_schema,
        asked.settings.temperature,
    )


async def test_missing_summary_leaves_history_unchanged() -> None:
    replies = [tool_call("dig", {"depth": 1}), tool_call("dig", {"depth": 2}), text("done")]
    model = ScriptedModel(replies)
    result = await engine(model).run(worker(summarize(20)), "dig")

    assert "done" == result.text
    assert [1, 4, 3] == [len(request.all_messages) for request in model.calls]
    assert result.state.view is result.state.message_history


# --- overflow -------------------------------------------------------------------------------------------------------


def too_long() -> Any:
    return failure(ContextOverflow("the prompt is too long", kind="context_overflow"))


def full(count: int = 8) -> AgentState:
    return AgentState.from_messages([PROMPT, *[m for n in range(1, count + 1) for m in exchange(n)]])


@pytest.mark.spec("reliability:MP02")
async def test_refused_prompt_is_summarised_once_and_resent() -> None:
    model = ScriptedModel([too_long(), text("the summary"), text("done")])
    journal, agent = MemoryJournal(), worker(summarize())
    result = await engine(model).run(agent, "go on", previous=full(), journal=journal)

    assert (RunStatus.COMPLETED, "done", 1) == (result.status, result.text, result.state.step_index)
    assert estimate_request_tokens(model.calls[1]) < estimate_request_tokens(model.calls[0])
    assert ["SUMMARY", "USER_PROMPT"] == [m.tags[0] for m in model.calls[2].messages]
    assert_paired(model.calls)
    assert (await engine(ScriptedModel([])).replay(journal, agent=agent)).state == result.state


@pytest.mark.spec("reliability:MP02")
async def test_a_prompt_that_is_refused_twice_fails_the_run() -> None:
    model = ScriptedModel([too_long(), text("the summary"), too_long()])
    result = await engine(model).run(worker(summarize()), "go on", previous=full())

    assert (RunStatus.FAILED, 3) == (result.status, len(model.calls))
    assert isinstance(result.error, ContextOverflow)


@pytest.mark.spec("reliability:MP02")
async def test_oversized_summary_request_is_cut_until_it_fits() -> None:
    model = ScriptedModel([too_long(), too_long(), too_long(), text("the summary"), text("done")])
    result = await engine(model).run(worker(summarize()), "go on", previous=full(40))
    sizes = [estimate_request_tokens(request) for request in model.calls[:4]]

    assert "done" == result.text
    assert sorted(sizes, reverse=True) == sizes
    assert len(set(sizes)) == 4
    assert_paired(model.calls)


# --- what a replay needs to know ------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X28", "requirements:I2", "replay:J11")
async def test_replay_uses_recorded_context_length() -> None:
    def handle(ctx: Any) -> Any:
        yield AgentCall(child, "dig")
        yield STEP_ALL

    child = attrs.evolve(worker(summarize(), limits=Limits(max_steps=60)), id="child")
    parent = worker(summarize(), spawnable_agents=[child], handle_steps=handle)
    model, journal = Worker(120), MemoryJournal()
    result = await engine(model, 3_000).run(parent, "dig", journal=journal)

    assert RunStatus.COMPLETED is result.status
    assert len(model.summaries) > 3
    for later in (None, 100, 1_000_000):
        again = await engine(Worker(0), later).replay(MemoryJournal(journal.lines()), agent=parent)

        assert again.state == result.state
        assert journal.lines() == again.journal.lines()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J11")
async def test_resumed_run_keeps_its_original_context_length() -> None:
    def handle(ctx: Any) -> Any:
        for _ in range(20):
            yield STEP
        yield from Ask("Deeper?")
        yield STEP_ALL

    agent, journal = worker(summarize(), handle_steps=handle), MemoryJournal()
    first, second = Worker(60), Worker(60)
    waiting = await engine(first, 3_000).run(agent, "dig", journal=journal)
    done = await engine(second, 100_000).resume(journal, agent=agent, answers={"Deeper?": "yes"})

    assert [RunStatus.SUSPENDED, RunStatus.COMPLETED] == [waiting.status, done.status]
    assert max(estimate_request_tokens(request) for request in second.requests) < 3_000
    assert 1 == sum('"context_window"' in str(line) for line in journal.lines())
    assert (await engine(Worker(0)).replay(journal, agent=agent)).state == done.state
