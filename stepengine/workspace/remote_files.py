"""
``RemoteSystem``: a system at the other end of a connection, and ``RemoteFile``: an open file or folder there.

It implements the calls of ``stepengine.workspace.calls`` and of the shell tools, one remote call for each local one. All answers are
validated before use, such as texts and numbers. The next call reopens an ended connection. Open files are lost, except the roots,
and a root that has become another folder raises an error.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import frozen

from stepengine.errors import DefinitionError, ToolError, WorkspaceLost
from stepengine.workspace.after_fork import hold_references, register_for_fork_reset
from stepengine.workspace.threads import CANCELLED

if TYPE_CHECKING:
    from stepengine.workspace.connection import CallReply, Listener, ProgramConnection
    from stepengine.workspace.containers import Container

CALL_SECONDS = 60.0
"""Long for one call on a file, also over a slow network; after it the connection counts as dead."""
NAME_BYTES = 4_096
"""Linux opens no longer path (PATH_MAX)."""
NUMBERS = 8
"""The number of numbers in the status of a file."""
ENTRY = 4
"""The number of members in an entry of a listing."""
HALF_OF_64_BITS = 1 << 63
"""Numbers of files have 64 bits, with a sign or without."""
READ_BYTES = 1024 * 1024
"""The other end sends no larger piece at once."""
CLOSED_HANDLES = 500
"""They travel with a call that is sent anyway; a head has room for more."""
ISOLATED = ("-I", "-S", "-X", "utf8")


@frozen
class RemotePlace:
    """
    The command and options that connect to a remote system.

    Attributes:
        name: Its name in messages, records and journals, without secrets.
        argv: Returns the command that connects to a Python there; it receives the options of Python.
        env: The environment variables of this command.
        limits: Resource limits of the remote program and its children, by the names of ``resource``.
        start: The time limit of a start in seconds.
        shown: The remote folders that are mounted from this machine, with their local paths.
        once: Why it cannot be reached a second time, as the end of a sentence; ``""`` if it can.
        kept: The container that outlives a connection.
        again: Returns a ``Workspace`` of the same kind from another image or folder.
    """

    name: str
    argv: Callable[[tuple[str, ...]], Sequence[str]]
    env: Mapping[str, str]
    limits: Mapping[str, int] = {}
    start: float = 60.0
    shown: Mapping[str, str] = {}
    once: str = ""
    kept: Container | None = None
    again: Callable[[str], Any] | None = None


class RemoteFile:
    """
    An open file or folder on a remote system.

    Attributes:
        system: Its system.
        line: The number of the connection on which it was opened.
        number: Its handle there.
        position: The offset of the next read, in bytes.
        mount_id: The id of its mount; ``""`` if the system does not report it.
    """

    __slots__ = ("__weakref__", "_info", "_start", "is_root", "line", "mount_id", "number", "position", "system")

    def __init__(self, system: RemoteSystem, line: int, number: int) -> None:
        self.system = system
        self.number = number
        self.position = 0
        self.is_root = False
        self.line = line
        self._info: os.stat_result | None = None
        self.mount_id = ""
        self._start: bytes | None = None

    def __repr__(self) -> str:
        return f"<{self.system.name}: {self.number}>"

    def store_info(self, answer: CallReply) -> RemoteFile:
        """Store the status, mount and first bytes from the reply to its opening, and return this file."""
        self._info = _parse_stat(answer.head.get("info"))
        mount = answer.head.get("mount", "")
        self.mount_id = mount if isinstance(mount, str) else ""
        self._start = answer.data or None
        return self

    def _call(self, operation: str, data: bytes = b"", *, has_effect: bool = False, **members: object) -> CallReply:
        """Make a call on the connection that opened the file; a root uses any connection."""
        return self.system.call(
            operation, data, connection_number=None if self.is_root else self.line, has_effect=has_effect, **members
        )

    def open(self, name: str, kind: str) -> RemoteFile:
        """Open an entry of this folder."""
        made = self.system.allocate_handle()
        answer = self._call("open", handle=made, folder=self.number, name=name, kind=kind)
        return RemoteFile(self.system, answer.line, made).store_info(answer)

    def close(self) -> None:
        """Close the remote file or folder together with the next call."""
        self.system.schedule_close(self.number, is_root=self.is_root)

    def fstat(self) -> os.stat_result:
        """Return the status of the file when it was opened; an unknown status is requested."""
        if self._info is not None:
            return self._info
        return self.store_info(self._call("fstat", handle=self.number)).fstat()

    def read(self, size: int) -> bytes:
        """Return the next bytes of the file, and advance its position; ``b""`` at its end."""
        start, at = self._start or b"", self.position
        data = start[at : at + size]
        if not data:
            if start and self._info is not None and len(start) == self._info.st_size == at:
                return b""
            size = min(size, READ_BYTES)
            data = self._call("pread", handle=self.number, offset=at, size=size).data
            if len(data) > size:
                self.system.close_and_raise_protocol_error("more bytes than requested")
        self.position += len(data)
        return data

    def list(self) -> list[RemoteEntry]:
        """Return the entries of the folder."""
        answer = self._call("list", handle=self.number)
        return [_parse_entry(one) for one in _parse_listing(answer.data, self.system)]

    def stat(self, name: str) -> os.stat_result:
        """Return the status of an entry of this folder, without following links."""
        return _parse_stat(self._call("stat", folder=self.number, name=name).head.get("info"))

    def readlink(self, name: str) -> str:
        """Return the target of a symbolic link in this folder."""
        target = self._call("readlink", folder=self.number, name=name).head.get("target")
        if not isinstance(target, str) or len(target) > NAME_BYTES:
            self.system.close_and_raise_protocol_error("no target of a link")
        return target

    def mkdir(self, name: str, mode: int) -> None:
        """Create a folder in this folder."""
        self._call("mkdir", has_effect=True, folder=self.number, name=name, mode=mode)

    def rmdir(self, name: str) -> None:
        """Remove an empty folder in this folder."""
        self._call("rmdir", has_effect=True, folder=self.number, name=name)

    def unlink(self, name: str) -> None:
        """Remove a file in this folder, durably."""
        self._call("unlink", has_effect=True, folder=self.number, name=name)

    def replace_file(self, name: str, data: bytes, mode: int | None) -> None:
        """Replace the content of a file in this folder."""
        self._call("replace", data, has_effect=True, folder=self.number, name=name, mode=mode)

    def remove_stale_temporary_files(self) -> None:
        """Remove temporary files in this folder that are older than a minute and whose process has ended."""
        self._call("remove_stale_temporaries", folder=self.number)


@frozen
class RemoteEntry:
    """An entry of a remote folder at the time of its listing."""

    name: str
    _kind: str
    _number: int
    _info: os.stat_result | None

    def inode(self) -> int:
        """Return the inode number."""
        return self._number

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder, and no link to one; *follow_symlinks* is ignored."""
        return self._kind == "d"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a regular file, and no link to one; *follow_symlinks* is ignored."""
        return self._kind == "f"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the status from the listing; raise ``FileNotFoundError`` for an entry without one, such as a folder."""
        if self._info is None:
            raise FileNotFoundError(2, os.strerror(2))
        return self._info


