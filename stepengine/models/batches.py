"""
Send the model calls of many runs in batches, for half the price and with longer waits.

``Batched`` is a provider that wraps another one. A call waits until its batch is submitted and done. A file stores the
submitted batches, so that a run that is resumed after a crash waits for its batch and is not billed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import attrs

from stepengine.data.codec import encode_stored
from stepengine.data.json import canonical
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.errors import DataError, MissingKey, ModelError
from stepengine.models._stopped_usage import mark_request_unsent
from stepengine.models.base import BatchMember, ModelInfo, Provider, ProviderSettings
from stepengine.workspace.after_fork import hold_references, register_for_fork_reset
from stepengine.workspace.file_formats import mark_own_database
from stepengine.workspace.guarded_database import open_guarded_database

logger = logging.getLogger("stepengine.models")

LAYOUT = (
    "CREATE TABLE IF NOT EXISTS calls (id TEXT PRIMARY KEY, print TEXT NOT NULL, batch TEXT NOT NULL, sent REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS prints ON calls (print)",
)
FORGOTTEN = 30 * 24 * 3600
"""Seconds after which no provider stores the results of a batch any more."""
MAX_CALLS = 10_000
"""Below the documented limit of each provider; larger batches take longer."""
MOST_BYTES = 16_000_000
"""The most bytes of the requests of one batch; the smallest limit is Gemini's, 20 MB."""
UNREAD = 10
"""The number of protocol errors in status queries until the waiting calls fail."""
NOT_LET_IN = frozenset({401, 403})


@attrs.define(eq=False)
class _WaitingCall:
    """
    A call that waits for the reply from its batch.

    Attributes:
        request: The request.
        member: The encoded request; ``None`` once the provider has accepted it.
        request_hash: The hash of the request, by which equal calls are recognized.
        size: The size of the request in bytes.
        reply: The future of the reply.
        since: The time of the call, by the event loop's clock.
        batch: The id of its batch; ``""`` until the provider has accepted it.
        is_sent: Whether a submission has started, so that the provider may have accepted it.
        stays_stored: Whether the call stays stored after a failure, because its reply may still arrive for a later equal call.
    """

    request: ModelRequest
    member: BatchMember | None
    request_hash: str
    size: int
    reply: asyncio.Future[ModelReply]
    since: float
    batch: str = ""
    is_sent: bool = False
    stays_stored: bool = False


