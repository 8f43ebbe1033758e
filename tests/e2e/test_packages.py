"""
A package of agents from its making to somebody who has only its name: built, published to an index on loopback, installed into an
empty environment, agreed to, run and repeated there. What publishes is what stands in the workflows.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from stepengine.engine import make_project
from tests.waits import until

ROOT = Path(__file__).resolve().parents[2]
NAME = "todo-plans"
UNASKED = ("--model", "nobody", "--base-url", "http://127.0.0.1:9/v1")
"""A model that is not there: the run asks for none."""

pytestmark = pytest.mark.deep


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """
    An index of packages on loopback that anybody may publish to.
    """
    if find_spec("pypiserver") is None or find_spec("uv") is None:
        pytest.skip("needs the extra 'dev'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("index")
    command = [
        sys.executable,
        "-m",
        "pypiserver",
        "run",
        "-i",
        "127.0.0.1",
        "-p",
        str(port),
        "-P",
        ".",
        "-a",
        ".",
        str(folder),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{address}/simple/") or server.poll() is not None)
        assert server.poll() is None
        yield address
    finally:
        server.terminate()
        server.wait(30)


def steps_of(workflow: Path) -> list[str]:
    *_, job = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


def ran(*command: str | Path, cwd: Path, code: int = 0, **variables: str) -> str:
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True, cwd=cwd, timeout=300,
        stdin=subprocess.DEVNULL, env={**kept, "PATH": path, **variables},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert code == done.returncode, f"{command}\n{said}"
    return said


def to(index: str) -> dict[str, str]:
    return {
        "UV_PUBLISH_URL": f"{index}/",
        "UV_PUBLISH_USERNAME": "anybody",
        "UV_PUBLISH_PASSWORD": "none",
        "UV_NO_CONFIG": "1",
    }


def published(project: Path, index: str) -> None:
    """
    Run the steps of a project's workflow that publishes, but for the one that installs what this environment has.
    """
    install, *steps = steps_of(project / ".github/workflows/publish.yml")
    assert "pip install" in install
    assert ["stepengine agents check", "python -m build --no-isolation", "uv publish"] == steps[1:]
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "syrupy,stepengine.pytest_plugin"}
    shutil.rmtree(project / "dist", ignore_errors=True)
    for step in steps:
        ran(
            "sh", "-c", step, cwd=project, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", **to(index), **plugins,
        )  # fmt: skip


class Somebody:
    """
    Somebody with an environment that holds nothing but what the index gives by name; dependencies are lent by this one.
    """

    def __init__(self, folder: Path, index: str) -> None:
        self.here, self.index, self.environment = folder / "here", index, folder / "venv"
        self.here.mkdir()
        self.state = {"STEPENGINE_STATE_DIR": str(folder / "state")}
        venv.create(self.environment, with_pip=False)
        (own,) = self.environment.glob("lib/python3*/site-packages")
        lent = [path for path in map(Path, sys.path) if path.name == "site-packages"]
        (own / "lent.pth").write_text("\n".join(map(str, lent)) + "\n")
        self.own = own

    def install(self, *names: str) -> None:
        """
        Install by name, in place of an older version of this environment; what is lent stays as it is.
        """
        python = str(self.environment / "bin" / "python")
        is_there = any(self.own.glob(f"{names[0].replace('-', '_')}-*.dist-info"))
        arguments = ["install", "--quiet", "--no-deps", "--upgrade" if is_there else "--ignore-installed"]
        # By the letter of the option: no file of this repository holds the address of an index, and this one is made here.
        ran(
            sys.executable,
            "-m",
            "pip",
            "--isolated",
            "--python",
            python,
            *arguments,
            "-i",
            f"{self.index}/simple/",
            *names,
            cwd=self.here,
        )

    def types(self, *arguments: str, code: int = 0) -> str:
        return ran(self.environment / "bin" / "stepengine", *arguments, cwd=self.here, code=code, **self.state)


@pytest.fixture(scope="module")
def project(index: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A package as `stepengine init --package` makes it, published by its own workflow.
    """
    project = tmp_path_factory.mktemp("author") / NAME
    make_project(project, package=True)
    published(project, index)
    return project


