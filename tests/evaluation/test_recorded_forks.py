"""
``engine.fork(tools=...)``: a recorded run forked at one place, with tools answered from the record (evaluation JG7-JG10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import attrs
import pytest

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Parallel,
    Perform,
    Race,
    Receive,
    RunStatus,
    Sleep,
    Start,
    Tool,
    Wait,
)
from stepengine.data.messages import ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import InputError, JournalError, LimitExceeded, ReplayDivergence
from stepengine.journal import FileJournal, MemoryJournal, check, diff
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.recorded_forks import ExternalCall, SharedBudget
from stepengine.testing import ScriptedModel, text, tool_call
from tests.engine.clocks import ShiftedClock


class Office:
    """
    An agent with a tool and two children that have it too; `asked` is what the tool was really asked.

    The model is a function of what it is asked: a child looks at its own shelf, then at a common one, and says what it saw.
    """

    def __init__(self, *, description: str = "Look.", idempotent: bool = False) -> None:
        self.asked: list[Any] = []
        self.functions: list[str] = []
        self.tool = Tool(
            name="look", description=description, input_schema={"type": "object"}, run=self.look, in_thread=False,
            annotations=ToolAnnotations(idempotent=idempotent),
        )  # fmt: skip
        self.children = [
            AgentDefinition(name, model="t/m", tools=[self.tool], instructions_prompt=f"I am {name}.")
            for name in ("left", "right")
        ]

        def handle_steps(ctx: Any) -> Any:
            yield from Perform(self.noted, "begin")
            pair = yield from Parallel(*[AgentCall(child, "look around") for child in self.children])
            yield STEP_ALL
            yield from Perform(self.noted, "end")
            return [child.text for child in pair]

        self.agent = AgentDefinition(
            "office", model="t/m", tools=[self.tool], spawnable_agents=self.children, handle_steps=handle_steps
        )

    def look(self, given: Any) -> str:
        self.asked.append(given["shelf"])
        return f"{len(self.asked)} things on {given['shelf']}"

    def noted(self, word: str) -> str:
        self.functions.append(word)
        return word

    def engine(self, model: Callable[[Any], Any], **options: Any) -> Engine:
        return Engine([self.agent], models=ScriptedModel(model), pricing=None, **options)


def by_the_book(request: Any) -> Any:
    """
    Answer by the number of tool results: two looks, then a summary of what was seen.
    """
    seen = [m.text for m in request.messages if m.role == "tool"]
    if len(seen) < 2:
        who = next((m.text for m in request.messages if "I am" in m.text), "the boss")
        return tool_call("look", {"shelf": "common" if seen else who}, cost="0.01")
    return text(" and ".join(seen), cost="0.02")


@pytest.fixture
def office() -> Office:
    """
    An office whose run was recorded in `office.journal`.
    """
    office = Office()
    office.journal = MemoryJournal()  # type: ignore[attr-defined]
    with office.engine(by_the_book) as engine:
        assert engine.run_sync("office", "go", journal=office.journal).status is RunStatus.COMPLETED  # type: ignore[attr-defined]
    office.asked.clear()
    office.functions.clear()
    return office


def before(at: str) -> str:
    """
    The last effect to keep, so that the model call at *at* is asked for anew.
    """
    path, _, number = at.partition("#")
    return f"{path}#{int(number) - 1}"


def model_calls(journal: Any) -> list[str]:
    return [f"{path}#{seq}" for (path, seq), intent in journal.history().intents.items() if intent.type == "model_call"]


@pytest.mark.spec("evaluation:JG7")
async def test_an_unchanged_run_is_repeated_bytewise_without_any_request(office: Any) -> None:
    """
    Without a difference there is no place to go on from: no model call, no tool, the recorded journal.
    """
    async with office.engine(lambda _: pytest.fail("nobody is to be asked")) as engine:
        again = await engine.fork(office.journal, tools="recorded")

    assert ("", None, 0, 0) == (again.broke_at, again.difference, again.model_calls, again.served)
    assert office.journal.lines() == again.journal.lines()
    assert [] == office.asked + office.functions


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG7", "evaluation:JG8", "evaluation:JG9", "evaluation:JG10")
async def test_forks_at_every_model_call_repeat_the_run_without_tools(office: Any) -> None:
    """
    Whatever model call is asked for anew, of root or child: what follows from it is asked anew and what stands beside it is
    not, tools answer from the record, the end is the recorded one, and the new journal is a run that replays.
    """
    places = model_calls(office.journal)
    ended = {}
    for at in places:
        async with office.engine(by_the_book) as engine:
            again = await engine.fork(office.journal, at=before(at), reuse=False, tools="recorded")
            ended[at] = again
            replayed = await engine.replay(again.journal)

        assert at == again.broke_at.removeprefix("#") or at.startswith("#")
        assert again.refused is None
        assert not diff(office.journal, again.journal)
        assert (replayed.output, replayed.text) == (again.result.output, again.result.text)
        assert {"run": office.journal.history().head.run, "at": again.broke_at} == again.journal.history().head.parent
        assert () == check(again.journal).problems
    assert [] == office.asked + office.functions
    # Children 1 and 2 have three calls each, the root three after them: those of the sibling stay.
    expected = [6, 5, 4, 6, 5, 4, 3, 2, 1]
    assert expected == [ended[at].model_calls for at in sorted(places, key=lambda at: (not at[0].isdigit(), at))]


@pytest.mark.spec("evaluation:JG7", "replay:D11")
async def test_fork_options_depend_on_its_kind(
    office: Any,
) -> None:
    async with office.engine(by_the_book) as engine:
        with pytest.raises(InputError, match="fork\\(\\) needs at=, the last effect to keep; only with tools="):
            await engine.fork(office.journal)
        with pytest.raises(InputError, match="fork\\(\\) has no option 'budget'"):
            await engine.fork(office.journal, at=0, budget=1)
        with pytest.raises(InputError, match="fork\\(\\) has no option 'edit'"):
            await engine.fork(office.journal, tools="recorded", edit="x")
    assert [] == office.asked + office.functions


@pytest.mark.spec("evaluation:JG9")
async def test_an_equal_model_call_is_free_unless_fresh_is_requested(office: Any) -> None:
    """
    With reuse only the call at the place itself is made; every later one that is equal is answered by the record.
    """
    async with office.engine(by_the_book) as engine:
        again = await engine.fork(office.journal, at="1#-1", tools="recorded")

    assert (1, 5, Decimal("0.01")) == (again.model_calls, again.reused, again.cost)
    assert not diff(office.journal, again.journal)


@pytest.mark.spec("evaluation:JG7")
async def test_a_changed_tool_text_is_the_place_of_the_fork(office: Any) -> None:
    """
    The first request that holds the changed text is where the run goes on; the fields are those of a divergence.
    """
    now = Office(description="Look closely.")
    async with now.engine(by_the_book) as engine:
        again = await engine.fork(office.journal, tools="recorded")

    assert again.broke_at in ("1#0", "2#0")
    assert again.by_request
    assert [("/tools/0/description", '"Look."', '"Look closely."')] == [tuple(f) for f in again.difference.diff]
    assert (9, Decimal("0.12"), 0) == (again.model_calls, again.cost, again.performed)
    assert RunStatus.COMPLETED is again.result.status
    assert [] == now.asked + now.functions


@pytest.mark.spec("evaluation:JG8")
@pytest.mark.parametrize(
    ("tools", "idempotent", "simulated"),
    [
        ("recorded", True, False),
        ("idempotent", True, False),
        ("idempotent", False, False),
        ("working-copy", False, False),
        ("working-copy", True, True),
    ],
)
async def test_an_unrecorded_call_is_simulated_performed_or_ends_the_run(
    office: Any, tools: Any, idempotent: bool, simulated: bool
) -> None:
    """
    The order is: the record, the caller's function, the tool where it may be repeated, and else the run is unknown.
    """
    now = Office(idempotent=idempotent)
    shown: list[Any] = []

    def simulate(call: ExternalCall, recorded: Any) -> Any:
        shown.append((call.name, call.input["shelf"], [str(r.result.text) for r in recorded]))
        return "made up"

    async with now.engine(lambda r: tool_call("look", {"shelf": "new"}) if len(r.messages) == 1 else "done") as engine:
        again = await engine.fork(
            office.journal,
            at=before(model_calls(office.journal)[-3]),
            tools=tools,
            simulate=simulate if simulated else None,
        )

    performed = not simulated and (tools == "working-copy" or (tools == "idempotent" and idempotent))
    refused = not simulated and not performed
    assert (int(simulated), int(performed)) == (again.simulated, again.performed)
    assert performed * ["new"] == now.asked
    assert [] == now.functions
    if refused:
        assert ("look", {"shelf": "new"}) == (again.refused.name, again.refused.input)
        assert RunStatus.FAILED is again.result.status
        assert isinstance(again.result.error, ReplayDivergence)
        assert "must not be performed" in str(again.result.error)
    else:
        assert again.refused is None
        assert RunStatus.COMPLETED is again.result.status
    if simulated:
        assert "made up" == again.result.state.message_history[-2].text
        (name, shelf, results) = shown[0]
        assert ("look", "new", 6) == (name, shelf, len(results))


@pytest.mark.spec("evaluation:JG8")
async def test_a_simulation_may_decline_and_its_failure_is_reported(
    office: Any,
) -> None:
    """
    `None` means that it cannot say; an error of its own is the caller's to repair, and names the call.
    """
    at = model_calls(office.journal)[-3]

    def broken(call: ExternalCall, recorded: Any) -> Any:
        raise KeyError(call.name)

    async with office.engine(lambda _: tool_call("look", {"shelf": "new"})) as engine:
        nothing = await engine.fork(
            office.journal, at=before(at), simulate=lambda call, recorded: None, tools="recorded"
        )
        with pytest.raises(JournalError, match=r"simulate= failed for look #\d+: KeyError: 'look'"):
            await engine.fork(office.journal, at=before(at), simulate=broken, tools="recorded")

    assert "look" == nothing.refused.name


@pytest.mark.spec("evaluation:JG8")
async def test_equal_calls_get_recorded_results_in_order_each_once() -> None:
    """
    Two equal calls had two results: asked again, the first gets the first, the second the second, and a third nothing.
    """
    seen: list[int] = []
    tool = Tool(
        name="poll",
        description="Poll.",
        input_schema={"type": "object"},
        run=lambda _: str(seen.append(1) or len(seen)),
        in_thread=False,
    )
    agent = AgentDefinition("a", model="t/m", tools=[tool])
    journal = MemoryJournal()
    polls = tool_call("poll", {})
    with Engine([agent], models=ScriptedModel([polls, polls, "done"]), pricing=None) as engine:
        engine.run_sync("a", "go", journal=journal)
    with Engine([agent], models=ScriptedModel([polls, polls, polls]), pricing=None) as engine:
        again = engine.fork_sync(journal, at=-1, reuse=False, tools="recorded")

    assert [1, 1] == seen
    assert (2, "poll") == (again.served, again.refused.name)
    results = [r.value for r in (again.journal.history().outcome(r) for r in again.journal.history().results.values())
               if isinstance(r.value, ToolResult)]  # fmt: skip
    assert ["1", "2"] == [r.content[0].text for r in results]


@pytest.mark.spec("evaluation:JG8")
async def test_a_recorded_answer_is_reused_and_new_questions_suspend() -> None:
    """
    Nobody is asked anything by such a fork, whoever the engine could ask.
    """

    def agent(question: str) -> Any:
        def handle_steps(ctx: Any) -> Any:
            yield STEP_ALL
            return (yield from Ask(question))

        return AgentDefinition("a", model="t/m", handle_steps=handle_steps)

    journal = MemoryJournal()
    with Engine([agent("Sure?")], models=ScriptedModel(["one"])) as engine:
        engine.run_sync("a", "go", journal=journal, answers={"Sure?": "yes"})

    class Nobody:
        def ask(self, question: Any) -> str:
            pytest.fail("nobody is to be asked")

    ended = []
    for question in ("Sure?", "Really?"):
        with Engine([agent(question)], models=ScriptedModel(["two"]), interactor=Nobody()) as engine:
            ended.append(engine.fork_sync(journal, at=-1, tools="recorded"))

    assert ("yes", RunStatus.COMPLETED) == (ended[0].result.output, ended[0].result.status)
    assert RunStatus.SUSPENDED is ended[1].result.status
    assert ["Really?"] == [q.text for _, q in find_open_questions(ended[1].journal.history()).values()]


@pytest.mark.spec("evaluation:JG7")
async def test_a_difference_before_the_place_is_a_divergence(office: Any) -> None:
    """
    A place can only be reached when what is recorded before it fits the code.
    """
    now = Office(description="Look closely.")
    async with now.engine(by_the_book) as engine:
        with pytest.raises(ReplayDivergence, match=r"/tools/0/description"):
            await engine.fork(office.journal, at=before(model_calls(office.journal)[-1]), tools="recorded")
        with pytest.raises(JournalError, match=r"has no effect after #99 to request again"):
            await engine.fork(office.journal, at=99, tools="recorded")
        with pytest.raises(JournalError, match="tools must be one of recorded, idempotent, working-copy"):
            await engine.fork(office.journal, tools="all")

    assert [] == now.asked


@pytest.mark.spec("evaluation:JG7")
async def test_a_handler_with_fewer_or_more_effects_asks_no_model(office: Any) -> None:
    """
    An effect that is gone at the end, and one that is new there, are differences without any request that differs.
    """

    def edited(more: bool) -> Any:
        def handle_steps(ctx: Any) -> Any:
            done = office.agent.handle_steps(ctx)
            sent = None
            while True:
                try:
                    asked = done.send(sent)
                except StopIteration:
                    break
                if isinstance(asked, Perform) and asked.args == ("end",) and not more:
                    break
                sent = yield asked
            if more:
                yield from Perform(office.noted, "even more")
            return "short"

        return attrs.evolve(office.agent, handle_steps=handle_steps)

    async with office.engine(by_the_book) as engine:
        less = await engine.fork(office.journal, agent=edited(more=False), tools="recorded")
        more = await engine.fork(office.journal, agent=edited(more=True), tools="recorded")

    assert ("unused", False, 0) == (less.difference.kind, less.by_request, less.model_calls)
    assert RunStatus.COMPLETED is less.result.status
    assert ("extra", False, 0) == (more.difference.kind, more.by_request, more.model_calls)
    assert "noted" in more.refused.name
    assert [] == office.functions


@pytest.mark.spec("evaluation:JG7", "evaluation:JG86")
async def test_forks_that_share_a_budget_never_overspend_it(office: Any) -> None:
    """
    Room is reserved before a call; when there is none the fork ends at its limit, and the budget says so.
    """
    prices: Any = lambda model, usage, at: Decimal("0.02")  # noqa: E731
    budget = SharedBudget("0.10")
    now = Office()
    async with Engine([now.agent], models=ScriptedModel(by_the_book), pricing=prices) as engine:
        runs = [
            await engine.fork(office.journal, at="1#-1", reuse=False, budget=budget, tools="recorded") for _ in range(3)
        ]

    assert all(isinstance(run.result.error, LimitExceeded) for run in runs[1:])
    assert budget.is_empty
    assert Decimal("0.08") <= budget.spent <= Decimal("0.10")
    assert budget.spent == sum(run.cost for run in runs)
    with pytest.raises(JournalError, match="an amount of US dollars above 0"):
        SharedBudget(-1)


@pytest.mark.spec("evaluation:JG10")
async def test_a_fork_is_kept_only_in_an_empty_file(office: Any, tmp_path: Any) -> None:
    """
    The kept journal is that of the fork; a file with a run in it is refused and not touched.
    """
    file = tmp_path / "again.jsonl"
    async with office.engine(by_the_book) as engine:
        again = await engine.fork(office.journal, at="1#-1", into=file, tools="recorded")
        before = file.read_bytes()
        with pytest.raises(JournalError, match="holds a run already"):
            await engine.fork(office.journal, at="1#-1", into=file, tools="recorded")
        replayed = await engine.replay(file)

    assert before == file.read_bytes()
    assert FileJournal(file).history().head.parent["at"] == again.broke_at == "1#0"
    assert replayed.output == again.result.output


@pytest.mark.spec("evaluation:JG7")
async def test_a_fork_continues_on_the_recorded_time() -> None:
    """
    A run of last year goes on in last year, so that a date in a request is no difference.
    """

    def handle_steps(ctx: Any) -> Any:
        yield STEP_ALL
        return ctx.now().isoformat()

    agent = AgentDefinition("a", model="t/m", handle_steps=handle_steps)
    journal = MemoryJournal()
    async with Engine([agent], models=ScriptedModel(["one"])) as engine:
        recorded = await engine.run("a", "go", journal=journal)
    async with Engine([agent], models=ScriptedModel(["two"]), clock=ShiftedClock(timedelta(days=365))) as engine:
        again = await engine.fork(journal, at=-1, tools="recorded")

    passed = datetime.fromisoformat(again.result.output) - datetime.fromisoformat(recorded.output)
    assert timedelta(0) <= passed < timedelta(days=1)


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG7", "evaluation:JG8", "evaluation:JG111")
async def test_a_fork_of_a_crashed_run_repeats_no_effect(office: Any) -> None:
    """
    After each record of the journal: as it stands it ends as a replay does, and from any place on no tool is performed.
    """
    lines = office.journal.lines()
    ends: set[str] = set()
    for number in range(3, len(lines)):
        journal = MemoryJournal(lines[:number])
        async with office.engine(by_the_book) as engine:
            replayed = await engine.replay(journal)
            as_it_is = await engine.fork(journal, tools="recorded")
            places = model_calls(journal)
            again = [
                await engine.fork(journal, at=before(at), reuse=False, tools="recorded")
                for at in places[:1] + places[-1:]
            ]

        assert ("", 0) == (as_it_is.broke_at, as_it_is.model_calls)
        assert replayed.status is as_it_is.result.status
        assert replayed.journal.lines() == as_it_is.journal.lines()
        for one in again:
            ends.add("left" if one.refused is not None else one.result.status.value)
            assert () == check(one.journal).problems
        assert [] == office.asked + office.functions
    assert {"left", "completed"} <= ends


@pytest.mark.spec("evaluation:JG7")
async def test_a_replay_asks_the_model_only_with_live() -> None:
    agent = AgentDefinition("asker", model="scripted/x")
    journal = MemoryJournal()
    async with Engine([agent], models=ScriptedModel(["old"])) as engine:
        await engine.run(agent, "go", journal=journal)
    async with Engine([agent], models=ScriptedModel(["new"])) as engine:
        assert "old" == (await engine.replay(journal)).text
        assert "new" == (await engine.replay(journal, live=["model_call"])).text


# --- children in the background, and waits -----------------------------------------------------------------------------


def waits_for_all(office: Office) -> Any:
    left, right = yield from Start(*[AgentCall(child, "look around") for child in office.children])
    yield from Sleep(0.001)
    yield STEP_ALL
    waited = yield from Wait(left, right)
    which, _ = yield from Race(Receive("nothing", timeout=0.001), Sleep(3_600))
    return [which, [child.text for child in waited.done]]


def races(office: Office) -> Any:
    which, child = yield from Race(AgentCall(office.children[0], "look around"), Sleep(3_600))
    yield STEP_ALL
    return [which, child.text]


def with_background(office: Office) -> Any:
    """Return a child that starts one of its own in the background."""

    def inner(ctx: Any) -> Any:
        ref = yield from Start(AgentCall(office.children[0], "look around"))
        yield STEP
        return (yield from Wait(ref)).done[0].text

    child, right = office.children
    return attrs.evolve(right, id="nested", spawnable_agents=[child], handle_steps=inner)


def waits_in_a_child(office: Office) -> Any:
    ref = yield from Start(AgentCall("nested", "go"))
    yield STEP_ALL
    return (yield from Wait(ref)).done[0].text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG7", "evaluation:JG9", "waiting:WT4")
@pytest.mark.parametrize("steps", [waits_for_all, races, waits_in_a_child])
async def test_runs_with_background_children_fork_at_every_model_call(steps: Any) -> None:
    """
    What was recorded of the children that leave their record holds no longer, also where their parent waits for them already.
    """
    office, journal = Office(), MemoryJournal()

    def handle_steps(ctx: Any) -> Any:
        return (yield from steps(office))

    children = [*office.children, with_background(office)]
    office.agent = attrs.evolve(office.agent, handle_steps=handle_steps, spawnable_agents=children)
    async with office.engine(by_the_book) as engine:
        recorded = await engine.run("office", "go", journal=journal)
    assert recorded.status is RunStatus.COMPLETED
    async with office.engine(lambda _: pytest.fail("nobody is to be asked")) as engine:
        assert journal.lines() == (await engine.fork(journal, tools="recorded")).journal.lines()
    for at in model_calls(journal):
        async with office.engine(by_the_book) as engine:
            again = await asyncio.wait_for(engine.fork(journal, at=before(at), reuse=False, tools="recorded"), 50)
            replayed = await engine.replay(again.journal)
        assert (RunStatus.COMPLETED, recorded.output, None) == (
            again.result.status,
            again.result.output,
            again.refused,
        ), at
        assert replayed.output == again.result.output
        assert again.model_calls > 0
        assert () == check(again.journal).problems


@pytest.mark.spec("evaluation:JG9")
async def test_no_time_passes_in_such_a_fork_that_only_waits() -> None:
    office, journal = Office(), MemoryJournal()

    def handle_steps(ctx: Any) -> Any:
        said = yield STEP_ALL
        yield from Sleep(1 if said.text == "other" else 0.001)

    office.agent = attrs.evolve(office.agent, handle_steps=handle_steps)
    async with office.engine(by_the_book) as engine:
        await engine.run("office", "go", journal=journal)
    async with office.engine(lambda _: text("other")) as engine:
        again = await engine.fork(journal, at=before(model_calls(journal)[-1]), tools="recorded")

    assert RunStatus.SUSPENDED is again.result.status
    assert ["time"] == [wait.kind for wait in again.result.waits_for]
