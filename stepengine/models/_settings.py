"""
Convert settings that only some wires support, and report unsupported ones. Pure except for the log.

A wire has a *converter* for each supported setting. That is a function from the value to members of the body, or to ``None`` if the
model does not support it. A setting without a converter is dropped with a warning, never silently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.models import ModelReply, ModelRequest, ModelSettings
from stepengine.data.server_tools import ServerTool
from stepengine.errors import ModelError
from stepengine.models.presets import PRESETS, Preset

logger = logging.getLogger("stepengine.models")

Json = dict[str, Any]
SettingConverter: TypeAlias = Callable[[Any], Json | None]

TUNING = ("service_tier", "seed", "logprobs", "store", "safety", "cache", "cache_key", "server_tools", "fallbacks")
CAN_BE_TOLD = frozenset({"openai", "openai_chat"})
CACHES_LONGER = re.compile(r"gpt-(?:5\.(?:[6-9]|[1-9]\d)|[6-9])")
MAX_WARNINGS = 1_000
"""The most remembered warnings, each of which is logged once."""
_warned: set[tuple[str, str, str]] = set()


@frozen
class WireSettings:
    """
    The body members for the settings of a request, and the dropped settings.

    Attributes:
        members: Members of the body.
        dropped: The names of unsupported settings that are left out.
    """

    members: Json
    dropped: tuple[str, ...] = ()


def convert_settings(settings: ModelSettings, converters: Mapping[str, SettingConverter]) -> WireSettings:
    """Return the body members for all *settings* with a value, and the names of the settings that the wire does not support."""
    members: Json = {}
    dropped: list[str] = []
    for name in TUNING:
        value = getattr(settings, name)
        if value is None or value in ({}, ()):
            continue
        convert = converters.get(name)
        found = None if convert is None else convert(value)
        if found is None:
            dropped.append(name)
        else:
            members = _merge_objects_and_lists(
                members, {key: member for key, member in found.items() if key != DROPPED}
            )
            dropped += found.get(DROPPED, ())
    return WireSettings(members, tuple(dropped))


DROPPED = ""
"""The member in which a converter lists parts of its setting that it leaves out."""


def _merge_objects_and_lists(below: Json, above: Json) -> Json:
    """Return both objects merged member by member; lists are joined, and other values of *above* win."""
    joined = dict(below)
    for name, value in above.items():
        old = joined.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            joined[name] = _merge_objects_and_lists(old, value)
        else:
            joined[name] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value
    return joined


def warn_or_raise_for_dropped(request: ModelRequest, provider: str, dropped: tuple[str, ...]) -> None:
    """
    Log a warning for each dropped setting, once per process; raise if ``unsupported`` is ``"error"``.

    The log record has the fields ``setting``, ``provider`` and ``model``.

    Raises:
        ModelError: if the request has dropped settings and ``unsupported="error"``.
    """
    if dropped and request.settings.unsupported == "error":
        msg = (
            f"{provider} does not support {', '.join([f'{name}=' for name in dropped])} of ModelSettings for {request.model!r}; "
            "remove it, or set unsupported='warn' to send requests without it"
        )
        raise ModelError(msg, kind="settings")
    for name in dropped:
        key = (provider, request.model, name)
        if key in _warned or len(_warned) >= MAX_WARNINGS:
            continue
        _warned.add(key)
        fields = {"setting": name, "provider": provider, "model": request.model}
        logger.warning("%s does not support %s= for %r; it is left out", provider, name, request.model, extra=fields)


@cache
def warn_once(note: str) -> None:
    """Log the warning *note* once per process; ``""`` logs nothing."""
    if note:
        logger.warning("%s", note)


OWNERS = {member: preset.name for preset in PRESETS.values() for member in preset.own_members}
"""The only provider that knows a member of ``settings.extra``, by member."""


def find_options_of_other_providers(settings: ModelSettings, provider: str) -> tuple[str, ...]:
    """Return the sorted names of members of ``settings.extra`` that only a provider other than *provider* knows."""
    body = settings.extra.get("body")
    given = {*settings.extra, *(body if isinstance(body, Mapping) else ())}
    return tuple(sorted(name for name in given if OWNERS.get(name, provider) != provider))


def remove_extra_options(request: ModelRequest, names: tuple[str, ...]) -> ModelRequest:
    """Return *request* without the members *names* of ``settings.extra`` and of the ``body`` in it."""
    if not names:
        return request
    extra = {name: value for name, value in request.settings.extra.items() if name not in names}
    if isinstance(extra.get("body"), Mapping):
        extra["body"] = {name: value for name, value in extra["body"].items() if name not in names}
    return attrs.evolve(request, settings=attrs.evolve(request.settings, extra=extra))


def add_dropped_setting_names(reply: ModelReply, dropped: tuple[str, ...]) -> ModelReply:
    """Return *reply* with the names of the dropped settings in ``provider_data``."""
    if not dropped:
        return reply
    return attrs.evolve(reply, provider_data={**reply.provider_data, "dropped": list(dropped)})


def encode_openai_cache_lifetime(lifetime: str, model: str, preset: Preset) -> Json | None:
    """
    Return the members that set the cache *lifetime*; ``None`` if the service does not support it.

    Since gpt-5.6 OpenAI's cache has a mode that only caches marked prompts, which switches it off, because no marks are
    sent. Responses also support a lifetime of twelve hours, the shortest above an hour (providers:PV66).
    """
    if lifetime == "5m":
        return {} if preset.caches else None
    has_hours = preset.adapter == "openai"
    if preset.name not in CAN_BE_TOLD or not CACHES_LONGER.match(model) or (lifetime == "1h" and not has_hours):
        return None
    return {"prompt_cache_options": {"ttl": "12h"} if lifetime == "1h" else {"mode": "explicit"}}


def make_unsupported_tool_error(tool: ServerTool, model: str, provider: str, reason: str = "") -> ModelError:
    """Return the error for a server tool that a provider does not support, or not with these options."""
    reason = reason or f"{provider} does not offer this tool for it"
    msg = f"{model!r} cannot use {type(tool).__name__}(...) of ModelSettings(server_tools=...): {reason}"
    return ModelError(msg, kind="settings")


def encode_user_location(location: Mapping[str, object] | None) -> Json | None:
    """Return the user's location in the format of Anthropic and OpenAI; ``None`` without one."""
    return None if location is None else {"type": "approximate", **location}
