"""
Names of secrets: one list for headers, parameters, members of JSON and variables.

Case, separators and digits at the end do not matter, and only the end of a name decides: ``DB_PASS``, ``dbPass`` and ``X-Db-Pass`` are
secret because of their last word. Some words name a secret in one kind of place only: ``key`` in an address is a key, and in a JSON
object it is mostly something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

Place: TypeAlias = Literal["header", "parameter", "member", "variable"]
"""Where a name is: a parameter is one of an address, a form or a multipart form."""

EVERYWHERE: frozenset[Place] = frozenset({"header", "parameter", "member", "variable"})
IN_REQUESTS: frozenset[Place] = frozenset({"header", "parameter"})
SECRET_ENDINGS: dict[str, frozenset[Place]] = {
    **dict.fromkeys(
        (
            "accesskey", "accountkey", "apikey", "apikeys", "authorization", "credential", "credentials", "encryptionkey", "masterkey",
            "passcode", "passphrase", "passwd", "password", "passwordconfirmation", "passwords", "privatekey", "secret", "secretkey",
            "secrets", "sharedkey", "signingkey", "subscriptionkey", "token",
        ),
        EVERYWHERE,
    ),
    **dict.fromkeys(
        ("assertion", "authentication", "authenticationinfo", "idtokenhint", "sessid", "sessionid", "signature"), IN_REQUESTS
    ),
    "cookie": IN_REQUESTS | {"member"},
    "session": frozenset({"header"}),
}  # fmt: skip
"""How names end that are secret, in lower case and without separators, and where."""
SECRET_WORDS: dict[str, frozenset[Place]] = {
    "auth": IN_REQUESTS | {"variable"},
    "bearer": IN_REQUESTS,
    "code": frozenset({"parameter"}),
    "jwt": EVERYWHERE,
    "key": IN_REQUESTS | {"variable"},
    "otp": frozenset({"parameter"}),
    "pass": EVERYWHERE,
    "pat": IN_REQUESTS | {"variable"},
    "pwd": EVERYWHERE,
    "sig": frozenset({"parameter"}),
}
"""Last words of names that are secret, and where; as the end of a longer word they mean nothing."""
PLAIN_ENDINGS = (
    "accesscontrolallowcredentials", "bostoken", "cachekey", "clstoken", "continuationtoken", "eostoken", "idempotencykey", "masktoken",
    "nexttoken", "padtoken", "pagetoken", "progresstoken", "septoken", "surrogatekey", "synctoken", "unktoken",
)  # fmt: skip
"""Ends of names that are no secret outside variables: pages of lists, progress, keys of caches, signs of a vocabulary."""
PLAIN_VARIABLES = frozenset({"OLDPWD", "PWD", "STEPENGINE_KEY_HOSTS"})
"""Variables that hold folders, and one that lists hosts."""
ONLY_LAST = frozenset({"auth", "pwd"})
"""Words that are ordinary in the middle of a variable: ``SSH_AUTH_SOCK`` is a socket."""
PROBABILITIES = frozenset({"logprob", "logProbability", "log_probability"})
"""Members next to which ``token`` is a piece of a text."""
MIN_TOKEN = 8
"""The shortest text, in characters, that is a secret in a member ``token``: shorter ones are pieces of texts."""

MEMBER_HINTS = (
    "authorization", "confirmation", "cookie", "credential", "credentials", "jwt", "key", "keys", "pass", "passcode", "passphrase", "passwd",
    "password", "passwords", "pwd", "secret", "secrets", "token",
)  # fmt: skip
"""The last words of all names of members that are secret."""
NAME_END = re.compile(r"[0-9_.\[\]-]*\\*\"")
"""What can be between the last word of a member's name and what follows the name."""
WORD = re.compile(r"[^\W_]+")
CASE_CHANGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
MOST = 200
"""How much of a name is read, in characters from its end."""


def is_secret_name(name: str, place: Place) -> bool:
    """Return True if the value of *name* in a *place* is secret."""
    return _is_secret(name[-MOST:], place)


def may_name_secret_member(text: str) -> bool:
    """Return True if the JSON *text* may hold a member with a secret name; cheap, and true too often."""
    if '"' not in text:
        return False
    lower = text.lower()
    return any(NAME_END.match(lower, end) for hint in MEMBER_HINTS for end in _find_ends(lower, hint))


def _find_ends(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        yield (end := start + len(part))
        start = text.find(part, end)


@lru_cache(maxsize=4_096)
def _is_secret(name: str, place: Place) -> bool:
    words = _split_words(name)
    if place != "variable":
        return not "".join(words).endswith(PLAIN_ENDINGS) and _ends_secret(words, place)
    if name.upper() in PLAIN_VARIABLES:
        return False
    # Commands do without a variable that only might be secret, so each word counts, not the last one alone.
    inner = [words[:end] for end in range(1, len(words)) if words[end - 1] not in ONLY_LAST]
    return any(_ends_secret(some, place) for some in (*inner, words))


def _split_words(name: str) -> list[str]:
    """Return the words of a name in lower case, without digits at its end."""
    words = [word.lower() for run in WORD.findall(name) for word in CASE_CHANGE.split(run)]
    while words and words[-1].isdigit():
        words.pop()
    return [*words[:-1], words[-1].rstrip("0123456789")] if words else []


def _ends_secret(words: list[str], place: Place) -> bool:
    joined = "".join(words)
    return bool(words) and (
        place in SECRET_WORDS.get(words[-1], ())
        or any(joined.endswith(end) for end, places in SECRET_ENDINGS.items() if place in places)
    )


def is_piece_of_text(name: str, members: Mapping[str, Any]) -> bool:
    """Return True if the member *name* of an object is a token of a text, not one that opens something."""
    if name != "token":
        return False
    value = members[name]
    return not PROBABILITIES.isdisjoint(members) or (
        isinstance(value, str) and (len(value) < MIN_TOKEN or " " in value)
    )
