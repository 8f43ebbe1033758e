"""
`stepengine_engine` and `cassette.clients()`: the real SDKs and adapters, against a recording and nothing else.
"""

from __future__ import annotations

import re

import httpx2
import pytest

import stepengine.models.anthropic
import stepengine.models.google
import stepengine.models.openai
import stepengine.models.openai_chat
from stepengine.testing import Cassette, CassetteFixture, ScriptedModel
from stepengine.testing.cassette_files import RecordedRequest
from stepengine.testing.engines import EngineFactory
from stepengine.testing.transport import Clients
from tests.phrases import NO_KEY

pytest_plugins = ("pytester",)
SHARED = (
    stepengine.models.anthropic,
    stepengine.models.google,
    stepengine.models.openai,
    stepengine.models.openai_chat,
)

ANTHROPIC = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-test", "stop_reason": "end_turn",
    "stop_sequence": None, "content": [{"type": "text", "text": "fine"}],
    "usage": {"input_tokens": 3, "output_tokens": 1},
}  # fmt: skip
OPENAI = {
    "id": "c1", "object": "chat.completion", "created": 1, "model": "gpt-test",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "fine"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}  # fmt: skip
GOOGLE = {"candidates": [{"content": {"role": "model", "parts": [{"text": "fine"}]}, "finishReason": "STOP"}]}
PLACES = {
    "api.anthropic.com/v1/messages": ANTHROPIC,
    "api.openai.com/v1/chat/completions": OPENAI,
    "generativelanguage.googleapis.com/v1beta/models/g:generateContent": GOOGLE,
}
ASKED = {"messages": [{"role": "user", "content": "go"}]}

ENVIRONMENT = {
    "ANTHROPIC_BASE_URL": "https://elsewhere.test", "OPENAI_BASE_URL": "https://elsewhere.test",
    "GOOGLE_GEMINI_BASE_URL": "https://elsewhere.test", "GOOGLE_GENAI_API_VERSION": "v9",
}  # fmt: skip


def provider(request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, json=PLACES[f"{request.url.host}{request.url.path}"])


def ask_all(clients: Clients) -> list[str]:
    return [
        clients.anthropic.messages.create(model="m", max_tokens=5, **ASKED).content[0].text,
        clients.openai.chat.completions.create(model="m", **ASKED).choices[0].message.content,
        clients.google.models.generate_content(model="g", contents="go").text,
    ]


async def ask_all_async(clients: Clients) -> list[str]:
    return [
        (await clients.async_anthropic.messages.create(model="m", max_tokens=5, **ASKED)).content[0].text,
        (await clients.async_openai.chat.completions.create(model="m", **ASKED)).choices[0].message.content,
        (await clients.google.aio.models.generate_content(model="g", contents="go")).text,
    ]


@pytest.fixture(scope="module", autouse=True)
def sdk() -> None:
    """
    A run in this process forgets what it has imported, and would import the SDK again each time.
    """
    import openai.resources.chat.completions  # noqa: F401


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y4", "replay:C20", "replay:C27", "replay:Y11")  # fmt: skip
@pytest.mark.anyio
async def test_sdk_clients_record_and_replay_regardless_of_the_environment(tmp_path, monkeypatch):
    """
    Sync and async sides ask the same, so one recording serves both; without keys, at the providers' own addresses.
    """
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "one.yaml"
    with pytest.MonkeyPatch.context() as keys:
        for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GOOGLE_API_KEY"):
            keys.setenv(name, "live-key-of-somebody")
        live = CassetteFixture(file, "once")
        with live.clients(httpx2.MockTransport(provider)) as clients:
            assert ["fine"] * 3 == ask_all(clients)
        live.write_recordings()
    hosts = [RecordedRequest("POST", i.request.url).url for i in Cassette.load(file).interactions]
    assert list(PLACES) == [re.sub(r"https://|\?.*", "", url) for url in hosts]
    assert "live-key" not in file.read_text()

    again, aside = CassetteFixture(file, "none"), CassetteFixture(file, "none")
    with again.clients() as clients:
        assert ["fine"] * 3 == ask_all(clients)
    async with aside.clients() as clients:
        assert ["fine"] * 3 == await ask_all_async(clients)
    again.check_usage()
    aside.check_usage()
    assert (True, "replay") == (again.replaying, clients.anthropic.api_key)
    assert 0 == clients.async_openai.max_retries == clients.anthropic.max_retries


