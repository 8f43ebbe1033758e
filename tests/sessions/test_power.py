"""
The power goes while sessions are saved: what a save has returned is there, and another save is there completely or not at all.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.sessions import FileSessions
from tests.power import Power

HISTORIES = ["a", "abc", "abcde", "axcde", "axcdefg", "x"]
"""Saved one after the other, a message each letter: histories that grow, and two that were changed."""


def talk(letters: str) -> Transcript:
    kinds = (UserMessage, AssistantMessage)
    return Transcript([kinds[n % 2](f"{letter}{'.' * 400}") for n, letter in enumerate(letters)])


@pytest.mark.deep
@pytest.mark.spec("reliability:SS02", "requirements:L11")
@pytest.mark.parametrize("with_state", [False, True])
def test_saved_sessions_survive_power_loss_at_any_point(with_state: bool, tmp_path: Path) -> None:
    saved = [0]
    (tmp_path / "disk").mkdir()
    with Power(tmp_path / "disk", lambda: saved[-1]) as power:
        store = FileSessions(tmp_path / "disk" / "of" / "sessions")
        session = store.load("x")
        for letters in HISTORIES:
            messages = talk(letters)
            state = AgentState("r", "a", message_history=messages) if with_state else None
            session = store.save(attrs.evolve(session, messages=messages, state=state))
            saved.append(session.version)
    images = 0
    for cut in power.cuts:
        for image in cut.images():
            images += 1
            there = FileSessions(image.written_to(tmp_path / str(images)) / "of" / "sessions")
            found = there.load("x")
            letters = "".join([message.text[0] for message in found.messages])
            assert found.version in (cut.noted, cut.noted + 1), image.what
            assert letters == ["", *HISTORIES][found.version], image.what
            assert (found.state is not None) == (with_state and found.version > 0), image.what
            if found.state is not None:
                assert found.messages == found.state.message_history
            again = there.save(attrs.evolve(found, messages=talk(f"{letters}!"), state=None))
            assert again.messages == there.load("x").messages

    assert saved[-1] == len(HISTORIES)
    assert images > 60
