"""
Questions of a run in an editor, as permission requests, forms or text, and the editor's replies as answers.

What must not be here: who asks, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from stepengine.data.choices import answer_from_form, answer_schema, is_single_choice, list_choices
from stepengine.data.questions import Answer, Question

if TYPE_CHECKING:
    from acp import schema

FIELD = "answer"
KINDS: Mapping[str, Literal["allow_once", "allow_always", "reject_once"]] = {
    "option": "allow_once", "allow": "allow_once", "always": "allow_always", "deny": "reject_once",
}  # fmt: skip


def make_permission_options(question: Question) -> list[schema.PermissionOption]:
    """Return the options of a permission request for a question."""
    from acp.schema import PermissionOption

    return [PermissionOption(option_id=one.id, name=one.label, kind=KINDS[one.kind]) for one in list_choices(question)]


def make_question_call(question: Question) -> schema.ToolCallUpdate:
    """Return the tool call that shows a question in a permission request."""
    import acp
    from acp import schema

    content: list[Any] = [acp.tool_content(acp.text_block(format_question(question).strip()))]
    return schema.ToolCallUpdate(
        tool_call_id=f"question-{question.id}", title=question.text, kind="other", status="pending", content=content
    )


def format_question(question: Question) -> str:
    """Return a question with its options as text."""
    said = zip_longest(question.options, question.descriptions, fillvalue="")
    choices = "".join([f"\n- {option}" + (f": {about}" if about else "") for option, about in said])
    return f"\n\n{question.text}{choices}"


def format_open_question(question: Question) -> str:
    """Return the text that shows an open question of a reopened session; the resumed run requests a permission itself."""
    if question.tool_name is None:
        return format_question(question)
    return f"\n\n{question.text} The run continues with your next prompt, and asks for this permission again.\n\n"


# --- forms ------------------------------------------------------------------------------------------------------------


def make_question_form(question: Question) -> Any:
    """Return a form with one field for the answer to a question: text, one choice or several."""
    from acp import schema

    choices = [
        schema.EnumOption(const=option, title=option, description=about or None)
        for option, about in zip_longest(question.options, question.descriptions, fillvalue="")
    ]
    field: Any
    if question.multi_select and question.options:
        items = schema.TitledMultiSelectItems(any_of=choices)
        field = schema.ElicitationMultiSelectPropertySchema(type="array", title="Answer", items=items)
    elif is_single_choice(question):
        field = schema.ElicitationStringPropertySchema(type="string", title="Answer", one_of=choices)
    else:
        about = answer_schema(question).get("description")
        field = schema.ElicitationStringPropertySchema(type="string", title="Answer", description=about)
    return schema.ElicitationSchema(type="object", properties={FIELD: field}, required=[FIELD])


def parse_form_answer(question: Question, response: Any) -> Answer:
    """Return the answer in the response to a form; a declined, closed or empty form declines the question."""
    content: Any = getattr(response, "content", None) or {}
    given = content.get(FIELD) if response.action == "accept" else None
    return answer_from_form(question, getattr(given, "root", given))
