"""
Who may do what.

A ``Policy`` is a ``pre_tool`` hook. It looks at a call as it would run (its input validated, its names mended) and says allow, ask or
deny, and by which rule. A deny wins over everything; then the first matching rule decides, by scope, priority and order; then the
mode. What is to be asked becomes a question to a person, which is an effect of the machine's and is recorded, suspended and answered
like any other. An approval holds for that one input.

Rules err to the safe side in both directions, and that makes them different: an allow matches just what is executed, word for word, and
a deny finds its program behind paths, wrappers and scripts. No rule ever looks at shell text (``commands``): a command is a list of
words, or a script, which no rule about words allows. A predicate that fails denies.

What lives here: ``Policy`` and ``Rule``, the explanation of a decision, and a policy's file form.

Must not be here: asking a person (that is an effect), running a tool, confining one (that is the tool's own duty: a rule confines nothing).

Begin with ``rules``, then ``policy``; ``commands`` for what is a command and what a script.
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
        Untrusted,
        Values,
        When,
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
                "Every",
                "Matcher",
                "Path",
                "Regex",
                "Request",
                "Rule",
                "Scope",
                "ToolNamed",
                "Untrusted",
                "Values",
                "When",
            ),
        },
    )

__all__ = (
    "AfterUntrusted",
    "Call",
    "Category",
    "Command",
    "Domain",
    "Every",
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
    "When",
    "injection_rules",
    "read_only_commands",
)
