"""
Finds and cancels the tasks that a tool body leaves running.

``CallMark`` sets a context variable while a body runs. A task, timer or thread that the body starts copies the context, and so
keeps a reference to the mark's owner. If the owner no longer exists at the end of the call, nothing is left running, and no
search is necessary. This is nearly always so.
"""

from __future__ import annotations

import gc
import weakref
from contextvars import Context, ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stepengine.tools.context import ToolContext
from stepengine.workspace.threads import CANCEL_GRACE_SECONDS

if TYPE_CHECKING:
    import asyncio


class CallOwner:
    """Identifies one call in the contexts that were copied while it ran."""

    __slots__ = ("__weakref__",)


OWNER: ContextVar[CallOwner | None] = ContextVar("stepengine_tool_call", default=None)


class Checks:
    """Checks for leftover tasks that only the test kit enables."""

    inline = False
    """Whether synchronous bodies on the event loop are also checked for tasks that they start."""


class CallMark:
    """Identifies the tasks that are started inside its ``with`` block."""

    __slots__ = ("_owner", "_token")

    _token: Token[CallOwner | None]
    _owner: weakref.ref[CallOwner]

    def __enter__(self) -> Self:
        owner = CallOwner()
        self._owner = weakref.ref(owner)
        self._token = OWNER.set(owner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        OWNER.reset(self._token)

    def find_unfinished_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the unfinished tasks that were started inside the ``with`` block, except the current one."""
        owner = self._owner()
        if owner is None:
            return []
        import asyncio

        here = asyncio.current_task()
        return [t for t in asyncio.all_tasks() if t is not here and _get_task_context(t).get(OWNER) is owner]


def _get_task_context(task: asyncio.Task[Any]) -> Context:
    """Return the context variables of a task; before Python 3.12 found among the objects that it refers to."""
    getter = getattr(task, "get_context", None)
    if getter is not None:  # Python 3.12 and later
        found: Context = getter()
        return found
    return next((r for r in gc.get_referents(task) if isinstance(r, Context)), Context())


async def cancel_leftover_tasks(tasks: list[asyncio.Task[Any]], tool_name: str, ctx: ToolContext) -> None:
    """Cancel *tasks*, wait a short time until they end, and emit a ``Warned`` event with their names."""
    import asyncio

    from stepengine.data.events import Warned

    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=CANCEL_GRACE_SECONDS)
    for task in done:
        if not task.cancelled():
            task.exception()  # so that asyncio does not report it as never retrieved
    names = ", ".join(sorted(f"{t.get_name()} ({getattr(t.get_coro(), '__qualname__', '?')})" for t in tasks))
    ctx.emit(Warned(message=f"tool {tool_name!r} left tasks running; they are cancelled: {names}"))
