"""
Small programs over HTTP, each a request and what a program sees of its reply, for every client.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.cookiejar
import io
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeAlias

from attrs import field, frozen

from tests.servers import NO_TLS

Seen: TypeAlias = dict[str, Any]
USER, WORD = "ada", "lovelace-1843"


@frozen
class Scene:
    """
    One request, or a few in one session.

    Attributes:
        name: What tests call it.
        path: Where it goes.
        method: Its method.
        headers: Its headers.
        body: Its body; a list is sent piece by piece.
        follow: Whether redirects are followed.
        auth: ``"basic"``, ``"digest"`` or none.
        before: Paths that are asked for before, in the same session.
        reads: How the body is read: ``"whole"``, ``"pieces"``, ``"lines"``, ``"none"``.
        retries: How often urllib3 tries again.
        seconds: The timeout of each request.
    """

    name: str
    path: str
    method: str = "GET"
    headers: Mapping[str, str] = field(factory=dict)
    body: bytes | list[bytes] | None = None
    follow: bool = True
    auth: str = ""
    before: tuple[str, ...] = ()
    reads: str = "whole"
    retries: int = 0
    seconds: float = 3


BODIES = (
    "text", "latin", "binary", "windows", "json/odd", "json/compact", "json/spaced", "json/indented", "json/wide", "empty",
    "events", "chunked", "until-close", "gzip", "gzip-json", "x-gzip", "gzip-members", "gzip-broken", "gzip-not", "deflate",
    "deflate-raw", "unknown-encoding", "chunked-gzip", "headers", "latin-headers",
)  # fmt: skip
STATUSES = (201, 204, 206, 304, 400, 401, 404, 408, 409, 410, 418, 429, 500, 502, 503)
FAULTS = ("cut", "cut-chunked", "drop", "slow", "slow-body", "garbage")
JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=b0undary"}
PARTS = b'--b0undary\r\nContent-Disposition: form-data; name="f"; filename="a.txt"\r\n\r\n\x00\xff\r\n--b0undary--\r\n'
SCENES = (
    *[Scene(f"get {path}", f"/{path}") for path in BODIES],
    *[Scene(f"pieces of {path}", f"/{path}", reads="pieces") for path in ("text", "binary", "chunked", "gzip", "events", "until-close")],
    *[Scene(f"lines of {path}", f"/{path}", reads="lines") for path in ("text", "events", "chunked-gzip", "windows")],
    *[Scene(f"head {path}", f"/{path}", "HEAD") for path in ("text", "gzip", "headers", "chunked", "status/204", "redirect")],
    *[Scene(f"status {status}", f"/status/{status}") for status in STATUSES],
    *[Scene(f"unread {path}", f"/{path}", reads="none") for path in ("text", "chunked", "status/500", "gzip")],
    *[Scene(method.lower(), "/echo?a=1&b=%2F+x", method, body=b"\x00\xffbytes") for method in ("POST", "PUT", "PATCH", "DELETE")],
    Scene("options", "/echo", "OPTIONS"),
    Scene("query", "/echo?city=Oslo&city=Bergen&empty=&flag&q=a%2Fb%20c+d&%C3%A6=%E2%82%AC"),
    Scene("escaped path", "/echo/a%2Fb/c%20d;v=1"),
    Scene("json body", "/echo", "POST", JSON, b'{"a": 1.0, "b": [1, 2], "a": 3}'),
    Scene("form body", "/echo", "POST", FORM, b"a=1&b=2&a=3&c="),
    Scene("multipart body", "/echo", "POST", MULTIPART, PARTS),
    Scene("body in pieces", "/echo", "POST", body=[b"one ", b"two ", b"three"]),
    Scene("empty post", "/echo", "POST", body=b""),
    *[Scene(f"{path} followed", f"/{path}") for path in ("redirect", "redirect-body", "redirect-chunked", "login-redirect")],
    *[Scene(f"{path} not followed", f"/{path}", follow=False) for path in ("redirect", "redirect-body", "redirect-chunked")],
    Scene("post redirected again", "/redirect-same", "POST", body=b"again"),
    Scene("post redirected to get", "/redirect-see", "POST", body=b"once"),
    Scene("login", "/me", before=("/login",)),
    Scene("no login", "/me"),
    Scene("basic", "/basic", auth="basic"),
    Scene("no basic", "/basic"),
    Scene("digest", "/digest", auth="digest"),
    Scene("same twice", "/text", before=("/text",)),
    Scene("retried", "/flaky", retries=3),
    Scene("retried in vain", "/status/503?vain", retries=2),
    Scene("cut and retried", "/cut-once", retries=2),
    *[Scene(fault, f"/{fault}", seconds=1 if "slow" in fault else 3) for fault in FAULTS],
    Scene("refused", "http://127.0.0.1:1/nobody"),
)  # fmt: skip
COMMON = {
    "get json/odd", "get gzip-members", "get headers", "pieces of chunked", "lines of events", "head gzip", "status 304", "status 429",
    "unread text", "post", "query", "escaped path", "form body", "multipart body", "body in pieces", "redirect-body followed", "login",
    "basic", "digest", "cut", "refused",
}  # fmt: skip
"""Scenes that the gate runs, and that the documentation compares recorders by."""


def iter_clients() -> Iterator[tuple[str, Callable[[Scene, str], Seen]]]:
    """
    Give the clients that are installed, by name.
    """
    makers: dict[str, tuple[str, Callable[[Any, Scene, str], Seen]]] = {
        "http.client": ("http.client", lambda _, scene, base: with_http_client(scene, base)),
        "urllib.request": ("urllib.request", lambda _, scene, base: with_urllib(scene, base)),
        "urllib3": ("urllib3", with_urllib3),
        "requests": ("requests", with_requests),
        "httpx": ("httpx", with_httpx),
        "httpx2": ("httpx2", with_httpx),
        "httpx async": ("httpx", with_async_httpx),
        "httpx2 async": ("httpx2", with_async_httpx),
        "aiohttp": ("aiohttp", lambda _, scene, base: with_aiohttp(scene, base)),
    }
    for name, (library, run) in makers.items():
        with contextlib.suppress(ImportError):
            module = import_module(library)
            yield name, lambda scene, base, run=run, module=module: watch(lambda: run(module, scene, base))


def hide(seen: Seen) -> Seen:
    """
    Return *seen* without the value of the session's cookie, which a cassette does not hold.
    """
    return {name: re.sub(r"session=[^;']*", "session=", repr(value)) for name, value in seen.items()}


def watch(program: Callable[[], Seen]) -> Seen:
    """
    Return what *program* sees, or the error that it meets.
    """
    try:
        return program()
    except Exception as error:
        return {"error": type(error).__name__, "of": type(error).__module__.split(".")[0]}


def address(scene: Scene, base: str, path: str = "") -> str:
    return path or scene.path if (path or scene.path).startswith("http") else f"{base}{path or scene.path}"


def pairs(headers: Any) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in headers]


def plain(base: str, text: object) -> str:
    return str(text).replace(base, "BASE")


def data_of(scene: Scene) -> Any:
    return iter(scene.body) if isinstance(scene.body, list) else scene.body


def with_http_client(scene: Scene, base: str) -> Seen:
    url = urllib.request.urlparse(address(scene, base))  # type: ignore[attr-defined]
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=scene.seconds)
    with contextlib.closing(connection):
        for path in scene.before:
            connection.request("GET", path)
            connection.getresponse().read()
        target = url.path + (f";{url.params}" if url.params else "") + (f"?{url.query}" if url.query else "")
        connection.request(
            scene.method, target, data_of(scene), dict(scene.headers), encode_chunked=isinstance(scene.body, list)
        )
        reply = connection.getresponse()
        seen = {
            "status": reply.status,
            "reason": reply.reason,
            "headers": pairs(reply.getheaders()),
            "length": reply.length,
        }
        if scene.reads == "pieces":
            seen["body"] = b"".join(iter(lambda: reply.read(7), b""))
        elif scene.reads == "lines":
            seen["body"] = [*reply]
        elif scene.reads == "whole":
            seen["body"] = reply.read()
        return seen


class _NotFollowed(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def with_urllib(scene: Scene, base: str) -> Seen:
    handlers: list[Any] = [
        urllib.request.HTTPSHandler(context=NO_TLS),
        urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()),
    ]
    if scene.auth:
        kind = {"basic": urllib.request.HTTPBasicAuthHandler, "digest": urllib.request.HTTPDigestAuthHandler}[
            scene.auth
        ]
        passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        passwords.add_password(None, base, USER, WORD)
        handlers.append(kind(passwords))
    if not scene.follow:
        handlers.append(_NotFollowed)
    opener = urllib.request.build_opener(*handlers)
    for path in scene.before:
        opener.open(address(scene, base, path), timeout=scene.seconds).read()
    request = urllib.request.Request(address(scene, base), data_of(scene), dict(scene.headers), method=scene.method)
    try:
        reply = opener.open(request, timeout=scene.seconds)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        seen = {
            "status": reply.status,
            "reason": reply.reason,
            "headers": pairs(reply.headers.items()),
            "url": plain(base, reply.url),
        }
        if scene.reads == "pieces":
            seen["body"] = b"".join(iter(lambda: reply.read(7), b""))
        elif scene.reads == "lines":
            seen["body"] = [line.rstrip("\n") for line in io.TextIOWrapper(reply, encoding="latin-1", newline="\n")]
        elif scene.reads == "whole":
            seen["body"] = reply.read()
        return seen


def with_urllib3(urllib3: Any, scene: Scene, base: str) -> Seen:
    retries = urllib3.Retry(
        scene.retries, redirect=5 if scene.follow else False, status_forcelist=[503] if scene.retries else [], backoff_factor=0,
        raise_on_redirect=True,
    )  # fmt: skip
    headers = dict(scene.headers)
    if scene.auth == "basic":
        headers |= urllib3.make_headers(basic_auth=f"{USER}:{WORD}")
    with urllib3.PoolManager(retries=retries, timeout=scene.seconds) as pool:
        for path in scene.before:
            pool.request("GET", address(scene, base, path))
        reply = pool.request(
            scene.method, address(scene, base), body=data_of(scene), headers=headers, preload_content=scene.reads == "whole",
            redirect=scene.follow,
        )  # fmt: skip
        history = [(entry.method, entry.status, entry.redirect_location) for entry in reply.retries.history]
        seen = {
            "status": reply.status, "reason": reply.reason, "headers": pairs(reply.headers.items()), "url": plain(base, reply.url),
            "history": history, "type": dict(reply.headers).get("Content-Type"),
        }  # fmt: skip
        if scene.reads == "pieces":
            chunked = reply.chunked and not reply.headers.get("content-encoding")
            seen["body"] = b"".join(reply.read_chunked() if chunked else reply.stream(7))
        elif scene.reads == "lines":
            reply.auto_close = False
            seen["body"] = [line.rstrip("\n") for line in io.TextIOWrapper(reply, encoding="latin-1", newline="\n")]
        elif scene.reads == "whole":
            seen["body"] = reply.data
        else:
            reply.release_conn()
        return seen


def with_requests(requests: Any, scene: Scene, base: str) -> Seen:
    from requests.adapters import HTTPAdapter
    from urllib3 import Retry

    with requests.Session() as session:
        session.mount(
            "http://", HTTPAdapter(max_retries=Retry(scene.retries, status_forcelist=[503] if scene.retries else []))
        )
        if scene.auth:
            kind = {"basic": requests.auth.HTTPBasicAuth, "digest": requests.auth.HTTPDigestAuth}[scene.auth]
            session.auth = kind(USER, WORD)
        for path in scene.before:
            session.get(address(scene, base, path), timeout=scene.seconds)
        reply = session.request(
            scene.method, address(scene, base), data=data_of(scene), headers=scene.headers, allow_redirects=scene.follow,
            stream=scene.reads != "whole", timeout=scene.seconds,
        )  # fmt: skip
        seen = {
            "status": reply.status_code, "reason": reply.reason, "headers": pairs(reply.raw.headers.items()), "url": plain(base, reply.url),
            "history": [(one.status_code, plain(base, one.url), one.content) for one in reply.history], "links": reply.links,
            "cookies": sorted(session.cookies.keys()), "ok": reply.ok, "encoding": reply.encoding,
        }  # fmt: skip
        if scene.reads == "pieces":
            seen["body"] = b"".join(reply.iter_content(chunk_size=None))
        elif scene.reads == "lines":
            seen["body"] = [*reply.iter_lines()]
        elif scene.reads == "whole":
            seen["body"] = reply.content
        else:
            reply.close()
        return seen


def _httpx_auth(httpx: Any, scene: Scene) -> Any:
    if not scene.auth:
        return None
    return httpx.BasicAuth(USER, WORD) if scene.auth == "basic" else httpx.DigestAuth(USER, WORD)


def _httpx_seen(reply: Any, client: Any, base: str) -> Seen:
    return {
        "status": reply.status_code, "reason": reply.reason_phrase, "headers": pairs(reply.headers.raw), "url": plain(base, reply.url),
        "history": [(one.status_code, plain(base, one.url)) for one in reply.history], "cookies": sorted(client.cookies.keys()),
        "links": {name: plain(base, link) for name, link in reply.links.items()}, "encoding": reply.encoding,
    }  # fmt: skip


def with_httpx(httpx: Any, scene: Scene, base: str) -> Seen:
    with httpx.Client(
        timeout=scene.seconds,
        follow_redirects=scene.follow,
        auth=_httpx_auth(httpx, scene),
        trust_env=False,
        verify=NO_TLS,
    ) as client:
        for path in scene.before:
            client.get(address(scene, base, path))
        request = client.build_request(
            scene.method, address(scene, base), content=data_of(scene), headers=dict(scene.headers)
        )
        reply = client.send(request, stream=True)
        with contextlib.closing(reply):
            seen = {}
            if scene.reads == "pieces":
                seen["body"] = b"".join(reply.iter_bytes())
            elif scene.reads == "lines":
                seen["body"] = [*reply.iter_lines()]
            elif scene.reads == "whole":
                seen["body"] = reply.read()
            return {**seen, **_httpx_seen(reply, client, base)}


def with_async_httpx(httpx: Any, scene: Scene, base: str) -> Seen:
    async def pieces() -> Any:
        for piece in scene.body or []:
            yield piece

    async def run() -> Seen:
        async with httpx.AsyncClient(
            timeout=scene.seconds,
            follow_redirects=scene.follow,
            auth=_httpx_auth(httpx, scene),
            trust_env=False,
            verify=NO_TLS,
        ) as client:
            for path in scene.before:
                await client.get(address(scene, base, path))
            content = pieces() if isinstance(scene.body, list) else scene.body
            request = client.build_request(
                scene.method, address(scene, base), content=content, headers=dict(scene.headers)
            )
            reply = await client.send(request, stream=True)
            seen = {}
            try:
                if scene.reads == "pieces":
                    seen["body"] = b"".join([piece async for piece in reply.aiter_bytes()])
                elif scene.reads == "lines":
                    seen["body"] = [line async for line in reply.aiter_lines()]
                elif scene.reads == "whole":
                    seen["body"] = await reply.aread()
            finally:
                await reply.aclose()
            return {**seen, **_httpx_seen(reply, client, base)}

    return asyncio.run(run())


def with_aiohttp(scene: Scene, base: str) -> Seen:
    import aiohttp

    async def pieces() -> Any:
        for piece in scene.body or []:
            yield piece

    async def run() -> Seen:
        limit = aiohttp.ClientTimeout(total=scene.seconds)
        middlewares = [aiohttp.DigestAuthMiddleware(USER, WORD)] if scene.auth == "digest" else []
        auth = aiohttp.BasicAuth(USER, WORD) if scene.auth == "basic" else None
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(timeout=limit, cookie_jar=jar, middlewares=middlewares, auth=auth) as session:
            for path in scene.before:
                async with session.get(address(scene, base, path)) as first:
                    await first.read()
            data = pieces() if isinstance(scene.body, list) else scene.body
            url = import_module("yarl").URL(address(scene, base), encoded=True)
            async with session.request(
                scene.method, url, data=data, headers=scene.headers, allow_redirects=scene.follow
            ) as reply:
                seen = {
                    "status": reply.status, "reason": reply.reason, "headers": pairs(reply.raw_headers), "url": plain(base, reply.url),
                    "history": [(one.status, plain(base, one.url)) for one in reply.history], "cookies": sorted(one.key for one in jar),
                    "charset": reply.charset,
                }  # fmt: skip
                if scene.reads == "pieces":
                    seen["body"] = b"".join([piece async for piece in reply.content.iter_any()])
                elif scene.reads == "lines":
                    seen["body"] = [line async for line in reply.content]
                elif scene.reads == "whole":
                    seen["body"] = await reply.read()
                return seen

    return asyncio.run(run())
