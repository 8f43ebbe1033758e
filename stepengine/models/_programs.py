"""
Programs that a model writes and its provider runs: which tools of the agent they may call. Pure: no SDK, no clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from stepengine.data.models import ModelRequest, ModelSettings
from stepengine.data.server_tools import Programs
from stepengine.data.tools import ToolSpec
from stepengine.models._settings import no_tool

__all__ = ("RUNS_NEWER_CODE", "called_by", "check_programs", "programs_of", "runs_programs")

RUNS_NEWER_CODE = re.compile(r"claude-(?:opus|sonnet|haiku)-4-[5-9]|claude-[a-z]+-[5-9]")
"""Models of Claude whose programs call tools, whatever a cloud has put before their names."""
OPENAI = re.compile(r"gpt-(?:5\.(?:[6-9]|[1-9]\d)|[6-9])(?!.*-chat)")


def runs_programs(model: str) -> bool:
    """Return whether the provider of ``provider/model`` runs programs of that model, as far as the name tells."""
    provider, _, name = model.partition("/")
    if provider in {"anthropic", "foundry"}:
        return RUNS_NEWER_CODE.search(name) is not None
    return provider == "openai" and OPENAI.match(name) is not None


def programs_of(settings: ModelSettings) -> Programs | None:
    """Return what *settings* say of programs; of several the tools of all."""
    found = [tool for tool in settings.server_tools if isinstance(tool, Programs)]
    if len(found) < 2:  # noqa: PLR2004 - more than one
        return found[0] if found else None
    return Programs(_all(one.tools for one in found), direct=_all(one.direct for one in found))


def _all(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([name for some in names for name in some]))


def called_by(programs: Programs | None, spec: ToolSpec, word: str) -> dict[str, list[str]]:
    """Return the member that says who may call a tool, where it is not the model alone; *word* is the program's."""
    if programs is None or spec.name not in programs.tools:
        return {}
    return {"allowed_callers": ["direct", word] if spec.name in programs.direct else [word]}


def check_programs(request: ModelRequest, programs: Programs, model: str, provider: str) -> None:
    """
    Check that programs have something to call.

    Raises:
        ModelError: when none of their tools is offered.
    """
    offered = [tool.name for tool in request.tools]
    if not set(offered).intersection(programs.tools):
        why = f"none of {', '.join(map(repr, programs.tools))} is offered, only {', '.join(map(repr, offered)) or 'nothing'}"
        raise no_tool(programs, model, provider, why)
