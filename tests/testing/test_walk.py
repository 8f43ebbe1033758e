"""
`Walk` steps a handler by hand, without an engine, and forks it by its history.
"""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime

import pydantic
import pytest

from stepengine import Engine, Tool
from stepengine.data.definition import AgentDefinition, InputSchema
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.models import ModelReply
from stepengine.data.questions import Answer
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.yields import (
    STEP,
    STEP_ALL,
    AgentCall,
    Ask,
    Complete,
    GenerateN,
    Parallel,
    Perform,
    Race,
    Sleep,
    StepResult,
    StepText,
    StepWith,
    ToolCall,
)
from stepengine.errors import (
    BadYield,
    ChildError,
    DataError,
    DefinitionError,
    LimitExceeded,
    LimitReached,
    PerformError,
    ReplayDivergence,
    ToolError,
)
from stepengine.testing import ScriptedModel, Walk, run_script, tool_call
from stepengine.testing.walk import HandlerNote, HandlerReturned, WalkStep


def planner(ctx):
    plan = yield from Complete(f"plan {ctx.prompt}")
    files = yield from ToolCall("list_files", {"path": "."})
    done = yield ToolCall("run_tests", {"files": files.data, "plan": plan.text})
    if done.tool_result.is_error:
        yield ToolCall("revert")
        return "reverted"
    yield STEP
    return "kept"


@pytest.mark.spec("requirements:P5")
def test_a_handler_can_be_stepped_by_hand_and_forked():
    walk = Walk(planner, "it").send("first a, then b").send(["a.py", "b.py"])

    tests_ok, tests_bad = walk.fork(), walk.fork()

    asked = ToolCall("run_tests", {"files": ["a.py", "b.py"], "plan": "first a, then b"})
    assert asked == walk.asked == tests_ok.asked
    assert STEP == tests_ok.send("passed").asked
    assert ToolCall("revert") == tests_bad.send(ToolResult.error("failed")).asked
    assert "reverted" == tests_bad.send("ok").returned
    assert HandlerReturned("reverted") == tests_bad.asked
    assert "kept" == tests_ok.send().returned
    assert (asked, False) == (walk.asked, walk.finished)
    assert [Complete("plan it"), ToolCall("list_files", {"path": "."}), asked, ToolCall("revert")] == [
        exchange.asked for exchange in tests_bad.history
    ]


def echo(*asked):
    """
    Return a handler that yields each of *asked* and returns the results it was sent.
    """

    def handler(ctx):
        got = []
        for one in asked:
            got.append((yield one))  # noqa: PERF401
        return got

    return handler


STATE = AgentState.from_messages([UserMessage("go")], agent_id="x")


def named(value):
    """
    Return an id that is the same in every process: addresses are not, and pytest-xdist compares what its workers collect.
    """
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def double(value):
    return 2 * value


MEMBERS = Parallel(ToolCall("t"), AgentCall("kid"), Perform(double, 2), Perform(double, 3), Ask("ok?", ("yes", "no")))
FAILED = PerformError("no", kind="ValueError")


@pytest.mark.spec("requirements:P5")
@pytest.mark.parametrize(
    ("asked", "short", "full"),
    [
        (ToolCall("t"), "text", StepResult(STATE, (ToolResult.text("text", tool_name="t"),))),
        (ToolCall("t"), {"a": [1]}, StepResult(STATE, (ToolResult.json({"a": [1]}, tool_name="t"),))),
        (ToolCall("t"), None, StepResult(STATE, (ToolResult.json(None, tool_name="t"),))),
        (ToolCall("t"), ToolResult.error("no"), StepResult(STATE, (ToolResult.error("no", tool_name="t"),))),
        (StepText("hm"), ["a", {"b": 1}], StepResult(STATE, (ToolResult.text("a"), ToolResult.json({"b": 1})))),
        (GenerateN(2), ["a", "b"], StepResult(STATE, n_responses=("a", "b"))),
        (Complete("q"), "a", StepResult(STATE, value=ModelReply("a"))),
        (AgentCall("kid"), {"n": 1}, StepResult(STATE, value=ChildResult(agent_id="kid", output={"n": 1}))),
        (AgentCall("kid"), "out", StepResult(STATE, value=ChildResult(agent_id="kid", output="out", text="out"))),
        (Perform(double, 2), {"n": (1,)}, StepResult(STATE, value={"n": [1]})),
        (Perform(double, 2), FAILED, StepResult(STATE, value=FAILED)),
        (Ask("ok?", ("yes", "no")), True, StepResult(STATE, value="yes")),
        (Ask("why?"), Answer(declined=True), StepResult(STATE, value="")),
        (
            MEMBERS,
            ["text", 7, 4, FAILED, "no"],
            StepResult(
                STATE,
                (ToolResult.text("text", tool_name="t"),),
                value=(ToolResult.text("text", tool_name="t"), ChildResult(agent_id="kid", output=7), 4, FAILED, "no"),
            ),
        ),
    ],
    ids=named,
)
def test_a_short_answer_means_the_full_step_result(asked, short, full):
    assert (
        [full]
        == Walk(echo(asked), state=STATE).send(short).returned
        == Walk(echo(asked), state=STATE).send(full).returned
    )