class Batched(Provider):
    """
    A provider that sends the calls to another provider in batches, which cost half as much and take minutes to a day.

    A batch is submitted when its first call has waited *wait* seconds, or at *most* calls, or at 16 MB of requests. Every
    *poll* seconds the status of the batch is queried. Nothing is streamed. A call that fails in a batch fails like any other,
    and the engine's retries send it again.

    *file* stores the batch of each call. After a crash, resumed runs wait for the batches that were already submitted. If a
    run died after it received a reply and before it recorded it, the call is sent, and billed, again.

    Args:
        provider: The wrapped provider: ``AnthropicProvider``, ``OpenAIProvider``, ``OpenAIChatProvider`` for OpenAI itself,
            ``GoogleProvider``, or one of yours with ``encode_batch_member``, ``submit_batch``, ``fetch_batch_results`` and
            ``decode_batch_reply``.
        file: The file for submitted batches; only one process at a time can use it.
        wait: Seconds that a call waits for others.
        most: The most calls of one batch, 1 to 10,000.
        poll: Seconds between two status queries.

    Raises:
        DataError: for numbers out of range.
    """

    def __init__(
        self,
        provider: Provider,
        file: str | os.PathLike[str],
        *,
        wait: float = 30.0,
        most: int = 1_000,
        poll: float = 60.0,
    ) -> None:
        if wait < 0 or poll <= 0 or not 1 <= most <= MAX_CALLS:
            msg = (
                f"wait={wait!r}, most={most!r}, poll={poll!r}: wait must be at least 0, most 1 to {MAX_CALLS:,}, and poll "
                "above 0"
            )
            raise DataError(msg)
        self.name = provider.name
        self.model_patterns = provider.model_patterns
        self.default_model = provider.default_model
        self._inner = provider
        self._file = Path(file)
        self._wait, self._most, self._poll = wait, most, poll
        self._out: _SentCalls | None = None
        self._waiting: dict[str, _WaitingCall] = {}
        self._over = set[str]()
        self._is_deletion_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Drop the parent's calls and file in a forked child process, which opens the file itself."""
        hold_references(self._out, self._work, self._sending, self._waiting)
        self._out = self._loop = self._work = self._sending = None
        self._waiting, self._over, self._is_deletion_scheduled = {}, set(), False

    def add_prefix(self, prefix: str) -> None:
        """Register *prefix* as another name for ``strip_prefix``, also at the wrapped provider."""
        super().add_prefix(prefix)
        self._inner.add_prefix(prefix)

    def supports_model(self, model: str) -> bool:
        """Return whether the wrapped provider serves *model*."""
        return self._inner.supports_model(model)

    def skip_reply(self, request: ModelRequest) -> None:
        """Notify the wrapped provider of a *request* that a test's record answers."""
        self._inner.skip_reply(request)

    def settings(self) -> ProviderSettings:
        """Return the sources of the wrapped provider's key and base URL."""
        return self._inner.settings()

    def get_account(self) -> str:
        """Return the id of the wrapped provider's account."""
        return self._inner.get_account()

    def check(self, model: str) -> None:
        """
        Raise an error if arguments and environment show that requests for *model* cannot succeed.

        Raises:
            MissingKey: when there is no key for *model*.
            UnknownModel: when the provider has no such model.
            ModelError: when the provider has no batches.
        """
        self._inner.check(model)
        self._inner.encode_batch_member(ModelRequest(model))

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Query the provider for the number of tokens in *request*, without a batch."""
        return await self._inner.count_tokens(request)

    async def describe(self, model: str) -> ModelInfo | None:
        """Query the provider for the limits and options of *model*, without a batch."""
        return await self._inner.describe(model)

    def output_limit(self, request: ModelRequest) -> int | None:
        """Return the output limit in tokens that the wrapped provider sends with a *request* that sets none; ``None`` if it sends none."""
        return self._inner.output_limit(request)

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """Upload a file without a batch, and return its id."""
        return await self._inner.upload(data, mime_type=mime_type, name=name, expires_in=expires_in)

    async def delete_file(self, file_id: str) -> None:
        """Delete an uploaded file without a batch."""
        await self._inner.delete_file(file_id)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Wait for the batch with *request* and return its reply; raise ``ModelError`` if the batch has none.

        Raises:
            DataError: when another process uses the file.
            ModelError: when the batch has no reply for *request*.
        """
        member = self._inner.encode_batch_member(request)
        out, loop = self._get_or_open_sent_calls(), asyncio.get_running_loop()
        if self._loop is not loop:
            if self._waiting and self._loop is not None and not self._loop.is_closed():
                msg = "this Batched has waiting calls of another event loop; create one Batched per event loop"
                raise ModelError(msg, kind="settings")
            # Tasks of the other loop do not affect these calls.
            self._delete_finished_calls()
            self._loop, self._work, self._sending = loop, None, None
            self._waiting, self._came = {}, asyncio.Event()
        calls, text = self._waiting, canonical(encode_stored(request)).encode()
        print_ = hashlib.sha256(text).hexdigest()
        # A call is taken while a caller waits for it, or is about to receive its reply.
        found = out.find_unclaimed_call(
            print_, lambda known: known in self._over or (known in calls and not calls[known].reply.cancelled())
        )
        name, batch = found or (f"call-{secrets.token_hex(8)}", "")
        waiting = _WaitingCall(
            request, None if batch else member, print_, len(text), loop.create_future(), loop.time(), batch
        )
        calls[name] = waiting
        self._came.set()
        if self._work is None or self._work.done():
            self._work = loop.create_task(
                self._poll_and_fail_calls_on_error(calls, self._came), name="stepengine batches"
            )
        is_over = False
        try:
            reply = await _await_reply(waiting)
            is_over = True
        except Exception:
            is_over = not waiting.stays_stored
            raise
        finally:
            # A cancelled call stays in its batch, for a later equal call.
            if is_over:
                self._over.add(name)
                if not self._is_deletion_scheduled:
                    # Calls with replies at the same time are deleted in one write.
                    self._is_deletion_scheduled = True
                    loop.call_soon(self._delete_finished_calls)
            if calls.get(name) is waiting:
                del calls[name]
        return reply

    async def close(self) -> None:
        """
        Fail the waiting calls, wait for a batch that is being submitted, and close the provider.

        Submitted batches stay stored for later equal calls.
        """
        here, there = asyncio.get_running_loop(), self._loop
        if there is here:
            await self._stop_and_fail_calls()
        elif there is not None and there.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._stop_and_fail_calls(), there))
        self._delete_finished_calls()
        self._loop, self._waiting = None, {}
        if self._out is not None:
            self._out.close()
            self._out = None
        await self._inner.close()

    async def _stop_and_fail_calls(self) -> None:
        """Stop polling, wait for a batch that is being submitted, and fail the waiting calls."""
        work, sending, self._work, self._sending = self._work, self._sending, None, None
        if work is not None:
            work.cancel()
            await asyncio.wait([work])
        if sending is not None:
            # Cancelled, it might be billed without being stored.
            await asyncio.wait([sending])
        closed = ModelError("the provider was closed while the call waited for its batch", kind="closed")
        _fail_calls(self._waiting, closed, stays_stored=True)

    def _delete_finished_calls(self) -> None:
        """Delete the finished calls from the file; log a failure in place of raising, and retry at the next deletion."""
        self._is_deletion_scheduled = False
        try:
            if self._out is not None and self._over:
                self._out.delete_calls(self._over)
                self._over = set()
        except DataError as error:
            logger.warning("%d finished calls could not be deleted from the batch file: %s", len(self._over), error)

    def _get_or_open_sent_calls(self) -> _SentCalls:
        """Return the stored calls; open and lock their file at the first call."""
        if self._out is None:
            self._out = _SentCalls(self._file)
        return self._out

    # --- submitting and polling ---------------------------------------------------------------------------------------

    async def _poll_and_fail_calls_on_error(
        self, waiting_calls: Mapping[str, _WaitingCall], call_added: asyncio.Event
    ) -> None:
        """Submit batches and fetch their results while calls wait; an unexpected error fails all waiting calls."""
        try:
            await self._submit_and_poll_batches(waiting_calls, call_added)
        except asyncio.CancelledError:
            raise  # by `close`, which fails the calls itself
        except BaseException as error:  # noqa: BLE001 - also one of a test framework must end the waits
            _fail_calls(waiting_calls, error, stays_stored=True)

    async def _submit_and_poll_batches(
        self, waiting_calls: Mapping[str, _WaitingCall], call_added: asyncio.Event
    ) -> None:
        """Submit due batches, and deliver the results of finished batches, until no call waits."""
        loop, asked, protocol_error_counts = asyncio.get_running_loop(), dict[str, float](), Counter[str]()
        while waiting_calls:
            call_added.clear()
            for calls in self._collect_due_batches(waiting_calls, loop.time()):
                await self._submit_uncancelled_calls(calls)
            now = loop.time()
            for batch in {each.batch for each in waiting_calls.values() if each.batch}:
                # A batch of an earlier process is queried at once.
                if now >= asked.get(batch, 0.0):
                    await self._fetch_and_deliver_results(batch, waiting_calls, protocol_error_counts)
                    asked[batch] = loop.time() + self._poll
            open_ = [each for each in waiting_calls.values() if not each.reply.done()]
            times = [each.since + self._wait for each in open_ if not each.batch]
            times += [asked.get(each.batch, now + self._poll) for each in open_ if each.batch]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(times, default=loop.time())):
                    await call_added.wait()
                    # Let other new calls arrive first.
                    await asyncio.sleep(0)

    def _collect_due_batches(
        self, waiting_calls: Mapping[str, _WaitingCall], now: float
    ) -> list[dict[str, _WaitingCall]]:
        """Return the calls of each batch to submit at the time *now*: full batches, and those whose first call has waited long enough."""
        groups: dict[str, dict[str, _WaitingCall]] = {}
        for name, each in waiting_calls.items():
            if each.member is not None and not each.reply.done():
                groups.setdefault(each.member.group, {})[name] = each
        due: list[dict[str, _WaitingCall]] = []
        for calls in groups.values():
            part, size = dict[str, _WaitingCall](), 0
            for name, each in calls.items():
                if len(part) == self._most or (part and size + each.size > MOST_BYTES):
                    due.append(part)
                    part, size = {}, 0
                part[name] = each
                size += each.size
            if len(part) == self._most or min(each.since for each in part.values()) + self._wait <= now:
                due.append(part)
        return due

    async def _submit_uncancelled_calls(self, calls: Mapping[str, _WaitingCall]) -> None:
        """Submit the calls of *calls* that are not cancelled; a cancellation of the caller does not stop the submission."""
        # Some may have been cancelled while the previous batch was submitted.
        calls = {name: each for name, each in calls.items() if not each.reply.done()}
        if calls:
            self._sending = asyncio.get_running_loop().create_task(self._submit_batch(calls), name="stepengine batch")
            await asyncio.shield(self._sending)

    async def _submit_batch(self, calls: Mapping[str, _WaitingCall]) -> None:
        """Submit *calls* as a batch and store the batch in the file; an error of the provider fails *calls*."""
        try:
            members = {name: each.member for name, each in calls.items() if each.member is not None}
            for each in calls.values():
                each.is_sent = True
            batch = await self._inner.submit_batch(members)
        except Exception as error:  # noqa: BLE001 - any error must end the waits
            _fail_calls(calls, error)
            return
        for each in calls.values():
            # The encoded request is dropped to free memory while the batch runs.
            each.batch, each.member = batch, None
        logger.info("%s accepted a batch of %d calls: %s", self.name, len(calls), batch)
        try:
            self._get_or_open_sent_calls().record_batch(
                batch, {name: each.request_hash for name, each in calls.items()}
            )
        except DataError as error:
            # The batch still runs; only another process would not recognize it.
            logger.warning("the batch %s could not be stored in the batch file: %s", batch, error)

    async def _fetch_and_deliver_results(
        self, batch: str, waiting_calls: Mapping[str, _WaitingCall], protocol_error_counts: Counter[str]
    ) -> None:
        """Query a batch and set the reply or error of each of its calls; a failed query fails all of them unless it may be retried."""
        calls = {name: each for name, each in waiting_calls.items() if each.batch == batch}
        try:
            results = await self._inner.fetch_batch_results(batch)
        except ModelError as error:
            protocol_error_counts[batch] += error.kind == "protocol"
            if error.retryable and protocol_error_counts[batch] < UNREAD:
                # The batch still exists, and the next query may succeed.
                logger.warning("the results of the batch %s could not be fetched from %s: %s", batch, self.name, error)
                return
            # A rejected client, or an unreadable answer, says nothing about the batch itself.
            shut_out = isinstance(error, MissingKey) or error.kind == "auth" or error.status in NOT_LET_IN
            not_known = shut_out or protocol_error_counts[batch] > 0
            _fail_calls(calls, error, stays_stored=not_known)
            return
        except Exception as error:  # noqa: BLE001 - any error must end the waits
            _fail_calls(calls, error, stays_stored=True)
            return
        protocol_error_counts[batch] = 0
        if results is None:
            return
        for name, each in calls.items():
            if each.reply.done():
                continue
            try:
                each.reply.set_result(self._inner.decode_batch_reply(results.get(name, results.get("")), each.request))
            except Exception as error:  # noqa: BLE001 - any error must end the wait
                _fail_calls({name: each}, error)


