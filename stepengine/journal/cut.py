"""
What belongs to the past when a journal is cut at an address (replay D10, D11, prototype N8).

Cut at ``p#n``: everything of ``p`` from n on is gone with the runs it spawned; on the way up, each ancestor loses the result
of the Spawn that leads to ``p`` and everything after it. What began together with that Spawn keeps what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stepengine.errors import JournalError
from stepengine.journal.divergence import verb
from stepengine.journal.forms import touched_world
from stepengine.journal.history import History, parent_of
from stepengine.journal.records import ROOT, Address, shown_address
from stepengine.runtime.performer import child_path

__all__ = ("Cut", "address_of", "check_repeats", "place_of")

LISTED = 10
TEXT_FORM = re.compile(r"(?:(?P<path>[0-9]{1,9}(?:\.[0-9]{1,9})*)?#)?(?P<seq>-1|[0-9]{1,9})")


def place_of(history: History, at: int | str) -> Address:
    """
    Return the address of an effect that has a result, as ``address_of`` does.

    Raises:
        JournalError: for what is no address; when there is no such effect, or it has no result.
    """
    address = address_of(at)
    _check_place(history, address)
    return address


def address_of(at: int | str) -> Address:
    """
    Return the address that a number of the root's effects, ``"#5"`` or ``"3.2#1"`` means.

    Raises:
        JournalError: for anything else.
    """
    found = None if isinstance(at, bool) else TEXT_FORM.fullmatch(str(at))
    if found is None:
        msg = f"an address is a number of an effect, or text such as '#5' or '3.2#1' (effect 1 of the child 3.2), not {at!r}"
        raise JournalError(msg)
    return found["path"] or "", int(found["seq"])


def _check_place(history: History, address: Address) -> None:
    where = shown_address(*address)
    if address == ROOT:
        return
    if address not in history.intents:
        numbers = [seq for path, seq in history.intents if path == address[0] and seq >= 0]
        known = f"the run there has the effects 0 to {max(numbers)}" if numbers else "there is no run at that path"
        msg = f"{history.name} has no effect {where}: {known}"
        raise JournalError(msg)
    if address not in history.results:
        msg = f"effect {where} of {history.name} has no result yet; resume the run, or fork it at an earlier effect"
        raise JournalError(msg)


class Cut:
    """
    The places where a journal was cut; without any, everything stays.

    Args:
        last_together: Gives the number of the last effect that began together with another one; see ``History``.
    """

    def __init__(self, last_together: Callable[[Address], int]) -> None:
        self._last_together = last_together
        self._ends: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def at(self, address: Address) -> None:
        """Cut at *address*: the effect there, and what follows from it, are gone."""
        path, seq = address
        self._end(path, seq)
        while path:
            path, seq = parent_of(path)
            self._end(path, self._last_together((path, seq)) + 1)

    def _end(self, path: str, seq: int) -> None:
        self._ends[path] = min(seq, self._ends.get(path, seq))

    def keeps_intent(self, address: Address) -> bool:
        """Return whether an intent stays."""
        if not self._ends or address == ROOT:
            return True
        path, seq = address
        while True:
            if seq >= self._ends.get(path, seq + 1):
                return False
            if not path:
                return True
            path, seq = parent_of(path)

    def keeps_result(self, address: Address) -> bool:
        """Return whether a result stays: not that of a run which was itself cut."""
        if not self._ends:
            return True
        if address == ROOT or not self.keeps_intent(address):
            return False
        return child_path(*address) not in self._ends


def check_repeats(history: History, cut: Cut, act: str, *, undone: bool = False) -> None:
    """
    Raise when something may happen again that must not, unless somebody says so (reliability JR36).

    Args:
        history: What was recorded.
        cut: Where it is cut off.
        act: What cuts it off, such as ``"forking at #3"``.
        undone: Whether the files that were written there are brought back, so that writing them again is no repeat.

    Raises:
        JournalError: it lists the effects that changed the world and are cut off.
    """
    gone = {a: i for a, i in history.intents.items() if not cut.keeps_intent(a) and touched_world(i.effect)}
    lost = [i for a, i in gone.items() if not (undone and a in history.results and history.results[a].writes)]
    if lost:
        listed = ", ".join([f"{shown_address(i.path, i.seq)} {verb(history.form(i))}" for i in lost[:LISTED]])
        more = f" and {len(lost) - LISTED} more" if len(lost) > LISTED else ""
        msg = (
            f"{act} cuts off effects that changed the world and may happen again: {listed}{more}. "
            "Pass allow_repeat=True (--allow-repeat) to go on"
        )
        raise JournalError(msg)
