"""
The one redactor by itself: its time follows the length of the text, nothing hides behind JSON, and it is told of keys.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepengine import redaction
from stepengine.data.codec import to_json
from stepengine.data.events import ToolFinished
from stepengine.data.messages import ToolResult
from stepengine.data.secret_names import MEMBER_HINTS, SECRET_ENDINGS, VALUE_WORDS, is_secret_name
from stepengine.data.spellings import make_spellings
from stepengine.errors import StepEngineError
from stepengine.journal.secret_scan import scan
from stepengine.redaction import (
    GIVEN,
    KnownSecrets,
    RecordRedaction,
    Redactor,
    SecretIndex,
    StreamRedactor,
    TextRedactor,
    find_environment_secrets,
    make_redactor,
    make_text_finder,
    parse_if_json,
)
from stepengine.testing.installation_checks import FAMILIES
from tests import strategies

KEY = "sk-ant-abcdefghijklmnop1234"
PEM = "-----BEGIN PRIVATE KEY-----"
HOSTILE = {
    "openings": "sk",
    "openings and masks": "sk***",
    "masks": "***...\u2026",
    "endings": "sk...1234 ",
    "dots": ".",
    "stars and endings": "sk***x1234***",
    "begins of PEM": PEM,
    "PEM": f"{PEM}x-----END PRIVATE KEY-----",
    "letters of PEM": "-----BEGIN AAAA ",
    "shapes that break off": "sk-a1b2c3d4e5f6g7h8+",
    "words of JWT": "eyJaaaaaaaa.",
    "bearers": "Bearer ",
    "blanks": "bearer" + " " * 40,
    "white space": "\f",
    "nested addresses": "%3Fa%3D%2526",
    "escapes": "\\",
    "escaped shapes": "\\nsk-a1b2c3d4e5f6g7h8i9",
    "brackets": "[",
    "placeholders": "<redacted:",
    "found keys": KEY,
    "many kinds of found shapes": "AKIA0123456789ABCDEF ghp_" + "x1Y2" * 9 + " ",
}


def all_of_it(redactor: Redactor, text: str) -> None:
    redactor.may_contain_secret(text)
    redactor.text(text)
    redactor.find_spans(text)
    redactor.find_secrets(text)
    redactor.redact_json_text(text)
    redactor.value({"a": text, "b": f'["{text}"]'})


def seconds(work, *args) -> float:
    best = float("inf")
    for _ in range(5):
        begun = time.process_time()
        work(*args)
        best = min(best, time.process_time() - begun)
    return best


@pytest.mark.speed
@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE)
def test_redaction_time_grows_linearly_with_the_text(piece):
    redactor = make_redactor("all", {"ANTHROPIC_API_KEY": KEY})
    size = 50_000
    while (first := seconds(all_of_it, redactor, (piece * size)[:size])) < 0.03:
        size *= 2
    last = seconds(all_of_it, redactor, (piece * size * 4)[: size * 4])

    assert last / first < 9, (size, first, last)  # under 3 for each doubling; what is quadratic has 16


@pytest.fixture
def full_of_findings(tmp_path):
    file = tmp_path / "many.txt"
    file.write_text("".join([f"sk-{n:020d}\nsk...{n % 97}1234\n" for n in range(5_000)]))
    return file


@pytest.mark.spec("reliability:R23", "replay:K11")
def test_each_of_many_findings_is_reported_with_its_line(full_of_findings):
    leaks = list(scan([full_of_findings], environment={"A_KEY": KEY}))

    assert 10_000 == len(leaks)
    assert (1, 2, 3) == tuple(leak.line for leak in leaks[:3])
    assert 9_999 == leaks[-2].line


SEPARATORS = st.text('_-. :*[]/"\\\n\x01\x7f\u00a0\u200b', max_size=3)


def with_separators(words: list[str], data: st.DataObject) -> str:
    """Return the name of *words* in any case, with separators before, after and within them."""
    cases = st.sampled_from([str.lower, str.upper, str.title])
    cut = [(word, data.draw(st.integers(0, len(word)))) for word in words]
    pieces = [data.draw(cases)(piece) for word, at in cut for piece in (word[:at], word[at:])]
    return "".join([f"{data.draw(SEPARATORS)}{piece}" for piece in pieces]) + data.draw(SEPARATORS)


SECRET_WORDS = sorted({*MEMBER_HINTS, *[end for end, places in SECRET_ENDINGS.items() if "member" in places]})


@pytest.mark.spec("reliability:R11")
def test_members_whose_names_are_secrets_stay_separate() -> None:
    given = {f"sk-ant-api03-{letter * 40}": number for number, letter in enumerate("abc")}
    read = Redactor({}, shapes=True).value(given)

    assert [0, 1, 2] == list(read.values())
    assert not any(name in str(read) for name in given)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:K4", "reliability:R11")
@settings(max_examples=300)
@given(
    word=st.sampled_from(SECRET_WORDS),
    values=st.lists(st.sampled_from(sorted(VALUE_WORDS)), max_size=2),
    levels=st.integers(0, 3),
    is_ascii=st.booleans(),
    missing=st.integers(0, 1),
    data=st.data(),
)
def test_fast_test_finds_every_secret_name(
    *, word: str, values: list[str], levels: int, is_ascii: bool, missing: int, data: st.DataObject
) -> None:
    """Also in JSON inside strings, in its escapes, and where a bracket is missing."""
    name = with_separators([word, *values, *data.draw(st.sampled_from([[], ["2"]]))], data)
    assume(is_secret_name(name, "member"))
    redactor = Redactor({}, shapes=True)
    text = json.dumps({name: "hunter2-hunter2"}, ensure_ascii=is_ascii)
    text = text[: len(text) - missing]
    for _ in range(levels):
        text = json.dumps({"body": text}, ensure_ascii=is_ascii)

    assert redactor.may_contain_secret(text)
    assert "hunter2" not in redactor.redact_json_text(text)


@pytest.mark.spec("replay:K5", "reliability:R11")
@given(
    secret=st.sampled_from(["https://me:hunter22@h.test/a", "https://h.test/a?api_key=hunter22&b=1", KEY]),
    escaped=st.sets(st.sampled_from("/:@?=&-s1")),
    levels=st.integers(1, 3),
)
def test_fast_test_finds_secrets_behind_escapes(secret: str, escaped: set[str], levels: int) -> None:
    text = '{"url": "%s"}' % "".join([f"\\u{ord(one):04x}" if one in escaped else one for one in secret])  # noqa: UP031
    for _ in range(levels):
        text = json.dumps({"body": text})
    redactor = Redactor({}, shapes=True)

    assert redactor.value(json.loads(text)) != json.loads(text)
    assert redactor.may_contain_secret(text)


@pytest.mark.spec("reliability:R11")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"key {KEY[:7]}...1234 is void", "key <redacted:abridged> is void"),
        ("sk***1234, sk\u20261234, sk-x....****1234", ", ".join(["<redacted:abridged>"] * 3)),
        ("wait... what***", "wait... what***"),
        ("sk...9999", "sk...9999"),
        ("xsk-ab...1 ...1234", "xsk-ab...1 ...1234"),
        ("sk***sk***1234.1234x", "<redacted:abridged>x"),
    ],
)
def test_an_abridged_known_key_is_redacted(text, expected):
    assert expected == Redactor({KEY: "K"}, shapes=False).text(text)


@given(st.text(st.sampled_from("sk-4321*. \u2026x\n"), max_size=40))
def test_abridged_keys_match_a_reference_expression(text):
    plain = re.compile(r"sk[\w-]*(?:\*{3,}|\.{3,}|\u2026)[\w*.-]*4321")

    assert plain.sub("<redacted:abridged>", text) == Redactor({"sk-00000-4321": "K"}, shapes=False).text(text)


@pytest.mark.spec("replay:K5")
@pytest.mark.parametrize("begin", [*FAMILIES, "nvapi-", "r8_", "ASIA", "AKIA"])
def test_a_provider_key_is_recognized_by_its_prefix(begin):
    body = "0123456789ABCDEF" if begin[:2] in ("AK", "AS") else "k3Y" * 12
    key = begin + (body[:35] if begin == "AIza" else body)

    assert re.fullmatch(r"key <redacted:[a-z-]+>, no word", Redactor({}, shapes=True).text(f"key {key}, no word"))
    assert f"my{key}" == Redactor({}, shapes=True).text(f"my{key}")


@pytest.mark.spec("replay:K5")
def test_a_private_key_block_is_redacted_to_its_end_marker():
    block = f"{PEM}\nMIIE\n-----END PRIVATE KEY-----"
    clean = Redactor({}, shapes=True).text(f"{PEM} and {block} rest {block} {PEM}")

    assert f"<redacted:private-key> rest <redacted:private-key> {PEM}" == clean
    assert f"{PEM}-----END PRIVATE KEY-----" == Redactor({}, shapes=True).text(f"{PEM}-----END PRIVATE KEY-----")


@pytest.mark.spec("reliability:R11", "replay:K5")
def test_a_duplicate_json_key_does_not_hide_a_secret():
    hidden = f'{{"a": "{KEY}", "a": 1}}'

    assert KEY not in make_redactor("all", {}).value({"x": hidden})["x"]
    assert KEY not in Redactor({KEY: "K"}, shapes=False).value({"x": hidden})["x"]
    assert parse_if_json(hidden) == hidden


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("depth", [199, 201, 600, 100_000])
def test_nested_json_in_text_is_redacted_at_any_depth(depth):
    text = "[" * depth + f'"{KEY}"' + "]" * depth
    clean = Redactor({}, shapes=True).value({"x": text})["x"]

    assert KEY not in clean
    assert clean == Redactor({}, shapes=True).value({"x": clean})["x"]


@pytest.mark.spec("replay:K1", "reliability:R11")
def test_a_secret_equal_to_placeholder_words_leaves_placeholders_intact():
    redactor = Redactor({"redacted": "A_KEY", KEY: "redacted_key"}, shapes=True)
    clean = redactor.text(f"{KEY} redacted")

    assert "<redacted:redacted_key> <redacted:A_KEY>" == clean == redactor.text(clean)


def test_a_secret_of_invalid_text_causes_no_error():
    assert Redactor({"\udcff" * 9: "ODD_KEY"}, shapes=False).text("plain") == "plain"


@pytest.mark.spec("replay:K1", "replay:K6")
def test_a_redactor_learns_keys_registered_later():
    keys = KnownSecrets()
    redactor = Redactor({}, shapes=False, keys=keys)
    before = redactor.cache_key
    assert KEY == redactor.text(KEY)
    assert not redactor.may_contain_secret(KEY)
    keys.add(KEY, "anthropic_api_key")
    keys.add(KEY, "openai_api_key")

    assert redactor.may_contain_secret(KEY)
    assert "<redacted:anthropic_api_key>" == redactor.text(KEY)
    assert redactor.cache_key not in ("", before)
    keys.add_from_environment({"MY_KEY": KEY, "HOME": "/home/somebody"})
    assert "<redacted:MY_KEY>" == redactor.text(KEY)
    assert "<redacted:OTHER>" == Redactor({KEY: "OTHER"}, shapes=False, keys=keys).text(KEY)
    assert KEY not in repr(keys)


@pytest.mark.parametrize("word", ["not-needed", "lm-studio", "none", "ollama", "short", "  "])
def test_dummy_keys_of_local_servers_are_not_redacted(word):
    GIVEN.add(word, "ollama_api_key")

    assert f"it is {word}." == make_redactor("known", {}).text(f"it is {word}.")


@given(st.lists(st.sampled_from(["a", KEY[:5], KEY[5:11], KEY[11:], KEY, KEY[:-1], "s", " "]), max_size=12))
def test_streamed_text_is_redacted_like_the_whole_text(pieces):
    redactor = Redactor({KEY: "K"}, shapes=False)
    trickle = StreamRedactor(redactor)
    shown = "".join([trickle.feed(piece) for piece in pieces]) + trickle.flush()

    assert KEY not in shown
    assert redactor.text("".join(pieces)) == shown


def test_secrets_come_only_from_variables_with_secret_names():
    assert find_environment_secrets({"A_TOKEN": "12345678", "B_TOKEN": "1234567", "C": "123456789"}) == {
        "12345678": "A_TOKEN"
    }


@pytest.mark.deep
@pytest.mark.spec("reliability:R11")
@given(
    secret=st.text(min_size=8, max_size=40).filter(lambda text: text.strip() == text),
    before=st.text(max_size=8),
    after=st.text(max_size=8),
    encode=st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]),
)
def test_a_known_secret_inside_base64_text_is_redacted(
    secret: str, before: str, after: str, encode: Callable[[bytes], bytes]
) -> None:
    """
    Such as the `user:password` of a header.
    """
    redactor = Redactor({secret: "password"}, shapes=False)
    coded = encode(f"{before}{secret}{after}".encode()).decode()

    cleaned = redactor.text(f"Authorization: Basic {coded}")

    assert "<redacted:password>" in cleaned
    assert redactor.text(cleaned) == cleaned


WORDS = ["counting/model", "add", "ok", "c1", "sk-walk-0123456789abcdef", "two words", "x" * 100]


@pytest.mark.deep
@pytest.mark.smoke
@given(
    rounds=st.lists(st.tuples(st.lists(st.sampled_from(WORDS), max_size=5), st.sampled_from(["", *WORDS])), max_size=6)
)
def test_clean_text_is_rechecked_after_a_new_secret(rounds: list[tuple[list[str], str]]) -> None:
    """
    A redactor that remembers which texts were clean says the same as one that has seen nothing.
    """
    keys = KnownSecrets()
    records = RecordRedaction(Redactor({}, shapes=False, keys=keys))
    for texts, secret in rounds:
        event = ToolFinished(
            path="", seq=1, tool_name="add", tool_call_id="c1", result=ToolResult.text(" ".join(texts))
        )
        for value in (tuple(texts), event):
            assert RecordRedaction(Redactor({}, shapes=False, keys=keys)).redact(value) == records.redact(value)
        keys.add(secret, "TOLD")


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
"""Halves of characters too."""


@pytest.mark.parametrize("loads", [True, False])
@given(texts=st.lists(ANY_TEXT, max_size=5).map(tuple), text=ANY_TEXT, at=st.integers(0, 4))
def test_searching_many_texts_at_once_equals_searching_each(
    loads: bool, texts: tuple[str, ...], text: str, at: int
) -> None:
    inside = text[:3] + (texts[at % len(texts)] if texts else "") + text[3:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "WORTH_LOADING", 0 if loads else 10**9)
        patch.setattr(redaction, "MAX_TEXTS_AT_ONCE", 2)
        patch.setattr(redaction, "CORE", "pydantic_core" if loads else "a core that nobody has loaded")
        make_text_finder.cache_clear()

        for one in (text, inside):
            assert any(sought in one for sought in texts) is make_text_finder(texts)(one)
    make_text_finder.cache_clear()


def texts_in(value: object, name: str = "") -> list[str]:
    """
    Return the texts of a JSON value; what names a class is none.
    """
    if isinstance(value, dict):
        return [*value, *[text for key, member in value.items() for text in texts_in(member, key)]]
    if isinstance(value, list):
        return [text for member in value for text in texts_in(member)]
    return [value] if isinstance(value, str) and name != "type" else []


def outcome(clean: Callable[[object], object], value: object) -> object:
    """
    Return the cleaned value, or the class of the error where a word was replaced that a class insists on.
    """
    try:
        return clean(value)
    except StepEngineError as error:
        return type(error)


@pytest.mark.deep
@settings(max_examples=150)
@given(value=strategies.replies | strategies.user_messages | strategies.results | strategies.questions, data=st.data())
def test_redacting_a_value_equals_redacting_each_of_its_texts(value: object, data: st.DataObject) -> None:
    texts = sorted({text[at : at + 3] for text in texts_in(to_json(value)) for at in range(0, len(text), 3)})
    records = RecordRedaction(Redactor({data.draw(st.sampled_from(texts)): "K"}, shapes=data.draw(st.booleans())))

    assert outcome(records._redact_value, value) == outcome(records.redact, value)


def test_the_end_of_a_known_secret_alone_is_no_secret() -> None:
    redactor = Redactor({KEY: "K"}, shapes=False)

    assert KEY[-8:] == redactor.text(KEY[-8:])
    assert {} == redactor.find_secrets(KEY[1:])
    assert [] == redactor.find_spans(KEY[1:])
    assert (KEY[1:], KEY[-8:]) == RecordRedaction(redactor).redact((KEY[1:], KEY[-8:]))


def test_secret_index_finds_whole_masked_and_unfinished_values() -> None:
    index = SecretIndex(make_spellings(KEY, "A_KEY"), [KEY], ["/home/eve"])

    assert [(4, 4 + len(KEY), "A_KEY")] == index.find(f"key {KEY}")
    assert [(0, 7, "abridged")] == index.find("sk\u20261234")
    assert 4 == index.get_incomplete_value_start(f"key {KEY[:9]}")
    assert [True, True, False] == [index.may_hold(text) for text in (KEY, "/home/eve/x", "nothing")]


def test_text_redactor_redacts_texts_and_pieces_of_streams() -> None:
    redactor = TextRedactor({KEY: "A_KEY"}, shapes=False)

    assert "<redacted:A_KEY> and <redacted:abridged>" == redactor.text(f"{KEY} and sk...1234")
    assert b"\xff<redacted:A_KEY>" == redactor.redact_binary(b"\xff" + KEY.encode())
    assert [True, False, False] == [redactor.is_harmless_piece(piece) for piece in ("plain", KEY, KEY[:4])]
