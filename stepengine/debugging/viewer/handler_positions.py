"""
The positions of the handler at each step, with its variables: from one replay of the run with the agent's code.

The replay performs no effect. At the first difference from the record it ends, and the page reports from which step on positions are
missing.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from stepengine.data.codec import plain
from stepengine.data.hooks import Change, StepContext
from stepengine.data.state import AgentState
from stepengine.data.yields import StepResult
from stepengine.debugging.texts import SafeTexts
from stepengine.debugging.viewer.payload import RunPayload, tool_change_to_json
from stepengine.engine.moments import Frame, Moment
from stepengine.engine.stepper import Stepper
from stepengine.errors import DataError, ReplayDivergence, StepEngineError

MAX_POSITION = 2 * 1024
MAX_ALL = 4 * 1024 * 1024
MAX_SOURCE = 400_000
UNCHANGING = frozenset({StepContext, StepResult, AgentState, str, int, float, bool, bytes})
SHOWN = frozenset({"handler", "helper", "hook", "tool", "opaque"})


@attrs.define
class HandlerPositions:
    """
    The handler positions, variables and hooks of a replayed run, by row number.

    Attributes:
        locals: Frames, with the variables that changed since the previous row of their run.
        contexts: Changes of the context in the state.
        hooks: Changes by hooks.
        sources: The files of the frames.
        missing: Why later positions are missing; ``""`` if none is.
    """

    locals: dict[int, Any] = attrs.Factory(dict)
    contexts: dict[int, dict[str, int | None]] = attrs.Factory(dict)
    hooks: dict[int, list[Any]] = attrs.Factory(dict)
    sources: list[dict[str, str]] = attrs.Factory(list)
    missing: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the handler positions as members of the page data. The sources are shared by all runs."""
        return {"locals": self.locals, "contexts": self.contexts, "hooks": self.hooks}


def replay_and_collect_positions(
    stepper: Stepper, view: RunPayload, *, with_locals: bool = True, sources: list[dict[str, str]] | None = None
) -> HandlerPositions:
    """
    Replay a run to its end or first divergence, and return the handler positions at each row.

    Args:
        stepper: The stepper at position 0; it is closed afterwards.
        view: The run on the page.
        with_locals: Whether the variables are collected, or lines alone.
        sources: The files that the page has already; new ones are appended.
    """
    walker = _PositionCollector(view, with_locals=with_locals, sources=[] if sources is None else sources)
    with stepper:
        try:
            for moment in stepper.moments():
                walker.add_moment(moment)
        except ReplayDivergence as error:
            where = [error.address, *[pointer for pointer, *_ in list(error.diff)[:1]]]
            walker.walked.missing = (
                f"Handler lines from step {error.step} on are missing: the code changed ({', '.join(where)})."
            )
        except StepEngineError as error:
            walker.walked.missing = f"Handler lines are missing from here on: {error.message}"
    return walker.walked


