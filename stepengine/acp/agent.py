"""
An agent for an editor: its sessions, prompts and questions.

What lives here: the methods that the protocol calls. What must not: how an engine is made, which is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import attrs

from stepengine.acp.kept import Kept, KeptSession, Turn
from stepengine.data.events import Event, PermissionRequested, QuestionAsked, RunFinished
from stepengine.data.questions import Answer, AnswerLike, Question
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.engine import Engine
from stepengine.errors import AnswerRejected, DefinitionError, ReplayDivergence, SessionError, StepEngineError
from stepengine.runtime.handle import RunHandle

if TYPE_CHECKING:
    from acp import schema
    from acp.interfaces import Client

    from stepengine.acp.updates import Shown

__all__ = ("EditorAgent", "MakeEngine", "serve", "take_stdout")

MAX_RESOURCE = 32_768
"""Characters of a text that an editor puts into a prompt as context."""
PAGE = 50
REASONS = {
    RunStatus.CANCELLED: "cancelled",
    RunStatus.MAX_STEPS: "max_turn_requests",
    RunStatus.TRUNCATED: "max_tokens",
}


class MakeEngine(Protocol):
    """What makes an engine for a workspace."""

    def __call__(self, cwd: Path, /, *, observers: tuple[Callable[[Event], Any], ...] = ()) -> Engine:
        """Return an engine whose tools work in *cwd*, and which shows its runs to *observers*."""


@attrs.define(eq=False)
class _Session:
    """A session that is open; *state* is where its next turn goes on, *under_way* the run that a turn left for a question."""

    kept: KeptSession
    engine: Engine
    state: AgentState | None = None
    broken: str = ""
    is_busy: bool = False
    handle: RunHandle | None = None
    turn: Turn | None = None
    events: AsyncGenerator[Event, None] | None = None
    shown: Shown | None = None
    question: Question | None = None
    asking: set[asyncio.Task[None]] = attrs.field(factory=set)


class EditorAgent:
    """
    An agent as the protocol's package calls it (``acp.run_agent``); ``serve`` runs one over stdin and stdout.

    Each prompt is a root run with a journal of its own, and goes on from the state of the one before. Tool calls that need a person's
    permission, and questions with options, are permission requests; a question that wants words ends the turn, and the next prompt
    answers it. Loading a session replays its journals: no model is asked, no tool runs.

    Args:
        make: Makes the engine of a session, which is closed with it.
        agent: The id of the agent.
        folder: Where sessions are kept.
    """

    def __init__(self, make: MakeEngine, agent: str, folder: Path) -> None:
        self._make = make
        self._agent = agent
        self._kept = Kept(folder)
        self._open: dict[str, _Session] = {}
        self._client: Client | None = None

    def on_connect(self, conn: Client) -> None:
        """Learn whom to show runs to."""
        self._client = conn

    async def initialize(self, protocol_version: int, **_: object) -> schema.InitializeResponse:
        """Say what this agent can do."""
        import acp
        from acp import schema

        sessions = schema.SessionCapabilities(
            list=schema.SessionListCapabilities(),
            fork=schema.SessionForkCapabilities(),
            resume=schema.SessionResumeCapabilities(),
            close=schema.SessionCloseCapabilities(),
        )
        return schema.InitializeResponse(
            protocol_version=min(protocol_version, acp.PROTOCOL_VERSION),
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(embedded_context=True),
                session_capabilities=sessions,
            ),
            agent_info=schema.Implementation(name="stepengine", title=f"stepengine: {self._agent}", version=_version()),
        )

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def new_session(self, cwd: str, mcp_servers: object = None, **_: object) -> schema.NewSessionResponse:
        """Begin a session in a workspace."""
        from acp import schema

        session = await self._opened(self._asked(lambda: self._kept.new(_folder(cwd))))
        self._warn_of_servers(mcp_servers)
        return schema.NewSessionResponse(session_id=session.kept.id)

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: object = None, **_: object
    ) -> schema.LoadSessionResponse:
        """Go on with a session, and show what was said in it."""
        from acp import schema

        await self._again(session_id, _folder(cwd), shows=True)
        self._warn_of_servers(mcp_servers)
        return schema.LoadSessionResponse()

    async def resume_session(
        self, cwd: str, session_id: str, mcp_servers: object = None, **_: object
    ) -> schema.ResumeSessionResponse:
        """Go on with a session."""
        from acp import schema

        await self._again(session_id, _folder(cwd), shows=False)
        self._warn_of_servers(mcp_servers)
        return schema.ResumeSessionResponse()

    async def fork_session(
        self, cwd: str, session_id: str, mcp_servers: object = None, **_: object
    ) -> schema.ForkSessionResponse:
        """Begin a session that goes on from where another one is."""
        from acp import schema

        folder = _folder(cwd)
        source = self._asked(lambda: self._kept.find(session_id))
        under_way = self._open.get(session_id)
        if under_way is not None and (under_way.is_busy or under_way.handle is not None):
            msg = f"session {session_id!r} is under way; fork it when its turn has ended"
            raise _invalid(msg)
        made = self._asked(lambda: self._kept.copy(source, folder))
        await self._again(made.id, folder, shows=False)
        self._warn_of_servers(mcp_servers)
        return schema.ForkSessionResponse(session_id=made.id)

    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: object
    ) -> schema.ListSessionsResponse:
        """Name the sessions of a workspace, the newest first, 50 at a time."""
        from acp import schema

        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < PAGE):
            msg = "the cursor is none of ours"
            raise _invalid(msg)
        first = int(cursor or 0)
        found = self._kept.all(None if cwd is None else _folder(cwd))
        infos = [
            schema.SessionInfo(session_id=each.id, cwd=str(each.cwd), title=each.title or None, updated_at=each.updated)
            for each in found[first : first + PAGE]
        ]
        following = str(first + PAGE) if len(found) > first + PAGE else None
        return schema.ListSessionsResponse(sessions=infos, next_cursor=following)

    async def close_session(self, session_id: str, **_: object) -> schema.CloseSessionResponse:
        """End what is under way in a session, and give its engine back; it stays kept."""
        from acp import schema

        session = self._open.pop(session_id, None)
        if session is not None:
            await self._end(session)
        return schema.CloseSessionResponse()

    async def aclose(self) -> None:
        """Close every session."""
        for session_id in list(self._open):
            await self.close_session(session_id)

    async def _opened(self, kept: KeptSession) -> _Session:
        before = self._open.pop(kept.id, None)
        if before is not None:
            await self._end(before)
        session = _Session(kept, self._asked(lambda: self._make(kept.cwd)))
        self._open[kept.id] = session
        return session

    async def _end(self, session: _Session) -> None:
        for task in session.asking:
            task.cancel()
        if session.handle is not None:
            await session.handle.shutdown()
        await session.engine.aclose()

    async def _again(self, session_id: str, cwd: Path, *, shows: bool) -> None:
        """Open a session that is kept; where nothing is shown, its last state is all that is needed."""
        kept = self._asked(lambda: self._kept.find(session_id))
        kept.cwd = cwd
        session = await self._opened(kept)
        last = max([number for number, turn in enumerate(kept.turns) if turn.is_kept], default=-1)
        for number, turn in enumerate(kept.turns):
            if shows or number == last:
                await self._replayed(session, number, turn, shows=shows, is_last=number == last)

    async def _replayed(self, session: _Session, number: int, turn: Turn, *, shows: bool, is_last: bool) -> None:
        import acp

        from stepengine.acp.updates import Shown

        shown = Shown(number + 1, session.kept.cwd, is_live=False)
        updates: list[object] = [acp.update_user_message_text(turn.prompt)]

        def observe(event: Event) -> None:
            updates.extend(shown.of(event))

        engine = self._make(session.kept.cwd, observers=(observe,))
        try:
            result = await engine.replay(turn.journal, complete=False)
            if is_last:
                session.state = result.state
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
            await self._tell(session, update)

    def _asked(self, call: Callable[[], Any]) -> Any:
        """Do what a request asks for; what is wrong with it is the protocol's error."""
        try:
            return call()
        except SessionError as error:
            raise _invalid(error.message) from None
        except StepEngineError as error:
            raise _failed(error.message) from None

    def _session(self, session_id: str) -> _Session:
        session = self._open.get(session_id)
        if session is None:
            msg = f"session {session_id!r:.80} is not open; begin one with session/new, or load it"
            raise _invalid(msg)
        return session

    # --- turns --------------------------------------------------------------------------------------------------------

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> schema.PromptResponse:
        """Take a turn, and show it while it runs."""
        session = self._session(session_id)
        if session.is_busy:
            msg = f"session {session_id!r} is under way; cancel its turn, or wait for its end"
            raise _invalid(msg)
        if session.broken:
            msg = f"this session cannot go on, {session.broken}. Begin a new one"
            raise _failed(msg)
        text = _text_of(prompt)
        session.is_busy = True
        try:
            if session.handle is None or session.handle.done:
                await self._begin(session, text)
            else:
                self._answer_with(session, text)
            return await self._follow(session)
        except StepEngineError as error:
            raise _failed(error.message) from None
        finally:
            session.is_busy = False

    async def _begin(self, session: _Session, text: str) -> None:
        from stepengine.acp.updates import Shown

        if session.handle is not None:
            await self._ended(session, await session.handle.result())
        turn = session.kept.begin(text)
        session.shown = Shown(len(session.kept.turns), session.kept.cwd, is_live=True)
        try:
            handle = session.engine.start(
                self._agent,
                text,
                previous=session.state,
                session_id=session.kept.id,
                journal=turn.journal,
                wait_for_answers=None,
            )
        except StepEngineError:
            session.kept.turns.remove(turn)
            session.kept.save()
            raise
        session.handle, session.turn, session.events = handle, turn, handle.events()

    def _answer_with(self, session: _Session, text: str) -> None:
        """Give the run what it asked for; a text that is no answer leaves its question open."""
        assert session.handle is not None  # noqa: S101 - the turn before left it
        if session.question is None:
            session.handle.send_input(text)
        else:
            session.handle.answer(session.question.id, text)
            session.question = None

    async def _follow(self, session: _Session) -> schema.PromptResponse:
        """Show a run until it has ended, or asks for words."""
        from acp import schema

        assert session.events is not None and session.shown is not None  # noqa: S101, PT018 - a turn has begun
        async for event in session.events:
            for update in session.shown.of(event):
                await self._tell(session, update)
            if isinstance(event, PermissionRequested) and event.question.problem:
                continue  # the tool refuses the call by itself
            if isinstance(event, PermissionRequested):
                self._ask(session, event.question, session.shown.request(event))
            elif isinstance(event, QuestionAsked):
                question = event.question
                if question.options and not (question.multi_select or question.allow_text):
                    self._ask(session, question, _call_of(question))
                else:
                    session.question = question
                    await self._tell_text(session, _words_of(question))
                    return schema.PromptResponse(stop_reason="end_turn")
            elif isinstance(event, RunFinished):
                return await self._response(session, event.result)
        msg = "the run ended without a result"
        raise StepEngineError(msg)

    async def _response(self, session: _Session, result: RunResult) -> schema.PromptResponse:
        from acp import schema

        await self._ended(session, result)
        if result.status is RunStatus.FAILED:
            raise _failed(str(result.error))
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

    async def _ended(self, session: _Session, result: RunResult) -> None:
        """Keep where the next turn goes on; one that failed is left out of the conversation."""
        is_kept = result.status is not RunStatus.FAILED
        if is_kept:
            session.state = result.state
        if session.turn is not None:
            session.kept.end(session.turn, is_kept=is_kept)
        if session.events is not None:
            await session.events.aclose()
        session.handle = session.turn = session.events = session.question = None

    async def cancel(self, session_id: str, **_: object) -> None:
        """End the turn of a session; a question that is open is not answered any more."""
        session = self._open.get(session_id)
        if session is None or session.handle is None:
            return
        session.handle.interrupt()
        if not session.is_busy:
            await self._ended(session, await session.handle.result())

    # --- questions ----------------------------------------------------------------------------------------------------

    def _ask(self, session: _Session, question: Question, call: schema.ToolCallUpdate) -> None:
        # In a task: the run's text goes on to be shown while a person thinks.
        task = asyncio.create_task(self._asked_about(session, question, call))
        session.asking.add(task)
        task.add_done_callback(session.asking.discard)

    async def _asked_about(self, session: _Session, question: Question, call: schema.ToolCallUpdate) -> None:
        from acp import RequestError

        from stepengine.acp.updates import options_of

        assert self._client is not None  # noqa: S101 - somebody is connected, or nothing would run
        options = options_of(question)
        try:
            response = await self._client.request_permission(session.kept.id, call, options)
            chosen = getattr(response.outcome, "option_id", None)
        except (RequestError, ConnectionError, ValueError):  # the last for what the protocol does not know
            chosen = None
        known = [option.option_id for option in options]
        answer = _answer(question, chosen if chosen in known else None)
        # The turn may have been cancelled meanwhile.
        with contextlib.suppress(AnswerRejected):
            if session.handle is not None:
                session.handle.answer(question.id, answer)

    # --- words --------------------------------------------------------------------------------------------------------

    async def _tell(self, session: _Session, update: Any) -> None:
        assert self._client is not None  # noqa: S101
        await self._client.session_update(session.kept.id, update)

    async def _tell_text(self, session: _Session, text: str) -> None:
        import acp

        await self._tell(session, acp.update_agent_message_text(text))

    def _warn_of_servers(self, servers: Any) -> None:
        if servers:
            from stepengine.runtime.logs import LOGGER

            LOGGER.warning(
                "the editor named %d MCP servers; they are not started, give them to the agent", len(servers)
            )


