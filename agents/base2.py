"""
``base2``: takes a coding request and gets it done with the help of other agents.

Its model leads and the others do the work: file pickers and searchers look around side by side, ``thinker`` thinks hard
things through, ``editor`` changes the files, ``code-reviewer`` and ``basher`` judge the change at the same time. The
handler is in charge of the end. It watches what was edited and which checks ran: a turn that ends without a check since the
last edit is sent back once, as a hook does with open todos. Whatever the model says then, the summary names what is left: an
edit without a check, a check that failed, a todo that is open. Long conversations are pruned to a summary before they get too
long.

It knows the project: the repository's ``AGENTS.md``, ``CLAUDE.md`` and ``knowledge.md``, its skills, and git's branch.

The variants come from the same factory with other helpers: ``base2-lite``, ``base2-fast``, ``base2-max``, ``base2-plan``.
To add an agent of your own, or one that needs the web:

``attrs.evolve(base2, spawnable_agents=[*base2.spawnable_agents, load_agent("researcher-web")])``

``stepengine run base2 "Give orders of 100 or more a discount" --write --shell``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from stepengine import STEP, AgentDefinition, AgentState, Hooks, StepContext, Steps, ToolCall
from stepengine.context import SystemPrompt, project_context, prune_to_summary, require_finished_todos
from stepengine.tools.bundled import skill_tools

from .basher import agent as basher
from .code_reviewer import agent as code_reviewer
from .code_searcher import agent as code_searcher
from .directory_lister import agent as directory_lister
from .editor import agent as editor
from .file_picker import agent as file_picker
from .glob_matcher import agent as glob_matcher
from .thinker import agent as thinker

Agents: TypeAlias = Sequence[AgentDefinition[Any]]

COLD_AFTER = timedelta(minutes=30)
FORGOTTEN = (
    "file-picker",
    "basher",
    "code-reviewer",
    "code-reviewer-multi-prompt",
    "researcher-web",
    "researcher-docs",
)
"""Helpers whose outputs a summary leaves out: what they found was used at once."""

LOOKING: Agents = (file_picker, code_searcher, directory_lister, glob_matcher)
LOOKING_TOOLS = ("spawn_agents", "read_files", "read_subtree", "list_directory", "glob")
EDITING_TOOLS = ("str_replace", "write_file")

IDENTITY = """\
You lead the work on a request about the code in the current project. You have helpers that work for you; you decide what
is done, in which order, and when it is finished."""

CONSTRAINTS = (
    "Do what was asked, completely, and nothing beside it.",
    "Follow the conventions that the files around a change follow.",
    "Do not claim that something works unless a check that you have seen says so.",
    "Leave version control alone, and run nothing that cannot be undone, unless you are asked to.",
)

TOOL_POLICY = (
    "Helpers that do not wait for each other belong into one spawn_agents call: they run at the same time.",
    "Read the files that matter yourself before anything is changed in them.",
)
INFORMED = "{names} see this conversation, so that their prompt need not repeat it. The others know only their prompt."
UNINFORMED = "Helpers know only their prompt, so it has to say everything."

GATHER = """\
Look around first: in one spawn_agents call, one to three file-picker agents with different questions, and code-searcher
for the names that you expect. Then read what they found."""
ASK = (
    "When the request can be understood in ways that lead to different work, ask with ask_user before anything changes."
)
TODOS = "When the work takes three steps or more, keep them in write_todos, and mark each one when it is done."
THINK = "When it is hard to say what would be right, let {thinker} think about it before you decide."
DELEGATE = "Have the change made by {editor}; say in its prompt what is to change where, and why."
EDIT = "Change the files yourself with str_replace, and with write_file for files that do not exist yet."
VALIDATE = "Then, in one spawn_agents call, let {reviewer} review and basher run the checks that the project has."
CHECK = "Then run the one check that says most about the change with basher. Repair what it shows."
REPAIR = (
    "Have what they find repaired in the same way, and check again, until the checks pass or you know why they cannot."
)
END = "End with a few sentences: what changed, what was checked, what is still open."
FOLLOW_UP = "In that same reply, offer up to three sensible next requests with suggest_followups."


EDITORS = ("editor", "editor-multi-prompt")
UNCHECKED = """\
Files were edited and nothing was checked since. Run the check that says most about the change with basher, repair what it
shows, and end then; or, when there is no check, say so."""
SHOWN_CHARS = 200


def handle_steps(ctx: StepContext) -> Steps[str | None]:
    """Step until the model ends its turn, send it back once for missing checks, and return its text with the unfinished work."""
    start = len(ctx.agent_state.message_history)
    was_sent_back = False
    while True:
        turn = yield STEP
        if not turn.steps_complete:
            continue
        work = summarize_work_since(start, turn.agent_state)
        if not work.is_unchecked or was_sent_back or not turn.agent_state.steps_remaining:
            left = work.describe_unfinished()
            return "\n\n".join([text for text in (turn.text, left) if text]) if left else None
        was_sent_back = True
        yield ToolCall("add_message", {"role": "user", "content": UNCHECKED}, include_tool_call=False)


@dataclass(frozen=True)
class Work:
    """
    What a run has come to.

    Attributes:
        is_unchecked: Whether files were edited and no command ran since.
        failed: The commands that failed since the last edit, and how.
        todos: Those that are open.
    """

    is_unchecked: bool
    failed: Mapping[str, str]
    todos: Sequence[str]

    def describe_unfinished(self) -> str:
        """Return the missing checks, failures and open todos as text; ``""`` without any."""
        lines = ["Not checked: files were edited after the last check."] if self.is_unchecked else []
        lines += [f"Failed: {command} ({how})" for command, how in self.failed.items()]
        return "\n".join([*lines, *[f"Still open: {task}" for task in self.todos]])


def summarize_work_since(start: int, state: AgentState) -> Work:
    """Return the edits, failed checks and open todos in the messages after the first *start* ones."""
    edited, checks, reply = (-1, 0), list[tuple[tuple[int, int], Mapping[str, Any]]](), 0
    for number, message in enumerate(state.message_history[start:]):
        reply += message.role == "assistant"
        if message.role != "tool":
            continue
        if message.tool_name in EDITING_TOOLS and not message.is_error:
            edited = max(edited, (reply, number))
        for agent_id, output in list_spawned_outputs(message.result.data):
            if agent_id in EDITORS and (output.get("changed_files") or output.get("unified_diff")):
                edited = (reply + 1, 0)  # the helpers of one reply work at the same time
            if agent_id == "basher" and output:
                checks.append(((reply, number), output))
    later = [output for place, output in checks if place > edited]
    todos = [todo["task"] for todo in state.context.get("todos", ()) if not todo["completed"]]
    return Work(edited[0] >= 0 and not later, find_failed_commands(later), todos)


def list_spawned_outputs(data: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the ids and outputs of the spawned agents in a tool's result; a text output becomes ``{"text": ...}``."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for entry in data if isinstance(data, Sequence) and not isinstance(data, str) else ():
        if isinstance(entry, Mapping) and "agent_type" in entry:
            output = entry.get("output")
            told = output if isinstance(output, Mapping) else {"text": output} if output else {}
            found.append((entry["agent_type"], told))
    return found


def find_failed_commands(checks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the commands whose last run failed, each with how it failed."""
    failed: dict[str, str] = {}
    for ran in checks:
        if "text" in ran:
            continue  # its output was summed up, and how the command ended is in that text
        command, code = str(ran.get("command") or ran.get("error") or ""), ran.get("exit_code")
        command = command if len(command) <= SHOWN_CHARS else f"{command[:SHOWN_CHARS]}..."
        failed.pop(command, None)
        if code != 0:
            failed[command] = f"exit code {code}" if code is not None else "it did not end by itself"
    return failed


