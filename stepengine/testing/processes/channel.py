"""
Ask the broker from a process of the program. One connection for each question, so that threads and forked processes need no lock.

This module imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

VARIABLE = "STEPENGINE_CASSETTE"
"""The environment variable of a process: ``record:PATH`` or ``replay:PATH``, with the path of the broker's socket."""

_mode, _, _path = os.environ.get(VARIABLE, "").partition(":")


class BrokerGone(Exception):
    """The command that records or replays has ended before this process."""


def get_current_mode() -> str:
    """Return ``"record"`` or ``"replay"``; ``""`` outside of both."""
    return _mode


def ask_broker(operation: str, **members: Any) -> Any:
    """
    Send the broker a request, and return its reply; raise ``BrokerGone`` without a broker.

    Raises:
        BrokerGone: if there is no broker any more.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(_path)
            connection.sendall(json.dumps({"operation": operation, **members}).encode() + b"\n")
            with connection.makefile("rb") as reader:
                answer = reader.readline()
    except OSError as error:
        msg = f"the command that {_mode}s has ended: {error}"
        raise BrokerGone(msg) from None
    return json.loads(answer or b"null")
