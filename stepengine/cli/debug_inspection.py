"""The commands of the debugger that show something of the current position and do not move."""

from __future__ import annotations

from typing import Any

from stepengine.cli.debug_screen import AROUND, SHORT, DebugScreen, RefusedCommand, parse_count
from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import format_cost
from stepengine.data.origins import describe_origin, describe_source, redact_origin, sort_origins
from stepengine.data.outcomes import Failure


def show_frames(screen: DebugScreen, _: str) -> None:
    """Print the stack frames."""
    frames = screen.list_frames()
    lines = [
        f"{'>' if n == screen.frame else ' '} {n} {frame.kind:<8} {frame.function} {screen.describe_frame_file(frame)}:{frame.line}"
        for n, frame in enumerate(frames)
    ]
    data = [{"function": f.function, "file": f.file, "line": f.line, "kind": f.kind} for f in frames]
    screen.print_result("\n".join(lines) or "no code of the agent is suspended here", {"frames": data})


def show_source(screen: DebugScreen, typed: str) -> None:
    """Print the source around the current line."""
    frame = screen.get_selected_frame()
    said = "\n".join(screen.format_source_lines(frame, parse_count(typed) if typed else 2 * AROUND))
    screen.print_result(said, {"file": frame.file, "line": frame.line, "source": screen.redact_and_escape(said)})


def select_frame(screen: DebugScreen, typed: str, direction: int = -1) -> None:
    """Select the frame that is the typed number of levels outwards, or inwards with *direction* 1, and print its source."""
    frames = screen.list_frames()
    chosen = screen.frame + direction * parse_count(typed)
    if not 0 <= chosen < len(frames):
        msg = f"there is no frame {chosen}: 0 is the outermost, {len(frames) - 1} the innermost"
        raise RefusedCommand(msg)
    screen.frame = chosen
    show_source(screen, str(AROUND))


def show_locals(screen: DebugScreen, _: str) -> None:
    """Print the variables of the frame, and the variables that ended programs left."""
    frames, left = screen.list_frames(), screen.debugger.variables() if screen.running is None else {}
    here = None if left and not frames else screen.get_selected_frame()
    if here is not None and here.kind == "program":
        screen.print_result("the variables of a program are available only after it has ended", {"locals": {}})
        return
    values = {**left, **({} if here is None else screen.debugger.locals(here))}
    width = max([len(name) for name in values], default=0)
    lines = [f"{name:<{width}}  {text}" for name, text in values.items()]
    screen.print_result("\n".join(lines) or "no variables", {"locals": values})


def print_expression(screen: DebugScreen, typed: str, *, pretty: bool = False) -> None:
    """Evaluate an expression in the selected frame and print its value; an exception is a failure of a scripted session."""
    if not typed:
        msg = "print what? An expression, such as len(seen)"
        raise RefusedCommand(msg)
    made = screen.debugger.evaluate_in_frame(screen.get_selected_frame(), typed, pretty=pretty)
    if made.raised and screen.asked.is_scripted:
        screen.tally.record_failure(Exit.FAILED)
    screen.print_result(made.text, {"expression": typed, "text": made.text, "raised": made.raised})


def show_state(screen: DebugScreen, _: str) -> None:
    """Print the state of the run: agent, usage, output, context and messages."""
    state = screen.debugger.moment().state
    texts = screen.debugger.texts
    head = [
        f"run_id {state.run_id}  agent {state.agent_id}  steps remaining {state.steps_remaining}",
        f"usage {state.usage.total_tokens:,} tokens, {format_cost(state.cost)}",
        f"output {texts.format_value(state.output)}",
        f"context {texts.format_value(state.context)}",
        f"{len(state.message_history)} messages",
    ]
    screen.print_messages(head, state.message_history)


def show_model_view(screen: DebugScreen, _: str) -> None:
    """Print the messages that the model sees."""
    view = screen.debugger.moment().view
    screen.print_messages([f"{len(view)} messages in view"], view)


