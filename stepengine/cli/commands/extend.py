"""``stepengine extend``: recording a run again as far as it has changed."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from stepengine.cli.bench import bench_for
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import (
    answers_of,
    asks_again,
    hooks_of,
    journal_at,
    limits_again,
    name_of,
    on_journal,
    performed,
    recorded_agent,
)
from stepengine.cli.options import Answers, File, Last, Options, Repeat, with_options
from stepengine.cli.perform import told
from stepengine.cli.recording import Recording, recorded_as
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
) -> Exit:
    """
    Record a run again where its agent was changed.

    What is still equal is kept, the rest really happens.

    Only what changed is paid for. FILE is replaced when the run has ended or waits for an answer, and stays as it is
    when the run fails. What it held before is kept beside it, as run.before-1.jsonl. Effects that changed the world and
    do not hold any more would happen again: that needs --allow-repeat. To go on in another file: stepengine fork.

    Examples:
      stepengine extend run.jsonl
      stepengine extend run.jsonl --agent ./agents/mine.py --answer q3=yes
    """
    if answer:
        refuse_inside("extend --answer")
    options = attrs.evolve(options, journal=file, last=last)
    return on_journal(options, lambda options: _extend(options, answer or (), allow_repeat=allow_repeat))


def _extend(options: Options, answers: Iterable[str], *, allow_repeat: bool) -> Exit:
    from stepengine.journal.reopening import take_back

    journal, given = journal_at(options.journal), answers_of(answers)
    history = journal.history()
    agent = recorded_agent(journal, options, history)
    if asks_again(journal, history):
        take_back(journal)
    bench = bench_for(options, agent, hooks=hooks_of(history))
    extend = bench.engine.extend
    limits = limits_again(journal, options)
    run = performed(
        bench, lambda: extend(journal, agent=agent, answers=given, allow_repeat=allow_repeat, limits=limits)
    )
    if run.result.status is not RunStatus.FAILED:
        Recording(journal, recorded_as(options.journal)).ended(run.result)
    if run.result.status is RunStatus.FAILED:
        complain(f"{options.journal} stays as it was")
    elif (made := journal.extended) is not None and not options.quiet:
        before = "" if made.before is None else f"; as it was: {name_of(made.before)}"
        counted = f"kept {made.kept} of {made.recorded} effects, recorded {made.anew} anew"
        complain(f"{options.journal}: {counted}{before}")
    return told(run, options, bench)