def test_a_step_accepts_words_of_the_model_or_a_state():
    walk = Walk(echo(STEP, STEP, STEP_ALL, StepWith(model="m")), state=STATE)
    later = AgentState(agent_id="later")

    first, second, third, fourth = (
        walk.send("done").send(ModelReply("cut", stop_reason="max_tokens")).send().send(later).returned
    )

    assert ("done", True, 1) == (
        first.text,
        first.steps_complete,
        first.agent_state.step_index,
    )
    assert (["user", "assistant", "assistant"], False) == (
        [m.role for m in second.agent_state.view],
        second.steps_complete,
    )
    assert (second.agent_state, True) == (third.agent_state, third.steps_complete)
    assert later is fourth.agent_state is walk.state


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (ToolCall("t"), ()),
        (AgentCall("kid"), ()),
        (Complete("q"), (3,)),
        (GenerateN(2), ("a",)),
        (GenerateN(2), ([1],)),
        (MEMBERS, (["one"],)),
        (STEP, (tool_call("t"),)),
        (STEP, ({"a": 1},)),
        (Perform(double, 2), ({1, 2},)),
        (Ask("ok?"), ()),
        (AgentCall("kid"), (ValueError("x"),)),
        (Parallel(Ask("ok?")), ([ValueError("x")],)),
    ],
    ids=named,
)
def test_invalid_answer_is_rejected_and_changes_nothing(asked, answer):
    walk = Walk(echo(asked))

    with pytest.raises(DataError):
        walk.send(*answer)

    assert (asked, ()) == (walk.asked, walk.history)


def test_yield_from_gives_values_and_raises_failures():
    def handler(ctx):
        value = yield from Perform(double, 1)
        try:
            yield from ToolCall("t")
        except ToolError as error:
            value = f"{value} {error.tool_name}"
        yield from AgentCall("kid")
        return value

    walk = Walk(handler).send(2).send(ToolResult.error("no"))
    with pytest.raises(ChildError):
        walk.send(ChildResult(agent_id="kid", status=RunStatus.FAILED))

    assert (True, None) == (walk.finished, walk.asked)
    with pytest.raises(AssertionError, match="it raised ChildError"):
        walk.returned
    with pytest.raises(AssertionError, match="there is no yield to send to"):
        walk.send("more")


@pytest.mark.spec("requirements:P5")
def test_a_thrown_error_arrives_at_the_yield_and_in_forks():
    def handler(ctx):
        try:
            yield STEP
        except LimitReached as reached:
            yield ToolCall("sorry", {"why": reached.error.kind})
        yield STEP

    spent = LimitReached(LimitExceeded("no more", kind="steps"))
    walk = Walk(handler).throw(spent)
    ended = walk.fork().send("ok")
    with pytest.raises(RuntimeError, match="boom"):
        ended.throw(RuntimeError("boom"))

    assert ToolCall("sorry", {"why": "steps"}) == walk.asked
    assert WalkStep(STEP, spent) == walk.history[0]
    assert (True, 3) == (ended.fork().finished, len(ended.fork().history))


def test_a_handler_with_hidden_inputs_cannot_be_forked():
    count = itertools.count()

    def handler(ctx):
        yield STEP
        yield ToolCall("t", {"n": next(count)})
        yield STEP

    walk = Walk(handler).send("hi")
    past = Walk(handler).send("hi").send("ok")

    with pytest.raises(ReplayDivergence) as caught:
        walk.fork()
    with pytest.raises(ReplayDivergence, match="after 1 answers"):
        past.fork()
    assert "after 1 answers it first asked ToolCall(" in caught.value.message
    assert f"({__file__}:{handler.__code__.co_firstlineno + 2})" in caught.value.message


class Burst(Exception):
    pass


def burst(*_):
    raise Burst("a pipe")


