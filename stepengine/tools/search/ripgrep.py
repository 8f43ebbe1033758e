"""
``code_search`` by ripgrep: a fixed command line, and every line that it reports is read again by our own walk.

ripgrep walks by path, so a folder that is swapped for a link while it runs could lead it out of the root. What is shown
is therefore not its output but the lines of files that the walk has opened, where they are the same.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.errors import ToolError
from stepengine.tools.conversion import ERROR_CHARS
from stepengine.tools.files.walk import Budget
from stepengine.tools.search.fallback import HIDDEN_SEARCHED
from stepengine.tools.search.flags import Flags
from stepengine.tools.search.hits import SEARCH_FILE_BYTES, FileHits, Sources
from stepengine.tools.search.ignore import Ignore

if TYPE_CHECKING:
    from stepengine.tools.files.root import Opened, Root

__all__ = ("Ripgrep", "find_ripgrep")


POLL_SECONDS = 0.1
CHUNK = 65_536
FAILED = 2
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FIXED = (
    "--no-config",
    "--no-follow",
    "--json",
    "--max-columns=2000",
    f"--max-filesize={SEARCH_FILE_BYTES}",
    "--regex-size-limit=10M",
    "--sort=path",
    "--no-require-git",
    "--no-ignore-parent",
    "--no-ignore-dot",
    "--no-ignore-global",
    "--no-ignore-exclude",
    "--no-messages",
)


def find_ripgrep(root: Sequence[str]) -> str | None:
    """Return the path of ``rg``, beside the interpreter or on the search path, unless it lies below the root."""
    beside = str(Path(sys.executable).parent)
    for folders in (beside, None):
        found = shutil.which("rg", path=folders)
        if found and tuple(os.path.realpath(found).split("/")[1 : len(root) + 1]) != tuple(root):
            return os.path.realpath(found)
    return None


class Ripgrep:
    """
    One search.

    Attributes:
        problems: What ripgrep said on its error stream, at most 4,000 characters.
    """

    def __init__(self, program: str, root: Root, base: Opened) -> None:
        self._program = program
        self._root = root
        self._base = base
        self._errors = b""
        self._code: int | None = None

    @property
    def problems(self) -> str:
        """What ripgrep said on its error stream, at most 4,000 characters."""
        return self._errors[: ERROR_CHARS * 4].decode("utf-8", "replace")[:ERROR_CHARS].strip()

    def hits(self, pattern: str, flags: Flags, per_file: int, budget: Budget) -> Generator[FileHits, None, None]:
        """
        Yield the files with matches, as the walk sees them.

        Raises:
            ToolError: when ripgrep refuses the pattern or a file type.
        """
        spans: list[tuple[int, str]] = []
        sources = Sources(self._root, Ignore(self._root, budget))
        for event in self._events(self._command(pattern, flags, per_file), budget):
            kind, data = event.get("type"), event.get("data", {})
            if kind == "begin":
                spans = []
            elif kind == "match":
                spans.append((int(data["line_number"]) - 1, _text(data["lines"])))
            elif kind == "end":
                found = self._verified(sources, _text(data["path"]), spans, int(data["stats"]["matched_lines"]))
                if found is not None:
                    yield found
        if self._code == FAILED and self._errors:
            msg = f"the search failed: {self.problems}"
            raise ToolError(msg)

    def _command(self, pattern: str, flags: Flags, per_file: int) -> list[str]:
        switches = {
            "--word-regexp": flags.word,
            "--fixed-strings": flags.fixed,
            "--line-regexp": flags.whole_line,
            "--multiline": flags.multiline,
            "--invert-match": flags.invert,
        }
        limit = flags.max_count if flags.count else 1 if flags.names_only else per_file + 1
        secrets = () if self._root.secrets.has_exceptions else self._root.secrets.patterns
        return [
            self._program,
            *FIXED,
            *([f"-{flags.case}"] if flags.case else []),
            *[name for name, is_set in switches.items() if is_set],
            *[f"--type={t}" for t in flags.types],
            *[f"--type-not={t}" for t in flags.not_types],
            *[f"--glob={g}" for g in flags.globs],
            *[f"--iglob=!{p if '/' not in p.strip('/') else '**/' + p}" for p in secrets],
            *([f"--max-count={limit}"] if limit else []),
            f"--regexp={pattern}",
            "--",
            ".",
            *[f"./{name}" for name in HIDDEN_SEARCHED if self._is_folder(name)],
        ]

    def _is_folder(self, name: str) -> bool:
        try:
            fd = os.open(name, FOLDER, dir_fd=self._base.fd)
        except OSError:
            return False
        os.close(fd)
        return True

    def _verified(self, sources: Sources, path: str, spans: list[tuple[int, str]], total: int) -> FileHits | None:
        """Return the matches whose lines our own walk finds in the same place."""
        names = tuple(path.removeprefix("./").split("/"))
        parts = (*self._base.parts, *names)
        lines = sources.lines(parts)
        if lines is None:
            return None
        same = [(first, n) for first, text in spans if (n := _same(lines, first, text))]
        return FileHits(parts, lines, same, total) if same else None

    def _events(self, command: list[str], budget: Budget) -> Iterator[Any]:
        self._code = None
        process = self._started(command)
        try:
            for line in self._lines(process, budget):
                yield json.loads(line)
            if not budget.cut:
                self._code = process.wait(timeout=5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _started(self, command: list[str]) -> subprocess.Popen[bytes]:
        folder = f"/proc/self/fd/{self._base.fd}"
        by_path = Path(folder).exists()
        return subprocess.Popen(  # noqa: S603  (a fixed program; no text of the model's can become a flag)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder if by_path else None,
            preexec_fn=None if by_path else functools.partial(os.fchdir, self._base.fd),  # noqa: PLW1509  (macOS only)
            env={"LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )

    def _lines(self, process: subprocess.Popen[bytes], budget: Budget) -> Iterator[bytes]:
        """Yield the lines of the output for as long as there is time."""
        if process.stdout is None or process.stderr is None:
            return
        out, err = process.stdout.fileno(), process.stderr.fileno()
        open_ends, rest = {out, err}, b""
        while out in open_ends and budget.check_time():
            ready, _, _ = select.select(list(open_ends), [], [], POLL_SECONDS)
            for fd in ready:
                data = os.read(fd, CHUNK)
                if not data:
                    open_ends.discard(fd)
                elif fd == err:
                    self._errors = (self._errors + data)[: ERROR_CHARS * 4]
                else:
                    *whole, rest = (rest + data).split(b"\n")
                    yield from whole
        while err in open_ends and not budget.cut and (data := os.read(err, CHUNK)):
            self._errors = (self._errors + data)[: ERROR_CHARS * 4]


def _text(value: Any) -> str:
    if "text" in value:
        return str(value["text"])
    return base64.b64decode(value["bytes"]).decode("utf-8", "surrogateescape")


def _same(lines: list[str], first: int, text: str) -> int:
    """Return over how many lines a reported text goes, or 0 when they are not what the walk found."""
    reported = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    found = lines[first : first + len(reported)]
    if first == 0 and found:
        found[0], reported[0] = found[0].removeprefix("\ufeff"), reported[0].removeprefix("\ufeff")
    return len(reported) if found == reported else 0
