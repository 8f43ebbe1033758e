"""
Walks: they move a stepper to any position of a recorded run.

A generator only runs forward, so a move back replays from an earlier position. ``PausedWalk`` stores paused steppers, and
``ForkedWalk`` has processes that sleep at spaced positions.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Never

from stepengine.engine.stepper import Stepper
from stepengine.errors import InputError, ReplayDivergence

MAX_PAUSED = 9
MAX_SNAPSHOTS = 24
SPACING = 64
PARTS = 8
"""The number of parts of a long run between sleeping processes. Each process costs a fork, and copies of the pages changed after it."""
NAP = 0.3
"""Seconds after which a sleeping process checks for messages, ended children and a missing parent."""
WRITTEN = 5.0
"""Seconds until a message in shared memory must be complete; after that, its writer was killed while it wrote."""
MESSAGE = 1 << 24
"""The most bytes of a message; memory is used only for the bytes that are written."""


def find_os_fork_problem() -> str:
    """Return why this process cannot call ``os.fork``; ``""`` if it can."""
    if not hasattr(os, "fork"):
        return "this system does not support os.fork"
    if not hasattr(signal, "sigtimedwait"):
        return "this system does not support signal.sigtimedwait"
    # `threading` does not list all of them, and any thread that runs Python may hold a lock that the new process needs.
    count = len(sys._current_frames())  # noqa: SLF001 - the interpreter's own list of its threads
    return f"{count} threads are running, and a fork needs a single thread" if count > 1 else ""


class PausedWalk:
    """
    Moves by replaying, and stores the last few steppers at their positions for later moves.

    Args:
        stepper: The first stepper.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._paused: list[Stepper] = []

    def move_to(self, position: int, **_ignored: Any) -> None:
        """
        Move to *position*. A move backwards continues from the nearest stored stepper before it, or from a new one.

        Args:
            position: The position.
            _ignored: Values for another process, as a ``ForkedWalk`` wakes; there is none.

        Raises:
            ReplayDivergence: when the run differs from its record before *position*; the walk is then at the last equal position.
        """
        if position < self.stepper.position or self.stepper.diverged is not None:
            self._store_or_close_stepper()
            before = [each for each in self._paused if each.position <= position]
            nearest = max(before, key=lambda each: each.position, default=None)
            if nearest is not None:
                self._paused.remove(nearest)
            self.stepper = nearest or self.stepper.copy_at_start()
        try:
            self.stepper.advance_to(position)
            # It starts the run of the next outcome, whose first effect may be the one that differs.
            self.stepper.effect()
        except ReplayDivergence:
            good = self.stepper.position - 1
            if good >= 0:
                with contextlib.suppress(ReplayDivergence):
                    self.move_to(good)
            raise

    def _store_or_close_stepper(self) -> None:
        """Store the current stepper for later moves, and close the oldest over the limit; one that diverged is closed instead."""
        if self.stepper.diverged is not None:
            self.stepper.close()
            return
        self._paused.append(self.stepper)
        if len(self._paused) > MAX_PAUSED:
            self._paused.pop(0).close()

    def undo_expression_effects(self) -> None:
        """Replay to the same position with a new stepper, whose objects no expression has changed."""
        position, old = self.stepper.position, self.stepper
        self.stepper = old.copy_at_start()
        old.close()
        self.stepper.advance_to(position)

    def close(self) -> None:
        """Close all steppers."""
        for each in (*self._paused, self.stepper):
            each.close()
        self._paused.clear()


class Rewound(BaseException):
    """
    Raised in a woken process: it continues from its earlier position in place of another process.

    Attributes:
        message: The message of that process.
    """

    def __init__(self, message: Mapping[str, object]) -> None:
        super().__init__()
        self.message = message


