"""
Problem documents (RFC 9457) for clients: one kind for each error of ``stepengine.errors``.

Routes do not belong here. A document never has paths, hosts, tracebacks, or messages of exceptions of other packages.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any

from stepengine.data.visible import cut_after, visible
from stepengine.errors import (
    AgentError,
    AnswerRejected,
    DatabaseUnavailable,
    DataError,
    DefinitionError,
    InputError,
    JournalCorrupt,
    JournalLocked,
    JournalMissing,
    JournalVersion,
    JournalWriteFailed,
    LimitExceeded,
    MissingKey,
    ModelError,
    PermissionDenied,
    ReplayDivergence,
    SessionConflict,
    SessionError,
    StepEngineError,
    ToolInputError,
    TranscriptError,
    UndoRefused,
    UnknownModel,
    UnknownOutcome,
    WorkspaceLost,
)

if TYPE_CHECKING:
    from starlette.responses import Response

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
URN = "urn:stepengine:problem:"
OF_STATUS = {404: "not_found", 405: "method_not_allowed"}
"""The kinds of errors that the router raises, by status."""
MAX_TEXT = 2_000
"""The most characters of a text in a document."""
MAX_ITEMS = 1_000
"""The most values in the additional members of a document."""
MAX_DEPTH = 8
MAX_BITS = 64
WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Problem(Exception):
    """
    The refusal of a request, with the document that answers it.

    Args:
        message: What happened and what to do; the document's ``detail``.
        status: The HTTP status, 400 to 599.
        kind: A word for the cause, such as ``rate_limited``; the document's ``type`` is ``urn:stepengine:problem:KIND``.
        members: Additional members of the document, as JSON.
        headers: Headers of the response, such as ``Retry-After``.
    """

    def __init__(
        self, message: str, *, status: int, kind: str, members: Mapping[str, Any] = {}, headers: Mapping[str, str] = {}
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.members, self.headers = dict(members), dict(headers)

    def document(self) -> dict[str, Any]:
        """Return the problem as JSON: ``type``, ``title``, ``status``, ``detail`` and further members, with texts cut and made visible."""
        own = {
            "type": f"{URN}{self.kind}",
            "title": _get_status_title(self.status),
            "status": self.status,
            "detail": _escape_and_cut_text(self.message),
        }
        return {**_BoundedConverter().convert_value(self.members), **own}

    def response(self) -> Response:
        """Return the problem as a response of Starlette that must not be cached."""
        from starlette.responses import Response

        body = json.dumps(self.document(), ensure_ascii=True, allow_nan=False).encode("ascii")
        headers = {"cache-control": "no-store", **self.headers}
        return Response(body, status_code=self.status, headers=headers, media_type=MEDIA_TYPE)


def problem_of(error: Exception, *, members: Mapping[str, Any] = {}) -> Problem:
    """
    Convert an error to the HTTP problem for the client, and log errors of the server.

    An ``InputError`` is 422 with its ``issues``, an ``AnswerRejected`` 409, a journal that another process holds 409, a missing
    journal 404. Errors of Starlette have their own status. Any other error is 500 without details.

    Args:
        error: The error; a ``Problem`` is returned unchanged.
        members: Additional members of the document, such as ``{"open": [...]}`` for a rejected answer.
    """
    if isinstance(error, Problem):
        return error
    if type(error) is AgentError:  # its subclasses are faults inside an agent
        return Problem(NO_AGENT, status=409, kind=make_snake_case_name(error), members=members)
    for kind, told in TOLD.items():
        if isinstance(error, kind):
            made = told(error)
            made.members.update(members)
            return made
    from starlette.exceptions import HTTPException

    if isinstance(error, HTTPException):
        word = OF_STATUS.get(error.status_code, f"http_{error.status_code}")
        return Problem(
            _get_status_title(error.status_code), status=error.status_code, kind=word, headers=error.headers or {}
        )
    logger.error("a request failed", exc_info=error)
    said = "the run's agent or its journal failed" if isinstance(error, StepEngineError) else "the server failed"
    word = make_snake_case_name(error) if isinstance(error, StepEngineError) else "internal"
    return Problem(f"{said}; the server's log says why", status=500, kind=word, members=members)


def make_snake_case_name(error: StepEngineError) -> str:
    """Return the class name of an error in snake case: ``input_error`` for ``InputError``."""
    return WORD.sub("_", type(error).__name__).lower()


# --- one for each error ---------------------------------------------------------------------------------------------


def _make_message_converter(status: int, **fields: str) -> Callable[[Any], Problem]:
    """Return a function that makes a problem from an error's message, with some of its attributes as members."""

    def make_problem(error: StepEngineError) -> Problem:
        """Return a problem with the message of an error and some of its attributes as members."""
        members = {name: getattr(error, field) for name, field in fields.items()}
        return Problem(error.message, status=status, kind=make_snake_case_name(error), members=members)

    return make_problem


def _make_fixed_text_converter(status: int, message: str, **fields: str) -> Callable[[Any], Problem]:
    """Return a function that converts an error to a ``Problem`` with a fixed *message*, because the error names paths of the server."""

    def make_problem(error: StepEngineError) -> Problem:
        """Return a problem with the fixed message, and log the error if it is one of the server."""
        # Only the operator of the server can correct the cause, so it is in the log.
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.warning("a request was refused: %s", error.message)
        members = {name: getattr(error, field) for name, field in fields.items()}
        return Problem(message, status=status, kind=make_snake_case_name(error), members=members)

    return make_problem


