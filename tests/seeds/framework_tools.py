"""
Seed 003, "AgentContext", "Tool Trait", "ToolRegistry" and "Permission System", without any engine or model.
"""

import asyncio
import tempfile
from pathlib import Path

from stepengine import ToolContext, tool
from stepengine.data.json import freeze_object
from stepengine.permissions import Policy, Rule
from stepengine.permissions.rules import Request, Scope
from stepengine.tools import ResourceMap, ToolPreview, ToolRegistry
from stepengine.tools.bundled import file_tools, shell_tools


class Todos(list[str]):
    """A live object of the agent's."""


@tool(category="write", preview=lambda given: ToolPreview("Note a task", given))
def note(ctx: ToolContext, task: str) -> str:
    """
    Note a task.

    Args:
        task: The task.
    """
    todos = ctx.resources.get(Todos)
    assert todos is not None
    todos.append(task)
    return f"{len(todos)} tasks, noted by {ctx.tool_call_id}"


async def tools(folder: Path) -> ToolRegistry:
    registry = ToolRegistry([note, *file_tools(folder, write=True), *shell_tools(folder)])
    todos = Todos()
    ctx = ToolContext.for_test(tool_call_id="toolu_1", resources=ResourceMap([todos]))
    result = await registry.execute("note", {"task": "tea"}, ctx)
    wrong = await registry.execute("note", {"task": 3}, ctx)
    unknown = await registry.execute("nota", {})
    print(result.text)

    assert (result.text, todos) == ("1 tasks, noted by toolu_1", ["tea"])
    assert (True, True) == (wrong.is_error, unknown.is_error)
    assert "note" in unknown.text
    assert registry.category("note") == "write"
    assert "task" in registry.specs()["note"].input_schema["properties"], "the context is hidden from the schema"
    assert list(registry.specs()["note"].input_schema["properties"]) == ["task"]
    assert {"read_files", "write_file", "str_replace", "run_terminal_command"} <= set(registry.specs())
    preview = note.preview(freeze_object({"task": "tea"}))
    assert preview is not None
    assert preview.action == "Note a task"
    return registry


def permissions(registry: ToolRegistry, folder: Path) -> None:
    def decided(policy: Policy, name: str, session: str | None = None, **given: object) -> str:
        spec = registry.specs()[name]
        return policy.check(
            Request(tool=spec, input=freeze_object(given), agent_id="coder", session_id=session)
        ).decision

    policy = Policy(
        [
            Rule.allow_category("read"),
            Rule.ask_for_tool("run_terminal_command"),
            Rule.allow_command(["git", "status"], priority=1),
            Rule.deny_tool("write_file", scope=Scope("agent", "coder")),
        ]
    )
    assert decided(policy, "read_files", paths=["a"]) == "allow"
    assert decided(policy, "run_terminal_command", command="rm a") == "ask"
    assert decided(policy, "run_terminal_command", command="git status -s") == "allow"
    assert decided(policy, "write_file", path="a", content="") == "deny"
    assert decided(policy, "note", task="tea") == "ask", "what no rule speaks of is asked"

    during = policy.with_session_rule("s1", Rule.allow_tool("note"))
    assert (decided(during, "note", "s1", task="x"), decided(during, "note", "s2", task="x")) == ("allow", "ask")
    assert decided(during.without_session_rules("s1"), "note", "s1", task="x") == "ask"

    policy.save(folder / "rules.json")
    assert Policy.load(folder / "rules.json") == policy
    print(policy.explain(Request(tool=registry.specs()["note"], input=freeze_object({"task": "tea"}))).splitlines()[0])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        permissions(asyncio.run(tools(Path(name))), Path(name))


if __name__ == "__main__":
    main()
