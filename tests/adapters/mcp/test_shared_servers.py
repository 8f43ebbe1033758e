"""
Engines of one event loop that list the same source: they share its server, and the last one that has it ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import Engine
from stepengine.cli.app import app
from stepengine.testing import ScriptedModel, tool_call
from tests.phrases import OUTCOME_UNKNOWN

from .test_servers import results

ODD = str(Path(__file__).with_name("odd_server.py"))


def looks(runs: int = 1) -> ScriptedModel:
    return ScriptedModel([tool_call("odd__look", {}), "ok"] * runs)


async def arrived(pipe: Path) -> None:
    """
    Wait until the server has taken a call, which it says through a pipe.
    """
    await asyncio.to_thread(pipe.read_text)


def let_go(pipe: Path) -> None:
    """
    Have the server answer; also when there is none any more, which a test that fails must not wait for.
    """
    end = os.open(pipe, os.O_RDWR)
    os.write(end, b"on")
    LET_GO.append(end)


LET_GO: list[int] = []


@pytest.fixture
def gated(odd: Any, tmp_path: Path) -> Any:
    """
    Make a source whose server answers its second call when somebody writes into a pipe.
    """
    pipes = tmp_path / "arrived", tmp_path / "go"
    for pipe in pipes:
        os.mkfifo(pipe)
    yield odd("gate", *map(str, pipes)), *pipes
    while LET_GO:
        os.close(LET_GO.pop())


async def test_closing_one_engine_leaves_the_shared_server_running(gated: Any, agent: Any) -> None:
    source, taken, go = gated
    one, other = [Engine([agent(source)], models=looks()) for _ in range(2)]

    first = await one.run("worker", "Look.")
    running = asyncio.create_task(other.run("worker", "Look."))
    await arrived(taken)
    await one.aclose()
    let_go(go)
    second = await running
    (connection,) = source._connections.values()
    process = connection._live.pipe._process
    is_alive = process.returncode is None
    await other.aclose()

    assert [("ok", "seen")] == results(first) == results(second)
    assert (True, {}) == (is_alive, source._connections)
    assert process.returncode is not None


@pytest.mark.deep
@pytest.mark.smoke
async def test_reused_engine_reopens_its_server(odd: Any, agent: Any) -> None:
    source = odd()
    one, other = [Engine([agent(source)], models=looks(2)) for _ in range(2)]
    await one.run("worker", "Look.")
    await one.aclose()
    await one.run("worker", "Look.")
    await other.run("worker", "Look.")
    await one.aclose()

    assert [("ok", "seen")] == results(await other.run("worker", "Look."))
    await other.aclose()
    assert {} == source._connections


async def test_idle_engine_does_not_keep_a_server_alive(odd: Any, agent: Any) -> None:
    source = odd()
    idle = Engine([agent(source)], models=looks())

    async with Engine([agent(source)], models=looks()) as engine:
        await engine.run("worker", "Look.")

    assert {} == source._connections
    await idle.aclose()


@pytest.mark.deep
@pytest.mark.smoke
async def test_call_on_a_closed_connection_is_a_cut_off_error(
    gated: Any, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.stdio.CLOSE_SECONDS", 0.1)
    source, taken, _ = gated
    async with Engine([agent(source)], models=looks(2)) as engine:
        await engine.run("worker", "Look.")
        running = asyncio.create_task(engine.run("worker", "Look."))
        await arrived(taken)
        await source.aclose()
        result = await running

    lost = f"the connection to the MCP server 'odd' was lost (it was closed during the call); the {OUTCOME_UNKNOWN}"
    assert [("error", lost)] == results(result)
    assert [("cut_off", "odd")] == [(e.kind, e.target) for e in result.tool_calls[0].result.side_effects]


# --- evaluations ------------------------------------------------------------------------------------------------------

LOOKING = f"""
import sys
from stepengine import AgentDefinition
from stepengine.evaluation import Case, Evaluation, contains
from stepengine.adapters.mcp import mcp_tools
from stepengine.testing import text, tool_call

def replies(request):
    seen = [m.text for m in request.messages if m.role == "tool"]
    return text(f"I see {{seen[-1]}}") if len(seen) == 3 else tool_call("odd__look", {{}})

command = [sys.executable, "-S", "-E", {ODD!r}, "MODE", "broken"]
agent = AgentDefinition("worker", model="t/m", tools=[mcp_tools(command, name="odd", start_timeout=30)])
evaluation = Evaluation(
    "looking", cases=[Case(f"c{{n}}", "Look.", replies=replies) for n in range(CASES)], agents={{"base": agent}},
    checks=[contains("I see seen")],
)
"""


def evaluated(*words: str, code: int = 0) -> Any:
    made = CliRunner().invoke(app, ["eval", "looking.py", "--json", *words])
    assert code == made.exit_code, made.output + made.stderr
    return json.loads(made.stdout)


def samples(report: Any) -> list[Any]:
    return [sample for case in report["cases"] for sample in case["samples"]]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG63", "evaluation:JG65")
def test_evaluation_excludes_samples_that_lost_their_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))
    Path("looking.py").write_text(LOOKING.replace("MODE", "dies").replace("CASES", "1"))
    Path("broken").touch()
    (lost,) = samples(evaluated("--out", "a", "--gate", "pass >= 0", code=1))
    told = CliRunner().invoke(app, ["eval", "looking.py", "--recheck", "a"]).output
    Path("broken").unlink()
    report = evaluated("--out", "b", "--against", "a")
    again = evaluated("--out", "c", "--against", "b")

    assert ("error", False) == (lost["status"], lost["counts"])
    assert "not measured, 1 sample ended with an error of the provider or a tool server" in told
    assert f"was cut off: the connection to the MCP server 'odd' was lost; the {OUTCOME_UNKNOWN}" in told
    assert [("new", "completed", True)] == [(s["reused"], s["status"], s["counts"]) for s in samples(report)]
    assert ["journal"] == [s["reused"] for s in samples(again)]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    "body",
    ["raise asyncio.CancelledError", 'return ToolResult.error("CancelledError")'],
    ids=["now", "recorded before"],
)
def test_evaluation_excludes_samples_cancelled_without_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("looking.py").write_text(
        f"""
import asyncio
from stepengine import AgentDefinition, ToolResult, tool
from stepengine.evaluation import Case, Evaluation, contains
from stepengine.testing import tool_call

@tool
async def look() -> str:
    "Look."
    {body}

agent = AgentDefinition("worker", model="t/m", tools=[look])
cases = [Case("c", "Look.", replies=[tool_call("look", {{}}), "ok"])]
evaluation = Evaluation("looking", cases=cases, agents={{"base": agent}}, checks=[contains("ok")])
""",
    )

    (first,), (again,) = samples(evaluated("--out", "a")), samples(evaluated("--out", "b", "--against", "a"))

    assert ("error", False, "new") == (first["status"], first["counts"], first["reused"])
    assert "new" == again["reused"]
    assert "was cut off: " in first["scores"]["contains"]["reason"]