def _problem_from_model_error(error: ModelError) -> Problem:
    logger.warning("a model failed", exc_info=error)
    wait = error.retry_after
    headers = {"Retry-After": str(math.ceil(wait))} if wait is not None and 0 <= wait < MAX_WAIT else {}
    return Problem(
        "the provider of the model failed; the server's log says why",
        status=502,
        kind=make_snake_case_name(error),
        headers=headers,
    )


def _problem_from_database_error(error: DatabaseUnavailable) -> Problem:
    """Return the problem 503 for a database that cannot be reached."""
    said = "the database of the runs cannot be reached; try again in a moment"
    return Problem(said, status=503, kind=make_snake_case_name(error), headers={"Retry-After": "5"})


def _problem_from_data_error(error: DataError) -> Problem:
    """Return the problem 422 for invalid data, with the path of the error in the data."""
    members = {"path": error.path, "issues": [f"{error.path}: {error.message}"]}
    return Problem(error.message, status=422, kind=make_snake_case_name(error), members=members)


def _problem_from_damaged_journal(error: JournalCorrupt) -> Problem:
    """Log an unreadable journal, and return the problem 409 for it, without paths of the server."""
    logger.warning("a journal cannot be read: %s", error.message)
    record = DAMAGED_RECORD.search(error.message)
    which = "a record" if record is None else record[0]
    said = f"{which} of the run's journal is damaged or not written by stepengine; check it on the server with `stepengine journal check`"
    return Problem(said, status=409, kind=make_snake_case_name(error))


DAMAGED_RECORD = re.compile(r"record [0-9]{1,9}")
MAX_WAIT = 86_400
NO_AGENT = "this server does not have the agent of the run; start the server with that agent, or start a new run"
TOLD: Mapping[type[StepEngineError], Callable[[Any], Problem]] = {
    InputError: _make_message_converter(422, issues="issues"),
    ToolInputError: _make_message_converter(422, issues="issues"),
    DataError: _problem_from_data_error,
    TranscriptError: _make_message_converter(422),
    DefinitionError: _make_message_converter(422),
    UnknownModel: _make_message_converter(422),
    DatabaseUnavailable: _problem_from_database_error,
    MissingKey: _make_fixed_text_converter(
        503, "the server has no key for this model; the server's log names the key, and the alternatives"
    ),
    ModelError: _problem_from_model_error,
    PermissionDenied: _make_message_converter(403),
    LimitExceeded: _make_message_converter(409, limit_kind="kind", limit="limit"),
    AnswerRejected: _make_message_converter(409),
    SessionConflict: _make_fixed_text_converter(
        409, "another client wrote to this session in the meantime; reload it, then try again"
    ),
    SessionError: _make_fixed_text_converter(409, "the session rejected this request"),
    JournalCorrupt: _problem_from_damaged_journal,
    JournalMissing: _make_fixed_text_converter(404, "there is no such run"),
    JournalLocked: _make_fixed_text_converter(409, "another process holds this run; try again when it has ended"),
    JournalVersion: _make_fixed_text_converter(
        409, "a newer version of stepengine wrote this run; this server cannot read it"
    ),
    JournalWriteFailed: _make_fixed_text_converter(503, "the run could not be recorded"),
    ReplayDivergence: _make_fixed_text_converter(
        409, "the run diverges from its record", divergence="kind", address="address", step="step"
    ),
    UndoRefused: _make_fixed_text_converter(
        409, "the writes of the run cannot be undone; nothing was changed", files="files"
    ),
    UnknownOutcome: _make_fixed_text_converter(
        409, "a call of this run was interrupted; it may or may not have happened"
    ),
    WorkspaceLost: _make_fixed_text_converter(503, "the workspace of the run's tools cannot be reached"),
}
"""The converter of each error, subclasses before their bases; other errors are faults of the server."""


# --- values as JSON -------------------------------------------------------------------------------------------------


def _get_status_title(status: int) -> str:
    """Return the standard phrase of an HTTP status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Problem"


def _escape_and_cut_text(text: str) -> str:
    """Return a text with invisible characters made visible, cut after 2,000 characters."""
    shown = visible(text[: MAX_TEXT + 1])
    return cut_after(shown, MAX_TEXT)


class _BoundedConverter:
    """Converts values to JSON of bounded size, since an error's fields may hold untrusted data."""

    def __init__(self) -> None:
        self._left = MAX_ITEMS

    def convert_value(self, value: object, depth: int = 0) -> Any:
        """Return a value as JSON: long texts are cut, deep values described, and items above the limit for the document left out."""
        self._left -= 1
        match value:
            case None | bool():
                return value
            case int():
                return value if value.bit_length() <= MAX_BITS else "a number of many digits"
            case float():
                return value if math.isfinite(value) else str(value)
            case str():
                return _escape_and_cut_text(value)
            case Mapping() if depth < MAX_DEPTH:
                items = islice(value.items(), max(0, self._left))
                return {
                    _escape_and_cut_text(name): self.convert_value(each, depth + 1)
                    for name, each in items
                    if self._left > 0
                }
            case Sequence() if depth < MAX_DEPTH and not isinstance(value, bytes | bytearray):
                items = islice(value, max(0, self._left))
                return [self.convert_value(each, depth + 1) for each in items if self._left > 0]
            case _:
                return f"<{type(value).__name__}>"
