"""
The slash commands of ``stepengine chat``: a table of functions, each of which changes or shows the conversation.

Turns and terminals are in ``chat_screen``.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from stepengine.cli import bench
from stepengine.cli.chat_conversation import replay_turn
from stepengine.cli.chat_screen import TOO_NARROW, Chat, ChatCommand, get_model_name_or_substitute
from stepengine.cli.conversations import RecordedConversation, list_conversations, refuse_running_turn
from stepengine.cli.exits import Exit
from stepengine.cli.screen.confirm import YES
from stepengine.cli.screen.console import DIGITS, WHICH
from stepengine.cli.screen.progress import style_diff_lines
from stepengine.cli.screen.render import format_cost, format_tokens, one_line, truncate_text, visible
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import find_recorded_agent_file, find_recorded_run_by_prefix, read_chat_policy
from stepengine.cli.toolset import convert_to_code_mode
from stepengine.data.call_text import parse_todos
from stepengine.data.usage import Spending
from stepengine.errors import UnknownModel
from stepengine.journal.recorded_runs import GOES_ON, RecordedRun

if TYPE_CHECKING:
    from stepengine.data.hooks import StepContext
    from stepengine.data.yields import Steps

KEYS = """\
Enter sends; Alt-Enter or Ctrl-J starts a new line. Esc or Ctrl-C stops a turn; Ctrl-C twice or Ctrl-D leaves.
@path attaches a file; @@ is an at sign. !command runs in your shell and sends its output to the agent; !!command does not send it.
//text sends /text to the agent. The agent reads text typed during a turn before its next model call. Commands that change
something wait for the end of the turn; commands that only show something run at once, also at a question.
Ctrl-O shows the last result or thoughts in full, Shift-Tab selects the next mode, Ctrl-R searches earlier input."""
SHOWN_CONVERSATIONS = 20
MOST_LISTED = 99
SHOWN_NOTES = 50
UNDONE = "(The files that the last turn wrote were brought back to what they were before it.)"


async def _show_help(chat: Chat, _: str) -> None:
    """Print the keys and the commands of the chat."""
    width = max(map(len, chat.commands)) + 1
    chat.print_text(KEYS)
    chat.print_text("\n".join([f"  /{name:{width}} {command.about}" for name, command in chat.commands.items()]))


async def _show_or_set_model(chat: Chat, model: str) -> None:
    """Print the current model and the usable providers; with a name, use that model from the next turn on."""
    talk = chat.conversation
    if not model:
        from stepengine.cli.commands.models import describe_model
        from stepengine.models import find_known_models, list_providers

        now = get_model_name_or_substitute(talk)
        registry = talk.options.settings.make_models()
        chat.print_text(f"current model: {one_line(now)}")
        with contextlib.suppress(UnknownModel):  # that of a server at --base-url
            for model_known in find_known_models(registry, now):
                chat.print_text(describe_model(model_known))
        for entry in list_providers(registry):
            if entry.key != "missing":
                chat.print_text(f"  {entry.prefix}/...  key {one_line(entry.key, 60)}")
        return
    options = attrs.evolve(talk.options, model=[m for m in talk.options.model or () if "=" in m] + [model])
    bench.make_model_registry(options).check(model)
    await talk.switch_to_new_engine(options, talk.agent)
    chat.print_text(
        f"model from the next turn on: {one_line(model)}; lasting approvals no longer hold, so you are asked again"
    )


async def _show_agent_tree(chat: Chat, _: str) -> None:
    """Print the agent of the chat and those that it may spawn."""
    from stepengine.cli.commands.agents import format_agent_tree
    from stepengine.engine.agent_family import collect_agent_family

    talk = chat.conversation
    known = collect_agent_family(talk.agent, talk.options.agent, talk.options.settings.agent_folders)
    chat.print_text("\n".join(format_agent_tree(known)))


async def _show_cost(chat: Chat, _: str) -> None:
    """Print the tokens and the cost of each turn, and of the running one so far."""
    talk = chat.conversation
    spent = Spending()
    for number, result in enumerate(talk.results, start=1):
        spent += result.spending
        chat.print_text(
            f"  turn {number}   {format_tokens(result.usage) or 'no model call'}   {format_cost(result.cost, usage=result.usage)}"
        )
    if chat.is_working and chat.screen is not None:
        so_far = chat.screen.counts
        chat.print_text(
            f"  this turn so far   {format_tokens(so_far.usage) or 'no model call'}   {format_cost(so_far.cost)}"
        )
    for what, used, costs in (
        ("agent", spent.by_agent, spent.cost_by_agent),
        ("model", spent.by_model, spent.cost_by_model),
    ):
        for name, usage in used.items():
            said = format_tokens(usage) or "no tokens reported"
            chat.print_text(f"  {what} {one_line(name, 60)}   {said}   {format_cost(costs[name], usage=usage)}")
    chat.print_text(
        f"total {format_tokens(spent.usage) or 'no model call'}   {format_cost(spent.cost, usage=spent.usage)}"
    )


async def _show_agent_or_start_new_conversation(chat: Chat, name: str) -> None:
    """Print the current agent; with a name, start a new conversation with that agent."""
    from stepengine.engine import load_agent

    talk = chat.conversation
    if not name:
        chat.print_text(
            f"current agent: {talk.agent.id}; /agent ID selects another one, /agents lists the agents that it may spawn"
        )
        return
    agent = load_agent(name, folders=talk.options.settings.agent_folders)
    agent = convert_to_code_mode(agent) if talk.options.code_mode else agent
    await talk.switch_to_new_engine(attrs.evolve(talk.options, agent=name), agent)
    chat.print_text(f"{agent.id}: {one_line(agent.description, 200)}".rstrip(": "))
    await _start_new_conversation(chat, "")


async def _show_or_set_mode(chat: Chat, mode: str) -> None:
    """Print the permission mode; with a name, use that mode from the next turn on."""
    talk = chat.conversation
    if not mode:
        chat.print_text(f"current mode: {talk.policy.mode}; modes: {', '.join(talk.modes)}")
        return
    if mode not in talk.modes:
        msg = f"{one_line(mode, 40)} is not a mode of this chat; modes: {', '.join(talk.modes)}"
        raise UsageProblem(msg)
    await talk.switch_permission_mode(mode)
    chat.print_text(f"mode {mode}, from the next turn on")


async def _print_permission_rules(chat: Chat, _: str) -> None:
    """Print the permission rules of the chat, and its lasting approvals with their numbers."""
    talk = chat.conversation
    allowed = talk.list_approval_rules()
    chat.print_text(f"mode {talk.policy.mode}")
    for rule in talk.policy.rules:
        if rule not in allowed:
            chat.print_text(f"  {rule.decision:6} {one_line(str(rule.matcher), 200)}")
    for number, rule in enumerate(allowed, start=1):
        chat.print_text(f"  always {number}  {one_line(str(rule.matcher), 200)}")


async def _remove_approval_rule(chat: Chat, number_text: str) -> None:
    """Withdraw the lasting approval with a number of ``/rules``."""
    talk = chat.conversation
    allowed = talk.list_approval_rules()
    number = _parse_number_or_minus_one(number_text)
    if not 1 <= number <= len(allowed):
        there = f"pass 1 to {len(allowed)}, as /rules lists them" if allowed else "there is none yet"
        msg = f"/forget NUMBER withdraws a lasting approval; {there}"
        raise UsageProblem(msg)
    rule = allowed[number - 1]
    await talk.remove_approval_rule(rule)
    chat.print_text(f"you are asked about this again in this chat: {one_line(str(rule.matcher), 200)}")


async def _show_todos(chat: Chat, _: str) -> None:
    """Print the todos of the agent."""
    talk = chat.conversation
    todos = [] if talk.state is None else parse_todos(talk.state.context.get("todos"))
    lines = [f"  [{'x' if todo.completed else ' '}] {one_line(todo.task, 200)}" for todo in todos]
    chat.print_text("\n".join(lines) or "there are no todos")


async def _print_file_diffs(chat: Chat, _: str) -> None:
    """Print the diffs of the files that the agent wrote in this chat."""
    talk = chat.conversation
    diffs = [*talk.diffs, *(chat.screen.diffs if chat.is_working and chat.screen is not None else ())]
    for diff in diffs:
        for line, style in style_diff_lines(diff):
            chat.print_text(line, style)
    if not diffs:
        chat.print_text("no files were written in this chat")


async def _print_memory_notes(chat: Chat, _: str) -> None:
    """Print the stored notes of the project and of the user."""
    from stepengine.tools.bundled import FileMemory
    from stepengine.tools.bundled.note_tools import get_project_scope

    talk = chat.conversation
    store, scopes = FileMemory(), (get_project_scope(talk.options.cwd.resolve()), "user")
    notes = [(scope.partition(":")[0], n) for scope in scopes for n in await store.search(scope, "", SHOWN_NOTES)]
    chat.print_text("\n".join([f"  {scope}  {visible(note.line)}" for scope, note in notes]) or "there are no notes")


async def _list_or_send_skill(chat: Chat, name_and_text: str) -> Exit | None:
    """Print the skills of the folder; with a name, run a turn with the instructions of that skill."""
    from stepengine.workspace.skills import get_skill, get_skill_catalog, read_skill_instructions

    talk = chat.conversation
    name, _, words = name_and_text.partition(" ")
    folder = talk.options.cwd.resolve()
    if not name:
        found = await asyncio.to_thread(get_skill_catalog, folder, user=True)
        lines = [f"  {skill.name}  {one_line(skill.description, 200)}" for skill in found.skills.values()]
        chat.print_text("\n".join([*lines, *found.warnings]) or "this project has no skills")
        return None
    skill = await asyncio.to_thread(get_skill, folder, name, user=True)
    # Only text that the person typed may attach files: a skill is third-party text.
    sent = "\n\n".join([read_skill_instructions(skill), chat.compose_prompt_and_clear_notes(words.strip())])
    return await chat.run_turn(sent.rstrip(), title=f"/skill {name_and_text}")


async def _print_journal_name(chat: Chat, _: str) -> None:
    """Print the journal of the last recorded turn, and the command that inspects it."""
    talk = chat.conversation
    if talk.journal is None:
        chat.print_text("no turn of this chat is recorded")
        return
    name = talk.journal.address
    chat.print_text(f"{visible(name)}\ninspect it with: stepengine debug {shlex.quote(visible(name))}")


async def _start_new_conversation(chat: Chat, _: str) -> None:
    """Drop the turns and notes of the chat, so that the next prompt starts a new conversation."""
    talk = chat.conversation
    talk.drop_later_turns(0)
    talk.notes.clear()
    chat.print_text("new conversation; the previous one is recorded, and files do not change")


async def _print_context_sizes(chat: Chat, _: str) -> None:
    """Print the estimated tokens of the next request by kind."""
    talk = chat.conversation
    if not talk.states:
        chat.print_text("this conversation has no messages yet")
        return
    parts = talk.estimate_prompt_tokens_by_kind()
    chat.print_text("estimated tokens of the next request:")
    for what, count in {**parts, "together": sum(parts.values())}.items():
        chat.print_text(f"  {what:<17} {count:>9,}")


async def _confirm_and_undo_writes(chat: Chat, _: str) -> None:
    """Print the changes of an undo of the last turn, ask for confirmation, restore the files, and note it for the agent."""
    from stepengine.journal import undo

    talk = chat.conversation
    if talk.journal is None:
        chat.print_text("there is no recorded turn to undo")
        return
    root = talk.options.cwd.resolve()
    planned = str(undo(talk.journal, root, dry_run=True, partial=True))
    chat.print_text(f"undo would do this:\n{visible(planned)}")
    if ((await chat.terminal.read_line_with_prompt("restore these files? y/n > ")) or "").strip().lower() not in YES:
        chat.print_text("nothing was changed")
        return
    # A turn of this chat, which this process recorded.
    chat.print_text(visible(str(undo(talk.journal, root, partial=True, trust=True))))
    talk.notes.append(UNDONE)


async def _save_as_markdown(chat: Chat, file: str) -> None:
    """Write the conversation as Markdown to a new file."""
    talk = chat.conversation
    if not file:
        msg = "/save FILE writes the conversation as Markdown; name a file that does not exist yet"
        raise UsageProblem(msg)
    said = talk.list_visible_messages()
    parts = [f"## {'You' if m.role == 'user' else talk.agent.id}\n\n{m.text.strip()}\n" for m in said]
    _write_new_file(Path(file), "\n".join(parts))
    chat.print_text(f"wrote {one_line(file)}")


async def _fork_conversation(chat: Chat, turn: str) -> None:
    """Drop the turns after a number, by default the last one, so that the chat continues from there."""
    talk = chat.conversation
    last = len(talk.states) - 1
    number = _parse_number_or_minus_one(turn) if turn else last
    if not 0 <= number <= last:
        there = f"TURN is 0 to {last}; default: before the last one" if talk.states else "there is none yet"
        msg = f"/fork TURN continues after a turn; {there}"
        raise UsageProblem(msg)
    talk.drop_later_turns(number)
    chat.print_text(
        f"the conversation continues after turn {number}; files do not change, and later turns stay recorded"
    )


async def _resume_conversation(chat: Chat, number_or_name: str) -> Exit | None:
    """Load another recorded conversation, show it, and resume its last turn if that has not ended."""
    from stepengine.engine.loader import load_agent

    talk = chat.conversation
    entry = await _choose_turn_to_continue(chat, number_or_name)
    if entry is None:
        return None
    name = find_recorded_agent_file(entry) or entry.get_text("agent", "id")
    code_mode = entry.get_flag("options", "code_mode")
    options = attrs.evolve(talk.options, agent=name, code_mode=code_mode)
    agent = load_agent(name, folders=options.settings.agent_folders)
    # The replay uses the recorded permissions and not those of this chat.
    recorded = attrs.evolve(options, write=False, shell=False, asks=False, policy=None, chat_policy=None)
    last = await asyncio.to_thread(replay_turn, entry, recorded)
    if entry.status in GOES_ON:
        options = attrs.evolve(options, policy=None, chat_policy=read_chat_policy(entry))
    await talk.switch_to_new_engine(options, convert_to_code_mode(agent) if code_mode else agent)
    talk.notes.clear()
    talk.journal = None
    chat.print_text(f"{talk.agent.id}: continues {entry.stem}; files do not change")
    chat.load_and_show_recorded_turn(last, entry)
    return await chat.resume_turn()


async def _summarize_conversation(chat: Chat, hint: str) -> None:
    """Replace the messages of the conversation by a summary from the model."""
    from stepengine.context import compact, summarize
    from stepengine.engine.packages import register_in_same_package

    talk = chat.conversation
    before = talk.state
    if before is None:
        chat.print_text("this conversation has no messages yet")
        return

    def handle_steps(ctx: StepContext) -> Steps[None]:
        yield from compact(ctx.agent_state, summarize(directives=hint))

    # Not recorded: a replay would use the agent's own handler and diverge.
    options = attrs.evolve(talk.options, no_journal=True)
    agent = attrs.evolve(talk.agent, handle_steps=handle_steps, output_schema=None, input_schema=None)
    register_in_same_package(agent, talk.agent)
    await chat.run_turn("", agent, options)
    after = talk.states[-1]
    talk.filled = talk.estimate_prompt_tokens()
    chat.print_text(f"{len(before.message_history)} messages before, {len(after.message_history)} now")


def _find_turn_to_continue(number_or_name: str, listed: Sequence[RecordedConversation]) -> RecordedRun | None:
    """Return the turn to continue of the conversation with a listed number, or the run whose name starts with the text; else ``None``."""
    number = _parse_number_or_minus_one(number_or_name)
    if 1 <= number <= len(listed):
        return listed[number - 1].turn_to_continue
    # Two digits are a number of the list, though the random id of a run may begin with them.
    return None if 0 <= number <= MOST_LISTED else find_recorded_run_by_prefix(number_or_name)


async def _choose_turn_to_continue(chat: Chat, number_or_name: str) -> RecordedRun | None:
    """
    Return the turn to continue of a conversation, by number or name; without one, list conversations and ask; ``None`` for no choice.

    Raises:
        UsageProblem: when there is no such conversation or run, or another process runs it.
    """
    known = await asyncio.to_thread(list_conversations, str(Path.cwd()))
    found = [one for one in known if one.session_id != chat.conversation.session_id][:SHOWN_CONVERSATIONS]
    if not number_or_name and not found:
        chat.print_text("this folder has no other conversation or run; `stepengine runs --all` lists all")
        return None
    if not number_or_name:
        for number, one in enumerate(found, start=1):
            chat.print_text(truncate_text(f"{number:>4}. {one.summary_line}", max(TOO_NARROW, chat.console.width - 1)))
        number_or_name = ((await chat.terminal.read_line_with_prompt(WHICH)) or "").strip()
    if not number_or_name:
        return None
    entry = _find_turn_to_continue(number_or_name, found)
    if entry is None:
        msg = f"there is no conversation or run {one_line(number_or_name, 40)!r}; /resume lists them"
        raise UsageProblem(msg)
    refuse_running_turn(entry)
    return entry


def _parse_number_or_minus_one(typed: str) -> int:
    """Parse a number; -1 for anything else."""
    return int(typed) if typed.isascii() and typed.isdigit() and len(typed) < DIGITS else -1


def _write_new_file(path: Path, text: str) -> None:
    """Write a text to a new file; raise ``FileExistsError`` if the file exists."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


