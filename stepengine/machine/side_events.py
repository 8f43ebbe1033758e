"""Events and warnings of a run outside of its effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepengine.data import events as ev
from stepengine.data.effects import CallModel, CallTool, Effect, Gather
from stepengine.data.estimate import transcript_tokens
from stepengine.data.json import JsonValue, freeze
from stepengine.data.models import ModelReply
from stepengine.data.state import RunPhase, label_warning
from stepengine.data.transcript import Transcript
from stepengine.errors import AgentError, DataError
from stepengine.machine.effect_channel import EffectChannel
from stepengine.machine.plan import RunPlan
from stepengine.machine.progress import Progress
from stepengine.machine.protocol import CALLING, EXECUTING, PHASES


class SideEvents:
    """
    Notifications and log lines of a run, queued until the next effect, and its warnings.

    It is the logger and notifier of one run. It only queues events; ``relay_effects`` shows them.

    Attributes:
        waiting: The events since the last effect.
        warnings: The warnings of this run.
        problems: The problems in closing the handler.
    """

    def __init__(self, plan: RunPlan, effects: EffectChannel, progress: Progress) -> None:
        self._plan = plan
        self._effects = effects
        self._progress = progress
        self._is_closed = False
        self._phase: tuple[RunPhase, str] = (RunPhase.IDLE, "")
        self.waiting: list[ev.Event] = []
        self.warnings: list[str] = []
        self.problems: tuple[str, ...] = ()
        self._body_warnings: list[str] = []

    def close(self) -> None:
        """Refuse log lines and notifications from now on, since the run has ended."""
        self._is_closed = True

    def pop_waiting_events(self) -> list[ev.Event]:
        """Return and clear the waiting events."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def enter_phase_and_pop_events(self, effect: Effect) -> Sequence[ev.Event]:
        """Return the events to show before *effect*: the waiting ones, and the phase that the run enters."""
        kind, waiting = type(effect), self.waiting
        first = effect.effects[0] if kind is Gather else effect  # type: ignore[union-attr]
        # Of calls of models and tools, which most effects are, without asking the table.
        phase = (
            CALLING
            if kind is CallModel
            else (EXECUTING, first.tool_name)  # type: ignore[union-attr]
            if kind is CallTool
            else PHASES[type(first)](first)
            if type(first) in PHASES
            else None
        )
        # As `enter_phase_and_make_event`, which most effects of a watched run would call.
        if phase is not None and phase != self._phase and self._plan.host.is_watched():
            self._phase = phase
            entered = ev.PhaseChanged(path=self._plan.path, seq=first.seq, phase=phase[0], detail=phase[1])  # type: ignore[union-attr]
            waiting.append(entered)
        if waiting:
            self.waiting = []
        return waiting

    def enter_phase_and_make_event(self, phase: RunPhase, detail: str, seq: int) -> Sequence[ev.Event]:
        """Store the phase of a watched run and return its event in a tuple; an empty one if the phase is unchanged or nobody watches."""
        if self._phase == (phase, detail) or not self._plan.host.is_watched():
            return ()
        self._phase = (phase, detail)
        return (ev.PhaseChanged(path=self._plan.path, seq=seq, phase=phase, detail=detail),)

    def add_warnings(self, *texts: str) -> None:
        """Add warnings to the result."""
        self.warnings.extend(texts)

    def add_body_warnings(self, texts: Sequence[str]) -> None:
        """Add the warnings of a tool's body, which have its path already."""
        self._body_warnings.extend(texts)

    def collect_warnings(self) -> tuple[str, ...]:
        """Return the warnings for the result, with the path of the run, and those of the bodies of its tools."""
        plan, own = self._plan, self.warnings
        if plan.agent.notes:
            own = [*own, *[note for note in plan.agent.notes if note not in own]]
        if plan.path:
            own = [label_warning(text, plan.path, plan.agent.definition.id) for text in own]
        return (*own, *self._body_warnings)

    def warn_once(self, text: str) -> None:
        """Warn once, in the result and in an event."""
        if text not in self.warnings:
            self.add_warnings(text)
            self.warning(text)

    def warn_each_time(self, text: str) -> None:
        """Warn once in the result, and in an event each time."""
        if text not in self.warnings:
            self.add_warnings(text)
        self.warning(text)

    def warn_of_reply_gaps(self, reply: ModelReply) -> None:
        """Warn once of settings that the request of *reply* was sent without, and of parts of it that are not read."""
        data = reply.provider_data
        provider = data.get("provider", "a provider")
        told = [
            f"{provider} does not support {name} of ModelSettings for the model {data.get('model', '')!r}, so requests were sent without "
            "it; leave it out, or set unsupported='error' to make such requests fail"
            for name in _to_name_list(data.get("dropped"))
        ]
        told += [
            f"a reply of {provider} contains {name!r}, which this version of stepengine cannot read; the rest of the reply was used"
            for name in _to_name_list(data.get("unread"))
        ]
        for text in told:
            if text not in self.warnings:
                self.add_warnings(text)
                if self._plan.host.is_watched():
                    self.waiting.append(ev.Warned(path=self._plan.path, seq=self._effects.seq, message=text))

    def report_close_problems(self, problems: tuple[str, ...]) -> None:
        """Record and report problems in closing the handler."""
        self.problems = problems
        self.add_warnings(*problems)
        path, seq = self._plan.path, self._effects.seq
        self.waiting += [
            ev.HandlerNotice(path=path, seq=seq, kind="handler_ignored_close", message=problem) for problem in problems
        ]

    def _require_open_and_own_thread(self, api_name: str) -> None:
        """Raise ``AgentError`` if the run has ended, or the caller is in another thread."""
        if self._is_closed:
            msg = f"{api_name} was used after its run ended, so the event reaches no one"
            raise AgentError(msg)
        if not self._plan.host.is_own_thread():
            msg = (
                f"{api_name} of agent {self._plan.agent.definition.id!r} was used from another thread; a run accepts events only from its own "
                "thread. Return the result of the thread from Perform(fn, ...) and report it in the handler"
            )
            raise AgentError(msg)

    def notify(self, message: str, data: object = None) -> None:
        """Queue a notification."""
        self._require_open_and_own_thread("ctx.notify")
        event = ev.Notification(
            path=self._plan.path, seq=self._effects.seq, message=str(message), data=_to_json_or_label(data)
        )
        self.waiting.append(event)

    def report_compaction_if_smaller(
        self, changed_by: str, before: Transcript, after: Transcript, *, record: bool
    ) -> None:
        """Queue an event that *changed_by* made the view smaller, if it did."""
        tokens_before, tokens_after = transcript_tokens(before), transcript_tokens(after)
        if tokens_after >= tokens_before:
            return
        event = ev.Compacted(
            path=self._plan.path,
            seq=self._effects.seq,
            by=changed_by,
            record=record,
            tokens_before=tokens_before,
            tokens_after=tokens_after,
            messages_before=len(before),
            messages_after=len(after),
        )
        self.waiting.append(event)

    def report_todos(self, todos: JsonValue) -> None:
        """Queue an event with the current todos."""
        if self._plan.host.is_watched():
            self.waiting.append(ev.TodosChanged(path=self._plan.path, seq=self._effects.seq, todos=todos))

    def debug(self, message: str, /, **data: object) -> None:
        """Log for developers."""
        self._log("debug", message, data)

    def info(self, message: str, /, **data: Any) -> None:
        """Log at the level ``info``."""
        self._log("info", message, data)

    def warning(self, message: str, /, **data: object) -> None:
        """Log a problem that needs attention."""
        self._log("warning", message, data)

    def error(self, message: str, /, **data: Any) -> None:
        """Log an error."""
        self._log("error", message, data)

    def _log(self, level: str, message: str, data: dict[str, object]) -> None:
        """Queue a log line; raise ``AgentError`` after the end of the run or from another thread."""
        self._require_open_and_own_thread("the logger")
        line = ev.LogLine(
            path=self._plan.path,
            seq=self._effects.seq,
            level=level,
            message=str(message),
            data=_to_json_or_label(data) if data else None,
            step=self._progress.step,
        )
        self.waiting.append(line)


def _to_name_list(names: object) -> list[str]:
    return list(map(str, names)) if isinstance(names, tuple | list) else []


def _to_json_or_label(data: object) -> object:
    try:
        return freeze(data)
    except DataError:
        return f"<{type(data).__name__} that is not JSON>"
