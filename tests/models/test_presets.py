"""The table of services: where each is, what its key is called, and what it does in its own way."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from urllib.parse import urlsplit

import httpx2
import pytest

from stepengine.data.json import thaw
from stepengine.data.messages import AssistantMessage, CitationPart, TextPart, ThinkingPart, UserMessage
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.server_tools import WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import MissingKey, ModelError, UnknownModel
from stepengine.models import PRESETS, Models, OpenAIChatProvider, OpenAIProvider
from stepengine.models._failures import RequestLabel, error_from_body
from stepengine.models.keys import Credentials
from stepengine.models.openai_chat.decode import decode
from tests.faults.scripts import chunk
from tests.models.wires import TOOL, call, made, reader, result

pytestmark = pytest.mark.anyio

DETAILS = [
    {"type": "reasoning.text", "index": 0, "text": "hm", "signature": "s"},
    {"type": "reasoning.encrypted", "index": 0, "data": "x"},
]
OTHER = ToolSpec("other", "Does else.", {"type": "object", "properties": {}})


def body(name, *messages, model="m", stream=True, **fields):
    preset = PRESETS[name]
    history = Transcript(messages or [UserMessage("hi")])
    kind = OpenAIProvider if preset.adapter == "openai" else OpenAIChatProvider
    provider = kind(name=name, api_key="k", **({"base_url": "http://x"} if name == "azure" else {}))
    request = ModelRequest(f"{name}/{model}", messages=history, **fields)
    return json.loads(provider._encode(request, stream=stream).content)


def test_each_preset_names_a_page_of_documentation():
    pages = [urlsplit(preset.page) for preset in PRESETS.values()]

    assert all(page.scheme == "https" and page.hostname for page in pages)


async def sent_to(name, monkeypatch, **environment):
    """What one request to a service looks like, and where it goes."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    seen = []

    def answer(request):
        seen.append(request)
        return httpx2.Response(500, json={})

    provider = Models.standard()._get_or_create_provider(name)
    provider._connections.transport = httpx2.MockTransport(answer)
    with pytest.raises(Exception, match="500"):
        await provider.complete(ModelRequest(f"{name}/m"))
    await provider.close()
    return seen[0]


