"""
Models: the registry, the base class of providers, and the adapters for real ones.

Importing this package loads no SDK and no HTTP library; an adapter loads its SDK when it first sends a request.
"""

from __future__ import annotations

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest
from stepengine.models.anthropic import AnthropicProvider
from stepengine.models.base import ModelInfo, ModelRef, Provider
from stepengine.models.openai_chat import OpenAIChatProvider
from stepengine.models.registry import Models

__all__ = (
    "AnthropicProvider",
    "ModelDelta",
    "ModelInfo",
    "ModelRef",
    "ModelReply",
    "ModelRequest",
    "Models",
    "OpenAIChatProvider",
    "Provider",
)
