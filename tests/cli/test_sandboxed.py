"""``sandboxed:FILE`` and the setting: a stranger's file is never imported, and everything else is as with any file."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepengine import load_agent, load_agents
from stepengine.engine import packages, trust
from stepengine.errors import DefinitionError

pytest.importorskip("pydantic_monty", reason="needs the extra programs")


from stepengine.sandbox import MontySandbox, program_tool
from tests.cli.command import typed

from .test_packages import wheel_of

# What the package opens once for a process is there before any test, so that none of them seems to have left it behind.
first = MontySandbox(1)
first.open((), seconds=1, memory=1 << 26, printed=10, seed=1).feed("1", datetime(2026, 1, 1, tzinfo=UTC))
first.close()

ASKER = '''
"""Writes down that it was imported, where it can."""
try:
    open("imported", "w")
except Exception:
    pass

from stepengine import AgentDefinition, Ask, StepContext, Steps, ToolCall


def handle_steps(ctx: StepContext) -> Steps[dict]:
    for word in ctx.prompt.split():
        yield ToolCall("write_todos", {"todos": [{"task": word, "completed": False}]})
    said = yield from Ask("Which colour?", ["red", "blue"])
    if said == "blue":
        raise ValueError("no blue")
    return {"said": said}


agent = AgentDefinition("asker", tools=["write_todos"], output_mode="structured_output", handle_steps=handle_steps)
'''


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """Workers live as long as their process, and what a command set as long as its context; a test leaves none behind."""
    token = trust.SANDBOXED.set(frozenset())
    yield
    trust.SANDBOXED.reset(token)
    for sandbox in program_tool._SHARED:
        sandbox.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asker.py").write_text(ASKER)
    return tmp_path


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG40")
def test_sandboxed_file_runs_resumes_and_replays_without_import(folder: Path) -> None:
    ran = typed("run", "sandboxed:./asker.py", "one two", "--journal", "run.jsonl")
    resumed = typed("resume", "run.jsonl", "--agent", "sandboxed:./asker.py", "--answer", "q0=red")
    replayed = typed("replay", "run.jsonl", "--agent", "sandboxed:./asker.py")

    assert (3, 0, 0) == (ran.exit_code, resumed.exit_code, replayed.exit_code), ran.output + resumed.output
    assert "stepengine resume run.jsonl --agent sandboxed:./asker.py --answer" in ran.output
    assert {"said": "red"} == json.loads(resumed.stdout)
    assert not (folder / "imported").exists()


@pytest.mark.spec("programs:PG40")
def test_kept_run_resumes_in_the_sandbox_by_itself(folder: Path) -> None:
    ran = typed("run", "sandboxed:./asker.py", "one")
    resumed = typed("resume", "--last", "--answer", "q0=red")

    assert (3, 0) == (ran.exit_code, resumed.exit_code), resumed.output
    assert not (folder / "imported").exists()


@pytest.mark.spec("programs:PG40")
def test_sandboxed_setting_applies_however_the_file_is_named(folder: Path) -> None:
    (folder / "agents").mkdir()
    (folder / "agents" / "asker.py").write_text(ASKER)
    (folder / "set.toml").write_text('sandboxed = ["agents"]\n')

    ran = typed("run", "./agents/asker.py", "one", "--config", "set.toml", "--no-journal")
    improved = typed(
        "compare", "improve", "./agents/asker.py", "--eval", "x.py", "--budget", "1", "--config", "set.toml"
    )

    assert 3 == ran.exit_code, ran.output
    assert 2 == improved.exit_code
    assert not (folder / "imported").exists()


@pytest.mark.spec("programs:PG40")
def test_project_settings_cannot_change_sandboxing(folder: Path) -> None:
    (folder / "stepengine.toml").write_text("sandboxed = []\n")

    said = typed("run", "sandboxed:./asker.py", "one", "--no-journal")

    assert "sandboxed" in said.stderr
    assert 3 == said.exit_code


@pytest.mark.spec("programs:PG40")
def test_sandboxed_folder_loads_without_import_and_skips_broken_files(folder: Path) -> None:
    (folder / "bad.py").write_text("import os\nos.mkdir('imported')\n\nx = (\n")

    with pytest.warns(UserWarning, match=r"bad.py:4: syntax error"):
        found = load_agents(folder, sandboxed=True)

    assert ["asker"] == [agent.id for agent in found]
    assert load_agent("asker.py", sandboxed=True) is load_agent("sandboxed:asker.py")
    with pytest.raises(DefinitionError, match="name an agent that runs in the sandbox by its file"):
        load_agent("asker", sandboxed=True)
    assert not (folder / "imported").exists()


@pytest.mark.spec("programs:PG40")
@pytest.mark.parametrize("name", ["agents", "agents/asker.py", "sandboxed:agents/asker.py"])
def test_sandboxed_file_has_no_schedules_however_it_is_named(folder: Path, name: str) -> None:
    (folder / "agents").mkdir()
    (folder / "agents" / "asker.py").write_text(ASKER)
    (folder / "set.toml").write_text('sandboxed = ["agents"]\n')

    shown = typed("runs", "--schedules", name, "--config", "set.toml")

    assert (0, "") == (shown.exit_code, shown.stdout), shown.output
    assert not (folder / "imported").exists()


@pytest.mark.spec("programs:PG40", "requirements:X72")
@pytest.mark.parametrize("first", ["run ./agents/asker.py one --no-journal", "runs --schedules agents/asker.py"])
def test_sandboxed_file_gives_its_folder_no_trust(folder: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    monkeypatch.setattr(trust, "is_trusted", lambda folder: False)
    (folder / "agents").mkdir()
    (folder / "agents" / "asker.py").write_text(ASKER)
    (folder / "agents" / "other.py").write_text("from pathlib import Path\n\nPath('imported').touch()\n")
    (folder / "set.toml").write_text('sandboxed = ["agents/asker.py"]\n')

    ran = typed(*first.split(), "--config", "set.toml")
    other = typed("run", "other", "one", "--config", "set.toml", "--no-journal")

    assert ran.exit_code in (0, 3), ran.output
    assert 2 == other.exit_code, other.output
    assert not (folder / "imported").exists()


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python looks through, with a package that writes down that it was imported."""
    declared = {"format": packages.FORMAT, "agents": {"asker": {"tools": {"write_todos": "control"}}}}
    files = {
        "acme_agents/asker.py": ASKER.partition("try:")[0] + ASKER.partition("pass\n")[2],
        f"acme_agents/{packages.FILE}": json.dumps(declared),
    }
    files["acme_agents/__init__.py"] = "from pathlib import Path\n\nPath('imported').touch()\n"
    with zipfile.ZipFile(wheel_of(folder, **files)) as opened:
        opened.extractall(folder / "site")
    monkeypatch.syspath_prepend(str(folder / "site"))
    before = {*sys.modules}
    yield folder / "site"
    for name in [name for name in {*sys.modules} - before if name.startswith("acme_agents")]:
        del sys.modules[name]


