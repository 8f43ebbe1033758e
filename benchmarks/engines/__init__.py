"""
One module per engine, written as its own documentation advises, with telemetry off and its limits of steps raised.

``async def run(steps)`` performs one agent run of *steps* model steps against a model that answers in process. Every reply asks
for one call of ``add(a, b)``, whose input is validated, and the last one says ``done``. ``over_http(url)`` gives the same
run through the engine's own provider, against the loopback server. ``behind(url, count)`` gives one call that has
*count* messages before it. What a run returns is called once the clock has stopped and gives the work that was done, read from
the engine's own history, so that nobody can skip it. A module lacks what its engine cannot do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """
    What a run did.

    Attributes:
        calls: How many calls the model answered; -1 where only the server has counted them.
        results: What the tool returned, in order, as the history of the run has it.
        text: What the run ended with.
    """

    calls: int
    results: list[int]
    text: str


Told = Callable[[], Work]
Run = Callable[[int], Awaitable[Told]]
UNCOUNTED = -1


def checked(work: Work, steps: int) -> None:
    """Refuse a measurement of work that was not done: model calls, tool results and the final text."""
    expected = Work(steps + 1, [n + 1 for n in range(steps)], "done")
    if work._replace(calls=steps + 1 if work.calls == UNCOUNTED else work.calls) != expected:
        found = (
            f"{work.calls} model calls, {len(work.results)} results that add up to {sum(work.results)}, {work.text!r}"
        )
        msg = f"a run of {steps} steps did other work: {found}"
        raise SystemExit(msg)


def arguments(number: int) -> dict[str, Any]:
    """Return the input of a call."""
    return {"a": number, "b": 1}
