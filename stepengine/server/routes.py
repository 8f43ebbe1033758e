"""The operations of the HTTP API: one table, from which the routes and the OpenAPI document are made."""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import attrs
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from stepengine.adapters.ag_ui.asked import KEY as PAGE_KEY
from stepengine.data.alike import list_names
from stepengine.data.choices import question_to_json
from stepengine.data.codec import encode_stored, plain
from stepengine.data.media_types import IMAGES, resolve_media_type
from stepengine.data.questions import Answer, AnswerLike
from stepengine.data.visible import cut_after, truncate_text
from stepengine.debugging.texts import SafeTexts
from stepengine.engine.agent_description import describe_agent
from stepengine.errors import (
    AnswerRejected,
    InputError,
    JournalError,
    LimitExceeded,
    MissingKey,
    ReplayDivergence,
    StepEngineError,
)
from stepengine.evaluation.origins import find_agent_origin
from stepengine.journal.recorded_part import LIVE_KINDS, parse_live_kinds
from stepengine.server.access import require_caller
from stepengine.server.ag_ui import OPERATIONS as AG_UI
from stepengine.server.bodies import (
    MAX_TEXT,
    MOST_LISTED,
    Body,
    MessageReceipt,
    MessageView,
    View,
    cut_page,
    make_input_error,
    parse_cursor,
    parse_limit,
)
from stepengine.server.bodies import parse_body as _body
from stepengine.server.event_json import encode_event_stream
from stepengine.server.foreign import OPERATIONS as FOREIGN
from stepengine.server.ledger import OPEN, RunRow, SessionRow
from stepengine.server.mcp import OPERATIONS as MCP
from stepengine.server.metrics import OPERATIONS as METRICS
from stepengine.server.openapi import HttpParameter, OpenApiDocument, Operation
from stepengine.server.pages import CallerConversation
from stepengine.server.problems import Problem, problem_of
from stepengine.server.reports import Report, Reports, ReportSummary
from stepengine.server.run_reader import ServedRun
from stepengine.server.run_requests import ForkRun, ResumeRun, StartRequest
from stepengine.server.run_service import RunService, get_requested_run, get_run_service
from stepengine.server.studio import QuestionDetails, RunPageData, get_page, get_page_file
from stepengine.server.vercel import OPERATIONS as VERCEL
from stepengine.server.webhooks import OPERATIONS as HOOKS
from stepengine.tools.agent_tools import get_params_schema
from stepengine.tools.bundled.history_tool import message_to_text

if TYPE_CHECKING:
    from decimal import Decimal

    from starlette.requests import Request

    from stepengine.data.definition import AgentDefinition
    from stepengine.data.messages import Message
    from stepengine.data.usage import Usage
    from stepengine.data.waits import Waits
    from stepengine.engine import Engine
    from stepengine.engine.scheduler import ScheduleStatus

__all__ = ("OPERATIONS", "PAGES", "AgentSummaries")

MAX_KEY = 255
MAX_SEARCH = 200
MAX_DIGITS = 18
MOST_PROMPT = 500
MOST_SAID = 200
"""The most messages of a conversation in a response."""
MOST_CHARS = 20_000
"""The most characters of each message."""
CALL = ("name", "input", "address")
REPORTED = ("broke_at", "served", "simulated", "performed", "reused", "model_calls", "is_unpaid")
STATUSES = (*OPEN, "completed", "failed", "cancelled", "max_steps", "truncated", "stranded")


# --- requests --------------------------------------------------------------------------------------------------------


class RunLimits(Body):
    """The limits of a run; they may not exceed those of its agent on this server."""

    max_steps: Annotated[int | None, Field(description="The most model calls.", ge=1, le=1_000_000)] = None
    max_cost_usd: Annotated[
        float | None, Field(description="The most US dollars for the run and its children.", gt=0)
    ] = None


class Picture(Body):
    """An image that is sent with the prompt."""

    mime_type: Annotated[
        str, Field(description="Its media type; the type of its bytes takes precedence.", max_length=200)
    ] = ""
    data: Annotated[
        str, Field(description="The bytes of a PNG, JPEG, GIF or WebP in base64.", max_length=8 * 1024 * 1024)
    ]


class StartRun(Body):
    """A request to start a run."""

    agent: Annotated[str, Field(description="The id of an agent.", max_length=200)]
    prompt: Annotated[str, Field(description="What it should do.", max_length=MAX_TEXT)] = ""
    params: Annotated[dict[str, Any] | None, Field(description="Parameters that match the agent's schema.")] = None
    session_id: Annotated[str | None, Field(description="The conversation.", min_length=1, max_length=200)] = None
    metadata: Annotated[dict[str, Any] | None, Field(description="For hooks and tools.")] = None
    limits: Annotated[RunLimits | None, Field(description="Limits in addition to those of the agent.")] = None
    model: Annotated[
        str | None,
        Field(description="The agent's model in this run; needs the scope admin.", min_length=1, max_length=200),
    ] = None
    images: list[Picture] = Field(
        default_factory=list, description="Images that are sent before the prompt.", max_length=20
    )
    turn: Annotated[bool, Field(description="Continue from the last run of the conversation.")] = False


class AnswerObject(Body):
    """An answer that is more than a text or a bool."""

    selected: list[str] = Field(default_factory=list, description="The chosen options.", max_length=100)
    text: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    declined: bool = False
    remember: Annotated[Literal["session", "always"] | None, Field(description="Allow such calls from now on.")] = None
    covers: Annotated[str, Field(description="The id of the wider rule that `remember` adds.", max_length=1_000)] = ""
    edited_input: Annotated[dict[str, Any] | None, Field(description="Run the call with this input instead.")] = None
    reason: Annotated[
        str, Field(description="The reason; for a denied call, the model sees it.", max_length=10_000)
    ] = ""


class AnswerQuestions(Body):
    """Answers by question id; all are accepted, or none."""

    answers: Annotated[dict[str, bool | str | AnswerObject], Field(min_length=1, max_length=100)]


class PostMessage(Body):
    """A message for the receiver of a topic."""

    topic: Annotated[str, Field(max_length=200, pattern="^[A-Za-z0-9_.:/-]+$")]
    value: Any = None
    id: Annotated[str | None, Field(description="A second message with the same id is ignored.", max_length=200)] = None
    path: Annotated[str, Field(description="The path of the child that receives the message.", max_length=1_000)] = ""


