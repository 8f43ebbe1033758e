"""
Agents that change files by proposals first: implementor and multi-prompt editor (generator-contract B12, B13).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepengine import RunStatus
from stepengine.errors import ModelError
from stepengine.testing import failure, text, tool_call, tool_calls

from .common import FILES, asked, called, replace, run

SUM = "return sum(order)"


def propose(new: str, key: str = "old_string") -> Any:
    return replace("propose_str_replace", "shop.py", SUM, new, key)


def choose(letter: str, better: str = "") -> Any:
    fields = {"implementation_id": letter, "reason": "It is right.", "suggested_improvements": better}
    return tool_call("set_output", fields)


def by_strategy(said: Mapping[str, Sequence[Any]]) -> list[Any]:
    """
    Return a script in which every strategy has its own replies; ``"choose"`` is what the selector says.
    """
    left = {name: list(replies) for name, replies in said.items()}

    def reply(request: Any) -> Any:
        words = asked(request)[-1]
        strategy = re.fullmatch("Use this strategy: (.*)", words)
        said = left["choose" if strategy is None else strategy[1]].pop(0)
        return said(request) if callable(said) else said

    return [reply] * sum(map(len, left.values()))


def edit(project: Path, said: Mapping[str, Sequence[Any]], prompt: str = "Guard total().", **options: Any) -> Any:
    prompts = [name for name in said if name != "choose"]
    return run("editor-multi-prompt", project, by_strategy(said), prompt, params={"prompts": prompts}, **options)


@pytest.mark.spec("generator-contract:B13")
def test_the_implementor_proposes_and_writes_nothing(project: Path) -> None:
    replies = [
        tool_calls(propose("return 2"), replace("propose_str_replace", "shop.py", "not there", "x")),
        replace("propose_str_replace", "shop.py", "return 2", "return 3"),
        tool_call("propose_write_file", {"path": "new.py", "content": "x = 1\n"}),
        "Three edits.",
    ]
    result, _ = run("editor-implementor", project, replies, "Change it.")
    proposal = result.unwrap()

    assert ["propose_str_replace", "propose_str_replace", "propose_write_file"] == [
        call["tool_name"] for call in proposal["tool_calls"]
    ]
    assert 3 == proposal["unified_diff"].count("\n+++ b/") + proposal["unified_diff"].startswith("+++ b/")
    assert "+    return 3" in proposal["unified_diff"]
    assert "Three edits." == proposal["summary"]
    assert FILES == {name: (project / name).read_text() for name in FILES}
    assert not (project / "new.py").exists()


@pytest.mark.spec("generator-contract:B13")
def test_an_implementor_without_a_proposal_gives_the_reason(project: Path) -> None:
    result, _ = run("editor-implementor", project, ["There is nothing to do."], "Change it.")

    assert {"tool_calls": [], "unified_diff": "", "summary": "There is nothing to do."} == result.unwrap()


@pytest.mark.spec("generator-contract:B12")
def test_only_the_chosen_proposal_is_applied(project: Path) -> None:
    said = {
        "one": [propose("return 1"), "Proposed."],
        "two": [propose("return '``` <tool_call> </tool_call>'", key="old_str"), "Proposed."],
        "choose": [choose("b", "Test it.")],
    }
    result, model = edit(project, said)
    chosen = result.unwrap()

    assert "return '``` <tool_call> </tool_call>'" in (project / "shop.py").read_text()
    assert ("two", "It is right.", "Test it.") == (chosen.strategy, chosen.reason, chosen.suggested_improvements)
    assert "+    return '``` <tool_call> </tool_call>'" in chosen.unified_diff
    assert "Changed shop.py" in chosen.results[0]
    assert ["str_replace"] == called(result)
    assert ["editor-implementor", "editor-implementor", "best-of-n-selector"] == [c.agent_id for c in result.children]
    assert all("Guard total()." == asked(request)[0] for request in model.calls)
    assert not any('"prompts"' in words for request in model.calls for words in asked(request))


@pytest.mark.spec("generator-contract:B12")
def test_the_selector_sees_every_implementation_or_its_failure(project: Path) -> None:
    said = {
        "one": [propose("return 1"), "Proposed."],
        "two": [failure(ModelError("no credit"))],
        "three": [text("It is fine as it is.")],
        "choose": [choose("A")],
    }
    result, model = edit(project, said)
    (shown,) = [words for request in model.calls for words in asked(request) if '"implementations"' in words]

    assert "one" == result.unwrap().strategy
    assert ["A", "B", "C"] == re.findall('"id": "(.)"', shown)
    assert ["one", "two", "three"] == re.findall('"strategy": "(.*)"', shown)
    assert all(
        words in shown for words in ("+    return 1", "It failed: ", "no credit", "It proposed nothing: It is fine")
    )


@pytest.mark.spec("generator-contract:B12")
@pytest.mark.parametrize(
    ("selection", "why"),
    [
        ([choose("Z")], "'Z' was selected, which proposes nothing. It is right."),
        ([choose("B")], "'B' was selected, which proposes nothing. It is right."),
        (["A.", "Really A.", "A!"], "since none could be selected: "),
    ],
)
def test_an_invalid_selection_changes_nothing_and_is_reported(project: Path, selection: list[Any], why: str) -> None:
    result, _ = edit(project, {"one": [propose("return 1"), "Done."], "two": ["No."], "choose": selection})

    assert RunStatus.COMPLETED is result.status
    assert why in result.output.reason
    assert ("", [], "") == (result.output.strategy, result.output.results, result.output.unified_diff)
    assert FILES["shop.py"] == (project / "shop.py").read_text()


@pytest.mark.spec("generator-contract:B12")
def test_without_a_proposal_no_selector_is_called(project: Path) -> None:
    result, model = edit(project, {"one": [text("No need.")], "two": [failure(ModelError("no credit"))]})

    assert result.unwrap().reason.startswith("Nothing was changed. ")
    assert "No need." in result.output.reason
    assert "no credit" in result.output.reason
    assert 2 == len(model.calls)


@pytest.mark.spec("generator-contract:B12")
def test_a_proposal_that_no_longer_applies_is_reported(project: Path) -> None:
    def choose_late(_: Any) -> Any:
        (project / "shop.py").write_text("changed meanwhile\n")
        return choose("A")

    write = tool_call("propose_write_file", {"path": "new.py", "content": "x = 1\n"})
    result, _ = edit(project, {"one": [tool_calls(propose("return 1"), write), "Done."], "choose": [choose_late]})
    failed, made = result.unwrap().results

    assert "'shop.py' was not changed" in failed
    assert "shop.py" not in result.output.unified_diff
    assert "+x = 1" in result.output.unified_diff
    assert "new.py" in made
    assert "x = 1\n" == (project / "new.py").read_text()
