"""
Our events as updates of the Agent Client Protocol.

This module converts events and permission requests to updates of the protocol. Sessions and connections do not belong here.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import acp
from acp.schema import Cost, ToolCallLocation, ToolCallUpdate, UsageUpdate

from stepengine.adapters.display_items import FAILURES, TextEvent, TextItem, TextItems
from stepengine.data.call_text import find_call_subject, preview_parts
from stepengine.data.codec import plain
from stepengine.data.events import (
    AgentFinished,
    AgentSpawned,
    Compacted,
    Event,
    ModelFinished,
    ModelStarted,
    PermissionRequested,
    ReplyDiscarded,
    RunFinished,
    StepFinished,
    TextCompleted,
    TextDelta,
    ThinkingCompleted,
    ThinkingDelta,
    TodosChanged,
    ToolFinished,
    ToolLog,
    ToolProgress,
    ToolStarted,
    WaitStarted,
    Warned,
)
from stepengine.data.messages import ImagePart, ToolResult
from stepengine.data.state import AgentState
from stepengine.data.visible import cut_end, visible
from stepengine.errors import StepEngineError

KINDS = {"read": "read", "write": "edit", "execute": "execute", "network": "fetch"}
SEARCHES = ("search", "glob", "find")
TITLE_CHARS = 100
RESULT_CHARS = 30_000
MAX_OLD_BYTES = 1_048_576
MAX_IMAGE_BYTES = 8 * 1_048_576


class ShownTurn:
    """
    Converts the events of one turn into updates for an editor.

    Args:
        turn: The number of the turn in its session, with which ids of calls and messages start.
        cwd: The workspace; paths of files are absolute in the protocol.
        is_live: Whether the run is executed now, so that files still have the content before its writes.
        cost: What the turns before it cost in US dollars; ``None`` when a part of it is unknown.
    """

    def __init__(self, turn: int, cwd: Path, *, is_live: bool, cost: Decimal | None = Decimal(0)) -> None:
        self._turn = turn
        self._cwd = cwd
        self._is_live = is_live
        self._cost = cost
        self._filled = (0, "")
        self._is_step = False
        self._diffed: set[str] = set()
        self._texts = TextItems()
        self._calls: set[str] = set()

    def make_updates(self, event: Event) -> Iterator[Any]:
        """Yield the updates that describe *event*."""
        show = self.SHOWN.get(type(event))
        return iter(()) if show is None else show(self, event)

    def make_context_update(self, state: AgentState, model: str) -> Iterator[object]:
        """Yield an update with the estimated context size of a conversation that continues from *state*."""
        return self._make_usage_update(state.context_tokens, model, self._cost)

    def _store_or_show_usage(self, event: ModelStarted | ModelFinished | StepFinished) -> Iterator[object]:
        """Store the context use of a model call of the root; after a step, yield it with the session cost."""
        if event.path:
            return
        if isinstance(event, StepFinished):
            known = None if self._cost is None or event.cost is None else self._cost + event.cost
            yield from self._make_usage_update(*self._filled, known)
        elif isinstance(event, ModelStarted):
            self._is_step = event.purpose == "step"
        elif self._is_step and event.reply is not None and event.reply.usage is not None:
            used = event.reply.usage
            self._filled = (used.prompt_tokens + used.completion_tokens, event.model)

    def _make_usage_update(self, used: int, model: str, cost: Decimal | None) -> Iterator[object]:
        """Yield an update with context use and cost; nothing if the size of the context window is unknown."""
        size = _find_context_window(model) if model else None
        if used and size:
            told = None if cost is None else Cost(amount=float(cost), currency="USD")
            yield UsageUpdate(session_update="usage_update", used=used, size=size, cost=told)

    def make_permission_call(self, event: PermissionRequested) -> ToolCallUpdate:
        """Return the tool call for a permission request."""
        call = self._make_call_id(event.path, event.tool_call_id)
        return ToolCallUpdate(
            tool_call_id=call,
            title=_make_call_title(event.tool_name, event.input),
            kind=_choose_tool_kind(event),
            status="pending",
            content=self._make_permission_content(event),
            locations=self._list_file_locations(event.input),
            raw_input=plain(event.input),
        )

    def make_terminal_update(self, path: str, call_id: str, terminal: str) -> object:
        """Return the update that shows a call with its terminal, whose output stays visible after the end of the call."""
        call = self._make_call_id(path, call_id)
        self._diffed.add(call)
        return acp.update_tool_call(call, content=[acp.tool_terminal_ref(terminal)])

    # --- messages -----------------------------------------------------------------------------------------------------

    def _show_text(self, event: TextEvent) -> Iterator[object]:
        """Yield the text of the root; of a child the text of whole replies, as the content of its call."""
        if not event.path:
            yield from self._show_text_items(self._texts.make_items(event))
        elif isinstance(event, TextCompleted):
            content = [acp.tool_content(acp.text_block(cut_end(event.text, RESULT_CHARS)))]
            yield acp.update_tool_call(self._make_child_call_id(event.path), content=content)

    def _show_text_items(self, items: Iterable[TextItem]) -> Iterator[object]:
        """Yield the pieces of texts as messages of the agent, and of thoughts as its thoughts."""
        for step, text, piece, _ in items:
            if step == "piece":
                is_text = text.kind == "text"
                made = acp.update_agent_message_text(piece) if is_text else acp.update_agent_thought_text(piece)
                made.message_id = f"{self._turn}-{text.kind}-{text.number}"
                yield made

    def _end_discarded_texts(self, event: ReplyDiscarded) -> Iterator[object]:
        """End the open texts of a discarded reply, so that the next text is another message; yield nothing."""
        # What follows is another message.
        yield from self._show_text_items(self._texts.end_texts(event.path, discarded="all"))

    def _show_handler_output(self, event: RunFinished) -> Iterator[object]:
        """Yield the output of a run if its handler returned it and no model wrote it."""
        yield from self._show_text_items(self._texts.make_output_items(event, event.result.text))

    def _show_notice_as_thought(self, event: Compacted | Warned | WaitStarted) -> Iterator[object]:
        """Yield a warning, a wait or a compaction as a thought of the agent."""
        match event:
            case Warned():
                said = event.message
            case WaitStarted():
                whose = f"The child at {event.path}" if event.path else "The run"
                said = f"{whose} {event.description}."
            case _:
                said = f"The conversation was compacted ({event.by})."
        yield acp.update_agent_thought_text(f"{visible(said)}\n")

    def _show_todos(self, event: TodosChanged) -> Iterator[object]:
        """Yield the todos of the root as the plan. Todos of children are ignored, since an editor has only one plan."""
        match event.todos:
            case list() as todos if not event.path:
                yield acp.update_plan([_make_plan_entry(todo) for todo in todos if isinstance(todo, Mapping)])
            case _:
                pass

    # --- tools and agents ---------------------------------------------------------------------------------------------

    def _show_pending_call(self, event: PermissionRequested) -> Iterator[Any]:
        """Yield a call that waits for a permission, with its changes."""
        yield from self._start_or_update_call(event, "pending", event.input, self._make_permission_content(event))

    def _show_tool_start(self, event: ToolStarted) -> Iterator[object]:
        """Yield a call that has started, with the diffs of files that it writes."""
        yield from self._start_or_update_call(
            event, "in_progress", event.input, list(self._make_file_diffs(event.input))
        )

    def _start_or_update_call(self, event: Any, status: Any, input: object, content: Sequence[Any]) -> Iterator[Any]:
        """Yield the start of a new call with *content*, or the new status of a call that was shown before."""
        call = self._make_call_id(event.path, event.tool_call_id)
        if call in self._calls:
            yield acp.update_tool_call(call, status=status)
            return
        self._calls.add(call)
        if any(each.type == "diff" for each in content):
            self._diffed.add(call)
        yield acp.start_tool_call(
            call,
            _make_call_title(event.tool_name, input),
            kind=_choose_tool_kind(event),
            status=status,
            content=content,
            locations=self._list_file_locations(input),
            raw_input=plain(input),
        )

    def _show_tool_end(self, event: ToolFinished) -> Iterator[object]:
        """Yield the end of a call with its result; a diff or terminal stays instead. Nothing for a pending result."""
        result, call = event.result, self._make_call_id(event.path, event.tool_call_id)
        if result.status == "pending":
            return  # it is under way until the answer that it waits for is there
        status: Any = "failed" if result.is_error else "completed"
        # A diff says more than "written", and what is given takes its place.
        stays = call in self._diffed and not result.is_error  # neither diffs nor terminals give way to words
        yield acp.update_tool_call(call, status=status, content=None if stays else list(_make_result_content(result)))

    def _show_tool_progress(self, event: ToolProgress | ToolLog) -> Iterator[object]:
        """Yield the message of a call as its content, unless the call shows a diff or a terminal."""
        # What a call shows is replaced, and a diff says more.
        call = self._make_call_id(event.path, event.tool_call_id)
        if event.tool_call_id and call not in self._diffed:
            content = [acp.tool_content(acp.text_block(cut_end(event.message, RESULT_CHARS)))]
            yield acp.update_tool_call(call, content=content)

    def _show_child_start(self, event: AgentSpawned) -> Iterator[object]:
        """Yield the start of a child run, shown as a tool call with its prompt."""
        title = visible(event.display_name or event.agent_id, strict=True)[:TITLE_CHARS]
        prompt = [acp.tool_content(acp.text_block(cut_end(event.prompt, RESULT_CHARS)))] if event.prompt else None
        agent = self._make_child_call_id(event.child_path)
        yield acp.start_tool_call(agent, title, kind="think", status="in_progress", content=prompt)

    def _show_child_end(self, event: AgentFinished) -> Iterator[object]:
        """Yield the end of a child run, shown as a tool call."""
        failed = event.status in FAILURES
        yield acp.update_tool_call(
            self._make_child_call_id(event.child_path), status="failed" if failed else "completed"
        )

    # --- what a call is about ------------------------------------------------------------------------------------------

    def _make_permission_content(self, event: PermissionRequested) -> list[Any]:
        """Return the origins of a call's arguments, then its changes as diffs, else its preview, else its input as text."""
        origins = event.question.origins
        told = [acp.tool_content(acp.text_block("\n".join(origins)))] if origins else []
        if diffs := list(self._make_file_diffs(event.input)):
            return [*told, *diffs]
        preview = event.preview if isinstance(event.preview, Mapping) else {"details": event.input}
        said = "\n\n".join(_describe_preview(preview))
        return [*told, acp.tool_content(acp.text_block(cut_end(said, RESULT_CHARS)))] if said else told

    def _make_file_diffs(self, input: object) -> Iterator[object]:
        """Yield the diffs of an input that writes a file or replaces strings in it."""
        match input:
            case {"path": str(path), "content": str(new)}:
                yield acp.tool_diff_content(self._make_path_absolute(path), new, self._read_old_text(path))
            case {"path": str(path), "replacements": list() | tuple() as replacements}:
                for each in replacements:
                    match each:
                        case {"old_string": str(old), "new_string": str(new)}:
                            yield acp.tool_diff_content(self._make_path_absolute(path), new, old)
                        case _:
                            pass
            case _:
                pass

    def _read_old_text(self, path: str) -> str | None:
        """Return the current text of a file of the workspace that a call will write; ``None`` if it cannot be read."""
        try:
            place = (self._cwd / path).resolve()
            if not self._is_live or not place.is_relative_to(self._cwd.resolve()):
                return None
            if not place.is_file() or place.stat().st_size > MAX_OLD_BYTES:
                return None
            return place.read_text(encoding="utf-8")
        except (OSError, ValueError, RuntimeError):  # the last for links in a circle, before Python 3.13
            return None

    def _list_file_locations(self, input: object) -> list[ToolCallLocation]:
        """Return the absolute paths in the members ``path`` and ``paths`` of a call's input, as locations."""
        match input:
            case {"path": str(path)}:
                return [ToolCallLocation(path=self._make_path_absolute(path))]
            case {"paths": list() | tuple() as paths}:
                return [
                    ToolCallLocation(path=self._make_path_absolute(path)) for path in paths if isinstance(path, str)
                ]
            case _:
                return []

    def _make_path_absolute(self, path: str) -> str:
        return str(self._cwd / path)

    def _make_call_id(self, path: str, call: str) -> str:
        """Return the id of a call in the editor, which has the number of the turn and the path of the run."""
        return f"{self._turn}:{path}:{call}" if path else f"{self._turn}:{call}"

    def _make_child_call_id(self, path: str) -> str:
        """Return the id of the tool call that shows the child run at *path*."""
        return f"{self._turn}:agent-{path}"

    SHOWN: ClassVar[Mapping[type[Event], Callable[[ShownTurn, Any], Iterator[Any]]]] = {
        RunFinished: _show_handler_output,
        StepFinished: _store_or_show_usage,
        ModelStarted: _store_or_show_usage,
        ModelFinished: _store_or_show_usage,
        TextDelta: _show_text,
        ThinkingDelta: _show_text,
        TextCompleted: _show_text,
        ThinkingCompleted: _show_text,
        ReplyDiscarded: _end_discarded_texts,
        ToolStarted: _show_tool_start,
        ToolProgress: _show_tool_progress,
        ToolLog: _show_tool_progress,
        ToolFinished: _show_tool_end,
        PermissionRequested: _show_pending_call,
        TodosChanged: _show_todos,
        AgentSpawned: _show_child_start,
        AgentFinished: _show_child_end,
        WaitStarted: _show_notice_as_thought,
        Compacted: _show_notice_as_thought,
        Warned: _show_notice_as_thought,
    }
    """The events that an editor is shown in updates of a turn. Questions are requests of their own."""


