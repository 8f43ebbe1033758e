"""
`stepengine agents models`: what is there, without a request and without a key on the screen.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from stepengine.cli.app import app
from stepengine.models import PRESETS, ModelReply, Models, Provider, list_providers
from tests.servers import Quiet, served

KEY = "sk-secret-0123456789"


def models(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["agents", "models", *arguments])


@pytest.mark.spec("requirements:G23")
def test_models_lists_every_provider_and_never_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", KEY)
    monkeypatch.setenv("OPENROUTER_BASE_URL", f"https://me:{KEY}@proxy.example/v1?key={KEY}")
    result = models()
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines()[1:]}

    assert 0 == result.exit_code
    assert [f"{prefix}/..." for prefix in Models.standard().providers] == list(rows)
    assert set(PRESETS) <= {row.removesuffix("/...") for row in rows}
    assert ["set", "ANTHROPIC_AUTH_TOKEN", "https://api.anthropic.com"] == rows["anthropic/..."][1:]
    assert ["missing", "OPENAI_API_KEY", "https://api.openai.com/v1"] == rows["openai/..."][1:]
    assert "not needed" in " ".join(rows["ollama/..."])
    assert "https://***@proxy.example/v1" == rows["openrouter/..."][-1]
    assert KEY not in result.output


@pytest.mark.spec("requirements:G15", "requirements:G17")
def test_model_shows_window_and_price_or_unknown() -> None:
    shown = models("anthropic:claude-sonnet-4-5", "ollama/x").stdout
    first, second = shown.split("\n\n")

    assert first.startswith("anthropic/claude-sonnet-4-5\n")
    assert "key      missing; ANTHROPIC_API_KEY" in first
    assert "window   200,000 tokens" in first
    assert "input $3, output $15" in first
    assert ["window   unknown", "price    unknown"] == [
        line.strip() for line in second.splitlines() if "window" in line or "price" in line
    ]


def test_the_models_of_a_fallback_are_described_one_by_one() -> None:
    found = json.loads(models("anthropic/claude-sonnet-4-5 | ollama/x on rate_limit", "--json").stdout)

    assert ["anthropic/claude-sonnet-4-5", "ollama/x"] == [entry["model"] for entry in found]
    assert ["3", None] == [entry["prices"] and entry["prices"]["input"] for entry in found]
    assert {"context_window", "max_output", "provider"} <= set(found[0])


@pytest.mark.spec("requirements:G13", "ecosystem:EC141")
def test_unknown_provider_suggests_the_nearest_one() -> None:
    result = models("antropic/x")

    assert (2, "") == (result.exit_code, result.stdout)
    assert "did you mean 'anthropic'?" in result.stderr


def test_broken_provider_of_another_package_is_listed() -> None:
    class Own(Provider):
        name = "own"

        async def complete(self, request: Any) -> ModelReply:
            return ModelReply("x")

    def broken() -> Provider:
        raise ImportError("no such SDK")

    own, bad = list_providers(Models({"own": Own(), "bad": broken}))

    assert ("own", (), "not needed", None, None) == (own.prefix, own.key_variables, own.key, own.key_from, own.base_url)
    assert "cannot be used: ImportError: no such SDK" == bad.key


class Describes(Quiet):
    """An API that describes one model."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        known = self.path.endswith("/claude-novel-9")
        thinking = {"types": {"adaptive": {"supported": True}, "enabled": {"supported": False}}}
        described = {
            "max_input_tokens": 300_000,
            "max_tokens": 40_000,
            "capabilities": {"thinking": thinking, "effort": {"low": {"supported": True}}},
        }
        body = json.dumps(
            described if known else {"type": "error", "error": {"type": "not_found_error", "message": "model: x"}}
        ).encode()
        self.send_response(200 if known else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV1", "requirements:G15")
def test_ask_option_requests_the_capabilities_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Describes) as address:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", address)
        silent = models("anthropic/claude-novel-9").stdout
        assert [] == Describes.asked
        shown = models("anthropic/claude-novel-9", "--ask").stdout
        (found,) = json.loads(models("anthropic/claude-novel-9", "--ask", "--json").stdout)
        refused = models("anthropic/claude-x", "--ask")

    assert "window   unknown" in silent
    assert "thinking" not in silent
    for line in ("window   300,000 tokens", "output   40,000 tokens", "thinking adaptive", "efforts  low"):
        assert line in shown
    assert (300_000, 40_000, ["adaptive"], ["low"]) == tuple(
        found[name] for name in ("context_window", "max_output", "thinking", "efforts")
    )
    assert (2, "") == (refused.exit_code, refused.stdout)
    assert "anthropic answered 404" in refused.stderr
    assert "--ask needs a model: name one" in models("--ask").stderr
