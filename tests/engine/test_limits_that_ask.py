"""
A limit that asks a person for more: over random trees, across suspensions and cuts, as each way of answering has it.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepengine import (
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Answer,
    Complete,
    Engine,
    GenerateN,
    Limits,
    ModelSettings,
    Parallel,
    RunStatus,
    UserMessage,
    tool,
)
from stepengine.data.ceilings import ceiling_from_answer
from stepengine.data.models import ModelReply, ReplyDone
from stepengine.data.usage import Usage
from stepengine.errors import AnswerRejected, LimitExceeded
from stepengine.journal import MemoryJournal
from stepengine.models import Provider
from stepengine.testing import ScriptedModel, text, tool_call

ONE = 60
"""What a model call costs here: a prompt of a few tokens and 50 tokens at most, at a dollar each."""
ROUNDS = 40
"""How often a run is resumed at most before a test takes it for endless."""


def priced(model: str, usage: Usage, at: object) -> Decimal:
    return Decimal(usage.total_tokens)


@attrs.define
class Purse:
    """
    What was spent of what people allowed: more than that fails the test at the call.
    """

    allowed: float
    spent: int = 0
    calls: int = 0

    def pay(self, usage: Usage) -> None:
        self.calls += 1
        self.spent += usage.total_tokens
        assert self.spent <= self.allowed, "spent beyond what was granted"


class Model(Provider):
    """
    Says one word, after others had their turn, and pays for it.
    """

    name = "test"

    def __init__(self, purse: Purse) -> None:
        super().__init__()
        self.purse = purse

    async def complete(self, request: Any) -> ModelReply:
        await asyncio.sleep(0)
        usage = Usage(input_tokens=5, output_tokens=request.settings.max_tokens or 0)
        self.purse.pay(usage)
        return attrs.evolve(text("done"), usage=usage)

    async def stream(self, request: Any) -> Any:
        yield ReplyDone(await self.complete(request))


class Somebody:
    """
    Answers questions about limits by a list, in the order in which they are asked; notes what it was asked.
    """

    def __init__(self, purse: Purse, said: list[Any]) -> None:
        self.purse = purse
        self.said = said
        self.asked: list[str] = []

    def __call__(self, question: Any) -> Any:
        answer = self.said[len(self.asked) % len(self.said)]
        self.asked.append(question.id)
        allowed = ceiling_from_answer(question, answer if isinstance(answer, Answer) else Answer(text=answer))
        if allowed is not None and not question.path and allowed.kind == "cost":
            self.purse.allowed = max(self.purse.allowed, float(allowed.most))
        return answer

    async def ask(self, question: Any) -> Any:
        await asyncio.sleep(0)
        return self(question)


# --- random trees -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Node:
    """
    A run of a random tree: how often it calls its model itself, its children, one by one or together, and its own limit.
    """

    calls: int
    children: tuple[Node, ...] = ()
    together: bool = False
    limit: int | None = None


def nodes(*, together: bool) -> st.SearchStrategy[Node]:
    limits = st.none() | st.integers(1, 4 * ONE)
    leaf = st.builds(Node, st.integers(1, 3), limit=limits)
    beside = st.booleans() if together else st.just(value=False)
    return st.recursive(
        leaf,
        lambda inner: st.builds(Node, st.integers(0, 2), st.lists(inner, max_size=3).map(tuple), beside, limits),
        max_leaves=6,
    )


def agents_of(node: Node, name: str = "a") -> list[AgentDefinition]:
    """
    Return the agents of a tree, its root's first; each node is an agent of its own, so that it has a limit of its own.
    """
    below = [agents_of(child, f"{name}{number}") for number, child in enumerate(node.children)]
    ids = [known[0].id for known in below]

    def handle_steps(ctx: Any) -> Any:
        said = []
        for number in range(node.calls):
            told = yield from Complete(messages=[UserMessage(f"{name} {number}")])
            said.append(told.text)
        if node.together:
            said += [child.output for child in (yield from Parallel([AgentCall(one) for one in ids]))]
        else:
            for one in ids:
                said.append((yield from AgentCall(one)))
        return said

    limits = Limits() if node.limit is None else Limits(max_cost_usd=node.limit, ask=True)
    made = AgentDefinition(
        name,
        model="test/m",
        handle_steps=handle_steps,
        spawnable_agents=ids,
        limits=limits,
        settings=ModelSettings(max_tokens=40),
    )
    return [made, *[agent for known in below for agent in known]]


def engine_for(node: Node, purse: Purse, **options: Any) -> Engine:
    return Engine(agents_of(node), models={"test": Model(purse)}, pricing=priced, **options)


def outcome_of(result: Any) -> tuple[Any, ...]:
    return result.status, result.output, result.error, result.cost, result.usage.requests


def without_limits(node: Node) -> Node:
    return attrs.evolve(node, limit=None, children=tuple(map(without_limits, node.children)))


def without_asking(node: Node, limit: int) -> Any:
    purse = Purse(limit)
    agents = [attrs.evolve(a, limits=attrs.evolve(a.limits, ask=None)) for a in agents_of(node)]
    with Engine(agents, models={"test": Model(purse)}, pricing=priced) as engine:
        return engine.run_sync("a", limits=Limits(max_cost_usd=limit))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:LA1")
@given(nodes(together=False), st.integers(1, 5 * ONE), st.sampled_from(["no", Answer(declined=True)]))
@settings(max_examples=15)
def test_refused_extension_ends_a_tree_like_a_plain_limit(node, limit, no):
    purse = Purse(limit)
    with engine_for(node, purse, interactor=Somebody(purse, [no])) as engine:
        result = engine.run_sync("a", limits=Limits(max_cost_usd=limit, ask=True))
        # Nobody is there to answer, and nothing is kept that somebody could go on with.
    with engine_for(node, Purse(limit)) as engine:
        alone = engine.run_sync("a", limits=Limits(max_cost_usd=limit, ask=True))

    assert outcome_of(without_asking(node, limit)) == outcome_of(result) == outcome_of(alone)


@pytest.mark.deep
@pytest.mark.spec("reliability:LA1", "reliability:LA4")
@given(nodes(together=True), st.integers(1, 5 * ONE), st.sampled_from(["yes", "70"]), st.floats(0, 1, exclude_max=True))
@settings(max_examples=60)
def test_extended_run_cut_anywhere_ends_alike_and_repeats_no_question(node, limit, yes, part):
    purse, whole = Purse(limit), MemoryJournal()
    limits = Limits(max_cost_usd=limit, ask=True)
    with engine_for(node, purse, interactor=Somebody(purse, [yes])) as engine:
        result = engine.run_sync("a", limits=limits, journal=whole)
    lines = whole.lines()
    left = MemoryJournal(lines[: 2 + int(part * (len(lines) - 1))])
    history = left.history()
    answered = {q.id for _, q, _ in answers_in(history)}
    purse = Purse(1e9)
    somebody = Somebody(purse, [yes])
    with engine_for(node, purse, interactor=somebody) as engine:
        again = engine.replay_sync(left) if history.is_complete else engine.resume_sync(left)

    assert (result.status, result.output) == (again.status, again.output)
    assert not answered & set(somebody.asked), "what was answered is asked again"
    assert len(set(somebody.asked)) == len(somebody.asked)


def answers_in(history: Any) -> list[tuple[Any, Any, Any]]:
    from stepengine.journal.encoding import get_recorded_questions

    found = []
    for address, intent in history.intents.items():
        if intent.type == "ask" and address in history.results:
            (question,) = get_recorded_questions(history.form(intent))
            found.append((address, question, history.outcome(history.results[address])))
    return found


@pytest.mark.spec("reliability:LA1", "reliability:LA3", "reliability:LA4")
@given(nodes(together=True), st.integers(1, 4 * ONE))
@example(Node(2, (Node(1, (Node(1),), limit=1), Node(1)), together=True), 94)
@settings(max_examples=40)
@pytest.mark.deep
def test_unattended_tree_suspends_with_one_question_per_limit(node, limit):
    endless, purse, journal = Purse(1e9), Purse(limit), MemoryJournal()
    with engine_for(without_limits(node), endless) as engine:
        free = engine.run_sync("a")
    somebody = Somebody(purse, ["yes"])
    with engine_for(node, purse) as engine:
        result = engine.run_sync("a", limits=Limits(max_cost_usd=limit, ask=True), journal=journal)
        for _ in range(ROUNDS):
            if result.status is not RunStatus.SUSPENDED:
                break
            ids = [question.id for question in result.pending_questions]
            assert len(set(ids)) == len(ids)
            answers = {question.id: somebody(question) for question in result.pending_questions}
            result = engine.resume_sync(journal, answers=answers)
            assert () == result.warnings
        again = engine.replay_sync(journal)

    assert outcome_of(free) == outcome_of(result) == outcome_of(again)
    assert endless.calls == purse.calls


# --- one limit, one question ------------------------------------------------------------------------------------------


def family(*limits: int | None) -> list[AgentDefinition]:
    """
    Return an agent that has four children at once call their models, and these; their limits in dollars, if they have any.
    """

    def child_steps(ctx: Any) -> Any:
        return (yield from Complete(messages=[UserMessage(ctx.prompt)])).text

    def handle_steps(ctx: Any) -> Any:
        ended = yield from Parallel([AgentCall(one.id, "x") for one in children])
        return [child.output or child.error.kind for child in ended]

    settings = ModelSettings(max_tokens=40)
    children = [
        AgentDefinition(
            f"child{n}",
            model="test/m",
            handle_steps=child_steps,
            settings=settings,
            limits=Limits(max_cost_usd=limit, ask=True),
        )
        for n, limit in enumerate(limits)
    ]
    return [AgentDefinition("lead", handle_steps=handle_steps, spawnable_agents=children), *children]


@pytest.mark.spec("reliability:LA3", "reliability:LA5")
async def test_children_at_a_shared_limit_ask_once():
    async def asked(limit: int, *limits: int | None) -> list[tuple[str, str, list[str]]]:
        told, purse = [], Purse(1e9)
        engine = Engine(family(*limits), models={"test": Model(purse)}, pricing=priced)
        async with engine:
            handle = engine.start("lead", limits=Limits(max_cost_usd=limit, ask=True))
            async for event in handle.events(answers=True):
                if event.type == "question_asked":
                    told.append((event.question.id, event.question.text))
                    handle.answer(event.question.id, "yes")
            assert ["done"] * len(limits) == (await handle.result()).unwrap()
        return told

    (only,) = await asked(100, None, None, None, None)
    own = await asked(1_000, 30, 30, None, 1_000)

    assert "limit:cost:100" == only[0]
    assert "of 100 US dollars; the next model call needs about 4" in only[1]
    assert {"0:limit:cost:30", "1:limit:cost:30"} == {key for key, _ in own}


# --- steps and tokens -------------------------------------------------------------------------------------------------


@tool
def look(n: int) -> str:
    """
    Look.
    """
    return f"seen {n}"


def looker(**limits: Any) -> AgentDefinition:
    return AgentDefinition("looker", model="test/m", tools=[look], limits=Limits(**limits))


def looks(count: int = 5) -> ScriptedModel:
    return ScriptedModel([*[tool_call("look", {"n": n}) for n in range(count)], text("done")])


@pytest.mark.spec("reliability:LA1", "reliability:LA4", "reliability:LA5")
def test_step_extension_is_asked_between_steps_and_kept_on_replay():
    journal = MemoryJournal()
    with Engine([looker(max_steps=2, ask=True)], models=looks()) as engine:
        waiting = [engine.run_sync("looker", "go", journal=journal)]
        for answers in ({"limit:steps:2": "1"}, {"limit:steps:3": "yes"}, {"limit:steps:5": True}):
            assert [[*answers]] == [[q.id for q in waiting[-1].pending_questions]]
            # Other limits hold for what is live: a limit that asked is what people said of it.
            other = Limits(max_steps=1, max_tokens=10_000) if "limit:steps:3" in answers else None
            waiting.append(engine.resume_sync(journal, answers=answers, limits=other))
        replayed = engine.replay_sync(journal)
    asks = [address[1] for address, _, _ in answers_in(journal.history())]
    with Engine([looker(max_steps=2, ask=True)], models=looks()) as engine:
        before = engine.fork_sync(journal, at=asks[0] - 1, allow_repeat=True, answers={"limit:steps:2": "no"})
    with Engine([looker(max_steps=2, ask=True)], models=ScriptedModel([text("later")])) as engine:
        behind = engine.fork_sync(journal, at=asks[0], allow_repeat=True)

    assert ("completed", "done", 6) == (waiting[-1].status, waiting[-1].text, waiting[-1].usage.requests)
    assert ("completed", "done") == (replayed.status, replayed.text)
    assert "max_steps" == before.status
    assert ("completed", "later") == (behind.status, behind.text)


@pytest.mark.spec("reliability:LA1")
@pytest.mark.parametrize("ending", ["final_answer", "stop", "raise"])
def test_refused_step_extension_does_as_on_max_steps_says(ending):
    def ended(**options: Any) -> tuple[Any, ...]:
        limits = Limits(max_steps=2, on_max_steps=ending, ask=options.pop("ask", None))
        model = ScriptedModel([tool_call("look", {"n": 0}), tool_call("look", {"n": 1}), text("so far")])
        with Engine([looker()], models=model) as engine:
            try:
                result = engine.run_sync("looker", "go", limits=limits, **options)
            except LimitExceeded as error:
                result = error.result
        return result.status, result.text, str(result.error), result.usage.requests

    assert ended() == ended(ask=True, answers={"limit:steps:2": "no"}) == ended(ask=True)


@pytest.mark.spec("reliability:LA1")
def test_candidates_and_tokens_can_be_extended_by_the_needed_amount():
    def handle_steps(ctx: Any) -> Any:
        first = yield GenerateN(2)
        second = yield GenerateN(2)
        yield STEP_ALL
        return [*first.n_responses, *second.n_responses]

    agent = AgentDefinition(
        "many", model="test/m", handle_steps=handle_steps, settings=ModelSettings(max_tokens=40),
        limits=Limits(max_steps=1, max_tokens=1, ask=True),
    )  # fmt: skip
    asked: list[str] = []

    class Yes:
        def ask(self, question: Any) -> str:
            asked.append(question.id.rpartition(":")[0])
            return "yes"

    with Engine([agent], models={"test": Model(Purse(1e9))}, interactor=Yes()) as engine:
        result = engine.run_sync("many", "go")

    assert ["done"] * 4 == result.unwrap()
    assert {"limit:tokens", "limit:steps"} == set(asked)
    assert len(asked) <= 8, "a yes has to make room for what asked"


@pytest.mark.spec("reliability:LA5")
@pytest.mark.parametrize("wrong", ["perhaps", "0", "-3", "1.5", "nan", "inf", "1e99", "9" * 5_000, ""])
def test_invalid_extension_answer_is_refused_and_the_question_stays(wrong):
    journal = MemoryJournal()
    with Engine([looker(max_steps=2, ask=True)], models=looks()) as engine:
        engine.run_sync("looker", "go", journal=journal)
        with pytest.raises(AnswerRejected, match="'yes', 'no' or a whole number from 1"):
            engine.resume_sync(journal, answers={"limit:steps:2": wrong})
        result = engine.resume_sync(journal, answers={"limit:steps:2": "no"})

    assert "max_steps" == result.status


@pytest.mark.spec("reliability:LA1")
async def test_limit_question_stays_open_while_the_run_waits_for_answers():
    journal = MemoryJournal()
    async with Engine([looker(max_steps=2, ask=True)], models=looks()) as engine:
        await engine.run("looker", "go", journal=journal)
        handle = await engine.start_resume(journal, wait_for_answers=30)
        async for event in handle.events():
            if event.type == "question_asked":
                handle.answer(event.question.id, "10")
        result = await handle.result()

    assert "done" == result.text
