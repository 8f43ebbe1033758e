"""What a server over a database does not offer: each request about it is refused before the database is reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from stepengine import AgentDefinition, Engine
from stepengine.durable import DurableEngine
from stepengine.errors import DefinitionError
from stepengine.server import Tokens, app

OUT = {"url": "https://example.com", "secrets": ["k" * 32], "public_url": "https://runs.example.com"}
TURN = {"threadId": "t", "runId": "r", "messages": [{"id": "m", "role": "user", "content": "Hi."}]}
CHAT = {"id": "c", "messages": [{"id": "m", "role": "user", "parts": [{"type": "text", "text": "Hi."}]}]}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


def served(folder: Path, **options: Any) -> TestClient:
    tokens = Tokens.open(folder / "tokens.json")
    headers = {"authorization": f"Bearer {tokens.add('root', ('read', 'run', 'answer', 'admin'))}"}
    engine = DurableEngine(on=Engine([AgentDefinition("chat")]), db="postgresql://nobody@127.0.0.1:9/none", works=False)
    return TestClient(app(engine, tokens=tokens, **options), base_url="http://localhost", headers=headers)


@pytest.mark.spec("studio:SV7")
@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        (("POST", "/ag-ui/chat", TURN), (501, "not_offered")),
        (("POST", "/ag-ui/chat/connect", TURN), (501, "not_offered")),
        (("POST", "/vercel/chat", CHAT), (501, "not_offered")),
        (("GET", "/vercel/chat/c/stream", None), (501, "not_offered")),
        (("POST", "/mcp", CALL), (501, "not_offered")),
        (("GET", "/foreign/x", None), (404, "no_such_journal")),
        (("POST", "/foreign/x/resume", {"seen": "x"}), (404, "no_such_journal")),
        (("GET", "/sessions", None), (409, "not_possible")),
        (("GET", "/sessions/t", None), (409, "not_possible")),
        (("DELETE", "/sessions/t", None), (409, "not_possible")),
        (("GET", "/runs?session=t", None), (409, "not_possible")),
    ],
)  # fmt: skip
def test_database_server_refuses_what_needs_a_folder(
    tmp_path: Path, asked: tuple[str, str, Any], refusal: tuple[int, str]
) -> None:
    method, path, body = asked
    answer = served(tmp_path).request(method, path, json=body)

    assert refusal == (answer.status_code, answer.json()["type"].rpartition(":")[2]), answer.text


@pytest.mark.spec("studio:SV7")
def test_database_server_lists_agents_and_no_foreign_journals(tmp_path: Path) -> None:
    """An agent without a model is not reported: a worker may have one."""
    client = served(tmp_path)
    (agent,) = client.get("/agents").json()["agents"]

    assert ("chat", None) == (agent["id"], agent["missing"])
    assert [] == client.get("/foreign").json()["journals"]
    assert (503, "stopping") == ((ready := client.get("/ready")).status_code, ready.json()["status"])


@pytest.mark.spec("studio:SV7")
def test_database_server_with_outgoing_webhooks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "webhooks.json"
    file.write_text(json.dumps({"out": OUT}))
    file.chmod(0o600)

    with pytest.raises(DefinitionError, match="the server sends no webhooks for runs in a database yet"):
        served(tmp_path, webhooks=file)


@pytest.mark.spec("studio:SV7")
def test_database_server_offers_only_the_named_agents(tmp_path: Path) -> None:
    tokens = Tokens.open(tmp_path / "tokens.json")
    headers = {"authorization": f"Bearer {tokens.add('root', ['admin'])}"}
    known = Engine([AgentDefinition(name) for name in ("chat", "other")])
    engine = DurableEngine(on=known, db="postgresql://nobody@127.0.0.1:9/none", works=False)
    client = TestClient(app(engine, tokens=tokens, agents=["chat"]), base_url="http://localhost", headers=headers)

    assert ["chat"] == [one["id"] for one in client.get("/agents").json()["agents"]]
