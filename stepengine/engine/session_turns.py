"""
Runs in sessions: what a root run goes on from, and what it leaves for the next one.

A store is whatever has the two methods of ``SessionStore``; what it can do beside that is used where it is there. Each run in
a session is recorded in a journal of its own, where the store has a place for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Outcome
from stepengine.data.questions import AnswerLike, Question
from stepengine.data.state import AgentState, RunResult, RunStatus, find_suspended_reply
from stepengine.data.usage import Usage
from stepengine.data.waits import Waits, describe_waits
from stepengine.engine.run import EngineRun
from stepengine.engine.run_plans import RunRequest, explain_unresumable_state
from stepengine.errors import (
    AgentError,
    DefinitionError,
    JournalError,
    ReplayDivergence,
    SessionConflict,
    SessionError,
    StepEngineError,
)
from stepengine.journal.pending_items import find_waits, open_questions
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.services import MachineMaker, Services
from stepengine.sessions import Session, SessionInfo, TurnStore
from stepengine.sessions.around import SessionStoreAdapter, session_after_run
from stepengine.workspace.after_fork import Lock, call_after_fork, register_renewable

if TYPE_CHECKING:
    from stepengine.journal import Journal, JournalLike
    from stepengine.journal.history import History
    from stepengine.journal.journaled_run import JournaledRun

NUMBERS = [field.name for field in attrs.fields(Usage) if field.type in (int, "int")]
OPEN = Question("", "")
"""A question of which nothing is known except that a call waits for its answer."""


@frozen(eq=False)
class QueueEntry:
    """A place in the line of a session; whoever has the first one is in."""

    loop: asyncio.AbstractEventLoop
    let_in: Future[None] = attrs.field(factory=Future)


class SessionQueue:
    """
    Lets one run at a time into each session of a store, in the order in which they came, in whatever event loops.

    A place is lost when the event loop of whoever has it is closed: nobody would ever give it back.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._lines: dict[str, deque[QueueEntry]] = {}
        register_renewable(self)

    def renew(self) -> None:
        """Empty the lines: whoever stands in them is in the parent of this forked child."""
        self._lines.clear()

    async def enter(self, session_id: str) -> QueueEntry:
        """Wait until it is this one's turn; return its place, to be given back by ``leave``."""
        # A line for each session, over all event loops of the process: two messages of one person must not start from
        # the same state, or the second save would overwrite the first answer (reliability:SS01). Futures of threads, as
        # those who wait may be in different loops.
        mine = QueueEntry(asyncio.get_running_loop())
        with self._lock:
            line = self._lines.setdefault(session_id, deque())
            line.append(mine)
            _admit_first(line)
        if mine.let_in.done():
            return mine
        try:
            await asyncio.wrap_future(mine.let_in)
        # Whoever gives up while waiting may have been let in at that very moment; then the place has to be given back.
        except BaseException:
            if not mine.let_in.cancel():
                self.leave(session_id, mine)
            raise
        return mine

    def leave(self, session_id: str, mine: QueueEntry) -> None:
        """Let the next one in that still waits; does nothing when the place was lost."""
        with self._lock:
            line = self._lines.get(session_id)
            if not line or line[0] is not mine:
                return
            line.popleft()
            _admit_first(line)
            if not line:
                del self._lines[session_id]


def _admit_first(line: deque[QueueEntry]) -> None:
    """Drop ended waiters from the head of a queue, and let in the first one that is left."""
    while line and (line[0].loop.is_closed() or line[0].let_in.cancelled()):
        line.popleft()
    if line and not line[0].let_in.done() and line[0].let_in.set_running_or_notify_cancel():
        line[0].let_in.set_result(None)


_queues: weakref.WeakKeyDictionary[Any, SessionQueue] = weakref.WeakKeyDictionary()
"""By store: engines that share a store share its queue."""
_queues_lock = Lock()
_inside: contextvars.ContextVar[tuple[Turn, ...]] = contextvars.ContextVar("stepengine_turns", default=())
"""The turns that the code of this context is a part of."""
_owners: dict[tuple[int, str], Turn] = {}
_waiting: set[Turn] = set()
"""Who is in which session, and who waits for one: so that no run waits for one that waits for it."""


