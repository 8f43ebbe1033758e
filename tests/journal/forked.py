"""
Work in a forked child.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
"""A test process has threads that no child uses."""


def in_child(work: Callable[[], Any]) -> int:
    """
    Fork, do some work there, and return how the child ended; one that hangs is killed.
    """
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + 50
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


@contextmanager
def hold_in_child(open_writer: Callable[[], Any]) -> Iterator[int]:
    """
    Fork, and let the child have what *open_writer* opens until the block ends; yield its process id.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with closing(open_writer()):
                os.write(writing, b"ready")
                signal.pause()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert b"ready" == os.read(reading, 5), "the child could not open it"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
