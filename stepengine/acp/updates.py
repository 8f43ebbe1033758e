"""
Our events as updates of the Agent Client Protocol.

What lives here: what an editor is shown of a run, and how a question about a tool call looks. What must not: sessions and connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

import acp
import attrs
from acp.schema import PermissionOption, ToolCallLocation, ToolCallUpdate

from stepengine.data.codec import plain
from stepengine.data.events import (
    AgentFinished,
    AgentSpawned,
    Compacted,
    Event,
    PermissionRequested,
    ReplyDiscarded,
    RunFinished,
    TextCompleted,
    TextDelta,
    ThinkingCompleted,
    ThinkingDelta,
    TodosChanged,
    ToolFinished,
    ToolLog,
    ToolProgress,
    ToolStarted,
    Warned,
)
from stepengine.data.questions import Question
from stepengine.data.state import RunStatus
from stepengine.data.visible import visible

__all__ = ("Shown", "options_of")

KINDS = {"read": "read", "write": "edit", "execute": "execute", "network": "fetch"}
SEARCHES = ("search", "glob", "find")
NAMED = ("path", "paths", "command", "pattern", "query", "url", "agent_type", "name")
"""Members of an input of which the first one says in a title what the call is about."""
TITLE_CHARS = 100
RESULT_CHARS = 30_000
MAX_OLD_BYTES = 1_048_576


@attrs.define(eq=False)
class _Block:
    """A message that is open, and what was shown of it."""

    id: str
    shown: str = ""


class Shown:
    """
    What an editor was shown of one turn.

    Args:
        turn: The turn's number in its session: ids of calls and messages begin with it.
        cwd: The workspace; paths of files are absolute in the protocol.
        is_live: Whether the run happens now, so that files hold what is about to be replaced.
    """

    def __init__(self, turn: int, cwd: Path, *, is_live: bool) -> None:
        self._turn = turn
        self._cwd = cwd
        self._is_live = is_live
        self._diffed: set[str] = set()
        self._blocks: dict[tuple[str, int], _Block] = {}
        self._calls: set[str] = set()
        self._said: list[str] = []
        self._made = 0

    def of(self, event: Event) -> Iterator[Any]:
        """Give the updates that stand for *event*."""
        match event:
            case TextDelta() | ThinkingDelta() | TextCompleted() | ThinkingCompleted() | ReplyDiscarded():
                yield from self._of_reply(event)
            case ToolStarted() | ToolProgress() | ToolLog() | ToolFinished() | PermissionRequested() | TodosChanged():
                yield from self._of_tool(event)
            case AgentSpawned():
                yield from self._spawned(event)
            case AgentFinished():
                yield from self._agent_finished(event)
            case Compacted() | Warned():
                yield from self._told(event)
            case RunFinished():
                yield from self._finished(event)
            case _:
                pass

    def _of_reply(
        self, event: TextDelta | ThinkingDelta | TextCompleted | ThinkingCompleted | ReplyDiscarded
    ) -> Iterator[object]:
        match event:
            case TextDelta() | ThinkingDelta():
                return self._delta(event)
            case TextCompleted() | ThinkingCompleted():
                return self._completed(event)
            case ReplyDiscarded():
                return self._discarded(event)
        assert_never(event)

    def _of_tool(
        self, event: ToolStarted | ToolProgress | ToolLog | ToolFinished | PermissionRequested | TodosChanged
    ) -> Iterator[object]:
        match event:
            case ToolStarted():
                return self._tool_started(event)
            case ToolProgress() | ToolLog():
                return self._progress(event)
            case ToolFinished():
                return self._tool_finished(event)
            case PermissionRequested():
                return self._asked(event)
            case TodosChanged():
                return self._todos(event)
        assert_never(event)

    def request(self, event: PermissionRequested) -> ToolCallUpdate:
        """Return the tool call that a permission is asked for."""
        call = self._call_id(event.path, event.tool_call_id)
        return ToolCallUpdate(
            tool_call_id=call,
            title=_title(event.tool_name, event.input),
            kind=_kind(event),
            status="pending",
            content=self._content(event.input, event.preview),
            locations=self._locations(event.input),
            raw_input=plain(event.input),
        )

    # --- messages -----------------------------------------------------------------------------------------------------

    def _delta(self, event: TextDelta | ThinkingDelta) -> Iterator[object]:
        if not event.path:
            yield self._more("text" if isinstance(event, TextDelta) else "thought", event.seq, event.text)

    def _more(self, kind: str, seq: int, text: str) -> object:
        block = self._blocks.get((kind, seq))
        if block is None:
            self._made += 1
            block = self._blocks[kind, seq] = _Block(f"{self._turn}-{kind}-{self._made}")
        block.shown += text
        made = acp.update_agent_message_text(text) if kind == "text" else acp.update_agent_thought_text(text)
        made.message_id = block.id
        return made

    def _completed(self, event: TextCompleted | ThinkingCompleted) -> Iterator[object]:
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

    def _discarded(self, event: ReplyDiscarded) -> Iterator[object]:
        # What follows is another message.
        if not event.path:
            self._blocks.clear()
        yield from ()

    def _finished(self, event: RunFinished) -> Iterator[object]:
        """Give what a run ends with when its model did not say it: what its handler returned."""
        text = event.result.text
        if text.strip() and not any(text in said for said in self._said):
            yield self._more("text", -1, text)

    def _told(self, event: Compacted | Warned) -> Iterator[object]:
        said = event.message if isinstance(event, Warned) else f"The conversation was made shorter ({event.by})."
        yield acp.update_agent_thought_text(f"{visible(said)}\n")

    def _todos(self, event: TodosChanged) -> Iterator[object]:
        """Give the root's todos as the plan, which an editor shows whole; it has one, and children would write over it."""
        match event.todos:
            case list() as todos if not event.path:
                yield acp.update_plan([_entry(todo) for todo in todos if isinstance(todo, Mapping)])
            case _:
                pass

    # --- tools and agents ---------------------------------------------------------------------------------------------

    def _asked(self, event: PermissionRequested) -> Iterator[Any]:
        yield from self._begin(event, "pending", event.input, self._content(event.input, event.preview))

    def _tool_started(self, event: ToolStarted) -> Iterator[object]:
        yield from self._begin(event, "in_progress", event.input, self._content(event.input, None))

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
        status: Any = "failed" if result.is_error else "completed"
        # A diff says more than "written", and what is given takes its place.
        stays = call in self._diffed and not result.is_error
        content = None if stays else [acp.tool_content(acp.text_block(result.text[:RESULT_CHARS]))]
        yield acp.update_tool_call(call, status=status, content=content)

    def _progress(self, event: ToolProgress | ToolLog) -> Iterator[object]:
        # What a call shows is replaced, and a diff says more.
        call = self._call_id(event.path, event.tool_call_id)
        if event.tool_call_id and call not in self._diffed:
            content = [acp.tool_content(acp.text_block(event.message[:RESULT_CHARS]))]
            yield acp.update_tool_call(call, content=content)

    def _spawned(self, event: AgentSpawned) -> Iterator[object]:
        title = visible(event.display_name or event.agent_id, strict=True)[:TITLE_CHARS]
        prompt = [acp.tool_content(acp.text_block(event.prompt[:RESULT_CHARS]))] if event.prompt else None
        agent = self._agent_id(event.child_path)
        yield acp.start_tool_call(agent, title, kind="think", status="in_progress", content=prompt)

    def _agent_finished(self, event: AgentFinished) -> Iterator[object]:
        failed = event.status in (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.MAX_STEPS)
        yield acp.update_tool_call(self._agent_id(event.child_path), status="failed" if failed else "completed")

    # --- what a call is about ------------------------------------------------------------------------------------------

    def _content(self, given: object, preview: object) -> list[Any]:
        """Return what a call would change as diffs, else what its tool says of it."""
        diffs = list(self._diffs(given))
        if diffs or not isinstance(preview, Mapping):
            return diffs
        details = plain(preview.get("details"))
        said = "\n".join([str(preview.get("action", "")), *([str(details)] if details else [])])
        return [acp.tool_content(acp.text_block(said[:RESULT_CHARS]))]

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


