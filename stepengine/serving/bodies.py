"""What clients send, read: JSON that every reader understands alike, and a sentence for each field that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jiter
from pydantic import BaseModel, ValidationError

from stepengine.data.json import freeze
from stepengine.errors import InputError
from stepengine.serving.problems import Problem

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ("body_of", "checked_as", "json_of", "strict_json")

Model = TypeVar("Model", bound=BaseModel)


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
