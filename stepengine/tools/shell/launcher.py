"""
A program of its own: prepares the process that it runs in, and becomes the command (reliability SH04, SH09-SH12).

It is started as ``python -I -S launcher.py PARENT REPORT FOLDER LIMITS PROGRAM ARGV...`` in the environment of the
command: the parent's process id, the descriptors to report a failure on and to work in, limits as ``number=value``
joined by commas. It ends with its parent, works in the folder, and is replaced by the program with ``execve``: no shell
reads anything. When that fails, it writes the error number to the descriptor.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends (Linux only)."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit(limits: str) -> None:
    """Set the limits; one that is above what the system allows becomes what it allows."""
    for entry in filter(None, limits.split(",")):
        number, _, value = entry.partition("=")
        _, hard = resource.getrlimit(int(number))
        wanted = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(int(number), (wanted, wanted))


def main(arguments: list[str]) -> None:
    """Become the command, or report why not."""
    parent, report, folder, limits, program, *argv = arguments
    try:
        end_with(int(parent))
        os.fchdir(int(folder))
        os.close(int(folder))
        limit(limits)
        os.set_inheritable(int(report), False)
        # Python ignores some, a `nohup` or a shell that put us into the background others, and a program would inherit it.
        for number in signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        os.execve(program, argv, os.environ)  # noqa: S606  (an argument list; that there is no shell is the point)
    except OSError as error:
        os.write(int(report), str(error.errno or 1).encode())
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
