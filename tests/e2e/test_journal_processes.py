"""
Journals between real processes: killed and resumed, interrupted and resumed, answered days later, replayed offline.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AGENT = """
import time
from stepengine import *

def work(arguments):
    with open("done.txt", "a") as file:
        file.write(f"{arguments['n']} ")
    time.sleep(arguments["wait"])
    return arguments["n"] * arguments["n"]

integer = {"type": "number"}
tool = Tool(
    name="work", description="Work.", run=work,
    input_schema={"type": "object", "properties": {"n": integer, "wait": integer}, "required": ["n", "wait"]},
)

def handle_steps(ctx):
    total = 0
    for n in range(12):
        try:
            done = yield from ToolCall("work", {"n": n, "wait": ctx.params["wait"]}, include_tool_call=False)
            total += int(done.text)
        except Exception as error:
            ctx.notify(str(error))
            total += n * n
    answer = yield from Ask("Keep it?")
    turn = yield STEP
    return {"total": total, "answer": answer, "said": turn.agent_state.message_history[-1].text}

agent = AgentDefinition(
    "worker", tools=[tool], handle_steps=handle_steps,
    input_schema={"type": "object", "properties": {"wait": integer}, "required": ["wait"]},
)
"""
TOTAL = sum(n * n for n in range(12))


@pytest.fixture
def folder(stepengine: Any) -> Path:
    """
    The folder of the commands, with an agent in it.
    """
    (stepengine.folder / "agents").mkdir()
    (stepengine.folder / "agents" / "worker.py").write_text(AGENT)
    assert stepengine("agents", "trust").returncode == 0
    return stepengine.folder


def done(folder: Path) -> list[str]:
    file = folder / "done.txt"
    return file.read_text().split() if file.exists() else []


@pytest.mark.deep
@pytest.mark.spec("reliability:I3", "replay:D1", "reliability:R2", "ecosystem:EC141")
def test_a_recorded_run_replays_offline_until_the_agent_changes(
    stepengine: Any, folder: Path, chat_server: Any
) -> None:
    server = chat_server({"content": "well done"})
    online = type(stepengine)(folder, network=True)
    model = ("--model", "llama", "--base-url", server.url)
    asked = online("run", "worker", "--params", '{"wait": 0}', "--journal", "run.jsonl", "-q", *model)
    assert asked.returncode == 3, asked.stderr
    ended = online("resume", "run.jsonl", "--answer", "q12=sure", "-q", *model)
    assert (ended.returncode, json.loads(ended.stdout)) == (
        0,
        {"total": TOTAL, "answer": "sure", "said": "well done"},
    ), ended.stderr
    before, recorded = done(folder), (folder / "run.jsonl").read_bytes()

    replayed = stepengine("replay", "run.jsonl", "-q")
    assert (replayed.returncode, replayed.stdout) == (0, ended.stdout), replayed.stderr
    tested = stepengine("test", ".")
    assert (tested.returncode, "1 of 1 as recorded" in tested.stdout) == (0, True), tested.stdout
    assert "sent to" in stepengine("show", "run.jsonl", "--step", "1").stdout
    assert (done(folder), (folder / "run.jsonl").read_bytes()) == (before, recorded)
    assert len(server.requests) == 1

    (folder / "agents" / "worker.py").write_text(AGENT.replace('Ask("Keep it?")', 'Ask("Drop it?")'))
    diverged = stepengine("replay", "run.jsonl", "-q")
    line = AGENT.splitlines().index('    answer = yield from Ask("Keep it?")') + 1
    assert diverged.returncode == 5
    assert f"agents/worker.py:{line}" in diverged.stderr
    assert '"Drop it?"' in diverged.stderr


ASKING = """
from stepengine import *

def note(arguments):
    with open("done.txt", "a") as file:
        file.write("noted ")
    return "noted"

tool = Tool(name="note", description="Note it.", input_schema={"type": "object"}, run=note)

def handle_steps(ctx):
    yield STEP
    yield ToolCall("note", {})
    answer = yield from Ask("Order it?", options=["yes", "no"])
    turn = yield STEP
    return f"{answer}: {turn.agent_state.message_history[-1].text}"

agent = AgentDefinition("buyer", model="llama", system_prompt="You buy.", tools=[tool], handle_steps=handle_steps)
"""
WAITING = """
import sys, time
from stepengine import Engine, load_agent
from stepengine.models import OpenAIChatProvider

class Absent:
    def ask(self, question):
        print(question.id, flush=True)
        time.sleep(600)

provider = OpenAIChatProvider("local", base_url=sys.argv[1])
Engine(models=provider, interactor=Absent()).run_sync(load_agent("agents/buyer.py"), "Go.", journal=sys.argv[2])
"""


@pytest.mark.deep
@pytest.mark.spec("requirements:X58", "reliability:R2")
@pytest.mark.parametrize(("journal", "is_edited"), [("run.jsonl", False), ("runs.db", True)])
def test_a_run_killed_while_asking_resumes_with_the_answer(
    stepengine: Any, folder: Path, chat_server: Any, journal: str, is_edited: bool
) -> None:
    file, server = folder / "agents" / "buyer.py", chat_server({"content": "one pair"}, {"content": "ordered"})
    file.write_text(ASKING)
    online = type(stepengine)(folder, network=True)
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITING, server.url, journal],
        cwd=folder, env=online.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with waiting:
        question = waiting.stdout.readline().strip()
        waiting.kill()
        _, said = waiting.communicate()
    assert ("q2", -signal.SIGKILL) == (question, waiting.returncode), said

    answer = ("--answer", "q2=yes", "-q", "--base-url", server.url)
    if is_edited:
        file.write_text(ASKING.replace("You buy.", "You buy shoes.").replace("Note it.", "Note this."))
        assert stepengine("replay", "--waiting", journal).returncode == 5
        assert stepengine("replay", "--waiting", journal, "--on-divergence", "keep").returncode == 0
        refused = online("resume", journal, *answer)
        assert (5, "") == (refused.returncode, refused.stdout)
        assert "--on-divergence keep" in refused.stderr
        answer = (*answer, "--on-divergence", "keep")
    ended = online("resume", journal, *answer)

    assert (0, "yes: ordered\n") == (ended.returncode, ended.stdout), ended.stderr
    assert ["noted"] == done(folder)
    assert 2 == len(server.requests)
    assert ("You buy shoes." if is_edited else "You buy.") == server.requests[-1]["messages"][0]["content"]
    assert 0 == stepengine("replay", journal, "-q").returncode
    assert 0 == stepengine("journal", "check", journal).returncode
