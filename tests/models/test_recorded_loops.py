"""Closed loops of recorded traffic: what we decode from one exchange re-encodes to the next request (recorded use R7)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.models.loops import DIFFERENCES, judge, loops
from tests.models.recorded import NAMES, needs_recordings

pytestmark = needs_recordings

EXPECTED = {
    ("anthropic", "equal"): 28,
    ("openai_chat", "equal"): 32,
    ("openai_chat", "documented"): 1,
    ("openai", "equal"): 9,
    ("openai", "documented"): 10,
    ("google", "documented"): 28,
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G10", "reliability:MP60", "ecosystem:EC99", "ecosystem:EC91")
def test_listed_loop_differences_are_complete_and_all_needed():
    verdicts = [(NAMES[loop.first.wire], judge(loop)) for loop in loops()]
    different = [(v.ours, v.theirs) for _, v in verdicts if v.kind == "different"]
    assert Counter((wire, verdict.kind) for wire, verdict in verdicts) == EXPECTED, different
    documented = {(wire, why) for wire, verdict in verdicts if verdict.kind == "documented" for why in verdict.reasons}
    recorded = {wire for wire, _ in verdicts}
    assert documented == {(wire, why) for wire in recorded for why in DIFFERENCES.get(wire, ())}
