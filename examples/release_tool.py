"""
A tool that yields: it runs tests, asks a person, lets another agent write the release notes, publishes, and survives a crash.

``python examples/release_tool.py`` needs no key: scripted replies replace the model, and the tools really run. To call a real model,
omit ``models=`` and set OPENAI_API_KEY.
"""

import tempfile
from pathlib import Path

from stepengine import AgentCall, AgentDefinition, Ask, Engine, Parallel, RunStatus, Steps, ToolCall, call, tool
from stepengine.errors import ToolError
from stepengine.testing import ScriptedModel, text, tool_call

done: list[str] = []


@tool(category="execute", requires_permission=False)
def run_tests(suite: str) -> str:
    """Run a suite of tests."""
    done.append(f"tested {suite}")
    return f"{suite}: 42 passed"


@tool(category="network", requires_permission=False)
def publish(what: str) -> str:
    """Publish a file."""
    done.append(f"published {what}")
    return f"{what} is out"


writer = AgentDefinition("writer", model="openai/gpt-5", system_prompt="You write release notes, in one sentence.")


@tool(uses=[run_tests, publish, writer])
def release(version: str) -> Steps[str]:
    """
    Release a version: tests, a person's yes, notes, publishing.

    Args:
        version: What is released, such as "1.2.0".
    """
    # What a model would need eight steps for, and could get wrong in each of them, is code that says what happens when.
    tested = yield from Parallel(*[ToolCall("run_tests", {"suite": suite}) for suite in ("fast", "deep")])
    answer = yield from Ask(f"Release {version}? {'; '.join(one.text for one in tested)}", options=("yes", "no"))
    if answer == "no":
        msg = f"{version} was not released: a person said no"
        raise ToolError(msg)  # the model reads it as the result of its call
    notes = yield from AgentCall("writer", f"What is new in {version}?")
    for what in ("the wheel", "the notes"):
        yield from call(publish, what)
    return f"{version} is out. {notes}"


clerk = AgentDefinition("clerk", model="openai/gpt-5", tools=[release])


def main() -> None:
    replies = [tool_call(release, {"version": "1.2.0"}), text("Faster, and kinder."), text("Done: 1.2.0 is out.")]
    model = ScriptedModel(replies)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "release.jsonl"
        with Engine([clerk], models=model) as engine:
            waiting = engine.run_sync(clerk, "Release 1.2.0.", journal=journal)
        assert waiting.status is RunStatus.SUSPENDED
        print(waiting.pending_questions[0].text)
        # Days later, in another process: what is done is not done again.
        with Engine([clerk], models=model) as engine:
            result = engine.resume_sync(journal, answers={waiting.pending_questions[0].id: "yes"})
        with Engine([clerk], models=ScriptedModel([])) as engine:
            assert engine.replay_sync(journal) == result
    print(*done, sep="\n")
    print(result.text)
    assert done == ["tested fast", "tested deep", "published the wheel", "published the notes"]


if __name__ == "__main__":
    main()
