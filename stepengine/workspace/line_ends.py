"""Line ends of edited texts: an unchanged line keeps its own, a new one gets that of its neighbour. Pure: no I/O."""

from __future__ import annotations

import re

from stepengine.data.matching import BoundedMatcher

END = re.compile("\r?\n")


def to_lf(text: str) -> str:
    """Return *text* with LF instead of CRLF."""
    return text.replace("\r\n", "\n")


def apply_old_line_ends(old: str, new: str, default: str = "") -> str:
    """
    Return *new*, a changed version of *old*, with the line ends of *old*.

    Args:
        old: The text before the change; its lines may have different ends.
        new: The text after it; its own line ends are ignored.
        default: The line end if *old* has none; ``""`` leaves those of *new*.
    """
    ends = END.findall(old)
    if "\n" not in new or not (ends or default):
        return new
    lines = to_lf(new).split("\n")
    if len(set(ends)) <= 1:
        return (ends[0] if ends else default).join(lines)
    made: list[str] = []
    for tag, a, b, c, d in BoundedMatcher(to_lf(old).split("\n"), lines, autojunk=False).get_opcodes():
        for position in range(d - c):
            # Lines that were added end as the line before them, further ones of a longer stretch as its last.
            like = max(0, a - 1) if tag == "insert" else min(a + position, b - 1)
            made.append(ends[min(like, len(ends) - 1)])
    return "".join([line + end for line, end in zip(lines, [*made[:-1], ""], strict=True)])
