"""
Runs for web pages that use the AI SDK of Vercel: its UI message stream.

Events go out as chunks of that stream, in the order in which the page's parser wants them: a text that began has to end before another
begins, and a tool's input comes before its output, also where our events overlap because several things happen at once.
Conversations are kept here and not taken from the browser, which may have changed them.

What lives here: our events as chunks of that stream, which are JSON objects, and what such a page sends back as prompts and answers. It
needs no package.

Must not be here: HTTP, and history from a browser.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs

from stepengine.data.codec import plain
from stepengine.data.events import (
    SENT_AS_DATA,
    AgentFinished,
    AgentSpawned,
    Event,
    FileChanged,
    PermissionDecided,
    PermissionRequested,
    QuestionAsked,
    ReplyDiscarded,
    RunFinished,
    StepFinished,
    StepStarted,
    TextCompleted,
    TextDelta,
    ThinkingCompleted,
    ThinkingDelta,
    TodosChanged,
    ToolFinished,
    ToolInputDelta,
    ToolLog,
    ToolProgress,
    ToolStarted,
    WaitFinished,
    WaitStarted,
)
from stepengine.data.messages import ToolResult
from stepengine.data.questions import Answer, AnswerLike
from stepengine.data.state import RunStatus
from stepengine.data.waiting import waits_in_words
from stepengine.errors import InputError, StepEngineError

__all__ = ("HEADERS", "answers_of", "prompt_of", "sse", "vercel")

HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-vercel-ai-ui-message-stream": "v1",
}
"""What a response with these chunks has as headers; the page does not read it without the last one."""
VERSIONS = (5, 6, 7)
APPROVALS_FROM = 6
DECISIONS_FROM = 7
RESET_FROM = 7
MAX_PROMPT = 1_048_576
"""Characters of a prompt that a page may send."""

Chunk = dict[str, Any]
Shows: TypeAlias = "Mapping[type[Event], Callable[[_Page, Any], Iterator[Chunk]]]"


async def vercel(
    events: AsyncIterable[Event], *, message_id: str, version: int = 7, earlier: Sequence[AsyncIterable[Event]] = ()
) -> AsyncGenerator[Chunk, None]:
    """
    Give the events of a run as chunks of a UI message stream; ``sse`` writes them.

    Texts, thoughts and tool calls of the root run are parts of the message; each child run is one part ``data-agent``, replaced in
    place. A permission is a ``tool-approval-request``, another question a part ``data-question``; ``answers_of`` reads what comes
    back. Leaving the iteration early closes *events*.

    Args:
        events: Those of a run, such as ``engine.stream(...)`` or ``handle.events()``.
        message_id: The id of the message that the page is sent; that of its last message, when that is the assistant's.
        version: The major version of the page's package ``ai``: 5, 6 or 7. Before 6 there are no approvals: permissions are parts
            ``data-question``, too; before 7 no chunk says how somebody else decided, only what became of the call.
        earlier: The events of the runs that this one goes on from, in the same message: for a page that comes back, because it makes
            the message anew of what it is sent.

    Raises:
        InputError: for another version.
    """
    if version not in VERSIONS:
        msg = f"version={version!r} of the package ai is not known; known are {', '.join(map(str, VERSIONS))}"
        raise InputError(msg, issues=("version is not known",))
    page, sources = _Page(message_id, version), [*earlier, events]
    try:
        for number, source in enumerate(sources, 1):
            async for event in source:
                for chunk in page.show(event, goes_on=number < len(sources)):
                    yield chunk
    except StepEngineError as error:
        for chunk in page.fail(error.message):
            yield chunk
    finally:
        for source in sources:
            await _close(source)


async def sse(chunks: AsyncIterable[Chunk]) -> AsyncGenerator[str, None]:
    """Give *chunks* as server-sent events, and the mark of the end. Leaving the iteration early closes *chunks*."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
    finally:
        await _close(chunks)
    yield "data: [DONE]\n\n"


async def _close(source: object) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


