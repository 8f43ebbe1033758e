"""
What a model is told of its children in the background: of each, once, how it ended.

Only a run whose model can start such children is told. A handler asks by itself, with ``Wait``.
"""

from __future__ import annotations

from typing import Any

from stepengine.data.json import compact, freeze
from stepengine.data.messages import UserMessage, system_reminder
from stepengine.data.state import ChildResult, Waited
from stepengine.data.tools import Driving
from stepengine.data.yields import Wait
from stepengine.errors import DataError
from stepengine.machine.background import NO_CHILDREN
from stepengine.machine.calls import carry_out, member_of
from stepengine.machine.protocol import Flow
from stepengine.machine.state import RunState

__all__ = ("hear_of_children", "wait_for_children")

MAX_REPORT_CHARS = 8_000
"""About 2,000 tokens of a child's answer are shown to the parent's model, and ``wait_agents`` returns all of it."""


def hear_of_children(run: RunState) -> Flow[bool]:
    """Tell the model of children that ended since it was last told; return whether any did."""
    return (yield from _hear(run, 0, 0.0)) if _is_told(run) else False


def wait_for_children(run: RunState) -> Flow[bool]:
    """
    Before a turn ends, wait for a child that nobody else would wait for; return whether one ended, so that the turn goes on.

    One who has no step left, or was cut off, waits for nothing: there would be nobody to tell.
    """
    can_go_on = run.budget.steps_left > 0 and run.budget.reached is None and not run.progress.truncated
    if not can_go_on or not _is_told(run):
        return False
    seconds = run.budget.limits.max_wait_seconds
    if (yield from _hear(run, 1, seconds)):
        run.progress.end_turn(complete=False)
        return True
    run.side_events.warn(
        f"the turn ended after {seconds:g} s of waiting for children in the background, which were ended with it"
    )
    return False


def _is_told(run: RunState) -> bool:
    if run.children.background is NO_CHILDREN or not run.children.background.at_work:
        return False
    return any(
        isinstance(b.runs, Driving) and b.runs.reports
        for b in map(run.tools.bindings.get, run.tools.offered)
        if b is not None
    )


def _hear(run: RunState, need: int, timeout: float | None) -> Flow[bool]:
    refs = run.children.background.at_work
    waited: Waited[Any] = yield from carry_out(member_of(run, Wait(*refs, need=need, timeout=timeout)))
    if not waited.done:
        return False
    paths = {ref.id: ref.path for ref in refs}
    said = "\n\n".join([_summarize_child(paths[child.run_id], child) for child in waited.done])
    left = f"\n\nStill at work: {', '.join([f'{r.agent_id} ({r.path})' for r in waited.open])}." if waited.open else ""
    text = system_reminder(f"Agents that you started have ended.\n\n{said}{left}")
    run.history.add([UserMessage(text, ("CHILDREN",))])
    return True


def _summarize_child(path: str, child: ChildResult[Any]) -> str:
    text = child.why if child.is_error else child.text or _output_text(child.output)
    cut = (
        text
        if len(text) <= MAX_REPORT_CHARS
        else f"{text[:MAX_REPORT_CHARS]}... ({len(text) - MAX_REPORT_CHARS} more characters)"
    )
    return f"{child.agent_id} ({path}) {child.status.value}: {cut or 'nothing was said'}"


def _output_text(output: Any) -> str:
    if isinstance(output, str):
        return output
    try:
        return "" if output is None else compact(freeze(output))
    except DataError:
        return f"a {type(output).__name__}"
