"""`--base-url`, `--api-key-env`, `--price` and `--model`: what a server elsewhere is asked, with which key, and what it costs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from stepengine.cli.bench import make_pricing
from stepengine.cli.options import Options
from stepengine.cli.state_folder import list_recorded_runs
from stepengine.data.usage import Usage
from stepengine.models.pricing import LIST_PRICES
from tests.cli.command import command
from tests.faults.chat_server import ChatServer, serving

AGENTS = """
from stepengine import STEP, AgentCall, AgentDefinition, Limits

child = AgentDefinition("kid", model="anthropic/claude-sonnet-4-5")


def steps(ctx):
    yield STEP
    result = yield AgentCall("kid", "hello")
    yield STEP
    return f"the child: {result.value.error or result.value.text}"


agent = AgentDefinition("boss", spawnable_agents=[child], handle_steps=steps, limits=Limits(LIMITS))
"""
KEY = "test-key-0123456789"
NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("boss.py").write_text(AGENTS.replace("LIMITS", ""), encoding="utf-8")
    Path("capped.py").write_text(AGENTS.replace("LIMITS", "max_cost_usd=1"), encoding="utf-8")
    return tmp_path


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC125")
def test_server_receives_only_the_key_of_api_key_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "STEPENGINE_OPENAI_CHAT_API_KEY"):
        monkeypatch.setenv(name, "somebody-else-s-0123")
    monkeypatch.delenv("STEPENGINE_OPENAI_CHAT_API_KEY")
    monkeypatch.setenv("MY_SERVER", KEY)
    with serving(server := ChatServer()) as url:
        command("ask", "llama", "2 + 3?", "--base-url", url)
        command("ask", "llama", "2 + 3?", "--base-url", url, "--api-key-env", "MY_SERVER")
        command(
            "run",
            "boss.py",
            "go",
            "-q",
            "--model",
            "llama",
            "--base-url",
            url,
            "--api-key-env",
            "MY_SERVER",
            "--journal",
            "a.jsonl",
        )

    assert [("llama", None), *[("llama", f"Bearer {KEY}")] * 4] == server.asked
    assert KEY not in Path("a.jsonl").read_text(encoding="utf-8")


@pytest.mark.spec("ecosystem:EC125")
def test_advice_after_a_401_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVER", KEY)
    monkeypatch.setenv("GROQ_API_KEY", KEY)
    with serving(ChatServer(KEY)) as url:
        refused = command("ask", "llama", "hi", "--base-url", url, code=1)
        done = command("ask", "llama", "hi", "--base-url", url, "--api-key-env", "MY_SERVER")
        withheld = command("ask", "groq/llama", "hi", "--base-url", url, code=1)
        monkeypatch.setenv("STEPENGINE_KEY_HOSTS", "127.0.0.1")
        trusted = command("ask", "groq/llama", "hi", "--base-url", url)

    assert "No key was sent" in refused.stderr
    assert refused.stderr.rstrip().endswith("On the command line, name that variable with --api-key-env NAME.")
    assert "STEPENGINE_KEY_HOSTS" not in refused.stderr
    assert "STEPENGINE_KEY_HOSTS" in withheld.stderr
    assert ["It is five.\n"] * 2 == [done.stdout, trusted.stdout]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base-url", "http://h/v1", "--model", "m", "--api-key-env", "NOT_SET"], "set NOT_SET"),
        (["--api-key-env", "NAME"], "--api-key-env needs --base-url; `stepengine agents models` lists"),
        (
            ["--base-url", "http://h/v1"],
            "' needs a model of that server, but 'kid' names 'anthropic/claude-sonnet-4-5', which has its own provider",
        ),
        (
            ["--model", "a/b", "--price", "cheap"],
            "--price must be US dollars per million tokens, such as 0, 0.5 or 0.15/0.60 for input and output, not 'cheap'",
        ),
        (["--model", "a/b", "--price", "1/2/3"], "such as 0, 0.5 or 0.15/0.60 for input and output"),
        (["--model", "a/b", "--price", "-1"], "for input and output, not '-1'"),
    ],
)
def test_invalid_model_options_are_rejected_before_a_request(arguments: list[str], said: str) -> None:
    assert said in command("run", "boss.py", "go", "-q", *arguments, code=2).stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X56")
@pytest.mark.parametrize("name", ["llama", "llama:8b", "meta/llama", "anthropic/claude-sonnet-4-5"])
def test_one_model_for_all_agents_keeps_its_typed_name(name: str) -> None:
    with serving(server := ChatServer()) as url:
        command("run", "boss.py", "go", "-q", "--model", name, "--base-url", url, "--journal", "a.jsonl")

    assert [(name, None)] * 3 == server.asked


@pytest.mark.spec("requirements:X56")
def test_child_with_its_own_model_uses_its_own_provider() -> None:
    with serving(server := ChatServer()) as url:
        result = command("run", "boss.py", "go", "-q", "--model", "boss=llama", "--base-url", url)
        both = command("run", "boss.py", "go", "-q", "--model", "boss=llama", "--model", "kid=small", "--base-url", url)

    assert ["llama", "llama", "llama", "small", "llama"] == [model for model, _ in server.asked]
    assert "ANTHROPIC_API_KEY" in result.stdout
    assert "the child: It is five." in both.stdout


def write_asking_agent() -> None:
    """
    Write an agent that asks a question between two steps.
    """
    Path("asks.py").write_text(
        AGENTS.replace("LIMITS", "")
        .replace("AgentCall,", "AgentCall, Ask,")
        .replace("    result =", '    yield Ask("Ship it?")\n    result ='),
        encoding="utf-8",
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X56")
def test_resumed_run_uses_the_same_server_and_models() -> None:
    write_asking_agent()
    with serving(server := ChatServer()) as url:
        for journal in (["--journal", "a.jsonl"], []):
            command(
                "run", "asks.py", "go", "-q", "--model", "boss=openai/gpt-oss-20b", "--base-url", url, *journal, code=3
            )
        named = command("resume", "--last", "-q", "--answer", "q1=yes")
        given = command("resume", "a.jsonl", "-q", "--answer", "q1=yes", "--agent", "asks.py", "--base-url", url)

    assert [("openai/gpt-oss-20b", None)] * 4 == server.asked
    assert named.stdout == given.stdout
    assert "ANTHROPIC_API_KEY" in given.stdout


@pytest.mark.spec("ecosystem:EC125")
@pytest.mark.parametrize(
    ("typed", "received"), [([], None), (["--api-key-env", "OTHER"], "Bearer other-key-0123456789")]
)
def test_recorded_key_is_not_sent_to_another_server(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], received: str | None
) -> None:
    monkeypatch.setenv("MY_SERVER", KEY)
    monkeypatch.setenv("OTHER", "other-key-0123456789")
    write_asking_agent()
    with serving(recorded := ChatServer(KEY)) as url, serving(other := ChatServer()) as other_url:
        server = ["--base-url", url, "--api-key-env", "MY_SERVER"]
        command("run", "asks.py", "go", "-q", "--model", "llama", *server, code=3)
        command("resume", "--last", "-q", "--answer", "q1=yes", "--base-url", other_url, *typed)

    assert [("llama", f"Bearer {KEY}")] == recorded.asked
    assert {("llama", received)} == set(other.asked)


def test_script_replaces_the_recorded_server_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVER", KEY)
    Path("replies.json").write_text('["unused"]', encoding="utf-8")
    with serving(ChatServer(KEY)) as url:
        server = ["--base-url", url, "--api-key-env", "MY_SERVER"]
        done = command("run", "boss.py", "go", "-q", "--model", "llama", *server)
    again = command("resume", list_recorded_runs()[0].stem, "-q", "--script", "replies.json")

    assert done.stdout == again.stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:K3", "requirements:G17")
def test_cost_limit_on_a_local_model_suggests_the_price_option() -> None:
    with serving(ChatServer()) as url:
        local = ["capped.py", "go", "-q", "--model", "llama", "--base-url", url]
        refused = command("run", *local, code=4)
        free = command("run", *local, "--price", "0", "--json")
        dear = command("run", *local, "--price", "1/2", "--json")
        command("run", *local, "--price", "900000", code=4)

    assert "--price 0, or --price IN/OUT in US dollars per million tokens" in refused.stderr
    assert 0 == Decimal(json.loads(free.stdout)["cost"])
    used = json.loads(dear.stdout)["usage"]
    prompt = sum(used[f"{kind}_tokens"] for kind in ("input", "cache_read", "cache_write"))
    paid = Decimal(prompt + 2 * used["output_tokens"]) / 1_000_000
    assert paid == Decimal(json.loads(dear.stdout)["cost"]) > 0


@pytest.mark.spec("requirements:G17")
def test_price_option_applies_to_unpriced_models_only() -> None:
    elsewhere = make_pricing(Options(model=["anthropic/claude-sonnet-4-5"], base_url="http://h/v1", price="0"))
    here = make_pricing(Options(model=["anthropic/claude-sonnet-4-5"], price="0"))
    used = Usage(input_tokens=1_000_000)

    assert 0 == elsewhere("anthropic/claude-sonnet-4-5", used, NOW)
    assert here("anthropic/claude-sonnet-4-5", used, NOW) == LIST_PRICES("anthropic/claude-sonnet-4-5", used, NOW) > 0
    assert 0 == here("ollama/llama", used, NOW)
    assert elsewhere("anthropic/claude-sonnet-4-5", None, NOW) is None
