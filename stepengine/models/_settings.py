"""
Settings that only some wires have words for: what each becomes in a body, and what is left out and said so. Pure but for the log.

A wire has a *way* for each of these settings that it knows: a function of the value that gives members of the body, or ``None``
where the model does not take it. What has no way is dropped with a warning, never silently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.models import ModelReply, ModelRequest, ModelSettings
from stepengine.data.server_tools import ServerTool
from stepengine.errors import ModelError
from stepengine.models.presets import PRESETS, Preset

logger = logging.getLogger("stepengine.models")

Json = dict[str, Any]
Way: TypeAlias = Callable[[Any], Json | None]

TUNING = ("service_tier", "seed", "logprobs", "store", "safety", "cache", "cache_key", "server_tools", "fallbacks")
CAN_BE_TOLD = frozenset({"openai", "openai_chat"})
CACHES_LONGER = re.compile(r"gpt-(?:5\.[6-9]|[6-9])")
MAX_WARNINGS = 1_000
"""Each is given once; a process that makes up names of settings must not fill the memory with them."""
_warned: set[tuple[str, str, str]] = set()


@frozen
class WireSettings:
    """
    The body members that the settings of a request become, and the settings that were dropped.

    Attributes:
        members: Members of the body.
        dropped: The settings that are set and left out, by name.
    """

    members: Json
    dropped: tuple[str, ...] = ()


def convert_settings(settings: ModelSettings, ways: Mapping[str, Way]) -> WireSettings:
    """Return what the settings that are set become by the *ways* of a wire."""
    members: Json = {}
    dropped: list[str] = []
    for name in TUNING:
        value = getattr(settings, name)
        if value is None or value in ({}, ()):
            continue
        way = ways.get(name)
        found = None if way is None else way(value)
        if found is None:
            dropped.append(name)
        else:
            members = _merge_deeply(members, {key: member for key, member in found.items() if key != DROPPED})
            dropped += found.get(DROPPED, ())
    return WireSettings(members, tuple(dropped))


DROPPED = ""
"""Under this name a way says which parts of its setting it leaves out."""


def _merge_deeply(below: Json, above: Json) -> Json:
    joined = dict(below)
    for name, value in above.items():
        old = joined.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            joined[name] = _merge_deeply(old, value)
        else:
            joined[name] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value
    return joined


def warn_of_dropped(request: ModelRequest, provider: str, dropped: tuple[str, ...]) -> None:
    """
    Warn of dropped settings, once in a process for each; raise if ``unsupported`` is ``"error"``.

    The record has the fields ``setting``, ``provider`` and ``model``.

    Raises:
        ModelError: where the request would rather not be sent then.
    """
    if dropped and request.settings.unsupported == "error":
        msg = (
            f"{provider} has no word for {', '.join([f'{name}=' for name in dropped])} of ModelSettings when {request.model!r} "
            "is asked; leave it out, or set unsupported='warn' to have it left out"
        )
        raise ModelError(msg, kind="settings")
    for name in dropped:
        key = (provider, request.model, name)
        if key in _warned or len(_warned) >= MAX_WARNINGS:
            continue
        _warned.add(key)
        fields = {"setting": name, "provider": provider, "model": request.model}
        logger.warning(
            "%s has no word for %s= when %r is asked; it is left out", provider, name, request.model, extra=fields
        )


OWNERS = {member: preset.name for preset in PRESETS.values() for member in preset.own_members}
"""The provider that alone knows a member of ``settings.extra``, by member."""


def find_foreign_options(settings: ModelSettings, provider: str) -> tuple[str, ...]:
    """Return the members of ``settings.extra`` that belong to a provider other than *provider*."""
    body = settings.extra.get("body")
    given = {*settings.extra, *(body if isinstance(body, Mapping) else ())}
    return tuple(sorted(name for name in given if OWNERS.get(name, provider) != provider))


def without_options(request: ModelRequest, names: tuple[str, ...]) -> ModelRequest:
    """Return *request* without the members *names* of ``settings.extra``."""
    if not names:
        return request
    extra = {name: value for name, value in request.settings.extra.items() if name not in names}
    if isinstance(extra.get("body"), Mapping):
        extra["body"] = {name: value for name, value in extra["body"].items() if name not in names}
    return attrs.evolve(request, settings=attrs.evolve(request.settings, extra=extra))


def add_dropped(reply: ModelReply, dropped: tuple[str, ...]) -> ModelReply:
    """Return *reply* with the names of the dropped settings."""
    if not dropped:
        return reply
    return attrs.evolve(reply, provider_data={**reply.provider_data, "dropped": list(dropped)})


def cache_members(lifetime: str, model: str, preset: Preset) -> Json | None:
    """
    Return the members that set the cache *lifetime* of a service; ``None`` if it cannot be set.

    Since gpt-5.6 OpenAI's cache can be told to wait for marks, which are never sent, and by Responses to hold for twelve
    hours, the shortest time above an hour (providers:PV66).
    """
    if lifetime == "5m":
        return {} if preset.caches else None
    has_hours = preset.adapter == "openai"
    if preset.name not in CAN_BE_TOLD or not CACHES_LONGER.match(model) or (lifetime == "1h" and not has_hours):
        return None
    return {"prompt_cache_options": {"ttl": "12h"} if lifetime == "1h" else {"mode": "explicit"}}


def make_unsupported_tool_error(item: ServerTool, model: str, provider: str, why: str = "") -> ModelError:
    """Return the error for a tool that a provider cannot run, or not so."""
    reason = why or f"{provider} has no such tool for it"
    msg = f"{model!r} cannot be given {type(item).__name__}(...) of ModelSettings(server_tools=...): {reason}"
    return ModelError(msg, kind="settings")


def encode_location(place: Mapping[str, object] | None) -> Json | None:
    """Return the user's location in the form of Anthropic and OpenAI."""
    return None if place is None else {"type": "approximate", **place}
