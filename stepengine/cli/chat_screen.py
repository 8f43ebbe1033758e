"""
The chat at a terminal: reads input, runs it as a command or a turn, and shows the turn.

The slash commands are in ``commands.chat_commands``, and the conversation is in ``chat_conversation``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import attrs

from stepengine.cli.bench import EngineSetup
from stepengine.cli.chat_conversation import ChatConversation
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import make_resume_limits, open_journal
from stepengine.cli.options import Options
from stepengine.cli.perform import (
    GRACE,
    FinishedRun,
    explain_run_ending,
    format_resume_command,
    print_waits_and_warnings,
    print_warnings,
)
from stepengine.cli.screen.confirm import NO, YES
from stepengine.cli.screen.console import (
    QUIT,
    Screen,
    TypedLines,
    make_console,
    print_markdown,
    show_run,
    validate_typed_answer,
)
from stepengine.cli.screen.interrupt_keys import call_on_interrupts
from stepengine.cli.screen.prompt import (
    PASTED,
    SOON,
    AbovePromptStream,
    PromptHistory,
    PromptReader,
    UnreadMessage,
    expand_attachments,
    run_shell_command,
)
from stepengine.cli.screen.render import format_cost, format_error, one_line, truncate_text, visible
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import RunRecording, fill_options_from_recorded, find_chat_history_file
from stepengine.data.alike import find_nearest
from stepengine.data.definition import AgentDefinition
from stepengine.data.questions import Question
from stepengine.data.state import RunResult
from stepengine.data.visible import cut_end
from stepengine.errors import StepEngineError
from stepengine.journal.recorded_runs import GOES_ON, RecordedRun

if TYPE_CHECKING:
    from stepengine.runtime.handle import RunHandle

HELP = "Type what to do. /help lists the commands, /quit leaves. You are asked before the agent changes anything."
NO_MODEL = (
    "No model is set yet. Set one with /model PROVIDER/MODEL, such as /model anthropic/claude-sonnet-4-5 with ANTHROPIC_API_KEY set; "
    "/model lists the providers that have a key."
)
QUEUED = "send it now? y yes, n no, Enter to edit it > "
QUEUED_PLAIN = "send it now? y yes, n no > "
SENT_CHARS = 8_192
SEAT_SECONDS = 1.0
"""Seconds that a question waits for the console to show it: a resumed run may ask before the console reads its events."""
SHOWN_TURNS = 20
TOO_NARROW = 20


@attrs.frozen
class ChatCommand:
    """
    A slash command.

    Attributes:
        about: Its arguments and one line of help.
        run: Executes the command with the text after its name, and returns the exit code of a turn; ``None`` for the command that
            leaves.
        at_once: Whether it can run during a turn: ``"yes"``, ``"no"``, or ``"alone"`` if no text follows its name.
    """

    about: str
    run: Callable[[Chat, str], Awaitable[Exit | None]] | None
    at_once: Literal["yes", "no", "alone"] = "no"


class Chat:
    """
    A conversation at a console.

    Args:
        conversation: The conversation.
        commands: The slash commands by name.
        plain: Read and show plain lines, even on a capable terminal.

    Attributes:
        conversation: The conversation.
        commands: The slash commands by name.
        console: The console of all output.
        terminal: Reads the person's input, and prints above it.
        screen: The display of the current turn, or of the last one between turns.
        is_working: Whether a turn is running.
        leaves: Whether the chat ends after this turn.
    """

    def __init__(
        self, conversation: ChatConversation, commands: Mapping[str, ChatCommand], *, plain: bool = False
    ) -> None:
        options = conversation.options
        settings = options.settings
        above = AbovePromptStream(sys.stdout)
        console = make_console(cast("TextIO", above), color=settings.get("display.color"))
        poor = console.is_dumb_terminal or bool(os.environ.get("CI")) or console.width < TOO_NARROW
        lines = TypedLines(sys.stdin)
        plain = plain or poor or settings.get("display.plain") or not (lines.is_terminal and console.is_terminal)
        self.conversation = conversation
        self.commands = commands
        self.console = console
        self.terminal = PromptReader(
            console, lines, above, commands=[f"/{name}" for name in commands], root=options.cwd.resolve(),
            history=PromptHistory(find_chat_history_file()), plain=plain,
        )  # fmt: skip
        self.terminal.keys = {"c-o": self._print_last_full_output, "s-tab": self._schedule_and_print_next_mode}
        self.terminal.run_if_immediate = self._run_command_if_immediate
        self.terminal.status = self._format_status_line
        # During the turn, the rule that the answer adds accepts edits; the mode does so from the next turn on.
        self.terminal.accepts_edits = partial(setattr, conversation, "wanted_mode", "accept_edits")
        self.screen: Screen | None = None
        self.is_working = False
        self.leaves = False
        self._windows: dict[str, int | None] = {}
        self._shown = {
            "verbose": options.verbose, "level": settings.get("display.log"), "thinking": settings.get("display.thinking"),
            "markdown": not plain,
        }  # fmt: skip
        self._waiting: RecordedRun | None = None
        self._questions: Sequence[Question] = ()

    def load_and_show_recorded_turn(self, last: RunResult, entry: RecordedRun) -> None:
        """Load the recorded turn *entry* with its result, and show its last messages; ``resume_turn`` resumes it if it has not ended."""
        self.conversation.replace_turns_by_recorded(last, entry)
        self._waiting = entry if entry.status in GOES_ON else None
        self._questions = last.pending_questions
        for message in self.conversation.list_visible_messages()[-SHOWN_TURNS:]:
            if message.role != "user" and self._shown["markdown"]:
                print_markdown(self.console, message.text)
                continue
            lines = visible(message.text.strip()).splitlines()
            self.print_text("\n".join([f"{'> ' if message.role == 'user' else '  '}{line}" for line in lines]), "dim")

    def print_text(self, text: str, style: str = "") -> None:
        """Print lines above the prompt."""
        self.terminal.print_text(text, style)

    async def run_chat_loop(self) -> Exit:
        """Run turns until the person leaves; return the exit code of the last one."""
        code, chat = Exit.COMPLETED, self.conversation
        self.print_text(f"{chat.agent.id}: {one_line(chat.agent.description, 200)}".rstrip(": "))
        self.print_text(HELP)
        options = chat.options
        if not (options.script or options.models or options.settings.get("model") or chat.agent.model):
            self.print_text(NO_MODEL, "yellow")
        async with chat.engines as engines:
            engines.enter_context(_exit_on_sigterm())
            engines.enter_context(self.terminal.set_raw_terminal_mode())
            await engines.enter_async_context(chat.bench.engine)
            if self._waiting is not None:
                code = await self.resume_turn() or code
                if code is Exit.SUSPENDED or self.leaves:
                    return code
            said: str | None = options.prompt or await self.terminal.read_next_prompt()
            while said is not None and (isinstance(said, UnreadMessage) or said.strip() not in QUIT):
                code = await self._run_command_or_turn(said, code)
                if code is Exit.SUSPENDED or self.leaves:
                    return code
                said = await self.terminal.read_next_prompt()
        return code

    async def _run_command_or_turn(self, typed: str, code: Exit) -> Exit:
        """Run one input as a slash command, a shell command or a turn; return its exit code, or *code* if it has none."""
        if self.conversation.wanted_mode:
            await self.conversation.switch_permission_mode(self.conversation.wanted_mode)
        if not isinstance(typed, UnreadMessage):
            if typed.startswith("/") and not typed.startswith("//"):
                return await self._run_slash_command(typed)
            if typed.startswith("!"):
                await self._run_shell_command_and_add_note(typed)
                return code
            typed = typed.removeprefix("/")
        if typed.strip():
            return await self.run_turn(self.compose_prompt_and_clear_notes(typed), title=typed)
        return code

    def compose_prompt_and_clear_notes(self, typed: str) -> str:
        """Return the prompt of notes, input and the files named in typed input; print which files are sent, and clear the notes."""
        text, notes = typed, list[str]()
        if not isinstance(typed, UnreadMessage):
            text, notes = expand_attachments(typed, self.conversation.options.cwd.resolve())
        for note in notes:
            self.print_text(f"  {visible(note)}", "dim")
        sent = "\n\n".join([*self.conversation.notes, text])
        self.conversation.notes.clear()
        return sent

    async def _run_shell_command_and_add_note(self, typed: str) -> None:
        """Run a shell command typed at a terminal and print its output; note it for the agent unless it starts with ``!!``."""
        if self.terminal.was_pasted:
            self.print_text(PASTED, "yellow")
            return
        if not self.terminal.lines.is_terminal:
            print_error("!command needs a terminal; nothing was run")
            return
        command = typed.lstrip("!").strip()
        try:
            output = await run_shell_command(command, self.conversation.options.cwd.resolve())
        except (OSError, ValueError) as error:  # the folder is gone, or there is a NUL in it
            self.print_text(f"the command was not run: {visible(str(error))}", "yellow")
            return
        self.print_text(visible(output))
        if not typed.startswith("!!"):
            self.conversation.notes.append(f"(I ran `{command}` myself. It printed:)\n{cut_end(output, SENT_CHARS)}")

    async def _run_command_if_immediate(self, typed: str) -> bool:
        """Execute a command that is possible during a turn or a question; return ``False`` for commands that must wait."""
        name, _, rest = typed[1:].strip().partition(" ")
        command = self.commands.get(name)
        if command is not None and (command.at_once == "no" or (command.at_once == "alone" and rest.strip())):
            return False
        if self.screen is not None:
            self.screen.end_plain_text_line()
        self.terminal.echo_hidden_line(immediately=True)
        await self._run_slash_command(typed)
        return True

    async def _run_slash_command(self, typed: str) -> Exit:
        """Execute a slash command and report its error; return its exit code."""
        name, _, rest = typed[1:].strip().partition(" ")
        command = self.commands.get(name)
        if command is None:
            near = find_nearest(name, self.commands, max_count=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
            self.print_text(
                f"there is no command /{one_line(name, 40)}; {hint}  (//{one_line(name, 40)} sends it to the agent)"
            )
            return Exit.COMPLETED
        code = None
        try:
            code = None if command.run is None else await command.run(self, rest.strip())
        except (UsageProblem, StepEngineError, OSError) as error:
            self.print_text(visible(str(error)), "yellow")
        return code or Exit.COMPLETED

    # --- a turn ----------------------------------------------------------------------------------------------------------

    async def run_turn(
        self, prompt: str, agent: AgentDefinition | None = None, options: Options | None = None, *, title: str = ""
    ) -> Exit:
        """Run one turn and record it; return its exit code."""
        from stepengine.engine.packages import get_published_id

        chat = self.conversation
        agent, options = agent or chat.agent, options or chat.options
        about = {"agent_id": get_published_id(agent), "prompt": title, "session_id": chat.session_id}
        with RunRecording.create(options, None, command="chat", **about) as recording:
            try:
                handle = chat.start_turn(prompt, agent, options, recording.journal)
            except StepEngineError as error:
                return print_error(visible(format_error(error)))
            recording.record_start(handle.run_id)
            return await self._show_and_record_turn(handle, recording, options)

    async def resume_turn(self) -> Exit | None:
        """Resume the turn that was interrupted or waits for an answer, and ask its questions; ``None`` if there is none."""
        entry, self._waiting, chat = self._waiting, None, self.conversation
        if entry is None:
            return None
        journal = open_journal(entry.journal)
        limits = make_resume_limits(
            journal, attrs.evolve(fill_options_from_recorded(chat.options, entry), settings=chat.options.settings)
        )
        chat.states.clear()  # the state at the end of the turn has all messages
        questions, code = self._questions, Exit.SUSPENDED
        while code is Exit.SUSPENDED:
            answers: dict[str, Any] = {}
            for question in questions:
                if not await self._ask_and_store_answer(question, answers):
                    return Exit.SUSPENDED
            try:
                handle = await chat.bench.engine.start_resume(
                    journal, agent=chat.agent, limits=limits, in_doubt="ask", answers=answers, wait_for_answers=SEAT_SECONDS
                )  # fmt: skip
            except StepEngineError as error:
                return print_error(visible(format_error(error)))
            code = await self._show_and_record_turn(
                handle, RunRecording(journal, entry), chat.options, answered_ids=answers
            )
            if questions:
                break
            # The resume found an interrupted effect in the journal and asked about it: ask the person and resume again.
            self._questions = questions = chat.results[-1].pending_questions
            if not questions:
                break  # it waits for no person, so the console cannot end the wait
        return code

    async def _ask_and_store_answer(self, question: Question, answers: dict[str, Any]) -> bool:
        """Ask a recorded question and store the answer in *answers*; return whether it was answered."""

        def store_answer(answer: Any) -> None:
            """Validate an answer, and store it under the id of the question."""
            answers[question.id] = validate_typed_answer(answer, question)

        async def run_or_queue_line(typed: str) -> None:
            """Run a line as a chat command, or queue it for the next turn; ignore an empty line."""
            if typed.strip() and not await self.terminal.run_or_queue_chat_command(typed):
                self.terminal.queue_line(typed)

        return await self.terminal.ask_until_answered(question, store_answer, run_or_queue_line)

    async def _show_and_record_turn(
        self, handle: RunHandle, recording: RunRecording, options: Options, *, answered_ids: Collection[str] = ()
    ) -> Exit:
        """Show a turn to its end, record and store its result, and queue unread messages; return the exit code."""
        chat, screen = self.conversation, Screen(self.console, **self._shown)
        self.screen = screen
        for question in self._questions:
            screen.record_shown_diff(question)
        self._questions = ()
        # Without a terminal, the engine denies calls that need the approval of a person.
        asks_permissions = self.terminal.lines.is_terminal
        turn = asyncio.ensure_future(
            show_run(handle, screen, self.terminal, asks_permissions=asks_permissions, answered_ids=answered_ids)
        )
        self.is_working = True
        with self._interrupt_turn_on_ctrl_c(handle, turn) as received:
            await asyncio.wait((turn,))
        self.is_working = False
        chat.diffs += screen.diffs
        if recording.journal is not None:
            options = attrs.evolve(options, journal=recording.journal.address, stem=recording.stem)
        if turn.cancelled():
            self.leaves = True
            again = (
                f"; resume it with: {format_resume_command(options, chat.agent.id)}"
                if recording.journal is not None
                else ""
            )
            return print_error(f"you left during a turn{again}", Exit.INTERRUPTED)
        result = turn.result()
        recording.record_end(result)
        unread = handle.unread
        self.terminal.queue_messages_first(unread)
        chat.journal = recording.journal or chat.journal
        chat.store_turn_result(result, screen.counts.filled)
        run = FinishedRun(result, received[0] if received else None)
        _print_turn_ending(run, len(unread), options, chat.bench)
        if signal.SIGTERM in received:
            self.leaves = True
            return Exit.TERMINATED
        if received and self.terminal.queued_lines:
            await self._ask_to_send_queued_lines()
        return run.code

    async def _ask_to_send_queued_lines(self) -> None:
        """Ask whether the queued lines are still to be sent; else drop them or put them back into the input line."""
        for line in self.terminal.queued_lines:
            self.print_text(f"not sent yet: {one_line(line, 200)}", "yellow")
        said = (
            ((await self.terminal.read_line_with_prompt(QUEUED if self.terminal.is_rich else QUEUED_PLAIN)) or "")
            .strip()
            .lower()
        )
        if said not in YES:
            self.terminal.clear_queue(to_input_line=said not in NO)

    @contextlib.contextmanager
    def _interrupt_turn_on_ctrl_c(self, handle: RunHandle, turn: asyncio.Task[Any]) -> Iterator[list[int]]:
        """Let Ctrl-C interrupt the turn while the block runs, and leave the chat at a second one; yield the signals received."""
        loop = asyncio.get_running_loop()
        last = loop.time()

        def interrupt_run() -> None:
            """Interrupt the run gracefully, and print that it is ending."""
            nonlocal last
            last = loop.time()
            handle.interrupt(grace=GRACE)
            loop.call_soon_threadsafe(_print_stopping_notice, handle, self.screen, self.terminal)

        def leave_or_interrupt_again() -> None:
            """Cancel the turn at a second Ctrl-C within a short time; later, interrupt the run again."""
            if loop.time() - last < SOON:
                loop.call_soon_threadsafe(turn.cancel)
            else:
                interrupt_run()

        # The keys of a terminal that is read key by key are no signals.
        pressed = partial(signal.raise_signal, signal.SIGINT)
        with (
            call_on_interrupts(interrupt_run, leave_or_interrupt_again) as received,
            self.terminal.set_turn_display_and_interrupt(self._render_live_text, pressed),
        ):
            yield received

    def _render_live_text(self) -> str:
        """Return the live area of the current turn; ``""`` before the first turn."""
        return "" if self.screen is None else self.screen.render_live_area()

    def _format_status_line(self) -> str:
        """Return the status line: model, mode, folder, remaining context and cost."""
        chat = self.conversation
        left = self._compute_remaining_context_percent(get_model_name_or_substitute(chat))
        spent = self.screen.counts.cost if self.is_working and self.screen is not None else Decimal(0)
        after = [*([] if left is None else [f"{left} % of context left"]), format_cost(chat.compute_total_cost(spent))]
        return _format_short_status_line(
            get_model_name_or_substitute(chat), chat.mode, chat.options.cwd.resolve(), after, self.console.width
        )

    def _compute_remaining_context_percent(self, model: str) -> int | None:
        """Return the remaining percentage of the model's context; ``None`` if its size is unknown."""
        chat = self.conversation
        if model not in self._windows:
            self._windows[model] = None
            with contextlib.suppress(StepEngineError):
                self._windows[model] = chat.options.settings.make_models().info(model).context_window
        window = self._windows[model]
        filled = self.screen.counts.filled if self.is_working and self.screen is not None else 0
        return None if not window else max(0, 100 - round(100 * (filled or chat.filled or 0) / window))

    def _schedule_and_print_next_mode(self) -> None:
        """Select the following permission mode for the next turn, and print it."""
        self.print_text(f"mode {self.conversation.schedule_next_permission_mode()}, from the next turn on")

    def _print_last_full_output(self) -> None:
        """Print the last thoughts or the last tool result in full."""
        whole = "" if self.screen is None else self.screen.whole
        self.terminal.print_text(visible(whole) if whole else "(no thoughts and no result yet)", "dim", gutter="| ")


