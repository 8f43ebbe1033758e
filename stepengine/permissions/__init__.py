"""
Permission rules for tool calls.

A ``Policy`` is a ``pre_tool`` hook. It checks the final form of a call, after validation of its input and correction of its
names, and returns allow, ask or deny with the rule that decided. A deny wins over everything. Otherwise the first matching rule
decides, by scope, priority and order; then the mode. An ask becomes a question to a person. It is an effect of the machine:
recorded, suspended and answered like any other. An approval holds for that one input, unless the person remembers it.

Rules err on the safe side, so allow and deny differ. An allow matches exactly the executed command, word for word. A deny matches its
program behind paths, wrappers and scripts. A command is a list of words, or a script (``commands``). No allow rule about commands
matches a script. A deny reads the commands of a script (``script_commands``). A predicate that fails denies.

This package contains ``Policy`` and ``Rule``, the explanation of a decision, and the file format of a policy. It also makes the
guards that withhold files and confine read-only commands.

It must not ask a person (that is an effect), run a tool, or apply a guard (the tools do that). A rule is no security boundary.

Start reading with ``rules``, then ``policy``, then ``commands`` for the difference between commands and scripts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.data.provenance import Provenance, Source, Trust
    from stepengine.permissions.policy import (
        Mode,
        Policy,
        PolicyDecision,
        PolicyFile,
        injection_rules,
        read_only_commands,
    )
    from stepengine.permissions.rules import (
        AfterUntrusted,
        Call,
        CallsWhere,
        Category,
        Command,
        Domain,
        EveryCall,
        Matcher,
        Path,
        Regex,
        Request,
        Rule,
        Scope,
        ToolNamed,
        Untrusted,
        Values,
    )
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.data.provenance": ("Provenance", "Source", "Trust"),
            "stepengine.permissions.policy": (
                "Mode",
                "Policy",
                "PolicyFile",
                "PolicyDecision",
                "injection_rules",
                "read_only_commands",
            ),
            "stepengine.permissions.rules": (
                "AfterUntrusted",
                "Call",
                "Category",
                "Command",
                "Domain",
                "EveryCall",
                "Matcher",
                "Path",
                "Regex",
                "Request",
                "Rule",
                "Scope",
                "ToolNamed",
                "Untrusted",
                "Values",
                "CallsWhere",
            ),
        },
    )

__all__ = (
    "AfterUntrusted",
    "Call",
    "CallsWhere",
    "Category",
    "Command",
    "Domain",
    "EveryCall",
    "Matcher",
    "Mode",
    "Path",
    "Policy",
    "PolicyDecision",
    "PolicyFile",
    "Provenance",
    "Regex",
    "Request",
    "Rule",
    "Scope",
    "Source",
    "ToolNamed",
    "Trust",
    "Untrusted",
    "Values",
    "injection_rules",
    "read_only_commands",
)
