"""stepengine with a handler that yields ``STEP`` and looks at the state after every step."""

from __future__ import annotations

from benchmarks.engines import stepengine


async def run(steps: int) -> int:
    """Run the agent with a handler; see the package's docstring."""
    return await stepengine.run(steps, "stepper")
