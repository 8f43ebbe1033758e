"""
Model replies that are paid once: a book of the bought replies, and a provider that looks them up before it calls a model.

The book is a file. So a search for a better agent that was killed pays nothing twice, and its budget holds for all its processes
together. Replies are stored by name and request. This module knows no runs and agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import attrs

from stepengine.data.codec import from_json, to_json
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.usage import Usage
from stepengine.errors import DataError, LimitExceeded, ModelError
from stepengine.journal.fingerprints import Fingerprints
from stepengine.models import Models, Provider
from stepengine.redaction import make_redactor
from stepengine.runtime.prices import Pricing
from stepengine.runtime.sizes import estimate_request_tokens
from stepengine.workspace.file_formats import FileFormat

MAX_BOOK = 1024 * 1024 * 1024
UNBOUNDED = 64_000
"""The assumed most tokens of a reply, if neither the request nor the model has a limit."""


REPLIES_FILE = FileFormat("a reply book", re.compile(rb'\{"number":[0-9]+,'), DataError)


class ReplyBook:
    """
    All replies bought from one budget, in an append-only file.

    A call is recorded before it starts, with its highest possible cost, and again when it has ended. An interrupted call counts
    as that cost. Calls run concurrently while their highest costs fit in the budget together. A call that may not fit runs alone,
    and only while something is left. So the budget is never exceeded by more than one call.

    Args:
        file: The file; its folder exists.
        budget: US dollars.

    Raises:
        DataError: when the file holds something else.
    """

    def __init__(self, file: Path, budget: Decimal) -> None:
        self.budget = budget
        self._prints = Fingerprints(make_redactor("known", os.environ))
        self._paid: dict[str, Decimal] = {}
        self._replies: dict[str, dict[str, list[ModelReply]]] = {}
        self._open: dict[int, Decimal] = {}
        self._number = 0
        self._is_alone = False
        self._settled = asyncio.Event()
        self._load_and_repair_file(file)
        self._cut = sum(self._open.values(), Decimal(0))
        self._open.clear()
        self._file = file.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def spent(self) -> Decimal:
        """The amount paid so far, including interrupted calls."""
        return sum(self._paid.values(), self._cut)

    def get_amount_paid(self, page: str) -> Decimal:
        """Return the amount paid for the replies of a page."""
        return self._paid.get(page, Decimal(0))

    def make_request_key(self, request: ModelRequest) -> str:
        """Return the key of a request, by which its replies are found again."""
        return self._prints.for_request(request)

    def replies_by_request_key(self, page: str) -> dict[str, deque[ModelReply]]:
        """Return the replies of a page, by the key of their request, in order."""
        return {key: deque(several) for key, several in self._replies.get(page, {}).items()}

    def record_reused_reply(self, page: str, key: str, reply: ModelReply) -> None:
        """Record on a page a reply that was bought for another page."""
        self._record_purchase_and_wake(0, page, key, reply, Decimal(0))

    async def call_within_budget(
        self,
        page: str,
        key: str,
        call: Callable[[], Awaitable[ModelReply]],
        *,
        max_cost: Decimal | None,
        price: Callable[[Usage], Decimal | None],
    ) -> ModelReply:
        """
        Make a model call within the budget, and record its reply and price on a page; recorded replies are not looked up.

        Args:
            page: The name.
            key: The key of the request.
            call: Makes the call; the reply has its cost.
            max_cost: The highest possible cost; ``None`` if it is unknown, so that the call runs alone.
            price: Returns the cost of a failed call by its usage.

        Raises:
            LimitExceeded: when the budget is spent.
            ModelError: the error of the call.
        """
        number = await self._wait_and_record_call_start(max_cost)
        reply, paid = None, max_cost or Decimal(0)
        try:
            reply = await call()
            paid = paid if reply.cost is None else reply.cost
        except ModelError as error:
            paid = (None if error.usage is None else price(error.usage)) or Decimal(0)
            raise
        finally:
            self._record_purchase_and_wake(number, page, key, reply, paid)
        return reply

    async def _wait_and_record_call_start(self, max_cost: Decimal | None) -> int:
        """Wait until the budget allows another call, record its start, and return its number; raise if the budget is spent."""
        while True:
            left = self.budget - self.spent - sum(self._open.values())
            if max_cost is not None and max_cost <= left and not self._is_alone:
                break
            if not self._open:
                if left <= 0:
                    msg = f"the budget of {self.budget} US dollars is spent"
                    raise LimitExceeded(msg, kind="cost", limit=float(self.budget))
                self._is_alone = True
                break
            await self._settled.wait()
        self._number += 1
        self._open[self._number] = max_cost or Decimal(0)
        self._append_line({"number": self._number, "most": str(max_cost or 0)})
        return self._number

    def _record_purchase_and_wake(
        self, number: int, page: str, key: str, reply: ModelReply | None, paid: Decimal
    ) -> None:
        """Append the end of a call to the file, free its part of the budget, and wake waiting calls."""
        line: dict[str, object] = {"name": page, "key": key, "paid": str(paid)}
        self._append_line({"number": number, **line, "reply": None if reply is None else to_json(reply)})
        self._add_purchase_in_memory(page, key, reply, paid)
        if self._open.pop(number, None) is not None:
            self._is_alone = False
        # Wakes those that wait now; later ones wait for the next call.
        self._settled.set()
        self._settled.clear()

    def _add_purchase_in_memory(self, page: str, key: str, reply: ModelReply | None, paid: Decimal) -> None:
        """Add the price and the reply of a call to a page, in memory."""
        self._paid[page] = self.get_amount_paid(page) + paid
        if reply is not None:
            self._replies.setdefault(page, {}).setdefault(key, []).append(reply)

    # --- its file -----------------------------------------------------------------------------------------------------

    def _append_line(self, line: Mapping[str, object]) -> None:
        """Append a line to the file, with known secrets redacted, and flush it."""
        text = json.dumps(self._prints.redactor.value(line), ensure_ascii=False, separators=(",", ":"))
        self._file.write(f"{text}\n".encode())
        self._file.flush()

    def _load_and_repair_file(self, file: Path) -> None:
        """Load the purchases in the file, and remove an incomplete last line of a crash from the file."""
        if not file.is_file():
            return
        REPLIES_FILE.check(file)
        if file.stat().st_size > MAX_BOOK:
            msg = f"{file} is larger than {MAX_BOOK} bytes"
            raise DataError(msg)
        data = file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(file, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._load_line(json.loads(line))
            except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError, DataError) as error:
                msg = f"{file}, line {number}, is not a line of a reply book: {error}"
                raise DataError(msg) from None

    def _load_line(self, line: Mapping[str, Any]) -> None:
        """Load one line of the file: the start of a call with its highest cost, or its end with reply and price."""
        number = int(line["number"])
        self._number = max(self._number, number)
        if "most" in line:
            self._open[number] = Decimal(line["most"])
            return
        self._open.pop(number, None)
        reply = None if line["reply"] is None else from_json(line["reply"])
        self._add_purchase_in_memory(str(line["name"]), str(line["key"]), reply, Decimal(line["paid"]))


class CachingProvider(Provider):
    """
    A provider that returns the replies of a book, and calls the models for missing ones within the budget.

    Args:
        book: The book.
        name: The name under which the replies are stored.
        models: The models that are called for missing replies.
        pricing: The prices of models.
        before: Other names whose replies answer equal requests, so that requests without a change cost nothing.
        may_be_unpriced: Whether models without a price may be called, such as scripted ones, whose replies contain their cost.

    Attributes:
        served: The number of replies from the book.
        bought: The number of bought replies.
        refused: The error of the last call that the budget did not allow; ``None`` if there was none.
    """

    name = "bought"

    def __init__(
        self,
        book: ReplyBook,
        name: str,
        models: Models,
        pricing: Pricing,
        *,
        before: Iterable[str] = (),
        may_be_unpriced: bool = False,
    ) -> None:
        self.served = self.bought = 0
        self.refused: LimitExceeded | None = None
        self._book = book
        self._name = name
        self._models = models
        self._pricing = pricing
        self._is_free = may_be_unpriced
        self._own = book.replies_by_request_key(name)
        self._others = [book.replies_by_request_key(other) for other in before]

    def supports_model(self, model: str) -> bool:
        """Return True: every model is served."""
        return True

    def check(self, model: str) -> None:
        """Check a model with the real providers, and raise their errors."""
        self._models.check(model)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the recorded reply to a request, or call the model within the budget.

        Raises:
            LimitExceeded: when the reply is not in the book, and the budget is spent or the price is unknown.
            ModelError: the error of the model.
        """
        key = self._book.make_request_key(request)
        if known := self._own.get(key):
            self.served += 1
            return known.popleft()
        for other in self._others:
            if known := other.get(key):
                self.served += 1
                self._book.record_reused_reply(self._name, key, known[0])
                return known.popleft()
        return await self._call_within_budget(request, key)

    async def _call_within_budget(self, request: ModelRequest, key: str) -> ModelReply:
        """Call the model within the budget; store and raise the error if the budget is spent or the price is unknown."""
        model = request.model
        output = self._models.output_limit(request) or UNBOUNDED
        most = self._compute_price(model, Usage(input_tokens=estimate_request_tokens(request), output_tokens=output))
        try:
            if most is None and not self._is_free:
                msg = f"the price of {model!r} is unknown, so a budget cannot be enforced; pass it with pricing= or --price"
                raise LimitExceeded(msg, kind="unpriced_model", limit=float(self._book.budget))  # noqa: TRY301
            # A scripted model states the cost of a reply itself.
            most = None if self._is_free else most
            reply = await self._book.call_within_budget(
                self._name,
                key,
                lambda: self._call_real_provider(request),
                max_cost=most,
                price=lambda usage: self._compute_price(model, usage),
            )
        except LimitExceeded as error:
            self.refused = error
            raise
        self.bought += 1
        return reply

    async def _call_real_provider(self, request: ModelRequest) -> ModelReply:
        """Call the real provider, and return its reply with a cost, if its price is known."""
        reply = await self._models.provider_for(request.model).complete(request)
        if reply.cost is not None or reply.usage is None:
            return reply
        whole = getattr(self._pricing, "price_reply", None)
        now = datetime.now(UTC)
        cost = (
            whole(request.model, reply, now)
            if whole is not None
            else self._compute_price(reply.model or request.model, reply.usage)
        )
        return attrs.evolve(reply, cost=cost)

    def _compute_price(self, model: str, usage: Usage) -> Decimal | None:
        """Return the price of usage now; ``None`` if it is unknown."""
        return self._pricing(model, usage, datetime.now(UTC))