def prompt_of(messages: Sequence[object], *, trigger: str = "submit-message", message_id: str | None = None) -> str:
    """
    Return what the user says: the text of the last message that a page sends. Nothing else of its history counts.

    Args:
        messages: The member ``messages`` of the request's body.
        trigger: The member ``trigger``.
        message_id: The member ``messageId``.

    Raises:
        InputError: when the last message is none of the user's, holds something that is not text, or is too long; or when the page wants
            an answer anew or edits what was said (``regenerate()``, ``sendMessage({messageId})``): what was said stands on the server.
    """
    last = _last(messages)
    if trigger != "submit-message" or (message_id is not None and last.get("role") == "user"):
        what = "edits what was said" if trigger == "submit-message" else f"asks for {trigger!r:.80}"
        msg = f"a page {what}, but the conversation is on the server and goes on with what its user says next"
        raise InputError(msg, issues=("trigger: only what the user says next is taken",))
    if last.get("role") != "user":
        msg = f"the last message of a page is what its user says; this one is {last.get('role')!r:.80}"
        raise InputError(msg, issues=("messages: the last one is not a user message",))
    texts = [part.get("text") if part.get("type") == "text" else None for part in _parts(last)]
    if not all(isinstance(text, str) for text in texts):
        msg = "a page sent a message with something that is not text; only text parts are read"
        raise InputError(msg, issues=("messages: the last one has a part that is not text",))
    said = "\n\n".join([str(text) for text in texts])
    if len(said) > MAX_PROMPT:
        msg = f"a page sent {len(said)} characters; a prompt has at most {MAX_PROMPT}"
        raise InputError(msg, issues=("messages: the last one is too long",))
    return said


def answers_of(messages: Sequence[object]) -> dict[str, AnswerLike]:
    """
    Return what a page answers to permissions, by question id: parts of its last message in the state ``approval-responded``.

    An approval has the id ``RUN:QUESTION``. Empty when the last message is the user's. Questions that are no permissions are answered
    by the application's own request.

    Args:
        messages: The member ``messages`` of the request's body.

    Raises:
        InputError: when there is no message, or an approval cannot be read.
    """
    last = _last(messages)
    found: dict[str, AnswerLike] = {}
    for number, part in enumerate(_parts(last) if last.get("role") == "assistant" else ()):
        if part.get("state") != "approval-responded":
            continue
        match part.get("approval"):
            case {"id": str(approval), "approved": bool(approved), **more}:
                reason = more.get("reason")
                found[approval.partition(":")[2] or approval] = Answer(
                    text="yes" if approved else "no", reason=reason if isinstance(reason, str) else ""
                )
            case _:
                msg = f"part {number} of a page's last message is not an approval; one has 'id' and 'approved'"
                raise InputError(msg, issues=(f"parts[{number}].approval cannot be read",))
    return found


def _last(messages: Any) -> dict[str, object]:
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    if not isinstance(last, dict):
        msg = "a page sent no messages; the body of its request has a list of them"
        raise InputError(msg, issues=("messages: there are none",))
    return last


def _parts(message: Mapping[str, object]) -> list[dict[str, object]]:
    parts = message.get("parts")
    if not (isinstance(parts, list) and all(isinstance(part, dict) for part in parts)):
        msg = "a page sent a message without parts; each message has a list of objects"
        raise InputError(msg, issues=("messages: the last one has no list of parts",))
    return parts


@attrs.define(eq=False)
class _OpenPart:
    """A part of the message that is open: its kind, its id, and what was shown of it."""

    kind: str
    id: str
    shown: str = ""


