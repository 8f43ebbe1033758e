"""
Editors made of the protocol's TypeScript SDK, its connection classes of version 1 and the apps of version 2, drive an agent.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .npm import needs, root_of

COUNTERPARTS = (
    (
        "npm:@agentclientprotocol/sdk",
        "1.9.0",
        "works",
        "ClientSideConnection: sessions, modes, models, permissions, forms, images, MCP servers, cancelling, deleting",
    ),
    (
        "npm:@agentclientprotocol/sdk",
        "2.4.0",
        "works",
        "client(): as in 1.9.0, and $/cancel_request",
    ),
)

ROOT = root_of("acp2")
pytestmark = [pytest.mark.deep, needs(ROOT)]
HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
PIXEL = base64.b64encode(b"\x89PNG pixel").decode()
CALC = {
    "name": "calc",
    "command": sys.executable,
    "args": [str(REPOSITORY / "tests" / "adapters" / "mcp" / "server.py")],
    "env": [{"name": "PYTHONPATH", "value": str(REPOSITORY)}],
}
START = {"method": "initialize", "params": {"protocolVersion": 1, "clientCapabilities": {}}}
both = pytest.mark.parametrize("package", ["acp1", "acp2"])


def said(text: str, *blocks: Any, of: str = "$session", **more: Any) -> dict[str, Any]:
    prompt = [{"type": "text", "text": text}, *blocks]
    return {"method": "session/prompt", "params": {"sessionId": of, "prompt": prompt}, **more}


def loaded(session: str, project: Path, *servers: Any) -> dict[str, Any]:
    params = {"sessionId": session, "cwd": str(project), "mcpServers": list(servers)}
    return {"method": "session/load", "params": params}


def begun(project: Path, *servers: Any) -> dict[str, Any]:
    return {"method": "session/new", "params": {"cwd": str(project), "mcpServers": list(servers)}}


async def edited(package: str, tmp_path: Path, *steps: Any, kind: str = "full1", **given: Any) -> Any:
    """
    Return what an editor saw that took *steps* with the agent.
    """
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)}
    told = {
        "root": str(ROOT),
        "package": package,
        "command": [sys.executable, str(HERE / "server.py"), kind, str(tmp_path / "sessions")],
        "env": {**env, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
        "steps": [START, *steps],
        **given,
    }
    command = ["node", str(HERE / "sdk_client.mjs")]
    done = await asyncio.to_thread(
        subprocess.run, command, input=json.dumps(told), text=True, capture_output=True, timeout=120, check=False
    )
    assert not done.returncode, done.stderr
    seen = json.loads(done.stdout)
    assert [] == seen["problems"]
    return seen


def words(seen: Any, kind: str = "agent_message_chunk") -> str:
    return "".join(one["content"].get("text", "") for one in seen["updates"] if one["sessionUpdate"] == kind)


def of_kind(seen: Any, kind: str) -> list[Any]:
    return [one for one in seen["updates"] if one["sessionUpdate"] == kind]


@both
@pytest.mark.spec("interfaces:IF45", "interfaces:IF46")
async def test_session_mcp_servers_are_used_and_broken_ones_left_out(
    package: str, tmp_path: Path, project: Path
) -> None:
    broken = {**CALC, "name": "Not there", "command": str(tmp_path / "missing")}
    seen = await edited(package, tmp_path, begun(project, CALC, broken), said("call calc__add 19 23"))
    told, _, turn = seen["results"]

    assert told["agentCapabilities"]["mcpCapabilities"]["http"] is True
    assert "end_turn" == turn["stopReason"]
    assert "Done, after 1 prompts: 42" in words(seen)
    assert "The MCP server 'Not-there' is left out" in words(seen)
    ((asked,),) = [seen["asked"]]
    assert "a: 19\n\nb: 23" == asked["toolCall"]["content"][0]["content"]["text"]

    session = seen["results"][1]["sessionId"]
    again = await edited(package, tmp_path, loaded(session, project, CALC), said("call calc__add 1 2", of=session))

    assert "missing here" not in words(again)
    assert "Done, after 2 prompts: 3" in words(again)


@both
@pytest.mark.spec("interfaces:IF50")
async def test_modes_and_models_apply_from_the_next_turn(package: str, tmp_path: Path, project: Path) -> None:
    def choose(option: str, value: str) -> dict[str, Any]:
        params = {"sessionId": "$session", "configId": option, "value": value}
        return {"method": "session/set_config_option", "params": params}

    def mode(name: str) -> dict[str, Any]:
        return {"method": "session/set_mode", "params": {"sessionId": "$session", "modeId": name}}

    seen = await edited(
        package,
        tmp_path,
        begun(project),
        mode("accept_edits"),
        said("edit shop.py rate tax"),
        mode("plan"),
        said("edit shop.py tax vat"),
        choose("mode", "default"),
        choose("model", "anthropic/claude-sonnet-4-5"),
        said("which model"),
        mode("bypass"),
        choose("model", "m/unknown"),
        choose("colour", "red"),
        said("edit shop.py tax vat"),
        choose("model", "default"),
        said("which model"),
    )
    _, made, _, accepted, _, planned, chosen, _, _, *refused, allowed, _, last = seen["results"]

    assert "default" == made["modes"]["currentModeId"]
    assert ["default", "accept_edits", "plan"] == [one["id"] for one in made["modes"]["availableModes"]]
    assert [("mode", "default"), ("model", "default")] == [(o["id"], o["currentValue"]) for o in made["configOptions"]]
    assert ["mode", "model"] == [one["category"] for one in made["configOptions"]]
    assert {"end_turn"} == {turn["stopReason"] for turn in (accepted, planned, allowed, last)}
    assert "default" == chosen["configOptions"][0]["currentValue"]
    assert [-32602] * 3 == [one["error"]["code"] for one in refused]
    assert 1 == len(seen["asked"]), "one edit was accepted by its mode, one refused, and one asked about"
    assert "vat = 1" in (project / "shop.py").read_text()
    assert "plan mode" in words(seen)
    assert words(seen).endswith("I am m/m.")
    assert "I am anthropic/claude-sonnet-4-5." in words(seen)
    assert ["default"] == [one["currentModeId"] for one in of_kind(seen, "current_mode_update")]
    assert 2 == len(of_kind(seen, "config_option_update"))

    again = await edited(package, tmp_path, loaded(made["sessionId"], project))
    assert "missing here" not in words(again)
    assert words(seen) == words(again)
    assert "edit shop.py rate tax" == of_kind(again, "user_message_chunk")[0]["content"]["text"]


@both
@pytest.mark.spec("interfaces:IF51", "interfaces:IF30")
async def test_permission_request_is_readable_and_impossible_calls_are_not_asked(
    package: str, tmp_path: Path, project: Path
) -> None:
    seen = await edited(
        package, tmp_path, begun(project), said("run git commit -m done"), said("delete shop.py"),
        said("edit shop.py nothing tax"), said("run echo a | wc"), said("by hand"),
        choose=["reject_once", "reject_once", "allow_once", "allow_once"],
    )  # fmt: skip
    texts = [call["toolCall"]["content"][0].get("content", {}).get("text", "diff") for call in seen["asked"]]

    assert "Run git\n\n```sh\ngit commit -m done\n```" == texts[0]
    assert texts[1].startswith("Delete 'shop.py'\n\n```diff\n--- ")
    assert ["diff", "diff"] == texts[2:], "the handler's own calls"
    assert ["execute", "delete", "edit", "edit"] == [call["toolCall"]["kind"] for call in seen["asked"]]
    assert ["Allow", "Always: exactly this call", "Deny"] == [one["name"] for one in seen["asked"][0]["options"]]
    assert "Always: str_replace for shop.py" == seen["asked"][2]["options"][1]["name"]
    assert not any("{'" in text or '{"' in text for text in texts)


@both
@pytest.mark.spec("interfaces:IF31")
@pytest.mark.parametrize("answers", [True, False])
async def test_questions_use_a_form_where_the_editor_supports_forms(
    package: str, tmp_path: Path, project: Path, *, answers: bool
) -> None:
    start = {**START, "params": {"protocolVersion": 1, "clientCapabilities": {"elicitation": {"form": {}}}}}
    form = {"action": "accept", "content": {"answer": "S"}} if answers else {"action": "decline"}
    seen = await edited(package, tmp_path, start, begun(project), said("ask me"), form=form)
    forms = [one["requestedSchema"]["properties"]["answer"] for one in seen["forms"]]

    assert "end_turn" == seen["results"][-1]["stopReason"]
    assert ["Which size?", "Which name?"] == [one["message"] for one in seen["forms"]]
    assert [["S", "L"], None] == [[o["const"] for o in one["oneOf"]] if "oneOf" in one else None for one in forms]
    assert words(seen).endswith("S in S" if answers else " in ")
    assert [] == seen["asked"]


@both
@pytest.mark.spec("interfaces:IF47", "interfaces:IF49")
async def test_prompt_images_reach_the_model_and_are_replayed(package: str, tmp_path: Path, project: Path) -> None:
    image = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
    blob = {"uri": "file:///x/y.png", "blob": PIXEL, "mimeType": "image/png"}
    seen = await edited(
        package, tmp_path, begun(project), said("see", image, {"type": "resource", "resource": blob}), said("see")
    )
    assert seen["results"][0]["agentCapabilities"]["promptCapabilities"]["image"] is True
    assert "I see 2 images of 20 bytes.I see 2 images of 20 bytes." == words(seen)

    again = await edited(package, tmp_path, loaded(seen["results"][2 - 1]["sessionId"], project))
    shown = [one["content"] for one in of_kind(again, "user_message_chunk")]
    assert ["text", "image", "image", "text"] == [one["type"] for one in shown]
    assert {PIXEL} == {one["data"] for one in shown[1:3]}
    assert words(seen) == words(again)


@both
@pytest.mark.spec("interfaces:IF47")
async def test_prompt_after_a_cancel_waits_for_the_cancelled_turn(package: str, tmp_path: Path, project: Path) -> None:
    """
    Also where the cancel comes right behind the prompt that it means.
    """
    cancel = {"notify": "session/cancel", "params": {"sessionId": "$session"}}
    asked = {"until": "asked", "count": 1}
    seen = await edited(
        package,
        tmp_path,
        begun(project),
        said("edit shop.py rate tax", background=True),
        asked,
        cancel,
        said("hello", background=True),
        {"release": True},
        {"wait": True},
        said("write a.txt b", background=True),
        cancel,
        said("hello again"),
        {"wait": True},
        choose=["wait", "wait"],
    )
    _, _, first, second, fourth, third = seen["results"]

    assert ["cancelled", "end_turn", "cancelled", "end_turn"] == [
        turn["stopReason"] for turn in (first, second, third, fourth)
    ]
    assert "You said: helloYou said: hello again" == words(seen)
    assert "rate = 1\nname = 2\n" == (project / "shop.py").read_text()
    assert not (project / "a.txt").exists()


@pytest.mark.spec("interfaces:IF47")
async def test_abandoned_prompt_request_is_cancelled(tmp_path: Path, project: Path) -> None:
    seen = await edited(
        "acp2",
        tmp_path,
        begun(project),
        said("write a.txt b", given_up=True),
        {"wait": True},
        said("hello"),
        choose=["wait"],
    )

    assert ["cancelled", "end_turn"] == [turn["stopReason"] for turn in seen["results"][-2:]]
    assert "You said: hello" == words(seen)


@both
@pytest.mark.spec("interfaces:IF50")
async def test_sessions_are_listed_with_titles_and_can_be_deleted(package: str, tmp_path: Path, project: Path) -> None:
    listing = {"method": "session/list", "params": {"cwd": str(project)}}
    deleting = {"method": "session/delete", "params": {"sessionId": "$session"}}
    load = loaded("$session", project)
    seen = await edited(
        package, tmp_path, begun(project), said("hello"), listing, deleting, deleting, listing, load, said("hello")
    )
    told, made, _, before, gone, again, after, unknown, closed = seen["results"]

    assert {} == told["agentCapabilities"]["sessionCapabilities"]["delete"]
    assert [(made["sessionId"], "hello")] == [(one["sessionId"], one["title"]) for one in before["sessions"]]
    assert [{}, {}, []] == [gone, again, after["sessions"]]
    assert [-32602, -32602] == [unknown["error"]["code"], closed["error"]["code"]]
    assert ["hello"] == [one["title"] for one in of_kind(seen, "session_info_update")]
    assert [] == list((tmp_path / "sessions").iterdir())


@both
@pytest.mark.spec("interfaces:IF45", "interfaces:IF47")
async def test_project_skills_are_commands_and_usage_follows_each_step(
    package: str, tmp_path: Path, project: Path
) -> None:
    skill = project / ".agents" / "skills" / "tidy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: tidy\ndescription: Tidy up\n---\nSort the imports.\n")
    model = {"sessionId": "$session", "configId": "model", "value": "anthropic/claude-sonnet-4-5"}
    seen = await edited(
        package,
        tmp_path,
        begun(project),
        {"until": "update", "kind": "available_commands_update"},
        {"method": "session/set_config_option", "params": model},
        said("/tidy shop.py only"),
    )
    (commands,) = of_kind(seen, "available_commands_update")
    (usage,) = of_kind(seen, "usage_update")

    assert [("tidy", "Tidy up")] == [(one["name"], one["description"]) for one in commands["availableCommands"]]
    assert "By the skill: shop.py only" == words(seen)
    assert (1_000, 200_000, "USD") == (usage["used"], usage["size"], usage["cost"]["currency"])
    assert 0 < usage["cost"]["amount"] < 1


@both
@pytest.mark.spec("interfaces:IF52")
async def test_commands_run_in_editor_terminals_and_are_killed_and_released(
    package: str, tmp_path: Path, project: Path
) -> None:
    start = {**START, "params": {"protocolVersion": 1, "clientCapabilities": {"terminal": True}}}
    cancel = {"notify": "session/cancel", "params": {"sessionId": "$session"}}
    seen = await edited(
        package, tmp_path, start, begun(project), said("run /bin/sh -c env"), said("run-for 0.3 sleep 60"), said("run missing-program"),
        said("run sleep 61", background=True), {"until": "terminals", "count": 3}, cancel, {"wait": True}, otherwise="allow_once",
    )  # fmt: skip
    first, late, cut = seen["terminals"]
    ends = [one for one in seen["updates"] if one.get("status") in {"completed", "failed"}]

    assert (str(project), ["-c", "env"]) == (first["cwd"], first["args"])
    assert [["released"], ["killed", "released"], ["released"]] == [one["ends"] for one in (first, late, cut)]
    calls = [one.get("content") for one in of_kind(seen, "tool_call_update")]
    shown = [content[0]["terminalId"] for content in calls if content and content[0]["type"] == "terminal"]
    assert [one["id"] for one in seen["terminals"]] == shown
    assert "content" not in ends[0], "the terminal stays where it was shown"
    assert "longer than 0.3 s" in ends[1]["content"][0]["content"]["text"]
    assert "no program of that name" in ends[2]["content"][0]["content"]["text"]
    assert "cancelled" == seen["results"][-1]["stopReason"]


@both
@pytest.mark.spec("interfaces:IF51")
async def test_remembered_approval_holds_under_another_model(package: str, tmp_path: Path, project: Path) -> None:
    model = {"sessionId": "$session", "configId": "model", "value": "anthropic/claude-sonnet-4-5"}
    seen = await edited(
        package, tmp_path, begun(project), said("run touch a"), said("run touch a"),
        {"method": "session/set_config_option", "params": model}, said("run touch a"), said("run touch a"),
        choose=["Always: exactly this call"],
    )  # fmt: skip

    assert ["end_turn"] * 4 == [turn["stopReason"] for turn in seen["results"] if "stopReason" in turn]
    assert 1 == len(seen["asked"]), [one["options"] for one in seen["asked"]]