def take_stdout() -> BinaryIO:
    """
    Return what writes to stdout, and let everything that is printed go to stderr from now on, by programs that are started, too.

    To be called before an agent's file is imported, which may print.
    """
    out = os.fdopen(os.dup(1), "wb")
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return out


async def serve(make: MakeEngine, agent: str, folder: Path, *, out: BinaryIO | None = None) -> None:
    """
    Serve an editor over stdin and stdout until it goes away.

    Args:
        make: Makes the engine of a session.
        agent: The id of the agent.
        folder: Where sessions are kept.
        out: What ``take_stdout`` returned, where that was called already.

    Raises:
        DefinitionError: when ``agent-client-protocol`` is not installed, or stdin is no pipe.
    """
    try:
        import acp
        from acp.core import DEFAULT_STDIO_BUFFER_LIMIT_BYTES as LIMIT
    except ImportError:
        msg = "editors need the package agent-client-protocol: pip install 'stepengine[acp]'"
        raise DefinitionError(msg) from None
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        msg = "stdin is no pipe: this command is started by an editor, which talks with it over stdin and stdout"
        raise DefinitionError(msg)
    loop = asyncio.get_running_loop()
    reader = _Messages(limit=LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, out or take_stdout())
    reader.answers = writer = asyncio.StreamWriter(transport, protocol, None, loop)
    editor: Any = EditorAgent(make, agent, folder)
    try:
        await acp.run_agent(editor, writer, reader, use_unstable_protocol=True)
    finally:
        await editor.aclose()


