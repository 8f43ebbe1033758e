"""
The studio: the page where people see runs at work, and what it asks of the server beside what every client asks.

The page is package data beside this file. It is the same for everybody; what it shows is asked for with the session of whoever
opened it, so nothing here decides who sees what.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import linecache
from collections import OrderedDict
from collections.abc import Collection, Iterable
from datetime import datetime
from decimal import Decimal
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import frozen

from stepengine.data.codec import plain, restored
from stepengine.data.json import thaw
from stepengine.data.models import ModelReply
from stepengine.data.questions import Question
from stepengine.data.usage import add_cost
from stepengine.debugging.viewing.page import PLACE
from stepengine.debugging.viewing.payload import RunPayload, Texts
from stepengine.debugging.viewing.rendering import stored
from stepengine.debugging.viewing.serving import FollowedJournal
from stepengine.debugging.viewing.walking import SHOWN, Walked, walk
from stepengine.errors import JournalError, JournalMissing, StepEngineError
from stepengine.journal.following import Follower
from stepengine.journal.programs import program_of
from stepengine.journal.records import ROOT, Address, Intent, Result
from stepengine.journal.show import ended_of
from stepengine.journal.store import MemoryJournal
from stepengine.server.problems import Problem
from stepengine.server.runs import UNDER_WAY, Runs

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from stepengine.data.waiting import Waits
    from stepengine.engine import Engine
    from stepengine.engine.stepping import Frame
    from stepengine.journal.history import History
    from stepengine.journal.store import Journal
    from stepengine.server.durable_runs import AnyRuns
    from stepengine.server.ledger import RunRow

__all__ = ("Asking", "Brief", "Views", "get_page", "get_part")

_Key: TypeAlias = "tuple[str, str, float]"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Texts of models, tools and strangers are on this page: whatever one of them could smuggle in runs nothing and loads nothing."""
KINDS = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
SHARED = {"run.js": "page.js", "run.css": "page.css"}
"""What the page of one run has, too: there is one renderer of a run."""
NOTHING = b"null"
VIEWS_KEPT = 20
DIGESTS_KEPT = 200
BRIEFS_KEPT = 20_000
ASKED_KEPT = 20_000
MOST_WAITS = 5
NEAR = 4
"""Lines that are shown before and behind the one where a handler stands."""


@cache
def _parts() -> dict[str, tuple[bytes, str, str]]:
    """Return each file of the page by its name: its bytes, its type, and its mark for caches."""
    folder, found = files(__package__ or __name__) / "page", dict[str, bytes]()
    waiting = [("", folder)]
    for before, place in waiting:
        for one in place.iterdir():
            name = f"{before}{one.name}"
            if one.is_dir():
                waiting.append((f"{name}/", one))
            elif name.rpartition(".")[2] in KINDS:
                found[name] = one.read_bytes()
    viewing = files("stepengine.debugging.viewing")
    found |= {name: (viewing / own).read_bytes() for name, own in SHARED.items()}
    run = PLACE.sub("", (viewing / "run.html").read_text(encoding="utf-8"))
    found["index.html"] = found["index.html"].replace(b"{run}", run.encode())
    return {
        name: (data, KINDS[name.rpartition(".")[2]], f'"{hashlib.sha256(data).hexdigest()[:32]}"')
        for name, data in found.items()
    }


def _part(request: Request, name: str) -> Response:
    from starlette.responses import Response

    if name not in _parts():
        msg = f"the studio has no {name[:200]!r}"
        raise Problem(msg, status=404, kind="no_such_part")
    data, kind, mark = _parts()[name]
    # Asked for each time, so that a newer server is never shown by the page of an older one.
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache", "etag": mark}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(data, headers=headers, media_type=f"{kind}; charset=utf-8")


async def get_page(request: Request) -> Response:
    """Answer with the page."""
    return _part(request, "index.html")


async def get_part(request: Request) -> Response:
    """Answer with one of its files."""
    return _part(request, request.path_params["part"])


