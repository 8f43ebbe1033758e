"""
``stepengine chat``: a conversation in turns on the reference console.

Each turn is a root run with its own journal, and continues from the state after the turn before.
"""

from __future__ import annotations

import asyncio
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
import typer

from stepengine.cli.chat_conversation import ChatConversation, replay_turn
from stepengine.cli.chat_screen import Chat
from stepengine.cli.commands.chat_commands import COMMANDS
from stepengine.cli.conversations import RecordedConversation, refuse_running_turn
from stepengine.cli.exits import Exit
from stepengine.cli.options import AskForMore, CodeMode, Model, NoJournal, Options, with_shared_options
from stepengine.cli.screen.render import one_line
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import (
    choose_script,
    find_recorded_agent_file,
    find_recorded_run_by_prefix,
    list_recorded_runs,
    read_chat_policy,
)
from stepengine.cli.toolset import convert_to_code_mode
from stepengine.data.definition import normalised_id
from stepengine.errors import DefinitionError
from stepengine.journal.recorded_runs import GOES_ON, RecordedRun


@partial(with_shared_options, without=("write", "shell", "as_json", "quiet"))
def chat(
    options: Options,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Id or file of the agent; default: coder.")] = "",
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The first message.")] = "",
    *,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the last conversation of this folder, or the RUN named in place of AGENT."
        ),
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Read and write plain lines, as without a terminal.")] = False,
    model: Model = None,
    script: ScriptFile = "",
    no_journal: NoJournal = False,
    code_mode: CodeMode = False,
    ask_for_more: AskForMore = False,
) -> Exit:
    r"""
    Chat with an agent: watch it work, decide what it may do.

    Type what to do, and continue when it is done.

    Reading, searching and read-only commands (ls, git log) need no approval. Before any other command or file
    change, the chat shows it and asks (y, n REASON, a for always, e for all edits). Text typed during a turn is
    sent to the agent. Esc or Ctrl-C stops a turn, Ctrl-C twice exits, /help lists the commands. Each turn is
    recorded as a run.

    Multi-line input, history and completion need the extra `chat`; `stepengine config doctor` shows how to install
    it.

    Examples:
      stepengine chat --model anthropic/claude-sonnet-4-5
      stepengine chat coder "Look at the failing test"
      stepengine chat ./agents/mine.py "Look at the test" --cwd ../project
      stepengine chat --resume
      stepengine chat --resume 20260301T080000Z-1a2b3c

    Without a model and a key, with replies from a file, from the first one at each turn:
      stepengine chat ./agents/mine.py --script replies.json

    Without a terminal, changes cannot be approved, so none are made:
      printf 'Which files are there?\n' | stepengine chat
    """
    from stepengine.engine.loader import AgentLocation, load_agent

    if prompt.startswith("!"):
        msg = f"PROMPT {one_line(prompt, 40)!r} is a !command, which runs only if it is typed; start the chat without it, and type it there"
        raise UsageProblem(msg)
    chosen = find_recorded_run_by_prefix(agent) if resume else None
    before = chosen or (_get_last_chat_turn(agent) if resume else None)
    agent = (
        ("" if chosen else agent)
        or (before and (find_recorded_agent_file(before) or before.get_text("agent", "id")))
        or "coder"
    )
    if before is not None:
        refuse_running_turn(before)
        script = choose_script(attrs.evolve(options, model=model, script=script), before)
        code_mode = code_mode or before.get_flag("options", "code_mode")
        ask_for_more = ask_for_more or before.get_flag("options", "ask_for_more")
    options = attrs.evolve(
        options,
        agent=agent,
        prompt=prompt,
        model=model,
        no_journal=no_journal,
        code_mode=code_mode,
        ask_for_more=ask_for_more,
        script=script,
    ).with_settings()
    history = None if before is None else replay_turn(before, options)
    if before is not None and before.status in GOES_ON:
        options = attrs.evolve(options, chat_policy=read_chat_policy(before))
    # The person approves each call, and the console shows the run.
    options = attrs.evolve(options, write=True, shell=True, asks=True, quiet=True)  # noqa: S604  (no process is started)
    try:
        definition = load_agent(agent, folders=options.settings.agent_folders)
    except DefinitionError as error:
        if prompt or AgentLocation.from_text(agent) is not None:
            raise
        msg = f"{error.message}. Name the agent before the prompt: stepengine chat coder {shlex.quote(agent)}"
        raise UsageProblem(msg) from None
    conversation = ChatConversation(options, convert_to_code_mode(definition) if code_mode else definition)
    made = Chat(conversation, COMMANDS, plain=plain)
    if history is not None and before is not None:
        made.load_and_show_recorded_turn(history, before)
    try:
        return asyncio.run(made.run_chat_loop())
    except KeyboardInterrupt:  # on a plain terminal, which has shown it on the line of the prompt
        print(flush=True)
        return Exit.INTERRUPTED


def _get_last_chat_turn(agent: str) -> RecordedRun:
    """
    Return the turn from which to continue the last conversation of this folder; a running turn is returned as it is.

    Raises:
        UsageProblem: when there is none, or it was another agent's.
    """
    turns = [e for e in list_recorded_runs(working_folder=Path.cwd()) if e.get_text("command") == "chat"]
    if not turns:
        msg = "no chat to continue in this folder; start one without --resume"
        raise UsageProblem(msg)
    session = turns[0].get_text("session_id")
    same = [turn for turn in turns if session and turn.get_text("session_id") == session] or turns[:1]
    found = RecordedConversation(same).turn_to_continue
    if (
        agent
        and normalised_id(agent) != normalised_id(found.get_text("agent", "id"))
        and agent != found.get_text("agent", "file")
    ):
        msg = f"the last chat of this folder is with {found.get_text('agent', 'id')!r}; leave {agent!r} out to continue it"
        raise UsageProblem(msg)
    return found