class _Messages(asyncio.StreamReader):
    """
    What an editor sends, without lines that are no messages: the protocol's package would end the connection at them.

    Attributes:
        answers: Where these are answered.
    """

    answers: asyncio.StreamWriter
    _is_part = False

    async def readexactly(self, n: int) -> bytes:
        """Return *n* bytes of a line that is longer than the buffer."""
        self._is_part = True
        return await super().readexactly(n)

    async def readuntil(self, separator: Any = b"\n") -> bytes:
        """Return the next line that is a message, or what is left of one whose beginning was read already."""
        while True:
            line = await super().readuntil(separator)
            if self._is_part or not line.strip() or _is_message(line):
                self._is_part = False
                return line
            self.answers.write(NO_MESSAGE)


NO_MESSAGE = (
    b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"a line is one message: a JSON object with a method, or with the '
    b'id of a request that it answers"}}\n'
)


def _is_message(line: bytes) -> bool:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(message, dict):
        return False
    has_id = isinstance(message.get("id"), int | str | None)
    return has_id and (isinstance(message["method"], str) if "method" in message else "id" in message)


def _folder(cwd: str) -> Path:
    path = Path(cwd)
    if not (path.is_absolute() and path.is_dir()):
        msg = f"cwd is {cwd!r:.200}; it is the absolute path of a folder that exists"
        raise _invalid(msg)
    return path


