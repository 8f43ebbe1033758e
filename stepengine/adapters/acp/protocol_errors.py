"""Errors of the protocol, and which errors of ours become which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stepengine.errors import InputError, SessionError, StepEngineError

INVALID_PARAMS, INTERNAL = -32602, -32603
MISSING_KEY = -32000
"""After this error, an editor asks for authentication."""


def make_protocol_error(code: int, message: str) -> Exception:
    """Return an error of the protocol."""
    from acp import RequestError

    return RequestError(code, message)


@contextlib.contextmanager
def convert_to_protocol_errors() -> Iterator[None]:
    """Convert errors in the block to errors of the protocol."""
    try:
        yield
    except (SessionError, InputError) as error:
        raise make_protocol_error(INVALID_PARAMS, error.message) from None
    except StepEngineError as error:
        raise make_protocol_error(INTERNAL, error.message) from None
