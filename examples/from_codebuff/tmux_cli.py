"""
Codebuff's ``tmux-cli``: a terminal in which the model controls an interactive program.

Changed: the original starts a tmux server that outlives the command. Here every process of a command ends with the command, except a
*job*, which ends with the run. So the tmux server is a job (``tmux -D`` stays in the foreground), and the other commands use its
socket. Commands are lists of words, so the text that is typed into the terminal needs no quotes.
"""

from __future__ import annotations

from typing import Any

from stepengine import STEP_ALL, AgentDefinition, StepContext, Steps, ToolCall, ToolResult

OUTPUT = {
    "type": "object",
    "properties": {
        "overall_status": {"enum": ["success", "failure", "partial"]},
        "summary": {"type": "string"},
        "session_name": {"type": "string"},
    },
    "required": ["overall_status", "summary", "session_name"],
}


def command(*words: str, **options: Any) -> ToolCall:
    """Return a command that no model is shown."""
    return ToolCall("run_terminal_command", {"command": [*words], **options}, include_tool_call=False)


def handle_steps(ctx: StepContext) -> Steps[Any]:
    """Start the terminal, type the command, show the model what is seen, and let it go on."""
    session = f"tui-{ctx.random.randrange(10**6)}"  # there: Date.now() and Math.random()
    tmux = ("tmux", "-L", session)
    server = yield command(*tmux, "-D", "-f", "/dev/null", process_type="BACKGROUND")
    opened = yield command(*tmux, "new-session", "-d", "-x", "120", "-y", "30", "sh")
    typed = yield command(*tmux, "send-keys", "-l", "--", ctx.params["command"])
    entered = yield command(*tmux, "send-keys", "Enter")
    wrong = [
        problem
        for problem in map(problem_of, [turn.tool_results[0] for turn in (server, opened, typed, entered)])
        if problem
    ]
    if wrong:
        return {"overall_status": "failure", "summary": wrong[0], "session_name": ""}

    yield command("sleep", "1")
    seen: Any = (yield command(*tmux, "capture-pane", "-p")).tool_result
    told = (
        f"A terminal is open and {ctx.params['command']!r} was typed into it. Go on with {' '.join(tmux)} send-keys, and look "
        f"with {' '.join(tmux)} capture-pane -p. At the end: {' '.join(tmux)} kill-server. It shows:\n{seen.data['stdout'].strip()}"
    )
    yield ToolCall("add_message", {"role": "user", "content": told}, include_tool_call=False)
    yield STEP_ALL
    return None


def problem_of(result: ToolResult) -> str:
    """Return why a command failed; ``""`` when it did not. A job that goes on has no exit code yet."""
    ran: Any = result.data
    if result.is_error:
        return result.text
    return str(ran.get("stderr") or ran["exit_code"]) if ran.get("exit_code") else ""


agent = AgentDefinition(
    "tmux-cli",
    description="Runs a program in a terminal, types into it and reports what it showed.",
    tools=["run_terminal_command", "set_output"],
    instructions_prompt="Do in the terminal what you are asked, then call set_output with what came of it.",
    input_schema={
        "prompt": "What to do with the program.",
        "params": {
            "type": "object",
            "properties": {"command": {"type": "string", "minLength": 1}},
            "required": ["command"],
        },
    },
    output_schema=OUTPUT,
    handle_steps=handle_steps,
)
