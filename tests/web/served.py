"""
An engine below ``serving.app``, served on loopback in the event loop of the test, and a token for its pages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepengine import Engine

OF_PAGES = ("read", "run", "answer")


class Address(NamedTuple):
    """
    Where it is reached, and what a page sends to be known.
    """

    url: str
    headers: dict[str, str]


@asynccontextmanager
async def served(folder: Path, engine: Engine, *, name: str = "anna", **options: Any) -> AsyncIterator[Address]:
    """
    Serve *engine* from *folder*, where its runs are found again, and give the address for a page of *name*.
    """
    pytest.importorskip("starlette", reason="needs the extra 'serve'")
    import uvicorn

    from stepengine.server import Tokens, app
    from tests.uvicorn_servers import serve_in_loop

    tokens = Tokens.open(folder / "tokens.json")
    for known in tokens.list_tokens():
        tokens.remove(known.name)
    token = tokens.add(name, OF_PAGES)
    made = app(engine, runs=folder / "runs", tokens=tokens, drain=0, **options)
    config = uvicorn.Config(made, port=0, log_level="warning", timeout_graceful_shutdown=1)
    async with serve_in_loop(config) as port:
        try:
            yield Address(f"http://127.0.0.1:{port}", {"authorization": f"Bearer {token}"})
        finally:
            made.end_event_streams()
