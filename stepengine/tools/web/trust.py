"""Which certificates the web tools trust: those of the system, whatever the environment says (reliability NW09)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

__all__ = ("trusted",)


@cache
def trusted() -> ssl.SSLContext:
    """Return how certificates are checked; made once, because reading the trusted ones takes a while."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)
