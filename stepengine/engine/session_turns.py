"""
Runs in sessions: a run loads the state that it continues from, and saves its end for the next run.

A store needs the two methods of ``SessionStore``; others are used if it has them. Each run in a session is recorded in a journal of its
own, if the store has a place for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Outcome
from stepengine.data.questions import AnswerLike, Question
from stepengine.data.state import AgentState, RunResult, RunStatus, find_suspended_reply_index
from stepengine.data.usage import Usage
from stepengine.data.waits import Waits, describe_waits
from stepengine.engine.run_plans import RunRequest, explain_unresumable_state
from stepengine.engine.session_journals import EmbeddedJournals, SessionJournals, find_non_question_waits
from stepengine.engine.session_queue import SessionAccess, get_session_queue
from stepengine.errors import (
    AgentError,
    DefinitionError,
    JournalError,
    ReplayDivergence,
    SessionConflict,
    SessionError,
    StepEngineError,
)
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.services import Services
from stepengine.runtime.tree import RunTree
from stepengine.sessions import Session, SessionInfo, TurnStore
from stepengine.sessions.run_hooks import SessionStoreAdapter, make_next_session

if TYPE_CHECKING:
    from stepengine.journal import Journal, JournalLike
    from stepengine.journal.journaled_run import JournaledRun

NUMBERS = [field.name for field in attrs.fields(Usage) if field.type in (int, "int")]
OPEN = Question("", "")
"""A question of which only the existence is known: a call waits for its answer."""


class EngineSessions(SessionStoreAdapter):
    """
    The sessions of an engine.

    Args:
        store: The value of ``Engine(sessions=...)``.
        children: Whether conversations of children are stored, too.

    Raises:
        DefinitionError: when the store cannot do that.
    """

    def __init__(self, store: object, *, children: bool) -> None:
        super().__init__(store)
        self.children = children
        if children and not self.is_whole:
            msg = (
                f"Engine(child_sessions=True) needs a store with load and save, such as FileSessions; {store!r} stores only "
                "histories"
            )
            raise DefinitionError(msg)
        # By store and not by engine: what must not be overwritten is the store's.
        self.queue = get_session_queue(store)

    def make_session_journals(self, session: Session) -> SessionJournals | None:
        """Return the journals of a session's runs; ``None`` where the store has no place for them."""
        if isinstance(self.store, TurnStore):
            return SessionJournals(self.store.get_journal_location(session.session_id))
        return EmbeddedJournals(session) if self.has_state else None


@frozen
class EndedChild:
    """How a child of a run in a session ended: its place in the tree, the call that spawned it, and the rest."""

    place: tuple[int, ...]
    tool_call_id: str
    model: str | None
    status: RunStatus
    state: AgentState


class ChildSessions:
    """
    Collects how the children of a run end, and saves their conversations.

    Args:
        session_id: The session of the run.
        is_kept: Whether the engine stores them; if not, none is collected.
    """

    def __init__(self, session_id: str, *, is_kept: bool) -> None:
        self._session_id = session_id
        self._is_kept = is_kept
        self._ended: list[EndedChild] = []

    def with_collected_children(self, services: Services, tree: RunTree) -> Services:
        """Return *services* with machines that behave like theirs and report how each child of *tree* ended."""
        if not self._is_kept:
            return services
        inner = services.machine

        def run_and_collect_end(plan: RunPlan, state: AgentState) -> Generator[Any, Outcome | None, Finished]:
            finished = yield from inner(plan, state)
            if plan.path:
                place = tuple([int(number) for number in plan.path.split(".")])
                call = tree.runs.spawned_by.get(plan.path, "")
                self._ended.append(EndedChild(place, call, plan.model, finished.status, finished.state))
            return finished

        return attrs.evolve(services, machine=run_and_collect_end)

    def list_child_session_ids(self, run_id: str) -> tuple[str, ...]:
        """Return the sessions of the children of a run, in the order in which they were spawned."""
        own = sorted([(c.place, c.state.run_id) for c in self._ended if c.state.parent_id == run_id])
        return tuple([self._make_child_session_id(child) for _, child in own])

    async def save_children(self, sessions: SessionStoreAdapter) -> None:
        """Save the conversation of each ended child as a session that refers to its parent's session and the spawning call."""
        known = {child.state.run_id for child in self._ended}
        for child in self._ended:
            state, parent = child.state, child.state.parent_id
            session = await sessions.load(self._make_child_session_id(state.run_id))
            info = attrs.evolve(
                session.info,
                agent_id=state.agent_id,
                parent_session_id=self._make_child_session_id(parent) if parent in known else self._session_id,
                parent_tool_call_id=child.tool_call_id or None,
                child_session_ids=self.list_child_session_ids(state.run_id),
                model=child.model,
                status=child.status.value,
            )
            await sessions.save(attrs.evolve(session, info=info, messages=state.message_history, state=state))

    def _make_child_session_id(self, run_id: str | None) -> str:
        return f"{self._session_id}/{run_id}"