class _PositionCollector:
    """Collects the handler positions of a replayed run, row by row."""

    def __init__(self, view: RunPayload, *, with_locals: bool, sources: list[dict[str, str]]) -> None:
        self._view = view
        self._with_locals = with_locals
        self._safe = SafeTexts()
        self._files: dict[str, int] = {}
        self._last: dict[str, tuple[int, list[dict[str, str]], list[str]]] = {}
        self._contexts: dict[str, dict[str, Any]] = {}
        self._spent = 0
        self._known: dict[tuple[str, int, str], tuple[Any, str]] = {}
        self.walked = HandlerPositions(sources=sources)

    def add_moment(self, moment: Moment) -> None:
        """Add the changes by hooks at a moment; for the first moment of a row also the context changes and the frames."""
        path, _, seq = moment.address.rpartition("#")
        row = self._view.lead.get((path, int(seq))) if moment.address else None
        if row is None:
            return
        if any(isinstance(call.said, Change) for call in moment.hooks):
            self.walked.hooks.setdefault(row, []).extend(self._iterate_hook_changes_and_store_texts(moment))
        if row in self.walked.locals:
            return
        self._add_context_changes_of_row(row, path, moment.state)
        frames = [frame for frame in moment.frames if frame.kind in SHOWN]
        if frames:
            self._add_frames(row, path, frames)

    def _iterate_hook_changes_and_store_texts(self, moment: Moment) -> Iterator[dict[str, object]]:
        """Yield the changes that hooks made at a moment as JSON, and store their texts."""
        for call in moment.hooks:
            if isinstance(call.said, Change):
                with contextlib.suppress(DataError, TypeError):
                    told = _change_to_json(call.said)
                    if told:
                        texts = self._view.texts
                        yield {"point": call.point, "name": texts.clean(call.hook), "change": texts.add(told)}

    def _add_context_changes_of_row(self, row: int, path: str, state: AgentState) -> None:
        """Store the entries of the context that changed or disappeared since the previous row of the same run."""
        before = self._contexts.get(path, {})
        now = dict(state.context)
        self._contexts[path] = now
        changed = {k: v for k, v in now.items() if k not in before or before[k] is not v}
        gone = before.keys() - now.keys()
        told: dict[str, int | None] = {
            k: self._view.texts.add(self._safe.format_variable(k, plain(v))) for k, v in changed.items()
        }
        if told or gone:
            self.walked.contexts[row] = {self._view.texts.clean(k): v for k, v in told.items()} | dict.fromkeys(gone)

    def _add_frames(self, row: int, path: str, frames: list[Frame]) -> None:
        """Store the frames of a row, with the variables that differ from the previous row of the same run; the texts are bounded."""
        before_row, before, names = self._last.get(path, (-1, [], []))
        told, values, left = [], [], MAX_POSITION
        for depth, frame in enumerate(frames):
            is_same = depth < len(before) and names[depth] == frame.function
            old = before[depth] if is_same else {}
            now: dict[str, str] = {}
            if self._with_locals and self._spent < MAX_ALL:
                for name, value in frame.locals.items():
                    if left <= 0:
                        now["…"] = "more variables than the page can show"
                        break
                    now[name] = self._format_variable_cached((path, depth, name), value)
                    left -= len(name) + len(now[name])
            changed = {name: self._view.texts.add(text) for name, text in now.items() if old.get(name) != text}
            self._spent += sum([len(name) + len(now[name]) for name in changed])
            one: dict[str, object] = {
                "fn": frame.function,
                "kind": frame.kind,
                "line": frame.line,
                "file": self._store_source_file(frame),
            }
            one |= {"set": changed} if changed else {}
            one |= {"gone": [name for name in old if name not in now]} if old.keys() - now.keys() else {}
            told.append(one if is_same else one | {"all": True})
            values.append(now)
        self.walked.locals[row] = {"from": before_row, "frames": told}
        self._last[path] = (row, values, [frame.function for frame in frames])

    def _format_variable_cached(self, key: tuple[str, int, str], value: object) -> str:
        """Return the text of a variable. For values of some types, the text is cached until the variable holds another object."""
        before, text = self._known.get(key, (None, ""))
        if before is value and text and type(value) in UNCHANGING:
            return text
        text = self._safe.format_variable(key[2], value)
        self._known[key] = (value, text)
        return text

    def _store_source_file(self, frame: Frame) -> int | None:
        """Store the source of the file of a frame once, and return its number; ``None`` if it is missing or too long."""
        if not frame.file or not frame.line:
            return None
        if frame.file not in self._files:
            text = "".join(linecache.getlines(frame.file))
            if not text or len(text) > MAX_SOURCE:
                return None
            clean = self._view.texts.clean
            source = {"name": clean(Path(frame.file).name), "text": clean(text)}
            if source not in self.walked.sources:
                self.walked.sources.append(source)
            self._files[frame.file] = self.walked.sources.index(source)
        return self._files[frame.file]


def _change_to_json(change: Change) -> dict[str, Any]:
    """Return a change by a hook as JSON; only names of members if it contains functions."""
    try:
        return tool_change_to_json(change)
    except DataError:
        # Functions and Python objects for tools have no JSON, so only the names of the members are shown.
        return {
            name: "(set)"
            for name in ("messages", "view", "tail", "tools", "values", "input", "result")
            if getattr(change, name, None)
        }