def create_base2(
    agent_id: str = "base2",
    *,
    description: str,
    instructions: Sequence[str],
    tools: Sequence[str] = (),
    helpers: Agents = (),
) -> AgentDefinition[Any]:
    """
    Return an orchestrator.

    Args:
        agent_id: Its id.
        description: What other agents and people are told of it.
        instructions: How it works, one item each, in order.
        tools: Tools beside those for looking around and spawning.
        helpers: Agents that it may spawn beside those that look around.
    """
    informed = ", ".join([helper.id for helper in helpers if helper.include_message_history])
    policy = (*TOOL_POLICY, INFORMED.format(names=informed) if informed else UNINFORMED)
    numbered = [f"{number}. {item}" for number, item in enumerate(instructions, 1)]
    return AgentDefinition(
        agent_id,
        description=description,
        tools=[*LOOKING_TOOLS, *tools, *skill_tools()],
        spawnable_agents=[*LOOKING, *helpers],
        system_prompt=SystemPrompt(identity=IDENTITY, constraints=CONSTRAINTS, tool_policy=policy),
        instructions_prompt="\n".join(["Work in this order:", *numbered]),
        include_message_history=True,
        handle_steps=handle_steps,
        hooks=Hooks(
            pre_run=[project_context()],
            pre_step=[prune_to_summary(cold_after=COLD_AFTER, forgotten_agents=FORGOTTEN)],
            on_stop=[require_finished_todos()],
        ),
    )


agent = create_base2(
    description="Gets a coding request done: looks around, plans, edits through an editor, reviews and runs the checks.",
    instructions=[
        GATHER,
        ASK,
        TODOS,
        THINK.format(thinker="thinker"),
        DELEGATE.format(editor="editor"),
        VALIDATE.format(reviewer="code-reviewer"),
        REPAIR,
        END,
        FOLLOW_UP,
    ],
    tools=["ask_user", "write_todos", "suggest_followups", *EDITING_TOOLS],
    helpers=[thinker, editor, code_reviewer, basher],
)
