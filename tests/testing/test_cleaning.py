"""
What is kept of headers and addresses, and that what a test says when it fails holds no key either (replay K3, K4).
"""

from __future__ import annotations

import json
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, ToolCall, tool
from stepengine.errors import ReplayDivergence
from stepengine.journal import MemoryJournal
from stepengine.testing import Cassette, CassetteMiss
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.traffic_redaction import Cleaner, clean_url, find_header_secrets

KEY = "sk-ant-api03-" + "Qr7" * 12
SECRET = (
    "authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "x-amz-security-token", "x-shop-auth",
    "apikey", "authentication", "authentication-info", "password", "private-token", "secret", "token", "x-csrftoken",
    "x-goog-iap-jwt-assertion", "x-hub-signature-256", "x-session-id",
)  # fmt: skip
OF_ONE_ATTEMPT = (
    "x-stainless-os", "user-agent", "x-forwarded-for", "idempotency-key", "traceparent", "openai-organization", "content-length",
)  # fmt: skip
OF_ACCOUNTS = ("openai-organization", "openai-project", "anthropic-organization-id")


@pytest.mark.spec("replay:K3")
@pytest.mark.parametrize("spelled", [str.lower, str.title])
def test_headers_are_recorded_without_secrets_and_marks_of_one_attempt(spelled):
    kept = [("content-type", "text/plain"), ("anthropic-beta", "x"), ("x-made-up", "z"), ("x-made-up", "y")]
    headers = [(spelled(name), "PLANTED-value") for name in (*SECRET, *OF_ONE_ATTEMPT)]
    request = RecordedRequest("POST", "http://h/", [*headers, ("Cookie", "a=PLANTED; b=PLANTED"), *kept], b"")
    hidden = [*[(name, f"<redacted:{name}>") for name in SECRET], ("cookie", "a=<redacted:a>; b=<redacted:b>")]
    assert [*hidden, *kept] == [*Cleaner().clean_request(request).headers]

    kept = [
        ("Date", "today"),
        ("X-Request-Id", "r"),
        ("ETag", '"1"'),
        ("x-a", "1"),
        ("X-A", "2"),
        ("WWW-Authenticate", "Basic"),
    ]
    headers = [(spelled(name), "PLANTED-value") for name in (*SECRET, *OF_ACCOUNTS)]
    cookie = ("Set-Cookie", "a=PLANTED; Path=/; HttpOnly")
    reply = RecordedResponse(200, "OK", [*headers, cookie, *kept], b"")
    hidden = [(spelled(name), f"<redacted:{name}>") for name in (*SECRET, *OF_ACCOUNTS)]
    assert [*hidden, ("Set-Cookie", "a=<redacted:a>; Path=/; HttpOnly"), *kept] == [
        *Cleaner().clean_response(reply).headers
    ]


HARMLESS = ("alt", "city", "limit", "page_token", "q", "x-amz-date")
NAMED_SECRETS = ("key", "api_key", "sig", "X-Amz-Credential")


@pytest.mark.spec("replay:K3")
@pytest.mark.parametrize("name", ["Referer", "Location", "Link", "X-Copy-Source"])
def test_an_address_in_a_header_loses_its_secrets_only(name):
    address = "https://{}h.test/a?token={}&page=2#b"
    sent = RecordedRequest("GET", "https://a.test/", [(name, address.format("me:pw@", "PLANTED"))])
    reply = RecordedResponse(200, "OK", [(name, address.format("me:pw@", "PLANTED"))])

    cleaner = Cleaner()

    expected = address.format("", "<redacted:token>")
    assert [(name.lower(), expected)] == [*cleaner.clean_request(sent).headers]
    assert [expected] == [value for _, value in cleaner.clean_response(reply).headers]


@pytest.mark.spec("replay:K3")
def test_headers_that_only_sound_secret_stay():
    plain = (
        ("Access-Control-Allow-Credentials", "true"),
        ("Surrogate-Key", "a b"),
        ("X-Max-Tokens", "3"),
        ("X-Keys", "k"),
    )

    assert plain == Cleaner().clean_response(RecordedResponse(200, "OK", plain)).headers


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:K4")
@given(st.lists(st.tuples(st.sampled_from([*HARMLESS, *NAMED_SECRETS]), st.text(min_size=1))))
def test_query_values_are_replaced_if_their_names_are_secret(pairs):
    from urllib.parse import urlencode

    cleaned = urlsplit(clean_url(f"http://user:pw@h:1/p?{urlencode(pairs)}"))
    expected = [(n, v if n in HARMLESS else f"<redacted:{n}>") for n, v in pairs]

    assert expected == parse_qsl(cleaned.query, keep_blank_values=True)
    assert "h:1" == cleaned.netloc
    assert cleaned.geturl() == clean_url(cleaned.geturl())


