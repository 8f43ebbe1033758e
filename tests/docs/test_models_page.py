"""
The pages about models are so: their blocks run, one after the other, and their commands against a server on this machine.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition, Engine
from stepengine.cli.app import app
from stepengine.models import AnthropicProvider, Batched, Models
from tests.faults.batch_server import BatchServer
from tests.faults.chat_server import ChatServer, serving
from tests.faults.media_server import media_server, running

from .pages import blocks_of, execute, page

COMMANDS = "local-models.md"
PAGES = (
    "models.md",
    COMMANDS,
    "clouds.md",
    "model-settings.md",
    "structured-output.md",
    "multimodal.md",
    "server-tools.md",
    "retries.md",
    "cost.md",
)
SERVER = "http://localhost:8000/v1"
CAPPED = """
from stepengine import AgentDefinition, Limits

agent = AgentDefinition("capped", limits=Limits(max_cost_usd=1))
"""


def names_of(name: str) -> dict[str, Any]:
    """
    Run the Python of a page, and return what it leaves.
    """
    names: dict[str, Any] = {"__name__": "page"}
    blocks = [block for block in blocks_of(page(name)) if block.kind == "python"]
    assert blocks
    for block in blocks:
        execute(block, name, names)
    return names


@pytest.mark.spec("requirements:A15", "requirements:G12")
@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_page_runs_after_those_before_it(name: str) -> None:
    assert names_of(name)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.anyio
@pytest.mark.spec("requirements:A15", "providers:PV53")
async def test_an_uploaded_file_is_used_twice_and_deleted(tmp_path: Path) -> None:
    names = names_of("multimodal.md")
    (tmp_path / "report.pdf").write_bytes(b"%PDF-1.7")
    async with media_server() as server:
        models = Models({"anthropic": AnthropicProvider("k", server.url)})
        reader = AgentDefinition("reader", model="anthropic/claude-sonnet-5")
        async with Engine([reader], models=models, pricing=None) as engine:
            assert await names["asked_twice"](engine, tmp_path / "report.pdf") == ["It is five."] * 2
    assert (server.uploads, server.files) == (1, {})


@pytest.mark.anyio
@pytest.mark.spec("requirements:A15", "providers:PV99")
async def test_the_batch_example_gets_its_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of("cost.md")
    # Only what the page waits for is shortened.
    names["Batched"] = lambda provider, file, **_: Batched(provider, file, wait=0, poll=0.01)
    server = BatchServer()
    shouter = AgentDefinition("shouter", model="anthropic/claude-sonnet-5")
    async with (
        running(server),
        names["batched_engine"]([shouter], tmp_path, api_key="k", base_url=server.url) as engine,
    ):
        result = await engine.run("shouter", "hello")
    assert result.text == "HELLO"


@pytest.mark.spec("requirements:A15", "ecosystem:EC125")
def test_every_command_of_these_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_KEY", "a-key-of-the-gateway")
    Path("capped.py").write_text(CAPPED, encoding="utf-8")
    shown = [
        (name, block) for name in PAGES for block in blocks_of(page(name)) if block.kind not in ("python", "{toctree}")
    ]
    assert {(COMMANDS, "console")} == {(name, block.kind) for name, block in shown}
    lines = [line for _, block in shown for line in block.text.splitlines()]
    with serving(server := ChatServer()) as url:
        for line in lines:
            command, *arguments = shlex.split(line.replace(SERVER, url))
            result = CliRunner().invoke(app, arguments)
            assert ("stepengine", 0, "It is five.\n") == (command, result.exit_code, result.stdout), (
                line,
                result.stderr,
            )

    keys = [None, "Bearer a-key-of-the-gateway", None, None]
    assert list(zip(["llama3.2"] * 3 + ["openai/gpt-oss-20b"], keys, strict=True)) == server.asked
