"""``stepengine fork``: going on from the middle of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import Bench, bench_for
from stepengine.cli.commands.moving import Agents, fork_durable
from stepengine.cli.deployment import App, Db, Pool
from stepengine.cli.evaluation import Budget, Fresh, Simulate, purse_of
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import (
    answers_of,
    as_usage,
    choice_of,
    follow_run,
    journal_at,
    limits_again,
    name_of,
    new_journal,
    on_journal,
    perform_run,
    recorded_agent,
    refuse_foreign_yes,
)
from stepengine.cli.options import Answers, File, Last, Options, Repeat, with_options
from stepengine.cli.perform import Run, print_result
from stepengine.cli.recording import RunRecording
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.engine import Engine
    from stepengine.journal import ForkReport, Journal
    from stepengine.journal.history import History

__all__ = ("Branch", "fork")


Perform: TypeAlias = "Callable[[Bench, dict[str, Any]], Run]"
"""Runs a fork on a bench, given the agent, the limits and the new journal."""
STORED = ("model_reply", "tool_result")


@frozen
class Branch:
    """Where a run is forked, what is changed there, and what answers calls besides the record, as it was typed."""

    at: str
    edit: str | None = None
    into: str = ""
    allow_repeat: bool = False
    restore_files: bool = False
    tools: str = ""
    simulate: str = ""
    fresh: bool = False
    budget: str = ""


@with_options
def fork(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[
        str,
        typer.Option(
            help="The last effect to keep; with --tools the first difference is the default.", metavar="N|PATH#N"
        ),
    ] = "",
    edit: Annotated[
        str | None, typer.Option(help="Another outcome for it: text, JSON, or @FILE.", metavar="TEXT|JSON|@FILE")
    ] = None,
    into: Annotated[str, typer.Option(help="The new journal; default: beside FILE.", metavar="FILE")] = "",
    allow_repeat: Repeat = False,
    restore_files: Annotated[
        bool, typer.Option("--restore-files", help="First bring back the files that were written after N.")
    ] = False,
    answer: Answers = None,
    tools: Annotated[
        str,
        typer.Option(
            help="Answer tools from the record, and perform of the rest none (recorded), what may be repeated (idempotent) or all "
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
    Go on from the middle of a run, in a new journal.

    FILE itself is only read.

    AT is the last effect to keep, as `stepengine show` numbers them: 5, or 3.2#1 for effect 1 of the child 3.2. With
    --edit it gets another outcome: text for a model's reply, JSON or text for a tool's result, an answer for a
    question; or a whole reply or result as `stepengine show --json` prints it. With --restore-files the files that the
    run wrote after AT are brought back first to what they were then, all of them or the fork is refused; see
    `stepengine undo --help`.

    With --tools models are asked after AT, or after the first difference, and the record answers tools: an equal recorded
    call, then --simulate, then the tool itself where --tools says so. A call that none of these answers ends the run, and
    the exit code is 5. Model calls that equal recorded ones are not made again, unless --fresh is given. --budget bounds
    what the others cost.

    With --db FILE is a durable run, whose fork is submitted there and its id printed; --agents are those of its release.

    Examples:
      stepengine fork --last --at 5
      stepengine fork run.jsonl --at 5
      stepengine fork run.jsonl --at 5 --restore-files
      stepengine fork run.jsonl --at 2 --edit "No such file" --into other.jsonl
      stepengine fork run.jsonl --at 4 --edit @reply.json
      stepengine fork run.jsonl --tools recorded --budget 0.50
      stepengine fork review-17 --at 4 --db @url --agents my_agents.py
    """
    if answer:
        refuse_inside("fork --answer")
    recorded, live = (
        (("--simulate", simulate), ("--fresh", fresh), ("--budget", budget)),
        (("--edit", edit), ("--allow-repeat", allow_repeat), ("--restore-files", restore_files), ("--answer", answer), ("--db", db)),
    )  # fmt: skip
    for name, given in live if tools else recorded:
        if given:
            msg = f"{name} {'does not go with --tools' if tools else 'needs --tools'}"
            raise UsageProblem(msg)
    if not (at or tools):
        msg = "name the last effect to keep with --at, or --tools for a fork at the first difference"
        raise UsageProblem(msg)
    if db:
        return fork_durable(
            file,
            at,
            None if edit is None else _edit(edit),
            agents=agents,
            db=db,
            allow_repeat=allow_repeat,
            app=app,
            pool=pool,
        )
    branch = Branch(at, edit, into, allow_repeat, restore_files, tools, simulate, fresh, budget)
    options = attrs.evolve(options, journal=file, last=last)
    prepare = partial(_from_record, branch) if tools else partial(_live, branch, answer or ())
    return on_journal(options, lambda options: _fork(options, branch, prepare))


