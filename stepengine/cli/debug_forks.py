"""The command `fork` of the debugger: continues a run from its current position in a new journal."""

from __future__ import annotations

import asyncio
import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine import errors
from stepengine.cli.bench import make_engine_setup
from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.debug_navigation import LOOK_SECONDS
from stepengine.cli.debug_screen import DebugScreen, RefusedCommand, hide_or_redirect_handler_output
from stepengine.cli.journals import create_journal, load_recorded_agent
from stepengine.cli.options import read_value_file
from stepengine.cli.screen.confirm import can_ask_at_terminal, confirm
from stepengine.cli.screen.render import format_cost, format_count
from stepengine.cli.scripts import load_script
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import did_you_mean
from stepengine.errors import StepEngineError
from stepengine.journal.records import format_address

if TYPE_CHECKING:
    from stepengine.debugging.walks import ForkedWalk


@frozen
class ForkRequest:
    """The typed options of a fork; see ``help fork``."""

    edit: Any = None
    replies: Any = ()
    live: bool = False
    is_agreed: bool = False
    allow_repeat: bool = False
    served: bool = False
    trusts: bool = False
    into: str = ""


FLAGS = {
    "--live": "live",
    "--yes": "is_agreed",
    "--allow-repeat": "allow_repeat",
    "--served": "served",
    "--trust-journal": "trusts",
}


def fork_run(screen: DebugScreen, typed: str, forked: ForkedWalk | None) -> str:
    """
    Continue the run from its current position in a new journal, print the result, and return the journal's name.

    With ``--live``, models are called after the person has confirmed the cost.

    Args:
        screen: Shows the result of the fork.
        typed: The typed options; see ``help fork``.
        forked: The walk, if it consists of processes; then the fork runs in its own process, too.
    """
    from stepengine.journal.sources import get_journal_file

    asked = _parse_fork_options(typed)
    if asked.trusts:
        refuse_inside_tool("debug fork --trust-journal")
    source = screen.options.journal
    into = asked.into or _choose_free_path(get_journal_file(source))
    act = partial(_run_fork_to_json, screen, asked, into)
    if asked.live:
        _confirm_live_cost(screen, asked)
    if forked is None:
        told = json.loads(act())
    else:
        from stepengine.debugging.expressions import call_in_fork

        said = call_in_fork(act, seconds=LOOK_SECONDS, allows_network=True)
        if not said:
            msg = "the fork ended early"
            raise RefusedCommand(msg)
        told = json.loads(said)
    if told.get("error"):
        raise RefusedCommand(told["error"])
    place = screen.debugger.stepper.tape.find_address_at(screen.debugger.position)
    at = "" if place is None else format_address(*place)
    screen.print_result(
        f" new journal {into}, parent at {at}; {format_count(told['steps'], 'step')}, {told['status']}"
        + (f": {told['said']}" if told["said"] else ""),
        {"journal": into, "at": at, **told},
    )
    return into


def _confirm_live_cost(screen: DebugScreen, request: ForkRequest) -> None:
    """Ask the person to confirm the estimated cost of live model calls, unless ``--yes`` was typed; raise ``RefusedCommand`` without it."""
    from stepengine.evaluation.samples import summarize_run_from

    stepper = screen.debugger.stepper
    history, place = stepper.tape.history, stepper.tape.find_address_at(stepper.position)
    left = None if place is None else summarize_run_from(history, format_address(*place)).cost
    models = sorted({history.model(i) for i in history.intents.values() if i.type == "model_call"})
    price = (
        "an unknown price"
        if left is None
        else f"about {format_cost(left)} to {format_cost(2 * left)}, estimated from the recorded part after this"
    )
    if request.is_agreed:
        return
    action = f"call {', '.join(models) or 'the model'} for real, for {price}"
    if screen.asked.is_scripted or not can_ask_at_terminal():
        msg = f"{action}: this needs your approval, and there is no terminal; add --yes to --live"
        raise RefusedCommand(msg)
    if not confirm(screen.redact_and_escape(f"{action}?")):
        msg = "no model was called"
        raise RefusedCommand(msg)


