"""
A surface that asks people over HTTP: a page shows the open question and posts the answer.

`HttpSurface` has one method, `ask`. It runs in a thread and may wait for as long as the person needs. The engine checks each answer and
asks again if it is invalid.

``python examples/extending/surface.py`` needs no key and no network: below, a thread plays the person at the page.
"""

import json
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

from stepengine import AgentDefinition, Ask, Engine, Question, StepContext, Steps


class HttpSurface(ThreadingHTTPServer):
    """
    Serves the open question at ``/`` as JSON; ``POST /`` answers it, ``DELETE /`` leaves. Use it in a ``with`` block.
    """

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.waiting: list[tuple[Question, Queue[str | None]]] = []
        self.has_left = False
        self.changing = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def ask(self, question: Question, /) -> str | None:
        """Show a question and return the answer; ``None`` when the person has left, so that it stays open."""
        answers: Queue[str | None] = Queue()
        with self.changing:
            if self.has_left:
                return None
            self.waiting.append((question, answers))
        return answers.get()

    def answer(self, said: str) -> bool:
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
        shown = question and {"text": question.text, "options": list(question.options)}
        self._reply(200, json.dumps(shown).encode())

    def do_POST(self) -> None:
        """Take an answer; 409 if no question is open, as after another answer."""
        said = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._reply(200 if self.server.answer(said) else 409)

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


def request(port: int, method: str, body: str | None = None) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, "/", None if body is None else body.encode())
        data = connection.getresponse().read()
    finally:
        connection.close()
    return json.loads(data) if data else None


def play_person(port: int, replies: list[str]) -> None:
    """Answer each question with the next reply, as a page would, and leave before the one behind the last."""
    for said in replies:
        while (shown := request(port, "GET")) is None:
            time.sleep(0.005)
        print(shown["text"], said)
        request(port, "POST", said)
    request(port, "DELETE")


def order(ctx: StepContext) -> Steps[str]:
    size = yield from Ask("How large?", options=["small", "large"])
    name = yield from Ask("For whom?")
    return f"a {size} cup for {name}"


def main() -> None:
    barista = AgentDefinition("barista", handle_steps=order)
    with HttpSurface() as surface:
        person = threading.Thread(target=play_person, args=(surface.server_port, ["huge", "large", "Ann"]))
        person.start()
        with Engine([barista], interactor=surface) as engine:
            result = engine.run_sync(barista)
        person.join()
    print(result.output)
    assert result.output == "a large cup for Ann"


if __name__ == "__main__":
    main()
