"""
The exception classes of stepengine, grouped by the origin of the fault.

::

  StepEngineError
    AgentError           the author's: DefinitionError, InputError, HandlerError, BadYield, ToolNotAvailable, ToolInputError,
                         OutputMissing, PerformError, ChildError, ExternalAgentError, RaceLost
    ModelError           the provider's: UnknownModel, MissingKey, TruncatedReply, ContextOverflow
    ToolError            a tool's: PermissionDenied, PathOutsideRoot, BlockedAddress, ToolServerError
    WorkspaceLost        the workspace of tools cannot be reached
    DatabaseUnavailable  the database of durable runs cannot be reached
    ExecutorBusy         a durable worker with the same id is alive
    LimitExceeded        a limit of the run is reached
    TranscriptError      unpaired or misplaced messages
    DataError            a value that is not JSON, or a stored form that cannot be read: SecretFound
    SessionError         SessionConflict, AnswerRejected
    JournalError         JournalCorrupt, JournalLocked, JournalMissing, JournalVersion, JournalWriteFailed,
                         ReplayDivergence, UndoRefused, UnknownOutcome

LimitReached is not part of the tree. It is raised at a handler's ``yield`` when a limit is reached. It is not an ``Exception``, so
``except Exception`` does not catch it. Callers receive the ``LimitExceeded`` in it.

Every error is data: a message and the attributes that its class lists in ``fields``. Two errors of one class with equal messages and
fields are equal. The codec of ``stepengine.data`` stores and loads them without running code.
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
        message: The problem, its location, and what to do.
        fields: The names of the attributes that are stored and compared in addition to the message.
        transient: The names of attributes that are neither stored nor compared.
        where: ``file:line`` of the author's code that caused the error; ``""`` if none did. It is neither stored nor compared.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    transient: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "") -> None:
        # Lone surrogates cannot be stored; the message about a value must not cause a second error.
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


def _rebuild_error(kind: type[StepEngineError], message: str, fields: dict[str, object], where: str) -> StepEngineError:
    """Return the error that was pickled, made of its class, message and fields."""
    made = kind(message, **fields)
    made.where = where or made.where
    return made


class AgentError(StepEngineError):
    """The author of an agent, or the caller of the engine, made a mistake."""


class DefinitionError(AgentError):
    """An agent definition, a tool or an engine cannot be created with these arguments."""


class InputError(AgentError):
    """The prompt or params of a run do not match the agent's schema; *issues* has a sentence for each invalid field."""

    fields = ("issues",)

    def __init__(self, message: str = "", *, issues: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.issues = tuple(issues)


class HandlerError(AgentError):
    """
    A handler, hook or prompt raised an exception of another class, which is the ``__cause__`` in the same process.

    Attributes:
        kind: The class name of the original exception.
        location: ``file:line`` of the author's code; ``""`` if unknown.
    """

    fields = ("kind", "location")

    def __init__(self, message: str = "", *, kind: str = "", location: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.location = self.where = location


class BadYield(AgentError):
    """
    A handler or hook yielded an object that is not a yieldable.

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
        tool_name: The requested name.
        available: The names of the available tools.
    """

    fields = ("tool_name", "available")

    def __init__(self, message: str = "", *, tool_name: str = "", available: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.available = tuple(available)


class ToolInputError(AgentError):
    """
    The input of a tool call does not match the tool's schema.

    Attributes:
        tool_name: The name of the tool.
        issues: A sentence for each invalid field.
    """

    fields = ("tool_name", "issues")

    def __init__(self, message: str = "", *, tool_name: str = "", issues: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.issues = tuple(issues)


class OutputMissing(AgentError):
    """A run or a typed `Complete` has no valid structured output; *issues* explain why the last one was rejected."""

    fields = ("issues",)

    def __init__(self, message: str = "", *, issues: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.issues = tuple(issues)


class PerformError(AgentError):
    """
    The function of a ``Perform`` raised an exception, or returned a value that is not JSON.

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
    The program of an external agent did not return an answer.

    Attributes:
        kind: ``"start"`` if it did not start, ``"protocol"`` if it does not support the protocol or its version, ``"auth_required"`` if
            it requires a login, ``"session"`` if it could not continue a session, ``"ended"`` if it ended during the turn, ``"failed"``
            if it returned an error, ``"time"`` if it did not respond in time.
    """

    fields = ("kind",)

    def __init__(self, message: str = "", *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class RaceLost(AgentError):
    """Another member of the same ``Race`` won, so this member was cancelled. Handlers never receive this error."""


class ModelError(StepEngineError):
    """
    A provider failed or returned an invalid reply.

    Attributes:
        retryable: Whether the same request may succeed later.
        status: The HTTP status, if there was one.
        request_id: The provider's id of the request, if known.
        retry_after: The seconds to wait that the provider requested, if it did.
        kind: A short word for the cause. Providers of other projects use ``"http"`` (a status), ``"connection"``, ``"timeout"``,
            ``"protocol"`` (a malformed reply), ``"truncated"``, ``"settings"``, ``"message"`` and ``"unsupported_part"`` (a request that
            cannot be sent). Other words are those of one provider.
        usage: The tokens that the failed attempt used; ``None`` if unknown.
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
    """A model string names no registered provider, or no model is configured."""


class MissingKey(ModelError):
    """No API key was passed, and the environment contains none."""


class TruncatedReply(ModelError):
    """A reply ended without the final marker of its protocol; it is discarded."""


class ContextOverflow(ModelError):
    """The request is longer than the model's context."""


class ToolError(StepEngineError):
    """
    A tool call failed; raised by ``yield from ToolCall(...)`` and ``yield from call(...)``.

    Attributes:
        tool_name: The name of the tool.
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
    """A web tool rejected an address."""


class LimitExceeded(StepEngineError):
    """
    A limit of the run was reached.

    Attributes:
        kind: The limit, such as ``"steps"``, ``"actions"``, ``"tokens"``, ``"cost"``, ``"seconds"``, ``"depth"`` or ``"children"``.
        limit: The value of the limit, if it has one.
        path: While the limit asks a person (``Limits(ask=True)``), the path of the run with this limit in the run tree.
        more: While the limit asks a person, the amount that an approval adds; ``None`` otherwise, such as after a denial.
        result: The ``RunResult``, if ``on_max_steps="raise"`` raised the error to a caller; not stored.
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

    It is a ``BaseException``, so ``except Exception`` does not catch it. A handler that catches it may clean up and return a partial
    output. The status of the run remains ``failed``, or ``max_steps`` for steps. Effects that do not need the reached limit still
    work. A second ``LimitReached`` that the handler catches closes the handler.
    """

    def __init__(self, error: LimitExceeded) -> None:
        super().__init__(error.message)
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        return LimitReached, (self.error,)


class TranscriptError(StepEngineError):
    """A history would contain an unpaired call or result, or a misplaced message."""


class DataError(StepEngineError):
    """
    A value is not JSON, or a stored form cannot be read: unknown field, unknown type, future version.

    Attributes:
        path: The path of the invalid part in the value, such as ``"$.input.items[3]"``.
    """

    fields: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(self, message: str = "", *, path: str = "$") -> None:
        super().__init__(message)
        self.path = path


class SecretFound(DataError):
    """
    A value that was to be written contains a secret; it was not written.

    Attributes:
        rule: The name of the rule that found it, or of the known secret; never the secret itself.
    """

    fields = ("path", "rule")

    def __init__(self, message: str = "", *, path: str = "$", rule: str = "") -> None:
        super().__init__(message, path=path)
        self.rule = rule


class SessionError(StepEngineError):
    """A session store failed or rejected an operation."""


class SessionConflict(SessionError):
    """Another writer saved this session after it was loaded."""


class AnswerRejected(SessionError):
    """An answer matches no open question, or not the question that it names."""


class JournalError(StepEngineError):
    """A journal cannot be written or read."""


class JournalCorrupt(JournalError):
    """A record of a journal is damaged."""


class JournalLocked(JournalError):
    """Another process writes this journal: *pid* on *host*, if known."""

    fields = ("pid", "host")

    def __init__(self, message: str = "", *, pid: int | None = None, host: str = "") -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class JournalMissing(JournalError):
    """
    A journal does not exist or is empty.

    Attributes:
        path: The path of the journal; ``""`` for a journal in memory.
        beside: Other journals in the same folder, or other runs in the same file, the likeliest first.
    """

    fields = ("path", "beside")

    def __init__(self, message: str = "", *, path: str = "", beside: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.path, self.beside = path, tuple(beside)


class JournalVersion(JournalError):
    """A journal was written by a newer version."""


class JournalWriteFailed(JournalError):
    """A record could not be written durably."""


class ReplayDivergence(JournalError):
    """
    A replayed run differs from its journal.

    Attributes:
        kind: ``"changed"``, ``"kind"``, ``"extra"``, ``"unused"``, ``"undecodable"``, ``"live_result"``, ``"end"``.
        address: The first effect that differs, such as ``"#5"`` or ``"3.2#1"``.
        step: The model step of that run in which it happened, from 1; 0 before the first one.
        site: ``file:line`` of the author's ``yield``; ``""`` if no handler was waiting.
        diff: The differences, each as (JSON pointer, recorded value, new value).
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
    The writes of a run cannot be undone; nothing was changed.

    Attributes:
        files: The files that prevent the undo, each as (path, reason).
    """

    fields = ("files",)

    def __init__(self, message: str = "", *, files: Sequence[Sequence[str]] = ()) -> None:
        super().__init__(message)
        self.files: tuple[Any, ...] = tuple([f if isinstance(f, tuple) else tuple(f) for f in files])


class WorkspaceLost(StepEngineError):
    """The workspace is unreachable, or its connection ended. The result says nothing about the project."""


class UnknownOutcome(JournalError):
    """A crash or a lost connection interrupted an effect, which may or may not have happened."""


class DatabaseUnavailable(StepEngineError):
    """The database of durable runs cannot be reached."""


class ExecutorBusy(StepEngineError):
    """Another process uses the same executor id, or an executor that should have ended is alive."""
