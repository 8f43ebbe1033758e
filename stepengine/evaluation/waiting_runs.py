"""
``replay_waiting``: which waiting runs the current code can resume.

Each run is replayed from its record. Nothing is performed or changed, and no key is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.questions import Question
from stepengine.engine import Engine
from stepengine.engine.packages import describe_package_version_changes
from stepengine.errors import ReplayDivergence, StepEngineError
from stepengine.journal import Journal, JournalLike, as_journal
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.show import get_root_agent_id

ENDED, READY, KEEP, DIVERGES, FAILED = "ended", "ready", "keep", "diverges", "failed"
ADVICE = "\n  to continue "


@frozen
class WaitingRun:
    """
    A recorded run, and whether the current code can resume it.

    Attributes:
        file: The address of its journal.
        outcome: ``"ready"``, ``"keep"`` (``resume`` needs ``on_divergence="keep"``), ``"diverges"`` (the code diverges from the record),
            ``"failed"`` (the replay was not possible) or ``"ended"`` (the run does not wait).
        agent_id: The id of the recorded agent.
        questions: The open questions.
        packages: A sentence for each agent package with another version now.
        error: The first divergence, or why the replay failed; ``None`` for ``"ready"`` and ``"ended"``.
    """

    file: str
    outcome: str
    agent_id: str = ""
    questions: tuple[Question, ...] = ()
    packages: tuple[str, ...] = ()
    error: Exception | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the run as ``stepengine replay --waiting --json`` prints it."""
        known: dict[str, Any] = {"file": self.file, "outcome": self.outcome}
        if self.agent_id and self.outcome != ENDED:
            questions = [{"id": one.id, "text": one.text} for one in self.questions]
            known |= {"agent": self.agent_id, "questions": questions, "packages": [*self.packages]}
        if self.error is not None:
            known["message"] = str(self.error).partition(ADVICE)[0]
        if isinstance(self.error, ReplayDivergence):
            known |= {name: getattr(self.error, name) for name in ("kind", "step", "address", "site")}
            known["diff"] = [dict(zip(("pointer", "recorded", "now"), each, strict=True)) for each in self.error.diff]
        return known


async def replay_waiting(
    engine: Engine, journals: Iterable[JournalLike], *, agent: AgentDefinition | None = None
) -> list[WaitingRun]:
    """
    Replay waiting runs with the current code, and return which of them it can resume.

    Args:
        engine: The engine with the current agents.
        journals: The journals of the runs.
        agent: The current agent of the runs; by default the engine's agent with the recorded id.
    """
    return [await _replay_waiting_run(engine, as_journal(one), agent) for one in journals]


async def _replay_waiting_run(engine: Engine, journal: Journal, agent: AgentDefinition | None) -> WaitingRun:
    """Replay a waiting run, and return whether the current code can resume it; errors of the engine are part of the result."""
    run, outcome, first = WaitingRun(journal.address, FAILED), READY, None
    try:
        run = read_waiting_run(journal)
        if run.outcome == ENDED:
            return run
        try:
            await engine.replay(journal, agent=agent)
        except ReplayDivergence as error:
            outcome, first = KEEP, error
            await engine.replay(journal, agent=agent, on_divergence="keep")
    except ReplayDivergence as error:
        outcome, first = DIVERGES, error
    except StepEngineError as error:
        return attrs.evolve(run, error=error)
    return attrs.evolve(run, outcome=outcome, error=first)


def read_waiting_run(journal: Journal) -> WaitingRun:
    """
    Return a recorded run before its replay, with the outcome ``"ended"``, or ``"failed"`` until it is replayed.

    Raises:
        JournalError: when the journal cannot be read, or contains no run.
    """
    history = journal.history()
    return WaitingRun(
        journal.address,
        ENDED if history.is_complete else FAILED,
        get_root_agent_id(history),
        tuple([question for _, question in find_open_questions(history).values()]),
        tuple(describe_package_version_changes(history)),
    )
