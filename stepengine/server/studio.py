"""
The studio: the files of the web page that shows runs, and the page data that only it requests.

The files are package data next to this module, and the same for all people. The page requests its data with the session of its
user, so access is not decided here.
"""

from __future__ import annotations

import asyncio
import json
import linecache
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.data.questions import Question
from stepengine.debugging.viewer.handler_positions import SHOWN, HandlerPositions, replay_and_collect_positions
from stepengine.debugging.viewer.live_page import FollowedJournal
from stepengine.debugging.viewer.page import PLACE, read_script
from stepengine.debugging.viewer.payload import PageTexts, RunPayload
from stepengine.errors import JournalError, JournalMissing, StepEngineError
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.programs import find_program_text
from stepengine.journal.records import Address
from stepengine.journal.show import load_stored_history
from stepengine.server.ledger import OPEN
from stepengine.server.live_runs import RUNNING
from stepengine.server.problems import Problem
from stepengine.server.run_summaries import remove_oldest_entries
from stepengine.server.shared_responses import SharedResponse

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from stepengine.engine import Engine
    from stepengine.engine.moments import Frame
    from stepengine.journal.history import History
    from stepengine.journal.store import Journal
    from stepengine.server.ledger import RunRow
    from stepengine.server.run_service import RunService

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page shows untrusted texts of models and tools; with this policy they can run no script and load nothing."""
KINDS = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
NOTHING = b"null"
VIEWS_KEPT = 20
ASKED_KEPT = 20_000
NEAR = 4
"""Lines that are shown before and after the current line of a handler."""


@cache
def _load_page_files() -> dict[str, SharedResponse]:
    """Return the files of the page by name; they are read once."""
    folder, found = files(__package__ or __name__) / "page", dict[str, bytes]()
    waiting = [("", folder)]
    for before, place in waiting:
        for one in place.iterdir():
            name = f"{before}{one.name}"
            if one.is_dir():
                waiting.append((f"{name}/", one))
            elif name.rpartition(".")[2] in KINDS:
                found[name] = one.read_bytes()
    viewer = files("stepengine.debugging.viewer")
    # The studio shows a run with the renderer of `stepengine show --html`.
    found |= {"run.js": read_script().encode(), "run.css": (viewer / "page.css").read_bytes()}
    run = PLACE.sub("", (viewer / "run.html").read_text(encoding="utf-8"))
    found["index.html"] = found["index.html"].replace(b"{run}", run.encode())
    return {
        name: SharedResponse.create(data, f"{KINDS[name.rpartition('.')[2]]}; charset=utf-8")
        for name, data in found.items()
    }


def _make_file_response(request: Request, name: str) -> Response:
    """Return a file of the page as a response; raise ``Problem`` 404 if there is none."""
    if name not in _load_page_files():
        msg = f"the studio has no {name[:200]!r}"
        raise Problem(msg, status=404, kind="no_such_part")
    return _load_page_files()[name].response(request, {"content-security-policy": POLICY})


async def get_page(request: Request) -> Response:
    """Return the HTML of the page."""
    return _make_file_response(request, "index.html")


async def get_page_file(request: Request) -> Response:
    """Return a script, style sheet or other file of the page."""
    return _make_file_response(request, request.path_params["part"])


class RunPageData:
    """
    The page data of runs. Each journal is read once for all clients, and later only its new records.

    Args:
        runs: The runs of the server.
    """

    def __init__(self, runs: RunService) -> None:
        self._runs = runs
        self._followed: OrderedDict[str, tuple[FollowedJournal, asyncio.Lock]] = OrderedDict()
        self._asked: OrderedDict[tuple[str, str, float], tuple[Question, ...]] = OrderedDict()
        # One at a time: each replays a run from its start with the authors' code.
        self._walking = asyncio.Lock()

    # --- one run ------------------------------------------------------------------------------------------------------

    async def get_run_page_data(self, row: RunRow, after: int | None) -> bytes:
        """
        Return the page data of a run as JSON; with *after* only the changes since that offset.

        The result is ``null`` for a run without records.

        Raises:
            JournalError: If the journal cannot be read.
        """
        try:
            journal = await self._runs.reader.get_journal(row)
            if self._runs.reader.copies_journals:
                # Not followed in pieces: it does not grow.
                return await asyncio.to_thread(_make_page_data_once, journal, row.run, after)
            return await self.get_journal_page_data(row.run, journal, after)
        except JournalMissing:
            return NOTHING

    async def get_journal_page_data(self, name: str, journal: Journal, after: int | None, *, shown: str = "") -> bytes:
        """Return the page data of a journal as JSON, with *shown* as its name; errors are those of ``get_run_page_data``."""
        if name not in self._followed:
            made = await asyncio.to_thread(FollowedJournal, journal, shown or name)
            self._followed.setdefault(name, (made, asyncio.Lock()))
            remove_oldest_entries(self._followed, VIEWS_KEPT)
        self._followed.move_to_end(name)
        following, lock = self._followed[name]
        async with lock:
            try:
                return await asyncio.to_thread(_read_followed_page_data, following, after)
            except JournalError:
                self._followed.pop(name, None)
                raise

    async def replay_for_source_lines(self, row: RunRow, *, last: bool) -> bytes:
        """
        Replay a run, and return the source lines of its handlers at each step as JSON; with *last* only the current lines.

        The replay uses the agents of this server and performs nothing. After a divergence from the record, lines are missing.

        Raises:
            JournalError: If the journal cannot be read.
        """
        reader = self._runs.reader
        journal, engine = await reader.get_journal(row), reader.get_engine_for_run(row)
        work = _replay_for_current_lines if last else _replay_for_source_lines_and_variables
        try:
            async with self._walking:
                return await asyncio.to_thread(work, engine, journal, row.run)
        except JournalMissing:
            return NOTHING

    # --- lists --------------------------------------------------------------------------------------------------------

    async def load_question_details(self, row: RunRow) -> tuple[QuestionDetails, ...]:
        """Return the open questions of a run with the programs that ask them; nothing if its journal cannot be read."""
        key = (row.run, row.status, row.changed)
        found = self._asked.get(key)
        if found is None:
            try:
                found = (await self._runs.reader.load_details(row)).questions
            except JournalError:
                return ()
            # In a database the row of a waiting run stays the same when it asks something else.
            if row.status not in (OPEN if self._runs.reader.copies_journals else RUNNING):
                self._asked[key] = found
                remove_oldest_entries(self._asked, ASKED_KEPT)
        if self._runs.reader.copies_journals or not any(one.path for one in found):
            return tuple([QuestionDetails(one) for one in found])
        return await asyncio.to_thread(_make_details_with_programs, await self._runs.reader.get_journal(row), found)


def _read_followed_page_data(following: FollowedJournal, after: int | None) -> bytes:
    """Read the new records of a journal; return its page data as JSON, or with *after* only the changes since."""
    following.read_new_records()
    # Encoded under the lock of the caller, because the page data has lists that grow.
    return json.dumps(_make_full_page_data(following) if after is None else following.get_changes_after(after)).encode()


def _make_full_page_data(following: FollowedJournal) -> dict[str, Any]:
    """Return all page data of a journal, without the notes about lines of handlers, which are requested separately."""
    told = following.make_page_data()
    # The lines of handlers are requested separately.
    told["missing"] = [one for one in told["missing"] if not one.get("handler")]
    return told


def _make_page_data_once(journal: Journal, name: str, after: int | None) -> bytes:
    """Return the page data of a copied journal; with *after* no changes if its length is *after*, otherwise all of them."""
    following = FollowedJournal(journal, name)
    told: dict[str, Any] = {"after": after}
    if after is None:
        told = _make_full_page_data(following)
    elif after != following.offset:
        told = following.get_changes_after(0)
    return json.dumps(told).encode()


def _replay_for_source_lines_and_variables(engine: Engine, journal: Journal, name: str) -> bytes:
    """Replay a run, and return the source lines and variables of its handlers at each step as JSON, also if the replay fails."""
    view = RunPayload(PageTexts(), name)
    view.add_new_records(load_stored_history(journal))
    own = len(view.texts.all)
    try:
        walked = replay_and_collect_positions(engine.stepper(journal), view)
    except StepEngineError as error:
        walked = HandlerPositions(missing=f"No source lines and variables: {error.message}")
    clean = view.texts.clean
    told = {
        "texts": [None] * own + view.texts.all[own:],
        **walked.to_dict(),
        "sources": walked.sources,
        "missing": clean(walked.missing),
    }
    # A value of a variable may be a text of the run, which stands in what is left out.
    used = {n for one in walked.locals.values() for frame in one["frames"] for n in frame.get("set", {}).values()}
    used |= {n for one in walked.contexts.values() for n in one.values() if n is not None}
    used |= {each["change"] for one in walked.hooks.values() for each in one}
    for number in used:
        told["texts"][number] = view.texts.all[number]
    return json.dumps(told).encode()


def _replay_for_current_lines(engine: Engine, journal: Journal, name: str) -> bytes:
    """Replay a run to its last record, and return the current source lines of its handlers, as JSON."""
    clean = PageTexts().clean
    try:
        with engine.stepper(journal) as stepper:
            while stepper.advance():
                pass
            frames = [frame for frame in stepper.moment().frames if frame.kind in SHOWN and frame.file and frame.line]
    except StepEngineError as error:
        return json.dumps({"run": name, "frames": [], "missing": clean(error.message)}).encode()
    told = [
        {
            "function": clean(frame.function),
            "kind": frame.kind,
            "file": clean(PurePath(frame.file).name),
            "line": frame.line,
            "first": max(1, frame.line - NEAR),
            "lines": [clean(line.rstrip("\n")) for line in _read_nearby_lines(frame)],
        }
        for frame in frames
    ]
    return json.dumps({"run": name, "frames": told, "missing": ""}).encode()


def _read_nearby_lines(frame: Frame) -> list[str]:
    """Return the source lines around the current line of a frame."""
    return linecache.getlines(frame.file)[max(0, frame.line - NEAR - 1) : frame.line + NEAR]


# --- questions --------------------------------------------------------------------------------------------------------


@frozen
class QuestionDetails:
    """
    An open question, and the program and line that asks the question, if any.

    Attributes:
        question: The question.
        program: The text of the program that asks; ``""`` for none.
        line: The line of the program that waits, from 1; 0 if it is unknown.
    """

    question: Question
    program: str = ""
    line: int = 0


def _make_details_with_programs(journal: Journal, questions: Iterable[Question]) -> tuple[QuestionDetails, ...]:
    """Return questions with the programs that ask them; without programs if the journal cannot be read."""
    try:
        history = journal.history()
        asked = {question.id: address for question_id, (address, question) in find_open_questions(history).items()}
    except JournalError:
        return tuple([QuestionDetails(one) for one in questions])
    return tuple([_make_question_details(history, asked.get(one.id), one) for one in questions])


def _make_question_details(history: History, address: Address | None, question: Question) -> QuestionDetails:
    """Return a question with the program text and the line that ask it, if a program does."""
    if address is None or not address[0]:
        return QuestionDetails(question)
    above, _, seq = address[0].rpartition(".")
    call, asks = history.intents.get((above, int(seq))), history.intents.get(address)
    program = None if call is None else find_program_text(history.form(call))
    return QuestionDetails(question, program or "", (asks.program_line or 0) if asks is not None and program else 0)
