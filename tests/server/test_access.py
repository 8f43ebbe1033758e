"""
Who gets in over HTTP: tokens, links for browsers, the guard, and the folders that are trusted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepengine.data.questions import NO_CALLER
from stepengine.errors import DataError, DefinitionError, JournalError, JournalMissing, StepEngineError
from stepengine.redaction import make_redactor
from stepengine.server import Caller, Caps, Guard, Problem, Tokens
from stepengine.server.access import SCOPES, resolve_trusted_path

from .behind import HOST, Behind, kind_of

COUNTERPARTS = (
    ("pypi:starlette", "1.10.0", "works", "the access guard of `stepengine.server`"),
    ("pypi:uvicorn", "0.54.0", "works", "the access guard: truncated, slow and oversized request bodies"),
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def behind(tmp_path: Path) -> Behind:
    return Behind(tmp_path)


# --- callers --------------------------------------------------------------------------------------------------------


def test_caller_has_the_rights_of_its_scopes_and_admin_all() -> None:
    sets = [one for size in range(1, 3) for one in itertools.combinations(SCOPES, size)]
    for scopes, wanted in itertools.product(sets, SCOPES):
        caller = Caller("anna", set(scopes))
        may = wanted in scopes or "admin" in scopes

        assert may == caller.may(wanted)
        if may:
            caller.must(wanted)
        else:
            with pytest.raises(Problem) as refused:
                caller.must(wanted)
            assert (403, "scope_missing") == (refused.value.status, refused.value.kind)


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV4")
def test_token_is_stored_as_a_digest_in_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    before = os.umask(0)
    try:
        token = Tokens.open(file).add("anna", ["read"])
    finally:
        os.umask(before)
    secret = token.removeprefix("sk-stepengine-")

    assert len(secret) >= 43  # 256 bits
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    assert all(secret not in one.read_text() for one in tmp_path.iterdir())
    assert Caller("anna", ["read"]) == Tokens.open(file).find_caller(token)
    for one in (token, f"sk-stepengine-{'qZNIdInmjpN-CnIOeUMfHe-xUNRIigZ-RtoXdkqzbTtI'[:43]}"):
        assert one not in make_redactor((), {}).text(f"curl -H 'Authorization: x {one}'")


def test_invalid_token_finds_no_caller(tmp_path: Path) -> None:
    tokens = Tokens.open(tmp_path / "tokens.json")
    token = tokens.add("anna", ["read"])

    assert [None] * 5 == [
        tokens.find_caller(one) for one in ("", token[:-1], f"{token}x", token.upper(), "\udcff" * 5_000)
    ]


@pytest.mark.spec("studio:SV4")
def test_token_lookup_compares_every_digest_in_constant_time(tmp_path: Path) -> None:
    tokens = Tokens.open(tmp_path / "tokens.json")
    made = [tokens.add(name, ["read"]) for name in ("a", "b", "c")]
    import hmac

    with mock.patch("stepengine.server.access.hmac.compare_digest", wraps=hmac.compare_digest) as compared:
        assert tokens.find_caller(made[0]) is not None
        assert tokens.find_caller("nobody's") is None

    assert 6 == compared.call_count
    assert {32} == {len(digest) for call in compared.call_args_list for digest in call.args}


def test_token_is_invalid_from_its_expiry(tmp_path: Path) -> None:
    now = datetime(2026, 11, 22, tzinfo=UTC)
    tokens = Tokens.open(tmp_path / "tokens.json", clock=lambda: now)
    token = tokens.add("ci", ["run"], expires=now + timedelta(days=1), owner="anna")

    now += timedelta(days=1, microseconds=-1)
    assert Caller("anna", ["run"]) == tokens.find_caller(token)
    now += timedelta(microseconds=1)
    assert tokens.find_caller(token) is None
    assert ["ci"] == [one.name for one in tokens.list_tokens()]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "anna"}, "already has a token 'anna'"),
        ({"name": ""}, "cannot be the name of a token"),
        ({"name": "a\nb\u202e"}, r"'a\\nb\\u202e' cannot be the name"),
        ({"name": "x" * 65}, "1 to 64"),
        ({"name": "b", "owner": "../x"}, "cannot be the owner"),
        ({"name": "b", "scopes": ["root"]}, "unknown scope 'root'"),
        ({"name": "b", "expires": datetime(2020, 1, 1, tzinfo=UTC)}, "is in the past or has no time zone"),
        ({"name": "b", "expires": datetime(2200, 1, 1)}, "with its time zone"),  # noqa: DTZ001
    ],
)
def test_token_with_invalid_name_scope_or_expiry_raises(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    tokens = Tokens.open(tmp_path / "tokens.json")
    tokens.add("anna", ["read"])
    with pytest.raises(DefinitionError, match=said):
        tokens.add(**{"scopes": ["read"], **given})

    assert ["anna"] == [one.name for one in tokens.list_tokens()]


def test_number_of_tokens_in_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepengine.server.access.MAX_TOKENS", 1)
    tokens = Tokens.open(tmp_path / "tokens.json")
    tokens.add("a", ["read"])
    with pytest.raises(DefinitionError, match="remove some"):
        tokens.add("b", ["read"])


def test_token_changes_by_another_process_apply_at_once(tmp_path: Path) -> None:
    server, person = (Tokens.open(tmp_path / "tokens.json") for _ in range(2))
    token = person.add("anna", ["read"])
    assert server.find_caller(token) is not None
    assert person.remove("anna")
    assert not person.remove("anna")
    assert server.find_caller(token) is None


@pytest.mark.deep
def test_tokens_added_concurrently_are_all_stored(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    code = (
        "import sys, threading; from stepengine.server import Tokens\n"
        "tokens = Tokens.open(sys.argv[1])\n"
        "def add(at):\n"
        "    for n in range(5): tokens.add(f'{sys.argv[2]}-{at}-{n}', ['read'])\n"
        "several = [threading.Thread(target=add, args=(at,)) for at in range(2)]\n"
        "[one.start() for one in several]; [one.join() for one in several]"
    )
    command = [sys.executable, "-c", code, str(file)]
    both = [subprocess.Popen([*command, name], env={**os.environ, "PYTHONPATH": str(ROOT)}) for name in "ab"]

    assert [0, 0] == [one.wait(60) for one in both]
    assert {f"{p}-{t}-{n}" for p in "ab" for t in range(2) for n in range(5)} == {
        one.name for one in Tokens.open(file).list_tokens()
    }


@pytest.mark.spec("studio:SV4")
@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602])
def test_token_file_readable_or_writable_by_others_raises(tmp_path: Path, mode: int) -> None:
    tokens = Tokens.open(tmp_path / "tokens.json")
    token = tokens.add("anna", ["read"])
    tokens.path.chmod(mode)
    for use in (lambda: tokens.find_caller(token), lambda: Tokens.open(tokens.path), lambda: tokens.add("b", ["read"])):
        with pytest.raises(DefinitionError, match="chmod 600"):
            use()


def test_unsafe_token_file_or_folder_raises(tmp_path: Path) -> None:
    Tokens.open(tmp_path / "own.json").add("anna", ["read"])
    (tmp_path / "link").symlink_to("own.json")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "."):
        with pytest.raises(DefinitionError):
            Tokens.open(tmp_path / name)
    tmp_path.chmod(0o777)
    with pytest.raises(DefinitionError, match="chmod go-w"):
        Tokens.open(tmp_path / "own.json")
    tmp_path.chmod(0o1777)  # as /tmp is: others may write there, and put nothing in the place of what is ours
    Tokens.open(tmp_path / "own.json")
    with (
        mock.patch("stepengine.server.access.os.geteuid", return_value=os.geteuid() + 1),
        pytest.raises(DefinitionError, match="belongs to another user"),
    ):
        Tokens.open(tmp_path / "own.json")
    with pytest.raises(DefinitionError, match="No such file"):
        Tokens.open(tmp_path / "nowhere" / "tokens.json").add("anna", ["read"])


@given(data=st.binary(max_size=200) | st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["format", "tokens", "name", "sha256", "scopes"]), inner, max_size=3),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_malformed_token_file_raises_without_showing_its_content(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "tokens.json"
    file.write_bytes(data)
    file.chmod(0o600)
    read = json.loads(data) if data.startswith(b"{") else None
    if read == {"format": 1, "tokens": []}:
        assert () == Tokens.open(file).list_tokens()
    else:
        with pytest.raises(DataError) as refused:
            Tokens.open(file)
        assert refused.value.message.startswith(repr(str(file)))


# --- the three attacks ----------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV4")
async def test_local_command_without_token_answers_no_question(tmp_path: Path) -> None:
    """
    It is at loopback, knows the path, and may send whatever a browser sends; it has no token and no cookie.
    """
    behind = Behind(tmp_path)
    tries: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer x"},
        {"authorization": "Basic YW5uYTo="},
        {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"},
        {"cookie": f"stepengine_80={behind.token}"},
        {"x-forwarded-user": "anna", "x-forwarded-for": "127.0.0.1"},
    ]
    async with behind.client(address="127.0.0.1") as client:
        told = [await client.post("/runs/a/answers", headers=one, json={"q1": "yes"}) for one in tries]

    assert [401] * len(tries) == [one.status_code for one in told]
    assert [] == behind.reached


def _by_cookie(request: Any) -> Caller | None:
    return Caller("bob", ["run", "answer", "read"]) if request.cookies.get("session") == "bob" else None


CROSS_SITE = [
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "https://evil.example", "sec-fetch-site": "same-origin"},
    {"origin": f"http://{HOST}:3000", "sec-fetch-site": "same-site"},
    {"origin": f"http://{HOST}:3000"},
    {"origin": f"http://{HOST}.evil.example"},
    {"origin": f"http://{HOST}@evil.example"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {},
]


@pytest.mark.spec("studio:SV4")
@pytest.mark.parametrize("headers", CROSS_SITE)
async def test_cross_site_post_with_application_cookie_is_rejected(tmp_path: Path, headers: dict[str, str]) -> None:
    """
    Whatever ``SameSite`` is worth in that browser: another port of one host is the same site.
    """
    behind = Behind(tmp_path, authenticate=_by_cookie)
    async with behind.client() as client:
        client.cookies.set("session", "bob")
        answer = await client.post("/runs/a/answers", headers=headers, json={"q1": "yes"})

        assert (403, "cross_site") == (answer.status_code, kind_of(answer))
        assert [] == behind.reached
        own = await client.post("/runs/a/answers", headers={"origin": f"http://{HOST}"}, json={"q1": "yes"})
        assert 200 == own.status_code


@pytest.mark.spec("studio:SV4")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        (f"{HOST}.evil.example", 421),
        ("127.0.0.1", 421),
        (f"evil.example, {HOST}", 400),
        (f"{HOST}@evil.example", 400),
        (f"{HOST}:80:80", 400),
        ("", 400),
    ],
)
async def test_foreign_host_name_is_rejected_despite_credentials(behind: Behind, host: str, status: int) -> None:
    async with behind.browser() as client:
        for headers in ({}, behind.bearer):
            answer = await client.get("/runs", headers={**headers, "host": host})
            assert status == answer.status_code

    twice = [
        (b"host", HOST.encode()),
        (b"host", b"evil.example"),
        (b"authorization", behind.bearer["authorization"].encode()),
    ]
    assert 400 == (await behind.raw(twice))[0]
    assert [] == behind.reached


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "localhost.:80"])
async def test_loopback_names_are_the_default_hosts(tmp_path: Path, host: str) -> None:
    behind = Behind(tmp_path)
    guard = Guard(behind.guard.app, tokens=behind.tokens)
    behind.guard, refused = guard, behind.guard
    headers = [(b"host", host.encode()), (b"authorization", behind.bearer["authorization"].encode())]

    assert 200 == (await behind.raw(headers))[0]
    behind.guard = refused
    assert 421 == (await behind.raw(headers))[0]


# --- who is known ---------------------------------------------------------------------------------------------------


async def test_only_an_exact_bearer_token_is_accepted(behind: Behind) -> None:
    async with behind.client() as client:
        assert {"caller": "anna"} == (await client.get("/runs", headers=behind.bearer)).json()
        assert 200 == (await client.get("/runs", headers={"authorization": f"bearer  {behind.token} "})).status_code
        for wrong in (
            "",
            "Bearer",
            "Bearer x",
            behind.token,
            f"Basic {behind.token}",
            f"Bearer {behind.token}, Bearer x",
        ):
            answer = await client.get("/runs", headers={"authorization": wrong})
            assert (401, "Bearer") == (answer.status_code, answer.headers["www-authenticate"])
    both = [(b"host", HOST.encode()), *[(b"authorization", f"Bearer {behind.token}".encode())] * 2]

    assert 401 == (await behind.raw(both))[0]
    assert 2 == len(behind.reached)


async def test_wildcard_host_accepts_any_name(tmp_path: Path) -> None:
    behind = Behind(tmp_path, hosts=["*"])
    async with behind.client() as client:
        assert 200 == (await client.get("/runs", headers={**behind.bearer, "host": "anything.example"})).status_code
        assert 401 == (await client.get("/runs", headers={"host": "anything.example"})).status_code


async def test_only_health_is_open_without_token(behind: Behind) -> None:
    async with behind.client() as client:
        assert 200 == (await client.get("/health", headers={"host": "10.0.0.7:8080"})).status_code
        for path in ("/health/", "/healthy", "//health", "/runs", "/"):
            assert 401 == (await client.get(path)).status_code


def code_of(link: str) -> dict[str, str]:
    path, _, code = link.partition("#login=")
    assert "/" == path
    return {"code": code}


@pytest.mark.spec("studio:SV4")
async def test_login_link_works_once_for_a_minute(behind: Behind) -> None:
    async with behind.client() as client:
        link = behind.logins.make_login_link(Caller("anna", ["read"]))
        entered = await client.post("/login", json=code_of(link))
        session = {"authorization": f"Bearer {entered.json()['token']}"}

        assert (200, 43_200) == (entered.status_code, entered.json()["seconds"])
        assert {"caller": "anna"} == (await client.get("/runs", headers=session)).json()
        assert "link_spent" == kind_of(await client.post("/login", json=code_of(link)))
        late = behind.logins.make_login_link()
        behind.clock.now += 60
        assert 401 == (await client.post("/login", json=code_of(late))).status_code
        for wrong in (b"", b"[]", b"{", b'{"code": 7}', b'{"code": null}', b"[" * 100_000):
            assert 401 == (await client.post("/login", content=wrong)).status_code
        assert 401 == (await client.get("/login")).status_code
        behind.clock.now += 12 * 3600
        assert 401 == (await client.get("/runs", headers=session)).status_code


@pytest.mark.spec("studio:SV4")
async def test_session_is_a_header_and_no_cookie(behind: Behind) -> None:
    async with behind.client() as client:
        entered = await client.post("/login", json=code_of(behind.logins.make_login_link()))
        token = entered.json()["token"]

        assert "set-cookie" not in entered.headers
        assert not client.cookies
        for name in ("stepengine", "stepengine_80", "stepengine_8000", "session", "token", "authorization"):
            assert 401 == (await client.get("/runs", headers={"cookie": f"{name}={token}"})).status_code
        assert {"caller": "operator"} == (
            await client.get("/runs", headers={"authorization": f"Bearer {token}"})
        ).json()


@pytest.mark.spec("studio:SV4", "studio:ST31")
async def test_admin_creates_a_login_link_for_itself(behind: Behind) -> None:
    operator = {"authorization": f"Bearer {behind.logins.make_operator_token()}"}
    async with behind.client() as client:
        refused = await client.post("/login/links", headers=behind.bearer)
        nobody = await client.post("/login/links")
        behind.clock.now += 7 * 24 * 3600
        made = await client.post("/login/links", headers=operator)
        entered = await client.post("/login", json=code_of(made.json()["link"]))
        session = {"authorization": f"Bearer {entered.json()['token']}"}

        assert [403, 401, 200] == [one.status_code for one in (refused, nobody, made)]
        assert {"caller": "operator"} == (await client.get("/runs", headers=session)).json()


async def test_logout_ends_the_session(behind: Behind) -> None:
    async with behind.browser() as client:
        assert 204 == (await client.post("/logout")).status_code
        assert 401 == (await client.get("/runs")).status_code
        assert 200 == (await client.get("/runs", headers=behind.bearer)).status_code


async def test_page_paths_need_no_token_but_the_right_host(tmp_path: Path) -> None:
    behind = Behind(tmp_path, page_paths=["/", "/studio/"])
    async with behind.client() as client:
        open_ = [await client.get(path) for path in ("/", "/studio/app.js")]
        closed = [await client.get(path) for path in ("/runs", "/studio", "/studios/app.js")]
        posted = await client.post("/studio/app.js")
        foreign = await client.get("/", headers={"host": "evil.example"})

    assert [200, 200] == [one.status_code for one in open_]
    assert [401] * 4 == [one.status_code for one in (*closed, posted)]
    assert 421 == foreign.status_code


async def test_cross_site_embedding_is_rejected_and_navigation_allowed(tmp_path: Path) -> None:
    behind = Behind(tmp_path, authenticate=_by_cookie)
    async with behind.client() as client:
        client.cookies.set("session", "bob")
        for mode, place in (("no-cors", "script"), ("cors", "empty"), ("navigate", "iframe"), ("navigate", "embed")):
            embedded = {"sec-fetch-site": "same-site", "sec-fetch-mode": mode, "sec-fetch-dest": place}
            assert 403 == (await client.get("/runs", headers=embedded)).status_code
        followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert 200 == (await client.get("/runs", headers=followed)).status_code


@pytest.mark.parametrize("is_async", [True, False])
async def test_authenticate_function_identifies_users(tmp_path: Path, is_async: bool) -> None:
    def authenticate(request: Any) -> Caller | None:
        name = request.cookies.get("session")
        return Caller(name, ["run"]) if name in {"bob", "eve"} else None

    async def awaited(request: Any) -> Caller | None:
        return authenticate(request)

    behind = Behind(tmp_path, authenticate=awaited if is_async else authenticate)
    async with behind.client() as client:
        assert 401 == (await client.get("/runs")).status_code
        client.cookies.set("session", "bob")
        assert {"caller": "bob"} == (await client.get("/runs")).json()
        assert "cross_site" == kind_of(await client.post("/runs", headers={"origin": "https://evil.example"}))
        assert 200 == (await client.post("/runs", headers={"origin": f"http://{HOST}"})).status_code


async def test_failing_or_invalid_authenticate_gives_500(tmp_path: Path) -> None:
    for number, wrong in enumerate([lambda _: "anna", lambda _: True, lambda _: 1 / 0]):
        folder = tmp_path / str(number)
        folder.mkdir(mode=0o700)
        behind = Behind(folder, authenticate=wrong)
        async with behind.client() as client:
            assert 500 == (await client.get("/runs")).status_code
        assert [] == behind.reached


@pytest.mark.parametrize(
    "given", [{"body": 0}, {"open_body": 0}, {"rate": -1}, {"burst": True}, {"body_seconds": float("nan")}]
)
def test_cap_must_be_above_zero(given: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match="above 0"):
        Caps(**given)


# --- what every answer says -----------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV4")
async def test_every_answer_has_security_headers(behind: Behind) -> None:
    async with behind.client() as client:
        for path, headers in (("/runs", behind.bearer), ("/runs", {}), ("/health", {}), ("/fails", behind.bearer)):
            said = (await client.get(path, headers=headers)).headers
            assert said["content-security-policy"].startswith("default-src 'none'")
            assert ("nosniff", "no-referrer") == (said["x-content-type-options"], said["referrer-policy"])
            assert ("no-store", "DENY") == (said["cache-control"], said["x-frame-options"])
            assert not [name for name in said if name.startswith("access-control")]


async def test_headers_set_by_the_application_are_kept(tmp_path: Path) -> None:
    async def page(scope: Any, receive: Any, send: Any) -> None:
        own = [(b"Content-Security-Policy", b"default-src 'self'"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": own})
        await send({"type": "http.response.body", "body": b""})

    behind = Behind(tmp_path)
    behind.guard = Guard(page, tokens=behind.tokens, hosts=[HOST])
    async with behind.client() as client:
        said = (await client.get("/", headers=behind.bearer)).headers

    assert ["default-src 'self'"] == said.get_list("content-security-policy")
    assert ["no-cache"] == said.get_list("cache-control")


@pytest.mark.spec("studio:SV4")
async def test_named_cors_origins_may_call_with_a_token(tmp_path: Path) -> None:
    behind = Behind(tmp_path, cors=["https://app.example.com"])
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with behind.browser() as client:
        ours, others = ({"origin": origin} for origin in ("https://app.example.com", "https://evil.example"))
        allowed = await client.options("/runs", headers={**ours, **asks})
        assert (204, "https://app.example.com") == (allowed.status_code, allowed.headers["access-control-allow-origin"])
        assert "access-control-allow-credentials" not in allowed.headers
        refused = await client.options("/runs", headers={**others, **asks, "sec-fetch-site": "cross-site"})
        assert "access-control-allow-origin" not in refused.headers
        called = await client.post("/runs", headers={**ours, **behind.bearer})
        assert "https://app.example.com" == called.headers["access-control-allow-origin"]
        del client.headers["authorization"]
        assert 401 == (await client.post("/runs", headers={**ours, "sec-fetch-site": "cross-site"})).status_code
        assert "Origin" == (await client.get("/health")).headers["vary"]


async def test_named_cors_origins_may_call_with_application_credentials(
    tmp_path: Path,
) -> None:
    def authenticate(request: Any) -> Caller | None:
        return Caller("bob", ["run"]) if request.headers.get("x-key") == "b" else None

    behind = Behind(tmp_path, authenticate=authenticate, cors=["https://app.example.com"])
    async with behind.client() as client:
        for origin, status in (("https://app.example.com", 200), ("https://evil.example", 403)):
            asks = {"x-key": "b", "origin": origin, "sec-fetch-site": "cross-site"}
            for method in ("POST", "GET"):
                assert status == (await client.request(method, "/runs", headers=asks)).status_code


async def test_exception_during_a_response_propagates(behind: Behind) -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        msg = "the rest is lost"
        raise RuntimeError(msg)

    behind.guard.app = breaks
    async with behind.client() as client:
        with pytest.raises(RuntimeError, match="the rest is lost"):
            await client.get("/runs", headers=behind.bearer)


async def test_internal_error_is_logged_and_hidden_from_the_client(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind.client() as client:
        answer = await client.get("/fails", headers=behind.bearer)

    assert (500, "application/problem+json", "internal") == (
        answer.status_code, answer.headers["content-type"], kind_of(answer),
    )  # fmt: skip
    assert "hunter2" not in answer.text
    assert "hunter2" in caplog.text


async def test_websockets_are_rejected(behind: Behind) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await behind.guard({"type": "websocket", "path": "/", "headers": []}, receive, send)

    assert ["websocket.close"] == sent


# --- how much -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV4")
async def test_flooding_caller_gets_429_and_others_are_unaffected(tmp_path: Path) -> None:
    behind = Behind(tmp_path, caps=Caps(rate=0.5, burst=3))
    other = behind.tokens.add("bob", ["read"])
    async with behind.client() as client:
        said = [await client.get("/runs", headers=behind.bearer) for _ in range(5)]
        assert [200, 200, 200, 429, 429] == [one.status_code for one in said]
        assert "2" == said[-1].headers["retry-after"]
        assert 200 == (await client.get("/runs", headers={"authorization": f"Bearer {other}"})).status_code
        behind.clock.now += 2
        said = [await client.get("/runs", headers=behind.bearer) for _ in range(2)]
        assert [200, 429] == [one.status_code for one in said]


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_caller_without_a_name_is_refused(name: Any) -> None:
    """It would be the owner of the runs that schedules start."""
    with pytest.raises(DefinitionError, match="must be a non-empty string, such as the id of a user"):
        Caller(name, {"read"})


@pytest.mark.spec("studio:SV4")
async def test_page_of_another_site_uses_no_login_attempt(tmp_path: Path) -> None:
    behind = Behind(tmp_path, caps=Caps(failures=3, failure_seconds=60))
    foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
    async with behind.client() as client:
        said = [await client.post("/login", headers=foreign, content=b'{"code": "guess"}') for _ in range(5)]
        entered = await client.post("/login", json=code_of(behind.logins.make_login_link()))

    assert [(403, "cross_site")] * 5 == [(one.status_code, kind_of(one)) for one in said]
    assert 200 == entered.status_code


@pytest.mark.spec("studio:SV4")
async def test_guessing_address_is_throttled_but_valid_tokens_pass(tmp_path: Path) -> None:
    behind = Behind(tmp_path, caps=Caps(failures=3, failure_seconds=60))
    wrong = {"authorization": "Bearer guess"}
    async with behind.client() as client, behind.client(address="203.0.113.8") as elsewhere:
        said = [(await client.get("/runs", headers=wrong)).status_code for _ in range(5)]
        assert [401, 401, 401, 429, 429] == said
        assert 429 == (await client.post("/login", json={"code": "guess"})).status_code
        assert 401 == (await client.get("/runs")).status_code
        assert 200 == (await client.get("/runs", headers=behind.bearer)).status_code
        assert 401 == (await elsewhere.get("/runs", headers=wrong)).status_code
        behind.clock.now += 20
        assert 401 == (await client.get("/runs", headers=wrong)).status_code


async def test_guessing_address_no_longer_reaches_authenticate(tmp_path: Path) -> None:
    asked = []
    behind = Behind(tmp_path, authenticate=asked.append, caps=Caps(failures=3))
    addresses = ["2001:db8::1", "2001:db8::2", "2001:db8::ffff:3", "2001:db8:0:0:8::4", "2001:db8::5"]
    for address in addresses:
        async with behind.client(address=address) as client:
            await client.get("/runs", headers={"authorization": "Basic YTpi"})

    assert 3 == len(asked)


async def test_concurrent_requests_of_one_caller_are_bounded(tmp_path: Path) -> None:
    behind = Behind(tmp_path, caps=Caps(at_once=2))
    go_on, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        arrived.release()
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    behind.guard.app = slow
    async with behind.client() as client:
        waiting = [asyncio.create_task(client.get("/runs", headers=behind.bearer)) for _ in range(2)]
        for _ in waiting:
            await arrived.acquire()
        assert "too_many_at_once" == kind_of(await client.get("/runs", headers=behind.bearer))
        go_on.set()
        assert [200, 200] == [(await one).status_code for one in waiting]
        assert 200 == (await client.get("/runs", headers=behind.bearer)).status_code


# --- over real connections ------------------------------------------------------------------------------------------


async def post(behind: Behind, port: int, headers: str, body: bytes, *, is_cut: bool = False) -> bytes:
    """
    Post over a connection, and return the status line; ``b""`` where none came, or nothing was waited for.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /runs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {behind.token}\r\n{headers}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return b"" if is_cut else await asyncio.wait_for(reader.readline(), 30)
    finally:
        writer.close()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV4")