class LoadedSession:
    """
    A session from when a run loads it until the run's end is saved in it.

    Args:
        sessions: The store.
        session_id: The session.
        children: Collects the conversations of the run's children.

    Attributes:
        before: The session as the store has it, without what this run adds.
        journals: The journals of its runs; ``None`` where the store has no place for them, and before ``load``.
        warnings: Sentences for the result of the run.
    """

    def __init__(self, sessions: EngineSessions, session_id: str, children: ChildSessions) -> None:
        self.before = Session(info=SessionInfo(session_id=session_id))
        self.journals: SessionJournals | None = None
        self.warnings: list[str] = []
        self._sessions = sessions
        self._session_id = session_id
        self._children = children

    async def load(self) -> None:
        """
        Load the session and create the access to its journals.

        Raises:
            SessionError: when the store fails.
        """
        self._replace_session_and_warn(await self._sessions.load(self._session_id))
        self.journals = self._sessions.make_session_journals(self.before)

    def _replace_session_and_warn(self, session: Session) -> None:
        """Replace the loaded session, and add a warning for each repair that the store made."""
        self.before = session
        self.warnings += [f"the session {self._session_id!r} was repaired: {repair}" for repair in session.repairs]

    def add_warning(self, text: str, error: BaseException | None = None) -> None:
        """Log a warning, and add it to those of the result."""
        LOGGER.warning(text, exc_info=error)
        self.warnings.append(text)

    async def save_earlier_run(
        self, result: RunResult, plan: RunPlan, journal_name: str, metadata: Mapping[str, object]
    ) -> None:
        """
        Save the end of an earlier run that was recorded in the journal *journal_name*, as ``save_run`` does.

        Raises:
            SessionConflict: when another process saved the session since it was loaded, and the store detects that.
        """
        turns = self.before.turns + (journal_name != self.before.journal)
        self._replace_session_and_warn(
            await self._sessions.save(self._make_saved_session(result, plan, journal_name, turns, metadata))
        )

    async def save_run(
        self,
        result: RunResult,
        plan: RunPlan,
        journal_name: str | None,
        metadata: Mapping[str, object],
        *,
        is_new: bool,
    ) -> bool:
        """
        Save the end of this run; return whether the store has it. A store that fails leaves a warning.

        Args:
            result: The result.
            plan: The plan of the run.
            journal_name: The name of its journal, if the store has that.
            metadata: Added to the metadata of the session.
            is_new: Whether the run is a turn of its own, and not the continuation of the last one.
        """
        turns = self.before.turns + is_new
        try:
            await self._sessions.save(self._make_saved_session(result, plan, journal_name, turns, metadata))
        # A store that fails must not take away a result that was paid for: the result says that it was not saved
        # (reliability:SS03). A store also raises `CancelledError` when its own work was cancelled; `EngineRun` records a
        # cancellation of the run itself.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (whatever the store does, the result is not lost)
            if not await self._was_saved_elsewhere_or_warn(error, result.state, turns):
                return False
        await self._prune_journals_and_save_children(journal_name)
        return True

    def _make_saved_session(
        self, result: RunResult, plan: RunPlan, journal_name: str | None, turns: int, metadata: Mapping[str, object]
    ) -> Session:
        """Return the session with the end of a run; for a suspended run, it also refers to the run's journal."""
        before, journal = self.before, None
        if result.status is RunStatus.SUSPENDED and journal_name is not None and self.journals is not None:
            journal = self.journals.make_session_reference(journal_name)
        # A run that continues has counted its usage before, and the session with it.
        counted = before.state.usage if turns == before.turns and before.state is not None else Usage()
        return make_next_session(
            before,
            result.state,
            status=result.status,
            usage=_subtract_usage(before.usage, counted) + result.usage,
            model=plan.model,
            user_id=plan.info.user_id,
            metadata={**plan.info.metadata, **metadata},
            children=self._children.list_child_session_ids(result.state.run_id),
            turns=turns,
            journal=journal,
        )

    async def _was_saved_elsewhere_or_warn(self, error: BaseException, state: AgentState, turns: int) -> bool:
        """Return whether another process saved the session in spite of *error*; if not, add a warning."""
        # Another process may have found this run's journal and saved what it left, before this one came to it: then
        # nothing is lost, and the conflict is none.
        if isinstance(error, SessionConflict):
            with contextlib.suppress(StepEngineError):
                stored = await self._sessions.load(self._session_id)
                if stored.turns == turns and stored.state is not None and stored.state.run_id == state.run_id:
                    return True
                own = list(state.message_history)
                if stored.turns > turns and list(stored.messages[: len(own)]) == own:
                    return True
        self.add_warning(f"the session {self._session_id!r} was not saved: {type(error).__name__}: {error}", error)
        return False

    async def _prune_journals_and_save_children(self, journal_name: str | None) -> None:
        """Remove journals older than *journal_name*, and save the sessions of children; the session itself is saved by now."""
        try:
            if self.journals is not None:
                await asyncio.to_thread(self.journals.remove_old_journals, journal_name)
            await self._children.save_children(self._sessions)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (as in `save_run`)
            self.add_warning(
                f"only a part of the session {self._session_id!r} was saved: {type(error).__name__}: {error}", error
            )


