"""A request that is longer than its model's window, and a server that would cut it without a word (PV84)."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentDefinition, Complete, Engine, Hooks, ModelSettings, UserMessage
from stepengine.context import truncate
from stepengine.errors import ContextOverflow
from stepengine.journal import MemoryJournal
from stepengine.models import ModelInfo, Models
from stepengine.testing import ScriptedModel, text

pytestmark = pytest.mark.spec("providers:PV84")

WINDOW = 1_000
REFUSE = ModelSettings(oversize="refuse")


def models_of(script: ScriptedModel, window: int | None = WINDOW) -> Models:
    return Models({"local": script}, info={"local/m": ModelInfo(window), "local/n": ModelInfo(window)})


def agent(**options: Any) -> AgentDefinition:
    return AgentDefinition("asker", model=options.pop("model", "local/m"), **options)


def test_oversize_refuse_sends_nothing_and_states_both_sizes():
    script = ScriptedModel([text("never")])
    with Engine([agent(settings=REFUSE)], models=models_of(script)) as engine:
        result = engine.run_sync("asker", "word " * 2_000)

    assert ContextOverflow is type(result.error)
    assert "'local/m' accepts 1000 tokens, and the request has about 25" in str(result.error)
    assert [] == script.calls


@pytest.mark.parametrize(
    ("options", "window", "words"),
    [
        ({}, WINDOW, 2_000),
        ({"settings": REFUSE}, None, 2_000),
        ({"settings": REFUSE}, WINDOW, 700),
        ({"settings": REFUSE, "model": "local/m | local/n"}, WINDOW, 2_000),
    ],
)
def test_oversize_is_left_to_the_provider_unless_refusal_applies(options, window, words):
    script = ScriptedModel([text("ok")])
    with Engine([agent(**options)], models=models_of(script, window)) as engine:
        assert "ok" == engine.run_sync("asker", "word " * words).unwrap()
    assert 1 == len(script.calls)


def test_context_policy_shortens_an_oversize_request_once_and_replays_alike():
    plain = AgentDefinition("plain", model="local/m")
    shortened = agent(settings=REFUSE, hooks=Hooks(pre_step=[truncate(max_tokens=10_000)]))
    script, journal = ScriptedModel([text("hi"), text("read"), text("ok")]), MemoryJournal()
    with Engine([plain, shortened], models=models_of(script)) as engine:
        begun = engine.run_sync("plain", "hi")
        read = engine.run_sync("plain", "word " * 2_000, previous=begun.state)
        result = engine.run_sync("asker", "and now?", previous=read.state, journal=journal)
    with Engine([shortened], models=ScriptedModel([])) as engine:
        replayed = engine.replay_sync(journal)

    assert ("ok", "ok", 3) == (result.unwrap(), replayed.unwrap(), len(script.calls))
    assert len(script.calls[2].messages) < 5


@pytest.mark.spec("requirements:G15")
async def test_context_window_learnt_in_one_run_counts_in_the_next():
    class Stating(ScriptedModel):
        async def describe(self, model: str) -> ModelInfo:
            return ModelInfo(WINDOW)

    models = Models({"local": Stating([text("ok")])})
    async with Engine([agent(settings=REFUSE)], models=models) as engine:
        before = await engine.run("asker", "word " * 2_000)
        await models.ask("local/m")
        after = await engine.run("asker", "word " * 2_000)

    assert ("ok", ContextOverflow) == (before.unwrap(), type(after.error))


def test_context_overflow_is_raised_at_the_handlers_yield():
    def handler(ctx: Any) -> Any:
        try:
            yield from Complete([UserMessage("word " * 2_000)])
        except ContextOverflow:
            return "too long"

    with Engine([agent(settings=REFUSE, handle_steps=handler)], models=models_of(ScriptedModel([]))) as engine:
        assert "too long" == engine.run_sync("asker").unwrap()
