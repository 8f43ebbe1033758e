"""
Checks of web addresses: the only parser of URLs, and the table of IP addresses.

The parsed target is checked and used for the connection. The parser accepts less than the standards: a host is a dotted-quad IPv4
address, an IPv6 address in brackets, or a name with an IDNA form. Anything that resolvers and browsers read in more than one
way raises an error.

The table is our own. The standard library classifies several addresses as global that lead to this machine, to its network or to its
cloud host. An IPv4 address inside of an IPv6 address is extracted and checked, too; tunnels raise an error as such.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeAlias
from urllib.parse import quote, urljoin, urlsplit

from attrs import frozen

from stepengine.data.visible import cut_after
from stepengine.errors import BlockedAddress, DefinitionError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# fmt: off
BLOCKED_V4 = tuple((ipaddress.IPv4Network(net), why) for net, why in (
    ("0.0.0.0/8", "this host"), ("10.0.0.0/8", "private"), ("100.64.0.0/10", "shared address space"),
    ("127.0.0.0/8", "loopback"), ("168.63.129.16/32", "a service of the cloud host"), ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"), ("192.0.0.0/24", "reserved for protocols"), ("192.0.2.0/24", "documentation"),
    ("192.31.196.0/24", "reserved for protocols"), ("192.52.193.0/24", "reserved for protocols"),
    ("192.88.99.0/24", "a tunnel (6to4)"), ("192.168.0.0/16", "private"), ("192.175.48.0/24", "reserved for protocols"),
    ("198.18.0.0/15", "benchmarking"), ("198.51.100.0/24", "documentation"), ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"), ("240.0.0.0/4", "reserved or broadcast"),
))
BLOCKED_V6 = tuple((ipaddress.IPv6Network(net), why) for net, why in (
    ("64:ff9b:1::/48", "a translation of a local network"), ("2001::/23", "a tunnel or reserved for protocols"),
    ("2001:db8::/32", "documentation"), ("2002::/16", "a tunnel (6to4)"), ("2620:4f:8000::/48", "reserved for protocols"),
    ("3fff::/20", "documentation"), ("5f00::/16", "segment routing"),
))
# fmt: on
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
COMPATIBLE = ipaddress.IPv6Network("::/96")


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """
    Parse networks such as ``"10.1.0.0/16"``.

    Raises:
        ValueError: when one is not a network.
    """
    return tuple([ipaddress.ip_network(text) for text in texts])


USER_INFO = re.compile(r"//(?:[^/?#\s@:\[]*:(?!\d{1,5}(?:/|$))\S{0,256}@|[^/?#\s]*@)")
"""With a password up to the last ``@``: people forget to escape the ``/``, ``?``, ``#`` and ``@`` in it. A port is no password."""


def remove_user_info(text: str) -> str:
    """Return *text* without the user names and passwords of its addresses, for messages."""
    return USER_INFO.sub("//", text)


def normalize_service_url(url: str) -> str:
    """
    Return the http(s) URL of a service without a slash at its end; raise ``DefinitionError`` for another URL or a query.

    Raises:
        DefinitionError: when it is not an http or https address, or has a query.
    """
    if not url.startswith(("http://", "https://")) or "?" in url or "#" in url:
        msg = (
            f"{remove_user_info(url)!r} is not the address of a search service; use one such as 'http://localhost:8080'"
        )
        raise DefinitionError(msg)
    return url.rstrip("/")


def parse_address(text: str) -> Address | None:
    """Return the IP address in *text* in its usual form; ``None`` for other texts and for addresses with a scope id."""
    try:
        return None if "%" in text else ipaddress.ip_address(text)
    except ValueError:
        return None


