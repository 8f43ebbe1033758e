"""The limit of open files of a process, the message for an error at the limit, and the open databases that must not be opened twice."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from stepengine.workspace.after_fork import call_in_forked_child

DATABASE_IN_USE = "this process has it open as an SQLite database"
open_databases: dict[int, str] = {}
"""The paths of the SQLite files with a connection in this process, by the id of the connection."""


# By POSIX, closing any descriptor of a file releases all locks that the process has on it. SQLite locks the database and the
# index of its log. Another process would then truncate the index while this process has it mapped, and a signal would end this process.
def is_open_database(status: os.stat_result) -> bool:
    """Return whether a file is a database with a connection in this process, or its log or the index of that: nothing else may open them."""
    for path in set(open_databases.values()):
        for each in (path, f"{path}-wal", f"{path}-shm"):
            with suppress(OSError):
                if os.path.samestat(os.stat(each), status):  # noqa: PTH116 - searches call it for each file
                    return True
    return False


call_in_forked_child(open_databases.clear)


def get_max_open_files() -> int | None:
    """Return the limit of open files of this process; ``None`` if it is unknown or unlimited."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def make_too_many_files_advice(error: BaseException) -> str:
    """Return advice on which limit to raise if *error* reports too many open files; else ``""``."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        most = get_max_open_files()
        return (
            f"too many open files: this process may have {'no more' if most is None else f'{most:,}'} open at once, sockets and "
            "pipes included; raise the limit with `ulimit -n 8192` before it starts (LimitNOFILE= of a service, nofile of a "
            "container), or run fewer tasks at once"
        )
    if number == errno.ENFILE:
        return "too many open files on the whole machine; raise the system's fs.file-max, or run fewer tasks at once"
    return ""


def describe_os_error(error: OSError) -> str:
    """Return the system's text of an error, with the limit to raise if a limit caused it."""
    return make_too_many_files_advice(error) or error.strerror or str(error)
