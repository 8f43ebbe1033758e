"""
Policies and options of tools, made of the labels alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.injection.labels import LABELS, Label
from stepengine.permissions import Policy, Rule

EFFECTS = [name for name, label in LABELS.items() if label.kind != "reads"]
CAUTIOUS = [name for name in EFFECTS if LABELS[name].details]
MAIL_AND_CALENDAR = ("send_email", "create_calendar_event", "reschedule_calendar_event")
"""Where issue 59 guards title, time and subject."""


def options(*, contacts: bool) -> Mapping[str, Mapping[str, Any]]:
    """Return what each tool says of itself, with trusted contacts or without."""
    return {name: _options_of(label, contacts=contacts) for name, label in LABELS.items()}


def _options_of(label: Label, *, contacts: bool) -> dict[str, Any]:
    """The id of what a call has created is trusted; the engine itself does not trust what a result only says again."""
    is_trusted = label.results == "own" or bool(label.created)
    results = "trusted" if is_trusted else "names" if label.results == "contacts" and contacts else "untrusted"
    return {"results": results, "destinations": label.destinations, "texts": label.texts}


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "no policy": lambda: Policy(mode="bypass"),
        "destinations": Policy.guard_injection,
        "destinations, mail and calendar": lambda: Policy.guard_injection(
            *[Rule.ask_untrusted(name, *LABELS[name].details) for name in CAUTIOUS if name in MAIL_AND_CALENDAR]
        ),
        "destinations, details": lambda: Policy.guard_injection(
            *[Rule.ask_untrusted(name, *LABELS[name].details) for name in CAUTIOUS]
        ),
        "destinations, after": lambda: Policy.guard_injection(*[Rule.ask_after_untrusted(name) for name in CAUTIOUS]),
        "after": lambda: Policy(
            [Rule.allow_tool("*"), *[Rule.ask_after_untrusted(name) for name in EFFECTS]],
        ),
        "every effect": lambda: Policy([*[Rule.ask_for_tool(name) for name in EFFECTS], Rule.allow_tool("*")]),
    }
)
"""By name, as ``labels`` says what they are."""
