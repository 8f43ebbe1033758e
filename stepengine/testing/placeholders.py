"""
Stand-ins for credentials, with which programs start that only replay.

SDKs refuse to make a client without a key. A replay sends nothing, so any key will do. Only credentials are replaced: addresses, regions
and projects are part of the recorded URLs, and have to be the same as when they were recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from stepengine.models.presets import PRESETS

PLACEHOLDER = "replay"
GOOGLE_CREDENTIALS = Path(__file__).with_name("google_credentials.json")
"""Credentials of a user that does not exist. Tokens for them are made up while a patched program replays."""

SDK_KEYS = ("ANTHROPIC_API_KEY", "GEMINI_API_KEY", "OPENAI_API_KEY")
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
FURTHER_KEYS = (
    "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_AWS_API_KEY", "ANTHROPIC_FOUNDRY_API_KEY", "AWS_BEARER_TOKEN_BEDROCK",
    "AZURE_CLIENT_SECRET", "AZURE_OPENAI_AD_TOKEN", "AZURE_OPENAI_API_KEY", "GOOGLE_API_KEY", "OPENAI_ADMIN_KEY",
)  # fmt: skip
# They only go together with the real keys.
REMOVED = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AZURE_TOKEN_CREDENTIALS")
KEYS_OF_HOSTS = {
    "api.anthropic.com": ("ANTHROPIC_API_KEY",),
    "generativelanguage.googleapis.com": ("GEMINI_API_KEY",),
    "amazonaws.com": AWS_KEYS,
    "aiplatform.googleapis.com": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "azure.com": ("AZURE_OPENAI_API_KEY",),
}


def list_key_variables() -> frozenset[str]:
    """Return the names of all environment variables with a credential of a known provider."""
    of_presets = {preset.key_variable for preset in PRESETS.values() if preset.key_variable}
    return frozenset({*SDK_KEYS, *AWS_KEYS, *FURTHER_KEYS, *of_presets, "GOOGLE_APPLICATION_CREDENTIALS"})


def list_hosts(urls: Iterable[str]) -> frozenset[str]:
    """Return the host names of *urls*."""
    return frozenset({urlsplit(url).hostname or "" for url in urls})


def make_replay_variables(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str | None]:
    """
    Return changes to an environment for a replay: a placeholder for each credential, ``None`` for a variable to remove.

    Credentials that are set are replaced. Those that the recorded *hosts* need are added, and only those: a program may choose its
    provider by the keys that are set. Where that is not known, the keys of the three SDKs are added.
    """
    known = list_key_variables()
    needed = {name for host in hosts for name in _list_key_variables_of_host(host)} if hosts else {*SDK_KEYS}
    if "GOOGLE_API_KEY" in environ:  # the SDK takes one of the two, and warns of both
        needed.discard("GEMINI_API_KEY")
    if AWS_KEYS[0] not in environ and "AWS_BEARER_TOKEN_BEDROCK" in environ:
        needed -= {*AWS_KEYS}
    changes: dict[str, str | None] = {name: PLACEHOLDER for name in known if name in environ or name in needed}
    if "GOOGLE_APPLICATION_CREDENTIALS" in changes:
        changes["GOOGLE_APPLICATION_CREDENTIALS"] = str(GOOGLE_CREDENTIALS)
    return {**changes, **{name: None for name in REMOVED if name in environ}}


def _list_key_variables_of_host(host: str) -> tuple[str, ...]:
    """Return the key variables of the provider at *host*; those of the three SDKs for an unknown host."""
    for preset in PRESETS.values():
        if preset.key_variable and preset.base_url and urlsplit(preset.base_url).hostname == host:
            return (preset.key_variable,)
    for known, names in KEYS_OF_HOSTS.items():
        if host == known or host.endswith((f".{known}", f"-{known}")):
            return names
    return SDK_KEYS
