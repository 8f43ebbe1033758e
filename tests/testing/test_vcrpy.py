"""
vcrpy as the judge of the file format, both ways, and as a recorder beside us: what it does in fact, and what we do instead.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import vcr
import vcr.errors
import yaml
from vcr.request import Request
from vcr.serialize import deserialize, serialize
from vcr.serializers import yamlserializer

from stepengine.testing import Cassette, RecordTransport, ReplayTransport, vcr_config
from stepengine.testing.cassette_files import (
    Interaction,
    RecordedRequest,
    RecordedResponse,
    dump_cassette,
)
from tests.servers import Quiet, served

URL = "https://api.test/v1/messages"
JSON = (("content-type", "application/json"),)


def talk(asked: Any, answered: Any = b"{}", headers: Any = JSON, **more: Any) -> Interaction:
    request = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    response = answered if isinstance(answered, bytes) else json.dumps(answered).encode()
    return Interaction(
        RecordedRequest("POST", URL, JSON, request), RecordedResponse(200, "OK", headers, response), **more
    )


class Echo(Quiet):
    """Answers with what was asked; ``/zip`` compressed, ``/stream`` in four events, ``/cookies`` with two of them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b'{"to":' + json.dumps(asked.decode()).encode() + b"}"
        kind = "application/json"
        if self.path == "/stream":
            body, kind = b"".join([b'event: e\ndata: {"n": %d}\n\n' % n for n in range(4)]), "text/event-stream"
        packed = gzip.compress(body) if self.path == "/zip" else body
        self.send_response(200)
        self.send_header("content-type", kind)
        if self.path == "/zip":
            self.send_header("content-encoding", "gzip")
        for name in ("one", "two") if self.path.startswith("/cookies") else ():
            self.send_header("set-cookie", f"{name}=PLANT-cookie-value")
        self.send_header("content-length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed)


@pytest.fixture
def server() -> Iterator[str]:
    with served(Echo) as url:
        yield url


def post(url: str, body: Any = None, transport: Any = None, **options: Any) -> Any:
    with httpx2.Client(transport=transport) as client:
        return client.post(url, json=body, **options)


# --- the file -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:C2", "replay:C3")
def test_our_files_have_the_shape_that_vcrpy_loads() -> None:
    held = [
        talk({"a": "\u00fc"}, {"b": [1]}, (*JSON, ("set-cookie", "a"), ("set-cookie", "b"))),
        talk(b"", b"\x00\xff"),
        talk({"c": 1}, extras={"chunks": [1, 2]}),
    ]
    data = dump_cassette(held)
    tree = yamlserializer.deserialize(data.decode())
    assert set(tree) == {"version", "interactions"}
    for item in tree["interactions"]:
        assert set(item) <= {"request", "response", "x_stepengine"}
        assert set(item["request"]) == {"method", "uri", "headers", "body"}
        assert set(item["response"]) == {"status", "headers", "body"}
        assert set(item["response"]["status"]) == {"code", "message"}
        assert all(isinstance(v, list) for side in ("request", "response") for v in item[side]["headers"].values())
    first, second, third = tree["interactions"]
    assert first["response"]["headers"]["set-cookie"] == ["a", "b"]
    assert isinstance(first["request"]["body"], str)
    assert (second["request"]["body"], second["response"]["body"]["string"]) == ("", b"\x00\xff")
    assert third["x_stepengine"] == {"chunks": [1, 2]}

    requests, responses = deserialize(data.decode(), yamlserializer)
    assert [json.loads(r.body) if r.body else None for r in requests] == [{"a": "\u00fc"}, None, {"c": 1}]
    assert responses[1]["body"]["string"] == b"\x00\xff"


# --- playing the same file ----------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:C4", "replay:C13")
def test_compressed_replies_and_streams_of_vcrpys_files_play_here(server: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with vcr.use_cassette(path):
        post(f"{server}/zip", "a")
        post(f"{server}/stream", "b")
    tree = yaml.safe_load(path.read_text())
    assert isinstance(tree["interactions"][0]["response"]["body"]["string"], bytes)
    replay = ReplayTransport(Cassette.load(path))
    assert post(f"{server}/zip", "a", replay).json() == {"to": '"a"'}
    with httpx2.Client(transport=replay) as client, client.stream("POST", f"{server}/stream", json="b") as stream:
        assert len(list(stream.iter_raw())) == 4


@pytest.mark.spec("replay:V19")
def test_vcrpy_and_our_transports_do_not_see_each_other(server: str, tmp_path: Path) -> None:
    held = Cassette([talk({"n": 1}, {"ok": True})])
    with vcr.use_cassette(tmp_path / "c.yaml") as theirs:
        assert post(URL, {"n": 1}, ReplayTransport(held)).json() == {"ok": True}
        assert len(theirs) == 0
        assert post(f"{server}/ask", "theirs").json() == {"to": '"theirs"'}
        assert len(theirs) == 1
    assert not held.unused


# --- vcrpy for the HTTP of tools ----------------------------------------------------------------------------------------

PLANTED = {
    "header": "PLANT-header-1234", "query": "PLANT-query-1234", "field": "PLANT-field-1234",
    "cookie": "PLANT-cookie-value", "userinfo": "PLANT-user-1234", "echo": "PLANT-echo-1234",
}  # fmt: skip


def ask_with_secrets(server: str) -> dict[str, Any]:
    url = f"{server.replace('//', '//me:' + PLANTED['userinfo'] + '@')}/cookies?api_key={PLANTED['query']}&q=1"
    body = {"deep": [{"client_secret": PLANTED["field"]}], "text": f"say {PLANTED['echo']}"}
    return post(url, body, headers={"x-api-key": PLANTED["header"]}).json()


def leaked(path: Path) -> set[str]:
    text = path.read_text().replace("\\\n", "").replace("\n", " ")
    forms = {name: (value, base64.b64encode(f"me:{value}".encode()).decode()) for name, value in PLANTED.items()}
    return {name for name, values in forms.items() if any(form in text for form in values)}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C42", "requirements:P5")
def test_vcrpy_writes_secrets_by_default_and_none_with_our_settings(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANT_TOKEN", PLANTED["echo"])
    with vcr.use_cassette(tmp_path / "plain.yaml"):
        ask_with_secrets(server)
    assert leaked(tmp_path / "plain.yaml") == set(PLANTED)

    settings = vcr_config({PLANTED["userinfo"]: "user"})
    with vcr.VCR(**settings).use_cassette(tmp_path / "safe.yaml"):
        live = ask_with_secrets(server)
    assert leaked(tmp_path / "safe.yaml") == set()
    with vcr.VCR(**settings).use_cassette(tmp_path / "safe.yaml", record_mode="none") as played:
        again = ask_with_secrets(server)
    assert played.all_played
    assert again.keys() == live.keys()
    with (
        vcr.VCR(**settings).use_cassette(tmp_path / "safe.yaml", record_mode="none"),
        pytest.raises(vcr.errors.CannotOverwriteExistingCassetteException),
    ):
        post(f"{server}/cookies?api_key={PLANTED['query']}&q=1", "another body")

    held = Cassette()
    url = f"{server.replace('//', '//me:' + PLANTED['userinfo'] + '@')}/cookies?api_key={PLANTED['query']}&q=1"
    with httpx2.Client(transport=RecordTransport(httpx2.HTTPTransport(), held)) as client:
        body = {"deep": [{"client_secret": PLANTED["field"]}], "text": f"say {PLANTED['header']}"}
        client.post(url, json=body, headers={"x-api-key": PLANTED["header"]})
    held.save(tmp_path / "ours.yaml")
    assert leaked(tmp_path / "ours.yaml") == set()


@pytest.mark.spec("replay:C42")
def test_our_vcrpy_settings_spare_providers_and_keep_replies_readable(server: str, tmp_path: Path) -> None:
    settings = vcr_config()
    assert {"api.anthropic.com", "api.openai.com", "generativelanguage.googleapis.com", "openrouter.ai"} <= set(
        settings["ignore_hosts"]
    )
    assert not {"localhost", "127.0.0.1"} & set(settings["ignore_hosts"])
    with vcr.VCR(**settings).use_cassette(tmp_path / "c.yaml"):
        post(f"{server}/zip", "hello there")
    assert "hello there" in (tmp_path / "c.yaml").read_text()


HEADERS = (
    "X-Vault-Token", "PRIVATE-TOKEN", "X-Shopify-Access-Token", "Ocp-Apim-Subscription-Key", "apikey", "X-Amz-Security-Token",
    "X-Client-Secret", "DD-API-KEY", "Authorization", "X-Some-New-Header",
)  # fmt: skip
QUERY = ("X-Amz-Signature", "sessionToken", "pwd", "api_token", "access_token", "client_secret", "X-Goog-Signature")
MEMBERS = ("session_token", "apiToken", "api_token", "token", "secretAccessKey", "refresh_token")


class Vendor(Quiet):
    """Answers with tokens in the body, in ``Location`` and in a header of its own."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.dumps({"items": [{name: f"PLANTED-{name}" for name in MEMBERS}], "key": "PROJ-1"}).encode()
        self.send_response(201)
        self.send_header("content-type", "application/json")
        self.send_header("location", "https://files.test/a?X-Amz-Signature=PLANTED-location&part=1")
        self.send_header("x-vendor-token", "PLANTED-reply")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.spec("replay:C42")
def test_secrets_of_any_vendor_stay_out_of_vcrpys_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    settings = vcr_config()
    with served(Vendor) as url:

        def ask() -> Any:
            query = "&".join(f"{name}=PLANTED-{name}" for name in QUERY)
            headers = {name: f"PLANTED-{name}" for name in HEADERS}
            post(f"{url}/form?{query}&q=weather&page=2", headers=headers)
            body = {"deep": [{name: f"PLANTED-{name}" for name in MEMBERS}], "q": "weather"}
            with httpx2.Client() as client:
                client.post(f"{url}/form", data={name: f"PLANTED-{name}" for name in (*QUERY, "q")}, headers=headers)
            return post(f"{url}/json", body, headers=headers).json()

        with vcr.VCR(**settings).use_cassette(path):
            ask()
        with vcr.VCR(**settings).use_cassette(path, record_mode="none") as played:
            again = ask()

    text = path.read_text()
    assert "PLANTED" not in text.replace("PLANTED-q", "")
    assert played.all_played
    assert "PROJ-1" == again["key"]
    assert "q=weather&page=2" in text
    assert "part=" in text


@pytest.mark.spec("replay:C42")
@pytest.mark.parametrize("make_body", [io.BytesIO, lambda body: iter([body[:5], body[5:]])], ids=["file", "iterator"])
def test_secret_in_a_file_body_is_not_stored(make_body: Any, tmp_path: Path) -> None:
    body = b'{"password": "PLANT-password", "a": 1}'

    def ask() -> Any:
        return Request("POST", URL, make_body(body), {"content-type": "application/json"})

    cleaned = vcr_config()["before_record_request"](ask())
    stored = serialize({"requests": [cleaned], "responses": [{"body": {"string": b""}}]}, yamlserializer)

    assert "PLANT" not in str(stored)
    assert body == b"".join(ask().body)


CANARY = "zq9Hk27TmPLx4"


@pytest.mark.spec("replay:C42")
@pytest.mark.parametrize("query", ["a[token]=X", "jwt=X", "TOKEN[]=X", "otp=X"])
@pytest.mark.parametrize("where", ["?", "#"])
def test_a_secret_in_an_address_is_not_stored(query: str, where: str) -> None:
    address = f"https://example.test/back{where}{query.replace('X', CANARY)}"
    reply = {"headers": {"Location": [address]}, "body": {"string": b""}}
    request = SimpleNamespace(uri=address, headers={}, body=b"")

    assert CANARY not in str(vcr_config()["before_record_response"](reply))
    assert CANARY not in vcr_config()["before_record_request"](request).uri
