"""
Names of secrets: one list for headers, parameters, members of JSON and variables.

Case, separators and digits at the end do not matter, and only the end of a name decides: ``DB_PASS``, ``dbPass`` and ``X-Db-Pass`` are
secret by their end. There are three kinds of names. A credential differs between machines. A doubtful name, such as ``key`` in an
address, may be an API key or the name of an entry. For a hint, such as ``sort_key`` or ``zip_code``, the value decides.
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
            "accesskey", "accountkey", "apikey", "apikeys", "applicationkey", "appkey", "authkey", "authorization", "consumerkey",
            "credential", "credentials", "creds", "customerkey", "encryptionkey", "functionskey", "jwt", "licensekey", "masterkey", "passcode",
            "passkey", "passphrase", "passwd", "password", "passwordconfirmation", "passwords", "presharedkey", "privatekey", "pwd", "secret",
            "secretbinary", "secretkey", "secrets", "secretstring", "sharedkey", "signingkey", "subscriptionkey", "token", "writekey",
        ),
        EVERYWHERE,
    ),
    **dict.fromkeys(
        (
            "adminpass", "basicpass", "dbpass", "emailpass", "ftppass", "imappass", "ldappass", "loginpass", "mailpass", "mysqlpass",
            "pgpass", "postgrespass", "proxypass", "redispass", "rootpass", "smtppass", "sudopass", "userpass",
        ),
        EVERYWHERE,
    ),
    **dict.fromkeys(("authentication", "authenticationinfo", "signature"), frozenset({"header"})),
    **dict.fromkeys(("amzsignature", "googsignature", "idtokenhint", "onetimecode"), IN_REQUESTS),
    "assertion": frozenset({"header"}),
    "clientassertion": IN_REQUESTS,
    "cookie": IN_REQUESTS | {"member"},
}  # fmt: skip
"""How names of credentials end, in lower case and without separators, and where."""
SECRET_WORDS: dict[str, frozenset[Place]] = {
    **dict.fromkeys(("auth", "bearer", "csrf", "pat", "xsrf"), frozenset({"header"})),
    "otp": IN_REQUESTS,
}
"""The last words of names of credentials, with the places; the end of a longer word does not count."""
VALUE_WORDS = frozenset({"plain", "plaintext", "raw", "value"})
"""Last words of names for a value as such, as in ``secretValue``, and names of members with the value."""
VARIABLE_WORDS = frozenset({"auth", "bearer", "cookie", "key", "pass", "pat"})
"""Last words of names of possibly secret variables. Commands do not receive them, since few commands need them."""
DOUBTFUL: dict[str, frozenset[Place]] = {
    "key": IN_REQUESTS,
    "pass": EVERYWHERE,
    **dict.fromkeys(
        ("assertion", "auth", "authentication", "bearer", "pat", "sig", "signature"), frozenset({"parameter"})
    ),
}
"""Whole names of either credentials or ordinary values. A value that is not random, as in ``auth=none``, is compared in a replay."""
ONE_SESSION: dict[str, frozenset[Place]] = {
    **dict.fromkeys(("authcode", "authorizationcode", "code", "verificationcode"), frozenset({"parameter"})),
    "sessid": IN_REQUESTS,
    **dict.fromkeys(("session", "sessionid"), frozenset({"header"})),
}
"""Ends of names of values that a server issues for one session. A replay repeats them, so they are always compared. ``code`` is a whole name."""
HINTS: dict[str, frozenset[Place]] = {
    **dict.fromkeys(("key", "pat"), IN_REQUESTS),
    "pass": EVERYWHERE,
    **dict.fromkeys(
        ("assertion", "auth", "authentication", "bearer", "code", "sessionid", "sig", "signature"),
        frozenset({"parameter"}),
    ),
}
"""How names end of which only a random value is a secret, as in ``maps_key``, and an ordinary one is not, as in ``sort_key``."""
FLAGS = frozenset({
    "allow", "disable", "enable", "force", "forgot", "generate", "has", "hide", "include", "is", "manage", "no", "remove", "require",
    "requires", "rotate", "show", "supports", "use", "validate", "with",
})  # fmt: skip
"""First words of names of flags, such as ``has_refresh_token``."""
PAGE_WORDS = frozenset({"next", "prev", "previous", "starting"})
"""First words of names of tokens for positions in a list."""
PLAIN_ENDINGS = (
    "accesscontrolallowcredentials", "backwardtoken", "bostoken", "cachekey", "changetoken", "checkpointtoken", "clstoken",
    "continuationtoken", "cursortoken", "deltatoken", "eostoken", "forwardtoken", "idempotencykey", "locktoken", "masktoken",
    "nexttoken", "padtoken", "pagetoken", "paginationtoken", "previoustoken", "progresstoken", "publickey", "resumetoken", "septoken",
    "sequencetoken", "startingtoken", "surrogatekey", "synctoken", "unktoken", "updatetoken", "versiontoken", "websocketkey",
)  # fmt: skip
"""Ends of names that are no secret outside variables: pages of lists, versions, keys of caches, signs of a vocabulary."""
PLAIN_VARIABLES = frozenset({"OLDPWD", "PWD", "STEPENGINE_KEY_HOSTS"})
"""Variables with folders, and one with a list of hosts."""
ONLY_LAST = frozenset({"auth", "pwd"})
"""Words that are ordinary in the middle of a variable: ``SSH_AUTH_SOCK`` is a socket."""
PROBABILITIES = frozenset({"logprob", "logProbability", "log_probability"})
"""Members next to which ``token`` is a piece of a text."""
MIN_TOKEN_CHARS = 8
"""The shortest text that is a secret in a member ``token``: shorter ones are pieces of texts."""

MEMBER_HINTS = (
    "authorization", "binary", "confirmation", "cookie", "credential", "creds", "jwt", "key", "pass", "pwd", "secret", "string", "token",
)  # fmt: skip
"""The last words of all names of members that are secret, without ``MEMBER_ENDINGS``."""
MEMBER_ENDINGS = re.compile(rf"(?:code|phrase|wd|words?|s)?(?:{'|'.join(sorted(VALUE_WORDS))})*\"".encode())
"""The letters between the last word of a member's name and the end of the name."""
NO_LETTERS = bytes(set(range(256)) - set(b'abcdefghijklmnopqrstuvwxyz"'))
"""The bytes that do not matter in a name, and so are removed before a search."""
ESCAPED_ASCII = re.compile(r"\\u(00[0-7][0-9a-fA-F]|212[aA])")
"""An escaped character of ASCII, or the Kelvin sign, which is ``k`` in lower case."""
ESCAPED_OTHERS = re.compile(r"(?:\\u(?!00[0-7]|212[aA])[0-9a-fA-F]{4})+")
ESCAPED_QUOTE, ESCAPED_BACKSLASH = "\x00", "\x01"
"""Control characters, which JSON text does not contain. They distinguish a quote inside a string from the end of the string."""
WORD = re.compile(r"[^\W_]+")
CASE_CHANGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
MAX_NAME_CHARS = 200
"""Only the end of a name is read: it decides, and a name may be as long as a document."""


