"""
Codebuff's ``librarian``: it clones a repository, tells the model its location, and lets the model answer.

Changed: the command is a list of words, because no shell parses it. The handler checks the address first. The clone is inside the
workspace, so that file tools can read it. Its name comes from ``ctx.random``, so that a replay uses the same name. The model of the
bundled agent ``librarian`` cannot run commands at all.
"""

from __future__ import annotations

from typing import Any

from stepengine import STEP_ALL, AgentDefinition, StepContext, Steps, ToolCall

INPUT = {
    "prompt": "What to find out about the repository.",
    "params": {
        "type": "object",
        "properties": {"repo_url": {"type": "string", "pattern": r"^https://[\w.-]+(/[\w.-]+)+$"}},
        "required": ["repo_url"],
    },
}
OUTPUT = {
    "type": "object",
    "properties": {
        "answer": {"type": "string"},
        "relevant_files": {"type": "array", "items": {"type": "string"}},
        "clone_dir": {"type": "string"},
    },
    "required": ["answer", "relevant_files", "clone_dir"],
}


def handle_steps(ctx: StepContext) -> Steps[Any]:
    """Clone, tell the model where, and let it work."""
    repo_url = ctx.params["repo_url"]
    name = repo_url.rpartition("/")[2].removesuffix(".git").strip(".-") or "repo"
    clone_dir = f".clones/{name}-{ctx.random.randrange(10**6)}"  # there: Date.now()
    ctx.logger.info("cloning", url=repo_url, into=clone_dir)

    command = ["git", "clone", "--depth", "1", "--", repo_url, clone_dir]
    cloned = yield ToolCall("run_terminal_command", {"command": command, "timeout_seconds": 180})
    result: Any = cloned.tool_result
    if result.is_error or result.data["exit_code"] != 0:  # there: toolResult[0].value.exitCode
        why = result.text if result.is_error else result.data["stderr"]
        return {"answer": f"Failed to clone: {why}", "relevant_files": [], "clone_dir": ""}

    told = f"The repository is cloned to {clone_dir}. Look around in it and answer: {ctx.prompt}"
    yield ToolCall("add_message", {"role": "user", "content": told}, include_tool_call=False)
    yield STEP_ALL
    return None  # the output is what the model gave to set_output


agent = AgentDefinition(
    "librarian",
    display_name="Librarian",
    description="Clones a repository and answers questions about it.",
    tools=["run_terminal_command", "set_output"],
    instructions_prompt="Answer the question about the clone, then call set_output with the answer, its files and the folder.",
    input_schema=INPUT,
    output_schema=OUTPUT,
    handle_steps=handle_steps,
)
