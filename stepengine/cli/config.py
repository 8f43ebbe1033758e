"""``stepengine config``: every setting, its value and where it came from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, leave
from stepengine.cli.options import Config
from stepengine.cli.render import dumps, visible
from stepengine.cli.settings import KEYS, Settings, UsageProblem, in_force, key_of

__all__ = (
    "config",
    "config_command",
)


def config(
    key: Annotated[str, typer.Argument(help="One setting, such as limits.max_steps; default: all.")] = "",
    *,
    file: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Show every setting, its value and where it came from.

    An option wins over a variable, a variable over the project's file (stepengine.toml, or [tool.stepengine] in
    pyproject.toml), the project's over your own (~/.config/stepengine/config.toml). A variable is STEPENGINE_ and the
    setting in capitals, `__` for the dot: STEPENGINE_LIMITS__MAX_STEPS=20.
    """
    leave(config_command(key, config=file, as_json=as_json))


def config_command(name: str = "", *, config: Path | None = None, as_json: bool = False) -> Exit:
    """Show every setting, its value and where it came from."""
    try:
        settings = in_force(config)
        names = [name] if name else _names(settings)
        for one in names:
            key_of(one)
    except UsageProblem as problem:
        print(f"stepengine: {visible(str(problem))}", file=sys.stderr)
        return Exit.USAGE
    rows = [(one, settings.get(one), settings.origin(one)) for one in names]
    if as_json:
        shown = {one: {"value": value, "source": origin.source, "place": origin.place} for one, value, origin in rows}
        print(dumps(shown))
        return Exit.COMPLETED
    width = max(len(one) for one in names)
    for one, value, origin in rows:
        text = "-" if value is None else dumps(value)
        print(visible(f"{one.ljust(width)}  {text.ljust(24)}  {origin}   {key_of(one).help}".rstrip()))
    return Exit.COMPLETED


def _names(settings: Settings) -> list[str]:
    """Return the names of all settings in the order of ``KEYS``; those whose names the user chose as they are set."""
    names: list[str] = []
    for key in KEYS:
        names += sorted(n for n in settings.values if key.matches(n)) if "<" in key.name else [key.name]
    return names
