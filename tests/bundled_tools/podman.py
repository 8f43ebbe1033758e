"""
Podman, and Docker, as they are on this machine, with an image that is made of the machine's own files: nothing is fetched.
"""

from __future__ import annotations

import functools
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import attrs

NAME = "localhost/stepengine-tests:1"
PROGRAMS = ("sh", "cat", "ls", "sleep", "env", "mkdir", "rm", "echo", "head", "yes", "id")
PYTHON = Path("/usr/bin/python3")
"""That of the system: one of an environment is not whole."""
ULIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")
"""Podman asks for more than a root without CAP_SYS_RESOURCE may give."""


@attrs.frozen
class Podman:
    """
    How containers are run here.

    Attributes:
        program: The program: podman itself, or a script that names the runtime that works here.
        options: What `podman run` needs beside.
        why: Why it cannot be used; ``""`` when it can.
    """

    program: str = "podman"
    options: tuple[str, ...] = ()
    why: str = ""


def ran(*words: str, given: bytes | None = None, seconds: float = 60.0) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, input=given, capture_output=True, check=False, timeout=seconds)


def needed_by(binary: Path) -> list[Path]:
    """
    Return the libraries that a program of the system loads.
    """
    words = ran("ldd", str(binary)).stdout.decode().split()
    return [Path(word) for word in words if word.startswith("/")]


def packed() -> bytes:
    """
    Return a file system with a Python and a few programs of this machine as a tar archive.
    """
    stdlib = Path(
        ran(str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))").stdout.decode().strip()
    )
    found = [path for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    binaries = [*map(Path, found), PYTHON, *(stdlib / "lib-dynload").glob("*.so")]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for folder in ("tmp", "etc", "proc", "dev", "sys", "run", "root"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(info)
        accounts = b"root:x:0:0:root:/root:/bin/sh\n"
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(accounts)
        archive.addfile(info, io.BytesIO(accounts))
        files = {*binaries, *[library for binary in binaries for library in needed_by(binary)]}
        for file in sorted(files):
            archive.add(file.resolve(), str(file).lstrip("/"))
        for source in stdlib.rglob("*.py"):
            if not {"test", "tests", "idlelib", "dist-packages", "site-packages"} & set(
                source.relative_to(stdlib).parts
            ):
                archive.add(source, str(source).lstrip("/"))
    return made.getvalue()


def no_image(program: str) -> str:
    """
    Return why there is no image of a program; ``""`` when there is, by now.
    """
    if not ran(program, "image", "inspect", NAME).returncode:
        return ""
    imported = ran(program, "import", "-", NAME, given=packed(), seconds=120)
    return f"{program} makes no image: {imported.stderr.decode()[-300:]}" if imported.returncode else ""


@functools.cache
def docker() -> Podman:
    """
    Return how containers of Docker run here: its daemon is there, or they do not.
    """
    if shutil.which("docker") is None or not PYTHON.exists() or ran("docker", "info").returncode:
        return Podman(why="needs docker and its daemon, and a Python of the system")
    return Podman("docker", why=no_image("docker"))


@functools.cache
def podman(folder: Path) -> Podman:
    """
    Return how containers run here, after looking whether one does.

    Args:
        folder: Where a script is put that starts podman there.
    """
    if shutil.which("podman") is None or os.getuid() or not PYTHON.exists():
        return Podman(why="needs podman, root, and a Python of the system")
    if why := no_image("podman"):
        return Podman(why=why)
    said = b""
    for runtime in ("", "crun", "runc"):
        program = folder / f"podman-{runtime or 'itself'}"
        chosen = f"--runtime={runtime} " if runtime else ""
        # When a container runs out of memory, what watches it leaves a file `oom` where podman was started (containers/conmon#504).
        program.write_text(f'#!/bin/sh\ncd {folder} && exec {shutil.which("podman")} {chosen}"$@"\n')
        program.chmod(0o755)
        for options in ((), ULIMITS):
            limits = ("--memory=1g", "--memory-swap=1g", "--cpus=1", "--pids-limit=64", "--network=none", "--init")
            tried = ran(
                str(program), "run", "--rm", "-i", *limits, *options, NAME, "/usr/bin/python3", "-c", "print('in')"
            )
            if tried.stdout == b"in\n":
                return Podman(str(program), options)
            said = tried.stderr or said
    return Podman(why=f"podman runs no container here: {said.decode()[-300:]}")


def as_command(found: Podman, folder: Path) -> Path:
    """
    Return a folder with a command ``podman`` that runs containers as they run here, for what names no options itself.
    """
    folder.mkdir()
    command = folder / "podman"
    options = shlex.join(found.options)
    command.write_text(
        f'#!/bin/sh\nif [ "$1" = run ]; then shift; set -- run {options} "$@"; fi\nexec {found.program} "$@"\n'
    )
    command.chmod(0o755)
    return folder


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scripts:
        sys.exit(podman(Path(scripts)).why or None)
