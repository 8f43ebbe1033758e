# ruff: noqa: INP001
"""Write ``docs/reference/command-line.md`` from what ``--help`` says, and the settings: ``python docs/make_command_line.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

from stepengine.cli.app import app
from stepengine.cli.settings import KEYS, OLD, PREFIX, Key

TARGET = Path(__file__).parent / "reference" / "command-line.md"
HEAD = """\
# The command line

Every command with its options, the exit codes, and the settings with their variables.

Made from `stepengine COMMAND --help` by `python docs/make_command_line.py`; do not edit it by hand.

## Exit codes

"""
SETTINGS = """\
## Settings

An option wins over a variable, a variable over the project's file (`stepengine.toml`, or `[tool.stepengine]` in `pyproject.toml`), the
project's over your own (`~/.config/stepengine/config.toml`). A project's file is foreign: what the last column does not allow is refused
by name, unless you pass the file with `--config`. `stepengine config` shows what holds, and where it came from. Only commands read
settings; a program gives an `Engine` its options. In a variable a list has `:` between its members.

| setting | variable | value | default | what it does | in a project's file |
|---|---|---|---|---|---|
"""
VARIABLES = """\
Further variables:

| variable | what it does |
|---|---|
| `STEPENGINE_STATE_DIR` | where runs are recorded; else `$XDG_STATE_HOME/stepengine`, else `~/.local/state/stepengine` |
| `STEPENGINE_DB` | the PostgreSQL database of the commands under Deploy |
| `STEPENGINE_KEY_HOSTS` | hosts, with commas between them, that keys of the environment may go to beside those that they were made for |
| `STEPENGINE_RECORD` | as `--stepengine-record` of pytest |
| `NO_COLOR`, `CI` | no colours; nothing that is drawn again, and no test records |

"""
ONLY_IN_FILES = ("a table", '{ env = "NAME" }')
PROJECT = {"yes": "yes", "lower": "only lower", "no": "no"}


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


def setting(key: Key) -> str:
    """Return the row of one setting."""
    name = PREFIX + key.name.upper().translate(str.maketrans({".": "__", "<": "", ">": ""}))
    variables = [name, *(old for old, new in OLD.items() if new == key.name)]
    variable = "" if key.kind in ONLY_IN_FILES else ", ".join([f"`{each}`" for each in variables])
    default = "" if key.default is None else f"`{json.dumps(key.default)}`"
    return f"| `{key.name}` | {variable} | {cell(key.kind)} | {default} | {cell(key.help)} | {PROJECT[key.project]} |"


def page() -> str:
    """Return the whole page."""
    root = typer.main.get_command(app)
    _, *codes = prose(root.epilog)
    groups: dict[str, list[str]] = {}
    for name, command in root.commands.items():
        several = getattr(command, "commands", None)
        found = groups.setdefault(command.rich_help_panel, [])
        for words, one in {f"{name} {n}": c for n, c in several.items()}.items() if several else [(name, command)]:
            found += command_page(one, f"stepengine {words}")
    lines = [*codes, "", SETTINGS + "\n".join(map(setting, KEYS)), "", VARIABLES.rstrip(), ""]
    for group, found in groups.items():
        lines += [f"## {group}", "", *found]
    return HEAD + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
