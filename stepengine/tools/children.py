"""
The tools by which a model runs agents in the background, and waits: ``child_tools`` and ``sleep_tool``.

The run that makes a call executes it, so a started child outlives the call. The model is notified of ended children before its
next step. A turn that ends while children are running continues when the next child has ended.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from stepengine.data.alike import list_names
from stepengine.data.json import JsonDict
from stepengine.data.messages import ToolResult
from stepengine.data.state import ChildResult, Waited
from stepengine.data.tools import Driving, ToolAnnotations, ToolSpec
from stepengine.data.waits import ChildRef
from stepengine.data.yields import AgentCall, Cancel, Send, Sleep, Start, Wait
from stepengine.errors import StepEngineError
from stepengine.tools.agent_tools import child_to_json, shorten_child_outputs
from stepengine.tools.control import make_tool_with_validation
from stepengine.tools.definition import Tool
from stepengine.tools.schemas import STRING, make_object_schema, with_description

START = """\
Start agents in the background and go on at once.

Usage: one entry per agent, as in spawn_agents; each gets an id. You are told when one ends; wait_agents waits for them.
Examples: {"agents": [{"agent_type": "researcher", "prompt": "Find out which versions are affected."}]}
When not to use: when you need the results before you can do anything else; then run them with spawn_agents.
Notes: when you end your turn, you go on as soon as the next of them has ended."""
WAIT = """\
Wait for agents that you started in the background, and get their results.

Usage: their ids, or none for all that are at work; `need` is "all" or "any".
Examples: {"ids": ["3"], "need": "all", "timeout_seconds": 600}
Notes: one that has ended already has the same result again."""
MESSAGE = """\
Say something to an agent that works in the background; it reads it before its next step.

Usage: its id and the text.
Examples: {"id": "3", "text": "Look at the tests, too."}"""
CANCEL = """\
End an agent that works in the background.

Usage: its id, and why.
Examples: {"id": "3", "reason": "The question is settled."}"""
LIST = """\
List the agents that you started in the background, and which of them are at work.

Usage: no parameters.
Examples: {}"""
SLEEP = """\
Wait for a time, and then go on.

