"""``stepengine studio``: a page to start, watch, answer and debug runs."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
import typer

from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.commands.serve import ServeOptions, serve_runs
from stepengine.cli.exits import Exit
from stepengine.cli.journals import is_journal_file
from stepengine.cli.options import Model, Options, with_shared_options
from stepengine.cli.running_studios import request_login_links
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem

LEAVING_SECONDS = 1.0

RUNS, REPORTS, AGENTS = "runs", "evals", "agents"
HOST = "127.0.0.1"
PORT = 8700
DATABASE = ".db"


@partial(with_shared_options, without=("agent", "as_json", "quiet", "verbose"))
def studio(
    options: Options,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A project, a folder of journals, or RUNS.db; default: this folder."),
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
    port: Annotated[int, typer.Option(help="The port; 0 uses a free one.", min=0, max=65535)] = PORT,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = HOST,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File with the accepted tokens, from `stepengine tokens`.", metavar="FILE"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name under which browsers reach it; may be repeated.", metavar="NAME[:PORT]"),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the link, without opening a browser.")] = False,
    no_schedules: Annotated[
        bool, typer.Option("--no-schedules", help="Do not start the schedules of the agents.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Print a new login link for the running studio of FOLDER; start none.")
    ] = False,
) -> Exit:
    """
    Open a page to start, watch and answer runs.

    The studio is `stepengine serve` with a page: the same runs, rules and endpoints. The page loads nothing from
    other hosts. A one-time link logs the browser in; --link prints a new one while the studio is running.

    FOLDER is a project such as `stepengine init` creates, with agents in FOLDER/agents and runs in FOLDER/runs. It
    may also be a folder or database of journals. Journals from elsewhere are listed and shown; the studio resumes
    one only after you have seen and approved its next effect.

    Tool calls that change something or run a program need approval in the page, unless --write or --shell allows
    them. That applies to bundled tools and to the tools of your agent files. Needs the extra `serve`.

    --script needs no model and no key: each run starts with the first reply of FILE; a resumed or forked run
    continues after the replies in its record. The page shows this.

    Exit codes:
      0    it was stopped
      2    wrong usage or configuration

    Examples:
      stepengine studio
      stepengine studio --script tests/replies.json
      stepengine studio my-agent --model anthropic/claude-haiku-4-5
      stepengine studio --agents my_agents.py --runs runs.db
      stepengine studio journals --no-open
      stepengine studio --link
    """
    refuse_inside_tool("stepengine studio")
    if link:
        # The running studio keeps the options with which it was started.
        texts = (agents, model, script, runs, reports, tokens, allow_host)
        if any(texts) or no_open or no_schedules or (host, port) != (HOST, PORT):
            msg = "--link starts no studio, so other options have no effect; leave them out"
            raise UsageProblem(msg)
        print("\n".join(request_login_links(folder)))
        return Exit.COMPLETED
    module, runs, reports = _get_project_folders(folder, agents, runs, reports)
    # After Ctrl-C the terminal should be free soon: active runs resume at the next start, and a run that waits for an answer
    # would use the whole time that a server grants, ten seconds.
    wanted = ServeOptions(
        module=module, host=host, port=port, runs=runs, tokens=tokens, hosts=allow_host or (), reports=reports,
        schedules=not no_schedules, ui=True, opens=not no_open, drain=LEAVING_SECONDS, folder=folder,
    )  # fmt: skip
    return serve_runs(attrs.evolve(options, model=model, script=script, quiet=True).with_settings(), wanted)


def _get_project_folders(
    folder: Path, agents: str | None, runs: str | None, reports: Path | None
) -> tuple[str, str, Path | None]:
    """Return the paths of the agents, the runs and any reports of a project; raise ``UsageProblem`` if it is missing."""
    if not folder.exists():
        msg = f"there is no {str(folder)!r}; pass a project, a folder of journals or RUNS.db"
        raise UsageProblem(msg)
    holds_journals = folder.suffix == DATABASE or (
        folder.is_dir() and any(is_journal_file(path) for path in folder.glob("*.jsonl"))
    )
    if folder.is_file() and not holds_journals:
        msg = f"{str(folder)!r} is not a folder; to name a file of agents, use --agents"
        raise UsageProblem(msg)
    base = Path() if folder.suffix == DATABASE else folder
    own = reports if reports is not None else (base / REPORTS if (base / REPORTS).is_dir() else None)
    module = agents or _get_trusted_agents_folder(base, holds_journals=holds_journals)
    return module, runs or str(folder if holds_journals else folder / RUNS), own


def _get_trusted_agents_folder(folder: Path, *, holds_journals: bool) -> str:
    """
    Return the ``agents`` folder below *folder*; with *holds_journals* also next to it or in the working folder.

    Raises:
        UsageProblem: when there is none, or it is not trusted.
    """
    from stepengine.engine.trust import may_run_agent_files

    places = [folder / AGENTS, *([folder.parent / AGENTS, Path(AGENTS)] if holds_journals else [])]
    place = next((one for one in places if one.is_dir()), None)
    if place is None:
        msg = (
            f"there is no {str(folder / AGENTS)!r}; name the agents with --agents MODULE, or run `stepengine init DIR` to create a project "
            "with one"
        )
        raise UsageProblem(msg)
    if not may_run_agent_files(place):
        trust = f"`stepengine agents trust {shlex.quote(str(place.parent))}`"
        msg = f"the agents in {str(place)!r} are not trusted yet; run {trust}, or name them with --agents"
        raise UsageProblem(msg)
    return str(place)
