"""
Programs that make their own SDK clients, under the plugin, against a server of this machine.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from tests.model_server import ModelServer, model_server

pytest_plugins = ("pytester",)
FILE = "cassettes/test_it/test_one.yaml"
RECORD = "--stepengine-record=once"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    with model_server() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def project(run, pytester, processes):
    """
    Run a test that stands beside a program, in a process of its own: what a process has imported and patched stays out of this one.
    """

    def ran(body: str, *args: str):
        return run(body, *args, apart=True)

    return ran


OWN_CLIENT = """
import httpx2

def test_one(FIXTURES):
    import openai
    with openai.OpenAI() as client:
        asked = [{"role": "user", "content": "hi"}]
        assert client.chat.completions.create(model="m", messages=asked).choices[0].message.content == "You said: hi"
"""


@pytest.mark.deep
@pytest.mark.spec("replay:C41", "replay:Y8")
def test_recording_a_program_with_its_own_client_fails_with_advice(project, server, pytester):
    asked = project(OWN_CLIENT.replace("FIXTURES", "cassette"), RECORD)
    asked.assert_outcomes(failed=1)
    asked.stdout.fnmatch_lines([
        f"*nothing was recorded in {FILE}: no request went through the cassette*",
        "*if the program makes its own client: @pytest.mark.stepengine(patch=True)*",
    ])  # fmt: skip
    marked = project(
        OWN_CLIENT.replace("FIXTURES", "").replace("def test", "@pytest.mark.stepengine\ndef test"), RECORD
    )
    marked.assert_outcomes(failed=1)
    marked.stdout.fnmatch_lines([f"*nothing was recorded in {FILE}*"])
    loose = "\n@pytest.mark.stepengine(allow_unused=True)\ndef test_one(cassette):\n    pass\n"
    project(loose, RECORD).assert_outcomes(passed=1)
    assert not (pytester.path / FILE).exists()


@pytest.mark.spec("replay:Y16", "replay:C41")
def test_an_engine_with_a_scripted_model_records_nothing_and_passes(run):
    body = """
    from stepengine import AgentDefinition, STEP
    from stepengine.testing import ScriptedModel, text

    def handle(ctx):
        yield STEP
        return "done"

    def test_one(stepengine_engine):
        engine = stepengine_engine([AgentDefinition("a", model="x/y", handle_steps=handle)], models=ScriptedModel([text("fine")]))
        assert engine.run_sync("a", "go").output == "done"
    """
    run(textwrap.dedent(body), RECORD).assert_outcomes(passed=1)


RETRIED = """
import openai

MARK
def test_one(cassette):
    http = httpx2.Client(transport=cassette.transport())
    client = openai.OpenAI(http_client=http, max_retries=2)
    asked = [{"role": "user", "content": "hi"}]
    assert client.chat.completions.create(model="m", messages=asked).choices[0].message.content == "You said: hi"
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C7", "replay:Y6")
def test_error_replies_are_recorded_only_with_the_mark(project, server, pytester):
    """
    With the mark the retries replay in order; without it the replay has only the last reply, and the recording says what it lacks.
    """
    server.failures = [429, 503]
    marked = RETRIED.replace("MARK", "@pytest.mark.stepengine(record_errors=True)")
    recorded = project(marked, RECORD)
    recorded.assert_outcomes(passed=1)
    recorded.stdout.fnmatch_lines([f"recorded {FILE}: 3 interactions"])
    project(marked).assert_outcomes(passed=1)
    assert 3 == len(server.requests)

    server.failures = [429]
    plain = RETRIED.replace("MARK", "")
    told = project(plain, "--stepengine-record=rewrite")
    told.assert_outcomes(passed=1)
    told.stdout.fnmatch_lines([
        f"recorded {FILE}: 1 interaction",
        "*not recorded: POST http://127.0.0.1:*/v1/chat/completions: status 429*",
        "*to record error replies: @pytest.mark.stepengine(record_errors=True)*",
    ])  # fmt: skip
    project(plain).assert_outcomes(passed=1)


