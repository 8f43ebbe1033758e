"""
The recordings of a test, as its fixtures use them.

``CassetteFixture`` records HTTP interactions, ``JournalFixture`` runs. Both have the same modes and the same usage summary. This
module has no dependency on pytest: the plugin passes the files and the mode, and reports the end of the test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import attrs
from attrs import frozen

from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Value
from stepengine.data.questions import AnswerLike
from stepengine.errors import JournalError
from stepengine.journal import FileJournal, Journal, MemoryJournal
from stepengine.journal.files import JOURNAL_FILE
from stepengine.journal.history import History
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.recorded_part import AllowedDifferences
from stepengine.journal.records import ROOT, Record, Result
from stepengine.journal.runs import SelfOpeningJournal
from stepengine.journal.store import Writer
from stepengine.testing.cassette import Cassette, CassetteUnused
from stepengine.testing.cassette_files import (
    CASSETTE_FILE,
    Interaction,
    RecordedRequest,
    parse_cassette_and_extras,
    read_cassette_bytes,
)
from stepengine.testing.cassette_matching import find_mark_key
from stepengine.testing.cassette_misses import CassetteMiss

if TYPE_CHECKING:
    from stepengine.testing.transport import Chunks, Clients

__tracebackhide__ = True  # a failed test ends at its author's line

Mode: TypeAlias = Literal["none", "once", "new", "extend", "rewrite"]
MODES: tuple[Mode, ...] = get_args(Mode)


def is_replay_only_mode(mode: Mode, *, file_existed: bool) -> bool:
    """Return True if a test only replays in this *mode*. *file_existed*: whether the file existed at its start."""
    return mode == "none" or (mode == "once" and file_existed)


@frozen(kw_only=True)
class RecordingUsage:
    """
    A summary of the use of one recording file by a test.

    Attributes:
        path: The file, as it is shown.
        mode: The mode.
        replayed: Entries that were played.
        recorded: Entries that were recorded.
        unused: Entries that were not requested.
        cost: US dollars of the model replies: paid when recorded, saved when replayed; ``None`` when unknown.
    """

    path: str
    mode: str
    replayed: int = 0
    recorded: int = 0
    unused: int = 0
    cost: Decimal | None = None

    def __str__(self) -> str:
        counts = f"{self.replayed} replayed, {self.recorded} recorded, {self.unused} unused"
        cost = "" if self.cost is None else f", ${self.cost:f} {'spent' if self.recorded else 'saved'}"
        return f"{self.path}  mode {self.mode}: {counts}{cost}"

    @property
    def written(self) -> str:
        """The line that reports a written file: path, number of entries and cost."""
        cost = "" if self.cost is None else f", ${self.cost:f}"
        noun = "interaction" if self.path.endswith((".yaml", ".yml")) else "effect"
        return f"recorded {self.path}: {self.recorded} {noun}{'' if self.recorded == 1 else 's'}{cost}"


def make_path_relative_to_cwd(path: Path) -> str:
    """Return *path* relative to the working directory, if it is inside of it."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return str(path)


# --- cassettes ---------------------------------------------------------------------------------------------------------

MAX_SHARED = 32