@pytest.mark.spec("requirements:G10", "providers:PV89")
@pytest.mark.spec(
    "ecosystem:EC104",
    "ecosystem:EC105",
    "ecosystem:EC106",
    "ecosystem:EC107",
    "ecosystem:EC109",
    "ecosystem:EC110",
    "ecosystem:EC111",
    "ecosystem:EC112",
    "ecosystem:EC113",
)
@pytest.mark.parametrize(
    ("name", "variable", "url"),
    [
        ("openai", "OPENAI_API_KEY", "https://api.openai.com/v1/responses"),
        ("openai_chat", "OPENAI_API_KEY", "https://api.openai.com/v1/chat/completions"),
        ("openrouter", "OPENROUTER_API_KEY", "https://openrouter.ai/api/v1/chat/completions"),
        ("ollama", "", "http://localhost:11434/v1/chat/completions"),
        ("vllm", "VLLM_API_KEY", "http://localhost:8000/v1/chat/completions"),
        ("llamacpp", "LLAMACPP_API_KEY", "http://localhost:8080/v1/chat/completions"),
        ("lmstudio", "LMSTUDIO_API_KEY", "http://localhost:1234/v1/chat/completions"),
        ("groq", "GROQ_API_KEY", "https://api.groq.com/openai/v1/chat/completions"),
        ("together", "TOGETHER_API_KEY", "https://api.together.ai/v1/chat/completions"),
        ("mistral", "MISTRAL_API_KEY", "https://api.mistral.ai/v1/chat/completions"),
        ("deepseek", "DEEPSEEK_API_KEY", "https://api.deepseek.com/chat/completions"),
        ("xai", "XAI_API_KEY", "https://api.x.ai/v1/responses"),
        ("cerebras", "CEREBRAS_API_KEY", "https://api.cerebras.ai/v1/chat/completions"),
        ("perplexity", "PERPLEXITY_API_KEY", "https://api.perplexity.ai/chat/completions"),
        ("fireworks", "FIREWORKS_API_KEY", "https://api.fireworks.ai/inference/v1/chat/completions"),
        ("huggingface", "HF_TOKEN", "https://router.huggingface.co/v1/chat/completions"),
        ("moonshot", "MOONSHOT_API_KEY", "https://api.moonshot.ai/v1/chat/completions"),
        ("zai", "ZAI_API_KEY", "https://api.z.ai/api/paas/v4/chat/completions"),
        ("qwen", "DASHSCOPE_API_KEY", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1/chat/completions"),
    ],
)
async def test_each_service_is_asked_at_its_address_with_its_key(name, variable, url, monkeypatch):
    assert set(PRESETS) == {
        "openai", "openai_chat", "openrouter", "ollama", "vllm", "llamacpp", "lmstudio", "groq", "together", "mistral",
        "deepseek", "xai", "azure", "azure_responses", "cerebras", "fireworks", "huggingface", "moonshot", "zai", "qwen", "perplexity", "snowflake",
    }  # fmt: skip
    request = await sent_to(name, monkeypatch, **({variable: "the-key"} if variable else {}))
    assert str(request.url) == url
    expected = "the-key" if variable else "ollama"
    assert request.headers["authorization"] == f"Bearer {expected}"
    if PRESETS[name].key_required:
        monkeypatch.delenv(variable)
        with pytest.raises(MissingKey, match=variable):
            Models.standard().check(f"{name}/m")


@pytest.mark.spec("providers:PV89")
def test_service_without_an_address_asks_for_base_url(monkeypatch):
    monkeypatch.setenv("SNOWFLAKE_TOKEN", "k")
    with pytest.raises(ModelError, match=r"no base URL for 'snowflake': pass base_url=$"):
        Models.standard().check("snowflake/claude-sonnet-4-5")


@pytest.mark.spec("ecosystem:EC114")
async def test_azure_endpoint_is_built_with_and_without_api_version(monkeypatch):
    environment = {"AZURE_OPENAI_API_KEY": "the-key", "AZURE_OPENAI_ENDPOINT": "https://mine.openai.azure.com/"}
    request = await sent_to("azure", monkeypatch, **environment)
    assert str(request.url) == "https://mine.openai.azure.com/openai/v1/chat/completions"
    dated = await sent_to("azure", monkeypatch, OPENAI_API_VERSION="2025-04-01-preview")
    assert dated.url.path == "/openai/deployments/m/chat/completions"
    assert dated.url.params["api-version"] == "2025-04-01-preview"
    assert dated.headers["api-key"] == "the-key"
    monkeypatch.delenv("AZURE_OPENAI_API_KEY")
    with pytest.raises(MissingKey, match="AZURE_OPENAI_API_KEY"):
        Models.standard().check("azure/m")


@pytest.mark.spec("reliability:SC12", "requirements:G23")
@pytest.mark.parametrize("name", ["openai", "groq", "xai", "vllm", "azure", "azure dated"])
async def test_openai_environment_headers_go_to_openai_only(name, monkeypatch):
    monkeypatch.setenv(
        "OPENAI_CUSTOM_HEADERS", "Authorization: Bearer sk-openai\nX-Gateway-Key: sk-gateway\ncontent-type: x/openai"
    )
    monkeypatch.setenv("OPENAI_ORG_ID", "org-mine")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-mine")
    name, _, dated = name.partition(" ")
    environment = {PRESETS[name].key_variable: "the-key", "AZURE_OPENAI_ENDPOINT": "https://mine.openai.azure.com/"}
    if dated:
        environment["OPENAI_API_VERSION"] = "2025-04-01-preview"
    request = await sent_to(name, monkeypatch, **environment)

    headers = str(request.headers.raw)
    assert (name != "openai") == ("the-key" in headers)
    assert (name != "openai") == (request.headers["content-type"] == "application/json")
    for word in ("sk-openai", "sk-gateway", "org-mine", "proj-mine"):
        assert (name == "openai") == (word in headers), word


@pytest.mark.spec("ecosystem:EC107")
@pytest.mark.parametrize("name", ["llamacpp", "lmstudio"])
def test_named_tool_choice_sends_only_that_tool_where_unsupported(name):
    got = body(name, tools=(TOOL, OTHER), tool_choice="other")
    assert got["tool_choice"] == "required"
    assert [tool["function"]["name"] for tool in got["tools"]] == ["other"]
    assert len(body(name, tools=(TOOL, OTHER), tool_choice="required")["tools"]) == 2
    assert body("vllm", tools=(TOOL, OTHER), tool_choice="other")["tool_choice"]["function"] == {"name": "other"}


@pytest.mark.spec("ecosystem:EC107")
def test_llamacpp_is_asked_for_parallel_calls():
    assert body("llamacpp", tools=(TOOL,))["parallel_tool_calls"] is True
    assert "parallel_tool_calls" not in body("llamacpp")
    off = ModelSettings(parallel_tool_calls=False)
    assert body("llamacpp", tools=(TOOL,), settings=off)["parallel_tool_calls"] is False


@pytest.mark.spec("ecosystem:EC111", "ecosystem:EC83", "providers:PV37")
def test_mistral_gets_its_own_tool_choice_and_ids():
    history = [UserMessage("go"), AssistantMessage([call(1), call(2)]), result(1), result(2)]
    got = body("mistral", *history, tools=(TOOL,), tool_choice="required")
    assert got["tool_choice"] == "any"
    assert "stream_options" not in got
    assert got["messages"][1]["content"] == ""
    assert body("groq", *history)["messages"][1]["content"] is None
    ids = [c["id"] for c in got["messages"][1]["tool_calls"]]
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert len(set(ids)) == 2
    assert [m["tool_call_id"] for m in got["messages"][2:]] == ids


@pytest.mark.spec("ecosystem:EC111", "ecosystem:EC90")
def test_mistral_thinking_pieces_decode_and_return_unchanged():
    it = reader("mistral")
    for text in ("Hm", "m."):
        it.feed(chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]}))
    it.feed(chunk({"content": [{"type": "text", "text": "Fi"}]}))
    it.feed(chunk({"content": "ve."}, "stop"))
    thinking, text = it.finish().content
    assert (thinking.text, text) == ("Hmm.", TextPart("Five."))
    piece = {"type": "thinking", "thinking": [{"type": "text", "text": "Hmm."}]}
    got = body("mistral", UserMessage("go"), AssistantMessage([thinking, text]), UserMessage("on"))
    assert got["messages"][1]["content"] == [piece, {"type": "text", "text": "Five."}]
    other = body("groq", UserMessage("go"), AssistantMessage([thinking, text]), UserMessage("on"))
    assert other["messages"][1]["content"] == "Five."


