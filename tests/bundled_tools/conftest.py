"""
Where the bundled tools work that these tests make: in folders of this machine, or elsewhere, with the same results.

``STEPENGINE_TEST_WORKSPACE`` names one of ``ELSEWHERE``; ``test_elsewhere.py`` runs the tests of the tools so.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine.errors import DefinitionError
from stepengine.tools.bundled import bundled
from stepengine.tools.bundled.shell import process
from stepengine.workspace.remote_files import RemoteSystem
from stepengine.workspace.workspace import Workspace

from .places import OLD, why_not
from .podman import NAME, docker, podman
from .processes import RUN_VARIABLE, running_with

VARIABLE = "STEPENGINE_TEST_WORKSPACE"
CONTAINERS = ("podman", "docker")
CHOSEN = os.environ.get(VARIABLE, "")  # read before tests take such variables out of the environment


def over_a_pipe(root: Any) -> Workspace:
    return Workspace.from_command(["env"], root, python=sys.executable, env=list(os.environ))


def over_an_old_python(root: Any) -> Workspace:
    return Workspace.from_command(["env"], root, python=str(OLD), env=list(os.environ))


def in_a_sandbox(root: Any) -> Workspace:
    """
    Return the workspace that a user makes; the variables of a test are those of there, too, but for what the sandbox itself sets.
    """
    made = Workspace.bubblewrap(root)
    assert made.system is not None
    place = made.system.place
    words = list(place.argv(()))
    sets = {words[at + 1] for at, word in enumerate(words) if word == "--setenv"}
    more = [word for name in os.environ if name not in sets for word in ("--setenv", name, os.environ[name])]

    def argv(options: tuple[str, ...]) -> list[str]:
        given = list(place.argv(options))
        at = given.index("--")
        return [*given[:at], *more, *given[at:]]

    return attrs.evolve(made, system=RemoteSystem(attrs.evolve(place, argv=argv)))


class Sshd:
    """
    A server of ssh on the loopback interface, with keys that were made for it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        settings = {
            "Port": self.port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none", "StrictModes": "no",
            "AuthorizedKeysFile": folder / "authorized", "PasswordAuthentication": "no", "AcceptEnv": "*", "PermitRootLogin": "yes",
            "MaxStartups": 100, "UsePAM": "no",
        }  # fmt: skip
        (folder / "config").write_text("".join([f"{name} {value}\n" for name, value in settings.items()]))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
        assert program is not None
        self.process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
        public = (folder / "host.pub").read_text()
        (folder / "known").write_text(f"[127.0.0.1]:{self.port} {public}")
        for _ in range(1_000):
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", self.port)):
                    return
            time.sleep(0.05)

    def options(self) -> list[str]:
        given = {"UserKnownHostsFile": self.folder / "known", "IdentitiesOnly": "yes", "StrictHostKeyChecking": "yes"}
        more = [word for name, value in given.items() for word in ("-o", f"{name}={value}")]
        return ["-F", "none", "-p", str(self.port), "-i", str(self.folder / "user"), *more]

    def workspace(self, root: Any, **options: Any) -> Workspace:
        seen = [
            f'"{name}={value}"' for name, value in os.environ.items() if value and not set(value + name) & set('"\\\n ')
        ]
        more = ["-o", f"SetEnv={' '.join(seen)}"] if options.pop("same_environment", True) else []
        return Workspace.ssh("127.0.0.1", root, options=[*self.options(), *more], python=sys.executable, **options)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if why := why_not("ssh"):
        pytest.skip(why)
    made = Sshd(tmp_path_factory.mktemp("sshd", numbered=True))
    yield made
    made.stop()


class Box:
    """
    A container of Podman or Docker in which the folders of tests stand where they stand here, and the system's programs, read-only.

    Attributes:
        processes: Within which its processes have their numbers, as ``/proc/PID/ns/pid`` says it.
    """

    def __init__(self, folder: Path, tests: Path) -> None:
        self._podman = docker() if CHOSEN == "docker" else podman(folder)
        assert not self._podman.why, self._podman.why
        self._name = f"stepengine-tests-{os.getpid()}"
        # Not /sbin, where Docker puts what is to be the first process.
        system = [f"/{name}" for name in ("usr", "bin", "lib", "lib64") if Path("/", name).exists()]
        # Those of an environment and of the Python that it was made of.
        own = sorted({path for path in (sys.prefix, sys.base_prefix) if not path.startswith("/usr/")})
        mounts = [f"--volume={os.path.realpath(path)}:{path}:ro" for path in (*system, *own)]
        self._run("run", "--detach", "--init", "--network=none", f"--name={self._name}", *self._podman.options, *mounts,
                  f"--volume={tests}:{tests}", NAME, "/usr/bin/sleep", "86400")  # fmt: skip

        first = self._run("inspect", "--format={{.State.Pid}}", self._name)
        self.processes = str(Path(f"/proc/{int(first)}/ns/pid").readlink())

    def _run(self, *words: str) -> str:
        done = subprocess.run([self._podman.program, *words], capture_output=True, check=False, timeout=120, text=True)
        assert 0 == done.returncode, done.stderr
        return done.stdout

    def workspace(self, root: Any) -> Workspace:
        # The variables of a test are those of there, too: many are about them.
        given = [f"--env={name}" for name in os.environ]
        argv = [self._podman.program, "exec", "-i", *given, self._name]
        return Workspace.from_command(argv, root, python=sys.executable, env=list(os.environ))

    def stop(self) -> None:
        self._run("rm", "--force", self._name)


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    made = Box(tmp_path_factory.mktemp("podman"), tmp_path_factory.getbasetemp())
    yield made
    made.stop()


