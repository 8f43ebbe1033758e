"""Hooks: where they are called, what they may return, what their errors do (requirements H, X2, X3)."""

from __future__ import annotations

import re
from datetime import timedelta

import attrs
import pytest

from stepengine.data import yields as y
from stepengine.data.events import HookFailed, LogLine
from stepengine.data.hooks import CHANGE_POINTS, Change, Hooks
from stepengine.data.json import JsonDict
from stepengine.data.messages import AssistantMessage, ToolCallPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.questions import Decision
from stepengine.data.state import RunInfo, RunStatus
from stepengine.errors import LimitExceeded, LimitReached, ModelError, ToolError, TranscriptError
from tests.machine.world import ADD, CREATED, STEP, World, adding, agent, binding, call, limits, play, reply

STRICT = binding("strict", lambda value: None if "a" in value else "a: missing")
SPENT = LimitExceeded("no tokens", kind="tokens")
POINTS = ("pre_run", "pre_step", "pre_tool", "post_tool", "post_step", "on_stop", "post_run")


def run(hooks, *replies, handler=None, world=None, **fields):
    given = replies or (reply(call("add", a=1)), reply("done"))
    world = world or World(replies=given, tools={"add": adding, "strict": adding})
    plan = {key: fields.pop(key) for key in ("info", "path", "state") if key in fields}
    return play(agent(handler, tools=["add", "strict"], hooks=hooks, **fields), world, tools=[ADD, STRICT], **plan)


async def coroutine(*args):
    """An async hook."""


class Future:
    def __await__(self):
        yield


def raising(*args):
    raise ValueError("bad luck")


def stopping(*args):
    raise StopIteration


def wild(*args):
    raise GeneratorExit


def greedy(*args):
    raise LimitReached(SPENT)


def generating(*args):
    yield y.Perform(lambda: 1)
    raise ValueError("later")


def garbage(*args):
    return object()


def bad_yield(*args):
    yield STEP


def missing_tool(*args):
    yield y.ToolCall("nope")


def endless(*args):
    while True:
        try:
            yield "garbage"
        except Exception:
            continue


NAMES = [row.name for row in y.YIELDS if row.for_hooks]
BROKEN = {
    "raises": (raising, r"raised ValueError: bad luck \(.*test_hooks.py:\d+\)"),
    "raises StopIteration": (stopping, "raised StopIteration"),
    "raises what is no Exception": (wild, "raised GeneratorExit"),
    "raises a signal": (greedy, "raised LimitReached"),
    "raises later": (generating, r"raised ValueError: later \(.*test_hooks.py:\d+\)"),
    "garbage": (garbage, r"test_hooks.py:\d+\) returned a object; it may return None"),
    "async": (coroutine, "is async; write a generator function and `yield from Perform"),
    "future": (lambda *args: Future(), "is async"),
    "bad yield": (
        bad_yield,
        rf"yielded STEP; it may yield {', '.join(NAMES[:-1])} or {NAMES[-1]} ",
    ),
    "unknown tool": (missing_tool, "'nope' is not available"),
    "endless": (endless, "yielded more than 1000 times"),
}


@pytest.mark.spec("requirements:H1", "reliability:GN37", "requirements:H4")
def test_hooks_run_in_list_order_with_their_context():
    log = []

    def at(word):
        def hook(ctx, *args):
            log.append(f"{word} {ctx.step_index} {(ctx.now - CREATED) // timedelta(milliseconds=1)}")
            assert (ctx.session_id, ctx.user_id, ctx.metadata, ctx.path) == ("s", "u", {"k": 1}, "2")
            assert (ctx.agent.id, ctx.system_prompt) == ("tester", "")
            assert ctx.messages is ctx.state.message_history

        return hook

    points = {point: [at(point), at(f"{point} again")] for point in POINTS}
    run(Hooks(**points), info=RunInfo("s", "u", JsonDict(k=1)), path="2")
    assert [line for line in log if "again" not in line] == [
        "pre_run 0 0",
        "pre_step 0 0",
        "pre_tool 0 1",
        "post_tool 0 2",
        "post_step 0 2",
        "pre_step 1 2",
        "post_step 1 3",
        "on_stop 1 3",
        "post_run 2 3",
    ]
    assert [line.replace(" again", "") for line in log[1::2]] == log[::2]


@pytest.mark.spec("requirements:H4")
def test_post_run_hooks_receive_result_and_added_messages():
    seen, usage = [], []

    def look(ctx, result):
        seen.append((result.status, result.output, [m.role for m in ctx.added]))
        usage.append(result.usage)

    played = run(Hooks(post_run=[look]))
    assert seen == [(RunStatus.COMPLETED, "done", ["user", "assistant", "tool", "assistant"])]
    assert usage == [played.finished.usage]
    assert usage[0].requests == 2


