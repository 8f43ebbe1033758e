"""
Settings at work: what a run, a question and a list do otherwise because a file or a variable says so.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stepengine.cli import bench
from stepengine.cli.app import app
from stepengine.cli.options import Options
from stepengine.data.messages import TextPart, ThinkingPart
from stepengine.data.models import ModelReply
from stepengine.engine.settings import Settings
from stepengine.testing import text, tool_call

AGENT = """
from stepengine import *

@tool
def shout(word: str) -> str:
    \"\"\"Shout.\"\"\"
    return word.upper()

agent = AgentDefinition("desk", tools=[shout], limits=Limits(max_steps=3, on_max_steps="stop"))
"""


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    Commands run in the folder of a project that has one agent.
    """
    work = tmp_path / "work"
    (work / "agents").mkdir(parents=True)
    (work / ".git").mkdir()
    (work / "agents/desk.py").write_text(AGENT)
    monkeypatch.chdir(work)
    return work


def command(*arguments: str, code: int = 0, **environ: str) -> Result:
    result = CliRunner().invoke(app, list(arguments), env=environ)
    assert code == result.exit_code, (result.stdout, result.stderr, result.exception)
    return result


def user(content: str) -> None:
    folder = Path(os.environ["XDG_CONFIG_HOME"], "stepengine")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(content)


def loops(times: int) -> list[Any]:
    return [tool_call("shout", {"word": str(number)}) for number in range(times)]


@pytest.mark.spec("interfaces:IF103", "interfaces:IF98")
def test_model_of_user_settings_is_the_default(scripted: Any) -> None:
    user('model = "x/mine"')
    model = scripted(text("1"), text("2"), text("3"))
    command("run", "desk", "go")
    command("run", "desk", "go", "--model", "x/typed")
    command("run", "desk", "go", STEPENGINE_MODEL="x/environment")

    assert ["x/mine", "x/typed", "x/environment"] == [call.model for call in model.calls]


@pytest.mark.spec("interfaces:IF98")
@pytest.mark.parametrize(
    ("own", "arguments", "steps"),
    [(2, [], 2), (9, [], 3), (2, ["--max-steps", "4"], 4)],
    ids=["set", "agent's", "typed"],
)
def test_limit_setting_lowers_the_agents_own_and_an_option_overrides(
    scripted: Any, own: int, arguments: list[str], steps: int
) -> None:
    user(f"limits.max_steps = {own}")
    model = scripted(*loops(5))
    command("run", "desk", "go", "--model", "x/m", *arguments, code=4)

    assert steps == len(model.calls)


def test_resumed_run_obeys_newly_set_limits(scripted: Any) -> None:
    Path("agents/asks.py").write_text(
        'from stepengine import *\n\ndef handle_steps(ctx):\n    yield from Ask("Go?")\n'
        '    yield STEP_ALL\n\nagent = AgentDefinition("asks", handle_steps=handle_steps)\n'
    )
    user("limits.max_steps = 7")
    scripted()
    command("run", "asks", "go", "--model", "x/m", "--journal", "run.jsonl", "-q", code=3)
    user("limits.max_steps = 1\nlimits.max_tokens = 1")
    scripted(text("one"), text("two"))

    assert "0 of 1 tokens" in command("resume", "run.jsonl", "--answer", "q0=yes", "-q", code=4).stderr


@pytest.mark.spec("interfaces:IF98")
def test_permissions_hold_for_runs_and_a_projects_are_refused_once(scripted: Any) -> None:
    rules = '[permissions]\nmode = "dont_ask"\n'
    Path("stepengine.toml").write_text('[permissions]\nmode = "accept_edits"\n')
    user(rules)
    scripted(*loops(1), text("denied"))
    said = command("run", "desk", "go", "--model", "x/m")

    assert "needs a person's approval" in said.stderr
    assert 1 == said.stderr.count("may not be set by a project; pass --config")
    wrong = command("run", "desk", "go", STEPENGINE_PERMISSIONS="{}", code=2).stderr
    assert "STEPENGINE_PERMISSIONS: permissions is" in wrong
    user('[permissions]\nmode = "never"\n')
    assert "config.toml:1: permissions: unknown mode 'never'" in command("run", "desk", "go", code=2).stderr


