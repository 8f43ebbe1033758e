"""
The origins of the arguments of recorded calls, found from the record alone, whatever the policy of the run was.

The sources are those of a running machine, read in the order of the record. The record lacks facts that only the code knows: a ``Perform`` is
untrusted here, and a child that continued its parent's conversation knows its prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from stepengine.data.codec import decode_stored
from stepengine.data.json import JsonDict, JsonValue
from stepengine.data.origins import make_origins
from stepengine.data.provenance import Provenance, Source
from stepengine.data.state import AgentState
from stepengine.journal.event_stream import effect_from_json
from stepengine.journal.history import History
from stepengine.journal.records import ROOT, Address, Intent, Record, Result, format_address
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.machine.sources import RunSources
from stepengine.runtime.performer import child_path


@frozen
class CallOrigins:
    """
    The origins of the arguments of one recorded call.

    Attributes:
        address: The address of the call, such as ``#3``.
        name: The name of the tool, or the id of the agent.
        is_question: Whether this is the question to a person about the call, not the call itself.
        origins: The origin of each argument, in the form of ``Question.provenance``.
    """

    address: str
    name: str
    is_question: bool
    origins: tuple[JsonDict, ...]


class _TracedRun:
    """One recorded run, and the outcomes that it has not received yet."""

    def __init__(self, index: Provenance, *, is_root: bool = False, is_tool_body: bool = False) -> None:
        self.model_calls = 0
        self.sources = RunSources(index, self, tools={}, is_root=is_root, is_body=is_tool_body)
        self.gather: object = None
        self.waiting: list[Intent] = []

    @property
    def step(self) -> int:
        """The number of the current step, from 0."""
        return max(self.model_calls - 1, 0)


class RecordedSources:
    """
    The sources of all runs in a record that may still grow.

    Attributes:
        runs: Each run with its sources, by path.
    """

    def __init__(self) -> None:
        self._history = History(())
        self._ended: set[Address] = set()
        self.runs: dict[str, _TracedRun] = {}

    def trace_calls(self, history: History) -> Iterator[CallOrigins]:
        """Yield the calls of a whole record in the order in which they started."""
        for record in history.records:
            yield from self.add_record_and_trace_calls(history, record)
        for run in list(self.runs.values()):
            self._add_ended_outcomes(run)

    def add_record_and_trace_calls(self, history: History, record: Record) -> Iterator[CallOrigins]:
        """Add the next record of *history* to the sources, and yield the origins of the call that it starts, if any."""
        self._history = history
        if isinstance(record, Result):
            self._ended.add((record.path, record.seq))
        if not isinstance(record, Intent):
            return
        if (record.path, record.seq) == ROOT:
            self._add_root_sources(history.root)
        else:
            run = self.runs.setdefault(record.path, _TracedRun(Provenance()))
            # Members of a group begin before any of them has ended.
            if record.gather is None or record.gather != run.gather:
                self._add_ended_outcomes(run)
            run.gather = record.gather
            run.waiting.append(record)
            run.model_calls += record.type == "model_call"
            yield from self._trace_call(run, record)

    def find_value_sources(self, value: JsonValue) -> Mapping[str, tuple[Source, ...]]:
        """Return where a value occurs in the records read so far, by the path of each run that received it."""
        found = {path: run.sources.index.find_sources(value) for path, run in self.runs.items()}
        return {path: sources for path, sources in found.items() if sources}

    def _add_root_sources(self, root: Mapping[str, Any]) -> None:
        """Add the root run, with its prompt, its params and the history that it continues as sources."""
        first = self.runs[""] = _TracedRun(Provenance(), is_root=True)
        if root.get("previous") is not None:
            previous: AgentState = decode_stored(root["previous"])
            first.sources.add_history(previous)
        first.sources.add_prompt(root.get("prompt", ""), root.get("params"))

    def _trace_call(self, run: _TracedRun, intent: Intent) -> Iterator[CallOrigins]:
        """Yield the origins of a started call's arguments, and register the run that it starts."""
        form, index = self._get_effect_without_request(intent), run.sources.index
        at = format_address(intent.path, intent.seq)
        below = child_path(intent.path, intent.seq)
        if intent.type == "tool_call":
            given: Mapping[str, JsonValue] = form["input"]
            if form["source"] == "handler":
                run.sources.add_handler_values(given)
            if "yields" in form:
                self.runs[below] = _TracedRun(run.sources.make_body_provenance(), is_tool_body=True)
            yield CallOrigins(at, form["tool_name"], is_question=False, origins=make_origins(index, given.items()))
        elif intent.type == "agent_call":
            prompt, params = form["prompt"], form["params"]
            if not form.get("tool_call_id"):
                run.sources.add_handler_values([prompt, params])
            self.runs[below] = _TracedRun(run.sources.make_child_provenance(prompt, params))
            asked = [("prompt", prompt), ("params", params)]
            yield CallOrigins(at, form["agent_id"], is_question=False, origins=make_origins(index, asked))
        elif intent.type == "ask" and form["purpose"] == "permission":
            for question in form["questions"]:
                details: Any = question.get("details") or {}
                yield CallOrigins(
                    at, question.get("tool_name") or "", is_question=True, origins=make_origins(index, details.items())
                )

    def _get_effect_without_request(self, intent: Intent) -> Mapping[str, Any]:
        """Return an effect as JSON, without the request of a model call: requests repeat the history and are no source."""
        return {"request": {"model": ""}, "purpose": ""} if intent.type == "model_call" else self._history.form(intent)

    def _add_ended_outcomes(self, run: _TracedRun) -> None:
        """Add the outcomes of a run's ended effects to its sources."""
        waiting, run.waiting = run.waiting, []
        for intent in waiting:
            address = (intent.path, intent.seq)
            if address not in self._ended:
                run.waiting.append(intent)
                continue
            result = self._history.results[address]
            run.sources.add_outcome(
                effect_from_json(intent, self._get_effect_without_request(intent)), self._history.outcome(result)
            )


def call_origins(journal: JournalLike) -> tuple[CallOrigins, ...]:
    """
    Return the origins of the arguments of each recorded call, in the order of the calls.

    Raises:
        JournalError: when the journal cannot be read.
    """
    return tuple(RecordedSources().trace_calls(as_journal(journal).history()))


def value_sources(journal: JournalLike, value: JsonValue) -> Mapping[str, tuple[Source, ...]]:
    """
    Return the sources of a recorded run in which a value occurs, by the path of each run of the tree that received it.

    Raises:
        JournalError: when the journal cannot be read.
    """
    recorded = RecordedSources()
    list(recorded.trace_calls(as_journal(journal).history()))
    return recorded.find_value_sources(value)
