"""``Hooks``, their ``Change``, ``StepContext`` for handlers, and the logger. ``HookContext`` is in ``stepengine.data.definition``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol

import attrs
from attrs import frozen
from typing_extensions import TypeVar

from stepengine.data.checks import with_keyword_hints
from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.messages import Message, RequestedChange, ToolResult, UserMessage, to_tuple
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolLike
from stepengine.data.transcript import Transcript
from stepengine.errors import DefinitionError

if TYPE_CHECKING:
    from random import Random


class RunLogger(Protocol):
    """A logger with four levels whose lines become events; *data* is shown in an event only if it is JSON."""

    def debug(self, message: str, /, **data: Any) -> None:
        """Log for developers."""

    def info(self, message: str, /, **data: Any) -> None:
        """Log details that are of interest to users."""

    def warning(self, message: str, /, **data: Any) -> None:
        """Log a problem that needs attention."""

    def error(self, message: str, /, **data: Any) -> None:
        """Log an error."""


Params = TypeVar("Params", default=Any)


@frozen(kw_only=True)
class StepContext(Generic[Params]):
    """
    The argument of a handler; immutable.

    Attributes:
        prompt: The prompt of this run; ``""`` if there is none.
        params: The validated params: the pydantic model if ``input_schema`` is one, else an immutable mapping.
        agent_state: The state before the first yield; newer states arrive with each ``StepResult``.
        model: The model string of the run, or ``None``.
        logger: Log lines that become events; silent while a recorded prefix is replayed.
        is_asked: Whether the history contains a message with the prompt and the params of this run.
    """

    prompt: str
    params: Params
    agent_state: AgentState
    model: str | None
    logger: RunLogger
    _random: Callable[[], Random]
    _created: datetime
    _elapsed: Callable[[], int]
    _notify: Callable[[str, Any], None]
    is_asked: bool = False
    _source: list[Random] = attrs.field(factory=list, init=False, eq=False, repr=False)

    @property
    def random(self) -> Random:
        """A random source seeded by the run; equal on every replay."""
        # It has 3 KB, a large part of the memory of a suspended run, and few handlers use it.
        if not self._source:
            self._source.append(self._random())
        return self._source[0]

    @property
    def inherited_messages(self) -> tuple[Message, ...]:
        """
        The conversation from before this run, from the parent or earlier turns, as the model sees it.

        This run's instructions and its message with prompt and params are left out.
        """
        messages = list(self.agent_state.view)
        for tag in ("INSTRUCTIONS_PROMPT", *(["USER_PROMPT"] if self.is_asked else [])):
            if messages and isinstance(messages[-1], UserMessage) and tag in messages[-1].tags:
                messages.pop()
        return tuple(messages)

    @property
    def prompt_messages(self) -> tuple[UserMessage, ...]:
        """
        The prompt of this run as a message of its own, without the params; empty without a prompt.

        ``set_messages`` with ``[*ctx.inherited_messages, *ctx.prompt_messages]`` lets children that take the conversation
        over see what is asked for, and neither params nor instructions that are not theirs.
        """
        return (UserMessage(self.prompt, ("USER_PROMPT",)),) if self.prompt.strip() else ()

    def now(self) -> datetime:
        """Return the run's recorded time (UTC) at the last outcome; equal on every replay."""
        return self._created + timedelta(milliseconds=self._elapsed())

    def notify(self, message: str, data: object = None) -> None:
        """Send *message* and JSON *data* to all watchers of the run, without changing the history."""
        self._notify(message, data)


HOOK_POINTS = ("pre_run", "post_run", "pre_step", "post_step", "pre_tool", "post_tool", "on_stop", "on_suspend")


CHANGERS = ("pre_run", "pre_step", "post_step", "pre_tool", "post_tool")
CHANGE_POINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("system_prompt", "messages", "view", "context"), (*CHANGERS, "tool")),
        # A tool's change is recorded, and Python objects are not: a replay would know nothing of them.
        "values": CHANGERS,
        "tail": ("pre_run", "pre_step"),
        "tools": ("pre_run",),
        "input": ("pre_tool",),
        "result": ("post_tool",),
    }
)
"""Field of a ``Change`` -> where it can be used: points of ``Hooks``, and ``"tool"`` for the result of a tool's body."""


def _to_transcript(value: Any) -> Transcript | None:
    return value if value is None or isinstance(value, Transcript) else Transcript(value)


