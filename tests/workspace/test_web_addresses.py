"""Which addresses web tools take, before anything is sent: the table, the parser, the allow-list."""

from __future__ import annotations

import ipaddress
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.errors import BlockedAddress, DefinitionError, ToolError
from stepengine.tools.bundled import SafeFetcher, web_tools
from stepengine.workspace.urls import AllowList, find_blocked_reason, parse_networks, parse_url, resolve_redirect
from stepengine.workspace.workspace import Workspace
from tests.bundled_tools.web_server import Names, site

NW01 = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255",
    "192.168.0.1", "169.254.169.254", "100.64.0.1", "100.127.255.255", "100.100.100.200", "168.63.129.16", "224.0.0.1",
    "239.1.1.1", "255.255.255.255", "240.0.0.1", "192.0.0.8", "192.88.99.1", "198.18.0.1", "192.0.2.1", "198.51.100.1",
    "203.0.113.7", "::1", "::", "fd00::1", "fd00:ec2::254", "fe80::1", "ff02::1", "fec0::1", "2001:db8::1", "100::1",
]  # fmt: skip
IN_IPV6 = [
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1", "2002:7f00:1::", "2001::1",
]  # fmt: skip
PUBLIC = [
    "1.1.1.1", "8.8.8.8", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1", "11.0.0.1", "168.63.129.17",
    "2606:4700:4700::1111", "2a00:1450::1", "64:ff9b::808:808",
]  # fmt: skip


PASSWORD = st.text("#?/@:%[]!1a", max_size=5).filter(lambda text: not text.startswith("1"))
"""Digits and a slash behind the colon are a port."""


@pytest.mark.spec("remote:NW01")
def test_the_table_separates_public_from_non_public_addresses() -> None:
    assert {address: bool(find_blocked_reason(address)) for address in (*NW01, *IN_IPV6, *PUBLIC)} == {
        **dict.fromkeys((*NW01, *IN_IPV6), True),
        **dict.fromkeys(PUBLIC, False),
    }


@given(st.ip_addresses(v=4))
@pytest.mark.spec("remote:NW01")
def test_wrapping_an_address_into_ipv6_never_opens_it(inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    translated = ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) + number)
    assert bool(find_blocked_reason(str(translated))) == bool(find_blocked_reason(str(inner)))
    for prefix in ("::ffff:0:0", "::", "2002::"):
        shift = 80 if prefix == "2002::" else 0
        assert find_blocked_reason(str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) + (number << shift))))


@given(st.ip_addresses())
def test_our_table_is_stricter_than_the_standard_library(address: Any) -> None:
    if not find_blocked_reason(str(address)):
        assert address.is_global or address in ipaddress.IPv6Network("64:ff9b::/96")


@pytest.mark.spec("remote:NW18")
@pytest.mark.parametrize("address", ["fe80::1%eth0", "2606:4700::1%1", "1.1.1.1%1", "", "1.1.1", "01.1.1.1"])
def test_only_plain_addresses_are_addresses(address: str) -> None:
    assert find_blocked_reason(address)


def test_networks_can_be_allowed_explicitly() -> None:
    opened = parse_networks(["127.0.0.0/8", "fd00::/8"])
    assert ("", "") == (find_blocked_reason("127.0.0.1", opened), find_blocked_reason("fd00::1", opened))
    assert find_blocked_reason("::ffff:127.0.0.1", opened)
    assert find_blocked_reason("10.0.0.1", opened)


REFUSED = {
    "two readings": [
        "http://2130706433/", "http://0x7f000001/", "http://017700000001/", "http://127.1/", "http://127.0.0.1./", "http://0177.0.0.1/",
        "http://0x7f.1/", "http://①②⑦.⓪.⓪.①/", "http://localhost./", "http://LOCALHOST/", "http://app.localhost/", "http://%31%32%37.0.0.1/",
        "http://127.0.0.1%2f@x/", "http://1.2.3.4.5/", "http://example.0x1/", "http://256.1.1.1/", "http://[127.0.0.1]/", "http://[8.8.8.8]/",
        "http://\uff11\uff12\uff17.0.0.1/",
    ],
    "NW06": [
        "file:///etc/passwd", "ftp://example.com/", "gopher://example.com/", "data:text/plain,x", "javascript:alert(1)", "unix:/run/x", "ws://example.com/",
        "http://good@evil.com/", "http://u:p@evil.com/", "http://evil.com\\@good.com/", "http://exa\tmple.com/", "http://exam\nple.com/",
        "http:///x", "http:example.com", "//example.com/", "example.com", "", "http://", "http://:80/", "http://example.com:99999/",
        "http://example.com:0/", "http://example.com:8x/", "http://a b.com/", "http://example.com/a b", "http://exa\u200bmple.com/",
    ],
    "characters": ["http://evil\x00.allowed.com/", "http://evil\x1f.com/", "http://ev il.com/", "http://evil\x7f.com/", "http://a..b/", "http://-a.com/", "http://a_.*/", "http://a;b.com/", "http://" + "a" * 64 + ".com/", "http://" + "a." * 130 + "com/", "http://example.com/" + "x" * 5_000],
    "NW18": ["http://[fe80::1%eth0]/", "http://[fe80::1%25eth0]/", "http://[::1]%25/", "http://[::1/", "http://::1/", "http://[]/"],
}  # fmt: skip


