"""``Shell``: starts the commands of a model as processes, under the policy of one set of shell tools."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from typing import ParamSpec, Protocol, TypeVar

import attrs
from attrs import frozen

from stepengine.data.events import ToolProgress
from stepengine.errors import ToolError
from stepengine.tools.bundled.shell.process import (
    CommandProcess,
    CommandStart,
    Ending,
    start_command,
    wait_despite_cancellation,
)
from stepengine.tools.context import ToolContext
from stepengine.workspace import calls
from stepengine.workspace.argv import Argv, Script, parse_command
from stepengine.workspace.calls import Fd
from stepengine.workspace.command_guard import CommandGuard
from stepengine.workspace.environment import (
    NAMES_BYTES,
    READ_SECONDS,
    CommandEnvironment,
    PrivateFolders,
    parse_git_query,
)
from stepengine.workspace.guard import GUARD
from stepengine.workspace.paths import format_display_path
from stepengine.workspace.root import OpenedEntry, Root
from stepengine.workspace.terminals import TerminalResult, Terminals
from stepengine.workspace.workspace import limits_by_rlimit_name

COMMANDS_AT_ONCE = 16
"""Commands use whole cores; more at a time only slow each other down."""

P = ParamSpec("P")
T = TypeVar("T")

PROGRESS_SECONDS = 0.1
"""An event for each line would flood a reader; a person does not see ten in a second apart."""
TERMINAL_BYTES = 1024 * 1024
"""Of what a terminal shows, how much is asked for: a result holds a part of it."""
PROGRESS_CHARS = 2_000
"""A screen: what a person sees of a command that prints fast."""
SHELL = ("/bin/sh", "-c", 'command -v bash >/dev/null && exec bash "$0"; exec /bin/sh "$0"', "{script}")
"""Runs a command line by bash where there is one; only the place where it runs can tell, and that may be a container."""


@frozen(kw_only=True)
class Launch:
    """
    A command that will be started, with its folder and environment.

    Attributes:
        argv: The program and its arguments; a ``Runner`` may put another program in front.
        root: The real path of the root folder.
        cwd: The folder to work in, relative to the root; ``"."`` is the root itself.
        env: The clean environment.
    """

    argv: Argv
    root: str
    cwd: str
    env: Mapping[str, str]


class Runner(Protocol):
    """Changes the launch of a command so that it is executed in a container, a virtual machine, or on another computer."""

    def __call__(self, launch: Launch) -> Launch:
        """Return the launch of a local program that executes *launch* in the other environment."""


class Slots:
    """Limits commands to 16 at once for each engine and event loop."""

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def get_or_create_semaphore(cls, ctx: ToolContext) -> asyncio.Semaphore:
        """Return the semaphore of the call's engine and the running event loop; it is created at the first call."""
        slots = ctx.resources.get(cls)
        if slots is None:
            slots = cls()
            ctx.resources.insert(slots)
        return slots._by_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(COMMANDS_AT_ONCE))


def encode_limits(limits: Mapping[str, int]) -> str:
    """
    Return resource limits as text for the supervisor, with core dumps disabled.

    Raises:
        DefinitionError: For an unknown limit, or one that is not a positive number.
    """
    made = {"RLIMIT_CORE": 0, **limits_by_rlimit_name(limits)}
    return ",".join([f"{number}={value}" for number, value in made.items()])


