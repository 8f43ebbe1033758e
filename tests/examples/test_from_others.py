"""
Programs in the shape of other frameworks' examples. Each has a recorded run, replayed without network, key and model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from cassettes import record_others as others
from stepengine import Engine, RunStatus
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.workspace.network import block_test_network
from tests.offline import ROOT, ran

pytestmark = pytest.mark.usefixtures("forks")
PROGRAMS = sorted(file.stem for file in others.EXAMPLES.glob("*.py"))


def replay(name: str, files: Path) -> tuple[ModuleType, Any]:
    program = others.load_program(name)
    with others.make_engine(program, files) as engine:
        return program, engine.replay_sync(FileJournal(others.OTHERS / f"{name}.jsonl"))


def test_every_program_has_exactly_one_recorded_run() -> None:
    assert PROGRAMS == sorted(file.stem for file in others.OTHERS.iterdir())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_replays_byte_for_byte_offline(name: str, tmp_path: Path) -> None:
    path = others.OTHERS / f"{name}.jsonl"
    with block_test_network([]) as refused:
        _, result = replay(name, tmp_path)

    assert (RunStatus.COMPLETED, []) == (result.status, refused)
    assert path.read_bytes() == result.journal.content()
    assert [] == list(tmp_path.iterdir())
    assert [] == [f for f in (ROOT, Path.home(), Path(tempfile.gettempdir())) if f"{f}/".encode() in path.read_bytes()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_script_records_the_same_run_again(name: str, tmp_path: Path) -> None:
    """
    When this fails because a program or a tool was changed on purpose: python -m cassettes.record_others
    """
    again, before = others.record(name, tmp_path), others.OTHERS / f"{name}.jsonl"

    # The first line names the version.
    assert before.read_bytes().partition(b"\n")[2] == again.read_bytes().partition(b"\n")[2]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_a_script_and_documents_its_command(name: str, tmp_path: Path) -> None:
    code = (others.EXAMPLES / f"{name}.py").read_text()

    assert f"python examples/from_others/{name}.py" in code
    assert "To go live" in code
    assert len(ran(others.EXAMPLES / f"{name}.py", tmp_path).splitlines()) >= 2


def test_a_booking_survives_wrong_and_rejected_flights(tmp_path: Path) -> None:
    program, result = replay("pydantic_ai_flight_booking", tmp_path)
    recorded = result.journal.content().decode()

    assert ("DY1", program.Seat(row=14, letter="A")) == (result.output.flight.number, result.output.seat)
    assert "The destination is ARN, not OSL." in recorded
    assert "The customer does not want SK7." in recorded


def test_the_handoff_target_sees_less_than_the_record_keeps(tmp_path: Path) -> None:
    _, result = replay("openai_agents_handoffs", tmp_path)
    history = result.state.message_history

    assert ("spanish", "Vives en Nueva York. No sé tu nombre.") == (result.state.handed_to, result.output)
    assert "Hi, my name is Sora." == history[0].text
    assert ["population", "hand_off"] == [m.tool_name for m in history if m.role == "tool"]


def test_sensitive_calls_ask_and_a_denial_is_a_result(tmp_path: Path) -> None:
    _, result = replay("openai_agents_human_in_the_loop", tmp_path)

    assert [
        ("get_weather", "ok"), ("get_temperature", "ok"), ("get_temperature", "ok"), ("get_temperature", "denied"),
    ] == [(call.tool_name, call.result.status) for call in result.tool_calls]  # fmt: skip
    assert "the sensor is broken" in result.tool_calls[-1].result.text


def test_one_reply_starts_three_researchers_answering_in_order(tmp_path: Path) -> None:
    program, result = replay("deepagents_parallel_research", tmp_path)

    assert ["researcher"] * 3 == [child.agent_id for child in result.children]
    assert [f"{fact} https://pages.example/{topic}" for topic, fact in program.FACTS.items()] == [
        call.result.text for call in result.tool_calls if call.tool_name == "task"
    ]
    assert () == result.warnings


def test_input_filter_of_a_handoff_runs_once() -> None:
    """
    Later steps and runs of the agent that took over add to what the filter left.
    """
    program = others.load_program("openai_agents_handoffs")
    spanish = attrs.evolve(program.spanish, tools=[program.population])
    desk = attrs.evolve(program.agent, spawnable_agents=[spanish])
    front = [text("Hello."), text("Yes."), tool_call("hand_off", {"agent": "spanish"})]
    model = ScriptedModel([*front, tool_call("population", {"city": "New York"}), text("Sí."), text("De nada.")])
    state = None
    with Engine([desk], models=model) as engine:
        for words in ("One.", "Two.", "Three.", "Four."):
            state = engine.run_sync(desk, words, previous=state).state

    said = [[m.text for m in call.messages if m.text] for call in model.calls[3:]]
    left = ["Two.", "Yes.", "Three."]
    assert [left, [*left, "8500000"], [*left, "8500000", "Sí.", "Four."]] == said
