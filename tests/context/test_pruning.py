"""``prune_to_summary``: when it fires, what it keeps, and in which form."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, AgentState, Engine, Hooks, RunStatus, ToolCall
from stepengine.context import ContextLimits, prune_to_summary
from stepengine.context.pruning import (
    CONTINUE_TAG,
    LAST_REQUEST,
    MEMORY_TAG,
    SEPARATOR,
    SUMMARY_TAG,
    cut_to_tokens,
)
from stepengine.data.codec import to_json
from stepengine.data.estimate import message_tokens
from stepengine.data.messages import AssistantMessage, DocumentPart, ImagePart, TextPart, ThinkingPart, UserMessage
from stepengine.data.transcript import Transcript
from stepengine.errors import ContextOverflow
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text
from tests.context.conversations import NOW, PNG, context, instructions, prompt, step

WIDE = ContextLimits(max_tokens=400_000)
LONG = "words " * 3_000
ANOTHER = ImagePart(data=b"other")
PDF = DocumentPart(data=b"%PDF-1.7")
SHEET = DocumentPart(data=b"a,b", mime_type="text/csv")


def pruned(*messages: Any, limits: ContextLimits = WIDE, **options: Any) -> Transcript:
    result = prune_to_summary(**options).summarize_turns(Transcript(messages), limits)
    assert result is not None
    return result


def entries(transcript: Transcript) -> list[tuple[str, str]]:
    """Role and text of every entry of a summary."""
    parts = [p for p in transcript[0].content if isinstance(p, TextPart) and p.provider_data]
    return [(p.provider_data["entry"], p.text.removeprefix(SEPARATOR)) for p in parts if p.provider_data]


def texts(transcript: Transcript) -> list[str]:
    return [text for _, text in entries(transcript)]


def noise(number: int, size: int = 4_000) -> list[Any]:
    return step(number, result="x" * size)


# --- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:I2", "generator-contract:P2", "generator-contract:P3")
@pytest.mark.parametrize(("size", "fires"), [(199_000, False), (199_001, True)])
def test_history_is_too_large_when_size_plus_margin_exceeds_limit(size: int, fires: bool) -> None:
    frame = message_tokens(UserMessage("")) * 2
    history = Transcript([AssistantMessage("x" * 4 * (size - frame - 100)), prompt("y" * 400)])
    for window, limit in ((None, 200_000), (250_000, None)):
        ctx = context(history, context_window=window)
        change = prune_to_summary(limit)(ctx)
        assert fires == (change is not None)
        assert fires == bool(ctx.logger.lines)


@pytest.mark.spec("generator-contract:P2")
def test_images_calls_results_and_overhead_count_towards_size() -> None:
    limits = ContextLimits(max_tokens=5_000)
    history = Transcript([prompt("a"), *step(1, given={"path": "x" * 400}), prompt("b")])
    small = limits.size(history)

    assert 400 // 4 <= small < 250
    assert 1_600 <= limits.size(Transcript([*history, prompt("c", PNG)])) - small < 1_620
    assert small + 300 == ContextLimits(max_tokens=5_000, overhead=300).size(history)
    assert ContextLimits.for_state(context(history, system_prompt="s" * 400).state).overhead == 100


COLD = [prompt("first"), *noise(1, 8_000), AssistantMessage("done"), prompt("again")]
LATE = timedelta(minutes=31)


@pytest.mark.spec("generator-contract:P4", "generator-contract:P5")
@pytest.mark.parametrize(
    ("messages", "options", "since", "reason"),
    [
        pytest.param(COLD, {"cold_min_tokens": None}, LATE, "cache_expiry", id="late"),
        pytest.param(COLD, {"cold_min_tokens": None}, timedelta(minutes=30), None, id="just in time"),
        pytest.param(COLD, {"cold_min_tokens": None}, None, None, id="time unknown"),
        pytest.param(COLD, {"cold_min_tokens": None, "cold_after": None}, LATE, None, id="switched off"),
        pytest.param(COLD, {}, LATE, None, id="below the floor"),
        pytest.param(COLD, {"cold_min_tokens": 2_000}, LATE, "cache_expiry", id="at the floor"),
        pytest.param(COLD, {"max_tokens": 1_500}, LATE, "context_limit", id="size ignores the floor"),
        pytest.param(
            COLD, {"max_tokens": 1_500, "cold_min_tokens": None}, LATE, "context_limit_and_cache_expiry", id="both"
        ),
        pytest.param(
            [*COLD, AssistantMessage("I")], {"cold_min_tokens": None}, LATE, None, id="in the middle of a turn"
        ),
        pytest.param([prompt("only " * 999)], {"cold_min_tokens": None}, LATE, None, id="the first request"),
    ],
)
def test_late_request_makes_the_cache_cold(messages: Any, options: Any, since: Any, reason: str | None) -> None:
    policy = prune_to_summary(**{"cold_after": timedelta(minutes=30), "max_tokens": 100_000, **options})
    asked = None if since is None else NOW - since
    limits = ContextLimits(max_tokens=policy.max_tokens or 0)

    assert reason == policy.find_prune_reason(Transcript(messages), limits, NOW, asked)
    assert (reason is None) == (policy.rewrite(Transcript(messages), limits, NOW, asked) is None)
    ctx = context(messages, context={} if asked is None else {LAST_REQUEST: asked.isoformat()})
    change = policy(ctx)
    if reason is not None:
        assert change is not None
        assert change.view is not None
        assert [("pruned the history to a summary", {"reason": reason})] == ctx.logger.lines
    if policy.cold_after is not None:
        assert change is not None
        assert change.context == {LAST_REQUEST: NOW.isoformat()}


@pytest.mark.spec("generator-contract:P4", "generator-contract:P5")
async def test_cold_trigger_fires_once_in_a_later_run() -> None:
    policy = prune_to_summary(cold_after=timedelta(milliseconds=1), cold_min_tokens=None)
    agent = AgentDefinition("a", model="test/m", hooks=Hooks(pre_step=[policy]))
    provider = ScriptedModel([text(LONG), text("two"), text("three")])
    async with Engine(models=provider) as engine:
        first = await engine.run(agent, "one")
        old = attrs.evolve(first.state, context={LAST_REQUEST: (NOW - LATE).isoformat()})
        second = await engine.run(agent, "two", previous=old)
    assert SUMMARY_TAG not in first.state.view[0].tags
    assert SUMMARY_TAG in second.state.view[0].tags
    assert ["one", LONG, "two", "two"] == [m.text for m in second.state.message_history]
    assert second.state.context[LAST_REQUEST] > first.state.context[LAST_REQUEST]


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:P24", "generator-contract:P11", "generator-contract:P30")
def test_request_before_its_turn_stays_a_separate_message() -> None:
    live, rules = prompt("now this", PNG), instructions("second")
    result = pruned(prompt("old"), instructions("first"), *noise(1), live, rules)

    assert [SUMMARY_TAG, "INSTRUCTIONS_PROMPT", "USER_PROMPT"] == [m.tags[0] for m in result]
    assert (rules, live) == (result[1], result[2])
    assert MEMORY_TAG in result[0].tags
    assert ["[USER]\nold", "- look"] == texts(result)
    assert not [p for p in result[0].content if isinstance(p, ImagePart)]


@pytest.mark.spec("generator-contract:P11", "generator-contract:P13")
def test_request_in_mid_turn_is_summarised_with_continue_note() -> None:
    result = pruned(prompt("old", PNG), AssistantMessage("yes"), prompt("now this", ANOTHER), *noise(1))

    assert [SUMMARY_TAG, CONTINUE_TAG] == [m.tags[0] for m in result]
    assert ["[USER] (with 1 image)\nold", "Progress note: yes", "[USER] (with 1 image)\nnow this", "- look"] == texts(
        result
    )
    assert [ANOTHER] == [p for p in result[0].content if isinstance(p, ImagePart)]
    assert [CONTINUE_TAG] == list(pruned(AssistantMessage(LONG))[1].tags)


@pytest.mark.spec("generator-contract:P11", "generator-contract:P12", "generator-contract:P24")
@pytest.mark.parametrize("tag", ["INSTRUCTIONS_PROMPT", "AGENT_SPAWN_NOTICE", CONTINUE_TAG])
def test_engine_messages_are_not_summarised_and_start_no_turn(tag: str) -> None:
    result = pruned(prompt("old"), *noise(1), prompt("live"), UserMessage("engine speaking", (tag,)))

    assert "live" == result[-1].text
    assert ["[USER]\nold", "- look"] == texts(result)
    summary = pruned(prompt("older"), *noise(2), prompt("x"))[0]
    written = UserMessage("by the model", ("SUMMARY",))
    late = pruned(prompt("old"), *noise(1), prompt("live"), summary, written)
    assert "live" == late[-1].text
    assert "[EARLIER SUMMARY]\nby the model" == texts(late)[-1]


@pytest.mark.spec("generator-contract:P14", "generator-contract:P15", "generator-contract:P16")
def test_long_texts_are_cut_in_the_middle_and_blanks_dropped() -> None:
    long = "".join(chr(97 + n % 26) for n in range(50_000))
    said = AssistantMessage((ThinkingPart("secret"), TextPart(f"<think>hush</think>{long}<think>no tag")))
    result = pruned(prompt(long), prompt("  \n "), prompt("", PNG), said, AssistantMessage(()), prompt("live"))
    user, note = texts(result)

    assert user == f"[USER]\n{cut_to_tokens(long, 13_000)}"
    # A tag in the middle of a text takes nothing of it away.
    assert note == f"Progress note: {cut_to_tokens(f'{long}<think>no tag', 1_300)}"
    for tokens in (13_000, 1_300):
        kept = tokens * 3 - 50
        head, notice, tail = cut_to_tokens(long, tokens).split("\n")
        assert (int(kept * 0.8), kept) == (len(head), len(head) + len(tail))
        assert long.startswith(head)
        assert long.endswith(tail)
        assert f"[... {50_000 - kept} characters left out ...]" == notice
        assert len(cut_to_tokens(long, tokens)) <= tokens * 3
    assert "short" == cut_to_tokens("short", 2)
    assert [PNG] == [p for p in result[0].content if isinstance(p, ImagePart)]


@pytest.mark.spec("generator-contract:P18")
def test_outputs_of_forgotten_agents_are_dropped() -> None:
    children = [{"agent_type": name, "output": "tests pass"} for name in ("helper", "basher")]
    history = [prompt("go"), *noise(2), *step(1, "spawn_agents", {}, children), prompt("live")]
    assert "[spawn_agents result]\nhelper: tests pass" in texts(pruned(*history, forgotten_agents=["basher"]))
    assert "basher: tests pass" in "".join(texts(pruned(*history)))


# --- budgets and earlier summaries ----------------------------------------------------------------------------------


def turn(number: int, size: int) -> list[Any]:
    return [prompt(f"u{number} " + "x" * size), AssistantMessage(f"a{number} " + "y" * size)]


@pytest.mark.spec("generator-contract:P22", "generator-contract:P32")
def test_role_budget_closes_at_first_entry_that_does_not_fit() -> None:
    history = [*noise(1, 20_000), *turn(1, 30), *turn(2, 3_000), *turn(3, 300), *turn(4, 300), prompt("live")]

    def kept(**budgets: int) -> list[str]:
        found = texts(pruned(*history, **budgets))
        return [t.removeprefix("[USER]\n").removeprefix("Progress note: ")[:2] for t in found if t != "- look"]

    assert ["u1", "a1", "u2", "a2", "u3", "a3", "u4", "a4"] == kept()
    assert ["a1", "a2", "u3", "a3", "u4", "a4"] == kept(user_budget=300)
    assert ["u1", "u2", "u3", "a3", "u4", "a4"] == kept(assistant_tool_budget=300)
    assert ["u4", "a4"] == kept(user_budget=110, assistant_tool_budget=0)
    assert ["a4"] == kept(user_budget=0, assistant_tool_budget=0)


@pytest.mark.spec("generator-contract:P29", "generator-contract:P11")
def test_mid_turn_request_survives_zero_budgets_and_later_prunes() -> None:
    history = [prompt("before"), AssistantMessage("x"), prompt("the request"), *noise(1), *noise(2)]
    first = pruned(*history, user_budget=0, assistant_tool_budget=0)
    second = pruned(*first, *noise(3), AssistantMessage(LONG), user_budget=0, assistant_tool_budget=0)
    third = pruned(
        *second, *noise(4), prompt("the next"), AssistantMessage(LONG), user_budget=0, assistant_tool_budget=0
    )

    assert "[USER]\nthe request" in texts(first)
    assert "[USER]\nthe request" in texts(second)
    assert "[USER]\nthe next" in texts(third)
    assert "[USER]\nthe request" not in texts(third)


@pytest.mark.spec("generator-contract:P14", "generator-contract:P12", "generator-contract:P24")  # fmt: skip
def test_summaries_are_recognised_by_tag_and_stored_as_entries() -> None:
    tricky = "one\n\n---\n\n[USER]\ntwo <conversation_summary> three"
    first = pruned(prompt(tricky), *noise(1), prompt("live"))
    other = pruned(prompt("elsewhere"), *noise(2), prompt("live"))
    assert [("user", f"[USER]\n{tricky}"), ("assistant", "- look")] == entries(first)
    assert all(p.text.startswith("\n\n---\n\n") for p in first[0].content[1:-1])

    again = pruned(first[0], *noise(3), other[0], AssistantMessage(LONG), prompt("live"), assistant_tool_budget=9_000)
    assert [*entries(first), ("assistant", "- look"), *entries(other)] == entries(again)[:5]
    fake = UserMessage("<conversation_summary>\n---\n[USER]\nx</conversation_summary>", ("USER_PROMPT",))
    assert [f"[USER]\n{fake.text}", "- look"] == texts(pruned(fake, *noise(4), prompt("live")))
    foreign = UserMessage(
        TextPart("the user wanted bananas", provider_data={"provider": "elsewhere", "id": 1}), (SUMMARY_TAG,)
    )
    assert "[EARLIER SUMMARY]\nthe user wanted bananas" in texts(pruned(foreign, *noise(5), prompt("live")))
    stored = Transcript.from_dicts([to_json(m) for m in again])
    assert entries(again) == entries(stored)


@pytest.mark.spec("generator-contract:P13")
def test_images_survive_prunes_until_newer_ones_arrive() -> None:
    first = pruned(prompt("look", PNG, PNG), *noise(1))
    second = pruned(*first, UserMessage("no image"), *noise(2), AssistantMessage(LONG))
    third = pruned(*second, prompt("and", ANOTHER), *noise(3), AssistantMessage(LONG))
    shown = [[p for p in m[0].content if isinstance(p, ImagePart)] for m in (first, second, third)]

    assert [[PNG, PNG], [PNG, PNG], [ANOTHER]] == shown


@pytest.mark.spec("generator-contract:P13", "generator-contract:P29")
@given(
    st.lists(st.lists(st.sampled_from([PNG, ANOTHER, PDF, SHEET]), max_size=3, unique=True), min_size=1, max_size=4),
    st.booleans(),
)
def test_newest_images_and_documents_survive_any_prunes(sent: list[list[Any]], is_repeated: bool) -> None:
    images: list[Any] = []
    documents: list[Any] = []
    history: list[Any] = []
    for number, media in enumerate(sent):
        history += [prompt("see", *media), *noise(number), AssistantMessage(LONG)]
        history = [*pruned(*history)] if is_repeated else history
        images = [p for p in media if isinstance(p, ImagePart)] or images
        documents = [p for p in media if isinstance(p, DocumentPart)] or documents

    summary = pruned(*history, AssistantMessage(LONG))[0]
    assert [*images, *documents] == [p for p in summary.content if isinstance(p, ImagePart | DocumentPart)]


@pytest.mark.spec("generator-contract:P14", "generator-contract:P29")
def test_request_that_is_only_a_document_survives_prunes() -> None:
    first = pruned(prompt("", SHEET), *noise(1), prompt("", PDF), *noise(2), user_budget=0, assistant_tool_budget=0)
    second = pruned(*first, *noise(3), AssistantMessage(LONG), user_budget=0, assistant_tool_budget=0)
    both = texts(pruned(prompt("", SHEET), *noise(1), prompt("read", PNG, PDF, SHEET), *noise(2)))

    for summary in (first, second):
        assert "[USER] (with 1 document)" == texts(summary)[0]
        assert [PDF] == [p for p in summary[0].content if isinstance(p, DocumentPart)]
    assert ["[USER] (with 1 document)", "[USER] (with 1 image and 2 documents)\nread"] == [
        entry for entry in both if "[USER]" in entry
    ]


def test_summary_with_images_uses_half_of_a_small_window() -> None:
    limits = ContextLimits(max_tokens=10_000)
    live = prompt("r" * 10_000, *[PNG] * 5)
    history = [*[m for n in range(40) for m in turn(n, 1_000)], live, AssistantMessage("x")]
    result = pruned(*history, limits=limits)

    assert 3 == sum(isinstance(part, ImagePart) for part in result[0].content)
    assert limits.size(result) < 5_000 + 2_500 + 100
    small = pruned(*history[:-2], prompt("r" * 10_000), AssistantMessage("x"), limits=limits)
    assert 3_500 < limits.size(small) < 5_100
    assert "r" * 10_000 in small[0].text


AGENTS = {"agents": [{"agent_type": "helper", "prompt": "p" * 990}] * 40}


@pytest.mark.parametrize(
    "newest",
    [step(900, "spawn_agents", AGENTS), [UserMessage("u" * 40_000)], [AssistantMessage("a" * 40_000)], []],
    ids=["calls", "user", "reply", "none"],
)
@pytest.mark.parametrize("live", [prompt("r" * 4_000), prompt("short")], ids=["long", "short"])
def test_large_new_messages_still_fit_a_small_window(newest: list[Any], live: Any) -> None:
    limits = ContextLimits(max_tokens=4_000)
    history = [*[m for n in range(20) for m in turn(n, 1_000)], instructions("i" * 6_000)]
    before, during = [*history, *newest, live], [*history, live, AssistantMessage("x"), *newest]

    assert limits.size(pruned(*before, limits=limits)) < 3_500
    assert limits.size(pruned(*during, limits=limits)) < 3_500


@pytest.mark.spec("generator-contract:P22")
@pytest.mark.parametrize("live", ["short", "long " * 2_000])
@pytest.mark.parametrize("tokens", [1, 300, 2_000])
def test_notes_of_the_newest_steps_survive_any_window(tokens: int, live: str) -> None:
    """
    Otherwise every request of an agent in a small window would be the same as the one before, and so would its replies.
    """
    said = [[TextPart(f"Page {n} says: " + "much, " * 400)] for n in range(9)]
    steps = [m for n in range(9) for m in step(n, "read_files", {"paths": [f"page{n}.md"]}, said=said[n])]
    notes = texts(pruned(prompt(live), *steps, limits=ContextLimits(max_tokens=tokens)))[-4:]

    assert [f"Progress note: Page {n} says" for n in range(5, 9)] == [
        note.partition(" says")[0] + " says" for note in notes
    ]


def test_notes_use_budget_left_over_by_user_text() -> None:
    limits = ContextLimits(max_tokens=4_000)
    steps = [m for n in range(60) for m in step(n, "read_files", {"paths": [f"src/package/module_{n}.py" * 4]})]
    kept = texts(pruned(prompt("Read all."), *steps, limits=limits))

    assert 1_600 < sum(len(text) for text in kept) // 3 < 2_000


# --- as a hook and from a handler -----------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:P32")
async def test_a_handler_prunes_with_one_set_messages_that_replays() -> None:
    policy = prune_to_summary(user_budget=100)

    def handle(ctx: Any) -> Any:
        state = ctx.agent_state
        limits = ContextLimits.for_state(state, max_tokens=2_000)
        shorter = policy.rewrite(state.view, limits, ctx.now())
        messages = [to_json(m) for m in shorter]
        yield ToolCall("set_messages", {"messages": messages}, include_tool_call=False)
        yield from ()

    agent = AgentDefinition("a", model="test/m", handle_steps=handle)
    old = AgentState.from_messages([prompt("old"), *noise(1, 20_000)])
    journal = MemoryJournal()
    async with Engine(models=ScriptedModel([])) as engine:
        result = await engine.run(agent, "the request", previous=old, journal=journal)
        again = await engine.replay(journal, agent=agent)

    assert RunStatus.COMPLETED is result.status, result.error
    assert [SUMMARY_TAG, "USER_PROMPT"] == [m.tags[0] for m in result.state.message_history]
    assert ["[USER]\nold", "- look"] == texts(result.state.message_history)
    assert result.state.message_history == again.state.message_history


@pytest.mark.spec("reliability:MP02")
def test_refused_prompt_is_pruned_even_if_estimate_fits() -> None:
    history = [prompt("go"), *noise(1, 9_000), prompt("live")]
    assert prune_to_summary()(context(history)) is None
    assert prune_to_summary()(context(history, overflow=ContextOverflow("too long"))) is not None
