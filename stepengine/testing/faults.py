"""
The faults of effects in a simulated run, and the outcomes that they cause.

A fault names its effect by path and number, so that a list of them, with a seed, is a whole world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.effects import (
    EFFECTS,
    WAITS,
    AskPerson,
    AwaitMessage,
    CallFunction,
    CallModel,
    CallTool,
    EndRuns,
    Leaf,
    SendToRun,
    Spawn,
)
from stepengine.data.messages import TextPart, ToolResult
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Answer, Question, to_answer
from stepengine.data.state import ChildResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import DataError, LimitExceeded, ModelError, PerformError, UnknownOutcome

ANY = tuple([row.cls for row in EFFECTS if row.kind and row.cls not in (SendToRun, EndRuns)])
"""The effects that a cancellation or a crash can interrupt."""

FAULTS: Mapping[str, tuple[type[Any], ...]] = {
    "failure": (CallModel, CallTool, CallFunction, Spawn),
    "timeout": (CallModel, CallTool, CallFunction),
    "limit": (CallModel, CallTool, Spawn),
    "unknown": (CallTool, CallFunction),
    "cancel": ANY,
    "shutdown": ANY,
    "suspend": (AskPerson,),
    "slow": (CallModel, CallTool, CallFunction, AskPerson),
    "duplicate": (CallModel, CallTool, CallFunction, AskPerson),
    "late": (AwaitMessage,),
    "never": (AwaitMessage,),
    "lost_wake": WAITS,
    "crash": ANY,
    "crash_inside": ANY,
    "crash_after": ANY,
}
"""Each kind of fault and the effects at which it can happen."""

TURNED: Mapping[str, tuple[type[Any], ...]] = {
    "other_answer": (AskPerson,),
    "empty": (CallModel,),
    "cut": (CallModel,),
}
"""Kinds that change the outcome of an effect; they are never drawn, only named."""

KINDS = {**FAULTS, **TURNED}
"""Every kind that can be named."""

ON_RECORD = ("failure", "timeout", "crash", "crash_after", *TURNED)
"""The faults that are tried at each effect of a recorded run."""

MEANINGS: Mapping[str, str] = {
    "failure": "the effect fails",
    "timeout": "the effect takes too long and fails",
    "limit": "the effect is refused because a limit is used up",
    "unknown": "it is unknown whether the effect happened",
    "cancel": "the run is cancelled meanwhile",
    "shutdown": "the engine is shut down meanwhile",
    "suspend": "no answer comes, so the run is suspended",
    "slow": "the effect takes minutes",
    "duplicate": "a message is sent to the run meanwhile, and delivered twice",
    "late": "the message arrives after the wait has timed out, or minutes late",
    "never": "the message never arrives",
    "lost_wake": "the process dies while the run waits, and the run wakes hours too late",
    "other_answer": "the question gets the opposite answer",
    "empty": "the model returns an empty reply",
    "cut": "the reply is cut at its token limit; half of its text and all its calls are lost",
    "crash": "the process dies before the effect happens, and the run is resumed",
    "crash_inside": "the process dies after the effect, before its result is recorded, and the run is resumed",
    "crash_after": "the process dies just after the result of the effect is recorded, and the run is resumed",
}
"""The meaning of each kind, for the message of a failure."""

CRASHES = ("crash", "crash_inside", "crash_after")
"""Kinds with which the process dies."""

RATES = (0.05, 0.15, 0.4)
COUNTS = (0, 1, 1, 2, 3)


def validate_fault_kind(kind: str) -> str:
    """
    Return *kind* if there is such a kind of fault.

    Raises:
        DataError: when there is no such kind of fault.
    """
    if kind in KINDS:
        return kind
    msg = f"{kind!r} is not a kind of fault; valid kinds: {list_names(KINDS, kind)}"
    raise DataError(msg)


@frozen
class Fault:
    """
    A failure at one effect of a simulated run.

    Attributes:
        seq: The number of the effect on its path.
        kind: ``"failure"``, ``"timeout"``, ``"limit"``, ``"unknown"`` (nobody knows whether it happened), ``"cancel"``,
            ``"shutdown"``, ``"suspend"`` (nobody answers), ``"slow"`` (minutes pass), ``"duplicate"`` (a message to the run
            is delivered twice meanwhile), ``"late"`` and ``"never"`` (a message comes too late, or never), ``"lost_wake"``
            (hours pass before a run that waits is woken), or that the process dies, and the run goes on in another from what was recorded:
            ``"crash"`` before the effect happens, ``"crash_inside"`` after that and before its result is recorded,
            ``"crash_after"`` before the run is sent its recorded result. Only named, never drawn, are ``"other_answer"``
            (a person answers the other way), ``"empty"`` (the model says nothing) and ``"cut"`` (its reply is cut off).
        path: The path of the run; ``""`` for the root.

    Raises:
        DataError: when there is no such kind.
    """

    seq: int
    kind: str = attrs.field(converter=validate_fault_kind)
    path: str = ""

    def __repr__(self) -> str:
        return f"Fault({self.seq}, {self.kind!r}{f', {self.path!r}' if self.path else ''})"


class RandomFaults:
    """
    The faults of one seed: at most three, at random effects.

    Args:
        seed: The seed.
        kinds: Kinds to draw from.
    """

    def __init__(self, seed: int, kinds: Iterable[str]) -> None:
        self._seed = seed
        self._kinds = tuple([validate_fault_kind(kind) for kind in kinds])
        random = Random(f"{seed}:faults")  # noqa: S311
        self._left = random.choice(COUNTS) if self._kinds else 0
        self._rate = random.choice(RATES)

    def draw_faults(self, path: str, effect: Leaf) -> list[str]:
        """Return the kind of the fault at *effect* in a list; an empty list if none happens there, or all have happened."""
        if not self._left:
            return []
        random = Random(f"{self._seed}:{path}:{effect.seq}:fault")  # noqa: S311
        fitting = [kind for kind in self._kinds if type(effect) in KINDS[kind]]
        if not fitting or random.random() > self._rate:
            return []
        self._left -= 1
        return [random.choice(fitting)]


def find_outcome_of_fault(kind: str, effect: Leaf, now_ms: int) -> Single | None:
    """Return the outcome that a fault *kind* gives *effect* in place of its own; ``None`` if the effect is performed."""
    if kind in ("cancel", "shutdown"):
        return Stop("cancelled" if kind == "cancel" else "shutdown", now_ms)
    if kind == "limit":
        limit = {CallModel: "tokens", CallTool: "actions", Spawn: "children"}[type(effect)]
        return Failure(LimitExceeded(f"the simulation refuses more {limit}", kind=limit), now_ms)
    if kind == "unknown":
        return Failure(UnknownOutcome("the simulation lost the outcome"), now_ms)
    if kind in ("late", "never") and isinstance(effect, AwaitMessage):
        if effect.timeout is not None:
            return Value(None, now_ms)
        return Stop("suspended", now_ms) if kind == "never" else None
    if kind == "suspend" and isinstance(effect, AskPerson):
        return Stop("suspended", now_ms, questions=effect.questions)
    return _make_failed_outcome(kind, effect, now_ms) if kind in ("failure", "timeout") else None


def _make_failed_outcome(kind: str, effect: Leaf, now_ms: int) -> Single:
    """Return the outcome of an effect that fails or times out, in the form of its type."""
    text = "simulated failure" if kind == "failure" else "simulated timeout"
    if isinstance(effect, CallModel):
        used = None if kind == "failure" else Usage(7)
        return Failure(ModelError(text, retryable=True, kind="http" if kind == "failure" else kind, usage=used), now_ms)
    if isinstance(effect, CallTool):
        result = ToolResult.error(text, tool_name=effect.tool_name, tool_call_id=effect.tool_call_id)
        return Value(result, now_ms)
    if isinstance(effect, Spawn):
        error = ModelError(text)
        if effect.is_background:
            return Failure(error, now_ms)
        return Value(ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error), now_ms)
    return Failure(PerformError(text, kind="OSError" if kind == "failure" else "TimeoutError"), now_ms)


def change_outcome_by_faults(kinds: Iterable[str], effect: Leaf, outcome: Single) -> Single:
    """Return an outcome after the faults that change it: ``other_answer``, ``empty`` and ``cut``. Other kinds leave it as it is."""
    if not isinstance(outcome, Value):
        return outcome
    value = outcome.value
    if "other_answer" in kinds and isinstance(effect, AskPerson) and isinstance(value, tuple):
        other = [_make_other_answer(question, answer) for question, answer in zip(effect.questions, value, strict=True)]
        return attrs.evolve(outcome, value=tuple(other))
    if isinstance(value, ModelReply) and "empty" in kinds:
        return attrs.evolve(outcome, value=attrs.evolve(value, content=(), stop_reason=StopReason.END_TURN))
    if isinstance(value, ModelReply) and "cut" in kinds:
        half = value.text[: len(value.text) // 2]
        cut = attrs.evolve(value, content=(TextPart(half),) if half else (), stop_reason=StopReason.MAX_TOKENS)
        return attrs.evolve(outcome, value=cut)
    return outcome


def _make_other_answer(question: Question, answer: Answer) -> Answer:
    """Return a different answer: another option, ``"yes"`` for ``"no"``, or ``"no"`` for any other text."""
    given = answer.value
    others = [option for option in question.options if option != given]
    if others:
        return to_answer(others[0], question)
    return to_answer("no" if given != "no" else "yes", question)
