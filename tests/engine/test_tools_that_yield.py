"""Tools that yield: a body is a run without a model, at a path of its own below the call."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import anyio.lowlevel
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Change,
    Complete,
    Depends,
    Engine,
    GenerateN,
    Hooks,
    Limits,
    Parallel,
    Perform,
    RunStatus,
    StepContext,
    Steps,
    StepText,
    ToolCall,
    ToolContext,
    ToolResult,
    Usage,
    call,
    tool,
)
from stepengine.data.json import JsonDict
from stepengine.data.tools import ToolSpec
from stepengine.engine.handler_sources import SourceWarning
from stepengine.errors import BadYield, DefinitionError, ReplayDivergence, ToolError
from stepengine.events import ToolFinished, ToolStarted
from stepengine.permissions import Policy, PolicyFile, Request, Rule
from stepengine.testing import Clock, ScriptedModel, Walk, run_script, simulate, text, tool_call, tool_calls
from stepengine.tools.bundled import agent_tool, control_tools, file_tools, spawn_tools


class Ledger:
    """What really happened outside, counted."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()

    def tool(self) -> Any:
        @tool
        def note(what: str) -> str:
            """Note something."""
            self.done[what] += 1
            return f"noted {what}"

        return note


def boss(*tools: Any, handler: Any = None, **fields: Any) -> AgentDefinition[Any]:
    return AgentDefinition("boss", model="test/m", tools=list(tools), handle_steps=handler, **fields)


def engine(agent: AgentDefinition[Any], *replies: Any, **options: Any) -> Engine:
    return Engine([agent], models=ScriptedModel([*replies, text("end")]), **options)


def results(ran: Any) -> list[str]:
    return [one.result.text for one in ran.tool_calls]


async def called(made: Any, *more: Any, given: Any = None, **fields: Any) -> Any:
    """Return the run of an agent whose model calls *made* once."""
    agent = boss(made, *more, **fields)
    return await engine(agent, tool_call(made, given or {})).run(agent, "go")


# --- what is refused where it is written ------------------------------------------------------------------------------


def plain(a: int) -> Steps[int]:
    """Add one."""
    yield Perform(int)
    return a + 1


@pytest.mark.spec("programs:PG1")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"idempotent": True, "retries": 1}, "retries= has no effect; remove it"),
        ({"idempotent": True}, "idempotent= has no effect; remove it"),
        ({"in_thread": False}, "in_thread= has no effect; remove it"),
        ({"deferred": True}, "deferred= has no effect; remove it"),
    ],
)
def test_option_useless_for_a_yielding_tool_is_refused_with_remedy(options: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        tool(**options)(plain)


def a_number() -> int:
    return 1


def needing(n: Annotated[int, Depends(a_number)]) -> Steps[int]:
    yield Perform(int)
    return n


def with_tool_context(ctx: ToolContext, a: int) -> Steps[int]:
    yield Perform(int)
    return a


def plain_with_step_context(ctx: StepContext, a: int) -> int:
    return a


def late(a: int, ctx: StepContext) -> Steps[int]:
    yield Perform(int)
    return a


async def asynchronous(a: int) -> Any:
    yield a


@pytest.mark.spec("programs:PG1")
@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (needing, "is a dependency"),
        (with_tool_context, "use a StepContext, or no context"),
        (plain_with_step_context, "does not yield; use a ToolContext"),
        (late, "make it the first parameter"),
        (asynchronous, "is an async generator"),
    ],
)
def test_invalid_signature_of_a_yielding_tool_is_refused_with_line(fn: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said) as caught:
        tool(fn)
    assert f"{__file__}:" in caught.value.message


@pytest.mark.spec("programs:PG4")
def test_unknown_name_in_uses_is_refused_at_engine_construction() -> None:
    made = tool(uses=["no_such_tool"])(plain)
    with pytest.raises(DefinitionError, match="'no_such_tool', but no tool or agent has that name"):
        Engine([boss(made)])


