"""
The record transport keeps what goes by, as it goes by, without its secrets.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import httpx2
import pytest

from stepengine.errors import DataError, SecretFound
from stepengine.testing import Cassette, RecordTransport, ReplayTransport
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.recordings import CassetteFixture
from stepengine.testing.traffic_redaction import Cleaner
from tests.servers import Quiet, served

URL = "http://api.example.com/v1/messages"
EVENTS = ['event: a\r\ndata: {"n": "ä"}\r\n\r\n', "data: 2\n\n", ": ping\n\n", "data: [DONE]"]
STREAM = "".join(EVENTS).encode()
SSE = {"content-type": "text/event-stream; charset=utf-8"}


def cassette_of(*responses: RecordedResponse) -> Cassette:
    return Cassette([Interaction(RecordedRequest("GET", URL), response) for response in responses])


KEY = "sk-test-PLANT-1-" + "k7" * 12
PASSWORD = "PLANT-2-hunter2-hunter2"


class Server(Quiet):
    """
    Echoes the request's body and headers; `/stream` sends events one by one, `/status/<n>` fails.
    """

    protocol_version = "HTTP/1.1"
    gate: threading.Event

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path.startswith("/stream"):
            return self.stream()
        status = int(self.path.split("/")[2].partition("?")[0]) if self.path.startswith("/status/") else 200
        packed = gzip.compress(json.dumps({"echo": body.decode(), "headers": dict(self.headers)}).encode())
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-encoding", "gzip")
        self.send_header("set-cookie", f"session={PASSWORD}")
        self.send_header("x-ratelimit-remaining", "7")
        self.send_header("location", f"http://127.0.0.1/next?token={KEY}&page=2")
        self.send_header("content-length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed)
        return None

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index, event in enumerate(EVENTS):
            if index == 1:
                assert self.gate.wait(50)
            data = event.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def gate() -> threading.Event:
    """
    What the server waits for before the second event of a stream.
    """
    return threading.Event()


@pytest.fixture
def server(gate: threading.Event) -> Iterator[str]:
    handler = type("Handler", (Server,), {"gate": gate})
    with served(handler) as url:
        yield url
        gate.set()


@pytest.mark.spec("replay:C40", "replay:C13", "replay:C3")
def test_pieces_of_a_stream_pass_on_as_they_arrive(server, gate):
    """
    The client sees the first event while the server still holds back the second; sizes of the pieces can be kept.
    """
    held = Cassette()
    transport = RecordTransport(httpx2.HTTPTransport(), held, keep_chunks=True)
    with httpx2.Client(transport=transport) as client, client.stream("POST", f"{server}/stream") as response:
        pieces = response.iter_raw()
        first = next(pieces)
        assert 0 == len(held)
        gate.set()
        rest = list(pieces)

    assert EVENTS[0].encode() == first
    assert STREAM == held.interactions[0].response.body
    request = RecordedRequest("POST", f"{server}/stream")
    replay = ReplayTransport(held, "recorded")
    with httpx2.Client(transport=replay) as client, client.stream(request.method, request.url) as response:
        assert [first, *rest] == list(response.iter_raw())


@pytest.mark.spec("replay:C6")
def test_a_stream_left_early_is_saved_only_on_request(server, gate, tmp_path):
    gate.set()
    held = Cassette()
    transport = RecordTransport(httpx2.HTTPTransport(), held)
    with httpx2.Client(transport=transport) as client, client.stream("POST", f"{server}/stream") as response:
        next(response.iter_raw())

    assert 0 == len(Cassette.load(held.save(tmp_path / "whole.yaml")))
    (partial,) = Cassette.load(held.save(tmp_path / "partial.yaml", include_partial=True)).interactions
    assert ({"complete": False}, True) == (partial.extras, STREAM.startswith(partial.response.body))


@pytest.mark.spec("replay:C7")
@pytest.mark.parametrize("status", [408, 409, 429, 529, 400, 404])
def test_passing_outages_are_recorded_only_on_request(server, status):
    """
    400 and 404 are answers; the others are weather.
    """
    kept = []
    for record_errors in (False, True):
        held = Cassette()
        transport = RecordTransport(httpx2.HTTPTransport(), held, record_errors=record_errors)
        with httpx2.Client(transport=transport) as client:
            assert status == client.post(f"{server}/status/{status}").status_code
        kept.append(len(held))

    assert [int(status in (400, 404)), 1] == kept


async def test_an_async_client_records_through_an_async_transport(server):
    held = Cassette()
    async with httpx2.AsyncClient(transport=RecordTransport(httpx2.AsyncHTTPTransport(), held)) as client:
        reply = await client.post(f"{server}/echo", json={"n": 1})

    assert reply.json() == json.loads(gzip.decompress(held.interactions[0].response.body))
    with pytest.raises(DataError, match="an async client needs an async transport"):
        await RecordTransport(httpx2.HTTPTransport(), held).handle_async_request(httpx2.Request("GET", URL))
    with pytest.raises(DataError, match="a sync client needs a sync transport"):
        RecordTransport(httpx2.AsyncHTTPTransport(), held).handle_request(httpx2.Request("GET", URL))


@pytest.mark.spec("replay:C5")
def test_interactions_stand_in_the_order_in_which_requests_started(server, gate):
    held = Cassette()
    transport = RecordTransport(httpx2.HTTPTransport(), held)
    with httpx2.Client(transport=transport) as client, client.stream("POST", f"{server}/stream") as slow:
        client.post(f"{server}/echo")
        gate.set()
        slow.read()

    assert ["/stream", "/echo"] == [i.request.url.removeprefix(server) for i in held.interactions]


def forms(secret: str) -> list[str]:
    return [
        secret,
        quote(secret, safe=""),
        base64.b64encode(secret.encode()).decode(),
        base64.b64encode(f":{secret}".encode()).decode()[2:-4],
    ]


@pytest.mark.spec("replay:K3", "replay:K4", "reliability:R11", "replay:K8")
@pytest.mark.parametrize("key", [KEY, "PLANT-3-no-known-shape"])
def test_no_secret_of_a_request_reaches_the_file(server, tmp_path, key):
    held = Cassette()
    user = f"me:{PASSWORD}@"
    body = {
        "api_key": PASSWORD,
        "deep": [{"Client-Secret": PASSWORD}],
        "text": f"export K={key}\nnext",
        "args": json.dumps({"k": key}),
    }
    headers = {
        "Authorization": f"Bearer {key}",
        "X-Api-Key": key,
        "X-Tenant": PASSWORD,
        "Cookie": PASSWORD,
        "User-Agent": PASSWORD,
    }
    with httpx2.Client(transport=RecordTransport(httpx2.HTTPTransport(), held)) as client:
        client.post(
            f"{server.replace('//', '//' + user)}/echo?key={PASSWORD}&alt=sse&x={key}", json=body, headers=headers
        )
    written = held.save(tmp_path / "c.yaml").read_text()
    (interaction,) = Cassette.load(tmp_path / "c.yaml").interactions

    assert [] == [form for secret in (key, PASSWORD) for form in forms(secret) if form in written]
    stored = {"accept", "authorization", "content-type", "cookie", "x-api-key", "x-tenant"}
    assert stored == {name for name, _ in interaction.request.headers}
    assert "content-encoding" not in [name.lower() for name, _ in interaction.response.headers]
    assert str(len(interaction.response.body)) == interaction.response.get_header("content-length")
    assert "alt=sse" in interaction.request.url
    assert "page=2" in interaction.response.get_header("location")


@pytest.mark.spec("replay:K8")
def test_somebody_elses_recording_is_cleaned_when_it_is_saved_again(tmp_path):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(
        f"interactions:\n- request:\n    method: POST\n    uri: https://u:{PASSWORD}@api.example.com/v1?key={KEY}\n"
        f"    headers: {{AUTHORIZATION: [Bearer {KEY}], X-Api-Key: {KEY}}}\n    body: 'K={KEY}'\n"
        f"  response:\n    status: {{code: 200, message: OK}}\n    headers: {{Set-Cookie: [a={PASSWORD}]}}\n"
        f'    body: {{string: \'{{"password": "{PASSWORD}"}}\'}}\nversion: 1\n'
    )

    written = Cassette.load(theirs).save(tmp_path / "ours.yaml").read_text()

    assert [] == [secret for secret in (KEY, PASSWORD) if secret in written]


TEXTS = (f"K={KEY} and {KEY}.", json.dumps({"cmd": f"a\n{KEY}\nb"}), f"{PASSWORD}!")


@pytest.mark.parametrize(("size", "text"), [(1, TEXTS[0]), (20, TEXTS[0]), (3, TEXTS[1]), (3, TEXTS[2])])
def test_a_secret_split_over_pieces_is_removed(tmp_path, size, text):
    """
    Texts at one place of a stream's events are looked at joined; every event stays.
    """
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    events = [{"type": "delta", "index": 0, "delta": {"text": piece}} for piece in pieces]
    stream = "".join(f"event: x\r\ndata: {json.dumps(event)}\r\n\r\n" for event in events).encode()
    live = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=SSE, content=stream))
    held = Cassette()
    with httpx2.Client(transport=RecordTransport(live, held)) as client:
        client.post(URL, headers={"x-api-key": PASSWORD})

    (kept,) = Cassette.load(held.save(tmp_path / "c.yaml")).interactions

    lines = [json.loads(line[6:]) for line in kept.response.body.decode().splitlines() if line.startswith("data: ")]
    said = "".join(event["delta"]["text"] for event in lines)
    expected = text.replace(KEY, "<redacted:provider-key>").replace(PASSWORD, "<redacted:x-api-key>")
    assert expected == re.sub(r"~[0-9a-f]{4}>", ">", said)
    assert (len(events), stream.count(b"\r\n\r\n")) == (len(lines), kept.response.body.count(b"\r\n\r\n"))


@pytest.mark.parametrize("body", [KEY, json.dumps({KEY: 1})])
def test_the_final_scan_refuses_to_write_a_missed_secret(tmp_path, monkeypatch, body):
    monkeypatch.setattr(Cleaner, "clean_response", lambda _, response: response)
    held = cassette_of(RecordedResponse(200, "OK", (), body.encode()))

    with pytest.raises(SecretFound, match=r"interactions\[0\], GET .* contains a secret at response/body") as caught:
        held.save(tmp_path / "c.yaml")

    assert [] == list(tmp_path.iterdir())
    assert KEY not in caught.value.message
    assert "provider-key" == caught.value.rule


@pytest.mark.spec("replay:K8")
@pytest.mark.parametrize("exists", [False, True])
def test_a_recording_with_a_secret_keeps_its_other_exchanges(tmp_path, monkeypatch, exists):
    """
    A file that exists stays as it was: it may be the only whole recording.
    """
    file = tmp_path / "c.yaml"
    if exists:
        cassette_of(RecordedResponse(200, "OK", (), b"before")).save(file)
    held = cassette_of(*[RecordedResponse(200, "OK", (), body) for body in (b"one", KEY.encode(), b"three")])
    monkeypatch.setattr(Cleaner, "clean_response", lambda _, response: response)

    with pytest.raises(SecretFound) as caught:
        held.save(file)

    kept = [interaction.response.body for interaction in Cassette.load(file).interactions]
    assert ([b"before"] if exists else [b"one", b"three"]) == kept
    assert "interactions[1]" in caught.value.message
    assert ("is unchanged" if exists else "contains the other 2") in caught.value.message
    assert KEY not in caught.value.message


SECRETS = {
    "provider-key": KEY,
    "google-key": "AIza" + "Sy0123456789-_abcdefghijklmnopqrstu"[:35],
    "github-token": "ghp_" + "a1B2" * 9,
    "slack-token": "xoxb-1234567890-abc",
    "aws-key": "AKIA" + "ABCDEFGH01234567",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.sig-nature",
    "private-key": "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----",
    "bearer": "Bearer abcdefghijklmnopqrstuvwxyz",
}


JSON = {"content-type": "application/json"}
PLACES = {
    "text": (JSON, lambda secret: f"K={secret}\nnext"),
    "json": (JSON, lambda secret: json.dumps({"a": {"b": [f"x\n{secret}\ny"]}})),
    "nested": (JSON, lambda secret: json.dumps({"a": json.dumps({"b": json.dumps([f"x\n{secret}"])})})),
    "key": (JSON, lambda secret: json.dumps({secret: 1})),
    "event": (SSE, lambda secret: f"data: {json.dumps({'a': secret})}\n\n"),
    "comment": (SSE, lambda secret: f": {secret}\n\n"),
}


PLANTED = [*[(rule, "text") for rule in SECRETS], *[("provider-key", place) for place in PLACES if place != "text"]]


@pytest.mark.parametrize(("rule", "place"), PLANTED)
def test_values_that_look_like_keys_are_replaced_in_the_file(tmp_path, rule, place):
    kind, body = PLACES[place]
    held = cassette_of(RecordedResponse(200, "OK", kind, body(SECRETS[rule]).encode()))

    written = held.save(tmp_path / "c.yaml").read_text()

    assert f"<redacted:{rule}>" in written
    assert not re.search(re.escape(SECRETS[rule][-12:]), written)


def test_text_that_only_resembles_a_key_is_left_alone(tmp_path):
    blob = base64.b64encode(b"x" * 40).decode()
    harmless = f"{blob}sk-0123456789abcdef0123456789/{blob} task-type-0123456789-ignored sk-learn-is-a-library-of-words max_tokens"

    path = cassette_of(RecordedResponse(200, "OK", (), harmless.encode())).save(tmp_path / "c.yaml")

    assert harmless.encode() == Cassette.load(path).interactions[0].response.body


FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.spec("replay:K15")
@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/oauth/token", {}, b'{"grantType": "refresh_token"}'),
        ("/v1/sts", FORM, b"grant_type=refresh_token&refresh_token=abc"),
        ("/", FORM, b"Action=AssumeRoleWithWebIdentity&WebIdentityToken=abc"),
        ("/object?X-Amz-Signature=abc", {}, b""),
        ("/keys", {}, b'{"private_key_id": "1", "client_email": "a@b"}'),
    ],
)
def test_a_request_for_credentials_is_answered_and_never_recorded(server, path, headers, body):
    cassette = Cassette()
    with httpx2.Client(transport=RecordTransport(httpx2.HTTPTransport(), cassette)) as client:
        assert 200 == client.post(f"{server}{path}", content=body, headers=headers).status_code
        client.post(f"{server}/v1/messages", json={"text": "how does grant_type=refresh_token work?"})

    assert ["/v1/messages"] == [urlsplit(i.request.url).path for i in cassette.interactions]
    assert ("X-Amz-Signature" in path) == ("the URL itself is a credential" in "".join(map(str, cassette.left_out)))


@pytest.mark.spec("replay:K15")
@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/push/token", {}, b'{"token": "device-1234"}'),
        ("/push/token", FORM, b"token=device-1234"),
        ("/ask", FORM, b"text=what+does+grant_type=+mean"),
        ("/ask", FORM, b"text=Action=AssumeRole"),
    ],
)
def test_a_request_that_resembles_one_for_credentials_is_recorded(server, path, headers, body):
    cassette = Cassette()
    with httpx2.Client(transport=RecordTransport(httpx2.HTTPTransport(), cassette)) as client:
        client.post(f"{server}{path}", content=body, headers=headers)

    assert [path] == [urlsplit(i.request.url).path for i in cassette.interactions]


@pytest.mark.spec("replay:K15")
@pytest.mark.parametrize(
    "host", ["sts.amazonaws.com", "sts.eu-west-1.amazonaws.com", "portal.sso.us-east-1.amazonaws.com"]
)
def test_a_service_that_hands_out_credentials_is_never_recorded(host):
    cassette = Cassette()
    live = httpx2.MockTransport(lambda _: httpx2.Response(200, json={"SecretAccessKey": PASSWORD}))
    with httpx2.Client(transport=RecordTransport(live, cassette)) as client:
        client.post(f"https://{host}/", headers={"authorization": "AWS4-HMAC-SHA256 Credential=AKIA/x, Signature=1"})
    assert () == cassette.interactions


@pytest.mark.spec("replay:K15")
def test_a_signed_model_call_is_recorded_without_its_signature(server, tmp_path):
    def headers(word: str) -> dict[str, str]:
        signature = f"AWS4-HMAC-SHA256 Credential=AKIA{word}/20260101, Signature={word * 8}"
        return {
            "authorization": signature,
            "x-amz-security-token": f"session-{word * 4}",
            "x-amz-date": "20260101T000000Z",
        }

    held = Cassette()
    with httpx2.Client(transport=RecordTransport(httpx2.HTTPTransport(), held)) as client:
        live = client.post(f"{server}/model/x/converse", json={"a": 1}, headers=headers("PLANT"))
    assert "PLANTPLANT" in live.text
    path = held.save(tmp_path / "c.yaml")
    assert not re.search("PLANTPLANT|AKIAPLANT", path.read_text())
    again = Cassette.load(path)
    stored = {"accept", "authorization", "content-type", "x-amz-security-token"}
    assert stored == {name for name, _ in again.interactions[0].request.headers}
    with httpx2.Client(transport=ReplayTransport(again)) as client:
        client.post(f"{server}/model/x/converse", json={"a": 1}, headers=headers("OTHER"))
    again.assert_all_used()


@pytest.mark.spec("replay:C7")
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_request_without_a_reply_is_named_and_not_stored(tmp_path, method):
    class Unfinished(httpx2.BaseTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            held.save()
            saved.append(len(Cassette.load(tmp_path / "c.yaml")))
            fixture.check_usage()
            return httpx2.Response(200, text="late")

    saved: list[int] = []
    fixture = CassetteFixture(tmp_path / "test.yaml", "once", requested=False)
    held = fixture.fresh
    held.path = tmp_path / "c.yaml"
    with httpx2.Client(transport=fixture.transport(Unfinished())) as client:
        client.request(method, "http://h.test/")

    assert [0] == saved
    assert () == fixture.fresh.interactions
    assert [f"  not recorded: {method} http://h.test/: the request got no reply"] == fixture.list_remarks()
