"""
Tools that a provider runs by itself while it answers, as values for ``ModelSettings(server_tools=...)``.

The wire formats are in the adapters; an adapter raises an error for a tool that its provider does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.checks import COUNT, FieldCheck, allow_none, make_validator
from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.messages import to_string_tuple
from stepengine.errors import DefinitionError

PLACE = ("city", "country", "region", "timezone")


def to_texts(value: str | Sequence[str]) -> Any:
    """Return one text or several as a tuple, as a converter of attrs; any other value is left to the validator."""
    return to_string_tuple(value) if isinstance(value, str | list | tuple) else value


def _freeze_location(value: Mapping[str, object] | None) -> JsonDict | None:
    return None if value is None else freeze_object(value, "location")


def _is_text_tuple(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _is_location(value: Any) -> bool:
    return all(name in PLACE and isinstance(text, str) for name, text in value.items())


TEXTS = FieldCheck(_is_text_tuple, "a text or a list of texts")
SOME = FieldCheck(lambda value: _is_text_tuple(value) and bool(value), "a text or a list of texts, at least one")
LOCATION = FieldCheck(_is_location, "texts under 'city', 'country', 'region' and 'timezone'")


@frozen(kw_only=True)
class WebSearch:
    """
    Search in the web.

    Attributes:
        max_uses: How many searches one request may lead to.
        allowed_domains: Search only these; ``()`` for all.
        blocked_domains: Never search these.
        location: Where the asker is, about: ``city``, ``country`` (two letters), ``region``, ``timezone``.

    Raises:
        DefinitionError: for a value of another kind.
    """

    max_uses: int | None = attrs.field(default=None, validator=make_validator(allow_none(COUNT)))
    allowed_domains: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(TEXTS))
    blocked_domains: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(TEXTS))
    location: JsonDict | None = attrs.field(
        default=None, converter=_freeze_location, validator=make_validator(allow_none(LOCATION))
    )


@frozen(kw_only=True)
class UrlContext:
    """
    Reading of pages and documents by their addresses in the conversation.

    Attributes:
        max_uses: How many pages one request may lead to.
        allowed_domains: Read only from these; ``()`` for all.
        blocked_domains: Never read from these.

    Raises:
        DefinitionError: for a value of another kind.
    """

    max_uses: int | None = attrs.field(default=None, validator=make_validator(allow_none(COUNT)))
    allowed_domains: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(TEXTS))
    blocked_domains: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(TEXTS))


@frozen(kw_only=True)
class CodeExecution:
    """
    Code that the model writes, run in a container of the provider.

    Attributes:
        files: Ids of files that were uploaded to the provider, to lie in the container.

    Raises:
        DefinitionError: for a value of another kind.
    """

    files: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(TEXTS))


@frozen
class FileSearch:
    """
    Search in files that were uploaded to the provider.

    Attributes:
        stores: The provider's names of the stores to search, at least one.
        max_results: How many pieces of files one search gives.

    Raises:
        DefinitionError: for a value of another kind.
    """

    stores: tuple[str, ...] = attrs.field(converter=to_texts, validator=make_validator(SOME))
    max_results: int | None = attrs.field(default=None, validator=make_validator(allow_none(COUNT)), kw_only=True)


@frozen
class Programs:
    """
    Programs that the model writes and the provider runs; they may call tools of the agent.

    The results of such calls go to the program. The model receives only the output of the program, so many calls become one answer.

    Attributes:
        tools: The names of the tools that programs may call, at least one; the model does not call them directly.
        direct: Those of them that the model may also call directly.

    Raises:
        DefinitionError: for a value of another kind, and for a name in *direct* that is not in *tools*.
    """

    tools: tuple[str, ...] = attrs.field(converter=to_texts, validator=make_validator(SOME))
    direct: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(TEXTS), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if strange := [name for name in self.direct if name not in self.tools]:
            msg = f"Programs(direct=...) names {strange[0]!r}, which is not among the tools that programs may call: {self.tools!r}"
            raise DefinitionError(msg)


ServerTool: TypeAlias = WebSearch | UrlContext | CodeExecution | FileSearch | Programs
"""A tool that the provider runs itself, for ``ModelSettings(server_tools=...)``."""
