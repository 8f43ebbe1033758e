"""Errors that a program met in place of a reply, as a cassette stores them: connections refused, names unknown, time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import import_module
from typing import Any

MODULES = frozenset(
    {"aiohttp", "asyncio", "builtins", "http", "httpcore", "httpcore2", "httpx", "httpx2", "socket", "ssl", "urllib3"}
)
"""The packages whose errors are made again; loading a cassette runs no other code."""
MAX_DEPTH = 4


CANCELLED = "asyncio.exceptions.CancelledError"
CANCELLED_SECONDS = 60


class WasCancelled(ConnectionError):
    """A request that the program cancelled when it was recorded, and not in the replay."""


async def wait_for_cancellation(error: Exception | None) -> None:
    """Wait until the program cancels the request again, if *error* is a recorded cancellation; a minute at most."""
    if isinstance(error, WasCancelled):
        await asyncio.sleep(CANCELLED_SECONDS)


def error_to_json(error: BaseException, depth: int = 0) -> dict[str, Any] | None:
    """Return the class and the arguments of *error*; None for one of another library, or one that cannot be made again."""
    kind = type(error)
    if not isinstance(error, Exception | asyncio.CancelledError):
        return None
    if kind.__module__.partition(".")[0] not in MODULES or depth > MAX_DEPTH:
        return None
    made = error.__reduce__()
    if not isinstance(made, tuple) or made[0] is not kind:
        return None
    form = {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "arguments": [_argument_to_json(one, depth) for one in made[1]],
    }
    # Numbers that are no argument, such as how many bytes of a reply are missing, are part of the message.
    numbers = {name: value for name, value in vars(error).items() if type(value) in (int, float)}
    return {**form, "numbers": numbers} if numbers else form


def _argument_to_json(value: object, depth: int) -> Any:
    """Return an argument of an error as JSON; None for a value of another type than text, bytes, number, bool or error."""
    if isinstance(value, BaseException):
        return error_to_json(value, depth + 1)
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, str | int | float | bool):
        return value if not isinstance(value, str) else str(value)
    return None


def error_from_json(encoded: Any) -> Exception:
    """
    Return the error of ``error_to_json``; an ``OSError`` that names it, if its library is missing or has changed.

    Only classes of errors of the packages in ``MODULES`` are made.
    """
    told = encoded if isinstance(encoded, Mapping) else {}
    name = str(told.get("type", "an error"))
    if name == CANCELLED:
        return WasCancelled("the program cancelled this request in the recording, but does not cancel it now")
    module, _, kind_name = name.rpartition(".")
    arguments = [_argument_from_json(one) for one in told.get("arguments") or ()]
    if module.partition(".")[0] in MODULES:
        try:
            kind = getattr(import_module(module), kind_name)
            if isinstance(kind, type) and issubclass(kind, Exception):
                error = kind(*arguments)
                numbers = told.get("numbers") or {}
                vars(error).update({name: numbers[name] for name in vars(error) if name in numbers})
                return error
        except (ImportError, AttributeError, TypeError):
            pass
    return OSError(f"the recorded request failed with {name}")


def _argument_from_json(value: Any) -> Any:
    """Return an argument of an error: bytes, a nested error, or the JSON value itself."""
    if not isinstance(value, Mapping):
        return value
    return str(value["bytes"]).encode("latin-1", errors="replace") if "bytes" in value else error_from_json(value)