class ForkedWalk:
    """
    Moves by forking a process every few positions; going back wakes the one that sleeps nearest before the target.

    One process is active, and has the terminal. To go back, or far forward to where a process sleeps already, it exits with
    a message: the process that sleeps nearest before the target forks another one, and sleeps again. Messages are in shared
    memory that only the active process writes; a signal wakes the other process. There are no pipes that a process could
    inherit. A process whose parent is gone exits.

    Args:
        stepper: The first stepper, at position 0.

    Attributes:
        keeps: Returns the values that every message to the next process has.
        stays: Whether this process never wakes another one, because it is discarded afterwards.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.keeps: Callable[[], Mapping[str, Any]] = dict
        self.stays = False
        self._shared = mmap.mmap(-1, MESSAGE)
        self._spacing = max(SPACING, stepper.tape.last_position // PARTS)
        self._first = os.getpid()
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def fork_and_wait_in_parent(self) -> int | None:
        """Fork the first process that moves: return ``None`` in the child; in the parent wait for the end, and return the exit code."""
        self._write_shared_message({"places": [], "active": 0})
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        # The mask is this thread's. One that a library started, such as one for numbers, lets the signal through, and
        # what it does by default is to end the process.
        self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            return self._fork_and_sleep_here()
        finally:
            if os.getpid() == self._first:
                # Several processes may send the signal, and this one may be awake by then. A pending signal would end this
                # process once it is unblocked. All other processes are gone, so no further signal arrives.
                while signal.sigtimedwait({signal.SIGUSR1}, 0):
                    pass
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                for number, handler in self._handlers.items():
                    signal.signal(number, handler)

    # --- sleeping -----------------------------------------------------------------------------------------------------

    def _fork_and_sleep_here(self) -> int | None:
        """Fork a process that continues, and sleep at this position; return in the child, and in the first process at the end."""
        known = self._read_shared_message()
        self._write_shared_message({**known, "places": [*known["places"], [os.getpid(), self.stepper.position]]})
        sys.stdout.flush()
        sys.stderr.flush()
        if not known["places"]:
            # Only once, since a collection takes long and later ones would free little.
            gc.collect()
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._kill_active_on_signal)
        parent, message = os.getppid(), None
        while True:
            if self._fork_new_active_process():
                if message is not None:
                    raise Rewound(message)
                return None
            told = self._sleep_until_message(parent)
            if "end" in told:
                return self._wait_for_forks_and_exit(told["end"])
            message = told

    def _fork_new_active_process(self) -> bool:
        """Fork a new active process; return True in it, and False in the parent."""
        if os.fork():
            return False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handlers[number])
        self._write_shared_message({**self._read_shared_message(), "active": os.getpid()})
        return True

    def _sleep_until_message(self, parent: int) -> Mapping[str, Any]:
        """Sleep until this process receives a message or has to end, and return the message; exit if the parent process is gone."""
        while True:
            # Whether the signal came says nothing: another thread may have got it.
            signal.sigtimedwait({signal.SIGUSR1}, NAP)
            known = self._read_shared_message()
            if "end" in known:
                return known
            if known.get("to") == os.getpid():
                message: Mapping[str, object] = known["message"]
                # Removed, so that it is not read twice. Its sender has exited, so no other process writes here.
                self._write_shared_message(
                    {name: said for name, said in known.items() if name not in ("to", "message")}
                )
                return message
            if os.getppid() != parent:
                os._exit(1)
            self._reap_ended_children()

    def _reap_ended_children(self) -> None:
        """Collect child processes that ended, without waiting; if the active one ended, request the end of all with its exit code."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                # Read after the process has ended, since before that it may have woken another one.
                if ended[0] == self._read_shared_message()["active"]:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._request_end(code if code >= 0 else 128 - code)

    def _kill_active_on_signal(self, *_: object) -> None:
        """Kill the active process and request the end of all others, this one included; a signal handler."""
        known = self._read_shared_message()
        with contextlib.suppress(ProcessLookupError):
            os.kill(known["active"], signal.SIGKILL)
        self._request_end(128 + signal.SIGTERM)

    def _request_end(self, code: int) -> None:
        """Request that all processes end with an exit code, unless an end is requested already, and wake the first one."""
        known = self._read_shared_message()
        if "end" not in known:
            self._write_shared_message({**known, "end": code})
        os.kill(self._first, signal.SIGUSR1)

    def _wait_for_forks_and_exit(self, code: int) -> int:
        """Wait for the processes forked here, then exit; the first process returns the exit code instead."""
        if os.getpid() == self._first:
            for pid, _ in self._read_shared_message()["places"]:
                if pid != self._first:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        if os.getpid() != self._first:
            os._exit(0)
        gc.unfreeze()
        return code

    # --- awake --------------------------------------------------------------------------------------------------------

    def _read_shared_message(self) -> dict[str, Any]:
        """Return the shared message; one that requests the end with exit code 1 if none is complete within five seconds."""
        # Sleeping processes also read at intervals, possibly while another process writes.
        until = time.monotonic() + WRITTEN
        while time.monotonic() < until:
            size = int.from_bytes(self._shared[:4], "big")
            with contextlib.suppress(ValueError):
                known: dict[str, object] = json.loads(self._shared[4 : 4 + size])
                return known
            time.sleep(0.0005)
        return {"places": [], "active": 0, "end": 1}

    def _write_shared_message(self, message: Mapping[str, object]) -> None:
        """Replace the message in the shared memory; raise ``InputError`` if it is too long."""
        text = json.dumps(message).encode()
        if len(text) > MESSAGE - 4:
            msg = f"the debugger cannot pass on an expression of {len(text)} bytes; use a shorter one"
            raise InputError(msg)
        self._shared[:4] = bytes(4)
        self._shared[4 : 4 + len(text)] = text
        self._shared[:4] = len(text).to_bytes(4, "big")

    def _get_nearest_sleeping_process(self, position: int) -> tuple[int, int]:
        """Return the process id and the position of the process that sleeps nearest at or before *position*."""
        pid, stands = max(
            self._read_shared_message()["places"], key=lambda each: each[1] if each[1] <= position else -1
        )
        return pid, stands

    def move_to(self, position: int, **message: Any) -> None:
        """
        Move forwards, and fork sleeping processes on the way; to move backwards, wake one of them and exit.

        Args:
            position: The position.
            message: Values for the process that is woken, if one is; see ``wake_nearest_and_exit``.

        Raises:
            ReplayDivergence: when the run differs from its record at the start, or in a process that ``stays``.
        """
        stepper = self.stepper
        if position < stepper.position or stepper.diverged is not None:
            self.wake_nearest_and_exit(min(position, stepper.position), **message)
        if (
            not self.stays
            and message
            and self._get_nearest_sleeping_process(position)[1] > stepper.position + self._spacing
        ):
            with contextlib.suppress(InputError):  # *message* is too long: move there step by step
                self.wake_nearest_and_exit(position, **message)
        position = min(position, stepper.tape.last_position)
        while stepper.position < position:
            if not self.stays and self._needs_fork_here():
                self._fork_and_sleep_here()
            try:
                stepper.advance_to(min(position, stepper.position - stepper.position % SPACING + SPACING))
                stepper.effect()  # as in a `PausedWalk`
            except ReplayDivergence as error:
                if stepper.position and not self.stays:
                    self.wake_nearest_and_exit(stepper.position - 1, refused=error.message)
                raise

    def _needs_fork_here(self) -> bool:
        """Return whether a process should sleep here: none sleeps nearby, there is room for one more, and 64 divides the position."""
        here = self.stepper.position
        if here % SPACING:
            return False
        return (
            here - self._get_nearest_sleeping_process(here)[1] >= self._spacing
            and len(self._read_shared_message()["places"]) < MAX_SNAPSHOTS
        )

    def wake_nearest_and_exit(self, position: int, **message: object) -> Never:
        """Wake the process that sleeps nearest at or before *position*, which raises ``Rewound`` with *message*; exit this process."""
        pid, _ = self._get_nearest_sleeping_process(position)
        sent = {**self.keeps(), **message, "position": position}
        self._write_shared_message({**self._read_shared_message(), "active": 0, "to": pid, "message": sent})
        os.kill(pid, signal.SIGUSR1)
        exit_forked_process(0)

    def end_all_processes(self, code: int) -> Never:
        """End all processes with the exit code *code*."""
        known = self._read_shared_message()
        self._write_shared_message({**known, "active": 0, "end": code})
        os.kill(self._first, signal.SIGUSR1)
        exit_forked_process(0)

    def undo_expression_effects(self) -> None:
        """Do nothing, since expressions run in a child process and change nothing here."""

    def close(self) -> None:
        """Close the stepper and the shared memory in the first process."""
        if os.getpid() == self._first:
            self.stepper.close()
            self._shared.close()


def exit_forked_process(code: int) -> Never:
    """Exit a forked process at once, without running ``finally`` blocks of handlers."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait_for_child(pid: int) -> int:
    """Wait for a child process that has the terminal, and return its exit code. SIGTERM is passed on to the child."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate = signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
