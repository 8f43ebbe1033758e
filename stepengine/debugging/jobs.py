"""
A job: a child process of an application that evaluates recorded runs under the author's current code.

Its first message is a line of JSON with the kind of job, the engine and the journals. It reports the cost of model calls, waits for
approval, and reports its progress and result. To cancel a job, its process is ended.

Only ``stepengine.server`` starts ``python -m stepengine.debugging.jobs``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Single, Value
from stepengine.data.visible import cut_end
from stepengine.debugging.desk import EngineSpec, move_stdio_to_json_channel, wait_for_message
from stepengine.debugging.edits import add_broken_files_to_error, format_error_without_advice, replay_to_next_request
from stepengine.engine import Engine
from stepengine.errors import DataError, LimitExceeded
from stepengine.evaluation.blame import blame
from stepengine.evaluation.checks import Check
from stepengine.evaluation.impact import impact, replay_to_first_difference
from stepengine.evaluation.pinned_tests import pin
from stepengine.evaluation.samples import CostEstimate
from stepengine.journal import FileJournal, SharedBudget
from stepengine.redaction import make_redactor
from stepengine.runtime.limits import CallEstimate, MeteredCall

Report = Callable[[Mapping[str, Any]], None]
SHOWN = 20_000


class _JobBudget(SharedBudget):
    """
    A budget that reports each finished call, and refuses more than *max_calls* calls.

    Attributes:
        first_reply: The first reply that a model sent; ``None`` before it.
    """

    def __init__(self, budget: str | None, expected_calls: int, report: Report, max_calls: int | None) -> None:
        super().__init__(budget)
        self._expected_calls = expected_calls
        self._report = report
        self._max_calls = max_calls
        self._begun = self._calls = 0
        self.first_reply: ModelReply | None = None

    async def reserve(self, estimate: CallEstimate) -> MeteredCall:
        """Raise a limit error for a call over the number of calls or the budget."""
        if self._max_calls is not None and self._begun >= self._max_calls:
            msg = f"the limit of {self._max_calls} calls is reached"
            raise LimitExceeded(msg, kind="cost", limit=float(self._max_calls))
        self._begun += 1
        return await super().reserve(estimate)

    async def perform_within_budget(self, estimate: CallEstimate, perform: Callable[[], Awaitable[Single]]) -> Single:
        """Return the outcome of a model call, and store the reply if it is the first one; raises as ``reserve`` does."""
        outcome = await super().perform_within_budget(estimate, perform)
        if self.first_reply is None and isinstance(outcome, Value) and isinstance(outcome.value, ModelReply):
            self.first_reply = outcome.value
        return outcome

    def settle(self, call: MeteredCall, cost: Decimal | None) -> None:
        """Count a call, and report the progress."""
        super().settle(call, cost)
        self._calls += 1
        spent = None if self.spent_if_known is None else str(self.spent_if_known)
        self._report({"progress": {"calls": self._calls, "of": self._expected_calls, "spent": spent}})


ApprovalRequest = Callable[[CostEstimate], Awaitable[_JobBudget]]


@frozen(kw_only=True)
class _JobRequest:
    """
    A requested job: its engine, journals and options.

    Attributes:
        engine: The engine of the current code.
        files: The files of the journals, by run id.
        options: The options of the job: ``check``, ``samples``, ``name``, ``folder``.
        request_approval: Reports a cost estimate, waits for approval, and returns the budget.
        report: Sends a message, such as the progress.
    """

    engine: Engine
    files: Mapping[str, str]
    options: Mapping[str, Any]
    request_approval: ApprovalRequest
    report: Report

    @property
    def journal(self) -> FileJournal:
        """The first journal, for jobs that have exactly one."""
        return FileJournal(next(iter(self.files.values())))


async def _sample_and_report_impact(job: _JobRequest) -> dict[str, Any]:
    """Replay all runs to their first difference, sample the changed ones after approval, and return the report as JSON."""
    found = []
    for number, (run, file) in enumerate(job.files.items()):
        found.append(await replay_to_first_difference(job.engine, run, FileJournal(file)))
        job.report({"progress": {"runs": number + 1, "of_runs": len(job.files)}})
    made = await impact(job.engine, found, n=job.options["samples"], confirm=job.request_approval)
    return {**made.to_json(), "lines": [*made.lines()]}


async def _find_step_to_blame(job: _JobRequest) -> dict[str, Any]:
    """Find the step of the run to blame, after approval of the cost, and return the result as JSON."""
    check = Check.from_any(job.options["check"])
    made = await blame(job.engine, job.journal, check, k=job.options["samples"], confirm=job.request_approval)
    return {**made.to_json(), "lines": [*made.lines()]}


async def _write_failure_test(job: _JobRequest) -> dict[str, Any]:
    """Write a test for the failed run, and return its files as JSON; raise ``DataError`` if the run passes."""
    asked = job.options
    made = await asyncio.to_thread(
        pin, job.engine, job.journal, asked["check"], by_origin=True, name=asked["name"], folder=Path(asked["folder"])
    )
    if isinstance(made, str):
        raise DataError(made)
    return {
        "file": str(made.file),
        "journal": str(made.journal),
        "lines": [f"the test fails, as expected: {made.reason}"],
    }


async def _send_unrecorded_request(job: _JobRequest) -> dict[str, Any]:
    """Send the first model request that the record does not answer, after approval, and return its reply, or why there is none, as JSON."""
    coming = await replay_to_next_request(job.engine, job.journal)
    if coming.request is None:
        return {"address": coming.address, "text": "", "calls": [], "why": coming.why, "cost": None}
    budget = await job.request_approval(CostEstimate(1, None if coming.price is None else Decimal(coming.price), None))
    made = await job.engine.fork(job.journal, tools="recorded", budget=budget)
    reply = budget.first_reply
    cost = None if made.cost is None else str(made.cost)
    if reply is None:
        return {
            "address": made.broke_at,
            "text": "",
            "calls": [],
            "why": str(made.result.error or "it said nothing"),
            "cost": cost,
        }
    calls = [{"tool": call.tool_name, "input": plain(call.input)} for call in reply.tool_calls]
    text = cut_end(make_redactor("all", os.environ).text(reply.text), SHOWN)
    return {"address": made.broke_at, "text": text, "calls": calls, "why": "", "cost": cost}


KINDS: Mapping[str, Callable[[_JobRequest], Awaitable[dict[str, Any]]]] = {
    "impact": _sample_and_report_impact,
    "blame": _find_step_to_blame,
    "pin": _write_failure_test,
    "ask": _send_unrecorded_request,
}


async def _run_and_report_job(
    first: Mapping[str, Any], read_message: Callable[[float | None], list[Any] | None], report: Report
) -> None:
    """Create the engine, run the requested job, and report its result without secrets and temporary paths."""
    clean = make_redactor("all", os.environ)
    maker = EngineSpec.from_json(first["maker"])
    max_calls = 1 if first["kind"] == "ask" else None

    async def report_cost_and_await_approval(estimate: CostEstimate) -> _JobBudget:
        """Report a cost estimate, wait for approval, and return the approved budget; the end of the input cancels."""
        low, high = [None if cost is None else str(cost) for cost in (estimate.low, estimate.high)]
        report({"price": {"calls": estimate.calls, "low": low, "high": high}})
        agreement = await asyncio.to_thread(wait_for_message, read_message)
        if agreement is None:
            raise asyncio.CancelledError
        return _JobBudget(agreement.get("budget"), estimate.calls, report, max_calls)

    with add_broken_files_to_error():
        engine = maker.create_engine()
        async with engine:
            job = _JobRequest(
                engine=engine,
                files=first["files"],
                options=first["asked"],
                request_approval=report_cost_and_await_approval,
                report=report,
            )
            done = await KINDS[first["kind"]](job)
    # The temporary paths of the journals mean nothing to the reader.
    told = json.dumps(done)
    for run, file in first["files"].items():
        told = told.replace(json.dumps(file)[1:-1], f"run {run}")
    report({"done": clean.value(json.loads(told))})


def main() -> None:
    """Read the first message and run its job."""
    read_message, report = move_stdio_to_json_channel()
    first = wait_for_message(read_message)
    if first is None:
        return
    try:
        asyncio.run(_run_and_report_job(first, read_message, report))
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - any error of the author's code is reported
        told = format_error_without_advice(error)
        for run, file in first["files"].items():
            told = told.replace(file, f"run {run}")
        report({"failed": make_redactor("all", os.environ).text(told)})


if __name__ == "__main__":
    main()