@call_after_fork
def _reset_after_fork() -> None:
    _owners.clear()
    _waiting.clear()


class EngineSessions(SessionStoreAdapter):
    """
    The sessions of an engine.

    Args:
        store: What ``Engine(sessions=...)`` was given.
        children: Whether conversations of children are to be kept, too.

    Raises:
        DefinitionError: when the store cannot do that.
    """

    def __init__(self, store: object, *, children: bool = False) -> None:
        super().__init__(store)
        self.children = children
        if children and not self.is_whole:
            msg = (
                f"Engine(child_sessions=True) needs a store with load and save, such as FileSessions; {store!r} has only "
                "histories"
            )
            raise DefinitionError(msg)
        with _queues_lock:
            try:
                # By store and not by engine: what must not be overwritten is the store's.
                self.queue = _queues.setdefault(store, SessionQueue())
            except TypeError:  # it cannot be referred to weakly
                self.queue = SessionQueue()

    async def journals(self, session: Session) -> SessionJournals | None:
        """Return the journals of a session's runs; ``None`` where the store has no place for them."""
        if isinstance(self.store, TurnStore):
            return SessionJournals(self.store.turn_place(session.session_id))
        return EmbeddedJournals(session) if self.has_state else None


class SessionJournals:
    """
    The journals of the runs in one session, by name; newer ones have greater names.

    Args:
        place: Where the store has them.
    """

    def __init__(self, place: Any) -> None:
        self.place = place

    def journal(self, name: str) -> Journal:
        """Return a journal, new or not."""
        from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal

        place = self.place
        if place.memory is not None:
            kept: Journal = place.memory.setdefault(name, MemoryJournal())
            return kept
        if place.database is not None:
            return SqliteJournal(place.database, f"{place.prefix}{name}")
        return FileJournal(place.folder / f"{name}.jsonl")

    def names(self) -> list[str]:
        """Return the names of the existing ones, sorted."""
        from stepengine.journal import SqliteJournal

        place = self.place
        if place.memory is not None:
            return sorted(place.memory)
        if place.database is not None:
            return [run.removeprefix(place.prefix) for run in SqliteJournal(place.database).runs(place.prefix)]
        return sorted(path.stem for path in place.folder.glob("*.jsonl"))

    def stored(self, name: str) -> str:
        """Return what the session keeps to find a journal again."""
        return name

    def tidy(self) -> None:
        """Remove all but the newest ones."""
        for name in self.names()[: -self.place.keep]:
            if self.place.memory is not None:
                del self.place.memory[name]
            else:
                self.journal(name).discard()


class EmbeddedJournals(SessionJournals):
    """The one journal that a store of states keeps within the state, while the run waits for an answer."""

    def __init__(self, session: Session) -> None:
        super().__init__(None)
        self._kept = session.journal
        self._made: dict[str, Journal] = {}

    def journal(self, name: str) -> Journal:
        """Return a journal, new or not."""
        from stepengine.journal import MemoryJournal

        known = name if name == self._kept else ""
        return self._made.setdefault(name, MemoryJournal(known))

    def names(self) -> list[str]:
        """Return none: what is not saved is not known."""
        return []

    def stored(self, name: str) -> str:
        """Return the whole journal."""
        return self._made[name].content().decode()

    def tidy(self) -> None:
        """Do nothing: each save replaces the journal before."""


@frozen
class EndedChild:
    """How a child of a run in a session ended: its place in the tree, the call that spawned it, and the rest."""

    place: tuple[int, ...]
    tool_call_id: str
    model: str | None
    status: RunStatus
    state: AgentState


LetIn: TypeAlias = "Callable[[RunRequest, JournalLike | None, EngineRun], object]"
Again: TypeAlias = "Callable[..., EngineRun]"