class SayInput(Body):
    """User input for a run that has not ended."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class ToolResultBody(Body):
    """The result of a call of a deferred tool."""

    result: Any = None
    path: Annotated[str | None, Field(description="The path of the child that made the call.", max_length=1_000)] = None


class CancelRun(Body):
    """The reason for cancelling a run."""

    reason: Annotated[str, Field(max_length=1_000)] = ""


class ReplayRun(Body):
    """What of a replay is performed."""

    live: list[str] = Field(
        default_factory=list,
        description=f"Kinds of effects to perform again and compare, by default none: {', '.join(LIVE_KINDS)}. `model_call` cannot be "
        "combined with other kinds and needs the scope run; the other kinds need admin.",
        max_length=len(LIVE_KINDS),
    )


class UndoRun(Body):
    """Which writes of a run are undone."""

    at: Annotated[
        int | str, Field(description="The last effect whose writes are kept; by default all writes are undone.")
    ] = -1
    dry_run: Annotated[bool, Field(description="Only report what would be done.")] = False
    partial: Annotated[bool, Field(description="Skip files that were changed since, and restore the rest.")] = False


# --- responses -------------------------------------------------------------------------------------------------------


class CallerView(View):
    """The caller of a request."""

    name: Annotated[str, Field(description="The owner whose runs the caller sees.")]
    scopes: Annotated[list[str], Field(description="What the caller may do; admin includes all scopes.")]


class AgentView(View):
    """An agent that may be started."""

    id: str
    name: str
    description: str
    prompt: Annotated[str | None, Field(description="What its prompt should say.")]
    params: Annotated[dict[str, Any] | None, Field(description="JSON Schema of its params.")]
    tools: list[str]
    spawns: list[str]
    model: Annotated[str | None, Field(description="Null if the agent has no model of its own.")] = None
    missing: Annotated[
        str | None,
        Field(description="What is missing to start it, such as the key of its model; needs the scope admin."),
    ] = None


class ToolSpecView(View):
    """A tool, as a model is shown it."""

    name: str
    description: str
    input_schema: dict[str, Any]
    category: str
    needs_permission: bool


class PromptsView(View):
    """The prompts of an agent, with the additions of the engine."""

    system: Annotated[str | None, Field(description="Null if it is computed for each run.")]
    instructions: str
    step: str


class AgentDetail(AgentView):
    """An agent. A null member does not exist or needs the scope debug."""

    source: Annotated[str | None, Field(description="The source of its handler.")]
    file: str | None = None
    line: int | None = None
    prompts: PromptsView | None = None
    tool_specs: list[ToolSpecView] | None = None
    policy: Annotated[
        dict[str, Any] | None, Field(description="The rules for its calls; null if all calls are allowed.")
    ] = None
    settings: Annotated[dict[str, Any] | None, Field(description="The settings that the agent sets.")] = None


class AgentList(View):
    """The agents that may be started, as their files are now."""

    agents: list[AgentView]
    broken: Annotated[
        str | None,
        Field(
            description="Why the files cannot be loaded: no run starts, and these agents are from the last version that loaded."
        ),
    ] = None
    script: Annotated[str | None, Field(description="The script that answers in place of models.")] = None


class StartedRun(View):
    """A run that was started."""

    run_id: str
    events: Annotated[str, Field(description="The path of its events.")]
    is_new: Annotated[bool, Field(description="False if an earlier request with the same idempotency key started it.")]


class ChoiceView(View):
    """An answer to a question that a person can choose."""

    id: str
    label: str
    kind: Annotated[
        Literal["option", "allow", "always", "deny"],
        Field(
            description="An option; or allow the call, allow it from now on, deny it. `deny` also declines a question."
        ),
    ]
    description: Annotated[str, Field(description="The meaning of an option.")]
    answer: Annotated[dict[str, Any], Field(description="The answer to send if a person chooses this.")]
    scope: Annotated[str, Field(description="The calls that `always` allows from now on, in words.")]
    confirm: Annotated[str, Field(description="A warning that the person must confirm before the answer is sent.")]
    rule: Annotated[dict[str, Any] | None, Field(description="The rule that `always` adds, as in a policy file.")]


class PreviewPartView(View):
    """A part of the preview of a call."""

    kind: Literal["action", "command", "diff", "member"]
    name: Annotated[str, Field(description="The name of a member.")]
    value: Any


class QuestionView(View):
    """An open question."""

    id: str
    text: str
    path: str
    options: list[str]
    descriptions: Annotated[list[str], Field(description="What each of the options means.")]
    multi_select: bool
    allow_text: bool
    number: Annotated[str | None, Field(description="The accepted numbers: `whole` or `any`.")]
    choices: Annotated[list[ChoiceView], Field(description="The answers that a person can choose with one click.")]
    tool_name: str | None
    details: Any
    preview_parts: Annotated[list[PreviewPartView], Field(description="The call in words, as a command and as a diff.")]
    provenance: Annotated[
        list[dict[str, Any]],
        Field(description="Where arguments come from, if a rule about untrusted data asks; untrusted ones first."),
    ]
    origins: Annotated[list[str], Field(description="The same in words, in the same order.")]


class OpenQuestion(QuestionView):
    """An open question, with the run that asks."""

    run_id: str
    agent: str
    owner: str
    session_id: str | None
    since: Annotated[str, Field(description="When the run's status changed last.")]
    program: Annotated[str | None, Field(description="The program that asks.")]
    line: Annotated[int | None, Field(description="The line of the program that waits.")]


class QuestionList(View):
    """Open questions of all runs, those of the newest runs first."""

    questions: list[OpenQuestion]
    next: Annotated[str | None, Field(description="The `cursor` of the next page.")]


class RunDetails(View):
    """The details of a run in a list, with ``?details=1``."""

    prompt: str
    changed: str
    steps: Annotated[int | None, Field(description="Model calls, including those of children.")]
    cost_usd: str | None
    tokens: int | None
    seconds: Annotated[float | None, Field(description="From its start to its last record.")]
    waits: Annotated[list[str], Field(description="What it waits for, in words.")]
    wakes: Annotated[str | None, Field(description="When it resumes automatically.")]
    agents: Annotated[int, Field(description="How many agents ran in it.")]
    asks: Annotated[bool, Field(description="Whether it waits for a person.")]
    doing: Annotated[str, Field(description="The kind of effect that is running.")]
    output: Annotated[str | None, Field(description="The start of its output, as text or JSON.")]
    forked_from: Annotated[str | None, Field(description="For a fork, the id of its parent.")]


class RunSummary(View):
    """A run in a list."""

    run_id: str
    agent: str
    owner: str
    status: str
    created: str
    session_id: str | None
    details: Annotated[RunDetails | None, Field(description="With ?details=1.")] = None


class WaitView(View):
    """One thing that a suspended run waits for."""

    kind: Annotated[str, Field(description="`question`, `time`, `message` or `child`.")]
    said: Annotated[str, Field(description="The same in words.")]
    path: Annotated[str, Field(description="The path of the run that waits, such as `0.1` for a child.")]
    seq: int
    wakes_at: Annotated[str | None, Field(description="When the time is reached, or the wait times out.")]
    question: Annotated[str | None, Field(description="The id of the question.")]
    topic: Annotated[str | None, Field(description="The topic of the message.")]
    paths: Annotated[list[str], Field(description="The paths of the children.")]


class ForkOrigin(View):
    """Where a fork began."""

    run: Annotated[str, Field(description="The id of the run that was forked.")]
    at: Annotated[str, Field(description="The last effect that was kept.")]


class RunView(RunSummary):
    """The state of a run."""

    phase: str | None
    epoch: str | None
    questions: list[QuestionView]
    output: Any
    text: str
    error: str
    usage: dict[str, Any] | None
    cost_usd: str | None
    waits_for: Annotated[list[WaitView], Field(description="What a suspended run waits for.")]
    wakes_at: Annotated[
        str | None, Field(description="When a suspended run resumes automatically: the earliest of its times.")
    ]
    forked_from: Annotated[ForkOrigin | None, Field(description="For a fork, where it started.")]
    warnings: Annotated[
        list[str],
        Field(description="The warnings of an ended run. Those of children start with the path of their run."),
    ]


class RunList(View):
    """Runs, newest first."""

    runs: list[RunSummary]
    next: Annotated[str | None, Field(description="The `cursor` of the next page.")]


class Accepted(View):
    """The receipt for input that was accepted and stored."""

    run_id: str


class LeftFile(View):
    """A file that was left as it is."""

    path: str
    why: str


class DivergenceView(View):
    """The first difference between a run and its record."""

    kind: str
    address: Annotated[str, Field(description="The effect, such as #5 or 3.2#1.")]
    step: Annotated[int, Field(description="The model step of its run, from 1; 0 before the first one.")]
    site: Annotated[str, Field(description="The file and line of the handler that waits; empty where none does.")]
    message: str
    fields: Annotated[
        list[dict[str, str]],
        Field(description="The members of the effect that differ, each with `pointer`, `recorded` and `now`."),
    ]


class ReplayView(View):
    """How a replay went."""

    run_id: str
    difference: Annotated[DivergenceView | None, Field(description="Null if the run matches its record.")]
    status: Annotated[str | None, Field(description="How the replayed run ended; null if it diverges.")]
    output: Any
    text: str


class ForkReportView(View):
    """How a fork ended whose tools the record answered."""

    run_id: Annotated[
        str | None, Field(description="Null if the fork matches the record, so that there is no new run.")
    ]
    status: str
    output: Any
    text: str
    error: str
    broke_at: Annotated[str, Field(description="The first effect that differs from the record; empty if none differs.")]
    served: Annotated[int, Field(description="Tool calls that the record answered.")]
    simulated: int
    performed: int
    refused: Annotated[
        dict[str, Any] | None,
        Field(description="The call that ended the fork because it had no result: its `name`, `input` and `address`."),
    ]
    reused: Annotated[int, Field(description="Model calls that the record answered.")]
    model_calls: int
    cost_usd: Annotated[str | None, Field(description="Null where a price is not known.")]
    is_unpaid: Annotated[bool, Field(description="Whether the budget was too small for a model call.")]


class UndoneView(View):
    """What was undone; paths are relative to the folder that the run's tools write in."""

    restored: Annotated[list[str], Field(description="Files that have their earlier content again.")]
    removed: Annotated[list[str], Field(description="Files and folders that the run had created.")]
    created: Annotated[list[str], Field(description="Files that the run had deleted.")]
    unchanged: Annotated[list[str], Field(description="Files that already had their earlier content.")]
    left: list[LeftFile]
    unknown: Annotated[list[str], Field(description="Calls that may or may not have happened.")]
    others: Annotated[list[str], Field(description="Other effects on the outside world, which cannot be undone.")]
    dry_run: bool


