"""``app``: the ASGI application that serves the runs of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.errors import DefinitionError, JournalMissing
from stepengine.journal.history import engine_version
from stepengine.server.access import LOOPBACK, Guard, Tokens, require_caller, reserve_event_stream
from stepengine.server.extra import require_extra_package
from stepengine.server.freed_memory import FreedMemory
from stepengine.server.openapi import OpenApiDocument
from stepengine.server.problems import problem_of
from stepengine.server.runs import GRACE_SECONDS, Runs

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

    from stepengine.debugging.desk import EngineSpec
    from stepengine.durable import DurableEngine
    from stepengine.engine import Engine
    from stepengine.engine.schedules import Schedule
    from stepengine.server.access import Authenticate, Caps, Logins
    from stepengine.server.metrics import Metrics
    from stepengine.server.openapi import Operation
    from stepengine.server.quotas import Quotas
    from stepengine.server.reports import Reports
    from stepengine.server.run_service import RunService
    from stepengine.server.sources import EngineSources
    from stepengine.server.webhooks import Webhooks
    from stepengine.server.workshop import InspectionService
    from stepengine.workspace.workspace import Workspace

MOST_LIVE = 64
OPEN_PATHS = ("/health", "/ready", "/openapi.json", "/hooks/")
"""Those of webhooks ask for a signature instead of a token."""
EVENT_STREAM = "text/event-stream"
ROUTE = "stepengine.route"
"""The key in a scope of the list to which the route of a request appends its name."""


def app(
    engine: Engine | DurableEngine,
    *,
    runs: str | Path | None = None,
    tokens: Tokens | str | Path | None = None,
    authenticate: Authenticate | None = None,
    logins: Logins | None = None,
    agents: Iterable[str] | None = None,
    schedules: Iterable[Schedule] = (),
    roots: Iterable[str | Path | Workspace] = (),
    reports: str | Path | None = None,
    hosts: Collection[str] = LOOPBACK,
    cors: Collection[str] = (),
    caps: Caps | None = None,
    max_live: int | None = None,
    wait_for_answers: float = 60.0,
    drain: float = GRACE_SECONDS,
    webhooks: Webhooks | str | Path | None = None,
    shares: Collection[str] = (),
    ui: bool = False,
    maker: EngineSpec | None = None,
    sources: EngineSources | None = None,
    script: str = "",
    quotas: Quotas | None = None,
) -> Application:
    """
    Return an ASGI application that starts, shows and stores runs; `GET /openapi.json` describes its operations.

    A run belongs to the caller that started it, and other callers cannot find it. Runs that the end of the process interrupts are resumed
    when the application starts again; journals that it did not start are not resumed. The engine is closed with the application.

    Args:
        engine: The engine. Its permissions, limits and models apply to every run. Runs of a ``DurableEngine`` are in its database. This
            engine executes them unless it only submits (``works=False``), as does every other worker.
        runs: Where runs are recorded: a folder that only this user may write, or an SQLite file such as ``RUNS.db``. Several
            servers may share it. A ``DurableEngine`` has its database instead.
        tokens: The tokens of callers: ``Tokens``, or the path of their file, which `stepengine tokens` writes.
        authenticate: A function of a Starlette ``Request``, async or not, that returns the ``Caller`` or ``None``.
        logins: One-time links for browsers.
        agents: The ids of the agents that may be started; by default all of the engine.
        schedules: When agents are started automatically; callers with the scope ``admin`` see these runs.
        roots: The folders that ``file_tools`` of its agents write in; an admin may undo the writes of runs there.
        reports: The folder in which `stepengine eval` writes, such as ``"evals"``; callers with the scope ``read`` see its reports.
        hosts: Host names of the server; by default those of loopback.
        cors: Origins of other pages that may send requests with a token.
        caps: The limits of the requests that a client may send.
        max_live: How many runs may be executed in this process at a time, 64 by default; one more start gets 429. Runs of a
            ``DurableEngine`` above its ``concurrency`` wait in the database.
        wait_for_answers: Seconds that a question waits in memory; then the run is suspended, and an answer resumes it. With a
            ``DurableEngine`` the run is suspended at once, and its event streams stay open for this time.
        drain: Seconds that runs may continue when the application stops; the others are resumed at the next start.
        webhooks: The services that may send events to runs and the one that receives questions and results: ``Webhooks``, or the path of
            their file.
        shares: The members of ``AgentState.context`` that AG-UI pages see and may set. Runs get the data of such pages by the engine's
            ``hooks=stepengine.adapters.ag_ui.page_hooks()``.
        ui: Whether to serve the page of the studio at the application's own path; browsers log in with *logins*.
        maker: How another process makes the engine from the current files. It adds the routes that go back in runs, preview edits and
            evaluate runs; none of them imports the authors' code in this process.
        sources: The files that *engine* was made from; after they were saved, new runs start in an engine that is rebuilt from them.
            Ignored for a ``DurableEngine``, whose workers are elsewhere.
        script: The name of the script that answers in place of the models of *engine*, such as ``"replies.json"``. The page and the list
            of agents show it, so that its replies are not mistaken for those of a model.
        quotas: How much one owner may use; a request over a quota gets 429. By default ``Quotas()``.

    Raises:
        AgentError: If *agents* or a schedule has the id of no agent.
        DefinitionError: If two schedules have the same id, no caller can be identified, runs have no store or two, other users could read the tokens or the
            webhooks, or *reports* is a file.
        DataError: If the file of webhooks or tokens is invalid.
        JournalError: If other users could write *reports*.
    """
    require_extra_package()
    require_extra_package("prometheus_client")
    # Imported here, so that commands without a server, such as `stepengine tokens`, work without the extra.
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException

    from stepengine.server.debug_pages import OPERATIONS as LOOKING
    from stepengine.server.metrics import Metrics
    from stepengine.server.reports import Reports
    from stepengine.server.routes import OPERATIONS, PAGES
    from stepengine.server.webhooks import Webhooks, WebhookSender
    from stepengine.server.workshop import InspectionService

    run_service = _make_run_service(
        engine,
        runs,
        max_live,
        roots,
        agents=agents,
        wait_for_answers=wait_for_answers,
        schedules=schedules,
        drain=drain,
        sources=sources,
        quotas=quotas,
    )
    shown = None if reports is None else Reports(reports)
    known = tokens if isinstance(tokens, Tokens) or tokens is None else Tokens.open(tokens)
    if known is None and authenticate is None and logins is None:
        msg = (
            "serving.app(...) needs tokens=, a file that `stepengine tokens add` wrote, or authenticate=; without one of them it cannot "
            "authenticate callers"
        )
        raise DefinitionError(msg)
    hooks = webhooks if isinstance(webhooks, Webhooks) else Webhooks() if webhooks is None else Webhooks.load(webhooks)
    metrics = Metrics(run_service)
    if hooks.out is not None and run_service.ledger is None:
        msg = 'the server sends no webhooks for runs in a database yet: remove "out" from the webhooks, or serve runs of a folder'
        raise DefinitionError(msg)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        """Start the runs and the sender of webhooks, and close them with the engine at the end of the block."""
        try:
            await run_service.start()
            async with AsyncExitStack() as stack, served.state.freed_memory.trim_periodically():
                if hooks.out is not None and run_service.ledger is not None:
                    await stack.enter_async_context(
                        WebhookSender(
                            run_service, run_service.ledger, hooks.out, delivered=metrics.count_webhook_attempt
                        )
                    )
                yield
        finally:
            await _close_services(served, run_service)
            await run_service.close_engine()

    operations = (*OPERATIONS, *(LOOKING if maker is not None else ()))
    served = Starlette(
        routes=[_make_route(one) for one in (*operations, *(PAGES if ui else ()))],
        lifespan=lifespan,
        exception_handlers={Exception: _make_problem_response, HTTPException: _make_problem_response},
    )
    _store_app_state(served, run_service, hooks, metrics=metrics, shares=shares, reports=shown)
    served.state.script = script
    served.state.openapi = OpenApiDocument(operations, version=engine_version())
    served.state.workshop = None if maker is None else InspectionService(run_service.reader.read_journal_bytes, maker)
    return Application(
        served,
        tokens=known,
        logins=logins,
        authenticate=authenticate,
        hosts=hosts,
        cors=cors,
        open_paths=OPEN_PATHS,
        page_paths=("/", "/studio/") if ui else (),
        caps=caps,
    )


def _store_app_state(
    served: Starlette,
    run_service: RunService,
    hooks: Webhooks,
    *,
    metrics: Metrics,
    shares: Collection[str],
    reports: Reports | None,
) -> None:
    """Create the objects that the routes use, store them in the state of an application, and register the observers of runs."""
    from stepengine.server.foreign import ForeignJournals
    from stepengine.server.mcp import McpEndpoint
    from stepengine.server.routes import AgentSummaries
    from stepengine.server.studio import RunPageData

    served.state.freed_memory = FreedMemory()
    for observer in (metrics, served.state.freed_memory):
        run_service.add_observer(observer)
    # A server behind a proxy knows neither its name nor whether it is https: a redirect could lead a token into the open.
    served.router.redirect_slashes = False
    run_service.quotas.on_refusal = metrics.count_quota_refusal
    served.state.runs, served.state.webhooks, served.state.metrics = run_service, hooks, metrics
    served.state.mcp = McpEndpoint(run_service)
    served.state.views = RunPageData(run_service)
    served.state.foreign = None if run_service.foreign is None else ForeignJournals(run_service, run_service.foreign)
    served.state.agent_summaries = AgentSummaries()
    served.state.shares = tuple(shares)
    served.state.reports = reports


async def _close_services(served: Starlette, run_service: RunService) -> None:
    """Close the inspection service, the runs and the MCP server."""
    workshop: InspectionService | None = served.state.workshop
    if workshop is not None:
        await workshop.close()
    await run_service.close()
    await served.state.mcp.wait_until_stopped()


def _make_run_service(
    engine: Engine | DurableEngine,
    store_path: str | Path | None,
    max_live: int | None,
    roots: Iterable[Any],
    sources: EngineSources | None,
    **options: Any,
) -> RunService:
    """Return ``DurableRuns`` for a ``DurableEngine``, else ``Runs``; raise ``DefinitionError`` for options that the engine cannot have."""
    from stepengine.durable import DurableEngine
    from stepengine.server.durable_runs import DurableRuns

    if isinstance(engine, DurableEngine):
        given = [name for name, value in (("runs", store_path), ("max_live", max_live)) if value is not None]
        if given:
            msg = f"a DurableEngine takes no {given[0]}=: its database stores its runs, and queues those that cannot start yet"
            raise DefinitionError(msg)
        return DurableRuns(engine, **options)
    if store_path is None:
        msg = "serving.app(...) needs runs=, a folder or an SQLite file; only a DurableEngine already has a store for its runs"
        raise DefinitionError(msg)
    live = MOST_LIVE if max_live is None else max_live
    return Runs(engine, store_path, max_live=live, roots=roots, sources=sources, **options)


class Application(Guard):
    """The ASGI application that ``app`` returns: run by a server such as uvicorn, or mounted below a path of another one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and count it, even if the guard refuses it."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        from stepengine.server.metrics import handle_and_measure

        served: Starlette = self.app  # type: ignore[assignment]  # what `app` puts there
        metrics: Metrics = served.state.metrics
        route: list[str] = []
        await handle_and_measure(super().__call__, {**scope, ROUTE: route}, receive, send, metrics=metrics, route=route)

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """
        Start the run service, and close it with the engine at the end of the block.

        A server does this automatically. Starlette and FastAPI do not do it for a mounted application, so pass it:
        ``FastAPI(lifespan=served.lifespan)``.
        """
        served: Starlette = self.app  # type: ignore[assignment]  # what `app` puts there
        async with served.router.lifespan_context(served):
            yield

    def end_event_streams(self) -> None:
        """Set ``stopping``, which ends all event streams and MCP requests, so that the server can stop; clients reconnect."""
        served: Starlette = self.app  # type: ignore[assignment]  # what `app` puts there
        served.state.runs.state.stopping.set()


