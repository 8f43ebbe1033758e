"""The output of a run: modes, returned values, schemas, the one reminder (generator-contract S)."""

from __future__ import annotations

import pytest

from stepengine.data import record_sizes
from stepengine.data import yields as y
from stepengine.data.events import LogLine
from stepengine.data.hooks import Hooks
from stepengine.data.json import JsonDict, freeze
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.state import AgentState, RunStatus
from stepengine.errors import HandlerError, LimitExceeded, ModelError, OutputMissing
from stepengine.machine.plan import OutputSchema
from tests.machine.world import (
    ADD,
    STEP,
    STEP_ALL,
    World,
    adding,
    agent,
    call,
    limits,
    play,
    play_adding,
    reply,
    thought,
    yielding,
)

SCHEMA = JsonDict(freeze({"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}))
LIST = JsonDict(freeze({"type": "array"}))


def validate(value):
    if isinstance(value, dict) and isinstance(value.get("score"), int):
        return freeze({**value, "checked": True})
    issues = (
        ["score: expected a number"] if isinstance(value, dict) and "score" in value else ["score: missing", "other"]
    )
    raise OutputMissing("does not fit", issues=issues)


def listed(value):
    if isinstance(value, list):
        return value
    raise OutputMissing("no list", issues=["expected a list"])


def scoring(*replies, handler=None, world=None, tools=(), check=validate, decode=None, schema=SCHEMA, **fields):
    definition = agent(handler, output_schema=schema, tools=tools, **fields)
    output = OutputSchema(JsonDict(schema), check, decode)
    return play(definition, world or World(replies=replies, tools={"add": adding}), tools=[ADD], output_schema=output)


def score(value=3):
    return reply(call("set_output", score=value))


@pytest.mark.spec("generator-contract:S2", "generator-contract:S1", "generator-contract:S3", "requirements:D9")
def test_the_last_message_is_the_output_by_default():
    played = play_adding(None, [reply("a", call("add")), reply("b")])
    assert (played.output, played.text) == ("b", "b")
    silent = play(agent(), World(replies=[reply()]))
    assert (silent.output, silent.text, silent.stop_reason.value) == ("", "", "end_turn")
    inherited = AgentState.from_messages([UserMessage("x"), AssistantMessage("old")])

    def silent_handler(ctx):
        yield y.Perform(int)

    none = play(agent(silent_handler), state=inherited)
    assert (none.output, none.text) == ("", "")


# --- what a run says last -------------------------------------------------------------------------------------------

ENDINGS = ["end_turn", "task_completed", "add"]
END = call("end_turn", message="All done.")
SAYS = {
    "text before a lone task_completed": (
        [reply("The answer is 42."), reply(call("task_completed"))],
        "The answer is 42.",
    ),
    "text beside task_completed": ([reply("old"), reply("new", call("task_completed"))], "old\n\nnew"),
    "blank text is no text": ([reply("said", call("add")), reply(" \n", call("task_completed"))], "said"),
    "the message of end_turn": ([reply("text", call("add")), reply("more", END)], "All done."),
    "no message": ([reply("text", call("end_turn"))], "text"),
    "an empty message": ([reply("text", call("end_turn", message=""))], "text"),
    "a message that did not end the turn": ([reply(call("nope"), END), reply("later", call("end_turn"))], "later"),
    "a message after another": ([reply(call("nope"), END), reply(call("end_turn", message="Now."))], "Now."),
    "nothing": ([reply(call("end_turn"))], ""),
}


@pytest.mark.spec("requirements:X63", "generator-contract:G51", "generator-contract:S2")
@pytest.mark.parametrize(("replies", "said"), SAYS.values(), ids=SAYS)
def test_end_turn_message_or_last_text_is_the_output(replies, said):
    world = World(replies=replies, tools={"add": adding})
    offered = ENDINGS if "task_completed" in str(replies) else [n for n in ENDINGS if n != "task_completed"]
    played = play(agent(tools=offered), world, tools=[ADD])
    assert (played.output, played.text, played.finished.to_child_result().output) == (said, said, said)


ADJACENT = {
    "two texts": ([y.StepText("a"), y.StepText("b")], "a\n\nb"),
    "two steps": ([STEP, STEP], "a\n\nb"),
    "text and a step": ([y.StepText("first"), STEP], "first\n\na"),
    "blank text between": ([y.StepText("first"), y.StepText(" \n"), STEP], "first\n\na"),
    "a result between": ([y.StepText("first"), y.ToolCall("add"), STEP], "a"),
    "a user message between": (
        [STEP, y.ToolCall("add_message", {"role": "user", "content": "go"}, include_tool_call=False), STEP],
        "b",
    ),
    "many": ([y.StepText(str(n)) for n in range(120)], "\n\n".join(map(str, range(120)))),
}


@pytest.mark.spec("requirements:X63", "generator-contract:S3")
@pytest.mark.parametrize(("yielded", "said"), ADJACENT.values(), ids=ADJACENT)
def test_last_message_joins_adjacent_assistant_texts(yielded, said):
    played = play_adding(yielding(*yielded), [reply("a"), reply("b")])
    assert (played.output, played.text, played.finished.to_child_result().output) == (said, said, said)


def added(a, **options):
    return y.ToolCall("add", {"a": a}, **options)


UNRECORDED = {"include_tool_call": False}
ASKED = reply("I add.", call("add", a=5))
CALLS = {
    "alone": ([added(7)], "7"),
    "after a text": ([y.StepText("first"), added(7)], "first\n\n7"),
    "after a text and a step": ([y.StepText("first"), STEP, added(7)], "first\n\na\n\n7"),
    "after a step with a call": ([y.StepText("first"), STEP, STEP, added(7)], "7"),
    "after another": ([y.StepText("first"), added(7), added(8)], "8"),
    "several at once": ([y.StepText("first"), y.Parallel(added(7), added(8))], "first\n\n7\n\n8"),
    "in a text": ([y.StepText('first <tool_call>{"name": "add", "input": {"a": 7}}</tool_call>')], "first\n\n7"),
    "before a user message": (
        [added(7), y.ToolCall("add_message", {"role": "user", "content": "go"}, **UNRECORDED)],
        "7",
    ),
    "before an unrecorded one": ([added(7), added(8, **UNRECORDED)], "7"),
    "before a text": ([added(7), y.StepText("last")], "last"),
    "unrecorded": ([y.StepText("first"), added(7, **UNRECORDED)], "first"),
    "unrecorded and alone": ([added(7, **UNRECORDED)], ""),
    "of a tool that nobody waits for": ([y.StepText("first"), y.ToolCall("think_deeply", {"thought": "Hm."})], "first"),
    "of a tool that ends": ([y.StepText("first"), y.ToolCall("end_turn", {})], "first"),
    "before a task_completed": (
        [y.StepText("first"), y.ToolCall("task_completed", include_tool_call=False)],
        "first",
    ),
    "before a returned value": ([added(7), "returned"], "returned"),
    "before set_output": ([added(7), y.ToolCall("set_output", {"data": "set"})], "set"),
}


@pytest.mark.spec("requirements:X63", "generator-contract:S3")
@pytest.mark.parametrize(("yielded", "said"), CALLS.values(), ids=CALLS)
def test_final_handler_call_result_is_the_output(yielded, said):
    world = World(replies=[reply("a"), ASKED], tools={"add": adding})
    played = play(agent(yielding(*yielded), tools=["add", "think_deeply", "end_turn"]), world, tools=[ADD])
    assert (played.output, played.text, played.finished.to_child_result().output) == (said, said, said)


@pytest.mark.spec("requirements:X63", "generator-contract:G49")
@pytest.mark.parametrize("form", ["call", "unrecorded", "parallel", "text"])
def test_handlers_own_end_turn_message_is_the_output(form):
    advanced = []

    def handler(ctx):
        yield STEP
        match form:
            case "call":
                yield y.ToolCall("end_turn", {"message": "bye"})
            case "unrecorded":
                yield y.ToolCall("end_turn", {"message": "bye"}, include_tool_call=False)
            case "parallel":
                yield y.Parallel(y.ToolCall("end_turn", {"message": "bye"}))
            case "text":
                yield y.StepText('so: <tool_call>{"name": "end_turn", "input": {"message": "bye"}}</tool_call>')
        advanced.append(form)

    played = play(agent(handler, tools=["end_turn"]), World(replies=[reply("text")]))
    assert (played.output, played.text, played.status) == ("bye", "bye", RunStatus.COMPLETED)
    assert advanced == (["text"] if form == "text" else [])


@pytest.mark.spec("requirements:X63", "requirements:H1")
def test_text_after_an_end_turn_message_is_the_output():
    asked = []

    def once(ctx):
        asked.append(1)
        return "Go on." if len(asked) == 1 else None

    world = World(replies=[reply(END), reply("I went on.")])
    refused = play(agent(tools=["end_turn"], hooks=Hooks(on_stop=[once])), world)
    assert refused.output == "I went on."

    for following, said in ((y.StepText("more"), "more"), (STEP, "more"), (y.ToolCall("add"), "All done.")):

        def handler(ctx, following=following):
            yield STEP
            yield following

        world = World(replies=[reply(END), reply("more")], tools={"add": adding})
        assert play(agent(handler, tools=["end_turn", "add"]), world, tools=[ADD]).output == said


@pytest.mark.spec("requirements:X63", "generator-contract:S2")
def test_output_precedence_is_returned_set_end_message_text():
    def handler(ctx):
        yield STEP
        if "set" in wanted:
            yield y.ToolCall("set_output", {"data": "set"})
        return "returned" if "returned" in wanted else None

    for wanted in (("returned", "set"), ("returned",), ("set",), ()):
        played = play(agent(handler, tools=["end_turn"]), World(replies=[reply("said", END)]))
        first = (*wanted, "All done.")[0]
        assert (played.output, played.text) == (first, first)
    wanted = ("returned", "set")
    data = play(agent(lambda ctx: ((yield STEP), {"a": 1})[1]), World(replies=[reply("said")]))
    assert (data.output, data.text) == ({"a": 1}, "said")


@pytest.mark.spec("requirements:X63", "generator-contract:S8")
def test_set_output_in_another_mode_warns_once():
    def handler(ctx):
        yield y.ToolCall("set_output", {"x": 1})
        yield y.ToolCall("set_output", {"x": 2})
        yield STEP

    def warned(mode):
        played = play(agent(handler, output_mode=mode), World(replies=[reply("text")]))
        lines = [(e.level, e.message) for e in played.seen(LogLine)]
        assert lines == [("warning", warning) for warning in played.warnings]
        return played

    assert warned("structured_output").warnings == ()
    [text] = warned("last_message").warnings
    assert "with its output_mode 'last_message' the output is its last message" in text
    assert warned("last_message").output == {"x": 2}
    [text] = warned("all_messages").warnings
    assert "with its output_mode 'all_messages' the output is all messages; set output_mode='structured_output'" in text
    assert [m["role"] for m in warned("all_messages").output] == ["user", "assistant"]


@pytest.mark.spec("generator-contract:S4")
def test_all_messages_are_those_that_this_run_added():
    inherited = AgentState.from_messages([UserMessage("old"), AssistantMessage("older")])
    definition = agent(output_mode="all_messages", tools=["add"])
    world = World(replies=[reply(call("add")), reply("b")], tools={"add": adding})
    played = play(definition, world, state=inherited, tools=[ADD])
    assert [m["role"] for m in played.output] == ["user", "assistant", "user", "assistant"]
    assert played.output[0]["content"] == [{"type": "text", "text": "go"}]

    def pruning(ctx):
        yield y.ToolCall("set_messages", {"messages": []})
        yield STEP

    pruned = play(agent(pruning, output_mode="all_messages"), World(replies=[reply("b")]), state=inherited)
    assert [m["content"][0]["text"] for m in pruned.output] == ["b"]


@pytest.mark.spec("generator-contract:S2")
@pytest.mark.parametrize("mode", ["last_message", "all_messages", "structured_output"])
def test_a_returned_value_is_the_output_in_every_mode(mode):
    def handler(ctx):
        yield y.ToolCall("set_output", {"x": 1})
        return {"mine": (1, 2)}

    played = play(agent(handler, output_mode=mode))
    assert played.output == {"mine": (1, 2)}
    assert played.state.output == {"mine": [1, 2]}


def test_all_messages_that_are_too_long_fail_the_run(monkeypatch):
    monkeypatch.setattr(record_sizes, "MAX_VALUE_BYTES", 2_000)
    played = play(agent(output_mode="all_messages"), World(replies=[reply("x" * 1_500, thought("y" * 1_500))]))
    assert (played.status, played.error.kind) == (RunStatus.FAILED, "too_long")
    assert "output_mode='last_message'" in str(played.error)


@pytest.mark.spec("generator-contract:S4", "generator-contract:S8")
@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"a": 1}, {"a": 1}),
        ({}, {}),
        ({"data": {"a": 1}}, {"a": 1}),
        ({"data": [1]}, [1]),
        ({"data": 1, "b": 2}, {"data": 1, "b": 2}),
    ],
)
def test_set_output_replaces_the_previous_output(given, output):
    def handler(ctx):
        yield y.ToolCall("set_output", {"first": 1})
        result = yield y.ToolCall("set_output", given)
        assert result.agent_state.output == output
        yield STEP_ALL

    played = play(agent(handler, output_mode="structured_output"), World(replies=[reply("x")]))
    assert (played.output, played.text) == (output, "x")


