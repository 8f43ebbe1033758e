"""
`docs/web-pages.md` is so: the application that it names and its page show a run with a question, which is answered in a real browser.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepengine.testing import ScriptedModel
from tests.debugging.browser import CHROMIUM, browser
from tests.waits import until

from .pages import ROOT, blocks_of, page

EXAMPLE = ROOT / "examples" / "web_page"
SECONDS = 30


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, str]]:
    """
    Run the application of the page in a process of its own, and give its port and the path of its link.
    """
    for name in ("app.py", "page.html", "page.js"):
        shutil.copy(EXAMPLE / name, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--log-level", "warning"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    said = folder / "said.txt"
    with said.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env={**kept, "PYTHONPATH": str(ROOT)}, stdout=out)

    def is_up() -> bool:
        assert process.poll() is None
        with socket.socket() as door:
            return door.connect_ex(("127.0.0.1", port)) == 0

    def link() -> str:
        return said.read_text().partition(":8000")[2].strip()

    try:
        until(is_up)
        yield port, until(link)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)


def entered(port: int, link: str) -> str:
    """
    Exchange the code of the link, and return the token that it gives.
    """
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        code = json.dumps({"code": link.removeprefix("/#login=")})
        connection.request("POST", "/login", code, {"content-type": "application/json"})
        response = connection.getresponse()
        said = json.loads(response.read())
        assert (200, None) == (response.status, response.getheader("set-cookie"))
        return str(said["token"])


def posted(port: int, token: str, path: str, body: Any) -> tuple[int, list[Any]]:
    """
    Post JSON as a page of the same origin, and return the status and what came as server-sent events.
    """
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        lines = response.read().decode().split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return response.status, [json.loads(line) for line in data if line != "[DONE]"]


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF42", "interfaces:IF43", "interfaces:IF44")
def test_the_application_serves_both_protocols_and_resumes_after_a_restart(tmp_path: Path) -> None:
    assert "(../examples/web_page/app.py)" in page("web-pages.md")
    assert {"ts", "sh", "python"} == {block.kind for block in blocks_of(page("web-pages.md"))}
    user = {"id": "1", "role": "user", "content": "Paint."}
    with served(tmp_path) as (port, link):
        token = entered(port, link)
        assert 401 == posted(port, "", "/ag-ui/painter", {"threadId": "t", "runId": "r", "messages": [user]})[0]
        assert 422 == posted(port, token, "/ag-ui/painter", {"threadId": "t", "runId": "r", "messages": []})[0]
        _, asked = posted(port, token, "/ag-ui/painter", {"threadId": "t", "runId": "r", "messages": [user]})
        (interrupt,) = asked[-1]["outcome"]["interrupts"]
        said = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Paint."}]}
        _, chunks = posted(port, token, "/vercel/painter", {"id": "v", "messages": [said]})
        (approval,) = [chunk for chunk in chunks if chunk["type"] == "tool-approval-request"]
    with served(tmp_path) as (port, link):
        token = entered(port, link)
        entry = {"interruptId": interrupt["id"], "status": "resolved", "payload": {"approved": True}}
        body = {"threadId": "t", "runId": "r2", "messages": [], "resume": [entry]}
        assert "The door is red now." == posted(port, token, "/ag-ui/painter", body)[1][-1]["result"]
        assert 409 == posted(port, token, "/ag-ui/painter", body)[0]
        part = {
            "type": "dynamic-tool",
            "state": "approval-responded",
            "approval": {"id": approval["approvalId"], "approved": True},
        }
        answer = {"id": "v", "messages": [said, {"id": "m", "role": "assistant", "parts": [part]}]}
        _, chunks = posted(port, token, "/vercel/painter", answer)
        assert ("m", "stop") == (chunks[0]["messageId"], chunks[-1]["finishReason"])
        assert "The door is red now." in [chunk.get("output") for chunk in chunks]


async def test_the_function_of_another_server_answers_a_page() -> None:
    (block,) = [block.text for block in blocks_of(page("web-pages.md")) if block.kind == "python"]
    names: dict[str, Any] = {"__name__": "page", "model": ScriptedModel(["The door is red.", "Still red."])}
    exec(block.replace("sessions=sessions)", "sessions=sessions, models=model)"), names)

    async def ask(text: str) -> list[dict[str, Any]]:
        message = {"id": text, "role": "user", "content": text}
        body = {
            "threadId": "t",
            "runId": "r",
            "state": {},
            "messages": [message],
            "tools": [],
            "context": [],
            "forwardedProps": {},
        }
        return [json.loads(line.removeprefix("data: ")) async for line in names["respond"](body)]

    first, second = await ask("Paint."), await ask("And now?")

    assert ("The door is red.", "Still red.") == (first[-1]["result"], second[-1]["result"])
    assert "Paint." == names["model"].calls[-1].messages[0].text
    await names["engine"].aclose()


@pytest.mark.deep
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")
@pytest.mark.spec("interfaces:IF20", "interfaces:IF43", "evaluation:JG45")
def test_a_question_answered_in_a_browser_resumes_the_run(tmp_path: Path) -> None:
    with served(tmp_path) as (port, link), browser(tmp_path) as tab:
        tab.call("Page.navigate", url=f"http://127.0.0.1:{port}{link}")
        tab.wait("document.readyState === 'complete' && document.forms.length === 1")
        assert "/" == tab.run("location.pathname")
        tab.run("document.getElementById('prompt').value = 'Paint <img src=x onerror=alert(1)>'")
        tab.run("document.querySelector('form button').click()")
        tab.wait("document.querySelectorAll('.question button').length === 2")
        text = tab.run("document.getElementById('log').innerText")
        assert "I will." in text
        assert "May paint run?" in text
        assert '{"what":"door","colour":"red"}' in text
        assert "Paint <img src=x onerror=alert(1)>" in text
        assert 0 == tab.run("document.images.length")
        tab.run("document.querySelector('.question button').click()")
        tab.wait("document.getElementById('log').innerText.includes('\\nThe door is red now.')")
        assert "→ The door is red now." in tab.run("document.getElementById('log').innerText")
        assert 0 == tab.run("document.querySelectorAll('.error').length")


# --- odd requests -------------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    None, 0, -1, 1.5, True, "", "x", "\0", "../x", "a/b", "x" * 5000, "\u202e", [], [1], [None], ["x"], {}, {"a": 1}, [[]], [{}], {"type": 5}, 1e308, 10**30,
]  # fmt: skip
SAID: dict[str, list[dict[str, Any]]] = {
    "/ag-ui/painter": [
        {"threadId": "t", "runId": "r", "messages": [{"id": "m", "role": "user", "content": "Paint"}], "state": {}, "tools": [], "context": [], "forwardedProps": {}},
        {"threadId": "t", "runId": "r", "messages": [], "resume": [{"interruptId": "q", "status": "resolved", "payload": {"approved": True}}], "state": {}, "tools": [], "context": [], "forwardedProps": {}},
        {
            "threadId": "t2", "runId": "r", "state": {"colours": {"all": ["red"]}}, "context": [{"description": "d", "value": "v"}], "forwardedProps": {"a": 1},
            "tools": [{"name": "where", "description": "Say where.", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}],
            "messages": [{"id": "a", "role": "assistant", "toolCalls": [{"id": "c1", "type": "function", "function": {"name": "where", "arguments": "{}"}}]}, {"id": "b", "role": "tool", "toolCallId": "c1", "content": "Rome", "error": "x"}, {"id": "m", "role": "user", "content": "Paint"}],
        },
    ],
    "/ag-ui/painter/connect": [{"threadId": "t", "runId": "r", "messages": [], "state": {}, "tools": [], "context": []}],
    "/vercel/painter": [
        {"id": "c", "messages": [{"id": "m", "role": "user", "parts": [{"type": "text", "text": "Paint"}]}], "trigger": "submit-message", "messageId": None},
        {"id": "c", "messages": [{"id": "m", "role": "assistant", "parts": [{"type": "tool-paint", "toolCallId": "t", "state": "approval-responded", "approval": {"id": "q", "approved": True}, "input": {}}]}]},
    ],
}  # fmt: skip
RAW = [
    b"", b"{", b"nul", b"\xff\xfe", b"[]", b'"x"', b"NaN", b"{}{}", b"[" * 100_000, b'{"id":1e999}', b'{"a":' + b"9" * 5000 + b"}", '{"id":"x"}'.encode("utf-16"), b"\xef\xbb\xbf{}",
    b'{"id":"\\ud800","messages":[{"id":"m","role":"user","parts":[{"type":"text","text":"\\ud800"}]}]}', b'{"threadId":"\\ud800","runId":"r","messages":[],"state":{},"tools":[],"context":[],"forwardedProps":{}}',
    b'{"id":"x","messages":[{"id":"m","role":"user","parts":[{"type":"text","text":"' + b"x" * 1_000_000 + b'"}]}]}',
]  # fmt: skip
GONE = object()


def changed(said: Any) -> Iterator[Any]:
    """
    Give a request with another value in each place, and without what stands there.
    """
    yield from ODD
    places = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    for key, member in places:
        for other in [*changed(member), GONE]:
            copy = said.copy()
            if other is GONE:
                del copy[key]
            else:
                copy[key] = other
            yield copy


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """
    The application of the page, in this process.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    for name in ("page.html", "page.js"):
        Path(name).write_text("")
    made: dict[str, Any] = {"__name__": "app", "__file__": str(tmp_path / "app.py")}
    exec(compile((EXAMPLE / "app.py").read_text(encoding="utf-8"), "app.py", "exec", dont_inherit=True), made)
    return made