@pytest.mark.spec("ecosystem:EC112", "ecosystem:EC91", "providers:PV31")
def test_deepseek_calls_carry_reasoning_and_forced_calls_disable_thinking():
    mine = {"provider": "deepseek", "model": "m", "member": "reasoning_content"}
    history = [
        UserMessage("go"),
        AssistantMessage([ThinkingPart("hm", provider_data=mine), call(1)]),
        result(1),
        AssistantMessage([call(2)]),
        result(2),
    ]
    got = body("deepseek", *history, tools=(TOOL,))
    assert [m.get("reasoning_content") for m in got["messages"]] == [None, "hm", None, "", None]
    theirs = body("moonshot", *history, tools=(TOOL,))["messages"]
    assert [m.get("reasoning_content") for m in theirs] == [None, "", None, "", None]
    assert "thinking" not in got
    assert body("deepseek", settings=ModelSettings(thinking=Thinking("none")))["thinking"] == {"type": "disabled"}
    assert body("deepseek", settings=ModelSettings(thinking=Thinking("enabled")))["thinking"] == {"type": "enabled"}
    forced = body("deepseek", tools=(TOOL,), tool_choice="required")
    assert (forced["tool_choice"], forced["thinking"]) == ("required", {"type": "disabled"})


@pytest.mark.spec("providers:PV31")
def test_deepseek_messages_and_moonshot_calls_always_carry_reasoning():
    history = [UserMessage("go"), AssistantMessage("Of another model."), UserMessage("on"), AssistantMessage([call(1)]), result(1)]  # fmt: skip
    found = {
        name: [m.get("reasoning_content") for m in body(name, *history, tools=(TOOL,))["messages"]]
        for name in ("deepseek", "moonshot", "groq")
    }
    assert [None, "", None, "", None] == found["deepseek"]
    assert [None, None, None, "", None] == found["moonshot"]
    assert [None] * 5 == found["groq"]


