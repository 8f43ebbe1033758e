"""
The snapshot fixtures in a project of their own, with syrupy as it is installed: files, failures, filters, what is unused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import syrupy
from syrupy.extensions.base import AbstractSyrupyExtension
from syrupy.extensions.single_file import SingleFileSnapshotExtension

import stepengine.engine
import stepengine.journal
import stepengine.pytest_plugin as plugin
from stepengine.testing import snapshots
from tests.plugin.conftest import run_here

pytest_plugins = ("pytester",)

SHARED = (stepengine.engine, stepengine.journal, snapshots)
FOLDER = Path("__snapshots__/test_it")

PROJECT = """
import pytest
from stepengine import AgentDefinition, Engine
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text
from stepengine.testing.snapshots import RunJsonSnapshot, run_to_snapshot_tree

agent = AgentDefinition("watcher", model="test/m", system_prompt="Watch.")

def run(prompt="go", journal=True):
    with Engine(models={"test": ScriptedModel([text("seen")])}) as engine:
        return engine.run_sync(agent, prompt, journal=MemoryJournal() if journal else None)
"""
TESTS = """
def test_run(run_snapshot):
    assert run() == run_snapshot
    assert run("again") == run_snapshot
    assert run() == run_snapshot(name="named")

class TestIt:
    @pytest.mark.parametrize("way", ["a", "b"])
    def test_run(self, way, run_snapshot):
        assert run(way).journal == run_snapshot

def test_json(run_snapshot):
    assert run() == run_snapshot(extension_class=RunJsonSnapshot)

def test_request(request_snapshot):
    assert {"model": "m", "a": [1]} == request_snapshot
    assert b'{"model": "n"}' == request_snapshot

def test_events(events_snapshot):
    async def collect():
        async with Engine(models={"test": ScriptedModel([text("seen")])}) as engine:
            return [event async for event in engine.stream(agent, "go")]
    import asyncio
    assert asyncio.run(collect()) == events_snapshot
"""
FILES = {
    "TestIt.test_run[a].run.md", "TestIt.test_run[b].run.md", "test_events.events.txt", "test_json.run.json",
    "test_request.1.request.json", "test_request.request.json", "test_run.1.run.md", "test_run.run.md",
    "test_run[named].run.md",
}  # fmt: skip


@pytest.fixture
def suite(pytester: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CI", raising=False)
    pytester.makeini("[pytest]\n")

    def ran(body: str, *args: str) -> Any:
        pytester.makepyfile(test_it=PROJECT + body)
        return run_here(pytester, "-p", "no:cacheprovider", "-p", "no:randomly", *args, plugins=[plugin, syrupy])

    return ran


def written() -> set[str]:
    return {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*") if file.is_file()}


@pytest.mark.spec("replay:F3", "replay:F6", "replay:F20", "replay:F21", "replay:F22", "requirements:P5", "replay:F23")  # fmt: skip
@pytest.mark.deep
def test_snapshots_are_written_on_update_and_must_be_used(suite: Any) -> None:
    suite(TESTS).assert_outcomes(failed=6)
    assert not FOLDER.exists()
    suite(TESTS, "--snapshot-update").assert_outcomes(passed=6)
    assert written() == FILES
    before = {name: (FOLDER / name).read_bytes() for name in FILES}
    assert before["test_run.run.md"].startswith(
        b"run watcher  completed  1 effect  1 model call\nprompt\n  go\n#0  model"
    )
    assert not [
        name for name, data in before.items() if data.translate(None, b"\n").count(b"\r") or not data.endswith(b"\n")
    ]

    suite(TESTS).assert_outcomes(passed=6)
    changed = suite(TESTS.replace('run("again")', 'run("once more")'))
    changed.assert_outcomes(failed=1, passed=5)
    changed.stdout.fnmatch_lines(["*-   again*", "*+   once more*"])

    fewer = TESTS.replace('    assert run("again") == run_snapshot\n', "")
    assert suite(fewer).ret == 1
    assert suite(fewer, "--snapshot-warn-unused").ret == 0
    assert suite(fewer, "-k", "test_json").ret == 0
    assert {name: (FOLDER / name).read_bytes() for name in FILES} == before
    suite(fewer, "--snapshot-update").assert_outcomes(passed=6)
    assert written() == FILES - {"test_run.1.run.md"}


FILTERED = """
from syrupy.filters import paths, props
from syrupy.matchers import path_type

