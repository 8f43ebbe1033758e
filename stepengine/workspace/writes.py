"""
The data for undoing a tool's write: ``FileWrite`` and ``OldFile``, and their form in a journal.

A record names the root by a hash and the file by its path below it, so no journal reveals the location of a folder.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from stepengine.data.json import compact
from stepengine.errors import DataError

UNDO_BYTES = 4 * 1024 * 1024
"""The largest file that a tool writes, so that each write can be undone; a record of a journal has room for it."""

LARGE = "large"
SECRET = "secret"  # noqa: S105  (a reason, not a password)


def content_hash(data: bytes) -> str:
    """Return the SHA-256 of a file's content, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def root_id(real: tuple[str, ...]) -> str:
    """Return the id of a root folder in records: 16 hex digits of the hash of its real path."""
    return content_hash("/".join(real).encode("utf-8", "surrogateescape"))[:16]


@frozen
class OldFile:
    """
    A file as it was before a write.

    Attributes:
        hash: The hash of its content; ``""`` when it was too large to be read.
        mode: Its permission bits.
        content: Its content; ``None`` when it is not kept.
        lost: Why it is not kept: ``"large"`` for more than 4 MiB; ``"secret"`` for content that no journal may hold, or that does
            not match its hash.
    """

    hash: str
    mode: int
    content: bytes | None = None
    lost: str = ""

    @classmethod
    def from_data(cls, data: bytes | None, mode: int) -> OldFile:
        """Return the record of a file with these permission bits; *data* is ``None`` if it is too large to read."""
        if data is None or len(data) > UNDO_BYTES:
            return cls("" if data is None else content_hash(data), mode & 0o777, None, LARGE)
        return cls(content_hash(data), mode & 0o777, data)

    def without_content(self) -> OldFile:
        """Return a copy without the content, for files that no journal may contain."""
        return OldFile(self.hash, self.mode, None, SECRET)


@frozen(kw_only=True)
class FileWrite:
    """
    One write of a file by a tool.

    Attributes:
        root: The id of the root folder; see ``root_id``.
        path: The file, relative to the root.
        before: The file before the write; ``None`` if it did not exist.
        after: The hash of the new content; ``None`` if the file was deleted.
        folders: The folders that were created for the file, outermost first.
        doubtful: Whether *before* is uncertain: a process ended during the call, which was then repeated.
    """

    root: str
    path: str
    before: OldFile | None
    after: str | None
    folders: tuple[str, ...] = ()
    doubtful: bool = False

    @property
    def hash_before(self) -> str | None:
        """The hash of the file before the write; ``None`` if it did not exist."""
        return None if self.before is None else self.before.hash

    def to_json(self) -> dict[str, Any]:
        """Return the write as JSON."""
        form: dict[str, object] = {"root": self.root, "path": self.path, "before": None, "after": self.after}
        if self.before is not None:
            old = self.before
            form["before"] = {"hash": old.hash, "mode": old.mode, **_content_to_json(old)}
        form |= {"folders": list(self.folders)} if self.folders else {}
        return form | ({"doubtful": True} if self.doubtful else {})

    @classmethod
    def from_json(cls, encoded: Any) -> FileWrite:
        """
        Return the write that JSON describes.

        Raises:
            DataError: when the JSON is invalid.
        """
        try:
            old, after = encoded["before"], encoded["after"]
            made = cls(
                root=_require_text(encoded["root"]),
                path=_require_text(encoded["path"]),
                before=None if old is None else _old_file_from_json(old),
                after=None if after is None else _require_text(after),
                folders=tuple([_require_text(folder) for folder in encoded.get("folders", ())]),
                doubtful=encoded.get("doubtful", False) is True,
            )
        except (KeyError, TypeError, AttributeError, ValueError, binascii.Error) as error:
            msg = f"this is not a valid file write: {type(error).__name__}: {error}"
            raise DataError(msg) from None
        return made


def _content_to_json(old: OldFile) -> dict[str, object]:
    """Return the content as text if JSON makes it at most twice as long, else as base64; without content, the reason."""
    if old.content is None:
        return {"lost": old.lost}
    try:
        text = old.content.decode()
    except UnicodeDecodeError:
        text = None
    if text is not None and len(compact(text)) <= 2 * len(text) + 2:
        return {"text": text}
    return {"base64": base64.b64encode(old.content).decode()}


def _old_file_from_json(encoded: Mapping[str, object]) -> OldFile:
    """Return the file before a write; drop content that is too large or does not match its hash, raise ``ValueError`` for invalid JSON."""
    mode = encoded["mode"]
    if type(mode) is not int or not 0 <= mode <= 0o777:  # noqa: PLR2004  (permission bits)
        msg = f"{mode!r} is not a set of permission bits from 0 to 0o777"
        raise ValueError(msg)
    digest, content = _require_text(encoded["hash"]), None
    given = _require_text(encoded.get("text", encoded.get("base64", "")))
    if len(given) > 2 * UNDO_BYTES:
        return OldFile(digest, mode, None, LARGE)
    if "text" in encoded:
        content = given.encode()
    elif "base64" in encoded:
        content = base64.b64decode(given, validate=True)
    if content is None:
        return OldFile(digest, mode, None, str(encoded.get("lost", "")))
    if len(content) > UNDO_BYTES or content_hash(content) != digest:
        return OldFile(digest, mode, None, LARGE if len(content) > UNDO_BYTES else SECRET)
    return OldFile(digest, mode, content)


def _require_text(value: object) -> str:
    """Return *value* if it is a string; raise ``TypeError`` for any other."""
    if not isinstance(value, str):
        msg = f"{value!r} must be a string"
        raise TypeError(msg)
    return value
