"""
The values that a handler may yield.

One rule: ``yield x`` is sent a ``StepResult``; ``yield from x`` gives x's own typed value and raises on failure. Every
yieldable is therefore iterable: iterating it yields the value itself once and unpacks the answer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime, timedelta
from enum import Enum
from functools import cached_property
from types import CoroutineType, GeneratorType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    cast,
    final,
    get_args,
    get_origin,
    overload,
)

import attrs
from attrs import frozen
from typing_extensions import TypeVar

from stepengine.data.checks import (
    CHOICE,
    TEXT,
    FieldCheck,
    allow_none,
    find_iteration_mistake,
    make_instance_check,
    make_validator,
    with_keyword_hints,
)
from stepengine.data.definition import AgentDefinition
from stepengine.data.faults import format_value
from stepengine.data.json import (
    NO_JSON,
    JsonDict,
    JsonValue,
    freeze,
    freeze_object,
    parse_json_answer,
    require_storable_text,
)
from stepengine.data.messages import AssistantMessage, Message, ToolMessage, ToolResult, UserMessage
from stepengine.data.models import ModelReply, ModelSettings
from stepengine.data.schemas import find_keyword_problem
from stepengine.data.state import AgentState, ChildResult, Waited
from stepengine.data.tools import ToolChoice, ToolLike, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.typed_values import is_model, list_validation_problems, model_from_json, model_to_json
from stepengine.data.waits import ChildRef
from stepengine.errors import BadYield, DataError, OutputMissing, PerformError, ToolError

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Out = TypeVar("Out", default=Any)
Reply = TypeVar("Reply", default=ModelReply)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")


class _Iterated:
    """
    The protocol that ``yield from`` needs of a value other than a generator: ``__iter__``.

    The other methods of a generator are only declared, for type checkers such as pyrefly that require them.
    """

    __slots__ = ()
    _not_json: ClassVar[str] = "it was not yielded: write `yield from` before it"

    if TYPE_CHECKING:

        def __next__(self) -> Yieldable: ...
        def send(self, value: StepResult, /) -> Yieldable: ...
        def throw(self, typ: Any, val: Any = ..., tb: Any = ..., /) -> Yieldable: ...
        def close(self) -> None: ...


class Member(_Iterated, Generic[T_co]):
    """A possible member of ``Parallel``; *T_co* is the type of its entry in the result tuple."""

    __slots__ = ()


class _Dumps(Protocol):
    def model_dump(self) -> Any: ...


Params: TypeAlias = "Mapping[str, Any] | _Dumps | None"
"""The params of a child: a JSON object or a pydantic model."""


def get_tool_name(tool: str | ToolLike) -> str:
    """
    Return the name of *tool*, a ``Tool`` or a name; raise ``BadYield`` for anything else.

    Raises:
        BadYield: For any other object, and for an empty name.
    """
    name = tool if isinstance(tool, str) else getattr(getattr(tool, "spec", None), "name", None)
    if not isinstance(name, str) or not name:
        msg = f"a tool must be a Tool or the name of a tool, not {tool!r}"
        raise BadYield(msg)
    return str(name)


def _freeze_tool_input(value: Mapping[str, object]) -> JsonDict:
    """Return the input of a call as an immutable JSON object, its messages in their stored form; raise ``BadYield`` for no mapping."""
    if isinstance(value, (dict, Mapping)):
        return freeze_object(
            {**value, "messages": _to_stored_messages(value["messages"])} if "messages" in value else value
        )
    msg = f"the input of a ToolCall must be an object such as {{'path': 'a.py'}}, not {value!r}"
    raise BadYield(msg)


def _to_stored_messages(messages: object) -> Any:
    """Return a history in its stored form, so that a handler can pass on its own."""
    from stepengine.data.codec import plain  # noqa: PLC0415 - the codec knows all of data

    if not isinstance(messages, list | tuple | Transcript):
        return messages
    return [plain(m) if isinstance(m, UserMessage | AssistantMessage | ToolMessage) else m for m in messages]


def _require_include_tool_call(value: bool) -> bool:  # noqa: FBT001 - a converter has one positional argument
    if value is True or value is False:
        return value
    msg = f"include_tool_call must be True or False, not {value!r}"
    raise BadYield(msg)


def _require_prompt(value: str) -> str:
    return _require_text(value, "a prompt or question")


def _require_text(value: str, name: str) -> str:
    """
    Return *value* if it is text that can be stored; ``""`` is valid.

    Raises:
        BadYield: For another type; the message calls the value *name*.
        DataError: For a text with lone surrogates.
    """
    if isinstance(value, str):
        return require_storable_text(value)
    msg = f"{name} must be text, not {value!r}"
    raise BadYield(msg)


def _require_optional_prompt(value: str | None) -> str:
    return "" if value is None else _require_prompt(value)


@with_keyword_hints
@frozen
class ToolCall(Member[ToolResult]):
    """
    Run one tool now, without a model call.

    ``yield from`` gives the ``ToolResult``.

    Attributes:
        tool: The tool's name; a ``Tool`` may be given.
        input: Its input, a JSON object.
        include_tool_call: Whether call and result enter the history, where the model has the tool. A
            control tool or spawning tool that it lacks leaves no trace there either way: providers refuse calls of tools
            that are not in the request. Any other tool that it lacks needs ``False``.

    Raises:
        ToolError: from ``yield from``, when the result is an error.
        ToolNotAvailable: at the yield, when the agent has no such tool.
        ToolInputError: at the yield, when the input does not fit the tool's schema.
    """

    tool: str = attrs.field(converter=get_tool_name)
    input: JsonDict = attrs.field(factory=JsonDict, converter=_freeze_tool_input)
    include_tool_call: bool = attrs.field(default=True, converter=_require_include_tool_call)

    def __iter__(self) -> Generator[Yieldable, StepResult, ToolResult]:
        result = (yield self).tool_result
        if result is None or result.is_error:
            text = "no result" if result is None else result.text
            msg = f"tool {self.tool!r} failed: {text}"
            raise ToolError(msg, tool_name=self.tool, result=result)
        return result


def _freeze_params(value: Params) -> JsonValue:
    """Return params, a mapping or a pydantic model, as immutable JSON; raise ``BadYield`` for anything else."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return freeze_object(value)
    if not is_model(value):
        msg = f"params must be a JSON object or a pydantic model, not {value!r}"
        raise BadYield(msg)
    return freeze_object(model_to_json(value))


