"""What clients send, read: JSON that every reader understands alike, and a sentence for each field that cannot be used."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jiter
from pydantic import BaseModel, ConfigDict, ValidationError

from stepengine.data.json import freeze
from stepengine.errors import InputError
from stepengine.server.problems import Problem

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = (
    "MOST_LISTED",
    "Body",
    "View",
    "body_of",
    "checked_as",
    "cursor_of",
    "json_of",
    "limit_of",
    "page_of",
    "place_of",
    "strict_json",
    "unusable",
)

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
MOST_LISTED = 100
MAX_CURSOR = 2_000


class Body(BaseModel):
    """What a client sends."""

    # What is not known is a mistake of whoever writes it: a misspelt name would be taken for its default.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class View(BaseModel):
    """What a client gets."""

    model_config = ConfigDict(extra="forbid")

    def response(self, status: int = 200) -> Response:
        """Return it as a response."""
        from starlette.responses import Response

        return Response(self.model_dump_json(), status, media_type="application/json")


async def json_of(request: Request) -> Any:
    """
    Return the JSON that was sent, which cannot be changed.

    Raises:
        InputError: for what is not JSON, or none that two readers would understand alike.
        Problem: 415, for what says that it is not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A form of another site's page may send any of the other kinds without asking first.
        msg = f"a body is application/json, not {kind[:100] or 'without a type'!r}"
        raise Problem(msg, status=415, kind="no_json")
    return strict_json(await request.body())


def strict_json(data: bytes) -> Any:
    """
    Return JSON, which cannot be changed.

    Raises:
        InputError: for what is not JSON, or none that two readers would understand alike.
    """
    try:
        # What the next reader of the same bytes may take for something else is refused: a name that is there twice, NaN.
        read = jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        msg = f"the body cannot be used: {error}"
        raise InputError(msg, issues=(msg,)) from None
    return freeze(read)


async def body_of(request: Request, model: type[Model], *, may_be_empty: bool = False) -> Model:
    """
    Return what was sent as *model*; nothing at all as one without values, where that may be.

    Errors are those of ``json_of`` and ``checked_as``.
    """
    if may_be_empty and not await request.body():
        return model()
    return checked_as(model, await json_of(request))


def checked_as(model: type[Model], value: Any) -> Model:
    """
    Return JSON as *model*.

    Raises:
        InputError: with a sentence for each field that cannot be used.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        issues = tuple(
            [_issue(one) for one in error.errors(include_url=False, include_context=False, include_input=False)]
        )
        msg = f"the body cannot be used: {'; '.join(issues[:5])}"
        raise InputError(msg, issues=issues) from None


def _issue(one: Mapping[str, Any]) -> str:
    where = ".".join([str(part) for part in one["loc"]])
    return f"{where}: {one['msg']}" if where else str(one["msg"])


# --- lists that go on -------------------------------------------------------------------------------------------------


def unusable(wrong: str) -> InputError:
    """Return the error for one thing that cannot be used; *wrong* says what would have been fine."""
    return InputError(wrong, issues=(wrong,))


def limit_of(request: Request) -> int:
    """Return how many a list is to have at most; raises ``InputError`` for what is no such number."""
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_LISTED):
        msg = f"limit: 1 to {MOST_LISTED}"
        raise unusable(msg)
    return int(limit)


def page_of(
    found: Sequence[Item], limit: int, place: Callable[[Item], tuple[float, str]]
) -> tuple[list[Item], str | None]:
    """Return what is shown of what was found, which may be one more than that, and the cursor of what follows."""
    shown = list(found[:limit])
    return shown, cursor_of(*place(shown[-1])) if len(found) > limit else None


def cursor_of(at: float, name: str) -> str:
    """Return the cursor of what follows a place in a list."""
    return base64.urlsafe_b64encode(json.dumps([at, name], ensure_ascii=False).encode()).decode()


def place_of(request: Request) -> tuple[float, str] | None:
    """Return the place behind which a list is to go on; ``None`` for its beginning; raises ``InputError`` for what no list gave."""
    cursor = request.query_params.get("cursor")
    if not cursor:
        return None
    with contextlib.suppress(ValueError, TypeError, binascii.Error, RecursionError):
        created, run = json.loads(base64.b64decode(cursor[:MAX_CURSOR].encode(), altchars=b"-_", validate=True))
        # A number of many digits is no float, and half of a pair of surrogates no text for a database.
        if isinstance(created, float) and math.isfinite(created) and isinstance(run, str) and run.encode():
            return created, run
    msg = "cursor: what `next` of an earlier list said"
    raise unusable(msg)
