"""
Loading a conversation before a run, and saving it after the run.

``SessionStoreAdapter`` makes whole sessions from any store. ``make_next_session`` makes the session after a run. Engines with sessions
use them, and so do the hooks of ``session_hooks``.
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
    messages_from_json,
    messages_to_json,
    repair_transcript,
)

VERSION = "stepengine.session_version"
"""The key of the loaded version in the values of a run's hooks."""


class SessionStoreAdapter:
    """
    Adapts a store of any kind to ``load``, ``save`` and ``delete`` of whole sessions.

    Args:
        store: An object with the methods of ``SessionStore`` or of ``VersionedStore``, plain or async.

    Attributes:
        store: As passed.
        is_whole: Whether the store itself stores whole sessions.
        has_state: Whether the store stores the state of the last run.
        can_delete: Whether the store deletes sessions.

    Raises:
        DefinitionError: if it is not a store.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.is_whole = isinstance(store, VersionedStore)
        self.has_state = isinstance(store, StateStore)
        self.can_delete = isinstance(store, DeletingStore)
        if isinstance(store, type) or not (self.is_whole or isinstance(store, SessionStore)):
            msg = f"a session store needs the methods get_history(id) and save_history(id, messages), and {store!r} lacks them"
            raise DefinitionError(msg)

    async def load(self, session_id: str) -> Session:
        """
        Load and return a session; any failure of the store raises ``SessionError``.

        Raises:
            SessionError: if the store fails.
        """
        try:
            return await self._load_from_store(session_id)
        except StepEngineError:
            raise
        except Exception as error:
            msg = f"the session {session_id!r} could not be loaded, so nothing was run: {type(error).__name__}: {error}"
            raise SessionError(msg) from error

    async def _load_from_store(self, session_id: str) -> Session:
        """Load a session by the methods that the store has; a stored state is used only if it belongs to the stored messages."""
        if self.is_whole:
            loaded: Session = await self._call_store(self.store.load, session_id)
            return loaded
        messages, repairs = repair_transcript(await self._call_store(self.store.get_history, session_id) or ())
        session = Session(info=SessionInfo(session_id=session_id), messages=messages, repairs=repairs)
        kept = await self._call_store(self.store.get_state, session_id) if self.has_state else None
        if not kept or repairs:
            return session
        state: AgentState = codec.from_json(kept["state"])
        if state.message_history != messages:
            return session  # another program changed the history, so only the messages are valid
        info = attrs.evolve(session.info, agent_id=state.agent_id)
        return attrs.evolve(session, info=info, state=state, turns=kept["turns"], journal=kept["journal"])

    async def save(self, session: Session) -> Session:
        """
        Store a session, and return it with its new version if the store has versions.

        Raises:
            SessionConflict: if the session was saved by another writer after it was loaded, and the store detects that.
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

    async def delete(self, session_id: str) -> None:
        """
        Delete a session and the journals of its runs; the store must have the method ``delete``.

        Raises:
            SessionError: if the store fails.
        """
        try:
            await self._call_store(self.store.delete, session_id)
        except StepEngineError:
            raise
        except Exception as error:
            msg = f"the session {session_id!r} could not be deleted: {type(error).__name__}: {error}"
            raise SessionError(msg) from error

    async def _call_store(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the store, in a thread if the store blocks, and await its result if it is awaitable."""
        if getattr(self.store, "blocking", False):
            value = await asyncio.to_thread(method, *arguments)
        else:
            value = method(*arguments)
        return await value if inspect.isawaitable(value) else value


def make_next_session(
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
    Return the session *before*, updated with the state, status and metadata of a run that ended in it.

    *children* are the sessions started in the run, *usage* is that of all runs in the session, and *turns* their number.
    *metadata* is merged into that of the session.
    """
    info = attrs.evolve(
        before.info,
        agent_id=state.agent_id,
        model=model,
        provider=model.partition("/")[0] if model and "/" in model else None,
        user_id=user_id or before.info.user_id,
        status=status.value,
        metadata={**before.info.metadata, **metadata},
        # A run that continues after an answer reports the children that ended before the question again.
        child_session_ids=tuple(dict.fromkeys((*before.info.child_session_ids, *children))),
    )
    return attrs.evolve(
        before, info=info, messages=state.message_history, state=state, turns=turns, journal=journal, usage=usage
    )


def session_hooks(store: SessionStore | VersionedStore) -> Hooks:
    """
    Return hooks that load a conversation before a run and save it after the run.

    ``AgentDefinition(..., hooks=session_hooks(store))`` gives one agent a memory; ``Engine(sessions=store)`` gives it to all
    agents. Loading and saving are recorded effects: a replay needs no store, and a resumed run loads nothing again. The session
    is that of ``session_id``. A run without one starts a conversation named by its run id, which ``RunResult.session_id`` reports.
    ``previous=`` with messages replaces the content of the session. Children have no session.

    A run that was stopped, because it waits for an answer or was cancelled, is not saved, since its hooks no longer run. With
    ``Engine(sessions=store)`` it is saved, and the next message answers the question.

    A run that a ``pre_run`` hook rejected leaves the session unchanged.

    Args:
        store: Any store: ``FileSessions``, ``SqliteSessions``, ``MemorySessions``, or an object with ``get_history(id)`` and
            ``save_history(id, messages)``, plain or async.

    Raises:
        DefinitionError: if it is not a store. In a run, a store that fails to load ends the run as ``failed``. If saving fails,
            or conflicts with another writer, the result is unchanged and a ``HookFailed`` event is emitted.
    """
    hooks = _SessionHooks(SessionStoreAdapter(store))
    return Hooks(pre_run=hooks.load, post_run=hooks.save)


def has_session_hooks(hooks: Hooks) -> bool:
    """Return True if *hooks* contain the hooks that ``session_hooks`` returns."""
    return any(isinstance(getattr(hook, "__self__", None), _SessionHooks) for hook in hooks.pre_run)


@frozen
class _SessionHooks:
    """The hooks that load a session before a run and save it after the run."""

    store: SessionStoreAdapter

    def load(self, ctx: HookContext) -> Generator[Yieldable, StepResult, Change | None]:
        """
        A ``pre_run`` hook: put the stored session before the prompt of a root run without earlier messages; else return ``None``.
        """
        if ctx.path or ctx.has_earlier_messages:
            return None
        if any(isinstance(message, AssistantMessage) for message in ctx.messages):
            return None
        found = yield from Perform.idempotent(self.load_session, _get_session_id(ctx))
        for repair in found["repairs"]:
            ctx.logger.warning("the session was repaired", session_id=_get_session_id(ctx), repair=repair)
        own, values = tuple(ctx.messages), {VERSION: found["version"]}
        if not found["messages"]:
            return Change(values=values)
        record = Transcript([*messages_from_json(found["messages"]), *own])
        view = None if found["view"] is None else Transcript([*messages_from_json(found["view"]), *own])
        return Change(messages=record, view=view, context=found["context"] or None, values=values)

    async def load_session(self, session_id: str) -> dict[str, Any]:
        """Load a session, and return its messages, view, context, version and repairs as JSON."""
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
        """Save the result of a root run, unless it was suspended, cancelled or rejected: a ``post_run`` hook."""
        if ctx.path or not result.began:
            return
        if result.status in (RunStatus.SUSPENDED, RunStatus.CANCELLED):
            ctx.logger.warning(
                "the run was stopped, so its session was not saved",
                session_id=_get_session_id(ctx), status=result.status.value,
            )  # fmt: skip
            return
        yield from Perform(partial(self.save_session, ctx, result), _get_session_id(ctx))

    async def save_session(self, ctx: HookContext, result: Any, session_id: str) -> int:
        """
        Save a run's result and return the new version; raise ``SessionConflict`` if another writer saved the session meanwhile.
        """
        before, version = await self.store.load(session_id), ctx.values.get(VERSION)
        if version is not None and before.version != version:
            msg = f"the session {session_id!r} was saved by another writer after version {version} was loaded"
            raise SessionConflict(msg)
        made = make_next_session(
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


def _get_session_id(ctx: HookContext) -> str:
    """Return the run's session id, else its run id."""
    return ctx.session_id or ctx.state.run_id
