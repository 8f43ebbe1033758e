"""
``code_search`` by ripgrep, or in Python if ripgrep is not installed.

ripgrep receives a fixed command line. It opens files by path, so a folder that is replaced by a link during the search could lead it
out of the root. Therefore each reported line is read again from a file that is opened below the root, and only equal lines are
shown.

In Python, a regular expression can take exponential time and cannot be stopped; ``get_max_search_columns`` rejects such expressions.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from stepengine.data.alike import list_names
from stepengine.data.visible import cut_end
from stepengine.errors import ToolError, WorkspaceLost
from stepengine.tools.bundled.search.hits import SEARCH_FILE_BYTES, FileHits, SearchFlags, read_searchable_lines
from stepengine.tools.bundled.search.ignore import Ignore
from stepengine.tools.conversion import ERROR_CHARS
from stepengine.workspace import calls
from stepengine.workspace.calls import FOLDER, Fd
from stepengine.workspace.environment import MARKER, SUPERVISOR
from stepengine.workspace.patterns import SEARCH_COLUMNS, IgnorePattern, get_max_search_columns
from stepengine.workspace.remote_files import RemoteFile, RemoteSystem
from stepengine.workspace.walk import WalkBudget, walk

if TYPE_CHECKING:
    from stepengine.workspace.root import OpenedEntry, Root

SEARCH_PATTERN_CHARS = 512
"""Far longer than patterns are; Python's search takes time that grows with them."""

SHORT_LINE = 32
"""No accepted pattern takes noticeable time for such a line; for a longer line, the time limit is checked each time."""
LOOKS_AHEAD = re.compile(r"\$|\\[bBZ]|\(\?")
"""Parts of a pattern that make a match depend on the following characters."""
HIDDEN_SEARCHED = (".agents", ".claude", ".github", ".gitlab", ".circleci", ".husky")
"""Hidden folders that are searched when they are directly in the folder of the search."""

# fmt: off
TYPES: dict[str, tuple[str, ...]] = {
    "c": ("*.c", "*.h"), "cpp": ("*.cpp", "*.cc", "*.cxx", "*.hpp", "*.hh", "*.hxx", "*.h"), "cs": ("*.cs",),
    "css": ("*.css", "*.scss"), "go": ("*.go",), "html": ("*.html", "*.htm"), "java": ("*.java",),
    "js": ("*.js", "*.jsx", "*.mjs", "*.cjs", "*.vue"), "json": ("*.json",), "kotlin": ("*.kt", "*.kts"), "lua": ("*.lua",),
    "markdown": ("*.md", "*.markdown"), "md": ("*.md", "*.markdown"), "php": ("*.php",), "py": ("*.py", "*.pyi"),
    "python": ("*.py", "*.pyi"), "ruby": ("*.rb",), "rust": ("*.rs",), "scala": ("*.scala",), "sh": ("*.sh", "*.bash", "*.zsh"),
    "sql": ("*.sql",), "swift": ("*.swift",), "toml": ("*.toml",), "ts": ("*.ts", "*.tsx", "*.mts", "*.cts"),
    "txt": ("*.txt",), "xml": ("*.xml",), "yaml": ("*.yaml", "*.yml"),
}
# fmt: on


