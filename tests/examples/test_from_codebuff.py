"""
Agents that were ported from codebuff, on which the page about coming from there rests: each has a recorded run.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest

from cassettes import record_ports as ports
from stepengine import Engine, RunStatus
from stepengine.data.json import thaw
from stepengine.journal import FileJournal
from stepengine.testing import tool_call
from stepengine.workspace.network import block_test_network

ROOT = Path(__file__).resolve().parents[2]


NEEDS = {"git_committer": "git", "librarian": "git", "tmux_cli": "tmux"}


def replayed(name: str, root: Path) -> Any:
    with Engine([ports.ported(name)], ports.tools_for(root)) as engine:
        return engine.replay_sync(FileJournal(ports.PORTS / f"{name}.jsonl"))


def test_every_port_has_exactly_one_recorded_run() -> None:
    assert set(ports.PLAYS) == {file.stem for file in ports.EXAMPLES.glob("*.py")}
    assert set(ports.PLAYS) == {file.stem for file in ports.PORTS.iterdir()}


@pytest.mark.spec("reliability:I3")
@pytest.mark.parametrize("name", ports.PLAYS)
def test_a_ported_agent_replays_byte_for_byte_offline(name: str, tmp_path: Path) -> None:
    path = ports.PORTS / f"{name}.jsonl"
    with block_test_network([]) as refused:
        result = replayed(name, tmp_path)

    assert (RunStatus.COMPLETED, []) == (result.status, refused)
    assert path.read_bytes() == result.journal.content()
    assert [] == list(tmp_path.iterdir())
    assert [] == [f for f in (ROOT, Path.home(), Path(tempfile.gettempdir())) if f"{f}/".encode() in path.read_bytes()]


@pytest.mark.deep
@pytest.mark.parametrize("name", ports.PLAYS)
def test_the_script_records_the_same_run_again(name: str, tmp_path: Path) -> None:
    """
    When this fails because an agent, the sample or a tool was changed on purpose: python -m cassettes.record_ports
    """
    if name in NEEDS and shutil.which(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not there")
    again, before = ports.record(name, tmp_path), ports.PORTS / f"{name}.jsonl"

    # What a terminal shows depends on the shell and its prompt.
    seen = (lambda _: {}) if name == "tmux_cli" else (lambda file: file.read_bytes().partition(b"\n")[2])
    assert seen(before) == seen(again)
    assert outcome(before) == outcome(again)


def outcome(file: Path) -> Any:
    return json.loads(file.read_bytes().splitlines()[-1])["value"]["output"]


def test_an_unlisted_codebuff_tool_is_called_by_the_handler_only(tmp_path: Path) -> None:
    result = replayed("thinker_with_files", tmp_path)

    assert ["read_files"] == [call.tool_name for call in result.tool_calls]
    assert ["user", "user", "assistant", "tool", "assistant"] == [m.role for m in result.state.message_history]


@pytest.mark.spec("generator-contract:L2")
def test_publisher_ids_map_to_bundled_agents_with_one_warning_each(tmp_path: Path) -> None:
    result = replayed("base_chat", tmp_path)
    told = [re.findall(r"the agent '(.+)' stands for 'codebuff/\1@0.0.1'", warning) for warning in result.warnings]

    assert [["researcher-web"], ["thinker"], ["context-pruner"]] == [sorted(t) for t in told]
    assert ["context-pruner", "researcher-web", "context-pruner"] == [child.agent_id for child in result.children]


def test_the_pruner_runs_with_agent_params_before_every_step(tmp_path: Path) -> None:
    result = replayed("general_agent", tmp_path)

    assert ["context-pruner", "code-searcher", "basher", "context-pruner", "context-pruner"] == [
        child.agent_id for child in result.children
    ]
    assert () == result.warnings
    assert "total(None) is 0 now." == result.output


def test_results_of_pickers_are_joined_in_order(tmp_path: Path) -> None:
    result = replayed("advanced_file_explorer", tmp_path)

    assert ["file-picker"] * 2 == [child.agent_id for child in result.children]
    assert {
        "results": "## prices\n\nprices.py holds the prices, shop.py adds them up.\n\n## tests\n\ntest_shop.py tests total()."
    } == result.output


def test_the_lead_asks_the_user_and_edits_the_files(tmp_path: Path) -> None:
    with ports.script.sample() as root:
        result = ports.performed("base_deep", root)
        written = [(root / name).read_text() for name in ("shop.py", f"{ports.NOTES}/SPEC.md")]
    asked = next(call for call in result.tool_calls if call.tool_name == "ask_user")

    assert ["yes"] == thaw(asked.result.data)["answers"][0]["selected"]
    assert "price * 0.9" in written[0]
    assert "# Spec" in written[1]
    assert {"file-picker", "code-searcher", "thinker", "code-reviewer", "basher", "context-pruner"} == {
        child.agent_id for child in result.children
    }


def test_a_commit_has_the_users_identity_without_the_home_folder(tmp_path: Path) -> None:
    result = replayed("git_committer", tmp_path)
    printed = [call.result.data["stdout"] for call in result.tool_calls if call.tool_name == "run_terminal_command"]

    assert printed[0].startswith("diff --git a/prices.py b/prices.py")
    assert "Ada <ada@example.com>\nRaise the price of cheese\n\nIt costs us more.\n\n" == printed[-1]


@pytest.mark.spec("generator-contract:B12", "generator-contract:B13")
def test_only_the_chosen_proposal_is_applied(tmp_path: Path) -> None:
    with ports.script.sample() as root:
        before = (root / "shop.py").read_text()
        result = ports.performed("editor_multi_prompt", root)
        after = (root / "shop.py").read_text()

    assert before.replace("in order.items()", "in (order or {}).items()") == after
    assert (ports.script.WAYS[0], "Test it.") == (
        result.output["chosen_strategy"],
        result.output["suggested_improvements"],
    )
    assert ["str_replace"] == [c.tool_name for c in result.state.message_history[-2].tool_calls]


@pytest.mark.spec("generator-contract:T2", "generator-contract:B13")
@pytest.mark.parametrize("form", ["JSON text", "one object", "other names"])
def test_a_proposal_in_another_accepted_form_is_applied(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The tool accepts these forms, so the history holds what was accepted, and the handler makes that. codebuff does the same.
    """
    (call,) = ports.script.GUARDED.tool_calls
    (replacement,) = call.input["replacements"]
    value = {
        "JSON text": json.dumps([dict(replacement)]),
        "one object": replacement,
        "other names": [{"oldString": replacement["old_string"], "newStr": replacement["new_string"]}],
    }[form]
    play = ports.PLAYS["editor_multi_prompt"]
    written = tool_call(call.tool_name, {**call.input, "replacements": value})
    said = {
        words: [written if r is ports.script.GUARDED else r for r in replies] for words, replies in play.said.items()
    }
    monkeypatch.setitem(ports.PLAYS, "editor_multi_prompt", attrs.evolve(play, said=said))

    with ports.script.sample() as root:
        result = ports.performed("editor_multi_prompt", root)
        after = (root / "shop.py").read_text()

    assert "in (order or {}).items()" in after
    (made,) = result.state.message_history[-2].tool_calls
    assert [dict(replacement)] == thaw(made.input)["replacements"]
