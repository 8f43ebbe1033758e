"""
``RecordedMachines``: the machines of a recorded run tree, and the recorded values that they start with.

A machine can see three things of a record: the seed of its random numbers, the system prompt and context window that were looked up,
and placeholders for tools that the agent no longer has. It does not know that there is a record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs

from stepengine.data.effects import Spawn
from stepengine.data.json import JsonDict
from stepengine.data.outcomes import Outcome
from stepengine.data.state import AgentState
from stepengine.data.tools import Control, ToolBinding, ToolSpec, Validated
from stepengine.journal.history import History
from stepengine.journal.modes import OpenJournal
from stepengine.journal.records import Input
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.sources import needs_provenance
from stepengine.runtime.services import ChildPlanner, MachineMaker

if TYPE_CHECKING:
    from stepengine.journal.recorded_part import RecordedPart


# A prompt that is written down in the code comes from the code, so that a change of it is found at the first request;
# one that is computed comes from the record, since it may come out differently each time.
def restore_lookups(history: History, plan: RunPlan, state: AgentState) -> tuple[RunPlan, AgentState]:
    """Return plan and state of a run with its recorded lookups: system prompt and context window."""
    if plan.body is not None:
        return plan, state
    prompt = history.facts.system_prompts.get(plan.path)
    if prompt is not None and not isinstance(plan.agent.definition.system_prompt, str):
        state = attrs.evolve(state, system_prompt=prompt)
    if plan.path in history.facts.context_windows or (plan.path, 0) in history.intents:
        plan = attrs.evolve(plan, context_window=history.facts.context_windows.get(plan.path))
    return plan, state


def make_lookup_records(plan: RunPlan, state: AgentState) -> Iterator[Input]:
    """Yield the input records of a run's lookups: its computed system prompt and its context window."""
    if plan.body is not None:
        return
    if not isinstance(plan.agent.definition.system_prompt, str):
        yield Input(plan.path, -1, 0, {"type": "system_prompt", "text": state.system_prompt})
    if plan.context_window is not None:
        yield Input(plan.path, -1, 0, {"type": "context_window", "tokens": plan.context_window})


def add_placeholder_tools(recorded: Collection[str], plan: RunPlan) -> RunPlan:
    """
    Return *plan* with a placeholder for each *recorded* tool that the agent no longer has.

    The record answers the recorded calls of such a tool. A call without a record fails, because there is no body to run.
    """
    # A replay calls no tool, so one that was deleted since must not keep an old recording from being replayed
    # (reliability:JR24). The stand-in only lets the machine find a binding; what comes is the recorded result.
    tools = plan.tools
    gone = [name for name in recorded if name not in tools or isinstance(tools[name].runs, Control)]
    if not gone:
        return plan
    stand_ins = {
        name: ToolBinding(ToolSpec(name, "", JsonDict()), lambda given: Validated(given, given)) for name in gone
    }
    return attrs.evolve(plan, tools=_ToolsWithPlaceholders(tools, stand_ins))


class _ToolsWithPlaceholders(dict[str, ToolBinding]):
    """The tools of a run and placeholders. A tool added by a ``pre_run`` hook is also added to the run's own table for performers."""

    def __init__(self, own: Mapping[str, ToolBinding], placeholders: Mapping[str, ToolBinding]) -> None:
        super().__init__({**own, **placeholders})
        self._own = own

    def __setitem__(self, name: str, binding: ToolBinding) -> None:
        super().__setitem__(name, binding)
        self._own[name] = binding  # type: ignore[index]


class RecordedMachines:
    """
    The machines of a recorded run tree.

    Args:
        journal: The journal of the run.
        past: The recorded part of the run; ``None`` for a new run.

    Attributes:
        seed: The seed for the random numbers of all machines.
        running: The running machines, by path. Ended ones are removed to free the results of their calls.
        decoders: Functions that decode a run's output from JSON to the author's own type, by path.
    """

    def __init__(self, journal: OpenJournal, past: RecordedPart | None) -> None:
        self.seed = ""
        self.running: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.decoders: dict[str, Callable[[Any], Any]] = {}
        self._mode, self._writer = journal.mode, journal.writer
        self._past = past

    def wrap_machine(self, inner: MachineMaker) -> MachineMaker:
        """Return *inner* as a function whose machines get placeholder tools, and are registered in ``running`` and ``decoders``."""

        def make_machine(plan: RunPlan, state: AgentState) -> Generator[Any, Outcome | None, Finished]:
            past = self._past
            known = plan if past is None else add_placeholder_tools(past.calls.list_called_tools(plan.path), plan)
            if plan.agent.definition.handle_steps is not None:
                known = attrs.evolve(known, records_output=True)
            if needs_provenance(plan.agent.hooks):
                known = attrs.evolve(known, clean=self._writer.source.redactor.value)
            schema = plan.agent.output_schema
            if schema is not None and schema.decode is not None:
                self.decoders[plan.path] = schema.decode
            running = self.running[plan.path] = inner(known, state)
            return running

        return make_machine

    def wrap_planner(self, inner: ChildPlanner, computed: Callable[[str, int], Any] | None) -> ChildPlanner:
        """Return a planner whose children start with their recorded data; *computed* is ``Replayer.find_computed_value``."""

        def plan_child(parent: RunPlan, effect: Spawn, path: str) -> tuple[RunPlan, AgentState]:
            plan, state = inner(parent, effect, path)
            if plan.body is not None and computed is not None:
                plan = attrs.evolve(plan, body=attrs.evolve(plan.body, recalled=partial(computed, path)))
            return self.restore_and_record_lookups(self.add_seeded_random(plan), state)

        return plan_child

    def add_seeded_random(self, plan: RunPlan) -> RunPlan:
        """Return *plan* with a random number generator seeded from the seed and the path of the plan."""
        # By path, so that each child has chance of its own: drawn from one source, what a child gets would depend on
        # which sibling was faster.
        return attrs.evolve(plan, random=partial(Random, f"{self.seed}:{plan.path}"))

    def restore_and_record_lookups(self, plan: RunPlan, state: AgentState) -> tuple[RunPlan, AgentState]:
        """Return plan and state with the recorded lookups, and record the lookups that are new."""
        known: Collection[str] = ()
        if self._past is not None:
            history = self._past.history
            plan, state = restore_lookups(history, plan, state)
            known = history.facts.list_lookup_types(plan.path) if self._mode.resumes else ()
        # Recorded as inputs, since no effect asked for them: a prompt that is computed, and a window from a price list,
        # may be others tomorrow.
        for record in make_lookup_records(plan, state):
            if record.input["type"] not in known:
                self._writer.append(record)
        return plan, state
