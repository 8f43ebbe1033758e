"""
``editor``: edits, checks, repairs, reports (generator-contract B11).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentState, Engine, RunStatus, load_agent
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import file_tools, search_tools


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text("def price():\n    return 1\n")
    (tmp_path / "notes.txt").write_text("first\nsecond\n")
    return tmp_path


def replace(path: str, old: str, new: str) -> Any:
    return tool_call("str_replace", {"path": path, "replacements": [{"old_string": old, "new_string": new}]})


def edit(folder: Path, *replies: Any, prompt: str = "Do it.", **options: Any) -> tuple[Any, ScriptedModel]:
    model = ScriptedModel(replies)
    tools = [*file_tools(folder, write=True), *search_tools(folder)]
    with Engine([load_agent("editor")], tools, model, default_model="x/y") as engine:
        result = engine.run_sync("editor", prompt, **options)
    model.assert_complete()
    return result, model


@pytest.mark.spec("generator-contract:B1")
def test_editor_edits_and_reports_changed_files(project: Path) -> None:
    result, _ = edit(project, replace("shop.py", "return 1", "return 2"), text("The price is 2."))

    assert {
        "changed_files": ["shop.py"],
        "diff": "--- a/shop.py\n+++ b/shop.py\n@@ -1,2 +1,2 @@\n def price():\n-    return 1\n+    return 2\n",
        "problems": [],
        "summary": "The price is 2.",
        "messages": [],
    } == result.unwrap()
    assert "def price():\n    return 2\n" == (project / "shop.py").read_text()


def test_files_of_the_params_precede_the_first_model_call(project: Path) -> None:
    _, model = edit(project, text("Nothing to do."), params={"files": ["shop.py", "nothing.py"]})
    (*_, shown) = model.calls[0].messages

    assert "tool" == shown.role
    assert "def price()" in shown.text
    assert "nothing.py" in shown.text


@pytest.mark.spec("generator-contract:B1")
def test_a_file_with_a_syntax_error_is_returned_for_repair(project: Path) -> None:
    result, model = edit(
        project,
        replace("shop.py", "return 1", "return (1"),
        text("Done."),
        replace("shop.py", "return (1", "return 2)"),
        text("Done."),
        replace("shop.py", "return 2)", "return 2"),
        text("Now it is right."),
    )
    notes = [m.text for m in model.calls[-1].messages if m.role == "user" and "Repair" in m.text]

    assert 2 == len(notes)
    assert "shop.py: SyntaxError: '(' was never closed (shop.py, line 2)" in notes[0]
    assert [] == result.unwrap()["problems"]
    assert result.output["diff"].count("\n-") == 1


def test_repairs_are_limited_and_remaining_problems_are_reported(project: Path) -> None:
    result, _ = edit(project, replace("shop.py", "return 1", "return ("), text("a"), text("b"), params={"repairs": 1})

    assert RunStatus.COMPLETED == result.status
    assert ["shop.py"] == result.output["changed_files"]
    assert "SyntaxError" in result.output["problems"][0]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("a.json", "{"),
        ("a.toml", "= 1"),
        ("deep.json", "[" * 100_000),
        ("null.py", "x = '\x00'"),
        ("deep.py", "-" * 9_999),
    ],
)
def test_json_and_toml_files_are_checked_too(project: Path, name: str, broken: str) -> None:
    write = tool_call("write_file", {"path": name, "content": broken})

    result, _ = edit(project, write, text("done"), params={"repairs": 0})

    assert [name] == [p.partition(":")[0] for p in result.output["problems"]]


def test_several_edits_are_reported_as_one_diff(project: Path) -> None:
    result, _ = edit(
        project,
        tool_calls(
            replace("./notes.txt", "first", "1st"),
            replace("notes.txt", "second", "2nd"),
            tool_call("write_file", {"path": "new/file.md", "content": "# New\n"}),
            replace("shop.py", "return 1", "return 3"),
            replace("shop.py", "return 3", "return 1"),
            replace("missing.py", "a", "b"),
        ),
        text("done"),
    )

    assert ["new/file.md", "notes.txt"] == result.output["changed_files"]
    assert (
        "--- /dev/null\n+++ b/new/file.md\n@@ -0,0 +1 @@\n+# New\n"
        "--- a/notes.txt\n+++ b/notes.txt\n@@ -1,2 +1,2 @@\n-first\n-second\n+1st\n+2nd\n"
    ) == result.output["diff"]


def test_a_file_that_became_unreadable_is_a_problem(project: Path) -> None:
    result, _ = edit(project, replace("notes.txt", "first", "\x00"), text("done"), params={"repairs": 0})

    assert ["notes.txt"] == result.output["changed_files"]
    assert "binary" in result.output["problems"][0]
    assert "+++ /dev/null" in result.output["diff"]


@pytest.mark.spec("generator-contract:B11")
def test_without_a_prompt_it_continues_with_exactly_one_step(project: Path) -> None:
    """
    All edits come in one reply, the model is not asked again, and the output holds the messages of that step.
    """
    started, _ = edit(project, text("What shall I change?"), prompt="I need a change.")
    said = AgentState.from_messages([*started.state.message_history], system_prompt="")
    reply = tool_calls(
        replace("shop.py", "return 1", "return ("), replace("notes.txt", "first", "1st"), text="Both at once."
    )

    result, model = edit(project, reply, prompt="", previous=said)
    messages = result.unwrap()["messages"]

    assert 1 == len(model.calls)
    assert "What shall I change?" in [m.text for m in model.calls[0].messages]
    assert ["assistant", "user"] == [m["role"] for m in messages]
    assert ["text", "tool_use", "tool_use"] == [part["type"] for part in messages[0]["content"]]
    assert ["notes.txt", "shop.py"] == result.output["changed_files"]
    assert ["shop.py"] == [p.partition(":")[0] for p in result.output["problems"]]


@pytest.mark.spec("generator-contract:B11")
def test_changes_of_an_earlier_run_are_not_reported_again(project: Path) -> None:
    first, _ = edit(project, replace("shop.py", "return 1", "return 2"), text("done"))

    second, _ = edit(project, replace("notes.txt", "first", "1st"), prompt="", previous=first.state)

    assert ["notes.txt"] == second.output["changed_files"]


def test_a_spent_step_budget_ends_the_repairs(project: Path) -> None:
    from stepengine import Limits

    result, _ = edit(
        project, replace("shop.py", "return 1", "return ("), text("I am out of steps."), limits=Limits(max_steps=1)
    )

    assert RunStatus.MAX_STEPS == result.status
    assert "return (" in (project / "shop.py").read_text()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("content", ["a." * 101, "x = \n" * 40_001], ids=["dots", "length"])
def test_files_that_parse_too_slowly_are_not_checked(project: Path, content: str) -> None:
    name = "a.toml" if "." in content else "a.py"
    write = tool_call("write_file", {"path": name, "content": content})

    result, _ = edit(project, write, text("done"))

    assert ([name], []) == (result.output["changed_files"], result.output["problems"])
