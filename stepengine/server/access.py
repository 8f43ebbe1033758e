"""
Who may use a server, and what is refused before any route sees it.

What lives here: callers and their scopes, tokens, one-time links for browsers, the guard in front of the application, and whether
a folder of runs may be trusted.

What must not: routes, runs, and whose run is whose, which is decided where runs are looked up.
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
from stepengine.server.extra import check_extra_installed
from stepengine.server.owner_shares import OwnerShares
from stepengine.server.problems import Problem, problem_of
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.atomic import replace_path
from stepengine.workspace.calls import OTHERS_BITS, OTHERS_WRITE_BITS, OWNER_FILE_MODE
from stepengine.workspace.http_connections import connection_limits_of_process, report_verified_token

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

ScopeName: TypeAlias = Literal["read", "run", "answer", "debug", "metrics", "admin"]
SCOPES: tuple[ScopeName, ...] = get_args(ScopeName)


def _check_scopes(given: Iterable[str]) -> frozenset[ScopeName]:
    """Return scopes as a frozen set; raise ``DefinitionError`` for an unknown one, for none, and for a string."""
    found = frozenset(given)
    strange = sorted(found.difference(SCOPES))
    if strange or not found or isinstance(given, str):
        said = f"unknown scope {', '.join(map(repr, strange))}" if strange else "no scope is given"
        msg = f"{said}; valid scopes: {list_names(SCOPES, strange[0] if strange else '')}"
        raise DefinitionError(msg)
    return frozenset(scope for scope in SCOPES if scope in found)


def _check_caller_name(_instance: object, _attribute: attrs.Attribute[Any], value: object) -> None:
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
        name: Whose runs these are, and what an answer's ``by`` says.
        scopes: What the caller may do: ``read``, ``run``, ``answer``, ``debug``, ``metrics``; ``admin`` holds all of them.
    """

    name: str = attrs.field(validator=_check_caller_name)
    scopes: frozenset[ScopeName] = attrs.field(converter=_check_scopes)

    def may(self, scope: ScopeName) -> bool:
        """Return whether the caller has the scope *scope* or ``admin``, which includes all."""
        return scope in self.scopes or "admin" in self.scopes

    def must(self, scope: ScopeName) -> None:
        """
        Raise ``Problem`` unless the caller has the scope *scope* or ``admin``.

        Raises:
            Problem: 403, for everybody else.
        """
        if not self.may(scope):
            msg = f"this request needs the scope {scope!r}; this caller has {', '.join(sorted(self.scopes))}"
            raise Problem(msg, status=403, kind="scope_missing", members={"scope": scope})


def caller_of(request: Request | Scope) -> Caller:
    """
    Return the caller of an authenticated request.

    Raises:
        Problem: 401, where no guard stands in front, or the path is open to everybody.
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
        Problem: 429, if the caller has its share of the streams; 503, if others have all of them.
    """
    count: Callable[[], int] = request.scope[COUNT_STREAM]
    return count()


CALLER = "stepengine.caller"
COUNT_STREAM = "stepengine.count_stream"
"""The key in the scope of a request whose value counts it as an event stream."""
RETRY_SECONDS = 5


# --- tokens ---------------------------------------------------------------------------------------------------------

PREFIX = "sk-stepengine-"
"""Scanners of keys, ours and those of others, know what begins so for a secret."""
TOKEN_BYTES = 32
MAX_TOKEN = 1_024
"""Characters of what is looked up at all."""
MAX_FILE = 4 * 1024 * 1024
MAX_TOKENS = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
FORMAT = 1


@frozen(kw_only=True)
class KnownToken:
    """
    The stored facts of a token: its name, owner, scopes and times, without the token itself.

    Attributes:
        name: What it is removed by.
        owner: The name of its caller.
        scopes: What its caller may do.
        created: When it was made, in UTC.
        expires: From when on it is worth nothing; ``None`` for never.
    """

    name: str
    owner: str
    scopes: frozenset[ScopeName] = attrs.field(converter=_check_scopes)
    created: datetime
    expires: datetime | None = None


@frozen
class _TokenEntry:
    digest: bytes
    known: KnownToken


