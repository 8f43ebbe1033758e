"""
Model calls of many runs, gathered into the batches of a provider: half the price, for whoever can wait.

``Batched`` is a provider around another one. A call waits in it until a batch goes out and comes back. Which batches are
out stands in a file, so that a run that is resumed after a crash waits for the batch that it began and does not pay again.
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

from stepengine.data.codec import bare
from stepengine.data.json import canonical
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.errors import DataError, MissingKey, ModelError
from stepengine.models._stopped_usage import mark_unsent
from stepengine.models.base import BatchMember, ModelInfo, Provider, ProviderSettings
from stepengine.workspace.after_fork import keep_referenced, register_renewable
from stepengine.workspace.file_formats import check_own_database, mark_own_database

logger = logging.getLogger("stepengine.models")

LAYOUT = (
    "CREATE TABLE IF NOT EXISTS calls (id TEXT PRIMARY KEY, print TEXT NOT NULL, batch TEXT NOT NULL, sent REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS prints ON calls (print)",
)
FORGOTTEN = 30 * 24 * 3600
"""Seconds after which no provider holds the results of a batch any more."""
MAX_CALLS = 10_000
"""Within what each provider documents for a batch; a larger one takes longer to come back."""
MOST_BYTES = 16_000_000
"""Of the requests of one batch: the smallest limit is Gemini's, 20 MB."""
UNREAD = 10
"""How often what is said of a batch may break the protocol until those who wait for it are told."""
NOT_LET_IN = frozenset({401, 403})


@attrs.define(eq=False)
class _WaitingCall:
    """
    A call that waits for the reply from its batch.

    It is what is asked, how it stands in a batch until it is in one, what it is known again by, its size, where its reply goes,
    since when, and the batch that it is in.
    """

    request: ModelRequest
    member: BatchMember | None
    print: str
    size: int
    reply: asyncio.Future[ModelReply]
    since: float
    batch: str = ""
    stays: bool = False
    """Whether it stays written down although it failed: its reply may be there for who asks again."""


