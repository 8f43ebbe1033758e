"""
The program of public tasks does what it says: what each task sent, asked, stored and read.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepengine import STEP, Ask
from tests.scripts import load_script

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
FILE = Path(__file__).parent / "public_tasks.py"


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    module: ModuleType = load_script(FILE)
    return module


@pytest.mark.spec("requirements:P12")
def test_the_program_imports_only_documented_public_names() -> None:
    imported = [
        (str(node.module), alias.name)
        for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "stepengine"
        for alias in node.names
    ]

    assert len(imported) > 40
    assert [] == [pair for pair in imported if pair[1] not in importlib.import_module(pair[0]).__all__]
    assert [] == [module for module, _ in imported if not (REFERENCE / f"{module}.md").exists()]


async def test_a_custom_provider_streams_to_an_agent(tasks: ModuleType) -> None:
    said, thought = await tasks.stream_of_an_own_provider()

    assert (["echo: ", "hello"], ["hm"]) == (said, thought)


@pytest.mark.leaks_allowed("the sandbox opens its threads once for a process")
def test_a_program_runs_in_the_sandbox(tasks: ModuleType) -> None:
    pytest.importorskip("pydantic_monty", reason="needs the extra programs")

    assert "noon at Brest" == tasks.run_a_program()


def test_a_person_is_asked_only_about_tools_that_write(tasks: ModuleType) -> None:
    result, clerk = tasks.ask_a_clerk()

    assert "Here it is. (yes)" == result.unwrap()
    assert ["sell", ""] == [question.tool_name or "" for question in clerk.asked]
    assert (True, False) == (tasks.stock.spec.annotations.read_only, tasks.sell.spec.annotations.read_only)
    assert "Who wants to buy something." == tasks.seller.input_schema.prompt


def test_a_stored_state_is_loaded_and_continued(tasks: ModuleType, tmp_path: Path) -> None:
    state, result = tasks.store_and_load(tmp_path / "state.json")

    assert ["user: I am Ann.", "assistant: Hello Ann."] == tasks.lines_of(state.message_history)
    assert ["user: Who am I?", "assistant: You are Ann."] == tasks.lines_of(result.state.message_history)[2:]


@pytest.mark.spec("evaluation:JG7", "evaluation:JG8")
def test_a_recorded_run_is_forked_with_other_replies(tasks: ModuleType, tmp_path: Path) -> None:
    agent = tasks.AgentDefinition("host")
    with tasks.Engine([agent], models=tasks.ScriptedModel(["Hello Ann."])) as engine:
        engine.run_sync(agent, "Hi", journal=tmp_path / "run.jsonl")
    again, budget = tasks.ask_twice(tmp_path / "run.jsonl")

    assert ["Hello Bob.", "Hello Eve."] == [one.result.unwrap() for one in again]
    assert 0 < budget.spent <= budget.dollars
    assert "as #3 gave" == tasks.made_up(None, [tasks.ExternalCall("look", {}, "#3")])


@pytest.mark.spec("durable:UC3")
def test_a_run_of_another_process_is_answered_and_cancelled(tasks: ModuleType, tmp_path: Path) -> None:
    def handle_steps(ctx: Any) -> Any:
        said = yield from Ask("Which one?")
        yield STEP
        return said

    agent = tasks.AgentDefinition("host", handle_steps=handle_steps)
    kept, ended = tmp_path / "kept.jsonl", tmp_path / "ended.jsonl"
    model = tasks.ScriptedModel(["Done."])
    with tasks.Engine([agent], models=model) as engine:
        (question,) = engine.run_sync(agent, "Go", journal=kept).pending_questions
        engine.run_sync(agent, "Go", journal=ended)
        first = [
            tasks.reach_a_run_elsewhere(file, {question.id: "red"}, {}, ends=file == ended) for file in (kept, ended)
        ]
        again = tasks.reach_a_run_elsewhere(kept, {}, {}, ends=False)
        results = [engine.resume_sync(file) for file in (kept, ended)]

    assert ([True, True], False) == (first, again)
    assert ["completed", "cancelled"] == [result.status for result in results]
    assert "red" == results[0].output
    assert ["Go", "Leave the tests out."] == [message.text for message in model.calls[0].all_messages]
