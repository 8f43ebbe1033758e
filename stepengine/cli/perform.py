"""A run from its start to what is printed about it: signals, the result, why it ended, and the command that resumes it."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.cli.bench import Bench
from stepengine.cli.exits import Exit, complain, exit_code
from stepengine.cli.options import Options
from stepengine.cli.screen.interrupting import interruptible
from stepengine.cli.screen.render import dumps, json_of, message_of, print_output, waiting_for
from stepengine.data.definition import AgentDefinition
from stepengine.data.state import RunResult, RunStatus
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
    from stepengine.cli.screen.progress import Progress
    from stepengine.data.questions import Question
    from stepengine.engine import Engine
    from stepengine.runtime.handle import RunHandle

UNAUTHORIZED = 401
GRACE = 5.0
"""Seconds that effects have to come to their end when a signal ends a run."""

__all__ = (
    "GRACE",
    "Run",
    "add_advice",
    "ending_of",
    "interrupt",
    "needs_agent",
    "options_again",
    "perform",
    "print_result",
    "print_warnings",
    "reason_of",
    "resume_hint",
    "tell_more",
    "tell_questions",
    "watch_run",
)


@frozen
class Run:
    """
    A run that has ended.

    Attributes:
        result: Its result.
        signal: The signal that ended it; ``None`` when none did.
    """

    result: RunResult
    signal: int | None = None

    @property
    def code(self) -> Exit:
        """The exit code."""
        if self.signal is not None and self.result.status is RunStatus.CANCELLED:
            return Exit.TERMINATED if self.signal == signal.SIGTERM else Exit.INTERRUPTED
        return exit_code(self.result)


def perform(
    engine: Engine,
    agent: AgentDefinition,
    prompt: str,
    progress: Progress | None,
    *,
    started: Callable[[str], object] = str,
    **options: Any,
) -> Run:
    """
    Run *agent* to its end; Ctrl-C and SIGTERM end it gracefully, a second one at once.

    *started* is told the run's id when it has begun.
    """

    async def ended() -> Run:
        async with engine, engine.start(agent, prompt, wait_for_answers=0, **options) as handle:
            started(handle.run_id)
            loop = asyncio.get_running_loop()
            with interruptible(lambda: interrupt(handle, loop)) as received:
                result = await result_of(handle.result())
        return Run(result, received[0] if received else None)

    return watch_run(ended, progress)


def interrupt(handle: RunHandle, loop: asyncio.AbstractEventLoop) -> None:
    """End a run; what is under way and cannot happen again has some seconds, and stderr says what is waited for."""

    def tell() -> None:
        if names := ", ".join(handle.finishing):
            complain(
                f"waits up to {GRACE:g} s for {names}, so that what happens is recorded; once more ends it at once"
            )

    handle.interrupt(grace=GRACE)
    loop.call_soon_threadsafe(tell)


async def result_of(run: Awaitable[RunResult]) -> RunResult:
    """Return the result of *run*, also when it raises at a limit (``on_max_steps="raise"``)."""
    try:
        return await run
    except LimitExceeded as error:
        if error.result is None:
            raise
        result: RunResult = error.result
        return result


def watch_run(run: Callable[[], Coroutine[Any, Any, Run]], progress: Progress | None) -> Run:
    """Run to the end while *progress*, if there is one, is shown."""
    with nullcontext() if progress is None else progress.shown():
        return asyncio.run(run())


def print_result(run: Run, options: Options, bench: Bench) -> Exit:
    """Print the result on stdout and everything else on stderr; return the exit code."""
    result = run.result
    if bench.progress is not None and run.code is not Exit.USAGE:
        bench.progress.finish(result)
    if options.as_json:
        print(dumps(json_of(result)))
    else:
        print_output(result.output)
    if run.code is not Exit.USAGE:
        tell_more(result, options)
    if run.code is not Exit.COMPLETED:
        complain(reason_of(run, options, bench))
    return run.code


def reason_of(run: Run, options: Options, bench: Bench) -> str:
    """Return why a run did not complete, and what helps where it had no model."""
    if run.code is not Exit.USAGE:
        return add_advice(ending_of(run), run, options)
    error = run.result.error
    while isinstance(error, ChildError):
        error = error.__cause__
    no_model = isinstance(error, UnknownModel) and error.kind == "no_model" and not options.models
    return bench.without_model if no_model else _unknown(error, options)


def _unknown(error: BaseException | None, options: Options) -> str:
    """Return what an error says, and of a model that a yield names that ``--model`` does not stand in for it."""
    model = options.main_model
    if not isinstance(error, UnknownModel) or not model or model in str(error):
        return str(error)
    return f"{error}. A handler names it itself: --model {model} stands in only for models that agents name"


def add_advice(ending: str, run: Run, options: Options) -> str:
    """Return *ending* with the option that helps where a price or a key is missing."""
    error = run.result.error
    while isinstance(error, ChildError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, LimitExceeded) and error.kind == "unpriced_model":
        return f"{ending}; on the command line --price 0, or --price IN/OUT in US dollars for a million tokens, says what it costs"
    denied = isinstance(error, ModelError) and error.status == UNAUTHORIZED
    if denied and options.base_url and not options.api_key_env:
        return f"{ending} On the command line --api-key-env NAME names that variable."
    return ending


def tell_more(result: RunResult, options: Options) -> None:
    """Tell what waits for an answer, and what was odd."""
    waits = options.journal and (result.waits_for or result.status is RunStatus.CANCELLED)
    again = resume_hint(options, result.state.agent_id) if waits else ""
    if result.pending_questions and not options.journal:
        complain("this run was not recorded, so it cannot be resumed")
    tell_questions(result.pending_questions, again)
    _tell_waits(result, again)
    if again and result.status is RunStatus.CANCELLED:
        complain(f"go on with: {again}")
    print_warnings(result)


def print_warnings(result: RunResult) -> None:
    """Print the warnings of a run, and the names of what could not be stopped."""
    for warning in (*result.warnings, *[f"could not be stopped: {name}" for name in result.leaked]):
        complain(f"warning: {warning}")


def tell_questions(questions: Iterable[Question], again: str) -> None:
    """Print open questions, and how they are answered where *again* is the command that resumes the run."""
    for question in questions:
        choices = f" ({', '.join(question.options)})" if question.options else ""
        complain(f"question {question.id} waits for an answer: {question.text}{choices}")
        if again:
            complain(f"answer it with: {again} --answer {question.id}=TEXT")
        if again and question.id.startswith("doubt:"):
            complain(f"or say what came of it: {again} --answer {question.id}=result:TEXT-or-JSON")


def _tell_waits(result: RunResult, again: str) -> None:
    """Tell what else a suspended run waits for than people, and how it goes on."""
    others = [one for one in result.waits_for if one.kind != "question"]
    for one in others:
        complain(f"it {waiting_for(one)}")
        if again and one.kind == "message":
            file = shlex.quote(shlex.split(again)[2])  # behind `stepengine resume`
            path = f" --path {one.path}" if one.path else ""
            complain(f"send it with: stepengine send {file} --topic {shlex.quote(one.topic)} JSON{path}")
    if others and again:
        early = f"; now, whatever the time is: {again} --now" if result.wakes_at is not None else ""
        complain(f"`stepengine resume --due` resumes it then; to resume it yourself: {again}{early}")


def ending_of(run: Run) -> str:
    """Return a sentence that says why a run did not complete."""
    if run.signal is not None:
        return f"{signal.Signals(run.signal).name}: the run was cancelled"
    error = run.result.error
    if run.result.status is RunStatus.SUSPENDED:
        return "the run is suspended: it waits"
    return message_of(error) if error is not None else f"the run ended as {run.result.status.value}"


def resume_hint(options: Options, agent_id: str = "") -> str:
    """
    Return the command that resumes the run in ``options.journal``.

    Args:
        options: What the run was started with.
        agent_id: The id of its agent; where the id leads to the same file, the file is not named.
    """
    # Without a word about what was cut off, resuming would end the run with `UnknownOutcome`, for good.
    asking = ["--in-doubt ask"] if _is_in_doubt(options.journal) else []
    # Beside a run that has a name of its own lies what it was started with.
    named = [options.stem] if options.stem else [shlex.quote(options.journal), *options_again(options, agent_id)]
    return " ".join(["stepengine resume", *named, *asking])


def _is_in_doubt(journal: str) -> bool:
    from stepengine.journal import as_journal
    from stepengine.journal.questions import in_doubt

    try:
        return bool(in_doubt(as_journal(journal).history()))
    except JournalError:
        return False


def options_again(options: Options, agent_id: str = "") -> list[str]:
    """Return the options that a command on the same journal needs; the model stands in the journal."""
    again: list[str] = []
    if options.agent and needs_agent(options.agent, agent_id, options.settings.agent_folders):
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


def needs_agent(given: str, agent_id: str, folders: Iterable[Path] = ()) -> bool:
    """Return whether the id in a journal does not lead to the agent that was given."""
    from stepengine.engine import load_agent

    if given == agent_id:
        return False
    if not agent_id or Path(agent_id).exists():
        return True
    try:
        return load_agent(agent_id, folders=folders) is not load_agent(given, folders=folders)
    except DefinitionError:
        return True