def test_it(run_snapshot):
    told = run_to_snapshot_tree(run(), cost=True) | {"cost_usd": COST}
    assert told == run_snapshot(exclude=props("cost_usd"))
    assert told == run_snapshot(exclude=paths("steps.0.outcome"))
    assert told == run_snapshot(matcher=path_type({"cost_usd": (str,)}))
    assert told == run_snapshot(extension_class=RunJsonSnapshot, include=props("agent", "status"))
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:F9", "replay:F23")
def test_filters_and_matchers_see_the_run_as_plain_data(suite: Any) -> None:
    suite(FILTERED.replace("COST", "'0.5'"), "--snapshot-update").assert_outcomes(passed=1)
    first, second, third = [(FOLDER / f"test_it{n}.run.md").read_text() for n in ("", ".1", ".2")]
    assert "cost" not in first
    assert "seen" in first
    assert "cost at least $0.5" in second  # the reply has no usage
    assert "stop end_turn" not in second
    assert "cost at least $str" in third
    assert (FOLDER / "test_it.3.run.json").read_text() == '{\n  "agent": "watcher",\n  "status": "completed"\n}\n'
    again = suite(FILTERED.replace("COST", "'0.75'"))
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*run watcher*cost at least $0.5*", "*run watcher*cost at least $0.75*"])


@pytest.mark.spec("replay:F20", "ecosystem:EC123")
def test_without_syrupy_snapshot_fixtures_name_the_package_to_install(suite: Any) -> None:
    body = "\ndef test_one(run_snapshot):\n    pass\n\ndef test_two():\n    assert run().text == 'seen'\n"
    result = suite(body, "-p", "no:syrupy")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*run_snapshot needs the plugin syrupy: pip install 'stepengine[[]test]'*"])


@pytest.mark.spec("replay:F8")
@pytest.mark.parametrize(
    "extension", [snapshots.RunSnapshot, snapshots.RunJsonSnapshot, snapshots.RequestSnapshot, snapshots.EventsSnapshot]
)
def test_our_snapshots_override_only_supported_syrupy_methods(extension: Any) -> None:
    for final in ("read_snapshot", "write_snapshot", "read_snapshot_data_from_location", "write_snapshot_collection"):
        base = SingleFileSnapshotExtension if hasattr(SingleFileSnapshotExtension, final) else AbstractSyrupyExtension
        assert getattr(extension, final).__qualname__ == getattr(base, final).__qualname__
    assert extension.write_immediately


@pytest.mark.deep
@pytest.mark.parametrize("name", ["", "(name='x')"])
def test_parametrized_ids_with_a_slash_get_distinct_snapshots(suite: Any, name: str) -> None:
    """
    Tests whose warnings are errors need plain ids; two ids that become one file name share no snapshot unnoticed.
    """
    body = f"""
@pytest.mark.parametrize("way", ["a/b", "a:c"])
def test_one(way, run_snapshot):
    assert run(way) == run_snapshot{name}
"""
    assert suite(body, "--snapshot-update", "-W", "error:\\nCan not relate").ret == 1
    assert suite(body, "--snapshot-update", "-W", "ignore").ret == 0
    suite(body).assert_outcomes(passed=2)
    assert len(written()) == 2
    suite(body.replace("a:c", "a:b")).assert_outcomes(passed=1, failed=1)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:F20", "replay:F23", "requirements:P5")
def test_a_recorded_run_and_its_replay_have_one_transcript(suite: Any) -> None:
    body = """
def test_one(journal, run_snapshot):
    replies = [text("seen")] if LIVE else []
    with Engine(models={"test": ScriptedModel(replies)}) as engine:
        result = engine.run_sync(agent, "go", journal=journal)
    assert result == run_snapshot
"""
    recording = ("--stepengine-record=once", "--snapshot-update")
    suite(body.replace("LIVE", "True"), *recording).assert_outcomes(passed=1)
    suite(body.replace("LIVE", "False")).assert_outcomes(passed=1)
    (FOLDER / "test_one.run.md").write_text("run watcher\n")
    suite(body.replace("LIVE", "False")).assert_outcomes(failed=1)