@pytest.mark.spec("interfaces:IF98")
def test_agents_setting_is_relative_to_its_file(tmp_path: Path, scripted: Any) -> None:
    folder = tmp_path / "mine/agents"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text(AGENT.replace('"desk"', '"helper"'))
    given = tmp_path / "mine/given.toml"
    given.write_text('agents = ["agents"]')
    scripted(text("helped"), text("helped"))

    assert "helped\n" == command("run", "helper", "--model", "x/m", "--config", str(given)).stdout
    assert "helped\n" == command("run", "helper", "--model", "x/m", STEPENGINE_AGENTS=str(folder)).stdout
    assert "helper\n" in command("agents", "list", "--config", str(given)).stdout
    command("run", "helper", code=2)


def test_folder_of_an_unknown_user_is_no_folder(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text('sandboxed = ["~nobody-here/agents"]')

    command("agents", "list", "--config", str(given), STEPENGINE_AGENTS="~nobody-here/agents")


@pytest.mark.spec("requirements:G23", "interfaces:IF98")
def test_provider_settings_choose_addresses_and_key_variables() -> None:
    user(
        'base_urls.openai = "http://mine.test/v1"\nproviders.openai.key = { env = "MY_KEY" }\n'
        'providers.anthropic.key = { env = "NO_KEY" }\nbase_urls.local = "http://localhost:1/v1"\n'
        'aliases.fast = "local/tiny"\n'
    )
    shown = command("agents", "models", "--json", MY_KEY="sk-canary-canary-canary", ANTHROPIC_API_KEY="sk-other")
    found = {entry["prefix"]: entry for entry in json.loads(shown.stdout)}

    assert "canary" not in shown.output
    assert ("set", "MY_KEY", "http://mine.test/v1") == tuple(
        found["openai"][name] for name in ("key", "key_from", "base_url")
    )
    assert ("missing", None) == (found["anthropic"]["key"], found["anthropic"]["key_from"])
    assert "http://localhost:1/v1" == found["local"]["base_url"]
    assert "local/tiny\n" in command("agents", "models", "fast").stdout
    said = command("ask", "anthropic/claude-x", "hi", code=2, ANTHROPIC_API_KEY="sk-other").stderr
    assert "NO_KEY" in said


@pytest.mark.spec("interfaces:IF98")
def test_log_lines_and_colours_are_shown_as_set(scripted: Any) -> None:
    Path("agents/logs.py").write_text(
        "from stepengine import *\n\ndef handle_steps(ctx):\n    ctx.logger.error('careful')\n    yield from ()\n\n"
        "agent = AgentDefinition('logs', handle_steps=handle_steps)\n"
    )
    Path("stepengine.toml").write_text('[display]\nlog = "off"\ncolor = "always"\n')

    assert "\x1b[1m" in (quiet := command("run", "logs").stderr)
    assert "careful" not in quiet
    assert "careful" in command("run", "logs", STEPENGINE_DISPLAY__LOG="error").stderr


@pytest.mark.spec("interfaces:IF98")
def test_thinking_is_folded_shown_or_hidden_as_set(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**display: str) -> str:
        reply = ModelReply([ThinkingPart("first\nsecond"), TextPart("done")])
        scripted(reply)
        return command("run", "desk", "go", "--model", "x/m", **display).stderr

    assert "thinks: first (1 more line)\n" in said()
    assert "thinks: second" in said(STEPENGINE_DISPLAY__THINKING="show")
    assert "thinks" not in said(STEPENGINE_DISPLAY__THINKING="hide")
    monkeypatch.setattr(bench, "is_terminal", lambda _: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    for plain in (False, True):
        progress = bench.make_progress_display(Options(settings=Settings(values={"display.plain": plain})))
        assert progress is not None
        assert (not plain) is progress._wants_live


@pytest.mark.parametrize(
    "arguments",
    [["run", "desk"], ["ask", "x/m", "hi"], ["resume", "x"], ["replay", "x"], ["fork", "x", "--at", "1"],
     ["test", "x"], ["agents", "list"], ["agents", "models"], ["config", "show"], ["demo"]],
    ids=" ".join,
)  # fmt: skip
def test_every_command_takes_config_and_reports_its_errors(arguments: list[str]) -> None:
    Path("given.toml").write_text("limit.max_steps = 1")

    said = command(*arguments, "--config", "given.toml", code=2).stderr
    assert "stepengine: given.toml:1: there is no setting 'limit.max_steps'; did you mean 'limits.max_steps'?\n" == said


# --- --model ----------------------------------------------------------------------------------------------------------

FAMILY = """
from stepengine import *

helper = AgentDefinition("helper", model="own/helper | own/other")
plain = AgentDefinition("plain")

def handle_steps(ctx):
    yield STEP
    yield AgentCall("helper", "help")
    yield AgentCall("plain", "help")
    yield StepWith(model="named/here")

agent = AgentDefinition("boss", model="own/boss", spawnable_agents=[helper, plain], handle_steps=handle_steps)
"""


@pytest.fixture
def boss() -> None:
    Path("agents/boss.py").write_text(FAMILY)


def asks_for(scripted: Any, *arguments: str, code: int = 0, **environ: str) -> list[str]:
    model = scripted(*[text("done")] * 4)
    command(*arguments, "-q", code=code, **environ)
    return [call.model for call in model.calls]


CHOSEN = {
    "nothing": ([], ["own/boss", "own/helper", "own/boss", "named/here"]),
    "all": (["--model", "a/all"], ["a/all", "a/all", "a/all", "named/here"]),
    "one": (["--model", "helper=a/one"], ["own/boss", "a/one", "own/boss", "named/here"]),
    "both": (["--model", "helper=a/one", "--model", "a/all"], ["a/all", "a/one", "a/all", "named/here"]),
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X56")
@pytest.mark.parametrize(("arguments", "asked"), CHOSEN.values(), ids=CHOSEN)
def test_model_option_applies_to_all_or_one_agent(
    scripted: Any, boss: None, arguments: list[str], asked: list[str]
) -> None:
    assert asked == asks_for(scripted, "run", "boss", "go", *arguments)
    assert [] == asks_for(scripted, "replay", "--last")
    assert [] == asks_for(scripted, "resume", entry_name())
    assert asked[2:] == asks_for(scripted, "fork", "--last", "--at", "1", "--allow-repeat")
    assert [] == asks_for(scripted, "replay", "--last")


def entry_name() -> str:
    name: str = json.loads(command("runs", "--json").stdout)[0]["stem"]
    return name


@pytest.mark.spec("requirements:X56")
def test_model_for_an_unknown_agent_or_provider_is_rejected(boss: None) -> None:
    said = command("run", "boss", "go", "--model", "nobody=a/one", code=2).stderr
    assert "names no agent of this run; its agents: boss, plain, helper" in said

    Path("agents/names.py").write_text(
        'from stepengine import *\n\ndef handle_steps(ctx):\n    yield StepWith(model="nowhere/x")\n\n'
        'agent = AgentDefinition("names", handle_steps=handle_steps)\n'
    )
    said = command("run", "names", "go", "--model", "ollama/llama3.2", code=2).stderr
    assert "'nowhere/x'" in said
    assert "--model ollama/llama3.2" in said


@pytest.mark.spec("requirements:G23", "providers:PV109")
def test_cloud_settings_apply_only_to_their_provider() -> None:
    user(
        'base_urls.bedrock = "https://mine.test"\nproviders.bedrock.key = { env = "MY_KEY" }\n'
        'base_urls.vertex = "https://other.test"\nproviders.vertex.key = { env = "MY_TOKEN" }\n'
        'providers.bedrock_mantle.key = { env = "NO_KEY" }\nproviders.foundry.key = { env = "MY_KEY" }\n'
    )
    given = {"MY_KEY": "canary-canary-1", "MY_TOKEN": "canary-canary-2", "AWS_REGION": "us-east-1"}
    shown = command(
        "agents", "models", "--json", **given, GOOGLE_CLOUD_PROJECT="mine", ANTHROPIC_FOUNDRY_RESOURCE="mine"
    )
    found = {entry["prefix"]: entry for entry in json.loads(shown.stdout)}

    assert "canary" not in shown.output
    assert ["https://mine.test", "https://other.test", "https://mine.services.ai.azure.com/anthropic"] == [
        found[name]["base_url"] for name in ("bedrock", "vertex", "foundry")
    ]
    assert (
        "cannot be used: MissingKey: there is no key for 'bedrock_mantle': set NO_KEY" in found["bedrock_mantle"]["key"]
    )


@pytest.mark.spec("requirements:X56", "interfaces:IF98")
def test_model_settings_apply_to_new_runs_only(scripted: Any, boss: None) -> None:
    user('models.helper = "set/helper"')
    asked = ["own/boss", "set/helper", "own/boss", "named/here"]

    assert asked == asks_for(scripted, "run", "boss", "go")
    user('models.helper = "set/other"')
    assert [] == asks_for(scripted, "replay", "--last")
    assert ["a/all"] * 3 == asks_for(scripted, "run", "boss", "go", "--model", "a/all")[:3]
