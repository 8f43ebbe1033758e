"""The tool calls of one run tree whose results come from outside."""

from __future__ import annotations

import asyncio
from typing import cast

import attrs

from stepengine.data.alike import list_names
from stepengine.data.effects import CallTool
from stepengine.data.messages import ToolResult
from stepengine.errors import ToolError
from stepengine.runtime.performer import Item
from stepengine.tools.conversion import make_tool_result


@attrs.define(eq=False)
class _DeferredCall:
    """A call that accepts a result, with the number of its effect; *has_returned* once its body has."""

    seq: int
    result: asyncio.Future[ToolResult]
    has_returned: bool = False


class DeferredCalls:
    """
    The calls of one run tree whose results come from outside.

    Attributes:
        expected: The calls that accept a result now, by path and id.
    """

    def __init__(self) -> None:
        self.expected: dict[tuple[str, str], _DeferredCall] = {}
        self._early: dict[tuple[str, int], object] = {}
        self._settled: set[tuple[str, int]] = set()

    def expect_result(self, item: Item) -> asyncio.Future[ToolResult]:
        """Accept a result for a call from now on, and return its future; the body may still be running."""
        key = item.path, cast("CallTool", item.effect).tool_call_id
        known = self.expected.get(key)
        if known is None:
            known = self.expected[key] = _DeferredCall(item.effect.seq, asyncio.get_running_loop().create_future())
            place = item.path, item.effect.seq
            if place in self._early:
                self.deliver_now_or_later(place, self._early.pop(place))
        return known.result

    def mark_waiting(self, item: Item) -> None:
        """Record that the body of a call has returned, so that the call only waits."""
        self.expected[item.path, cast("CallTool", item.effect).tool_call_id].has_returned = True

    def is_waiting(self, item: Item) -> bool:
        """Return whether a call only waits for its result."""
        known = self.expected.get((item.path, getattr(item.effect, "tool_call_id", "")))
        return known is not None and known.has_returned

    def forget_call(self, item: Item) -> None:
        """Accept no result for a call any more; may be called twice."""
        self.expected.pop((item.path, cast("CallTool", item.effect).tool_call_id), None)

    def deliver_result(self, call_id: str, result: object, path: str | None) -> None:
        """
        Deliver the result of a waiting call; may be called from any thread.

        Raises:
            ToolError: when no call with that id waits, or those of several runs do and *path* does not say which.
        """
        future = self._get_waiting_call(call_id, path)[1]
        future.get_loop().call_soon_threadsafe(_set_result_once, future, make_tool_result(result))

    def get_call_address(self, call_id: str, path: str | None) -> tuple[str, int]:
        """
        Return the run path and effect number of a waiting call; may be called from any thread.

        Raises:
            ToolError: as ``deliver_result``.
        """
        return self._get_waiting_call(call_id, path)[0]

    def deliver_now_or_later(self, call_address: tuple[str, int], result: object) -> None:
        """
        Deliver a result to the waiting call at an address, or store it until that call waits; later results are ignored.

        In a resumed run a message may arrive before its call starts, and may be read more than once.
        """
        if call_address in self._settled:
            return
        waiting = [call.result for (path, _), call in self.expected.items() if (path, call.seq) == call_address]
        if not waiting:
            self._early[call_address] = result
            return
        self._settled.add(call_address)
        _set_result_once(waiting[0], make_tool_result(result))

    def _get_waiting_call(self, call_id: str, path: str | None) -> tuple[tuple[str, int], asyncio.Future[ToolResult]]:
        """Return address and result future of the one call with this id that waits; raise ``ToolError`` unless there is exactly one."""
        waiting = {key: entry for key, entry in list(self.expected.items()) if not entry.result.done()}
        found = [key for key in waiting if key[1] == call_id and path in (None, key[0])]
        # Ids of calls are counters of a run, so two children have a `c1` each. To take the first would give somebody's
        # result to somebody else.
        if len(found) != 1:
            listed = list_names([f"{key[1]!r} at path {key[0]!r}" for key in waiting])
            which = f"{call_id!r}" if path is None else f"{call_id!r} at path {path!r}"
            what = (
                "waits for its result" if not found else "can be chosen: several calls with this id wait, so pass path="
            )
            msg = f"no call {which} {what}; waiting calls: {listed}"
            raise ToolError(msg)
        call = waiting[found[0]]
        return (found[0][0], call.seq), call.result


def _set_result_once(future: asyncio.Future[ToolResult], result: ToolResult) -> None:
    if not future.done():
        future.set_result(result)
