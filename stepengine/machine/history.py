"""
The messages of a run: the full record, the model's view, and the lifetimes of messages.

Lives here: messages that leave when their time is over, results of ephemeral tools that the
view shows no longer, the step that is held beside the history while it runs, and what a child takes over
from the run that spawns it, or leaves to it. Knows nothing of runs, effects and hooks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import attrs

from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    Message,
    TextPart,
    ThinkingPart,
    TimeToLive,
    ToolCallPart,
    ToolMessage,
    ToolResult,
    UserMessage,
)
from stepengine.data.record_sizes import ESCAPED_CHAR_BYTES, MAX_VALUE_BYTES, find_length_problem
from stepengine.data.result_cuts import count_shortenable_chars, cut_result_text
from stepengine.data.state import AgentState, find_suspended_reply_index
from stepengine.data.transcript import Transcript

SLICE_MESSAGES = 50
"""
Messages per slice: the last reply with text is nearly always in the first one, and a slice costs more than its items.
"""
EXPIRED = "[This result is no longer shown; call the tool again if you need it.]"


class RecordAndView(NamedTuple):
    """A record and the view of it."""

    record: Transcript
    view: Transcript


ShortenMessage: TypeAlias = Callable[[ToolMessage, int], ToolMessage]


def _shorten_transcript(transcript: Transcript, shorten: ShortenMessage | None) -> Transcript:
    """Return *transcript* as the model sees it, with long results shortened; itself if there is none."""
    if shorten is None or not transcript:
        return transcript
    results: dict[str, ToolResult] = {}
    # Each message is measured once, also in later runs of the conversation.
    for message, chars in zip(
        transcript, transcript.memo("count_shortenable_chars", count_shortenable_chars), strict=True
    ):
        if chars and isinstance(message, ToolMessage) and (shown := shorten(message, chars)) is not message:
            results[message.tool_call_id] = shown.result
    return transcript.replace_results(results)


def _shorten_messages(messages: Sequence[Message], shorten: ShortenMessage | None) -> Sequence[Message]:
    """Return *messages* with long results shortened; *messages* itself if there is none."""
    if shorten is None:
        return messages
    shown = messages
    for position, message in enumerate(messages):
        if (
            isinstance(message, ToolMessage)
            and (chars := count_shortenable_chars(message))
            and (short := shorten(message, chars)) is not message
        ):
            shown = [*shown[:position], short, *shown[position + 1 :]]
    return shown


class EphemeralResults:
    """
    The results of ephemeral tools in the view of a run.

    Args:
        keeps: The number of newest results that stay in the view, by the name of the tool.
        view: The view at the start.
    """

    __slots__ = ("_call_ids", "_keeps")

    def __init__(self, keeps: Mapping[str, int], view: Transcript) -> None:
        self._keeps = keeps
        self.reset(view)

    def reset(self, view: Transcript) -> None:
        """Forget all ephemeral results, and record those in *view*."""
        # The calls whose results are in the view, oldest first.
        self._call_ids: dict[str, deque[str]] = {name: deque() for name in self._keeps}
        self.record(view)

    def record(self, messages: Iterable[Message]) -> None:
        """Record the results in new messages of the view."""
        for message in messages:
            if isinstance(message, ToolMessage) and message.tool_name in self._keeps:
                self._call_ids[message.tool_name].append(message.tool_call_id)

    def replace_expired(self, view: Transcript) -> Transcript:
        """Return *view* with a placeholder for each result but the newest ones of its tool."""
        expired: dict[str, ToolResult] = {}
        for name, call_ids in self._call_ids.items():
            while len(call_ids) > self._keeps[name]:
                expired[call_ids.popleft()] = ToolResult.text(EXPIRED)
        return view.replace_results(expired)


class RunHistory:
    """
    Record and view of one run. Other modules change them by the methods; they only fill ``inbox`` and set ``end_turn_message``.

    Attributes:
        record: The whole conversation.
        view: The messages that the model sees; the record itself until a change.
        start: The number of messages in the record before those of this run.
        has_earlier_messages: Whether the run started with messages, such as those of ``previous=``.
        opening: The first messages of this run: the user's prompt and the instructions.
        end_turn_message: The message of an ``end_turn``, until a text follows it.
        own_calls: The ids of the handler's calls in the last step whose results count as its words.
        open_reply: The reply whose calls are running; it is in no transcript yet.
        open_step: The reply, and the results so far, of the step in which the continued run was suspended, while it is held
            outside of the record.
        inbox: The messages that were sent to the run and are not in the record yet.
        left_out: The messages that replacements removed from the record, oldest first, if they are kept.
    """

    __slots__ = (
        "_ephemeral_results",
        "_keeps_left_out",
        "_shorten",
        "_times",
        "end_turn_message",
        "has_earlier_messages",
        "inbox",
        "left_out",
        "open_reply",
        "open_step",
        "opening",
        "own_calls",
        "record",
        "start",
        "view",
    )

    def __init__(
        self,
        record: Transcript,
        view: Transcript,
        keeps: Mapping[str, int],
        *,
        shorten: ShortenMessage | None = None,
        is_callers: bool = False,
        left_out: tuple[Message, ...] = (),
        keeps_left_out: bool = False,
    ) -> None:
        """
        Start with *record* and *view*. *keeps* is the number of newest results per ephemeral tool in a request.

        *shorten* returns a tool message of so many characters as the model sees it. With *keeps_left_out* the messages that a
        replacement removes are added to *left_out*.

        The history of a tool's body is its caller's (*is_callers*). Nothing is added to it, so its messages are not read. Reading them
        would make the cost of a call grow with the conversation.
        """
        self.record = record
        self.view = view
        self.start = len(record)
        self.has_earlier_messages = bool(record)
        self.opening: tuple[Message, ...] = ()
        self.end_turn_message = ""
        self.inbox: list[UserMessage] = []
        self.open_reply: AssistantMessage | None = None
        self.open_step: tuple[AssistantMessage, tuple[ToolMessage, ...]] | None = None
        self._times: frozenset[TimeToLive] = (
            frozenset() if is_callers else frozenset(m.ttl for m in record if m.ttl is not None)
        )
        """The times-to-live that messages may have, so that looking costs nothing while there are none."""
        self.own_calls: Collection[str] = ()
        self._shorten = shorten
        self.left_out = left_out
        self._keeps_left_out = keeps_left_out
        if view is record and not is_callers:
            self.view = _shorten_transcript(record, shorten)
        self._ephemeral_results = EphemeralResults(keeps, self.view) if keeps else None

    # --- what is said -----------------------------------------------------------------------------------------------

    def add(self, messages: Sequence[Message]) -> None:
        """Append messages to record and view; an assistant's text clears the message of an earlier ``end_turn``."""
        if self.end_turn_message and any(isinstance(m, AssistantMessage) and m.text.strip() for m in messages):
            self.end_turn_message = ""
        self._append_all(messages)
        self._record_lifetimes(messages)

    def append_reply(
        self, message: AssistantMessage, results: Iterable[ToolResult], own_calls: Collection[str] = ()
    ) -> None:
        """
        Append a reply and the results of its calls together.

        *own_calls* are the ids of a handler's calls. If no text follows, their results are the last texts of the run.
        """
        if self.end_turn_message and message.text.strip():
            self.end_turn_message = ""
        self.own_calls = own_calls
        # Reply and results are appended in one piece, so there is no moment at which the record holds a call without
        # its result (reliability:I1).
        self._append_all((message, *map(ToolMessage.from_result, results)))

    def _append_all(self, messages: Sequence[Message]) -> None:
        """Append *messages* to the record and, shortened, to the view."""
        # While nobody has changed the view it is the very same object as the record: one transcript is kept, and
        # whether they differ is seen by identity.
        record = self.record.with_messages(messages)
        shown = _shorten_messages(messages, self._shorten)
        if shown is messages and self.view is self.record:
            self.view = record
        else:
            self.view = self.view.with_messages(shown)
        self.record = record
        if self._ephemeral_results is not None:
            self._ephemeral_results.record(messages)

    def append_inbox(self) -> None:
        """Append the messages in the inbox."""
        if self.inbox:
            # Here, and not when they arrive: between a call and its result no message may stand. Untagged ones are what a
            # person typed, and the tag is what pruning goes by: the live request must survive it, however the text came.
            # Messages that tools or policies sent bring tags of their own, and are no request.
            self.add([m if m.tags else UserMessage(m.content, ("USER_PROMPT",)) for m in self.inbox])
            self.inbox = []

    def pop_inbox_messages(self) -> list[UserMessage]:
        """Empty the inbox and return its messages."""
        messages, self.inbox = self.inbox, []
        return messages

    def append_opening(self, messages: Sequence[Message]) -> None:
        """Append the first messages of the run."""
        self.opening = tuple(messages)
        self.add(messages)

    def replace(self, record: Transcript | None, view: Transcript | None, *, has_begun: bool = True) -> None:
        """
        Replace the record, which the view then follows, or the view alone.

        The run's own messages stay its own if the new record ends with them. A run that has not started has no messages of its own.
        """
        if record is not None:
            if self._keeps_left_out:
                # What was said for a time only is not part of the conversation that anybody would look up.
                self.left_out += tuple(
                    [m for m in self.record.find_missing_messages(record) if _find_effective_lifetime(m) is None]
                )
            # What counts as this run's own (for its output, for a session) is the end of the record. A policy that
            # rewrites it mostly keeps that end, and then it stays this run's; where it does not, nothing can be said to
            # be.
            own, length = self.list_added_messages(), len(record)
            is_kept = record[length - len(own) :] == own and (own or not has_begun)
            self.start = length - len(own) if is_kept else min(self.start, length)
            self.record, self.view = record, _shorten_transcript(record, self._shorten)
        if view is not None:
            self.view = _shorten_transcript(view, self._shorten)
        if self._ephemeral_results is not None:
            self._ephemeral_results.reset(self.view)
        self._record_lifetimes(self.view)

    def list_added_messages(self) -> tuple[Message, ...]:
        """Return the messages that this run added to the record."""
        return self.record[self.start :]

    def iterate_newest_first(self) -> Iterator[Message]:
        """Yield the messages of this run backwards, in slices, because slices of a transcript are cheap and single items are not."""
        record, end = self.record, len(self.record)
        while end > self.start:
            begin = max(self.start, end - SLICE_MESSAGES)
            yield from reversed(record[begin:end])
            end = begin

    # --- what stays beside it ---------------------------------------------------------------------------------------

    def set_open_reply(self, reply: AssistantMessage | None) -> None:
        """Set the reply whose calls are running; ``None`` once they are done."""
        self.open_reply = reply

    def reopen_suspended_step(self, opening: Sequence[UserMessage]) -> bool:
        """
        Move the step in which the continued run was suspended from the record to ``open_step``; return whether there is one.

        The step is held separately while it runs. The messages after it and *opening*, the first messages of this run, will follow its
        results.
        """
        record, at = self.record, find_suspended_reply_index(self.record)
        reply = None if at is None else record[at]
        if at is None or not isinstance(reply, AssistantMessage):
            return False
        after = at + 1 + len(reply.tool_calls)
        self.open_step = (reply, tuple([m for m in record[at + 1 : after] if isinstance(m, ToolMessage)]))
        shown = next((i for i in range(len(self.view) - 1, -1, -1) if self.view[i] is reply), len(self.view))
        same = self.view is record
        self.record = Transcript(record[:at])
        self.view = self.record if same else Transcript(self.view[:shown])
        self.start = min(self.start, at)
        if self._ephemeral_results is not None:
            self._ephemeral_results.reset(self.view)
        # Behind the results that are still to come, for the same reason as in `append_inbox`.
        self.inbox += [*[m for m in record[after:] if isinstance(m, UserMessage)], *opening]
        return True

    # --- how long things stay ---------------------------------------------------------------------------------------

    def _record_lifetimes(self, messages: Iterable[Message]) -> None:
        """Remember which lifetimes *messages* have, so that they are searched for expired ones."""
        for message in messages:
            if message.ttl is not None:
                self._times |= {message.ttl}

    def remove_expired(self, *ttls: TimeToLive) -> None:
        """Remove expired messages: those of ``agent_step`` with the step, of ``user_prompt`` with the run."""
        # Asked at every step of every run, where hardly any message has a time; the set of times answers without a look
        # at messages.
        over = self._times.intersection(ttls)
        if not over:
            return
        self._times -= over
        self.start -= sum(_find_effective_lifetime(m) in over for m in self.record[: self.start])
        self.record, self.view = self._copy_without_expired(over)

    def _copy_without_expired(self, expired_ttls: Collection[str]) -> RecordAndView:
        """Return record and view without the messages whose lifetime is in *expired_ttls*; the history itself is unchanged."""
        record = _make_transcript_if_changed(
            self.record, [m for m in self.record if _find_effective_lifetime(m) not in expired_ttls]
        )
        if self.view is self.record:
            return RecordAndView(record, record)
        return RecordAndView(
            record,
            _make_transcript_if_changed(
                self.view, [m for m in self.view if _find_effective_lifetime(m) not in expired_ttls]
            ),
        )

    def expire_ephemeral_results(self) -> None:
        """Replace all but the newest results of each ephemeral tool in the view by a placeholder."""
        if self._ephemeral_results is not None:
            self.view = self._ephemeral_results.replace_expired(self.view)

    # --- parents and children ---------------------------------------------------------------------------------------

    def make_inherited_history(self, call_id: str) -> RecordAndView:
        """
        Return record and view for a child: no step-scoped messages, but the open reply's content before the child's call.

        Args:
            call_id: The call of the open reply that spawns; ``""`` for a handler's own.
        """
        record, view = (
            self._copy_without_expired(("agent_step",)) if "agent_step" in self._times else (self.record, self.view)
        )
        said = self._make_reply_before_call(call_id)
        if said is None:
            return RecordAndView(record, view)
        longer = record.append(said)
        return RecordAndView(longer, longer if view is record else view.append(said))

    def make_history_after_inline_child(self, child_state: AgentState, call_id: str) -> RecordAndView:
        """Return record and view after an inline child, without the open reply's part before its call."""
        said = self._make_reply_before_call(call_id)
        if said is None:
            return RecordAndView(child_state.message_history, child_state.view)
        record = _remove_last_equal(child_state.message_history, said)
        same = child_state.view is child_state.message_history
        return RecordAndView(record, record if same else _remove_last_equal(child_state.view, said))

    def _make_reply_before_call(self, call_id: str) -> AssistantMessage | None:
        """Return the texts and thoughts of the open reply before a call, or ``None`` if there are none."""
        said: list[AssistantPart] = []
        for part in self.open_reply.content if self.open_reply is not None else ():
            if isinstance(part, ToolCallPart) and part.tool_call_id == call_id:
                break
            if (isinstance(part, TextPart) and part.text.strip()) or (
                isinstance(part, ThinkingPart) and _has_thought_content(part)
            ):
                said.append(part)
        return AssistantMessage(tuple(said), ("OPEN_REPLY",)) if said else None


