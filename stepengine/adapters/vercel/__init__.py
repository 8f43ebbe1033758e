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
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from stepengine.adapters.display_items import CallEvent, CallItems, TextEvent, TextItem, TextItems
from stepengine.data.choices import make_permission_answer, question_to_json
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
from stepengine.data.json import ABSENT
from stepengine.data.messages import ToolResult
from stepengine.data.questions import AnswerLike
from stepengine.data.state import RunStatus
from stepengine.data.waits import describe_waits
from stepengine.errors import InputError, StepEngineError

__all__ = ("HEADERS", "parse_prompt", "read_approvals", "sse", "vercel")

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
STEPS = {"start": "start", "piece": "delta", "input": "available"}
MAX_PROMPT = 1_048_576
"""Characters of a prompt that a page may send."""

Chunk = dict[str, Any]
Shows: TypeAlias = "Mapping[type[Event], Callable[[_ChunkTranslator, Any], Iterator[Chunk]]]"


async def vercel(
    events: AsyncIterable[Event], *, message_id: str, version: int = 7, earlier: Sequence[AsyncIterable[Event]] = ()
) -> AsyncGenerator[Chunk, None]:
    """
    Yield the events of a run as chunks of a UI message stream, for ``sse``.

    Texts, thoughts and tool calls of the root run are parts of the message; each child run is one part ``data-agent``, replaced in
    place. A permission is a ``tool-approval-request``, another question a part ``data-question``; ``read_approvals`` parses the
    approvals. Leaving the iteration early closes *events*.

    Args:
        events: The events of a run, such as ``engine.stream(...)`` or ``handle.events()``.
        message_id: The id of the message for the page; the id of its last message if that is the assistant's.
        version: The major version of the page's package ``ai``: 5, 6 or 7. Before 6 there are no approvals: permissions are parts
            ``data-question``, too; before 7 no chunk has the decision of another person, only the result of the call.
        earlier: The events of the earlier runs of the same message, for a page that reconnects, because it rebuilds the whole message.

    Raises:
        InputError: For another version.
    """
    if version not in VERSIONS:
        msg = f"version={version!r} of the package ai is not supported; supported versions: {', '.join(map(str, VERSIONS))}"
        raise InputError(msg, issues=("version is not supported",))
    page, sources = _ChunkTranslator(message_id, version), [*earlier, events]
    try:
        for number, source in enumerate(sources, 1):
            async for event in source:
                for chunk in page.translate(event, continues=number < len(sources)):
                    yield chunk
    except StepEngineError as error:
        for chunk in page.end_with_error(error.message):
            yield chunk
    finally:
        for source in sources:
            await _close_if_generator(source)


