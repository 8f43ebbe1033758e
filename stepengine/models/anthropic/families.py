"""What Claude models take and refuse, by family: thinking, demanded calls, the largest output. Data, no I/O."""

from __future__ import annotations

import re
from typing import Literal

import attrs

from stepengine.models._failures import SMALL_LIMIT

__all__ = ("DEFAULT_MAX_TOKENS", "Family", "family_of")

DEFAULT_MAX_TOKENS = SMALL_LIMIT
"""The output limit for a model that nothing is known of."""


@attrs.frozen(kw_only=True)
class Family:
    """
    Models that take the same. The defaults are those of a name that is not known, on another server of this wire.

    Attributes:
        names: How their names begin, as a regular expression.
        adaptive: Whether the model may decide how much it thinks.
        enabled: Whether thinking may have a number of tokens.
        off: How it is kept from thinking: by ``"silence"``, by a ``"word"``, or ``"never"``.
        display: Whether it is to be said that thoughts shall be shown; not said, the newest models send them empty.
        demands: Whether a call can be demanded.
        max_output: The largest output of a reply in tokens; ``None`` when that is unknown.
    """

    names: str = ""
    adaptive: bool = True
    enabled: bool = True
    off: Literal["silence", "word", "never"] = "silence"
    display: bool = False
    demands: bool = True
    max_output: int | None = None


MANUAL = Family(adaptive=False)
NEWEST = Family(enabled=False, off="word", display=True, max_output=128_000)
K64 = 64_000

# Largest outputs: "Max output" of each model's page under platform.claude.com/docs/en/models (August 2026), and the words
# of the API itself: "max_tokens: 9999999 > 128000, which is the maximum allowed number of output tokens for
# claude-opus-4-8". Thinking: what each model refused, by its own words (`"thinking.type.enabled" is not supported for this
# model`). The first pattern that fits counts.
FAMILIES = (
    attrs.evolve(NEWEST, names=r"claude-(?:fable|mythos)-", off="never", demands=False),
    attrs.evolve(MANUAL, names=r"claude-(?:3-5|2|instant)", max_output=DEFAULT_MAX_TOKENS),
    attrs.evolve(MANUAL, names=r"claude-3-7", max_output=K64),
    attrs.evolve(MANUAL, names=r"claude-3", max_output=4_096),
    attrs.evolve(MANUAL, names=r"claude-opus-4(?:-[01])?(?:[-@]\d{8}|$)", max_output=32_000),
    attrs.evolve(MANUAL, names=r"claude-(?:sonnet|haiku)-4(?:-[01])?(?:[-@]\d{8}|$)", max_output=K64),
    attrs.evolve(MANUAL, names=r"claude-(?:opus|sonnet|haiku)-4-5", max_output=K64),
    Family(names=r"claude-(?:opus|sonnet|haiku)-4-6", display=True, max_output=128_000),
    attrs.evolve(NEWEST, names=r"claude-(?:opus|sonnet)-"),
    # Names that are newer than this table: the nearest family, and a limit that all since 4.5 take.
    attrs.evolve(NEWEST, names=r"claude-", max_output=K64),
)


def family_of(model: str) -> Family:
    """Return what is known of *model*, whatever a cloud has put before its name."""
    start = max(model.find("claude-"), 0)
    return next((family for family in FAMILIES if re.match(family.names, model[start:])), Family())