def _make_plan_entry(todo: Mapping[str, object]) -> Any:
    task = cut_end(visible(str(todo.get("task", "")), strict=True), RESULT_CHARS)
    return acp.plan_entry(task, status="completed" if todo.get("completed") else "pending")


def _describe_preview(preview: Mapping[str, Any]) -> Iterator[str]:
    """Yield paragraphs that describe the effect of a call to a person."""
    for kind, name, value in preview_parts(preview):
        text, label = (
            visible(_format_value(value), strict=kind == "action"),
            visible(name, strict=True).replace("_", " "),
        )
        if kind == "action":
            yield text
        elif kind != "member":
            yield _make_code_block("diff" if kind == "diff" else "sh", text)
        elif value not in (None, "", [], {}):
            is_long = "\n" in text or not isinstance(value, str | int | float | bool)
            yield (
                f"{label}:\n\n{_make_code_block('', text)}".lstrip(":\n")
                if is_long
                else f"{label}: {text}".removeprefix(": ")
            )


def _format_value(value: object) -> str:
    """Return a value as readable text: lists of words as a shell command, other lists and objects as JSON."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return shlex.join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)


def _make_code_block(language: str, text: str) -> str:
    """Return *text* as a Markdown code block with a fence longer than any in the text."""
    longest = max([len(run) for run in re.findall("`+", text)], default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _make_result_content(result: ToolResult) -> Iterator[Any]:
    """Yield the text and the images of a tool result as content blocks; too large images are left out."""
    images = [part for part in result.media if isinstance(part, ImagePart) and part.data is not None]
    if result.text or not images:
        yield acp.tool_content(acp.text_block(cut_end(_format_result(result), RESULT_CHARS)))
    for part in images:
        if len(part.data or b"") <= MAX_IMAGE_BYTES:
            yield acp.tool_content(acp.image_block(base64.b64encode(part.data or b"").decode(), part.mime_type))


def _format_result(result: ToolResult) -> str:
    """Return a tool result as readable text: output of a command, content of files, or the tool's own message."""
    match result.data:
        case {"stdout": str(out), **more}:
            code, err = more.get("exit_code"), str(more.get("stderr") or "")
            printed = "\n".join([text.rstrip("\n") for text in (out, err) if text])
            ended = "" if code == 0 else f"It ended with the exit code {code}."
            notes = [str(more.get("message") or ""), ended if code is not None else ""]
            return (
                "\n\n".join(filter(None, [_make_code_block("", visible(printed)) if printed else "", *notes]))
                or "It printed nothing."
            )
        case list() | tuple() as entries if entries and all(_is_file_entry(entry) for entry in entries):
            return "\n\n".join([_format_file_entry(entry) for entry in entries])
        case {"message": str(message), "unified_diff": str(diff), **_rest}:
            return f"{message}\n\n{_make_code_block('diff', visible(diff))}"
        case {"message": str(message), "file": str(), **rest} if not rest:
            return message
        case _:
            return result.text


