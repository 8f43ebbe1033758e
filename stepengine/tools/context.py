"""What a tool's body is given beside its arguments: ``ToolContext``, ``ResourceMap``."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import attrs
from attrs import frozen

from stepengine.data.hooks import RunLogger
from stepengine.data.json import JsonDict, canonical, freeze
from stepengine.data.messages import to_tuple
from stepengine.data.state import AgentState
from stepengine.errors import DefinitionError, StepEngineError
from stepengine.workspace.threads import CancelSignal, ThreadPool
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.workspace.writes import FileWrite

T = TypeVar("T")


class CallSignal:
    """The cancellation signal of one call: set by itself, or because its run was cancelled."""

    __slots__ = ("_own", "_run")

    def __init__(self, run: CancelSignal) -> None:
        self._run = run
        self._own = threading.Event()

    def is_set(self) -> bool:
        """Return whether the call or its run is cancelled."""
        return self._own.is_set() or self._run.is_set()

    def set(self) -> None:
        """Cancel the call."""
        self._own.set()


class ResourceMap:
    """
    Live objects for tools, one per type, at first those of *values*; they are never stored.

    Each object is filed under its own type; ``insert(value, as_type=Base)`` files it under another one.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[object] = ()) -> None:
        self._values: dict[type[Any], Any] = {}
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            msg = f"ResourceMap takes a list of objects, such as ResourceMap([pool]), not {values!r}"
            raise DefinitionError(msg)
        for value in values:
            self.insert(value)

    def insert(self, value: object, *, as_type: type[Any] | None = None) -> None:
        """Add *value* under its type or *as_type*, or replace the object there."""
        self._values[type(value) if as_type is None else as_type] = value

    def get(self, kind: type[T]) -> T | None:
        """Return the object of type *kind*; ``None`` if there is none."""
        return cast("T | None", self._values.get(kind))

    def remove(self, kind: type[T]) -> T | None:
        """Remove and return the object of type *kind*; ``None`` if there is none."""
        return cast("T | None", self._values.pop(kind, None))

    def __contains__(self, kind: object) -> bool:
        return kind in self._values

    def __len__(self) -> int:
        return len(self._values)


class Closable(Protocol):
    """An object that is closed at the end of its run."""

    def aclose(self) -> Awaitable[Iterable[str]]:
        """Close the object; return sentences for the run's result, for example about interrupted work."""


C = TypeVar("C", bound=Closable)


class RunResources:
    """The objects of tools for one run. They are closed at its end, the last one first."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[Hashable, Closable] = {}

    def get(self, key: Hashable, make: Callable[[], C]) -> C:
        """Return the object stored under *key*, created by *make* at the first call."""
        if key not in self._values:
            self._values.setdefault(key, make())  # bodies in two threads may come by at once
        return cast("C", self._values[key])

    def __iter__(self) -> Iterator[Closable]:
        return iter(list(self._values.values()))

    async def aclose(self) -> list[str]:
        """Close all objects, the newest first, even if one fails; return their sentences for the run's result."""
        mentioned: list[str] = []
        while self._values:
            _, value = self._values.popitem()
            try:
                mentioned += await value.aclose()
            except Exception as error:  # noqa: BLE001  (it is a tool's code; the others are ended all the same)
                mentioned.append(f"{type(value).__name__} could not be ended: {type(error).__name__}: {error}")
        return mentioned

    def close(self) -> None:
        """Close all objects without an event loop, for a run that is only replayed."""
        work = self.aclose()
        with suppress(StopIteration):
            work.send(None)
        work.close()


class CallScope:
    """The state of one tool call; a context serves one call at a time."""

    __slots__ = ("max_chars", "used")

    def __init__(self) -> None:
        self.used = False
        self.max_chars: int | None = None


class SilentLogger:
    """A logger that drops all lines."""

    def debug(self, message: str, /, **data: object) -> None:
        """Drop the line."""

    info = warning = error = debug


def _drop_event(_: Event) -> None:
    """Drop an event."""


async def _sleep_on_loop(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)


