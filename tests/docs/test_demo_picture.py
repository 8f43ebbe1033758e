"""
`docs/demo.svg` is a picture of what `stepengine demo` shows today.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from rich.ansi import AnsiDecoder

from tests.scripts import load_script

DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def script() -> ModuleType:
    return load_script(DOCS / "make_demo_picture.py")


@pytest.mark.deep
@pytest.mark.spec("requirements:P13")
def test_the_demo_picture_shows_the_current_demo_output() -> None:
    """
    Compared are the words, line by line: colours and shapes are the rendering library's.
    """
    drawn: dict[float, str] = {}
    texts = [part for part in ET.parse(DOCS / "demo.svg").iter(f"{SVG}text") if "clip-path" in part.attrib]
    for part in texts:
        drawn[float(part.attrib["y"])] = drawn.get(float(part.attrib["y"]), "") + (part.text or "")

    in_picture = [line for y in sorted(drawn) if (line := re.sub(r"\s", "", drawn[y]))]

    shown = words_of(script().run_demo())

    assert any("parenthesistoomany" in line for line in shown)
    assert shown == in_picture, "python docs/make_demo_picture.py"


def words_of(lines: list[str]) -> list[str]:
    """
    Return what a terminal shows, without colours, spaces and empty lines.
    """
    plain = ["$ stepengine demo", *[line.plain for line in AnsiDecoder().decode("\n".join(lines))]]
    return [line for each in plain if (line := re.sub(r"\s", "", each))]


def test_the_picture_loads_nothing_from_the_network() -> None:
    text = (DOCS / "demo.svg").read_text(encoding="utf-8")

    assert "@font-face" not in text
    assert not re.search(r"(?:href|src|url)\W{1,3}https?:", text)
