"""
Support for ``Programs``, which a model writes and its provider runs, and which may call tools. Pure: no SDK, no clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from stepengine.data.models import ModelRequest, ModelSettings
from stepengine.data.server_tools import Programs
from stepengine.data.tools import ToolSpec
from stepengine.models._settings import make_unsupported_tool_error

RUNS_NEWER_CODE = re.compile(r"claude-(?:opus|sonnet|haiku)-4-[5-9]|claude-[a-z]+-[5-9]")
"""Claude models with programs that can call tools; a cloud may put a prefix before the name."""
OPENAI = re.compile(r"gpt-(?:5\.(?:[6-9]|[1-9]\d)|[6-9])(?!.*-chat)")


def supports_programs(model: str) -> bool:
    """Return whether the name ``provider/model`` is known to support ``Programs``."""
    provider, _, name = model.partition("/")
    if provider in {"anthropic", "foundry"}:
        return RUNS_NEWER_CODE.search(name) is not None
    return provider == "openai" and OPENAI.match(name) is not None


def merge_programs(settings: ModelSettings) -> Programs | None:
    """Return the ``Programs`` in *settings*, merged if there are several; ``None`` if there are none."""
    found = [tool for tool in settings.server_tools if isinstance(tool, Programs)]
    if len(found) < 2:  # noqa: PLR2004 - more than one
        return found[0] if found else None
    return Programs(
        _join_unique_names(one.tools for one in found), direct=_join_unique_names(one.direct for one in found)
    )


def _join_unique_names(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([name for some in names for name in some]))


def make_allowed_callers_member(programs: Programs | None, spec: ToolSpec, program_caller: str) -> dict[str, list[str]]:
    """Return the ``allowed_callers`` member for a tool of *programs*, ``{}`` for others; *program_caller* names a program as caller."""
    if programs is None or spec.name not in programs.tools:
        return {}
    return {"allowed_callers": ["direct", program_caller] if spec.name in programs.direct else [program_caller]}


def require_program_tool_offered(request: ModelRequest, programs: Programs, model: str, provider: str) -> None:
    """
    Raise ``ModelError`` if *request* offers none of the tools that *programs* may call.

    Raises:
        ModelError: if it offers none.
    """
    offered = [tool.name for tool in request.tools]
    if not set(offered).intersection(programs.tools):
        why = f"none of {', '.join(map(repr, programs.tools))} is among the agent's tools: {', '.join(map(repr, offered)) or '(none)'}"
        raise make_unsupported_tool_error(programs, model, provider, why)
