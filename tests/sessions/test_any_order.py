"""
Every store of sessions, driven by the same steps in any order, against a dictionary.
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.transcript import Transcript
from stepengine.errors import SessionConflict
from tests.sessions.stores import KINDS, store_of

IDS = st.sampled_from(["a", "A", "b/../a"])


@attrs.define
class Kept:
    """
    What a session must be.
    """

    texts: list[str] = attrs.field(factory=list)
    version: int = 0
    turns: int = 0
    metadata: dict[str, Any] = attrs.field(factory=dict)
    children: tuple[str, ...] = ()
    parent: str | None = None


class Stores(RuleBasedStateMachine):
    """
    Stores that are saved to, saved to from an old version, changed, emptied and opened again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.seconds = count()
        self.stores = {kind: self.opened(kind) for kind in KINDS}
        self.model: dict[str, Kept] = {}
        self.old: dict[str, dict[str, list[Any]]] = {kind: {} for kind in KINDS}

    def opened(self, kind: str) -> Any:
        start = datetime(2026, 1, 2, tzinfo=UTC)
        return store_of(kind, Path(self.folder.name), clock=lambda: start + timedelta(seconds=next(self.seconds)))

    def kept(self, session_id: str) -> Kept:
        return self.model.setdefault(session_id, Kept())

    @rule(session_id=IDS, text=st.text(max_size=5), keep=st.integers(0, 9))
    def save(self, session_id: str, text: str, keep: int) -> None:
        """
        A history that grew, when all of it is kept, and else one that was cut.
        """
        for kind, store in self.stores.items():
            loaded = store.load(session_id)
            self.old[kind].setdefault(session_id, []).append(loaded)
            kinds = (UserMessage, AssistantMessage)
            base = loaded.messages[:keep]
            messages = Transcript([*base, kinds[len(base) % 2](text)])
            saved = store.save(attrs.evolve(loaded, messages=messages, turns=loaded.turns + 1))
            assert loaded.version + 1 == saved.version
        kept = self.kept(session_id)
        kept.texts, kept.version, kept.turns = [*kept.texts[:keep], text], kept.version + 1, kept.turns + 1

    @rule(session_id=IDS, back=st.integers(0, 5))
    def save_what_is_old(self, session_id: str, back: int) -> None:
        for kind, store in self.stores.items():
            olds = self.old[kind].get(session_id, [])
            if olds:
                with pytest.raises(SessionConflict):
                    store.save(attrs.evolve(olds[-1 - back % len(olds)], turns=99))

    @rule(session_id=IDS, texts=st.lists(st.text(max_size=3), max_size=2))
    def replace(self, session_id: str, texts: list[str]) -> None:
        for store in self.stores.values():
            store.replace(session_id, [UserMessage(text) for text in texts])
        kept = self.kept(session_id)
        kept.texts, kept.version = texts, kept.version + 1

    @rule(
        session_id=IDS, key=st.sampled_from("kl"), value=st.none() | st.integers(-9, 9) | st.lists(st.text(max_size=3))
    )
    def note(self, session_id: str, key: str, value: Any) -> None:
        for store in self.stores.values():
            store.set_metadata(session_id, key, value)
        kept = self.kept(session_id)
        kept.metadata = {k: v for k, v in {**kept.metadata, key: value}.items() if v is not None}
        kept.version += 1

    @rule(session_id=IDS, child=st.sampled_from(["child", "other"]))
    def begin_a_child(self, session_id: str, child: str) -> None:
        for store in self.stores.values():
            store.add_child(session_id, child)
        kept, begun = self.kept(session_id), self.kept(child)
        begun.parent, begun.metadata, begun.children, begun.version = session_id, {}, (), begun.version + 1
        kept.children, kept.version = tuple(dict.fromkeys([*kept.children, child])), kept.version + 1

    @rule(session_id=IDS)
    def delete(self, session_id: str) -> None:
        for kind, store in self.stores.items():
            store.delete(session_id)
            self.old[kind].pop(session_id, None)
        self.model.pop(session_id, None)

    @rule(kind=st.sampled_from([kind for kind in KINDS if kind != "memory"]))
    def open_again(self, kind: str) -> None:
        self.stores[kind] = self.opened(kind)

    @invariant()
    def every_store_holds_what_was_saved(self) -> None:
        for kind, store in self.stores.items():
            assert set(self.model) == {info.session_id for info in store.list()}, kind
            for session_id, kept in self.model.items():
                found = store.load(session_id)
                info = found.info
                seen = Kept(
                    [message.text for message in found.messages], found.version, found.turns, dict(info.metadata),
                    info.child_session_ids, info.parent_session_id,
                )  # fmt: skip
                assert (kind, kept, ()) == (kind, seen, found.repairs)

    def teardown(self) -> None:
        self.folder.cleanup()


TestStores = pytest.mark.deep(
    pytest.mark.spec("requirements:L3", "requirements:L11", "requirements:B1")(Stores.TestCase)
)
TestStores.settings = settings(max_examples=15, stateful_step_count=20)
