"""``stepengine studio``: the page where runs are started, watched, answered and gone back in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
import typer
from attrs import frozen

from stepengine.cli.commands.serve import Served, serve_runs
from stepengine.cli.exits import Exit
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.running_studios import links_of_studios
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside

__all__ = ("studio",)

LEAVING_SECONDS = 1.0

RUNS, REPORTS, AGENTS = "runs", "evals", "agents"
PORT = 8700
DATABASE = ".db"


@partial(with_options, without=("agent", "as_json", "quiet", "verbose"))
def studio(
    options: Options,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A project, a folder of journals, or RUNS.db; by default this folder."),
    ] = Path(),
    *,
    agents: Annotated[
        str | None,
        typer.Option(help="Agents, as for `stepengine serve`; default: FOLDER/agents.", metavar="MODULE"),
    ] = None,
    model: Model = None,
    script: ScriptFile = "",
    runs: Annotated[
        str | None,
        typer.Option(help="A folder, RUNS.db, postgresql://..., or @FILE; default: FOLDER/runs.", metavar="PLACE"),
    ] = None,
    reports: Annotated[
        Path | None, typer.Option(help="Reports of evaluations; default: FOLDER/evals.", metavar="FOLDER")
    ] = None,
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)] = PORT,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    tokens: Annotated[
        Path | None,
        typer.Option(help="Who may come in by a token, by `stepengine tokens`.", metavar="FILE"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name under which browsers reach it; may be repeated.", metavar="NAME[:PORT]"),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the link, and open no browser.")] = False,
    no_schedules: Annotated[
        bool, typer.Option("--no-schedules", help="Leave the schedules beside the agents to others.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Print a new login link of the running studio of FOLDER, and start none.")
    ] = False,
) -> Exit:
    """
    Open a page where runs are started, watched and answered.

    It is `stepengine serve` with a page: the same runs, the same rules, the same ways in for programs. The page comes whole
    from this machine and loads nothing from elsewhere. A link that is good once lets the browser in; --link prints another one
    while the studio runs.

    FOLDER is a project, such as `stepengine init` makes, with its agents in FOLDER/agents and its runs in FOLDER/runs. For a
    folder that holds journals, or a database of them, these are the runs. Journals that it did not start are listed and
    shown; none of them goes on before somebody has seen what would happen next and agreed to it.

    Each call of a tool that changes something or runs a program is asked about in the page, unless --write or --shell
    allows it. That holds for bundled tools and for those of your agent files. Needs the extra `serve`.

    With --script no model is asked and no key is needed: each run gets the replies of FILE from the first on, and one that
    is resumed or forked those behind its record. The page says so.

    Leaves with:
      0    it was told to stop
      2    wrong usage or configuration

    Examples:
      stepengine studio
      stepengine studio --script tests/replies.json
      stepengine studio my-agent --model anthropic/claude-haiku-4-5
      stepengine studio --agents my_agents.py --runs runs.db
      stepengine studio journals --no-open
      stepengine studio --link
    """
    refuse_inside("stepengine studio")
    if link:
        print("\n".join(links_of_studios(folder)))
        return Exit.COMPLETED
    found = _found(folder, agents, runs, reports)
    # Whoever presses Ctrl-C at a terminal wants it back: what is under way by then goes on at the next start, and whoever
    # waits for an answer would have kept a server for all of its ten seconds.
    wanted = Served(
        module=found.agents, host=host, port=port, runs=found.runs, tokens=tokens, hosts=allow_host or (), reports=found.reports,
        schedules=not no_schedules, ui=True, opens=not no_open, drain=LEAVING_SECONDS, folder=folder,
    )  # fmt: skip
    return serve_runs(attrs.evolve(options, model=model, script=script, quiet=True).in_force(), wanted)


@frozen(kw_only=True)
class _Found:
    """What a folder has."""

    agents: str
    runs: str
    reports: Path | None


def _found(folder: Path, agents: str | None, runs: str | None, reports: Path | None) -> _Found:
    if not folder.exists():
        msg = f"there is no {str(folder)!r}; a project, a folder of journals or RUNS.db would be fine"
        raise UsageProblem(msg)
    is_place = folder.suffix == DATABASE or (folder.is_dir() and next(folder.glob("*.jsonl"), None) is not None)
    if folder.is_file() and not is_place:
        msg = f"{str(folder)!r} is no folder; --agents names a file of agents"
        raise UsageProblem(msg)
    base = Path() if folder.suffix == DATABASE else folder
    own = reports if reports is not None else (base / REPORTS if (base / REPORTS).is_dir() else None)
    return _Found(
        agents=agents or _agents(base, is_place=is_place),
        runs=runs or str(folder if is_place else folder / RUNS),
        reports=own,
    )


def _agents(folder: Path, *, is_place: bool) -> str:
    """
    Return where the agents are where nobody typed it: code of a folder that somebody else made runs only when it is trusted.

    Raises:
        UsageProblem: when there are none, or they may not run.
    """
    from stepengine.engine.trust import may_run

    places = [folder / AGENTS, *([folder.parent / AGENTS, Path(AGENTS)] if is_place else [])]
    place = next((one for one in places if one.is_dir()), None)
    if place is None:
        msg = (
            f"there is no {str(folder / AGENTS)!r}: --agents MODULE names the agents, and `stepengine init DIR` makes a project "
            "with one"
        )
        raise UsageProblem(msg)
    if not may_run(place):
        msg = f"the agents in {str(place)!r} are code that nobody trusts yet; `stepengine agents trust {place.parent}`, or name them with --agents"
        raise UsageProblem(msg)
    return str(place)
