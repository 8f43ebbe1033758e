"""
Runs over HTTP: each belongs to somebody, is there once, and takes what is said to it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    InputSchema,
    Parallel,
    Receive,
    Schedule,
    Sleep,
    ToolCall,
    ToolContext,
    call,
    tool,
)
from stepengine.durable import DurableEngine, Operator
from stepengine.durable.register import Register
from stepengine.errors import AgentError, AnswerRejected, InputError, JournalError, ToolError
from stepengine.journal import FileJournal
from stepengine.journal.mailbox import MailboxMessage
from stepengine.permissions import Policy, Rule
from stepengine.runtime.handle import RunHandle
from stepengine.server import Caller, Tokens, app
from stepengine.server.current_engine import CurrentEngine
from stepengine.server.ledger import Ledger
from stepengine.server.run_requests import StartRequest
from stepengine.server.runs import Runs
from stepengine.testing import ScriptedModel
from tests.cases import case
from tests.waits import until, until_async

from .house import House, ended, question_of, started

DONE: list[str] = []


@tool
def deploy(place: str) -> str:
    """Deploy."""
    DONE.append(place)
    return f"deployed to {place}"


@tool(deferred=True)
def wait_for(ctx: ToolContext, what: str) -> str:
    """Wait."""
    return what


def asking(ctx):
    day = yield from Ask("On which day?")
    done = yield from call(deploy, place=f"{ctx.prompt} on {day}")
    return str(done)


def asking_twice(ctx):
    results = yield from Parallel(Ask("On which day?"), Ask("At what time?"))
    return str(list(results))


def asking_beside_deploy(ctx):
    results = yield from Parallel(Ask("On which day?"), ToolCall("deploy", {"place": ctx.prompt}))
    return str(list(results))


def receiving(ctx):
    message = yield Receive("go")
    return f"{ctx.prompt}: {message.value}"


def sleeping(ctx):
    yield Sleep(0.01)
    return "slept"


def dozing(ctx):
    yield Sleep(172_800)
    return "awake"


def talking(ctx):
    yield STEP
    result = yield from call(wait_for, what="it")
    yield STEP
    return str(result)


def noting(ctx):
    yield ToolCall("set_output", {"found": 1})


def leading(ctx):
    return (yield from AgentCall("noting"))


AGENTS = [
    AgentDefinition("leading", spawnable_agents=["noting"], handle_steps=leading),
    AgentDefinition("noting", tools=["set_output"], handle_steps=noting),
    AgentDefinition("asking", tools=[deploy], handle_steps=asking),
    AgentDefinition("asking-twice", handle_steps=asking_twice),
    AgentDefinition("asking-beside-deploy", tools=[deploy], handle_steps=asking_beside_deploy),
    AgentDefinition("receiving", handle_steps=receiving),
    AgentDefinition("sleeping", handle_steps=sleeping),
    AgentDefinition("dozing", handle_steps=dozing),
    AgentDefinition("saying", model="test/own"),
    AgentDefinition("talking", model="anthropic/claude-sonnet-4-5", tools=[wait_for], handle_steps=talking),
]
SCOPES = ("read", "run", "answer")


class Server:
    """
    A server of a folder, as clients see it.
    """

    def __init__(self, folder: Path, *, db: str = "", **options: Any) -> None:
        self.folder, self.db, self.options = folder, db, options
        self.tokens = Tokens.open(folder / "tokens.json")
        self.secrets: dict[str, str] = {}

    @contextmanager
    def running(self, **more: Any) -> Iterator[Server]:
        options = {"wait_for_answers": 0, "drain": 0, **self.options, **more}
        models, permissions = ScriptedModel(["Well."] * 100), options.pop("permissions", None)
        if self.db:
            engine: Any = DurableEngine(AGENTS, models=models, db=self.db, polling=0.1)
        else:
            engine = Engine(AGENTS, models=models, permissions=permissions)
            options = {"runs": self.folder / "runs", **options}
        with TestClient(app(engine, tokens=self.tokens, **options), base_url="http://localhost") as self.client:
            yield self

    def ask(self, method: str, path: str, body: Any = None, *, of: str = "ann", **headers: str) -> tuple[int, Any]:
        if of not in self.secrets:
            scopes = ("admin",) if of == "root" else SCOPES
            self.secrets[of] = self.tokens.add(of, scopes)
        headers["authorization"] = f"Bearer {self.secrets[of]}"
        response = self.client.request(method, path, json=body, headers=headers)
        kind = response.headers.get("content-type", "")
        return response.status_code, response.json() if "json" in kind and "ndjson" not in kind else response.content

    def start(self, agent: str, prompt: str = "", *, of: str = "ann", **headers: str) -> str:
        status, made = self.ask("POST", "/runs", {"agent": agent, "prompt": prompt}, of=of, **headers)
        assert 202 == status, made
        return f"/runs/{made['run_id']}"

    def look(self, path: str, *, until: str, of: str = "ann") -> dict[str, Any]:
        return look(lambda: self.ask("GET", path, of=of)[1], until)

    def events(self, path: str, after: str = "") -> list[dict[str, Any]]:
        headers = {"last-event-id": after} if after else {}
        status, said = self.ask("GET", f"{path}/events", **headers)
        assert status in (200, 204), said
        lines = said.decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def look(view: Callable[[], dict[str, Any]], status: str) -> dict[str, Any]:
    """
    Wait until a run has a status, and return how it stands.
    """

    def has_status() -> dict[str, Any] | None:
        seen = view()
        return seen if seen["status"] == status else None

    return dict(until(has_status))


IN_POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.deep)
in_sqlite_too = pytest.mark.parametrize("server", ["runs", "runs.db", IN_POSTGRESQL], indirect=True)


@pytest.fixture(params=["runs", IN_POSTGRESQL])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    DONE.clear()
    if request.param == "postgresql":
        return Server(tmp_path, db=request.getfixturevalue("db"))
    return Server(tmp_path, runs=tmp_path / request.param)


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF13")
def test_suspended_database_run_always_shows_its_questions(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Whoever looks for questions looks before there are any, and is held up until the run rests.
    """

    async def looked_before(self: Operator, root: str) -> list[Any]:
        while not await self.run_waits.list_waits_of_suspended([root]):  # noqa: ASYNC110 - no event tells what happens in the database
            await asyncio.sleep(0.01)
        return []

    monkeypatch.setattr(Operator, "list_questions", looked_before)
    with Server(tmp_path, db=db).running() as server:
        seen = server.look(server.start("asking", "Rome"), until="suspended")

    assert ["On which day?"] == [one["text"] for one in seen["questions"]]


