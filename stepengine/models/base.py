"""What every model provider is: the base class ``Provider``, and the values that describe providers and models."""

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
from stepengine.models.keys import Secret, find_set_variable, hash_account


@frozen(kw_only=True)
class Timeouts:
    """
    Seconds that a model call may take.

    They are measured here and not by the HTTP library, which takes every keep-alive for progress.

    Attributes:
        connect: Until a connection stands.
        first_byte: From sending a request for a stream until the first byte of its body.
        idle: Between two bytes of a stream.
        silence: Between two events that say something; keep-alive comments and pings do not count.
        total: The whole call; of a stream, the time without an event that says something, from sending the request.
    """

    connect: float = 10.0
    first_byte: float = 120.0
    idle: float = 60.0
    silence: float = 300.0
    total: float = 600.0


@frozen
class ModelRef:
    """
    A model string taken apart. ``str(ref)`` is the canonical ``provider/model``.

    Attributes:
        provider: The registered prefix, such as ``"openrouter"``; ``""`` for a fallback between several models.
        model: What the provider itself calls the model; it may hold slashes. For a fallback, the canonical string.
    """

    provider: str
    model: str

    def __str__(self) -> str:
        return f"{self.provider}/{self.model}" if self.provider else self.model


@frozen
class ModelInfo:
    """
    What is known of a model without asking its provider.

    Attributes:
        context_window: Tokens that prompt and reply may have together; ``None`` when unknown.
        max_output: Tokens that one reply may have; ``None`` when unknown.
        thinking: The kinds of thinking that the model takes, in its provider's words; ``None`` when it was not asked.
        efforts: How hard it can be asked to think, in its provider's words; ``None`` when it was not asked.
    """

    context_window: int | None = None
    max_output: int | None = None
    thinking: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)
    efforts: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)


@frozen
class BatchMember:
    """
    A request as it stands in a batch.

    Attributes:
        request: The request.
        group: What all requests of one batch share, such as the model.
        content: What the provider sends of it, in whatever form it wants it back.
    """

    request: ModelRequest
    group: str
    content: Any


@frozen(kw_only=True)
class ProviderSettings:
    """
    Where a provider's key and address come from.

    Attributes:
        key_variables: The environment variables that may hold its key, in order of preference.
        base_url_variable: The environment variable that may hold another address; ``None`` for none.
        base_url: Its address by default; ``None`` when it has none.
        given_url: The address that its maker was given; ``None`` for none.
    """

    key_variables: tuple[str, ...] = ()
    base_url_variable: str | None = None
    base_url: str | None = None
    given_url: str | None = None

    @property
    def key_from(self) -> str | None:
        """The variable that holds the key now; ``None`` when none does."""
        return find_set_variable(self.key_variables)


