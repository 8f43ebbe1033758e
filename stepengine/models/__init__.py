"""
Models: the registry, the base class of providers, and the adapters of real providers.

An adapter converts a request to a provider's wire format and its answer to a reply. It has two independent halves. ``encode``
and ``decode`` are pure functions between messages and bytes, and are tested against recorded traffic. The client sends and
reads. It assembles a stream into the object of a request without a stream. The same function decodes both, so they cannot
differ.

Bodies are encoded here and sent through the SDK's own client. The SDKs would encode the whole history on every call, retry by
themselves, and accept a truncated body as a complete reply. They only provide authentication and URLs. ``_failures``
classifies all errors by the prospects of a retry, not by the exception classes of SDKs. Each adapter has closed lists of the
members that it knows. Unknown members of a reply are stored, reported, and sent back to the same provider only.

``registry`` finds the adapter for a model string, and ``pricing`` computes the cost of a reply. ``routing`` and ``batches`` are
providers that wrap other providers.

Must not be here: the retry policy (``runtime.retry``) and the choice of the next request (machine). Importing this package loads
no SDK and no HTTP library; an adapter loads its SDK with the first request. Adapters do not import each other. ``clouds``
combines several, and ``google.interactions`` extends ``google``.

Read ``base`` first, then one adapter from ``encode`` to ``decode``, such as ``anthropic``. ``_http``, ``_api`` and ``_byte_reader`` have the
code that all adapters share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.data.json import JsonDict, JsonValue
    from stepengine.data.messages import CitationPart, JsonPart, OpaquePart
    from stepengine.data.models import (
        ModelDelta,
        ModelReply,
        ModelRequest,
        ReplyDone,
        TextChunk,
        ThinkingChunk,
        ToolCallChunk,
        ToolCallEnded,
        ToolCallStarted,
    )
    from stepengine.data.server_tools import CodeExecution, FileSearch, Programs, ServerTool, UrlContext, WebSearch
    from stepengine.models.anthropic import AnthropicProvider
    from stepengine.models.base import BatchMember, ModelInfo, ModelRef, Provider, ProviderSettings, Timeouts
    from stepengine.models.batches import Batched
    from stepengine.models.clouds import (
        AnthropicAwsProvider,
        AnthropicGoogleProvider,
        BedrockProvider,
        FoundryProvider,
        VertexProvider,
    )
    from stepengine.models.files import Files, UploadedFile, file_part
    from stepengine.models.google import GoogleProvider
    from stepengine.models.google.interactions import GoogleInteractionsProvider
    from stepengine.models.known_models import KnownModel, ListedProvider, find_known_models, list_providers
    from stepengine.models.openai import OpenAIProvider
    from stepengine.models.openai_chat import OpenAIChatProvider
    from stepengine.models.presets import PRESETS, Preset
    from stepengine.models.registry import Models
    from stepengine.models.routing import fallback
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.data.json": ("JsonDict", "JsonValue"),
            "stepengine.data.messages": (
                "CitationPart",
                "JsonPart",
                "OpaquePart",
            ),
            "stepengine.data.models": (
                "ModelDelta",
                "ModelReply",
                "ModelRequest",
                "ReplyDone",
                "TextChunk",
                "ThinkingChunk",
                "ToolCallChunk",
                "ToolCallEnded",
                "ToolCallStarted",
            ),
            "stepengine.data.server_tools": (
                "CodeExecution",
                "FileSearch",
                "Programs",
                "ServerTool",
                "UrlContext",
                "WebSearch",
            ),
            "stepengine.models.anthropic": ("AnthropicProvider",),
            "stepengine.models.base": (
                "BatchMember",
                "ModelInfo",
                "ModelRef",
                "Provider",
                "ProviderSettings",
                "Timeouts",
            ),
            "stepengine.models.batches": ("Batched",),
            "stepengine.models.clouds": (
                "AnthropicAwsProvider",
                "AnthropicGoogleProvider",
                "BedrockProvider",
                "FoundryProvider",
                "VertexProvider",
            ),
            "stepengine.models.files": (
                "Files",
                "UploadedFile",
                "file_part",
            ),
            "stepengine.models.google": ("GoogleProvider",),
            "stepengine.models.google.interactions": ("GoogleInteractionsProvider",),
            "stepengine.models.known_models": (
                "KnownModel",
                "ListedProvider",
                "find_known_models",
                "list_providers",
            ),
            "stepengine.models.openai": ("OpenAIProvider",),
            "stepengine.models.openai_chat": ("OpenAIChatProvider",),
            "stepengine.models.presets": (
                "PRESETS",
                "Preset",
            ),
            "stepengine.models.registry": ("Models",),
            "stepengine.models.routing": ("fallback",),
        },
    )

__all__ = (
    "PRESETS",
    "AnthropicAwsProvider",
    "AnthropicGoogleProvider",
    "AnthropicProvider",
    "BatchMember",
    "Batched",
    "BedrockProvider",
    "CitationPart",
    "CodeExecution",
    "FileSearch",
    "Files",
    "FoundryProvider",
    "GoogleInteractionsProvider",
    "GoogleProvider",
    "JsonDict",
    "JsonPart",
    "JsonValue",
    "KnownModel",
    "ListedProvider",
    "ModelDelta",
    "ModelInfo",
    "ModelRef",
    "ModelReply",
    "ModelRequest",
    "Models",
    "OpaquePart",
    "OpenAIChatProvider",
    "OpenAIProvider",
    "Preset",
    "Programs",
    "Provider",
    "ProviderSettings",
    "ReplyDone",
    "ServerTool",
    "TextChunk",
    "ThinkingChunk",
    "Timeouts",
    "ToolCallChunk",
    "ToolCallEnded",
    "ToolCallStarted",
    "UploadedFile",
    "UrlContext",
    "VertexProvider",
    "WebSearch",
    "fallback",
    "file_part",
    "find_known_models",
    "list_providers",
)
