"""``stepengine resume``: going on with a run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, cast

import attrs
import typer

from stepengine.cli.bench import bench_for
from stepengine.cli.exits import Exit
from stepengine.cli.journals import (
    GoingOn,
    answers_of,
    asks_again,
    hooks_of,
    journal_at,
    limits_again,
    on_journal,
    performed,
    recorded_agent,
)
from stepengine.cli.options import Answers, File, Last, Options, TrustAnswers, with_options
from stepengine.cli.perform import told
from stepengine.cli.recording import Recording, recorded_as
from stepengine.cli.trusting import refuse_inside

__all__ = ("resume",)


@with_options
def resume(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    answer: Answers = None,
    in_doubt: Annotated[str, typer.Option(help="fail, retry or ask.")] = "fail",
    on_divergence: Annotated[str, typer.Option(help="raise, stop or keep.")] = "raise",
    trust_answers: TrustAnswers = False,
) -> Exit:
    """
    Go on with a run: answer it, or pick it up after a crash.

    What is recorded is not done again: no model is asked twice, no tool runs twice. A run that has ended just prints
    its result again. The agent is found by the id in FILE, as `stepengine run` finds ids, or given with --agent.

    A run that `stepengine runs` lists takes over what it was started with and what is not typed again: the agent's file,
    --base-url, --cwd, --write, --shell, --web and --config. For any other FILE these are given again. The models and
    the limits stand in FILE itself; --model takes others from here on. Never taken over: --json, --quiet, --verbose.

    Examples:
      stepengine resume --last --answer q3=yes
      stepengine resume run.jsonl
      stepengine resume run.jsonl --answer q3=yes
      stepengine resume run.jsonl --agent ./drafts/mine.py --in-doubt retry

    --in-doubt, for an effect that a crash cut off, so that nobody knows whether it happened:
      fail     the handler gets UnknownOutcome at its yield (default)
      retry    it is done again
      ask      the run is suspended with a question about it

    --on-divergence, for an agent that was edited since, so that it asks for something else than FILE holds:
      raise    say where, and leave with 5 (default); stop says so in the result
      keep     where FILE holds an effect of the same kind, go on with what
               came of it; from where FILE ends, the code runs as it is now.
               `stepengine ready FILE` says beforehand whether that works

    A permission in FILE for a call that has not begun is asked for again, unless FILE is as your own commands left it:
    whoever wrote it could have said yes. FILE as it was is kept beside it. --trust-answers takes what stands there.
    """
    if answer or trust_answers:
        refuse_inside("resume --answer" if answer else "resume --trust-answers")
    how = GoingOn(in_doubt, on_divergence)
    options = attrs.evolve(options, journal=file, last=last)
    return on_journal(
        options, lambda options: _resume(options, answer or (), how, trusts=trust_answers), is_waiting=True
    )


def _resume(options: Options, answers: Iterable[str], how: GoingOn, *, trusts: bool) -> Exit:
    in_doubt, divergence = cast("Any", attrs.astuple(how.checked()))
    journal, given = journal_at(options.journal), answers_of(answers)
    history = journal.history()
    agent = recorded_agent(journal, options, history)
    again = not trusts and asks_again(journal, history)
    bench = bench_for(options, agent, performs=not history.is_complete, hooks=hooks_of(history))
    limits = limits_again(journal, options)
    resume = bench.engine.resume
    asked = partial(resume, in_doubt=in_doubt, on_divergence=divergence, ask_again=again)
    run = performed(bench, lambda: asked(journal, agent=agent, answers=given, limits=limits))
    Recording(journal, recorded_as(options.journal)).ended(run.result)
    return told(run, options, bench)
