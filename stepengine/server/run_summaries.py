"""``RunSummaries``: the summaries of runs in a list, each from its journal."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.models import ModelReply
from stepengine.data.usage import add_cost
from stepengine.data.visible import truncate_text
from stepengine.errors import JournalError
from stepengine.journal.follower import Follower
from stepengine.journal.pending_items import find_waits
from stepengine.journal.records import ROOT, Intent, Result
from stepengine.journal.show import find_root_end
from stepengine.server.live_runs import RUNNING

if TYPE_CHECKING:
    from stepengine.data.waits import Waits
    from stepengine.journal.store import Journal
    from stepengine.server.ledger import RunRow

MAX_FOLLOWED = 200
"""How many running runs are followed at a time."""
MAX_SUMMARIES = 20_000
"""How many runs that are not running have their summaries in memory."""
MAX_WAITS = 5
MAX_OUTPUT = 500


@frozen(kw_only=True)
class RunListSummary:
    """
    The summary of a run in a list.

    Attributes:
        steps: The number of model calls, with those of children; ``None`` if it is unknown.
        cost: US dollars as text; ``None`` if a price is unknown.
        tokens: The number of input and output tokens.
        seconds: Seconds from its start to its last record.
        waits: Texts about its waits.
        wakes: When it resumes automatically, in UTC.
        doing: The kind of the newest effect that is running; ``""`` for none.
        agents: The number of agents that ran in it.
        asks: Whether it waits for a person.
        output: The start of its output, as text or JSON in one line; ``None`` before its end.
        parent: For a fork, the id of its parent.
    """

    steps: int | None = None
    cost: str | None = None
    tokens: int | None = None
    seconds: float | None = None
    waits: tuple[str, ...] = ()
    wakes: datetime | None = None
    doing: str = ""
    agents: int = 1
    asks: bool = False
    output: str | None = None
    parent: str | None = None


class RunSummaries:
    """
    The summaries of runs. Each journal is read once, and while its run is executed only its new records.

    Args:
        journal: Returns the journal of a run.
    """

    def __init__(self, journal: Callable[[str], Journal]) -> None:
        self._journal = journal
        self._followed: OrderedDict[str, tuple[_JournalSummary, asyncio.Lock]] = OrderedDict()
        self._known: OrderedDict[tuple[str, str, float], RunListSummary] = OrderedDict()

    async def load_summary(self, row: RunRow) -> RunListSummary:
        """Return the summary of a run, from memory if the run did not change; an empty one if its journal cannot be read."""
        key = (row.run, row.status, row.changed)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        try:
            found = await self._refresh_summary(row.run)
        except JournalError:
            self._followed.pop(row.run, None)
            return RunListSummary()
        if row.status not in RUNNING:
            self._known[key] = found
            self._followed.pop(row.run, None)
            remove_oldest_entries(self._known, MAX_SUMMARIES)
        return found

    async def _refresh_summary(self, run: str) -> RunListSummary:
        """Return the summary of a run after reading the new records of its journal."""
        summary, lock = self._followed.setdefault(run, (_JournalSummary(self._journal(run)), asyncio.Lock()))
        remove_oldest_entries(self._followed, MAX_FOLLOWED)
        async with lock:
            return await asyncio.to_thread(summary.refresh)


class _JournalSummary:
    """A summary of a journal that is updated from its new records."""

    def __init__(self, journal: Journal) -> None:
        self._follower = Follower(journal)
        self._reset_counts()

    def _reset_counts(self) -> None:
        """Set the counts of steps, tokens, agents and cost to the start of a journal."""
        self._steps = self._tokens = 0
        self._agents = 1
        self._cost: Decimal | None = Decimal(0)

    def refresh(self) -> RunListSummary:
        """Read the new records of the journal, and return the updated summary."""
        is_behind = True
        while is_behind:
            news = self._follower.read_new()
            is_behind = news.is_behind
            if news.again:
                self._reset_counts()
            for record in news.records:
                self._count_record(record)
        history = self._follower.history
        ended = find_root_end(history)
        waits = [] if history.is_complete else find_waits(history)
        times = [one.wakes_at for one in waits if one.wakes_at is not None]
        doing = [] if history.is_complete else list(history.open.values())[-1:]
        return RunListSummary(
            steps=self._steps,
            cost=None if self._cost is None else str(self._cost),
            tokens=self._tokens,
            seconds=history.duration_ms / 1000,
            waits=tuple([describe_wait(one) for one in waits][:MAX_WAITS]),
            wakes=min(times, default=None),
            doing="".join([f"{one.type}" for one in doing]),
            agents=self._agents,
            asks=any(one.question is not None for one in waits),
            output=None if ended is None else shorten_output(plain(ended.output)),
            parent=None if history.head is None or history.head.parent is None else history.head.parent["run"],
        )

    def _count_record(self, record: object) -> None:
        """Add a record to the counts of steps, agents, tokens and cost."""
        history = self._follower.history
        if isinstance(record, Intent):
            self._steps += record.type == "model_call"
            self._agents += record.type == "agent_call" and (record.path, record.seq) != ROOT
        elif isinstance(record, Result):
            intent = history.intents.get((record.path, record.seq))
            value = None
            if intent is not None and intent.type == "model_call":
                value = getattr(history.outcome(record), "value", None)
            if isinstance(value, ModelReply):
                self._tokens += 0 if value.usage is None else value.usage.total_tokens
                self._cost = add_cost(self._cost, value.cost)


def remove_oldest_entries(cache: OrderedDict[Any, Any], max_entries: int) -> None:
    """Remove the oldest entries of a cache until it has at most *max_entries*."""
    while len(cache) > max_entries:
        cache.popitem(last=False)


def shorten_output(output: Any) -> str | None:
    """Return the start of an output in one line, a text as it is and other values as JSON; ``None`` for ``None``."""
    # Thousands of summaries stay in memory, and an output may have megabytes.
    if output is None:
        return None
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return " ".join(truncate_text(text, MAX_OUTPUT).split())


def describe_wait(wait: Waits) -> str:
    """Return a short text about a wait: the text of the question, the topic of the message, a child, or a time."""
    if wait.question is not None:
        return wait.question.text
    if wait.kind == "message":
        return f"a message on {wait.topic}"
    return "a child" if wait.kind == "child" else "its time"
