"""The protocol's tables: nothing of the closed unions is missing, and the real machine does what each row says."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, get_args

import attrs
import pytest

from stepengine.data import record_sizes
from stepengine.data import yields as y
from stepengine.data.effects import EFFECTS, Leaf, Notify, RunInBackground
from stepengine.data.events import ToolFinished, ToolStarted
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Value
from stepengine.data.tools import Driving, How, Yielding
from stepengine.data.yields import YIELDS
from stepengine.errors import BadYield, InputError
from stepengine.machine import hooks as hooking
from stepengine.machine.protocol import (
    CALLS,
    ORDER,
    collect_order_rows,
    format_yieldable_names,
    get_protocol_token,
    get_yield_rows,
)
from tests.machine.world import (
    ADD,
    EXAMPLES,
    OF_CHILDREN,
    STEP,
    World,
    adding,
    agent,
    binding,
    call,
    child,
    hooks,
    limits,
    play,
    reply,
)

LONG = "x" * 1_000
ROWS = {row.name: row for row in YIELDS}


def driving(given: Any, background: Any) -> Any:
    """What a tool does whose steps are the run's own."""
    yield y.Sleep(5)
    return ToolResult.text("done")


RELEASE = attrs.evolve(binding("release"), runs=Yielding(lambda *_: iter(()), lambda *_: ToolResult()))
DRIVE = attrs.evolve(binding("drive"), runs=Driving(driving))
QUESTION = {"questions": [{"question": "Sure?"}]}
CALLED: dict[How, tuple[str, dict[str, Any]]] = {
    "ordinary": ("add", {"a": 1}),
    "control": ("write_todos", {"todos": []}),
    "spawns": ("spawn_agents", {"agents": [{"agent_type": "helper"}]}),
    "asks": ("ask_user", QUESTION),
    "yields": ("release", {"a": 1}),
    "drives": ("drive", {"a": 1}),
}


def world(**fields: Any) -> World:
    return World(
        replies=lambda _: reply("hm"),
        tools={"add": adding, "release": adding},
        children={"helper": child()},
        answers={f"q{seq}": "yes" for seq in range(9)},
        mail={"news": [{"n": 1}]},
        **fields,
    )


def asking(asked: Any, sent: list[Any], *, of: str = "") -> Any:
    """Return a handler that yields *asked*, which is about a child where *of* says so."""

    def handler(ctx: Any) -> Any:
        if of in OF_CHILDREN:
            yield EXAMPLES["Start"]
        sent.append((yield asked))

    return handler


def tokens(played: Any) -> list[str]:
    """Return the tokens of what was handed out, events left out."""
    return [get_protocol_token(effect) for effect in played.emitted if type(effect) is not Notify]


def test_the_code_is_driven_by_the_table():
    """What is accepted, what it costs and what messages say of it: none of them is written down twice."""
    named = hooking.ACCEPTED.replace(" or ", ", ").removesuffix(" (all from stepengine)").split(", ")
    assert sorted(named) == sorted([row.name for row in YIELDS if row.for_hooks])
    assert set(get_yield_rows("hook")) == {row.kind for row in YIELDS if row.for_hooks}
    assert all(row.name in format_yieldable_names() for row in YIELDS)
    tokens_of_order = {token for state in ORDER.values() for token in state}
    used = {token for row in YIELDS for token in row.effects} | {row.effect for row in CALLS.values() if row.effect}
    assert {t if t != "CallTool" else "CallTool:model" for t in used} <= tokens_of_order
    fields = {field.name for field in attrs.fields(y.StepResult)}
    assert {row.sent for row in YIELDS} <= fields


@pytest.mark.parametrize("row", YIELDS, ids=lambda row: row.name)
def test_yieldable_leads_to_the_effects_of_its_row(row):
    sent: list[Any] = []
    played = play(agent(asking(EXAMPLES[row.name], sent, of=row.name), tools=["add"]), world(), tools=[ADD])
    before = int(row.name in OF_CHILDREN)
    assert row.effects == tuple(tokens(played)[before : before + len(row.effects)])
    assert (getattr(sent[0], row.sent) in (None, ())) == (row.gives == "nothing")
    way = collect_order_rows(row)
    assert row.state in ORDER
    assert all(any(token in way[state] for state in way) for token in row.effects if row.state != "handler")
    assert all(token in ORDER["handler"] for token in row.effects if row.state == "handler")


@pytest.mark.spec("generator-contract:G47")
@pytest.mark.parametrize("row", YIELDS, ids=lambda row: row.name)
def test_yieldable_costs_the_actions_of_its_row(row):
    before = int(row.name in OF_CHILDREN)
    one = before + (1 if row.actions is None else row.actions)
    for spare in range(before, before + 2):
        handler = asking(EXAMPLES[row.name], [], of=row.name)
        played = play(agent(handler, tools=["add"], limits=limits(max_actions=spare)), world(), tools=[ADD])
        ran_out = played.finished.limit is not None and played.finished.limit.kind == "actions"
        assert ran_out == (one > spare)


