"""
Agents that look around and run commands: lister, picker, searchers, basher, researchers (generator-contract B22 to B29).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepengine import RunStatus
from stepengine.errors import InputError
from stepengine.testing import failure, text, tool_call
from stepengine.tools.bundled import Fetched, SearchHit, web_tools

from .common import asked, called, run


class Web:
    async def search(self, query: str, depth: str) -> Sequence[SearchHit]:
        return [SearchHit(query, f"https://pages.example/{n}") for n in range(3)]

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        return f"{library_title} on {topic}"

    async def fetch(self, url: str) -> Fetched:
        return Fetched(url, 200, "text/plain", f"page {url}".encode())


WEB = web_tools(Web(), Web(), Web())


@pytest.mark.spec("generator-contract:B24")
def test_directory_lister_returns_each_listing_or_error_without_a_model(project: Path) -> None:
    result, model = run("directory-lister", project, params={"directories": [{"path": "."}, {"path": "no"}]})
    here, missing = result.unwrap().results

    assert {"path": ".", "files": ["README.md", "shop.py"], "directories": ["docs"]} == here
    assert "does not exist" in missing["error"]
    assert "no" == missing["path"]
    assert [] == model.calls


@pytest.mark.spec("generator-contract:B24")
def test_glob_matcher_returns_each_match_or_error_without_a_model(project: Path) -> None:
    patterns = [{"pattern": "**/*.md"}, {"pattern": "*.md", "cwd": "docs"}, {"pattern": "*", "cwd": ".."}]
    result, model = run("glob-matcher", project, params={"patterns": patterns})
    everywhere, in_docs, outside = result.unwrap().results

    assert {"README.md", "docs/ideas.md"} == set(everywhere["files"])
    assert (1, "docs") == (in_docs["count"], in_docs["cwd"])
    assert "outside" in outside["error"]
    assert ["**/*.md", "*.md", "*"] == [entry["pattern"] for entry in result.output.results]
    assert [] == model.calls


@pytest.mark.spec("requirements:A13")
@pytest.mark.parametrize(
    ("agent_id", "params"),
    [
        ("code-searcher", None),
        ("code-searcher", {"search_queries": []}),
        ("code-searcher", {"search_queries": [{"pattern": "x", "other": 1}]}),
        ("editor", {"file": ["shop.py"]}),
        ("directory-lister", {"directories": []}),
        ("directory-lister", {"directories": [{"path": ""}]}),
        ("glob-matcher", {"patterns": [{"cwd": "x"}]}),
        ("basher", {}),
        ("file-picker", {"folders": ["src"]}),
        ("thinker-best-of-n", {"n": 11}),
        ("editor-multi-prompt", {"prompts": []}),
        ("code-reviewer-multi-prompt", None),
        ("thinker-selector", {"thoughts": []}),
        ("best-of-n-selector", {"implementations": [{"id": "A"}]}),
        ("context-pruner", {"max_context_length": 0}),
    ],
)
def test_invalid_params_are_refused_before_the_run(project: Path, agent_id: str, params: Any) -> None:
    with pytest.raises(InputError):
        run(agent_id, project, params=params)


@pytest.mark.spec("generator-contract:B22")
@pytest.mark.parametrize(
    ("folders", "listing"),
    [([], "<think>hm</think>\nshop.py\n"), ([], "hm\n</think>\nshop.py"), (["docs"], " <think>hm</think>shop.py")],
)
def test_the_lister_gets_the_tree_and_returns_paths(project: Path, folders: list[str], listing: str) -> None:
    result, model = run("file-lister", project, [listing], "prices?", params={"directories": folders})
    (*_, tree) = model.calls[0].messages

    assert "shop.py" == result.output
    assert ("shop.py total" in tree.text) is not bool(folders)
    assert "ideas.md" in tree.text
    assert ["read_subtree"] == called(result)


@pytest.mark.spec("generator-contract:B24", "generator-contract:B22")
def test_the_picker_reads_each_named_file_once_and_reports(project: Path) -> None:
    listing = "- shop.py\n2. `./shop.py`\n* docs/ideas.md\n\n.hidden.py\ndocs/1. a - b.md"
    result, model = run("file-picker", project, [listing, "shop.py: total()"], "prices?", params={"directories": ["."]})
    (listed, reported) = model.calls
    (*_, read) = reported.messages

    assert "shop.py: total()" == result.output
    assert ["file-lister"] == [child.agent_id for child in result.children]
    assert ["prices?"] == [words.partition("\n")[0] for words in asked(listed)]
    assert '"directories": [\n    "."\n  ]' in asked(listed)[0]
    assert ["read_files"] == called(result)
    assert ["shop.py", "docs/ideas.md", ".hidden.py", "docs/1. a - b.md"] == [
        entry["path"] for entry in read.result.data
    ]
    assert "none" == reported.tool_choice


@pytest.mark.spec("generator-contract:B22")
@pytest.mark.parametrize(
    "replies",
    [
        [""],
        ["None."],
        ["<think>Nothing.</think>", "none"],
        ["missing.py\ngone.py"],
    ],
)
def test_a_picker_without_files_answers_without_a_model_call(project: Path, replies: list[str]) -> None:
    result, _ = run("file-picker", project, replies, "prices?")

    assert "No file of the project matters for this." == result.output == result.text


@pytest.mark.spec("generator-contract:B22")
def test_at_most_twenty_files_are_read(project: Path) -> None:
    result, model = run("file-picker", project, ["shop.py\n" + "\n".join(map(str, range(50))), "done"], "all?")

    assert 20 == len(model.calls[1].messages[-1].result.data)
    assert "done" == result.output


@pytest.mark.spec("generator-contract:B22", "generator-contract:L3")
def test_a_failed_lister_fails_the_picker_with_the_reason(project: Path) -> None:
    result, _ = run("file-picker", project, [failure(ValueError("no credit"))], "prices?")

    assert RunStatus.FAILED is result.status
    assert "file-lister" in str(result.error)
    assert "no credit" in str(result.error)


@pytest.mark.spec("generator-contract:B29")
@pytest.mark.parametrize("what", [{}, {"what_to_summarize": "whether it worked"}])
def test_a_short_output_is_returned_without_a_model(project: Path, what: dict[str, str]) -> None:
    result, model = run("basher", project, params={"command": ["ls", "docs"], **what})

    assert ("ideas.md\n", 0) == (result.output["stdout"], result.output["exit_code"])
    assert ["run_terminal_command"] == called(result)
    assert [] == model.calls


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B29")
@pytest.mark.parametrize(("count", "requests"), [(2_000, 0), (2_001, 1)])
def test_a_long_output_is_summarized_only_on_request(project: Path, count: int, requests: int) -> None:
    command = [sys.executable, "-c", f"print('x' * {count - 1})"]
    given = {"command": command, "what_to_summarize": "how many x"}
    result, model = run("basher", project, ["many"] * requests, params=given)

    assert requests == len(model.calls)
    assert ("many" == result.output) is bool(requests)
    assert all("how many x" in asked(request)[0] and "none" == request.tool_choice for request in model.calls)
    assert 3_000 < len(
        run("basher", project, params={"command": [*command[:2], "print('x' * 3000)"]})[0].output["stdout"]
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B29")
def test_a_failed_or_slow_command_does_not_fail_the_run(project: Path) -> None:
    missing, _ = run("basher", project, params={"command": "no-such-program-here"})
    params = {"command": ["sleep", "20"], "timeout_seconds": 7}
    slow, _ = run("basher", project, params=params, shell={"timeout": 0.1, "max_timeout": 0.1})

    assert "no-such-program-here" in missing.unwrap()["error"]
    assert "longer than 0.1 s" in slow.unwrap()["message"]
    assert 7 == slow.tool_calls[0].input["timeout_seconds"]


@pytest.mark.spec("generator-contract:B27")
def test_the_docs_researcher_reads_once_and_reports(project: Path) -> None:
    read = tool_call("read_docs", {"library_title": "pytest", "topic": "fixtures"})
    result, model = run("researcher-docs", project, [read, text("In order.")], "In which order?", tools=WEB)

    assert "In order." == result.output
    assert "pytest on fixtures" in model.calls[1].messages[-1].text
    assert ["read_docs"] == [tool.name for tool in model.calls[0].tools]
