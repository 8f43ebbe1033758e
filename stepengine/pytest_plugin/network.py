"""
No network in tests that replay.

One audit hook of the interpreter sees to it, so that code which kept a socket or a function of its own is seen, too.

Not covered: other processes, and network stacks that are not Python's sockets, such as uvloop's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ("NetworkBlocked", "blocked")

LOOKUPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
SENDING = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})


class NetworkBlocked(BaseException):
    """A test that replays wanted to reach the network. No ``Exception``, so that nobody retries or swallows it."""


class _Block:
    def __init__(self, allowed: Iterable[str]) -> None:
        self.allowed = frozenset(allowed)
        self.refused: list[NetworkBlocked] = []


_blocks: list[_Block] = []
_installed: list[bool] = []


def _audit(event: str, args: tuple[object, ...]) -> None:
    if not _blocks or (event not in SENDING and event not in LOOKUPS):
        return
    address = args[1] if event in SENDING else args[0]
    if event in SENDING and not isinstance(address, tuple):
        return  # a path of a Unix socket, or a socket that is connected already
    host = address[0] if isinstance(address, tuple) else address
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    for block in _blocks:
        if name not in block.allowed:
            msg = (
                f"{event} to {name!r}: this test replays its recordings and may not reach the network; allow a host with the ini "
                "setting stepengine_network_allow, or everything with --stepengine-network=allow"
            )
            error = NetworkBlocked(msg)
            block.refused.append(error)
            raise error


@contextmanager
def blocked(allowed: Iterable[str] | None) -> Iterator[list[NetworkBlocked]]:
    """
    Refuse every host but *allowed* for a while; ``None`` refuses nothing. Gives the list of what was refused.

    The hook cannot be taken out again, so it only looks whether anything is blocked; blocks may be nested.
    """
    if allowed is None:
        yield []
        return
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_audit)
    block = _Block(allowed)
    _blocks.append(block)
    try:
        yield block.refused
    finally:
        _blocks.remove(block)
