"""Notices when a model makes the same tool call again and again and gets the same result (reliability MP65)."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

from stepengine.data.effects import CallTool
from stepengine.data.events import Repeat
from stepengine.data.json import JsonDict
from stepengine.data.outcomes import Single, Value
from stepengine.data.results import ToolResult
from stepengine.errors import LimitExceeded
from stepengine.runtime.limits import Refusals
from stepengine.runtime.performer import IO, Item, Performer

__all__ = ("Repeats",)

TOLD_AT = 3


class _Last(NamedTuple):
    """The last call of one tool in one run, and how many in a row were like it."""

    input: JsonDict
    result: tuple[Any, ...]
    times: int


class Repeats:
    """
    Counts calls that repeat the last one of the same tool, input and result included; only calls of models count.

    It stands outside everything that records, so that a resumed run counts what was recorded too. Refusals go through the
    gate inside.

    Args:
        inner: What performs.
        refusals: Shared with the gate.
    """

    def __init__(self, inner: Performer, refusals: Refusals) -> None:
        self._inner = inner
        self._refusals = refusals
        self._last: dict[str, dict[str, _Last]] = {}

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """Refuse calls that were repeated as often as ``max_identical_calls`` says."""
        for item in batch:
            most = item.plan.limits.max_identical_calls
            if most is not None and type(item.effect) is CallTool and item.effect.source == "model":
                self._judge(item.path, item.effect, most)
        return self._inner.begin(batch)

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Pass an effect on, and compare its result if it is a model's call."""
        effect = item.effect
        if type(effect) is not CallTool or effect.source != "model":
            return self._inner.perform(item, io)
        if not io.watched and item.plan.limits.max_identical_calls is None:
            return self._inner.perform(item, io)
        return self._compared(item.path, effect, self._inner.perform(item, io), io)

    def forget(self, path: str) -> None:
        """Forget the calls of a run that has ended."""
        self._last.pop(path, None)

    def _judge(self, path: str, effect: CallTool, most: int) -> None:
        last = self._last.get(path, {}).get(effect.tool_name)
        if last is not None and last.times >= most and last.input == effect.input:
            msg = (
                f"the model called {effect.tool_name!r} {last.times} times in a row with the same input and got the same "
                f"result, and max_identical_calls is {most}"
            )
            self._refusals.known[(path, effect.seq)] = LimitExceeded(msg, kind="repetition", limit=most)

    async def _compared(self, path: str, effect: CallTool, performed: Awaitable[Single], io: IO) -> Single:
        outcome = await performed
        if type(outcome) is not Value or not isinstance(outcome.value, ToolResult):
            return outcome
        result = (outcome.value.status, outcome.value.content)
        calls = self._last.setdefault(path, {})
        last = calls.get(effect.tool_name)
        same = last is not None and last.input == effect.input and last.result == result
        count = last.times + 1 if last is not None and same else 1
        calls[effect.tool_name] = _Last(effect.input, result, count)
        if count == TOLD_AT and io.watched:
            name, call_id = effect.tool_name, effect.tool_call_id
            io.emit(Repeat(path=path, seq=effect.seq, tool_name=name, tool_call_id=call_id, count=count))
        return outcome
