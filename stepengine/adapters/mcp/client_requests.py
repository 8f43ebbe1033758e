"""
Requests of an MCP server during a call: elicitation becomes a question of the run, sampling a call of its model.

Requests and answers are JSON, so that a replay needs no package.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import date, datetime
from typing import Any, TypeAlias

from attrs import frozen

from stepengine.adapters.mcp._caps import (
    FIELDS,
    MAX_ATTEMPTS,
    MAX_ROUNDS,
    OPTIONS,
    QUESTION_CHARS,
    REQUEST_BYTES,
    SAMPLED_TOKENS,
    STUBS_BYTES,
)
from stepengine.data.json import compact, freeze
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.models import ModelSettings, StopReason
from stepengine.data.visible import cut_after, visible
from stepengine.data.yields import Ask, Complete
from stepengine.errors import DataError, StepEngineError, ToolError
from stepengine.runtime.logs import LOGGER

IsOpen: TypeAlias = Callable[[], Generator[Any, Any, bool]]
"""Asks, as a recorded effect, whether the server still waits for answers."""
DECLINED: Mapping[str, Any] = {"action": "decline"}
NO_SAMPLING: Mapping[str, Any] = {"error": "This client calls no model for a server"}
STOP_REASONS = {
    StopReason.END_TURN: "endTurn",
    StopReason.MAX_TOKENS: "maxTokens",
    StopReason.STOP_SEQUENCE: "stopSequence",
    StopReason.TOOL_USE: "toolUse",
}
YES, NO, DEFAULT = "yes", "no", "default"
TOO_LARGE = "too_large"
"""The only member in the record of a request that is too large: its answer, for which no one is asked."""
SHOWN_CHOICES = 20
"""How many choices an error message names: a person reads some dozen at most."""
FORMATS = {
    "email": "an e-mail address",
    "uri": "an address such as https://example.com",
    "date": "a date such as 2026-07-28",
    "date-time": "a time such as 2026-07-28T09:30:00+00:00",
}


AskPerson: TypeAlias = Callable[[Ask], Generator[Any, Any, str]]
"""Asks one question of a form; raises ``_Closed`` if the server has stopped waiting."""


class _Closed(Exception):
    """The server does not wait for the answers any more."""


class ServerQuestions:
    """
    Answers the requests of one server: forms, addresses, model calls and roots.

    Args:
        server: Its name, which every question says.
        roots: The URLs of the folders that the server receives as roots.
        elicitation: Whether it may ask people.
        sampling: Whether it may have the run's model called.
    """

    def __init__(
        self, server: str, roots: Sequence[str] = (), *, elicitation: bool = True, sampling: bool = False
    ) -> None:
        self._server = server
        self._roots = roots
        self._elicitation = elicitation
        self._sampling = sampling
        self.rounds = MAX_ROUNDS

    def answer_requests(
        self, requests: Mapping[str, Any], is_open: IsOpen | None = None
    ) -> Generator[Any, Any, dict[str, Any]]:
        """
        Return the answer to each request as JSON, by the key of the request.

        If a server may stop waiting, *is_open* finds that out before a person is asked a further question.
        """
        answers: dict[str, object] = {}
        for key, request in sorted(requests.items()):
            params = request.get("params", request)
            # A request that came over the wire always has another member.
            if set(request) == {TOO_LARGE}:
                answers[key] = request[TOO_LARGE]
                continue
            if request.get("method") == "roots/list":
                # Which they are, and whether any are told, stands in no record: another machine has others.
                answers[key] = {"roots": True}
            elif "messages" in params:
                # A server may ask for what the greeting did not offer, so the options are checked here, too.
                answers[key] = (yield from self._call_model(params)) if self._sampling else NO_SAMPLING
            elif not self._elicitation and ("requestedSchema" in params or "url" in params):
                answers[key] = DECLINED
            elif "requestedSchema" in params:
                answers[key] = yield from self._answer_form(params, is_open)
            elif "url" in params:
                answers[key] = yield from self._ask_to_open_address(params)
            else:
                answers[key] = {"error": "This client does not answer such requests"}
        return answers

    # --- people ---------------------------------------------------------------------------------------------------------

    def _make_question_text(self, *parts: str) -> str:
        """Return the text of a question with the name of the server, cut and without hidden characters."""
        text = visible(" - ".join([part for part in parts if part]))
        text = cut_after(text, QUESTION_CHARS)
        return f"The MCP server {self._server} asks: {text}"

    def _answer_form(self, params: Mapping[str, Any], is_open: IsOpen | None) -> Generator[Any, Any, Mapping[str, Any]]:
        """
        Ask for the fields of a form one by one, and return the elicitation result.

        Before a form with very many fields, the person is asked whether to start.
        """
        schema, message = params["requestedSchema"], str(params.get("message", ""))
        if not isinstance(schema, Mapping):
            return DECLINED
        fields, required = schema.get("properties") or {}, _list_or_empty(schema.get("required"))
        if not _are_form_fields(fields):
            return DECLINED
        has_asked = False

        def ask_if_still_open(question: Ask) -> Generator[Any, Any, str]:
            """Ask a question; before each but the first, raise if the server no longer waits."""
            nonlocal has_asked
            # The process that had the call may be gone since the first question, and nobody is asked for nothing.
            if has_asked and is_open is not None and not (yield from is_open()):
                raise _Closed
            has_asked = True
            return (yield from question)

        if not fields or len(fields) > FIELDS:
            many = f"a form of {len(fields):,} fields; fill it in?" if fields else ""
            said = yield from ask_if_still_open(Ask(self._make_question_text(message, many), [YES, NO]))
            if said != YES or not fields:
                return {"action": "accept", "content": {}} if said == YES else DECLINED
        try:
            return (yield from self._ask_form_fields(message, fields, required, ask_if_still_open))
        except _Closed:
            return DECLINED

    def _ask_form_fields(
        self, message: str, fields: Mapping[str, Any], required: Sequence[object], ask: AskPerson
    ) -> Generator[Any, Any, Mapping[str, Any]]:
        """Ask for each field; return the elicitation result, which is a decline if a required field gets no value."""
        content: dict[str, object] = {}
        for name, field in fields.items():
            value = yield from self._ask_field(message, _FormField(name, _drop_null_type(field), name in required), ask)
            if value is not None:
                content[name] = value
            elif name in required:
                return DECLINED
        return {"action": "accept", "content": content}

    def _ask_field(self, message: str, field: _FormField, ask: AskPerson) -> Generator[Any, Any, object]:
        """Ask for one field; ``None`` if the person declines or gives three invalid answers."""
        problem = ""
        for _ in range(MAX_ATTEMPTS):
            text = self._make_question_text(message, field.title, field.description, field.describe_input(), problem)
            said = yield from ask(Ask(text, field.list_options(), multi_select=field.is_list))
            if not said:
                return None
            value, problem = field.parse_value(said)
            if not problem:
                return value
        return None

    def _ask_to_open_address(self, params: Mapping[str, object]) -> Generator[Any, Any, Mapping[str, Any]]:
        """Ask a person to open an address, which is shown as text and not opened. Accept if the answer is ``done``."""
        said = yield from Ask(
            self._make_question_text(str(params.get("message", "")), f"open {params['url']} yourself"), ["done", NO]
        )
        return {"action": "accept"} if said == "done" else DECLINED

    # --- the model ------------------------------------------------------------------------------------------------------

    def _call_model(self, params: Mapping[str, Any]) -> Generator[object, Any, Mapping[str, object]]:
        """Call the model of the run, within the limits of the run, and return the reply; an ``error`` if the call is impossible."""
        tokens = params.get("maxTokens")
        try:
            settings = ModelSettings(
                max_tokens=min(int(tokens), SAMPLED_TOKENS) if tokens else SAMPLED_TOKENS,
                temperature=params.get("temperature"),
            )
            messages = [_parse_sampling_message(one) for one in params["messages"]]
            reply = yield from Complete(messages, system_prompt=params.get("systemPrompt"), settings=settings)
        except StepEngineError as error:
            return {"error": f"The model could not be called: {error.message}"}
        content = {"type": "text", "text": reply.text}
        return {
            "role": "assistant",
            "content": content,
            "model": reply.model or "unknown",
            "stopReason": STOP_REASONS.get(reply.stop_reason, reply.stop_reason.value),
        }

    # --- back to the server ---------------------------------------------------------------------------------------------

    def make_response(self, answer: Mapping[str, Any]) -> Any:
        """Return a JSON answer as an object of the package; an error answer becomes an error object."""
        import mcp_types as types

        if "error" in answer:
            return types.ErrorData(code=types.INVALID_REQUEST, message=answer["error"])
        if "roots" in answer:
            return types.ListRootsResult.model_validate(make_roots(self._roots), by_name=False)
        kind = types.ElicitResult if "action" in answer else types.CreateMessageResult
        return kind.model_validate(answer, by_name=False)

    def make_responses(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """Return all JSON answers as objects of the package; an error answer becomes a declined one."""
        return {key: self.make_response(DECLINED if "error" in one else one) for key, one in answers.items()}


def mark_oversized_requests(server: str, requests: Mapping[str, Any], state: str | None) -> dict[str, Any]:
    """
    Return the requests of one round for the journal; those that are too large are marked, and will be declined.

    Raises:
        ToolError: If the marked requests are still too large.
    """
    left, kept = REQUEST_BYTES - _measure_json_bytes(state or ""), dict[str, Any]()
    for key, request in sorted(requests.items()):
        size = _measure_json_bytes({key: request})
        if size > left:
            reason = f"the request has {size:,} bytes, and {max(left, 0):,} of {REQUEST_BYTES:,} are left"
            LOGGER.warning("the MCP server %r sent a request that is declined: %s", server, reason)
            is_for_model = "messages" in request.get("params", request)
            kept[key] = {TOO_LARGE: {"error": reason} if is_for_model else DECLINED}
        else:
            left -= size
            kept[key] = request
    if _measure_json_bytes({"requests": kept, "state": state}) > REQUEST_BYTES + STUBS_BYTES:
        msg = f"the MCP server {server!r} asked for more than {REQUEST_BYTES:,} bytes of requests in one call, so it was given up"
        raise ToolError(msg)
    return kept


def _measure_json_bytes(value: object) -> int:
    """Return the size of JSON in bytes; a value that no record can store is too large."""
    try:
        return len(compact(freeze(value)).encode("utf-8", "surrogatepass"))
    except DataError:
        return REQUEST_BYTES + 1


def make_roots(addresses: Sequence[str]) -> dict[str, Any]:
    """Return folder URLs as a list of roots of the protocol."""
    return {"roots": [{"uri": one, "name": one.rstrip("/").rpartition("/")[2] or one} for one in addresses]}


def _are_form_fields(fields: object) -> bool:
    """Return whether *fields* maps names to mappings. The package does not check this."""
    return isinstance(fields, Mapping) and all(isinstance(field, Mapping) for field in fields.values())


@frozen
class _FormField:
    """
    One field of a form.

    Attributes:
        name: What the server calls it.
        schema: The server's schema of the field, which is not validated.
        is_required: Whether the form has no answer without it.
    """

    name: str
    schema: Mapping[str, Any]
    is_required: bool

    @property
    def kind(self) -> object:
        """The JSON type of the field."""
        return self.schema.get("type")

    @property
    def is_list(self) -> bool:
        return self.kind == "array"

    @property
    def title(self) -> str:
        """The title of the field, by default its name."""
        return str(self.schema.get("title") or self.name)

    @property
    def description(self) -> str:
        """The description of the field, by default empty."""
        return str(self.schema.get("description") or "")

    def map_choice_titles(self) -> dict[str, object]:
        choices: object = self.schema.get("items") if self.is_list else self.schema
        given: object = None
        if isinstance(choices, Mapping):
            given = choices.get("enum") or choices.get("oneOf") or choices.get("anyOf")
        each = _list_or_empty(given)
        if any(isinstance(one, Mapping) and "const" not in one for one in each):
            return {}  # alternatives of types, not of values
        values = [one.get("const") if isinstance(one, Mapping) else one for one in each]
        plain = {visible(str(value), strict=True): value for value in values}
        named = _list_or_empty(choices.get("enumNames")) if isinstance(choices, Mapping) else []
        titles = (
            named if len(named) == len(each) else [one.get("title") if isinstance(one, Mapping) else "" for one in each]
        )
        shown = [visible(str(title or value), strict=True) for title, value in zip(titles, values, strict=True)]
        # Two that a person could not tell apart are shown as the server calls them.
        return dict(zip(shown, values, strict=True)) if len(set(shown)) == len(values) else plain

    @property
    def has_default(self) -> bool:
        """Whether ``"default"`` selects the value that the server proposes; not if a choice has this name."""
        return self.schema.get("default") is not None and DEFAULT not in map(str.lower, self.map_choice_titles())

    def list_options(self) -> Sequence[str]:
        """Return the options that a person can choose from; empty if the answer is free text."""
        options = [YES, NO] if self.kind == "boolean" else list(self.map_choice_titles())
        if not 1 < len(options) <= OPTIONS:
            return ()
        return [*options, DEFAULT] if self.has_default else options

    def describe_input(self) -> str:
        """Return a description of valid values and of the default."""
        said = [*self._describe_limits(), *([] if self.is_required else ["optional"])]
        if self.schema.get("default") is not None:
            how = f" (answer {DEFAULT!r} to use it)" if self.has_default else ""
            said.append(f"default: {self._format_default()}{how}")
        return ", ".join(said)

    def _describe_limits(self) -> list[str]:
        """Return texts about the type, bounds and format of the field."""
        kind, said = self.kind, self.schema
        if kind in ("integer", "number"):
            words = ["a whole number" if kind == "integer" else "a number"]
            return [*words, *_describe_bounds(said.get("minimum"), said.get("maximum"), "")]
        if self.is_list:
            return _describe_bounds(said.get("minItems"), said.get("maxItems"), " of them")
        known = FORMATS.get(str(said.get("format")))
        return [
            *([known] if known else []),
            *_describe_bounds(said.get("minLength"), said.get("maxLength"), " characters"),
        ]

    def _format_default(self) -> str:
        """Return the default of the field as a person would answer it."""
        default = self.schema["default"]
        if isinstance(default, bool):
            return YES if default else NO
        names = {str(value): shown for shown, value in self.map_choice_titles().items()}
        each = default if self.is_list and isinstance(default, list | tuple) else [default]
        return ", ".join([names.get(str(one), str(one)) for one in each])

    def parse_value(self, answer: str) -> tuple[object, str]:
        text = answer.strip()
        if text.lower() == DEFAULT and self.has_default:
            return self.schema["default"], ""
        if self.kind == "boolean":
            return text.lower() in (YES, "y", "true"), ""
        if self.is_list:
            return self._parse_list_value(text)
        if self.kind in ("integer", "number"):
            try:
                number = freeze(int(text) if self.kind == "integer" else float(text))
            except (ValueError, DataError):
                return None, f"{text[:50]!r} is not a valid {self.kind}"
            return number, self._find_bounds_problem(text, number, "minimum", "maximum")
        choices = self.map_choice_titles()
        if choices:
            value = choices.get(text, text if text in [str(one) for one in choices.values()] else None)
            return value, "" if value is not None else f"{text[:50]!r} is not one of {_format_choices(choices)}"
        return answer, self._find_bounds_problem(answer, len(answer), "minLength", "maxLength") or _find_format_problem(
            text, self.schema.get("format")
        )

    def _parse_list_value(self, text: str) -> tuple[object, str]:
        """Return the chosen values in the text of an answer, and the problem with them or ``""``."""
        known = self.map_choice_titles()
        chosen = _parse_choices(text, known)
        if DEFAULT in chosen and self.has_default:
            return chosen, f"{DEFAULT!r} cannot be combined with other choices"
        unknown = [one for one in chosen if one not in list(known.values())] if known else []
        if unknown:
            return None, f"{str(unknown[0])[:50]!r} is not one of {_format_choices(known)}"
        return chosen, self._find_bounds_problem(chosen, len(chosen), "minItems", "maxItems")

    def _find_bounds_problem(self, value: object, size: Any, least: str, most: str) -> str:
        """Return why *size* is outside of the bounds in the members *least* and *most*; ``""`` if it is inside."""
        low, high = self.schema.get(least), self.schema.get(most)
        unit = {"minItems": " of them", "minLength": " characters"}.get(least, "")
        if (_is_number(low) and size < low) or (_is_number(high) and size > high):
            return f"{str(value)[:50]!r} is not valid: {', '.join(_describe_bounds(low, high, unit))}"
        return ""


def _describe_bounds(low: object, high: object, unit: str) -> list[str]:
    """Return the lower and the upper bound as texts; bounds that are no numbers are left out."""
    said = [f"at least {low}{unit}"] if _is_number(low) else []
    return [*said, *([f"at most {high}{unit}"] if _is_number(high) else [])]


def _is_number(value: object) -> bool:
    """Return whether a value is a number and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format_choices(choices: Mapping[str, object]) -> str:
    return ", ".join(list(choices)[:SHOWN_CHOICES]) + (", ..." if len(choices) > SHOWN_CHOICES else "")


