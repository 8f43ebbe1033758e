"""
Leading another agent: its program is spoken with as an editor would, and it stands where an agent of ours stands.

What lives here: how a turn of a program begins, goes on and ends, and its words in ours. What the turns of all agents that are
led have in common is ``stepengine.adapters.external``'s.

What must not: processes, which are ``program``'s, and any import of the protocol's package before a program is started: a replay
needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import attrs
from attrs import frozen

from stepengine.adapters.acp.program import AgentProgram, environment_of
from stepengine.adapters.acp.workplace import BorrowedFiles, BorrowedTerminals, RequestedFile, command_of, variables_of
from stepengine.adapters.external.turns import (
    ENTRY_CHARS,
    NAME_CHARS,
    OPEN_ASKS,
    SHOWN_CHARS,
    Said,
    asked_input,
    asked_kind,
    compact,
    dict_of,
    dicts_of,
    failed,
    permission_tools,
    text_of,
    to_the_end,
    turns_of,
)
from stepengine.data.definition import AgentDefinition, InputSchema
from stepengine.data.hooks import Change, StepContext
from stepengine.data.json import JsonDict, canonical, mended
from stepengine.data.messages import ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.data.usage import Usage
from stepengine.errors import DefinitionError, ExternalAgentError, StepEngineError, ToolError
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool
from stepengine.workspace.guard import GUARD, CallGuard
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from acp.connection import Connection

__all__ = ("ExternalAgent", "ExternalReply")

Files = Literal["write", "read", "none"]

VERSION = 1
"""The version of the protocol that is spoken."""
AUTH_REQUIRED = -32000
START_SECONDS = 60.0
CANCEL_SECONDS = 3.0
"""How long a program may take to end a turn that was cancelled, before it is ended itself."""
CLOSE_SECONDS = 2.0
"""How long it may take to close its session, where it offers that."""
SESSION = "external_session"
"""Where a run keeps the session, so that a run with ``previous=`` goes on with it."""
READ_BYTES = 4 * 1024 * 1024
KINDS: Mapping[str, str] = {
    "read": "read",
    "search": "read",
    "edit": "write",
    "delete": "write",
    "move": "write",
    "execute": "execute",
    "fetch": "network",
}
"""What the protocol calls a kind of tool call, and the category by which our rules know it."""
ALLOWED = ("allow_once", "allow_always")
DENIED = ("reject_once", "reject_always")


class ExternalReply(TypedDict):
    """
    What an external agent gives.

    Attributes:
        text: What it said.
        session: Its own id of the conversation, to go on with it: ``AgentCall(agent, "And now?", {"session": session})``.
        stop_reason: Why it stopped, in the protocol's words: ``"end_turn"``, ``"max_tokens"``, ``"max_turn_requests"``,
            ``"refusal"`` or ``"cancelled"``.
    """

    text: str
    session: str
    stop_reason: str


@frozen(kw_only=True)
class _Led:
    """How a program is led."""

    id: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    names: tuple[str, ...]
    workspace: Workspace | None
    files: Files
    terminals: bool
    mode: str
    start_seconds: float


class ExternalAgent(AgentDefinition[ExternalReply]):
    """
    An agent that another program is: one that speaks the Agent Client Protocol over its stdin and stdout.

    It stands where any agent stands: ``AgentCall``, ``Parallel``, ``spawn_agents``, ``Start``, ``engine.run``. A call starts the
    program, gives it the prompt in a session, and ends it with everything that it started. The turn is one recorded effect, with what
    the program said beside its result, so that a replay needs no such program; each time that it asks for permission is another one,
    judged by the engine's policy and its people as a call of ``ID_edit``, ``ID_execute``, ``ID_read``, ``ID_fetch`` or ``ID_other``,
    of the categories ``"write"``, ``"execute"``, ``"read"``, ``"network"`` and ``""``. So is each file that it reads or writes through us,
    and each command that it has us run, unless the same was just allowed. Without a policy everything is allowed, as for
    tools. Its params are ``{"session": ...}``, to go on with an earlier reply's session, which the program must be able to load.

    It needs the extra ``acp``.

    Args:
        id: The agent's id, at most 56 characters.
        command: The program and its arguments; no shell reads them.
        description: What other agents are shown.
        env: Variables that the program sees beside ``PATH``, ``HOME``, ``USER``, ``SHELL``, ``TERM``, ``TMPDIR``, ``TZ`` and the
            locale: a list of names of this process's variables, such as ``["ANTHROPIC_API_KEY"]``, or a mapping to values.
        workspace: The folder of its sessions; the engine's workspace by default. It must be a folder of this machine, which that of
            a sandbox, or of a container whose root is mounted, is, too.
        files: What the program may ask us to do with files of the workspace: ``"write"`` and read them, ``"read"`` them or
            ``"none"``. What it does to files by itself is not bound by that, or by anything of ours.
        terminals: Whether it may have us run commands in the workspace, without any of our keys. Each that it was not just allowed
            is a call of ``ID_execute``; all of them end with the turn. They run in the sandbox or container that the workspace is;
            the program itself does not.
        mode: The mode that a new session is set to, by the program's own name for it; ``""`` leaves it as it is.
        start_seconds: How long the program may take until a session is open.
        timeout: How many seconds a turn may take; ``None`` for as long as it takes.
        **fields: Other fields of ``AgentDefinition``, such as ``display_name``, ``hooks`` and ``limits``.

    Raises:
        DefinitionError: for an unusable command, or another option that cannot be used.
    """

    __slots__ = ()

    def __init__(
        self,
        id: str,
        *,
        command: Sequence[str] | None = None,
        description: str = "",
        env: Mapping[str, str] | Sequence[str] = (),
        workspace: str | os.PathLike[str] | Workspace | None = None,
        files: Files = "write",
        terminals: bool = False,
        mode: str = "",
        start_seconds: float = START_SECONDS,
        timeout: float | None = None,
        **fields: Any,
    ) -> None:
        if command is not None:
            _check(id, command, env, files, start_seconds)
            names, values = ((), dict(env)) if isinstance(env, Mapping) else (tuple(env), {})
            place = workspace if isinstance(workspace, Workspace) or workspace is None else Workspace(Path(workspace))
            led = _Led(
                id=id, command=tuple(command), env=values, names=names, workspace=place,
                files=files, terminals=bool(terminals), mode=mode, start_seconds=start_seconds,
            )  # fmt: skip
            fields = {
                "input_schema": InputSchema(prompt="What to do.", params=PARAMS),
                **fields,
                "tools": [_turn_tool(led, timeout), *permission_tools(id, _guard_keeper(led))],
                "handle_steps": turns_of(id, _begun, _reply, carried=("session",)),
            }
        elif "handle_steps" not in fields:  # `attrs.evolve` makes one of its fields
            msg = f"agent {id!r}: an ExternalAgent needs its program, such as command=['claude-agent-acp']"
            raise DefinitionError(msg)
        super().__init__(id, description=description, **fields)


PARAMS: Mapping[str, object] = {
    "type": "object",
    "properties": {"session": {"type": "string", "description": "The session of an earlier reply, to go on with it."}},
    "additionalProperties": False,
}


def _check(id: object, command: object, env: object, files: object, start_seconds: float) -> None:
    # When the agent is defined and not when its program starts: a wrong command would show in the middle of a run that
    # has been paid for. The first problem only, as each of them is one argument of one call, which whoever wrote it
    # mends at once.
    problem = ""
    words = command if isinstance(command, list | tuple) else ()
    if not words or not all(isinstance(word, str) and word and "\0" not in word for word in words):
        problem = f"command is a list of words such as ['npx', 'some-agent', '--acp'], not {command!r}"
    elif isinstance(env, str) or not all(isinstance(name, str) and name and "=" not in name for name in env):  # type: ignore[attr-defined]
        problem = f"env is a list of names of variables, or a mapping from names to values, not {env!r}"
    elif files not in ("write", "read", "none"):
        problem = f"files is 'write', 'read' or 'none', not {files!r}"
    elif not start_seconds > 0:
        problem = f"start_seconds is more than 0, not {start_seconds!r}"
    elif not isinstance(id, str) or len(id) > NAME_CHARS:
        problem = f"the id of an external agent has at most {NAME_CHARS} characters: names of tools are made of it"
    if problem:
        msg = f"agent {id!r}: {problem}"
        raise DefinitionError(msg)


# --- the run ----------------------------------------------------------------------------------------------------------


def _begun(ctx: StepContext) -> dict[str, Any]:
    given = ctx.params if isinstance(ctx.params, Mapping) else {}
    return {"prompt": ctx.prompt, "session": given.get("session") or ctx.agent_state.context.get(SESSION) or ""}


def _reply(data: Mapping[str, Any]) -> ExternalReply:
    return ExternalReply(text=data["text"], session=data["session"], stop_reason=data["stop_reason"])


# --- a turn -----------------------------------------------------------------------------------------------------------


def _turn_tool(led: _Led, timeout: float | None) -> Tool[Any, Any]:
    schema = {
        "type": "object",
        "properties": {
            "prompt": {"type": "string"},
            "session": {"type": "string"},
            "answers": {"type": "array", "items": {"type": "object"}},
        },
        "additionalProperties": False,
    }

    async def run(ctx: ToolContext, given: JsonDict) -> ToolResult:
        return await _talk_of(led, ctx).turn(ctx, given)

    return Tool(
        led.id,
        f"Has the agent {led.id} do something, and gives what it said.",
        schema,
        run,
        category="execute",
        annotations=ToolAnnotations(destructive=True, open_world=True),
        # The author gave the command; what it does then asks for itself.
        requires_permission=False,
        # The answers of a turn repeat what was asked about, which was judged by itself.
        about=(),
        timeout=math.inf if timeout is None else timeout,
    )


def _talk_of(led: _Led, ctx: ToolContext) -> _Talk:
    """Return the conversation with the program that the run of a call has."""
    return ctx.of_run(("external agent", led.id), lambda: _Talk(led)) if ctx.is_of_run else _Talk(led)


def _guard_keeper(led: _Led) -> Callable[[ToolContext, JsonDict], None]:
    """Return a function that hands the conversation the rules about files that bind an allowed call."""

    def keep(ctx: ToolContext, given: JsonDict) -> None:
        _talk_of(led, ctx).guards[canonical(given)] = GUARD.get()

    return keep


class _Talk:
    """What one run has with the program: it is ended with the turn, or with the run where that ends first."""

    def __init__(self, led: _Led) -> None:
        self._led = led
        self._program: AgentProgram | None = None
        self._connection: Connection | None = None
        self._session = ""
        self._prompting: asyncio.Future[Any] | None = None
        self._asks: dict[int, _Ask] = {}
        self._told = 0
        self._asked = asyncio.Event()
        self._given: dict[str, bool] = {}
        self.said = _Said()
        self._files: BorrowedFiles | None = None
        self._terminals: BorrowedTerminals | None = None
        self._granted: set[str] = set()
        self._granted_files: set[tuple[str, str]] = set()
        self.guards: dict[str, CallGuard | None] = {}
        self._methods: Sequence[str] = ()
        self._closes = False

    async def turn(self, ctx: ToolContext, given: JsonDict) -> ToolResult:
        """Prompt, or answer what was asked for, and return what was said until the end of the turn or the next question."""
        try:
            try:
                await self._go_on(ctx, given)
                return await self._until_told(ctx)
            except ExternalAgentError as error:
                await self._close()
                return failed(error)
        except BaseException:
            await to_the_end(self._give_up())
            raise

    async def _go_on(self, ctx: ToolContext, given: Mapping[str, Any]) -> None:
        answers = given.get("answers")
        self.said.begin(ctx)
        if answers is None:
            await self._begin(ctx, given.get("session") or "", given.get("prompt") or "")
        elif self._prompting is not None:
            for answer in answers:
                ask = self._asks.pop(answer["id"], None)
                if ask is not None and not ask.answer.done():
                    ask.answer.set_result(answer["allowed"])
        else:
            # The run was suspended, and the program with it.
            self._given = {canonical(answer["input"]): answer["allowed"] for answer in answers}
            await self._begin(ctx, given["session"], _resume_prompt(answers))

    async def _begin(self, ctx: ToolContext, session: str, prompt: str) -> None:
        place = self._place(ctx)
        # What is begun here outlives the call where the program waits for a permission, so it is in no context of a call; the
        # files that the call may touch are those of the turn.
        apart = Context()
        apart.run(GUARD.set, GUARD.get())
        try:
            async with asyncio.timeout(self._led.start_seconds):
                await asyncio.create_task(self._open(session, place), context=apart)
        except TimeoutError:
            msg = f"the program of {self._led.id!r} had no session open within {self._led.start_seconds:g} s"
            raise ExternalAgentError(msg, kind="time") from None
        self.said.is_live = True
        asked = {"sessionId": self._session, "prompt": [{"type": "text", "text": prompt}]}
        self._prompting = asyncio.create_task(self._request("session/prompt", asked), context=apart)

    def _place(self, ctx: ToolContext) -> Workspace:
        place = self._led.workspace or ctx.workspace
        if place is None:
            msg = f"{self._led.id!r} needs a folder to work in: ExternalAgent(workspace=...), or that of the engine"
            raise ExternalAgentError(msg, kind="start")
        if place.here is None:
            msg = f"{self._led.id!r} runs on this machine, and the workspace {place.name} is not a folder of it"
            raise ExternalAgentError(msg, kind="start")
        return place

    async def _open(self, session: str, place: Workspace) -> None:
        """Start the program, and open a session."""
        assert place.here is not None  # noqa: S101 - it was looked at
        folder = place.here.resolve()
        try:
            from acp.connection import Connection
        except ImportError:
            msg = "external agents need the package agent-client-protocol: pip install 'stepengine[acp]'"
            raise ExternalAgentError(msg, kind="start") from None
        led = self._led
        self._files = BorrowedFiles(folder, led.files)
        self._terminals = BorrowedTerminals(folder, place) if led.terminals else None
        env = environment_of(led.names) | dict(led.env)
        self._program = await AgentProgram.start(led.command, env, folder)
        self._connection = Connection(self._handle_message, self._program)
        can = await self._initialize()
        self._session = await self._in_session(session, str(folder), can)

    async def _initialize(self) -> Mapping[str, Any]:
        fs = {"readTextFile": self._led.files != "none", "writeTextFile": self._led.files == "write"}
        answer = await self._request(
            "initialize",
            {
                "protocolVersion": VERSION,
                "clientCapabilities": {"fs": fs, "terminal": self._led.terminals},
                "clientInfo": {"name": "stepengine", "version": "1"},
            },
        )
        version = answer.get("protocolVersion")
        if version != VERSION:
            msg = (
                f"the program of {self._led.id!r} speaks version {version!r:.40} of the protocol; here it is {VERSION}"
            )
            raise ExternalAgentError(msg, kind="protocol")
        methods = answer.get("authMethods")
        self._methods = [text_of(one.get("name")) for one in dicts_of(methods)]
        return dict_of(answer.get("agentCapabilities"))

    async def _in_session(self, session: str, cwd: str, can: Mapping[str, Any]) -> str:
        self._closes = "close" in dict_of(can.get("sessionCapabilities"))
        where = {"cwd": cwd, "mcpServers": []}
        if session:
            resumes = "resume" in dict_of(can.get("sessionCapabilities"))
            if not (resumes or can.get("loadSession")):
                msg = f"the program of {self._led.id!r} cannot go on with a session; a call without one begins anew"
                raise ExternalAgentError(msg, kind="session")
            await self._request(
                "session/resume" if resumes else "session/load", {"sessionId": session, **where}, kind="session"
            )
            return session
        answer = await self._request("session/new", where)
        made = answer.get("sessionId")
        if not isinstance(made, str) or not made:
            msg = f"the program of {self._led.id!r} gave no id of a session"
            raise ExternalAgentError(msg, kind="protocol")
        if self._led.mode:
            await self._request("session/set_mode", {"sessionId": made, "modeId": self._led.mode})
        return mended(made)

    async def _request(self, method: str, params: Mapping[str, Any], *, kind: str = "failed") -> Mapping[str, Any]:
        """
        Ask the program for something.

        Raises:
            ExternalAgentError: when it answers with an error, ends, or answers nonsense.
        """
        from acp import RequestError

        connection, program = self._connection, self._program
        assert connection is not None  # noqa: S101 - whoever asks has opened it
        assert program is not None  # noqa: S101
        try:
            answer = await connection.send_request(method, dict(params))
        except RequestError as error:
            raise self._refusal_error(method, error, kind) from None
        except (ConnectionError, RuntimeError, OSError):
            why = await program.why_ended()
            msg = f"the program of {self._led.id!r} did not answer {method}: {why}"
            raise ExternalAgentError(mended(msg), kind="protocol" if program.problem else "ended") from None
        if answer is None:
            return {}
        if not isinstance(answer, Mapping):
            msg = f"the program of {self._led.id!r} answered {method} with no object"
            raise ExternalAgentError(msg, kind="protocol")
        return answer

    def _refusal_error(self, method: str, error: Any, kind: str) -> ExternalAgentError:
        if error.code == AUTH_REQUIRED:
            ways = f"; it offers: {', '.join(filter(None, self._methods))}" if self._methods else ""
            msg = f"{self._led.id!r} wants to be signed in before {method}: {text_of(str(error))}{ways}"
            return ExternalAgentError(mended(msg), kind="auth_required")
        details = f" ({compact(error.data)})" if error.data is not None else ""
        msg = f"{self._led.id!r} answered {method} with an error: {text_of(str(error))}{details}"
        return ExternalAgentError(mended(msg), kind=kind)

    async def _until_told(self, ctx: ToolContext) -> ToolResult:
        """Wait until the turn ends, or the program asks for something that it may not do by itself."""
        prompting = self._prompting
        assert prompting is not None  # noqa: S101
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((prompting, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if not prompting.done():
            self._asked.clear()
            asks = [{"id": ask.id, "kind": ask.kind, "input": ask.input} for ask in self._asks.values() if ask.is_open]
            return self.said.so_far(self._session, asks)
        answer, session = prompting.result(), self._session
        await self._close()
        return self.said.all(session, answer)

    # --- what the program asks for ------------------------------------------------------------------------------------

    async def _handle_message(self, method: str, params: Any, is_notification: bool) -> Any:  # noqa: FBT001 - the package calls it so
        from acp import RequestError

        given = dict_of(params)
        if method == "session/update":
            self.said.take(dict_of(given.get("update")))
            return None
        if is_notification:
            return None
        doing: Callable[[Mapping[str, Any]], Any] | None = {
            "session/request_permission": self._permission,
            "fs/read_text_file": self._read,
            "fs/write_text_file": self._write,
        }.get(method)
        if self._terminals is not None and method.startswith("terminal/"):
            doing = self._create if method == "terminal/create" else self._doing_in(self._terminals).get(method)
        if doing is None:
            raise RequestError.method_not_found(mended(method)[:SHOWN_CHARS])
        try:
            return await doing(given)
        except (StepEngineError, OSError) as error:
            raise RequestError(-32602, str(error)) from None

    async def _permission(self, given: Mapping[str, Any]) -> dict[str, Any]:
        call = dict_of(given.get("toolCall"))
        options = {str(one.get("kind")): one.get("optionId") for one in reversed(dicts_of(given.get("options")))}
        told = {**self.said.known(call.get("toolCallId")), **{k: v for k, v in call.items() if v is not None}}
        asked = _asked_input(told)
        kind = asked_kind(_category(told.get("kind")))
        allowed = await self._ask(kind, asked)
        # The program names the kind, and rules judge by it: what was allowed as reading is no permission to run a command.
        if allowed and kind == "execute" and isinstance(command := asked.get("command"), str | list):
            # Once, so that nobody is asked twice about a command that we are told to run next.
            self._granted.add(command if isinstance(command, str) else shlex.join(command))
        if allowed:
            self._granted_files.update((kind, self._below(path)) for path in asked.get("paths", ()))
        chosen = next((options[kind] for kind in (ALLOWED if allowed else DENIED) if kind in options), None)
        if allowed is None or chosen is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": chosen}}

    async def _ask(self, kind: str, input: dict[str, Any]) -> bool | None:
        """Return whether something may be done; ``None`` when nobody will say."""
        known = self._given.pop(canonical(input), None)
        if known is not None:
            return known
        if not self.said.is_live or len(self._asks) >= OPEN_ASKS:
            return None
        self._told += 1
        ask = _Ask(self._told, kind, input, asyncio.get_running_loop().create_future())
        self._asks[ask.id] = ask
        self._asked.set()
        return await ask.answer

    @staticmethod
    def _doing_in(terminals: BorrowedTerminals) -> Mapping[str, Callable[[Mapping[str, Any]], Any]]:
        return {
            "terminal/output": terminals.output,
            "terminal/wait_for_exit": terminals.wait,
            "terminal/kill": terminals.kill,
            "terminal/release": terminals.release,
        }

    async def _create(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Run a command, if it may: a program need not have asked for it before."""
        words = command_of(given)
        line = shlex.join(words)
        # A person has to see where a command runs, and which variables change what it does. A permission says neither.
        around = {name: given[name] for name in ("cwd", "env") if given.get(name)}
        is_at_top = self._below(text_of(around.get("cwd"))) == "."
        variables = variables_of(given)
        if variables or not is_at_top or line not in self._granted:
            # As our shell tool would be given it: a variable such as PATH decides which program runs.
            judged = ["env", *[f"{name}={value}" for name, value in variables.items()], *words] if variables else words
            asked: dict[str, Any] = {"title": f"Run {shlex.join(judged)}"[:SHOWN_CHARS], "command": judged}
            if around:
                asked["details"] = compact(around)
            if not await self._ask("execute", asked):
                msg = "the command was not allowed"
                raise ToolError(msg)
        self._granted.discard(line)
        assert self._terminals is not None  # noqa: S101 - else nobody comes here
        return await self._terminals.create(given)

    def _below(self, path: str) -> str:
        """Return a path of the program as a path below the workspace, where it names one; no link is followed."""
        assert self._files is not None  # noqa: S101
        return os.path.relpath(os.path.normpath(self._files.folder / path), self._files.folder)

    async def _read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        assert self._files is not None  # noqa: S101
        file = await asyncio.to_thread(self._files.find_readable, given)
        with self._bound_by(await self._judged("read", file, {"title": f"Read {file.path}"[:SHOWN_CHARS]})):
            return {"content": await self._files.read(file, given)}

    async def _write(self, given: Mapping[str, Any]) -> dict[str, Any]:
        assert self._files is not None  # noqa: S101
        file = await asyncio.to_thread(self._files.find_writable, given)
        difference = await asyncio.to_thread(self._difference_to, file, given["content"])
        asked = {"title": f"Write {file.path}"[:SHOWN_CHARS], "details": difference[:ENTRY_CHARS]}
        with self._bound_by(await self._judged("edit", file, asked)):
            await self._files.write(self.said.ctx, file, given["content"])
        return {}

    def _difference_to(self, file: RequestedFile, content: str) -> str:
        """Return what writing a file changes in it; all of the content where there is no text to compare with."""
        from stepengine.tools.bundled.files.edits import unified_diff

        assert self._files is not None  # noqa: S101
        try:
            before = self._files.content(file)
        except ToolError:
            before = None
        return unified_diff(before, mended(content), file.path)

    async def _judged(self, kind: str, file: RequestedFile, asked: Mapping[str, Any]) -> CallGuard | None:
        """
        Have a request for a file judged as a call, and return the rules about files that bind it.

        Raises:
            ToolError: when it is not allowed.
        """
        granted = {(kind, path) for path in file.paths}
        if granted <= self._granted_files:
            self._granted_files -= granted
            return GUARD.get()
        given = {**asked, "paths": list(file.paths)}
        if not await self._ask(kind, given):
            msg = f"{file.path!r} was not allowed"
            raise ToolError(msg)
        return self.guards.pop(canonical(given), GUARD.get())

    @staticmethod
    @contextlib.contextmanager
    def _bound_by(guard: CallGuard | None) -> Iterator[None]:
        token = GUARD.set(guard)
        try:
            yield
        finally:
            GUARD.reset(token)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _give_up(self) -> None:
        """Tell the program that its turn is cancelled, give it a moment, and end it."""
        prompting, connection = self._prompting, self._connection
        if prompting is not None and not prompting.done() and connection is not None:
            with contextlib.suppress(Exception):
                await connection.send_notification("session/cancel", {"sessionId": self._session})
            for ask in self._asks.values():
                if not ask.answer.done():
                    ask.answer.set_result(None)
            await asyncio.wait((prompting,), timeout=CANCEL_SECONDS)
        await self._close()

    async def aclose(self) -> list[str]:
        """End the program with its run; say so where it was in the middle of something."""
        is_open = self._prompting is not None and not self._prompting.done()
        await self._give_up()
        return [f"the program of {self._led.id!r} was ended, which waited for a permission"] if is_open else []

    async def _close(self) -> None:
        program, connection, prompting = self._program, self._connection, self._prompting
        self._program = self._connection = self._prompting = None
        self._granted.clear()
        self._granted_files.clear()
        self.guards.clear()
        self._asks.clear()
        self.said.finish()
        if connection is not None:
            await self._close_session(connection)
            with contextlib.suppress(Exception):
                await connection.close()
        if self._terminals is not None:
            await self._terminals.aclose()
        if program is not None:
            await program.close()
        if prompting is not None:
            prompting.cancel()
            await asyncio.gather(prompting, return_exceptions=True)

    async def _close_session(self, connection: Connection) -> None:
        """Have the program put its session away, so that the next one finds it whole."""
        session, self._session = self._session, ""
        if session and self._closes:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await connection.send_request("session/close", {"sessionId": session})


