"""
Model calls of many runs, gathered into the batches of a provider: half the price, for whoever can wait (providers PV99 to PV102).

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
from collections.abc import Collection, Mapping
from pathlib import Path

import attrs

from stepengine.data.codec import bare
from stepengine.data.json import canonical
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.errors import DataError, ModelError
from stepengine.models.base import ModelInfo, Provider, ProviderSettings

__all__ = ("Batched",)

logger = logging.getLogger("stepengine.models")

LAYOUT = "CREATE TABLE IF NOT EXISTS calls (id TEXT PRIMARY KEY, print TEXT NOT NULL, batch TEXT NOT NULL, sent REAL NOT NULL)"
FORGOTTEN = 30 * 24 * 3600
"""Seconds after which no provider holds the results of a batch any more."""


@attrs.define(eq=False)
class _Waiting:
    """A call that waits: what it asks, where its reply goes, since when, and the batch that it is in."""

    request: ModelRequest
    group: str
    reply: asyncio.Future[ModelReply]
    since: float
    batch: str = ""


class Batched(Provider):
    """
    A provider that asks another one in batches, which cost half as much and take from minutes to a day.

    Every call waits until *wait* seconds have passed since the first that is not sent yet, or *most* are there; they go out
    together, and *poll* seconds apart the provider is asked whether it is done. Nothing is streamed. A call that fails in a
    batch fails like any other, and the engine's retries ask again.

    In *file* stands which call is in which batch. A process that died waits, when its runs are resumed, for the batches that
    it had sent. A reply that was given to a run which died before recording it is asked for, and paid, again.

    Args:
        provider: What is asked: ``AnthropicProvider``, ``OpenAIProvider``, ``OpenAIChatProvider`` for OpenAI itself,
            ``GoogleProvider``, or one of yours that has ``batch_group``, ``submit_batch``, ``batch_results`` and
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
        if wait < 0 or poll <= 0 or not 1 <= most <= MOST:
            msg = f"wait={wait!r}, most={most!r}, poll={poll!r}: seconds from 0 on, 1 to {MOST:,} calls, and seconds above 0"
            raise DataError(msg)
        self.name = provider.name
        self.model_patterns = provider.model_patterns
        self.default_model = provider.default_model
        self._inner = provider
        self._file = Path(file)
        self._wait, self._most, self._poll = wait, most, poll
        self._out: _Out | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._came = asyncio.Event()

    def known_as(self, prefix: str) -> None:
        """Let the provider be known under another name, too."""
        super().known_as(prefix)
        self._inner.known_as(prefix)

    def settings(self) -> ProviderSettings:
        """Return where key and address come from."""
        return self._inner.settings()

    def check(self, model: str) -> None:
        """
        Raise what can be known to fail before any request.

        Raises:
            MissingKey: when there is no key for *model*.
            UnknownModel: when the provider knows that it has no such model.
            ModelError: when it takes no batches.
        """
        self._inner.check(model)
        self._inner.batch_group(ModelRequest(model))

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Return how many tokens the provider counts in *request*, at once."""
        return await self._inner.count_tokens(request)

    async def describe(self, model: str) -> ModelInfo | None:
        """Return what the provider states of *model*, at once."""
        return await self._inner.describe(model)

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """Upload a file, at once, and return its id."""
        return await self._inner.upload(data, mime_type=mime_type, name=name, expires_in=expires_in)

    async def delete_file(self, file_id: str) -> None:
        """Delete an uploaded file, at once."""
        await self._inner.delete_file(file_id)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request* when the batch that it is in has come back.

        Raises:
            DataError: when another process uses the file.
            ModelError: when there is no reply.
        """
        group = self._inner.batch_group(request)
        out, loop = self._opened(), asyncio.get_running_loop()
        if self._loop is not loop:
            if self._waiting:
                msg = "calls of another event loop wait in these batches; give each loop a Batched of its own"
                raise ModelError(msg, kind="settings")
            self._loop, self._work, self._came = loop, None, asyncio.Event()
        print_ = print_of(request)
        taken = {name for name, each in self._waiting.items() if not each.reply.done()}
        name, batch = out.adopted(print_, taken) or (f"call-{secrets.token_hex(8)}", "")
        waiting = self._waiting[name] = _Waiting(request, group, loop.create_future(), loop.time(), batch)
        self._came.set()
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._run(), name="stepengine batches")
        try:
            reply = await waiting.reply
        finally:
            # A call that is cancelled stays in its batch, for whoever asks the same.
            if waiting.reply.done() and not waiting.reply.cancelled():
                out.forget(name)
            if self._waiting.get(name) is waiting:
                del self._waiting[name]
        return reply

    async def close(self) -> None:
        """Wait for nothing any more, and close the provider; batches that are out stay written down."""
        if self._work is not None and self._loop is asyncio.get_running_loop():
            self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        self._work = None
        for waiting in [*self._waiting.values()]:
            waiting.reply.cancel()
        if self._out is not None:
            self._out.close()
            self._out = None
        await self._inner.close()

    def _opened(self) -> _Out:
        if self._out is None:
            self._out = _Out(self._file)
        return self._out

    # --- sending and asking -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Send what is due and fetch what is done, while anybody waits."""
        loop, asked = asyncio.get_running_loop(), dict[str, float]()
        while self._waiting:
            self._came.clear()
            for group in self._due(loop.time()):
                await self._send(group)
            now = loop.time()
            for batch in {each.batch for each in self._waiting.values() if each.batch}:
                # One that this process did not send is asked for at once.
                if now >= asked.get(batch, 0.0):
                    await self._fetch(batch)
                    asked[batch] = loop.time() + self._poll
            waiting = [*self._waiting.values()]
            times = [each.since + self._wait for each in waiting if not each.batch]
            times += [asked.get(each.batch, now + self._poll) for each in waiting if each.batch]
            if times:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(times)):
                        await self._came.wait()
                        # What comes now may wait for more; it is only looked at.
                        await asyncio.sleep(0)

    def _due(self, now: float) -> list[dict[str, _Waiting]]:
        """Return the calls that go out now, a batch each."""
        groups: dict[str, dict[str, _Waiting]] = {}
        for name, each in self._waiting.items():
            if not each.batch:
                groups.setdefault(each.group, {})[name] = each
        due: list[dict[str, _Waiting]] = []
        for calls in groups.values():
            names = [*calls]
            for start in range(0, len(names), self._most):
                part = {name: calls[name] for name in names[start : start + self._most]}
                if len(part) == self._most or min(each.since for each in part.values()) + self._wait <= now:
                    due.append(part)
        return due

    async def _send(self, calls: Mapping[str, _Waiting]) -> None:
        out = self._opened()
        try:
            batch = await self._inner.submit_batch({name: each.request for name, each in calls.items()})
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            _fail(calls, error)
            return
        out.note(batch, {name: print_of(each.request) for name, each in calls.items()})
        logger.info("%s has a batch of %d calls: %s", self.name, len(calls), batch)
        for each in calls.values():
            each.batch = batch

    async def _fetch(self, batch: str) -> None:
        calls = {name: each for name, each in self._waiting.items() if each.batch == batch}
        try:
            results = await self._inner.batch_results(batch)
        except ModelError as error:
            if error.retryable:
                # The batch is there still; the next question may reach it.
                logger.warning("%s could not be asked for the batch %s: %s", self.name, batch, error)
            else:
                _fail(calls, error)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            _fail(calls, error)
            return
        if results is None:
            return
        for name, each in calls.items():
            if each.reply.done():
                continue
            try:
                each.reply.set_result(self._inner.batch_reply(results.get(name, results.get("")), each.request))
            except ModelError as error:
                each.reply.set_exception(error)