@pytest.fixture(scope="module")
def engine(index: str, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """
    stepengine itself, published by its own workflow.
    """
    folder = tmp_path_factory.mktemp("engine")
    shutil.copytree(dist, folder / "dist", ignore=shutil.ignore_patterns("*.lock"))
    *_, build, upload = steps_of(ROOT / ".github/workflows/publish.yml")
    assert "python -m build --no-isolation" == build  # as the fixture `dist` does
    ran("sh", "-c", upload, cwd=folder, **to(index))


@pytest.mark.spec("packages:PK1", "packages:PK2", "packages:PK6", "packages:PK8", "packages:PK9", "packages:PK10")
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("engine")
def test_a_package_installs_by_name_and_runs_after_agreement(index: str, project: Path, tmp_path: Path) -> None:
    somebody = Somebody(tmp_path, index)
    somebody.install("stepengine", NAME)

    # What it wants is known, and nothing of it is imported.
    (code,) = somebody.own.glob("todo_plans/__init__.py")
    kept = code.read_text()
    code.write_text("raise SystemExit('imported')\n")
    listed = {one["id"]: one for one in json.loads(somebody.types("agents", "list", "--json"))}[f"{NAME}/todos"]
    said = [listed[name] for name in ("publisher", "package", "version", "categories", "reads", "agreed")]
    assert [NAME, NAME, "0.1.0", {"find_todos": "read"}, ["."], False] == said
    refused = somebody.types("run", f"{NAME}/todos", "empty", code=2)
    assert "tools, read: find_todos" in refused
    assert f"stepengine agents agree {NAME}" in refused
    assert "imported" not in refused
    code.write_text(kept)

    somebody.types("agents", "agree", NAME)
    assert "1 of 1 as recorded" in somebody.types("test", f"{NAME}/todos")
    assert "nothing to do" in somebody.types("run", f"{NAME}/todos@0.1", "empty", "--journal", "run.jsonl", *UNASKED)
    head = json.loads((somebody.here / "run.jsonl").read_text().partition("\n")[0])
    assert (f"{NAME}/todos", {f"{NAME}/todos": f"{NAME}==0.1.0"}) == (head["agent"], head["packages"])

    # A version that wants more is asked about again, for what is new.
    change(project / "pyproject.toml", "0.1.0", "0.2.0")
    change(project / "src/todo_plans/stepengine-agents.json", '"hosts": []', '"hosts": ["api.example.com"]')
    published(project, index)
    somebody.install(NAME)
    again = somebody.types("test", f"{NAME}/todos", code=2)
    assert ("host: api.example.com" in again, "find_todos" in again) == (True, False)
    somebody.types("agents", "agree", NAME)
    other = f"was recorded with {NAME}/todos of {NAME}==0.1.0; {NAME}==0.2.0 is installed now"
    assert other in somebody.types("replay", "run.jsonl")
    assert f"but {NAME} 0.2.0 is; install {NAME}==0.1" in somebody.types("run", f"{NAME}/todos@0.1", "empty", code=2)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


ASKER = """
try:
    open("imported", "w")
except OSError:
    pass

from stepengine import AgentDefinition, Ask, StepContext, Steps, ToolCall


def handle_steps(ctx: StepContext) -> Steps[str]:
    yield ToolCall("write_todos", {"todos": [{"task": ctx.prompt, "completed": False}]})
    colour = yield from Ask("Which colour?", ["red", "blue"])
    return f"{ctx.prompt} in {colour}"


agent = AgentDefinition("asker", tools=["write_todos"], handle_steps=handle_steps)
"""


PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-agents"
version = "1.0"

[project.entry-points."stepengine.agents"]
acme = "acme_agents"
"""


@pytest.mark.spec("packages:PK1", "packages:PK6", "packages:PK8")
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("engine")
def test_a_third_party_package_runs_sandboxed_without_being_imported(index: str, tmp_path: Path) -> None:
    if find_spec("pydantic_monty") is None:
        pytest.skip("needs the extra 'programs'")
    author = tmp_path / "author"
    inside = author / "acme_agents"
    inside.mkdir(parents=True)
    (author / "pyproject.toml").write_text(PYPROJECT)
    (inside / "__init__.py").write_text("open('imported', 'w').close()\n")
    (inside / "asker.py").write_text(ASKER)
    wants = {"format": "stepengine.agents/1", "agents": {"asker": {"tools": {"write_todos": "control"}}}, "hosts": []}
    (inside / "stepengine-agents.json").write_text(json.dumps(wants))
    ran(sys.executable, "-m", "build", "--no-isolation", cwd=author)
    ran("uv", "publish", cwd=author, **to(index))

    somebody = Somebody(tmp_path, index)
    somebody.install("stepengine", "acme-agents")
    (somebody.here / "set.toml").write_text('sandboxed = ["acme-agents"]\n')
    somebody.types("agents", "agree", "acme-agents")
    settings = ("--config", "set.toml")
    somebody.types("run", "acme/asker", "a door", "--journal", "run.jsonl", *settings, code=3)
    ended = somebody.types("resume", "run.jsonl", "--answer", "q0=red", *settings)
    repeated = somebody.types("replay", "run.jsonl", *settings)

    assert "a door in red" in ended
    assert "a door in red" in repeated
    assert not (somebody.here / "imported").exists()
