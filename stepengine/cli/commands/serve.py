"""``stepengine serve``: runs over HTTP, without an application to write."""

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

from stepengine.cli.bench import bench_for, policy_of
from stepengine.cli.commands.undo import root_of
from stepengine.cli.commands.worker import offered_by
from stepengine.cli.deployment import database_of, report_problems
from stepengine.cli.exits import Exit, complain
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.running_studios import announced_studio
from stepengine.cli.scripts import ScriptFile, refuse_two_models, run_script_of
from stepengine.cli.settings import UsageProblem
from stepengine.cli.toolset import ToolRequest, with_held
from stepengine.data.visible import visible
from stepengine.errors import DefinitionError, StepEngineError
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepengine.debugging.desk import Maker
    from stepengine.durable import DurableEngine
    from stepengine.engine import Engine
    from stepengine.engine.schedules import Schedule
    from stepengine.server import Application
    from stepengine.server.access import Logins
    from stepengine.server.sources import Sources

__all__ = ("Served", "engine_again", "serve", "serve_runs")

OPERATOR = "operator"
POLLING = 0.2
TYPED = ("model", "script", "base_url", "api_key_env", "price", "workspace", "write", "shell", "web", "max_steps")
PATHS = ("cwd", "config")
NEAR = ("127.0.0.1", "::1", "localhost")


@partial(with_options, without=("agent", "as_json", "quiet", "verbose"))
def serve(
    options: Options,
    module: Annotated[
        str,
        typer.Argument(
            metavar="MODULE", help="An agent file, a folder of them, a module, or MODULE:FUNCTION that makes an engine."
        ),
    ],
    *,
    model: Model = None,
    script: ScriptFile = "",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    runs: Annotated[
        str | None,
        typer.Option(help="A folder, RUNS.db, postgresql://..., or @FILE with that; default: runs.", metavar="PLACE"),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="Who may come in, by `stepengine tokens`; default: a token for this time.", metavar="FILE"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name under which clients reach it; may be repeated.", metavar="NAME[:PORT]"),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Pages of this origin may call it with a token; may be repeated.", metavar="ORIGIN"),
    ] = None,
    reports: Annotated[
        Path | None, typer.Option(help="Show the reports of evaluations in this folder.", metavar="FOLDER")
    ] = None,
    max_live: Annotated[
        int | None, typer.Option(help="Runs under way at a time; default: 64, in PostgreSQL 500.", min=1)
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that runs get when it is told to stop.", min=0)] = 10.0,
    webhooks: Annotated[
        Path | None,
        typer.Option(help="Who may send events to runs, and who is told of questions: JSON.", metavar="FILE"),
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(help="A member of an agent's context that pages see and set; may be repeated.", metavar="NAME"),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help="Of each owner: open-runs, stored-bytes or bytes-per-minute; may be repeated.", metavar="NAME=AMOUNT"
        ),
    ] = None,
    no_schedules: Annotated[
        bool, typer.Option("--no-schedules", help="Leave the schedules beside the agents to others.")
    ] = False,
    executor: Annotated[
        str, typer.Option(help="In PostgreSQL: its own id as a worker; default: HOST-PORT of this machine.")
    ] = "",
    no_work: Annotated[
        bool, typer.Option("--no-work", help="In PostgreSQL: leave the runs to `stepengine deploy worker`.")
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Show the page of `stepengine studio`, too; a link lets a browser in.")
    ] = False,
) -> Exit:
    r"""
    Serve runs over HTTP until told to stop.

    Clients start runs, watch them as server-sent events, answer what they ask, say something, cancel, go back. All that can
    be asked stands in /openapi.json. Pages that speak AG-UI go to /ag-ui/AGENT, those with the AI SDK to /vercel/AGENT, and
    clients of MCP find the agents as tools at /mcp. Each request brings a token; a run belongs to whoever started it. Without --tokens
    there is one token, which is shown at the start and ends with the server.

    MODULE names agents as for `stepengine deploy worker`: `agents = [...]` or `agent = ...`, and beside them, where they are
    needed, `tools`, `models` and `options`. Each call of a tool that changes something or runs a program needs an approval,
    unless --write or --shell allows it. With --script no model is asked and no key is needed:
    each run gets the replies of FILE from the first on, and one that is resumed or forked those behind its record.

    What is under way when the server is stopped, or killed, goes on at the next start with the same --runs. Several may
    share one place. Journals that it did not start are left alone. Needs the extra `serve`.

    With --runs postgresql://USER@HOST/DATABASE, or @FILE with such a URL, runs are in a database as those of `stepengine
    worker`. The server is a worker itself, unless --no-work leaves that to others. Any number of servers and workers
    share a database; each has an --executor of its own, under which it is started again after its end. What is more than
    --max-live waits there instead of being refused. Needs the extra `durable` as well.
    FILE of --webhooks, which nobody else may read: "topics" holds by topic the secrets of services that send events to
    runs, at /hooks/TOPIC/RUN; "out" holds the url that is told of questions and ends.

    --quota changes how much one owner may use, such as open-runs=100, stored-bytes=2GiB or bytes-per-minute=none. A request over a quota
    is answered with 429.

    Leaves with:
      0    it was told to stop
      2    wrong usage or configuration
      4    another process works under the same --executor
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
        attrs.evolve(options, model=model, script=script, quiet=True).in_force(),
        Served(
            module=module, host=host, port=port, runs=runs, tokens=tokens, hosts=allow_host or (), cors=cors or (), reports=reports,
            most=max_live, drain=drain, webhooks=webhooks, shares=share or (), schedules=not no_schedules, executor=executor,
            works=not no_work, ui=ui, quotas=quota or (),
        ),
    )  # fmt: skip


@frozen(kw_only=True)
class Served:
    """
    What is to be served, and how; the attributes are the options of ``stepengine serve``.

    Attributes:
        opens: Whether a browser is opened at the page.
        folder: The folder by which ``stepengine studio --link`` finds the page again.
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


