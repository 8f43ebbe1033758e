"""
``stepengine chat``: one conversation after another turn, on the reference console (requirements P9).

Each turn is a root run of its own with a journal of its own, and goes on from the state that the one before left.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from stepengine.cli.bench import Bench, bench_for, limits_of
from stepengine.cli.console import QUIT, Lines, Screen, Terminal, console_on, follow
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import name_of
from stepengine.cli.options import Model, NoJournal, Options, with_options
from stepengine.cli.perform import Run, interruptible, reason_of, tell_more
from stepengine.cli.recording import Recording
from stepengine.cli.render import message_of, one_line, visible
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.data.state import AgentState, RunStatus
from stepengine.errors import DefinitionError, StepEngineError

__all__ = ("Chat", "chat")

HELP = "Say what to do. /quit leaves, Ctrl-C stops a turn. What changes something is asked about first."


@partial(with_options, without=("write", "shell", "as_json", "quiet"))
def chat(
    options: Options,
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="Id or file of the agent; stands before what is said.")
    ] = "coder",
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The first thing to say.")] = "",
    *,
    model: Model = None,
    no_journal: NoJournal = False,
) -> Exit:
    r"""
    Talk with an agent: watch it work, decide what it may do.

    Say what to do, and the next thing when it is done.

    It reads, searches and runs commands that only look (ls, git log) by itself; whatever else runs a program or changes
    a file is shown and asked about first (y, n REASON, a for always). What you type while it works is sent to it.
    Ctrl-C stops a turn; /quit leaves. Each turn is recorded as a run.

    Examples:
      stepengine chat --model anthropic/claude-sonnet-4-5
      stepengine chat coder "Look at the failing test"
      stepengine chat ./agents/mine.py "Look at the test" --cwd ../project

    Without a terminal nobody can be asked, so that nothing is changed:
      printf 'Which files are there?\n' | stepengine chat
    """
    from stepengine.engine import load_agent

    options = attrs.evolve(options, agent=agent, prompt=prompt, model=model, no_journal=no_journal).in_force()
    # What the tools may do is asked about, call by call, and the console itself shows the run.
    options = attrs.evolve(options, write=True, shell=True, asks=True, quiet=True)  # noqa: S604  (no process is started)
    try:
        definition = load_agent(agent, folders=options.settings.agent_folders)
    except DefinitionError as error:
        if prompt or Path(agent).suffix == ".py":
            raise
        msg = f"{error.message}. The agent stands before what is said to it: stepengine chat coder {shlex.quote(agent)}"
        raise UsageProblem(msg) from None
    return asyncio.run(Chat(options, definition, bench_for(options, definition, is_new=True)).talk())


class Chat:
    """
    A conversation at a console.

    Args:
        options: What was typed.
        agent: The agent.
        bench: What its turns are performed with.
    """

    def __init__(self, options: Options, agent: AgentDefinition[Any], bench: Bench) -> None:
        settings = options.settings
        console = console_on(sys.stdout, color=settings.get("display.color"))
        self._options = options
        self._agent = agent
        self._bench = bench
        self._terminal = Terminal(console, Lines(sys.stdin))
        self._shown = {
            "verbose": options.verbose, "level": settings.get("display.log"), "thinking": settings.get("display.thinking"),
        }  # fmt: skip
        self._console = console
        self._state: AgentState | None = None
        self._session_id = f"chat-{secrets.token_hex(6)}"  # what is allowed for good holds for all turns

    async def talk(self) -> Exit:
        """Take one turn after another; return the exit code of the last one."""
        code = Exit.COMPLETED
        self._terminal.say(f"{self._agent.id}: {one_line(self._agent.description, 200)}".rstrip(": "))
        self._terminal.say(HELP)
        async with self._bench.engine:
            said: str | None = self._options.prompt or await self._terminal.line("> ")
            while said is not None and said.strip() not in QUIT:
                if said.strip():
                    code = await self._turn(said)
                    if code is Exit.SUSPENDED:
                        return code
                said = await self._terminal.line("> ")
        return code

    async def _turn(self, said: str) -> Exit:
        options, agent = self._options, self._agent
        with Recording.begun(options, None, command="chat", agent_id=agent.id, prompt=said) as recording:
            try:
                handle = self._bench.engine.start(
                    agent,
                    said,
                    previous=self._state,
                    session_id=self._session_id,
                    journal=recording.journal,
                    limits=limits_of(options, agent),
                )
            except StepEngineError as error:
                return complain(visible(message_of(error)))
            recording.started(handle.run_id)
            with interruptible(handle.interrupt) as received:
                screen = Screen(self._console, **self._shown)
                # Where nobody sits there, the engine refuses what needs a person's permission.
                result = await follow(handle, screen, self._terminal, permits=self._terminal.lines.is_terminal)
            recording.ended(result)
        if recording.journal is not None:
            options = attrs.evolve(options, journal=name_of(recording.journal), stem=recording.stem)
        if result.status is not RunStatus.FAILED:
            self._state = result.state
        run = Run(result, received[0] if received else None)
        tell_more(result, options)
        if run.code is not Exit.COMPLETED:
            complain(reason_of(run, options, self._bench))
        return run.code