def _make_route(operation: Operation) -> Route:
    """Return a route that checks the scope of the caller, calls the handler, and answers errors with problem documents."""
    from starlette.routing import Route

    async def check_scope_and_answer(request: Request) -> Response:
        """Check the scope of the caller and call the handler; answer an error with a problem document."""
        request.scope.get(ROUTE, []).append(operation.name)
        try:
            if operation.scope is not None:
                require_caller(request).must(operation.scope)
            if EVENT_STREAM in operation.gives.values():
                # Before anything happens: a turn of a page is a run.
                request.app.state.runs.quotas.require_event_stream_quota(reserve_event_stream(request))
            return await operation.handler(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a document
            problem = problem_of(error)
            if isinstance(error, JournalMissing) and "run" in request.path_params:
                # The ledger has the run: an unknown one is refused before.
                problem.message = "the run has no record: it has not started yet, or its journal was deleted"
            return problem.response()

    # These names may contain slashes.
    path = (
        operation.path.replace("{session}", "{session:path}")
        .replace("{report}", "{report:path}")
        .replace("{part}", "{part:path}")
    )
    return Route(path, check_scope_and_answer, methods=[operation.method], name=operation.name)


async def _make_problem_response(request: Request, error: Exception) -> Response:
    """Return the problem document for an error of a route."""
    from starlette.routing import Match

    problem = problem_of(error)
    if problem.status == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette lists only the methods of the first route of a path, and each route here has one method.
        asked = {**request.scope, "path_params": {}}
        routes = [one for one in request.app.routes if one.matches(asked)[0] is not Match.NONE]
        problem.headers = {"Allow": ", ".join(sorted({method for one in routes for method in one.methods}))}
    return problem.response()
