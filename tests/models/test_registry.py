"""Model strings, the registry, keys: what is known before any request is sent."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import httpx2
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ReplyDone
from stepengine.data.transcript import Transcript
from stepengine.errors import MissingKey, ModelError, UnknownModel
from stepengine.models import (
    AnthropicProvider,
    BedrockProvider,
    ModelInfo,
    ModelRef,
    Models,
    OpenAIChatProvider,
    Provider,
    Timeouts,
    VertexProvider,
)
from stepengine.models.files import Files
from stepengine.models.keys import Secret
from stepengine.testing import RunScript, ScriptedModel


class Echo(Provider):
    """A third-party provider with nothing but a name and ``complete``."""

    def __init__(self, name="echo", patterns=()):
        self.name = name
        self.model_patterns = patterns
        self.asked = []
        self.closed = 0

    async def complete(self, request):
        self.asked.append(request.model)
        return ModelReply(f"you asked {self.strip_prefix(request.model)}")

    async def close(self):
        self.closed += 1


async def last(provider, request):
    items = [delta async for delta in provider.stream(request)]
    assert sum(type(item) is ReplyDone for item in items) == 1
    return items[-1].reply


# --- model strings --------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC104", "requirements:G12")
@pytest.mark.parametrize(
    ("model", "provider", "name"),
    [
        ("anthropic/claude-x", "anthropic", "claude-x"),
        ("anthropic:claude-x", "anthropic", "claude-x"),
        ("openrouter/anthropic/claude-x", "openrouter", "anthropic/claude-x"),
        ("openrouter:anthropic/claude-x:free", "openrouter", "anthropic/claude-x:free"),
        ("openrouter/meta/llama:free", "openrouter", "meta/llama:free"),
        ("ollama:llama3:8b", "ollama", "llama3:8b"),
        ("claude-sonnet-4-5", "anthropic", "claude-sonnet-4-5"),
        ("gpt-4o", "openai", "gpt-4o"),
        ("gpt-oss:20b", "ollama", "gpt-oss:20b"),
        ("ft:gpt-4o:org::id", "openai", "ft:gpt-4o:org::id"),
    ],
)
def test_model_string_splits_at_first_slash_or_by_pattern(model, provider, name):
    models = Models.standard()
    ref = models.parse(model)
    assert ref == ModelRef(provider, name)
    assert str(ref) == f"{provider}/{name}"
    assert models.parse(str(ref)) == ref
    assert models.provider_for(model).name == provider
    assert models.provider_for(model).strip_prefix(str(ref)) == name


def test_early_registration_replaces_the_packaged_provider_in_order():
    early, late = Models.standard(), Models.standard()
    assert late.providers
    mine = ScriptedModel([])
    for models in (early, late):
        models.register("mistral", mine)
        models.register("mine", mine)

    assert late.providers == early.providers
    assert ["mine"] == [name for name in early.providers if name not in Models.standard().providers]
    assert mine is early.provider_for("mistral/m")


@pytest.mark.spec("requirements:G13")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "antropic/claude-x",
            ["'antropic/claude-x'", "'anthropic'", "'openai'", "and 27 more", "did you mean 'anthropic'?"],
        ),
        ("llama-9", ["'llama-9'", "'anthropic'", "'openrouter'", "did you mean"]),
        ("", ["no model", "'anthropic'"]),
        ("anthropic/", ["'anthropic/'"]),
    ],
)
def test_unknown_model_error_names_providers_and_the_nearest(model, words):
    with pytest.raises(UnknownModel) as caught:
        Models.standard(aliases={"llama": "ollama/llama3"}).check(model)
    for word in words:
        assert word in caught.value.message


@pytest.mark.spec("requirements:G13")
@pytest.mark.parametrize(
    ("model", "written", "near"),
    [
        ("meta-llama/llama-3.3-70b-instruct", "openrouter/meta-llama/llama-3.3-70b-instruct", ""),
        ("nvidia/one-that-is-new:free", "openrouter/nvidia/one-that-is-new:free", ""),
        ("mistralai/mistral-large", "openrouter/mistralai/mistral-large", "did you mean 'mistral'?"),
        ("llama-3.3-70b", "openrouter/meta-llama/llama-3.3-70b-instruct", ""),
    ],
)
def test_openrouter_family_error_shows_the_full_model_string(model, written, near):
    with pytest.raises(UnknownModel) as caught:
        Models.standard().check(model)
    assert f"write {written!r}" in caught.value.message
    assert near in caught.value.message
    assert "did you mean" not in caught.value.message.replace(near or "-", "")
    assert str(Models.standard().parse(written)) == written
    with pytest.raises(UnknownModel) as caught:
        Models({"echo": Echo()}).check(model)
    assert "openrouter" not in caught.value.message


@pytest.mark.spec("requirements:G13")
def test_a_model_that_fits_several_providers_must_be_written_out():
    models = Models({"a": Echo("a", ("m.*",)), "b": Echo("b", ("m-1",))})
    assert models.parse("m-2").provider == "a"
    with pytest.raises(UnknownModel, match=r"matches several providers; write one of 'a/m-1', 'b/m-1'"):
        models.parse("m-1")


@pytest.mark.spec("requirements:G12")
@pytest.mark.anyio
async def test_alias_request_goes_out_under_its_target_model():
    echo = Echo()
    models = Models({"echo": echo}, aliases={"default": "fast", "fast": "echo:one", "a": "b", "b": "a"})
    assert str(models.parse("default")) == "echo/one"
    provider = models.provider_for("default")
    reply = await provider.complete(ModelRequest("default"))
    assert (reply.text, reply.model) == ("you asked one", "echo/one")
    assert (await last(provider, ModelRequest("default"))) == reply
    assert echo.asked == ["echo/one", "echo/one"]
    with pytest.raises(UnknownModel, match="cycle"):
        models.parse("a")


@pytest.mark.spec("requirements:G12")
@pytest.mark.anyio
async def test_alias_forwards_token_counts_and_recorded_calls():
    class Counting(Echo):
        async def count_tokens(self, request):
            self.asked.append(request.model)
            return 7

        def skip_reply(self, request):
            self.asked.append(request.model)

    echo = Counting()
    provider = Models({"echo": echo}, aliases={"default": "echo/one"}).provider_for("default")

    assert 7 == await provider.count_tokens(ModelRequest("default"))
    provider.skip_reply(ModelRequest("default"))
    assert ["echo/one", "echo/one"] == echo.asked


@pytest.mark.spec("requirements:G12")
@pytest.mark.anyio
async def test_alias_uploads_and_deletes_files_at_its_target():
    class Storing(Echo):
        async def upload(self, data, *, mime_type, name="", expires_in=None):
            self.asked.append((data, mime_type, name, expires_in))
            return "file-1"

        async def delete_file(self, file_id):
            self.asked.append(file_id)

    echo = Storing()
    models = Models({"echo": echo}, aliases={"team/main": "echo/one"})
    files = Files(lambda: models)
    file = await files.upload(b"x", to="team/main", mime_type="text/plain", name="a.txt", expires_in=60)
    await files.delete(file, at="team/main")

    assert ("echo", "file-1") == (file["provider"], file["file_id"])
    assert [(b"x", "text/plain", "a.txt", 60), "file-1"] == echo.asked


@pytest.mark.spec("requirements:G15")
def test_caller_model_info_overrides_package_data():
    models = Models.standard(info={"ollama/llama3": ModelInfo(8_192, 1_000), "openai/gpt-4o": ModelInfo(1)})
    assert models.info("anthropic/claude-sonnet-4-5").context_window == 200_000
    assert models.info("ollama:llama3") == ModelInfo(8_192, 1_000)
    assert models.info("gpt-4o") == ModelInfo(1)
    assert models.info("vllm/nobody-knows") == ModelInfo()


# --- registries from whatever an engine is given --------------------------------------------------------------------


@pytest.mark.spec("requirements:G1", "requirements:G5", "requirements:G12")
@pytest.mark.anyio
async def test_a_provider_needs_a_name_and_complete_and_nothing_else():
    echo = Echo()
    models = Models()
    models.register("mine", lambda: echo)
    provider = models.provider_for("mine/some/model")
    assert provider is echo is models.provider_for("mine/other")
    assert (await last(provider, ModelRequest("mine/some/model"))).text == "you asked some/model"
    assert not provider.supports_model("anything")
    models.check("mine/some/model")
    await models.close()
    assert echo.closed == 1


class FailsToClose(Echo):
    """A provider whose ``close`` raises an exception."""

    async def close(self):
        await super().close()
        msg = "cannot close"
        raise OSError(msg)


class BrokenTransport(httpx2.AsyncBaseTransport):
    """A transport without a network that cannot be closed."""

    def __init__(self):
        self.closed = 0

    async def handle_async_request(self, request):
        msg = "no network"
        raise httpx2.ConnectError(msg)

    async def aclose(self):
        self.closed += 1
        msg = "cannot close"
        raise OSError(msg)


async def fail_to_request(provider, model):
    with pytest.raises(ModelError, match="no network"):
        await provider.complete(ModelRequest(model, "", Transcript([UserMessage("go")])))


@pytest.mark.spec("reliability:RS11")
@pytest.mark.anyio
async def test_failed_close_of_a_wire_leaves_no_other_open():
    transport = BrokenTransport()
    provider = BedrockProvider("k", region="us-east-1", transport=transport)
    models = ["anthropic.claude-sonnet-5", "openai.gpt-oss-20b", "amazon.nova-pro-v1:0"]
    for model in models:
        await fail_to_request(provider, f"bedrock/{model}")

    with pytest.raises(OSError, match="cannot close"):
        await provider.close()
    assert len(models) == transport.closed


@pytest.mark.spec("reliability:RS11")
@pytest.mark.anyio
async def test_failed_close_in_one_loop_leaves_no_other_open():
    transport = BrokenTransport()
    provider = OpenAIChatProvider("own", base_url="http://127.0.0.1:9", api_key="none", transport=transport)
    other = asyncio.new_event_loop()
    thread = threading.Thread(target=other.run_forever)
    thread.start()
    try:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fail_to_request(provider, "own/m"), other))
        await fail_to_request(provider, "own/m")
        with pytest.raises(OSError, match="cannot close"):
            await provider.close()
    finally:
        other.call_soon_threadsafe(other.stop)
        thread.join()
        other.close()
    assert 2 == transport.closed


@pytest.mark.spec("reliability:RS11")
@pytest.mark.anyio
async def test_failed_close_of_a_provider_leaves_no_other_open():
    providers = [Echo(), FailsToClose(), FailsToClose()]
    models = Models({f"p{number}": provider for number, provider in enumerate(providers)})
    for number in range(3):
        models.provider_for(f"p{number}/model")

    with pytest.raises(OSError, match="cannot close"):
        await models.close()
    assert [1, 1, 1] == [provider.closed for provider in providers]


def test_one_provider_serves_every_model_string_but_none():
    echo = Echo()
    models = Models.from_value(echo)
    for model in ("anthropic/claude-x", "anything", "a:b"):
        assert models.provider_for(model) is echo
        models.check(model)
    with pytest.raises(UnknownModel):
        models.provider_for("")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC104")
@given(st.from_regex(r"[a-z][a-z0-9.-]{0,8}:[a-z0-9.:-]{1,6}", fullmatch=True))
def test_single_provider_receives_model_names_with_colons_unchanged(name):
    assume(name.partition(":")[0] not in {"ollama", *Models.standard().providers})
    models = Models.from_value(Echo("ollama"))
    models.aliases["small"] = name
    for written in (name, f"{name} | other", "small"):
        asking = models.provider_for(written).complete(ModelRequest(str(models.parse(written))))
        assert f"you asked {name}" == asyncio.run(asking).text
    assert f"ollama/{name}" == models.check(name) == models.check(models.check(name))


def test_single_provider_knows_limits_of_names_with_colons():
    name = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"
    assert Models.from_value(Echo("bedrock")).info(name) == Models.standard().info(f"bedrock/{name}") != ModelInfo()
    assert "anthropic/claude-x" == str(Models.from_value(Echo("bedrock")).parse("anthropic:claude-x"))


def test_models_for_a_run_keep_the_served_ones():
    models, other = Models.from_value(RunScript(["hi"])), Echo()
    models.serve("openai/x", other)
    assert other is models.for_run().provider_for("openai/x")


def test_provider_without_key_does_not_break_unprefixed_names():
    def fail():
        msg = "there is no key for it"
        raise MissingKey(msg)

    models = Models({"mine": fail, "echo": Echo(patterns=("x-.*",))})
    assert "echo/x-1" == models.check("x-1")
    with pytest.raises(UnknownModel, match=r"'mine' .there is no key"):
        models.check("y")


def test_registry_accepts_every_form_an_engine_accepts():
    models = Models({"echo": Echo()})
    assert Models.from_value(models) is models
    assert Models.from_value({"echo": Echo()}).providers == ("echo",)
    assert "anthropic" in Models.from_value(None).providers
    with pytest.raises(UnknownModel, match="not a int"):
        Models.from_value(3)
    with pytest.raises(UnknownModel, match="prefix"):
        models.register("a:b", Echo())


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:G23", "ecosystem:EC48")
@pytest.mark.parametrize(
    ("model", "variables"),
    [
        ("anthropic/claude-x", "ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN"),
        ("openai/gpt-4o", "OPENAI_API_KEY"),
        ("openai_chat/gpt-4o", "OPENAI_API_KEY"),
        ("openrouter/a/b", "OPENROUTER_API_KEY"),
    ],
)
def test_missing_key_error_names_the_variable_and_alternatives(model, variables, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    models = Models.standard()
    with pytest.raises(MissingKey) as caught:
        models.check(model)
    for word in (variables, "api_key=", "base_url", "another provider", "`stepengine demo`"):
        assert word in caught.value.message
    monkeypatch.setenv(variables.split()[-1], "k")
    models.check(model)
    assert list(tmp_path.iterdir()) == []


def test_named_aws_region_needs_no_home_folder(monkeypatch):
    def fail(path):
        msg = "Could not determine home directory."
        raise RuntimeError(msg)

    monkeypatch.setattr(Path, "expanduser", fail)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "k")
    Models.standard().check("bedrock/amazon.nova-lite-v1:0")


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (partial(BedrockProvider, "k", region="us-east-1"), "bedrock/amazon.nova-lite-v1:0"),
        (partial(VertexProvider, "p", credentials="a-token"), "vertex/gemini-2.5-pro"),
        (BedrockProvider, None),
        (VertexProvider, None),
    ],
)
def test_cloud_credentials_are_checked_without_a_home_folder(make, model, monkeypatch):
    def fail(path):
        msg = "Could not determine home directory."
        raise RuntimeError(msg)

    monkeypatch.setattr(Path, "expanduser", fail)
    if model is not None:
        make().check(model)
        return
    with pytest.raises(MissingKey):
        make().check("m")


@pytest.mark.spec("requirements:G23", "ecosystem:EC105", "ecosystem:EC106", "ecosystem:EC115")
def test_local_server_needs_no_key_and_explicit_key_wins(monkeypatch):
    models = Models.standard()
    models.check("ollama/llama3")
    models.check("vllm/m")
    AnthropicProvider(base_url="http://localhost:1").check("m")
    OpenAIChatProvider(base_url="http://localhost:1").check("m")
    with pytest.raises(ModelError, match="STEPENGINE_OPENAI_CHAT_BASE_URL"):
        OpenAIChatProvider("my-server").check("m")
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    assert OpenAIChatProvider(base_url="http://localhost:1")._resolve_credentials_and_url()[0].key is None
    assert OpenAIChatProvider("openai")._resolve_credentials_and_url()[0].source == "OPENAI_API_KEY"
    explicit = OpenAIChatProvider("openai", api_key=" mine ")._resolve_credentials_and_url()[0]
    assert (explicit.key, explicit.source) == (Secret("mine"), "api_key=")


@pytest.mark.spec("reliability:SC12")
def test_environment_key_is_sent_only_to_its_own_host(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of-anthropic")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://evil.example/v1")
    for provider in (AnthropicProvider(), AnthropicProvider(base_url="https://api.anthropic.com.evil.example")):
        with pytest.raises(
            MissingKey, match=r"evil.example'.*not sent elsewhere automatically.*STEPENGINE_KEY_HOSTS="
        ) as caught:
            provider.check("m")
        assert "of-anthropic" not in str(caught.value)

    assert AnthropicProvider(base_url="http://127.0.0.1:1")._resolve_credentials_and_url()[0].key is None
    assert (
        AnthropicProvider(base_url="https://api.anthropic.com/beta")._resolve_credentials_and_url()[0].source
        == "ANTHROPIC_API_KEY"
    )
    assert AnthropicProvider(api_key="mine")._resolve_credentials_and_url()[0].key == Secret("mine")
    monkeypatch.setenv("VLLM_API_KEY", "of-mine")
    assert (
        OpenAIChatProvider("vllm", base_url="https://models.example/v1")._resolve_credentials_and_url()[0].source
        == "VLLM_API_KEY"
    )
    monkeypatch.setenv("STEPENGINE_KEY_HOSTS", "proxy.example, evil.example")
    assert AnthropicProvider()._resolve_credentials_and_url()[0].source == "ANTHROPIC_API_KEY"


@pytest.mark.spec("reliability:SC12")
@pytest.mark.parametrize(
    ("make", "variables"),
    [
        (AnthropicProvider, {"ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": "http://api.anthropic.com"}),
        (OpenAIChatProvider, {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "HTTP://api.openai.com/v1"}),
        (
            BedrockProvider,
            {
                "AWS_BEARER_TOKEN_BEDROCK": "k",
                "AWS_REGION": "us-east-1",
                "ANTHROPIC_BEDROCK_BASE_URL": "http://bedrock-runtime.us-east-1.amazonaws.com",
            },
        ),
    ],
)
def test_environment_key_is_not_sent_in_plain_text(make, variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingKey, match=r"not encrypted.*https://"):
        make().check("claude-x")
    make(api_key="a key of the caller").check("claude-x")
    (url,) = [name for name in variables if name.endswith("BASE_URL")]
    monkeypatch.setenv(url, variables[url].lower().replace("http:", "https:"))
    make().check("claude-x")


@pytest.mark.spec("requirements:G23", "reliability:SC05")
def test_a_key_is_in_no_text_that_python_makes():
    key = "sk-very-secret-0123"
    secret = Secret(key)
    texts = [repr(secret), str(secret), f"{secret:>40}", f"{secret}", repr(pickle.loads(pickle.dumps(secret)))]
    for provider in (AnthropicProvider(api_key=key), OpenAIChatProvider(api_key=key)):
        texts += [repr(provider), str(vars(provider)), str(provider._resolve_credentials_and_url())]
    assert all(key not in text for text in texts)
    assert secret.reveal() == key
    assert secret == Secret(key) != Secret("other")


# --- what is loaded -------------------------------------------------------------------------------------------------

HEAVY = ("anthropic", "openai", "google.genai", "httpx2", "genai_prices", "pydantic")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC216", "requirements:G17")
def test_importing_the_models_and_checking_a_model_loads_no_sdk():
    code = f"""
