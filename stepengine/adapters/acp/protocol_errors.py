"""Errors of the protocol, and which errors of ours become which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stepengine.errors import InputError, SessionError, StepEngineError


def invalid_params_error(message: str) -> Exception:
    """Return the error for a request with wrong parameters."""
    return _make_error(-32602, message)


def internal_error(message: str) -> Exception:
    """Return the error for a request that failed for another reason."""
    return _make_error(-32603, message)


def missing_key_error(message: str) -> Exception:
    """Return the error after which an editor asks for authentication."""
    return _make_error(-32000, message)


@contextlib.contextmanager
def convert_errors() -> Iterator[None]:
    """Convert errors in the block to errors of the protocol."""
    try:
        yield
    except (SessionError, InputError) as error:
        raise invalid_params_error(error.message) from None
    except StepEngineError as error:
        raise internal_error(error.message) from None


def _make_error(code: int, message: str) -> Exception:
    from acp import RequestError

    return RequestError(code, message)