@pytest.mark.spec("programs:PG4")
def test_equal_tool_names_are_reported_when_one_is_carried() -> None:
    one, other = Ledger().tool(), Ledger().tool()
    with pytest.raises(DefinitionError, match="uses a tool 'note', and the agent has another"):
        Engine([boss(tool(uses=[one])(plain), other)])


@pytest.mark.spec("programs:PG4")
def test_only_a_tool_that_yields_carries_others() -> None:
    with pytest.raises(DefinitionError, match="remove uses=, or make it a generator function"):
        tool(uses=[Ledger().tool()], name="x")(lambda: "x")


# --- what a body does --------------------------------------------------------------------------------------------------

WRITER = AgentDefinition("writer", model="test/w", description="Writes notes.")


def releasing(ledger: Ledger) -> Any:
    @tool(uses=[ledger.tool(), WRITER])
    def release(version: str) -> Steps[str]:
        """Release a version."""
        tested = yield from call(note, what="tests")
        answer = yield from Ask(f"Release {version}?", key="sure", options=("yes", "no"))
        if answer == "no":
            raise ToolError(f"{version} is not to be released")
        notes = yield from AgentCall("writer", f"Notes for {version}")
        both = yield from Parallel(ToolCall("note", {"what": "upload"}), ToolCall("note", {"what": "tag"}))
        return f"{tested}; {notes}; {[one.text for one in both]}"

    note = release.binding().runs.uses[0]
    return release


def script(version: str = "1.0") -> list[Any]:
    return [tool_call("release", {"version": version}), text("what is new"), text("released")]


@pytest.mark.spec("programs:PG1", "programs:PG2", "programs:PG4", "programs:PG5")
async def test_tool_asks_a_user_across_processes_without_repeating_effects(tmp_path: Path) -> None:
    ledger, path = Ledger(), tmp_path / "run.jsonl"
    agent = boss(releasing(ledger))
    models = ScriptedModel(script())
    first = await Engine([agent], models=models).run(agent, "go", journal=path)
    assert first.status is RunStatus.SUSPENDED
    (question,) = first.pending_questions
    assert (question.id, question.path) == ("1:sure", "1")
    assert first.tool_calls[0].result.status == "pending"
    done = await Engine([agent], models=models).resume(path, answers={"1:sure": "yes"})
    assert done.status is RunStatus.COMPLETED
    assert results(done) == ["noted tests; what is new; ['noted upload', 'noted tag']"]
    assert ledger.done == {"tests": 1, "upload": 1, "tag": 1}
    assert [child.agent_id for child in done.children] == ["writer"]
    assert done.usage.requests == 3
    assert await Engine([agent], models=ScriptedModel([])).replay(path) == done
    assert ledger.done.total() == 3


@pytest.mark.spec("programs:PG1")
async def test_exception_of_a_yielding_tool_is_an_ordinary_error_result(tmp_path: Path) -> None:
    agent = boss(releasing(Ledger()))
    answered = {"Release 1.0?": "no"}
    ran = await engine(agent, script()[0]).run(agent, "go", answers=answered, journal=tmp_path / "run.jsonl")
    assert results(ran) == ["1.0 is not to be released"]
    assert ran.tool_calls[0].is_error

    @tool
    def broken() -> Steps[str]:
        """Break."""
        yield Perform(int)
        raise KeyError("x")

    assert results(await called(broken)) == ["KeyError: 'x'"]


@tool
def wrong() -> Steps[Any]:
    """Yield what the test says."""
    yield WRONG[0]
    return "went on"


WRONG: list[Any] = []
LINE = f"{__file__}:{wrong.fn.__code__.co_firstlineno + 3}"