class CassetteFixture(Cassette):
    """
    The cassette of a test. Use ``transport()`` for providers and SDK clients, or the ready ``clients()``.

    Args:
        path: Its file.
        mode: ``"none"`` replays; ``"once"`` records when there is no file and else replays; ``"new"`` replays what is known
            and records the rest; ``"extend"`` does so too and drops what was not played; ``"rewrite"`` records all again.
        command: The command that runs the test, for messages.
        allow_unused: Whether the test may leave interactions unplayed.
        extra: Further files that are only read; what is unused in them does not matter.
        chunks: How a replayed stream is cut, see ``ReplayTransport``.
        record_errors: Record replies with status 408, 409, 429 and 5xx, too.
        requested: Whether the test asked for this cassette, so that recording nothing is an error.
        keeps: Whether ``write_recordings`` writes what was recorded.
        options: As for ``Cassette``.

    Attributes:
        mode: As given.
        allow_unused: As given.
        existed: Whether there was a file when the test began.
        fresh: What was recorded in this test.
        calls: Model calls that somebody made with what this cassette gave; they must show up in it.
        cost: US dollars of those calls; ``None`` when unknown.
    """

    def __init__(
        self,
        path: Path,
        mode: Mode,
        *,
        command: str = "pytest",
        allow_unused: bool = False,
        extra: Sequence[Path] = (),
        chunks: Chunks = "events",
        record_errors: bool = False,
        requested: bool = False,
        keeps: bool = True,
        **options: Any,
    ) -> None:
        self.existed = path.exists()
        if mode == "rewrite":
            CASSETTE_FILE.check(path)  # before the test, whose recording would be lost
        known: Iterable[Interaction] = load_interactions(path) if mode != "rewrite" and self.existed else ()
        hint = f"{command} --stepengine-record={'extend' if self.existed else 'once'}"
        # A file that is recorded again keeps its key, so that what has not changed looks the same.
        key = find_mark_key(load_interactions(path)) or None if mode == "rewrite" and self.existed else None
        super().__init__(known, path=path, hint=hint, mark_key=key, **options)
        if mode != "rewrite" and self.existed:
            self.extras = load_extras(path)
        self.mode: Mode = mode
        self.allow_unused = allow_unused
        self.calls = 0
        self.cost: Decimal | None = None
        self.fresh = Cassette(path=path, mark_key=self.mark_key, **options)
        self._options = options
        self._record_errors = record_errors
        self._requested = requested
        self._command = command
        self._chunks = chunks
        self._keeps = keeps
        self._extra = [Cassette(load_interactions(file), path=file, **options) for file in extra]
        self._shared: dict[str, CassetteFixture] = {}
        self._recorded_files: set[Path] = set()
        self._may_share = ""

    def __call__(self, name: str) -> CassetteFixture:
        """
        Return the cassette *name* of the test's module, which several tests may read.

        Raises:
            AssertionError: when it would be recorded while other processes run tests that share it.
        """
        if name not in self._shared:
            path = self.path.with_name(f"{name}.yaml") if self.path is not None else Path(f"{name}.yaml")
            # An earlier test has recorded its part of the file, which this test adds to.
            adds = path in self._recorded_files and self.mode in ("once", "rewrite")
            shared = CassetteFixture(
                path,
                "new" if adds else self.mode,
                command=self._command,
                allow_unused=True,
                chunks=self._chunks,
                record_errors=self._record_errors,
                keeps=self._keeps,
                **self._options,
            )
            if self._may_share and not shared.replaying:
                msg = f"{make_path_relative_to_cwd(path)} is shared by several tests, and {self._may_share}"
                raise AssertionError(msg)
            self._shared[name] = shared
        return self._shared[name]

    @property
    def shared_files(self) -> list[Path]:
        """The files of the shared cassettes that the test has named."""
        return [shared.path for shared in self._shared.values() if shared.path is not None]

    def forbid_shared_recording(self, reason: str) -> None:
        """Make the recording of shared cassettes an error from now on, with the reason *reason*."""
        self._may_share = reason

    def set_recorded_files(self, recorded: set[Path]) -> None:
        """Store the shared files that were recorded in this session: they are extended, not rewritten. New ones are added to *recorded*."""
        self._recorded_files = recorded

    @property
    def replaying(self) -> bool:
        """Whether everything is played and nothing reaches the network."""
        return is_replay_only_mode(self.mode, file_existed=self.existed)

    def consume(self, request: RecordedRequest) -> Interaction:
        """
        Return the first unused interaction with an equal request, else one from the test's extra files.

        Raises:
            CassetteMiss: when there is none.
        """
        try:
            return super().consume(request)
        except CassetteMiss as miss:
            for extra in self._extra:
                try:
                    found = extra.consume(request)
                except CassetteMiss:
                    continue
                self.remove_miss(miss)
                return found
            raise

    def has_replies_of_transport(self, name: str) -> bool:
        """Return True if the cassette or an extra file has replies of the program's own transport *name*."""
        return super().has_replies_of_transport(name) or any(one.has_replies_of_transport(name) for one in self._extra)

    def transport(self, inner: Any = None, chunks: Chunks | None = None) -> Any:
        """
        Return the transport of this test, for sync and async clients: ``transport=`` of a provider, or of an httpx2 client.

        Args:
            inner: What reaches the network while recording; httpx2's own transports by default.
            chunks: How a replayed stream is cut, see ``ReplayTransport``; by default as the test's mark says.
        """
        cut = self._chunks if chunks is None else chunks
        if self.replaying:
            from stepengine.testing.transport import ReplayTransport

            return ReplayTransport(self, cut)
        from stepengine.testing.transport import MixedTransport

        return MixedTransport(self, self.fresh, inner, cut, record_errors=self._record_errors)

    def patch(self) -> AbstractContextManager[None]:
        """
        Return a block in which every client of this process uses this cassette.

        Raises:
            DataError: when the block is entered while another cassette is used in this way.
        """
        from stepengine.testing.exchanges import Exchanges
        from stepengine.testing.patching import patch_clients

        fresh = None if self.replaying else self.fresh
        known = self if self.replaying or len(self) or self._extra else None
        return patch_clients(Exchanges(known, fresh, record_errors=self._record_errors), self._source_name)

    def clients(self, inner: object = None) -> Clients:
        """
        Return SDK clients that use this cassette: ``anthropic``, ``async_anthropic``, ``openai``, ``async_openai``, ``google``.

        Args:
            inner: What reaches the network while recording; httpx2's own transports by default.
        """
        from stepengine.testing.transport import Clients

        return Clients(self.transport(inner), key="replay" if self.replaying else None)

    def check_usage(self) -> None:
        """
        Raise an error if a request was missed, an entry was not played, or nothing was recorded.

        Raises:
            CassetteMiss: when a request was not known, also when somebody swallowed it.
            CassetteUnused: when interactions were not played, unless they may.
            AssertionError: when model calls were made that did not come by here, or nothing was recorded of a test that
                asked for this cassette.
        """
        for shared in self._shared.values():
            shared.check_usage()
        for exchange in [
            *self.fresh.open_exchanges
        ]:  # an async client may leave a stream open when it has what it wants
            exchange.finish(read_to_end=False)
        if self.misses:
            raise self.misses[0]
        if self.replaying and not self.allow_unused:
            self._require_all_played()
        if self.replaying or self.has_entries:
            return
        if self.calls and not self.fresh.left_out:
            msg = (
                f"{self.calls} model calls were made, but no request went through the cassette {self._source_name}: this client does "
                "not use the given transport. Give it transport=cassette.transport(), or use a client of cassette.clients()"
            )
            raise AssertionError(msg)
        if self._requested and self._keeps and not self.allow_unused and (self.mode == "rewrite" or not self.existed):
            raise AssertionError(self._explain_nothing_recorded())

    @property
    def has_entries(self) -> bool:
        """Whether anything was played or recorded, also by the shared cassettes of the test."""
        entries = self._played_count or self.fresh.complete_interactions
        return bool(entries) or any(shared.has_entries for shared in self._shared.values())

    def _explain_nothing_recorded(self) -> str:
        """Return the message for a test that recorded nothing, with the probable reason."""
        if self.fresh.left_out:
            return "\n".join([f"nothing was recorded in {self._source_name}", *self.list_remarks()])
        return (
            f"nothing was recorded in {self._source_name}: no request went through the cassette\n"
            "  if the program makes its own client: @pytest.mark.stepengine(patch=True)\n"
            "  if the test makes the client: give it transport=cassette.transport(), or use cassette.clients()\n"
            "  if the test sends no request: @pytest.mark.stepengine(allow_unused=True), or do not use the cassette"
        )

    def list_remarks(self) -> list[str]:
        """Return a line for each reply that was not recorded, with how to record it, and for each body that was not looked into."""
        lines = [f"  not recorded: {left}" for left in self.fresh.left_out]
        reasons = {left.reason for left in self.fresh.left_out}
        if "error_status" in reasons:
            lines.append("  to record error replies: @pytest.mark.stepengine(record_errors=True)")
        if "not_read" in reasons:
            lines.append("  to record a stream: read it to its end")
        lines += [f"  not searched for secrets: {line}" for line in self.fresh.unscanned_bodies]
        return lines + [line for shared in self._shared.values() for line in shared.list_remarks()]

    def _require_all_played(self) -> None:
        """Raise ``CassetteUnused``, with the commands that help, if an interaction was not played."""
        try:
            self.assert_all_used()
        except CassetteUnused as error:
            msg = (
                f"{error}\n  to drop them: {self._command} --stepengine-record=extend\n"
                "  to keep them: @pytest.mark.stepengine(allow_unused=True)"
            )
            raise CassetteUnused(msg, unused=error.unused) from None

    def write_recordings(self) -> list[RecordingUsage]:
        """
        Write the recordings, and return the usage of each file that was written.

        Raises:
            SecretFound: when a secret is left; the file stays as it was.
        """
        kept = []
        for shared in self._shared.values():
            written = shared.write_recordings()
            if written and shared.path is not None:
                self._recorded_files.add(shared.path)
            kept += written
        return [*kept, self.summarize_usage()] if self._write_if_changed() else kept

    def _write_if_changed(self) -> bool:
        """Write the used and the new interactions, or delete a file to rewrite without new ones; return whether it was written."""
        # A test that sent no request says nothing about which interactions are still needed.
        drops = (
            self.mode == "extend" and not self.allow_unused and (self._played_count or self.fresh.complete_interactions)
        )
        dropped = set(self.unused) if drops else set()
        if not self._keeps or self.replaying:
            return False
        if not (self.fresh.complete_interactions or dropped):
            if self.mode == "rewrite" and self.existed and self.path is not None:
                self.path.unlink()
            return False
        kept = [held for index, held in enumerate(self.interactions) if index not in dropped]
        interactions = [*kept, *self.fresh.interactions]
        whole = Cassette(interactions, path=self.path, mark_key=self.mark_key, **self._options)
        whole.extras = self.extras
        # What one request kept secret must not stand in the reply to another.
        whole._secrets.update(self.fresh._secrets)  # noqa: SLF001
        whole.save()
        return True

    @property
    def _played_count(self) -> int:
        """The number of interactions that were played."""
        return len(self) - len(self.unused)

    @property
    def _source_name(self) -> str:
        """The path of the file relative to the working directory, for messages."""
        return make_path_relative_to_cwd(self.path) if self.path else super()._source_name

    def list_usages(self) -> list[RecordingUsage]:
        """Return a summary of replayed and recorded interactions for each cassette of the test."""
        own = [self.summarize_usage()] if len(self) or self.fresh.complete_interactions else []
        return [*own, *(usage for shared in self._shared.values() for usage in shared.list_usages())]

    def summarize_usage(self) -> RecordingUsage:
        """Return the summary of replayed and recorded interactions of this cassette."""
        return RecordingUsage(
            path=self._source_name,
            mode=self.mode,
            replayed=self._played_count,
            recorded=len(self.fresh.complete_interactions),
            unused=len(self.unused),
            cost=self.cost,
        )


