"""
Routes of the page that go back in runs, preview edits, and evaluate runs.

A server has these routes if it knows how to make its engine again (``EngineSpec``). They need the scope ``debug``; those that spend
money, run tools or write files need ``admin``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stepengine.debugging.texts import SafeTexts
from stepengine.debugging.viewer.rendering import PageSource, make_payload
from stepengine.engine.tape import Tape
from stepengine.errors import JournalError, JournalMissing
from stepengine.journal import diff
from stepengine.journal.records import format_address
from stepengine.journal.store import MemoryJournal
from stepengine.server.access import require_caller
from stepengine.server.bodies import Body, MessageView, View, make_input_error, parse_body
from stepengine.server.event_json import PING_SECONDS
from stepengine.server.openapi import HttpParameter, Operation
from stepengine.server.problems import Problem
from stepengine.server.run_service import get_requested_run, get_run_service
from stepengine.server.workshop import EvaluationJob, JobKind

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.journal.history import History
    from stepengine.journal.records import Address
    from stepengine.journal.run_diff import RunChange
    from stepengine.server.ledger import RunRow
    from stepengine.server.reports import Reports
    from stepengine.server.workshop import InspectionProcess, InspectionService

__all__ = ("OPERATIONS",)

EVENTS = "text/event-stream"
MOST_PLACES = 20_000
MOST_CHANGES = 100
MAX_AT = 200
MAX_SAMPLE = 4_096
NAMED = 120


# --- requests --------------------------------------------------------------------------------------------------------


class GoTo(Body):
    """The step or effect to move to."""

    at: Annotated[str, Field(description="A step, such as 12, or an effect, such as #5 or 3.2#1.", max_length=MAX_AT)]


class StartJob(Body):
    """The runs to evaluate, and how."""

    kind: JobKind
    runs: Annotated[
        list[str],
        Field(min_length=1, max_length=100, description="The ids of the runs; exactly one unless the kind is impact."),
    ]
    check: Annotated[
        str, Field(max_length=10_000, description="For blame and pin: the condition for success, as an expression.")
    ] = ""
    samples: Annotated[
        int, Field(ge=1, le=50, description="The number of samples: of each run for impact, of each step for blame.")
    ] = 3
    name: Annotated[
        str, Field(max_length=60, description="For pin: the name of the test; by default the start of the run's id.")
    ] = ""


class Agree(Body):
    """The approval of the model calls of a job, up to a budget."""

    budget: Annotated[
        str | None,
        Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$", description="The most US dollars to spend; null for no limit."),
    ] = None


# --- responses -------------------------------------------------------------------------------------------------------


class PlaceView(View):
    """A position in a run: before the outcome of an effect is returned."""

    position: int
    address: str
    step: Annotated[int, Field(description="The step of its run that it belongs to.")]
    type: Annotated[str, Field(description="The kind of effect, such as CallModel.")]
    name: str
    is_step: Annotated[bool, Field(description="Whether it is the model call of a step of the root.")]


class PlaceList(View):
    """The positions of a run, in the order in which results were recorded."""

    run_id: str
    agent: str
    steps: int
    places: list[PlaceView]
    is_cut: bool


class FrameView(View):
    """A stack frame of the author's code that waits."""

    function: str
    file: str
    line: int
    kind: str
    source: str
    locals: Annotated[dict[str, str], Field(description="Its variables as text, with likely secrets redacted.")]
    printed: str | None = None


class HookView(View):
    """A hook that was called."""

    point: str
    hook: str
    said: str


class MomentView(View):
    """The state of a run at one position: frames, hooks, cost and variables."""

    position: int
    step: int
    address: str
    agent_id: str
    asked: str
    outcome: str | None
    location: str
    at: int
    messages: int
    frames: list[FrameView]
    hooks: list[HookView]
    cost: str | None
    tokens: int
    variables: dict[str, str]


class ToolView(View):
    """A tool that a model is offered."""

    name: str
    description: str


class RequestView(View):
    """A request to a model."""

    model: str
    system: str
    tools: list[ToolView]
    settings: str
    messages: Annotated[list[MessageView], Field(description="The last ones.")]
    left_out: int


class StateView(View):
    """The state of the run that waits."""

    messages: Annotated[list[MessageView], Field(description="The last ones.")]
    left_out: int
    context: dict[str, str]
    output: str
    steps_remaining: int


