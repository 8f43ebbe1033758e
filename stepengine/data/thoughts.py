"""
Separating the thoughts in a reply's text from the text for the reader.

Some servers never use thinking parts: their models write thoughts into the text, between tags. The record keeps the text;
code that shows or returns a model's text calls ``split_thoughts``, so that no other code depends on tags.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

TAGS = ("think", "thinking", "thought", "reasoning")
OPENING = tuple([f"<{tag}>" for tag in TAGS])
CLOSING = tuple([f"</{tag}>" for tag in TAGS])
BLANKS = " \t"
FENCES = ("```", "~~~")


class SplitText(NamedTuple):
    """The two parts of a text: its non-blank thoughts in order, and the text for the reader."""

    thoughts: tuple[str, ...]
    said: str


def split_thoughts(text: str) -> SplitText:
    """
    Split a text into thoughts and the text for the reader.

    Thoughts start with an opening tag at the start of the reply, ignoring blanks. They end with their closing tag or at the
    end of the text. Some servers omit the opening tag. Then the thoughts end with the first closing tag without an opening
    one, if it is alone on a line or directly before a line break, and not in code.
    """
    if "<" not in text:
        return SplitText((), text)
    if "</" not in text and not text.lstrip().startswith(OPENING):
        return SplitText((), text)
    thoughts: list[str] = []
    at = _collect_leading_thoughts(text, thoughts)
    closing = _find_unopened_closing_tag(text, at)
    if closing is not None:
        thoughts.append(text[at : closing[0]])
        at = closing[1]
    elif not thoughts:
        return SplitText((), text)
    return SplitText(tuple([t.strip() for t in thoughts if t.strip()]), text[at:].strip())


def _collect_leading_thoughts(text: str, thoughts: list[str]) -> int:
    """Append the thoughts at the start of *text* to *thoughts*; return the position after them."""
    at = 0
    while True:
        begin = _skip_blank(text, at)
        tag = next((t for t in OPENING if text.startswith(t, begin)), None)
        if tag is None:
            return at
        begin += len(tag)
        closing = f"</{tag[1:]}"
        end = text.find(closing, begin)
        if end < 0:
            if thoughts:
                return at  # an answer may start with the name of a tag
            thoughts.append(text[begin:])
            return len(text)
        thoughts.append(text[begin:end])
        at = end + len(closing)


def _skip_blank(text: str, at: int) -> int:
    """Return the position of the first character from *at* on that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _find_unopened_closing_tag(text: str, at: int) -> tuple[int, int] | None:
    """Return start and end of the closing tag of thoughts that have no opening tag."""
    if not any(text.find(tag, at) >= 0 for tag in CLOSING):
        return None
    code = _find_code_ranges(text, at)
    starts = [begin for begin, _ in code]
    opened = dict.fromkeys(TAGS, 0)
    for begin, tag in _find_tags(text, at):
        inside = bisect_right(starts, begin) - 1
        if inside >= 0 and begin < code[inside][1]:
            continue
        name, end = tag.strip("</>"), begin + len(tag)
        if tag in OPENING:
            opened[name] += 1
        elif opened[name]:
            opened[name] -= 1
        elif _is_at_line_end(text, begin, end):
            return begin, end
    return None


def _find_tags(text: str, at: int) -> Iterator[tuple[int, str]]:
    """Yield position and text of each opening or closing tag of thoughts from *at* on."""
    while (at := text.find("<", at)) >= 0:
        if text.startswith((*OPENING, *CLOSING), at):
            yield at, text[at : text.index(">", at) + 1]
        at += 1


def _is_at_line_end(text: str, begin: int, end: int) -> bool:
    """Return whether a tag is directly before a line break or on a line of its own."""
    if text.startswith(("\n", "\r\n"), end):
        return True
    while begin > 0 and text[begin - 1] in BLANKS:
        begin -= 1
    while end < len(text) and text[end] in BLANKS:
        end += 1
    return (begin == 0 or text[begin - 1] == "\n") and (end == len(text) or text.startswith(("\n", "\r\n"), end))


def _find_code_ranges(text: str, at: int) -> list[tuple[int, int]]:
    """Return the ranges of code: fenced blocks, which may stay open, and inline code in backticks."""
    found: list[tuple[int, int]] = []
    # Code in backticks ends at an empty line, as in Markdown: one stray backtick would else pair with another one pages
    # later, and a tag between them would be no tag.
    fence, fenced, paragraph = "", at, at
    for begin, line in _split_lines(text, at):
        bare = line.strip()
        mark = _find_fence_mark(bare)
        if fence:
            if mark.startswith(fence) and mark == bare:
                found.append((fenced, begin + len(line)))
                fence, paragraph = "", begin + len(line)
        elif mark:
            found += _find_inline_code_ranges(text, paragraph, begin)
            fence, fenced = mark, begin
        elif not bare:
            found += _find_inline_code_ranges(text, paragraph, begin)
            paragraph = begin
    found += [(fenced, len(text))] if fence else _find_inline_code_ranges(text, paragraph, len(text))
    return found


def _split_lines(text: str, at: int) -> Iterator[tuple[int, str]]:
    """Yield position and text of each line from *at* on, with its line break."""
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end + 1
        yield at, text[at:end]
        at = end


def _find_fence_mark(line: str) -> str:
    """Return the fence of backticks or tildes at the start of a line, or ``""``."""
    return line[: len(line) - len(line.lstrip(line[0]))] if line.startswith(FENCES) else ""


def _find_inline_code_ranges(text: str, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges between equally long runs of backticks; a run without a partner is text."""
    runs: list[tuple[int, int]] = []
    at = text.find("`", begin, end)
    while at >= 0:
        after = at
        while after < end and text[after] == "`":
            after += 1
        runs.append((at, after))
        at = text.find("`", after, end)
    partner: dict[int, int] = {}
    following: dict[int, int] = {}
    for index in range(len(runs) - 1, -1, -1):
        length = runs[index][1] - runs[index][0]
        if length in following:
            partner[index] = following[length]
        following[length] = index
    found: list[tuple[int, int]] = []
    index = 0
    while index < len(runs):
        last = partner.get(index)
        if last is not None:
            found.append((runs[index][0], runs[last][1]))
        index = index + 1 if last is None else last + 1
    return found
