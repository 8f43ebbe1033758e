"""``stepengine extend``: recording a run again as far as it has changed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import attrs

from stepengine.cli.bench import bench_for
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import (
    answers_of,
    asks_again,
    journal_at,
    limits_again,
    name_of,
    on_journal,
    perform_run,
    recorded_agent,
)
from stepengine.cli.options import Answers, File, Last, Options, Repeat, TrustAnswers, with_options
from stepengine.cli.perform import print_result
from stepengine.cli.recording import RunRecording, recorded_as
from stepengine.cli.trusting import refuse_inside
from stepengine.data.state import RunStatus

__all__ = ("extend",)


@with_options
def extend(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    allow_repeat: Repeat = False,
    answer: Answers = None,
    trust_answers: TrustAnswers = False,
) -> Exit:
    """
    Record a run again where its agent was changed.

    What is still equal is kept, the rest really happens.

    Only what changed is paid for. FILE is replaced when the run has ended or waits for an answer, and stays as it is
    when the run fails. What it held before is kept beside it, as run.before-1.jsonl. Effects that changed the world and
    do not hold any more would happen again: that needs --allow-repeat. To go on in another file: stepengine fork.

    Unless FILE is as your own commands left it, its permissions hold for calls whose results stand in it; for all others
    they are asked for again, also where its run has ended. --trust-answers takes what stands there.

    Examples:
      stepengine extend run.jsonl
      stepengine extend run.jsonl --agent ./agents/mine.py --answer q3=yes
    """
    if answer or trust_answers:
        refuse_inside("extend --answer" if answer else "extend --trust-answers")
    options = attrs.evolve(options, journal=file, last=last)
    return on_journal(
        options, lambda options: _extend(options, answer or (), allow_repeat=allow_repeat, trusts=trust_answers)
    )


def _extend(options: Options, answers: Iterable[str], *, allow_repeat: bool, trusts: bool) -> Exit:
    from stepengine.journal.provenance import has_known_permissions
    from stepengine.journal.reopening import take_back

    journal, given = journal_at(options.journal), answers_of(answers)
    history = journal.history()
    agent = recorded_agent(journal, options, history)
    doubts = not trusts and not has_known_permissions(journal)
    if doubts and asks_again(journal, history):
        take_back(journal)
    bench = bench_for(options, agent, recorded=history)
    extend = bench.engine.extend
    limits = limits_again(journal, options)
    asked = partial(extend, answers=given, allow_repeat=allow_repeat, limits=limits, ask_again=doubts)
    run = perform_run(bench, lambda: asked(journal, agent=agent))
    if run.result.status is not RunStatus.FAILED:
        RunRecording(journal, recorded_as(options.journal)).ended(run.result)
    if run.result.status is RunStatus.FAILED:
        complain(f"{options.journal} stays as it was")
    elif (made := journal.extended) is not None and not options.quiet:
        before = "" if made.before is None else f"; as it was: {name_of(made.before)}"
        counted = f"kept {made.kept} of {made.recorded} effects, recorded {made.anew} anew"
        complain(f"{options.journal}: {counted}{before}")
    return print_result(run, options, bench)
