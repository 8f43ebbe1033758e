"""
Models: the registry, the base class of providers, and the adapters for real ones.

Importing this package loads no SDK and no HTTP library; an adapter loads its SDK when it first sends a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.data.messages import CitationPart, OpaquePart
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
    from stepengine.models.openai import OpenAIProvider
    from stepengine.models.openai_chat import OpenAIChatProvider
    from stepengine.models.presets import PRESETS, Preset
    from stepengine.models.registry import Models
    from stepengine.models.routing import fallback
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "stepengine.data.messages": (
                "CitationPart",
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
)