def search_in_python(
    root: Root,
    base: OpenedEntry,
    pattern: str,
    flags: SearchFlags,
    *,
    max_per_file: int,
    budget: WalkBudget,
    on_skipped_line: Callable[[int], None],
) -> Generator[FileHits, None, None]:
    """
    Search the files below a folder without ripgrep, and yield those with matches.

    Of each line, the first 2,000 characters are searched, or 300 for a pattern with two unbounded repetitions. If they do not decide
    whether a longer line matches, the line is skipped, and *on_skipped_line* is called with their number.

    Raises:
        ToolError: For a pattern or flag that is not supported without ripgrep.
    """
    test = _LineTest(pattern, flags)
    wanted = _make_file_test(flags)
    ignore = Ignore(root, budget)
    depth = len(base.parts)

    def may_enter_folder(place: tuple[str, ...], _: Fd) -> bool:
        """Return whether a folder is neither hidden, withheld nor ignored."""
        hidden = place[-1].startswith(".") and not (len(place) == depth + 1 and place[-1] in HIDDEN_SEARCHED)
        return not hidden and not root.is_withheld(place) and not ignore.is_ignored(place, is_folder=True)

    with closing(walk(root.may_enter, base.fd, base.parts, budget, may_enter_folder)) as entries:
        for place, entry in entries:
            if entry.is_dir(follow_symlinks=False) or place[-1].startswith(".") or not wanted(place):
                continue
            lines = None
            with contextlib.suppress(OSError):  # it was removed after the folder was listed
                if entry.stat(follow_symlinks=False).st_size <= SEARCH_FILE_BYTES:
                    lines = read_searchable_lines(root, ignore, place)
            if lines is not None:
                found = _find_matching_lines(lines, test, flags, max_per_file, budget, on_skipped_line)
                if found[0]:
                    yield FileHits(place, lines, *found)
            if budget.cut:
                return


def _find_matching_lines(  # noqa: PLR0917  (one call, spelled out)
    lines: list[str],
    test: _LineTest,
    flags: SearchFlags,
    per_file: int,
    budget: WalkBudget,
    on_skipped_line: Callable[[int], None],
) -> tuple[list[tuple[int, int]], int]:
    """Return (line index, line count) of at most *per_file* + 1 matches, and the number of matches before the search stopped."""
    spans: list[tuple[int, int]] = []
    total = 0
    for number in range(len(lines)):
        is_long = len(lines[number]) > SHORT_LINE
        if (is_long or not number % 1000) and not budget.has_time_left():
            break
        matches = test.matches(lines[number])
        if matches is None:
            on_skipped_line(test.columns)
        elif matches is not flags.invert:
            total += 1
            if len(spans) <= per_file:
                spans.append((number, 1))
            elif not flags.count:
                break
            if flags.names_only or total == flags.max_count:
                break
    return spans, total


class _LineTest:
    """
    The test whether a line matches.

    Attributes:
        columns: The number of characters of a line that are searched.
    """

    def __init__(self, pattern: str, flags: SearchFlags) -> None:
        if flags.multiline:
            msg = "-U needs ripgrep, which is not installed here (pip install 'stepengine[search]'); search for one line of it"
            raise ToolError(msg)
        if len(pattern) > SEARCH_PATTERN_CHARS:
            msg = f"without ripgrep a pattern has at most {SEARCH_PATTERN_CHARS} characters"
            raise ToolError(msg)
        source = re.escape(pattern) if flags.fixed else pattern
        self.columns = SEARCH_COLUMNS if flags.fixed else get_max_search_columns(source)
        self._looks_ahead = flags.word or (not flags.fixed and LOOKS_AHEAD.search(source) is not None)
        if flags.word:
            source = rf"(?<!\w)(?:{source})(?!\w)"
        ignore_case = flags.case == "i" or (flags.case == "S" and not any(c.isupper() for c in pattern))
        compiled = re.compile(source, re.IGNORECASE if ignore_case else 0)
        self._is_whole = flags.whole_line
        self._search = compiled.fullmatch if flags.whole_line else compiled.search

    def matches(self, line: str) -> bool | None:
        """Return True if a line matches; ``None`` if it is too long to search whole and its searched part does not decide."""
        if len(line) <= self.columns:
            return self._search(line) is not None
        if self._is_whole:
            return None
        found = self._search(line[: self.columns])
        # The characters after a match at the end of the searched part are not known.
        if found is None or (self._looks_ahead and found.end() == self.columns):
            return None
        return True


