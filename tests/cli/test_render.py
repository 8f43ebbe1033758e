"""
What comes from models, tools and files cannot steer the terminal or hide itself.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from stepengine.cli.app import app
from stepengine.cli.screen.render import format_value, one_line, to_ascii_json, truncate_text, wrap_lines

LINES = st.text(alphabet="ab \u6f22\U0001f600-", max_size=200)


class Screen(io.StringIO):
    """
    A terminal.
    """

    def isatty(self) -> bool:
        return True


def test_a_line_is_one_line_of_bounded_length() -> None:
    assert "a b c" == one_line(" a\n b\r\n\tc ")
    assert 40 == len(one_line("x" * 10_000, 40))
    assert "abc" == truncate_text("abc", 3)
    assert "..." == truncate_text("abcd", 3)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:UI01", "ecosystem:EC141")
@given(
    st.recursive(
        st.none() | st.booleans() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c), max_leaves=5
    )
)
def test_json_on_stdout_is_ascii_without_controls_and_reads_back(value: object) -> None:
    written = to_ascii_json(value)

    assert value == json.loads(written)
    assert all(c == "\n" or (c.isascii() and c.isprintable()) for c in written)


@settings(max_examples=100)
@given(LINES, st.integers(4, 80), st.integers(0, 10))
def test_a_line_breaks_at_words_fits_and_keeps_its_indentation(line: str, width: int, hang: int) -> None:
    """
    Nothing of it is lost, and a word is cut only where it is longer than a whole line.
    """
    lines = wrap_lines(line, width, hang).split("\n")
    lead = len(line) - len(line.lstrip(" "))
    margin = min(lead + hang, width // 2)

    assert line.replace(" ", "") == "".join(lines).replace(" ", "")
    assert all(cell_len(part) <= width for part in lines)
    if cell_len(line) <= width:
        assert [line] == lines
    assert all(part.startswith(" " * margin) and part[margin:] for part in lines[1:])
    if all(cell_len(word) <= width - max(margin, lead) for word in line.split()):
        assert line.split() == [word for part in lines for word in part.split()]


VALUE = {
    "name": "shop",
    "notes": "first\nsecond",
    "files": [{"path": "a.py", "size": 3}, "b.py", []],
    "none": None,
    "empty": {},
    "deep": {"yes": True, "odd\x1b[2J": "\x9b"},
}
TEXT = """\
name: shop
notes:
  first
  second
files:
  - path: a.py
    size: 3
  - b.py
  - []
none: null
empty: {}
deep:
  yes: true
  odd\\x1b[2J: \\x9b"""


@pytest.mark.spec("reliability:UI01")
def test_values_are_formatted_as_lines_without_quotes() -> None:
    assert TEXT == format_value(VALUE)


AGENT = f"""
from stepengine import AgentDefinition

def handle_steps(ctx):
    return {VALUE!r}
    yield

agent = AgentDefinition("valued", handle_steps=handle_steps)
"""


@pytest.mark.spec("ecosystem:EC141")
def test_result_is_text_at_a_terminal_and_json_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("valued.py").write_text(AGENT)
    said: list[str] = []
    for stream in (io.StringIO(), Screen()):
        monkeypatch.setattr(sys, "stdout", stream)
        app(["run", "./valued.py", "-q"], standalone_mode=False)
        said.append(stream.getvalue())
    monkeypatch.undo()

    assert VALUE == json.loads(said[0])
    assert f"{TEXT}\n" == said[1]


@pytest.mark.spec("requirements:O7")
def test_show_wraps_at_a_terminal_and_not_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 80
    monkeypatch.setenv("COLUMNS", str(width))
    journal = Path(__file__).parents[2] / "cassettes" / "agents" / "base2-fast.jsonl"
    pages: list[list[str]] = []
    for stream in (io.StringIO(), Screen()):
        monkeypatch.setattr(sys, "stdout", stream)
        app(["show", str(journal)], standalone_mode=False)
        pages.append(stream.getvalue().splitlines())
    monkeypatch.undo()
    whole, shown = pages

    assert max(map(cell_len, shown)) <= width < max(map(cell_len, whole))
    assert "".join("".join(whole).split()) == "".join("".join(shown).split())
    assert {line for line in whole if cell_len(line) <= width} <= set(shown)