COMMANDS: Mapping[str, ChatCommand] = MappingProxyType(
    {
        "help": ChatCommand("this", _show_help, "yes"),
        "model": ChatCommand(
            "[MODEL]  show or set the model of all agents, from the next turn on", _show_or_set_model, "alone"
        ),
        "agents": ChatCommand("show which agents each agent may spawn", _show_agent_tree, "yes"),
        "agent": ChatCommand(
            "ID  talk with another agent, in a new conversation", _show_agent_or_start_new_conversation, "alone"
        ),
        "mode": ChatCommand(
            "[MODE]  show or set the mode for calls that no rule covers; Shift-Tab selects the next one",
            _show_or_set_mode,
            "alone",
        ),
        "rules": ChatCommand("show the rules: what is allowed, asked about or denied", _print_permission_rules, "yes"),
        "forget": ChatCommand("NUMBER  withdraw a lasting approval; /rules lists the numbers", _remove_approval_rule),
        "todos": ChatCommand("show the agent's list of todos", _show_todos),
        "diff": ChatCommand("show the files written in this chat", _print_file_diffs, "yes"),
        "cost": ChatCommand("show tokens and cost by turn, agent and model", _show_cost, "yes"),
        "context": ChatCommand("estimate the tokens of the next request, by kind", _print_context_sizes),
        "memory": ChatCommand("show the agents' notes about this project and about you", _print_memory_notes),
        "skill": ChatCommand(
            "[NAME [TEXT]]  list the skills of the project, or send the instructions of one", _list_or_send_skill
        ),
        "debug": ChatCommand("show where the last turn is recorded", _print_journal_name, "yes"),
        "undo": ChatCommand("restore the files that the last turn wrote", _confirm_and_undo_writes),
        "save": ChatCommand("FILE  write the conversation as Markdown", _save_as_markdown),
        "fork": ChatCommand("[TURN]  continue after a turn; default: before the last one", _fork_conversation),
        "compact": ChatCommand("[HINT]  summarise the conversation now", _summarize_conversation),
        "resume": ChatCommand(
            "[NUMBER|RUN]  list the conversations and runs of this folder, or continue one", _resume_conversation
        ),
        "clear": ChatCommand("start a new conversation", _start_new_conversation),
        "quit": ChatCommand("leave", None),
    }
)