class _Page:
    """What a page was shown of one run; what is begun is ended before the message is."""

    def __init__(self, message_id: str, version: int) -> None:
        self._message_id = message_id
        self._version = version
        self._blocks: dict[tuple[str, int], _OpenPart] = {}
        self._calls: dict[str, bool] = {}
        self._approvals: dict[str, str] = {}
        self._decided_calls: set[str] = set()
        self._over: set[str] = set()
        self._said: list[str] = []
        self._agents: dict[str, Chunk] = {}
        self._waits: dict[tuple[str, int], Chunk] = {}
        self._made = 0
        self._has_begun = False
        self._in_step = False
        self._is_over = False

    def show(self, event: Event, *, goes_on: bool = False) -> Iterator[Chunk]:
        """Give what stands for *event*; with *goes_on* the end of its run is not the end of the message."""
        if self._is_over:
            return
        yield from self._begin(event.run_id)
        if goes_on and isinstance(event, RunFinished):
            yield from self._end_blocks()
            yield from self._set_aside()
            yield from self._end_step()
            return
        show = self.SHOWN.get(type(event)) or (self.OF_CHILD if event.path else self.OF_ROOT).get(type(event))
        if show is not None:
            yield from show(self, event)
        elif type(event) in SENT_AS_DATA:
            value = {name: held for name, held in event.to_json().items() if name != "type"}
            yield self._data(event.type.replace("_", "-"), value, transient=True)

    def fail(self, message: str) -> Iterator[Chunk]:
        """Give the end of a run that failed; nothing when it has ended."""
        if self._is_over:
            return
        yield from self._begin("")
        yield from self._end("error", {"type": "error", "errorText": message})

    def _begin(self, run_id: str) -> Iterator[Chunk]:
        if not self._has_begun:
            self._has_begun = True
            about = {"messageMetadata": {"runId": run_id}} if run_id else {}
            yield {"type": "start", "messageId": self._message_id, **about}

    def _end(self, reason: str, *last: Chunk) -> Iterator[Chunk]:
        yield from self._end_blocks()
        yield from self._end_step()
        self._is_over = True
        yield from last
        yield {"type": "finish", "finishReason": reason}

    def _run_finished(self, event: RunFinished) -> Iterator[Chunk]:
        result = event.result
        match result.status:
            case RunStatus.FAILED:
                yield from self._end("error", {"type": "error", "errorText": str(result.error)})
            case RunStatus.CANCELLED:
                yield from self._end_blocks()
                yield from self._end_step()
                self._is_over = True
                yield {"type": "abort", "reason": "cancelled"}
            case RunStatus.SUSPENDED:
                yield from self._end_blocks()
                yield from self._set_aside()
                yield from self._unsaid(waits_in_words(result.waits_for))
                yield from self._end("tool-calls" if result.pending_questions else "other")
            case RunStatus.MAX_STEPS:
                yield from self._end("other")
            case RunStatus.TRUNCATED:
                yield from self._end("length")
            case _:
                yield from self._unsaid(result.text)
                yield from self._end("stop")

    def _set_aside(self) -> Iterator[Chunk]:
        """Give the calls that wait for another one's answer an end; a page sends its answers only when every call has one or the other."""
        if not self._approvals:
            return
        for call in self._calls.keys() - self._approvals.keys() - self._over:
            self._calls[call] = True  # it begins anew when its turn comes
            told = {"errorText": "not begun: another call waits for an answer", "dynamic": True}
            yield {"type": "tool-output-error", "toolCallId": call, **told}

    def _unsaid(self, text: str) -> Iterator[Chunk]:
        """Give what a run ends with when its model did not say it: what its handler returned."""
        if text.strip() and not any(text in said for said in self._said):
            yield from self._more("text", -1, text)

    # --- the root's steps, texts and thoughts ---------------------------------------------------------------------------

    def _step_started(self, event: StepStarted) -> Iterator[Chunk]:
        yield from self._end_step()
        if event.resumed:
            # Calls of it stand in the message that the page has, and are found there only while no other step has begun.
            return
        self._in_step = True
        yield {"type": "start-step"}

    def _step_finished(self, event: StepFinished) -> Iterator[Chunk]:
        yield from self._end_blocks()
        yield from self._end_step()

    def _end_step(self) -> Iterator[Chunk]:
        if self._in_step:
            self._in_step = False
            yield {"type": "finish-step"}

    def _delta(self, event: TextDelta | ThinkingDelta) -> Iterator[Chunk]:
        yield from self._more("text" if isinstance(event, TextDelta) else "reasoning", event.seq, event.text)

    def _more(self, kind: str, seq: int, text: str) -> Iterator[Chunk]:
        block = self._blocks.get((kind, seq))
        if block is None:
            self._made += 1
            block = self._blocks[kind, seq] = _OpenPart(kind, f"{kind}-{self._made}")
            yield {"type": f"{kind}-start", "id": block.id}
        block.shown += text
        yield {"type": f"{kind}-delta", "id": block.id, "delta": text}

    def _complete_part(self, event: TextCompleted | ThinkingCompleted) -> Iterator[Chunk]:
        """End a part; what a reader who fell behind did not get is made up for, what it got wrongly is taken back."""
        kind = "text" if isinstance(event, TextCompleted) else "reasoning"
        if kind == "text":
            self._said.append(event.text)
        block = self._blocks.get((kind, event.seq))
        shown = "" if block is None else block.shown
        if not event.text.startswith(shown):
            yield from self._end_block(kind, event.seq, discarded=True)
            shown = ""
        if event.text[len(shown) :]:
            yield from self._more(kind, event.seq, event.text[len(shown) :])
        yield from self._end_block(kind, event.seq)

    def _end_block(self, kind: str, seq: int, *, discarded: bool = False) -> Iterator[Chunk]:
        block = self._blocks.pop((kind, seq), None)
        if block is not None:
            yield {"type": f"{kind}-end", "id": block.id}
            if discarded:
                yield self._data("discarded", {"id": block.id, "text": block.shown})

    def _end_blocks(self, *, discarded: bool = False) -> Iterator[Chunk]:
        for kind, seq in list(self._blocks):
            yield from self._end_block(kind, seq, discarded=discarded)

    def _discarded(self, event: ReplyDiscarded) -> Iterator[Chunk]:
        resets = self._version >= RESET_FROM and self._in_step
        yield from self._end_blocks(discarded=not resets)
        for call in [call for call, is_coming in self._calls.items() if is_coming]:
            del self._calls[call]
            if not resets:
                yield {
                    "type": "tool-output-error",
                    "toolCallId": call,
                    "errorText": "the reply broke off",
                    "dynamic": True,
                }
        if resets:
            yield {"type": "reset-step"}

    # --- tools of the root, and whatever is asked ------------------------------------------------------------------------

    def _input(self, event: ToolInputDelta) -> Iterator[Chunk]:
        call = event.tool_call_id
        if not call:
            return
        if call not in self._calls:
            self._calls[call] = True
            yield {"type": "tool-input-start", "toolCallId": call, "toolName": event.tool_name, "dynamic": True}
        yield {"type": "tool-input-delta", "toolCallId": call, "inputTextDelta": event.text}

    def _tool_started(self, event: ToolStarted) -> Iterator[Chunk]:
        yield from self._available(_call_id(event), event.tool_name, event.input)
        yield from self._body_started(event)

    def _body_started(self, event: ToolStarted) -> Iterator[Chunk]:
        if event.child_path:
            # What a tool that yields asks for is shown as what a child does.
            name = event.tool_name
            yield self._agent(event.child_path, agentId=name, name=name, status="running", text="", tool="")

    def _body_finished(self, event: ToolFinished) -> Iterator[Chunk]:
        if event.child_path and event.result.status != "pending":
            yield self._agent(event.child_path, status="failed" if event.result.is_error else "completed", tool="")

    def _available(self, call: str, name: str, given: object) -> Iterator[Chunk]:
        if self._calls.get(call, True):
            self._calls[call] = False
            told = {"toolCallId": call, "toolName": name, "input": plain(given), "dynamic": True}
            yield {"type": "tool-input-available", **told}

    def _tool_finished(self, event: ToolFinished) -> Iterator[Chunk]:
        call, result = _call_id(event), event.result
        if result.status != "pending":
            self._over.add(call)
        yield from self._available(call, event.tool_name, None)
        yield from self._body_finished(event)
        if result.status == "denied" and self._version >= APPROVALS_FROM and call in self._decided_calls:
            yield {"type": "tool-output-denied", "toolCallId": call}
        elif result.is_error:
            yield {"type": "tool-output-error", "toolCallId": call, "errorText": result.text, "dynamic": True}
        elif result.status != "pending":
            yield {"type": "tool-output-available", "toolCallId": call, "output": _output(result), "dynamic": True}

    def _progress(self, event: ToolProgress | ToolLog) -> Iterator[Chunk]:
        told = {"toolCallId": _call_id(event), "message": event.message, "percent": getattr(event, "percent", None)}
        yield self._data("progress", told, transient=True)

    def _requested(self, event: PermissionRequested) -> Iterator[Chunk]:
        if event.question.problem:
            return  # the tool refuses the call by itself
        if self._version < APPROVALS_FROM:
            yield from self._show_question(event)
            return
        call = _call_id(event)
        # The runs of one message count their questions each from the beginning; its approvals are told apart by their ids.
        self._approvals[call] = approval = f"{event.run_id}:{event.question.id}"
        yield from self._available(call, event.tool_name, event.input)
        yield {"type": "tool-approval-request", "approvalId": approval, "toolCallId": call}

    def _show_question(self, event: QuestionAsked | PermissionRequested) -> Iterator[Chunk]:
        question = event.question
        told = {
            "id": question.id,
            "text": question.text,
            "options": list(question.options),
            "multiSelect": question.multi_select,
            "toolName": question.tool_name,
            "input": plain(question.details),
        }
        yield self._data("question", told, id=question.id)

    def _show_decision(self, event: PermissionDecided) -> Iterator[Chunk]:
        call = _call_id(event)
        self._decided_calls.add(call)
        approval = self._approvals.pop(call, "")
        if approval and self._version >= DECISIONS_FROM:  # before, a page learns it from what becomes of the call
            answer = {"approvalId": approval, "approved": event.decision == "allow"}
            yield {"type": "tool-approval-response", **answer, **({"reason": event.reason} if event.reason else {})}

    def _file_changed(self, event: FileChanged) -> Iterator[Chunk]:
        yield self._data("file-changed", {"file": event.file, "action": event.action, "toolCallId": _call_id(event)})

    def _todos(self, event: TodosChanged) -> Iterator[Chunk]:
        yield self._data("todos", {"path": event.path, "todos": plain(event.todos)}, id=f"todos-{event.path}")

    def _wait(self, event: WaitStarted | WaitFinished) -> Iterator[Chunk]:
        """Give a wait as one part, replaced in place: it goes on after this message, where the run is suspended."""
        told: dict[str, object] = {"path": event.path, "kind": event.kind}
        if isinstance(event, WaitStarted):
            told |= {"wakesAt": event.wakes_at, "topic": event.topic, "children": list(event.children)}
        about = self._waits.setdefault((event.path, event.seq), {})
        about |= {**told, "isOver": isinstance(event, WaitFinished) and event.is_over}
        yield self._data("wait", dict(about), id=f"wait-{event.path}-{event.seq}")

    # --- children ---------------------------------------------------------------------------------------------------------

    def _show_child(self, event: AgentSpawned) -> Iterator[Chunk]:
        name = event.display_name or event.agent_id
        yield self._agent(
            event.child_path,
            agentId=event.agent_id,
            name=name,
            status="running",
            text="",
            tool="",
            isBackground=event.is_background,
        )

    def _child_text(self, event: TextCompleted) -> Iterator[Chunk]:
        yield self._agent(event.path, text=event.text)

    def _child_tool(self, event: ToolStarted | ToolFinished) -> Iterator[Chunk]:
        yield self._agent(event.path, tool=event.tool_name if isinstance(event, ToolStarted) else "")
        # What a person was asked about has a part of its own, which would wait for ever.
        if _call_id(event) in self._decided_calls:
            yield from self._tool_started(event) if isinstance(event, ToolStarted) else self._tool_finished(event)
        elif isinstance(event, ToolStarted):
            yield from self._body_started(event)
        else:
            yield from self._body_finished(event)

    def _agent_finished(self, event: AgentFinished) -> Iterator[Chunk]:
        why = {"error": event.error} if event.error else {}
        yield self._agent(event.child_path, agentId=event.agent_id, status=event.status.value, tool="", **why)

    def _agent(self, path: str, **changes: object) -> Chunk:
        self._agents[path] = {**self._agents.get(path, {"path": path}), **changes}
        return self._data("agent", self._agents[path], id=path)

    def _data(self, name: str, data: object, *, id: str | None = None, transient: bool = False) -> Chunk:
        told = {"id": id} if id is not None else {}
        return {"type": f"data-{name}", **told, "data": data, **({"transient": True} if transient else {})}

    SHOWN: ClassVar[Shows] = {
        RunFinished: _run_finished,
        AgentSpawned: _show_child,
        AgentFinished: _agent_finished,
        ToolProgress: _progress,
        ToolLog: _progress,
        FileChanged: _file_changed,
        TodosChanged: _todos,
        QuestionAsked: _show_question,
        PermissionRequested: _requested,
        PermissionDecided: _show_decision,
        WaitStarted: _wait,
        WaitFinished: _wait,
    }
    """The events that the page is shown of every run."""
    OF_ROOT: ClassVar[Shows] = {
        StepStarted: _step_started,
        StepFinished: _step_finished,
        TextDelta: _delta,
        ThinkingDelta: _delta,
        TextCompleted: _complete_part,
        ThinkingCompleted: _complete_part,
        ReplyDiscarded: _discarded,
        ToolInputDelta: _input,
        ToolStarted: _tool_started,
        ToolFinished: _tool_finished,
    }
    OF_CHILD: ClassVar[Shows] = {TextCompleted: _child_text, ToolStarted: _child_tool, ToolFinished: _child_tool}


def _call_id(event: Any) -> str:
    """Return the id of a call; that of a child's has its path before it."""
    return f"{event.path}:{event.tool_call_id}" if event.path else event.tool_call_id


def _output(result: ToolResult) -> object:
    # What the conversation holds of it, so that a page that is loaded again shows the same.
    return result.text if result.data is None or result.structured is not None else plain(result.data)