def _make_file_test(flags: SearchFlags) -> Callable[[tuple[str, ...]], bool]:
    """Return a function that tests whether the flags select a file, given the components of its path."""
    types, not_types = _get_file_suffixes(flags.types), _get_file_suffixes(flags.not_types)
    globs = [(not g.startswith("!"), IgnorePattern(g.removeprefix("!"))) for g in flags.globs]
    only = any(positive for positive, _ in globs)

    def is_selected(parts: tuple[str, ...]) -> bool:
        """Return whether the types and globs of the flags select a file."""
        if (flags.types and not parts[-1].endswith(types)) or parts[-1].endswith(not_types):
            return False
        verdicts = [positive for positive, pattern in globs if pattern.covers(parts)]
        return verdicts[-1] if verdicts else not only

    return is_selected


def _get_file_suffixes(file_types: tuple[str, ...]) -> tuple[str, ...]:
    """Return the file name suffixes of file types; raise ``ToolError`` for an unknown type."""
    unknown = [n for n in file_types if n not in TYPES]
    if unknown:
        msg = f"the file type {unknown[0]!r} is not known; these are: {list_names(TYPES, unknown[0])}"
        raise ToolError(msg)
    return tuple([glob.removeprefix("*") for n in file_types for glob in TYPES[n]])


