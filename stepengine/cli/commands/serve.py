"""``stepengine serve``: runs over HTTP, without an application of your own."""

from __future__ import annotations

import contextlib
import importlib
import logging
import shlex
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import add_guard_rules, choose_policy, make_engine_setup, require_known_models
from stepengine.cli.commands.undo import get_write_root
from stepengine.cli.commands.worker import load_module_contents, print_skipped_file
from stepengine.cli.deployment import resolve_database, run_deployment_command
from stepengine.cli.exits import Exit
from stepengine.cli.options import Model, Options, with_shared_options
from stepengine.cli.running_studios import announce_studio
from stepengine.cli.scripts import ScriptFile, make_run_script, refuse_script_with_server
from stepengine.cli.settings import UsageProblem
from stepengine.cli.toolset import ToolRequest, collect_with_spawnable_agents
from stepengine.data.visible import visible
from stepengine.errors import DatabaseUnavailable, DefinitionError, ExecutorBusy, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.workspace.urls import find_listen_problem, is_loopback_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepengine.debugging.desk import EngineSpec
    from stepengine.durable import DurableEngine
    from stepengine.engine import Engine
    from stepengine.engine.schedules import Schedule
    from stepengine.server import Application
    from stepengine.server.access import Logins
    from stepengine.server.sources import EngineSources

OPERATOR = "operator"
POLLING = 0.2
TYPED = (
    "model",
    "script",
    "base_url",
    "api_key_env",
    "price",
    "workspace",
    "write",
    "shell",
    "web",
    "guard",
    "max_steps",
)
PATHS = ("cwd", "config")


@partial(with_shared_options, without=("agent", "as_json", "quiet", "verbose"))
def serve(
    options: Options,
    module: Annotated[
        str,
        typer.Argument(
            metavar="MODULE",
            help="An agent file, a folder of them, a module, or MODULE:FUNCTION that returns an engine.",
        ),
    ],
    *,
    model: Model = None,
    script: ScriptFile = "",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 uses a free one.", min=0, max=65535)] = 8000,
    runs: Annotated[
        str | None,
        typer.Option(help="A folder, RUNS.db, postgresql://..., or @FILE with that; default: runs.", metavar="PLACE"),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="File with the accepted tokens; default: one token, valid until the server stops.", metavar="FILE"
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name under which clients reach it; may be repeated.", metavar="NAME[:PORT]"),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages that may call it with a token; may be repeated.", metavar="ORIGIN"),
    ] = None,
    reports: Annotated[
        Path | None, typer.Option(help="Show the reports of evaluations in this folder.", metavar="FOLDER")
    ] = None,
    max_live: Annotated[
        int | None, typer.Option(help="Maximum number of active runs; default: 64, with PostgreSQL 500.", min=1)
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that active runs get to finish when it stops.", min=0)] = 10.0,
    webhooks: Annotated[
        Path | None,
        typer.Option(help="JSON file of incoming and outgoing webhooks.", metavar="FILE"),
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(
            help="Member of an agent's context that front ends read and set; may be repeated.", metavar="NAME"
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help="Limit per owner: open-runs, stored-bytes, bytes-per-minute or event-streams; may be repeated.",
            metavar="NAME=AMOUNT",
        ),
    ] = None,
    no_schedules: Annotated[
        bool, typer.Option("--no-schedules", help="Do not start the schedules of the agents.")
    ] = False,
    executor: Annotated[
        str, typer.Option(help="With PostgreSQL: its id as a worker; default: HOST-PORT of this machine.")
    ] = "",
    no_work: Annotated[
        bool, typer.Option("--no-work", help="With PostgreSQL: leave the runs to `stepengine deploy worker`.")
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve the page of `stepengine studio`, too; a link logs a browser in.")
    ] = False,
) -> Exit:
    r"""
    Serve runs over HTTP until stopped.

    Clients start runs, watch them as server-sent events, answer questions, send messages, cancel and fork.
    /openapi.json describes all endpoints. AG-UI front ends use /ag-ui/AGENT, the AI SDK uses /vercel/AGENT, and MCP
    clients find the agents as tools at /mcp. Each request needs a token, and a run belongs to the owner of the
    token that started it. Without --tokens, the server prints one token, valid until it stops.

    MODULE defines agents as for `stepengine deploy worker`: `agents = [...]` or `agent = ...`, and optionally
    `tools`, `models` and `options`. Tool calls that change something or run a program need approval, unless --write
    or --shell allows them. --script needs no model and no key: each run starts with the first reply of FILE; a
    resumed or forked run continues after the replies in its record.

    Runs that are interrupted when the server stops, or is killed, resume at the next start with the same --runs.
    Several servers may share one store. Journals from elsewhere are not resumed. Needs the extra `serve`.

    With --runs postgresql://USER@HOST/DATABASE, or @FILE with such a URL, runs are stored in a database like those
    of `stepengine deploy worker`. The server is a worker itself, unless --no-work is given. Any number of servers
    and workers may share a database; each needs its own --executor, and keeps it across restarts. Runs above
    --max-live wait in the database instead of being refused. Needs the extra `durable`, too. The FILE of --webhooks
    must be readable by its owner alone: "topics" maps each topic to the secrets of services that send events to
    runs at /hooks/TOPIC/RUN; "out" has the URL that is notified of questions and ends.

    --quota sets a limit per owner, such as open-runs=100, stored-bytes=2GiB or bytes-per-minute=none. A request
    above a quota gets status 429.

    Exit codes:
      0    it was stopped
      2    wrong usage or configuration
      4    another process uses the same --executor
      6    the database cannot be reached

    Examples:
      stepengine serve agents
      stepengine serve agents --script replies.json
      stepengine tokens add web --scopes run,read,answer --file tokens.json
      stepengine serve my_agents.py --tokens tokens.json --runs runs.db
      stepengine serve agents --tokens tokens.json --runs @/run/secrets/db
      stepengine serve agents --webhooks webhooks.json
      stepengine serve shop.agents:make_engine --tokens tokens.json \
          --host 0.0.0.0 --allow-host shop.example.com
    """
    return serve_runs(
        attrs.evolve(options, model=model, script=script, quiet=True).with_settings(),
        ServeOptions(
            module=module, host=host, port=port, runs=runs, tokens=tokens, hosts=allow_host or (), cors=cors or (), reports=reports,
            most=max_live, drain=drain, webhooks=webhooks, shares=share or (), schedules=not no_schedules, executor=executor,
            works=not no_work, ui=ui, quotas=quota or (),
        ),
    )  # fmt: skip


