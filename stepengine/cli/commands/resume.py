"""``stepengine resume``: going on with a run."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.bench import bench_for
from stepengine.cli.due_runs import resume_due
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import (
    RESULT,
    answer_with_result,
    answers_of,
    asks_again,
    choice_of,
    follow_run,
    journal_at,
    limits_again,
    name_of,
    on_journal,
    recorded_agent,
)
from stepengine.cli.options import Answers, File, Last, Options, Repeat, Sign, TrustAnswers, with_options
from stepengine.cli.perform import print_result, resume_hint, tell_questions
from stepengine.cli.recording import RunRecording, recorded_as
from stepengine.cli.screen.render import is_terminal, visible
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside
from stepengine.data.json import compact
from stepengine.data.state import RunStatus
from stepengine.errors import MissingKey, UnknownModel

if TYPE_CHECKING:
    from stepengine.data.questions import AnswerLike, Question
    from stepengine.data.state import RunResult
    from stepengine.journal import Journal
    from stepengine.journal.history import History

__all__ = ("can_ask", "resume")

SHOWN_CHARS = 1_000
YES, NO = ("y", "yes"), ("n", "no")
CHOICES = (
    "y do it again, n the handler gets UnknownOutcome, result:JSON-or-TEXT that came of it, Enter decides later > "
)


@with_options
def resume(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    answer: Answers = None,
    in_doubt: Annotated[
        str, typer.Option(help="fail, retry or ask.", show_default="ask at a terminal, else fail")
    ] = "",
    on_divergence: Annotated[str, typer.Option(help="raise, stop, keep or extend.")] = "raise",
    allow_repeat: Repeat = False,
    script: ScriptFile = "",
    now: Annotated[bool, typer.Option("--now", help="Wake it now, whatever time it sleeps until.")] = False,
    trust_answers: TrustAnswers = False,
    sign: Sign = "",
    due: Annotated[
        bool, typer.Option("--due", help="Resume all runs of a store whose time has come; FILE is the store.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="With --due: continue until told to stop.")] = False,
    every: Annotated[
        float | None,
        typer.Option(help="With --watch: seconds between two looks; 1 by default.", min=0.05, max=3600),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(help="With --due: how many runs at the same time; 4 by default.", min=1, max=1000)
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option(help="With --due: an agent file, or a folder of them; may be repeated.", metavar="PATH"),
    ] = None,
) -> Exit:
    """
    Go on with a run: answer it, or pick it up after a crash.

    What is recorded is not done again: no model is asked twice, no tool runs twice. A run that has ended just prints
    its result again. The agent is found by the id in FILE, as `stepengine run` finds ids, or given with --agent.

    A run that `stepengine runs` lists takes over what it was started with and what is not typed again: the agent's file,
    --script, --base-url, --cwd, --write, --shell, --web and --config. For any other FILE these are given again. The models and
    the limits stand in FILE itself; --model takes others from here on. Never taken over: --json, --quiet, --verbose.

    With --script no model is asked and no key is needed: the run gets the replies behind those in its record.

    Examples:
      stepengine resume --last --answer q3=yes
      stepengine resume run.jsonl
      stepengine resume run.jsonl --answer q3=yes
      stepengine resume run.jsonl --agent ./drafts/mine.py --in-doubt retry
      stepengine resume run.jsonl --on-divergence extend
      stepengine resume --due
      stepengine resume --due RUNS.db --watch --every 5 --agents ./agents

    --in-doubt, for an effect that a crash cut off, so that nobody knows whether it happened:
      ask      you are asked about each: do it again, let the handler get
               UnknownOutcome, or say what came of it (default at a terminal;
               elsewhere the run is suspended with a question)
      fail     the handler gets UnknownOutcome at its yield (default elsewhere)
      retry    it is done again
    What came of it can be said beforehand: --answer 'doubt:#3=result:JSON-or-TEXT'

    --on-divergence, for an agent that was edited since, so that it asks for something else than FILE holds:
      raise    say where, and leave with 5 (default); stop says so in the result
      keep     where FILE holds an effect of the same kind, go on with what
               came of it; from where FILE ends, the code runs as it is now.
               `stepengine replay --waiting FILE` says whether that works
      extend   keep what is still equal, and record anew from the first
               difference on, also where the run has ended. FILE is replaced
               at the end unless the run fails; the old one is kept as
               run.before-1.jsonl. Effects that changed the world and would
               happen again need --allow-repeat. To continue in another
               file: stepengine fork

    A run that sleeps, or waits for a message or a child, goes on when that is over: --now ends its sleeps and its patience.

    --due resumes every run that sleeps and whose time has come, or that was sent what it waits for (`stepengine send`).
    FILE is then a folder of journals or an SQLite file; without it, the runs that are recorded by default. In a store that is
    named, the schedules of its agents are started, too. A run that waits only for a person is left alone until it was
    answered. Without --watch each run is resumed once: for cron and timers. Several processes may work on one store. What
    cannot be resumed is tried again after growing pauses. An effect that a crash cut off is not repeated: the run is
    suspended with a question about it. --agents says where agents are, for runs that `stepengine runs` does not list.
    --json prints one JSON object a line.

    With --due it leaves with:
      0    all that was due was resumed (with --watch: it was told to stop)
      1    a run failed, or could not be resumed
      2    wrong usage: no such store

    A permission in FILE for a call that has not begun is asked for again, unless FILE is as your own commands left it:
    whoever wrote it could have said yes. FILE as it was is kept beside it. --trust-answers takes what stands there.
    """
    if answer or trust_answers:
        refuse_inside("resume --answer" if answer else "resume --trust-answers")
    only_one = (
        ("--last", last), ("--answer", answer), ("--in-doubt", in_doubt), ("--on-divergence", on_divergence != "raise"),
        ("--allow-repeat", allow_repeat), ("--script", script), ("--now", now), ("--sign", sign), ("--agent", options.agent),
    )  # fmt: skip
    only_due = (("--watch", watch), ("--every", every), ("--at-once", at_once), ("--agents", agents))
    for name, given in only_one if due else only_due:
        if given:
            msg = f"{name} {'is for one run; leave it out with --due' if due else 'needs --due'}"
            raise UsageProblem(msg)
    if due:
        return resume_due(
            options, file, agents=agents or (), every=(every or 1.0) if watch else None, at_once=at_once or 4,
            trusts=trust_answers,
        )  # fmt: skip
    how = {
        "in_doubt": choice_of("--in-doubt", in_doubt or ("ask" if can_ask() else "fail"), ("fail", "retry", "ask")),
        "on_divergence": choice_of("--on-divergence", on_divergence, ("raise", "stop", "keep", "extend")),
        "allow_repeat": allow_repeat,
        "now": now,
    }
    extends = on_divergence == "extend"
    if allow_repeat and not extends:
        msg = "--allow-repeat needs --on-divergence extend"
        raise UsageProblem(msg)
    options = attrs.evolve(options, journal=file, last=last, script=script)
    return on_journal(
        options,
        lambda options: _resume(options, answer or (), how, trusts=trust_answers, sign=sign),
        is_waiting=not extends,
    )


def can_ask() -> bool:
    """Return whether a person sits there: they see stderr, and what they type is read."""
    return is_terminal(sys.stdin) and is_terminal()


def _refuse_waiting(history: History, given: Collection[str]) -> None:
    """Refuse to wait for what no command can receive: the result of a call whose tool leaves that to somebody outside."""
    from stepengine.journal.questions import waiting_calls

    open_ = [
        question for question in ([] if history.is_complete else waiting_calls(history)) if question.id not in given
    ]
    if open_:
        first = open_[0]
        what = first.text.partition(" was cut off")[0]
        msg = f"{what} waits for its result, which comes from outside; where you know it: --answer '{first.id}=result:JSON-or-TEXT'"
        raise UsageProblem(msg)


def looked_at(history: History, given: Collection[str]) -> dict[str, AnswerLike]:
    """Ask the person at the terminal about each effect in doubt that is not decided yet; what they skip stays open."""
    from stepengine.journal.questions import doubts

    answers: dict[str, AnswerLike] = {}
    for question in [] if history.is_complete else doubts(history):
        said = None if question.id in given else _decision(question)
        if said is not None:
            answers[question.id] = said
    return answers


def _decision(question: Question) -> AnswerLike | None:
    print(visible(f"{question.text}\n  with: {compact(question.details)[:SHOWN_CHARS]}"), file=sys.stderr)
    while True:
        print(CHOICES, end="", file=sys.stderr, flush=True)
        typed = sys.stdin.readline().strip()
        if not typed:
            return None
        word = typed.lower()
        if word in YES + NO:
            return word in YES
        if typed.startswith(RESULT):
            return answer_with_result(typed)


def _resume(options: Options, answers: Iterable[str], how: dict[str, Any], *, trusts: bool, sign: str) -> Exit:
    from stepengine.journal.provenance import has_known_permissions

    extends = how["on_divergence"] == "extend"
    journal, given = journal_at(options.journal, sign=sign), answers_of(answers)
    history = journal.history()
    agent = recorded_agent(journal, options, history)
    again = not trusts and (asks_again(journal, history) or (extends and not has_known_permissions(journal)))
    bench = bench_for(options, agent, performs=extends or not history.is_complete, recorded=history)
    limits = limits_again(journal, options)
    if not extends:
        _refuse_waiting(history, given)
    if how["in_doubt"] == "ask" and can_ask():
        given |= looked_at(history, given)
    how |= {"agent": agent, "limits": limits, "ask_again": again}
    models = options.models or None
    try:
        run = follow_run(bench, lambda: bench.engine.start_resume(journal, answers=given, agent_models=models, **how))
    except (MissingKey, UnknownModel):
        # Nothing was shown yet, and the question tells why a key is needed.
        waiting = [question for _, question in history.open_questions().values() if question.id not in given]
        tell_questions(waiting, resume_hint(options, agent.id))
        raise
    if not extends or run.result.status is not RunStatus.FAILED:
        RunRecording(journal, recorded_as(options.journal)).ended(run.result)
    if extends:
        _tell_extension(journal, run.result, options)
    return print_result(run, options, bench)


def _tell_extension(journal: Journal, result: RunResult, options: Options) -> None:
    if result.status is RunStatus.FAILED:
        complain(f"{options.journal} stays as it was")
    elif (made := journal.extended) is not None and not options.quiet:
        before = "" if made.before is None else f"; as it was: {name_of(made.before)}"
        complain(f"{options.journal}: kept {made.kept} of {made.recorded} effects, recorded {made.anew} anew{before}")
