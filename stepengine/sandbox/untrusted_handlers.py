"""
Untrusted handlers: an agent file of a third party or a model runs in the sandbox and is never imported.

The handler of such an agent is a generator in this process. It runs turns of the sandboxed handler and yields the same yieldables, so the
engine sees no difference. Yields leave the sandbox as class names and JSON, and are decoded as untrusted data. Answers enter it as JSON.
A turn runs in a thread, has limits of time and memory, and ends immediately if its run is stopped. A resumed or replayed run executes the
handler again, as for any other handler.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import math
import threading
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import attrs
from attrs import frozen

from stepengine import errors
from stepengine.data import yields as y
from stepengine.data.alike import list_names
from stepengine.data.codec import to_json
from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import Compute
from stepengine.data.hooks import StepContext
from stepengine.data.json import (
    MAX_DIGITS,
    MAX_INT,
    MAX_NUMBER,
    MIN_NUMBER,
    JsonDict,
    compact,
    freeze,
    replace_lone_surrogates,
    thaw,
)
from stepengine.data.limits import DEFAULT_LIMITS, Limits
from stepengine.data.messages import AssistantMessage, Message, ToolCallPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.models import ModelReply, ModelSettings, Thinking
from stepengine.data.programs import RunningProgram, mark_as_sandboxed
from stepengine.data.state import AgentState, ChildResult, Waited
from stepengine.data.visible import truncate_text
from stepengine.data.waits import ChildRef
from stepengine.errors import BadYield, DefinitionError, HandlerError, LimitReached, StepEngineError, ToolError
from stepengine.machine.author import MAX_CLOSE_ATTEMPTS
from stepengine.sandbox.byte_counter import ByteBudget, TooManyBytes
from stepengine.sandbox.prelude import ERRORS, PRELUDE
from stepengine.sandbox.program_tool import ProgramLimits, check_depth_and_size, get_shared_sandbox
from stepengine.sandbox.schemas import SchemaClass
from stepengine.sandbox.sessions import (
    BEFORE,
    PRINTED,
    CallAnswer,
    MontySandbox,
    ProgramEnded,
    ProgramRaised,
    ProgramSession,
    ProgramTurn,
    ProgramWaiting,
)
from stepengine.sandbox.source_rewriter import AgentText, rewrite_for_sandbox
from stepengine.tools.schemas import JsonSchema
from stepengine.workspace.paths import make_missing_path_hint

NAME = "<agent>"
LIMITS = ProgramLimits()
CLOSE_SECONDS = 1.0
"""The time of a handler's ``finally`` blocks when it is closed; then its worker is ended."""
MAX_NOTES = 1_000
"""The log lines and notifications of one turn."""
MAX_DRAWN_PLACES = 100_000
"""The indices that the host draws at once, since it creates a list of them."""
MAX_AGENTS = 200
"""The agents of one file, including the agents that they may spawn."""
MAX_KEY_CHARS = 1_000
"""A longer text of a ``KeyError`` is not parsed."""
CYCLE_TEXTS = ('"[...]"', '"{...}"', '"(...)"')
"""The JSON of a list, dict or tuple that contains itself, at the inner place."""
ASKS = {"_se_yield": "yield", "_se_from": "yield from", "_se_bare": "bare"}
BEGIN = "".join([f"{name} = {own}\n" for name, own in ERRORS.items()]) + PRELUDE
OURS: Mapping[str, type[StepEngineError]] = {
    own: getattr(errors, name)
    for name, own in ERRORS.items()
    if own.isidentifier() and issubclass(getattr(errors, name, int), StepEngineError) and name != "ToolNotAvailable"
}
"""The exception of the package for each exception of the sandbox; ``ToolInputError`` also for ``ToolNotAvailable``."""
THEIRS: tuple[tuple[type[BaseException], str], ...] = tuple(
    [
        (getattr(errors, name), own)
        for name, own in reversed(ERRORS.items())
        if own.isidentifier() and hasattr(errors, name)
    ]
)
"""The exceptions of the package, subclasses before their bases, with the sandbox exceptions that represent them."""
KEPT_FILES = 64
"""The number of cached files; a process uses a few."""
KEPT_SHAPES = 500
"""The number of cached shapes of fields; a file has a few."""


# --- definitions ------------------------------------------------------------------------------------------------------


def load_file(path: Path) -> tuple[AgentDefinition, ...]:
    """
    Run an agent file in the sandbox, and return its agents. The file is not imported, and its handlers run in the sandbox, too.

    Raises:
        DefinitionError: with file and line, for code that the sandbox cannot run; also if the extra ``programs`` is not installed.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        msg = f"there is no agent file {str(path)!r}{make_missing_path_hint(path)}"
        raise DefinitionError(msg) from None
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: the agent file cannot be read: {error}"
        raise DefinitionError(msg) from error
    return _load_source_cached(text, str(path))


@lru_cache(KEPT_FILES)
def _load_source_cached(text: str, file: str) -> tuple[AgentDefinition, ...]:
    """Return the agents of a file; the same objects for the same text and path, as for an imported module."""
    return load_source(text, file=file)


def load_source(
    text: str,
    *,
    file: str = NAME,
    limits: ProgramLimits = LIMITS,
    sandbox: MontySandbox | None = None,
) -> tuple[AgentDefinition, ...]:
    """
    Run the text of an agent file in the sandbox, and return the agents in its variable ``agent`` or ``agents``.

    The handlers run in the sandbox, too. They may yield everything but ``Perform``. The agents name tools of the host.

    Args:
        text: The text of an agent file, at most 64 KiB.
        file: The name of the file in messages.
        limits: The limits of loading the file and of each execution of a handler; ``calls`` has no effect.
        sandbox: The sandbox that runs file and handlers; by default Monty, in worker processes that all programs of this process share.

    Raises:
        DefinitionError: with file and line, for code that the sandbox cannot run; also if the extra ``programs`` is not installed.
    """
    agent_text = rewrite_for_sandbox(text, file)
    if not agent_text.holds:
        msg = f"{file}:1: expected `agent = AgentDefinition(...)` or `agents = [AgentDefinition(...), ...]` at module level"
        raise DefinitionError(msg)
    home = sandbox or _get_installed_sandbox()
    session = home.open_handler_session(
        _refuse_host_call, seconds=limits.seconds, memory=limits.memory, printed=limits.printed, seed=0
    )
    try:
        _run_prelude_and_file(session, agent_text, BEFORE, limits)
        turn = session.feed(agent_text.holds, BEFORE)
        value = _get_ended_turn_value(turn, agent_text, limits)
        check_depth_and_size(value, limits.value)
    except (ToolError, ValueError) as error:
        msg = f"{file}:{agent_text.line}: {error}"
        raise DefinitionError(msg) from error
    finally:
        session.close()
    return _DefinitionReader(agent_text, limits, home).read_agents(value)


def _get_installed_sandbox() -> MontySandbox:
    """Return the shared sandbox of this process; raise ``DefinitionError`` if Monty is not installed."""
    sandbox = get_shared_sandbox()
    sandbox.monty  # noqa: B018 - raises where it is not installed
    return sandbox


def _run_prelude_and_file(session: ProgramSession, agent_text: AgentText, now: datetime, limits: ProgramLimits) -> None:
    """Run the prelude and the agent file in a session; raise ``DefinitionError`` if one of them fails."""
    fields = {
        name: {
            "order": _python_field_names(one),
            "required": [
                name
                for name in _python_field_names(one)
                if one.aliases.get(name, name) in one.json_schema.get("required", ())
            ],
            "defaults": thaw(one.defaults),
            "models": {name: _parse_shape(how) for name, how in one.models.items()},
            "is_dict": one.kind == "typed_dict",
        }
        for name, one in agent_text.schemas.items()
    }
    for code in (f"{BEGIN}_se_fields.update({fields!r})\n", agent_text.code):
        _get_ended_turn_value(session.feed(code, now), agent_text, limits)


def _python_field_names(schema: SchemaClass) -> list[str]:
    """Return the Python names of a schema class's fields, in the order of its JSON Schema."""
    fields = {alias: name for name, alias in schema.aliases.items()}
    return [fields.get(name, name) for name in schema.json_schema.get("properties", {})]


