"""
Signing a journal while it is written: ``SigningKey``, and the chain that a writer continues.

A signature is a record among the others. It holds the SHA-256 of every byte of the journal before it, so that each vouches
for all that the ones before it did; a short mark of each record since the last one, so that what was changed can be named;
and the signature itself, over its own line up to there. Whoever may write the journal but has not the key can make checksums
anew, and no signature. What reads and judges all this stands in ``verification``.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from stepengine.errors import JournalError
from stepengine.journal.records import SIGNED, TAIL_BYTES, Input, Intent, Record, Result, to_compact_json
from stepengine.redaction import GIVEN
from stepengine.workspace.calls import OTHERS_BITS
from stepengine.workspace.open_files import describe_os_error

PURPOSE = b"stepengine signed journal 1\n"
"""Stands before what is signed, so that a signature for something else is none of a journal."""
BLOB_BEGIN = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
"""What stands before the 32 bytes of a public key, as OpenSSH writes it."""
MAX_KEY_BYTES = 16 * 1024
"""An ed25519 key in OpenSSH's form has some 400 bytes; a list of allowed keys may have a hundred."""
SIGNED_RECORDS = 32
"""A signature is a line of its own, so many records share one. A crash leaves at most so many records unsigned."""
SIGNED_SECONDS = 30.0
"""A slow run may take hours for its next 32 records; at most half a minute of it is unsigned."""
MARK_DIGITS = 16
"""64 bits of a digest tell which record was changed; that one was changed is known from the whole digest."""
MAX_MARKS = 50_000
"""Of more records than these nobody is told which one was changed; that one was, always."""
MIN_SECRET_CHARS = 16
"""The last line of a key may be short, and a few letters would be redacted from ordinary texts."""
NAME = "signing-key"

FORM: Final = re.compile(
    rb'(\{"kind":"input","path":"","seq":-1,"at":[0-9]{1,13},"input":\{"type":"signature","key":"([A-Za-z0-9+/]{68})"'
    rb',"records":([0-9]{1,9}),"digest":"([0-9a-f]{64})","marks":"((?:[0-9a-f]{16})*)","found":([0-9]{1,9})'
    rb',"closes":(true|false),"time":"([0-9T:.+Z-]{20,40})"),"sig":"([A-Za-z0-9+/]{86}==)"\},"crc":"[0-9a-f]{8}"\}'
)


class SigningKey:
    """
    A private key by which journals are signed: an ed25519 key in OpenSSH's form, as ``ssh-keygen -t ed25519`` makes it.

    Use it as ``FileJournal("run.jsonl", sign=SigningKey("~/keys/audit"))``. With ``~/keys/audit.pub``, ``verify`` shows whether
    the journal is unaltered. The file is read once, and its content is redacted from all later records of this process. Keep the
    key outside of the folders of agents: an engine refuses tools that work in a folder with the key. A program that an agent may
    run without a sandbox can read this key like any other file of its user.

    Args:
        path: The file of the private key, readable only by its owner, without a passphrase.
        records: The number of records after which a signature follows; 32 by default.
        seconds: The number of seconds after which the next record is followed by a signature; 30 by default. A signature always
            follows when the run ends, is suspended or cancelled.

    Raises:
        JournalError: when the file cannot be read, others may read it, or it has no such key; without the extra ``sign``.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, records: int = SIGNED_RECORDS, seconds: float = SIGNED_SECONDS
    ) -> None:
        if type(records) is not int or records < 1 or not seconds > 0:
            msg = (
                f"records must be a whole number from 1, and seconds a number above 0, not {records!r} and {seconds!r}"
            )
            raise JournalError(msg)
        self.path = Path(os.path.expanduser(path))  # noqa: PTH111  (never raises)
        self.records = records
        self.seconds = seconds
        data = _read_private_key(self.path)
        _register_secret(data)
        self._key = _parse_private_key(self.path, data)
        raw = self._key.public_key().public_bytes_raw()
        for form in (self._key.private_bytes_raw().hex(), base64.b64encode(self._key.private_bytes_raw()).decode()):
            GIVEN.add(form, NAME)
        self.public = base64.b64encode(BLOB_BEGIN + raw).decode()

    def __repr__(self) -> str:
        return f"SigningKey({str(self.path)!r}, {key_fingerprint(self.public)})"

    @property
    def folder_parts(self) -> tuple[str, ...]:
        """The components of the resolved path of the folder that contains the key file."""
        return tuple([part for part in os.path.realpath(self.path.parent).split("/") if part])

    def sign(self, data: bytes) -> str:
        """Return the signature of *data* as base64."""
        return base64.b64encode(self._key.sign(PURPOSE + data)).decode()


def _read_private_key(path: Path) -> bytes:
    """Return the content of a private key file; raise if others can access it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            data = os.read(descriptor, MAX_KEY_BYTES) if stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        msg = f"the signing key {str(path)!r} cannot be read: {describe_os_error(error)}"
        raise JournalError(msg) from error
    if stat.S_ISREG(status.st_mode) and status.st_mode & OTHERS_BITS:
        msg = f"the signing key {str(path)!r} can be read or changed by other users; run `chmod 600` on it"
        raise JournalError(msg)
    return data


