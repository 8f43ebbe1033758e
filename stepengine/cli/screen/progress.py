"""
Live progress of a run, from its events to lines on stderr.

``ProgressDisplay`` is an observer. On a terminal it prints text while it streams and keeps one status line below; elsewhere it prints
plain lines. If many children run at once, they are only counted, in one line. Text from models, tools and files is made visible
first. If children run at the same time, a line in brackets names the run of the following lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from stepengine.cli.screen.render import (
    ColorScheme,
    format_cost,
    format_count,
    format_tokens,
    one_line,
    visible,
    wrap_lines,
)
from stepengine.data import events as ev
from stepengine.data.call_text import find_question_diff, find_result_diff, find_shell_command, parse_todos
from stepengine.data.origins import describe_origin, sort_origins
from stepengine.data.questions import Question
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.usage import Usage, add_cost

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

MAX_DIFF_LINES = 40
HANG = 2
MANY = 5
"""The number of children at once from which they are counted, not followed."""
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
"""The events that are shown or counted for one run among many."""
COLORS = ColorScheme()
LEVELS = ("debug", "info", "warning", "error", "off")


class ProgressDisplay:
    """
    Shows the events of one run.

    Args:
        console: The console for all output, on stderr.
        live: Whether the console is a terminal that can redraw a line.
        verbose: Show thoughts, complete inputs of tools and every log line.
        level: The lowest level of log lines that are shown without *verbose*.
        thinking: How thoughts of models are shown without *verbose*: ``"show"``, ``"hide"``, or ``"fold"`` to one line.
        colors: The style of each kind of line.

    Attributes:
        shows_questions: Whether questions are printed as lines; ``False`` if they are asked on the same console.
        colors: The style of each kind of line.
        verbose: Whether complete inputs of tools are shown.
        thinking: How thoughts are shown.
        level: The number of the lowest level of log lines.
        counts: The counts of the run.
        children: The children of the run.
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
        self.colors = colors
        self.verbose = verbose
        self.thinking = "show" if verbose else thinking
        self.level = 0 if verbose else LEVELS.index(level)
        self.counts = _RunCounts()
        self.children = _Children()
        self._console = console
        self._partial: dict[str, str] = {}
        self._streamed: set[str] = set()
        self._speaker = ""
        self._wants_live = live
        self._live: Live | None = None
        self._asked_diffs: list[str] = []

    @contextmanager
    def show_status_line(self) -> Iterator[ProgressDisplay]:
        """Show the status line during the block, if the output is a terminal."""
        if not self._wants_live:
            yield self
            return
        from rich.live import Live

        with Live(
            console=self._console,
            get_renderable=self._render_live_text,
            refresh_per_second=10,
            transient=True,
            redirect_stdout=False,
        ) as self._live:
            yield self
        self._live = None

    @contextmanager
    def hide_status_line(self) -> Iterator[None]:
        """Hide the status line during the block, so that the user can type."""
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
        """Count an event and print it; of a run that is one of many siblings, print only questions, logs and warnings."""
        self.counts.count_event(event)
        if isinstance(event, ev.AgentSpawned | ev.AgentFinished) and self._count_child_and_print_progress(event):
            return
        if self.children.is_only_counted(event.path) and not isinstance(event, OF_MANY):
            return
        self._show_event(event)

    def _show_event(self, event: ev.Event) -> None:
        """Call the function that prints events of this class, if there is one."""
        show = SHOWN.get(type(event))
        if show is not None:
            show(self, event)

    def _count_child_and_print_progress(self, event: ev.AgentSpawned | ev.AgentFinished) -> bool:
        """Count the start or end of one of many children, and print failures and progress; return whether the event is then done."""
        if isinstance(event, ev.AgentSpawned):
            return self.children.count_started_child(event, are_shown=self.verbose)
        group = self.children.count_ended_child_and_find_group(event)
        if group is None:
            return self.children.is_only_counted(event.path)
        if event.status is not RunStatus.COMPLETED:
            self.print_line(event.path, f"agent {event.agent_id} ended: {event.status.value}", self.colors.agent)
        if group.should_print_progress:
            self._print_group_progress(event.path, group)
        return True

    def _print_group_progress(self, run_path: str, group: _SiblingGroup) -> None:
        """Print how many of the sibling children have ended."""
        group.printed = group.ended
        self.print_line(run_path, f"agents {group.agent_id}: {group.ended}/{group.asked}", self.colors.agent)

    def record_shown_diff(self, question: Question) -> None:
        """Record that the person saw the diff of *question*, so that the result does not print it again."""
        diff = find_question_diff(question)
        self._asked_diffs += [diff] if diff else []

    def print_run_summary(self, result: RunResult) -> None:
        """Print held-back text, new counts of child groups, and a line with the status, counts and cost of the run."""
        for path in list(self._partial):
            self.flush_text(path)
        for path, group in self.children.groups.items():
            if group.printed != group.ended:
                self._print_group_progress(path, group)
        self.print_line(
            "", " | ".join([part for part in self._make_summary_parts(result) if part]), self.colors.summary
        )

    def _make_summary_parts(self, result: RunResult) -> list[str]:
        """Return the parts of the last line: status, steps, calls, tokens, cost and time."""
        return self.counts.make_summary_parts(result)

    # --- what is shown ------------------------------------------------------------------------------------------------

    def _render_live_text(self) -> Text:
        """Return the text of the live display: unfinished lines and the status line."""
        from rich.text import Text

        # The screen is refreshed by another thread, so the dict may change meanwhile.
        text = Text("".join([visible(p) for p in list(self._partial.values())]))
        if text:
            text.append("\n")
        return text.append_text(self.format_status_line())

    def format_status_line(self) -> Text:
        """Return the status line: step, activity, tokens, cost and time."""
        from rich.text import Text

        groups = [group for group in list(self.children.groups.values()) if group.is_open]
        parts = self.counts.make_status_parts([f"{group.agent_id} {group.ended}/{group.asked}" for group in groups])
        return Text(" | ".join([p for p in parts if p]), style=self.colors.note)

    def print_line(self, run_path: str, text: str, style: str = "") -> None:
        """Print a line, indented by the depth of its run; a heading names the run if it changed."""
        from rich.text import Text

        speaker = self.children.find_headed_path(run_path)
        if speaker != self._speaker:
            self._speaker = speaker
            if speaker:
                heading = "  " * get_indent_level(speaker) + self.children.headings[speaker]
                self._console.print(Text(heading, style=self.colors.note), soft_wrap=True)
        line = "  " * get_indent_level(run_path) + text
        if self._console.is_terminal:
            line = wrap_lines(line, self._console.width, HANG)
        self._console.print(Text(line, style=style), soft_wrap=True)

    def add_streamed_text(self, run_path: str, text: str) -> None:
        """Print the finished lines of streamed text, and hold back the last one."""
        lines = (self._partial.pop(run_path, "") + text).split("\n")
        for line in lines[:-1]:
            self.print_line(run_path, visible(line))
        if lines[-1]:
            self._partial[run_path] = lines[-1]

    def flush_text(self, run_path: str) -> None:
        """Print the held-back, unfinished line of a run."""
        rest = self._partial.pop(run_path, "")
        if rest:
            self.print_line(run_path, visible(rest))

    def stream_text(self, event: ev.TextDelta) -> None:
        """Print the finished lines of a streaming text with its next piece."""
        self._streamed.add(event.path)
        self.add_streamed_text(event.path, event.text)

    def complete_text(self, event: ev.TextCompleted) -> None:
        """End a text; print it whole if no piece of it was shown."""
        if event.path in self._streamed:
            self._streamed.discard(event.path)
        else:
            self.add_streamed_text(event.path, event.text)
        self.flush_text(event.path)

    def discard_text(self, run_path: str) -> None:
        """Drop the held-back text of a discarded reply."""
        self._partial.pop(run_path, None)
        self._streamed.discard(run_path)

    def print_todos(self, event: ev.TodosChanged) -> None:
        """Print the current todos of an agent."""
        for todo in parse_todos(event.todos):
            mark, style = ("x", self.colors.result) if todo.completed else (" ", "")
            self.print_line(event.path, f"{'':>11} [{mark}] {one_line(todo.task, 120)}", style)

    def print_unseen_diff(self, run_path: str, diff: str) -> None:
        """Print the first lines of a diff, unless the person was shown it in a question."""
        if diff in self._asked_diffs:
            self._asked_diffs.remove(diff)
            return
        lines = diff.splitlines()
        for line, style in style_diff_lines("\n".join(lines[:MAX_DIFF_LINES]), self.colors):
            self.print_line(run_path, f"{'':>11} {line}", style)
        if len(lines) > MAX_DIFF_LINES:
            self.print_line(run_path, f"{'':>11} ({len(lines) - MAX_DIFF_LINES} more lines)", self.colors.note)


