"""
``SafeFetcher``: fetches pages from the web, but not from private networks.

The size of the decoded body and of the headers and the compression ratio are limited.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from stepengine.errors import BlockedAddress, DefinitionError, ToolError
from stepengine.workspace.urls import (
    AllowList,
    UrlTarget,
    find_blocked_reason,
    parse_address,
    parse_networks,
    parse_url,
    resolve_redirect,
)

if TYPE_CHECKING:
    import ssl

    import httpx2

MIB = 1024 * 1024
"""The number of bytes in a mebibyte."""
WEB_BYTES = 2_000_000
"""Pages with all their scripts have less; what is read of a page is some kilobytes of text."""
WEB_HEADER_BYTES = 64 * 1024
"""Servers send some kilobytes; more is an attack."""
WEB_RATIO = 100
"""Text is packed to a tenth, rarely to a fiftieth; more is made to fill the memory."""

GZIP_OR_ZLIB_BITS = 47
"""Zlib documents 32 for recognizing the format by itself, added to the 15 bits of its largest window."""
PIECE_BYTES = 4_096
"""A packed piece of this size holds some megabytes at most, so that the limit is checked in time."""
CODINGS = frozenset({"gzip", "x-gzip", "deflate"})


def check_header_size(response: httpx2.Response, where: str) -> None:
    """
    Raise ``ToolError`` if the headers of a response are larger than 64 KiB.

    Raises:
        ToolError: With their size.
    """
    size = sum(len(name) + len(value) + 4 for name, value in response.headers.raw)
    if size > WEB_HEADER_BYTES:
        msg = f"{where} answered with {size:,} bytes of headers; at most {WEB_HEADER_BYTES:,} are read"
        raise ToolError(msg)


async def read_body(response: httpx2.Response, where: str) -> tuple[bytes, bool]:
    """
    Read a body and return (at most 2,000,000 decoded bytes, whether it was cut); raise ``ToolError`` for an invalid encoding.

    Raises:
        ToolError: For an unexpected content encoding, several encodings, invalid data, and a compression ratio above 100.
    """
    codings = [c.strip().lower() for c in response.headers.get("content-encoding", "").split(",") if c.strip()]
    codings = [c for c in codings if c != "identity"]
    if len(codings) > 1 or not CODINGS.issuperset(codings):
        msg = f"{where} answered in the content encoding {', '.join(codings)!r}; only one layer of gzip is read"
        raise ToolError(msg)
    inflate = _Decompressor(where) if codings else None
    made, came = bytearray(), 0
    async for chunk in response.aiter_raw():
        made += chunk if inflate is None else inflate.feed(chunk)
        came += len(chunk)
        if max(len(made), came) > WEB_BYTES:  # what follows the end of compressed data makes nothing, but does not end
            return bytes(made[:WEB_BYTES]), True
    return bytes(made), False


class _Decompressor:
    """One layer of decompression with bounded memory."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._inflater = zlib.decompressobj(GZIP_OR_ZLIB_BITS)
        self._read = 0
        self._made = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return the decompressed data of the next chunk; raise ``ToolError`` for invalid data or a decompression bomb."""
        pieces = (chunk[start : start + PIECE_BYTES] for start in range(0, len(chunk), PIECE_BYTES))
        return b"".join([self._decompress(piece) for piece in pieces])

    def _decompress(self, chunk: bytes) -> bytes:
        """Return the decompressed data of one piece, nothing after the end or the size limit; raise ``ToolError`` for invalid data."""
        if self._inflater.eof or self._made > WEB_BYTES:
            return b""
        self._read += len(chunk)
        try:
            data = self._inflater.decompress(chunk, max(1, WEB_BYTES + 1 - self._made))
        except zlib.error as error:
            msg = f"{self._where} answered with broken compressed data: {error}"
            raise ToolError(msg) from None
        self._made += len(data)
        if self._made > MIB and self._made > WEB_RATIO * self._read:
            msg = f"{self._where} answered with {self._read:,} bytes that unpack to more than {self._made:,}; that is refused"
            raise ToolError(msg)
        return data


@cache
def get_ssl_context() -> ssl.SSLContext:
    """Return the SSL context with the trusted certificates. It is created once, because loading them is slow."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)


count_page: ContextVar[Callable[[], None]] = ContextVar("stepengine_count_page", default=lambda: None)
"""Called before each fetch of a page by a tool; it raises ``ToolError`` if the run has reached its limit of pages."""


class Gates:
    """
    Semaphores by name; each event loop has its own, because one cannot be used in two.

    Args:
        size: The number of callers that may hold one semaphore at once.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, weakref.WeakValueDictionary[str, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    def get_or_create_semaphore(self, name: str) -> asyncio.Semaphore:
        """Return the semaphore of *name*, created if necessary; it exists as long as a caller waits for it or holds it."""
        gates = self._by_loop.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
        gate = gates.get(name)
        if gate is None:
            gate = gates[name] = asyncio.Semaphore(self._size)
        return gate


WEB_CONNECT_SECONDS = 10.0
"""A server that can be reached answers within a second or two."""
WEB_IDLE_SECONDS = 10.0
"""Slow servers take seconds for a page; a silent one does not answer at all."""
WEB_SECONDS = 20.0
"""A server that sends a byte now and then must not hold a run."""
WEB_REDIRECTS = 5
"""Two or three are common (to HTTPS, to www, to a login); more are a loop."""
WEB_FETCHES_PER_HOST = 4
"""As few as a browser uses, so that no site is flooded."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Takes a host name and a port and returns its IP addresses."""