# --- with a schema --------------------------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:S9", "generator-contract:S10", "generator-contract:S1", "generator-contract:S8")
def test_output_is_accepted_bare_or_in_data_and_revalidated():
    def handler(ctx):
        for value in ({"score": 3}, {"data": {"score": 4}}):
            result = yield y.ToolCall("set_output", value)
            assert not result.tool_result.is_error
        refused = [
            ({"score": "x", "data": {}}, "score: expected a number"),
            ({"data": {"score": "x"}}, "score: expected a number"),
            ({}, "score: missing; other"),
        ]
        for value, issues in refused:
            result = yield y.ToolCall("set_output", value)
            assert result.tool_result.is_error
            assert f"Invalid output, the earlier one stays: {issues}. Given: {{" in result.tool_result.text

    played = scoring(handler=handler)
    assert (played.status, played.output) == (RunStatus.COMPLETED, {"score": 4, "checked": True})


@pytest.mark.spec("generator-contract:S1", "generator-contract:S14")
def test_set_output_is_offered_by_itself_with_the_schema():
    played = scoring(score(), instructions_prompt="Judge.")
    [spec] = played.requests[0].tools
    assert (spec.name, spec.category, spec.input_schema) == ("set_output", "control", SCHEMA)
    text = played.history[1].text
    assert text.startswith("Judge.\n\nThe output of set_output must fit this JSON Schema")
    assert '"required":["score"]' in text
    wrapped = scoring(reply(call("set_output", data=[1])), schema=LIST, check=listed)
    assert wrapped.requests[0].tools[0].input_schema["properties"] == {"data": LIST}
    assert (wrapped.status, wrapped.output) == (RunStatus.COMPLETED, [1])
    plain = play(
        agent(output_mode="structured_output", tools=["set_output"], instructions_prompt="Judge."),
        World(replies=[score()]),
    )
    assert (plain.output, plain.history[1].text) == ({"score": 3}, "Judge.")


