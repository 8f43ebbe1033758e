"""
``file-lister``: sees the tree of the project and names the files that matter for a prompt, one path per line.

``stepengine run file-lister "Where are prices computed?"``
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from stepengine import STEP_ALL, AgentDefinition, StepContext, Steps, ToolCall

TREE_TOKENS = 20_000

INSTRUCTIONS = """\
From the tree, name the files that somebody must read to answer the prompt, the most important first, at most 12. When it
says that something was left out where they could be, look into that folder with read_subtree first. Answer with their paths
as they are written from the root, one per line, and nothing else; with the word none when no file matters."""
NONE = "none"


class Where(BaseModel):
    """Where to look."""

    model_config = ConfigDict(extra="forbid")

    directories: list[str] = Field(default=[], description="Folders to look at; empty for the whole project.")


def handle_steps(ctx: StepContext[Where]) -> Steps[str]:
    """Read the file tree, and return the model's list of files; ``""`` if it names none."""
    yield ToolCall("read_subtree", {"paths": ctx.params.directories or ["."], "max_tokens": TREE_TOKENS})
    turn = yield STEP_ALL
    return "" if turn.text.strip(" .`").lower() == NONE else turn.text


agent = AgentDefinition(
    "file-lister",
    description="Names the files of the project that matter for a prompt.",
    tools=["read_subtree"],
    instructions_prompt=INSTRUCTIONS,
    input_schema=Where,
    handle_steps=handle_steps,
)
