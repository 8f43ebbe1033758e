"""``stepengine config show``: every setting with its value and source."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import Config
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.settings import load_settings
from stepengine.engine.settings import get_setting_definition


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

    Precedence, highest first: options, environment variables, the project's file (stepengine.toml, or
    [tool.stepengine] in pyproject.toml), your own file (~/.config/stepengine/config.toml). The variable of a
    setting is STEPENGINE_ and its name in capitals, with `__` for the dot: STEPENGINE_LIMITS__MAX_STEPS=20.

    Examples:
      stepengine config show
      stepengine config show limits.max_steps

    In a stepengine.toml of the project, or in your own file:
      limits = {max_steps = 20, max_cost_usd = 1.5}
      aliases = {cheap = "openai/gpt-5-mini"}
    """
    settings = load_settings(file)
    names = [key] if key else settings.names
    rows = [(one, get_setting_definition(one), settings.get(one), settings.origin(one)) for one in names]
    if as_json:
        print(to_ascii_json({one: {"value": value, "source": o.source, "place": o.place} for one, _, value, o in rows}))
        return Exit.COMPLETED
    width = max(len(one) for one in names)
    for one, about, value, origin in rows:
        text = "-" if value is None else to_ascii_json(value)
        print_visible(
            f"{one.ljust(width)}  {text.ljust(24)}  {origin}   {about.help}".rstrip(), hanging_indent=width + 2
        )
    return Exit.COMPLETED
