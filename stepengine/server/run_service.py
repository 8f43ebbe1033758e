"""``RunService``: the runs of a server in a folder or an SQLite file (``Runs``), or in a PostgreSQL database (``DurableRuns``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from stepengine.server.access import require_caller

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.server.durable_runs import DurableRuns
    from stepengine.server.ledger import RunRow
    from stepengine.server.runs import Runs

RunService: TypeAlias = "Runs | DurableRuns"
"""
The runs of a server. The two classes have the same parts with the same methods: launcher, reader, watcher, messenger and conversations.
A part that a database does not support is ``None``.
"""


def get_run_service(request: Request) -> RunService:
    """Return the run service of the server that handles a request."""
    found: RunService = request.app.state.runs
    return found


async def get_requested_run(request: Request, parameter: str = "run") -> RunRow:
    """Return the run whose id is the path parameter *parameter* of a request; raise ``Problem`` unless the caller may see the run."""
    return await get_run_service(request).reader.get_run(require_caller(request), request.path_params[parameter])
