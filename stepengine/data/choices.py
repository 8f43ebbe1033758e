"""
The possible answers to a question, decided once for every surface that asks people.

A surface shows ``list_choices(question)`` and returns the answer of the chosen one. A surface with forms shows ``answer_schema`` and
returns ``answer_from_form``. Both describe a lasting approval by ``describe_scope``. Must not be here: how a surface draws them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Literal

from attrs import frozen

from stepengine.data.json import JsonDict
from stepengine.data.questions import Answer, Question, answer_problem, offered_rules, to_answer
from stepengine.data.visible import visible


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
    """

    id: str
    label: str
    kind: Literal["option", "allow", "always", "deny"]
    answer: Answer
    description: str = ""


def list_choices(question: Question) -> tuple[Choice, ...]:
    """
    Return the choices of a question: its options and no answer; of a permission to allow, always allow and deny the call.

    No choice allows every later input of a tool: a surface that offers that has to ask twice.
    """
    if question.tool_name is None:
        told = zip_longest(question.options, question.descriptions, fillvalue="")
        options = [Choice(str(n), one, "option", Answer(selected=one), about) for n, (one, about) in enumerate(told)]
        return (*options, Choice("no", "No answer", "deny", Answer(declined=True)))
    rules = [rule for rule in offered_rules(question) if not allows_any_input(rule)]
    lasting = [
        Choice(f"always{n or ''}", f"Always: {describe_scope(rule)}", "always", make_lasting_approval(rule))
        for n, rule in enumerate(rules)
    ]
    allow, deny = Choice("yes", "Allow", "allow", approval(is_allowed=True)), approval(is_allowed=False)
    return (allow, *lasting, Choice("no", "Refuse", "deny", deny))


def answer_for_choice(question: Question, chosen: str | None) -> Answer:
    """Return the answer of the choice with the id *chosen*; the last one, a denial, for any other id."""
    choices = list_choices(question)
    return next((choice for choice in choices if choice.id == chosen), choices[-1]).answer


def is_choice(question: Question) -> bool:
    """Return whether exactly one of the options, and nothing else, is an answer."""
    return bool(question.options) and not (question.multi_select or question.allow_text)


def approval(*, is_allowed: bool, reason: str = "", edited_input: Mapping[str, Any] | None = None) -> Answer:
    """Return the answer to a permission question: an approval, perhaps of another input, or a denial."""
    return Answer(text="yes" if is_allowed else "no", reason=reason, edited_input=edited_input if is_allowed else None)


# --- lasting approvals ------------------------------------------------------------------------------------------------


def make_lasting_approval(rule: JsonDict) -> Answer:
    """Return the approval that adds a rule of a question for the rest of the session."""
    return Answer(text="yes", remember="session", covers=str(rule["id"]))


def call_matcher(rule: JsonDict) -> Mapping[str, Any]:
    """Return the call matcher of a rule; empty for a rule of another kind."""
    match = rule.get("match")
    call = match.get("call") if isinstance(match, Mapping) else None
    return call if isinstance(call, Mapping) else {"is": call} if isinstance(call, str) else {}


def allows_any_input(rule: JsonDict) -> bool:
    """Return whether a rule allows every later call of a tool, with any input."""
    return bool(call_matcher(rule).get("any_input"))


def allows_all_edits(rule: JsonDict) -> bool:
    """Return whether a rule allows all edits of files."""
    match = rule.get("match")
    return isinstance(match, Mapping) and match.get("category") == "write"


def describe_scope(rule: JsonDict, *, is_full: bool = False) -> str:
    """Describe the later calls that a rule allows; with *is_full* also mention that other arguments may differ."""
    call = call_matcher(rule)
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


def answer_from_form(question: Question, value: object) -> Answer:
    """Return the answer in a form's field; a value that is none declines the question, with the reason."""
    answer = Answer(selected=map(str, value)) if isinstance(value, list) else to_answer(str(value or ""), question)
    problem = answer_problem(answer, question)
    return answer if value and problem is None else Answer(declined=True, reason=problem or "")
