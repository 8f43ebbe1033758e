"""
What went wrong at a provider, as one of our errors, and whether the same request may be sent again.

Errors of SDKs and of the HTTP library are read here and not kept: they hold the request with its key.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.models import ModelRequest
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow, ModelError, TruncatedReply
from stepengine.models._json import read_json
from stepengine.models.keys import Credentials, printable

INPUTS_AND_NEW = "`inputs` tokens + `max_new_tokens` must be <="
INVALID_SIGNATURE = "invalid_signature"
MALFORMED_CALL = "malformed_call"
GIVEN_UP = "given_up"
FORCED_THINKING = "forced_thinking"
LARGE_LIMIT = "large_limit"
GRAMMAR = "large_grammar"
UNKNOWN_FIELD = "unknown_field"
DANGLING_REASONING = "dangling_reasoning"
NO_SEARCH = "no_tool_search"
LOST_PROGRAM = "lost_program"
ONCE = frozenset(
    {
        *(DANGLING_REASONING, FORCED_THINKING, GIVEN_UP, GRAMMAR, INVALID_SIGNATURE, LARGE_LIMIT, MALFORMED_CALL),
        *(LOST_PROGRAM, NO_SEARCH, UNKNOWN_FIELD),
    }
)
"""Kinds of failure after which the same request is worth one more try and no third (reliability:MP60, ecosystem:EC97, ecosystem:EC109)."""

RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 498})
NOT_IMPLEMENTED = 501
"""The one status above 500 that says that another attempt fails as well."""
STATUS_OF_TYPE = {
    "DEADLINE_EXCEEDED": 504,
    "INTERNAL": 500,
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "UNAUTHENTICATED": 401,
    "UNAVAILABLE": 503,
    "accessDeniedException": 403,
    "api_error": 500,
    "authentication_error": 401,
    "billing_error": 402,
    "bio_policy": 400,
    "data_residency_mismatch": 400,
    "empty_image_file": 400,
    "failed_to_download_image": 400,
    "image_content_policy_violation": 400,
    "image_file_not_found": 400,
    "image_file_too_large": 400,
    "image_parse_error": 400,
    "image_too_large": 400,
    "image_too_small": 400,
    "insufficient_quota": 429,
    "internalServerException": 500,
    "internal_server_error": 500,
    "invalid_request_error": 400,
    "misalignment_policy_violation": 400,
    "modelStreamErrorException": 500,
    "modelTimeoutException": 408,
    "not_found_error": 404,
    "overloaded_error": 529,
    "permission_error": 403,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "request_too_large": 413,
    "server_error": 500,
    "serviceUnavailableException": 503,
    "service_unavailable": 503,
    "slow_down": 503,
    "throttlingException": 429,
    "timeout_error": 504,
    "unsupported_image_media_type": 400,
    "validationException": 400,
    "vector_store_timeout": 504,
}
NO_CREDIT = frozenset({"insufficient_quota", "billing_error", "billing_hard_limit_reached"})
OVERFLOW = {
    "prompt is too long": "Anthropic",
    "`max_tokens` exceed context limit": "Anthropic",
    "request_too_large": "Anthropic",
    "maximum context length": "OpenAI, OpenRouter, DeepSeek, vLLM",
    "context_length_exceeded": "OpenAI, Groq",
    "context length exceeded": "OpenAI-compatible servers",
    "context window": "OpenAI, MiniMax",
    "too many tokens": "Mistral, Bedrock",
    "exceeds the maximum number of tokens": "Gemini",
    "maximum prompt length is": "xAI",
    "reduce the length of the messages": "Groq",
    INPUTS_AND_NEW: "Together, TGI",
    "is longer than the model's context length": "Together",
    "tokens to keep from the initial prompt is greater than the context length": "LM Studio",
    "loaded with context length of only": "LM Studio",
    "is longer than the maximum model length": "vLLM",
    "exceeded model token limit": "Moonshot",
    "prompt exceeds max length": "Z.ai",
    "input is too long for requested model": "Bedrock",
    "prompt token count of": "Copilot",
    "range of input length should be": "Qwen",
    "exceeded max context length": "Ollama",
    "context size has been exceeded": "llama.cpp",
    "exceeds the available context": "llama.cpp",
    "exceeds the maximum allowed input length": "OpenRouter",
    "token limit reached": "OpenRouter, in a stream",
}
"""What says, in lower case, that a request is longer than the model's window, and who says so."""
TOO_LONG = frozenset({"context_length_exceeded", "too_many_prompt_tokens", "1261"})
"""The words for that beside a text: of OpenAI, Perplexity and Z.ai."""

