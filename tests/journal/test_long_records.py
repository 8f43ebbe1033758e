"""How long a record may be: one rule for all runs, with and without a journal, and for all that comes into one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Change,
    Complete,
    Engine,
    Hooks,
    Perform,
    RunStatus,
    Send,
    Start,
    ToolCall,
    ToolResult,
    Wait,
    tool,
)
from stepengine.data import record_sizes
from stepengine.data.state import AgentState
from stepengine.errors import InputError, ModelError, ToolError
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal, encoding
from stepengine.testing import ScriptedModel, failure, tool_call

LIMIT, INLINE, ERROR = 3_000, 1_024, 900
"""What stands for 16 MiB, for 32,768 characters and for the 20,000 of an error here."""
BIG = "x" * 20_000
MANY = ["x" * 500] * 100
TEXTS = st.sampled_from(["a", "\n", "é", "\x00", "漢", "\U0001f600", '"']).flatmap(
    lambda one: st.sampled_from([0, 3, 300, 450, 490, 800, 990, 1_025, 2_990, 2_999, 3_100]).map(
        lambda times: one * times
    )
)
ANYTHING = {"type": ["object", "array", "string", "number", "boolean", "null"]}
VALUES = st.recursive(
    TEXTS | st.integers() | st.lists(st.integers(0, 9), min_size=700, max_size=1_600) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS.map(lambda text: text[:40]), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (record_sizes, encoding):
            patch.setattr(module, "MAX_VALUE_BYTES", LIMIT)
            patch.setattr(module, "MAX_INLINE_CHARS", INLINE)
        patch.setattr(encoding, "MAX_LINE_BYTES", LIMIT + 3_000)
        patch.setattr(record_sizes, "MAX_ERROR_CHARS", ERROR)
        patch.setattr(record_sizes, "MAX_MESSAGES_CHARS", 1_000)
        yield


STORES: dict[str, Callable[[Path], Journal]] = {
    "memory": lambda folder: MemoryJournal(inline=INLINE),
    "memory without blobs": lambda folder: MemoryJournal(inline=100 * INLINE),
    "file": lambda folder: FileJournal(folder / "run.jsonl"),
    "sqlite": lambda folder: SqliteJournal(folder / "runs.db", run="r"),
}


def journals(folder: Path, stores: Iterable[str] = STORES) -> list[Journal]:
    for old in folder.iterdir():
        old.unlink()
    return [STORES[store](folder) for store in stores]


def ends_of(folder: Path, make: Any, stores: Iterable[str] = STORES) -> list[Any]:
    """Return how a run ends without a journal, and with each; its replay and resume have to end in the same way."""
    ends = []
    for journal in (None, *journals(folder, stores)):
        case, seen = make(), []

        def end(result: Any, seen: list[str] = seen) -> Any:
            told, seen[:] = [*seen], []
            return result.status, str(result.output), result.text, type(result.error), str(result.error), told

        with Engine(
            case["agents"](seen),
            tools=case.get("tools", ()),
            models=ScriptedModel(case.get("replies", ())),
            pricing=None,
            interactor=case.get("person"),
        ) as engine:
            try:
                result = engine.run_sync("main", case.get("prompt", "go"), journal=journal, **case.get("options", {}))
                ended = end(result)
            except InputError as error:
                ends.append((type(error), str(error)))
                continue
            if journal is not None:
                assert end(engine.replay_sync(journal)) == ended
                assert end(engine.resume_sync(journal))[:4] == ended[:4]
        ends.append(ended)
    return ends


# --- what one of everything does --------------------------------------------------------------------------------------


def catching(make: Any, **definition: Any) -> Any:
    """Return what makes an agent that yields what *make* returns, notes the error that it gets, and goes on."""

    def agents(seen: list[str]) -> list[AgentDefinition[Any]]:
        def handle_steps(ctx: Any) -> Any:
            try:
                answer = yield make()
                seen.append(type(answer.value).__name__ if answer.tool_result is None else answer.tool_result.status)
            except Exception as error:
                seen.append(type(error).__name__)
            yield from Perform(int, "1")
            return "end"

        return [AgentDefinition("main", handle_steps=handle_steps, **definition)]

    return agents


def parent_of(child: Any, *, background: bool = False) -> Any:
    """Return what makes a parent that catches the error of *child*, an agent or the handler of one."""

    def agents(seen: list[str]) -> list[AgentDefinition[Any]]:
        def handle_steps(ctx: Any) -> Any:
            try:
                if background:
                    started = yield from Start(AgentCall("child"))
                    waited = yield from Wait(started)
                    seen.append(str(waited[started].status))
                else:
                    yield from AgentCall("child")
            except Exception as error:
                seen.append(type(error).__name__)
            yield from Perform(int, "1")
            return "end"

        made = child if isinstance(child, AgentDefinition) else AgentDefinition("child", handle_steps=child)
        return [AgentDefinition("main", handle_steps=handle_steps, spawnable_agents=["child"]), made]

    return agents


def make_handler(act: Callable[[], object]) -> Any:
    """Return a handler that does nothing but *act*: it returns what that returns, or fails with it."""

    def handle_steps(ctx: Any) -> Any:
        yield from ()
        return act()

    return handle_steps


def raise_(error: BaseException) -> Any:
    raise error


def noted(error: BaseException) -> BaseException:
    error.add_note(BIG)
    error.__cause__ = ValueError(BIG)
    return error


def tool_that(act: Any) -> Any:
    @tool(in_thread=False)
    def look() -> object:
        """Look."""
        return act()

    return look


def body_that(act: Any) -> Any:
    @tool
    def look() -> Any:
        """Look."""
        yield from Perform(int, "1")
        return act()

    return look


@tool(in_thread=False)
def takes(text: str) -> str:
    """Take."""
    return "ok"


class Person:
    def ask(self, question: Any) -> str:
        return BIG


def with_tool(made: Any) -> dict[str, dict[str, Any]]:
    """Return a call by a handler and one by a model."""
    by_model = [AgentDefinition("main", model="test/x", tools=["look"])]
    return {
        "handler": {"agents": catching(lambda: ToolCall("look"), tools=["look"]), "tools": [made]},
        "model": {"agents": lambda _: by_model, "tools": [made], "replies": [tool_call("look", {}), "end"]},
    }


def plain(**fields: Any) -> Any:
    return lambda _: [AgentDefinition("main", model="test/x", **fields)]


def adds_messages(seen: list[str]) -> Any:
    def handle_steps(ctx: Any) -> Any:
        try:
            yield ToolCall("add_message", {"role": "user", "content": BIG})
        except InputError:
            seen.append("refused")
        yield STEP

    return [AgentDefinition("main", model="test/x", handle_steps=handle_steps)]


def says_all(seen: list[str]) -> Any:
    def handle_steps(ctx: Any) -> Any:
        for _ in range(3):
            yield STEP

    return [AgentDefinition("main", model="test/x", handle_steps=handle_steps, output_mode="all_messages")]


def sends(seen: list[str]) -> Any:
    def child(ctx: Any) -> Any:
        yield from Perform(int, "1")

    def handle_steps(ctx: Any) -> Any:
        started = yield from Start(AgentCall("child"))
        try:
            yield from Send(started, BIG)
        except InputError:
            seen.append("refused")
        yield from Wait(started)

    return [
        AgentDefinition("main", handle_steps=handle_steps, spawnable_agents=["child"]),
        AgentDefinition("child", handle_steps=child),
    ]


def with_hook(point: str, hook: Any) -> dict[str, Any]:
    hooks = Hooks(**{point: [hook]})
    return {"agents": plain(tools=["takes"], hooks=hooks), "tools": [takes], "replies": ["end"]}


def calls_with_a_text(ctx: Any, *_: Any) -> Any:
    yield from ToolCall("takes", {"text": BIG})


PLACES: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]] = {
    "root": lambda act: {"agents": lambda _: [AgentDefinition("main", handle_steps=make_handler(act))]},
    "child": lambda act: {"agents": parent_of(make_handler(act))},
    "background child": lambda act: {"agents": parent_of(make_handler(act), background=True)},
    "function": lambda act: {"agents": catching(lambda: Perform(act))},
    "tool of a handler": lambda act: with_tool(tool_that(act))["handler"],
    "tool of a model": lambda act: with_tool(tool_that(act))["model"],
    "body of a handler": lambda act: with_tool(body_that(act))["handler"],
    "body of a model": lambda act: with_tool(body_that(act))["model"],
}
"""Where something is returned or raised."""
ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError(BIG),
    "message": lambda: InputError(BIG),
    "field": lambda: ModelError("m", kind=BIG, request_id=BIG),
    "issues": lambda: InputError("m", issues=[BIG, *MANY]),
    "notes": lambda: noted(ValueError("m")),
    "name": lambda: type("E" * 20_000, (Exception,), {})("m"),
    "tool": lambda: ToolError(BIG, tool_name=BIG),
}
RETURNED: dict[str, Any] = {"text": BIG, "list": MANY, "key": {BIG: 1}, "number": [10**4_000] * 2}
DEEDS: dict[str, Callable[[], Any]] = {
    **{f"raises {name}": lambda make=make: raise_(make()) for name, make in ERRORS.items()},
    **{f"returns {name}": lambda value=value: value for name, value in RETURNED.items()},
}
CROSSED = {
    f"{place} {deed}": lambda make=make, act=act: make(act)
    for place, make in PLACES.items()
    for deed, act in DEEDS.items()
    if place in ("child", "function") or deed in ("raises ValueError", "returns text")
} | {
    f"model raises {name}": lambda make=make: {"agents": plain(), "replies": [failure(make())]}
    for name, make in ERRORS.items()
    if name in ("ValueError", "field")
}
WAYS: dict[str, Any] = {
    **CROSSED,
    **{
        f"function takes {name}": lambda value=value: {"agents": catching(lambda: Perform(bool, value))}
        for name, value in RETURNED.items()
    },
}
for point in ("pre_step", "post_run"):
    WAYS |= {
        f"{point} hook raises": lambda p=point: with_hook(p, lambda ctx, *_: raise_(ValueError(BIG))),
        f"{point} hook changes context": lambda p=point: with_hook(p, lambda ctx, *_: Change(context={"a": BIG})),
        f"{point} hook calls with a text": lambda p=point: with_hook(p, calls_with_a_text),
    }
WAYS |= {
    "post_tool hook replaces a result": lambda: {
        **with_tool(tool_that(int))["model"],
        "agents": plain(tools=["look"], hooks=Hooks(post_tool=[lambda ctx, *_: ToolResult.text(BIG)])),
    },
    "tool changes context": lambda: with_tool(
        tool_that(lambda: ToolResult.text("ok", change=Change(context={"a": BIG})))
    )["handler"],
    "tool takes a text of a handler": lambda: {
        "agents": catching(lambda: ToolCall("takes", {"text": BIG}), tools=["takes"]),
        "tools": [takes],
    },
    "model calls with a text": lambda: {
        "agents": plain(tools=["takes"]),
        "tools": [takes],
        "replies": [tool_call("takes", {"text": BIG}), "end"],
    },
    "model says a text": lambda: {"agents": plain(), "replies": [BIG]},
    "model fails once": lambda: {
        "agents": plain(),
        "replies": [failure(ModelError(BIG, kind="http", status=500, retryable=True)), "end"],
    },
    "all messages": lambda: {"agents": says_all, "replies": [letter * 900 for letter in "abc"]},
    "prompt": lambda: {"agents": plain(), "replies": ["end"], "prompt": BIG},
    "params": lambda: {"agents": plain(input_schema=ANYTHING), "replies": ["end"], "options": {"params": {"a": BIG}}},
    "metadata": lambda: {"agents": plain(), "replies": ["end"], "options": {"metadata": {"a": BIG}}},
    "previous": lambda: {
        "agents": plain(),
        "replies": ["end"],
        "options": {"previous": AgentState.from_dicts([{"role": "user", "content": text} for text in MANY])},
    },
    "system prompt": lambda: {"agents": plain(system_prompt=BIG), "replies": ["end"]},
    "prompt of a child": lambda: {"agents": catching(lambda: AgentCall("child", BIG))},
    "question": lambda: {"agents": catching(lambda: Ask(BIG)), "person": Person()},
    "answer": lambda: {"agents": catching(lambda: Ask("?")), "person": Person()},
    "set_output": lambda: {
        "agents": catching(lambda: ToolCall("set_output", {"a": BIG}), output_mode="structured_output")
    },
    "Complete": lambda: {"agents": catching(lambda: Complete(BIG), model="test/x"), "replies": ["end"]},
    "add_message": lambda: {"agents": adds_messages, "replies": ["end"]},
    "Send": lambda: {"agents": sends},
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:GN16", "reliability:GN38")
@pytest.mark.parametrize("way", WAYS)
def test_long_values_end_a_run_equally_with_any_journal(way: str, tmp_path: Path) -> None:
    # The stores hold the lines that a journal in memory holds: all of them are used for what a function does.
    stores = STORES if way.startswith("function ") else ("memory",)
    alone, *recorded = ends_of(tmp_path, WAYS[way], stores)

    assert [alone] * len(recorded) == recorded
    assert "JournalWriteFailed" not in str(alone)
    if way.startswith("child raises"):
        assert (RunStatus.COMPLETED, ["ChildError"]) == (alone[0], alone[-1])


@pytest.mark.spec("reliability:GN38")
def test_truncated_error_states_the_omitted_length(tmp_path: Path) -> None:
    for *_, words, _ in ends_of(tmp_path, WAYS["root raises ValueError"]):
        assert len(words) == ERROR
        assert re.search(r"\[19,\d{3} more characters\]…$", words)


@pytest.mark.spec("reliability:GN38", "replay:J16")
async def test_oversized_messages_arrive_with_the_next_effects(tmp_path: Path) -> None:
    texts = [f"{number:03}{'x' * 300}" for number in range(9)]
    heard: list[list[str]] = []
    for journal in (None, *journals(tmp_path)):
        held: list[Any] = []

        def sends(held: list[Any] = held) -> None:
            for text in texts:
                held[0].send_input(text)
            with pytest.raises(InputError, match="too long"):
                held[0].send_input(BIG)

        def handle_steps(ctx: Any, sends: Any = sends) -> Any:
            yield from Perform(sends)
            for _ in texts:
                yield from Perform(int, "1")
            yield STEP

        agent = AgentDefinition("main", model="test/x", handle_steps=handle_steps)
        model = ScriptedModel(["end"])
        async with Engine([agent], models=model, pricing=None) as engine:
            held.append(handle := engine.start("main", "go", journal=journal))
            async with handle:
                result = await handle.result()
            assert RunStatus.COMPLETED is result.status, result.error
            heard.append([message.text for message in model.calls[-1].messages][1:])
            if journal is not None:
                assert result == await engine.replay(journal)
    assert [texts] * len(heard) == heard


# --- any value --------------------------------------------------------------------------------------------------------


def make_case(place: str, act: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Return what makes the agents that return what *act* does at a place, or as an output that has to fit a schema."""
    fits = AgentDefinition(
        "main", handle_steps=make_handler(act), output_mode="structured_output", output_schema=ANYTHING
    )
    return lambda: {"agents": lambda _: [fits]} if place == "output with a schema" else PLACES[place](act)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:GN16", "reliability:GN38")
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=VALUES,
    place=st.sampled_from(["root", "output with a schema", "function", "tool of a handler", "child"]),
    store=st.sampled_from(sorted(STORES)),
)
def test_value_that_a_run_accepts_is_accepted_by_every_journal(
    value: object, place: str, store: str, tmp_path: Path
) -> None:
    assume(place != "output with a schema" or value is not None)  # None is no output
    alone, recorded = ends_of(tmp_path, make_case(place, lambda: value), [store])

    assert alone == recorded
    assert "JournalWriteFailed" not in str(alone)
