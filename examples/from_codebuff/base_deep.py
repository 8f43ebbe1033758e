"""
Codebuff's ``base-deep``: an agent that writes a spec and a plan, asks questions, edits files, and has its work reviewed.

Changed: ``apply_patch`` is ``str_replace``. ``thinker-gpt``, ``code-reviewer-gpt`` and ``gpt-5-agent`` are ``thinker``,
``code-reviewer`` and ``coder``, and the caller selects their models. The hook ``project_context`` replaces the placeholders of the
system prompt.
"""

from __future__ import annotations

from stepengine import STEP, AgentDefinition, Hooks, ModelSettings, StepContext, Steps, Thinking, ToolCall
from stepengine.context import project_context

MAX_CONTEXT_LENGTH = 400_000
CACHE_EXPIRY_MS = 30 * 60 * 1_000
SYSTEM_PROMPT = """\
You lead agents that work on code. Understand first, then act: read what matters before you edit. Prefer few well-informed agents.

- Do what the user asks and what follows from it directly. Ask before you do more than that.
- Ask with ask_user when a decision is the user's. Look around first; you may find the answer.
- Run commands that are hard to undo only when the user asked for them. Leave other changes of the user alone.
- Spawn agents in parallel when they do not depend on each other. Do not spawn context-pruner: it runs by itself.
"""
INSTRUCTIONS = """\
Answer simple questions directly. For a change, work in phases and list them with write_todos:

1. Context: spawn file-picker, code-searcher and researchers in parallel, then read the files that they name.
2. Spec: write SPEC.md in a folder below .agents/sessions. Ask the user what is unclear, in rounds. Have thinker criticise it until it
   finds nothing new.
3. Plan: write PLAN.md beside it, and have it criticised in the same way. Then write a todo for each step.
4. Change: edit with str_replace; use write_file for new files.
5. Review: spawn code-reviewer, mend what it finds, and have it review again.
6. Check: run the tests with basher, add tests for what is new, and try the program itself.
7. Lessons: write LESSONS.md, and add to a skill only what helps in other tasks.

Say what you do as you go. End with a short summary and suggest_followups. A later wish needs only the phases that it concerns.
"""


def handle_steps(ctx: StepContext) -> Steps:
    """Prune before every step, until the model is done."""
    budgets = {"max_context_length": MAX_CONTEXT_LENGTH, **(ctx.params or {}), "cache_expiry_ms": CACHE_EXPIRY_MS}
    pruner = {"agent_type": "context-pruner", "params": budgets}
    while True:
        yield ToolCall("spawn_agent_inline", pruner, include_tool_call=False)
        turn = yield STEP
        if turn.steps_complete:
            break


agent = AgentDefinition(
    "base-deep",
    display_name="Deep Lead",
    description="Leads the planning, editing and reviewing of complex tasks.",
    tools=[
        "spawn_agents",
        "read_files",
        "read_subtree",
        "suggest_followups",
        "str_replace",
        "write_file",
        "write_todos",
        "ask_user",
        "skill",
        "set_output",
    ],
    spawnable_agents=[
        "file-picker",
        "code-searcher",
        "directory-lister",
        "glob-matcher",
        "researcher-web",
        "researcher-docs",
        "basher",
        "thinker",
        "code-reviewer",
        "coder",
        "context-pruner",
    ],
    include_message_history=True,
    input_schema={
        "prompt": "A coding task.",
        "params": {"type": "object", "properties": {"max_context_length": {"type": "integer"}}},
    },
    system_prompt=SYSTEM_PROMPT,
    instructions_prompt=INSTRUCTIONS,
    settings=ModelSettings(thinking=Thinking("high")),
    hooks=Hooks(pre_run=[project_context()]),
    handle_steps=handle_steps,
)
