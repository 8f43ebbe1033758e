"""The base class ``Provider`` of all model providers, and values that describe providers and models."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, assert_never

import attrs
from attrs import frozen

from stepengine.data.json import compact
from stepengine.data.messages import (
    AssistantPart,
    CitationPart,
    DocumentPart,
    ImagePart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
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
from stepengine.errors import ModelError
from stepengine.models.keys import Secret, find_defined_variable, hash_account


@frozen(kw_only=True)
class Timeouts:
    """
    The time limits of a model call in seconds.

    They are measured here and not by the HTTP library, which counts every keep-alive as progress.

    Attributes:
        connect: Until a connection is established.
        first_byte: From sending a request for a stream until the first byte of its body.
        idle: Between two bytes of a stream.
        silence: Between two events with content; keep-alive comments and pings do not count.
        total: The whole call; for a stream, the time without an event with content since the request was sent.
    """

    connect: float = 10.0
    first_byte: float = 120.0
    idle: float = 60.0
    silence: float = 300.0
    total: float = 600.0


@frozen
class ModelRef:
    """
    A parsed model string. ``str(ref)`` is the canonical ``provider/model``.

    Attributes:
        provider: The registered prefix, such as ``"openrouter"``; ``""`` for a fallback between several models, and for a served
            name without a slash (``Models.serve``).
        model: The provider's own name of the model, possibly with slashes. Without a provider, the canonical string.
    """

    provider: str
    model: str

    def __str__(self) -> str:
        return f"{self.provider}/{self.model}" if self.provider else self.model


@frozen
class ModelInfo:
    """
    The limits and thinking options of a model.

    Attributes:
        context_window: The most tokens of prompt and reply together; ``None`` when unknown.
        max_output: The most tokens of one reply; ``None`` when unknown.
        thinking: The provider's names of supported kinds of thinking; ``None`` when the provider was not queried.
        efforts: The provider's names of supported efforts of thinking; ``None`` when the provider was not queried.
    """

    context_window: int | None = None
    max_output: int | None = None
    thinking: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)
    efforts: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)


@frozen
class BatchMember:
    """
    A request that is encoded for a batch.

    Attributes:
        request: The request.
        group: A key, such as the model, that all requests of one batch must share.
        content: The encoded request, in any form that the provider's ``submit_batch`` expects.
    """

    request: ModelRequest
    group: str
    content: Any


@frozen(kw_only=True)
class ProviderSettings:
    """
    The sources of a provider's key and base URL.

    Attributes:
        key_variables: The environment variables that may hold its key, in order of preference.
        base_url_variable: The environment variable that may hold another base URL; ``None`` for none.
        base_url: The default base URL; ``None`` if there is none.
        given_url: The ``base_url`` argument of the provider; ``None`` without one.
    """

    key_variables: tuple[str, ...] = ()
    base_url_variable: str | None = None
    base_url: str | None = None
    given_url: str | None = None

    @property
    def key_from(self) -> str | None:
        """The first of the key variables that is set; ``None`` if none is."""
        return find_defined_variable(self.key_variables)


class Provider(ABC):
    """
    A source of model replies. A subclass needs a ``name`` and ``complete``; all other methods have defaults.

    Failures are raised as ``ModelError`` or one of its subclasses, with ``retryable``, ``status``, ``retry_after``,
    ``request_id`` and ``usage`` set as far as they are known. A provider never retries by itself.

    Attributes:
        name: The provider's name, the prefix of its model strings.
        model_patterns: Regular expressions of the models that it serves when a model string names no provider.
        default_model: The model of agents without one, in an engine with only this provider and no ``default_model``;
            ``None`` for none.
    """

    name: str
    model_patterns: tuple[str, ...] = ()
    default_model: str | None = None
    _prefixes: tuple[str, ...] = ()

    def add_prefix(self, prefix: str) -> None:
        """Register *prefix* as another name for ``strip_prefix``; a registry calls this with its prefix for the provider."""
        if prefix != self.name and prefix not in self._prefixes:
            self._prefixes = (*self._prefixes, prefix)

    def strip_prefix(self, model: str) -> str:
        """Return *model* without this provider's prefix, such as ``"claude-x"`` for ``"anthropic/claude-x"``."""
        for prefix in sorted((self.name, *self._prefixes), key=len, reverse=True):
            if model.startswith((f"{prefix}/", f"{prefix}:")):
                return model[len(prefix) + 1 :]
        return model

    def supports_model(self, model: str) -> bool:
        """Return whether one of ``model_patterns`` matches *model* without this provider's prefix."""
        return any(re.fullmatch(pattern, self.strip_prefix(model)) for pattern in self.model_patterns)

    def settings(self) -> ProviderSettings:
        """Return the sources of the provider's key and base URL; by default without any."""
        return ProviderSettings()

    def get_account(self) -> str:
        """
        Return a hash of the key or, without a key, of the base URL; ``""`` if both are unknown. Rate limits are shared by it.

        Raises:
            ModelError: when there is no key, or no base URL.
        """
        known = self.settings()
        variable = known.key_from
        key = None if variable is None else Secret(os.environ[variable].strip())
        return hash_account(key, known.given_url or known.base_url)

    def check(self, model: str) -> None:
        """
        Raise an error if arguments and environment show that requests for *model* cannot succeed; by default do nothing.

        Raises:
            MissingKey: when there is no key for *model*.
            UnknownModel: when the provider has no such model.
        """
        return

    @abstractmethod
    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the completed reply to *request*.

        Raises:
            ModelError: when there is no reply.
        """

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Yield the reply to *request* in pieces, and last exactly one ``ReplyDone`` with the whole reply.

        The default calls ``complete`` and splits its reply.
        """
        reply = await self.complete(request)
        for delta in split_reply_into_deltas(reply):
            yield delta
        yield ReplyDone(reply)

    def for_run(self) -> Provider:
        """Return this provider; a subclass may return a new one for each run. Called when a run starts or resumes."""
        return self

    def skip_reply(self, request: ModelRequest) -> None:  # noqa: B027 - optional
        """Do nothing; a subclass may count a *request* that a test's record answers in place of this provider."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Return ``None``; a provider that counts tokens queries the number of tokens in *request*.

        Raises:
            ModelError: when the query fails.
        """
        return None

    async def describe(self, model: str) -> ModelInfo | None:
        """
        Return ``None``; a provider that reports the limits and options of *model* queries them.

        Raises:
            ModelError: when the query fails.
        """
        return None

    def output_limit(self, request: ModelRequest) -> int | None:
        """Return ``None``; a provider that sends an output limit with a *request* that sets none returns this limit in tokens."""
        return None

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """
        Raise ``ModelError``; a provider that stores files uploads the file and returns its id. ``engine.files`` calls this.

        Args:
            data: The bytes of the file.
            mime_type: The MIME type of the file.
            name: The name of the file; ``""`` for none.
            expires_in: Seconds until the provider deletes the file; ``None`` for the provider's default.

        Raises:
            ModelError: when the provider stores no files, as by default, or the upload fails.
        """
        msg = f"{self.name} stores no files; pass the bytes or the URL in the part, or use anthropic, openai or google"
        raise ModelError(msg, kind="unsupported_part")

    async def delete_file(self, file_id: str) -> None:
        """
        Raise ``ModelError``; a provider that stores files deletes an uploaded file.

        Raises:
            ModelError: when the provider stores no files, as by default, or does not delete it.
        """
        msg = f"{self.name} stores no files, so {file_id!r} cannot be deleted there"
        raise ModelError(msg, kind="unsupported_part")

    def encode_batch_member(self, request: ModelRequest) -> BatchMember:
        """
        Raise ``ModelError``; a provider with batches encodes *request* for a batch.

        ``Batched`` calls this once for each model call, and then the three methods below.

        Raises:
            ModelError: when the provider has no batches, as by default, or for an invalid request. Errors of
                ``submit_batch`` would fail a whole batch.
        """
        msg = f"{self.name} does not support batches; use anthropic, openai or google"
        raise ModelError(msg, kind="settings")

    async def submit_batch(self, members: Mapping[str, BatchMember]) -> str:
        """
        Raise ``ModelError``; a provider with batches submits requests of one group as a batch and returns its id.

        Args:
            members: At most 10,000 results of ``encode_batch_member``, each by a name of at most 64 letters, digits and hyphens.

        Raises:
            ModelError: when the provider rejects them.
        """
        msg = f"{self.name} does not support batches; use anthropic, openai or google"
        raise ModelError(msg, kind="settings")

    async def fetch_batch_results(self, batch: str) -> Mapping[str, object] | None:
        """
        Raise ``ModelError``; a provider with batches returns the results of a batch by the names of its requests.

        They are values for ``decode_batch_reply``. The result is ``None`` while the batch is not done.

        The member ``""`` is the result of all requests without a member of their own.

        Raises:
            ModelError: when the query fails.
        """
        msg = f"{self.name} does not support batches; use anthropic, openai or google"
        raise ModelError(msg, kind="settings")

    def decode_batch_reply(self, result: object, request: ModelRequest) -> ModelReply:
        """
        Raise ``ModelError``; a provider with batches returns the reply in *result*, which is ``None`` without a result.

        Raises:
            ModelError: when *result* has no reply.
        """
        msg = f"the batch results have no reply to this request for {request.model!r}"
        raise ModelError(msg, kind="batch", retryable=True)

    async def close(self) -> None:
        """Close the connections, by default none. The provider can be used again afterwards."""
        return