async def test_oversized_slow_or_cut_bodies_never_reach_the_application(tmp_path: Path) -> None:
    behind = Behind(tmp_path, hosts=["127.0.0.1"], caps=Caps(body=1_000, body_seconds=0.1))
    chunk = b"%x\r\n%b\r\n" % (600, b"x" * 600)
    async with behind.served() as port:
        said = {
            "fits": await post(behind, port, "Content-Length: 1000", b"x" * 1000),
            "chunks fit": await post(behind, port, "Transfer-Encoding: chunked", chunk + b"0\r\n\r\n"),
            "says too much": await post(behind, port, "Content-Length: 1001", b""),
            "says far too much": await post(behind, port, f"Content-Length: {10**19}", b""),
            "chunks too large": await post(behind, port, "Transfer-Encoding: chunked", chunk + chunk),
            "never comes": await post(behind, port, "Content-Length: 10", b"x"),
            "chunks never end": await post(behind, port, "Transfer-Encoding: chunked", chunk),
            "cut": await post(behind, port, "Content-Length: 10", b"x", is_cut=True),
        }
        # It answers as before, and the connection that was cut has been seen by then.
        said["after that"] = await post(behind, port, "Content-Length: 2", b"{}")

    assert {
        "fits": b"200", "chunks fit": b"200", "says too much": b"413", "says far too much": b"413",
        "chunks too large": b"413", "never comes": b"408", "chunks never end": b"408", "cut": b"", "after that": b"200",
    } == {name: line[9:12] for name, line in said.items()}  # fmt: skip
    assert [1000, 600, 2] == [len(body) for *_, body in behind.reached]


