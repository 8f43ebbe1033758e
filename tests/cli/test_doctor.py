"""
`stepengine config doctor`: what is missing is named with its repair, keys are never shown, and nothing is changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from typer.testing import CliRunner, Result

from stepengine.cli.app import app
from stepengine.models import Models
from stepengine.testing import check_installation
from tests.servers import Quiet, served

KEY = "sk-ant-api03-0123456789"


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A working folder and a home without keys, settings and runs.
    """
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    for provider in Models.standard().providers:
        for name in Models.standard().provider_for(f"{provider}/any").settings().key_variables:
            monkeypatch.delenv(name, raising=False)
    return work


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", "doctor", *arguments])


def found(*arguments: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(doctor("--json", *arguments).stdout)["findings"]
    return told


def wrong(*arguments: str) -> list[dict[str, Any]]:
    return [one for one in found(*arguments) if one["state"] == "wrong"]


@pytest.mark.deep
@pytest.mark.smoke
def test_doctor_without_findings_exits_with_0_and_writes_nothing(tmp_path: Path) -> None:
    result = doctor()

    assert result.exit_code == 0, result.output
    assert "no problems found" in result.stdout
    for said in (
        "Python 3.",
        "anthropic 2.",
        "extras installed: ",
        "stepengine init my-agent",
        "no key is set",
        "none yet",
    ):
        assert said in result.stdout
    assert not (tmp_path / "state").exists()


@pytest.mark.deep
@pytest.mark.smoke
def test_doctor_reports_set_keys_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)

    result = doctor()

    assert "anthropic: ANTHROPIC_API_KEY is set" in result.stdout
    assert KEY not in result.output
    assert result.exit_code == 0


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("ANTHROPIC_API_KEY", f'"{KEY}"', "has quotation marks around it"),
        ("ANTHROPIC_API_KEY", f"{KEY} {KEY}", "has white space in it"),
        ("ANTHROPIC_API_KEY", "  ", "is set but empty"),
        ("ANTHROPIC_API_KEY", "your-key-here", "is a placeholder"),
        ("OPENAI_API_KEY", KEY, "starts like a key of anthropic"),
        ("OPENAI_API_KEY", "x" * 5000, "has more than 4,096 characters"),
    ],
)
def test_doctor_names_the_variable_of_an_unusable_key(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    monkeypatch.setenv(variable, value)

    result = doctor()

    assert result.exit_code == 1
    assert f"{variable} {why}" in result.stdout
    assert f"set {variable} to the key alone" in result.stdout
    assert KEY not in result.output


@pytest.mark.deep
@pytest.mark.smoke
def test_doctor_names_the_place_of_each_problem(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (somewhere / "openai.py").write_text("")
    (somewhere / "agents").mkdir()
    (somewhere / "agents/mine.py").write_text("agent = 1\n")
    monkeypatch.setenv("STEPENGINE_LIMITS__MAX_STEPS", "many")
    monkeypatch.setenv("STEPENGINE_MODLE", "openai/gpt-5")

    assert doctor().exit_code == 1
    told = {one["area"]: one["text"] for one in wrong()}
    assert "STEPENGINE_LIMITS__MAX_STEPS: limits.max_steps is 'many'" in told["settings"]
    assert "openai.py has the name of a required package" in told["surroundings"]
    assert "mine.py" in told["agents"]
    notes = [one["text"] for one in found() if one["state"] == "note"]
    assert "STEPENGINE_MODLE is set, but nothing reads it" in notes


@pytest.mark.deep
@pytest.mark.smoke
def test_a_folder_of_runs_that_others_may_write_is_wrong(tmp_path: Path) -> None:
    runs = tmp_path / "state/runs"
    runs.mkdir(parents=True)
    runs.chmod(0o777)

    (one,) = wrong()

    assert one["area"] == "runs"
    assert "others may write" in one["text"]


@pytest.fixture
def asked() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """
    A server that answers 401, its address, and the headers that it was sent.
    """
    headers: list[dict[str, str]] = []

    class Answers(Quiet):
        def do_GET(self) -> None:
            headers.append(dict(self.headers))
            self.send_error(401)

    with served(Answers) as address:
        yield f"{address}/v1", headers


@pytest.mark.deep
@pytest.mark.smoke
def test_reach_asks_each_usable_provider_without_its_key(
    asked: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, headers = asked
    for provider in ("vllm", "llamacpp", "lmstudio"):  # nothing listens there
        monkeypatch.setenv(f"STEPENGINE_BASE_URLS__{provider.upper()}", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("STEPENGINE_BASE_URLS__OLLAMA", address)

    told = {one["text"].partition(":")[0]: one for one in found("--reach") if one["area"] == "network"}

    assert told["ollama"]["text"] == f"ollama: {address} answers (HTTP 401)"
    assert told["vllm"]["state"] == "note"
    assert "nothing answers at http://127.0.0.1:9/v1" in told["vllm"]["text"]
    assert headers
    assert not [name for sent in headers for name in sent if name.lower() in ("authorization", "x-api-key")]


@pytest.mark.deep
@pytest.mark.smoke
def test_doctor_sends_no_request_without_reach(
    asked: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPENGINE_BASE_URLS__OLLAMA", asked[0])

    found()

    assert not asked[1]


TOOLS = """
from stepengine import AgentDefinition, tool
from stepengine.tools.bundled import followup_tools, memory_tools

@tool
def pay(amount: int) -> str:
    "Pay."

@tool(about="{name}.csv")
def export(name: str) -> str:
    "Export."

@tool
def count(folder: str) -> str:
    "Count."

@tool(about=())
def add(a: int) -> int:
    "Add."

agents = [AgentDefinition(name, tools=[pay, export, count, add, *followup_tools(), *memory_tools()]) for name in ("one", "two")]
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X70")
def test_doctor_lists_once_own_tools_that_declare_no_files(somewhere: Path) -> None:
    (somewhere / "agents").mkdir()
    (somewhere / "agents/shop.py").write_text(TOOLS)

    told = [one for one in found() if "path rules" in one["text"]]

    file = somewhere / "agents/shop.py"
    assert [
        ("note", f"path rules do not follow links for the tools pay of {file}, which do not declare their files")
    ] == [(one["state"], one["text"]) for one in told]


@pytest.mark.deep
@pytest.mark.smoke
def test_a_python_program_gets_the_findings_of_the_command(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", f"'{KEY}'")
    (somewhere / "stepengine.toml").write_text("[display]\nlog = 'never'\n")
    made = list(check_installation())

    assert found() == [attrs.asdict(one) for one in made]
    assert {"keys", "settings"} <= {one.area for one in made if one.state == "wrong"}
    assert KEY not in str(made)
