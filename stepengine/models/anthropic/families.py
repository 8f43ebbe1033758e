"""The request options that each family of Claude models accepts: thinking, forced calls, largest output. Data, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import attrs
from attrs import frozen

from stepengine.models._failures import SMALL_LIMIT
from stepengine.models._json import get_optional_object

DEFAULT_MAX_TOKENS = SMALL_LIMIT
"""The output limit for an unknown model."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")


@frozen(kw_only=True)
class AnthropicFamily:
    """
    Models that accept the same requests. The defaults are for an unknown model name on a compatible server.

    Attributes:
        names: A regular expression for the start of their names.
        adaptive: Whether the model can decide how much it thinks.
        enabled: Whether thinking can have a budget in tokens.
        off: How thinking is switched off: by sending nothing (``"silence"``), by a ``"word"``, or ``"never"``.
        display: Whether the request must ask for visible thoughts, because the newest models otherwise send empty ones.
        demands: Whether a tool call can be forced.
        max_output: The largest output of a reply in tokens; ``None`` when that is unknown.
        efforts: The accepted levels of effort, lowest first.
        searches: Whether the provider has a tool search for the model (providers:PV63).
        is_guess: Whether the name is newer than this table, so that the family is a guess.
    """

    names: str = ""
    adaptive: bool = True
    enabled: bool = True
    off: Literal["silence", "word", "never"] = "silence"
    display: bool = False
    demands: bool = True
    max_output: int | None = None
    efforts: tuple[str, ...] = ("low", "medium", "high", "max")
    searches: bool = False
    is_guess: bool = False

    def get_nearest_effort(self, effort: str) -> str:
        """Return the accepted effort nearest to *effort*: the same, else the next lower effort, else the lowest."""
        below = EFFORTS[: EFFORTS.index(effort) + 1]
        return next((word for word in reversed(below) if word in self.efforts), (self.efforts or ("low",))[0])


MANUAL = AnthropicFamily(adaptive=False)
NEWEST = AnthropicFamily(enabled=False, off="word", display=True, max_output=128_000, searches=True)
K64_TOKENS = 64_000
"""The output limit that Anthropic documents for these families."""

# Largest outputs: "Max output" of each model's page under platform.claude.com/docs/en/models (August 2026), and the words
# of the API itself: "max_tokens: 9999999 > 128000, which is the maximum allowed number of output tokens for
# claude-opus-4-8". Thinking: the error messages of each model (`"thinking.type.enabled" is not supported for this
# model`). The first matching pattern counts.
FAMILIES = (
    attrs.evolve(NEWEST, names=r"claude-(?:fable|mythos)-", off="never", demands=False),
    attrs.evolve(MANUAL, names=r"claude-(?:3-5|2|instant)", max_output=DEFAULT_MAX_TOKENS),
    attrs.evolve(MANUAL, names=r"claude-3-7", max_output=K64_TOKENS),
    attrs.evolve(MANUAL, names=r"claude-3", max_output=4_096),
    attrs.evolve(MANUAL, names=r"claude-opus-4(?:-[01])?(?:[-@]\d{8}|$)", max_output=32_000),
    attrs.evolve(MANUAL, names=r"claude-(?:sonnet|haiku)-4(?:-[01])?(?:[-@]\d{8}|$)", max_output=K64_TOKENS),
    attrs.evolve(MANUAL, names=r"claude-(?:opus|sonnet|haiku)-4-5", max_output=K64_TOKENS, searches=True),
    AnthropicFamily(names=r"claude-(?:opus|sonnet|haiku)-4-6", display=True, max_output=128_000, searches=True),
    attrs.evolve(NEWEST, names=r"claude-(?:opus-4-[78]|(?:opus|sonnet)-5)(?:[-@]\d{8}|$)"),
    attrs.evolve(NEWEST, names=r"claude-(?:opus|sonnet)-", is_guess=True),
    # Names that are newer than this table: the nearest family, and a limit that all models since 4.5 accept.
    attrs.evolve(NEWEST, names=r"claude-", max_output=K64_TOKENS, is_guess=True),
)


@lru_cache(maxsize=256)
def get_family(model: str) -> AnthropicFamily:
    """Return the family of *model*, for an unknown name the nearest one; a cloud's prefix before ``claude-`` is ignored."""
    start = max(model.find("claude-"), 0)
    return next(
        (family for family in FAMILIES if re.match(family.names, model[start:])), AnthropicFamily(is_guess=True)
    )


def copy_family_with_capabilities(
    family: AnthropicFamily, capabilities: Mapping[str, object], max_output: int | None
) -> AnthropicFamily:
    """Return a copy of *family* with the ``capabilities`` and the largest output that the API describes for a model."""
    thinking = get_optional_object(capabilities, "thinking")
    types, effort = get_optional_object(thinking, "types"), get_optional_object(capabilities, "effort")
    takes = {name: get_optional_object(types, name).get("supported") is True for name in types}
    words = tuple([word for word in EFFORTS if get_optional_object(effort, word).get("supported") is True])
    off = family.off
    if "disabled" in takes:
        off = ("word" if family.off != "silence" else "silence") if takes["disabled"] else "never"
    return attrs.evolve(
        family,
        adaptive=takes.get("adaptive", family.adaptive),
        enabled=takes.get("enabled", family.enabled),
        off=off,
        max_output=max_output or family.max_output,
        efforts=words or family.efforts,
        is_guess=False,
    )