WORDLESS = frozenset({"cerebras"})
"""Who refuses a request that is too long without a word (providers:PV84)."""

PER_MINUTE = "tokens per minute"
"""Groq's 413 for a request larger than a minute's allowance, which says nothing of the window."""

SIGNATURE = re.compile(
    r"signature|bound to a different conversation|encrypted_content|encrypted content|thinking.{0,40}block",
    re.IGNORECASE,
)
"""What providers say of thinking that they did not make or that was changed (reliability:MP60, ecosystem:EC98)."""

WRONG_KEY = re.compile(
    r"incorrect api key|invalid api key|api key not valid|api key not found|api key expired|api key was reported as leaked",
    re.IGNORECASE,
)
WRONG_KEY_WORDS = frozenset({"API_KEY_INVALID", "invalid_api_key"})
"""What is said of an invalid key with a status that says nothing of it: Google and xAI answer 400."""

FORCED = ("tool_choice forces tool use", "incompatible with thinking enabled")
"""What providers say, in lower case, of a demanded call beside thinking: Anthropic; Moonshot and DeepSeek."""

TOO_COMPLEX = (
    "compiled grammar is too large",
    "too many optional parameters",
    "schemas contains too many",
    "too many strict tools",
)
"""What Anthropic says, in lower case, of schemas that it cannot promise to keep to."""

DANGLING = re.compile(r"without its required '?(?:following item|reasoning)", re.IGNORECASE)
"""What OpenAI says of reasoning without the item that it was for, and of an item without its reasoning (providers:PV28)."""

UNKNOWN_SOURCES = re.compile(r"unknown parameter.{0,80}action\.sources", re.IGNORECASE)
"""What OpenAI's API said of a search that goes back with its sources, which its own types allow (providers:PV58)."""

AGAIN = re.compile(r"try again in (?:(\d{1,4})m)?(\d{1,6}(?:\.\d{1,6})?)(ms|s)\b", re.ASCII | re.IGNORECASE)
"""How Groq and OpenAI say in words how long to wait: ``5.289s``, ``250ms``, ``7m12.5s``."""

LOST = ("expired", "not found", "does not exist", "container_id is required")
"""What is said of a container in which a program can no longer be continued."""
UNSEARCHED = ("tool search is not supported", "tool_search", "defer_loading")
"""What is said, in lower case, of a search of tools that a model or a cloud does not have (providers:PV63, providers:PV64, providers:PV88)."""

LIMIT_AND_INPUT = "`max_tokens` exceed context limit: "
MOST_OUTPUT = "which is the maximum allowed number of output tokens"
"""What Anthropic says of a limit that does not fit beside the prompt, and of a limit that the model does not have."""
SMALL_LIMIT = 8_192
"""An output limit that every model of Anthropic takes."""

LATEST = (
    "Names that end in -latest are known to Google's newer API version: set GOOGLE_GENAI_API_VERSION=v1beta, or give "
    'GoogleProvider(api_version="v1beta").'
)

