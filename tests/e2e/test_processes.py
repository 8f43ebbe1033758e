"""
The command line in processes of its own: no network, no keys, signals, pipes, a server of this machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.cli.command import command

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.spec("ecosystem:EC141", "generator-contract:B24", "requirements:Q10")
def test_code_searcher_finds_handlers_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params = '{"search_queries": [{"pattern": "def handle_steps", "cwd": "agents"}]}'

    found = json.loads(command("run", "code_searcher", "--cwd", ROOT, "--params", params, "--json").stdout)

    assert ("completed", 0, 0) == (found["status"], found["steps"], found["usage"]["requests"])
    for name in ("code_searcher.py", "editor.py"):
        assert name in found["output"]["results"][0]["stdout"]


@pytest.mark.deep
@pytest.mark.smoke
def test_a_closed_output_pipe_prints_no_traceback(stepengine: Any) -> None:
    with stepengine.start("agents") as process:
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=50)

    assert "Traceback" not in err


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC140")
def test_a_bug_shows_its_traceback_without_local_variables(stepengine: Any) -> None:
    """
    Local variables may hold keys.
    """
    code = """
from stepengine.cli import main
from stepengine.cli.commands import run
def broken(options, sign):
    secret = "sk-" + "value"
    raise RuntimeError("a bug")
run._run_and_record_agent = broken
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "editor"],
        env={**stepengine.environment, "FORCE_COLOR": "1"}, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip

    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)  # since Python 3.13 a traceback may have colours

    assert 1 == done.returncode
    assert "RuntimeError: a bug" in said
    assert "sk-value" not in said


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC141")
def test_editor_runs_live_against_a_chat_completions_server(stepengine: Any, chat_server: Callable[..., Any]) -> None:
    (stepengine.folder / "shop.py").write_text("price = 1\n")
    edit = {"path": "shop.py", "replacements": [{"old_string": "price = 1", "new_string": "price = 2"}]}
    server = chat_server({"tool_calls": [("str_replace", json.dumps(edit))]}, {"content": "The price is 2 now."})
    live = attrs.evolve(stepengine, network=True)

    done = live(
        "run", "editor", "Make it 2.", "--params", '{"files": ["shop.py"]}', "--write",
        "--model", "llama3.2", "--base-url", server.url, "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)

    assert 0 == done.returncode, done.stderr
    assert "price = 2\n" == (stepengine.folder / "shop.py").read_text()
    assert ["shop.py"] == found["output"]["changed_files"]
    assert "The price is 2 now." == found["output"]["summary"]
    assert (2, 36) == (found["usage"]["requests"], found["usage"]["total_tokens"])
    assert ["/v1/chat/completions"] * 2 == [r["path"] for r in server.requests]
    assert ["llama3.2"] * 2 == [r["model"] for r in server.requests]


@pytest.mark.deep
@pytest.mark.spec("requirements:P13")
def test_the_live_example_runs_against_the_same_kind_of_server(
    stepengine: Any, chat_server: Callable[..., Any]
) -> None:
    call = ("word_count", '{"of": "to be or not to be"}')
    server = chat_server({"tool_calls": [call]}, {"content": "It has 6 words."})

    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "live.py", "--model", "llama3.2", "--base-url", server.url],
        env=attrs.evolve(stepengine, network=True).environment,
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip

    assert (0, "") == (done.returncode, done.stderr)
    assert "It has 6 words. [36 tokens, cost unknown]" == done.stdout.splitlines()[-1]
    assert "6" == server.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("model", "sent"),
    [("ollama/llama3.2", "llama3.2"), ("some/model", "some/model")],
)
def test_a_custom_server_receives_its_own_model_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat_server: Callable[..., Any], model: str, sent: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("from stepengine import *\nagent = AgentDefinition('a')\n")
    server = chat_server({"content": "hi"})

    # In this process: what others here need one of their own for, signals and pipes, plays no part.
    words = ["run", "./a.py", "Say hi", "--model", model, "--base-url", server.url]
    done = command(*words, env={"OPENAI_API_KEY": "sk-secret"})

    assert "hi\n" == done.stdout
    assert sent == server.requests[0]["model"]
    assert "sk-secret" not in json.dumps(server.headers)


@pytest.mark.spec("ecosystem:EC216")
def test_importing_stepengine_loads_no_sdk_and_no_command_line_library(tmp_path: Path) -> None:
    code = "import sys, stepengine, stepengine.cli; print(*sorted({m.partition('.')[0] for m in sys.modules}))"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert set() == {"anthropic", "openai", "google", "httpx2", "typer", "rich", "yaml"} & set(done.stdout.split())