@pytest.mark.spec("generator-contract:S12", "requirements:D7")
def test_missing_output_is_requested_without_restarting_the_handler():
    log = []

    def handler(ctx):
        log.append("started")
        yield STEP_ALL

    played = scoring(reply("done"), score(), handler=handler)
    assert (played.status, played.output, log) == (RunStatus.COMPLETED, {"score": 3, "checked": True}, ["started"])
    assert played.history[2].tags == ("OUTPUT_REMINDER",)
    assert "set_output now. It must fit this JSON Schema" in played.history[2].text
    assert [t.name for t in played.requests[1].tools] == ["set_output"]

    missing = scoring(reply("done"), reply("still done"), reply("done, I say"))
    assert (missing.status, missing.output, len(missing.models)) == (RunStatus.FAILED, None, 3)
    assert missing.error == OutputMissing(
        "agent 'tester' ended without the output that its output_schema requires. The model gave none with output_retries=2; "
        "raise that, or say in the prompt to call set_output"
    )


@pytest.mark.spec("generator-contract:S12", "generator-contract:S9")
def test_output_reminder_and_error_state_the_refusal_reason():
    played = scoring(score("x"), reply("enough"), output_retries=1)
    assert "Your last output was refused: score: expected a number." in played.history[3].text
    assert played.error.issues == ("score: expected a number",)
    assert played.error.message.startswith(
        "agent 'tester' ended without the output that its output_schema requires; the last attempt was refused: score: expected a "
        "number. The model gave none with output_retries=1; "
    )


