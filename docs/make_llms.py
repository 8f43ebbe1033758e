# ruff: noqa: INP001
"""Write ``docs/llms.txt``, the list of pages for programs that read, from the toctrees: ``python docs/make_llms.py``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE / "llms.txt"
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CAPTION = re.compile(r"^:caption: (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def sections() -> Iterator[tuple[str, list[str]]]:
    """Give the caption and the pages of every toctree of the index, those of pages below it included."""
    for tree in TOCTREE.findall((HERE / "index.md").read_text(encoding="utf-8")):
        (caption,) = CAPTION.findall(tree)
        yield caption, [page for entry in entries(tree) for page in below(entry)]


def entries(tree: str) -> list[str]:
    """Return the pages that a toctree names."""
    return [line for line in tree.splitlines() if line and not line.startswith(":")]


def below(page: str) -> Iterator[str]:
    """Give a page and those that its own toctrees name."""
    yield page
    for tree in TOCTREE.findall((HERE / f"{page}.md").read_text(encoding="utf-8")):
        for entry in entries(tree):
            yield from below(str(Path(page).parent / entry))


def told(page: str) -> tuple[str, str]:
    """Return the title of a page, and the first sentence below it."""
    text = FENCED.sub("", (HERE / f"{page}.md").read_text(encoding="utf-8"))
    title, _, rest = text.partition("\n")
    paragraphs = [" ".join(part.split()) for part in rest.split("\n\n")]
    plain = [part for part in paragraphs if re.match(r"[A-Z`*]", part) and not part.startswith("Made ")]
    sentence = re.split(r"(?<=[.:])\s", plain[0])[0].rstrip(":.") if plain else ""
    return title.removeprefix("# "), re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", sentence)


def listing() -> str:
    """Return the whole list."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"# {project['name']}", "", f"> {project['description']}", ""]
    for caption, pages in sections():
        lines += [f"## {caption}", ""]
        for page in pages:
            title, sentence = told(page)
            lines.append(f"- [{title}]({page}.md){f': {sentence}' if sentence else ''}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(listing(), encoding="utf-8")