@pytest.mark.spec("programs:PG1")
@pytest.mark.parametrize(
    "asked",
    [
        STEP,
        StepText("hello"),
        GenerateN(2),
        ToolCall("end_turn"),
        ToolCall("set_messages", {"messages": []}),
        ToolCall("add_message", {"role": "user", "content": "x"}),
        ToolCall("spawn_agent_inline", {"agent_type": "writer"}),
        ToolCall("leaving"),
        "no yieldable",
    ],
    ids=str,
)
async def test_conversation_effect_in_a_tool_is_refused_at_its_line(asked: Any) -> None:
    @tool(ends_turn=True)
    def leaving() -> str:
        """Leave."""
        return "left"

    WRONG[:] = [asked]
    tools = (*control_tools(), *spawn_tools(), leaving)
    ran = await called(wrong, *tools, spawnable_agents=[WRITER])
    (result,) = [one.result for one in ran.tool_calls]
    assert result.is_error
    assert result.text.startswith("BadYield: the tool 'wrong'")
    assert f"({Path(LINE).name})" in result.text


@pytest.mark.spec("programs:PG1", "programs:PG5")
async def test_output_todos_context_and_credits_belong_to_the_tools_caller() -> None:
    @tool
    def paid(n: int) -> ToolResult:
        """Cost something."""
        return ToolResult.text("ok", credits_used=n, change=Change(context={"last": n, f"n{n}": True}))

    @tool(uses=[paid])
    def work() -> Steps[str]:
        """Work."""
        yield ToolCall("write_todos", {"todos": [{"task": "one", "completed": True}]})
        yield Parallel(ToolCall("paid", {"n": 2}), ToolCall("paid", {"n": 3}))
        yield ToolCall("set_output", {"data": "set inside"})
        return "worked"

    agent = boss(work, "set_output", output_mode="structured_output")
    ran = await engine(agent, tool_call(work)).run(agent, "go")
    assert ran.output == "set inside"
    assert ran.credits_used == 5
    assert ran.state.context["last"] == 3
    assert ran.state.context["n2"] is True
    assert ran.state.context["todos"][0]["task"] == "one"


@pytest.mark.spec("programs:PG3")
async def test_hooks_see_the_call_and_each_nested_call_once() -> None:
    seen: list[Any] = []
    ledger = Ledger()

    def pre(ctx: Any, asked: Any) -> None:
        seen.append((ctx.path, ctx.source, asked.tool_name))

    def post(ctx: Any, asked: Any, result: Any) -> None:
        seen.append((ctx.path, ctx.source, result.text[:7]))

    def opening(ctx: Any) -> None:
        seen.append("run")

    hooks = Hooks(pre_tool=[pre], post_tool=[post], pre_run=[opening])

    @tool(uses=[ledger.tool()])
    def outer() -> Steps[str]:
        """Note twice."""
        yield ToolCall("note", {"what": "a"})
        yield ToolCall("note", {"what": "b"})
        return "outcome"

    await called(outer, hooks=hooks)
    assert seen == [
        "run",
        ("", "model", "outer"),
        ("1", "tool", "note"),
        ("1", "tool", "noted a"),
        ("1", "tool", "note"),
        ("1", "tool", "noted b"),
        ("", "model", "outcome"),
    ]


@pytest.mark.spec("programs:PG3")
@pytest.mark.parametrize(("source", "ran"), [("model", True), ("tool", False), (None, False)])
async def test_a_rule_is_about_the_calls_of_its_source(source: str | None, ran: bool) -> None:
    ledger = Ledger()

    @tool(uses=[ledger.tool()])
    def outer() -> Steps[str]:
        """Note."""
        answer = yield ToolCall("note", {"what": "a"})
        return answer.tool_result.text

    agent = boss(outer)
    policy = Policy([Rule.deny_tool("note", source=source), Rule.allow_tool("*")])
    await engine(agent, tool_call(outer), permissions=policy).run(agent, "go")
    assert bool(ledger.done) == ran
    assert Policy.from_json(policy.to_json()) == policy


