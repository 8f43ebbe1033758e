# ruff: noqa: INP001
"""
Write ``docs/reference/command-line*.md`` from what ``--help`` says, and the settings: ``python docs/make_command_line.py``.

One page has what holds for all commands and lists them. The commands of one word have two pages, and each group has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

from stepengine.cli.app import app
from stepengine.engine.settings import KEYS, PREFIX, SettingDefinition

FOLDER = Path(__file__).parent / "reference"
NAME = "command-line"
HEAD = """\
# Command line: commands, exit codes, settings

Every command, the exit codes, and the settings with their environment variables. The options of a command stand on the page of its group.

Made from `stepengine COMMAND --help` by `python docs/make_command_line.py`; do not edit it by hand.

## Commands

"""
GROUP = """\
# Commands: {group}

The commands of this group with their options; [all commands](command-line.md), exit codes and settings stand on a page of their own.

Made from `stepengine COMMAND --help` by `python docs/make_command_line.py`; do not edit it by hand.
"""
SETTINGS = """\
## Settings

An option wins over a variable, a variable over the project's file (`stepengine.toml`, or `[tool.stepengine]` in `pyproject.toml`), the
project's over your own (`~/.config/stepengine/config.toml`). A project's file is foreign: what the last column does not allow is refused
by name, unless you pass the file with `--config`. `stepengine config show` shows what holds, and where it came from. Only commands read
settings by themselves; a program loads them with `Settings.load` of `stepengine.engine`, or gives an `Engine` its own options. In a variable a list has `:` between its members.

| setting | variable | value | default | what it does | in a project's file |
|---|---|---|---|---|---|
"""
VARIABLES = """\
## Environment variables

Each setting has its variable, in the table above. Further variables:

| variable | what it does |
|---|---|
| `STEPENGINE_STATE_DIR` | where runs are recorded; else `$XDG_STATE_HOME/stepengine`, else `~/.local/state/stepengine` |
| `STEPENGINE_DB` | the PostgreSQL database of `stepengine deploy` |
| `STEPENGINE_KEY_HOSTS` | hosts, with commas between them, that keys of the environment may go to beside those that they were made for |
| `NO_COLOR`, `CI` | no colours; nothing that is drawn again, and no test records |