class Views:
    """
    What the page shows of runs, each journal read once for all who look at it, and only what is new of it.

    Args:
        runs: The runs of the server.
    """

    def __init__(self, runs: AnyRuns) -> None:
        self._runs = runs
        self._followed: OrderedDict[str, tuple[FollowedJournal, asyncio.Lock]] = OrderedDict()
        self._digests: OrderedDict[str, tuple[_Digest, asyncio.Lock]] = OrderedDict()
        self._rested: OrderedDict[_Key, Brief] = OrderedDict()
        self._asked: OrderedDict[_Key, tuple[Question, ...]] = OrderedDict()
        # One at a time: each runs code of authors from the start of a run, and takes as long as that is.
        self._walking = asyncio.Lock()

    # --- one run ------------------------------------------------------------------------------------------------------

    async def payload(self, row: RunRow, after: int | None) -> bytes:
        """
        Return what the renderer shows of a run, as JSON; with *after* what a page lacks that has it up to there.

        It is ``null`` for a run that has done nothing yet.

        Raises:
            JournalError: when the journal cannot be read.
        """
        try:
            if isinstance(self._runs, Runs):
                return await self.followed(row.run, self._runs.journal(row.run), after)
            # The rows of a database are not followed in pieces: a journal is made of them.
            content = await self._runs.content(row)
            return await asyncio.to_thread(_whole, MemoryJournal(content), row.run, after)
        except JournalMissing:
            return NOTHING

    async def followed(self, name: str, journal: Journal, after: int | None, *, shown: str = "") -> bytes:
        """Return the payload of a journal, which is called *shown* in it; errors are those of ``payload``."""
        if name not in self._followed:
            made = await asyncio.to_thread(FollowedJournal, journal, shown or name)
            self._followed.setdefault(name, (made, asyncio.Lock()))
            _trim(self._followed, VIEWS_KEPT)
        self._followed.move_to_end(name)
        following, lock = self._followed[name]
        async with lock:
            try:
                return await asyncio.to_thread(_read, following, after)
            except JournalError:
                self._followed.pop(name, None)
                raise

    async def lines(self, row: RunRow, *, last: bool) -> bytes:
        """
        Return where the handlers of a run stood at each of its steps, as JSON; with *last* only where they stand now.

        The run is walked with the agents of this server: nothing is performed, and where their code does something else than is
        recorded it says from where on nothing is known.

        Raises:
            JournalError: when the journal cannot be read.
        """
        if isinstance(self._runs, Runs):
            journal: Journal = self._runs.journal(row.run)
            engine = self._runs.engine_of(row.run)
        else:
            engine = self._runs.engine
            journal = MemoryJournal(await self._runs.content(row))
        work = _standing if last else _walked
        try:
            async with self._walking:
                return await asyncio.to_thread(work, engine, journal, row.run)
        except JournalMissing:
            return NOTHING

    # --- lists --------------------------------------------------------------------------------------------------------

    async def brief(self, row: RunRow) -> Brief:
        """Return what a list says of a run beside what the server knows of it; nothing where its journal cannot be read."""
        if not isinstance(self._runs, Runs):
            look = await self._runs.look(row)
            waits = [_waits_for(one) for one in look.waits_for] or [one.text for one in look.questions]
            times = [one.wakes_at for one in look.waits_for if one.wakes_at is not None]
            parent = None if look.parent is None else look.parent["run"]
            return Brief(
                cost=look.cost, waits=tuple(waits[:MOST_WAITS]), wakes=min(times, default=None), asks=bool(look.questions),
                output=look.output, parent=parent,
            )  # fmt: skip
        key = (row.run, row.status, row.changed)
        if key in self._rested:
            self._rested.move_to_end(key)
            return self._rested[key]
        try:
            found = await self._digested(row.run, self._runs.journal(row.run))
        except JournalError:
            self._digests.pop(row.run, None)
            return Brief()
        if row.status not in UNDER_WAY:
            self._rested[key] = found
            self._digests.pop(row.run, None)
            _trim(self._rested, BRIEFS_KEPT)
        return found

    async def _digested(self, run: str, journal: Journal) -> Brief:
        digest, lock = self._digests.setdefault(run, (_Digest(journal), asyncio.Lock()))
        _trim(self._digests, DIGESTS_KEPT)
        async with lock:
            return await asyncio.to_thread(digest.look)

    async def questions(self, row: RunRow) -> tuple[Asking, ...]:
        """Return what a run asks, with the programs that ask."""
        key = (row.run, row.status, row.changed)
        found = self._asked.get(key)
        if found is None:
            try:
                found = (await self._runs.look(row)).questions
            except JournalError:
                found = ()
            if row.status not in UNDER_WAY:
                self._asked[key] = found
                _trim(self._asked, ASKED_KEPT)
        if not found or not isinstance(self._runs, Runs):
            return tuple([Asking(one) for one in found])
        if not any(one.path for one in found):
            return tuple([Asking(one) for one in found])
        return await asyncio.to_thread(_with_programs, self._runs.journal(row.run), found)

    async def answered(self, row: RunRow, questions: Iterable[str]) -> list[tuple[str, str, str]]:
        """Return who answered which of some questions, and what, as far as that is known: id, name, answer."""
        if not isinstance(self._runs, Runs):
            return []
        return await asyncio.to_thread(_answers, self._runs.journal(row.run), set(questions))


