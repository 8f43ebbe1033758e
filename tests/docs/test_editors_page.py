"""
`docs/editors.md` is so: its settings are JSON that names a command of ours.
"""

from __future__ import annotations

import json

from typer.testing import CliRunner

from stepengine.cli.app import app

from .pages import blocks_of, page

(SETTINGS,) = blocks_of(page("editors.md"))


def test_the_settings_name_a_command_with_options_that_it_has() -> None:
    server = json.loads(SETTINGS.text)["agent_servers"]["stepengine"]
    command, *arguments = server["args"]

    assert ("stepengine", "acp") == (server["command"], command)
    helped = CliRunner().invoke(app, [command, *arguments, "--help"])
    assert (0, True) == (helped.exit_code, "--model" in helped.output)
