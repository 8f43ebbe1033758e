"""
Display items: texts and calls of a run in the order in which every protocol needs them, whatever the order of the events.

A text starts before its pieces and ends after them. A completed text supplies the pieces that a slow reader missed. If it does not
continue the shown text, that one is discarded, and a new text starts. The input of a call is complete once, before its result. The
translators of ACP, AG-UI and Vercel only encode the items; ACP encodes only texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import attrs

from stepengine.data.events import (
    Event,
    PermissionRequested,
    TextCompleted,
    TextDelta,
    ThinkingCompleted,
    ThinkingDelta,
    ToolFinished,
    ToolInputDelta,
    ToolStarted,
)
from stepengine.data.json import ABSENT
from stepengine.data.state import RunStatus

FAILURES = (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.MAX_STEPS)
"""The statuses of children that are shown as failed."""

TextEvent: TypeAlias = "TextDelta | TextCompleted | ThinkingDelta | ThinkingCompleted"
OUTPUT = -1
"""The ``seq`` of a text that no model wrote."""


@attrs.define(eq=False)
class OpenText:
    """
    A text or thought that has started and not ended.

    Attributes:
        path: The path of its run.
        kind: Of a model's reply, or of its thoughts.
        seq: Its model call.
        number: Counts all texts, from 1; ids are made of it.
        epoch: The epoch of the event that started it.
        shown: The text so far.
    """

    path: str
    kind: Literal["text", "thought"]
    seq: int
    number: int
    epoch: str
    shown: str = ""


class TextItem(NamedTuple):
    """
    A change of a text.

    Attributes:
        step: The start, a piece or the end.
        text: The text.
        piece: The piece.
        is_discarded: At an end, whether the shown text is invalid.
    """

    step: Literal["start", "piece", "end"]
    text: OpenText
    piece: str = ""
    is_discarded: bool = False


class TextItems:
    """Converts the text events of a run and its children into items, and remembers the texts of the root's model."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int], OpenText] = {}
        self._said: list[str] = []
        self._made = 0

    def make_items(self, event: TextEvent) -> Iterator[TextItem]:
        """Yield the start, pieces and end of a text for an event; a completed text that differs from the shown one starts again."""
        kind: Literal["text", "thought"] = "text" if isinstance(event, TextDelta | TextCompleted) else "thought"
        if isinstance(event, TextDelta | ThinkingDelta):
            yield from self._start_or_extend_text(event, kind, event.seq, event.text)
            return
        if kind == "text" and not event.path:
            self._said.append(event.text)
        text = self._open.get((event.path, kind, event.seq))
        if text is not None and not event.text.startswith(text.shown):
            yield self._end_text(text, is_discarded=True)
            text = None
        yield from self._start_or_extend_text(event, kind, event.seq, event.text[len(text.shown) if text else 0 :])
        if (text := self._open.get((event.path, kind, event.seq))) is not None:
            yield self._end_text(text)

    def make_output_items(self, event: Event, text: str) -> Iterator[TextItem]:
        """Yield the items of *text*, the output of the root; nothing if it is blank or the model has already written it."""
        yield from self._start_or_extend_text(event, "text", OUTPUT, get_text_unless_shown(text, self._said))

    def end_texts(self, path: str, *, discarded: int | Literal["all"] | None = None) -> Iterator[TextItem]:
        """Yield the ends of the open texts of a run; texts of the model call *discarded*, or all, are marked as discarded."""
        for text in [text for text in self._open.values() if text.path == path]:
            yield self._end_text(text, is_discarded=discarded in ("all", text.seq))

    def _start_or_extend_text(
        self, event: Event, kind: Literal["text", "thought"], seq: int, piece: str
    ) -> Iterator[TextItem]:
        """Yield the start of a new text and the piece; for an open text only the piece, for an empty piece nothing."""
        if not piece:
            return
        text = self._open.get((event.path, kind, seq))
        if text is None:
            self._made += 1
            text = self._open[event.path, kind, seq] = OpenText(event.path, kind, seq, self._made, event.epoch)
            yield TextItem("start", text)
        text.shown += piece
        yield TextItem("piece", text, piece)

    def _end_text(self, text: OpenText, *, is_discarded: bool = False) -> TextItem:
        del self._open[text.path, text.kind, text.seq]
        return TextItem("end", text, is_discarded=is_discarded)


def get_text_unless_shown(text: str, shown_texts: Iterable[str]) -> str:
    """Return *text*; ``""`` if it is blank or part of a text in *shown_texts*."""
    return text if text.strip() and not any(text in one for one in shown_texts) else ""


CallEvent: TypeAlias = "ToolInputDelta | ToolStarted | PermissionRequested | ToolFinished"


class CallItem(NamedTuple):
    """
    A change of the input of a tool call.

    Attributes:
        step: The start of an input that streams, a piece of it, or the whole input.
        path: The path of the run.
        call: The id of the call in its run.
        name: The tool.
        piece: The piece.
        given: The whole input; ``ABSENT`` if no event had it.
        is_streamed: Whether a start was shown before the whole input.
    """

    step: Literal["start", "piece", "input"]
    path: str
    call: str
    name: str
    piece: str = ""
    given: object = ABSENT
    is_streamed: bool = True


class CallItems:
    """
    Converts the events of tool calls into items.

    Args:
        known: Calls of the root that were shown before, and are not shown again.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._is_coming = {("", call): False for call in known}

    def make_items(self, event: CallEvent) -> Iterator[CallItem]:
        """Yield the start, pieces and whole input of a call for an event; the whole input only once."""
        key = event.path, event.tool_call_id
        is_new = key not in self._is_coming
        if isinstance(event, ToolInputDelta):
            if is_new and event.tool_call_id:
                self._is_coming[key] = True
                yield CallItem("start", *key, event.tool_name)
            if event.tool_call_id:
                yield CallItem("piece", *key, event.tool_name, event.text)
        elif self._is_coming.get(key, True):
            self._is_coming[key] = False
            given = ABSENT if isinstance(event, ToolFinished) else event.input
            yield CallItem("input", *key, event.tool_name, given=given, is_streamed=not is_new)

    def end_incomplete_inputs(self, path: str, *, are_over: bool) -> list[str]:
        """Mark the incomplete inputs of a run's calls as complete, and return these calls; unless *are_over*, they may start again."""
        coming = [key for key, is_coming in self._is_coming.items() if is_coming and key[0] == path]
        for key in coming:
            self._is_coming[key] = False
            if not are_over:
                del self._is_coming[key]
        return [call for _, call in coming]

    def reopen_unsettled_calls(self, is_settled: Callable[[str, str], bool]) -> list[tuple[str, str]]:
        """Mark the inputs of unsettled calls as not shown, so that they are shown again; return (path, id) of these calls."""
        found = [key for key in self._is_coming if not is_settled(*key)]
        self._is_coming.update(dict.fromkeys(found, True))
        return found