class _RunCounts:
    """
    The steps, calls, tokens and cost of a run and its children, for the status line and the summary.

    Attributes:
        usage: The tokens of all models.
        cost: The cost of these tokens; ``None`` if it is unknown.
        filled: The tokens of the root's last prompt and its reply; 0 if no model reported them.
    """

    def __init__(self) -> None:
        self.usage = Usage()
        self.cost: Decimal | None = Decimal(0)
        self.filled = 0
        self._step = 0
        self._doing = "starting"
        self._started: dict[str, int] = {}
        self._start = time.monotonic()
        # The root's result has none of its children's.
        self._agents = self._steps = self._tool_calls = 0

    def count_event(self, event: ev.Event) -> None:
        """Count started children, their steps and their tool calls; store the last step that each run started."""
        self._agents += isinstance(event, ev.AgentSpawned)
        if isinstance(event, ev.StepStarted):
            self._started[event.path] = event.step + 1
        if event.path:
            self._steps += isinstance(event, ev.StepStarted)
            self._tool_calls += isinstance(event, ev.ToolFinished)

    def add_reply_usage(self, event: ev.ModelFinished) -> None:
        """Add the tokens and the cost of a reply; a reply of the root also sets ``filled``."""
        if event.reply is None:
            return
        used = event.reply.usage
        self.usage += used or Usage(at_least=True)
        self.cost = add_cost(self.cost, event.reply.cost)
        if not event.path and used is not None:
            self.filled = used.prompt_tokens + used.completion_tokens

    def set_activity(self, event: ev.PhaseChanged | ev.AnswerReceived) -> None:
        """Store the activity of the root for the status line; none after an answer."""
        said = ""
        if isinstance(event, ev.PhaseChanged):
            said = f"{event.phase.value.replace('_', ' ')} {one_line(event.detail, 40)}".strip()
        if not event.path:
            self._doing = said

    def pop_started_step(self, run_path: str) -> int:
        """Remove and return the step that the run at *run_path* has started; 0 if there is no new one. Store it if it is of the root."""
        step = self._started.pop(run_path, 0)
        if step and not run_path:
            self._step = step
        return step

    def make_status_parts(self, groups: Iterable[str]) -> list[str]:
        """Return the parts of the status line; *groups* are texts such as ``reviewer 3/8``, one per group of children."""
        spent = format_tokens(self.usage)
        return [
            f"step {self._step}" if self._step else "",
            self._doing,
            *groups,
            spent,
            format_cost(self.cost, usage=self.usage) if spent else "",
            f"{time.monotonic() - self._start:.0f} s",
        ]

    def make_summary_parts(self, result: RunResult) -> list[str]:
        return [
            result.status.value.replace("_", " "),
            format_count(result.state.step_index + self._steps, "step"),
            format_count(sum(not call.path for call in result.tool_calls) + self._tool_calls, "tool call"),
            format_count(self._agents, "child run") if self._agents else "",
            format_tokens(result.usage),
            format_cost(result.cost, usage=result.usage) if result.usage.requests else "no model call",
            f"{time.monotonic() - self._start:.1f} s",
        ]


