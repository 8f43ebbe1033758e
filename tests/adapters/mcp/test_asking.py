"""
Forms and addresses that servers send, as questions, and what people say as the protocol has it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import Ask, StepResult
from stepengine.adapters.mcp.client_requests import ServerQuestions
from tests.strategies import json_values

ONE = {"type": "object", "required": ["x"]}


def answered(request: dict[str, Any], *said: str) -> tuple[Any, list[Ask]]:
    """
    Answer a request with what somebody says to one question after the other.
    """
    questions = ServerQuestions("srv", sampling=True)
    steps, waiting, asked = questions.answer_requests({"k": {"params": request}}), list(said), []
    try:
        question = steps.send(None)
        while True:
            asked.append(question)
            question = steps.send(StepResult(None, value=waiting.pop(0)))  # type: ignore[arg-type]
    except StopIteration as stop:
        return stop.value["k"], asked


def form(field: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"message": "Say", "requestedSchema": {**ONE, "properties": {"x": field}, **more}}


@pytest.mark.parametrize(
    ("field", "said", "options", "value"),
    [
        ({"type": "string"}, "a b", (), "a b"),
        ({"type": "string", "enum": ["a", "b"]}, "b", ("a", "b"), "b"),
        ({"type": "string", "oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, "a", ("A", "b"), "a"),
        ({"type": "boolean"}, "yes", ("yes", "no"), True),
        ({"type": "integer"}, " 7 ", (), 7),
        ({"type": "number"}, "1.5", (), 1.5),
        ({"type": "array", "items": {"type": "string", "enum": ["a", "b", "c"]}}, "a, c", ("a", "b", "c"), ["a", "c"]),
    ],
)
@pytest.mark.spec("reliability:MC12", "interfaces:IF64")
def test_form_field_is_asked_by_its_type(field: Any, said: str, options: Any, value: Any) -> None:
    answer, (question,) = answered(form(field), said)

    assert options == question.options
    assert (field["type"] == "array") == question.multi_select
    assert {"action": "accept", "content": {"x": value}} == answer


LIMITS = [
    ({"type": "integer", "minimum": 1, "maximum": 9}, "10", "a whole number, at least 1, at most 9"),
    ({"type": "number", "minimum": 0.5}, "0.25", "a number, at least 0.5"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "abcd", "at least 2 characters, at most 3 characters"),
    ({"type": "string", "format": "email"}, "ann", "an e-mail address"),
    ({"type": "string", "format": "uri"}, "example", "an address such as https://example.com"),
    ({"type": "string", "format": "date"}, "tomorrow", "a date such as 2026-07-28"),
    ({"type": "string", "format": "date-time"}, "9:30", "a time such as 2026-07-28T09:30:00+00:00"),
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 1}, "a, b", "at most 1 of them"),
    ({"type": "string", "enum": [f"c{n}" for n in range(60)]}, "c60", ""),
]


@pytest.mark.parametrize(("field", "unfit", "told"), LIMITS)
@pytest.mark.spec("interfaces:IF64")
def test_field_limits_are_shown_and_invalid_values_asked_again(field: Any, unfit: str, told: str) -> None:
    fits = {"10": "9", "0.25": "0.5", "abcd": "abc", "ann": "a@b.c", "example": "http://x.y", "tomorrow": "2026-07-28"}
    fits |= {"9:30": "2026-07-28T09:30:00Z", "a, b": "a", "c60": "c59"}

    answer, asked = answered(form(field), unfit, fits[unfit])

    assert ["accept", 2] == [answer["action"], len(asked)]
    assert told in asked[0].question
    value = answer["content"]["x"]
    assert fits[unfit] == ", ".join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(
    ("field", "said", "value", "told"),
    [
        ({"type": "string", "default": "red"}, "default", "red", "default: red (answer 'default' to use it)"),
        ({"type": "integer", "default": 7}, "Default", 7, "default: 7 (answer 'default' to use it)"),
        ({"type": "boolean", "default": True}, "no", False, "default: yes"),
        (
            {"type": "string", "oneOf": [{"const": "a", "title": "An A"}, {"const": "b"}], "default": "a"},
            "b",
            "b",
            "default: An A",
        ),
        ({"type": "string", "enum": ["default", "other"]}, "default", "default", ""),
    ],
)
@pytest.mark.spec("interfaces:IF64")
def test_default_is_shown_and_chosen_only_by_name(field: Any, said: str, value: Any, told: str) -> None:
    answer, (question,) = answered(form(field), said)
    silent, _ = answered(form(field), "")

    assert {"action": "accept", "content": {"x": value}} == answer
    assert told in question.question
    assert {"action": "decline"} == silent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ({"type": "boolean", "default": True}, True),
        ({"type": "string", "oneOf": [{"const": "1", "title": "One"}, {"const": "2"}], "default": "1"}, "1"),
        ({"type": "string", "enum": ["a", "b"], "enumNames": ["A", "B"], "default": "a"}, "a"),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "default": ["a", "c"]}, ["a", "c"]),
        ({"type": "string", "enum": [f"c{n}" for n in range(60)], "default": "c7"}, "c7"),
        ({"type": "string", "default": ""}, ""),
    ],
)
@pytest.mark.spec("interfaces:IF64")
def test_answer_default_selects_the_default_of_any_field(field: Any, value: Any) -> None:
    answer, (question,) = answered(form(field), "default")

    assert {"action": "accept", "content": {"x": value}} == answer
    assert not question.options or "default" == question.options[-1]


def test_default_cannot_be_combined_and_yields_to_a_named_choice() -> None:
    several = {"type": "array", "items": {"enum": ["a", "b"]}, "default": ["a"]}
    named = {"type": "string", "enum": ["Default", "other"], "default": "other"}

    _, asked = answered(form(several), "b, default", "b")
    answer, (question,) = answered(form(named), "Default")

    assert "'default' cannot be combined with other choices" in asked[1].question
    assert ({"x": "Default"}, ("Default", "other")) == (answer["content"], question.options)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ({"type": "string", "oneOf": [{"const": "1", "title": "One"}, {"const": "2", "title": "Two"}]}, ("One", "Two")),
        ({"type": "string", "enum": ["1", "2"], "enumNames": ["One", "Two"]}, ("One", "Two")),
        ({"type": "string", "oneOf": [{"const": "1", "title": "Same"}, {"const": "2", "title": "Same"}]}, ("1", "2")),
        (
            {"type": "array", "items": {"anyOf": [{"const": "1", "title": "One"}, {"const": "2", "title": "A, B"}]}},
            ("One", "A, B"),
        ),
    ],
)
@pytest.mark.spec("interfaces:IF64")
def test_choices_show_titles_and_send_the_servers_values(field: Any, options: Any) -> None:
    answer, (question,) = answered(form(field), options[1])

    assert options == question.options
    assert "2" in answer["content"]["x"]


@pytest.mark.parametrize(
    ("kind", "said", "value"),
    [({"type": "string"}, "hello", "hello"), ({"type": "integer"}, "7", 7), ({"enum": ["a", "b"]}, "b", "b")],
)
@pytest.mark.parametrize("member", ["anyOf", "oneOf"])
def test_field_that_may_be_null_is_asked_by_its_type(member: str, kind: Any, said: str, value: Any) -> None:
    answer, (question,) = answered(form({member: [kind, {"type": "null"}], "default": None}), said)

    assert {"action": "accept", "content": {"x": value}} == answer
    assert kind.get("enum", []) == list(question.options)


@pytest.mark.spec("interfaces:IF64")
def test_long_list_takes_only_its_choices() -> None:
    field = {"type": "array", "items": {"type": "string", "enum": [f"c{number}" for number in range(60)]}}

    answer, asked = answered(form(field), "c1, nonsense", "c1, c59")

    assert {"action": "accept", "content": {"x": ["c1", "c59"]}} == answer
    assert "'nonsense' is not one of c0, " in asked[1].question


def test_three_invalid_answers_decline_the_form() -> None:
    answer, asked = answered(form({"type": "integer"}), "a", "b", "c")

    assert {"action": "decline"} == answer
    assert 3 == len(asked)


def test_optional_field_can_be_omitted() -> None:
    answer, _ = answered(form({"type": "integer"}, required=[]), "")

    assert {"action": "accept", "content": {}} == answer


def many(number: int) -> dict[str, Any]:
    return {
        "message": "Say",
        "requestedSchema": {"properties": {f"f{n}": {"type": "string"} for n in range(number)}},
    }


@pytest.mark.parametrize(("number", "first"), [(25, []), (26, ["yes"])])
def test_form_of_any_size_is_asked_after_confirming_long_ones(number: int, first: list[str]) -> None:
    """
    Nobody declines for a person; only before very many fields it is asked whether to begin.
    """
    answer, asked = answered(many(number), *first, *[f"v{n}" for n in range(number)])

    assert {"action": "accept", "content": {f"f{n}": f"v{n}" for n in range(number)}} == answer
    assert [f"The MCP server srv asks: Say - a form of {number:,} fields; fill it in?"] * len(first) == [
        question.question for question in asked[: len(first)]
    ]


def test_declined_long_form_asks_only_once() -> None:
    answer, asked = answered(many(10_000), "no")

    assert ({"action": "decline"}, 1) == (answer, len(asked))


@pytest.mark.deep
@pytest.mark.smoke
@given(options=st.lists(st.sampled_from(["a", "b", "a, b", "b, c", "c"]), unique=True, min_size=2), data=st.data())
def test_option_containing_a_comma_is_one_choice(options: list[str], data: Any) -> None:
    chosen = data.draw(st.lists(st.sampled_from(options), unique=True, min_size=1, max_size=1))
    field = {"type": "array", "items": {"type": "string", "enum": options}}

    answer, _ = answered(form(field), ", ".join(chosen))

    assert {"action": "accept", "content": {"x": chosen}} == answer


def test_form_accepts_an_integer_over_64_bits() -> None:
    answer, _ = answered(form({"type": "integer"}), "9" * 30)

    assert {"action": "accept", "content": {"x": int("9" * 30)}} == answer


@pytest.mark.parametrize("said", ["nan", "-inf", "1e999", "9" * 5_000])
def test_non_json_number_is_refused(said: str) -> None:
    kind = "integer" if said.isdigit() else "number"

    assert {"action": "decline"} == answered(form({"type": kind}), *[said] * 3)[0]


@pytest.mark.deep
@pytest.mark.smoke
@given(
    fields=st.dictionaries(st.text(max_size=3), json_values(), max_size=3) | json_values(),
    field=st.dictionaries(st.sampled_from(["type", "enum", "oneOf", "items", "title"]), json_values()),
    required=json_values(),
    kind=st.sampled_from(["string", "boolean", "integer", "array"]),
)
def test_invalid_form_is_declined_or_asked_as_text(fields: Any, field: Any, required: Any, kind: str) -> None:
    for properties in (fields, {"x": field}, {"x": {**field, "type": kind}}):
        schema = {"properties": properties, "required": required}
        answer, _ = answered({"message": "Say", "requestedSchema": schema}, *["7"] * 20)

        assert answer["action"] in ("accept", "decline")


def test_negative_token_limit_gets_an_error() -> None:
    answer, asked = answered({"messages": [], "maxTokens": -5})

    assert (["error"], []) == (list(answer), asked)


def test_a_form_without_fields_is_a_yes_or_no() -> None:
    empty = {"message": "Sure?", "requestedSchema": {"type": "object", "properties": {}}}

    assert {"action": "accept", "content": {}} == answered(empty, "yes")[0]
    assert {"action": "decline"} == answered(empty, "no")[0]


@pytest.mark.spec("reliability:MC09", "interfaces:IF64")
def test_elicited_url_is_shown_with_control_characters_escaped() -> None:
    answer, (question,) = answered({"mode": "url", "message": "Sign in", "url": "javascript:x\x1b[2J"}, "done")

    assert {"action": "accept"} == answer
    assert "The MCP server srv asks: Sign in - open javascript:x\\x1b[2J yourself" == question.question


def test_long_server_message_is_shortened() -> None:
    _, (question,) = answered(form({"type": "string", "description": "x" * 100_000}), "a")

    assert len(question.question) < 1_100
