"""
Shared code of the commands that evaluate runs: agents, budgets and confirmations, redaction, event loops, result folders.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import EngineSetup, make_engine_setup
from stepengine.cli.exits import Exit, get_exit_code_of_signal, print_error, run_explaining_errors
from stepengine.cli.journals import (
    Interrupted,
    await_unless_interrupted,
    list_recorded_hook_names,
    load_recorded_agent,
    open_journal,
)
from stepengine.cli.options import Options
from stepengine.cli.screen.confirm import can_ask_at_terminal, confirm
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError
from stepengine.redaction import make_redactor

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.evaluation.samples import CostEstimate
    from stepengine.journal import Journal, SharedBudget

Budget = Annotated[
    str, typer.Option("--budget", help="Limit on the total cost of model calls, in US dollars.", metavar="USD")
]
CheckText = Annotated[
    str, typer.Option("--check", help="Condition for success: an expression, or a function.", metavar="EXPR|MODULE:FN")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Call the model again even if a request equals a recorded one.")]
Simulate = Annotated[
    str, typer.Option(help="Function that supplies results for calls without a record.", metavar="MODULE:FN")
]
Tools = Annotated[
    str,
    typer.Option(
        help="For calls without a record: recorded ends the run, idempotent performs repeatable tools.",
        metavar="WORD",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Call models without asking for confirmation.")]
Made = TypeVar("Made")


# --- agents ---------------------------------------------------------------------------------------------------------


@frozen
class RecordedCase:
    """A recorded run with its current agent and the engine for it."""

    file: str
    journal: Journal
    agent: AgentDefinition
    hooks: Sequence[str]
    bench: EngineSetup


def load_recorded_case(
    file: str, options: Options, *, performs: bool, share_engines_of: Iterable[RecordedCase] = ()
) -> RecordedCase:
    """
    Return a recorded run with its agent and engine, and print the file of the agent.

    Args:
        file: The journal.
        options: The typed options.
        performs: Whether tools may be called.
        share_engines_of: Cases loaded before; the engine of one with the same agent and hooks is used again.

    Raises:
        StepEngineError: when the journal cannot be read, or its agent is not found.
        UsageProblem: when there is no such journal, or a tool needs an option that was not given.
    """
    from stepengine.engine.loader import locate_agent
    from stepengine.engine.packages import describe_package_version_changes, packaged_agent_from_definition

    journal = open_journal(file)
    history = journal.history()
    agent, hooks = load_recorded_agent(options, history), list_recorded_hook_names(history)
    same = next((case for case in share_engines_of if (case.agent, case.hooks) == (agent, hooks)), None)
    if same is not None:
        return RecordedCase(file, journal, same.agent, hooks, same.bench)
    if not options.quiet:
        member = packaged_agent_from_definition(agent)
        place = None if member else locate_agent(options.agent or agent.id, folders=options.settings.agent_folders)
        print_error(f"agent {member or f'{agent.id} of {place}'}")
    for said in describe_package_version_changes(history):
        print_error(f"warning: {said}")
    bench = make_engine_setup(attrs.evolve(options, quiet=True), agent, performs=performs, recorded=history)
    return RecordedCase(file, journal, agent, hooks, bench)


def make_sample_engine(options: Options, agent: AgentDefinition, file: str, root: Path, *, performs: bool) -> Engine:
    """Return an engine for a sample, which asks no one. Its tools may write in *root*, and run programs there with ``--shell``."""
    own = attrs.evolve(options, agent=file, cwd=root, write=True, quiet=True)
    return make_engine_setup(
        own, agent, performs=performs, is_new=True, asks_nobody=True, unattended=True, headless=False
    ).engine


# --- money ----------------------------------------------------------------------------------------------------------


def parse_budget(budget: str) -> SharedBudget:
    """
    Return the budget of ``--budget``.

    Raises:
        UsageProblem: when *budget* is not an amount.
    """
    from stepengine.journal import SharedBudget

    try:
        return SharedBudget(budget or None)
    except JournalError as error:
        msg = f"--budget: {error.message}"
        raise UsageProblem(msg) from None


def confirm_cost(estimate: CostEstimate, *, yes: bool) -> None:
    """
    Print the number and the estimated cost of model calls, and ask for confirmation unless *yes* is true.

    Raises:
        UsageProblem: when there is no terminal to ask at, or the person denies it.
    """
    low, high = estimate.low, estimate.high
    cost = "at an unknown price" if low is None else f"for about ${low:.4f} to ${high:.4f}"
    said = f"this will make about {estimate.calls} model calls {cost}, estimated from the record"
    if yes:
        print_error(said)
        return
    require_user_confirmation(said)


def require_user_confirmation(announcement: str) -> None:
    """
    Ask the person at the terminal to confirm *announcement*; raise ``UsageProblem`` without a confirmation.

    Raises:
        UsageProblem: when there is no terminal to ask at, or the person denies it.
    """
    if not can_ask_at_terminal():
        msg = f"{announcement}; pass --yes, --budget USD, or --script FILE for free replies"
        raise UsageProblem(msg)
    if not confirm(f"stepengine: {announcement}. Continue?"):
        msg = "no model was called"
        raise UsageProblem(msg)


# --- texts ----------------------------------------------------------------------------------------------------------


def redact_report(report: object) -> object:
    """Return a report without secrets of any kind or the values of secret variables."""
    return make_redactor("all", os.environ).value(report)


# --- to the end -----------------------------------------------------------------------------------------------------


def run_and_close_engines(
    make_coroutine: Callable[[], Coroutine[object, Any, Made]], engines: Iterable[Engine]
) -> Made:
    """Run a coroutine in a new event loop and close *engines*. Ctrl-C and SIGTERM cancel it."""
    return run_until_signal(make_coroutine, engines)[0]


def run_until_signal(
    make_coroutine: Callable[[], Coroutine[object, Any, Made]], engines: Iterable[Engine]
) -> tuple[Made, int | None]:
    """
    Run a coroutine like ``run_and_close_engines``; return its result, and the number of the signal that ended it early or ``None``.

    Raises:
        Interrupted: when a signal arrived and the coroutine returned no partial result.
    """

    async def run_to_end() -> tuple[Made, int | None]:
        """Await the coroutine unless a signal arrives, and close the engines."""
        async with AsyncExitStack() as stack:
            for engine in dict.fromkeys(engines):
                await stack.enter_async_context(engine)
            return await await_unless_interrupted(make_coroutine())

    return asyncio.run(run_to_end())


def run_reporting_errors(command: Callable[[], Exit]) -> Exit:
    """Run *command*; report signals, divergences and errors, and return the exit code."""

    def run_command() -> Exit:
        """Run the command; report a signal, divergence or error, and return the exit code."""
        try:
            return command()
        except Interrupted as interrupted:
            name = signal.Signals(interrupted.number).name
            code = get_exit_code_of_signal(interrupted.number)
            return print_error(f"{name}: stopped; nothing was changed", code)
        except ReplayDivergence as error:
            return print_error(error.message.partition("\n  to continue")[0], Exit.DIVERGED)
        except StepEngineError as error:
            return print_error(error.message)

    return run_explaining_errors(run_command)


def join_and_redact_lines(lines: Iterable[str] | Sequence[str]) -> str:
    """Return lines as one text with secrets redacted."""
    return str(redact_report("\n".join(lines)))


def make_result_folder_path(parent: str, name: str) -> Path:
    """Return an unused path ``PARENT/NAME/DATE-TIME`` for results; a number is appended if the path exists. No folder is created."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    found = Path(parent) / name / stamp
    number = 1
    while found.exists():
        number += 1
        found = found.with_name(f"{stamp}-{number}")
    return found