def serve_runs(options: Options, wanted: Served) -> Exit:
    """
    Serve until told to stop.

    Raises:
        UsageProblem: when it cannot be served so.
    """
    from stepengine.server import app
    from stepengine.server.access import LOOPBACK, Logins
    from stepengine.server.extra import check_extra
    from stepengine.server.quotas import parse_quotas

    check_extra()
    check_extra("uvicorn")
    _check_reach(wanted)
    _check_script(options, wanted)
    sources, left_out = None, list[str]()
    if wanted.ui and not _function_of(wanted.module):
        sources = _sources(wanted.module, options, left_out)
    engine, schedules = engine_of(wanted.module, options, left_out.append)
    for problem in left_out:
        complain(f"{problem}; this file is left out")
    if sources is not None:
        sources.taken()
    engine, place = _placed(engine, wanted)
    logins = Logins() if wanted.ui else None
    with _tokens(wanted.tokens) as (file, token):
        try:
            served = app(
                engine,
                **place,
                tokens=file,
                logins=logins,
                ui=wanted.ui,
                maker=maker_of(wanted.module, options) if wanted.ui else None,
                script=Path(options.script).name,
                sources=sources,
                schedules=schedules if wanted.schedules else (),
                roots=[root_of(options)],
                reports=wanted.reports,
                drain=wanted.drain,
                webhooks=wanted.webhooks,
                shares=wanted.shares,
                hosts=wanted.hosts or LOOPBACK,
                cors=wanted.cors,
                quotas=parse_quotas(wanted.quotas),
            )
        except StepEngineError as error:
            raise UsageProblem(error.message) from error
        agents = [agent.id for agent in engine.agents]
        begun = partial(_say_where, wanted, token=token, logins=logins, agents=agents, script=options.script)
        with _warnings_shown(), announced_studio(wanted.folder) as announcement:

            def listens(url: str) -> None:
                if logins is not None:
                    host = next((name for name in wanted.hosts if name != "*"), url.partition("://")[2])
                    announcement.announce(url, host, logins.make_token())
                begun(url)

            return report_problems(_until_told(served, wanted, listens))


def _check_reach(wanted: Served) -> None:
    if wanted.host not in NEAR and (wanted.tokens is None or not wanted.hosts):
        msg = (
            f"--host {wanted.host} lets other machines in: name those that may come with --tokens FILE, and the names under which "
            "they reach it with --allow-host NAME"
        )
        raise UsageProblem(msg)


def _check_script(options: Options, wanted: Served) -> None:
    if not options.script:
        return
    refuse_two_models(options)
    if _function_of(wanted.module):
        msg = f"--script stands in for the models of agents in files; {wanted.module} makes an engine with models of its own"
        raise UsageProblem(msg)
    if wanted.runs is not None and _is_database(wanted.runs):
        msg = "--script is for runs of a folder or of RUNS.db; those of a database are the workers', who ask models"
        raise UsageProblem(msg)


