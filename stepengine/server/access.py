"""
Who may use a server, and which requests are refused before they reach a route.

This module has callers and their scopes, tokens, one-time links for browsers, the guard of the application, and the check whether a
folder of runs may be trusted.

Routes and runs do not belong here. The owner of a run is checked where the run is looked up.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import ipaddress
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.questions import NO_CALLER
from stepengine.errors import DataError, DefinitionError, JournalError, JournalMissing
from stepengine.server.extra import require_extra_package
from stepengine.server.owner_shares import OwnerShares
from stepengine.server.problems import Problem, problem_of
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.atomic import replace_path
from stepengine.workspace.calls import OTHERS_BITS, OTHERS_WRITE_BITS, OWNER_FILE_MODE
from stepengine.workspace.http_connections import compute_connection_limits, report_verified_token

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

ScopeName: TypeAlias = Literal["read", "run", "answer", "debug", "metrics", "admin"]
SCOPES: tuple[ScopeName, ...] = get_args(ScopeName)


def _validate_scopes(scopes: Iterable[str]) -> frozenset[ScopeName]:
    """Return scopes as a frozen set; raise ``DefinitionError`` for an unknown scope, for an empty list, and for a string."""
    found = frozenset(scopes)
    strange = sorted(found.difference(SCOPES))
    if strange or not found or isinstance(scopes, str):
        said = f"unknown scope {', '.join(map(repr, strange))}" if strange else "no scope is given"
        msg = f"{said}; valid scopes: {list_names(SCOPES, strange[0] if strange else '')}"
        raise DefinitionError(msg)
    return frozenset(scope for scope in SCOPES if scope in found)


def _require_valid_caller_name(_instance: object, _attribute: attrs.Attribute[Any], value: object) -> None:
    """Raise ``DefinitionError`` if the name of a caller is empty, no string, or a reserved name."""
    # Scheduled runs have no owner: a caller without a name would own them.
    if not isinstance(value, str) or not value:
        msg = f"Caller(name={value!r}) must be a non-empty string, such as the id of a user"
        raise DefinitionError(msg)
    if value in NO_CALLER:
        msg = f"Caller(name={value!r}) is a reserved name: in `Answer.by` it means that no person answered. Use another name, such as {value + '1'!r}"
        raise DefinitionError(msg)


@frozen
class Caller:
    """
    The authenticated caller of a request. Resources belong to its *name*: two tokens of one owner are one caller.

    Attributes:
        name: The owner of the runs that the caller starts, and the author (``by``) of its answers.
        scopes: What the caller may do: ``read``, ``run``, ``answer``, ``debug``, ``metrics``; ``admin`` includes all of them.
    """

    name: str = attrs.field(validator=_require_valid_caller_name)
    scopes: frozenset[ScopeName] = attrs.field(converter=_validate_scopes)

    def may(self, scope: ScopeName) -> bool:
        """Return whether the caller has the scope *scope* or ``admin``, which includes all."""
        return scope in self.scopes or "admin" in self.scopes

    def must(self, scope: ScopeName) -> None:
        """
        Raise ``Problem`` unless the caller has the scope *scope* or ``admin``.

        Raises:
            Problem: 403 without the scope.
        """
        if not self.may(scope):
            msg = f"this request needs the scope {scope!r}; this caller has {', '.join(sorted(self.scopes))}"
            raise Problem(msg, status=403, kind="scope_missing", members={"scope": scope})


def require_caller(request: Request | Scope) -> Caller:
    """
    Return the caller of an authenticated request; raise ``Problem`` 401 for a request without a caller.

    Raises:
        Problem: 401 if the application has no guard, or the path needs no caller.
    """
    scope = request if isinstance(request, dict) else request.scope  # type: ignore[union-attr,unused-ignore]
    found = scope.get(CALLER)
    if not isinstance(found, Caller):
        raise _make_unauthenticated_problem()
    return found


def reserve_event_stream(request: Request) -> int:
    """
    Count a request as an event stream of its caller until it is answered, and return the number of the caller's streams.

    Raises:
        Problem: 429 if the caller has used its share of the streams; 503 if other callers use all streams.
    """
    count: Callable[[], int] = request.scope[COUNT_STREAM]
    return count()


CALLER = "stepengine.caller"
COUNT_STREAM = "stepengine.count_stream"
"""The key in the scope of a request whose value counts it as an event stream."""
RETRY_SECONDS = 5


# --- tokens ---------------------------------------------------------------------------------------------------------

PREFIX = "sk-stepengine-"
"""Secret scanners recognize a text with this start as a secret."""
TOKEN_BYTES = 32
MAX_TOKEN = 1_024
"""The most characters of a token that are hashed and compared."""
MAX_FILE = 4 * 1024 * 1024
MAX_TOKENS = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
FORMAT = 1


@frozen(kw_only=True)
class KnownToken:
    """
    The stored facts of a token: its name, owner, scopes and times, without the token itself.

    Attributes:
        name: The name of the token, by which it is removed.
        owner: The name of its caller.
        scopes: What its caller may do.
        created: When it was created, in UTC.
        expires: When it expires; ``None`` for never.
    """

    name: str
    owner: str
    scopes: frozenset[ScopeName] = attrs.field(converter=_validate_scopes)
    created: datetime
    expires: datetime | None = None


@frozen
class _TokenEntry:
    digest: bytes
    known: KnownToken


class Tokens:
    """
    The tokens of a server: a JSON file of their SHA-256 digests, which only its owner may read or write.

    Several processes may use one file. Changes are made under a lock, and each process sees them at its next lookup.
    """

    def __init__(self, path: Path, *, clock: Callable[[], datetime]) -> None:
        self.path = path.absolute()
        self._clock = clock
        self._seen: tuple[int, ...] | None = None
        self._entries: tuple[_TokenEntry, ...] = ()
        self._reading = Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Tokens:
        """
        Load and validate a file of tokens, and return its tokens; without a file, the first ``add`` creates it.

        Raises:
            DefinitionError: If other users could read or change the file.
            DataError: If it is not a file of tokens.
        """
        tokens = cls(Path(path), clock=clock)
        tokens._load_entries()
        return tokens

    def add(
        self, name: str, scopes: Iterable[ScopeName], expires: datetime | None = None, owner: str | None = None
    ) -> str:  # fmt: skip
        """
        Create a token of 256 random bits, store its hash, and return it. It cannot be shown again.

        Args:
            name: The name of the token, by which it is listed and removed.
            scopes: What its caller may do.
            expires: When it expires, with a time zone; ``None`` for never.
            owner: The name of its caller; *name* by default.

        Raises:
            DefinitionError: For a name that is taken, an unknown scope, or a time in the past.
        """
        owner = name if owner is None else owner
        for what, said in (("name", name), ("owner", owner)):
            if not NAME.fullmatch(said):
                msg = f"{said[:80]!r} cannot be the {what} of a token; use 1 to 64 letters, digits and . _ @ + -"
                raise DefinitionError(msg)
        if owner in NO_CALLER:
            msg = f"{owner!r} cannot be the owner of a token: in `Answer.by` it means that no person answered. Use another name, such as {owner + '1'!r}"
            raise DefinitionError(msg)
        now = self._clock()
        if expires is not None and (expires.tzinfo is None or expires <= now):
            msg = f"the expiry time {expires.isoformat()} is in the past or has no time zone; use a future time with its time zone"
            raise DefinitionError(msg)
        token = f"{PREFIX}{secrets.token_urlsafe(TOKEN_BYTES)}"
        made = KnownToken(name=name, owner=owner, scopes=scopes, created=now, expires=expires)
        with self._edit_locked_entries() as entries:
            if any(entry.known.name == name for entry in entries):
                msg = f"{str(self.path)!r} already has a token {name!r}; use another name, or remove that token first"
                raise DefinitionError(msg)
            if len(entries) >= MAX_TOKENS:
                msg = (
                    f"{str(self.path)!r} has {MAX_TOKENS:,} tokens, which is the maximum of a file; remove some of them"
                )
                raise DefinitionError(msg)
            entries.append(_TokenEntry(_hash_token(token), made))
        return token

    def find_caller(self, token: str) -> Caller | None:
        """
        Return the caller of a token; ``None`` if the token is unknown or has expired.

        A wrong token takes as long as a right one. The file is read again if it has changed.
        """
        digest, found = _hash_token(token[:MAX_TOKEN]), None
        # All of them are compared: the time of a refusal would show how near a guess was. The file has only digests,
        # so that a person who reads it gets no token.
        for entry in self._load_entries():
            if hmac.compare_digest(entry.digest, digest):
                found = entry.known
        if found is None or (found.expires is not None and found.expires <= self._clock()):
            return None
        return Caller(found.owner, found.scopes)

    def list_tokens(self) -> tuple[KnownToken, ...]:
        """Return name, owner, scopes and times of all tokens, the oldest first, including expired ones."""
        return tuple([entry.known for entry in self._load_entries()])

    def remove(self, name: str) -> bool:
        """Remove a token; return whether there was one of that name."""
        with self._edit_locked_entries() as entries:
            kept = [entry for entry in entries if entry.known.name != name]
            was_there = len(kept) < len(entries)
            entries[:] = kept
        return was_there

    @contextmanager
    def _edit_locked_entries(self) -> Iterator[list[_TokenEntry]]:
        """Lock the file against other threads and processes, yield its entries, and write them back if they changed."""
        import fcntl

        self._load_entries()  # before the lock: a file without tokens gets no file next to it
        try:
            # A separate file: the file of tokens is replaced as a whole, and a lock on the old one would not stop a
            # process that opens the new one.
            fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, OWNER_FILE_MODE)
        except OSError as error:
            msg = f"tokens cannot be stored in {str(self.path)!r}: {error.strerror or type(error).__name__}"
            raise DefinitionError(msg) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            before = self._load_entries()
            entries = list(before)
            yield entries
            if tuple(entries) != before:
                data = json.dumps({"format": FORMAT, "tokens": [_entry_to_dict(entry) for entry in entries]}, indent=1)
                replace_path(self.path, f"{data}\n".encode(), mode=OWNER_FILE_MODE)
        finally:
            # Unlocked explicitly and not only by closing: a process that was forked meanwhile has the open file, too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _load_entries(self) -> tuple[_TokenEntry, ...]:
        """Return the entries of the file; parse it again only if it has changed."""
        with self._reading:
            with open_secret_file(self.path, "tokens") as fd:
                if fd is None:
                    self._seen, self._entries = None, ()
                    return ()
                status = os.fstat(fd)
                # Five facts of the file, since two changes within one tick of the clock leave time and size alike; a
                # replaced file has another inode.
                seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                if seen != self._seen:
                    with open(fd, "rb", closefd=False) as file:
                        self._entries = _parse_entries(file.read(MAX_FILE + 1), self.path)
                    self._seen = seen
            return self._entries


@contextmanager
def open_secret_file(path: Path, content: str) -> Iterator[int | None]:
    """
    Open a file of secrets, check its owner and mode, and yield its descriptor; yield ``None`` if it does not exist.

    Args:
        path: The file.
        content: A word for the content in error messages, such as ``"tokens"``.

    Raises:
        DefinitionError: If the file is not private or cannot be read.
    """
    try:
        # The open descriptor is checked and not the path, at which another file could appear in between. `O_NONBLOCK`:
        # a pipe with that name would block the server for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        msg = f"{str(path)!r} cannot be read as a file of {content}: {error.strerror or type(error).__name__}"
        raise DefinitionError(msg) from None
    try:
        _require_private_file(os.fstat(fd), path, content)
        yield fd
    finally:
        os.close(fd)


def _require_private_file(status: os.stat_result, path: Path, content: str) -> None:
    """Raise ``DefinitionError`` unless a file is regular, private and of this user, in a folder that others cannot change."""
    if not stat.S_ISREG(status.st_mode):
        msg = f"{str(path)!r} is not a regular file; a file of {content} must be one"
        raise DefinitionError(msg)
    if status.st_uid != os.geteuid():
        msg = f"{str(path)!r} belongs to another user, who could grant access to anyone; use a file of your own"
        raise DefinitionError(msg)
    if status.st_mode & OTHERS_BITS:
        msg = (
            f"{str(path)!r} may be read or written by others (mode {stat.S_IMODE(status.st_mode):04o}); `chmod 600` it"
        )
        raise DefinitionError(msg)
    folder = path.parent.stat()
    if folder.st_mode & OTHERS_WRITE_BITS and not folder.st_mode & stat.S_ISVTX:
        msg = (
            f"others may write to the folder {str(path.parent)!r}, and so replace the {content} in it; `chmod go-w` it"
        )
        raise DefinitionError(msg)


def _hash_token(token: str) -> bytes:
    """Return the SHA-256 of a token, by which it is stored."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _entry_to_dict(entry: _TokenEntry) -> dict[str, Any]:
    """Return an entry of the file of tokens as JSON values."""
    known = entry.known
    return {
        "name": known.name,
        "owner": known.owner,
        "scopes": sorted(known.scopes),
        "created": known.created.isoformat(),
        "expires": known.expires and known.expires.isoformat(),
        "sha256": entry.digest.hex(),
    }


