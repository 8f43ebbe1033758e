"""
Third-party journals: those in a server's store that it did not start. They are listed, shown, and resumed on request.

A user who can write such a journal decides its recorded answers and its next effects. So no journal is resumed automatically. A caller
who wants to resume one sees the next effects and approves exactly these. Permissions in the journal are asked for again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from pydantic import Field
from starlette.responses import Response

from stepengine.data.codec import plain
from stepengine.data.visible import truncate_text
from stepengine.debugging.viewer.payload import PageTexts
from stepengine.errors import StepEngineError
from stepengine.journal.records import format_address
from stepengine.journal.show import get_run_status
from stepengine.server.access import require_caller
from stepengine.server.bodies import Body, View, cut_page, parse_body, parse_cursor, parse_limit
from stepengine.server.openapi import HttpParameter, Operation
from stepengine.server.problems import Problem
from stepengine.server.run_summaries import remove_oldest_entries

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.journal.history import History
    from stepengine.journal.store import Journal
    from stepengine.server.foreign_runs import ForeignFile, ForeignRuns
    from stepengine.server.run_service import RunService
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
    error: Annotated[str, Field(description="Why the journal cannot be read.")]


class ForeignList(View):
    """Journals that this server did not start, newest first."""

    journals: list[ForeignSummary]
    next: Annotated[str | None, Field(description="The `cursor` of the next page.")]


class PendingEffect(View):
    """An effect that was started and has no result; a resumed run continues with it."""

    address: str
    kind: str
    name: str
    input: Any
    is_asked: Annotated[bool, Field(description="Whether a person is asked before it happens.")]


class ForeignView(ForeignSummary):
    """A journal, its pending effects, and whether it can be resumed."""

    pending: list[PendingEffect]
    may_resume: bool
    why: Annotated[str, Field(description="Why it cannot be resumed.")]
    seen: Annotated[str, Field(description="A hash of this state; send it to resume the journal.")]


class ResumeForeign(Body):
    """The approval to resume a journal as it was shown."""

    seen: Annotated[str, Field(description="The `seen` value of the journal when it was shown.", max_length=100)]


class Resumed(View):
    """A run that this server resumed."""

    run_id: str
    events: str


class ForeignJournals:
    """
    The journals in the server's folder that its ledger does not list.

    Args:
        runs: The runs of the server.
        foreign: The journals.

    Attributes:
        foreign: The journals.
    """

    def __init__(self, runs: RunService, foreign: ForeignRuns) -> None:
        self.foreign = foreign
        self._runs = runs
        self._known: OrderedDict[ForeignFile, ForeignSummary] = OrderedDict()

    def require_journal(self, name: str) -> Journal:
        """
        Return a third-party journal by its name; raise ``Problem`` 404 if there is no such journal.

        Raises:
            Problem: 404 if there is no such journal.
        """
        if not any(one.name == name for one in self.foreign.list_journals()):
            raise _make_missing_journal_problem(name)
        return self.foreign.journal(name)

    def list_summaries(self, before: tuple[float, str] | None, limit: int) -> list[tuple[ForeignFile, ForeignSummary]]:
        """Return summaries of the journals after a position, newest first; each file is read once."""
        found = [one for one in self.foreign.list_journals() if before is None or (one.changed, one.name) < before]
        return [(one, self._get_or_load_summary(one)) for one in found[:limit]]

    def _get_or_load_summary(self, file: ForeignFile) -> ForeignSummary:
        """Return the summary of a journal file from memory; read a file that is new or has changed."""
        known = self._known.get(file)
        if known is None or not file.changed:
            known = self._known[file] = _summarize_journal(self.foreign.journal(file.name), file.name)
            remove_oldest_entries(self._known, KEPT)
        return known

    def inspect(self, name: str) -> ForeignView:
        """
        Return the summary of a journal, its pending effects, and whether it can be resumed.

        Raises:
            Problem: 404 if there is no such journal.
        """
        journal = self.require_journal(name)
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
            return "Its run has ended."
        if journal.is_held():
            return "Another process holds it."
        if summary.agent not in self._runs.agents:
            return f"This server has no agent {summary.agent!r}."
        return ""


def _summarize_journal(journal: Journal, name: str) -> ForeignSummary:
    """Return the agent, status, time, prompt and number of steps of a journal; for an unreadable journal the error."""
    clean = PageTexts().clean
    told: dict[str, Any] = {"agent": "", "status": "unreadable", "created": "", "prompt": "", "error": ""}
    told |= {"steps": None, "cost_usd": None}
    try:
        history = journal.history()
        root = history.root
        told["agent"], told["status"] = str(root["agent_id"]), get_run_status(history)
        told["created"] = history.started
        told["prompt"] = truncate_text(str(root.get("prompt") or ""), 500)
        told["steps"] = sum(one.type == "model_call" for one in history.intents.values())
    except (StepEngineError, OSError, LookupError, TypeError, ValueError) as error:
        told["error"] = error.message if isinstance(error, StepEngineError) else type(error).__name__
    return ForeignSummary(
        **{key: clean(value) if isinstance(value, str) else value for key, value in told.items()}, name=name
    )


def _list_pending_effects(history: History) -> list[PendingEffect]:
    """Return the last effects without an outcome, which a resume performs, with secrets redacted."""
    clean, found = PageTexts().clean, []
    for (path, seq), intent in list(history.open.items())[-MOST_PENDING:]:
        if intent.starts_child_or_body and any(other[0] == f"{path}.{seq}".removeprefix(".") for other in history.open):
            continue  # the effects of its child are listed themselves
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


def _require_foreign_journals(request: Request) -> ForeignJournals:
    """Return the third-party journals of a server; raise ``Problem`` 404 if its runs are in a database."""
    found: ForeignJournals | None = request.app.state.foreign
    if found is None:
        raise _make_missing_journal_problem(request.path_params["journal"])
    return found


def _make_missing_journal_problem(name: str) -> Problem:
    """Return the problem 404 for a journal that does not exist."""
    msg = f"there is no third-party journal {name[:200]!r} in the store of this server"
    return Problem(msg, status=404, kind="no_such_journal")


async def list_foreign_journals(request: Request) -> Response:
    """Return a page of summaries of the third-party journals, newest first."""
    limit, before = parse_limit(request), parse_cursor(request)
    journals: ForeignJournals | None = request.app.state.foreign
    found = [] if journals is None else await asyncio.to_thread(journals.list_summaries, before, limit + 1)
    shown, following = cut_page(found, limit, lambda one: (one[0].changed, one[0].name))
    return ForeignList(journals=[summary for _, summary in shown], next=following).response()


async def get_foreign_journal(request: Request) -> Response:
    """Return the summary and the pending effects of a third-party journal."""
    found = await asyncio.to_thread(_require_foreign_journals(request).inspect, request.path_params["journal"])
    return found.response()


async def get_foreign_page_data(request: Request) -> Response:
    """Return the page data of a third-party journal as JSON; with the parameter ``after`` only the changes since."""
    name = request.path_params["journal"]
    views: RunPageData = request.app.state.views
    journal = await asyncio.to_thread(_require_foreign_journals(request).require_journal, name)
    after = request.query_params.get("after")
    given = (
        int(after) if after is not None and after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS else None
    )
    # A separate name: a later run of the server may have the same name.
    payload = await views.get_journal_page_data(f"foreign {name}", journal, given, shown=name)
    return Response(payload, media_type="application/json")


async def resume_foreign_journal(request: Request) -> Response:
    """Resume a third-party journal, if its next step is the one in the request; else raise ``Problem``."""
    body, name = await parse_body(request, ResumeForeign), request.path_params["journal"]
    journals = _require_foreign_journals(request)
    view = await asyncio.to_thread(journals.inspect, name)
    if not view.may_resume:
        raise Problem(view.why, status=409, kind="not_possible")
    if body.seen != view.seen:
        msg = "the next effects of the journal have changed since they were shown; reload it, and check them again"
        raise Problem(msg, status=409, kind="changed")
    await journals.foreign.resume(require_caller(request), name, listed_agent=view.agent, listed_prompt=view.prompt)
    place = f"{request.scope.get('root_path', '')}/runs/{quote(name, safe='')}/events"
    return Resumed(run_id=name, events=place).response(202)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET", path="/foreign", name="list_foreign", scope="admin", handler=list_foreign_journals, gives={200: ForeignList},
        refuses=(422,), parameters=(
            HttpParameter("cursor", "The `next` value of the previous page."),
            HttpParameter("limit", "The most entries to return, 1 to 100; 20 by default.", int),
        ),
        about="List third-party journals: those in the store that this server did not start.\nNone of them resumes automatically.",
    ),
    Operation(
        method="GET", path="/foreign/{journal}", name="look_at_foreign", scope="admin", handler=get_foreign_journal,
        gives={200: ForeignView}, refuses=(404,), about="Return a third-party journal and its next effects.",
    ),
    Operation(
        method="GET", path="/foreign/{journal}/view", name="view_foreign", scope="admin", handler=get_foreign_page_data,
        parameters=(HttpParameter("after", "As in the view of a run.", int),), gives={200: "application/json"}, refuses=(404, 409),
        about="Return the page data of a third-party journal.",
    ),
    Operation(
        method="POST", path="/foreign/{journal}/resume", name="resume_foreign", scope="admin",
        handler=resume_foreign_journal, body=ResumeForeign, gives={202: Resumed}, refuses=(404, 409, 429, 503),
        about=(
            "Resume a third-party journal as a run of this server.\n"
            "Its next effects must be those that were shown. Its approvals are asked for again."
        ),
    ),
)  # fmt: skip
