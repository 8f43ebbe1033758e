"""
Parallel research, after Deep Agents' example: todos, researchers that search in parallel, and a report in a file.

``python examples/from_others/deepagents_parallel_research.py`` uses scripted replies. To call real models, omit ``models=`` and give
``web_tools`` a search service.

There todos, files and the tool ``task`` are part of every agent. Here each is named among the tools. The date in the prompt comes from
a hook that reads the run's clock, so a replay sends the same one. ``think`` is a tool of its own, since a reply that calls nothing but
the bundled ``think_deeply`` ends the turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepengine import AgentDefinition, Change, Engine, HookContext, Hooks, Limits, RunResult, UserMessage, tool
from stepengine.journal import JournalLike
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import SearchHit, file_tools, task_tool, web_tools

FACTS = {"trains": "Trains emit 30 g per km.", "planes": "Planes emit 250 g per km.", "cars": "Cars emit 160 g per km."}
REPORT = "# Travel\n\nTrains emit least [1], cars more [3], planes most [2].\n"


class Search:
    """A search service with one page for each topic."""

    async def search(self, query: str, depth: str) -> Sequence[SearchHit]:
        """Return the page about a topic."""
        return [SearchHit(query, f"https://pages.example/{query}", FACTS[query])]


@tool
def think(thought: str) -> str:
    """
    Think about what is known and what is missing.

    Args:
        thought: The thought.
    """
    return "Noted."


def add_date(ctx: HookContext) -> Change:
    """Put the date behind the conversation."""
    return Change(tail=[UserMessage(f"Today is {ctx.now:%Y-%m-%d}.")])


researcher = AgentDefinition(
    "researcher",
    model="openai/gpt-5-mini",
    description="Researches one topic. Give it only one.",
    system_prompt="Search, think about what is missing, and answer with the addresses of your sources.",
    tools=[*web_tools(Search()), think],
    hooks=Hooks(pre_step=add_date),
)
agent = AgentDefinition(
    "lead",
    model="anthropic/claude-sonnet-4-5",
    system_prompt=(
        "Plan with write_todos. Have each topic researched by a task of its own, all tasks in one reply. "
        "Write the report to report.md, with numbered sources."
    ),
    tools=[task_tool([researcher]), "write_todos", "write_file"],
)


def research(request: ModelRequest) -> ModelReply:
    """Reply as a researcher: search first, then think, then answer."""
    messages = request.messages
    topic = messages[0].text
    results = [m for m in messages if m.role == "tool"]
    if not results:
        return tool_call("web_search", {"query": topic})
    if len(results) == 1:
        return tool_call("think", {"thought": f"One source is enough for {topic}."})
    return text(f"{FACTS[topic]} https://pages.example/{topic}")


def make_model() -> Mapping[str, ScriptedModel]:
    """Return the models of the lead and of the researchers."""

    def todos(*, done: bool) -> ModelReply:
        tasks = ("Research three topics", "Write the report")
        return tool_call("write_todos", {"todos": [{"task": task, "completed": done} for task in tasks]})

    lead = ScriptedModel(
        [
            todos(done=False),
            tool_calls(*(tool_call("task", {"agent": "researcher", "prompt": topic}) for topic in FACTS)),
            tool_call("write_file", {"path": "report.md", "content": REPORT}),
            todos(done=True),
            text("The report is in report.md."),
        ]
    )
    return {"anthropic": lead, "openai": ScriptedModel(research)}


def run(engine: Engine, journal: JournalLike) -> RunResult[Any]:
    """Have the report written, by at most three researchers at a time."""
    limits = Limits(max_concurrent_children=3)
    return engine.run_sync(agent, "Which way to travel is best for the climate?", journal=journal, limits=limits)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tools = file_tools(folder, write=True)
        with Engine([agent], tools, make_model()) as engine:
            result = run(engine, Path(folder, "research.jsonl"))
        for call in result.tool_calls:
            if call.tool_name == "task":
                print(f"{call.input['prompt']}: {call.result.text}")
        print(result.output)
        print(Path(folder, "report.md").read_text())
