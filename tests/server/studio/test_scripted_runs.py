"""
``--script``: what stands in a file answers in place of models, in each run from its beginning, on a machine without keys.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stepengine import AgentDefinition, Engine
from stepengine.server import Tokens
from tests.waits import until

from .shop import Shop, agreed, done, judged, save
from .stage import Stage

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the server of these tests is ended by a signal")

CODE = '''
import asyncio
import os

from stepengine import AgentDefinition, ToolAnnotations, tool


@tool(category="read", annotations=ToolAnnotations(read_only=True))
async def look(where: str) -> str:
    """Look somewhere; to the right only when somebody lets it."""
    with open(f"looked-{where}.txt", "a") as told:
        told.write(f"{os.getpid()}\\n")
    while where == "right" and not os.path.exists("go"):
        await asyncio.sleep(0.02)
    return f"nothing on the {where}"


agent = AgentDefinition("looker", model="anthropic/claude-haiku-4-5", tools=[look], system_prompt="Look.")
'''
LEFT, RIGHT = ({"tool": "look", "input": {"where": where}} for where in ("left", "right"))
REPLIES = [LEFT, RIGHT, "nothing there"]


def shop_of(folder: Path, replies: Any = REPLIES, *, script: bool = True) -> Shop:
    """
    Return a studio whose runs are answered by a script, in an environment without a key.
    """
    (folder / "replies.json").write_text(json.dumps(replies))
    shop = Shop(folder, CODE, ["--script", "replies.json"] if script else [])
    shop.variables = {"ANTHROPIC_API_KEY": "", "ANTHROPIC_AUTH_TOKEN": "", "STEPENGINE_MODEL": ""}
    return shop


def view(client: httpx2.Client, run: str) -> dict[str, Any]:
    return dict(client.get(f"/runs/{run}").raise_for_status().json())


def replies_of(client: httpx2.Client, run: str) -> list[tuple[str, str]]:
    """
    Return what models said in a run by its journal, and which model that was.
    """
    lines = [json.loads(line) for line in client.get(f"/runs/{run}/journal").raise_for_status().text.splitlines()]
    replies = [line["value"] for line in lines if line.get("value", {}).get("type") == "model_reply"]
    return [
        (one["content"][0].get("text") or one["content"][0]["input"]["where"], one.get("model", "")) for one in replies
    ]


def tells_a_line(file: Path) -> bool:
    return file.exists() and file.read_text().endswith("\n")


SAID = [(what, "scripted/replies.json") for what in ("left", "right", "nothing there")]


@pytest.mark.deep
@pytest.mark.spec("studio:ST12")
def test_killed_scripted_run_continues_at_its_next_reply(tmp_path: Path) -> None:
    shop = shop_of(tmp_path)
    with shop.open(), shop.client() as client:
        run = client.post("/runs", json={"agent": "looker"}).raise_for_status().json()["run_id"]
        until(lambda: tells_a_line(tmp_path / "looked-right.txt"))
        assert shop.process is not None
        shop.process.kill()
        shop.process.wait()
    (tmp_path / "go").touch()
    shop.url = shop.link = shop.token = ""
    with shop.open(), shop.client() as client:
        until(lambda: view(client, run)["status"] == "completed")
        ended, said = view(client, run), replies_of(client, run)

    assert "nothing there" == ended["text"]
    assert SAID == said
    assert [1, 2] == [len((tmp_path / f"looked-{where}.txt").read_text().splitlines()) for where in ("left", "right")]


@pytest.mark.deep
@pytest.mark.spec("studio:ST12")
def test_exhausted_script_fails_the_run_and_can_be_extended(
    tmp_path: Path,
) -> None:
    (tmp_path / "go").touch()
    with shop_of(tmp_path, [LEFT]).open() as shop, shop.client() as client:
        short = view(client, done(client, "looker", "go"))
        save(tmp_path / "replies.json", json.dumps([LEFT, "now"]))
        longer = view(client, done(client, "looker", "go"))
        save(tmp_path / "replies.json", "[{]")
        broken = client.post("/runs", json={"agent": "looker"})
        told = client.get("/agents").json()["broken"]

    assert "failed" == short["status"]
    assert "the script replies.json has 1 reply, and this is request 2" in short["error"]
    assert "nothing on the left" in short["error"]
    assert ("completed", "now") == (longer["status"], longer["text"]), longer["error"]
    assert 409 == broken.status_code
    assert all(
        "uses the last version that loaded: --script 'replies.json'" in text for text in (broken.json()["detail"], told)
    )


def test_missing_keys_are_reported_to_admins_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    stage = Stage(tmp_path, engine=Engine([AgentDefinition("needy", model="anthropic/claude-haiku-4-5")]))
    guest = Tokens.open(tmp_path / "tokens.json").add("guest", ["run", "read", "debug"])
    with stage.open(), stage.client() as client:
        own = [client.get("/agents").text, client.post("/runs", json={"agent": "needy"}).text]
        client.headers["authorization"] = f"Bearer {guest}"
        others = [client.get("/agents").text, client.post("/runs", json={"agent": "needy"}).text]

    assert [True, True] == ["ANTHROPIC_API_KEY" in text for text in own]
    assert [False, False] == ["ANTHROPIC_API_KEY" in text for text in others]
    assert "the server has no key" in others[1]


@pytest.mark.deep
@pytest.mark.spec("studio:ST12")
def test_impact_of_a_changed_prompt_uses_the_script_after_divergence(
    tmp_path: Path,
) -> None:
    (tmp_path / "go").touch()
    with shop_of(tmp_path).open() as shop, shop.client() as client:
        run = done(client, "looker", "go")
        save(shop.file, CODE.replace("Look.", "Look well."))
        job = judged(client, kind="impact", runs=[run], samples=2)
        over = agreed(client, job)

    assert "done" == over["status"], over
    lines = "\n".join(over["result"]["lines"])
    assert all(
        said in lines for said in ("1 repeated from step 1", "0 of 1 chose another tool", "failed: 0%", "spent $0.0000")
    ), lines