@pytest.mark.spec("providers:PV32")
@pytest.mark.parametrize(
    ("name", "model", "came", "goes"),
    [
        ("zai", "glm-5.2", {"reasoning_content": " hm\n"}, {"reasoning_content": " hm\n", "content": "Five."}),
        ("cerebras", "zai-glm-4.7", {"reasoning": "hm"}, {"content": "<think>hm</think>Five."}),
        ("cerebras", "gpt-oss-120b", {"reasoning": "hm"}, {"reasoning": "hm", "content": "Five."}),
        ("groq", "gpt-oss-120b", {"reasoning": "hm"}, {"reasoning": "hm", "content": "Five."}),
        *[
            (
                name,
                "vendor/model",
                {"reasoning": "hm", "reasoning_details": DETAILS},
                {"reasoning": "hm", "reasoning_details": DETAILS, "content": "Five."},
            )
            for name in ("openrouter", "snowflake")
        ],
    ],
)
def test_thoughts_go_back_where_each_service_reads_them(name, model, came, goes):
    message = {"role": "assistant", "content": "Five.", **came}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
    asked = RequestLabel(provider=name, model=f"{name}/{model}", credentials=Credentials(None, "no key"))
    reply = decode(answer, asked, model, None)
    request = ModelRequest(
        f"{name}/{model}", messages=Transcript([UserMessage("go"), AssistantMessage(reply.content), UserMessage("on")])
    )
    sent = json.loads(OpenAIChatProvider(name, "k")._encode(request, stream=False).content)["messages"][1]
    assert {"role": "assistant", **goes} == sent


@pytest.mark.spec("providers:PV37", "requirements:X53")
@pytest.mark.parametrize(("name", "data"), [
    ("deepseek", {"member": "reasoning_content"}),
    ("openrouter", {"member": "reasoning", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}),
])  # fmt: skip
def test_thoughts_only_reply_goes_back_with_empty_text(name, data):
    thought = ThinkingPart("hm", provider_data={"provider": name, "model": "m", **data})
    got = body(name, UserMessage("go"), AssistantMessage([thought]), UserMessage("on"))["messages"][1]
    assert ("assistant", "", "hm") == (got["role"], got["content"], got[data["member"]])


@pytest.mark.spec("ecosystem:EC113")
def test_xai_gets_encrypted_reasoning_and_a_stable_cache_key():
    got = body("xai", UserMessage("one"), system_prompt="s")
    longer = body("xai", UserMessage("one"), AssistantMessage("two"), UserMessage("three"), system_prompt="s")
    other = body("xai", UserMessage("else"), system_prompt="s")
    assert got["include"] == ["reasoning.encrypted_content"]
    assert got["prompt_cache_key"] == longer["prompt_cache_key"] != other["prompt_cache_key"]
    assert "stop" not in body("xai", settings=ModelSettings(stop_sequences=["X"]))
    assert PRESETS["xai"].timeouts.first_byte >= 900


@pytest.mark.spec("ecosystem:EC109")
def test_groq_usage_is_read_and_failed_calls_are_classified():
    it = reader("groq")
    it.feed(chunk({"content": "hi"}, "stop", x_groq={"usage": {"prompt_tokens": 3, "completion_tokens": 1}}))
    assert it.finish().usage.total_tokens == 4
    error = {"error": {"code": "tool_use_failed", "message": "Failed.", "failed_generation": "<function=x"}}
    failure = error_from_body(error, 400, {}, made("groq"))
    assert (failure.kind, failure.retryable) == ("malformed_call", False)
    assert "<function=x" in failure.message
    assert error_from_body({"error": "busy"}, 498, {}, made("groq")).retryable


