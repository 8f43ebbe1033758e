"""``stepengine replay``: a run again from its record."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, TypeAlias

import attrs
import typer

from stepengine.cli.bench import bench_for
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import as_usage, is_cut_off, journal_at, on_journal, perform_run, recorded_agent
from stepengine.cli.options import Last, Options, TrustAnswers, with_options
from stepengine.cli.perform import print_result
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside
from stepengine.cli.waiting_runs import replay_waiting
from stepengine.errors import ReplayDivergence

__all__ = ("replay",)

ReplayFiles: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="A journal, or the beginning of a run's name in `stepengine runs`; RUNS.db#RUN in an SQLite file. With --waiting any number.",
    ),
]


@with_options
def replay(
    options: Options,
    files: ReplayFiles = None,
    *,
    last: Last = False,
    speed: Annotated[
        float, typer.Option(help="How fast results come; 1 as they did, 0 all at once.", min=0, metavar="X")
    ] = 0,
    live: Annotated[
        list[str] | None,
        typer.Option(help="Effects that really happen: tool_call, perform, model_call.", metavar="KIND"),
    ] = None,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="Where it differs, open the debugger; breakpoint() opens pdb.")
    ] = False,
    trust_answers: TrustAnswers = False,
    waiting: Annotated[
        bool, typer.Option("--waiting", help="Replay every waiting run, and say which the present code can resume.")
    ] = False,
    on_divergence: Annotated[
        str, typer.Option(help="With --waiting: raise or keep, as it will be given to resume.")
    ] = "",
) -> Exit:
    """
    Repeat a run from its record, without model and network.

    The present code of the agent decides, the record answers. When the agent does something else than it did, the first
    difference is told, with step, file, line and fields, and the exit code is 5.

    With --speed the results come as fast as they did, or faster, to watch a run again. With --live some effects really
    happen: tool_call and perform must come to the recorded results; model_call lets a model answer anew against the
    recorded tools, and ends at the first call that was not recorded. With --live tool_call a permission in FILE lets no tool
    run, unless FILE is as your own commands left it: whoever wrote it could have said yes. --trust-answers takes it.

    --waiting is for a look before a deployment: which waiting runs can `stepengine resume` continue with the present code?
    Nothing is performed or changed, and no key is needed. FILE is a journal, a folder of them, an SQLite file or a run's
    name; without one, what `stepengine runs --waiting` lists. Runs that have ended do not count.

    With --waiting, for each run, and the first place that differs:
      ready      it is resumed as it is
      keep       it is resumed with `resume --on-divergence keep`: what is
                 recorded are effects of the same kind, with other content
      diverges   effects were added, removed or exchanged: put the old code
                 back until it has ended, or use fork, or
                 `resume --on-divergence extend`
      failed     it could not be tried: the journal is damaged, or its agent
                 is not found

    With --waiting it leaves with:
      0    every waiting run can be resumed; with --on-divergence keep, also
           those of `keep`
      1    a run could not be tried
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
        for name, given in (("--live", live), ("--speed", speed), ("--pdb", pdb), ("--trust-answers", trust_answers)):
            if given:
                msg = f"{name} is for one run; leave it out with --waiting"
                raise UsageProblem(msg)
        return replay_waiting(attrs.evolve(options, last=last), files or (), on_divergence or "raise")
    if on_divergence:
        msg = "--on-divergence needs --waiting; `stepengine resume` takes it for one run"
        raise UsageProblem(msg)
    file, *others = files or ("",)
    if others:
        msg = f"{file!r} and {others[0]!r} are several runs; `stepengine test` replays any number"
        raise UsageProblem(msg)
    if trust_answers:
        refuse_inside("replay --trust-answers")
    options = attrs.evolve(options, journal=file, last=last)
    if pdb:
        return on_journal(
            attrs.evolve(options, quiet=True), lambda options: _parking(options, live or (), speed or None)
        )
    return on_journal(options, lambda options: _replay(options, live or (), speed or None, trusts=trust_answers))


def _parking(options: Options, live: Sequence[str], speed: float | None) -> Exit:
    """Repeat a run without a loop, and open the debugger where it differs: its machine waits there."""
    if live or speed:
        msg = "--pdb repeats a run from its record alone, at once; leave out --live and --speed"
        raise UsageProblem(msg)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        msg = "--pdb needs a terminal; without one, `stepengine debug FILE --exec` runs commands"
        raise UsageProblem(msg)
    journal = journal_at(options.journal)
    history = journal.history()
    agent = recorded_agent(journal, options, history)
    bench = bench_for(options, agent, performs=False, recorded=history)
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
    return _replay(options, live, speed)


def _replay(options: Options, live: Sequence[str], speed: float | None, *, trusts: bool = False) -> Exit:
    from stepengine.journal.provenance import has_known_permissions
    from stepengine.journal.replayer import live_kinds

    with as_usage():
        live_kinds(live, has_pace=speed is not None)
    journal = journal_at(options.journal)
    history = journal.history()
    agent = recorded_agent(journal, options, history)
    bench = bench_for(options, agent, performs=bool(live), recorded=history)
    doubts = bool(live) and not trusts and not has_known_permissions(journal)
    replayed = partial(bench.engine.replay, agent=agent, live=live, speed=speed, ask_again=doubts)
    run = perform_run(bench, lambda: replayed(journal))
    if is_cut_off(journal, run.result):
        complain(f"{options.journal} ends before its run did; what it holds was repeated")
    return print_result(run, options, bench)