@frozen(kw_only=True)
class ServeOptions:
    """
    The options of ``stepengine serve``.

    Attributes:
        opens: Whether a browser is opened at the page.
        folder: The folder that ``stepengine studio --link`` uses to find the page.
    """

    module: str
    host: str = "127.0.0.1"
    port: int = 8000
    runs: str | None = None
    tokens: Path | None = None
    hosts: Sequence[str] = ()
    cors: Sequence[str] = ()
    reports: Path | None = None
    most: int | None = None
    drain: float = 10.0
    webhooks: Path | None = None
    shares: Sequence[str] = ()
    schedules: bool = True
    executor: str = ""
    works: bool = True
    ui: bool = False
    opens: bool = False
    folder: Path = Path()
    quotas: Sequence[str] = ()


def serve_runs(options: Options, serve_options: ServeOptions) -> Exit:
    """
    Serve runs over HTTP until a signal.

    Raises:
        UsageProblem: when the options do not fit together, or the runs cannot be served.
    """
    from stepengine.server import app
    from stepengine.server.access import LOOPBACK, Logins
    from stepengine.server.extra import require_extra_package
    from stepengine.server.quotas import parse_quotas

    require_extra_package()
    require_extra_package("uvicorn")
    _require_usable_host(serve_options)
    _refuse_unusable_script(options, serve_options)
    sources, left_out = None, list[str]()
    if serve_options.ui and not _parse_engine_function_name(serve_options.module):
        sources = _make_engine_reloader(serve_options.module, options, left_out)
    engine, schedules = load_engine_and_schedules(serve_options.module, options, left_out.append)
    for problem in left_out:
        print_skipped_file(problem)
    if sources is not None:
        sources.record_file_hashes()
    engine, place = _choose_engine_and_run_store(engine, serve_options)
    logins = Logins() if serve_options.ui else None
    host = serve_options.host
    # The printed links and examples have these, also if a proxy forwards requests under another name.
    own_hosts = (*LOOPBACK, f"[{host}]" if ":" in host else host) if is_loopback_host(host) else ()
    with _use_given_or_temporary_tokens(serve_options.tokens) as (file, token):
        try:
            served = app(
                engine,
                **place,
                tokens=file,
                logins=logins,
                ui=serve_options.ui,
                maker=make_engine_spec(serve_options.module, options) if serve_options.ui else None,
                script=Path(options.script).name,
                sources=sources,
                schedules=schedules if serve_options.schedules else (),
                roots=[get_write_root(options)],
                reports=serve_options.reports,
                drain=serve_options.drain,
                webhooks=serve_options.webhooks,
                shares=serve_options.shares,
                hosts=(*own_hosts, *serve_options.hosts),
                cors=serve_options.cors,
                quotas=parse_quotas(serve_options.quotas),
            )
        except StepEngineError as error:
            raise UsageProblem(error.message) from error
        agents = [agent.id for agent in engine.agents]
        print_links = partial(
            _print_links_and_open_browser,
            serve_options,
            token=token,
            logins=logins,
            agents=agents,
            script=options.script,
        )
        with _print_engine_warnings(), contextlib.ExitStack() as until_end:

            def announce_and_print_links(url: str) -> None:
                """Announce a studio to other commands until the server ends, and print the links to it."""
                address, name = url.partition("://")[2], next((one for one in serve_options.hosts if one != "*"), "")
                if name and not own_hosts:
                    # The server refuses other names, and a wildcard address leads nowhere.
                    port = address.rpartition(":")[2]
                    address = name if name.rpartition(":")[2].isdecimal() else f"{name}:{port}"
                if logins is not None:
                    until_end.enter_context(
                        announce_studio(serve_options.folder, url, address, logins.make_operator_token())
                    )
                print_links(f"http://{address}")

            return run_deployment_command(_serve_until_signal(served, serve_options, announce_and_print_links))