def _placed(engine: Engine | DurableEngine, wanted: Served) -> tuple[Engine | DurableEngine, dict[str, Any]]:
    """Return the engine, in the database where runs are in one, and where else they are."""
    from stepengine.engine import Engine

    if wanted.runs is not None and _is_database(wanted.runs):
        own = wanted.executor or f"{socket.gethostname()}-{wanted.port}"
        engine = _durable(engine, wanted.runs, executor=own, works=wanted.works, most=wanted.most)
    elif wanted.executor or not wanted.works:
        msg = "--executor and --no-work are for --runs postgresql://...; without that this process does the work"
        raise UsageProblem(msg)
    if isinstance(engine, Engine):
        return engine, {"runs": wanted.runs or "runs", "max_live": wanted.most}
    if wanted.runs is None or _is_database(wanted.runs):
        return engine, {}
    msg = f"--runs {wanted.runs} is not a database, and MODULE:FUNCTION made a DurableEngine, which has one; leave --runs out"
    raise UsageProblem(msg)


def _is_database(place: str) -> bool:
    return place.startswith("@") or place.partition("://")[0].partition("+")[0] in ("postgres", "postgresql")


def _durable(engine: Engine | DurableEngine, db: str, *, executor: str, works: bool, most: int | None) -> DurableEngine:
    """
    Return an engine with the agents of *engine* whose runs are in a database.

    Raises:
        UsageProblem: when its runs cannot be there.
    """
    from stepengine.durable import DurableEngine
    from stepengine.engine import Engine

    if not isinstance(engine, Engine):
        msg = "MODULE:FUNCTION made a DurableEngine, which names its database itself; leave --runs out"
        raise UsageProblem(msg)
    more: dict[str, Any] = {} if most is None else {"concurrency": most}
    try:
        # Somebody waits for what is started here, and sees a second.
        return DurableEngine(on=engine, db=database_of(db), executor=executor, works=works, polling=POLLING, **more)
    except DefinitionError as error:
        raise UsageProblem(error.message) from error


def _sources(module: str, options: Options, left_out: list[str]) -> Sources:
    """Return the files of which the engine is made; of a folder those that could not be loaded at the start may stay so."""
    from stepengine.server.sources import Sources

    def leave_out(problem: str) -> None:
        if problem not in left_out:
            raise UsageProblem(problem)

    def load() -> Engine:
        made: Any = engine_of(module, options, leave_out)[0]
        return made  # type: ignore[no-any-return]  # files make engines; only functions make what lies in a database

    return Sources(load, maker_of(module, options))


def _function_of(module: str) -> str:
    """Return the name of the function that makes an engine; ``""`` where files are meant."""
    function = module.rpartition(":")[2]
    return function if ":" in module and function.isidentifier() and not Path(module).exists() else ""


def engine_of(
    module: str, options: Options, leave_out: Callable[[str], object] | None = None
) -> tuple[Engine | DurableEngine, Sequence[Schedule]]:
    """
    Return the engine of what was typed, and the schedules beside its agents; *leave_out* is told of files that cannot be loaded.

    Raises:
        UsageProblem: when there is none.
    """
    from stepengine.adapters.ag_ui import page_hooks
    from stepengine.engine import Engine

    if function := _function_of(module):
        return _make_engine(module.rpartition(":")[0], function), ()
    offered = offered_by(module, leave_out)
    # What a page of AG-UI sends beside words: its tools, context and state.
    agents = [attrs.evolve(agent, hooks=agent.hooks + page_hooks()) for agent in offered.agents]
    script = run_script_of(options.script) if options.script else None
    if offered.models is not None or offered.options:
        request = ToolRequest([with_held(agents)], offered.tools, can_ask=True)
        setting = {"permissions": policy_of(options) or request.policy(options, None)} | offered.options
        return Engine(agents, offered.tools, script or offered.models, **setting), offered.schedules
    first, *others = agents
    file = module if Path(module).is_file() else ""
    bench = bench_for(
        attrs.evolve(options, agent=file),
        first,
        others=others,
        is_new=True,
        asks_nobody=True,
        headless=False,
        tools=offered.tools,
    )
    return bench.engine, offered.schedules