POLL_SECONDS = 0.1
"""How late a cancelled search ends: a person hardly notices it."""
OUTPUT_LINE_BYTES = 16 * 1024 * 1024
"""A line of a file of 4 MiB as JSON with escapes."""
EXIT = re.compile(rb"(?:pid [0-9]{1,10}\n)?(?:exit|signal) ([0-9]{1,5})\n")
LINE_END = re.compile(r"\\r\??\\n|\\n|\r?\n|(\[\^?\]?(?:\\.|[^\]\\])*\]?|\\.)", re.DOTALL)
"""A line end in a regular expression; or, in the group, a class or another escape, which must not be changed."""
CHUNK_BYTES = 65_536
"""The size of a pipe on Linux, which no read exceeds."""
FAILED_CODE = 2
"""Ripgrep documents 2 as its exit code for an error."""
FIXED = (
    "--no-config",
    "--no-follow",
    "--crlf",
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


def find_ripgrep(root: Sequence[str], system: RemoteSystem | None = None) -> str | None:
    """Return the path of ``rg``, from next to the interpreter or the search path, never below the root; ``None`` if there is none."""
    if system is not None:
        given, _, _ = system.fetch_variables(("PATH",))
        return system.find_program_outside("rg", given.get("PATH", "").split(os.pathsep), root)
    beside = str(Path(sys.executable).parent)
    for folders in (beside, None):
        found = shutil.which("rg", path=folders)
        if found and tuple(os.path.realpath(found).split("/")[1 : len(root) + 1]) != tuple(root):
            return os.path.realpath(found)
    return None


class Ripgrep:
    """
    One search that the program ripgrep performs.

    Attributes:
        problems: The error output of ripgrep, at most 4,000 characters.
    """

    def __init__(self, program: str, root: Root, base: OpenedEntry) -> None:
        self._program = program
        self._root = root
        self._base = base
        self._errors = b""
        self._code: int | None = None

    @property
    def problems(self) -> str:
        """The error output of ripgrep: its first 4,000 characters."""
        return cut_end(self._errors.decode("utf-8", "replace").strip(), ERROR_CHARS)

    def search(
        self, pattern: str, flags: SearchFlags, per_file: int, budget: WalkBudget
    ) -> Generator[FileHits, None, None]:
        """
        Run ripgrep, and yield the files with verified matches; raise ``ToolError`` if it rejects the pattern or a file type.

        Raises:
            ToolError: If ripgrep rejects the pattern or a file type.
        """
        spans: list[tuple[int, str]] = []
        ignore = Ignore(self._root, budget)
        for event in self._run_and_iterate_events(self._build_ripgrep_command(pattern, flags, per_file), budget):
            kind, data = event.get("type"), event.get("data", {})
            if kind == "begin":
                spans = []
            elif kind == "match":
                spans.append((int(data["line_number"]) - 1, _decode_json_text(data["lines"])))
            elif kind == "end":
                found = self._verify_hits(
                    ignore, _decode_json_text(data["path"]), spans, int(data["stats"]["matched_lines"])
                )
                if found is not None:
                    yield found
        if self._code == FAILED_CODE and self._errors:
            msg = f"the search failed: {self.problems}"
            raise ToolError(msg)

    def _build_ripgrep_command(self, pattern: str, flags: SearchFlags, per_file: int) -> list[str]:
        """Return the command line for a search; globs exclude secret files."""
        switches = {
            "--word-regexp": flags.word,
            "--fixed-strings": flags.fixed,
            "--line-regexp": flags.whole_line,
            "--multiline": flags.multiline,
            "--invert-match": flags.invert,
        }
        pattern, switches["--fixed-strings"] = _adapt_pattern_to_line_ends(pattern, flags)
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
            *[f"./{name}" for name in HIDDEN_SEARCHED if self._has_folder(name)],
        ]

    def _has_folder(self, name: str) -> bool:
        """Return True if the searched folder contains a folder of this name, not a link to one."""
        try:
            fd = calls.open_at(name, FOLDER, self._base.fd)
        except OSError:
            return False
        calls.close(fd)
        return True

    def _verify_hits(self, ignore: Ignore, path: str, spans: list[tuple[int, str]], total: int) -> FileHits | None:
        """Read a file, and return the matches whose reported text equals its text; ``None`` if there are none."""
        names = tuple(path.removeprefix("./").split("/"))
        parts = (*self._base.parts, *names)
        lines = read_searchable_lines(self._root, ignore, parts)
        if lines is None:
            return None
        same = [(first, n) for first, text in spans if (n := _count_lines_if_equal(lines, first, text))]
        return FileHits(parts, lines, same, total) if same else None

    def _run_and_iterate_events(self, command: list[str], budget: WalkBudget) -> Iterator[Any]:
        """Run ripgrep and yield its JSON events, then kill the process and store its exit code."""
        self._code = None
        folder = self._base.fd
        if isinstance(folder, RemoteFile):
            with closing(self._run_remotely_and_iterate_lines(command, folder, budget)) as lines:
                for line in lines:
                    yield json.loads(line)
            return
        process = self._start_process(command, folder)
        try:
            for line in self._iterate_lines(process, budget):
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

    def _run_remotely_and_iterate_lines(
        self, command: list[str], folder: RemoteFile, budget: WalkBudget
    ) -> Generator[bytes, None, None]:
        """Run ripgrep on a remote system and yield its output lines; store its errors and exit code."""
        heard, rest = _RemoteOutput(folder.system.name), b""
        env = {"LC_ALL": "C.UTF-8", MARKER: secrets.token_hex(16)}
        source = Path(SUPERVISOR).read_text(encoding="utf-8")
        given = {"limits": "RLIMIT_CORE=0", "program": command[0], "argv": command, "env": env, "log": None}
        running = folder.system.spawn(folder, heard, script=None, supervisor=source, **given)
        try:
            while self._code is None and budget.has_time_left():
                stream, data = heard.poll()
                running.allow_output(len(data))
                if stream == "err":
                    self._errors = (self._errors + data)[: ERROR_CHARS * 4]
                elif stream == "out":
                    *whole, rest = (rest + data).split(b"\n")
                    _check_line_length(rest)
                    yield from whole
                elif (found := EXIT.fullmatch(data)) is not None:
                    self._code = int(found[1])
        finally:
            running.request_end()

    def _start_process(self, command: list[str], folder_fd: int) -> subprocess.Popen[bytes]:
        """Start ripgrep in the open folder *folder_fd*, in a session of its own."""
        folder = f"/proc/self/fd/{folder_fd}"
        by_path = Path(folder).exists()
        return subprocess.Popen(  # noqa: S603  (a fixed program; no text of the model's can become a flag)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder if by_path else None,
            preexec_fn=None if by_path else functools.partial(os.fchdir, folder_fd),  # noqa: PLW1509  (macOS only)
            env={"LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )

    def _iterate_lines(self, process: subprocess.Popen[bytes], budget: WalkBudget) -> Iterator[bytes]:
        """Yield the output lines of a local process until the time is up; store its error output."""
        if process.stdout is None or process.stderr is None:
            return
        out, err = process.stdout.fileno(), process.stderr.fileno()
        open_ends, rest = {out, err}, b""
        while out in open_ends and budget.has_time_left():
            ready, _, _ = select.select(list(open_ends), [], [], POLL_SECONDS)
            for fd in ready:
                data = os.read(fd, CHUNK_BYTES)
                if not data:
                    open_ends.discard(fd)
                elif fd == err:
                    self._errors = (self._errors + data)[: ERROR_CHARS * 4]
                else:
                    *whole, rest = (rest + data).split(b"\n")
                    yield from whole
        while err in open_ends and not budget.cut and (data := os.read(err, CHUNK_BYTES)):
            self._errors = (self._errors + data)[: ERROR_CHARS * 4]


class _RemoteOutput:
    """A queue for the output of a remote search; the connection limits its size."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[str, bytes]] = SimpleQueue()

    def handle_output(self, stream: str, data: bytes) -> None:
        """Queue output of the search or a message of its supervisor."""
        self._queue.put((stream, data))

    def handle_end(self, stream: str) -> None:
        """Do nothing: the supervisor reports the exit code."""

    def handle_exit(self, code: int | None) -> None:
        """Queue the end of the connection, for which ``poll`` raises ``WorkspaceLost``."""
        self._queue.put(("gone", b""))

    def poll(self) -> tuple[str, bytes]:
        """
        Wait up to 0.1 s for the next chunk, and return (stream name, data), both empty without one; raise an error after a failed start.

        Raises:
            ToolError: If the search could not be started.
            WorkspaceLost: If the connection was lost.
        """
        try:
            stream, data = self._queue.get(timeout=POLL_SECONDS)
        except Empty:
            return "", b""
        if stream == "gone":
            msg = f"the workspace {self._name} was lost in the middle of a search"
            raise WorkspaceLost(msg)
        if stream == "line" and data.startswith(b"errno"):
            msg = "the search failed: its program cannot be executed there"
            raise ToolError(msg)
        return stream, data


def _check_line_length(rest: bytes) -> None:
    """Raise ``ToolError`` if an unfinished output line has more than 16 MiB."""
    if len(rest) > OUTPUT_LINE_BYTES:
        msg = f"the search there printed a line of more than {OUTPUT_LINE_BYTES:,} bytes"
        raise ToolError(msg)


def _adapt_pattern_to_line_ends(pattern: str, flags: SearchFlags) -> tuple[str, bool]:
    """Return (pattern, whether it is plain text); in a pattern for several lines, line ends also match CRLF."""
    if not flags.multiline:
        return pattern, flags.fixed
    if not flags.fixed:
        # A line end among the characters of a class stays as it is: there it is one character.
        return LINE_END.sub(lambda match: match[1] or "\\r?\\n", pattern), False
    lines = pattern.replace("\r\n", "\n").split("\n")
    return (pattern, True) if len(lines) == 1 else ("\\r?\\n".join(map(_escape_regex, lines)), False)


def _escape_regex(text: str) -> str:
    """Return a regular expression of ripgrep that matches exactly *text*."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", lambda match: "\\" + match[0], text)


def _decode_json_text(value: Any) -> str:
    """Return the text of a ripgrep JSON value, which has ``text`` or, if it is not UTF-8, base64 ``bytes``."""
    if "text" in value:
        return str(value["text"])
    return base64.b64decode(value["bytes"]).decode("utf-8", "surrogateescape")


def _count_lines_if_equal(lines: list[str], first: int, reported_text: str) -> int:
    """Return the number of lines in the reported text; 0 if they differ from *lines* from the index *first* on."""
    reported = [line.removesuffix("\r") for line in reported_text.removesuffix("\n").split("\n")]
    found = lines[first : first + len(reported)]
    if first == 0 and found:
        found[0], reported[0] = found[0].removeprefix("\ufeff"), reported[0].removeprefix("\ufeff")
    return len(reported) if found == reported else 0
