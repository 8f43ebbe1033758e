"""
``watch``: runs a command repeatedly in the background until a condition is met; the child agent that does this needs no model.

A call starts the watcher as a child of the run, which continues after the turn. The watcher calls a hidden tool that is also named
``watch``, so that rules about the tool and its command apply to each poll as they applied to the call. All polls of one window
make one record.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Generator, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.hooks import StepContext
from stepengine.data.json import JsonDict, thaw
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolResult
from stepengine.data.tools import Driving, ToolAnnotations, ToolSpec
from stepengine.data.visible import cut_middle
from stepengine.data.yields import AgentCall, Sleep, Start, ToolCall
from stepengine.errors import ToolError
from stepengine.tools.bundled.shell.commands import Shell, Slots
from stepengine.tools.bundled.shell.process import CommandProcess, Ending, ProgramUnavailable, wait_despite_cancellation
from stepengine.tools.bundled.shell.tools import FLOODED, FOREVER, RUNS, end_and_clean_up, preview_command
from stepengine.tools.context import ToolContext
from stepengine.tools.control import make_tool_with_validation
from stepengine.tools.definition import Tool
from stepengine.tools.schemas import STRING, make_object_schema, with_description
from stepengine.workspace.argv import command_text
from stepengine.workspace.root import Missing

WATCH = """\
Run a command again and again in the background until something is so, and be told then, once, with what it printed last.

Usage: the command as for `run_terminal_command`; `until` "succeeds" (exit code 0), "fails" (any other), "changes" (it prints something
else than the first time, or ends differently) or "contains" with `text` (it prints that).
Examples: {"command": ["test", "-f", "dist/app.js"], "until": "succeeds", "timeout_seconds": 600}
{"command": "git log -1 --format=%H origin/main", "until": "changes", "every_seconds": 300, "timeout_seconds": 86400}
{"command": ["curl", "-s", "localhost:8000/health"], "until": "contains", "text": "ready", "every_seconds": 5}
When not to use: for a program that is run once; and for a background job, where `check_job` waits for a text or the end.
Notes: it returns an id at once. You are also told when the time is over. What still watches ends with the run. When you end your turn,
you go on as soon as one has ended. Each run of the command takes 30 seconds at most, if nothing else is set."""
POLL = "Run a command now and then, for one window of time, until something is so."
WATCHES = "Runs a command again and again until something is so; needs no model."
CONDITIONS = ("succeeds", "fails", "changes", "contains")
EVERY, MOST_EVERY = 30, 24 * 3600
"""Half a minute between two looks by default, and a day at most: builds and deployments take minutes."""
TIMEOUT, MOST_TIMEOUT = 3600, 7 * 24 * 3600
"""An hour by default, and a week at most: what has not come by then needs a person."""
WINDOW = 600
"""The seconds of polls that make one record."""
IN_PROCESS = 60
"""The longest pause between two polls, in seconds, within one call; for longer ones the run is suspended."""
MOST_ACTIONS = 25_000
"""More than the calls and sleeps of the longest watch, with the shortest time between polls that is slept."""
KEPT_CHARS = 6_000
"""The kept characters of a poll's output, so that the report of a watcher fits into one reminder."""

COMMAND = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ],
    "description": "The program and its arguments.",
}
ASKED: Mapping[str, object] = {
    "command": COMMAND,
    "until": {"enum": list(CONDITIONS), "description": "What has to be so."},
    "text": {"type": "string", "minLength": 1, "description": 'With "contains": the text that it has to print.'},
    "cwd": with_description(
        STRING, "The folder to run it in, relative to the root folder; the root folder by default."
    ),
}


def make_watch_tool(shell: Shell) -> Tool:
    """Return the tool ``watch``, which repeatedly runs a command below the root of *shell* in the background."""
    every = {"type": "number", "minimum": 1, "maximum": MOST_EVERY, "default": EVERY}
    timeout = {"type": "number", "minimum": 1, "maximum": MOST_TIMEOUT, "default": TIMEOUT}
    schema = make_object_schema(
        ("command", "until"),
        **ASKED,
        every_seconds={**every, "description": "How long to wait between two runs."},
        timeout_seconds={**timeout, "description": "When to give up."},
    )
    spec = ToolSpec("watch", WATCH, schema, category="execute", annotations=RUNS, confined=True)
    watcher = AgentDefinition(
        "watcher",
        description=WATCHES,
        tools=[_make_poll_tool(shell)],
        handle_steps=_poll_until_met,
        limits=Limits(max_actions=MOST_ACTIONS),
    )
    runs = Driving(
        partial(_start_watcher_agent, watcher),
        reports=True,
        agents=(watcher,),
        preview=lambda given: preview_command(shell, given),
    )
    return make_tool_with_validation(spec, runs, partial(_find_watch_issues, shell))


