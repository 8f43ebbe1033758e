"""
Resuming after an edit: a run that waits goes on where its agent was changed meanwhile, as far as somebody says so.
"""

from __future__ import annotations

import attrs
import pytest
from pydantic import BaseModel, create_model

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Parallel,
    Perform,
    RunStatus,
    ToolCall,
    tool,
)
from stepengine.errors import JournalError, ReplayDivergence
from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal, check
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text


@attrs.frozen
class Source:
    """
    What an agent's file says; an edit of it is another one of these.
    """

    system: str = "You sell shoes."
    model: str = "m/small"
    doc: str = "Look a size up."
    looked_up: str = "41"
    noted: str = "asked"
    question: str = "Shall I order?"
    child_prompt: str = "Check the stock."
    child_says: str = "stock"
    first: str = "step"

    def agents(self, done):
        @tool(name="size", description=self.doc, in_thread=False)
        def size(word: str) -> str:
            done.append(f"size {word}")
            return f"{word} fits"

        def kid_steps(ctx):
            turn = yield STEP
            return f"{self.child_says}: {turn.agent_state.message_history[-1].text}"

        def handle_steps(ctx):
            if self.first != "step":
                yield ToolCall("size", {"word": self.first})
            yield STEP
            yield ToolCall("size", {"word": self.looked_up})
            checked = yield from AgentCall("kid", self.child_prompt)
            yield from Perform(done.append, self.noted)
            answer = yield from Ask(self.question, options=("yes", "no"))
            turn = yield STEP_ALL
            return f"{checked}, {answer}: {turn.agent_state.message_history[-1].text}"

        kid = AgentDefinition("kid", model=self.model, system_prompt=self.system, handle_steps=kid_steps)
        return AgentDefinition(
            "seller",
            model=self.model,
            system_prompt=self.system,
            tools=[size],
            spawnable_agents=[kid],
            handle_steps=handle_steps,
        )


class Shop:
    """
    The outside of such an agent, and engines for it.
    """

    def __init__(self):
        self.done = []
        self.model = None
        self.engines = []

    def engine(self, source, *replies):
        self.model = ScriptedModel([text(reply) for reply in replies])
        self.engines.append(Engine([source.agents(self.done)], models=self.model))
        return self.engines[-1]

    def close(self):
        for engine in self.engines:
            engine.close()

    def waiting(self, journal, source=Source()):
        held = self.engine(source, "hello", "in stock").run_sync("seller", "Shoes!", journal=journal)
        assert (RunStatus.SUSPENDED, ["size 41", "asked"]) == (held.status, self.done)
        return held


@pytest.fixture
def shop():
    shop = Shop()
    yield shop
    shop.close()


