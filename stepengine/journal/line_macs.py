"""
Keyed digests on the lines of a journal, by which a user's own journal is known again, also after its run was killed.

The key is in the user's state folder, and made once. The digest of a line covers every line before it: who has not the key cannot add,
change or reorder what comes before a line that has a valid one. It cannot tell that lines are missing at the end, as after a crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from stepengine.errors import JournalError
from stepengine.journal.journal_files import NO_LINK
from stepengine.workspace.atomic import create_folder_durably
from stepengine.workspace.calls import OTHERS_BITS, OWNER_FILE_MODE
from stepengine.workspace.user_state import get_user_state_folder, is_writable_only_by_user

KEY_FILE = "journal-key"
KEY_BYTES = 32
"""256 bits cannot be guessed."""
MAC_BYTES = 16
"""128 bits cannot be guessed, and 32 digits keep a line readable."""
TAIL_FORM: Final = re.compile(rb'(?:,"mac":"([0-9a-f]{32})")?,"crc":"[0-9a-f]{8}"\}\n?\Z')
MAX_TAIL_BYTES = 61
"""The length of both members, the closing brace and the newline."""

HEAD_BEGIN = b'{"kind":"head",'

PIECE_BYTES = 1 << 20
"""Hundreds of ordinary lines for one call of a store."""

_keys: dict[Path, bytes] = {}


class MacChain:
    """
    The state of the digests of one journal, from which the next one is made.

    Args:
        key: The user's key.
    """

    __slots__ = ("_key", "_last")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last = bytes(MAC_BYTES)

    def add_line(self, body: bytes) -> str:
        """Add a line and return its digest; *body* is the line without digest, checksum and closing brace."""
        digest = hashlib.blake2b(self._last, key=self._key, digest_size=MAC_BYTES)
        digest.update(body)
        self._last = digest.digest()
        return self._last.hex()

    def add_and_verify_lines(self, lines: Iterable[bytes]) -> bool:
        """
        Add the lines of a journal up to one that is torn; return whether the last one is this user's.

        It is if it has a valid digest, or is a signature behind such a line by a key that lines with a digest name.
        """
        is_valid, signatures = False, _Signatures()
        for line in lines:
            tail = TAIL_FORM.search(line, max(0, len(line) - MAX_TAIL_BYTES))
            if tail is None:
                break
            expected = self.add_line(line[: tail.start()])
            if tail[1] is None:
                is_valid = is_valid and signatures.add_and_verify(line)
            elif is_valid := hmac.compare_digest(tail[1], expected.encode()):
                signatures.add_verified_line(line)
            signatures.digest.update(line)
        return is_valid


class _Signatures:
    """
    The signatures of one journal. They have no keyed digest; only their key identifies the author.

    Attributes:
        digest: The SHA-256 of the lines so far.
    """

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._keys = set[str]()
        self._new = set[str]()

    def add_verified_line(self, line: bytes) -> None:
        """Add the keys of signatures before a line with a valid digest, and the key in a head, to the trusted ones."""
        self._keys |= self._new
        self._new.clear()
        if line.startswith(HEAD_BEGIN) and (key := json.loads(line).get("signed")):
            self._keys.add(key)

    def add_and_verify(self, line: bytes) -> bool:
        """Add a line without a digest; return whether it signs the lines before it by a key of the lines with one."""
        # Loaded for signed journals only.
        from stepengine.journal.signing import JournalSignature, is_valid_signature

        signature = JournalSignature.from_line(line.removesuffix(b"\n"))
        if signature is None:
            return False
        self._new.add(signature.key)
        is_of_lines = signature.digest == self.digest.hexdigest() and signature.key in self._keys
        try:
            return is_of_lines and is_valid_signature(signature)
        except JournalError:
            return False  # without the extra that verifies, it is unknown, which costs a question


def split_into_lines(read_piece: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """Yield the lines of a journal, read in pieces by *read_piece*; see ``Journal.read_piece``."""
    at, rest = 0, b""
    while piece := read_piece(at, PIECE_BYTES):
        at += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        yield from [line + b"\n" for line in lines]
    if rest:
        yield rest


def are_written_by_user(lines: Iterable[bytes]) -> bool:
    """Return whether this user's runs wrote these lines of a journal, all of them from the first one on."""
    key = load_or_create_mac_key(creates_missing=False)
    return key is not None and MacChain(key).add_and_verify_lines(lines)


def load_or_create_mac_key(*, creates_missing: bool = True) -> bytes | None:
    """
    Return this user's key, created if missing; ``None`` without a state folder that only this user owns and can write.

    The key is read once for each process and folder.

    Args:
        creates_missing: Whether to create a missing key.
    """
    folder = get_user_state_folder()
    if folder is None:
        return None
    try:
        if creates_missing:
            create_folder_durably(folder, 0o700)
        # Asked each time, as the folder may have been opened to others since the key was read.
        if not is_writable_only_by_user(folder):
            return None
        if folder not in _keys:
            key = _read_or_create_key(folder / KEY_FILE, creates_missing=creates_missing)
            if key is None:
                return None
            _keys[folder] = key
        return _keys[folder]
    except OSError:
        return None  # no journal is known then, which costs a question


def _read_or_create_key(path: Path, *, creates_missing: bool) -> bytes | None:
    """Return the key in a file, created if it is missing and *creates_missing*; ``None`` for no key or an unsafe file."""
    try:
        return _read_key(path)
    except FileNotFoundError:
        if not creates_missing:
            return None
    # The name comes with the whole content, and another process that was first keeps its key.
    new = path.with_name(f".{KEY_FILE}.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | NO_LINK, OWNER_FILE_MODE)
    try:
        try:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink()
    return _read_key(path)


def _read_key(path: Path) -> bytes | None:
    """Return the key in a file that only this user can read, else ``None``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | NO_LINK)
    try:
        status = os.fstat(descriptor)
        is_private = stat.S_ISREG(status.st_mode) and not status.st_mode & OTHERS_BITS
        data = os.read(descriptor, KEY_BYTES + 1) if is_private and status.st_uid == os.geteuid() else b""
    finally:
        os.close(descriptor)
    return data if len(data) == KEY_BYTES else None