class Provider(ABC):
    """
    A source of model replies. A subclass needs a ``name`` and ``complete``; all else has a default.

    Failures are raised as ``ModelError`` or one of its subclasses, with ``retryable``, ``status``, ``retry_after``,
    ``request_id`` and ``usage`` set as far as they are known. A provider never tries again by itself.

    Attributes:
        name: The provider's name; model strings that begin with it and a slash are its own.
        model_patterns: Regular expressions of the models that it serves when a model string names no provider.
        default_model: The model of agents that name none, when an engine was given this provider alone and no
            ``default_model`` of its own; ``None`` for none.
    """

    name: str
    model_patterns: tuple[str, ...] = ()
    default_model: str | None = None
    _prefixes: tuple[str, ...] = ()

    def add_prefix(self, prefix: str) -> None:
        """Let ``strip_prefix`` strip *prefix* too; a registry calls this when it registers the provider under another name."""
        if prefix != self.name and prefix not in self._prefixes:
            self._prefixes = (*self._prefixes, prefix)

    def strip_prefix(self, model: str) -> str:
        """Return *model* without this provider's own prefix: ``"anthropic/claude-x"`` gives ``"claude-x"``."""
        for prefix in sorted((self.name, *self._prefixes), key=len, reverse=True):
            if model.startswith((f"{prefix}/", f"{prefix}:")):
                return model[len(prefix) + 1 :]
        return model

    def supports_model(self, model: str) -> bool:
        """Return whether one of ``model_patterns`` matches the whole of *model*, its own prefix set aside."""
        return any(re.fullmatch(pattern, self.strip_prefix(model)) for pattern in self.model_patterns)

    def settings(self) -> ProviderSettings:
        """Return the sources of its key and address; by default unknown ones."""
        return ProviderSettings()

    def get_account(self) -> str:
        """
        Return the account by which processes share limits; ``""`` if key and address are unknown.

        It is a hash, equal for the same key or, without a key, the same address.

        Raises:
            ModelError: when there is no key, or no address.
        """
        known = self.settings()
        variable = known.key_from
        key = None if variable is None else Secret(os.environ[variable].strip())
        return hash_account(key, known.given_url or known.base_url)

    def check(self, model: str) -> None:
        """
        Raise an error if requests for *model* cannot succeed, judged by arguments and environment only.

        Raises:
            MissingKey: when there is no key for *model*.
            UnknownModel: when this provider knows that it has no such model.
        """
        return

    @abstractmethod
    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the completed reply to *request*.

        Raises:
            ModelError: when there is none.
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
        """Return the provider for one run, called when the run starts or resumes; by default this one."""
        return self

    def skip_reply(self, request: ModelRequest) -> None:  # noqa: B027 - most providers need not know
        """Handle a call that a test's record answers instead of this provider; by default do nothing."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Query the provider for the number of tokens in *request*; ``None`` if it does not count them.

        Raises:
            ModelError: when the question fails.
        """
        return None

    async def describe(self, model: str) -> ModelInfo | None:
        """
        Query the provider for the limits and options of *model*; ``None`` if it does not report them.

        Raises:
            ModelError: when the question fails.
        """
        return None

    def output_limit(self, request: ModelRequest) -> int | None:
        """Return the output limit in tokens that is sent with a *request* that sets none; ``None`` (the default) for none."""
        return None

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """
        Upload a file and return its id at this provider; ``engine.files`` calls this.

        Args:
            data: The bytes of the file.
            mime_type: Its type.
            name: Its name; ``""`` for none.
            expires_in: Seconds until the provider deletes it; ``None`` for its default.

        Raises:
            ModelError: when the provider holds no files, as by default, or the upload fails.
        """
        msg = (
            f"{self.name} holds no files; give the bytes or the address in the part, or use anthropic, openai or google"
        )
        raise ModelError(msg, kind="unsupported_part")

    async def delete_file(self, file_id: str) -> None:
        """
        Delete an uploaded file.

        Raises:
            ModelError: when the provider holds no files, as by default, or does not delete it.
        """
        msg = f"{self.name} holds no files, so {file_id!r} cannot be deleted there"
        raise ModelError(msg, kind="unsupported_part")

    def batch_member(self, request: ModelRequest) -> BatchMember:
        """
        Return *request* encoded for a batch; ``Batched`` calls this once for each call, and the three methods below.

        Raises:
            ModelError: when the provider takes no batches, as by default, or the request by itself cannot be sent: what
                ``submit_batch`` raises fails all of a batch.
        """
        msg = f"{self.name} takes no batches; anthropic, openai and google do"
        raise ModelError(msg, kind="settings")

    async def submit_batch(self, members: Mapping[str, BatchMember]) -> str:
        """
        Send requests of one group together and return the id of their batch.

        Args:
            members: At most 10,000 requests, as ``batch_member`` made them, each by a name of at most 64 letters, digits and hyphens.

        Raises:
            ModelError: when the provider refuses them.
        """
        msg = f"{self.name} takes no batches; anthropic, openai and google do"
        raise ModelError(msg, kind="settings")

    async def batch_results(self, batch: str) -> Mapping[str, object] | None:
        """
        Return the result of each request of a batch by name, for ``batch_reply``; ``None`` while the batch is not done.

        The member ``""`` is the result of all requests that are not named.

        Raises:
            ModelError: when the query fails.
        """
        msg = f"{self.name} takes no batches; anthropic, openai and google do"
        raise ModelError(msg, kind="settings")

    def batch_reply(self, result: object, request: ModelRequest) -> ModelReply:
        """
        Return the reply in *result*; ``None`` stands for a request that the batch lost.

        Raises:
            ModelError: when it holds none.
        """
        msg = f"the batch came back without a reply to this request of {request.model!r}"
        raise ModelError(msg, kind="batch", retryable=True)

    async def close(self) -> None:
        """Close the connections. The provider can be used again afterwards."""
        return


def split_reply_into_deltas(reply: ModelReply) -> list[ModelDelta]:
    """Return the stream items of a complete *reply*, without the final ``ReplyDone``."""
    calls, deltas = 0, list[ModelDelta]()
    for part in reply.content:
        deltas += split_part_into_deltas(part, calls)
        calls += isinstance(part, ToolCallPart)
    return deltas


def split_part_into_deltas(part: AssistantPart, index: int) -> Sequence[ModelDelta]:
    """Return the stream items of one part of a reply; *index* is that of a call among the calls."""
    match part:
        case TextPart() | RefusalPart():
            return (TextChunk(part.text),) if part.text else ()
        case ThinkingPart():
            return (ThinkingChunk(part.text),) if part.text else ()
        case ToolCallPart():
            return (
                ToolCallStarted(index, part.tool_name),
                ToolCallChunk(index, raw_arguments(part)),
                ToolCallEnded(index),
            )
        case ImagePart() | DocumentPart() | OpaquePart() | CitationPart():
            return ()
        case _ as never:
            assert_never(never)


def raw_arguments(call: ToolCallPart) -> str:
    """Return the arguments of a call as its model wrote them, or would have."""
    return call.raw_input if call.raw_input is not None else compact(call.input)