def _parse_entries(data: bytes, path: Path) -> tuple[_TokenEntry, ...]:
    """
    Parse the content of a file of tokens.

    Raises:
        DataError: If ``Tokens`` did not write it. The message does not show the content.
    """
    try:
        if len(data) > MAX_FILE:
            msg = f"{str(path)!r} has more than {MAX_FILE:,} bytes, which is too large for a file of tokens"
            raise DataError(msg)
        read = json.loads(data)
        if read["format"] != FORMAT:
            msg = f"{str(path)!r} does not have the format {FORMAT}; a newer version of stepengine may have written it"
            raise DataError(msg, path="$.format")
        return tuple([_parse_entry(each) for each in read["tokens"]])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, DefinitionError):
        msg = f"{str(path)!r} is not a file of tokens; `stepengine tokens add` creates one"
        raise DataError(msg) from None


def _parse_entry(fields: Mapping[str, Any]) -> _TokenEntry:
    """Parse an entry of a file of tokens; raise ``ValueError`` or ``KeyError`` if it is invalid."""
    digest = bytes.fromhex(fields["sha256"])
    times = [None if fields[k] is None else datetime.fromisoformat(fields[k]) for k in ("created", "expires")]
    created, expires = times
    if created is None or not NAME.fullmatch(fields["name"]) or not NAME.fullmatch(fields["owner"]):
        raise ValueError
    if len(digest) != hashlib.sha256().digest_size or any(t is not None and t.tzinfo is None for t in times):
        raise ValueError
    known = KnownToken(
        name=fields["name"], owner=fields["owner"], scopes=fields["scopes"], created=created, expires=expires
    )  # fmt: skip
    return _TokenEntry(digest, known)