class Spent(View):
    """Tokens and money."""

    usage: dict[str, Any]
    cost_usd: Annotated[str | None, Field(description="Null where a price is not known.")]


class CostView(Spent):
    """What a run and its children spent so far."""

    run_id: str
    by_agent: dict[str, Spent]
    by_model: dict[str, Spent]


class SessionSummary(View):
    """A conversation in a list."""

    session_id: str
    owner: str
    agent: Annotated[str, Field(description="The agent of the last run.")]
    status: Annotated[str, Field(description="The status of the last run.")]
    runs: int
    changed: Annotated[str, Field(description="When the last run was requested.")]


class SessionList(View):
    """Conversations, those with the newest runs first."""

    sessions: list[SessionSummary]
    next: Annotated[str | None, Field(description="The `cursor` of the next page.")]


class SessionView(SessionSummary):
    """A conversation; GET /runs?session= lists its runs."""

    turns: Annotated[
        int | None, Field(description="Null if the server stores no conversations, like the members that follow.")
    ]
    usage: dict[str, Any] | None
    messages: Annotated[list[MessageView] | None, Field(description="The last ones, oldest first.")]
    left_out: Annotated[int | None, Field(description="Messages before those that are shown.")]


class ReportList(View):
    """Reports of evaluations, newest first."""

    reports: list[ReportSummary]
    next: Annotated[str | None, Field(description="The `cursor` of the next page.")]


class ScheduleView(View):
    """The schedule of an agent, with its next and last run."""

    id: str
    agent: str
    cron: str | None
    timezone: str
    enabled: bool
    next: str | None
    last: dict[str, Any] | None
    missed: int


class ScheduleList(View):
    """The schedules."""

    schedules: list[ScheduleView]


class Health(View):
    """The status of the server, and its number of live runs."""

    status: str
    live: Annotated[int, Field(description="Runs that are running in this process.")]


# --- reading requests -------------------------------------------------------------------------------------------------


async def get_caller(request: Request) -> Response:
    """Return the name and the scopes of the caller."""
    caller = require_caller(request)
    return CallerView(name=caller.name, scopes=sorted(caller.scopes)).response()


# --- agents -----------------------------------------------------------------------------------------------------------


class AgentSummaries:
    """The public members of agents, made once for each definition: the schema of a class of params takes a millisecond."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[AgentDefinition, dict[str, Any]]] = {}

    def get_or_make_summary(self, agent: AgentDefinition) -> dict[str, Any]:
        """Return the members of ``AgentView`` that are the same for every caller, made once for each definition."""
        known, summary = self._known.get(agent.id, (None, {}))
        if known is not agent:
            summary = _summarize_agent(agent)
            self._known[agent.id] = (agent, summary)
        return summary


def _summarize_agent(agent: AgentDefinition) -> dict[str, Any]:
    """Return the members of ``AgentView`` that are the same for every caller."""
    return {
        "id": agent.id,
        "name": agent.display_name or agent.id,
        "description": agent.description,
        "prompt": None if agent.input_schema is None else agent.input_schema.prompt,
        "params": plain(get_params_schema(agent)) or None,
        "tools": list(agent.tool_names),
        "spawns": list(agent.spawnable_ids),
        "model": None if agent.model is None else str(agent.model),
    }


async def list_agents(request: Request) -> Response:
    """Return the agents that may be started, after reloading changed files."""
    runs = await _reload_agents_and_get_runs(request)
    broken = None if runs.load_problem is None else runs.load_problem.message
    # Read once: another request may replace the engine meanwhile.
    is_told, engine, ids = require_caller(request).may("admin"), runs.engine, runs.agents
    # To look for a key may import what a provider needs.
    lacks = await asyncio.to_thread(lambda: [runs.explain_missing_model(engine, id_) if is_told else "" for id_ in ids])
    summaries: AgentSummaries = request.app.state.agent_summaries
    agents = [
        AgentView(**summaries.get_or_make_summary(engine.agent(id_)), missing=lack or None)
        for id_, lack in zip(ids, lacks, strict=True)
    ]
    return AgentList(agents=agents, broken=broken, script=request.app.state.script or None).response()


async def _reload_agents_and_get_runs(request: Request) -> RunService:
    """Rebuild the engine if the files of its agents were saved and can be loaded; then return the run service."""
    runs = get_run_service(request)
    await runs.rebuild_engine_if_changed()
    return runs


async def get_agent(request: Request) -> Response:
    """Return an agent, after reloading changed files; for callers with the scope debug also its source and settings."""
    runs, name = await _reload_agents_and_get_runs(request), request.path_params["agent"]
    if name not in runs.agents:
        msg = f"there is no agent {name[:200]!r}; GET /agents lists the agents"
        raise Problem(msg, status=404, kind="no_such_agent")
    engine = runs.engine
    agent = engine.agent(name)
    more = (
        await asyncio.to_thread(_get_agent_debug_fields, engine, agent)
        if require_caller(request).may("debug")
        else {"source": None}
    )
    summaries: AgentSummaries = request.app.state.agent_summaries
    return AgentDetail(**summaries.get_or_make_summary(agent), **more).response()


def _get_agent_debug_fields(engine: Engine, agent: AgentDefinition) -> dict[str, Any]:
    """Return the members of ``AgentDetail`` for callers with the scope debug: source, prompts, tools, policy and settings."""
    known, origin = describe_agent(engine, agent.id), find_agent_origin(agent)
    system = agent.system_prompt if isinstance(agent.system_prompt, str) else None
    return {
        "source": _find_handler_source(agent),
        "file": None if origin is None else str(origin.file),
        "line": None if origin is None else origin.line,
        "prompts": PromptsView(system=system, instructions=known.instructions, step=agent.step_prompt),
        "tool_specs": [
            ToolSpecView(
                name=spec.name,
                description=spec.description,
                input_schema=plain(spec.input_schema),
                category=spec.category,
                needs_permission=spec.requires_permission,
            )
            for spec in known.tools
        ],
        "policy": known.policy,
        "settings": {name: value for name, value in encode_stored(agent.settings).items() if name != "type"},
    }


def _find_handler_source(agent: AgentDefinition) -> str | None:
    """Return the source code of an agent's ``handle_steps``; ``None`` if there is none."""
    if agent.handle_steps is None:
        return None
    try:
        return inspect.getsource(agent.handle_steps)
    except (OSError, TypeError):
        return None


