"""
The errors of stepengine, filed by whose fault they are: exception classes and nothing else.

::

  StepEngineError
    AgentError           the author's: DefinitionError, InputError, HandlerError, BadYield, ToolNotAvailable, ToolInputError,
                         OutputMissing, PerformError, ChildError, ExternalAgentError, RaceLost
    ModelError           the provider's: UnknownModel, MissingKey, TruncatedReply, ContextOverflow
    ToolError            a tool's: PermissionDenied, PathOutsideRoot, BlockedAddress, ToolServerError
    WorkspaceLost        where tools run cannot be reached
    DatabaseUnavailable  the database of durable runs cannot be reached
    ExecutorBusy         a durable worker of the same id is alive
    LimitExceeded        a budget of the run is spent
    TranscriptError      unpaired or misplaced messages
    DataError            a value that is not JSON, or a stored form that cannot be read: SecretFound
    SessionError         SessionConflict, AnswerRejected
    JournalError         JournalCorrupt, JournalLocked, JournalMissing, JournalVersion, JournalWriteFailed,
                         ReplayDivergence, UndoRefused, UnknownOutcome

Beside the tree stands LimitReached, the signal by which a spent limit arrives at a handler's own ``yield``. It is no
``Exception``, so that ``except Exception`` does not swallow it; callers see the ``LimitExceeded`` that it carries.

Every error is data: a message and the fields that its class names in ``fields``. Two errors of one class with equal
messages and fields are equal, and the codec of ``stepengine.data`` stores and loads them without running code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = (
    "AgentError", "AnswerRejected", "BadYield", "BlockedAddress", "ChildError", "ContextOverflow", "DataError",
    "DatabaseUnavailable", "DefinitionError", "ExecutorBusy", "ExternalAgentError", "HandlerError", "InputError", "JournalCorrupt", "JournalError", "JournalLocked",
    "JournalMissing", "JournalVersion", "JournalWriteFailed", "LimitExceeded", "LimitReached", "MissingKey",
    "ModelError", "OutputMissing", "PathOutsideRoot", "PerformError", "PermissionDenied", "RaceLost", "ReplayDivergence",
    "SecretFound", "SessionConflict", "SessionError", "StepEngineError", "ToolError", "ToolInputError", "ToolNotAvailable", "ToolServerError", "TranscriptError",
    "TruncatedReply", "UndoRefused", "UnknownModel", "UnknownOutcome", "WorkspaceLost",
)  # fmt: skip


class StepEngineError(Exception):
    """
    The root of every error that stepengine raises.

    Attributes:
        message: What happened, where, and what would have been fine.
        fields: The names of the attributes that belong to the error's value beside its message.
        transient: The names of attributes that are not stored and do not count for equality.
        where: ``file:line`` of the author's code that it came from; ``""`` where no line of an author's had part in it. Not
            stored, and it does not count for equality.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    transient: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "") -> None:
        # Lone surrogates could not be stored; what an error says about a value must not make a second error.
        self.message = message.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self.where = ""
        super().__init__(self.message)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.message == other.message and all(getattr(self, f) == getattr(other, f) for f in self.fields)

    def __hash__(self) -> int:
        return hash((type(self), self.message))

    def __reduce__(self) -> tuple[object, ...]:
        fields = {f: getattr(self, f) for f in (*self.fields, *self.transient)}
        return _rebuild_error, (type(self), self.message, fields, self.where)


def _rebuild_error(
    kind: type[StepEngineError], message: str, fields: dict[str, object], where: str = ""
) -> StepEngineError:
    made = kind(message, **fields)
    made.where = where or made.where
    return made


class AgentError(StepEngineError):
    """The author of an agent, or the caller of the engine, made a mistake."""


class DefinitionError(AgentError):
    """An agent definition, a tool or an engine cannot be built as asked."""


