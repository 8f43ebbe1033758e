"""A known secret is found in every encoding, and one list of names says which variables are secret."""

from __future__ import annotations

import base64
import html
import json
import shlex
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.secret_names import is_secret_name
from stepengine.redaction import Redactor, StreamRedactor, find_environment_secrets, make_redactor

SECRET = "p/w+d&=<'\"\\ \u00e4\U0001f511 end-of_it"


def lower_hex(text: str) -> str:
    return "".join([c if c.isascii() and c.isalnum() else "".join([f"%{b:02x}" for b in c.encode()]) for c in text])


def html_numbers(text: str) -> str:
    return "".join([c if c.isalnum() and c.isascii() else f"&#{ord(c)};" for c in text])


def html_hex(text: str) -> str:
    return "".join([c if c.isalnum() and c.isascii() else f"&#X{ord(c):X};" for c in text])


def json_text(text: str) -> str:
    return json.dumps(text)[1:-1]


def json_for_html(text: str) -> str:
    made = json.dumps(text)[1:-1]
    for sign in "&<>'":
        made = made.replace(sign, f"\\u{ord(sign):04x}")
    return made.replace("/", "\\/")


ENCODERS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "quote": quote,
    "quote all": lambda text: quote(text, safe=""),
    "quote_plus": quote_plus,
    "lower-case percent": lower_hex,
    "percent of percent": lambda text: quote(quote(text, safe=""), safe=""),
    "JSON": json_text,
    "JSON with its letters": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "JSON for HTML": json_for_html,
    "JSON in JSON": lambda text: json_text(json_text(text)),
    "JSON in JSON in JSON": lambda text: json_text(json_text(json_text(text))),
    "repr": lambda text: repr(text)[1:-1],
    "ascii": lambda text: ascii(text)[1:-1],
    "HTML": html.escape,
    "JSON in an address": lambda text: quote(json_text(text), safe=""),
    "JSON in an address in an address": lambda text: quote(quote(json_text(text), safe=""), safe=""),
    "JSON in JSON in an address": lambda text: quote(json_text(json_text(text)), safe=""),
    "JSON in HTML": lambda text: html.escape(json_text(text)),
    "JSON in HTML of numbers": lambda text: html_numbers(json_text(text)),
    "HTML in JSON": lambda text: json_for_html(html.escape(text)),
    "HTML in an address": lambda text: quote(html_numbers(text), safe=""),
    "a word of a shell": lambda text: shlex.quote(text)[1:-1],
    "a word in single quotes": lambda text: text.replace("'", "'\\''"),
    "SQL": lambda text: text.replace("'", "''"),
    "CSV": lambda text: text.replace('"', '""'),
    "repr of bytes": lambda text: repr(text.encode())[2:-1],
    "octal": lambda text: "".join([chr(b) if chr(b).isalnum() and b < 128 else f"\\{b:03o}" for b in text.encode()]),
    "HTML of HTML": lambda text: html.escape(html.escape(text)),
    "HTML numbers": html_numbers,
    "HTML hexadecimal": html_hex,
    "HTML words": lambda text: text.replace("&", "&amp;").replace("+", "&plus;").replace("/", "&sol;"),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 in an address": lambda text: quote(base64.b64encode(text.encode()).decode(), safe=""),
    "base64 in JSON of PHP": lambda text: base64.b64encode(text.encode()).decode().replace("/", "\\/"),
}


UNPADDED = [encode for name, encode in ENCODERS.items() if not name.startswith("base64")]
"""The end of base64 text, which tells less than a character, may be shown when it comes in a piece of its own."""


@pytest.mark.spec("reliability:R11", "replay:K6")
@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
def test_a_known_secret_is_found_in_every_encoding(encode: Callable[[str], str]) -> None:
    redactor = Redactor({SECRET: "S"}, shapes=False)
    text = f"before {encode(SECRET)} after"

    assert "before <redacted:S> after" == redactor.text(text)
    assert redactor.may_contain_secret(text)
    assert {encode(SECRET): "S"} == redactor.find_secrets(text)
    assert b"before <redacted:S> after" == redactor.redact_binary(text.encode())


SIGNS = st.text(
    st.sampled_from("aB3/+&=<>'\"\\ %?#;:-_.~!@$^*()[]{}|`,\n\t\u00e4\u20ac\U0001f511"), min_size=8, max_size=24
)


@pytest.mark.parametrize("secret", ['"abc12345', 'abc12345"', '"abc12345"', "'abc12345'", 'abc""12345', '\\abc12345"'])
@pytest.mark.parametrize("wrap", [json.dumps, lambda text: json.dumps([text, json.dumps([text])])])
def test_quotes_around_a_secret_are_kept(secret: str, wrap: Callable[[str], str]) -> None:
    redactor = make_redactor("known", {}, {secret: "S"})
    cleaned = redactor.text(wrap(secret))

    assert "abc12345" not in cleaned
    assert "<redacted:S>" in str(json.loads(cleaned))


