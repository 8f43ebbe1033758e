"""
Agent files: found by path or id, loaded without taking anybody's import name.
"""

from __future__ import annotations

import sys

import pytest

from stepengine import load_agent, load_agents
from stepengine.errors import DefinitionError

AGENT = 'from stepengine import AgentDefinition\n\nagent = AgentDefinition("{id}", model="test/m")\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """
    A project with an ``agents`` folder as the current directory.
    """
    agents = tmp_path / "agents"
    (agents / "lib").mkdir(parents=True)
    (agents / "lib" / "prompts.py").write_text('HELLO = "hello"\n')
    (agents / "code_reviewer.py").write_text(
        "from stepengine import AgentDefinition\n\nfrom .lib.prompts import HELLO\n\n"
        'agent = AgentDefinition("code-reviewer", system_prompt=HELLO)\n'
    )
    (agents / "other.py").write_text(AGENT.format(id="named-differently"))
    (agents / "_helper.py").write_text("raise RuntimeError('not an agent')\n")
    monkeypatch.chdir(tmp_path)
    return agents


@pytest.mark.spec("requirements:J18")
@pytest.mark.parametrize("how", ["code-reviewer", "code_reviewer", "agents/code_reviewer.py"])
def test_an_agent_is_loaded_by_path_or_by_id(folder, how):
    agent = load_agent(how)

    assert ("code-reviewer", "hello") == (agent.id, agent.system_prompt)


def test_an_id_that_differs_from_its_file_is_found_too(folder):
    assert "named-differently" == load_agent("named-differently").id


@pytest.mark.spec("requirements:J18")
def test_a_folder_is_loaded_in_the_order_of_its_names(folder):
    assert ["code-reviewer", "named-differently"] == [a.id for a in load_agents(folder)]


def test_loading_takes_no_import_name(folder):
    load_agents(folder)

    assert "agents" not in sys.modules
    assert "code_reviewer" not in sys.modules


def test_folders_with_files_of_one_name_are_kept_apart(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(AGENT.format(id=name))

    assert ["one", "two"] == [load_agent(tmp_path / name / "same.py").id for name in ("one", "two")]


@pytest.mark.spec("requirements:O8")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x = 1\n", "nothing called 'agent'"),
        ("agent = 3\n", "an 'agent' that is 3"),
        ("import nothing_like_this\n", "ModuleNotFoundError"),
        ("def broken(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_file_without_an_agent_is_named_with_what_is_expected(tmp_path, content, expected):
    file = tmp_path / "bad.py"
    file.write_text(content)
    with pytest.raises(DefinitionError, match=r"agent = AgentDefinition\(\.\.\.\)") as caught:
        load_agent(file)

    assert str(file) in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.spec("requirements:O8")
def test_what_cannot_be_found_says_where_was_searched(folder):
    with pytest.raises(DefinitionError, match="searched: agents"):
        load_agent("nobody")
    with pytest.raises(DefinitionError, match="no agent file"):
        load_agent("agents/nobody.py")
    with pytest.raises(DefinitionError, match="load_agents"):
        load_agent(folder)
    with pytest.raises(DefinitionError, match="no folder"):
        load_agents("nowhere")