import json, sys, stepengine
from stepengine.models import *
models = Models.standard()
models.parse("gpt-4o")
try: models.check("anthropic/x")
except Exception: pass
loaded = [name for name in {HEAVY!r} if name in sys.modules]
stepengine.Engine
print(json.dumps([*loaded, *[name for name in {HEAVY[:3]!r} if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.spec("requirements:G12", "requirements:X56")
def test_provider_can_serve_single_model_strings_with_any_prefix():
    models, elsewhere = Models.standard(), ScriptedModel([])
    for name in ("llama", "gpt-oss:20b", "openai/gpt-oss-20b", "one/a | two/b"):
        models.serve(name, elsewhere)

    for name in ("llama", "gpt-oss:20b", "openai/gpt-oss-20b", "one/a", "two/b"):
        assert (name, True) == (str(models.parse(name)), models.provider_for(name) is elsewhere)
        assert models.check(name) == name
    assert models.provider_for("openai/gpt-5") is not elsewhere
    assert "one/a | two/b" == str(models.parse("one/a | two/b"))
    with pytest.raises(UnknownModel, match="registered providers: "):
        models.parse("one/other")


@pytest.mark.spec("reliability:R23")
def test_a_connection_may_take_ten_seconds():
    assert 10 == Timeouts().connect