class Tokens:
    """
    The tokens of a server: a JSON file of their SHA-256 digests, which nobody but its owner may read or write.

    Several processes may use one file: a change is made under a lock, and seen by every process at its next look.
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
        Return the tokens of a file; the first ``add`` creates it.

        Raises:
            DefinitionError: where others could read or change the file.
            DataError: where it is not a file of tokens.
        """
        tokens = cls(Path(path), clock=clock)
        tokens._load_entries()
        return tokens

    def add(
        self, name: str, scopes: Iterable[ScopeName], expires: datetime | None = None, owner: str | None = None
    ) -> str:  # fmt: skip
        """
        Create a token of 256 random bits and return it; it is not stored and cannot be shown again.

        Args:
            name: What it is listed and removed by.
            scopes: What its caller may do.
            expires: From when on it is worth nothing, with its time zone; ``None`` for never.
            owner: The name of its caller; *name* by default.

        Raises:
            DefinitionError: for a name that is taken, an unknown scope, a time in the past.
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

    def find(self, token: str) -> Caller | None:
        """
        Return the caller of a token; ``None`` if it is unknown or has expired.

        It takes as long for a wrong token as for a right one, and looks at the file again where that was changed.
        """
        digest, found = _hash_token(token[:MAX_TOKEN]), None
        # All of them, and no early way out: how long a refusal takes would tell how near a guess was. Digests are
        # compared, so that the file is of no use to who reads it.
        for entry in self._load_entries():
            if hmac.compare_digest(entry.digest, digest):
                found = entry.known
        if found is None or (found.expires is not None and found.expires <= self._clock()):
            return None
        return Caller(found.owner, found.scopes)

    def listed(self) -> tuple[KnownToken, ...]:
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
            # A file of its own beside: the tokens are replaced as a whole file, and a lock on the old one would hold
            # nobody who opens the new one.
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
            # Said, and not left to closing: a process that was forked meanwhile has the open file, too.
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
    Open a file of secrets after a check of its owner and mode; yield ``None`` if it does not exist.

    Args:
        path: The file.
        content: What it holds, in words.

    Raises:
        DefinitionError: for any other file.
    """
    try:
        # What is opened is what is checked, by its descriptor: asked by name, somebody could put another file there in
        # between. `O_NONBLOCK`, or a pipe of that name would hold the server for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        msg = f"{str(path)!r} cannot be read as a file of {content}: {error.strerror or type(error).__name__}"
        raise DefinitionError(msg) from None
    try:
        _check_secret_file(os.fstat(fd), path, content)
        yield fd
    finally:
        os.close(fd)


def _check_secret_file(status: os.stat_result, path: Path, content: str) -> None:
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
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _entry_to_dict(entry: _TokenEntry) -> dict[str, Any]:
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
    Read a file of tokens.

    Raises:
        DataError: for whatever ``Tokens`` would not have written; what stands there is not shown.
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
        seconds: How long a link may be used, once.
        session_seconds: How long a session lasts.
        path: Where the guard exchanges the code of a link, below where the application is mounted.
        clock: Seconds that only grow.
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

    def make(self, caller: Caller | None = None) -> str:
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

    def exchange(self, code: str) -> str | None:
        """Exchange the code of a link for the token of a new session; ``None`` if it was used or has expired."""
        with self._lock:
            # Taken out before it is looked at: the same link twice, even at the same moment, is one session.
            found = self._codes.pop(_hash_token(code[:MAX_TOKEN]), None)
            if found is None or found.until <= self._clock():
                return None
            secret = secrets.token_urlsafe(TOKEN_BYTES)
            until = self._clock() + self.session_seconds
            _add_session_and_evict_old(
                self._sessions, _hash_token(secret), _LoginSession(found.caller, until), self._clock()
            )
            return secret

    def find(self, secret: str) -> Caller | None:
        """Return the caller of a session token; ``None`` if it is unknown or has expired."""
        # What is compared are digests of what was sent, so how long it takes says nothing of a secret that is known.
        digest = _hash_token(secret[:MAX_TOKEN])
        with self._lock:
            found = self._sessions.get(digest)
            if digest in self._operators:
                return OPERATOR
        return found.caller if found is not None and self._clock() < found.until else None

    def end(self, secret: str) -> None:
        """End the session of a token; an unknown token is ignored."""
        with self._lock:
            self._sessions.pop(_hash_token(secret[:MAX_TOKEN]), None)