MISSING = """
import os

def test_one(cassette):
    assert os.environ["OPENAI_API_KEY"] == "replay"
    assert {n for n in os.environ if n.endswith("_API_KEY")} == {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"}
    os.environ["GROQ_API_KEY"]
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y11")
def test_a_key_without_a_placeholder_is_explained(run):
    failed = run(MISSING)
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines([
        "*KeyError: 'GROQ_API_KEY'*", "*a replaying test has placeholders for keys. The fixture `stepengine_cassette`*",
        "*monkeypatch.setenv('GROQ_API_KEY', 'replay')*",
    ])  # fmt: skip


PROGRAM = """
from openai import OpenAI

client = OpenAI()

def answer(prompt):
    stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}], stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
"""

UNCHANGED = """
@pytest.mark.stepengine(patch=True)
def test_one():
    import program
    assert program.answer("PROMPT") == "You said: PROMPT"
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y20", "replay:Y6", "replay:Y12")
def test_the_patch_mark_records_and_replays_an_unchanged_program(project, server, pytester, monkeypatch):
    pytester.makepyfile(program=PROGRAM)
    body = UNCHANGED.replace("PROMPT", "hi")
    recorded = project(body, RECORD)
    recorded.assert_outcomes(passed=1)
    recorded.stdout.fnmatch_lines([f"recorded {FILE}: 1 interaction"])
    monkeypatch.delenv("OPENAI_API_KEY")
    replayed = project(body)
    replayed.assert_outcomes(passed=1)
    replayed.stdout.no_fnmatch_line("*no test uses*")
    edited = project(UNCHANGED.replace("PROMPT", "bye"))
    edited.assert_outcomes(failed=1)
    edited.stdout.fnmatch_lines(["*CassetteMiss*", '*/messages/0/content*recorded "hi"*now "bye"*'])
    assert 1 == len(server.requests)


CACHED = """
import uuid

from openai import OpenAI

def answer(prompt):
    client = OpenAI()
    return client.responses.create(model="m", input=prompt, prompt_cache_key=f"run:{uuid.uuid4()}").output_text
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y20", "replay:C10")
def test_a_random_prompt_cache_key_does_not_prevent_replay(project, server, pytester):
    """
    openai-agents sends one with every request to the provider's own address. No reply depends on it.
    """
    pytester.makepyfile(program=CACHED)
    body = UNCHANGED.replace("PROMPT", "hi")
    project(body, RECORD).assert_outcomes(passed=1)
    project(body).assert_outcomes(passed=1)
    edited = project(UNCHANGED.replace("PROMPT", "bye"))
    edited.stdout.fnmatch_lines(['*/input *recorded "hi"*now "bye"*'])
    edited.stdout.no_fnmatch_line("*/prompt_cache_key*")
    own = project(body.replace("patch=True", "patch=True, ignore=['/metadata']"))
    own.assert_outcomes(passed=1)
    assert 1 == len(server.requests)


ENGINE = """
from stepengine import AgentDefinition, STEP

def handle(ctx):
    yield STEP
    return "done"

def test_one(FIXTURES):
    engine = stepengine_engine([AgentDefinition("one", model="anthropic/m", handle_steps=handle)])
    result = engine.run_sync("one", "go"OPTIONS)
    assert result.output == "done", result.error
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y5", "replay:Y11", "replay:C27")
@pytest.mark.parametrize(
    ("fixtures", "options"), [("cassette, stepengine_engine", ""), ("journal, stepengine_engine", ", journal=journal")]
)
def test_the_engine_uses_the_base_url_of_the_environment(project, server, monkeypatch, fixtures, options):
    """
    Where the address changes afterwards, the miss says which variable decides.
    """
    monkeypatch.delenv("ANTHROPIC_API_KEY")  # no key is sent to a server of this machine
    body = ENGINE.replace("FIXTURES", fixtures).replace("OPTIONS", options)
    project(body, RECORD).assert_outcomes(passed=1)
    assert ["/v1/messages"] == [path for path, _ in server.requests]
    project(body).assert_outcomes(passed=1)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://elsewhere.test")
    moved = project(body)
    if not options:
        moved.assert_outcomes(failed=1)
        moved.stdout.fnmatch_lines([
            "*another base URL: nothing was recorded for elsewhere.test*",
            "*the fixture `stepengine_cassette` uses the base URLs of the environment*",
            "*ANTHROPIC_BASE_URL=https://elsewhere.test*",
        ])  # fmt: skip
