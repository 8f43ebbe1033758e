"""
Where keys and base URLs come from: an explicit argument first, then the environment.

Nothing here runs at import. A key lives in a ``Secret`` from the moment it is read until the SDK client is built.
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
from stepengine.errors import MissingKey
from stepengine.redaction import ANY, GIVEN

KEY_HOSTS = "STEPENGINE_KEY_HOSTS"

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
HIDDEN = "Secret(...)"
WITHHELD = "withheld"


class Secret:
    """A text that no repr, str, format, pickle or traceback shows. ``reveal()`` gives it."""

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
    A key and where it came from.

    Attributes:
        key: The key; ``None`` when the server needs none.
        source: For messages: ``"ANTHROPIC_API_KEY"``, ``"api_key="``, ``"no key"``, or ``"withheld"`` when there is one in the
            environment that was made for another host.
        told: A sentence that says where it came from, in place of the usual one: credentials of a cloud are no key.
    """

    key: Secret | None
    source: str
    told: str = ""

    @property
    def origin(self) -> str:
        """A sentence that says where the key came from and never what it is."""
        if self.told:
            return self.told
        if self.source == WITHHELD:
            return f"No key was sent: one of the environment goes only to its own host and to those in {KEY_HOSTS}."
        if self.key is None:
            return "No key was sent: give one as api_key=, or name the variable that holds it as key_env=."
        if self.source == "api_key=":
            return "The key was given as api_key=."
        return f"The key was read from the environment variable {self.source}."


def hash_account(key: Secret | None, url: str | None) -> str:
    """
    Return 24 hexadecimal digits that tell a key from others, or without one the address; they give neither away.

    An address on this machine counts with the machine's name, since it is another server on each. ``""`` for neither.
    """
    if key is not None:
        told = f"key {key.reveal()}"
    elif url:
        told = f"url {url.rstrip('/')} {socket.gethostname() if _is_local(urlsplit(url).hostname or '') else ''}"
    else:
        return ""
    return hashlib.sha256(f"stepengine account {told}".encode()).hexdigest()[:24]


def find_set_variable(variables: Sequence[str]) -> str | None:
    """Return the first of the environment *variables* that is set; ``None`` when none is."""
    return next((name for name in variables if os.environ.get(name, "").strip()), None)


def find_key(
    provider: str, explicit: Secret | None, variables: Sequence[str], *, required: bool, argument: str
) -> Credentials:
    """
    Return the key of *provider*: *explicit*, else the first of the environment *variables* that is set.

    Args:
        provider: For the message.
        explicit: What the caller passed.
        variables: Environment variables in order of preference.
        required: Whether having none is an error.
        argument: How one passes a key, such as ``"AnthropicProvider(api_key=...)"``.

    Raises:
        MissingKey: naming the variables and the other ways.
    """
    if explicit is not None:
        register_secret(provider, explicit)
        return Credentials(explicit, "api_key=")
    variable = find_set_variable(variables)
    if variable is not None:
        key = Secret(os.environ[variable].strip())
        register_secret(provider, key)
        return Credentials(key, variable)
    if not required:
        return Credentials(None, "no key")
    names = " or ".join(variables) or "an environment variable"
    msg = (
        f"there is no API key for {provider!r}: set {names}, pass {argument}, set base_url (on the command line "
        "--base-url) for a local server, use a model of another provider (on the command line --model; `stepengine agents models` lists them), "
        "or do without a key: `stepengine demo`, and `stepengine studio --script FILE`, where a script answers"
    )
    raise MissingKey(msg, kind="missing_key")


def resolve_base_url(explicit: str | None, variable: str | None, default: str | None) -> tuple[str | None, bool]:
    """Return the base URL (explicit, else from *variable*, else *default*) and whether it is not the default."""
    url = explicit or (os.environ.get(variable, "").strip() if variable else "")
    if not url:
        return default, False
    return url, default is None or url.rstrip("/") != default.rstrip("/")


def usable_variables(provider: str, variables: Sequence[str], url: str | None, default: str | None) -> Sequence[str]:
    """
    Return those of *variables* whose key may be sent to *url*: a key goes to the host that it was made for (reliability:SC12).

    That is the host of the *default* address, and any address of a provider that has none of its own, or only one on this
    machine, since users give such a provider its address. Hosts in
    ``STEPENGINE_KEY_HOSTS``, separated by commas, are added to it. A server on this machine gets no key by itself.

    Raises:
        MissingKey: when a key would go to another host, which an address in a repository's settings could have chosen.
    """
    if url is None or default is None or find_set_variable(variables) is None:
        return variables
    host, home = urlsplit(url).hostname or "", urlsplit(default).hostname or ""
    own = [name.strip().lower() for name in os.environ.get(KEY_HOSTS, "").split(",")]
    if host == home or host in own or _is_local(home):
        return variables
    if _is_local(host):
        return ()
    msg = (
        f"the address of {provider!r} is {host!r}, and {' or '.join(variables)} was made for "
        f"{home!r}: it is not sent elsewhere by itself. Pass the key for this host as api_key=, or "
        f"trust it with {KEY_HOSTS}={host}"
    )
    raise MissingKey(msg, kind="missing_key")


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.endswith(".localhost") or host.startswith("127.")


def register_secret(provider: str, key: Secret | None, member: str = "api_key") -> None:
    """Register *key* for redaction as a *member* of *provider*, such as ``<redacted:openai_api_key>``."""
    if key is not None:
        GIVEN.tell(key.reveal(), f"{provider}_{member}", os.environ)


def register_secret_headers(provider: str, headers: Mapping[str, str]) -> None:
    """Register those values of *headers* for redaction that are secret by their name."""
    for name, value in headers.items():
        if is_secret_name(name, "header"):
            register_secret(provider, Secret(value), name.lower())
            register_secret(provider, Secret(value.partition(" ")[2]), name.lower())


def register_url_password(provider: str, url: str) -> None:
    """Register the password in *url* for redaction."""
    if "@" in url and (password := urlsplit(url).password):
        register_secret(provider, Secret(unquote(password)), "password")


def printable(text: str, limit: int) -> str:
    """Return foreign *text* as a message may quote it: on one line, without secrets, at most *limit* characters and dots."""
    text = CONTROL.sub(" ", ANY.beginning(text, limit)).strip()
    return cut_after(text, limit)
