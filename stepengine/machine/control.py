"""The control tools, which the machine runs itself, with no effect and no record."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stepengine.data.definition import normalised_id
from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, compact
from stepengine.data.messages import AssistantMessage, ToolResult, UserMessage
from stepengine.data.tools import Action, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import AgentError
from stepengine.machine.child_effects import find_spawnable_agent_id, make_spawn_not_allowed_error
from stepengine.machine.plan import RunPlan
from stepengine.machine.state import RunState
from stepengine.machine.tool_search import search_hidden_tools, with_search_tool

HANDLER_ONLY = ("set_messages", "add_message")
"""Control tools that no model is ever offered."""


def collect_offered_specs(plan: RunPlan) -> Mapping[str, ToolSpec]:
    """
    Return the specifications of all tools that the agent's model may call, in order; those only for handlers are left out.

    An output schema adds ``set_output``, and hidden tools add ``find_tools``.
    """
    names = [name for name in plan.agent.offered if name not in HANDLER_ONLY]
    if plan.agent.definition.output_schema is not None and "set_output" not in names:
        names.append("set_output")
    return with_search_tool({name: plan.tools[name].spec for name in names}, plan.tools)


def run_control_tool(run: RunState, action: Action, value: JsonDict) -> ToolResult:
    """Run a control tool on the run; *value* is validated."""
    return _ACTIONS[action](run, value)


def _make_message_result(message: str) -> ToolResult:
    """Return a control tool's result: text for models, ``{"message": ...}`` as data for handlers."""
    return ToolResult.text(message, structured=JsonDict({"message": message}))


def _set_output(run: RunState, value: JsonDict) -> ToolResult:
    """Set the output if it fits the schema; otherwise the earlier one stays and the result names the issues."""
    _warn_if_output_is_ignored(run)
    if not run.output.needs_validation:
        run.set_output(value["data"] if list(value) == ["data"] else value)
        return _make_message_result("Output set.")
    if run.output.set_from_model(value):
        run.forward_output_to_caller()
        return _make_message_result("Output set.")
    listed = "; ".join(run.output.issues)
    return ToolResult.error(f"Invalid output, the earlier one stays: {listed}. Given: {compact(value)}")


def _warn_if_output_is_ignored(run: RunState) -> None:
    """Warn once if the output mode takes the output from messages, so that ``set_output`` has no effect."""
    mode = run.plan.agent.definition.output_mode
    what = {"last_message": "its last message", "all_messages": "all messages"}.get(mode)
    if what is None:
        return
    text = (
        f"agent {run.plan.agent.definition.id!r} calls set_output, but with its output_mode {mode!r} the output is {what}; "
        "set output_mode='structured_output'"
    )
    run.side_events.warn_once(text)


def _set_messages(run: RunState, value: JsonDict) -> ToolResult:
    """Replace the history, and the view with it, by the messages in *value*."""
    history = Transcript.from_dicts(value["messages"])
    run.apply_change(Change(messages=history), "set_messages")
    return _make_message_result(f"History replaced by {len(history)} messages.")


def _add_message(run: RunState, value: JsonDict) -> ToolResult:
    """Add a message to the history and return the tool's result."""
    kind = UserMessage if value["role"] == "user" else AssistantMessage
    run.history.add([kind(value["content"], value.get("tags", ()), ttl=value.get("ttl"))])
    return _make_message_result("Message added.")


def _end_turn(_: RunState, value: JsonDict) -> ToolResult:
    """Return the result of ``end_turn``; the turn itself is ended by the code that runs the call."""
    return _make_message_result(value.get("message") or "Turn ended.")


def _hand_off(run: RunState, value: JsonDict) -> ToolResult:
    """Record the agent that takes over the conversation; return an error result for one that may not, or for the agent itself."""
    own, wanted = run.plan.agent.definition.id, value["agent"]
    if run.plan.is_inline and not run.plan.is_hand_off:
        return ToolResult.error(f"Agent {own!r} works in the conversation of another agent and cannot hand it over.")
    found = find_spawnable_agent_id(run, wanted)
    if found is None:
        return ToolResult.error(make_spawn_not_allowed_error(own, wanted, run.plan.agent.children or {}).message)
    if found == normalised_id(own):
        return ToolResult.error(f"Agent {own!r} has the conversation already.")
    run.children.record_hand_over(found)
    return _make_message_result(f"The conversation goes on with agent {found}.")


def _task_completed(_: RunState, __: JsonDict) -> ToolResult:
    return _make_message_result("Task completed.")


def _write_todos(run: RunState, value: JsonDict) -> ToolResult:
    """Replace the todos in the context, queue an event with them, and return how many are done."""
    run.apply_change(Change(context=JsonDict({"todos": value["todos"]})))
    if run.plan.body is None:
        # What the body of a tool writes down is shown when its caller has it.
        run.side_events.report_todos(value["todos"])
    done = sum(bool(todo["completed"]) for todo in value["todos"])
    return _make_message_result(f"{done} of {len(value['todos'])} done.")


def _think_deeply(_: RunState, __: JsonDict) -> ToolResult:
    return _make_message_result("Thought noted.")


def _lookup_agent_info(run: RunState, value: JsonDict) -> ToolResult:
    """Return the description of an agent, or the reason why there is none."""
    lookup = run.plan.agent.describe_agent
    try:
        if lookup is not None:
            return ToolResult.json({"found": True, "agent": lookup(value["agent_id"])})
        problem = "no other agents are known here"
    except AgentError as error:
        problem = error.message
    return ToolResult.json({"found": False, "error": problem})


def _find_tools(run: RunState, value: JsonDict) -> ToolResult:
    """Return the hidden tools that match the query."""
    return search_hidden_tools(run.tools.offered, value["query"])


_ACTIONS: Mapping[Action, Callable[[RunState, JsonDict], ToolResult]] = {
    "set_output": _set_output,
    "set_messages": _set_messages,
    "add_message": _add_message,
    "end_turn": _end_turn,
    "hand_off": _hand_off,
    "task_completed": _task_completed,
    "write_todos": _write_todos,
    "think_deeply": _think_deeply,
    "lookup_agent_info": _lookup_agent_info,
    "find_tools": _find_tools,
}
