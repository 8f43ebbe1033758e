"""
A separate program, with the standard library alone: performs the system calls of tools at the other end of a pipe.

It is sent over the pipe, after ``whole_files`` as one text, and needs only Python 3.8. It does not know tools. Its requests are calls on
open folders and files, the same as in ``stepengine.workspace.calls``, and starting programs, each with a supervisor. When its standard
input ends, all processes that it started are killed and its private folders are removed.

A frame has two lengths of four bytes, of its head and its data; the head is JSON. A request has ``id`` and ``do``. Its answer has the same
``id``, then ``error`` if it failed and ``more`` if another frame follows. The output of a program is sent in frames with ``on``, the
number of the program, within the window that was granted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepengine.workspace.whole_files import remove_stale_temporaries, replace_file_atomically, write_all  # noqa: TC004 - its text is ahead of this one, see above

READY = b"stepengine worker 1\n"
LENGTHS = struct.Struct(">II")
HEAD_BYTES = 8 * 1024 * 1024
"""A head may hold an environment and a command of 128 KiB with escapes."""
DATA_BYTES = 16 * 1024 * 1024
"""Above the largest file that is written in one call, 4 MiB."""
CHUNK_BYTES = 65_536
"""The size of a pipe on Linux, which no read exceeds."""
LISTED_BYTES = 256 * 1024
"""A listing is sent in parts of this size, so that other calls get their turn."""
LISTED_ENTRIES = 200_000
"""As many as are looked at for secrets; a folder with more cannot be listed."""
WINDOW_BYTES = 1024 * 1024
"""How far a program may print ahead of its reader: no pauses on a slow network, with little memory."""
LOG_BYTES = 16 * 1024 * 1024
"""The most stored output of a job; a server that logs for days must not fill the disk."""
DRAIN_READS = 32
"""The last output of a program is in the pipes; more comes from a child that still has them open."""
DEATH_SECONDS = 5.0
"""More than the supervisor needs to kill everything."""

KINDS = {
    "walk": getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
    "folder": os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
    "file": os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC,
}
UMASK = "UMASK=%d" % 0o022
"""The umask of commands. Each sets its own: other threads of this process write files, and Python 3.8 has no ``Popen(umask=)``."""
SLOW = {
    "list",
    "pread",
    "replace",
    "remove_private_folder",
    "remove_stale_temporaries",
    "spawn",
    "end_marked",
    "find_program_outside",
}
"""Requests that may be slow: each runs in its own thread, while the others run in order of arrival."""


def read_exactly(fd: int, size: int) -> bytes:
    """Read *size* bytes; raise ``EOFError`` if there are fewer."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1024 * 1024))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def stat_numbers(info: os.stat_result) -> list[int]:
    """Return the members of a stat result as a list of numbers."""
    return [
        info.st_mode,
        info.st_ino,
        info.st_dev,
        info.st_nlink,
        info.st_uid,
        info.st_gid,
        info.st_size,
        info.st_mtime_ns,
    ]


def get_mount_id(fd: int) -> str:
    """Return the mount id of an open file or folder; ``""`` if the system does not report it."""
    try:
        with open("/proc/self/fdinfo/%d" % fd, encoding="ascii") as lines:
            return next((line.strip() for line in lines if line.startswith("mnt_id:")), "")
    except OSError:
        return ""


def is_within_root(path: str, root: list[str]) -> bool:
    """Return whether a path, as written or resolved, is the root or below it; nothing counts as below the root ``/``."""
    forms = (os.path.normpath(path), os.path.realpath(path))
    return bool(root) and any([part for part in form.split("/") if part][: len(root)] == root for form in forms)


