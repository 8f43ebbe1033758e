"""
The event stream: order, observers, subscribers, log lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter, defaultdict
from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, Limits, tool
from stepengine.data.effects import Gather, Notify, Spawn
from stepengine.data.events import (
    DELTAS,
    LogLine,
    ModelFinished,
    ModelStarted,
    Notification,
    RunFinished,
    StepFinished,
    StepStarted,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
)
from stepengine.data.messages import TextPart, UserMessage
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import StepEngineError
from stepengine.redaction import GIVEN, RecordRedaction
from stepengine.runtime.hub import (
    MAX_KEPT_CHARS,
    MAX_SUBSCRIBERS,
    EventNumbers,
    Hub,
    NewsFilter,
    Subscription,
    Watcher,
)
from stepengine.testing import ScriptedModel, tool_call, tool_calls

A_KEY = "sk-ant-" + 8 * "abcd1234"


@tool
def look(n: int) -> int:
    """Look."""
    return n


def the_end():
    return RunResult(status=RunStatus.COMPLETED, state=AgentState())


def note(text):
    return Notification(message=text)


async def read(subscription):
    return [e async for e in subscription.events()]


@pytest.mark.spec("requirements:N10", "reliability:GN34")
async def test_end_event_is_emitted_once_and_replayed_to_late_subscribers():
    events = []
    hub = Hub([Watcher(events.append)])
    hub.finish(the_end())
    hub.finish(the_end())
    late = await read(hub.subscribe())

    assert ["run_finished"] == [e.type for e in events]
    assert ["run_finished"] == [e.type for e in late]


@pytest.mark.spec("reliability:GN34")
async def test_slow_subscriber_loses_deltas_first_and_gets_events_dropped():
    hub = Hub()
    slow = Subscription(hub, limit=4)
    for index in range(4):
        slow.put(TextDelta(seq=index, text=str(index)))
    for name in "abcd":
        slow.put(note(name))
    slow.put(TextDelta(text="late"))
    slow.put(note("one too many"))
    slow.put(RunFinished(result=the_end()))
    slow.end()
    events = await read(slow)

    assert ["events_dropped", *4 * ["notification"], "run_finished"] == [e.type for e in events]
    assert 6 == events[0].count
    assert ["a", "b", "c", "d"] == [e.message for e in events if e.type == "notification"]


@pytest.mark.spec("reliability:GN34", "reliability:I9")
@given(count=st.integers(1, 50))
async def test_dropped_events_are_counted_as_emitted_not_as_joined(count):
    slow = Subscription(Hub(), limit=4)
    for _ in range(count):
        slow.put(TextDelta(text="x"))
    for name in "abcd":
        slow.put(note(name))
    slow.end()
    events = await read(slow)

    assert ["events_dropped", *4 * ["notification"]] == [e.type for e in events]
    assert count == events[0].count


@pytest.mark.spec("reliability:GN34", "interfaces:IF6")
async def test_unread_queue_is_bounded_and_merges_deltas_without_losing_text():
    hub = Hub()
    slow = Subscription(hub, limit=100)
    said = {path: "".join([f"{path}{n} " for n in range(2_000)]) for path in ("", "1", "1.2")}
    for path, text in said.items():
        for piece in text.split(" ")[:-1]:
            slow.put(TextDelta(path=path, seq=3, text=f"{piece} "))
        slow.put(ToolInputDelta(path=path, seq=3, tool_name="a", text="{"))
        slow.put(ToolInputDelta(path=path, seq=3, tool_name="b", text="{"))

    assert len(slow.queue) <= 100

    slow.put(RunFinished(result=the_end()))
    slow.end()
    events = await read(slow)
    shown = {path: "".join([e.text for e in events if e.type == "text_delta" and e.path == path]) for path in said}

    assert said == shown
    assert ["a", "b"] * 3 == [e.tool_name for e in events if e.type == "tool_input_delta"]
    assert max(len(e.text) for e in events if e.type == "text_delta") <= 4_096
    assert "run_finished" == events[-1].type


@pytest.mark.spec("reliability:GN34")
async def test_run_continues_while_its_stream_is_unread(world):
    def machine(plan, state):
        for number in range(100 if plan.path else 10_100):
            yield Notify(Notification(path=plan.path, message=str(number)))
        if not plan.path:
            yield Gather((Spawn(0, "kid"), Spawn(1, "kid")))
        return world.done(state, "done")

    def child(parent, effect, path):
        return world.plan(path=path), AgentState(run_id=path)

    paths = Counter()
    tree = world.tree(machine, planner=child, observers=[lambda event: paths.update([event.path])])
    subscription = tree.hub.subscribe()
    finished = await tree.run()

    assert "done" == finished.output
    assert len(subscription.queue) <= 10_000
    assert {"": 10_104, "0": 100, "1": 100} == paths  # the root's own and both starts and ends of children

    tree.hub.finish(the_end())
    events = await read(subscription)

    assert {""} == {e.path for e in events if e.type == "notification"}
    assert 10_300 + 4 - (len(events) - 2) == next(e.count for e in events if e.type == "events_dropped")


async def test_a_reader_waits_for_events_and_may_leave():
    hub = Hub()
    subscription = hub.subscribe()

    async def first():
        async for event in subscription.events():
            return event
        return None

    task = asyncio.create_task(first())
    await asyncio.sleep(0)
    hub.emit(note("now"))

    assert "now" == (await task).message
    await asyncio.sleep(0)
    assert [] == hub.subscribers
    assert not hub.watched


@pytest.mark.spec("reliability:GN34", "interfaces:IF6")
def test_number_of_subscribers_is_bounded():
    hub = Hub()
    for _ in range(MAX_SUBSCRIBERS):
        hub.subscribe()
    with pytest.raises(StepEngineError, match="100 subscribers"):
        hub.subscribe()


@pytest.mark.spec("reliability:GN34")
def test_observer_is_dropped_after_ten_errors_with_one_warning(caplog):
    calls, seen = [], []

    def broken(event):
        calls.append(event)
        raise ValueError("observer")

    hub = Hub([Watcher(broken), Watcher(seen.append)])
    with caplog.at_level(logging.WARNING, "stepengine"):
        for _ in range(50):
            hub.emit(note("x"))

    assert 10 == len(calls)
    assert 50 == len(seen)
    assert 1 == len(hub.failures.warnings)
    assert 1 == sum(r.levelno == logging.WARNING for r in caplog.records)


@pytest.mark.spec("requirements:N8")
def test_observer_is_a_function_or_has_on_event():
    seen = []

    class Object:
        def on_event(self, event):
            seen.append(event)

    hub = Hub([Watcher(seen.append), Watcher(Object())])
    hub.emit(note("x"))

    assert 2 == len(seen)


@pytest.mark.spec("requirements:O1")
def test_raising_logger_breaks_no_run(caplog):
    class Broken:
        def info(self, message, **data):
            raise ValueError("no disk")

        debug = warning = error = info

    hub = Hub(logger=Broken())
    hub.emit(LogLine(level="info", message="hi"))

    assert ["the logger of the engine raised"] == [record.getMessage() for record in caplog.records]


@pytest.mark.spec("requirements:O1")
def test_standard_logger_is_silent_until_configured(capfd):
    Hub().emit(LogLine(level="error", message="nobody asked"))

    assert ("", "") == capfd.readouterr()


@pytest.mark.spec("interfaces:IF6", "interfaces:IF4")
def test_kept_events_are_bounded_by_text_and_hold_no_requests():
    hub = Hub()
    hub.start_storing_events()
    for number in range(40):
        hub.emit(ModelStarted(seq=number, model="t/m", request=ModelRequest(model="t/m", messages=())))
        for _ in range(100):
            hub.emit(TextDelta(seq=number, text="x" * 600))
            hub.emit(TextDelta(seq=number, text=""))
        if number % 2:
            hub.emit(ModelFinished(seq=number, model="t/m", reply=ModelReply("x" * 60_000)))
        hub.emit(note(str(number)))
        assert hub._ring._chars <= MAX_KEPT_CHARS

    kept = list(hub._ring.iterate_events_after(-1))
    assert sum(len(e.text) for e in kept if isinstance(e, TextDelta)) <= MAX_KEPT_CHARS
    assert {"38", "39"} <= {e.message for e in kept if isinstance(e, Notification)}
    assert not [e for e in kept if isinstance(e, ModelStarted) and e.request is not None]
    assert not [e for e in kept if isinstance(e, TextDelta) and e.seq % 2]
    assert hub._ring.start <= kept[0].index
    assert hub._ring._chars == sum(chars for _, chars in hub._ring._entries.values())


@pytest.mark.spec("reliability:R11")
async def test_secrets_are_redacted_in_tool_names_and_the_final_event():
    key = "hush-hush-1234"
    GIVEN.add(key, "OUR_KEY")
    hub = Hub()
    subscription = hub.subscribe()
    hub.emit(ToolInputDelta(path="", seq=1, tool_name=f"echo_{key}", tool_call_id=f"c-{key}", text="{}"))
    output = {"said": key, key: [f"user:{key}"]}
    hub.finish(RunResult(status=RunStatus.COMPLETED, state=AgentState(), output=output))
    called, end = await read(subscription)

    assert ("echo_<redacted:OUR_KEY>", "c-<redacted:OUR_KEY>") == (called.tool_name, called.tool_call_id)
    assert key not in json.dumps([called.to_json(), end.to_json()])
    assert "<redacted:OUR_KEY>" in json.dumps(end.to_json())
    assert output == end.result.output


@pytest.mark.parametrize("kept", [False, True])
async def test_subscriber_inside_an_observer_gets_the_current_event_once(kept: bool) -> None:
    subscriptions = []
    hub = Hub([Watcher(lambda _: subscriptions or subscriptions.append(hub.subscribe()))])
    if kept:
        hub.start_storing_events()
    hub.emit(note("a"))
    hub.emit(note("b"))
    hub.finish(the_end())

    assert ["a", "b"] == [event.message for event in (await read(subscriptions[0]))[:-1]]


def said(events):
    return [event.message if isinstance(event, Notification) else event.type for event in events]


async def test_unnumbered_events_of_an_only_reader_get_stable_indexes():
    hub = Hub()
    hub.set_run_id("r1")
    first = hub.subscribe()
    hub.emit(note("a"))
    hub.emit(note("b"))
    taken = list(first.pop_events())
    hub.emit(note("c"))
    second = hub.subscribe(after=taken[-1].id)
    hub.emit(note("d"))
    first.close()
    hub.emit(note("e"))
    hub.emit(note("f"))
    third = hub.subscribe()
    second.close()
    hub.emit(note("g"))
    hub.finish(the_end())
    events = await read(third)

    assert [("a", 0), ("b", 1)] == [(e.message, e.index) for e in taken]
    assert [(["g", "run_finished"], [6, 7])] == [(said(events), [e.index for e in events])]
    assert {("r1", hub.numbers.ensure_epoch())} == {(e.run_id, e.epoch) for e in [*taken, *events]}


async def test_event_filter_applies_from_the_moment_it_is_set():
    hub = Hub()
    reader = hub.subscribe()
    hub.emit(note("a"))
    hub.set_news_filter(lambda event: event.message != "old")
    hub.emit(note("old"))
    hub.emit(note("b"))
    events = reader.pop_events()

    assert [("a", 0), ("b", 1)] == [(e.message, e.index) for e in events]


def test_news_of_a_child_shows_steps_around_it():
    news = NewsFilter(lambda event: getattr(event, "message", "") == "new")
    events = [
        StepStarted(path="2", step=0, steps_remaining=1),
        StepStarted(step=0, steps_remaining=1),
        StepStarted(path="3", step=0, steps_remaining=1),
        Notification(path="3", message="old"),
        Notification(path="3.0", message="new"),
        Notification(path="3.0", message="new"),
        StepFinished(path="2", step=0, ended_turn=True, usage=Usage(), cost=None, status=RunStatus.COMPLETED),
    ]
    selected = [one for event in events for one in news.select_news(event)]

    assert [events[1], events[2], events[4], events[5]] == selected
    assert [True, True] == [event.resumed for event in selected[:2]]


async def test_late_reader_gets_alternating_deltas_in_order_of_their_ends():
    hub = Hub()
    hub.start_storing_events()
    for path, text in (("0", "a"), ("1", "b"), ("0", "c")):
        hub.emit(TextDelta(path=path, seq=1, text=text))
    hub.finish(the_end())
    *deltas, _ = await read(hub.subscribe())

    assert [("1", "b"), ("0", "ac")] == [(delta.path, delta.text) for delta in deltas]


async def test_started_tool_call_names_the_category_of_its_tool():
    @tool(category="search", in_thread=False)
    def find() -> str:
        """Find."""
        return "found"

    agent = AgentDefinition("a", model="m/m", tools=[find, look])
    replies = [tool_calls(tool_call("find"), tool_call("look", {"n": 1})), "done"]
    with Engine([agent], models=ScriptedModel(replies)) as engine:
        events = [event async for event in engine.stream("a", "go")]

    assert ["search", ""] == [event.category for event in events if event.type == "tool_started"]


def test_observed_events_of_a_run_share_an_epoch():
    seen = []
    with Engine([AgentDefinition("a", model="m/m")], models=ScriptedModel(["done"]), observers=[seen.append]) as engine:
        engine.run_sync("a", "go")
    (epoch,) = {event.epoch for event in seen}

    assert epoch
    assert [*range(len(seen))] == [event.index for event in seen]


def test_event_ids_are_found_only_in_their_own_epoch():
    numbers, events = EventNumbers(), [note("a"), note("b"), note("c")]
    numbers.run_id = "r1"
    epoch = numbers.ensure_epoch()
    numbers.assign_ids(events[0])
    numbers.assign_ids(*events[1:])

    assert [("r1", epoch, index) for index in range(3)] == [(e.run_id, e.epoch, e.index) for e in events]
    assert 2 == numbers.find_index(events[2].id)
    assert EventNumbers().find_index(events[2].id) is None
    with pytest.raises(StepEngineError, match="names an event that does not exist yet"):
        numbers.find_index(f"{epoch}-3")


async def test_secret_registered_while_reading_is_redacted_in_later_events():
    hub = Hub()
    reader = hub.subscribe()
    hub.emit(note("a"))
    GIVEN.add("hush-hush-5678", "OUR_KEY")
    hub.emit(note("hush-hush-5678"))
    hub.emit(note("b"))

    assert [("a", 0), ("<redacted:OUR_KEY>", 1), ("b", 2)] == [(e.message, e.index) for e in reader.pop_events()]


@pytest.mark.spec("reliability:R11")
async def test_secret_split_across_a_full_queue_is_redacted():
    GIVEN.add(OUR_KEY, "OUR_KEY")
    hub = Hub()
    reader = hub.subscribe()
    for number in range(9_999):
        hub.emit(note(str(number)))
    hub.emit(TextDelta(text=OUR_KEY[:6]))
    hub.emit(TextDelta(text=OUR_KEY[6:]))
    hub.finish(the_end())

    assert [*(event.text for event in await read(reader) if isinstance(event, TextDelta))] == ["<redacted:OUR_KEY>"]


STREAMS = [
    lambda text: TextDelta(seq=1, text=text),
    lambda text: TextDelta(seq=2, text=text),
    lambda text: TextDelta(path="0", seq=1, text=text),
    *[
        lambda text, number=number: ToolInputDelta(seq=3, tool_name="t", tool_call_id=f"c{number}", text=text)
        for number in range(2)
    ],
]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R11")
@given(cuts=st.tuples(*len(STREAMS) * [st.sets(st.integers(1, 20))]), order=st.randoms(use_true_random=False))
def test_secrets_are_redacted_in_calls_whose_deltas_alternate(cuts, order):
    """Each call shows its whole text before its end."""
    GIVEN.add(OUR_KEY, "OUR_KEY")
    events, text = [], f"key {OUR_KEY} is"
    hub = Hub([Watcher(events.append)])
    pieces = [
        [make(text[start:end]) for start, end in pairwise([0, *sorted(cut), len(text)])]
        for make, cut in zip(STREAMS, cuts, strict=True)
    ]
    while left := [stream for stream in pieces if stream]:
        hub.emit(order.choice(left).pop(0))
    for path, seq in (("", 1), ("", 2), ("", 3), ("0", 1)):
        hub.emit(ModelFinished(path=path, seq=seq, model="m"))
        ended = [e for e in events if isinstance(e, DELTAS) and (e.path, e.seq) == (path, seq)]
        shown = defaultdict(str)
        for event in ended:
            shown[getattr(event, "tool_call_id", "")] += event.text
        assert {"key <redacted:OUR_KEY> is"} == {*shown.values()}
    count = len(events)
    hub.finish(the_end())

    assert ["run_finished"] == said(events[count:])


async def test_only_reader_queue_is_bounded_and_reports_dropped_events():
    hub = Hub()
    reader = hub.subscribe()
    for number in range(10_005):
        hub.emit(note(str(number)))
    hub.finish(the_end())
    events = await read(reader)

    assert 10_000 == len(said(events)) - 2
    assert ("events_dropped", 5) == (events[0].type, events[0].count)
    assert ("run_finished", 10_005) == (events[-1].type, events[-1].index)


async def test_closing_a_reader_inside_its_loop_ends_the_stream():
    hub = Hub()
    subscription = hub.subscribe()
    for name in "abc":
        hub.emit(note(name))
    seen = []
    async for event in subscription.events():
        seen.append(event.message)
        subscription.close()

    assert ["a"] == seen


@pytest.mark.spec("requirements:O1")
async def test_log_line_is_written_at_once_with_only_a_reader(caplog):
    hub = Hub()
    reader = hub.subscribe()
    with caplog.at_level(logging.DEBUG, "stepengine"):
        hub.emit(LogLine(level="warning", message="now"))

    assert ["now"] == [record.getMessage() for record in caplog.records]
    assert ["log_line"] == said(reader.pop_events())


@pytest.mark.spec("reliability:GN34", "reliability:R11")
@pytest.mark.parametrize("seed", [*range(5), *[pytest.param(seed, marks=pytest.mark.deep) for seed in range(5, 20)]])
def test_only_reader_gets_the_same_events_as_beside_an_observer(
    seed: int,
) -> None:
    """
    What waits for an only reader gets its places late, is looked at for secrets all at once, and is joined by the hundred.
    """
    chance = random.Random(seed)
    if seed % 2:
        GIVEN.add(OUR_KEY, "OUR_KEY")
    hubs = Hub(), Hub([Watcher(lambda _: None)])
    readers = [hub.subscribe() for hub in hubs]
    got = [], []
    for _ in range(chance.randint(1, 8)):
        size = chance.choice([1, 5, 101, 102, 103, 350, 700])
        # Not all kinds together: what one holds would have the others looked at one by one, too.
        telling = chance.choice(range(4))
        piece = anything(chance, telling)
        for event in [piece] * size if chance.random() < 0.2 else [anything(chance, telling) for _ in range(size)]:
            for hub in hubs:
                hub.emit(attrs.evolve(event))
        for _ in range(chance.choice([0, 0, 1, 2, 5, 200])):
            for reader, events in zip(readers, got, strict=True):
                events.extend(reader.pop_events())
    for hub, reader, events in zip(hubs, readers, got, strict=True):
        hub.finish(the_end())
        # What is held back while the text may go on into a key is nothing to read, so there may be less than waits.
        while reader.queue:
            events.extend(reader.pop_events())

    alone, beside = ([(event, event.index) for event in events] for events in got)
    assert beside == alone
    assert not (seed % 2 and OUR_KEY in json.dumps([event.to_json() for event in got[0]]))


OUR_KEY = "hush-hush-1234"


def anything(chance, telling):
    at = {"path": chance.choice(["", "", "", "0"]), "seq": chance.choice([1, 1, 1, 2])}
    plain = [
        *[TextDelta(**at, text=text) for text in ("x", "yy", "a", "b", "z" * 2_000)],
        ThinkingDelta(**at, text="t"),
        *[ToolInputDelta(**at, tool_name=name, text="i") for name in "ab"],
        note("n"),
        started_with("n", at),
    ]
    holding = [
        TextDelta(**at, text=chance.choice(["hush", OUR_KEY, "hu", "sh-hush-1"])),
        ToolInputDelta(**at, tool_name=OUR_KEY, text="i"),
        note(OUR_KEY),
        started_with(OUR_KEY, at),
    ]
    return holding[telling] if chance.random() < 0.1 else chance.choice(plain)


def started_with(text, at):
    messages = Transcript([UserMessage((TextPart(text),))])
    return ModelStarted(
        **at, model="m", purpose="step", request=ModelRequest(model="m", messages=messages, tools=OFFER)
    )


OFFER = (ToolSpec(name="look", description="Look.", input_schema={"type": "object"}),)


def looks_in_all(steps: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """
    Run so many steps behind a prompt with a key, watched, and return how many values were looked at.
    """
    count = 0
    is_clean = RecordRedaction.is_clean

    def counting(self: RecordRedaction, value: object) -> bool:
        nonlocal count
        count += 1
        return is_clean(self, value)

    monkeypatch.setattr(RecordRedaction, "is_clean", counting)
    shown: list[ModelStarted] = []
    model = ScriptedModel([*[tool_call("look", {"n": n}) for n in range(steps)], "done"])
    engine = Engine(
        [AgentDefinition("a", model="scripted/m", tools=[look], limits=Limits(max_steps=steps + 1))],
        models={"scripted": model},
        observers=[lambda event: shown.append(event) if type(event) is ModelStarted else None],
    )
    engine.run_sync("a", f"never say {A_KEY}").unwrap()
    monkeypatch.undo()

    assert steps + 1 == len(shown)
    for number, event in enumerate(shown):
        assert event.request is not None
        assert 1 + 2 * number == len(event.request.messages)
        assert "never say <redacted:K>" == event.request.messages[0].text
    return count


@pytest.mark.speed
@pytest.mark.spec("performance:Q1", "reliability:R11")
def test_redaction_scans_only_new_messages_of_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    GIVEN.add(A_KEY, "K")
    counts = [looks_in_all(steps, monkeypatch) for steps in (20, 40, 60)]

    assert counts[2] - counts[1] == counts[1] - counts[0]
