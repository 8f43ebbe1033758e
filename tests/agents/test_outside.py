"""
Agents that reach outside: ``librarian`` clones a repository, ``browser-use`` brings a browser along (generator-contract B31, B32).

That they work from end to end is what their recorded runs show; here stands what must not happen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, RunStatus, load_agent, tool
from stepengine.errors import InputError
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools.bundled import file_tools, search_tools

URL = "https://git.example/shop.git"


def librarian(folder: Path, replies: list[Any], *, exit_code: int = 0, **params: Any) -> Any:
    commands: list[list[str]] = []

    @tool(category="execute")
    def run_terminal_command(command: list[str], timeout_seconds: float = 30) -> dict[str, Any]:
        """Run a program."""
        commands.append(command)
        return {"exit_code": exit_code, "stdout": "", "stderr": "fatal: not found" if exit_code else ""}

    model = ScriptedModel(replies)
    tools = [*file_tools(folder), *search_tools(folder), run_terminal_command]
    with Engine([load_agent("librarian")], tools, model, default_model="x/y") as engine:
        return engine.run_sync("librarian", "How?", params=params), commands, model


@pytest.mark.spec("generator-contract:B31", "generator-contract:D36")
def test_clone_uses_an_argument_list_and_models_run_no_command(project: Path) -> None:
    answered = {"answer": "So.", "relevant_files": ["a"], "clone_dir": ".librarian/shop"}
    replies = [tool_call("run_terminal_command", {"command": ["rm"]}), tool_call("set_output", answered)]
    result, commands, model = librarian(project, replies, repo_url=f"{URL}/")
    (clone,) = commands

    assert answered == result.unwrap().model_dump()
    assert ["git", "clone", "--", URL] == [*clone[:2], *clone[-3:-1]]
    assert clone[-1].startswith(".librarian/shop-")
    assert clone[-1] in model.calls[0].messages[-1].text
    assert {"list_directory", "read_files", "glob", "code_search", "set_output"} == {
        t.name for t in model.calls[0].tools
    }
    assert ["error"] == [call.result.status for call in result.tool_calls if call.source == "model" and call.is_error]


@pytest.mark.spec("generator-contract:B31")
def test_a_failed_clone_is_answered_without_a_model(project: Path) -> None:
    result, _, model = librarian(project, [], exit_code=128, repo_url=URL)

    assert "could not be cloned: fatal: not found" in result.unwrap().answer
    assert ("", []) == (result.output.clone_dir, model.calls)


@pytest.mark.spec("generator-contract:D36")
@pytest.mark.parametrize(
    "url",
    [
        "", "--upload-pack=touch x", "/etc", "file:///etc", "../other", "ext::sh -c x", "https://u:p@git.example/a",
        "https://git.example/a b", "https://git.example/a';x'", "git.example/a", "https://git.example",
    ],
)  # fmt: skip
def test_a_non_public_repository_url_is_refused_before_anything_runs(url: str, project: Path) -> None:
    with pytest.raises(InputError, match="repo_url"):
        librarian(project, [], repo_url=url)


@pytest.mark.spec("generator-contract:B31")
@pytest.mark.parametrize("name", [".git", "..", "-x", ".", "a/.git"])
def test_a_clone_stays_in_its_folder_for_any_repository_name(name: str, project: Path) -> None:
    _, ((*_, folder),), _ = librarian(project, [], exit_code=1, repo_url=f"https://git.example/{name}")

    assert [".librarian"] == list(Path(folder).parts[:-1])
    assert Path(folder).name[0].isalnum()


@pytest.mark.spec("generator-contract:B32")
def test_a_missing_browser_fails_the_run_with_its_name() -> None:
    import attrs

    from stepengine.adapters.mcp import mcp_tools

    agent = attrs.evolve(load_agent("browser-use"), tools=(mcp_tools(["no-such-browser"], name="browser"),))
    with Engine([agent], models=ScriptedModel([])) as engine:
        result = engine.run_sync(agent, "Look.")

    assert RunStatus.FAILED is result.status
    assert "'browser'" in str(result.error)
