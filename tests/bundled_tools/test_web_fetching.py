"""``SafeFetcher`` against real servers on loopback: redirects, rebinding, bombs, slow servers, what is sent and kept."""

from __future__ import annotations

import asyncio
import datetime as dt
import gzip
import ipaddress
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stepengine.errors import BlockedAddress, ToolError
from stepengine.tools.bundled import SafeFetcher
from stepengine.tools.bundled.web.fetcher import get_ssl_context, resolve_host
from tests.bundled_tools.web_server import Names, Site, answer, redirect, site, zipped

LOOPBACK = {"allow_networks": ["127.0.0.0/8"]}


@pytest.fixture
async def there() -> AsyncIterator[Site]:
    async with site() as made:
        yield made


def fetcher_for(there: Site, **options: Any) -> SafeFetcher:
    return SafeFetcher(**{"allow": "public", "ports": [there.port], "resolve": Names(), **LOOPBACK, **options})


@pytest.mark.spec("remote:NW06", "remote:NW14")
async def test_a_request_sends_no_cookies_credentials_or_extra_headers(
    there: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    get_ssl_context.__wrapped__()  # reading the variable would fail
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    there.answers = {"/": redirect("/b", set_cookie="a=1; Path=/"), "/b": answer("ok", set_cookie="c=2")}
    fetcher = fetcher_for(there, headers={"site.test": {"Authorization": "for https only"}})
    for _ in range(2):
        assert b"ok" == (await fetcher.fetch(there.url("/"))).body

    sent = [{line.partition(":")[0].lower() for line in head.split("\r\n")[1:] if line} for head in there.heads]
    assert 4 == len(sent)
    assert all(names <= {"accept", "accept-encoding", "connection", "host", "user-agent"} for names in sent)
    assert f"Host: site.test:{there.port}\r\n" in there.heads[0]
    assert "Accept: text/*, application/json\r\n" in there.heads[0]


@pytest.mark.spec("remote:WP3")
async def test_system_resolver_is_used_by_default_and_addresses_are_checked(
    there: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def system(host: str, port: int, **how: Any) -> list[Any]:
        asked.append((host, port, how.get("type")))
        address = "10.0.0.1" if host == "inside.test" else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))] * 2

    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, *rest, **how: system(host, port, type=(*rest, 0, 0)[1], **how)
    )
    there.answers = {"/": answer("one")}
    fetcher = fetcher_for(there, resolve=None)

    assert b"one" == (await fetcher.fetch(there.url())).body
    assert ["127.0.0.1"] == await resolve_host("site.test", there.port)
    with pytest.raises(BlockedAddress, match=r"10\.0\.0\.1"):
        await fetcher.fetch(f"http://inside.test:{there.port}/")
    assert {("site.test", there.port, socket.SOCK_STREAM), ("inside.test", there.port, socket.SOCK_STREAM)} <= set(
        asked
    )


@pytest.mark.spec("remote:WP3")
async def test_the_connection_goes_to_the_address_that_was_checked(there: Site) -> None:
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    there.answers = {"/": answer("one")}
    fetcher = fetcher_for(there, resolve=names)

    assert b"one" == (await fetcher.fetch(there.url())).body
    assert ["site.test"] == names.asked
    with pytest.raises(BlockedAddress, match=r"10\.0\.0\.1"):
        await fetcher.fetch(there.url())
    assert 1 == there.connections


@pytest.mark.spec("remote:WP3")
async def test_a_host_that_rebinds_between_redirects_is_checked_again(there: Site) -> None:
    there.answers = {"/": redirect("/again"), "/again": answer("never")}
    with pytest.raises(BlockedAddress, match="link-local"):
        await fetcher_for(there, resolve=Names(["127.0.0.1"], ["169.254.169.254"])).fetch(there.url())
    assert ["/"] == there.paths


async def test_the_next_address_is_tried_if_one_refuses_connections(there: Site) -> None:
    there.answers = {"/": answer("ok")}
    found = await fetcher_for(there, resolve=Names(["127.0.0.9", "127.0.0.1"])).fetch(there.url())
    assert b"ok" == found.body


@pytest.mark.spec("remote:WP3", "remote:NW01", "remote:NW06")
@pytest.mark.parametrize(
    "location",
    [
        "http://10.0.0.1/", "//10.0.0.1/", "http://169.254.169.254/latest/meta-data/", "http://[::1]/", "http://127.1/", "http://localhost/",
        "http://internal.test/", "file:///etc/passwd", "ftp://site.test/", "javascript:alert(1)", "http://u:p@site.test/", "http://site.test:22/",
        "gopher://127.0.0.1:6379/_INFO", "/\\10.0.0.1/", "http://2130706433/", "http://0x7f000001/",
    ],
)  # fmt: skip
async def test_each_redirect_is_checked_like_a_new_address(there: Site, location: str) -> None:
    there.answers = {"/": redirect(location)}
    with pytest.raises(BlockedAddress):
        await fetcher_for(there, resolve=Names(internal_test=["10.1.1.1"])).fetch(there.url())
    assert 1 == there.connections


