"""
An open session of an editor: its turns, each of which is a run.

What must not be here: the requests of the protocol, and which sessions there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.adapters.acp import prompts, questions
from stepengine.adapters.acp.editor import ConnectedEditor
from stepengine.adapters.acp.kept import PromptRun, StoredSession
from stepengine.adapters.acp.protocol_errors import INTERNAL, make_protocol_error
from stepengine.adapters.acp.session_engines import SessionEngines
from stepengine.adapters.acp.shown_questions import ShownQuestions
from stepengine.data.definition import ToolSource
from stepengine.data.events import Event, PermissionRequested, QuestionAsked, RunFinished
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.waits import Waits, describe_waits
from stepengine.errors import InputError, JournalMissing, MissingKey, ReplayDivergence, StepEngineError
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from acp import schema

    from stepengine.adapters.acp.session_options import SessionChoices
    from stepengine.adapters.acp.updates import ShownTurn
    from stepengine.engine import Engine

PATIENCE = 10 * 365 * 86_400.0
"""Seconds that a question stays open: for ever, but that a run which only waits for a time or a message is suspended."""
RESUME = "/resume"
"""The prompt with which a person resumes a sleeping run at once."""
REASONS = {
    RunStatus.CANCELLED: "cancelled",
    RunStatus.MAX_STEPS: "max_turn_requests",
    RunStatus.TRUNCATED: "max_tokens",
}


@attrs.define(eq=False)
class _LiveRun:
    """
    The run of a turn.

    Attributes:
        handle: Controls the run.
        turn: Its turn.
        events: Its events that are not shown yet.
        shown: Converts the events to updates.
        question: The question that the next prompt answers.
        answered: The id of the question that the resume of the run answered; its event is repeated.
    """

    handle: RunHandle
    turn: PromptRun
    events: AsyncGenerator[Event, None]
    shown: ShownTurn
    question: Question | None = None
    answered: str = ""


@frozen
class _SuspendedTurn:
    """
    A turn whose run is suspended in its record.

    Attributes:
        turn: The turn.
        waits: Its waits, if no person is awaited.
        question: The question that the next prompt answers, or the permission that the resumed run requests again.
    """

    turn: PromptRun
    waits: tuple[Waits, ...] = ()
    question: Question | None = None


class EditorSession:
    """
    A session that is open.

    Attributes:
        kept: What is stored of it.
        state: The state that its next turn continues from.
        broken: Why it cannot continue; ``""`` if it can.
        free: Set while no turn is running.
        is_given_up: Whether the turn that is running was cancelled.
        run: The current run, also one that a turn left for a question.
        asleep: The last turn, while its run is suspended: it waits for no person, or was closed with an open question.
    """

    def __init__(self, editor: ConnectedEditor, engines: SessionEngines, kept: StoredSession) -> None:
        self._editor = editor
        self._engines = engines
        self.kept = kept
        self._made_for = kept.chosen
        self._engine = self._make_engine(kept.chosen)
        self._agent = engines.get_agent_with_sources(self._engine)
        self._sources: tuple[ToolSource, ...] = ()
        self._questions = ShownQuestions(editor, kept.id)
        self.state: AgentState | None = None
        # In US dollars, by the number of the turn; None if a part of it is unknown.
        self._costs: dict[int, Decimal | None] = {}
        self.broken = ""
        self.free = asyncio.Event()
        self.free.set()
        self.is_given_up = False
        self.run: _LiveRun | None = None
        self.asleep: _SuspendedTurn | None = None

    def add_servers(self, mcp_servers: Any) -> None:
        """Add the tools of the MCP servers that the editor named."""

        def show_warning(message: str) -> None:
            """Show a warning in the editor after the reply to the current request."""
            self._editor.send_after_reply(self._send_agent_text(f"({message})\n\n"))

        self._sources = self._engines.make_server_sources(mcp_servers or (), self._agent, self.kept.cwd, show_warning)
        self._agent = self._engines.get_agent_with_sources(self._engine, self._sources)

    async def close(self) -> None:
        """Withdraw the open questions, stop the run, and close the engine."""
        self._questions.cancel()
        if self.run is not None:
            await self.run.handle.shutdown()
        await self._engine.aclose()

    async def send_update(self, update: Any) -> None:
        """Show an update in the editor."""
        await self._editor.send_update(self.kept.id, update)

    async def _send_agent_text(self, text: str) -> None:
        """Show a text in the editor as a message of the agent."""
        import acp

        await self.send_update(acp.update_agent_message_text(text))

    async def send_skill_commands(self) -> None:
        """Show the skills of the workspace as commands."""
        from acp import schema

        try:
            commands = await asyncio.to_thread(prompts.list_skill_commands, self.kept.cwd)
        except StepEngineError as error:
            LOGGER.warning("the skills of the workspace cannot be listed: %s", error.message)
            return
        await self.send_update(
            schema.AvailableCommandsUpdate(session_update="available_commands_update", available_commands=commands)
        )

    def _make_engine(self, chosen: SessionChoices) -> Engine:
        """Return an engine with the choices of a person and the buffers and terminals of the editor."""
        tools = self._editor.make_buffers_and_terminals(self.kept.id, self.kept.cwd, self._show_terminal)
        return self._engines.make_engine(self.kept.cwd, chosen, tools)

    async def _show_terminal(self, path: str, call_id: str, terminal: str) -> None:
        """Show a terminal at its tool call in the editor, if a run is running."""
        if self.run is not None:
            await self.send_update(self.run.shown.make_terminal_update(path, call_id, terminal))

    def _make_shown_turn(self, *, number: int, is_live: bool) -> ShownTurn:
        """Return an object that makes the updates of a turn; it gets the cost of all other turns."""
        from stepengine.adapters.acp.updates import ShownTurn

        others = [cost for turn, cost in self._costs.items() if turn != number]
        total = sum([cost for cost in others if cost is not None], Decimal(0))
        return ShownTurn(number, self.kept.cwd, is_live=is_live, cost=None if None in others else total)

    # --- stored turns -------------------------------------------------------------------------------------------------

    async def replay_turns(self, *, shows_turns: bool) -> None:
        """Load the state and costs of the stored turns; show the turns if *shows_turns*, then the context size and an open question."""
        turns = self.kept.turns
        question = await asyncio.to_thread(_find_open_question, turns[-1].journal) if turns else None
        last = max([number for number, turn in enumerate(turns, 1) if turn.is_kept], default=0)
        if question is not None:
            last = len(turns)  # a killed process has not stored that its turn waits for an answer
        for number, turn in enumerate(turns, 1):
            if shows_turns or number == last:
                await self._replay_turn(number, turn, shows_turn=shows_turns, is_last=number == last)
            self._costs[number] = await asyncio.to_thread(_read_cost, turn.journal)
        if question is not None and not self.broken:
            self.asleep = _SuspendedTurn(turns[-1], question=question)
        self._editor.send_after_reply(self._send_usage_and_open_question())

    async def _send_usage_and_open_question(self) -> None:
        """Send the editor the context size and cost of the conversation, and the open question if there is one."""
        if self.state is not None:
            model = self._made_for.model or self._agent.model or ""
            for update in self._make_shown_turn(number=0, is_live=False).make_context_update(self.state, model):
                await self.send_update(update)
        if self.asleep is not None and self.asleep.question is not None:
            await self._send_agent_text(questions.format_open_question(self.asleep.question))

    async def _replay_turn(self, number: int, turn: PromptRun, *, shows_turn: bool, is_last: bool) -> None:
        """Replay the journal of a turn, and show it if *shows_turn*; the last turn sets the state and the sleep."""
        import acp

        shown = self._make_shown_turn(number=number, is_live=False)
        updates: list[object] = prompts.make_prompt_updates(turn.prompt, turn.media_file)

        def collect_updates(event: Event) -> None:
            updates.extend(shown.make_updates(event))

        engine = self._engines.make_engine(self.kept.cwd, turn.chosen, {}, (collect_updates,))
        try:
            agent = self._engines.get_agent_with_sources(engine, self._engines.make_replay_sources(turn.servers))
            result = await engine.replay(turn.journal, agent=agent, complete=False)
            if is_last:
                self.state = result.state
                self.asleep = _find_sleeping_turn(turn, result)
        except StepEngineError as error:
            why = "by another version of the agent" if isinstance(error, ReplayDivergence) else "but cannot be replayed"
            updates.append(
                acp.update_agent_message_text(f"(This turn was recorded {why}; the rest of it cannot be shown.)")
            )
            if is_last:
                self.broken = f"its last turn was recorded {why}: {error.message}"
        finally:
            await engine.aclose()
        for update in updates if shows_turn else ():
            await self.send_update(update)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def run_turn(self, prompt: prompts.EditorPrompt) -> schema.PromptResponse:
        """Start, resume or answer a run by a prompt, and show the run while it runs."""
        from acp import schema

        self.free.clear()
        try:
            if (self.run is None or self.run.handle.done) and self.asleep is not None:
                is_over = await self._show_if_finished_elsewhere(self.asleep.turn)
                if (is_over and _is_resume_command(prompt)) or not (
                    is_over or await self._resume_if_answered_due_or_requested(prompt, self.asleep)
                ):
                    return schema.PromptResponse(stop_reason="end_turn")
                if is_over:
                    await self._start_turn(prompt)
            elif self.run is None or self.run.handle.done:
                await self._start_turn(prompt)
            else:
                self._answer_or_send_input(self.run, prompt)
            if self.is_given_up and self.run is not None:
                self.run.handle.interrupt()
            return await self._show_until_end_or_question()
        finally:
            self.is_given_up = False
            self.free.set()

    def raise_if_broken(self) -> None:
        """Raise the protocol's error if the session cannot continue."""
        if self.broken:
            msg = f"this session cannot continue: {self.broken}. Start a new one"
            raise make_protocol_error(INTERNAL, msg)

    async def cancel(self) -> None:
        """Cancel the running turn, or end a run that waits for an answer as cancelled."""
        if not self.free.is_set():
            self.is_given_up = True
            if self.run is not None:
                self.run.handle.interrupt()
            return
        self.free.clear()
        self.is_given_up = True
        try:
            if self.run is None and self.asleep is not None and self.asleep.question is not None:
                await self._resume_run(self.asleep, answers={})  # so that its record holds the end, too
            if self.run is not None:
                self.run.handle.interrupt()
                await self._store_result_and_clear_run(await self.run.handle.result())
        finally:
            self.is_given_up = False
            self.free.set()

    async def _start_turn(self, prompt: prompts.EditorPrompt) -> None:
        """Store a new turn and start its run; remove the turn again if the run cannot start."""
        from acp import schema

        if self.run is not None:
            await self._store_result_and_clear_run(await self.run.handle.result())
        await self._rebuild_engine_if_changed()
        kept = self.kept
        text = await asyncio.to_thread(prompts.expand_skill_command, prompt.text, kept.cwd)
        media = prompts.media_to_json(prompt.media) if prompt.media else ""
        turn = kept.add_turn(prompt.text, servers=tuple([one.name for one in self._sources]), media=media)
        if len(kept.turns) == 1:
            await self.send_update(
                schema.SessionInfoUpdate(
                    session_update="session_info_update", title=kept.title, updated_at=kept.updated
                )
            )
        try:
            handle = self._engine.start(
                self._agent,
                text,
                previous=prompts.with_media_message(self.state, prompt.media),
                session_id=kept.id,
                journal=turn.journal,
                wait_for_answers=PATIENCE,
            )
        except StepEngineError:
            kept.remove_turn(turn)
            kept.save()
            raise
        self._set_live_run(handle, turn)

    def _set_live_run(self, handle: RunHandle, turn: PromptRun) -> _LiveRun:
        """Store a started run as the current one of the session, and return it."""
        shown = self._make_shown_turn(number=len(self.kept.turns), is_live=True)
        self.run = _LiveRun(handle, turn, handle.events(), shown)
        return self.run

    async def _show_if_finished_elsewhere(self, turn: PromptRun) -> bool:
        """Show the result of a suspended run if another process has ended it, and return True in that case."""
        from stepengine.journal import FileJournal

        if not await asyncio.to_thread(lambda: FileJournal(turn.journal).history().is_complete):
            return False
        self.asleep = None
        await self._send_agent_text("Another process resumed the run. Its output follows.\n\n")
        number = self.kept.turns.index(turn) + 1
        await self._replay_turn(number, turn, shows_turn=True, is_last=True)
        self._costs[number] = await asyncio.to_thread(_read_cost, turn.journal)
        self.raise_if_broken()
        return True

    async def _resume_if_answered_due_or_requested(
        self, prompt: prompts.EditorPrompt, suspended: _SuspendedTurn
    ) -> bool:
        """
        Resume a suspended run and return True; else show when it resumes.

        The prompt answers its question; a run that waits for a permission requests it again. A sleeping run resumes when its wait
        is over, or if the prompt requests it.
        """
        from stepengine.journal import FileJournal
        from stepengine.journal.sleepers import is_due

        question = suspended.question
        answers = {} if question is None or question.tool_name is not None else {question.id: prompt.text}
        is_woken = not answers and _is_resume_command(prompt)
        text = prompt.text.strip().removeprefix(RESUME).strip() if is_woken else prompt.text
        journal = FileJournal(suspended.turn.journal)
        is_ready = is_woken or question is not None
        if not is_ready and not await asyncio.to_thread(is_due, journal, suspended.waits, datetime.now(UTC)):
            await self._send_agent_text(_describe_sleep(suspended.waits))
            return False
        if prompt.media:
            msg = "a prompt that resumes a run can contain only text; send images and files with the next prompt"
            raise InputError(msg)
        await self._rebuild_engine_if_changed()
        run = await self._resume_run(suspended, answers=answers, immediately=is_woken)
        run.answered = next(iter(answers), "")
        if text and not answers:
            run.handle.send_input(text)
        return True

    async def _resume_run(
        self, suspended: _SuspendedTurn, *, answers: dict[str, str], immediately: bool = False
    ) -> _LiveRun:
        handle = await self._engine.start_resume(
            suspended.turn.journal, agent=self._agent, answers=answers, now=immediately, wait_for_answers=PATIENCE
        )
        self.asleep = None
        return self._set_live_run(handle, suspended.turn)

    async def _rebuild_engine_if_changed(self) -> None:
        """Rebuild the engine if the choices have changed."""
        chosen = self.kept.chosen
        if chosen == self._made_for:
            return
        engine = self._make_engine(chosen)
        await self._engine.aclose()
        self._engine, self._made_for = engine, chosen
        self._agent = self._engines.get_agent_with_sources(engine, self._sources)

    def _answer_or_send_input(self, run: _LiveRun, prompt: prompts.EditorPrompt) -> None:
        """
        Answer the open question of the run with a prompt, or send the prompt to a run without a question.

        A text that is no valid answer leaves the question open.
        """
        if prompt.media:
            msg = "the agent waits for a text answer; send images and files with the next prompt"
            raise InputError(msg)
        if run.question is None:
            run.handle.send_input(prompt.text)
        else:
            run.handle.answer(run.question.id, prompt.text)
            run.question = None

    async def _show_until_end_or_question(self) -> schema.PromptResponse:
        """Show a run until it ends or asks for text."""
        from acp import schema

        assert self.run is not None  # noqa: S101 - a turn has started
        run = self.run
        async for event in run.events:
            for update in run.shown.make_updates(event):
                await self.send_update(update)
            if isinstance(event, PermissionRequested):
                if not event.question.problem:  # else the tool refuses the call by itself
                    self._questions.ask_in_background(run.handle, event.question, run.shown.make_permission_call(event))
            elif isinstance(event, QuestionAsked):
                if event.question.id != run.answered and not self._questions.ask_if_showable(
                    run.handle, event.question
                ):
                    run.question = event.question
                    await self._send_agent_text(questions.format_question(event.question))
                    # The run waits in its record from now on: a later session can answer it.
                    self.kept.save_turn_end(run.turn, is_in_conversation=True)
                    run.turn = self.kept.turns[-1]
                    return schema.PromptResponse(stop_reason="end_turn")
            elif isinstance(event, RunFinished):
                return await self._finish_turn(event.result)
        msg = "the run ended without a result"
        raise StepEngineError(msg)

    async def _finish_turn(self, result: RunResult) -> schema.PromptResponse:
        """Store the result and return the response; raise an error if the run failed."""
        from acp import schema

        await self._store_result_and_clear_run(result)
        if self.asleep is not None:
            await self._send_agent_text(_describe_sleep(self.asleep.waits))
        if isinstance(result.error, MissingKey):
            raise result.error
        if result.status is RunStatus.FAILED:
            raise make_protocol_error(INTERNAL, str(result.error))
        used = result.usage
        usage = schema.Usage(
            total_tokens=used.total_tokens,
            input_tokens=used.input_tokens,
            output_tokens=used.completion_tokens,
            thought_tokens=used.reasoning_tokens,
            cached_read_tokens=used.cache_read_tokens,
            cached_write_tokens=used.cache_write_tokens,
        )
        reason: Any = REASONS.get(result.status, "end_turn")
        return schema.PromptResponse(stop_reason=reason, usage=usage)

    async def _store_result_and_clear_run(self, result: RunResult) -> None:
        """Store the state, cost and end of the turn, and clear the run. A failed turn is not part of the conversation."""
        is_kept = result.status is not RunStatus.FAILED
        if is_kept:
            self.state = result.state
        run = self.run
        if run is not None:
            self._costs[len(self.kept.turns)] = result.cost
            self.kept.save_turn_end(run.turn, is_in_conversation=is_kept)
            self.asleep = _find_sleeping_turn(self.kept.turns[-1], result)
            self._questions.cancel()  # what was asked about and not answered when the turn was cancelled
            await run.events.aclose()
            self.run = None


