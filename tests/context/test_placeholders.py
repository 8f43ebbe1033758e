"""Placeholders of codebuff in the prompts of an agent: filled, recorded, and reported where they stay."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, RunStatus, StepContext, Steps, ToolCall, Workspace
from stepengine.data.placeholders import PROJECT_NAMES, RUN_NAMES
from stepengine.journal import MemoryJournal
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text

pytestmark = pytest.mark.spec("requirements:A20")

CODEBUFF = (
    "AGENT_NAME", "AGENTS_PROMPT", "FILE_TREE_PROMPT", "FILE_TREE_PROMPT_SMALL", "FILE_TREE_PROMPT_LARGE", "GIT_CHANGES_PROMPT",
    "INITIAL_AGENT_PROMPT", "KNOWLEDGE_FILES_CONTENTS", "PROJECT_ROOT", "REMAINING_STEPS", "SKILLS_PROMPT", "SYSTEM_INFO_PROMPT",
    "TOOLS_PROMPT", "USER_CWD", "USER_INPUT_PROMPT",
)  # fmt: skip
"""The placeholders of its agents, but ``CONFIG_SCHEMA``, which describes a file of that product."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    folder = tmp_path / "shop"
    files = {
        "AGENTS.md": "Prices are whole cents.\n",
        "src/shop.py": "def total(order): ...\n",
        "secret-plan.md": "Close it.\n",
        ".agents/skills/release/SKILL.md": "---\nname: release\ndescription: How we release.\n---\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def sent(prompt: str, folder: Path | Workspace | None, **options: Any) -> tuple[str, tuple[str, ...]]:
    """
    Return the system prompt as it was sent, and the warnings of the result.
    """
    model = ScriptedModel(["Done."])
    agent = AgentDefinition("worker", model="x/y", system_prompt=prompt)
    with Engine([agent], models=model, workspace=folder, **options) as engine:
        result = engine.run_sync(agent, "Tidy up.")
    assert RunStatus.COMPLETED is result.status
    return model.calls[0].system_prompt, result.warnings


def test_placeholders_in_each_prompt_are_filled_and_replay_without_project(project: Path) -> None:
    def handle_steps(_: StepContext) -> Steps[None]:
        yield STEP
        yield STEP

    agent = AgentDefinition(
        "worker",
        model="x/y",
        display_name="Tidy",
        system_prompt="You are {CODEBUFF_AGENT_NAME} in {CODEBUFF_PROJECT_ROOT}.\n{CODEBUFF_FILE_TREE_PROMPT}",
        instructions_prompt="Asked: {CODEBUFF_USER_INPUT_PROMPT} {CODEBUFF_KNOWLEDGE_FILES_CONTENTS}",
        step_prompt="{CODEBUFF_REMAINING_STEPS} steps in {CODEBUFF_USER_CWD}",
        handle_steps=handle_steps,
    )
    model, journal = ScriptedModel([text("One."), text("Two.")]), MemoryJournal()
    with Engine([agent], models=model, workspace=project) as engine:
        result = engine.run_sync(agent, "Tidy {CODEBUFF_PROJECT_ROOT} up.", journal=journal)
    shutil.rmtree(project)
    with Engine([agent], models=ScriptedModel([])) as engine:
        again = engine.replay_sync(journal)

    assert ((), RunStatus.COMPLETED) == (result.warnings, result.status)
    assert result == again
    first, second = model.calls
    assert first.system_prompt == second.system_prompt == result.state.system_prompt
    assert first.system_prompt.startswith(f"You are Tidy in {project}.\n# Project file tree\n")
    assert "src/\n shop.py total" in first.system_prompt
    instructions = first.messages[1].text
    # What the user wrote is filled in as it is: only the author's text has placeholders.
    assert instructions.startswith("Asked: Tidy {CODEBUFF_PROJECT_ROOT} up. # Project\n")
    assert "Prices are whole cents." in instructions
    assert [f"50 steps in {project}", f"49 steps in {project}"] == [
        call.tail[0].text.removeprefix("<system-reminder>").removesuffix("</system-reminder>").strip()
        for call in model.calls
    ]


def test_every_placeholder_of_codebuff_is_filled(project: Path) -> None:
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=project, check=True)
    prompt, warnings = sent("\n---\n".join([f"{name}[{{CODEBUFF_{name}}}]" for name in CODEBUFF]), project)
    filled = dict(part.split("[", 1) for part in prompt.split("\n---\n"))

    assert set(CODEBUFF) <= {*RUN_NAMES, *PROJECT_NAMES}
    assert () == warnings
    assert "CODEBUFF" not in prompt
    assert ["AGENTS_PROMPT", "TOOLS_PROMPT"] == [name for name in CODEBUFF if filled[name] == "]"]
    assert "Branch: main" in filled["GIT_CHANGES_PROMPT"]
    assert "release: How we release." in filled["SKILLS_PROMPT"]
    assert "Tidy up.]" == filled["INITIAL_AGENT_PROMPT"]


