"""
Live progress of a run, from its events to lines on stderr.

``Progress`` is an observer. On a terminal it keeps one status line below what it prints and shows text while it
streams; elsewhere it prints plain lines. Many children at once are one line that counts them. Whatever comes from a model, a tool
or a file is made visible first. Where children run at the same time, a line in brackets says whose lines follow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from stepengine.cli.screen.render import ColorScheme, counted, money, one_line, shell_text, tokens, visible, wrapped
from stepengine.data import events as ev
from stepengine.data.questions import Question
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.usage import Usage, add_cost

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

__all__ = ("COLORS", "LEVELS", "Progress", "diff_lines", "diff_of")

MAX_DIFF_LINES = 40
HANG = 2
MANY = 5
"""So many children at once are counted, not followed."""
OF_MANY = (
    ev.ModelFinished,
    ev.StepStarted,
    ev.ModelStarted,
    ev.ToolFinished,
    ev.QuestionAsked,
    ev.PermissionRequested,
    ev.LogLine,
    ev.ToolLog,
    ev.HookFailed,
    ev.HandlerNotice,
    ev.Warned,
)
"""What is shown or counted of one run among many."""
COLORS = ColorScheme()
TODOS = "write_todos"
LEVELS = ("debug", "info", "warning", "error", "off")


class SpentSoFar(NamedTuple):
    """What was used so far, and what it cost; ``None`` when that is unknown."""

    usage: Usage
    cost: Decimal | None


class Progress:
    """
    Shows the events of one run.

    Args:
        console: Where; stderr.
        live: Whether the console is a terminal that can redraw a line.
        verbose: Show thinking, whole tool inputs and every log line.
        level: The lowest level of log lines that are shown without *verbose*.
        thinking: How thoughts of models are shown without *verbose*: ``"show"``, ``"hide"``, or ``"fold"`` to one line.
        colors: The style of each kind of line.

    Attributes:
        shows_questions: Whether questions are lines like others; not where somebody is asked them on the same console.
        filled: Tokens of the root's last prompt and its reply; 0 where no model said it.
    """

    def __init__(
        self,
        console: Console,
        *,
        live: bool = False,
        verbose: bool = False,
        level: str = "warning",
        thinking: str = "fold",
        colors: ColorScheme = COLORS,
    ) -> None:
        self.shows_questions = True
        self.filled = 0
        self._console = console
        self._colors = colors
        self._verbose = verbose
        self._thinking = "show" if verbose else thinking
        self._level = 0 if verbose else LEVELS.index(level)
        self._partial: dict[str, str] = {}
        self._streamed: set[str] = set()
        self._steps: dict[str, int] = {}
        self._siblings: dict[str, str] = {}
        self._speaker = ""
        self._usage = Usage()
        self._cost: Decimal | None = Decimal(0)
        self._step = 0
        self._below = _Below()
        self._crowds: dict[str, _Crowd] = {}
        self._folded: set[str] = set()
        self._doing = "starting"
        self._start = time.monotonic()
        self._wants_live = live
        self._live: Live | None = None
        self._todos: dict[tuple[str, str], Any] = {}
        self._asked_diffs: list[str] = []

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        """Show the status line, on a terminal, for as long as the block lasts."""
        if not self._wants_live:
            yield self
            return
        from rich.live import Live

        with Live(
            console=self._console,
            get_renderable=self._status,
            refresh_per_second=10,
            transient=True,
            redirect_stdout=False,
        ) as self._live:
            yield self
        self._live = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take the status line away for as long as the block lasts, so that somebody can type."""
        live = self._live
        if live is None:
            yield
            return
        live.stop()
        try:
            yield
        finally:
            live.start(refresh=True)

    def on_event(self, event: ev.Event) -> None:
        """Show *event*."""
        self._below.count(event)
        if isinstance(event, ev.AgentSpawned | ev.AgentFinished) and self._count_child(event):
            return
        if self._folded and self._is_folded(event.path) and not isinstance(event, OF_MANY):
            return
        show = getattr(self, f"_on_{event.type}", None)
        if show is not None:
            show(event)

    # --- many children ------------------------------------------------------------------------------------------------

    def _is_folded(self, path: str) -> bool:
        """Return whether the run at *path*, or one above it, is one of many."""
        return any(path[:end] in self._folded for end in [*_dots(path), len(path)])

    def _count_child(self, event: ev.AgentSpawned | ev.AgentFinished) -> bool:
        """Count a child that is one of many; return whether that is all that is to be shown of it."""
        path = event.child_path
        if isinstance(event, ev.AgentSpawned):
            if self._verbose or event.of < MANY:
                return self._is_folded(event.path)
            crowd = self._crowds.setdefault(event.path, _Crowd(event.agent_id))
            crowd.began(event.of)
            self._folded.add(path)
            self._siblings[path] = f"[{event.agent_id}: {one_line(event.prompt, 40)}]".replace(": ]", "]")
            return True
        if path not in self._folded:
            return self._is_folded(event.path)
        crowd = self._crowds[event.path]
        crowd.ended += 1
        if event.status is not RunStatus.COMPLETED:
            self._line(event.path, f"agent {event.agent_id} ended: {event.status.value}", self._colors.agent)
        if crowd.is_worth_a_line:
            self._tell(event.path, crowd)
        return True

    def _tell(self, path: str, crowd: _Crowd) -> None:
        crowd.told = crowd.ended
        self._line(path, f"agents {crowd.agent_id}: {crowd.ended}/{crowd.asked}", self._colors.agent)

    def mark_asked(self, question: Question) -> None:
        """Record that a person saw the difference of *question*, so that the result does not show the same one again."""
        diff = diff_of(question)
        self._asked_diffs += [diff] if diff else []

    def finish(self, result: RunResult) -> None:
        """Show how the run ended and what it spent."""
        for path in list(self._partial):
            self._flush(path)
        for path, crowd in self._crowds.items():
            if crowd.told != crowd.ended:
                self._tell(path, crowd)
        self._line("", " | ".join([part for part in self._summary(result) if part]), self._colors.summary)

    def _summary(self, result: RunResult) -> list[str]:
        """Return the end of a run and its cost, in parts."""
        below = self._below
        return [
            result.status.value.replace("_", " "),
            counted(result.state.step_index + below.steps, "step"),
            counted(len(result.tool_calls) + below.tool_calls, "tool call"),
            counted(below.agents, "child run") if below.agents else "",
            tokens(result.usage),
            money(result.cost, of=result.usage) if result.usage.requests else "no model call",
            f"{time.monotonic() - self._start:.1f} s",
        ]

    # --- what is shown ------------------------------------------------------------------------------------------------

    def _status(self) -> Text:
        from rich.text import Text

        # The screen is refreshed by another thread, so the dict may change meanwhile.
        text = Text("".join([visible(p) for p in list(self._partial.values())]))
        if text:
            text.append("\n")
        return text.append_text(self.status())

    def status(self) -> Text:
        """Return one line: what goes on, how far it is, what it spent."""
        from rich.text import Text

        spent = tokens(self._usage)
        parts = [
            f"step {self._step}" if self._step else "",
            self._doing,
            *[
                f"{crowd.agent_id} {crowd.ended}/{crowd.asked}"
                for crowd in list(self._crowds.values())
                if crowd.is_open
            ],
            spent,
            money(self._cost, of=self._usage) if spent else "",
            f"{time.monotonic() - self._start:.0f} s",
        ]
        return Text(" | ".join([p for p in parts if p]), style=self._colors.note)

    @property
    def spent(self) -> SpentSoFar:
        """What the models of the run have used so far."""
        return SpentSoFar(self._usage, self._cost)

    def _line(self, path: str, text: str, style: str = "") -> None:
        from rich.text import Text

        speaker = self._speaker_of(path)
        if speaker != self._speaker:
            self._speaker = speaker
            if speaker:
                self._console.print(
                    Text("  " * _depth(speaker) + self._siblings[speaker], style=self._colors.note), soft_wrap=True
                )
        line = "  " * _depth(path) + text
        if self._console.is_terminal:
            line = wrapped(line, self._console.width, HANG)
        self._console.print(Text(line, style=style), soft_wrap=True)

    def _speaker_of(self, path: str) -> str:
        """Return the path of the run with siblings that *path* belongs to, itself or the nearest above; ``""`` if none."""
        while path and path not in self._siblings:
            path = path.rpartition(".")[0]
        return path

    def _text(self, path: str, text: str) -> None:
        lines = (self._partial.pop(path, "") + text).split("\n")
        for line in lines[:-1]:
            self._line(path, visible(line))
        if lines[-1]:
            self._partial[path] = lines[-1]

    def _flush(self, path: str) -> None:
        rest = self._partial.pop(path, "")
        if rest:
            self._line(path, visible(rest))

    # --- runs and steps -----------------------------------------------------------------------------------------------

    def _on_step_started(self, event: ev.StepStarted) -> None:
        self._flush(event.path)
        self._steps[event.path] = event.step + 1

    def _on_model_started(self, event: ev.ModelStarted) -> None:
        # Announced here, so that a step which fails for lack of a model shows nothing but its error.
        step = self._steps.pop(event.path, 0)
        if step and not event.path:
            self._step = step
        if step and not self._is_folded(event.path):
            self._line(event.path, f"step {step}", self._colors.step)

    def _on_model_finished(self, event: ev.ModelFinished) -> None:
        if event.reply is not None:
            self._usage += event.reply.usage or Usage(at_least=True)
            self._cost = add_cost(self._cost, event.reply.cost)
            if not event.path and event.reply.usage is not None:
                self.filled = event.reply.usage.prompt_tokens + event.reply.usage.completion_tokens

    def _on_phase_changed(self, event: ev.PhaseChanged) -> None:
        if not event.path:
            self._doing = f"{event.phase.value.replace('_', ' ')} {one_line(event.detail, 40)}".strip()

    def _on_agent_spawned(self, event: ev.AgentSpawned) -> None:
        beside = " in the background" if event.is_background else ""
        self._line(
            event.path,
            f"agent {event.agent_id} starts{beside}: {one_line(event.prompt)}".rstrip(": "),
            self._colors.agent,
        )
        if not event.only_child:
            self._siblings[event.child_path] = f"[{event.agent_id}: {one_line(event.prompt, 40)}]".replace(": ]", "]")

    def _on_agent_finished(self, event: ev.AgentFinished) -> None:
        self._flush(event.child_path)
        self._line(event.path, f"agent {event.agent_id} ended: {event.status.value}", self._colors.agent)

    def _on_wait_started(self, event: ev.WaitStarted) -> None:
        self._line(event.path, f"  {one_line(event.words, 300)}", "dim")

    # --- model --------------------------------------------------------------------------------------------------------

    def _on_text_delta(self, event: ev.TextDelta) -> None:
        self._streamed.add(event.path)
        self._text(event.path, event.text)

    def _on_text_completed(self, event: ev.TextCompleted) -> None:
        if event.path in self._streamed:
            self._streamed.discard(event.path)
        else:
            self._text(event.path, event.text)
        self._flush(event.path)

    def _on_thinking_completed(self, event: ev.ThinkingCompleted) -> None:
        lines = [line for line in event.text.splitlines() if line.strip()]
        if self._thinking == "show":
            for line in lines:
                self._line(event.path, f"  thinks: {visible(line)}", self._colors.thinking)
        elif self._thinking == "fold" and lines:
            more = f" ({len(lines) - 1} more line{'s' * (len(lines) > 2)})" if len(lines) > 1 else ""  # noqa: PLR2004
            self._line(event.path, f"  thinks: {one_line(lines[0], 80)}{more}", self._colors.thinking)

    def _on_reply_discarded(self, event: ev.ReplyDiscarded) -> None:
        self._partial.pop(event.path, None)
        self._streamed.discard(event.path)
        self._line(event.path, "(the reply broke off; what it said does not count)", self._colors.warning)

    def _on_model_retry(self, event: ev.ModelRetry) -> None:
        why = (
            f"attempt {event.attempt} failed, the next one follows in {event.wait:.1f} s: {one_line(event.error, 200)}"
        )
        self._line(event.path, why, self._colors.warning)

    def _on_rate_limited(self, event: ev.RateLimited) -> None:
        how_long = "" if event.wait is None else f", {event.wait:.0f} s at most"
        self._line(event.path, f"waits for its turn at {event.provider} ({event.limit}{how_long})", self._colors.note)

    # --- tools --------------------------------------------------------------------------------------------------------

    def _on_tool_started(self, event: ev.ToolStarted) -> None:
        self._flush(event.path)
        if event.tool_name == TODOS:
            self._todos[event.path, event.tool_call_id] = event.input
        call = f"{one_line(event.tool_name, 64)} {self._arguments(event)}".rstrip()
        self._line(event.path, f"{one_line(event.source, 16):>9} > {call}", self._colors.tool)

    def _on_tool_finished(self, event: ev.ToolFinished) -> None:
        if self._is_folded(event.path):
            return
        result = event.result
        how = result.status if result.is_error else "waits" if result.status == "pending" else "ok"
        why = f": {one_line(result.text, 200)}" if result.is_error else ""
        said = f"{one_line(event.tool_name, 64)} {how}, {event.duration_ms} ms{why}"
        self._line(event.path, f"{'':>9} < {said}", self._colors.error if result.is_error else self._colors.result)
        diff = result.data.get("unified_diff") if isinstance(result.data, dict) else None
        if isinstance(diff, str) and diff in self._asked_diffs:
            self._asked_diffs.remove(diff)
        elif isinstance(diff, str):
            self._diff(event.path, diff)
        if event.tool_name == TODOS:
            asked = self._todos.pop((event.path, event.tool_call_id), None)
            if not result.is_error:
                self._show_todos(event.path, asked["todos"])

    def _show_todos(self, path: str, todos: Iterable[Any]) -> None:
        """Show the list as the tool, which has checked it, was given it."""
        for todo in todos:
            mark, style = ("x", self._colors.result) if todo["completed"] else (" ", "")
            self._line(path, f"{'':>11} [{mark}] {one_line(todo['task'], 120)}", style)

    def _on_repeat(self, event: ev.Repeat) -> None:
        name = one_line(event.tool_name, 64)
        self._line(
            event.path, f"  warning: {name} was called {event.count} times with the same result", self._colors.warning
        )

    def _arguments(self, event: ev.ToolStarted) -> str:
        value = event.input
        if not isinstance(value, dict):
            return ""
        if self._verbose:
            return one_line(", ".join([f"{k}={v!r}" for k, v in value.items()]), 2000)
        if event.category == "execute" and (command := shell_text(value)):
            return f"$ {one_line(command, 200)}"
        said = [_short(v) for v in value.values() if isinstance(v, str | list | dict)]
        return one_line(", ".join([s for s in said if s]), 80)

    def _diff(self, path: str, diff: str) -> None:
        lines = diff.splitlines()
        for line, style in diff_lines("\n".join(lines[:MAX_DIFF_LINES]), self._colors):
            self._line(path, f"{'':>11} {line}", style)
        if len(lines) > MAX_DIFF_LINES:
            self._line(path, f"{'':>11} ({len(lines) - MAX_DIFF_LINES} more lines)", self._colors.note)

    def _on_tool_progress(self, event: ev.ToolProgress) -> None:
        percent = "" if event.percent is None else f" {event.percent:.0f} %"
        self._line(event.path, f"  . {one_line(event.message, 200)}{percent}", self._colors.note)

    # --- people and logs ----------------------------------------------------------------------------------------------

    def _on_question_asked(self, event: ev.QuestionAsked | ev.PermissionRequested) -> None:
        if self.shows_questions:
            self._line(event.path, f"  ? {one_line(event.question.text, 400)}", self._colors.question)

    def _on_permission_requested(self, event: ev.PermissionRequested) -> None:
        self._on_question_asked(event)
        shown = event.question.preview
        if not self.shows_questions:
            return
        if shown is not None:
            self._line(event.path, f"    {one_line(str(shown['action']), 400)}", self._colors.warning)
        if event.question.remember is not None:
            self._line(event.path, f"    always: {one_line(str(event.question.remember['id']), 400)}", "dim")

    def _on_answer_received(self, event: ev.AnswerReceived) -> None:
        if not event.path:
            self._doing = ""

    def _on_notification(self, event: ev.Notification) -> None:
        self._line(event.path, f"  * {one_line(event.message, 400)}")

    def _on_log_line(self, event: ev.LogLine | ev.ToolLog) -> None:
        level = event.level if event.level in LEVELS else "warning"
        if LEVELS.index(level) >= self._level:
            colors = self._colors
            style = {"warning": colors.warning, "error": colors.error}.get(level, colors.note)
            self._line(event.path, f"  {level}: {one_line(event.message, 400)}", style)

    _on_tool_log = _on_log_line

    def _on_hook_failed(self, event: ev.HookFailed) -> None:
        self._line(event.path, f"  warning: {one_line(event.error, 400)}", self._colors.warning)

    def _on_handler_notice(self, event: ev.HandlerNotice | ev.Warned) -> None:
        self._line(event.path, f"  warning: {one_line(event.message, 400)}", self._colors.warning)

    _on_warned = _on_handler_notice