@pytest.mark.spec("ecosystem:EC102", "ecosystem:EC104")
def test_schemas_for_gemini_behind_openrouter_are_plain():
    schema = {
        "type": "object",
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "properties": {
            "at": {"$ref": "#/$defs/Point", "description": "Where."},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "kind": {"const": "circle"},
            "tags": {"type": ["array", "null"], "items": {"$ref": "#/$defs/Point"}},
            "const": {"type": "string"},
        },
        "required": ["at"],
    }
    tool = ToolSpec("draw", "Draws.", schema)
    got = body("openrouter", model="google/gemini-3-pro", tools=(tool,))["tools"][0]["function"]["parameters"]
    point = {"type": "object", "properties": {"x": {"type": "number"}}}
    assert got == {
        "type": "object",
        "properties": {
            "at": {**point, "description": "Where."},
            "name": {"type": "string", "default": None},
            "kind": {"enum": ["circle"]},
            "tags": {"type": "array", "items": point},
            "const": {"type": "string"},
        },
        "required": ["at"],
    }
    assert body("openrouter", model="openai/gpt-5", tools=(tool,))["tools"][0]["function"]["parameters"] == schema
    endless = {"$defs": {"T": {"properties": {"t": {"$ref": "#/$defs/T"}}}}, "$ref": "#/$defs/T"}
    assert "$ref" not in json.dumps(body("openrouter", model="google/x", tools=(ToolSpec("t", "", endless),))["tools"])


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize(
    "to", [lambda n: n + 1, lambda n: n, lambda n: (n + 1) % 9], ids=["others", "itself", "in a ring"]
)
def test_schema_with_very_many_references_is_inlined_to_a_limit(to):
    names = {n: {"properties": {m: {"$ref": f"#/$defs/A{to(n)}"} for m in "abcd"}} for n in range(60)}
    schema = {"properties": {"x": {"$ref": "#/$defs/A0"}}, "$defs": {f"A{n}": made for n, made in names.items()}}
    got = body("openrouter", model="google/x", tools=(ToolSpec("t", "", schema),))["tools"][0]["function"]["parameters"]

    assert "$ref" not in (text := json.dumps(got))
    assert len(text) < 5_000_000
    assert {"a", "b", "c", "d"} == got["properties"]["x"]["properties"].keys()


# --- registering ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:G12")
def test_the_longest_registered_prefix_serves_a_model():
    models = Models.standard()
    special = OpenAIChatProvider("special", base_url="http://x")
    models.register("openrouter/anthropic", special)
    assert models.provider_for("openrouter/anthropic/claude-x") is special
    assert special.strip_prefix("openrouter/anthropic/claude-x") == "claude-x"
    assert str(models.parse("openrouter:anthropic/claude-x")) == "openrouter/anthropic/claude-x"
    assert models.parse("openrouter/openai/gpt-5").provider == "openrouter"
    assert models.parse("openrouter/anthropic").provider == "openrouter"


def install(monkeypatch, folder, name, entry, code):
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[stepengine.models]\nmine = {name}:{entry}\nopenai = {name}:other\n")
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.spec("requirements:G1", "requirements:G12")
def test_an_installed_package_adds_a_provider_and_replaces_none(monkeypatch, tmp_path):
    code = (
        "from stepengine.models import OpenAIChatProvider\n\n"
        "loaded = []\n\n"
        "def made():\n    loaded.append('mine')\n    return OpenAIChatProvider('mine', base_url='http://x')\n\n"
        "def other():\n    loaded.append('openai')\n    return OpenAIChatProvider('openai', base_url='http://x')\n"
    )
    install(monkeypatch, tmp_path, "my_providers", "made", code)
    models = Models.standard()
    assert "my_providers" not in sys.modules
    assert models.provider_for("mine/model-x").name == "mine"
    assert sys.modules.pop("my_providers").loaded == ["mine"]
    assert isinstance(models.provider_for("openai/gpt-5"), OpenAIProvider)
    assert models.providers[-1] == "mine"
    with pytest.raises(UnknownModel, match="did you mean 'mine'"):
        Models.standard().parse("mien/x")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Needy", r"TypeError: .*missing 1 required positional argument: 'url'"),
        ("nothing", "it returned None"),
        ("absent", "AttributeError: .*'absent'"),
    ],
)
def test_an_entry_point_that_creates_no_provider_is_named(monkeypatch, tmp_path, name, why):
    code = (
        "from stepengine.models import OpenAIChatProvider\n\n"
        "class Needy(OpenAIChatProvider):\n    def __init__(self, url):\n        super().__init__('needy', base_url=url)\n\n"
        "def nothing():\n    pass\n"
    )
    install(monkeypatch, tmp_path, "needy_providers", name, code)
    with pytest.raises(ModelError, match=f"the entry point 'mine' of the group 'stepengine.models'.*{why}"):
        Models.standard().provider_for("mine/model-x")
    assert sys.modules.pop("needy_providers").Needy


def test_an_entry_point_may_miss_its_key(monkeypatch, tmp_path):
    code = "from stepengine.errors import MissingKey\n\ndef create():\n    raise MissingKey('set KEYED_KEY')\n"
    install(monkeypatch, tmp_path, "keyed_providers", "create", code)
    with pytest.raises(MissingKey, match=r"^set KEYED_KEY$"):
        Models.standard().provider_for("mine/model-x")
    del sys.modules["keyed_providers"]


