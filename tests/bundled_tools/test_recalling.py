"""
``recall_history``: what was left out of a conversation is found again, whole, in every run of the same records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    AgentState,
    AssistantMessage,
    Engine,
    Hooks,
    StepContext,
    Steps,
    ToolCall,
    ToolMessage,
    UserMessage,
    tool,
)
from stepengine.context import compact, mask_tool_results, output_cache, prune_to_summary, summarize, truncate
from stepengine.data.codec import from_json, to_json
from stepengine.data.messages import ImagePart, Message, TextPart, ThinkingPart, ToolCallPart
from stepengine.data.tools import ToolAnnotations
from stepengine.data.transcript import Transcript
from stepengine.errors import ToolInputError
from stepengine.journal import MemoryJournal
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import recall_history_tool
from stepengine.tools.bundled.history_tool import (
    ANSWER_CHARS,
    MAX_ANSWER_CHARS,
    QUERY_CHARS,
    list_removed_messages,
    message_to_text,
)

OURS = {"SUMMARY", "CONVERSATION_SUMMARY", "CONTINUE_PROMPT"}
PLACE = re.compile(r"\[\d+ more messages; go on with place=(\d+)\]\Z")
OFFSET = re.compile(r"\[[\d,]+ more characters of it; go on with place=(\d+), offset=(\d+)\]\Z")
TITLE = re.compile(r"--- (\d+) of \d+: \w+.*\n")
POLICIES: list[Callable[[int, bool], Any]] = [
    lambda limit, record: truncate(limit, replace_record=record),
    lambda limit, record: mask_tool_results(limit, replace_record=record),
    lambda limit, record: prune_to_summary(limit, replace_record=record),
    lambda limit, record: summarize(limit, summarizer=lambda _: "What mattered.", replace_record=record),
    lambda limit, _: output_cache(limit * 2),
]


@tool(in_thread=False, annotations=ToolAnnotations(read_only=True))
def dig(depth: int, size: int) -> str:
    """
    Dig.
    """
    return f"layer{depth} " + "x" * size + f" Gem{depth}"


def asked(**given: Any) -> ToolCall:
    return ToolCall("recall_history", given, include_tool_call=False)


def reading(limit: int) -> Iterator[Any]:
    """
    Read all that was left out, page by page; returns the texts of the messages.
    """
    texts: dict[int, str] = {}
    place, offset = 1, 1
    while place:
        turn = yield asked(place=place, offset=offset, limit=limit)
        answer = turn.tool_result.text
        assert len(answer) <= 2 * limit + 400
        further, more = OFFSET.search(answer), PLACE.search(answer)
        place, offset = (int(further[1]), int(further[2])) if further else (int(more[1]) if more else 0, 1)
        end = (further or more).start() - 1 if further or more else len(answer)
        pieces = TITLE.split(answer[:end])
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            is_last = int(number) == int(pieces[-2])
            texts[int(number)] = texts.get(int(number), "") + (piece if is_last else piece.removesuffix("\n"))
    return [texts[number] for number in sorted(texts)]


@attrs.define
class Seen:
    """
    What a run of the digger held at some time, and its last state.
    """

    messages: dict[Message, None] = attrs.field(factory=dict)
    state: AgentState = attrs.field(factory=AgentState)

    @property
    def gone(self) -> list[str]:
        """The texts of what is shown no longer; a summary that another one replaced in the view was no part of the conversation."""
        shown = set(self.state.view)
        return [message_to_text(m) for m in self.messages if m not in shown and not (OURS & {*getattr(m, "tags", ())})]


@attrs.frozen
class World:
    """
    How a digger works: under which policy, or with a handler that compacts at every second step, and what its tool gives.
    """

    policy: Any
    sizes: tuple[int, ...]
    page: int = 300

    def engine(self, *, said: int = 0) -> tuple[Engine, Seen]:
        """
        Return an engine whose agent digs and then reads all that was left out, and what it sees; *said* replies are known.
        """
        seen = Seen()

        def handle_steps(ctx: StepContext) -> Steps[list[str]]:
            steps = 0
            while True:
                turn = yield STEP
                seen.state, steps = turn.agent_state, steps + 1
                seen.messages.update(dict.fromkeys(seen.state.message_history))
                if turn.steps_complete:
                    break
                if self.policy is None and steps % 2 == 0:
                    yield from compact(seen.state, summarize(summarizer=lambda old: f"Summary of {len(old)}."))
            return (yield from reading(self.page)) if list_removed_messages(seen.state) else []

        hooks = Hooks() if self.policy is None else Hooks(pre_step=[self.policy])
        agent = AgentDefinition(
            "digger", model="t/m", tools=[dig, recall_history_tool()], handle_steps=handle_steps, hooks=hooks
        )
        replies = [tool_call("dig", {"depth": n, "size": size}, text=f"Word {n}") for n, size in enumerate(self.sizes)]
        return Engine([agent], models={"t": ScriptedModel([*replies, text("done")][said:])}), seen


worlds = st.builds(
    lambda which, record, limit, sizes, page: World(
        POLICIES[which](limit, record) if which < len(POLICIES) else None, tuple(sizes), page
    ),
    st.integers(0, len(POLICIES)),
    st.booleans(),
    st.integers(150, 900),
    st.lists(st.integers(0, 700), min_size=1, max_size=9),
    st.integers(60, 900),
)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:DM21")
@settings(max_examples=20, deadline=None)
@given(worlds)
def test_every_removed_message_is_recalled_whole(world: World) -> None:
    engine, seen = world.engine()
    result = engine.run_sync("digger", "Dig for gems.")
    assert result.status == "completed", result.error

    assert set(seen.gone) <= set(result.output)
    assert [message_to_text(m) for m in list_removed_messages(seen.state)] == result.output


@pytest.mark.spec("requirements:DM21")
@settings(max_examples=40, deadline=None)
@given(worlds, st.floats(0, 1))
@pytest.mark.deep
def test_recall_is_the_same_after_crash_replay_and_fork(world: World, share: float) -> None:
    journal = MemoryJournal()
    engine, _ = world.engine()
    result = engine.run_sync("digger", "Dig for gems.", journal=journal)
    lines = journal.lines()
    cut = MemoryJournal(lines[: 2 + int(share * (len(lines) - 2))])
    said = sum(
        r.kind == "result" and b'"model_reply"' in line for r, line in zip(cut.records(), cut.lines(), strict=True)
    )
    at = max([seq for (path, seq) in cut.history().results if not path and seq >= 0], default=-1)
    kept = sum(intent.type == "model_call" and seq <= at for (_, seq), intent in journal.history().intents.items())

    assert result == world.engine()[0].replay_sync(journal)
    assert result.output == world.engine(said=said)[0].resume_sync(cut).output
    forked = world.engine(said=kept)[0].fork_sync(journal, at=at)
    assert result.output == forked.output
    assert list_removed_messages(result.state) == list_removed_messages(from_json(to_json(result.state)))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:DM21")
@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=25), st.data())
def test_every_word_of_a_message_finds_it_within_the_limit(said: list[str], data: Any) -> None:
    state = AgentState(message_history=Transcript([UserMessage(t) for t in said]), view=Transcript())
    chosen = data.draw(st.sampled_from(range(len(said))))
    words = said[chosen].split()
    if not words:
        return
    query = data.draw(st.sampled_from([" ".join(words), words[-1], words[0]]))
    found: set[int] = set()
    place = 1
    while place:
        answer = answered(state, query=query, place=place)
        found |= {int(n) for n in re.findall(r"^--- (\d+) of \d+: user$", answer, re.MULTILINE)}
        more = re.search(r"\[more messages hold these words; go on with place=(\d+)\]\Z", answer)
        place = int(more[1]) if more else 0
        assert len(answer) < 6_000

    assert chosen + 1 in found


@pytest.mark.spec("requirements:DM21")
@pytest.mark.parametrize(
    ("said", "query"),
    [("Apple", "aPPLE"), ("\u0130 Apple", "apple"), ("\u039f\u0394\u039f\u03a3.", "\u03bf\u03b4\u03bf\u03c3")],
)
def test_search_ignores_case_and_punctuation(said: str, query: str) -> None:
    state = AgentState(message_history=Transcript([UserMessage(said)]), view=Transcript())

    assert f"--- 1 of 1: user\n{said}" == answered(state, query=query)


def answered(state: AgentState, **given: Any) -> str:
    """
    Return what the tool says in a run that goes on from *state*.
    """

    def handle_steps(ctx: StepContext) -> Steps[str]:
        turn = yield asked(**given)
        return turn.tool_result.text

    agent = AgentDefinition("reader", tools=[recall_history_tool()], handle_steps=handle_steps)
    said: str = Engine([agent]).run_sync("reader", previous=state).unwrap()
    return said


@pytest.mark.spec("requirements:DM21")
def test_a_long_message_is_recalled_in_parts() -> None:
    long = "".join(f"{n:06}" for n in range(20_000))
    state = AgentState(message_history=Transcript([UserMessage(long), UserMessage("short")]), view=Transcript())
    first = answered(state)

    assert len(first) < ANSWER_CHARS + 200
    assert first.endswith(f"[110,000 more characters of it; go on with place=1, offset={ANSWER_CHARS + 1}]")
    assert f"{long[119_000:]}\n--- 2 of 2: user\nshort" in answered(state, place=1, offset=119_001)
    assert "There is no message 3; 2 were left out." == answered(state, place=3)
    assert "None of the 2 messages" in answered(state, query="nowhere")
    assert "Nothing was left out of this conversation." == answered(AgentState.from_messages([UserMessage("here")]))
    for wrong in ({"limit": MAX_ANSWER_CHARS + 1}, {"query": "x" * (QUERY_CHARS + 1)}, {"place": 0}, {"offset": 0}):
        with pytest.raises(ToolInputError, match=next(iter(wrong))):
            answered(state, **wrong)


@pytest.mark.spec("requirements:DM21")
def test_recalled_messages_include_thoughts_calls_and_markers_for_images() -> None:
    image = ImagePart(url="https://a.example/b.png")
    reply = AssistantMessage((ThinkingPart("hm"), TextPart("Look."), ToolCallPart("c1", "see", {"at": [1]})))

    assert '[thought] hm\nLook.\n[call of see c1] {"at":[1]}' == message_to_text(reply)
    assert "[result of see c1, error]\nblurred\n[image]" == message_to_text(
        ToolMessage("c1", "see", ("blurred", image), "error")
    )


@pytest.mark.spec("requirements:DM21")
def test_the_next_turn_recalls_messages_removed_in_an_earlier_one() -> None:
    def engine(*replies: Any) -> Engine:
        agent = AgentDefinition(
            "digger",
            model="t/m",
            tools=[dig, recall_history_tool()],
            hooks=Hooks(pre_step=[truncate(200, replace_record=True)]),
        )
        return Engine([agent], models={"t": ScriptedModel(replies)}, sessions=sessions)

    sessions = MemorySessions()
    digs = [tool_call("dig", {"depth": n, "size": 300}) for n in range(4)]
    engine(*digs, text("done")).run_sync("digger", "Dig.", session_id="s")
    later = engine(tool_call("recall_history", {"query": "GEM0"}), text("There."))
    result = later.run_sync("digger", "Where was the first gem?", session_id="s")
    (answer,) = [log.result.text for log in result.tool_calls]

    assert answer.startswith("--- ")
    assert "Gem0" in answer


@pytest.mark.spec("requirements:DM21")
@pytest.mark.parametrize("inherits", [True, False])
def test_recall_in_a_yielding_tool_and_child_sees_inherited_history(inherits: bool) -> None:
    @tool(uses=["recall_history"])
    def look_up(word: str) -> Steps[str]:
        """
        Look a word up.
        """
        turn = yield asked(query=word)
        return turn.tool_result.text

    def child_steps(ctx: StepContext) -> Steps[str]:
        turn = yield asked(query="gem")
        return turn.tool_result.text

    child = AgentDefinition(
        "child", tools=[recall_history_tool()], handle_steps=child_steps, include_message_history=inherits
    )

    def handle_steps(ctx: StepContext) -> Steps[list[str]]:
        yield ToolCall("add_message", {"role": "user", "content": "The gem is blue."})
        yield ToolCall("set_messages", {"messages": []}, include_tool_call=False)
        own = yield asked(query="gem")
        inner = yield ToolCall("look_up", {"word": "gem"}, include_tool_call=False)
        told = yield from AgentCall("child", "Which gem?")
        return [own.tool_result.text, inner.tool_result.text, told]

    lead = AgentDefinition(
        "lead", tools=[recall_history_tool(), look_up], handle_steps=handle_steps, spawnable_agents=[child]
    )
    journal = MemoryJournal()
    result = Engine([lead]).run_sync("lead", "Go.", journal=journal)
    own, inner, told = result.unwrap()

    assert own == "--- 2 of 2: user\nThe gem is blue."
    assert inner == own
    assert told == (own if inherits else "Nothing was left out of this conversation.")
    assert result == Engine([lead]).replay_sync(journal)
