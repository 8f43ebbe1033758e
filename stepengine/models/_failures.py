"""
Convert failures of providers to our errors, and decide whether a request may be retried.

Errors of SDKs and of the HTTP library are parsed here and never stored, because they hold the request with its key.
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

from stepengine.data.json import compact
from stepengine.data.models import ModelRequest
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow, ModelError, TruncatedReply
from stepengine.models._json import parse_json
from stepengine.models.keys import Credentials, make_safe_excerpt

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
"""Kinds of failure after which a request is retried only once (reliability:MP60, ecosystem:EC97, ecosystem:EC109)."""

RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 498})
NOT_IMPLEMENTED = 501
"""The only status of at least 500 that is not retryable."""
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
"""Phrases, in lower case, in errors for a request above the context window, and the providers that use them."""
TOO_LONG = frozenset({"context_length_exceeded", "too_many_prompt_tokens", "1261"})
"""Error codes for the same, of OpenAI, Perplexity and Z.ai."""

WORDLESS = frozenset({"cerebras"})
"""Providers that reject such a request without a message (providers:PV84)."""

PER_MINUTE = "tokens per minute"
"""The phrase in Groq's 413 for a request above the rate limit, which is unrelated to the window."""

SIGNATURE = re.compile(
    r"signature|bound to a different conversation|encrypted_content|encrypted content|thinking.{0,40}block",
    re.IGNORECASE,
)
"""Phrases in errors for thinking of another provider, or changed thinking (reliability:MP60, ecosystem:EC98)."""

WRONG_KEY = re.compile(
    r"incorrect api key|invalid api key|api key not valid|api key not found|api key expired|api key was reported as leaked",
    re.IGNORECASE,
)
WRONG_KEY_WORDS = frozenset({"API_KEY_INVALID", "invalid_api_key"})
"""Error codes for an invalid key with status 400, which Google and xAI send."""

FORCED = ("tool_choice forces tool use", "incompatible with thinking enabled")
"""Phrases, in lower case, in errors for a forced call together with thinking: of Anthropic; of Moonshot and DeepSeek."""

TOO_COMPLEX = (
    "compiled grammar is too large",
    "too many optional parameters",
    "schemas contains too many",
    "too many strict tools",
)
"""Phrases, in lower case, in Anthropic's errors for schemas that are too complex to be strict."""

DANGLING = re.compile(r"without its required '?(?:following item|reasoning)", re.IGNORECASE)
"""A phrase in OpenAI's errors for reasoning without its following item, or an item without its reasoning (providers:PV28)."""

UNKNOWN_SOURCES = re.compile(r"unknown parameter.{0,80}action\.sources", re.IGNORECASE)
"""A phrase in OpenAI's error for a search that is sent back with its sources (providers:PV58)."""

AGAIN = re.compile(r"try again in (?:(\d{1,4})m)?(\d{1,6}(?:\.\d{1,6})?)(ms|s)\b", re.ASCII | re.IGNORECASE)
"""The time to wait in messages of Groq and OpenAI: ``5.289s``, ``250ms``, ``7m12.5s``."""

LOST = ("expired", "not found", "does not exist", "container_id is required")
"""Phrases in errors for a lost container of a program."""
UNSEARCHED = ("tool search is not supported", "tool_search", "defer_loading")
"""Phrases, in lower case, in errors for an unsupported tool search (providers:PV63, providers:PV64, providers:PV88)."""

LIMIT_AND_INPUT = re.compile(r"`max_tokens` exceed context limit: (\d+) \+ \d+ > (\d+)", re.ASCII)
MOST_OUTPUT = "which is the maximum allowed number of output tokens"
"""Phrases in Anthropic's errors for an output limit that exceeds the window with the prompt, or the model's maximum."""
SMALL_LIMIT = 8_192
"""An output limit that every model of Anthropic accepts."""

LATEST = (
    "Names that end in -latest require Google's API version v1beta: set GOOGLE_GENAI_API_VERSION=v1beta, or pass "
    'GoogleProvider(api_version="v1beta").'
)