def _register_secret(data: bytes) -> None:
    """Register the lines of a key as secrets to be redacted."""
    text = data.decode("ascii", "ignore")
    for line in text.splitlines():
        if len(line) >= MIN_SECRET_CHARS and not line.startswith("-----"):
            GIVEN.add(line, NAME)


def _parse_private_key(path: Path, data: bytes) -> Any:
    """Return the ed25519 key in the content of a file; raise for any other key, a passphrase or a missing package."""
    make = f"make one with `ssh-keygen -t ed25519 -N '' -f {path}`"
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    except ImportError as error:
        raise make_missing_package_error() from error
    try:
        key = load_ssh_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # The library's words may hold a piece of what was no key.
        why = "it has a passphrase" if isinstance(error, TypeError) else "it is not a private key in OpenSSH format"
        msg = f"{str(path)!r} cannot sign a journal: {why}; {make}"
        raise JournalError(msg) from None
    if not isinstance(key, Ed25519PrivateKey):
        msg = f"{str(path)!r} cannot sign a journal: it is a {type(key).__name__}, not an ed25519 key; {make}"
        raise JournalError(msg)
    return key


def make_missing_package_error() -> JournalError:
    """Return the error for the missing extra."""
    return JournalError("signing and verifying journals needs an extra: pip install 'stepengine[sign]'")


