"""
The examples of `examples/extending` run as scripts and keep the promises of their interfaces.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepengine.testing import (
    check_interactor,
    check_journal,
    check_provider,
    check_sandbox,
    check_sessions,
    check_tool_source,
)
from tests.offline import LOOPBACK_ONLY, ROOT, ran

pytestmark = pytest.mark.usefixtures("forks")
FOLDER = ROOT / "examples" / "extending"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))

    def load_example(name: str) -> ModuleType:
        # Another test of this process may have imported a module of the same name.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
        return importlib.import_module(name)

    return load_example


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_runs_as_a_script(file: Path, tmp_path: Path) -> None:
    assert ran(file, tmp_path, network=LOOPBACK_ONLY).strip()


@pytest.mark.deep
@pytest.mark.spec("replay:J52")
def test_the_journal_store_passes_its_contract_checks(load: Callable[[str], ModuleType]) -> None:
    example = load("journal_store")
    with example.JournalServer() as server:
        check_journal(partial(example.HttpJournal, server.url))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV139")
def test_the_provider_passes_its_contract_checks(load: Callable[[str], ModuleType]) -> None:
    example = load("provider")
    with example.LinesServer() as server:

        def make(situation: str) -> Any:
            server.plays = situation
            return example.LinesProvider("127.0.0.1", 9 if situation == "unreachable" else server.server_port)

        check_provider(make, "small")


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC232")
def test_the_session_store_passes_its_contract_checks(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    check_sessions(partial(load("session_store").TableSessions, tmp_path))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC232")
def test_the_tool_source_passes_its_contract_checks(load: Callable[[str], ModuleType]) -> None:
    example = load("tool_source")
    with example.Station() as server:

        def make(reachable: bool) -> Any:
            return example.DescribedTools("station", server.url if reachable else "http://127.0.0.1:9")

        check_tool_source(make, "weather", {"city": "Oslo"})


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT38")
def test_the_surface_passes_its_contract_checks(load: Callable[[str], ModuleType]) -> None:
    example = load("surface")
    with contextlib.ExitStack() as stack:

        def make(replies: Any) -> Any:
            surface = stack.enter_context(example.HttpSurface())
            person = threading.Thread(target=example.play_person, args=(surface.server_port, list(replies)))
            person.start()
            stack.callback(person.join)
            return surface

        check_interactor(make)


@pytest.mark.deep
@pytest.mark.spec("programs:PG45")
def test_the_sandbox_passes_its_contract_checks(load: Callable[[str], ModuleType]) -> None:
    check_sandbox(load("sandbox").ChildSandbox)
