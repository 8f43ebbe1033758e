"""The options of ``stepengine run`` and its relatives, and the problem of options that cannot be used."""

from __future__ import annotations

from pathlib import Path

import attrs

__all__ = ("Options", "UsageProblem")


class UsageProblem(Exception):
    """What the user asked for cannot be done; the message says what would have been fine."""


@attrs.frozen(kw_only=True)
class Options:
    """The options of ``stepengine run`` as they were typed."""

    agent: str
    prompt: str = ""
    params: str = ""
    model: str = ""
    base_url: str = ""
    cwd: Path = Path()
    write: bool = False
    shell: bool = False
    web: str = ""
    as_json: bool = False
    max_steps: int = 0
    quiet: bool = False
    verbose: bool = False
    journal: str = ""
