"""The physical floor: a bare generator that asks for replies and calls, with no engine, no validation and no state."""

from __future__ import annotations

from collections.abc import Generator

from benchmarks.engines import Told, Work


def agent(steps: int) -> Generator[tuple[str, int, int], int, list[tuple[str, int]]]:
    """Ask for one tool call per step and keep the results."""
    messages: list[tuple[str, int]] = []
    for number in range(steps):
        result = yield ("add", number, 1)
        messages.append(("add", result))
    return messages


async def run(steps: int) -> Told:
    """Drive the generator; see the package's docstring."""
    machine = agent(steps)
    sent: int | None = None
    while True:
        try:
            _, a, b = machine.send(sent)  # type: ignore[arg-type]
        except StopIteration as stop:
            messages = stop.value
            return lambda: Work(len(messages) + 1, [value for _, value in messages], "done")
        sent = a + b