def _require_usable_host(serve_options: ServeOptions) -> None:
    """Raise ``UsageProblem`` for a host that cannot be listened on, and for one that others reach without tokens and host names."""
    if is_loopback_host(serve_options.host):
        return
    if problem := find_listen_problem(serve_options.host):
        msg = (
            f"--host {serve_options.host} cannot be used: {problem}; pass an address of this machine, such as 127.0.0.1"
        )
        raise UsageProblem(msg)
    if serve_options.tokens is None or not serve_options.hosts:
        msg = (
            f"--host {serve_options.host} makes the server reachable from other machines: pass the accepted tokens with --tokens FILE, "
            "and each host name that clients use with --allow-host NAME"
        )
        raise UsageProblem(msg)


def _refuse_unusable_script(options: Options, serve_options: ServeOptions) -> None:
    """Raise ``UsageProblem`` for ``--script`` with options or an engine that it cannot be combined with."""
    if not options.script:
        return
    refuse_script_with_server(options)
    if _parse_engine_function_name(serve_options.module):
        msg = (
            f"--script replaces the models of agents in files, but {serve_options.module} returns an engine with its own models; "
            "leave --script out"
        )
        raise UsageProblem(msg)
    if serve_options.runs is not None and _is_database_url_or_file(serve_options.runs):
        msg = "--script needs --runs with a folder or RUNS.db; with a database, its workers call the models"
        raise UsageProblem(msg)


def _choose_engine_and_run_store(
    engine: Engine | DurableEngine, serve_options: ServeOptions
) -> tuple[Engine | DurableEngine, dict[str, Any]]:
    """Return the engine, made durable if runs are in a database, and the options for the store of runs."""
    from stepengine.engine import Engine

    if serve_options.runs is not None and _is_database_url_or_file(serve_options.runs):
        own = serve_options.executor or f"{socket.gethostname()}-{serve_options.port}"
        engine = _make_durable_engine(
            engine, serve_options.runs, executor=own, works=serve_options.works, max_runs=serve_options.most
        )
    elif serve_options.executor or not serve_options.works:
        msg = "--executor and --no-work need --runs postgresql://...; otherwise this process executes the runs"
        raise UsageProblem(msg)
    if isinstance(engine, Engine):
        return engine, {"runs": serve_options.runs or "runs", "max_live": serve_options.most}
    if serve_options.runs is None or _is_database_url_or_file(serve_options.runs):
        return engine, {}
    msg = f"--runs {serve_options.runs} is not a database, and MODULE:FUNCTION made a DurableEngine, which has one; leave --runs out"
    raise UsageProblem(msg)


def _is_database_url_or_file(text: str) -> bool:
    """Return whether a text is a PostgreSQL URL or ``@FILE``."""
    return text.startswith("@") or text.partition("://")[0].partition("+")[0] in ("postgres", "postgresql")