def split_reply_into_deltas(reply: ModelReply) -> list[ModelDelta]:
    """Return the deltas of a complete *reply*, without the final ``ReplyDone``."""
    calls, deltas = 0, list[ModelDelta]()
    for part in reply.content:
        deltas += split_part_into_deltas(part, calls)
        calls += isinstance(part, ToolCallPart)
    return deltas


def split_part_into_deltas(part: AssistantPart, call_index: int) -> Sequence[ModelDelta]:
    """Return the deltas of one part of a reply; a tool call has the index *call_index* among the calls of the reply."""
    match part:
        case TextPart() | RefusalPart():
            return (TextChunk(part.text),) if part.text else ()
        case ThinkingPart():
            return (ThinkingChunk(part.text),) if part.text else ()
        case ToolCallPart():
            return (
                ToolCallStarted(call_index, part.tool_name),
                ToolCallChunk(call_index, get_raw_arguments(part)),
                ToolCallEnded(call_index),
            )
        case ImagePart() | DocumentPart() | OpaquePart() | CitationPart():
            return ()
        case _ as never:
            assert_never(never)


def get_raw_arguments(call: ToolCallPart) -> str:
    """Return the arguments of a call as text: the model's original text if it is stored, else compact JSON."""
    return call.raw_input if call.raw_input is not None else compact(call.input)