def _find_watch_issues(shell: Shell, call_input: JsonDict) -> Iterator[str]:
    """Yield an issue if ``text`` contradicts ``until``, and if the command cannot be parsed or needs a missing shell."""
    if (call_input["until"] == "contains") != ("text" in call_input):
        yield 'text: goes with until="contains", and only with it'
    try:
        shell.parse(_get_command(call_input))
    except ToolError as error:
        yield f"command: {error.message}"


def _get_command(call_input: JsonDict) -> str | list[str]:
    """Return the command in a call's input, as plain JSON."""
    command: str | list[str] = thaw(call_input["command"])
    return command


def _start_watcher_agent(watcher: AgentDefinition, call_input: JsonDict, _: object) -> Generator[Any, Any, ToolResult]:
    """Start the watcher as a child in the background, and return a result with its id."""
    asked = {"every_seconds": EVERY, "timeout_seconds": TIMEOUT, **call_input}
    ref = yield from Start(AgentCall(watcher, params=asked))
    message = (
        "it goes on in the background; you are told once, when it is so or the time is over. It ends with this run"
    )
    return ToolResult.json({"id": ref.path, "agent_type": ref.agent_id, "message": message})


# --- the watcher --------------------------------------------------------------------------------------------------------


def _poll_until_met(ctx: StepContext) -> Generator[Any, Any, str]:
    """
    Poll until the condition is met or the time is up, and return a report: the ``handle_steps`` of the watcher.

    Raises:
        ToolError: If a poll fails, for example because no program of that name exists. This ends the watcher.
    """
    params: Mapping[str, Any] = ctx.params
    every, began = params["every_seconds"], ctx.now()
    over = began + timedelta(seconds=params["timeout_seconds"])
    asked = {name: params[name] for name in ASKED if name in params}
    before, polls = "", 0
    while True:
        left = max(0.0, (over - ctx.now()).total_seconds())
        seconds = min(left, max(WINDOW // every, 1) * every) if every <= IN_PROCESS else 0
        given = {**asked, "every_seconds": every, "seconds": seconds, **({"before": before} if before else {})}
        found: Any = (yield from ToolCall("watch", given, include_tool_call=False)).data
        before, polls = before or found["first"], polls + found["polls"]
        if found["met"] or not left:
            took = (ctx.now() - began).total_seconds()
            return _describe_watch_result(asked, found, polls=polls, took=took)
        if every > IN_PROCESS:
            yield from Sleep(min(every, left))


def _describe_watch_result(
    call_input: Mapping[str, Any], last_poll: Mapping[str, Any], *, polls: int, took: float
) -> str:
    """Return a report for the model: whether *last_poll* met the condition, after how many polls and seconds, and its output."""
    until = call_input["until"] if call_input["until"] != "contains" else f"contains {call_input['text']!r}"
    given = call_input["command"]
    shown = cut_middle(given if isinstance(given, str) else command_text(tuple(given)), 300)
    how = "so" if last_poll["met"] else "not so: the time is over"
    runs = f"{polls} run{'s' if polls != 1 else ''}"
    ended = "" if last_poll["exit_code"] is None else f" with exit code {last_poll['exit_code']}"
    note = f" ({last_poll['message']})" if last_poll.get("message") else ""
    printed = last_poll["output"] or "nothing"
    return f"watch {shown} until it {until}: {how}, after {took:.0f} s and {runs}. It ended{ended}{note} and printed:\n{printed}"


# --- one window of polls ------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class PollResult:
    """
    The output and exit code of one poll of the command.

    Attributes:
        code: The exit code; ``None`` if a signal ended the command.
        early_end_reason: Why the command was stopped or not started; ``""`` if it ended by itself.
        output: The beginning and the end of its output.
        contains_text: Whether its whole output contains the wanted text.
        digest: A hash of its output and exit code or signal.
    """

    code: int | None
    early_end_reason: str
    output: str
    contains_text: bool
    digest: str

    def meets(self, until: str, first_digest: str) -> bool:
        """Return True if this poll meets the condition *until*; a poll that ended early can only meet ``contains``."""
        if until == "contains":
            return self.contains_text
        if self.early_end_reason:
            return False
        if until == "changes":
            return self.digest != first_digest
        return (self.code == 0) is (until == "succeeds")


class OutputScan:
    """Searches the whole standard output of a poll, of which only a part is stored."""

    def __init__(self, wanted: str) -> None:
        self.digest = hashlib.sha256()
        self.contains_text = False
        self._wanted = wanted.encode("utf-8", "surrogatepass")
        self._end = b""

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the output to the digest, and search them for the wanted text."""
        self.digest.update(data)
        if self._wanted and not self.contains_text:
            looked = self._end + data
            self.contains_text = self._wanted in looked
            self._end = looked[len(looked) - len(self._wanted) + 1 :] if len(self._wanted) > 1 else b""


def _make_poll_tool(shell: Shell) -> Tool:
    """Return the hidden tool ``watch`` of the watcher, which runs the command once or repeatedly for some seconds."""

    async def poll(ctx: ToolContext, call_input: JsonDict) -> ToolResult:
        """Run the command until it meets the condition or the window is over, and return its last output."""
        every, seconds, first = call_input["every_seconds"], call_input["seconds"], call_input.get("before", "")
        passed, polls = 0.0, 0
        while True:
            began = asyncio.get_running_loop().time()
            polled = await _run_poll_or_report_missing(ctx, shell, call_input)
            polls, first = polls + 1, first or ("" if polled.early_end_reason else polled.digest)
            met = polled.meets(call_input["until"], first)
            passed += asyncio.get_running_loop().time() - began
            if met or passed >= seconds:
                break
            pause = min(every, seconds - passed)
            # Added up, and not looked up: the clock of a run may be another one than that of the machine.
            await ctx.pause(pause)
            passed += pause
            if passed >= seconds:
                break
        value: dict[str, Any] = {"met": met, "exit_code": polled.code, "output": polled.output, "polls": polls}
        value |= {"digest": polled.digest, "first": first}
        return ToolResult.json({**value, **({"message": polled.early_end_reason} if polled.early_end_reason else {})})

    number = {"type": "number", "minimum": 0}
    schema = make_object_schema(
        ("command", "until", "every_seconds", "seconds"),
        **ASKED,
        every_seconds=number,
        seconds=with_description(number, "How long the window is; 0 for one run."),
        before=with_description(STRING, "The digest of what it printed the first time."),
    )
    # Whoever may call the other tool of that name was asked for all of its polls; a rule that denies one still does.
    made: Tool = Tool(
        "watch",
        POLL,
        schema,
        poll,
        category="execute",
        annotations=ToolAnnotations(destructive=True, idempotent=True, open_world=True),
        requires_permission=False,
        timeout=FOREVER,
    )
    made.mark_confined()
    return made


async def _run_poll_or_report_missing(ctx: ToolContext, shell: Shell, call_input: JsonDict) -> PollResult:
    """
    Run the command once; for a missing folder or program, return a poll that ended early.

    The watched work may create the folder or the program later. The processes and files of the command are always removed.
    """
    try:
        return await _run_and_digest(ctx, shell, call_input)
    except (Missing, ProgramUnavailable) as error:
        reason = f"it could not be started: {error.message}"
        return PollResult(code=None, early_end_reason=reason, output="", contains_text=False, digest="")


async def _run_and_digest(ctx: ToolContext, shell: Shell, call_input: JsonDict) -> PollResult:
    """Run the command once, confined like ``run_terminal_command``, and return its output with a digest of it."""
    command, cwd, wanted = shell.parse(_get_command(call_input)), call_input.get("cwd"), call_input.get("text", "")
    runs = await asyncio.to_thread(shell.restrict_command, command, cwd)
    heard = OutputScan(wanted)
    async with Slots.get_or_create_semaphore(ctx):
        private = await shell.create_private_folders()
        process: CommandProcess | None = None
        in_time = True
        try:
            process = await shell.start(runs, cwd, private, on_stdout=heard.feed)
            in_time = await process.wait(shell.timeout)
        finally:
            await wait_despite_cancellation(asyncio.create_task(end_and_clean_up(process, private)))
    ending = process.get_ending() or Ending(None, None)
    process.raise_if_lost(cut_middle(command_text(command), 80))
    out, err = process.out.pop_text(), process.err.pop_text()
    how = heard.digest.hexdigest(), err, process.err.total, ending.code, ending.signal
    late = "" if in_time else f"it was stopped because it took longer than {shell.timeout:g} s"
    output = out if not err else f"{out}\n{err}" if out and not out.endswith("\n") else out + err
    return PollResult(
        code=ending.code,
        early_end_reason=FLOODED if process.flooded else late,
        output=cut_middle(output, KEPT_CHARS),
        contains_text=bool(wanted) and (heard.contains_text or wanted in out or wanted in err),
        digest=hashlib.sha256(repr(how).encode("utf-8", "surrogatepass")).hexdigest(),
    )
