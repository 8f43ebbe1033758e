"""
The parts of a history alone: the runs of a record, what its inputs say, and its tool calls.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from stepengine.data.codec import encode_stored
from stepengine.data.outcomes import Failure, PartialUsage, Value
from stepengine.data.usage import Usage
from stepengine.data.waits import Awaited
from stepengine.journal.recorded_facts import RecordedFacts
from stepengine.journal.recorded_part import JournalCut
from stepengine.journal.recorded_tree import RecordedTree
from stepengine.journal.records import ROOT, Address, Input, Intent, Result


def effect(address: Address, kind: str, gather: int | None = None, **members: Any) -> tuple[Address, Intent]:
    return address, Intent(*address, {"type": kind, **members}, "", gather)


def tree_of(intents: dict[Address, Intent], *results: Result) -> RecordedTree:
    def decode(result: Result) -> Value | Failure:
        assert result.outcome is not None
        return result.outcome

    return RecordedTree(intents, {result.address: result for result in results}, decode)


def test_background_run_ends_at_its_own_path() -> None:
    intents = dict([effect(ROOT, "agent_call"), effect(("", 0), "agent_call", background=True)])
    started, ended = Result("", 0, 1, "reference"), Result("0", -1, 2, "end")

    assert tree_of(intents, started).find_end("0") is None
    assert not tree_of(intents, started).has_ended("0.3")
    assert tree_of(intents, started, ended).find_end("0") is ended
    assert tree_of(intents, started, ended).has_ended("0.3")


def test_group_ends_with_the_last_effect_that_began_together() -> None:
    intents = dict([effect(("", n), "perform", together) for n, together in enumerate([None, 1, 1, 3])])

    assert [0, 2, 2, 3] == [tree_of(intents).find_group_end(address) for address in intents]
    assert [*intents.values()] == tree_of(intents).list_effects("")
    assert [] == tree_of(intents).list_effects("0")


def test_first_wait_with_an_end_reports_it() -> None:
    intents = dict([effect(("", 0), "agent_call", background=True), effect(("", 1), "wait"), effect(("", 2), "wait")])
    none, first, second = [Awaited(done=(), open=("0",)), Awaited(done=("0",)), Awaited(done=("0",))]

    assert tree_of(intents, Result("", 1, 1, none)).find_first_report_address("0") is None
    assert ("", 2) == tree_of(intents, Result("", 1, 1, none), Result("", 2, 2, second)).find_first_report_address("0")
    assert ("", 1) == tree_of(intents, Result("", 1, 1, first), Result("", 2, 2, second)).find_first_report_address("0")


@pytest.mark.spec("waiting:WT4")
def test_cut_in_a_background_child_keeps_its_parent_until_notified() -> None:
    # Effects 3 and 4 of the root began together, 3 in the background; the wait of effect 8 reports its end.
    started = [effect(("", 3), "agent_call", 3, background=True), effect(("", 4), "agent_call", 3)]
    report = Result("", 8, 1, Awaited(done=("3",)))
    cut = JournalCut(tree_of(dict([*started, effect(("", 8), "wait")]), report))

    cut.cut_at(("3", 2))

    kept = [("", 3), ("", 4), ("", 7), ("3", 1), ("5", 9)]
    gone = [("3", 2), ("3.2", 0), ("", 8), ("", 9), ("8", 0)]
    assert [a for a in kept + gone if cut.keeps_intent(a)] == kept
    assert cut.keeps_result(("", 3))  # the reference to it, which it had at once
    assert not cut.keeps_result(("3", -1))


def test_usage_of_each_stopped_attempt_is_added() -> None:
    used = {"type": "partial_usage", "usage": encode_stored(Usage(requests=1, input_tokens=10)), "cost": "0.5"}
    facts = RecordedFacts(dict([effect(("", 0), "model_call")]), {})

    facts.add(Input("", 0, 1, used))
    facts.add(Input("", 0, 2, used))

    assert PartialUsage(Usage(requests=2, input_tokens=20), Decimal(1)) == facts.find_lost_usage(("", 0))


def test_call_without_a_word_may_have_cost_until_a_stop() -> None:
    facts = RecordedFacts(dict([effect(("", 0), "model_call"), effect(("", 1), "perform")]), {})

    assert PartialUsage(Usage(requests=1, at_least=True), Decimal(0)) == facts.find_lost_usage(("", 0))
    assert facts.find_lost_usage(("", 1)) is None
    facts.add(Input("", -1, 1, {"type": "stop", "kind": "cancelled"}))
    assert facts.find_lost_usage(("", 0)) is None


def test_recorded_lookups_are_listed_by_run() -> None:
    facts = RecordedFacts({}, {})

    facts.add(Input("0", -1, 0, {"type": "system_prompt", "text": "Be brief."}))
    facts.add(Input("", -1, 0, {"type": "context_window", "tokens": 1000}))

    assert (["context_window"], ["system_prompt"], []) == tuple(map(facts.list_lookup_types, ("", "0", "1")))
    assert ({"0": "Be brief."}, {"": 1000}) == (facts.system_prompts, facts.context_windows)
