"""What holds for every context policy, whatever the conversation is."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, Hooks, Limits, RunStatus, tool
from stepengine.context import ContextLimits, mask_tool_results, output_cache, prune_to_summary, summarize, truncate
from stepengine.context.pruning import CONTINUE_TAG, SUMMARY_TAG
from stepengine.context.truncation import GAP_TAG
from stepengine.data.estimate import message_tokens, transcript_tokens
from stepengine.data.events import Compacted
from stepengine.data.messages import (
    AssistantMessage,
    ImagePart,
    JsonPart,
    ToolCallPart,
    ToolMessage,
    UserMessage,
    system_reminder,
)
from stepengine.data.transcript import Transcript
from stepengine.journal import MemoryJournal
from stepengine.runtime.sizes import estimate_request_tokens
from stepengine.testing import ScriptedModel, text, tool_call
from tests.context.conversations import NOW, conversations
from tests.context.worlds import assert_paired
from tests.models.wires import FOUR, MODEL, provider_of

STEPS = 400
GAP_NOTE = UserMessage(system_reminder("Earlier messages were left out here to save space."), (GAP_TAG,))
POLICIES = {
    "truncate": truncate(),
    "truncate as little as possible": truncate(free_ratio=0),
    "mask_tool_results": mask_tool_results(tools=("look", "read_files"), keep_last=1),
    "prune_to_summary": prune_to_summary(),
    "prune_to_summary with small budgets": prune_to_summary(user_budget=50, assistant_tool_budget=20),
}
limits = st.builds(
    lambda size, overhead, ratio: ContextLimits(max_tokens=size, overhead=overhead, ratio=ratio),
    st.integers(200, 4_000),
    st.integers(0, 100),
    st.sampled_from([1.0, 1.0, 2.0, 0.5]),
)


def calls_of(transcript: Transcript) -> list[str]:
    return [m.tool_call_id for m in transcript if isinstance(m, ToolMessage)]


def in_order(some: list[Any], whole: list[Any]) -> bool:
    rest = iter(whole)
    return all(any(item is other for other in rest) for item in some)


# --- one decision ---------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:I5", "requirements:I15", "generator-contract:P30", "generator-contract:P29")
@given(conversations(), limits)
def test_shortened_history_is_paired_ordered_smaller_and_stable(transcript, within):
    before = list(transcript)
    for name, policy in POLICIES.items():
        shorter = policy.rewrite(transcript, within, NOW)
        assert before == list(transcript), name
        if shorter is not None:
            check_shortened(name, shorter, transcript, within)


def check_shortened(name: str, shorter: Transcript, transcript: Transcript, within: ContextLimits) -> None:
    policy, before = POLICIES[name], list(transcript)
    assert within.size(shorter) < within.size(transcript)
    assert in_order(calls_of(shorter), calls_of(transcript))
    assert Transcript(list(shorter)) == shorter
    kept = [
        m for m in shorter if not isinstance(m, UserMessage) or not {GAP_TAG, CONTINUE_TAG, SUMMARY_TAG} & {*m.tags}
    ]
    unchanged = [m for m in kept if not isinstance(m, ToolMessage) or name != "mask_tool_results"]
    moved = [m for m in unchanged if not (isinstance(m, UserMessage) and "INSTRUCTIONS_PROMPT" in m.tags)]
    assert in_order(moved, before)
    once = ContextLimits(max_tokens=within.max_tokens, overhead=within.overhead)
    assert policy.rewrite(shorter, within, NOW) is None
    assert policy.rewrite(shorter, once, NOW) is None


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:I1", "requirements:I5", "generator-contract:P5")
@given(conversations(), limits)
def test_history_that_fits_is_unchanged(transcript, within):
    margin = min(1_000, within.max_tokens // 20)
    for name, policy in POLICIES.items():
        if within.size(transcript) + margin <= within.max_tokens:
            assert policy.rewrite(transcript, within, NOW) is None, name
        if within.fits(transcript) and "prune" not in type(policy).__name__.lower():
            assert policy.rewrite(transcript, within, NOW) is None, name


def shapes(transcript: Transcript) -> list[tuple[Transcript, bool]]:
    """
    What is left when more and more of the oldest exchanges are left out; whether the newest would be the next to go.
    """
    starts = [i for i, m in enumerate(transcript) if not isinstance(m, ToolMessage)]
    groups = [tuple(transcript[a:b]) for a, b in pairwise([*starts, len(transcript)])]
    users = [m for m in transcript if isinstance(m, UserMessage) and GAP_TAG not in m.tags]
    must = [*users[:1], *users[-1:]]
    for tag in ("USER_PROMPT", "INSTRUCTIONS_PROMPT"):
        must += [m for m in transcript if isinstance(m, UserMessage) and tag in m.tags][-1:]
    removable = [n for n, group in enumerate(groups) if not any(group[0] is m for m in must)]
    found = []
    for count in range(len(removable) + 1):
        left: list[Any] = []
        for n, group in enumerate(groups):
            if n not in removable[:count]:
                left += group
            elif n - 1 not in removable[:count]:
                left.append(GAP_NOTE)
        found.append((Transcript(left), removable[count : count + 1] == [len(groups) - 1]))
    return found


def expected(found: list[tuple[Transcript, bool]], within: ContextLimits, free_ratio: float) -> Transcript:
    target = int(within.room * (1 - free_ratio))
    return next(
        (left for left, newest in found if transcript_tokens(left) <= (within.room if newest else target)), found[-1][0]
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:I5", "generator-contract:L31")
@given(conversations())
def test_truncate_drops_the_minimal_number_of_exchanges(transcript):
    """
    At every size at which one exchange more or less has to go, one token below it and one above.
    """
    found = shapes(transcript)
    whole = transcript_tokens(transcript)
    sizes = {transcript_tokens(left) for left, _ in found}
    for free_ratio in (0, 0.25):
        rooms = {
            max(1, round(size / share) + by) for size in sizes for share in (1, 1 - free_ratio) for by in (-1, 0, 1)
        }
        for room in sorted(rooms):
            within = ContextLimits(max_tokens=room)
            wanted = expected(found, within, free_ratio)
            is_shorter = whole > room and transcript_tokens(wanted) < whole
            shorter = truncate(free_ratio=free_ratio).rewrite(transcript, within, NOW)
            assert (wanted if is_shorter else None) == shorter, free_ratio


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec(
    "generator-contract:P29", "generator-contract:P30", "generator-contract:P11", "generator-contract:P22"
)
@given(conversations(), limits, st.integers(0, 2_000), st.integers(0, 2_000))
def test_live_request_survives_every_prune(transcript, within, users, others):
    policy = prune_to_summary(user_budget=users, assistant_tool_budget=others)
    pruned = policy.summarize_turns(transcript, within)
    if pruned is None:
        return
    live = [m for m in transcript if isinstance(m, UserMessage) and "USER_PROMPT" in m.tags][-1].text.strip()

    assert live in "".join(m.text for m in pruned)
    assert SUMMARY_TAG in pruned[0].tags
    assert isinstance(pruned[-1], UserMessage)
    assert not calls_of(pruned)
    assert len(pruned) <= 3
    assert policy.summarize_turns(pruned, within) is None
    again = policy.summarize_turns(Transcript([*pruned, AssistantMessage("x " * 2_000)]), within)
    assert again is not None
    assert live in "".join(m.text for m in again)


@pytest.mark.spec("generator-contract:P32")
def test_newest_note_is_cut_to_a_small_window():
    asked, note = UserMessage("Go.", tags=("USER_PROMPT",)), AssistantMessage("x " * 2_000)
    within = ContextLimits(max_tokens=205)
    pruned = prune_to_summary(user_budget=0, assistant_tool_budget=0).summarize_turns(Transcript([asked, note]), within)

    assert pruned is not None
    assert transcript_tokens(pruned) <= within.max_tokens


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:P32")
@given(conversations(), st.integers(600, 4_000))
def test_a_pruned_history_fits_when_request_and_instructions_leave_room(transcript, size):
    within = ContextLimits(max_tokens=size)
    pruned = prune_to_summary().summarize_turns(transcript, within) or transcript
    live = [m for m in transcript if isinstance(m, UserMessage) and "USER_PROMPT" in m.tags][-1]
    images = sum(isinstance(part, ImagePart) for part in pruned[0].content)
    whole = sum(map(message_tokens, pruned[1:])) + message_tokens(live) + 1_600 * images

    assert within.fits(pruned) or whole > size // 4


# --- runs -----------------------------------------------------------------------------------------------------------


@tool(in_thread=False)
def look(at: int) -> Any:
    """
    Look somewhere.

    Args:
        at: Where.
    """
    return "\n".join([f"line {n} of {at}" for n in range(at % 40)])


def reply(request: Any) -> Any:
    """What the model says: a summary when it is asked for one, else the next call."""
    if any("SUMMARY_REQUEST" in getattr(m, "tags", ()) for m in request.all_messages[-1:]):
        return text("The user wants everything looked at. Some of it was.")
    return None


def script(steps: int) -> list[Any]:
    """A model that looks *steps* times, and answers with a summary whenever it is asked for one."""
    done = iter(range(steps))

    def play(request: Any) -> Any:
        summary = reply(request)
        if summary is not None:
            return summary
        number = next(done, None)
        return text("All seen.") if number is None else tool_call("look", {"at": number}, text=f"Now {number}. " * 9)

    return [play] * (steps * 2)


def agent(*hooks: Any, **fields: Any) -> AgentDefinition[Any]:
    given = {
        "system_prompt": "Look at everything.",
        "instructions_prompt": "Be thorough.",
        "step_prompt": "Go on.",
        **fields,
    }
    return AgentDefinition(
        "looker", model="test/m", tools=[look], hooks=Hooks(pre_step=hooks), limits=Limits(max_steps=500), **given
    )


WINDOW = 6_000
RUNS = {
    "truncate": [truncate(WINDOW)],
    "truncate as little as possible": [truncate(WINDOW, free_ratio=0)],
    "truncate the record": [truncate(WINDOW, replace_record=True)],
    "mask, then truncate": [mask_tool_results(WINDOW, tools=["look"], max_chars=200), truncate(WINDOW)],
    "prune_to_summary": [prune_to_summary(WINDOW)],
    "prune_to_summary, also when cold": [prune_to_summary(WINDOW, cold_after=timedelta(minutes=30))],
    "prune_to_summary in the record": [prune_to_summary(WINDOW, replace_record=True)],
    "prune_to_summary with budgets": [prune_to_summary(WINDOW, user_budget=900, assistant_tool_budget=500)],
    "summarize": [summarize(WINDOW)],
    "output_cache, then truncate": [output_cache(8_000), truncate(WINDOW)],
}
LONG_RUNS = (
    "truncate as little as possible",
    "truncate the record",
    "mask, then truncate",
    "prune_to_summary",
    "prune_to_summary in the record",
    "output_cache, then truncate",
)


@pytest.mark.deep
@pytest.mark.spec("requirements:I2", "requirements:I11", "generator-contract:P32", "generator-contract:P33")
@pytest.mark.parametrize("name", LONG_RUNS)
async def test_run_of_400_steps_stays_under_window_and_replays(name: str) -> None:
    provider, journal, seen = ScriptedModel(script(STEPS - 1)), MemoryJournal(), []
    definition = agent(*RUNS[name])
    async with Engine(models=provider, observers=[seen.append]) as engine:
        result = await engine.run(definition, "Look at all of it.", journal=journal)
        again = await engine.replay(journal, agent=definition)
    steps = [r for r in provider.calls if reply(r) is None]
    sizes = [estimate_request_tokens(request) for request in steps]

    assert RunStatus.COMPLETED is result.status, result.error
    assert STEPS == len(steps)
    assert max(sizes) <= WINDOW
    assert_paired(provider.calls)
    assert all("Look at all of it." in "".join(m.text for m in r.messages) for r in steps)
    assert max(sizes) > WINDOW // 2
    compacted = [e for e in seen if isinstance(e, Compacted)]
    assert compacted
    assert all(e.tokens_after < e.tokens_before for e in compacted)
    if "record" in name:
        assert len(result.state.message_history) < 2 * STEPS
        assert result.state.view is result.state.message_history
    else:
        assert 2 * STEPS + 1 == len(result.state.message_history)
        assert {False} == {e.record for e in compacted}
    assert (again.status, again.state.view) == (result.status, result.state.view)
    assert again.state.message_history == result.state.message_history
    assert list(again.journal.lines()) == list(journal.lines())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:P32")
async def test_prompt_cache_is_lost_once_per_prune() -> None:
    lost = {}
    for name in ("prune_to_summary", "truncate"):
        provider = ScriptedModel(script(STEPS - 1))
        async with Engine(models=provider) as engine:
            await engine.run(agent(*RUNS[name]), "Look at all of it.")
        pairs = zip(provider.calls, provider.calls[1:], strict=False)
        lost[name] = sum(new.messages.shared_prefix_length(old.messages) < len(old.messages) for old, new in pairs)

    assert 0 < lost["prune_to_summary"] < STEPS // 20
    assert 0 < lost["truncate"] < STEPS // 5


@pytest.mark.spec("requirements:I15", "requirements:H16")
async def test_idle_policy_leaves_request_bytes_unchanged() -> None:
    async def bodies(*hooks: Any) -> list[Any]:
        provider = ScriptedModel(script(6))
        async with Engine(models=provider) as engine:
            result = await engine.run(agent(*hooks), "Look at all of it.")
        assert result.state.view is result.state.message_history
        return [
            provider_of(wire)._encode(request, stream=True).content
            for wire in FOUR
            for request in [_for(wire, r) for r in provider.calls]
        ]

    plain = await bodies()
    for hooks in RUNS.values():
        assert plain == await bodies(*hooks)


def _for(wire: str, request: Any) -> Any:
    return attrs.evolve(request, model=f"{wire}/{MODEL[wire]}")


def test_masks_measure_json_results() -> None:
    message = ToolMessage("c1", "look", (JsonPart({"stdout": "x" * 8_000}),))
    view = Transcript([UserMessage("go"), AssistantMessage(_call("c1")), message, AssistantMessage("ok")])
    masked = mask_tool_results().rewrite(view, ContextLimits(max_tokens=500), NOW)

    assert masked is not None
    assert f"[{len(message.text):,} characters of this result were left out" in masked[2].text


def _call(call_id: str) -> Any:
    return (ToolCallPart(call_id, "look", {}),)


@pytest.mark.spec("requirements:I18", "generator-contract:L32")
async def test_slash_prompts_have_no_special_meaning() -> None:
    for hooks in RUNS.values():
        provider = ScriptedModel([text("one"), text("two")])
        async with Engine(models=provider) as engine:
            first = await engine.run(agent(*hooks), "Look.")
            second = await engine.run(agent(*hooks), "/compact", previous=first.state)

        assert ["Look.", "Be thorough.", "one", "/compact", "Be thorough."] == [
            m.text for m in provider.calls[1].messages
        ]
        assert 6 == len(second.state.message_history)