class _Children:
    """
    The children of a run: single ones, which are followed, and groups of many, which are only counted.

    Attributes:
        groups: The group of many children of a run, by the path of that run.
        headings: The heading of each child that runs alongside others, by its path.
    """

    def __init__(self) -> None:
        self.groups: dict[str, _SiblingGroup] = {}
        self.headings: dict[str, str] = {}
        self._folded: set[str] = set()

    def is_only_counted(self, run_path: str) -> bool:
        """Return whether the run at *run_path*, or a parent, is one of many siblings that are only counted."""
        ends = [*[place for place, character in enumerate(run_path) if character == "."], len(run_path)]
        return bool(self._folded) and any(run_path[:end] in self._folded for end in ends)

    def find_headed_path(self, run_path: str) -> str:
        """Return the path of the nearest run with a heading, starting with *run_path* itself; ``""`` if there is none."""
        while run_path and run_path not in self.headings:
            run_path = run_path.rpartition(".")[0]
        return run_path

    def store_child_heading(self, event: ev.AgentSpawned) -> None:
        """Store the heading of a child that runs alongside others."""
        self.headings[event.child_path] = f"[{event.agent_id}: {one_line(event.prompt, 40)}]".replace(": ]", "]")

    def count_started_child(self, event: ev.AgentSpawned, *, are_shown: bool) -> bool:
        """Count a child if it is one of many, unless all *are_shown*; return whether its start must not be printed."""
        if are_shown or event.of < MANY:
            return self.is_only_counted(event.path)
        self.groups.setdefault(event.path, _SiblingGroup(event.agent_id)).count_started(event.of)
        self._folded.add(event.child_path)
        self.store_child_heading(event)
        return True

    def count_ended_child_and_find_group(self, event: ev.AgentFinished) -> _SiblingGroup | None:
        """Count an ended child in its group of many siblings and return the group; ``None`` for any other child."""
        if event.child_path not in self._folded:
            return None
        group = self.groups[event.path]
        group.ended += 1
        return group


