"""
A store of any kind, as the engine and the hooks use it.
"""

from __future__ import annotations

import threading

import pytest

from stepengine.data.messages import AssistantMessage, ToolCallPart, UserMessage
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.sessions.run_hooks import SessionStoreAdapter
from stepengine.sessions.session import Session, SessionInfo
from tests.sessions.stores import Histories

HISTORY = Transcript([UserMessage("Hi."), AssistantMessage("Hello.")])
CUT = [UserMessage("Hi."), AssistantMessage([ToolCallPart("c1", "add", {})])]


class States(Histories):
    """A store that also keeps what the last run left, and notes the thread that each of its methods ran in."""

    def __init__(self, *, blocking=False):
        super().__init__()
        self.blocking = blocking
        self.states = {}
        self.threads = set()

    def get_state(self, session_id):
        self.threads.add(threading.get_ident())
        return self.states.get(session_id)

    def save_state(self, session_id, state):
        self.threads.add(threading.get_ident())
        self.states[session_id] = state


def session(history=HISTORY):
    state = AgentState(agent_id="clerk", message_history=history)
    return Session(
        info=SessionInfo(session_id="u:1", agent_id="clerk"), messages=history, state=state, turns=3, journal="{}\n"
    )


async def test_store_with_states_returns_the_last_saved_state() -> None:
    store, whole = SessionStoreAdapter(States()), session()

    await store.save(whole)
    loaded = await store.load("u:1")

    assert (whole.state, 3, "{}\n", "clerk") == (loaded.state, loaded.turns, loaded.journal, loaded.info.agent_id)
    assert whole.messages == loaded.messages


@pytest.mark.parametrize("history", [[UserMessage("Ho.")], CUT], ids=["another", "mended"])
async def test_state_that_does_not_match_the_loaded_history_is_dropped(history) -> None:
    store = SessionStoreAdapter(States())
    await store.save(session())
    store.store.kept["u:1"] = history

    loaded = await store.load("u:1")

    assert (None, None, 0) == (loaded.state, loaded.journal, loaded.turns)
    assert bool(loaded.repairs) == (history is CUT)


@pytest.mark.parametrize("blocking", [True, False])
async def test_blocking_store_runs_in_a_thread_others_on_the_loop(blocking) -> None:
    store = States(blocking=blocking)

    await SessionStoreAdapter(store).save(session())
    await SessionStoreAdapter(store).load("u:1")

    assert blocking == (threading.get_ident() not in store.threads)