def test_the_turn_of_the_reminder_may_take_several_steps():
    def handler(ctx):
        yield STEP

    played = scoring(reply("a"), reply(call("add")), score(), handler=handler, tools=["add"])
    assert (played.output, [t.name for t in played.requests[1].tools]) == (
        {"score": 3, "checked": True},
        ["add", "set_output"],
    )
    plain = play(agent(handler, output_mode="structured_output"), World(replies=[reply("a"), score()]))
    assert (plain.output, [t.name for t in plain.requests[1].tools]) == ({"score": 3}, ["set_output"])
    assert "JSON Schema" not in plain.history[2].text


NO_OUTPUT = {"nothing": y.Perform(int), "end_turn": y.ToolCall("end_turn"), "text": y.StepText("hm")}
MODELS = ["test/model", None]


@pytest.mark.spec("generator-contract:S12", "generator-contract:G9")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("asked", NO_OUTPUT.values(), ids=NO_OUTPUT)
def test_handler_without_steps_gets_no_model_correction(model, asked):
    failed = scoring(handler=yielding(asked), model=model)
    assert (failed.status, type(failed.error), failed.models) == (RunStatus.FAILED, OutputMissing, [])
    assert failed.error.issues == ()


@pytest.mark.spec("generator-contract:S12", "generator-contract:G9")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("asked", NO_OUTPUT.values(), ids=NO_OUTPUT)
def test_without_a_schema_a_handler_may_end_without_output(model, asked):
    nothing = play(agent(yielding(asked), output_mode="structured_output", model=model))
    assert (nothing.status, nothing.output, nothing.models) == (RunStatus.COMPLETED, None, [])