OVERFLOW_STATUS = frozenset({None, 400, 413, 422})
QUOTED_CHARS = 200
"""About two lines of an error that a library raised."""
MAX_MESSAGE_CHARS = 2_000
"""A provider's sentence and its details fit; a page of HTML from a proxy is cut."""
MAX_WORD_CHARS = 100
"""Kinds of errors are one to three words; anything may stand in their place."""
MAX_ID_CHARS = 200
"""Ids of requests have some dozen characters; a server may send any."""
MAX_ADDRESS_CHARS = 300
"""The host and the path of an endpoint fit, and the message stays readable."""
LOOPBACK = ("localhost", "127.", "[::1]")
BAD_REQUEST, NOT_KNOWN, NO_MONEY, FORBIDDEN, NOT_FOUND, TOO_LARGE = 400, 401, 402, 403, 404, 413
"""The statuses of HTTP that are told apart here."""
UNKNOWN_MODEL = "unknown_model"
AUTH = "auth"
NO_SUCH_MODEL = "provided model identifier is invalid"
"""What Bedrock says, in lower case, of a model that it does not have."""
AWS_TYPE = "x-amzn-errortype"
"""The header in which AWS says what kind of error a body tells of."""
SHOWN_MESSAGES = 3
"""The largest messages of a request that is too long: shortening one of them mostly mends it."""
BYTES_PER_TOKEN = 4
"""Of English text in UTF-8; it is used within a factor of two."""
HTTP_REDIRECT, HTTP_CLIENT_ERROR, HTTP_SERVER_ERROR = 300, 400, 500
"""The first statuses of each class of HTTP."""


@frozen(kw_only=True)
class RequestLabel:
    """
    What an error says about the request that failed.

    Attributes:
        provider: The provider's name.
        model: The canonical model string.
        credentials: Where the key came from; the key itself only to take it out of messages.
        size: Bytes of the request body.
        request: What was asked, for messages that name its largest parts.
        address: Where the provider was asked; ``""`` where nobody was.
    """

    provider: str
    model: str
    credentials: Credentials
    size: int = 0
    request: ModelRequest | None = attrs.field(default=None, repr=False)
    address: str = ""

    @property
    def asked(self) -> str:
        """The model, and where it was asked for, as messages say it."""
        return f"{self.model!r} at {self.address}" if self.address else repr(self.model)


def format_address(base_url: str) -> str:
    """Return an address as messages show it: without a user's name, password and query, which may be secrets."""
    scheme, _, rest = base_url.partition("://")
    place, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    return printable(f"{scheme}://{place.rpartition('@')[2]}{slash}{path}", MAX_ADDRESS_CHARS)


def error_from_sdk(error: Exception, sdk: Any, call: RequestLabel) -> BaseException:
    """
    Return what to raise for *error*, which the SDK module *sdk* or the HTTP library raised.

    What a transport raised on its own account (a cassette that has no such request) comes back as it is.
    """
    if isinstance(error, sdk.APIStatusError):
        response = error.response
        return error_from_body(response.content, response.status_code, response.headers, call)
    if isinstance(error, sdk.APIConnectionError):
        cause = error.__cause__
        return _connection_error(call, "connection", True, "") if cause is None else error_from_transport(cause, call)
    return error_from_transport(error, call)


