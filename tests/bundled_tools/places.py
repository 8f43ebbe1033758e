"""
Whether this machine has what tests need of the places where tools run.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path


def old_python() -> Path | None:
    """
    Return a Python 3.8, the oldest that the other end may have.
    """
    found = [*Path("~/.pyenv/versions").expanduser().glob("3.8.*/bin/python3.8"), *Path("/usr/bin").glob("python3.8")]
    return next(iter(found), None)


OLD = old_python()  # before tests have another home folder


@functools.cache
def has_bubblewrap() -> bool:
    program = shutil.which("bwrap")
    words = ["--unshare-all", "--ro-bind", "/", "/", "true"]
    return program is not None and not subprocess.run([program, *words], capture_output=True, check=False).returncode


def has_ssh() -> bool:
    wanted = shutil.which("ssh"), shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    return os.getuid() == 0 and None not in wanted


def why_not(way: str) -> str:
    """
    Return why no workspace can be reached in a way; ``""`` when one can. Containers are another matter.
    """
    if way == "old" and OLD is None:
        return "needs a Python 3.8"
    if way == "ssh" and not has_ssh():
        return "needs ssh, sshd and the right to start it"
    if way == "bubblewrap" and not has_bubblewrap():
        return "needs bubblewrap and the right to use it"
    return ""
