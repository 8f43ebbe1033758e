# ruff: noqa: INP001
"""
Write pictures of a terminal: ``python docs/make_demo_picture.py``.

``docs/demo.svg`` shows ``stepengine demo``. The command really runs, in a pseudo-terminal. The picture ends where the run does, and times are
left out: they differ. ``docs/pictures/chat-approval.svg`` shows a question about a payment, as chat asks it.
"""

from __future__ import annotations

import asyncio
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from stepengine.cli import ConsoleRenderer
from tests.permissions.test_origins_on_surfaces import bank

TARGET = Path(__file__).with_name("demo.svg")
APPROVAL = TARGET.with_name("pictures") / "chat-approval.svg"
PROMPT = "Pay the 98.70 of bill.txt."
COLUMNS = 104
CURSOR = re.compile(r"(\r|\n|\x1b\[\d*A|\x1b\[2K|\x1b\[\?25[hl])")
"""What moves the cursor, wipes its line, or hides it."""
TIMES = re.compile(r", [\d,.]+ m?s(?=\x1b|$)| \| [\d.]+ s(?=\x1b|$)")
FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
LAST = "completed | "


def run_demo() -> list[str]:
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
    lines = _left_on_screen(said)
    end = next(number for number, line in enumerate(lines) if LAST in line)
    return lines[: end + 1]


class Terminal(io.StringIO):
    """A terminal that shows colours."""

    def isatty(self) -> bool:  # noqa: D102 - as the base says
        return True


async def asked() -> list[str]:
    """Return the lines that chat shows of a payment whose recipient comes from a file, which a person refuses."""
    out = Terminal()
    async with bank() as engine, engine.start("clerk", PROMPT) as handle:
        await ConsoleRenderer(handle, input=io.StringIO("n the account is new\n"), output=out).run()
    return [f"> {PROMPT}", *_left_on_screen(out.getvalue())]


def picture(lines: list[str], title: str = "stepengine demo") -> str:
    """Return the SVG of these lines; no font is fetched for it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in AnsiDecoder().decode("\n".join([f"\x1b[1m$ {title}\x1b[0m", *lines])):
        console.print(line if isinstance(line, Text) else Text(str(line)), soft_wrap=True)
    return console.export_svg(title=title, unique_id=title.split()[1], code_format=FONT.sub("", CONSOLE_SVG_FORMAT))


def _left_on_screen(said: str) -> list[str]:
    """
    Return the lines that a terminal shows in the end, without times.

    A line of the present state, or of a text that streams, is drawn as often as there is time for, and wiped before the next one.
    """
    lines, at = [""], 0
    for part in CURSOR.split(said):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part.startswith("\x1b[") and part.endswith("A"):
            at -= int(part[2:-1] or 1)
        elif CURSOR.fullmatch(part) is None:
            lines[at] += part
    return [TIMES.sub("", line) for line in (lines if lines[-1] else lines[:-1])]


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
    TARGET.write_text(picture(run_demo()), encoding="utf-8")
    chat = "stepengine chat clerk --guard injection"
    APPROVAL.write_text(picture(asyncio.run(asked()), chat), encoding="utf-8")
