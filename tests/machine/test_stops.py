"""The world stops a run anywhere: the history pairs, the handler is closed, nothing more is asked for."""

from __future__ import annotations

import pytest

from stepengine.data import yields as y
from stepengine.data.events import (
    HandlerNotice,
    HookFailed,
    LogLine,
    PermissionDecided,
    PhaseChanged,
    RunFailed,
    StepFinished,
    StepStarted,
)
from stepengine.data.hooks import Change, Hooks
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.outcomes import Stop, Value
from stepengine.data.questions import Decision
from stepengine.data.state import RunStatus
from stepengine.errors import LimitExceeded, ReplayDivergence, StepEngineError
from stepengine.machine.plan import ToolBody
from tests.machine.world import ADD, STEP, STEP_ALL, World, adding, agent, binding, call, child, play, reply, thought

ALLOWED = (HandlerNotice, HookFailed, LogLine, PermissionDecided, PhaseChanged, RunFailed, StepFinished)
KINDS = {
    "suspended": RunStatus.SUSPENDED,
    "cancelled": RunStatus.CANCELLED,
    "shutdown": RunStatus.CANCELLED,
    "limit": RunStatus.FAILED,
    "diverged": RunStatus.FAILED,
}
SAFE = binding("safe", parallel_safe=True)
TOOLS = ("add", "safe", "spawn_agents", "ask_user", "end_turn")


class Rich:
    """A scenario in which every kind of effect happens, hooks of all points included, and what was closed."""

    def __init__(self):
        self.closed: list[str] = []
        self.entered: list[str] = []

    def handler(self, ctx):
        self.entered.append("handler")
        try:
            yield y.Perform(lambda: 1)
            yield y.ToolCall("add", {"a": 1})
            yield from self.helper()
            yield y.GenerateN(2)
            yield y.Complete("x")
            yield y.StepText('text <tool_call>{"name": "add"}</tool_call>')
            yield STEP_ALL
        finally:
            self.closed.append("handler")

    def helper(self):
        self.entered.append("helper")
        try:
            calls = [y.ToolCall("add", {"a": 2}), y.AgentCall("helper"), y.Perform(int), y.Ask("Which?")]
            yield y.Parallel(*calls)
            yield y.AgentCall("helper")
            yield y.Ask("Why?")
        finally:
            self.closed.append("helper")

    def hook(self, word):
        def hook(ctx, *args):
            self.entered.append(word)
            try:
                yield y.Perform(lambda: 1)
            finally:
                self.closed.append(word)

        return hook

    def judge(self, ctx, asked):
        return Decision.ask() if asked.input.get("a") in (5, 6, 7) else None

    def play(self, at=()):
        entries = [{"agent_type": "helper"}, {"agent_type": "helper"}]
        world = World(
            replies=[
                *[reply("candidate")] * 2,
                reply("complete"),
                reply(thought("t"), "text", call("add", a=5), call("spawn_agents", agents=entries), call("add", a=3)),
                reply(call("safe", a=6), call("safe", a=7), call("safe", a=8), call("nope")),
                reply(call("ask_user", questions=[{"question": "So?"}]), call("end_turn")),
            ],
            tools={"add": adding, "safe": adding},
            answers={f"q{k}": "yes" for k in range(99)},
            children={"helper": child()},
            inputs={20: [UserMessage("hello")]},
            at=dict(at),
        )
        points = {p: [self.hook(p)] for p in ("pre_run", "pre_step", "post_tool", "post_step", "on_stop", "post_run")}
        hooks = Hooks(**points, pre_tool=[self.hook("pre_tool"), self.judge], on_suspend=[lambda ctx, asked: None])
        return play(agent(self.handler, tools=TOOLS, hooks=hooks), world, tools=[ADD, SAFE])


WHOLE = Rich().play()
COUNT = len(WHOLE.leaves)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec(
    "interfaces:IF11",
    "reliability:I12",
    "requirements:B16",
    "generator-contract:G40",
    "reliability:I1",
    "reliability:I2",
    "reliability:I9",
    "reliability:I6",
    "requirements:X40",
)
@pytest.mark.parametrize(("kind", "every"), [(kind, 5 if kind in ("shutdown", "diverged") else 1) for kind in KINDS])
def test_stop_at_any_effect_leaves_history_paired_and_handler_closed(kind, every):
    """
    A shutdown is a cancellation and a divergence a failure, as a limit is: for these two, each fifth effect.
    """
    for k in range(0, COUNT, every):
        check_stop(kind, k)