def test_allow_rule_with_a_source_ignores_calls_of_unknown_source() -> None:
    asked = Request(tool=ToolSpec("note"), input=JsonDict())
    made = [
        Policy([getattr(Rule, name)("note", source="tool")]) for name in ("allow_tool", "deny_tool", "ask_for_tool")
    ]
    assert [policy.check(asked).decision for policy in made] == ["ask", "deny", "ask"]
    assert [policy.rules[0].covers_scope_and_source(asked) for policy in made] == [False, True, True]


@pytest.mark.spec("programs:PG3")
async def test_a_hook_cannot_call_a_tool_that_yields() -> None:
    said: list[BaseException] = []

    def asking(ctx: Any, asked: Any) -> Any:
        try:
            yield ToolCall("plain", {"a": 1})
        except Exception as error:
            said.append(error)

    made = tool(plain)
    await called(made, given={"a": 1}, hooks=Hooks(pre_tool=[asking]))
    assert "not available" in str(said[0])


@pytest.mark.spec("programs:PG3")
async def test_two_bodies_may_name_their_questions_alike(tmp_path: Path) -> None:
    @tool(parallel_safe=True)
    def sure(n: int) -> Steps[str]:
        """Ask."""
        return (yield from Ask(f"Sure {n}?", key="sure"))

    agent = boss(sure)
    made = engine(agent, tool_calls(tool_call(sure, {"n": 1}), tool_call(sure, {"n": 2})))
    ran = await made.run(agent, "go", journal=tmp_path / "run.jsonl")
    assert [q.id for q in ran.pending_questions] == ["1:sure", "2:sure"]
    done = await made.resume(tmp_path / "run.jsonl", answers={"1:sure": "a", "2:sure": "b"})
    assert results(done) == ["a", "b"]


@pytest.mark.spec("programs:PG2")
async def test_parallel_members_continue_while_one_waits_for_an_answer(tmp_path: Path) -> None:
    ledger = Ledger()

    @tool(uses=[ledger.tool()])
    def member(n: int) -> Steps[str]:
        """Note, and ask in the middle."""
        yield from call(note, what=f"{n} before")
        if n == 1:
            yield from Ask("Go on?")
        yield from call(note, what=f"{n} after")
        return str(n)

    note = member.binding().runs.uses[0]

    def handler(ctx: Any) -> Any:
        answer = yield Parallel(*[ToolCall("member", {"n": n}) for n in range(3)])
        return [one.text for one in answer.value]

    agent = boss(member, handler=handler)
    made = engine(agent)
    ran = await made.run(agent, "go", journal=tmp_path / "run.jsonl")
    assert ran.status is RunStatus.SUSPENDED
    assert ledger.done == {f"{n} before": 1 for n in range(3)} | {"0 after": 1, "2 after": 1}
    done = await made.resume(tmp_path / "run.jsonl", answers={"Go on?": "yes"})
    assert done.output == ["0", "1", "2"]
    assert set(ledger.done.values()) == {1}
    assert await made.replay(tmp_path / "run.jsonl") == done


@pytest.mark.spec("programs:PG2")
async def test_self_calling_tool_is_refused_at_the_depth_limit() -> None:
    @tool
    def again(n: int) -> Steps[str]:
        """Call itself."""
        answer = yield ToolCall("again", {"n": n + 1})
        return f"{n}: {answer.tool_result.text}"

    ran = await called(again, given={"n": 1}, limits=Limits(max_depth=3))
    (result,) = results(ran)
    assert "max_depth is 3" in result
    assert ran.status is RunStatus.COMPLETED


@pytest.mark.spec("programs:PG3")
async def test_children_of_a_models_tool_are_limited_like_the_models() -> None:
    @tool(uses=[WRITER])
    def many() -> Steps[Any]:
        """Start children."""
        answer = yield Parallel(*[AgentCall("writer", str(n)) for n in range(4)])
        return [one.status.value for one in answer.value]

    agent = boss(many, limits=Limits(max_children=3))
    models = ScriptedModel(
        lambda request: tool_call(many) if len(request.messages) == 1 and request.model == "test/m" else text("x")
    )
    ran = await Engine([agent], models=models).run(agent, "go")
    assert json.loads(results(ran)[0]) == ["completed"] * 3 + ["failed"]