@lru_cache(KEPT_SHAPES)
def _parse_shape(shape: str) -> list[Any]:
    """Return the shape of a field's value as nested lists; see ``SchemaClass.models``."""
    return _shape_from_expression(ast.parse(shape, mode="eval").body)


def _shape_from_expression(node: ast.expr) -> list[Any]:
    """Return a field's type as nested lists, such as ``["list", ["class", "City"]]``."""
    match node:
        case ast.Subscript(ast.Name("list"), inner):
            return ["list", _shape_from_expression(inner)]
        case ast.Subscript(ast.Name("dict"), ast.Tuple([_, inner])):
            return ["dict", _shape_from_expression(inner)]
        case ast.Subscript(ast.Name("tuple"), ast.Tuple(members)):
            return ["tuple", [_shape_from_expression(one) for one in members]]
        case ast.BinOp(left, ast.BitOr(), right):
            return ["union", [_shape_from_expression(left), _shape_from_expression(right)]]
        case ast.Name(name) if name != "Any":
            return ["class", name]
        case _:
            return ["as it is", None]


def _get_ended_turn_value(turn: ProgramTurn, agent_text: AgentText, limits: ProgramLimits) -> Any:
    """Return the last value of a turn; raise ``DefinitionError`` if the turn waits for the host or failed."""
    if isinstance(turn, ProgramEnded):
        return turn.value
    line = f":{turn.line}" if turn.line else ""
    if isinstance(turn, ProgramWaiting):
        msg = (
            f"{agent_text.file}{line}: an agent file cannot use the host while it is loaded; move this into a function"
        )
        raise DefinitionError(msg)
    if turn.is_fatal:
        msg = f"{agent_text.file}{line or ':1'}: {_turn_failure_text(turn, limits)}"
    else:
        msg = f"{agent_text.file}{line or ':1'}: {turn.kind}: {replace_lone_surrogates(turn.text)}"
    raise DefinitionError(msg)


def _turn_failure_text(turn: ProgramRaised, limits: ProgramLimits) -> str:
    """Return the reason for the failure of a turn; the text for a limit is fixed, so that a replay has the same text."""
    if turn.kind == PRINTED:
        return f"it printed more than {limits.printed:,} characters"
    if turn.is_fatal and turn.kind == "TimeoutError":
        return f"it computed for more than {limits.seconds:g} s without yielding"
    if turn.is_fatal and turn.kind == "MemoryError":
        return f"it used more than {limits.memory:,} bytes, or its worker died: {turn.text}"
    return turn.text


def _refuse_host_call(_: Sequence[Any]) -> CallAnswer:
    """Return an error as the answer to a host call, which a file cannot make while it is loaded."""
    return CallAnswer("this works only while a handler runs; move it into a handler", "ValueError")


class _DefinitionReader:
    """Reads the agent definitions in the value that the sandbox returned."""

    def __init__(self, agent_text: AgentText, limits: ProgramLimits, sandbox: MontySandbox) -> None:
        self._known = agent_text
        self._limits = limits
        self._sandbox = sandbox
        self._count = 0
        self._made: list[tuple[Any, AgentDefinition]] = []

    def read_agents(self, value: Any) -> tuple[AgentDefinition, ...]:
        """Return the agents in a value of the sandbox; raise ``DefinitionError`` for an empty list and duplicate ids."""
        given = list(value) if isinstance(value, list | tuple) else [value]
        found = [self._make_agent(one) for one in given]
        if not found:
            self._refuse("`agents` is empty")
        ids = [agent.id for agent in found]
        twice = next((one for n, one in enumerate(ids) if one in ids[:n]), None)
        if twice is not None:
            self._refuse(f"`agents` contains two agents with the id {twice!r}; give each a unique id")
        return tuple(found)

    def _make_agent(self, returned: Any) -> AgentDefinition:
        """
        Return the definition for an ``AgentDefinition`` of the sandbox, the stored one for an equal value; refuse hooks and too many agents.

        Raises:
            DefinitionError: for hooks, too many agents and invalid fields.
        """
        name, fields = _read_sandbox_object(returned)
        given, agent_id = fields.get("fields"), _id_or_short_repr(fields.get("id"))
        if name != "AgentDefinition" or not isinstance(given, Mapping):
            self._refuse(f"expected `AgentDefinition(...)` from stepengine, found {_short_repr(returned)}")
        # An agent that the file uses in several places is returned once for each of them.
        known = next((agent for one, agent in self._made if one == returned), None)
        if known is not None:
            return known
        self._count += 1
        if self._count > MAX_AGENTS:
            self._refuse(f"the file defines more than {MAX_AGENTS} agents; split it")
        made: dict[str, Any] = {}
        for field, one in given.items():
            if field == "hooks":
                self._refuse(
                    f"agent {agent_id!r}: a file in the sandbox cannot have hooks; define them in the program that runs the agent"
                )
            made[str(field)] = self._read_field(agent_id, field, one)
        try:
            agent = AgentDefinition(**{**made, "id": agent_id})
        except DefinitionError as error:
            self._refuse(error.message)
        self._made.append((returned, agent))
        return agent

    def _read_field(self, agent_id: str, field: str, value: Any) -> Any:
        """Return the value of a field of a definition, decoded by the kind of the field."""
        match field:
            case "handle_steps":
                return self._make_handler(agent_id, value)
            case "input_schema" | "output_schema":
                return self._read_schema(agent_id, field, value)
            case "spawnable_agents" if isinstance(value, list | tuple):
                return [self._read_spawnable(one) for one in value]
            case "settings" | "limits":
                return self._make_settings_or_limits(
                    agent_id, field, value, ModelSettings if field == "settings" else Limits
                )
            case _:
                return self._thaw_field(agent_id, field, value)

    def _make_handler(self, agent_id: str, name: Any) -> Any:
        """Return the sandboxed handler for the name of a function that yields; refuse any other value."""
        line = self._known.lines.get(name) if isinstance(name, str) else None
        if line is None:
            self._refuse(
                f"agent {agent_id!r}: handle_steps must be a function of this file that yields, not {_short_repr(name)}"
            )
        return make_sandboxed_handler(self._known, name, limits=self._limits, sandbox=self._sandbox)

    def _read_schema(self, agent_id: str, field: str, value: Any) -> Any:
        """Return a JSON Schema, passed as such or as a schema class of the file, ``None`` unchanged; refuse other values."""
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {
                str(key): self._read_schema(agent_id, field, one)
                if _read_sandbox_object(one)[0]
                else self._thaw_field(agent_id, field, one)
                for key, one in value.items()
            }
        name, fields = _read_sandbox_object(value)
        schema = self._known.schemas.get(str(fields.get("name"))) if name == "_se_Schema" else None
        if schema is None:
            self._refuse(
                f"agent {agent_id!r}: {field} must be a JSON Schema or a schema class of this file, not {_short_repr(value)}"
            )
        return thaw(schema.json_schema)

    def _read_spawnable(self, value: Any) -> Any:
        """Return the definition of a spawnable agent of this file, or the id of an agent that is defined elsewhere."""
        if isinstance(value, str):
            return value
        name, fields = _read_sandbox_object(value)
        if (
            name == "AgentDefinition"
            and isinstance(fields.get("fields"), Mapping)
            and "_se_is_elsewhere" in fields["fields"]
        ):
            return _id_or_short_repr(fields.get("id"))
        return self._make_agent(value)

    def _make_settings_or_limits(self, agent_id: str, field: str, value: Any, kind: type) -> Any:
        """Return an object of the sandbox as ``ModelSettings``, or as ``OwnLimits`` if *kind* is ``Limits``; refuse other values."""
        if value is None:
            return None
        name, fields = _read_sandbox_object(value)
        given = fields.get("fields")
        if name != kind.__name__ or not isinstance(given, Mapping):
            self._refuse(f"agent {agent_id!r}: {field} must be {kind.__name__}(...), not {_short_repr(value)}")
        plain = {str(key): self._thaw_field(agent_id, field, one) for key, one in given.items()}
        try:
            return _make_untrusted_model_settings(plain) if kind is ModelSettings else OwnLimits(**plain)
        except (StepEngineError, TypeError, ValueError) as error:
            self._refuse(f"agent {agent_id!r}: {error}")

    def _thaw_field(self, agent_id: str, field: str, value: Any) -> Any:
        """Return the value of a field as a ``Thinking`` or plain JSON; refuse other values."""
        name, fields = _read_sandbox_object(value)
        try:
            if name == "Thinking":
                return Thinking(*thaw_plain(fields["words"]), **thaw_plain(fields["fields"]))
            return thaw_plain(value)
        except StepEngineError as error:
            self._refuse(f"agent {agent_id!r}: {error}")
        except (KeyError, TypeError) as error:
            self._refuse(f"agent {agent_id!r}: {field} must be JSON in a file in the sandbox: {error}")

    def _refuse(self, reason: str) -> NoReturn:
        """Raise ``DefinitionError`` with the line of the file that assigns its agents."""
        msg = f"{self._known.file}:{self._known.line}: {reason}"
        raise DefinitionError(msg)


