"""
What comes from models, tools and files cannot steer the terminal or hide itself.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.cli.render import cut, dumps, one_line


def test_a_line_is_one_line_of_bounded_length() -> None:
    assert "a b c" == one_line(" a\n b\r\n\tc ")
    assert 40 == len(one_line("x" * 10_000, 40))
    assert "abc" == cut("abc", 3)
    assert "..." == cut("abcd", 3)


@pytest.mark.spec("reliability:UI01", "ecosystem:EC141")
@given(st.recursive(st.none() | st.booleans() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_json_on_stdout_is_ascii_without_controls_and_reads_back(value: object) -> None:
    written = dumps(value)

    assert value == json.loads(written)
    assert all(c == "\n" or (c.isascii() and c.isprintable()) for c in written)
