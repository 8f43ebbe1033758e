"""The context of a tool call, and the objects that tools share: ``ToolContext``, ``ResourceMap``, ``RunResources``."""

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
    """The cancellation signal of one call; the cancellation of its run sets it, too."""

    __slots__ = ("_own", "_run")

    def __init__(self, run: CancelSignal) -> None:
        self._run = run
        self._own = threading.Event()

    def is_set(self) -> bool:
        """Return True if the call or its run was cancelled."""
        return self._own.is_set() or self._run.is_set()

    def set(self) -> None:
        """Cancel the call."""
        self._own.set()


class ResourceMap:
    """
    Objects for tools by their type, such as a connection pool; they are not recorded.

    Each object is stored under its own type; ``insert(value, as_type=Base)`` stores it under another type.

    Args:
        values: The first objects.
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
        """Store *value* under *as_type*, by default its own type; an earlier object of that type is replaced."""
        self._values[type(value) if as_type is None else as_type] = value

    def get(self, kind: type[T]) -> T | None:
        """Return the object stored under the type *kind*; ``None`` if there is none."""
        return cast("T | None", self._values.get(kind))

    def remove(self, kind: type[T]) -> T | None:
        """Remove and return the object stored under the type *kind*; ``None`` if there is none."""
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
    """Objects that tools store for one run. They are closed when the run ends, the newest first."""

    __slots__ = ("_locks", "_values")

    def __init__(self) -> None:
        self._values: dict[Hashable, Closable] = {}
        self._locks: dict[Hashable, threading.RLock] = {}

    def get(self, key: Hashable, make: Callable[[], C]) -> C:
        """Return the object stored under *key*, created by *make* at the first call."""
        # Bodies in two threads may call this at once. A slow *make* delays only callers with the same key.
        with self._locks.setdefault(key, threading.RLock()):
            if key not in self._values:
                self._values[key] = make()
        # A key may hold an object of the run, such as its shell, which must not outlive the run.
        self._locks.pop(key, None)
        return cast("C", self._values[key])

    def __iter__(self) -> Iterator[Closable]:
        return iter(list(self._values.values()))

    async def aclose(self) -> list[str]:
        """Close all objects, the newest first, even if one fails; return their sentences and failures for the run's result."""
        mentioned: list[str] = []
        while self._values:
            _, value = self._values.popitem()
            try:
                mentioned += await value.aclose()
            except Exception as error:  # noqa: BLE001  (a tool's code; the other objects are closed nevertheless)
                mentioned.append(f"{type(value).__name__} could not be ended: {type(error).__name__}: {error}")
        return mentioned

    def close_without_waiting(self) -> None:
        """
        Close the objects without an event loop; stop at the first object whose ``aclose`` waits.

        For replays, whose objects do not wait.
        """
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
    """A logger that drops every line."""

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
    The context of a call. A tool body receives it if its first parameter has this type; the schema does not contain it.

    Attributes:
        agent_state: The state before the step.
        tool_call_id: The id of the call.
        tool_name: The name of the tool.
        run_id: The id of the run.
        address: The address of the call in the run tree, ``"path#number"`` as in journals; ``""`` outside of a run.
        input: The validated input of the call as JSON.
        agent_id: The id of the agent.
        agent_name: The display name of the agent.
        agent_description: The purpose of the agent.
        session_id: The id of the conversation; ``None`` without one.
        user_id: The id of the user, if the caller passed one.
        parent_session_id: The id of the parent's conversation; ``None`` for a root run.
        parent_tool_call_id: The id of the call that started this run; ``None`` for a root run.
        ancestor_run_ids: The run ids from the root down to the parent.
        step_index: The index of the step in which the call runs, from 0.
        metadata: The metadata that the caller passed.
        workspace: The workspace, if the caller passed one.
        resources: Objects by type that the caller passed.
        logger: A logger whose lines have the run, agent and step.
        cancelled: ``is_set()`` returns True if the run should stop. For a body in a thread it is also set after the call's
            timeout; an async body is cancelled then.
        remaining_tokens: The number of context tokens that are left, if known: up to the model's context length, or to the
            limit of a context policy.
        threads: The engine's threads; ``None`` outside of an engine.
        leaked: The list to which the names of abandoned threads are added, or ``None``.
        is_typed: Whether the caller may decode the result to its Python type, as handlers do; models receive it as JSON.
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
    threads: ThreadPool | None = attrs.field(default=None, repr=False)
    leaked: list[str] | None = attrs.field(default=None, repr=False)
    is_typed: bool = attrs.field(default=False, repr=False)
    _emit: Callable[[Event], None] = attrs.field(default=_drop_event, repr=False)
    _scope: CallScope = attrs.field(factory=CallScope, repr=False)
    _belongings: Callable[[], RunResources] | None = attrs.field(default=None, repr=False)
    _sleep: Callable[[float], Awaitable[None]] = attrs.field(default=_sleep_on_loop, repr=False)
    _keep_write: Callable[[FileWrite], None] | None = attrs.field(default=None, repr=False)

    @classmethod
    def for_test(cls, **overrides: Any) -> ToolContext:
        """
        Return a context for a unit test; *overrides* set any field.

        ``emit=events.append`` collects events. ``threads=`` is a ``ThreadPool``; without one each call creates its own.
        ``belongings=lambda: mine`` passes the ``RunResources`` of a run, which the test closes with ``await mine.aclose()``.
        ``keep_write=writes.append`` collects the data that a journal would store to undo writes.
        """
        return cls(**{"tool_call_id": "c1", "run_id": "test-run", "agent_id": "test-agent", **overrides})

    @property
    def idempotency_key(self) -> str:
        """
        A key of 64 hexadecimal digits that is the same for every attempt of this call, also after a crash.

        The key is derived from the run id, the call's address and its input. Pass it to a service that charges or sends, so
        that a repeated call has one effect.
        """
        import hashlib

        identity = canonical([self.run_id, self.address, self.input])
        return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()

    def emit(self, event: Event) -> None:
        """Emit ``ToolProgress``, ``ToolLog`` or ``FileChanged``; an empty call id in it is set to this call, with the tool's name."""
        if getattr(event, "tool_call_id", None) == "":
            event = attrs.evolve(event, tool_call_id=self.tool_call_id, tool_name=self.tool_name)  # type: ignore[call-arg]
        self._emit(event)

    @property
    def has_run(self) -> bool:
        """Whether the call is part of a run, for which tools can store objects."""
        return self._belongings is not None

    def get_or_create_run_object(self, key: Hashable, make: Callable[[], C]) -> C:
        """
        Return the object stored under *key* for this run; *make* creates it at the first call.

        The object's ``aclose()`` is awaited when the run ends. Each run of a tree has its own objects.

        Raises:
            StepEngineError: Outside of a run.
        """
        if self._belongings is None:
            msg = f"tool {self.tool_name!r} stores an object for its run, so it can only be called in an agent run"
            raise StepEngineError(msg)
        return self._belongings().get(key, make)

    @property
    def records_writes(self) -> bool:
        """Whether ``record_write`` stores anything: the run has a journal."""
        return self._keep_write is not None

    def record_write(self, write: FileWrite) -> None:
        """Store the data to undo a write in the journal; do nothing without a journal."""
        if self._keep_write is not None:
            self._keep_write(write)

    async def pause(self, seconds: float) -> None:
        """Wait *seconds* by the run's clock."""
        await self._sleep(seconds)

    def request_truncation(self, max_chars: int) -> None:
        """
        Let the result of this call be cut to *max_chars* characters; a note in it reports the removed length.

        Handlers receive the cut result, too. ``@tool(max_chars=...)`` limits only the text for the model.
        """
        self._scope.max_chars = max(0, max_chars)

    def reserve_for_call(self, tool_name: str) -> ToolContext:
        """Return a context for one call, marked as used: this one, or a copy if this one is used or of another tool."""
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
        """Return a copy of this context for a body in a thread; *on_loop* wraps functions so that the event loop calls them."""
        keep = None if self._keep_write is None else on_loop(self._keep_write)
        return attrs.evolve(self, cancelled=cancelled, emit=on_loop(self.emit), logger=logger, keep_write=keep)

    @property
    def requested_max_chars(self) -> int | None:
        """The limit of ``request_truncation``, in characters; ``None`` if the body has not called it."""
        return self._scope.max_chars