def _make_durable_engine(
    engine: Engine | DurableEngine, db: str, *, executor: str, works: bool, max_runs: int | None
) -> DurableEngine:
    """
    Return a durable engine with the agents of *engine*.

    Raises:
        UsageProblem: when *engine* has its own database, or the options are invalid.
    """
    from stepengine.durable import DurableEngine
    from stepengine.engine import Engine

    if not isinstance(engine, Engine):
        msg = "MODULE:FUNCTION made a DurableEngine, which names its database itself; leave --runs out"
        raise UsageProblem(msg)
    more: dict[str, Any] = {} if max_runs is None else {"concurrency": max_runs}
    try:
        # Clients wait for the start of runs and would notice a polling interval of a second.
        return DurableEngine(
            on=engine, db=resolve_database(db), executor=executor, works=works, polling=POLLING, **more
        )
    except DefinitionError as error:
        raise UsageProblem(error.message) from error


def _make_engine_reloader(module: str, options: Options, known_problems: list[str]) -> EngineSources:
    """Return the object that reloads the engine. A file that cannot be loaded raises ``UsageProblem``, unless it is in *known_problems*."""
    from stepengine.server.sources import EngineSources

    def raise_if_new_problem(problem: str) -> None:
        """Raise ``UsageProblem`` for a problem of a file that did not exist at the start."""
        if problem not in known_problems:
            raise UsageProblem(problem)

    def load_engine() -> Engine:
        """Load the engine again; raise ``UsageProblem`` for a new problem."""
        made: Any = load_engine_and_schedules(module, options, raise_if_new_problem)[0]
        return made  # type: ignore[no-any-return]  # files make engines; only functions make durable engines

    return EngineSources(load_engine, make_engine_spec(module, options))


def _parse_engine_function_name(module: str) -> str:
    """Return the function in ``MODULE:FUNCTION``; ``""`` for files."""
    function = module.rpartition(":")[2]
    return function if ":" in module and function.isidentifier() and not Path(module).exists() else ""


def load_engine_and_schedules(
    module: str, options: Options, on_skipped_file: Callable[[str], object]
) -> tuple[Engine | DurableEngine, Sequence[Schedule]]:
    """
    Return the engine and the schedules for *module*; *on_skipped_file* is called for files that cannot be loaded.

    Raises:
        UsageProblem: when *module* defines no engine or agents.
    """
    from stepengine.adapters.ag_ui import page_hooks
    from stepengine.engine import Engine

    if function := _parse_engine_function_name(module):
        if options.guard:
            msg = "--guard is for agents; give your engine permissions=Policy.guard_injection(), or add injection_rules() to its policy"
            raise UsageProblem(msg)
        return _import_and_call_engine_function(module.rpartition(":")[0], function), ()
    offered = load_module_contents(module, on_skipped_file)
    # The hooks handle the tools, context and state that an AG-UI page sends.
    agents = [attrs.evolve(agent, hooks=agent.hooks + page_hooks()) for agent in offered.agents]
    script = make_run_script(options.script) if options.script else None
    if offered.models is not None or offered.options:
        request = ToolRequest([collect_with_spawnable_agents(agents)], offered.tools, can_ask=True)
        setting = {
            "permissions": choose_policy(options) or request.make_approval_policy(options, None)
        } | offered.options
        setting["permissions"] = add_guard_rules(options, setting["permissions"])
        return Engine(agents, offered.tools, script or offered.models, **setting), offered.schedules
    first, *others = agents
    file = module if Path(module).is_file() else ""
    bench = make_engine_setup(
        attrs.evolve(options, agent=file),
        first,
        others=others,
        is_new=True,
        asks_nobody=True,
        headless=False,
        tools=offered.tools,
    )
    require_known_models(options, agents)
    return bench.engine, offered.schedules


def make_engine_spec(module: str, options: Options) -> EngineSpec:
    """Return a spec that makes the engine again in another process."""
    from stepengine.debugging.desk import EngineSpec
    from stepengine.engine.loader import AgentLocation

    given: dict[str, Any] = {name: getattr(options, name) for name in TYPED}
    for name in PATHS:
        value = getattr(options, name)
        given[name] = None if value is None else str(value)
    place = AgentLocation.from_text(module)
    file = module if place is None else str(place.file)
    files = tuple([one for one in (file, options.script) if one and Path(one).exists()])
    return EngineSpec("stepengine.cli.commands.serve:remake_engine", {"module": module, "options": given}, files)