@pytest.mark.spec("programs:PG4")
async def test_tool_cannot_run_an_agent_that_no_tool_carries() -> None:
    stranger = AgentDefinition("stranger", model="test/m")

    @tool
    def bold() -> Steps[str]:
        """Start somebody else's."""
        return (yield from AgentCall(stranger, "x"))

    ran = await called(bold)
    assert "list it in uses=[...] of the tool 'bold'" in results(ran)[0]


@tool
def settle(order: str) -> str:
    """Settle an order."""
    return order


@pytest.mark.spec("programs:PG4")
@pytest.mark.parametrize("has_it", [False, True], ids=["nobody", "the engine"])
async def test_call_of_an_uncarried_tool_is_refused_with_uses_hint(has_it: bool) -> None:
    @tool
    def forgetful() -> Steps[str]:
        """Call what nobody gave it."""
        return (yield from call(settle, "a"))

    agent = boss(forgetful)
    models = ScriptedModel([tool_call(forgetful), text("ok")])
    with pytest.warns(SourceWarning, match="List it in uses=.* of the tool 'forgetful'"):
        ran = await Engine([agent], [settle] if has_it else [], models).run(agent, "go")
    assert "List it in uses=[...] of the tool 'forgetful'." in results(ran)[0]


@pytest.mark.spec("programs:PG2")
async def test_random_and_time_of_a_tool_are_replayable(tmp_path: Path) -> None:
    @tool
    def draw(ctx: StepContext) -> Steps[str]:
        """Draw."""
        yield Perform(int)
        return f"{ctx.random.random()} {ctx.now().isoformat()} {ctx.agent_state.agent_id}"

    agent = boss(draw)
    unrecorded = results(await engine(agent, tool_call(draw), tool_call(draw)).run(agent, "go"))
    assert unrecorded[0].split()[0] != unrecorded[1].split()[0]
    path = tmp_path / "run.jsonl"
    ran = await engine(agent, tool_call(draw), tool_call(draw)).run(agent, "go", journal=path)
    first, second = results(ran)
    assert first.split()[0] != second.split()[0]
    assert first.endswith("boss")
    assert await engine(agent).replay(path) == ran


@pytest.mark.spec("programs:PG8")
async def test_tool_timeout_counts_work_but_not_waits_for_people(tmp_path: Path) -> None:
    clock = Clock()

    @tool(timeout=1.0)
    def slow(asks: bool) -> Steps[str]:
        """Take long."""
        if asks:
            yield from Ask("Well?")
        else:
            yield from Perform(pause)
        yield from Perform(int)
        return "in time"

    def pause() -> None:
        clock.advance(seconds=5)

    class Slowly:
        def ask(self, question: Any) -> str:
            clock.advance(hours=1)
            return "yes"

    agent = boss(slow)
    path = tmp_path / "run.jsonl"
    replies = tool_call(slow, {"asks": True}), tool_call(slow, {"asks": False})
    made = engine(agent, *replies, clock=clock, interactor=Slowly())
    ran = await made.run(agent, "go", journal=path)
    assert results(ran) == ["in time", "tool 'slow' timed out after 1 s of work"]
    assert await made.replay(path) == ran