@pytest.mark.spec("remote:NW18", "remote:NW06")
@pytest.mark.parametrize("url", [url for urls in REFUSED.values() for url in urls])
async def test_an_ambiguous_url_is_refused_before_any_lookup(url: str) -> None:
    names = Names()
    with pytest.raises(BlockedAddress):
        await SafeFetcher(allow="public", resolve=names).fetch(url)
    assert not names.asked


@pytest.mark.spec("remote:NW06")
@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://Example.COM", "example.com", 80, "/"),
        ("HTTPS://example.com:444?q=ä#x", "example.com", 444, "/?q=%C3%A4"),
        ("http://good.com#@evil.com/", "good.com", 80, "/"),
        ("http://good.com/@evil.com/%2e%2e?a=b%20c", "good.com", 80, "/@evil.com/%2e%2e?a=b%20c"),
        ("http://bücher.example/", "xn--bcher-kva.example", 80, "/"),
        ("http://example.com./", "example.com", 80, "/"),
        ("http://[2606:4700::1]:81/", "2606:4700::1", 81, "/"),
        ("http://1.1.1.1/", "1.1.1.1", 80, "/"),
    ],
)
def test_an_ordinary_url_has_exactly_one_reading(url: str, host: str, port: int, path: str) -> None:
    target = parse_url(url)
    assert (host, port, path) == (target.host, target.port, target.path)
    assert target == parse_url(target.url)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_a_parsed_url_parses_again_to_the_same_target(text: str) -> None:
    for url in (text, f"http://{text}", f"http://example.com/{text}", f"http://{text}.com:80/"):
        try:
            target = parse_url(url)
        except BlockedAddress:
            continue
        assert target.path.isascii()
        assert target == parse_url(target.url)


@pytest.mark.spec("remote:WP3")
def test_redirects_are_parsed_like_addresses() -> None:
    base = parse_url("https://example.com/a/b?c")
    assert "https://127.0.0.1/" == resolve_redirect(base, "//127.0.0.1").url
    assert "https://example.com/a/d" == resolve_redirect(base, "d").url
    for location in ("http://u@x/", "file:///x", "http://a\\b", "/a b", "http://127.1/", "//[::1%25]/", "javascript:x"):
        with pytest.raises(BlockedAddress):
            resolve_redirect(base, location)


ALLOWED = {
    "http://example.com/": True,
    "https://EXAMPLE.com/": True,
    "https://example.com./": True,
    "http://evil-example.com/": False,
    "http://example.com.evil/": False,
    "http://sub.example.com/": False,
    "http://example.com:444/": False,
    "http://ex\u0430mple.com/": False,
    "http://a.wild.org/": True,
    "http://a.b.wild.org/": True,
    "http://wild.org/": False,
    "http://notwild.org/": False,
    "http://port.net:8080/": True,
    "http://port.net/": False,
    "http://port.net:8081/": False,
    "http://1.1.1.1/": False,
}


@pytest.mark.spec("reliability:PM43", "remote:NW06", "remote:WP1")
@pytest.mark.parametrize("url", ALLOWED)
def test_hosts_are_compared_label_by_label_in_their_idna_form(url: str) -> None:
    allow = AllowList(["Example.com", "*.wild.org", "port.net:8080"], ())
    try:
        allow.check(parse_url(url))
        found = True
    except BlockedAddress:
        found = False
    assert ALLOWED[url] == found


