"""
An agent for an editor: its sessions, prompts and questions.

What lives here: the methods that the protocol calls. What must not: how an engine is made, which is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from stepengine.adapters.acp import prompts, questions, servers
from stepengine.adapters.acp.editor_files import EditorBuffers, EditorTerminals, EditorTools
from stepengine.adapters.acp.kept import KeptSession, KeptSessions, PromptRun
from stepengine.adapters.acp.session_options import MODE, MODEL, OfferedChoices, SessionChoices
from stepengine.data.choices import answer_for_choice, is_choice, list_choices
from stepengine.data.definition import AgentDefinition, ToolSource
from stepengine.data.events import Event, PermissionRequested, QuestionAsked, RunFinished
from stepengine.data.questions import Answer, Question
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.waits import describe_waits
from stepengine.engine import Engine
from stepengine.errors import (
    AnswerRejected,
    DefinitionError,
    InputError,
    MissingKey,
    ReplayDivergence,
    SessionError,
    StepEngineError,
)
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from acp import schema
    from acp.interfaces import Client

    from stepengine.adapters.acp.updates import ShownTurn

PAGE = 50
PATIENCE = 10 * 365 * 86_400.0
"""Seconds that a question stays open: for ever, but that a run which only waits for a time or a message is suspended."""
RESUME = "/resume"
"""What a person says to a run that sleeps, to have it go on now."""
REASONS = {
    RunStatus.CANCELLED: "cancelled",
    RunStatus.MAX_STEPS: "max_turn_requests",
    RunStatus.TRUNCATED: "max_tokens",
}
BUFFERS, TERMINALS = "buffers", "terminals"
ENVIRONMENT = "environment"
NO_KEY = "Set the key of the model's provider in the environment of this agent, as the editor's settings have it, and start it again."


class MakeEngine(Protocol):
    """
    A function that returns an engine for a workspace.

    It is also given those of these by name that it takes: ``mode``, a mode of its policy, and ``model``, the model of all agents,
    each ``""`` where nothing was chosen; ``buffers``, the files that are open in the editor, for ``file_tools(buffers=...)``;
    ``terminals``, the editor's, for ``shell_tools(terminals=...)``; the last two are ``None`` where the editor does not offer them.
    """

    def __call__(self, cwd: Path, /, *, observers: tuple[Callable[[Event], Any], ...] = ()) -> Engine:
        """Return an engine whose tools work in *cwd*, and which shows its runs to *observers*."""


@attrs.define(eq=False)
class _OpenSession:
    """
    A session that is open.

    Attributes:
        state: Where its next turn goes on.
        handle: The run under way, also one that a turn left for a question.
        made_for: What its engine was made for.
        always: What was allowed for good, by the ids of the rules; an engine that is made anew has forgotten it.
        free: Set while no turn is under way.
        is_given_up: Whether the turn under way was cancelled.
        asleep: The last turn and how its run stands, while that waits for no person.
    """

    kept: KeptSession
    engine: Engine
    agent: AgentDefinition
    made_for: SessionChoices
    sources: tuple[ToolSource, ...] = ()
    state: AgentState | None = None
    cost: Decimal | None = Decimal(0)
    broken: str = ""
    free: asyncio.Event = attrs.field(factory=asyncio.Event)
    is_given_up: bool = False
    handle: RunHandle | None = None
    asleep: tuple[PromptRun, RunResult] | None = None
    turn: PromptRun | None = None
    events: AsyncGenerator[Event, None] | None = None
    shown: ShownTurn | None = None
    question: Question | None = None
    asking: set[asyncio.Task[None]] = attrs.field(factory=set)
    always: set[str] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        self.free.set()


class EditorAgent:
    """
    An agent as the protocol's package calls it (``acp.run_agent``); ``serve`` runs one over stdin and stdout.

    Each prompt is a root run with a journal of its own, and goes on from the state of the one before. Tool calls that need a person's
    permission, and questions with options, are permission requests; a question that wants words is a form where the editor shows
    forms, else it ends the turn, and the next prompt answers it. Loading a session replays its journals: no model is asked, no tool
    runs.

    Args:
        make: Makes the engine of a session, which is closed with it.
        agent: The id of the agent.
        folder: Where sessions are kept.
        mcp: Makes a source of tools of an MCP server that the editor names: ``stepengine.adapters.mcp.mcp_tools``. Without it they are not
            started, and a warning says so.
        modes: The modes of a policy that can be chosen, the first one by default; *make* takes ``mode`` then.
        models: The models that can be chosen, likewise, ``""`` for those that the agents name; *make* takes ``model`` then.

    Attributes:
        deletes: Whether ``session/delete`` comes to ``ext_method``, as it does with ``serve``: the package has no route for it.

    Raises:
        DefinitionError: for an unknown mode, and for choices that *make* does not take.
    """

    def __init__(
        self,
        make: MakeEngine,
        agent: str,
        folder: Path,
        *,
        mcp: servers.McpMaker | None = None,
        modes: Sequence[str] = (),
        models: Sequence[str] = (),
    ) -> None:
        self._make = make
        self._agent = agent
        self._kept = KeptSessions(folder)
        self._mcp = mcp
        self._offer = OfferedChoices(modes, models)
        self._takes = _choices_accepted_by(make)
        for name, offered in ((MODE, modes), (MODEL, models)):
            if offered and name not in self._takes:
                msg = f"{name}s= offers a choice, and what makes the engine does not take it; give it the parameter {name}=''"
                raise DefinitionError(msg)
        self._open: dict[str, _OpenSession] = {}
        self._client: Client | None = None
        self._client_can: Any = None
        self._without_key = ""
        self._later: set[asyncio.Task[None]] = set()
        self.deletes = False

    def on_connect(self, conn: Client) -> None:
        """Store the client that runs are shown to."""
        self._client = conn

    async def initialize(
        self, protocol_version: int, client_capabilities: Any = None, **_: object
    ) -> schema.InitializeResponse:
        """Negotiate the protocol version, and return the capabilities of this agent."""
        import acp
        from acp import schema

        self._client_can = client_capabilities
        sessions = schema.SessionCapabilities(
            list=schema.SessionListCapabilities(),
            delete=schema.SessionDeleteCapabilities() if self.deletes else None,
            fork=schema.SessionForkCapabilities(),
            resume=schema.SessionResumeCapabilities(),
            close=schema.SessionCloseCapabilities(),
        )
        return schema.InitializeResponse(
            # A version that is not known is answered by the newest that is, as the protocol has it.
            protocol_version=acp.PROTOCOL_VERSION,
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(embedded_context=True, image=True),
                mcp_capabilities=schema.McpCapabilities(http=self._mcp is not None),
                session_capabilities=sessions,
            ),
            auth_methods=[schema.AuthMethodAgent(id=ENVIRONMENT, name="Key in the environment", description=NO_KEY)],
            agent_info=schema.Implementation(name="stepengine", title=f"stepengine: {self._agent}", version=_version()),
        )

    async def authenticate(self, method_id: str, **_: object) -> schema.AuthenticateResponse:
        """Raise the protocol's error if the API key was missing at its last use: a process's environment does not change."""
        from acp import schema

        if method_id != ENVIRONMENT:
            msg = f"{method_id!r:.80} is not a way to sign in here; there is {ENVIRONMENT!r}"
            raise _invalid_params_error(msg)
        if self._without_key:
            raise _missing_key_error(self._without_key)
        return schema.AuthenticateResponse()

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def new_session(self, cwd: str, mcp_servers: Any = None, **_: object) -> schema.NewSessionResponse:
        """Start a session in a workspace."""
        from acp import schema

        session = await self._open_session(self._do_request(lambda: self._kept.new(_check_folder(cwd))), mcp_servers)
        return schema.NewSessionResponse(session_id=session.kept.id, **self._list_choices(session))

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: object
    ) -> schema.LoadSessionResponse:
        """Resume a session, and show its conversation."""
        from acp import schema

        session = await self._reopen_session(session_id, _check_folder(cwd), mcp_servers, shows=True)
        return schema.LoadSessionResponse(**self._list_choices(session))

    async def resume_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: object
    ) -> schema.ResumeSessionResponse:
        """Resume a session."""
        from acp import schema

        session = await self._reopen_session(session_id, _check_folder(cwd), mcp_servers, shows=False)
        return schema.ResumeSessionResponse(**self._list_choices(session))

    async def fork_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: object
    ) -> schema.ForkSessionResponse:
        """Start a session from the state of another one."""
        from acp import schema

        folder = _check_folder(cwd)
        source = self._do_request(lambda: self._kept.find(session_id))
        under_way = self._open.get(session_id)
        if under_way is not None and (not under_way.free.is_set() or under_way.handle is not None):
            msg = f"session {session_id!r} is under way; fork it when its turn has ended"
            raise _invalid_params_error(msg)
        made = self._do_request(lambda: self._kept.copy(source, folder))
        session = await self._reopen_session(made.id, folder, mcp_servers, shows=False)
        return schema.ForkSessionResponse(session_id=made.id, **self._list_choices(session))

    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: object
    ) -> schema.ListSessionsResponse:
        """List the sessions of a workspace, the newest first, 50 per page."""
        from acp import schema

        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < PAGE):
            msg = "the cursor is none of ours"
            raise _invalid_params_error(msg)
        first = int(cursor or 0)
        found = self._kept.all(None if cwd is None else _check_folder(cwd))
        infos = [
            schema.SessionInfo(session_id=each.id, cwd=str(each.cwd), title=each.title or None, updated_at=each.updated)
            for each in found[first : first + PAGE]
        ]
        following = str(first + PAGE) if len(found) > first + PAGE else None
        return schema.ListSessionsResponse(sessions=infos, next_cursor=following)

    async def close_session(self, session_id: str, **_: object) -> schema.CloseSessionResponse:
        """End the turn of a session, and close its engine. The session stays stored."""
        from acp import schema

        session = self._open.pop(session_id, None)
        if session is not None:
            await self._end_session(session)
        return schema.CloseSessionResponse()

    async def delete_session(self, session_id: str) -> None:
        """Close a session, and delete it with its journals; an unknown session counts as deleted."""
        await self.close_session(session_id)
        self._do_request(lambda: self._kept.remove(session_id))

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Delete a session for ``session/delete``, which the protocol's package does not route; refuse every other method."""
        from acp import RequestError

        if method != "session/delete" or not self.deletes:
            raise RequestError.method_not_found("_" + method)
        session_id = params.get("sessionId")
        if not isinstance(session_id, str):
            msg = "sessionId is the id of a session"
            raise _invalid_params_error(msg)
        await self.delete_session(session_id)
        return {}

    async def aclose(self) -> None:
        """Close every session."""
        for task in self._later:
            task.cancel()
        for session_id in list(self._open):
            await self.close_session(session_id)

    async def _open_session(self, kept: KeptSession, named: Any) -> _OpenSession:
        before = self._open.pop(kept.id, None)
        if before is not None:
            await self._end_session(before)
        kept.chosen = self._offer.again(kept.chosen)
        engine = self._do_request(lambda: self._make_engine(kept.cwd, kept.chosen, lent=self._make_editor_tools(kept)))
        agent = self._do_request(lambda: engine.agent(self._agent))
        session = _OpenSession(kept, engine, agent, kept.chosen)
        session.sources = self._do_request(lambda: self._make_sources(session, named or ()))
        session.agent = servers.add_sources(agent, session.sources)
        self._open[kept.id] = session
        self._send_after_reply(self._send_commands(session))
        return session

    def _make_engine(
        self,
        cwd: Path,
        chosen: SessionChoices,
        observers: tuple[Callable[[Event], Any], ...] = (),
        lent: EditorTools | None = None,
    ) -> Engine:
        """Return an engine from the maker, with the choices and editor tools that the maker accepts."""
        tools = lent or EditorTools()
        known = {MODE: chosen.mode, MODEL: chosen.model, BUFFERS: tools.buffers, TERMINALS: tools.terminals}
        given = {name: value for name, value in known.items() if name in self._takes}
        make: Any = self._make
        engine: Engine = make(cwd, observers=observers, **given)
        return engine

    def _make_editor_tools(self, kept: KeptSession) -> EditorTools:
        """Return the files and terminals that the editor offers to the tools of a session."""
        can, client = self._client_can, self._client
        if can is None or client is None:
            return EditorTools()
        fs = getattr(can, "fs", None)
        reads, writes = bool(getattr(fs, "read_text_file", False)), bool(getattr(fs, "write_text_file", False))
        buffers = EditorBuffers(client, kept.id, kept.cwd, reads=reads, writes=writes) if reads or writes else None

        async def show(path: str, call_id: str, terminal: str) -> None:
            session = self._open.get(kept.id)
            if session is not None and session.shown is not None:
                await self._send_update(session, session.shown.in_terminal(path, call_id, terminal))

        return EditorTools(buffers, EditorTerminals(client, kept.id, kept.cwd, show) if can.terminal else None)

    def _make_sources(self, session: _OpenSession, named: Sequence[Any]) -> tuple[ToolSource, ...]:
        """Return the MCP servers of a session as sources of tools."""
        if named and self._mcp is None:
            LOGGER.warning(
                "the editor named %d MCP servers; they are not started: nothing that could was given", len(named)
            )
        if self._mcp is None:
            return ()
        taken = [tool.name for tool in session.agent.tools if isinstance(tool, ToolSource)]

        def warn(message: str) -> None:
            self._send_after_reply(self._send_text(session, f"({message})\n\n"))

        return servers.make_session_sources(named, self._mcp, taken, cwd=str(session.kept.cwd), warn=warn)

    async def _end_session(self, session: _OpenSession) -> None:
        for task in session.asking:
            task.cancel()
        if session.handle is not None:
            await session.handle.shutdown()
        await session.engine.aclose()

    async def _reopen_session(self, session_id: str, cwd: Path, named: Any, *, shows: bool) -> _OpenSession:
        """Reopen a stored session. If nothing is shown, only its last state is loaded."""
        kept = self._do_request(lambda: self._kept.find(session_id))
        kept.cwd = cwd
        session = await self._open_session(kept, named)
        last = max([number for number, turn in enumerate(kept.turns) if turn.is_kept], default=-1)
        for number, turn in enumerate(kept.turns):
            if shows or number == last:
                await self._replay_turn(session, number, turn, shows=shows, is_last=number == last)
        if shows and session.state is not None:
            model = session.made_for.model or session.agent.model or ""
            for update in self._make_shown(session, number=0, is_live=False).filled(session.state, model):
                await self._send_update(session, update)
        return session

    def _make_shown(self, session: _OpenSession, *, number: int, is_live: bool) -> ShownTurn:
        from stepengine.adapters.acp.updates import ShownTurn

        return ShownTurn(number, session.kept.cwd, is_live=is_live, cost=session.cost)

    async def _replay_turn(
        self, session: _OpenSession, number: int, turn: PromptRun, *, shows: bool, is_last: bool
    ) -> None:
        import acp

        shown = self._make_shown(session, number=number + 1, is_live=False)
        updates: list[object] = prompts.replay_prompt(turn.prompt, turn.media)

        def observe(event: Event) -> None:
            updates.extend(shown.make_updates(event))

        engine = self._make_engine(session.kept.cwd, turn.chosen, (observe,))
        try:
            recorded = servers.make_replay_sources(turn.servers, self._mcp) if self._mcp is not None else ()
            agent = servers.add_sources(engine.agent(self._agent), recorded)
            result = await engine.replay(turn.journal, agent=agent, complete=False)
            if is_last:
                session.state = result.state
                session.asleep = _find_suspended_turn(turn, result)
            session.cost = _add_costs(session.cost, result.cost)
        except StepEngineError as error:
            why = "by another version of the agent" if isinstance(error, ReplayDivergence) else "and cannot be repeated"
            updates.append(
                acp.update_agent_message_text(f"(This turn was recorded {why}; what follows is missing here.)")
            )
            if is_last:
                session.broken = f"its last turn was recorded {why}: {error.message}"
        finally:
            await engine.aclose()
        for update in updates if shows else ():
            await self._send_update(session, update)

    def _do_request(self, call: Callable[[], Any]) -> Any:
        """Call a function for a request, and convert its errors to errors of the protocol."""
        try:
            return call()
        except (SessionError, InputError) as error:
            raise _invalid_params_error(error.message) from None
        except StepEngineError as error:
            raise _internal_error(error.message) from None

    def _get_session(self, session_id: str) -> _OpenSession:
        session = self._open.get(session_id)
        if session is None:
            msg = f"session {session_id!r:.80} is not open; begin one with session/new, or load it"
            raise _invalid_params_error(msg)
        return session

    # --- choices ------------------------------------------------------------------------------------------------------

    def _list_choices(self, session: _OpenSession) -> dict[str, Any]:
        """Return the modes and options of a session, without empty lists."""
        chosen = session.kept.chosen
        found = {"modes": self._offer.mode_state(chosen), "config_options": self._offer.options(chosen)}
        return {name: value for name, value in found.items() if value}

    async def set_session_mode(self, session_id: str, mode_id: str, **_: object) -> schema.SetSessionModeResponse:
        """Set the permission mode, from the next turn on."""
        from acp import schema

        session = self._get_session(session_id)
        self._choose(session, MODE, mode_id)
        options = self._offer.options(session.kept.chosen)
        self._send_after_reply(
            self._send_update(
                session, schema.ConfigOptionUpdate(session_update="config_option_update", config_options=options)
            )
        )
        return schema.SetSessionModeResponse()

    async def set_config_option(
        self, config_id: str, session_id: str, value: object, **_: object
    ) -> schema.SetSessionConfigOptionResponse:
        """Set the mode or the model, from the next turn on."""
        from acp import schema

        session = self._get_session(session_id)
        self._choose(session, config_id, value)
        if config_id == MODE:
            mode = session.kept.chosen.mode
            self._send_after_reply(
                self._send_update(
                    session, schema.CurrentModeUpdate(session_update="current_mode_update", current_mode_id=mode)
                )
            )
        return schema.SetSessionConfigOptionResponse(config_options=self._offer.options(session.kept.chosen))

    def _choose(self, session: _OpenSession, option: str, value: object) -> None:
        chosen = self._offer.with_value(session.kept.chosen, option, value)
        if chosen is None:
            msg = f"{value!r:.80} is not among what can be chosen for {option!r:.80}; session/new told the options"
            raise _invalid_params_error(msg)
        session.kept.chosen = chosen
        self._do_request(session.kept.save)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> schema.PromptResponse:
        """Run a turn, and show it while it runs. Wait first for the end of a cancelled turn."""
        from acp import schema

        said = self._do_request(lambda: prompts.parse_prompt(prompt))
        session = await self._wait_until_idle(session_id)
        session.free.clear()
        try:
            if (session.handle is None or session.handle.done) and session.asleep is not None:
                is_over = await self._show_finished_run(session)
                if (is_over and _is_resume_command(said)) or not (is_over or await self._wake_run(session, said)):
                    return schema.PromptResponse(stop_reason="end_turn")
                if is_over:
                    await self._start_turn(session, said)
            elif session.handle is None or session.handle.done:
                await self._start_turn(session, said)
            else:
                self._answer_question(session, said)
            if session.is_given_up and session.handle is not None:
                session.handle.interrupt()
            return await self._show_run(session)
        except StepEngineError as error:
            raise self._make_refusal(error) from None
        finally:
            session.is_given_up = False
            session.free.set()

    async def _wait_until_idle(self, session_id: str) -> _OpenSession:
        """Return an idle session, after waiting for the end of a cancelled turn."""
        session = self._get_session(session_id)
        while not session.free.is_set() and session.is_given_up:
            await session.free.wait()
            session = self._get_session(session_id)
        if not session.free.is_set():
            msg = f"session {session_id!r} is under way; cancel its turn, or wait for its end"
            raise _invalid_params_error(msg)
        if session.broken:
            msg = f"this session cannot go on, {session.broken}. Begin a new one"
            raise _internal_error(msg)
        return session

    def _make_refusal(self, error: StepEngineError) -> Exception:
        """Return the error of the protocol for an error that prevented a turn."""
        if isinstance(error, MissingKey):
            self._without_key = error.message
            return _missing_key_error(error.message)
        return _invalid_params_error(error.message) if isinstance(error, InputError) else _internal_error(error.message)

    async def _start_turn(self, session: _OpenSession, said: prompts.EditorPrompt) -> None:
        if session.handle is not None:
            await self._store_result(session, await session.handle.result())
        await self._renew_engine(session)
        text = await asyncio.to_thread(prompts.add_instructions, said.text, session.kept.cwd)
        media = prompts.encode_media(said.media) if said.media else ""
        turn = session.kept.begin(said.text, servers=tuple([one.name for one in session.sources]), media=media)
        if len(session.kept.turns) == 1:
            await self._send_title(session)
        session.shown = self._make_shown(session, number=len(session.kept.turns), is_live=True)
        try:
            handle = session.engine.start(
                session.agent,
                text,
                previous=prompts.add_media(session.state, said.media),
                session_id=session.kept.id,
                journal=turn.journal,
                wait_for_answers=PATIENCE,
            )
        except StepEngineError:
            session.kept.turns.remove(turn)
            session.kept.save()
            raise
        session.handle, session.turn, session.events = handle, turn, handle.events()

    async def _show_finished_run(self, session: _OpenSession) -> bool:
        """Show the result of a sleeping run if another process has ended it, and return True in that case."""
        from stepengine.journal import FileJournal

        assert session.asleep is not None  # noqa: S101
        turn, before = session.asleep
        if not await asyncio.to_thread(lambda: FileJournal(turn.journal).history().is_complete):
            return False
        if session.cost is not None and before.cost is not None:
            session.cost -= before.cost  # the end of the run counts it again
        session.asleep = None
        await self._send_text(session, "The run was woken elsewhere; this is how it went.\n\n")
        await self._replay_turn(session, session.kept.turns.index(turn), turn, shows=True, is_last=True)
        if session.broken:
            msg = f"this session cannot go on, {session.broken}. Begin a new one"
            raise _internal_error(msg)
        return True

    async def _wake_run(self, session: _OpenSession, said: prompts.EditorPrompt) -> bool:
        """Resume a sleeping run and return True if its wait is over or the prompt requests it; else show when the run resumes."""
        from stepengine.journal import FileJournal
        from stepengine.journal.sleepers import is_due

        assert session.asleep is not None  # noqa: S101
        turn, before = session.asleep
        is_woken = _is_resume_command(said)
        text = said.text.strip().removeprefix(RESUME).strip() if is_woken else said.text
        journal = FileJournal(turn.journal)
        if not is_woken and not await asyncio.to_thread(is_due, journal, before.waits_for, datetime.now(UTC)):
            await self._send_text(session, _sleep_text(before))
            return False
        if said.media:
            msg = "the run that is woken takes words; send images and files with the prompt after it"
            raise InputError(msg)
        await self._renew_engine(session)
        session.shown = self._make_shown(session, number=len(session.kept.turns), is_live=True)
        handle = await session.engine.start_resume(
            journal, agent=session.agent, now=is_woken, wait_for_answers=PATIENCE
        )
        session.handle, session.turn, session.events, session.asleep = handle, turn, handle.events(), None
        if session.cost is not None and before.cost is not None:
            session.cost -= before.cost  # the end of the run counts it again
        if text:
            handle.send_input(text)
        return True

    async def _renew_engine(self, session: _OpenSession) -> None:
        """Rebuild the engine if the choices have changed."""
        chosen = session.kept.chosen
        if chosen == session.made_for:
            return
        engine = self._make_engine(session.kept.cwd, chosen, lent=self._make_editor_tools(session.kept))
        await session.engine.aclose()
        session.engine, session.made_for = engine, chosen
        session.agent = servers.add_sources(engine.agent(self._agent), session.sources)

    def _answer_question(self, session: _OpenSession, said: prompts.EditorPrompt) -> None:
        """Answer the open question of the run with a prompt; a text that does not fit leaves the question open."""
        assert session.handle is not None  # noqa: S101 - the turn before left it
        if said.media:
            msg = "the agent waits for an answer in words; send images and files with the prompt after it"
            raise InputError(msg)
        if session.question is None:
            session.handle.send_input(said.text)
        else:
            session.handle.answer(session.question.id, said.text)
            session.question = None

    async def _show_run(self, session: _OpenSession) -> schema.PromptResponse:
        """Show a run until it ends or asks for text."""
        from acp import schema

        assert session.events is not None and session.shown is not None  # noqa: S101, PT018 - a turn has begun
        async for event in session.events:
            for update in session.shown.make_updates(event):
                await self._send_update(session, update)
            if isinstance(event, PermissionRequested):
                if not event.question.problem:  # else the tool refuses the call by itself
                    self._ask_question(session, event.question, session.shown.request(event))
            elif isinstance(event, QuestionAsked):
                if not self._ask_with_options(session, event.question):
                    session.question = event.question
                    await self._send_text(session, questions.question_text(event.question))
                    return schema.PromptResponse(stop_reason="end_turn")
            elif isinstance(event, RunFinished):
                return await self._finish_turn(session, event.result)
        msg = "the run ended without a result"
        raise StepEngineError(msg)

    async def _finish_turn(self, session: _OpenSession, result: RunResult) -> schema.PromptResponse:
        from acp import schema

        await self._store_result(session, result)
        if session.asleep is not None:
            await self._send_text(session, _sleep_text(result))
        if isinstance(result.error, MissingKey):
            raise result.error
        if result.status is RunStatus.FAILED:
            raise _internal_error(str(result.error))
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

    async def _store_result(self, session: _OpenSession, result: RunResult) -> None:
        """Store the state for the next turn. A failed turn is not part of the conversation."""
        is_kept = result.status is not RunStatus.FAILED
        session.cost = _add_costs(session.cost, result.cost)
        if is_kept:
            session.state = result.state
        if session.turn is not None:
            session.kept.end_turn(session.turn, is_in_conversation=is_kept)
            session.asleep = _find_suspended_turn(session.kept.turns[-1], result)
        for task in session.asking:  # what was asked about and not answered when the turn was cancelled
            task.cancel()
        if session.events is not None:
            await session.events.aclose()
        session.handle = session.turn = session.events = session.question = None

    async def cancel(self, session_id: str, **_: object) -> None:
        """Cancel the turn of a session and its open question."""
        session = self._open.get(session_id)
        if session is None:
            return
        is_idle = session.free.is_set()
        session.is_given_up = not is_idle
        if session.handle is not None:
            session.handle.interrupt()
            if is_idle:
                await self._store_result(session, await session.handle.result())

    # --- questions ----------------------------------------------------------------------------------------------------

    def _ask_with_options(self, session: _OpenSession, question: Question) -> bool:
        """Ask a question by a form or by options, and return False if the editor cannot show it."""
        can = getattr(self._client_can, "elicitation", None)
        if can is not None and can.form is not None:
            self._ask_question(session, question, None)
        elif is_choice(question):
            self._ask_question(session, question, questions.question_as_call(question))
        else:
            return False
        return True

    def _ask_question(self, session: _OpenSession, question: Question, call: schema.ToolCallUpdate | None) -> None:
        # In a task: the run's text goes on to be shown while a person thinks.
        task = asyncio.create_task(self._ask_and_answer(session, question, call))
        session.asking.add(task)
        task.add_done_callback(session.asking.discard)

    async def _ask_and_answer(
        self, session: _OpenSession, question: Question, call: schema.ToolCallUpdate | None
    ) -> None:
        from acp import RequestError

        handle = session.handle
        known = [one.answer for one in list_choices(question) if one.answer.covers in session.always]
        try:
            if known:
                answer = known[0]
            elif call is None:
                answer = await self._ask_by_form(session, question)
            else:
                answer = await self._ask_to_choose(session, question, call)
        except (RequestError, ConnectionError, ValueError):  # the last for what the protocol does not know
            answer = answer_for_choice(question, None)
        if answer.remember:
            session.always.add(answer.covers)
        # The turn may have been cancelled meanwhile.
        with contextlib.suppress(AnswerRejected):
            if handle is not None:
                handle.answer(question.id, answer)

    async def _ask_to_choose(self, session: _OpenSession, question: Question, call: schema.ToolCallUpdate) -> Answer:
        """Return the answer that a person chose among the options of a permission request."""
        assert self._client is not None  # noqa: S101 - somebody is connected, or nothing would run
        response = await self._client.request_permission(session.kept.id, call, questions.permission_options(question))
        return answer_for_choice(question, getattr(response.outcome, "option_id", None))

    async def _ask_by_form(self, session: _OpenSession, question: Question) -> Answer:
        """Return the answer that a person gave in a form."""
        from acp import schema

        assert self._client is not None  # noqa: S101
        mode = schema.ElicitationFormSessionMode(
            session_id=session.kept.id, requested_schema=questions.question_form(question)
        )
        response = await self._client.create_elicitation(question.text, mode)
        return questions.parse_form_answer(question, response)

    # --- words --------------------------------------------------------------------------------------------------------

    async def _send_update(self, session: _OpenSession, update: Any) -> None:
        assert self._client is not None  # noqa: S101
        await self._client.session_update(session.kept.id, update)

    async def _send_text(self, session: _OpenSession, text: str) -> None:
        import acp

        await self._send_update(session, acp.update_agent_message_text(text))

    async def _send_title(self, session: _OpenSession) -> None:
        from acp import schema

        kept = session.kept
        await self._send_update(
            session,
            schema.SessionInfoUpdate(session_update="session_info_update", title=kept.title, updated_at=kept.updated),
        )

    async def _send_commands(self, session: _OpenSession) -> None:
        from acp import schema

        try:
            commands = await asyncio.to_thread(prompts.list_skill_commands, session.kept.cwd)
        except StepEngineError as error:
            LOGGER.warning("the skills of the workspace cannot be told: %s", error.message)
            return
        await self._send_update(
            session,
            schema.AvailableCommandsUpdate(session_update="available_commands_update", available_commands=commands),
        )

    def _send_after_reply(self, telling: Any) -> None:
        """Send an update after the reply to the current request, since the editor does not know the session before."""
        task: asyncio.Task[None] = asyncio.create_task(_send_if_connected(telling))
        self._later.add(task)
        task.add_done_callback(self._later.discard)


