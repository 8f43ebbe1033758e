"""
The OpenAPI document says what the server does: each operation, each answer, and a client that somebody else's generator makes of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openapi_spec_validator
import pytest

from stepengine.server import Tokens, Webhooks, app, openapi, sign
from stepengine.server.access import SCOPES
from stepengine.server.debug_pages import OPERATIONS as LOOKING
from stepengine.server.routes import OPERATIONS as ALWAYS
from tests.waits import until

from .house import AGENTS, House, ended, question_of, started, written

SECRET = "sixteen characters and more"
GENERATOR = "openapi-python-client"
COUNTERPARTS = (
    ("pypi:openapi-python-client", "0.29.1", "works", "a generated client runs agents"),
    ("pypi:openapi-spec-validator", "0.9.0", "works", "the OpenAPI document of `stepengine serve` is valid"),
)
HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.leaks_allowed(
    "the server outlasts a test: its threads and what its runs hold are the module's"
)
OPERATIONS = (*ALWAYS, *LOOKING)
"""All that a server has which was told how its engine is made again."""
NAMES = [one.name for one in OPERATIONS]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    webhooks = Webhooks.read(
        json.dumps({"topics": {"go": {"secrets": [SECRET], "run": "/run"}}}).encode(), "webhooks.json"
    )
    with House(tmp_path_factory.mktemp("house"), webhooks=webhooks).open() as opened:
        yield opened


@pytest.fixture(scope="module")
def document(house: House) -> dict[str, Any]:
    with house.client(None) as client:
        return dict(client.get("/openapi.json").json())


def described(document: dict[str, Any], name: str) -> tuple[str, str, dict[str, Any]]:
    """
    Return method, path and description of an operation.
    """
    ways = [(method, path, said) for path, one in document["paths"].items() for method, said in one.items()]
    return next(way for way in ways if way[2]["operationId"] == name)


def check_answer(document: dict[str, Any], name: str, answer: httpx2.Response) -> None:
    """
    Fail unless an answer is one of those that the document names for an operation: status, type and schema.
    """
    said = described(document, name)[2]["responses"]
    assert str(answer.status_code) in said, answer.text
    contents = said[str(answer.status_code)].get("content", {})
    has_body = answer.headers.get("content-length") != "0"  # the package mcp says a type of nothing, too
    kind = answer.headers.get("content-type", "").partition(";")[0] if has_body else ""
    assert (set(contents) or {""}) == {kind}
    if kind in ("application/json", "application/problem+json"):
        schema = {**contents[kind]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())


# --- the document ---------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("studio:SV1")
def test_openapi_document_is_valid(document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)

    assert "3.1.0" == document["openapi"]


@pytest.mark.spec("studio:SV1")
def test_document_lists_exactly_the_routes_and_scopes(document: dict[str, Any]) -> None:
    there = {(one.path, one.method.lower(), one.name, one.scope) for one in OPERATIONS}
    said = {
        (path, method, one["operationId"], one.get("x-scope"))
        for path, ways in document["paths"].items()
        for method, one in ways.items()
    }

    assert there == said
    assert len(NAMES) == len(set(NAMES))


@pytest.fixture(scope="module")
def bearers(house: House) -> dict[str | None, dict[str, dict[str, str]]]:
    """
    By each scope: the headers of a token that has only it, of one that has all the others but `admin`, and of nobody.
    """
    tokens = Tokens.open(house.folder / "tokens.json")

    def bearer(name: str, scopes: list[str]) -> dict[str, str]:
        return {"authorization": f"Bearer {tokens.add(name, scopes)}"}

    return {
        scope: {
            "with": bearer(f"with.{scope}", [scope or "read"]),
            "without": bearer(f"without.{scope}", [one for one in SCOPES if one not in (scope, "admin")]),
            "nobody": {},
        }
        for scope in {one.scope for one in OPERATIONS}
    }


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_operation_requires_the_documented_scope(operation: Any, bearers: dict[str | None, Any], house: House) -> None:
    path = re.sub(r"\{\w+\}", "nothing", operation.path)
    with house.client(None) as client:
        told = {
            who: client.request(operation.method, path, headers=headers)
            for who, headers in bearers[operation.scope].items()
        }

    assert 403 != told["with"].status_code
    if operation.path.startswith("/hooks/"):
        # A signature, and nothing else.
        assert [401, 401, 401] == [told[who].status_code for who in ("with", "without", "nobody")]
    elif operation.scope is None:
        assert [200, 200] == [told["without"].status_code, told["nobody"].status_code]
    else:
        assert [403, 401] == [told["without"].status_code, told["nobody"].status_code]
        assert operation.scope == told["without"].json()["scope"]


@pytest.mark.spec("studio:SV33")
def test_document_is_generated_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError

    with house.client(None) as client:
        first = client.get("/openapi.json")
        monkeypatch.setattr(openapi, "make_document", make_nothing)
        again = client.get("/openapi.json")

    assert (200, first.content) == (again.status_code, again.content)


@pytest.mark.spec("studio:SV33")
@pytest.mark.parametrize("tags", ["{}", "W/{}", '"another", {}'])
def test_matching_etag_gets_304(house: House, tags: str) -> None:
    with house.client(None) as client:
        etag = client.get("/openapi.json").headers["etag"]
        known = client.get("/openapi.json", headers={"if-none-match": tags.format(etag)})
        other = client.get("/openapi.json", headers={"if-none-match": '"another"'})

    assert (304, b"", etag) == (known.status_code, known.content, known.headers["etag"])
    assert 200 == other.status_code


def test_document_names_its_mount_path() -> None:
    document = openapi.OpenApiDocument(OPERATIONS, version="1")
    root, mounted = [document.encode(base) for base in ("", '/a"b')]

    assert [{"url": "/"}] == json.loads(root.body)["servers"]
    assert [{"url": '/a"b'}] == json.loads(mounted.body)["servers"]
    assert root.etag != mounted.etag


# --- the answers ----------------------------------------------------------------------------------------------------


def asked(house: House) -> Iterator[tuple[str, httpx2.Response]]:
    """
    Ask for every operation what it is there for, and give its name with the answer.
    """
    with house.client("root") as client:

        def ask(name: str, *parts: str, **more: Any) -> tuple[str, httpx2.Response]:
            one = next(each for each in OPERATIONS if each.name == name)
            path = re.sub(r"\{\w+\}", "%s", one.path) % parts
            return name, client.request(one.method, path, **more)

        for name in ("health", "ready", "openapi", "list_agents", "list_schedules"):
            yield ask(name)
        for agent in AGENTS:
            yield ask("get_agent", agent.id)
        yield ask(
            "start_run", json={"agent": "quick", "params": {"size": 3}, "metadata": {"a": [1]}, "session_id": "s"}
        )
        run, heard, booked = [started(client, agent) for agent in ("asker", "listener", "booker")]
        id_ = question_of(client, run)
        yield ask("look_at_run", run)
        yield ask("answer_run", run, json={"answers": {"nothing": "x"}})
        yield ask("say_to_run", run, json={"text": "Be quick."})
        yield ask("answer_run", run, json={"answers": {id_: {"text": "Monday"}}})
        ended(client, run)
        yield ask("look_at_run", run)
        yield ask("watch_run", run)
        last = client.get(f"/runs/{run}/events").text.rpartition("\nid: ")[2].partition("\n")[0]
        yield ask("watch_run", run, headers={"last-event-id": last})
        yield ask("answer_run", run, json={"answers": {id_: "Monday"}})
        yield ask("post_message", heard, json={"topic": "go", "value": {"where": [1.5, None]}, "id": "one"})
        until(lambda: client.get(f"/runs/{booked}").json()["phase"] == "executing_tool")
        yield ask("give_tool_result", booked, "c1", json={"result": "four seats"})
        for one in (heard, booked):
            ended(client, one)
            yield ask("look_at_run", one)
        yield ask("download_journal", run)
        yield ask("fork_run", run, json={"at": 0})
        other = started(client)
        question_of(client, other)
        yield ask("resume_run", other)
        yield ask("cancel_run", other)
        yield ask("list_runs", params={"limit": 2})
        yield ask("show_metrics")
        third = started(client)
        question_of(client, third)
        for name, parts, body in (
            ("receive_event", ("go",), b"{}"),
            ("receive_event", ("go",), json.dumps({"run": third}).encode()),
            ("receive_event_for_run", ("go", third), b"[]"),
        ):
            signed = {"stepengine-signature": sign(SECRET, body, int(time.time()))}
            yield ask(name, *parts, content=body, headers=signed)
        yield from asked_by_pages(client, ask)


def asked_by_pages(client: httpx2.Client, ask: Any) -> Iterator[tuple[str, httpx2.Response]]:
    """
    Ask what pages and clients of MCP ask, each in its own protocol.
    """
    said = {"role": "user", "id": "m", "content": "Rome", "parts": [{"type": "text", "text": "Rome"}]}
    yield ask("run_agent", "asker", json={"threadId": "t", "runId": "r", "messages": [said]})
    yield ask("come_back_to_thread", "asker", json={"threadId": "t", "runId": "r", "messages": []})
    yield ask("take_chat_turn", "asker", json={"id": "c", "messages": [said]})
    yield ask("come_back_to_chat", "asker", "c")
    yield ask("come_back_to_chat", "asker", "nobody's")
    known = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    accept = {"accept": "application/json, text/event-stream"}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": known}
    name, begun = ask("send_mcp_message", json=hello, headers=accept)
    yield name, begun
    session = {**accept, "mcp-session-id": begun.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
    over = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    yield ask("send_mcp_message", json=over, headers=session)
    with client.stream("GET", "/mcp", headers=session) as stream:  # which ends with the session
        yield "listen_to_mcp", stream
    yield ask("end_mcp_session", headers=session)


def asked_beside_runs(house: House) -> Iterator[tuple[str, httpx2.Response]]:
    """
    Ask for conversations, reports, and what becomes of a run that wrote something.
    """
    with house.client("root") as client:
        written(house)
        yield "list_reports", client.get("/reports")
        yield "look_at_report", client.get("/reports/tried/one")
        ended(client, client.post("/runs", json={"agent": "quick", "session_id": "s"}).json()["run_id"])
        yield "list_sessions", client.get("/sessions", params={"limit": 1})
        yield "look_at_session", client.get("/sessions/s")
        yield "delete_session", client.delete("/sessions/s")
        wrote = started(client, "writer", "Rome")
        ended(client, wrote)
        yield "cost_of_run", client.get(f"/runs/{wrote}/cost")
        yield "undo_run", client.post(f"/runs/{wrote}/undo", json={"dry_run": True})
        yield "undo_run", client.post(f"/runs/{wrote}/undo")


def asked_of_strangers(house: House) -> Iterator[tuple[str, httpx2.Response]]:
    """
    Ask what the studio asks: what all runs ask, what they did, and what lies beside them.
    """
    with house.client("root") as client:
        run = started(client)
        question_of(client, run)
        yield "list_questions", client.get("/questions")
        yield "view_run", client.get(f"/runs/{run}/view")
        yield "lines_of_run", client.get(f"/runs/{run}/lines")
        theirs = house.folder / "runs" / "theirs.jsonl"
        theirs.write_bytes((house.folder / "runs" / f"{run}.jsonl").read_bytes())
        yield "list_foreign", client.get("/foreign")
        look = client.get("/foreign/theirs")
        yield "look_at_foreign", look
        yield "view_foreign", client.get("/foreign/theirs/view")
        yield "resume_foreign", client.post("/foreign/theirs/resume", json={"seen": "something else"})
        yield "resume_foreign", client.post("/foreign/theirs/resume", json={"seen": look.json()["seen"]})


def asked_to_look(house: House) -> Iterator[tuple[str, httpx2.Response]]:
    """
    Ask what goes back in runs, sees edits and judges.
    """
    with house.client("root") as client:
        one, other = [started(client, "writer", prompt) for prompt in ("Rome", "Paris")]
        for run in (one, other):
            ended(client, run)
        yield "list_places", client.get(f"/runs/{one}/places")
        yield "compare_runs", client.get(f"/runs/{one}/compare/{other}")
        yield "difference_of_runs", client.get(f"/runs/{one}/difference/{other}")
        with client.stream("GET", f"/runs/{one}/edits", params={"at": "1"}) as stream:
            yield "open_desk", stream
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            desk = json.loads(next(lines).removeprefix("data: "))["desk"]
            next(lines)
            yield "go_to_place", client.post(f"/runs/{one}/edits/{desk}", json={"at": "#0"})
            yield "go_to_place", client.post(f"/runs/{one}/edits/nobody's", json={"at": "#0"})
            yield "ask_what_is_next", client.get(f"/runs/{one}/edits/{desk}/next")
        written(house)
        yield "look_at_sample", client.get("/samples", params={"report": "tried/one", "journal": "rome/base-1.jsonl"})
        yield "look_at_sample", client.get("/samples", params={"report": "tried/one", "journal": "../one/results.json"})
        asked = {"kind": "blame", "runs": [one], "check": "False", "samples": 1}
        begun = client.post("/jobs", json=asked)
        yield "start_job", begun
        job = begun.json()["id"]
        until(lambda: client.get(f"/jobs/{job}").json()["status"] == "priced")
        yield "look_at_job", client.get(f"/jobs/{job}")
        yield "agree_to_job", client.post(f"/jobs/{job}/agree", json={"budget": "1"})
        yield "agree_to_job", client.post(f"/jobs/{job}/agree", json={})
        yield "cancel_job", client.post(f"/jobs/{job}/cancel")
        yield "look_at_job", client.get("/jobs/nobody's")
        yield "list_jobs", client.get("/jobs")


@pytest.mark.deep
@pytest.mark.spec("studio:SV1")
def test_every_operation_answers_as_documented(house: House, document: dict[str, Any], tmp_path: Path) -> None:
    seen: dict[str, set[int]] = {name: set() for name in NAMES}
    for name, answer in (
        *asked(house),
        *asked_beside_runs(house),
        *asked_to_look(house),
        *asked_of_strangers(house),
    ):
        check_answer(document, name, answer)
        seen[name].add(answer.status_code)

    gives = {one.name: set(one.gives) for one in OPERATIONS}
    gives["ready"] -= {503}
    assert gives == {name: seen[name] & gives[name] for name in NAMES}


async def test_unopened_server_reports_not_ready_as_documented(tmp_path: Path, document: dict[str, Any]) -> None:
    house = House(tmp_path)
    async with house.engine() as engine:
        served = app(engine, runs=tmp_path / "runs", tokens=house.folder / "tokens.json")
        transport = httpx2.ASGITransport(app=served)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = await client.get("/ready")

    check_answer(document, "ready", answer)
    assert (503, "stopping") == (answer.status_code, answer.json()["status"])


def test_wrong_method_gets_405_with_all_allowed_methods(house: House, document: dict[str, Any]) -> None:
    with house.client() as client:
        for path, ways in document["paths"].items():
            answer = client.request("PATCH", re.sub(r"\{\w+\}", "nothing", path))
            allowed = set(answer.headers["allow"].lower().split(", "))

            assert (405, set(ways)) == (answer.status_code, allowed - {"head"})
            assert "application/problem+json" == answer.headers["content-type"]


# --- a client of somebody else's ------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV1")
@pytest.mark.skipif(
    shutil.which(GENERATOR) is None, reason=f"needs the command {GENERATOR} on PATH, from an environment of its own"
)
def test_a_generated_client_starts_watches_and_answers_a_run(
    house: House, document: dict[str, Any], tmp_path: Path
) -> None:
    command = shutil.which(GENERATOR)
    assert command is not None
    python = Path(command).resolve().with_name("python")
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    # What it formats the code with would be looked for on PATH; types that it does not know are given as text.
    config = {
        "post_hooks": [],
        "content_type_overrides": dict.fromkeys(("application/x-ndjson", "application/openmetrics-text"), "text/plain"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    options = ["--path", "openapi.json", "--meta", "none", "--output-path", "made", "--config", "config.yaml"]
    made = subprocess.run(
        [command, "generate", *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50
    )
    assert (0, "") == (
        made.returncode,
        re.sub(r"Generating .*", "", made.stdout + made.stderr, flags=re.DOTALL).strip(),
    )
    assert "WARNING" not in made.stdout + made.stderr

    told = subprocess.run(
        [python, HERE / "generated_client.py", house.url, house.tokens["root"]],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert 0 == told.returncode, told.stderr
    said = json.loads(told.stdout)

    assert ["asker", "booker", "listener", "quick", "talker", "writer"] == sorted(said["agents"])
    assert "On which day?" == said["question"]
    assert ["run_started", "question_asked", "answer_received", "run_finished"] == [
        kind for kind in said["events"] if kind != "phase_changed"
    ]
    assert ("completed", "Rome: Monday") == (said["status"], said["output"])
    assert "head" == said["journal"]
    assert [404, "urn:stepengine:problem:no_such_run"] == said["missing"]


@pytest.mark.skipif(
    shutil.which(GENERATOR) is None, reason=f"needs the command {GENERATOR} on PATH, from an environment of its own"
)
def test_named_generator_version_is_the_installed_one() -> None:
    said = subprocess.run([GENERATOR, "--version"], capture_output=True, text=True, check=True).stdout

    assert said.split()[-1] == COUNTERPARTS[0][1]