def answered(application: dict[str, Any], requests: list[tuple[str, str, dict[str, Any]]]) -> dict[str, int]:
    from starlette.testclient import TestClient

    from stepengine.server import Caller

    found = {}
    with TestClient(application["app"], "http://127.0.0.1", raise_server_exceptions=False) as client:
        link = application["logins"].make_login_link(Caller("you", {"run", "read", "answer"}))
        entered = client.post("/login", json={"code": link.removeprefix("/#login=")})
        client.headers["authorization"] = f"Bearer {entered.json()['token']}"
        for method, url, more in requests:
            found[f"{method} {url} {more}"[:300]] = client.request(method, url, **more).status_code
    return found


def odd_requests() -> list[tuple[str, str, dict[str, Any]]]:
    kinds = (
        "application/json",
        "text/plain",
        "application/json; charset=utf-16",
        "multipart/form-data; boundary=x",
        "",
    )
    by_value = [
        ("POST", url, {"json": other}) for url, given in SAID.items() for one in given for other in changed(one)
    ]
    raw = [
        ("POST", url, {"content": each, "headers": {"content-type": kind}})
        for url in SAID
        for each in RAW
        for kind in kinds
    ]
    methods = [
        (method, url, {})
        for url in SAID
        for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "ODD")
    ]
    return [*raw, *methods, *by_value]


@pytest.mark.spec("interfaces:IF43", "interfaces:IF44")
@pytest.mark.deep
def test_malformed_requests_cause_no_server_error(application: dict[str, Any]) -> None:
    requests = odd_requests()

    found = answered(application, requests[::3])

    assert len(requests) > 1_000
    assert {} == {request: status for request, status in found.items() if status >= 500}
    assert 200 in found.values()
