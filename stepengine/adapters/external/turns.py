"""
Turns of an external agent: the step handler, the permission tools, and the record of the agent's output.

A turn is one call of a tool, so journals, replay, cancellation and recovery after a crash are those of every tool. If the agent requests
a permission or asks a question, the call ends with the requests. The handler yields each as a tool call or question of its own, which
rules and people decide as any other. The next call passes the decisions to the agent.

Must not be here: the connection to the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from stepengine.data.events import (
    ReplyDiscarded,
    TextCompleted,
    TextDelta,
    ThinkingDelta,
    TodosChanged,
    ToolFinished,
    ToolStarted,
)
from stepengine.data.hooks import StepContext
from stepengine.data.json import JsonDict, canonical, replace_lone_surrogates
from stepengine.data.messages import ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.data.visible import cut_end
from stepengine.data.yields import Ask, Parallel, ToolCall
from stepengine.errors import ExternalAgentError, ToolError
from stepengine.runtime.logs import LOGGER
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool, ToolPreview

T = TypeVar("T")

NAME_CHARS = 56
"""How long an id may be: names of tools are made of it."""
ENTRY_CHARS = 20_000
RECORD_CHARS = 2_000_000
"""How much of the output of one turn is recorded. A note says that the rest is left out."""
ENTRIES = 5_000
OPEN_ASKS = 100
SHOWN_CHARS = 2_000
JUDGED_CHARS = 200_000
"""How much of paths, command and URL one request may have. It is refused beyond that, since rules judge all of it."""
LEFT_OUT = "the rest of this turn was left out"
OTHER = "other"
ASKED: Mapping[str, str] = {"read": "read", "edit": "write", "execute": "execute", "fetch": "network"}
"""What permission is asked for, and its category."""
QUESTION = "question"
"""What is asked where it is no permission."""


# --- the run ----------------------------------------------------------------------------------------------------------


def make_external_handler(
    name: str,
    make_input: Callable[[StepContext], Mapping[str, Any]],
    make_output: Callable[[Mapping[str, Any]], T],
    *,
    carried: Sequence[str],
) -> Callable[[StepContext], Generator[Any, Any, T]]:
    """
    Return the step handler of an external agent: it runs turns, asks their questions, and returns the output.

    Args:
        name: The agent's id, which is also the name of the tool whose calls are its turns.
        make_input: Returns the input of the first call.
        make_output: Returns the output of the agent from the data of the last call.
        carried: The members of a call's data that the input of the next call of the turn repeats.
    """

    def handle_steps(ctx: StepContext) -> Generator[Any, Any, T]:
        wanted: dict[str, Any] = dict(make_input(ctx))
        while True:
            said = (yield ToolCall(name, wanted, include_tool_call=False)).tool_result
            data = said.data if isinstance(said.data, Mapping) else {}
            if said.is_error or "error" in data:
                raise _error_from_json(said.text if said.is_error else data["error"])
            if "asks" not in data:
                break
            asks = data["asks"]
            decided = (yield Parallel(*[_make_tool_call_or_ask(name, ask) for ask in asks])).value
            answers = [_encode_answer(ask, one) for ask, one in zip(asks, decided, strict=True)]
            wanted = {"answers": answers, **{member: data[member] for member in carried}}
        if data["text"]:
            # Never as `StepText`: that would carry out what looks like a call in it.
            message = {"role": "assistant", "content": data["text"]}
            yield ToolCall("add_message", message, include_tool_call=False)
        return make_output(data)

    return handle_steps


def _make_tool_call_or_ask(name: str, ask: Mapping[str, Any]) -> ToolCall | Ask:
    """Return the call of the permission tool for a permission request, or the question for a question of the agent."""
    given = ask["input"]
    if ask["kind"] != QUESTION:
        return ToolCall(f"{name}_{ask['kind']}", given, include_tool_call=False)
    return Ask(
        given["text"],
        given["options"],
        multi_select=given["multi_select"],
        allow_text=given["allow_text"],
        details=given.get("details"),
    )


def _encode_answer(ask: Mapping[str, Any], decided: Any) -> dict[str, Any]:
    """Return the answer to a question or permission request as JSON for the agent."""
    if ask["kind"] == QUESTION:
        return {"id": ask["id"], "answer": decided}
    return {"id": ask["id"], "allowed": not decided.is_error, "kind": ask["kind"], "input": ask["input"]}


def _error_from_json(error: Any) -> ExternalAgentError:
    """Return the error that a failed turn recorded."""
    if isinstance(error, Mapping):
        return ExternalAgentError(str(error.get("message", "")), kind=str(error.get("kind", "")))
    return ExternalAgentError(str(error), kind="failed")


def make_failed_result(error: ExternalAgentError, **usage_and_cost: Any) -> ToolResult:
    """Return the result of a failed call to an external agent, with its *usage_and_cost*."""
    return ToolResult.json(
        {"error": {"message": replace_lone_surrogates(error.message), "kind": error.kind}}, **usage_and_cost
    )


def permission_kind_from_category(category: str) -> str:
    """Return the kind of the permission tool for a category."""
    return next((name for name, one in ASKED.items() if one == category), OTHER)


def make_permission_tools(
    name: str, on_allowed: Callable[[ToolContext, JsonDict], None] | None = None
) -> list[Tool[Any, Any]]:
    """
    Return the tools whose calls represent permission requests of the agent *name*.

    Args:
        name: The id of the agent.
        on_allowed: Called with the context and the input of each allowed call, while that call runs.
    """
    return [_make_permission_tool(name, kind, on_allowed) for kind in (*ASKED, OTHER)]


def _make_permission_tool(
    name: str, kind: str, on_allowed: Callable[[ToolContext, JsonDict], None] | None
) -> Tool[Any, Any]:
    """Return the tool whose call represents one kind of permission request of an agent."""
    text: Mapping[str, object] = {"type": "string"}
    members = {
        "title": text,
        "paths": {"type": "array", "items": text},
        "command": {"anyOf": [text, {"type": "array", "items": text}]},
        "url": text,
        "details": text,
    }
    schema = {"type": "object", "properties": members, "required": ["title"], "additionalProperties": False}
    about = "do something" if kind == OTHER else kind

    def report_allowed(ctx: ToolContext, input: JsonDict) -> dict[str, object]:
        if on_allowed is not None:
            on_allowed(ctx, input)
        return {"allowed": True}

    made: Tool[Any, Any] = Tool(
        f"{name}_{kind}",
        f"Asks whether the agent {name} may {about}.",
        schema,
        report_allowed,
        category=ASKED.get(kind, ""),
        annotations=ToolAnnotations(idempotent=True, read_only=kind == "read"),
        in_thread=False,
        preview=_make_preview,
    )
    made.mark_confined()  # its paths are those in ``paths``; a title and a diff are for people
    return made


def _make_preview(input: JsonDict) -> ToolPreview:
    """Return the preview of a permission request: its title, and its other members as details."""
    details = {key: value for key, value in input.items() if key != "title"}
    return ToolPreview(str(input.get("title", "")), details)


PATHS = ("path", "file_path", "abs_path", "filePath")
COMMAND = ("command", "cmd", "argv")


def make_permission_input(
    title: str, tool_input: Mapping[str, Any], *, paths: Sequence[str] = (), details: str = ""
) -> dict[str, Any]:
    """
    Return the input of a permission request for rules and people: texts only, of limited size.

    Paths, command and URL are complete: rules cannot judge what they do not see.

    Args:
        title: What it is in words.
        tool_input: What the agent's own tool is given.
        paths: Files that it is about, beside those that are found in *tool_input*.
        details: More to look at; *tool_input* itself by default.

    Raises:
        ToolError: If paths, command and URL are too long.
    """
    judged = _find_judged_members(tool_input, paths)
    if len(canonical(judged)) > JUDGED_CHARS:
        msg = f"{title[:100]!r} has more than {JUDGED_CHARS:,} characters of paths, command and URL; request less at a time"
        raise ToolError(msg)
    return _make_titled_input(title, judged, details or (shorten_json(tool_input) if tool_input else ""))


def make_shown_input(title: str, tool_input: Mapping[str, Any], *, paths: Sequence[str] = ()) -> dict[str, Any]:
    """Return the input of a call for people and not for rules: without paths, command and URL if they are too long."""
    try:
        return make_permission_input(title, tool_input, paths=paths)
    except ToolError:
        return _make_titled_input(title, {}, shorten_json(tool_input))


def _make_titled_input(title: str, judged: Mapping[str, Any], details: str) -> dict[str, Any]:
    """Return a title, the members that rules judge and the cut details as one input."""
    made = {"title": title or "An action without a title", **judged}
    return {**made, "details": cut_end(details, ENTRY_CHARS)} if details else made


def _find_judged_members(tool_input: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the complete paths, command and URL in the input of an agent's tool."""
    several = tool_input.get("paths")
    given = [*paths, *[tool_input.get(name) for name in PATHS], *(several if isinstance(several, list) else ())]
    found = [replace_lone_surrogates(one) for one in given if isinstance(one, str) and one]
    made: dict[str, Any] = {"paths": list(dict.fromkeys(found))} if found else {}
    if command := _find_command(tool_input):
        made["command"] = command
    if isinstance(tool_input.get("url"), str):
        made["url"] = replace_lone_surrogates(tool_input["url"])
    return made


