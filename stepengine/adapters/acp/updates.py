"""
Our events as updates of the Agent Client Protocol.

What lives here: what an editor is shown of a run, and how a question about a tool call looks. What must not: sessions and connections.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import acp
import attrs
from acp.schema import Cost, ToolCallLocation, ToolCallUpdate, UsageUpdate

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
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.visible import visible
from stepengine.errors import StepEngineError

__all__ = ("ShownTurn",)

KINDS = {"read": "read", "write": "edit", "execute": "execute", "network": "fetch"}
SEARCHES = ("search", "glob", "find")
NAMED = ("path", "paths", "command", "pattern", "query", "url", "agent_type", "name")
"""Members of an input, the first of which goes into a title to say what the call is about."""
TITLE_CHARS = 100
RESULT_CHARS = 30_000
MAX_OLD_BYTES = 1_048_576
MAX_IMAGE_BYTES = 8 * 1_048_576
DIFFS = ("unified_diff", "diff")
SHOWN_ELSEWHERE = ("problem", "argv")
"""Details of a preview that say again what stands in others."""


@attrs.define(eq=False)
class _OpenMessage:
    """A message that is open, and what was shown of it."""

    id: str
    shown: str = ""


class ShownTurn:
    """
    What an editor was shown of one turn.

    Args:
        turn: The turn's number in its session: ids of calls and messages begin with it.
        cwd: The workspace; paths of files are absolute in the protocol.
        is_live: Whether the run happens now, so that files hold what is about to be replaced.
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
        self._blocks: dict[tuple[str, int], _OpenMessage] = {}
        self._calls: set[str] = set()
        self._said: list[str] = []
        self._made = 0

    def of(self, event: Event) -> Iterator[Any]:
        """Give the updates that stand for *event*."""
        show = self.SHOWN.get(type(event))
        return iter(()) if show is None else show(self, event)

    def filled(self, state: AgentState, model: str) -> Iterator[object]:
        """Give how full the model's context is by estimate, for a conversation that goes on from *state*."""
        return self._usage(state.context_tokens, model, self._cost)

    def _show_usage(self, event: ModelStarted | ModelFinished | StepFinished) -> Iterator[object]:
        """Give, after a step of the root, how full the model's context is and what the session has cost."""
        if event.path:
            return
        if isinstance(event, StepFinished):
            known = None if self._cost is None or event.cost is None else self._cost + event.cost
            yield from self._usage(*self._filled, known)
        elif isinstance(event, ModelStarted):
            self._is_step = event.purpose == "step"
        elif self._is_step and event.reply is not None and event.reply.usage is not None:
            used = event.reply.usage
            self._filled = (used.prompt_tokens + used.completion_tokens, event.model)

    def _usage(self, used: int, model: str, cost: Decimal | None) -> Iterator[object]:
        size = _window(model) if model else None
        if used and size:
            told = None if cost is None else Cost(amount=float(cost), currency="USD")
            yield UsageUpdate(session_update="usage_update", used=used, size=size, cost=told)

    def request(self, event: PermissionRequested) -> ToolCallUpdate:
        """Return the tool call that a permission is asked for."""
        call = self._call_id(event.path, event.tool_call_id)
        return ToolCallUpdate(
            tool_call_id=call,
            title=_title(event.tool_name, event.input),
            kind=_kind(event),
            status="pending",
            content=self._asked_content(event),
            locations=self._locations(event.input),
            raw_input=plain(event.input),
        )

    def in_terminal(self, path: str, call_id: str, terminal: str) -> object:
        """Return the update that shows the terminal in which a call runs; what it prints stays there when the call has ended."""
        call = self._call_id(path, call_id)
        self._diffed.add(call)
        return acp.update_tool_call(call, content=[acp.tool_terminal_ref(terminal)])

    # --- messages -----------------------------------------------------------------------------------------------------

    def _delta(self, event: TextDelta | ThinkingDelta) -> Iterator[object]:
        if not event.path:
            yield self._more("text" if isinstance(event, TextDelta) else "thought", event.seq, event.text)

    def _more(self, kind: str, seq: int, text: str) -> object:
        block = self._blocks.get((kind, seq))
        if block is None:
            self._made += 1
            block = self._blocks[kind, seq] = _OpenMessage(f"{self._turn}-{kind}-{self._made}")
        block.shown += text
        made = acp.update_agent_message_text(text) if kind == "text" else acp.update_agent_thought_text(text)
        made.message_id = block.id
        return made

    def _show_rest(self, event: TextCompleted | ThinkingCompleted) -> Iterator[object]:
        """Give what was not shown yet: all of it where there were no pieces, as in a replay."""
        if event.path:
            if isinstance(event, TextCompleted):
                content = [acp.tool_content(acp.text_block(event.text[:RESULT_CHARS]))]
                yield acp.update_tool_call(self._agent_id(event.path), content=content)
            return
        kind = "text" if isinstance(event, TextCompleted) else "thought"
        if kind == "text":
            self._said.append(event.text)
        block = self._blocks.get((kind, event.seq))
        if block is not None and not event.text.startswith(block.shown):
            del self._blocks[kind, event.seq]
            block = None
        rest = event.text[len(block.shown) if block is not None else 0 :]
        if rest:
            yield self._more(kind, event.seq, rest)
        self._blocks.pop((kind, event.seq), None)

    def _discard_reply(self, event: ReplyDiscarded) -> Iterator[object]:
        # What follows is another message.
        if not event.path:
            self._blocks.clear()
        yield from ()

    def _show_output(self, event: RunFinished) -> Iterator[object]:
        """Give what a run ends with when its model did not say it: what its handler returned."""
        text = event.result.text
        if text.strip() and not any(text in said for said in self._said):
            yield self._more("text", -1, text)

    def _show_notice(self, event: Compacted | Warned | WaitStarted) -> Iterator[object]:
        match event:
            case Warned():
                said = event.message
            case WaitStarted():
                whose = f"The child at {event.path}" if event.path else "The run"
                said = f"{whose} {event.words}."
            case _:
                said = f"The conversation was made shorter ({event.by})."
        yield acp.update_agent_thought_text(f"{visible(said)}\n")

    def _todos(self, event: TodosChanged) -> Iterator[object]:
        """Give the root's todos as the plan, which an editor shows whole; it has one, and children would write over it."""
        match event.todos:
            case list() as todos if not event.path:
                yield acp.update_plan([_entry(todo) for todo in todos if isinstance(todo, Mapping)])
            case _:
                pass

    # --- tools and agents ---------------------------------------------------------------------------------------------

    def _show_permission_request(self, event: PermissionRequested) -> Iterator[Any]:
        yield from self._begin(event, "pending", event.input, self._asked_content(event))

    def _tool_started(self, event: ToolStarted) -> Iterator[object]:
        yield from self._begin(event, "in_progress", event.input, list(self._diffs(event.input)))

    def _begin(self, event: Any, status: Any, given: object, content: Sequence[Any]) -> Iterator[Any]:
        call = self._call_id(event.path, event.tool_call_id)
        if call in self._calls:
            yield acp.update_tool_call(call, status=status)
            return
        self._calls.add(call)
        if any(each.type == "diff" for each in content):
            self._diffed.add(call)
        yield acp.start_tool_call(
            call,
            _title(event.tool_name, given),
            kind=_kind(event),
            status=status,
            content=content,
            locations=self._locations(given),
            raw_input=plain(given),
        )

    def _tool_finished(self, event: ToolFinished) -> Iterator[object]:
        result, call = event.result, self._call_id(event.path, event.tool_call_id)
        if result.status == "pending":
            return  # it is under way until the answer that it waits for is there
        status: Any = "failed" if result.is_error else "completed"
        # A diff says more than "written", and what is given takes its place.
        stays = call in self._diffed and not result.is_error  # neither diffs nor terminals give way to words
        yield acp.update_tool_call(call, status=status, content=None if stays else list(_shown_result(result)))

    def _progress(self, event: ToolProgress | ToolLog) -> Iterator[object]:
        # What a call shows is replaced, and a diff says more.
        call = self._call_id(event.path, event.tool_call_id)
        if event.tool_call_id and call not in self._diffed:
            content = [acp.tool_content(acp.text_block(event.message[:RESULT_CHARS]))]
            yield acp.update_tool_call(call, content=content)

    def _show_child(self, event: AgentSpawned) -> Iterator[object]:
        title = visible(event.display_name or event.agent_id, strict=True)[:TITLE_CHARS]
        prompt = [acp.tool_content(acp.text_block(event.prompt[:RESULT_CHARS]))] if event.prompt else None
        agent = self._agent_id(event.child_path)
        yield acp.start_tool_call(agent, title, kind="think", status="in_progress", content=prompt)

    def _agent_finished(self, event: AgentFinished) -> Iterator[object]:
        failed = event.status in (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.MAX_STEPS)
        yield acp.update_tool_call(self._agent_id(event.child_path), status="failed" if failed else "completed")

    # --- what a call is about ------------------------------------------------------------------------------------------

    def _asked_content(self, event: PermissionRequested) -> list[Any]:
        """Return what a call would change as diffs, else what its tool says of it, else what it is given, in words."""
        if diffs := list(self._diffs(event.input)):
            return diffs
        preview = event.preview if isinstance(event.preview, Mapping) else {"action": "", "details": event.input}
        said = "\n\n".join(_describe_preview(preview))
        return [acp.tool_content(acp.text_block(said[:RESULT_CHARS]))] if said else []

    def _diffs(self, given: object) -> Iterator[object]:
        match given:
            case {"path": str(path), "content": str(new)}:
                yield acp.tool_diff_content(self._absolute(path), new, self._old(path))
            case {"path": str(path), "replacements": list() | tuple() as replacements}:
                for each in replacements:
                    match each:
                        case {"old_string": str(old), "new_string": str(new)}:
                            yield acp.tool_diff_content(self._absolute(path), new, old)
                        case _:
                            pass
            case _:
                pass

    def _old(self, path: str) -> str | None:
        """Return what a file of the workspace holds that is about to be written; ``None`` when that cannot be said."""
        try:
            place = (self._cwd / path).resolve()
            if not self._is_live or not place.is_relative_to(self._cwd.resolve()):
                return None
            if not place.is_file() or place.stat().st_size > MAX_OLD_BYTES:
                return None
            return place.read_text(encoding="utf-8")
        except (OSError, ValueError, RuntimeError):  # the last for links in a circle, before Python 3.13
            return None

    def _locations(self, given: object) -> list[ToolCallLocation]:
        match given:
            case {"path": str(path)}:
                return [ToolCallLocation(path=self._absolute(path))]
            case {"paths": list() | tuple() as paths}:
                return [ToolCallLocation(path=self._absolute(path)) for path in paths if isinstance(path, str)]
            case _:
                return []

    def _absolute(self, path: str) -> str:
        return str(self._cwd / path)

    def _call_id(self, path: str, call: str) -> str:
        return f"{self._turn}:{path}:{call}" if path else f"{self._turn}:{call}"

    def _agent_id(self, path: str) -> str:
        return f"{self._turn}:agent-{path}"

    SHOWN: ClassVar[Mapping[type[Event], Callable[[ShownTurn, Any], Iterator[Any]]]] = {
        RunFinished: _show_output,
        StepFinished: _show_usage,
        ModelStarted: _show_usage,
        ModelFinished: _show_usage,
        TextDelta: _delta,
        ThinkingDelta: _delta,
        TextCompleted: _show_rest,
        ThinkingCompleted: _show_rest,
        ReplyDiscarded: _discard_reply,
        ToolStarted: _tool_started,
        ToolProgress: _progress,
        ToolLog: _progress,
        ToolFinished: _tool_finished,
        PermissionRequested: _show_permission_request,
        TodosChanged: _todos,
        AgentSpawned: _show_child,
        AgentFinished: _agent_finished,
        WaitStarted: _show_notice,
        Compacted: _show_notice,
        Warned: _show_notice,
    }
    """The events that an editor is shown in updates of a turn. Questions are requests of their own."""