@frozen(kw_only=True, eq=False)
class ToolContext:
    """
    The object that a tool body gets as its first parameter of this type; it is not part of the tool's schema.

    Attributes:
        agent_state: The state before the step.
        tool_call_id: The call's id.
        tool_name: The tool.
        run_id: The run.
        address: Where the call stands in the run tree, ``"path#number"`` as journals have it; ``""`` outside of a run.
        input: The validated input of the call as JSON.
        agent_id: The agent.
        agent_name: Its display name.
        agent_description: What it is for.
        session_id: The conversation, if there is one.
        user_id: The user, if the caller gave one.
        parent_session_id: The parent's conversation; ``None`` at the root.
        parent_tool_call_id: The call that spawned this run; ``None`` at the root.
        ancestor_run_ids: Run ids from the root down to the parent.
        step_index: The step in which the call runs, from 0.
        metadata: The caller's metadata.
        workspace: Root folder and working directory, if the caller named one.
        resources: Live objects by type.
        logger: Log lines that carry run, agent and step.
        cancelled: ``is_set()`` says that the run should stop. For a body in a thread it is also set after the call's timeout;
            an async body is cancelled then.
        remaining_tokens: How many tokens of context are left, when known: of the model's context length, or of what a
            context policy of the agent allows.
    """

    agent_state: AgentState = attrs.field(factory=AgentState)
    tool_call_id: str = ""
    tool_name: str = ""
    run_id: str = ""
    address: str = ""
    input: JsonDict = attrs.field(factory=JsonDict, converter=freeze, repr=False)
    agent_id: str = ""
    agent_name: str = ""
    agent_description: str = ""
    session_id: str | None = None
    user_id: str | None = None
    parent_session_id: str | None = None
    parent_tool_call_id: str | None = None
    ancestor_run_ids: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    step_index: int = 0
    metadata: JsonDict = attrs.field(factory=JsonDict, converter=freeze)
    workspace: Workspace | None = None
    resources: ResourceMap = attrs.field(factory=ResourceMap, repr=False)
    logger: RunLogger = attrs.field(factory=SilentLogger, repr=False)
    cancelled: CancelSignal = attrs.field(factory=threading.Event, repr=False)
    remaining_tokens: int | None = None
    _emit: Callable[[Event], None] = attrs.field(default=_drop_event, repr=False)
    _threads: ThreadPool | None = attrs.field(default=None, repr=False)
    _leaked: list[str] | None = attrs.field(default=None, repr=False)
    _scope: CallScope = attrs.field(factory=CallScope, repr=False)
    _belongings: Callable[[], RunResources] | None = attrs.field(default=None, repr=False)
    _sleep: Callable[[float], Awaitable[None]] = attrs.field(default=_sleep_on_loop, repr=False)
    _keep_write: Callable[[FileWrite], None] | None = attrs.field(default=None, repr=False)
    _is_typed: bool = attrs.field(default=False, repr=False)

    @classmethod
    def for_test(cls, **overrides: Any) -> ToolContext:
        """
        Return a context for a unit test; every field can be given.

        ``emit=events.append`` collects events; ``threads=`` takes a ``ThreadPool``, without one each call makes its own;
        ``belongings=lambda: mine`` takes the ``RunResources`` of a run, which the test ends with ``await mine.aclose()``;
        ``keep_write=writes.append`` collects what a journal would keep of writes.
        """
        return cls(**{"tool_call_id": "c1", "run_id": "test-run", "agent_id": "test-agent", **overrides})

    @property
    def idempotency_key(self) -> str:
        """
        A key of 64 hex digits that is the same for every attempt of this call, also after a crash.

        It is derived from the run, the call's address and its input. Pass it to a service that charges or sends, so that a
        repeated call has one effect.
        """
        import hashlib

        told = canonical([self.run_id, self.address, self.input])
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()

    def emit(self, event: Event) -> None:
        """Emit ``ToolProgress``, ``ToolLog`` or ``FileChanged``; an event without a call id gets name and id of this call."""
        if getattr(event, "tool_call_id", None) == "":
            event = attrs.evolve(event, tool_call_id=self.tool_call_id, tool_name=self.tool_name)  # type: ignore[call-arg]
        self._emit(event)

    @property
    def is_typed(self) -> bool:
        """Whether the caller may read the result by its type, as handlers do; models read it as JSON."""
        return self._is_typed

    @property
    def is_of_run(self) -> bool:
        """Whether the call belongs to a run, so that tools can store objects for it."""
        return self._belongings is not None

    def of_run(self, key: Hashable, make: Callable[[], C]) -> C:
        """
        Return the object stored under *key* for this run, created by *make* at the first call and closed with the run.

        Its ``aclose()`` is awaited when the run ends, in whatever way. The runs of one tree keep things apart.

        Raises:
            StepEngineError: outside of a run, where nobody would end it.
        """
        if self._belongings is None:
            msg = f"tool {self.tool_name!r} stores an object for its run, so it can only be called in an agent run"
            raise StepEngineError(msg)
        return self._belongings().get(key, make)

    @property
    def keeps_writes(self) -> bool:
        """Whether the journal stores the data to undo a write."""
        return self._keep_write is not None

    def record_write(self, write: FileWrite) -> None:
        """Store the data to undo a write in the journal; without a journal nothing is stored."""
        if self._keep_write is not None:
            self._keep_write(write)

    async def pause(self, seconds: float) -> None:
        """Wait *seconds* by the run's clock."""
        await self._sleep(seconds)

    def request_truncation(self, max_chars: int) -> None:
        """
        Cut the result of this call to *max_chars* characters; a note in it says how much was removed.

        It is cut for handlers, too. ``@tool(max_chars=...)`` limits only what a model is shown.
        """
        self._scope.max_chars = max(0, max_chars)

    def for_call(self, tool_name: str) -> ToolContext:
        """Return the context for one call of a tool: this one at its first use with its tool, else a copy."""
        scope = self._scope
        if scope.used or self.tool_name != tool_name:
            scope = CallScope()
            made = attrs.evolve(self, tool_name=tool_name, scope=scope)
        else:
            made = self
        scope.used = True
        return made

    def for_thread(
        self, cancelled: CancelSignal, on_loop: Callable[[Callable[..., None]], Callable[..., None]], logger: RunLogger
    ) -> ToolContext:
        """Return a copy of this context for a body in a thread; its calls reach the event loop through *on_loop*."""
        keep = None if self._keep_write is None else on_loop(self._keep_write)
        return attrs.evolve(self, cancelled=cancelled, emit=on_loop(self.emit), logger=logger, keep_write=keep)

    @property
    def max_chars(self) -> int | None:
        """The number of characters that the body asked to cut its result to, if it did."""
        return self._scope.max_chars

    @property
    def threads(self) -> ThreadPool | None:
        """The engine's threads; ``None`` outside of an engine."""
        return self._threads

    @property
    def leaked(self) -> list[str] | None:
        """The list that collects the names of abandoned threads."""
        return self._leaked