@attrs.define(eq=False)
class _Ask:
    """Something that the program wants to be allowed."""

    id: int
    kind: str
    input: dict[str, Any]
    answer: asyncio.Future[bool | None]

    @property
    def is_open(self) -> bool:
        return not self.answer.done()


def _resume_prompt(answers: Sequence[Mapping[str, Any]]) -> str:
    said = [
        f"- {'allowed' if one['allowed'] else 'denied'}: {dict_of(one.get('input')).get('title', '')}"
        for one in answers
    ]
    return "\n".join(["You were stopped while you waited for a permission. Go on from there. It was decided:", *said])


def _category(kind: object) -> str:
    return KINDS.get(kind, "") if isinstance(kind, str) else ""


def _asked_input(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rules and people are shown of a tool call."""
    paths = [text_of(one.get("path")) for one in dicts_of(call.get("locations"))]
    details = _content(call.get("content"))
    return asked_input(text_of(call.get("title")), dict_of(call.get("rawInput")), paths=paths, details=details)


# --- what it says -----------------------------------------------------------------------------------------------------


class _Said(Said):
    """What a program says in a turn, in the words of the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.is_live = False
        self._raw: dict[str, dict[str, Any]] = {}
        self._cost: Decimal | None = None
        self._before: Decimal | None = None

    def take(self, update: Mapping[str, Any]) -> None:
        """Take in what the program said."""
        match update.get("sessionUpdate"):
            case "usage_update":
                self._note_cost(dict_of(update.get("cost")))
            case _ if not self.is_live:
                pass  # what was said in an earlier turn, and is told again when its session is loaded
            case "agent_message_chunk":
                self.more("text", text_of(dict_of(update.get("content")).get("text"), self.room))
            case "agent_thought_chunk":
                self.more("thought", text_of(dict_of(update.get("content")).get("text"), self.room))
            case "tool_call" | "tool_call_update":
                self._called(update)
            case "plan":
                told = dicts_of(update.get("entries"))[:200]
                self.plan(
                    [
                        {"task": text_of(one.get("content")), "completed": one.get("status") == "completed"}
                        for one in told
                    ]
                )
            case _:
                pass

    def _note_cost(self, cost: Mapping[str, Any]) -> None:
        """Note what the session has cost so far; only dollars are counted."""
        with contextlib.suppress(InvalidOperation, ValueError, TypeError):
            amount = Decimal(str(cost["amount"])) if cost.get("currency") == "USD" else None
            if amount is not None and amount.is_finite() and amount >= 0:
                if not self.is_live:
                    self._before = amount
                self._cost = amount

    def known(self, call: object) -> Mapping[str, Any]:
        """Return what was said of a tool call before."""
        return self._raw.get(call, {}) if isinstance(call, str) else {}

    def _called(self, update: Mapping[str, Any]) -> None:
        call = text_of(update.get("toolCallId"))
        if not call or (call not in self._raw and not self.room):
            return
        raw = self._raw.setdefault(call, {})
        told = ("title", "kind", "locations", "rawInput")
        raw.update({key: update[key] for key in told if update.get(key) is not None})
        given = _asked_input(raw)
        self.tool(
            call,
            name=text_of(raw.get("kind"), 40) or "other",
            category=_category(raw.get("kind")),
            title=text_of(raw.get("title")),
            status=text_of(update.get("status"), 40),
            given={key: value for key, value in given.items() if key != "details"},
            kept={key: given[key] for key in ("paths", "command", "url") if key in given},
            output=_content(update.get("content")),
        )

    # --- results ------------------------------------------------------------------------------------------------------

    def so_far(self, session: str, asks: Sequence[Mapping[str, Any]]) -> ToolResult:
        """Return what was said until the program asked for something."""
        self.complete()
        data: Any = {"asks": list(asks), "session": session, "transcript": self.taken()}
        return ToolResult.json(data)

    def all(self, session: str, answer: Mapping[str, Any]) -> ToolResult:
        """Return what was said until the end of a turn."""
        text = self.complete()
        reason = text_of(answer.get("stopReason"), 100) or "end_turn"
        data: Any = {"text": text, "session": session, "stop_reason": reason, "transcript": self.taken()}
        usage, cost = _usage(answer.get("usage")), self._spent_now()
        if usage is None and cost is not None:
            usage = Usage(at_least=True)
        return ToolResult.json(data, usage=usage, cost=cost, change=Change(context=JsonDict({SESSION: session})))

    def _spent_now(self) -> Decimal | None:
        if self._cost is None:
            return None
        return max(Decimal(0), self._cost - (self._before or Decimal(0)))


def _usage(told: object) -> Usage | None:
    """Return the tokens of a turn, where the program told of them."""
    given = dict_of(told)
    if not given:
        return None

    def tokens(name: str) -> int:
        value = given.get(name)
        return value if type(value) is int and 0 <= value < 2**53 else 0

    return Usage(
        input_tokens=tokens("inputTokens"),
        output_tokens=tokens("outputTokens"),
        cache_read_tokens=tokens("cachedReadTokens"),
        cache_write_tokens=tokens("cachedWriteTokens"),
        reasoning_tokens=tokens("thoughtTokens"),
    )


def _content(content: object) -> str:
    """Return the texts and differences of a tool call's content."""
    said: list[str] = []
    for one in dicts_of(content):
        match one.get("type"):
            case "content":
                said.append(text_of(dict_of(one.get("content")).get("text"), ENTRY_CHARS))
            case "diff":
                said.append(_difference(one))
            case _:
                pass
    return "\n".join(filter(None, said))[:ENTRY_CHARS]


def _difference(given: Mapping[str, Any]) -> str:
    from stepengine.tools.bundled.files.edits import unified_diff

    old, new = given.get("oldText"), given.get("newText")
    before = text_of(old, READ_BYTES) if isinstance(old, str) else None
    return unified_diff(before, text_of(new, READ_BYTES), text_of(given.get("path")).lstrip("/"))
