"""
Deferred tools: which tools of a request a wire sends in full, and which as hidden ones.

Everything goes by the conversation that is sent: what a search found or a call named in it is known, whoever made it. So the
same conversation always sends the same tools, and what was sent once stays where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from attrs import frozen

from stepengine.data.messages import Message, OpaquePart, ToolCallPart, ToolReferencePart
from stepengine.data.models import ModelRequest
from stepengine.data.tools import FIND_TOOLS, ToolSpec
from stepengine.models._reply import find_objects, find_text
from stepengine.models._wire import resolve_tool_choice

SEARCH = "tool_search"
"""Our word for a provider's own search of tools."""
LOADS = frozenset({"tool_search_tool_result", "tool_search_output"})
KEPT_SPECS = 1_000
"""More tools than a process offers at once; a full table is emptied, which costs making each once more."""

Names = tuple[str, ...]


def is_tool_search(data: Mapping[str, object]) -> bool:
    """Return whether a part belongs to the provider's own search of tools."""
    return SEARCH in find_text(data, "type") or find_text(data, "name").startswith(SEARCH)


def find_loaded_tools(data: Mapping[str, object]) -> list[str]:
    """Return the names of the tools that a part of a provider's own search gave."""
    if find_text(data, "type") not in LOADS:
        return []
    tools = [
        *find_objects(data, "tools"),
        *[inner for tool in find_objects(data, "tools") for inner in find_objects(tool, "tools")],
    ]
    references = find_objects(data, "content", "tool_references")
    return [find_text(tool, "name") for tool in tools] + [find_text(one, "tool_name") for one in references]


def find_referenced_tools(message: Message) -> Names:
    """Return the names of the tools that a result refers to."""
    return tuple([part.tool_name for part in message.content if isinstance(part, ToolReferencePart)])


@frozen
class _ToolsInConversation:
    """
    The names of the tools that a conversation mentions or shows, in order.

    Attributes:
        named: Those that were found or called.
        shown: Those of them that the conversation itself shows to a model whose provider searches.
    """

    named: Names = ()
    shown: Names = ()

    def with_message(self, message: Message, provider: str) -> _ToolsInConversation:
        """Return a copy with the tools that *message* names or shows. Opaque parts count only if they are from *provider*."""
        named, shown = [], []
        for part in message.content:
            if isinstance(part, ToolCallPart):
                named.append(part.tool_name)
            elif isinstance(part, ToolReferencePart):
                shown.append(part.tool_name)
            elif isinstance(part, OpaquePart) and part.provider == provider:
                shown += find_loaded_tools(part.data)
        if not (named or shown):
            return self
        return _ToolsInConversation(_add_names(self.named, [*shown, *named]), _add_names(self.shown, shown))


def _add_names(known: Names, more: Iterable[str]) -> Names:
    fresh = [name for name in dict.fromkeys(more) if name not in known]
    return (*known, *fresh) if fresh else known


NOTHING = _ToolsInConversation()


def _collect_revealed_tools(request: ModelRequest, provider: str) -> _ToolsInConversation:
    key = ("tools", provider)
    found = request.messages.fold(key, lambda known, message: known.with_message(message, provider), NOTHING)
    for message in request.tail:
        found = found.with_message(message, provider)
    return found


def arrange_hidden_tools(request: ModelRequest, provider: str, *, searches: bool) -> ModelRequest:
    """
    Return *request*, which has hidden tools, with those that are to be sent; what still has ``defer_loading`` is sent as hidden.

    Args:
        request: What is asked.
        provider: Whose own search counts.
        searches: Whether the provider searches by itself. Else what is known is sent in full, behind ``find_tools`` and in the
            order in which it came to be known, so that what stands before it in a prompt stays the same.
    """
    tools = request.tools
    hidden = {tool.name: tool for tool in tools if tool.defer_loading}
    if not any(tool.name == FIND_TOOLS for tool in tools):
        return attrs.evolve(request, tools=tuple([_without_defer_loading(tool) for tool in tools]))
    known, choice = _collect_revealed_tools(request, provider), resolve_tool_choice(request)
    given = [name for name in known.named if not searches or name not in known.shown]
    in_full = [
        _without_defer_loading(hidden.pop(name)) for name in _add_names((), [*given, choice or ""]) if name in hidden
    ]
    plain = [tool for tool in tools if not tool.defer_loading and not (searches and tool.name == FIND_TOOLS)]
    return attrs.evolve(request, tools=(*plain, *in_full, *(hidden.values() if searches else ())))


def find_hidden_tools(request: ModelRequest) -> frozenset[str] | None:
    """
    Return the names of the hidden tools of a request; ``None`` without any if ``extra`` has tools.

    ``None`` when it has none and its author gives tools in the wire's own words, so that nobody knows what is searched for.
    """
    names = [tool.name for tool in request.tools if tool.defer_loading]
    extra = request.settings.extra
    if names or not extra:
        return frozenset(names)
    body = extra.get("body")
    return None if "tools" in extra or (isinstance(body, Mapping) and "tools" in body) else frozenset()


def _without_defer_loading(spec: ToolSpec) -> ToolSpec:
    """Return *spec* without ``defer_loading``, the same object for the same tool."""
    if not spec.defer_loading:
        return spec
    known = _shown.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    if len(_shown) >= KEPT_SPECS:
        _shown.clear()
    plain = attrs.evolve(spec, defer_loading=False)
    _shown[id(spec)] = (spec, plain)
    return plain


_shown: dict[int, tuple[ToolSpec, ToolSpec]] = {}