def _find_format_problem(text: str, format_name: object) -> str:
    """Return the problem of a text with a given format; the server checks the format completely."""
    known = FORMATS.get(str(format_name))
    if known is None:
        return ""
    try:
        if format_name == "date":
            date.fromisoformat(text)
        elif format_name == "date-time":
            datetime.fromisoformat(text)
        elif format_name == "email":
            fits = text.count("@") == 1 and not text.startswith("@") and not text.endswith("@") and " " not in text
            return "" if fits else f"{text[:50]!r} is not {known}"
        elif not text.partition(":")[2] or " " in text:
            return f"{text[:50]!r} is not {known}"
    except ValueError:
        return f"{text[:50]!r} is not {known}"
    return ""


def _parse_choices(text: str, values_by_title: Mapping[str, object]) -> list[object]:
    """Return the chosen values; an unknown name is returned as it is. Names may contain commas."""
    parts, found = [part.strip() for part in text.split(",")], list[object]()
    while parts:
        ends = [end for end in range(len(parts), 0, -1) if ", ".join(parts[:end]) in values_by_title]
        end = ends[0] if ends else 1
        name = ", ".join(parts[:end])
        found += [values_by_title.get(name, name)] if name else []
        del parts[:end]
    return found


def _drop_null_type(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the only alternative of a schema that is not null, with its other members; other schemas unchanged."""
    for member in ("anyOf", "oneOf"):
        each = _list_or_empty(schema.get(member))
        others = [one for one in each if not (isinstance(one, Mapping) and one.get("type") == "null")]
        if len(others) == 1 < len(each) and isinstance(others[0], Mapping) and "const" not in others[0]:
            return {**others[0], **{key: value for key, value in schema.items() if key != member}}
    return schema


def _list_or_empty(value: object) -> list[Any]:
    """Return the items of a list or tuple; an empty list for any other value."""
    return list(value) if isinstance(value, list | tuple) else []


def _parse_sampling_message(message: Mapping[str, object]) -> UserMessage | AssistantMessage:
    """Convert a message of a sampling request; content other than text becomes its type in brackets."""
    content = message.get("content")
    blocks = content if isinstance(content, list | tuple) else [content]
    texts = [
        str(b.get("text", "")) if b.get("type") == "text" else f"[{b.get('type')}]"
        for b in blocks
        if isinstance(b, Mapping)
    ]
    text = "\n".join(texts)
    return AssistantMessage(text) if message.get("role") == "assistant" else UserMessage(text)