class Turn:
    """
    One root run in a session.

    Args:
        sessions: The store.
        request: What the caller asks for; it names the session.
        journal: Where the caller wants it recorded; ``None`` for the store's own place.
        let_in: Lets the run start from a request, recorded in a journal or not.
        again: Lets a run start from what was recorded: a given one, or without one a new one.
        route: Gives the request to the agent that has the conversation of a state.
        now: Gives the time by the engine's clock.

    Attributes:
        sessions: As given.
        session_id: The session.
        is_in: Whether it is its turn.
    """

    def __init__(
        self,
        sessions: EngineSessions,
        request: RunRequest,
        journal: JournalLike | None,
        *,
        let_in: LetIn,
        again: Again,
        route: Callable[[RunRequest, object], RunRequest],
        now: Callable[[], datetime],
    ) -> None:
        assert request.info.session_id is not None  # noqa: S101 - one was made where none was given
        self.session_id = request.info.session_id
        self.sessions = sessions
        self._request = request
        self._journal = journal
        self._let_in = let_in
        self._again = again
        self._route = route
        self._now = now
        self._conversations: list[EndedChild] = []
        self._context = contextvars.copy_context()
        self._before = Session(info=SessionInfo(session_id=self.session_id))
        self._journals: SessionJournals | None = None
        self._name: str | None = None
        self._continues = False
        self.around: tuple[Turn, ...] = ()
        self.is_in = False
        self._in_line: QueueEntry
        self._token: contextvars.Token[tuple[Turn, ...]] | None = None
        self._warnings: list[str] = []

    # --- the beginning ------------------------------------------------------------------------------------------------

    async def open(self, live: EngineRun) -> None:
        """
        Let *live* start from what the session holds; it is its turn.

        Raises:
            AnswerRejected: when the answer does not fit the question that waits, or cannot be given.
            SessionError: when the session cannot be loaded, or the answer goes into another journal than the caller's.
        """
        # What the run starts in turn (a tool that runs an agent) sees that it is inside this session, and so cannot
        # wait for itself.
        self._token = _inside.set((*_inside.get(), self))
        self._take(await self.sessions.load(self.session_id))
        if self._request.previous is None:
            self._request = self._route(self._request, self._before.state)
        self._journals = await self.sessions.journals(self._before)
        # A run may have ended in a process that was killed before its session was saved. Its journal knows; the next
        # message finds it there, so that no answer is lost (reliability:SS02).
        await self._save_unsaved_runs()
        recording = self._open_record_to_resume()
        if recording is not None:
            self._continues = True
            if self._request.prompt and (self._request.answers or not self._waiting):
                live.tree.inboxes.root.append(UserMessage(self._request.prompt))
            self._context.run(self._again, recording, live, agent=self._agent(recording), limits=self._request.limits)
        else:
            self._context.run(self._let_in, *self._make_new_request(), live)

    def leave(self) -> None:
        """Let the next run into the session; may be called twice."""
        if self.is_in:
            self.is_in = False
            if _owners.get(self.place) is self:
                del _owners[self.place]
            self.sessions.queue.leave(self.session_id, self._in_line)
            if self._token is not None:
                with contextlib.suppress(ValueError):  # in another context than the one that is left
                    _inside.reset(self._token)

    async def enter(self) -> None:
        """
        Wait until it is its turn in the session.

        Raises:
            SessionError: when it would wait for a run that waits, itself or through others, for this one.
        """
        self.around = _inside.get()
        with _queues_lock:
            self._refuse_deadlock()
            _waiting.add(self)
        try:
            self._in_line = await self.sessions.queue.enter(self.session_id)
        finally:
            _waiting.discard(self)
        self.is_in = True
        _owners[self.place] = self

    @property
    def place(self) -> tuple[int, str]:
        """The session that it is in or waits for."""
        return id(self.sessions.queue), self.session_id

    def _refuse_deadlock(self) -> None:
        # Found before it happens: two runs that wait for each other's session wait without a word, and for ever.
        places, seen = [self.place], set[Turn]()
        while places:
            owner = _owners.get(places.pop())
            if owner is None or owner in seen:
                continue
            if owner in self.around:
                msg = (
                    f"a run in the session {self.session_id!r} was started inside a run that it would wait for, so neither "
                    "would ever end; start it after that one has ended, or in another session"
                )
                raise SessionError(msg)
            seen.add(owner)
            places += [turn.place for turn in _waiting if owner in turn.around]

    def _take(self, session: Session) -> None:
        self._before = session
        self._warnings += [f"the session {self.session_id!r} was mended: {repair}" for repair in session.repairs]

    @property
    def _waiting(self) -> tuple[Question, ...]:
        """The questions that this run is the answer to, or may be: those that the same agent asked last."""
        before, request = self._before, self._request
        if request.previous is not None:
            return ()
        if before.state is None:
            return (OPEN,) if find_suspended_reply(before.messages) is not None else ()
        return before.state.pending if before.info.agent_id == request.agent.definition.id else ()

    def _answers_by_question(self) -> Mapping[str, AnswerLike]:
        """Return the answers by question; a message to a run that has asked something answers its first question."""
        given, said = self._request.answers, self._request.prompt
        if given or not said or not self._waiting:
            return given or {}
        # Where a question is open the next thing that somebody writes is its answer, as in any conversation.
        return {self._waiting[0].id: said}

    def _open_record_to_resume(self) -> JournaledRun | None:
        """Return the record of the run that waits, to go on from there with the answer; ``None`` where there is none."""
        from stepengine.journal.journaled_run import JournaledRun
        from stepengine.journal.permission_reset import remove_approvals
        from stepengine.journal.provenance import has_trusted_permissions

        name, state = self._before.journal, self._before.state
        if name is None or state is None or self._journals is None or self._request.previous is not None:
            return None
        journal = self._journals.journal(name)
        waits = _waits_without_people(journal)
        # A state alone is enough where the agent has no handler: the open step stands in it. Going on so survives a
        # change of prompts and tools, which a journal would call a divergence.
        if not waits and (
            not self._waiting or explain_unresumable_state(self._request.agent.definition, state) is None
        ):
            return None  # its state is enough, and goes on also where prompts and tools have changed since
        if not journal.records():
            return None
        if waits and not self._waiting:
            self._refuse_while_asleep(journal, waits)
        if self._journal is not None:
            msg = (
                f"the session {self.session_id!r} waits for an answer, and the run that asked goes on in the journal that the "
                "store keeps of it, so nothing would be recorded in the one that journal= names; leave it out"
            )
            raise SessionError(msg)
        if not has_trusted_permissions(journal):
            remove_approvals(journal)
        asked = self._request.on_divergence
        recording = JournaledRun.resume(journal, self._answers_by_question(), keep=asked == "keep")
        recording.raises = asked != "stop"
        self._name = name
        return recording

    def _refuse_while_asleep(self, journal: Journal, waits: Sequence[Waits]) -> None:
        """Refuse a message to a run that waits for something other than a person, as long as that has not come."""
        from stepengine.journal.sleepers import is_due

        before, request = self._before, self._request
        is_other = before.info.agent_id != request.agent.definition.id
        if not is_other and (not (request.prompt or request.answers) or is_due(journal, waits, self._now())):
            return
        whose = f" It is one of {before.info.agent_id!r}." if is_other else ""
        msg = (
            f"the last run in the session {self.session_id!r} has not ended, so nothing can be said to it yet. "
            f"{describe_waits(waits)}{whose} It goes on with the first run of its agent in this session after that, or at once "
            f"with engine.resume(JOURNAL, now=True) or `stepengine resume JOURNAL --now`, of its journal {journal.name}"
        )
        raise SessionError(msg)

    def _agent(self, recording: JournaledRun) -> AgentDefinition | None:
        """Return the caller's definition if it is the recorded agent's; else ``None``: the engine finds it by id."""
        own, opening = self._request.agent.definition, recording.opening
        return own if opening is not None and opening.agent_id == own.id else None

    def _make_new_request(self) -> tuple[RunRequest, JournalLike | None]:
        """Return the request of a new run, and the journal that it is recorded in."""
        request, waiting = self._request, self._waiting
        answers = self._answers_by_question()
        if answers and not request.answers:
            request = attrs.evolve(request, answers=answers, prompt="")
        if request.previous is None:
            request = attrs.evolve(request, previous=self._previous_state(waiting))
        if self._journal is not None or self._journals is None:
            return request, self._journal
        self._name = f"{self._before.turns + 1:06d}-{secrets.token_hex(4)}"
        return request, self._journals.journal(self._name)

    def _previous_state(self, waiting: tuple[Question, ...]) -> AgentState | None:
        before = self._before
        if before.state is not None:
            return before.state
        if not before.messages:
            return None
        return AgentState.from_messages(before.messages, pending=waiting)

    def watched(self, services: Services, live: EngineRun) -> Services:
        """Return *services* that store the ends of children for their sessions, if the engine keeps those."""
        if not self.sessions.children:
            return services
        return attrs.evolve(services, machine=self._make_collecting_machine(services.machine, live))

    def _make_collecting_machine(self, inner: MachineMaker, live: EngineRun) -> MachineMaker:
        """Return a machine that behaves like *inner* and stores how each child run ended."""

        def machine(plan: RunPlan, state: AgentState) -> Generator[Any, Outcome | None, Finished]:
            finished = yield from inner(plan, state)
            if plan.path:
                place = tuple([int(number) for number in plan.path.split(".")])
                call = live.tree.runs.spawned_by.get(plan.path, "")
                self._conversations.append(EndedChild(place, call, plan.model, finished.status, finished.state))
            return finished

        return machine

    # --- what was not saved -------------------------------------------------------------------------------------------

    async def _save_unsaved_runs(self) -> None:
        """Save what a run left that ended in a process which was killed before the session was saved."""
        for name in await asyncio.to_thread(self._find_unsaved_journals):
            try:
                await self._save_unsaved_run(name)
            except (AgentError, JournalError, SessionConflict, ReplayDivergence) as error:
                self._add_warning(
                    f"the run {name!r} of the session {self.session_id!r} was not saved, and cannot be: {error.message}"
                )

    def _find_unsaved_journals(self) -> list[str]:
        """Return the names of the journals that know more than the session does."""
        before, journals = self._before, self._journals
        if journals is None or isinstance(journals, EmbeddedJournals):
            return []
        if before.journal is not None and before.state is not None:
            waiting = {question.id for question in before.state.pending}
            history = _load_history(journals.journal(before.journal))
            if history is not None and (history.is_complete or set(open_questions(history)) != waiting):
                return [before.journal]
        news = [name for name in journals.names() if name.startswith(f"{before.turns + 1:06d}-")]
        known = {name: _load_history(journals.journal(name)) for name in news}
        return [name for name, history in known.items() if history and (history.is_complete or _is_suspended(history))]

    async def _save_unsaved_run(self, name: str) -> None:
        from stepengine.journal.journaled_run import JournaledRun

        assert self._journals is not None  # noqa: S101
        recording = JournaledRun.resume(self._journals.journal(name))
        opening = recording.opening
        if opening is None or (name != self._before.journal and not self._starts_from_session(opening.previous)):
            recording.writer.close()
            return
        live = self._context.run(self._again, recording, agent=self._agent(recording))
        recording.raises = True
        result = await live.run()
        if not live.began:
            return
        turns = self._before.turns + (name != self._before.journal)
        self._take(await self.sessions.save(self._session_after(result, live.tree.root.plan, name, turns)))

    def _starts_from_session(self, previous: AgentState | None) -> bool:
        """Return whether a run that started from *previous* started from what the session holds."""
        return list(previous.message_history if previous is not None else ()) == list(self._before.messages)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def close(self, result: RunResult, plan: RunPlan, *, began: bool) -> RunResult:
        """Save the session as *result* leaves it; return the result, which says whether it was saved."""
        if isinstance(result.error, ReplayDivergence) or not (began or self._continues):
            return attrs.evolve(result, session_saved=False, warnings=(*result.warnings, *self._warnings))
        turns = self._before.turns + (not self._continues)
        try:
            await self.sessions.save(self._session_after(result, plan, self._name, turns))
            is_saved = True
        # A store that fails must not take away a result that was paid for: the result says that it was not saved
        # (reliability:SS03).
        except Exception as error:  # noqa: BLE001  (whatever the store does, the result is not lost)
            is_saved = await self._was_saved_elsewhere(error, result.state, turns)
        if is_saved:
            await self._finish_saving()
        return attrs.evolve(result, session_saved=is_saved, warnings=(*result.warnings, *self._warnings))

    def _session_after(self, result: RunResult, plan: RunPlan, name: str | None, turns: int) -> Session:
        before = self._before
        waits = result.status is RunStatus.SUSPENDED and name is not None and self._journals is not None
        journal = self._journals.stored(name) if waits and name and self._journals else None
        return session_after_run(
            before,
            result.state,
            status=result.status,
            usage=_subtract_usage(before.usage, self._usage_already_counted(turns)) + result.usage,
            model=plan.model,
            user_id=plan.info.user_id,
            metadata={**plan.info.metadata, **self._request.info.metadata},
            children=self._child_session_ids(result.state.run_id),
            turns=turns,
            journal=journal,
        )

    def _usage_already_counted(self, turns: int) -> Usage:
        """Return what the session counts already of a run that goes on."""
        before = self._before
        return before.state.usage if turns == before.turns and before.state is not None else Usage()

    async def _was_saved_elsewhere(self, error: Exception, state: AgentState, turns: int) -> bool:
        """Return whether another process saved the session in spite of *error*; if not, add a warning."""
        # Another process may have found this run's journal and saved what it left, before this one came to it: then
        # nothing is lost, and the conflict is none.
        if isinstance(error, SessionConflict):
            with contextlib.suppress(StepEngineError):
                stored = await self.sessions.load(self.session_id)
                if stored.turns == turns and stored.state is not None and stored.state.run_id == state.run_id:
                    return True
                own = list(state.message_history)
                if stored.turns > turns and list(stored.messages[: len(own)]) == own:
                    return True
        self._add_warning(f"the session {self.session_id!r} was not saved: {type(error).__name__}: {error}", error)
        return False

    async def _finish_saving(self) -> None:
        """Remove old journals and save the sessions of children; the session itself is saved by now."""
        try:
            if self._journals is not None:
                await asyncio.to_thread(self._journals.tidy)
            for child in self._conversations:
                await self._save_child(child)
        except Exception as error:  # noqa: BLE001  (whatever the store does, the result is not lost)
            self._add_warning(
                f"not all of the session {self.session_id!r} was saved: {type(error).__name__}: {error}", error
            )

    async def _save_child(self, child: EndedChild) -> None:
        """Save the conversation of a child as a session that names the session and the call which it began in."""
        state, parent = child.state, child.state.parent_id
        session = await self.sessions.load(self._session_of(state.run_id))
        above = {known.state.run_id for known in self._conversations}
        info = attrs.evolve(
            session.info,
            agent_id=state.agent_id,
            parent_session_id=self._session_of(parent) if parent in above else self.session_id,
            parent_tool_call_id=child.tool_call_id or None,
            child_session_ids=self._child_session_ids(state.run_id),
            model=child.model,
            status=child.status.value,
        )
        await self.sessions.save(attrs.evolve(session, info=info, messages=state.message_history, state=state))

    def _session_of(self, run_id: str | None) -> str:
        return f"{self.session_id}/{run_id}"

    def _child_session_ids(self, run_id: str) -> tuple[str, ...]:
        """Return the sessions of the children of a run, in the order in which they were spawned."""
        own = sorted([(c.place, c.state.run_id) for c in self._conversations if c.state.parent_id == run_id])
        return tuple([self._session_of(child) for _, child in own])

    def _add_warning(self, text: str, error: Exception | None = None) -> None:
        LOGGER.warning(text, exc_info=error)
        self._warnings.append(text)


def _subtract_usage(usage: Usage, other: Usage) -> Usage:
    numbers = {name: getattr(usage, name) - getattr(other, name) for name in NUMBERS}
    return attrs.evolve(usage, **numbers)


def _waits_without_people(journal: Journal) -> list[Waits]:
    """Return what the run of a journal waits for beside people."""
    history = _load_history(journal)
    return [] if history is None else [one for one in find_waits(history) if one.kind != "question"]


def _is_suspended(history: History) -> bool:
    """Return whether a run ended waiting, with nothing under way: one that a crash cut off is not resumed here."""
    is_stopped = history.stop is not None and history.stop.input["kind"] == "suspended"
    return bool(open_questions(history)) or (is_stopped and bool(find_waits(history)))


def _load_history(journal: Journal) -> History | None:
    """Return the history of a journal; ``None`` if it is empty or cannot be read."""
    try:
        history = journal.history()
    except JournalError:
        return None
    return None if history.head is None else history
