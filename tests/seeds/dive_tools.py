"""
Seed 002, "Tool Dependency Injection": the task tool gets its registry, the asking tool gets whom it asks, when they are made.

The agent knows neither.
"""

from stepengine import AgentDefinition, Engine, Question
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import ask_user_tool, task_tool


class Somebody:
    """Answers questions."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def ask(self, question: Question) -> str:
        """Answer a question."""
        self.asked.append(question.text)
        return self.answer


reviewer = AgentDefinition(
    "code-reviewer", description="Reviews code for issues", system_prompt="You are a code reviewer."
)
tools_own, engines = Somebody("red"), Somebody("never asked")
agent = AgentDefinition(
    "coder",
    model="anthropic/claude-sonnet-4-5",
    tools=[task_tool([reviewer]), ask_user_tool(tools_own)],
)
REPLIES = [
    tool_call("task", {"agent": "code-reviewer", "prompt": "Look at a.py."}),
    tool_call("ask_user", {"questions": [{"question": "Which colour?"}]}),
    text("Reviewed, in red."),
]


def reply(request: ModelRequest) -> ModelReply:
    if request.system_prompt == "You are a code reviewer.":
        return text("No issues.")
    return REPLIES[sum(message.role == "assistant" for message in request.messages)]


def main() -> None:
    with Engine([agent], models=ScriptedModel([reply] * 4), interactor=engines) as engine:
        result = engine.run_sync(agent, "Review a.py.")
    print(result.output)
    assert [c.tool_name for c in result.tool_calls] == ["task", "ask_user"]
    assert result.tool_calls[0].result.text == "No issues."
    assert "red" in result.tool_calls[1].result.text
    assert (tools_own.asked, engines.asked) == (["Which colour?"], [])


if __name__ == "__main__":
    main()
