"""
Messages of an MCP server, with parts removed that the package cannot parse; an invalid tool costs only itself.

The package takes a list or a result whole or not at all, and knows no result that is a task. So they are looked at here, before
it does. A result that it would reject is passed on as it was sent: the call was carried out, and ``results`` reads what it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from stepengine.adapters.mcp._caps import MESSAGE_DEPTH, ODD_CHARS, TOOLS
from stepengine.data.visible import cut_middle, visible
from stepengine.tools.conversion import replace_surrogates

ODD, TASK = "stepengine/odd", "stepengine/task"
"""Members of ``_meta``: why a tool or prompt cannot be read, and the task that a call became."""
LEFT_OUT, AS_SENT = "stepengine/left_out", "stepengine/as_sent"
"""Members of ``_meta``: placeholders for the entries that are not in a list, and the result that the package would reject."""

LISTS = {"tools": "tools/list", "prompts": "prompts/list"}
BARE = {"resources": "resources/list", "resourceTemplates": "resources/templates/list"}
"""Lists of data: an invalid entry is left out of the list and named in its ``_meta``."""
LIST_METHODS = frozenset({*LISTS.values(), *BARE.values()})
RESULTS = {"tools/call": "content", "prompts/get": "messages", "resources/read": "contents"}
"""Requests whose results are also read when the package would reject them, and the member that it requires of each."""
WHOLE = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""Members that the newest version of the protocol requires of a result; older ones ignore them."""
TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
TOO_DEEP = '"[nested too deep]"'


@attrs.define
class MessageRepair:
    """
    Converts each message into one that the package accepts.

    Attributes:
        version: Tells the version of the protocol that is spoken; ``None`` before the greeting.
    """

    version: Callable[[], str | None]
    _methods: dict[int | str, str] = attrs.field(factory=dict, init=False)

    def record_request(self, request: Any) -> None:
        """Store the method of a request, so that its reply can be repaired."""
        method, number = getattr(request, "method", None), getattr(request, "id", None)
        if number is not None and (method in RESULTS or method in LIST_METHODS):
            self._methods[number] = method

    def repair_list_reply(self, content: bytes, request_id: int | str) -> Any:
        """
        Return the reply to a list request from bytes that the package cannot parse; ``None`` for any other reply.

        One tool with half a character or with a schema of a thousand levels would cost the whole list.
        """
        if self._methods.get(request_id) not in LIST_METHODS:
            return None
        import mcp_types

        try:
            text = json.dumps(json.loads(_cut_deep_values(content.decode("utf-8", "replace"))), ensure_ascii=False)
            reply = mcp_types.jsonrpc_message_adapter.validate_json(replace_surrogates(text), by_name=False)
        except (ValueError, RecursionError):
            return None
        return reply if getattr(reply, "id", None) == request_id and not hasattr(reply, "method") else None

    def __call__(self, message: Any) -> Any:
        """Return a message of a session, repaired if a parser could reject it."""
        inner = getattr(message, "message", None)
        result = getattr(inner, "result", None)
        number = None if inner is None or hasattr(inner, "method") else inner.id
        method = "" if number is None else self._methods.pop(number, "")
        if not isinstance(result, Mapping):
            return message
        changed = self._repair_result_or_list(method, result)
        if changed is result:
            return message
        return _replace_protocol_message(message, inner.model_copy(update={"result": changed}))  # type: ignore[union-attr]

    def _repair_result_or_list(self, method: str, result: Mapping[str, Any]) -> Mapping[str, object]:
        """Return a result or list in a form that the package accepts; unchanged if it accepts it as it is."""
        if "task" in result and "content" not in result:
            return _result_from_task(result)
        if method in RESULTS:
            return self._repair_result(method, result)
        kind = next((kind for kind in (*LISTS, *BARE) if isinstance(result.get(kind), list)), None)
        return result if kind is None or "content" in result else self._repair_list(kind, result)

    def _repair_result(self, method: str, result: Mapping[str, Any]) -> Mapping[str, object]:
        """Return the result, or a valid one with it in the metadata; a request for input is returned unchanged."""
        kind = result.get("resultType") or "complete"
        if "inputRequests" in result or "requestState" in result or kind != "complete":
            return result
        if not self._find_validation_problem(method, result):
            return result
        return {RESULTS[method]: [], **WHOLE, "_meta": {AS_SENT: result}}

    def _repair_list(self, kind: str, result: Mapping[str, Any]) -> Mapping[str, object]:
        """Return a list with placeholders for invalid entries; for resources and templates, the placeholders are in its metadata."""
        method = LISTS.get(kind) or BARE[kind]
        # What is wrong with the list itself is not to be mended by leaving a member out.
        if not self._find_validation_problem(method, result) or self._find_validation_problem(
            method, {**result, kind: []}
        ):
            return result
        kept: list[object] = []
        odd: list[object] = []
        for one in result[kind][: TOOLS + 1]:  # of more nobody is told
            problem = self._find_validation_problem(method, {**result, kind: [one]})
            if not problem:
                kept.append(one)
            else:
                (kept if kind in LISTS else odd).append(_make_placeholder(one, problem))
        if odd:
            meta = result.get("_meta")
            return {**result, kind: kept, "_meta": {**(meta if isinstance(meta, Mapping) else {}), LEFT_OUT: odd}}
        return {**result, kind: kept}

    def _find_validation_problem(self, method: str, result: Mapping[str, Any]) -> str:
        """Return why the package would reject a result; ``""`` if it would not."""
        import mcp_types as types
        from mcp_types import methods
        from pydantic import ValidationError

        models: dict[str, Any] = {
            "tools/list": types.ListToolsResult,
            "prompts/list": types.ListPromptsResult,
            "resources/list": types.ListResourcesResult,
            "resources/templates/list": types.ListResourceTemplatesResult,
            "tools/call": types.CallToolResult,
            "prompts/get": types.GetPromptResult,
            "resources/read": types.ReadResourceResult,
        }
        try:
            methods.validate_server_result(method, self.version() or "2025-11-25", dict(result))
            models[method].model_validate(dict(result), by_name=False)
        except ValidationError as error:
            return describe_first_validation_issue(error, 2)
        except KeyError:
            return ""
        return ""