OVERFLOW_STATUS = frozenset({None, 400, 413, 422})
QUOTED_CHARS = 200
"""About two lines of an error message."""
MAX_MESSAGE_CHARS = 2_000
"""Enough for a provider's message with details; a proxy's page of HTML is cut."""
MAX_WORD_CHARS = 100
"""Enough for error codes, which have one to three words."""
MAX_ID_CHARS = 200
"""Enough for request ids, which have some dozen characters."""
MAX_ADDRESS_CHARS = 300
"""Enough for the host and the path of an endpoint."""
LOOPBACK = ("localhost", "127.", "[::1]")
BAD_REQUEST, NOT_KNOWN, NO_MONEY, FORBIDDEN, NOT_FOUND, TOO_LARGE = 400, 401, 402, 403, 404, 413
"""HTTP statuses with special handling."""
UNKNOWN_MODEL = "unknown_model"
AUTH = "auth"
NO_SUCH_MODEL = "provided model identifier is invalid"
"""A phrase, in lower case, in Bedrock's error for an unknown model."""
AWS_TYPE = "x-amzn-errortype"
"""AWS's header with the type of an error."""
SHOWN_MESSAGES = 3
"""The number of listed messages of a request that is too long: mostly it helps to shorten one of the largest."""
BYTES_PER_TOKEN = 4
"""For English text in UTF-8; only used as an estimate."""
HTTP_REDIRECT, HTTP_CLIENT_ERROR, HTTP_SERVER_ERROR = 300, 400, 500
"""The first status of each class of HTTP statuses."""


@frozen(kw_only=True)
class RequestLabel:
    """
    The data of a request for error messages.

    Attributes:
        provider: The provider's name.
        model: The canonical model string.
        credentials: The key, for its redaction, and its source.
        size: Bytes of the request body.
        request: The request, for messages that list its largest parts.
        address: The URL of the provider; ``""`` if no request was sent.
    """

    provider: str
    model: str
    credentials: Credentials
    size: int = 0
    request: ModelRequest | None = attrs.field(default=None, repr=False)
    address: str = ""

    @property
    def model_and_address(self) -> str:
        """The model and its URL, for messages."""
        return f"{self.model!r} at {self.address}" if self.address else repr(self.model)


def format_address_without_secrets(base_url: str) -> str:
    """Return a URL for messages, without user name, password and query, which may be secrets."""
    scheme, _, rest = base_url.partition("://")
    place, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    return make_safe_excerpt(f"{scheme}://{place.rpartition('@')[2]}{slash}{path}", MAX_ADDRESS_CHARS)


def error_from_sdk(error: Exception, sdk: Any, call: RequestLabel) -> BaseException:
    """
    Return the error to raise for *error* of the SDK module *sdk* or the HTTP library.

    An error of the transport itself (such as a cassette without this request) is returned unchanged.
    """
    if isinstance(error, sdk.APIStatusError):
        return error_from_response(error.response, call)
    if isinstance(error, sdk.APIConnectionError):
        cause = error.__cause__
        return (
            _make_connection_error(call, "connection", True, "") if cause is None else error_from_transport(cause, call)
        )
    return error_from_transport(error, call)