def _run_fork_to_json(screen: DebugScreen, request: ForkRequest, into: str) -> str:
    """Run the fork to its end, and return its status, steps and error as JSON."""
    from stepengine.journal.show import get_run_status
    from stepengine.testing import ScriptedModel

    try:
        target, options = create_journal(into), screen.options
        history = screen.debugger.stepper.tape.history
        agent = load_recorded_agent(options, history)
        bench = make_engine_setup(options, agent, hidden_journal=target.address, recorded=history)
        models = None if request.live else ScriptedModel(request.replies)

        async def fork_to_end() -> Any:
            """Run the fork to its end, and return its result."""
            async with bench.engine:
                return await screen.debugger.fork(
                    request.edit,
                    engine=bench.engine,
                    models=models,
                    into=target,
                    allow_repeat=request.allow_repeat,
                    served=request.served,
                    trust=request.trusts or None,
                )

        with hide_or_redirect_handler_output(screen.asked, as_json=screen.is_json):
            result = asyncio.run(fork_to_end())
    except (StepEngineError, UsageProblem, OSError, ValueError) as error:
        said = error.message if isinstance(error, StepEngineError) else str(error)
        return json.dumps({"error": said})
    history = target.history()
    steps = sum(i.type == "model_call" and not i.path for i in history.intents.values())
    why = "" if result.error is None else str(result.error)
    if why and not request.live:
        why += "\n   the models are scripted: --script FILE supplies replies, --live calls the models"
    return json.dumps({"status": get_run_status(history), "steps": steps, "said": screen.redact_and_escape(why)})


def _choose_free_path(source: Path) -> str:
    """Return a path for the journal of the fork, next to *source*, that does not exist yet."""
    for number in range(1, 10_000):
        path = source.with_name(f"{source.stem}-{number}.jsonl")
        if not path.exists():
            return str(path)
    msg = f"{source} has ten thousand forks next to it; name another file with --into"
    raise RefusedCommand(msg)


def _parse_fork_options(text: str) -> ForkRequest:
    """Parse the options of the command ``fork``; raise ``RefusedCommand`` for an invalid one."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        msg = f"the command cannot be parsed: {error}; quote texts with spaces"
        raise RefusedCommand(msg) from None
    given: dict[str, Any] = {}
    while words:
        name = words.pop(0)
        if name in FLAGS:
            given[FLAGS[name]] = True
            continue
        if name not in ("--reply", "--result", "--raise", "--script", "--into") or not words:
            msg = (
                f"fork has no option {name[:40]!r}; its options: --reply TEXT|@FILE, --result JSON|@FILE, --raise KIND:TEXT, "
                "--script FILE or --live, --yes, --served, --allow-repeat, --trust-journal, --into FILE"
            )
            raise RefusedCommand(msg)
        value = words.pop(0)
        if name == "--into":
            given["into"] = value
        elif name == "--script":
            given["replies"] = load_script(value)
        else:
            given["edit"] = _parse_outcome_option(name, value)
    if given.get("live") and "replies" in given:
        msg = "--live and --script exclude each other; pass one of them"
        raise RefusedCommand(msg)
    return ForkRequest(**given)


def _parse_outcome_option(name: str, value: str) -> object:
    """Parse ``--reply``, ``--result`` or ``--raise`` to an outcome: a text, a JSON value or an error."""
    if name == "--raise":
        kind, _, said = value.partition(":")
        return _make_error_of_kind(kind, said)
    if value.startswith("@"):
        value = read_value_file(value[1:], name)
    if name == "--reply":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _make_error_of_kind(kind: str, message: str) -> StepEngineError:
    """Return an error of the class *kind*; raise ``RefusedCommand`` if stepengine has no such class."""
    known = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, StepEngineError)}
    if kind not in known:
        msg = (
            f"there is no error class {kind[:40]!r}; pass KIND:TEXT, such as ToolError:gone{did_you_mean(kind, known)}"
        )
        raise RefusedCommand(msg)
    return known[kind](message)
