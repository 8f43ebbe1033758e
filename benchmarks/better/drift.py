"""
A peer's side of "drift": a prompt changes after a test was recorded. vcrpy as it is by default plays the old answer to it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx2
import vcr

from benchmarks.better import GONE

RECORDED = """version: 1
interactions:
- request:
    method: POST
    uri: https://api.example.test/v1/messages
    headers: {content-type: [application/json]}
    body: '{"prompt": "Answer in English."}'
  response:
    status: {code: 200, message: OK}
    headers: {content-type: [application/json]}
    body: {string: '{"text": "Good morning."}'}
"""


def main() -> None:
    """Play a recording to another prompt."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "recorded.yaml"
        path.write_text(RECORDED)
        with vcr.use_cassette(path, record_mode="none"), httpx2.Client() as client:
            got = client.post("https://api.example.test/v1/messages", json={"prompt": "Answer in French."}).json()[
                "text"
            ]
    print(f"asked to answer in French, the recording says {got!r}, and the test passes")
    if got != "Good morning.":
        raise SystemExit(GONE)


if __name__ == "__main__":
    main()