def describe_first_validation_issue(error: Any, skip: int = 0) -> str:
    """Return the first issue of a validation error, with its place below the first *skip* members."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join([str(part) for part in first["loc"][skip:]])
    return visible(cut_middle(f"{where}: {first['msg']}" if where else first["msg"], ODD_CHARS), strict=True)


def read_result_as_sent(result: Any) -> dict[str, Any]:
    """Return a result of the package as JSON; as the server sent it, if the package would have rejected it."""
    sent = (result.meta or {}).get(AS_SENT)
    if isinstance(sent, Mapping):
        return dict(sent)
    dumped: dict[str, Any] = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def list_left_out_placeholders(page: Any) -> list[dict[str, Any]]:
    """Return placeholders for the entries that ``MessageRepair`` left out of a list."""
    odd = (page.meta or {}).get(LEFT_OUT)
    return [one for one in odd if isinstance(one, dict)] if isinstance(odd, list) else []


def _cut_deep_values(text: str) -> str:
    """Return JSON without values that are nested too deep for any parser."""
    made, start, depth = list[str](), 0, 0
    for token in TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == MESSAGE_DEPTH + 1:
                made += [text[start : token.start()], TOO_DEEP]
        elif token[0] in "]}":
            depth -= 1
            if depth == MESSAGE_DEPTH:
                start = token.end()
    return "".join([*made, text[start:]])


def _replace_protocol_message(message: Any, inner: Any) -> Any:
    from mcp.shared.message import SessionMessage

    return SessionMessage(inner, metadata=message.metadata)


def _result_from_task(result: Mapping[str, Any]) -> dict[str, object]:
    """Convert the reply that a call became a task to a call result with the task in its metadata."""
    meta = result.get("_meta")
    return {"content": [], "_meta": {**(meta if isinstance(meta, Mapping) else {}), TASK: result["task"]}}


def _make_placeholder(entry: object, problem: str) -> dict[str, object]:
    """Return a list entry with the name of an invalid one, and the problem in its metadata."""
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return {
        "name": name if isinstance(name, str) and name else "?",
        "inputSchema": {"type": "object"},
        "_meta": {ODD: f"it is not what the protocol knows: {problem}"},
    }
