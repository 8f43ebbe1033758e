"""
``agent-builder`` (generator-contract B35): what it refuses, what it shows, what it files, and that nothing it was given runs by itself.

That it works from end to end is what its recorded run shows.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, RunStatus, load_agent
from stepengine.drafts import EXAMPLE, Example, agent_file_rules, load_draft_agents
from stepengine.errors import InputError
from stepengine.sandbox import MontySandbox, program_tool
from stepengine.sandbox.source_rewriter import KNOWN
from stepengine.testing import ScriptedModel, tool_call

from .common import asked, run, tools_of

LISTED = {"path": ".", "files": ["tea.txt"], "directories": []}
READS = {"tool": "read_files", "input": {"paths": ["tea.txt"]}}
FEW = {"worlds": 1}
FILED, TESTS = "agents/note_reader.py", "tests/test_note_reader.py"
ANSWER = {"answer": "Two minutes, says tea.txt.", "sources": ["tea.txt"]}

# What the package opens once for a process is there before any test, so that none of them seems to have left it behind.
first = MontySandbox(1)
first.open((), seconds=1, memory=1 << 26, printed=10, seed=1).feed("1", datetime(2026, 1, 1, tzinfo=UTC))
first.close()


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """
    Workers of the sandbox live as long as their process; a test leaves none behind.
    """
    yield
    for sandbox in program_tool._SHARED:
        sandbox.close()


def draft(source: str = EXAMPLE, **fields: Any) -> Any:
    example = {"example_replies": [READS, ANSWER["answer"]], "example_results": {"list_directory": LISTED}}
    given = {"source": source, "why": "It is small.", "example_prompt": "How long does tea steep?", **example, **fields}
    return tool_call("draft_agent", given)


def built(project: Path, *replies: Any, prompt: str = "Answers from the notes", **options: Any) -> Any:
    """
    Return the result of a run in few worlds, and the model that was asked.
    """
    params = {**FEW, **options.pop("params", {})}
    return run("agent-builder", project, list(replies), prompt, params=params, **options)


def written(project: Path) -> list[str]:
    return sorted(str(f.relative_to(project)) for f in project.rglob("*.py") if f.name != "shop.py")


@pytest.mark.spec("generator-contract:B35")
@pytest.mark.deep
def test_a_filed_agent_runs_sandboxed_and_its_tests_pass(project: Path) -> None:
    result, _ = built(project, draft(), answers={"file-1": "file it"})

    assert (True, FILED, TESTS) == (result.output.filed, result.output.path, result.output.test_path)
    assert EXAMPLE == (project / FILED).read_text()
    tests = {name: one for name, one in runpy.run_path(str(project / TESTS)).items() if name.startswith("test_")}
    assert 3 == len(tests)
    for test in tests.values():
        test()
    assert not any("note_reader" in name for name in sys.modules)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_the_tests_of_a_filed_agent_fail_after_a_change(project: Path) -> None:
    built(project, draft(), answers={"file-1": "file it"})
    (project / FILED).write_text(EXAMPLE.replace('"answer": turn.text', '"answer": "no"'))
    tests = runpy.run_path(str(project / TESTS))

    with pytest.raises(AssertionError):
        tests["test_the_example_ends_as_it_did"]()


@pytest.mark.deep
@pytest.mark.spec("generator-contract:B35")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("agent = (", r"agents/draft\.py:1: "),
        pytest.param("import subprocess\n" + EXAMPLE, r"agents/draft\.py:1: there is no module 'subprocess'", marks=pytest.mark.deep),
        pytest.param(EXAMPLE.replace("ToolCall(", "toolCall(", 1), r"agents/draft\.py:7: there is no `toolCall`", marks=pytest.mark.deep),
        pytest.param(EXAMPLE.replace("agent = AgentDef", "other = AgentDef"), "expected `agent = AgentDefinition", marks=pytest.mark.deep),
        pytest.param(EXAMPLE.replace('"note-reader"', '"../note"'), "is no name of a file|valid|id", marks=pytest.mark.deep),
        (EXAMPLE.replace('"note-reader"', '"basher"'), "'basher' is the id of an agent that comes with stepengine"),
        pytest.param(EXAMPLE.replace("notes, and", "notes,\u202e and"), r"agents/draft\.py:1: RIGHT-TO-LEFT OVERRIDE cannot be seen", marks=pytest.mark.deep),
        pytest.param(EXAMPLE.replace("notes, and", "notes,\x1b[2K and"), r"agents/draft\.py:1: 0x1b cannot be seen", marks=pytest.mark.deep),
        (EXAMPLE.replace('data["files"]', 'data["names"]'), r"does not come to its end: .*KeyError.*draft\.py:8"),
        pytest.param(EXAMPLE.replace('"list_directory", "read', '"read'), "list_directory", marks=pytest.mark.deep),
        pytest.param(EXAMPLE.replace('"read_files"]', '"read_minds"]'), "read_minds", marks=pytest.mark.deep),
        (EXAMPLE.replace("    turn = yield STEP_ALL", "    while True:\n        pass\n    turn = yield STEP_ALL"), "more than 5 s"),
    ],
    ids=[
        "syntax", "import", "name", "no agent", "path as id", "bundled id", "bidi", "escape", "raises", "unlisted tool",
        "unknown tool", "endless",
    ],
)  # fmt: skip
def test_a_faulty_draft_is_returned_with_the_reason(project: Path, source: str, said: str) -> None:
    result, model = built(project, draft(source), draft(), answers={"file-1": "drop it"})

    assert re.search(said, asked(model.calls[1])[-1])
    assert RunStatus.COMPLETED is result.status


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_a_draft_failing_only_under_faults_is_returned_with_seed(project: Path) -> None:
    """
    A failed call has no data, and the example's has.
    """
    careless = EXAMPLE.replace(
        "    turn = yield", "    seen = yield ToolCall('read_files', {'paths': ['a']})\n    turn = yield"
    )
    careless = careless.replace('{"answer": turn.text', '{"answer": seen.tool_results[0].data[0]["content"]')
    results = {"list_directory": LISTED, "read_files": [{"path": "a", "content": "Tea."}]}
    careless = draft(careless, example_results=results)
    result, model = built(project, careless, draft(), answers={"file-1": "drop it"}, params={"worlds": 4})

    said = asked(model.calls[1])[-1]
    assert "it does not hold when things go wrong" in said
    assert "TypeError" in said
    assert "seed: " in said
    assert not result.output.filed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_drafts_run_only_sandboxed_and_call_no_real_tool(project: Path) -> None:
    """
    Neither what stands at the top of its file, nor the tools of a trial, which would write here.
    """
    top = "__import__('os').system('touch pwned.py')\n" + EXAMPLE
    writes = EXAMPLE.replace('"list_directory", "read_files"]', '"list_directory", "write_file"]').replace(
        "    turn = yield", '    yield ToolCall("write_file", {"path": "trial.py", "content": "x"})\n    turn = yield'
    )
    result, _ = built(project, draft(top), draft(writes, example_replies=["Fine."]), answers={"file-1": "drop it"})

    assert ["list_directory", "write_file"] == [call["tool"] for call in result.output.trial["calls"]]
    assert [] == written(project)


@pytest.mark.spec("generator-contract:B35")
@pytest.mark.parametrize("replies", [["No."] * 3, [draft("x = ")] * 3, ["No.", draft("x"), "No."]])
def test_three_useless_drafts_in_a_row_fail_the_run(project: Path, replies: Any) -> None:
    result, model = built(project, *replies)

    assert RunStatus.FAILED is result.status
    assert "3 drafts in a row could not be used; of the last: " in str(result.error)
    assert 3 == len(model.calls)
    assert [] == written(project)


@pytest.mark.spec("generator-contract:B35")
def test_an_empty_prompt_is_refused_before_a_model_call(project: Path) -> None:
    result, model = built(project, prompt="  \n")

    assert "say what the agent shall do" in str(result.error)
    assert [] == model.calls


@pytest.mark.spec("generator-contract:B35")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *[("folder", place) for place in ("../other", "/tmp", "a/../../b", ".git/hooks", "", "a//b", "a\\b")],
        ("tests", "../other"),
    ],
)
def test_a_folder_outside_is_refused_before_the_run_starts(project: Path, name: str, place: str) -> None:
    with pytest.raises(InputError, match=f"{name}: String should match pattern"):
        built(project, params={name: place})


@pytest.mark.spec("generator-contract:B35")
def test_without_the_sandbox_the_run_fails_before_a_model_call(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    result, model = built(project)

    assert RunStatus.FAILED is result.status
    assert "stepengine[programs]" in str(result.error)
    assert [] == model.calls


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_an_unattended_run_asks_and_another_process_files_the_agent(project: Path) -> None:
    """
    The question shows the file, what it may do and its trial run.
    """
    journal = str(project / "built.jsonl")
    waiting, _ = built(project, draft(), journal=journal)
    assert RunStatus.SUSPENDED is waiting.status
    assert [] == written(project)
    (question,) = waiting.pending_questions
    details: Any = question.details

    assert EXAMPLE.rstrip("\n") in question.text
    for line in (
        "note-reader may call: list_directory, read_files",
        "note-reader may spawn: no agents; model: that of the run",
        "worlds in which things fail",
        "  called: read_files {'paths': ['tea.txt']}",
        f"  output: {ANSWER}",
    ):
        assert line in question.text
    assert (FILED, EXAMPLE) == (details["path"], details["content"])
    assert ("file it", "send it back", "drop it") == question.options

    with Engine([load_agent("agent-builder")], tools_of(project), ScriptedModel([]), default_model="x/y") as engine:
        resumed = engine.resume_sync(journal, answers={"file-1": "file it"})
        assert [FILED, TESTS] == written(project)
        replayed = engine.replay_sync(journal)

    assert resumed.output == replayed.output
    assert resumed.output.filed


@pytest.mark.spec("generator-contract:B35")
@pytest.mark.parametrize(
    "answers",
    [
        {"file-1": "send it back", "remark-1": "Name no sources.", "file-2": "file it"},
        {"file-1": "Name no sources.", "file-2": "file it"},
    ],
    ids=["asked for", "at once"],
)
@pytest.mark.deep
def test_the_change_request_of_a_person_reaches_the_model(project: Path, answers: dict[str, str]) -> None:
    other = EXAMPLE.replace('"sources": [name', '"names": [name')
    result, model = built(project, draft(), draft(other), answers=answers)

    assert asked(model.calls[1])[-1].endswith("wants something else: Name no sources.")
    assert other == (project / FILED).read_text()
    assert result.output.filed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
@pytest.mark.parametrize("answer", ["drop it", None])
def test_a_dropped_or_unanswered_draft_leaves_no_file(project: Path, answer: str | None) -> None:
    from stepengine import Answer

    result, _ = built(project, draft(), answers={"file-1": answer or Answer(declined=True)})

    assert (False, "") == (result.output.filed, result.output.path)
    assert [] == written(project)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_an_existing_file_is_replaced_only_after_explicit_approval(project: Path) -> None:
    """
    Also when it came, or became another one, while the question waited.
    """
    journal = str(project / "built.jsonl")
    built(project, draft(), journal=journal)
    (project / "agents").mkdir()
    (project / FILED).write_text("agent = 'mine'\n")
    with Engine([load_agent("agent-builder")], tools_of(project), ScriptedModel([]), default_model="x/y") as engine:
        again = engine.resume_sync(journal, answers={"file-1": "file it"})
        (question,) = again.pending_questions
        assert f"{FILED} is there already, and would be replaced." in question.text
        assert f"replace {FILED}" == question.options[0]
        assert "agent = 'mine'\n" == (project / FILED).read_text()
        filed = engine.resume_sync(journal, answers={question.id: f"replace {FILED}"})

    assert filed.output.filed
    assert EXAMPLE == (project / FILED).read_text()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_a_folder_at_the_file_path_fails_the_run(project: Path) -> None:
    (project / FILED).mkdir(parents=True)
    result, _ = built(project, draft(), answers={"file-1": f"replace {FILED}"})

    assert RunStatus.FAILED is result.status
    assert (project / FILED).is_dir()
    assert not (project / TESTS).exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_the_rules_name_every_allowed_import_and_their_example_runs() -> None:
    rules = agent_file_rules()
    agents = load_draft_agents(EXAMPLE, "example.py")
    example = Example(agents, prompt="Tea?", replies=[READS, ANSWER["answer"]], results={"list_directory": LISTED})

    assert [] == [n for names in KNOWN.values() for n in names if not re.search(rf"\b{n}\b", rules)]
    assert EXAMPLE in rules
    assert ANSWER == example.run().output
    assert 5 == example.simulate(range(5)).runs


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B35")
def test_a_spawned_third_party_agent_is_simulated_in_the_trial(project: Path) -> None:
    spawning = EXAMPLE.replace("AgentDefinition,", "AgentCall, AgentDefinition,").replace(
        "    turn = yield STEP_ALL\n",
        '    said = yield from AgentCall("basher", params={"command": "touch pwned.py"})\n',
    )
    spawning = spawning.replace("turn.text", "str(said)").replace(
        "    tools=[", '    spawnable_agents=["basher"],\n    tools=['
    )
    results = {"list_directory": LISTED, "basher": "It is all in tea.txt."}
    result, _ = built(
        project, draft(spawning, example_replies=[], example_results=results), answers={"file-1": "drop it"}
    )

    assert {"answer": "It is all in tea.txt.", "sources": ["tea.txt"]} == result.output.trial["output"]
    assert [] == written(project)