class Worker:
    """The state of the worker program: its open files and its running child processes."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink
        self.lock = threading.Lock()
        self.open: dict[int, int] = {}
        self.children: dict[int, ChildProcess] = {}
        self.private: list[str] = []

    def send(self, head: dict[str, Any], data: bytes = b"") -> None:
        """Send one frame."""
        text = json.dumps(head).encode()
        with self.lock:
            write_all(self.sink, LENGTHS.pack(len(text), len(data)) + text + data)

    def serve(self) -> None:
        """Answer requests until the input ends, then raise ``EOFError``; return at a request that is too large."""
        write_all(self.sink, READY)
        while True:
            head_size, data_size = LENGTHS.unpack(read_exactly(self.source, LENGTHS.size))
            if head_size > HEAD_BYTES or data_size > DATA_BYTES:
                return
            head = json.loads(read_exactly(self.source, head_size).decode())
            data = read_exactly(self.source, data_size)
            if head["do"] in SLOW:
                with contextlib.suppress(RuntimeError):  # no thread can be started: the others wait
                    threading.Thread(target=self.handle_request, args=(head, data), daemon=True).start()
                    continue
            self.handle_request(head, data)

    def handle_request(self, head: dict[str, Any], data: bytes) -> None:
        """Execute a request, and send its reply."""
        number = head.pop("id", None)
        try:
            for old in head.pop("close", ()):
                self.close(old)
            do = head.pop("do")
            more = {"list": {"number": number}, "replace": {"data": data}, "spawn": {"number": number, "data": data}}
            made = getattr(self, "do_" + do)(**head, **more.get(do, {}))
            reply, content = made if isinstance(made, tuple) else (made, b"")
            reply = {"id": number, **(reply or {})}
        except OSError as error:
            reply, content = {"id": number, "error": errno.errorcode.get(error.errno or 0, "EIO")}, b""
        except (ValueError, OverflowError):  # a name or mode that no system has
            reply, content = {"id": number, "error": "EINVAL"}, b""
        except Exception as error:  # noqa: BLE001 - any error is sent as an answer
            reply, content = {"id": number, "error": "", "why": "%s: %s" % (type(error).__name__, error)}, b""
        if number is not None:
            with contextlib.suppress(OSError):  # the other end has closed; the main thread notices it, too
                self.send(reply, content)

    def close(self, handle: int) -> None:
        """Close the file with a handle."""
        fd = self.open.pop(handle, None)
        if fd is not None:
            os.close(fd)

    def get_descriptor(self, handle: int) -> int:
        """Return the descriptor for a handle; raise ``OSError`` for an unknown handle."""
        try:
            return self.open[handle]
        except KeyError:
            raise OSError(errno.EBADF, "closed") from None

    # --- the system as a whole --------------------------------------------------------------------------------------

    def do_begin(self, limits: Any) -> Any:
        """Set the resource limits of this process and its children, and return facts about this system."""
        import resource

        for name, value in limits.items():
            which = getattr(resource, name)
            hard = resource.getrlimit(which)[1]
            wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (wanted, wanted))
        can = os.open in os.supports_dir_fd and os.mkdir in os.supports_dir_fd
        return {
            "python": list(sys.version_info[:3]),
            "platform": sys.platform,
            "can_walk": can,
            "executable": sys.executable,
        }

    def do_open_root(self, handle: int, path: str) -> Any:
        """Open a root folder after resolving symbolic links in its path."""
        home = os.path.expanduser("~")
        path = home + path[1:] if path == "~" or path.startswith("~/") else path
        fd = os.open(path, KINDS["walk"] & ~os.O_NOFOLLOW)
        self.open[handle] = fd
        info = os.fstat(fd)
        above, wide_folders = home, ["/"]
        while above not in ("/", ""):  # "" above a home folder that is not absolute: it is not known
            wide_folders.append(above)
            above = os.path.dirname(above)
        wide = False
        for folder in wide_folders:
            with contextlib.suppress(OSError):
                wide = wide or os.path.samestat(info, os.stat(folder))
        return {"info": stat_numbers(info), "real": os.path.realpath(path), "wide": wide, "mount": get_mount_id(fd)}

    def do_get_environment(self, names: list[str]) -> Any:
        """Return the values of the variables in *names*, the user's name and the home folder."""
        import pwd

        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
        given = {name: os.environ[name] for name in names if name in os.environ}
        return {"variables": given, "user": user, "home": os.path.expanduser("~")}

    def do_find_program_outside(self, name: str, folders: list[str], root: list[str]) -> Any:
        """Search *folders* for a program outside of the root, and return its path, or ``None``."""
        import shutil

        for folder in folders:
            found = shutil.which(name, path=folder)
            if found is not None and not is_within_root(found, root):
                return {"found": found}
        return {"found": None}

    def do_filter_outside_paths(self, paths: list[str], root: list[str]) -> Any:
        """Return the paths in *paths* that are outside of the root, both as written and with links resolved."""
        return {"outside": [path for path in paths if not is_within_root(path, root)]}

    def do_make_private_folder(self) -> Any:
        """Create a private folder for one command, and return its path."""
        import tempfile

        folder = tempfile.mkdtemp(prefix="stepengine-")
        self.private.append(folder)
        return {"folder": folder}

    def do_mkdirs(self, paths: list[str]) -> None:
        """Create folders that only this user can enter."""
        for path in paths:
            os.mkdir(path, 0o700)

    def do_remove_private_folder(self, path: str) -> None:
        """Remove a private folder, if this program created it."""
        import shutil

        if path in self.private:
            self.private.remove(path)
            shutil.rmtree(path, ignore_errors=True)

    # --- folders and files ------------------------------------------------------------------------------------------

    def do_open(self, handle: int, folder: int, name: str, kind: str) -> Any:
        """Open an entry of an open folder; for a file, its first bytes are returned too."""
        fd = os.open(name, KINDS[kind], dir_fd=self.get_descriptor(folder))
        self.open[handle] = fd
        info = os.fstat(fd)
        start = b""
        if kind == "file" and stat.S_ISREG(info.st_mode):
            with contextlib.suppress(OSError):
                start = os.pread(fd, CHUNK_BYTES, 0)
        return {"info": stat_numbers(info), "mount": get_mount_id(fd)}, start

    def do_fstat(self, handle: int) -> Any:
        """Return the status of an open file or folder."""
        return {
            "info": stat_numbers(os.fstat(self.get_descriptor(handle))),
            "mount": get_mount_id(self.get_descriptor(handle)),
        }

    def do_pread(self, handle: int, offset: int, size: int) -> Any:
        """Return bytes of an open file."""
        return {}, os.pread(self.get_descriptor(handle), min(size, 1024 * 1024), offset)

    def do_list(self, handle: int, number: Any) -> Any:
        """Return the entries of an open folder; long lists are sent in parts, and more than the limit raises ``OSError``."""
        part: list[str] = []
        size = count = 0
        with os.scandir(self.get_descriptor(handle)) as entries:
            for entry in entries:
                count += 1
                if count > LISTED_ENTRIES:
                    raise OSError(errno.EOVERFLOW, "too many entries")
                if entry.is_dir(follow_symlinks=False):
                    one = [entry.name, "d", entry.inode(), None]
                elif entry.is_file(follow_symlinks=False):
                    info = None
                    with contextlib.suppress(OSError):
                        info = stat_numbers(entry.stat(follow_symlinks=False))
                    one = [entry.name, "f", entry.inode(), info]
                else:
                    one = [entry.name, "o", entry.inode(), None]
                part.append(json.dumps(one))
                size += len(part[-1])
                if size > LISTED_BYTES:
                    self.send({"id": number, "more": True}, ("[%s]" % ",".join(part)).encode())
                    part, size = [], 0
        return {}, ("[%s]" % ",".join(part)).encode()

    def do_stat(self, folder: int, name: str) -> Any:
        """Return the status of an entry, without following links."""
        return {"info": stat_numbers(os.stat(name, dir_fd=self.get_descriptor(folder), follow_symlinks=False))}

    def do_readlink(self, folder: int, name: str) -> Any:
        """Return the target of a symbolic link."""
        return {"target": os.readlink(name, dir_fd=self.get_descriptor(folder))}

    def do_mkdir(self, folder: int, name: str, mode: Any) -> None:
        """Create a folder."""
        os.mkdir(name, mode, dir_fd=self.get_descriptor(folder))

    def do_rmdir(self, folder: int, name: str) -> None:
        """Remove a folder that is empty."""
        os.rmdir(name, dir_fd=self.get_descriptor(folder))

    def do_unlink(self, folder: int, name: str) -> None:
        """Remove a file, durably."""
        os.unlink(name, dir_fd=self.get_descriptor(folder))
        os.fsync(self.get_descriptor(folder))

    def do_replace(self, folder: int, name: str, mode: Any, data: bytes) -> None:
        """Replace the content of a file durably."""
        replace_file_atomically(self.get_descriptor(folder), name, data, mode)

    def do_remove_stale_temporaries(self, folder: int) -> None:
        """Remove temporary files that are older than a minute and whose process has ended."""
        remove_stale_temporaries(self.get_descriptor(folder))

    # --- programs ---------------------------------------------------------------------------------------------------

    def do_spawn(
        self,
        folder: int,
        supervisor: str,
        limits: Any,
        program: str,
        argv: list[str],
        env: dict[str, str],
        script: bool,
        log: Any,
        data: bytes,
        number: Any,
    ) -> Any:
        """Start a program with the supervisor whose source is sent along; its output is sent in frames with this request's number."""
        import socket
        import tempfile

        passed, argv = [self.get_descriptor(folder)], list(argv)
        # All that may fail comes before the start of the program. If an error follows it all the same, the closed socket ends the program.
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            out, out_end = make_pipe(ours, theirs)
            err, err_end = make_pipe(ours, theirs)
            woken, wakes = make_pipe(ours, ours)
            line, line_end = socket.socketpair()
            ours.callback(line.close)
            theirs.callback(line_end.close)
            passed.append(line_end.fileno())
            kept = -1
            if log:
                kept = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                ours.callback(os.close, kept)
            if script:
                file = theirs.enter_context(tempfile.TemporaryFile())
                file.write(data)
                file.seek(0)
                passed.append(file.fileno())
                argv = [word.replace("{script}", "/dev/fd/%d" % file.fileno()) for word in argv]
            words = [
                sys.executable, "-I", "-S", "-X", "utf8", "-c", supervisor, str(os.getpid()), str(line_end.fileno()),
                str(self.get_descriptor(folder)), ",".join(filter(None, [limits, UMASK])), program,
            ]  # fmt: skip
            popen = subprocess.Popen(  # noqa: S603  (the supervisor; it executes an argument list)
                words + argv,
                stdin=subprocess.DEVNULL, stdout=out_end, stderr=err_end, env=env, pass_fds=passed, start_new_session=True,
            )  # fmt: skip
            child = self.children[number] = ChildProcess(
                self, number, popen, (out, err, line.fileno(), woken, wakes, kept)
            )
            try:
                threading.Thread(target=child.forward_until_end, daemon=True).start()
            except RuntimeError:
                del self.children[number]
                raise OSError(errno.EAGAIN, "no thread can be started") from None
            line.detach()
            ours.pop_all()
        return {}

    def do_signal(self, child: int, pid: int, signal: int) -> None:
        """Send a signal to the process group of a program, unless its id was freed."""
        found = self.children.get(child)
        if found is not None and pid > 1 and found.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal)

    def do_request_end(self, child: int) -> None:
        """Ask the supervisor of a program to end all processes of the program."""
        found = self.children.get(child)
        if found is not None:
            found.request_end()

    def do_kill_supervisor(self, child: int) -> None:
        """Kill the supervisor of a program."""
        found = self.children.get(child)
        if found is not None:
            found.popen.kill()

    def do_allow_output(self, child: int, size: int) -> None:
        """Permit a program to send *size* more bytes of output."""
        found = self.children.get(child)
        if found is not None:
            found.allow_output(size)

    def do_end_marked(self, mark: Any) -> None:
        """Kill every process whose environment contains a text; repeat at most 40 times, until none is left."""
        for _ in range(40):
            left = list(find_processes_by_environment(mark.encode()))
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                return
            time.sleep(0.01)

    def end_children(self) -> None:
        """End all child processes, and remove their private folders."""
        import shutil

        children = list(self.children.values())
        for child in children:
            child.request_end()
        for child in children:
            try:
                child.popen.wait(DEATH_SECONDS)
            except subprocess.TimeoutExpired:
                child.popen.kill()
        for folder in list(self.private):
            shutil.rmtree(folder, ignore_errors=True)


