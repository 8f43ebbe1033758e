"""
``look``: a place of a recorded run under the code as it stands in its files now.

Whoever edits a handler wants to see what an edit does to a run that there is. So at every save the run is walked again: in a process
that is forked for it from one which holds the record and has never imported any of the author's code. That process compiles the
sources anew, goes to the place, tells what it found there, and is gone with all that the code did to it: an endless loop is killed,
``os._exit`` ends nobody else, and no module has to be unloaded. Tools, models and the network are out of reach. What the model said is
taken from the record, also where it would be asked something else now: otherwise the first changed prompt would end every look.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.data.frozen import frozen
from stepengine.engine.stepping import Tape
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError
from stepengine.journal.records import ROOT
from stepengine.journal.replayer import Leeway
from stepengine.judging.debugger import Debugger, PausedWalk, in_child, lines_around, summary_of
from stepengine.judging.texts import SafeTexts
from stepengine.redaction import is_secret_variable

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.engine.options import AgentLike

__all__ = ("LOOK_SECONDS", "Look", "look")

LOOK_SECONDS = 5.0
MOST = 4 * 1024 * 1024
"""The most bytes that a look may tell: variables are cut, but there may be many."""
AROUND = 3
LIBRARIES = tuple(
    {str(Path(path).resolve()) for path in sysconfig.get_paths().values()} | {str(Path(__file__).resolve().parents[1])}
)


@frozen(kw_only=True)
class Look:
    """
    What a run looks like at a place under the present code.

    Attributes:
        place: Where it stands, as ``Debugger.told`` tells it; ``None`` where the code could not be loaded or walked at all.
        summary: What ``difference`` compares of it.
        lines: The source around the line that waits: numbers and texts.
        problem: Why there is no place: what loading raised, or what ended the process.
        differs: How the code goes another way than is recorded, there or later; ``""`` where it goes the recorded one to its end.
        differs_at: The address of that effect.
        ends: How the run ends under this code, where that is not as recorded: what is recorded of it, and what comes now.
        is_before: Whether that is before the place that was asked for, so that this is the last one before it.
        changed: Where a model would be asked something else, and was taken to say what is recorded.
        files: The author's files that the code came from.
    """

    place: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] | None = None
    lines: tuple[tuple[int, str], ...] = ()
    problem: str = ""
    differs: str = ""
    differs_at: str = ""
    ends: tuple[str, ...] = ()
    is_before: bool = False
    changed: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def look(
    load: Callable[[], tuple[Engine, AgentLike]],
    tape: Tape,
    at: str = "",
    *,
    seconds: float = LOOK_SECONDS,
    prints: bool = False,
) -> Look:
    """
    Walk a recorded run to a place, and on to its end, in a process of its own.

    Args:
        load: Loads the author's code, and returns an engine and the agent of the run. It is called in that process alone.
        tape: The run.
        at: The place, as for ``Debugger.goto``; ``""`` is the beginning.
        seconds: How long it may take.
        prints: Whether what the code prints is shown, on standard error.

    Raises:
        JournalError: when the run has no such place.
        OSError: when no process can be made.
    """
    known = frozenset(sys.modules)
    # What both share is not touched by a collection in either of them: of a long run each would copy it.
    gc.collect()
    gc.freeze()
    try:
        said = in_child(lambda: _told(load, tape, at, known, prints=prints), seconds=seconds, most=MOST)
    finally:
        gc.unfreeze()
    if said is None:
        return Look(problem=f"it was ended after {seconds:g} s: an endless loop?")
    try:
        told = json.loads(said)
    except ValueError:
        return Look(problem="its code ended the process")
    if "no_place" in told:
        raise JournalError(told["no_place"])
    return Look(
        **{
            **told,
            **{name: tuple(told[name]) for name in ("changed", "files", "ends")},
            "lines": tuple(map(tuple, told["lines"])),
        }
    )


def _told(
    load: Callable[[], tuple[Engine, AgentLike]], tape: Tape, at: str, known: frozenset[str], *, prints: bool
) -> str:
    _see_sources_alone()
    with contextlib.redirect_stdout(sys.stderr if prints else io.StringIO()):
        try:
            found = _walked(load, tape, at)
        except _NoPlace as error:
            return json.dumps({"no_place": str(error)})
        except BaseException as error:  # noqa: BLE001 - whatever the author's code raises, a sentence comes of it
            found = Look(problem=_said(error), files=tuple(_files_of(error)))
    files = {*found.files, *_files_since(known)}
    return json.dumps(attrs.asdict(attrs.evolve(found, files=tuple(sorted(files)))))


def _see_sources_alone() -> None:
    """
    Let nothing but sources count: bytecode is found by the second in which a file was written, and by its size.

    Two saves within a second that leave the size alone would show the old code. Keys are not for code that is only walked.
    """
    sys.dont_write_bytecode = True
    sys.pycache_prefix = tempfile.gettempdir() + "/none-" + os.urandom(8).hex()
    for name in [name for name in os.environ if is_secret_variable(name)]:
        del os.environ[name]


class _NoPlace(Exception):
    """The run has no such place."""


def _walked(load: Callable[[], tuple[Engine, AgentLike]], tape: Tape, at: str) -> Look:
    engine, agent = load()
    try:
        stepper = engine.stepper(tape, agent=agent, leeway=Leeway(keeps_replies=True))
    except ReplayDivergence as error:  # it begins in another way, so that there is no place to stand at
        return _with_course(Look(is_before=True), error)
    debugger = Debugger(engine, PausedWalk(stepper), agent)
    try:
        position = debugger.place(at) if at else 0
    except JournalError as error:
        raise _NoPlace(error.message) from None
    found: Look | None = None
    differs: ReplayDivergence | None = None
    try:
        stepper.go(position)
        found = _seen(debugger, is_before=False)
        stepper.go(stepper.last)
    except ReplayDivergence as error:
        differs = error
    # A stepper that goes back compares nothing that was compared, so the first one knows what was kept.
    changed = tuple(dict.fromkeys(stepper.kept))
    if found is None:
        debugger.to(stepper.position - 1)
        found = _seen(debugger, is_before=True)
    ends = _ends(debugger) if differs is None else ()
    return attrs.evolve(_with_course(found, differs), changed=changed, ends=ends)


def _with_course(found: Look, differs: ReplayDivergence | None) -> Look:
    if differs is None:
        return found
    # What follows tells how a run is brought to its end, which nobody wants who is in the middle of an edit.
    said = differs.message.partition("\n  cause looks like:")[0].partition("\n  to go on")[0]
    return attrs.evolve(found, differs=SafeTexts().clean(said), differs_at=differs.address)


def _ends(debugger: Debugger) -> tuple[str, ...]:
    """Return how the run ended, and ends now; nothing where that is the same."""
    stepper, texts = debugger.stepper, debugger.texts
    known = stepper.history.results.get(ROOT)
    if known is None or stepper.finished is None:
        return ()
    was, now = getattr(stepper.history.outcome(known), "value", None), stepper.finished
    told = [f"{ended.status.value}: {texts.value(ended.output)}" for ended in (was, now) if ended is not None]
    return tuple(told) if len(set(told)) > 1 else ()


def _seen(debugger: Debugger, *, is_before: bool) -> Look:
    place, moment = debugger.told(), debugger.moment()
    frame = next((frame for frame in moment.frames if frame.kind != "package"), None)
    lines = () if frame is None else lines_around(frame, AROUND)
    return Look(
        place=place,
        summary=summary_of(moment, debugger.texts),
        lines=tuple([(number, debugger.texts.clean(text)) for number, text in lines]),
        is_before=is_before,
    )


def _said(error: BaseException) -> str:
    """Return what loading or walking raised, with its place in the author's files."""
    if isinstance(error, StepEngineError):
        return error.message
    last = next((f"{name}:{line}: " for name, line in reversed(list(_places_of(error)))), "")
    return f"{last}{type(error).__name__}: {error}"


def _files_of(error: BaseException) -> Iterator[str]:
    """Give the author's files that an error came through."""
    return (file for file, _ in _places_of(error))


def _places_of(error: BaseException | None) -> Iterator[tuple[str, int]]:
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            if is_own(frame.f_code.co_filename):
                yield frame.f_code.co_filename, line
        if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
            yield error.filename, error.lineno or 0
        error = error.__cause__ or error.__context__


def _files_since(known: Iterable[str]) -> Iterator[str]:
    """Give the author's files among the modules that were imported here."""
    before = frozenset(known)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in before and isinstance(file, str) and is_own(file):
            yield file


def is_own(file: str) -> bool:
    """Return whether a file is one that an author edits: a source, and of no library."""
    if not file.endswith(".py"):
        return False
    path = Path(file).resolve()
    return path.is_file() and not any(path.is_relative_to(folder) for folder in LIBRARIES)