@with_keyword_hints
@frozen
class AgentCall(Member["ChildResult[Out]"], Generic[Out]):
    """
    Run a child agent and wait for it.

    ``yield from`` gives the child's output.

    Attributes:
        agent: The id of a spawnable agent, or its definition.
        prompt: The child's prompt.
        params: The child's params, a JSON object.

    Raises:
        ChildError: from ``yield from``, when the child did not complete.
        LimitExceeded: at the yield, when ``max_total_children`` was set and has no room for it.
    """

    agent: str | AgentDefinition[Out]
    prompt: str = attrs.field(default="", converter=_require_optional_prompt)
    params: JsonValue = attrs.field(default=None, converter=_freeze_params)

    def __attrs_post_init__(self) -> None:
        agent: object = self.agent
        if not isinstance(agent, (str, AgentDefinition)) or agent == "":
            msg = f"an AgentCall needs an AgentDefinition or the id of a spawnable agent, not {self.agent!r}"
            raise BadYield(msg)

    @property
    def agent_id(self) -> str:
        """The id of the called agent."""
        return self.agent if isinstance(self.agent, str) else self.agent.id

    def __iter__(self) -> Generator[Yieldable, StepResult, Out]:
        child: ChildResult[Out] = (yield self).value
        return child.unwrap()


@frozen(init=False)
class Perform(Member["T_co | PerformError"], Generic[T_co]):
    """
    Any I/O of the author's: run once, its JSON result recorded, never run again on replay.

    ``Perform(fn, *args, **kwargs)``; *fn* may be sync or async, its result must be JSON, and what the handler gets is
    that JSON. ``Perform.idempotent(fn, ...)`` may be run again after a crash. ``yield from`` gives the value.

    Raises:
        PerformError: From ``yield from``, when *fn* raised, or returned a value that is not JSON.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_idempotent: bool
    is_trusted: bool

    @overload
    def __init__(self: Perform[T], fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def __init__(self: Perform[T], fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    def __init__(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> None:
        # By type: a function of the author may raise when it is asked for its class.
        if type(fn) is Sentinel or not callable(fn):
            if isinstance(fn, CoroutineType):
                fn.close()
            msg = (
                f"Perform needs a function and its arguments, not {fn!r}; write Perform(f, 3) instead of Perform(f(3))"
            )
            raise BadYield(msg)
        self.__attrs_init__(fn, args, JsonDict(kwargs), is_idempotent=False, is_trusted=False)

    @classmethod
    @overload
    def idempotent(cls, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Perform[T]: ...
    @classmethod
    @overload
    def idempotent(cls, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Perform[T]: ...
    @classmethod
    def idempotent(cls, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Perform[Any]:
        """Return a ``Perform`` that may be run again when a crash left its outcome unknown."""
        made: Perform[Any] = cls(fn, *args, **kwargs)
        object.__setattr__(made, "is_idempotent", True)
        return made

    def as_trusted(self) -> Perform[T_co]:
        """Return this ``Perform`` with a trusted result: it contains no text of third parties."""
        made = copy(self)
        object.__setattr__(made, "is_trusted", True)
        return made

    @property
    def name(self) -> str:
        """The qualified name of the function, as records show it."""
        try:
            fn = getattr(self.fn, "func", self.fn)
            return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
        except Exception:  # noqa: BLE001  (an object may raise any error)
            return f"{type(self.fn).__module__}.{type(self.fn).__qualname__}"

    def __iter__(self) -> Generator[Yieldable, StepResult, T_co]:
        value = (yield self).value
        if isinstance(value, PerformError):
            raise value
        return cast("T_co", value)


def _require_ask_options(value: Iterable[str]) -> tuple[str, ...]:
    """Return the options of an ``Ask`` as a tuple of texts; raise ``BadYield`` for a single option and for other values."""
    mistake = find_iteration_mistake(value)
    options = () if mistake else tuple(value)
    if mistake or not all(isinstance(o, str) for o in options):
        msg = f"the options of an Ask must be a list of strings, not {value!r}"
        raise BadYield(msg)
    if len(options) == 1:
        msg = f"Ask needs no options or at least two, not only {options[0]!r}"
        raise BadYield(msg)
    return tuple(map(require_storable_text, options))


def _require_question_key(value: str | None) -> str | None:
    """Return a question's name; raise if it has other signs or could collide with an automatic id."""
    if value is None:
        return None
    given: object = value
    plain = value.replace("_", "-").replace("-", "a") if isinstance(given, str) else ""
    if not (plain.isascii() and plain.isalnum()) or (value[0] == "q" and value[1:].isdecimal()):
        msg = f"the key of an Ask must be a name of letters, digits, '_' and '-' (but not q and a number, such as 'q1'), not {value!r}"
        raise BadYield(msg)
    return value


@with_keyword_hints
@frozen
class Ask(Member[str]):
    """
    Ask a person; the run suspends until someone answers, in this process or later.

    ``yield from`` gives the answer as a string, ``""`` when the person declined; ``StepResult.value`` of a bare yield is
    the same.

    Attributes:
        question: The question's text.
        options: Choices; at least two, or none for free text.
        multi_select: Whether several may be chosen.
        details: Free JSON to show beside the question.
        allow_text: Whether another text than the options is an answer; otherwise it is refused, and the options are named.
        key: The question's name, of letters, digits, ``_`` and ``-``: answers go by it (``{"size": "42"}``, of a child
            ``{"2:size": "42"}``) instead of a number that changes with the code. A run asks under one name only once.
    """

    question: str = attrs.field(converter=_require_prompt)
    options: tuple[str, ...] = attrs.field(default=(), converter=_require_ask_options)
    multi_select: bool = attrs.field(default=False, kw_only=True)
    details: JsonValue = attrs.field(default=None, converter=freeze, kw_only=True)
    allow_text: bool = attrs.field(default=False, kw_only=True)
    key: str | None = attrs.field(default=None, converter=_require_question_key, kw_only=True)

    def __iter__(self) -> Generator[Yieldable, StepResult, str]:
        value: str = (yield self).value
        return value