def key_fingerprint(public: str) -> str:
    """Return the fingerprint of a public key, given as the base64 of its blob, as ``ssh-keygen -l`` shows it."""
    digest = hashlib.sha256(base64.b64decode(public)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def compute_line_digest(line: bytes) -> str:
    """Return the shortened SHA-256 digest of a line without its newline and checksum: the record's mark in a signature."""
    return hashlib.sha256(line[:-TAIL_BYTES]).hexdigest()[:MARK_DIGITS]


@frozen
class JournalSignature:
    """
    The content of a signature line by any author.

    Attributes:
        words: The signed bytes.
        key: The public key, as base64 of OpenSSH's form.
        records: The number of records before the signature.
        digest: The SHA-256 of all bytes before the signature.
        marks: The marks of the last of these records, in order.
        found: The number of records since the previous signature that were unsigned when this writer opened the journal.
        closes: Whether the writer closed the journal after the signature: another writer wrote the following lines.
        time: The time of signing, by the signer's clock.
        sig: The signature.
    """

    words: bytes
    key: str
    records: int
    digest: str
    marks: tuple[str, ...]
    found: int
    closes: bool
    time: str
    sig: bytes

    @classmethod
    def from_line(cls, line: bytes) -> JournalSignature | None:
        """Parse a line without its newline. Return ``None`` unless it is a signature."""
        found = FORM.fullmatch(line)
        if found is None:
            return None
        words, key, records, digest, marks, before, closes, when, encoded = found.groups()
        sig = base64.b64decode(encoded)
        if base64.b64encode(sig) != encoded:
            return None  # the last letter holds bits that say nothing: another one would pass for it
        text = marks.decode()
        return cls(
            words=words,
            key=key.decode(),
            records=int(records),
            digest=digest.decode(),
            marks=tuple([text[at : at + MARK_DIGITS] for at in range(0, len(text), MARK_DIGITS)]),
            found=int(before),
            closes=closes == b"true",
            time=when.decode(),
            sig=sig,
        )


def is_valid_signature(signature: JournalSignature) -> bool:
    """
    Return whether a signature was made with the key that it names.

    Raises:
        JournalError: without the extra.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise make_missing_package_error() from error
    blob = base64.b64decode(signature.key)
    if not blob.startswith(BLOB_BEGIN):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(blob[len(BLOB_BEGIN) :]).verify(signature.sig, PURPOSE + signature.words)
    except InvalidSignature:
        return False
    return True


class SignatureChain:
    """
    The state of a journal's chain of signatures, from which the next one is made.

    Args:
        key: The key.
        digest: The SHA-256 object of all bytes so far, which is updated.
        records: The number of records so far.
        marks: The marks of the unsigned records at the end.
        at: The latest time of the run.
        is_open: Whether the run has started, since a signature belongs to a run.
        is_closed: Whether the last record is a signature that closes the journal.
    """

    def __init__(
        self,
        key: SigningKey,
        digest: Any = None,
        *,
        records: int = 0,
        marks: Sequence[str] = (),
        at: int = 0,
        is_open: bool = False,
        is_closed: bool = False,
    ) -> None:
        self._key = key
        self._digest = hashlib.sha256() if digest is None else digest
        self._records = records
        self._marks = list(marks)
        self._found = len(marks)
        self._at = at
        self._is_open = is_open
        self._is_closed = is_closed or not records
        self._since = time.monotonic()

    @property
    def has_unsigned_records(self) -> bool:
        """Whether the journal had unsigned records when it was opened."""
        return self._found > 0 and self._is_open

    @property
    def is_signature_due(self) -> bool:
        """Whether a signature must be appended now, because of the number or the age of unsigned records."""
        key = self._key
        many = len(self._marks) >= key.records
        return self._is_open and (many or time.monotonic() - self._since >= key.seconds)

    @property
    def is_unclosed(self) -> bool:
        """Whether the journal needs another signature before it is closed."""
        return self._is_open and not self._is_closed

    def add_record(self, record: Record, lines: Iterable[bytes]) -> None:
        """Add the lines of an appended record to what is signed next."""
        for line in lines:
            self._digest.update(line)
            self._marks.append(compute_line_digest(line[:-1]))
            self._records += 1
        self._is_closed = False
        self._is_open = self._is_open or isinstance(record, Intent)
        if isinstance(record, (Result, Input)):
            self._at = max(self._at, record.at)

    def make_signature_text(self, *, closes: bool) -> str:
        """Sign everything so far, and return the signature as the text of a record; pass its line to ``add_signature``."""
        members = {
            "type": SIGNED,
            "key": self._key.public,
            "records": self._records,
            "digest": self._digest.hexdigest(),
            "marks": "".join(self._marks[-MAX_MARKS:]),
            "found": self._found,
            "closes": closes,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        text = to_compact_json({"kind": "input", "path": "", "seq": -1, "at": self._at, "input": members})[:-2]
        self._is_closed = closes
        return f'{text},"sig":"{self._key.sign(text.encode())}"}}}}'

    def add_signature(self, line: bytes) -> None:
        """Add the line of a signature and start the next span."""
        self._digest.update(line)
        self._records += 1
        self._marks, self._found = [], 0
        self._since = time.monotonic()


def drop_signatures(records: Iterable[Record]) -> list[Record]:
    """Return *records* without signatures, which are invalid in another journal."""
    return [record for record in records if not isinstance(record, Input) or record.input.get("type") != SIGNED]
