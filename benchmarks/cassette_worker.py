"""
Plays one cassette in a fresh process, for W4: ``python -m benchmarks.cassette_worker PLAYER FILE N``.

The file holds N requests of a growing conversation, each with all messages before it. PLAYER ``write`` makes it; ``vcrpy`` plays
it with its body matcher, ``stepengine`` with our transport. CPU seconds of loading and of playing; every answer is looked at.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

WORDS = (
    "the",
    "reader",
    "of",
    "a",
    "file",
    "looks",
    "at",
    "every",
    "line",
    "and",
    "tells",
    "what",
    "it",
    "found",
    "there",
)
MESSAGE = " ".join([WORDS[n * n % len(WORDS)] for n in range(230)])
"""The text of each message, about 1 kB."""

URL = "https://api.benchmark.test/v1/messages"
MATCHED = ["method", "scheme", "host", "port", "path", "query", "body"]


def conversation(count: int) -> list[dict[str, Any]]:
    """Return the bodies of a run's requests: each holds the one before and two more messages."""
    texts = [{"role": "assistant" if n % 2 else "user", "content": f"{n} {MESSAGE}"} for n in range(2 * count)]
    return [{"model": "m", "messages": texts[: 2 * n + 1]} for n in range(count)]


def write(path: Path, count: int) -> dict[str, float]:
    """Write the cassette."""
    from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse, dump_cassette

    kind = (("content-type", "application/json"),)
    talks = [
        Interaction(
            RecordedRequest("POST", URL, kind, json.dumps(body).encode()),
            RecordedResponse(200, "OK", kind, json.dumps({"step": n}).encode()),
        )
        for n, body in enumerate(conversation(count))
    ]
    path.write_bytes(dump_cassette(talks))
    return {"megabytes": path.stat().st_size / 1e6}


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of *work* and what it returned."""
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def play(bodies: list[dict[str, Any]], transport: Any = None) -> None:
    """Ask for everything, and look at the answers."""
    with httpx2.Client(transport=transport) as client:
        for n, body in enumerate(bodies):
            got = client.post(URL, json=body).json()["step"]
            if got != n:
                msg = f"step {n} was answered as step {got}"
                raise SystemExit(msg)


def stepengine(path: Path, count: int) -> dict[str, float]:
    """Play it by our transport."""
    from stepengine.testing import Cassette, ReplayTransport

    loading, held = cpu(lambda: Cassette.load(path))
    playing, _ = cpu(lambda: play(conversation(count), ReplayTransport(held)))
    return {"loading": loading, "playing": playing}


def vcrpy(path: Path, count: int) -> dict[str, float]:
    """Play it by vcrpy."""
    import vcr

    tape = vcr.use_cassette(path, record_mode="none", match_on=MATCHED)
    loading, _ = cpu(tape.__enter__)
    try:
        playing, _ = cpu(lambda: play(conversation(count)))
    finally:
        tape.__exit__(None, None, None)
    return {"loading": loading, "playing": playing}


def main() -> None:
    """Do what the command line asks for."""
    player, path, count = sys.argv[1:]
    print(json.dumps({"write": write, "stepengine": stepengine, "vcrpy": vcrpy}[player](Path(path), int(count))))


if __name__ == "__main__":
    main()
