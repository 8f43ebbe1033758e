"""
`stepengine config policy`: what a policy file says, and what it would have said to recorded runs, in which nothing is run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Perform, ToolCall, tool
from stepengine.journal import FileJournal, check_recorded_calls
from stepengine.permissions import Call, Policy, Rule
from tests.cli.command import command, typed

CASSETTE = Path(__file__).parents[2] / "cassettes" / "agents" / "basher.jsonl"
OWN = """\
from stepengine import AgentDefinition, tool

@tool(category="write")
def put(x: int) -> str:
    'Put.'
    raise RuntimeError("nothing is run")

agent = AgentDefinition("lead", tools=[put])
"""


def saved(folder: Path, *rules: Rule, mode: Any = "default") -> Path:
    Policy(rules, mode).save(folder / "policy.json")
    return folder / "policy.json"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """
    A run of a leader and a child, which both call a tool of their own; it counts its calls.
    """

    @tool(category="write")
    def put(x: int) -> str:
        """Put."""
        return "put"

    def lead(ctx):
        yield ToolCall("put", {"x": 1}, include_tool_call=False)
        yield Perform(int)
        yield AgentCall("kid")

    def child(ctx):
        yield ToolCall("put", {"x": 2}, include_tool_call=False)

    kid = AgentDefinition("kid", handle_steps=child)
    agent = AgentDefinition("lead", handle_steps=lead, spawnable_agents=[kid])
    with Engine([agent], [put]) as engine:
        engine.run_sync("lead", journal=FileJournal(tmp_path / "run.jsonl"), session_id="s").unwrap()
    return tmp_path / "run.jsonl"


def test_a_policy_is_checked_and_listed(tmp_path: Path) -> None:
    file = saved(tmp_path, Rule.deny_tool("put", "Never.", scope="agent:kid", priority=3), mode="plan")
    listed, as_json = typed("config", "policy", file), typed("config", "policy", file, "--json")
    (tmp_path / "bad.json").write_text('{"mode": "plann"}')
    bad = typed("config", "policy", tmp_path / "bad.json")

    assert [0, 0, 2] == [listed.exit_code, as_json.exit_code, bad.exit_code]
    expected = "mode plan, 1 rules\ndeny   tool put, in agent:kid, priority 3: Never.\n"
    assert expected == listed.stdout
    assert Policy.load(file).to_json() == json.loads(as_json.stdout)
    assert "did you mean 'plan'?" in bad.stderr


def test_policy_lists_remembered_permissions(tmp_path: Path) -> None:
    kept = Rule("allow", Call("put", agent="lead", paths=["a/b"]), scope="user:eve")
    Policy([Rule.allow_tool("get")], remembered=[kept]).save(tmp_path / "policy.json")

    expected = "mode default, 1 rules\nallow  tool get\nalways calls of put by lead for a/b, in user:eve\n"
    assert expected == typed("config", "policy", tmp_path / "policy.json").stdout


def test_policy_against_runs_reports_denials_without_running_tools(tmp_path: Path, recorded: Path) -> None:
    before = recorded.read_bytes()
    file = saved(tmp_path, Rule.deny_tool("put", scope="agent:kid"))
    told = typed("config", "policy", file, "--against", recorded, CASSETTE)
    lines = told.stdout.splitlines()

    calls = check_recorded_calls(str(recorded), Policy.load(file), {})

    assert (1, before) == (told.exit_code, recorded.read_bytes())
    assert [("lead", "ask"), ("kid", "deny")] == [(call.agent, call.decision) for call in calls]
    assert [f"ask    {recorded} #0 lead", f"deny   {recorded} 2#0 kid", f"ask    {CASSETTE} #0 basher"] == lines[::3]
    assert ['put {"x":1}', 'put {"x":2}'] == [line.strip() for line in lines[1:6:3]]
    assert "the rule 'deny tool put in agent:kid' denies it" in lines[5]
    assert "3 calls in 2 runs: 1 denied, 2 asked about" in told.stderr
    assert "unknown tools, judged without a category: put;" in told.stderr


def test_agent_option_gives_policy_the_categories_of_own_tools(tmp_path: Path, recorded: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    rules = [Rule.allow_category("write"), Rule.allow_command(["python3", "-m", "unittest"], scope="agent:basher")]
    words = ("config", "policy", saved(tmp_path, *rules), "--against", recorded, "--against", CASSETTE)
    known, unknown = typed(*words, "--agent", tmp_path / "mine.py"), typed(*words, "--json")

    assert (0, "") == (known.exit_code, known.stdout)
    assert 1 == unknown.exit_code
    assert [("ask", "put", {"x": 1}), ("ask", "put", {"x": 2})] == [
        (call["decision"], call["tool"], call["input"]) for call in json.loads(unknown.stdout)
    ]


@pytest.mark.spec("requirements:X74")
@pytest.mark.parametrize("agent", ["mine.py", "lead"])
def test_agent_option_finds_tools_of_its_file_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Path, agent: str
) -> None:
    text = OWN.replace("tools=[put])", 'tools=["put"])\ntools = [put]')
    (tmp_path / "more").mkdir()
    for file in (tmp_path / "mine.py", tmp_path / "more" / "lead.py"):
        file.write_text(text)
    user = Path(os.environ["XDG_CONFIG_HOME"], "stepengine/config.toml")
    user.parent.mkdir(parents=True)
    user.write_text(f"agents = [{str(tmp_path / 'more')!r}]\n")
    monkeypatch.chdir(tmp_path)
    words = ("config", "policy", saved(tmp_path, Rule.allow_category("write")), "--against", recorded)
    done = command(*words, "--agent", agent)

    assert "not known" not in done.stderr
    assert "2 calls in 1 run: 0 denied, 0 asked about" in done.stderr


def test_policy_does_not_suggest_the_option_that_was_given(tmp_path: Path, recorded: Path) -> None:
    (tmp_path / "mine.py").write_text('from stepengine import AgentDefinition\nagent = AgentDefinition("lead")\n')
    words = ("config", "policy", saved(tmp_path), "--against", recorded, "--agent", tmp_path / "mine.py")
    said = command(*words, code=1).stderr

    assert "unknown tools, judged without a category: put;" in said
    assert "--agent" not in said


def test_invalid_policy_or_run_exits_with_2(tmp_path: Path) -> None:
    file = saved(tmp_path)
    for words, said in (
        ([tmp_path / "none.json"], "cannot be read"),
        ([file, file], "one policy at a time"),
        ([file, "--against", "x"], "there is no journal 'x'"),
    ):
        assert said in command("config", "policy", *words, code=2).stderr
