"""
Plays a model that reflects: it knows what helps once it is told what is missing, and is often wrong.

A check that fails says `lacks: WORD`. Told one or more of them, it adds what helps against one, in six of ten answers; otherwise it
writes something beside the point, or loses a line that was there. Told of none, it guesses among all that it has ever heard of.
"""

from __future__ import annotations

import re
from hashlib import sha256
from random import Random
from typing import Any

from stepengine.testing import tool_call

HELPS: dict[str, tuple[str, Any]] = {
    "currency": ("system_prompt", "Write amounts in EUR."),
    "date": ("system_prompt", "Write dates as 2026-01-31."),
    "signature": ("system_prompt", "Sign as The Shop."),
    "language": ("instructions_prompt", "Answer in the customer's language."),
    "unit": ("tools.measure", "Give the unit in centimetres."),
    "rounding": ("system_prompt", "Round to whole numbers."),
    "items": ("params.limit", 5),
    "order": ("settings.temperature", 0.0),
    "sorting": ("system_prompt", "Sort by name."),
}
BESIDE = [
    "Be brief.",
    "Be kind.",
    "Think first.",
    "Use lists.",
    "Avoid jargon.",
    "Check twice.",
    "Ask nothing.",
    "Be exact.",
]
RIGHT = 0.6
COST = "0.01"


def parts_in(prompt: str) -> dict[str, str]:
    """Return the parts that the prompt shows."""
    pieces = prompt.partition("\n\nHow it did:")[0].split("<part name='")[1:]
    return {piece.partition("'>\n")[0]: piece.partition("'>\n")[2].partition("\n</part>")[0] for piece in pieces}


def replies(request: Any) -> Any:
    """Answer as such a model does; what it hears decides what it says, so that the same question has the same answer."""
    prompt = request.messages[-1].text
    parts = parts_in(prompt)
    chance = Random(sha256(prompt.encode()).hexdigest())
    lacks = sorted(set(re.findall(r"lacks: ([a-z]{1,20})", prompt)) & {*HELPS})
    if lacks and chance.random() < RIGHT:
        name, value = HELPS[chance.choice(lacks)]
    elif lacks:
        name, value = "system_prompt", chance.choice(BESIDE)
    else:
        heard = [HELPS[word] for word in sorted(HELPS)] + [("system_prompt", text) for text in BESIDE]
        name, value = chance.choice([(part, value) for part, value in heard if part in parts])
    if isinstance(value, str):
        lines = parts[name].split("\n")
        if len(lines) > 1 and chance.random() < 0.15:
            lines.pop(chance.randrange(1, len(lines)))
        value = "\n".join([*lines, value])
    return tool_call(
        "change", {"part": name, "value": value, "why": f"It lacks {', '.join(lacks) or 'something'}."}, cost=COST
    )
