"""
`docs/editors.md` is so: its settings are JSON that names a command of ours, its program is one.
"""

from __future__ import annotations

import json

from typer.testing import CliRunner

from stepengine.cli.app import app

from .pages import blocks_of, execute, page

NAME = "editors.md"
SETTINGS, PROGRAM, CHOICES = blocks_of(page(NAME))


def test_the_settings_name_a_command_with_options_that_it_has() -> None:
    server = json.loads(SETTINGS.text)["agent_servers"]["stepengine"]
    command, *arguments = server["args"]

    assert ("stepengine", "acp") == (server["command"], command)
    helped = CliRunner().invoke(app, [command, *arguments, "--help"])
    assert (0, True) == (helped.exit_code, "--model" in helped.output)


def test_the_program_of_the_page_runs() -> None:
    assert "python" == PROGRAM.kind
    execute(PROGRAM, NAME)


def test_what_makes_an_engine_is_given_what_was_chosen() -> None:
    names: dict[str, object] = {"__name__": "page"}
    execute(PROGRAM, NAME, names)
    execute(CHOICES, NAME, names)