class RemoteSystem:
    """
    A remote system. Its connection is opened at the first use, and again after its end.

    Args:
        place: The command and options of the connection.
    """

    def __init__(self, place: RemotePlace) -> None:
        self.place = place
        self._lock = threading.RLock()
        self._connection: ProgramConnection | None = None
        self._numbers = itertools.count(1)
        self._roots: weakref.WeakValueDictionary[int, RemoteFile] = weakref.WeakValueDictionary()
        self._paths: dict[int, tuple[str, tuple[int, int]]] = {}
        self._closing: deque[int] = deque()
        self.line = 0
        self._begun: Mapping[str, Any] = {}
        self._variables: dict[tuple[str, ...], Any] = {}
        register_for_fork_reset(self)

    @property
    def name(self) -> str:
        """The name of the system in messages."""
        return self.place.name

    def find_local_folder(self, path: str) -> str:
        """Return the local folder that is mounted at a remote path; ``""`` if there is none."""
        wanted = _split_remote_path(path)
        return next((here for there, here in self.place.shown.items() if _split_remote_path(there) == wanted), "")

    def list_mounted_folders(self, path: str, *, include_below: bool) -> list[str]:
        """Return the local folders that are mounted at a remote path or above it; with *include_below*, also those below it."""
        wanted = _split_remote_path(path)
        targets = [(_split_remote_path(there), here) for there, here in self.place.shown.items()]
        return [
            here
            for there, here in targets
            if wanted[: len(there)] == there or (include_below and there[: len(wanted)] == wanted)
        ]

    def reset_after_fork(self) -> None:
        """Drop the parent's connection in a forked child, which opens its own."""
        self._lock = threading.RLock()
        hold_references(self._connection)
        self._connection = None

    def close(self) -> None:
        """End the connection and the processes started there; the next call opens another connection."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- calls -------------------------------------------------------------------------------------------------------

    def allocate_handle(self) -> int:
        """Return an unused number for an open file or folder."""
        return next(self._numbers)

    def close_and_raise_protocol_error(self, description: str) -> NoReturn:
        """Close the connection and raise an error for an unreadable reply."""
        self.close()
        msg = f"the workspace {self.name} violates the protocol: its reply is {description}"
        raise WorkspaceLost(msg)

    def ensure_connection(self, connection_number: int | None = None) -> ProgramConnection:
        """
        Return the connection, opened if necessary; raise ``WorkspaceLost`` if that fails or *connection_number* has ended.

        Args:
            connection_number: The number of the required connection; ``None`` for any.

        Raises:
            WorkspaceLost: when no connection can be opened, or the required connection has ended.
        """
        with self._lock:
            if self._connection is None or self._connection.is_lost:
                if connection_number is not None:
                    msg = f"the workspace {self.name} was lost with its open files; repeat the request"
                    raise WorkspaceLost(msg)
                self._connection = self._connect()
            elif connection_number is not None and connection_number != self.line:
                msg = f"the workspace {self.name} was lost in the meantime, with its open files; repeat the request"
                raise WorkspaceLost(msg)
            return self._connection

    def _connect(self) -> ProgramConnection:
        """Start the remote program, send it the limits, open the roots in use again, and return the connection."""
        from stepengine.workspace.connection import PROGRAM, ProgramConnection, join_sources

        place = self.place
        if self.line and place.once:
            msg = f"the workspace {place.name} was lost: {place.once}"
            raise WorkspaceLost(msg)
        if place.kept is not None:
            place.kept.ensure_started()
        argv = place.argv((*ISOLATED, "-c", PROGRAM))
        self.line += 1
        source = join_sources("whole_files.py", "worker.py")
        made = ProgramConnection(argv, place.env, name=place.name, source=source, seconds=place.start, line=self.line)
        self._closing.clear()
        self._variables.clear()
        try:
            number = made.send_call("begin", seconds=place.start, limits=dict(place.limits))
            self._begun = made.wait_for_reply(number, seconds=place.start).head
            self._reopen_roots(made)
        except BaseException as error:
            made.close()
            if isinstance(error, OSError):
                msg = f"the workspace {self.name} was reopened, but its folder cannot be opened: {error.strerror}"
                raise WorkspaceLost(msg) from None
            raise
        return made

    def _reopen_roots(self, connection: ProgramConnection) -> None:
        """Open the roots in use again; raise if one of them is another folder now."""
        for handle, root in list(self._roots.items()):
            path, same = self._paths.get(handle, ("", (0, 0)))
            if not path:  # it was closed
                continue
            number = connection.send_call("open_root", seconds=self.place.start, handle=handle, path=path)
            answer = connection.wait_for_reply(number, seconds=self.place.start)
            info = _parse_stat(answer.head.get("info"))
            if (info.st_dev, info.st_ino) != same:
                msg = f"the workspace {self.name} was reopened, but {path!r} is now another folder; create its tools again"
                raise WorkspaceLost(msg)
            root.store_info(answer)

    def call(
        self,
        operation: str,
        data: bytes = b"",
        *,
        connection_number: int | None = None,
        has_effect: bool = False,
        **members: object,
    ) -> CallReply:
        """
        Send a call and wait for its reply, at most 60 seconds or until the tool call is cancelled; *has_effect*: it may change something.

        The connection ends after 60 seconds without a reply. After a cancelled tool call it stays open.

        Raises:
            OSError: when the remote system refused the call.
            UnknownOutcome: when no reply arrived, and the call may have changed something.
            WorkspaceLost: when no reply arrived.
        """
        connection = self.ensure_connection(connection_number)
        if closing := self._pop_closing_handles():
            members["close"] = closing
        number = connection.send_call(
            operation, data, has_effect=has_effect, seconds=CALL_SECONDS, listener=None, **members
        )
        return connection.wait_for_reply(number, seconds=CALL_SECONDS, cancelled=CANCELLED.get())

    def _pop_closing_handles(self) -> list[int]:
        """Remove and return the handles to close with a call. Other threads may do so at the same time."""
        found: list[int] = []
        with suppress(IndexError):
            while len(found) < CLOSED_HANDLES:
                found.append(self._closing.popleft())
        return found

    def schedule_close(self, handle: int, *, is_root: bool) -> None:
        """Close a handle with the next call. Finalizers call this, so it never blocks."""
        if is_root:
            self._paths.pop(handle, None)
        self._closing.append(handle)

    # --- the system as a whole ---------------------------------------------------------------------------------------

    def open_root(self, path: str, *, allow_wide: bool) -> tuple[RemoteFile, str]:
        """
        Open a root folder, and return it with its real path.

        Raises:
            DefinitionError: when it cannot be opened as a folder, or without *allow_wide* is ``/`` or contains the home folder.
            WorkspaceLost: when the system cannot be reached.
        """
        made = self.allocate_handle()
        try:
            answer = self.call("open_root", handle=made, path=path)
        except OSError as error:
            msg = f"the root {path!r} of {self.name} cannot be opened as a folder: {error.strerror}"
            raise DefinitionError(msg) from error
        if self._begun.get("can_walk") is not True:
            msg = f"{self.name} cannot open files relative to an open folder, so tools cannot be confined to a root; use another workspace"
            raise DefinitionError(msg)
        if answer.head.get("wide") is not False and not allow_wide:
            self.schedule_close(made, is_root=False)
            msg = f"the root {path!r} of {self.name} is / or contains the home folder; to allow it, pass allow_wide_root=True"
            raise DefinitionError(msg)
        real = answer.head.get("real")
        if not isinstance(real, str) or not real.startswith("/") or len(real) > NAME_BYTES:
            self.close_and_raise_protocol_error("no path")
        found = RemoteFile(self, answer.line, made).store_info(answer)
        info = found.fstat()
        found.is_root = True
        self._roots[made] = found
        self._paths[made] = (real, (info.st_dev, info.st_ino))
        return found, real

    def fetch_variables(self, names: Sequence[str]) -> tuple[dict[str, str], str, str]:
        """Return the remote variables in *names*, the user's name, and the home folder; cached for the connection."""
        key = tuple(names)
        connection = self.ensure_connection()
        known = self._variables.get(key)
        if known is None:
            head = connection.wait_for_reply(
                connection.send_call("get_environment", names=list(names), seconds=CALL_SECONDS), seconds=CALL_SECONDS
            ).head
            given, user, home = head.get("variables"), head.get("user"), head.get("home")
            if not isinstance(given, dict) or not all(_is_text(v) for v in (*given, *given.values(), user, home)):
                self.close_and_raise_protocol_error("no environment")
            known = self._variables[key] = ({k: v for k, v in given.items() if k in key}, str(user), str(home))
        return known

    def find_program_outside(self, name: str, folders: Sequence[str], root: Sequence[str]) -> str | None:
        """Return the path of a program in *folders* that is outside of the root; ``None`` if there is none."""
        head = self.call("find_program_outside", name=name, folders=list(folders), root=list(root)).head
        found: Any = head.get("found")
        return found if _is_text(found) and found.startswith("/") else None

    def list_paths_outside_root(self, paths: Sequence[str], root: Sequence[str]) -> list[str]:
        """Ask the remote system which paths are outside of the root, as written and with links followed, and return these."""
        told = self.call("filter_outside_paths", paths=list(paths), root=list(root)).head.get("outside")
        return [path for path in paths if isinstance(told, list) and path in told]

    def create_private_folder(self) -> str:
        """
        Create a private folder, and return its path; raise ``ToolError`` without a folder for temporary files.

        Raises:
            ToolError: if there is no folder for temporary files.
        """
        try:
            folder: Any = self.call("make_private_folder").head.get("folder")
        except OSError as error:
            msg = f"the workspace {self.name} has no place for temporary files: {error.strerror}; commands need one, such as /tmp"
            raise ToolError(msg) from None
        if not _is_text(folder) or not folder.startswith("/"):
            self.close_and_raise_protocol_error("no path")
        return str(folder)

    def create_private_subfolders(self, paths: Sequence[str]) -> None:
        """Create folders in a private folder."""
        self.call("mkdirs", paths=list(paths))

    def remove_private_folder(self, folder: str) -> None:
        """Remove a private folder, unless the connection is lost: the remote program then removes the folder itself."""
        connection = self._connection
        if connection is not None and not connection.is_lost:
            with suppress(WorkspaceLost, OSError):
                connection.wait_for_reply(
                    connection.send_call("remove_private_folder", path=folder, seconds=CALL_SECONDS),
                    seconds=CALL_SECONDS,
                )

    # --- programs ----------------------------------------------------------------------------------------------------

    def spawn(self, folder: RemoteFile, listener: Listener, *, script: bytes | None, **options: object) -> Spawned:
        """
        Start a program with a supervisor.

        Raises:
            OSError: when the remote system cannot start a process.
            UnknownOutcome: when no reply arrived.
        """
        connection = self.ensure_connection(None if folder.is_root else folder.line)
        number = connection.send_call(
            "spawn",
            script or b"",
            has_effect=True,
            seconds=CALL_SECONDS,
            listener=listener,
            folder=folder.number,
            script=script is not None,
            **options,
        )
        connection.wait_for_reply(number, seconds=CALL_SECONDS)
        return Spawned(connection, number)

    def kill_marked_processes(self, mark: str) -> None:
        """Kill every remote process whose environment contains the text *mark*."""
        self.call("end_marked", mark=mark)


