"""``stepengine test``: recorded runs as a regression suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.chaos import RUNS, ChaosOptions, run_chaos
from stepengine.cli.exits import Exit
from stepengine.cli.journals import agent_id_of, fields_of, is_cut_off, journal_at, repeat, spread
from stepengine.cli.options import Agent, Config, Json, Options
from stepengine.cli.screen.render import counted, dumps, say
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DefinitionError, ReplayDivergence, StepEngineError

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.engine.packages import PackagedAgent
    from stepengine.journal import Journal
    from stepengine.journal.divergence import Field

__all__ = ("suite",)

RECORDINGS = "recordings/**/*.jsonl"
"""Where a package has the recorded runs of its agents."""


_chaos_option = partial(typer.Option, rich_help_panel="Options of --chaos")


def suite(
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
        _chaos_option(help="Results of tools and functions, by name: JSON, or @FILE.", metavar="JSON|@FILE"),
    ] = "",
    faults: Annotated[
        str, _chaos_option(help="Only these kinds of faults, separated by commas.", metavar="KINDS")
    ] = "",
    runs: Annotated[int, _chaos_option("-n", "--runs", help="How many worlds.", min=1, metavar="N")] = RUNS,
    seed: Annotated[
        int, _chaos_option(help="Seed of the first world; the next have the next numbers.", min=0, metavar="N")
    ] = 0,
) -> Exit:
    r"""
    Replay runs against the present code, as a test suite.

    Says which runs came out differently, and where.

    A regression suite for agents: record good runs once, keep them, and let CI test them; it needs no key and no
    network. An output or a status that is not the recorded one counts, too. A folder stands for the *.jsonl files in
    it, an SQLite file for its runs, and publisher/agent for the recorded runs that an installed package brings of that agent.

    With --chaos an agent runs in simulated worlds instead. No model, tool or function is called: replies are drawn, tools
    return a text, or what --results has. Calls fail, time out, are refused or cut off, and the process dies. After each run
    the invariants of all runs are checked: nothing happens twice, a resumed run ends the same, sums and limits hold, and the
    handler raises no error of its own. A seed is always the same world; `simulate` of stepengine.testing is the same in a test.

    Exits with:
      0    all replays did what is recorded; every invariant held
      1    a file could not be replayed; an invariant did not hold, which is
           shown with the fewest faults and the line for a test
      2    an agent cannot be loaded: not found, or its file fails
      5    a replay did something else than its recording

    `git bisect run` takes 1 for a bad commit and 125 for one that tells nothing, so that commits whose agent cannot be
    loaded are passed over with: sh -c 'stepengine test ...; c=$?; [ $c = 2 ] && exit 125; exit $c'

    Examples:
      stepengine test journals/
      stepengine test journals/*.jsonl --agent ./agents/mine.py
      stepengine test publisher/reviewer
      stepengine test --chaos ./agents/mine.py "Go" -n 1000 --seed 4000
      stepengine test --chaos ./agents/mine.py --faults crash,crash_after \
          --results '{"count": {"lines": 3}}'
    """
    chosen = ChaosOptions(params=params, results=results, faults=faults, runs=runs, seed=seed)
    if chaos:
        name, *asked = files
        if agent or len(asked) > 1:
            msg = "--chaos takes AGENT and PROMPT, without --agent; quote a prompt of several words"
            raise UsageProblem(msg)
        options = Options(agent=name, quiet=True, as_json=as_json, config=config).in_force()
        return run_chaos(name, "".join(asked) or "go", chosen, options)
    if chosen != ChaosOptions():
        msg = "--params, --results, --faults, --runs and --seed are of --chaos; add --chaos"
        raise UsageProblem(msg)
    told: list[dict[str, object]] = []
    options = Options(agent=agent, quiet=True, config=config).in_force()
    for file, own in _journals_with_options(files, options):
        told.append(_replay_entry(file, own))
        if not as_json:
            say("\n".join(_describe_outcome(told[-1])), hang=4)
    diverged, broken = [sum(t["outcome"] == o for t in told) for o in ("diverged", "failed")]
    unloaded = any(entry.get("unloaded") for entry in told)
    if as_json:
        print(dumps(told))
    else:
        print(f"{len(told) - diverged - broken} of {len(told)} as recorded, {diverged} diverged, {broken} failed")
    if unloaded:
        return Exit.USAGE
    return Exit.FAILED if broken else Exit.DIVERGED if diverged else Exit.COMPLETED


def _journals_with_options(files: Iterable[str], options: Options) -> Iterator[tuple[str, Options]]:
    """Give each journal with the options for it; one that comes with a package is repeated by the agent of that package."""
    from stepengine.engine.loading import find_packaged

    for file in files:
        member = None if Path(file).exists() else find_packaged(file)
        if member is None:
            yield from [(one, options) for one in spread([file])]
            continue
        runs = [run for run in sorted(member.package.folder.glob(RECORDINGS)) if _is_of(run, member)]
        if not runs:
            msg = f"{member} comes with no recorded run; name journals"
            raise UsageProblem(msg)
        yield from [(str(run), attrs.evolve(options, agent=options.agent or file)) for run in runs]


def _is_of(run: Path, member: PackagedAgent) -> bool:
    """Return whether a journal that comes with a package is of that agent; one that cannot be read may be."""
    try:
        return agent_id_of(journal_at(str(run)).history()) in (member.id, member.declared.id)
    except StepEngineError:
        return True


def _replay_entry(file: str, options: Options) -> dict[str, Any]:
    try:
        journal = journal_at(file)
        result = repeat(journal, options)
    except ReplayDivergence as error:
        return _divergence_entry(
            file, error.message, error.diff, step=error.step, address=error.address, site=error.site
        )
    except DefinitionError as error:
        return {"file": file, "outcome": "failed", "message": str(error), "unloaded": True}
    except (StepEngineError, UsageProblem) as error:
        return {"file": file, "outcome": "failed", "message": str(error)}
    other = _other_end(journal, result)
    if other:
        # No effect differs, so a replay goes through; a suite is asked whether the agent still does what it did.
        lines = [f"  {pointer}  recorded {recorded}   now {now}" for pointer, recorded, now in other]
        said = [
            f"every effect is as recorded, but the run ends in another way: {result.error or ''}".rstrip(": "),
            *lines,
        ]
        return _divergence_entry(file, "\n".join(said), other, step=result.state.step_index, address="#-1", site="")
    status = "not ended" if is_cut_off(journal, result) else result.status.value
    return {"file": file, "outcome": "ok", "status": status, "steps": result.state.step_index}


def _divergence_entry(
    file: str, message: str, diff: Iterable[tuple[str, str, str]], **place: object
) -> dict[str, object]:
    return {"file": file, "outcome": "diverged", "message": message, **place, "diff": fields_of(diff)}


def _other_end(journal: Journal, replayed: RunResult) -> list[Field]:
    """Return how a run that did the same ends otherwise than it did: in its status, its output, the kind of its error."""
    from stepengine.journal.divergence import fields_between
    from stepengine.journal.encoding import comparable
    from stepengine.journal.show import ended_of

    made = replayed.journal
    recorded, now = ended_of(journal.history()), ended_of(made.history()) if made is not None else None
    if recorded is None or now is None:
        return []
    before, after = [{**comparable(end), "status": end.status.value} for end in (recorded, now)]
    return list(fields_between(before, after))


def _describe_outcome(entry: dict[str, Any]) -> Iterator[str]:
    if entry["outcome"] == "ok":
        yield f"ok        {entry['file']}  {entry['status']}, {counted(entry['steps'], 'step')}"
        return
    yield f"{entry['outcome'].upper():<10}{entry['file']}"
    yield from [f"    {line}" for line in entry["message"].splitlines()]
