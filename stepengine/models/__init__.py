"""
Models: the registry, the base class of providers, and the adapters for real ones.

A request in our terms goes in, a reply in our terms comes out, and a wire stands between. Each adapter has two halves that do not know
each other's business. ``encode`` and ``decode`` are pure: they make bytes of a transcript and parts of a reply, and can be tested
against recorded traffic without a network. The client half sends and reads; a stream is put together into the object that the
provider would have sent in one piece, and then decoded by the same function, so that streams and whole replies cannot differ.

Bodies are encoded here and sent through the SDK's own client, and streams are read here: the SDKs encode a whole history anew on
every call, retry by themselves, and take a body that ends early for a whole reply. What they are kept for is authentication and
addresses. Failures are sorted once (``_failures``), by what the next attempt can hope for, not by the class that an SDK gave them.
What of a reply is not understood is kept, goes back to its own provider, and is told: each adapter has closed lists of what it reads.

``registry`` finds the adapter of a model string, ``pricing`` says what a reply costs, ``routing`` and ``batches`` wrap one provider in
another.

Must not be here: when a call is tried again (``runtime.retry``), what is asked next (machine). Importing this package loads no SDK and
no HTTP library; an adapter loads its SDK when it first sends a request. Adapters do not know each other.

Begin with ``base``, then one adapter from ``encode`` to ``decode``, such as ``anthropic``; ``_http`` and ``_byte_reader`` for what all share.
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
