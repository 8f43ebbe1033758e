"""
Remote agents: agents of a server that `stepengine serve` is stand where agents stand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("starlette")

from stepengine import AgentCall, AgentDefinition, Engine, RunStatus
from stepengine.adapters.external import RemoteAgent, remote
from stepengine.errors import DefinitionError, ExternalAgentError
from stepengine.journal import FileJournal
from stepengine.permissions import EveryCall, Policy, Rule
from tests.server.served import Served
from tests.servers import Quiet, served
from tests.waits import until_async as until

THERE = Path(__file__).with_name("there.py")
ROOT = THERE.parents[3]


class Remote:
    """
    A server of the agents of ``there.py``, and agents here that stand for them.
    """

    def __init__(self, folder: Path) -> None:
        self.server = Served(folder, folder / "runs", agents=THERE)
        self.token = self.server.token("leader", ["read", "run", "answer"])

    def agent(self, name: str, **options: Any) -> RemoteAgent:
        return RemoteAgent(name, url=self.server.url, token=self.token, **options)

    def views(self) -> list[dict[str, Any]]:
        import httpx2

        headers = {"authorization": f"Bearer {self.token}"}
        found = httpx2.get(f"{self.server.url}/runs", headers=headers, trust_env=False, timeout=30)
        listed: list[dict[str, Any]] = found.json()["runs"]
        return listed


@pytest.fixture
async def there(tmp_path: Path) -> Any:
    made = Remote(tmp_path)
    made.server.start()
    try:
        await made.server.ready()
        yield made
    finally:
        made.server.stop()


def gone(name: str) -> RemoteAgent:
    """
    The same agent where its server is not.
    """
    return RemoteAgent(name, url="http://127.0.0.1:9", token="t" * 20, away_seconds=0.2)


def leading(agent: AgentDefinition, prompt: str = "hello", **params: Any) -> AgentDefinition:
    def handle(ctx: Any) -> Any:
        return (yield from AgentCall(agent, prompt, params or None))

    return AgentDefinition("boss", spawnable_agents=[agent], handle_steps=handle)


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF160")
async def test_remote_call_returns_output_and_events_and_replays_offline(there: Remote, tmp_path: Path) -> None:
    journal, events = tmp_path / "run.jsonl", []
    boss = leading(there.agent("talking"), "Look around.", depth=3)
    result = await Engine([boss], observers=[events.append]).run("boss", journal=FileJournal(journal))

    assert {"said": "All of it is there.", "params": {"depth": 3}} == result.unwrap()
    shown = [(one.path, one.tool_name) for one in events if one.type == "tool_finished" and one.tool_name == "look"]
    assert [("0", "look")] == shown
    assert "All of it is there." == "".join(one.text for one in events if one.type == "text_delta" and one.path == "0")
    assert (1_110, Decimal("0.0050")) == (result.usage.total_tokens, result.cost)
    assert 1 == there.server.world.done("look")["the shop"]

    recorded = journal.read_text()
    assert ("the shop is there" in recorded, there.token in recorded) == (True, False)
    there.server.stop()
    again = await Engine([leading(gone("talking"), "Look around.", depth=3)]).replay(journal)
    assert (result.unwrap(), result.usage, result.cost) == (again.unwrap(), again.usage, again.cost)


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF160")
async def test_cost_of_a_failed_remote_run_is_counted(there: Remote) -> None:
    result = await Engine([there.agent("breaking")]).run("breaking", "go")

    assert (RunStatus.FAILED, 10, Decimal("0.0005")) == (result.status, result.usage.input_tokens, result.cost)


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF161")
async def test_remote_questions_are_asked_locally_and_answers_returned(there: Remote, tmp_path: Path) -> None:
    asked = []

    class Person:
        def ask(self, question: Any) -> str:
            asked.append((question.text, question.options, question.details))
            return {"Which size?": "L", "What else?": "bag, bow"}.get(question.text, "yes")

    journal, events = tmp_path / "run.jsonl", []
    engine = Engine([leading(there.agent("asking"), "Rome")], interactor=Person(), observers=[events.append])
    result = await engine.run("boss", journal=FileJournal(journal))

    assert ["L", "bag, bow", "deployed to Rome"] == result.unwrap()
    assert [("S", "L"), ("bag", "card", "bow"), ("yes", "no")] == [options for _, options, _ in asked]
    assert "Rome" in str(asked[2][2])
    shown = [one.tool_name for one in events if one.type == "tool_finished" and one.tool_name in ("look", "deploy")]
    assert ["look", "deploy"] == shown
    assert result.unwrap() == (await Engine([leading(gone("asking"), "Rome")]).replay(journal)).unwrap()


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF161")
async def test_remote_question_survives_our_process_and_takes_late_answers(there: Remote, tmp_path: Path) -> None:
    journal, boss = tmp_path / "run.jsonl", leading(there.agent("asking"), "Rome")
    result = await Engine([boss]).run("boss", journal=FileJournal(journal))
    answers = []
    for answer in ("S", "card", "no"):
        (question,) = result.pending_questions
        assert RunStatus.SUSPENDED is result.status
        answers.append(question.text)
        result = await Engine([leading(there.agent("asking"), "Rome")]).resume(journal, answers={question.id: answer})

    size, extras, done = result.unwrap()
    assert ("S", "card", "no: ", {}) == (size, extras, done[:4], dict(there.server.world.done("deploy")))
    assert 1 == len(there.views())


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF161")
async def test_remote_permissions_can_be_judged_by_the_local_policy(there: Remote) -> None:
    agent = there.agent("asking", permissions="policy")
    answers = {"Which size?": "S", "What else?": "bag"}

    class Person:
        def ask(self, question: Any) -> str | None:
            return answers.get(question.text)

    for rule, came in (
        (Rule.allow_tool("asking_execute"), "deployed to Rome"),
        (Rule.deny_tool("asking_execute"), "no: "),
    ):
        engine = Engine([leading(agent, "Rome")], permissions=Policy([rule]), interactor=Person())
        assert (await engine.run("boss")).unwrap()[2].startswith(came)
    assert 1 == there.server.world.done("deploy")["Rome"]


@pytest.mark.spec("interfaces:IF163")
@pytest.mark.deep
async def test_cancelling_the_run_cancels_the_remote_run(there: Remote) -> None:
    engine = Engine([leading(there.agent("holding"), "it")])
    async with engine.start("boss") as handle:
        await until(lambda: there.server.world.done("begun")["it"])
        handle.interrupt()
        result = await handle.result()

    assert RunStatus.CANCELLED is result.status
    await until(lambda: ["cancelled"] == [one["status"] for one in there.views()])
    assert (1, 0) == (there.server.world.done("cancelled")["it"], there.server.world.done("held")["it"])


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF163")
async def test_resume_waits_for_the_ending_remote_run_before_restarting(
    there: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, boss = tmp_path / "run.jsonl", leading(there.agent("holding"), "it")
    linger, watch = there.server.world.file.with_suffix(".linger"), remote._RemoteRun._record_events_until_question
    linger.touch()
    handle = Engine([boss]).start("boss", journal=FileJournal(journal))
    await until(lambda: there.server.world.done("begun")["it"])
    await handle.shutdown()
    await until(lambda: there.server.world.done("cancelled")["it"])

    async def watched(turn: remote._RemoteRun) -> bool:
        linger.unlink(missing_ok=True)  # only when it was found, and goes on by what it says of itself
        return await watch(turn)

    monkeypatch.setattr(remote._RemoteRun, "_record_events_until_question", watched)
    there.server.world.file.with_suffix(".go").touch()
    result = await Engine([boss]).resume(journal)

    assert ("held it", ["cancelled", "completed"]) == (result.unwrap(), sorted(one["status"] for one in there.views()))


SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from stepengine import AgentCall, AgentDefinition, Engine
from stepengine.journal import FileJournal
from stepengine.adapters.external import RemoteAgent

url, journal = sys.argv[1], Path(sys.argv[2])
agent = RemoteAgent("holding", url=url)


def handle(ctx):
    return (yield from AgentCall(agent, ctx.prompt))


boss = AgentDefinition("boss", spawnable_agents=[agent], handle_steps=handle)


async def main():
    engine = Engine([boss])
    if journal.exists():
        result = await engine.resume(journal)
    else:
        result = await engine.run("boss", "it", journal=FileJournal(journal))
    print(result.unwrap())


asyncio.run(main())
"""


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF163")
async def test_resume_after_a_kill_finds_the_same_remote_run(there: Remote, tmp_path: Path) -> None:
    script, journal = tmp_path / "lead.py", tmp_path / "run.jsonl"
    script.write_text(SCRIPT)

    def begun() -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "STEPENGINE_REMOTE_TOKEN": there.token}
        words = [sys.executable, str(script), there.server.url, str(journal)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)

    first = begun()
    await until(lambda: there.server.world.done("begun")["it"])
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (before,) = there.views()
    assert "running" == before["status"]

    second = begun()
    there.server.world.file.with_suffix(".go").touch()
    printed, _ = await asyncio.to_thread(second.communicate)
    assert ("held it\n", [before["run_id"]]) == (printed, [one["run_id"] for one in there.views()])
    assert 1 == there.server.world.done("begun")["it"]
    assert there.token not in journal.read_text()


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF163")
async def test_remote_run_is_followed_across_a_server_restart(there: Remote) -> None:
    server = there.server
    answers = {"Which size?": "L", "What else?": "bag", "": "yes"}
    given: set[str] = set()
    async with Engine([leading(there.agent("asking"), "Rome")]).start("boss", wait_for_answers=None) as handle:
        while not handle.done:
            for question in handle.questions:
                if question.id in given:
                    continue
                if not given:
                    server.kill()
                handle.answer(question.id, answers.get(question.text, "yes"))
                if not given:
                    # The answer is tried, and finds nobody, before somebody is there again.
                    await asyncio.sleep(0.3)
                    server.start()
                given.add(question.id)
            await asyncio.sleep(0.02)
        result = await handle.result()

    assert (["L", "bag", "deployed to Rome"], 1) == (result.unwrap(), server.world.done("deploy")["Rome"])


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def refused(agent: RemoteAgent, prompt: str = "hello") -> ExternalAgentError:
    result = await Engine([agent]).run(agent.id, prompt)
    assert RunStatus.FAILED is result.status
    assert isinstance(result.error, ExternalAgentError), result.error
    return result.error


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF164")
async def test_refusals_and_failures_of_the_server_are_reported(there: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    url = there.server.url
    error = await refused(RemoteAgent("talking", url=url, token="s" * 40))
    assert ("auth_required", True, False) == (error.kind, "token" in error.message, "s" * 40 in error.message)
    monkeypatch.delenv("STEPENGINE_REMOTE_TOKEN", raising=False)
    error = await refused(RemoteAgent("talking", url=url))
    assert ("auth_required", True) == (error.kind, "STEPENGINE_REMOTE_TOKEN" in error.message)
    reader = there.server.token("reader", ["read"])
    assert "auth_required" == (await refused(RemoteAgent("talking", url=url, token=reader))).kind
    error = await refused(there.agent("nobody"))
    assert ("start", True) == (error.kind, "there is no agent 'nobody'" in error.message)
    result = await Engine([leading(there.agent("talking"), "x", depth="deep")]).run("boss")
    assert "depth" in str(result.error), result.error
    error = await refused(there.agent("breaking"))
    assert ("failed", True) == (error.kind, "nobody has told me how" in error.message)
    assert "start" == (await refused(gone("talking"))).kind


@contextlib.contextmanager
def odd_server(way: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """
    Serve what somebody else might have written, badly, as a function of the request; give the address and what was asked.
    """
    asked: list[tuple[str, str]] = []

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append((self.command, self.path))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                way(self)

        do_POST = do_GET  # noqa: N815 - likewise

    with served(Handler) as url:
        yield url, asked


def told(request: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    request.send_response(status)
    for name, value in {"content-type": "application/json", **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


STARTED = json.dumps({"run_id": "r1", "events": "/x", "is_new": True}).encode()
VIEW = {"status": "running", "questions": [], "output": None, "text": "", "error": ""}


def after_start(way: Callable[[BaseHTTPRequestHandler], None]) -> Callable[[BaseHTTPRequestHandler], None]:
    def do(request: BaseHTTPRequestHandler) -> None:
        told(request, 202, STARTED) if request.path == "/runs" else way(request)

    return do


def endless(request: BaseHTTPRequestHandler) -> None:
    if request.path.endswith("/cancel"):
        told(request, 202, b"{}")
        return
    request.send_response(200)
    request.send_header("content-type", "text/event-stream" if request.path.endswith("/events") else "application/json")
    request.end_headers()
    while True:
        request.wfile.write(b"data: " + b"x" * 65_536)


def viewed(**changed: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    def do(request: BaseHTTPRequestHandler) -> None:
        if request.path.endswith("/events"):
            told(request, 204, b"")
        else:
            told(request, 200, json.dumps({**VIEW, **changed}).encode())

    return do


def stream(lines: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda request: told(request, 200, lines, content_type="text/event-stream")


WAYS: dict[str, tuple[Callable[[BaseHTTPRequestHandler], None], str]] = {
    "another API": (lambda request: told(request, 202, b'{"id": 1}'), "POST /runs returned no run id"),
    "a path for an id": (lambda request: told(request, 202, b'{"run_id": "../x", "is_new": true}'), "POST /runs returned no run id"),
    "a page": (lambda request: told(request, 200, b"<html>", content_type="text/html"), "without a JSON object"),
    "deep": (lambda request: told(request, 202, b"[" * 1_000_000), "without a JSON object"),
    "an unknown status": (after_start(viewed(status="dreaming")), "a run with the status 'dreaming'"),
    "odd questions": (after_start(viewed(questions=[{"id": 7}])), "a question without an id"),
    "no events": (after_start(lambda request: told(request, 200, b"{}")), "events that are not an event stream"),
    "no JSON": (after_start(stream(b"data: x\n\n")), "an event that is not a JSON object with a type"),
    "an endless answer": (endless, "an answer of more than 1,000,000 bytes"),
    "an endless event": (after_start(endless), "an event of more than 1,000,000 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.spec("interfaces:IF164")
async def test_invalid_server_answers_fail_the_call_with_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_BYTES", 1_000_000)
    monkeypatch.setattr(remote, "EVENT_BYTES", 1_000_000)
    way, words = WAYS[name]
    with odd_server(way) as (url, _):
        error = await refused(RemoteAgent("other", url=url, token="t" * 20))

    assert ("protocol", True) == (error.kind, words in error.message), error.message


def playing(
    events: list[dict[str, Any]], questions: Sequence[dict[str, Any]] = ()
) -> Callable[[BaseHTTPRequestHandler], None]:
    """
    Be a run with these events, which ends when all its questions are answered.
    """
    answered: list[str] = []

    def do(request: BaseHTTPRequestHandler) -> None:
        if request.path.endswith("/events"):
            seen = int(request.headers.get("last-event-id") or 0)
            lines = [
                f"id: {n}\ndata: {json.dumps({'path': '', **one})}\n\n" for n, one in enumerate(events, 1) if n > seen
            ]
            told(request, 200, "".join(lines).encode(), content_type="text/event-stream")
            return
        if request.path.endswith("/answers"):
            answered.append(request.path)
        left = questions[len(answered) :]
        told(
            request, 200, json.dumps({**VIEW, "status": "running" if left else "completed", "questions": left}).encode()
        )

    return after_start(do)


def requested(number: int, category: str, **details: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Return the event of a permission request, and its question.
    """
    event = {"type": "permission_requested", "question": {"id": f"q{number}"}, "category": category}
    parts = [{"kind": "action", "name": "", "value": f"Do {number}"}]
    return event, {"id": f"q{number}", "text": "May it?", "tool_name": "do", "details": details, "preview_parts": parts}


@pytest.mark.spec("interfaces:IF161")
async def test_simultaneous_remote_permissions_are_judged_by_their_own_categories() -> None:
    (read, first), (execute, second) = requested(1, "read"), requested(2, "execute")
    seen: list[Any] = []
    with odd_server(playing([read, execute], [first, second])) as (url, _):
        agent = RemoteAgent("other", url=url, token="t" * 20, permissions="policy")
        rules = [Rule.deny_tool("other_execute"), Rule("allow", EveryCall())]
        await Engine([agent], permissions=Policy(rules), observers=[seen.append]).run("other", "go")

    judged = [(one.tool_name, one.decision) for one in seen if one.type == "permission_decided"]
    assert {("other_read", "allow"), ("other_execute", "deny")} == {one for one in judged if one[0] != "other"}
    titles = [one.input["title"] for one in seen if one.type == "tool_started" and one.tool_name == "other_read"]
    assert ["Do 1"] == titles


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "details"),
    [
        ("read", {"paths": [*[f"open/{number}" for number in range(1_000)], "closed/key"]}),
        ("read", {"path": "open/../" * 300 + "closed/key"}),
        ("execute", {"command": "git", "args": ["push", "--force"]}),
        ("execute", {"cmd": ["git"], "args": "push --force"}),
        ("execute", {"command": "git status; " * 2_000 + "git push"}),
    ],
    ids=["many paths", "long path", "arguments", "arguments as text", "long command"],
)
@pytest.mark.spec("interfaces:IF121", "interfaces:IF161")
async def test_rules_judge_all_paths_and_words_of_a_request(kind: str, details: dict[str, Any]) -> None:
    event, question = requested(1, kind, **details)
    seen: list[Any] = []
    rules = [Rule.deny_path("closed/**"), Rule.deny_command(["git", "push"]), Rule("allow", EveryCall())]
    with odd_server(playing([event], [question])) as (url, _):
        agent = RemoteAgent("other", url=url, token="t" * 20, permissions="policy")
        await Engine([agent], permissions=Policy(rules), observers=[seen.append]).run("other", "go")

    judged = [(one.tool_name, one.decision) for one in seen if one.type == "permission_decided"]
    assert (f"other_{kind}", "deny") in judged


@pytest.mark.spec("interfaces:IF161")
async def test_remote_permission_too_long_for_rules_is_denied(caplog: pytest.LogCaptureFixture) -> None:
    event, question = requested(1, "read", paths=[f"folder/{number}" * 10 for number in range(5_000)])
    with odd_server(playing([event], [question])) as (url, asked):
        agent = RemoteAgent("other", url=url, token="t" * 20, permissions="policy")
        result = await Engine([agent]).run("other", "go")

    assert (RunStatus.COMPLETED, 1) == (result.status, len([path for _, path in asked if path.endswith("/answers")]))
    assert "was denied: 'Do 1' has more than 200,000 characters of paths" in caplog.text


@pytest.mark.spec("interfaces:IF160")
async def test_interrupted_remote_reply_leaves_only_its_retry() -> None:
    reply = [
        {"type": "text_delta", "seq": 1, "text": "First."},
        {"type": "text_completed", "seq": 1, "text": "First."},
        {"type": "thinking_delta", "seq": 2, "text": "hm"},
        {"type": "text_delta", "seq": 2, "text": "Hel"},
        {"type": "reply_discarded", "seq": 2, "model": "m/m"},
        {"type": "text_completed", "seq": 2, "text": "Bonjour"},
        {"type": "run_finished"},
    ]
    seen: list[Any] = []
    with odd_server(playing(reply)) as (url, _):
        agent = RemoteAgent("other", url=url, token="t" * 20)
        result = await Engine([agent], observers=[seen.append]).run("other", "go")

    shown = ""
    for event in seen:
        shown = (
            "" if event.type == "reply_discarded" else shown + getattr(event, "text", "") * (event.type == "text_delta")
        )
    assert "First.Bonjour" == shown
    (turn,) = [one.result.data for one in result.tool_calls]
    assert ["First.", "Bonjour"] == [one["text"] for one in turn["transcript"]]


@pytest.mark.spec("interfaces:IF160")
@pytest.mark.parametrize("pieces", [["Hel"], ["llo"], ["He", "o"], ["Hello"], []])
@pytest.mark.parametrize("kind", ["text", "thinking"])
async def test_completed_remote_text_replaces_pieces_with_lost_ones(kind: str, pieces: list[str]) -> None:
    whole = {"type": f"{kind}_completed", "seq": 1, "text": "Hello"}
    reply = [
        {"type": "text_completed", "seq": 1, "text": "A text of the handler. "},
        *[{"type": f"{kind}_delta", "seq": 1, "text": piece} for piece in pieces],
        whole,
        whole,
        {"type": "text_completed", "seq": 2, "text": " Bye."},
        {"type": "run_finished"},
    ]
    seen: list[Any] = []
    with odd_server(playing(reply)) as (url, _):
        agent = RemoteAgent("other", url=url, token="t" * 20)
        result = await Engine([agent], observers=[seen.append]).run("other", "go")

    (turn,) = [one.result.data for one in result.tool_calls]
    said = "".join([text for entry in turn["transcript"] for text in entry.values()])
    assert "A text of the handler. Hello Bye." == said
    completed = [one.text for one in seen if one.type == "text_completed"]
    assert ["A text of the handler. Hello Bye." if kind == "text" else "A text of the handler.  Bye."] == completed


@pytest.mark.spec("interfaces:IF160")
async def test_remote_transcript_has_the_input_of_each_call() -> None:
    started = {"type": "tool_started", "tool_call_id": "c1", "tool_name": "look", "input": {"name": "shop"}}
    finished = {"type": "tool_finished", "tool_call_id": "c1", "tool_name": "look", "result": {"status": "ok"}}
    with odd_server(playing([started, finished, {"type": "run_finished"}])) as (url, _):
        result = await Engine([RemoteAgent("other", url=url, token="t" * 20)]).run("other", "go")

    (turn,) = [one.result.data for one in result.tool_calls]
    assert ['{"name": "shop"}'] == [one["input"] for one in turn["transcript"]]


@pytest.mark.parametrize("event_id", ["\u00e9", "a\0b", "a ", "x" * 1_001])
@pytest.mark.spec("interfaces:IF164")
async def test_event_id_invalid_as_a_header_fails_the_call(event_id: str) -> None:
    events = stream(f'id: {event_id}\ndata: {{"type": "step_started"}}\n\n'.encode())

    def answer(request: BaseHTTPRequestHandler) -> None:
        (events if request.path.endswith("/events") else viewed(status="running"))(request)

    with odd_server(after_start(answer)) as (url, _):
        error = await refused(RemoteAgent("other", url=url, token="t" * 20, away_seconds=2))

    assert ("protocol", True) == (error.kind, "an event id with invalid characters" in error.message), error.message


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.spec("interfaces:IF164")
async def test_redirect_is_not_followed_and_the_token_stays_here(status: int) -> None:
    with (
        odd_server(lambda request: told(request, 202, STARTED)) as (elsewhere, followed),
        odd_server(lambda request: told(request, status, b"", location=f"{elsewhere}/runs")) as (url, asked),
    ):
        error = await refused(RemoteAgent("other", url=url, token="t" * 20))

    assert ("protocol", [], True) == (
        error.kind,
        followed,
        f"redirects POST /runs to '{elsewhere}/runs'; the token is not sent there" in error.message,
    )
    assert 1 == len(asked)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF164")
async def test_absent_server_fails_the_call_and_warns_it_may_continue() -> None:
    with odd_server(after_start(lambda request: told(request, 503, b""))) as (url, _):
        error = await refused(RemoteAgent("other", url=url, token="t" * 20, away_seconds=0.1))

    assert ("ended", True) == (error.kind, "the run of 'other' may continue there" in error.message)


@pytest.mark.spec("interfaces:IF164")
def test_invalid_remote_agent_options_raise_and_copies_work() -> None:
    fine: dict[str, Any] = {"url": "https://agents.test/below/", "token": "t" * 20}
    wrong: list[dict[str, Any]] = [
        {"url": None}, {"url": "agents.test"}, {"url": "ftp://agents.test"}, {"url": "https://"}, {"url": "https://a:b@agents.test"},
        {"url": "https://agents.test/?x=1"}, {"url": "https://agents.test:http"}, {"url": "http://agents.test"}, {"token": ""},
        {"token": "a\nb"}, {"token": "\u00e4"}, {"permissions": "all"}, {"away_seconds": 0}, {"id": "x" * 57},
    ]  # fmt: skip
    for one in wrong:
        given = {"id": "other", **fine, **one}
        with pytest.raises(DefinitionError) as refusal:
            RemoteAgent(given.pop("id"), **given)
        assert "a:b" not in str(refusal.value)
    copy = attrs.evolve(RemoteAgent("other", **fine), description="Reviews.")
    assert ("Reviews.", 6) == (copy.description, len(copy.tools))
    assert "t" * 20 not in repr(copy)