def _describe_non_member(value: object) -> str:
    """Return the description of a value that ``Parallel`` cannot hold, with a hint at the correct one."""
    if isinstance(value, GeneratorType):
        if value.gi_code.co_name == "<genexpr>":
            return "a generator; write Parallel([...]) or Parallel(*...)"
        return "a generator; `call(...)` works only with `yield from`, so write ToolCall(name, {...})"
    said = repr(value)
    # Addresses differ between processes, and this text is recorded in journals.
    return said if " at 0x" not in said else f"a {type(value).__name__}"


def _require_valid_members(parent_name: str, values: Iterable[object]) -> None:
    """Raise ``BadYield`` unless all *values* can be members of ``Parallel`` or ``Race``; *parent_name* is in the message."""
    for value in values:
        if not isinstance(value, Member):
            *names, last = [row.name for row in YIELDS if row.is_member]
            msg = f"{parent_name} can contain {', '.join(names)} and {last}, not {_describe_non_member(value)}"
            raise BadYield(msg)


def _require_concurrency(value: int | None) -> int | None:
    number: object = value
    if value is None or (isinstance(number, int) and not isinstance(number, bool) and number >= 1):
        return value
    msg = f"the concurrency of a Parallel must be an integer of at least 1, or None, not {value!r}"
    raise BadYield(msg)


@frozen(init=False)
class Parallel(_Iterated, Generic[T_co]):
    """
    Several calls at once.

    ``Parallel(*calls)`` of ``ToolCall``, ``AgentCall``, ``Perform``, ``Ask``, ``Sleep``, ``Receive``, ``Wait`` and ``Race``; one
    list of them is accepted too.
    ``yield from`` gives a tuple in order: ``ToolResult``, ``ChildResult``, value or ``PerformError``, answer. A failure
    stays inside its own entry. It counts as one action.

    Attributes:
        calls: The members.
        fail_fast: Cancel the other children as soon as one member fails, a tool call with an error result included; each
            cancelled child has an entry that says so.
        concurrency: How many members are under way at once, at least 1: as soon as one has ended, the next one begins. All
            of a race begin together. By default all begin at once, of children ``max_concurrent_children`` (8) and of tool calls
            ``max_concurrent_tools`` (all). A number replaces these defaults, never a limit that was set.
            After a crash only members that had started are in doubt.
        program_lines: The line of each member in the program that requests them (``make_program_parallel``); ``()`` without a program.

    Raises:
        BadYield: for anything else inside, such as ``STEP``, and for a *concurrency* below 1.
        LimitExceeded: at the yield, when a limit that was set (``max_children``, ``max_total_children``) has no room for all
            of its children; nothing has started.
    """

    calls: tuple[Member[Any], ...]
    fail_fast: bool
    concurrency: int | None
    program_lines: tuple[int, ...] = attrs.field(default=(), eq=False, repr=False)

    @overload
    def __init__(self: Parallel[tuple[()]], *, fail_fast: bool = ..., concurrency: int | None = ...) -> None: ...
    @overload
    def __init__(
        self: Parallel[tuple[A]], a: Member[A], /, *, fail_fast: bool = ..., concurrency: int | None = ...
    ) -> None: ...
    @overload
    def __init__(
        self: Parallel[tuple[A, B]],
        a: Member[A],
        b: Member[B],
        /,
        *,
        fail_fast: bool = ...,
        concurrency: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Parallel[tuple[A, B, C]],
        a: Member[A],
        b: Member[B],
        c: Member[C],
        /,
        *,
        fail_fast: bool = ...,
        concurrency: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Parallel[tuple[A, B, C, D]],
        a: Member[A],
        b: Member[B],
        c: Member[C],
        d: Member[D],
        /,
        *,
        fail_fast: bool = ...,
        concurrency: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Parallel[tuple[A, B, C, D, E]],
        a: Member[A],
        b: Member[B],
        c: Member[C],
        d: Member[D],
        e: Member[E],
        /,
        *,
        fail_fast: bool = ...,
        concurrency: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Parallel[tuple[A, ...]], *calls: Member[A], fail_fast: bool = ..., concurrency: int | None = ...
    ) -> None: ...
    @overload
    def __init__(
        self: Parallel[tuple[A, ...]],
        calls: Sequence[Member[A]],
        /,
        *,
        fail_fast: bool = ...,
        concurrency: int | None = ...,
    ) -> None: ...
    def __init__(self, *calls: Any, fail_fast: bool = False, concurrency: int | None = None) -> None:
        members = tuple(calls[0]) if len(calls) == 1 and isinstance(calls[0], list | tuple) else calls
        _require_valid_members("Parallel", members)
        self.__attrs_init__(members, fail_fast, _require_concurrency(concurrency))

    def __iter__(self) -> Generator[Yieldable, StepResult, T_co]:
        value: T_co = (yield self).value
        return value


def make_program_parallel(calls: Sequence[Member[Any]], lines: Sequence[int]) -> Parallel[tuple[Any, ...]]:
    """
    Return the ``Parallel`` of a program's simultaneous calls, with the line of each, from 1; 0 for an unknown line.

    The lines are recorded, so that viewers show each call at its line. Nothing else depends on them.
    """
    asked: Parallel[tuple[Any, ...]] = object.__new__(Parallel)
    asked.__attrs_init__(tuple(calls), fail_fast=False, concurrency=None, program_lines=tuple(lines))
    return asked


# --- waiting ----------------------------------------------------------------------------------------------------------

MAX_PAUSE_SECONDS = 100 * 365.25 * 24 * 3600
"""A hundred years in seconds: a longer pause is a mistake, and may exceed the range of dates."""
LAST_YEAR = 9_000
"""``datetime`` ends with the year 9999: a later date may overflow in another time zone or with a timeout added."""
MAX_TOPIC_CHARS = 200
"""
Room for a path such as 'order/42' with a UUID or a digest in it. A topic names the subject and does not contain the data.
"""
TOPIC_SIGNS = frozenset("_-.:/")


