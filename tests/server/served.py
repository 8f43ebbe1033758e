"""
``stepengine serve`` as a real process that tests kill, and clients that start runs, watch them, answer them and come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import quote

import httpx2

from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal, follow_events
from stepengine.server import Tokens
from stepengine.server.watchers import TOLD
from tests import forked_processes
from tests.waits import HANG_SECONDS, LOOK_SECONDS

SCRIPTED = Path(__file__).with_name("scripted.py")
ROOT = SCRIPTED.parents[2]
ENDED = ("completed", "failed", "cancelled", "max_steps", "truncated", "stranded")
UNREACHED = (httpx2.TransportError,)


def listens(url: str) -> bool:
    """
    Return whether a server is there. To look costs a thirtieth of a request that fails, which starting servers would wait for.
    """
    with socket.socket() as tried:
        return not tried.connect_ex(("127.0.0.1", int(url.rpartition(":")[2])))


class World:
    """
    What the tools of all servers did.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()

    def done(self, what: str) -> Counter[str]:
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        return Counter(line["name"] for line in lines if line["what"] == what)

    async def until(self, what: str, name: str) -> None:
        """
        Wait until a tool has begun.
        """
        async with asyncio.timeout(50):
            while not self.done(what)[name]:  # noqa: ASYNC110 - another process writes the file
                await asyncio.sleep(0.01)


class Served:
    """
    A server of one place, which can be killed and started again on its port.

    Args:
        folder: Where its world and tokens are, and its log.
        place: Its runs: a folder, a file, or the URL of a database.
        patience: Seconds that a question waits in memory; ``None`` for `stepengine serve` as it is typed, which waits for a minute.
        options: What else is typed behind `stepengine serve`.
        environment: For its agents.
        agents: The file that they stand in.
    """

    def __init__(
        self,
        folder: Path,
        place: Path | str,
        *,
        patience: float | None = None,
        options: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        agents: Path = SCRIPTED,
    ) -> None:
        self.place, self.world = Path(place), World(folder / "world.jsonl")
        self.db = place if isinstance(place, str) else ""
        self.tokens = folder / "tokens.json"
        if not self.tokens.exists():
            self.token("operator", ["admin"])  # as a server without a file of tokens does not start
        self.log = folder / "log.txt"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        typed = ["-m", "stepengine", "serve", str(agents), "--runs", str(place), "--tokens", str(self.tokens)]
        typed += ["--port", str(self.port), *options]
        if self.db:
            self._reading = self.token(f"auditor-{self.port}", ["admin"])
        if patience is not None:
            typed = [str(SCRIPTED), str(place), str(self.tokens), str(self.port), str(patience)]
        self._command = [sys.executable, *typed]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {**os.environ, "PYTHONPATH": path, "WORLD": str(self.world.file), **(environment or {})}
        self._process: Any = None

    def client(self, name: str, urls: Iterable[str] = ()) -> Client:
        operator = self.token(f"operator-{name}", ["admin"])
        return Client(name, self.token(name), urls or [self.url], self.world, operator=operator)

    def token(self, name: str, scopes: Iterable[Any] = ("read", "run", "answer", "debug")) -> str:
        return Tokens.open(self.tokens).add(name, scopes)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = forked_processes.Process(
                self._command, env=self._environment, stderr=log, stdin=subprocess.DEVNULL
            )

    async def restart(self) -> None:
        """
        Kill it, if it runs, start it and wait until it is ready.
        """
        self.stop()
        self.start()
        await self.ready()

    async def ready(self) -> None:
        """
        Wait until it answers that it is ready.

        Raises:
            TimeoutError: It hangs; its log is among the notes.
        """
        try:
            # Without certificates, which take 25 ms to load.
            async with asyncio.timeout(HANG_SECONDS), httpx2.AsyncClient(trust_env=False, verify=False) as client:
                while not await self._is_ready(client):
                    assert self._process is not None
                    assert self._process.poll() is None, f"the server ended: {self.said()}"
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError as error:
            error.add_note(self.said())
            raise

    async def _is_ready(self, client: httpx2.AsyncClient) -> bool:
        with contextlib.suppress(*UNREACHED):
            return listens(self.url) and (await client.get(f"{self.url}/ready")).status_code == 200
        return False

    def said(self) -> str:
        return self.log.read_text()[-4_000:]

    def kill(self, number: int = signal.SIGKILL) -> int:
        """
        Send a signal, and return what the process ended with.
        """
        self.signal(number)
        return self.left()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def left(self) -> int:
        """
        Return what the process ended with, when it has.
        """
        assert self._process is not None
        return self._process.wait(30)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def journal(self, run: str) -> FileJournal | SqliteJournal | MemoryJournal:
        """
        Return what is recorded of a run; of one in a database as the server gives it, which is there then.
        """
        if self.db:
            headers = {"authorization": f"Bearer {self._reading}"}
            answer = httpx2.get(f"{self.url}/runs/{run}/journal", headers=headers, trust_env=False, timeout=30)
            assert 200 == answer.status_code, answer.text
            return MemoryJournal(answer.content)
        return FileJournal(self.place / f"{run}.jsonl") if self.place.is_dir() else SqliteJournal(self.place, run)


