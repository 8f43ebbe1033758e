"""Bodies of requests and responses: strict JSON, pages of lists, and an error message for each invalid field."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import jiter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepengine.data.json import freeze
from stepengine.errors import InputError
from stepengine.server.problems import Problem

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
MOST_LISTED = 100
MAX_TEXT = 256 * 1024
"""The most characters of a text in a request."""
MAX_CURSOR = 2_000
MAX_DIGITS = 9
MAX_TIME = 1e12
"""The most seconds since 1970 in a cursor: a database counts in milliseconds, and cannot store every float."""


class Body(BaseModel):
    """The base class of request bodies."""

    # An unknown name is an error: a misspelt one would silently get its default.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class View(BaseModel):
    """The base class of response bodies."""

    model_config = ConfigDict(extra="forbid")

    def response(self, status: int = 200) -> Response:
        """Return the view as an HTTP response."""
        from starlette.responses import Response

        return Response(self.model_dump_json(), status, media_type="application/json")


class MessageView(View):
    """A message of a conversation."""

    role: str
    text: str


class MessageReceipt(View):
    """The receipt for a message or event that was stored for a run."""

    run_id: str
    is_new: Annotated[bool, Field(description="False if a message with the same id was already stored.")]


async def read_json_body(request: Request) -> Any:
    """
    Return the JSON body of a request as an immutable value; ``plain`` makes dicts and lists of it.

    Raises:
        InputError: For invalid JSON, duplicate keys, NaN and infinity.
        Problem: 415 unless the content type is ``application/json``.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A form of another site's page may send the other content types without a preflight request.
        msg = f"the body must be application/json, not {kind[:100] or 'without a type'!r}"
        raise Problem(msg, status=415, kind="no_json")
    return parse_strict_json(await request.body())


def parse_strict_json(data: bytes) -> Any:
    """
    Parse JSON, and return it as an immutable value; raise ``InputError`` for duplicate keys, NaN and infinity.

    Raises:
        InputError: For invalid JSON, duplicate keys, NaN and infinity.
    """
    try:
        # Another parser of the same bytes may read duplicate keys and NaN as something else, so they are refused.
        read = jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        msg = f"the body is invalid: {error}"
        raise make_input_error(msg) from None
    return freeze(read)


async def parse_body(request: Request, model: type[Model], *, may_be_empty: bool = False) -> Model:
    """
    Parse the body of a request as *model*; with *may_be_empty*, an empty body returns the defaults.

    Errors are those of ``read_json_body`` and ``validate_as``.
    """
    if may_be_empty and not await request.body():
        return model()
    return validate_as(model, await read_json_body(request))


def validate_as(model: type[Model], json_value: Any) -> Model:
    """
    Return JSON as an object of *model*; raise ``InputError`` if it is invalid.

    Raises:
        InputError: With an issue for each invalid field.
    """
    try:
        return model.model_validate(json_value)
    except ValidationError as error:
        issues = tuple(
            [
                _format_validation_error(one)
                for one in error.errors(include_url=False, include_context=False, include_input=False)
            ]
        )
        msg = f"the body is invalid: {'; '.join(issues[:5])}"
        raise InputError(msg, issues=issues) from None


def _format_validation_error(error: Mapping[str, Any]) -> str:
    """Return a validation error as ``member: message``."""
    where = ".".join([str(part) for part in error["loc"]])
    return f"{where}: {error['msg']}" if where else str(error["msg"])


# --- pages of lists ---------------------------------------------------------------------------------------------------


def make_input_error(message: str) -> InputError:
    """Return an ``InputError`` with one issue."""
    return InputError(message, issues=(message,))


def parse_limit(request: Request) -> int:
    """Parse the query parameter ``limit``, 20 by default; raise ``InputError`` unless it is from 1 to 100."""
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= MAX_DIGITS and 1 <= int(limit) <= MOST_LISTED):
        msg = f"limit: must be from 1 to {MOST_LISTED}"
        raise make_input_error(msg)
    return int(limit)


def cut_page(
    items: Sequence[Item], limit: int, get_position: Callable[[Item], tuple[float, str]]
) -> tuple[list[Item], str | None]:
    """Return the first *limit* items, and the cursor of the next page; the cursor is ``None`` if there are no more items."""
    shown = list(items[:limit])
    return shown, encode_cursor(*get_position(shown[-1])) if len(items) > limit else None


def encode_cursor(at: float, name: str) -> str:
    """Encode a position in a list, a time and a name, as a cursor."""
    return base64.urlsafe_b64encode(json.dumps([at, name], ensure_ascii=False).encode()).decode()


def parse_cursor(request: Request) -> tuple[float, str] | None:
    """Return the time and the name in the query parameter ``cursor``; ``None`` without one. Raise ``InputError`` if it is invalid."""
    cursor = request.query_params.get("cursor")
    if not cursor:
        return None
    with contextlib.suppress(ValueError, TypeError, binascii.Error, RecursionError):
        created, run = json.loads(base64.b64decode(cursor[:MAX_CURSOR].encode(), altchars=b"-_", validate=True))
        # A number of many digits is no float, and half of a pair of surrogates no text for a database.
        if isinstance(created, float) and abs(created) < MAX_TIME and isinstance(run, str) and run.encode():
            return created, run
    msg = "cursor: must be the `next` value of an earlier list"
    raise make_input_error(msg)
