"""
``StepRecords``: the recorded steps of one run, read in pages while an execution repeats them.

DBOS looks up each step in a transaction of its own. A resumed run repeats thousands of steps, so here one query reads a page of them.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
PAGE_STEPS = 100
"""Most runs have fewer steps and take one query; a page of long results must fit in memory."""


class ReservedStep(NamedTuple):
    """
    A step whose number was reserved.

    Attributes:
        reservation: The reservation of DBOS.
        name: The step's name.
        mark: The result of a marker, which is recorded before any effect starts; ``None`` for other steps.
    """

    reservation: Any
    name: str
    mark: Mapping[str, object] | None = None

    @property
    def number(self) -> int:
        """The number of the step in the database."""
        number: int = self.reservation.step_id
        return number


def run_outside_workflow(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start work as a task in a new context, so that DBOS does not record it as a step."""
    return asyncio.create_task(work, context=contextvars.Context())


class StepRecords:
    """
    The recorded steps of one execution.

    Args:
        dbos: The class ``DBOS``.
        errors: The module ``dbos.error``.
        run: The run's id.
    """

    def __init__(self, dbos: Any, errors: Any, run: str) -> None:
        self._dbos = dbos
        self._errors = errors
        self._run = run
        self._known: dict[int, Mapping[str, Any]] = {}
        self._read = 0
        self._last = 0
        self._is_complete = False
        self._reading = asyncio.Lock()

    async def read_and_compare_steps(self, steps: Sequence[ReservedStep]) -> bool:
        """
        Read the records of these steps and compare their names; return whether any of the steps is recorded.

        Args:
            steps: Steps in the order of their numbers.

        Raises:
            Exception: ``DBOSUnexpectedStepError`` when another step is recorded under one of the numbers.
        """
        async with self._reading:
            while not self._is_complete and self._last < steps[-1].number:
                await self._read_next_page()
        known = [(step, self._known[step.number]) for step in steps if step.number in self._known]
        for step, record in known:
            if record["function_name"] != step.name:
                raise self._errors.DBOSUnexpectedStepError(self._run, step.number, step.name, record["function_name"])
        return bool(known)

    async def _read_next_page(self) -> None:
        query = self._dbos.list_workflow_steps_async(self._run, limit=PAGE_STEPS, offset=self._read)
        page = await run_outside_workflow(query)
        self._known.update({step["function_id"]: step for step in page})
        self._read += len(page)
        self._is_complete = len(page) < PAGE_STEPS
        self._last = max([self._last, *[step["function_id"] for step in page]])

    def pop_result(self, step: ReservedStep) -> Mapping[str, Any] | None:
        """Remove the recorded result of a step and return it; ``None`` without a result, or for a recorded error."""
        record = self._known.pop(step.number, None)
        output = None if record is None else record["output"]
        # Every result of ours is an object. Text that DBOS could not decode is left to DBOS, which raises the reason.
        return output if isinstance(output, dict) else None