Kind: TypeAlias = Literal["credential", "doubtful", "one session", "hint"]
"""The information in a name about its value."""
RANDOM = re.compile(r"[A-Za-z0-9+/=_.~:-]{16,}")
"""The characters of keys, signatures and identifiers."""


def is_secret_name(name: str, place: Place) -> bool:
    """Return True if *name* in a *place* makes every value secret."""
    return _classify_name(name[-MAX_NAME_CHARS:], place) not in (None, "hint")


def is_secret(name: str, value: str, place: Place) -> bool:
    """Return True if *value* is secret because of its *name* in a *place*."""
    kind = _classify_name(name[-MAX_NAME_CHARS:], place)
    return kind is not None and (kind != "hint" or looks_random(value))


def may_differ_between_machines(name: str, value: str, place: Place) -> bool:
    """Return True if *name*, or *name* and *value*, mark a credential, whose value may differ on another machine."""
    kind = _classify_name(name[-MAX_NAME_CHARS:], place)
    return kind == "credential" or (kind == "doubtful" and looks_random(value))


def is_credential_cookie(name: str, value: str) -> bool:
    """Return True if a cookie is a credential; others, such as ``theme``, distinguish requests."""
    return (
        any(word.endswith(COOKIE_ENDINGS) for word in _split_words(name))
        or _classify_name(name[-MAX_NAME_CHARS:], "header") is not None
        or looks_random(value)
    )


COOKIE_ENDINGS = ("auth", "csrf", "jwt", "login", "sess", "session", "sid", "sso", "ticket", "token", "xsrf")
"""Ends of words in the names of credential cookies."""


def looks_random(value: str) -> bool:
    """Return True if *value* is long and has both letters and digits, as keys have."""
    return (
        RANDOM.fullmatch(value) is not None
        and any(char.isdigit() for char in value)
        and any(char.isalpha() for char in value)
    )


def may_name_secret_member(text: str) -> bool:
    """Return True if the JSON *text* may contain a member with a secret name; a fast test that may return True for a clean text."""
    return any(may_end_secret_name(decoded) for decoded in decode_json_levels(text))


