"""
The answers that a question offers, and the text of the call that it is about, as every surface shows them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.call_text import PreviewPart, find_call_subject, find_question_diff, preview_parts
from stepengine.data.choices import (
    answer_for_choice,
    answer_from_form,
    answer_from_json,
    answer_schema,
    describe_scope,
    list_choices,
    make_lasting_approval,
    make_permission_answer,
    question_to_json,
)
from stepengine.data.json import JsonDict
from stepengine.data.questions import Answer, Question, find_answer_problem, require_valid_answer, to_answer
from stepengine.errors import AnswerRejected
from tests.phrases import NO_OPTION


def rule(name: str, match: dict[str, Any]) -> JsonDict:
    return JsonDict({"id": name, "decision": "allow", "match": match})


EDITS = rule("edits", {"category": "write"})
MAY_IT = Question(
    "q1", "May it?", tool_name="run", remember=rule("one", {"call": {"is": "run", "input": {}}}),
    wider=[EDITS, rule("all", {"call": {"is": "run", "any_input": True}})],
)  # fmt: skip
PLAIN = Question("q1", "May it?", tool_name="run")
COLOUR = Question("q2", "Which?", ["red", "blue, dark"], descriptions=["warm"])


def test_permission_offers_lasting_approvals_except_any_input() -> None:
    assert [
        ("yes", "Allow", "allow", True), ("always", "Always: exactly this call", "always", True),
        ("always1", "Always: all edits of files", "always", True), ("no", "Deny", "deny", False),
    ] == [(one.id, one.label, one.kind, one.answer.agrees) for one in list_choices(MAY_IT)]  # fmt: skip
    assert make_lasting_approval(EDITS) == answer_for_choice(MAY_IT, "always1")
    assert ["yes", "no"] == [one.id for one in list_choices(PLAIN)]


def test_a_question_offers_its_options_and_no_answer() -> None:
    assert [("red", "warm"), ("blue, dark", ""), ("No answer", "")] == [
        (one.label, one.description) for one in list_choices(COLOUR)
    ]
    assert ("blue, dark",) == answer_for_choice(COLOUR, "1").selected
    assert [True] * 3 == [answer_for_choice(COLOUR, chosen).declined for chosen in ("no", "7", None)]


NAMES = st.text("ab, ", min_size=1, max_size=5).map(str.strip).filter(bool)


@given(st.lists(NAMES, min_size=1, max_size=6, unique=True), st.data())
def test_selected_options_survive_as_text_also_with_commas(options: list[str], data: st.DataObject) -> None:
    question = Question("q", "Which?", options, multi_select=True)
    chosen = data.draw(st.lists(st.sampled_from(options), min_size=1, unique=True))

    read = to_answer(Answer(selected=chosen).value, question)

    assert set(read.selected) <= set(options)
    assert Answer(selected=chosen).value.replace(" ", "") == ",".join(read.selected).replace(" ", "")


def test_an_option_with_a_comma_is_selected_beside_another() -> None:
    question = Question("q", "Which?", ["red, dark", "blue"], multi_select=True)

    assert ("red, dark", "blue") == require_valid_answer("red, dark, blue", question).selected
    assert ("blue", "red, dark") == require_valid_answer(" blue,red, dark ", question).selected
    with pytest.raises(AnswerRejected, match=NO_OPTION):
        require_valid_answer("red, dark, green", question)


@pytest.mark.parametrize("question", [MAY_IT, PLAIN, COLOUR], ids=["rules", "permission", "options"])
def test_every_choice_is_an_answer_to_its_question(question: Question) -> None:
    assert [] == [problem for one in list_choices(question) if (problem := find_answer_problem(one.answer, question))]


def test_a_choice_that_is_not_offered_denies_the_call() -> None:
    assert [Answer(text="no")] * 2 == [answer_for_choice(MAY_IT, chosen) for chosen in ("always2", None)]


def test_an_approval_of_any_input_must_be_confirmed() -> None:
    widest = list_choices(MAY_IT, can_confirm=True)[-2]

    assert ("always2", "ANY call of run, with any input") == (widest.id, widest.scope)
    assert "Every later call of run runs without approval, with any input." == widest.confirm
    assert {""} == {one.confirm for one in list_choices(MAY_IT)}
    assert widest.answer == answer_for_choice(MAY_IT, "always2", is_confirmed=True)


def test_an_effect_in_doubt_cannot_be_declined() -> None:
    doubt = Question("doubt:3", "Do it again?", ["yes", "no"])

    assert ["yes", "no"] == [one.label for one in list_choices(doubt)]
    assert ("no",) == answer_for_choice(doubt, None).selected


def test_question_as_json_has_choices_with_scope_and_answer() -> None:
    sent = question_to_json(evolve(MAY_IT, details={"what": "x"}))

    assert {
        "id": "always1", "label": "Always: all edits of files", "kind": "always", "description": "",
        "answer": {"text": "yes", "remember": "session", "covers": "edits"}, "scope": "all edits of files", "confirm": "",
        "rule": {"id": "edits", "decision": "allow", "match": {"category": "write"}},
    } == sent["choices"][2]  # fmt: skip
    assert [{"text": "yes"}, {"text": "no"}] == [sent["choices"][n]["answer"] for n in (0, -1)]
    assert [{"kind": "member", "name": "what", "value": "x"}] == sent["preview_parts"]
    assert [{"selected": ["red"]}, {"selected": ["blue, dark"]}, {"declined": True}] == [
        one["answer"] for one in question_to_json(COLOUR)["choices"]
    ]
    assert sent == json.loads(json.dumps(sent))


@pytest.mark.parametrize("question", [MAY_IT, PLAIN, COLOUR], ids=["rules", "permission", "options"])
def test_the_answer_of_every_choice_is_read_back(question: Question) -> None:
    choices = list_choices(question, can_confirm=True)

    assert [one.answer for one in choices] == [
        answer_from_json(one["answer"]) for one in question_to_json(question)["choices"]
    ]


@pytest.mark.parametrize(
    "value",
    [
        None, 5, {}, [1], {"approved": "yes"}, {"approved": True, "reason": 5}, {"approved": True, "editedInput": 5}, {"selected": [1]},
        {"text": 5}, {"text": "yes", "by": "root"}, {"remember": "always"}, {"result": "done"},
    ],
)  # fmt: skip
def test_other_json_of_a_page_is_no_answer(value: object) -> None:
    assert answer_from_json(value) is None


@pytest.mark.parametrize(
    ("match", "short", "full"),
    [
        ({"call": {"is": "run", "prefix": ["git", "a b"]}}, "git 'a b' with harmless options and paths", ""),
        ({"call": {"is": "write", "paths": ["a", "b"]}}, "write for a, b", ", with any other arguments"),
        ({"call": {"is": "run", "any_input": True}}, "ANY call of run, with any input", ""),
        ({"call": "run"}, "calls of run", ""),
        ({"tool": "x\x1b"}, "own", ""),
    ],
)
def test_scope_of_a_lasting_approval_is_described(match: dict[str, Any], short: str, full: str) -> None:
    assert (short, short + full) == tuple(
        [describe_scope(rule("own", match), is_full=is_full) for is_full in (False, True)]
    )


def test_an_edited_input_goes_with_an_approval_alone() -> None:
    assert ({"a": 1}, None) == tuple(
        [make_permission_answer(is_allowed=yes, edited_input={"a": 1}).edited_input for yes in (True, False)]
    )


# --- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "schema"),
    [
        (COLOUR, {"type": "string", "enum": ["red", "blue, dark"]}),
        (PLAIN, {"type": "string", "enum": ["yes", "no"]}),
        (Question("q", "Why?"), {"type": "string"}),
        (Question("q", "?", ["a"], allow_text=True), {"type": "string", "description": "One of a, or your own words"}),
        (Question("q", "?", ["a"], allow_text=True, number="any"), {"type": "string", "description": "One of a, or a number"}),
        (Question("q", "?", ["a"], True), {"type": "array", "items": {"type": "string", "enum": ["a"]}}),
        (Question("q", "?", ["a"], True, allow_text=True), {"type": "array", "items": {"type": "string"}}),
    ],
    ids=["options", "permission", "text", "other text", "number", "several", "several or text"],
)  # fmt: skip
def test_a_form_has_one_field_for_the_answer(question: Question, schema: dict[str, Any]) -> None:
    assert schema == answer_schema(question)


def test_form_value_becomes_an_answer_or_a_reasoned_refusal() -> None:
    several = Question("q", "?", ["a", "b"], True)

    assert Answer(selected=("blue, dark",)) == answer_from_form(COLOUR, "blue, dark")
    assert Answer(selected=("a", "b")) == answer_from_form(several, ["a", "b"])
    assert [Answer(declined=True)] * 2 == [answer_from_form(Question("q", "Why?"), value) for value in ("", None)]
    wrong = answer_from_form(COLOUR, "green")
    assert (True, f"the answer to 'q2' is 'green', which is {NO_OPTION}: 'red', 'blue, dark'") == (
        wrong.declined,
        wrong.reason,
    )


@given(
    options=st.sets(st.sampled_from(["a", "b", "c d"])),
    items=st.lists(st.sampled_from(["a", "b", "c d", "other", "x, y"]), min_size=1),
    parse=st.sampled_from(
        [answer_from_form, lambda question, value: require_valid_answer(answer_from_json(value), question)]
    ),
)
def test_answer_of_the_schema_is_never_lost(
    options: set[str], items: list[str], parse: Callable[[Question, object], Answer]
) -> None:
    question = Question("q", "Which?", sorted(options), multi_select=True, allow_text=True)
    jsonschema.validate(items, answer_schema(question))
    answer = parse(question, items)

    assert ", ".join(items) == answer.value
    assert (tuple(items) if set(items) <= options else ()) == answer.selected


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "subject"),
    [
        ({"argv": ["git", "a b"], "name": "x"}, "git 'a b'"),
        ({"command": "view", "path": "a.txt"}, "a.txt"),
        ({"paths": ["a", "b"]}, "a, b"),
        ({"other": 1}, ""),
        ("text", ""),
    ],
)
def test_call_subject_is_its_command_or_its_target(given: object, subject: str) -> None:
    assert subject == find_call_subject(given)


def test_preview_parts_are_ordered_and_command_is_not_repeated() -> None:
    details = {"cwd": ".", "argv": ["ls", "-l"], "command": "ls -l", "diff": "-a", "unified_diff": 3}

    assert [
        PreviewPart("action", "", "List"), PreviewPart("command", "", "ls -l"), PreviewPart("diff", "diff", "-a"),
        PreviewPart("member", "unified_diff", 3),
    ] == list(preview_parts({"action": "List", "details": details}))  # fmt: skip
    assert [PreviewPart("member", "", "to Bo")] == list(preview_parts({"details": "to Bo"}))
    assert [PreviewPart("member", "cwd", ".")] == list(preview_parts({"details": {"cwd": "."}}))
    assert [] == list(preview_parts({"details": None}))


def test_the_diff_of_a_permission_is_that_of_its_preview() -> None:
    shown = Question("q", "?", tool_name="w", preview={"action": "", "details": {"unified_diff": 3, "diff": "-a"}})

    assert ("-a", "") == (find_question_diff(shown), find_question_diff(PLAIN))
