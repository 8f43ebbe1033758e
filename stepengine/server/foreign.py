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

from attrs import frozen
from pydantic import Field
from starlette.responses import Response

from stepengine.data.codec import plain
from stepengine.debugging.viewing.payload import Texts
from stepengine.errors import StepEngineError
from stepengine.journal.files import FileJournal
from stepengine.journal.records import shown_address
from stepengine.journal.show import status_of
from stepengine.journal.sqlite import SqliteJournal
from stepengine.server.access import caller_of
from stepengine.server.bodies import Body, View, body_of, limit_of, page_of, place_of
from stepengine.server.openapi import HttpParameter, Operation
from stepengine.server.problems import Problem
from stepengine.server.runs import Runs

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.journal.history import History
    from stepengine.journal.store import Journal
    from stepengine.server.durable_runs import AnyRuns
    from stepengine.server.studio import Views

__all__ = ("OPERATIONS", "Foreign")

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
    """Something that was begun and has no result: what happens when the run goes on."""

    address: str
    kind: str
    name: str
    input: Any
    is_asked: Annotated[bool, Field(description="Whether somebody is asked before it happens.")]


class ForeignView(ForeignSummary):
    """A journal, and what would happen next."""

    pending: list[PendingEffect]
    may_resume: bool
    why: Annotated[str, Field(description="Why it cannot be resumed.")]
    seen: Annotated[str, Field(description="What says which of this was seen, to go on with it.")]


class ResumeForeign(Body):
    """A yes to what was shown."""

    seen: Annotated[str, Field(description="What the look at it said.", max_length=100)]


class Resumed(View):
    """A run that this server has now."""

    run_id: str
    events: str


@frozen
class _Lies:
    """Where a journal lies: its name, and when it was changed, in seconds since 1970 (0 for one of a database)."""

    name: str
    changed: float
    size: int = 0


class Foreign:
    """
    The journals of a place that its ledger does not know.

    Args:
        runs: The runs of the server.
    """

    def __init__(self, runs: AnyRuns) -> None:
        self._runs = runs
        self._known: OrderedDict[_Lies, ForeignSummary] = OrderedDict()

    def names(self) -> list[_Lies]:
        """Return where they lie, newest first; reads the folder and the ledger."""
        if not isinstance(self._runs, Runs):
            return []
        own = {run for (run,) in self._runs.ledger.read("SELECT run FROM served")}
        place = self._runs.place
        if not place.is_dir():
            return [_Lies(run, 0.0) for run in sorted(SqliteJournal(place).runs(), reverse=True) if run not in own]
        found = []
        with os.scandir(place) as entries:
            for one in entries:
                name = one.name.removesuffix(SUFFIX)
                if one.name.endswith(SUFFIX) and name and name not in own and one.is_file(follow_symlinks=False):
                    status = one.stat(follow_symlinks=False)
                    found.append(_Lies(name, status.st_mtime, status.st_size))
        return sorted(found, key=lambda one: (one.changed, one.name), reverse=True)

    def journal(self, name: str) -> Journal:
        """
        Return one of them.

        Raises:
            Problem: when there is none of that name.
        """
        if not isinstance(self._runs, Runs) or not any(one.name == name for one in self.names()):
            msg = f"there is no journal {name[:200]!r} here that this server did not start"
            raise Problem(msg, status=404, kind="no_such_journal")
        place = self._runs.place
        return FileJournal(place / f"{name}{SUFFIX}") if place.is_dir() else SqliteJournal(place, name)

    def listed(self, before: tuple[float, str] | None, limit: int) -> list[tuple[_Lies, ForeignSummary]]:
        """Return them, newest first, that come behind a place; of each its file is read once."""
        found = [one for one in self.names() if before is None or (one.changed, one.name) < before]
        return [(one, self._summary(one)) for one in found[:limit]]

    def _summary(self, lies: _Lies) -> ForeignSummary:
        known = self._known.get(lies)
        if known is None or not lies.changed:
            known = self._known[lies] = _summary_of(self._journal(lies), lies.name)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return known

    def _journal(self, lies: _Lies) -> Journal:
        place: Path = self._runs.place  # type: ignore[union-attr]  # no names without one
        return FileJournal(place / f"{lies.name}{SUFFIX}") if place.is_dir() else SqliteJournal(place, lies.name)

    def look(self, name: str) -> ForeignView:
        """
        Return what one holds, and what would happen next.

        Raises:
            Problem: when there is none of that name.
        """
        journal = self.journal(name)
        summary = _summary_of(journal, name)
        pending, why = [], summary.error
        if not why:
            history = journal.history()
            pending = _pending(history)
            why = self._hindrance(history, summary, journal)
        told = json.dumps([name, summary.agent, [one.model_dump() for one in pending]], sort_keys=True)
        return ForeignView(
            **summary.model_dump(),
            pending=pending,
            may_resume=not why,
            why=why,
            seen=hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest(),
        )

    def _hindrance(self, history: History, summary: ForeignSummary, journal: Journal) -> str:
        if history.is_complete:
            return "It has ended."
        if journal.is_held():
            return "Another process has it."
        if summary.agent not in self._runs.agents:
            return f"There is no agent {summary.agent!r} here."
        return ""