class Batched(Provider):
    """
    A provider that asks another one in batches, which cost half as much and take from minutes to a day.

    Every call waits until *wait* seconds have passed since the first that is not sent yet, or *most* are there, or 16 MB of
    requests; they go out together, and *poll* seconds apart the provider is asked whether it is done. Nothing is streamed. A
    call that fails in a batch fails like any other, and the engine's retries ask again.

    In *file* stands which call is in which batch. A process that died waits, when its runs are resumed, for the batches that
    it had sent. A reply that was given to a run which died before recording it is asked for, and paid, again.

    Args:
        provider: What is asked: ``AnthropicProvider``, ``OpenAIProvider``, ``OpenAIChatProvider`` for OpenAI itself,
            ``GoogleProvider``, or one of yours that has ``batch_member``, ``submit_batch``, ``batch_results`` and
            ``batch_reply``.
        file: Where batches that are out are written down; used by one process at a time.
        wait: Seconds that a call waits for others.
        most: Calls of one batch, 1 to 10,000.
        poll: Seconds between two questions whether a batch is done.

    Raises:
        DataError: for numbers that cannot be.
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
            msg = f"wait={wait!r}, most={most!r}, poll={poll!r}: seconds from 0 on, 1 to {MAX_CALLS:,} calls, and seconds above 0"
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        register_renewable(self)

    def renew(self) -> None:
        """Drop the calls and the file of the parent in a forked child, which opens the file itself."""
        keep_referenced(self._out, self._work, self._sending, self._waiting)
        self._out = self._loop = self._work = self._sending = None
        self._waiting, self._over = {}, set()

    def add_prefix(self, prefix: str) -> None:
        """Let ``strip_prefix`` strip *prefix* too, as in ``Provider``."""
        super().add_prefix(prefix)
        self._inner.add_prefix(prefix)

    def settings(self) -> ProviderSettings:
        """Return the provider's sources of key and address."""
        return self._inner.settings()

    def get_account(self) -> str:
        """Return the account of the provider, by which processes share limits."""
        return self._inner.get_account()

    def check(self, model: str) -> None:
        """
        Raise what can be known to fail before any request.

        Raises:
            MissingKey: when there is no key for *model*.
            UnknownModel: when the provider knows that it has no such model.
            ModelError: when it takes no batches.
        """
        self._inner.check(model)
        self._inner.batch_member(ModelRequest(model))

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Query the provider for the number of tokens in *request*, without a batch."""
        return await self._inner.count_tokens(request)

    async def describe(self, model: str) -> ModelInfo | None:
        """Query the provider for the limits and options of *model*, without a batch."""
        return await self._inner.describe(model)

    def output_limit(self, request: ModelRequest) -> int | None:
        """Return the output limit in tokens that the provider sends with *request* if it names none."""
        return self._inner.output_limit(request)

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """Upload a file without a batch, and return its id."""
        return await self._inner.upload(data, mime_type=mime_type, name=name, expires_in=expires_in)

    async def delete_file(self, file_id: str) -> None:
        """Delete an uploaded file without a batch."""
        await self._inner.delete_file(file_id)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request* when the batch that it is in has come back.

        Raises:
            DataError: when another process uses the file.
            ModelError: when there is no reply.
        """
        member = self._inner.batch_member(request)
        out, loop = self._open_sent_calls(), asyncio.get_running_loop()
        if self._loop is not loop:
            if self._waiting and self._loop is not None and not self._loop.is_closed():
                msg = "calls of another event loop wait in these batches; give each loop a Batched of its own"
                raise ModelError(msg, kind="settings")
            # What the other loop still does has nothing to do with these calls.
            self._delete_finished()
            self._loop, self._work, self._sending = loop, None, None
            self._waiting, self._came = {}, asyncio.Event()
        calls, text = self._waiting, canonical(bare(request)).encode()
        print_ = hashlib.sha256(text).hexdigest()
        name, batch = out.find_unclaimed_call(
            print_, lambda known: known in self._over or _is_awaited(calls.get(known))
        ) or (
            f"call-{secrets.token_hex(8)}",
            "",
        )
        waiting = _WaitingCall(
            request, None if batch else member, print_, len(text), loop.create_future(), loop.time(), batch
        )
        calls[name] = waiting
        self._came.set()
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._run(calls, self._came), name="stepengine batches")
        is_over = False
        try:
            reply = await _await_reply(waiting)
            is_over = True
        except Exception:
            is_over = not waiting.stays
            raise
        finally:
            # A call that is cancelled stays in its batch, for whoever asks the same.
            if is_over:
                if not self._over:
                    # Those whose replies came together are forgotten in one write.
                    loop.call_soon(self._delete_finished)
                self._over.add(name)
            if calls.get(name) is waiting:
                del calls[name]
        return reply

    async def close(self) -> None:
        """
        Fail the waiting calls, wait for a batch that is being sent, and close the provider.

        Batches that are out stay written down, and calls that wait for them fail.
        """
        here, there = asyncio.get_running_loop(), self._loop
        if there is here:
            await self._stop()
        elif there is not None and there.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._stop(), there))
        self._delete_finished()
        self._loop, self._waiting = None, {}
        if self._out is not None:
            self._out.close()
            self._out = None
        await self._inner.close()

    async def _stop(self) -> None:
        work, sending, self._work, self._sending = self._work, self._sending, None, None
        if work is not None:
            work.cancel()
            await asyncio.wait([work])
        if sending is not None:
            # Cut off, it might be paid for and nowhere written down.
            await asyncio.wait([sending])
        closed = ModelError("the provider was closed while the call waited for its batch", kind="closed")
        _fail_calls(self._waiting, closed, stay=True)

    def _delete_finished(self) -> None:
        over, self._over = self._over, set[str]()
        try:
            if self._out is not None and over:
                self._out.delete(over)
        except DataError as error:
            logger.warning("%d calls that have their replies stay written down: %s", len(over), error)

    def _open_sent_calls(self) -> _SentCalls:
        if self._out is None:
            self._out = _SentCalls(self._file)
        return self._out

    # --- sending and asking -------------------------------------------------------------------------------------------

    async def _run(self, waiting: Mapping[str, _WaitingCall], came: asyncio.Event) -> None:
        """Send due batches and fetch finished ones while calls wait; an error fails them all."""
        try:
            await self._serve(waiting, came)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for ever
            _fail_calls(waiting, error, stay=True)

    async def _serve(self, waiting: Mapping[str, _WaitingCall], came: asyncio.Event) -> None:
        loop, asked, unread = asyncio.get_running_loop(), dict[str, float](), Counter[str]()
        while waiting:
            came.clear()
            for calls in self._collect_due_batches(waiting, loop.time()):
                await self._send(calls)
            now = loop.time()
            for batch in {each.batch for each in waiting.values() if each.batch}:
                # One that this process did not send is asked for at once.
                if now >= asked.get(batch, 0.0):
                    await self._fetch_results(batch, waiting, unread)
                    asked[batch] = loop.time() + self._poll
            open_ = [each for each in waiting.values() if not each.reply.done()]
            times = [each.since + self._wait for each in open_ if not each.batch]
            times += [asked.get(each.batch, now + self._poll) for each in open_ if each.batch]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(times, default=loop.time())):
                    await came.wait()
                    # What comes now may wait for more; it is only looked at.
                    await asyncio.sleep(0)

    def _collect_due_batches(self, waiting: Mapping[str, _WaitingCall], now: float) -> list[dict[str, _WaitingCall]]:
        """Return the calls of each batch to send now."""
        groups: dict[str, dict[str, _WaitingCall]] = {}
        for name, each in waiting.items():
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

    async def _send(self, calls: Mapping[str, _WaitingCall]) -> None:
        # While the batch before was sent, some may have been given up.
        calls = {name: each for name, each in calls.items() if not each.reply.done()}
        if calls:
            self._sending = asyncio.get_running_loop().create_task(self._submit_batch(calls), name="stepengine batch")
            await asyncio.shield(self._sending)

    async def _submit_batch(self, calls: Mapping[str, _WaitingCall]) -> None:
        try:
            members = {name: each.member for name, each in calls.items() if each.member is not None}
            batch = await self._inner.submit_batch(members)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            _fail_calls(calls, error)
            return
        for each in calls.values():
            # What was sent would take its room for as long as the batch takes.
            each.batch, each.member = batch, None
        logger.info("%s has a batch of %d calls: %s", self.name, len(calls), batch)
        try:
            self._open_sent_calls().record_batch(batch, {name: each.print for name, each in calls.items()})
        except DataError as error:
            # It is out and paid for; only another process would not know it again.
            logger.warning("the batch %s is not written down: %s", batch, error)

    async def _fetch_results(self, batch: str, waiting: Mapping[str, _WaitingCall], unread: Counter[str]) -> None:
        calls = {name: each for name, each in waiting.items() if each.batch == batch}
        try:
            results = await self._inner.batch_results(batch)
        except ModelError as error:
            unread[batch] += error.kind == "protocol"
            if error.retryable and unread[batch] < UNREAD:
                # The batch is there still; the next question may reach it.
                logger.warning("%s could not be asked for the batch %s: %s", self.name, batch, error)
                return
            # A client that is refused, or cannot read what is there, learns nothing of the batch.
            shut_out = isinstance(error, MissingKey) or error.kind == "auth" or error.status in NOT_LET_IN
            not_known = shut_out or unread[batch] > 0
            _fail_calls(calls, error, stay=not_known)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            _fail_calls(calls, error, stay=True)
            return
        unread[batch] = 0
        if results is None:
            return
        for name, each in calls.items():
            if each.reply.done():
                continue
            try:
                each.reply.set_result(self._inner.batch_reply(results.get(name, results.get("")), each.request))
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits is told
                _fail_calls({name: each}, error)