USER_AGENT = "stepengine"
REDIRECTS = frozenset({301, 302, 303, 307, 308})
METHODS = ("GET", "HEAD")
TEXTS = ("json", "xml", "javascript", "yaml", "toml", "markdown")
UNSPECIFIED = ("", "application/octet-stream", "binary/octet-stream")


@frozen
class Fetched:
    """
    A fetched response.

    Attributes:
        url: The address that answered, after redirects.
        status: The HTTP status.
        content_type: The ``Content-Type`` header.
        body: The content; empty if it is not text.
        truncated: Whether the content was longer.
    """

    url: str
    status: int
    content_type: str = ""
    body: bytes = b""
    truncated: bool = False


class Fetcher(Protocol):
    """Fetches URLs. ``SafeFetcher`` is an implementation; your own decides which URLs it accesses."""

    async def fetch(self, url: str) -> Fetched:
        """Return the response for *url*, or raise ``ToolError``."""


def is_text(content_type: str) -> bool:
    """Return True for a content type whose body is read as text: text, HTML, JSON, XML and the like."""
    kind = content_type.partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    return main == "text" or (main == "application" and any(word in sub for word in TEXTS))


class SafeFetcher:
    """
    Fetches by GET and HEAD from allowed hosts, and never from private addresses.

    A name is resolved once per hop, every address is judged by our own table, and the connection goes to an address that
    was judged; TLS and the ``Host`` header keep the name. Up to 5 redirects are followed, each judged like a new address,
    none from https to http. No cookies, no environment proxies, no netrc, no credentials. At most 2,000,000 decoded bytes
    in 20 seconds.

    Args:
        allow: Hosts, such as ``["docs.python.org", "*.example.com", "example.com:8080"]``, or ``"public"`` for every
            public one.
        ports: More ports than 80 and 443, for any host.
        allow_networks: Networks that may be reached although they are private, such as ``["10.1.2.0/24"]``; who names
            one lets the model reach what is there, as far as *allow* goes.
        headers: Headers per host, such as ``{"docs.corp": {"Authorization": "..."}}``; sent to exactly that host and
            only over https.
        resolve: Takes host and port and returns addresses; the system's resolver by default.
        ssl_context: How certificates are checked; the system's trust by default.
        proxy: A forward proxy. It resolves names itself, so the address rules are its job then.
        proxy_enforces_policy: Says that it does that job; needed with *proxy*.
        seconds: How long one fetch may take, redirects included; 20 by default.

    Raises:
        DefinitionError: when *allow* is empty or no list of hosts, *allow_networks* holds what is no network, or *proxy*
            stands alone.
    """

    def __init__(
        self,
        *,
        allow: Sequence[str] | str,
        ports: Sequence[int] = (),
        allow_networks: Sequence[str] = (),
        headers: Mapping[str, Mapping[str, str]] | None = None,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
        proxy_enforces_policy: bool = False,
        seconds: float = WEB_SECONDS,
    ) -> None:
        if proxy is not None and not proxy_enforces_policy:
            msg = (
                "a proxy resolves names itself, so SafeFetcher cannot keep it from private addresses; "
                "pass proxy_enforces_policy=True if the proxy refuses them"
            )
            raise DefinitionError(msg)
        self._allow = AllowList(allow, ports)
        try:
            self._networks = parse_networks(allow_networks)
        except ValueError as error:
            msg = f"allow_networks: {error}"
            raise DefinitionError(msg) from None
        self._headers = {host.lower(): dict(values) for host, values in (headers or {}).items()}
        self._resolve = resolve or resolve_host
        self._ssl = ssl_context
        self._proxy = proxy
        self._seconds = seconds
        self._gates = Gates(WEB_FETCHES_PER_HOST)

    async def fetch(self, url: str, *, method: str = "GET") -> Fetched:
        """
        Return the content at *url*.

        Args:
            url: An http or https address.
            method: ``"GET"`` or ``"HEAD"``.

        Raises:
            BlockedAddress: If the address, or one that it redirects to, is not allowed.
            ToolError: If there is no connection, no response in time, too many redirects, or an invalid response.
        """
        if method not in METHODS:
            msg = f"{method!r} is not sent; only {' and '.join(METHODS)} are"
            raise ToolError(msg)
        target = parse_url(url)
        try:
            return await self._follow_redirects(target, method)
        except TimeoutError:
            msg = f"{target.url} did not answer within {self._seconds:g} s"
            raise ToolError(msg) from None

    async def _follow_redirects(self, target: UrlTarget, method: str) -> Fetched:
        """Send requests until a response is no redirect, and return it; raise an error for a forbidden target and after the time limit."""
        now, left = asyncio.get_running_loop().time, self._seconds
        for _ in range(WEB_REDIRECTS + 1):
            self._allow.check(target)
            async with self._gates.get_or_create_semaphore(target.host):  # waiting for its turn is not the host's fault
                began = now()
                async with asyncio.timeout(left):
                    found = await self._send_once(target, method)
            left -= now() - began
            if isinstance(found, Fetched):
                return found
            if target.scheme == "https" and found.scheme == "http":
                msg = f"{target.url} redirects from https to {found.url}, which is not followed"
                raise BlockedAddress(msg)
            target = found
        msg = f"{target.url} was reached after {WEB_REDIRECTS} redirects and redirects again"
        raise ToolError(msg)

    async def _send_once(self, target: UrlTarget, method: str) -> Fetched | UrlTarget:
        """Send one request; return the response, or the target of its redirect. Raise ``ToolError`` if the request fails."""
        import httpx2

        addresses = [target.host] if self._proxy else await self._resolve_allowed(target)
        transport = httpx2.AsyncHTTPTransport(
            verify=self._ssl or get_ssl_context(),
            trust_env=False,
            limits=httpx2.Limits(max_connections=1, max_keepalive_connections=0),
            proxy=None if self._proxy is None else httpx2.Proxy(self._proxy),
        )
        try:
            response = await self._send_to_first_address(transport, target, method, addresses)
            try:
                return await _read_response_or_redirect(response, target, method)
            finally:
                await response.aclose()
        except httpx2.TimeoutException:
            msg = f"{target.url} did not answer: no data for {WEB_IDLE_SECONDS:g} s"
            raise ToolError(msg) from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError) as error:
            msg = f"{target.url} cannot be read: {type(error).__name__}: {error}"
            raise ToolError(msg) from None
        finally:
            await transport.aclose()

    async def _resolve_allowed(self, target: UrlTarget) -> Sequence[str]:
        """Resolve a host, and return its IP addresses; raise ``BlockedAddress`` if one is not allowed, ``ToolError`` if there is none."""
        literal = parse_address(target.host)
        if literal is not None:
            found: Sequence[str] = [str(literal)]
        else:
            try:
                async with asyncio.timeout(WEB_CONNECT_SECONDS):
                    found = await self._resolve(target.host, target.port)
            except (OSError, UnicodeError) as error:
                msg = f"the host {target.host!r} cannot be found: {error}"
                raise ToolError(msg) from None
        if not found:
            msg = f"the host {target.host!r} has no address"
            raise ToolError(msg)
        for address in found:
            why = find_blocked_reason(address, self._networks)
            if why:
                msg = f"{target.url} is not fetched: {target.host!r} is at {address}, which is not allowed ({why})"
                raise BlockedAddress(msg)
        return found

    async def _send_to_first_address(
        self, transport: httpx2.AsyncHTTPTransport, target: UrlTarget, method: str, addresses: Sequence[str]
    ) -> httpx2.Response:
        """Send a request to the first of *addresses* that accepts a connection, and return the response; raise ``ToolError`` if none does."""
        import httpx2

        for position, address in enumerate(addresses):
            request = self._make_request(target, method, address)
            try:
                return await transport.handle_async_request(request)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if position == len(addresses) - 1:
                    raise
        msg = f"{target.url} has no address"
        raise ToolError(msg)

    def _make_request(self, target: UrlTarget, method: str, address: str) -> httpx2.Request:
        """Return a request to an IP address, with the host in header and SNI; own headers are added for https only."""
        import httpx2

        url = httpx2.URL(scheme=target.scheme, host=address, port=target.port, raw_path=target.path.encode("ascii"))
        own = self._headers.get(target.host, {}) if target.scheme == "https" else {}
        headers = {
            "Host": target.authority,
            "User-Agent": USER_AGENT,
            "Accept": "text/*, application/json",
            "Accept-Encoding": "gzip",
            **own,
        }
        waits = {"connect": WEB_CONNECT_SECONDS, **dict.fromkeys(("read", "write", "pool"), WEB_IDLE_SECONDS)}
        extensions: dict[str, object] = {"timeout": waits}
        if parse_address(target.host) is None:
            extensions["sni_hostname"] = target.host
        return httpx2.Request(method, url, headers=headers, extensions=extensions)


async def _read_response_or_redirect(response: httpx2.Response, target: UrlTarget, method: str) -> Fetched | UrlTarget:
    """Return the response, with its body for GET and text only; for a redirect, its target."""
    check_header_size(response, target.url)
    location = response.headers.get("location")
    if response.status_code in REDIRECTS and location:
        return resolve_redirect(target, location)
    content_type = str(response.headers.get("content-type", ""))
    readable = is_text(content_type) or content_type in UNSPECIFIED
    is_read = method == "GET" and readable
    body, is_cut = await read_body(response, target.url) if is_read else (b"", False)
    return Fetched(target.url, response.status_code, content_type, body, is_cut)


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host from the system's resolver, without duplicates."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