async def sse(chunks: AsyncIterable[Chunk]) -> AsyncGenerator[str, None]:
    """Yield *chunks* as server-sent events, and the end mark. Leaving the iteration early closes *chunks*."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
    finally:
        await _close_if_generator(chunks)
    yield "data: [DONE]\n\n"


async def _close_if_generator(source: object) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


def parse_prompt(messages: Sequence[object], *, trigger: str = "submit-message", message_id: str | None = None) -> str:
    """
    Validate the last message of a page, and return its text, the prompt. Earlier messages are ignored.

    Args:
        messages: The member ``messages`` of the request's body.
        trigger: The member ``trigger``.
        message_id: The member ``messageId``.

    Raises:
        InputError: If the last message is not the user's, contains something other than text, or is too long; and if the page
            regenerates a reply or edits a message (``regenerate()``, ``sendMessage({messageId})``), since the server has the history.
    """
    last = _get_last_message(messages)
    if trigger != "submit-message" or (message_id is not None and last.get("role") == "user"):
        what = "edits an earlier message" if trigger == "submit-message" else f"asks for {trigger!r:.80}"
        msg = f"a page {what}, but the conversation is stored on the server and continues only with a new user message"
        raise InputError(msg, issues=("trigger: only a new user message is accepted",))
    if last.get("role") != "user":
        msg = f"the last message of a page must be a user message; this one is {last.get('role')!r:.80}"
        raise InputError(msg, issues=("messages: the last one is not a user message",))
    texts = [part.get("text") if part.get("type") == "text" else None for part in _get_message_parts(last)]
    if not all(isinstance(text, str) for text in texts):
        msg = "a page sent a message with a part that is not text; only text parts are supported"
        raise InputError(msg, issues=("messages: the last one has a part that is not text",))
    said = "\n\n".join([str(text) for text in texts])
    if len(said) > MAX_PROMPT:
        msg = f"a page sent {len(said)} characters; a prompt has at most {MAX_PROMPT}"
        raise InputError(msg, issues=("messages: the last one is too long",))
    return said


def read_approvals(messages: Sequence[object]) -> dict[str, AnswerLike]:
    """
    Return a page's answers to permission questions by question id: the ``approval-responded`` parts of its last message.

    An approval has the id ``RUN:QUESTION``. Empty when the last message is the user's. Questions that are no permissions are answered
    by the application's own request.

    Args:
        messages: The member ``messages`` of the request's body.

    Raises:
        InputError: If there is no message, or an approval is invalid.
    """
    last = _get_last_message(messages)
    found: dict[str, AnswerLike] = {}
    for number, part in enumerate(_get_message_parts(last) if last.get("role") == "assistant" else ()):
        if part.get("state") != "approval-responded":
            continue
        match part.get("approval"):
            case {"id": str(id_), "approved": bool(approved), **more}:
                reason = str(more["reason"]) if isinstance(more.get("reason"), str) else ""
                found[id_.partition(":")[2] or id_] = make_permission_answer(is_allowed=approved, reason=reason)
            case _:
                msg = f"part {number} of a page's last message is not an approval; an approval has 'id' and 'approved'"
                raise InputError(msg, issues=(f"parts[{number}].approval cannot be read",))
    return found


def _get_last_message(messages: Any) -> dict[str, object]:
    """Return the last message of a page; raise ``InputError`` if there is none."""
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    if not isinstance(last, dict):
        msg = "a page sent no messages; the request body must have a list of messages"
        raise InputError(msg, issues=("messages: there are none",))
    return last


def _get_message_parts(message: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the parts of a message; raise ``InputError`` unless they are a list of objects."""
    parts = message.get("parts")
    if not (isinstance(parts, list) and all(isinstance(part, dict) for part in parts)):
        msg = "a page sent a message without parts; each message must have a list of parts, which are objects"
        raise InputError(msg, issues=("messages: the last one has no list of parts",))
    return parts


