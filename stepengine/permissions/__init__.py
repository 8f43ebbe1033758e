"""
Who may do what.

What lives here: `Policy` and `Rule`: allow, ask or deny for a tool call, the explanation of a decision, and a policy's file form.

What must not: asking a person (that is an effect), running a tool, confining one (that is the tool's own duty).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.permissions.policy import Mode, Policy, PolicyFile, Verdict, read_only_commands
    from stepengine.permissions.rules import (
        Call,
        Category,
        Command,
        Domain,
        Every,
        Matcher,
        Path,
        Regex,
        Request,
        Rule,
        Scope,
        ToolNamed,
        When,
    )
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "stepengine.permissions.policy": (
                "Mode",
                "Policy",
                "PolicyFile",
                "Verdict",
                "read_only_commands",
            ),
            "stepengine.permissions.rules": (
                "Call",
                "Category",
                "Command",
                "Domain",
                "Every",
                "Matcher",
                "Path",
                "Regex",
                "Request",
                "Rule",
                "Scope",
                "ToolNamed",
                "When",
            ),
        },
    )

__all__ = (
    "Call",
    "Category",
    "Command",
    "Domain",
    "Every",
    "Matcher",
    "Mode",
    "Path",
    "Policy",
    "PolicyFile",
    "Regex",
    "Request",
    "Rule",
    "Scope",
    "ToolNamed",
    "Verdict",
    "When",
    "read_only_commands",
)