def _to_seconds(value: Any, description: str) -> float:
    """Return a number of seconds or a timedelta in seconds; raise ``BadYield`` for one that is negative or too long."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds <= MAX_PAUSE_SECONDS:
        return float(seconds)
    msg = f"{description} must be a number of seconds or a timedelta, from 0 to a hundred years, not {value!r}"
    raise BadYield(msg)


def _timeout_to_seconds(value: float | timedelta | None) -> float | None:
    return None if value is None else _to_seconds(value, "a timeout")


def _pause_to_seconds(value: float | timedelta | None) -> float | None:
    return None if value is None else _to_seconds(value, "the duration of a Sleep")


def _require_wake_date(value: datetime | None) -> datetime | None:
    """Return a date with a time zone, or ``None``; raise ``BadYield`` for anything else."""
    given: object = value
    # A date near the end of the calendar may be invalid in another time zone, or a millisecond later.
    if value is None or (isinstance(given, datetime) and given.utcoffset() is not None and given.year <= LAST_YEAR):
        return value
    msg = (
        f"Sleep(until=...) needs a date with a time zone, up to the year {LAST_YEAR}, such as datetime(2027, 1, 1, 7, tzinfo=UTC), not "
        f"{value!r}"
    )
    raise BadYield(msg)


def require_topic(value: str) -> str:
    """Return a valid topic name; raise ``BadYield`` for anything else."""
    given: object = value
    is_name = isinstance(given, str) and 0 < len(given) <= MAX_TOPIC_CHARS and given.isascii()
    if is_name and all(sign.isalnum() or sign in TOPIC_SIGNS for sign in value):
        return value
    msg = (
        f"a topic must be a name of at most {MAX_TOPIC_CHARS} letters, digits and {' '.join(sorted(TOPIC_SIGNS))}, such as 'order/42', not "
        f"{value!r}"
    )
    raise BadYield(msg)


@with_keyword_hints
@frozen
class Sleep(Member[datetime]):
    """
    Wait for a time; a recorded run outlives its process meanwhile.

    ``Sleep(90)``, ``Sleep(timedelta(hours=8))`` or ``Sleep(until=date)``. ``yield from`` gives the time at which the run woke
    (UTC), which is later if the run was resumed late. A time that has passed is no wait.

    Attributes:
        seconds: How long, from the run's own time on; at least 0.
        until: The date to wait for, with a time zone; in place of *seconds*.

    Raises:
        BadYield: for both or neither, a negative number, a date without a time zone.
    """

    seconds: float | None = attrs.field(default=None, converter=_pause_to_seconds)
    until: datetime | None = attrs.field(default=None, converter=_require_wake_date, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if (self.seconds is None) == (self.until is None):
            msg = "Sleep needs either seconds, such as Sleep(60), or a date, such as Sleep(until=...)"
            raise BadYield(msg)

    def __iter__(self) -> Generator[Yieldable, StepResult, datetime]:
        woke: datetime = (yield self).value
        return woke


def _validate_message_schema(value: Any) -> Any:
    """Return a JSON Schema as immutable JSON, or a pydantic model unchanged; raise ``BadYield`` for anything else."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        schema = freeze_object(value)
        if problem := find_keyword_problem(schema):
            msg = f"the schema of a Receive at {problem}"
            raise BadYield(msg)
        return schema
    if isinstance(value, type) and hasattr(value, "model_validate"):
        return value
    msg = f"the schema of a Receive must be a JSON Schema or a pydantic model, not {value!r}"
    raise BadYield(msg)


@frozen(init=False)
class Receive(Member["T_co | None"], Generic[T_co]):
    """
    Wait for the next message on a topic of this run.

    Messages are received in the order of their arrival; earlier ones wait for the request. They are sent with
    ``handle.send_message``, ``engine.send_message``, ``stepengine send --topic`` or by the run's parent with ``Send``.
    ``yield from`` returns the value of the message: JSON, or with a pydantic model as *schema* an object of it; ``None`` at the
    timeout.

    Attributes:
        topic: The topic.
        timeout: The maximum wait in seconds; ``None`` for ever.
        schema: The schema of messages; one that does not fit is skipped, with a warning in the run's result.

    Raises:
        BadYield: For an invalid topic, timeout or schema.
    """

    topic: str = attrs.field(converter=require_topic)
    timeout: float | None = attrs.field(default=None, converter=_timeout_to_seconds)
    schema: Any = attrs.field(default=None, converter=_validate_message_schema)

    # Without a model the type of a message is unknown, and a type checker would infer ``None``.
    @overload
    def __init__(
        self: Receive[Any],
        topic: str,
        timeout: float | timedelta | None = ...,
        *,
        schema: Mapping[str, Any] | None = ...,
    ) -> None: ...
    @overload
    def __init__(self: Receive[A], topic: str, timeout: float | timedelta | None = ..., *, schema: type[A]) -> None: ...
    def __init__(self, topic: str, timeout: float | timedelta | None = None, *, schema: Any = None) -> None:
        self.__attrs_init__(topic, timeout, schema)

    def __iter__(self) -> Generator[Yieldable, StepResult, T_co | None]:
        value = (yield self).value
        if value is None or self.schema is None or isinstance(self.schema, Mapping):
            return cast("T_co | None", value)
        return cast("T_co", model_from_json(self.schema, value))


def _require_child_ref(value: Any) -> ChildRef[Any]:
    if isinstance(value, ChildRef):
        return value
    hint = f"; {YIELD_FROM}" if isinstance(value, StepResult) else ""
    msg = f"a background child must be the ChildRef that Start returned, not {value!r}{hint}"
    raise BadYield(msg)


@frozen(init=False)
class Start(_Iterated, Generic[T_co]):
    """
    Start children in the background, without waiting for them.

    ``yield from`` returns a ``ChildRef`` for one call, and a tuple of them for several. ``Wait`` returns the result of a child. When the
    run returns or fails, its remaining children are cancelled or waited for: none outlives its parent. A failed child
    does not affect the others.

    Attributes:
        calls: The calls of the children.
        on_return: The treatment of children that are still running when the handler returns: ``"cancel"`` or ``"wait"``.

    Raises:
        BadYield: for anything but ``AgentCall``.
        AgentError: at the yield, for an unknown agent.
        LimitExceeded: at the yield, if a limit has no room for them; nothing has started.
    """

    calls: tuple[AgentCall[Any], ...]
    on_return: Literal["cancel", "wait"]

    @overload
    def __init__(
        self: Start[ChildRef[A]], call: AgentCall[A], /, *, on_return: Literal["cancel", "wait"] = ...
    ) -> None: ...
    @overload
    def __init__(
        self: Start[tuple[ChildRef[Any], ...]], *calls: AgentCall[Any], on_return: Literal["cancel", "wait"] = ...
    ) -> None: ...
    def __init__(self, *calls: AgentCall[Any], on_return: Literal["cancel", "wait"] = "cancel") -> None:
        given: tuple[object, ...] = calls
        wrong = next((call for call in given if not isinstance(call, AgentCall)), None)
        # One call returns a reference and several return a tuple, so no call at all would have no result of a known type.
        if wrong is not None or not calls:
            msg = f"Start needs one or more AgentCall(...), not {_describe_non_member(wrong) if calls else 'nothing'}"
            raise BadYield(msg)
        if on_return not in ("cancel", "wait"):
            msg = f"on_return must be 'cancel' or 'wait', not {on_return!r}"
            raise BadYield(msg)
        self.__attrs_init__(calls, on_return)

    def __iter__(self) -> Generator[Yieldable, StepResult, T_co]:
        refs: T_co = (yield self).value
        return refs