# --- runs -------------------------------------------------------------------------------------------------------------


async def start_run(request: Request) -> Response:
    """Start a run from the body of a request; a repeated idempotency key returns the earlier run."""
    body, key = await _body(request, StartRun), request.headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= MAX_KEY and key.isprintable()):
        msg = f"an Idempotency-Key must have 1 to {MAX_KEY} printable characters"
        raise make_input_error(msg)
    if PAGE_KEY in (body.metadata or {}):
        # It sets members of the agent's state, and a page may set only the shared ones.
        msg = f"metadata.{PAGE_KEY}: reserved for AG-UI; pages send it to /ag-ui/AGENT"
        raise make_input_error(msg)
    asked = StartRequest(
        agent=body.agent,
        prompt=body.prompt,
        params=body.params,
        metadata=body.metadata,
        session=body.session_id,
        limits=None if body.limits is None else body.limits.model_dump(exclude_none=True),
        model=body.model,
        images=tuple([{"mime_type": _resolve_picture_type(one), "data": one.data} for one in body.images]),
    )
    if body.turn and key is not None:
        msg = "turn: leave out the Idempotency-Key; of two requests for the same turn, the second is refused"
        raise make_input_error(msg)
    caller = require_caller(request)
    if body.model is not None:
        # Another model has another price and provider, for which the limits of the agent were not written.
        caller.must("admin")
    asked = await _add_previous_run_of_turn(request, body, asked)
    try:
        run, is_new = await get_run_service(request).launcher.start(caller, asked, key=key)
    except MissingKey as error:
        # A caller with the scope `admin` is probably the operator, so that caller gets the full message.
        if not caller.may("admin"):
            raise
        raise Problem(error.message, status=503, kind="missing_key") from error
    return _make_started_response(request, run, is_new=is_new)


def _resolve_picture_type(picture: Picture) -> str:
    """
    Return the media type of a picture, detected or else stated; raise ``InputError`` for one that is not accepted.

    Raises:
        InputError: For invalid base64, and for types that models do not accept.
    """
    try:
        data = base64.b64decode(picture.data, validate=True)
    except (binascii.Error, ValueError):
        msg = "images: data is not valid base64"
        raise make_input_error(msg) from None
    kind = resolve_media_type(picture.mime_type, data)
    if kind not in IMAGES:
        found = repr(kind) if kind else "of an unknown type"
        msg = f"images: the data is {found}; accepted types: {', '.join(IMAGES)}"
        raise make_input_error(msg)
    return kind


async def _add_previous_run_of_turn(request: Request, body: StartRun, asked: StartRequest) -> StartRequest:
    """
    Return the request of a turn with the last run of its conversation; return other requests unchanged.

    Raises:
        InputError: For a turn without a session, and for images in a stored conversation.
        Problem: 409 if the last run has not ended.
    """
    keeps = get_run_service(request).conversations.stores_messages
    if keeps and body.images and body.session_id is not None:
        msg = "images: a conversation that this server stores accepts only text"
        raise make_input_error(msg)
    if not body.turn:
        return asked
    if body.session_id is None:
        msg = "turn: needs session_id, the name of the conversation"
        raise make_input_error(msg)
    if keeps:
        return asked
    conversation = await CallerConversation.load(request, body.session_id)
    conversation.require_not_running()
    if conversation.last is not None and conversation.last.status in OPEN:
        msg = (
            f"the run {conversation.last.run} of this conversation is suspended; answer its questions or cancel it, "
            "then send the message again"
        )
        raise Problem(msg, status=409, kind="waits", members={"run_id": conversation.last.run})
    return attrs.evolve(asked, is_turn=True, after=conversation.last)


def _make_started_response(request: Request, run: str, *, is_new: bool) -> Response:
    """Return a response 202 with the id of a run and the path of its events."""
    # Starlette finds a path by its name only if the application is not mounted.
    place = f"{request.scope.get('root_path', '')}/runs/{run}/events"
    return StartedRun(run_id=run, events=place, is_new=is_new).response(202)


async def list_runs(request: Request) -> Response:
    """Return a page of the caller's runs, newest first, filtered by the query."""
    given, is_detailed = request.query_params, _parse_flag(request, "details")
    statuses = tuple([word for word in given.get("status", "").split(",") if word])
    if any(word not in STATUSES for word in statuses):
        msg = f"status: must be one of {list_names(STATUSES)}"
        raise make_input_error(msg)
    if "running" in statuses:
        statuses += ("started",)  # it is shown as "running"
    found = await get_run_service(request).reader.list_runs(
        require_caller(request),
        agent=given.get("agent"),
        statuses=statuses,
        before=parse_cursor(request),
        limit=parse_limit(request) + 1,
        owner=given.get("owner"),
        session=given.get("session"),
        search=_parse_search_text(request),
    )
    shown, following = cut_page(found, parse_limit(request), lambda row: (row.created, row.run))
    details = [await _load_run_details(request, row) if is_detailed else None for row in shown]
    runs = [RunSummary(**_make_run_summary_fields(row), details=more) for row, more in zip(shown, details, strict=True)]
    return RunList(runs=runs, next=following).response()


def _parse_search_text(request: Request) -> str | None:
    """Return the query parameter ``search``, ``None`` without one; raise ``InputError`` if it is too long."""
    search = request.query_params.get("search") or None
    if search is not None and len(search) > MAX_SEARCH:
        msg = f"search: must have at most {MAX_SEARCH} characters"
        raise make_input_error(msg)
    return search