# --- browsers -------------------------------------------------------------------------------------------------------


@attrs.define
class _LoginSession:
    caller: Caller
    until: float


class Logins:
    """
    One-time login links and the sessions that they start; both are in memory and end with the server.

    The code of a link is behind its ``#``, so that no server and no log sees it. The page sends it in the body of a ``POST`` to *path*,
    and gets a token that it sends with each request. A cookie would be sent to every server on the same host.

    Args:
        seconds: How long a link is valid, in seconds.
        session_seconds: How long a session is valid, in seconds.
        path: The path, below the mount of the application, where the guard exchanges the code of a link.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self, *, seconds: float = 60, session_seconds: float = 12 * 3600, path: str = "/login",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.seconds, self.session_seconds, self.path = seconds, session_seconds, path
        self._clock = clock
        self._codes: OrderedDict[bytes, _LoginSession] = OrderedDict()
        self._sessions: OrderedDict[bytes, _LoginSession] = OrderedDict()
        self._operators: set[bytes] = set()
        self._lock = Lock()

    def make_login_link(self, caller: Caller | None = None) -> str:
        """Create a one-time login link for *caller*, by default the operator, and return its path with the code."""
        code = secrets.token_urlsafe(TOKEN_BYTES)
        with self._lock:
            _add_session_and_evict_old(
                self._codes,
                _hash_token(code),
                _LoginSession(caller or OPERATOR, self._clock() + self.seconds),
                self._clock(),
            )
        return f"/#login={code}"

    def make_operator_token(self) -> str:
        """Create a token for the operator that is valid until the server stops."""
        secret = secrets.token_urlsafe(TOKEN_BYTES)
        with self._lock:
            self._operators.add(_hash_token(secret))
        return secret

    def exchange_code(self, code: str) -> str | None:
        """Start a session with the code of a link, and return its token; ``None`` if the code was used or has expired."""
        with self._lock:
            # Removed before it is checked: a link that is used twice, even at the same moment, starts one session.
            found = self._codes.pop(_hash_token(code[:MAX_TOKEN]), None)
            if found is None or found.until <= self._clock():
                return None
            secret = secrets.token_urlsafe(TOKEN_BYTES)
            until = self._clock() + self.session_seconds
            _add_session_and_evict_old(
                self._sessions, _hash_token(secret), _LoginSession(found.caller, until), self._clock()
            )
            return secret

    def find_caller(self, token: str) -> Caller | None:
        """Return the caller of a session token or operator token; ``None`` if it is unknown or has expired."""
        # Only digests are compared, so the time that this takes shows nothing of a known token.
        digest = _hash_token(token[:MAX_TOKEN])
        with self._lock:
            found = self._sessions.get(digest)
            if digest in self._operators:
                return OPERATOR
        return found.caller if found is not None and self._clock() < found.until else None

    def end_session(self, token: str) -> None:
        """End the session of a token; an unknown token is ignored."""
        with self._lock:
            self._sessions.pop(_hash_token(token[:MAX_TOKEN]), None)


OPERATOR = Caller("operator", frozenset({"admin"}))
"""The person who started the server."""
MAX_SESSIONS = 10_000


def _add_session_and_evict_old(
    sessions: OrderedDict[bytes, _LoginSession], digest: bytes, session: _LoginSession, now: float
) -> None:
    """Add a session; remove expired ones, and the oldest if there are too many."""
    # All sessions of one kind have the same duration, so expired ones are at the front.
    while sessions and (len(sessions) >= MAX_SESSIONS or next(iter(sessions.values())).until <= now):
        sessions.popitem(last=False)
    sessions[digest] = session


# --- the guard ------------------------------------------------------------------------------------------------------

Authenticate: TypeAlias = "Callable[[Request], Caller | Awaitable[Caller | None] | None]"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOGOUT = "/logout"
MAX_BUCKETS = 10_000
MAX_DIGITS = 18
PORTS = {"http": "80", "https": "443"}
HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
MAX_PORT = 65_535
"""The highest port of TCP."""
ORIGIN = re.compile(r"(https?)://([^/?#@\s]{1,260})")
SECURITY = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # An application's own policy need not say anything of frames.
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
"""Headers that are added to every response that does not have them."""
PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE",
    "access-control-allow-headers": (
        "authorization, content-type, idempotency-key, last-event-id, ai-sdk-version, mcp-session-id, mcp-protocol-version"
    ),
    "access-control-max-age": "600",
}


def _require_positive(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Raise ``DefinitionError`` unless a limit is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        msg = f"Caps({attribute.name}={value!r}) must be a number above 0"
        raise DefinitionError(msg)


def _require_fraction(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Raise ``DefinitionError`` unless a limit is a number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        msg = f"Caps({attribute.name}={value!r}) must be a number of at least 0 and below 1"
        raise DefinitionError(msg)


@frozen(kw_only=True)
class Caps:
    """
    The limits of the requests that a client may send.

    Attributes:
        body: The most bytes of the body of a caller's request. An image may have 8 MiB in base64.
        open_body: The most bytes of the body of a request without a caller, such as a webhook.
        body_seconds: The most seconds until a body has arrived.
        rate: Requests per second of one caller, on average; of one address for paths that need no caller.
        burst: Requests that a caller may send at once before *rate* applies.
        at_once: Requests of all callers that are answered at the same time, event streams included. By default three quarters of the
            files that this process may open, as many as `stepengine serve` has connections.
        reserve: The part of *at_once*, from 0 up to 1, that the event streams of one caller leave free for others. All requests of one
            caller leave half of that part free.
        failures: The most failed logins of one address in *failure_seconds*.
        failure_seconds: The period for *failures*, in seconds.
    """

    body: int = attrs.field(default=12 * 1024 * 1024, validator=_require_positive)
    open_body: int = attrs.field(default=1024 * 1024, validator=_require_positive)
    body_seconds: float = attrs.field(default=30.0, validator=_require_positive)
    rate: float = attrs.field(default=200.0, validator=_require_positive)
    burst: int = attrs.field(default=2_000, validator=_require_positive)
    at_once: int = attrs.field(factory=lambda: compute_connection_limits().connections, validator=_require_positive)
    reserve: float = attrs.field(default=0.25, validator=_require_fraction)
    failures: int = attrs.field(default=30, validator=_require_positive)
    failure_seconds: float = attrs.field(default=60.0, validator=_require_positive)


class Guard:
    """
    The ASGI middleware that authenticates callers and refuses oversized, cross-site and too frequent requests.

    A caller is identified by ``Authorization: Bearer TOKEN``, with a token of *tokens* or of a browser's session, or by *authenticate*.
    The application receives a request with its whole body, and gets the caller by ``require_caller(request)``. Refused requests and
    errors of the application are answered with a problem document. WebSockets are refused.

    Args:
        app: The application.
        tokens: The tokens of callers.
        logins: Links and sessions of browsers: ``POST /login`` with ``{"code": ...}`` returns the token of a session, ``POST /logout``
            ends it, and ``POST /login/links`` returns another link to a caller with the scope ``admin``.
        authenticate: A function, async or not, that returns the caller of a Starlette ``Request``, or ``None``, for an application's own
            users.
        hosts: Host names of the server, such as ``example.com``, or ``example.com:8443`` for only one port; by default those of loopback.
            ``"*"`` accepts any name: use it only behind a proxy that checks them.
        cors: Origins whose pages may send requests with a token, such as ``https://example.com``; none by default.
        open_paths: Paths that need no caller and accept any host name; a path that ends with ``/`` includes all paths below.
        page_paths: Paths without data that need no caller, but one of *hosts*; ``"/"`` is only that path.
        caps: The limits of the requests that a client may send.
        clock: A monotonic clock in seconds.

    Raises:
        DefinitionError: If no caller can be identified, a host or an origin is invalid, or the extra ``serve`` is not installed.
    """

    def __init__(
        self, app: ASGIApp, *, tokens: Tokens | None = None, logins: Logins | None = None,
        authenticate: Authenticate | None = None, hosts: Collection[str] = LOOPBACK, cors: Collection[str] = (),
        open_paths: Collection[str] = ("/health",), page_paths: Collection[str] = (), caps: Caps | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        require_extra_package()
        if tokens is None and logins is None and authenticate is None:
            msg = "a guard needs tokens=, logins= or authenticate=; without one of them it cannot authenticate callers"
            raise DefinitionError(msg)
        caps = caps or Caps()
        self.app, self.tokens, self.logins, self.authenticate, self.caps = app, tokens, logins, authenticate, caps
        self.hosts, self.cors = _validate_and_normalize_hosts(hosts), _validate_origins(cors)
        self.open_paths, self.page_paths = tuple(open_paths), tuple(page_paths)
        self._requests = _RateBuckets(caps.rate, caps.burst, clock)
        self._failures = _RateBuckets(caps.failures / caps.failure_seconds, caps.failures, clock)
        self._answered = OwnerShares(caps.at_once, caps.reserve / 2)
        self._streams = OwnerShares(caps.at_once, caps.reserve)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on to the application."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._respond_with_security_headers(_RequestFacts(scope), receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "this server does not support WebSockets"})

    async def _respond_with_security_headers(self, facts: _RequestFacts, receive: Receive, send: Send) -> None:
        """Pass on a request, add the security headers to its response, and answer an error with a problem document."""
        more = self._make_cors_headers(facts)
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            """Send a message of a response, its start with the security headers, and note that the response has started."""
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": _add_security_headers(message.get("headers", ()), more)}
            await send(message)

        try:
            await self._authenticate_and_dispatch(facts, receive, send_with_headers)
        except _ClientDisconnected:
            return
        except Exception as error:
            if has_begun:
                raise
            await problem_of(error).response()(facts.scope, receive, send_with_headers)

    async def _authenticate_and_dispatch(self, facts: _RequestFacts, receive: Receive, send: Send) -> None:
        """Check the host, origin, caller and limits of a request; then answer a login or logout, or pass it to the application."""
        if not facts.get_query().isascii():
            # Applications that decode it would fail at it.
            msg = "the query of this request is not percent-encoded"
            raise Problem(msg, status=400, kind="bad_request")
        if _matches_path(facts.path, self.open_paths):
            await self._forward_unauthenticated(facts, receive, send)
            return
        self._require_known_host(facts)
        if facts.method in SAFE and _matches_path(facts.path, self.page_paths):
            await self._forward_unauthenticated(facts, receive, send)
            return
        if self._is_allowed_preflight(facts):
            await _make_empty_response(PREFLIGHT)(facts.scope, receive, send)
            return
        logins, is_posted = self.logins, facts.method == "POST"
        if logins is not None and facts.path == logins.path and is_posted:
            # Any page can make the browser of its visitor send wrong codes, which would count as the visitor's.
            self._refuse_cross_site_request(facts, self.cors)
            self._spend_rate_tokens(self._failures, facts.address, cost=0)
            body = await self._read_body(facts, receive, self.caps.open_body)
            await self._exchange_login_code(facts, logins, body)(facts.scope, receive, send)
            return
        caller = await self._authenticate(facts)
        report_verified_token(facts.scope)
        self._spend_rate_tokens(self._requests, f"caller {caller.name}")
        with self._hold_request_slot(caller), ExitStack() as stack:
            body = await self._read_body(facts, receive, self.caps.body)
            if logins is not None and facts.path == LOGOUT and is_posted:
                logins.end_session(facts.find_bearer_token() or "")
                await _make_empty_response({})(facts.scope, receive, send)
            elif logins is not None and facts.path == f"{logins.path}/links" and is_posted:
                caller.must("admin")
                await _make_json_response({"link": logins.make_login_link(caller)})(facts.scope, receive, send)
            else:
                scope = {
                    **facts.scope,
                    CALLER: caller,
                    COUNT_STREAM: partial(self._reserve_event_stream, caller, stack),
                }
                await self.app(scope, _make_receive_with_body(body, receive), send)

    async def _forward_unauthenticated(self, facts: _RequestFacts, receive: Receive, send: Send) -> None:
        """Pass a request without a caller to the application; the rate of its address and the size of its body are limited."""
        self._spend_rate_tokens(self._requests, f"address {facts.address}")
        body = await self._read_body(facts, receive, self.caps.open_body)
        await self.app(facts.scope, _make_receive_with_body(body, receive), send)

    # --- authentication ---

    async def _authenticate(self, facts: _RequestFacts) -> Caller:
        """Return the caller by token, session or *authenticate*; if there is none, count the failure and raise ``Problem`` 401."""
        bearer = facts.find_bearer_token()
        if bearer is not None and self.tokens is not None and (caller := self._find_token_caller(self.tokens, bearer)):
            return caller
        if bearer is not None and self.logins is not None and (caller := self.logins.find_caller(bearer)):
            return caller
        if self.authenticate is not None and (caller := await self._authenticate_by_function(self.authenticate, facts)):
            self._refuse_cross_site_request(facts, self.cors)
            return caller
        raise self._count_failure_and_make_problem(facts)

    def _find_token_caller(self, tokens: Tokens, bearer: str) -> Caller | None:
        """Return the caller of a token, or ``None``; raise ``Problem`` 503 if the file of tokens cannot be used."""
        try:
            return tokens.find_caller(bearer)
        except (DefinitionError, DataError) as error:
            logger.error("%s", error.message)  # noqa: TRY400  (what is wrong with the file is said; the way here is no help)
            msg = "the server cannot use its file of tokens; the server's log says why"
            raise Problem(msg, status=503, kind="tokens_unusable") from error

    async def _authenticate_by_function(self, authenticate: Authenticate, facts: _RequestFacts) -> Caller | None:
        """
        Return the caller that *authenticate* finds, or ``None``; a sync function runs in a thread.

        Raises:
            Problem: 429 after too many failures of this address.
            TypeError: If *authenticate* returns anything else.
        """
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import Request

        if facts.has_credentials():
            self._spend_rate_tokens(self._failures, facts.address, cost=0)
        request = Request(facts.scope)
        if inspect.iscoroutinefunction(authenticate) or inspect.iscoroutinefunction(type(authenticate).__call__):
            found = authenticate(request)
        else:
            found = await run_in_threadpool(authenticate, request)
        caller = await found if inspect.isawaitable(found) else found
        if caller is not None and not isinstance(caller, Caller):
            msg = f"authenticate= returned a {type(caller).__name__}, not a Caller or None"
            raise TypeError(msg)
        return caller

    def _count_failure_and_make_problem(self, facts: _RequestFacts) -> Problem:
        """Return the problem 401, after counting a failure if the request has credentials; raise 429 after too many failures."""
        if facts.has_credentials():
            self._spend_rate_tokens(self._failures, facts.address)
        return _make_unauthenticated_problem()

    def _exchange_login_code(self, facts: _RequestFacts, logins: Logins, body: bytes) -> Response:
        """Start a session with a login code, and return a response with its token; count a wrong code, and raise ``Problem`` 401."""
        try:
            code = json.loads(body)["code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            code = ""
        token = logins.exchange_code(code) if isinstance(code, str) else None
        if token is None:
            self._spend_rate_tokens(self._failures, facts.address)
            msg = "this link was already used, or has expired; run `stepengine studio --link` for a new one"
            raise Problem(msg, status=401, kind="link_spent", headers={"WWW-Authenticate": "Bearer"})
        return _make_json_response({"token": token, "seconds": int(logins.session_seconds)})

    # --- host and origin ---

    def _require_known_host(self, facts: _RequestFacts) -> None:
        """Raise ``Problem`` 421 unless the client used one of the host names of this server."""
        if "*" in self.hosts:
            return
        name, port = facts.parse_host()
        if name not in self.hosts and f"{name}:{port}" not in self.hosts:
            msg = "this server does not answer to this host name; use one of the host names that it was started with"
            raise Problem(msg, status=421, kind="foreign_host")

    def _refuse_cross_site_request(self, facts: _RequestFacts, allowed_origins: Collection[str]) -> None:
        """
        Raise ``Problem`` 403 for a browser's request from another site, unless its origin is allowed.

        A request with a cookie but without ``Origin`` and ``Sec-Fetch-Site`` is refused, too.
        """
        site, origin = facts.find_header("sec-fetch-site"), facts.find_header("origin")
        if facts.method in SAFE:
            # A link is followed; a script, an image or a frame of another site has no business here.
            is_followed = (
                facts.find_header("sec-fetch-mode") == "navigate" and facts.find_header("sec-fetch-dest") == "document"
            )
            is_fine = site in {None, "same-origin", "none"} or is_followed or origin in allowed_origins
        elif origin is None and site is None:
            is_fine = facts.find_header("cookie") is None
        elif origin in allowed_origins:
            is_fine = True
        else:
            is_fine = site in {None, "same-origin", "none"} and (origin is None or facts.is_same_origin(origin))
        if not is_fine:
            msg = "a page of another site sent this request; a program must send a token instead of a cookie"
            raise Problem(msg, status=403, kind="cross_site")

    def _is_allowed_preflight(self, facts: _RequestFacts) -> bool:
        """Return whether a request is a CORS preflight from an allowed origin."""
        is_asked = facts.method == "OPTIONS" and facts.find_header("access-control-request-method") is not None
        return is_asked and facts.find_header("origin") in self.cors

    def _make_cors_headers(self, facts: _RequestFacts) -> dict[str, str]:
        """Return the CORS headers for the origin of a request; only ``Vary`` if the origin is not allowed."""
        if not self.cors:
            return {}
        origin = facts.find_header("origin")
        if origin is None or origin not in self.cors:
            return {"vary": "Origin"}
        return {
            "vary": "Origin",
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "location, retry-after, mcp-session-id",
            "cross-origin-resource-policy": "cross-origin",
        }

    # --- limits ---

    def _spend_rate_tokens(self, buckets: _RateBuckets, key: str, *, cost: int = 1) -> None:
        """Spend *cost* tokens of a bucket; raise ``Problem`` 429 if it has none."""
        wait = buckets.spend_or_get_wait_seconds(key, cost)
        if wait > 0:
            seconds = str(math.ceil(wait))
            msg = f"too many requests; try again in {seconds} s"
            raise Problem(msg, status=429, kind="rate_limited", headers={"Retry-After": seconds})

    @contextmanager
    def _hold_request_slot(self, caller: Caller) -> Iterator[None]:
        """Count a running request of a caller within the block; raise ``Problem`` if the caller may not have one more."""
        self._require_free_slot(self._answered, caller, "requests", "end some of them first")
        with self._answered.use_slot(caller.name):
            yield

    def _reserve_event_stream(self, caller: Caller, stack: ExitStack) -> int:
        """Count a request as an event stream until *stack* closes; return the number of its caller's streams."""
        self._require_free_slot(
            self._streams, caller, "event streams", "close some of them first; other requests are answered"
        )
        stack.enter_context(self._streams.use_slot(caller.name))
        return self._streams.count_used_slots(caller.name)

    def _require_free_slot(self, shares: OwnerShares, caller: Caller, resource: str, advice: str) -> None:
        """Raise ``Problem`` 503 or 429 if the caller may not open one more of *resource* now."""
        if shares.has_room(caller.name):
            return
        count = shares.count_used_slots(caller.name)
        if not count:
            msg = f"other callers use all {resource} that this server can serve at once; try again in a moment"
            raise Problem(msg, status=503, kind="server_full", headers={"Retry-After": str(RETRY_SECONDS)})
        msg = f"this caller has {count:,} {resource} open, and the remaining capacity is reserved for other callers; {advice}"
        raise Problem(msg, status=429, kind="too_many_at_once", headers={"Retry-After": str(RETRY_SECONDS)})

    async def _read_body(self, facts: _RequestFacts, receive: Receive, limit: int) -> bytes:
        """
        Receive and return the whole body of a request; raise ``Problem`` if it is over *limit* bytes or arrives too slowly.

        Raises:
            Problem: 400 for an invalid length, 408 for a slow body, 413 for one that is too large.
            _ClientDisconnected: If the client disconnected before the end of the body.
        """
        length = facts.find_header("content-length")
        if length is not None and not (length.isascii() and length.isdigit()):
            msg = "Content-Length is not a number"
            raise Problem(msg, status=400, kind="bad_request")
        if length is not None and (len(length) > MAX_DIGITS or int(length) > limit):
            raise _make_size_problem(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.caps.body_seconds):
                while await _receive_body_chunk(receive, body, limit):
                    pass
        except TimeoutError:
            msg = f"the body of this request did not arrive within {self.caps.body_seconds:g} s"
            raise Problem(msg, status=408, kind="slow_body", headers={"Connection": "close"}) from None
        return bytes(body)


