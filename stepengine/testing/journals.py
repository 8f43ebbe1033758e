"""
``TestJournal``: the journal of one test; ``engine.run(..., journal=journal)`` records into it once and repeats from then on.

What lives here knows files and modes and nothing of pytest; the plugin says where the file is, which mode holds, and when the
test is over (replay M, Y3).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Value
from stepengine.data.questions import AnswerLike
from stepengine.errors import JournalError
from stepengine.journal import Deciding, FileJournal, Journal, MemoryJournal, Session
from stepengine.journal.history import History
from stepengine.journal.records import ROOT, Record, Result
from stepengine.journal.store import Writer
from stepengine.testing.modes import Account, Mode, replays, shown_path

__all__ = ("TestJournal",)
__tracebackhide__ = True  # a failed test ends at its author's line


class TestJournal(Deciding):
    """
    The journal of a test: ``engine.run(agent, prompt, journal=journal)`` records a run once and repeats it from then on.

    It serves ``run``, ``run_sync``, ``stream`` and ``start`` of any engine. One journal holds one run; ``journal("name")``
    is that of another run of the same test. When it repeats, nothing is performed: no model, no tool, no network, no key.

    Args:
        path: Its file.
        mode: ``"none"`` repeats; ``"once"`` records when there is no file and else repeats; ``"new"`` repeats and performs
            what is not recorded; ``"extend"`` repeats as far as the record holds and goes on live; ``"rewrite"`` records
            again.
        command: The command that runs the test, for messages.
        redact: Rules of the user about secrets, beside the package's own.
        allow_secrets: Hashes of values that look like secrets and are none.
        machine: Texts that tell of this machine, each with its placeholder.
        allow_unused: Whether the test may leave the record alone, or end before it does.
        keeps: Whether ``keep`` writes what was recorded.

    Attributes:
        path: Its file.
        mode: As given.
        allow_unused: As given.
        existed: Whether there was a file when the test began.
        begun: The session of the test's run, once it has begun.
        problem: Why a run was refused, if one was.
    """

    __test__ = False

    def __init__(
        self,
        path: Path,
        mode: Mode,
        *,
        command: str = "pytest",
        redact: Sequence[Any] = (),
        allow_secrets: Iterable[str] = (),
        machine: Mapping[str, str] | None = None,
        allow_unused: bool = False,
        keeps: bool = True,
    ) -> None:
        super().__init__(
            redact=list(redact) or "all", allow_secrets=allow_secrets, machine=machine, link=False, stable=True
        )
        self.path = path
        self.mode: Mode = mode
        self.allow_unused = allow_unused
        self._command = command
        self._keeps = keeps
        self.existed = path.exists()
        self.problem: BaseException | None = None
        self.begun: Session | None = None
        self._fresh: MemoryJournal | None = None
        self._others: dict[str, TestJournal] = {}

    def __repr__(self) -> str:
        return f"TestJournal({self.name!r}, {self.mode!r})"

    def __call__(self, name: str) -> TestJournal:
        """Return the journal of another run of the same test."""
        if name not in self._others:
            self._others[name] = TestJournal(
                self.path.with_name(f"{self.path.stem}.{name}{self.path.suffix}"),
                self.mode,
                command=self._command,
                allow_unused=self.allow_unused,
                keeps=self._keeps,
            ).with_rules_of(self)
        return self._others[name]

    @property
    def name(self) -> str:
        """How the journal is called in messages."""
        return shown_path(self.path)

    @property
    def replaying(self) -> bool:
        """Whether the run is repeated and nothing may be performed."""
        return replays(self.mode, existed=self.existed)

    # --- for the engine -----------------------------------------------------------------------------------------------

    def session(self, answers: Mapping[str, AnswerLike] | None = None) -> Session:
        """
        Return the session of the test's run: it records or repeats, as the mode says.

        Raises:
            AssertionError: when there is no record and none is to be made, or for a second run in one journal.
        """
        if self.begun is not None:
            msg = (
                f"{self.name} holds one run, and this is the second one of its test; give it a name: journal('second')"
            )
            raise self._refused(msg)
        if self.replaying and not self.existed:
            msg = (
                f"there is no journal {self.name}, and in the mode {self.mode!r} nothing is recorded\n"
                f"  to record it: {self._command} --stepengine-record=once"
            )
            raise self._refused(msg)
        self.begun = session = self._made(answers)
        if session.past is not None:
            session.past.may_leave = self.allow_unused
        session.raises = session.tells = True
        return session

    def _made(self, answers: Mapping[str, AnswerLike] | None) -> Session:
        if self.existed and self.mode == "extend":
            # Who records a test anew wants what it does to happen, as when it was recorded first.
            return Session.extend(self, answers, allow_repeat=True)
        if self.existed and self.mode == "new":
            return Session.new(self, answers)
        return Session.replay(self) if self.replaying else Session.record(self, answers)

    def _refused(self, message: str) -> AssertionError:
        problem = AssertionError(message)
        self.problem = self.problem or problem
        return problem

    def records(self) -> list[Record]:
        """Return what was recorded in this test, else what is in the file."""
        return FileJournal(self.path).records() if self._fresh is None else self._fresh.records()

    def bound(self, run: str) -> Journal:
        """Return what the new run is written into; the file is touched when the test has passed."""
        self._fresh = self._in_memory()
        return self._fresh

    def replace(self, records: Sequence[Record]) -> None:
        """Hold *records* until the test has passed."""
        fresh = self._in_memory()
        fresh.replace(records)
        self._fresh = fresh

    def writer(self) -> Writer:
        """
        Refuse: only the run of its test writes a journal of a test.

        Raises:
            JournalError: always.
        """
        msg = (
            f"{self.name} is the journal of a test: engine.run(..., journal=journal) records and repeats it. Give answers with "
            "answers=; to resume a run in a test, record it into a journal of its own, such as FileJournal(tmp_path / 'run.jsonl')"
        )
        raise JournalError(msg)

    def _in_memory(self) -> MemoryJournal:
        return MemoryJournal(redact="off", link=self.link, stable=self.stable).with_rules_of(self)

    # --- the end of the test ------------------------------------------------------------------------------------------

    @property
    def misses(self) -> list[BaseException]:
        """What went wrong with the runs of the test, also when somebody swallowed it."""
        found: list[BaseException] = []
        for one in (self, *self._others.values()):
            fatal = None if one.begun is None else one.begun.fatal
            found += [problem for problem in (one.problem, fatal) if problem is not None]
        return found

    @property
    def calls(self) -> int:
        """How many model calls were made and recorded in this test."""
        return sum([len(_replies(one.new_results(), one.history())) for one in (self, *self._others.values())])

    def check(self) -> None:
        """
        Check what the test did with it.

        Raises:
            ReplayDivergence: when the run went otherwise, also when somebody swallowed it.
            AssertionError: when there is a record and no run.
        """
        if self.misses:
            raise self.misses[0]
        for one in [] if self.allow_unused or not self.replaying else self._left():
            msg = (
                f"the test did not run the journal {shown_path(one)}: no run was given it as journal=\n"
                "  delete the file when it is not needed any more, or mark the test with "
                "@pytest.mark.stepengine(allow_unused=True)"
            )
            raise AssertionError(msg)

    def _left(self) -> list[Path]:
        """Return the journals of the test that no run was given, also those whose names the test does not say any more."""
        run = {one.path for one in (self, *self._others.values()) if one.begun is not None}
        folder, start = self.path.parent, f"{self.path.stem}."
        files = folder.glob(f"*{self.path.suffix}") if folder.is_dir() else ()
        return sorted(file for file in files if file.name.startswith(start) and file not in run)

    def keep(self) -> list[Account]:
        """
        Write what was recorded, and return an account of each file that was written.

        Raises:
            SecretFound: when a secret is left; the file stays as it was.
        """
        return [one.account() for one in (self, *self._others.values()) if one.write()]

    def write(self) -> bool:
        """Write what was recorded, if anything new was; return whether the file is another one now."""
        if not self._keeps or self.replaying:
            return False
        if self._fresh is None:
            if self.mode == "rewrite" and self.existed:
                self.path.unlink()
            return False
        lines = self._fresh.lines()
        if not lines or (self.existed and b"".join(lines) == self.path.read_bytes()):
            return False
        for number, line in enumerate(lines, 1):
            self.redactor.refuse(json.loads(line), f"{self.name}:{number}")
        file = FileJournal(self.path, redact="off", link=self.link, stable=self.stable)
        file.with_rules_of(self).replace(self._fresh.records())
        return True

    def accounts(self) -> list[Account]:
        """Return what was done with each of the test's journals."""
        used = [one for one in (self, *self._others.values()) if one.begun is not None or one.existed]
        return [one.account() for one in used]

    def account(self) -> Account:
        """Return what was done with this journal."""
        past = None if self.begun is None else self.begun.past
        history = self.history()
        new = self.new_results()
        held = [result for address, result in history.results.items() if address != ROOT]
        left = len(held) if self.begun is None else past.left if past is not None and self.mode != "extend" else 0
        return Account(
            path=self.name,
            mode=self.mode,
            replayed=max(0, len(held) - len(new) - left),
            recorded=len(new),
            unused=left,
            cost=_cost(new or held, history),
        )

    def new_results(self) -> list[Result]:
        """Return the results that came in this test."""
        if self._fresh is None or self.begun is None or self.replaying:
            return []
        past = self.begun.past
        results = self._fresh.history().results.items()
        return [r for a, r in results if a != ROOT and (past is None or past.result(a) is None)]


def _replies(results: Iterable[Result], history: History) -> list[ModelReply]:
    """Return the model replies among *results*."""
    values = [
        history.outcome(result) for result in results if history.intents[result.path, result.seq].type == "CallModel"
    ]
    return [v.value for v in values if isinstance(v, Value) and isinstance(v.value, ModelReply)]


def _cost(results: Iterable[Result], history: History) -> Decimal | None:
    """Return what the replies cost; ``None`` when nobody knows it of any."""
    known = [reply.cost for reply in _replies(results, history) if reply.cost is not None]
    return sum(known, Decimal(0)) if known else None