def test_an_unknown_placeholder_stays_and_gives_a_warning(project: Path) -> None:
    prompt, warnings = sent("Use {CODEBUFF_CONFIG_SCHEMA} twice: {CODEBUFF_CONFIG_SCHEMA}", project)

    assert "Use {CODEBUFF_CONFIG_SCHEMA} twice: {CODEBUFF_CONFIG_SCHEMA}" == prompt
    (warning,) = warnings
    assert (
        "agent 'worker': its prompt has {CODEBUFF_CONFIG_SCHEMA}, which is unknown, so it was sent unchanged" in warning
    )
    assert "USER_INPUT_PROMPT" in warning


@pytest.mark.parametrize("workspace", [None, Workspace.from_command(["false"], "/nowhere", name="far")])
def test_a_project_placeholder_without_local_workspace_gives_a_warning(workspace: Workspace | None) -> None:
    prompt, warnings = sent("In {CODEBUFF_PROJECT_ROOT}.", workspace)

    assert "In {CODEBUFF_PROJECT_ROOT}." == prompt
    assert ["Engine(workspace=folder)"] == [warning.rpartition("use ")[2] for warning in warnings]


def test_a_filled_tree_follows_rules_about_files(project: Path) -> None:
    permissions = Policy(rules=[Rule.deny_path("secret-*"), Rule.deny_path("AGENTS.md")])
    prompt, _ = sent(
        "{CODEBUFF_FILE_TREE_PROMPT} {CODEBUFF_KNOWLEDGE_FILES_CONTENTS}", project, permissions=permissions
    )

    assert "shop.py" in prompt
    assert "secret-plan" not in prompt
    assert "whole cents" not in prompt


def test_a_child_that_inherits_the_prompt_sends_it_as_filled(project: Path) -> None:
    def handle_steps(_: StepContext) -> Steps[str]:
        yield STEP
        return (yield from AgentCall("kid", "Help."))

    kid = AgentDefinition(
        "kid", inherit_parent_system_prompt=True, instructions_prompt="{CODEBUFF_INITIAL_AGENT_PROMPT} is all."
    )
    agent = AgentDefinition(
        "worker",
        model="x/y",
        system_prompt="In {CODEBUFF_USER_CWD}.",
        spawnable_agents=[kid],
        handle_steps=handle_steps,
    )
    model = ScriptedModel([text("One."), text("Two.")])
    with Engine([agent], models=model, workspace=project) as engine:
        engine.run_sync(agent, "Go.").unwrap()

    assert [f"In {project}."] * 2 == [call.system_prompt for call in model.calls]
    assert model.calls[1].messages[-1].text.startswith("Help. is all.")


@pytest.mark.parametrize(
    ("tool", "inherits", "replaced", "expected"),
    [
        ("spawn_agents", True, False, "Fix the tax."),
        ("spawn_agents", False, False, "Review it."),
        ("spawn_agents", True, True, ""),
        ("spawn_agent_inline", False, False, "Fix the tax."),
    ],
)
def test_child_with_history_sees_the_users_request(tool: str, inherits: bool, replaced: bool, expected: str) -> None:
    def handle_steps(_: StepContext) -> Steps[None]:
        yield STEP
        if replaced:
            note = [{"role": "user", "content": "Earlier work."}]
            yield ToolCall("set_messages", {"messages": note}, include_tool_call=False)
        entry = {"agent_type": "kid", "prompt": "Review it."}
        asked = entry if tool == "spawn_agent_inline" else {"agents": [entry]}
        yield ToolCall(tool, asked, include_tool_call=False)

    kid = AgentDefinition("kid", include_message_history=inherits, instructions_prompt="[{CODEBUFF_USER_INPUT_PROMPT}]")
    agent = AgentDefinition("worker", model="x/y", spawnable_agents=[kid], handle_steps=handle_steps)
    model = ScriptedModel([text("One."), text("Two.")])
    with Engine([agent], models=model) as engine:
        engine.run_sync(agent, "Fix the tax.").unwrap()

    assert model.calls[1].messages[-1].text.startswith(f"[{expected}]")


def test_resumed_run_keeps_the_prompt_filled_first(project: Path) -> None:
    def handle_steps(_: StepContext) -> Steps[None]:
        yield from Ask("Go on?", key="go")
        yield STEP

    agent = AgentDefinition(
        "worker", model="x/y", system_prompt="{CODEBUFF_KNOWLEDGE_FILES_CONTENTS}", handle_steps=handle_steps
    )
    model, journal = ScriptedModel(["Done."]), MemoryJournal()
    with Engine([agent], models=model, workspace=project) as engine:
        engine.run_sync(agent, "Go.", journal=journal)
        (project / "AGENTS.md").write_text("Prices are dollars.\n")
        engine.resume_sync(journal, answers={"go": "yes"}).unwrap()

    assert "whole cents" in model.calls[0].system_prompt


PROMPTS = st.text("{}CODEBUFF_ab %s", max_size=30).filter(lambda prompt: "{CODEBUFF_" not in prompt and prompt.strip())


@given(st.lists(PROMPTS, min_size=4, max_size=4))
@settings(max_examples=5)
def test_other_braces_stay_plain_text(prompts: list[str]) -> None:
    model = ScriptedModel(["Done."] * 4)
    with Engine(models=model) as engine:
        results = [engine.run_sync(AgentDefinition("worker", model="x/y", system_prompt=p), "Go.") for p in prompts]

    assert prompts == [call.system_prompt for call in model.calls]
    assert {()} == {result.warnings for result in results}
