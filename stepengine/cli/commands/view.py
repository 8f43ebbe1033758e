"""``stepengine view``: a recorded run as one page for a browser."""

from __future__ import annotations

import contextlib
import os
import signal
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from attrs import frozen

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import agent_id_of, find_journal, name_of, readable_journal, recorded_agent
from stepengine.cli.options import Agent, Last, Options, Recorded
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DefinitionError, JournalError, StepEngineError

if TYPE_CHECKING:
    from stepengine.engine.stepping import Stepper
    from stepengine.journal import Journal
    from stepengine.journal.history import History
    from stepengine.judging.viewing.rendering import PageSource

__all__ = ("view",)

MEGABYTE = 1_000_000


@frozen(kw_only=True)
class _ViewOptions:
    """What was typed beside the runs."""

    output: str = ""
    force: bool = False
    opens: bool = False
    agent: str = ""
    code: bool = True
    locals: bool = True
    most: float = 20
    title: str = ""
    strict: bool = False


def view(
    file: Recorded = "",
    other: Annotated[str, typer.Argument(metavar="FILE2", help="Another run, to show both side by side.")] = "",
    *,
    last: Last = False,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The page; default: beside FILE, ending in .html.", metavar="PATH")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Write over a page that is there; show what is whole of a damaged FILE.")
    ] = False,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    agent: Agent = "",
    no_code: Annotated[
        bool, typer.Option("--no-code", help="Run nothing of the agent's: no lines, no variables.")
    ] = False,
    no_locals: Annotated[bool, typer.Option("--no-locals", help="Show lines without the handler's variables.")] = False,
    max_mb: Annotated[
        float, typer.Option(help="Cut long texts where the page would be larger.", metavar="N", min=0.1)
    ] = 20,
    serve: Annotated[
        bool, typer.Option("--serve", help="Follow a run under way, at an address of this machine.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of --serve; 0 for any.", min=0, max=65_535)] = 0,
    title: Annotated[str, typer.Option(help="Title of the page.", metavar="TEXT")] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Leave with 5 when lines and variables are missing.")
    ] = False,
) -> Exit:
    """
    Write a run as one page for a browser.

    The page needs nothing else and loads nothing: agents, time line, every step with request, reply, calls and results,
    usage, cost and context over time, search. With FILE2 it shows two runs side by side.

    Source lines and variables of the handler come from repeating the run with the agent's code, which performs nothing:
    that of --agent, else the one that the run was recorded with. What the page shows has no secrets that look like some.

    Examples:
      stepengine view --last --open
      stepengine view run.jsonl --agent ./agents/mine.py
      stepengine view run.jsonl -o run.html --no-code
      stepengine view before.jsonl after.jsonl
      stepengine view --last --serve
    """
    wanted = _ViewOptions(
        output=output, force=force, opens=opens, agent=agent, code=not no_code, locals=not no_locals, most=max_mb,
        title=title, strict=strict,
    )  # fmt: skip
    options = find_journal(Options(journal=file, last=last, agent=agent, quiet=True))
    try:
        return _serve_page(options, wanted, port) if serve else _write_page(options, other, wanted)
    except JournalError as error:
        return complain(error.message)


# --- one page ---------------------------------------------------------------------------------------------------------


def _write_page(options: Options, other: str, wanted: _ViewOptions) -> Exit:
    from stepengine.judging.viewing.rendering import rendered
    from stepengine.system.calls import OWNER_FILE_MODE

    journals = [readable_journal(name) for name in (options.journal, other) if name]
    target = Path(wanted.output) if wanted.output else _beside(journals[0])
    if target.exists() and any(target.samefile(_file_of(journal)) for journal in journals):
        msg = f"{str(target)!r} is the journal itself; -o PATH names another page"
        raise UsageProblem(msg)
    if target.exists() and not wanted.force:
        msg = f"{str(target)!r} exists already; --force writes over it, -o PATH names another page"
        raise UsageProblem(msg)
    source = _source(options, wanted)
    second = _source(attrs.evolve(options, journal=other, last=False), wanted) if other else None
    most = int(wanted.most * MEGABYTE)
    made = rendered(source, second, locals=wanted.locals, title=wanted.title, most=most)
    size = len(made.html) / MEGABYTE
    if len(made.html) > most:
        msg = f"the page would have {size:.1f} MB, with long texts cut already; --max-mb {size + 1:.0f} allows it"
        return complain(msg, Exit.FAILED)
    try:
        # It says what the journal says, which nobody else may read either; whoever shares a page gives that away.
        with open(target, "w", encoding="utf-8", opener=partial(os.open, mode=OWNER_FILE_MODE)) as file:
            file.write(made.html)
    except OSError as error:
        msg = f"the page cannot be written to {str(target)!r}: {error.strerror}"
        raise UsageProblem(msg) from error
    if made.is_cut:
        complain(f"long texts are cut, else the page would be larger than {wanted.most:g} MB (--max-mb)")
    for reason in made.missing:
        complain(reason)
    print(target)
    if wanted.opens:
        webbrowser.open(target.resolve().as_uri())
    return Exit.DIVERGED if wanted.strict and made.missing else Exit.COMPLETED