def is_loopback_host(host: str) -> bool:
    """Return whether a host, given as a name or an IP address, is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_listen_problem(host: str) -> str:
    """Return why this machine cannot listen on a host; ``""`` if it can, and for names, which are not looked up."""
    is_v6 = ":" in host
    try:
        if is_v6:
            ipaddress.IPv6Address(host)
        elif host.replace(".", "").isdecimal():
            socket.inet_aton(host)
        else:
            host.encode("idna")
            return ""
    except (OSError, ValueError):
        return "it is neither an IP address nor a host name"
    try:
        with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET) as tried:
            tried.bind((host, 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def find_blocked_reason(text: str, allowed: Sequence[Network] = ()) -> str:
    """
    Return why an address is blocked; ``""`` if it may be used.

    Args:
        text: The address.
        allowed: Networks that are not blocked, despite the table.
    """
    address = parse_address(text)
    if address is None:
        return "no plain IP address"
    if any(address.version == net.version and address in net for net in allowed):
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return next((why for net, why in BLOCKED_V4 if address in net), "")
    if any(address in net for net in (MAPPED, COMPATIBLE, TRANSLATED)):
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        why = find_blocked_reason(str(inner), allowed)
        if why or address not in TRANSLATED:
            return f"IPv4 inside of IPv6, {why or 'which nobody uses on the public internet'}"
        return ""
    return next((why for net, why in BLOCKED_V6 if address in net), "" if address in GLOBAL_V6 else "not public")


URL_CHARS = 4_096
"""Longer addresses hold data, and servers mostly refuse those of more than 8,000 characters."""
PORTS = {"http": 80, "https": 443}
URL = re.compile(r"(?i:(https?))://([^/?#]*)([^#]*)(?:#.*)?", re.DOTALL)
AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?")
LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
HOST_CHARS = 253
"""DNS allows 253 characters for a name."""
SAFE = "/?&=;:@!$'()*+,-._~%[]|"
MAX_PORT = 65_535
"""A port of TCP has 16 bits."""
IPV6_VERSION = 6
"""The version number of addresses in brackets in Python's ``ipaddress``."""


@frozen
class UrlTarget:
    """
    The scheme, host, port and path of a request.

    Attributes:
        scheme: ``"http"`` or ``"https"``.
        host: The IDNA form in lower case, or an IP address without brackets.
        port: The port, the scheme's own when none was given.
        path: Path and query as they are sent, ASCII.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host and port in the form of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as text."""
        return f"{self.scheme}://{self.authority}{self.path}"


def _make_blocked_error(url: str, reason: str) -> BlockedAddress:
    """Return the error for a URL that is not fetched, without its user name and password."""
    shown = cut_after(remove_user_info(url), 200)
    return BlockedAddress(f"{shown!r} is not fetched: {reason}")


def parse_url(text: str) -> UrlTarget:
    """
    Return the target of a URL; raise ``BlockedAddress`` unless it is a plain http or https address.

    Raises:
        BlockedAddress: when it is not a plain http or https address.
    """
    url = text.strip(" ")
    if len(url) > URL_CHARS:
        raise _make_blocked_error(url, f"the address has more than {URL_CHARS:,} characters")
    if any(unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"} or c == "\\" for c in url):
        raise _make_blocked_error(url, "it holds a blank, a control character or a backslash; percent-encode them")
    found = URL.fullmatch(url)
    if found is None:
        raise _make_blocked_error(url, "only addresses that begin with http:// or https:// are")
    scheme, authority, rest = found[1].lower(), found[2], found[3]
    if "@" in authority:
        raise _make_blocked_error(url, "it holds a user name; leave out everything up to the '@'")
    parts = AUTHORITY.fullmatch(authority)
    if parts is None:
        raise _make_blocked_error(url, "it has no host that could be understood")
    port = int(parts[2]) if parts[2] else PORTS[scheme]
    if not 0 < port <= MAX_PORT:
        raise _make_blocked_error(url, f"{port} is not a port")
    path = quote(rest if rest.startswith("/") else f"/{rest}", safe=SAFE)
    return UrlTarget(scheme, _parse_host(parts[1], url), port, path)


def _parse_host(text: str, url: str) -> str:
    """Return a host in its usual form; raise ``BlockedAddress`` for ``localhost`` and for ambiguous or invalid hosts."""
    if text.startswith("["):
        address = parse_address(text[1:-1])
        if address is None or address.version != IPV6_VERSION:
            raise _make_blocked_error(url, "the brackets hold no IPv6 address")
        return str(address)
    name = _encode_idna(text.removesuffix("."), url)
    labels = name.split(".")
    if not all(LABEL.fullmatch(label) for label in labels) or len(name) > HOST_CHARS:
        raise _make_blocked_error(url, "its host holds characters that host names do not have")
    if NUMERIC_LABEL.fullmatch(labels[-1]):
        if text != name or parse_address(text) is None:
            raise _make_blocked_error(url, "write IPv4 addresses as four decimal numbers, such as 192.0.2.1")
        return text
    if name == "localhost" or name.endswith(".localhost"):
        raise _make_blocked_error(url, "localhost is this machine")
    return name


def _encode_idna(name: str, url: str) -> str:
    """Return a host name in its ASCII form and lower case; raise ``BlockedAddress`` if it has none."""
    if name.isascii():
        return name.lower()
    import idna

    try:
        return idna.encode(name, uts46=True, std3_rules=True).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError):
        raise _make_blocked_error(url, "its host is no international host name") from None


