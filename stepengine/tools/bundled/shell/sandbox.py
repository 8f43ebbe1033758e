"""
Commands in a sandbox of the operating system, made by bubblewrap.

A command can access the system's programs, the root, and private folders; see ``stepengine.workspace.bubblewrap``. Landlock is not
used: it restricts files, but before Linux 6.7 no network, and no version isolates the command from signals and sockets of the
user's other processes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from stepengine.errors import DefinitionError
from stepengine.tools.bundled.shell.commands import Launch, Runner
from stepengine.workspace.bubblewrap import PROGRAM, sandbox_options
from stepengine.workspace.environment import DEFAULT_PATH, find_program
from stepengine.workspace.path_rules import PROTECTED

RUN_LATER = (
    ".git/hooks", ".git/commondir", ".git/config", ".git/modules", ".claude",
    *[place.rstrip("/") for place in PROTECTED if "*" not in place and place != ".git/"],
)  # fmt: skip
"""
What other programs run outside of the sandbox: where it stands in the root, it is read-only.

Of what file tools do not write that is all that has a plain name; of ``.git`` only a part, since commits are made there.
"""
PROBE_SECONDS = 20
"""Starting a program in the sandbox takes milliseconds, on a busy machine seconds."""


def make_bubblewrap_runner(root: Sequence[str]) -> Runner:
    """
    Return the runner that executes commands in a bubblewrap sandbox; raise ``DefinitionError`` if bubblewrap does not work.

    Args:
        root: The components of the root's real path.

    Raises:
        DefinitionError: when this system has no bubblewrap, or does not let it make a sandbox; for the root ``/``.
    """
    program = find_program(PROGRAM, os.environ.get("PATH", DEFAULT_PATH), root)
    if not root:
        msg = "shell_tools(sandbox=True) needs a root other than /, since commands may write everywhere below the root"
        raise DefinitionError(msg)
    if program is None:
        msg = (
            "shell_tools(sandbox=True) needs bubblewrap, but there is no program bwrap on the search path outside of the root; install it "
            "(Debian and Fedora: package bubblewrap), or run the whole process in a container and leave out sandbox="
        )
        raise DefinitionError(msg)
    _probe_sandbox(program, "/" + "/".join(root))
    return _wrap_in_bubblewrap


def _wrap_in_bubblewrap(launch: Launch) -> Launch:
    """Return a launch of ``bwrap`` that executes *launch* in the sandbox."""
    private = str(Path(launch.env["TMPDIR"]).parent)
    folder = launch.root if launch.cwd == "." else f"{launch.root}/{launch.cwd}"
    options = _iterate_bubblewrap_options(launch.root, launch.env["PATH"])
    argv = (PROGRAM, *options, "--bind", private, private, "--chdir", folder, "--", *launch.argv)
    return attrs.evolve(launch, argv=argv)


def _iterate_bubblewrap_options(root: str, search_path: str) -> Iterator[str]:
    """Yield the options of ``bwrap``: the root is writable except files that programs run later."""
    yield from sandbox_options(search_path)
    yield from ("--bind", root, root)
    kept = [f"{root}/{name}" for name in RUN_LATER if Path(root, name).exists()]
    kept += [f"{root}/.git"] if Path(root, ".git").is_file() else []  # of a worktree: it says where the hooks are
    for folder in sorted({str(Path(path).parent) for path in kept} - {root}):
        yield from ("--bind", folder, folder)  # what is mounted cannot be moved aside for another one in its place
    for path in kept:
        yield from ("--ro-bind", path, path)


def _probe_sandbox(program: str, root: str) -> None:
    """Run a trivial command in the sandbox; raise ``DefinitionError`` if that fails."""
    try:
        done = subprocess.run(  # noqa: S603  (a fixed program)
            [program, *_iterate_bubblewrap_options(root, ""), "--", "/bin/sh", "-c", ":"],
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        said, failed = done.stderr.decode("utf-8", "replace").strip(), done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        said, failed = str(error), True
    if failed:
        msg = (
            f"shell_tools(sandbox=True): bubblewrap cannot create a sandbox here: {said[:500] or 'it gave no reason'}. "
            "Containers often forbid it. Inside a container, leave out sandbox=: the container is the sandbox"
        )
        raise DefinitionError(msg)