@pytest.mark.deep
@pytest.mark.spec("reliability:R11", "replay:K6")
@given(secret=SIGNS, encode=st.sampled_from([*ENCODERS.values()]), before=st.sampled_from(["", "x", " ", "=", "&"]))
def test_no_encoding_of_any_secret_is_left(secret: str, encode: Callable[[str], str], before: str) -> None:
    redactor = Redactor({secret: "S"}, shapes=False)
    text = before + encode(secret) + " after"
    cleaned = redactor.text(text)

    assert "<redacted:S>" in cleaned
    assert redactor.text(cleaned) == cleaned


WHOLE = SIGNS.filter(lambda text: text[-1] not in "\\%&")
"""Of a last sign that is also how an escape begins, what follows it in a later piece is shown; it tells nothing."""


@pytest.mark.deep
@pytest.mark.spec("reliability:R11")
@given(secret=WHOLE, encode=st.sampled_from(UNPADDED), sizes=st.lists(st.integers(1, 7), min_size=1))
def test_an_encoded_secret_in_stream_pieces_is_redacted(
    secret: str, encode: Callable[[str], str], sizes: list[int]
) -> None:
    text = f"a {encode(secret)} b"
    redactor = Redactor({secret: "S"}, shapes=False)
    trickle = StreamRedactor(redactor)
    shown, at, turn = "", 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        shown += trickle.feed(text[at : at + size])
        at, turn = at + size, turn + 1

    assert redactor.text(text) == shown + trickle.flush()


@pytest.mark.speed
@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("piece", ["\\", "%25", "&amp;", "&#", "/", "p/w+", "\\/", "%2", "&amp;amp;#", "p", " "])
def test_the_search_for_encodings_takes_linear_time(piece: str) -> None:
    text = (piece * 40_000)[:40_000] + quote(SECRET)
    redactor = make_redactor("all", {"A_KEY": SECRET, "B_KEY": "/\\\\\\\\//&&%%+"})
    start = time.process_time()
    redactor.text(text)
    redactor.find_spans(text)
    trickle = StreamRedactor(redactor)
    trickle.feed(text)

    assert time.process_time() - start < 1.5


NAMES = (
    "TOKEN", "PASSWORD", "SECRET", "APIKEY", "OPENAI_APIKEY", "PGPASSWORD", "DB_PASS", "GITHUB_PAT", "API_KEY", "SECRET_KEY_BASE",
    "GITHUB_TOKEN", "MYSQL_PWD", "REDISCLI_AUTH", "NPM_AUTHTOKEN", "SSH_PASSPHRASE", "db_passwd", "AWS_CREDENTIALS", "KEY_2", "JWT", "SERVICE_JWT", "DB_PASSWORDS", "APP_SECRETS",
)  # fmt: skip


@pytest.mark.spec("replay:K6", "reliability:SC05")
@pytest.mark.parametrize("name", NAMES)
def test_a_variable_hidden_from_commands_is_redacted_in_records(name: str) -> None:
    assert is_secret_name(name, "variable")
    assert {"one-secret-value": name} == find_environment_secrets({name: "one-secret-value"})


@pytest.mark.parametrize(
    "name", ["PATH", "PWD", "OLDPWD", "HOME", "MAX_TOKENS", "SSH_AUTH_SOCK", "MONKEY", "COMPASS", "LANG"]
)
def test_an_ordinary_variable_is_no_secret(name: str) -> None:
    assert not is_secret_name(name, "variable")
    assert {} == find_environment_secrets({name: "/home/somebody"})


@pytest.mark.spec("replay:K6")
@pytest.mark.parametrize(
    ("address", "passwords"),
    [
        ("postgres://app:s3cret-word@db.internal/app", {"s3cret-word"}),
        ("redis://:s3cret-word@cache:6379/0", {"s3cret-word"}),
        ("postgres://app:s3cret%2Fword@db/app", {"s3cret%2Fword", "s3cret/word"}),
        ("amqp://a:first-one@h1,amqp://a:second-one@h2", {"first-one", "second-one"}),
        ("amqp://app:s3cret@word@mq/app", {"s3cret@word"}),
        ("postgresql:///app?host=db&password=s3cret%2Fword", {"s3cret%2Fword", "s3cret/word"}),
        ("jdbc:mysql://db/app?user=app&password=s3cret-word", {"s3cret-word"}),
        ("host=db user=app password=s3cret-word", {"s3cret-word"}),
        ("Server=db;Password=s3cret-word;Encrypt=yes", {"s3cret-word"}),
        ("Server=db;Pwd=s3cret-word", {"s3cret-word"}),
        ("pwd=/srv/shop/folder", set()),
        ("https://example.test:8080/a@b", set()),
        ("https://user@example.test/", set()),
        ("https://user:short@example.test/", set()),
    ],
)
def test_the_password_of_a_url_variable_is_a_secret(address: str, passwords: set[str]) -> None:
    assert dict.fromkeys(passwords, "DATABASE_URL") == find_environment_secrets({"DATABASE_URL": address})
