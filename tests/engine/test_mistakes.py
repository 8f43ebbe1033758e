"""
The likely mistakes of whoever writes a handler: each is told, with the line and with what would have been fine.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

import stepengine
from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Limits,
    ModelSettings,
    Parallel,
    Perform,
    RunResult,
    RunStatus,
    StepWith,
    TextPart,
    ToolCall,
    ToolCallPart,
    UserMessage,
    Workspace,
    call,
    load_agent,
    tool,
)
from stepengine.data.models import ModelReply
from stepengine.errors import DefinitionError, HandlerError, StepEngineError
from stepengine.evaluation import Case, Evaluation
from stepengine.events import LogLine, Warned
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.models import Models
from stepengine.testing import ScriptedModel
from stepengine.tools.bundled import control_tools, read_files, spawn_tools


class Budget(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_context_length: int = 1


@tool(aliases={"max_results": ("limit",)})
def find(max_results: int, paths: list[str]) -> list[Any]:
    """Find files."""
    return [max_results, paths]


@tool
def hidden() -> str:
    """Do something."""
    return "done"


@tool
def forgets() -> Any:
    """Return what was not awaited."""
    return later()


async def later() -> int:
    return 1


def failing(_: Any) -> Any:
    yield from ()
    raise ValueError("boom")


def budget_of(ctx: Any) -> Any:
    yield from ()
    return ctx.params.max_context_length


broken = AgentDefinition("broken", handle_steps=failing)
kid = AgentDefinition("kid", input_schema=Budget, handle_steps=budget_of)


def run(handler: Any, *, journal: Any = None, observers: Any = (), **fields: Any) -> RunResult[Any]:
    given = {"tools": [find, *spawn_tools(inline=True)], "spawnable_agents": [broken, kid], **fields}
    agent = AgentDefinition("tester", handle_steps=handler, **given)
    models = ScriptedModel(["hi"] * 3)
    with Engine([agent], [hidden, forgets], models=models, observers=observers) as engine:
        return engine.run_sync(agent, "go", journal=journal)


# --- `yield` for `yield from`, and other things that were silent -------------------------------------------------------


@pytest.mark.spec("requirements:X69")
@pytest.mark.parametrize(
    "use",
    [
        lambda answer: answer == "yes",
        lambda answer: answer.lower(),
        lambda answer: answer["a"],
    ],
    ids=["compared", "a method", "an item"],
)
def test_bare_yield_used_as_value_fails_with_yield_from_hint(use: Any) -> None:
    def handler(_: Any) -> Any:
        return use((yield Perform(str)))

    result = run(handler)

    assert result.status is RunStatus.FAILED
    assert "yield from Ask(" in str(result.error)
    assert Path(__file__).name in result.error.where


def test_one_line_handler_without_an_output_explains_its_yield() -> None:
    result = run(lambda _: (yield STEP), tools=[], spawnable_agents=[])

    assert (result.status, result.text) == (RunStatus.COMPLETED, "hi")
    assert "returned a StepResult" in result.warnings[0]


@pytest.mark.parametrize("how", ["returned", "inside", "by a tool"])
@pytest.mark.filterwarnings("ignore:coroutine 'later' was never awaited:RuntimeWarning")
def test_unawaited_coroutine_is_reported(how: str) -> None:
    def handler(_: Any) -> Any:
        if how == "returned":
            return later()
        if how == "inside":
            yield from Perform(lambda: [later()])
        yield from ToolCall("forgets", include_tool_call=False)

    result = run(handler)

    assert result.status is RunStatus.FAILED
    assert "it was not awaited" in str(result.error)


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.spec("reliability:GN16")
@pytest.mark.parametrize(
    "output", [float("nan"), {"a": object()}, itself(), "\ud800"],
    ids=["nan", "inside", "cycle", "surrogate"],
)  # fmt: skip
def test_output_that_is_no_json_is_refused_when_stored(output: Any) -> None:
    def handler(_: Any) -> Any:
        yield from ()
        return output

    journal = MemoryJournal()
    alone, kept = run(handler), run(handler, journal=journal)

    assert alone.status is RunStatus.COMPLETED
    assert alone.output is output
    assert isinstance(kept.error, HandlerError)
    assert "output is not JSON: " in str(kept.error)
    assert "$" in str(kept.error)
    assert Path(__file__).name in kept.error.where
    assert journal.history().is_complete
    assert "completed" not in repr(journal.records()[-1])


@pytest.mark.spec("generator-contract:G59")
@pytest.mark.parametrize("is_recorded", [False, True], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("make", [lambda: call(hidden), lambda: ToolCall("hidden")], ids=["call", "ToolCall"])
def test_yieldable_returned_as_output_is_an_error(make: Any, is_recorded: bool) -> None:
    def handler(_: Any) -> Any:
        yield from ()
        return make()

    result = run(handler, journal=MemoryJournal() if is_recorded else None)

    assert isinstance(result.error, HandlerError)
    assert "write `yield from` before it" in str(result.error)
    assert result.error.location.startswith(f"{__file__}:")


# --- names of parameters ----------------------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:T1")
def test_misspelt_names_in_a_handler_are_corrected_and_so_recorded() -> None:
    def handler(_: Any) -> Any:
        first = yield from ToolCall("find", {"maxResults": 3, "paths": ["a"]})
        found = [first.data, (yield from ToolCall("find", {"limit": 3, "paths": ["a"]})).data]
        found.append((yield from AgentCall("kid", params={"maxContextLength": 5})))
        found.append((yield from AgentCall(kid, params={"maxContextLength": 6})))
        several = {"agents": [{"agentType": "kid", "params": {"maxContextLength": 7}}]}
        found.append((yield from ToolCall("spawn_agents", several)).data[0]["output"])
        found.append((yield from ToolCall("spawn_agents", {"agents": {"agentId": "kid"}})).data[0]["output"])
        found.append((yield from ToolCall("kid", {"params": {"maxContextLength": 8}})).data[0]["output"])
        (both,) = yield from Parallel(ToolCall("find", {"maxResults": 4, "paths": []}))
        return [*found, both.data]

    journal = MemoryJournal()
    result = run(handler, journal=journal)

    assert result.error is None
    assert result.output == [[3, ["a"]], [3, ["a"]], 5, 6, 7, 1, 8, [4, []]]
    recorded = repr([intent.given for intent in journal.history().intents.values()])
    assert recorded.count("max_context_length") >= len((5, 6, 7, 8))
    assert "maxResults" not in recorded
    assert "maxContextLength" not in recorded
    inputs = [part.input for m in result.state.message_history for part in getattr(m, "tool_calls", ())]
    assert [i["max_results"] for i in inputs if "paths" in i] == [3, 3, 4]


@pytest.mark.spec("generator-contract:T1")
def test_params_of_the_root_run_are_mended_too() -> None:
    with Engine([kid], models=ScriptedModel([])) as engine:
        assert engine.run_sync("kid", params={"maxContextLength": 4}).output == 4


# --- children that failed ---------------------------------------------------------------------------------------------

SPAWNS = {
    "alone": lambda: AgentCall("broken"),
    "inline": lambda: ToolCall("spawn_agent_inline", {"agent_type": "broken"}),
    "one of several": lambda: ToolCall("spawn_agents", {"agents": [{"agent_type": "broken"}, {"agent_type": "kid"}]}),
    "side by side": lambda: Parallel(AgentCall("broken"), AgentCall("kid")),
}


@pytest.mark.parametrize("how", SPAWNS)
def test_only_a_discarded_spawn_error_is_a_warning(how: str) -> None:
    seen: list[str] = []

    def careless(_: Any) -> Any:
        yield SPAWNS[how]()

    def careful(_: Any) -> Any:
        sent = yield SPAWNS[how]()
        return sent.steps_complete

    def note(event: Any) -> None:
        if isinstance(event, LogLine):
            seen.append(event.message)

    result = run(careless, observers=[note])

    (warning,) = result.warnings
    assert "broken" in warning
    assert "boom" in warning
    assert f"{Path(__file__).name}:" in warning
    assert warning in seen
    assert run(careful).warnings == ()


@pytest.mark.spec("requirements:X50", "reliability:SP02")
def test_an_entry_over_the_limit_is_never_refused_in_silence() -> None:
    def handler(_: Any) -> Any:
        sent = yield ToolCall("spawn_agents", {"agents": [{"agent_type": "kid"}] * 17})
        return ["output" in entry for entry in sent.tool_result.data]

    result = run(handler)

    assert result.output == [True] * 16 + [False]
    (warning,) = result.warnings
    assert "1 of 17" in warning
    assert "max_children is 16" in warning
    assert "map_agents" in warning


@pytest.mark.spec("generator-contract:T25", "generator-contract:T26")
def test_listed_handler_tool_is_not_offered_to_the_model() -> None:
    """
    codebuff offers it to the model, whose call works there. Here only a handler may change the conversation.
    """
    listed = ["add_message", "set_messages"]
    codebuff = ["think_deeply", *listed]

    def handle_steps(_: Any) -> Any:
        yield ToolCall("add_message", {"role": "user", "content": "note"})
        yield STEP

    model = ScriptedModel(["hi"])
    agent = AgentDefinition("noting", tools=["think_deeply", *listed], handle_steps=handle_steps)
    with Engine([agent], models=model) as engine:
        result = engine.run_sync(agent, "go")

    assert ["think_deeply"] == [tool.name for tool in model.calls[0].tools] == codebuff[:1]
    (warning,) = result.warnings
    assert all(name in warning for name in listed)
    assert "its handler can still call it" in warning
    assert ["go", "note"] == [m.text for m in result.state.message_history if m.role == "user"]


# --- errors that help -------------------------------------------------------------------------------------------------

ERRORS = {
    "a tool of the engine": (lambda: ToolCall("hidden"), "the model does not see"),
    "a slip": (lambda: ToolCall("fnd"), "Did you mean 'find'?"),
    "a list that is missing": (
        lambda: ToolCall("spawn_agents", {"agent": 1}),
        'Fine would be: {"agents": [{"agent_type"',
    ),
    "a dict": (lambda: {"toolName": "find", "input": {"paths": []}}, "{'toolName': 'find', 'input': {...}}"),
    "too many actions": (lambda: ToolCall("write_todos", {"todos": []}), "max_actions"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error_suggests_the_intended_name_and_its_source(what: str) -> None:
    make, said = ERRORS[what]

    def handler(_: Any) -> Any:
        yield make()
        yield make()

    result = run(handler, limits=Limits(max_actions=1))

    assert isinstance(result.error, StepEngineError)
    assert said in str(result.error)
    assert "The input was" not in str(result.error)
    assert result.error.where.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("make", "meant"),
    [(lambda: Limits(max_step=3), "max_steps"), (lambda: ModelSettings(temprature=1), "temperature")],
    ids=["Limits", "ModelSettings"],
)
def test_misspelt_keyword_is_refused_with_the_nearest_name(make: Any, meant: str) -> None:
    with pytest.raises(DefinitionError, match=f"did you mean '{meant}'") as caught:
        make()

    assert isinstance(caught.value, TypeError)


def test_unknown_package_attribute_names_the_nearest_public_one() -> None:
    with pytest.raises(ImportError, match="did you mean 'AgentDefinition'"):
        exec("from stepengine import Agent", {})
    with pytest.raises(AttributeError, match="did you mean 'Engine'"):
        stepengine.Engin
    assert not hasattr(importlib.import_module("stepengine"), "Agent")
    assert Ask is stepengine.Ask


@pytest.mark.parametrize(
    ("annotation", "is_told"), [(int, True), (list[str], True), (dict[str, int], True), (str, False), (Any, False)]
)
def test_text_from_a_tool_annotated_otherwise_is_reported(annotation: Any, is_told: bool) -> None:
    def count() -> Any:
        """Count."""
        return "12"

    count.__annotations__["return"] = annotation

    def handle_steps(_: Any) -> Any:
        yield ToolCall("count", {})

    seen: list[Any] = []
    run(handle_steps, tools=[tool(count)], observers=[seen.append])

    assert is_told == any("returned a string" in event.message for event in seen if isinstance(event, Warned))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (STEP, "STEP is not called; write `yield STEP`, or `yield StepWith(model=...)`"),
        (lambda: Perform(STEP), "Perform needs a function and its arguments, not STEP"),
        (ToolCall, "ToolCall(...): missing a required argument: 'tool'; valid arguments: tool, input, "),
        (lambda: Limits(4), "Limits(...): too many positional arguments; valid arguments: max_steps, "),
        (lambda: Hooks(pre_runs=print), "Hooks has no argument 'pre_runs'; did you mean 'pre_run'?"),
        (lambda: Workspace(5), "Workspace(root) must be a path such as 'runs/one', not 5"),
        (lambda: Case("x", checks=print), "need lists, such as checks=[contains('done')]"),
        (
            lambda: Evaluation("x", [], {}, replies=[]),
            "has no argument 'replies'; write Case(id, replies=[...]). Valid arguments: name, ",
        ),
        (lambda: Models("anthropic"), "Models expects providers by prefix"),
        (lambda: FileJournal(5), "FileJournal(path) must be a path"),
        (lambda: load_agent(5), "an agent file must be a path"),
        (lambda: Engine().step_sync("go"), "step() needs an AgentState"),
    ],
)
def test_an_obvious_mistake_raises_a_typed_error(wrong: Any, words: str) -> None:
    with pytest.raises(StepEngineError) as raised:
        wrong()

    assert words in str(raised.value)


@pytest.mark.parametrize("is_child", [False, True])
def test_a_limit_in_dollars_names_the_model_without_a_price(is_child: bool) -> None:
    model, child = "acme/unheard-of", AgentDefinition("kid", model="acme/unheard-of")
    parent = AgentDefinition(
        "a", spawnable_agents=[child], handle_steps=lambda ctx: (yield from AgentCall(child, "go"))
    )
    with Engine(models={"acme": ScriptedModel(["hi"])}) as engine:
        result = engine.run_sync(parent if is_child else child, "go", limits=Limits(max_cost_usd=1))

    assert f"the price of the model {model!r} is unknown" in str(result.error)


def test_plain_function_as_tool_is_refused_with_the_missing_decorator() -> None:
    def look() -> str:
        return "seen"

    with pytest.raises(DefinitionError, match="put @tool above def look"):
        AgentDefinition("a", tools=[look])


@pytest.mark.spec("generator-contract:T23")
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with words"])
def test_a_turn_that_a_thought_alone_ends_is_warned_about(is_alone: bool) -> None:
    thought = ToolCallPart("c1", "think_deeply", {"thought": "Hm."})
    reply = ModelReply((thought,) if is_alone else (TextPart("Done."), thought))
    thinker = AgentDefinition("thinker", model="test/m", tools=["think_deeply"])

    with Engine([thinker], control_tools(), models=ScriptedModel([reply])) as engine:
        result = engine.run_sync("thinker", "Go.")

    assert RunStatus.COMPLETED is result.status
    said = [one for one in result.warnings if "the turn of agent 'thinker' ended after 'think_deeply' alone" in one]
    assert int(is_alone) == len(said)


@pytest.mark.parametrize("method", ["append", "extend"])
def test_discarded_longer_history_is_an_error_at_its_line(method: str) -> None:
    def handler(ctx: Any) -> Any:
        history, message = ctx.agent_state.message_history, UserMessage("x")
        kept = history.append(message).extend([message])
        assert len(kept) == len(history) + 2
        if method == "append":
            history.append(message)
        history.extend([message])
        yield STEP

    result = run(handler)

    assert f"TypeError: {method} returns a new transcript" in str(result.error)
    assert "add_message" in str(result.error)
    assert ":" in result.error.where


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda: StepWith(modle="x"),
            "StepWith has no argument 'modle'; did you mean 'model'? Valid arguments: model, tools, tool_choice, settings",
        ),
        (
            lambda: Ask("Which?", allow_other=True),
            "Ask has no argument 'allow_other'; did you mean 'allow_text'? Valid arguments: question, options",
        ),
        (lambda: ToolCall("look", {}, include_tool_cal=False), "did you mean 'include_tool_call'?"),
    ],
    ids=["StepWith", "Ask", "ToolCall"],
)
def test_invalid_yieldable_argument_outside_a_handler_names_the_valid_one(wrong: Any, words: str) -> None:
    with pytest.raises(TypeError) as raised:
        wrong()

    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        (lambda _: call(read_files, ["a.py"]).data, "write `yield from` before it"),
        (lambda _: call(read_files, ["a.py"])["content"], "write `yield from` before it"),
        (lambda ctx: ctx.params.files, "write ['files']"),
        (lambda ctx: ctx.message_history, "ctx.agent_state.message_history"),
        (
            lambda _: read_files.arguments(path="a.py"),
            "read_files: missing a required argument: 'paths'; valid arguments: paths, ",
        ),
        (
            lambda _: find.arguments(1, path="a.py"),
            "find: missing a required argument: 'paths'; valid arguments: max_results, paths",
        ),
    ],
    ids=["not yielded", "an item of it", "params", "the context", "a bundled tool", "an own tool"],
)
def test_beginner_mistake_is_reported_with_the_right_code(slip: Any, said: str) -> None:
    def handler(ctx: Any) -> Any:
        slip(ctx)
        yield STEP

    result = run(handler)

    assert result.status is RunStatus.FAILED
    assert said in str(result.error)
    assert Path(__file__).name in result.error.where
