# ruff: noqa: INP001
"""
Write ``docs/demo.svg``, a picture of what ``stepengine demo`` shows at a terminal: ``python docs/make_demo_picture.py``.

The command really runs, in a pseudo-terminal. The picture ends where the run does, and times are left out: they differ.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).with_name("demo.svg")
COLUMNS = 104
ERASED = "\r\x1b[2K"
"""What wipes the line of the present state, before something is shown for good."""
TIMES = re.compile(r", [\d,.]+ m?s(?=\x1b|$)| \| [\d.]+ s(?=\x1b|$)")
FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
LAST = "completed | "


def shown() -> list[str]:
    """Return the lines that the demo shows up to the end of its run, with their colours and without times."""
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, COLUMNS))
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "PYTHONPATH") if name in os.environ}
    with tempfile.TemporaryDirectory() as home:
        demo = subprocess.Popen(
            [sys.executable, "-m", "stepengine.cli", "demo"],
            stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, cwd=home,
            env={**kept, "HOME": home, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(terminal)
        said = _read(screen)
        if demo.wait():
            msg = f"the demo left with {demo.returncode}: {said}"
            raise SystemExit(msg)
    lines = [TIMES.sub("", line.rpartition(ERASED)[2]) for line in said.replace("\x1b[?25l", "").split("\r\n")]
    end = next(number for number, line in enumerate(lines) if LAST in line)
    return lines[: end + 1]


def picture(lines: list[str]) -> str:
    """Return the SVG of these lines; no font is fetched for it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in AnsiDecoder().decode("\n".join(["\x1b[1m$ stepengine demo\x1b[0m", *lines])):
        console.print(line if isinstance(line, Text) else Text(str(line)), soft_wrap=True)
    return console.export_svg(title="stepengine demo", unique_id="demo", code_format=FONT.sub("", CONSOLE_SVG_FORMAT))


def _read(screen: int) -> str:
    chunks: list[bytes] = []
    try:
        while chunk := os.read(screen, 65_536):
            chunks.append(chunk)
    except OSError:
        pass  # how Linux says that nobody writes to a terminal any more
    finally:
        os.close(screen)
    return b"".join(chunks).decode()


if __name__ == "__main__":
    TARGET.write_text(picture(shown()), encoding="utf-8")