def _is_file_entry(entry: object) -> bool:
    """Return whether a value has the form of a file in the result of ``read_files``."""
    return (
        isinstance(entry, Mapping) and isinstance(entry.get("path"), str) and ("content" in entry or "error" in entry)
    )


def _format_file_entry(entry: Any) -> str:
    """Return a file in the result of ``read_files`` as its path with the content in a code block, or with the error."""
    path = visible(entry["path"], strict=True)
    if "error" in entry:
        return f"{path}: {visible(str(entry['error']))}"
    return f"{path}\n\n{_make_code_block('', visible(str(entry['content'])))}"


@cache
def _find_context_window(model: str) -> int | None:
    """Return the context size of a model in tokens; ``None`` if it is not known without a request."""
    from stepengine.models import Models

    try:
        return Models.standard().info(model).context_window
    except StepEngineError:
        return None


def _choose_tool_kind(event: ToolStarted | PermissionRequested) -> Any:
    """Return the protocol's tool kind for a call of a model, a handler or a hook."""
    if event.tool_name == "think_deeply":
        return "think"
    if event.category == "write" and event.tool_name.startswith("delete"):
        return "delete"
    if event.category == "read" and any(word in event.tool_name for word in SEARCHES):
        return "search"
    return KINDS.get(event.category, "other")


def _make_call_title(name: str, input: object) -> str:
    """Return the title of a tool call: its name and subject, cut."""
    return visible(f"{name} {find_call_subject(input)}".strip(), strict=True)[:TITLE_CHARS]
