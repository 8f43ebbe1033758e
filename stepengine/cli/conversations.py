"""The recorded conversations of a folder: the turns of a chat grouped, every other run on its own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from stepengine.cli.screen.render import format_count, one_line
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import list_recorded_runs
from stepengine.data.quantities import format_age
from stepengine.journal.recorded_runs import RecordedRun

UNUSABLE = ("running", "unreadable")
TITLE = 60


class RecordedConversation(NamedTuple):
    """
    A recorded conversation, or a run that is not a turn of one.

    Attributes:
        turns: Its recorded turns, newest first.
    """

    turns: list[RecordedRun]

    @property
    def session_id(self) -> str:
        """The id that its turns share; ``""`` for a run."""
        return self.turns[0].get_text("session_id")

    @property
    def turn_to_continue(self) -> RecordedRun:
        """The turn to continue from: the newest that did not fail, else the newest."""
        return next((turn for turn in self.turns if turn.status != "failed"), self.turns[0])

    @property
    def summary_line(self) -> str:
        """One line: name, age, status, agent, number of turns and the first prompt."""
        last = self.turn_to_continue
        turns = format_count(len(self.turns), "turn") if self.session_id else one_line(last.get_text("command"), 12)
        agent = one_line(last.get_text("agent", "id"), 24)
        about = (
            f"{last.stem}  {format_run_age(last.get_text('created')):>4}  {last.status:<11}  {agent}  {turns or 'run'}"
        )
        return f"{about}  {one_line(self.turns[-1].get_text('title'), TITLE)}".rstrip()


def list_conversations(folder: str) -> list[RecordedConversation]:
    """
    Return the recorded conversations and runs of a folder, newest first, without those that another process runs now.

    Raises:
        UsageProblem: when other users can write to the state folder.
    """
    found: dict[str, list[RecordedRun]] = {}
    for entry in list_recorded_runs(working_folder=Path(folder)):
        if entry.status not in UNUSABLE:
            found.setdefault(entry.get_text("session_id") or entry.stem, []).append(entry)
    return [RecordedConversation(turns) for turns in found.values()]


def refuse_running_turn(entry: RecordedRun) -> None:
    """
    Raise if another process runs a turn, since its record is not complete.

    Raises:
        UsageProblem: when the turn is running.
    """
    if entry.status == "running":
        msg = f"{entry.stem} is running in another process; wait until it ends"
        raise UsageProblem(msg)


def format_run_age(created: str) -> str:
    """Return the age of a run, such as ``5m``; ``-`` if its creation time is unknown."""
    try:
        return format_age(datetime.now(UTC) - datetime.fromisoformat(created))
    except (ValueError, TypeError):
        return "-"
