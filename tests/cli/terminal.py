"""
A person at a terminal: a program in a pty, keys that are typed, text that is waited for.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

READY = "(ready for a paste)"
"""What prompt_toolkit and readline tell a terminal when they begin to read."""
SECONDS = 30
P = TypeVar("P", bound="Person")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Person:
    """
    Somebody at a terminal of 40 lines, in which a command runs.
    """

    def __init__(self, command: Sequence[str], folder: Path, *, columns: int, environment: Mapping[str, str]) -> None:
        self.keyboard, screen = pty.openpty()
        termios.tcsetwinsize(screen, (40, columns))
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=screen, stdout=screen, stderr=screen, env={**os.environ, **environment},
            preexec_fn=take_terminal,  # noqa: PLW1509 - no thread of this process is in it
        )  # fmt: skip
        os.close(screen)
        self.screen = ""

    def sees(self, *expected: str) -> str:
        """
        Wait until one after the other is shown after what was seen before, whatever colours are between.

        Returns:
            What was shown before the last one.
        """
        before = ""
        for said in expected:
            while said not in self.screen:
                assert select.select([self.keyboard], [], [], SECONDS)[0], (said, self.screen)
                try:
                    chunk = os.read(self.keyboard, 65_536)
                except OSError:
                    chunk = b""
                assert chunk, (said, self.screen)
                chunk = chunk.replace(b"\x1b[?2004h", READY.encode())
                self.screen += CODES.sub("", chunk.decode(errors="replace"))
            before, _, self.screen = self.screen.partition(said)
        return before

    def types(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def leaves(self) -> int:
        try:
            while os.read(self.keyboard, 65_536):
                pass
        except OSError:
            pass
        return self.process.wait(SECONDS)


@contextmanager
def people(sits: Callable[..., P]) -> Iterator[Callable[..., P]]:
    """
    Give what seats somebody, as *sits* does; whoever is still there at the end leaves.
    """
    here: list[P] = []

    def seated(*arguments: Any, **more: Any) -> P:
        here.append(sits(*arguments, **more))
        return here[-1]

    yield seated
    for one in here:
        one.process.kill()
        one.process.wait()
        os.close(one.keyboard)


def take_terminal() -> None:
    import fcntl

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