@frozen(init=False)
class Wait(Member["Waited[Out]"], Generic[Out]):
    """
    Wait for children in the background.

    ``yield from`` gives a ``Waited``: how those that have ended did, in the order in which they did, and which have not. A child
    may be waited for again: it has the same result.

    Attributes:
        refs: The children.
        need: How many must have ended: ``"all"``, ``"any"`` or a number.
        timeout: The seconds after which it continues with the children that have ended; ``None`` for ever.

    Raises:
        BadYield: For another object than a ``ChildRef``, and for an invalid *need* or timeout.
        AgentError: at the yield, for a child of another run.
    """

    refs: tuple[ChildRef[Out], ...]
    need: int
    timeout: float | None

    def __init__(
        self,
        *refs: ChildRef[Out],
        need: Literal["all", "any"] | int = "all",
        timeout: float | timedelta | None = None,
    ) -> None:
        given: Any = tuple(refs[0]) if len(refs) == 1 and isinstance(refs[0], (list, tuple)) else refs
        # None is allowed, as in `Parallel()`: a list of references may turn out to be empty, and then nothing has to end.
        found = tuple(dict.fromkeys(map(_require_child_ref, given)))
        count: Any = {"all": len(found), "any": min(1, len(found))}.get(need, need) if isinstance(need, str) else need
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= len(found):
            msg = f"need must be 'all', 'any' or a number from 0 to {len(found)}, the number of children, not {need!r}"
            raise BadYield(msg)
        self.__attrs_init__(found, count, _timeout_to_seconds(timeout))

    def __iter__(self) -> Generator[Yieldable, StepResult, Waited[Out]]:
        waited: Waited[Out] = (yield self).value
        return waited


@frozen(init=False)
class Send(_Iterated):
    """
    Send a text to the inbox of a child in the background, or a message on one of its topics.

    ``Send(ref, "look at the tests, too")`` becomes a user message before its next model call. ``Send(ref, {"go": True},
    topic="start")`` is received by its ``Receive("start")``. ``yield from`` returns whether the child is still running.

    Attributes:
        ref: The child.
        value: The text, or with a topic JSON.
        topic: The topic; ``""`` for the inbox.

    Raises:
        BadYield: for an invalid text, JSON or topic.
        AgentError: at the yield, for a child of another run.
    """

    ref: ChildRef[Any]
    value: JsonValue
    topic: str

    def __init__(self, ref: ChildRef[Any], value: Any, *, topic: str = "") -> None:
        if topic:
            self.__attrs_init__(_require_child_ref(ref), freeze(value), require_topic(topic))
        else:
            self.__attrs_init__(_require_child_ref(ref), _require_prompt(value), "")

    def __iter__(self) -> Generator[Yieldable, StepResult, bool]:
        is_running: bool = (yield self).value
        return is_running


@with_keyword_hints
@frozen
class Cancel(_Iterated):
    """
    End a child in the background, and the runs below it.

    ``yield from`` returns its ``ChildResult``; a child that had ended before has its own result.

    Attributes:
        ref: The child.
        reason: The reason, for viewers of the run.
    """

    ref: ChildRef[Any] = attrs.field(converter=_require_child_ref)
    reason: str = attrs.field(default="", converter=_require_prompt)

    def __iter__(self) -> Generator[Yieldable, StepResult, ChildResult[Any]]:
        child: ChildResult[Any] = (yield self).value
        return child


@frozen(init=False)
class Race(Member["tuple[int, T_co]"], Generic[T_co]):
    """
    Several calls at once; the first to end decides.

    ``Race(*members)`` accepts the members of ``Parallel``, also as one list. ``yield from`` returns the number of the first, from 0, and
    its result, as an entry of ``Parallel``. The others are abandoned: a child is cancelled, and a call that cannot be repeated may
    have had effects. A message that was not received waits for the next ``Receive``.

    Attributes:
        members: The members; at least one.

    Raises:
        BadYield: for any other member, such as ``STEP``.
    """

    members: tuple[Member[Any], ...]

    @overload
    def __init__(self: Race[A], *members: Member[A]) -> None: ...
    @overload
    def __init__(self: Race[A], members: Sequence[Member[A]], /) -> None: ...
    @overload
    def __init__(self: Race[Any], *members: Member[Any]) -> None: ...
    def __init__(self, *members: Any) -> None:
        given = tuple(members[0]) if len(members) == 1 and isinstance(members[0], list | tuple) else members
        _require_valid_members("Race", given)
        # A race of nothing has no first member, so it would never end.
        if not given:
            msg = "Race needs at least one member"
            raise BadYield(msg)
        self.__attrs_init__(given)

    def __iter__(self) -> Generator[Yieldable, StepResult, tuple[int, T_co]]:
        first: tuple[int, T_co] = (yield self).value
        return first


Ret = TypeVar("Ret", default=None)
SHOWN_CHARS = 40
"""A longer value is named by its type, so that an error message about a wrong yield stays on one line."""
MODEL = make_validator(
    allow_none(
        FieldCheck(lambda value: isinstance(value, str) and value.strip() != "", "a string such as 'openai/gpt-5'")
    ),
    BadYield,
)
SETTINGS = make_validator(allow_none(make_instance_check(ModelSettings, "ModelSettings(temperature=0)")), BadYield)
SPECS = FieldCheck(
    lambda value: isinstance(value, tuple) and all(isinstance(spec, ToolSpec) for spec in value),
    "a list of ToolSpec objects such as state.tool_definitions.values()",
)