def remake_engine(module: str, options: dict[str, Any]) -> Engine | DurableEngine:
    """
    Return an engine made from the options of ``stepengine serve``.

    Args:
        module: The typed module.
        options: The options at the start, as ``make_engine_spec`` stores them.

    Raises:
        DefinitionError: when the files no longer define an engine.
    """
    from stepengine.engine.loader import warn_of_skipped_file

    paths = {name: None if options[name] is None else Path(options[name]) for name in PATHS}
    made = attrs.evolve(Options(quiet=True), **{**options, **paths})
    try:
        return load_engine_and_schedules(module, made.with_settings(), warn_of_skipped_file)[0]
    except UsageProblem as error:
        raise DefinitionError(str(error)) from error


def _import_and_call_engine_function(module: str, function: str) -> Engine | DurableEngine:
    """Import a module, call its function, and return the engine; raise ``UsageProblem`` if that fails."""
    from stepengine.durable import DurableEngine
    from stepengine.engine import Engine

    # ``sys.path`` lacks the working folder. It is appended last, so that no file in it hides an installed package.
    sys.path.append(str(Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(module), function)()
    except Exception as error:
        msg = f"{module}:{function} could not make an engine: {type(error).__name__}: {error}"
        raise UsageProblem(msg) from error
    if not isinstance(made, Engine | DurableEngine):
        msg = f"{module}:{function} returned a {type(made).__name__}; name a function without arguments that returns an Engine"
        raise UsageProblem(msg)
    if not made.agents:
        msg = f"{module}:{function} returned an engine without agents, so it can start no run; make it with agents, such as Engine([agent])"
        raise UsageProblem(msg)
    return made


@contextlib.contextmanager
def _use_given_or_temporary_tokens(file: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield the given token file and ``""``, or else a temporary file and its only token; raise if the given file is missing."""
    from stepengine.server import Tokens

    if file is not None:
        if not file.exists():
            msg = f"there is no {file}; `stepengine tokens add NAME --file {shlex.quote(str(file))}` creates it"
            raise UsageProblem(msg)
        yield file, ""
        return
    with tempfile.TemporaryDirectory(prefix="stepengine-") as folder:
        made = Path(folder) / "tokens.json"
        yield made, Tokens.open(made).add(OPERATOR, ["admin"])


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a log record with control characters made visible."""
        return visible(super().format(record))


@contextlib.contextmanager
def _print_engine_warnings() -> Iterator[None]:
    """Print the warnings of the engine on stderr while the block runs; its logger is silent by default."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)


async def _serve_until_signal(
    served: Application, serve_options: ServeOptions, on_listening: Callable[[str], object]
) -> Exit:
    """Listen until a signal, calling *on_listening* with the URL; return the exit code, or raise if it cannot serve."""
    from stepengine.server.uvicorn_server import serve_until_signal

    try:
        await serve_until_signal(served, serve_options.host, serve_options.port, on_listening)
    except (DatabaseUnavailable, ExecutorBusy):
        raise
    except StepEngineError as error:
        raise UsageProblem(error.message) from error
    return Exit.COMPLETED


def _print_links_and_open_browser(
    serve_options: ServeOptions, url: str, *, token: str, logins: Logins | None, agents: Sequence[str], script: str
) -> None:
    """Print the address, the agents and a login link or token of a server, and open the studio if requested."""
    print(f"stepengine: {url} serves {', '.join(agents)}", file=sys.stderr)
    if script:
        print(f"stepengine: the script {visible(script)} supplies the replies; no model is called", file=sys.stderr)
    if logins is not None:
        link = f"{url}{logins.make_login_link()}"
        print(
            f"stepengine: open the studio with this link (for one browser, valid for a minute): {link}", file=sys.stderr
        )
        folder = "" if serve_options.folder == Path() else f" {shlex.quote(str(serve_options.folder))}"
        print(f"stepengine: to print a new link: stepengine studio{folder} --link", file=sys.stderr)
        if serve_options.opens:
            # Opening some browsers blocks until they exit.
            threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()
    if token and not serve_options.opens:
        print(f"stepengine: temporary token with all scopes, valid until the server stops: {token}", file=sys.stderr)
        print(
            f"  curl -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"agent": "{agents[0]}", "prompt": "..."}}\' {url}/runs',
            file=sys.stderr,
        )
    sys.stderr.flush()
