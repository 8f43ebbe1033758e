"""
A surface that asks people over HTTP: a page shows the open question and posts the answer.

`HttpSurface` has one method, `ask`. It runs in a thread and may wait for as long as the person needs. The engine checks each answer and
asks again if it is invalid. The page shows the choices and the preview of `question_to_json`, and posts the answer of a choice or a text.

``python examples/extending/surface.py`` needs no key and no network: below, a thread plays the person at the page.
"""

import json
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

from stepengine import AgentDefinition, AnswerLike, Ask, Engine, Question, StepContext, Steps, call, tool
from stepengine.permissions import Policy
from stepengine.questions import answer_from_json, question_to_json


class HttpSurface(ThreadingHTTPServer):
    """
    Serves the open question at ``/`` as JSON; ``POST /`` answers it, ``DELETE /`` leaves. Use it in a ``with`` block.
    """

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.waiting: list[tuple[Question, Queue[AnswerLike | None]]] = []
        self.has_left = False
        self.changing = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def ask(self, question: Question, /) -> AnswerLike | None:
        """Show a question and return the answer; ``None`` when the person has left, so that it stays open."""
        answers: Queue[AnswerLike | None] = Queue()
        with self.changing:
            if self.has_left:
                return None
            self.waiting.append((question, answers))
        return answers.get()

    def answer(self, said: AnswerLike) -> bool:
        """Answer the question that is shown; return False if there is none."""
        with self.changing:
            if not self.waiting:
                return False
            _, answers = self.waiting.pop(0)
        answers.put(said)
        return True

    def leave(self) -> None:
        """Answer no more questions."""
        with self.changing:
            self.has_left, left, self.waiting = True, self.waiting, []
        for _, answers in left:
            answers.put(None)

    def server_close(self) -> None:
        """Stop the server."""
        self.leave()
        self.shutdown()
        self._thread.join()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    """One request of the page."""

    server: HttpSurface

    def do_GET(self) -> None:
        """Send the open question."""
        with self.server.changing:
            question = self.server.waiting[0][0] if self.server.waiting else None
        self._reply(200, json.dumps(question and question_to_json(question)).encode())

    def do_POST(self) -> None:
        """Take an answer; 422 if it is none, 409 if no question is open, as after another answer."""
        said = answer_from_json(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._reply(422 if said is None else 200 if self.server.answer(said) else 409)

    def do_DELETE(self) -> None:
        """Leave."""
        self.server.leave()
        self._reply(200)

    def _reply(self, status: int, data: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def request(port: int, method: str, body: Any = None) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, "/", None if body is None else json.dumps(body))
        data = connection.getresponse().read()
    finally:
        connection.close()
    return json.loads(data) if data else None


def play_person(port: int, replies: list[str]) -> None:
    """Answer each question with the next reply, as a page would, and leave before the one behind the last."""
    for said in replies:
        while (shown := request(port, "GET")) is None:
            time.sleep(0.005)
        print(shown["text"], *[part["value"] for part in shown["preview_parts"]], said)
        request(port, "POST", choose(shown, said))
    request(port, "DELETE")


def choose(shown: dict[str, Any], said: str) -> Any:
    """Return the answer of the choice that the person clicks, or the text that they type."""
    kind = {"yes": "allow", "no": "deny"}.get(said) if shown["tool_name"] else None
    clicked = [one["answer"] for one in shown["choices"] if kind == one["kind"] or said == one["label"]]
    return clicked[0] if clicked else said


@tool(category="write")
def charge(cents: int) -> str:
    """Charge the customer."""
    return f"{cents / 100:.2f}"


def order(ctx: StepContext) -> Steps[str]:
    size = yield from Ask("How large?", options=["small", "large"])
    name = yield from Ask("For whom?")
    price = yield from call(charge, cents=320)
    return f"a {size} cup for {name}, {price}"


def main() -> None:
    barista = AgentDefinition("barista", tools=[charge], handle_steps=order)
    with HttpSurface() as surface:
        person = threading.Thread(target=play_person, args=(surface.server_port, ["huge", "large", "Ann", "yes"]))
        person.start()
        with Engine([barista], interactor=surface, permissions=Policy()) as engine:
            result = engine.run_sync(barista)
        person.join()
    print(result.output)
    assert result.output == "a large cup for Ann, 3.20"


if __name__ == "__main__":
    main()
