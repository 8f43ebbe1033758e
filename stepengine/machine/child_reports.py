"""
Reports to a model about its background children: one for each child, when it has ended.

Only a run whose model can start such children gets reports. A handler waits for its children with ``Wait``.
"""

from __future__ import annotations

from typing import Any

from stepengine.data.json import compact, freeze
from stepengine.data.messages import UserMessage, system_reminder
from stepengine.data.state import ChildResult, Waited
from stepengine.data.tools import Driving
from stepengine.data.typed_values import dump_model, is_model
from stepengine.data.yields import MAX_PAUSE_SECONDS, Wait
from stepengine.errors import DataError
from stepengine.machine.background import NO_CHILDREN
from stepengine.machine.calls import make_single_member, run_single_member
from stepengine.machine.protocol import Flow
from stepengine.machine.state import RunState

MAX_REPORT_CHARS = 8_000
"""About 2,000 tokens of a child's answer are shown to the parent's model, and ``wait_agents`` returns all of it."""


def append_ended_children_report(run: RunState) -> Flow[bool]:
    """Append a report for the model about children that ended since the last one; return whether there were any."""
    return (yield from _wait_and_report(run, 0, 0.0)) if _has_reportable_children(run) else False


def wait_for_child_report(run: RunState) -> Flow[bool]:
    """
    Wait before the turn ends for a background child to report; return whether one ended, so that the turn continues.

    A run without a step left, or with a cut reply, does not wait: its model could not read the report.
    """
    can_go_on = run.budget.steps_left > 0 and run.budget.reached is None and not run.progress.truncated
    if not can_go_on or not _has_reportable_children(run):
        return False
    seconds = run.budget.limits.max_wait_seconds
    # More than a hundred years, such as infinity, is no timeout of `Wait`: it waits for ever.
    if (yield from _wait_and_report(run, 1, None if seconds is None or seconds > MAX_PAUSE_SECONDS else seconds)):
        run.progress.record_turn_completion(is_complete=False)
        return True
    run.side_events.add_warnings(
        f"the turn ended after it waited {seconds:g} s for background children, and ended them too"
    )
    return False


def _has_reportable_children(run: RunState) -> bool:
    """Return whether background children have not been reported, and the model has a tool that starts such children."""
    if run.children.background is NO_CHILDREN or not run.children.background.running:
        return False
    return any(
        isinstance(b.runs, Driving) and b.runs.reports
        for b in map(run.tools.bindings.get, run.tools.offered)
        if b is not None
    )


def _wait_and_report(run: RunState, min_ended: int, timeout: float | None) -> Flow[bool]:
    """Wait for *min_ended* background children; append a report about those that ended, return whether any did."""
    refs = run.children.background.running
    waited: Waited[Any] = yield from run_single_member(
        make_single_member(run, Wait(*refs, need=min_ended, timeout=timeout))
    )
    if not waited.done:
        return False
    paths = {ref.id: ref.path for ref in refs}
    said = "\n\n".join([_summarize_child(paths[child.run_id], child) for child in waited.done])
    left = f"\n\nStill at work: {', '.join([f'{r.agent_id} ({r.path})' for r in waited.open])}." if waited.open else ""
    text = system_reminder(f"Agents that you started have ended.\n\n{said}{left}")
    run.history.add([UserMessage(text, ("CHILDREN",))])
    return True


def _summarize_child(path: str, child: ChildResult[Any]) -> str:
    """Return an ended child's status with its text, output or error, cut to the length of a report."""
    text = child.why if child.is_error else child.text or _format_output(child.output)
    cut = (
        text
        if len(text) <= MAX_REPORT_CHARS
        else f"{text[:MAX_REPORT_CHARS]}... ({len(text) - MAX_REPORT_CHARS} more characters)"
    )
    return f"{child.agent_id} ({path}) {child.status.value}: {cut or 'nothing was said'}"


def _format_output(output: Any) -> str:
    """Return an output as text: itself, JSON, or the name of its type; ``""`` for none."""
    if isinstance(output, str):
        return output
    try:
        return "" if output is None else compact(freeze(dump_model(output) if is_model(output) else output))
    except DataError:
        return f"a {type(output).__name__}"
