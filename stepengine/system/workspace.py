"""``Workspace``: the folder that the agents of an engine work in."""

from __future__ import annotations

import contextvars
from pathlib import Path

import attrs

__all__ = ("WORKSPACE", "Workspace")


@attrs.frozen
class Workspace:
    """
    Where the agent works.

    Attributes:
        root: The root folder.
        cwd: The working directory; the root itself by default.
    """

    root: Path = attrs.field(converter=Path)
    cwd: Path = attrs.field(default=attrs.Factory(lambda self: self.root, takes_self=True), converter=Path)


WORKSPACE: contextvars.ContextVar[Workspace | None] = contextvars.ContextVar("stepengine_workspace", default=None)
"""Where the agents of the engine work, for the function of a ``Perform``, which is given no context."""