@pytest.mark.spec("generator-contract:S12", "generator-contract:G9")
def test_without_a_model_a_refused_output_fails_the_run():
    def returning(ctx):
        yield y.Perform(int)
        return {"score": "five"}

    for handler in (yielding(y.ToolCall("set_output", {"score": "x"})), returning):
        failed = scoring(handler=handler, model=None)
        assert (failed.status, type(failed.error), failed.models) == (RunStatus.FAILED, OutputMissing, [])
        assert failed.error.issues == ("score: expected a number",)


@pytest.mark.spec("generator-contract:S12")
@pytest.mark.parametrize("how", ["set_output", "unrecorded", "returned"])
def test_model_corrects_a_refused_output_of_a_stepless_handler(how):
    """
    In codebuff, too, a model is asked for the output that a handler's ``set_output`` did not give.
    """
    codebuff = RunStatus.COMPLETED

    def handler(ctx):
        if how == "returned":
            yield y.Perform(int)
            return {"score": "five"}
        yield y.ToolCall("set_output", {"score": "five"}, include_tool_call=how == "set_output")

    played = scoring(score(5), handler=handler)
    assert (played.status, played.output, len(played.requests)) == (codebuff, {"score": 5, "checked": True}, 1)
    asked = played.requests[0].messages[-1].text
    assert "score: expected a number" in asked
    assert 'It was: {"score":"five"}' in asked
    assert "must fit this JSON Schema" in asked
    assert [tool.name for tool in played.requests[0].tools] == ["set_output"]

    never = scoring(*[reply("no")] * 9, handler=handler, output_retries=2)
    assert (never.status, len(never.requests)) == (RunStatus.FAILED, 2)
    assert "score: expected a number" in never.error.message
    none = scoring(handler=handler, limits=limits(max_steps=0))
    assert (none.status, none.requests, none.error.issues) == (RunStatus.FAILED, [], ("score: expected a number",))
    for failed in (never, none):
        assert "agent 'tester' ended without" in failed.error.message
        assert "Return a value from the handler that fits output_schema" in failed.error.message


