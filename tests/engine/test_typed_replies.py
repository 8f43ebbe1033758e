"""
One model call whose reply is an object: `Complete(schema=)`.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from stepengine import AgentDefinition, Complete, Engine, ModelSettings, retry
from stepengine.errors import BadYield
from stepengine.testing import ScriptedModel, run_script

pytestmark = pytest.mark.spec("generator-contract:G21", "generator-contract:G36")


class Choice(BaseModel):
    best: int
    why: str = ""


def choose(ctx: Any) -> Any:
    choice = yield from Complete(ctx.prompt, schema=Choice)
    assert isinstance(choice, Choice)
    return choice.best


AGENT = AgentDefinition("chooser", model="test/model", handle_steps=choose)


@pytest.mark.parametrize(
    "reply", ['{"best": 2}', '```json\n{"best": 2, "why": "short"}\n```', '<think>1?</think>{"best": 2}']
)
def test_a_reply_becomes_an_object_live_and_replayed(tmp_path: Path, reply: str) -> None:
    model = ScriptedModel([reply])
    with Engine([AGENT], models=model) as engine:
        result = engine.run_sync(AGENT, "Which?", journal=tmp_path / "run.jsonl")
        assert engine.replay_sync(tmp_path / "run.jsonl") == result

    assert 2 == result.unwrap()
    (request,) = model.calls
    assert Choice.model_json_schema() == request.settings.response_schema


@pytest.mark.parametrize(
    ("reply", "issue"),
    [
        ("Number two.", "its text is not JSON: 'Number two.'"),
        ('{"best": "b"}', "best: Input should be a valid integer"),
        ("[]", "(the whole)"),
    ],
)
def test_an_unfit_reply_fails_with_model_and_field(reply: str, issue: str) -> None:
    with Engine([AGENT], models=ScriptedModel([reply])) as engine:
        result = engine.run_sync(AGENT, "Which?")

    assert result.error is not None
    assert "OutputMissing" == type(result.error).__name__
    assert "does not fit Choice" in str(result.error)
    assert issue in str(result.error)


def test_retry_calls_the_model_again_after_unfit_replies() -> None:
    def ask(ctx: Any) -> Any:
        return (yield from retry(lambda: Complete("Which?", schema=Choice), times=3)).best

    agent = AgentDefinition("patient", model="test/model", handle_steps=ask)
    with Engine([agent], models=ScriptedModel(["?", "{}", '{"best": 1}'])) as engine:
        assert 1 == engine.run_sync(agent).unwrap()


def test_run_with_answers_a_typed_call_with_text() -> None:
    assert 3 == run_script(AGENT, [(Complete("Which?", schema=Choice), '{"best": 3}')], prompt="Which?")


def test_a_schema_that_is_no_model_is_refused() -> None:
    with pytest.raises(BadYield, match=r"a pydantic model, not .*response_schema"):
        Complete("Which?", schema={"type": "object"})  # type: ignore[arg-type]


def test_two_schemas_for_one_reply_are_refused() -> None:
    with pytest.raises(BadYield, match="leave one of them out"):
        Complete("Which?", schema=Choice, settings=ModelSettings(response_schema={"type": "object"}))


class Appointment(BaseModel, strict=True):
    day: date
    places: tuple[int, ...]


def test_a_strict_model_reads_dates_and_tuples_from_a_reply() -> None:
    def ask(ctx: Any) -> Any:
        return (yield from Complete("When?", schema=Appointment))

    agent = AgentDefinition("planner", model="test/model", handle_steps=ask)
    with Engine([agent], models=ScriptedModel(['{"day": "2026-11-28", "places": [1, 2]}'])) as engine:
        assert Appointment(day=date(2026, 11, 28), places=(1, 2)) == engine.run_sync(agent).unwrap()