YIELD_FROM = (
    "a plain `yield` returns a StepResult. For the value itself write `yield from`, as in `answer = yield from Ask(...)`, "
    "or read a field, such as `.value`, `.tool_result` or `.steps_complete`"
)
ANSWERS = (str, bool, int, float, complex, dict, list, tuple)
"""Types of the values that ``yield from`` returns; a comparison of these with a ``StepResult`` is a mistake."""


@frozen(weakref_slot=False)
class StepResult:
    """
    The result of every bare ``yield``.

    Attributes:
        agent_state: The state after the yielded action, including all its effects.
        tool_results: One result per call, in call order; empty after steps.
        steps_complete: Whether the last model step or ``StepText`` ended the turn, or no more steps are allowed.
        n_responses: The texts of the candidates of a ``GenerateN``, without thoughts; empty otherwise.
        value: The value of a ``Perform``, ``Ask``, ``Complete``, ``AgentCall``, ``Parallel``, ``Race``, ``Start``, ``Send``, ``Cancel`` or
            of a wait; ``None`` otherwise.
        output: The output that the current turn has set, as the type of the ``output_schema``; ``None`` without one. It is set
            by ``set_output``, or by a text that ends the turn and is the JSON of the schema. ``agent_state.output`` may also be the
            output of an earlier turn.

    Raises:
        TypeError: if it is used as a truth value, or compared with text, a number, a dict, a list or a tuple. Use the result
            of ``yield from`` for that.
        AttributeError: for any other attribute, with the same hint.
    """

    _not_json: ClassVar[str] = YIELD_FROM

    _state: AgentState | Callable[[], AgentState] = attrs.field(alias="agent_state")
    tool_results: tuple[ToolResult, ...] = ()
    steps_complete: bool = False
    n_responses: tuple[str, ...] = ()
    value: Any = None
    output: Any = None

    @cached_property
    def agent_state(self) -> AgentState:
        """The state after the yielded value was carried out, with all its changes."""
        return self._state if isinstance(self._state, AgentState) else self._state()

    @property
    def tool_result(self) -> ToolResult | None:
        """The last tool result, or ``None``."""
        return self.tool_results[-1] if self.tool_results else None

    @property
    def text(self) -> str:
        """The text of the newest assistant message in the history, stripped and without thoughts; ``""`` for calls alone or no message."""
        history = reversed(self.agent_state.message_history)
        return next((m.text_without_thoughts.strip() for m in history if isinstance(m, AssistantMessage)), "")

    def __repr__(self) -> str:
        """Return one line, for error messages about a wrongly used result."""
        what = f"value {reprlib.repr(self.value)}" if self.value is not None else f"text {reprlib.repr(self.text)}"
        return f"<StepResult of {self.agent_state.agent_id!r}: {what}, {len(self.tool_results)} tool results>"

    def __bool__(self) -> NoReturn:
        msg = f"a StepResult is neither true nor false; {YIELD_FROM}"
        raise TypeError(msg)

    if not TYPE_CHECKING:  # type checkers know the fields, and find comparisons that are always false, by themselves

        def __eq__(self, other: object) -> object:
            if isinstance(other, StepResult):
                return self is other or _list_equality_fields(self) == _list_equality_fields(other)
            if isinstance(other, ANSWERS):
                msg = f"a StepResult is never equal to {_format_short_value(other)}; {YIELD_FROM}"
                raise TypeError(msg)
            return NotImplemented

        def __hash__(self) -> int:
            return hash(_list_equality_fields(self))

        def __getattr__(self, name: str) -> object:
            msg = f"'StepResult' object has no attribute {name!r}; {YIELD_FROM}"
            raise AttributeError(msg, name=name, obj=self)


def _list_equality_fields(result: StepResult) -> tuple[object, ...]:
    return (result.agent_state, result.tool_results, result.steps_complete, result.n_responses, result.value)


def _format_short_value(value: object) -> str:
    """Return *value* if it is short and plain, else its type."""
    plain = isinstance(value, (str, bool, int, float)) and len(repr(value)) <= SHOWN_CHARS
    return repr(value) if plain else f"a {type(value).__name__}"


