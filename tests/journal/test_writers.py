"""
Writers: what they refuse, and which earlier request a request is stored against.
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, Perform, StepContext, Steps
from stepengine.data.effects import CallModel
from stepengine.data.messages import (
    UserMessage,
)
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.errors import JournalError, JournalWriteFailed
from stepengine.journal import FileJournal, LineJournal, MemoryJournal
from stepengine.journal.encoding import KEPT_REQUESTS, Encoder
from stepengine.journal.records import Intent, Result


class Unreachable(LineJournal):
    """
    A store in memory whose server does not answer in the method *fails*.
    """

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails, self.stored = fails, b""

    @property
    def name(self) -> str:
        return "the run"

    def read_bytes(self, start: int) -> bytes:
        return self.stored[start:]

    def append_bytes(self, data: bytes, at: int) -> None:
        self.stored += data

    def replace_bytes(self, data: bytes) -> None:
        self.stored = data

    def lock(self) -> Callable[[], None]:
        self.fail_in("lock")
        return lambda: self.fail_in("unlock")

    def fail_in(self, method: str) -> None:
        if method == self.fails:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


@pytest.mark.parametrize(
    ("fails", "then"), [("lock", "Nothing was run"), ("unlock", "The committed records are intact")]
)
def test_failing_lock_is_a_journal_error(fails: str, then: str) -> None:
    journal = Unreachable(fails)
    with (
        Engine([AgentDefinition("abs", handle_steps=count)]) as engine,
        pytest.raises(JournalError, match=f"^the run cannot be {fails}ed: Connection reset by peer. {then}$"),
    ):
        engine.run_sync("abs", journal=journal)
    assert (fails == "lock") == (not journal.records())


def count(_ctx: StepContext) -> Steps[int]:
    return (yield from Perform.idempotent(abs, -1))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR08")
def test_failed_writer_rejects_every_record(tmp_path: Path) -> None:
    writer = FileJournal(tmp_path / "run.jsonl", sync="write").writer()
    with pytest.raises(JournalWriteFailed, match="a record has at most"):
        writer.append(Result("", 0, 0, ["x" * 30_000] * 800))
    with pytest.raises(JournalWriteFailed, match="a record has at most"):
        writer.append(Result("", 0, 0, "x"))
    writer.close()


# --- differences ----------------------------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from(("", "", "1")), st.sampled_from(("longer", "same", "other", "new")), st.integers(0, 9)),
    max_size=14,
)


@pytest.mark.spec("replay:J19")
@example([("", "new", 0), ("", "new", 0), *[("", "longer", 0)] * 3, ("", "other", 1)])
@example([("", "new", 0), ("", "new", 0), *[("", "longer", 0)] * 2, ("", "other", 1)])
@example([("", "new", 0), ("", "new", 0), *[("", "longer", 0)] * 2, ("", "new", 0), ("", "other", 1)])
@given(moves)
def test_request_is_stored_against_the_best_of_four_predecessors(moves: Any) -> None:
    """
    Those that go on from each other are counted and not kept; here each of the four is.
    """
    encoder = Encoder(MemoryJournal(redact="off").redactor, link=False)
    kept: dict[str, deque[tuple[int, Transcript]]] = {}
    made: list[Transcript] = [Transcript([UserMessage("go")])]
    for seq, (path, move, pick) in enumerate(moves):
        last = kept[path][-1][1] if path in kept else made[-1]
        if move == "longer":
            transcript = last.extend((UserMessage(f"{seq}"),))
        elif move == "other":
            transcript = made[pick % len(made)]
        else:
            transcript = last if move == "same" else Transcript([UserMessage(f"new {seq}")])
        made.append(transcript)
        asked = Intent(path, seq, CallModel(seq, ModelRequest("m/m", messages=transcript)))
        request = json.loads(encoder.encode_record_lines(asked)[-1])["effect"]["request"]
        found = [item["seq"] for item in request["messages"] if item["type"] == "slice"]
        bases = [*kept.get(path, kept.get("", ()) if path else ())]
        best = max(
            reversed(bases), key=lambda base: (base[1].shared_prefix_length(transcript), len(base[1])), default=None
        )

        assert set(found) <= ({best[0]} if best else set())
        assert found or best is None or not best[1].shared_prefix_length(transcript)
        kept.setdefault(path, deque(maxlen=KEPT_REQUESTS)).append((seq, transcript))
