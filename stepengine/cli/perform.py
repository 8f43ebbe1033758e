"""Run an agent and print the outcome: signals, the result, why it ended, and the command that resumes it."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.cli.bench import EngineSetup
from stepengine.cli.exits import Exit, choose_exit_code, get_exit_code_of_signal, print_error
from stepengine.cli.options import Options
from stepengine.cli.screen.interrupt_keys import call_on_interrupts
from stepengine.cli.screen.render import format_error, print_output, result_to_json, to_ascii_json
from stepengine.data.definition import AgentDefinition
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.waits import describe_wait
from stepengine.errors import (
    ChildError,
    DefinitionError,
    JournalError,
    LimitExceeded,
    ModelError,
    UnknownModel,
)

if TYPE_CHECKING:
    from stepengine.cli.options import Options
    from stepengine.cli.screen.progress import ProgressDisplay
    from stepengine.data.questions import Question
    from stepengine.engine import Engine
    from stepengine.runtime.handle import RunHandle

UNAUTHORIZED = 401
GRACE = 5.0
"""Seconds that running effects get to finish when a signal ends a run."""


@frozen
class FinishedRun:
    """
    A finished run.

    Attributes:
        result: Its result.
        signal: The number of the signal that ended it; ``None`` without one.
    """

    result: RunResult
    signal: int | None = None

    @property
    def code(self) -> Exit:
        """The exit code: of the signal that cancelled the run, else of its result."""
        if self.signal is not None and self.result.status is RunStatus.CANCELLED:
            return get_exit_code_of_signal(self.signal)
        return choose_exit_code(self.result)


def run_agent_to_end(
    engine: Engine,
    agent: AgentDefinition,
    prompt: str,
    progress: ProgressDisplay | None,
    *,
    on_start: Callable[[str], object] = str,
    **options: Any,
) -> FinishedRun:
    """
    Run *agent* to its end; Ctrl-C and SIGTERM end it gracefully, a second one at once.

    *on_start* is called with the id of the run when it has started.
    """

    async def run_to_end() -> FinishedRun:
        """Run the agent to its end while signals interrupt it, and close the engine."""
        async with engine, engine.start(agent, prompt, wait_for_answers=0, **options) as handle:
            on_start(handle.run_id)
            loop = asyncio.get_running_loop()
            with call_on_interrupts(lambda: interrupt_run(handle, loop)) as received:
                result = await await_result_despite_limit(handle.result())
        return FinishedRun(result, received[0] if received else None)

    return run_with_display(run_to_end, progress)


def interrupt_run(handle: RunHandle, loop: asyncio.AbstractEventLoop) -> None:
    """Interrupt a run, giving its running effects some seconds to finish, and print their names."""

    def print_names() -> None:
        """Print the names of the effects for which the end of the run waits."""
        if names := ", ".join(handle.calls_to_finish):
            print_error(
                f"waiting up to {GRACE:g} s for {names}, so that the outcome is recorded; press Ctrl-C again to stop at once"
            )

    handle.interrupt(grace=GRACE)
    loop.call_soon_threadsafe(print_names)


async def await_result_despite_limit(run: Awaitable[RunResult]) -> RunResult:
    """Return the result of *run*, also if it raises at a limit (``on_max_steps="raise"``)."""
    try:
        return await run
    except LimitExceeded as error:
        if error.result is None:
            raise
        result: RunResult = error.result
        return result


def run_with_display(
    run: Callable[[], Coroutine[Any, Any, FinishedRun]], progress: ProgressDisplay | None
) -> FinishedRun:
    """Run a coroutine to its end with the live display of *progress*, if there is one."""
    with nullcontext() if progress is None else progress.show_status_line():
        return asyncio.run(run())


def print_result(run: FinishedRun, options: Options, bench: EngineSetup) -> Exit:
    """Print the output, as text or JSON, on stdout, and the summary, waits, warnings and errors on stderr; return the exit code."""
    result = run.result
    if bench.progress is not None and run.code is not Exit.USAGE:
        bench.progress.print_run_summary(result)
    if options.as_json:
        print(to_ascii_json(result_to_json(result)))
    else:
        print_output(result.output)
    if run.code is not Exit.USAGE:
        print_waits_and_warnings(result, options)
    if run.code is not Exit.COMPLETED:
        print_error(explain_run_ending(run, options, bench))
    return run.code


def explain_run_ending(run: FinishedRun, options: Options, bench: EngineSetup) -> str:
    """Return why a run did not complete, with advice."""
    if run.code is not Exit.USAGE:
        return add_price_or_key_advice(describe_ending(run), run, options)
    error = run.result.error
    while isinstance(error, ChildError):
        error = error.__cause__
    no_model = isinstance(error, UnknownModel) and error.kind == "no_model" and not options.models
    return bench.without_model if no_model else _describe_model_error(error, options)


def _describe_model_error(error: BaseException | None, options: Options) -> str:
    """Return the text of an error, with a note that ``--model`` does not replace models that a handler names."""
    model = options.main_model
    if not isinstance(error, UnknownModel) or not model or model in str(error):
        return str(error)
    return f"{error}. A handler names this model: --model {model} replaces only the models of agents"


def add_price_or_key_advice(ending: str, run: FinishedRun, options: Options) -> str:
    """Return *ending*; after an unknown price or a refused request without a key, add the option that helps."""
    error = run.result.error
    while isinstance(error, ChildError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, LimitExceeded) and error.kind == "unpriced_model":
        return f"{ending}; on the command line, set the price with --price 0, or --price IN/OUT in US dollars per million tokens"
    denied = isinstance(error, ModelError) and error.status == UNAUTHORIZED
    if denied and options.base_url and not options.api_key_env:
        return f"{ending} On the command line, name that variable with --api-key-env NAME."
    return ending


def print_waits_and_warnings(result: RunResult, options: Options) -> None:
    """Print open questions, other waits, the command that resumes the run, and warnings."""
    waits = options.journal and (result.waits_for or result.status is RunStatus.CANCELLED)
    again = format_resume_command(options, result.state.agent_id) if waits else ""
    if result.pending_questions and not options.journal:
        print_error("this run was not recorded, so it cannot be resumed")
    print_questions(result.pending_questions, again)
    _print_waits(result, again)
    if again and result.status is RunStatus.CANCELLED:
        print_error(f"resume it with: {again}")
    print_warnings(result)


def print_warnings(result: RunResult) -> None:
    """Print the warnings of a run and the names of tasks that could not be stopped."""
    for warning in (*result.warnings, *[f"this task could not be stopped: {name}" for name in result.leaked]):
        print_error(f"warning: {warning}")


def print_questions(questions: Iterable[Question], resume_command: str) -> None:
    """Print open questions and the command to answer each; no command if *resume_command* is empty."""
    for question in questions:
        choices = f" ({', '.join(question.options)})" if question.options else ""
        print_error(f"question {question.id} waits for an answer: {question.text}{choices}")
        if resume_command:
            print_error(f"answer it with: {resume_command} --answer {question.id}=TEXT")
        if resume_command and question.id.startswith("doubt:"):
            print_error(f"or supply its result: {resume_command} --answer {question.id}=result:TEXT-or-JSON")


def _print_waits(result: RunResult, resume_command: str) -> None:
    """Print the waits of a suspended run except questions, and the command that resumes it."""
    others = [one for one in result.waits_for if one.kind != "question"]
    for one in others:
        print_error(f"it {describe_wait(one)}")
        if resume_command and one.kind == "message":
            file = shlex.quote(shlex.split(resume_command)[2])  # behind `stepengine resume`
            path = f" --path {one.path}" if one.path else ""
            print_error(f"send it with: stepengine send {file} --topic {shlex.quote(one.topic)} JSON{path}")
    if others and resume_command:
        early = f"; to wake it now: {resume_command} --now" if result.wakes_at is not None else ""
        print_error(f"`stepengine resume --due` resumes it then; to resume it yourself: {resume_command}{early}")


def describe_ending(run: FinishedRun) -> str:
    """Return a sentence with the reason why a run did not complete."""
    if run.signal is not None:
        return f"{signal.Signals(run.signal).name}: the run was cancelled"
    error = run.result.error
    if run.result.status is RunStatus.SUSPENDED:
        return "the run is suspended: it waits"
    return format_error(error) if error is not None else f"the run ended as {run.result.status.value}"


def format_resume_command(options: Options, agent_id: str = "") -> str:
    """
    Return the command that resumes the run in ``options.journal``.

    Args:
        options: The options of the run.
        agent_id: The id of its agent; if the id loads the same agent, the command does not name the file.
    """
    # Without --in-doubt, a resume would raise `UnknownOutcome` for interrupted effects and end the run for good.
    asking = ["--in-doubt ask"] if _has_effects_in_doubt(options.journal) else []
    # The companion of a recorded run stores its options, so its name is enough.
    named = (
        [shlex.quote(options.stem)]
        if options.stem
        else [shlex.quote(options.journal), *format_shared_options(options, agent_id)]
    )
    return " ".join(["stepengine resume", *named, *asking])


def _has_effects_in_doubt(journal: str) -> bool:
    """Return whether a journal has effects in doubt; ``False`` if it cannot be read."""
    from stepengine.journal import as_journal
    from stepengine.journal.questions import list_effects_in_doubt

    try:
        return bool(list_effects_in_doubt(as_journal(journal).history()))
    except JournalError:
        return False


def format_shared_options(options: Options, agent_id: str = "") -> list[str]:
    """Return the options that another command on the same journal needs. The model is in the journal."""
    again: list[str] = []
    if options.agent and needs_agent_option(options.agent, agent_id, options.settings.agent_folders):
        again += ["--agent", shlex.quote(options.agent)]
    typed = {
        "--base-url": options.base_url,
        "--api-key-env": options.api_key_env,
        "--price": options.price,
        "--cwd": "" if options.cwd == Path() else str(options.cwd),
        "--workspace": options.workspace,
        "--script": options.script,
        "--web": options.web,
        "--config": "" if options.config is None else str(options.config),
    }
    again += [word for option, value in typed.items() if value for word in (option, shlex.quote(value))]
    return again + ["--write"] * options.write + ["--shell"] * options.shell


def needs_agent_option(given: str, agent_id: str, folders: Iterable[Path]) -> bool:
    """Return whether the id in a journal loads another agent than *given*."""
    from stepengine.engine import load_agent

    if given == agent_id:
        return False
    if not agent_id or Path(agent_id).exists():
        return True
    try:
        return load_agent(agent_id, folders=folders) is not load_agent(given, folders=folders)
    except DefinitionError:
        return True