class InputError(AgentError):
    """The prompt or params of a run do not fit the agent's schema; one of *issues* per field."""

    fields = ("issues",)

    def __init__(self, message: str = "", *, issues: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.issues = tuple(issues)


class HandlerError(AgentError):
    """
    A handler, hook or prompt raised an exception that is not one of ours; the original is ``__cause__`` while it lives.

    Attributes:
        kind: The class name of the original exception.
        location: ``file:line`` of the author's code, or ``""`` when it is unknown.
    """

    fields = ("kind", "location")

    def __init__(self, message: str = "", *, kind: str = "", location: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.location = self.where = location


class BadYield(AgentError):
    """
    A handler or hook yielded something that the machine does not know.

    Attributes:
        location: ``file:line`` of the ``yield``.
    """

    fields = ("location",)

    def __init__(self, message: str = "", *, location: str = "") -> None:
        super().__init__(message)
        self.location = self.where = location


class ToolNotAvailable(AgentError):
    """
    A handler called a tool that its agent does not have.

    Attributes:
        tool_name: The name that was asked for.
        available: The names that would have been fine.
    """

    fields = ("tool_name", "available")

    def __init__(self, message: str = "", *, tool_name: str = "", available: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.available = tuple(available)


class ToolInputError(AgentError):
    """
    The input of a tool call does not fit the tool's schema.

    Attributes:
        tool_name: The tool.
        issues: One sentence per offending field.
    """

    fields = ("tool_name", "issues")

    def __init__(self, message: str = "", *, tool_name: str = "", issues: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.issues = tuple(issues)


class OutputMissing(AgentError):
    """A run or a typed `Complete` has no valid structured output; *issues* say why the last one was refused."""

    fields = ("issues",)

    def __init__(self, message: str = "", *, issues: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.issues = tuple(issues)


class PerformError(AgentError):
    """
    The function of a ``Perform`` raised, or returned a value that is not JSON.

    Attributes:
        kind: The class name of the original exception.
    """

    fields = ("kind",)

    def __init__(self, message: str = "", *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class ChildError(AgentError):
    """
    A child run that was awaited with ``yield from AgentCall(...)`` did not complete.

    Attributes:
        agent_id: The child's agent.
        status: The child's run status.
        result: The ``ChildResult``; not stored.
    """

    fields = ("agent_id", "status")
    transient = ("result",)

    def __init__(self, message: str = "", *, agent_id: str = "", status: str = "", result: Any = None) -> None:
        super().__init__(message)
        self.agent_id = agent_id
        self.status = status
        self.result = result


class ExternalAgentError(AgentError):
    """
    The program of an external agent could not be led to its answer.

    Attributes:
        kind: ``"start"`` when it did not start, ``"protocol"`` when it does not speak the protocol or another version of it,
            ``"auth_required"`` when it wants to be signed in first, ``"session"`` when it could not go on with a session,
            ``"ended"`` when it ended in the middle, ``"failed"`` when it answered with an error, ``"time"`` when it did not answer.
    """

    fields = ("kind",)

    def __init__(self, message: str = "", *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class RaceLost(AgentError):
    """Another member of the same ``Race`` won, so this one was cancelled. Handlers never receive this error."""


class ModelError(StepEngineError):
    """
    A provider failed or answered nonsense.

    Attributes:
        retryable: Whether the same request may succeed later.
        status: The HTTP status, if there was one.
        request_id: The provider's id of the request, if known.
        retry_after: Seconds the provider asked to wait, if it did.
        kind: A short word for the cause. Providers of other projects use ``"http"`` (a status), ``"connection"``, ``"timeout"``,
            ``"protocol"`` (a malformed reply), ``"truncated"``, ``"settings"``, ``"message"`` and ``"unsupported_part"`` (a request that
            cannot be sent). Other words are those of one provider.
        usage: What the failed attempt is known to have used; ``None`` when unknown.
    """

    fields = ("retryable", "status", "request_id", "retry_after", "kind", "usage")

    def __init__(
        self,
        message: str = "",
        *,
        retryable: bool = False,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        kind: str = "",
        usage: Any = None,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after
        self.kind = kind
        self.usage = usage


class UnknownModel(ModelError):
    """A model string names no registered provider, or there is no model at all."""


class MissingKey(ModelError):
    """No API key was passed, and the environment contains none."""


class TruncatedReply(ModelError):
    """A reply ended without its protocol's terminal marker; nothing of it counts."""


class ContextOverflow(ModelError):
    """The request is longer than the model's context."""


class ToolError(StepEngineError):
    """
    A tool call failed; raised by ``yield from ToolCall(...)`` and ``yield from call(...)``.

    Attributes:
        tool_name: The tool.
        result: The error ``ToolResult``; not stored.
    """

    fields = ("tool_name",)
    transient = ("result",)

    def __init__(self, message: str = "", *, tool_name: str = "", result: Any = None) -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.result = result


class ToolServerError(ToolError):
    """A tool server is unavailable, or its connection ended. The agent did not cause this failure."""


class PermissionDenied(ToolError):
    """A hook or policy denied the call."""


class PathOutsideRoot(ToolError):
    """A path leads out of the tool's root folder."""


class BlockedAddress(ToolError):
    """A web tool refused an address."""


class LimitExceeded(StepEngineError):
    """
    A limit of the run was reached.

    Attributes:
        kind: ``"steps"``, ``"actions"``, ``"tokens"``, ``"cost"``, ``"seconds"``, ``"depth"``, ``"children"`` ...
        limit: The number that was reached, if there is one.
        path: While a limit asks a person (``Limits(ask=True)``), the path of the run whose limit it is.
        more: While it asks, how much more a yes allows; ``None`` otherwise, such as after a no.
        result: The ``RunResult``, when it was raised to a caller because of ``on_max_steps="raise"``; not stored.
    """

    fields = ("kind", "limit", "path", "more")
    transient = ("result",)

    def __init__(
        self,
        message: str = "",
        *,
        kind: str = "",
        limit: float | None = None,
        path: str = "",
        more: float | None = None,
        result: Any = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.limit = limit
        self.path = path
        self.more = more
        self.result = result


class LimitReached(BaseException):
    """
    Raised at a handler's ``yield`` when a limit is reached; *error* names the limit.

    It is a ``BaseException``, so ``except Exception`` does not swallow it. A handler that catches it may tidy up and return
    what it has: that becomes the output, and the status stays what the limit makes of it, ``failed``, or ``max_steps`` for
    steps. Effects that need none of the spent limit still work; a second one that is caught closes the handler.
    """

    def __init__(self, error: LimitExceeded) -> None:
        super().__init__(error.message)
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        return LimitReached, (self.error,)


class TranscriptError(StepEngineError):
    """A history would hold an unpaired call or result, or a misplaced message."""


class DataError(StepEngineError):
    """
    A value is not JSON, or a stored form cannot be read: unknown field, unknown type, future version.

    Attributes:
        path: Where in the value the fault is, such as ``"$.input.items[3]"``.
    """

    fields: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(self, message: str = "", *, path: str = "$") -> None:
        super().__init__(message)
        self.path = path


class SecretFound(DataError):
    """
    Something that was about to be written holds a secret; it was not written.

    Attributes:
        rule: What the value looks like, or the name of the known secret; never the value.
    """

    fields = ("path", "rule")

    def __init__(self, message: str = "", *, path: str = "$", rule: str = "") -> None:
        super().__init__(message, path=path)
        self.rule = rule


class SessionError(StepEngineError):
    """A conversation store refused an operation."""


class SessionConflict(SessionError):
    """Somebody else saved this session in the meantime."""


class AnswerRejected(SessionError):
    """An answer fits no open question, or not the question it names."""


class JournalError(StepEngineError):
    """A journal cannot be written or read."""


class JournalCorrupt(JournalError):
    """A record of a journal is damaged."""


class JournalLocked(JournalError):
    """Another owner writes this journal: process *pid* of *host*, as far as is known."""

    fields = ("pid", "host")

    def __init__(self, message: str = "", *, pid: int | None = None, host: str = "") -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class JournalMissing(JournalError):
    """
    There is no journal where one was looked for, or nothing was recorded in it.

    Attributes:
        path: Where was looked; ``""`` for a journal in memory.
        beside: What lies there instead: journals of the same folder, or runs of the same file, the likeliest first.
    """

    fields = ("path", "beside")

    def __init__(self, message: str = "", *, path: str = "", beside: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.path, self.beside = path, tuple(beside)


class JournalVersion(JournalError):
    """A journal was written by a newer version."""


class JournalWriteFailed(JournalError):
    """A record could not be made durable."""


class ReplayDivergence(JournalError):
    """
    A replayed run differs from its journal.

    Attributes:
        kind: ``"changed"``, ``"kind"``, ``"extra"``, ``"unused"``, ``"undecodable"``, ``"live_result"``, ``"end"``.
        address: The first effect that differs, such as ``"#5"`` or ``"3.2#1"``.
        step: The model step of that run in which it happened, from 1; 0 before the first one.
        site: ``file:line`` of the author's ``yield``; ``""`` when no handler was waiting.
        diff: What differs: JSON pointer, what was recorded, what came now.
    """

    fields = ("kind", "address", "step", "site", "diff")

    def __init__(
        self, message: str = "", *, kind: str = "", address: str = "", step: int = 0, site: str = "",
        diff: Sequence[Sequence[str]] = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.kind, self.address, self.step, self.site = kind, address, step, site
        self.where = site
        self.diff: tuple[Any, ...] = tuple([d if isinstance(d, tuple) else tuple(d) for d in diff])


class UndoRefused(JournalError):
    """
    The writes of a run are not undone; nothing was changed.

    Attributes:
        files: The files that keep it from being undone, each with why.
    """

    fields = ("files",)

    def __init__(self, message: str = "", *, files: Sequence[Sequence[str]] = ()) -> None:
        super().__init__(message)
        self.files: tuple[Any, ...] = tuple([f if isinstance(f, tuple) else tuple(f) for f in files])


class WorkspaceLost(StepEngineError):
    """The workspace is unreachable, or its connection ended. The result says nothing about the project."""


class UnknownOutcome(JournalError):
    """An effect was cut off by a crash and may or may not have happened."""


class DatabaseUnavailable(StepEngineError):
    """The database of durable runs cannot be reached."""


class ExecutorBusy(StepEngineError):
    """Another process works under the same executor id, or an executor that should be dead is alive."""