class _Below:
    """What the runs below the root did: its own result does not count that."""

    def __init__(self) -> None:
        self.agents = self.steps = self.tool_calls = 0

    def count(self, event: ev.Event) -> None:
        """Count *event*."""
        self.agents += isinstance(event, ev.AgentSpawned)
        if event.path:
            self.steps += isinstance(event, ev.StepStarted)
            self.tool_calls += isinstance(event, ev.ToolFinished)


class _Crowd:
    """
    Children of one run of which many are asked for at once.

    Attributes:
        agent_id: The agent of the first of them.
        asked: How many were asked for so far.
        ended: How many have ended.
        told: How many had ended when that was last printed.
    """

    def __init__(self, agent_id: str) -> None:
        self.agent_id = agent_id
        self.asked = self.ended = self.told = 0
        self._awaited = 0

    def began(self, of: int) -> None:
        """Count one child, which was asked for with *of* together."""
        if not self._awaited:
            self._awaited = of
            self.asked += of
        self._awaited -= 1

    @property
    def is_open(self) -> bool:
        """Whether some have not ended."""
        return self.ended < self.asked

    @property
    def is_worth_a_line(self) -> bool:
        """Whether all that were asked for have ended, and they are twice as many as when that was last told."""
        return not self.is_open and self.ended >= 2 * self.told


def _dots(path: str) -> list[int]:
    return [position for position, character in enumerate(path) if character == "."]


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _short(value: object) -> str:
    if isinstance(value, list):
        return ", ".join([_short(v) for v in value])
    if isinstance(value, dict):
        return _short(next(iter(value.values()), ""))
    return str(value)


def diff_of(question: Question) -> str:
    """Return the unified diff that a permission question shows; ``""`` when it shows none."""
    details = None if question.preview is None else question.preview["details"]
    found = [details.get(name) for name in ("unified_diff", "diff")] if isinstance(details, Mapping) else []
    return next((diff for diff in found if isinstance(diff, str)), "")


def diff_lines(diff: str, colors: ColorScheme = COLORS) -> Iterator[tuple[str, str]]:
    """Give each line of a unified diff, made visible, with its style."""
    styles = {
        "+++": colors.summary, "---": colors.summary, "@@": colors.place, "+": colors.added, "-": colors.removed,
    }  # fmt: skip
    for line in diff.splitlines():
        yield visible(line), next((style for begin, style in styles.items() if line.startswith(begin)), "")