class Spawned:
    """A program that was started on a remote system."""

    def __init__(self, connection: ProgramConnection, number: int) -> None:
        self._connection = connection
        self._number = number

    @property
    def is_lost(self) -> bool:
        """Whether the connection to the process is lost."""
        return self._connection.is_lost

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to the process group of the program."""
        self._connection.notify("signal", child=self._number, pid=pid, signal=number)

    def request_end(self) -> None:
        """Ask the supervisor of the program to end all processes."""
        self._connection.notify("request_end", child=self._number)

    def kill_supervisor(self) -> None:
        """Kill the supervisor of the program. Linux then kills the command, but not its other processes."""
        self._connection.notify("kill_supervisor", child=self._number)

    def allow_output(self, size: int) -> None:
        """Allow the process to print *size* more bytes."""
        self._connection.allow_output(self._number, size)


def _split_remote_path(path: str) -> list[str]:
    """Return the components of a normalized remote path."""
    return [part for part in posixpath.normpath(path).split("/") if part]


def _is_text(value: Any) -> bool:
    """Return whether a value is a string without a NUL."""
    return isinstance(value, str) and "\0" not in value


def _parse_stat(numbers: object) -> os.stat_result:
    """Return the status of a remote file from its eight numbers; raise ``WorkspaceLost`` for invalid ones."""
    if (
        not isinstance(numbers, list)
        or len(numbers) != NUMBERS
        or not all(type(n) is int and 0 <= n < 2 * HALF_OF_64_BITS for n in numbers[:-1])
    ):
        msg = "the workspace violates the protocol: its data about a file cannot be parsed"
        raise WorkspaceLost(msg)
    mode, inode, device, links, user, group, size, changed = numbers
    if type(changed) is not int or not -HALF_OF_64_BITS <= changed < HALF_OF_64_BITS:
        changed = 0
    seconds = changed // 1_000_000_000
    times = {"st_atime_ns": changed, "st_mtime_ns": changed, "st_ctime_ns": changed}
    return os.stat_result((mode, inode, device, links, user, group, size, seconds, seconds, seconds), times)


def _parse_listing(data: bytes, system: RemoteSystem) -> Iterator[Any]:
    """Yield the entries of a listing, which consists of several consecutive JSON lists."""
    try:
        text, at, decode = data.decode("utf-8"), 0, json.JSONDecoder().raw_decode
        while at < len(text):
            part, at = decode(text, at)
            if not isinstance(part, list):
                system.close_and_raise_protocol_error("no listing")
            yield from part
    except (ValueError, RecursionError):
        system.close_and_raise_protocol_error("no listing")


def _parse_entry(members: Any) -> RemoteEntry:
    """Parse an entry of a listing; raise ``WorkspaceLost`` for one that no folder can have."""
    if (
        not isinstance(members, list)
        or len(members) != ENTRY
        or not isinstance(members[0], str)
        or not 0 < len(members[0]) < NAME_BYTES
        or "/" in members[0]
        or "\0" in members[0]
        or members[0] in {".", ".."}
        or members[1] not in {"d", "f", "o"}
        or type(members[2]) is not int
    ):
        msg = "the workspace violates the protocol: its data about a folder is missing"
        raise WorkspaceLost(msg)
    info = None if members[3] is None else _parse_stat(members[3])
    if info is not None and not stat.S_ISREG(info.st_mode):
        info = None
    return RemoteEntry(members[0], members[1], members[2], info)
