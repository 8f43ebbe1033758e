"""
A server with replies of every kind that programs meet: odd JSON, encodings, headers, redirects, logins, and replies that break off.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import select
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.servers import Quiet

TEXT = "naïve café, 21.50 €\n" * 20
ODD_JSON = b'{"price": 21.50, "big": 1E3,\n "name": "\\u00e9t\\u00e9 \xc3\xa9",  "a": 1, "a": 2}\n'
EVENTS = b"".join(b'event: tick\ndata: {"n": %d}\n\n' % number for number in range(5)) + b"data: [DONE]\n\n"
SLOW_SECONDS = 6
BASIC = "Basic " + base64.b64encode(b"ada:lovelace-1843").decode()
DIGEST = 'Digest realm="r", nonce="n0nce", qop="auth", algorithm=MD5'
Pairs = list[tuple[str, str]]


class OddHandler(Quiet):
    """
    Answers by the path. What it counts begins anew with ``server.counts.clear()``.
    """

    protocol_version = "HTTP/1.1"
    server: OddServer

    def do_any(self) -> None:
        url = urlsplit(self.path)
        length = self.headers.get("content-length")
        self.body = self.read_chunks() if self.headers.get("transfer-encoding") else self.rfile.read(int(length or 0))
        name = url.path.strip("/").split("/")[0].replace("-", "_") or "text"
        answer: Callable[[], None] | None = getattr(self, f"answer_{name}", None)
        if answer is None:
            self.reply(404, b"no such page", [("Content-Type", "text/plain")])
        else:
            answer()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = do_any  # noqa: N815

    def read_chunks(self) -> bytes:
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def reply(self, status: int, body: bytes, headers: Pairs | None = None, *, reason: str = "Fine") -> None:
        """
        Send a whole reply; a date and a server name would differ in every run.
        """
        head = [("X-First", "1"), *(headers or [])]
        if status not in (204, 304):
            head.append(("Content-Length", str(len(body))))
        self.send_raw(status, reason, head)
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)

    def send_raw(self, status: int, reason: str, headers: Pairs, version: str = "HTTP/1.1") -> None:
        lines = [f"{version} {status} {reason}", *[f"{name}: {value}" for name, value in headers], "", ""]
        self.wfile.write("\r\n".join(lines).encode("latin-1"))
        self.wfile.flush()

    def send_chunks(self, pieces: list[bytes], headers: Pairs, *, whole: bool = True) -> None:
        self.send_raw(200, "OK", [*headers, ("Transfer-Encoding", "chunked")])
        if self.command == "HEAD":
            return
        for piece in pieces:
            assert piece  # an empty chunk is the end of the reply
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
        if whole:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    # --- bodies -----------------------------------------------------------------------------------------------------

    def answer_text(self) -> None:
        self.reply(200, TEXT.encode(), [("Content-Type", "text/plain; charset=utf-8")])

    def answer_latin(self) -> None:
        self.reply(200, TEXT.replace("€", "!").encode("latin-1"), [("Content-Type", "text/plain; charset=iso-8859-1")])

    def answer_binary(self) -> None:
        self.reply(200, bytes(range(256)) * 8, [("Content-Type", "application/octet-stream")])

    def answer_windows(self) -> None:
        self.reply(200, b"one\r\ntwo\rthree\x85\xc2\x85four\xe2\x80\xa8 \t\n\n", [("Content-Type", "text/plain")])

    def answer_json(self) -> None:
        value = {"name": "é", "list": [1, 2.5, None], "deep": {"a": True}}
        styles: dict[str, str] = {
            "/json/compact": json.dumps(value, separators=(",", ":")),
            "/json/spaced": json.dumps(value, ensure_ascii=False),
            "/json/indented": json.dumps(value, indent=2) + "\n",
            "/json/wide": json.dumps(value, indent=4),
        }
        body = styles.get(urlsplit(self.path).path)
        self.reply(200, ODD_JSON if body is None else body.encode(), [("Content-Type", "application/json")])

    def answer_empty(self) -> None:
        self.reply(200, b"", [("Content-Type", "text/plain")])

    def answer_status(self) -> None:
        status = int(self.path.split("/")[2].partition("?")[0])
        self.reply(status, f"this is {status}".encode(), [("Content-Type", "text/plain"), ("Retry-After", "0")])

    def answer_echo(self) -> None:
        told = {
            "method": self.command, "path": self.path, "body": base64.b64encode(self.body).decode(),
            "kind": re.sub("boundary=.*", "boundary", self.headers.get("content-type") or ""),
        }  # fmt: skip
        told["body"] = "" if "multipart" in told["kind"] else told["body"]
        self.reply(200, json.dumps(told).encode(), [("Content-Type", "application/json")])

    def answer_events(self) -> None:
        self.send_chunks(
            [event + b"\n\n" for event in EVENTS.split(b"\n\n")[:-1]], [("Content-Type", "text/event-stream")]
        )

    def answer_chunked(self) -> None:
        self.send_chunks(
            [TEXT.encode()[:33], TEXT.encode()[33:40], TEXT.encode()[40:]], [("Content-Type", "text/plain")]
        )

    def answer_until_close(self) -> None:
        self.send_raw(200, "OK", [("Content-Type", "text/plain"), ("Connection", "close")])
        if self.command != "HEAD":
            self.wfile.write(TEXT.encode())
        self.close_connection = True

    # --- encodings --------------------------------------------------------------------------------------------------

    def send_encoded(self, body: bytes, encoding: str, kind: str = "text/plain") -> None:
        self.reply(200, body, [("Content-Type", kind), ("Content-Encoding", encoding)])

    def answer_gzip(self) -> None:
        self.send_encoded(gzip.compress(TEXT.encode(), mtime=0), "gzip")

    def answer_gzip_json(self) -> None:
        self.send_encoded(gzip.compress(ODD_JSON, mtime=0), "gzip", "application/json")

    def answer_x_gzip(self) -> None:
        self.send_encoded(gzip.compress(TEXT.encode(), mtime=0), "x-gzip")

    def answer_gzip_members(self) -> None:
        self.send_encoded(gzip.compress(b"first ", mtime=0) + gzip.compress(b"second", mtime=0), "gzip")

    def answer_gzip_broken(self) -> None:
        self.send_encoded(gzip.compress(TEXT.encode(), mtime=0)[:40] + b"\x00broken\x00", "gzip")

    def answer_gzip_not(self) -> None:
        self.send_encoded(b"this is no gzip", "gzip")

    def answer_deflate(self) -> None:
        self.send_encoded(zlib.compress(TEXT.encode()), "deflate")

    def answer_deflate_raw(self) -> None:
        packer = zlib.compressobj(wbits=-15)
        self.send_encoded(packer.compress(TEXT.encode()) + packer.flush(), "deflate")

    def answer_unknown_encoding(self) -> None:
        self.send_encoded(b"\x01\x02\x03", "x-made-up")

    def answer_chunked_gzip(self) -> None:
        packed = gzip.compress(TEXT.encode(), mtime=0)
        headers = [("Content-Type", "text/plain"), ("Content-Encoding", "gzip")]
        self.send_chunks([packed[:10], packed[10:30], packed[30:]], headers)

    # --- headers ----------------------------------------------------------------------------------------------------

    def answer_headers(self) -> None:
        headers = [
            ("Content-Type", "text/plain"), ("X-B", "1"), ("x-a", "2"), ("X-B", "3"), ("ETag", '"abc"'), ("X-Empty", ""),
            ("Link", '</text?page=2>; rel="next", </text?page=9>; rel="last"'), ("Content-Disposition", 'attachment; filename="a b.txt"'),
            ("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"), ("X-Request-Id", "r-1"), ("Vary", "Accept"), ("Cache-Control", "no-store"),
        ]  # fmt: skip
        self.reply(200, b"ok", headers)

    def answer_latin_headers(self) -> None:
        self.reply(200, b"ok", [("X-Name", "caf\xe9"), ("X-Utf", "é€".encode().decode("latin-1"))], reason="Pr\xeat")

    # --- redirects, cookies, logins -----------------------------------------------------------------------------------

    def answer_redirect(self) -> None:
        self.reply(302, b"", [("Location", "/text?from=redirect&q=a%2Fb#part")])

    def answer_redirect_body(self) -> None:
        self.reply(301, b"<p>moved</p>" * 10, [("Location", "/echo?x=1"), ("Content-Type", "text/html")])

    def answer_redirect_chunked(self) -> None:
        self.send_raw(302, "Found", [("Location", "/text"), ("Transfer-Encoding", "chunked")])
        if self.command != "HEAD":
            self.wfile.write(b"5\r\nmoved\r\n0\r\n\r\n")

    def answer_redirect_unfinished(self) -> None:
        """
        Send a part of the body, and wait until the client goes away.
        """
        self.send_raw(302, "Found", [("Location", "/text"), ("Content-Length", "5")])
        self.wfile.write(b"mov")
        self.rfile.read(1)
        self.close_connection = True

    def answer_redirect_same(self) -> None:
        self.reply(307, b"", [("Location", "/echo")])

    def answer_redirect_see(self) -> None:
        self.reply(303, b"", [("Location", "/echo")])

    def answer_login(self) -> None:
        cookies = [("Set-Cookie", "session=S3CRET-session-1; Path=/"), ("Set-Cookie", "theme=dark; Path=/; Max-Age=99")]
        self.reply(200, b"welcome", cookies)

    def answer_login_redirect(self) -> None:
        self.reply(302, b"", [("Location", "/me"), ("Set-Cookie", "session=S3CRET-session-1; Path=/")])

    def answer_me(self) -> None:
        known = "session=S3CRET-session-1" in (self.headers.get("cookie") or "")
        self.reply(200 if known else 401, b"you are ada" if known else b"who are you?")

    def answer_basic(self) -> None:
        known = self.headers.get("authorization") == BASIC
        challenge = [] if known else [("WWW-Authenticate", 'Basic realm="here"')]
        self.reply(200 if known else 401, b"come in" if known else b"who are you?", challenge)

    def answer_digest(self) -> None:
        given = dict(re.findall(r'(\w+)="?([^",]+)"?', self.headers.get("authorization") or ""))
        if not given:
            self.reply(401, b"who are you?", [("WWW-Authenticate", DIGEST)])
            return
        first, second = (_md5(one) for one in ("ada:r:lovelace-1843", f"{self.command}:{given['uri']}"))
        expected = _md5(f"{first}:n0nce:{given['nc']}:{given['cnonce']}:auth:{second}")
        self.reply(
            200 if expected == given["response"] else 403, b"come in" if expected == given["response"] else b"no"
        )

    # --- faults -----------------------------------------------------------------------------------------------------

    def answer_flaky(self) -> None:
        with self.server.lock:
            self.server.counts[self.path] += 1
            count = self.server.counts[self.path]
        if count <= 2:
            self.reply(503, b"try again", [("Retry-After", "0")])
        else:
            self.reply(200, b"at last")

    def answer_cut(self) -> None:
        self.send_raw(200, "OK", [("Content-Type", "text/plain"), ("Content-Length", "100")])
        self.wfile.write(b"x" * 50)
        self.close_connection = True

    def answer_cut_once(self) -> None:
        with self.server.lock:
            self.server.counts[self.path] += 1
            count = self.server.counts[self.path]
        if count == 1:
            self.answer_cut()
        else:
            self.reply(200, b"whole")

    def answer_cut_chunked(self) -> None:
        self.send_chunks([b"x" * 50], [("Content-Type", "text/plain")], whole=False)

    def answer_drop(self) -> None:
        self.close_connection = True

    def hold(self) -> None:
        """
        Wait a while, or until the client goes away.
        """
        select.select([self.connection], [], [], SLOW_SECONDS)

    def answer_slow(self) -> None:
        self.hold()
        self.answer_text()

    def answer_slow_body(self) -> None:
        self.send_raw(200, "OK", [("Content-Type", "text/plain"), ("Content-Length", "10")])
        self.wfile.write(b"12345")
        self.wfile.flush()
        self.hold()
        self.wfile.write(b"67890")

    def answer_waiting_events(self) -> None:
        """
        Send one event, and wait until the client goes away.
        """
        self.send_raw(200, "OK", [("Content-Type", "text/event-stream")])
        self.wfile.write(b"data: first\n\n")
        self.wfile.flush()
        self.rfile.read(1)
        self.close_connection = True

    def answer_never(self) -> None:
        """
        Wait until the client goes away.
        """
        self.rfile.read(1)
        self.close_connection = True

    def answer_garbage(self) -> None:
        self.wfile.write(b"this is no HTTP\r\n\r\n")
        self.close_connection = True


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


class OddServer(ThreadingHTTPServer):
    """
    The server, with what it counts.
    """

    daemon_threads = True
    counts: Counter[str]
    lock: threading.Lock

    def handle_error(self, request: object, client_address: object) -> None:
        """
        Say nothing of clients that leave early.
        """


@contextmanager
def odd_server() -> Iterator[OddServer]:
    server = OddServer(("127.0.0.1", 0), OddHandler)
    server.counts, server.lock = Counter(), threading.Lock()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