Usage: how many seconds, and a note of why, which you are told again when you wake.
Examples: {"seconds": 3600, "note": "Look whether the build has finished."}
When not to use: to wait for agents; wait_agents wakes as soon as they have ended."""
MAX_WAIT_SECONDS = 30 * 24 * 3600
"""A month: longer than any child runs, and a number that every provider accepts in a schema."""
SECONDS = {"type": "number", "minimum": 0, "maximum": MAX_WAIT_SECONDS}
AGENT = {
    "type": "object",
    "properties": {
        "agent_type": with_description(STRING, "The agent's id."),
        "prompt": with_description(STRING, "What the agent should do; it knows nothing else."),
        "params": {"type": "object", "description": "The agent's parameters."},
    },
    "required": ["agent_type"],
    "additionalProperties": False,
}
ID = with_description(STRING, "The agent's id, as start_agents gave it.")


class StartedChildren(Protocol):
    """The children that a run has started, for its tool calls."""

    @property
    def running(self) -> tuple[ChildRef[Any], ...]:
        """The children whose end has not been reported to the run."""

    @property
    def refs(self) -> tuple[ChildRef[Any], ...]:
        """All children."""


Steps: TypeAlias = Generator[Any, Any, ToolResult]


def child_tools() -> list[Tool]:
    """
    Return the five tools by which a model starts, awaits, messages, cancels and lists agents in the background.

    These are ``start_agents``, ``wait_agents``, ``message_agent``, ``cancel_agent`` and ``list_agents``. The model can start the
    spawnable agents of its own agent. It is notified of each ended agent once, before its next step. If it ends its turn while
    agents are running, the turn continues when the next of them has ended, after at most ``Limits(max_wait_seconds=)``. Agents
    that are running when the run ends are cancelled.
    """
    ids = {"type": "array", "items": STRING, "description": "The agents' ids; by default all that are at work."}
    need = {"enum": ["all", "any"], "description": "Whether all of them must have ended, or any; all by default."}
    agents = {"type": "array", "items": AGENT, "minItems": 1, "description": "The agents to start."}
    timeout = {**SECONDS, "description": "How long to wait at most; for ever by default."}
    text, reason = with_description(STRING, "What to say."), with_description(STRING, "Why.")
    return [
        _make_generator_tool("start_agents", START, make_object_schema(("agents",), agents=agents), _start_agents),
        _make_generator_tool(
            "wait_agents", WAIT, make_object_schema((), ids=ids, need=need, timeout_seconds=timeout), _wait_agents
        ),
        _make_generator_tool(
            "message_agent", MESSAGE, make_object_schema(("id", "text"), id=ID, text=text), _message_agent
        ),
        _make_generator_tool("cancel_agent", CANCEL, make_object_schema(("id",), id=ID, reason=reason), _cancel_agent),
        _make_generator_tool("list_agents", LIST, make_object_schema(()), _list_agents, is_harmless=True),
    ]


def sleep_tool() -> Tool:
    """Return ``sleep``, which suspends the run for at most thirty days; another process can resume a recorded run."""
    seconds = {**SECONDS, "description": "How long to wait."}
    note = with_description(STRING, "Why; it is told again afterwards.")
    schema = make_object_schema(("seconds",), seconds=seconds, note=note)
    return _make_generator_tool("sleep", SLEEP, schema, _sleep, reports_ended_children=False, is_harmless=True)


def _make_generator_tool(
    name: str,
    description: str,
    schema: JsonDict,
    steps: Any,
    *,
    reports_ended_children: bool = True,
    is_harmless: bool = False,
) -> Tool:
    """Return a tool whose calls run the generator function *steps*; *reports_ended_children*: the run is notified of ended children."""
    notes = ToolAnnotations(read_only=is_harmless, idempotent=is_harmless)
    spec = ToolSpec(name, description, schema, category="agent", requires_permission=False, annotations=notes)
    return make_tool_with_validation(spec, Driving(steps, reports_ended_children), shorten_json=shorten_child_outputs)


def _start_agents(call_input: JsonDict, _: StartedChildren) -> Steps:
    """Start the requested agents in the background; return a result with an id or an error for each of them."""
    entries: list[Any] = []
    for agent in call_input["agents"]:
        kind = agent["agent_type"]
        try:
            ref = yield from Start(AgentCall(kind, agent.get("prompt", ""), agent.get("params")))
        except StepEngineError as error:
            # The other agents are started nevertheless, as by spawn_agents.
            entries.append({"agent_type": kind, "error": error.message})
        else:
            entries.append({"agent_type": ref.agent_id, "id": ref.path})
    all_failed = all("error" in entry for entry in entries)
    return ToolResult.json(entries, status="error" if all_failed else "ok")


def _wait_agents(call_input: JsonDict, children: StartedChildren) -> Steps:
    """Wait until all or any of the children have ended; return the results of the ended ones and a list of the others."""
    refs = _select_children(call_input.get("ids"), children)
    if isinstance(refs, ToolResult):
        return refs
    if not refs:
        return ToolResult.json({"done": [], "at_work": []})
    seconds = call_input.get("timeout_seconds")
    waited: Waited[Any] = yield from Wait(*refs, need=call_input.get("need", "all"), timeout=seconds)
    paths = {ref.id: ref.path for ref in refs}
    done: list[Any] = [{"id": paths[child.run_id], **child_to_json(child)} for child in waited.done]
    at_work: list[Any] = [_child_ref_to_json(ref) for ref in waited.open]
    return ToolResult.json({"done": done, "at_work": at_work})


def _message_agent(call_input: JsonDict, children: StartedChildren) -> Steps:
    """Send a text to a running child; return an error result if the child has ended."""
    refs = _select_children([call_input["id"]], children)
    if isinstance(refs, ToolResult):
        return refs
    is_running = yield from Send(refs[0], call_input["text"])
    if is_running:
        return ToolResult.text(f"Told {refs[0].agent_id}; it reads it before its next step.")
    return ToolResult.error(
        f"{refs[0].agent_id} has ended already and reads nothing more; wait_agents gives its result."
    )


def _cancel_agent(call_input: JsonDict, children: StartedChildren) -> Steps:
    """Cancel a child, and return its result."""
    refs = _select_children([call_input["id"]], children)
    if isinstance(refs, ToolResult):
        return refs
    child: ChildResult[Any] = yield from Cancel(refs[0], call_input.get("reason", ""))
    return ToolResult.json({"id": refs[0].path, **child_to_json(child)})


def _list_agents(_: JsonDict, children: StartedChildren) -> Steps:
    """Return a result with an entry for each child, and whether it is running."""
    running = set(children.running)
    entries: list[Any] = [{**_child_ref_to_json(ref), "at_work": ref in running} for ref in children.refs]
    return ToolResult.json({"agents": entries})
    yield  # makes it a generator function, as the others are


def _sleep(call_input: JsonDict, _: StartedChildren) -> Steps:
    """Suspend the run for the requested seconds; return the time after it, with the note."""
    woke = yield from Sleep(timedelta(seconds=call_input["seconds"]))
    note = call_input.get("note", "")
    return ToolResult.text(f"It is {woke.isoformat(timespec='seconds')}." + (f" Your note: {note}" if note else ""))


def _child_ref_to_json(ref: ChildRef[Any]) -> dict[str, Any]:
    """Return the id and agent of a child as JSON."""
    return {"id": ref.path, "agent_type": ref.agent_id}


def _select_children(ids: Sequence[str] | None, children: StartedChildren) -> Sequence[ChildRef[Any]] | ToolResult:
    """Return the children with these ids, or the running ones for ``None``; an error result for an unknown id."""
    if ids is None:
        return children.running
    known: Mapping[str, ChildRef[Any]] = {ref.path: ref for ref in children.refs}
    missing = [name for name in ids if name not in known]
    if missing:
        listed = list_names([f"{path} ({ref.agent_id})" for path, ref in known.items()])
        return ToolResult.error(f"There is no agent with the id {missing[0]!r} in the background. There are: {listed}.")
    return [known[name] for name in dict.fromkeys(ids)]
