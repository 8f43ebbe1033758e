"""
Find keys and base URLs: explicit arguments first, then the environment.

Nothing is read at import. A key is wrapped in a ``Secret`` from its reading until the SDK's client is created.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urlsplit

from attrs import frozen

from stepengine.data.secret_names import is_secret_name
from stepengine.data.visible import cut_after
from stepengine.errors import MissingKey, ModelError
from stepengine.redaction import ANY, GIVEN

KEY_HOSTS = "STEPENGINE_KEY_HOSTS"

LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
"""One label of a host name."""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
HIDDEN = "Secret(...)"
WITHHELD = "withheld"
MAX_LABEL_CHARS = 63
"""The length of a label of a host name, by RFC 1035."""


class Secret:
    """A text that repr, str, format, pickle and tracebacks hide. ``reveal()`` returns it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the text itself."""
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    def __str__(self) -> str:
        return HIDDEN

    def __format__(self, spec: str) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> tuple[object, ...]:
        return str, (HIDDEN,)


@frozen
class Credentials:
    """
    A key and its source.

    Attributes:
        key: The key; ``None`` if the server needs none.
        source: For messages: ``"ANTHROPIC_API_KEY"``, ``"api_key="``, ``"no key"``, or ``"withheld"`` for a key in the
            environment that belongs to another host.
        told: A sentence about the source in place of the usual one, such as for credentials of a cloud.
    """

    key: Secret | None
    source: str
    told: str = ""

    @property
    def source_sentence(self) -> str:
        """A sentence about the source of the key, without the key."""
        if self.told:
            return self.told
        if self.source == WITHHELD:
            return f"No key was sent: keys from the environment are sent only to their own host and to hosts in {KEY_HOSTS}."
        if self.key is None:
            return "No key was sent: pass a key as api_key=, or the name of its environment variable as key_env=."
        if self.source == "api_key=":
            return "The key was passed as api_key=."
        return f"The key was read from the environment variable {self.source}."


def hash_account(key: Secret | None, url: str | None) -> str:
    """
    Return 24 hexadecimal digits of a hash of the key, or of the URL without a key; ``""`` without both.

    A URL on this machine is hashed with the host name, because it is a different server on each machine.
    """
    if key is not None:
        told = f"key {key.reveal()}"
    elif url:
        told = f"url {url.rstrip('/')} {socket.gethostname() if _is_local_host(urlsplit(url).hostname or '') else ''}"
    else:
        return ""
    return hashlib.sha256(f"stepengine account {told}".encode()).hexdigest()[:24]


def find_defined_variable(variables: Sequence[str]) -> str | None:
    """Return the first of the environment *variables* that is set; ``None`` if none is."""
    return next((name for name in variables if os.environ.get(name, "").strip()), None)


def resolve_key(
    provider: str, explicit: Secret | None, variables: Sequence[str], *, is_required: bool, argument: str
) -> Credentials:
    """
    Return the key of *provider* and its source, and register the key for redaction; raise ``MissingKey`` if a required one is missing.

    The key is *explicit*, else that of the first environment variable of *variables* that is set, else ``None``.

    Args:
        provider: The provider's name, for the message.
        explicit: The key that the caller passed.
        variables: Environment variables in order of preference.
        is_required: Whether a missing key is an error.
        argument: The code that passes a key, such as ``"AnthropicProvider(api_key=...)"``, for the message.

    Raises:
        MissingKey: when a required key is missing; the message lists all ways to provide one.
    """
    if explicit is not None:
        register_secret(provider, explicit)
        return Credentials(explicit, "api_key=")
    variable = find_defined_variable(variables)
    if variable is not None:
        key = Secret(os.environ[variable].strip())
        register_secret(provider, key)
        return Credentials(key, variable)
    if not is_required:
        return Credentials(None, "no key")
    names = " or ".join(variables) or "an environment variable"
    msg = (
        f"there is no API key for {provider!r}: set {names}, or pass {argument}. For a local server, set base_url (on the command "
        "line --base-url). Or use a model of another provider (on the command line --model; `stepengine agents models` lists them). "
        "`stepengine demo` and `stepengine studio --script FILE` need no key"
    )
    raise MissingKey(msg, kind="missing_key")


def resolve_base_url(explicit: str | None, variable: str | None, default: str | None) -> tuple[str | None, bool]:
    """Return (URL, differs): *explicit*, else the URL in *variable*, else *default*, and whether it differs from *default*."""
    url = explicit or (os.environ.get(variable, "").strip() if variable else "")
    if not url:
        return default, False
    return url, default is None or url.rstrip("/") != default.rstrip("/")


def select_key_variables_for_url(
    provider: str, variables: Sequence[str], url: str | None, default_url: str | None
) -> Sequence[str]:
    """
    Return *variables* if their keys may be sent to *url*, ``()`` for a server on this machine; raise for other hosts.

    A key is only sent to its own host (reliability:SC12). That is the host of *default_url*. For a provider without a default URL, or
    with one on this machine, it is any host, because users choose its URL. Hosts in ``STEPENGINE_KEY_HOSTS``, separated by commas, are
    also allowed.

    Raises:
        MissingKey: when a key would be sent to another host, which the settings of a repository might have chosen.
    """
    if url is None or default_url is None or find_defined_variable(variables) is None:
        return variables
    host, home = urlsplit(url).hostname or "", urlsplit(default_url).hostname or ""
    if is_trusted_url(url, default_url) or _is_local_host(home):
        return variables
    if _is_local_host(host):
        return ()
    names = " or ".join(variables)
    if host == home:
        msg = f"the URL of {provider!r} is not encrypted, and {names} is not sent in plain text. Change its http:// to https://"
        raise MissingKey(msg, kind="missing_key")
    msg = (
        f"the host of {provider!r} is {host!r}, but {names} belongs to "
        f"{home!r} and is not sent elsewhere automatically. Pass the key for this host as api_key=, or "
        f"trust it with {KEY_HOSTS}={host}"
    )
    raise MissingKey(msg, kind="missing_key")


def is_trusted_url(url: str, default_url: str | None) -> bool:
    """
    Return whether credentials of the environment may be sent to *url*.

    Its host must be in ``STEPENGINE_KEY_HOSTS``, or that of *default_url*, the provider's own URL. In the second case *url* must be
    encrypted if *default_url* is.
    """
    to, own = urlsplit(url), urlsplit(default_url or "")
    if (to.hostname or "") in [name.strip().lower() for name in os.environ.get(KEY_HOSTS, "").split(",")]:
        return True
    return default_url is not None and to.hostname == own.hostname and to.scheme in {own.scheme, "https"}


def require_host_label(provider: str, value: str, topic: str, source: str) -> str:
    """
    Return *value* if it can be one label of a host name, such as a region.

    Any other text could change the host that a URL with it names, so credentials would be sent to another server.

    Args:
        provider: The provider's name, for the message.
        value: The text.
        topic: The name of the value, such as ``"region"``, for the message.
        source: The argument or variable that holds it, for the message.

    Raises:
        ModelError: when it is not a label.
    """
    if LABEL.fullmatch(value):
        return value
    msg = (
        f"{make_safe_excerpt(value, MAX_LABEL_CHARS)!r} cannot be the {topic} of {provider!r}: it becomes part of the host name, "
        f"so it must have at most 63 letters, digits and hyphens. Correct {source}"
    )
    raise ModelError(msg, kind="settings")


def _is_local_host(host: str) -> bool:
    """Return whether a host name or IP address is this machine."""
    return host in ("localhost", "::1") or host.endswith(".localhost") or host.startswith("127.")


def register_secret(provider: str, key: Secret | None, member: str = "api_key") -> None:
    """Register *key* for redaction as a *member* of *provider*, such as ``<redacted:openai_api_key>``."""
    if key is not None:
        GIVEN.add(key.reveal(), f"{provider}_{member}", os.environ)


def register_secret_headers(provider: str, headers: Mapping[str, str]) -> None:
    """Register the values of *headers* with secret names for redaction."""
    for name, value in headers.items():
        if is_secret_name(name, "header"):
            register_secret(provider, Secret(value), name.lower())
            register_secret(provider, Secret(value.partition(" ")[2]), name.lower())


def register_url_password(provider: str, url: str) -> None:
    """Register the password in *url* for redaction."""
    if "@" in url and (password := urlsplit(url).password):
        register_secret(provider, Secret(unquote(password)), "password")


def make_safe_excerpt(text: str, limit: int) -> str:
    """Return *text* for a quotation in a message: on one line, with secrets redacted, and cut to *limit* characters."""
    text = CONTROL.sub(" ", ANY.redact_beginning(text, limit)).strip()
    return cut_after(text, limit)