@final
class Sentinel(_Iterated, Enum):
    """``STEP`` is one model step; ``STEP_ALL`` is steps until the turn ends or the budget is spent."""

    STEP = "STEP"
    STEP_ALL = "STEP_ALL"

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__

    def __iter__(self) -> Generator[Yieldable, StepResult, StepResult]:
        return (yield self)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise ``BadYield``: ``STEP()`` is a mistake for ``STEP``."""
        msg = f"{self.value} is not called; write `yield {self.value}`"
        if self is Sentinel.STEP:
            msg += ", or `yield StepWith(model=...)` for a step with a model, tools or settings of its own"
        raise BadYield(msg)


STEP = Sentinel.STEP
"""One step: one model call and the tool calls that it asks for."""

STEP_ALL = Sentinel.STEP_ALL
"""Steps until the turn ends, or the budget is spent."""


def _to_tool_names(value: Iterable[str | ToolLike] | None) -> tuple[str, ...] | None:
    """Return tools and names as names; raise ``BadYield`` if *value* is no list."""
    if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
        msg = f"the tools of a StepWith must be a list of tools or names, not {value!r}"
        raise BadYield(msg)
    return None if value is None else tuple(map(get_tool_name, value))


@with_keyword_hints
@frozen
class StepWith(_Iterated):
    """
    One step with overrides that hold for it alone.

    Attributes:
        model: Another model string.
        tools: Names of the tools to offer instead of the agent's.
        tool_choice: ``"auto"``, ``"none"``, ``"required"`` or a tool name.
        settings: Settings for the step. Those that differ from their defaults override the agent's, so a step cannot return to a default.
    """

    model: str | None = attrs.field(default=None, validator=MODEL)
    tools: tuple[str, ...] | None = attrs.field(default=None, converter=_to_tool_names)
    tool_choice: ToolChoice | None = attrs.field(default=None, validator=make_validator(allow_none(CHOICE), BadYield))
    settings: ModelSettings | None = attrs.field(default=None, validator=SETTINGS)

    def __iter__(self) -> Generator[Yieldable, StepResult, StepResult]:
        return (yield self)


def _require_step_text(value: str) -> str:
    return _require_text(value, "the text of a StepText")


@with_keyword_hints
@frozen
class StepText(_Iterated):
    """
    Add a text as an assistant message, as if the model had written it; tool-call blocks in it run in order.

    A block with ``end_turn`` or ``task_completed`` ends the turn: the handler continues with ``steps_complete``. A block is
    ``<tool_call>{"name": ..., "input": {...}}</tool_call>`` or codebuff's form.
    ``yield from`` returns the results of its blocks.
    """

    text: str = attrs.field(converter=_require_step_text)

    def __iter__(self) -> Generator[Yieldable, StepResult, tuple[ToolResult, ...]]:
        return (yield self).tool_results


MAX_CANDIDATES = 64
"""
Each candidate is a paid request; a larger number is more likely a mistake than a plan, and would start as many calls
at once.
"""


def _require_candidate_count(value: int) -> int:
    """Return an integer from 1, else raise; the machine refuses one above ``MAX_CANDIDATES``."""
    number: object = value
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return value
    msg = f"GenerateN needs an integer from 1 to {MAX_CANDIDATES}, not {value!r}"
    raise BadYield(msg)


@with_keyword_hints
@frozen
class GenerateN(_Iterated):
    """
    Ask the model *n* times for a reply to the present history, which stays untouched.

    ``yield from`` returns the texts of the replies, without thoughts, in candidate order; failed candidates are left out. *n* is 1 to 64;
    more is a spent limit.
    """

    n: int = attrs.field(converter=_require_candidate_count)

    def __iter__(self) -> Generator[Yieldable, StepResult, tuple[str, ...]]:
        return (yield self).n_responses


def _to_messages(value: str | Iterable[Message]) -> tuple[Message, ...]:
    """Return a text as one user message, or messages as a tuple; raise if they are no valid history."""
    if isinstance(value, str):
        return (UserMessage(value),)
    if find_iteration_mistake(value):
        msg = f"Complete needs a string or a sequence of messages, not {value!r}"
        raise BadYield(msg)
    return tuple(Transcript(value))


def _to_spec_tuple(value: Any) -> object:
    return value if find_iteration_mistake(value) else tuple(value)


def _check_reply_schema(_instance: object, _field: object, value: Any) -> None:
    """Raise ``BadYield`` unless *value* is a pydantic model class or ``None``."""
    if value is None or (isinstance(value, type) and hasattr(value, "model_validate")):
        return
    msg = (
        f"the schema of a Complete must be a pydantic model, not {value!r}; "
        "for a JSON Schema, pass settings=ModelSettings(response_schema=...) and parse the text of the reply"
    )
    raise BadYield(msg)


@with_keyword_hints
@frozen
class Complete(_Iterated, Generic[Reply]):
    """
    Call the model once, independent of the conversation.

    ``yield from`` returns the ``ModelReply``, or with a *schema* an object of it. Calls in it are not run.

    Attributes:
        messages: The messages to send; a string is one user message.
        model: A model string instead of the run's.
        system_prompt: A system prompt; none by default.
        settings: Settings instead of the agent's.
        tools: The tools for the model, none by default. With the run's own, ``state.tool_definitions.values()``, and its system
            prompt, the request starts like that of a step, so that the provider's prompt cache can be used.
        schema: A pydantic model of the answer. Providers enforce it if they can. ``retry`` repeats the call if a reply does
            not fit.

    Raises:
        TranscriptError: if calls and results in *messages* do not pair.
        OutputMissing: from ``yield from``, if the reply does not fit *schema*.
    """

    messages: tuple[Message, ...] = attrs.field(converter=_to_messages)
    model: str | None = attrs.field(default=None, validator=MODEL, kw_only=True)
    system_prompt: str | None = attrs.field(
        default=None, validator=make_validator(allow_none(TEXT), BadYield), kw_only=True
    )
    settings: ModelSettings | None = attrs.field(default=None, validator=SETTINGS, kw_only=True)
    tools: tuple[ToolSpec, ...] = attrs.field(
        default=(), converter=_to_spec_tuple, validator=make_validator(SPECS, BadYield), kw_only=True
    )
    schema: type[Reply] | None = attrs.field(default=None, validator=_check_reply_schema, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.schema is not None and self.settings is not None and self.settings.response_schema is not None:
            msg = "Complete has a schema, and its settings have another response_schema; leave one of them out"
            raise BadYield(msg)

    def __iter__(self) -> Generator[Yieldable, StepResult, Reply]:
        reply: ModelReply = (yield self).value
        return cast("Reply", reply) if self.schema is None else parse_reply(reply, self.schema)


def parse_reply(reply: ModelReply, schema: type[Reply]) -> Reply:
    """
    Parse the JSON in a reply as a pydantic model; raise ``OutputMissing`` if it does not fit.

    Raises:
        OutputMissing: when the text is not JSON or does not fit.
    """
    found = parse_json_answer(reply.text_without_thoughts)
    if found is NO_JSON:
        issues = [f"its text is not JSON: {format_value(reply.text_without_thoughts)}"]
    else:
        try:
            made: Reply = model_from_json(schema, freeze(found))
        except (DataError, ValueError) as error:
            issues = list_validation_problems(error) if hasattr(error, "errors") else [str(error)]
        else:
            return made
    msg = f"the reply of {reply.model or 'the model'} does not fit {schema.__name__}: {'; '.join(issues)}"
    raise OutputMissing(msg, issues=issues)


Yieldable: TypeAlias = (
    ToolCall
    | AgentCall
    | Sentinel
    | StepWith
    | StepText
    | GenerateN
    | Complete[Any]
    | Parallel[Any]
    | Perform[Any]
    | Ask
    | Sleep
    | Receive[Any]
    | Start[Any]
    | Wait[Any]
    | Send
    | Cancel
    | Race[Any]
)
"""Everything that a handler may yield."""

Steps: TypeAlias = Generator[Yieldable, StepResult, Ret]
"""The type of a handler's generator; ``Steps[Out]`` returns the output, bare ``Steps`` returns nothing."""

YIELDABLES: tuple[type, ...] = tuple([get_origin(kind) or kind for kind in get_args(Yieldable)])
"""The classes of ``Yieldable``."""


