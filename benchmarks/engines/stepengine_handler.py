"""stepengine with a handler that yields ``STEP`` and looks at the state after every step."""

from __future__ import annotations

from benchmarks.engines import Told, stepengine


async def run(steps: int) -> Told:
    """Run the agent with a handler; see the package's docstring."""
    return await stepengine.run(steps, "stepper")
