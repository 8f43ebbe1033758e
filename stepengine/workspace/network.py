"""
Block the network while recordings are replayed.

One audit hook of the interpreter blocks it, so that code which kept a socket or a function of its own is covered, too.

Not covered: other processes, and network stacks that are not Python's sockets, such as uvloop's. This module imports the standard
library alone: processes that have no stepengine load it by its path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

LOOKUPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
SENDING = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
OF_TESTS = (
    "this test replays its recordings and must not use the network; allow a host with the ini setting stepengine_network_allow, or "
    "all hosts with --stepengine-network=allow"
)


class NetworkBlocked(BaseException):
    """A replaying program tried to use the network. No ``Exception``, so that no handler retries or swallows it."""


_blocks: list[tuple[frozenset[str], str, Callable[[NetworkBlocked], object]]] = []
_installed: list[bool] = []


def _raise_if_blocked(event: str, args: tuple[object, ...]) -> None:
    """The audit hook: report and raise ``NetworkBlocked`` for a look-up of a blocked host, or a connection to it."""
    if not _blocks or (event not in SENDING and event not in LOOKUPS):
        return
    address = args[1] if event in SENDING else args[0]
    if event in SENDING and not isinstance(address, tuple):
        return  # a path of a Unix socket, or a socket that is connected already
    host = address[0] if isinstance(address, tuple) else address
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    for allowed, reason, report in [*_blocks]:
        if name not in allowed:
            error = NetworkBlocked(f"{event} to {name!r}: {reason}")
            report(error)
            raise error


def block_network(
    allowed: Iterable[str], reason: str, report: Callable[[NetworkBlocked], object]
) -> Callable[[], None]:
    """
    Block every host except *allowed*, and return a function that ends the block. Blocks may be nested.

    The hook cannot be removed again, so it only checks whether anything is blocked.

    Args:
        allowed: Names and addresses, exactly as the program passes them.
        reason: Why it is blocked and how to allow it, for the message.
        report: Called with each error before it is raised.
    """
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_raise_if_blocked)
    block = (frozenset(allowed), reason, report)
    _blocks.append(block)
    return lambda: _blocks.remove(block)


@contextmanager
def block_test_network(allowed: Iterable[str] | None) -> Iterator[list[NetworkBlocked]]:
    """Block every host except *allowed* during a test, and yield the list of errors; ``None`` blocks nothing."""
    refused: list[NetworkBlocked] = []
    if allowed is None:
        yield refused
        return
    end = block_network(allowed, OF_TESTS, refused.append)
    try:
        yield refused
    finally:
        end()