class CommandProgress:
    """Emits the output of a command as ``ToolProgress`` events, at most ten per second, each with the last 2,000 characters."""

    def __init__(self, ctx: ToolContext) -> None:
        self._ctx = ctx
        self._text = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, text: str) -> None:
        """Append output; the newest 2,000 characters are emitted after a short delay."""
        self._text = (self._text + text)[-PROGRESS_CHARS:]
        if self._timer is None and self._text:
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self.flush)

    def flush(self) -> None:
        """Emit the text that was not emitted yet, without delay."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        text, self._text = self._text, ""
        if text:
            self._ctx.emit(ToolProgress(message=text))


@frozen(kw_only=True)
class Shell:
    """
    The policy of one set of shell tools; ``shell_tools`` documents it.

    Attributes:
        root: The root folder.
        runs_lines: Whether command lines that need a shell may run.
        environment: The environment variables of commands.
        timeout: The default time limit of a command in seconds.
        max_timeout: The largest time limit that a model may request, in seconds.
        allow_unlimited: Whether a model may request to run a command without a time limit.
        limits: The resource limits as text for the supervisor.
        runner: Changes launches so that commands are executed elsewhere.
        terminals: Terminals of an editor, in which foreground commands run.
    """

    root: Root
    runs_lines: bool
    environment: CommandEnvironment
    timeout: float
    max_timeout: float
    allow_unlimited: bool
    limits: str
    runner: Runner | None
    terminals: Terminals | None = None

    def parse(self, command: str | list[str]) -> Argv | Script:
        """
        Return *command* as an argument list or a shell script; raise ``ToolError`` if it is empty or no shell is allowed.

        Raises:
            ToolError: If it is empty, or a script although no shell is allowed.
        """
        read = parse_command(command)
        if isinstance(read, Script) and not self.runs_lines:
            msg = (
                f"the command needs a shell, because of {read.reason}, and there is none: a program is executed directly. "
                'Give one program with its arguments, best as a list such as ["grep", "-r", "a b", "src"]; '
                'do several things with several calls. Whoever runs this agent can allow command lines with Workspace(shell="bash")'
            )
            raise ToolError(msg)
        return read

    def restrict_command(self, command: Argv | Script, cwd: str | None) -> Argv | Script:
        """
        Return a read-only command confined by the file guard of the call; scripts and unguarded commands unchanged.

        Raises:
            ToolError: If the command would show withheld files.
        """
        guard = GUARD.get()
        if not isinstance(guard, CommandGuard) or isinstance(command, Script):
            return command
        opened = self.root.open_folder(cwd or ".")
        calls.close(opened.fd)
        return guard.confine(self.root, opened.parts, command)

    def resolve_timeout(self, requested_seconds: float) -> float | None:
        """Return the time limit in seconds: the request up to ``max_timeout``, ``timeout`` for 0 or less, ``None`` for an allowed -1."""
        if requested_seconds == -1:
            return None if self.allow_unlimited else self.max_timeout
        return min(requested_seconds, self.max_timeout) if requested_seconds > 0 else self.timeout

    async def start(
        self,
        command: Argv | Script,
        cwd: str | None,
        private: PrivateFolders,
        *,
        on_output: Callable[[bytes], None] | None = None,
        on_text: Callable[[str], None] | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
        remote_log: str = "",
    ) -> CommandProcess:
        """
        Start a command in the folder *cwd* with a clean environment, and return its process.

        On a remote system, its output is also written to the file *remote_log* there.

        Raises:
            PathOutsideRoot: If *cwd* leads out of the root.
            ToolError: If the command cannot be executed.
        """
        opened = await self._call_system(self.root.open_folder, cwd or ".")
        try:
            launch = await self._prepare_launch(command, opened, private)
            script = command.text.encode() if isinstance(command, Script) else None
            start = await self._call_system(self._apply_runner_and_find_program, launch, opened.fd)
            return await start_command(
                attrs.evolve(
                    start,
                    script=script,
                    on_output=on_output,
                    on_text=on_text,
                    on_stdout=on_stdout,
                    remote_log=remote_log,
                )
            )
        finally:
            calls.close(opened.fd)

    async def run_in_terminal(
        self, ctx: ToolContext, command: Argv | Script, cwd: str | None, private: PrivateFolders, seconds: float | None
    ) -> TerminalResult | None:
        """
        Run a command to its end in a terminal of the editor; return ``None`` without a terminal, and for a script.

        Raises:
            PathOutsideRoot: If *cwd* leads out of the root.
            ToolError: If the command cannot be executed.
        """
        if self.terminals is None or isinstance(command, Script):
            return None
        opened = self.root.open_folder(cwd or ".")
        try:
            launch = await self._prepare_launch(command, opened, private)
            return await self.terminals.run(
                [self._find_program(launch), *launch.argv[1:]],
                cwd="/" + "/".join((*self.root.real, *opened.parts)),
                env=launch.env,
                output_bytes=TERMINAL_BYTES,
                seconds=seconds,
                path=ctx.address.rpartition("#")[0],
                call_id=ctx.tool_call_id,
            )
        finally:
            calls.close(opened.fd)

    async def _prepare_launch(self, command: Argv | Script, opened: OpenedEntry, private: PrivateFolders) -> Launch:
        """
        Create the private folders of a command, and return its launch with arguments, folder and environment.

        For a read-only git command, git is executed here to read the names of its configuration.

        Raises:
            ToolError: If that configuration cannot be read, or an option of the command would start programs of the repository.
        """
        await self._call_system(private.create_subfolders)
        launch = Launch(
            argv=SHELL if isinstance(command, Script) else command,
            root="/" + "/".join(self.root.real),
            cwd=format_display_path(opened.parts),
            env=await self._call_system(self.environment.make_variables, private),
        )
        if not isinstance(command, Script) and (look := parse_git_query(command)):
            names = await self._read_git_config_names(attrs.evolve(launch, argv=look.question), opened.fd)
            argv, variables = look.make_command(names)
            launch = attrs.evolve(launch, argv=argv, env={**launch.env, **variables})
        return launch

    async def _call_system(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that accesses the system, in a thread if the system is remote."""
        if self.root.system is None:
            return function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)

    async def create_private_folders(self) -> PrivateFolders:
        """Create and return the private folders of one command, on its system."""
        return await self._call_system(PrivateFolders.create, self.root.system)

    def _apply_runner_and_find_program(self, launch: Launch, folder: Fd) -> CommandStart:
        """
        Apply the runner to a launch, look up its program on the search path, and return the command to start.

        Raises:
            ToolError: If the program is not found.
        """
        if self.runner is not None:
            launch = self.runner(launch)
        program = self._find_program(launch)
        return CommandStart(program=program, argv=launch.argv, env=launch.env, folder=folder, limits=self.limits)

    async def _read_git_config_names(self, launch: Launch, folder: Fd) -> bytes:
        """Run git to read the names of its settings, and return its output; raise ``ToolError`` if that fails."""
        said = bytearray()

        def receive_output(data: bytes) -> None:
            """Store the output up to its limit."""
            said.extend(data[: NAMES_BYTES + 1 - len(said)])

        start = await self._call_system(self._apply_runner_and_find_program, launch, folder)
        process = await start_command(attrs.evolve(start, on_stdout=receive_output))
        in_time = False
        try:
            in_time = await process.wait(READ_SECONDS)
        finally:
            await wait_despite_cancellation(asyncio.create_task(process.end()))
        if not in_time:
            problem = f"that took longer than {READ_SECONDS:g} s"
        elif len(said) > NAMES_BYTES:
            problem = f"the names of its settings have more than {NAMES_BYTES:,} bytes"
        elif process.get_ending() != Ending(0, None):
            problem = process.err.text().strip() or "git gave no reason"
        else:
            return bytes(said)
        msg = (
            f"{launch.argv[0]!r} was not executed: git's configuration is read before, to keep it from running programs that "
            f"the repository names, and could not be: {problem}"
        )
        raise ToolError(msg)

    def _find_program(self, launch: Launch) -> str:
        """
        Look up the program of a launch on its search path, and return its path; raise ``ToolError`` if it is not found.

        Raises:
            ToolError: If it is not found.
        """
        name = launch.argv[0]
        found = self.environment.find_program(name, launch.env["PATH"])
        if found is None:
            msg = (
                f"{name!r} could not be executed: no program of that name is on the search path outside of the root "
                "folder; one that stands elsewhere is given by its path, such as './tool'"
            )
            raise ToolError(msg)
        return found