OPERATOR = Caller("operator", frozenset({"admin"}))
"""Whoever started the server."""
MAX_SESSIONS = 10_000


def _add_session_and_evict_old(
    sessions: OrderedDict[bytes, _LoginSession], digest: bytes, session: _LoginSession, now: float
) -> None:
    """Add a session; remove expired ones, and the oldest if there are too many."""
    # All of one kind last equally long, so what ended stands in front.
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
"""What every answer says that does not say so itself."""
PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE",
    "access-control-allow-headers": (
        "authorization, content-type, idempotency-key, last-event-id, ai-sdk-version, mcp-session-id, mcp-protocol-version"
    ),
    "access-control-max-age": "600",
}


def _check_positive(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        msg = f"Caps({attribute.name}={value!r}) must be a number above 0"
        raise DefinitionError(msg)


def _check_fraction(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        msg = f"Caps({attribute.name}={value!r}) must be a number of at least 0 and below 1"
        raise DefinitionError(msg)


@frozen(kw_only=True)
class Caps:
    """
    How much a client may send.

    Attributes:
        body: Bytes of a request's body.
        body_seconds: How long a body may take to arrive.
        rate: Requests a second of one caller, in the long run; of one address where a path is open to everybody.
        burst: Requests that a caller may make at once before *rate* holds.
        at_once: Requests of all callers that are answered at the same time, event streams included. By default three quarters of the
            files that this process may open, as many as `stepengine serve` has connections.
        reserve: The part of *at_once* that a caller leaves free for others with its event streams; with all of its requests it leaves
            half as much free.
        failures: Failed logins of one address in *failure_seconds*.
        failure_seconds: See *failures*.
    """

    body: int = attrs.field(default=1024 * 1024, validator=_check_positive)
    body_seconds: float = attrs.field(default=30.0, validator=_check_positive)
    rate: float = attrs.field(default=200.0, validator=_check_positive)
    burst: int = attrs.field(default=2_000, validator=_check_positive)
    at_once: int = attrs.field(factory=lambda: connection_limits_of_process().connections, validator=_check_positive)
    reserve: float = attrs.field(default=0.25, validator=_check_fraction)
    failures: int = attrs.field(default=30, validator=_check_positive)
    failure_seconds: float = attrs.field(default=60.0, validator=_check_positive)


class Guard:
    """
    The ASGI middleware that authenticates callers and refuses oversized, cross-site and too frequent requests.

    A caller is known by ``Authorization: Bearer TOKEN``, the token of a browser's session included, or by *authenticate*. What is let
    through has its whole body already, and ``caller_of(request)``. Everything else gets a problem document; so does what the
    application fails at. Web sockets are refused.

    Args:
        app: The application.
        tokens: Who is known by a token.
        logins: Links and sessions of browsers: ``POST /login`` with ``{"code": ...}`` returns the token of a session, ``POST /logout``
            ends it, and ``POST /login/links`` returns another link to who has the scope ``admin``.
        authenticate: A function of a Starlette ``Request`` for an application's own users, async or not; ``None`` is nobody.
        hosts: Names under which the server is reached, as ``example.com``, or ``example.com:8443`` for one port alone; loopback's
            by default. ``"*"`` lets any name pass: only behind a proxy that looks at them.
        cors: Origins whose pages may call with a token, as ``https://example.com``; none by default.
        open_paths: Paths that need no caller and are reached under any name; what ends with ``/`` is the start of such paths.
        page_paths: Paths that need no caller, but the server's own name: those of a page that holds no data. ``"/"`` is that path alone.
        caps: How much a client may send.
        clock: Seconds that only grow.

    Raises:
        DefinitionError: where nobody could ever be known, a host or an origin is none, or the extra ``serve`` is not installed.
    """

    def __init__(
        self, app: ASGIApp, *, tokens: Tokens | None = None, logins: Logins | None = None,
        authenticate: Authenticate | None = None, hosts: Collection[str] = LOOPBACK, cors: Collection[str] = (),
        open_paths: Collection[str] = ("/health",), page_paths: Collection[str] = (), caps: Caps | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        check_extra_installed()
        if tokens is None and logins is None and authenticate is None:
            msg = "a guard needs tokens=, logins= or authenticate=; without one of them it cannot authenticate callers"
            raise DefinitionError(msg)
        caps = caps or Caps()
        self.app, self.tokens, self.logins, self.authenticate, self.caps = app, tokens, logins, authenticate, caps
        self.hosts, self.cors = _check_and_normalize_hosts(hosts), _check_origins(cors)
        self.open_paths, self.page_paths = tuple(open_paths), tuple(page_paths)
        self._requests = _TokenBuckets(caps.rate, caps.burst, clock)
        self._failures = _TokenBuckets(caps.failures / caps.failure_seconds, caps.failures, clock)
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

    async def _respond_with_security_headers(self, asked: _RequestFacts, receive: Receive, send: Send) -> None:
        """Pass on a request, add the security headers to its response, and answer an error with a problem document."""
        more = self._make_cors_headers(asked)
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": _add_security_headers(message.get("headers", ()), more)}
            await send(message)

        try:
            await self._authenticate_and_dispatch(asked, receive, send_with_headers)
        except _ClientDisconnected:
            return
        except Exception as error:
            if has_begun:
                raise
            await problem_of(error).response()(asked.scope, receive, send_with_headers)

    async def _authenticate_and_dispatch(self, asked: _RequestFacts, receive: Receive, send: Send) -> None:
        """Check the host, origin, caller and limits of a request; then answer a login or logout, or pass it to the application."""
        if not asked.query().isascii():
            # Applications that decode it would fail at it.
            msg = "the query of this request is not percent-encoded"
            raise Problem(msg, status=400, kind="bad_request")
        if _matches_path(asked.path, self.open_paths):
            await self._forward_unauthenticated(asked, receive, send)
            return
        self._check_host(asked)
        if asked.method in SAFE and _matches_path(asked.path, self.page_paths):
            await self._forward_unauthenticated(asked, receive, send)
            return
        if self._is_allowed_preflight(asked):
            await _empty_response(204, PREFLIGHT)(asked.scope, receive, send)
            return
        logins, is_posted = self.logins, asked.method == "POST"
        if logins is not None and asked.path == logins.path and is_posted:
            # Any page can make the browser of its visitor send wrong codes, which would count as the visitor's.
            self._check_origin(asked, self.cors)
            self._spend_rate_tokens(self._failures, asked.address, cost=0)
            body = await self._read_body(asked, receive)
            await self._exchange_login_code(asked, logins, body)(asked.scope, receive, send)
            return
        caller = await self._authenticate(asked)
        report_verified_token(asked.scope)
        self._spend_rate_tokens(self._requests, f"caller {caller.name}")
        with self._hold_request_slot(caller), ExitStack() as stack:
            body = await self._read_body(asked, receive)
            if logins is not None and asked.path == LOGOUT and is_posted:
                logins.end(asked.bearer_token() or "")
                await _empty_response(204, {})(asked.scope, receive, send)
            elif logins is not None and asked.path == f"{logins.path}/links" and is_posted:
                caller.must("admin")
                await _json_response({"link": logins.make(caller)})(asked.scope, receive, send)
            else:
                scope = {
                    **asked.scope,
                    CALLER: caller,
                    COUNT_STREAM: partial(self._reserve_event_stream, caller, stack),
                }
                await self.app(scope, _replay_body(body, receive), send)

    async def _forward_unauthenticated(self, asked: _RequestFacts, receive: Receive, send: Send) -> None:
        """Pass a request without a caller to the application; the rate of its address and the size of its body are limited."""
        self._spend_rate_tokens(self._requests, f"address {asked.address}")
        body = await self._read_body(asked, receive)
        await self.app(asked.scope, _replay_body(body, receive), send)

    # --- who it is ---

    async def _authenticate(self, asked: _RequestFacts) -> Caller:
        """Return the caller by token, session or *authenticate*; if there is none, count the failure and raise ``Problem`` 401."""
        bearer = asked.bearer_token()
        if bearer is not None and self.tokens is not None and (caller := self._find_token_caller(self.tokens, bearer)):
            return caller
        if bearer is not None and self.logins is not None and (caller := self.logins.find(bearer)):
            return caller
        if self.authenticate is not None and (caller := await self._call_authenticate(self.authenticate, asked)):
            self._check_origin(asked, self.cors)
            return caller
        raise self._count_failure_and_make_problem(asked)

    def _find_token_caller(self, tokens: Tokens, bearer: str) -> Caller | None:
        """Return the caller of a token, or ``None``; raise ``Problem`` 503 if the file of tokens cannot be used."""
        try:
            return tokens.find(bearer)
        except (DefinitionError, DataError) as error:
            logger.error("%s", error.message)  # noqa: TRY400  (what is wrong with the file is said; the way here is no help)
            msg = "the server cannot use its file of tokens; the server's log says why"
            raise Problem(msg, status=503, kind="tokens_unusable") from error

    async def _call_authenticate(self, authenticate: Authenticate, asked: _RequestFacts) -> Caller | None:
        """Call *authenticate*, in a thread unless it is async; raise ``TypeError`` unless it returns a ``Caller`` or ``None``."""
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import Request

        if asked.has_credentials():
            self._spend_rate_tokens(self._failures, asked.address, cost=0)
        request = Request(asked.scope)
        if inspect.iscoroutinefunction(authenticate) or inspect.iscoroutinefunction(type(authenticate).__call__):
            found = authenticate(request)
        else:
            found = await run_in_threadpool(authenticate, request)
        caller = await found if inspect.isawaitable(found) else found
        if caller is not None and not isinstance(caller, Caller):
            msg = f"authenticate= returned a {type(caller).__name__}, not a Caller or None"
            raise TypeError(msg)
        return caller

    def _count_failure_and_make_problem(self, asked: _RequestFacts) -> Problem:
        """Count a failed authentication if the request has credentials, and return the problem 401."""
        if asked.has_credentials():
            self._spend_rate_tokens(self._failures, asked.address)
        return _make_unauthenticated_problem()

    def _exchange_login_code(self, asked: _RequestFacts, logins: Logins, body: bytes) -> Response:
        """Return a response with the token of a new session; count a wrong code as a failure, and raise ``Problem`` 401."""
        try:
            code = json.loads(body)["code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            code = ""
        token = logins.exchange(code) if isinstance(code, str) else None
        if token is None:
            self._spend_rate_tokens(self._failures, asked.address)
            msg = "this link was already used, or has expired; run `stepengine studio --link` for a new one"
            raise Problem(msg, status=401, kind="link_spent", headers={"WWW-Authenticate": "Bearer"})
        return _json_response({"token": token, "seconds": int(logins.session_seconds)})

    # --- from where it comes ---

    def _check_host(self, asked: _RequestFacts) -> None:
        """Raise ``Problem`` 421 unless the client used one of the host names of this server."""
        if "*" in self.hosts:
            return
        name, port = asked.host()
        if name not in self.hosts and f"{name}:{port}" not in self.hosts:
            msg = "this server does not answer to this host name; use one of the host names that it was started with"
            raise Problem(msg, status=421, kind="foreign_host")

    def _check_origin(self, asked: _RequestFacts, allowed_origins: Collection[str]) -> None:
        """Raise for requests that a page of another site makes a browser send in its user's name."""
        site, origin = asked.header("sec-fetch-site"), asked.header("origin")
        if asked.method in SAFE:
            # A link is followed; a script, an image or a frame of another site has no business here.
            is_followed = asked.header("sec-fetch-mode") == "navigate" and asked.header("sec-fetch-dest") == "document"
            is_fine = site in {None, "same-origin", "none"} or is_followed or origin in allowed_origins
        elif origin is None and site is None:
            is_fine = asked.header("cookie") is None
        elif origin in allowed_origins:
            is_fine = True
        else:
            is_fine = site in {None, "same-origin", "none"} and (origin is None or asked.is_same_origin(origin))
        if not is_fine:
            msg = "a page of another site sent this request; a program must send a token instead of a cookie"
            raise Problem(msg, status=403, kind="cross_site")

    def _is_allowed_preflight(self, asked: _RequestFacts) -> bool:
        is_asked = asked.method == "OPTIONS" and asked.header("access-control-request-method") is not None
        return is_asked and asked.header("origin") in self.cors

    def _make_cors_headers(self, asked: _RequestFacts) -> dict[str, str]:
        if not self.cors:
            return {}
        origin = asked.header("origin")
        if origin is None or origin not in self.cors:
            return {"vary": "Origin"}
        return {
            "vary": "Origin",
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "location, retry-after, mcp-session-id",
            "cross-origin-resource-policy": "cross-origin",
        }

    # --- how much it is ---

    def _spend_rate_tokens(self, buckets: _TokenBuckets, key: str, *, cost: int = 1) -> None:
        """Spend *cost* tokens of a bucket; raise ``Problem`` 429 if it has none."""
        wait = buckets.spend_or_get_wait(key, cost)
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

    async def _read_body(self, asked: _RequestFacts, receive: Receive) -> bytes:
        """
        Read the whole body, so that no application acts on a part of one.

        Raises:
            Problem: 400, 408 or 413.
            _ClientDisconnected: where the client left before its end.
        """
        length = asked.header("content-length")
        if length is not None and not (length.isascii() and length.isdigit()):
            msg = "Content-Length is not a number"
            raise Problem(msg, status=400, kind="bad_request")
        if length is not None and (len(length) > MAX_DIGITS or int(length) > self.caps.body):
            raise self._make_size_problem()
        body = bytearray()
        try:
            async with asyncio.timeout(self.caps.body_seconds):
                while await self._append_body_chunk(receive, body):
                    pass
        except TimeoutError:
            msg = f"the body of this request did not arrive within {self.caps.body_seconds:g} s"
            raise Problem(msg, status=408, kind="slow_body", headers={"Connection": "close"}) from None
        return bytes(body)

    async def _append_body_chunk(self, receive: Receive, body: bytearray) -> bool:
        """Receive a chunk of the body and return whether more follow; raise if the client left or the body is too large."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientDisconnected
        body += message.get("body", b"")
        if len(body) > self.caps.body:
            raise self._make_size_problem()
        return bool(message.get("more_body", False))

    def _make_size_problem(self) -> Problem:
        msg = f"the body of this request is larger than {self.caps.body:,} bytes"
        return Problem(msg, status=413, kind="body_too_large", headers={"Connection": "close"})


class _ClientDisconnected(Exception):
    """The client disconnected before it had sent the whole request."""


class _RequestFacts:
    """The untrusted facts of a request, read from its scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self._headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.lower(), []).append(value)
        root = scope.get("root_path", "")
        path: str = scope["path"]
        self.path = path[len(root) :] if root and path.startswith(f"{root}/") else path

    def header(self, name: str) -> str | None:
        """Return a header; if it is there several times, its values are joined, so that none of them is accepted alone."""
        found = self._headers.get(name.encode("ascii"))
        return None if found is None else b", ".join(found).decode("latin-1")

    def has_credentials(self) -> bool:
        """Return whether the request has credentials: a bearer token or a cookie."""
        return b"authorization" in self._headers or b"cookie" in self._headers

    def bearer_token(self) -> str | None:
        """Return the bearer token of the request: ``None`` if it has none, ``""`` if it has several."""
        found = self._headers.get(b"authorization")
        if found is None:
            return None
        scheme, _, token = found[0].decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return token.strip() if len(found) == 1 else ""

    def query(self) -> str:
        """Return the query string."""
        return bytes(self.scope.get("query_string", b"")).decode("latin-1")

    def host(self) -> tuple[str, str]:
        """
        Return the host name that the client used, and the port.

        Raises:
            Problem: 400, where it says none, or several.
        """
        found = HOST.fullmatch((self.header("host") or "").lower())
        if found is None:
            msg = "this request must have exactly one valid Host header"
            raise Problem(msg, status=400, kind="bad_request")
        return found[1].rstrip("."), found[2] or PORTS.get(self.scope.get("scheme", "http"), "")

    def is_same_origin(self, origin: str) -> bool:
        """Return whether an origin, such as ``https://example.org``, is that of this server."""
        found, host = ORIGIN.fullmatch(origin), HOST.fullmatch((self.header("host") or "").lower())
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


class _TokenBuckets:
    """Token buckets by key: *burst* requests at once, then *rate* a second. Only the most recently used keys are kept."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend_or_get_wait(self, key: str, cost: int = 1) -> float:
        """Remove *cost* tokens, even into debt, if there is one at least, and return 0; else return the seconds until there is one."""
        now = self._clock()
        level, at = self._levels.pop(key, (float(self._burst), now))
        level = min(self._burst, level + (now - at) * self._rate)
        wait = 0.0 if level >= 1 else (1 - level) / self._rate
        self._levels[key] = (level if wait else level - cost, now)
        if len(self._levels) > MAX_BUCKETS:
            self._levels.popitem(last=False)
        return wait


def _make_unauthenticated_problem() -> Problem:
    msg = "this request needs a token: `Authorization: Bearer TOKEN`; `stepengine tokens add` creates one"
    return Problem(msg, status=401, kind="unauthenticated", headers={"WWW-Authenticate": "Bearer"})


def _matches_path(path: str, paths: Iterable[str]) -> bool:
    """Return whether *path* is one of *paths*, or starts with one that ends with a slash."""
    return any(path == one or (one.endswith("/") and one != "/" and path.startswith(one)) for one in paths)


def _json_response(content: Mapping[str, object]) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content)


def _empty_response(status: int, headers: Mapping[str, str]) -> Response:
    from starlette.responses import Response

    return Response(status_code=status, headers=dict(headers))


def _add_security_headers(
    headers: Iterable[tuple[bytes, bytes]], cors_headers: Mapping[str, str]
) -> list[tuple[bytes, bytes]]:  # fmt: skip
    given = [(bytes(name).lower(), bytes(value)) for name, value in headers]
    added = {**SECURITY, **cors_headers}
    has = {name for name, _ in given} - {b"vary"}
    return [*given, *[(k.encode(), v.encode("latin-1")) for k, v in added.items() if k.encode() not in has]]


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that returns a body that was read before, then the messages of *receive*."""
    is_given = False

    async def receive_body() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body


def _check_and_normalize_hosts(given: Collection[str]) -> frozenset[str]:
    """Return host names in lower case; raise ``DefinitionError`` for an invalid one."""
    names = frozenset(name.lower().rstrip(".") for name in _refuse_single_string("hosts", given))
    for name in names:
        if name != "*" and not HOST.fullmatch(name):
            msg = (
                f"hosts= has the invalid name {name!r}; use a name such as 'example.com', '127.0.0.1' or '[::1]', "
                "with or without a port"
            )
            raise DefinitionError(msg)
    return names


def _check_origins(given: Collection[str]) -> frozenset[str]:
    for origin in _refuse_single_string("cors", given):
        if not ORIGIN.fullmatch(origin):
            msg = (
                f"cors= has the invalid origin {origin!r}; use an origin such as 'https://example.com', without a path "
                "and without *"
            )
            raise DefinitionError(msg)
    return frozenset(given)


def _refuse_single_string(option: str, given: Collection[str]) -> Collection[str]:
    if isinstance(given, str):
        msg = f"{option}={given!r} is a string; pass a list of strings"
        raise DefinitionError(msg)
    return given


# --- folders --------------------------------------------------------------------------------------------------------

MAX_LINKS = 40


def resolve_trusted_path(path: str | os.PathLike[str]) -> Path:
    """
    Return the real path of a folder or database of runs; raise if another user could write to it or replace it.

    Whoever can write a journal decides what a run that goes on does next.

    Raises:
        JournalMissing: where there is nothing.
        JournalError: where it belongs to somebody else, or others may write to it, or may put something else in its place: also
            where it is a link, for what that leads to.
    """
    place, real = Path(os.path.abspath(path)), os.path.realpath(path)  # noqa: PTH100  (links are looked at one by one)
    for _ in range(MAX_LINKS):
        link = _find_first_link(place)
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
    _check_type_owner_and_mode(place)
    return place


def _find_first_link(path: Path) -> Path | None:
    """Return the first symbolic link in a path; raise if another user can change one of the folders before it."""
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


def _check_type_owner_and_mode(path: Path) -> None:
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
