"""``truncate``, and what all policies share: limits, views and records."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine.context import ContextLimits, mask_tool_results, output_cache, prune_to_summary, summarize, truncate
from stepengine.context.policy import make_hook_limits
from stepengine.context.truncation import GAP_TAG
from stepengine.data.definition import AgentDefinition
from stepengine.data.estimate import Measured
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import ContextOverflow, DefinitionError
from tests.context.conversations import NOW, context, instructions, prompt, step

BIG = "x" * 4_000
HISTORY = [
    prompt("the task"),
    instructions("old rules"),
    *step(1, result=BIG),
    UserMessage("remember", ("PINNED",)),
    *step(2, result=BIG),
    prompt("more"),
    instructions("rules"),
    *step(3, result=BIG),
    UserMessage("by the way"),
    *step(4, result=BIG),
]


def shown(transcript: Transcript | None) -> list[str]:
    """The messages as words: texts of users, ids of calls and results, dots for gaps."""
    assert transcript is not None
    found = []
    for message in transcript:
        if isinstance(message, UserMessage):
            found.append("..." if GAP_TAG in message.tags else message.text)
        elif isinstance(message, AssistantMessage):
            found.append("+".join(call.tool_call_id for call in message.tool_calls) or message.text)
    return found


@pytest.mark.spec("requirements:I5", "generator-contract:L31", "generator-contract:P33")
@pytest.mark.parametrize(
    ("size", "options", "kept"),
    [
        (4_100, {}, "the task|...|more|rules|c3|by the way|c4"),
        (4_100, {"free_ratio": 0}, "the task|...|remember|c2|more|rules|c3|by the way|c4"),
        (3_500, {"keep_tags": ["PINNED"]}, "the task|...|remember|...|more|rules|c3|by the way|c4"),
        (10, {}, "the task|...|more|rules|...|by the way|..."),
    ],
)
def test_oldest_exchanges_are_dropped_whole_with_one_gap_note(size: int, options: Any, kept: str) -> None:
    shorter = truncate(**options).rewrite(Transcript(HISTORY), ContextLimits(max_tokens=size), NOW)

    assert kept == "|".join(shown(shorter))


@pytest.mark.spec("requirements:I5")
def test_gap_notes_do_not_accumulate() -> None:
    limits = ContextLimits(max_tokens=3_500)
    view = truncate().rewrite(Transcript(HISTORY), limits, NOW)
    assert view is not None
    for number in range(5, 25):
        view = view.extend(step(number, result=BIG))
        view = truncate().rewrite(view, limits, NOW) or view
        assert limits.fits(view)
        assert 3 >= shown(view).count("...")
        assert "the task" == shown(view)[0]
        assert f"c{number}" == shown(view)[-1]
    without_user = Transcript([*step(1, result=BIG), *step(2, result=BIG)])
    assert ["...", "c2"] == shown(truncate().rewrite(without_user, ContextLimits(max_tokens=1_500), NOW))


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:I1", "requirements:I2", "requirements:X45")
def test_system_prompt_tools_and_step_prompt_count_for_the_size() -> None:
    spec = ToolSpec("look", "d" * 400, {"type": "object"})
    agent = AgentDefinition("a", step_prompt="p" * 400)
    fields: dict[str, Any] = {"system_prompt": "s" * 400, "tool_definitions": {"look": spec}}
    plain, full = (
        make_hook_limits(context([prompt("x")])),
        make_hook_limits(context([prompt("x")], agent=agent, **fields)),
    )

    assert 0 == plain.overhead
    assert 300 < full.overhead < 340
    assert full.size(Transcript()) == full.overhead
    assert full.room == 100_000 - full.overhead


@pytest.mark.spec("requirements:X45")
def test_provider_reported_size_scales_the_limit() -> None:
    view = Transcript(HISTORY)
    estimate = make_hook_limits(context(view)).size(view)
    twice = context(view, measured=Measured("", view, 2 * estimate))
    half = context(view, measured=Measured("", view, estimate // 2))

    assert 2 * estimate == make_hook_limits(twice).size(view)
    assert truncate(estimate + 1)(context(view)) is None
    cut = truncate(estimate + 1, free_ratio=0)(twice)
    assert cut is not None
    assert cut.view is not None
    assert make_hook_limits(context(cut.view)).size(cut.view) <= (estimate + 1) // 2
    assert truncate(estimate - 1)(context(view)) is not None
    assert truncate(estimate - 1)(half) is None


@pytest.mark.spec("reliability:MP02")
@pytest.mark.parametrize("make", [truncate, mask_tool_results])
def test_refused_prompt_is_halved_even_if_estimate_fits(make: Any) -> None:
    view = Transcript(HISTORY)
    assert make()(context(view)) is None
    change = make(free_ratio=0)(context(view, overflow=ContextOverflow("too long")))
    assert change.view is not None
    limits = ContextLimits(max_tokens=1)
    assert limits.size(change.view) <= limits.size(view) // 2


@pytest.mark.spec("generator-contract:P32", "requirements:I15")
def test_policy_changes_view_or_record_on_request() -> None:
    record, view = Transcript(HISTORY), Transcript(HISTORY[2:])
    limits = ContextLimits(max_tokens=2_500)
    shown_only, stored = [truncate(2_500, replace_record=r)(context(view, record)) for r in (False, True)]

    assert (truncate().rewrite(view, limits, NOW), None) == (shown_only.view, shown_only.messages)
    assert (None, truncate().rewrite(record, limits, NOW)) == (stored.view, stored.messages)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (truncate, {"max_tokens": 0}, "truncate: max_tokens must be a number of tokens, at least 1, or None"),
        (truncate, {"free_ratio": 1}, "truncate: free_ratio must be a share of at least 0 and below 1, not 1"),
        (mask_tool_results, {"free_ratio": -0.1}, "mask_tool_results: free_ratio must be a share"),
        (mask_tool_results, {"keep_last": -1}, "mask_tool_results: keep_last must be a number of at least 0"),
        (mask_tool_results, {"max_chars": -1}, "mask_tool_results: max_chars must be a number of at least 0"),
        (prune_to_summary, {"max_tokens": 0}, "prune_to_summary: max_tokens must be a number "),
        (prune_to_summary, {"user_budget": -1}, "prune_to_summary: user_budget must be a number "),
        (prune_to_summary, {"assistant_tool_budget": -1}, "prune_to_summary: assistant_tool_budget must be a number "),
        (output_cache, {"max_chars": -1}, "output_cache: "),
        (output_cache, {"free_ratio": 1.0}, "output_cache: "),
        (output_cache, {"free_ratio": -0.1}, "output_cache: "),
        (summarize, {"window_ratio": 0}, "summarize: "),
        (summarize, {"window_ratio": 1.1}, "summarize: "),
        (summarize, {"max_tokens": 0}, "summarize: "),
        (summarize, {"keep_last": -1}, "summarize: "),
    ],
)
def test_policies_reject_invalid_options(make: Any, options: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        make(**options)
