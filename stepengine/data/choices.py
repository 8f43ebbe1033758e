"""
The possible answers to a question, decided once for every surface that asks people.

A surface shows ``list_choices(question)`` and returns the answer of the chosen one. A surface with forms shows ``answer_schema`` and
returns ``answer_from_form``. A surface in another process receives ``question_to_json``, which has all of it. Must not be here: how a
surface draws them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Literal

from attrs import frozen

from stepengine.data.call_text import preview_parts
from stepengine.data.codec import plain
from stepengine.data.json import JsonDict
from stepengine.data.origins import sort_origins
from stepengine.data.questions import (
    DOUBT,
    Answer,
    AnswerLike,
    Question,
    find_answer_problem,
    list_offered_rules,
    to_answer,
)
from stepengine.data.visible import visible

SENT_BACK = {"text": str, "selected": list, "declined": bool, "remember": str, "covers": str}
"""The members of a choice's answer, as a page sends it back."""


@frozen
class Choice:
    """
    One answer that a person can choose.

    Attributes:
        id: Unique among the choices of a question.
        label: Its words.
        kind: ``"option"`` of a question; ``"allow"``, ``"always"`` or ``"deny"`` a call. ``"deny"`` also declines a question.
        answer: The answer of a person who chooses it.
        description: The meaning of an option.
        rule: The rule that an ``"always"`` adds, as a policy file has it.
    """

    id: str
    label: str
    kind: Literal["option", "allow", "always", "deny"]
    answer: Answer
    description: str = ""
    rule: JsonDict | None = None

    @property
    def scope(self) -> str:
        """The calls that an ``"always"`` allows from now on, in words; ``""`` for another kind."""
        return "" if self.rule is None else describe_scope(self.rule, is_full=True)

    @property
    def confirm(self) -> str:
        """The warning to confirm before an approval of any input of a tool counts; ``""`` for other choices."""
        if self.rule is None or not allows_any_input(self.rule):
            return ""
        tool = visible(str(find_call_matcher(self.rule).get("is", "this tool")), strict=True)
        return f"Every later call of {tool} runs without approval, with any input."


def list_choices(question: Question, *, can_confirm: bool = False) -> tuple[Choice, ...]:
    """
    Return the choices of a question: its options and no answer; of a permission to allow, always allow and deny the call.

    Args:
        question: The question.
        can_confirm: Include the choice that allows every later input of a tool. The surface must show ``Choice.confirm`` and ask again
            before it gives this answer.
    """
    if question.tool_name is None:
        told = zip_longest(question.options, question.descriptions, fillvalue="")
        options = [Choice(str(n), one, "option", Answer(selected=one), about) for n, (one, about) in enumerate(told)]
        decline = [] if question.id.startswith(DOUBT) else [Choice("no", "No answer", "deny", Answer(declined=True))]
        return (*options, *decline)
    lasting = [
        Choice(f"always{n or ''}", f"Always: {describe_scope(rule)}", "always", make_lasting_approval(rule), rule=rule)
        for n, rule in enumerate(list_offered_rules(question))
        if can_confirm or not allows_any_input(rule)
    ]
    allow, deny = (
        Choice("yes", "Allow", "allow", make_permission_answer(is_allowed=True)),
        make_permission_answer(is_allowed=False),
    )
    return (allow, *lasting, Choice("no", "Deny", "deny", deny))


def answer_for_choice(question: Question, choice_id: str | None, *, is_confirmed: bool = False) -> Answer:
    """
    Return the answer of the choice with the id *choice_id*; for any other id that of the last choice, a denial.

    Args:
        question: The question.
        choice_id: The id; ``None`` if the person chose nothing.
        is_confirmed: Whether the person confirmed ``Choice.confirm``. Otherwise such a choice denies the call.
    """
    choices = list_choices(question, can_confirm=is_confirmed)
    return next((choice for choice in choices if choice.id == choice_id), choices[-1]).answer


def question_to_json(question: Question) -> dict[str, Any]:
    """Return a question as JSON for a surface in another process: its choices with their answers, its preview, its origins."""
    shown = question.preview or {"details": question.details}
    return {
        "id": question.id,
        "text": question.text,
        "path": question.path,
        "options": list(question.options),
        "descriptions": list(question.descriptions),
        "multi_select": question.multi_select,
        "allow_text": question.allow_text,
        "number": question.number,
        "choices": [_choice_to_json(one) for one in list_choices(question, can_confirm=True)],
        "tool_name": question.tool_name,
        "details": plain(question.details),
        "preview_parts": [part._asdict() for part in preview_parts(shown)],
        "provenance": [plain(one) for one in sort_origins(question.provenance)],
        "origins": list(question.origins),
    }


def _choice_to_json(choice: Choice) -> dict[str, Any]:
    """Return a choice as JSON for a surface in another process, with its answer."""
    answer = {name: plain(getattr(choice.answer, name)) for name in SENT_BACK}
    return {
        "id": choice.id,
        "label": choice.label,
        "kind": choice.kind,
        "description": choice.description,
        "answer": {name: value for name, value in answer.items() if value},
        "scope": choice.scope,
        "confirm": choice.confirm,
        "rule": plain(choice.rule),
    }


