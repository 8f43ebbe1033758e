"""
Codebuff's ``git-committer``: two commands, a message in the name of the model, a step, another message, and the rest of the turn.

Changed: ``add_message`` is not in the list of tools, because handlers can always call it. Commands run without a shell, so the commit
message is one item of a list and needs no heredoc.
"""

from __future__ import annotations

from stepengine import STEP, STEP_ALL, AgentDefinition, StepContext, Steps, ToolCall

LOOK = ("git diff", "git log --oneline -10")
NOTES = (
    "I have seen the changes and the last commits. Next I read the files that explain them.",
    "Now I make the commit.",
)


def handle_steps(ctx: StepContext) -> Steps:
    """Show the changes and the log, let the model read once, then let it commit."""
    for command in LOOK:
        yield ToolCall("run_terminal_command", {"command": command, "timeout_seconds": 30})
    yield ToolCall("add_message", {"role": "assistant", "content": NOTES[0]}, include_tool_call=False)
    yield STEP
    yield ToolCall("add_message", {"role": "assistant", "content": NOTES[1]}, include_tool_call=False)
    yield STEP_ALL


agent = AgentDefinition(
    "git-committer",
    display_name="Git Committer",
    description="Commits the changes in a repository with a message that says why they were made.",
    tools=["read_files", "run_terminal_command", "end_turn"],
    input_schema={"prompt": "Which changes to commit."},
    system_prompt="You are an experienced developer. You make one commit with a good message.",
    instructions_prompt="Read what explains the changes, stage the files that belong together, and commit them.",
    step_prompt="Stage only related files. Write a short message in the imperative. Do not push. Call end_turn after the commit.",
    handle_steps=handle_steps,
)