class WholeView(View):
    """The state, the last request and the outcome at one position."""

    state: StateView
    request: Annotated[RequestView | None, Field(description="The last request of this run: what the model saw.")]
    outcome: list[str]
    kind: Annotated[
        Literal["reply", "result", "answer"] | None, Field(description="The kind of outcome that a fork may replace.")
    ]
    value: Annotated[
        Any,
        Field(description="The outcome in the form that a fork accepts; null if it is too long or has redacted text."),
    ]


class LookView(View):
    """A position of a run, replayed with the current code."""

    place: Annotated[MomentView | None, Field(description="Null if the code could not be replayed.")]
    lines: Annotated[list[tuple[int, str]], Field(description="The source around the line that waits.")]
    problem: Annotated[str, Field(description="Why `place` is null.")]
    differs: Annotated[str, Field(description="How the code diverges from the record, there or later.")]
    differs_at: str
    ends: Annotated[list[str], Field(description="The recorded end and the current one, if they differ.")]
    is_before: Annotated[bool, Field(description="Whether this is the last place before the requested one.")]
    changed: Annotated[
        list[str], Field(description="The model calls whose request differs; the recorded reply is used.")
    ]
    files: list[str]
    whole: WholeView | None


class LooksView(View):
    """A place under the present code, and under the code before the last save."""

    now: LookView
    before: LookView | None


class NextView(View):
    """The next model request that the record does not answer."""

    address: str
    request: RequestView | None
    price: Annotated[str | None, Field(description="The most US dollars that the model charges to read the request.")]
    served: Annotated[int, Field(description="Calls before it that the record answered.")]
    why: Annotated[str, Field(description="Why there is no request.")]


class FieldView(View):
    """A field that differs."""

    pointer: str
    a: str
    b: str


class ChangeView(View):
    """A difference of two runs."""

    kind: str
    a: str
    b: str
    what: str
    fields: list[FieldView]


class DifferenceView(View):
    """The differences between two runs."""

    first: ChangeView | None
    changes: Annotated[list[ChangeView], Field(description=f"The first {MOST_CHANGES}.")]
    more: int
    totals: dict[str, list[Any]]


class PriceView(View):
    """The number and the cost of the model calls that a job will make, estimated from the record."""

    calls: int
    low: str | None
    high: str | None


class JobView(View):
    """An evaluation job."""

    id: str
    kind: str
    runs: list[str]
    status: Literal["begun", "priced", "running", "done", "failed", "cancelled"]
    created: str
    price: Annotated[
        PriceView | None, Field(description="Set once the status is priced: the job waits for an approval.")
    ]
    progress: dict[str, Any]
    result: dict[str, Any] | None
    error: str


class JobList(View):
    """Your jobs, newest first."""

    jobs: list[JobView]


# --- reading requests -------------------------------------------------------------------------------------------------


def _get_inspection_service(request: Request) -> InspectionService:
    found: InspectionService = request.app.state.workshop
    return found


def _make_no_record_problem(row: RunRow) -> Problem:
    """Return a ``Problem`` 409 for a run that has no record yet."""
    msg = f"the run {row.run} has no record yet; try again in a moment"
    return Problem(msg, status=409, kind="not_begun")


async def _require_journal_copy(request: Request, row: RunRow) -> MemoryJournal:
    """Return the journal of a run as a copy in memory; raise ``Problem`` 409 if it has no record yet."""
    try:
        content = await get_run_service(request).reader.read_journal_bytes(row)
    except JournalMissing:
        raise _make_no_record_problem(row) from None
    return await asyncio.to_thread(lambda: MemoryJournal(content.splitlines(keepends=True)))


# --- going back -------------------------------------------------------------------------------------------------------


async def list_places(request: Request) -> Response:
    """Return the effects of a run in order, the positions that the debugger can go to, as JSON."""
    row = await get_requested_run(request)
    journal = await _require_journal_copy(request, row)
    places = await asyncio.to_thread(_make_place_list, row, journal)
    return places.response()


def _make_place_list(row: RunRow, journal: MemoryJournal) -> PlaceList:
    """Return the effects of a run in order, and the number of its steps."""
    tape, texts = Tape(journal), SafeTexts()
    waiting = tape.find_waiting_effect()
    order = [*tape.order, *([waiting] if waiting is not None and waiting not in tape.positions else [])]
    return PlaceList(
        run_id=row.run,
        agent=str(tape.history.root["agent_id"]),
        steps=tape.count_steps(),
        places=[_make_place_view(tape, number, address, texts) for number, address in enumerate(order[:MOST_PLACES])],
        is_cut=len(order) > MOST_PLACES,
    )


