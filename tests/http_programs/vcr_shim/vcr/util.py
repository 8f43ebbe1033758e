"""
The one function of vcrpy's helpers that its integration tests call.
"""

from __future__ import annotations

from typing import Any


def read_body(request: Any) -> bytes:
    body: bytes = request.body
    return body
