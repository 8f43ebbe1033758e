"""
`stepengine agents` and `init --package`: what somebody who installs a package meets, and what is agreed to.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import attrs
import pytest

from stepengine.engine import approve_package, make_project
from stepengine.engine.projects import derive_project_and_module_names
from stepengine.errors import DefinitionError
from stepengine.testing import check_package
from stepengine.workspace.environment import MARKER
from tests.cli.command import typed


def changed(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "todo-plans"
    make_project(folder, package=True)
    return folder


def wheel_of(folder: Path, *, version: str = "1.0", entry: str = "acme = acme_agents", **files: str) -> Path:
    """
    A wheel as a build backend writes it, of the given files.
    """
    file = folder / f"acme_agents-{version}-py3-none-any.whl"
    info = f"acme_agents-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: acme-agents\nVersion: {version}\n")
        opened.writestr(f"{info}/entry_points.txt", f"[stepengine.agents]\n{entry}\n")
        for name, text in {"acme_agents/__init__.py": "", **files}.items():
            opened.writestr(name, text)
    return file


AGENT = """
from stepengine import AgentDefinition, tool

@tool(category="network")
def fetch(url: str) -> str:
    '''Fetch a page of https://api.example.com.'''
    return url

agent = AgentDefinition("reviewer", tools=[fetch])
"""


def declared(**more: object) -> str:
    agents = {"reviewer": {"tools": {"fetch": "network"}}}
    return json.dumps({"format": "stepengine.agents/1", "agents": agents, "hosts": ["api.example.com"], **more})


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("packages:PK11")
def test_check_write_updates_tools_and_keeps_folders_and_hosts(project: Path) -> None:
    file = project / "src/todo_plans/stepengine-agents.json"
    before = json.loads(file.read_text())
    changed(file, '"find_todos": "read"', '"other": "read"')
    said = typed("agents", "check", project)
    assert 1 == said.exit_code
    assert "the tool 'find_todos' of 'todos' is of the category 'read', but declared as 'nothing'" in " ".join(
        said.output.split()
    )
    assert "the tool 'other' of 'todos' is missing in the code" in " ".join(said.output.split())

    assert 0 == typed("agents", "check", project, "--write").exit_code
    assert before == json.loads(file.read_text())


@pytest.mark.deep
@pytest.mark.spec("packages:PK11")
def test_check_write_keeps_an_unreadable_declaration(project: Path) -> None:
    file = project / "src/todo_plans/stepengine-agents.json"
    changed(file, '"hosts": []', '"hosts": ["api.example.com"],')
    before = file.read_text()
    said = typed("agents", "check", project, "--write")

    assert 2 == said.exit_code
    assert "src/todo_plans/stepengine-agents.json cannot be read and is unchanged" in " ".join(said.output.split())
    assert before == file.read_text()


@pytest.mark.deep
@pytest.mark.spec("packages:PK11")
def test_check_finds_private_modules_keys_and_machine_paths(project: Path) -> None:
    (project / "private_helper.py").write_text("X = 1\n")
    changed(
        project / "src/todo_plans/todos.py",
        "from pathlib import Path\n",
        "from pathlib import Path\nimport private_helper\n",
    )
    said = typed("agents", "check", project)
    assert 1 == said.exit_code
    assert "No module named 'private_helper'" in said.output

    changed(project / "src/todo_plans/todos.py", "import private_helper\n", 'HERE = "/home/somebody/agents"\n')
    (project / "src/todo_plans/notes.txt").write_text(f"key sk-ant-api03-{'a1B2' * 23}AA\n{project}\n{project}-2\n")
    said = typed("agents", "check", project, "--json")
    assert 1 == said.exit_code
    problems = "\n".join(json.loads(said.output)["problems"])
    assert "todo_plans/todos.py:4 contains a machine-specific path: /home/somebody" in problems
    assert "todo_plans/notes.txt:2 contains a machine-specific path" in problems
    assert "todo_plans/notes.txt:3" not in problems
    assert "todo_plans/notes.txt" in problems.replace("todo_plans/notes.txt:2", "")


@pytest.mark.deep
@pytest.mark.spec("packages:PK11")
def test_check_reports_a_recorded_run_that_diverges(project: Path) -> None:
    changed(project / "src/todo_plans/todos.py", "Sort the TODO comments", "Order the TODO comments")
    said = typed("agents", "check", project)

    assert 1 == said.exit_code
    assert "todo-plans/todos does not replay its recorded runs" in " ".join(said.output.split())


@pytest.mark.deep
@pytest.mark.parametrize(
    ("entry", "code", "said"),
    [
        ("acme = acme_agents\nother = acme_agents", AGENT, "it has 2 entries in the group 'stepengine.agents'"),
        ("acme = acme_agents", "import os\nos._exit(7)\n", "importing it ended the process with exit code 7"),
        ("acme = acme_agents", "raise ValueError('no')\n", "failed with ValueError: no"),
        ("acme = acme_agents", AGENT.replace("tools=[fetch]", "tools=[fetch, 'spawn_agents'], spawnable_agents=['nobody']"), "'nobody'"),
    ],
)  # fmt: skip
def test_unusable_wheel_is_reported(tmp_path: Path, entry: str, code: str, said: str) -> None:
    agents = {"reviewer": {"tools": {"fetch": "network", "spawn_agents": "agent"}, "spawns": ["nobody"]}}
    files = {"acme_agents/a.py": code, "acme_agents/stepengine-agents.json": declared(agents=agents)}
    found = typed("agents", "check", wheel_of(tmp_path, entry=entry, **files), "--import", "--json")

    assert 1 == found.exit_code
    assert said in "\n".join(json.loads(found.output)["problems"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder, "there is no pyproject.toml"),
        (lambda folder: (folder / "x.whl").write_text("no zip") and folder / "x.whl", "is not a wheel"),
        (lambda folder: (folder / "pyproject.toml").write_text("[[") and folder, "cannot be read"),
        (lambda folder: (folder / "pyproject.toml").write_text("build-system = 1") and folder, "`[build-system]`"),
    ],
)
def test_check_rejects_a_folder_that_is_no_project(tmp_path: Path, make: object, said: str) -> None:
    found = typed("agents", "check", make(tmp_path))

    assert 2 == found.exit_code
    assert said in " ".join(found.output.split())


@pytest.mark.spec("packages:PK13")
def test_zip_behind_a_prefix_is_no_wheel(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, **{"acme_agents/a.py": AGENT, "acme_agents/stepengine-agents.json": declared()})
    wheel.write_bytes(b"#!/bin/sh\nexit\n" + wheel.read_bytes())
    found = typed("agents", "check", wheel)

    assert 2 == found.exit_code
    assert "does not start like a zip file" in " ".join(found.output.split())


@pytest.mark.spec("packages:PK13")
def test_a_python_program_checks_a_package_as_the_command_does(tmp_path: Path) -> None:
    files = {"acme_agents/a.py": AGENT, "acme_agents/stepengine-agents.json": declared(hosts=[])}
    wheel = wheel_of(tmp_path, **files)
    found = check_package(wheel)

    assert json.loads(typed("agents", "check", wheel, "--json").output) == attrs.asdict(found)
    assert (1, []) == (len(found.problems), found.good)
    with pytest.raises(DefinitionError, match=r"there is no pyproject\.toml in"):
        check_package(tmp_path)
    with pytest.raises(DefinitionError, match="is a wheel"):
        check_package(wheel, write=True)


RUNS = "import os, pathlib\npathlib.Path({mark!r}).write_text('ran')\n"


@pytest.mark.spec("packages:PK6", "packages:PK13")
def test_check_reads_a_wheel_and_runs_nothing_of_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    runs = RUNS.format(mark=str(mark))
    files = {
        "acme_agents/a.py": runs + AGENT,
        "acme_agents/__init__.py": runs,
        "sitecustomize.py": runs,
        "acme.pth": f"import os; open({str(mark)!r}, 'w')\n",
        "acme_agents/stepengine-agents.json": declared(hosts=[]),
    }
    said = typed("agents", "check", wheel_of(tmp_path, **files), "--json")
    found = json.loads(said.output)

    assert (1, False) == (said.exit_code, mark.exists())
    assert "fetch is of the category 'network', and 'hosts' is empty" in found["problems"][0]
    assert "its code was not run" in found["notes"][-1]
    assert "a.py names the host api.example.com, which is not among 'hosts'" in found["notes"]

    harmless = {"acme_agents/a.py": AGENT, "acme_agents/stepengine-agents.json": declared()}
    good = typed("agents", "check", wheel_of(tmp_path, **harmless))
    assert 0 == good.exit_code
    assert "its code was not run" in " ".join(good.output.split())


@pytest.mark.spec("packages:PK13")
def test_the_folder_of_a_wheel_is_no_machine_specific_path(tmp_path: Path) -> None:
    files = {"acme_agents/a.py": AGENT, "acme_agents/b.txt": f"Its cache is in {tmp_path}/cache.\n"}
    wheel = wheel_of(tmp_path, **files, **{"acme_agents/stepengine-agents.json": declared()})

    assert [] == check_package(wheel).problems


def damaged(folder: Path, kind: str) -> Path:
    """
    A wheel with what no build backend writes.
    """
    content = {"acme_agents/stepengine-agents.json": declared(), "acme_agents/a.py": AGENT * 50}
    names = {
        "up": "../evil.py",
        "absolute": "/tmp/evil.py",
        "backslash": "acme_agents\\evil.py",
        "deep": "a/" * 2_000 + "x.py",
        "long": "a" * 300 + ".py",
        "control": "acme_agents/a\nb.py",
        "drive": "C:/evil.py",
        "case": "acme_agents/A.PY",
    }
    file = wheel_of(folder, **content, **({names[kind]: "x"} if kind in names else {}))
    if kind in ("lzma", "bzip2"):
        with zipfile.ZipFile(file, "a", {"lzma": zipfile.ZIP_LZMA, "bzip2": zipfile.ZIP_BZIP2}[kind]) as opened:
            opened.writestr("acme_agents/more.py", "x = 1")
    if kind == "twice":
        with zipfile.ZipFile(file, "a") as opened, pytest.warns(UserWarning, match="Duplicate name"):
            opened.writestr("acme_agents/a.py", "x = 1")
    data = bytearray(file.read_bytes())
    central = data.index(b"PK\x01\x02")
    if kind == "encrypted":
        data[6] |= 1
        data[central + 8] |= 1
    elif kind == "unknown":
        data[8] = data[central + 10] = 99
    elif kind == "checksum":
        data[central + 16] ^= 0xFF
    elif kind == "short":
        data = data[: len(data) // 2]
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    "kind",
    ["up", "absolute", "backslash", "deep", "long", "control", "drive", "case", "twice", "lzma", "bzip2", "encrypted", "unknown", "checksum", "short"],
)  # fmt: skip
@pytest.mark.spec("packages:PK13")
def test_malformed_wheel_is_rejected_in_one_sentence(tmp_path: Path, kind: str) -> None:
    said = typed("agents", "check", damaged(tmp_path, kind))

    assert (2, True) == (said.exit_code, said.exception is None or isinstance(said.exception, SystemExit)), said.output
    assert "acme_agents-1.0" in "".join(said.output.split())
    assert not (tmp_path.parent / "evil.py").exists()


# --- agree ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("packages:PK6")
def test_consent_shows_every_permission_with_the_riskiest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = {f"look_{n}": "read" for n in range(200)} | {"shell": "execute", "send": "network", "put": "write"}
    wants = declared(
        agents={"reviewer": {"tools": tools}},
        hosts=["api.example.com", "\u0430pi.example.com"],
        writes=["/srv/shop"],
        reads=["."],
    )
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel_of(tmp_path, **{"acme_agents/stepengine-agents.json": wants})) as opened:
        opened.extractall(site)
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(site))
    refused = typed("run", "acme/reviewer", "go")
    agreed = typed("agents", "agree", "acme-agents")

    assert (2, 0) == (refused.exit_code, agreed.exit_code)
    for said in (refused.output, agreed.output):
        lines = [line.strip() for line in said.splitlines()]
        kinds = [line.partition(": ")[0] for line in lines if line.startswith(("host", "writes:", "reads:", "tools,"))]
        assert ["host", "writes", "reads", "tools, execute", "tools, network", "tools, write", "tools, read"] == kinds
        assert "host: api.example.com, xn--pi-6kc.example.com" in lines
        assert all(name in said for name in tools)
        assert (
            "total: 2 host, 1 writes, 1 reads, 1 tools, execute, 1 tools, network, 1 tools, write, 200 tools, read"
            in lines
        )


@pytest.mark.spec("packages:PK2")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"agents": {"a": {"tools": {f"t{n}": "read" for n in range(501)}}}}, "at most"),
        (
            {"agents": {f"a{m}": {"tools": {f"t{m}-{n}": "read" for n in range(300)}} for m in range(2)}},
            "because a person must approve them",
        ),
        ({"hosts": ["exa mple\u0430.com"]}, "which is not a host"),
        ({"hosts": ["a.com, b.com"]}, "which is not a host"),
        ({"hosts": ["good.com@evil.com"]}, "which is not a host"),
        ({"hosts": ["good.com/.evil.com"]}, "which is not a host"),
        ({"agents": {"a": {"tools": {"look": "re\u0430d"}}}}, "names and categories"),
        ({"agents": {"a": {"tools": {"re\u0430d": "execute"}}}}, "names and categories"),
        ({"agents": {"a": {"tools": {"look, total: 0": "execute"}}}}, "names and categories"),
    ],
    ids=["of one", "of all", "host", "two hosts", "user", "path", "category", "tool", "list"],
)
def test_unreviewable_declaration_is_rejected(tmp_path: Path, more: dict[str, object], said: str) -> None:
    wheel = wheel_of(tmp_path, **{"acme_agents/stepengine-agents.json": declared(**more)})
    found = json.loads(typed("agents", "check", wheel, "--json").output)

    assert said in "\n".join(found["problems"])


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A folder that Python looks through, with one package of agents.
    """
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    site = tmp_path / "site"
    files = {"acme_agents/a.py": "raise SystemExit('imported')\n", "acme_agents/stepengine-agents.json": declared()}
    with zipfile.ZipFile(wheel_of(tmp_path, **files)) as opened:
        opened.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.spec("packages:PK6", "packages:PK8")