class YieldRow(NamedTuple):
    """
    The properties of one yieldable.

    Attributes:
        name: As authors write it.
        kind: Its class.
        asks: The request, as documentation names it.
        effects: Tokens of the effects that it leads to by itself, in order. ``CALLS`` and ``ORDER`` of ``machine/protocol.py`` have
            those that the called tool or the model adds.
        sent: The field of the ``StepResult`` with the result.
        gives: The result, as documentation names it.
        state: The state of ``ORDER`` in which the machine yields those effects.
        actions: How many programmatic actions it counts for; ``None`` if that depends on its content.
        for_hooks: Whether hooks may yield it, too.
        for_tools: Whether the body of a tool may yield it, too: what needs no conversation.
        for_sandbox: Whether a handler in the sandbox may yield it, too.
        script: The answers that a test's script may hold for it, in words.
        script_may_be_empty: Whether a script may leave the answer out.
    """

    name: str
    kind: type
    asks: str
    sent: str
    gives: str
    effects: tuple[str, ...] = ()
    state: str = "handler"
    actions: int | None = 1
    for_hooks: bool = False
    for_tools: bool = False
    for_sandbox: bool = True
    script: str = "a value"
    script_may_be_empty: bool = False

    @property
    def is_member(self) -> bool:
        """Whether ``Parallel`` and ``Race`` accept it."""
        return issubclass(self.kind, Member)


YIELDS: tuple[YieldRow, ...] = (
    YieldRow(
        name="ToolCall",
        kind=ToolCall,
        asks="a tool call",
        effects=("CallTool:handler",),
        sent="tool_results",
        gives="its result",
        for_hooks=True,
        for_tools=True,
        script="a ToolResult, a text or a JSON value",
    ),
    YieldRow(
        name="AgentCall",
        kind=AgentCall,
        asks="a child run",
        effects=("Spawn",),
        sent="value",
        gives="its result",
        # Not for hooks: the engine's hooks are called in children, too, so a hook that starts one would be called there again.
        for_tools=True,
    ),
    YieldRow(
        name="STEP",
        kind=Sentinel,
        asks="one model call and its tool calls",
        effects=("CallModel:step",),
        sent="steps_complete",
        gives="whether the turn is complete",
        state="pre_step",
        actions=0,
    ),
    YieldRow(
        name="STEP_ALL",
        kind=Sentinel,
        asks="steps until the turn is complete",
        effects=("CallModel:step",),
        sent="steps_complete",
        gives="whether the turn is complete",
        state="pre_step",
        actions=0,
    ),
    YieldRow(
        name="StepWith",
        kind=StepWith,
        asks="one step with another model, tools or settings",
        effects=("CallModel:step",),
        sent="steps_complete",
        gives="whether the turn is complete",
        state="pre_step",
        actions=0,
    ),
    YieldRow(
        name="StepText",
        kind=StepText,
        asks="text as the model's, and the calls in it",
        effects=("CallTool:model",),
        sent="tool_results",
        gives="the results of the calls",
        actions=None,
    ),
    YieldRow(
        name="GenerateN",
        kind=GenerateN,
        asks="several replies to the same history",
        effects=("Gather",),
        sent="n_responses",
        gives="the texts",
        # No member: several model calls at once are children, each with a status, a failure and a cost of its own.
    ),
    YieldRow(
        name="Complete",
        kind=Complete,
        asks="one model call outside the conversation",
        effects=("CallModel:complete",),
        sent="value",
        gives="the reply",
        # No member, for the reason of `GenerateN`.
        for_hooks=True,
        for_tools=True,
        script="a string or a ModelReply",
    ),
    YieldRow(
        name="Parallel",
        kind=Parallel,
        asks="all members at once",
        effects=("Gather",),
        sent="value",
        gives="the results, in order",
        # Not for hooks: it could hold only functions and waits, and one `Perform` may do several things at once.
        for_tools=True,
    ),
    YieldRow(
        name="Perform",
        kind=Perform,
        asks="a call of your function",
        effects=("CallFunction",),
        sent="value",
        gives="its return value, as JSON",
        for_hooks=True,
        for_tools=True,
        for_sandbox=False,
    ),
    YieldRow(
        name="Ask",
        kind=Ask,
        asks="an answer of a person",
        effects=("AskPerson:question",),
        sent="value",
        gives="the answer",
        # Not for hooks: a `pre_tool` hook returns `Decision.ask(...)`, so that policies, remembered answers and `headless` apply to it.
        for_tools=True,
    ),
    YieldRow(
        name="Sleep",
        kind=Sleep,
        asks="a wait until a time",
        effects=("AwaitTime",),
        sent="value",
        gives="the wake time",
        for_hooks=True,
        for_tools=True,
        script_may_be_empty=True,
    ),
    YieldRow(
        name="Receive",
        kind=Receive,
        asks="the next message on a topic",
        effects=("AwaitMessage",),
        sent="value",
        gives="the value of the message",
        for_hooks=True,
        for_tools=True,
        script="a message, which is JSON, or None for its timeout",
    ),
    YieldRow(
        name="Start",
        kind=Start,
        asks="background children",
        effects=("Gather",),
        sent="value",
        gives="a reference to each",
        # Not for hooks, for the reason of `AgentCall`.
        for_tools=True,
        script_may_be_empty=True,
    ),
    YieldRow(
        name="Wait",
        kind=Wait,
        asks="a wait for background children",
        effects=("AwaitRuns",),
        sent="value",
        gives="the children that ended, and the others",
        for_hooks=True,
        for_tools=True,
        script=(
            "how each of its children ended, in their order: an output, a ChildResult or an exception, of one child alone just "
            "that; a dict of these by ChildRef, in the order in which they ended; or nothing where none has"
        ),
        script_may_be_empty=True,
    ),
    YieldRow(
        name="Race",
        kind=Race,
        asks="all members at once, until one ends",
        effects=("Gather",),
        sent="value",
        gives="the number of the first to end, from 0, and its result",
        for_hooks=True,
        for_tools=True,
        script="a pair of the number of the first, from 0, and what came of it",
    ),
    YieldRow(
        name="Send",
        kind=Send,
        asks="a message to a background child",
        effects=("SendToRun",),
        sent="value",
        gives="whether the child is running",
        for_hooks=True,
        for_tools=True,
        script_may_be_empty=True,
    ),
    YieldRow(
        name="Cancel",
        kind=Cancel,
        asks="the end of a background child",
        effects=("EndRuns",),
        sent="value",
        gives="how it ended",
        for_hooks=True,
        for_tools=True,
        script_may_be_empty=True,
    ),
)
"""Everything that a handler may yield."""