@pytest.mark.spec("generator-contract:G47")
@pytest.mark.parametrize("yielded", [y.ToolCall("add", {"a": LONG}), y.StepText(LONG)], ids=["call", "text"])
@pytest.mark.parametrize("spare", [2, 3])
def test_yield_refused_for_its_length_costs_one_action(yielded, spare, monkeypatch):
    monkeypatch.setattr(record_sizes, "MAX_VALUE_BYTES", len(LONG) - 1)

    def handler(ctx):
        for _ in range(3):
            with pytest.raises(InputError, match="too long"):
                yield yielded

    played = play(agent(handler, tools=["add"], limits=limits(max_actions=spare)), tools=[ADD])
    assert (played.finished.limit is None) == (spare == 3)


@pytest.mark.parametrize("how", CALLS)
def test_call_kind_leads_to_the_effect_of_its_row(how):
    name, given = CALLED[how]
    tools = [ADD, RELEASE, DRIVE]
    played = play(agent(asking(y.ToolCall(name, given), []), tools=["add", "release", "drive"]), world(), tools=tools)
    row = CALLS[how]
    expected = ["AwaitTime"] if how == "drives" else [row.effect] * bool(row.effect)
    assert expected == [t.removesuffix(":handler") for t in tokens(played)]
    shown = [len(played.seen(ToolStarted)), len(played.seen(ToolFinished))]
    assert shown == ([1, 1] if row.is_shown else [0, 0])
    by_model = [reply(call(name, **given)), reply("x")]
    offered = [] if how == "spawns" else [name]
    if offered:
        played = play(agent(tools=offered), attrs.evolve(world(), replies=by_model), tools=tools)
        effects = [t.removesuffix(":model") for t in tokens(played) if not t.startswith("CallModel")]
        assert effects == expected


@pytest.mark.parametrize("row", YIELDS, ids=lambda row: row.name)
def test_table_decides_members_of_parallel_and_yields_of_hooks(row):
    asked = EXAMPLES[row.name]
    start = ["Gather"] * (row.name in OF_CHILDREN)
    if row.is_member:
        together = asking(y.Parallel(asked, y.Perform(int)), [], of=row.name)
        played = play(agent(together, tools=["add"]), world(), tools=[ADD])
        assert tokens(played) == [*start, "Gather"]
        assert len(played.leaves) == len(start) + (len(asked.members) if row.name == "Race" else 1) + 1
    else:
        with pytest.raises(BadYield):
            y.Parallel(asked, y.Perform(int))

    def hook(ctx: Any) -> Any:
        yield asked

    handler = asking(STEP, [], of=row.name)
    played = play(agent(handler, hooks=hooks(pre_step=[hook])), world(), tools=[ADD])
    assert (type(played.finished.error) is BadYield) == (not row.for_hooks)
    if row.for_hooks:
        own = ["CallTool:hook"] if row.name == "ToolCall" else [*row.effects]
        expected = [*start, *own, "CallModel:step"]
        # A child that nobody waited for is ended with its run.
        assert tokens(played) == [*expected, *["EndRuns"] * (row.name == "Send")]


def test_effect_outcome_has_the_type_of_its_row():
    holds = {row.cls: row.outcome for row in EFFECTS}
    seen = set()
    examples = [*EXAMPLES.items(), *[("ToolCall", y.ToolCall(name, given)) for name, given in CALLED.values()]]
    for name, asked in examples:
        tools = ["add", "release", "drive"]
        played = play(agent(asking(asked, [], of=name), tools=tools), world(), tools=[ADD, RELEASE, DRIVE])
        for effect in played.leaves:
            outcome = played.outcomes[effect.seq]
            assert type(outcome) is Value
            assert isinstance(outcome.value, holds[type(effect)])
            seen.add(type(effect))
    assert seen == set(get_args(Leaf)) - {RunInBackground}


def test_state_sent_to_a_hook_includes_its_own_usage():
    """What a hook's own model call used stands in the state that it is sent with the reply."""
    states = []

    def hook(ctx: Any) -> Any:
        before = ctx.state.usage.requests
        done = yield y.Complete("?")
        states.append(done.agent_state.usage.requests - before)

    played = play(
        agent(lambda ctx: (yield y.Perform(int)), hooks=hooks(pre_run=[hook])),
        World(replies=[attrs.evolve(ModelReply("x"), cost=Decimal(0))]),
        tools=[binding("add")],
    )
    assert played.finished.error is None
    assert states == [1]
