"""
Worker processes for tests that kill them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests import forked_processes

WORKER = Path(__file__).with_name("worker.py")


class Workers:
    """Worker processes on one database that tell one world what they do."""

    def __init__(self, db: str, world: Path) -> None:
        self.db = db
        self.world = world
        self.world.touch()
        self._running: list[Any] = []

    def start(self, executor: str, **more: str) -> Any:
        environment = {**os.environ, "WORLD": str(self.world), **more}
        process = forked_processes.Process([sys.executable, str(WORKER), self.db, executor], env=environment)
        self._running.append(process)
        return process

    def lines(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.world.read_text().splitlines()]

    def told(self, what: str) -> Counter[str]:
        return Counter(line["name"] for line in self.lines() if line["what"] == what)

    def stop(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
