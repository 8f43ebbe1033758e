"""
Safe settings for vcrpy, which people use to record HTTP that their tools make (replay C42).

What a tool did is in the journal anyway. Our own cassettes never go through vcrpy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from stepengine.redaction import SECRET_HEADERS, SECRET_PARAMETERS, SECRET_REPLY_HEADERS, Redactor, redactor_for
from stepengine.testing.cleaning import Cleaner

__all__ = ("vcr_config",)

MATCH_ON = ("method", "scheme", "host", "port", "path", "query", "body")
PROVIDER_HOSTS = ("api.anthropic.com", "generativelanguage.googleapis.com")
LOCAL_HOSTS = ("localhost", "127.0.0.1")


def vcr_config(secrets: Mapping[str, str] | None = None) -> dict[str, Any]:
    """
    Return settings for ``vcr.VCR(**settings)``, or for pytest-recording's fixture ``vcr_config``.

    Requests are matched by their bodies too; keys, cookies, passwords and texts that look like keys are taken out of
    requests and replies, on disk and while matching; replies are stored decompressed; the model providers' hosts are left
    alone, since their traffic belongs into a ``Cassette``. vcrpy patches classes for the whole process: use one of its
    cassettes at a time.

    Args:
        secrets: Values that must not be written, each with the name that stands for it, beside those of environment
            variables that are named like secrets.
    """
    redactor = redactor_for("all", os.environ, secrets)
    named = [name for words in SECRET_PARAMETERS for name in _spellings(words)]

    def asked(request: Any) -> Any:
        parts = urlsplit(request.uri)
        request.uri = redactor.text(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
        request.headers = {name: _clean(redactor, value) for name, value in request.headers.items()}
        request.body = _clean(redactor, request.body)
        return request

    def answered(response: dict[str, Any]) -> dict[str, Any]:
        headers = {n: v for n, v in response["headers"].items() if n.lower() not in SECRET_REPLY_HEADERS}
        clean = {n: [_clean(redactor, v) for v in vs] if isinstance(vs, list) else vs for n, vs in headers.items()}
        body = {**response["body"], "string": _clean(redactor, response["body"].get("string", b""))}
        return {**response, "headers": clean, "body": body}

    return {
        "match_on": MATCH_ON,
        "filter_headers": [*sorted(SECRET_HEADERS), "x-auth-token"],
        "filter_query_parameters": [(name, f"redacted-{name}") for name in named],
        "filter_post_data_parameters": [(name, f"redacted-{name}") for name in named],
        "filter_nested_post_data_parameters": True,
        "decode_compressed_response": True,
        "ignore_hosts": _provider_hosts(),
        "before_record_request": asked,
        "before_record_response": answered,
    }


def _spellings(words: tuple[str, ...]) -> list[str]:
    camel = words[0] + "".join([word.title() for word in words[1:]])
    return list(dict.fromkeys(["_".join(words), "-".join(words), "".join(words), camel]))


def _provider_hosts() -> list[str]:
    from stepengine.models.presets import PRESETS

    hosts = {urlsplit(preset.base_url).hostname or "" for preset in PRESETS.values() if preset.base_url}
    return sorted({*PROVIDER_HOSTS, *hosts} - {"", *LOCAL_HOSTS})


def _clean(redactor: Redactor, value: Any) -> Any:
    """Return a text or bytes without secrets; whatever else as it is."""
    if isinstance(value, str):
        return redactor.json_text(value)
    return Cleaner(base=redactor).body(value) if isinstance(value, bytes) else value
