"""``--code-mode``: the model calls the tools of an agent by programs, and everything else is as without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stepengine.cli import bench
from stepengine.cli.app import app
from stepengine.testing import ScriptedModel, text, tool_call

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, program_tool

# What the package opens once for a process is there before any test, so that none of them seems to have left it behind.
first = MontySandbox(1)
first.open((), seconds=1, memory=1 << 26, printed=10, seed=1).feed("1", datetime(2026, 1, 1, tzinfo=UTC))
first.close()

AGENT = """
from stepengine import AgentDefinition, tool

@tool(category="network")
def order(item: str) -> str:
    "Order an item."
    with open("ordered", "a") as log:
        print(item, file=log)
    return f"ordered {item}"

agent = AgentDefinition("reader", tools=["read_files", "list_directory", order, "write_todos"])
"""
OTHERS = {
    "caller": "tools=['glob'], handle_steps=lambda ctx: (yield None)",
    "bare": "tools=['write_todos']",
    "writer": "tools=['str_replace', 'run_terminal_command']",
}
READS = """\
import asyncio
listed = await list_directory(path=".")
parts = await asyncio.gather(*[read_files(paths=[f"{n}.txt"]) for n in range(5)])
sum(str(part).count("color") for part in parts)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reader.py").write_text(AGENT)
    for name, rest in OTHERS.items():
        made = f"from stepengine import AgentDefinition\nagent = AgentDefinition({name!r}, {rest})"
        (tmp_path / f"{name}.py").write_text(made)
    for n in range(5):
        (tmp_path / f"{n}.txt").write_text("color\n")
    return tmp_path


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """Workers live as long as their process; a test leaves none behind."""
    yield
    for sandbox in program_tool._SHARED:
        sandbox.close()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    def called(
        *arguments: str, replies: list[Any] | None = None, typed: str | None = None
    ) -> tuple[Result, ScriptedModel]:
        model = ScriptedModel(replies or [])
        monkeypatch.setattr(bench, "make_model_registry", lambda *_: model)
        named = ["--model", "test/m"] if arguments[0] in ("run", "chat") else []
        return CliRunner().invoke(app, [*arguments, *named], input=typed), model

    return called


def program(code: str) -> Any:
    return tool_call("run_code", {"code": code})


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG31")
def test_code_mode_makes_twenty_calls_in_one_step(folder: Path, command: Any) -> None:
    ran, model = command(
        "run", "reader.py", "Count.", "--code-mode", "--journal", "run.jsonl", replies=[program(READS), text("5")]
    )
    replayed, _ = command("replay", "run.jsonl", "--agent", "reader.py")

    assert (0, "5\n") == (ran.exit_code, ran.stdout), ran.stderr
    assert ["run_code", "write_todos"] == [tool.name for tool in model.calls[0].tools]
    assert all(
        f"async def {name}(" in model.calls[0].tools[0].description
        for name in ("read_files", "list_directory", "order")
    )
    assert 0 == replayed.exit_code, replayed.stderr
    assert '"5"' in Path("run.jsonl").read_text()


@pytest.mark.spec("programs:PG31")
@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("caller.py", "agent 'caller' has a handler that calls its tools; add code_mode(...) to its tools"),
        ("bare.py", "agent 'bare' has no tools that programs may call"),
        ("writer.py", "agent 'writer' changes files with str_replace; allow that with --write"),
    ],
)
def test_unusable_code_mode_is_rejected_before_a_model_call(folder: Path, command: Any, agent: str, said: str) -> None:
    ran, model = command("run", agent, "Go.", "--code-mode")

    assert 2 == ran.exit_code
    assert said in ran.stderr
    assert not model.calls


@pytest.mark.spec("programs:PG31")
@pytest.mark.parametrize("name", ["run", "chat"])
def test_missing_extra_is_reported_before_a_model_call(
    folder: Path, command: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_tool, "_SHARED", [])
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    ran, model = command(name, "reader.py", "Go.", "--code-mode", typed="")

    assert ran.exit_code != 0
    assert "pip install 'stepengine[programs]'" in ran.stderr
    assert not model.calls


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG31")
def test_resumed_chat_stays_in_code_mode(folder: Path, command: Any) -> None:
    said, model = command(
        "chat", "reader.py", "--code-mode", replies=[program("x = 2"), text("Set.")], typed="Set x.\n"
    )
    assert ["run_code", "write_todos"] == [tool.name for tool in model.calls[0].tools], said.stderr
    again, model = command("chat", "--resume", replies=[text("Yes.")], typed="Is it set?\n")

    assert ["run_code", "write_todos"] == [tool.name for tool in model.calls[0].tools], again.stderr
