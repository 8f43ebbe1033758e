"""
A project of an agent and a helper in files, served by ``stepengine studio`` as a real process, and what a page asks of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2

from tests.waits import until

SECONDS = 60.0
HELPER = """
import os

with open("imported.txt", "a") as told:
    told.write(f"{os.getpid()}\\n")


def worth(price):
    return price + 0
"""
CODE = '''
from helper import worth
from stepengine import STEP, AgentDefinition, Ask, ToolAnnotations, call, tool
from stepengine.testing import ScriptedModel, text


@tool(annotations=ToolAnnotations(read_only=True))
def price_of(item: str) -> int:
    """Return the price of an item."""
    return 10 * len(item)


def handle_steps(ctx):
    total = 0
    for item in ctx.prompt.split():
        price = yield from call(price_of, item)
        total = worth(price)
        yield STEP
    return total


def asking_steps(ctx):
    said = yield from Ask("How many?", options=["one", "two"])
    reply = yield STEP
    return f"{said}: {reply.text}"


tally = AgentDefinition(
    "tally", model="t/m", tools=[price_of], system_prompt="Add up.", instructions_prompt="Be brief.", handle_steps=handle_steps
)
asker = AgentDefinition("asker", model="t/m", handle_steps=asking_steps, spawnable_agents=["tally"], tools=["spawn_agents"])
agents = [tally, asker]
models = ScriptedModel(lambda request: text(f"{request.model} {len(request.messages)}: {request.system_prompt}"))
'''


class Shop:
    """
    The server.

    Attributes:
        folder: The project.
        url: Where it is reached.
        link: What lets a browser in, once.
        options: What is typed behind ``stepengine studio``.
        variables: Environment variables of its own.
        token: Whoever may do everything.
    """

    def __init__(self, folder: Path, code: str = CODE, options: Iterable[str] = ()) -> None:
        self.folder = folder
        self.file, self.helper = folder / "shop.py", folder / "helper.py"
        self.file.write_text(code)
        self.helper.write_text(HELPER)
        self.options = ("--agents", "shop.py", "--runs", "runs", *options)
        self.variables: dict[str, str] = {}
        self.url = self.link = self.token = ""
        self.process: Any = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Shop]:
        line = [sys.executable, "-m", "stepengine", "studio", "--port", "0", "--no-open"]
        with subprocess.Popen(
            [*line, *self.options], cwd=self.folder, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **self.variables},
        ) as self.process:  # fmt: skip
            assert self.process.stderr is not None
            said = ""
            while not (self.url and self.token):
                said += (line := self.process.stderr.readline())
                assert line, said
                self.link = self.link or _found(r"http://\S+/#login=\S+", said)
                self.url = self.url or _found(r"http://[\d.:]+", said)
                self.token = self.token or _found(r"sk-stepengine-[\w-]+", said)
            # What it says later must not stop it.
            reading = threading.Thread(target=self.process.stderr.read)
            reading.start()
            try:
                yield self
            finally:
                self.process.terminate()
                self.process.wait(SECONDS)
                reading.join(SECONDS)

    def client(self, token: str = "") -> httpx2.Client:
        headers = {"authorization": f"Bearer {token or self.token}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=SECONDS)

    def processes(self) -> list[int]:
        """
        Return the processes below the server that are not over.
        """
        assert self.process is not None
        return [pid for pid, _ in _below(self.process.pid)]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[0] if match and text.endswith("\n") else ""


def _below(pid: int) -> list[tuple[int, str]]:
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                parents.setdefault(int(parent), []).append((int(entry.name), state))
    found, left = list[tuple[int, str]](), [pid]
    while left:
        for child, state in parents.get(left.pop(), ()):
            found += [(child, state)] if state != "Z" else []
            left.append(child)
    return found


def done(client: httpx2.Client, agent: str, prompt: str) -> str:
    """
    Start a run, wait until it rests, and return its id.
    """
    return rests(client, start(client, agent, prompt))


def start(client: httpx2.Client, agent: str, prompt: str) -> str:
    """
    Start a run and return its id.
    """
    answer = client.post("/runs", json={"agent": agent, "prompt": prompt})
    assert answer.is_success, answer.text
    return str(answer.json()["run_id"])


def rests(client: httpx2.Client, run: str) -> str:
    def is_over() -> bool:
        view = client.get(f"/runs/{run}").json()
        return view["status"] not in ("running", "suspended") or bool(view["questions"])

    until(is_over)
    return run


class Page:
    """
    A page that looks into a run: what it is told, and what it asks.
    """

    def __init__(self, client: httpx2.Client, run: str, lines: Iterator[str]) -> None:
        self.client, self.run, self._lines = client, run, lines
        self.desk = str(self.told("desk")["desk"])

    def told(self, kind: str) -> dict[str, Any]:
        """
        Return the next thing that it is told, which is of a kind.
        """
        event = ""
        for line in self._lines:
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            if line.startswith("data: "):
                assert kind == event, line
                said: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return said
        raise AssertionError("it was told nothing more")

    def look(self) -> dict[str, Any]:
        return self.told("look")

    def go(self, at: str) -> dict[str, Any]:
        answer = self.client.post(f"/runs/{self.run}/edits/{self.desk}", json={"at": at})
        assert 200 == answer.status_code, answer.text
        return dict(answer.json())

    def next(self) -> dict[str, Any]:
        return dict(self.client.get(f"/runs/{self.run}/edits/{self.desk}/next").raise_for_status().json())


@contextlib.contextmanager
def looking(client: httpx2.Client, run: str, at: str = "") -> Iterator[Page]:
    """
    Open a page that looks into a run.
    """
    with client.stream("GET", f"/runs/{run}/edits", params={"at": at}) as answer:
        assert 200 == answer.status_code
        yield Page(client, run, answer.iter_lines())


def variables(look: dict[str, Any]) -> dict[str, str]:
    """
    Return the variables of the handler at a place, but for its context.
    """
    assert look["place"] is not None, look["problem"] or look["differs"]
    return {name: value for name, value in look["place"]["frames"][0]["locals"].items() if name != "ctx"}


def save(file: Path, code: str) -> None:
    """
    Save a file as editors do that put another one in its place.
    """
    other = file.with_name(f"{file.name}~")
    other.write_text(code)
    other.replace(file)


def judged(client: httpx2.Client, **asked: Any) -> dict[str, Any]:
    """
    Begin to judge runs, and return the job when it waits for somebody, or is over.
    """
    answer = client.post("/jobs", json=asked)
    assert 202 == answer.status_code, answer.text
    return settled(client, answer.json()["id"])


def agreed(client: httpx2.Client, job: dict[str, Any], budget: str | None = None) -> dict[str, Any]:
    """
    Agree to the price of a job, and return it when it is over.
    """
    assert "priced" == job["status"], job
    answer = client.post(f"/jobs/{job['id']}/agree", json={"budget": budget})
    assert 202 == answer.status_code, answer.text
    return settled(client, job["id"])


def settled(client: httpx2.Client, job: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = client.get(f"/jobs/{job}").json()
        return None if found["status"] in ("begun", "running") else found

    return dict(until(look))
