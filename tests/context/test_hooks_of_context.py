"""
The small hooks: reminders, injected content, a strict limit, a log of usage, unfinished todos; and what hooks are told.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import (
    AgentDefinition,
    AgentState,
    AssistantMessage,
    Change,
    Hooks,
    RunStatus,
    ToolContext,
    Usage,
    UserMessage,
    tool,
)
from stepengine.cli import bench
from stepengine.cli.app import app
from stepengine.cli.options import Options
from stepengine.context import (
    inject_context,
    raise_on_overflow,
    reminders,
    require_finished_todos,
    summarize,
    truncate,
    usage_logger,
)
from stepengine.data.estimate import message_tokens
from stepengine.data.messages import ImagePart, TextPart
from stepengine.errors import ContextOverflow, DefinitionError
from stepengine.events import LogLine
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, failure, text, tool_call
from tests.context.worlds import MODEL, Worker, context, digging, engine


def worker(hooks: Hooks, **fields: Any) -> AgentDefinition[Any]:
    return AgentDefinition("worker", model=MODEL, hooks=hooks, **{"tools": [digging()], **fields})


# --- what is said with every request --------------------------------------------------------------------------------


@pytest.mark.spec("requirements:H13", "generator-contract:L32")
async def test_reminders_end_every_request_and_are_never_stored() -> None:
    image = ImagePart("https://example.com/a.png")
    asked: list[int] = []

    def counting(ctx: Any) -> str | None:
        asked.append(ctx.step_index)
        return f"Step {ctx.step_index}." if ctx.step_index else None

    hooks = Hooks(pre_step=[reminders("Be brief.", counting), inject_context("In Oslo.", image, lambda ctx: "")])
    model, journal = Worker(2), MemoryJournal()
    agent = worker(hooks, step_prompt="Go.")
    result = await engine(model).run(agent, "dig", journal=journal)

    brief = "<system-reminder>\nBe brief.\n</system-reminder>"
    said = [f"{brief}\n<system-reminder>\nStep {n}.\n</system-reminder>" if n else brief for n in range(3)]
    assert said == [request.tail[0].text for request in model.requests]
    assert [0, 1, 2] == asked
    for request in model.requests:
        assert [("REMINDER",), ("INJECTED_CONTEXT",), ("STEP_PROMPT",)] == [m.tags for m in request.tail]
        assert (TextPart("In Oslo."), image) == request.tail[1].content
    assert not any("Oslo" in m.text or "brief" in m.text for m in result.state.message_history)
    assert result.state.view is result.state.message_history
    assert (await engine(Worker(0)).replay(journal, agent=agent)).state == result.state


@pytest.mark.spec("requirements:H13", "generator-contract:L32")
async def test_pre_run_injection_ends_every_request_and_is_computed_once() -> None:
    asked: list[int] = []

    def counting(ctx: Any) -> str:
        asked.append(ctx.step_index)
        return "In Oslo."

    hooks = Hooks(pre_run=[inject_context(counting), reminders("Be brief.")])
    model, journal = Worker(2), MemoryJournal()
    agent = worker(hooks)
    result = await engine(model).run(agent, "dig", journal=journal)

    assert (3, [0]) == (len(model.requests), asked)
    for request in model.requests:
        assert ["In Oslo.", "<system-reminder>\nBe brief.\n</system-reminder>"] == [m.text for m in request.tail]
    assert not any("Oslo" in m.text or "brief" in m.text for m in result.state.message_history)
    assert (await engine(Worker(0)).replay(journal, agent=agent)).state == result.state


@pytest.mark.spec("requirements:H13", "requirements:H1", "generator-contract:L32")
def test_hooks_without_content_change_nothing() -> None:
    for hook in (reminders(), reminders("", lambda ctx: None), inject_context(), inject_context(lambda ctx: None)):
        assert hook(context()) is None


# --- a strict limit -------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:I5", "requirements:X28", "requirements:I2", "reliability:GN30")
async def test_oversized_prompt_fails_run_before_model_call() -> None:
    model = Worker(100)
    result = await engine(model).run(worker(Hooks(pre_step=[raise_on_overflow(2_000)])), "dig")

    assert RunStatus.FAILED is result.status
    assert isinstance(result.error, ContextOverflow)
    assert 5 < len(model.requests) < 20
    measured = int(result.error.message.split("about ")[1].split(" ")[0])
    assert 2_000 < measured < 2_500
    assert "but 2000 are allowed" in result.error.message


@pytest.mark.spec("requirements:I2", "requirements:I5", "requirements:X28")
@pytest.mark.parametrize(
    ("given", "window", "allowed"), [(500, 9_999, 500), (None, 10_000, 8_000), (None, None, 100_000)]
)
def test_overflow_limit_defaults_to_share_of_window_or_100k(
    given: int | None, window: int | None, allowed: int
) -> None:
    def message(tokens: int) -> UserMessage:
        return UserMessage("x" * 4 * (tokens - message_tokens(UserMessage(""))))

    check = raise_on_overflow(given)
    check(context(message(allowed), context_window=window))
    with pytest.raises(ContextOverflow, match=f"about {allowed + 1} tokens, but {allowed} are allowed"):
        check(context(message(allowed + 1), context_window=window))


@pytest.mark.spec("reliability:MP02")
@pytest.mark.parametrize(
    "hooks", [Hooks(), Hooks(pre_step=[raise_on_overflow(), reminders("Hi.")])], ids=["none", "some"]
)
async def test_without_a_strategy_the_providers_overflow_fails_the_run(hooks: Hooks) -> None:
    model = ScriptedModel([failure(ContextOverflow("too long for me", kind="context_overflow"))])
    result = await engine(model).run(worker(hooks), "dig")

    assert (RunStatus.FAILED, 1) == (result.status, len(model.calls))
    assert isinstance(result.error, ContextOverflow)
    assert "too long for me" == result.error.message


@pytest.mark.spec("reliability:MP02")
async def test_hook_that_shortens_the_view_on_overflow_rescues_the_run() -> None:
    told: list[Any] = []

    def forgetful(ctx: Any) -> Change | None:
        told.append(None if ctx.overflow is None else ctx.overflow.message)
        return Change(view=ctx.state.view[-1:], tail=(UserMessage("shorter"),)) if ctx.overflow else None

    previous = AgentState.from_messages([UserMessage("long ago"), AssistantMessage("yes")])
    model = ScriptedModel([failure(ContextOverflow("full")), text("done")])
    result = await engine(model).run(worker(Hooks(pre_step=[forgetful])), "now", previous=previous)

    assert ["done", [None, "full"]] == [result.text, told]
    assert [["long ago", "yes", "now"], ["now", "shorter"]] == [[m.text for m in r.all_messages] for r in model.calls]
    assert ["long ago", "yes", "now", "done"] == [m.text for m in result.state.message_history]


@pytest.mark.spec("reliability:MP02")
async def test_chained_policies_halve_a_refused_prompt_once() -> None:
    previous = AgentState.from_messages([UserMessage(f"{n} " + "word " * 200) for n in range(20)])
    left = []
    for policies in ([truncate()], [truncate(), truncate()], [truncate(), reminders("Hi."), truncate()]):
        model = ScriptedModel([failure(ContextOverflow("full")), text("done")])
        result = await engine(model).run(worker(Hooks(pre_step=policies)), "now", previous=previous)
        left.append((result.text, [m.text for m in model.calls[1].messages]))

    assert "done" == left[0][0]
    assert 8 < len(left[0][1]) < 12
    assert left[0] == left[1] == left[2]


# --- what hooks are told --------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X45", "requirements:E10", "requirements:I1")
async def test_hooks_receive_window_and_provider_reported_size() -> None:
    seen: list[tuple[int, int | None]] = []

    def look(ctx: Any) -> Change | None:
        seen.append((ctx.context_tokens, ctx.context_window))
        return Change(system_prompt="another") if ctx.step_index == 2 else None

    model = ScriptedModel(
        [
            tool_call("dig", {"depth": 1}, usage=Usage(900, 5, cache_read_tokens=100)),
            tool_call("dig", {"depth": 2}, usage=Usage(2_000, 5)),
            tool_call("dig", {"depth": 3}, usage=None),
            text("done"),
        ]
    )
    result = await engine(model, 50_000).run(worker(Hooks(pre_step=[look], post_step=[lambda c, r: look(c)])), "dig")
    history = result.state.message_history
    added = [message_tokens(history[n]) + message_tokens(history[n + 1]) for n in (1, 3)]

    assert {50_000} == {window for _, window in seen}
    assert [1_000 + added[0]] * 2 == [tokens for tokens, _ in seen[1:3]]
    assert [2_000 + added[1]] * 2 == [tokens for tokens, _ in seen[3:5]]
    assert all(tokens < 1_000 for tokens, _ in (seen[0], *seen[5:]))


@pytest.mark.spec("requirements:X45")
async def test_paused_reply_counts_only_its_last_prompt() -> None:
    seen: list[int] = []
    script = [
        text("a", usage=Usage(500, 1), stop_reason="pause"),
        tool_call("dig", {"depth": 1}, usage=Usage(510, 1)),
        text("done"),
    ]
    hooks = Hooks(pre_step=[lambda ctx: seen.append(ctx.context_tokens)])
    result = await engine(ScriptedModel(script)).run(worker(hooks), "dig")

    assert 510 + sum(message_tokens(m) for m in result.state.message_history[1:3]) == seen[1]


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:H16")
@pytest.mark.parametrize("fails", [False, True])
async def test_usage_logger_logs_session_and_tokens_after_each_run(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    usage = Usage(10, 3, cache_read_tokens=5, reasoning_tokens=2)
    script = [
        tool_call("dig", {"depth": 1}, usage=usage),
        failure(ValueError("no")) if fails else text("x", usage=usage),
    ]
    logger = logging.getLogger("tests.usage")
    with caplog.at_level(logging.INFO, "tests.usage"):
        await engine(ScriptedModel(script)).run(worker(Hooks(post_run=[usage_logger(logger)])), "dig", session_id="s1")
    expected = (15, 5) if fails else (30, 10)

    assert [f"session s1: {expected[0]} input tokens, {expected[1]} output tokens"] == [
        r.getMessage() for r in caplog.records if r.name == "tests.usage"
    ]


@pytest.mark.spec("requirements:H16")
async def test_usage_logger_without_logger_emits_a_log_event() -> None:
    lab = engine(ScriptedModel([text("x", usage=Usage(10, 3))]), hooks=Hooks(post_run=[usage_logger()]))
    events = [event async for event in lab.stream(worker(Hooks()), "dig", session_id="s1")]

    assert [("info", "usage", {"session_id": "s1", "input_tokens": 10, "output_tokens": 3})] == [
        (e.level, e.message, e.data) for e in events if isinstance(e, LogLine)
    ]


# --- unfinished todos -----------------------------------------------------------------------------------------------


def todos(**done: bool) -> Any:
    return tool_call("write_todos", {"todos": [{"task": t, "completed": c} for t, c in done.items()]}, text="")


@pytest.mark.spec("requirements:F20", "requirements:H1")
@pytest.mark.parametrize("most", [0, 1, 2])
async def test_open_todos_send_agent_back_up_to_max_reminders(most: int) -> None:
    agent = worker(Hooks(on_stop=[require_finished_todos(most)]), tools=["write_todos"])
    said = [text(f"stop {n}") for n in range(most + 1)]
    model = ScriptedModel([todos(read=True, fix=False, test=False), *said, *said])
    lab = engine(model)
    first = await lab.run(agent, "work")
    second = await lab.run(agent, "and now?", previous=first.state)
    sent = [m for m in second.state.message_history if isinstance(m, UserMessage) and "UNFINISHED_TODOS" in m.tags]

    assert RunStatus.COMPLETED is first.status is second.status
    assert 2 * most == len(sent)
    for message in sent:
        assert "\n- fix\n- test\n" in message.text
        assert "- read" not in message.text
    model.assert_complete()
    with pytest.raises(DefinitionError, match="max_reminders must be a number of at least 0, not -1"):
        require_finished_todos(-1)


@pytest.mark.spec("requirements:F20", "requirements:X28")
def test_only_the_cli_installs_todo_and_compaction_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = [todos(fix=False), text("stop"), text("stop again")]
    agent = worker(Hooks(), tools=["write_todos"])
    monkeypatch.chdir(tmp_path)
    Path("tidy.py").write_text(
        "from stepengine import AgentDefinition\n"
        "agent = AgentDefinition('tidy', model='test/m', tools=['write_todos'])\n"
    )
    told, free = ScriptedModel(script), ScriptedModel(script)
    monkeypatch.setattr(bench, "make_model_registry", lambda *_: told)
    done = CliRunner().invoke(app, ["run", "./tidy.py", "work"])
    engine(free).run_sync(agent, "work")

    made = bench.make_engine_setup(Options(agent="tidy"), agent).engine._launcher.catalog.get_agent(agent)

    assert (summarize(),) == made.hooks.pre_step
    assert (0, 3, 2) == (done.exit_code, len(told.calls), len(free.calls))
    assert "\n- fix\n" in told.calls[2].all_messages[-1].text


@pytest.mark.spec("requirements:F20")
async def test_agent_without_open_todos_stops_freely() -> None:
    agent = worker(Hooks(on_stop=[require_finished_todos()]), tools=["write_todos"])
    for script in ([text("done")], [todos(read=True), text("done")]):
        result = await engine(ScriptedModel(script)).run(agent, "work")

        assert not any("UNFINISHED_TODOS" in m.tags for m in result.state.message_history if isinstance(m, UserMessage))


# --- engine and agent -----------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:H1", "reliability:GN37", "requirements:H16")
async def test_engine_hooks_run_before_agent_hooks() -> None:
    seen: list[str] = []

    def named(name: str) -> Any:
        return lambda ctx, *rest: seen.append(name)

    points = ("pre_run", "pre_step", "pre_tool", "post_tool", "post_step", "on_stop", "post_run")

    def hooks(who: str) -> Hooks:
        return Hooks(**{point: [named(f"{who} {point} {n}") for n in (1, 2)] for point in points})

    def script() -> ScriptedModel:
        return ScriptedModel([tool_call("dig", {"depth": 1}), text("done")])

    await engine(script(), hooks=hooks("engine")).run(worker(hooks("agent")), "dig")
    expected = [f"{who} pre_run {n}" for who in ("engine", "agent") for n in (1, 2)]

    assert expected == seen[:4]
    for point in points:
        order = [line for line in seen if f" {point} " in line]
        assert [f"{who} {point} {n}" for who in ("engine", "agent") for n in (1, 2)] == order[:4]


@pytest.mark.spec("requirements:E10")
async def test_tool_reads_remaining_tokens_and_requests_truncation() -> None:
    left: list[int | None] = []

    @tool(in_thread=False)
    def dump(ctx: ToolContext) -> str:
        """
        Say a lot.
        """
        left.append(ctx.remaining_tokens)
        ctx.request_truncation(50)
        return "x" * 5_000

    model = ScriptedModel([tool_call("dump", {}, usage=Usage(1_500, 1)), text("done")])
    result = await engine(model, 2_000).run(worker(Hooks(), tools=[dump]), "go")
    said = result.state.message_history[2].text

    assert [500] == left
    assert said.startswith("x" * 10)
    assert len(said) < 200
    assert said == model.calls[1].messages[-1].text