SEPARATORS = st.text("-_.", min_size=1, max_size=3)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG40")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(separator=SEPARATORS, upper=st.sets(st.integers(0, 10)))
def test_sandboxed_package_is_listed_in_any_spelling(site: Path, separator: str, upper: set[int]) -> None:
    """As indexes compare names (PEP 503)."""
    name = "".join([c.upper() if n in upper else c for n, c in enumerate(f"acme{separator}agents")])
    trust.SANDBOXED.set(frozenset([name]))

    assert "asker" == load_agent("acme/asker").id
    assert not Path("imported").exists()


@pytest.mark.spec("programs:PG40")
def test_sandboxed_folder_covers_the_packages_below_it(site: Path) -> None:
    trust.SANDBOXED.set(frozenset([str(site)]))

    assert "asker" == load_agent("acme/asker").id
    assert not Path("imported").exists()


@pytest.mark.spec("programs:PG40")
def test_sandboxed_name_of_no_package_is_reported(site: Path, folder: Path) -> None:
    (folder / "here").mkdir()
    (folder / "set.toml").write_text('sandboxed = ["acme-agent", "here"]\n')
    typed("agents", "agree", "acme-agents")
    ran = typed("run", "acme/asker", "one", "--config", "set.toml", "--no-journal")

    assert "lists 'acme-agent', which is not an installed package with agents, a file or a folder" in ran.stderr
    assert "installed packages: acme-agents" in " ".join(ran.stderr.split())
    assert "'here'" not in ran.stderr


@pytest.mark.spec("programs:PG40")
def test_sandboxed_installed_package_runs_without_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {
        "format": "stepengine.agents/1",
        "agents": {"asker": {"tools": {"write_todos": "control"}}},
        "hosts": [],
    }
    name = packages.FILE
    files = {"acme_agents/asker.py": ASKER, f"acme_agents/{name}": json.dumps(declared)}
    files["acme_agents/__init__.py"] = "open('imported', 'w')\n"
    site = folder / "site"
    wheel = wheel_of(folder, **files)
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    (folder / "set.toml").write_text('sandboxed = ["acme-agents"]\n')

    agreed = typed("agents", "agree", "acme-agents")
    ran = typed("run", "acme/asker", "one", "--config", "set.toml", "--no-journal")

    assert 0 == agreed.exit_code, agreed.output
    assert 3 == ran.exit_code, ran.output
    assert not (folder / "imported").exists()