@pytest.mark.spec("generator-contract:S2", "generator-contract:S12")
def test_returned_value_is_validated_and_corrected():
    def handler(ctx):
        yield STEP
        yield y.ToolCall("set_output", {"score": 1})
        return {"score": wanted}

    wanted = 5
    assert scoring(reply("a"), handler=handler).output == {"score": 5, "checked": True}
    wanted = "five"
    mended = scoring(reply("a"), score(6), handler=handler)
    assert (mended.output, len(mended.models)) == ({"score": 6, "checked": True}, 2)
    failed = scoring(reply("a"), reply("no"), reply("no"), handler=handler)
    assert (failed.status, failed.error.issues) == (RunStatus.FAILED, ("score: expected a number",))


@pytest.mark.spec("requirements:D7")
def test_a_spent_budget_decides_before_a_missing_output():
    spent = limits(max_steps=1)
    asked = scoring(reply(call("add")), reply("final"), tools=["add"], limits=spent)
    assert (asked.status, asked.output, len(asked.models)) == (RunStatus.MAX_STEPS, None, 2)
    unasked = scoring(reply("done"), limits=spent)
    assert (unasked.status, len(unasked.models), type(unasked.error)) == (RunStatus.FAILED, 1, OutputMissing)
    during = scoring(reply("done"), reply(call("add")), tools=["add"], limits=limits(max_steps=2))
    assert (during.status, type(during.error)) == (RunStatus.FAILED, OutputMissing)


def test_model_failure_during_output_reminder_fails_the_run():
    down = ModelError("down")
    failed = scoring(reply("x"), down)
    assert (type(failed.error), failed.error.__cause__) == (OutputMissing, down)
    refused = scoring(reply("x"), LimitExceeded("no tokens", kind="tokens"))
    assert refused.error == LimitExceeded("no tokens", kind="tokens")


@pytest.mark.spec("generator-contract:S1")
def test_output_is_decoded_to_the_authors_type():
    played = scoring(score(), decode=lambda value: ("decoded", value["score"]))
    assert (played.output, played.state.output) == (("decoded", 3), {"score": 3, "checked": True})

    def broken(value):
        raise KeyError("alias")

    failed = scoring(score(), decode=broken)
    assert failed.error == HandlerError(
        "the output of agent 'tester' cannot be read back: KeyError: 'alias'", kind="KeyError"
    )
    assert failed.status is RunStatus.FAILED


# --- corrections ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:S12")
@pytest.mark.parametrize("retries", [0, 1, 2, 3])
def test_output_retries_limit_the_number_of_corrections(retries):
    """
    A missing output and a refused one count alike; the last correction demands the call.
    """
    world = World(replies=lambda k: reply("no") if k % 2 else score("x"))
    played = scoring(world=world, output_retries=retries)

    assert (played.status, type(played.error), len(played.models)) == (RunStatus.FAILED, OutputMissing, 1 + retries)
    assert sum(m.role == "user" and m.tags == ("OUTPUT_REMINDER",) for m in played.history) == retries
    demanded = [request.tool_choice for request in played.requests[1:]]
    assert demanded == [None] * (retries - 1) + ["set_output"] * bool(retries)
    if retries == 2:
        mended = scoring(reply("done"), score("x"), score(4))
        assert (mended.output, mended.status) == ({"score": 4, "checked": True}, RunStatus.COMPLETED)


@pytest.mark.spec("generator-contract:S12")
def test_output_corrections_stay_within_the_step_budget():
    def handler(ctx):
        yield STEP_ALL
        return {"score": "five"}

    world = World(replies=lambda k: reply("no"))
    assert len(scoring(world=world, handler=handler, output_retries=2).models) == 3
    bounded = scoring(world=World(replies=lambda k: reply("no")), output_retries=9, limits=limits(max_steps=3))
    assert (bounded.status, len(bounded.models)) == (RunStatus.FAILED, 3)


