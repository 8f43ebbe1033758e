"""Whether a signed journal is as it was written: ``verify``, for whoever has the public key."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from stepengine.errors import JournalError, StepEngineError
from stepengine.journal.altered import JournalScan, head_of, listed
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.history import History
from stepengine.journal.reading import read_lines
from stepengine.journal.signing import BLOB_BEGIN, MAX_KEY_BYTES, fingerprint_of
from stepengine.workspace.open_files import said

__all__ = ("Verified", "public_keys", "verify")

TYPE = "ssh-ed25519"
DIGEST_DIGITS = 64
"""SHA-256 as hexadecimal digits."""


@frozen
class Verified:
    """
    What signatures say of a journal; true when all of it is signed, as it was written, to its end.

    Attributes:
        name: The journal.
        run: The id of its run, as its head says.
        agent: The agent of that run.
        records: How many records it holds.
        signatures: How many of these are signatures by one of the keys.
        signed: How many records, from the first one on, the last signature vouches for, itself among them.
        key: The fingerprint of the key of that signature; ``""`` where there is none.
        time: When that was made, by the clock of who signed, in RFC 3339; ``""`` where there is none.
        digest: The SHA-256 of every byte up to its end: who keeps it can ask later whether the journal still begins so.
        problems: What was altered, removed, moved or added, one sentence each, which names the record.
        unsigned: What nobody vouches for, one sentence each: what stands behind the last signature, what stood unsigned when a
            run was resumed, and an end without a signature that closes it.
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
        """Whether nothing contradicts a signature; what is unsigned may be anybody's."""
        return not self.problems

    def __bool__(self) -> bool:
        return not self.problems and not self.unsigned


def verify(
    journal: JournalLike, keys: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, seen: str = ""
) -> Verified:
    """
    Look whether a journal is as it was signed.

    A journal that was cut right behind a signature that closes it, as that of a suspended run has one, is what was once the whole
    journal, and nothing in it shows the cut. Keep the ``digest`` that was seen last elsewhere, and give it as *seen*.

    Args:
        journal: The journal, or the path of its file.
        keys: Files of public keys that are trusted, as ``ssh-keygen`` writes them: ``ssh-ed25519 AAAA... comment``, one in a line.
        seen: A ``digest`` of this journal from an earlier time: it has to begin so.

    Raises:
        JournalError: when it cannot be read, or a file holds no such key; without the extra ``sign``.
    """
    paths = [keys] if isinstance(keys, str | os.PathLike) else list(keys)
    trusted = [key for path in paths for key in public_keys(path)]
    if seen and (len(seen) != DIGEST_DIGITS or not set(seen) <= set("0123456789abcdef")):
        msg = f"the digest that was seen is {DIGEST_DIGITS} hexadecimal digits, not {seen[:80]!r}"
        raise JournalError(msg)
    source = as_journal(journal)
    if not source.is_there():
        raise source.missing()
    content = source.content()
    look = JournalScan(trusted)
    look.at_all(content)
    problems = look.problems + _unreadable(content, source.name, look)
    if not look.last:
        names = ", ".join([fingerprint_of(key) for key in trusted])
        others = sorted({fingerprint_of(key) for key in look.others})
        by = f"; its signatures are by {', '.join(others)}" if others else "; it holds no signature"
        problems.append(f"nothing in it is signed by {names}{by}")
    if seen and seen not in look.digests:
        problems.append(
            f"it does not begin with what was seen before ({seen[:12]}...): it was cut off, or is another journal"
        )
    head = head_of(content, source.name)
    return Verified(
        name=source.name,
        run="" if head is None else head.run,
        agent="" if head is None else head.agent,
        records=look.count,
        signatures=look.signatures,
        signed=look.last,
        key=look.key,
        time=look.time,
        digest=look.digest,
        problems=tuple(listed(problems)),
        unsigned=tuple(look.unsigned()),
    )


def public_keys(path: str | os.PathLike[str]) -> list[str]:
    """
    Return the public keys in a file, as base64 of OpenSSH's form.

    Raises:
        JournalError: when it cannot be read, or a line of it is no ed25519 key.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        msg = f"the public key {os.fspath(path)!r} cannot be read: {said(error)}"
        raise JournalError(msg) from error
    fine = f"it holds lines such as '{TYPE} AAAA... comment', as the .pub file beside a private key does"
    if data.startswith(b"-----BEGIN"):
        msg = f"{os.fspath(path)!r} is a private key, which no one needs who verifies; give the one in its .pub file"
        raise JournalError(msg)
    found: list[str] = []
    for line in data.decode("utf-8", "replace").splitlines():
        kind, _, rest = line.strip().partition(" ")
        if not kind or kind.startswith("#"):
            continue
        blob = _blob(rest.strip().partition(" ")[0]) if kind == TYPE else b""
        if not blob.startswith(BLOB_BEGIN) or len(blob) != len(BLOB_BEGIN) + 32:
            msg = f"{os.fspath(path)!r} holds a line that is not a public ed25519 key: {line[:40]!r}; {fine}"
            raise JournalError(msg)
        found.append(base64.b64encode(blob).decode())
    if not found or len(data) > MAX_KEY_BYTES:
        what = "is too long for a file of keys" if found else "holds no public key"
        msg = f"{os.fspath(path)!r} {what}; {fine}"
        raise JournalError(msg)
    return found


def _blob(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def _unreadable(content: bytes, name: str, look: JournalScan) -> list[str]:
    """Return why nobody can read the journal, if nothing else says so: a signature vouches for bytes, not for their meaning."""
    if look.problems or look.count != look.last:
        return []
    try:
        History(read_lines(content, name).records, name)
    except StepEngineError as error:
        return [error.message]
    return []