def resolve_redirect(base: UrlTarget, location: str) -> UrlTarget:
    """
    Return the target of a redirect; raise ``BlockedAddress`` unless it is a plain http or https address.

    Raises:
        BlockedAddress: when the target is not a plain http or https address.
    """
    if any(c <= " " or c in {"\x7f", "\\"} for c in location.strip(" ")):
        raise _make_blocked_error(location, "the redirect holds a blank, a control character or a backslash")
    try:
        return parse_url(urljoin(base.url, location.strip(" ")))
    except ValueError:
        raise _make_blocked_error(location, "the redirect is not an address") from None


class AllowList:
    """
    The hosts that may be fetched from, compared label by label.

    Args:
        hosts: Host names such as ``"docs.python.org"``, ``"*.example.com"`` (every name below, not the name itself), and IP
            addresses, IPv6 in brackets. A port such as ``"example.com:8080"`` allows only this port. Or ``"public"``.
        ports: More ports that may be used with any host.

    Raises:
        DefinitionError: when an entry is not a host, or there are none.
    """

    def __init__(self, hosts: Sequence[str] | str, ports: Sequence[int]) -> None:
        self._ports = frozenset({80, 443, *ports})
        self._public = hosts == "public"
        if not hosts or (isinstance(hosts, str) and not self._public):
            msg = f'allow={hosts!r} is not a list of hosts; write allow=["docs.python.org", "*.example.com"] or allow="public"'
            raise DefinitionError(msg)
        self._exact: set[tuple[str, int | None]] = set()
        self._below: set[tuple[tuple[str, ...], int | None]] = set()
        for entry in () if self._public else hosts:
            self._add_entry(entry)

    def _add_entry(self, entry: str) -> None:
        """Parse an entry and add its host, with a port if it names one; raise ``DefinitionError`` for anything else."""
        is_wild = entry.startswith("*.")
        try:
            target = parse_url(f"http://{entry.removeprefix('*.')}")
        except BlockedAddress as error:
            msg = f"allow: {entry!r} is not a host; {error.message}"
            raise DefinitionError(msg) from None
        if target.path != "/":
            msg = f"allow: {entry!r} has a path; entries are hosts such as 'example.com' or 'example.com:8080'"
            raise DefinitionError(msg)
        port = None if urlsplit(f"http://{entry}").port is None else target.port
        if is_wild:
            self._below.add((tuple(target.host.split(".")), port))
        else:
            self._exact.add((target.host, port))

    def check(self, target: UrlTarget) -> None:
        """
        Raise an error for a host or port that is not allowed.

        Raises:
            BlockedAddress: when it is not allowed; the message names the host or port.
        """
        if not self._public and (target.host, target.port) in self._exact:
            return
        labels = tuple(target.host.split("."))
        below = [(labels[-n:], target.port) for n in range(1, len(labels))]
        if not self._public and not self._below.isdisjoint(below):
            return
        if target.port not in self._ports:
            raise _make_blocked_error(target.url, f"port {target.port} is not among the ports that may be used")
        any_port = [(names, None) for names, _ in below]
        if self._public or (target.host, None) in self._exact or not self._below.isdisjoint(any_port):
            return
        raise _make_blocked_error(target.url, f"the host {target.host!r} is not among those that may be fetched from")