class _SiblingGroup:
    """
    Many children that one run started together.

    Attributes:
        agent_id: The agent of the first child.
        asked: The number of requested children so far.
        ended: The number of ended children.
        printed: The number of ended children in the last printed line.
    """

    def __init__(self, agent_id: str) -> None:
        self.agent_id = agent_id
        self.asked = self.ended = self.printed = 0
        self._awaited = 0

    def count_started(self, batch_size: int) -> None:
        """Count a started child. The first child of a batch adds *batch_size* to ``asked``."""
        if not self._awaited:
            self._awaited = batch_size
            self.asked += batch_size
        self._awaited -= 1

    @property
    def is_open(self) -> bool:
        """Whether some children have not ended."""
        return self.ended < self.asked

    @property
    def should_print_progress(self) -> bool:
        """Whether all children have ended, and twice as many as at the last printed line."""
        return not self.is_open and self.ended >= 2 * self.printed


# --- events -----------------------------------------------------------------------------------------------------------


# --- runs and steps -----------------------------------------------------------------------------------------------


def _print_started_step(display: ProgressDisplay, event: ev.ModelStarted) -> None:
    """Print the number of a new step at its first model call."""
    # Announced here, so that a step which fails for lack of a model shows nothing but its error.
    step = display.counts.pop_started_step(event.path)
    if step and not display.children.is_only_counted(event.path):
        display.print_line(event.path, f"step {step}", display.colors.step)


def _print_agent_start(display: ProgressDisplay, event: ev.AgentSpawned) -> None:
    """Print the start of a child, and store its heading if it has siblings."""
    beside = " in the background" if event.is_background else ""
    display.print_line(
        event.path,
        f"agent {event.agent_id} starts{beside}: {one_line(event.prompt)}".rstrip(": "),
        display.colors.agent,
    )
    if not event.only_child:
        display.children.store_child_heading(event)


def _print_agent_end(display: ProgressDisplay, event: ev.AgentFinished) -> None:
    """Print the held-back text of a child, and its status at the end."""
    display.flush_text(event.child_path)
    display.print_line(event.path, f"agent {event.agent_id} ended: {event.status.value}", display.colors.agent)


def _print_wait(display: ProgressDisplay, event: ev.WaitStarted) -> None:
    display.print_line(event.path, f"  {one_line(event.description, 300)}", "dim")


# --- model --------------------------------------------------------------------------------------------------------


