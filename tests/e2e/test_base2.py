"""
``base2`` on a small project: it looks around, plans, edits, reviews, runs the project's tests, and ends (generator-contract B1).

Only the model is played. Children run side by side, files really change, and the tests are run by a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from stepengine import RunResult, RunStatus, Usage
from stepengine.events import AgentFinished, AgentSpawned, FollowupsSuggested, ModelFinished, RunStarted, ToolProgress

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


def tree(shown: Shown) -> Iterator[str]:
    """
    Give one line per run of the tree: how it ended, and what it used with everything below it.
    """
    yield f"base2  {shown.result.status}  {used(shown.result.usage)}"
    for child in sorted(shown.of(AgentFinished), key=lambda e: in_order(e.child_path)):
        yield f"{'  ' * len(in_order(child.child_path))}{child.agent_id}  {child.status}  {used(child.usage)}"


def used(usage: Usage) -> str:
    return f"{usage.requests} requests, {usage.total_tokens} tokens"


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


@pytest.mark.spec("generator-contract:B1", "generator-contract:B29")
def test_base2_layers_are_child_runs_in_order(shown: Shown) -> None:
    assert [
        "base2  completed  11 requests, 1025 tokens",
        "  file-picker  completed  2 requests, 90 tokens",
        "    file-lister  completed  1 requests, 45 tokens",
        "  code-searcher  completed  0 requests, 0 tokens",
        "  editor  completed  2 requests, 230 tokens",
        "  code-reviewer  completed  1 requests, 115 tokens",
        "  basher  completed  0 requests, 0 tokens",
    ] == list(tree(shown))
    assert ["file-picker", "code-searcher", "editor", "code-reviewer", "basher"] == [
        child.agent_id for child in shown.result.children
    ]
    ran = shown.result.children[-1].output
    assert 0 == ran["exit_code"]
    assert "Ran 3 tests" in ran["stderr"]


@pytest.mark.spec("generator-contract:B1", "requirements:D15")
def test_the_usage_of_a_run_includes_its_descendants(shown: Shown) -> None:
    used_by = {"": shown.result.usage, **{e.child_path: e.usage for e in shown.of(AgentFinished)}}
    calls = [(e.path, e.reply.usage) for e in shown.of(ModelFinished)]

    for path, usage in used_by.items():
        below = f"{path}." if path else ""
        assert usage == sum([u for p, u in calls if p == path or p.startswith(below)], Usage()), path


@pytest.mark.spec("generator-contract:B1", "generator-contract:L6")
def test_independent_children_start_before_any_of_them_ends(shown: Shown) -> None:
    spawned = {e.agent_id: e for e in shown.of(AgentSpawned)}
    finished = {e.agent_id: e for e in shown.of(AgentFinished)}

    for one, other in (("file-picker", "code-searcher"), ("code-reviewer", "basher")):
        begun = max(spawned[one].index, spawned[other].index)
        assert begun < min(finished[one].index, finished[other].index)
        assert not spawned[one].only_child


@pytest.mark.spec("generator-contract:B1", "requirements:J12", "requirements:D15")
def test_messages_of_children_stay_out_of_the_root_history(shown: Shown) -> None:
    own = {event.agent_id: event.path for event in shown.of(RunStarted)}
    replies = [(e.path, e.reply.text) for e in shown.of(ModelFinished) if e.reply.text]
    history = [m.text for m in shown.result.state.message_history if m.role == "assistant"]

    assert own.pop("base2") == ""
    assert all(own.values())
    assert {path for path, _ in replies} <= {"", *own.values()}
    told_below = [text for path, text in replies if path]
    assert told_below
    assert not set(told_below) & set(history)


@pytest.mark.spec("generator-contract:B1", "generator-contract:T34")
def test_base2_plans_before_editing_and_suggests_followups(shown: Shown) -> None:
    called = [c.tool_name for m in shown.result.state.message_history if m.role == "assistant" for c in m.tool_calls]
    todos = shown.result.state.context["todos"]
    (suggested,) = shown.of(FollowupsSuggested)

    assert ["spawn_agents", "read_files", "write_todos", "editor", "write_todos", "spawn_agents"] == called[:6]
    assert [True, True, True] == [todo["completed"] for todo in todos]
    assert "Document it" == suggested.followups[0]["label"]


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


@pytest.mark.deep
@pytest.mark.spec("generator-contract:B1")
def test_the_command_line_runs_it_against_a_server(stepengine: Any, chat_server: Any) -> None:
    """
    In a process of its own, over HTTP, on real files; the environment gives neither key nor model.
    """

    def calls(*made: tuple[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [(name, json.dumps(arguments)) for name, arguments in made]}

    command = attrs.evolve(stepengine, network=True)
    (command.folder / "shop.py").write_text("def total(order):\n    return sum(order)\n")
    edit = {"path": "shop.py", "replacements": [{"old_string": "sum(order)", "new_string": "0"}]}
    check = {"agents": [{"agent_type": "basher", "params": {"command": "cat shop.py"}}]}
    server = chat_server(calls(("str_replace", edit), ("spawn_agents", check)), {"content": "It costs nothing now."})

    done = command(
        "run", "base2", "Make it free.", "--write", "--shell", "--model", "local", "--base-url", server.url
    )  # fmt: skip

    assert (0, "It costs nothing now.\n") == (done.returncode, done.stdout), done.stderr
    assert "return 0" in (command.folder / "shop.py").read_text()
    assert "return 0" in json.dumps(server.requests[1]["messages"])
    assert "basher" in done.stderr
