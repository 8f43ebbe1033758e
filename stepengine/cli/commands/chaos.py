"""``stepengine chaos``: an agent in worlds where things go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import attrs
import typer

from stepengine.cli.bench import family
from stepengine.cli.commands.run import read_params
from stepengine.cli.exits import Exit, complain
from stepengine.cli.options import Config, Json, Options, Params
from stepengine.cli.screen.render import dumps, say
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import list_names

__all__ = ("chaos",)

RUNS = 100


def chaos(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Id or file of the agent.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What it is asked.")] = "go",
    *,
    params: Params = "",
    results: Annotated[
        str,
        typer.Option(help="What tools and functions give, by name: JSON, or @FILE.", metavar="JSON|@FILE"),
    ] = "",
    faults: Annotated[
        str, typer.Option(help="Only these kinds of faults, with commas between them.", metavar="KINDS")
    ] = "",
    runs: Annotated[int, typer.Option("-n", "--runs", help="How many worlds.", min=1, metavar="N")] = RUNS,
    seed: Annotated[
        int, typer.Option(help="The first of them; the next have the next numbers.", min=0, metavar="N")
    ] = 0,
    as_json: Json = False,
    config: Config = None,
) -> Exit:
    r"""
    Run an agent in worlds where models, tools and processes fail.

    No model, tool or function is called: models say what is drawn, tools give a text, or what --results says. Calls fail,
    take too long, are refused or cut off, and the process dies. After each run everything is checked that holds for all
    runs: nothing happens twice, a run goes on to the same end after a crash, its sums and its limits, and that the
    handler lets out no error of its own.

    A seed is always the same world. `simulate` of stepengine.testing does the same in a test, where replies can be given
    and invariants added.

    Leaves with:
      0    everything held in every world
      1    something did not; with the fewest faults and the line for a test
      2    wrong usage; the agent cannot be loaded

    Examples:
      stepengine chaos ./agents/mine.py
      stepengine chaos ./agents/mine.py "Go" -n 1000 --seed 4000
      stepengine chaos ./agents/mine.py --faults crash,crash_after \
          --results '{"count": {"lines": 3}}'
    """
    from stepengine.engine import load_agent
    from stepengine.testing import SimulationFailed, simulate
    from stepengine.testing.faults import FAULTS
    from stepengine.tools.bundled import uncalled_tools

    options = Options(agent=agent, quiet=True, config=config).in_force()
    kinds = [kind.strip() for kind in faults.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown:
        msg = f"--faults has {unknown[0]!r}, which is not a kind of fault; there are {list_names(FAULTS, unknown[0])}"
        raise UsageProblem(msg)
    loaded = load_agent(agent, folders=options.settings.agent_folders)
    known = family(loaded, agent, options.settings.agent_folders)
    named = {tool for one in known for tool in one.tools if isinstance(tool, str)}
    try:
        seen = simulate(
            loaded,
            range(seed, seed + runs),
            prompt=prompt,
            params=read_params(params),
            tools=[tool for tool in uncalled_tools(options.cwd.resolve()) if tool.spec.name in named],
            results=read_params(results, "--results"),
            faults=kinds or None,
            agents=[one for one in known if one is not loaded],
        )
    except SimulationFailed as failed:
        if as_json:
            found = [attrs.asdict(fault) for fault in failed.faults]
            print(dumps({"seed": failed.seed, "row": failed.row, "faults": found, "message": str(failed)}))
        else:
            say(str(failed))
        return complain(f"something that must hold did not, with the seed {failed.seed}", Exit.FAILED)
    ended = {status.value: count for status, count in seen.statuses.items()}
    if as_json:
        print(dumps({"runs": seen.runs, "effects": seen.effects, "statuses": ended, "faults": seen.faults}))
    else:
        print(f"{seen.runs} runs with {seen.effects} effects, from seed {seed} on: everything held")
        print(
            f"they ended as: {_format_counts(ended)}\nwhat went wrong in them: {_format_counts(seen.faults) or 'nothing'}"
        )
    return Exit.COMPLETED


def _format_counts(counts: Mapping[str, int]) -> str:
    most = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join([f"{name} {count}" for name, count in most])