def _fit_text_to_record(text: str) -> str:
    """Return *text* itself, or without its middle if it is too long for a record."""
    return cut_result_text(text, MAX_VALUE_BYTES // ESCAPED_CHAR_BYTES) if find_length_problem(text) else text


class LastTexts:
    """
    Reads the last texts of a run, which are its output if no other is set.

    Args:
        history: The history of the run.
    """

    __slots__ = ("_answer", "_history")

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._answer: tuple[Transcript, str] | None = None

    def get_joined_text(self) -> str:
        """
        Return the message of ``end_turn``, else the last adjacent assistant texts of this run, joined with blank lines.

        A parent model reads this text in place of the messages. If the run ends with a handler's own call, the results of the
        call follow. A text that is too long for a record loses its middle.
        """
        history = self._history
        if history.end_turn_message:
            return _fit_text_to_record(history.end_turn_message)
        if self._answer is None or self._answer[0] is not history.record:
            texts = (self._list_last_call_texts() if history.own_calls else ()) or self._list_last_texts()
            self._answer = (history.record, _fit_text_to_record("\n\n".join(reversed(texts))))
        return self._answer[1]

    def get_last_text(self) -> str:
        """Return the message of ``end_turn``, else the text of the last assistant message alone."""
        return self._history.end_turn_message or next(iter(self._list_last_texts()), "")

    def get_newest_reply_text(self) -> str:
        """Return the message of ``end_turn`` in the newest assistant message, else its text."""
        newest = next((m for m in self._history.iterate_newest_first() if isinstance(m, AssistantMessage)), None)
        if newest is None:
            return ""
        has_ended_turn = any(call.tool_name == "end_turn" for call in newest.tool_calls)
        return self._history.end_turn_message if has_ended_turn else newest.text_without_thoughts

    def _list_last_texts(self) -> list[str]:
        """Return the texts of the last assistant messages that follow each other, the newest first."""
        texts: list[str] = []
        for message in self._history.iterate_newest_first():
            if not isinstance(message, AssistantMessage):
                if texts:
                    break
            elif not _is_single_call(message):
                text = message.text_without_thoughts
                if text.strip():
                    texts.append(text)
        return texts

    def _list_last_call_texts(self) -> list[str]:
        """Return the results of the handler's call that ends the run, then the texts right before it, the newest first; or nothing."""
        own, results, texts = self._history.own_calls, list[str](), list[str]()
        is_before = False
        for message in self._history.iterate_newest_first():
            if isinstance(message, AssistantMessage):
                if not is_before and all(call.tool_call_id not in own for call in message.tool_calls):
                    return []
                is_before = True
                texts.append(message.text_without_thoughts)
            elif is_before:
                break
            elif isinstance(message, ToolMessage) and message.tool_call_id in own:
                results.append(message.text)
        return [text for text in (*results, *texts) if text.strip()] if any(map(str.strip, results)) else []


class CallIds:
    """
    Makes ids of tool calls that occur neither in the record nor in the view of a run.

    It holds no reference to the run: a journal may keep an effect whose ``call_id`` is ``peek_id``, and must not keep the run with it.

    Attributes:
        next: The number of the next id, unless a call with that id exists.
    """

    __slots__ = ("_history", "_peeked", "_prefix", "next")

    def __init__(self, history: RunHistory, prefix: str, next: int) -> None:
        self._history = history
        self._prefix = prefix
        # The id that `peek_id` found for the next call, the number after it, and the record and view in which it was looked up.
        self._peeked: tuple[str, int, Transcript, Transcript] | None = None
        self.next = next

    def allocate_id(self) -> str:
        """Reserve and return the next id that no call of the history has."""
        history = self._history
        record, view = history.record, history.view
        # A watched reply was peeked at, and while record and view are the same objects the id is still free.
        peeked = self._peeked
        if peeked is not None:
            self._peeked = None
            if peeked[2] is record and peeked[3] is view:
                self.next = peeked[1]
                return peeked[0]
        # A loop, since a history of another program may have used the same ids; each may occur once (reliability:I1).
        while True:
            call_id = f"{self._prefix}{self.next}"
            self.next += 1
            if not (record.has_call(call_id) or (view is not record and view.has_call(call_id))):
                return call_id

    def peek_id(self, number: int) -> str:
        """Return the id that ``allocate_id`` will return for a call of the current reply; *number* counts from 0."""
        at, history = self.next, self._history
        record, view = history.record, history.view
        # A watched reply asks twice for the id of its first call: when its arguments arrive, and when the reply is complete.
        peeked = self._peeked
        if not number and peeked is not None and peeked[2] is record and peeked[3] is view:
            return peeked[0]
        left = number
        while True:
            call_id = f"{self._prefix}{at}"
            if not (record.has_call(call_id) or (view is not record and view.has_call(call_id))):
                if not left:
                    break
                left -= 1
            at += 1
        if not number:
            self._peeked = call_id, at + 1, record, view
        return call_id


def state_without_opening(state: AgentState, opening: Sequence[Message]) -> AgentState:
    """Return the state that an inline child leaves to its parent: without *opening*, the first messages of the child."""
    if not opening:
        return state
    record = _remove_messages(state.message_history, opening)
    view = record if state.view is state.message_history else _remove_messages(state.view, opening)
    return attrs.evolve(state, message_history=record, view=view)


def _remove_messages(messages: Transcript, removed: Sequence[Message]) -> Transcript:
    """Return *messages* without the very objects in *removed*."""
    return _make_transcript_if_changed(messages, [m for m in messages if not any(m is g for g in removed)])


def _remove_last_equal(messages: Transcript, removed: Message) -> Transcript:
    """Return *messages* without the last one that equals *removed*; an earlier one is the text of another reply."""
    kept = list(messages)
    for index in range(len(kept) - 1, -1, -1):
        if kept[index] == removed:
            del kept[index]
            break
    return _make_transcript_if_changed(messages, kept)


def _has_thought_content(part: ThinkingPart) -> bool:
    """Return whether a thought has text or data that its provider needs back."""
    return bool(part.text.strip() or part.provider_data)


def _is_single_call(message: AssistantMessage) -> bool:
    """Return whether a message consists of one call, as most do."""
    return len(message.content) == 1 and isinstance(message.content[0], ToolCallPart)


def _make_transcript_if_changed(messages: Transcript, kept_messages: list[Message]) -> Transcript:
    """Return a transcript of *kept_messages*, or *messages* itself if none of them is missing."""
    return messages if len(kept_messages) == len(messages) else Transcript(kept_messages)


def _find_effective_lifetime(message: Message) -> TimeToLive | None:
    """Return the lifetime that applies to a message; ``None`` if it stays: without one, or with calls, whose results follow it."""
    if message.ttl is None or (isinstance(message, AssistantMessage) and message.tool_calls):
        return None
    return message.ttl