def error_from_transport(error: BaseException, call: RequestLabel) -> BaseException:
    """Return what to raise for *error* of the HTTP library; the cause itself when it is no HTTP error at all."""
    import httpx2

    causes = _list_causes(error)
    # A cancellation among the causes is how the HTTP library ended an attempt that took too long.
    foreign = [cause for cause in causes if not isinstance(cause, Exception | asyncio.CancelledError)]
    if foreign:
        return foreign[0]
    if not isinstance(error, httpx2.HTTPError | httpx2.InvalidURL | httpx2.StreamError | OSError):
        return error
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return _connection_error(call, "tls", False, "its TLS certificate could not be verified")
    # Without a connection nothing was sent, so nothing was used.
    used = Usage() if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout) else None
    if isinstance(error, httpx2.PoolTimeout):
        return _connection_error(call, "pool_timeout", True, "no connection of the pool became free in time", used)
    if isinstance(error, httpx2.TimeoutException):
        return _connection_error(call, "timeout", True, f"it did not answer in time ({type(error).__name__})", used)
    if isinstance(error, httpx2.LocalProtocolError | httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return _connection_error(
            call, "request", False, "the request could not be sent: look at base_url and the key's characters"
        )
    detail = printable(f"{type(error).__name__}: {error}", MAX_MESSAGE_CHARS)
    is_here = call.address.partition("://")[2].startswith(LOOPBACK)
    refused = is_here and isinstance(error, httpx2.ConnectError)
    detail = f"{detail}; is a server running there?" if refused else detail
    return _connection_error(call, "connection", True, detail, used)


def _list_causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    node: BaseException | None = error
    while node is not None and node not in chain:
        chain.append(node)
        node = node.__cause__ or node.__context__
    return chain


def _connection_error(
    call: RequestLabel,
    kind: str,
    retryable: bool,  # noqa: FBT001 - private, named at the call
    detail: str,
    usage: Usage | None = None,
) -> ModelError:
    msg = f"{call.provider} could not be asked for {call.asked}: {detail or 'the connection failed'}"
    return ModelError(msg, retryable=retryable, kind=kind, usage=usage)


def error_from_body(
    content: bytes | Mapping[str, object],
    status: int | None,
    headers: Mapping[str, str],
    call: RequestLabel,
    usage: Usage | None = None,
) -> ModelError:
    """
    Return the error for an error *content*, of a response with an error status or inside a reply that began well.

    Args:
        content: The body, or the value that holds ``"error"``.
        status: The HTTP status; ``None`` inside a reply, where the error's own code or type stands for it.
        headers: Of the response.
        call: What was asked.
        usage: What the reply is known to have used before it failed.
    """
    problem = _with_kind_from_header(_parse_problem(content), headers.get(AWS_TYPE, ""))
    status = status if status is not None else problem.status
    message = _format_message(problem, status, call)
    fields: dict[str, Any] = {"status": status, "request_id": _find_any_request_id(headers, content), "kind": "http"}
    fields["usage"] = usage
    asked = parse_retry_after(headers)
    if status == BAD_REQUEST and _is_large_limit(problem.text, call):
        return ModelError(message, **{**fields, "kind": LARGE_LIMIT})
    if status in OVERFLOW_STATUS and _is_overflow(problem, status, call):
        return ContextOverflow(message, **{**fields, "kind": "context_overflow"})
    if kind := _failure_kind(problem, status):
        return ModelError(message, **{**fields, "kind": kind})
    retryable = _is_retryable(status, headers)
    return ModelError(message, retryable=retryable, retry_after=problem.wait if asked is None else asked, **fields)


def _failure_kind(problem: _Problem, status: int | None) -> str:
    """Return the error kind of a failure that is final or retried only once; ``""`` for any other."""
    if _is_wrong_key(problem, status):
        return AUTH
    if problem.words & NO_CREDIT or status == NO_MONEY:
        return "no_credit"
    if status != BAD_REQUEST:
        return ""
    if "tool_use_failed" in problem.words:
        return MALFORMED_CALL
    if _is_unknown_model(problem, status):
        return UNKNOWN_MODEL
    return _rejected_request_kind(problem.text)


def _is_overflow(problem: _Problem, status: int | None, call: RequestLabel) -> bool:
    """Return whether what was asked is longer than the model's window."""
    text = problem.text.casefold()
    if PER_MINUTE in text:
        return False
    if not text and status == BAD_REQUEST and call.provider in WORDLESS:
        return _may_be_too_long(call)
    if INPUTS_AND_NEW in text:
        # Said of a prompt that is too long, and of a max_tokens that alone is more than the window.
        limit = text.partition(INPUTS_AND_NEW)[2].split()[:1]
        most = call.request.settings.max_tokens if call.request is not None else None
        return not (most and limit and limit[0].rstrip(".,;").isdecimal() and most >= int(limit[0].rstrip(".,;")))
    return status == TOO_LARGE or not problem.words.isdisjoint(TOO_LONG) or any(words in text for words in OVERFLOW)


def _may_be_too_long(call: RequestLabel) -> bool:
    """Return whether a request may be longer than its model's window: its bytes tell that within a factor of two."""
    from stepengine.models.pricing import find_model_info

    window = find_model_info(call.model).context_window
    return window is None or call.size >= BYTES_PER_TOKEN / 2 * window


def _is_large_limit(text: str, call: RequestLabel) -> bool:
    """Return whether a default output limit was rejected where a small one would be accepted."""
    if call.request is None or call.request.settings.max_tokens is not None:
        return False
    if MOST_OUTPUT in text:
        return True
    prompt, *rest = text.partition(LIMIT_AND_INPUT)[2].split()[:5] or [""]
    if [*rest[:1], *rest[2:3]] != ["+", ">"]:
        return False
    window = rest[3].rstrip(".,;")
    return prompt.isdecimal() and window.isdecimal() and int(prompt) + SMALL_LIMIT <= int(window)


def _is_wrong_key(problem: _Problem, status: int | None) -> bool:
    """Return whether the key was refused: by 401, or by a 400 or 403 that says so."""
    said = not problem.words.isdisjoint(WRONG_KEY_WORDS) or WRONG_KEY.search(problem.text) is not None
    return status == NOT_KNOWN or (status in {None, BAD_REQUEST, FORBIDDEN} and said)


def _rejected_request_kind(text: str) -> str:
    """Return the kind of a rejection, by which a retry leaves a part out; ``""`` for an unknown one."""
    low = text.casefold()
    if DANGLING.search(text):
        return DANGLING_REASONING
    if SIGNATURE.search(text):
        return INVALID_SIGNATURE
    if any(words in low for words in FORCED):
        return FORCED_THINKING
    if any(words in low for words in TOO_COMPLEX):
        return GRAMMAR
    if any(words in low for words in UNSEARCHED):
        return NO_SEARCH
    if "container" in low and any(words in low for words in LOST):
        return LOST_PROGRAM
    return UNKNOWN_FIELD if UNKNOWN_SOURCES.search(text) else ""


def _is_unknown_model(problem: _Problem, status: int | None) -> bool:
    """Return whether a 400 says that the model is unknown, as elsewhere a 404 does."""
    return status == BAD_REQUEST and ("model_not_found" in problem.words or NO_SUCH_MODEL in problem.text.casefold())


@frozen
class _Problem:
    text: str
    words: frozenset[str]
    status: int | None
    wait: float | None = None


def _parse_problem(content: bytes | Mapping[str, object]) -> _Problem:
    if isinstance(content, bytes):
        try:
            value = read_json(content)
        except ValueError:
            value = content[: 2 * MAX_MESSAGE_CHARS].decode("utf-8", "replace")
    else:
        value = content
    if isinstance(value, list) and value:
        value = value[0]
    error = (value.get("error") or value) if isinstance(value, Mapping) else value
    if not isinstance(error, Mapping):
        return _Problem(printable(str(error), QUOTED_CHARS), frozenset(), None)
    details = error.get("details")
    code = details.get("error_code") if isinstance(details, Mapping) else None
    told = (
        [detail.get("reason") for detail in details if isinstance(detail, Mapping)] if isinstance(details, list) else []
    )
    reasons = [reason for reason in told if isinstance(reason, str) and reason in WRONG_KEY_WORDS]
    given = (error.get("type"), error.get("code"), error.get("status"), code, *reasons)
    words = [printable(str(word), MAX_WORD_CHARS) for word in given if word is not None]
    text = str(error.get("message") or error.get("detail") or error)
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    text = f"{text} ({raw})" if isinstance(raw, str) and raw else text
    failed = error.get("failed_generation")
    text = f"{text} (it had written {failed!r})" if isinstance(failed, str) and failed else text
    return _Problem(
        printable(text, MAX_MESSAGE_CHARS), frozenset(words), _status_from_codes(words), _parse_delay(details, text)
    )


def _with_kind_from_header(problem: _Problem, kind: str) -> _Problem:
    """Return *problem* with what a header says of its kind, such as ``ThrottlingException:http://...``."""
    word = printable(kind.partition(":")[0], MAX_WORD_CHARS)
    return attrs.evolve(problem, words=problem.words | {word}) if word else problem


def _parse_delay(details: object, words: str) -> float | None:
    """Return how long a body asks to wait: by Google's ``{"retryDelay": "13s"}`` (reliability:MP10), or else in *words*."""
    for detail in details if isinstance(details, list) else ():
        text = detail.get("retryDelay") if isinstance(detail, Mapping) else None
        if isinstance(text, str) and text.endswith("s") and text[:-1].replace(".", "", 1).isdecimal():
            seconds = float(text[:-1])
            return seconds if seconds < float("inf") else None
    said = AGAIN.search(words[:MAX_MESSAGE_CHARS])
    if said is None:
        return None
    minutes, count, unit = said.groups()
    return 60 * int(minutes or 0) + float(count) * (0.001 if unit.lower() == "ms" else 1.0)


def _status_from_codes(words: list[str]) -> int | None:
    for word in words:
        if word.isdecimal() and HTTP_REDIRECT <= int(word) <= 599:  # noqa: PLR2004
            return int(word)
    found = next((STATUS_OF_TYPE[word] for word in words if word in STATUS_OF_TYPE), None)
    return BAD_REQUEST if found is None and any(word.startswith("invalid_") for word in words) else found


def _format_message(problem: _Problem, status: int | None, call: RequestLabel) -> str:
    words = ", ".join(sorted(problem.words - {str(status)}))
    head = f"{call.provider} answered {status if status is not None else 'an error'}{f' ({words})' if words else ''}"
    # An unknown model is refused with a word about it; where there is no word, there may be no such API at all.
    is_redirect = status is not None and HTTP_REDIRECT <= status < HTTP_CLIENT_ERROR
    is_lost = is_redirect or (status == NOT_FOUND and not words)
    text = f"{head} for {call.asked if is_lost else repr(call.model)}: {problem.text}"
    if status == FORBIDDEN or _is_wrong_key(problem, status):
        return f"{text} {call.credentials.origin}"
    if status == NOT_FOUND or _is_unknown_model(problem, status):
        from stepengine.models.pricing import nearest_names

        near = nearest_names(call.model)
        text = f"{text} The nearest known names are {', '.join(near)}." if near else text
        return f"{text} {LATEST}" if call.model.endswith("-latest") and "API version v1," in problem.text else text
    if status == TOO_LARGE:
        return f"{text} The request had {call.size} bytes{_describe_largest_messages(call.request)}."
    if status is not None and HTTP_REDIRECT <= status < HTTP_CLIENT_ERROR:
        return f"{text} Redirects are not followed; give the final address as base_url."
    return text


def _describe_largest_messages(request: ModelRequest | None) -> str:
    """Return a clause that names the largest messages, so that somebody knows what to shorten."""
    if request is None:
        return ""
    from stepengine.data.codec import to_json
    from stepengine.data.json import compact

    sizes = [(len(compact(to_json(message))), index, message) for index, message in enumerate(request.all_messages)]
    sizes.sort(key=lambda entry: -entry[0])
    named = [
        f"number {index} ({message.role}{f', {name}' if (name := getattr(message, 'tool_name', '')) else ''}, {size} bytes)"
        for size, index, message in sizes[:SHOWN_MESSAGES]
    ]
    return f"; its largest messages are {', '.join(named)}" if named else ""


def _is_retryable(status: int | None, headers: Mapping[str, str]) -> bool:
    word = headers.get("x-should-retry", "").lower()
    if word in {"true", "false"}:
        return word == "true"
    if status is None:
        return True
    return status in RETRYABLE_STATUS or (status >= HTTP_SERVER_ERROR and status != NOT_IMPLEMENTED)


def find_request_id(headers: Mapping[str, str]) -> str | None:
    """Return the provider's id of a request from the headers of its response."""
    for name in ("request-id", "x-request-id", "x-generation-id", "x-amzn-requestid"):
        if headers.get(name):
            return printable(headers[name], MAX_ID_CHARS)
    return None


def _find_any_request_id(headers: Mapping[str, str], content: bytes | Mapping[str, object]) -> str | None:
    named = find_request_id(headers)
    if named is not None:
        return named
    found = content.get("request_id") if isinstance(content, Mapping) else None
    return printable(found, MAX_ID_CHARS) if isinstance(found, str) else None


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the provider asks to wait; ``None`` for nothing, garbage and negative numbers (reliability:MP10)."""
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        if not text:
            continue
        try:
            seconds = float(text) * factor
        except ValueError:
            seconds = _seconds_until(text)
        # A header is foreign text: `inf`, `nan` and negative numbers read as floats, and a wait of any of them would
        # never end or never happen. They count as nothing said, so the usual back-off holds (reliability:MP10). There
        # is no upper bound here: how long is too long is the retry policy's to say, which then fails the call and tells
        # the number.
        if 0 <= seconds < float("inf"):
            return seconds
    return None


def _seconds_until(text: str) -> float:
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, IndexError, OverflowError):
        return -1.0


def make_protocol_error(call: RequestLabel, what: str, usage: Usage | None = None) -> ModelError:
    """Return the error for a reply that breaks its protocol; sending the request again may help."""
    msg = f"{call.provider} broke its protocol in the reply of {call.model!r}: {printable(what, MAX_MESSAGE_CHARS)}"
    return ModelError(msg, retryable=True, kind="protocol", usage=usage)


def make_malformed_call_error(call: RequestLabel, what: str, usage: Usage | None = None) -> ModelError:
    """Return the error for a reply in which the model broke its own call; worth one more try (ecosystem:EC97)."""
    msg = f"{call.model!r} of {call.provider} wrote a tool call that its provider could not read: {printable(what, MAX_MESSAGE_CHARS)}"
    return ModelError(msg, retryable=True, kind=MALFORMED_CALL, usage=usage)


def make_unsigned_call_error(call: RequestLabel, what: str, usage: Usage | None = None) -> ModelError:
    """Return the error for a reply that wants signatures of earlier calls; asked again, made ones are sent (reliability:MP60)."""
    msg = f"{call.model!r} of {call.provider} misses a thought signature: {printable(what, MAX_MESSAGE_CHARS)}"
    return ModelError(msg, retryable=True, kind=INVALID_SIGNATURE, usage=usage)


def make_given_up_error(call: RequestLabel, what: str, usage: Usage | None = None) -> ModelError:
    """Return the error for a reply that its provider broke off without a reason of ours; worth one more try (ecosystem:EC97)."""
    msg = f"{call.provider} gave up on the reply of {call.model!r}: {printable(what, MAX_MESSAGE_CHARS)}"
    return ModelError(msg, retryable=True, kind=GIVEN_UP, usage=usage)


def make_unanswerable_error(call: RequestLabel, kinds: list[str], usage: Usage | None = None) -> ModelError:
    """Return the error for a reply that waits for an answer which nobody here can give."""
    named = ", ".join(repr(printable(kind, MAX_WORD_CHARS)) for kind in kinds)
    msg = (
        f"the reply of {call.model!r} from {call.provider} waits for its client: {named}; only calls of the agent's own "
        "tools are answered, so leave such tools out of ModelSettings(extra=...)"
    )
    return ModelError(msg, kind="unanswerable", usage=usage or Usage(at_least=True))


def make_truncated_error(call: RequestLabel, what: str, usage: Usage | None = None) -> TruncatedReply:
    """Return the error for a reply that ended before its terminal marker; nothing of it counts."""
    msg = f"the reply of {call.model!r} from {call.provider} ended early: {what}; nothing of it counts"
    return TruncatedReply(msg, retryable=True, kind="truncated", usage=usage)
