"""
``scan``: looks for secrets in files of any kind, as before a commit (replay K5, K6, K11).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from stepengine.errors import DataError
from stepengine.journal.redaction import SHAPE, Redactor, known_in_environment, shape_name
from stepengine.journal.redaction_rules import Rules, digest_of

__all__ = ("Leak", "files_under", "scan")

SKIPPED_FOLDERS = frozenset({
    ".git", ".hg", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".venv", "__pycache__", "node_modules", "venv",
})  # fmt: skip
MAX_BYTES = 256 * 1024 * 1024
# In JSON and source, an escape such as \n would put a letter directly before a key and hide where it begins. A blank of
# the same length keeps every line and column where it is.
ESCAPE = re.compile(r"\\[nrt\"/\\]")


@attrs.frozen
class Leak:
    """
    Something that looks like a secret.

    Attributes:
        path: The file.
        line: The line, from 1; 0 in a file that is no text.
        rule: What it looks like, or the variable whose value it is; never the value.
        length: How many characters it has.
        digest: What ``allow_secrets`` would list for it.
    """

    path: str
    line: int
    rule: str
    length: int
    digest: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule} ({self.length} characters)"


def files_under(path: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Give the files of a folder and its subfolders in the order of their names, or the file itself.

    Folders of version control, of environments and of caches are left out, and so are symbolic links.

    Raises:
        DataError: when there is nothing at *path*.
    """
    start = Path(path)
    if not start.exists():
        msg = f"there is no {str(start)!r} to scan; give files or folders"
        raise DataError(msg)
    if not start.is_dir():
        yield start
        return
    for folder, names, files in os.walk(start):
        names[:] = sorted([name for name in names if name not in SKIPPED_FOLDERS])
        yield from (Path(folder, name) for name in sorted(files) if Path(folder, name).is_file())


def scan(
    paths: Iterable[str | os.PathLike[str]],
    *,
    allow_secrets: Iterable[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Leak]:
    """
    Give what looks like a secret in files and folders, in their order.

    Args:
        paths: Files and folders.
        allow_secrets: Hashes of values that look like secrets and are none (replay K9).
        environment: Where known values come from; the process's environment by default.

    Raises:
        DataError: when a path does not exist, a file cannot be read, or is longer than 256 MiB.
    """
    rules = Rules(allowed=allow_secrets)
    known = Redactor(known_in_environment(environment), shapes=False, rules=rules)
    for path in paths:
        for file in files_under(path):
            yield from _leaks(file, known, rules.allowed)


def _leaks(file: Path, known: Redactor, allowed: frozenset[str]) -> Iterator[Leak]:
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            msg = f"{str(file)!r} has {size} bytes; at most {MAX_BYTES} are scanned"
            raise DataError(msg)
        data = file.read_bytes()
    except OSError as error:
        msg = f"{str(file)!r} cannot be read: {error.strerror or error}"
        raise DataError(msg) from error
    is_text = b"\0" not in data[:8192]
    text = data.decode("utf-8" if is_text else "latin-1", errors="replace")
    found: dict[tuple[int, int], tuple[str, str]] = {}
    for secret, name in known.secrets(text).items():
        for match in re.finditer(re.escape(secret), text):
            found.setdefault(match.span(), (secret, name))
    # Patterns in a picture or a document would be found by chance (replay K12).
    for match in SHAPE.finditer(ESCAPE.sub("  ", text)) if is_text else ():
        secret = text[match.start() : match.end()]
        if digest_of(secret) not in allowed:
            found.setdefault(match.span(), (secret, shape_name(match)))
    for (start, _), (secret, rule) in sorted(found.items()):
        line = text.count("\n", 0, start) + 1 if is_text else 0
        yield Leak(str(file), line, rule, len(secret), digest_of(secret))