# --- bytes of strangers ---------------------------------------------------------------------------------------------

NAMES = [b"host", b"origin", b"authorization", b"cookie", b"sec-fetch-site", b"sec-fetch-mode", b"content-length",
         b"access-control-request-method"]  # fmt: skip
VALUES = [HOST.encode(), f"http://{HOST}".encode(), b"Bearer ", b"stepengine_80=", b"cross-site", b"7"]


REQUESTS = st.fixed_dictionaries(
    {
        "headers": st.lists(
            st.tuples(
                st.sampled_from(NAMES),
                st.binary(max_size=40)
                | st.sampled_from(VALUES)
                | st.tuples(st.sampled_from(VALUES), st.binary(max_size=20)).map(b"".join),
            ),
            max_size=8,
        ),
        "method": st.sampled_from(["GET", "POST", "OPTIONS", "HEAD", "BREW"]),
        "path": st.sampled_from(["/runs", "/login", "/logout", "/health", ""]) | st.text(max_size=20),
        "query_string": st.binary(max_size=40) | st.binary(max_size=20).map(b"code=%b".__mod__),
        "root_path": st.sampled_from(["", "/app"]) | st.text(max_size=8),
        "client": st.none() | st.tuples(st.text(max_size=20), st.integers(0, 65_535)),
        "server": st.sampled_from([None, (HOST, 80), ("/run/socket", None)]),
    }
)


