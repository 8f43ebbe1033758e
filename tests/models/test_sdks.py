"""An official SDK that is missing or broken is told by name."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import attrs
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

    with pytest.raises(ModelError, match=f"the package 'some-sdk' is installed but cannot be loaded .*{why}") as told:
        Sdk("some_sdk", "some-sdk", "some").load()

    assert "broken_sdk" == told.value.kind
    assert "pip install --force-reinstall 'some-sdk'" in str(told.value)


def test_sdk_check_does_not_import_the_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_sdk.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)

    Sdk("other_sdk", "other-sdk", "other").require_installed()

    assert "other_sdk" not in sys.modules


AGENT = """
from pathlib import Path
from stepengine import STEP, AgentDefinition, Perform

def handle_steps(ctx):
    yield from Perform(lambda: Path("done").touch())
    yield STEP

agent = AgentDefinition("mine", model="{model}", handle_steps=handle_steps)
"""


ROOT = Path(__file__).resolve().parents[2]


def environment_without(packages: tuple[str, ...], folder: Path) -> Path:
    """Return the Python of an environment that has what this one has, but for some distributions."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (own,) = folder.glob("lib/python3*/site-packages")
    for entry in Path(attrs.__file__).parents[1].iterdir():
        if not any(fnmatch(entry.name, pattern) for pattern in packages):
            (own / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC216")
@pytest.mark.parametrize(
    ("without", "model", "told"),
    [
        (
            ("openai", "openai-*"),
            "openai/gpt-5",
            "the package 'openai' is not installed: pip install 'stepengine[openai]'",
        ),
        (("anthropic", "anthropic-*"), "anthropic/m", "the package 'anthropic' is not installed"),
        (
            ("sniffio", "sniffio-*"),
            "anthropic/m",
            "the package 'anthropic' is installed but cannot be loaded (it needs 'sniffio', which is not installed): pip install 'sniffio'",
        ),
    ],
)
def test_missing_dependency_is_named_before_the_run_in_real_environment(
    without: tuple[str, ...], model: str, told: str, tmp_path: Path
) -> None:
    python = environment_without(without, tmp_path / "environment")
    (tmp_path / "mine.py").write_text(AGENT.format(model=model))
    keys = {
        "OPENAI_API_KEY": "a-key-that-is-long",
        "ANTHROPIC_API_KEY": "a-key-that-is-long",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
    }
    here = {
        **keys,
        "HOME": str(tmp_path),
        "STEPENGINE_STATE_DIR": str(tmp_path / "state"),
        "COLUMNS": "400",
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
    }

    ran = subprocess.run(
        [python, "-m", "stepengine", "run", "mine.py", "--quiet"],
        cwd=tmp_path,
        env=here,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 != ran.returncode
    assert told in " ".join((ran.stdout + ran.stderr).split())
    assert not (tmp_path / "done").exists()