async def _receive_body_chunk(receive: Receive, body: bytearray, limit: int) -> bool:
    """Receive and append a chunk to *body*; return True if more follow. Raise if the client left or the body is over *limit* bytes."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _ClientDisconnected
    body += message.get("body", b"")
    if len(body) > limit:
        raise _make_size_problem(limit)
    return bool(message.get("more_body", False))


def _make_size_problem(limit: int) -> Problem:
    msg = f"the body of this request is larger than {limit:,} bytes"
    return Problem(msg, status=413, kind="body_too_large", headers={"Connection": "close"})


class _ClientDisconnected(Exception):
    """The client disconnected before it had sent the whole request."""


class _RequestFacts:
    """The method, path and headers of a request, which are untrusted."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self._headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.lower(), []).append(value)
        root = scope.get("root_path", "")
        path: str = scope["path"]
        self.path = path[len(root) :] if root and path.startswith(f"{root}/") else path

    def find_header(self, name: str) -> str | None:
        """Return a header, ``None`` without one; several values are joined, so that none of them is accepted alone."""
        found = self._headers.get(name.encode("ascii"))
        return None if found is None else b", ".join(found).decode("latin-1")

    def has_credentials(self) -> bool:
        """Return whether the request has an ``Authorization`` or ``Cookie`` header."""
        return b"authorization" in self._headers or b"cookie" in self._headers

    def find_bearer_token(self) -> str | None:
        """Return the bearer token of the request: ``None`` if it has none, ``""`` if it has several."""
        found = self._headers.get(b"authorization")
        if found is None:
            return None
        scheme, _, token = found[0].decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return token.strip() if len(found) == 1 else ""

    def get_query(self) -> str:
        return bytes(self.scope.get("query_string", b"")).decode("latin-1")

    def parse_host(self) -> tuple[str, str]:
        """
        Return the host name that the client used, and the port; raise ``Problem`` 400 without one valid ``Host`` header.

        Raises:
            Problem: 400 without exactly one valid ``Host`` header.
        """
        found = HOST.fullmatch((self.find_header("host") or "").lower())
        if found is None:
            msg = "this request must have exactly one valid Host header"
            raise Problem(msg, status=400, kind="bad_request")
        return found[1].rstrip("."), found[2] or PORTS.get(self.scope.get("scheme", "http"), "")

    def is_same_origin(self, origin: str) -> bool:
        """Return whether an origin, such as ``https://example.org``, is the one of this server by the ``Host`` header."""
        found, host = ORIGIN.fullmatch(origin), HOST.fullmatch((self.find_header("host") or "").lower())
        if found is None or host is None:
            return False
        theirs = HOST.fullmatch(found[2].lower())
        # The scheme is the page's: a proxy may have taken TLS away on the way to us.
        port = PORTS[found[1]]
        return theirs is not None and (theirs[1], theirs[2] or port) == (host[1], host[2] or port)

    @property
    def address(self) -> str:
        """The IP address of the client, ``"local"`` without one; for IPv6 its /64 network, which one client has whole."""
        client = self.scope.get("client")
        try:
            found = ipaddress.ip_address(client[0] if client else "")
        except ValueError:
            return "local"
        if found.version == 4:  # noqa: PLR2004
            return str(found)
        return str(ipaddress.ip_network((int(found), 64), strict=False))


