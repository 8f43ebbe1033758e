"""
Agent files: found by path or id, loaded without taking anybody's import name.
"""

from __future__ import annotations

import sys

import pytest

from stepengine import Engine, load_agent, load_agents
from stepengine.engine import list_agents
from stepengine.engine.loader import load_folder
from stepengine.errors import DefinitionError
from tests.phrases import NO_AGENT

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


@pytest.mark.spec("requirements:Q10")
@pytest.mark.parametrize("how", ["code-reviewer", "code_reviewer", "agents/code_reviewer.py"])
def test_an_agent_is_loaded_by_path_or_by_id(folder, how):
    agent = load_agent(how)

    assert ("code-reviewer", "hello") == (agent.id, agent.system_prompt)


def test_an_id_that_differs_from_its_file_is_found_too(folder):
    assert "named-differently" == load_agent("named-differently").id


@pytest.mark.spec("requirements:Q10")
def test_a_folder_is_loaded_in_the_order_of_its_names(folder):
    assert ["code-reviewer", "named-differently"] == [a.id for a in load_agents(folder)]


def test_folders_with_files_of_one_name_are_kept_apart(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(AGENT.format(id=name))

    assert ["one", "two"] == [load_agent(tmp_path / name / "same.py").id for name in ("one", "two")]


@pytest.mark.spec("requirements:O8")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x = 1\n", "no 'agent' or 'agents'"),
        ("agent = 3\n", "an 'agent' that is 3"),
        ("import nothing_like_this\n", "ModuleNotFoundError"),
        ("def broken(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_file_without_an_agent_is_refused_with_the_expected_content(tmp_path, content, expected):
    file = tmp_path / "bad.py"
    file.write_text(content)
    with pytest.raises(DefinitionError, match=r"agent = AgentDefinition\(\.\.\.\)") as caught:
        load_agent(file)

    assert str(file) in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.spec("requirements:O8")
def test_missing_agent_error_says_where_was_searched(folder):
    with pytest.raises(DefinitionError, match="searched: agents"):
        load_agent("nobody")
    with pytest.raises(DefinitionError, match="no agent file"):
        load_agent("agents/nobody.py")
    with pytest.raises(DefinitionError, match="load_agents"):
        load_agent(folder)
    with pytest.raises(DefinitionError, match="no folder"):
        load_agents("nowhere")


SEVERAL = """
from stepengine import AgentDefinition

agents = [AgentDefinition("first-one", model="test/m"), AgentDefinition("second", model="test/m")]
"""


@pytest.mark.spec("requirements:X74")
@pytest.mark.parametrize("how", ["agents/team.py#first-one", "agents/team.py#first_one", "first-one"])
def test_one_of_several_agents_in_a_file_is_chosen(folder, how):
    (folder / "team.py").write_text(SEVERAL)

    assert "first-one" == load_agent(how).id
    assert ["first-one", "second"] == [agent.id for agent in load_agents("agents/team.py")]
    assert ["second"] == [agent.id for agent in load_agents("agents/team.py#second")]


@pytest.mark.spec("requirements:X74")
def test_a_file_of_several_says_which_there_are(folder):
    (folder / "team.py").write_text(SEVERAL)

    with pytest.raises(
        DefinitionError, match=r"several agents: 'first-one', 'second'; choose one, such as '.*team.py#first-one'"
    ):
        load_agent("agents/team.py")
    with pytest.raises(DefinitionError, match="has no agent 'third'; its agents: 'first-one', 'second'"):
        load_agent("agents/team.py#third")


@pytest.mark.spec("requirements:X74")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "from stepengine import AgentDefinition\nagent = AgentDefinition('a')\nagents = [agent]\n",
            "both 'agent' and",
        ),
        ("agents = []\n", "'agents' that are \\[\\]"),
        ("agents = [3]\n", "found 3 in 'agents'"),
        (
            "from stepengine import AgentDefinition\nagents = [AgentDefinition('a'), AgentDefinition('a')]\n",
            "two agents with the id",
        ),
    ],
)
def test_invalid_agent_source_is_named(tmp_path, content, said):
    (tmp_path / "bad.py").write_text(content)

    with pytest.raises(DefinitionError, match=said):
        load_agent(tmp_path / "bad.py")


@pytest.mark.spec("requirements:X74")
def test_broken_file_of_a_folder_drops_only_its_own_agents(folder):
    (folder / "a_broken.py").write_text("import nothing_like_this\n")

    with pytest.warns(
        UserWarning, match=r"a_broken.py: loading it failed with ModuleNotFoundError.*this file is skipped"
    ):
        assert ["code-reviewer", "named-differently"] == [agent.id for agent in load_agents(folder)]
    with pytest.warns(UserWarning, match="a_broken"):
        assert "named-differently" == load_agent("named-differently").id
    with pytest.warns(UserWarning, match="a_broken"):
        assert "editor" == load_agent("editor").id
    with pytest.raises(DefinitionError, match=rf"(?s){NO_AGENT} 'nobody'.*not read: .*a_broken.py"):
        load_agent("nobody")
    with pytest.raises(DefinitionError, match="a_broken"):
        load_agent("a-broken")