EDITS = {
    "system prompt": {"system": "You sell good shoes."},
    "model": {"model": "m/large"},
    "input of a tool": {"looked_up": "42"},
    "prompt of a child": {"child_prompt": "Check our stock."},
    "output of a child": {"child_says": "store"},
    "question": {"question": "Do I order?"},
    "nearly everything": {
        "system": "Hi.",
        "model": "m/x",
        "doc": "X.",
        "noted": "x",
        "child_says": "x",
        "question": "x",
    },
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X58", "replay:D14", "reliability:R2")
@pytest.mark.parametrize(
    ("edit", "store"),
    [*[(edit, "memory") for edit in EDITS], ("nearly everything", "file"), ("nearly everything", "sqlite")],
)
def test_waiting_run_continues_after_an_edit_with_keep(shop, edit, store, tmp_path):
    """
    By default the edit is told, and nothing changes; with "keep" nobody is asked again, and the code of today goes on.
    """
    journal = {
        "memory": MemoryJournal,
        "file": lambda: FileJournal(tmp_path / "run.jsonl"),
        "sqlite": lambda: SqliteJournal(tmp_path / "runs.db", "one"),
    }[store]()
    (question,) = shop.waiting(journal).pending_questions
    before, now = journal.content(), attrs.evolve(Source(), **EDITS[edit])

    with pytest.raises(ReplayDivergence, match="--on-divergence keep") as caught:
        shop.engine(now).resume_sync(journal, answers={question.id: "yes"})
    assert ("changed", before) == (caught.value.kind, journal.content())
    stopped = shop.engine(now).resume_sync(journal, answers={question.id: "yes"}, on_divergence="stop")
    assert (RunStatus.FAILED, str(caught.value), before) == (stopped.status, str(stopped.error), journal.content())

    engine = shop.engine(now, "ordered")
    result = engine.resume_sync(journal, answers={question.text: "yes"}, on_divergence="keep")
    assert (RunStatus.COMPLETED, "stock: in stock, yes: ordered") == (result.status, result.output), result.error
    assert ["size 41", "asked"] == shop.done
    (request,) = shop.model.calls
    assert (now.model, now.system, now.doc) == (request.model, request.system_prompt, request.tools[0].description)
    assert "41 fits" in [m.text for m in request.messages if m.role == "tool"]
    assert "the recorded effects were kept" in result.warnings[-1]

    assert check(journal)
    replayed = shop.engine(now).replay_sync(journal)
    assert (result.output, ()) == (replayed.output, replayed.warnings)
    assert shop.engine(now).replay_sync(replayed.journal).output == result.output
    assert shop.engine(now).resume_sync(journal).output == result.output
    last = [i for i in journal.history().intents.values() if i.type == "model_call"][-1]
    assert list(request.messages) == list(
        RecordedRequests(MemoryJournal(journal.lines()).history()).get_request(last).messages
    )


@pytest.mark.spec("requirements:X58")
def test_accepted_differences_are_recorded_and_limited(shop):
    journal = MemoryJournal()
    (question,) = shop.waiting(journal).pending_questions
    count = len(journal.records())
    now = attrs.evolve(Source(), noted="was asked", looked_up="42")
    # Without an answer it waits again; what was accepted holds from then on.
    held = shop.engine(now).resume_sync(journal, on_divergence="keep")
    notes = journal.records()[count:]

    assert (RunStatus.SUSPENDED, (question,)) == (held.status, held.pending_questions)
    assert [("", 1, "accepted_difference"), ("", 3, "accepted_difference")] == [
        (n.path, n.seq, n.input["type"]) for n in notes
    ]
    assert RunStatus.SUSPENDED is shop.engine(now).replay_sync(journal).status
    for other in (attrs.evolve(now, noted="x"), attrs.evolve(now, system="x")):
        with pytest.raises(ReplayDivergence):
            shop.engine(other).replay_sync(journal)
    done = shop.engine(now, "ordered").resume_sync(journal, answers={question.id: "yes"})
    assert (RunStatus.COMPLETED, notes) == (done.status, [r for r in journal.records()[count:] if r in notes])
    assert "stock: in stock, no: off" == (shop.engine(now, "off").fork_sync(journal, at=3, answers={"q4": "no"}).output)


@pytest.mark.spec("requirements:X58", "replay:D1")
@pytest.mark.parametrize("edit", [{"first": "40"}, {"first": "41"}])
def test_added_effects_are_no_acceptable_edit(shop, edit):
    journal = MemoryJournal()
    shop.waiting(journal)
    before = journal.lines()
    engine = shop.engine(attrs.evolve(Source(), **edit))
    with pytest.raises(ReplayDivergence) as caught:
        engine.resume_sync(journal, answers={"q4": "yes"}, on_divergence="keep")

    assert "kind" == caught.value.kind
    assert before == journal.lines()
    assert 'engine.resume(journal, on_divergence="extend")' in str(caught.value)
    assert "--on-divergence keep" not in str(caught.value)


@pytest.mark.spec("requirements:X58")
def test_run_with_a_new_parameter_member_continues(shop):
    def agent(**members):
        def handle_steps(ctx):
            answer = yield from Ask("Go on?")
            return [*sorted(ctx.params.model_dump().values()), answer]

        return AgentDefinition("seller", input_schema=create_model("Params", **members), handle_steps=handle_steps)

    journal = MemoryJournal()
    before, after = Engine([agent(size=(int, 41))]), Engine([agent(size=(int, 41), width=(int, 9))])
    shop.engines += [before, after]
    before.run_sync("seller", params={}, journal=journal)
    with pytest.raises(ReplayDivergence, match="the run starts with different arguments"):
        after.resume_sync(journal, answers={"q0": "yes"})
    result = after.resume_sync(journal, answers={"q0": "yes"}, on_divergence="keep")

    assert [9, 41, "yes"] == result.output
    assert result.output == after.replay_sync(journal).output


@pytest.mark.spec("requirements:X58")
def test_invalid_options_are_rejected_and_change_nothing(shop):
    journal = MemoryJournal()
    shop.waiting(journal)
    before = journal.lines()
    for wrong in ("bogus", None, lambda error: True):
        with pytest.raises(JournalError, match="on_divergence must be one of raise, stop, keep, extend, not"):
            shop.engine(Source()).resume_sync(journal, on_divergence=wrong)
    with pytest.raises(JournalError, match="on_divergence must be one of raise, stop, keep, not 'extend'"):
        shop.engine(Source()).replay_sync(journal, on_divergence="extend")
    with pytest.raises(JournalError, match="allow_repeat=True needs on_divergence='extend'"):
        shop.engine(Source()).resume_sync(journal, allow_repeat=True)

    assert before == journal.lines()


@pytest.mark.spec("requirements:X58")
def test_approval_allows_only_the_call_it_was_asked_for(shop):
    def agent(amount):
        @tool(in_thread=False)
        def pay(amount: int) -> str:
            """Pay."""
            shop.done.append(amount)
            return "paid"

        def handle_steps(ctx):
            paid = yield from ToolCall("pay", {"amount": amount})
            return paid.text + (yield from Ask("Well?"))

        return AgentDefinition("payer", tools=[pay], handle_steps=handle_steps)

    policy, journal = Policy([Rule.ask_for_tool("pay")]), MemoryJournal()
    before, after = Engine([agent(1)], permissions=policy), Engine([agent(999)], permissions=policy)
    shop.engines += [before, after]
    (question,) = before.run_sync("payer", journal=journal).pending_questions
    for key in (question.id, question.text):
        with pytest.raises(ReplayDivergence, match="/questions/0/details/amount"):
            after.resume_sync(journal, answers={key: "yes"}, on_divergence="keep")
    assert [] == shop.done

    (asked,) = after.resume_sync(journal, on_divergence="keep").pending_questions
    assert ({"amount": 999}, []) == (asked.details, shop.done)
    held = after.resume_sync(journal, answers={asked.id: "yes"})
    assert ("Well?", [999]) == (held.pending_questions[0].text, shop.done)
    # What has run already is not run again, whoever was asked about what.
    assert "paid!" == before.resume_sync(journal, answers={"Well?": "!"}, on_divergence="keep").output
    assert [999] == shop.done


class Stock(BaseModel):
    pairs: int


def asking_family(greeting, question, kept=1):
    def kid_steps(ctx):
        answer = yield from Ask(question)
        return {"pairs": len(ctx.prompt) + len(answer)}

    def ended_steps(ctx):
        yield from Perform(len, "x")
        return {"pairs": kept}

    def handle_steps(ctx):
        (first, second) = yield from Parallel(AgentCall("kid", greeting), AgentCall("ended", greeting))
        return [first.output.pairs, second.output.pairs, type(second.output).__name__, second.status.value]

    kid = AgentDefinition("kid", output_schema=Stock, handle_steps=kid_steps)
    ended = AgentDefinition("ended", output_schema=Stock, handle_steps=ended_steps)
    return AgentDefinition("boss", spawnable_agents=[kid, ended], handle_steps=handle_steps)


@pytest.mark.spec("requirements:X58", "requirements:X54")
def test_edited_children_continue_with_typed_outputs(shop, tmp_path):
    journal = FileJournal(tmp_path / "run.jsonl")
    before, after = Engine([asking_family("Hi", "Size?")]), Engine([asking_family("Hello", "Which size?", kept=7)])
    shop.engines += [before, after]
    (question,) = before.run_sync("boss", journal=journal).pending_questions
    result = after.resume_sync(journal, answers={"Size?": "42"}, on_divergence="keep")

    assert ("0.q0", [7, 1, "Stock", "completed"]) == (question.id, result.output)
    assert result.output == after.replay_sync(journal).output
    assert check(journal)