def _fork(options: Options, branch: Branch, prepare: Callable[[Options, Journal, History], Perform]) -> Exit:
    """Fork a run: *prepare* checks what was typed, and returns the function that runs the fork into its journal."""
    journal = journal_at(options.journal)
    history = journal.history()
    perform = prepare(options, journal, history)
    into = _target(options, branch)
    agent = recorded_agent(journal, options, history)
    bench = bench_for(options, agent, into="" if into is None else name_of(into), recorded=history)
    about = {"agent_id": agent.id, "prompt": str(history.root.get("prompt", ""))}
    origin = {"stem": options.stem or None, "at": branch.at}
    with RunRecording.begun(options, into, command="fork", forked_from=origin, **about) as recording:
        if recording.journal is None:
            msg = "a fork needs a journal: name one with --into FILE"
            raise UsageProblem(msg)
        made = recording.journal
        run = perform(bench, {"agent": agent, "limits": limits_again(journal, options), "into": made})
        recording.ended(run.result)
    stem = recording.stem if into is None else ""
    if not options.quiet:
        complain(f"the new run is recorded {f'as {stem}' if stem else f'in {name_of(made)}'}")
    return print_result(run, attrs.evolve(options, journal=name_of(made), stem=stem), bench)


def _live(branch: Branch, answers: Iterable[str], options: Options, journal: Journal, history: History) -> Perform:
    from stepengine.journal.replayer import place_of

    given, edit = answers_of(answers), None if branch.edit is None else _edit(branch.edit)
    with as_usage():
        at = place_of(history, branch.at)
    refuse_foreign_yes(journal, history, at, edited=edit is not None)
    live: dict[str, Any] = {"at": branch.at, "edit": edit, "answers": given, "allow_repeat": branch.allow_repeat}
    live["restore_files"] = options.cwd if branch.restore_files else None
    return lambda bench, asked: follow_run(bench, lambda: bench.engine.start_fork(journal, **live, **asked))


def _from_record(branch: Branch, options: Options, journal: Journal, history: History) -> Perform:
    """Return the function that runs a fork whose tools the record answers."""
    from stepengine.evaluation.checks import function_at
    from stepengine.journal.provenance import has_known_permissions
    from stepengine.journal.recorded_forks import ForkTools, place_after

    choice_of("--tools", branch.tools, get_args(ForkTools))
    with as_usage():
        place_after(journal, branch.at or None)
    asks = any(
        each.type == "ask" and history.form(each)["purpose"] == "permission" for each in history.intents.values()
    )
    if branch.tools != "recorded" and asks and not has_known_permissions(journal):
        msg = (
            f"{name_of(journal)} is not as your own commands left it, and its permissions would let calls run that nobody here "
            "allowed; --tools recorded performs none"
        )
        raise UsageProblem(msg)
    given: dict[str, Any] = {"tools": branch.tools, "at": branch.at or None, "reuse": not branch.fresh}
    given["budget"] = purse_of(branch.budget)
    given["simulate"] = function_at(branch.simulate) if branch.simulate else None

    async def forked(engine: Engine, asked: dict[str, Any]) -> RunResult:
        report: ForkReport = await engine.fork(journal, **given, **asked)
        if not options.quiet:
            complain(
                f"from {report.broke_at} on: {report.model_calls} model calls, {report.reused} reused; of tools {report.served} "
                f"answered from the record, {report.simulated} simulated, {report.performed} performed"
                if report.broke_at
                else "nothing differs from the record, so that no model was asked"
            )
        return report.result

    return lambda bench, asked: perform_run(bench, lambda: forked(bench.engine, asked))


def _target(options: Options, branch: Branch) -> Journal | None:
    """Return where a fork goes: what was typed, else beside its source; ``None`` for the state folder, beside a run of it."""
    if not branch.into and options.stem:
        return None
    place = re.sub(r"[^0-9]+", "-", branch.at.lstrip("#")) or "difference"
    source = Path(options.journal.partition("#")[0])
    return new_journal(branch.into or str(source.with_name(f"{source.stem}.fork-{place}.jsonl")))


def _edit(text: str) -> Callable[[Any], object]:
    """Return what makes another outcome of a recorded one: what was typed as JSON where that fits, else as text."""
    from stepengine.data.models import ModelReply
    from stepengine.journal.encoding import restored

    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            msg = f"--edit {text!r} cannot be read: {error}"
            raise UsageProblem(msg) from None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        value = text

    def edited(recorded: object) -> object:
        if isinstance(value, dict) and value.get("type") in STORED:
            return restored(value)
        # A reply and an answer are text, also where that happens to be JSON.
        return text if isinstance(recorded, ModelReply | tuple) else value

    return edited
