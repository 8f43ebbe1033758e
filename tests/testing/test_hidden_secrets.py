"""
Secrets in places that a recording has to look into: encodings, texts within texts, and what a reply quotes (replay K4).
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from urllib.parse import quote_plus

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.testing import Cassette
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.transport import RecordTransport, ReplayTransport

URL = "http://api.test/things"
SECRET = "zq9Hk27TmPLx4"
FORM, JSON = "application/x-www-form-urlencoded", "application/json"
ADDRESS = f"https://h.test/a?page=2&access_token={SECRET}"
DEEP = "[" * 250 + f'{{"password": "{SECRET}"}}' + "]" * 250
PART = f'--b\r\nContent-Disposition: form-data; name="token"\r\n\r\n{SECRET}\r\n--b--\r\n'
NESTED = f"--a\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n{PART}\r\n--a--\r\n"
MULTIPART = "multipart/form-data; boundary=b"
ODD_PART = PART.replace('name="token"', 'filename="a; name=x"; name="token"')
BODIES = {
    "address in JSON": (JSON, json.dumps({"next": ADDRESS}).encode()),
    "user in an address in JSON": (JSON, json.dumps({"db": f"postgres://ada:{SECRET}@h/x"}).encode()),
    "address in text": ("text/plain", f"see {ADDRESS}".encode()),
    "address in a form": (FORM, f"a=1&next={quote_plus(ADDRESS)}".encode()),
    "JSON in a form": (FORM, f"a=1&data={quote_plus(json.dumps({'password': SECRET}))}".encode()),
    "form in latin-1": (FORM, f"city=K\xf6ln&password={SECRET}".encode("latin-1")),
    "JSON in latin-1": (JSON, f'{{"city": "K\xf6ln", "password": "{SECRET}"}}'.encode("latin-1")),
    "JSON in UTF-16": (JSON, json.dumps({"password": SECRET}).encode("utf-16")),
    "text in UTF-16": ("text/plain; charset=utf-16-le", json.dumps({"password": SECRET}).encode("utf-16-le")),
    "repeated names": (JSON, f'{{"password": "{SECRET}", "a": 1, "a": 2}}'.encode()),
    "depth": (JSON, DEEP.encode()),
    "JSONP": ("text/javascript", f'found({{"password": "{SECRET}"}});'.encode()),
    "broken off": (JSON, f'{{"password": "{SECRET}", "a": [1,'.encode()),
    "list in broken JSON": (JSON, f'{{"a": 1, "a": 2, "tokens": {{"token": ["{SECRET}"]}}}}'.encode()),
    "object": (JSON, json.dumps({"secret": {"name": "db", "value": SECRET}}).encode()),
    "nested multipart": ("multipart/mixed; boundary=a", NESTED.encode()),
    "event": ("text/event-stream", f'data: {{"password": "{SECRET}", "a": 1, "a": 2}}\n\n'.encode()),
    "relative address in a form": (FORM, f"next=/back%3Faccess_token%3D{SECRET}".encode()),
    "pair behind a semicolon": (FORM, f"a=1;password={SECRET}".encode()),
    "member of a secrets service": (JSON, json.dumps({"SecretString": SECRET}).encode()),
    "part with a name in its file name": (MULTIPART, ODD_PART.encode()),
    "part with a backslash in its file name": (MULTIPART, ODD_PART.replace("a; name=x", "C:\\").encode()),
    "form without a content type": ("", f"password={SECRET}&user=x".encode()),
    "form as text": ("text/html;charset=utf-8", f"oauth_token={SECRET}&x=1".encode()),
    "JSON that no page can run": (JSON, f')]}}\'\n{{"password": "{SECRET}"}}'.encode()),
    "JSON behind a loop": (JSON, f'for (;;);{{"password": "{SECRET}"}}'.encode()),
    "JSON in an assignment": ("text/javascript", f'var config = {{"password": "{SECRET}"}};'.encode()),
    "JSON in JSON behind a line end": (JSON, json.dumps({"body": f'\n {{"password": "{SECRET}"}}'}).encode()),
    "event in JSON": (JSON, json.dumps({"chunk": f'data: {{"password": "{SECRET}"}}\n\n'}).encode()),
    "event of several lines": ("text/event-stream", f'data: {{\ndata:  "password": "{SECRET}"\ndata: }}\n\n'.encode()),
    "escaped letter in a name": (JSON, f'{{"p\\u0061ssword": "{SECRET}"}}'.encode()),
    "address in HTML": ("text/html", f'<a href="https://h.test/a?b=1&amp;access_token={SECRET}">'.encode()),
    "address in source": ("text/html", f"x='https://h.test/a?b=1\\u0026access_token={SECRET}'".encode()),
    "address in an address": (
        "text/plain",
        f"https://h.test/?u=https%3A%2F%2Fi%2Fcb%3Fa%3D1%26token%3D{SECRET}".encode(),
    ),
    "request in a batch": (
        "multipart/mixed; boundary=b",
        f"--b\r\nContent-Type: application/http\r\n\r\nGET /x HTTP/1.1\r\nX-Api-Key: {SECRET}\r\n\r\n--b--\r\n".encode(),
    ),
    "body of a request in a batch": (
        "message/http",
        f'POST /x HTTP/1.1\r\nContent-Type: application/json\r\n\r\n{{"password": "{SECRET}"}}'.encode(),
    ),
    "user of an address": (JSON, json.dumps({"remote": f"https://{SECRET}{SECRET}@h.test/a.git"}).encode()),
    "private key of PGP": (
        "text/plain",
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{SECRET}\n-----END PGP PRIVATE KEY BLOCK-----".encode(),
    ),
    "name with value at its end": (JSON, json.dumps({"secretValue": SECRET}).encode()),
    "other names": (JSON, json.dumps({"creds": SECRET}).encode()),
}


def record(request: RecordedRequest, reply: RecordedResponse, path: Path) -> str:
    cassette = Cassette()
    cassette.finish(cassette.reserve(), Interaction(request, reply))
    cassette.save(path)
    again = Cassette.load(path)
    assert again.consume(request) == again.interactions[0]
    kept = again.interactions[0]
    return repr([kept.request, kept.response]).replace("\\x00", "")


@pytest.mark.spec("replay:K4")
@pytest.mark.parametrize(("kind", "body"), BODIES.values(), ids=BODIES.keys())
def test_no_secret_of_a_body_is_stored(kind: str, body: bytes, tmp_path: Path) -> None:
    headers = [("content-type", kind)]

    stored = record(
        RecordedRequest("POST", URL, headers, body), RecordedResponse(200, "OK", headers, body), tmp_path / "c.yaml"
    )

    assert SECRET not in stored
    assert 2 == stored.count("<redacted:")


ATOMS = st.sampled_from(
    ["NaN", "-Infinity", "1E400", "0.1000000000000000055511151231257827", "1.0", "-0.0", "true", "null", '"\\u00e9\\/"', '"\\ud83d\\ude00"']
) | st.sampled_from(['"\\ud800"', '"é"', "[ ]", "{ }", "7" * 400])  # fmt: skip
ODD_JSON = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3).map(lambda some: f"[ {' ,'.join(some)}]") | inner.map(lambda one: f'{{"\\u0061" :\t{one} }}'),
)  # fmt: skip
PLACES = [
    f'{{"password": "{SECRET}" ,"n":ODD}}',
    f'{{"n": ODD, "secret": {{"value":"{SECRET}"}} , "m":ODD}}',
    f'[ODD, "\\u00e9\\/?access_token={SECRET}&b=\\u0041"]',
    f'{{"n":"{{\\"password\\": \\"{SECRET}\\", \\"b\\": 1.0}}" ,"m" :ODD}}',
    f'{{"n":ODD,"n":ODD ,"note":"\\u00e9?access_token={SECRET}\\/"}}',
    f'{{"n":ODD}}\n{{"n": ODD, "password":"{SECRET}"}}\n',
]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C4", "replay:K4")
@given(st.sampled_from(PLACES), ODD_JSON, st.sampled_from([JSON, "text/event-stream"]))
def test_json_loses_nothing_but_its_secret(place: str, odd: str, kind: str) -> None:
    text = place.replace("ODD", odd)
    lines = [f"data: {line}" if line and kind != JSON else line for line in text.split("\n")]
    body = "\n".join(lines).encode(errors="surrogatepass")
    message = RecordedRequest("POST", URL, [("content-type", JSON)], text.encode(errors="surrogatepass"))
    cassette = Cassette()

    cassette.finish(
        cassette.reserve(), Interaction(message, RecordedResponse(200, "OK", [("content-type", kind)], body))
    )

    kept = cassette.interactions[0]
    restored = [re.sub(rb"<redacted:\w+~\w{4}>", SECRET.encode(), one.body) for one in (kept.request, kept.response)]
    assert [message.body, body] == restored
    assert SECRET.encode() not in kept.request.body + kept.response.body
    assert kept == cassette.consume(message)


@pytest.mark.spec("replay:C4", "replay:C40")
def test_a_program_gets_its_reply_unchanged_while_recording(tmp_path: Path) -> None:
    body = f'{{"password":"{SECRET}", "loss":NaN, "most":1E400}}'.encode()
    live = httpx2.MockTransport(lambda _: httpx2.Response(200, content=body))
    cassette = Cassette()
    with httpx2.Client(transport=RecordTransport(live, cassette)) as client:
        assert body == client.post(URL, content=body).content

    again = Cassette.load(cassette.save(tmp_path / "c.yaml"))

    with httpx2.Client(transport=ReplayTransport(again)) as client:
        assert b'"loss":NaN, "most":1E400}' in client.post(URL, content=body).content


@pytest.mark.spec("replay:K4")
def test_no_number_under_the_name_of_a_secret_is_stored(tmp_path: Path) -> None:
    body = json.dumps({"password": 482910375, "total_token": 482910, "secret": True}).encode()
    stored = record(RecordedRequest("POST", URL, body=body), RecordedResponse(200), tmp_path / "c.yaml")

    assert "482910375" not in stored
    assert "482910" in stored
    assert "true" in stored


@pytest.mark.spec("replay:K4")
@pytest.mark.parametrize(
    "request_",
    [
        RecordedRequest("GET", f"{URL}?token={SECRET}"),
        RecordedRequest("POST", URL, [("content-type", FORM)], f"password={SECRET}".encode()),
        RecordedRequest("POST", URL, [("content-type", JSON)], json.dumps({"a": [{"password": SECRET}]}).encode()),
        RecordedRequest("POST", URL, [("content-type", MULTIPART)], PART.encode()),
        RecordedRequest(
            "POST", URL, [("content-encoding", "gzip")], gzip.compress(b'{"password":"%b"}' % SECRET.encode())
        ),
        RecordedRequest("POST", URL, [("content-type", FORM)], f"a=1;password={SECRET}".encode()),
    ],
    ids=["query", "form", "json", "multipart", "compressed", "semicolon"],
)
def test_no_secret_of_a_request_is_stored_in_its_reply(request_: RecordedRequest, tmp_path: Path) -> None:
    reply = RecordedResponse(401, f"not {SECRET}", [("x-note", f"no {SECRET}")], f"you sent {SECRET}".encode())

    assert SECRET not in record(request_, reply, tmp_path / "c.yaml")


@pytest.mark.spec("replay:K3")
@pytest.mark.parametrize("value", [json.dumps({"a": 1, "password": SECRET}), ADDRESS, f"/back?token={SECRET}&b=1"])
def test_no_secret_in_the_text_of_a_header_is_stored(value: str, tmp_path: Path) -> None:
    request = RecordedRequest("GET", URL, [("x-data", value)])

    assert SECRET not in record(request, RecordedResponse(200, "OK", [("X-Data", value)]), tmp_path / "c.yaml")


@pytest.mark.spec("replay:K3")
def test_no_cookie_of_a_joined_header_is_stored(tmp_path: Path) -> None:
    date = "Expires=Wed, 21 Oct 2026 07:28:00 GMT"
    reply = RecordedResponse(200, "OK", [("Set-Cookie", f"a=1; Path=/; {date}, session={SECRET}; {date}")])

    stored = record(RecordedRequest("GET", URL, [("x-csrf", SECRET)]), reply, tmp_path / "c.yaml")

    assert SECRET not in stored
    assert 2 == stored.count(date)


@pytest.mark.spec("replay:K12")
def test_a_body_that_is_no_text_is_reported() -> None:
    cassette = Cassette()
    picture = RecordedResponse(200, "OK", [("content-type", "image/png")], b"\x89PNG\xff\x00")
    for number, reply in enumerate([picture, RecordedResponse(200, body=b"text")]):
        cassette.finish(cassette.reserve(), Interaction(RecordedRequest("GET", f"{URL}/{number}"), reply))

    assert (f"GET {URL}/0: its reply is not text",) == cassette.unscanned_bodies


PIECES = st.sampled_from(
    [
        '"',
        "\\",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        '"password"',
        '"token": ',
        f'"{SECRET}"',
        "123456789",
        "?token=x",
        "&",
        "=",
        " ",
        "\n",
        "f(",
    ]
)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:K4")
@given(st.lists(PIECES, max_size=25).map("".join), st.sampled_from([FORM, JSON, "text/plain", "text/event-stream"]))
def test_a_recorded_body_is_clean_and_matches_itself(body: str, kind: str) -> None:
    request = RecordedRequest("POST", URL, [("content-type", kind)], body.encode())
    cassette = Cassette(mark_key="00")
    cassette.finish(cassette.reserve(), Interaction(request, RecordedResponse(200)))
    kept = cassette.interactions[0].request

    again = Cassette(cassette.interactions)

    assert kept == again.consume(request).request
    assert kept == Cassette([again.interactions[0]]).consume(kept).request


ORDINARY = [
    ("text/plain", "x=1&y=2"), ("text/plain", "var a=1;token=t.get(1);b={x:1}"), ("text/html", '<p>Send {"token": "YOUR_TOKEN"}</p>'), (JSON, ")]}'\n{\"a\": 1}"),
    (JSON, '{"value": "abc", "default_value": "x", "key_value": "y"}'), ("text/event-stream", 'data: {\ndata:  "a": 1\ndata: }\n\n'), ("text/event-stream", "data: one\ndata: two\n\n"),
    ("multipart/mixed; boundary=b", "--b\r\nContent-Type: application/http\r\n\r\nGET /x HTTP/1.1\r\nAccept:a\r\n\r\n--b--\r\n"), ("text/plain", "git@github.com:org/repo.git and https://ada@h/x"),
]  # fmt: skip


@pytest.mark.spec("replay:C4", "replay:K4")
@pytest.mark.parametrize(("kind", "body"), ORDINARY)
def test_a_body_without_secrets_stays_as_it_is(kind: str, body: str) -> None:
    message = RecordedResponse(200, "OK", [("content-type", kind)], body.encode())
    cassette = Cassette()

    cassette.finish(cassette.reserve(), Interaction(RecordedRequest("GET", URL), message))

    assert message == cassette.interactions[0].response