def load_interactions(path: Path) -> tuple[Interaction, ...]:
    """Return the interactions in the file at *path*. A file that several tests read is parsed once."""
    status = path.stat()
    return _parse_cassette_file(path, status.st_mtime_ns, status.st_size)[0]


def load_extras(path: Path) -> dict[str, Any]:
    """Return the data in the file at *path* that belongs to no interaction, such as frozen values."""
    status = path.stat()
    return dict(_parse_cassette_file(path, status.st_mtime_ns, status.st_size)[1])


@lru_cache(maxsize=MAX_SHARED)
def _parse_cassette_file(
    path: Path,
    changed: int,  # noqa: ARG001 - another file is another key
    size: int,  # noqa: ARG001
) -> tuple[tuple[Interaction, ...], dict[str, Any]]:
    """Return interactions and extras of a cassette file; cached until its time or size changes."""
    return parse_cassette_and_extras(read_cassette_bytes(path), str(path))


# --- journals ----------------------------------------------------------------------------------------------------------


class JournalFixture(SelfOpeningJournal):
    """
    The journal of a test: ``engine.run(agent, prompt, journal=journal)`` records a run once and replays it later.

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
        keeps: Whether ``write_recordings`` writes what was recorded.

    Attributes:
        path: Its file.
        mode: As given.
        allow_unused: As given.
        existed: Whether there was a file when the test began.
        begun: The session of the test's run, once it has begun.
        problem: Why a run was refused, if one was.
    """

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
        if mode == "rewrite":
            JOURNAL_FILE.check(path)
        self.problem: BaseException | None = None
        self.begun: JournaledRun | None = None
        self._fresh: MemoryJournal | None = None
        self._others: dict[str, JournalFixture] = {}

    def __repr__(self) -> str:
        return f"JournalFixture({self.name!r}, {self.mode!r})"

    def __call__(self, name: str) -> JournalFixture:
        """Return the journal of another run of the same test."""
        if name not in self._others:
            self._others[name] = JournalFixture(
                self.path.with_name(f"{self.path.stem}.{name}{self.path.suffix}"),
                self.mode,
                command=self._command,
                allow_unused=self.allow_unused,
                keeps=self._keeps,
            ).copy_redaction_rules_from(self)
        return self._others[name]

    @property
    def name(self) -> str:
        """The name of the journal in messages."""
        return make_path_relative_to_cwd(self.path)

    @property
    def replaying(self) -> bool:
        """Whether the run is repeated and nothing may be performed."""
        return is_replay_only_mode(self.mode, file_existed=self.existed)

    # --- for the engine -----------------------------------------------------------------------------------------------

    def open_run(self, answers: Mapping[str, AnswerLike] | None = None) -> JournaledRun:
        """
        Return the run of the test, which records or replays according to the mode.

        Raises:
            AssertionError: when there is no record and none is to be made, or for a second run in one journal.
        """
        if self.begun is not None:
            msg = (
                f"{self.name} stores one run, but its test starts a second one; give that one a name: journal('second')"
            )
            raise self._make_and_store_problem(msg)
        if self.replaying and not self.existed:
            msg = (
                f"there is no journal {self.name}, and the mode {self.mode!r} records nothing\n"
                f"  to record it: {self._command} --stepengine-record=once"
            )
            raise self._make_and_store_problem(msg)
        self.begun = run = self._make_run_for_mode(answers)
        run.raises = run.notifies_providers = True
        return run

    def _make_run_for_mode(self, answers: Mapping[str, AnswerLike] | None) -> JournaledRun:
        """Return a run that records, replays or does both, as the mode and the existence of the file require."""
        leeway = AllowedDifferences(may_leave=self.allow_unused)
        if self.existed and self.mode == "extend":
            # Whoever records a test anew wants what it does to happen, as when it was recorded first.
            return JournaledRun.replay_then_continue(self, answers, leeway=attrs.evolve(leeway, may_repeat=True))
        if self.existed and self.mode == "new":
            return JournaledRun.record_missing(self, answers, leeway=leeway)
        if self.replaying:
            return JournaledRun.replay(self, leeway=leeway)
        return JournaledRun.record(self, answers)

    def _make_and_store_problem(self, message: str) -> AssertionError:
        """Return an ``AssertionError`` with *message*; the first one is stored as the problem of the journal."""
        problem = AssertionError(message)
        self.problem = self.problem or problem
        return problem

    def records(self) -> list[Record]:
        """Return the records of this test, else those in the file."""
        return FileJournal(self.path).records() if self._fresh is None else self._fresh.records()

    def bind_run(self, run: str) -> Journal:
        """Return the journal of the new run. The file is written after the test has passed."""
        self._fresh = self._make_memory_journal()
        return self._fresh

    def replace(self, records: Sequence[Record]) -> None:
        """Store *records* in memory; the file is written after the test has passed."""
        fresh = self._make_memory_journal()
        fresh.replace(records)
        self._fresh = fresh

    def writer(self) -> Writer:
        """
        Raise an error: only the run of a test may write its journal.

        Raises:
            JournalError: always.
        """
        msg = (
            f"{self.name} is the journal of a test: engine.run(..., journal=journal) records and replays it. Give answers with "
            "answers=; to resume a run in a test, record it in a separate journal, such as FileJournal(tmp_path / 'run.jsonl')"
        )
        raise JournalError(msg)

    def lock(self) -> Callable[[], None]:
        """Return a function that does nothing: only the run of its test replaces this journal."""
        return lambda: None

    def _make_memory_journal(self) -> MemoryJournal:
        """Return an empty journal in memory with the rules of this one."""
        return MemoryJournal(redact="off", link=self.link, stable=self.stable).copy_redaction_rules_from(self)

    # --- the end of the test ------------------------------------------------------------------------------------------

    @property
    def misses(self) -> list[BaseException]:
        """The errors of the test's runs, including errors that were swallowed."""
        found: list[BaseException] = []
        for one in (self, *self._others.values()):
            fatal = None if one.begun is None else one.begun.writer.fatal
            found += [problem for problem in (one.problem, fatal) if problem is not None]
        return found

    @property
    def calls(self) -> int:
        """The number of model calls that were made and recorded in this test."""
        return sum(
            [len(_list_model_replies(one.list_new_results(), one.history())) for one in (self, *self._others.values())]
        )

    def check_usage(self) -> None:
        """
        Raise the first error of the test's runs, also a swallowed one, or an error for an unused journal.

        Raises:
            ReplayDivergence: when the run diverged from its journal, even if a handler caught the error.
            AssertionError: when a journal was not used.
        """
        if self.misses:
            raise self.misses[0]
        for one in [] if self.allow_unused or not self.replaying else self._list_unused_journals_of_test():
            msg = (
                f"the test did not use the journal {make_path_relative_to_cwd(one)}: no run got it as journal=\n"
                "  delete the file if it is no longer needed, or mark the test with "
                "@pytest.mark.stepengine(allow_unused=True)"
            )
            raise AssertionError(msg)

    def _list_unused_journals_of_test(self) -> list[Path]:
        """Return the journals of the test that no run used, including those whose names the test no longer mentions."""
        run = {one.path for one in (self, *self._others.values()) if one.begun is not None}
        folder, start = self.path.parent, f"{self.path.stem}."
        files = folder.glob(f"*{self.path.suffix}") if folder.is_dir() else ()
        return sorted(file for file in files if file.name.startswith(start) and file not in run)

    def write_recordings(self) -> list[RecordingUsage]:
        """
        Write the recording, and return the usage of each file that was written.

        Raises:
            SecretFound: when a secret is left; the file stays as it was.
        """
        return [one.summarize_usage() for one in (self, *self._others.values()) if one.write_if_changed()]

    def write_if_changed(self) -> bool:
        """Write new records; return True if the file was written. In mode "rewrite", delete a file without new records."""
        if not self._keeps or self.replaying:
            return False
        if self._fresh is None:
            if self.mode == "rewrite" and self.existed:
                FileJournal(self.path).discard()
            return False
        lines = self._fresh.lines()
        if not lines or (self.existed and b"".join(lines) == self.path.read_bytes()):
            return False
        for number, line in enumerate(lines, 1):
            self.redactor.check_no_secrets(json.loads(line), f"{self.name}:{number}")
        file = FileJournal(self.path, redact="off", link=self.link, stable=self.stable)
        file.copy_redaction_rules_from(self).replace(self._fresh.records())
        return True

    def list_usages(self) -> list[RecordingUsage]:
        """Return a summary of replayed and recorded effects for each journal of the test."""
        used = [one for one in (self, *self._others.values()) if one.begun is not None or one.existed]
        return [one.summarize_usage() for one in used]

    def summarize_usage(self) -> RecordingUsage:
        """Return the summary of replayed and recorded effects of this journal."""
        past = None if self.begun is None else self.begun.recorded_part
        history = self.history()
        new = self.list_new_results()
        held = [result for address, result in history.results.items() if address != ROOT]
        left = (
            len(held)
            if self.begun is None
            else past.unreached_count
            if past is not None and self.mode != "extend"
            else 0
        )
        return RecordingUsage(
            path=self.name,
            mode=self.mode,
            replayed=max(0, len(held) - len(new) - left),
            recorded=len(new),
            unused=left,
            cost=_sum_cost(new or held, history),
        )

    def list_new_results(self) -> list[Result]:
        """Return the results that were recorded in this test."""
        if self._fresh is None or self.begun is None or self.replaying:
            return []
        past = self.begun.recorded_part
        history = self._fresh.history()
        # The ends of the root and of background children are no effects: they have no intent of their own.
        results = [(a, r) for a, r in history.results.items() if a != ROOT and a in history.intents]
        return [r for a, r in results if past is None or past.find_result(a) is None]


def _list_model_replies(results: Iterable[Result], history: History) -> list[ModelReply]:
    values = [history.outcome(result) for result in results if history.intents[result.address].type == "model_call"]
    return [v.value for v in values if isinstance(v, Value) and isinstance(v.value, ModelReply)]


def _sum_cost(results: Iterable[Result], history: History) -> Decimal | None:
    """Return the total cost of the replies; ``None`` if no cost is known."""
    known = [reply.cost for reply in _list_model_replies(results, history) if reply.cost is not None]
    return sum(known, Decimal(0)) if known else None