@pytest.fixture(scope="session", autouse=True)
def _serving(request: pytest.FixtureRequest) -> None:
    """
    Start the server before the first test, which would be asked what it has left behind.
    """
    if CHOSEN == "ssh":
        request.getfixturevalue("sshd")
    if CHOSEN in CONTAINERS:
        request.getfixturevalue("box")


@attrs.frozen
class Running:
    """
    A process of this machine, and what it is to those that see it by another number.

    Attributes:
        parent: The number of its parent here.
        within: Within which it has the number.
        number: Its number there.
        ended: Whether it ended, and was not waited for.
    """

    parent: int
    within: str
    number: int
    ended: bool


def running() -> dict[int, Running]:
    """
    Return the processes of this machine by their numbers here.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
            within = str((folder / "ns" / "pid").readlink())
        except OSError:
            continue
        number = int(lines["NSpid"].split()[-1])
        found[int(folder.name)] = Running(int(lines["PPid"]), within, number, lines["State"][0] in "ZX")
    return found


def begun_here(found: dict[int, Running]) -> Iterator[Running]:
    """
    Yield the processes that this one started, and those that they started.
    """
    within = {os.getpid()}
    while more := {number for number, one in found.items() if one.parent in within} - within:
        within |= more
        yield from [found[number] for number in more]


class There:
    """
    Where the tools of a test work, as far as the test has to know.

    Attributes:
        home: The home folder there.
        of_the_whole_system: What is said of the root ``/``, as a regular expression.
    """

    def __init__(self, box: Box | None) -> None:
        self.made: list[Workspace] = []
        self._box = box
        sandbox = CHOSEN == "bubblewrap"
        self.home = "/tmp" if sandbox else str(Path.home())
        self.of_the_whole_system = "needs a folder other than /" if sandbox else "allow_wide_root"

    def end(self) -> None:
        """
        End what the tools of the test started.
        """
        for workspace in self.made:
            workspace.close()

    def needs_the_whole_system(self) -> None:
        """
        Leave out a test of the root ``/`` where there is no such workspace: that it is refused is all there is to see.
        """
        if CHOSEN == "bubblewrap":
            with pytest.raises(DefinitionError, match=self.of_the_whole_system):
                Workspace.bubblewrap("/")
            pytest.skip("there is no sandbox whose root is the whole system, and this one was refused")

    def running(self, numbers: Iterable[int], *, here: bool = False) -> list[int]:
        """
        Return those processes that run; one that ended and was not waited for does not.

        Args:
            numbers: Their numbers there.
            here: Whether they are numbers of this machine, of what another process of it started.
        """
        found, own = running(), str(Path("/proc/self/ns/pid").readlink())
        within = {own}
        if self._box is not None and not here:
            within = {self._box.processes}
        elif CHOSEN == "bubblewrap" and not here:
            within = {one.within for one in begun_here(found)} - {own}
        alive = {one.number for one in found.values() if one.within in within and not one.ended}
        return [number for number in numbers if number in alive]


@pytest.fixture(autouse=True)
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[There]:
    """
    Have the bundled tools work elsewhere in the folder that they are given, where that was asked for.
    """
    contained: Box | None = request.getfixturevalue("box") if CHOSEN in CONTAINERS else None
    there = There(contained)
    if not CHOSEN:
        yield there
        return
    server: Sshd | None = request.getfixturevalue("sshd") if CHOSEN == "ssh" else None
    ways: dict[str, Callable[[Any], Workspace]] = {
        "pipe": over_a_pipe, "old": over_an_old_python, "bubblewrap": in_a_sandbox,
        "ssh": lambda root: server.workspace(root) if server is not None else over_a_pipe(root),
        **dict.fromkeys(CONTAINERS, lambda root: contained.workspace(root) if contained is not None else over_a_pipe(root)),
    }  # fmt: skip
    for kind in (bundled.FileTools, bundled.SearchTools, bundled.ShellTools):
        below = kind.make_tools

        def moved(self: Any, root: Any, below: Any = below) -> Any:
            if isinstance(root, Workspace):
                return below(self, root)
            there.made.append(ways[CHOSEN](root))
            return below(self, there.made[-1])

        monkeypatch.setattr(kind, "make_tools", moved)
    yield there
    there.end()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Kill what does not stop after 0.05 seconds instead of 1.5.
    """
    monkeypatch.setattr(process, "COMMAND_TERM_SECONDS", 0.05)


@pytest.fixture
def nothing_survives(monkeypatch: pytest.MonkeyPatch, elsewhere: There) -> Iterator[str]:
    """
    Set a variable of this test, which commands can be given; fail when a process with it is left.
    """
    value = uuid.uuid4().hex
    monkeypatch.setenv(RUN_VARIABLE, value)
    yield value
    elsewhere.end()
    assert [] == running_with(value)