def decode_json_levels(text: str) -> Iterator[str]:
    """Yield JSON *text* with decoded escapes, and again for the JSON inside its strings, as long as there are quotes."""
    while '"' in text:
        decoded = _decode_escapes(text) if "\\" in text else text
        yield decoded
        is_nested = ESCAPED_QUOTE in decoded
        text = decoded.replace(ESCAPED_QUOTE, '"').replace(ESCAPED_BACKSLASH, "\\") if is_nested else ""


def _decode_escapes(text: str) -> str:
    """Return JSON *text* with decoded escapes: those of quotes and backslashes as control characters, and those outside ASCII as blanks."""
    # Replacements of fixed texts take a fraction of the time of an expression.
    text = text.replace("\\\\", ESCAPED_BACKSLASH).replace('\\"', ESCAPED_QUOTE).replace("\\/", "/")
    for escape in ("\\b", "\\f", "\\n", "\\r", "\\t"):
        text = text.replace(escape, "\n")
    return ESCAPED_ASCII.sub(_decode_escaped_char, ESCAPED_OTHERS.sub(" ", text)) if "\\u" in text else text


def _decode_escaped_char(escape: re.Match[str]) -> str:
    char = chr(int(escape[1], 16))
    return {'"': ESCAPED_QUOTE, "\\": ESCAPED_BACKSLASH}.get(char, max(char, " "))


def may_end_secret_name(text: str) -> bool:
    """Return True if the letters before a quote in *text* may end a secret name; other characters do not matter in a name."""
    letters = text.lower().encode(errors="ignore").translate(None, NO_LETTERS)
    return any(
        MEMBER_ENDINGS.match(letters, end)
        for hint in MEMBER_HINTS
        for end in _find_occurrence_ends(letters, hint.encode())
    )


def _find_occurrence_ends(text: bytes, word: bytes) -> Iterator[int]:
    """Yield the position after each occurrence of *word* in *text*."""
    start = text.find(word)
    while start >= 0:
        yield (end := start + len(word))
        start = text.find(word, end)


@lru_cache(maxsize=4_096)  # the names of an environment and of the members of all messages, at 100 bytes each
def _classify_name(name: str, place: Place) -> Kind | None:
    """Return how surely the value of a name in a *place* is secret; ``None`` if it is not."""
    words = _split_words(name)
    if place != "variable":
        return _classify_non_variable(words, place)
    if name.upper() in PLAIN_VARIABLES:
        return None
    # Commands do without a variable that only might be secret, so each word counts, not the last one alone.
    inner = [words[:end] for end in range(1, len(words)) if words[end - 1] not in ONLY_LAST]
    return "credential" if any(_has_secret_ending(some, place) for some in (*inner, words)) else None


def _classify_non_variable(words: list[str], place: Place) -> Kind | None:
    joined = "".join(words)
    if not words or joined.endswith(PLAIN_ENDINGS) or (words[0] in FLAGS and len(words) > 1):
        return None
    if words[0] in PAGE_WORDS and words[-1] == "token":
        return None
    if len(words) > 1 and words[-1] in VALUE_WORDS:
        return "credential" if _classify_non_variable(words[:-1], place) == "credential" else None
    whole = joined if words[0] != "x" or len(words) == 1 else joined[1:]
    if _has_secret_ending(words, place):
        return "credential"
    if place in DOUBTFUL.get(whole, ()):
        return "doubtful"
    if any(
        whole == end or (end != "code" and joined.endswith(end))
        for end, places in ONE_SESSION.items()
        if place in places
    ):
        return "one session"
    if any(joined.endswith(end) for end, places in HINTS.items() if place in places):
        return "hint"
    return None


def _split_words(name: str) -> list[str]:
    """Return the words of a name in lower case, without digits at its end."""
    words = [word.lower() for run in WORD.findall(name) for word in CASE_CHANGE.split(run)]
    while words and words[-1].isdigit():
        words.pop()
    return [*words[:-1], words[-1].rstrip("0123456789")] if words else []


def _has_secret_ending(words: list[str], place: Place) -> bool:
    """Return whether the last words of a name mark a secret in a *place*."""
    joined = "".join(words)
    return bool(words) and (
        place in SECRET_WORDS.get(words[-1], ())
        or (place == "variable" and words[-1] in VARIABLE_WORDS)
        or any(joined.endswith(end) for end, places in SECRET_ENDINGS.items() if place in places)
    )


def is_text_token_member(name: str, members: Mapping[str, Any]) -> bool:
    """Return True if the member *name* of an object is a token of a text, not one that opens something."""
    if name != "token":
        return False
    value = members[name]
    return not PROBABILITIES.isdisjoint(members) or (
        isinstance(value, str) and (len(value) < MIN_TOKEN_CHARS or " " in value)
    )
