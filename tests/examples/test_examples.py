"""
Every example runs as a script, without keys and without network, and says something.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONS = {"live.py": ["--offline"]}
# Put before everything else that an interpreter imports: no socket of the internet can be connected.
NO_NETWORK = """
import socket

def refused(self, address, *_):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        raise RuntimeError(f"no network here: {address}")
    return connect(self, address)

connect = socket.socket.connect
socket.socket.connect = socket.socket.connect_ex = refused
"""


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """
    The environment of a process that has no network, no keys and an empty folder.
    """
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PYTHONWARNINGS": "error"}


def test_there_are_the_examples_that_readme_names() -> None:
    named = {"smallest.py", "custom_tool.py", "drive_steps.py", "parallel_children.py", "live.py"}

    assert named <= {e.name for e in EXAMPLES}


@pytest.mark.spec("requirements:Q11")
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("simple_task.py", ["file_tools(folder, write=True)"]),
        ("multi_agent.py", ["spawnable_agents=[historian, geographer, writer]"]),
        ("custom_tools.py", ["Field(", "Depends(", "Examples:"]),
        ("map_reduce.py", ["map_agents("]),
        ("best_of_n.py", ["best_of(", "judge="]),
        ("pruning_hook.py", ["Change(view="]),
    ],
)
def test_there_are_the_examples_that_were_asked_for(name: str, shown: list[str]) -> None:
    """
    Each fits on a screen or two, and says how it is run with a real model.
    """
    code = (ROOT / "examples" / name).read_text()

    assert [] == [words for words in shown if words not in code]
    assert len(code.splitlines()) < 80
    assert "To go live" in " ".join(code.split())


def test_everything_is_put_in_by_the_caller_in_the_complete_setup() -> None:
    code = (ROOT / "examples" / "complete_setup.py").read_text()
    parts = ["sessions=FileSessions(", "permissions=", "ask_user_tool(Colleague())", "spawn_tools()", "usage_logger("]

    assert [] == [words for words in parts if words not in code]
    assert "To go live" in " ".join(code.split())


@pytest.mark.spec("requirements:K5", "requirements:K10")
def test_the_bot_takes_the_next_message_for_the_answer(offline: dict[str, str], tmp_path: Path) -> None:
    script = ROOT / "examples" / "bot_webhook.py"
    done = subprocess.run(
        [sys.executable, script], env=offline, cwd=tmp_path, capture_output=True, text=True, check=True
    )

    said = [line.removeprefix("bot: ") for line in done.stdout.splitlines() if line.startswith("bot: ")]
    assert ["At six or at eight?", "Booked for eight.", "You are welcome."] == said


@pytest.mark.anyio
async def test_the_store_in_redis_keeps_what_the_engine_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The client is one that answers as Redis does: bytes, and keys whose time is over are gone.
    """
    import fakeredis

    monkeypatch.syspath_prepend(ROOT / "examples")
    import redis_sessions

    async with fakeredis.FakeAsyncRedis() as client:
        said = [await redis_sessions.message(client, words) for words in ("A table, please.", "four")]
        store = redis_sessions.RedisSessions(client)
        history, unknown = await store.get_history("ann:7"), await store.get_history("ben:1")
        await store.set_cached("weather", {"sky": "grey"}, ttl=600)
        await store.set_cached("for ever", [1])
        cached, lives = await store.get_cached("weather"), await client.ttl("stepengine:cache:weather")
        await client.delete("stepengine:cache:weather")

        assert ["For how many?", "A table for four."] == said
        assert ("A table, please.", "I will see to it.", []) == (history[0].text, history[-1].text, list(unknown))
        assert ({"sky": "grey"}, [1], None) == (
            cached, await store.get_cached("for ever"), await store.get_cached("weather"),
        )  # fmt: skip
        assert 0 < lives <= 600


@pytest.mark.spec("requirements:P13")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_an_example_runs_offline(example: Path, offline: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, example, *OPTIONS.get(example.name, [])],
        env=offline, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip

    assert (0, "") == (done.returncode, done.stderr)
    assert len(done.stdout.splitlines()) >= 2


@pytest.mark.spec("requirements:P13")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_an_example_says_how_it_is_run(example: Path) -> None:
    assert f"python examples/{example.name}" in example.read_text()
