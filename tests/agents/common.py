"""
A small project, and a run of a bundled agent in it with a played model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepengine import Engine, RunResult, load_agent
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools.bundled import file_tools, followup_tools, search_tools, shell_tools

FILES = {
    "shop.py": "def total(order):\n    return sum(order)\n",
    "README.md": "# Shop\n",
    "docs/ideas.md": "- a discount\n",
}


def make_project(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


def tools_of(folder: Path, **shell: Any) -> list[Any]:
    """
    Return the tools that agents name, for a folder; without those of the web. *shell* are options of ``shell_tools``.
    """
    local = [*file_tools(folder, write=True, propose=True), *search_tools(folder), *shell_tools(folder, **shell)]
    return [*local, *followup_tools()]


def run(
    agent: Any, folder: Path, replies: Sequence[Any] = (), prompt: str = "", **options: Any
) -> tuple[RunResult[Any], ScriptedModel]:
    """
    Run a bundled agent, or a definition, to its end; every reply has to be asked for.
    """
    definition = load_agent(agent) if isinstance(agent, str) else agent
    model = ScriptedModel(replies)
    given = {name: options.pop(name) for name in ("hooks", "limits", "observers") if name in options}
    with Engine(
        [definition],
        [*tools_of(folder, **options.pop("shell", {})), *options.pop("tools", [])],
        model,
        default_model="x/y",
        workspace=folder,
        **given,
    ) as engine:
        result = engine.run_sync(definition, prompt, **options)
    model.assert_complete()
    return result, model


def replace(tool: str, path: str, old: str, new: str, key: str = "old_string") -> Any:
    return tool_call(tool, {"path": path, "replacements": [{key: old, "new_string": new}]})


def called(result: RunResult[Any]) -> list[str]:
    """
    Return the names of the calls in the history of a run.
    """
    return [c.tool_name for m in result.state.message_history if m.role == "assistant" for c in m.tool_calls]


def asked(request: Any) -> list[str]:
    """
    Return what the user is made to say in a request, instructions left out.
    """
    return [m.text for m in request.messages if m.role == "user" and "INSTRUCTIONS_PROMPT" not in m.tags]
