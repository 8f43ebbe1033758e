"""
Fingerprints, by which effects are compared.

A fingerprint is the first 32 hex digits of the SHA-256 of canonical JSON, after secrets were taken out. That of a model
request holds a chain over its messages, kept beside each message of the transcript, so that the request of step 10,000
costs as much as that of step 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from operator import is_
from typing import Any

import attrs

from stepengine.data.codec import encode_stored
from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import KINDS, CallModel
from stepengine.data.json import canonical
from stepengine.data.messages import Message
from stepengine.data.models import DEFAULT_SETTINGS, ModelRequest
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.redaction import Redactor

START = bytes(32)
# Half of a SHA-256: 128 bits, against chance and not against somebody who looks for two inputs of one print. A line is
# shorter by as much, and so is the name of a step in a database.
FINGERPRINT_DIGITS = 32
KEPT_FINGERPRINTS = 64
"""Settings and tools repeat from step to step in few forms. A full table is emptied, which costs one more digest for each."""
SEEN_OF_QUESTION = ("text", "options", "multi_select", "tool_name", "details")
UNSEEN = ("tags", "ttl", "trust")
"""What of a message no model sees."""


def fingerprint(value: object) -> str:
    """Return the fingerprint of a JSON value, without redaction."""
    return _hash_text(canonical(value))


def _hash_text(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def describe_tool(spec: ToolSpec) -> dict[str, Any]:
    """Return a tool's description as a model sees it."""
    return {"name": spec.name, "description": spec.description, "input_schema": spec.input_schema}


def definition_fingerprint(definition: AgentDefinition, tools: Sequence[ToolSpec]) -> str:
    """Return the fingerprint of an agent: a hint that its code has changed, never a reason to refuse it."""
    prompts = [definition.system_prompt, definition.instructions_prompt, definition.step_prompt]
    return fingerprint(
        {
            "id": definition.id,
            "model": definition.model,
            "prompts": [p if isinstance(p, str) else type(p).__qualname__ for p in prompts],
            "settings": encode_stored(definition.settings),
            "tools": [describe_tool(t) for t in tools],
        }
    )


class Fingerprints:
    """
    Computes fingerprints for one redactor, each part of a request once.

    Args:
        redactor: Removes secrets first.
    """

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        # Memos travel with messages through many runs: equal rules must mean equal keys.
        self._digest_key = ("journal.digest", redactor.cache_key)
        self._chain_key = ("journal.chain", redactor.cache_key)
        self._kept: dict[int, tuple[Any, str]] = {}
        self._last_parts: tuple[Any, ...] | None = None
        self._last_rest: Mapping[str, Any] = {}

    def for_effect(self, effect: CallModel | Mapping[str, Any]) -> str:
        """Return the fingerprint of an effect in its stored form, or of a model call of this process."""
        if isinstance(effect, CallModel):
            return self.for_request(effect.request)
        return self.for_value(select_fingerprinted_part(effect))

    def for_request(self, request: ModelRequest) -> str:
        """Return the fingerprint of a model call."""
        # A chain over the messages, kept beside each of them: step n adds one link and does not read the n messages
        # before it (replay:J39).
        value = request.messages.fold_batch(self._chain_key, self._compute_chain, START)
        if request.tail:
            value = self._compute_chain(value, request.tail)[-1]
        return _hash_text(
            canonical({"messages": value.hex()[:FINGERPRINT_DIGITS], **self._get_non_message_parts(request)})
        )

    def _get_non_message_parts(self, request: ModelRequest) -> Mapping[str, Any]:
        """Return the parts of a request besides its messages, cached while the objects are those of the last request."""
        parts = (request.model, request.system_prompt, request.tools, request.tool_choice, request.settings)
        if self._last_parts is None or not all(map(is_, parts, self._last_parts)):
            self._last_parts, self._last_rest = parts, self._fingerprint_non_message_parts(request)
        return self._last_rest

    def _fingerprint_non_message_parts(self, request: ModelRequest) -> Mapping[str, Any]:
        """Return the parts of a request besides its messages; prompt, tools and settings as their fingerprints."""
        view: dict[str, object] = {
            "type": "model_call",
            "model": request.model,
            "system_prompt": self.for_prompt(request.system_prompt),
            "tools": self.for_tools(request.tools),
        }
        if request.tool_choice is not None:
            view["tool_choice"] = request.tool_choice
        if request.settings != DEFAULT_SETTINGS:
            # The request holds the tool choice in force; the settings may hold a default of the agent.
            view["settings"] = self.for_value(encode_stored(attrs.evolve(request.settings, tool_choice=None)))
        return view

    def for_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Return the fingerprint of the tools of a request, as a model sees them."""
        kept = self._kept.get(id(specs))
        if kept is not None and kept[0] is specs:
            return kept[1]
        return self._memoize(specs, self.for_value([describe_tool(s) for s in specs]))

    def for_prompt(self, text: str) -> str:
        """Return the fingerprint of a system prompt."""
        # By `id`, and the thing itself is kept, so that the number cannot be given to another one meanwhile; to hash a
        # long prompt at each step would be the work that this saves.
        kept = self._kept.get(id(text))
        return kept[1] if kept is not None and kept[0] is text else self._memoize(text, self.for_value(text))

    def for_value(self, value: Any) -> str:
        """Return the fingerprint of a JSON value with secrets removed."""
        return _hash_text(self._to_redacted_text(value))

    def list_digests(self, transcript: Transcript) -> Sequence[bytes]:
        """Return the digest of each message."""
        return transcript.memo(self._digest_key, self.digest_message)

    def digest_message(self, message: Message) -> bytes:
        """Return the digest of a message as a model sees it: without its tags and lifetime."""
        data = encode_stored(message)
        return sha256(
            self._to_redacted_text({name: data[name] for name in data if name not in UNSEEN}).encode()
        ).digest()

    def _compute_chain(self, value: bytes, messages: Sequence[Message]) -> list[bytes]:
        """Return the chain of digests: the value after each of *messages*, starting from *value*."""
        chain: list[bytes] = []
        for message in messages:
            value = sha256(value + self.digest_message(message)).digest()
            chain.append(value)
        return chain

    def _to_redacted_text(self, value: object) -> str:
        """Return a value as canonical JSON with secrets redacted."""
        text = canonical(value)
        return canonical(self.redactor.value(value)) if self.redactor.may_contain_secret(text) else text

    def _memoize(self, source: object, source_print: str) -> str:
        """Cache the fingerprint of this very object, and return it."""
        if len(self._kept) >= KEPT_FINGERPRINTS:
            self._kept.clear()
        self._kept[id(source)] = (source, source_print)
        return source_print


def select_fingerprinted_part(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a stored form that counts for its fingerprint."""
    if form["type"] == "ask":
        questions = [{n: q[n] for n in SEEN_OF_QUESTION if n in q} for q in form["questions"]]
        return {"type": "ask", "purpose": form["purpose"], "questions": questions}
    return {name: form[name] for name in KINDS[form["type"]].fingerprint if name in form}