def _find_sleeping_turn(turn: PromptRun, result: RunResult) -> _SuspendedTurn | None:
    """Return the turn if its run is suspended and waits for no person; else ``None``."""
    is_asleep = result.status is RunStatus.SUSPENDED and result.waits_for and not result.pending_questions
    return _SuspendedTurn(turn, waits=result.waits_for) if is_asleep else None


def _find_open_question(journal: Path) -> Question | None:
    """Return the first open question of a recorded run, else its first open permission request; ``None`` if it cannot be read."""
    from stepengine.journal import FileJournal
    from stepengine.journal.pending_items import find_open_questions

    try:
        history = FileJournal(journal).history()
    except StepEngineError:
        return None
    if history.is_complete or (history.stop is not None and history.stop.input["kind"] == "cancelled"):
        return None
    found = [question for _, question in find_open_questions(history).values()]
    return min(found, key=lambda question: question.tool_name is not None, default=None)


def _read_cost(journal: Path) -> Decimal | None:
    """Return the cost of a recorded run in US dollars; ``None`` if a part of it is unknown."""
    from stepengine.journal import FileJournal
    from stepengine.journal.show import compute_spending

    try:
        return compute_spending(FileJournal(journal).history()).cost
    except JournalMissing:
        return Decimal(0)
    except StepEngineError:
        return None


def _is_resume_command(prompt: prompts.EditorPrompt) -> bool:
    """Return whether a prompt starts with the command that resumes a suspended run."""
    return prompt.text.strip().partition(" ")[0] == RESUME


def _describe_sleep(waits: tuple[Waits, ...]) -> str:
    """Return a text about the waits of a suspended run, and how it is resumed."""
    return f"{describe_waits(waits)} It continues with the next prompt after that; {RESUME} resumes it now.\n\n"
