"""``stepengine fork``: continue a run from the middle, in a new journal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

import attrs
import typer

from stepengine.cli.bench import EngineSetup, make_engine_setup
from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.commands.durable_runs import Agents, fork_durable_run
from stepengine.cli.deployment import App, Db, Pool
from stepengine.cli.evaluation import Budget, Fresh, Simulate, parse_budget
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import (
    create_journal,
    load_recorded_agent,
    make_resume_limits,
    open_journal,
    parse_answers,
    raise_journal_errors_as_usage,
    refuse_untrusted_approvals,
    require_choice,
    run_cancelling_on_signal,
    run_on_journal,
    start_run_and_wait,
)
from stepengine.cli.options import Answers, File, Last, Options, Repeat, read_value_file, with_shared_options
from stepengine.cli.perform import FinishedRun, print_result
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import RunRecording
from stepengine.data.models import ModelReply
from stepengine.journal.encoding import decode_stored

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.engine import Engine
    from stepengine.journal import ForkReport, Journal
    from stepengine.journal.history import History

Perform: TypeAlias = "Callable[[EngineSetup, dict[str, Any], Options], FinishedRun]"
"""Runs a fork with an engine setup, the agent, limits and new journal, and the options that name the new journal."""
STORED = ("model_reply", "tool_result")


@with_shared_options
def fork(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[
        str,
        typer.Option(help="The last effect to keep; default with --tools: the first difference.", metavar="N|PATH#N"),
    ] = "",
    edit: Annotated[
        str | None, typer.Option(help="New outcome of that effect: text, JSON, or @FILE.", metavar="TEXT|JSON|@FILE")
    ] = None,
    into: Annotated[str, typer.Option(help="The new journal; default: next to FILE.", metavar="FILE")] = "",
    allow_repeat: Repeat = False,
    restore_files: Annotated[
        bool, typer.Option("--restore-files", help="First restore the files that were written after N.")
    ] = False,
    answer: Answers = None,
    script: ScriptFile = "",
    tools: Annotated[
        str,
        typer.Option(
            help="Answer tool calls from the record; perform none of the others (recorded), repeatable ones (idempotent) or all "
            "(working-copy).",
            metavar="recorded|idempotent|working-copy",
        ),
    ] = "",
    simulate: Simulate = "",
    fresh: Fresh = False,
    budget: Budget = "",
    db: Db = "",
    agents: Agents = "agents",
    pool: Pool = "default",
    app: App = "stepengine",
) -> Exit:
    """
    Branch a run at any step, into a new journal.

    FILE itself does not change.

    AT is the last effect to keep, numbered as in `stepengine show`: 5, or 3.2#1 for effect 1 of the child 3.2. --edit
    replaces its outcome: text for a model's reply, JSON or text for a tool's result, an answer for a question, or a
    complete reply or result as `stepengine show --json` prints it. --restore-files first restores all files that the
    run wrote after AT, or refuses the fork; see `stepengine undo --help`.

    --tools calls models after AT, or after the first difference, and answers tool calls from the record: first an
    equal recorded call, then --simulate, then the tool itself if --tools allows it. A call without an answer ends
    the run with exit code 5. Model calls equal to recorded ones are not repeated, unless --fresh is given. --budget
    limits the cost of the others.

    --script needs no model and no key: the fork continues after the replies in the part of the record that it keeps.

    With --db, FILE is a durable run: its fork is submitted to the database and its id is printed. --agents names the
    agents of its release.

    Examples:
      stepengine fork --last --at 5
      stepengine fork run.jsonl --at 5
      stepengine fork run.jsonl --at 5 --restore-files
      stepengine fork run.jsonl --at 2 --edit "No such file" --into other.jsonl
      stepengine fork run.jsonl --at 4 --edit @reply.json
      stepengine fork run.jsonl --at 2 --script replies.json
      stepengine fork run.jsonl --tools recorded --budget 0.50
      stepengine fork review-17 --at 4 --db @url --agents my_agents.py
    """
    if answer:
        refuse_inside_tool("fork --answer")
    recorded, live = (
        (("--simulate", simulate), ("--fresh", fresh), ("--budget", budget)),
        (("--edit", edit), ("--allow-repeat", allow_repeat), ("--restore-files", restore_files), ("--answer", answer), ("--db", db)),
    )  # fmt: skip
    if script and db:
        msg = "--script cannot be combined with --db: the workers of the database call models"
        raise UsageProblem(msg)
    for name, given in live if tools else recorded:
        if given:
            msg = f"{name} {'cannot be combined with --tools' if tools else 'needs --tools'}"
            raise UsageProblem(msg)
    if not (at or tools):
        msg = "pass --at with the last effect to keep, or --tools to fork at the first difference"
        raise UsageProblem(msg)
    if db:
        return fork_durable_run(
            file,
            at,
            None if edit is None else _make_edit_function(edit),
            agents=agents,
            db=db,
            allow_repeat=allow_repeat,
            app=app,
            pool=pool,
        )
    options = attrs.evolve(options, journal=file, last=last, script=script)
    if tools:
        make_runner = partial(_make_fork_runner, tools=tools, at=at, simulate=simulate, fresh=fresh, budget=budget)
    else:
        make_runner = partial(
            _make_live_fork_runner,
            at=at,
            edit=edit,
            answers=answer or (),
            allow_repeat=allow_repeat,
            restore_files=restore_files,
        )
    return run_on_journal(options, lambda options: _run_fork(options, at, into, make_runner))


def _run_fork(
    options: Options, at: str, into: str, make_runner: Callable[[Options, Journal, History], Perform]
) -> Exit:
    """Fork a run into a new journal with the function that *make_runner* returns; record its end and print its result."""
    journal = open_journal(options.journal)
    history = journal.history()
    perform = make_runner(options, journal, history)
    target = _create_fork_journal(options, at, into)
    agent = load_recorded_agent(options, history)
    bench = make_engine_setup(options, agent, hidden_journal="" if target is None else target.address, recorded=history)
    about = {"agent_id": agent.id, "prompt": str(history.root.get("prompt", ""))}
    origin = {"stem": options.stem or None, "at": at}
    with RunRecording.create(options, target, command="fork", forked_from=origin, **about) as recording:
        if recording.journal is None:
            msg = "a fork needs a journal: name one with --into FILE"
            raise UsageProblem(msg)
        made, stem = recording.journal, recording.stem if target is None else ""
        new = attrs.evolve(options, journal=made.address, stem=stem)
        run = perform(bench, {"agent": agent, "limits": make_resume_limits(journal, options), "into": made}, new)
        recording.record_end(run.result)
    if not options.quiet:
        print_error(f"the new run is recorded {f'as {stem}' if stem else f'in {made.address}'}")
    return print_result(run, new, bench)


def _make_live_fork_runner(
    options: Options,
    journal: Journal,
    history: History,
    *,
    at: str,
    edit: str | None,
    answers: Iterable[str],
    allow_repeat: bool,
    restore_files: bool,
) -> Perform:
    """Check the options and return the function that runs a fork with live models and tools."""
    from stepengine.journal.recorded_part import parse_result_address

    live: dict[str, Any] = {
        "at": at,
        "answers": parse_answers(answers),
        "edit": None if edit is None else _make_edit_function(edit),
        "allow_repeat": allow_repeat,
        "restore_files": options.cwd if restore_files else None,
    }
    with raise_journal_errors_as_usage():
        address = parse_result_address(history, at)
    refuse_untrusted_approvals(journal, history, address, edited=edit is not None)
    return lambda bench, asked, new: start_run_and_wait(
        bench, lambda: bench.engine.start_fork(journal, **live, **asked), new
    )


def _make_fork_runner(
    options: Options,
    journal: Journal,
    history: History,
    *,
    tools: str,
    at: str,
    simulate: str,
    fresh: bool,
    budget: str,
) -> Perform:
    """Check the options, and return the function that runs a fork whose tool calls are answered from the record first."""
    from stepengine.evaluation.checks import load_function
    from stepengine.journal.permission_reset import refuse_approvals_of_others
    from stepengine.journal.recorded_forks import ForkTools, find_address_after

    require_choice("--tools", tools, get_args(ForkTools))
    with raise_journal_errors_as_usage():
        find_address_after(journal, at or None)
    if tools != "recorded":
        with raise_journal_errors_as_usage():
            refuse_approvals_of_others(journal, history)
    given: dict[str, Any] = {
        "tools": tools,
        "at": at or None,
        "reuse": not fresh,
        "budget": parse_budget(budget),
        "simulate": load_function(simulate) if simulate else None,
    }

    async def fork_and_report(engine: Engine, asked: dict[str, Any]) -> RunResult:
        """Fork the run with recorded tools, print the counts of calls on stderr, and return the result."""
        report: ForkReport = await engine.fork(journal, **given, **asked)
        if not options.quiet:
            print_error(
                f"from {report.broke_at} on: {report.model_calls} model calls, {report.reused} reused; tool calls: {report.served} "
                f"answered from the record, {report.simulated} simulated, {report.performed} performed"
                if report.broke_at
                else "nothing differs from the record, so no model was called"
            )
        return report.result

    return lambda bench, asked, _: run_cancelling_on_signal(bench, lambda: fork_and_report(bench.engine, asked))


def _create_fork_journal(options: Options, at: str, into: str) -> Journal | None:
    """Return the new journal of a fork, *into* or a file next to its source; ``None`` for a journal in the state folder."""
    if not into and options.stem:
        return None
    from stepengine.journal.sources import get_journal_file

    place = re.sub(r"[^0-9]+", "-", at.lstrip("#")) or "difference"
    source = get_journal_file(options.journal)
    return create_journal(into or str(source.with_name(f"{source.stem}.fork-{place}.jsonl")))


def _make_edit_function(text: str) -> Callable[[Any], object]:
    """Return a function that replaces a recorded outcome by the typed value, parsed as JSON if possible."""
    if text.startswith("@"):
        text = read_value_file(text[1:], "--edit")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        value = text

    def apply_edit(recorded: object) -> object:
        if isinstance(value, dict) and value.get("type") in STORED:
            return decode_stored(value)
        # A reply and an answer are text, even if it is valid JSON.
        return text if isinstance(recorded, ModelReply | tuple) else value

    return apply_edit
