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


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_a_script_and_documents_its_command(name: str, tmp_path: Path) -> None:
    code = (others.EXAMPLES / f"{name}.py").read_text()

    assert f"python examples/from_others/{name}.py" in code
    assert "real model, omit ``models=``" in code or "real models, omit ``models=``" in code
    assert len(ran(others.EXAMPLES / f"{name}.py", tmp_path).splitlines()) >= 2


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
