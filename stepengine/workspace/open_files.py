"""The limit of open files of a process, and the message for an error at the limit."""

from __future__ import annotations

import errno


def max_open_files() -> int | None:
    """Return the limit of open files of this process; ``None`` if it is unknown or unlimited."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def too_many_files_advice(error: BaseException) -> str:
    """Return advice on which limit to raise if *error* reports too many open files; else ``""``."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        most = max_open_files()
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
    return too_many_files_advice(error) or error.strerror or str(error)
