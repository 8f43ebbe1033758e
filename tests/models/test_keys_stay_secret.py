"""
A key that this process gave to a provider is in nothing that is written, whichever way it was given (R11, K14).
"""

from __future__ import annotations

import base64
import json
import logging

import httpx2
import pytest

from stepengine import STEP, AgentDefinition, Engine, Perform, tool
from stepengine.errors import ModelError
from stepengine.events import LogLine, RunFinished, TextDelta, ToolFinished
from stepengine.journal import FileJournal
from stepengine.models import Models, OpenAIChatProvider
from stepengine.redaction import GIVEN
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled.web.search_queries import BraveSearch
from tests.faults.scripts import WIRES

KEY = "PLANT" + "k7Q" * 10
ENV = "ENVPLANT" + "z9W" * 10
JSON = {"content-type": "application/json"}


def provider(wire, answer, **options):
    return wire.provider(api_key=KEY, transport=httpx2.MockTransport(answer), **options)


def echoing(wire, key: str = KEY):
    """Answer with the key in every place that a reply has for text, in one piece or as a stream."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        said = f"the key is {key}, {base64.b64encode(key.encode()).decode()}"
        if b'"stream":true' in request.content or "stream" in request.url.path:
            body = b"".join(wire.stream(said, [], "end_turn"))
            return httpx2.Response(200, content=body, headers={"content-type": "text/event-stream"})
        return httpx2.Response(200, content=wire.reply(said, [], "end_turn"), headers={**JSON, "request-id": key})

    return answer


async def events_of(agent, models, **options):
    async with Engine([agent], models=models) as engine:
        return [event async for event in engine.stream(agent.id, "go", **options)]


def told(events) -> str:
    return "".join([json.dumps(e.to_json()) + repr(e) for e in events if not isinstance(e, RunFinished)])


@pytest.mark.anyio
@pytest.mark.spec("reliability:R11", "replay:K14", "replay:K6")
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_echoed_key_is_in_no_journal_and_no_event(wire, watched, tmp_path):
    made = provider(wire, echoing(wire))
    agent = AgentDefinition("a", model=wire.request().model)
    journal = FileJournal(tmp_path / "run.jsonl")
    async with Engine([agent], models=made) as engine:
        if watched:
            events = [event async for event in engine.stream("a", "go", journal=journal)]
            result = events[-1].result
        else:
            events, result = [], await engine.run("a", "go", journal=journal)
        written = (tmp_path / "run.jsonl").read_text()
        replayed = await engine.replay(FileJournal(tmp_path / "run.jsonl"))

    assert KEY in result.unwrap()  # the run itself has what the model said
    for form in (KEY, base64.b64encode(KEY.encode()).decode()):
        assert form not in written + told(events)
    assert f"<redacted:{made.name}_api_key>" in written
    assert f"the key is <redacted:{made.name}_api_key>" in replayed.text


@pytest.mark.spec("replay:K1", "replay:K6")
def test_a_variable_with_the_value_of_the_key_names_it(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", KEY)
    monkeypatch.setenv("A_WORD", ENV)
    OpenAIChatProvider("groq", KEY)
    OpenAIChatProvider("mistral", ENV)

    assert {KEY: "SOME_TOKEN", ENV: "A_WORD"} == GIVEN.names


@pytest.mark.spec("reliability:R11")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"headers": {"Authorization": f"Bearer {KEY}"}}, "corp_authorization"),
        ({"headers": {"x-proxy-token": KEY}}, "corp_x-proxy-token"),
        ({"base_url": f"https://me:{KEY}@proxy.example/v1"}, "corp_password"),
    ],
)
def test_header_and_url_secrets_are_redacted_as_keys(options, name):
    OpenAIChatProvider("corp", "key-of-corp", **{"base_url": "http://localhost/v1", **options}).check("corp/m")

    assert name == GIVEN.names[KEY]


def test_search_service_key_is_redacted_too():
    BraveSearch(KEY)

    assert "brave_api_key" == GIVEN.names[KEY]


@pytest.mark.anyio
@pytest.mark.spec("reliability:R11", "reliability:MP01")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_error_shows_no_key_in_message_id_or_details(wire, stream, monkeypatch):
    monkeypatch.setenv("OTHER_SERVICE_TOKEN", ENV)

    def answer(request):
        error = {"message": f"bad {KEY} {ENV}", "type": f"type_{KEY}", "code": ENV, "status": KEY}
        body = {"error": error, "request_id": KEY, "type": "error"}
        return httpx2.Response(401, json=body, headers={"x-request-id": f"{ENV} {KEY}"})

    made = provider(wire, answer)
    with pytest.raises(ModelError) as caught:
        if stream:
            _ = [delta async for delta in made.stream(wire.request())]
        else:
            await made.complete(wire.request())
    await made.close()

    shown = f"{caught.value} {caught.value!r} {caught.value.__dict__}"
    assert KEY not in shown
    assert ENV not in shown
    assert f"<redacted:OTHER_SERVICE_TOKEN> <redacted:{made.name}_api_key>" == caught.value.request_id


@pytest.mark.anyio
@pytest.mark.spec("reliability:R11", "replay:K14", "reliability:TL01")
async def test_events_carry_no_key_of_the_environment(monkeypatch, caplog):
    monkeypatch.setenv("MY_SERVICE_TOKEN", ENV)
    caplog.set_level(logging.DEBUG, "stepengine")

    @tool
    def leak(value: str) -> str:
        """Leak."""
        raise ValueError(f"cannot use {value}")

    said = f"have {ENV}"

    def handle_steps(ctx):
        ctx.logger.info(said, more={"deep": [ENV]})
        ctx.notify(f"note {ENV}", {"x": ENV})
        yield from Perform(str, ENV)
        yield STEP
        yield STEP
        return f"the end {ENV}"

    agent = AgentDefinition("a", model="t/m", tools=[leak], handle_steps=handle_steps, system_prompt=f"system {ENV}")
    replies = [tool_call("leak", {"value": ENV}, text=f"I use {ENV}"), text(f"so {ENV}")]
    events = await events_of(agent, ScriptedModel(replies), metadata={"m": ENV})

    kinds = {type(event) for event in events}
    assert {LogLine, ToolFinished, TextDelta, RunFinished} <= kinds
    assert ENV not in told(events)
    assert "<redacted:MY_SERVICE_TOKEN>" in told(events)
    assert f"the end {ENV}" == events[-1].result.output
    assert ENV not in "".join([repr(record.__dict__) + record.getMessage() for record in caplog.records])


class Trickling(ScriptedModel):
    """Streams its text a few characters at a time."""

    async def stream(self, request):
        from stepengine.data.models import ReplyDone, TextChunk

        async for delta in super().stream(request):
            if isinstance(delta, TextChunk):
                for at in range(0, len(delta.text), 7):
                    yield TextChunk(delta.text[at : at + 7])
            else:
                assert isinstance(delta, ReplyDone)
                yield delta


@pytest.mark.anyio
@pytest.mark.spec("reliability:R11", "replay:K14")
@pytest.mark.parametrize("end", ["", " and more", ENV[:9]])
async def test_a_key_that_comes_in_pieces_is_in_no_delta(monkeypatch, end):
    monkeypatch.setenv("MY_SERVICE_TOKEN", ENV)
    agent = AgentDefinition("a", model="t/m")
    events = await events_of(agent, Trickling([text(f"it is {ENV}, {ENV}{end}")]))

    shown = "".join([event.text for event in events if isinstance(event, TextDelta)])
    assert f"it is <redacted:MY_SERVICE_TOKEN>, <redacted:MY_SERVICE_TOKEN>{end}" == shown


@pytest.mark.anyio
@pytest.mark.spec("reliability:R11")
@pytest.mark.parametrize("name", ["anthropic._base_client", "openai._base_client", "google_genai.models", "httpx2",
                                  "httpcore2.http11", "httpcore2.http2", "asyncio", "stepengine.models"])  # fmt: skip
async def test_loggers_of_sdks_and_libraries_write_no_key(name, caplog, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", ENV)
    import anthropic  # noqa: F401 - their loggers are made on import
    import google.genai  # noqa: F401

    made = OpenAIChatProvider("groq", KEY, transport=httpx2.MockTransport(lambda request: httpx2.Response(500)))
    with pytest.raises(ModelError):
        await made.complete(WIRES[0].request())
    await made.close()
    logger = logging.getLogger(name)
    caplog.set_level(logging.DEBUG, name)
    try:
        raise ValueError(KEY)
    except ValueError:
        logger.exception(
            "headers: %s %r", {"authorization": f"Bearer {KEY}"}, [ENV.encode()], extra={"given": {"a": KEY}}
        )
    shown = f"100% {KEY}"
    logger.debug(shown)
    logger.debug(*("no place for it", KEY))
    logger.info("all is well %d", 3)

    written = "".join([repr(r.__dict__) + caplog.handler.format(r) for r in caplog.records])
    assert KEY not in written
    assert ENV not in written
    assert "100% <redacted:groq_api_key>" in caplog.messages
    assert "all is well 3" in caplog.messages


@pytest.mark.spec("durable:U21", "reliability:SC05")
def test_account_depends_on_the_key_without_revealing_it(monkeypatch):
    monkeypatch.setenv("SOME_KEY", ENV)
    given = OpenAIChatProvider("vllm", base_url="http://here.example/v1", api_key=ENV)
    read = OpenAIChatProvider("vllm", base_url="http://there.example/v1", key_env="SOME_KEY")
    other = OpenAIChatProvider("vllm", base_url="http://here.example/v1", api_key=KEY)
    none, near = (OpenAIChatProvider("vllm", base_url=url) for url in ("http://here.example/v1", "http://localhost/v1"))
    here = near.get_account()
    monkeypatch.setattr("socket.gethostname", lambda: "another-machine")

    assert (
        given.get_account()
        == read.get_account()
        == Models({"p": given}, aliases={"m": "p/x"}).provider_for("m").get_account()
    )
    assert 4 == len({given.get_account(), other.get_account(), none.get_account(), here})
    # What runs on this machine is another server on another one; a key and an address elsewhere are the same everywhere.
    assert here != near.get_account()
    assert "" == ScriptedModel([]).get_account()
    assert all(
        len(p.get_account()) == 24 and set(p.get_account()) <= set("0123456789abcdef") for p in (given, other, none)
    )