def _find_command(tool_input: Mapping[str, Any]) -> str | list[str]:
    """Return the command in the input of an agent's tool, with the arguments next to it; ``""`` if there is none."""
    command, args = next((tool_input[name] for name in COMMAND if tool_input.get(name)), ""), tool_input.get("args")
    if not command:
        return ""
    several = [*(command if isinstance(command, list) else [command]), *(args if isinstance(args, list) else ())]
    words = [replace_lone_surrogates(one) if isinstance(one, str) else shorten_json(one) or "?" for one in several]
    if isinstance(args, str) and args:
        line = words[0] if isinstance(command, str) else shlex.join(words)
        return f"{line} {replace_lone_surrogates(args)}"
    return words if isinstance(command, list) or len(words) > 1 else words[0]


# --- what it says -----------------------------------------------------------------------------------------------------


class TurnOutput:
    """The output of an agent in one turn: emitted as it arrives, and recorded."""

    def __init__(self) -> None:
        self.ctx = ToolContext()
        self._text: list[str] = []
        self._completed = 0
        self._record: list[dict[str, Any]] = []
        self._tools: dict[str, dict[str, Any]] = {}
        self._shown: set[str] = set()
        self._recorded: set[str] = set()
        self._pieces: dict[tuple[str, int], list[list[tuple[list[str], int]]]] = {}
        self._left = RECORD_CHARS
        self._is_full = False

    def start_call_output(self, ctx: ToolContext) -> None:
        """Emit further output as part of the tool call of *ctx*."""
        self.ctx = ctx
        self._completed = len(self._text)

    def emit_full_text(self) -> str:
        """Emit the text of this call as completed, and return the text of the whole turn."""
        if text := "".join(self._text[self._completed :]):
            self.ctx.emit(TextCompleted(text=text))
        return "".join(self._text)

    def end_unfinished_calls(self) -> None:
        """Emit the end of each unfinished call, as cancelled."""
        for call in list(self._shown):
            self._emit_call_end(call, self._tools[call], "cancelled")

    @property
    def chars_left(self) -> int:
        """The number of characters that can still be stored."""
        return max(0, self._left)

    def emit_and_record_text(self, kind: str, text: str, *, reply: int | None = None) -> None:
        """Emit and record a piece of the ``"text"`` or of a ``"thought"`` of a *reply*; ignore it if no room is left."""
        if not text or not self.reserve_chars(len(text)):
            return
        places: list[tuple[list[str], int]] = []
        if kind == "text":
            places.append((self._text, len(self._text)))
            self._text.append(text)
            self.ctx.emit(TextDelta(text=text))
        else:
            self.ctx.emit(ThinkingDelta(text=text))
        if not (self._record and kind in self._record[-1]):
            self._record.append({kind: []})
        places.append((self._record[-1][kind], len(self._record[-1][kind])))
        self._record[-1][kind].append(text)
        if reply is not None:
            self._pieces.setdefault((kind, reply), []).append(places)
        self._add_note_when_full()

    def complete_text(self, kind: str, text: str, *, reply: int) -> None:
        """Record the whole text of a *reply* in place of its pieces, since some may be lost; emit a missing end."""
        pieces = self._pieces.get((kind, reply), [])
        recorded = "".join([texts[place] for *_, (texts, place) in pieces])
        whole = shorten_text(text, self.chars_left + len(recorded))
        if whole.startswith(recorded):
            self.emit_and_record_text(kind, whole[len(recorded) :], reply=reply)
        else:
            # The emitted text is corrected by `emit_full_text`.
            self._clear_pieces(kind, reply)
            for texts, place in pieces[0]:
                texts[place] = whole
            self._left -= len(whole) - len(recorded)
            self._add_note_when_full()
        self._pieces.pop((kind, reply), None)

    def discard_reply(self, reply: int, model: str) -> None:
        """Remove the texts of an interrupted reply from the output, and emit that the reply is discarded."""
        for kind in ("text", "thought"):
            self._clear_pieces(kind, reply)
        self.ctx.emit(ReplyDiscarded(model=model))
        # All texts of the turn have one place in the run, so those of earlier replies are emitted again.
        if text := "".join(self._text[self._completed :]):
            self.ctx.emit(TextDelta(text=text))

    def _clear_pieces(self, kind: str, reply: int) -> None:
        """Remove the pieces of an incomplete text from the output."""
        for places in self._pieces.pop((kind, reply), ()):
            for texts, place in places:
                texts[place] = ""

    def reserve_chars(self, chars: int) -> bool:
        """Count *chars* characters as stored; return False if the room was used up before."""
        if self._left <= 0:
            return False
        self._left -= chars
        return True

    def _add_note_when_full(self) -> None:
        """Add a note about left-out output once, after the entry that used up the room."""
        if self._is_full or (self._left > 0 and len(self._record) < ENTRIES):
            return
        self._left, self._is_full = 0, True
        self._record.append({"note": LEFT_OUT})
        self._text.append(f"\n[{LEFT_OUT}]")

    def emit_and_record_call(
        self,
        call_id: str,
        *,
        name: str,
        category: str,
        title: str,
        status: str,
        input: Mapping[str, Any],
        kept: Mapping[str, Any],
        output: str,
    ) -> None:
        """
        Record the progress of a tool call of the agent, and emit its start and end.

        Args:
            call_id: The agent's own id of it.
            name: What the tool is called in events.
            category: By which our rules know such calls.
            title: What the record calls it; as before when empty.
            status: ``"completed"`` and ``"failed"`` are ends; as before when empty.
            input: What it was given, to be shown.
            kept: Other members of the record; they replace those of the last update. As before when empty.
            output: What came of it.
        """
        entry = self._tools.get(call_id)
        kept = kept or (entry["kept"] if entry else {})
        size = len(json.dumps(kept, default=str))
        if entry is None:
            if not self.reserve_chars(1 + size):
                return
            # The id stays, though the turn may go on in another call of ours.
            shown = f"{self.ctx.tool_call_id}/{call_id[:200]}"
            entry = self._tools[call_id] = {"tool": "", "kind": name, "status": "pending", "kept": {}, "id": shown}
        elif kept != entry["kept"] and not self.reserve_chars(size):
            kept = entry["kept"]
        if call_id not in self._recorded:
            self._recorded.add(call_id)
            self._record.append(entry)
        entry["tool"] = title or entry["tool"]
        entry["kind"], entry["status"], entry["kept"] = name, status or entry["status"], dict(kept)
        if output and self.reserve_chars(len(output)):
            entry["output"] = output
        self._add_note_when_full()
        self._emit_call_start_and_end(call_id, entry, input, category)

    def _emit_call_start_and_end(
        self, call: str, entry: dict[str, Any], input: Mapping[str, Any], category: str
    ) -> None:
        """Emit the start of a call once, and its end if its entry is completed or failed."""
        if call not in self._shown and "ended" not in entry:
            self._shown.add(call)
            self.ctx.emit(
                ToolStarted(
                    tool_name=entry["kind"],
                    tool_call_id=entry["id"],
                    input=dict(input),
                    source="external",
                    category=category,
                )
            )
        if entry["status"] in ("completed", "failed"):
            self._emit_call_end(call, entry, "ok" if entry["status"] == "completed" else "error")

    def _emit_call_end(self, call: str, entry: dict[str, Any], status: Any) -> None:
        """Emit the end of a call whose start was emitted, and mark its entry as ended."""
        if call not in self._shown:
            return
        self._shown.discard(call)
        entry["ended"] = True
        name = entry["kind"]
        result = ToolResult.text(entry.get("output", ""), status=status, tool_name=name, tool_call_id=entry["id"])
        self.ctx.emit(ToolFinished(tool_name=name, tool_call_id=entry["id"], result=result))

    def emit_and_record_plan(self, plan: list[dict[str, Any]]) -> None:
        """Emit and record a plan: the ``task`` of each part, and whether it is ``completed``; ignore it if no room is left."""
        if self.reserve_chars(len(json.dumps(plan))):
            self._record.append({"plan": plan})
            self._add_note_when_full()
            self.ctx.emit(TodosChanged(todos=plan))

    def drain_record(self) -> list[dict[str, Any]]:
        """Return the entries recorded since the last call."""
        record, self._record, self._recorded = self._record, [], set()
        made = []
        for entry in record:
            if "kept" in entry:
                shown = {key: entry[key] for key in ("tool", "kind", "status", "output") if key in entry}
                made.append(shown | entry["kept"])
                continue
            joined = {
                key: "".join(value) if isinstance(value, list) and key != "plan" else value
                for key, value in entry.items()
            }
            if any(joined.values()) or "plan" in joined:  # what was discarded is empty
                made.append(joined)
        return made


# --- foreign values ---------------------------------------------------------------------------------------------------


def get_dict_or_empty(value: object) -> Mapping[str, Any]:
    """Return *value* if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def list_dicts(value: object) -> list[Mapping[str, Any]]:
    """Return the dicts among the first 1,000 items of a list; none if *value* is no list."""
    return [one for one in value[:1_000] if isinstance(one, dict)] if isinstance(value, list) else []


def shorten_text(value: object, max_chars: int = SHOWN_CHARS) -> str:
    """Return a text, cut with a note after *max_chars* characters; ``""`` if *value* is not a text."""
    return replace_lone_surrogates(cut_end(value, max_chars)) if isinstance(value, str) else ""


def shorten_json(value: object) -> str:
    """Return a value as JSON, cut with a note; ``""`` if it is nested too deep."""
    try:
        return replace_lone_surrogates(cut_end(json.dumps(value, ensure_ascii=False, default=str), SHOWN_CHARS))
    except (ValueError, RecursionError):
        return ""


async def finish_shielded(work: Any) -> None:
    """Wait until an awaitable is done, even if this task is cancelled; its error is logged."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        LOGGER.warning("an external agent could not be ended: %s", error)