def test_agents_list_shows_declared_wants_and_consent(installed: Path) -> None:
    assert "not approved: stepengine agents agree acme-agents" in " ".join(typed("agents", "list").output.split())

    said = typed("agents", "agree", "Acme_Agents")
    assert 0 == said.exit_code
    assert "  host: api.example.com\n  tools, network: fetch\n" in said.output
    shown = typed("agents", "list").output
    assert "acme/reviewer\n  tools   fetch (network)\n  package acme-agents 1.0; publisher acme; approved\n" in shown
    assert "  requests host api.example.com (declared by the package, not enforced)" in shown
    assert "forgotten" in typed("agents", "agree", "acme-agents", "--forget").output
    assert "not approved: " in " ".join(typed("agents", "list").output.split())


@pytest.mark.spec("packages:PK6")
def test_package_without_consent_is_explained_and_not_imported(installed: Path) -> None:
    said = typed("run", "acme/reviewer", "Go")

    assert 2 == said.exit_code
    assert "tools, network: fetch" in said.output
    assert "stepengine agents agree acme-agents" in said.output
    assert "Its code runs with all of your rights." in said.output
    assert "imported" not in said.output


def test_approve_package_is_rejected_inside_a_tool(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as inside:
        inside.setenv(MARKER, "1")
        with pytest.raises(
            DefinitionError, match="approve_package is only for people, and a tool of an agent called it"
        ):
            approve_package("acme-agents")
    assert "not approved: " in " ".join(typed("agents", "list").output.split())

    assert "acme-agents" == approve_package("Acme_Agents").package
    assert "publisher acme; approved\n" in typed("agents", "list").output


def test_agreeing_to_an_unknown_package_lists_the_installed(installed: Path) -> None:
    said = typed("agents", "agree", "nothing")

    assert 2 == said.exit_code
    assert "installed packages: acme-agents" in said.output


@pytest.mark.spec("packages:PK8")
def test_testing_an_agent_without_recordings_explains_it(installed: Path) -> None:
    said = typed("test", "acme/reviewer")

    assert 2 == said.exit_code
    assert "acme/reviewer of acme-agents 1.0 has no recorded runs" in said.output


# --- init -------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("packages:PK10")
@pytest.mark.parametrize(
    ("folder", "name", "module"),
    [("my-agents", "my-agents", "my_agents"), ("My Agents!", "my-agents", "my_agents"), ("json", "json", "agents_json"),
     ("1st", "1st", "agents_1st"), ("class", "class", "agents_class"), ("!", "agent", "agent")],
)  # fmt: skip
def test_package_is_named_after_its_folder_with_a_free_module(
    tmp_path: Path, folder: str, name: str, module: str
) -> None:
    assert (name, module) == derive_project_and_module_names(tmp_path / folder)
    said = typed("init", tmp_path / folder, "--package")

    assert 0 == said.exit_code
    made = {file: file.read_text() for file in (tmp_path / folder).rglob("*") if file.is_file()}
    assert tmp_path / folder / "src" / module / "todos.py" in made
    assert not [file for file, text in made.items() if "{name}" in text or "{module}" in text]


# --- journals ---------------------------------------------------------------------------------------------------------