def _entry(todo: Mapping[str, object]) -> Any:
    task = visible(str(todo.get("task", "")), strict=True)[:RESULT_CHARS]
    return acp.plan_entry(task, status="completed" if todo.get("completed") else "pending")


def _describe_preview(preview: Mapping[str, Any]) -> Iterator[str]:
    """Give the paragraphs that tell a person what a call would do."""
    if preview.get("action"):
        yield visible(str(preview["action"]), strict=True)
    details = plain(preview.get("details"))
    for name, value in details.items() if isinstance(details, dict) else [("", details)]:
        if name in SHOWN_ELSEWHERE or value in (None, "", [], {}) or (name, value) == ("cwd", "."):
            continue
        if name in DIFFS or name in ("command", "script"):
            yield _fence("diff" if name in DIFFS else "sh", visible(_words(value)))
            continue
        text, label = visible(_words(value)), visible(str(name), strict=True).replace("_", " ")
        is_long = "\n" in text or not isinstance(value, str | int | float | bool)
        yield f"{label}:\n\n{_fence('', text)}".lstrip(":\n") if is_long else f"{label}: {text}".removeprefix(": ")


def _words(value: object) -> str:
    """Return a value as a person reads it: words as a line of a shell, other lists and objects as JSON."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return shlex.join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)


def _fence(language: str, text: str) -> str:
    """Return *text* as a block of Markdown which nothing in it can end."""
    longest = max([len(run) for run in re.findall("`+", text)], default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _shown_result(result: ToolResult) -> Iterator[Any]:
    images = [part for part in result.media if isinstance(part, ImagePart) and part.data is not None]
    if result.text or not images:
        yield acp.tool_content(acp.text_block(_in_words(result)[:RESULT_CHARS]))
    for part in images:
        if len(part.data or b"") <= MAX_IMAGE_BYTES:
            yield acp.tool_content(acp.image_block(base64.b64encode(part.data or b"").decode(), part.mime_type))


def _in_words(result: ToolResult) -> str:
    """Return a result as a person reads it: what a command printed, what files hold, what a tool says that it did."""
    match result.data:
        case {"stdout": str(out), **more}:
            code, err = more.get("exit_code"), str(more.get("stderr") or "")
            printed = "\n".join([text.rstrip("\n") for text in (out, err) if text])
            ended = "" if code == 0 else f"It ended with the exit code {code}."
            notes = [str(more.get("message") or ""), ended if code is not None else ""]
            return (
                "\n\n".join(filter(None, [_fence("", visible(printed)) if printed else "", *notes]))
                or "It printed nothing."
            )
        case list() | tuple() as entries if entries and all(_is_entry(entry) for entry in entries):
            return "\n\n".join([_entry_in_words(entry) for entry in entries])
        case {"message": str(message), "unified_diff": str(diff), **_rest}:
            return f"{message}\n\n{_fence('diff', visible(diff))}"
        case {"message": str(message), "file": str(), **rest} if not rest:
            return message
        case _:
            return result.text


def _is_entry(entry: object) -> bool:
    """Return whether something is what ``read_files`` says of a file."""
    return (
        isinstance(entry, Mapping) and isinstance(entry.get("path"), str) and ("content" in entry or "error" in entry)
    )


def _entry_in_words(entry: Any) -> str:
    path = visible(entry["path"], strict=True)
    if "error" in entry:
        return f"{path}: {visible(str(entry['error']))}"
    return f"{path}\n\n{_fence('', visible(str(entry['content'])))}"


@cache
def _window(model: str) -> int | None:
    """Return how many tokens the context of a model holds, when that is known without asking anybody."""
    from stepengine.models import Models

    try:
        return Models.standard().info(model).context_window
    except StepEngineError:
        return None


def _kind(event: ToolStarted | PermissionRequested) -> Any:
    """Return the protocol's word for what a call does, whoever made it: a model, a handler or a hook."""
    if event.tool_name == "think_deeply":
        return "think"
    if event.category == "write" and event.tool_name.startswith("delete"):
        return "delete"
    if event.category == "read" and any(word in event.tool_name for word in SEARCHES):
        return "search"
    return KINDS.get(event.category, "other")


def _title(name: str, given: object) -> str:
    about = next((given[key] for key in NAMED if given.get(key)), "") if isinstance(given, Mapping) else ""
    said = about if isinstance(about, str) else " ".join(map(str, about)) if isinstance(about, list | tuple) else ""
    return visible(f"{name} {said}".strip(), strict=True)[:TITLE_CHARS]
