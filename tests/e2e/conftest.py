"""
Real processes and a real server: what the command line does outside of this interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests import forked_processes
from tests.offline import NO_NETWORK, ROOT
from tests.servers import Quiet, served


@attrs.frozen
class Command:
    """
    ``stepengine`` in a process of its own, with an empty folder, no keys, and without network unless it is allowed.
    """

    folder: Path
    network: bool = False

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder.parent / "home"),
            "PYTHONPATH": os.pathsep.join([*([] if self.network else [str(self.folder / ".site")]), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, *arguments: str, **options: Any) -> Any:
        (self.folder / ".site").mkdir(exist_ok=True)
        (self.folder / ".site" / "sitecustomize.py").write_text(NO_NETWORK)
        environment = {**self.environment, **options.pop("env", {})}
        return forked_processes.Process(
            [sys.executable, "-m", "stepengine.cli", *arguments],
            env=environment, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )  # fmt: skip

    def __call__(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, **options) as process:
            out, err = process.communicate(timeout=50)
            return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.fixture
def stepengine(tmp_path: Path, forks: None) -> Command:
    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    return Command(tmp_path / "work")


@attrs.define
class ChatServer:
    """
    A server of this machine that speaks streamed Chat Completions and says what it is told, one reply per request.
    """

    url: str
    requests: list[dict[str, Any]]
    headers: list[dict[str, str]]


def chunks(reply: dict[str, Any]) -> Iterator[str]:
    """
    Give the events of one streamed reply.
    """
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "local"}
    calls = reply.get("tool_calls", [])
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in re.findall(r"\S+\s*", reply.get("content", ""))]
    deltas += [
        {"tool_calls": [{"index": i, "id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": a}}]}
        for i, (n, a) in enumerate(calls)
    ]
    for delta in deltas:
        yield json.dumps({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    finish = "tool_calls" if calls else "stop"
    yield json.dumps({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    yield json.dumps({**base, "choices": [], "usage": usage})
    yield "[DONE]"


@pytest.fixture
def chat_server() -> Iterator[Callable[..., ChatServer]]:
    def serve(*replies: dict[str, Any]) -> ChatServer:
        waiting = list(replies)

        class Answers(Quiet):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                found.requests.append({"path": self.path, **body})
                found.headers.append({k.lower(): v for k, v in self.headers.items()})
                stream = "".join([f"data: {c}\n\n" for c in chunks(waiting.pop(0))]).encode()
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("content-length", str(len(stream)))
                self.end_headers()
                self.wfile.write(stream)

        found = ChatServer(f"{running.enter_context(served(Answers))}/v1", [], [])
        return found

    with ExitStack() as running:
        yield serve
