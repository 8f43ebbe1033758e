"""
Prepare a Python process of a program that is recorded or replayed, before the first line of the program.

A ``sitecustomize`` module that the command writes loads this file by its path and calls ``patch_starting_process``. This module imports the standard
library alone. stepengine is imported when the program imports the first HTTP library, so that processes without one start fast.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARIES = frozenset({"httpcore2", "httpcore", "httpx2", "httpx", "aiohttp", "http.client", "urllib3", "httplib2"})
"""Those of ``stepengine.testing.patching``: patching has to start before the first line of any of them runs."""
HERE = Path(__file__).parent
FAILED, DIVERGED = 1, 5
SITE = """\
import importlib.util, sys
_spec = importlib.util.spec_from_file_location("_stepengine_bootstrap", {path!r})
_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.patch_starting_process({folder!r})
"""
"""The source of the module ``sitecustomize`` that loads this one."""


def patch_starting_process(folder: str) -> None:
    """
    Patch this process so that it records or replays; *folder* has the settings.

    Args:
        folder: The entry of ``PYTHONPATH`` that held the ``sitecustomize`` module.
    """
    try:
        _patch_process(folder)
    except Exception as error:  # noqa: BLE001 - `site` would print it and start the program without cover
        sys.stderr.write(f"stepengine: this process cannot be recorded or replayed: {error!r}\n")
        sys.stderr.flush()
        os._exit(FAILED)
    _run_next_sitecustomize(folder)


def _patch_process(folder: str) -> None:
    """Block the network, freeze or observe functions and prepare the HTTP libraries, as the broker says."""
    channel = _load_module("channel", HERE / "channel.py")
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    if channel.get_current_mode() == "":
        return
    try:
        told = channel.ask_broker("hello", command=sys.orig_argv)
    except channel.BrokerGone:
        told = {"allowed": [], "frozen": None, "observes": False}
        if channel.get_current_mode() == "record":
            return
    if channel.get_current_mode() == "replay":
        _block_network(channel, told["allowed"])
    flush = _freeze_sources(channel, told["frozen"]) if told["frozen"] is not None else lambda: None
    _start_reporting_uncovered_children(channel, folder)
    before_request = _observe_sources(channel, told["frozen"]) if told["observes"] else flush
    sys.meta_path.insert(0, _StartOnImport(channel, before_request))


def _load_module(name: str, path: Path) -> Any:
    """Run the file *path* as a module called *name*, and return the module."""
    spec = importlib.util.spec_from_file_location(f"_stepengine_{name}", path)
    if spec is None or spec.loader is None:
        msg = f"{path} is missing"
        raise ImportError(msg)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_next_sitecustomize(folder: str) -> None:
    """Run the module ``sitecustomize`` that the module of the package hides."""
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != folder])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


# --- the network, and processes that this one starts ------------------------------------------------------------------------


def _send_report(channel: Any, operation: str, **members: Any) -> None:
    """Send a report to the broker; do nothing if it has ended."""
    try:
        channel.ask_broker(operation, **members)
    except channel.BrokerGone:
        return


def _block_network(channel: Any, allowed: list[str]) -> None:
    """Block connections to all hosts but those *allowed*, and report each blocked one to the broker."""
    network = _load_module("network", HERE.parent.parent / "workspace" / "network.py")
    reason = "a program that replays a cassette must not use the network; allow a host with --allow-host"
    network.block_network(allowed, reason, lambda error: _send_report(channel, "blocked", message=str(error)))


def _freeze_sources(channel: Any, frozen: dict[str, Any]) -> Callable[[], object]:
    """Replace the frozen functions, and return a function that sends the values recorded so far."""

    def send_times(key: str, values: dict[str, list[int]]) -> None:
        """Send recorded times of the process to the broker."""
        _send_report(channel, "times", process=key, values=values)

    process = _load_module("frozen", HERE / "frozen.py").FrozenProcess(
        frozen, send_times if channel.get_current_mode() == "record" else None
    )
    flush: Callable[[], object] = process.flush
    return flush


def _observe_sources(channel: Any, frozen: dict[str, Any] | None) -> Callable[[], object]:
    """Report calls of sources of nondeterminism, and return the function that finds the line that sends a request."""
    sources = _load_module("sources", HERE / "sources.py")
    sources.start_reporting_source_calls(
        (frozen or {"kinds": []})["kinds"], lambda n, at: _send_report(channel, "source", name=n, line=at)
    )
    return lambda: sources.find_program_line(sys._getframe(1))  # noqa: SLF001 - `inspect` has no cheaper way


def _start_reporting_uncovered_children(channel: Any, folder: str) -> None:
    """Start to report each child process of this one that cannot be recorded or replayed."""
    uncovered_reason = _load_module("child_commands", HERE / "child_commands.py").find_uncovered_reason

    def report_if_uncovered(event: str, args: tuple[Any, ...]) -> None:
        """Report the start of a child process that cannot be recorded or replayed: an audit hook."""
        if event not in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
            return
        if event == "os.system":
            command, variables = ["sh", "-c", args[0]], None
        else:
            command, variables = args[1], args[-1]
            command = [command] if isinstance(command, (str, bytes)) else [*command]
            if args[0] is not None and event == "subprocess.Popen" and command:
                command[0] = args[0]
        reason = uncovered_reason(command, variables, folder)
        if reason is not None:
            _send_report(channel, "uncovered", command=[os.fsdecode(word) for word in command], reason=reason)

    sys.addaudithook(report_if_uncovered)


# --- HTTP libraries ---------------------------------------------------------------------------------------------------------


class _StartOnImport(MetaPathFinder):
    """Patches the HTTP libraries when the program imports the first of them."""

    def __init__(self, channel: Any, before_request: Callable[[], object]) -> None:
        self._channel = channel
        self._before_request = before_request
        self._started = False
        self._is_starting = False
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Replace the lock after a fork."""
        self._lock = threading.RLock()

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Patch the HTTP libraries at the import of the first one, and return its spec; None for every other import."""
        if self._started or fullname not in LIBRARIES:
            return None
        with self._lock:
            # What patches imports some of the libraries itself, in this thread.
            if self._is_starting or self._started:
                return None
            self._is_starting = True
            try:
                first = self._patch_http_libraries()
                self._started = True
            finally:
                self._is_starting = False
        return None if first is None else first.find_spec(fullname, path, target)

    def _patch_http_libraries(self) -> Any:
        """Patch the HTTP libraries, and return the finder that patches later imports; None if stepengine cannot be imported here."""
        try:
            from stepengine.testing.processes.client import patch_process
        except ImportError as error:
            reason = f"stepengine cannot be imported in {sys.executable}: {error}"
            _send_report(self._channel, "uncovered", command=sys.orig_argv, reason=reason)
            return None
        return patch_process(self._before_request)
