"""
``scan``: looks for secrets in files of any kind, as before a commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

from stepengine.errors import DataError
from stepengine.redaction import GIVEN, RedactionRules, Redactor, digest_secret, find_environment_secrets
from stepengine.workspace.file_formats import read_regular_file

SKIPPED_FOLDERS = frozenset({
    ".git", ".hg", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".venv", "__pycache__", "node_modules", "venv",
})  # fmt: skip
MAX_SCANNED_BYTES = 256 * 1024 * 1024
"""The file is held in memory, decoded and searched. No journal of an ordinary run is as large, and a small machine has room for it."""
TEXT_TEST_BYTES = 8 * 1024
"""A file without a NUL character in its first bytes is text. Pictures and archives have one there."""


@frozen
class SecretFinding:
    """
    A text that looks like a secret.

    Attributes:
        path: The file.
        line: The line, from 1; 0 in a file that is not text.
        rule: The kind of secret, or the variable with this value; never the value.
        length: The number of characters.
        digest: The hash for ``allow_secrets``.
    """

    path: str
    line: int
    rule: str
    length: int
    digest: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule} ({self.length} characters)"


def list_files(path: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Yield the files of a folder and its subfolders by name, or the file itself.

    Folders of version control, of environments and of caches are left out. Symbolic links to folders are not followed.

    Raises:
        DataError: when *path* does not exist.
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
) -> Iterator[SecretFinding]:
    """
    Yield the likely secrets in files and folders.

    Args:
        paths: Files and folders.
        allow_secrets: Hashes of values that look like secrets but are not.
        environment: The variables with known secret values; by default the process's environment.

    Raises:
        DataError: when a path does not exist, a file cannot be read, is a pipe or a device, or is longer than 256 MiB.
    """
    rules = RedactionRules(allowed=allow_secrets)
    known = find_environment_secrets(os.environ if environment is None else environment)
    # Patterns in a picture or a document would be found by chance (replay:K12).
    texts, others = [Redactor(known, shapes=shapes, rules=rules, keys=GIVEN) for shapes in (True, False)]
    for path in paths:
        for file in list_files(path):
            yield from _find_secrets_in_file(file, texts, others)


def _find_secrets_in_file(file: Path, text_redactor: Redactor, binary_redactor: Redactor) -> Iterator[SecretFinding]:
    """Yield the secrets in a file; raise ``DataError`` if it cannot be read or is too long."""
    try:
        data = read_regular_file(file, MAX_SCANNED_BYTES)
    except OSError as error:
        msg = f"{str(file)!r} cannot be read: {error.strerror or error}"
        raise DataError(msg) from error
    if len(data) > MAX_SCANNED_BYTES:
        msg = f"{str(file)!r} has more than {MAX_SCANNED_BYTES} bytes, the most that a scan reads"
        raise DataError(msg)
    is_text = b"\0" not in data[:TEXT_TEST_BYTES]
    text = data.decode("utf-8" if is_text else "latin-1", errors="replace")
    line, counted = int(is_text), 0
    for start, end, rule in (text_redactor if is_text else binary_redactor).find_spans(text):
        if is_text:
            line, counted = line + text.count("\n", counted, start), start
        secret = text[start:end]
        yield SecretFinding(str(file), line, rule, len(secret), digest_secret(secret))
