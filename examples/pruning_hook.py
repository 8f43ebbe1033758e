"""
A context-pruning hook: it shortens the messages that the model sees, and the recorded history stays complete.

A hook is a function with immutable arguments that returns a ``Change``. This one replaces a result of the tool ``sensor`` by a note
after three newer results. ``stepengine.context`` has ready-made hooks: ``mask_tool_results``, ``truncate``, ``summarize``.

``python examples/pruning_hook.py`` needs no key, because scripted replies replace the model. To call a real model, omit ``models=``
and set ANTHROPIC_API_KEY.
"""

import attrs

from stepengine import AgentDefinition, Change, Engine, HookContext, Hooks, ToolMessage, ToolResult, tool
from stepengine.models import ModelRequest
from stepengine.testing import ScriptedModel, text, tool_call

KEEP = 3
NOTE = ToolResult.text("[an older reading; read the sensor again when it matters]").content


@tool
def sensor(number: int) -> str:
    """
    Read a sensor.

    Args:
        number: Which one.
    """
    return f"sensor {number}: " + "0.5 " * 200


def forget_old_readings(ctx: HookContext) -> Change | None:
    """Show only the newest readings; called before every model call, with what the model is shown now."""
    shown = ctx.state.view
    readings = [m for m in shown if isinstance(m, ToolMessage) and m.tool_name == "sensor"]
    old = {m.tool_call_id for m in readings[:-KEEP] if m.content != NOTE}
    if not old:
        return None  # nothing to do: the request keeps its bytes, and a provider's prompt cache hits
    view = [attrs.evolve(m, content=NOTE) if isinstance(m, ToolMessage) and m.tool_call_id in old else m for m in shown]
    return Change(view=view)  # Change(messages=view) would change the record


watcher = AgentDefinition(
    "watcher",
    model="anthropic/claude-sonnet-4-5",
    tools=[sensor],
    hooks=Hooks(pre_step=[forget_old_readings]),
)


def size(request: ModelRequest) -> int:
    return sum(len(message.text) for message in request.messages)


def main() -> None:
    model = ScriptedModel([*[tool_call("sensor", {"number": n}) for n in range(8)], text("All is well.")])
    with Engine([watcher], models=model) as engine:
        result = engine.run_sync(watcher, "Read all eight sensors.")

    print("characters in each request:", [size(request) for request in model.calls])
    print("characters in the record:  ", sum(len(m.text) for m in result.state.message_history))
    print(result.output)
    assert size(model.calls[-1]) < size(model.calls[4]) + 500
    assert sum("0.5" in m.text for m in result.state.message_history) == 8


if __name__ == "__main__":
    main()
