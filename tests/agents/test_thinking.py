"""
Agents that think, review and choose (generator-contract B15, B18 to B21).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, AgentState, AssistantMessage, RunStatus, UserMessage, load_agent
from stepengine.context import SystemPrompt
from stepengine.testing import failure, tool_call, with_thinking

from .common import asked, called, run

HISTORY = [UserMessage("We need a lock."), AssistantMessage("Do we?")]


def asking(child: str, **call: Any) -> AgentDefinition[Any]:
    """
    Return an agent with a conversation, a built system prompt and a tool, that asks one child.
    """
    agent = load_agent(child)

    def handle_steps(_: Any) -> Any:
        yield from AgentCall(agent, **call)

    return AgentDefinition(
        "asking",
        tools=["read_files", "set_output"],
        spawnable_agents=[agent],
        system_prompt=SystemPrompt(identity="You lead."),
        handle_steps=handle_steps,
    )


@pytest.mark.spec("generator-contract:B15")
@pytest.mark.parametrize(
    ("replies", "message"),
    [
        (["Yes, since both write."], "Yes, since both write."),
        ([with_thinking("hm", "<think>a\nb</think> Yes. ")], "Yes."),
        (["  <think>deep</think>\n  The answer."], "The answer."),
        (["It is hard, but yes.\n</think>\n\nYes."], "Yes."),
        (["The tag <think> opens thoughts."], "The tag <think> opens thoughts."),
        (["<thinking>never closed"] * 3, "No conclusion was reached."),
        ([tool_call("read_files", {"paths": ["shop.py"]}), "Without reading: yes."], "Without reading: yes."),
    ],
)
def test_the_thinker_returns_its_conclusion_without_thoughts(project: Path, replies: list[Any], message: str) -> None:
    result, _ = run("thinker", project, replies, "Is a lock needed?")

    assert {"message": message} == result.output
    assert result.status is (RunStatus.TRUNCATED if len(replies) == 3 else RunStatus.COMPLETED)


@pytest.mark.spec("generator-contract:B15", "generator-contract:L15", "generator-contract:B20")
@pytest.mark.parametrize("child", ["thinker", "code-reviewer"])
def test_inheriting_agents_see_conversation_and_tools_but_call_none(project: Path, child: str) -> None:
    parent = asking(child, prompt="Well?")
    result, model = run(parent, project, ["Yes."], previous=AgentState.from_messages(HISTORY))
    (request,) = model.calls

    assert RunStatus.COMPLETED is result.status
    assert "You lead." in request.system_prompt
    assert ["read_files", "set_output"] == [tool.name for tool in request.tools][:2]
    assert ["We need a lock.", "Well?"] == asked(request)
    assert "you may call only: none" in request.messages[-1].text


@pytest.mark.spec("generator-contract:B18", "generator-contract:B14")
def test_the_selected_thought_becomes_the_answer(project: Path) -> None:
    choice = tool_call("set_output", {"thought_id": "b"})
    replies = ["First.", "<think>x</think>Second.", "", choice]
    result, model = run("thinker-best-of-n", project, replies, "Where?", params={"n": 3})

    assert "Second." == result.output == result.text
    assert "Second." == result.state.message_history[-1].text
    assert ["thinker-selector"] == [child.agent_id for child in result.children]
    listed = asked(model.calls[3])[-1]
    assert '"id": "B",\n      "content": "Second."' in listed
    assert '"C"' not in listed
    assert "think" not in listed


@pytest.mark.spec("generator-contract:B18")
@pytest.mark.parametrize(
    ("thoughts", "output"), [(["", " "], "No conclusion was reached."), (["", "Only this."], "Only this.")]
)
def test_a_single_thought_needs_no_selection(project: Path, thoughts: list[str], output: str) -> None:
    result, model = run("thinker-best-of-n", project, thoughts, "Where?", params={"n": 2})

    assert (output, 2) == (result.output, len(model.calls))


@pytest.mark.spec("generator-contract:B18")
@pytest.mark.parametrize(
    ("selection", "why"),
    [
        (["fail"], "None could be selected: "),
        (["A, I think.", "Really A.", "A!"], "None could be selected: "),
        ([tool_call("set_output", {"thought_id": "Z"})], "'Z' was selected, which is none. "),
    ],
)
def test_a_failed_selection_is_reported_and_returns_the_first_thought(
    project: Path, selection: list[Any], why: str
) -> None:
    replies = [failure(ValueError("no credit")) if reply == "fail" else reply for reply in selection]
    result, _ = run("thinker-best-of-n", project, ["First.", "Second.", *replies], "Where?", params={"n": 2})

    assert RunStatus.COMPLETED is result.status
    assert result.output.startswith(why)
    assert result.output.endswith("This is the first of 2:\n\nFirst.")


CHOICES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("thinker-selector", {"thoughts": [{"id": "A", "content": "x"}]}, {"thought_id": "A"}),
    (
        "best-of-n-selector",
        {"implementations": [{"id": "A", "content": "-x\n+y"}]},
        {"implementation_id": "A", "reason": "It is right.", "suggested_improvements": ""},
    ),
]


@pytest.mark.spec("generator-contract:B14", "generator-contract:S12")
@pytest.mark.parametrize(("agent_id", "params", "choice"), CHOICES)
def test_a_selector_must_call_set_output_and_is_reminded(
    project: Path, agent_id: str, params: Any, choice: Any
) -> None:
    call: Callable[..., Any] = tool_call
    result, _ = run(agent_id, project, ["I choose A.", call("set_output", choice)], "Which?", params=params)
    silent, _ = run(agent_id, project, ["I choose A.", "Really.", "Yes."], "Which?", params=params)
    half, _ = run(agent_id, project, [call("set_output", {}), "So.", "So."], "Which?", params=params)

    assert choice == result.unwrap().model_dump()
    assert RunStatus.FAILED is silent.status
    assert RunStatus.FAILED is half.status


@pytest.mark.spec("generator-contract:B21", "generator-contract:G31")
def test_every_review_question_gets_its_own_review(project: Path) -> None:
    """
    The reviewers see what is to be reviewed and their own question, and neither the other questions nor each other.
    """
    replies = ["<think>?</think>It is safe.", failure(ValueError("no credit")), "It is simple."]
    questions = ["Is it safe?", "Is it fast?", "Is it simple?"]
    result, model = run("code-reviewer-multi-prompt", project, replies, "+pay()", params={"prompts": questions})
    safe, failed, simple = result.unwrap().reviews

    assert ("It is safe.", "It is simple.") == (safe, simple)
    assert failed.startswith("This review failed: ")
    assert "no credit" in failed
    assert [["+pay()", question] for question in questions] == [asked(request) for request in model.calls]
    assert ["set_messages"] == [call.tool_name for call in result.tool_calls]
    assert [] == called(result)


@pytest.mark.spec("generator-contract:B21")
def test_reviewers_do_not_see_the_call_that_spawned_them(project: Path) -> None:
    parent = asking("code-reviewer-multi-prompt", params={"prompts": ["Is it safe?"]})
    _, model = run(parent, project, ["Yes."], previous=AgentState.from_messages(HISTORY))

    assert ["We need a lock.", "Is it safe?"] == asked(model.calls[0])
    assert ["user", "assistant", "user", "user"] == [m.role for m in model.calls[0].messages]
