"""The physical floor: a bare generator that asks for replies and calls, with no engine, no validation and no state."""

from __future__ import annotations

from collections.abc import Generator


def agent(steps: int) -> Generator[tuple[str, int, int], int, int]:
    """Ask for one tool call per step and add up the results."""
    total = 0
    messages: list[tuple[str, int]] = []
    for number in range(steps):
        result = yield ("add", number, 1)
        messages.append(("add", result))
        total += result
    return total


async def run(steps: int) -> int:
    """Drive the generator; see the package's docstring."""
    machine = agent(steps)
    sent: int | None = None
    while True:
        try:
            _, a, b = machine.send(sent)  # type: ignore[arg-type]
        except StopIteration as stop:
            return int(stop.value)
        sent = a + b