def _make_place_view(tape: Tape, position: int, address: Address, texts: SafeTexts) -> PlaceView:
    """Return an effect with its position, step, kind and name."""
    intent = tape.history.intents.get(address)
    kind = "End" if intent is None else intent.type
    return PlaceView(
        position=position,
        address=format_address(*address),
        step=tape.get_step_number(address),
        type=kind,
        name="" if intent is None else texts.clean(_get_effect_name(tape.history, intent), NAMED),
        is_step=kind == "model_call" and not address[0],
    )


def _get_effect_name(history: History, intent: Any) -> str:
    """Return a name for an effect: its model, the texts of its questions, its tool, agent, function or topic, or ``""``."""
    if intent.type == "model_call":
        return str(history.model(intent))
    form = history.form(intent)
    if intent.type == "ask":
        return " ".join([str(each["text"]) for each in form.get("questions", ())])
    return str(form.get("tool_name") or form.get("agent_id") or form.get("name") or form.get("topic") or "")


async def get_comparison_page_data(request: Request) -> Response:
    """Return the data of the comparison page for two runs, as JSON."""
    one, other = await get_requested_run(request), await get_requested_run(request, "other")
    journals = [await _require_journal_copy(request, row) for row in (one, other)]
    sources = [
        PageSource(journal=journal, file=row.run, without="")
        for journal, row in zip(journals, (one, other), strict=True)
    ]
    made = await asyncio.to_thread(make_payload, *sources)
    return Response(await asyncio.to_thread(json.dumps, made.told), media_type="application/json")


async def list_run_differences(request: Request) -> Response:
    """Return the differences between the records of two runs as JSON, the first one separately."""
    one, other = await get_requested_run(request), await get_requested_run(request, "other")
    a, b = [await _require_journal_copy(request, row) for row in (one, other)]
    found = await asyncio.to_thread(diff, a, b)
    texts = SafeTexts()
    changes = [_make_change_view(change, texts) for change in found.changes[:MOST_CHANGES]]
    return DifferenceView(
        first=changes[0] if changes else None,
        changes=changes,
        more=len(found.changes) - len(changes),
        totals={name: [None if each is None else str(each) for each in pair] for name, pair in found.totals.items()},
    ).response()


async def get_sample_page_data(request: Request) -> Response:
    """Return the data of the run page for a sample of an evaluation report, as JSON."""
    reports: Reports | None = request.app.state.reports
    report, name = [request.query_params.get(each, "")[:MAX_SAMPLE] for each in ("report", "journal")]
    journal = None if reports is None else await asyncio.to_thread(reports.find_sample_journal, report, name)
    if journal is None:
        msg = f"the report {report[:200]!r} has no journal {name[:200]!r}"
        raise Problem(msg, status=404, kind="no_such_sample")
    source = PageSource(journal=journal, file=f"{report}/{name}", without="")
    try:
        made = await asyncio.to_thread(make_payload, source)
    except JournalError as error:
        msg = f"the journal {name[:200]!r} cannot be shown: {error.message.replace(journal.name, name)}"
        raise Problem(msg, status=409, kind="unreadable") from None
    return Response(await asyncio.to_thread(json.dumps, made.told), media_type="application/json")


def _make_change_view(change: RunChange, texts: SafeTexts) -> ChangeView:
    """Return a difference between two runs with secrets redacted."""
    fields = [
        FieldView(pointer=f.pointer, a=texts.clean(str(f.recorded)), b=texts.clean(str(f.now))) for f in change.fields
    ]
    return ChangeView(kind=change.kind, a=change.a, b=change.b, what=texts.clean(change.what), fields=fields)


# --- edit and see -----------------------------------------------------------------------------------------------------


async def start_inspection_stream(request: Request) -> Response:
    """Start a process that inspects a run, and stream its messages; the process ends with the stream."""
    row, at = await get_requested_run(request), request.query_params.get("at", "")
    if len(at) > MAX_AT:
        msg = f"at: must have at most {MAX_AT} characters"
        raise make_input_error(msg)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(headers=headers, media_type=EVENTS)
    workshop = _get_inspection_service(request)
    try:
        desk = await workshop.start_inspection(require_caller(request), row, at)
    except JournalMissing:
        raise _make_no_record_problem(row) from None
    events = _stream_inspection_events(desk, get_run_service(request).state.stopping)
    return _InspectionResponse(workshop, desk, events, headers)


