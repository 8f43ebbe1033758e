"""
The application of ``docs/web-pages.md`` as it stands there, served on loopback in the event loop of the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine

ROOT = Path(__file__).resolve().parents[2]
APP = "app.py"


def application(folder: Path) -> dict[str, Any]:
    """
    Return the names of the page's ``app.py``, as if it stood in *folder*.
    """
    pytest.importorskip("fastapi", reason="needs the extra 'dev'")
    text = (ROOT / "docs" / "web-pages.md").read_text(encoding="utf-8")
    code = text.split("```python\n", 1)[1].split("```\n", 1)[0]
    names: dict[str, Any] = {"__name__": "app", "__file__": str(folder / APP)}
    exec(compile(code, APP, "exec", dont_inherit=True), names)
    return names


@asynccontextmanager
async def served(folder: Path, **names: Any) -> AsyncIterator[str]:
    """
    Serve the application with other *names*, such as an engine, and give its address.
    """
    import uvicorn

    app = application(folder)
    if isinstance(engine := names.get("engine"), Engine):
        app["engine"].close()
        names = {"engine": engine, **names}
    app.update(names)
    config = uvicorn.Config(app["app"], port=0, log_level="warning", timeout_graceful_shutdown=1)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    task = asyncio.create_task(server.main_loop())
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        await server.shutdown()
