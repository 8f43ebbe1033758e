"""``stepengine replay``: repeat a run from its record."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, TypeAlias

import attrs
import typer

from stepengine.cli.bench import make_engine_setup
from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import (
    load_recorded_agent,
    load_replay_setup,
    open_journal,
    raise_journal_errors_as_usage,
    run_cancelling_on_signal,
    run_on_journal,
    was_cut_off_by_crash,
)
from stepengine.cli.options import Last, Options, TrustJournal, with_shared_options
from stepengine.cli.perform import print_result
from stepengine.cli.settings import UsageProblem
from stepengine.cli.waiting_runs import replay_and_print_waiting_runs
from stepengine.errors import ReplayDivergence

ReplayFiles: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="A journal, or the beginning of a run's name in `stepengine runs`; RUNS.db#RUN in an SQLite file. With --waiting any number.",
    ),
]


@with_shared_options
def replay(
    options: Options,
    files: ReplayFiles = None,
    *,
    last: Last = False,
    speed: Annotated[
        float, typer.Option(help="Speed of the results: 1 as recorded, 0 all at once.", min=0, metavar="X")
    ] = 0,
    live: Annotated[
        list[str] | None,
        typer.Option(help="Effects to perform: tool_call, perform, model_call.", metavar="KIND"),
    ] = None,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="Open the debugger at the first difference; breakpoint() opens pdb.")
    ] = False,
    trust_journal: TrustJournal = False,
    waiting: Annotated[
        bool,
        typer.Option("--waiting", help="Replay every waiting run, and report which ones the current code can resume."),
    ] = False,
    on_divergence: Annotated[
        str, typer.Option(help="With --waiting: raise or keep, as you will pass it to resume.")
    ] = "",
) -> Exit:
    """
    Repeat a run from its record, without model and network.

    The agent's current code runs, and the record supplies all results. At the first difference, the step, file,
    line and fields are printed, and the exit code is 5.

    --speed replays results at their recorded pace, or faster, to watch a run again. --live performs some effects:
    tool_call and perform must return the recorded results; model_call calls the model again with recorded tool
    results, and stops at the first call without a record. If FILE was written or changed by others, its calls are not
    performed, except calls of tools that only read here. --trust-journal performs them.

    --waiting checks before a deployment which waiting runs the current code can resume. Nothing is performed or
    changed, and no key is needed. FILE is a journal, a folder, an SQLite file or a run's name; default: the runs of
    `stepengine runs --waiting`. Ended runs do not count.

    Results of --waiting, for each run, with the first difference:
      ready      it is resumed as it is
      keep       it is resumed with `resume --on-divergence keep`: what is
                 recorded are effects of the same kind, with other content
      diverges   effects were added, removed or exchanged: restore the old
                 code until it has ended, or use fork, or
                 `resume --on-divergence extend`
      failed     it could not be checked: the journal is damaged, or its agent
                 is not found

    Exit codes of --waiting:
      0    every waiting run can be resumed; with --on-divergence keep, also
           those of `keep`
      1    a run could not be checked
      5    a run would diverge

    Examples:
      stepengine replay --last
      stepengine replay run.jsonl
      stepengine replay run.jsonl --speed 4
      stepengine replay run.jsonl --live tool_call
      stepengine replay run.jsonl --live model_call --model openai/gpt-5-mini
      stepengine replay run.jsonl --agent ./agents/mine.py --json
      stepengine replay run.jsonl --agent ./agents/mine.py --pdb
      stepengine replay --waiting
      stepengine replay --waiting journals/ --agent ./agents/mine.py
      stepengine replay --waiting runs.db --on-divergence keep --json
    """
    if waiting:
        for name, given in (("--live", live), ("--speed", speed), ("--pdb", pdb), ("--trust-journal", trust_journal)):
            if given:
                msg = f"{name} is for one run; leave it out with --waiting"
                raise UsageProblem(msg)
        return replay_and_print_waiting_runs(attrs.evolve(options, last=last), files or (), on_divergence or "raise")
    if on_divergence:
        msg = "--on-divergence needs --waiting; `stepengine resume` takes it for one run"
        raise UsageProblem(msg)
    file, *others = files or ("",)
    if others:
        msg = f"{file!r} and {others[0]!r} are several runs; `stepengine test` replays any number"
        raise UsageProblem(msg)
    if trust_journal:
        refuse_inside_tool("replay --trust-journal")
    options = attrs.evolve(options, journal=file, last=last)
    if pdb:
        return run_on_journal(
            attrs.evolve(options, quiet=True), lambda options: _replay_in_debugger(options, live or (), speed or None)
        )
    return run_on_journal(
        options, lambda options: _run_replay(options, live or (), speed or None, trusts=trust_journal)
    )


def _replay_in_debugger(options: Options, live_kinds: Sequence[str], speed: float | None) -> Exit:
    """Replay a run. Open the debugger at a divergence, else print the result; *live_kinds* and *speed* are refused."""
    if live_kinds or speed:
        msg = "--pdb repeats a run from its record alone, at once; leave out --live and --speed"
        raise UsageProblem(msg)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        msg = "--pdb needs a terminal; without one, `stepengine debug FILE --exec` runs commands"
        raise UsageProblem(msg)
    journal = open_journal(options.journal)
    agent, bench = load_replay_setup(options, journal.history())
    stepper = bench.engine.stepper(journal, agent=agent)
    try:
        while stepper.advance():
            stepper.moment()
    except ReplayDivergence as error:
        from stepengine.cli.commands.debug import debug_divergence

        debug_divergence(stepper, error, journal, options)
        return Exit.DIVERGED
    finally:
        stepper.close()
        bench.engine.close()
    return _run_replay(options, live_kinds, speed)


def _run_replay(options: Options, live_kinds: Sequence[str], speed: float | None, *, trusts: bool = False) -> Exit:
    """Replay a run, perform the effects of *live_kinds*, and print the result; return the exit code."""
    from stepengine.journal.recorded_part import parse_live_kinds

    with raise_journal_errors_as_usage():
        parse_live_kinds(live_kinds, has_pace=speed is not None)
    journal = open_journal(options.journal)
    history = journal.history()
    agent = load_recorded_agent(options, history)
    bench = make_engine_setup(options, agent, performs=bool(live_kinds), recorded=history)
    replayed = partial(bench.engine.replay, agent=agent, live=live_kinds, speed=speed, trust=trusts or None)
    run = run_cancelling_on_signal(bench, lambda: replayed(journal))
    if was_cut_off_by_crash(journal, run.result):
        print_error(f"{options.journal} ends before the end of its run; all of its records were replayed")
    return print_result(run, options, bench)