def _trim(known: OrderedDict[Any, Any], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)


def _read(following: FollowedJournal, after: int | None) -> bytes:
    following.read()
    # In here, where nobody else reads: what is told are the lists themselves, which grow.
    return json.dumps(_payload(following) if after is None else following.after(after)).encode()


def _payload(following: FollowedJournal) -> dict[str, Any]:
    told = following.payload()
    # Where handlers stood is asked for by itself.
    told["missing"] = [one for one in told["missing"] if not one.get("handler")]
    return told


def _whole(journal: Journal, name: str, after: int | None) -> bytes:
    following = FollowedJournal(journal, name)
    told: dict[str, Any] = {"after": after}
    if after is None:
        told = _payload(following)
    elif after != following.offset:
        told = following.after(0)
    return json.dumps(told).encode()


def _walked(engine: Engine, journal: Journal, name: str) -> bytes:
    view = RunPayload(Texts(), name)
    view.take(stored(journal))
    own = len(view.texts.all)
    try:
        walked = walk(engine.stepper(journal), view)
    except StepEngineError as error:
        walked = Walked(missing=f"No source lines and variables: {error.message}")
    clean = view.texts.clean
    told = {
        "texts": [None] * own + view.texts.all[own:],
        **walked.told(),
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


def _standing(engine: Engine, journal: Journal, name: str) -> bytes:
    clean = Texts().clean
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
            "lines": [clean(line.rstrip("\n")) for line in _around(frame)],
        }
        for frame in frames
    ]
    return json.dumps({"run": name, "frames": told, "missing": ""}).encode()


def _around(frame: Frame) -> list[str]:
    return linecache.getlines(frame.file)[max(0, frame.line - NEAR - 1) : frame.line + NEAR]


# --- what lists say ---------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Brief:
    """
    What a list says of a run.

    Attributes:
        steps: How many times a model was asked, in its children, too; ``None`` where that is not known.
        cost: US dollars as text; ``None`` where a price is not known.
        tokens: What was sent and what came.
        seconds: From its start to its last record.
        waits: What it waits for, in words.
        wakes: When it goes on by itself, in UTC.
        doing: The newest of what it does now.
        agents: How many agents ran in it.
        asks: Whether it waits for a person.
        output: Its output, JSON; ``None`` before its end.
        parent: Of a fork the id of its parent.
    """

    steps: int | None = None
    cost: str | None = None
    tokens: int | None = None
    seconds: float | None = None
    waits: tuple[str, ...] = ()
    wakes: datetime | None = None
    doing: str = ""
    agents: int = 1
    asks: bool = False
    output: Any = None
    parent: str | None = None


