"""
`simulate(agent, from_journal=...)`: a recorded run in which one thing goes wrong at each effect (evaluation JG83).
"""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import STEP_ALL, AgentCall, AgentDefinition, Ask, Engine, RunStatus, Tool, ToolCall
from stepengine.errors import JournalError, ToolError
from stepengine.events import Notification
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, simulate, text, tool_call
from stepengine.testing.simulation import SimulationFailed

SCHEMA = {"type": "object", "properties": {"order": {"type": "string"}}}


class Desk:
    """
    A desk that pays money back: it looks an order up, asks a person, pays, and says so.

    Args:
        careless: Whether it says that it has paid whatever became of the payment.
        obedient: Whether it pays only when the person agrees.
    """

    def __init__(self, *, careless: bool = False, obedient: bool = True) -> None:
        self.called: list[str] = []
        tools = [
            Tool(name=name, description=name, input_schema=SCHEMA, run=self.runs(name), in_thread=False)
            for name in ("look", "pay")
        ]
        child = AgentDefinition("teller", model="t/m", tools=tools[:1])

        def handle_steps(ctx: Any) -> Any:
            yield STEP_ALL
            asked = yield from AgentCall(child, "what is it worth?")
            answer = yield from Ask("Pay?", options=["yes", "no"])
            ctx.notify("answered", {"answer": answer})
            if answer == "no" and obedient:
                return "not paid"
            try:
                yield from ToolCall("pay", {"order": "7"})
            except ToolError:
                if not careless:
                    return "not paid"
            return f"paid after {ctx.random.randint(0, 9)} {len(str(asked)) >= 0}"

        self.agent = AgentDefinition(
            "desk", model="t/m", tools=tools, spawnable_agents=[child], handle_steps=handle_steps
        )

    def runs(self, name: str) -> Any:
        def run(given: Any) -> str:
            self.called.append(name)
            return f"{name} of {given['order']} done"

        return run

    def recorded(self) -> MemoryJournal:
        journal = MemoryJournal()
        replies = [tool_call("look", {"order": "7"}), text("looked"), tool_call("look", {"order": "7"}), text("ten")]
        with Engine([self.agent], models=ScriptedModel(replies), pricing=None) as engine:
            result = engine.run_sync("desk", "pay back", journal=journal, answers={"Pay?": "yes"})
        assert result.status is RunStatus.COMPLETED
        self.called.clear()
        return journal


def results_of(state: Any) -> list[tuple[str, bool]]:
    return [(m.tool_name, m.is_error) for m in state.message_history if m.role == "tool"]


def pays_before_it_says_so(state: Any, events: Any) -> bool:
    """
    Who says that money was paid has a payment that went well.
    """
    said = str(state.output or "").startswith("paid")
    return not said or ("pay", False) in results_of(state)


def says_paid_only_when(state: Any, events: Any) -> None:
    assert pays_before_it_says_so(state, events), "it says paid, and nothing was paid"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG83")
def test_a_correct_agent_survives_every_fault_at_each_effect() -> None:
    """
    Of a run of ten effects every kind that fits happens once at each; nothing is performed.
    """
    desk = Desk()
    journal = desk.recorded()
    seen = simulate(desk.agent, from_journal=journal, invariants=[says_paid_only_when])

    models, tools, spawns, asks = [
        sum(i.type == kind for i in journal.history().intents.values()) for kind in ("model_call", "tool_call", "agent_call", "ask")
    ]  # fmt: skip
    spawns -= 1  # the root's own
    assert (4, 3, 1, 1) == (models, tools, spawns, asks)
    places = models * 6 + tools * 4 + spawns * 3 + asks * 3
    assert places + 1 == seen.runs
    assert {"failure", "timeout", "crash", "crash_after", "other_answer", "empty", "cut"} == {*seen.faults}
    assert (models, models, asks) == (seen.faults["empty"], seen.faults["cut"], seen.faults["other_answer"])
    assert [] == desk.called


@pytest.mark.spec("evaluation:JG83")
def test_the_world_repeats_the_recorded_answers() -> None:
    desk = Desk()
    journal = desk.recorded()
    outputs: list[Any] = []
    simulate(
        desk.agent, from_journal=journal, faults=(), invariants=[lambda state, events: outputs.append(state.output)]
    )

    recorded = journal.history().outcome(journal.history().results["", -1])
    assert recorded.value.output == outputs[-1]  # type: ignore[union-attr]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG83")
@pytest.mark.parametrize(
    ("flaw", "kind"), [({"careless": True}, {"failure", "timeout"}), ({"obedient": False}, {"other_answer"})]
)
def test_a_broken_invariant_is_reported_with_its_single_fault(flaw: Any, kind: set[str]) -> None:
    """
    A desk that says paid when the payment failed, and one that pays although the person said no.
    """
    desk = Desk(**flaw)
    journal = desk.recorded()

    def only_when_agreed(state: Any, events: Any) -> bool:
        no = any(isinstance(event, Notification) and event.data["answer"] == "no" for event in events)
        return not (no and str(state.output or "").startswith("paid"))

    with pytest.raises(SimulationFailed) as failed:
        simulate(desk.agent, from_journal=journal, invariants=[says_paid_only_when, only_when_agreed])

    assert "own" == failed.value.row
    assert 1 == len(failed.value.faults)
    assert failed.value.faults[0].kind in kind
    with pytest.raises(SimulationFailed):
        simulate(
            desk.agent, from_journal=journal, invariants=[says_paid_only_when, only_when_agreed],
            faults=failed.value.faults,
        )  # fmt: skip


@pytest.mark.spec("evaluation:JG83")
def test_an_invariant_is_checked_before_each_effect_with_earlier_events() -> None:
    desk = Desk()
    journal = desk.recorded()
    places: list[tuple[str, int]] = []
    simulate(
        desk.agent, from_journal=journal, faults=(),
        invariants=[lambda state, events: places.append((state.agent_id, len(events)))],
    )  # fmt: skip

    assert {"desk", "teller"} == {agent for agent, _ in places}
    assert [n for _, n in places] == sorted([n for _, n in places])
    assert len(places) >= len(journal.history().intents)


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG83")
def test_places_in_a_long_run_are_sampled_deterministically() -> None:
    work = Tool(name="work", description="Work.", input_schema=SCHEMA, run=lambda given: "done", in_thread=False)
    agent = AgentDefinition("long", model="t/m", tools=[work])
    journal = MemoryJournal()
    replies = [*[tool_call("work", {"order": str(n)}) for n in range(30)], text("done")]
    with Engine([agent], models=ScriptedModel(replies), pricing=None) as engine:
        engine.run_sync("long", "go", journal=journal)
    once, again = [simulate(agent, from_journal=journal) for _ in range(2)]

    assert 201 == once.runs == again.runs
    assert once == again


@pytest.mark.spec("evaluation:JG83", "evaluation:JG119")
def test_a_file_that_is_no_journal_is_refused(tmp_path: Any) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(JournalError):
        simulate(Desk().agent, from_journal=tmp_path / "bad.jsonl")