async def _await_reply(call: _WaitingCall) -> ModelReply:
    try:
        return await call.reply
    except asyncio.CancelledError as stopped:
        if not call.batch:
            mark_unsent(stopped)
        raise


def _is_awaited(call: _WaitingCall | None) -> bool:
    """Return whether a caller waits for a call or is about to receive its reply."""
    return call is not None and not call.reply.cancelled()


def _fail_calls(calls: Mapping[str, _WaitingCall], error: Exception, *, stay: bool = False) -> None:
    for each in calls.values():
        if not each.reply.done():
            each.stays = each.stays or stay
            each.reply.set_exception(_copy_error(error))


def _copy_error(error: Exception) -> Exception:
    """Return a copy of an error for one caller, or the error itself if its class cannot be copied."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - what it takes to make one is for its class to say
        return error
    return copied if type(copied) is type(error) else error


class _SentCalls:
    """
    The calls that are in batches, in a file that one process holds.

    Raises:
        DataError: when the file cannot be used.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            check_own_database(file)
            self._db = sqlite3.connect(file, isolation_level=None, timeout=0, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._make_file_error(error) from None
        try:
            # Held until it is closed or the process dies.
            with self._convert_errors():
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
                mark_own_database(self._db)
            with self._writing():
                for each in LAYOUT:
                    self._db.execute(each)
                self._db.execute("DELETE FROM calls WHERE sent < unixepoch() - ?", (FORGOTTEN,))
        except DataError:
            self._db.close()
            raise

    def _make_file_error(self, error: Exception) -> DataError:
        held = "locked" in str(error)
        why = "another process uses it; give each process its own" if held else str(error)
        return DataError(f"the file of batches {str(self._file)!r} cannot be used: {why}")

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._make_file_error(error) from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._convert_errors():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def record_batch(self, batch: str, calls: Mapping[str, str]) -> None:
        """Store durably that these calls are in a batch."""
        with self._writing():
            rows = [(name, print_, batch) for name, print_ in calls.items()]
            self._db.executemany("INSERT INTO calls VALUES (?, ?, ?, unixepoch())", rows)

    def find_unclaimed_call(self, print_: str, is_taken: Callable[[str], bool]) -> tuple[str, str] | None:
        """Return the id and batch of an equal call that no caller waits for, or ``None``."""
        with self._convert_errors():
            rows = self._db.execute("SELECT id, batch FROM calls WHERE print = ? ORDER BY sent, id", (print_,))
            return next(((name, batch) for name, batch in rows if not is_taken(name)), None)

    def delete(self, names: Collection[str]) -> None:
        """Delete calls whose replies were received."""
        with self._writing():
            self._db.executemany("DELETE FROM calls WHERE id = ?", [(name,) for name in names])

    def close(self) -> None:
        """Close the file, which releases its lock."""
        self._db.close()
