"""
Which values a recording replaces, and which requests match that differ in one (replay K4).

The ordinary names are parameters of AWS's services and of the SDKs of OpenAI, Anthropic and Google, and common ones of other APIs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest

from stepengine.redaction import RedactField, RedactPattern, make_redactor
from stepengine.testing import Cassette, CassetteMiss
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.traffic_redaction import find_header_secrets

URL = "http://api.test/things"
ORDINARY = (Path(__file__).parent / "ordinary_names.txt").read_text().split()
CASE_CHANGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
FORM = [("content-type", "application/x-www-form-urlencoded")]
JSON = [("content-type", "application/json")]
PLACES: dict[str, Callable[[str, str], RecordedRequest]] = {
    "query": lambda name, value: RecordedRequest("GET", f"{URL}?{urlencode({name: value})}"),
    "form": lambda name, value: RecordedRequest("POST", URL, FORM, urlencode({name: value}).encode()),
    "json": lambda name, value: RecordedRequest("POST", URL, JSON, json.dumps({name: value}).encode()),
    "header": lambda name, value: RecordedRequest("GET", URL, [(CASE_CHANGE.sub("-", name).lower(), value)]),
    "cookie": lambda name, value: RecordedRequest("GET", URL, [("cookie", f"{name}={value}")]),
}


def record(*requests: RecordedRequest, replies: tuple[RecordedResponse, ...] = (), **options: object) -> Cassette:
    cassette = Cassette(**options)  # type: ignore[arg-type]
    for number, request in enumerate(requests):
        reply = replies[number] if replies else RecordedResponse(200, body=str(number).encode())
        cassette.finish(cassette.reserve(), Interaction(request, reply))
    return cassette


def matches(cassette: Cassette, request: RecordedRequest) -> bool:
    try:
        cassette.consume(request)
    except CassetteMiss:
        return False
    return True


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C8", "replay:K4")
@pytest.mark.parametrize("place", ["query", "form", "json", "header"])
def test_values_of_ordinary_names_are_recorded_as_they_are(place: str) -> None:
    asked = [PLACES[place](name, "10115-a") for name in ORDINARY]

    recorded = record(*asked).interactions

    assert [] == [one for one, kept in zip(asked, recorded, strict=True) if one != kept.request]


@pytest.mark.spec("replay:C8", "replay:K4")
@pytest.mark.parametrize(
    ("place", "name", "one", "other"),
    [
        ("query", "key", "user:1", "user:2"),
        ("query", "code", "DE", "FR"),
        ("form", "pass", "1", "2"),
        ("header", "x-session-id", "ada", "bob"),
        ("header", "x-row-key", "3f2a9c7d1e5b4a60", "7b1d4e9a2c6f8a35"),
        ("cookie", "theme", "dark", "light"),
    ],
)
def test_another_value_of_a_doubtful_name_is_a_miss(place: str, name: str, one: str, other: str) -> None:
    make = PLACES[place]

    assert not matches(record(make(name, one)), make(name, other))
    assert matches(record(make(name, one)), make(name, one))


@pytest.mark.spec("replay:K4")
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("query", "key"),
        ("query", "sig"),
        ("header", "authorization"),
        ("cookie", "sid"),
    ],
)
def test_another_credential_replays(place: str, name: str) -> None:
    make = PLACES[place]

    assert matches(record(make(name, "3f2a9c7d1e5b4a60")), make(name, "7b1d4e9a2c6f8a35"))


@pytest.mark.spec("replay:K4", "replay:K6")
def test_another_value_of_a_secret_variable_replays() -> None:
    ours, theirs = "3f2a9c7d1e5b4a60", "7b1d4e9a2c6f8a35"
    redactor = make_redactor("all", {"MAPS_KEY": ours, "OTHER_KEY": theirs})

    assert matches(record(PLACES["query"]("maps_key", ours), redactor=redactor), PLACES["query"]("maps_key", theirs))


@pytest.mark.spec("replay:K4")
@pytest.mark.parametrize("name", ["maps_key", "access_pass"])
def test_a_random_value_of_a_doubtful_name_is_not_stored(name: str) -> None:
    cassette = record(PLACES["query"](name, "3f2a9c7d1e5b4a60"))

    assert "3f2a9c7d1e5b4a60" not in cassette.interactions[0].request.url


@pytest.mark.spec("replay:K4", "replay:K10")
@pytest.mark.parametrize("rule", [RedactField("/customer/email"), RedactPattern(r"\w+@\w+\.test", "email")])
def test_another_value_under_a_user_rule_is_a_miss(rule: RedactField | RedactPattern) -> None:
    def ask(email: str) -> RecordedRequest:
        return RecordedRequest("POST", URL, JSON, json.dumps({"customer": {"email": email}}).encode())

    cassette = record(ask("olga@shop.test"), ask("bob@shop.test"), redactor=make_redactor([rule], {}))

    assert "olga" not in cassette.interactions[0].request.body.decode()
    assert not matches(cassette, ask("eve@shop.test"))
    assert b"1" == cassette.consume(ask("bob@shop.test")).response.body


@pytest.mark.spec("replay:C9", "replay:K4")
def test_a_repeated_reply_is_that_of_an_equal_request() -> None:
    def ask(key: str, tenant: str) -> RecordedRequest:
        return RecordedRequest("GET", URL, [("authorization", f"Bearer {key}"), ("x-tenant", tenant)])

    asked = [ask("ada-key-123", "a"), ask("bob-key-456", "a"), ask("bob-key-456", "b")]
    cassette = record(*asked, repeat_last=True)
    expected = [b"0", b"1", b"2"] * 2

    assert expected == [cassette.consume(one).response.body for one in [*asked, *asked]]


@pytest.mark.spec("replay:K4")
def test_a_request_with_a_credential_never_gets_the_reply_without() -> None:
    without = RecordedRequest("GET", URL)
    with_key = RecordedRequest("GET", URL, [("authorization", "Bearer ada-key-123")])
    cassette = record(without, with_key)

    assert b"1" == cassette.consume(with_key).response.body
    assert not matches(cassette, with_key)
    assert b"0" == cassette.consume(without).response.body


@pytest.mark.spec("replay:K4")
def test_secrets_count_in_a_request_that_lacks_another_one() -> None:
    def ask(key: str, **more: str) -> RecordedRequest:
        return RecordedRequest("GET", URL, [("x-api-key", key), *more.items()])

    cassette = record(ask("ada-key-123", cookie="sid=1"), ask("bob-key-456", cookie="sid=2"))

    assert b"1" == cassette.consume(ask("bob-key-456")).response.body


@pytest.mark.spec("replay:C4")
@pytest.mark.parametrize(
    "header",
    [
        ("authorization", "Basic YWRhLmxvdmVsYWNlOmh1bnRlcjItaHVudGVyMg=="),
        ("cookie", "user=ada.lovelace; lang=ada.lovelace"),
    ],
)
def test_a_reply_keeps_user_names_and_ordinary_cookies(header: tuple[str, str]) -> None:
    cassette = Cassette()
    request = RecordedRequest("GET", URL, [header])
    reply = RecordedResponse(
        200, body=b"hello ada.lovelace, not hunter2-hunter2" if header[0] != "cookie" else b"ada.lovelace"
    )
    cassette.finish(cassette.reserve(find_header_secrets(request.headers)), Interaction(request, reply))
    body = cassette.interactions[0].response.body

    assert b"ada.lovelace" in body
    assert b"hunter2-hunter2" not in body


@pytest.mark.spec("replay:C8", "replay:K4")
def test_a_replayed_cookie_that_a_client_quotes_matches() -> None:
    login = RecordedRequest("GET", f"{URL}/login")
    given = RecordedResponse(200, headers=[("Set-Cookie", "theme=dark; Path=/")])
    asked = RecordedRequest("GET", URL, [("cookie", "theme=dark")])
    cassette = record(login, asked, replies=(given, RecordedResponse(200)))

    ((_, replayed),) = cassette.consume(login).response.headers
    value = replayed.partition(";")[0].removeprefix("theme=")

    assert matches(cassette, RecordedRequest("GET", URL, [("cookie", f'theme="{value}"')]))


@pytest.mark.spec("replay:C8", "replay:K4")
@pytest.mark.parametrize("name", ["sessid", "PHPSESSID"])
def test_a_session_in_an_address_is_replaced_and_counts(name: str) -> None:
    asked, other = [RecordedRequest("GET", f"{URL}?{name}={value}") for value in ("w81", "x92")]

    cassette = record(asked)

    assert "w81" not in cassette.interactions[0].request.url
    assert not matches(cassette, other)
    assert matches(cassette, asked)
