"""
Questions of a run, and who answers them: interactors of the engine and of the asking tool, and the cap on what waits.
"""

from __future__ import annotations

import pytest

from stepengine import AgentDefinition, Ask, Engine, Hooks, Parallel, RunStatus
from stepengine.data.hooks import HookContext
from stepengine.data.questions import Decision
from stepengine.errors import DefinitionError, PerformError
from stepengine.models import Timeouts
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools import ask_user_tool
from tests.engine.sums import add

pytestmark = pytest.mark.anyio


class Saying:
    """
    Gives the same answer to every question, and remembers them.
    """

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def ask(self, question):
        self.asked.append(question.text)
        return self.answer


class Later(Saying):
    async def ask(self, question):
        return super().ask(question)


def asking(**fields):
    questions = [{"question": "Which?", "options": ["red", "blue"]}, {"question": "Why?"}]
    return tool_call("ask_user", {"questions": questions}, **fields)


# --- who answers ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:K7", "requirements:K1")
@pytest.mark.parametrize("kind", [Saying, Later])
async def test_an_interactor_of_the_tool_answers_what_the_model_asks_with_it(kind):
    own = kind("red")
    agent = AgentDefinition("asker", model="scripted/model", tools=[ask_user_tool(own)])
    engine = Engine([agent], models=ScriptedModel([asking(), text("Red it is.")]))
    result = await engine.run(agent, "go")

    assert (RunStatus.COMPLETED, "Red it is.") == (result.status, result.output)
    assert ["Which?", "Why?"] == own.asked
    assert {"selected": ["red"], "question_index": 0} == result.tool_calls[0].result.data["answers"][0]


@pytest.mark.spec("requirements:K7")
async def test_an_interactor_of_the_tool_goes_before_the_engines_and_answers_nothing_else():
    def judge(ctx: HookContext, call):
        return Decision.ask("May it?") if call.tool_name == "add" else None

    own, engines = Saying("red"), Saying("yes")
    agent = AgentDefinition(
        "asker", model="scripted/model", tools=[ask_user_tool(own), "add"], hooks=Hooks(pre_tool=[judge])
    )
    replies = [asking(), tool_call("add", {"a": 1, "b": 2}), text("done")]
    engine = Engine([agent], [add], ScriptedModel(replies), interactor=engines)
    result = await engine.run(agent, "go", answers={"Why?": "so"})

    assert RunStatus.COMPLETED is result.status
    assert (["Which?"], ["May it?"]) == (own.asked, engines.asked)
    assert "so" == result.tool_calls[0].result.data["answers"][1]["text"]


class Async:
    async def ask(self, question):
        return None


class Tall:
    def ask(self, question, width):
        return "no"


@pytest.mark.spec("requirements:K7")
@pytest.mark.parametrize("wrong", ["x", 5, input, Saying, Tall(), {"ask": 1}])
@pytest.mark.parametrize("where", ["engine", "tool"])
def test_nobody_who_can_be_asked_is_refused_where_it_is_written(wrong, where):
    with pytest.raises(DefinitionError, match=r"interactor.* is an object with a method ask\(question\)"):
        Engine(interactor=wrong) if where == "engine" else ask_user_tool(wrong)

    assert isinstance(Engine(interactor=Async()), Engine)


# --- how many may wait ----------------------------------------------------------------------------------------------


def crowd(count):
    def handler(ctx):
        entries = yield from Parallel(*[Ask(f"Question {k}?") for k in range(count)])
        return [str(e) if isinstance(e, PerformError) else e for e in entries]

    return AgentDefinition("crowd", handle_steps=handler)


@pytest.mark.spec("reliability:R23")
async def test_at_most_a_hundred_questions_wait_for_an_answer():
    held = await Engine().run(crowd(100))
    assert (RunStatus.SUSPENDED, 100) == (held.status, len(held.pending_questions))

    more = await Engine().run(crowd(300))
    assert (RunStatus.SUSPENDED, 100) == (more.status, len(more.pending_questions))

    # An answer in process is waited for by nobody.
    told = await Engine(interactor=Later("yes")).run(crowd(300))
    assert ["yes"] * 300 == told.unwrap()
    answered = await Engine().run(crowd(150), answers={f"Question {k}?": "no" for k in range(150)})
    assert ["no"] * 150 == answered.unwrap()


@pytest.mark.spec("reliability:R23")
async def test_a_model_that_asks_too_much_at_once_is_told_and_goes_on():
    agent = AgentDefinition("asker", model="scripted/model", tools=[ask_user_tool()])
    many = {"questions": [{"question": f"{k}?"} for k in range(101)]}
    engine = Engine([agent], models=ScriptedModel([tool_call("ask_user", many), text("Never mind.")]))
    result = await engine.run(agent, "go")

    assert (RunStatus.COMPLETED, "Never mind.") == (result.status, result.output)
    assert "over the limit of 100" in result.tool_calls[0].result.text


@pytest.mark.spec("reliability:R23")
def test_a_connection_may_take_ten_seconds():
    assert 10 == Timeouts().connect