@pytest.mark.spec("reliability:R11")
def test_the_message_of_a_miss_holds_no_key():
    asked = RecordedRequest("POST", "http://h/v1", [("x-api-key", KEY)], json.dumps({"text": "hello"}).encode())
    cassette = Cassette([Interaction(asked, RecordedResponse(200, "OK", [], b"{}"))])
    body = json.dumps({"text": f"use {KEY}", "password": "open sesame"}).encode()
    with pytest.raises(CassetteMiss) as caught:
        cassette.consume(RecordedRequest("POST", f"http://h/v1?key={KEY}", [("x-api-key", KEY)], body))

    assert "use <redacted:" in str(caught.value)
    assert KEY not in str(caught.value) + repr(caught.value)
    assert "sesame" not in str(caught.value)


@pytest.mark.spec("reliability:R11")
def test_the_message_of_a_divergence_holds_no_key(monkeypatch):
    @tool
    def send(text: str) -> str:
        """Send."""
        return text

    def agent(text):
        def handle_steps(ctx):
            yield ToolCall("send", {"text": text})

        return AgentDefinition("a", tools=[send], handle_steps=handle_steps)

    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    journal = MemoryJournal(redact="all")
    with Engine() as engine:
        engine.run_sync(agent(f"one {KEY}"), journal=journal)
        with pytest.raises(ReplayDivergence) as caught:
            engine.replay_sync(journal, agent=agent(f"two {KEY} hunter2-hunter2")).unwrap()

    told = str(caught.value) + repr(caught.value)
    assert "one <redacted:provider-key>" in told
    assert KEY not in told
    assert "hunter2" not in told


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:K3")
@given(st.lists(st.from_regex(r"[a-z]{4,9}[0-9]", fullmatch=True), min_size=2, max_size=4, unique=True))
def test_a_secret_header_with_blanks_is_replaced_as_a_whole(words):
    phrase = " ".join(words)
    request = RecordedRequest("POST", "http://h/", [("x-api-key", phrase), ("authorization", f"Custom {phrase}")])
    held = Cassette(mark_key="")
    slot = held.reserve(find_header_secrets(request.headers))
    held.finish(slot, Interaction(request, RecordedResponse(200, "OK", (), f"got {phrase}".encode())))

    (kept,) = held.interactions

    assert [("x-api-key", "<redacted:x-api-key>"), ("authorization", "Custom <redacted:authorization>")] == [
        *kept.request.headers
    ]
    assert not any(word in kept.response.body.decode() for word in words)


@pytest.mark.spec("replay:K5")
@given(st.data())
def test_a_key_split_over_lines_of_json_is_removed(data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(KEY)), max_size=4)))
    pieces = [KEY[a:b] for a, b in zip([0, *cuts], [*cuts, len(KEY)], strict=True)]
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    body = end.join(
        [json.dumps({"message": {"content": piece}, "n": n}) for n, piece in enumerate(["x ", *pieces, " y"])]
    )
    reply = RecordedResponse(200, "OK", {"content-type": "application/x-ndjson"}, body.encode())

    lines = Cleaner().clean_response(reply).body.decode().split(end)

    said = "".join([json.loads(line)["message"]["content"] for line in lines])
    assert "x <redacted:provider-key> y" == said
    assert [*range(len(pieces) + 2)] == [json.loads(line)["n"] for line in lines]


@pytest.mark.spec("replay:K5")
@pytest.mark.parametrize(
    ("before", "secret", "after"),
    [
        ("https://hooks.slack.com/services/", "T0001/B0001/" + "aB3" * 8, ""),
        ("https://hooks.slack.com/workflows/", "T0001/A0001/123456/" + "aB3" * 8, ""),
        ("https://discord.com/api/webhooks/", "123456789012345678/" + "aB3-_" * 13, "?wait=true"),
        ("https://api.telegram.org/bot", "123456789:AA" + "h_-Z7" * 7, "/sendMessage"),
    ],
)
def test_a_credential_in_the_path_of_an_address_is_removed(before, secret, after):
    clean = clean_url(f"{before}{secret}{after}")

    assert (True, True) == (clean.startswith(before), clean.endswith(after))
    assert not any(part in clean for part in secret.replace(":", "/").split("/"))
    assert clean == clean_url(clean)