@pytest.mark.spec("programs:PG8")
async def test_time_limit_of_a_tool_changes_no_suspension(tmp_path: Path) -> None:
    def noting(ctx: Any, asked: Any, result: ToolResult) -> Any:
        yield from Perform(int)

    async def ended(**options: Any) -> list[Any]:
        note = Ledger().tool()

        @tool(uses=[note], **options)
        def work() -> Steps[str]:
            """Note something and ask."""
            _, said = yield from Parallel(ToolCall("note", {"what": "a"}), Ask("Which?"))
            return said

        agent, path = boss(work), tmp_path / f"{len(options)}.jsonl"
        async with engine(agent, tool_call(work), hooks=Hooks(post_tool=noting)) as made:
            asked = await made.run(agent, "go", journal=path)
            (question,) = asked.pending_questions
            done = await made.resume(path, answers={question.id: "this"})
        return [(one.status, one.text, results(one), one.warnings) for one in (asked, done)]

    assert await ended() == await ended(timeout=60.0)


@pytest.mark.spec("programs:PG1")
async def test_tool_that_ignores_closing_or_returns_no_json_still_ends() -> None:
    @tool
    def no_json() -> Steps[Any]:
        """Give what is not JSON."""
        yield Perform(int)
        return object()

    assert "not serialisable" in results(await called(no_json))[0]

    @tool
    def stubborn() -> Steps[str]:
        """Go on for ever."""
        while True:
            try:
                yield Perform(int)
            except GeneratorExit:
                yield Perform(int)
                return "no"
            except BaseException:
                continue

    ran = await called(stubborn, limits=Limits(max_actions=5))
    assert (RunStatus.COMPLETED, ["null"]) == (ran.status, results(ran))
    limit, closed = ran.warnings
    assert "continued after its limit was spent, and was closed" in limit
    assert "yielded while it was closed" in closed


@pytest.mark.spec("programs:PG5")
async def test_spending_of_a_stopped_tool_counts(tmp_path: Path) -> None:
    @tool
    def thinking() -> Steps[str]:
        """Ask a model, then a person."""
        said = yield from Complete("think")
        yield from Ask("So?")
        return said

    agent = boss(thinking)
    models = ScriptedModel(
        [tool_call(thinking, usage=Usage(1)), text("hm", usage=Usage(10)), text("end", usage=Usage(100))]
    )
    ran = await Engine([agent], models=models).run(agent, "go", journal=tmp_path / "run.jsonl")
    assert ran.status is RunStatus.SUSPENDED
    assert ran.usage.input_tokens == 11
    done = await Engine([agent], models=models).resume(tmp_path / "run.jsonl", answers={"So?": "yes"})
    assert done.usage.input_tokens == 111


@pytest.mark.spec("programs:PG2")
async def test_an_altered_body_is_noticed_when_its_run_is_replayed(tmp_path: Path) -> None:
    def made(end: str) -> Any:
        @tool
        def work() -> Steps[str]:
            """Work."""
            yield Perform(int)
            return end

        return boss(work)

    path = tmp_path / "run.jsonl"
    agent = made("one")
    await engine(agent, tool_call("work")).run(agent, "go", journal=path)
    other = made("two")
    with pytest.raises(ReplayDivergence, match="has a different result than the recorded one"):
        await Engine([other], models=ScriptedModel([])).replay(path)


@pytest.mark.spec("programs:PG7")
def test_a_body_is_walked_and_rehearsed_as_a_handler_is() -> None:
    release = releasing(Ledger())
    walk = Walk(release, params={"version": "2.0"})
    assert walk.asked == ToolCall("note", {"what": "tests"})
    walk.send("fine").send("yes").send("the notes").send(["up", "tagged"])
    assert walk.returned == "fine; the notes; ['up', 'tagged']"
    returned = run_script(
        release,
        [
            (ToolCall, "fine"),
            (Ask, "yes"),
            (AgentCall, "the notes"),
            (Parallel, ["up", "tagged"]),
        ],
        params={"version": "2.0"},
    )
    assert returned == walk.returned
    WRONG[:] = [STEP]
    with pytest.raises(BadYield, match="it may yield ToolCall"):
        Walk(wrong)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG7")
