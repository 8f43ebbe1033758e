"""
Journals that lie where a server keeps its own and were not started by it: listed, shown, and resumed when somebody says so.

Whoever can put a journal there decides what it says was answered and what comes next. So none of them ever goes on by
itself: whoever wants to resume one is shown what would happen next, and says yes to exactly that. Permissions that it holds are asked for again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from attrs import frozen
from pydantic import Field
from starlette.responses import Response

from stepengine.data.codec import plain
from stepengine.data.visible import truncate_text
from stepengine.debugging.viewer.payload import PageTexts
from stepengine.errors import StepEngineError
from stepengine.journal.files import FileJournal
from stepengine.journal.records import format_address
from stepengine.journal.show import status_of
from stepengine.journal.sqlite import SqliteJournal
from stepengine.server.access import caller_of
from stepengine.server.bodies import Body, View, cut_page, parse_body, parse_cursor, parse_limit
from stepengine.server.openapi import HttpParameter, Operation
from stepengine.server.problems import Problem
from stepengine.server.runs import Runs

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.journal.history import History
    from stepengine.journal.store import Journal
    from stepengine.server.durable_runs import AnyRuns
    from stepengine.server.studio import RunPageData

__all__ = ("OPERATIONS", "ForeignJournals")

SUFFIX = ".jsonl"
KEPT = 2_000
MOST_PENDING = 50
MAX_DIGITS = 18


class ForeignSummary(View):
    """A journal in a list."""

    name: str
    agent: str
    status: str
    created: str
    prompt: str
    steps: int | None
    cost_usd: str | None
    error: Annotated[str, Field(description="Why it cannot be read.")]


class ForeignList(View):
    """Journals that this server did not start, newest first."""

    journals: list[ForeignSummary]
    next: Annotated[str | None, Field(description="What ?cursor= takes for those that follow.")]


class PendingEffect(View):
    """An effect that was started and has no result; a resumed run continues with it."""

    address: str
    kind: str
    name: str
    input: Any
    is_asked: Annotated[bool, Field(description="Whether somebody is asked before it happens.")]


class ForeignView(ForeignSummary):
    """A journal, its pending effects, and whether it can be resumed."""

    pending: list[PendingEffect]
    may_resume: bool
    why: Annotated[str, Field(description="Why it cannot be resumed.")]
    seen: Annotated[str, Field(description="What says which of this was seen, to go on with it.")]


class ResumeForeign(Body):
    """The approval to resume a journal as it was shown."""

    seen: Annotated[str, Field(description="What the look at it said.", max_length=100)]


class Resumed(View):
    """A run that this server resumed."""

    run_id: str
    events: str


@frozen
class _JournalFile:
    """The name of a journal and its modification time in seconds since 1970; 0 in a database."""

    name: str
    changed: float
    size: int = 0


class ForeignJournals:
    """
    The journals in the server's folder that its ledger does not list.

    Args:
        runs: The runs of the server.
    """

    def __init__(self, runs: AnyRuns) -> None:
        self._runs = runs
        self._known: OrderedDict[_JournalFile, ForeignSummary] = OrderedDict()

    def names(self) -> list[_JournalFile]:
        """Read the folder and the ledger, and return the journals that no server of this folder started, newest first."""
        if not isinstance(self._runs, Runs):
            return []
        own = {run for (run,) in self._runs.store.ledger.read("SELECT run FROM served")}
        place = self._runs.store.place
        if not place.is_dir():
            return [
                _JournalFile(run, 0.0) for run in sorted(SqliteJournal(place).runs(), reverse=True) if run not in own
            ]
        found = []
        with os.scandir(place) as entries:
            for one in entries:
                name = one.name.removesuffix(SUFFIX)
                if one.name.endswith(SUFFIX) and name and name not in own and one.is_file(follow_symlinks=False):
                    status = one.stat(follow_symlinks=False)
                    found.append(_JournalFile(name, status.st_mtime, status.st_size))
        return sorted(found, key=lambda one: (one.changed, one.name), reverse=True)

    def journal(self, name: str) -> Journal:
        """
        Return one of the journals of ``names`` by its name.

        Raises:
            Problem: when there is none of that name.
        """
        if not isinstance(self._runs, Runs) or not any(one.name == name for one in self.names()):
            msg = f"there is no journal {name[:200]!r} here that this server did not start"
            raise Problem(msg, status=404, kind="no_such_journal")
        place = self._runs.store.place
        return FileJournal(place / f"{name}{SUFFIX}") if place.is_dir() else SqliteJournal(place, name)

    def listed(self, before: tuple[float, str] | None, limit: int) -> list[tuple[_JournalFile, ForeignSummary]]:
        """Return summaries of the journals after a position, newest first; each file is read once."""
        found = [one for one in self.names() if before is None or (one.changed, one.name) < before]
        return [(one, self._summarize_cached(one)) for one in found[:limit]]

    def _summarize_cached(self, lies: _JournalFile) -> ForeignSummary:
        known = self._known.get(lies)
        if known is None or not lies.changed:
            known = self._known[lies] = _summarize_journal(self._journal(lies), lies.name)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return known

    def _journal(self, lies: _JournalFile) -> Journal:
        place: Path = self._runs.store.place  # type: ignore[union-attr]  # no names without one
        return FileJournal(place / f"{lies.name}{SUFFIX}") if place.is_dir() else SqliteJournal(place, lies.name)

    def look(self, name: str) -> ForeignView:
        """
        Return the summary of a journal, its pending effects, and whether it can be resumed.

        Raises:
            Problem: when there is none of that name.
        """
        journal = self.journal(name)
        summary = _summarize_journal(journal, name)
        pending, why = [], summary.error
        if not why:
            history = journal.history()
            pending = _list_pending_effects(history)
            why = self._find_resume_obstacle(history, summary, journal)
        told = json.dumps([name, summary.agent, [one.model_dump() for one in pending]], sort_keys=True)
        return ForeignView(
            **summary.model_dump(),
            pending=pending,
            may_resume=not why,
            why=why,
            seen=hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest(),
        )

    def _find_resume_obstacle(self, history: History, summary: ForeignSummary, journal: Journal) -> str:
        """Return why a journal cannot be resumed; ``""`` if it can be."""
        if history.is_complete:
            return "It has ended."
        if journal.is_held():
            return "Another process has it."
        if summary.agent not in self._runs.agents:
            return f"There is no agent {summary.agent!r} here."
        return ""


def _summarize_journal(journal: Journal, name: str) -> ForeignSummary:
    clean = PageTexts().clean
    told: dict[str, Any] = {"agent": "", "status": "unreadable", "created": "", "prompt": "", "error": ""}
    told |= {"steps": None, "cost_usd": None}
    try:
        history = journal.history()
        root = history.root
        told["agent"], told["status"] = str(root["agent_id"]), status_of(history)
        told["created"] = history.started
        told["prompt"] = truncate_text(str(root.get("prompt") or ""), 500)
        told["steps"] = sum(one.type == "model_call" for one in history.intents.values())
    except (StepEngineError, OSError, LookupError, TypeError, ValueError) as error:
        told["error"] = error.message if isinstance(error, StepEngineError) else type(error).__name__
    return ForeignSummary(
        **{key: clean(value) if isinstance(value, str) else value for key, value in told.items()}, name=name
    )


def _list_pending_effects(history: History) -> list[PendingEffect]:
    clean, found = PageTexts().clean, []
    for (path, seq), intent in list(history.open.items())[-MOST_PENDING:]:
        if intent.begins_run and any(other[0] == f"{path}.{seq}".removeprefix(".") for other in history.open):
            continue  # what its child does stands here itself
        form = history.form(intent)
        name = form.get("tool_name") or form.get("agent_id") or form.get("name") or form.get("model") or ""
        given = {
            k: v for k, v in plain(form).items() if k in ("input", "questions", "args", "kwargs", "prompt", "params")
        }
        found.append(
            PendingEffect(
                address=format_address(path, seq),
                kind=intent.type,
                name=str(clean(str(name))),
                input=clean(given) if given else None,
                is_asked=intent.type == "ask",
            )
        )
    return found


# --- routes -----------------------------------------------------------------------------------------------------------


def _get_foreign_journals(request: Request) -> ForeignJournals:
    found: ForeignJournals = request.app.state.foreign
    return found


async def list_foreign(request: Request) -> Response:
    limit, before = parse_limit(request), parse_cursor(request)
    found = await asyncio.to_thread(_get_foreign_journals(request).listed, before, limit + 1)
    shown, following = cut_page(found, limit, lambda one: (one[0].changed, one[0].name))
    return ForeignList(journals=[summary for _, summary in shown], next=following).response()


async def get_foreign(request: Request) -> Response:
    found = await asyncio.to_thread(_get_foreign_journals(request).look, request.path_params["journal"])
    return found.response()


async def get_foreign_page_data(request: Request) -> Response:
    name, views = request.path_params["journal"], _get_shared_page_data(request)
    journal = await asyncio.to_thread(_get_foreign_journals(request).journal, name)
    after = request.query_params.get("after")
    given = (
        int(after) if after is not None and after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS else None
    )
    # A name of its own: a run of the server may be called so from tomorrow on.
    payload = await views.get_journal_page_data(f"foreign {name}", journal, given, shown=name)
    return Response(payload, media_type="application/json")


def _get_shared_page_data(request: Request) -> RunPageData:
    found: RunPageData = request.app.state.views
    return found


async def resume_foreign(request: Request) -> Response:
    body, name = await parse_body(request, ResumeForeign), request.path_params["journal"]
    foreign, runs = _get_foreign_journals(request), request.app.state.runs
    look = await asyncio.to_thread(foreign.look, name)
    if not look.may_resume:
        raise Problem(look.why, status=409, kind="not_possible")
    if body.seen != look.seen:
        msg = "what would happen next is not what was shown; look at it again"
        raise Problem(msg, status=409, kind="changed")
    await runs.launcher.resume_foreign_journal(caller_of(request), name, look.agent, look.prompt)
    place = f"{request.scope.get('root_path', '')}/runs/{quote(name, safe='')}/events"
    return Resumed(run_id=name, events=place).response(202)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET", path="/foreign", name="list_foreign", scope="admin", handler=list_foreign, gives={200: ForeignList},
        refuses=(422,), parameters=(
            HttpParameter("cursor", "What `next` of the last answer said."),
            HttpParameter("limit", "At most so many, 1 to 100; 20 by default.", int),
        ),
        about="List the journals of the place that this server did not start.\nNone of them goes on by itself.",
    ),
    Operation(
        method="GET", path="/foreign/{journal}", name="look_at_foreign", scope="admin", handler=get_foreign,
        gives={200: ForeignView}, refuses=(404,), about="Look at such a journal, and at what would happen next.",
    ),
    Operation(
        method="GET", path="/foreign/{journal}/view", name="view_foreign", scope="admin", handler=get_foreign_page_data,
        parameters=(HttpParameter("after", "As for the view of a run.", int),), gives={200: "application/json"}, refuses=(404, 409),
        about="Give what the page of such a journal shows.",
    ),
    Operation(
        method="POST", path="/foreign/{journal}/resume", name="resume_foreign", scope="admin", handler=resume_foreign,
        body=ResumeForeign, gives={202: Resumed}, refuses=(404, 409, 429, 503),
        about=(
            "Go on with such a journal as a run of this server.\n"
            "What would happen next must be what was shown. Permissions that it holds are asked for again."
        ),
    ),
)  # fmt: skip
