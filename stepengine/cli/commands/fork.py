"""``stepengine fork``: going on from the middle of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import bench_for
from stepengine.cli.commands.moving import Agents, fork_durable
from stepengine.cli.deployment import App, Db, Pool
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import (
    answers_of,
    as_usage,
    follow_run,
    journal_at,
    limits_again,
    name_of,
    new_journal,
    on_journal,
    recorded_agent,
    refuse_foreign_yes,
)
from stepengine.cli.options import Answers, File, Last, Options, Repeat, with_options
from stepengine.cli.perform import print_result
from stepengine.cli.recording import RunRecording
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside

if TYPE_CHECKING:
    from stepengine.journal import Journal

__all__ = ("Branch", "fork")


STORED = ("model_reply", "tool_result")


@frozen
class Branch:
    """Where a run is forked and what is changed there, as it was typed."""

    at: str
    edit: str | None = None
    into: str = ""
    allow_repeat: bool = False
    restore_files: bool = False


@with_options
def fork(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[str, typer.Option(help="The last effect to keep.", metavar="N|PATH#N")],
    edit: Annotated[
        str | None, typer.Option(help="Another outcome for it: text, JSON, or @FILE.", metavar="TEXT|JSON|@FILE")
    ] = None,
    into: Annotated[str, typer.Option(help="The new journal; default: beside FILE.", metavar="FILE")] = "",
    allow_repeat: Repeat = False,
    restore_files: Annotated[
        bool, typer.Option("--restore-files", help="First bring back the files that were written after N.")
    ] = False,
    answer: Answers = None,
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

    With --db FILE is a durable run, whose fork is submitted there and its id printed; --agents are those of its release.

    Examples:
      stepengine fork --last --at 5
      stepengine fork run.jsonl --at 5
      stepengine fork run.jsonl --at 5 --restore-files
      stepengine fork run.jsonl --at 2 --edit "No such file" --into other.jsonl
      stepengine fork run.jsonl --at 4 --edit @reply.json
      stepengine fork review-17 --at 4 --db @url --agents my_agents.py
    """
    if answer:
        refuse_inside("fork --answer")
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
    branch = Branch(at, edit, into, allow_repeat, restore_files)
    options = attrs.evolve(options, journal=file, last=last)
    return on_journal(options, lambda options: _fork(options, branch, answer or ()))


def _fork(options: Options, branch: Branch, answers: Iterable[str]) -> Exit:
    from stepengine.journal.replayer import place_of

    journal, given = journal_at(options.journal), answers_of(answers)
    history = journal.history()
    with as_usage():
        at = place_of(history, branch.at)
    refuse_foreign_yes(journal, history, at, edited=branch.edit is not None)
    into = _target(options, branch)
    agent = recorded_agent(journal, options, history)
    bench = bench_for(options, agent, into="" if into is None else name_of(into), recorded=history)
    edit = None if branch.edit is None else _edit(branch.edit)
    limits = limits_again(journal, options)
    about = {"agent_id": agent.id, "prompt": str(history.root.get("prompt", ""))}
    origin = {"stem": options.stem or None, "at": branch.at}
    with RunRecording.begun(options, into, command="fork", forked_from=origin, **about) as recording:
        if recording.journal is None:
            msg = "a fork needs a journal: name one with --into FILE"
            raise UsageProblem(msg)
        made = recording.journal
        root = options.cwd if branch.restore_files else None
        fork = partial(bench.engine.start_fork, journal, at=branch.at, edit=edit, into=made, restore_files=root)
        fork = partial(fork, allow_repeat=branch.allow_repeat)
        run = follow_run(bench, lambda: fork(answers=given, agent=agent, limits=limits))
        recording.ended(run.result)
    stem = recording.stem if into is None else ""
    if not options.quiet:
        complain(f"the new run is recorded {f'as {stem}' if stem else f'in {name_of(made)}'}")
    return print_result(run, attrs.evolve(options, journal=name_of(made), stem=stem), bench)


def _target(options: Options, branch: Branch) -> Journal | None:
    """Return where a fork goes: what was typed, else beside its source; ``None`` for the state folder, beside a run of it."""
    if not branch.into and options.stem:
        return None
    place = re.sub(r"[^0-9]+", "-", branch.at.lstrip("#"))
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