def _parse_flag(request: Request, name: str) -> bool:
    """Return whether a query parameter is 1; raise ``InputError`` unless it is 0, 1 or missing."""
    asked = request.query_params.get(name, "0")
    if asked not in ("0", "1"):
        msg = f"{name}: must be 0 or 1"
        raise make_input_error(msg)
    return asked == "1"


async def _load_run_details(request: Request, row: RunRow) -> RunDetails:
    """Return the details of a run for a list: prompt, steps, cost, waits and output."""
    brief = await get_run_service(request).reader.load_summary(row)
    return RunDetails(
        prompt=_format_prompt_or_params(row.request),
        changed=_format_time(row.changed),
        steps=brief.steps,
        cost_usd=brief.cost,
        tokens=brief.tokens,
        seconds=brief.seconds,
        waits=list(brief.waits),
        wakes=None if brief.wakes is None else brief.wakes.isoformat(),
        agents=brief.agents,
        asks=brief.asks,
        doing=brief.doing,
        output=brief.output,
        forked_from=brief.parent,
    )


def _format_prompt_or_params(stored_request: Any) -> str:
    """Return the prompt of a run, else its params as JSON."""
    given = stored_request if isinstance(stored_request, dict) else {}
    said = given.get("prompt") or ""
    params = given.get("params")
    text = said or ("" if not params else json.dumps(params, ensure_ascii=False))
    return truncate_text(str(text), MOST_PROMPT)


def _format_time(seconds: float) -> str:
    """Return a Unix time in ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


async def get_run_page_data(request: Request) -> Response:
    """Return the page data of a run as JSON; with the parameter ``after`` only the changes since."""
    row, views = await get_requested_run(request), request.app.state.views
    return Response(await views.get_run_page_data(row, _parse_after_offset(request)), media_type="application/json")


async def replay_run_for_source_lines(request: Request) -> Response:
    """Replay a run without effects, and return the source lines of its handlers as JSON."""
    row, views = await get_requested_run(request), request.app.state.views
    return Response(
        await views.replay_for_source_lines(row, last=_parse_flag(request, "last")), media_type="application/json"
    )


def _parse_after_offset(request: Request) -> int | None:
    """Return the query parameter ``after`` as an offset, ``None`` without one; raise ``InputError`` if it is no number."""
    after = request.query_params.get("after")
    if after is None:
        return None
    if not (after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS):
        msg = "after: must be the `follow` value of the view"
        raise make_input_error(msg)
    return int(after)


async def list_questions(request: Request) -> Response:
    """Return a page of the open questions of the caller's runs."""
    runs, caller, limit = get_run_service(request), require_caller(request), parse_limit(request)
    views: RunPageData = request.app.state.views
    before, found, is_last = parse_cursor(request), list[tuple[RunRow, OpenQuestion]](), False
    # The cursor is the run and its last listed question. It sorts after the run, so the next page starts with the same run.
    last_run, _, last_question = ("" if before is None else before[1]).partition("\n")
    while len(found) <= limit and not is_last:
        rows = await runs.reader.list_runs(caller, agent=None, statuses=OPEN, before=before, limit=MOST_LISTED)
        is_last = len(rows) < MOST_LISTED
        for row in rows:
            before = row.created, row.run
            asked = [_make_open_question(row, one) for one in await views.load_question_details(row)]
            ids = [one.id for one in asked]
            if row.run == last_run and last_question in ids:
                asked = asked[ids.index(last_question) + 1 :]
            found += [(row, one) for one in asked]
            if len(found) > limit:
                break
    shown, following = cut_page(found, limit, lambda one: (one[0].created, f"{one[0].run}\n{one[1].id}"))
    return QuestionList(questions=[one for _, one in shown], next=following).response()


def _make_open_question(row: RunRow, details: QuestionDetails) -> OpenQuestion:
    """Return an open question with its run and the program that asks it."""
    summary = _make_run_summary_fields(row)
    return OpenQuestion(
        **question_to_json(details.question),
        run_id=row.run,
        agent=row.agent,
        owner=row.owner,
        session_id=summary["session_id"],
        since=_format_time(row.changed),
        program=details.program or None,
        line=details.line or None,
    )


def _make_run_summary_fields(row: RunRow) -> dict[str, Any]:
    """Return the members of a run that each view of it has: id, agent, owner, status, time and conversation."""
    return {
        "run_id": row.run,
        "agent": row.agent,
        "owner": row.owner,
        "status": "running" if row.status == "started" else row.status,
        "created": _format_time(row.created),
        "session_id": None if row.session is None else row.session.partition(":")[2],
    }


def _make_run_view(run: ServedRun) -> RunView:
    """Return a run with its questions, result, cost and waits, as the HTTP API shows it."""
    told = _make_run_summary_fields(run.row) | {"status": run.status}
    return RunView(
        **told,
        phase=run.phase,
        epoch=run.epoch,
        questions=[QuestionView(**question_to_json(one)) for one in run.questions],
        output=run.output,
        text=run.text,
        error=run.error,
        usage=run.usage,
        cost_usd=run.cost,
        waits_for=[_make_wait_view(one) for one in run.waits_for],
        wakes_at=min([one.wakes_at.isoformat() for one in run.waits_for if one.wakes_at is not None], default=None),
        forked_from=None if run.parent is None else ForkOrigin(**run.parent),
        warnings=list(run.warnings),
    )


def _make_wait_view(wait: Waits) -> WaitView:
    """Return a wait of a run as the HTTP API shows it."""
    return WaitView(
        kind=wait.kind,
        said=wait.description,
        path=wait.path,
        seq=wait.seq,
        wakes_at=None if wait.wakes_at is None else wait.wakes_at.isoformat(),
        question=None if wait.question is None else wait.question.id,
        topic=wait.topic or None,
        paths=list(wait.children),
    )


async def get_run(request: Request) -> Response:
    """Return a run with its questions, result and cost."""
    return _make_run_view(
        await get_run_service(request).reader.load_details(await get_requested_run(request))
    ).response()


async def watch_run(request: Request) -> Response:
    """Stream the events of a run as server-sent events, from the first or after the last one that the client has."""
    row, runs, full = await get_requested_run(request), get_run_service(request), _parse_flag(request, "full")
    if full:
        require_caller(request).must("debug")
    after = request.headers.get("last-event-id") or request.query_params.get("after") or None
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(headers=headers, media_type=EVENTS)
    first = None
    try:
        position, events = runs.watcher.parse_position(after), runs.watcher.events(row, after)
        if await runs.watcher.may_have_no_more_events(row, after):
            # A browser reconnects after each end of the stream; only status 204 stops it.
            first = await anext(events, None)
            if first is None:
                return Response(status_code=204)
    except LimitExceeded as error:
        raise Problem(error.message, status=429, kind="too_many_readers", headers={"retry-after": "5"}) from None
    except StepEngineError as error:
        if type(error) is not StepEngineError:  # subclasses have statuses of their own
            raise
        raise InputError(error.message, issues=(f"after: {error.message}",)) from None
    return StreamingResponse(
        encode_event_stream(events, first, position=position, full=full, stopping=runs.state.stopping),
        media_type=EVENTS,
        headers=headers,
    )