class _InspectionResponse(StreamingResponse):
    """The event stream of an inspection, which ends with it, also if the page disconnects before the first event."""

    def __init__(
        self, workshop: InspectionService, desk: InspectionProcess, events: AsyncIterator[str], headers: dict[str, str]
    ) -> None:
        super().__init__(events, media_type=EVENTS, headers=headers)
        self._workshop, self._desk = workshop, desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The request is cancelled by now; without the shield, this would be, too.
            await asyncio.shield(asyncio.ensure_future(self._workshop.end_inspection(self._desk)))


async def _stream_inspection_events(desk: InspectionProcess, stopping: asyncio.Event) -> AsyncIterator[str]:
    """Yield the events of an inspection as server-sent events."""
    events = desk.read_unsolicited_messages()
    coming: asyncio.Future[dict[str, Any] | None] = asyncio.ensure_future(anext(events, None))
    ending = asyncio.ensure_future(stopping.wait())
    try:
        yield _encode_sse_event("desk", {"desk": desk.id})
        while not ending.done():
            if coming.done():
                told = coming.result()
                if told is None:
                    return
                yield _encode_sse_event(str(told.pop("event")), told)
                coming = asyncio.ensure_future(anext(events, None))
                continue
            await asyncio.wait((coming, ending), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not (coming.done() or ending.done()):
                yield ": ping\n\n"
    finally:
        ending.cancel()
        coming.cancel()


def _encode_sse_event(kind: str, data: Mapping[str, Any]) -> str:
    """Encode a server-sent event with JSON data."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _get_requested_inspection(request: Request) -> InspectionProcess:
    """Return the caller's inspection that a request names; raise ``Problem`` 404 if there is none."""
    return _get_inspection_service(request).get_inspection(
        require_caller(request), request.path_params["run"], request.path_params["desk"]
    )


async def move_inspection(request: Request) -> Response:
    """Move an inspection to another effect of the run, and return the state there."""
    body = await parse_body(request, GoTo)
    desk = _get_requested_inspection(request)
    return LooksView.model_validate(await desk.send_request("go", at=body.at)).response()


async def predict_next_request(request: Request) -> Response:
    """Return the first model request that the record does not answer, under the current code."""
    return NextView.model_validate(await _get_requested_inspection(request).send_request("next")).response()


# --- judging ----------------------------------------------------------------------------------------------------------


async def start_job(request: Request) -> Response:
    """Start an evaluation job about runs of the caller, and return it with status 202."""
    body, caller = await parse_body(request, StartJob), require_caller(request)
    if body.kind != "impact" and len(body.runs) != 1:
        msg = f"runs: {body.kind} needs exactly one run"
        raise make_input_error(msg)
    if body.kind in ("blame", "pin") and not body.check.strip():
        msg = "check: missing; give the condition for success, such as 'refund' not in tools"
        raise make_input_error(msg)
    rows = [await get_run_service(request).reader.get_run(caller, run) for run in dict.fromkeys(body.runs)]
    asked = {"check": body.check, "samples": body.samples, "name": body.name or rows[0].run[:12]}
    try:
        job = await _get_inspection_service(request).start_job(caller, body.kind, rows, asked)
    except JournalMissing as error:
        msg = f"a run has no record yet: {error.message}"
        raise Problem(msg, status=409, kind="not_begun") from None
    return _make_job_view(job).response(202)


def _make_job_view(job: EvaluationJob) -> JobView:
    """Return a job as the HTTP API shows it."""
    return JobView(
        id=job.id,
        kind=job.kind,
        runs=list(job.runs),
        status=job.status,  # type: ignore[arg-type]  # which are these words
        created=datetime.fromtimestamp(job.created, UTC).isoformat(),
        price=None if job.price is None else PriceView(**job.price),
        progress=job.progress,
        result=job.result,
        error=job.error,
    )


async def list_jobs(request: Request) -> Response:
    """Return the evaluation jobs of the caller."""
    return JobList(
        jobs=[_make_job_view(job) for job in _get_inspection_service(request).list_jobs(require_caller(request))]
    ).response()


async def get_job(request: Request) -> Response:
    """Return an evaluation job of the caller."""
    return _make_job_view(
        _get_inspection_service(request).get_job(require_caller(request), request.path_params["job"])
    ).response()


async def approve_job(request: Request) -> Response:
    """Approve the price of an evaluation job up to a budget, so that the job continues."""
    workshop, body = _get_inspection_service(request), await parse_body(request, Agree)
    job = workshop.get_job(require_caller(request), request.path_params["job"])
    await workshop.approve_job(job, body.budget)
    return _make_job_view(job).response(202)


async def cancel_job(request: Request) -> Response:
    """Cancel an evaluation job of the caller, and return it."""
    workshop = _get_inspection_service(request)
    job = workshop.get_job(require_caller(request), request.path_params["job"])
    await workshop.cancel_job(job)
    return _make_job_view(job).response()


AT = HttpParameter("at", "The step or effect to start at; by default the first one.")
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET", path="/runs/{run}/places", name="list_places", scope="debug", handler=list_places, gives={200: PlaceList},
        refuses=(404, 409), about="List the places of a run: each effect that has an outcome, and the one that waits.",
    ),
    Operation(
        method="GET", path="/runs/{run}/compare/{other}", name="compare_runs", scope="debug", handler=get_comparison_page_data,
        gives={200: "application/json"}, refuses=(404, 409), about="Return the page data of two runs side by side.",
    ),
    Operation(
        method="GET", path="/runs/{run}/difference/{other}", name="difference_of_runs", scope="debug", handler=list_run_differences,
        gives={200: DifferenceView}, refuses=(404, 409), about="List the differences between two runs, the first one separately.",
    ),
    Operation(
        method="GET", path="/samples", name="look_at_sample", scope="debug", handler=get_sample_page_data, gives={200: "application/json"},
        refuses=(404, 409),
        parameters=(HttpParameter("report", "The id of a report."), HttpParameter("journal", "The journal of a sample, as the report names it.")),
        about="Return the page data of the run of an evaluation sample.",
    ),
    Operation(
        method="GET", path="/runs/{run}/edits", name="open_desk", scope="debug", handler=start_inspection_stream, gives={200: EVENTS},
        refuses=(404, 409, 422, 429, 503), parameters=(AT,),
        about=(
            "Replay a run up to a place with the current code of its agent, again after every save, as server-sent events.\n"
            "The first event has the id of the desk. No tool runs and no model is called. Code that does not return is stopped after 5 s."
        ),
    ),
    Operation(
        method="POST", path="/runs/{run}/edits/{desk}", name="go_to_place", scope="debug", handler=move_inspection, body=GoTo,
        gives={200: LooksView}, refuses=(404, 409, 503),
        about="Move to another place; return its variables, state, model request, and the value that a fork may replace.",
    ),
    Operation(
        method="GET", path="/runs/{run}/edits/{desk}/next", name="ask_what_is_next", scope="debug", handler=predict_next_request,
        gives={200: NextView}, refuses=(404, 409, 422, 503),
        about="Return the next model request under the current code; the record answers the calls before it. No model is called.",
    ),
    Operation(
        method="POST", path="/jobs", name="start_job", scope="admin", handler=start_job, body=StartJob, gives={202: JobView},
        refuses=(404, 409, 429),
        about=(
            "Evaluate runs with the current code of their agent: impact, blame, pin, or ask, which sends the next request to the model.\n"
            "A job that costs money waits with its price until it is approved."
        ),
    ),
    Operation(
        method="GET", path="/jobs", name="list_jobs", scope="admin", handler=list_jobs, gives={200: JobList}, about="List your jobs, newest first.",
    ),
    Operation(
        method="GET", path="/jobs/{job}", name="look_at_job", scope="admin", handler=get_job, gives={200: JobView}, refuses=(404,),
        about="Return a job: its price, progress and result.",
    ),
    Operation(
        method="POST", path="/jobs/{job}/agree", name="agree_to_job", scope="admin", handler=approve_job, body=Agree, gives={202: JobView},
        refuses=(404, 409), about="Approve the model calls of a job, within a budget.",
    ),
    Operation(
        method="POST", path="/jobs/{job}/cancel", name="cancel_job", scope="admin", handler=cancel_job, gives={200: JobView},
        refuses=(404,), about="Cancel a job.",
    ),
)  # fmt: skip