def _entry(todo: Mapping[str, object]) -> Any:
    task = visible(str(todo.get("task", "")), strict=True)[:RESULT_CHARS]
    return acp.plan_entry(task, status="completed" if todo.get("completed") else "pending")


def options_of(question: Question) -> list[PermissionOption]:
    """Return what a person can choose: yes, always and no for a permission; else the options of the question."""
    if question.tool_name is None:
        chosen = [PermissionOption(option_id=str(n), name=o, kind="allow_once") for n, o in enumerate(question.options)]
        return [*chosen, PermissionOption(option_id="no", name="No answer", kind="reject_once")]
    options = [PermissionOption(option_id="yes", name="Allow", kind="allow_once")]
    if question.remember is not None:
        name = f"Always: {visible(str(question.remember.get('id', 'such calls')), strict=True)}"
        options.append(PermissionOption(option_id="always", name=name, kind="allow_always"))
    return [*options, PermissionOption(option_id="no", name="Refuse", kind="reject_once")]


def _kind(event: ToolStarted | PermissionRequested) -> Any:
    """Return the protocol's word for what a call does, whoever made it: a model, a handler or a hook."""
    if event.tool_name == "think_deeply":
        return "think"
    if event.category == "read" and any(word in event.tool_name for word in SEARCHES):
        return "search"
    return KINDS.get(event.category, "other")


def _title(name: str, given: object) -> str:
    about = next((given[key] for key in NAMED if given.get(key)), "") if isinstance(given, Mapping) else ""
    said = about if isinstance(about, str) else " ".join(map(str, about)) if isinstance(about, list | tuple) else ""
    return visible(f"{name} {said}".strip(), strict=True)[:TITLE_CHARS]