@pytest.mark.spec("remote:NW06")
@pytest.mark.parametrize("entry", ["port.net:80", "port.net:080", "port.net:80/", "[::5]:80", "*.net:80"])
def test_port_of_an_entry_is_the_only_allowed_one(entry: str) -> None:
    host = "[::5]" if entry.startswith("[") else "port.net"
    allow = AllowList([entry], ())

    allow.check(parse_url(f"http://{host}/"))
    for other in (f"https://{host}/", f"http://{host}:443/"):
        with pytest.raises(BlockedAddress):
            allow.check(parse_url(other))


@pytest.mark.spec("remote:NW06")
@pytest.mark.parametrize("port", [22, 8080])
async def test_other_ports_must_be_allowed_explicitly(port: int) -> None:
    names = Names()
    with pytest.raises(BlockedAddress, match=f"port {port}"):
        await SafeFetcher(allow="public", resolve=names).fetch(f"http://example.com:{port}/")
    assert not names.asked
    with pytest.raises(BlockedAddress, match="loopback"):
        await SafeFetcher(allow="public", ports=[port], resolve=names).fetch(f"http://example.com:{port}/")


@pytest.mark.spec("remote:NW01", "remote:WP3")
@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["::ffff:127.0.0.1"], ["1.1.1.1", "127.0.0.1"], ["127.0.0.1", "1.1.1.1"], ["fe80::1%lo"], ["64:ff9b::7f00:1"]]
)  # fmt: skip
async def test_one_forbidden_address_of_a_host_refuses_the_connection(
    found: list[str],
) -> None:
    async with site() as there:
        fetcher = SafeFetcher(allow=[f"site.test:{there.port}"], resolve=Names(found))
        with pytest.raises(BlockedAddress, match="not allowed"):
            await fetcher.fetch(there.url())
        for host in ("127.0.0.1", "[::1]"):
            with pytest.raises(BlockedAddress):
                await SafeFetcher(allow="public", ports=[there.port]).fetch(f"http://{host}:{there.port}/")
    assert 0 == there.connections


@pytest.mark.spec("remote:WP1", "generator-contract:T35")
@given(scheme=st.sampled_from(["http", "https", "ftp"]), before=PASSWORD, after=PASSWORD)
def test_no_spelling_of_a_password_is_shown(scheme: str, before: str, after: str) -> None:
    """
    People forget to escape the characters that end an address.
    """
    web = f"{scheme}://user:{before}canary{after}@host.example/search"
    try:
        shown = repr(Workspace("/", web=web))
    except DefinitionError as error:
        shown = error.message

    assert "canary" not in shown
    assert "host.example" in shown


def test_web_tools_and_fetcher_require_their_parts() -> None:
    with pytest.raises(TypeError, match="allow"):
        SafeFetcher()  # type: ignore[call-arg]
    for allow in ("", [], "example.com", ["a/b"], ["http://a"], ["u@a"], [""], ["127.1"]):
        with pytest.raises(DefinitionError):
            SafeFetcher(allow=allow)
    with pytest.raises(DefinitionError, match="needs search=, docs= or fetch="):
        web_tools()
    assert ["read_url"] == [t.spec.name for t in web_tools(fetch=SafeFetcher(allow="public"))]
    with pytest.raises(DefinitionError, match="allow_networks"):
        SafeFetcher(allow="public", allow_networks=["10.0.0.1/8"])


@pytest.mark.spec("remote:WP5")
def test_a_proxy_requires_proxy_enforces_policy() -> None:
    with pytest.raises(DefinitionError, match="proxy_enforces_policy"):
        SafeFetcher(allow="public", proxy="http://127.0.0.1:3128")
    SafeFetcher(allow="public", proxy="http://127.0.0.1:3128", proxy_enforces_policy=True)


@pytest.mark.spec("remote:NW06")
@pytest.mark.parametrize("method", ["POST", "get"])
async def test_other_methods_are_not_sent(method: str) -> None:
    names = Names()
    with pytest.raises(ToolError, match="only GET and HEAD"):
        await SafeFetcher(allow="public", resolve=names).fetch("http://example.com/", method=method)
    assert not names.asked


async def test_an_unresolvable_host_is_an_error_of_its_own() -> None:
    async def fails(host: str, port: int) -> list[str]:
        raise OSError(os.strerror(2))

    with pytest.raises(ToolError, match="cannot be found"):
        await SafeFetcher(allow="public", resolve=fails).fetch("http://example.com/")
    with pytest.raises(ToolError, match="no address"):
        await SafeFetcher(allow="public", resolve=Names([])).fetch("http://example.com/")