def check_stop(kind, k):
    rich = Rich()
    played = rich.play({k: Stop(kind)})
    assert played.status is KINDS[kind]
    assert sorted(rich.entered) == sorted(rich.closed)
    assert [type(e) for e in played.leaves] == [type(e) for e in WHOLE.leaves[: len(played.leaves)]]
    stopped = next(i for i, e in enumerate(played.emitted) if e is stopping(played, k))
    for effect in played.emitted[stopped + 1 :]:
        assert isinstance(effect.event, ALLOWED)
    begun = [event.step for event in played.seen(StepStarted)]
    ended = [(event.step, event.status) for event in played.seen(StepFinished)]
    assert [step for step, _ in ended] == begun
    assert {status for _, status in ended[:-1]} <= {RunStatus.COMPLETED}
    assert not begun or ended[-1][1] in (KINDS[kind], RunStatus.COMPLETED)
    assert (played.output, played.error is None) == (None, kind not in ("limit", "diverged"))
    results = [m.status for m in played.history if m.role == "tool"]
    assert set(results) <= {"ok", "error", "skipped", "pending" if kind == "suspended" else "cancelled"}
    prefix = WHOLE.history[: shared(played.history, WHOLE.history)]
    assert len(played.history) - len(prefix) <= 5


def stopping(played, k):
    """Return what was emitted when effect *k* was."""
    for effect in played.emitted:
        if any(leaf.seq == k for leaf in getattr(effect, "effects", (effect,)) if hasattr(leaf, "seq")):
            return effect
    raise AssertionError(k)


def shared(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.spec("reliability:I12")
def test_harder_stop_wins_and_questions_are_collected():
    def handler(ctx):
        yield y.Parallel(y.Ask("A?"), y.Perform(int), y.Ask("B?"))

    both = play(agent(handler), World(at={1: Value(1)}))
    assert (both.status, [q.text for q in both.pending]) == (RunStatus.SUSPENDED, ["A?", "B?"])
    harder = play(agent(handler), World(at={1: Stop("cancelled", 9)}))
    assert (harder.status, harder.pending) == (RunStatus.CANCELLED, ())


def test_suspended_run_has_no_text_of_an_earlier_step():
    def handler(ctx):
        yield STEP
        yield y.Ask("A?")

    played = play(agent(handler), World(replies=[reply("earlier")]))
    assert (played.status, played.text) == (RunStatus.SUSPENDED, "")


@pytest.mark.spec("generator-contract:G36")
@pytest.mark.parametrize("error", [None, LimitExceeded("too late", kind="seconds"), ReplayDivergence("other")], ids=str)
def test_a_stop_carries_its_error(error):
    played = play(agent(), World(at={0: Stop("limit", error=error)}))
    assert (played.status, played.error) == (RunStatus.FAILED, error or StepEngineError("the run was stopped: limit"))
    assert played.seen(RunFailed)[0].kind == type(played.error).__name__


def test_messages_that_were_sent_before_the_stop_are_kept():
    def handler(ctx):
        yield y.Perform(int)
        yield y.Perform(int)

    played = play(agent(handler), World(inputs={0: [UserMessage("wait")]}, at={1: Stop("cancelled")}))
    assert played.shown == ["user: go", "user: wait"]


def test_change_of_a_finished_call_survives_a_later_stop():
    changing = ToolResult.text("x", change=Change(context={"a": 1}))
    world = World(replies=[reply(call("add"), call("add"))], tools={"add": lambda: changing}, at={2: Stop("suspended")})
    played = play(agent(tools=["add"]), world, tools=[ADD])
    assert (played.state.context, played.history[-1].status) == ({"a": 1}, "pending")


@pytest.mark.spec("programs:PG8")
@pytest.mark.parametrize("kind", KINDS)
def test_time_limit_of_a_body_changes_no_stop(kind):
    def steps(ctx):
        yield y.Parallel(y.ToolCall("add"), y.ToolCall("add"))

    def noting(ctx, asked, result):
        yield y.Perform(int)

    def ended(**limit):
        body = ToolBody(tool_name="release", tool_call_id="c1", by_model=True, steps=steps, **limit)
        world = World(tools={"add": adding}, at={1: Stop(kind)})
        played = play(agent(tools=["add"], hooks=Hooks(post_tool=[noting])), world, tools=[ADD], body=body)
        return played.status, played.warnings

    assert ended() == ended(timeout=60.0) == ended(timeout=0.0)
