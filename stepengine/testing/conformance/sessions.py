"""``check_sessions``: the promises of a session store, by its abilities: those of ``SessionStore``, and of each protocol it has."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import AssistantMessage, Message, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.yields import STEP, Ask
from stepengine.engine.engine import Engine
from stepengine.errors import SessionConflict
from stepengine.models.scripted import ScriptedModel, text
from stepengine.sessions.session import CacheStore, DeletingStore, SessionStore, StateStore, VersionedStore
from stepengine.testing.conformance.promises import Promises, require, require_equal

MakeSessions: TypeAlias = Callable[[], Any]
WRITERS = 8
IDS = ("ann:chat", "Ann:chat", "ann/../chat", "..", "a b\n", "ünïcode-漢字", "%61nn:chat", "x" * 1_000)
STATE = {"run": "r1", "depth": [1, {"two": None}], "words": "ünï"}

SESSIONS: Promises[MakeSessions] = Promises("check_sessions(make")


def check_sessions(make: MakeSessions, *, only: str = "") -> None:
    """
    Check that a session store meets the promises of its interface.

    Args:
        make: Returns a store. Called again, it returns another object over the same place. The place is empty at first.
        only: The name of one promise; by default all are checked that the abilities of the store allow.

    Raises:
        AssertionError: when a promise is broken; the message names it and the call that checks it alone.
    """
    SESSIONS.check(make, only)


def _asking_handler(_ctx: Any) -> Any:
    """Ask a question, step, and return a text with the answer."""
    answer = yield from Ask("For how many?")
    yield STEP
    return f"a table for {answer}"


HISTORY: tuple[Message, ...] = (
    UserMessage("Add them."),
    AssistantMessage([ToolCallPart("c1", "add", {"a": 1, "b": ["ü", None, 2.5]})]),
    ToolMessage("c1", "add", "3"),
    AssistantMessage("It is 3."),
)


@SESSIONS.add(
    "history",
    "`get_history` returns the last history of `save_history`, also in another object; nothing for an unknown id.",
)
def _check_history(make: MakeSessions) -> None:
    if not isinstance(make(), SessionStore):
        return
    require_equal([], list(_await_if_needed(make().get_history("nobody"))), "messages of an unknown id")
    for messages in (HISTORY, HISTORY[:1], (), HISTORY * 1):
        _await_if_needed(make().save_history("history", messages))
        require_equal(list(messages), list(_await_if_needed(make().get_history("history"))), "messages")


@SESSIONS.add("ids", "Every id of 1 to 1,000 characters has its own session.")
def _check_distinct_ids(make: MakeSessions) -> None:
    """Fail unless every id of 1 to 1,000 characters has its own session."""
    if not isinstance(make(), SessionStore):
        return
    for session_id in IDS:
        _await_if_needed(make().save_history(session_id, [UserMessage(session_id)]))
    for session_id in IDS:
        found = [message.text for message in _await_if_needed(make().get_history(session_id))]
        require_equal([session_id], found, f"messages of the id {session_id[:20]!r}")


@SESSIONS.add("state", "`get_state` returns the state of `save_state`; `None` for an unknown id.")
def _check_state(make: MakeSessions) -> None:
    """Fail unless ``get_state`` returns the stored state, and ``None`` for an unknown id."""
    store = make()
    # A store of whole sessions keeps agent states, and the promise "question" checks those.
    if not isinstance(store, StateStore) or isinstance(store, VersionedStore):
        return
    require_equal(None, _await_if_needed(store.get_state("nobody")), "state of an unknown id")
    _await_if_needed(store.save_state("state", STATE))
    require_equal(STATE, _await_if_needed(make().get_state("state")), "state")


@SESSIONS.add("cache", "`get_cached` returns JSON values until they expire.")
def _check_cache(make: MakeSessions) -> None:
    """Fail unless ``get_cached`` returns stored JSON values until they expire."""
    store = make()
    if not isinstance(store, CacheStore):
        return
    require_equal(None, _await_if_needed(store.get_cached("nothing")), "value of an unknown key")
    for value in (STATE, 0, "text", [1]):
        _await_if_needed(store.set_cached("key", value))
        require_equal(value, _await_if_needed(make().get_cached("key")), "cached value")
    _await_if_needed(store.set_cached("short", 1, 0.001))
    _await_if_needed(store.set_cached("long", 2, 3_600.0))
    time.sleep(1.1)  # some stores count whole seconds
    require_equal(
        (None, 2),
        (_await_if_needed(make().get_cached("short")), _await_if_needed(make().get_cached("long"))),
        "values after a second",
    )


@SESSIONS.add("versions", "`save` raises SessionConflict and changes nothing if another writer saved after `load`.")
def _check_save_conflict(make: MakeSessions) -> None:
    """Fail unless ``save`` raises ``SessionConflict`` if another writer has saved after ``load``."""
    store = make()
    if not isinstance(store, VersionedStore):
        return
    require_equal(0, _await_if_needed(store.load("versions")).version, "version of an unknown id")
    saved = _save_history(make(), "versions")
    require_equal(
        (1, list(HISTORY)), (saved.version, list(saved.messages)), "version and messages of the saved session"
    )
    first, second = _await_if_needed(make().load("versions")), _await_if_needed(make().load("versions"))
    require_equal(saved, first, "the loaded session")
    _await_if_needed(make().save(attrs.evolve(first, messages=first.messages.append(UserMessage("first")))))
    try:
        _await_if_needed(make().save(attrs.evolve(second, messages=second.messages.append(UserMessage("second")))))
    except SessionConflict:
        pass
    else:
        msg = "the second of two saves of version 1 succeeded"
        raise AssertionError(msg)
    require_equal(
        "first", _await_if_needed(make().load("versions")).messages[-1].text, "the last message after the conflict"
    )


@SESSIONS.add("writers", "If several threads save one version, exactly one succeeds.")
def _check_concurrent_saves(make: MakeSessions) -> None:
    """Fail unless exactly one of several threads can save the same version."""
    if not isinstance(make(), VersionedStore):
        return
    for attempt in range(4):
        ends: dict[str, BaseException | None] = {}
        start = threading.Barrier(WRITERS)

        threads = [
            threading.Thread(target=_save_as_writer, args=(make, f"writer {n}", f"writers {attempt}", start, ends))
            for n in range(WRITERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [error for error in ends.values() if error is not None]
        won = [name for name, error in ends.items() if error is None]
        require_equal(([], 1), (failed, len(won)), "errors, and number of saves that succeeded")
        require_equal(
            won, [m.text for m in _await_if_needed(make().load(f"writers {attempt}")).messages], "stored messages"
        )


def _save_as_writer(
    make: MakeSessions, name: str, id_: str, start: threading.Barrier, ends: dict[str, BaseException | None]
) -> None:
    """Load a session, wait for the other writers, and save it; store None in *ends* for a success, or the error."""
    try:
        store = make()
        loaded = _await_if_needed(store.load(id_))
    except BaseException as error:  # noqa: BLE001 - the caller reports it
        ends[name] = error
        start.abort()  # the other threads wait for this one
        return
    try:
        start.wait()
        _await_if_needed(store.save(attrs.evolve(loaded, messages=loaded.messages.append(UserMessage(name)))))
        ends[name] = None
    except (SessionConflict, threading.BrokenBarrierError):
        pass
    except Exception as error:  # noqa: BLE001 - the caller reports it
        ends[name] = error


@SESSIONS.add("list", "`list` returns each session once until `delete` removes it.")
def _check_list(make: MakeSessions) -> None:
    """Fail unless ``list`` returns each session once until it is deleted."""
    store = make()
    if not (isinstance(store, VersionedStore) and isinstance(store, DeletingStore) and hasattr(store, "list")):
        return
    before = len(_await_if_needed(store.list()))
    for session_id in ("listed one", "listed two"):
        _save_history(store, session_id)
    found = [info.session_id for info in _await_if_needed(make().list()) if info.session_id.startswith("listed")]
    require_equal(
        (["listed one", "listed two"], before + 2),
        (sorted(found), len(_await_if_needed(make().list()))),
        "listed sessions",
    )
    _await_if_needed(make().delete("listed one"))
    _await_if_needed(make().delete("listed one"))
    require_equal(before + 1, len(_await_if_needed(make().list())), "number of sessions after `delete`")
    require_equal([], list(_await_if_needed(make().load("listed one")).messages), "messages of a deleted session")


@SESSIONS.add("delete", "`delete` removes a session, and raises nothing if it does not exist.")
def _check_delete(make: MakeSessions) -> None:
    """Fail unless ``delete`` removes a session, and raises nothing for an unknown one."""
    store = make()
    if not isinstance(store, DeletingStore):
        return
    is_whole = isinstance(store, VersionedStore)
    if is_whole:
        _save_history(store, "delete")
    else:
        _await_if_needed(make().save_history("delete", HISTORY))
    for session_id in ("delete", "delete", "nobody"):
        _await_if_needed(make().delete(session_id))
    left = (
        _await_if_needed(make().load("delete")).messages if is_whole else _await_if_needed(make().get_history("delete"))
    )
    require_equal([], list(left), "messages of a deleted session")
    if isinstance(store, StateStore):
        require_equal(None, _await_if_needed(make().get_state("delete")), "state of a deleted session")


@SESSIONS.add("conversation", "An engine continues a conversation from the store alone.")
def _check_conversation(make: MakeSessions) -> None:
    """Fail unless an engine continues a conversation from the store alone."""
    for number, words in enumerate(("one", "two", "three")):
        agent = AgentDefinition("guide", model="anthropic/claude-haiku-4-5")
        with Engine([agent], models=ScriptedModel([text("yes")]), pricing=None, sessions=make()) as engine:
            result = engine.run_sync(agent, words, session_id="conversation")
        require(result.session_saved, f"the session was not saved: {result.warnings}")
        require_equal(2 * number + 2, len(result.state.message_history), "messages of the conversation")


@SESSIONS.add(
    "question",
    "If the store saves states, the next message answers a question, also with another engine and store object.",
)
def _check_answer_in_next_message(make: MakeSessions) -> None:
    if not isinstance(make(), StateStore | VersionedStore):
        return
    agent = AgentDefinition("waiter", model="anthropic/claude-haiku-4-5", handle_steps=_asking_handler)
    outputs: list[Any] = []
    for words in ("A table, please.", "four"):
        with Engine([agent], models=ScriptedModel([text("I see.")]), pricing=None, sessions=make()) as engine:
            outputs.append(engine.run_sync(agent, words, session_id="question").output)
    require_equal([None, "a table for four"], outputs, "outputs of both messages")


def _await_if_needed(value: Any) -> Any:
    """Return *value*, or the result of an awaitable, run in a new event loop."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        """Return the result of the awaitable."""
        return await value

    return asyncio.run(wait())


def _save_history(store: Any, session_id: str) -> Any:
    """Save ``HISTORY`` as the whole history of a session, and return the saved session."""
    loaded = _await_if_needed(store.load(session_id))
    return _await_if_needed(store.save(attrs.evolve(loaded, messages=type(loaded.messages)(HISTORY))))
