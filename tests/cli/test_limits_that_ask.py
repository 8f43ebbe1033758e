"""
Limits that ask for more, on the command line: what was typed and set, the question, its answer, and what it is refused with.
"""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path

import pytest

from stepengine.cli import bench
from stepengine.cli.screen.console import TerminalInteractor
from stepengine.data.ceilings import ceiling_from_answer, make_limit_question
from stepengine.data.questions import to_answer
from stepengine.errors import LimitExceeded
from stepengine.testing import ScriptedModel, text, tool_call
from tests.cli.command import command

AGENT = """
from stepengine import AgentDefinition, tool

@tool
def look(page: int) -> str:
    "Look at a page."
    return f"page {page}"

agent = AgentDefinition("looker", model="test/any", tools=[look])
"""
STEPS = ("--max-steps", "2", "--ask-for-more", "--journal", "run.jsonl")


@pytest.fixture(autouse=True)
def looker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An agent whose model looks at four pages, and no setting.
    """
    monkeypatch.chdir(tmp_path)
    Path("agents").mkdir()
    Path("agents/looker.py").write_text(AGENT)
    model = ScriptedModel([*[tool_call("look", {"page": page}) for page in range(4)], text("Seen.")])
    monkeypatch.setattr(bench, "make_model_registry", lambda *_: model)


@pytest.mark.spec("reliability:LA5", "reliability:LA6")
def test_run_asks_for_more_steps_and_resumes_with_a_number():
    waiting = command("run", "looker", "Go", *STEPS, code=3)
    wrong = command("resume", "run.jsonl", "--answer", "limit:steps:2=lots", code=2)
    done = command("resume", "run.jsonl", "--answer", "limit:steps:2=10", code=0)

    assert "used all of its 2 steps. Allow 2 more steps, 4 in all?" in waiting.stderr.replace("\n", " ")
    assert "a whole number from 1" in wrong.stderr.replace("\n", " ")
    assert "Seen." in done.stdout


@pytest.mark.spec("reliability:LA1", "reliability:LA6")
def test_declined_or_unanswered_limit_ends_the_run():
    def status(*arguments: str, code: int) -> str:
        return json.loads(command(*arguments, "--json", code=code).stdout)["status"]

    command("run", "looker", "Go", *STEPS, code=3)
    refused = status("resume", "run.jsonl", "--answer", "limit:steps:2=no", code=4)
    alone = status("run", "looker", "Go", "--max-steps", "1", "--ask-for-more", "--no-journal", code=4)

    assert "max_steps" == refused == alone


@pytest.mark.spec("reliability:LA6")
def test_limits_ask_is_a_user_setting_and_no_project_setting(monkeypatch):
    monkeypatch.setenv("STEPENGINE_LIMITS__ASK", "true")
    command("run", "looker", "Go", "--max-steps", "2", "--journal", "set.jsonl", code=3)
    monkeypatch.delenv("STEPENGINE_LIMITS__ASK")
    Path("stepengine.toml").write_text("limits.ask = true\n")
    refused = command("run", "looker", "Go", "--max-steps", "1", "--journal", "other.jsonl", code=4)

    assert "limits.ask may not be set by a project" in refused.stderr.replace("\n", " ")


@pytest.mark.spec("reliability:LA5")
@pytest.mark.parametrize("typed", ["2", "yes", "0.5"])
async def test_typed_number_is_the_amount_and_no_option_number(typed):
    shown = io.StringIO()
    question = make_limit_question(LimitExceeded("all is spent", kind="cost", limit=0.5, more=0.25))
    answer = await TerminalInteractor(input=io.StringIO(f"lots\n{typed}\n"), output=shown).ask(question)
    allowed = ceiling_from_answer(question, to_answer(answer, question))

    assert "0.75 in all" in shown.getvalue()
    assert "a number above 0" in shown.getvalue()
    assert {"2": Decimal("2.5"), "yes": Decimal("0.75"), "0.5": Decimal(1)}[typed] == allowed.most
