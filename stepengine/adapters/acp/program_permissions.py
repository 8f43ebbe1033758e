"""The permissions that a program requests in a turn, and those that it was granted."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from stepengine.adapters.external.turns import OPEN_ASKS
from stepengine.data.json import canonical


class ProgramPermissions:
    """
    The permission requests of a program and its granted permissions.

    Attributes:
        requested: Set when the program requests a permission that is not answered yet.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._requests: dict[int, dict[str, object]] = {}
        self._answers: dict[int, asyncio.Future[bool | None]] = {}
        self._count = 0
        self._early_answers: dict[tuple[str, str], bool] = {}
        self._commands: set[str] = set()
        self._files: set[tuple[str, str]] = set()

    async def request_permission(self, kind: str, input: dict[str, Any], *, is_live: bool) -> bool | None:
        """Wait for a decision, or use an early one: True if allowed; ``None`` without a live turn or with too many requests."""
        known = self._early_answers.pop((kind, canonical(input)), None)
        if known is not None:
            return known
        if not is_live or len(self._requests) >= OPEN_ASKS:
            return None
        self._count += 1
        self._requests[self._count] = {"id": self._count, "kind": kind, "input": input}
        answer: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        self._answers[self._count] = answer
        self.requested.set()
        return await answer

    def list_open_requests(self) -> list[dict[str, object]]:
        """Return the requests without an answer as JSON."""
        return [request for number, request in self._requests.items() if not self._answers[number].done()]

    def answer_requests(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Answer open requests by their ids."""
        for answer in answers:
            self._requests.pop(answer["id"], None)
            waiting = self._answers.pop(answer["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer["allowed"])

    def store_early_answers(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Store answers for requests that a restarted program will make again, by their kinds and inputs."""
        # An answer in a journal of an earlier version has no kind: its request is asked about again.
        self._early_answers = {
            (answer.get("kind", ""), canonical(answer["input"])): answer["allowed"] for answer in answers
        }

    def cancel_requests(self) -> None:
        """Answer every open request with ``None``: there is no decision."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(None)

    def grant(self, kind: str, command: object, paths: Iterable[str]) -> None:
        """Store an allowed action of *kind*, so that its command and files need no second permission."""
        # The program names the kind, and rules judge by it: what was allowed as reading is no permission to run a command.
        if kind == "execute" and isinstance(command, str | list):
            self._commands.add(command if isinstance(command, str) else shlex.join(command))
        self._files.update((kind, path) for path in paths)

    def is_command_granted(self, line: str) -> bool:
        """Return whether a command was granted."""
        return line in self._commands

    def consume_command_grant(self, line: str) -> None:
        """Withdraw the grant of a command, which holds once."""
        self._commands.discard(line)

    def consume_file_grants(self, kind: str, paths: Iterable[str]) -> bool:
        """Return whether all of these files were granted, and withdraw the grant, which holds once."""
        wanted = {(kind, path) for path in paths}
        if not wanted <= self._files:
            return False
        self._files -= wanted
        return True

    def clear(self) -> None:
        """Withdraw all requests, grants and early answers."""
        self._early_answers.clear()
        self._commands.clear()
        self._files.clear()
        self._requests.clear()
        self._answers.clear()
