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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine.system.workspace import Workspace
from stepengine.tools import bundled

from .podman import NAME, docker, podman

VARIABLE = "STEPENGINE_TEST_WORKSPACE"
CONTAINERS = ("podman", "docker")
CHOSEN = os.environ.get(VARIABLE, "")  # read before tests take such variables out of the environment


def over_a_pipe(root: Any) -> Workspace:
    return Workspace.over(["env"], root, python=sys.executable, env=list(os.environ))


def over_an_old_python(root: Any) -> Workspace:
    return Workspace.over(["env"], root, python=str(OLD), env=list(os.environ))


def in_a_sandbox(root: Any) -> Workspace:
    return Workspace.bubblewrap(root)


def old_python() -> Path | None:
    """
    Return a Python 3.8, the oldest that the other end may have.
    """
    found = [*Path("~/.pyenv/versions").expanduser().glob("3.8.*/bin/python3.8"), *Path("/usr/bin").glob("python3.8")]
    return next(iter(found), None)


OLD = old_python()  # before tests have another home folder


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
        for _ in range(200):
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


def can_ssh() -> bool:
    return os.getuid() == 0 and None not in (
        shutil.which("ssh"),
        shutil.which("sshd", path="/usr/sbin:/usr/local/sbin"),
    )


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if not can_ssh():
        pytest.skip("needs ssh, sshd and the right to start it")
    made = Sshd(tmp_path_factory.mktemp("sshd", numbered=True))
    yield made
    made.stop()


class Box:
    """
    A container of Podman or Docker in which the folders of tests stand where they stand here, and the system's programs, read-only.
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

    def _run(self, *words: str) -> None:
        done = subprocess.run([self._podman.program, *words], capture_output=True, check=False, timeout=120)
        assert 0 == done.returncode, done.stderr

    def workspace(self, root: Any) -> Workspace:
        # The variables of a test are those of there, too: many are about them.
        given = [f"--env={name}" for name in os.environ]
        argv = [self._podman.program, "exec", "-i", *given, self._name]
        return Workspace.over(argv, root, python=sys.executable, env=list(os.environ))

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


@pytest.fixture(autouse=True)
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """
    Have the bundled tools work elsewhere in the folder that they are given, where that was asked for; gives what ends that.
    """
    made: list[Workspace] = []

    def end() -> None:
        for workspace in made:
            workspace.close()

    if not CHOSEN:
        yield end
        return
    contained: Box | None = request.getfixturevalue("box") if CHOSEN in CONTAINERS else None
    server: Sshd | None = request.getfixturevalue("sshd") if CHOSEN == "ssh" else None
    ways: dict[str, Callable[[Any], Workspace]] = {
        "pipe": over_a_pipe, "old": over_an_old_python, "bubblewrap": in_a_sandbox,
        "ssh": lambda root: server.workspace(root) if server is not None else over_a_pipe(root),
        **dict.fromkeys(CONTAINERS, lambda root: contained.workspace(root) if contained is not None else over_a_pipe(root)),
    }  # fmt: skip
    for kind in (bundled.FileTools, bundled.SearchTools, bundled.ShellTools):
        below = kind.below

        def there(self: Any, root: Any, below: Any = below) -> Any:
            if isinstance(root, Workspace):
                return below(self, root)
            made.append(ways[CHOSEN](root))
            return below(self, made[-1])

        monkeypatch.setattr(kind, "below", there)
    yield end
    end()
