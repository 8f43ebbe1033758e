"""
What the commands that judge recorded runs share: their agents, money that is asked about, scripts, functions, clean texts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import Bench, bench_for
from stepengine.cli.exits import Exit, complain, explain_errors
from stepengine.cli.journals import Interrupted, hooks_of, journal_at, other_versions, recorded_agent
from stepengine.cli.options import Options
from stepengine.cli.screen.interrupting import interruptible
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.journal import Journal, Purse
    from stepengine.redaction import Redactor

__all__ = (
    "Budget",
    "CheckText",
    "Fresh",
    "RecordedCase",
    "Simulate",
    "Tools",
    "Yes",
    "agree_to_cost",
    "case_of",
    "clean_lines",
    "clean_report",
    "cleaner",
    "confirm",
    "interrupted_or",
    "purse_of",
    "to_the_end",
)

Budget = Annotated[
    str, typer.Option("--budget", help="What model calls may cost together, in US dollars.", metavar="USD")
]
CheckText = Annotated[
    str, typer.Option("--check", help="What the run has to do: an expression, or a function.", metavar="EXPR|MODULE:FN")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Ask anew also where a later request equals a recorded one.")]
Simulate = Annotated[
    str, typer.Option(help="A function that makes up results of calls that are not recorded.", metavar="MODULE:FN")
]
Tools = Annotated[
    str,
    typer.Option(
        help="Calls that are not recorded: recorded ends the run, idempotent performs what may be repeated.",
        metavar="WORD",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask models without asking first.")]
Made = TypeVar("Made")


# --- agents ---------------------------------------------------------------------------------------------------------


@frozen
class RecordedCase:
    """A recorded run with the agent of today and what it is performed with."""

    file: str
    journal: Journal
    agent: AgentDefinition
    hooks: Sequence[str]
    bench: Bench


def case_of(file: str, options: Options, *, performs: bool, beside: Iterable[RecordedCase] = ()) -> RecordedCase:
    """
    Return a recorded run with its agent, and say which file that comes from.

    Args:
        file: The journal.
        options: What was typed.
        performs: Whether tools may be called.
        beside: Other runs; those of the same agent with the same hooks are performed with the same engine.

    Raises:
        StepEngineError: when the journal cannot be read, or its agent is not found.
        UsageProblem: when there is no such journal, or a tool needs an option that was not given.
    """
    from stepengine.engine.loading import agent_place
    from stepengine.engine.packages import member_of

    journal = journal_at(file)
    history = journal.history()
    agent, hooks = recorded_agent(journal, options, history), hooks_of(history)
    same = next((case for case in beside if (case.agent, case.hooks) == (agent, hooks)), None)
    if same is not None:
        return RecordedCase(file, journal, same.agent, hooks, same.bench)
    if not options.quiet:
        member = member_of(agent)
        place = None if member else agent_place(options.agent or agent.id, folders=options.settings.agent_folders)
        complain(f"agent {member or f'{agent.id} of {place}'}")
    for said in other_versions(history):
        complain(f"warning: {said}")
    bench = bench_for(attrs.evolve(options, quiet=True), agent, performs=performs, recorded=history)
    return RecordedCase(file, journal, agent, hooks, bench)


# --- money ----------------------------------------------------------------------------------------------------------


def purse_of(budget: str) -> Purse:
    """
    Return what may be spent.

    Raises:
        UsageProblem: for what is not an amount.
    """
    from stepengine.journal import Purse

    try:
        return Purse(budget or None)
    except JournalError as error:
        msg = f"--budget: {error.message}"
        raise UsageProblem(msg) from None


def agree_to_cost(calls: int, low: Decimal | None, high: Decimal | None, *, yes: bool) -> None:
    """
    Say how many model calls are to be made and what they may cost, and ask unless that was agreed to.

    Raises:
        UsageProblem: when nobody can be asked, or the answer is no.
    """
    cost = "at a price that is unknown" if low is None else f"for about ${low:.4f} to ${high:.4f}"
    said = f"models will be asked about {calls} times, {cost}, going by what is recorded"
    if yes:
        complain(said)
        return
    confirm(said)


def confirm(said: str) -> None:
    """
    Ask a person before models are asked.

    Raises:
        UsageProblem: when nobody is there to be asked, or the answer is no.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        msg = f"{said}; say --yes, or --budget USD, or --script FILE for replies that cost nothing"
        raise UsageProblem(msg)
    print(f"stepengine: {said}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        msg = "nothing was asked"
        raise UsageProblem(msg)


# --- texts ----------------------------------------------------------------------------------------------------------


def cleaner() -> Redactor:
    """Return what takes secrets out of reports, also those that a journal itself would keep."""
    from stepengine.redaction import redactor_for

    return redactor_for("all", os.environ)


def clean_report(report: object) -> object:
    """Return a report without what looks like a secret."""
    return cleaner().value(report)


# --- to the end -----------------------------------------------------------------------------------------------------


def to_the_end(make: Callable[[], Coroutine[object, Any, Made]], engines: Iterable[Engine]) -> Made:
    """Do what *make* says in an event loop of its own, and close *engines*; Ctrl-C and SIGTERM end it gracefully."""

    async def ended() -> Made:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            for engine in dict.fromkeys(engines):
                await stack.enter_async_context(engine)
            task = asyncio.ensure_future(make())
            with interruptible(lambda: loop.call_soon_threadsafe(task.cancel)) as received:
                try:
                    return await task
                except asyncio.CancelledError:
                    if not received:
                        raise
                    raise Interrupted(received[0]) from None

    return asyncio.run(ended())


def interrupted_or(command: Callable[[], Exit]) -> Exit:
    """Do what *command* does: a journal that cannot be used is wrong usage, a prefix that does not fit a divergence."""

    def tried() -> Exit:
        try:
            return command()
        except Interrupted as interrupted:
            name = signal.Signals(interrupted.number).name
            code = Exit.TERMINATED if interrupted.number == signal.SIGTERM else Exit.INTERRUPTED
            return complain(f"{name}: stopped; nothing was changed", code)
        except ReplayDivergence as error:
            return complain(error.message.partition("\n  to go on")[0], Exit.DIVERGED)
        except StepEngineError as error:
            return complain(error.message)

    return explain_errors(tried)


def clean_lines(lines: Iterable[str] | Sequence[str]) -> str:
    """Return lines of a report as one text without what looks like a secret."""
    return str(clean_report("\n".join(lines)))