def test_yielding_tool_is_simulated_with_crashes_inside() -> None:
    agent = boss(releasing(Ledger()))
    seen = simulate(agent, range(20), replies=[tool_call("release", {"version": "1.0"})])
    assert seen.runs == 20
    assert {"crash", "crash_inside", "crash_after", "suspend"} <= {kind for kind, times in seen.faults.items() if times}


# --- what bodies and the rest of the engine know of each other ---------------------------------------------------------


@pytest.mark.spec("programs:PG4", "programs:PG5")
@pytest.mark.parametrize("by_model", [True, False])
async def test_a_body_calls_a_tool_that_carries_an_agent(by_model: bool) -> None:
    @tool(uses=[agent_tool(WRITER)])
    def work() -> Steps[str]:
        """Let the writer write."""
        answer = yield ToolCall("writer", {"prompt": "x"})
        return answer.tool_result.text

    def handler(ctx: Any) -> Any:
        yield ToolCall("work")

    agent = boss(work, handler=None if by_model else handler)
    asked = [tool_call(work)] if by_model else []
    ran = await engine(agent, *asked, text("the notes")).run(agent, "go")
    assert results(ran) == ["the notes"]
    assert [child.agent_id for child in ran.children] == ["writer"]


@pytest.mark.spec("programs:PG4")
async def test_yielding_tool_calls_tools_listed_at_run_start(tmp_path: Path) -> None:
    ledger = Ledger()
    found = ledger.tool()

    @tool
    def inner() -> Steps[str]:
        """Note."""
        answer = yield ToolCall("note", {"what": "inner"})
        return answer.tool_result.text

    @tool
    def outer() -> Steps[list[str]]:
        """Note, and let another one note."""
        one = yield ToolCall("note", {"what": "outer"})
        other = yield ToolCall("inner")
        return [one.tool_result.text, other.tool_result.text]

    agent = boss(inner, outer, hooks=Hooks(pre_run=[lambda ctx: Change(tools=(found,))]))
    made = engine(agent, tool_call(outer))
    ran = await made.run(agent, "go", journal=tmp_path / "run.jsonl")
    assert json.loads(results(ran)[0]) == ["noted outer", "noted inner"]
    assert await made.replay(tmp_path / "run.jsonl") == ran


@pytest.mark.spec("programs:PG4")
async def test_inheriting_child_gets_the_models_tools_and_no_carried_ones() -> None:
    seen: list[list[str]] = []
    child = AgentDefinition("child", model="test/m", inherit_parent_system_prompt=True)

    @tool(uses=[child, Ledger().tool()])
    def work() -> Steps[str]:
        """Work."""
        return (yield from AgentCall("child", "x"))

    def model(request: Any) -> Any:
        seen.append([spec.name for spec in request.tools])
        return tool_call(work) if len(seen) == 1 else text("done")

    agent = boss(work, system_prompt="As one.")
    await Engine([agent], models=ScriptedModel(model)).run(agent, "go")
    assert seen == [["work"]] * 3


@pytest.mark.spec("requirements:X70", "programs:PG4")
@pytest.mark.parametrize("given_to", ["agent", "engine"])
def test_carried_tool_that_could_write_the_policy_file_is_refused(tmp_path: Path, given_to: str) -> None:
    Policy([Rule.allow_tool("*")]).save(tmp_path / "rules.json")
    inner = tool(uses=file_tools(tmp_path, write=True), name="inner")(plain)
    tools = [tool(uses=[inner], name="outer")(plain)]
    with pytest.raises(DefinitionError, match="model could change its own permissions"):
        Engine(
            [boss(*tools if given_to == "agent" else [])],
            tools=tools if given_to == "engine" else [],
            permissions=PolicyFile(tmp_path / "rules.json"),
        )