FOUND = [
    {"title": "A page", "url": "https://a.org", "date": "2026-10-01", "snippet": "A was seen."},
    {"title": "B page", "url": "https://b.org", "snippet": 5},
]
BILL = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "cost": {"total_cost": 0.006}}


@pytest.mark.spec("providers:PV113", "requirements:X76")
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
@pytest.mark.parametrize(
    ("told", "cited"),
    [
        (
            {"citations": ["https://b.org", "https://a.org", "https://c.org"], "search_results": FOUND},
            [("https://b.org", "B page", ""), ("https://a.org", "A page", "A was seen."), ("https://c.org", "", "")],
        ),
        ({"search_results": FOUND[:1]}, [("https://a.org", "A page", "A was seen.")]),
        ({"citations": ["https://c.org", "https://c.org", 5, None]}, [("https://c.org", "", "")]),
        ({"citations": 5, "search_results": [5]}, []),
    ],
)
def test_sources_beside_the_choices_are_citations_of_the_reply(told, cited, stream) -> None:
    """All 21 recorded replies of Perplexity lost theirs."""
    if stream:
        it = reader("perplexity")
        it.feed(chunk({"content": "A and "}, **told))
        it.feed(chunk({"content": "B."}, "stop", usage=BILL, **told))
        reply = it.finish()
    else:
        choice = {"message": {"role": "assistant", "content": "A and B."}, "finish_reason": "stop"}
        reply = decode({"choices": [choice], "usage": BILL, **told}, made("perplexity"), "sonar", None)

    found = [(part.url, part.title, part.quote) for part in reply.content if type(part) is CitationPart]
    assert ("A and B.", cited, Decimal("0.006")) == (reply.text, found, reply.cost)
    assert all(told[name] == thaw(reply.provider_data[name]) for name in told)


def test_source_cited_in_the_message_is_listed_once() -> None:
    note = {"type": "url_citation", "url_citation": {"url": "https://a.org", "title": "A"}}
    choice = {"message": {"content": "A.", "annotations": [note]}, "finish_reason": "stop"}
    reply = decode({"choices": [choice], "citations": ["https://a.org"]}, made("openrouter"), "m", None)

    assert [("https://a.org", "A")] == [(p.url, p.title) for p in reply.content if type(p) is CitationPart]


def test_perplexity_is_sent_only_supported_settings() -> None:
    settings = ModelSettings(seed=5, logprobs=1, stop_sequences=["END"], parallel_tool_calls=False)
    asked = body("perplexity", model="sonar-pro", settings=settings)

    assert {"model", "messages", "stream"} == asked.keys()
    assert str(Models.standard().parse("sonar-pro")) == "perplexity/sonar-pro"


@pytest.mark.spec("ecosystem:EC104", "reliability:MP06")
def test_openrouter_without_credit_is_not_asked_again():
    failure = error_from_body({"error": {"code": 402, "message": "Insufficient credits"}}, 402, {}, made("openrouter"))
    assert (failure.kind, failure.retryable) == ("no_credit", False)


@pytest.mark.spec("providers:PV32")
def test_reasoning_pieces_join_up_to_their_signature():
    it = reader("openrouter")
    pieces = [
        {"type": "reasoning.text", "index": 0, "text": "a"},
        {"type": "reasoning.text", "index": 0, "text": "b"},
        {"type": "reasoning.text", "index": 0, "text": "", "signature": "s1"},
        {"type": "reasoning.text", "index": 0, "text": "c", "signature": "s2"},
        {"type": "reasoning.encrypted", "index": 0, "data": "x"},
        {"type": "reasoning.encrypted", "index": 0, "data": "y"},
    ]
    for piece in pieces:
        it.feed(chunk({"reasoning_details": [piece]}))
    it.feed(chunk({"content": "Five."}, "stop"))
    assert [
        {"type": "reasoning.text", "index": 0, "text": "ab", "signature": "s1"},
        *pieces[3:],
    ] == it.finish().content[0].provider_data["reasoning_details"]


def test_every_search_is_sent_to_openrouter():
    searches = (WebSearch(allowed_domains=("a.com",)), WebSearch(max_uses=2))
    tools = body("openrouter", settings=ModelSettings(server_tools=searches))["tools"]
    assert [["a.com"], None] == [tool["parameters"].get("allowed_domains") for tool in tools]
