"""
The features that each family of models supports in the Converse API, and the makers in model names. Data, no I/O.

The API is the same for all models and rejects unsupported features with status 400. Sources: error messages in recorded
traffic, the API's reference, and reports of other clients, in November 2026.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import attrs
from attrs import frozen

SEVERAL = r"(?:[a-z]{2}|apac|global|us-gov)\."
"""The geography of an inference profile, an optional prefix of a name."""
NAME = re.compile(rf"(?:{SEVERAL})?([a-z][a-z0-9-]*)\.([a-z].*)")
BARE = ("", "")


@frozen(kw_only=True)
class ConverseFamily:
    """
    Models that accept the same requests. The defaults are for an unknown model: the features that all models have.

    Attributes:
        names: A regular expression for the start of ``maker.model``.
        caches: The parts of a prompt with cache marks: system prompt and messages, or tools too; ``""`` for none.
        longer: Whether the cache lifetime can be an hour.
        demands: The calls that can be forced: any call, or a certain one.
        inside: The media that a result may contain; others follow it.
        beside: The kinds of content allowed next to results in one user message; ``None`` for any.
        status: Whether a result has a status member for errors.
        promises: Whether the model supports strict schemas.
        thinking: The form in which a request asks for thinking.
        runs: The server tools of the model, by our names.
    """

    names: str = ""
    caches: Literal["", "messages", "tools"] = ""
    longer: bool = False
    demands: frozenset[Literal["any", "tool"]] = frozenset()
    inside: frozenset[str] = frozenset()
    beside: frozenset[str] | None = None
    status: bool = True
    promises: bool = False
    thinking: Literal["", "always", "claude", "effort", "nova", "qwen"] = ""
    runs: frozenset[str] = frozenset()


ANY_CALL: frozenset[Literal["any", "tool"]] = frozenset({"any", "tool"})
NONE: frozenset[str] = frozenset()
CLAUDE = ConverseFamily(
    caches="tools",
    demands=ANY_CALL,
    inside=frozenset({"image", "document"}),
    beside=frozenset({"text", "image"}),
    thinking="claude",
)
NOVA = ConverseFamily(caches="messages", demands=ANY_CALL, inside=frozenset({"image"}))

FAMILIES = (
    attrs.evolve(
        CLAUDE, names=r"anthropic\.claude-(?:opus|sonnet|haiku)-4-[56]|anthropic\.claude$", longer=True, promises=True
    ),
    attrs.evolve(CLAUDE, names=r"anthropic\.claude-(?:[123]|instant|(?:opus|sonnet)-4(?:-[01])?(?:-\d{8}|$))"),
    attrs.evolve(CLAUDE, names=r"anthropic\.", longer=True),
    attrs.evolve(NOVA, names=r"amazon\.nova-2", thinking="nova", runs=frozenset({"code", "web"})),
    attrs.evolve(NOVA, names=r"amazon\.nova-premier", runs=frozenset({"web"})),
    attrs.evolve(NOVA, names=r"amazon\.nova"),
    ConverseFamily(names=r"meta\.", inside=frozenset({"image", "document"}), beside=NONE),
    ConverseFamily(
        names=r"mistral\.(?:magistral-small|ministral-3|mistral-large-3|voxtral)",
        inside=frozenset({"document"}),
        beside=NONE,
        promises=True,
    ),
    ConverseFamily(names=r"mistral\.", inside=frozenset({"document"}), beside=NONE),
    ConverseFamily(names=r"writer\.", beside=NONE, status=False),
    ConverseFamily(names=r"deepseek\.r1", thinking="always"),
    ConverseFamily(names=r"openai\.gpt-oss", thinking="effort"),
    ConverseFamily(names=r"qwen\.(?:qwen3|qwq)", promises=True, thinking="qwen"),
    ConverseFamily(names=r"google\.gemma-3-(?:12b|27b)", promises=True),
    ConverseFamily(names=r"minimax\.minimax-m2", promises=True, thinking="always"),
    ConverseFamily(names=r"nvidia\.nemotron-nano", promises=True),
    ConverseFamily(names=r"moonshot(?:ai)?\..*thinking", demands=ANY_CALL, promises=True, thinking="always"),
    ConverseFamily(names=r"(?:moonshot(?:ai)?|zai)\.", demands=ANY_CALL, promises=True),
    ConverseFamily(),
)


def _split_model_name(model: str) -> tuple[str, str]:
    """Return (maker, the maker's name of the model) of *model*, which may be an ARN; ``("", "")`` for a name without a maker."""
    found = [NAME.fullmatch(part) for part in reversed(model.split("/"))]
    return next(((match[1], match[2]) for match in found if match is not None), BARE)


def parse_maker(model: str) -> str:
    """Return the maker in a model's name, such as ``"amazon"``; ``""`` for an opaque id or a name without a maker."""
    return _split_model_name(model)[0]


@lru_cache(maxsize=256)
def get_family(model: str) -> ConverseFamily:
    """Return the family of *model*, a name with or without a geography, or an ARN; the default family for an unknown name."""
    name = ".".join(_split_model_name(model)).strip(".") or (
        "anthropic." + model if model.startswith("claude") else model
    )
    return next(family for family in FAMILIES if re.match(family.names, name))
