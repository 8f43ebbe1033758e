"""
What an engine does with journals: it records, resumes, replays and forks runs (design 10, requirements K10, P2).

The journal's own code is loaded when the first journal is used.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import attrs

from stepengine.data.limits import Limits
from stepengine.data.run import RunResult
from stepengine.engine.base import Base
from stepengine.engine.live import LiveRun
from stepengine.engine.options import (
    AgentLike,
    ExtendOptions,
    ForkOptions,
    ReplayOptions,
    ResumeOptions,
    RunOptions,
    given,
)
from stepengine.engine.planning import Known, Request, new_run_id, reopening
from stepengine.engine.turns import Sessions, Turn
from stepengine.runtime.hub import Hub
from stepengine.sessions.session import check_id

if TYPE_CHECKING:
    from stepengine.journal import Journal, JournalLike, Session

__all__ = ("Recorded",)


class Recorded(Base):
    """The part of an engine that deals with journals."""

    def _begin(
        self, agent: AgentLike, prompt: str, *, hub: Hub | None = None, **options: Unpack[RunOptions]
    ) -> LiveRun:
        """Return a run that is ready to start; *hub* is the event stream that it goes on, if it does."""
        asked = given("run", RunOptions, options)
        journal = asked.pop("journal", None)
        request = Request(agent=self._catalog.find(agent), prompt=prompt, hub=hub, **asked)
        if self._sessions is None:
            return self._planned(request, journal)
        return self._begin_turn(self._sessions, request, journal)

    def _begin_turn(self, sessions: Sessions, request: Request, journal: JournalLike | None) -> LiveRun:
        """Return a run that learns what it starts from when it was let into its session; what is wrong is told before."""
        request = attrs.evolve(
            request, session_id=check_id(new_run_id() if request.session_id is None else request.session_id)
        )
        live = self._begin_request(attrs.evolve(request, answers=None), is_sketch=True)
        live.turn = Turn(
            sessions,
            attrs.evolve(request, run_id=live.tree.root.state.run_id),
            journal,
            planned=self._planned,
            again=self._again,
        )
        return live

    def _planned(self, request: Request, journal: JournalLike | None, into: LiveRun | None = None) -> LiveRun:
        """Return a run that starts from *request*, recorded in a journal or not."""
        answers = request.answers
        request = reopening(request)
        if journal is None:
            return self._begin_request(request, into=into)
        from stepengine.journal import begin

        session = begin(journal, answers)
        if session.past is None:
            return self._begin_session(session, request, into=into)
        known = _known(session, None)
        return self._begin_session(session, attrs.evolve(request, answers=session.answers), known, into)

    def _again(
        self,
        session: Session,
        into: LiveRun | None = None,
        *,
        agent: AgentLike | None = None,
        limits: Limits | None = None,
        forked: Journal | None = None,
    ) -> LiveRun:
        """Return a run that goes through what *session* has recorded."""
        try:
            request = self._opened(session, agent, limits)
        except BaseException:
            session.close()
            raise
        return self._begin_session(session, request, _known(session, forked), into)

    async def _launch(
        self,
        session: Session,
        agent: AgentLike | None,
        limits: Limits | None = None,
        forked: Journal | None = None,
    ) -> RunResult[Any]:
        """Run the session of a recorded run to its end; *agent* stands in for the one that the journal names."""
        return await self._again(session, agent=agent, limits=limits, forked=forked)()

    def _opened(self, session: Session, agent: AgentLike | None, limits: Limits | None) -> Request:
        opening = session.opening
        assert opening is not None  # noqa: S101 - it was read from the journal
        return Request(
            agent=self._catalog.find(opening.agent_id if agent is None else agent),
            prompt=opening.prompt,
            params=opening.params,
            previous=opening.previous,
            session_id=opening.session_id,
            user_id=opening.user_id,
            metadata=opening.metadata,
            limits=opening.limits if limits is None else _at_least_spent(limits, session),
            answers=session.answers,
        )

    async def resume(self, journal: JournalLike, **options: Unpack[ResumeOptions]) -> RunResult[Any]:
        """
        Go on with a run that was suspended, interrupted, or cut off by a crash, in this process or another one.

        What is recorded is not done again. A run that has ended gives its result again, and nothing is performed.

        Args:
            journal: The journal, or the path of its file.
            options: See ``ResumeOptions``.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            AnswerRejected: when an answer fits no open question, or was given before; nothing is changed.
            JournalError: when the journal is locked, damaged, of a newer version, holds no run, or cannot be written.
            MissingKey: when the run goes on and there is no key for its model.
            ReplayDivergence: when the handler does something else than is recorded.
        """
        from stepengine import journal as journals

        asked = given("resume", ResumeOptions, options)
        launch = partial(self._launch, agent=asked.pop("agent", None), limits=asked.pop("limits", None))
        return await journals.resume(journal, launch, **asked)

    async def replay(self, journal: JournalLike, **options: Unpack[ReplayOptions]) -> RunResult[Any]:
        """
        Repeat a recorded run; nothing is performed, so no model, no tool, no network and no key is needed.

        With ``live={"call_tool"}`` tools really run, and must come to the recorded results.

        The result's journal is what the replay would have recorded: that of an unchanged agent is equal byte for byte.

        Args:
            journal: The journal, or the path of its file; it is only read.
            options: See ``ReplayOptions``.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            JournalError: when the journal is damaged, of a newer version, or holds no run.
            ReplayDivergence: at the first effect that is not what was recorded; it names step, file, line and fields.
        """
        from stepengine import journal as journals

        asked = given("replay", ReplayOptions, options)
        return await journals.replay(journal, partial(self._launch, agent=asked.pop("agent", None)), **asked)

    async def extend(self, journal: JournalLike, **options: Unpack[ExtendOptions]) -> RunResult[Any]:
        """
        Record a run again after its agent was changed: what is recorded and still equal is kept, the rest goes live.

        The journal is replaced when the run has ended or waits for an answer; it stays as it is when the run fails. What was
        recorded before stays beside it: ``run.before-1.jsonl``, or in an SQLite file the run ``RUN-before-1``.

        Args:
            journal: The journal, or the path of its file.
            options: See ``ExtendOptions``.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            JournalError: when the journal is damaged, of a newer version, holds no run, or cannot be written; when something
                that changed the world would be repeated.
            MissingKey: when there is no key for the model.
        """
        from stepengine import journal as journals

        asked = given("extend", ExtendOptions, options)
        launch = partial(self._launch, agent=asked.pop("agent", None), limits=asked.pop("limits", None))
        return await journals.extend(journal, launch, **asked)

    def extend_sync(self, journal: JournalLike, **options: Unpack[ExtendOptions]) -> RunResult[Any]:
        """Do what ``extend`` does for synchronous code."""
        return self._loop_thread.run(lambda: self.extend(journal, **options))

    async def fork(self, journal: JournalLike, *, at: int | str, **options: Unpack[ForkOptions]) -> RunResult[Any]:
        """
        Go on from the middle of a recorded run, in a journal of its own, which the result names.

        Args:
            journal: The journal, or the path of its file; it is only read.
            at: The last effect to keep: a number of the root's effects, or ``"path#number"``; -1 keeps none.
            options: See ``ForkOptions``.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            JournalError: when there is no such effect, it has no result, its outcome cannot be edited, or something that
                changed the world would be repeated.
            ReplayDivergence: when the kept part does not fit the code.
        """
        from stepengine import journal as journals

        asked = given("fork", ForkOptions, options)
        source = journals.as_journal(journal)
        other = {"agent": asked.pop("agent", None), "limits": asked.pop("limits", None)}
        return await journals.fork(source, partial(self._launch, **other, forked=source), at=at, **asked)

    def resume_sync(self, journal: JournalLike, **options: Unpack[ResumeOptions]) -> RunResult[Any]:
        """Do what ``resume`` does for synchronous code."""
        return self._loop_thread.run(lambda: self.resume(journal, **options))

    def replay_sync(self, journal: JournalLike, **options: Unpack[ReplayOptions]) -> RunResult[Any]:
        """Do what ``replay`` does for synchronous code."""
        return self._loop_thread.run(lambda: self.replay(journal, **options))

    def fork_sync(self, journal: JournalLike, *, at: int | str, **options: Unpack[ForkOptions]) -> RunResult[Any]:
        """Do what ``fork`` does for synchronous code."""
        return self._loop_thread.run(lambda: self.fork(journal, at=at, **options))


def _at_least_spent(limits: Limits, session: Session) -> Limits:
    """Return *limits* with room for what is recorded: new ones hold for what is live, spent is spent (reliability JR29)."""
    assert session.past is not None  # noqa: S101 - only recorded runs are started again
    own = [i for (path, seq), i in session.past.history.intents.items() if not path and seq >= 0]
    asked = {i.seq if i.gather is None else i.gather for i in own}
    spent = {"max_steps": sum(i.type == "CallModel" for i in own), "max_actions": len(asked)}
    given = {name: getattr(limits, name) for name in spent}
    return attrs.evolve(limits, **{n: max(v, spent[n]) for n, v in given.items() if v is not None})


def _known(session: Session, forked: Journal | None) -> Known:
    """Return what the journal of *session* tells of models, or the one that it was forked from."""
    assert session.past is not None  # noqa: S101 - only recorded runs are started again
    history = session.past.history if forked is None else forked.history()
    models: dict[str, str] = {}
    for (path, _), intent in history.intents.items():
        if intent.type == "CallModel":
            models.setdefault(history.model(intent), path)
    root = history.root.get("model") or next((model for model, path in models.items() if not path), None)
    if root is not None:
        models.setdefault(root, "")
    is_whole = (session.mode == "replay" and not session.past.is_loose) or (
        session.mode == "resume" and session.past.history.is_complete
    )
    chosen = history.root.get("models") or {}
    return Known(frozenset([*models, *chosen.values()]), root, chosen, is_whole)
