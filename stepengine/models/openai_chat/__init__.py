"""The adapter for Chat Completions, for OpenRouter, Ollama, vLLM and other compatible servers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.machine.blocks import find_call_mark
from stepengine.models._api import RequestBody
from stepengine.models._json import find_objects, find_text, parse_token_count
from stepengine.models._preset_provider import PresetProvider
from stepengine.models._reply import cut_at_stop_sequence
from stepengine.models._schemas import has_strict_tool_unsupported_by_openai
from stepengine.models._settings import warn_once
from stepengine.models._wire import ToolsCache
from stepengine.models.base import ModelInfo
from stepengine.models.openai_chat.decode import ChatAccumulator
from stepengine.models.openai_chat.request import (
    demands_unsupported_call,
    encode,
    encode_provider_settings,
    encode_simplified_tool,
    encode_strict_tool,
    encode_thinking,
    encode_tool,
    limit_tools_if_choice_unsupported,
    supports_stop_sequences,
    supports_strict_schemas,
)
from stepengine.models.openai_chat.written_calls import (
    WrittenThoughtFilter,
    parse_written_calls,
    parse_written_thoughts,
)

__all__ = ("OpenAIChatProvider",)

logger = logging.getLogger("stepengine.models")

REASONING = ("reasoning", "reasoning_effort")
"""The parameters for thinking in OpenRouter's list of models."""


def _parse_listed_model(entry: Mapping[str, object]) -> ModelInfo:
    """Return the limits and thinking parameters of a model from its entry in OpenRouter's list."""
    top, takes = entry.get("top_provider"), entry.get("supported_parameters")
    most = top.get("max_completion_tokens") if isinstance(top, Mapping) else None
    words = [word for word in takes if word in REASONING] if isinstance(takes, list) else None
    window = parse_token_count(entry.get("context_length"))
    return ModelInfo(window, parse_token_count(most), thinking=None if words is None else tuple(words))