@pytest.mark.spec("remote:WP3", "generator-contract:T35")
async def test_five_redirects_are_followed_and_a_sixth_is_not(there: Site) -> None:
    there.answers = {f"/{n}": redirect(f"/{n - 1}", "307 Temporary Redirect") for n in range(1, 12)} | {
        "/0": answer("end")
    }
    fetcher = fetcher_for(there)

    found = await fetcher.fetch(there.url("/5"))
    assert (b"end", there.url("/0"), 200) == (found.body, found.url, found.status)
    for start in ("/6", "/11"):
        with pytest.raises(ToolError, match="5 redirects"):
            await fetcher.fetch(there.url(start))
    assert 6 + 6 + 6 == there.connections


@pytest.mark.spec("remote:WP3")
async def test_pages_that_refresh_are_pages_and_no_redirects(there: Site) -> None:
    html = "<meta http-equiv=refresh content='0;url=http://10.0.0.1/'>"
    there.answers = {"/": answer(html, "text/html", refresh="0; url=/other"), "/bare": answer("x", status="302 Found")}
    assert html.encode() == (await fetcher_for(there).fetch(there.url())).body
    assert 302 == (await fetcher_for(there).fetch(there.url("/bare"))).status
    assert ["/", "/bare"] == there.paths


@pytest.mark.spec("remote:NW06")
async def test_head_gives_no_body(there: Site) -> None:
    there.answers = {"/": answer("x" * 10)}
    found = await fetcher_for(there).fetch(there.url(), method="HEAD")
    assert (200, b"", "text/plain") == (found.status, found.body, found.content_type)
    assert there.heads[0].startswith("HEAD / HTTP/1.1\r\n")


# --- size and time ------------------------------------------------------------------------------------------------


async def endless(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        await writer.drain()


@pytest.mark.spec("remote:WP4")
async def test_no_more_than_two_million_bytes_are_read(there: Site) -> None:
    there.answers = {"/endless": endless, "/exact": answer(b"x" * 2_000_000), "/more": answer(b"x" * 2_000_001)}
    there.answers["/zip"] = zipped(bytes(range(256)) * 10_000)
    fetcher = fetcher_for(there)

    found = [await fetcher.fetch(there.url(f"/{name}")) for name in ("endless", "exact", "more")]
    assert [(2_000_000, True), (2_000_000, False), (2_000_000, True)] == [(len(f.body), f.truncated) for f in found]


@pytest.mark.spec("remote:WP4")
@pytest.mark.parametrize(
    ("made", "why"),
    [
        (zipped(b"\0" * 1_900_000), "that is refused"),
        (lambda: answer(zlib.compress(b"\0" * 5_000_000), content_encoding="deflate"), "that is refused"),
        (answer(gzip.compress(gzip.compress(b"x")), content_encoding="gzip, gzip"), "only one layer"),
        (answer(b"x", content_encoding="br"), "only one layer"),
        (answer(b"x", content_encoding="zstd"), "only one layer"),
        (answer(b"no gzip at all", content_encoding="gzip"), "broken compressed data"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\nshort", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 1_000) for n in range(1_000)) + b"\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 1_000) for n in range(80)) + b"\r\n", "bytes of headers"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be read"),
        (b"", "cannot be read"),
    ],
    ids=["bomb", "deflate", "nested", "br", "zstd", "no-gzip", "short", "lengths", "flood", "one-header", "headers", "ssh", "nothing"],
)  # fmt: skip
async def test_answers_that_would_hurt_are_errors(there: Site, made: bytes | Callable[[], bytes], why: str) -> None:
    there.answers = {"/": made() if callable(made) else made}
    with pytest.raises(ToolError, match=why):
        await fetcher_for(there).fetch(there.url())


@pytest.mark.spec("remote:WP4")
async def test_endless_data_after_a_compressed_body_is_cut_off(there: Site) -> None:
    async def trailing(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"x")
        )
        await endless(path, writer)

    there.answers = {"/": trailing}
    found = await fetcher_for(there).fetch(there.url())
    assert (b"x", True) == (found.body, found.truncated)


@pytest.mark.spec("remote:WP4")
async def test_ordinary_compression_is_undone(there: Site) -> None:
    text = b"words and words, " * 5_000
    there.answers = {"/a": zipped(text), "/b": answer(zlib.compress(text), content_encoding="deflate")}
    fetcher = fetcher_for(there)
    assert [text, text] == [(await fetcher.fetch(there.url(p))).body for p in ("/a", "/b")]