def leaky(ctx):
    found = yield from Parallel(ToolCall("look"), AgentCall("kid"), Perform(burst), Perform(double, 2))
    look, kid, performed, four = found
    try:
        kid.unwrap()
    except ChildError as error:
        raised = type(error.__cause__).__name__
    return [
        [look.is_error, "a pipe" in look.text],
        [kid.is_error, kid.status.value, kid.error.kind, kid.output, "a pipe" in kid.why, raised],
        [type(performed).__name__, performed.kind, "Perform(burst) raised Burst: a pipe" in performed.message],
        four,
    ]


@pytest.mark.spec("requirements:P5")
def test_an_exception_for_a_parallel_member_is_its_failure():
    kid = AgentDefinition("kid", model="test/model", handle_steps=lambda ctx: (burst(), (yield STEP))[1])
    look = Tool("look", "Look.", {}, burst)
    agent = AgentDefinition("leaky", tools=[look], spawnable_agents=[kid], handle_steps=leaky)
    with Engine([agent], models=ScriptedModel()) as engine:
        run = engine.run_sync("leaky")
    error = Burst("a pipe")
    walk = Walk(leaky).send([error, error, error, 4])

    assert RunStatus.COMPLETED is run.status
    assert [True, "failed", "Burst", None, True, "HandlerError"] == walk.returned[1]
    assert run.output == walk.returned == run_script(leaky, [(Parallel, [error, error, error, 4])])


def test_lambdas_created_again_do_not_prevent_a_fork():
    """
    The function of a `Perform` is compared by name and arguments.
    """

    def handler(ctx):
        one = yield from Perform(lambda n: n, 1)
        yield Parallel(Perform(lambda n: n, one), AgentCall(AgentDefinition("kid", handle_steps=lambda_steps())))

    assert 2 == len(Walk(handler).send(5).fork().asked.calls)


def lambda_steps():
    def steps(ctx):
        yield STEP

    return steps


class Params(pydantic.BaseModel):
    depth: int = 1


def test_the_context_of_a_walk_is_complete_and_deterministic():
    def handler(ctx):
        ctx.logger.warning("looking", depth=ctx.params.depth)
        ctx.notify("hello", {"n": 1})
        first = (ctx.prompt, ctx.model, ctx.agent_state, ctx.now(), ctx.random.random())
        yield STEP
        return first, ctx.now()

    agent = AgentDefinition("x", model="p/m", input_schema=InputSchema(params=Params), handle_steps=handler)
    walk = Walk(agent, "go", {"depth": 3}, STATE, seed=4, now=datetime(2030, 5, 1, tzinfo=UTC), tick_ms=1500)
    first, then = walk.send().returned

    assert ("go", "p/m", STATE, datetime(2030, 5, 1, tzinfo=UTC)) == first[:4]
    assert datetime(2030, 5, 1, 0, 0, 1, 500_000, tzinfo=UTC) == then
    assert [HandlerNote("warning", "looking", {"depth": 3}), HandlerNote("notify", "hello", {"n": 1})] == walk.notes
    assert walk.fork().returned == (first, then)
    assert ({}, {"a": 1}) == tuple(Walk(params_of, params=p).send().returned for p in (None, {"a": 1}))


def params_of(ctx):
    yield STEP
    return ctx.params


def test_a_foreign_yield_is_thrown_back_at_the_handler():
    def careless(ctx):
        yield STEP
        yield "STEP"

    def careful(ctx):
        try:
            yield 3
        except BadYield:
            yield STEP

    walk = Walk(careless)
    with pytest.raises(BadYield, match="Yield the sentinel") as caught:
        walk.send()

    assert f"{__file__}:{careless.__code__.co_firstlineno + 2}" == caught.value.location
    assert STEP is Walk(careful).asked


async def not_a_generator(ctx):
    pass


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (not_a_generator, "is async"),
        (AgentDefinition("plain"), "has no handle_steps to walk"),
        (double, "is not a generator function"),
        ("tidy", r"Walk takes a handler or an AgentDefinition, not 'tidy'; load_agent\(id\) returns the agent"),
    ],
)
def test_only_handlers_can_be_walked(handler, said):
    with pytest.raises(DefinitionError, match=said):
        Walk(handler)


def test_lambdas_in_a_race_do_not_prevent_a_fork():
    def handler(ctx):
        one = yield from Perform(lambda n: n, 1)
        return (yield from Race(Perform(lambda n: n, one), Sleep(1)))

    assert 2 == len(Walk(handler).send(5).fork().asked.members)