async def _await_reply(call: _WaitingCall) -> ModelReply:
    """Wait for the reply of *call* and return it; mark a cancellation as unsent if no submission has started."""
    try:
        return await call.reply
    except asyncio.CancelledError as stopped:
        if not (call.batch or call.is_sent):
            mark_request_unsent(stopped)
        raise


def _fail_calls(calls: Mapping[str, _WaitingCall], error: BaseException, *, stays_stored: bool = False) -> None:
    """Fail each unanswered call with a copy of *error*; with *stays_stored*, the calls stay stored for later equal calls."""
    for each in calls.values():
        if not each.reply.done():
            each.stays_stored = each.stays_stored or stays_stored
            each.reply.set_exception(_copy_error(error))


def _copy_error(error: BaseException) -> BaseException:
    """Return a copy of an error for one caller, or the error itself if its class cannot be copied."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - its class may require other arguments
        return error
    return copied if type(copied) is type(error) else error


class _SentCalls:
    """
    The calls in submitted batches, stored in a file that one process locks.

    Raises:
        DataError: when the file cannot be used.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._db = open_guarded_database(file, seconds=0, any_thread=True)
        except (OSError, sqlite3.Error) as error:
            raise self._make_file_error(error) from None
        try:
            # Locked until it is closed or the process dies.
            with self._convert_database_errors():
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
                mark_own_database(self._db)
            with self._write_transaction():
                for each in LAYOUT:
                    self._db.execute(each)
                self._db.execute("DELETE FROM calls WHERE sent < unixepoch() - ?", (FORGOTTEN,))
        except DataError:
            self._db.close()
            raise

    def _make_file_error(self, error: Exception) -> DataError:
        """Return the error for an unusable file, with a hint if another process has locked it."""
        held = "locked" in str(error)
        why = "another process uses it; give each process its own file" if held else str(error)
        return DataError(f"the batch file {str(self._file)!r} cannot be used: {why}")

    @contextlib.contextmanager
    def _convert_database_errors(self) -> Iterator[None]:
        """Raise errors of SQLite in the block as ``DataError``."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._make_file_error(error) from None

    @contextlib.contextmanager
    def _write_transaction(self) -> Iterator[None]:
        """Run the block in a transaction, which is rolled back after an error; errors of SQLite become ``DataError``."""
        with self._convert_database_errors():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def record_batch(self, batch: str, calls: Mapping[str, str]) -> None:
        """Store the ids and hashes of the *calls* of a submitted batch."""
        with self._write_transaction():
            rows = [(name, print_, batch) for name, print_ in calls.items()]
            self._db.executemany("INSERT INTO calls VALUES (?, ?, ?, unixepoch())", rows)

    def find_unclaimed_call(self, request_hash: str, is_taken: Callable[[str], bool]) -> tuple[str, str] | None:
        """Return (call id, batch id) of the first stored call with *request_hash* that is not taken; ``None`` if there is none."""
        with self._convert_database_errors():
            rows = self._db.execute("SELECT id, batch FROM calls WHERE print = ? ORDER BY sent, id", (request_hash,))
            return next(((name, batch) for name, batch in rows if not is_taken(name)), None)

    def delete_calls(self, names: Collection[str]) -> None:
        """Delete the calls with these ids from the file."""
        with self._write_transaction():
            self._db.executemany("DELETE FROM calls WHERE id = ?", [(name,) for name in names])

    def close(self) -> None:
        """Close the file, which releases its lock."""
        self._db.close()