@pytest.mark.deep
@pytest.mark.spec("studio:SV7")
def test_database_run_shows_its_output_without_submission_note(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    As behind a server that was killed between the two.
    """

    async def killed(self: Register, run: str) -> None: ...

    monkeypatch.setattr(Register, "record_submitted", killed)
    with Server(tmp_path, db=db).running() as server:
        seen = server.look(server.start("sleeping"), until="completed")

    assert "slept" == seen["output"]


@in_sqlite_too
@pytest.mark.spec("interfaces:IF13", "interfaces:IF15", "interfaces:IF18")
def test_run_is_started_watched_answered_and_read(server: Server) -> None:
    with server.running():
        path = server.start("asking", "Rome")
        waiting = server.look(path, until="suspended")
        before = server.events(path)
        answered = server.ask("POST", f"{path}/answers", {"answers": {waiting["questions"][0]["id"]: "Friday"}})
        done = server.look(path, until="completed")
        again = server.events(path)

    assert "On which day?" == waiting["questions"][0]["text"]
    assert 202 == answered[0]
    assert "deployed to Rome on Friday" == done["output"]
    assert ["Rome on Friday"] == DONE
    assert "run_started" == before[0]["type"]
    if server.db:
        # A run that waits has not ended: its last event is what it asks.
        assert "question_asked" == before[-1]["type"]
        assert before == again[: len(before)]
    else:
        assert ("run_finished", "suspended") == (before[-1]["type"], before[-1]["status"])
    assert "deployed to Rome on Friday" == again[-1]["output"]


def test_events_after_the_last_id_give_204(server: Server) -> None:
    with server.running():
        path = server.start("sleeping")
        server.look(path, until="completed")
        events = server.events(path)
        last = f"{events[-1]['epoch']}-{events[-1]['index']}"
        status, _ = server.ask("GET", f"{path}/events", **{"last-event-id": last})

    assert 204 == status


@pytest.mark.spec("interfaces:IF13", "studio:SV3")
def test_idempotency_key_names_one_run_across_restarts(server: Server) -> None:
    key = {"idempotency-key": "order-17"}
    with server.running():
        first, second = server.start("receiving", "Rome", **key), server.start("receiving", "Rome", **key)
        others = server.start("receiving", "Rome", of="bob", **key)
    with server.running():
        third = server.start("receiving", "Rome", **key)
        status, said = server.ask("POST", "/runs", {"agent": "receiving", "prompt": "Oslo"}, **key)

    assert first == second == third
    assert others != first
    assert (409, "urn:stepengine:problem:key_reused") == (status, said["type"])


@pytest.mark.deep
@pytest.mark.smoke
@in_sqlite_too
@pytest.mark.spec("studio:SV3")
def test_active_runs_resume_at_restart_and_unregistered_journals_do_not(server: Server) -> None:
    with server.running():
        path = server.start("receiving", "Rome", of="ann")
        server.look(path, until="suspended")
        asked = server.start("asking", "Oslo")
        question = server.look(asked, until="suspended")["questions"][0]["id"]
        if not server.db and (place := server.options["runs"]).is_dir():
            journal = place / f"{asked.rpartition('/')[2]}.jsonl"
            shutil.copy(journal, place / "stranger.jsonl")
            prepared = MailboxMessage(kind="answer", topic=question, value="Tuesday")
            FileJournal(place / "stranger.jsonl").mailbox().send(prepared)
    with server.running():
        assert server.ask("POST", f"{path}/messages", {"topic": "go", "value": 7}) == (
            202,
            {"run_id": path.rpartition("/")[2], "is_new": True},
        )
        done = server.look(path, until="completed")
        assert 202 == server.ask("POST", f"{asked}/answers", {"answers": {question: "Monday"}})[0]
        server.look(asked, until="completed")
        listed = server.ask("GET", "/runs")[1]["runs"]

    assert "Rome: 7" == done["output"]
    assert ["Oslo on Monday"] == DONE
    assert {path.rpartition("/")[2], asked.rpartition("/")[2]} == {one["run_id"] for one in listed}


@pytest.mark.spec("interfaces:IF15")
def test_answers_are_accepted_all_or_none_and_once(server: Server) -> None:
    with server.running():
        path = server.start("asking", "Rome")
        question = server.look(path, until="suspended")["questions"][0]["id"]
        odd = server.ask("POST", f"{path}/answers", {"answers": {question: "Monday", "q99": "x"}})
        first = server.ask("POST", f"{path}/answers", {"answers": {question: "Friday"}})
        server.look(path, until="completed")
        late = server.ask("POST", f"{path}/answers", {"answers": {question: "Sunday"}})

    assert (409, question) == (odd[0], odd[1]["open"][0]["id"])
    assert 202 == first[0]
    assert (409, "urn:stepengine:problem:ended") == (late[0], late[1]["type"])
    assert ["Rome on Friday"] == DONE


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV4")
def test_one_of_many_concurrent_answers_is_accepted(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    server = Server(tmp_path)
    DONE.clear()
    with server.running():
        path = server.start("asking", "Rome")
        question = server.look(path, until="suspended")["questions"][0]["id"]
        with ThreadPoolExecutor(8) as pool:
            said = list(
                pool.map(
                    lambda day: server.ask("POST", f"{path}/answers", {"answers": {question: day}})[0],
                    [f"day {number}" for number in range(8)],
                )
            )
        server.look(path, until="completed")

    assert [202, *[409] * 7] == sorted(said)
    assert 1 == len(DONE)


@pytest.mark.spec("interfaces:IF15")
def test_cancel_is_idempotent_and_ended_runs_accept_nothing(server: Server) -> None:
    with server.running():
        # In a database no call of a deferred tool waits.
        path, talking = server.start("receiving"), server.start("receiving" if server.db else "talking")
        server.look(path, until="suspended")
        cancelled = [server.ask("POST", f"{each}/cancel", {"reason": "no"})[0] for each in (path, path, talking)]
        ended = [server.look(each, until="cancelled")["status"] for each in (path, talking)]
        late = [
            server.ask("POST", f"{path}/input", {"text": "x"})[0],
            server.ask("POST", f"{path}/messages", {"topic": "go"})[0],
            server.ask("POST", f"{talking}/tool-results/c1", {"result": 1})[0],
            server.ask("POST", f"{path}/resume")[0],
            server.ask("POST", f"{path}/cancel")[0],
        ]

    assert [202, 202, 202] == cancelled
    assert ["cancelled", "cancelled"] == ended
    assert [409, 409, 409, 409, 202] == late


@pytest.mark.spec("interfaces:IF13")
def test_run_above_max_live_is_rejected_until_one_ends(tmp_path: Path) -> None:
    server = Server(tmp_path, max_live=2)
    with server.running():
        talking = [server.start("talking"), server.start("talking")]
        status, said = server.ask("POST", "/runs", {"agent": "talking"})
        server.ask("POST", f"{talking[0]}/cancel")
        server.look(talking[0], until="cancelled")
        after = server.ask("POST", "/runs", {"agent": "talking"})[0]

    assert (429, "urn:stepengine:problem:too_many_runs") == (status, said["type"])
    assert 202 == after


@pytest.mark.spec("studio:SV4")
def test_permanent_and_editing_operations_need_the_admin_scope(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.running():
        path = server.start("asking", "Rome")
        question = server.look(path, until="suspended")["questions"][0]["id"]
        always = {"answers": {question: {"text": "x", "remember": "always"}}}
        refused = [
            server.ask("POST", f"{path}/answers", always)[0],
            server.ask("POST", f"{path}/fork", {"at": 1, "edit": 1})[0],
            server.ask("GET", f"{path}/journal")[0],
            server.ask("GET", f"{path}/events?full=1")[0],
        ]
        allowed = server.ask("GET", f"{path}/journal", of="root")

    assert [403, 403, 403, 403] == refused
    assert 200 == allowed[0]
    assert b'"stepengine' in allowed[1].splitlines()[0]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST4")
@pytest.mark.parametrize(
    ("choice", "status"), [("yes", "completed"), ("always", "completed"), ("always1", "completed"), ("no", "failed")]
)
def test_a_question_has_choices_whose_answers_are_accepted(tmp_path: Path, choice: str, status: str) -> None:
    server = Server(tmp_path, permissions=Policy([Rule.ask_for_tool("deploy")]), wait_for_answers=50)
    with server.running():
        path = server.start("asking", "Rome")
        asked = until(lambda: server.ask("GET", path)[1]["questions"])[0]["id"]
        server.ask("POST", f"{path}/answers", {"answers": {asked: "Friday"}})
        question = until(lambda: [one for one in server.ask("GET", path)[1]["questions"] if one["tool_name"]])[0]
        (listed,) = server.ask("GET", "/questions")[1]["questions"]
        choices = {one["id"]: one for one in question["choices"]}
        given = server.ask("POST", f"{path}/answers", {"answers": {question["id"]: choices[choice]["answer"]}})[0]
        ended = server.look(path, until=status)

    assert question == {name: listed[name] for name in question}
    assert ["exactly this call", "ANY call of deploy, with any input"] == [
        choices[name]["scope"] for name in ("always", "always1")
    ]
    assert {"always1"} == {name for name, one in choices.items() if one["confirm"]}
    assert [{"kind": "member", "name": "place", "value": "Rome on Friday"}] == question["preview_parts"]
    assert (202, status == "failed") == (given, ended["output"] is None)


@pytest.mark.spec("studio:SV2")
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_question_pages_keep_the_limit_and_list_each_once(server: Server, limit: int) -> None:
    with server.running():
        for agent in ("asking-twice", "asking", "asking-twice"):
            server.look(server.start(agent), until="suspended")
        pages, cursor = [], ""
        while cursor is not None:
            _, page = server.ask("GET", f"/questions?limit={limit}&cursor={cursor}")
            pages.append([(one["run_id"], one["id"]) for one in page["questions"]])
            cursor = page["next"]
        listed = [(one["run_id"], one["id"]) for one in server.ask("GET", "/questions")[1]["questions"]]

    assert 5 == len(set(listed))
    assert [listed[start : start + limit] for start in range(0, 5, limit)] == pages


@pytest.mark.deep
@pytest.mark.smoke
@in_sqlite_too
@pytest.mark.spec("studio:SV2")
def test_fork_continues_from_the_middle_as_a_new_run(server: Server) -> None:
    with server.running():
        path = server.start("asking", "Rome")
        question = server.look(path, until="suspended")["questions"][0]["id"]
        server.ask("POST", f"{path}/answers", {"answers": {question: "Friday"}})
        server.look(path, until="completed")
        again = {"at": 0, "allow_repeat": True}
        refused = server.ask("POST", f"{path}/fork", again)
        status, made = server.ask("POST", f"{path}/fork", again, of="root")
        assert 202 == status, made
        fork = f"/runs/{made['run_id']}"
        ended = server.look(fork, until="completed", of="root")
        no_place = server.ask("POST", f"{path}/fork", {"at": 99})[0]
        listed = {run["run_id"]: run["details"] for run in server.ask("GET", "/runs?details=1", of="root")[1]["runs"]}
        shown = server.ask("GET", f"{fork}/view", of="root")[1] if not server.db else None

    origin = ended["forked_from"]
    assert (path.removeprefix("/runs/"), "0") == (origin["run"], origin["at"].lstrip("#"))
    assert origin["run"] == listed[fork.removeprefix("/runs/")]["forked_from"]
    assert "deployed to Rome on Friday" == listed[fork.removeprefix("/runs/")]["output"]
    assert listed[origin["run"]]["forked_from"] is None
    assert shown is None or fork.endswith(shown["run"]["run"])
    assert (403, "admin") == (refused[0], refused[1]["scope"])
    assert fork != path
    assert "deployed to Rome on Friday" == ended["output"]
    assert ["Rome on Friday", "Rome on Friday"] == DONE
    assert 400 <= no_place < 500


@in_sqlite_too
@pytest.mark.spec("generator-contract:L42", "studio:SV2")
def test_an_ended_run_has_the_warnings_of_its_children(server: Server) -> None:
    with server.running():
        path = server.start("leading")
        first = server.look(path, until="completed")
        last = server.events(path)[-1]
    with server.running():
        again = server.look(path, until="completed")

    (warning,) = first["warnings"]
    assert warning.startswith("run 0 (noting): agent 'noting' calls set_output")
    assert ("run_finished", [warning]) == (last["type"], last["warnings"])
    assert [warning] == again["warnings"]


@pytest.mark.spec("studio:SV31")
def test_waiting_run_reports_its_waits_and_wake_time(server: Server) -> None:
    with server.running():
        for_message = server.look(server.start("receiving", "x"), until="suspended")
        path = server.start("dozing")
        for_time = server.look(path, until="suspended")
        for_answer = server.look(server.start("asking", "Rome"), until="suspended")
        ended = server.look(server.start("sleeping"), until="completed")
        listed = server.ask("GET", "/runs?details=1&agent=dozing")[1]["runs"][0]["details"]

    assert [("message", "go", None)] == [(w["kind"], w["topic"], w["wakes_at"]) for w in for_message["waits_for"]]
    assert "waits for a message on go" in for_message["waits_for"][0]["said"].replace("'", "")
    assert for_message["wakes_at"] is None
    assert ["time"] == [wait["kind"] for wait in for_time["waits_for"]]
    assert for_time["waits_for"][0]["wakes_at"] == for_time["wakes_at"] == listed["wakes"]
    assert datetime.fromisoformat(for_time["wakes_at"]) > datetime.now(UTC) + timedelta(days=1)
    assert [("question", for_answer["questions"][0]["id"])] == [
        (w["kind"], w["question"]) for w in for_answer["waits_for"]
    ]
    assert ([], None) == (ended["waits_for"], ended["wakes_at"])


@pytest.mark.spec("studio:ST2")
def test_model_choice_needs_admin_and_is_recorded(server: Server) -> None:
    wanted = {"agent": "saying", "model": "test/other"}
    with server.running():
        refused = server.ask("POST", "/runs", wanted)
        status, made = server.ask("POST", "/runs", wanted, of="root")
        assert 202 == status, made
        path = f"/runs/{made['run_id']}"
        server.look(path, until="completed", of="root")
        lines = [json.loads(line) for line in server.ask("GET", f"{path}/journal", of="root")[1].splitlines()]

    asked = [line["effect"]["request"]["model"] for line in lines if line.get("effect", {}).get("type") == "model_call"]
    assert (403, "admin") == (refused[0], refused[1]["scope"])
    assert ["test/other"] == asked
    assert {"saying": "test/other"} == lines[1]["effect"]["run_models"]


@pytest.mark.spec("studio:SV4", "interfaces:IF13")
def test_only_listed_agent_ids_start_runs(tmp_path: Path) -> None:
    server = Server(tmp_path)
    engine = Engine([*AGENTS, AgentDefinition("sleep-ing", handle_steps=sleeping)])
    with TestClient(app(engine, tokens=server.tokens, runs=tmp_path / "runs"), base_url="http://localhost") as client:
        server.client = client
        for agent in ("../sleeping", "./sleeping", "sleep_ing", "Sleeping", " sleeping", "sleeping@1", ""):
            with case(agent):
                status, said = server.ask("POST", "/runs", {"agent": agent})
                assert 422 == status
                assert said["issues"][0].startswith("agent: ")
                assert [] == server.ask("GET", "/runs")[1]["runs"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV4")
def test_call_in_doubt_is_repeated_only_by_an_admin(tmp_path: Path) -> None:
    server = Server(tmp_path)
    DONE.clear()
    with server.running():
        path = server.start("asking", "Rome")
        question = server.look(path, until="suspended")["questions"][0]["id"]
        server.ask("POST", f"{path}/answers", {"answers": {question: "Friday"}})
        server.look(path, until="completed")
    run = path.rpartition("/")[2]
    journal = tmp_path / "runs" / f"{run}.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if b'"tool_name":"deploy"' in line)
    journal.write_bytes(b"".join(lines[: cut + 1]))
    ledger = Ledger(tmp_path / "runs")
    ledger.write([lambda database: database.execute("UPDATE served SET status = 'suspended'")])
    ledger.close()
    yes = [True, "yes", {"selected": ["yes"]}, {"text": "yes"}, {"remember": "session"}]
    with server.running():
        resumed = server.ask("POST", f"{path}/resume")[0]
        doubt = server.look(path, until="suspended")["questions"][0]["id"]
        said = [server.ask("POST", f"{path}/answers", {"answers": {doubt: answer}})[0] for answer in yes]
        odd = server.ask("POST", f"{path}/answers", {"answers": {doubt: "maybe"}})[0]
        before = list(DONE)
        agreed = server.ask("POST", f"{path}/answers", {"answers": {doubt: "yes"}}, of="root")[0]
        done = server.look(path, until="completed")

    assert (202, "doubt:") == (resumed, doubt[:6])
    assert {403, 409} >= set(said)
    assert [403, 403] == said[:2]
    assert 409 == odd
    assert (["Rome on Friday"], ["Rome on Friday"] * 2) == (before, DONE)
    assert (202, "deployed to Rome on Friday") == (agreed, done["output"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF15")
@pytest.mark.parametrize("is_alone", [False, True])
def test_answers_with_an_unreadable_mailbox_change_nothing(tmp_path: Path, *, is_alone: bool) -> None:
    """The question in doubt is still shown, and can be answered once the mailbox is readable again."""
    server = Server(tmp_path)
    DONE.clear()
    with server.running():
        path = server.start("asking-beside-deploy", "Rome")
        server.look(path, until="suspended")
    journal = tmp_path / "runs" / f"{path.rpartition('/')[2]}.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if b'"tool_name":"deploy"' in line)
    journal.write_bytes(b"".join(lines[: cut + 1]))
    with server.running():
        question, doubt = [one["id"] for one in server.look(path, until="suspended")["questions"]]
        mailbox = journal.with_name(f"{journal.name}.mail")
        mailbox.touch()
        mailbox.chmod(0o666)
        asked = {doubt: "yes"} if is_alone else {question: "Friday", doubt: "yes"}
        refused, _ = server.ask("POST", f"{path}/answers", {"answers": asked}, of="root")
        left = server.ask("GET", path)[1]
        mailbox.unlink()
        other = server.ask("POST", f"{path}/answers", {"answers": {question: "Monday", doubt: "no"}}, of="root")
        assert (500, "suspended", [question, doubt]) == (
            refused,
            left["status"],
            [one["id"] for one in left["questions"]],
        )
        assert 202 == other[0], other
        done = server.look(path, until="completed")

    assert ["Rome"] == DONE
    assert "Monday" in done["output"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF18")
def test_events_of_a_run_in_doubt_end_after_a_restart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.running():
        path = server.start("asking-beside-deploy", "Rome")
        server.look(path, until="suspended")
    journal = tmp_path / "runs" / f"{path.rpartition('/')[2]}.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if b'"tool_name":"deploy"' in line)
    journal.write_bytes(b"".join(lines[: cut + 1]))
    with server.running():
        questions = server.look(path, until="suspended")["questions"]
    with server.running():
        told = server.ask("GET", f"{path}/events")[1].decode()
        last = [line.removeprefix("id: ") for line in told.splitlines() if line.startswith("id: ")][-1]
        again, _ = server.ask("GET", f"{path}/events", **{"last-event-id": last})

    assert "doubt:" in questions[1]["id"]
    assert "event: tool_started" in told
    assert 204 == again


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV4")
def test_caller_without_answer_scope_cannot_speak_in_sessions(tmp_path: Path) -> None:
    from stepengine.sessions import MemorySessions

    tokens = Tokens.open(tmp_path / "tokens.json")
    headers = {"authorization": f"Bearer {tokens.add('ann', ['run', 'read'])}"}
    told = []
    for number, sessions in enumerate((MemorySessions(), None)):
        engine = Engine(AGENTS, models=ScriptedModel(["Well."]), sessions=sessions)
        served = app(engine, runs=tmp_path / str(number), tokens=tokens)
        with TestClient(served, base_url="http://localhost") as client:
            for session in ("1", None):
                body = {"agent": "sleeping", "prompt": "yes", "session_id": session}
                told.append(client.post("/runs", json=body, headers=headers).status_code)

    assert [403, 202, 202, 202] == told


def test_application_check_identifies_users(tmp_path: Path) -> None:
    def known(request: Any) -> Caller | None:
        name = request.headers.get("x-user")
        return Caller(name, {"read", "run"}) if name in ("ann", "bob") else None

    engine = Engine(AGENTS, models=ScriptedModel(["Well."]))
    served = app(engine, runs=tmp_path / "runs", authenticate=known)
    with TestClient(served, base_url="http://localhost") as client:
        made = client.post("/runs", json={"agent": "sleeping"}, headers={"x-user": "ann"})
        path = f"/runs/{made.json()['run_id']}"
        found = [client.get(path, headers={"x-user": name}).status_code for name in ("ann", "bob", "eve")]

    assert 202 == made.status_code
    assert [200, 404, 401] == found


@pytest.mark.deep
@pytest.mark.smoke
def test_second_server_shows_and_answers_a_run_of_the_first(tmp_path: Path) -> None:
    """
    The second one has no run in hands: it shows them from their journals.
    """
    DONE.clear()
    first = Server(tmp_path, wait_for_answers=30)
    second = copy(first)
    with first.running(), second.running():
        path = first.start("asking", "Rome")
        questions = until(lambda: second.ask("GET", path)[1]["questions"])
        answered = second.ask("POST", f"{path}/answers", {"answers": {questions[0]["id"]: "Friday"}})
        told = second.look(path, until="completed")
        events = second.events(path)

    assert 202 == answered[0]
    assert "deployed to Rome on Friday" == told["output"]
    assert ["Rome on Friday"] == DONE
    assert "run_finished" == events[-1]["type"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV3", "interfaces:IF15")
def test_deferred_result_given_to_another_server_reaches_the_run(tmp_path: Path) -> None:
    first = Server(tmp_path, wait_for_answers=30)
    second = copy(first)
    with first.running(), second.running():
        path = first.start("talking")
        journal = FileJournal(tmp_path / "runs" / f"{path.rpartition('/')[2]}.jsonl")
        until(lambda: journal.is_there() and journal.history().facts.pending_results)
        given = second.ask("POST", f"{path}/tool-results/c1", {"result": "from afar"})
        ended = second.look(path, until="completed")
        late = first.ask("POST", f"{path}/tool-results/c1", {"result": "from afar"})

    assert (202, 409) == (given[0], late[0]), given
    assert "from afar" == ended["output"]


@pytest.mark.spec("studio:SV3", "interfaces:IF15")
def test_result_reaches_a_resumed_run_before_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed replays what it did before it waits for the call again."""

    def not_yet(*_: Any, **__: Any) -> bool:
        msg = "no call waits for its result"
        raise ToolError(msg)

    server = Server(tmp_path)
    with server.running():
        path = server.start("talking")
        journal = FileJournal(tmp_path / "runs" / f"{path.rpartition('/')[2]}.jsonl")
        until(lambda: journal.is_there() and journal.history().facts.pending_results)
        monkeypatch.setattr(RunHandle, "store_tool_result", not_yet)
        unknown, said = server.ask("POST", f"{path}/tool-results/c9", {"result": 1})
        given, _ = server.ask("POST", f"{path}/tool-results/c1", {"result": "at last"})
        ended = server.look(path, until="completed")

    assert (409, "urn:stepengine:problem:no_such_call") == (unknown, said["type"])
    assert (202, "at last") == (given, ended["output"])


@pytest.mark.spec("studio:SV2")
@pytest.mark.parametrize("server", ["runs", "runs.db"], indirect=True)
def test_running_filter_lists_runs_that_were_never_suspended(server: Server) -> None:
    with server.running():
        path = server.start("talking")
        shown = server.ask("GET", path)[1]
        listed = {
            status: [one["run_id"] for one in server.ask("GET", f"/runs?status={status}")[1]["runs"]]
            for status in ("running", "suspended,running", "suspended")
        }

    assert "running" == shown["status"]
    assert {"running": [shown["run_id"]], "suspended,running": [shown["run_id"]], "suspended": []} == listed


@pytest.mark.spec("studio:SV2")
async def test_a_repeated_start_fails_as_the_first_one_does(tmp_path: Path) -> None:
    """Both arrive before it is known that the run cannot start; none is told of a run that is not kept."""
    agent = AgentDefinition(
        "sized",
        handle_steps=noting,
        input_schema=InputSchema(params={"type": "object", "properties": {"size": {"type": "integer"}}}),
    )
    async with Engine([agent]) as engine:
        runs = Runs(engine, tmp_path / "runs", wait_for_answers=0, drain=0)
        await runs.start()
        asked = StartRequest(agent="sized", params={"size": "large"})
        starts = [runs.launcher.start(Caller("ann", {"run"}), asked, key="one") for _ in range(5)]
        told = await asyncio.gather(*starts, return_exceptions=True)
        kept = await runs.reader.list_runs(Caller("ann", {"run"}), agent=None, statuses=(), before=None, limit=9)
        await runs.close()

    assert [InputError] * 5 == [type(one) for one in told], told
    assert [] == kept


@pytest.mark.spec("studio:SV3")
async def test_stop_interrupts_a_run_while_another_one_cleans_up(tmp_path: Path) -> None:
    caller, has_started, may_end = Caller("ann", {"run"}), asyncio.Event(), asyncio.Event()

    @tool
    async def clean() -> str:
        """Take long to clean up."""
        has_started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await may_end.wait()
        return "clean"

    def cleaning(ctx: Any) -> Any:
        return (yield from call(clean))

    async with Engine([*AGENTS, AgentDefinition("cleaning", tools=[clean], handle_steps=cleaning)]) as engine:
        runs = Runs(engine, tmp_path / "runs", wait_for_answers=60, drain=0)
        await runs.start()
        await runs.launcher.start(caller, StartRequest(agent="cleaning"))
        await has_started.wait()
        run, _ = await runs.launcher.start(caller, StartRequest(agent="asking"))
        handle, closing = runs.live.handles[run], asyncio.create_task(runs.close())
        try:
            async with asyncio.timeout(10):
                await handle.wait()
        finally:
            may_end.set()
            await closing


async def test_server_that_cannot_start_closes_its_engine(tmp_path: Path) -> None:
    closed = []

    class Noted(Engine):
        async def aclose(self) -> None:
            closed.append(self)
            await super().aclose()

    (tmp_path / "runs").touch()
    served = app(Noted(AGENTS), runs=tmp_path / "runs", tokens=tmp_path / "tokens.json")
    with pytest.raises(JournalError, match="is a file"):
        async with served.lifespan():
            pass

    assert 1 == len(closed)


def test_schedule_of_an_unknown_agent_is_refused_before_the_start(tmp_path: Path) -> None:
    schedules = [Schedule("nobody", cron="0 7 * * *")]
    with Engine(AGENTS) as engine, pytest.raises(AgentError, match="nobody"):
        app(engine, runs=tmp_path / "runs", tokens=tmp_path / "tokens.json", schedules=schedules)


@pytest.mark.spec("studio:SV2")
async def test_of_two_answers_around_a_resume_one_is_accepted(tmp_path: Path) -> None:
    """One was asked before the resume and one behind it; both find the question open."""
    caller = Caller("ann", {"run", "answer"})
    async with Engine(AGENTS) as engine:
        runs = Runs(engine, tmp_path / "runs", wait_for_answers=0, drain=0)
        await runs.start()
        run, _ = await runs.launcher.start(caller, StartRequest(agent="asking"))
        await runs.live.wait_until_end_recorded(run)
        await runs.close()
        runs = Runs(engine, tmp_path / "runs", wait_for_answers=60, drain=0)
        await runs.start()
        before = await runs.reader.get_run(caller, run)
        await runs.launcher.resume(before)
        after = await runs.reader.get_run(caller, run)
        (question,) = [one.id for one in await until_async(lambda: runs.live.handles[run].questions)]
        answers = [runs.messenger.answer(caller, row, {question: text}) for row, text in ((before, "a"), (after, "b"))]
        told = await asyncio.gather(*answers, return_exceptions=True)
        await runs.close()

    assert [AnswerRejected, None] == [one and type(one) for one in sorted(told, key=lambda one: one is None)]


@pytest.mark.spec("studio:SV2")
@pytest.mark.parametrize("place", ["runs", "runs.db"])
async def test_resumes_after_a_failed_one_start_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The second waits when the first fails; the third comes then."""
    caller = Caller("ann", {"run", "answer"})
    async with Engine(AGENTS) as engine:
        runs = Runs(engine, tmp_path / place, wait_for_answers=0, drain=0)
        await runs.start()
        run, _ = await runs.launcher.start(caller, StartRequest(agent="asking"))
        await runs.live.wait_until_end_recorded(run)
        await runs.close()
        runs = Runs(engine, tmp_path / place, wait_for_answers=60, drain=0)
        await runs.start()
        row, waiting = await runs.reader.get_run(caller, run), list[asyncio.Task[None]]()

        async def fail(*_: Any, **__: Any) -> RunHandle:
            monkeypatch.undo()
            waiting.append(asyncio.create_task(runs.launcher.resume(row)))
            msg = "the disk could not be read"
            raise JournalError(msg)

        monkeypatch.setattr(Engine, "start_resume", fail)
        with pytest.raises(JournalError, match="disk"):
            await runs.launcher.resume(row)
        others = await asyncio.gather(*waiting, runs.launcher.resume(row), return_exceptions=True)
        await runs.close()

    assert [None, None] == others


@pytest.mark.spec("studio:SV13")
def test_ended_run_is_completed_even_while_its_row_is_read(tmp_path: Path) -> None:
    from stepengine.server.run_requests import StartRequest
    from stepengine.server.runs import Runs

    may_end = threading.Event()

    @tool
    def wait() -> str:
        """Wait."""
        assert may_end.wait(30)
        return "waited"

    def waiting(ctx):
        yield from call(wait)

    async def told() -> list[str]:
        engine = Engine([AgentDefinition("waiting", tools=[wait], handle_steps=waiting)])
        runs = Runs(engine, tmp_path / "runs", drain=0)
        await runs.start()
        caller = Caller("ann", {"run"})
        run, _ = await runs.launcher.start(caller, StartRequest(agent="waiting"))
        loop, find = asyncio.get_running_loop(), Ledger.find

        def slowly(self: Ledger, wanted: str) -> Any:
            """
            Read the row, and give it when the end of the run is written down.
            """
            row = find(self, wanted)
            may_end.set()
            asyncio.run_coroutine_threadsafe(runs.live.wait_until_end_recorded(wanted), loop).result(30)
            return row

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "find", slowly)
            statuses = [(await runs.reader.get_run(caller, run)).status for _ in range(2)]
        await runs.close()
        await engine.aclose()
        return statuses

    assert ["completed", "completed"] == asyncio.run(told())


@pytest.mark.deep
def test_answer_is_accepted_at_any_moment_of_suspension(tmp_path: Path) -> None:
    with House(tmp_path, wait_for_answers=0.03, max_live=1_000).open() as house, house.client() as client:
        told = []
        for moment in range(150):
            run = started(client)
            question = question_of(client, run)
            time.sleep(0.0004 * moment)
            told.append(client.post(f"/runs/{run}/answers", json={"answers": {question: str(moment)}}).status_code)
            assert f"hi: {moment}" == ended(client, run)["output"]

    assert [202] * 150 == told


@pytest.mark.spec("interfaces:IF15")
@pytest.mark.parametrize("place", ["runs", "runs.db"])
async def test_answer_refused_for_one_question_answers_no_other(tmp_path: Path, place: str) -> None:
    """Another server took the answer to the second question while this one checked both."""
    caller = Caller("ann", {"run", "answer"})
    async with Engine(AGENTS) as engine:
        runs = Runs(engine, tmp_path / place, wait_for_answers=0, drain=0)
        await runs.start()
        run, _ = await runs.launcher.start(caller, StartRequest(agent="asking-twice"))
        await runs.live.wait_until_end_recorded(run)
        row = await runs.reader.get_run(caller, run)
        box = runs.store.journal(run).mailbox()
        box.send(MailboxMessage(kind="answer", topic="q1", value="noon", id=f"q1@{row.changed}"))
        with pytest.raises(AnswerRejected, match="somebody else has answered"):
            await runs.messenger.answer(caller, row, {"q0": "Monday", "q1": "six"})
        stored = [letter.topic for letter in box.read()[0]]
        resumed = await runs.messenger.answer_and_find_handle(caller, row, {"q0": "Friday"}, user_input="Hurry.")
        assert resumed is not None
        result = await resumed.result()
        await runs.close()

    assert ["q1"] == stored
    assert "['Friday', 'noon']" == result.output


@pytest.mark.spec("studio:SV11")
async def test_page_result_and_human_answer_name_their_answerers(tmp_path: Path) -> None:
    """They come in one request."""
    caller = Caller("ann", {"run", "answer"})
    async with Engine(AGENTS) as engine:
        runs = Runs(engine, tmp_path / "runs", wait_for_answers=0, drain=0)
        await runs.start()
        run, _ = await runs.launcher.start(caller, StartRequest(agent="asking-twice"))
        await runs.live.wait_until_end_recorded(run)
        row = await runs.reader.get_run(caller, run)
        await runs.messenger.answer(caller, row, {"q0": "Monday", "q1": "six"}, page_questions=["q1"])
        found = await runs.messenger.list_stored_answers(row, ["q0", "q1"])
        await runs.close()

    assert [("q0", "ann", "Monday"), ("q1", "page", "six")] == found


class FailsToClose(ScriptedModel):
    """A model whose ``close`` raises an exception."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1
        msg = "cannot close"
        raise OSError(msg)


class Versions:
    """The files of a server, each load of which gives the next engine."""

    has_load_failed = False

    def __init__(self, *engines: Engine) -> None:
        self._left = list(engines)

    def mark_and_report_changed_files(self, *, retry: bool = True) -> bool:
        return bool(self._left)

    async def require_loadable_in_child_process(self) -> None:
        return

    def reload_engine(self) -> Engine:
        return self._left.pop(0)


@pytest.mark.spec("reliability:RS11")
@pytest.mark.parametrize("close", [CurrentEngine.close_idle_replaced_engines, CurrentEngine.close_replaced_engines])
async def test_failed_close_of_a_replaced_engine_leaves_none_open(close: Any) -> None:
    models = [FailsToClose([]) for _ in range(2)]
    first, second, last = (Engine(models=model) for model in (*models, ScriptedModel([])))
    engines: Any = CurrentEngine(first, None, Versions(second, last))
    with engines.hold_current_engine():
        await engines.rebuild_if_files_changed()
        with engines.hold_current_engine():
            await engines.rebuild_if_files_changed()

    with pytest.raises(OSError, match="cannot close"):
        await close(engines)
    assert [1, 1] == [model.closed for model in models]
    await last.aclose()