Serve: TypeAlias = Callable[..., Awaitable[Served]]
"""Starts a server of a place, with the options of `Served`, and returns it when it is ready."""


class Seen:
    """
    What one client saw of one run, and what is wrong with it.

    Attributes:
        last: The id of its last event.
        events: All of them.
        was_told: Whether it was told that it does not get all.
        problems: Sentences.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self.events: list[dict[str, Any]] = []
        self.was_told = False
        self.problems: list[str] = []
        self._places: dict[str, Any] = {}
        self._keys: set[tuple[str, int, str]] = set()

    def take(self, place: str | None, event: dict[str, Any]) -> None:
        if event["type"] == "events_dropped":
            self.was_told = True
            if event["reason"] == "epoch":
                # It is shown everything anew.
                self._places.clear()
                self._keys.clear()
            return
        assert place is not None, event
        self._check(place.partition("~")[0], event)
        self.last = place
        self.events.append(event)

    def _check(self, place: str, event: dict[str, Any]) -> None:
        if place in self._places:
            self.problems.append(f"{place} came twice: {self._places[place]} and {event}")
        self._places[place] = event
        epoch, _, index = place.partition("-")
        before, _, number = (self.last or "").partition("~")[0].partition("-")
        if epoch == before and int(index) <= int(number):
            self.problems.append(f"{place} follows {self.last}")
        stopped = (event["type"] == "wait_finished" and not event["is_over"]) or (
            event["type"] == "tool_finished" and event["result"].get("status") in ("cancelled", "pending")
        )
        if event["type"] not in TOLD or event.get("resumed") or event.get("status") == "suspended" or stopped:
            return
        key = event["path"], event["seq"], event["type"]
        if key in self._keys and event["type"].endswith("_started"):
            # Its result was shown before it was on the disk, and the kill came in between: it is done, and shown, again.
            self._keys = {one for one in self._keys if one[:2] != key[:2]}
        if key in self._keys:
            self.problems.append(
                f"{event['type']} of {event['path']!r} #{event['seq']} came twice; the last id was {self.last}"
            )
        self._keys.add(key)

    async def unseen(self, journal: Any) -> set[tuple[str, int, str]]:
        """
        Return what the journal of a run that has ended tells, and the client was not shown.
        """
        told = [(event.path, event.seq, event.type) async for event in follow_events(journal, stay=False)]
        return {key for key in told if key[2] in TOLD} - self._keys

    def told(self) -> list[str]:
        """
        Return in a few words each what it saw last.
        """
        return [
            f"{one['epoch']}-{one['index']} {one['type']} {one['path']!r} #{one['seq']}" for one in self.events[-30:]
        ]


class Client:
    """
    Somebody who starts runs and sees them through, whatever becomes of the servers.

    Args:
        name: Whose runs these are.
        token: Its token.
        urls: Servers; any of them may be asked.
        world: Looked at before an effect in doubt is allowed a second time.
        operator: The token of who may allow that.
    """

    def __init__(self, name: str, token: str, urls: Iterable[str], world: World, *, operator: str = "") -> None:
        self.name, self.urls, self.world = name, list(urls), world
        self.runs: dict[str, str] = {}
        self.said: dict[str, list[Any]] = {}
        self.seen: dict[str, Seen] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self._headers = {"authorization": f"Bearer {token}"}
        self._operator = {"authorization": f"Bearer {operator}"}
        self._random = random.Random(name)
        self._client = httpx2.AsyncClient(trust_env=False, verify=False, timeout=10, headers=self._headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> httpx2.Response:
        """
        Ask any of the servers until one answers; ask again as it is said.
        """
        while True:
            try:
                given = {} if body is None else {"json": body}
                answer = await self._client.request(
                    method, f"{self._random.choice(self.urls)}{path}", headers=headers, **given
                )
            except UNREACHED:
                await self._until_one_listens()
                continue
            if answer.status_code not in (429, 503):
                return answer
            await asyncio.sleep(0.2)

    async def _until_one_listens(self) -> None:
        await asyncio.sleep(0.05)
        while not any(map(listens, self.urls)):  # noqa: ASYNC110 - another process begins to
            await asyncio.sleep(0.05)

    async def post_once(self, path: str, body: object) -> httpx2.Response | None:
        """
        Post something, and return nothing where the connection broke off.
        """
        with contextlib.suppress(*UNREACHED):
            return await self._client.post(f"{self.urls[0]}{path}", json=body)
        return None

    async def start(self, agent: str, number: int) -> str:
        """
        Start a run under a key of its own, and ask twice: that is one run.
        """
        key = f"{self.name}-{number}"
        body = {"agent": agent, "prompt": key}
        answers = [await self.ask("POST", "/runs", body, **{"idempotency-key": key}) for _ in range(2)]
        assert [202, 202] == [one.status_code for one in answers], [one.text for one in answers]
        assert answers[0].json()["run_id"] == answers[1].json()["run_id"]
        run: str = answers[0].json()["run_id"]
        self.runs[run], self.said[run], self.seen[run] = agent, [], Seen()
        return run

    async def see_through(self, run: str) -> dict[str, Any]:
        """
        Watch a run and answer what it asks, until it has ended; return how it stands then.
        """
        watching = asyncio.create_task(self.watch(run))
        try:
            while True:
                view: dict[str, Any] = (await self.ask("GET", f"/runs/{run}")).json()
                if view["status"] in ENDED:
                    break
                await self._act(run, view)
                await asyncio.sleep(self._random.uniform(0.05, 0.15))
            await asyncio.wait_for(watching, 30)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        self.views[run] = view
        return view

    async def until(self, run: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """
        Return how a run stands as soon as that is so.
        """
        async with asyncio.timeout(50):
            while not holds(view := (await self.ask("GET", f"/runs/{run}")).json()):  # noqa: ASYNC110 - another process has it
                await asyncio.sleep(0.05)
        return view

    async def listed(self) -> AsyncIterator[str]:
        """
        Give the ids of all of its runs, as the servers list them.
        """
        place: str | None = ""
        while place is not None:
            found = (await self.ask("GET", f"/runs?limit=100&cursor={quote(place)}")).json()
            for one in found["runs"]:
                yield one["run_id"]
            place = found["next"]

    async def _act(self, run: str, view: dict[str, Any]) -> None:
        for question in view["questions"]:
            await self.answer(run, question)
        if self.runs[run] == "waiting":
            for value in (f"{run}-first", f"{run}-second"):
                if value not in self.said[run]:
                    body = {"topic": "hook", "value": value, "id": value}
                    said = await self.ask("POST", f"/runs/{run}/messages", body)
                    if said.status_code == 202:
                        self.said[run].append(value)
                    break
        if self.runs[run] == "ordering":
            waits = [
                one for one in self.seen[run].events if one["type"] == "tool_started" and one["tool_name"] == "order"
            ]
            value = f"{run}-result"
            if waits and value not in self.said[run]:
                body = {"result": value}
                said = await self.ask("POST", f"/runs/{run}/tool-results/{waits[-1]['tool_call_id']}", body)
                if said.status_code == 202:
                    # Never again: a run that lost it does not end.
                    self.said[run].append(value)

    async def answer(self, run: str, question: dict[str, Any]) -> None:
        if question["id"].startswith("doubt:"):
            # Its name stands in the details; a person looks what became of it.
            decided = "no" if self.world.done("fire")[question["details"]["name"]] else "yes"
            body = {"answers": {question["id"]: decided}}
            await self.ask("POST", f"/runs/{run}/answers", body, **(self._operator if decided == "yes" else {}))
            return
        given = f"{run}-{question['id']}"
        if given in self.said[run]:
            return  # it was taken, and is not to be given again: a run that lost it does not end
        said = await self.ask("POST", f"/runs/{run}/answers", {"answers": {question["id"]: given}})
        assert said.status_code in (202, 409), said.text
        if said.status_code == 202:
            self.said[run].append(given)

    async def watch(self, run: str) -> None:
        """
        Watch a run as a browser does: from the last event on, again and again, until there is nothing more.
        """
        seen = self.seen[run]
        while True:
            headers = {} if seen.last is None else {"last-event-id": seen.last}
            url = f"{self._random.choice(self.urls)}/runs/{run}/events"
            try:
                async with self._client.stream("GET", url, headers=headers, timeout=30) as answer:
                    if answer.status_code == 204 and seen.events and seen.events[-1].get("status") in ENDED:
                        return
                    if answer.status_code == 200:
                        async for place, event in of_stream(answer):
                            seen.take(place, event)
                    elif answer.status_code not in (204, 429, 503):
                        await answer.aread()
                        seen.problems.append(f"{answer.status_code} after {seen.last}: {answer.text}")
            except UNREACHED:
                await self._until_one_listens()
                continue
            await asyncio.sleep(0.05)


async def of_stream(answer: httpx2.Response) -> AsyncIterator[tuple[str | None, dict[str, Any]]]:
    """
    Give the events of a stream that came whole, each with its id.
    """
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        name, colon, value = line.partition(": ")
        if name and colon:
            fields[name] = value
        elif not line and "data" in fields:
            yield fields.get("id"), json.loads(fields["data"])
            fields = {}