def is_single_choice(question: Question) -> bool:
    """Return whether exactly one of the options, and nothing else, is an answer."""
    return bool(question.options) and not (question.multi_select or question.allow_text)


def make_permission_answer(
    *, is_allowed: bool, reason: str = "", edited_input: Mapping[str, Any] | None = None
) -> Answer:
    """Return the answer to a permission question: an approval, perhaps of another input, or a denial."""
    return Answer(text="yes" if is_allowed else "no", reason=reason, edited_input=edited_input if is_allowed else None)


# --- lasting approvals ------------------------------------------------------------------------------------------------


def make_lasting_approval(rule: JsonDict) -> Answer:
    """Return the approval that adds a rule of a question for the rest of the session."""
    return Answer(text="yes", remember="session", covers=str(rule["id"]))


def find_call_matcher(rule: JsonDict | None) -> Mapping[str, Any]:
    """Return the call matcher of a rule; empty for a rule of another kind, and for none."""
    match = None if rule is None else rule.get("match")
    call = match.get("call") if isinstance(match, Mapping) else None
    return call if isinstance(call, Mapping) else {"is": call} if isinstance(call, str) else {}


def allows_any_input(rule: JsonDict) -> bool:
    """Return whether a rule allows every later call of a tool, with any input."""
    return bool(find_call_matcher(rule).get("any_input"))


def allows_all_edits(rule: JsonDict) -> bool:
    """Return whether a rule allows all edits of files."""
    match = rule.get("match")
    return isinstance(match, Mapping) and match.get("category") == "write"


def describe_scope(rule: JsonDict, *, is_full: bool = False) -> str:
    """Describe the later calls that a rule allows; with *is_full* also mention that other arguments may differ."""
    call = find_call_matcher(rule)
    where = [*call.get("paths", ()), *call.get("hosts", ()), *call.get("origins", ())]
    if allows_all_edits(rule):
        scope = "all edits of files"
    elif not call:
        scope = str(rule["id"])
    elif allows_any_input(rule):
        scope = f"ANY call of {call['is']}, with any input"
    elif "prefix" in call:
        scope = f"{shlex.join(call['prefix'])} with harmless options and paths"
    elif "input" in call:
        scope = "exactly this call"
    else:
        rest = ", with any other arguments" if is_full else ""
        scope = f"{call['is']} for {', '.join(where)}{rest}" if where else f"calls of {call['is']}"
    return visible(scope, strict=True)


# --- forms ------------------------------------------------------------------------------------------------------------


def answer_schema(question: Question) -> dict[str, Any]:
    """Return the JSON Schema of an answer: a text, one of the options, or a list of them."""
    options = list(question.options) or (["yes", "no"] if question.tool_name else [])
    one: dict[str, Any] = {"type": "string"}
    if options and not question.allow_text:
        one["enum"] = options
    elif options and not question.multi_select:
        other = "a number" if question.number else "your own words"
        one["description"] = f"One of {', '.join(options)}, or {other}"
    return {"type": "array", "items": one} if question.multi_select else one


def describe_options(question: Question) -> str:
    """Return the meaning of each option that has one, in lines; a form shows it as the description of its field."""
    told = zip(question.options, question.descriptions, strict=False)
    return "\n".join([f"{option}: {about}" for option, about in told if about])


def make_approval_schema() -> dict[str, Any]:
    """Return the JSON Schema of the answer to a permission: an approval, perhaps of another input, or a denial with its reason."""
    said = {"approved": {"type": "boolean"}, "reason": {"type": "string"}, "editedInput": {"type": "object"}}
    return {"type": "object", "properties": said, "required": ["approved"]}


def answer_from_json(value: Any) -> AnswerLike | None:
    """
    Return the answer that a page sent; ``None`` if *value* is no answer.

    It is a bool, a text, a list of options, an object of ``make_approval_schema``, or the ``answer`` of a choice in
    ``question_to_json``. A page cannot approve calls for longer than the session.
    """
    match value:
        case bool() | str():
            return value
        case list() if _are_texts(value):
            return Answer(selected=value)
        case {"approved": bool(is_allowed)}:
            edited, reason = value.get("editedInput"), value.get("reason") or ""
            if isinstance(reason, str) and isinstance(edited, dict | None):
                return make_permission_answer(is_allowed=is_allowed, edited_input=edited, reason=reason)
        case dict() if value and all(isinstance(one, SENT_BACK.get(name, ())) for name, one in value.items()):
            if _are_texts(value.get("selected", [])) and value.get("remember", "session") == "session":
                return Answer(**value)
        case _:
            pass
    return None


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(one, str) for one in values)


def answer_from_form(question: Question, value: object) -> Answer:
    """Return the answer in a form's field; an empty or invalid value declines the question, with the reason."""
    answer = to_answer(Answer(selected=map(str, value)) if isinstance(value, list) else str(value or ""), question)
    problem = find_answer_problem(answer, question)
    return answer if value and problem is None else Answer(declined=True, reason=problem or "")
