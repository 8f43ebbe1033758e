"""
``JournaledRun``: one run tree with its journal: recording it, resuming it, replaying it.

It opens the journal in one of the modes, holds the parts that work on it, and builds them into the services of the tree. ``run_start``
starts the root run, and ``run_end`` ends it; everything else happens behind the performer. The driver, the machine and the adapters
know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import attrs

from stepengine.data.questions import AnswerLike
from stepengine.journal.call_writes import CallWrites
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import History, RecordedStart, parse_recorded_start
from stepengine.journal.modes import (
    Adding,
    Around,
    Extending,
    Forking,
    Mode,
    OpenJournal,
    Recording,
    Replaying,
    Resuming,
    Walking,
)
from stepengine.journal.provenance import are_calls_trusted, has_trusted_permissions, is_written_by_user
from stepengine.journal.questions import GivenAnswers, InDoubt, require_fitting_answers
from stepengine.journal.recorded_clock import ReplayPace, RunClock
from stepengine.journal.recorded_machines import RecordedMachines
from stepengine.journal.recorder import Recorder
from stepengine.journal.records import to_compact_json
from stepengine.journal.run_mailbox import RunMailbox
from stepengine.journal.run_writer import RunWriter
from stepengine.journal.store import Journal
from stepengine.redaction import find_redacted_names
from stepengine.runtime.performer import Performer
from stepengine.runtime.services import Services, TimeSetting

if TYPE_CHECKING:
    from stepengine.journal.recorded_part import AllowedDifferences, RecordedPart
    from stepengine.journal.replayer import ParallelRecord, Replayer


class JournaledRun:
    """
    One run tree and its journal. Made by ``record``, ``resume``, ``replay``, ``open_for_stepping``, ``replay_then_continue``, ``record_missing`` and ``fork``.

    Args:
        mode: The mode: how the run uses the journal.
        writer: Writes the journal.
        answers: The caller's answers and decisions.
        history: The recorded history; ``None`` for a new run.
        leeway: The allowed differences from the record; by default none.
        replayer: Makes the object that answers effects from the record.

    Attributes:
        mode: The mode: how the run uses the journal.
        writer: Writes the journal; holds the first error and the warnings.
        answers: The caller's answers, and the decisions about effects in doubt.
        timing: The run's own clock.
        machines: The machines of the tree.
        mail: The mailbox messages of the run.
        opening: The recorded start of the run; ``None`` for a new run.
        recorded_part: The recorded part of the run; ``None`` for a new run.
        replayer: Answers effects from the record; ``None`` for a new run.
        raises: Whether a divergence is raised to the caller of the run; by default it is in the result.
        notifies_providers: Whether providers are notified of model calls answered from the record; by default only of live ones.
        wakes_now: Whether recorded sleeps end at once.
    """

    def __init__(
        self,
        mode: Mode,
        writer: RunWriter,
        answers: GivenAnswers,
        history: History | None = None,
        leeway: AllowedDifferences | None = None,
        *,
        replayer: Callable[[OpenJournal, RecordedPart, RecordedMachines], Replayer] | None = None,
    ) -> None:
        self.mode = mode
        self.writer = writer
        self.answers = answers
        self.timing = RunClock(stable=writer.source.stable)
        self.raises = self.notifies_providers = self.wakes_now = False
        self.opening: RecordedStart | None = None
        self.recorded_part: RecordedPart | None = None
        self.replayer: Replayer | None = None
        self._journal = OpenJournal(mode, writer, answers, self.timing)
        self.mail = RunMailbox(self._journal, history)
        if history is None:
            self.machines = RecordedMachines(self._journal, None)
            return
        # Loaded for a run that has a past: a new one starts 4 ms earlier.
        from stepengine.journal.recorded_part import NO_LEEWAY, RecordedPart
        from stepengine.journal.replayer import Replayer

        past = self.recorded_part = RecordedPart(history, Fingerprints(writer.source.redactor), leeway or NO_LEEWAY)
        self.machines = RecordedMachines(self._journal, past)
        self.replayer = (replayer or Replayer)(self._journal, past, self.machines)
        self.opening = parse_recorded_start(history)
        if mode.appends_to_source(history):
            writer.warnings += _make_redacted_params_warning(writer.source.name, self.opening)

    @classmethod
    def record(
        cls, journal: Journal, answers: Mapping[str, AnswerLike] | None = None, *, seed: str = ""
    ) -> JournaledRun:
        """Return a new run that records into *journal*; without *seed* a random one is used."""
        run = cls(Recording(), RunWriter(journal), GivenAnswers(answers))
        run.machines.seed = seed
        return run

    @classmethod
    def resume(
        cls,
        journal: Journal,
        answers: Mapping[str, AnswerLike] | None = None,
        in_doubt: InDoubt = "fail",
        *,
        later_answers: Mapping[str, AnswerLike] | None = None,
        accepts_edited_effects: bool = False,
        now: bool = False,
        asks_again: bool | None = None,
        asks_about_calls: bool | None = None,
    ) -> JournaledRun:
        """
        Return a recorded run that is ready to resume; it locks the journal until it is closed.

        With *accepts_edited_effects*, what was edited since does not end the run where the record has an effect of the same kind. Unlike
        *answers*, those given *later_answers* need not fit an open question: they may be asked for later. With *now* recorded sleeps
        and timeouts are over at once. With *asks_again* no recorded or posted answer is believed; by default (``None``) if this user did
        not give the permissions that the journal holds. With *asks_about_calls* a person is
        asked about calls that only the record asks for; by default (``None``) if the journal is not known as this user's.

        Raises:
            JournalMissing: when the journal does not exist; nothing is created.
            JournalError: when the journal cannot be used; see ``Journal.writer``.
            AnswerRejected: when an answer fits no open question; nothing is changed.
        """
        from stepengine.journal.recorded_part import AllowedDifferences

        given, writer = GivenAnswers(answers, in_doubt), RunWriter(journal)
        # Asked before the writer is taken, since taking it makes the file: a misspelt name would leave an empty journal
        # behind.
        if not journal.is_there():
            raise journal.make_missing_error()
        history = writer.attach_writer(journal.writer()).history
        # From here on the journal is locked for this process, so whatever goes wrong must give it back: until the
        # process ends nobody else could go on with the run.
        try:
            if is_written_by_user(journal):
                writer.mark_as_written_by_user()
            if asks_again is None:
                asks_again = not has_trusted_permissions(journal)
            if asks_about_calls is None:
                asks_about_calls = not are_calls_trusted(journal)
            leeway = AllowedDifferences(keeps=accepts_edited_effects, asks_about_calls=asks_about_calls)
            run = cls(Resuming(), writer, given, history, leeway)
            run.wakes_now = now
            journal.refuse_unsigned_resume(history)
            # Before anything is changed: an answer that fits no question is a slip, such as of the run's id, and a run
            # that went on without it would ask again somewhere else.
            require_fitting_answers(
                history, {**given.by_question, **given.decisions}, trusts_calls=not asks_about_calls
            )
            run.mail.receive_earlier_messages(history, asks_again=asks_again)
            given.add_recorded_answers(
                history, later_answers or {}, by_id=accepts_edited_effects, asks_again=asks_again
            )
        except BaseException:
            writer.close()
            raise
        return run

    @classmethod
    def replay(
        cls, journal: Journal, *, leeway: AllowedDifferences | None = None, pace: ReplayPace | None = None
    ) -> JournaledRun:
        """Return a recorded run that repeats its record without performing effects; the journal is only read."""
        run = cls._open_repetition(Replaying(), journal, None, leeway)
        run.timing.pace = pace
        return run

    @classmethod
    def open_for_stepping(
        cls, journal: Journal, history: History, *, leeway: AllowedDifferences | None
    ) -> JournaledRun:
        """Return a recorded run whose machines the caller drives; several may share one *history*."""
        # No journal is opened, and there is no lock: a debugger makes a walk for each place that somebody looks at, and
        # all of them read one history.
        return cls(Walking(), RunWriter(journal), GivenAnswers(), history, leeway)

    @classmethod
    def replay_then_continue(
        cls,
        journal: Journal,
        answers: Mapping[str, AnswerLike] | None = None,
        *,
        leeway: AllowedDifferences | None,
    ) -> JournaledRun:
        """
        Return a recorded run that repeats while it matches its record, then performs further effects live.

        The journal is locked until the run ends, and then replaced; if the run fails, it stays unchanged. The run is stopped before
        an effect that changed the world would be repeated, unless that is allowed.

        Raises:
            JournalMissing: when the journal does not exist; nothing is created.
            JournalLocked: when a run of this or another process has locked it.
        """
        return cls._open_repetition(Extending(), journal, answers, leeway)

    @classmethod
    def record_missing(
        cls,
        journal: Journal,
        answers: Mapping[str, AnswerLike] | None,
        *,
        leeway: AllowedDifferences | None,
    ) -> JournaledRun:
        """
        Return a recorded run that repeats its record, performs effects without one, and records them; a difference is an error.

        The journal is replaced when effects were added.
        """
        # A mode of its own beside resuming: this is for recordings in tests (`--stepengine-record=new`), which are kept
        # stable and in order. To resume goes on in the journal itself, behind what it holds, and an edited agent would
        # leave its old records in there; here all is repeated into a copy, which takes the old one's place at the end,
        # and only if something came.
        return cls._open_repetition(Adding(), journal, answers, leeway)

    @classmethod
    def fork(
        cls,
        journal: Journal,
        replayer: Callable[[OpenJournal, RecordedPart, RecordedMachines], Replayer],
        around: Around,
        leeway: AllowedDifferences | None = None,
    ) -> JournaledRun:
        """
        Return a recorded run that repeats up to an address and continues from there; the journal is only read.

        Args:
            journal: The journal.
            replayer: Makes the object that decides where the fork starts and answers effects after it.
            around: Wraps the performer of live effects, given the estimates of model calls.
            leeway: The allowed differences from the record.
        """
        return cls._open_repetition(Forking(around), journal, None, leeway, replayer)

    @classmethod
    def _open_repetition(
        cls,
        mode: Mode,
        journal: Journal,
        answers: Mapping[str, AnswerLike] | None,
        leeway: AllowedDifferences | None,
        replayer: Callable[[OpenJournal, RecordedPart, RecordedMachines], Replayer] | None = None,
    ) -> JournaledRun:
        """Return a recorded run that writes into a copy in memory; the journal is locked if the mode cuts off its record."""
        given, writer = GivenAnswers(answers), RunWriter(journal)
        # Before it is read: another process could otherwise continue the run meanwhile, and its records would be replaced.
        if mode.cuts_off:
            writer.lock_source()
        try:
            run = cls(mode, writer, given, journal.history(), leeway, replayer=replayer)
            writer.open_memory_journal()
        except BaseException:
            writer.close()
            raise
        return run

    def wrap_services(self, services: Services) -> Services:
        """Return *services* with recording and replay built in."""
        if self.replayer is not None and (
            self.notifies_providers or getattr(services.models.registry, "is_for_run", False)
        ):
            # What was made for this run alone knows nothing of what the run did before, unless it is told.
            self.replayer.models = services.models.registry
        if self.timing.pace is not None:
            self.timing.pace.sleep = services.time.clock.sleep
        mode, machines, is_stable, past = self.mode, self.machines, self.writer.source.stable, self.recorded_part
        computed = None if self.replayer is None else self.replayer.find_computed_value
        writes = CallWrites(self.writer.source.redactor)
        recorder = partial(self._make_recording_or_replaying_performer, writes=writes)
        # The whole of recording is built in here, by what the engine lends to the tree. Driver and machine have no flag
        # for it, so there is none that could be wrong (docs/the-machine.md).
        return attrs.evolve(
            services,
            machine=machines.wrap_machine(services.machine),
            planner=machines.wrap_planner(services.planner, computed),
            middlewares=(*mode.make_live_wrappers(services), *services.middlewares, recorder),
            seed=machines.seed,
            # A recording of a test is repeated anywhere, never undone; and replays write nothing.
            keep_write=writes.add if mode.keeps_writes and not is_stable else None,
            time=TimeSetting(
                clock=services.time.clock,
                sleep_in_process=services.time.sleep_in_process if mode.waits else 0.0,
                since=self.timing.takeover_ms,
                is_timed=past is None or bool(past.leeway.live) or not mode.is_record_only(past.history),
                wakes_now=self.wakes_now,
            ),
            resumable=True,
            mail=self.mail if mode.writes else None,
            record=self._find_parallel_record(),
        )

    def _find_parallel_record(self) -> ParallelRecord | None:
        """Return the record for runs that continue in parallel after it; ``None`` if there are none or nothing is performed."""
        past, replayer = self.recorded_part, self.replayer
        if past is None or replayer is None or self.mode.is_record_only(past.history):
            return None
        from stepengine.journal.replayer import find_parallel_record

        return find_parallel_record(replayer, past)

    def _make_recording_or_replaying_performer(self, inner: Performer, *, writes: CallWrites) -> Performer:
        """Return a performer that records effects and, for a recorded run, answers recorded ones from the record."""
        recorder = Recorder(inner, self._journal, self.mail, writes, self.replayer)
        if self.recorded_part is None or self.replayer is None:
            return recorder
        from stepengine.journal.record_player import RecordPlayer

        return RecordPlayer(
            recorder, inner, self._journal, mail=self.mail, past=self.recorded_part, replayer=self.replayer
        )


def _make_redacted_params_warning(name: str, opening: RecordedStart) -> Iterator[str]:
    """
    Yield the warning that the run's params have placeholders in place of secrets, if they have.

    The secrets are not restored: the author of the journal could choose where secrets of this process are inserted.
    """
    names = find_redacted_names(to_compact_json(opening.params))
    if names:
        told = ", ".join(names)
        yield (
            f"{name} does not store the secrets from the params of this run ({told}): the resumed run gets "
            f"{f'<redacted:{names[0]}>'!r} in place of the value. Pass agents the name of a secret, and look up its value "
            "in the function or tool that needs it"
        )