@frozen
class Asking:
    """
    An open question, and of one that a program asks the program and the line that waits.

    Attributes:
        question: The question.
        program: The text of the program; ``""`` where none asks.
        line: The line, from 1; 0 where none is known.
    """

    question: Question
    program: str = ""
    line: int = 0


class _Digest:
    """A journal that is read on from where it was, for what a list says of it."""

    def __init__(self, journal: Journal) -> None:
        self._follower = Follower(journal)
        self._begin()

    def _begin(self) -> None:
        self._steps = self._tokens = 0
        self._agents = 1
        self._cost: Decimal | None = Decimal(0)

    def look(self) -> Brief:
        is_behind = True
        while is_behind:
            news = self._follower.news()
            is_behind = news.is_behind
            if news.again:
                self._begin()
            for record in news.records:
                self._take(record)
        history = self._follower.history
        ended = ended_of(history)
        waits = [] if history.is_complete else history.waits()
        times = [one.wakes_at for one in waits if one.wakes_at is not None]
        doing = [] if history.is_complete else list(history.open.values())[-1:]
        return Brief(
            steps=self._steps,
            cost=None if self._cost is None else str(self._cost),
            tokens=self._tokens,
            seconds=history.last_at / 1000,
            waits=tuple([_waits_for(one) for one in waits][:MOST_WAITS]),
            wakes=min(times, default=None),
            doing="".join([f"{one.type}" for one in doing]),
            agents=self._agents,
            asks=any(one.question is not None for one in waits),
            output=None if ended is None else plain(ended.output),
            parent=None if history.head is None or history.head.parent is None else history.head.parent["run"],
        )

    def _take(self, record: object) -> None:
        history = self._follower.history
        if isinstance(record, Intent):
            self._steps += record.type == "model_call"
            self._agents += record.type == "agent_call" and (record.path, record.seq) != ROOT
        elif isinstance(record, Result):
            intent = history.intents.get((record.path, record.seq))
            value = None
            if intent is not None and intent.type == "model_call":
                value = getattr(history.outcome(record), "value", None)
            if isinstance(value, ModelReply):
                self._tokens += 0 if value.usage is None else value.usage.total_tokens
                self._cost = add_cost(self._cost, value.cost)


def _waits_for(wait: Waits) -> str:
    if wait.question is not None:
        return wait.question.text
    if wait.kind == "message":
        return f"a message on {wait.topic}"
    return "a child" if wait.kind == "child" else "its time"


def _with_programs(journal: Journal, questions: Iterable[Question]) -> tuple[Asking, ...]:
    try:
        history = journal.history()
        asked = {question.id: address for question_id, (address, question) in history.open_questions().items()}
    except JournalError:
        return tuple([Asking(one) for one in questions])
    return tuple([_in_program(history, asked.get(one.id), one) for one in questions])


def _in_program(history: History, address: Address | None, question: Question) -> Asking:
    if address is None or not address[0]:
        return Asking(question)
    above, _, seq = address[0].rpartition(".")
    call, asks = history.intents.get((above, int(seq))), history.intents.get(address)
    program = None if call is None else program_of(history.form(call))
    return Asking(question, program or "", (asks.program_line or 0) if asks is not None and program else 0)


def _answers(journal: Journal, wanted: Collection[str]) -> list[tuple[str, str, str]]:
    found: dict[str, tuple[str, str, str]] = {}
    try:
        letters, _ = journal.mailbox().read()
        for letter in letters:
            if letter.kind == "answer" and letter.topic in wanted:
                answer = restored(thaw(letter.value))
                found.setdefault(letter.topic, (letter.topic, answer.by, answer.value or "(declined)"))
    except (StepEngineError, OSError):
        return []
    return list(found.values())