class _RateBuckets:
    """Rate limits by key (token buckets): *burst* requests at once, then *rate* a second. Only the newest keys are stored."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend_or_get_wait_seconds(self, key: str, cost: int = 1) -> float:
        """Remove *cost* tokens if there is at least one, even into debt, and return 0; else return the seconds until there is one."""
        now = self._clock()
        level, at = self._levels.pop(key, (float(self._burst), now))
        level = min(self._burst, level + (now - at) * self._rate)
        wait = 0.0 if level >= 1 else (1 - level) / self._rate
        self._levels[key] = (level if wait else level - cost, now)
        if len(self._levels) > MAX_BUCKETS:
            self._levels.popitem(last=False)
        return wait


def _make_unauthenticated_problem() -> Problem:
    """Return the problem 401 for a request without a valid token."""
    msg = "this request needs a token: `Authorization: Bearer TOKEN`; `stepengine tokens add` creates one"
    return Problem(msg, status=401, kind="unauthenticated", headers={"WWW-Authenticate": "Bearer"})


def _matches_path(path: str, paths: Iterable[str]) -> bool:
    """Return whether *path* is one of *paths*, or starts with one that ends with a slash."""
    return any(path == one or (one.endswith("/") and one != "/" and path.startswith(one)) for one in paths)


def _make_json_response(content: Mapping[str, object]) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content)


def _make_empty_response(headers: Mapping[str, str]) -> Response:
    """Return a response with status 204 and these headers."""
    from starlette.responses import Response

    return Response(status_code=204, headers=dict(headers))


def _add_security_headers(
    headers: Iterable[tuple[bytes, bytes]], cors_headers: Mapping[str, str]
) -> list[tuple[bytes, bytes]]:  # fmt: skip
    """Return the headers of a response with the security and CORS headers that they lack."""
    given = [(bytes(name).lower(), bytes(value)) for name, value in headers]
    added = {**SECURITY, **cors_headers}
    has = {name for name, _ in given} - {b"vary"}
    return [*given, *[(k.encode(), v.encode("latin-1")) for k, v in added.items() if k.encode() not in has]]


def _make_receive_with_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` function for a body read before: it returns the body, then further messages of *receive*."""
    is_given = False

    async def receive_body() -> Message:
        """Return the body at the first call, then the messages of the client."""
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body


