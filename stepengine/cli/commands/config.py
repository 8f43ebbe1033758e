"""``stepengine config show``: every setting, its value and where it came from."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import Config
from stepengine.cli.screen.render import dumps, say
from stepengine.cli.settings import KEYS, Settings, in_force, key_of

__all__ = ("config",)


def config(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="One setting, such as limits.max_steps; default: all.")
    ] = "",
    *,
    file: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    """
    Show every setting, its value and where it came from.

    An option wins over a variable, a variable over the project's file (stepengine.toml, or [tool.stepengine] in
    pyproject.toml), the project's over your own (~/.config/stepengine/config.toml). A variable is STEPENGINE_ and the
    setting in capitals, `__` for the dot: STEPENGINE_LIMITS__MAX_STEPS=20.

    Examples:
      stepengine config show
      stepengine config show limits.max_steps

    In a stepengine.toml of the project, or in your own file:
      limits = {max_steps = 20, max_cost_usd = 1.5}
      aliases = {cheap = "openai/gpt-5-mini"}
    """
    settings = in_force(file)
    names = [key] if key else _names(settings)
    rows = [(one, key_of(one), settings.get(one), settings.origin(one)) for one in names]
    if as_json:
        print(dumps({one: {"value": value, "source": o.source, "place": o.place} for one, _, value, o in rows}))
        return Exit.COMPLETED
    width = max(len(one) for one in names)
    for one, about, value, origin in rows:
        text = "-" if value is None else dumps(value)
        say(f"{one.ljust(width)}  {text.ljust(24)}  {origin}   {about.help}".rstrip(), hang=width + 2)
    return Exit.COMPLETED


def _names(settings: Settings) -> list[str]:
    """Return the names of all settings in the order of ``KEYS``; those whose names the user chose as they are set."""
    names: list[str] = []
    for key in KEYS:
        names += sorted(n for n in settings.values if key.matches(n)) if "<" in key.name else [key.name]
    return names