def _print_thoughts(display: ProgressDisplay, event: ev.ThinkingCompleted) -> None:
    """Print the thoughts of a model, their first line, or nothing, as the display is set."""
    lines = [line for line in event.text.splitlines() if line.strip()]
    if display.thinking == "show":
        for line in lines:
            display.print_line(event.path, f"  thinks: {visible(line)}", display.colors.thinking)
    elif display.thinking == "fold" and lines:
        more = f" ({len(lines) - 1} more line{'s' * (len(lines) > 2)})" if len(lines) > 1 else ""  # noqa: PLR2004
        display.print_line(event.path, f"  thinks: {one_line(lines[0], 80)}{more}", display.colors.thinking)


def _discard_text_and_print_notice(display: ProgressDisplay, event: ev.ReplyDiscarded) -> None:
    """Drop the held-back text of an interrupted reply, and print that it was discarded."""
    display.discard_text(event.path)
    display.print_line(event.path, "(the reply was interrupted and discarded)", display.colors.warning)


def _print_model_retry(display: ProgressDisplay, event: ev.ModelRetry) -> None:
    """Print why a model call failed, and when it is retried."""
    why = f"attempt {event.attempt} failed; retrying in {event.wait:.1f} s: {one_line(event.error, 200)}"
    display.print_line(event.path, why, display.colors.warning)


def _print_rate_limit_wait(display: ProgressDisplay, event: ev.RateLimited) -> None:
    """Print that a run waits for the rate limit of a provider."""
    how_long = "" if event.wait is None else f", {event.wait:.0f} s at most"
    display.print_line(
        event.path, f"waits for the rate limit of {event.provider} ({event.limit}{how_long})", display.colors.note
    )


# --- tools --------------------------------------------------------------------------------------------------------


def _print_tool_call(display: ProgressDisplay, event: ev.ToolStarted) -> None:
    """Print the held-back text of a run, then a tool call with its arguments."""
    display.flush_text(event.path)
    call = f"{one_line(event.tool_name, 64)} {_format_tool_arguments(display, event)}".rstrip()
    display.print_line(event.path, f"{one_line(event.source, 16):>9} > {call}", display.colors.tool)


def _print_tool_result(display: ProgressDisplay, event: ev.ToolFinished) -> None:
    """Print the status and the diff of a tool call; print nothing for a run that is only counted."""
    if display.children.is_only_counted(event.path):
        return
    result, colors = event.result, display.colors
    how = result.status if result.is_error else "waits" if result.status == "pending" else "ok"
    why = f": {one_line(result.text, 200)}" if result.is_error else ""
    said = f"{one_line(event.tool_name, 64)} {how}, {event.duration_ms} ms{why}"
    display.print_line(event.path, f"{'':>9} < {said}", colors.error if result.is_error else colors.result)
    display.print_unseen_diff(event.path, find_result_diff(result.data))


def _print_repeat_warning(display: ProgressDisplay, event: ev.Repeat) -> None:
    """Print a warning about a tool that was called often with the same result."""
    name = one_line(event.tool_name, 64)
    display.print_line(
        event.path, f"  warning: {name} was called {event.count} times with the same result", display.colors.warning
    )


def _format_tool_arguments(display: ProgressDisplay, event: ev.ToolStarted) -> str:
    """Return the arguments of a tool call in one line; for a shell tool, its command."""
    value = event.input
    if not isinstance(value, dict):
        return ""
    if display.verbose:
        return one_line(", ".join([f"{k}={v!r}" for k, v in value.items()]), 2000)
    if event.category == "execute" and (command := find_shell_command(value)):
        return f"$ {one_line(command, 200)}"
    said = [_format_argument(v) for v in value.values() if isinstance(v, str | list | dict)]
    return one_line(", ".join([s for s in said if s]), 80)


def _print_tool_progress(display: ProgressDisplay, event: ev.ToolProgress) -> None:
    """Print the message and the percentage of a running tool call."""
    percent = "" if event.percent is None else f" {event.percent:.0f} %"
    display.print_line(event.path, f"  . {one_line(event.message, 200)}{percent}", display.colors.note)


# --- people and logs ----------------------------------------------------------------------------------------------


def _print_question_line(display: ProgressDisplay, event: ev.QuestionAsked | ev.PermissionRequested) -> None:
    if display.shows_questions:
        display.print_line(event.path, f"  ? {one_line(event.question.text, 400)}", display.colors.question)