async def answer_run(request: Request) -> Response:
    """Answer open questions of a run; a refusal lists the open questions and earlier answers."""
    row, runs, body = await get_requested_run(request), get_run_service(request), await _body(request, AnswerQuestions)
    given = {name: _parse_answer(value) for name, value in body.answers.items()}
    try:
        await runs.messenger.answer(require_caller(request), row, given)
    except AnswerRejected as error:
        open_ = [question_to_json(one) for one in (await runs.reader.load_details(row)).questions]
        first = await runs.messenger.list_stored_answers(row, given.keys() - {one["id"] for one in open_})
        told = [{"id": id_, "by": by, "answer": answer} for id_, by, answer in first]
        raise problem_of(error, members={"open": open_, "answered": told}) from None
    return Accepted(run_id=row.run).response(202)


def _parse_answer(value: bool | str | AnswerObject) -> AnswerLike:  # noqa: FBT001 - yes and no are answers
    """Convert an answer in a body to an ``Answer``; a boolean or a text is returned unchanged."""
    if isinstance(value, bool | str):
        return value
    return Answer(**value.model_dump())


async def post_message(request: Request) -> Response:
    """Send a message to a topic of a run; a topic of webhooks needs the scope admin."""
    row, body = await get_requested_run(request), await _body(request, PostMessage)
    if body.topic in request.app.state.webhooks.topics:
        # The run trusts the signature of a service. Its owner may be who gains by the event, such as who has to pay.
        require_caller(request).must("admin")
    is_new = await get_run_service(request).messenger.send_message(
        row, body.topic, body.value, id=body.id, path=body.path
    )
    return MessageReceipt(run_id=row.run, is_new=is_new).response(202)


async def send_run_input(request: Request) -> Response:
    """Send user input to a run: its next model call gets it."""
    row, body = await get_requested_run(request), await _body(request, SayInput)
    await get_run_service(request).messenger.send_user_input(row, body.text)
    return Accepted(run_id=row.run).response(202)


async def deliver_tool_result(request: Request) -> Response:
    """Deliver the result of a call of a deferred tool to a run."""
    row, body = await get_requested_run(request), await _body(request, ToolResultBody)
    await get_run_service(request).messenger.deliver_tool_result(
        row, request.path_params["call"], body.result, body.path
    )
    return Accepted(run_id=row.run).response(202)


async def cancel_run(request: Request) -> Response:
    """Request the cancellation of a run."""
    row, body = await get_requested_run(request), await _body(request, CancelRun, may_be_empty=True)
    await get_run_service(request).messenger.cancel(row, body.reason)
    return Accepted(run_id=row.run).response(202)


async def resume_run(request: Request) -> Response:
    """Resume a run that stopped without a result; options for changed code need the scope admin."""
    row, body = await get_requested_run(request), await _body(request, ResumeRun, may_be_empty=True)
    if body.allow_repeat and body.on_divergence != "extend":
        msg = "allow_repeat: needs on_divergence extend"
        raise make_input_error(msg)
    if body.on_divergence != "raise":
        # A recorded approval or result may then apply to another call.
        require_caller(request).must("admin")
    await get_run_service(request).launcher.resume(row, None if body.on_divergence == "raise" else body)
    return Accepted(run_id=row.run).response(202)


async def replay_run(request: Request) -> Response:
    """Replay a run with the current agents, and return the result or the first divergence."""
    row, caller = await get_requested_run(request), require_caller(request)
    body, difference, result = await _body(request, ReplayRun, may_be_empty=True), None, None
    try:
        live = parse_live_kinds(body.live, has_pace=False)
    except JournalError as error:
        raise make_input_error(error.message) from None
    if live:
        # A replay asks no person: recorded approvals allow the effects a second time.
        caller.must("run" if "model_call" in live else "admin")
    try:
        result = await get_run_service(request).launcher.replay(row, live)
    except ReplayDivergence as error:
        difference = _make_divergence_view(error)
    return ReplayView(
        run_id=row.run,
        difference=difference,
        status=None if result is None else result.status.value,
        output=None if result is None else plain(result.output),
        text="" if result is None else result.text,
    ).response()


def _make_divergence_view(error: ReplayDivergence) -> DivergenceView:
    """Return a replay divergence with secrets redacted."""
    # Only its first line: the others name commands for the server's files.
    clean, said = SafeTexts().clean, error.message.partition("\n")[0]
    return DivergenceView(
        kind=error.kind,
        address=error.address,
        step=error.step,
        site=error.site,
        message=clean(said),
        fields=[{"pointer": at, "recorded": clean(a), "now": clean(b)} for at, a, b in error.diff],
    )


async def fork_run(request: Request) -> Response:
    """Fork a run and return the new run, or the report of a fork whose tools the record answers."""
    row, caller, body = await get_requested_run(request), require_caller(request), await _body(request, ForkRun)
    body.require_valid_members_and_scopes(caller)
    made = await get_run_service(request).launcher.fork(caller, row, body)
    if isinstance(made, str):
        return _make_started_response(request, made, is_new=True)
    new, report = made
    refused = report.refused
    return ForkReportView(
        run_id=new.run if report.broke_at else None,
        status=new.status,
        output=plain(report.result.output),
        text=report.result.text,
        error=new.error,
        refused=None if refused is None else {name: plain(getattr(refused, name)) for name in CALL},
        cost_usd=None if report.cost is None else str(report.cost),
        **{name: getattr(report, name) for name in REPORTED},
    ).response()


async def undo_run(request: Request) -> Response:
    """Restore the files that a run wrote, or with ``dry_run`` change nothing; return the paths by what happened to them."""
    row, body = await get_requested_run(request), await _body(request, UndoRun, may_be_empty=True)
    done = await get_run_service(request).undo(row, at=body.at, dry_run=body.dry_run, partial=body.partial)
    return UndoneView(
        restored=list(done.restored),
        removed=list(done.removed),
        created=list(done.created),
        unchanged=list(done.unchanged),
        left=[LeftFile(path=path, why=why) for path, why in done.left],
        unknown=list(done.unknown),
        others=list(done.others),
        dry_run=done.dry_run,
    ).response()


async def get_run_cost(request: Request) -> Response:
    """Return the tokens and the cost of a run, also by agent and by model."""
    row = await get_requested_run(request)
    spent = await get_run_service(request).reader.load_spending(row)
    of_agents, of_models = spent.cost_by_agent, spent.cost_by_model
    return CostView(
        run_id=row.run,
        **_spending_to_dict(spent.usage, spent.cost),
        by_agent={name: Spent(**_spending_to_dict(usage, of_agents[name])) for name, usage in spent.by_agent.items()},
        by_model={name: Spent(**_spending_to_dict(usage, of_models[name])) for name, usage in spent.by_model.items()},
    ).response()


def _spending_to_dict(usage: Usage, cost: Decimal | None) -> dict[str, Any]:
    """Return tokens and cost as JSON values."""
    told = {**plain(usage), "total_tokens": usage.total_tokens}
    return {"usage": told, "cost_usd": None if cost is None else str(cost)}


async def download_journal(request: Request) -> Response:
    """Return the journal of a run as a file of JSON lines."""
    row = await get_requested_run(request)
    # A journal of somebody else has any name that a file can have.
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(row.run, safe='')}.jsonl"}
    return Response(
        await get_run_service(request).reader.read_journal_bytes(row),
        media_type="application/x-ndjson",
        headers=headers,
    )


# --- conversations ----------------------------------------------------------------------------------------------------


