"""What a server's tools are called here: ``server__tool``, in the characters and the length that providers take."""

from __future__ import annotations

import hashlib
import re

from stepengine.adapters.mcp._caps import NAME_CHARS
from stepengine.errors import DefinitionError

SERVER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
ODD = re.compile(r"[^A-Za-z0-9_-]")
DIGEST_DIGITS = 8
"""32 bits tell apart the few names of one server that are cut to the same beginning."""


def require_valid_server_name(name: object) -> None:
    """
    Raise ``DefinitionError`` if a server name cannot be a prefix of tool names.

    Raises:
        DefinitionError: Unless the name is 1 to 32 letters, digits and ``-``.
    """
    if not isinstance(name, str) or not SERVER.fullmatch(name):
        msg = f"{name!r} is not a valid server name; tool names start with it, so it must be 1 to 32 letters, digits and '-'"
        raise DefinitionError(msg)


def tool_name(server: str, name: str) -> str:
    """Return the full name of a server's tool; a name that is too long ends in a digest."""
    full = f"{server}__{ODD.sub('_', name)}"
    if len(full) <= NAME_CHARS:
        return full
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS]
    return f"{full[: NAME_CHARS - DIGEST_DIGITS - 1]}_{digest}"
