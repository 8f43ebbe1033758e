"""
``check_sandbox``: Monty keeps the promises, and a planted fault is told as the promise that it breaks.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from stepengine.testing import check_sandbox

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import (
    CallAnswer,
    CheckedProgram,
    MontySandbox,
    ProgramCall,
    ProgramEnded,
    ProgramProblem,
    ProgramRaised,
    ProgramSession,
    ProgramTurn,
    ProgramWaiting,
)


@pytest.fixture(scope="module", autouse=True)
def opened_once() -> None:
    """
    What the package opens once for a process is there before any test, so that none of them seems to have left it behind.
    """
    first = MontySandbox(1)
    first.open((), seconds=1, memory=1 << 26, printed=10, seed=1).feed("1", datetime(2026, 1, 1, tzinfo=UTC))
    first.close()


@pytest.mark.deep
@pytest.mark.spec("programs:PG45")
def test_monty_keeps_the_promises() -> None:
    check_sandbox(MontySandbox)


class PassingOn:
    """
    A session that passes everything on; each fault below changes one thing.
    """

    def __init__(self, inner: ProgramSession) -> None:
        self.inner = inner

    @property
    def printed(self) -> str:
        return self.inner.printed

    def feed(self, code: str, now: datetime) -> ProgramTurn:
        return self.changed(self.inner.feed(code, now))

    def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
        return self.changed(self.inner.answer(answers, now))

    def close(self) -> None:
        self.inner.close()

    def changed(self, turn: ProgramTurn) -> ProgramTurn:
        if isinstance(turn, ProgramWaiting):
            return attrs.evolve(turn, calls=tuple(map(self.changed_call, turn.calls)))
        return turn

    def changed_call(self, call: ProgramCall) -> ProgramCall:
        return call


class WithFault(MontySandbox):
    Session: type[PassingOn] = PassingOn

    def open(self, functions: Collection[str], **limits: Any) -> ProgramSession:
        return cast("ProgramSession", self.Session(super().open(functions, **self.changed(limits))))

    def changed(self, limits: dict[str, Any]) -> dict[str, Any]:
        return limits


class Unnamed(WithFault):
    name = ""


class RefusesEverything(WithFault):
    def check(self, *_: Any, **__: Any) -> CheckedProgram:
        return CheckedProgram((ProgramProblem(2, 1, "no"),))


class RefusesNothing(WithFault):
    def check(self, *_: Any, **__: Any) -> CheckedProgram:
        return CheckedProgram()


class LosesOutput(WithFault):
    class Session(PassingOn):
        printed = ""  # type: ignore[assignment]


class LosesVariables(WithFault):
    class Session(PassingOn):
        def feed(self, code: str, now: datetime) -> ProgramTurn:
            return self.inner.feed(f"def all_of_it():\n  {code}" if code == "x = 5" else f"x = y = 0\n{code}", now)


class LosesKeywords(WithFault):
    class Session(PassingOn):
        def changed_call(self, call: ProgramCall) -> ProgramCall:
            return call._replace(kwargs={})


class SwapsAnswers(WithFault):
    class Session(PassingOn):
        def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
            return self.inner.answer(dict(zip(answers, reversed([*answers.values()]), strict=True)), now)


class NamesSleepOtherwise(WithFault):
    class Session(PassingOn):
        def changed_call(self, call: ProgramCall) -> ProgramCall:
            return call._replace(name=call.name.rpartition(".")[2])


class ForgetsCalls(WithFault):
    class Session(PassingOn):
        def changed(self, turn: ProgramTurn) -> ProgramTurn:
            return attrs.evolve(turn, unawaited=()) if isinstance(turn, ProgramEnded) else turn


class HasOneKindOfError(WithFault):
    class Session(PassingOn):
        def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
            return self.inner.answer({id_: CallAnswer(one.value, one.error and "ToolError") for id_, one in answers.items()}, now)  # fmt: skip


class CountsLinesFromZero(WithFault):
    class Session(PassingOn):
        def changed(self, turn: ProgramTurn) -> ProgramTurn:
            return attrs.evolve(turn, line=turn.line - 1) if isinstance(turn, ProgramRaised) else turn


class SaysThatItStopped(WithFault):
    class Session(PassingOn):
        def changed(self, turn: ProgramTurn) -> ProgramTurn:
            return attrs.evolve(turn, kind="") if isinstance(turn, ProgramRaised) else turn


class HasMuchMemory(WithFault):
    def changed(self, limits: dict[str, Any]) -> dict[str, Any]:
        return {**limits, "memory": limits["memory"] * 8}


class PrintsMuch(WithFault):
    def changed(self, limits: dict[str, Any]) -> dict[str, Any]:
        return {**limits, "printed": limits["printed"] * 1_000}


class Reading(WithFault):
    class Session(PassingOn):
        def feed(self, code: str, now: datetime) -> ProgramTurn:
            found = re.fullmatch(r"open\('([^']+)'\)\.read\(\)", code)
            return ProgramEnded(Path(found[1]).read_text()) if found else self.inner.feed(code, now)


class Writing(WithFault):
    class Session(PassingOn):
        def feed(self, code: str, now: datetime) -> ProgramTurn:
            if found := re.match(r"open\('([^']+)', 'w'\)", code):
                Path(found[1]).touch()
            return self.inner.feed(code, now)


class ShowingTheEnvironment(WithFault):
    class Session(PassingOn):
        def feed(self, code: str, now: datetime) -> ProgramTurn:
            return ProgramEnded(dict(os.environ)) if "posix" in code else self.inner.feed(code, now)


class Connecting(WithFault):
    class Session(PassingOn):
        def feed(self, code: str, now: datetime) -> ProgramTurn:
            if found := re.search(r"urlopen\('http://([^:]+):(\d+)", code):
                with socket.create_connection((found[1], int(found[2]))):
                    pass
            return self.inner.feed(code, now)


class ImportingOfTheHost(WithFault):
    class Session(PassingOn):
        def feed(self, code: str, now: datetime) -> ProgramTurn:
            found = find_spec(code.removeprefix("import ")) if re.fullmatch(r"import own_\w+", code) else None
            return ProgramEnded(None) if found else self.inner.feed(code, now)


class WithItsOwnClock(WithFault):
    class Session(PassingOn):
        def feed(self, code: str, now: datetime) -> ProgramTurn:
            return self.inner.feed(code, datetime.now(UTC))


class WithItsOwnSeeds(WithFault):
    seeds = itertools.count()

    def changed(self, limits: dict[str, Any]) -> dict[str, Any]:
        return {**limits, "seed": next(self.seeds)}


class WithTwoPlaces(WithFault):
    """
    Where more than two sessions wait, all of them get the latest one's answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: list[ProgramSession] = []

    def open(self, functions: Collection[str], **limits: Any) -> ProgramSession:
        if len(self.last) < 2:
            self.last.append(super().open(functions, **limits))
        return self.last[-1]


