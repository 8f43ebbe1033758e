"""
``stepengine chat``: one conversation after another turn, on the reference console (requirements P9).

Each turn is a root run of its own with a journal of its own, and goes on from the state that the one before left.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import Any

import attrs

from stepengine.cli.console import QUIT, Lines, Screen, Terminal, console_on, follow
from stepengine.cli.options import Options
from stepengine.cli.recording import Recording
from stepengine.cli.report import Exit, message_of
from stepengine.cli.running import Bench, Run, bench_for, complain, explained, limits_of, name_of, reason_of, tell_more
from stepengine.cli.screen import one_line, visible
from stepengine.cli.signals import interruptible
from stepengine.data.definition import AgentDefinition
from stepengine.data.state import AgentState, RunStatus
from stepengine.errors import StepEngineError

__all__ = ("chat_command",)

HELP = "Say what to do. /quit leaves, Ctrl-C stops a turn. What changes something is asked about first."


def chat_command(options: Options) -> Exit:
    """Talk with an agent until the person leaves."""
    return explained(lambda: _chat(options.in_force()))


def _chat(options: Options) -> Exit:
    from stepengine.engine import load_agent

    # What the tools may do is asked about, call by call, and the console itself shows the run.
    options = attrs.evolve(options, write=True, shell=True, asks=True, quiet=True)  # noqa: S604  (no process is started)
    agent = load_agent(options.agent, folders=options.settings.agent_folders)
    chat = Chat(options, agent, bench_for(options, agent, is_new=True))
    return asyncio.run(chat.talk())


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
