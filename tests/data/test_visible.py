"""
Text of models, tools and files is shown as it is, and what would steer a screen or hide itself as an escape.
"""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.visible import HIDDEN, JOINERS, visible

ATTACKS = {
    "clear screen": "\x1b[2J\x1b[H",
    "conceal": "\x1b[8mhidden\x1b[0m",
    "8-bit CSI": "\x9b2J",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;ZWNobyBoaQ==\x07",
    "DCS": "\x1bP+q544e\x1b\\",
    "APC": "\x1b_Gdata\x1b\\",
    "PM": "\x1b^x\x1b\\",
    "SOS": "\x1bXx\x1b\\",
    "status query": "\x1b[6n\x1b[c\x05",
    "bell and backspace": "\x07pass\x08\x08\x08\x08",
    "lone CR": "harmless\rrm -rf",
    "VT and FF": "a\x0bb\x0cc",
    "DEL": "\x7f",
    "bidi override": "user\u202etxt.exe\u202c\u2066x\u2069",
    "zero width": "pass\u200bword\u2060\ufeff",
    "tags": "a\U000e0041\U000e007f",
    "line separators": "a\u2028b\u2029c",
    "lone surrogate": "\ud800",
}


@pytest.mark.spec("reliability:UI01", "reliability:UI02")
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize("strict", [False, True])
def test_terminal_control_sequences_are_escaped(attack: str, strict: bool) -> None:
    shown = visible(attack, strict=strict)

    assert "\\" in shown
    assert set() == {c for c in shown if unicodedata.category(c) in HIDDEN}


@pytest.mark.spec("reliability:UI01", "reliability:UI02")
@given(st.text(st.characters()), st.booleans())
def test_any_text_keeps_only_newlines_tabs_and_joiners_hidden(text: str, strict: bool) -> None:
    shown = visible(text, strict=strict)
    kept = {c for c in shown if unicodedata.category(c) in HIDDEN}

    assert kept <= (set() if strict else {"\n", "\t", *JOINERS})
    assert shown == shown.encode().decode()  # no surrogate is left that a stream could not write


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert text == visible(text, strict=True)


@pytest.mark.spec("reliability:UI01")
def test_escapes_show_the_original_code_points() -> None:
    assert r"\x1b[2J \x9b \u202e \U000e0041" == visible("\x1b[2J \x9b \u202e \U000e0041")
    assert r"a\nb\tc\r" == visible("a\nb\tc\r", strict=True)
    assert "a\nb\tc" == visible("a\r\nb\tc")


@pytest.mark.spec("reliability:UI02")
def test_floods_of_combining_marks_are_cut_at_eight() -> None:
    assert "e" + 8 * "\u0301" + "x" == visible("e" + 10_000 * "\u0301" + "x")


@pytest.mark.spec("reliability:UI02")
def test_emoji_survive_in_text_and_their_joiners_show_in_names() -> None:
    family = "\U0001f468\u200d\U0001f469\u2764\ufe0f"

    assert family == visible(family)
    assert "\\u200d" in visible(family, strict=True)
    assert "\\ufe0f" in visible(family, strict=True)