def show_request(screen: DebugScreen, _: str) -> None:
    """Print the last request to a model."""
    request = screen.debugger.moment().request
    if request is None:
        msg = "no model was called yet"
        raise RefusedCommand(msg)
    head = [
        f"model {screen.redact_and_escape(request.model)}",
        f"tools {', '.join([spec.name for spec in request.tools]) or 'none'}",
        f"settings {screen.debugger.texts.format_value(request.settings)}",
        f"system {screen.redact_and_escape(request.system_prompt)}",
    ]
    screen.print_messages(head, [*request.messages, *request.tail])


def show_result(screen: DebugScreen, _: str, *, reply: bool = False) -> None:
    """Print the last outcome: an error, the text of a result, or with *reply* each of its members."""
    moment = screen.debugger.moment()
    if moment.outcome is None:
        msg = "there is no result here"
        raise RefusedCommand(msg)
    if isinstance(moment.outcome, Failure):
        error = moment.outcome.error
        text: Any = f"{type(error).__name__}: {error.message}"
        lines = [screen.redact_and_escape(text)]
    else:
        text = getattr(moment.outcome.value, "text", None)
        lines = screen.debugger.texts.format_lines(moment.outcome.value, width=max(SHORT, screen.width))
    said = [screen.redact_and_escape(text)] if isinstance(text, str) and text and not reply else lines
    screen.print_result("\n".join(said), {"result": said})


def show_hooks(screen: DebugScreen, _: str) -> None:
    """Print the hooks that were called since the last outcome, with their results."""
    called = [(h.point, h.hook, screen.debugger.texts.format_value(h.said)) for h in screen.debugger.moment().hooks]
    lines = [f"{point} {name}: {said}" for point, name, said in called]
    screen.print_result("\n".join(lines) or "no hook was called here", {"hooks": called})


def show_origins(screen: DebugScreen, typed: str) -> None:
    """Print the origins of the arguments of the current call, or the texts of the run that contain the typed value."""
    from stepengine.debugging.viewer.payload import PageTexts
    from stepengine.journal.origins import RecordedSources

    recorded, address = RecordedSources(), screen.debugger.moment().address
    calls = recorded.trace_calls(screen.debugger.stepper.tape.history)
    if typed:
        list(calls)
        found = [(path, source) for path, sources in recorded.find_value_sources(typed).items() for source in sources]
        said = [f"{describe_source(source)}{f' (run {path})' if path else ''}" for path, source in found]
    else:
        here = [origin for call in calls if call.address == address for origin in call.origins]
        said = [describe_origin(redact_origin(origin, PageTexts().clean)) for origin in sort_origins(here)]
    lines = list(dict.fromkeys(map(screen.redact_and_escape, said)))
    nothing = "this run did not receive that value" if typed else "there is no call with arguments here"
    screen.print_result("\n".join(lines) or nothing, {"origins": lines})


def show_cost(screen: DebugScreen, _: str) -> None:
    """Print the cost and the tokens so far."""
    state = screen.debugger.moment().state
    cost = None if state.cost is None else str(state.cost)
    said = f"{format_cost(state.cost)} · {state.usage.total_tokens:,} tokens · {state.context_tokens:,} in view"
    screen.print_result(said, {"cost": cost, "tokens": state.usage.total_tokens})


def show_divergence(screen: DebugScreen, _: str, *, recorded: bool) -> None:
    """Print the recorded or the current fields of a divergence."""
    if screen.parked is None:
        msg = "the run equals its record; these commands show both sides at a divergence"
        raise RefusedCommand(msg)
    fields = [(f.pointer, f.recorded if recorded else f.now) for f in screen.parked.diff]
    lines = [f"{pointer:<34} {value}" for pointer, value in fields]
    screen.print_result(screen.redact_and_escape("\n".join(lines) or screen.parked.message), {"fields": fields})
