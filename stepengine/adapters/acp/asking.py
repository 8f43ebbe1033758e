"""
Questions to whoever sits at an editor: as permission requests, as forms, as words; and what the answers mean.

What must not be here: who asks, and when.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from stepengine.data.json import JsonDict
from stepengine.data.questions import Answer, AnswerLike, Question, answer_problem
from stepengine.data.visible import visible

if TYPE_CHECKING:
    from acp import schema

__all__ = (
    "allowed_by",
    "answer_of_form",
    "answer_of_option",
    "call_of",
    "form_of",
    "is_choice",
    "options_of",
    "rules_of",
    "words_of",
)

FIELD = "answer"
ALWAYS = "always"


def is_choice(question: Question) -> bool:
    """Return whether a question is answered by one of its options and nothing else, as a permission request is."""
    return bool(question.options) and not (question.multi_select or question.allow_text)


def options_of(question: Question) -> list[schema.PermissionOption]:
    """Return what a person can choose: yes, always and no for a permission; else the options of the question."""
    from acp.schema import PermissionOption

    if question.tool_name is None:
        chosen = [PermissionOption(option_id=str(n), name=o, kind="allow_once") for n, o in enumerate(question.options)]
        return [*chosen, PermissionOption(option_id="no", name="No answer", kind="reject_once")]
    always = [
        PermissionOption(option_id=f"{ALWAYS}{number}" if number else ALWAYS, name=_always(rule), kind="allow_always")
        for number, rule in enumerate(rules_of(question))
    ]
    yes = PermissionOption(option_id="yes", name="Allow", kind="allow_once")
    return [yes, *always, PermissionOption(option_id="no", name="Refuse", kind="reject_once")]


def rules_of(question: Question) -> list[JsonDict]:
    """Return the rules that can be added to a permission, the narrowest first; none that covers whatever a tool is given."""
    offered = [] if question.remember is None else [question.remember, *question.wider]
    return [rule for rule in offered if not _call_in(rule).get("any_input")]


def allowed_by(rule: JsonDict) -> Answer:
    """Return the yes that adds a rule which a question offers."""
    return Answer(text="yes", remember="session", covers=str(rule["id"]))


def _call_in(rule: JsonDict) -> Any:
    match: Any = rule.get("match")
    return match.get("call", {}) if isinstance(match, Mapping) else {}


def _always(rule: JsonDict) -> str:
    """Return in words what is allowed from now on."""
    call, match = _call_in(rule), rule.get("match")
    if isinstance(match, Mapping) and match.get("category") == "write":
        return "Always: all edits of files"
    where = [*call.get("paths", ()), *call.get("hosts", ()), *call.get("origins", ())]
    if "prefix" in call:
        covered = f"{shlex.join(call['prefix'])} with anything behind it"
    elif where:
        covered = f"{call['is']} for {', '.join(where)}"
    else:
        covered = "exactly this call" if call else str(rule["id"])
    return f"Always: {visible(covered, strict=True)}"


def answer_of_option(question: Question, chosen: str | None) -> AnswerLike:
    """Return what a person chose; whoever closes the question has said no."""
    if question.tool_name is None:
        return Answer(declined=True) if chosen in (None, "no") else question.options[int(chosen or 0)]
    if chosen is not None and chosen.startswith(ALWAYS):
        return allowed_by(rules_of(question)[int(chosen.removeprefix(ALWAYS) or 0)])
    return chosen == "yes"


def call_of(question: Question) -> schema.ToolCallUpdate:
    """Return the tool call that stands for a question in a permission request."""
    import acp
    from acp import schema

    content: list[Any] = [acp.tool_content(acp.text_block(words_of(question).strip()))]
    return schema.ToolCallUpdate(
        tool_call_id=f"question-{question.id}", title=question.text, kind="other", status="pending", content=content
    )


def words_of(question: Question) -> str:
    """Return a question with its options as text."""
    said = zip_longest(question.options, question.descriptions, fillvalue="")
    choices = "".join([f"\n- {option}" + (f": {about}" if about else "") for option, about in said])
    return f"\n\n{question.text}{choices}"


# --- forms ------------------------------------------------------------------------------------------------------------


def form_of(question: Question) -> Any:
    """Return the form by which a question is answered: one field, for a text, a choice or several."""
    from acp import schema

    choices = [
        schema.EnumOption(const=option, title=option, description=about or None)
        for option, about in zip_longest(question.options, question.descriptions, fillvalue="")
    ]
    field: Any
    if question.multi_select and question.options:
        items = schema.TitledMultiSelectItems(any_of=choices)
        field = schema.ElicitationMultiSelectPropertySchema(type="array", title="Answer", items=items)
    elif is_choice(question):
        field = schema.ElicitationStringPropertySchema(type="string", title="Answer", one_of=choices)
    else:
        about = f"One of {', '.join(question.options)}, or other words." if question.options else None
        field = schema.ElicitationStringPropertySchema(type="string", title="Answer", description=about)
    return schema.ElicitationSchema(type="object", properties={FIELD: field}, required=[FIELD])


def answer_of_form(question: Question, response: Any) -> AnswerLike:
    """Return what a person filled in; a form that was declined, closed, or left empty has no answer."""
    content: Any = getattr(response, "content", None) or {}
    given = content.get(FIELD) if response.action == "accept" else None
    given = getattr(given, "root", given)
    answer = Answer(selected=map(str, given)) if isinstance(given, list) else str(given or "")
    is_one = bool(given) and answer_problem(answer, question) is None
    return answer if is_one else Answer(declined=True)
