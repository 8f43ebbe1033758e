"""An official SDK that is missing or broken is told by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepengine import AgentDefinition, Engine, Perform
from stepengine.errors import ModelError
from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider, Provider
from stepengine.models._sdks import ANTHROPIC, GOOGLE, OPENAI, Sdk

BY_SDK = [
    (AnthropicProvider(api_key="k"), ANTHROPIC),
    (GoogleProvider(api_key="k"), GOOGLE),
    (OpenAIProvider(api_key="k"), OPENAI),
    (OpenAIChatProvider(api_key="k"), OPENAI),
]


@pytest.mark.spec("ecosystem:EC216")
@pytest.mark.parametrize(("provider", "sdk"), BY_SDK)
async def test_missing_sdk_is_reported_before_the_agent_starts(
    provider: Provider, sdk: Sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, sdk.module, None)
    done = []

    def handle_steps(_: object):
        yield from Perform(lambda: done.append(1))
        yield "STEP"

    agent = AgentDefinition("mine", model=f"{provider.name}/m", handle_steps=handle_steps)

    with pytest.raises(ModelError, match=rf"the package '{sdk.package}' is not installed: .*stepengine\[{sdk.extra}\]"):
        (await Engine([agent], models=provider).run("mine")).unwrap()

    assert [] == done


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise RuntimeError('half an upgrade')", "RuntimeError: half an upgrade"),
        ("import no_such_part_of_it", "No module named 'no_such_part_of_it'"),
        ("def broken(:", "SyntaxError"),
        (None, "only its folder is left"),
    ],
)
def test_broken_sdk_is_named_with_its_cause(
    text: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    It is not called missing, which would send people the wrong way.
    """
    package = tmp_path / "some_sdk"
    package.mkdir()
    if text is not None:
        (package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModelError, match=f"the package 'some-sdk' is installed and cannot be loaded .*{why}") as told:
        Sdk("some_sdk", "some-sdk", "some").load()

    assert "broken_sdk" == told.value.kind
    assert "pip install --force-reinstall 'some-sdk'" in str(told.value)


def test_sdk_check_does_not_import_the_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_sdk.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)

    Sdk("other_sdk", "other-sdk", "other").check()

    assert "other_sdk" not in sys.modules