@pytest.mark.spec("programs:PG2")
@pytest.mark.parametrize("most", [1, 3])
async def test_bodies_take_the_room_of_calls(most: int) -> None:
    under_way: Counter[str] = Counter()
    seen: list[int] = []

    async def pause() -> None:
        under_way["now"] += 1
        seen.append(under_way["now"])
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        under_way["now"] -= 1

    @tool(parallel_safe=True)
    def work(n: int) -> Steps[int]:
        """Take a while."""
        yield from Perform(pause)
        return n

    @tool(parallel_safe=True)
    async def simple(n: int) -> int:
        """Take a while."""
        await pause()
        return n

    agent = boss(work, simple, limits=Limits(max_concurrent_tools=most))
    calls = [tool_call(work if n < 5 else simple, {"n": n}) for n in range(8)]
    ran = await engine(agent, tool_calls(*calls)).run(agent, "go")
    assert results(ran) == [str(n) for n in range(8)]
    assert max(seen) == most


@pytest.mark.spec("programs:PG2")
async def test_fork_continues_live_after_a_tool_with_changed_result(tmp_path: Path) -> None:
    def made(end: str) -> Any:
        @tool
        def work() -> Steps[str]:
            """Work."""
            yield Perform(int)
            return end

        return boss(work)

    path = tmp_path / "run.jsonl"
    await engine(made("one"), tool_call("work"), text("of one")).run(made("one"), "go", journal=path)
    same = await engine(made("one")).fork(path, tools="recorded", agent=made("one"))
    assert (same.broke_at, same.result.text) == ("", "of one")
    other = made("two")
    again = await engine(other, text("of two")).fork(path, tools="recorded", agent=other)
    assert (again.broke_at, again.result.text, results(again.result)) == ("#2", "of two", ["two"])


@pytest.mark.spec("programs:PG3")
async def test_nested_effects_appear_between_start_and_end_of_a_call(tmp_path: Path) -> None:
    agent = boss(releasing(Ledger()))
    # Closed: a tool's idle thread lives for about as long as the check for leaks waits.
    async with engine(agent, *script()) as made:
        handle = made.start(agent, "go", answers={"Release 1.0?": "yes"})
        events = [event async for event in handle.events()]
    shown = [(type(e).__name__, e.path, e.tool_name) for e in events if isinstance(e, ToolStarted | ToolFinished)]
    assert shown[0] == ("ToolStarted", "", "release")
    assert shown[1:3] == [("ToolStarted", "1", "note"), ("ToolFinished", "1", "note")]
    assert shown[-1] == ("ToolFinished", "", "release")


def agent_with_a_slip() -> Steps[Any]:
    """Do it."""
    return (yield from AgentCall("wrter", "x"))


def call_in_parallel() -> Steps[Any]:
    """Do it."""
    return (yield from Parallel(call(settle, "a")))  # type: ignore[call-overload]


def end_of_the_turn() -> Steps[Any]:
    """Do it."""
    yield ToolCall("end_turn")


def returned_step_result() -> Steps[Any]:
    """Do it."""
    return (yield ToolCall("settle", {"order": "a"}))


def step_of_a_model() -> Steps[Any]:
    """Do it."""
    yield STEP


def text_on_the_way() -> Steps[Any]:
    """Do it."""
    yield "half of it"  # type: ignore[misc]


SLIPS: dict[Any, str] = {
    call_in_parallel: "write ToolCall(name, {...})",
    text_on_the_way: "Its result is what it returns",
    step_of_a_model: "let an agent do it, with AgentCall(...)",
    end_of_the_turn: "changes a conversation",
    returned_step_result: "For the value itself write `yield from`",
    agent_with_a_slip: "did you mean 'writer'?",
}


@pytest.mark.spec("programs:PG1")
@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.__name__)
async def test_mistake_in_a_yielding_tool_is_a_stable_explained_error(
    slip: Any,
) -> None:
    warned = pytest.warns(SourceWarning, match="'writer'") if slip is agent_with_a_slip else contextlib.nullcontext()
    with warned:
        (said,) = results(await called(tool(uses=[settle, WRITER])(slip)))
    assert SLIPS[slip] in said
    assert " at 0x" not in said
    assert str(Path(__file__).parent) not in said