class _ChunkTranslator:
    """Translates the events of one run to chunks; closes all open parts before the message ends."""

    def __init__(self, message_id: str, version: int) -> None:
        self._message_id = message_id
        self._version = version
        self._texts = TextItems()
        self._calls = CallItems()
        self._approvals: dict[str, str] = {}
        self._decided_calls: set[str] = set()
        self._over: set[str] = set()
        self._agents: dict[str, Chunk] = {}
        self._waits: dict[tuple[str, int], Chunk] = {}
        self._has_begun = False
        self._in_step = False
        self._is_over = False

    def translate(self, event: Event, *, continues: bool = False) -> Iterator[Chunk]:
        """Yield the chunks for *event*. With *continues*, the message continues after the end of the run."""
        if self._is_over:
            return
        yield from self._start_message_once(event.run_id)
        if continues and isinstance(event, RunFinished):
            yield from self._end_root_texts()
            yield from self._fail_calls_behind_approval()
            yield from self._end_open_step()
            return
        show = self.SHOWN.get(type(event)) or (self.OF_CHILD if event.path else self.OF_ROOT).get(type(event))
        if show is not None:
            yield from show(self, event)
        elif isinstance(event, SENT_AS_DATA):
            value = {name: held for name, held in event.to_json().items() if name != "type"}
            yield self._make_data_chunk(event.type.replace("_", "-"), value, transient=True)

    def end_with_error(self, message: str) -> Iterator[Chunk]:
        """Yield the ends of all that is open, an error and a finish chunk; nothing if the message has ended."""
        if self._is_over:
            return
        yield from self._start_message_once("")
        yield from self._end_message("error", {"type": "error", "errorText": message})

    def _start_message_once(self, run_id: str) -> Iterator[Chunk]:
        """Yield the start of the message with the id of its run; nothing if it was yielded before."""
        if not self._has_begun:
            self._has_begun = True
            about = {"messageMetadata": {"runId": run_id}} if run_id else {}
            yield {"type": "start", "messageId": self._message_id, **about}

    def _end_message(self, reason: str, *last: Chunk) -> Iterator[Chunk]:
        """Yield the ends of open texts and the step, then *last*, and with a *reason* a finish chunk."""
        yield from self._end_root_texts()
        yield from self._end_open_step()
        self._is_over = True
        yield from last
        if reason:
            yield {"type": "finish", "finishReason": reason}

    def _show_run_end(self, event: RunFinished) -> Iterator[Chunk]:
        """Yield the end of the message for the status of the run, with its output, or a text about its waits."""
        result = event.result
        match result.status:
            case RunStatus.FAILED:
                yield from self._end_message("error", {"type": "error", "errorText": str(result.error)})
            case RunStatus.CANCELLED:
                yield from self._end_message("", {"type": "abort", "reason": "cancelled"})
            case RunStatus.SUSPENDED:
                yield from self._end_root_texts()
                yield from self._fail_calls_behind_approval()
                yield from self._show_text_items(self._texts.make_output_items(event, describe_waits(result.waits_for)))
                yield from self._end_message("tool-calls" if result.pending_questions else "other")
            case RunStatus.MAX_STEPS:
                yield from self._end_message("other")
            case RunStatus.TRUNCATED:
                yield from self._end_message("length")
            case _:
                yield from self._show_text_items(self._texts.make_output_items(event, result.text))
                yield from self._end_message("stop")

    def _fail_calls_behind_approval(self) -> Iterator[Chunk]:
        """
        With an open approval, end the calls that wait for it: a page sends answers only when every call has a result.

        The inputs of these calls are shown again when they start.
        """
        if not self._approvals:
            return
        for path, call in self._calls.reopen_unsettled_calls(
            lambda *key: _join_call_id(*key) in {*self._approvals, *self._over}
        ):
            told = {"errorText": "not started: another call waits for an answer", "dynamic": True}
            yield {"type": "tool-output-error", "toolCallId": _join_call_id(path, call), **told}

    # --- the root's steps, texts and thoughts ---------------------------------------------------------------------------

    def _show_step_start(self, event: StepStarted) -> Iterator[Chunk]:
        """Yield the end of the open step and the start of a new one; no start for a resumed step."""
        yield from self._end_open_step()
        if event.resumed:
            # Calls of it stand in the message that the page has, and are found there only while no other step has begun.
            return
        self._in_step = True
        yield {"type": "start-step"}

    def _end_texts_and_step(self, event: StepFinished) -> Iterator[Chunk]:
        yield from self._end_root_texts()
        yield from self._end_open_step()

    def _end_open_step(self) -> Iterator[Chunk]:
        if self._in_step:
            self._in_step = False
            yield {"type": "finish-step"}

    def _show_text(self, event: TextEvent) -> Iterator[Chunk]:
        """Yield the start, pieces or end of a text or thought."""
        yield from self._show_text_items(self._texts.make_items(event))

    def _show_text_items(self, items: Iterable[TextItem]) -> Iterator[Chunk]:
        """Yield the chunks for the starts, pieces and ends of texts and thoughts."""
        for step, text, piece, is_discarded in items:
            kind = "text" if text.kind == "text" else "reasoning"
            id_ = f"{kind}-{text.number}"
            if step == "piece":
                yield {"type": f"{kind}-delta", "id": id_, "delta": piece}
            else:
                yield {"type": f"{kind}-{step}", "id": id_}
            if is_discarded:
                yield self._make_data_chunk("discarded", {"id": id_, "text": text.shown})

    def _end_root_texts(self, discarded: Literal["all"] | None = None) -> Iterator[Chunk]:
        """Yield the ends of the open texts of the root; they are marked if they are *discarded*."""
        yield from self._show_text_items(self._texts.end_texts("", discarded=discarded))

    def _end_discarded_texts_and_calls(self, event: ReplyDiscarded) -> Iterator[Chunk]:
        """Yield the ends of the texts and calls of a discarded reply; newer pages are sent one reset of the step."""
        resets = self._version >= RESET_FROM and self._in_step
        yield from self._end_root_texts(None if resets else "all")
        for call in self._calls.end_incomplete_inputs("", are_over=False):
            if not resets:
                yield {
                    "type": "tool-output-error",
                    "toolCallId": call,
                    "errorText": "the reply was discarded",
                    "dynamic": True,
                }
        if resets:
            yield {"type": "reset-step"}

    # --- tools of the root, and whatever is asked ------------------------------------------------------------------------

    def _show_call_input(self, event: CallEvent) -> Iterator[Chunk]:
        """Yield the start, pieces and whole input of a call; the whole input only once."""
        for step, path, call, name, piece, given, _ in self._calls.make_items(event):
            about = {"type": f"tool-input-{STEPS[step]}", "toolCallId": _join_call_id(path, call)}
            if step == "piece":
                yield {**about, "inputTextDelta": piece}
            else:
                told = {} if step == "start" else {"input": None if given is ABSENT else plain(given)}
                yield {**about, "toolName": name, **told, "dynamic": True}

    def _show_tool_start(self, event: ToolStarted) -> Iterator[Chunk]:
        """Yield the input of a call unless shown before, and the start of a tool body with effects."""
        yield from self._show_call_input(event)
        yield from self._show_tool_body_start(event)

    def _show_tool_body_start(self, event: ToolStarted) -> Iterator[Chunk]:
        """Yield a tool body with effects as a running child; nothing for another tool."""
        if event.child_path:
            # The effects of a tool's body are shown like those of a child.
            name = event.tool_name
            yield self._update_agent_chunk(
                event.child_path, agentId=name, name=name, status="running", text="", tool=""
            )

    def _show_tool_body_end(self, event: ToolFinished) -> Iterator[Chunk]:
        """Yield the end of a tool body with effects; nothing for another tool or a pending result."""
        if event.child_path and event.result.status != "pending":
            yield self._update_agent_chunk(
                event.child_path, status="failed" if event.result.is_error else "completed", tool=""
            )

    def _show_tool_end(self, event: ToolFinished) -> Iterator[Chunk]:
        """Yield the input unless shown, the end of a body, and the result or denial; no result if it is pending."""
        call, result = _make_call_id(event), event.result
        if result.status != "pending":
            self._over.add(call)
        yield from self._show_call_input(event)
        yield from self._show_tool_body_end(event)
        if result.status == "denied" and self._version >= APPROVALS_FROM and call in self._decided_calls:
            yield {"type": "tool-output-denied", "toolCallId": call}
        elif result.is_error:
            yield {"type": "tool-output-error", "toolCallId": call, "errorText": result.text, "dynamic": True}
        elif result.status != "pending":
            yield {
                "type": "tool-output-available",
                "toolCallId": call,
                "output": _output_from_result(result),
                "dynamic": True,
            }

    def _show_tool_progress(self, event: ToolProgress | ToolLog) -> Iterator[Chunk]:
        """Yield the progress of a call as data that the page does not store."""
        told = {
            "toolCallId": _make_call_id(event),
            "message": event.message,
            "percent": getattr(event, "percent", None),
        }
        yield self._make_data_chunk("progress", told, transient=True)

    def _show_permission_request(self, event: PermissionRequested) -> Iterator[Chunk]:
        """Yield a call and the request for its approval; for older pages a question. Nothing if the tool itself refuses the call."""
        if event.question.problem:
            return  # the tool refuses the call by itself
        if self._version < APPROVALS_FROM:
            yield from self._show_question(event)
            return
        call = _make_call_id(event)
        # The runs of one message count their questions each from the beginning; its approvals are told apart by their ids.
        self._approvals[call] = approval = f"{event.run_id}:{event.question.id}"
        yield from self._show_call_input(event)
        if event.question.origins:
            told = {"toolCallId": call, "origins": list(event.question.origins)}
            yield self._make_data_chunk("origins", told, id=approval)
        yield {"type": "tool-approval-request", "approvalId": approval, "toolCallId": call}

    def _show_question(self, event: QuestionAsked | PermissionRequested) -> Iterator[Chunk]:
        """Yield a question as a data part."""
        yield self._make_data_chunk("question", question_to_json(event.question), id=event.question.id)

    def _store_and_show_decision(self, event: PermissionDecided) -> Iterator[Chunk]:
        """Store that a call was decided; yield the decision if its approval is open and the page knows such chunks."""
        call = _make_call_id(event)
        self._decided_calls.add(call)
        approval = self._approvals.pop(call, "")
        if approval and self._version >= DECISIONS_FROM:  # before, a page learns it from what becomes of the call
            answer = {"approvalId": approval, "approved": event.decision == "allow"}
            yield {"type": "tool-approval-response", **answer, **({"reason": event.reason} if event.reason else {})}

    def _show_file_change(self, event: FileChanged) -> Iterator[Chunk]:
        """Yield a changed file as a data part."""
        yield self._make_data_chunk(
            "file-changed", {"file": event.file, "action": event.action, "toolCallId": _make_call_id(event)}
        )

    def _show_todos(self, event: TodosChanged) -> Iterator[Chunk]:
        """Yield the todos of a run as a data part that is replaced in place."""
        yield self._make_data_chunk(
            "todos", {"path": event.path, "todos": plain(event.todos)}, id=f"todos-{event.path}"
        )

    def _show_wait(self, event: WaitStarted | WaitFinished) -> Iterator[Chunk]:
        """Yield a wait as one part that is replaced in place; a suspended run continues it in the next message."""
        told: dict[str, object] = {"path": event.path, "kind": event.kind}
        if isinstance(event, WaitStarted):
            told |= {"wakesAt": event.wakes_at, "topic": event.topic, "children": list(event.children)}
        about = self._waits.setdefault((event.path, event.seq), {})
        about |= {**told, "isOver": isinstance(event, WaitFinished) and event.is_over}
        yield self._make_data_chunk("wait", dict(about), id=f"wait-{event.path}-{event.seq}")

    # --- children ---------------------------------------------------------------------------------------------------------

    def _show_child_start(self, event: AgentSpawned) -> Iterator[Chunk]:
        """Yield a child as a running agent, a data part that is replaced in place."""
        name = event.display_name or event.agent_id
        yield self._update_agent_chunk(
            event.child_path,
            agentId=event.agent_id,
            name=name,
            status="running",
            text="",
            tool="",
            isBackground=event.is_background,
        )

    def _show_child_text(self, event: TextCompleted) -> Iterator[Chunk]:
        """Yield a child with its last text."""
        yield self._update_agent_chunk(event.path, text=event.text)

    def _show_child_tool(self, event: ToolStarted | ToolFinished) -> Iterator[Chunk]:
        """Yield a child with its current tool; also the start or end of a decided call, or of a tool body."""
        yield self._update_agent_chunk(event.path, tool=event.tool_name if isinstance(event, ToolStarted) else "")
        # What a person was asked about has a part of its own, which would wait for ever.
        if _make_call_id(event) in self._decided_calls:
            yield from self._show_tool_start(event) if isinstance(event, ToolStarted) else self._show_tool_end(event)
        elif isinstance(event, ToolStarted):
            yield from self._show_tool_body_start(event)
        else:
            yield from self._show_tool_body_end(event)

    def _show_child_end(self, event: AgentFinished) -> Iterator[Chunk]:
        """Yield a child with its status at the end."""
        why = {"error": event.error} if event.error else {}
        yield self._update_agent_chunk(
            event.child_path, agentId=event.agent_id, status=event.status.value, tool="", **why
        )

    def _update_agent_chunk(self, path: str, **changes: object) -> Chunk:
        """Merge *changes* into the stored data of a child, and return all of it as a chunk."""
        self._agents[path] = {**self._agents.get(path, {"path": path}), **changes}
        return self._make_data_chunk("agent", self._agents[path], id=path)

    def _make_data_chunk(self, name: str, data: object, *, id: str | None = None, transient: bool = False) -> Chunk:
        """Return a data part ``data-NAME``; a *transient* one is not stored by the page."""
        told = {"id": id} if id is not None else {}
        return {"type": f"data-{name}", **told, "data": data, **({"transient": True} if transient else {})}

    SHOWN: ClassVar[Shows] = {
        RunFinished: _show_run_end,
        AgentSpawned: _show_child_start,
        AgentFinished: _show_child_end,
        ToolProgress: _show_tool_progress,
        ToolLog: _show_tool_progress,
        FileChanged: _show_file_change,
        TodosChanged: _show_todos,
        QuestionAsked: _show_question,
        PermissionRequested: _show_permission_request,
        PermissionDecided: _store_and_show_decision,
        WaitStarted: _show_wait,
        WaitFinished: _show_wait,
    }
    """The events that the page is shown of every run."""
    OF_ROOT: ClassVar[Shows] = {
        StepStarted: _show_step_start,
        StepFinished: _end_texts_and_step,
        TextDelta: _show_text,
        ThinkingDelta: _show_text,
        TextCompleted: _show_text,
        ThinkingCompleted: _show_text,
        ReplyDiscarded: _end_discarded_texts_and_calls,
        ToolInputDelta: _show_call_input,
        ToolStarted: _show_tool_start,
        ToolFinished: _show_tool_end,
    }
    OF_CHILD: ClassVar[Shows] = {
        TextCompleted: _show_child_text,
        ToolStarted: _show_child_tool,
        ToolFinished: _show_child_tool,
    }


def _make_call_id(event: Any) -> str:
    return _join_call_id(event.path, event.tool_call_id)


def _join_call_id(path: str, call: str) -> str:
    """Return the id of a call for the page; for a call of a child, it starts with the path."""
    return f"{path}:{call}" if path else call


def _output_from_result(result: ToolResult) -> object:
    """Return the output of a tool for the page: its data, else its text."""
    # What the conversation holds of it, so that a page that is loaded again shows the same.
    return result.text if result.data is None or result.structured is not None else plain(result.data)
