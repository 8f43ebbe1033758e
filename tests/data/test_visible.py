"""
Text of models, tools and files is shown as it is, and what would steer a screen or hide itself as an escape.
"""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.visible import HIDDEN, JOINERS, cut_end, visible


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:UI01")
def test_every_hidden_code_point_is_escaped() -> None:
    """Terminal sequences, text that turns around, tags, zero widths: each starts with one of these."""
    hidden = {c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in HIDDEN}
    for strict, kept in ((False, {"\n", "\t", *JOINERS}), (True, set())):
        shown = visible("a".join(hidden), strict=strict)

        assert {*shown} & hidden <= kept
        assert shown.count("\\") == len(hidden - kept)
        assert shown == shown.encode().decode()  # no surrogate is left that a stream could not write


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert text == visible(text, strict=True)


@pytest.mark.spec("reliability:UI01")
def test_escapes_show_the_original_code_points() -> None:
    assert r"\x1b[2J \x9b \u202e \U000e0041" == visible("\x1b[2J \x9b \u202e \U000e0041")
    assert r"a\nb\tc\r" == visible("a\nb\tc\r", strict=True)
    assert "a\nb\tc" == visible("a\r\nb\tc")


@pytest.mark.spec("reliability:UI01")
def test_floods_of_combining_marks_are_cut_at_eight() -> None:
    assert "e" + 8 * "\u0301" + "x" == visible("e" + 10_000 * "\u0301" + "x")


@pytest.mark.spec("reliability:UI01")
def test_emoji_survive_in_text_and_their_joiners_show_in_names() -> None:
    family = "\U0001f468\u200d\U0001f469\u2764\ufe0f"

    assert family == visible(family)
    assert "\\u200d" in visible(family, strict=True)
    assert "\\ufe0f" in visible(family, strict=True)


@given(st.text(), st.integers(0, 60), st.integers(0, 10**6))
def test_cut_text_is_within_its_limit(text: str, limit: int, total: int) -> None:
    cut = cut_end(text, limit, total)

    assert len(cut) <= limit
    assert (text == cut) == (max(len(text), total) <= limit)
