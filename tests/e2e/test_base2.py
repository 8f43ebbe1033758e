"""
``base2`` on a small project: it looks around, plans, edits, reviews, runs the project's tests, and ends (generator-contract B1).

Only the model is played. Children run side by side, files really change, and the tests are run by a process.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import attrs
import pytest

from stepengine import RunResult, RunStatus
from stepengine.events import AgentFinished, AgentSpawned, RunStarted, ToolProgress

from .bundled import recorder

script = recorder()


@attrs.frozen
class Shown:
    """
    What a run of ``base2`` did.
    """

    result: RunResult[Any]
    events: tuple[Any, ...]
    journal: Any
    files: dict[str, str]
    tests: subprocess.CompletedProcess[str]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    events: list[Any] = []
    journal = script.journal_at(tmp_path_factory.mktemp("journal") / "base2.jsonl")
    with script.sample() as root:
        result = script.performed("base2", script.PLAYS["base2"], root, journal, observers=[events.append])
        files = {name: (root / name).read_text() for name in ("shop.py", "test_shop.py", "README.md", "prices.py")}
        tests = subprocess.run(
            [sys.executable, "-m", "unittest"], cwd=root, capture_output=True, text=True, check=False, timeout=50
        )
    return Shown(result, tuple(events), journal, files, tests)


def in_order(path: str) -> tuple[int, ...]:
    return tuple([int(part) for part in path.split(".") if part])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B1")
def test_base2_changes_the_files_and_the_project_tests_pass(shown: Shown) -> None:
    assert RunStatus.COMPLETED is shown.result.status
    assert script.DONE == shown.result.output
    assert "return price * 0.9 if price >= 100 else price" in shown.files["shop.py"]
    assert "10_percent_cheaper" in shown.files["test_shop.py"]
    for untouched in ("README.md", "prices.py"):
        assert (script.SAMPLE / f"{untouched}.sample").read_text() == shown.files[untouched]
    assert 0 == shown.tests.returncode
    assert "Ran 3 tests" in shown.tests.stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B1", "generator-contract:L6")
def test_independent_children_start_before_any_of_them_ends(shown: Shown) -> None:
    spawned = {e.agent_id: e for e in shown.of(AgentSpawned)}
    finished = {e.agent_id: e for e in shown.of(AgentFinished)}

    for one, other in (("file-picker", "code-searcher"), ("code-reviewer", "basher")):
        begun = max(spawned[one].index, spawned[other].index)
        assert begun < min(finished[one].index, finished[other].index)
        assert not spawned[one].only_child


@pytest.mark.spec("generator-contract:L18", "generator-contract:B11", "generator-contract:B20")
def test_editor_and_reviewer_share_the_cached_prefix_of_base2(shown: Shown) -> None:
    """
    System prompt and tools are the same bytes, and the conversation begins with the same messages: a prompt cache hits.
    """
    requests = {(r.path, r.seq): r.request for r in shown.events if getattr(r, "request", None) is not None}
    own = [request for (path, _), request in requests.items() if not path]
    inheriting = {e.path for e in shown.of(RunStarted) if e.agent_id in ("editor", "code-reviewer")}
    children = [request for (path, _), request in requests.items() if path in inheriting]

    assert 2 == len(inheriting)
    assert children
    for child in children:
        assert own[0].system_prompt == child.system_prompt
        assert own[0].tools == child.tools
        assert tuple(own[0].messages) == tuple(child.messages)[: len(own[0].messages)]


@pytest.mark.spec("generator-contract:B1", "replay:F20")
def test_the_transcript_matches_the_reviewed_snapshot(shown: Shown, run_snapshot: Any) -> None:
    assert shown.journal == run_snapshot


@pytest.mark.spec("generator-contract:B1", "requirements:J12")
def test_the_events_of_every_run_match_the_reviewed_snapshot(shown: Shown, events_snapshot: Any) -> None:
    """
    The order is that of each effect of each run: which of parallel children ends first is chance, and so is how the output
    of a command arrives.
    """
    lasting = [event for event in shown.events if type(event) is not ToolProgress]

    assert sorted(lasting, key=lambda e: (in_order(e.path), e.seq)) == events_snapshot
