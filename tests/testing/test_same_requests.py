"""
A reply is played to an equal request and to no other one; secrets may be others than those of the recording.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepengine.testing import Cassette, CassetteMiss
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.cassette_matching import UNCOUNTED

URL = "https://shop.example/v1/items"
WORDS = st.text("abAB01%+/ ;é", max_size=4)
QUERIES = st.lists(st.tuples(st.sampled_from(["city", "page", "q", "a"]), WORDS), max_size=3)
BODIES = st.one_of(
    st.binary(max_size=6),
    st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3)).map(
        lambda value: json.dumps({"a": value}).encode()
    ),
)  # fmt: skip
HEADERS = st.dictionaries(
    st.sampled_from(["accept", "content-type", "anthropic-beta", "x-tenant", "range"]), st.sampled_from(["a", "b"])
)
REQUESTS = st.builds(
    lambda method, path, query, headers, body: RecordedRequest(
        method, f"{URL}/{path}?{'&'.join(f'{name}={value}' for name, value in query)}", headers, body
    ),
    st.sampled_from(["GET", "POST"]), st.sampled_from(["a%2Fb", "a/b", "a", "A"]), QUERIES, HEADERS, BODIES,
)  # fmt: skip


def recorded(*requests: RecordedRequest, key: str | None = "00ff") -> Cassette:
    """
    Return a cassette in which each reply says the position of its request.
    """
    cassette = Cassette(mark_key=key)
    for number, request in enumerate(requests):
        cassette.finish(cassette.reserve(), Interaction(request, RecordedResponse(200, body=b"%d" % number)))
    return cassette


def loaded(cassette: Cassette, folder: Path) -> Cassette:
    return Cassette.load(cassette.save(folder / "c.yaml"))


def played(cassette: Cassette, *requests: RecordedRequest) -> list[int]:
    return [int(cassette.consume(request).response.body) for request in requests]


def told_apart(request: RecordedRequest) -> Any:
    """
    Return what a server can tell of a request, apart from what the page lists: the places of JSON members and of parameters.
    """
    path, _, query = request.url.partition("?")
    pairs = [tuple(pair.partition("=")) for pair in query.split("&")]
    try:
        body: Any = json.loads(request.body)
    except ValueError:
        body = request.body
    return request.method, path, sorted(pairs, key=lambda pair: pair[0]), sorted(request.headers), body


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C8")
@given(REQUESTS, REQUESTS)
def test_requests_that_a_server_tells_apart_never_match(one: RecordedRequest, other: RecordedRequest) -> None:
    assume(told_apart(one) != told_apart(other))
    cassette = recorded(one)

    with pytest.raises(CassetteMiss):
        cassette.consume(other)
    assert [0] == played(cassette, one)


@pytest.mark.spec("replay:C8")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("?a=1&a=2", "?a=2&a=1"),
        ("?flag", "?flag="),
        ("?q=a%26b", "?q=a&b"),
    ],
)
def test_another_address_is_another_request(tmp_path: Path, one: str, other: str) -> None:
    cassette = loaded(
        recorded(RecordedRequest("GET", f"{URL}{one}"), RecordedRequest("GET", f"{URL}{other}")), tmp_path
    )

    assert [1, 0] == played(cassette, RecordedRequest("GET", f"{URL}{other}"), RecordedRequest("GET", f"{URL}{one}"))


def posted(body: bytes = b"", kind: str = "application/json", /, **headers: str) -> RecordedRequest:
    return RecordedRequest("POST", URL, {**({"content-type": kind} if kind else {}), **headers}, body)


OTHERS = {
    "host": (posted(host="a.test"), posted(host="b.test")),
    "host of the address": (posted(host="a.test"), posted(host="shop.example")),
    "cookie": (posted(cookie="theme=a"), posted(cookie="lang=b")),
    "value of a cookie": (posted(cookie="theme=a"), posted(cookie="theme=b")),
    "no cookie": (posted(cookie="theme=a"), posted()),
    "one more cookie": (posted(cookie="session=abc"), posted(cookie="session=abc; lang=b")),
    "text of a number": (posted(b'{"a":0.1234567890123456789}'), posted(b'{"a":"0.1234567890123456789"}')),
    "text": (posted(b"[1.0]", "text/plain"), posted(b"[1]", "text/plain")),
    "bytes": (posted(b"[1.0]", "application/octet-stream"), posted(b"[1]", "application/octet-stream")),
    "text like a placeholder": (posted(b'"<redacted:a~12>"'), posted(b'"<redacted:a~13>"')),
    "digits of a number": (
        posted(b'{"password": "x9y8z7w6", "n": 0.1}'),
        posted(b'{"password": "x9y8z7w6", "n": 0.1000000000000000055}'),
    ),
}


@pytest.mark.spec("replay:C8", "replay:K4")
@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS.keys())
def test_a_request_with_another_part_is_a_miss(tmp_path: Path, one: RecordedRequest, other: RecordedRequest) -> None:
    for asked, now in ((one, other), (other, one)):
        cassette = loaded(recorded(asked), tmp_path)
        with pytest.raises(CassetteMiss):
            cassette.consume(now)
        assert [0] == played(cassette, asked)


PARTS = b"--%b\r\nContent-Type: text/plain\r\n\r\na\r\n--%b--\r\n"
EQUAL = {
    "host": (posted(host="shop.example"), posted()),
    "spelling of the host": (posted(host="shop.example:443"), posted(host="Shop.Example")),
    "JSON without a content type": (posted(b"[1.0]", ""), posted(b"[1]", "")),
    "credential in a cookie": (posted(cookie="session=abc"), posted()),
    **{
        f"boundary of multipart/{kind}": (
            posted(PARTS % (b"x1", b"x1"), f"multipart/{kind}; {name}=x1"),
            posted(PARTS % (b"y2", b"y2"), f"multipart/{kind}; {name}=y2"),
        )
        for kind, name in (("related", "boundary"), ("mixed", "BOUNDARY"), ("form-data", "Boundary"))
    },
}


@pytest.mark.spec("replay:C8")
@pytest.mark.parametrize(("one", "other"), EQUAL.values(), ids=EQUAL.keys())
def test_a_request_that_is_the_same_to_its_server_matches(
    tmp_path: Path, one: RecordedRequest, other: RecordedRequest
) -> None:
    for asked, now in ((one, other), (other, one)):
        assert [0] == played(loaded(recorded(asked), tmp_path), now)


@pytest.mark.spec("replay:C8", "replay:C10")
def test_differences_irrelevant_to_every_server_do_not_count(tmp_path: Path) -> None:
    asked = RecordedRequest(
        "POST", f"{URL}/%7Ea?b=2&a=1", {"content-type": "application/json"}, b'{"a": 1.0, "b": [2]}'
    )
    same = RecordedRequest(
        "POST", f"{URL}/~a?a=1&b=2", {"content-type": "application/json", **dict.fromkeys(UNCOUNTED, "x"), "x-stainless-os": "x"},
        b'{"b":[2.0],"a":1}',
    )  # fmt: skip

    assert [0] == played(loaded(recorded(asked), tmp_path), same)


def with_token(token: str, user: str = "") -> RecordedRequest:
    headers = {"authorization": f"Bearer {user}", "cookie": f"session={token}"} if user else {}
    return RecordedRequest("GET", f"{URL}?token={token}", headers)


@pytest.mark.spec("replay:K4", "replay:D3")
def test_requests_with_other_secrets_get_their_own_replies(tmp_path: Path) -> None:
    ours = [with_token("ada-secret-1", "ada-key-123"), with_token("bob-secret-2", "bob-key-456")]
    cassette = loaded(recorded(*ours, *ours), tmp_path)
    others = [with_token("eve-secret-3", "eve-key-789"), with_token("dan-secret-4", "dan-key-012")]

    assert [1, 0, 0 + 2, 1 + 2] == played(cassette, ours[1], ours[0], ours[0], ours[1])
    assert [0, 1, 3, 2] == played(loaded(recorded(*ours, *ours), tmp_path), others[0], others[1], others[1], others[0])
    text = (tmp_path / "c.yaml").read_text()
    assert [] == [word for word in ("ada-secret", "bob-secret", "ada-key", "bob-key") if word in text]


@pytest.mark.spec("replay:D3")
def test_one_key_may_be_another_one_in_a_replay() -> None:
    asked = [with_token("real-secret", "real-key-1")] * 3

    assert [0, 1, 2] == played(recorded(*asked), *[with_token("replay", "replay")] * 3)


@pytest.mark.spec("replay:K4")
def test_a_secret_from_a_reply_is_known_in_later_requests(tmp_path: Path) -> None:
    cassette = Cassette()
    login = RecordedRequest("POST", f"{URL}/login", {"content-type": "application/json"}, b'{"user": "%s"}')
    for user, token in ((b"ada", "ada-token-1"), (b"bob", "bob-token-2")):
        asked = RecordedRequest(login.method, login.url, login.headers, login.body.replace(b"%s", user))
        reply = RecordedResponse(
            200, headers={"Content-Type": "application/json"}, body=json.dumps({"access_token": token}).encode()
        )
        cassette.finish(cassette.reserve(), Interaction(asked, reply))
        cassette.finish(cassette.reserve(), Interaction(with_token(token), RecordedResponse(200, body=user)))
    again = loaded(cassette, tmp_path)

    tokens = {}
    for user in (b"bob", b"ada"):
        asked = RecordedRequest(login.method, login.url, login.headers, login.body.replace(b"%s", user))
        tokens[user] = json.loads(again.consume(asked).response.body)["access_token"]
    assert tokens[b"ada"] != tokens[b"bob"]
    assert [b"bob", b"ada"] == [again.consume(with_token(tokens[user])).response.body for user in (b"bob", b"ada")]


@pytest.mark.spec("replay:C10")
@pytest.mark.parametrize("number", ["1e400", "1e99999999", "1e9999999999999999999999", "-1e-99999999"])
def test_a_number_beyond_all_others_is_compared(number: str) -> None:
    def ask(text: str) -> RecordedRequest:
        return RecordedRequest(
            "POST", "http://h.test/", [("content-type", "application/json")], f'{{"n":{text}}}'.encode()
        )

    cassette = Cassette([Interaction(ask(number), RecordedResponse(200, "OK", [], b"found"))])

    with pytest.raises(CassetteMiss):
        cassette.consume(ask(f"2{number}"))
    assert b"found" == cassette.consume(ask(number)).response.body


ODD = [
    b'{"price": 21.50, "big": 1E3}', b'{"a":1,"a":2}', b'{"e":"\\u00e9"}', b'{"e":"\xc3\xa9"}', b'{"a": [1, 2]}\n', b'{\n  "a": 1\n}\n\n',
    b"[1,\n2]", b'{"x":"\xc2\x85\xe2\x80\xa8"}', b"plain\r\ntext\t\n", b"\xff\xfe\x00", b"", b" {}", b'{"n":1e400}', b'{"n":1e99999999}', b"[" * 300,
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C2", "replay:C4")
@settings(max_examples=25)  # each writes two files
@given(
    st.sampled_from(ODD) | st.binary() | BODIES,
    st.lists(
        st.tuples(
            st.sampled_from(["X-A", "x-a", "ETag", "Content-Encoding", "content-type"]),
            st.text("a\xe9 ,", max_size=3).map(str.strip)
            | st.text()
            | st.sampled_from(["gzip", "br", "application/json"]),
        )
    ),
    st.integers(100, 999),
    st.text(),
)
def test_a_reply_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, headers: list[tuple[str, str]], status: int, reason: str
) -> None:
    reply = RecordedResponse(status, reason, headers, body)
    cassette = Cassette(mark_key="00")
    cassette.finish(cassette.reserve(), Interaction(RecordedRequest("GET", URL), reply))
    folder = tmp_path_factory.mktemp("cassette")

    again = loaded(cassette, folder)

    assert reply == again.interactions[0].response
    assert (folder / "c.yaml").read_bytes() == again.save(folder / "d.yaml").read_bytes()
