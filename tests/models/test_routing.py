"""Fallback between models as an ordinary model string, and what a registry makes of it."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest

from stepengine.data.codec import from_json, to_json
from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ReplyDone, TextChunk
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.data.yields import StepWith
from stepengine.errors import ContextOverflow, MissingKey, ModelError, UnknownModel
from stepengine.models import ModelInfo, Models, Provider, fallback
from stepengine.models.pricing import LIST_PRICES
from stepengine.models.routing import parse_route

pytestmark = pytest.mark.anyio

DOWN = ModelError("down", retryable=True, status=503)
FAILURES = {
    "unavailable": DOWN,
    "rate_limit": ModelError("slow", retryable=True, status=429),
    "no_credit": ModelError("poor", status=402, kind="no_credit"),
    "overflow": ContextOverflow("full", status=400),
    "auth": ModelError("who?", status=401),
    "unknown_model": ModelError("what?", status=404),
    "invalid": ModelError("no", status=400),
}


class Scripted(Provider):
    """Gives replies and raises errors in turn, the last one for ever; a text in a pair is shown before the error."""

    def __init__(self, name, *script):
        self.name = name
        self.script = list(script)
        self.asked = []

    def _next(self, request):
        self.asked.append(request.model)
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    async def complete(self, request):
        given = self._next(request)
        if isinstance(given, ModelError):
            raise given
        return ModelReply(given)

    async def stream(self, request):
        given = self._next(request)
        shown, given = given if isinstance(given, tuple) else ("", given)
        if shown:
            yield TextChunk(shown)
        if isinstance(given, ModelError):
            raise given
        yield ReplyDone(ModelReply(given))


def models_of(*providers):
    return Models({provider.name: provider for provider in providers})


ASK = ModelRequest("x", messages=Transcript([UserMessage("hi")]))


async def last(provider, request=ASK):
    items = [delta async for delta in provider.stream(request)]
    assert sum(type(item) is ReplyDone for item in items) == 1
    return items[-1].reply


@pytest.mark.spec("requirements:G12", "reliability:MP62")
@pytest.mark.parametrize("stream", [False, True])
async def test_fallback_model_answers_and_is_named_in_the_reply(stream):
    a, b = Scripted("a", DOWN), Scripted("b", "fine")
    provider = models_of(a, b).provider_for(fallback("a/x", "b:y"))
    reply = await (last(provider) if stream else provider.complete(ASK))
    assert (reply.text, reply.model) == ("fine", "b/y")
    assert (a.asked, b.asked) == (["a/x"], ["b/y"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cause", FAILURES)
async def test_only_the_failures_that_were_asked_for_move_on(cause, stream):
    for failed, error in FAILURES.items():
        a, b = Scripted("a", error), Scripted("b", "fine")
        provider = models_of(a, b).provider_for(fallback("a/x", "b/y", on=cause))
        moves = failed == cause or (cause == "invalid" and not error.retryable)
        if moves:
            assert (await (last(provider) if stream else provider.complete(ASK))).model == "b/y"
        else:
            with pytest.raises(ModelError) as caught:
                await (last(provider) if stream else provider.complete(ASK))
            assert caught.value is error
            assert b.asked == []


@pytest.mark.parametrize("stream", [False, True])
async def test_default_fallback_moves_on_for_provider_and_key_failures_only(
    stream,
):
    moved = []
    for failed, error in FAILURES.items():
        a, b = Scripted("a", error), Scripted("b", "fine")
        provider = models_of(a, b).provider_for(fallback("a/x", "b/y"))
        with contextlib.suppress(ModelError):
            await (last(provider) if stream else provider.complete(ASK))
            moved.append(failed)
    assert moved == ["unavailable", "rate_limit", "no_credit", "auth"]


async def test_last_failure_is_raised_with_the_usage_of_all():
    first = ModelError("a", retryable=True, usage=Usage(1, 2))
    second = ModelError("b", retryable=True, usage=Usage(10, 20))
    provider = models_of(Scripted("a", first), Scripted("b", second)).provider_for("a/x | b/y")
    for ask in (provider.complete(ASK), last(provider)):
        first.usage, second.usage = Usage(1, 2), Usage(10, 20)
        with pytest.raises(ModelError) as caught:
            await ask
        assert caught.value is second
        assert caught.value.usage == Usage(11, 22, requests=2)


async def test_usage_of_a_failed_model_is_added_to_the_reply():
    error = ModelError("cut", retryable=True, usage=Usage(5, 1, at_least=True))
    provider = models_of(Scripted("a", error), Scripted("b", "fine")).provider_for("a/x | b/y")
    reply = await provider.complete(ASK)
    assert reply.usage == Usage(5, 1, requests=2, at_least=True)


@pytest.mark.spec("reliability:MP19")
async def test_after_shown_text_the_next_attempt_uses_the_next_model():
    a, b = Scripted("a", ("half an ans", ModelError("broke", retryable=False))), Scripted("b", "fine")
    provider = models_of(a, b).provider_for(fallback("a/x", "b/y", on="invalid"))
    with pytest.raises(ModelError) as caught:
        await last(provider)
    assert caught.value.retryable
    assert b.asked == []
    assert (await last(provider)).model == "b/y"
    assert (a.asked, b.asked) == (["a/x"], ["b/y"])
    with pytest.raises(ModelError):  # forgotten: the next call begins at the beginning
        await last(provider)


async def test_fallback_is_a_valid_model_string():
    model = fallback("anthropic/claude-x", "openai/gpt-5", on=("overflow", "auth"))
    assert model == "anthropic/claude-x | openai/gpt-5 on overflow,auth"
    assert AgentDefinition(id="x", model=model).model == model
    request = ModelRequest(model)
    assert from_json(to_json(request)) == request
    assert StepWith(model=model).model == model
    models = Models.standard()
    assert str(models.parse(model)) == model
    assert str(models.parse("claude-x|openai:gpt-5")) == "anthropic/claude-x | openai/gpt-5"
    assert parse_route(model).causes == ("overflow", "auth")
    assert parse_route("anthropic/claude-x") is None


@pytest.mark.spec("requirements:G13", "requirements:G23")
async def test_every_model_of_a_fallback_is_checked_before_a_run(monkeypatch):
    models = Models.standard(aliases={"safe": "anthropic/claude-x | openai/gpt-5"})
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    with pytest.raises(MissingKey, match="OPENAI_API_KEY"):
        models.check("safe")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    models.check("safe")
    for broken in ("anthropic/x |", "nobody/x | openai/gpt-5", "anthropic/x | openai/y on monday"):
        with pytest.raises(UnknownModel):
            models.check(broken)
    for wrong in (("a/b",), ("a/b", "")):
        with pytest.raises(UnknownModel):
            fallback(*wrong)
    with pytest.raises(UnknownModel, match="monday"):
        fallback("a/b", "c/d", on="monday")


@pytest.mark.spec("requirements:G15", "reliability:MP63")
async def test_fallback_info_and_cost_hold_for_all_its_models():
    models = Models.standard(info={"ollama/x": ModelInfo(8_000, 500), "ollama/y": ModelInfo(4_000, 900)})
    assert models.info("ollama/x | ollama/y") == ModelInfo(4_000, 500)
    assert models.info("ollama/x | vllm/nobody-knows") == ModelInfo()
    at = datetime(2026, 11, 1, tzinfo=UTC)
    dear, cheap = [
        LIST_PRICES(f"anthropic/{name}", Usage(1_000, 1_000), at) for name in ("claude-opus-4-1", "claude-haiku-4-5")
    ]
    both = LIST_PRICES("anthropic/claude-haiku-4-5 | anthropic/claude-opus-4-1", Usage(1_000, 1_000), at)
    assert both == dear > cheap
    assert LIST_PRICES("anthropic/claude-haiku-4-5 | vllm/m", Usage(1, 1), at) is None


async def test_single_provider_is_asked_for_each_fallback_model_in_turn():
    only = Scripted("only", DOWN, "fine")
    models = Models.from_value(only)
    provider = models.provider_for("a/x | b/y")
    reply = await provider.complete(ASK)
    assert (only.asked, reply.model) == (["a/x", "b/y"], "b/y")


@pytest.mark.parametrize("stream", [True, False])
async def test_fallback_skips_a_provider_that_cannot_be_created(stream):
    def fail():
        raise MissingKey("no key")

    models = Models({"a": fail, "b": Scripted("b", "fine")})
    provider = models.provider_for("a/x | b/y")
    reply = await last(provider) if stream else await provider.complete(ASK)
    assert ("fine", "b/y") == (reply.text, reply.model)
