"""How effects and outcomes of a simulated run are told: one line each."""

from __future__ import annotations

from stepengine.data.effects import CallFunction, CallModel, CallTool, Leaf, Spawn
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Single, Stop
from stepengine.data.state import ChildResult

__all__ = ("name_of", "shown", "told")

WIDTH = 100


def name_of(at: tuple[str, int]) -> str:
    """Return the address *at* as it is read: path and number."""
    return f"{at[0]}:{at[1]}" if at[0] else str(at[1])


def shown(effect: Leaf) -> str:
    """Return what *effect* asks for."""
    if isinstance(effect, CallModel):
        return f"model {effect.purpose}, {len(effect.request.messages)} messages"
    if isinstance(effect, CallTool):
        return _cut(f"tool {effect.tool_name} {effect.input!r} ({effect.source})")
    if isinstance(effect, Spawn):
        return _cut(f"agent {effect.agent_id} {effect.prompt!r}")
    if isinstance(effect, CallFunction):
        return _cut(f"perform {effect.call.name}{effect.call.args!r}")
    return _cut(f"ask {', '.join([repr(q.text) for q in effect.questions])}")


def told(outcome: Single) -> str:
    """Return what came back."""
    if isinstance(outcome, Stop):
        return f"stop: {outcome.kind}"
    if isinstance(outcome, Failure):
        return _cut(f"{type(outcome.error).__name__}: {outcome.error}")
    value = outcome.value
    if isinstance(value, ModelReply):
        return _cut(" ".join([p for p in (value.text, *[f"[{c.tool_name}]" for c in value.tool_calls]) if p]))
    if isinstance(value, ToolResult):
        return _cut(f"{value.status}: {value.text}")
    return _cut(f"{value.status.value}: {value.text}" if isinstance(value, ChildResult) else repr(value))


def _cut(said: str) -> str:
    said = said.replace("\n", "\\n")
    return said if len(said) <= WIDTH else f"{said[:WIDTH]}..."