def _validate_and_normalize_hosts(hosts: Collection[str]) -> frozenset[str]:
    """Return host names in lower case; raise ``DefinitionError`` for an invalid one."""
    names = frozenset(name.lower().rstrip(".") for name in _require_not_string("hosts", hosts))
    for name in names:
        found = HOST.fullmatch(name)
        if name != "*" and (found is None or int(found[2] or 0) > MAX_PORT):
            msg = (
                f"hosts= has the invalid name {name!r}; use a name such as 'example.com', '127.0.0.1' or '[::1]', "
                "with or without a port"
            )
            raise DefinitionError(msg)
    return names


def _validate_origins(origins: Collection[str]) -> frozenset[str]:
    """Return origins as a frozen set; raise ``DefinitionError`` for an invalid one and for a string."""
    for origin in _require_not_string("cors", origins):
        if not ORIGIN.fullmatch(origin):
            msg = (
                f"cors= has the invalid origin {origin!r}; use an origin such as 'https://example.com', without a path "
                "and without *"
            )
            raise DefinitionError(msg)
    return frozenset(origins)


def _require_not_string(option: str, values: Collection[str]) -> Collection[str]:
    """Return the values of an option; raise ``DefinitionError`` if they are one string."""
    if isinstance(values, str):
        msg = f"{option}={values!r} is a string; pass a list of strings"
        raise DefinitionError(msg)
    return values


