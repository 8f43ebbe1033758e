"""
The acceptance scenarios: what a user does from one end to the other, and what they see. Each run is recorded and then
replayed without what it was performed with. The fourth, `base2` and its layers, stands in `test_base2.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Perform,
    RunResult,
    RunStatus,
    StepContext,
    Steps,
    ToolCall,
    tool,
)
from stepengine.cli import ConsoleRenderer
from stepengine.errors import ReplayDivergence, UnknownOutcome
from stepengine.events import (
    FileChanged,
    PermissionDecided,
    PermissionRequested,
    PhaseChanged,
)
from stepengine.journal import MemoryJournal
from stepengine.models import ModelReply, ModelRequest, Models
from stepengine.permissions import Policy, Rule
from stepengine.sessions import FileSessions
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import ask_user_tool, file_tools, shell_tools
from tests.faults.scripts import WIRES
from tests.faults.server import fault_server, sse

MODEL = "test/model"


def by_turn(*replies: ModelReply) -> Callable[[ModelRequest], ModelReply]:
    """
    Answer by how often the model has spoken in the conversation that it is shown.
    """
    return lambda request: replies[sum(message.role == "assistant" for message in request.messages)]


def called(result: RunResult[Any]) -> list[tuple[str, str]]:
    return [(call.tool_name, call.result.status) for call in result.tool_calls]


@pytest.mark.spec("generator-contract:T6", "generator-contract:T5", "requirements:E10", "requirements:D10")
def test_s1_a_file_is_read_and_another_is_written(tmp_path: Path, run_snapshot: Any) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n")
    agent = AgentDefinition("simple", model=MODEL, tools=["read_files", "write_file"])
    replies = [
        tool_call("read_files", {"paths": ["notes.txt"]}),
        tool_call("write_file", {"path": "notes.upper.txt", "content": "BUY MILK\n"}),
        text("Done."),
    ]
    events: list[Any] = []
    journal = MemoryJournal()
    prompt = "Read notes.txt and write notes.upper.txt in capitals."

    tools = file_tools(tmp_path, write=True)
    with Engine([agent], tools, ScriptedModel(replies), observers=[events.append]) as engine:
        result = engine.run_sync(agent, prompt, journal=journal)
    with Engine([agent], tools, ScriptedModel([])) as engine:
        assert result == engine.replay_sync(journal)

    assert RunStatus.COMPLETED is result.status
    assert [("read_files", "ok"), ("write_file", "ok")] == called(result)
    assert "buy milk" in result.tool_calls[0].result.text
    assert {"notes.txt": "buy milk\n", "notes.upper.txt": "BUY MILK\n"} == {
        file.name: file.read_text() for file in tmp_path.glob("*.txt")
    }
    assert [("notes.upper.txt", "created")] == [(e.file, e.action) for e in events if type(e) is FileChanged]
    assert journal == run_snapshot


@tool
def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G10", "ecosystem:EC76", "requirements:G17")
async def test_s2_one_definition_has_the_same_effects_on_three_providers() -> None:
    agent = AgentDefinition("adder", tools=[add], system_prompt="Be brief.")
    shapes: dict[str, list[tuple[Any, ...]]] = {}
    for wire in [wire for wire in WIRES if wire.model.partition("/")[0] in ("anthropic", "openai", "google")]:
        prefix = wire.model.partition("/")[0]
        said = [("", [("add", '{"a": 2, "b": 3}')], "tool_use"), ("It is five.", [], "end_turn")]
        journal = MemoryJournal()
        async with fault_server(*[sse(*wire.stream(*s), "fin") for s in said]) as server:
            models = Models({prefix: wire.make(server.url)})
            async with Engine(
                [agent], models=models, default_model=wire.model, observers=[lambda event: None]
            ) as engine:
                result = await engine.run(agent, "What is 2 + 3?", journal=journal)
                assert result == await engine.replay(journal)
        assert len(server.requests) == 2, "the replay asked nobody"
        assert (RunStatus.COMPLETED, "It is five.") == (result.status, result.text)
        assert result.usage.total_tokens > 0
        assert (prefix == "google") == (result.cost is None)
        shapes[prefix] = [(r.path, r.seq, type(r.effect).__name__) for r in journal.records() if r.kind == "intent"]

    assert {"anthropic", "openai", "google"} == set(shapes)
    assert shapes["anthropic"] == shapes["openai"] == shapes["google"]


ASKED = {"questions": [{"question": "For how many?", "options": ["2", "4"]}]}


@pytest.mark.spec("requirements:K3", "requirements:L3", "reliability:SS05")
def test_s3_the_next_chat_message_answers_the_question(tmp_path: Path) -> None:
    looked_up: list[str] = []

    @tool
    def free_tables(day: str) -> str:
        """
        Say when there are free tables.

        Args:
            day: A day.
        """
        looked_up.append(day)
        return "at eight"

    waiter = AgentDefinition("waiter", model=MODEL, tools=[free_tables, ask_user_tool()])
    requests: list[ModelRequest] = []

    def reply(request: ModelRequest) -> ModelReply:
        requests.append(request)
        last = request.messages[-1]
        if last.role == "tool" and last.tool_name == "ask_user":
            return text(f"A table for {last.text}.")
        if last.role == "user" and last.text == "hello":
            return text("Hello.")
        return tool_calls(tool_call("free_tables", {"day": "Friday"}), tool_call("ask_user", ASKED))

    def message(words: str, session: str) -> RunResult[Any]:
        with Engine([waiter], models=ScriptedModel(reply), sessions=FileSessions(tmp_path)) as engine:
            return engine.run_sync(waiter, words, session_id=session)

    first = message("book a table", "u1:c1")
    saved = FileSessions(tmp_path).load("u1:c1")
    assert RunStatus.SUSPENDED is first.status
    (question,) = first.pending_questions
    assert (("2", "4"), "For how many?") == (question.options, question.text)
    assert "book a table" in [m.text for m in saved.messages]

    second = message("4", "u1:c1")
    assert RunStatus.COMPLETED is second.status
    assert ["Friday"] == looked_up, "a call was repeated"
    history = FileSessions(tmp_path).load("u1:c1").messages
    assert ["book a table"] == [m.text for m in history if m.role == "user"], "the answer is not a message of the user"
    (answer,) = [m for m in history if m.role == "tool" and m.tool_name == "ask_user"]
    assert "4" in answer.text

    assert "Hello." == message("hello", "u2:c1").text
    assert ["hello"] == [m.text for m in requests[-1].messages]


@pytest.mark.spec("requirements:M15", "requirements:M3", "requirements:M9", "requirements:N11", "requirements:N16")
async def test_s5_the_console_asks_and_a_denied_command_never_runs(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("color\n")
    tools = [*file_tools(tmp_path, write=True), *shell_tools(tmp_path)]
    agent = AgentDefinition("coder", model=MODEL, tools=["read_files", "write_file", "run_terminal_command"])
    policy = Policy(
        [Rule.allow_category("read"), Rule.ask_for_tool("write_file"), Rule.ask_for_tool("run_terminal_command")]
    )
    replies = by_turn(
        tool_call("read_files", {"paths": ["letter.txt"]}),
        tool_call("write_file", {"path": "letter.txt", "content": "colour\n"}),
        tool_call("run_terminal_command", {"command": "touch ran.txt"}),
        text("The letter is corrected."),
        text("I did."),
    )
    events: list[Any] = []
    typed = "and keep it short\ny\nn no commands\n/quit\n"
    async with (
        Engine([agent], tools, ScriptedModel(replies), permissions=policy, observers=[events.append]) as engine,
        engine.start(agent, "Correct it.", keep_open=True) as handle,
    ):
        result = await ConsoleRenderer(handle, input=io.StringIO(typed), output=io.StringIO()).run()

    asked = [e for e in events if type(e) is PermissionRequested]
    decided = [e for e in events if type(e) is PermissionDecided]
    assert ["write_file", "run_terminal_command"] == [e.tool_name for e in asked]
    assert "+colour" in str(asked[0].preview)
    assert "touch ran.txt" in str(asked[1].preview)
    assert [("read_files", "allow"), ("write_file", "allow"), ("run_terminal_command", "deny")] == [
        (e.tool_name, e.decision) for e in decided
    ]
    for request, decision in zip(asked, decided[1:], strict=True):
        phases = [e.phase for e in events if type(e) is PhaseChanged and e.index < decision.index]
        assert "awaiting_permission" == str(phases[-1].value), request.tool_name
    assert "colour\n" == (tmp_path / "letter.txt").read_text()
    assert not (tmp_path / "ran.txt").exists()
    assert [("read_files", "ok"), ("write_file", "ok"), ("run_terminal_command", "denied")] == called(result)
    assert ["Correct it.", "and keep it short"] == [m.text for m in result.state.message_history if m.role == "user"]


class World:
    """
    What an agent of every kind of effect did outside: seats that were booked, a clerk and a model that were asked.
    """

    def __init__(self) -> None:
        self.done: list[str] = []

        @tool(idempotent=False)
        def book(seat: str) -> str:
            """
            Book a seat.

            Args:
                seat: Which.
            """
            self.done.append(f"book {seat}")
            return f"booked {seat}"

        def clerk() -> str:
            self.done.append("clerk")
            return "ready"

        def greet(ctx: StepContext) -> Steps[str]:
            yield STEP
            return "hello"

        def handle_steps(ctx: StepContext) -> Steps[list[str]]:
            seat = yield from ToolCall("book", {"seat": "4a"})
            yield STEP
            said = yield from Perform.idempotent(clerk)
            hello = yield from AgentCall(greeter, "Greet.")
            return [seat.text, said, hello]

        def changed(ctx: StepContext) -> Steps[list[str]]:
            yield from ToolCall("book", {"seat": "4b"})
            return []

        greeter = AgentDefinition("greeter", model=MODEL, handle_steps=greet)
        self.agent, self.changed = [
            AgentDefinition("booker", model=MODEL, tools=[book], spawnable_agents=[greeter], handle_steps=handler)
            for handler in (handle_steps, changed)
        ]

    def engine(self, agent: AgentDefinition[Any] | None = None) -> Engine:
        def said(request: ModelRequest) -> ModelReply:
            self.done.append("model")
            return text("Well.")

        return Engine([agent or self.agent], models=ScriptedModel(said))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R2", "generator-contract:G7")
def test_s11_crash_after_any_record_resumes_to_the_same_result(tmp_path: Path) -> None:
    world, whole = World(), tmp_path / "whole.jsonl"
    with world.engine() as engine:
        done = engine.run_sync("booker", "Book.", journal=str(whole))
    assert ["booked 4a", "ready", "hello"] == done.unwrap()
    assert ["book 4a", "model", "clerk", "model"] == world.done
    lines = whole.read_text().splitlines(keepends=True)

    for cut in range(2, len(lines)):
        kept, part = "".join(lines[:cut]), tmp_path / f"{cut}.jsonl"
        part.write_text(kept)
        world.done.clear()
        with world.engine() as engine:
            again = engine.resume_sync(str(part))
            if '"tool_name":"book"' in kept and "booked 4a" not in kept:
                assert isinstance(again.error, UnknownOutcome), cut
                assert "book 4a" not in world.done, "an effect in doubt is not repeated unless that does no harm"
            else:
                assert done.unwrap() == again.unwrap(), cut
                assert done.state.message_history == again.state.message_history, cut
                assert ("book 4a" in world.done) == ("booked 4a" not in kept), cut
            world.done.clear()
            assert again == engine.replay_sync(str(part))
        assert not world.done, "a replay touches nothing"


@pytest.mark.spec("reliability:R2", "generator-contract:G9", "replay:D1")
def test_s11_a_changed_handler_diverges_with_its_file_and_line(tmp_path: Path) -> None:
    world, whole = World(), tmp_path / "whole.jsonl"
    with world.engine() as engine:
        engine.run_sync("booker", "Book.", journal=str(whole))
    world.done.clear()

    with world.engine(world.changed) as engine, pytest.raises(ReplayDivergence) as caught:
        engine.replay_sync(str(whole))

    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if '"seat": "4b"' in text)
    assert f"test_scenarios.py:{line}" in str(caught.value.site)
    assert not world.done
