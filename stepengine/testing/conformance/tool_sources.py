"""``check_tool_source``: the promises of a source of tools, in runs of an agent that calls one of its tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from stepengine.data.definition import AgentDefinition, ToolSource
from stepengine.data.state import RunStatus
from stepengine.data.yields import Ask, ToolCall
from stepengine.engine.engine import Engine
from stepengine.journal.store import MemoryJournal
from stepengine.testing.conformance.promises import Promises, require, require_equal

MakeSource: TypeAlias = Callable[[bool], ToolSource]


class _TestedSource(NamedTuple):
    make: MakeSource
    tool: str
    input: Mapping[str, Any]


TOOL_SOURCE: Promises[_TestedSource] = Promises("check_tool_source(make, tool, input")


def check_tool_source(make: MakeSource, tool: str, input: Mapping[str, Any], *, only: str = "") -> None:
    """
    Check that a source of tools meets the promises of its interface.

    Args:
        make: Returns a source. It is called with True, or with False for one whose server cannot be reached.
        tool: The name of one of its tools, as a model sees it.
        input: An input with which this tool succeeds.
        only: The name of one promise; by default all are checked.

    Raises:
        AssertionError: when a promise is broken; the message names it and the call that checks it alone.
    """
    TOOL_SOURCE.check(_TestedSource(make, tool, input), only)


def _make_asking_agent(tested: _TestedSource) -> AgentDefinition[Any]:
    """Return an agent that calls the tool, asks a person, and calls the tool again."""

    def call(_ctx: Any) -> Any:
        result = yield from ToolCall(tested.tool, dict(tested.input))
        answer = yield from Ask("Again?", options=["yes", "no"])
        return [result.text, (yield from ToolCall(tested.tool, dict(tested.input))).text, answer]

    return AgentDefinition("caller", tools=[tested.make(True)], handle_steps=call)


def _make_calling_agent(tested: _TestedSource, source: ToolSource) -> AgentDefinition[Any]:
    """Return an agent that calls the tool of *source* once, and returns the text of the result."""

    def call(_ctx: Any) -> Any:
        return (yield from ToolCall(tested.tool, dict(tested.input))).text

    return AgentDefinition("caller", tools=[source], handle_steps=call)


def _run_calling_agent(tested: _TestedSource, source: ToolSource, **options: Any) -> Any:
    """Run the agent that calls the tool of *source*, and return its result; *options* are those of ``run_sync``."""
    with Engine([_make_calling_agent(tested, source)]) as engine:
        return engine.run_sync("caller", **options)


@TOOL_SOURCE.add("source", "It has a name, `pre_run` and `aclose`; each tool has a description and an object schema.")
def _check_tool_definitions(tested: _TestedSource) -> None:
    """Fail for a source without a name or hooks, and for a tool without a description or an object schema."""
    source = tested.make(True)
    require(isinstance(source, ToolSource), f"{source!r} lacks `name`, `pre_run` or `aclose`")
    require(source.name and source.name == tested.make(True).name, "`name` is empty, or differs each time")
    result = _run_calling_agent(tested, source)
    for name, shown in result.state.tool_definitions.items():
        require(shown.description, f"the tool {name!r} has no description")
        require_equal("object", shown.input_schema.get("type"), f"type in the schema of {name!r}")


@TOOL_SOURCE.add(
    "call", "A tool of the source runs like any other, also when one source object serves several engines in turn."
)
def _check_repeated_calls(tested: _TestedSource) -> None:
    """Fail unless a tool of the source can be called in several engines in turn."""
    source = tested.make(True)
    for _ in range(2):
        result = _run_calling_agent(tested, source)
        require_equal(RunStatus.COMPLETED, result.status, f"status of a run with the error {result.error!r}")


@TOOL_SOURCE.add("engines", "Closing one engine leaves the source usable for another engine.")
def _check_several_engines(tested: _TestedSource) -> None:
    """Fail unless the source remains usable for an engine after another one is closed."""
    agent = _make_calling_agent(tested, tested.make(True))
    with Engine([agent]) as first:
        with Engine([agent]) as second:
            second.run_sync("caller").unwrap()
        first.run_sync("caller").unwrap()


@TOOL_SOURCE.add(
    "unreachable",
    "If its server cannot be reached, the run fails with the reason before the first step; it does not hang.",
)
def _check_unreachable_server(tested: _TestedSource) -> None:
    result = _run_calling_agent(tested, tested.make(False))
    require_equal(RunStatus.FAILED, result.status, "status of the run")
    require(result.error is not None and str(result.error), "the run has no error text")


@TOOL_SOURCE.add("replay", "A recorded run replays without its server: look-ups of tools are recorded with Perform.")
def _check_replay_without_server(tested: _TestedSource) -> None:
    """Fail unless a recorded run replays without the server of its tools."""
    journal = MemoryJournal()
    recorded = _run_calling_agent(tested, tested.make(True), journal=journal).unwrap()
    with Engine([_make_calling_agent(tested, tested.make(False))]) as engine:
        require_equal(recorded, engine.replay_sync(journal).unwrap(), "output of the replay")


@TOOL_SOURCE.add("resume", "A run that waits for a person is resumed with another object, and its tools work.")
def _check_resume_with_new_source(tested: _TestedSource) -> None:
    """Fail unless a waiting run is resumed with another source object, and its tools work."""
    journal = MemoryJournal()
    with Engine([_make_asking_agent(tested)]) as engine:
        waiting = engine.run_sync("caller", journal=journal)
    require_equal(1, len(waiting.pending_questions), f"open questions of a run with the error {waiting.error!r}")
    with Engine([_make_asking_agent(tested)]) as engine:
        result = engine.resume_sync(journal, answers={waiting.pending_questions[0].id: "yes"})
    require_equal("yes", result.unwrap()[2], "answer in the resumed run")
