"""
A secret is known by its name, wherever a request or reply has it: one list of names for all places (replay K3, K4).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.secret_names import is_secret_name
from stepengine.redaction import find_environment_secrets
from stepengine.testing import Cassette, RecordTransport, ReplayTransport
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.traffic_redaction import Cleaner, vcr_config

CANARY = "zq9Hk27TmPLx4"
ANOTHER = "another-machine-0"
NAMES = (
    "token", "pwd", "DB_PASS", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "webhook_secret", "credentials", "password", "passwd", "passphrase",
    "api_key", "apiKey", "X-Api-Key", "accessToken", "refresh-token", "id_token", "clientSecret", "private_key", "secret", "session.token",
    "authorization", "authToken", "db-password", "userPassword2", "user[password]", "signing_key", "AccountKey", "jwt", "bearer_token",
    "password_confirmation",
)  # fmt: skip
ORDINARY = (
    "max_tokens", "tokens", "token_type", "next_page_token", "nextToken", "progressToken", "passenger", "compass", "keyboard", "monkey",
    "secretary", "author", "pwdless", "sort_key", "public_key", "code", "signature", "eos_token",
)  # fmt: skip


def echo(request: httpx2.Request) -> httpx2.Response:
    """Reply to a request with a secret member in JSON."""
    item = {request.headers["x-reply"]: f"{CANARY}-reply", "address": f"postgres://me:{CANARY}@db/x"}
    return httpx2.Response(200, json={"items": [item]})


def send(transport: httpx2.BaseTransport, name: str, secret: str) -> list[httpx2.Response]:
    """Send a secret in each place that a request has."""
    header = name.strip("[]").replace("[", "-").replace(".", "-")
    with httpx2.Client(transport=transport, base_url="http://h.test", headers={"x-reply": name}) as client:
        return [
            client.post("/query", params={name: secret, "page": "2"}),
            client.post("/form", data={name: secret, "page": "2"}),
            client.post("/parts", data={name: secret}, files={"file": ("a.bin", b"\xff\x00--x\r\n")}),
            client.post("/json", json={"deep": [{name: secret}, {name: [secret]}]}),
            client.post("/lines", content=f'{{"a": 1}}\n{{"{name}": "{secret}"}}\n'),
            client.post("/address", json={"url": f"see postgres://me:{secret}@db/x"}),
            client.post("/header", headers={f"x-{header}": secret}),
        ]


@pytest.mark.spec("replay:K3", "replay:K4")
@pytest.mark.parametrize("name", ["token", "AWS_SECRET_ACCESS_KEY", "user[password]"])
def test_no_place_stores_a_secret_and_another_secret_replays(name: str, tmp_path: Path) -> None:
    cassette, path = Cassette(), tmp_path / "c.yaml"
    live = send(RecordTransport(httpx2.MockTransport(echo), cassette), name, CANARY)
    cassette.save(path)
    replayed = send(ReplayTransport(Cassette.load(path)), name, ANOTHER)

    assert CANARY not in path.read_text()
    assert [one.status_code for one in live] == [one.status_code for one in replayed]


@pytest.mark.spec("replay:C42")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", '{"a": {"%s": "%s"}}'),
        ("application/x-www-form-urlencoded", "a=1&%s=%s"),
        ("multipart/form-data; boundary=b", '--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n--b--\r\n'),
    ],
)
def test_settings_of_vcrpy_replace_the_same_names(kind: str, body: str) -> None:
    for name in NAMES:
        sent = (body % (name, CANARY)).encode()
        request: Any = SimpleNamespace(
            uri=f"https://h.test/?{name}={CANARY}", headers={"content-type": kind}, body=sent
        )

        stored = vcr_config()["before_record_request"](request)

        assert CANARY.encode() not in stored.body, name
        assert CANARY not in stored.uri, name


@pytest.mark.spec("replay:K6")
def test_a_variable_of_the_same_name_is_secret() -> None:
    names = [name for name in NAMES if name != "pwd"]

    assert [{"one-secret-value": name} for name in names] == [
        find_environment_secrets({name: "one-secret-value"}) for name in names
    ]


VARIABLES = {
    "line end": {"DB_PASSWORD": f"{CANARY}\n"}, "JSON": {"DB_CONFIG": json.dumps({"db": [{"user": "ada", "password": CANARY}]})}, "storage": {"STORAGE": f"AccountName=x;AccountKey={CANARY};EndpointSuffix=y"},
    "bus": {"BUS": f"Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey={CANARY}"}, "options": {"BACKUP_OPTS": f"--user=x --password={CANARY}"}, "java": {"JAVA_OPTS": f"-Djavax.net.ssl.keyStorePassword={CANARY}"},
    "proxy": {"HTTPS_PROXY": f"ada:{CANARY}@proxy:3128"}, "go": {"MYSQL_DSN": f"ada:{CANARY}@tcp(db:3306)/x"}, "quotes": {"PG_DSN": f"host=db password='{CANARY}'"}, "braces": {"ODBC": f"Server=x;Pwd={{{CANARY}}}"},
    "query": {"HOOK": f"https://h/x?token={CANARY}"}, "cookie": {"RABBITMQ_ERLANG_COOKIE": CANARY}, "creds": {"GCP_CREDS": CANARY}, "bearer": {"X_BEARER": CANARY},
}  # fmt: skip


@pytest.mark.spec("replay:K6")
@pytest.mark.parametrize("environment", VARIABLES.values(), ids=VARIABLES)
def test_a_secret_inside_a_variable_is_known(environment: dict[str, str]) -> None:
    assert CANARY in find_environment_secrets(environment)


@pytest.mark.spec("replay:K6")
def test_random_user_in_the_address_of_a_variable_is_redacted() -> None:
    assert CANARY * 2 in find_environment_secrets({"REMOTE": f"https://{CANARY}{CANARY}@h.test/a.git"})


@pytest.mark.spec("replay:K4")
@pytest.mark.parametrize("name", ORDINARY)
def test_a_member_that_only_sounds_secret_stays(name: str) -> None:
    body = json.dumps({name: f"{CANARY}"}).encode()

    assert body == Cleaner().clean_body(body, "application/json")


@pytest.mark.spec("replay:K4")
def test_tokens_of_a_text_stay() -> None:
    pieces = {"content": [{"token": "tokenization", "logprob": -0.1}, {"token": " a long piece"}, {"token": "Hi"}]}
    body = json.dumps(pieces).encode()

    assert body == Cleaner().clean_body(body, "application/json")


@pytest.mark.spec("replay:K4")
@given(
    name=st.sampled_from(NAMES),
    before=st.text("ab_-.", max_size=4).map(lambda text: f"{text}_" if text else ""),
    change=st.sampled_from([str.lower, str.upper, lambda name: name.replace("_", "-"), lambda name: f"{name}2"]),
)
def test_prefix_case_and_separators_do_not_matter(name: str, before: str, change: Any) -> None:
    assert is_secret_name(f"{before}{change(name)}", "member")
    assert is_secret_name(f"{before}{change(name)}", "parameter")


PARTS = st.lists(
    st.tuples(
        st.sampled_from(["token", "note", "file"]),
        st.binary(max_size=30),
        st.sampled_from(["", "text/plain", "application/json"]),
    ),
    max_size=4,
)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:K4")
@given(parts=PARTS, end=st.sampled_from([b"\r\n", b"\n"]), boundary=st.sampled_from(["b", "--b", "a+b (c)"]))
def test_a_multipart_form_loses_its_secrets_and_nothing_else(parts: Any, end: bytes, boundary: str) -> None:
    parts = [(name, content, kind) for name, content, kind in parts if b"\n" not in content and b"\r" not in content]

    def build(hide: bool) -> bytes:
        made = b""
        for name, content, kind in parts:
            shown = f"<redacted:{name}>".encode() if hide and name == "token" and content else content
            typed = f"Content-Type: {kind}".encode() + end if kind else b""
            head = f'Content-Disposition: form-data; name="{name}"'.encode() + end + typed + end
            made += b"--" + boundary.encode() + end + head + shown + end
        return made + b"--" + boundary.encode() + b"--" + end

    kind = f'multipart/form-data; boundary="{boundary}"'
    cleaned = Cleaner().clean_body(build(hide=False), kind)

    assert build(hide=True) == cleaned
    assert (
        cleaned == Cleaner().clean_request(RecordedRequest("POST", "http://h/", [("content-type", kind)], cleaned)).body
    )


@pytest.mark.spec("replay:K4")
def test_an_error_that_quotes_a_secret_is_stored_without_it(tmp_path: Path) -> None:
    key = "sk-ant-api03-" + "Qr7" * 12
    texts = [
        f"https://me:{CANARY}@h.test/?api_key={CANARY}&page=2 refused {key}",
        {"type": "builtins.OSError", "arguments": [key]},
    ]
    extras = {"error": {"type": "builtins.OSError", "arguments": texts}}
    request = RecordedRequest("GET", "http://h.test/")
    path = Cassette([Interaction(request, RecordedResponse(0, ""), extras=extras)]).save(tmp_path / "c.yaml")

    assert CANARY not in path.read_text()
    assert key not in path.read_text()
    assert "page=2 refused" in str(Cassette.load(path).interactions[0].error)
