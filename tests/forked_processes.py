"""
Processes of Python that a test starts without the second that an interpreter takes to import the command line.

`run` and `Process` take the words and options of :func:`subprocess.run` and :class:`subprocess.Popen`. The process is a real one:
with descriptors, environment, signals and an end of its own. It is forked from an
interpreter that has imported the command line. So what a start imports, and interpreters with options of their own, are
tested with `subprocess`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

__all__ = ("Process", "run", "template_process")

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "stepengine.cli.commands", "stepengine.cli.screen", "stepengine.cli", "stepengine.context", "stepengine.debugging", "stepengine.engine",
    "stepengine.evaluation", "stepengine.journal", "stepengine.server", "stepengine.testing", "stepengine.tools.bundled",
)  # fmt: skip
"""Packages whose modules the forked interpreter has imported, without the packages in them."""
MODULES = (
    "docstring_parser", "httpx2", "rich.console", "sqlite3", "starlette.applications", "uvicorn", "uvicorn.lifespan.off",
    "uvicorn.protocols.http.h11_impl", "stepengine.adapters.ag_ui", "stepengine.adapters.vercel", "stepengine.server.studio",
    "stepengine.server.workshop", "stepengine.tools.bundled.files.write_tools", "stepengine.tools.bundled.search.tools",
)  # fmt: skip
TEMPLATES: list[socket.socket] = []
"""The connections to interpreters that run. The last one is forked."""


# --- the side of the tests ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def template_process(*modules: str) -> Iterator[None]:
    """
    Run the interpreter that is forked, with more modules imported. Without it, on systems other than Linux, `Process` starts interpreters.
    """
    if sys.platform != "linux":
        yield
        return
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with ours:
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            subprocess.run(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, check=True)
        TEMPLATES.append(ours)
        try:
            yield
        finally:
            TEMPLATES.remove(ours)
            ours.close()


def Process(command: Sequence[Any], **options: Any) -> Any:
    """
    Start a process like :class:`subprocess.Popen`.
    """
    if not TEMPLATES or has_another_package(options.get("env")):
        return subprocess.Popen(command, **options)
    return ForkedProcess(list(map(str, command)), **options)


def has_another_package(environment: Mapping[str, str] | None) -> bool:
    """
    Return whether a process with an environment would import another copy of the package than the one that is forked.
    """
    paths = (os.environ if environment is None else environment).get("PYTHONPATH", "").split(os.pathsep)
    return any(Path(path, "stepengine").exists() and Path(path).resolve() != ROOT for path in filter(None, paths))


def run(
    command: Sequence[Any], *, capture_output: bool = False, check: bool = False, timeout: float | None = None,
    input: Any = None, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """
    Return how a process ended, like :func:`subprocess.run`.
    """
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Process(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class ForkedProcess:
    """
    What :class:`subprocess.Popen` is for a process that was forked.
    """

    def __init__(
        self, command: list[str], *, stdin: Any = None, stdout: Any = None, stderr: Any = None, text: bool = False,
        cwd: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.args, self.returncode = command, None
        kept: list[IO[Any] | None] = []
        given: list[int] = []
        passed: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            mine: IO[Any] | None = None
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                own, fd = (write, read) if number == 0 else (read, write)
                mode = "w" if number == 0 else "r"
                mine = os.fdopen(own, mode, encoding="utf-8") if text else os.fdopen(own, mode + "b")
                passed.append(fd)
            elif stream == subprocess.DEVNULL:
                passed.append(fd := os.open(os.devnull, os.O_RDWR))
            elif stream == subprocess.STDOUT:
                fd = given[1]
            else:
                fd = number if stream is None else stream if isinstance(stream, int) else stream.fileno()
            kept.append(mine)
            given.append(fd)
        self.stdin, self.stdout, self.stderr = kept
        try:
            self.pid, self._channel = forked(
                command, str(cwd or Path.cwd()), dict(os.environ if env is None else env), given
            )
        finally:
            for fd in passed:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                status = self._channel.recv(4)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._channel.close()
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
        return self.returncode

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        ends = None if timeout is None else time.monotonic() + timeout
        said: dict[int, Any] = {}

        def read(number: int, stream: IO[Any]) -> None:
            with stream:
                said[number] = stream.read()

        streams = [(number, stream) for number, stream in enumerate((self.stdout, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=read, args=one, daemon=True) for one in streams if not one[1].closed]
        for reader in readers:
            reader.start()
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                if input:
                    self.stdin.write(input)
        for reader in readers:
            reader.join(None if ends is None else max(0.0, ends - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if ends is None else max(0.0, ends - time.monotonic()))
        return said.get(0), said.get(1)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(command: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> tuple[int, socket.socket]:
    """
    Return the number of a new process that runs a command, and the channel that brings its wait status.
    """
    assert command[0] == sys.executable, command
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    request = json.dumps({"words": command[1:], "cwd": cwd, "env": env, "files": files}).encode()
    # A channel of its own: a test that is interrupted here leaves no answer for the next one.
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            socket.send_fds(TEMPLATES[-1], [b"+"], [*fds, theirs.fileno()])
        ours.sendall(request)
        ours.shutdown(socket.SHUT_WR)
        pid = ours.recv(4)
        assert pid, "the interpreter that is forked has ended"
    except BaseException:
        ours.close()
        raise
    return int.from_bytes(pid, "big"), ours


# --- the interpreter that is forked ---------------------------------------------------------------------------------


def serve(connection: socket.socket) -> Any:
    """
    Fork a process for each request until the tests end. Return, in the new process, the function that runs its program.
    """
    while True:
        sign, fds, _, _ = socket.recv_fds(connection, 1, 4)
        if not sign:
            return None
        channel = fds.pop()
        with socket.socket(fileno=channel) as client, client.makefile("rb") as request:
            asked = request.read()
            if not os.fork():
                connection.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                child = os.fork()
                if not child:
                    break
                # This process waits for the new one: the interpreter that is forked has to answer others meanwhile.
                for fd in (*fds, *range(3)):
                    os.close(fd)
                client.send(child.to_bytes(4, "big"))
                status = os.waitpid(child, 0)[1]
                with contextlib.suppress(OSError):
                    client.send(status.to_bytes(4, "big"))
                os._exit(0)
        for fd in fds:
            os.close(fd)
    return program(json.loads(asked), fds)


def program(request: dict[str, Any], fds: list[int]) -> Any:
    """
    Make this process what a new interpreter would be. Return what runs its program.
    """
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if wished := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(wished)  # type: ignore[arg-type]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    with contextlib.suppress(ModuleNotFoundError):
        import sitecustomize  # noqa: F401
    kind, *words = request["words"]
    if kind == "-m":
        sys.argv = ["-m", *words[1:]]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        return lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.path.insert(0, "")
        return lambda: exec(compile(words[0], "<string>", "exec"), main.__dict__)
    sys.argv = [kind, *words]
    sys.path.insert(0, str(Path(kind).resolve().parent))
    main.__file__ = kind
    return lambda: exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def main() -> Any:
    # No child of the tests: code under test waits for all children of its process.
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    del sys.path[0]
    sys.path.insert(0, str(ROOT))
    for package in PACKAGES:
        folder = importlib.import_module(package).__path__
        for module in pkgutil.iter_modules(folder):
            if not (module.ispkg or module.name.startswith("__")):
                importlib.import_module(f"{package}.{module.name}")
    for name in (*MODULES, *sys.argv[2:]):
        importlib.import_module(name)
    sys.path.remove(str(ROOT))
    gc.collect()
    gc.freeze()
    return serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    run_program = main()
    if run_program is not None:
        run_program()