@frozen(kw_only=True, cache_hash=True)
class OwnLimits(Limits):
    """The limits in an untrusted file; they apply where they are lower than those of the engine."""

    def resolve(self, fallback: Limits | None) -> Limits:
        """Return these limits, each capped by *fallback* or the default; *fallback* alone decides ``ask``, and must allow unpriced models."""
        of_host = (fallback or Limits()).resolve(DEFAULT_LIMITS)
        found: dict[str, Any] = {}
        for field in attrs.fields(Limits):
            ours, theirs = getattr(of_host, field.name), getattr(self, field.name)
            is_larger = ours is not None and not isinstance(theirs, str) and theirs is not None and theirs > ours
            found[field.name] = getattr(fallback, field.name, None) if theirs is None else ours if is_larger else theirs
        if self.allow_unpriced and (fallback is None or not fallback.allow_unpriced):
            found["allow_unpriced"] = None if fallback is None else fallback.allow_unpriced
        # Only the limits of the host decide whether a person is asked to raise a limit.
        found["ask"] = None if fallback is None else fallback.ask
        return Limits(**found)


NOT_OF_STRANGERS: Mapping[str, str] = MappingProxyType(
    {
        "extra": "it changes the request itself, including its headers",
        "server_tools": "the provider runs these tools without asking for permission",
    }
)


def _make_untrusted_model_settings(fields: Mapping[str, Any]) -> ModelSettings:
    """Return the model settings of untrusted code; raise ``BadYield`` for ``extra`` and ``server_tools``."""
    for name, why in NOT_OF_STRANGERS.items():
        if fields.get(name):
            msg = f"a file in the sandbox cannot set ModelSettings({name}=...): {why}"
            raise BadYield(msg)
    return ModelSettings(**fields)


def _id_or_short_repr(value: Any) -> Any:
    """Return a text unchanged, and any other value as a short ``repr``."""
    return value if isinstance(value, str) else _short_repr(value)


