"""
The floors of journals: the least code in CPython that does the same work, measured in the process that measures ours.

A step is a model call and a tool call, so four records. The driver is a generator with a new frozen state for each step, which
asks an asyncio loop for what it needs. In memory the four records are kept as objects. In a file each one is a line of JSON with
a checksum that starts from the one before, the two intents with a SHA-256 of what they ask for, and the step is written twice:
before its call of a tool, and after it. Repeating reads such lines, checks their checksums, and compares what is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Generator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import attrs

from benchmarks.engines import arguments

Asked = tuple[str, Any]
_chunks = json.encoder.c_make_encoder(None, None, json.encoder.encode_basestring, None, ":", ",", False, False, False)


def encode(value: Any) -> str:
    """Make JSON as ``json.dumps`` does, which with any option makes an encoder for each value; this one is made once."""
    return "".join(_chunks(value, 0))


@attrs.frozen
class State:
    """What a run has come to; each step makes a new one."""

    steps: int = 0
    last: Any = None
    spent: int = 0


class Memory:
    """Keeps what the records hold."""

    def __init__(self) -> None:
        self._records: list[Any] = []

    def intent(self, seq: int, effect: Any) -> None:
        """Keep what is asked for."""
        self._records.append((seq, effect))

    def result(self, seq: int, value: Any) -> None:
        """Keep what came of it."""
        self._records.append((seq, value))

    def write(self) -> None:
        """Do nothing."""


class File:
    """Writes the records as lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._crc = 0
        self._lines: list[bytes] = []

    def intent(self, seq: int, effect: Any) -> None:
        """Make the line of what is asked for."""
        text = encode(effect)
        fp = sha256(text.encode()).hexdigest()[:32]
        self._line(f'{{"kind":"intent","path":"","seq":{seq},"fp":"{fp}","effect":{text}')

    def result(self, seq: int, value: Any) -> None:
        """Make the line of what came of it."""
        self._line(f'{{"kind":"result","path":"","seq":{seq},"at":{seq},"value":{encode(value)}')

    def _line(self, text: str) -> None:
        body = text.encode()
        self._crc = crc32(body, self._crc)
        self._lines.append(body + b',"crc":"%08x"}\n' % self._crc)

    def write(self) -> None:
        """Write the lines."""
        os.write(self._file, b"".join(self._lines))
        self._lines.clear()


def agent(steps: int) -> Generator[Asked, Any, State]:
    """Ask for a reply and a call in each step."""
    state = State()
    for number in range(steps):
        reply = yield "model_call", number
        result = yield "tool_call", reply
        state = attrs.evolve(state, steps=number + 1, last=result, spent=state.spent + 1)
    return state


async def answer(kind: str, what: Any) -> Any:
    """Be model and tool."""
    return arguments(what) if kind == "model_call" else what["a"] + what["b"]


async def run(steps: int, kept: Memory | File | None) -> State:
    """Drive the generator; what it asks for and what comes of it is recorded, if anything *kept* is given."""
    machine = agent(steps)
    sent: Any = None
    seq, before = 0, []  # type: tuple[int, Any]
    while True:
        try:
            kind, what = machine.send(sent)
        except StopIteration as stop:
            state: State = stop.value
            assert state.steps == steps
            return state
        if kept is None:
            sent = await answer(kind, what)
            continue
        if kind == "model_call":
            effect = {"type": kind, "messages": [{"type": "slice", "seq": seq - 2, "start": 0, "stop": seq}, *before]}
        else:
            effect = {"type": kind, "tool_name": "add", "input": what, "tool_call_id": f"c{seq}"}
        kept.intent(seq, effect)
        if kind == "tool_call":
            kept.write()
        sent = await answer(kind, what)
        if kind == "model_call":
            call = {"type": "tool_call", "tool_call_id": f"c{seq + 1}", "tool_name": "add", "input": sent}
            value: Any = {"type": "model_reply", "content": [call]}
        else:
            value = {"type": "tool_result", "content": [{"type": "json_content", "value": sent}]}
            said = {"type": "tool_message", "tool_call_id": f"c{seq}", "tool_name": "add", "content": value["content"]}
            before = [{"type": "assistant_message", "content": [call]}, said]
        kept.result(seq, value)
        if kind == "tool_call":
            kept.write()
        seq += 1


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a file, each with the right checksum."""
    crc = 0
    for line in path.read_bytes().splitlines():
        crc = crc32(line[:-18], crc)
        assert line.endswith(b'"%08x"}' % crc)
        yield json.loads(line)


async def repeat(path: Path, steps: int) -> State:
    """Drive the generator with what is recorded, and compare what it asks for."""
    machine, lines = agent(steps), lines_of(path)
    sent: Any = None
    while True:
        try:
            kind, what = machine.send(sent)
        except StopIteration as stop:
            state: State = stop.value
            assert state.steps == steps
            return state
        intent, result = next(lines), next(lines)
        effect = intent["effect"]
        assert kind == effect["type"]
        assert intent["fp"] == sha256(encode(effect).encode()).hexdigest()[:32]
        part = result["value"]["content"][0]
        sent = part["input"] if kind == "model_call" else part["value"]
        assert kind == "model_call" or what == effect["input"]


def floors(steps: int, folder: Path, best: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """
    Return CPU microseconds per step of each floor.

    Args:
        steps: How many steps a run has.
        folder: Where files may be made.
        best: Returns the least CPU microseconds per step of some runs.
    """
    numbers = iter(range(1_000))
    found = {
        "floor, no journal": best(lambda: asyncio.run(run(steps, None))),
        "floor, memory": best(lambda: asyncio.run(run(steps, Memory()))),
        "floor, file": best(lambda: asyncio.run(run(steps, File(folder / f"floor-{next(numbers)}.jsonl")))),
    }
    path = folder / "floor.jsonl"
    asyncio.run(run(steps, File(path)))
    return {**found, "floor, replay": best(lambda: asyncio.run(repeat(path, steps)))}