def _print_permission_question(display: ProgressDisplay, event: ev.PermissionRequested) -> None:
    """Print a permission question with its action and the origins of its data, if the display shows questions."""
    _print_question_line(display, event)
    shown = event.question.preview
    if not display.shows_questions:
        return
    if shown is not None:
        display.print_line(event.path, f"    {one_line(str(shown['action']), 400)}", display.colors.warning)
    for origin in sort_origins(event.question.provenance):
        style = display.colors.note if origin["trusted"] else display.colors.warning
        display.print_line(event.path, f"    {one_line(describe_origin(origin), 400)}", style)
    if event.question.remember is not None:
        display.print_line(event.path, f"    always: {one_line(str(event.question.remember['id']), 400)}", "dim")


def _print_notification(display: ProgressDisplay, event: ev.Notification) -> None:
    display.print_line(event.path, f"  * {one_line(event.message, 400)}")


def _print_log_line(display: ProgressDisplay, event: ev.LogLine | ev.ToolLog) -> None:
    """Print a log line, unless its level is too low."""
    level = event.level if event.level in LEVELS else "warning"
    if LEVELS.index(level) >= display.level:
        colors = display.colors
        style = {"warning": colors.warning, "error": colors.error}.get(level, colors.note)
        display.print_line(event.path, f"  {level}: {one_line(event.message, 400)}", style)


def _print_warning(display: ProgressDisplay, event: ev.HandlerNotice | ev.Warned | ev.HookFailed) -> None:
    said = event.error if isinstance(event, ev.HookFailed) else event.message
    display.print_line(event.path, f"  warning: {one_line(said, 400)}", display.colors.warning)


def get_indent_level(run_path: str) -> int:
    """Return the depth of a run below the root run."""
    return run_path.count(".") + 1 if run_path else 0


def _format_argument(value: object) -> str:
    """Return an argument as text: the items of a list, the first value of a dict."""
    if isinstance(value, list):
        return ", ".join([_format_argument(v) for v in value])
    if isinstance(value, dict):
        return _format_argument(next(iter(value.values()), ""))
    return str(value)


def style_diff_lines(diff: str, colors: ColorScheme = COLORS) -> Iterator[tuple[str, str]]:
    """Yield each line of a unified diff, made visible, with its style."""
    styles = {
        "+++": colors.summary, "---": colors.summary, "@@": colors.place, "+": colors.added, "-": colors.removed,
    }  # fmt: skip
    for line in diff.splitlines():
        yield visible(line), next((style for begin, style in styles.items() if line.startswith(begin)), "")


SHOWN: Mapping[type[ev.Event], Callable[[ProgressDisplay, Any], None]] = {
    ev.StepStarted: lambda display, event: display.flush_text(event.path),
    ev.ModelStarted: _print_started_step,
    ev.ModelFinished: lambda display, event: display.counts.add_reply_usage(event),
    ev.PhaseChanged: lambda display, event: display.counts.set_activity(event),
    ev.AnswerReceived: lambda display, event: display.counts.set_activity(event),
    ev.AgentSpawned: _print_agent_start,
    ev.AgentFinished: _print_agent_end,
    ev.WaitStarted: _print_wait,
    ev.TextDelta: ProgressDisplay.stream_text,
    ev.TextCompleted: ProgressDisplay.complete_text,
    ev.ThinkingCompleted: _print_thoughts,
    ev.ReplyDiscarded: _discard_text_and_print_notice,
    ev.ModelRetry: _print_model_retry,
    ev.RateLimited: _print_rate_limit_wait,
    ev.ToolStarted: _print_tool_call,
    ev.ToolFinished: _print_tool_result,
    ev.TodosChanged: ProgressDisplay.print_todos,
    ev.Repeat: _print_repeat_warning,
    ev.ToolProgress: _print_tool_progress,
    ev.QuestionAsked: _print_question_line,
    ev.PermissionRequested: _print_permission_question,
    ev.Notification: _print_notification,
    ev.LogLine: _print_log_line,
    ev.ToolLog: _print_log_line,
    ev.HookFailed: _print_warning,
    ev.HandlerNotice: _print_warning,
    ev.Warned: _print_warning,
}
"""The function that shows each kind of event; counts are in the status line."""