@with_keyword_hints
@frozen(kw_only=True)
class Change(RequestedChange):
    """
    The changes that a hook or a tool requests; fields that are ``None`` change nothing.

    A field that is not valid at its hook point is an error of the hook or tool. The rest of the change is then discarded, too.

    Attributes:
        system_prompt: A new system prompt, from the next request on.
        messages: A new record; the view becomes the same.
        view: A new history for the model; the record is unchanged.
        context: Members to set in ``AgentState.context``; a member that is ``None`` is removed.
        values: Python objects to share with later hooks of this run; never stored, so not for tools.
        tail: Messages at the end of requests that are not stored: of the next one (``pre_step``), or of every request of the
            run (``pre_run``). The prefix in a provider's cache stays valid.
        tools: Tools of the run in addition to those of its agent (``pre_run``). Data for them must come from a recorded
            ``Perform``, so that a replay has the same tools.
        input: A new input of the call (``pre_tool``); it is validated again.
        result: A new result of the call (``post_tool``).
    """

    system_prompt: str | None = None
    messages: Transcript | None = attrs.field(default=None, converter=_to_transcript)
    view: Transcript | None = attrs.field(default=None, converter=_to_transcript)
    context: JsonDict | None = attrs.field(default=None, converter=attrs.converters.optional(freeze_object))
    values: Mapping[str, Any] | None = attrs.field(default=None, metadata={"stored": False})
    tail: tuple[Message, ...] = attrs.field(default=(), converter=to_tuple)
    tools: tuple[ToolLike, ...] = attrs.field(default=(), converter=to_tuple, metadata={"stored": False})
    input: JsonDict | None = attrs.field(default=None, converter=attrs.converters.optional(freeze_object))
    result: ToolResult | None = None

    def find_misuse(self, point: str) -> str:
        """Return the reason why a field of this change cannot be used at *point*, or ``""``."""
        for name, points in CHANGE_POINTS.items():
            if point not in points and (value := getattr(self, name)) is not None and value != ():
                there = ", ".join([f"{p} hooks" if p in HOOK_POINTS else "tools" for p in points])
                return f"Change({name}=...), which cannot be used there; {name} is for {there}"
        return ""


def _to_hooks(value: object) -> tuple[Callable[..., object], ...]:
    """Return a function or a list of functions as a tuple; raise ``DefinitionError`` for anything else."""
    if callable(value):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, str):
        hooks = tuple(value)
        if all(callable(hook) for hook in hooks):
            return hooks
    msg = f"a point of Hooks must be a function or a list of functions, such as Hooks(pre_step=[check]), not {value!r}"
    raise DefinitionError(msg)


@with_keyword_hints
@frozen(kw_only=True)
class Hooks:
    """
    Author code that the machine calls at fixed points, in list order.

    A hook is a plain function that returns a ``Change``, a ``Decision`` or ``None``. It may also be a generator function that
    yields ``Perform``, ``Complete``, ``ToolCall`` or a wait and returns one of these; ``YIELDS`` has all yieldables for hooks.
    ``async def`` hooks raise an error. A point accepts one hook or several.

    Raises:
        DefinitionError: for a point with another value.

    Attributes:
        pre_run: ``(ctx)`` before the handler starts.
        post_run: ``(ctx, result)`` after the run ended; *result* is the ``Finished`` of the run.
        pre_step: ``(ctx)`` before every model call.
        post_step: ``(ctx, reply)`` after every step.
        pre_tool: ``(ctx, call)`` before every tool call; may return a ``Decision`` or ``Change(input=...)``.
        post_tool: ``(ctx, call, result)`` after every tool call that was not denied, invalid or skipped, with its final input;
            may return a ``ToolResult`` or ``Change(result=...)``.
        on_stop: ``(ctx)`` before the turn ends; a returned ``UserMessage`` or string that is not blank continues it.
        on_suspend: ``(ctx, questions)`` when the run suspends; the run is stopped, so effects of such a hook are not
            performed.
    """

    pre_run: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)
    post_run: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)
    pre_step: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)
    post_step: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)
    pre_tool: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)
    post_tool: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)
    on_stop: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)
    on_suspend: tuple[Callable[..., Any], ...] = attrs.field(default=(), converter=_to_hooks)

    def __add__(self, other: Hooks) -> Hooks:
        """Return these hooks followed by those of *other*."""
        return Hooks(**{p: (*getattr(self, p), *getattr(other, p)) for p in HOOK_POINTS})

    def __bool__(self) -> bool:
        return any(getattr(self, p) for p in HOOK_POINTS)

    def find_prompt_limit(self, context_window: int | None) -> int | None:
        """Return the most tokens that a prompt may have: *context_window*, or less by a context policy; ``None`` if both are unknown."""
        limits = [context_window]
        for hook in self.pre_step:
            find = getattr(hook, "find_prompt_limit", None)
            limits.append(None if find is None else find(context_window))
        return min([limit for limit in limits if limit is not None], default=None)

    def get_hooks(self, point: str) -> Sequence[Callable[..., Any]]:
        """Return the hooks of one point."""
        hooks: Sequence[Callable[..., object]] = getattr(self, point)
        return hooks