class Unstoppable(WithFault):
    class Session(PassingOn):
        def close(self) -> None:
            pass

    def changed(self, limits: dict[str, Any]) -> dict[str, Any]:
        return {**limits, "seconds": 1.0}


class LeavingDescriptors(WithFault):
    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []

    def open(self, functions: Collection[str], **limits: Any) -> ProgramSession:
        self.left.append(os.open(os.devnull, os.O_RDONLY))
        return super().open(functions, **limits)

    def close(self) -> None:
        for one in self.left:
            os.close(one)
        super().close()


@pytest.mark.spec("programs:PG45")
@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Unnamed, "name"),
        (RefusesEverything, "check"),
        (RefusesNothing, "check"),
        (LosesOutput, "result"),
        (LosesVariables, "result"),
        (LosesKeywords, "call"),
        (SwapsAnswers, "together"),
        (NamesSleepOtherwise, "sleep"),
        (ForgetsCalls, "unawaited"),
        (HasOneKindOfError, "failed_call"),
        (CountsLinesFromZero, "error"),
        (SaysThatItStopped, "time"),
        (HasMuchMemory, "memory"),
        (PrintsMuch, "printed"),
        (Reading, "files"),
        (Writing, "files"),
        (ShowingTheEnvironment, "environment"),
        (Connecting, "network"),
        (ImportingOfTheHost, "imports"),
        (WithItsOwnClock, "equal"),
        (WithItsOwnSeeds, "equal"),
        (WithTwoPlaces, "many"),
        (Unstoppable, "close"),
        pytest.param(LeavingDescriptors, "left", marks=pytest.mark.deep),
        (LosesVariables, "run"),
    ],
)
def test_a_broken_promise_of_a_sandbox_is_named(kind: type[MontySandbox], promise: str) -> None:
    with pytest.raises(AssertionError, match=f"broken promise '{promise}'") as caught:
        check_sandbox(kind, only=promise)

    assert f"check_sandbox(make, only={promise!r})" in str(caught.value)