def _print_turn_ending(run: FinishedRun, unread: int, options: Options, bench: EngineSetup) -> None:
    """Print why a turn did not complete, and its warnings. For an interrupted turn the summary is enough."""
    from stepengine.engine.run import make_undelivered_messages_warning

    # These messages are queued for the next turn or put back into the input line, so the warning would be wrong.
    dropped = make_undelivered_messages_warning(unread)
    result = attrs.evolve(run.result, warnings=tuple([w for w in run.result.warnings if w != dropped]))
    if run.code is Exit.INTERRUPTED:
        print_warnings(result)
        return
    print_waits_and_warnings(result, options)
    if run.code is not Exit.COMPLETED:
        print_error(explain_run_ending(run, options, bench))


def _print_stopping_notice(handle: RunHandle, screen: Screen | None, terminal: PromptReader) -> None:
    """Show that the turn is ending, in the status line or as a printed line."""
    if screen is not None:
        screen.is_stopping = True
    if (names := ", ".join(handle.calls_to_finish)) and not terminal.is_rich:
        terminal.print_text(
            f"(waiting up to {GRACE:g} s for {one_line(names, 60)}; press Ctrl-C again to leave)", "dim"
        )


def get_model_name_or_substitute(chat: ChatConversation) -> str:
    """Return the model of a chat; without one, the name of its script or "no model"."""
    options = chat.options
    instead = f"script {Path(options.script).name}" if options.script else "no model"
    return str(options.main_model or options.settings.get("model") or chat.agent.model or instead)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise ``SystemExit`` at SIGTERM while the block runs, so that the terminal is restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _format_short_status_line(model: str, mode: str, folder: Path, last_parts: Sequence[str], width: int) -> str:
    """Join the parts of the status line to less than *width* characters; shorten the model first, then the folder."""
    with contextlib.suppress(ValueError, RuntimeError):  # outside of the home folder, or without one
        folder = Path("~") / folder.relative_to(Path.home())
    name, place, room = one_line(model, 60), one_line(str(folder), 200), 0
    for shown in (name, name.rpartition("/")[2]):
        room = width - 1 - len(" | ".join([shown, mode, "", *last_parts]))
        if len(place) <= room:
            return " | ".join([shown, mode, place, *last_parts])
    place = f"...{place[3 - room :]}" if room > len("...") else ""
    return truncate_text(" | ".join([part for part in (shown, mode, place, *last_parts) if part]), max(1, width - 1))
