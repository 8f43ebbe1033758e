"""``stepengine resume``: resume a run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.bench import make_engine_setup
from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.due_runs import resume_all_due_runs
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import (
    load_recorded_agent,
    make_resume_limits,
    open_journal,
    parse_answers,
    report_ignored_approvals,
    require_choice,
    run_on_journal,
    start_run_and_wait,
)
from stepengine.cli.options import Answers, File, Last, Options, Repeat, Sign, TrustJournal, with_shared_options
from stepengine.cli.perform import format_resume_command, print_questions, print_result
from stepengine.cli.screen.confirm import can_ask_at_terminal
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import RunRecording, find_recorded_run_by_journal
from stepengine.data.state import RunStatus
from stepengine.errors import MissingKey, ReplayDivergence, UnknownModel
from stepengine.journal.pending_items import find_open_questions

if TYPE_CHECKING:
    from stepengine.data.questions import AnswerLike
    from stepengine.data.state import RunResult
    from stepengine.journal import Journal
    from stepengine.journal.history import History


@with_shared_options
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
    now: Annotated[bool, typer.Option("--now", help="Wake the run now, whatever its wake time.")] = False,
    trust_journal: TrustJournal = False,
    sign: Sign = "",
    due: Annotated[bool, typer.Option("--due", help="Resume all due runs of a store; FILE is the store.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="With --due: keep running until stopped.")] = False,
    every: Annotated[
        float | None,
        typer.Option(help="With --watch: seconds between checks; default: 1.", min=0.05, max=3600),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="With --due: number of concurrent runs; default: 4.", min=1, max=1000)
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option(help="With --due: an agent file, or a folder of them; may be repeated.", metavar="PATH"),
    ] = None,
) -> Exit:
    """
    Resume a run: answer its question, or continue after a crash.

    Recorded effects are not repeated: no model is called twice and no tool runs twice. For an ended run, the result
    is printed again. The agent is looked up by the id in FILE, or given with --agent.

    A run that `stepengine runs` lists keeps its start options unless you pass them again: the agent file, --script,
    --base-url with --api-key-env, --cwd, --write, --shell, --web and --config. For any other FILE, pass them again.
    Models and limits are stored in FILE; --model replaces the models. --json, --quiet and --verbose are never kept.

    --script needs no model and no key: the run continues after the replies in its record.

    Examples:
      stepengine resume --last --answer q3=yes
      stepengine resume run.jsonl
      stepengine resume run.jsonl --answer q3=yes
      stepengine resume run.jsonl --agent ./drafts/mine.py --in-doubt retry
      stepengine resume run.jsonl --on-divergence extend
      stepengine resume --due
      stepengine resume --due RUNS.db --watch --every 5 --agents ./agents

    --in-doubt decides about an effect in doubt: a crash interrupted it, so it may or may not have happened:
      ask      asks about each effect: repeat it, raise UnknownOutcome in the
               handler, or enter its result (default at a terminal; without
               one, the run is suspended with a question)
      fail     raises UnknownOutcome at the yield (default without a terminal)
      retry    repeats the effect
    To pass the result in advance: --answer 'doubt:#3=result:JSON-or-TEXT'

    --on-divergence applies if an edited agent yields something other than FILE records:
      raise    prints the place, exits with 5 (default); stop returns it as result
      keep     uses the recorded result if FILE has an effect of the same kind;
               after the end of FILE, the current code runs.
               `stepengine replay --waiting FILE` tests whether that works
      extend   keeps the equal part, and records anew from the first
               difference on, also after the end of the run. FILE is replaced
               at the end unless the run fails; the old one is kept as
               run.before-1.jsonl. Effects that changed the outside world and
               would happen again need --allow-repeat. To continue in another
               file: stepengine fork

    A run that sleeps, or waits for a message or a child, continues when the wait ends. --now ends sleeps and
    timeouts at once.

    --due resumes every run whose sleep has ended or whose message has arrived (`stepengine send`). FILE is then a
    folder of journals or an SQLite file; default: the state folder. For a named store, the schedules of its agents
    are started, too. Runs that wait only for a person stay suspended until they are answered. Without --watch, each
    run is resumed once, for cron and timers. Several processes may work on one store. Failed attempts are retried
    after increasing delays. An effect in doubt is not repeated: the run is suspended with a question about it.
    --agents names the agents of runs that `stepengine runs` does not list. --json prints one JSON object per line.

    Exit codes of --due:
      0    all due runs were resumed (with --watch: it was stopped)
      1    a run failed or could not be resumed
      2    wrong usage: the store does not exist

    If FILE was written or changed by others, you are asked about its approvals of calls that have not started, and
    about the calls that only FILE requests. A copy of the old FILE is kept next to it if approvals are dropped.
    --trust-journal trusts FILE as a journal of your own.
    """
    if answer or trust_journal:
        refuse_inside_tool("resume --answer" if answer else "resume --trust-journal")
    only_one = (
        ("--last", last), ("--answer", answer), ("--in-doubt", in_doubt), ("--on-divergence", on_divergence != "raise"),
        ("--allow-repeat", allow_repeat), ("--script", script), ("--now", now), ("--sign", sign), ("--agent", options.agent),
    )  # fmt: skip
    only_due = (("--watch", watch), ("--every", every), ("--concurrency", concurrency), ("--agents", agents))
    for name, given in only_one if due else only_due:
        if given:
            msg = f"{name} {'is for one run; leave it out with --due' if due else 'needs --due'}"
            raise UsageProblem(msg)
    if every and not watch:
        msg = "--every needs --watch; without it, each run is resumed once"
        raise UsageProblem(msg)
    if due:
        return resume_all_due_runs(
            options, file, agents=agents or (), interval_seconds=(every or 1.0) if watch else None, concurrency=concurrency or 4,
            trusts=trust_journal,
        )  # fmt: skip
    how = {
        "in_doubt": require_choice(
            "--in-doubt", in_doubt or ("ask" if can_ask_at_terminal() else "fail"), ("fail", "retry", "ask")
        ),
        "on_divergence": require_choice("--on-divergence", on_divergence, ("raise", "stop", "keep", "extend")),
        "allow_repeat": allow_repeat,
        "now": now,
    }
    extends = on_divergence == "extend"
    if allow_repeat and not extends:
        msg = "--allow-repeat needs --on-divergence extend"
        raise UsageProblem(msg)
    options = attrs.evolve(options, journal=file, last=last, script=script)
    return run_on_journal(
        options,
        lambda options: _run_resume(options, answer or (), how, trusts=trust_journal, sign=sign),
        resumable_only=not extends,
    )


def _refuse_missing_results(history: History, answered_ids: Collection[str]) -> None:
    """Raise ``UsageProblem`` if the run waits for the result of an external tool call that *answered_ids* lacks."""
    from stepengine.journal.questions import make_external_result_questions

    open_ = [
        question
        for question in ([] if history.is_complete else make_external_result_questions(history))
        if question.id not in answered_ids
    ]
    if open_:
        first = open_[0]
        what = first.text.partition(" was cut off")[0]
        msg = f"{what} waits for an external result; to supply it: --answer '{first.id}=result:JSON-or-TEXT'"
        raise UsageProblem(msg)


async def _ask_in_doubt_questions(history: History, answered_ids: Collection[str], color: str) -> dict[str, AnswerLike]:
    """Ask the person about each undecided effect in doubt, and return the answers by question id; skipped questions stay open."""
    from stepengine.cli.screen.console import TerminalInteractor
    from stepengine.journal.questions import make_doubt_questions

    interactor = TerminalInteractor(color=color)
    answers: dict[str, AnswerLike] = {}
    for question in [] if history.is_complete else make_doubt_questions(history):
        said = None if question.id in answered_ids else await interactor.ask(question)
        if said is not None:
            answers[question.id] = said
    return answers


def _run_resume(
    options: Options, answers: Iterable[str], resume_arguments: dict[str, Any], *, trusts: bool, sign: str
) -> Exit:
    """Resume the run in ``options.journal``, record its end and print its result; *sign* is a key file."""
    from stepengine.journal.provenance import has_trusted_permissions

    extends = resume_arguments["on_divergence"] == "extend"
    journal, given = open_journal(options.journal, sign=sign), parse_answers(answers)
    history = journal.history()
    agent = load_recorded_agent(options, history)
    again = not trusts and (
        report_ignored_approvals(journal, history) or (extends and not has_trusted_permissions(journal))
    )
    bench = make_engine_setup(options, agent, performs=extends or not history.is_complete, recorded=history)
    limits = make_resume_limits(journal, options)
    if not extends:
        _refuse_missing_results(history, given)
    if resume_arguments["in_doubt"] == "ask" and can_ask_at_terminal():
        given |= asyncio.run(_ask_in_doubt_questions(history, given, options.settings.get("display.color")))
    resume_arguments |= {"agent": agent, "limits": limits, "trust": trusts or (False if again else None)}
    models = options.models or None
    try:
        run = start_run_and_wait(
            bench,
            lambda: bench.engine.start_resume(journal, answers=given, agent_models=models, **resume_arguments),
            options,
        )
    except (MissingKey, UnknownModel):
        # Nothing was printed yet, and the question explains why a key is needed.
        waiting = [question for _, question in find_open_questions(history).values() if question.id not in given]
        print_questions(waiting, format_resume_command(options, agent.id))
        raise
    # A diverged run recorded nothing, so its companion stays valid.
    is_unchanged = isinstance(run.result.error, ReplayDivergence) or (extends and run.result.status is RunStatus.FAILED)
    if not is_unchanged:
        RunRecording(journal, find_recorded_run_by_journal(options.journal)).record_end(run.result)
    if extends:
        _print_extension_counts(journal, run.result, options)
    return print_result(run, options, bench)


def _print_extension_counts(journal: Journal, result: RunResult, options: Options) -> None:
    """Print how many effects an extended journal kept and recorded anew, or that it was not changed."""
    if result.status is RunStatus.FAILED:
        print_error(f"{options.journal} was not changed")
    elif (made := journal.extended) is not None and not options.quiet:
        before = "" if made.before is None else f"; the original: {made.before.address}"
        print_error(
            f"{options.journal}: kept {made.kept} of {made.recorded} effects, recorded {made.anew} new ones{before}"
        )
