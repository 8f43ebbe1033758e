"""
Questions of a run, and who answers them: interactors of the engine and of the asking tool, and the cap on what waits.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Answer,
    Ask,
    Cancel,
    Change,
    Engine,
    Hooks,
    Parallel,
    Perform,
    Race,
    RunStatus,
    Start,
    UserMessage,
    tool,
)
from stepengine.data.codec import from_json, to_json
from stepengine.data.definition import HookContext
from stepengine.data.messages import TextPart, ToolCallPart
from stepengine.data.models import ModelReply
from stepengine.data.questions import Decision
from stepengine.errors import AnswerRejected, BadYield, DefinitionError, PerformError
from stepengine.events import QuestionAsked
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import ask_user_tool, child_tools, spawn_tools
from tests.engine.sums import add
from tests.phrases import NO_OPTION


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


@pytest.mark.spec("requirements:K3")
async def test_interactor_of_a_tool_precedes_the_engines():
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


@pytest.mark.spec("requirements:K3")
@pytest.mark.parametrize("wrong", ["x", 5, input, Saying, Tall(), {"ask": 1}])
@pytest.mark.parametrize("where", ["engine", "tool"])
def test_unusable_interactor_is_refused_where_it_is_written(wrong, where):
    with pytest.raises(DefinitionError, match=r"interactor.* must be an object with a method ask\(question\)"):
        Engine(interactor=wrong) if where == "engine" else ask_user_tool(wrong)

    assert isinstance(Engine(interactor=Async()), Engine)


# --- what is an answer ----------------------------------------------------------------------------------------------


def choosing(**fields):
    def handler(ctx):
        return (yield from Ask("Which?", options=["red", "blue"], **fields))

    return AgentDefinition("chooser", handle_steps=handler)


class Fickle:
    """
    Gives one answer after the other.
    """

    def __init__(self, *answers):
        self.answers = list(answers)

    async def ask(self, question):
        return self.answers.pop(0)


@pytest.mark.spec("requirements:X54")
async def test_interactor_with_an_invalid_option_is_asked_three_more_times():
    wrong = ["green", Answer(selected=("green",)), Answer(selected=("red", "blue"))]
    for right in ("blue", Answer(declined=True)):
        result = await Engine(interactor=Fickle(*wrong, right)).run(choosing())
        assert (RunStatus.COMPLETED, right if right == "blue" else "") == (result.status, result.output)
    fickle = Fickle(*wrong, "", "blue")
    held = await Engine(interactor=fickle).run(choosing())

    assert (RunStatus.SUSPENDED, ["blue"]) == (held.status, fickle.answers)
    assert "green" == (await Engine(interactor=Fickle("green")).run(choosing(allow_text=True))).output


@pytest.mark.spec("requirements:X54")
@pytest.mark.parametrize("selected", [(), ("red",)])
@pytest.mark.parametrize("text", ["", "red", "red please"])
def test_declined_question_gives_the_handler_no_answer(selected, text):
    declined = Answer(selected=selected, text=text, declined=True)
    result = Engine(interactor=Saying(declined)).run_sync(choosing())

    assert (RunStatus.COMPLETED, "") == (result.status, result.output)


class Cancelled:
    """
    Awaits a task that somebody cancels.
    """

    async def ask(self, question):
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task


@pytest.mark.spec("reliability:SS12")
async def test_cancellation_inside_an_interactor_does_not_cancel_the_caller():
    held = await Engine(interactor=Cancelled()).run(choosing())

    assert (RunStatus.SUSPENDED, "Which?") == (held.status, held.pending_questions[0].text)


@pytest.mark.spec("requirements:X54")
async def test_invalid_answer_through_a_handle_can_be_corrected():
    async with Engine().start(choosing()) as handle:
        events = handle.events()
        async for event in events:
            if isinstance(event, QuestionAsked):
                break
        for wrong in ("green", True, Answer(selected=("red", "blue"))):
            with pytest.raises(AnswerRejected, match=r"'red', 'blue'|only one can be chosen"):
                handle.answer("q0", wrong)
        handle.answer("q0", "red")
        assert "red" == (await handle.result()).output


@pytest.mark.spec("requirements:X54")
async def test_invalid_answer_up_front_is_ignored_with_a_warning():
    held = await Engine().run(choosing(), answers={"Which?": "green"})
    assert RunStatus.SUSPENDED is held.status
    assert (f"the answer to 'q0' is 'green', which is {NO_OPTION}: 'red', 'blue'; it was not used",) == held.warnings

    clerk = Counted()
    state = (await clerk.engine(asking()).run("clerk", "Book.")).state
    with pytest.raises(AnswerRejected, match="selects"):
        await clerk.engine().run("clerk", previous=state, answers={state.pending[0].id: Answer(selected=("green",))})
    free = await clerk.engine(text("ok")).run("clerk", previous=state, answers={"Which?": "green", "Why?": "so"})
    assert {"question_index": 0, "text": "green"} == free.tool_calls[-1].result.data["answers"][0]


@pytest.mark.spec("requirements:X54", "requirements:K2")
async def test_several_options_may_be_given_as_one_text():
    for given in ("red, blue", "red,blue", Answer(selected=("red", "blue"))):
        assert "red, blue" == (await Engine().run(choosing(multi_select=True), answers={"q0": given})).output
    assert RunStatus.SUSPENDED is (await Engine().run(choosing(multi_select=True), answers={"q0": "red, x"})).status


@pytest.mark.spec("requirements:X54")
async def test_named_question_is_answered_by_its_name_at_any_place():
    def kid_steps(ctx):
        return (yield from Ask("Size?", key="size"))

    def handler(ctx):
        size, child = yield from Parallel(Ask("Size?", key="size"), AgentCall("kid"))
        return [size, child.output, (yield from Ask("More?"))]

    kid = AgentDefinition("kid", handle_steps=kid_steps)
    boss = AgentDefinition("boss", spawnable_agents=[kid], handle_steps=handler)
    journal = MemoryJournal()
    engine = Engine([boss])
    held = await engine.run("boss", journal=journal)
    assert {"size", "1:size"} == {q.id for q in held.pending_questions}
    result = await engine.resume(journal, answers={"size": "41", "1:size": "42"})
    assert ["q2"] == [q.id for q in result.pending_questions]
    assert ["41", "42", "no"] == (await engine.resume(journal, answers={"q2": "no"})).output
    assert "'size'" in journal.content().decode().replace('"', "'")


@pytest.mark.spec("requirements:X54")
@pytest.mark.parametrize("key", ["", "q3", "two words", "a.b", "a:b", "a=b", "doubt:#1", 5, "größe"])
def test_a_name_that_could_be_mistaken_is_refused(key):
    with pytest.raises(BadYield, match="the key of an Ask must be a name"):
        Ask("Which?", key=key)


@pytest.mark.spec("requirements:X54")
async def test_a_name_is_used_once_in_a_run():
    def handler(ctx):
        first = yield from Ask("Which?", key="which")
        try:
            yield from Ask("Which?", key="which")
        except BadYield as error:
            return f"{first}: {error.message}"

    result = await Engine().run(AgentDefinition("asker", handle_steps=handler), answers={"which": "red"})
    assert "red: the key 'which' names an earlier question of this run" in result.output


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
async def test_model_with_too_many_questions_gets_an_error_and_continues():
    agent = AgentDefinition("asker", model="scripted/model", tools=[ask_user_tool()])
    many = {"questions": [{"question": f"{k}?"} for k in range(101)]}
    engine = Engine([agent], models=ScriptedModel([tool_call("ask_user", many), text("Never mind.")]))
    result = await engine.run(agent, "go")

    assert (RunStatus.COMPLETED, "Never mind.") == (result.status, result.output)
    assert "over the limit of 100" in result.tool_calls[0].result.text


def waiting_for_nobody(way, asked):
    """
    Return an agent that asks a hundred and one questions and gives each of them up.
    """

    async def other():
        await asked.wait()
        asked.clear()

    def ask(ctx):
        return (yield from Ask("Which?"))

    child = AgentDefinition("child", handle_steps=ask)

    def handler(ctx):
        for _ in range(101):
            if way == "background":
                ref = yield from Start(AgentCall("child"))
                yield from Perform(other)
                yield from Cancel(ref)
            else:
                yield from Race(AgentCall("child") if way == "child" else Ask("Which?"), Perform(other))
        number, _ = yield from Race(Ask("Which?"), Perform(other))
        return number

    return AgentDefinition("lead", handle_steps=handler, spawnable_agents=[child])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("way", ["question", "child", "background"])
@pytest.mark.parametrize("journal", [None, MemoryJournal])
async def test_question_that_nobody_asks_any_more_does_not_count(way, journal):
    asked = asyncio.Event()
    agent = waiting_for_nobody(way, asked)
    async with Engine([agent], observers=[lambda e: asked.set() if isinstance(e, QuestionAsked) else None]) as engine:
        handle = engine.start("lead", journal=journal and journal())
        result = await asyncio.wait_for(handle.result(), 50)

    assert 1 == result.unwrap()


# --- answers to a stored state --------------------------------------------------------------------------------------


def stored(state):
    """
    Return a state as another process reads it.
    """
    return from_json(json.loads(json.dumps(to_json(state))))


class Counted:
    """
    A tool that counts its runs, an agent that has it and may ask, and engines for it.
    """

    def __init__(self, **fields):
        self.ran = []

        @tool(in_thread=False)
        def note(word: str) -> str:
            """Note a word."""
            self.ran.append(word)
            return f"noted {word}"

        tools = [ask_user_tool(), note]
        self.agent = AgentDefinition(
            "clerk", model="scripted/model", tools=tools, instructions_prompt="Help.", **fields
        )

    def engine(self, *replies, **options):
        self.model = ScriptedModel(list(replies))
        return Engine([self.agent], models=self.model, **options)


def ask(**question):
    return tool_call("ask_user", {"questions": [{"question": "For how many?", **question}]})


@pytest.mark.spec("requirements:X11")
@pytest.mark.parametrize("key", ["id", "text"])
async def test_stored_permission_is_granted_or_denied_for_its_own_call(key):
    def judge(ctx, call):
        return Decision.ask("May it?") if call.input["word"] != "free" else None

    @tool(in_thread=False, parallel_safe=True)
    def note(word: str) -> str:
        """Note a word."""
        ran.append(word)
        return word

    ran = []
    hooks = Hooks(pre_tool=[judge])
    agent = AgentDefinition("clerk", model="scripted/model", tools=[note], hooks=hooks)
    words = tool_calls(*[tool_call("note", {"word": word}) for word in ("free", "a", "b")])
    held = await Engine([agent], models=ScriptedModel([words])).run(agent, "go", session_id="s")
    first, second = held.state.pending
    answers = {first.id: "no", second.id: "yes"} if key == "id" else {"May it?": "yes"}
    model = ScriptedModel([text("done")])
    done = await Engine([agent], models=model).run(agent, previous=stored(held.state), answers=answers)

    assert (RunStatus.COMPLETED, "done") == (done.status, done.output)
    assert (["free", "b"] if key == "id" else ["free", "a", "b"]) == ran
    statuses = [m.status for m in model.calls[0].messages if m.role == "tool"]
    assert (["ok", "denied", "ok"] if key == "id" else ["ok"] * 3) == statuses


@pytest.mark.spec("requirements:X11")
@pytest.mark.parametrize("calls", [["end_turn"], ["start_agents", "end_turn"], []], ids=str)
async def test_step_ends_alike_with_an_early_or_late_answer(calls):
    def kid_steps(ctx):
        return "hi"
        yield

    def hint(ctx, reply):
        return Change(messages=[*ctx.state.message_history, UserMessage("hint", ttl="agent_step")])

    kid = AgentDefinition("kid", handle_steps=kid_steps)
    tools = [ask_user_tool(), "end_turn", *child_tools()]
    agent = AgentDefinition(
        "clerk",
        model="t/m",
        tools=tools,
        spawnable_agents=[kid],
        hooks=Hooks(post_step=[hint]),
        instructions_prompt="Help.",
    )
    inputs = {"end_turn": {"message": "Bye."}, "start_agents": {"agents": [{"agent_type": "kid"}]}}
    asked = ToolCallPart("", "ask_user", {"questions": [{"question": "Which?"}]})
    reply = ModelReply((TextPart("Let me ask."), asked, *[ToolCallPart("", name, inputs[name]) for name in calls]))

    async def ended(*, late):
        model = ScriptedModel([reply, text("done")])
        engine = Engine([agent], models=model)
        given = {"Which?": "red"}
        result = await engine.run(agent, "Book.", answers={} if late else given)
        if late:
            result = await engine.run(agent, previous=result.state, answers=given)
        seen = [m.text for call in model.calls for m in call.messages]
        return result.text, [m.role for m in result.state.message_history], result.warnings, "hint" in seen

    early = await ended(late=False)
    assert early == await ended(late=True)
    assert ("Bye." if calls == ["end_turn"] else "done", (), False) == (early[0], *early[2:])


@pytest.mark.spec("requirements:X11", "requirements:K3")
async def test_unanswered_question_stays_open_beside_an_answered_one():
    clerk = Counted()
    held = await clerk.engine(ask()).run("clerk", "Book.")
    again = await clerk.engine().run("clerk", previous=held.state)
    assert (RunStatus.SUSPENDED, "For how many?") == (again.status, again.pending_questions[0].text)
    assert again.state.message_history[:-1] == held.state.message_history[:-1]
    assert not clerk.model.calls

    # The new run counts its own questions; an id of the old one means nothing to it.
    key = again.state.pending[0].id
    more = [ask(question="When?"), text("never")]
    later = await clerk.engine(*more).run("clerk", previous=again.state, answers={key: "4"})
    assert (RunStatus.SUSPENDED, ["When?"]) == (later.status, [q.text for q in later.pending_questions])

    talked = await clerk.engine(text("Fine.")).run("clerk", "Never mind.", previous=held.state)
    assert (RunStatus.COMPLETED, "Fine.") == (talked.status, talked.output)
    assert ["pending"] == [m.status for m in clerk.model.calls[0].messages if m.role == "tool"]


@pytest.mark.spec("requirements:X11")
async def test_state_alone_cannot_continue_a_handler_or_an_asking_child():
    def handler(ctx):
        return (yield from Ask("For how many?"))

    asker = AgentDefinition("asker", handle_steps=handler)
    boss = AgentDefinition("boss", model="scripted/model", tools=spawn_tools(), spawnable_agents=[asker])
    spawning = ScriptedModel([tool_call("spawn_agents", {"agents": [{"agent_type": "asker"}]})])
    for agent, why in (
        (asker, "agent 'asker' has a handler"),
        (boss, "the question comes from a child or from a tool that yields"),
    ):
        engine = Engine([agent], models=spawning)
        held = await engine.run(agent, "go")
        for key in (held.state.pending[0].id, "For how many?"):
            with pytest.raises(AnswerRejected, match=why) as caught:
                await engine.run(agent, previous=held.state, answers={key: "4"})

        assert "journal=" in caught.value.message
        assert "save_state" in caught.value.message
    with pytest.raises(AnswerRejected, match="must be a string, a bool or an Answer, not 4"):
        await Counted().engine().run("clerk", previous=(await clerk_held()).state, answers={"For how many?": 4})


async def clerk_held():
    return await Counted().engine(ask()).run("clerk", "Book.")
