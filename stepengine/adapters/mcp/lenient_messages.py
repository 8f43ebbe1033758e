"""
Messages of an MCP server, with parts removed that the package cannot parse; an invalid tool costs only itself.

The package takes a list whole or not at all, and knows no result that is a task. So lists are looked at here, before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from stepengine.adapters.mcp._caps import ODD_CHARS, TOOLS
from stepengine.data.visible import visible
from stepengine.tools.conversion import cut_middle

ODD, TASK = "stepengine/odd", "stepengine/task"
"""Members of ``_meta``: why a tool or prompt cannot be read, and the task that a call became."""

LISTS = {"tools": "tools/list", "prompts": "prompts/list"}
BARE = {"resources": "resources/list", "resourceTemplates": "resources/templates/list"}
"""Lists whose members are data: what is odd there is left out, and nobody misses it."""


@attrs.define
class MessageRepair:
    """
    Converts each message into one that the package accepts.

    Attributes:
        version: Tells the version of the protocol that is spoken; ``None`` before the greeting.
    """

    version: Callable[[], str | None]

    def __call__(self, message: Any) -> Any:
        """Return a message of a session, or one like it without what is odd."""
        inner = getattr(message, "message", None)
        result = getattr(inner, "result", None)
        if not isinstance(result, Mapping):
            return message
        if "task" in result and "content" not in result:
            changed: Mapping[str, object] = _result_from_task(result)
        else:
            kind = next((kind for kind in (*LISTS, *BARE) if isinstance(result.get(kind), list)), None)
            if kind is None or "content" in result:
                return message
            changed = self._repair_list(kind, result)
        if changed is result:
            return message
        return _replace_inner(message, inner.model_copy(update={"result": changed}))  # type: ignore[union-attr]

    def _repair_list(self, kind: str, result: Mapping[str, Any]) -> Mapping[str, object]:
        method = LISTS.get(kind) or BARE[kind]
        # What is wrong with the list itself is not to be mended by leaving a member out.
        if not self._find_problem(method, result) or self._find_problem(method, {**result, kind: []}):
            return result
        kept: list[object] = []
        for one in result[kind][: TOOLS + 1]:  # of more nobody is told
            problem = self._find_problem(method, {**result, kind: [one]})
            if not problem:
                kept.append(one)
            elif kind in LISTS:
                kept.append(_make_placeholder(one, problem))
        return {**result, kind: kept}

    def _find_problem(self, method: str, result: Mapping[str, Any]) -> str:
        """Return why the package would reject a result; ``""`` if it would not."""
        import mcp_types as types
        from mcp_types import methods
        from pydantic import ValidationError

        models: dict[str, Any] = {
            "tools/list": types.ListToolsResult,
            "prompts/list": types.ListPromptsResult,
            "resources/list": types.ListResourcesResult,
            "resources/templates/list": types.ListResourceTemplatesResult,
        }
        try:
            methods.validate_server_result(method, self.version() or "2025-11-25", dict(result))
            models[method].model_validate(dict(result), by_name=False)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join([str(part) for part in first["loc"][2:]])
            return visible(cut_middle(f"{where}: {first['msg']}" if where else first["msg"], ODD_CHARS), strict=True)
        except KeyError:
            return ""
        return ""


def _replace_inner(message: Any, inner: Any) -> Any:
    """Return a session message with *inner* as its protocol message."""
    from mcp.shared.message import SessionMessage

    return SessionMessage(inner, metadata=message.metadata)


def _result_from_task(result: Mapping[str, Any]) -> dict[str, object]:
    """Convert the reply that a call became a task to a call result with the task in its metadata."""
    meta = result.get("_meta")
    return {"content": [], "_meta": {**(meta if isinstance(meta, Mapping) else {}), TASK: result["task"]}}


def _make_placeholder(one: object, problem: str) -> dict[str, object]:
    name = one.get("name") if isinstance(one, Mapping) else None
    return {
        "name": name if isinstance(name, str) and name else "?",
        "inputSchema": {"type": "object"},
        "_meta": {ODD: f"it is not what the protocol knows: {problem}"},
    }