def error_from_transport(error: BaseException, call: RequestLabel) -> BaseException:
    """
    Return the error to raise for *error* of the HTTP library; other errors are returned unchanged.

    A caller's transport may raise for an error status itself. The error then has the status of the response.
    """
    import httpx2

    if isinstance(error, httpx2.HTTPStatusError):
        return error_from_response(error.response, call)
    causes = _list_error_chain(error)
    # A cancellation among the causes is a timeout of the HTTP library.
    foreign = [cause for cause in causes if not isinstance(cause, Exception | asyncio.CancelledError)]
    if foreign:
        return foreign[0]
    if not isinstance(error, httpx2.HTTPError | httpx2.InvalidURL | httpx2.StreamError | OSError):
        return error
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return _make_connection_error(call, "tls", False, "its TLS certificate could not be verified")
    # Without a connection nothing was sent and billed.
    used = Usage() if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout) else None
    if isinstance(error, httpx2.PoolTimeout):
        return _make_connection_error(call, "pool_timeout", True, "no connection of the pool became free in time", used)
    if isinstance(error, httpx2.TimeoutException):
        return _make_connection_error(
            call, "timeout", True, f"it did not answer in time ({type(error).__name__})", used
        )
    if isinstance(error, httpx2.LocalProtocolError | httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return _make_connection_error(
            call, "request", False, "the request could not be sent; check base_url and the characters of the key"
        )
    detail = make_safe_excerpt(f"{type(error).__name__}: {error}", MAX_MESSAGE_CHARS)
    is_here = call.address.partition("://")[2].startswith(LOOPBACK)
    refused = is_here and isinstance(error, httpx2.ConnectError)
    detail = f"{detail}; is a server running there?" if refused else detail
    return _make_connection_error(call, "connection", True, detail, used)


def _list_error_chain(error: BaseException) -> list[BaseException]:
    """Return *error* and the chain of its causes, or contexts where there is no cause."""
    chain: list[BaseException] = []
    node: BaseException | None = error
    while node is not None and node not in chain:
        chain.append(node)
        node = node.__cause__ or node.__context__
    return chain


def _make_connection_error(
    call: RequestLabel,
    kind: str,
    retryable: bool,  # noqa: FBT001 - private, named at the call
    detail: str,
    usage: Usage | None = None,
) -> ModelError:
    """Return the error for a request that failed without a response."""
    msg = f"the request to {call.provider} for {call.model_and_address} failed: {detail or 'the connection failed'}"
    return ModelError(msg, retryable=retryable, kind=kind, usage=usage)


def error_from_response(response: Any, call: RequestLabel) -> ModelError:
    """Return the error for a response with an error status; an unread body counts as empty."""
    import httpx2

    try:
        content = response.content
    except httpx2.ResponseNotRead:
        content = b""
    return error_from_body(content, response.status_code, response.headers, call)


def error_from_body(
    content: bytes | Mapping[str, object],
    status: int | None,
    headers: Mapping[str, str],
    call: RequestLabel,
    usage: Usage | None = None,
) -> ModelError:
    """
    Return the error for an error body, or for an error inside a reply.

    Args:
        content: The body, or the value with the member ``"error"``.
        status: The HTTP status; ``None`` inside a reply, where it is derived from the error's code or type.
        headers: The headers of the response.
        call: The request.
        usage: The reported usage before the failure.
    """
    problem = _add_error_type_from_header(_parse_error_body(content), headers.get(AWS_TYPE, ""))
    status = status if status is not None else problem.status
    message = _format_error_message(problem, status, call)
    fields: dict[str, Any] = {
        "status": status,
        "request_id": _find_request_id_in_headers_or_body(headers, content),
        "kind": "http",
    }
    fields["usage"] = usage
    asked = parse_retry_after(headers)
    if status == BAD_REQUEST and _rejects_default_output_limit(problem.text, call):
        return ModelError(message, **{**fields, "kind": LARGE_LIMIT})
    if status in OVERFLOW_STATUS and _is_context_overflow(problem, status, call):
        return ContextOverflow(message, **{**fields, "kind": "context_overflow"})
    if kind := _find_specific_error_kind(problem, status):
        return ModelError(message, **{**fields, "kind": kind})
    retryable = _is_retryable(status, headers)
    return ModelError(message, retryable=retryable, retry_after=problem.wait if asked is None else asked, **fields)


def _find_specific_error_kind(problem: _Problem, status: int | None) -> str:
    """Return the error kind of a failure that is final or retried only once; ``""`` for others."""
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
    return _classify_avoidable_rejection(problem.text)


def _is_context_overflow(problem: _Problem, status: int | None, call: RequestLabel) -> bool:
    """Return whether the error means that the request exceeds the model's context window."""
    text = problem.text.casefold()
    if PER_MINUTE in text:
        return False
    if not text and status == BAD_REQUEST and call.provider in WORDLESS:
        return _may_exceed_context_window(call)
    if INPUTS_AND_NEW in text:
        # The same message reports a prompt that is too long, and a max_tokens above the window.
        limit = text.partition(INPUTS_AND_NEW)[2].split()[:1]
        most = call.request.settings.max_tokens if call.request is not None else None
        return not (most and limit and limit[0].rstrip(".,;").isdecimal() and most >= int(limit[0].rstrip(".,;")))
    return status == TOO_LARGE or not problem.words.isdisjoint(TOO_LONG) or any(words in text for words in OVERFLOW)


def _may_exceed_context_window(call: RequestLabel) -> bool:
    """Return whether a request may exceed the context window, estimated from its size within a factor of two."""
    from stepengine.models.pricing import get_model_info

    window = get_model_info(call.model).context_window
    return window is None or call.size >= BYTES_PER_TOKEN / 2 * window


def _rejects_default_output_limit(text: str, call: RequestLabel) -> bool:
    """Return whether the default output limit was rejected, and a smaller one would be accepted."""
    if call.request is None or call.request.settings.max_tokens is not None:
        return False
    if MOST_OUTPUT in text:
        return True
    found = LIMIT_AND_INPUT.search(text)
    return found is not None and int(found[1]) + SMALL_LIMIT <= int(found[2])


def _is_wrong_key(problem: _Problem, status: int | None) -> bool:
    """Return whether the key was rejected: status 401, or 400 or 403 with such a message."""
    said = not problem.words.isdisjoint(WRONG_KEY_WORDS) or WRONG_KEY.search(problem.text) is not None
    return status == NOT_KNOWN or (status in {None, BAD_REQUEST, FORBIDDEN} and said)


def _classify_avoidable_rejection(text: str) -> str:
    """Return the kind of a rejection that a changed request can avoid; ``""`` for others."""
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
    return status == BAD_REQUEST and ("model_not_found" in problem.words or NO_SUCH_MODEL in problem.text.casefold())


@frozen
class _Problem:
    text: str
    words: frozenset[str]
    status: int | None
    wait: float | None = None


def _parse_error_body(content: bytes | Mapping[str, object]) -> _Problem:
    """Return message, codes, status and pause of an error body, in the formats of all providers."""
    if isinstance(content, bytes):
        try:
            value = parse_json(content)
        except ValueError:
            value = content[: 2 * MAX_MESSAGE_CHARS].decode("utf-8", "replace")
    else:
        value = content
    if isinstance(value, list) and value:
        value = value[0]
    error = (value.get("error") or value) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and isinstance(error, str) and isinstance(value.get("message"), str):
        error = value  # such as {"error": "Bad Request", "message": "..."}
    if not isinstance(error, Mapping):
        return _Problem(make_safe_excerpt(str(error), QUOTED_CHARS), frozenset(), None)
    details = error.get("details")
    code = details.get("error_code") if isinstance(details, Mapping) else None
    told = (
        [detail.get("reason") for detail in details if isinstance(detail, Mapping)] if isinstance(details, list) else []
    )
    reasons = [reason for reason in told if isinstance(reason, str) and reason in WRONG_KEY_WORDS]
    given = (error.get("type"), error.get("code"), error.get("status"), code, *reasons)
    words = [make_safe_excerpt(str(word), MAX_WORD_CHARS) for word in given if word is not None]
    text = str(error.get("message") or error.get("detail") or error)
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    text = f"{text} ({raw})" if isinstance(raw, str) and raw else text
    failed = error.get("failed_generation")
    text = f"{text} (the model had written {failed!r})" if isinstance(failed, str) and failed else text
    return _Problem(
        make_safe_excerpt(text, MAX_MESSAGE_CHARS),
        frozenset(words),
        _status_from_codes(words),
        _parse_retry_delay(details, text),
    )


def _add_error_type_from_header(problem: _Problem, header_value: str) -> _Problem:
    """Return *problem* with the error type of a header such as ``ThrottlingException:http://...`` added to its words."""
    word = make_safe_excerpt(header_value.partition(":")[0], MAX_WORD_CHARS)
    return attrs.evolve(problem, words=problem.words | {word}) if word else problem


def _parse_retry_delay(details: object, message: str) -> float | None:
    """Return the seconds to wait from Google's ``{"retryDelay": "13s"}``, else from *message*; ``None`` if neither has them."""
    # (reliability:MP10)
    for detail in details if isinstance(details, list) else ():
        text = detail.get("retryDelay") if isinstance(detail, Mapping) else None
        if isinstance(text, str) and text.endswith("s") and text[:-1].replace(".", "", 1).isdecimal():
            seconds = float(text[:-1])
            return seconds if seconds < float("inf") else None
    said = AGAIN.search(message[:MAX_MESSAGE_CHARS])
    if said is None:
        return None
    minutes, count, unit = said.groups()
    return 60 * int(minutes or 0) + float(count) * (0.001 if unit.lower() == "ms" else 1.0)


def _status_from_codes(codes: list[str]) -> int | None:
    """Return the HTTP status among error *codes*, else the status of a known code; ``None`` if all are unknown."""
    for word in codes:
        if word.isdecimal() and HTTP_REDIRECT <= int(word) <= 599:  # noqa: PLR2004
            return int(word)
    found = next((STATUS_OF_TYPE[word] for word in codes if word in STATUS_OF_TYPE), None)
    return BAD_REQUEST if found is None and any(word.startswith("invalid_") for word in codes) else found


def _format_error_message(problem: _Problem, status: int | None, call: RequestLabel) -> str:
    """Return the message for an error, with a hint for a rejected key, an unknown model, a large request or a redirect."""
    words = ", ".join(sorted(problem.words - {str(status)}))
    head = f"{call.provider} answered {status if status is not None else 'an error'}{f' ({words})' if words else ''}"
    # An error without a code may mean that the server has no such API, so its URL is shown.
    is_redirect = status is not None and HTTP_REDIRECT <= status < HTTP_CLIENT_ERROR
    is_lost = is_redirect or (status == NOT_FOUND and not words)
    text = f"{head} for {call.model_and_address if is_lost else repr(call.model)}: {problem.text}"
    if status == FORBIDDEN or _is_wrong_key(problem, status):
        return f"{text} {call.credentials.source_sentence}"
    if status == NOT_FOUND or _is_unknown_model(problem, status):
        from stepengine.models.pricing import find_nearest_names

        near = find_nearest_names(call.model)
        text = f"{text} The nearest known names are {', '.join(near)}." if near else text
        return f"{text} {LATEST}" if call.model.endswith("-latest") and "API version v1," in problem.text else text
    if status == TOO_LARGE:
        return f"{text} The request had {call.size} bytes{_describe_largest_messages(call.request)}."
    if status is not None and HTTP_REDIRECT <= status < HTTP_CLIENT_ERROR:
        return f"{text} Redirects are not followed; pass the final URL as base_url."
    return text


def _describe_largest_messages(request: ModelRequest | None) -> str:
    """Return a clause that names the largest messages of a request, to shorten; ``""`` without a request or messages."""
    if request is None:
        return ""
    from stepengine.data.codec import to_json

    sizes = [(len(compact(to_json(message))), index, message) for index, message in enumerate(request.all_messages)]
    sizes.sort(key=lambda entry: -entry[0])
    named = [
        f"number {index} ({message.role}{f', {name}' if (name := getattr(message, 'tool_name', '')) else ''}, {size} bytes)"
        for size, index, message in sizes[:SHOWN_MESSAGES]
    ]
    return f"; its largest messages are {', '.join(named)}" if named else ""


def _is_retryable(status: int | None, headers: Mapping[str, str]) -> bool:
    """Return whether an error is retryable: by the header ``x-should-retry``, else by the status; true without a status."""
    word = headers.get("x-should-retry", "").lower()
    if word in {"true", "false"}:
        return word == "true"
    if status is None:
        return True
    return status in RETRYABLE_STATUS or (status >= HTTP_SERVER_ERROR and status != NOT_IMPLEMENTED)


def find_request_id(headers: Mapping[str, str]) -> str | None:
    """Return the provider's id of a request from the headers of its response; ``None`` without one."""
    for name in ("request-id", "x-request-id", "x-generation-id", "x-amzn-requestid"):
        if headers.get(name):
            return make_safe_excerpt(headers[name], MAX_ID_CHARS)
    return None


def _find_request_id_in_headers_or_body(
    headers: Mapping[str, str], content: bytes | Mapping[str, object]
) -> str | None:
    """Return the provider's id of a request from the headers, else from the body; ``None`` if neither has it."""
    named = find_request_id(headers)
    if named is not None:
        return named
    found = content.get("request_id") if isinstance(content, Mapping) else None
    return make_safe_excerpt(found, MAX_ID_CHARS) if isinstance(found, str) else None


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait from the headers; ``None`` if they are missing, invalid or negative."""
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        if not text:
            continue
        try:
            seconds = float(text) * factor
        except ValueError:
            seconds = _seconds_until_http_date(text)
        # `inf`, `nan` and negative numbers parse as floats, too. They are ignored, so the usual back-off applies
        # (reliability:MP10). There is no upper limit here; the retry policy has one.
        if 0 <= seconds < float("inf"):
            return seconds
    return None


def _seconds_until_http_date(text: str) -> float:
    """Return the seconds until an HTTP date, 0 for a past date, -1 for an invalid *text*."""
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, IndexError, OverflowError):
        return -1.0


def make_protocol_error(call: RequestLabel, reason: str, usage: Usage | None = None) -> ModelError:
    """Return the retryable error for a reply that violates its protocol."""
    msg = f"{call.provider} violated its protocol in the reply of {call.model!r}: {make_safe_excerpt(reason, MAX_MESSAGE_CHARS)}"
    return ModelError(msg, retryable=True, kind="protocol", usage=usage)


def make_malformed_call_error(call: RequestLabel, reason: str, usage: Usage | None) -> ModelError:
    """Return the retryable error for a malformed tool call of the model."""
    # (ecosystem:EC97)
    msg = (
        f"{call.model!r} of {call.provider} wrote a malformed tool call: {make_safe_excerpt(reason, MAX_MESSAGE_CHARS)}"
    )
    return ModelError(msg, retryable=True, kind=MALFORMED_CALL, usage=usage)


def make_unsigned_call_error(call: RequestLabel, reason: str, usage: Usage | None) -> ModelError:
    """Return the retryable error for missing signatures of earlier calls; the retry sends placeholders."""
    # (reliability:MP60)
    msg = f"{call.model!r} of {call.provider} requires a missing thought signature: {make_safe_excerpt(reason, MAX_MESSAGE_CHARS)}"
    return ModelError(msg, retryable=True, kind=INVALID_SIGNATURE, usage=usage)


def make_aborted_reply_error(call: RequestLabel, reason: str, usage: Usage | None) -> ModelError:
    """Return the retryable error for a reply that its provider aborted."""
    # (ecosystem:EC97)
    msg = f"{call.provider} aborted the reply of {call.model!r}: {make_safe_excerpt(reason, MAX_MESSAGE_CHARS)}"
    return ModelError(msg, retryable=True, kind=GIVEN_UP, usage=usage)


def make_unanswerable_error(call: RequestLabel, action_types: list[str], usage: Usage | None) -> ModelError:
    """Return the error for a reply that waits for actions of the client, of the *action_types*, that the engine does not support."""
    named = ", ".join(repr(make_safe_excerpt(kind, MAX_WORD_CHARS)) for kind in action_types)
    msg = (
        f"the reply of {call.model!r} from {call.provider} needs an action of its client: {named}. The engine answers only calls "
        "of the agent's own tools; remove other tools from ModelSettings(extra=...)"
    )
    return ModelError(msg, kind="unanswerable", usage=usage or Usage(at_least=True))


def make_truncated_error(call: RequestLabel, reason: str, usage: Usage | None) -> TruncatedReply:
    """Return the retryable error for a reply that ended before its terminal marker."""
    msg = f"the reply of {call.model!r} from {call.provider} ended early: {reason}; it is discarded"
    return TruncatedReply(msg, retryable=True, kind="truncated", usage=usage)