def _summary_of(journal: Journal, name: str) -> ForeignSummary:
    clean = Texts().clean
    told: dict[str, Any] = {"agent": "", "status": "unreadable", "created": "", "prompt": "", "error": ""}
    told |= {"steps": None, "cost_usd": None}
    try:
        history = journal.history()
        root, head = history.root, history.head
        told["agent"], told["status"] = str(root["agent_id"]), status_of(history)
        told["created"] = "" if head is None else head.created
        told["prompt"] = str(root.get("prompt") or "")[:500]
        told["steps"] = sum(one.type == "model_call" for one in history.intents.values())
    except (StepEngineError, OSError, LookupError, TypeError, ValueError) as error:
        told["error"] = error.message if isinstance(error, StepEngineError) else type(error).__name__
    return ForeignSummary(
        **{key: clean(value) if isinstance(value, str) else value for key, value in told.items()}, name=name
    )


def _pending(history: History) -> list[PendingEffect]:
    clean, found = Texts().clean, []
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
                address=shown_address(path, seq),
                kind=intent.type,
                name=str(clean(str(name))),
                input=clean(given) if given else None,
                is_asked=intent.type == "ask",
            )
        )
    return found


# --- routes -----------------------------------------------------------------------------------------------------------


def _foreign(request: Request) -> Foreign:
    found: Foreign = request.app.state.foreign
    return found


async def list_foreign(request: Request) -> Response:
    limit, before = limit_of(request), place_of(request)
    found = await asyncio.to_thread(_foreign(request).listed, before, limit + 1)
    shown, following = page_of(found, limit, lambda one: (one[0].changed, one[0].name))
    return ForeignList(journals=[summary for _, summary in shown], next=following).response()


async def look_at_foreign(request: Request) -> Response:
    found = await asyncio.to_thread(_foreign(request).look, request.path_params["journal"])
    return found.response()


async def view_foreign(request: Request) -> Response:
    name, views = request.path_params["journal"], _views(request)
    journal = await asyncio.to_thread(_foreign(request).journal, name)
    after = request.query_params.get("after")
    given = (
        int(after) if after is not None and after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS else None
    )
    # A name of its own: a run of the server may be called so from tomorrow on.
    payload = await views.followed(f"foreign {name}", journal, given, shown=name)
    return Response(payload, media_type="application/json")


def _views(request: Request) -> Views:
    found: Views = request.app.state.views
    return found


async def resume_foreign(request: Request) -> Response:
    body, name = await body_of(request, ResumeForeign), request.path_params["journal"]
    foreign, runs = _foreign(request), request.app.state.runs
    look = await asyncio.to_thread(foreign.look, name)
    if not look.may_resume:
        raise Problem(look.why, status=409, kind="not_possible")
    if body.seen != look.seen:
        msg = "what would happen next is not what was shown; look at it again"
        raise Problem(msg, status=409, kind="changed")
    await runs.adopt(caller_of(request), name, look.agent, look.prompt)
    place = f"{request.scope.get('root_path', '')}/runs/{name}/events"
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
        method="GET", path="/foreign/{journal}", name="look_at_foreign", scope="admin", handler=look_at_foreign,
        gives={200: ForeignView}, refuses=(404,), about="Look at such a journal, and at what would happen next.",
    ),
    Operation(
        method="GET", path="/foreign/{journal}/view", name="view_foreign", scope="admin", handler=view_foreign,
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