@pytest.mark.spec("reliability:GN30")
@pytest.mark.parametrize("point", ["pre_run", "pre_step"])
@pytest.mark.parametrize(("hook", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_pre_hook_aborts_the_run_and_is_named(point, hook, message):
    played = run(Hooks(**{point: [hook, lambda ctx: pytest.fail("never called")]}), handler=swallowing)
    assert played.status is RunStatus.FAILED
    assert re.search(message, str(played.error)), played.error
    assert played.models == []
    [event] = played.seen(HookFailed)
    assert (event.point, event.hook) == (point, hook.__qualname__)


def swallowing(ctx):
    try:
        yield STEP
    except Exception:
        yield STEP


@pytest.mark.spec("reliability:GN30")
@pytest.mark.parametrize(("hook", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_pre_tool_hook_denies_its_call_alone(hook, message):
    def first(ctx, asked):
        return hook(ctx, asked) if asked.input["a"] == 1 else None

    replies = [reply(call("add", a=1), call("add", a=2)), reply("done")]
    played = run(Hooks(pre_tool=[first, lambda ctx, asked: Decision.allow()]), *replies)
    assert [m.status for m in played.history if m.role == "tool"] == ["denied", "ok"]
    assert "The check of this call failed, so it was not run" in played.history[2].text
    assert re.search(message, played.warnings[0])
    assert (played.status, played.output) == (RunStatus.COMPLETED, "done")


@pytest.mark.spec("reliability:GN30", "requirements:X3", "reliability:GN32")
@pytest.mark.parametrize("point", ["post_tool", "post_step", "on_stop", "post_run"])
@pytest.mark.parametrize(("hook", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_later_hook_is_reported_and_changes_nothing(point, hook, message):
    called = []
    played = run(Hooks(**{point: [hook, lambda *args: called.append(1)]}))
    assert (played.status, played.output, played.history[2].text) == (RunStatus.COMPLETED, "done", "1")
    assert re.search(message, played.warnings[0])
    assert len(played.seen(HookFailed)) == len(played.warnings) == len(called)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_in_a_hook_propagates(error):
    def hook(ctx):
        raise error

    with pytest.raises(error):
        run(Hooks(pre_run=[hook]))


def test_limit_in_a_pre_hook_ends_the_run():
    def hook(ctx):
        yield from y.Perform(int)

    played = run(Hooks(pre_step=[hook]), world=World(at={0: SPENT}))
    assert (played.status, played.error) == (RunStatus.FAILED, SPENT)


# --- what hooks change ----------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:H4", "requirements:H5", "requirements:B9", "reliability:GN37")
def test_every_field_of_a_change_is_made_and_logged():
    seen = []

    def first(ctx):
        return Change(
            system_prompt="new",
            messages=[UserMessage("earlier")],
            context={"a": 1, "b": 2},
            values={"shared": seen},
        )

    def second(ctx):
        assert (ctx.system_prompt, len(ctx.messages), ctx.state.context, ctx.values["shared"]) == (
            "new",
            1,
            {"a": 1, "b": 2},
            seen,
        )
        with pytest.raises(TypeError):
            ctx.values["x"] = 1
        return Change(context={"b": None}, view=[UserMessage("short")])

    def third(ctx):
        return Change(tail=[UserMessage("now")])

    played = run(Hooks(pre_run=[first, second], pre_step=[third]), reply("x"))
    request = played.requests[0]
    assert (request.system_prompt, [m.text for m in request.all_messages]) == ("new", ["short", "now"])
    assert played.state.context == {"a": 1}
    assert played.shown == ["user: earlier", "assistant: x"]
    assert [m.text for m in played.state.view] == ["short", "x"]
    logged = [e.message.split("<locals>.")[1] for e in played.seen(LogLine)]
    assert logged == [
        "first of 'tester' changed system_prompt, messages, context",
        "second of 'tester' changed view, context",
    ]


@pytest.mark.spec("requirements:H13", "reliability:GN37")
def test_pre_run_tail_ends_every_request_and_is_never_stored():
    def first(ctx):
        return Change(tail=[UserMessage("of the run")])

    def second(ctx):
        return Change(tail=[UserMessage(f"of step {ctx.step_index}")])

    def handler(ctx):
        yield STEP
        yield y.GenerateN(2)
        yield from y.Complete("beside")
        yield STEP
        yield STEP

    replies = [reply("a"), reply("x"), reply("y"), reply("c"), reply("b"), reply("last")]
    points = Hooks(pre_run=[first, first], pre_step=[second])
    played = run(points, *replies, handler=handler, limits=limits(max_steps=3), step_prompt="brief")
    prompt = "<system-reminder>\nbrief\n</system-reminder>"
    both = ["of the run", "of the run"]
    assert [[m.text for m in request.tail] for request in played.requests[:5]] == [
        [*both, "of step 0", prompt],
        [*both, prompt],
        [*both, prompt],
        [],
        [*both, "of step 1", prompt],
    ]
    assert [m.text for m in played.requests[5].tail[:2]] == both
    assert played.shown == ["user: go", "assistant: a", "assistant: b", "assistant: last"]


GIVEN = {
    "tail": [UserMessage("x")],
    "input": {"a": 1},
    "result": ToolResult.text("x"),
    "values": {"x": 1},
    "context": {"x": 1},
    "system_prompt": "new",
}
USELESS = [
    *[(point, "input") for point in ("pre_run", "pre_step", "post_step", "post_tool")],
    *[(point, "tail") for point in ("post_step", "pre_tool", "post_tool")],
    *[(point, "result") for point in ("pre_run", "pre_step", "post_step", "pre_tool")],
]


@pytest.mark.spec("requirements:H13", "reliability:GN30")
@pytest.mark.parametrize(("point", "field"), USELESS)
def test_change_field_unusable_at_a_point_fails_its_hook(point, field):
    def hook(ctx, *args):
        return Change(**{field: GIVEN[field], "context": {"made": True}})

    def handler(ctx):
        yield STEP

    played = run(Hooks(**{point: [hook]}), handler=handler)
    [event] = played.seen(HookFailed)
    assert (event.point, event.hook) == (point, hook.__qualname__)
    assert f"{point} hook {hook.__qualname__} of 'tester'" in event.error
    assert f"returned Change({field}=...), which cannot be used there; {field} is for " in event.error
    assert all(f"{p} hooks" in event.error for p in CHANGE_POINTS[field])
    assert played.state.context == {}
    aborts = point in ("pre_run", "pre_step")
    assert (played.status is RunStatus.FAILED) is aborts
    denied = [m.status for m in played.history if m.role == "tool"]
    assert denied == ([] if aborts else ["denied" if point == "pre_tool" else "ok"])


@pytest.mark.parametrize(
    ("point", "field"), [(point, field) for field in sorted(GIVEN) for point in CHANGE_POINTS[field] if point != "tool"]
)
def test_change_field_usable_at_a_point_is_accepted(point, field):
    played = run(Hooks(**{point: [lambda ctx, *args: Change(**{field: GIVEN[field]})]}))
    assert (played.status, played.seen(HookFailed)) == (RunStatus.COMPLETED, [])


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: Change(result=r)], ids=["result", "change"])
def test_hook_result_is_restricted_like_a_tool_result(wrap):
    changed = ToolResult.text("x", change=Change(values={"x": 1}))
    played = run(Hooks(post_tool=[lambda ctx, asked, result: wrap(changed)]))
    [event] = played.seen(HookFailed)
    assert "Change(values=...), which cannot be used there; values is for pre_run hooks" in event.error
    assert played.history[2].text == "1"


@pytest.mark.spec("reliability:I1")
def test_unpaired_history_from_a_hook_is_rejected():
    def hook(ctx):
        return Change(messages=[AssistantMessage([ToolCallPart("c9", "add")])])

    played = run(Hooks(pre_step=[hook]))
    assert (played.status, type(played.error)) == (RunStatus.FAILED, TranscriptError)
    [event] = played.seen(HookFailed)
    assert event.hook.endswith("hook")
    with pytest.raises(TranscriptError):
        Change(view=[ToolMessage("c1", "add", "x")])


@pytest.mark.spec("generator-contract:G32", "reliability:GN37")
def test_changed_input_is_revalidated_and_executed():
    def doubled(ctx, asked):
        return Change(input={"a": asked.input["a"] * 2}, context={"seen": asked.input["a"]})

    played = run(Hooks(pre_tool=[doubled, doubled]), reply(call("strict", a=1)), reply("x"))
    assert (played.calls[0].input, played.state.context) == ({"a": 4}, {"seen": 2})
    assert played.history[1].tool_calls[0].input == {"a": 1}

    noting = run(
        Hooks(pre_tool=[lambda ctx, asked: Change(context={"seen": 1})]), reply(call("strict", a=1)), reply("x")
    )
    assert (noting.calls[0].input, noting.state.context) == ({"a": 1}, {"seen": 1})

    emptied = run(Hooks(pre_tool=[lambda ctx, asked: Change(input={})]), reply(call("strict", a=1)), reply("x"))
    assert emptied.calls == []
    assert "a: missing" in emptied.history[2].text
    assert emptied.history[2].status == "denied"


@pytest.mark.spec("requirements:X3")
def test_results_are_replaced_by_hooks_in_order():
    def first(ctx, asked, result):
        return ToolResult.text(f"{result.text}!")

    def second(ctx, asked, result):
        return Change(result=ToolResult.text(f"{result.text}?"), context={"seen": result.text})

    def third(ctx, asked, result):
        return Change(context={"third": 1})

    played = run(Hooks(post_tool=[first, second, third]))
    assert (played.history[2].text, played.state.context) == ("1!?", {"seen": "1!", "third": 1})
    assert (played.tool_calls[0].result.text, played.tool_calls[0].result.tool_call_id) == ("1!?", "c1")


@pytest.mark.spec("requirements:X3")
@pytest.mark.parametrize("failure", [None, ToolError("no such file"), LimitExceeded("again", kind="identical_calls")])
def test_post_tool_hooks_see_failed_calls_alone_or_together(failure):
    safe, other = binding("safe", parallel_safe=True), binding("other", parallel_safe=True)
    tools = {"safe": lambda: failure or ToolResult.text("fine"), "other": lambda: ToolResult.text("other")}

    def told(*names):
        seen = []

        def hide(ctx, asked, result):
            seen.append((asked.tool_name, result.status, result.text))
            return ToolResult.text("hidden")

        world = World(replies=[reply(*map(call, names)), reply("done")], tools=tools)
        definition = agent(tools=["safe", "other"], hooks=Hooks(post_tool=[hide]))
        played = play(definition, world, tools=[safe, other])
        texts = {m.text for m in played.history if isinstance(m, ToolMessage)}
        return [one for one in seen if one[0] == "safe"], texts, played.status

    alone = told("safe")
    assert alone == told("safe", "other")
    assert (1, {"hidden"}) == (len(alone[0]), alone[1])


@pytest.mark.spec("requirements:X3", "requirements:B9")
def test_replaced_result_keeps_tool_change_and_adds_its_own():
    made = []

    def first(ctx, asked, result):
        made.append(dict(ctx.state.context))
        return ToolResult.text("other", change=Change(context={"hook": len(made), "tool": "seen"}))

    def second(ctx, asked, result):
        made.append(dict(ctx.state.context))
        return attrs.evolve(result, status="error")

    def third(ctx, asked, result):
        return Change(result=ToolResult.text("last", change=Change(context={"third": 1})))

    def undone(ctx, asked, result):
        return Change(context={"hook": "undone"})

    def played_with(*points):
        tools = {"add": lambda: ToolResult.text("x", change=Change(context={"tool": 1}))}
        world = World(replies=[reply(call("add")), reply("done")], tools=tools)
        return run(Hooks(post_tool=points), world=world)

    played = played_with(first, undone, second, third)
    assert made == [{"tool": 1}, {"tool": "seen", "hook": "undone"}]
    assert played.state.context == {"tool": "seen", "hook": "undone", "third": 1}
    plain = played_with(lambda ctx, asked, result: ToolResult.text("other"))
    assert (plain.state.context, plain.history[2].text) == ({"tool": 1}, "other")


@pytest.mark.spec("requirements:X3")
def test_hooks_may_do_io_and_read_its_result():
    log = []

    def hook(ctx, *args):
        value = yield from y.Perform(lambda: 5)
        said = yield from y.Complete("short")
        result = yield from y.ToolCall("strict", {"a": 2})
        bare = yield y.ToolCall("strict", {"a": 3})
        log.append((value, said.text, result.data, bare.tool_result.data, bare.agent_state is ctx.state))

    tools = {"add": adding, "strict": lambda a: ToolResult.json(a, change=Change(context={"a": a}) if a == 3 else None)}
    world = World(replies=[reply("s"), reply("done")], tools=tools)
    played = run(Hooks(pre_step=[hook]), world=world)
    assert log == [(5, "s", 2, 3, False)]
    assert played.state.context == {"a": 3}
    assert [e.source for e in played.calls] == ["hook", "hook"]
    assert [(e.tool_name, e.source) for e in played.tool_calls] == [("strict", "hook")] * 2
    assert played.shown == ["user: go", "assistant: done"]


def test_errors_are_raised_at_a_hooks_own_yield():
    log = []

    def hook(ctx):
        for asked in (y.Complete("x"), y.ToolCall("strict"), y.ToolCall("set_output"), y.Perform(int)):
            try:
                yield asked
            except Exception as error:
                log.append(type(error).__name__)
            except LimitReached as error:
                log.append(error.error.kind)

    world = World(replies=[ModelError("down"), reply("x")], at={1: SPENT})
    played = run(Hooks(pre_run=[hook]), world=world)
    assert log == ["ModelError", "ToolInputError", "ToolNotAvailable", "tokens"]
    assert (played.status, played.error) == (RunStatus.FAILED, SPENT)
