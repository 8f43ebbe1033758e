"""``stepengine deploy worker``: a process that executes durable runs until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.deployment import App, Db, Pool, resolve_database, run_deployment_command
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import make_unique_dict
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.workspace.paths import make_missing_path_hint

if TYPE_CHECKING:
    from types import ModuleType

    from stepengine.durable import DurableEngine
    from stepengine.engine.schedules import Schedule

FINE = "pass a Python file, a folder of agent files, or an importable module"
MOST_DIGITS = 12


def worker(
    module: Annotated[
        str, typer.Argument(metavar="MODULE", help="The agents: an agent file, a folder of them, or a module.")
    ],
    *,
    db: Db = "",
    embedded_db: Annotated[
        Path | None,
        typer.Option(help="Run a private PostgreSQL with its files in DIR, and print its URL.", metavar="DIR"),
    ] = None,
    pool: Pool = "default",
    app: App = "stepengine",
    executor: Annotated[
        str, typer.Option(help="Stable id of this worker, used by one process at a time; default: the host name.")
    ] = "",
    release: Annotated[
        str, typer.Option(help="Version of the agents; default: a hash of definitions, handlers and tools.")
    ] = "",
    concurrency: Annotated[
        int, typer.Option(help="Maximum concurrent runs of this worker, including waiting ones.", min=1)
    ] = 500,
    global_concurrency: Annotated[
        int | None, typer.Option(help="Maximum concurrent root runs of all workers of the pool.", min=1, metavar="N")
    ] = None,
    starts_per_minute: Annotated[
        int | None,
        typer.Option(help="Maximum root runs that all workers of the pool start per minute.", min=1, metavar="N"),
    ] = None,
    requests_per_minute: Annotated[
        list[str] | None,
        typer.Option(help="Requests per minute to a provider, for all workers together.", metavar="PROVIDER=N"),
    ] = None,
    tokens_per_minute: Annotated[
        list[str] | None,
        typer.Option(help="Tokens per minute of a provider, for all workers together.", metavar="PROVIDER=N"),
    ] = None,
    max_concurrency: Annotated[
        list[str] | None,
        typer.Option(help="Concurrent requests to a provider, for all workers together.", metavar="PROVIDER=N"),
    ] = None,
    effects: Annotated[int, typer.Option(help="Maximum number of effects performed at once.", min=1)] = 32,
    depth: Annotated[int, typer.Option(help="Maximum depth of a tree of runs.", min=1)] = 4,
    drain: Annotated[float, typer.Option(help="Seconds that active effects get to finish when it stops.", min=0)] = 30,
    no_migrate: Annotated[bool, typer.Option("--no-migrate", help="Do not update the tables.")] = False,
    no_schedules: Annotated[bool, typer.Option("--no-schedules", help="Do not start the schedules of MODULE.")] = False,
    allow_async_commit: Annotated[
        bool, typer.Option("--allow-async-commit", help="Accept a database that may lose commits in a power failure.")
    ] = False,
) -> Exit:
    """
    Execute durable runs from a database until stopped.

    MODULE defines `agents = [...]` or `agent = ...`, and optionally `tools = [...]`, `models = ...` and `options =
    {...}` with further options of Engine; FILE#ID selects one agent. A folder is read like ./agents: a file that
    cannot be loaded is reported, and the others are used.

    The workers start the schedules of MODULE, `schedule = Schedule(...)` or `schedules = [...]`, each time by one
    worker.

    Rate limits of a provider apply to all workers with the same key together; pass them to each worker. Options
    given here replace rate_limits in `options`.

    SIGTERM and Ctrl-C stop it: it starts no new runs, active effects get --drain seconds, and the remaining runs
    are resumed by the next worker with the same --executor, or by `stepengine deploy takeover`. Needs the extra
    `durable`; `stepengine config doctor` shows how to install it.

    Exit codes:
      0    it was stopped
      2    wrong usage or configuration
      4    another process uses the same --executor
      6    the database cannot be reached

    Examples:
      stepengine deploy worker agents/ --embedded-db ./.db
      stepengine deploy worker my_agents.py --db @/run/secrets/db --executor web-1
    """
    offered = load_module_contents(module)
    if embedded_db is not None and db:
        msg = "--embedded-db starts its own database; leave --db out"
        raise UsageProblem(msg)
    setting: dict[str, Any] = {
        "pool": pool, "app": app, "executor": executor or None, "release": release or None,
        "concurrency": concurrency, "global_concurrency": global_concurrency, "starts_per_minute": starts_per_minute,
        "effects": effects, "depth": depth, "migrate": not no_migrate,
        "allow_async_commit": allow_async_commit,
    }  # fmt: skip

    limits = {
        "requests_per_minute": requests_per_minute or (), "tokens_per_minute": tokens_per_minute or (),
        "max_concurrency": max_concurrency or (),
    }  # fmt: skip
    offered.options.update(_merge_rate_limits(offered.options.get("rate_limits"), limits))

    async def open_and_run() -> Exit:
        """Start or find the database, and run the worker until a signal."""
        async with _run_embedded_or_resolve_database(embedded_db, db) as url:
            from stepengine.durable import DurableEngine

            engine = DurableEngine(offered.agents, offered.tools, offered.models, db=url, **setting, **offered.options)
            await _run_worker_until_signal(engine, drain, () if no_schedules else offered.schedules)
        return Exit.COMPLETED

    return run_deployment_command(open_and_run())


def _merge_rate_limits(module_limits: Any, typed: Mapping[str, Iterable[str]]) -> dict[str, object]:
    """
    Return the rate limits of a module merged with the typed ones, as an option of ``Engine``; empty if none were typed.

    Raises:
        UsageProblem: when one is not a limit, or the module has one limit for all providers.
    """
    given: dict[str, dict[str, int]] = {}
    for limit, texts in typed.items():
        option = f"--{limit.replace('_', '-')}"
        for name, text in make_unique_dict(option, [(text.partition("=")[0], text) for text in texts]).items():
            number = text.partition("=")[2]
            if not name or not number.isdecimal() or len(number) > MOST_DIGITS or int(number) < 1:
                msg = f"{option} {text!r} is not a limit of a provider; write PROVIDER=NUMBER, such as anthropic=50"
                raise UsageProblem(msg)
            given.setdefault(name, {})[limit] = int(number)
    if not given:
        return {}
    from stepengine.runtime import RateLimit

    if isinstance(module_limits, RateLimit):
        msg = "rate_limits of the module is one limit for all providers; to change it here, make it a dict from providers to limits"
        raise UsageProblem(msg)
    own: dict[str, RateLimit] = dict(module_limits or {})
    return {"rate_limits": own | {name: attrs.evolve(own.get(name, RateLimit()), **new) for name, new in given.items()}}


@contextlib.asynccontextmanager
async def _run_embedded_or_resolve_database(folder: Path | None, db: str) -> AsyncIterator[str]:
    """Yield the URL of a PostgreSQL server that runs in *folder* during the block, else that of ``--db`` or the environment."""
    if folder is None:
        yield resolve_database(db)
        return
    from stepengine.durable import run_embedded_postgres

    async with run_embedded_postgres(folder) as url:
        print(f"database: {url}", flush=True)
        yield url


async def _run_worker_until_signal(engine: DurableEngine, drain: float, schedules: Sequence[Schedule]) -> None:
    """Open the engine, start its schedules, execute runs until SIGTERM or SIGINT, and close it within *drain* seconds."""
    from stepengine.durable import DurableScheduler

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await engine.open()
        setting = engine.setting
        names = ", ".join([agent.id for agent in engine.agents])
        print(
            f"stepengine: executor {setting.executor!r} executes runs of pool {setting.pool!r}, release {setting.release}: {names}",
            file=sys.stderr,
            flush=True,
        )
        async with DurableScheduler(engine, schedules) if schedules else contextlib.nullcontext():
            await stop.wait()
        print(f"stepengine: stopping; active effects may run for another {drain:g} s", file=sys.stderr, flush=True)
    finally:
        await engine.aclose(drain=drain)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@frozen
class ModuleContents:
    """
    The agents, tools, models, engine options and schedules of a module.

    Attributes:
        agents: Its agents; at least one.
        tools: The tools that the agents name.
        models: The providers of their models; ``None`` for the registered ones.
        options: Further options of ``Engine``.
        schedules: The schedules of agents.
    """

    agents: tuple[AgentDefinition, ...]
    tools: tuple[Any, ...] = ()
    models: Any = None
    options: dict[str, Any] = attrs.field(factory=dict)
    schedules: tuple[Schedule, ...] = ()


def print_skipped_file(problem: str) -> None:
    """Print why a file of agents is not loaded."""
    print_error(f"{problem}; this file is skipped")


def load_module_contents(module: str, on_skipped_file: Callable[[str], object] = print_skipped_file) -> ModuleContents:
    """
    Load a Python file, a folder of agent files or a module, and return its agents, tools, models, options and schedules.

    Args:
        module: A Python file, a folder, or the name of a module.
        on_skipped_file: Called with the reason why a file of a folder cannot be loaded; by default the reason is printed.

    Raises:
        UsageProblem: when *module* does not exist or cannot be imported; the message names valid values.
        DefinitionError: when *module* cannot be loaded, or defines no agent.
    """
    from stepengine.engine.loader import AgentLocation, get_listed_tools, get_module_schedules, load_folder, load_module
    from stepengine.engine.modules import get_exported_agents

    path, place = Path(module), AgentLocation.from_text(module)
    if path.is_dir():
        found = load_folder(path)
        for problem in found.problems:
            on_skipped_file(problem)
        if not found.agents:
            msg = f"the folder {module} holds no agent files; `stepengine init` creates a project with one"
            raise UsageProblem(msg)
        return ModuleContents(found.agents, found.tools, schedules=found.schedules)
    file = path if place is None else place.file
    if not file.exists() and (place is not None or "/" in module):
        near = make_missing_path_hint(file)
        msg = f"there is no {module}; {FINE}{near}"
        raise UsageProblem(msg)
    if place is not None and place.sandboxed:
        return ModuleContents((place.load(),) if place.id else place.load_all())
    loaded = _import_module(module) if place is None else load_module(place.file)
    agents = (place.load(),) if place is not None and place.id else get_exported_agents(loaded, module)
    schedules = get_module_schedules(loaded, module)
    options = getattr(loaded, "options", {})
    if not isinstance(options, dict):
        msg = f"options in {module} must be a dict of options of Engine, such as {{'limits': Limits(max_steps=20)}}"
        raise UsageProblem(msg)
    return ModuleContents(agents, get_listed_tools(loaded), getattr(loaded, "models", None), dict(options), schedules)


def _import_module(module: str) -> ModuleType:
    """Import a module; raise ``UsageProblem`` if it is missing or its import fails."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            near = make_missing_path_hint(Path(module))
            msg = f"there is no {module}; {FINE}{near}"
            raise UsageProblem(msg) from None
        msg = f"{module} cannot be loaded: {type(error).__name__}: {error}"
        raise UsageProblem(msg) from error