@pytest.mark.spec("generator-contract:S12")
def test_rejected_tool_choice_is_retried_without_it():
    refused = ModelError("tool_choice is not supported", status=400)
    played = scoring(reply("done"), refused, score(), output_retries=1)
    assert (played.status, [r.tool_choice for r in played.requests]) == (
        RunStatus.COMPLETED,
        [None, "set_output", None],
    )
    down = scoring(reply("done"), ModelError("down", status=500), output_retries=1)
    assert (type(down.error), len(down.models)) == (OutputMissing, 2)


JSON_TEXTS = [
    '{"score": 3}',
    ' \n{"score": 3}\n',
    '```json\n{"score": 3}\n```',
    'Here it is:\n\n```\n{\n  "score": 3\n}\n```\nDone.',
]


@pytest.mark.spec("generator-contract:S12")
@pytest.mark.parametrize("said", JSON_TEXTS)
def test_final_json_text_matching_the_schema_is_the_output(said):
    played = scoring(reply(said))
    assert (played.status, played.output, len(played.models)) == (RunStatus.COMPLETED, {"score": 3, "checked": True}, 1)
    late = scoring(reply("Well."), reply(said))
    assert (late.output, len(late.models)) == ({"score": 3, "checked": True}, 2)


@pytest.mark.spec("generator-contract:S12")
def test_set_output_and_returned_value_precede_final_text():
    def handler(ctx):
        yield STEP_ALL
        return {"score": 5}

    set_first = scoring(reply(call("set_output", score=1), call("add")), reply('{"score": 2}'), tools=["add"])
    assert set_first.output["score"] == 1
    assert scoring(reply('{"score": 2}'), handler=handler).output["score"] == 5


@pytest.mark.spec("generator-contract:S12")
@pytest.mark.parametrize(
    "said",
    [
        'It is {"score": 3}.',
        '```\n{"score": 3}\n```\n```\n{"score": 4}\n```',
        '```json\n{"score": 3}',
        "[" * 100_000,
        "NaN",
        "",
    ],
)
def test_text_that_is_not_one_json_value_is_no_output(said):
    played = scoring(reply(said), output_retries=0)
    assert (played.status, type(played.error), played.output) == (RunStatus.FAILED, OutputMissing, None)


@pytest.mark.spec("generator-contract:S12")
def test_final_json_text_that_does_not_fit_is_corrected():
    played = scoring(reply('{"score": "x"}'), score())
    assert "Your last output was refused: score: expected a number." in played.history[2].text
    assert played.output == {"score": 3, "checked": True}


@pytest.mark.spec("generator-contract:S12")
def test_a_final_text_counts_at_the_step_limit_too():
    played = scoring(reply(call("add")), reply('{"score": 3}'), tools=["add"], limits=limits(max_steps=1))
    assert (played.status, played.output) == (RunStatus.MAX_STEPS, {"score": 3, "checked": True})


def test_a_validator_that_raises_refuses_the_output():
    def broken(value):
        raise KeyError("inside")

    played = scoring(score(), reply("x"), reply("x"), check=broken)
    assert "the check of the output raised KeyError: 'inside'" in played.error.issues[0]


def test_an_end_turn_without_output_is_asked_for_it_too():
    def handler(ctx):
        yield STEP
        yield y.ToolCall("end_turn")

    assert scoring(reply("a"), score(), handler=handler).output == {"score": 3, "checked": True}


@pytest.mark.spec("requirements:X51", "requirements:D9")
def test_a_failed_run_has_no_output():
    def handler(ctx):
        yield y.ToolCall("set_output", {"x": 1})
        raise ValueError

    played = play(agent(handler))
    assert (played.status, played.output, played.state.output) == (RunStatus.FAILED, None, {"x": 1})
    child = played.finished.to_child_result()
    assert (child.agent_id, child.run_id, child.output, child.error) == ("tester", "r1", None, played.error)
    done = play(agent(), World(replies=[reply("x")])).finished.to_child_result()
    assert (done.agent_id, done.output, done.text, done.is_error) == ("tester", "x", "x", False)
