"""
The ledger of a server: what several processes say of one run.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from stepengine.data.questions import Answer
from stepengine.errors import InputError, JournalError
from stepengine.server.ledger import (
    Ledger,
    RunRow,
    make_count_message_act,
    make_register_run_act,
    make_remove_decisions_act,
    make_resume_act,
    make_store_decisions_act,
    make_store_status_act,
    make_suspend_act,
)

ROW = RunRow("one", "anna", "agent", "started", 1.0, 1.0, {"prompt": ""})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path)
    made.write([make_register_run_act(ROW, None)])
    return made


def test_ended_status_is_final(ledger: Ledger) -> None:
    ledger.write([make_store_status_act("one", "suspended", 2.0)])
    ledger.write([make_store_status_act("one", "completed", 3.0)])

    ledger.write([make_store_status_act("one", "suspended", 4.0), make_resume_act("one")])

    assert ("completed", 3.0) == (ledger.find("one").status, ledger.find("one").changed)
    ledger.close()


def test_decision_about_an_effect_in_doubt_counts_once(ledger: Ledger) -> None:
    yes, no = Answer(selected=("yes",)), Answer(selected=("no",))
    ledger.write([make_store_status_act("one", "suspended", 2.0)])

    ledger.write([make_store_decisions_act("one", {"doubt:#0": yes})])
    again, other = ledger.write(
        [make_store_decisions_act("one", {"doubt:#0": yes}), make_store_decisions_act("one", {"doubt:#0": no})]
    )

    assert again is None
    assert isinstance(other, InputError)
    assert ["one"] == ledger.list_active_run_ids(), "a kill before it goes on loses nothing"
    assert [{"doubt:#0": yes}, {}] == ledger.write([make_resume_act("one"), make_resume_act("one")])
    ledger.close()


@pytest.mark.spec("studio:SV3")
def test_message_during_suspension_keeps_the_run_active(ledger: Ledger) -> None:
    ledger.write([make_store_status_act("one", "running", 2.0)])
    before = ledger.count_messages_since_suspend("one")
    ledger.write([make_count_message_act("one")])

    assert [False] == ledger.write([make_suspend_act("one", 3.0, before)])
    assert ["one"] == ledger.list_active_run_ids(), "a kill here loses nothing"
    assert [True] == ledger.write([make_suspend_act("one", 4.0, ledger.count_messages_since_suspend("one"))])
    assert ("suspended", 0) == (ledger.find("one").status, ledger.count_messages_since_suspend("one"))
    ledger.write([make_store_decisions_act("one", {"doubt:#0": Answer(selected=("yes",))})])
    assert [False] == ledger.write([make_suspend_act("one", 5.0, 0)])
    ledger.close()


def test_concurrent_use_and_close_leave_no_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **options: opened.append(connect(*args, **options)) or opened[-1]
    )
    for number in range(5):
        ledger, begin = Ledger(tmp_path / f"{number}.db"), threading.Barrier(5)

        def use(ledger: Ledger = ledger, begin: threading.Barrier = begin) -> None:
            begin.wait()
            with contextlib.suppress(JournalError):
                for moment in range(10_000):
                    ledger.write([make_store_status_act("one", "running", float(moment))])
                    ledger.list_active_run_ids()
            with pytest.raises(JournalError, match="was closed"):
                ledger.list_active_run_ids()

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        begin.wait()
        time.sleep(number / 200)
        ledger.close()
        for thread in threads:
            thread.join()

    assert len(opened) >= 5
    for database in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            database.execute("SELECT 1")


def test_refused_decisions_leave_nothing_stored(ledger: Ledger) -> None:
    """Neither when one of them differs from a stored one, nor when another answer of the request is refused."""
    yes, no = Answer(selected=("yes",)), Answer(selected=("no",))
    ledger.write([make_store_decisions_act("one", {"doubt:#1": no})])

    (other,) = ledger.write([make_store_decisions_act("one", {"doubt:#0": yes, "doubt:#1": yes})])
    (new,) = ledger.write([make_store_decisions_act("one", {"doubt:#0": yes, "doubt:#1": no})])
    ledger.write([make_remove_decisions_act("one", new)])

    assert isinstance(other, InputError)
    assert [{"doubt:#1": no}] == ledger.write([make_resume_act("one")])
    ledger.close()
