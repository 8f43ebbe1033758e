"""
Deferred tools: decide which tools of a request are sent in full and which are hidden.

The decision depends only on the conversation and the tool choice. Tools that a search found or a call named are revealed, and so
is a chosen tool. So the same conversation sends the same tools, and the order of sent tools never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from attrs import frozen

from stepengine.data.messages import Message, OpaquePart, ToolCallPart, ToolReferencePart
from stepengine.data.models import ModelRequest
from stepengine.data.tools import FIND_TOOLS, ToolSpec
from stepengine.models._json import find_objects, find_text
from stepengine.models._wire import resolve_tool_choice

SEARCH = "tool_search"
"""Our name of a provider's own tool search."""
LOADS = frozenset({"tool_search_tool_result", "tool_search_output"})
KEPT_SPECS = 1_000
"""More tools than a process offers at once; a full cache is cleared."""

Names = tuple[str, ...]


def is_tool_search_part(data: Mapping[str, object]) -> bool:
    """Return whether a part belongs to the provider's own tool search."""
    return SEARCH in find_text(data, "type") or find_text(data, "name").startswith(SEARCH)


def find_loaded_tool_names(data: Mapping[str, object]) -> list[str]:
    """Return the names of the tools in *data*, a result of the provider's own tool search; ``[]`` for other parts."""
    if find_text(data, "type") not in LOADS:
        return []
    tools = [
        *find_objects(data, "tools"),
        *[inner for tool in find_objects(data, "tools") for inner in find_objects(tool, "tools")],
    ]
    references = find_objects(data, "content", "tool_references")
    return [find_text(tool, "name") for tool in tools] + [find_text(one, "tool_name") for one in references]


@frozen
class _ToolsInConversation:
    """
    The names of the tools in a conversation, in order.

    Attributes:
        named: The tools that were found or called.
        shown: The tools among them that search results already show to the model.
    """

    named: Names = ()
    shown: Names = ()

    def with_tools_from_message(self, message: Message, provider: str) -> _ToolsInConversation:
        """Return a copy with the tools of *message*; opaque parts count only if they are from *provider*."""
        named, shown = [], []
        for part in message.content:
            if isinstance(part, ToolCallPart):
                named.append(part.tool_name)
            elif isinstance(part, ToolReferencePart):
                shown.append(part.tool_name)
            elif isinstance(part, OpaquePart) and part.provider == provider:
                shown += find_loaded_tool_names(part.data)
        if not (named or shown):
            return self
        return _ToolsInConversation(
            _append_new_names(self.named, [*shown, *named]), _append_new_names(self.shown, shown)
        )


def _append_new_names(names: Names, new_names: Iterable[str]) -> Names:
    """Return *names* followed by the names of *new_names* that it lacks, without duplicates."""
    fresh = [name for name in dict.fromkeys(new_names) if name not in names]
    return (*names, *fresh) if fresh else names


NOTHING = _ToolsInConversation()


def _get_tools_in_conversation(request: ModelRequest, provider: str) -> _ToolsInConversation:
    """Return the tools that the conversation of *request* found or called, cached for its history."""
    key = ("tools", provider)
    found = request.messages.fold(key, lambda known, message: known.with_tools_from_message(message, provider), NOTHING)
    for message in request.tail:
        found = found.with_tools_from_message(message, provider)
    return found


def select_tools_to_send(request: ModelRequest, provider: str, *, has_tool_search: bool) -> ModelRequest:
    """
    Return *request* with the tools to send; tools that still have ``defer_loading`` are sent as hidden.

    Args:
        request: The request.
        provider: The provider, for the results of its own tool search.
        has_tool_search: Whether the provider has its own tool search. Else revealed tools are sent in full, after the other tools and in
            the order in which they were revealed, so that the prompt cache holds.
    """
    tools = request.tools
    hidden = {tool.name: tool for tool in tools if tool.defer_loading}
    if not hidden:
        return request
    if not any(tool.name == FIND_TOOLS for tool in tools):
        return attrs.evolve(request, tools=tuple([_get_undeferred_tool(tool) for tool in tools]))
    known, choice = _get_tools_in_conversation(request, provider), resolve_tool_choice(request)
    given = [name for name in known.named if not has_tool_search or name not in known.shown]
    in_full = [
        _get_undeferred_tool(hidden.pop(name))
        for name in _append_new_names((), [*given, choice or ""])
        if name in hidden
    ]
    plain = [tool for tool in tools if not tool.defer_loading and not (has_tool_search and tool.name == FIND_TOOLS)]
    return attrs.evolve(request, tools=(*plain, *in_full, *(hidden.values() if has_tool_search else ())))


def find_hidden_tool_names(request: ModelRequest) -> frozenset[str] | None:
    """
    Return the names of the hidden tools of a request; ``None`` if they are unknown.

    The names are unknown if the request hides no tool and ``settings.extra`` has tools in the wire's own format.
    """
    names = [tool.name for tool in request.tools if tool.defer_loading]
    extra = request.settings.extra
    if names or not extra:
        return frozenset(names)
    body = extra.get("body")
    return None if "tools" in extra or (isinstance(body, Mapping) and "tools" in body) else frozenset()


def _get_undeferred_tool(spec: ToolSpec) -> ToolSpec:
    """Return *spec* without ``defer_loading``, cached, so that the same *spec* always returns the same object."""
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