ENGINE = f"""
import httpx2, json, pytest, random
from stepengine import AgentDefinition, STEP

REPLY = {OPENAI!r}
SEEN = []

def provider(request):
    SEEN.append(str(request.url))
    return httpx2.Response(200, json=REPLY)

@pytest.fixture(autouse=True)
def inner(monkeypatch):
    from stepengine.testing import transport as recording
    monkeypatch.setattr(recording.httpx2, "AsyncHTTPTransport", lambda: httpx2.MockTransport(provider))

DRAWN = []

def handle(ctx):
    DRAWN.append((ctx.random.random(), str(ctx.now())[:10]))
    yield STEP
    return "done"

agent = AgentDefinition("one", model="openai_chat/gpt-test", handle_steps=handle)

def test_one(FIXTURES):
    made = stepengine_engine([agent])
    result = made.run_sync("one", "go"OPTIONS)
    assert result.output == "done", result.error
    print("drawn", DRAWN)
    assert len(SEEN) == ASKED
"""


def engine_test(asked: int, fixtures: str = "stepengine_engine", options: str = "") -> str:
    return ENGINE.replace("FIXTURES", fixtures).replace("OPTIONS", options).replace("ASKED", str(asked))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y5", "replay:Y17", "replay:Y11", "replay:C27", "replay:C43")
def test_the_engine_fixture_uses_its_cassette_and_fixed_random_values(run, pytester, monkeypatch):
    """
    Recording needs the key; replaying needs none. Both use the address of the environment.
    """
    run(engine_test(1), "--stepengine-record=once").stdout.fnmatch_lines([f"*there is {NO_KEY} 'openai_chat'*"])
    monkeypatch.setenv("OPENAI_API_KEY", "live-key-of-somebody")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://elsewhere.test/v1")
    monkeypatch.setenv("STEPENGINE_KEY_HOSTS", "elsewhere.test")
    recorded = run(engine_test(1), "--stepengine-record=once", "-s")
    recorded.assert_outcomes(passed=1)
    recorded.stdout.fnmatch_lines(["recorded cassettes/test_it/test_one.yaml: 1 interaction*"])
    written = (pytester.path / "cassettes/test_it/test_one.yaml").read_text()
    assert "live-key" not in written
    assert "https://elsewhere.test/v1/chat/completions" in written

    replayed = run(engine_test(0), "-s")
    replayed.assert_outcomes(passed=1)
    drawn = [re.findall(r"drawn .*", done.stdout.str()) for done in (recorded, replayed)]
    assert (1, drawn[0]) == (len(drawn[1]), drawn[1])
    monkeypatch.delenv("OPENAI_API_KEY")
    run(engine_test(0)).assert_outcomes(passed=1)
    changed = run(engine_test(0).replace('"go"', '"stop"'))
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*CassetteMiss*", "*nearest: interaction 0*", '*"go"*"stop"*'])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y5")
def test_the_engine_fixture_needs_no_cassette_with_a_journal(run, pytester, monkeypatch):
    both = {"fixtures": "stepengine_engine, journal", "options": ", journal=journal"}
    body = (
        engine_test(1, **both)
        .replace("stepengine_engine([agent])", "stepengine_engine([agent], models=ScriptedModel([text('fine')]))")
        .replace("assert len(SEEN) == 1", "")
    )
    body = body.replace("import httpx2", "from stepengine.testing import ScriptedModel, text\nimport httpx2", 1)
    run(body, "--stepengine-record=once").assert_outcomes(passed=1)
    assert ["test_one.jsonl"] == [p.name for p in pytester.path.rglob("test_one.*")]
    run(engine_test(0, **both)).assert_outcomes(passed=1)


@pytest.mark.spec("replay:C41", "replay:Y8")
def test_model_calls_bypassing_the_cassette_fail_a_recording_test(run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "live-key-of-somebody")
    body = (
        engine_test(1)
        + "\n\n@pytest.fixture(autouse=True)\ndef another_stack(stepengine_cassette, monkeypatch):\n"
        + ("    monkeypatch.setattr(stepengine_cassette, 'transport', lambda: httpx2.MockTransport(provider))\n")
    )
    failed = run(body, "--stepengine-record=once")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*1 model calls were made, but no request went through the cassette*test_one.yaml*"])


class FailsToClose(ScriptedModel):
    """A model whose ``close`` raises an exception."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1
        msg = "cannot close"
        raise OSError(msg)


@pytest.mark.spec("reliability:RS11")
def test_failed_close_of_one_engine_leaves_no_other_open():
    factory, models = EngineFactory(None), [FailsToClose([]), FailsToClose([])]
    for model in models:
        factory(models=model)

    with pytest.raises(OSError, match="cannot close"):
        factory.close()
    assert [1, 1] == [model.closed for model in models]