class OpenAIChatProvider(PresetProvider):
    """
    Models at an OpenAI-compatible Chat Completions endpoint.

    *name* selects a preset: ``"openrouter"``, ``"ollama"``, ``"vllm"`` and others, or ``"openai_chat"`` for OpenAI itself.
    Any other name, and ``"openai_chat"`` with a *base_url*, is an unknown server with safe defaults. *name* is stored with
    ids and thinking, which only go back under the same name.

    Args:
        name: The preset; any other name is an unknown server.
        api_key: The key; by default from the service's environment variable.
        base_url: Another address; by default from the environment. With one, no key is required.
        key_env: The environment variable that holds the key, in place of the service's own.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        timeouts: Time limits of calls; by default those of the preset.
        headers: HTTP headers to send with every request, such as OpenRouter's ``HTTP-Referer`` and ``X-Title``.
        written_calls: Whether ``<tool_call>`` and ``<codebuff_tool_call>`` blocks in the text are parsed as tool calls, for
            servers without a parser for the model. A stream has already shown them as text. By default as the preset.
        written_thoughts: Whether ``<think>`` and ``[THINK]`` blocks at the start of the text are parsed as thinking, for
            servers without a parser for the model. They go back unchanged to the same model, and to no other. Without it
            they stay text, which ``said`` and outputs leave out. By default as the preset.
        token_provider: A function, also an asynchronous one, that returns a token for each request in place of a key, such as
            one of Entra ID. By default, on Azure without a key, the credentials of ``azure-identity``, if environment
            variables configure them.
    """

    accumulator = ChatAccumulator
    path = "/chat/completions"
    _listed: Mapping[str, ModelInfo] | None = None

    @cached_property
    def _tools(self) -> dict[Callable[[ToolSpec], object], ToolsCache]:
        """The caches of encoded tools, by the function that encodes a tool."""
        return {kind: ToolsCache(kind) for kind in (encode_tool, encode_simplified_tool, encode_strict_tool)}

    async def describe(self, model: str) -> ModelInfo | None:
        """
        Query OpenRouter's model list for the limits and thinking options of *model*; return ``None`` for other services.

        The list is fetched once.

        Raises:
            ModelError: when the query fails, and for a model that is not in the list.
        """
        if not self._preset.describes:
            return None
        if self._listed is None:
            told = await self._call_api("models", "/models")
            self._listed = {find_text(entry, "id"): _parse_listed_model(entry) for entry in find_objects(told, "data")}
        name = self.strip_prefix(model)
        # A suffix after a colon may select the server. Such names are not in the list.
        found = self._listed.get(name) or self._listed.get(name.partition(":")[0])
        if found is None:
            msg = f"{self.name} does not list the model {name!r} among its {len(self._listed)} models; use a name from its list"
            raise ModelError(msg, kind="unknown_model")
        return found

    def _explain_unsupported_schema(self, request: ModelRequest) -> str:
        """Return a reason if the service, or a cloud model of Ollama, does not accept schemas; else ``""``."""
        if not self._preset.schemas or (
            self._preset.name == "ollama" and self.strip_prefix(request.model).endswith("cloud")
        ):
            return "the service does not accept schemas"
        return ""

    def _list_unsupported_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings of *request* that the service does not support for the model."""
        model, preset = self.strip_prefix(request.model), self._preset
        dropped = encode_provider_settings(request, model, preset).dropped
        if has_strict_tool_unsupported_by_openai(request.tools) or (
            not supports_strict_schemas(preset, model) and any(t.strict for t in request.tools)
        ):
            dropped = (*dropped, "strict")
        if request.tools and request.settings.parallel_tool_calls is False and not preset.supports_parallel:
            dropped = (*dropped, "parallel_tool_calls")
        return (
            (*dropped, "tool_choice")
            if demands_unsupported_call(self._select_tools_and_add_answer_tool(request), model, preset)
            else dropped
        )

    def _encode(self, request: ModelRequest, *, stream: bool, previous_failure: str = "") -> RequestBody:
        """Encode *request* with the kind of tool definitions that the service supports, and warn of unsupported thinking options."""
        request = self._select_tools_and_add_answer_tool(request, previous_failure)
        model, preset = self.strip_prefix(request.model), self._preset
        warn_once(encode_thinking(request, model, preset).note)
        plain = preset.plain_schemas and re.fullmatch(preset.plain_schemas, model)
        kind = (
            encode_simplified_tool
            if plain
            else encode_strict_tool
            if supports_strict_schemas(preset, model)
            else encode_tool
        )
        tools = self._tools[kind](limit_tools_if_choice_unsupported(request, preset))
        content = encode(request, model, preset, tools, stream=stream, previous_failure=previous_failure)
        return RequestBody(content, path=f"/deployments/{model}{self.path}" if self._api_version else "")

    def _make_delta_filters(self) -> Sequence[WrittenThoughtFilter]:
        """Return a filter that separates written thoughts, if they are parsed; else none."""
        return [WrittenThoughtFilter()] if self._preset.written_thoughts else []

    def _postprocess_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* with written thoughts and calls parsed as enabled, cut at unsupported stop sequences; warn of unparsed calls."""
        if self._preset.written_thoughts:
            reply = parse_written_thoughts(reply)
        mark = find_call_mark(reply.text) if request.tools and not reply.tool_calls else ""
        if mark and self._preset.written_calls:
            reply = parse_written_calls(reply)
        if mark and not reply.tool_calls:
            logger.warning(
                "%s of %s wrote %r into its text, which looks like a tool call that the server did not parse; "
                "OpenAIChatProvider(..., written_calls=True) parses such blocks",
                self.strip_prefix(request.model),
                self.name,
                mark,
            )
        stops = request.settings.stop_sequences
        taken = supports_stop_sequences(self._preset, self.strip_prefix(request.model))
        return cut_at_stop_sequence(reply, stops) if stops and not taken else reply