def _make_session_summary_fields(row: SessionRow) -> dict[str, Any]:
    """Return the members of a conversation that each view of it has."""
    return {
        "session_id": row.session.partition(":")[2],
        "owner": row.owner,
        "agent": row.agent,
        "status": "running" if row.status == "started" else row.status,
        "runs": row.runs,
        "changed": _format_time(row.changed),
    }


async def list_sessions(request: Request) -> Response:
    """Return a page of the caller's conversations, those with the newest runs first."""
    given, limit = request.query_params, parse_limit(request)
    before = parse_cursor(request)
    found = await get_run_service(request).conversations.list_sessions(
        require_caller(request), owner=given.get("owner"), before=before, limit=limit + 1
    )
    shown, following = cut_page(found, limit, lambda row: (row.changed, row.session))
    return SessionList(
        sessions=[SessionSummary(**_make_session_summary_fields(row)) for row in shown], next=following
    ).response()


async def get_session(request: Request) -> Response:
    """Return a conversation of the caller with its last messages."""
    name, owner = request.path_params["session"], request.query_params.get("owner")
    row, kept = await get_run_service(request).conversations.get_session(require_caller(request), name, owner=owner)
    said = None if kept is None else list(kept.messages)
    last = None if said is None else [_make_message_view(one) for one in said[-MOST_SAID:]]
    return SessionView(
        **_make_session_summary_fields(row),
        turns=None if kept is None else kept.turns,
        usage=None if kept is None else plain(kept.usage),
        messages=last,
        left_out=None if said is None or last is None else len(said) - len(last),
    ).response()


def _make_message_view(message: Message) -> MessageView:
    """Return the role and the text of a message; a long text is cut."""
    text = message_to_text(message)
    shown = cut_after(text, MOST_CHARS)
    return MessageView(role=message.role, text=shown)


async def delete_session(request: Request) -> Response:
    """Delete the messages of a conversation; its runs stay."""
    name, owner = request.path_params["session"], request.query_params.get("owner")
    await get_run_service(request).conversations.delete_messages(require_caller(request), name, owner=owner)
    return Response(status_code=204)


# --- reports ----------------------------------------------------------------------------------------------------------


async def list_reports(request: Request) -> Response:
    """Return a page of summaries of the evaluation reports, newest first."""
    reports: Reports | None = request.app.state.reports
    limit, before = parse_limit(request), parse_cursor(request)
    found = [] if reports is None else await asyncio.to_thread(reports.list_summaries, before, limit + 1)
    shown, following = cut_page(found, limit, lambda one: (one[0].changed, one[0].id))
    return ReportList(reports=[summary for _, summary in shown], next=following).response()


async def get_report(request: Request) -> Response:
    """Return an evaluation report; raise ``Problem`` 404 if there is none."""
    reports: Reports | None = request.app.state.reports
    name = request.path_params["report"]
    found = None if reports is None else await asyncio.to_thread(reports.find_report, name)
    if found is None:
        msg = f"there is no report {name[:200]!r}; GET /reports lists the reports"
        raise Problem(msg, status=404, kind="no_such_report")
    return Response(found.model_dump_json(), media_type="application/json")


# --- schedules ------------------------------------------------------------------------------------------------------


async def list_schedules(request: Request) -> Response:
    """Return each schedule with its next and last run."""
    return ScheduleList(
        schedules=[_make_schedule_view(one) for one in await get_run_service(request).load_schedule_statuses()]
    ).response()


def _make_schedule_view(schedule_status: ScheduleStatus) -> ScheduleView:
    """Return a schedule with its next and last run, as the HTTP API shows it."""
    last = schedule_status.last
    return ScheduleView(
        id=schedule_status.schedule.id,
        agent=schedule_status.schedule.agent_id,
        cron=schedule_status.schedule.cron,
        timezone=schedule_status.schedule.timezone,
        enabled=schedule_status.schedule.enabled,
        next=None if schedule_status.next is None else schedule_status.next.isoformat(),
        last=None if last is None else {"at": last.at.isoformat(), "run": last.run, "status": last.status},
        missed=schedule_status.missed,
    )


async def report_health(request: Request) -> Response:
    """Return status 200 and the number of runs that this process executes."""
    return Health(status="ok", live=get_run_service(request).live_count).response()


async def report_readiness(request: Request) -> Response:
    """Return status 200 if runs can be started, otherwise 503."""
    runs = get_run_service(request)
    status = "ready" if runs.state.is_ready else "away" if runs.state.is_away else "stopping"
    return Health(status=status, live=runs.live_count).response(200 if runs.state.is_ready else 503)


async def get_openapi_document(request: Request) -> Response:
    """Return the OpenAPI document of the server."""
    document: OpenApiDocument = request.app.state.openapi
    return document.make_response(request.scope.get("root_path", "")).response(request)