@pytest.mark.deep
@given(request=REQUESTS, is_named=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@pytest.mark.spec("studio:SV4")
async def test_any_request_bytes_are_rejected_without_a_server_error(
    behind: Behind, request: dict[str, Any], is_named: bool
) -> None:
    request = {**request, "headers": [*request["headers"], *([(b"host", HOST.encode())] if is_named else [])]}
    behind.clock.now += 100_000  # what came before is forgotten: this is not about floods
    status, _, body = await behind.raw(**request)

    health = {"/health", f"{request['root_path']}/health"}
    assert status < 500
    assert body.isascii()
    assert request["path"] in health or status in {400, 401, 403, 421}
    assert {"/health"} >= {path for _, path, *_ in behind.reached} or request["path"] in health


# --- folders --------------------------------------------------------------------------------------------------------


def test_own_folder_database_and_link_to_them_are_trusted(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o755)
    (runs / "runs.db").touch(0o644)
    (tmp_path / "link").symlink_to("runs")

    assert runs == resolve_trusted_path(runs) == resolve_trusted_path(tmp_path / "link")
    assert runs / "runs.db" == resolve_trusted_path(tmp_path / "link" / "runs.db")


@pytest.mark.spec("studio:SV4")
@pytest.mark.parametrize(
    ("way", "mode"), [("itself", 0o775), ("above", 0o757), ("linked", 0o757), ("link in it", 0o775), ("file", 0o757)]
)
def test_folder_writable_by_others_raises_by_any_path(tmp_path: Path, mode: int, way: str) -> None:
    others, own = tmp_path / "others", tmp_path / "own"
    (others / "runs").mkdir(parents=True)
    own.mkdir(mode=0o700)
    (own / "to others").symlink_to(others)
    (others / "to own").symlink_to(own)
    (own / "runs.db").touch()
    asked = {
        "itself": others, "above": others / "runs", "linked": own / "to others", "link in it": others / "to own",
        "file": own / "runs.db",
    }  # fmt: skip
    changed = own / "runs.db" if way == "file" else others
    changed.chmod(0o755)
    resolve_trusted_path(asked[way])
    changed.chmod(mode)

    with pytest.raises(JournalError, match="others may write to") as refused:
        resolve_trusted_path(asked[way])
    assert "chmod go-w" in refused.value.message


@pytest.mark.spec("studio:SV4")
def test_folder_of_another_user_raises(tmp_path: Path) -> None:
    resolve_trusted_path(tmp_path)
    with (
        mock.patch("stepengine.server.access.os.geteuid", return_value=os.geteuid() + 1),
        pytest.raises(JournalError, match="belongs to another user"),
    ):
        resolve_trusted_path(tmp_path)


@pytest.mark.spec("studio:SV4")
def test_folder_below_one_of_another_user_raises(tmp_path: Path) -> None:
    """
    As root the folder is given away; everybody else is taken for another user.
    """
    above = tmp_path / "above"
    (above / "runs").mkdir(parents=True)
    user = os.geteuid()
    if user == 0:
        os.chown(above, 12_345, -1)
    with (
        mock.patch("stepengine.server.access.os.geteuid", return_value=user if user == 0 else user + 1),
        pytest.raises(JournalError, match="another user, who could replace"),
    ):
        resolve_trusted_path(above / "runs")


def test_parent_of_a_link_resolves_to_its_real_folder(tmp_path: Path) -> None:
    for folder in ("a/runs", "b/deep", "b/runs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b" / "deep")
    with pytest.raises(JournalError, match=re.escape(f"use {str(tmp_path / 'b' / 'runs')!r} instead")):
        resolve_trusted_path(f"{tmp_path}/a/link/../runs")


def test_missing_looping_or_irregular_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JournalMissing):
        resolve_trusted_path(tmp_path / "nowhere" / "runs")
    for name in ("a", "pipe"):
        with pytest.raises(StepEngineError):
            resolve_trusted_path(tmp_path / name)


