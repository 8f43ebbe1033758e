"""
What a server asks in the middle of a call, as questions of the run and calls of its model, and the answers as the protocol has them.

Only JSON comes in and goes out, so that a replay goes the same way without the package.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from stepengine.data.json import freeze
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.models import ModelSettings
from stepengine.data.visible import visible
from stepengine.data.yields import Ask, Complete
from stepengine.errors import DataError, StepEngineError
from stepengine.mcp._caps import FIELDS, OPTIONS, QUESTION_CHARS, ROUNDS, SAMPLED_TOKENS, TRIES

__all__ = ("Asking",)

DECLINED: Mapping[str, Any] = {"action": "decline"}
YES, NO = "yes", "no"


class Asking:
    """
    Answers what one server asks.

    Args:
        server: Its name, which every question says.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.rounds = ROUNDS

    def answered(self, requests: Mapping[str, Any]) -> Generator[Any, Any, dict[str, Any]]:
        """Return the answer to every request, by key, as JSON."""
        answers: dict[str, object] = {}
        for key, request in sorted(requests.items()):
            params = request.get("params", request)
            if "messages" in params:
                answers[key] = yield from self._sampled(params)
            elif "requestedSchema" in params:
                answers[key] = yield from self._form(params)
            elif "url" in params:
                answers[key] = yield from self._address(params)
            else:
                answers[key] = {"error": "This client does not answer such requests"}
        return answers

    # --- people ---------------------------------------------------------------------------------------------------------

    def _text(self, *said: str) -> str:
        text = visible(" - ".join([part for part in said if part]))
        text = text if len(text) <= QUESTION_CHARS else f"{text[:QUESTION_CHARS]}..."
        return f"The MCP server {self._server} asks: {text}"

    def _form(self, params: Mapping[str, Any]) -> Generator[Any, Any, Mapping[str, Any]]:
        """
        Ask for the fields of a form one by one; who declines one that is required declines the form.

        Before a form of very many it is asked whether to begin.
        """
        schema, message = params["requestedSchema"], str(params.get("message", ""))
        fields, required = schema.get("properties") or {}, _listed(schema.get("required"))
        if not _is_form(fields):
            return DECLINED
        if not fields or len(fields) > FIELDS:
            many = f"a form of {len(fields):,} fields; fill it in?" if fields else ""
            said = yield from Ask(self._text(message, many), [YES, NO])
            if said != YES or not fields:
                return {"action": "accept", "content": {}} if said == YES else DECLINED
        content: dict[str, object] = {}
        for name, field in fields.items():
            value = yield from self._field(message, name, field)
            if value is not None:
                content[name] = value
            elif name in required:
                return DECLINED
        return {"action": "accept", "content": content}

    def _field(self, message: str, name: str, field: Mapping[str, object]) -> Generator[object, Any, object]:
        """Ask for one field; ``None`` when the person declines, or gives nothing that fits three times."""
        about = str(field.get("description") or "")
        title = str(field.get("title") or name)
        problem = ""
        for _ in range(TRIES):
            said = yield _question(self._text(message, title, about, problem), field)
            if not said.value:
                return None
            value, problem = _value(said.value, field)
            if not problem:
                return value
        return None

    def _address(self, params: Mapping[str, object]) -> Generator[Any, Any, Mapping[str, Any]]:
        """Show an address as text; nobody opens it from here."""
        said = yield from Ask(
            self._text(str(params.get("message", "")), f"open {params['url']} yourself"), ["done", NO]
        )
        return {"action": "accept"} if said == "done" else DECLINED

    # --- the model ------------------------------------------------------------------------------------------------------

    def _sampled(self, params: Mapping[str, Any]) -> Generator[object, Any, Mapping[str, object]]:
        """Have the run's model called; it is counted and limited like any other call of it."""
        tokens = params.get("maxTokens")
        try:
            settings = ModelSettings(
                max_tokens=min(int(tokens), SAMPLED_TOKENS) if tokens else SAMPLED_TOKENS,
                temperature=params.get("temperature"),
            )
            messages = [_message(one) for one in params["messages"]]
            reply = yield from Complete(messages, system_prompt=params.get("systemPrompt"), settings=settings)
        except StepEngineError as error:
            return {"error": f"The model could not be called: {error.message}"}
        content = {"type": "text", "text": reply.text}
        return {"role": "assistant", "content": content, "model": reply.model or "unknown", "stopReason": "endTurn"}

    # --- back to the server ---------------------------------------------------------------------------------------------

    def response(self, answer: Mapping[str, Any]) -> Any:
        """Return an answer as the package has it, with what makes it an error when it is one."""
        import mcp_types as types

        if "error" in answer:
            return types.ErrorData(code=types.INVALID_REQUEST, message=answer["error"])
        kind = types.ElicitResult if "action" in answer else types.CreateMessageResult
        return kind.model_validate(answer, by_name=False)

    def responses(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """Return all answers as the package has them; one that is an error declines."""
        return {key: self.response(DECLINED if "error" in one else one) for key, one in answers.items()}


def _is_form(fields: object) -> bool:
    """Return whether these are fields that a person can be asked for: nobody has checked what a server calls its form."""
    return isinstance(fields, Mapping) and all(isinstance(field, Mapping) for field in fields.values())


def _question(text: str, field: Mapping[str, object]) -> Ask:
    options = [YES, NO] if field.get("type") == "boolean" else _choices(field)
    named = [visible(str(one), strict=True) for one in options]
    return Ask(text, named if 1 < len(named) <= OPTIONS else (), multi_select=field.get("type") == "array")


def _choices(field: Mapping[str, object]) -> list[object]:
    """Return what there is to choose from, in the server's own words."""
    choices: object = field.get("items") if field.get("type") == "array" else field
    given: object = None
    if isinstance(choices, Mapping):
        given = choices.get("enum") or choices.get("oneOf") or choices.get("anyOf")
    return [one.get("const") if isinstance(one, Mapping) else one for one in _listed(given)]


def _chosen(text: str, choices: Sequence[object]) -> list[str]:
    """Return which of several things were chosen; one whose name has a comma in it is not two."""
    known = {visible(str(one), strict=True): str(one) for one in choices}
    parts, found = [part.strip() for part in text.split(",")], list[str]()
    while parts:
        ends = [end for end in range(len(parts), 0, -1) if ", ".join(parts[:end]) in known]
        end = ends[0] if ends else 1
        name = ", ".join(parts[:end])
        found += [known.get(name, name)] if name else []
        del parts[:end]
    return found


def _value(said: str, field: Mapping[str, object]) -> tuple[object, str]:
    """Return what a person said as the field wants it, or what is wrong with it."""
    kind = field.get("type")
    text = said.strip()
    if kind == "boolean":
        return text.lower() in (YES, "y", "true"), ""
    if kind == "array":
        return _chosen(text, _choices(field)), ""
    if kind not in ("integer", "number"):
        return said, ""
    try:
        return freeze(int(text) if kind == "integer" else float(text)), ""
    except (ValueError, DataError):
        return None, f"{text[:50]!r} is no {kind}"


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _message(said: Mapping[str, object]) -> UserMessage | AssistantMessage:
    content = said.get("content")
    blocks = content if isinstance(content, list | tuple) else [content]
    texts = [
        str(b.get("text", "")) if b.get("type") == "text" else f"[{b.get('type')}]"
        for b in blocks
        if isinstance(b, Mapping)
    ]
    text = "\n".join(texts)
    return AssistantMessage(text) if said.get("role") == "assistant" else UserMessage(text)
