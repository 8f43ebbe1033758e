"""Tool-call blocks in text: only well-formed ones at the top level are calls (generator-contract G30)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.machine.blocks import BrokenBlock, CallBlock, TextPiece, split_blocks

GOOD = '<tool_call>{"name": "add", "input": {"a": 1}}</tool_call>'
ADD = CallBlock("add", {"a": 1})
CASES = {
    "nothing": ("", []),
    "blank": (" \n ", []),
    "text": (" hi ", [TextPiece("hi")]),
    "one": (GOOD, [ADD]),
    "blank around": (f"\n{GOOD}\n\n{GOOD}", [ADD, ADD]),
    "between": (f"a {GOOD} b", [TextPiece("a"), ADD, TextPiece("b")]),
    "codebuff": (
        '<codebuff_tool_call>\n{"cb_tool_name": "add", "a": 1, "cb_easp": true}\n</codebuff_tool_call>',
        [ADD],
    ),
    "no input": ('<tool_call>{"name": "add"}</tool_call>', [CallBlock("add", {})]),
    "not JSON": (
        "<tool_call>add()</tool_call>",
        [BrokenBlock("", "the block is not JSON: Expecting value: line 1 column 12 (char 11)")],
    ),
    "no object": ("<tool_call>[1]</tool_call>", [BrokenBlock("", "the block holds a list, not an object")]),
    "no name": ('<tool_call>{"input": {}}</tool_call>', [BrokenBlock("", "the block names no tool")]),
    "empty name": ('<tool_call>{"name": ""}</tool_call>', [BrokenBlock("", "the block names no tool")]),
    "wrong tag": (GOOD.replace("tool_call", "codebuff_tool_call"), [BrokenBlock("", "the block names no tool")]),
    "wrong input": (
        '<tool_call>{"name": "add", "input": [1]}</tool_call>',
        [BrokenBlock("add", "the input of 'add' is a list, not an object")],
    ),
    "no finite number": (
        '<tool_call>{"name": "add", "input": {"a": NaN}}</tool_call>',
        [BrokenBlock("add", "nan at $.a is not JSON: only finite numbers are")],
    ),
    "two objects": ("<tool_call>{} {}</tool_call>", [BrokenBlock("", "the block holds more than one JSON object")]),
    "unclosed": ('<tool_call>{"name": "add"}', [TextPiece('<tool_call>{"name": "add"}')]),
    "unclosed before a good one of the other kind": (
        f"<codebuff_tool_call> {GOOD}",
        [TextPiece("<codebuff_tool_call>"), ADD],
    ),
    "fenced": (f"```\n{GOOD}\n```", [TextPiece(f"```\n{GOOD}\n```")]),
    "fence never closed": (f"```python\n{GOOD}", [TextPiece(f"```python\n{GOOD}")]),
    "after a fence": (f"```x``` {GOOD}", [TextPiece("```x```"), ADD]),
    "nested in a string": (
        '<tool_call>{"name": "say", "input": {"text": "<tool_call>{}</tool_call> ```"}}</tool_call> end',
        [CallBlock("say", {"text": "<tool_call>{}</tool_call> ```"}), TextPiece("end")],
    ),
    "nested as text": (
        f"<tool_call> look: {GOOD} </tool_call>",
        [
            BrokenBlock("", "the block is not JSON: Expecting value: line 1 column 13 (char 12)"),
            TextPiece("</tool_call>"),
        ],
    ),
    "other tags": ("<tool>{}</tool> <tool_call/>", [TextPiece("<tool>{}</tool> <tool_call/>")]),
}


@pytest.mark.spec("generator-contract:G30")
@pytest.mark.parametrize(("text", "pieces"), CASES.values(), ids=CASES)
def test_only_well_formed_blocks_at_the_top_level_are_calls(text, pieces):
    assert split_blocks(text) == pieces


def test_a_block_nested_without_end_is_broken():
    body = '{"name": "add", "input": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    [piece] = split_blocks(f"<tool_call>{body}</tool_call>")
    assert isinstance(piece, BrokenBlock)


values = st.dictionaries(st.text(max_size=5), st.none() | st.integers(-9, 9) | st.text(max_size=20), max_size=3)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:G30")
@given(st.lists(st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), values)))
def test_written_call_blocks_are_parsed_back(calls):
    text = " and ".join([f"<tool_call>{json.dumps({'name': n, 'input': v})}</tool_call>" for n, v in calls])
    assert [p for p in split_blocks(text) if not isinstance(p, TextPiece)] == [CallBlock(n, v) for n, v in calls]


@given(st.lists(st.sampled_from(["```", "<tool_call>", "</tool_call>", "{}", '{"name":"a"}', "x", "\n"]), max_size=12))
def test_splitter_accepts_any_text_and_ignores_fenced_blocks(words):
    text = "".join(words)
    pieces = split_blocks(f"```{text.replace('```', '')}")
    assert all(isinstance(p, TextPiece) for p in pieces)
    split_blocks(text)


class SearchedText(str):
    """A text that notes in how many characters something was looked for."""

    __slots__ = ("searched",)

    def find(self, sub, start=0):
        self.searched.append(len(self) - start)
        return super().find(sub, start)


def test_many_open_blocks_are_split_in_linear_time():
    text = SearchedText("<tool_call>" * 200_000)
    text.searched = []
    assert split_blocks(text) == [TextPiece(text)]
    assert 0 < sum(text.searched) <= len(text)
