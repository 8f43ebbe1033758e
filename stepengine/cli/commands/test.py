"""``stepengine test``: recorded runs as a regression suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.chaos import RUNS, run_chaos
from stepengine.cli.exits import Exit
from stepengine.cli.journals import (
    expand_to_journals,
    open_journal,
    replay_recorded_run,
    was_cut_off_by_crash,
)
from stepengine.cli.options import Agent, Config, Json, Options
from stepengine.cli.screen.render import format_count, print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DefinitionError, ReplayDivergence, StepEngineError

if TYPE_CHECKING:
    from stepengine.engine.packages import PackagedAgent

RECORDINGS = "recordings/**/*.jsonl"
"""Where a package has the recorded runs of its agents."""


_chaos_option = partial(typer.Option, rich_help_panel="Options of --chaos")


def replay_runs_as_tests(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Journals; with --chaos AGENT [PROMPT].")],
    *,
    agent: Agent = "",
    as_json: Json = False,
    config: Config = None,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Run AGENT in simulated worlds where models, tools and processes fail.")
    ] = False,
    params: Annotated[str, _chaos_option(help="Params as JSON, or @FILE.", metavar="JSON|@FILE")] = "",
    results: Annotated[
        str,
        _chaos_option(help="Results of tools and functions by name: JSON, or @FILE.", metavar="JSON|@FILE"),
    ] = "",
    faults: Annotated[str, _chaos_option(help="Only these kinds of faults, comma-separated.", metavar="KINDS")] = "",
    runs: Annotated[int, _chaos_option("-n", help="Number of worlds.", min=1, metavar="N")] = RUNS,
    seed: Annotated[int, _chaos_option(help="Seed of the first world; later ones count up.", min=0, metavar="N")] = 0,
) -> Exit:
    r"""
    Replay runs against the current code, as a test suite.

    Reports which runs differ from their record, and where.

    A regression suite for agents: record good runs once, keep them, and test them in CI, without a key or network.
    A different output or status counts as a difference. A folder means the *.jsonl files in it, an SQLite file its
    runs, and publisher/agent the recorded runs of an installed package for that agent.

    --chaos runs an agent in simulated worlds instead. No model, tool or function is called: replies are random, and
    tools return a text or the value in --results. Calls fail, time out, are denied or interrupted, and the process
    crashes. After each run, invariants are checked: no effect happens twice, a resumed run ends the same, sums and
    limits hold, and the handler raises no error of its own. A seed always gives the same world. In tests, use
    `simulate` of stepengine.testing.

    Exit codes:
      0    all replays equal their records; all invariants hold
      1    a file could not be replayed, or an invariant failed; the failure is
           shown with the fewest faults and the line for a test
      2    an agent cannot be loaded: not found, or its file raises
      5    a replay differs from its record

    `git bisect run` expects 1 for a bad commit and 125 for one to skip. To skip commits whose agent cannot be
    loaded: sh -c 'stepengine test ...; c=$?; [ $c = 2 ] && exit 125; exit $c'

    Examples:
      stepengine test journals/
      stepengine test journals/*.jsonl --agent ./agents/mine.py
      stepengine test publisher/reviewer
      stepengine test --chaos ./agents/mine.py "Go" -n 1000 --seed 4000
      stepengine test --chaos ./agents/mine.py --faults crash,crash_after \
          --results '{"count": {"lines": 3}}'
    """
    if chaos:
        name, *asked = files
        if agent or len(asked) > 1:
            msg = "--chaos takes AGENT and PROMPT, without --agent; quote a prompt of several words"
            raise UsageProblem(msg)
        options = Options(agent=name, quiet=True, as_json=as_json, config=config).with_settings()
        return run_chaos(
            name,
            "".join(asked) or "go",
            options,
            params=params,
            results=results,
            faults=faults,
            runs=runs,
            seed=seed,
        )
    if params or results or faults or runs != RUNS or seed:
        msg = "--params, --results, --faults, -n and --seed need --chaos; add it"
        raise UsageProblem(msg)
    told: list[dict[str, object]] = []
    options = Options(agent=agent, quiet=True, config=config).with_settings()
    for file, own in _expand_to_journals_with_options(files, options):
        told.append(_replay_and_compare(file, own))
        if not as_json:
            print_visible("\n".join(_describe_outcome(told[-1])), hanging_indent=4)
    diverged, broken = [sum(t["outcome"] == o for t in told) for o in ("diverged", "failed")]
    unloaded = any(entry.get("unloaded") for entry in told)
    if as_json:
        print(to_ascii_json(told))
    else:
        print(f"{len(told) - diverged - broken} of {len(told)} as recorded, {diverged} diverged, {broken} failed")
    if unloaded:
        return Exit.USAGE
    return Exit.FAILED if broken else Exit.DIVERGED if diverged else Exit.COMPLETED


def _expand_to_journals_with_options(files: Iterable[str], options: Options) -> Iterator[tuple[str, Options]]:
    """Yield each journal with its options; a packaged journal is replayed with the agent of its package."""
    from stepengine.engine.loader import find_packaged_agent

    for file in files:
        member = None if Path(file).exists() else find_packaged_agent(file)
        if member is None:
            yield from [(one, options) for one in expand_to_journals([file])]
            continue
        runs = [run for run in sorted(member.package.folder.glob(RECORDINGS)) if _is_run_of_agent(run, member)]
        if not runs:
            msg = f"{member} has no recorded runs; name journals"
            raise UsageProblem(msg)
        yield from [(str(run), attrs.evolve(options, agent=options.agent or file)) for run in runs]


def _is_run_of_agent(run: Path, member: PackagedAgent) -> bool:
    """Return whether a packaged journal is a run of that agent; ``True`` if it cannot be read."""
    from stepengine.journal.show import get_root_agent_id

    try:
        return get_root_agent_id(open_journal(str(run)).history()) in (member.id, member.declared.id)
    except StepEngineError:
        return True


def _replay_and_compare(file: str, options: Options) -> dict[str, Any]:
    """Replay a journal, and return the outcome as JSON values: ``ok``, or an error with its differences."""
    try:
        journal = open_journal(file)
        result = replay_recorded_run(journal, options)
    except ReplayDivergence as error:
        place = {"step": error.step, "address": error.address, "site": error.site}
        return {
            "file": file,
            "outcome": "diverged",
            "message": error.message,
            **place,
            "diff": [{"pointer": p, "recorded": recorded, "now": now} for p, recorded, now in error.diff],
        }
    except DefinitionError as error:
        return {"file": file, "outcome": "failed", "message": str(error), "unloaded": True}
    except (StepEngineError, UsageProblem) as error:
        return {"file": file, "outcome": "failed", "message": str(error)}
    status = "not ended" if was_cut_off_by_crash(journal, result) else result.status.value
    return {"file": file, "outcome": "ok", "status": status, "steps": result.state.step_index}


def _describe_outcome(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about the replay of a journal."""
    if entry["outcome"] == "ok":
        yield f"ok        {entry['file']}  {entry['status']}, {format_count(entry['steps'], 'step')}"
        return
    yield f"{entry['outcome'].upper():<10}{entry['file']}"
    yield from [f"    {line}" for line in entry["message"].splitlines()]