async def drip(path: str, writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + b"x" * 1_000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def silent(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WP4")
async def test_a_slow_server_or_resolver_ends_at_the_fetch_timeout(there: Site) -> None:
    async def hangs(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    there.answers = {"/drip": drip, "/silent": silent, "/loop": redirect("/silent")}
    fetcher = fetcher_for(there, seconds=0.3)
    async with asyncio.timeout(40):
        paths = ("/drip", "/silent", "/loop")
        fetches = [fetcher.fetch(there.url(path)) for path in paths]
        unresolved = fetcher_for(there, resolve=hangs, seconds=0.3).fetch(there.url())
        found = await asyncio.gather(*fetches, unresolved, return_exceptions=True)

    assert all(isinstance(error, ToolError) for error in found), found
    assert all("did not answer within 0.3 s" in str(error) for error in found), found


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WP4")
async def test_an_idle_connection_ends_after_the_idle_timeout(there: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepengine.tools.bundled.web import fetcher

    monkeypatch.setattr(fetcher, "WEB_IDLE_SECONDS", 0.2)
    there.answers = {"/silent": silent}
    async with asyncio.timeout(40):
        with pytest.raises(ToolError, match=r"no data for 0\.2 s"):
            await fetcher_for(there).fetch(there.url("/silent"))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WP4")
async def test_four_fetches_at_a_time_go_to_one_host(there: Site) -> None:
    four = asyncio.Event()

    async def slow(path: str, writer: asyncio.StreamWriter) -> None:
        if 4 == there.open:
            four.set()
        await asyncio.wait_for(four.wait(), 50)
        await asyncio.sleep(0.05)  # a fifth one would come in meanwhile
        writer.write(answer("ok"))

    there.answers = {"/": slow}
    fetcher = fetcher_for(there)
    await asyncio.gather(*[fetcher.fetch(there.url()) for _ in range(12)])  # each has its whole time once it begins
    assert (12, 4) == (there.connections, there.most_open)


@pytest.mark.spec("remote:NW12")
@pytest.mark.parametrize("kind", ["application/pdf", "image/png"])
async def test_a_body_of_a_binary_type_is_not_read(there: Site, kind: str) -> None:
    there.answers = {"/": answer(b"x" * 1_000, kind)}
    found = await fetcher_for(there).fetch(there.url())
    assert (b"", kind, 200) == (found.body, found.content_type, found.status)


# --- TLS ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A certificate for ``site.test`` and 127.0.0.1, with its key, made for this run of the tests.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "site.test")])
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName("site.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1)).add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(key, hashes.SHA256())
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tls") / "site.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.spec("remote:WP3", "remote:NW14")
async def test_tls_keeps_the_name_and_is_never_given_up(certificate: Path) -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    asked: list[str | None] = []
    serving.sni_callback = lambda _, name, __: asked.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with site(serving) as there, site() as plain:
        there.answers = {"/": answer("secret"), "/down": redirect(plain.url("/"))}
        plain.answers = {"/": answer("never"), "/up": redirect(there.url("/", scheme="https"))}
        options: dict[str, Any] = {"ports": [there.port, plain.port], "ssl_context": trusting}
        own = {"Site.test": {"Authorization": "Bearer x"}}
        fetcher = fetcher_for(there, headers=own, **options)

        assert b"secret" == (await fetcher.fetch(there.url(scheme="https"))).body
        assert ["site.test"] == asked
        assert "Authorization: Bearer x\r\n" in there.heads[0]
        with pytest.raises(BlockedAddress, match="from https to http"):
            await fetcher.fetch(there.url("/down", scheme="https"))
        assert not plain.heads
        assert b"secret" == (await fetcher.fetch(plain.url("/up"))).body
        assert "Authorization" not in plain.heads[0]
        with pytest.raises(ToolError, match="cannot be read"):
            await fetcher.fetch(there.url(host="other.test", scheme="https"))
        with pytest.raises(ToolError, match="cannot be read"):
            await fetcher_for(there, ports=[there.port]).fetch(there.url(scheme="https"))


@pytest.mark.spec("remote:WP5")
async def test_a_proxy_is_used_only_when_it_is_given(there: Site) -> None:
    there.answers = {"http://elsewhere.test/x": answer("through the proxy")}
    proxied = SafeFetcher(allow="public", proxy=f"http://127.0.0.1:{there.port}", proxy_enforces_policy=True)
    assert b"through the proxy" == (await proxied.fetch("http://elsewhere.test/x")).body
    with pytest.raises(BlockedAddress):
        await SafeFetcher(allow=["other.test"], proxy="http://127.0.0.1:9", proxy_enforces_policy=True).fetch(
            "http://a.test/"
        )
