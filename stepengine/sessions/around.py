"""
A conversation around a run: loaded before it, saved after it.

``SessionStoreAdapter`` makes whole sessions of what any store gives, and ``session_after_run`` builds the session that a run leaves. An engine with sessions
does it with them, and so do the hooks of ``session_hooks``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import attrs
from attrs import frozen

from stepengine.data import codec
from stepengine.data.definition import HookContext
from stepengine.data.hooks import Change, Hooks
from stepengine.data.messages import AssistantMessage
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.data.yields import Perform, StepResult, Yieldable
from stepengine.errors import DefinitionError, SessionConflict, SessionError, StepEngineError
from stepengine.sessions.session import (
    DeletingStore,
    Session,
    SessionInfo,
    SessionStore,
    StateStore,
    VersionedStore,
    mended,
    messages_from_json,
    messages_to_json,
)

VERSION = "stepengine.session_version"
"""Under which hooks of a run find the version that was loaded."""


class SessionStoreAdapter:
    """
    A store of any kind behind ``load``, ``save`` and ``delete`` of whole sessions.

    Args:
        store: An object with the methods of ``SessionStore`` or of ``VersionedStore``, plain or async.

    Attributes:
        store: As given.
        is_whole: Whether it keeps whole sessions by itself.
        has_state: Whether it keeps what the last run left.

    Raises:
        DefinitionError: when it is not a store.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.is_whole = isinstance(store, VersionedStore)
        self.has_state = isinstance(store, StateStore)
        if isinstance(store, type) or not (self.is_whole or isinstance(store, SessionStore)):
            msg = (
                f"a store of sessions has the methods get_history(id) and save_history(id, messages); {store!r} has not"
            )
            raise DefinitionError(msg)

    async def load(self, session_id: str) -> Session:
        """
        Return a session.

        Raises:
            SessionError: when the store fails.
        """
        try:
            return await self._load_from_store(session_id)
        except StepEngineError:
            raise
        except Exception as error:
            msg = f"the session {session_id!r} could not be loaded, so nothing was run: {type(error).__name__}: {error}"
            raise SessionError(msg) from error

    async def _load_from_store(self, session_id: str) -> Session:
        if self.is_whole:
            loaded: Session = await self._call_store(self.store.load, session_id)
            return loaded
        messages, repairs = mended(await self._call_store(self.store.get_history, session_id) or ())
        session = Session(info=SessionInfo(session_id=session_id), messages=messages, repairs=repairs)
        kept = await self._call_store(self.store.get_state, session_id) if self.has_state else None
        if not kept or repairs:
            return session
        state: AgentState = codec.from_json(kept["state"])
        if state.message_history != messages:
            return session  # somebody else changed the history: it is all that is known
        info = attrs.evolve(session.info, agent_id=state.agent_id)
        return attrs.evolve(session, info=info, state=state, turns=kept["turns"], journal=kept["journal"])

    async def save(self, session: Session) -> Session:
        """
        Store a session and return it as it is stored.

        Raises:
            SessionConflict: when somebody else saved it since it was loaded, and the store can tell.
        """
        if self.is_whole:
            saved: Session = await self._call_store(self.store.save, session)
            return saved
        session_id, state = session.session_id, session.state
        await self._call_store(self.store.save_history, session_id, session.messages)
        if self.has_state and state is not None:
            kept = {"state": codec.to_json(state), "turns": session.turns, "journal": session.journal}
            await self._call_store(self.store.save_state, session_id, kept)
        return session

    async def delete(self, session_id: str) -> bool:
        """
        Forget a session, and the journals that the store keeps of its runs; return whether the store can.

        Raises:
            SessionError: when the store fails.
        """
        if not isinstance(self.store, DeletingStore):
            return False
        try:
            await self._call_store(self.store.delete, session_id)
        except StepEngineError:
            raise
        except Exception as error:
            msg = f"the session {session_id!r} could not be deleted: {type(error).__name__}: {error}"
            raise SessionError(msg) from error
        return True

    async def _call_store(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(self.store, "blocking", False):
            value = await asyncio.to_thread(method, *arguments)
        else:
            value = method(*arguments)
        return await value if inspect.isawaitable(value) else value


def session_after_run(
    before: Session,
    state: AgentState,
    *,
    status: RunStatus,
    usage: Usage,
    model: str | None,
    user_id: str | None,
    metadata: Mapping[str, object],
    turns: int,
    children: tuple[str, ...] = (),
    journal: str | None = None,
) -> Session:
    """
    Return the session *before* as a run that ended with *state* changes it; *children* are the sessions started in the run.

    *usage* is that of all runs in the session, *turns* their number; *metadata* is added to what the session has.
    """
    info = attrs.evolve(
        before.info,
        agent_id=state.agent_id,
        model=model,
        provider=model.partition("/")[0] if model and "/" in model else None,
        user_id=user_id or before.info.user_id,
        status=status.value,
        metadata={**before.info.metadata, **metadata},
        child_session_ids=(*before.info.child_session_ids, *children),
    )
    return attrs.evolve(
        before, info=info, messages=state.message_history, state=state, turns=turns, journal=journal, usage=usage
    )


def session_hooks(store: SessionStore | VersionedStore) -> Hooks:
    """
    Return hooks that load a conversation before a run and save it after it.

    ``AgentDefinition(..., hooks=session_hooks(store))`` gives one agent a memory where ``Engine(sessions=store)`` would give it
    to all. Both are recorded effects: a replay needs no store, and a resumed run loads nothing a second time. The session is
    that of ``session_id``; a run without one starts a conversation that is named by its run id, and ``RunResult.session_id`` reports it. What the run is given with
    ``previous=`` takes the place of what the session holds. Children have no session.

    A run that was stopped, because it waits for an answer or was cancelled, can do nothing any more, so it is not saved; with
    ``Engine(sessions=store)`` it is, and the next message answers the question.

    A run that a ``pre_run`` hook refused leaves the session as it is.

    Args:
        store: Any store: ``FileSessions``, ``SqliteSessions``, ``MemorySessions``, or an object with ``get_history(id)`` and
            ``save_history(id, messages)``, plain or async.

    Raises:
        DefinitionError: when it is not a store. In a run, a store that fails while loading ends it as ``failed``; one that fails
            while saving, or was saved by somebody else meanwhile, leaves the result as it is and shows ``HookFailed``.
    """
    around = _SessionHooks(SessionStoreAdapter(store))
    return Hooks(pre_run=around.load, post_run=around.save)


def has_session_hooks(hooks: Hooks) -> bool:
    """Return whether the hooks of ``session_hooks`` are among *hooks*."""
    return any(isinstance(getattr(hook, "__self__", None), _SessionHooks) for hook in hooks.pre_run)


@frozen
class _SessionHooks:
    """The hooks that load a session before a run and save it after the run."""

    store: SessionStoreAdapter

    def load(self, ctx: HookContext) -> Generator[Yieldable, StepResult, Change | None]:
        if ctx.path or any(isinstance(message, AssistantMessage) for message in ctx.messages):
            return None
        found = yield from Perform.idempotent(self.load_session, _session_id_of_run(ctx))
        for repair in found["repairs"]:
            ctx.logger.warning("the session was mended", session_id=_session_id_of_run(ctx), repair=repair)
        own, values = tuple(ctx.messages), {VERSION: found["version"]}
        if not found["messages"]:
            return Change(values=values)
        record = Transcript([*messages_from_json(found["messages"]), *own])
        view = None if found["view"] is None else Transcript([*messages_from_json(found["view"]), *own])
        return Change(messages=record, view=view, context=found["context"] or None, values=values)

    async def load_session(self, session_id: str) -> dict[str, Any]:
        """Return what a run goes on from, as JSON."""
        session = await self.store.load(session_id)
        state = session.state
        has_view = state is not None and state.view is not state.message_history
        return {
            "messages": messages_to_json(session.messages),
            "view": messages_to_json(state.view) if state is not None and has_view else None,
            "context": {} if state is None else state.context,
            "version": session.version,
            "repairs": list(session.repairs),
        }

    def save(self, ctx: HookContext, result: Any) -> Generator[Yieldable, StepResult, None]:
        if ctx.path or not result.began:
            return
        if result.status in (RunStatus.SUSPENDED, RunStatus.CANCELLED):
            ctx.logger.warning(
                "the run was stopped, so its session was not saved",
                session_id=_session_id_of_run(ctx), status=result.status.value,
            )  # fmt: skip
            return
        yield from Perform(partial(self.save_session, ctx, result), _session_id_of_run(ctx))

    async def save_session(self, ctx: HookContext, result: Any, session_id: str) -> int:
        """Save what a run left; return the new version."""
        before, version = await self.store.load(session_id), ctx.values.get(VERSION)
        if version is not None and before.version != version:
            msg = f"the session {session_id!r} was saved by somebody else since version {version} of it was loaded"
            raise SessionConflict(msg)
        made = session_after_run(
            before,
            result.state,
            status=result.status,
            usage=before.usage + result.spending.usage,
            model=ctx.agent.model or before.info.model,
            user_id=ctx.user_id,
            metadata=ctx.metadata,
            turns=before.turns + 1,
        )
        return (await self.store.save(made)).version


def _session_id_of_run(ctx: HookContext) -> str:
    return ctx.session_id or ctx.state.run_id