# --- folders --------------------------------------------------------------------------------------------------------

MAX_LINKS = 40


def resolve_trusted_path(path: str | os.PathLike[str]) -> Path:
    """
    Return the real path of a folder or database of runs; raise if another user could write to it or replace it.

    A user who can write a journal decides what its run does after a resume. Targets of links are checked, too.

    Raises:
        JournalMissing: If the path does not exist.
        JournalError: If the path belongs to another user, or other users may write to it or replace it.
    """
    place, real = Path(os.path.abspath(path)), os.path.realpath(path)  # noqa: PTH100  (links are looked at one by one)
    for _ in range(MAX_LINKS):
        link = _check_folders_and_find_link(place)
        if link is None:
            break
        rest = place.relative_to(link)
        place = Path(os.path.abspath(link.parent / link.readlink() / rest))  # noqa: PTH100  (the same)
    else:
        msg = f"{os.fspath(path)!r} leads through more than {MAX_LINKS} symbolic links"
        raise JournalError(msg)
    # What was looked at has to be what the system opens: `..` behind a link leads it elsewhere than the text says.
    if str(place) != real:
        msg = f"{os.fspath(path)!r} leaves a symbolic link by `..`; use {real!r} instead"
        raise JournalError(msg)
    _require_private_path(place)
    return place


