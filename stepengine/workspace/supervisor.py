"""
A separate program: starts one command, and supervises it until all its processes have ended.

It needs Python 3.8: for commands on another system it is started there, with its text for ``-c``. It is started as
``python -I -S supervisor.py PARENT LINE FOLDER LIMITS PROGRAM ARGV...`` in the environment of the command. The arguments are the
parent's process id, the descriptors of a socket to the parent and of the working folder, and limits as ``RLIMIT_NAME=value`` or
``UMASK=value`` joined by commas. The command is executed with ``execve`` in its own session: no shell parses anything.

On the socket it writes ``pid N`` when the command runs or ``errno N`` if it could not be executed, and later ``exit N`` or
``signal N``. When the parent writes anything, or has ended, all processes of the command are killed. On Linux this process is
its subreaper: a process that leaves the command's group, session and environment becomes a child of this process and not of
``init``. The parent's own process is never changed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
"""Its number in Linux's ``prctl.h``, which Python does not name."""
PR_SET_CHILD_SUBREAPER = 36
"""Its number in Linux's ``prctl.h``, which Python does not name."""
KILL_SECONDS = 4.0
"""Killed processes end within milliseconds; one that is stuck in the kernel, or a fork bomb, does not block the run."""
PAUSE_SECONDS = 0.002
"""About the time in which the kernel ends a few processes."""


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (Linux only)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def set_limits(limits: str) -> None:
    """Set resource limits and the umask; a limit above the system's maximum is set to the maximum."""
    for entry in filter(None, limits.split(",")):
        name, _, value = entry.partition("=")
        if name == "UMASK":
            os.umask(int(value))
            continue
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        wanted = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(which, (wanted, wanted))


def exec_command(folder: int, limits: str, program: str, argv: list[str]) -> None:
    """Replace this process by the command; raise ``OSError`` if that fails."""
    supervisor = os.getppid()
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.fchdir(folder)
    os.close(folder)
    set_limits(limits)
    # Python ignores some, a `nohup` or a shell that put us into the background others, and a program would inherit it.
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.execve(program, argv, os.environ)  # noqa: S606  (an argument list; that there is no shell is the point)


def start_command(report_fd: int, folder: int, limits: str, program: str, argv: list[str]) -> int:
    """Start the command, and return its process id; 0 if it could not be executed, after reporting that."""
    failed, fails = os.pipe()  # closed by `execve`
    pid = os.fork()
    if pid == 0:
        try:
            exec_command(folder, limits, program, argv)
        except OSError as error:
            os.write(fails, str(error.errno or 1).encode())
        finally:
            os._exit(127)
    os.close(fails)
    with os.fdopen(failed, "rb") as pipe:
        reason = pipe.read()
    if reason:
        os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the parent has ended
            os.write(report_fd, b"errno %b\n" % reason)
        return 0
    return pid


def supervise(report_fd: int, parent_pidfd: int, command: int, wakeup_fd: int) -> None:
    """Report that the command runs and how it ends; return when the parent requests the end or has ended."""
    os.write(report_fd, b"pid %d\n" % command)
    waiting = select.poll()
    for fd in (report_fd, parent_pidfd, wakeup_fd):
        if fd >= 0:
            waiting.register(fd, select.POLLIN)
    is_reported = False
    while True:
        is_reported = reap_children(report_fd, command, is_reported=is_reported)
        if any(fd != wakeup_fd for fd, _ in waiting.poll()):
            return
        os.read(wakeup_fd, 4096)


def reap_children(report_fd: int, command: int, *, is_reported: bool) -> bool:
    """
    Reap ended child processes and report the end of the command; return whether that end is reported.

    The command itself is not collected, so that its id stays reserved.
    """
    for pid in list_children(command):
        if pid != command:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        elif not is_reported:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                how = b"exit" if found.si_code == os.CLD_EXITED else b"signal"
                os.write(report_fd, b"%b %d\n" % (how, found.si_status))
                is_reported = True
    return is_reported


def list_children(command: int) -> list[int]:
    """Return the ids of the children of this process, ended ones included; without ``/proc`` only the command."""
    me = os.getpid()
    with contextlib.suppress(OSError):
        return [int(pid) for pid in read_proc_file(f"/proc/self/task/{me}/children").split()]
    found = {command}
    with contextlib.suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it ended meanwhile
                if (
                    entry.name.isdigit()
                    and int(read_proc_file(f"/proc/{entry.name}/stat").rpartition(b")")[2].split()[1]) == me
                ):
                    found.add(int(entry.name))
    return list(found)


def read_proc_file(path: str) -> bytes:
    """Return the content of a file in ``/proc``, without importing the slow ``pathlib``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(fd, 65_536), b""))
    finally:
        os.close(fd)


def kill_all_children(command: int) -> bool:
    """
    Kill the command's process group and then all other children; return whether none is left.

    A fork bomb may outlast the attempts.
    """
    give_up = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(command, signal.SIGKILL)
    while time.monotonic() < give_up:
        for pid in list_children(command):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(PAUSE_SECONDS)
    return False


def main(arguments: list[str]) -> None:
    """Start the command, supervise it, and end its remaining processes."""
    number, line, folder, limits, program, *argv = arguments
    parent = -1
    with contextlib.suppress(AttributeError, OSError):  # not Linux: then only the socket shows the parent's end
        parent = os.pidfd_open(int(number))
    if os.getppid() != int(number):
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(int(line), False)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    command = start_command(int(line), int(folder), limits, program, argv)
    if not command:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    os.close(int(folder))
    # If the parent has ended while the command started, writing fails from the first message on.
    with contextlib.suppress(OSError):
        supervise(int(line), parent, command, woken)
    sys.exit(not kill_all_children(command))


if __name__ == "__main__":
    main(sys.argv[1:])
