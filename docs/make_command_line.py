# ruff: noqa: INP001
"""Write ``docs/reference/command-line.md`` from what ``--help`` says: ``python docs/make_command_line.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

from stepengine.cli.app import app

TARGET = Path(__file__).parent / "reference" / "command-line.md"
HEAD = """\
# The command line

Made from `stepengine COMMAND --help` by `python docs/make_command_line.py`; do not edit it by hand.

## Exit codes

"""


def prose(text: str | None) -> Iterator[str]:
    """Give a help text as Markdown: lines that are indented stand in blocks."""
    inside = False
    for line in Text.from_markup(text or "").plain.splitlines():
        shown = line.startswith(" ")
        if shown != inside:
            yield "```text" if shown else "```"
            inside = shown
        yield line[2:] if shown else line
    if inside:
        yield "```"


def cell(text: str) -> str:
    """Return text that may stand in a table, with its marks taken for what they are."""
    plain = Text.from_markup(text).plain if "[/]" in text else text
    for mark in "|<>*":
        plain = plain.replace(mark, f"\\{mark}")
    return " ".join(plain.split())


def command_page(command: Any, name: str) -> Iterator[str]:
    """Give the section of one command."""
    context = command.context_class(command, info_name=name)
    yield from (f"### {name}", "", *prose(command.help), "", "```text")
    yield from (command.get_usage(context).removeprefix("Usage: "), "```", "")
    records = [record for each in command.params if (record := each.get_help_record(context))]
    if records:
        yield from ("| takes | |", "|---|---|")
        yield from [f"| `{takes.replace('|', chr(92) + '|')}` | {cell(says)} |" for takes, says in records]
        yield ""


def page() -> str:
    """Return the whole page."""
    root = typer.main.get_command(app)
    groups: dict[str, list[str]] = {}
    for name, command in root.commands.items():
        several = getattr(command, "commands", None)
        found = groups.setdefault(command.rich_help_panel, [])
        for words, one in {f"{name} {n}": c for n, c in several.items()}.items() if several else [(name, command)]:
            found += command_page(one, f"stepengine {words}")
    lines = [*prose(root.epilog), ""]
    for group, found in groups.items():
        lines += [f"## {group}", "", *found]
    return HEAD + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