@pytest.mark.spec("requirements:X74")
def test_lookup_of_another_agent_reports_a_broken_definition(folder):
    (folder / "b_codebuff.py").write_text(
        "from stepengine import AgentDefinition\nagent = AgentDefinition('b', toolNames=[])\n"
    )
    broken = f"{folder / 'b_codebuff.py'}: agent 'b' has no argument 'toolNames'; you may mean tools"

    with pytest.raises(DefinitionError) as caught:
        load_agent("nobody", folders=[folder])
    assert f"not read: {broken}" in caught.value.message
    assert [broken] == [said.partition("; valid arguments")[0] for said in load_folder(folder).problems]
    with pytest.raises(DefinitionError, match=r"is a folder; name a file in it, such as '.*/b_codebuff\.py'"):
        load_agent(str(folder))


def test_folder_without_any_loadable_agent_is_an_error(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\n")

    with pytest.raises(DefinitionError, match="no 'agent' or 'agents'"):
        load_agents(tmp_path)


IMPORTS = [
    ("import helper", "helper.NAME"),
    ("import helper as h", "h.NAME"),
    ("import os, helper", "helper.NAME + os.sep[:0]"),
    ("from helper import NAME", "NAME"),
    ("from helper import *", "NAME"),
    ("from . import helper", "helper.NAME"),
    ("from .helper import NAME", "NAME"),
    ("import lib.deep", "lib.deep.NAME"),
    ("import lib.deep as deep", "deep.NAME"),
    ("import lib.below.deepest", "lib.below.deepest.NAME"),
    ("from lib import deep", "deep.NAME"),
    ("from lib.deep import NAME", "NAME"),
]


@pytest.mark.spec("requirements:X74")
@pytest.mark.parametrize(("line", "name"), IMPORTS, ids=[line for line, _ in IMPORTS])
def test_neighbours_of_an_agent_file_are_importable_without_global_names(tmp_path, line, name):
    """
    What is beside imports what is beside it in the same way, as here each does from `base`.
    """
    (tmp_path / "lib" / "below").mkdir(parents=True)
    (tmp_path / "base.py").write_text('NAME = "one-of-these"\n')
    for path in ("helper.py", "lib/deep.py", "lib/below/deepest.py"):
        (tmp_path / path).write_text("from base import NAME\n")
    (tmp_path / "mine.py").write_text(
        f"from stepengine import AgentDefinition\n{line}\nagent = AgentDefinition({name})\n"
    )
    before = [*sys.path]

    assert "one-of-these" == load_agent(tmp_path / "mine.py").id
    assert before == sys.path
    assert not {"base", "helper", "lib", "mine"} & {*sys.modules}


@pytest.mark.spec("requirements:X74")
def test_import_inside_a_handler_finds_the_neighbour_of_its_file(tmp_path):
    (tmp_path / "helper.py").write_text('NAME = "later"\n')
    (tmp_path / "mine.py").write_text(
        "from stepengine import AgentDefinition\n\ndef handle_steps(ctx):\n    import helper\n    return helper.NAME\n    yield\n\n"
        "agent = AgentDefinition('mine', handle_steps=handle_steps)\n"
    )

    with Engine([load_agent(tmp_path / "mine.py")]) as engine:
        assert "later" == engine.run_sync("mine", "go").unwrap()


@pytest.mark.spec("requirements:X74")
def test_neighbour_named_like_a_standard_module_is_refused(tmp_path):
    (tmp_path / "json.py").write_text('raise RuntimeError("nobody asked for this")\n')
    mine = tmp_path / "mine.py"
    mine.write_text(f"import json\n{AGENT.format(id='mine')}")

    with pytest.raises(
        DefinitionError,
        match=r"mine.py:1: 'json' is a module of the standard library, and 'json.py' is next to the agent file",
    ):
        load_agent(mine)

    (tmp_path / "harmless.py").write_text(AGENT.format(id="harmless"))
    assert "harmless" == load_agent(tmp_path / "harmless.py").id


def test_neighbouring_folder_named_like_an_installed_package_shadows_nothing(tmp_path):
    for name in ("json", "attrs", "stepengine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('raise RuntimeError("nobody asked for this")\n')
    (tmp_path / "mine.py").write_text(f"import attrs, json\n{AGENT.format(id='mine')}")

    assert "mine" == load_agent(tmp_path / "mine.py").id


def test_line_numbers_hold_in_a_file_that_imports_a_neighbour(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 1\n")
    (tmp_path / "mine.py").write_text("import helper\n\n\nraise ValueError(helper.NAME)\n")

    with pytest.raises(DefinitionError, match=r"ValueError: 1 \(.*mine.py:4\)"):
        load_agent(tmp_path / "mine.py")


def test_broken_agent_files_and_hidden_agents_are_listed_with_files(tmp_path):
    first, second, broken = [tmp_path / name / "own.py" for name in ("first", "second", "broken")]
    own = AGENT.format(id="own")
    for file, code in ((first, own), (second, own), (broken, "import nowhere_at_all\n")):
        file.parent.mkdir()
        file.write_text(code, encoding="utf-8")

    listed = {one.source: one for one in list_agents([first.parent, second.parent, broken.parent])}

    assert listed[first].hidden_by is None
    assert listed[second].hidden_by == first
    assert listed[broken].agent is None
    assert isinstance(listed[broken].problem, DefinitionError)
    assert "nowhere_at_all" in str(listed[broken].problem)
    assert {one.agent.id for one in listed.values() if one.agent is not None} > {"own", "code-reviewer"}
