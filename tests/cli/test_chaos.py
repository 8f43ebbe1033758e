"""
`stepengine test --chaos`: an author's own agent in worlds where things go wrong, without a test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stepengine import load_agent
from stepengine.cli.app import app
from stepengine.cli.exits import Exit
from stepengine.testing import SimulationFailed, simulate
from stepengine.testing.faults import FAULTS

pytestmark = pytest.mark.usefixtures("folder")
AGENT = """
from stepengine import *

def pay(amount):
    raise AssertionError("nothing is performed")

def handle_steps(ctx):
    found = yield from ToolCall("count", {"what": ctx.prompt})
    BODY
    yield STEP
    return "ok"

schema = {"type": "object", "properties": {"what": {"type": "string"}}}
count = Tool(name="count", description="Count.", input_schema=schema, run=pay)
agent = AgentDefinition("payer", model="t/m", tools=[count, "read_files"], handle_steps=handle_steps)
"""
SOUND = "yield from Perform(pay, 3)"
CARELESS = "assert found.data['lines'] < 5"


def chaos(body: str, *words: str, code: Exit = Exit.COMPLETED) -> Result:
    body = f"try:\n        {body}\n    except (ToolError, PerformError):\n        pass" if body == SOUND else body
    Path("mine.py").write_text(AGENT.replace("BODY", body))
    said = CliRunner().invoke(app, ["test", "--chaos", "./mine.py", *words])
    assert said.exit_code == code, said.output
    return said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:K19")
def test_chaos_runs_an_agent_with_faults_and_performs_nothing() -> None:
    said = chaos("pass", "-n", "10").stdout
    told = json.loads(chaos("pass", "-n", "10", "--json").stdout)

    assert said.startswith("10 runs with ")
    assert "from seed 0: every required property held" in said
    assert (told["runs"], sum(told["statuses"].values())) == (10, 10)
    assert set(told["faults"]) <= set(FAULTS)
    assert sum(told["faults"].values()) > 0


@pytest.mark.spec("reliability:K19")
def test_chaos_failure_is_reproducible_from_its_seed() -> None:
    """
    The command, again with the seed alone, and the line for a test fail alike.
    """
    words = ("--results", '{"count": {"lines": 9}}')
    told = json.loads(chaos(CARELESS, *words, "--json", code=Exit.FAILED).stdout)
    said = chaos(CARELESS, *words, "--seed", str(told["seed"]), "-n", "1", code=Exit.FAILED)
    with pytest.raises(SimulationFailed) as failed:
        simulate(load_agent("./mine.py"), seeds=[told["seed"]], results={"count": {"lines": 9}})

    assert "handler" == told["row"] == failed.value.row
    assert "mine.py" in told["message"]
    assert f"simulate(agent, seeds=[{told['seed']}]" in "".join(said.stdout.split("\n"))
    assert f"with the seed {told['seed']}" in said.stderr


@pytest.mark.spec("reliability:K19")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--faults", "rain"), "valid kinds: failure, timeout"),
        (("--results", "[1]"), "is JSON, but not an object"),
        (("--results", "@none.json"), "--results 'none.json' cannot be read"),
        (("--params", "{"), "--params is not JSON"),
        (("-n", "0"), "greater than"),
        (("Go", "on"), "quote a prompt of several words"),
        (("--agent", "x"), "without --agent"),
    ],
)
def test_chaos_rejects_invalid_options(words: tuple[str, ...], part: str) -> None:
    assert part in " ".join(chaos("pass", *words, code=Exit.USAGE).stderr.split())


@pytest.mark.deep
@pytest.mark.smoke
def test_only_the_kinds_that_were_named_happen() -> None:
    told = json.loads(chaos("pass", "--faults", "crash, crash_after", "-n", "20", "--json").stdout)

    assert set(told["faults"]) <= {"crash", "crash_after"}


def test_options_of_chaos_need_chaos() -> None:
    said = CliRunner().invoke(app, ["test", "run.jsonl", "--seed", "3"])

    assert (Exit.USAGE, True) == (said.exit_code, "need --chaos; add it" in said.stderr)