def _text_of(blocks: list[Any]) -> str:
    """Return a prompt as text; links are named and never fetched."""
    parts = []
    for block in blocks:
        resource: Any = getattr(block, "resource", None)
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource_link":
            parts.append(f"[{block.name}]({block.uri})")
        elif block.type == "resource" and getattr(resource, "text", None) is not None:
            text = resource.text
            cut = f"\n... ({len(text) - MAX_RESOURCE} characters more)" if len(text) > MAX_RESOURCE else ""
            parts.append(f'<resource uri="{resource.uri}">\n{text[:MAX_RESOURCE]}{cut}\n</resource>')
        else:
            msg = f"a prompt of this agent has text, links and embedded text, no {block.type!r}"
            raise _invalid(msg)
    return "\n\n".join(parts)


def _words_of(question: Question) -> str:
    said = zip_longest(question.options, question.descriptions, fillvalue="")
    choices = "".join([f"\n- {option}" + (f": {about}" if about else "") for option, about in said])
    return f"\n\n{question.text}{choices}"


def _call_of(question: Question) -> schema.ToolCallUpdate:
    import acp
    from acp import schema

    content: list[Any] = [acp.tool_content(acp.text_block(question.text))]
    return schema.ToolCallUpdate(
        tool_call_id=f"question-{question.id}", title=question.text, kind="other", status="pending", content=content
    )


def _answer(question: Question, chosen: str | None) -> AnswerLike:
    """Return what a person chose; whoever closes the question has said no."""
    if question.tool_name is None:
        return Answer(declined=True) if chosen in (None, "no") else question.options[int(chosen or 0)]
    if chosen == "always":
        return Answer(text="yes", remember="session")
    return chosen == "yes"


def _invalid(message: str) -> Exception:
    from acp import RequestError

    return RequestError(-32602, message)


def _failed(message: str) -> Exception:
    from acp import RequestError

    return RequestError(-32603, message)


def _version() -> str:
    try:
        return version("stepengine")
    except PackageNotFoundError:
        return "0"
