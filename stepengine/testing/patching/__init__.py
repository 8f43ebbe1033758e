"""
Record and replay programs that make their own clients, with no change to them.

``patch_clients(exchanges)`` replaces the methods with which HTTP libraries send a request. They are replaced on the classes, so that clients
which were made before are covered, too. Each library has a module here, which turns its requests and replies into those of
``exchanges``:

====================  ==========================================================  =========================================
module                what it replaces                                            programs
====================  ==========================================================  =========================================
``httpcore_pools``    the request methods of the pools of httpcore2 and httpcore  httpx2, httpx, and so anthropic, openai,
                                                                                  google-genai (sync)
``httpx_clients``     which transport a client of httpx2 or httpx sends by        those with transports of their own
``aiohttp_sessions``  the methods of ``ClientSession``, and ``aiohttp.request``   google-genai (async)
``http_connections``  what connections of ``http.client`` send and receive        urllib.request, urllib3, requests, boto3
====================  ==========================================================  =========================================

A library that is not imported yet is patched when it is. Not covered: websockets, gRPC, clients on plain sockets. While a program replays, the network is blocked for them.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, TypeAlias

from stepengine.errors import DataError
from stepengine.testing.exchanges import PASSING, Exchanges

__all__ = ("CACHE_HINTS", "patch_clients")

Undo: TypeAlias = Callable[[], None]
HERE = "stepengine.testing.patching"
LIBRARIES = {
    "httpcore2": "httpcore_pools",
    "httpcore": "httpcore_pools",
    "httpx2": "httpx_clients",
    "httpx": "httpx_clients",
    "aiohttp": "aiohttp_sessions",
    "http.client": "http_connections",
    "urllib3": "http_connections",
    "httplib2": "http_connections",
}

CACHE_HINTS = ("/prompt_cache_key",)
"""Members of requests that frameworks fill with random ids. They route a request to a cache, and no reply depends on them."""

_active: list[tuple[str, Exchanges]] = []
_hooks: list[object] = []


@contextmanager
def patch_clients(exchanges: Exchanges, name: str = "a cassette") -> Iterator[None]:
    """
    Inside the block, answer or record all HTTP requests of this process with *exchanges*; raise ``DataError`` in a patched process.

    Args:
        exchanges: What plays and records them.
        name: The cassette, for messages.

    Raises:
        DataError: if the process is patched already: a request could belong to either cassette.
    """
    if _active:
        msg = (
            f"this process is already patched for {_active[0][0]}, so a patch cannot record or replay {name} at the same time. "
            "Give one of the clients transport=cassette.transport() instead"
        )
        raise DataError(msg)
    _active.append((name, exchanges))
    if not _hooks:  # an audit hook is there for good
        sys.addaudithook(_report_unpatched_connection)
        _hooks.append(_report_unpatched_connection)
    undo: list[Undo] = []
    finder = _PatchOnImport(exchanges, undo)
    try:
        undo += [_patch_library(name, sys.modules[name], exchanges) for name in LIBRARIES if name in sys.modules]
        sys.meta_path.insert(0, finder)
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        while undo:
            undo.pop()()
        _active.clear()


def _report_unpatched_connection(event: str, args: tuple[Any, ...]) -> None:
    """Report a TCP connection that no patched library has opened; ignore other audit events."""
    if event != "socket.connect" or not _active or PASSING.get():
        return
    address = args[1]
    if isinstance(address, tuple) and args[0].type == socket.SOCK_STREAM:
        _active[0][1].report_unrecorded_connection(f"{address[0]}:{address[1]}")


def _patch_library(library: str, module: Any, exchanges: Exchanges) -> Undo:
    """Patch an imported *library*, and return the function that undoes it."""
    undo: Undo = import_module(f"{HERE}.{LIBRARIES[library]}").patch_library(module, exchanges)
    return undo


class _PatchOnImport(MetaPathFinder):
    """Patches a library right after its import."""

    def __init__(self, exchanges: Exchanges, undo: list[Undo]) -> None:
        self._exchanges = exchanges
        self._undo = undo

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of an HTTP library with a loader that patches it after its import; None for other modules."""
        if fullname not in LIBRARIES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(
                        spec.loader, lambda module: self._undo.append(_patch_library(fullname, module, self._exchanges))
                    )
                return spec
        return None


class _PatchingLoader(Loader):
    def __init__(self, loader: Any, then: Callable[[Any], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Execute the module, restore its own loader, and call the function that patches it."""
        self._loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self._loader
        self._then(module)
