"""The tools of a run: which ones it may call, which ones its requests carry, and the calls that it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import attrs

from stepengine.data.json import JsonDict
from stepengine.data.messages import ToolCallLog, ToolMessage
from stepengine.data.result_cuts import RESULT_CHARS, shorten_parts
from stepengine.data.state import AgentState
from stepengine.data.tools import READ_OUTPUT, RECALL_HISTORY, ToolBinding, ToolLike, ToolSpec
from stepengine.machine.history import CallIds, RunHistory
from stepengine.machine.plan import RunPlan
from stepengine.machine.tool_search import with_search_tool


class ResultShortener:
    """
    Shortens the results of calls for the model of one run.

    Attributes:
        bindings: Every tool that the run may call, by name.
        offered: The names of the tools that its model may call.
    """

    __slots__ = ("bindings", "offered")

    def __init__(self, bindings: Mapping[str, ToolBinding], offered: Mapping[str, ToolSpec]) -> None:
        self.bindings = bindings
        self.offered = offered

    def __call__(self, message: ToolMessage, chars: int) -> ToolMessage:
        """Return a result of *chars* characters as the model is shown it: *message* itself if it is not too long."""
        binding = self.bindings.get(message.tool_name)
        most = None if binding is None else binding.spec.max_chars
        limit = RESULT_CHARS if most is None else most
        if chars <= limit:
            return message
        shorten_json = None if binding is None else binding.shorten_json
        parts = shorten_parts(message.content, limit, self._describe_rest(message), shorten_json)
        return message if parts is message.content else attrs.evolve(message, content=parts)

    def _describe_rest(self, message: ToolMessage) -> str:
        """Return the end of a note: how the model gets the missing text."""
        if READ_OUTPUT in self.offered:
            return f'; to read them, call {READ_OUTPUT} with {{"reference_id": "{message.tool_call_id}"}}'
        if RECALL_HISTORY in self.offered:
            return f"; to find them, call {RECALL_HISTORY} with words of them"
        if message.tool_name in self.offered:
            return f"; to get them, call {message.tool_name} for a smaller part"
        return ""


class RunTools:
    """
    The tools of one run.

    Attributes:
        bindings: Every tool that it may call, by name.
        offered: The specifications of the agent's own tools, by name.
        specs: The specifications that requests carry: its own or those that it inherited.
        definitions: These by name.
        call_ids: Gives calls their ids.
        log: The calls that were carried out.
    """

    __slots__ = ("_results", "_sends_inherited", "bindings", "call_ids", "definitions", "log", "offered", "specs")

    def __init__(self, plan: RunPlan, state: AgentState, results: ResultShortener, history: RunHistory) -> None:
        """Start with the tools of *plan*, of which those of *results* are offered, and the run's first *state*."""
        self._results, offered = results, results.offered
        self.bindings: dict[str, ToolBinding] = plan.tools  # type: ignore[assignment]  # its own where something may be added
        self.offered = offered
        self._sends_inherited = plan.sent is not None
        # What is sent and what may be called are two things: a child that inherits its ancestor's prompt sends that
        # one's tools byte for byte, so that the provider's prompt cache holds, and may call its own alone
        # (generator-contract:L18).
        self.specs = tuple(offered.values()) if plan.sent is None else plan.sent
        if plan.body is not None:
            # A child that inherits them is sent what its ancestor's requests began with, and no tool that only the body knows.
            self.definitions = cast("JsonDict", state.tool_definitions)
        else:
            self.definitions = JsonDict(offered if plan.sent is None else {s.name: s for s in plan.sent})
        # Goes on where the state that the run starts from had stopped: two turns of one conversation share a history,
        # in which each id may stand once (reliability:I1).
        self.call_ids = CallIds(history, state.id_prefix, state.next_call)
        self.log: list[ToolCallLog] = []

    def add_tools(self, tools: Sequence[ToolLike]) -> None:
        """Add tools found at the start of the run, and offer them to the model."""
        # Into the table of the plan itself: performers look there for what to run. The plan has its own copy where
        # anything may be added.
        for tool in tools:
            self.bindings[tool.spec.name] = tool.binding()
        offered = {**self.offered, **{tool.spec.name: tool.spec for tool in tools}}
        self.offered = with_search_tool(offered, self.bindings)
        self._results.offered = self.offered
        # A run that sends inherited tools may call the new ones; its requests stay byte for byte what they were.
        if not self._sends_inherited:
            self.specs = tuple(self.offered.values())
            self.definitions = JsonDict(self.offered)