class RunInSession(Protocol):
    """The run of a turn; ``stepengine.engine.run.EngineRun`` is the implementation."""

    tree: RunTree
    began: bool

    async def run(self) -> RunResult:
        """Run to the end and return the result."""


class Turn:
    """
    One root run in a session.

    Args:
        sessions: The store.
        request: The request of the caller, with the id of the session.
        journal: The caller's journal for the run; ``None`` for one in the store.
        start_new: Starts the run from a request, as ``Launcher.create_new_run``.
        start_recorded: Starts a run from its record, as ``Launcher.create_run_from_record``.
        with_handoff_agent: Returns the request for the agent that has the conversation of a state, as ``Launcher.with_handoff_agent``.
        now: Returns the time of the engine's clock.

    Attributes:
        access: Its access to the session.
        children: Collects the conversations of the run's children.
    """

    def __init__(
        self,
        sessions: EngineSessions,
        request: RunRequest,
        journal: JournalLike | None,
        *,
        start_new: Callable[..., object],
        start_recorded: Callable[..., RunInSession],
        with_handoff_agent: Callable[[RunRequest, object], RunRequest],
        now: Callable[[], datetime],
    ) -> None:
        assert request.info.session_id is not None  # noqa: S101 - one was made where none was given
        self._session_id = request.info.session_id
        self.access = SessionAccess(sessions.queue, self._session_id)
        self.children = ChildSessions(self._session_id, is_kept=sessions.children)
        self._session = LoadedSession(sessions, self._session_id, self.children)
        self._request = request
        self._journal = journal
        self._start_new = start_new
        self._start_recorded = start_recorded
        self._follow_handoff = with_handoff_agent
        self._now = now
        self._context = contextvars.copy_context()
        self._name: str | None = None
        self._continues = False

    async def load_session_and_start(self, live: RunInSession) -> None:
        """
        Load the session, and start *live* as a new run or resume the session's waiting run in it.

        Earlier runs that ended but were not saved, such as after a crash, are saved first.

        Raises:
            AnswerRejected: when the answer does not fit the question that waits, or cannot be given.
            SessionError: when the session cannot be loaded, or the answer goes into another journal than the caller's.
        """
        # What the run starts in turn (a tool that runs an agent) sees that it is inside this session, and so cannot
        # wait for itself.
        self.access.mark_context()
        await self._session.load()
        if self._request.previous is None:
            self._request = self._follow_handoff(self._request, self._session.before.state)
        # A run may have ended in a process that was killed before its session was saved. Its journal knows; the next
        # message finds it there, so that no answer is lost (reliability:SS02).
        await self._save_unsaved_runs()
        recording = self._open_record_to_resume()
        if recording is not None:
            self._continues = True
            if self._request.prompt and (self._request.answers or not self._open_questions):
                live.tree.inboxes.root.append(UserMessage(self._request.prompt))
            limits = self._request.limits
            self._context.run(
                self._start_recorded, recording, live, agent=self._find_caller_definition(recording), limits=limits
            )
        else:
            self._context.run(self._start_new, *self._make_new_request(), live)

    async def save_result(self, result: RunResult, plan: RunPlan, *, has_started: bool) -> RunResult:
        """Save the run in the session; return *result* with ``session_saved`` and the session's warnings."""
        session, is_saved = self._session, False
        if (has_started or self._continues) and not isinstance(result.error, ReplayDivergence):
            metadata = self._request.info.metadata
            is_saved = await session.save_run(result, plan, self._name, metadata, is_new=not self._continues)
        return attrs.evolve(result, session_saved=is_saved, warnings=(*result.warnings, *session.warnings))

    # --- how it starts ------------------------------------------------------------------------------------------------

    @property
    def _open_questions(self) -> tuple[Question, ...]:
        """The open questions of the session's last run by the same agent, which this run may answer."""
        before, request = self._session.before, self._request
        if request.previous is not None:
            return ()
        if before.state is None:
            return (OPEN,) if find_suspended_reply_index(before.messages) is not None else ()
        return before.state.pending if before.info.agent_id == request.agent.definition.id else ()

    def _get_answers_or_prompt_as_answer(self) -> Mapping[str, AnswerLike]:
        """Return the caller's answers; if there are none, the prompt as the answer to the session's first open question."""
        given, said = self._request.answers, self._request.prompt
        if given or not said or not self._open_questions:
            return given or {}
        # Where a question is open the next thing that somebody writes is its answer, as in any conversation.
        return {self._open_questions[0].id: said}

    def _open_record_to_resume(self) -> JournaledRun | None:
        """
        Open the record of the session's suspended run with the caller's answer; return ``None`` to start a new run.

        A new run starts if there is no such record, ``previous=`` is given, or the saved state alone is enough to continue.

        Raises:
            SessionError: when a message is for a run that still waits for something else, or the caller names another journal.
        """
        from stepengine.journal.journaled_run import JournaledRun
        from stepengine.journal.permission_reset import remove_approvals
        from stepengine.journal.provenance import has_trusted_permissions

        before, journals = self._session.before, self._session.journals
        name, state = before.journal, before.state
        if name is None or state is None or journals is None or self._request.previous is not None:
            return None
        journal = journals.get_journal(name)
        waits = find_non_question_waits(journal)
        # A state alone is enough where the agent has no handler: the open step stands in it. Going on so survives a
        # change of prompts and tools, which a journal would call a divergence.
        if not waits and (
            not self._open_questions or explain_unresumable_state(self._request.agent.definition, state) is None
        ):
            return None
        if not journal.records():
            return None
        if waits and not self._open_questions:
            self._refuse_unless_due(journal, waits)
        if self._journal is not None:
            msg = (
                f"the session {self._session_id!r} waits for an answer. The run that asked continues in the journal in the session "
                "store, and would record nothing in the one that journal= names; leave out journal="
            )
            raise SessionError(msg)
        if not has_trusted_permissions(journal):
            remove_approvals(journal)
        asked = self._request.on_divergence
        recording = JournaledRun.resume(
            journal, self._get_answers_or_prompt_as_answer(), accepts_edited_effects=asked == "keep"
        )
        recording.raises = asked != "stop"
        self._name = name
        return recording

    def _refuse_unless_due(self, journal: Journal, waits: Sequence[Waits]) -> None:
        """Raise ``SessionError`` for a run of another agent, and for a message to a run of which none of *waits* is due."""
        from stepengine.journal.sleepers import is_due

        info, request = self._session.before.info, self._request
        is_other = info.agent_id != request.agent.definition.id
        if not is_other and (not (request.prompt or request.answers) or is_due(journal, waits, self._now())):
            return
        whose = f" It is a run of {info.agent_id!r}." if is_other else ""
        msg = (
            f"the last run in the session {self._session_id!r} has not ended, so the session accepts no message yet. "
            f"{describe_waits(waits)}{whose} After that, the next run of its agent in this session resumes it. To resume it now, use "
            f"engine.resume(JOURNAL, now=True) or `stepengine resume JOURNAL --now` with its journal {journal.name}"
        )
        raise SessionError(msg)

    def _find_caller_definition(self, recording: JournaledRun) -> AgentDefinition | None:
        """Return the caller's agent definition if the record has the same id, else ``None``."""
        own, opening = self._request.agent.definition, recording.opening
        return own if opening is not None and opening.agent_id == own.id else None

    def _make_new_request(self) -> tuple[RunRequest, JournalLike | None]:
        """Return the request of a new run and the journal that records it; choose the journal's name."""
        request, waiting = self._request, self._open_questions
        before, journals = self._session.before, self._session.journals
        answers = self._get_answers_or_prompt_as_answer()
        if answers and not request.answers:
            request = attrs.evolve(request, answers=answers, prompt="")
        if request.previous is None:
            previous = before.state
            if previous is None and before.messages:
                previous = AgentState.from_messages(before.messages, pending=waiting)
            request = attrs.evolve(request, previous=previous)
        if self._journal is not None or journals is None:
            return request, self._journal
        # Names sort by time, of up to a million turns; the end is random, since another process may start this turn, too.
        self._name = f"{before.turns + 1:06d}-{secrets.token_hex(4)}"  # two turns hardly start at once
        return request, journals.get_journal(self._name)

    # --- what was not saved -------------------------------------------------------------------------------------------

    async def _save_unsaved_runs(self) -> None:
        """Save the ends of runs whose process was killed before it saved the session."""
        journals = self._session.journals
        if journals is None:
            return
        for name in await asyncio.to_thread(journals.list_unsaved_journals, self._session.before):
            try:
                await self._save_unsaved_run(journals.get_journal(name), name)
            except (AgentError, JournalError, SessionConflict, ReplayDivergence) as error:
                self._session.add_warning(
                    f"the run {name!r} of the session {self._session_id!r} cannot be saved: {error.message}"
                )

    async def _save_unsaved_run(self, journal: Journal, name: str) -> None:
        """Replay an unsaved run from its journal and save its end; ignore one that did not start from the stored session."""
        from stepengine.journal.journaled_run import JournaledRun

        recording = JournaledRun.resume(journal)
        opening, before = recording.opening, self._session.before
        # A new run of this session started from what the session holds.
        start = () if opening is None or opening.previous is None else opening.previous.message_history
        if opening is None or (name != before.journal and list(start) != list(before.messages)):
            recording.writer.close()
            return
        live = self._context.run(self._start_recorded, recording, agent=self._find_caller_definition(recording))
        recording.raises = True
        result = await live.run()
        if live.began:
            await self._session.save_earlier_run(result, live.tree.root.plan, name, self._request.info.metadata)


def _subtract_usage(usage: Usage, other: Usage) -> Usage:
    numbers = {name: getattr(usage, name) - getattr(other, name) for name in NUMBERS}
    return attrs.evolve(usage, **numbers)