def maker_of(module: str, options: Options) -> Maker:
    """Return what makes the engine again of what was typed for ``stepengine serve``."""
    from stepengine.debugging.desk import Maker

    given: dict[str, Any] = {name: getattr(options, name) for name in TYPED}
    for name in PATHS:
        value = getattr(options, name)
        given[name] = None if value is None else str(value)
    file = module.partition("#")[0].removeprefix("sandboxed:")
    files = tuple([one for one in (file, options.script) if one and Path(one).exists()])
    return Maker("stepengine.cli.commands.serve:engine_again", {"module": module, "options": given}, files)


def engine_again(module: str, options: dict[str, Any]) -> Engine | DurableEngine:
    """
    Return an engine as ``stepengine serve`` made it.

    Args:
        module: What was typed.
        options: The options that were, as ``maker_of`` tells them.

    Raises:
        DefinitionError: when files that were fine at the start make none any more.
    """
    from stepengine.engine.loading import warn_left_out

    paths = {name: None if options[name] is None else Path(options[name]) for name in PATHS}
    made = attrs.evolve(Options(quiet=True), **{**options, **paths})
    try:
        return engine_of(module, made.in_force(), warn_left_out)[0]
    except UsageProblem as error:
        raise DefinitionError(str(error)) from error


def _make_engine(module: str, function: str) -> Engine | DurableEngine:
    from stepengine.durable import DurableEngine
    from stepengine.engine import Engine

    # The command stands in another folder than its user. Last: nothing here takes the place of what is installed.
    sys.path.append(str(Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(module), function)()
    except Exception as error:
        msg = f"{module}:{function} makes no engine: {type(error).__name__}: {error}"
        raise UsageProblem(msg) from error
    if not isinstance(made, Engine | DurableEngine):
        msg = f"{module}:{function} returned a {type(made).__name__}; a function without arguments that returns an Engine would be fine"
        raise UsageProblem(msg)
    return made


@contextlib.contextmanager
def _tokens(file: Path | None) -> Iterator[tuple[Path, str]]:
    """Give the file of tokens; without one that of a token for this time, and the token."""
    from stepengine.server import Tokens

    if file is not None:
        if not file.exists():
            msg = f"there is no {file}; `stepengine tokens add NAME --file {file}` writes it"
            raise UsageProblem(msg)
        yield file, ""
        return
    with tempfile.TemporaryDirectory(prefix="stepengine-") as folder:
        made = Path(folder) / "tokens.json"
        yield made, Tokens.open(made).add(OPERATOR, ["admin"])


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Show on stderr what the engine warns of: the logger is silent by itself, and nothing else says why a run was left alone."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)


async def _until_told(served: Application, wanted: Served, begun: Callable[[str], object]) -> Exit:
    from stepengine.durable import DatabaseAway, ExecutorBusy
    from stepengine.server.listening import listen

    try:
        has_listened = await listen(served, wanted.host, wanted.port, begun)
    except (DatabaseAway, ExecutorBusy):
        raise
    except StepEngineError as error:
        raise UsageProblem(error.message) from error
    if has_listened:
        return Exit.COMPLETED
    return complain(f"{wanted.host}:{wanted.port} cannot be listened on; the log says why", Exit.USAGE)


def _say_where(
    wanted: Served, url: str, *, token: str, logins: Logins | None, agents: Sequence[str], script: str
) -> None:
    print(f"stepengine: {url} serves {', '.join(agents)}", file=sys.stderr)
    if script:
        print(
            f"stepengine: the script {visible(script)} answers in place of models, which are not asked", file=sys.stderr
        )
    if logins is not None:
        link = f"{url}{logins.make()}"
        print(f"stepengine: the studio, for one browser and for a minute: {link}", file=sys.stderr)
        folder = "" if wanted.folder == Path() else f" {shlex.quote(str(wanted.folder))}"
        print(f"stepengine: another link: stepengine studio{folder} --link", file=sys.stderr)
        if wanted.opens:
            # Some browsers are waited for.
            threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()
    if token and not wanted.opens:
        print(f"stepengine: the token of this time, for all that there is: {token}", file=sys.stderr)
        print(
            f"  curl -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"agent": "{agents[0]}", "prompt": "..."}}\' {url}/runs',
            file=sys.stderr,
        )
    sys.stderr.flush()
