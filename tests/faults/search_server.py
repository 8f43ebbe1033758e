"""
A loopback model that searches tools, and refuses what services refuse of hidden ones (providers PV57, PV63, PV64).

It wants to call a tool: one that it is shown it calls; else it searches, by the service's own search or by ``find_tools``, and
calls what it found once it may. A request is refused that hides tools from a model that cannot search, hides them without a
search beside them or with a cache mark, refers to a tool that is not there, or does not give back what a search gave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs

from tests.faults.scripts import (
    anthropic_reply,
    chat_reply,
    google_reply,
    response_object,
    responses_stream,
)
from tests.faults.server import Answer, json_answer

Json = dict[str, Any]
SAID = ("Done.", [], "end_turn")


class Refused(Exception):
    """What the service answers 400 for."""


def need(fine: Any, why: str) -> None:
    if not fine:
        raise Refused(why)


def objects(value: Any) -> Iterator[Json]:
    """Every object in *value*."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(inner)


@attrs.define
class Searching:
    """
    The model behind one address.

    Attributes:
        wishes: The calls that it wants to make, a tool's name and its arguments; then it says that it is done.
        remembers: Whether it calls tools that it is not shown.
        cannot: The words in which a search is refused, where the service has none.
        bodies: The requests that came.
        refused: Why requests were refused.
    """

    wishes: list[tuple[str, str]] = attrs.field(factory=list)
    cannot: str = ""
    remembers: bool = False
    bodies: list[Json] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    made: int = 0

    def __call__(self, body: bytes) -> Answer:
        data = json.loads(body)
        self.bodies.append(data)
        wire = next(member for member in ("input", "contents", "messages") if member in data)
        claude = wire == "messages" and "max_tokens" in data
        try:
            reply = {
                "input": self._responses,
                "contents": self._gemini,
                "messages": self._claude if claude else self._chat,
            }
            return json_answer(reply[wire](data))
        except Refused as refused:
            self.refused.append(str(refused))
            problem = {"type": "invalid_request_error", "message": str(refused)}
            return json_answer(json.dumps({"type": "error", "error": problem}).encode(), 400)

    def _call(self, known: set[str]) -> list[tuple[str, str]] | None:
        """What to call now; none for nothing, ``None`` for a search of the service's own."""
        if not self.wishes:
            return []
        name, _ = self.wishes[0]
        if name in known or self.remembers:
            return [self.wishes.pop(0)]
        return [("find_tools", json.dumps({"query": name.replace("_", " ")}))] if "find_tools" in known else None

    def _plainly(self, reply: Any, tools: list[Json], data: Json) -> bytes:
        """The reply of a service that knows nothing of hidden tools."""
        need("defer_loading" not in json.dumps(data), "Unknown parameter: 'defer_loading'.")
        need("tool_search" not in json.dumps(data) and "additional_tools" not in json.dumps(data), "Unknown type.")
        calls = self._call({tool["name"] for tool in tools})
        return reply("", calls, "tool_use") if calls else reply(*SAID)

    def _chat(self, data: Json) -> bytes:
        return self._plainly(chat_reply, [tool["function"] for tool in data.get("tools", ())], data)

    def _gemini(self, data: Json) -> bytes:
        tools = [one for tool in data.get("tools", ()) for one in tool.get("functionDeclarations", ())]
        return self._plainly(google_reply, tools, data)

    def _claude(self, data: Json) -> bytes:
        tools = data.get("tools", [])
        hidden = {tool["name"] for tool in tools if tool.get("defer_loading")}
        search = any(tool.get("type", "").startswith("tool_search_tool") for tool in tools)
        references = [one["tool_name"] for one in objects(data["messages"]) if one.get("type") == "tool_reference"]
        searched = [one for one in objects(data["messages"]) if str(one.get("name")).startswith("tool_search")]
        need(not (hidden or search) or not self.cannot, self.cannot)
        need(not hidden or any(tool["name"] not in hidden for tool in tools), "At least one tool must not be deferred.")
        for tool in tools:
            need(
                not (tool.get("defer_loading") and tool.get("cache_control")),
                "Tools with defer_loading cannot use prompt caching",
            )
        for name in references:
            need(name in hidden, f"Tool reference '{name}' not found in available tools")
        need(search or not searched, "a search stands in the conversation and is not among the tools")
        need(search or not hidden, "hidden tools, and no search")
        calls = self._call({tool["name"] for tool in tools if tool["name"] not in hidden} | set(references))
        if calls is None:
            message = json.loads(anthropic_reply("", [self.wishes.pop(0)], "tool_use"))
            self.made += 1
            use = {"type": "server_tool_use", "id": f"srvtoolu_{self.made}", "name": "tool_search_tool_bm25"}
            name = message["content"][0]["name"]
            found = {"type": "tool_search_tool_search_result", "tool_references": []}
            need(name in hidden, "the model looked for a tool that nobody has")
            found["tool_references"] = [{"type": "tool_reference", "tool_name": name}]
            message["content"][:0] = [
                {**use, "input": {"query": name}, "caller": {"type": "direct"}},
                {"type": "tool_search_tool_result", "tool_use_id": use["id"], "content": found},
            ]
            return json.dumps(message).encode()
        return anthropic_reply("", calls, "tool_use") if calls else anthropic_reply(*SAID)

    def _responses(self, data: Json) -> bytes:
        tools, items = data.get("tools", []), data["input"]
        hidden = {tool["name"]: tool for tool in tools if tool.get("defer_loading")}
        searches = [tool for tool in tools if tool.get("type") == "tool_search"]
        search, by_client = bool(searches), "client" in [tool.get("execution") for tool in searches]
        need(len(searches) < 2, "Only one tool_search is supported.")
        asked = [item["call_id"] for item in items if item.get("type") == "tool_search_call"]
        answered = [item["call_id"] for item in items if item.get("type") == "tool_search_output"]
        need(asked == answered, "No tool output found for tool search call.")
        kinds = {item.get("type") for item in items}
        need(not (hidden or search or "additional_tools" in kinds) or not self.cannot, self.cannot)
        need(search or not hidden, "Deferred tools require tools.tool_search.")
        need(search or not kinds & {"tool_search_call", "tool_search_output"}, "a search, and no tool_search in tools")
        loaded: set[str] = set()
        for item in items:
            kind = item.get("type")
            if kind == "additional_tools":
                need(item["role"] == "developer", "Only developer is supported.")
            if kind in {"additional_tools", "tool_search_output"}:
                need(all("created_by" not in tool for tool in item["tools"]), "Unknown parameter: 'created_by'.")
                loaded |= {tool["name"] for tool in item["tools"]}
            if kind == "function_call" and item["name"] in hidden:
                need(item["name"] in loaded, f"{item['name']} was never loaded")
                own = item.get("id", "").startswith("fc_found")
                need(not own or item.get("namespace") == item["name"], "a call lost its namespace")
        calls = self._call({tool["name"] for tool in tools if "name" in tool and tool["name"] not in hidden} | loaded)
        if calls is None:
            return self._asked() if by_client else self._found(hidden)
        whole = response_object("", calls, "tool_use") if calls else response_object(*SAID)
        return json.dumps(whole).encode()

    def _asked(self) -> bytes:
        """Ask the client to search."""
        self.made += 1
        arguments = {"queries": [self.wishes[0][0].replace("_", " ")], "limit": 3}
        call = {"type": "tool_search_call", "id": f"tsc_{self.made}", "call_id": f"call_search{self.made}"}
        item = {**call, "execution": "client", "status": "completed", "arguments": arguments}
        return json.dumps({**response_object(*SAID), "output": [item]}).encode()

    def _found(self, hidden: dict[str, Json]) -> bytes:
        name, arguments = self.wishes.pop(0)
        need(name in hidden, "the model looked for a tool that nobody has")
        self.made += 1
        number = self.made
        common = {"call_id": None, "execution": "server", "status": "completed"}
        call = {"type": "function_call", "id": f"fc_found{number}", "call_id": f"call_found{number}"}
        output = [
            {"type": "tool_search_call", "id": f"tsc_{number}", **common, "arguments": {"paths": [name]}},
            {"type": "tool_search_output", "id": f"tso_{number}", **common, "tools": [hidden[name]], "created_by": "x"},
            {**call, "name": name, "namespace": name, "arguments": arguments, "status": "completed"},
        ]
        return json.dumps({**response_object(*SAID), "output": output}).encode()


def streamed(whole: Json) -> list[bytes]:
    """A response of the Responses API as the events of a stream."""
    events = [json.loads(line.partition(b"data: ")[2]) for line in responses_stream(*SAID)]
    begun, end = events[0], events[-1]
    made = [begun]
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item": item}
        made += [{"type": "response.output_item.added", **at}, {"type": "response.output_item.done", **at}]
    made.append({**end, "response": whole})
    return [b"event: %s\ndata: %s\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in made]
