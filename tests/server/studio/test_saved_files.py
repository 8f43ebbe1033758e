"""
What is started or forked after a save runs the file as it is by then, and what is under way goes on as it began: with a real server.
"""

from __future__ import annotations

import os
import py_compile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.waits import until

from .shop import CODE, HELPER, Shop, done, rests, save, start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the server of these tests is ended by a signal")

CLOSING = CODE.replace("from helper", "import asyncio\nimport os\nfrom helper").replace(
    "models = ScriptedModel(",
    """
MARK = "first"


class Closing(ScriptedModel):
    async def close(self):
        with open("closed.txt", "a") as told:
            told.write(f"{MARK}\\n")
        await super().close()


@tool(annotations=ToolAnnotations(read_only=True))
async def stays() -> str:
    'Stay until there is a file.'
    while not os.path.exists("go"):
        await asyncio.sleep(0.02)
    return MARK


def waiting_steps(ctx):
    said = yield from call(stays)
    return [said, MARK]


agents.append(AgentDefinition("waiter", tools=[stays], handle_steps=waiting_steps))
models = Closing(""",
)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with Shop(tmp_path, CLOSING).open() as opened:
        yield opened


@pytest.fixture
def client(shop: Shop) -> Iterator[httpx2.Client]:
    with shop.client() as opened:
        yield opened


def came_of(client: httpx2.Client, run: str) -> Any:
    view = client.get(f"/runs/{run}").raise_for_status().json()
    assert "completed" == view["status"], view
    return view["output"]


def again(file: Path, code: str) -> None:
    """
    Save a file so that neither its size nor the second in which it was written tells of it.
    """
    was = file.stat()
    save(file, code)
    assert was.st_size == file.stat().st_size
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.deep
@pytest.mark.spec("studio:ST6")
def test_equal_size_saves_and_imported_modules_are_reloaded(shop: Shop, client: httpx2.Client) -> None:
    found = [came_of(client, done(client, "tally", "tea"))]
    for amount in (1, 2):
        again(shop.helper, HELPER.replace("+ 0", f"+ {amount}"))
        found.append(came_of(client, done(client, "tally", "tea")))
    again(shop.file, CLOSING.replace("10 * len", "20 * len"))
    found.append(came_of(client, done(client, "tally", "tea")))

    assert [30, 31, 32, 62] == found


@pytest.mark.deep
@pytest.mark.spec("studio:ST6")
def test_stale_bytecode_is_ignored(tmp_path: Path) -> None:
    """
    Of a module that is imported by its name, so that Python's own rules for bytecode hold at the start.
    """
    file = tmp_path / "library" / "prices_of_shop.py"
    file.parent.mkdir()
    file.write_text("FACTOR = 1\n")
    py_compile.compile(str(file))
    code = CODE.replace(
        "from helper", 'import sys\nsys.path.append("library")\nfrom prices_of_shop import FACTOR\nfrom helper'
    )
    with Shop(tmp_path, code.replace("return total", "return total * FACTOR")).open() as shop, shop.client() as client:
        first = came_of(client, done(client, "tally", "tea"))
        again(file, "FACTOR = 2\n")
        second = came_of(client, done(client, "tally", "tea"))

    assert (30, 60) == (first, second)


@pytest.mark.deep
@pytest.mark.spec("studio:ST5")
def test_active_run_keeps_its_code_and_its_engine_closes_afterwards(shop: Shop, client: httpx2.Client) -> None:
    old = start(client, "waiter", "")
    save(shop.file, CLOSING.replace('"first"', '"later"'))
    new = start(client, "waiter", "")
    closed = shop.folder / "closed.txt"
    was_closed = closed.exists()
    (shop.folder / "go").touch()
    for run in (old, new):
        rests(client, run)
    until(closed.exists)

    assert (["first"] * 2, ["later"] * 2) == (came_of(client, old), came_of(client, new))
    assert (False, "first\n") == (was_closed, closed.read_text())


@pytest.mark.deep
@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize(
    ("code", "said", "line"),
    [
        (CLOSING.replace("for item in", "for item of"), "SyntaxError", "for item"),
        (CLOSING.replace("agents = [tally", "1 / 0; agents = [tally"), "ZeroDivisionError", "agents = ["),
        (CLOSING.replace("agents = [tally", "import os; os._exit(0); agents = [tally"), "ended the process", ""),
    ],
    ids=["syntax", "raises", "exits"],
)
def test_broken_file_starts_nothing_and_active_runs_continue(
    shop: Shop, client: httpx2.Client, code: str, said: str, line: str
) -> None:
    run = done(client, "tally", "tea milk")
    asking = done(client, "asker", "how many")
    save(shop.file, code)
    refused = [
        client.post("/runs", json={"agent": "tally", "prompt": "tea"}),
        client.post(f"/runs/{run}/fork", json={"at": "#0"}),
    ]
    listed = client.get("/agents").raise_for_status().json()
    (question,) = client.get(f"/runs/{asking}").json()["questions"]
    client.post(f"/runs/{asking}/answers", json={"answers": {question["id"]: "one"}}).raise_for_status()
    until(lambda: client.get(f"/runs/{asking}").json()["status"] == "completed")
    save(shop.file, CLOSING)
    mended = came_of(client, done(client, "tally", "tea"))

    for answer in refused:
        problem = answer.json()
        assert (409, "urn:stepengine:problem:broken_code") == (answer.status_code, problem["type"])
        assert said in problem["detail"]
        if line:
            number = next(n for n, text in enumerate(code.splitlines(), 1) if line in text)
            assert (str(shop.file), number) == (problem["file"], problem["line"])
            assert f"{shop.file}:{number}" in problem["detail"]
    assert said in listed["broken"]
    assert ["tally", "asker", "waiter"] == [one["id"] for one in listed["agents"]]
    assert 30 == mended
    assert client.get("/agents").json()["broken"] is None


@pytest.mark.deep
@pytest.mark.spec("studio:ST6")
def test_agents_are_shown_from_the_current_file(shop: Shop, client: httpx2.Client) -> None:
    save(shop.file, CLOSING.replace("Add up.", "Sum up."))

    assert "Sum up." == client.get("/agents/tally").raise_for_status().json()["prompts"]["system"]


@pytest.mark.deep
@pytest.mark.spec("studio:ST5")
def test_fork_after_a_save_runs_the_saved_code(shop: Shop, client: httpx2.Client) -> None:
    run = done(client, "tally", "tea milk sugar")
    save(shop.file, CLOSING.replace("total = worth", "total += worth"))
    forked = client.post(f"/runs/{run}/fork", json={"at": "#2"}).raise_for_status().json()
    fork = rests(client, forked["run_id"])

    assert (50, 120) == (came_of(client, run), came_of(client, fork))