def _find_suspended_turn(turn: PromptRun, result: RunResult) -> tuple[PromptRun, RunResult] | None:
    """Return the turn and the result of a suspended run that does not wait for a person."""
    is_asleep = result.status is RunStatus.SUSPENDED and result.waits_for and not result.pending_questions
    return (turn, result) if is_asleep else None


def _is_resume_command(said: prompts.EditorPrompt) -> bool:
    return said.text.strip().partition(" ")[0] == RESUME


def _sleep_text(result: RunResult) -> str:
    return (
        f"{describe_waits(result.waits_for)} It goes on with the next prompt after that; {RESUME} resumes it now.\n\n"
    )


async def _send_if_connected(telling: Any) -> None:
    with contextlib.suppress(ConnectionError):
        await telling


def _choices_accepted_by(make: object) -> frozenset[str]:
    """Return which of a person's choices the maker of an engine accepts."""
    try:
        parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return frozenset()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return frozenset((MODE, MODEL, BUFFERS, TERMINALS)) if takes_all else frozenset([each.name for each in parameters])


def _check_folder(cwd: str) -> Path:
    path = Path(cwd)
    if not (path.is_absolute() and path.is_dir()):
        msg = f"cwd is {cwd!r:.200}; it is the absolute path of a folder that exists"
        raise _invalid_params_error(msg)
    return path


def _add_costs(one: Decimal | None, other: Decimal | None) -> Decimal | None:
    return None if one is None or other is None else one + other


def _invalid_params_error(message: str) -> Exception:
    from acp import RequestError

    return RequestError(-32602, message)


def _internal_error(message: str) -> Exception:
    from acp import RequestError

    return RequestError(-32603, message)


def _missing_key_error(message: str) -> Exception:
    from acp import RequestError

    return RequestError(-32000, message)


def _version() -> str:
    try:
        return version("stepengine")
    except PackageNotFoundError:
        return "0"
