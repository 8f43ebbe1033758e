"""How many files a process may have open, and what to say when there can be no more."""

from __future__ import annotations

import errno

__all__ = ("most_open_files", "said", "too_many_files")


def most_open_files() -> int | None:
    """Return how many files this process may have open at once; ``None`` where nobody knows, or there is no bound."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def too_many_files(error: BaseException) -> str:
    """Return what to raise when *error* says that too many files are open; ``""`` for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        most = most_open_files()
        return (
            f"too many open files: this process may have {'no more' if most is None else f'{most:,}'} open at once, sockets and "
            "pipes included; raise that with `ulimit -n 8192` before it starts (LimitNOFILE= of a service, nofile of a "
            "container), or do less at once"
        )
    if number == errno.ENFILE:
        return "too many open files on the whole machine; raise the system's fs.file-max, or do less at once"
    return ""


def said(error: OSError) -> str:
    """Return what the system says of an error; for one that comes of a limit of the system, also which limit to raise."""
    return too_many_files(error) or error.strerror or str(error)
