"""What handlers and hooks say on the side: notifications and log lines, held until the next effect (design 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepengine.data import events as ev
from stepengine.data.estimate import transcript_tokens
from stepengine.data.json import freeze
from stepengine.errors import AgentError, DataError

if TYPE_CHECKING:
    from stepengine.data.transcript import Transcript
    from stepengine.machine.live import Live

__all__ = ("Notes",)


class Notes:
    """The logger and notifier of one run; it only remembers, the machine shows."""

    def __init__(self, live: Live) -> None:
        self._live: Live | None = live
        self.waiting: list[ev.Event] = []

    def close(self) -> None:
        """Let go of the run, which has ended, so that it is freed at once and not by the collector."""
        self._live = None

    def take(self) -> list[ev.Event]:
        """Return what waits and forget it."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def _speaker(self, what: str) -> Live:
        live = self._live
        if live is None:
            msg = f"{what} was used after its run had ended, when nobody is told of anything any more"
            raise AgentError(msg)
        if not live.plan.here():
            msg = (
                f"{what} of agent {live.agent.id!r} was used from another thread; a run is told of things in its own thread "
                "only. Return what the thread found from Perform(fn, ...) and say it in the handler"
            )
            raise AgentError(msg)
        return live

    def notify(self, message: str, data: Any = None) -> None:
        """Remember a notification."""
        live = self._speaker("ctx.notify")
        self.waiting.append(ev.Notification(path=live.plan.path, seq=live.seq, message=str(message), data=_shown(data)))

    def compacted(self, by: str, before: Transcript, after: Transcript, *, record: bool) -> None:
        """Remember that *by* made what the model sees smaller, if it did (requirements I11)."""
        live, tokens = self._live, (transcript_tokens(before), transcript_tokens(after))
        if live is None or tokens[1] >= tokens[0]:
            return
        event = ev.Compacted(
            path=live.plan.path,
            seq=live.seq,
            by=by,
            record=record,
            tokens_before=tokens[0],
            tokens_after=tokens[1],
            messages_before=len(before),
            messages_after=len(after),
        )
        self.waiting.append(event)

    def debug(self, message: str, /, **data: Any) -> None:
        """Log for developers."""
        self._log("debug", message, data)

    def info(self, message: str, /, **data: Any) -> None:
        """Log for users who asked for detail."""
        self._log("info", message, data)

    def warning(self, message: str, /, **data: Any) -> None:
        """Log what somebody should look at."""
        self._log("warning", message, data)

    def error(self, message: str, /, **data: Any) -> None:
        """Log what went wrong."""
        self._log("error", message, data)

    def _log(self, level: str, message: str, data: dict[str, Any]) -> None:
        live = self._speaker("the logger")
        line = ev.LogLine(
            path=live.plan.path,
            seq=live.seq,
            level=level,
            message=str(message),
            data=_shown(data) if data else None,
            step=live.step,
        )
        self.waiting.append(line)


def _shown(data: Any) -> Any:
    try:
        return freeze(data)
    except DataError:
        return f"<{type(data).__name__} that is not JSON>"
