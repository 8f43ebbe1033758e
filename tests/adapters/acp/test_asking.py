"""
Questions to whoever sits at an editor, and what the answers mean.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from acp import schema
from hypothesis import given
from hypothesis import strategies as st

from stepengine.adapters.acp import questions
from stepengine.data.choices import answer_for_choice, is_single_choice
from stepengine.data.questions import Question, find_answer_problem

LABELS = st.text(min_size=1, max_size=5)
QUESTIONS = st.builds(
    lambda options, several, words: Question("q1", "Which?", options, several, allow_text=words),
    st.lists(LABELS, max_size=3, unique=True),
    st.booleans(),
    st.booleans(),
)


@given(
    QUESTIONS, st.one_of(st.none(), st.integers(), LABELS, st.lists(LABELS | st.integers(), max_size=3)), st.booleans()
)
@pytest.mark.spec("interfaces:IF31")
@pytest.mark.deep
def test_any_form_response_is_a_valid_answer_or_none(question: Question, value: Any, accepts: bool) -> None:
    """
    One that the engine would reject leaves the question open for ever, since nobody sees it any more.
    """
    response = SimpleNamespace(action="accept" if accepts else "decline", content={"answer": value})
    answer = questions.parse_form_answer(question, response)

    assert find_answer_problem(answer, question) is None
    assert answer.declined or (accepts and answer.value)


@pytest.mark.deep
@given(QUESTIONS)
def test_question_form_is_valid_and_lists_all_options(question: Question) -> None:
    form = questions.make_question_form(question)
    (field,) = form.properties.values()
    wire = schema.ElicitationSchema.model_validate(form.model_dump(mode="json", by_alias=True, exclude_none=True))

    assert form == wire
    if question.multi_select and question.options:
        assert list(question.options) == [one.const for one in field.items.any_of]
    elif is_single_choice(question):
        assert list(question.options) == [one.const for one in field.one_of]
    else:
        assert all(option in field.description for option in question.options)


@pytest.mark.spec("interfaces:IF51")
def test_permission_options_name_each_remembered_rule_but_no_blanket_one() -> None:
    def rule(name: str, **call: Any) -> dict[str, Any]:
        return {"id": name, "decision": "allow", "match": {"call": {"is": "run", **call}}}

    question = Question(
        "q1", "May it?", tool_name="run", remember=rule("one", input={}),
        wider=[rule("two", prefix=["git", "a b"]), rule("three", origins=["https://x.org"]), rule("all", any_input=True), {"id": "odd"}],
    )  # fmt: skip
    options = questions.make_permission_options(question)

    assert [
        "Allow", "Always: exactly this call", "Always: git 'a b' with harmless options and paths", "Always: run for https://x.org", "Always: odd", "Deny",
    ] == [one.name for one in options]  # fmt: skip
    covers = [answer_for_choice(question, one.option_id).covers or None for one in options]
    assert [None, "one", "two", "three", "odd", None] == covers
    assert [True, False, False] == [answer_for_choice(question, one).agrees for one in ("yes", "no", None)]
