"""
A server of a few agents in a thread of the test, over real connections: one agent ends at once, the others wait for somebody.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from stepengine import STEP, AgentDefinition, Ask, Engine, InputSchema, Receive, ToolCall, ToolContext, call, tool
from stepengine.debugging.desk import EngineSpec
from stepengine.journal import FileJournal
from stepengine.server import Tokens, app
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel
from stepengine.tools.bundled import file_tools
from tests.waits import until

SECONDS = 50.0
EVERY = ("read", "run", "answer")


@tool(deferred=True)
def book(ctx: ToolContext, city: str) -> str:
    """
    Book a table; the restaurant calls back.
    """
    return "asked"


def asks(ctx: Any) -> Any:
    day = yield from Ask("On which day?")
    return f"{ctx.prompt}: {day}"


def listens(ctx: Any) -> Any:
    heard = yield from Receive("go")
    return {"heard": heard}


def books(ctx: Any) -> Any:
    return (yield from call(book, city=ctx.prompt))


def talks(ctx: Any) -> Any:
    for number in range(2_000):
        ctx.notify("a" * 2_000, {"number": number})
    yield from ()


def ends(ctx: Any) -> Any:
    yield from ()
    return {"prompt": ctx.prompt, "params": ctx.params}


def writes(ctx: Any) -> Any:
    yield from ToolCall("write_file", {"path": "plan.txt", "instructions": "Write it down.", "content": ctx.prompt})
    yield STEP
    return "written"


AGENTS = [
    AgentDefinition("asker", handle_steps=asks),
    AgentDefinition("listener", handle_steps=listens),
    AgentDefinition("talker", handle_steps=talks),
    AgentDefinition("writer", model="anthropic/claude-sonnet-4-5", tools=["write_file"], handle_steps=writes),
    AgentDefinition("booker", tools=[book], handle_steps=books),
    AgentDefinition(
        "quick",
        handle_steps=ends,
        input_schema=InputSchema(
            prompt="Anything.", params={"type": "object", "properties": {"size": {"type": "integer"}}}
        ),
    ),
]


def engine_in(work: str) -> Engine:
    """
    Return an engine of the agents, which write in a folder.
    """
    Path(work).mkdir(exist_ok=True)
    tools = file_tools(work, write=True)
    return Engine(AGENTS, tools, ScriptedModel(lambda _: "It is done."), sessions=MemorySessions())


class House:
    """
    The server, and who knows it.

    Attributes:
        folder: Where its runs and tokens lie.
        work: Where its agents write.
        url: Where it is reached.
        tokens: Tokens by the name of who has them.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        known = Tokens.open(folder / "tokens.json")
        self.tokens = {
            "anna": known.add("anna", EVERY),
            "bob": known.add("bob", EVERY),
            "reader": known.add("reader", ["read"]),
            "root": known.add("root", ["admin"]),
        }
        self.options = options
        self.url = ""

    def engine(self) -> Engine:
        return engine_in(str(self.work))

    @property
    def maker(self) -> EngineSpec:
        """
        How another process makes the engine.
        """
        return EngineSpec("tests.server.house:engine_in", {"work": str(self.work)})

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, who: str | None = "anna") -> httpx2.Client:
        headers = {} if who is None else {"authorization": f"Bearer {self.tokens[who]}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=SECONDS)

    @contextmanager
    def open(self) -> Iterator[House]:
        """
        Serve within the block.
        """
        engine = self.engine()
        places = {"runs": self.folder / "runs", "roots": [self.work], "reports": self.folder / "evals"}
        served = app(
            engine, tokens=self.folder / "tokens.json", drain=0, maker=self.maker, **{**places, **self.options}
        )
        with run_server(served) as self.url:
            yield self


@contextmanager
def run_server(served: Any) -> Iterator[str]:
    """
    Run a server in a thread within the block, and give its address.
    """
    import uvicorn

    from tests.uvicorn_servers import serve_in_thread

    config = uvicorn.Config(served, port=0, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
    with serve_in_thread(config) as port:
        yield f"http://127.0.0.1:{port}"


def started(client: httpx2.Client, agent: str = "asker", prompt: str = "hi") -> str:
    """
    Start a run and return its id.
    """
    answer = client.post("/runs", json={"agent": agent, "prompt": prompt})
    assert 202 == answer.status_code, answer.text
    return str(answer.json()["run_id"])


def question_of(client: httpx2.Client, run: str) -> str:
    """
    Wait until a run asks something, and return the question's id.
    """
    return str(until(lambda: client.get(f"/runs/{run}").json()["questions"])[0]["id"])


def answered(client: httpx2.Client, run: str, text: str = "Monday") -> dict[str, Any]:
    """
    Answer what a run asks, and return how it ended.
    """
    given = client.post(f"/runs/{run}/answers", json={"answers": {question_of(client, run): text}})
    assert 202 == given.status_code, given.text
    return ended(client, run)


def ended(client: httpx2.Client, run: str) -> dict[str, Any]:
    """
    Wait until a run has ended, and return how it stands.
    """

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = client.get(f"/runs/{run}").json()
        return None if found["status"] in ("running", "suspended") else found

    return dict(until(look))


def events(client: httpx2.Client, run: str, **params: Any) -> list[dict[str, Any]]:
    """
    Return the events of a run that comes to its end.
    """
    with client.stream("GET", f"/runs/{run}/events", params=params) as answer:
        assert 200 == answer.status_code
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]


def written(house: House, name: str = "tried/one") -> Path:
    """
    Write a report of an evaluation, as `stepengine eval` does, and return its folder.
    """
    folder = house.folder / "evals" / name
    folder.mkdir(parents=True, exist_ok=True)
    journal = FileJournal(folder / "rome" / "base-1.jsonl")
    if not journal.is_there():
        journal.path.parent.mkdir(exist_ok=True)
        asyncio.run(evaluated(journal))
    sample = {
        "side": "base", "n": 1, "journal": "rome/base-1.jsonl", "status": "completed", "passed": True, "cost": "0.5", "tokens": 7,
        "scores": {"fits": {"score": 1.0, "passed": True, "reason": "", "state": "passed"}}, "steps": 1, "seconds": 0.1, "reused": "new",
    }  # fmt: skip
    told = {
        "format": "stepengine.eval/1", "name": "tried", "seed": 1, "n": 1, "sides": [{"name": "base", "agent": "quick", "models": []}],
        "checks": ["fits"], "cases": [{"id": "rome", "tags": [], "group": None, "samples": [sample]}], "summary": [{"mean": float("nan")}],
        "pairs": [], "ratios": [], "spent": "0.5", "stopped": "", "created": "2026-11-20T10:00:00+00:00",
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(told))
    return folder


async def evaluated(journal: FileJournal) -> None:
    async with Engine([one for one in AGENTS if one.id == "quick"]) as engine:
        await engine.run("quick", journal=journal)
