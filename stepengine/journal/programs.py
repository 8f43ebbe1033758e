"""
Programs in a record: a program is the input of its call, and each effect at the path of the call has the line that asked for it.

Journals that are older than these lines have none; a program is shown without its calls at their lines then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepengine.journal.history import History

INPUT = frozenset({"code", "restart"})


def find_program_text(form: Mapping[str, Any]) -> str | None:
    """
    Return the program that an effect runs, from its stored form; ``None`` for any other effect.

    Records do not mark tools that run programs. A tool counts as one if it yields and its input is only ``code`` and ``restart``.
    """
    given = form.get("input")
    if form.get("type") != "tool_call" or "yields" not in form or not isinstance(given, Mapping):
        return None
    code = given.get("code")
    return code if isinstance(code, str) and given.keys() <= INPUT else None


def has_programs(history: History) -> bool:
    """Return whether a run has called a program, as recognized by ``find_program_text``."""
    return any(
        intent.starts_child_or_body and find_program_text(history.form(intent)) is not None
        for intent in history.intents.values()
    )