AFTER = (
    HttpParameter("Last-Event-ID", "The id of the last event that the client received.", location="header"),
    HttpParameter("after", "The same, for clients that cannot send headers; the header takes precedence."),
    HttpParameter("full", "With 1, also the requests to the model and the final state; needs the scope debug.", int),
)
EVENTS = "text/event-stream"
OWNER = HttpParameter("owner", "Another owner than the caller; needs the scope admin.")
PAGE = (
    OWNER,
    HttpParameter("cursor", "The `next` value of the previous page."),
    HttpParameter("limit", f"The most entries to return, 1 to {MOST_LISTED}; 20 by default.", int),
)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET", path="/caller", name="get_caller", scope="read", handler=get_caller, gives={200: CallerView},
        about="Return the name and the scopes of the caller.",
    ),
    Operation(
        method="GET", path="/agents", name="list_agents", scope="read", handler=list_agents, gives={200: AgentList},
        about="List the agents that may be started.",
    ),
    Operation(
        method="GET", path="/agents/{agent}", name="get_agent", scope="read", handler=get_agent, gives={200: AgentDetail},
        refuses=(404,), about="Return an agent: its parameters, and with the scope debug its handler.",
    ),
    Operation(
        method="POST", path="/runs", name="start_run", scope="run", handler=start_run, body=StartRun, gives={202: StartedRun},
        refuses=(409, 413, 415, 429, 503),
        parameters=(HttpParameter("Idempotency-Key", "For a day, a repeated key returns the run of the first request.", location="header"),),
        about="Start a run.\nThe server stores the run on disk before it responds, and resumes it after a crash.",
    ),
    Operation(
        method="GET", path="/runs", name="list_runs", scope="read", handler=list_runs, gives={200: RunList}, refuses=(422,),
        parameters=(
            HttpParameter("agent", "Only runs of this agent."),
            HttpParameter("status", "Only runs with one of these statuses, separated by commas."),
            HttpParameter("session", "Only runs of this conversation, by its id."),
            HttpParameter("search", "Only runs whose prompt, params, id or agent contain this text."),
            HttpParameter("details", "With 1, also the prompt, the cost and the waits of each run.", int),
            *PAGE,
        ),
        about="List your runs, newest first; with the scope admin, those of all owners.",
    ),
    Operation(
        method="GET", path="/runs/{run}", name="look_at_run", scope="read", handler=get_run, gives={200: RunView},
        refuses=(404,), about="Return a run: its status, open questions and result.",
    ),
    Operation(
        method="GET", path="/runs/{run}/view", name="view_run", scope="debug", handler=get_run_page_data, gives={200: "application/json"},
        refuses=(404, 422),
        parameters=(HttpParameter("after", "The `follow` value, or the `after` value of the previous response: only later changes.", int),),
        about="Return the page data of a run: its steps, texts and figures.\nThe format belongs to the page and may change in any version.",
    ),
    Operation(
        method="GET", path="/runs/{run}/lines", name="lines_of_run", scope="debug", handler=replay_run_for_source_lines, gives={200: "application/json"},
        refuses=(404, 422), parameters=(HttpParameter("last", "With 1, only the current position of the handlers.", int),),
        about="Return the lines and variables of the handlers at each step.\nThe format belongs to the page and may change in any version.",
    ),
    Operation(
        method="GET", path="/questions", name="list_questions", scope="read", handler=list_questions, gives={200: QuestionList},
        refuses=(422,), parameters=PAGE[1:], about="List the open questions of your runs; with the scope admin, those of all owners.",
    ),
    Operation(
        method="GET", path="/runs/{run}/events", name="watch_run", scope="read", handler=watch_run, parameters=AFTER,
        gives={200: EVENTS, 204: None}, refuses=(404, 422, 429),
        about=(
            "Watch a run as server-sent events, from the first one, or after the last one that the client received.\n"
            "Each event has an id, which browsers send when they reconnect. 204 means that there are no more events."
        ),
    ),
    Operation(
        method="POST", path="/runs/{run}/answers", name="answer_run", scope="answer", handler=answer_run, body=AnswerQuestions,
        gives={202: Accepted}, refuses=(404, 409, 415),
        about="Answer open questions; all answers are accepted, or none.\nIf an answer is rejected, the error lists the open questions.",
    ),
    Operation(
        method="POST", path="/runs/{run}/messages", name="post_message", scope="run", handler=post_message, body=PostMessage,
        gives={202: MessageReceipt}, refuses=(404, 409, 415), about="Send a message to the receiver of a topic.",
    ),
    Operation(
        method="POST", path="/runs/{run}/input", name="say_to_run", scope="run", handler=send_run_input, body=SayInput,
        gives={202: Accepted}, refuses=(404, 409, 415), about="Send user input to a run; its next model call sees it.",
    ),
    Operation(
        method="POST", path="/runs/{run}/tool-results/{call}", name="give_tool_result", scope="run", handler=deliver_tool_result,
        body=ToolResultBody, gives={202: Accepted}, refuses=(404, 409, 415), about="Send the result of a call of a deferred tool.",
    ),
    Operation(
        method="POST", path="/runs/{run}/cancel", name="cancel_run", scope="run", handler=cancel_run, body=CancelRun,
        gives={202: Accepted}, refuses=(404, 415), about="Cancel a run; a second request changes nothing.",
    ),
    Operation(
        method="POST", path="/runs/{run}/resume", name="resume_run", scope="run", handler=resume_run, body=ResumeRun,
        gives={202: Accepted}, refuses=(404, 409, 415, 429, 503),
        about="Resume a run that stopped without a result.\nIf its code has changed, use `on_divergence`, which needs the scope admin.",
    ),
    Operation(
        method="POST", path="/runs/{run}/replay", name="replay_run", scope="debug", handler=replay_run, body=ReplayRun,
        gives={200: ReplayView}, refuses=(404, 409, 415, 429, 503),
        about="Replay a run with the current agents, and return the first difference from its record.\n"
        "No effect is performed, except the kinds in `live`.",
    ),
    Operation(
        method="POST", path="/runs/{run}/fork", name="fork_run", scope="run", handler=fork_run, body=ForkRun,
        gives={200: ForkReportView, 202: StartedRun}, refuses=(404, 409, 415, 429, 503),
        about="Fork a run: continue it from an effect as a new run.\n"
        "With `tools` the record answers tool calls, and the response is the report of the ended fork. New outcomes (`edit`, "
        "`simulate`), new prompts (`changes`) and repeated effects (`allow_repeat`, `tools` for all) need the scope admin.",
    ),
    Operation(
        method="POST", path="/runs/{run}/undo", name="undo_run", scope="admin", handler=undo_run, body=UndoRun, gives={200: UndoneView},
        refuses=(404, 409, 415),
        about=(
            "Restore the files that a run wrote: all of them or none.\n"
            "If one was changed since, nothing is restored, and the error lists the files. Effects of programs are not undone."
        ),
    ),
    Operation(
        method="GET", path="/runs/{run}/cost", name="cost_of_run", scope="read", handler=get_run_cost, gives={200: CostView},
        refuses=(404,), about="Return what a run and its children have spent so far, by agent and by model.",
    ),
    Operation(
        method="GET", path="/runs/{run}/journal", name="download_journal", scope="debug", handler=download_journal,
        gives={200: "application/x-ndjson"}, refuses=(404,), about="Download the journal of a run.",
    ),
    *FOREIGN,
    *HOOKS,
    *AG_UI,
    *VERCEL,
    *MCP,
    Operation(
        method="GET", path="/sessions", name="list_sessions", scope="read", handler=list_sessions, gives={200: SessionList},
        refuses=(422,), parameters=PAGE, about="List your conversations; with the scope admin, those of all owners.",
    ),
    Operation(
        method="GET", path="/sessions/{session}", name="look_at_session", scope="read", handler=get_session,
        gives={200: SessionView}, refuses=(404, 409), parameters=(OWNER,), about="Return a conversation with its last messages.",
    ),
    Operation(
        method="DELETE", path="/sessions/{session}", name="delete_session", scope="run", handler=delete_session, gives={204: None},
        refuses=(404, 409), parameters=(OWNER,), about="Delete the messages of a conversation; its runs are kept.",
    ),
    Operation(
        method="GET", path="/reports", name="list_reports", scope="read", handler=list_reports, gives={200: ReportList},
        refuses=(422,), parameters=PAGE[1:], about="List the reports of evaluations, newest first.",
    ),
    Operation(
        method="GET", path="/reports/{report}", name="look_at_report", scope="read", handler=get_report, gives={200: Report},
        refuses=(404,), about="Return a report: its cases, with the ids of their runs.\nThe id may contain slashes.",
    ),
    Operation(
        method="GET", path="/schedules", name="list_schedules", scope="read", handler=list_schedules, gives={200: ScheduleList},
        about="List the schedules that start agents.",
    ),
    *METRICS,
    Operation(
        method="GET", path="/health", name="health", scope=None, handler=report_health, gives={200: Health},
        about="Report that the server is up.",
    ),
    Operation(
        method="GET", path="/ready", name="ready", scope=None, handler=report_readiness, gives={200: Health, 503: Health},
        about="Report whether the server accepts runs: not while it shuts down, nor while its database is unreachable.",
    ),
    Operation(
        method="GET", path="/openapi.json", name="openapi", scope=None, handler=get_openapi_document, gives={200: "application/json"},
        about="Return this OpenAPI document.",
    ),
)  # fmt: skip
PAGES: tuple[Operation, ...] = (
    Operation(method="GET", path="/", name="studio", scope=None, handler=get_page, about="The page of the studio."),
    Operation(method="GET", path="/studio/{part}", name="studio_part", scope=None, handler=get_page_file, about="A file of it."),
)  # fmt: skip
"""The routes of the page, only with ``ui=True``. They are not part of the OpenAPI document."""