"""
ONLY_IN_FILES = ("a table", '{ env = "NAME" }')
IN_PYTHON = {
    "demo": None,
    "init": "stepengine.engine.make_project",
    "run": "stepengine.Engine.run",
    "chat": None,
    "runs": "stepengine.journal.list_runs",
    "show": "stepengine.debugging.render_text",
    "studio": "stepengine.server.app",
    "resume": "stepengine.Engine.resume",
    "replay": "stepengine.Engine.replay",
    "fork": "stepengine.Engine.fork",
    "eval": "stepengine.evaluation.evaluate",
    "serve": "stepengine.server.app",
    "test": "stepengine.Engine.replay",
    "debug": "stepengine.debugging.debug",
    "ask": "stepengine.Engine.run",
    "undo": "stepengine.journal.undo",
    "send": "stepengine.journal.send_input",
    "cancel": "stepengine.journal.send_cancel",
    "acp": "stepengine.adapters.acp.serve",
    "journal check": "stepengine.journal.check",
    "journal repair": "stepengine.journal.repair",
    "journal scrub": "stepengine.journal.scrub",
    "journal export": "stepengine.durable.DurableEngine.export",
    "journal import": "stepengine.durable.DurableEngine.submit_journal",
    "compare diff": "stepengine.journal.diff",
    "compare impact": "stepengine.evaluation.impact",
    "compare blame": "stepengine.evaluation.blame",
    "compare pin": "stepengine.evaluation.pin",
    "compare improve": "stepengine.evaluation.improve",
    "compare price": "stepengine.evaluation.price",
    "agents list": "stepengine.engine.list_agents",
    "agents tools": "stepengine.tools.bundled.document_tools",
    "agents models": "stepengine.models.list_providers",
    "agents check": "stepengine.testing.check_package",
    "agents agree": "stepengine.engine.approve_package",
    "agents trust": "stepengine.engine.trust_folder",
    "config show": "stepengine.engine.Settings.load",
    "config doctor": "stepengine.testing.check_installation",
    "config policy": "stepengine.journal.check_recorded_calls",
    "mcp serve": "stepengine.adapters.mcp.AgentServer.serve_stdio",
    "mcp inspect": "stepengine.adapters.mcp.McpTools.listing",
    "cassette record": "stepengine.testing.record_program",
    "cassette replay": "stepengine.testing.replay_program",
    "deploy worker": "stepengine.durable.DurableEngine.open",
    "deploy submit": "stepengine.durable.Operator.submit",
    "deploy status": "stepengine.durable.DeploymentMaintenance.overview",
    "deploy release": "stepengine.durable.DurableEngine.move",
    "deploy takeover": "stepengine.durable.DeploymentMaintenance.takeover",
    "deploy retry": "stepengine.durable.Operator.retry",
    "deploy migrate": "stepengine.durable.migrate",
    "deploy gc": "stepengine.durable.DeploymentMaintenance.collect",
    "tokens add": "stepengine.server.Tokens.add",
    "tokens list": "stepengine.server.Tokens.list_tokens",
    "tokens revoke": "stepengine.server.Tokens.remove",
}
"""The public function or method that a command calls; ``None`` for programs of a terminal, and where there is none yet."""
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
    yield from (f"## {name}", "", *prose(command.help), "", "```text")
    yield from (command.get_usage(context).removeprefix("Usage: "), "```", "")
    records = [record for each in command.params if (record := each.get_help_record(context))]
    if records:
        yield from ("| takes | |", "|---|---|")
        yield from [f"| `{takes.replace('|', chr(92) + '|')}` | {cell(says)} |" for takes, says in records]
        yield ""


def setting(key: SettingDefinition) -> str:
    """Return the row of one setting."""
    name = PREFIX + key.name.upper().translate(str.maketrans({".": "__", "<": "", ">": ""}))
    variable = "" if key.kind in ONLY_IN_FILES else f"`{name}`"
    default = "" if key.default is None else f"`{json.dumps(key.default)}`"
    return f"| `{key.name}` | {variable} | {cell(key.kind)} | {default} | {cell(key.help)} | {PROJECT[key.project]} |"


def slug(group: str) -> str:
    """Return the name of the page of a group."""
    return f"{NAME}-{re.sub(r'[^a-z]+', '-', group.removeprefix('stepengine ').lower())}"


def listed(name: str, command: Any, page: str) -> str:
    """Return the row of one command in the list of all."""
    first, called = next(prose(command.help), ""), IN_PYTHON[name.removeprefix("stepengine ")]
    return f"| [`{name}`]({page}.md#{name.replace(' ', '-')}) | {cell(first)} | {f'`{called}`' if called else ''} |"


def pages() -> dict[str, str]:
    """Return the pages by their names: that of all commands, and one of each group."""
    root = typer.main.get_command(app)
    _, *codes = prose(root.epilog)
    groups: dict[str, dict[str, Any]] = {}
    for name, command in root.commands.items():
        several = getattr(command, "commands", None)
        found = (
            {f"stepengine {name} {n}": c for n, c in several.items()} if several else {f"stepengine {name}": command}
        )
        groups.setdefault(f"stepengine {name}" if several else command.rich_help_panel, {}).update(found)
    made = {}
    lines = []
    for group, commands in groups.items():
        of_group = [line for name, one in commands.items() for line in command_page(one, name)]
        made[slug(group)] = "\n".join([GROUP.format(group=group), *of_group]).rstrip() + "\n"
        lines += [f"**{group}**", "", "| command | what it does | in Python |", "|---|---|---|"]
        lines += [*[listed(name, one, slug(group)) for name, one in commands.items()], ""]
    lines += ["## Exit codes", "", *codes, "", SETTINGS + "\n".join(map(setting, KEYS)), "", VARIABLES.rstrip(), ""]
    lines += ["```{toctree}", ":hidden:", "", *made, "```"]
    return {NAME: HEAD + "\n".join(lines) + "\n", **made}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
