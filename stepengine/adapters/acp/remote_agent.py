"""
An external ACP agent as a child agent: stepengine is the client of its program, as an editor would be.

What lives here: the start, the requests and the end of a program's turn, and the conversion of its messages. What the turns of all
external agents have in common is in ``stepengine.adapters.external``.

Must not be here: processes, which are in ``program``, and any import of the protocol's package before a program is started: a replay
needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from attrs import frozen

from stepengine.adapters.acp.program import AgentProgram, select_default_and_named_variables
from stepengine.adapters.acp.program_permissions import ProgramPermissions
from stepengine.adapters.acp.workplace import (
    BorrowedTerminals,
    ProgramFileAccess,
    RequestedFile,
    parse_command,
    parse_variables,
)
from stepengine.adapters.external.turns import (
    ENTRY_CHARS,
    NAME_CHARS,
    SHOWN_CHARS,
    TurnOutput,
    finish_shielded,
    get_dict_or_empty,
    list_dicts,
    make_external_handler,
    make_failed_result,
    make_permission_input,
    make_permission_tools,
    make_shown_input,
    permission_kind_from_category,
    shorten_json,
    shorten_text,
)
from stepengine.data.definition import AgentDefinition, InputSchema
from stepengine.data.hooks import Change, StepContext
from stepengine.data.json import JsonDict, canonical, replace_lone_surrogates
from stepengine.data.messages import ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.data.usage import Usage
from stepengine.data.visible import cut_end
from stepengine.errors import DefinitionError, ExternalAgentError, StepEngineError, ToolError
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool
from stepengine.workspace.guard import GUARD, CallGuard
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from acp.connection import Connection

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
"""The member of a run's context with the session id, with which a run with ``previous=`` resumes the session."""
READ_BYTES = 4 * 1024 * 1024
INPUT_CHARS = 16 * 1024 * 1024
"""The most characters, as JSON, of the stored inputs of a program's calls in a turn. It may ask about a call by its id."""
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
    The text of a turn of an external agent, with the session and the reason why it stopped.

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
class _ProgramSettings:
    """The settings of an agent program."""

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
    An agent that is another program, which speaks the Agent Client Protocol over its stdin and stdout.

    It is used like any agent: ``AgentCall``, ``Parallel``, ``spawn_agents``, ``Start``, ``engine.run``. A call starts the program,
    sends it the prompt in a session, and ends it with all processes that it started. The turn is one recorded effect with the
    program's output, so a replay needs no program. Each permission request of the program is another effect: the engine's policy and
    people decide it as a call of ``ID_edit``, ``ID_execute``, ``ID_read``, ``ID_fetch`` or ``ID_other``, of the categories ``"write"``,
    ``"execute"``, ``"read"``, ``"network"`` and ``""``. The same applies to each file and each command that the program requests from
    the engine, unless that was just allowed. Without a policy everything is allowed, as for tools. Its params are
    ``{"session": ...}``, to continue the session of an earlier reply, which the program must be able to load.

    It needs the extra ``acp``.

    Args:
        id: The agent's id, at most 56 characters.
        command: The program and its arguments; no shell is used.
        description: The description for other agents.
        env: Variables that the program gets in addition to ``PATH``, ``HOME``, ``USER``, ``SHELL``, ``TERM``, ``TMPDIR``, ``TZ`` and the
            locale: a list of names of this process's variables, such as ``["ANTHROPIC_API_KEY"]``, or a mapping to values.
        workspace: The folder of its sessions; the engine's workspace by default. It must be a folder on this machine, such as that of
            a sandbox, or of a container whose root is mounted.
        files: The requests for files of the workspace that the engine performs: ``"write"`` for reads and writes, ``"read"`` or
            ``"none"``. It does not limit the program's own access to files.
        terminals: Whether the engine runs commands in the workspace on request, without keys in their environment. Each command that
            was not just allowed is a call of ``ID_execute``; all of them end with the turn. They run in the sandbox or container of the
            workspace; the program itself does not.
        mode: The mode of a new session, by the program's name for it; ``""`` for the program's default.
        start_seconds: The most seconds until a session is open.
        timeout: The most seconds of a turn; ``None`` for no limit.
        **fields: Other fields of ``AgentDefinition``, such as ``display_name``, ``hooks`` and ``limits``.

    Raises:
        DefinitionError: For an invalid command or another invalid option.
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
            _require_valid_options(id, command, env, files, start_seconds)
            names, values = ((), dict(env)) if isinstance(env, Mapping) else (tuple(env), {})
            place = workspace if isinstance(workspace, Workspace) or workspace is None else Workspace(Path(workspace))
            settings = _ProgramSettings(
                id=id, command=tuple(command), env=values, names=names, workspace=place,
                files=files, terminals=bool(terminals), mode=mode, start_seconds=start_seconds,
            )  # fmt: skip
            fields = {
                "input_schema": InputSchema(prompt="What to do.", params=PARAMS),
                **fields,
                "tools": [
                    _make_turn_tool(settings, timeout),
                    *make_permission_tools(id, _make_guard_recorder(settings)),
                ],
                "handle_steps": make_external_handler(id, _make_first_turn_input, _make_reply, carried=("session",)),
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


def _require_valid_options(id: object, command: object, env: object, files: object, start_seconds: float) -> None:
    """Raise ``DefinitionError`` for invalid options of an external agent."""
    # When the agent is defined and not when its program starts: a wrong command would show in the middle of a run that
    # has been paid for. The first problem only, as each of them is one argument of one call, which whoever wrote it
    # mends at once.
    problem = ""
    words = command if isinstance(command, list | tuple) else ()
    if not words or not all(isinstance(word, str) and word and "\0" not in word for word in words):
        problem = f"command must be a list of words such as ['npx', 'some-agent', '--acp'], not {command!r}"
    elif isinstance(env, str) or not all(isinstance(name, str) and name and "=" not in name for name in env):  # type: ignore[attr-defined]
        problem = f"env must be a list of names of variables, or a mapping from names to values, not {env!r}"
    elif files not in ("write", "read", "none"):
        problem = f"files must be 'write', 'read' or 'none', not {files!r}"
    elif not start_seconds > 0:
        problem = f"start_seconds must be more than 0, not {start_seconds!r}"
    elif not isinstance(id, str) or len(id) > NAME_CHARS:
        problem = (
            f"the id of an external agent must have at most {NAME_CHARS} characters, because tool names start with it"
        )
    if problem:
        msg = f"agent {id!r}: {problem}"
        raise DefinitionError(msg)


# --- the run ----------------------------------------------------------------------------------------------------------


def _make_first_turn_input(ctx: StepContext) -> dict[str, Any]:
    """Return the prompt and the session to resume, named by the params or stored by the previous run."""
    given = ctx.params if isinstance(ctx.params, Mapping) else {}
    return {"prompt": ctx.prompt, "session": given.get("session") or ctx.agent_state.context.get(SESSION) or ""}


def _make_reply(result: Mapping[str, Any]) -> ExternalReply:
    """Return the reply of an agent from the JSON result of its last turn."""
    return ExternalReply(text=result["text"], session=result["session"], stop_reason=result["stop_reason"])


# --- a turn -----------------------------------------------------------------------------------------------------------


def _make_turn_tool(settings: _ProgramSettings, timeout: float | None) -> Tool[Any, Any]:
    """Return the tool whose calls run the turns of an external agent."""
    schema = {
        "type": "object",
        "properties": {
            "prompt": {"type": "string"},
            "session": {"type": "string"},
            "answers": {"type": "array", "items": {"type": "object"}},
        },
        "additionalProperties": False,
    }

    async def run_turn(ctx: ToolContext, input: JsonDict) -> ToolResult:
        return await _get_or_make_conversation(settings, ctx).run_turn(ctx, input)

    return Tool(
        settings.id,
        f"Has the agent {settings.id} do something, and gives what it said.",
        schema,
        run_turn,
        category="execute",
        annotations=ToolAnnotations(destructive=True, open_world=True),
        # The author gave the command; what it does then asks for itself.
        requires_permission=False,
        # The answers of a turn repeat what was asked about, which was judged by itself.
        about=(),
        timeout=math.inf if timeout is None else timeout,
    )


def _get_or_make_conversation(settings: _ProgramSettings, ctx: ToolContext) -> _ProgramConversation:
    """Return the conversation of a call's run with the program; a new one for a call without a run."""
    make = partial(_ProgramConversation, settings)
    return ctx.get_or_create_run_object(("external agent", settings.id), make) if ctx.has_run else make()


def _make_guard_recorder(settings: _ProgramSettings) -> Callable[[ToolContext, JsonDict], None]:
    """Return a callback for allowed permission calls; it stores the call's file rules in the conversation with the program."""

    def store_guard(ctx: ToolContext, input: JsonDict) -> None:
        """Store the file rules of an allowed permission call in the conversation with the program."""
        _get_or_make_conversation(settings, ctx).guards[ctx.tool_name, canonical(input)] = GUARD.get()

    return store_guard


class _ProgramConversation:
    """The conversation of one run with the agent program, which is ended with the turn or the run, whichever ends first."""

    def __init__(self, settings: _ProgramSettings) -> None:
        self._settings = settings
        self._program: AgentProgram | None = None
        self._connection: Connection | None = None
        self._session = ""
        self._prompting: asyncio.Future[Any] | None = None
        self._permissions = ProgramPermissions()
        self.said = _ProgramOutput()
        self._files: ProgramFileAccess | None = None
        self._terminals: BorrowedTerminals | None = None
        self.guards: dict[tuple[str, str], CallGuard | None] = {}
        self._methods: Sequence[str] = ()
        self._closes = False

    async def run_turn(self, ctx: ToolContext, input: JsonDict) -> ToolResult:
        """Send a prompt or answers, and return the output up to the end of the turn or the next question."""
        try:
            try:
                await self._start_or_answer_turn(ctx, input)
                return await self._wait_for_end_or_request()
            except ExternalAgentError as error:
                await self._end_program()
                return make_failed_result(error)
        except BaseException:
            await finish_shielded(self._abort_turn())
            raise

    async def _start_or_answer_turn(self, ctx: ToolContext, input: Mapping[str, Any]) -> None:
        """Start a turn with a prompt, or answer the running one; a turn whose program ended is resumed with the answers."""
        answers = input.get("answers")
        self.said.start_call_output(ctx)
        if answers is None:
            await self._start_program_and_turn(ctx, input.get("session") or "", input.get("prompt") or "")
        elif self._prompting is not None:
            self._permissions.answer_requests(answers)
        else:
            # The run was suspended, and the program with it.
            self._permissions.store_early_answers(answers)
            await self._start_program_and_turn(ctx, input["session"], _make_resume_prompt(answers))

    async def _start_program_and_turn(self, ctx: ToolContext, resumed_session: str, prompt: str) -> None:
        """Start the program and its session within the time limit, and send the prompt without waiting for the end."""
        place = self._require_local_workspace(ctx)
        # What is begun here outlives the call where the program waits for a permission, so it is in no context of a call; the
        # files that the call may touch are those of the turn.
        apart = Context()
        apart.run(GUARD.set, GUARD.get())
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await asyncio.create_task(self._start_program_and_session(resumed_session, place), context=apart)
        except TimeoutError:
            msg = (
                f"the program of {self._settings.id!r} did not open a session within {self._settings.start_seconds:g} s; "
                "raise start_seconds= if it needs longer"
            )
            raise ExternalAgentError(msg, kind="time") from None
        self.said.is_live = True
        asked = {"sessionId": self._session, "prompt": [{"type": "text", "text": prompt}]}
        self._prompting = asyncio.create_task(self._send_request("session/prompt", asked), context=apart)

    def _require_local_workspace(self, ctx: ToolContext) -> Workspace:
        """Return the workspace of the program; raise an error if there is none, or if it is on another machine."""
        place = self._settings.workspace or ctx.workspace
        if place is None:
            msg = f"{self._settings.id!r} needs a folder to work in: pass ExternalAgent(workspace=...) or Engine(workspace=...)"
            raise ExternalAgentError(msg, kind="start")
        if place.local_folder is None:
            msg = f"{self._settings.id!r} runs on this machine, but the workspace {place.name} is not a folder on it"
            raise ExternalAgentError(msg, kind="start")
        return place

    async def _start_program_and_session(self, resumed_session: str, workspace: Workspace) -> None:
        """Start the program, and open a session or resume *resumed_session*."""
        assert workspace.local_folder is not None  # noqa: S101 - it was checked
        folder = workspace.local_folder.resolve()
        try:
            from acp.connection import Connection
        except ImportError:
            msg = "external agents need the package agent-client-protocol: pip install 'stepengine[acp]'"
            raise ExternalAgentError(msg, kind="start") from None
        settings = self._settings
        self._files = ProgramFileAccess(folder, settings.files)
        self._terminals = BorrowedTerminals(folder, workspace) if settings.terminals else None
        env = select_default_and_named_variables(settings.names) | dict(settings.env)
        self._program = await AgentProgram.start(settings.command, env, folder)
        self._connection = Connection(self._dispatch_message, self._program)
        can = await self._negotiate_capabilities()
        self._session = await self._open_or_resume_session(resumed_session, str(folder), can)

    async def _negotiate_capabilities(self) -> Mapping[str, Any]:
        """Return the capabilities of the program, and store its sign-in methods; raise an error for another protocol version."""
        fs = {"readTextFile": self._settings.files != "none", "writeTextFile": self._settings.files == "write"}
        answer = await self._send_request(
            "initialize",
            {
                "protocolVersion": VERSION,
                "clientCapabilities": {"fs": fs, "terminal": self._settings.terminals},
                "clientInfo": {"name": "stepengine", "version": "1"},
            },
        )
        version = answer.get("protocolVersion")
        if version != VERSION:
            msg = (
                f"the program of {self._settings.id!r} uses version {version!r:.40} of the protocol, but only version {VERSION} "
                "is supported"
            )
            raise ExternalAgentError(msg, kind="protocol")
        methods = answer.get("authMethods")
        self._methods = [shorten_text(one.get("name")) for one in list_dicts(methods)]
        return get_dict_or_empty(answer.get("agentCapabilities"))

    async def _open_or_resume_session(self, resumed_session: str, cwd: str, capabilities: Mapping[str, Any]) -> str:
        """Resume *resumed_session*, or open a new session in the configured mode if it is empty; return the id."""
        self._closes = "close" in get_dict_or_empty(capabilities.get("sessionCapabilities"))
        where = {"cwd": cwd, "mcpServers": []}
        if resumed_session:
            resumes = "resume" in get_dict_or_empty(capabilities.get("sessionCapabilities"))
            if not (resumes or capabilities.get("loadSession")):
                msg = f"the program of {self._settings.id!r} cannot resume a session; call it without a session to start a new one"
                raise ExternalAgentError(msg, kind="session")
            await self._send_request(
                "session/resume" if resumes else "session/load",
                {"sessionId": resumed_session, **where},
                error_kind="session",
            )
            return resumed_session
        answer = await self._send_request("session/new", where)
        made = answer.get("sessionId")
        if not isinstance(made, str) or not made:
            msg = f"the program of {self._settings.id!r} returned no session id"
            raise ExternalAgentError(msg, kind="protocol")
        if self._settings.mode:
            await self._send_request("session/set_mode", {"sessionId": made, "modeId": self._settings.mode})
        return replace_lone_surrogates(made)

    async def _send_request(
        self, method: str, params: Mapping[str, Any], *, error_kind: str = "failed"
    ) -> Mapping[str, Any]:
        """
        Send a request to the program, and return its result.

        Raises:
            ExternalAgentError: If the program replies with an error, whose kind is *error_kind*, sends an invalid reply, or ends.
        """
        from acp import RequestError

        connection, program = self._connection, self._program
        assert connection is not None  # noqa: S101 - whoever asks has opened it
        assert program is not None  # noqa: S101
        try:
            answer = await connection.send_request(method, dict(params))
        except RequestError as error:
            raise self._make_refusal_error(method, error, error_kind) from None
        except (ConnectionError, RuntimeError, OSError):
            why = await program.describe_end()
            msg = f"the program of {self._settings.id!r} did not answer {method}: {why}"
            raise ExternalAgentError(
                replace_lone_surrogates(msg), kind="protocol" if program.problem else "ended"
            ) from None
        if answer is None:
            return {}
        if not isinstance(answer, Mapping):
            msg = f"the program of {self._settings.id!r} answered {method} without a JSON object"
            raise ExternalAgentError(msg, kind="protocol")
        return answer

    def _make_refusal_error(self, method: str, error: Any, error_kind: str) -> ExternalAgentError:
        """Return the error for a request that the program refused; for a required sign-in, it names the offered methods."""
        if error.code == AUTH_REQUIRED:
            ways = f"; it offers: {', '.join(filter(None, self._methods))}" if self._methods else ""
            msg = f"{self._settings.id!r} requires a sign-in before {method}: {shorten_text(str(error))}{ways}"
            return ExternalAgentError(replace_lone_surrogates(msg), kind="auth_required")
        details = f" ({shorten_json(error.data)})" if error.data is not None else ""
        msg = f"{self._settings.id!r} answered {method} with an error: {shorten_text(str(error))}{details}"
        return ExternalAgentError(replace_lone_surrogates(msg), kind=error_kind)

    async def _wait_for_end_or_request(self) -> ToolResult:
        """Wait until the turn ends or the program asks for a permission, and return the output; end the program with the turn."""
        prompting = self._prompting
        assert prompting is not None  # noqa: S101
        asked = asyncio.ensure_future(self._permissions.requested.wait())
        try:
            await asyncio.wait((prompting, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if not prompting.done():
            self._permissions.requested.clear()
            return self.said.make_partial_result(self._session, self._permissions.list_open_requests())
        answer, session = prompting.result(), self._session
        await self._end_program()
        return self.said.make_final_result(session, answer)

    # --- what the program asks for ------------------------------------------------------------------------------------

    async def _dispatch_message(self, method: str, params: Any, is_notification: bool) -> Any:  # noqa: FBT001 - the package calls it so
        """Record an update, or return the answer to a request of the program; ignore other notifications."""
        from acp import RequestError

        given = get_dict_or_empty(params)
        if method == "session/update":
            self.said.emit_and_record_update(get_dict_or_empty(given.get("update")))
            return None
        if is_notification:
            return None
        known: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "session/request_permission": self._answer_permission_request,
            "fs/read_text_file": self._authorize_and_read_file,
            "fs/write_text_file": self._authorize_and_write_file,
        }
        if self._terminals is not None:
            known |= {
                "terminal/create": self._authorize_and_start_command,
                "terminal/output": self._terminals.get_output,
                "terminal/wait_for_exit": self._terminals.wait_for_exit,
                "terminal/kill": self._terminals.kill_command,
                "terminal/release": self._terminals.release_terminal,
            }
        doing = known.get(method)
        if doing is None:
            raise RequestError.method_not_found(replace_lone_surrogates(method)[:SHOWN_CHARS])
        try:
            return await doing(given)
        except (StepEngineError, OSError) as error:
            raise RequestError(-32602, str(error)) from None

    async def _answer_permission_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for a permission of the program, grant an approved action once, and return the chosen option."""
        call = get_dict_or_empty(request.get("toolCall"))
        options = {str(one.get("kind")): one.get("optionId") for one in reversed(list_dicts(request.get("options")))}
        told = {
            **self.said.find_call_members(call.get("toolCallId")),
            **{k: v for k, v in call.items() if v is not None},
        }
        asked = _permission_input_from_call(told)
        kind = permission_kind_from_category(_category_from_kind(told.get("kind")))
        allowed = await self._request_permission(kind, asked)
        if allowed:
            # Once, so that nobody is asked twice about what we are told to do next.
            self._permissions.grant(
                kind, asked.get("command"), map(self._make_workspace_relpath, asked.get("paths", ()))
            )
        chosen = next((options[kind] for kind in (ALLOWED if allowed else DENIED) if kind in options), None)
        if allowed is None or chosen is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": chosen}}

    async def _request_permission(self, kind: str, input: dict[str, Any]) -> bool | None:
        """Ask the policy or a person, and return True if an action is allowed; ``None`` if there will be no answer."""
        return await self._permissions.request_permission(kind, input, is_live=self.said.is_live)

    async def _authorize_and_start_command(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a command in a terminal, after asking for permission unless it was granted as it is; raise an error if denied."""
        words = parse_command(request)
        line = shlex.join(words)
        # A person has to see where a command runs, and which variables change what it does. A permission says neither.
        around = {name: request[name] for name in ("cwd", "env") if request.get(name)}
        is_at_top = self._make_workspace_relpath(shorten_text(around.get("cwd"))) == "."
        variables = parse_variables(request)
        if variables or not is_at_top or not self._permissions.is_command_granted(line):
            # As our shell tool would be given it: a variable such as PATH decides which program runs.
            judged = ["env", *[f"{name}={value}" for name, value in variables.items()], *words] if variables else words
            asked: dict[str, Any] = {"title": f"Run {shlex.join(judged)}"[:SHOWN_CHARS], "command": judged}
            if around:
                asked["details"] = shorten_json(around)
            if not await self._request_permission("execute", asked):
                msg = "the command was not allowed"
                raise ToolError(msg)
        self._permissions.consume_command_grant(line)
        assert self._terminals is not None  # noqa: S101 - else nobody comes here
        return await self._terminals.start_command_in_terminal(request)

    def _make_workspace_relpath(self, path: str) -> str:
        """Return a path of the program relative to the workspace; it starts with ``..`` if it is outside. Links are not resolved."""
        assert self._files is not None  # noqa: S101
        return os.path.relpath(os.path.normpath(self._files.folder / path), self._files.folder)

    async def _authorize_and_read_file(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for permission to read a file unless it was granted, and return the requested lines; raise an error if denied."""
        assert self._files is not None  # noqa: S101
        file = await asyncio.to_thread(self._files.resolve_readable_file, request)
        with self._use_guard(
            await self._authorize_file_request("read", file, {"title": f"Read {file.path}"[:SHOWN_CHARS]})
        ):
            return {"content": await self._files.read_requested_lines(file, request)}

    async def _authorize_and_write_file(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for permission to write a file unless it was granted, and write it; raise an error if denied."""
        assert self._files is not None  # noqa: S101
        file = await asyncio.to_thread(self._files.resolve_writable_file, request)
        difference = await asyncio.to_thread(self._make_write_diff, file, request["content"])
        asked = {"title": f"Write {file.path}"[:SHOWN_CHARS], "details": cut_end(difference, ENTRY_CHARS)}
        with self._use_guard(await self._authorize_file_request("edit", file, asked)):
            await self._files.write(self.said.ctx, file, request["content"])
        return {}

    def _make_write_diff(self, file: RequestedFile, content: str) -> str:
        """Return the diff of a write, or the whole content if there is no text to compare with."""
        from stepengine.tools.bundled.files.edits import unified_diff

        assert self._files is not None  # noqa: S101
        try:
            before = self._files.read_whole_text(file)
        except ToolError:
            before = None
        return unified_diff(before, replace_lone_surrogates(content), file.path)

    async def _authorize_file_request(
        self, kind: str, file: RequestedFile, input: Mapping[str, Any]
    ) -> CallGuard | None:
        """
        Check a request for a file like a tool call. Return the guard with the file rules for it; ``None`` without file rules.

        Raises:
            ToolError: If the request is not allowed.
        """
        if self._permissions.consume_file_grants(kind, file.paths):
            return GUARD.get()
        given = {**input, "paths": list(file.paths)}
        if not await self._request_permission(kind, given):
            msg = f"{file.path!r} was not allowed"
            raise ToolError(msg)
        return self.guards.pop((f"{self._settings.id}_{kind}", canonical(given)), GUARD.get())

    @staticmethod
    @contextlib.contextmanager
    def _use_guard(guard: CallGuard | None) -> Iterator[None]:
        """Set the file rules for the duration of the block."""
        token = GUARD.set(guard)
        try:
            yield
        finally:
            GUARD.reset(token)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _abort_turn(self) -> None:
        """Cancel the turn in the program, wait a short time, and end the program."""
        prompting, connection = self._prompting, self._connection
        if prompting is not None and not prompting.done() and connection is not None:
            with contextlib.suppress(Exception):
                await connection.send_notification("session/cancel", {"sessionId": self._session})
            self._permissions.cancel_requests()
            await asyncio.wait((prompting,), timeout=CANCEL_SECONDS)
        await self._end_program()

    async def aclose(self) -> list[str]:
        """End the program, and return a sentence if it was waiting for a permission."""
        is_open = self._prompting is not None and not self._prompting.done()
        await self._abort_turn()
        return [f"the program of {self._settings.id!r} was ended while it waited for a permission"] if is_open else []

    async def _end_program(self) -> None:
        """End the session, terminals and program, cancel the prompt, and withdraw all permissions."""
        program, connection, prompting = self._program, self._connection, self._prompting
        self._program = self._connection = self._prompting = None
        self._permissions.clear()
        self.guards.clear()
        self.said.end_unfinished_calls()
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
        """Ask the program to close its session if it supports that, so that it can be resumed."""
        session, self._session = self._session, ""
        if session and self._closes:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await connection.send_request("session/close", {"sessionId": session})


def _make_resume_prompt(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt that resumes an ended program and lists the allowed and denied actions."""
    said = [
        f"- {'allowed' if one['allowed'] else 'denied'}: {get_dict_or_empty(one.get('input')).get('title', '')}"
        for one in answers
    ]
    return "\n".join(["You were stopped while you waited for a permission. Go on from there. It was decided:", *said])


def _category_from_kind(kind: object) -> str:
    """Return the category of our permission rules for a tool kind of the protocol; ``""`` for an unknown kind."""
    return KINDS.get(kind, "") if isinstance(kind, str) else ""


def _permission_input_from_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the input of a tool call for rules and people.

    Raises:
        ToolError: If the input is too long for rules to judge.
    """
    details = _format_call_content(call.get("content"))
    return make_permission_input(
        shorten_text(call.get("title")),
        get_dict_or_empty(call.get("rawInput")),
        paths=_list_location_paths(call),
        details=details,
    )


def _list_location_paths(call: Mapping[str, Any]) -> list[str]:
    """Return the paths of a tool call, all of them, since rules judge by them."""
    listed = call.get("locations")
    found = [get_dict_or_empty(one).get("path") for one in listed] if isinstance(listed, list) else []
    return [path for path in found if isinstance(path, str)]


# --- what it says -----------------------------------------------------------------------------------------------------


class _ProgramOutput(TurnOutput):
    """The output of a program in one turn, built from updates of the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.is_live = False
        self._raw: dict[str, dict[str, Any]] = {}
        self._input_left = INPUT_CHARS
        self._cost: Decimal | None = None
        self._before: Decimal | None = None

    def emit_and_record_update(self, update: Mapping[str, Any]) -> None:
        """Emit and record the text, thought, tool call, plan or cost in an update from the program."""
        match update.get("sessionUpdate"):
            case "usage_update":
                self._record_session_cost(get_dict_or_empty(update.get("cost")))
            case _ if not self.is_live:
                pass  # what was said in an earlier turn, and is told again when its session is loaded
            case "agent_message_chunk" | "agent_thought_chunk" as chunk:
                self.emit_and_record_text(
                    "text" if chunk == "agent_message_chunk" else "thought",
                    shorten_text(get_dict_or_empty(update.get("content")).get("text"), self.chars_left),
                )
            case "tool_call" | "tool_call_update":
                self._record_call_update(update)
            case "plan":
                told = list_dicts(update.get("entries"))[:200]
                self.emit_and_record_plan(
                    [
                        {"task": shorten_text(one.get("content")), "completed": one.get("status") == "completed"}
                        for one in told
                    ]
                )
            case _:
                pass

    def _record_session_cost(self, cost: Mapping[str, Any]) -> None:
        """Store the cost of the session so far; an invalid one, or one in another currency than US dollars, is ignored."""
        with contextlib.suppress(InvalidOperation, ValueError, TypeError):
            amount = Decimal(str(cost["amount"])) if cost.get("currency") == "USD" else None
            if amount is not None and amount.is_finite() and amount >= 0:
                if not self.is_live:
                    self._before = amount
                self._cost = amount

    def find_call_members(self, call_id: object) -> Mapping[str, Any]:
        """Return the members that updates have set for a tool call; empty for an unknown call."""
        return self._raw.get(call_id, {}) if isinstance(call_id, str) else {}

    def _record_call_update(self, update: Mapping[str, Any]) -> None:
        """Merge an update into the known members of a call, and record its progress; ignore new calls without room."""
        call = shorten_text(update.get("toolCallId"))
        if not call or (call not in self._raw and not self.chars_left):
            return
        members = ("title", "kind", "locations", "rawInput")
        told = {key: update[key] for key in members if update.get(key) is not None}
        raw = {**self._raw.get(call, {}), **told}
        self._input_left -= _count_json_chars(told)
        if self._input_left > 0:
            self._raw[call] = raw
        title = shorten_text(raw.get("title"))
        given = make_shown_input(title, get_dict_or_empty(raw.get("rawInput")), paths=_list_location_paths(raw))
        self.emit_and_record_call(
            call,
            name=shorten_text(raw.get("kind"), 40) or "other",
            category=_category_from_kind(raw.get("kind")),
            title=title,
            status=shorten_text(update.get("status"), 40),
            input={key: value for key, value in given.items() if key != "details"},
            kept={key: given[key] for key in ("paths", "command", "url") if key in given},
            output=_format_call_content(update.get("content")),
        )

    # --- results ------------------------------------------------------------------------------------------------------

    def make_partial_result(self, session: str, asks: Sequence[Mapping[str, Any]]) -> ToolResult:
        """Return and drain the recorded output with the program's permission requests, as the result of the call."""
        self.emit_full_text()
        data: Any = {"asks": list(asks), "session": session, "transcript": self.drain_record()}
        return ToolResult.json(data)

    def make_final_result(self, session: str, answer: Mapping[str, Any]) -> ToolResult:
        """Return and drain the recorded output with usage and cost, as the result of the call that ends the turn."""
        text = self.emit_full_text()
        reason = shorten_text(answer.get("stopReason"), 100) or "end_turn"
        data: Any = {"text": text, "session": session, "stop_reason": reason, "transcript": self.drain_record()}
        usage, cost = _parse_usage(answer.get("usage")), self._compute_turn_cost()
        if usage is None and cost is not None:
            usage = Usage(at_least=True)
        return ToolResult.json(data, usage=usage, cost=cost, change=Change(context=JsonDict({SESSION: session})))

    def _compute_turn_cost(self) -> Decimal | None:
        """Return the cost of the session minus that before the turn; ``None`` if unknown."""
        if self._cost is None:
            return None
        return max(Decimal(0), self._cost - (self._before or Decimal(0)))


def _count_json_chars(value: object) -> int:
    """Return the length of a value as JSON; ``INPUT_CHARS`` for one that is nested too deep."""
    try:
        return len(json.dumps(value))
    except (ValueError, RecursionError):
        return INPUT_CHARS


def _parse_usage(usage: object) -> Usage | None:
    """Return the token usage of a turn, if the program reported it."""
    given = get_dict_or_empty(usage)
    if not given:
        return None

    def get_count_or_zero(name: str) -> int:
        """Return a reported number of tokens; 0 if it is missing or invalid."""
        value = given.get(name)
        return value if type(value) is int and 0 <= value < 2**53 else 0

    return Usage(
        input_tokens=get_count_or_zero("inputTokens"),
        output_tokens=get_count_or_zero("outputTokens"),
        cache_read_tokens=get_count_or_zero("cachedReadTokens"),
        cache_write_tokens=get_count_or_zero("cachedWriteTokens"),
        reasoning_tokens=get_count_or_zero("thoughtTokens"),
    )


def _format_call_content(content: object) -> str:
    """Return the texts and differences of a tool call's content."""
    said: list[str] = []
    for one in list_dicts(content):
        match one.get("type"):
            case "content":
                said.append(shorten_text(get_dict_or_empty(one.get("content")).get("text"), ENTRY_CHARS))
            case "diff":
                said.append(_format_diff(one))
            case _:
                pass
    return cut_end("\n".join(filter(None, said)), ENTRY_CHARS)


def _format_diff(diff: Mapping[str, Any]) -> str:
    """Return a difference in a tool call's content as a unified diff."""
    from stepengine.tools.bundled.files.edits import unified_diff

    old, new = diff.get("oldText"), diff.get("newText")
    before = shorten_text(old, READ_BYTES) if isinstance(old, str) else None
    return unified_diff(before, shorten_text(new, READ_BYTES), shorten_text(diff.get("path")).lstrip("/"))