MOST = 10_000


def print_of(request: ModelRequest) -> str:
    """Return what a request is known again by."""
    return hashlib.sha256(canonical(bare(request)).encode()).hexdigest()


def _fail(calls: Mapping[str, _Waiting], error: Exception) -> None:
    for each in calls.values():
        if not each.reply.done():
            # Each gets an error of its own: what one adds to it on its way is nothing of the others.
            each.reply.set_exception(copy.copy(error))


class _Out:
    """
    The calls that are in batches, in a file that one process holds.

    Raises:
        DataError: when the file cannot be used.
    """

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(file, isolation_level=None, timeout=0, check_same_thread=False)
            # Held until it is closed or the process dies.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(LAYOUT)
            self._db.execute("DELETE FROM calls WHERE sent < unixepoch() - ?", (FORGOTTEN,))
            self._db.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            held = "locked" in str(error)
            why = "another process uses it; give each process its own" if held else str(error)
            msg = f"the file of batches {str(file)!r} cannot be used: {why}"
            raise DataError(msg) from None

    def note(self, batch: str, calls: Mapping[str, str]) -> None:
        """Write down that these calls are in a batch, before anything else happens."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT INTO calls VALUES (?, ?, ?, unixepoch())", [(name, print_, batch) for name, print_ in calls.items()]
        )
        self._db.execute("COMMIT")

    def adopted(self, print_: str, taken: Collection[str]) -> tuple[str, str] | None:
        """Return a call of an earlier process that asked the same and that nobody waits for, with its batch."""
        rows = self._db.execute("SELECT id, batch FROM calls WHERE print = ? ORDER BY sent, id", (print_,))
        return next(((name, batch) for name, batch in rows if name not in taken), None)

    def forget(self, name: str) -> None:
        """Forget a call whose reply somebody has."""
        self._db.execute("DELETE FROM calls WHERE id = ?", (name,))

    def close(self) -> None:
        """Let the file go."""
        self._db.close()
