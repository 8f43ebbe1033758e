"""Turns the options of ``shell_tools`` into its tools, and refuses those that make no sense."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepengine.errors import DefinitionError
from stepengine.tools.files.root import Policy, Root
from stepengine.tools.shell.environment import Environment, check_names
from stepengine.tools.shell.running import Runner, Shell, limits_text
from stepengine.tools.shell.tools import command_tools

if TYPE_CHECKING:
    from stepengine.tools.definition import Tool

__all__ = ("tools_for",)


def tools_for(
    root: str | os.PathLike[str],
    *,
    allow_shell: bool,
    env: Sequence[str],
    timeout: float,
    max_timeout: float,
    runner: Runner | None,
    home: str,
    env_secrets: bool,
    allow_unlimited: bool,
    limits: Mapping[str, int],
    allow_wide_root: bool,
) -> list[Tool[..., Any]]:
    """Return the tools; see ``shell_tools``."""
    problem = ""
    if os.name != "posix" or not sys.executable:
        problem = "need a POSIX system and a Python program; there are no process groups to end commands with here"
    elif not (0 < timeout <= max_timeout and math.isfinite(max_timeout)):
        problem = (
            f"have timeout={timeout!r} and max_timeout={max_timeout!r}; seconds, the first at most the second, are fine"
        )
    elif home not in {"private", "real"}:
        problem = f"have home={home!r}; 'private' or 'real' would be fine"
    elif runner is not None and not callable(runner):
        problem = f"have runner={runner!r}; a function from a Launch to a Launch would be fine"
    if problem:
        msg = f"the shell tools {problem}"
        raise DefinitionError(msg)
    names = check_names(env, env_secrets=env_secrets)
    held = Root(root, Policy(allow_wide_root=allow_wide_root))
    shell = Shell(
        root=held,
        allow_shell=allow_shell,
        environment=Environment(names=names, real_home=home == "real", root=held.real),
        timeout=float(timeout),
        max_timeout=float(max_timeout),
        allow_unlimited=allow_unlimited,
        limits=limits_text(limits),
        runner=runner,
    )
    return command_tools(shell)