def _file_of(journal: Journal) -> Path:
    from stepengine.journal import SqliteJournal

    return Path(journal.path if isinstance(journal, SqliteJournal) else journal.name)


def _beside(journal: Journal) -> Path:
    """Return where a page goes: beside its journal; beside the database for a run in one."""
    from stepengine.journal import SqliteJournal

    path = _file_of(journal)
    return path.with_name(f"{journal.run}.html") if isinstance(journal, SqliteJournal) else path.with_suffix(".html")


def _source(options: Options, wanted: _ViewOptions) -> PageSource:
    """Return a run, with what goes through it where there is an agent; of a damaged journal with --force what is whole."""
    from stepengine.judging.viewing.rendering import PageSource, stored, whole_part
    from stepengine.testing.cassette_runs import CassetteJournal

    journal = readable_journal(options.journal)
    file = name_of(journal)
    if isinstance(journal, CassetteJournal):
        if wanted.agent:
            msg = f"{file!r} is a cassette, which has no lines of an agent's code; leave out --agent"
            raise UsageProblem(msg)
        return PageSource(journal=journal, file=file, without="A cassette has no source lines and no variables.")
    try:
        history = stored(journal)
        # What is read only when somebody needs it, too, so that damage shows before a page is made of it.
        for result in history.results.values():
            history.outcome(result)
    except JournalError as error:
        if not wanted.force:
            raise
        whole, number = whole_part(journal)
        damage = f"This is what stands before the damage, {number} records. {error.message}"
        return PageSource(journal=whole, file=file, without="The journal is damaged: nothing was run.", damage=damage)
    if not wanted.code:
        return PageSource(
            journal=journal, file=file, without="Source lines and variables were left out with --no-code."
        )
    steppers = _steppers(journal, history, options, wanted)
    if isinstance(steppers, str):
        return PageSource(journal=journal, file=file, without=steppers)
    return PageSource(journal=journal, file=file, steppers=steppers)


def _steppers(
    journal: Journal, history: History, options: Options, wanted: _ViewOptions
) -> list[Callable[[], Stepper]] | str:
    """
    Return what makes steppers, or why there are none; an agent that was asked for must be there.

    A run of the command line has its hooks; one that was recorded by a program most likely has not.
    """
    from stepengine.cli.bench import bench_for, family
    from stepengine.engine import Engine
    from stepengine.engine.loading import agent_place
    from stepengine.tools.bundled import uncalled_tools

    options = options.in_force()
    folders = options.settings.agent_folders
    agent_id = agent_id_of(history)
    try:
        agent = recorded_agent(journal, options, history)
        with contextlib.suppress(DefinitionError):
            complain(f"lines and variables come from {agent_place(options.agent or agent_id, folders=folders)}")
        ours = bench_for(options, agent, performs=False, recorded=history).engine
        plain = Engine(family(agent, options.agent, folders), uncalled_tools(options.cwd.resolve()))
    except (StepEngineError, UsageProblem) as error:
        if wanted.agent:
            raise
        why = error.message if isinstance(error, StepEngineError) else str(error)
        return f"No source lines and variables: {why}"
    return [partial(engine.stepper, journal, agent=agent) for engine in (ours, plain)]


# --- a run under way --------------------------------------------------------------------------------------------------


def _serve_page(options: Options, wanted: _ViewOptions, port: int) -> Exit:
    from stepengine.judging.viewing.serving import FollowedJournal, server_of

    journal = readable_journal(options.journal)
    following = FollowedJournal(journal, name_of(journal), wanted.title)
    try:
        server, address = server_of(following, port)
    except OSError as error:
        msg = f"--port {port} cannot be used: {error.strerror}; 0 takes any that is free"
        raise UsageProblem(msg) from error
    print(address, flush=True)
    complain("the page follows the run until Ctrl-C")
    if wanted.opens:
        webbrowser.open(address)
    code = Exit.COMPLETED
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        except _Terminated:
            code = Exit.TERMINATED
        finally:
            signal.signal(signal.SIGTERM, before)
    return code


class _Terminated(BaseException):
    """SIGTERM came."""


def _raise_interrupt(*_: object) -> None:
    raise _Terminated