def make_pipe(read_stack: contextlib.ExitStack, write_stack: contextlib.ExitStack) -> tuple[int, int]:
    """Create a pipe whose ends are closed with the two stacks."""
    read, write = os.pipe()
    read_stack.callback(os.close, read)
    write_stack.callback(os.close, write)
    return read, write


def find_processes_by_environment(mark: bytes) -> Iterator[int]:
    """Yield the ids of this user's running processes whose environment contains the bytes *mark*."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat("/proc/" + name).st_uid == os.getuid():
                with open("/proc/%s/environ" % name, "rb") as file:
                    if mark in file.read():
                        yield int(name)


class ChildProcess:
    """A started program, whose output is sent by a thread."""

    def __init__(self, worker: Worker, number: Any, popen: subprocess.Popen[bytes], fds: Any) -> None:
        self.worker = worker
        self.number = number
        self.popen = popen
        self.out, self.err, self.line, self.woken, self.wakes, self.log = fds
        self.left = WINDOW_BYTES
        self.lock = threading.Lock()
        self.over = False
        self.logged = 0
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def wake_thread(self) -> None:
        """Wake the thread that forwards the output, so that it checks for new work."""
        with self.lock:
            if not self.over:
                os.write(self.wakes, b"x")

    def allow_output(self, size: int) -> None:
        """Permit *size* more bytes of output to be sent."""
        with self.lock:
            self.left += size
        self.wake_thread()

    def request_end(self) -> None:
        """Ask the supervisor to end all processes."""
        with self.lock:
            if not self.over and self.line >= 0:
                with contextlib.suppress(OSError):
                    os.write(self.line, b"end\n")

    def forward_until_end(self) -> None:
        """Forward the output of the program until the supervisor has ended and no output is left."""
        names = {self.out: "out", self.err: "err"}
        try:
            while self.wait_and_forward_output(names):
                pass
            self.worker.send({"on": self.number, "closed": "line"})
            code = self.popen.wait()
            self.send_output(names, list(names), DRAIN_READS)
            for name in names.values():
                self.worker.send({"on": self.number, "closed": name})
            self.worker.children.pop(self.number, None)
            self.worker.send({"on": self.number, "gone": code})
        except OSError:
            self.popen.kill()  # the other end has closed
        finally:
            with self.lock:
                self.over = True
                for fd in (self.out, self.err, self.line, self.woken, self.wakes, self.log):
                    if fd >= 0:
                        os.close(fd)

    def wait_and_forward_output(self, stream_names: dict[int, str]) -> bool:
        """Wait for output or supervisor messages and forward them; return False after the supervisor has ended."""
        ready = wait_readable([self.woken, self.line, *(stream_names if self.left > 0 else ())])
        if self.woken in ready:
            os.read(self.woken, 4096)
        if self.line not in ready:
            self.send_output(stream_names, [fd for fd in ready if fd in stream_names], 1)
            return True
        said = self.read_supervisor_messages()
        # The output before the end is sent before the end.
        self.send_output(stream_names, list(stream_names), DRAIN_READS)
        if said:
            self.worker.send({"on": self.number, "from": "line"}, said)
        return bool(said)

    def send_output(self, names: dict[int, str], fds: list[int], max_reads: int) -> None:
        """Send the available output of some streams; an ended stream is removed from *names*."""
        for fd in fds:
            if not self.forward_stream(fd, names[fd], max_reads):
                self.worker.send({"on": self.number, "closed": names.pop(fd)})

    def read_supervisor_messages(self) -> bytes:
        """Read the supervisor's messages; ``b""`` after it has ended in any way."""
        try:
            return os.read(self.line, CHUNK_BYTES)
        except OSError:
            return b""

    def forward_stream(self, fd: int, name: str, max_reads: int) -> bool:
        """Send the available output of a stream; return whether more may follow."""
        for _ in range(max_reads):
            try:
                data = os.read(fd, CHUNK_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            if self.log >= 0 and self.logged < LOG_BYTES:
                kept = data[: LOG_BYTES - self.logged]
                with contextlib.suppress(OSError):
                    self.logged += os.write(self.log, kept)
            with self.lock:
                self.left -= len(data)
            self.worker.send({"on": self.number, "from": name}, data)
            if self.left <= 0:
                return True
        return True


def wait_readable(fds: Any) -> list[int]:
    """Wait, and return the descriptors that are ready to be read."""
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return [fd for fd, _ in waiting.poll()]


def main() -> None:
    """Answer the requests on standard input until it ends, then end all child processes."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    worker = Worker(source, sink)
    try:
        worker.serve()
    except (EOFError, OSError, ValueError, KeyError):
        pass
    finally:
        worker.end_children()
        os._exit(0)


if __name__ == "__main__":
    main()
