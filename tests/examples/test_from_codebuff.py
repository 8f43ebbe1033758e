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


@pytest.mark.deep
@pytest.mark.smoke
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


@pytest.mark.spec("generator-contract:L2")
def test_publisher_ids_map_to_bundled_agents_with_one_warning_each(tmp_path: Path) -> None:
    result = replayed("base_chat", tmp_path)
    told = [re.findall(r"the agent '(.+)' stands for 'codebuff/\1@0.0.1'", warning) for warning in result.warnings]

    assert [["researcher-web"], ["thinker"], ["context-pruner"]] == [sorted(t) for t in told]
    assert ["context-pruner", "researcher-web", "context-pruner"] == [child.agent_id for child in result.children]


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