def test_guard_without_the_extra_names_it(behind: Behind) -> None:
    with (
        mock.patch("stepengine.server.extra.find_spec", return_value=None),
        pytest.raises(DefinitionError, match=r"stepengine\[serve\]"),
    ):
        Guard(behind.guard.app, tokens=behind.tokens)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "it cannot authenticate callers"),
        ({"hosts": "example.com"}, "a list"),
        ({"hosts": ["https://example.com"]}, "a name such as"),
        ({"cors": ["*"]}, "without \\*"),
        ({"cors": ["https://example.com/"]}, "without a path"),
    ],
)
def test_guard_with_unusable_options_raises(options: dict[str, Any], said: str) -> None:
    ways = {"authenticate": lambda _: None} if options else {}
    with pytest.raises(DefinitionError, match=said):
        Guard(lambda *_: None, **ways, **options)


async def test_unsafe_token_file_gives_503_without_its_path(behind: Behind) -> None:
    behind.tokens.path.chmod(0o644)
    async with behind.client() as client:
        answer = await client.get("/runs", headers=behind.bearer)

    assert (503, "tokens_unusable") == (answer.status_code, kind_of(answer))
    assert str(behind.tokens.path) not in answer.text


@pytest.mark.parametrize("name", NO_CALLER)
def test_no_caller_has_a_name_that_stands_for_no_person(tmp_path: Path, name: str) -> None:
    """The call that such a caller approves would be denied, or its answer would count as the result of a page."""
    tokens = Tokens.open(tmp_path / "tokens.json")
    with pytest.raises(DefinitionError, match=f"'{name}' cannot be the owner"):
        tokens.add("ci", ["answer"], owner=name)
    with pytest.raises(DefinitionError, match="a reserved name"):
        Caller(name, {"answer"})

    assert () == tokens.list_tokens()
