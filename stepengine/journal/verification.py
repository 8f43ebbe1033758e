"""``verify``: check a signed journal with the public key."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable

from attrs import frozen

from stepengine.data.faults import SHOWN_CHARS
from stepengine.errors import JournalError, StepEngineError
from stepengine.journal.alterations import JournalScan, find_head, truncate_problems
from stepengine.journal.history import History
from stepengine.journal.line_reader import read_lines
from stepengine.journal.signing import BLOB_BEGIN, MAX_KEY_BYTES, key_fingerprint
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.workspace.file_formats import read_regular_file
from stepengine.workspace.open_files import describe_os_error

TYPE = "ssh-ed25519"
DIGEST_DIGITS = 64
"""SHA-256 as hexadecimal digits."""
SEEN_DIGITS = 12
"""Digits of a digest in a message: enough to find it in a list."""


@frozen
class VerificationResult:
    """
    The result of checking signatures; true if all of the journal is signed and unaltered to its end.

    Attributes:
        name: The name of the journal.
        run: The id of the run, from the head.
        agent: The id of the root's agent, from the head.
        records: The number of records.
        signatures: The number of these that are signatures by one of the keys.
        signed: The number of records covered by the last signature, counted from the first and including the signature.
        key: The fingerprint of the key of the last signature, or ``""``.
        time: The time of the last signature by the signer's clock, in RFC 3339, or ``""``.
        digest: The SHA-256 of all bytes up to the end of the last signature. Store it elsewhere to check later, with *seen*, that
            the journal still starts with these bytes.
        problems: The altered, removed, moved and added records, one sentence each.
        unsigned: The unsigned parts, one sentence each: records after the last signature, records that were unsigned when a run was
            resumed, and an end without a closing signature.
    """

    name: str
    run: str = ""
    agent: str = ""
    records: int = 0
    signatures: int = 0
    signed: int = 0
    key: str = ""
    time: str = ""
    digest: str = ""
    problems: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()

    @property
    def is_unaltered(self) -> bool:
        """Whether no record contradicts a signature; unsigned records may still come from any author."""
        return not self.problems

    def __bool__(self) -> bool:
        return not self.problems and not self.unsigned


def verify(
    journal: JournalLike, keys: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, seen: str = ""
) -> VerificationResult:
    """
    Check a journal against its signatures.

    A journal that was cut right after a closing signature, such as that of a suspended run, shows no sign of the cut. To detect it,
    store the last ``digest`` elsewhere and pass it as *seen*.

    Args:
        journal: The journal, or the path of its file.
        keys: Files of trusted public keys, as ``ssh-keygen`` writes them: ``ssh-ed25519 AAAA... comment``, one per line.
        seen: An earlier ``digest`` of this journal, which must be that of its first bytes.

    Raises:
        JournalError: when the journal cannot be read, or a file has no such key; without the extra ``sign``.
    """
    paths = [keys] if isinstance(keys, str | os.PathLike) else list(keys)
    trusted = [key for path in paths for key in read_public_keys(path)]
    if seen and (len(seen) != DIGEST_DIGITS or not set(seen) <= set("0123456789abcdef")):
        msg = f"the digest must be {DIGEST_DIGITS} hexadecimal digits, not {seen[:SHOWN_CHARS]!r}"
        raise JournalError(msg)
    source = as_journal(journal)
    if not source.is_there():
        raise source.make_missing_error()
    content = source.content()
    scan = JournalScan(trusted)
    scan.scan_lines(content)
    problems, last = scan.problems + _find_read_problems(content, source.name, scan), scan.signature
    if last is None:
        names = ", ".join([key_fingerprint(key) for key in trusted])
        others = sorted({key_fingerprint(key) for key in scan.others})
        by = f"; its signatures are made with {', '.join(others)}" if others else "; it has no signature"
        problems.append(f"no record is signed with {names}{by}")
    if seen and seen not in scan.digests:
        problems.append(
            f"it does not start with the records seen before ({seen[:SEEN_DIGITS]}...): it was cut off, or is another journal"
        )
    head = find_head(content, source.name)
    return VerificationResult(
        name=source.name,
        run="" if head is None else head.run,
        agent="" if head is None else head.agent,
        records=scan.count,
        signatures=len(scan.digests),
        signed=scan.last,
        key="" if last is None else key_fingerprint(last.key),
        time="" if last is None else last.time,
        digest="" if last is None else scan.digests[-1],
        problems=tuple(truncate_problems(problems)),
        unsigned=tuple(scan.describe_unsigned_parts()),
    )


def read_public_keys(path: str | os.PathLike[str]) -> list[str]:
    """
    Return the public keys in a file, as base64 of OpenSSH's form.

    Raises:
        JournalError: when the file cannot be read, or a line is not an ed25519 key.
    """
    try:
        data = read_regular_file(os.path.expanduser(path), MAX_KEY_BYTES)  # noqa: PTH111  (never raises)
    except OSError as error:
        msg = f"the public key {os.fspath(path)!r} cannot be read: {describe_os_error(error)}"
        raise JournalError(msg) from error
    fine = f"it must have lines such as '{TYPE} AAAA... comment', like the .pub file next to a private key"
    if data.startswith(b"-----BEGIN"):
        msg = f"{os.fspath(path)!r} is a private key; verification needs the public key in its .pub file"
        raise JournalError(msg)
    found: list[str] = []
    for line in data.decode("utf-8", "replace").splitlines():
        kind, _, rest = line.strip().partition(" ")
        if not kind or kind.startswith("#"):
            continue
        blob = _decode_base64(rest.strip().partition(" ")[0]) if kind == TYPE else b""
        if not blob.startswith(BLOB_BEGIN) or len(blob) != len(BLOB_BEGIN) + 32:
            msg = f"{os.fspath(path)!r} holds a line that is not a public ed25519 key: {line[:SHOWN_CHARS]!r}; {fine}"
            raise JournalError(msg)
        found.append(base64.b64encode(blob).decode())
    if not found or len(data) > MAX_KEY_BYTES:
        what = "is too long for a key file" if found else "holds no public key"
        msg = f"{os.fspath(path)!r} {what}; {fine}"
        raise JournalError(msg)
    return found


def _decode_base64(text: str) -> bytes:
    """Return the bytes of base64 text, or ``b""`` if it is invalid."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def _find_read_problems(content: bytes, name: str, scan: JournalScan) -> list[str]:
    """Return the reason why a journal cannot be read, unless another problem explains it."""
    if scan.problems or scan.count != scan.last:
        return []
    try:
        History(read_lines(content, name).records, name)
    except StepEngineError as error:
        return [error.message]
    return []