def thaw_plain(value: Any) -> Any:
    """Return JSON from the sandbox as plain lists and dicts; raise ``TypeError`` for other values."""
    if isinstance(value, Mapping):
        return {str(key): thaw_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [thaw_plain(one) for one in value]
    if isinstance(value, str | int | float | None):
        return _require_json_number(value)
    msg = f"{_short_repr(value)} is not JSON"
    raise TypeError(msg)


def _require_json_number(value: Any) -> Any:
    """Return *value* unchanged; raise ``TypeError`` if it is a number that not every JSON reader accepts."""
    if isinstance(value, float) and not math.isfinite(value):
        msg = f"{value} is not JSON; use a finite number"
        raise TypeError(msg)
    if isinstance(value, int) and not MIN_NUMBER <= value <= MAX_NUMBER:
        msg = f"a number of more than {MAX_DIGITS:,} digits is not JSON; make it a string (str)"
        raise TypeError(msg)
    return value


def _replace_nested_surrogates(value: Any) -> Any:
    """Return JSON with the lone surrogates in all its texts and keys replaced."""
    if isinstance(value, dict):
        return {replace_lone_surrogates(key): _replace_nested_surrogates(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_replace_nested_surrogates(one) for one in value]
    return replace_lone_surrogates(value) if isinstance(value, str) else value


def _read_sandbox_object(value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the class's name and the attributes of an object of the sandbox; ``""`` for anything else."""
    attributes = getattr(value, "attributes", None)
    # A named tuple may have attributes of any name.
    return (
        (str(value.name), attributes) if isinstance(attributes, Mapping) and not isinstance(value, tuple) else ("", {})
    )


def _short_repr(value: Any) -> str:
    """Return a short description of a value for messages, the same in every process."""
    name, _ = _read_sandbox_object(value)
    if name:
        return f"an object of the class {name[:60]}"
    if value is not None and type(value) not in (str, int, float, bool, list, tuple, dict):
        # What it is called differs from process to process: sets have an order, functions an address.
        return f"a value of type {type(value).__name__}"
    text = (
        f"a {type(value).__name__}"
        if isinstance(value, list | tuple | dict) or (isinstance(value, int) and abs(value) > MAX_INT)
        else repr(value)
    )
    return truncate_text(text, 80)


# --- handlers ---------------------------------------------------------------------------------------------------------


def make_sandboxed_handler(
    agent_text: AgentText,
    name: str,
    *,
    limits: ProgramLimits = LIMITS,
    sandbox: MontySandbox | None = None,
) -> Callable[[StepContext[Any]], Generator[Any, Any, Any]]:
    """Return a handler that runs the function *name* of an agent file in the sandbox."""

    def handle_steps(ctx: StepContext[Any]) -> Generator[Any, Any, Any]:
        return (yield from _HandlerRun(agent_text, name, ctx, limits, sandbox or _get_installed_sandbox()).run())

    handle_steps.__name__ = handle_steps.__qualname__ = name
    # Tools that look for the definition or its source find the file; a waiting handler reports its own line.
    handle_steps.__code__ = handle_steps.__code__.replace(
        co_filename=agent_text.file, co_firstlineno=agent_text.lines[name], co_name=name, co_qualname=name
    )
    if not Path(agent_text.file).is_file():
        lines = agent_text.source.splitlines(keepends=True)
        linecache.cache[agent_text.file] = (len(agent_text.source), None, lines, agent_text.file)
    mark_as_sandboxed(handle_steps)
    return handle_steps


class _SentToHandler(NamedTuple):
    """The answer to a yield of a handler: a value, or an error to raise."""

    told: Any = None
    error: BaseException | None = None


class _HandlerRun(RunningProgram):
    """
    One execution of a handler.

    A turn is JSON: ``{"asked": ..., "how": ..., "line": ...}`` for a handler that yields, ``{"returned": ...}`` or
    ``{"raised": kind, "text": ..., "line": ..., "lost": ...}`` for one that has ended. ``"lost"`` means that its session ended, too.
    """

    def __init__(
        self, agent_text: AgentText, name: str, ctx: StepContext[Any], limits: ProgramLimits, sandbox: MontySandbox
    ) -> None:
        self.code, self.file = agent_text.source, agent_text.file
        self._known = agent_text
        self._name = name
        self._ctx = ctx
        self._limits = limits
        self._sandbox = sandbox
        self._session: ProgramSession | None = None
        self._is_stopped = False
        self._asked = 0
        self.line = agent_text.lines[name]
        self._thrown: BaseException | None = None
        self._states: list[AgentState] = [ctx.agent_state]
        self._sent: list[Message] = []
        self._now = ctx.now()
        self._bytes = ByteBudget(limits.turn, limits.total)
        self._is_over = False
        self._shown = 0
        self._notes: list[Callable[[], None]] = []
        self._noted = 0

    # --- inspection ---------------------------------------------------------------------------------------------------

    def printed(self) -> str | None:
        """Return the output of the handler so far; ``None`` before the session starts."""
        return None if self._session is None else self._session.printed

    # --- turns --------------------------------------------------------------------------------------------------------

    def run(self) -> Generator[Any, Any, Any]:
        """Run the handler turn by turn, yield its yieldables to the engine, and return its result or raise its error."""
        try:
            turn = yield from self._compute_and_log_turn(self._start_handler)
            while "asked" in turn:
                try:
                    sent = yield from self._perform_yield(turn)
                    turn = yield from self._compute_and_log_turn(partial(self._resume_handler, sent))
                except GeneratorExit:
                    last = self._close_sandboxed_handler()
                    if last is None:
                        raise
                    turn = last
            return self._return_or_raise(turn)
        finally:
            self._is_over = True
            self._stop()

    def _compute_and_log_turn(self, work: Callable[[], Mapping[str, Any]]) -> Generator[Any, Any, Mapping[str, Any]]:
        """Run *work* as a ``Compute`` effect, log the output of the turn, and return the turn as JSON."""
        self._now = self._ctx.now()
        turn: Mapping[str, Any] = (yield Compute(lambda _, __: work(), self._stop, self)).value
        self._flush_log()
        self.line = turn.get("line") or self.line
        return turn

    def _perform_yield(self, turn: Mapping[str, Any]) -> Generator[Any, Any, _SentToHandler]:
        """Yield the handler's yieldable to the engine, and return the value or the error to send to the handler."""
        try:
            step = _YieldDecoder(self._known, self._states[-1].tool_definitions).decode_yield(turn["asked"])
            if turn["how"] == "yield from":
                return _SentToHandler(self._encode_for_sandbox((yield from step)))
            if turn["how"] == "yield":
                return _SentToHandler(self._encode_for_sandbox((yield step)))
            yield step  # a bare yield, as in the handler, so that the warning about dropped results works
            return _SentToHandler()
        except (StepEngineError, LimitReached) as error:
            error.__traceback__ = None
            return _SentToHandler(error=error)

    def _start_handler(self) -> Mapping[str, Any]:
        """Open the session, run the agent file in it, run the handler's first turn, and return the turn as JSON."""
        limits = self._limits
        # The seed of the sandbox's own `random`. The state of `ctx.random` is only read.
        seed = zlib.crc32(repr(self._ctx.random.getstate()).encode())
        session = self._sandbox.open_handler_session(
            self._answer_host_call, seconds=limits.seconds, memory=limits.memory, printed=limits.printed, seed=seed
        )
        self._session = session
        if self._is_stopped:
            session.close()
        try:
            _run_prelude_and_file(session, self._known, self._now, self._limits)
        except DefinitionError as error:
            return {"raised": "HandlerError", "text": error.message}
        return self._run_turn(
            lambda: session.feed(f"_se_returned = await {self._name}(_se_context())\n_se_returned", self._now)
        )

    def _resume_handler(self, sent: _SentToHandler) -> Mapping[str, Any]:
        """Send the handler the answer to its yield, and return its next turn as JSON; an error if too many bytes cross."""
        session = self._session
        assert session is not None  # noqa: S101
        self._thrown = sent.error
        answer = CallAnswer(sent.told) if sent.error is None else CallAnswer(*_error_text_and_kind(sent.error))
        self._bytes.reset_turn_count()
        try:
            self._bytes.add(answer.value)
        except TooManyBytes as error:
            self._is_over = True
            return {"raised": "HandlerError", "text": str(error)}
        return self._run_turn(lambda: session.answer({self._asked: answer}, self._now))

    def _run_turn(self, run: Callable[[], ProgramTurn]) -> Mapping[str, Any]:
        """Run a turn and return it as JSON: the next yield, the returned value or the error."""
        try:
            turn = run()
        except ToolError as error:  # there is no worker
            return {"raised": "HandlerError", "text": error.message}
        if isinstance(turn, ProgramWaiting):
            return self._record_yield_and_encode(turn)
        self._is_over = True
        if isinstance(turn, ProgramRaised):
            return {
                "raised": turn.kind,
                "text": replace_lone_surrogates(_turn_failure_text(turn, self._limits)),
                "line": turn.line,
                "lost": turn.is_fatal,
            }
        try:
            check_depth_and_size(turn.value, self._limits.value)
            encoded = _sandbox_value_to_json(turn.value)
            # A list inside itself leaves the sandbox as such a text. Only the sandbox can distinguish it from a text of the handler.
            if any(text in compact(encoded) for text in CYCLE_TEXTS) and self._run_cycle_check():
                return {"raised": "HandlerError", "text": "its return value is not JSON: it contains itself"}
            return {"returned": encoded}
        except (TypeError, ValueError) as error:
            return {"raised": "HandlerError", "text": f"its return value is not JSON: {error}"}

    def _run_cycle_check(self) -> bool:
        """Run a check in the handler's session, and return True if the value that the handler returned contains itself."""
        session = self._session
        assert session is not None  # noqa: S101
        printed = session.printed
        turn = session.feed("_se_contains_itself(_se_returned)", self._now)
        session.printed = printed  # of the handler's last turn, which is logged afterwards
        return not isinstance(turn, ProgramWaiting | ProgramRaised) and turn.value is True

    def _record_yield_and_encode(self, turn: ProgramWaiting) -> Mapping[str, Any]:
        """Record the id of the yield for which a handler waits, and return the yield as JSON; an error for any other wait."""
        call = turn.calls[-1]
        if len(turn.calls) != 1 or call.name not in ASKS or len(call.args) != 1:
            called = ", ".join(dict.fromkeys([repr(one.name[:40]) for one in turn.calls[:5]]))
            text = f"it waits for {called}; a handler waits for one thing at a time, with `yield` or `yield from`"
            return {"raised": "HandlerError", "text": text, "line": turn.line}
        self._asked = call.id
        try:
            check_depth_and_size(call.args[0], self._limits.value)
            asked = _sandbox_value_to_json(call.args[0])
            self._bytes.add(asked)
        except TooManyBytes as error:
            self._is_over = True
            return {"raised": "HandlerError", "text": str(error), "line": turn.line}
        except (TypeError, ValueError) as error:
            asked = {"wrong": str(error)}
        return {"asked": asked, "how": ASKS[call.name], "line": turn.line}

    def _stop(self) -> None:
        """Close the session, from any thread; a running turn ends with an error."""
        self._is_stopped = True
        if self._session is not None:
            self._session.close()

    def _close_sandboxed_handler(self) -> Mapping[str, Any] | None:
        """
        Raise ``GeneratorExit`` in the handler, and return the turn of another error; ``None`` if it ended without one.

        Raises:
            RuntimeError: when the handler yields at each attempt.
        """
        yielded: list[int] = []
        turn: Mapping[str, Any] | None = None
        for _ in range(MAX_CLOSE_ATTEMPTS):
            turn = self._attempt_close()
            if turn is None or "asked" not in turn:
                break
            yielded.append(self.line)
        if yielded:
            self._stop()
            places = ", ".join(dict.fromkeys([f"{self.file}:{line}" for line in yielded]))
            msg = f"it yields at {places} while it is closed; a closed handler must not yield"
            raise RuntimeError(msg)
        return turn

    def _attempt_close(self) -> Mapping[str, Any] | None:
        """Raise ``GeneratorExit`` in the handler once, with a time limit; return its turn if it yields or fails, else ``None``."""
        session = self._session
        if session is None or self._is_over or self._is_stopped:
            return None
        # The caller that closes a generator waits for it, so a handler that computes endlessly is ended.
        timer = threading.Timer(CLOSE_SECONDS, self._stop)
        timer.daemon = True
        timer.start()
        try:
            turn = self._run_turn(
                lambda: session.answer({self._asked: CallAnswer("the run ends here", "SystemExit")}, self._now)
            )
        finally:
            timer.cancel()
        self._flush_log()
        self.line = turn.get("line") or self.line
        return None if turn.get("raised") == "SystemExit" or turn.get("lost") or "returned" in turn else turn

    def _return_or_raise(self, turn: Mapping[str, Any]) -> Any:
        """Return the handler's result from its last turn, or raise its error as an exception of the package or a builtin."""
        if "returned" in turn:
            try:
                return _YieldDecoder(self._known).decode_json(turn["returned"])
            except (KeyError, TypeError, ValueError) as error:
                turn = {"raised": "HandlerError", "text": f"its return value is not JSON: {error}"}
        kind, text, thrown = turn["raised"], turn["text"], self._thrown
        if thrown is not None and _error_text_and_kind(thrown) == (text, kind):
            raise thrown
        if kind == "HandlerError" or turn.get("lost"):
            msg = f"the sandbox ended the handler {self._name!r}: {text}"
            raise HandlerError(msg, kind=kind, location=f"{self.file}:{self.line}")
        if kind in OURS:
            raise OURS[kind](text)
        own = getattr(builtins, kind, None)
        if isinstance(own, type) and issubclass(own, Exception) and not issubclass(own, UnicodeError | StopIteration):
            # The others need more than a text, or would end this generator.
            raise own(_parse_key_error_text(text) if own is KeyError else text)
        msg = f"{kind}: {text}"
        raise RuntimeError(msg)

    # --- answers and host calls ---------------------------------------------------------------------------------------

    def _encode_for_sandbox(self, value: Any) -> Any:
        """Encode the result of a yield for the sandbox; states are stored and sent by number."""
        if isinstance(value, y.StepResult):
            return ["StepResult", self._encode_step_result(value)]
        return _encode_value(value, self._register_state)

    def _encode_step_result(self, result: y.StepResult) -> dict[str, Any]:
        """Return the members of a ``StepResult``, encoded for the sandbox; its state is stored and sent by number."""
        last = result.tool_result
        return {
            "agent_state": _encode_value(result.agent_state, self._register_state),
            "tool_results": _encode_value(result.tool_results),
            "tool_result": _encode_value(last),
            **_encode_attributes(result, "steps_complete", "text"),
            "n_responses": _encode_value(result.n_responses),
            "value": _encode_value(result.value, self._register_state),
            "output": _encode_value(result.output),
        }

    def _register_state(self, state: AgentState) -> int:
        """Store a state, unless it is the latest, and return the number of the latest, by which the sandbox fetches its fields."""
        if self._states[-1] is not state:
            self._states.append(state)
        return len(self._states) - 1

    def _queue_log_call(self, log_call: Callable[[], None]) -> None:
        """Queue a log line or notification until the end of the turn, whose thread is not the run's; raise ``ValueError`` for too many."""
        if len(self._notes) >= MAX_NOTES:
            msg = f"a handler may log at most {MAX_NOTES:,} lines between two yields"
            raise ValueError(msg)
        self._notes.append(log_call)

    def _validate_and_count_log_data(self, message: Any, data: Any) -> tuple[str, Any]:
        """Count the size of a log line or notification, and return its text and data as JSON; raise ``ValueError`` above the limit."""
        text = message if isinstance(message, str) else json.dumps(thaw_plain(message))
        check_depth_and_size(data, self._limits.value)
        given = thaw_plain(data)
        self._noted += len(text) + len(json.dumps(given))
        if self._noted > self._limits.value:
            msg = f"a handler may log at most {self._limits.value:,} characters between two yields"
            raise ValueError(msg)
        return replace_lone_surrogates(text), freeze(_replace_nested_surrogates(given))

    def _flush_log(self) -> None:
        """Write the queued notes and the new output of the turn to the run's log."""
        notes, self._notes, self._noted = self._notes, [], 0
        for tell in notes:
            tell()
        printed = "" if self._session is None else self._session.printed
        if len(printed) > self._shown:
            self._ctx.logger.info(replace_lone_surrogates(printed[self._shown :].rstrip("\n")))
            self._shown = len(printed)

    def _answer_host_call(self, args: Sequence[Any]) -> CallAnswer:
        """Perform a host call of the handler, which is not a yield, and return its result or its error as the answer."""
        try:
            # Checked first: a few lists that contain each other twice have an endless text.
            check_depth_and_size(args, self._limits.value)
            what, *given = args
            answer = self._perform_host_call(str(what), given)
            self._bytes.add(answer)
            return CallAnswer(answer)
        except TooManyBytes:
            raise
        except Exception as error:  # noqa: BLE001 - any error of an untrusted call is raised in the handler
            words = replace_lone_surrogates(str(error))
            self._bytes.add(words)
            return CallAnswer(words, "ValueError")

    def _perform_host_call(self, name: str, args: Sequence[Any]) -> Any:  # noqa: C901 - one for each thing that may be asked
        """Return the encoded result of a host call, such as ``now``; queue a ``log`` or ``notify``. Raise ``ValueError`` for another *name*."""
        ctx = self._ctx
        match name:
            case "begin":
                return self._encode_context()
            case "now":
                return ["time", self._now.isoformat()]
            case "message_history" | "view":
                return self._record_and_encode_new_messages(getattr(self._states[args[0]], name))
            case "inherited_messages" | "prompt_messages":
                return self._record_and_encode_new_messages(getattr(ctx, name))
            case "context" | "system_prompt":
                return ["json", thaw(getattr(self._states[args[0]], name))]
            case "tool_definitions":
                found = self._states[args[0]].tool_definitions
                return ["json", {name: to_json(spec) for name, spec in found.items()}]
            case "log":
                level, message, data = args
                tell = getattr(ctx.logger, {"debug": "debug", "info": "info", "warning": "warning"}.get(level, "error"))
                message, data = self._validate_and_count_log_data(message, dict(data))
                return self._queue_log_call(
                    lambda: tell(message, **{key: one for key, one in data.items() if key != "message"})
                )
            case "notify":
                message, data = self._validate_and_count_log_data(*args)
                return self._queue_log_call(lambda: ctx.notify(message, data))
            case "random":
                return _draw_random(ctx.random, *args)
            case _:
                msg = f"the host has no {name!r}"
                raise ValueError(msg)

    def _encode_context(self) -> dict[str, Any]:
        """Return the fields of the step context that the sandbox needs at its start, encoded."""
        ctx = self._ctx
        params = ctx.params
        told = _encode_value(params)
        if told[0] == "json":
            schema = self._known.params_of.get(self._name)
            if schema is not None and isinstance(told[1], Mapping):
                told = _ParamsEncoder(self._known.schemas, schema).encode(schema, told[1])
        return {
            **_encode_attributes(ctx, "prompt", "model", "is_asked"),
            "params": told,
            "agent_state": _encode_value(ctx.agent_state, self._register_state),
        }

    def _record_and_encode_new_messages(self, messages: Iterable[Message]) -> list[Any]:
        """Record *messages* as sent, and return how many leading ones the sandbox already had, and the others encoded."""
        now = list(messages)
        same = 0
        for old, new in zip(self._sent, now, strict=False):
            if old is not new:
                break
            same += 1
        self._sent = now
        return [same, [_encode_value(message) for message in now[same:]]]


def _parse_key_error_text(text: str) -> Any:
    """Return the key of a ``KeyError``, parsed from its text; the text itself if it is not a literal."""
    if len(text) > MAX_KEY_CHARS:
        return text
    try:
        return ast.literal_eval(text)
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return text


def _draw_random(random: Random, method: Any, args: Any) -> Any:
    """Return a random value, or for a collection random indices, drawn from the run's generator; raise ``ValueError`` for another *method*."""
    match method:
        case "random" | "uniform" | "randint" | "randrange" | "gauss" | "getrandbits":
            if method == "getrandbits" and not 0 <= args[0] <= 4096:  # noqa: PLR2004 - no text of the handler's makes a number of gigabytes
                msg = "getrandbits takes 0 to 4096 bits"
                raise ValueError(msg)
            return getattr(random, method)(*args)
        case "choice":
            return random.choice(range(args[0]))
        case "sample":
            return random.sample(range(args[0]), _require_draw_count(args[1]))
        case "shuffle":
            order = list(range(_require_draw_count(args[0])))
            random.shuffle(order)
            return order
        case _:
            msg = f"ctx.random has no {method!r}"
            raise ValueError(msg)


def _require_draw_count(number: int) -> int:
    """Return *number*; raise ``ValueError`` if it is above the limit of items that one draw creates."""
    if number > MAX_DRAWN_PLACES:
        msg = f"ctx.random draws at most {MAX_DRAWN_PLACES:,} items at once"
        raise ValueError(msg)
    return number


def _error_text_and_kind(error: BaseException) -> tuple[str, str]:
    """Return the message of an error, and the name of the sandbox exception that represents it."""
    kind = next((own for ours, own in THEIRS if isinstance(error, ours)), "OSError")
    return replace_lone_surrogates(str(error)), kind


def _encode_value(value: Any, register_state: Callable[[AgentState], int] | None = None) -> Any:  # noqa: C901, PLR0912 - one for each kind
    """Encode a value for the sandbox as its kind and JSON. *register_state* stores a state and returns its number."""
    match value:
        case None | str() | int() | float() | bool():
            return ["json", value]
        case datetime():
            return ["time", value.isoformat()]
        case AgentState():
            return ["AgentState", _encode_state(value, 0 if register_state is None else register_state(value))]
        case ToolResult():
            return ["ToolResult", _encode_attributes(value, *RESULT_ATTRIBUTES)]
        case ChildResult():
            return ["ChildResult", _encode_child_result(value)]
        case ChildRef():
            return ["ChildRef", _encode_attributes(value, "id", "agent_id", "path")]
        case Waited():
            return ["Waited", {"done": _encode_value(value.done), "open": _encode_value(value.open)}]
        case ModelReply():
            calls = [_encode_value(part) for part in value.tool_calls]
            return [
                "object",
                {
                    **_encode_attributes(value, "text"),
                    "tool_calls": ["list", calls],
                    "stop_reason": ["json", str(value.stop_reason)],
                },
            ]
        case UserMessage() | AssistantMessage() | ToolMessage():
            return [type(value).__name__, _encode_message(value)]
        case ToolCallPart():
            return ["ToolCallPart", _encode_attributes(value, "tool_call_id", "tool_name", "input")]
        case StepEngineError():
            return ["object", {"message": ["json", value.message], "kind": ["json", type(value).__name__]}]
        case JsonDict():
            return ["json", thaw(value)]
        case tuple():
            return ["tuple", [_encode_value(one) for one in value]]
        case Mapping() | list():
            return ["json", thaw(freeze(value))]
        case _:
            pass
    dump = getattr(value, "model_dump", None)
    return ["json", thaw(freeze(value))] if dump is None else _encode_model(value, dump(mode="json", by_alias=False))


class _ParamsEncoder:
    """Encodes JSON for the sandbox as objects of a file's schema classes, as pydantic builds them."""

    def __init__(self, schemas: Mapping[str, SchemaClass], top: str) -> None:
        self._schemas = schemas
        # The definitions of the whole schema: the rule of a typed dict for other members depends on its model.
        self._definitions: Any = thaw(schemas[top].json_schema.get("$defs", {}))
        self._definitions.setdefault(top, thaw(schemas[top].json_schema))
        self._compiled: dict[str, JsonSchema] = {}

    def encode(self, name: str, value: Mapping[str, Any]) -> Any:
        """Encode a value of the schema class *name*. Members that it does not allow are dropped."""
        known = self._schemas[name]
        fields = {alias: field for field, alias in known.aliases.items()}
        allows_others = self._definitions[name].get("additionalProperties") is True
        given: dict[str, Any] = {}
        for key, one in value.items():
            field = fields.get(key, key)
            how = known.models.get(field)
            if field in _python_field_names(known) or allows_others:
                given[field] = ["json", one] if how is None else self._encode_by_shape(_parse_shape(how), one)
        defaults = {field: ["json", thaw(one)] for field, one in known.defaults.items()}
        made = {**defaults, **given}
        order = dict.fromkeys([*_python_field_names(known), *made])
        ordered = {field: made[field] for field in order if field in made}
        return ["dict", ordered] if known.kind == "typed_dict" else ["record", [name, ordered]]

    def _encode_by_shape(self, shape: Sequence[Any], value: Any) -> Any:
        """Encode a value by the shape of its field; members of schema classes become their objects."""
        match shape:
            case ["class", name] if isinstance(value, Mapping):
                return self.encode(name, value)
            case ["list", inner] if isinstance(value, list):
                return ["list", [self._encode_by_shape(inner, one) for one in value]]
            case ["dict", inner] if isinstance(value, Mapping):
                return ["dict", {key: self._encode_by_shape(inner, one) for key, one in value.items()}]
            case ["tuple", inner] if isinstance(value, list) and len(value) == len(inner):
                return ["tuple", [self._encode_by_shape(one, member) for one, member in zip(inner, value, strict=True)]]
            case ["union", members]:
                counts = [self._count_matching_fields(one, value) for one in members]
                fits = [count for count in counts if count is not None]
                # Of the types that a value fits, pydantic chooses the first one with the most fields set.
                return self._encode_by_shape(members[counts.index(max(fits))], value) if fits else ["json", value]
            case _:
                return ["json", value]

    def _count_matching_fields(self, shape: Sequence[Any], value: Any) -> int | None:
        """Return the number of fields of schema classes that a value sets; ``None`` if it does not fit."""
        parts: list[tuple[Any, Any]]
        count = 0
        match shape:
            case ["class", name] if isinstance(value, Mapping) and self._matches_schema(name, value):
                known = self._schemas[name]
                fields = {known.aliases.get(field, field): field for field in _python_field_names(known)}
                given = [(fields[key], one) for key, one in value.items() if key in fields]
                count = len(given)
                parts = [(_parse_shape(known.models[field]), one) for field, one in given if field in known.models]
            case ["list", inner] if isinstance(value, list):
                parts = [(inner, one) for one in value]
            case ["dict", inner] if isinstance(value, Mapping):
                parts = [(inner, one) for one in value.values()]
            case ["tuple", inner] if isinstance(value, list) and len(value) == len(inner):
                parts = list(zip(inner, value, strict=True))
            case ["union", members]:
                counts = [found for one in members if (found := self._count_matching_fields(one, value)) is not None]
                return max(counts, default=None)
            case ["as it is", _]:
                parts = []
            case _:
                return None
        inner_counts = [self._count_matching_fields(inner, one) for inner, one in parts]
        return None if None in inner_counts else count + sum(filter(None, inner_counts))

    def _matches_schema(self, name: str, value: Any) -> bool:
        """Return True if a value is valid for the schema class *name*; compile its schema once."""
        check = self._compiled.get(name)
        if check is None:
            schema = {"$ref": f"#/$defs/{name}", "$defs": self._definitions}
            check = self._compiled[name] = JsonSchema(f"class {name!r}", schema)
        return not check.issues(value)


def _encode_model(value: Any, plain: Any) -> Any:
    """Encode a pydantic model of the host, whose class the sandbox may not know; *plain* is its JSON."""
    if hasattr(value, "model_dump") and isinstance(plain, Mapping):
        return [
            "record",
            [
                type(value).__name__,
                {name: _encode_model(getattr(value, name, one), one) for name, one in plain.items()},
            ],
        ]
    if isinstance(value, list | tuple) and isinstance(plain, list):
        return ["list", [_encode_model(inner, one) for inner, one in zip(value, plain, strict=True)]]
    if isinstance(value, Mapping) and isinstance(plain, Mapping):
        return ["dict", {name: _encode_model(value.get(name, one), one) for name, one in plain.items()}]
    return ["json", plain]


STATE_ATTRIBUTES = (
    *("run_id", "agent_id", "parent_id", "steps_remaining", "step_index", "credits_used", "next_call"),
    *("ancestor_run_ids", "child_run_ids"),
)
RESULT_ATTRIBUTES = ("tool_name", "tool_call_id", "status", "is_error", "text", "data", "structured")


def _encode_attributes(value: Any, *names: str) -> dict[str, Any]:
    """Encode attributes that are JSON, or tuples of it, by their names."""
    return {name: ["json", thaw(getattr(value, name))] for name in names}


def _encode_state(state: AgentState, state_number: int) -> dict[str, Any]:
    """Return the members of a state, encoded for the sandbox, with its number, by which the sandbox fetches its history."""
    return {
        **_encode_attributes(state, *STATE_ATTRIBUTES),
        "output": _encode_value(state.output),
        "cost": ["json", None if state.cost is None else float(state.cost)],
        "_se_number": ["json", state_number],
    }


def _encode_child_result(child: ChildResult[Any]) -> dict[str, Any]:
    """Return the members of a child's result, encoded for the sandbox."""
    return {
        **_encode_attributes(child, "agent_id", "run_id", "is_error", "why", "text"),
        "status": ["json", child.status.value],
        "output": _encode_value(child.output),
        "error": _encode_value(child.error),
    }


def _encode_message(message: Message) -> dict[str, Any]:
    """Encode the attributes of a message for the sandbox, each as its kind and JSON."""
    told = {**_encode_attributes(message, "role", "text"), "_se_stored": ["json", to_json(message)]}
    if isinstance(message, ToolMessage):
        told |= _encode_attributes(message, "tool_name", "tool_call_id", "status", "is_error")
        told |= {"result": _encode_value(message.result), "tags": ["json", []]}
    else:
        told |= _encode_attributes(message, "tags")
    if isinstance(message, AssistantMessage):
        told |= _encode_attributes(message, "text_without_thoughts", "thinking")
        told["tool_calls"] = ["list", [_encode_value(call) for call in message.tool_calls]]
    told["content"] = ["json", told["_se_stored"][1].get("content")]
    return told


# --- yields of the handler --------------------------------------------------------------------------------------------


def _sandbox_value_to_json(value: Any) -> Any:
    """
    Return a value of the sandbox encoded as JSON; raise ``TypeError`` for other types.

    A list or tuple is ``{"list": [...]}``, a dict ``{"dict": [[key, value], ...]}``, an object ``{"object": name, "has": {...}}`` and a
    datetime its text. Other values, such as sets and bytes, raise ``TypeError``.
    """
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, int | float | None):
        return _require_json_number(value)
    if isinstance(value, list | tuple):
        return {"list": [_sandbox_value_to_json(one) for one in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_dict_key_to_json(key), _sandbox_value_to_json(one)] for key, one in value.items()]}
    if isinstance(value, datetime):
        return value.isoformat()
    name, attributes = _read_sandbox_object(value)
    if name:
        return {"object": name, "has": {str(key): _sandbox_value_to_json(one) for key, one in attributes.items()}}
    msg = f"a value of type {type(value).__name__} is not JSON"
    raise TypeError(msg)


def _dict_key_to_json(key: Any) -> str:
    """Return a dict key as the text that JSON has for it; raise ``TypeError`` for a key that JSON cannot have."""
    if isinstance(key, str):
        return replace_lone_surrogates(key)
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    msg = f"a key of type {type(key).__name__} is not JSON"
    raise TypeError(msg)


SENTINEL = "_se_Sentinel"


class _YieldDecoder:
    """Decodes the yields of a handler; an invalid one raises ``BadYield``."""

    def __init__(self, agent_text: AgentText, offered: Collection[str] = ()) -> None:
        self._known = agent_text
        self._offered = offered

    def decode_yield(self, encoded: Any) -> Any:
        """Return the yieldable that a handler yielded, or JSON for a value that is not an object; raise ``BadYield`` for an invalid one."""
        if isinstance(encoded, Mapping) and "wrong" in encoded:
            raise BadYield(str(encoded["wrong"]))
        if not isinstance(encoded, Mapping) or "object" not in encoded:
            try:
                return self.decode_json(encoded)  # the machine refuses it with its own message
            except (KeyError, TypeError, ValueError) as error:
                msg = f"the yielded value is not JSON: {error}"
                raise BadYield(msg) from error
        name, attributes = encoded["object"], encoded["has"]
        if name not in MADE:
            msg = f"a handler cannot yield an object of the class {name!r}; it can yield {list_names(sorted({*MADE} - {SENTINEL}), name)}, STEP or STEP_ALL"
            raise BadYield(msg)
        own = getattr(self, f"_make_{name.lower().strip('_')}", None)
        try:
            return own(attributes) if own is not None else self._make_yieldable(MADE[name], attributes)
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{name}: {error}"
            raise BadYield(msg) from error

    def decode_json(self, encoded: Any) -> Any:
        """Return a value as JSON: the fields of schema objects and the stored form of messages."""
        if not isinstance(encoded, Mapping):
            return encoded
        if "list" in encoded:
            return [self.decode_json(one) for one in encoded["list"]]
        if "dict" in encoded:
            return {key: self.decode_json(one) for key, one in encoded["dict"]}
        name, attributes = encoded["object"], encoded["has"]
        if name == "_se_Record":
            kind = self._known.schemas.get(str(attributes.get("_se_kind")))
            names = {} if kind is None else kind.aliases
            order = self.decode_json(attributes["_se_order"])
            return {
                names.get(field, str(field)): self.decode_json(attributes[field])
                for field in order
                if field in attributes
            }
        if "_se_stored" in attributes:
            return _message_as_tool_input(self.decode_json(attributes["_se_stored"]))
        return {key: self.decode_json(one) for key, one in attributes.items() if not key.startswith("_")}

    def _decode_fields(self, attributes: Mapping[str, Any], *names: str) -> dict[str, Any]:
        """Return those of *names* that are in *attributes*, decoded as JSON."""
        return {name: self.decode_json(attributes[name]) for name in names if name in attributes}

    def _get_encoded_items(self, encoded: Any) -> list[Any]:
        """Return the items of an encoded list without decoding them; raise ``TypeError`` for another value."""
        if not isinstance(encoded, Mapping) or "list" not in encoded:
            msg = f"expected a list, not {self.decode_json(encoded)!r}"
            raise TypeError(msg)
        return list(encoded["list"])

    def _decode_agent_id(self, encoded: Any) -> Any:
        """Return the id of an encoded ``AgentDefinition``; decode any other value as JSON."""
        return (
            encoded["has"]["id"]
            if isinstance(encoded, Mapping) and encoded.get("object") == "AgentDefinition"
            else self.decode_json(encoded)
        )

    def _make_yieldable(self, kind: type, attributes: Mapping[str, Any]) -> Any:
        """Return a yieldable of a class whose fields are all JSON."""
        return kind(**self._decode_fields(attributes, *[attribute.name for attribute in attrs.fields(kind)]))

    def _make_se_sentinel(self, attributes: Mapping[str, Any]) -> Any:
        """Return ``STEP`` or ``STEP_ALL``."""
        return {"STEP": y.STEP, "STEP_ALL": y.STEP_ALL}[attributes["name"]]

    def _make_toolcall(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``ToolCall``; its ``include_tool_call=False`` is ignored unless the agent's definition has the tool."""
        fields = self._decode_fields(attributes, "tool", "input", "include_tool_call")
        # A hidden call reaches every tool of an engine, but an untrusted agent may call only the tools of its definition.
        if fields.get("include_tool_call") is False and fields["tool"] not in self._offered:
            del fields["include_tool_call"]
        return y.ToolCall(**fields)

    def _make_agentcall(self, attributes: Mapping[str, Any]) -> Any:
        """Return an ``AgentCall`` from its encoded fields."""
        return y.AgentCall(
            self._decode_agent_id(attributes["agent"]), **self._decode_fields(attributes, "prompt", "params")
        )

    def _make_parallel(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``Parallel`` of the decoded calls."""
        return y.Parallel(
            [self.decode_yield(one) for one in self._get_encoded_items(attributes["calls"])],
            **self._decode_fields(attributes, "fail_fast", "concurrency"),
        )

    def _make_race(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``Race`` of the decoded members."""
        return y.Race([self.decode_yield(one) for one in self._get_encoded_items(attributes["members"])])

    def _make_sleep(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``Sleep`` for some seconds or until a time."""
        until = attributes.get("until")
        return y.Sleep(
            self.decode_json(attributes.get("seconds")), until=None if until is None else datetime.fromisoformat(until)
        )

    def _make_receive(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``Receive`` with its topic, timeout and schema."""
        return y.Receive(
            self.decode_json(attributes["topic"]),
            self.decode_json(attributes.get("timeout")),
            schema=self._decode_schema(attributes.get("schema")),
        )

    def _decode_schema(self, encoded: Any) -> Any:
        """Return the JSON Schema of an encoded schema class; decode any other value as JSON."""
        if isinstance(encoded, Mapping) and encoded.get("object") == "_se_Schema":
            return thaw(self._known.schemas[encoded["has"]["name"]].json_schema)
        return self.decode_json(encoded)

    def _make_start(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``Start`` of the decoded calls."""
        return y.Start(
            *[self.decode_yield(one) for one in self._get_encoded_items(attributes["calls"])],
            on_return=self.decode_json(attributes["on_return"]),
        )

    def _decode_child_ref(self, encoded: Any) -> Any:
        """Return an encoded ``ChildRef`` as an object; decode any other value as JSON."""
        if isinstance(encoded, Mapping) and encoded.get("object") == "ChildRef":
            return ChildRef(**{name: str(encoded["has"][name]) for name in ("id", "agent_id", "path")})
        return self.decode_json(encoded)

    def _make_wait(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``Wait`` for the decoded references to children."""
        return y.Wait(
            *[self._decode_child_ref(one) for one in self._get_encoded_items(attributes["refs"])],
            **self._decode_fields(attributes, "need", "timeout"),
        )

    def _make_send(self, attributes: Mapping[str, Any]) -> Any:
        return y.Send(
            self._decode_child_ref(attributes["ref"]),
            self.decode_json(attributes["value"]),
            topic=self.decode_json(attributes["topic"]),
        )

    def _make_cancel(self, attributes: Mapping[str, Any]) -> Any:
        return y.Cancel(self._decode_child_ref(attributes["ref"]), self.decode_json(attributes["reason"]))

    def _make_stepwith(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``StepWith`` with its model, tools and allowed settings."""
        return y.StepWith(
            **self._decode_fields(attributes, "model", "tools", "tool_choice"),
            settings=self._decode_model_settings(attributes.get("settings")),
        )

    def _decode_model_settings(self, encoded: Any) -> Any:
        """Decode model settings or ``None``; raise an error for other values and forbidden fields."""
        if isinstance(encoded, Mapping) and encoded.get("object") == "ModelSettings":
            given = {str(name): self._decode_setting(one) for name, one in encoded["has"]["fields"]["dict"]}
            return _make_untrusted_model_settings(given)
        settings = self.decode_json(encoded)
        if settings is not None:
            msg = "settings are ModelSettings(...)"
            raise TypeError(msg)
        return None

    def _decode_setting(self, encoded: Any) -> Any:
        """Return the value of one setting: a ``Thinking`` for its object, other values as JSON."""
        if isinstance(encoded, Mapping) and encoded.get("object") == "Thinking":
            return Thinking(*self.decode_json(encoded["has"]["words"]), **self.decode_json(encoded["has"]["fields"]))
        return self.decode_json(encoded)

    def _make_complete(self, attributes: Mapping[str, Any]) -> Any:
        """Return a ``Complete`` of a prompt or of messages."""
        messages = self.decode_json(attributes["messages"])
        given = messages if isinstance(messages, str) else list(AgentState.from_dicts(messages).message_history)
        return y.Complete(
            given,
            **self._decode_fields(attributes, "model", "system_prompt"),
            settings=self._decode_model_settings(attributes.get("settings")),
        )


def _message_as_tool_input(message: Any) -> Any:
    """Return the stored form of a message of the sandbox as JSON for a tool's input, without its version."""
    if not isinstance(message, Mapping):
        msg = f"the stored form of a message is a dict, not {_short_repr(message)}; do not change attributes that start with '_se_'"
        raise TypeError(msg)
    kind = {"user_message": UserMessage, "assistant_message": AssistantMessage}.get(str(message.get("type")))
    if kind is not None and isinstance(message.get("content"), str):
        message = to_json(kind(message["content"], tags=message.get("tags", ())))
    return {name: value for name, value in message.items() if name != "stepengine"}


MADE: Mapping[str, type] = {
    SENTINEL if row.kind is y.Sentinel else row.name: row.kind for row in y.YIELDS if row.for_sandbox
}
"""The class of each yieldable, by the name of its class in the sandbox."""