def _check_folders_and_find_link(path: Path) -> Path | None:
    """Return the first symbolic link in a path, or ``None``; raise if another user can change one of the folders before it."""
    for one in [*reversed(path.parents), path]:
        try:
            status = one.lstat()
        except (FileNotFoundError, NotADirectoryError):
            msg = f"there is no {str(path)!r}"
            raise JournalMissing(msg, path=str(path)) from None
        except OSError as error:
            msg = f"{str(one)!r} cannot be checked: {error.strerror or type(error).__name__}"
            raise JournalError(msg) from None
        if status.st_uid not in {0, os.geteuid()}:
            msg = f"{str(one)!r} belongs to another user, who could replace {str(path)!r}; use a folder of your own"
            raise JournalError(msg)
        if stat.S_ISLNK(status.st_mode):
            return one
        if one != path and status.st_mode & OTHERS_WRITE_BITS and not status.st_mode & stat.S_ISVTX:
            msg = f"others may write to {str(one)!r}, and so replace {str(path)!r}; `chmod go-w` it"
            raise JournalError(msg)
    return None


def _require_private_path(path: Path) -> None:
    """Raise ``JournalError`` unless a path is a file or folder of this user that others cannot write to."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        msg = f"{str(path)!r} is neither a folder nor a file"
        raise JournalError(msg)
    if status.st_uid != os.geteuid():
        msg = f"{str(path)!r} belongs to another user, who could change what its runs do next; use one of your own"
        raise JournalError(msg)
    if status.st_mode & OTHERS_WRITE_BITS:
        msg = f"others may write to {str(path)!r}, and so change what its runs do next; `chmod go-w` it"
        raise JournalError(msg)
