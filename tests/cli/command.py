"""
Commands in process, as a user types them.
"""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from stepengine.cli.app import app


def typed(*words: object, **options: Any) -> Result:
    """
    Run a command; *options* are those of ``CliRunner.invoke``.
    """
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def command(*words: object, code: int = 0, **options: Any) -> Result:
    """
    Run a command, and check its exit code and that it shows no traceback.
    """
    result = typed(*words, **options)
    assert code == result.exit_code, (result.stdout, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result
