"""
``check_sessions``: our stores keep the promises, and a store that breaks one is told which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine
from stepengine.sessions import DocumentSessions, JournalLocation
from stepengine.testing import ScriptedModel, check_sessions
from tests.sessions.stores import KINDS, Histories, store_of


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC232")
@pytest.mark.parametrize("kind", KINDS)
def test_our_stores_keep_the_promises(kind: str, tmp_path: Path) -> None:
    memory = store_of("memory", tmp_path)
    check_sessions(lambda: memory if kind == "memory" else store_of(kind, tmp_path))


@pytest.mark.spec("ecosystem:EC232")
def test_a_store_of_histories_keeps_the_promises() -> None:
    one = Histories()
    check_sessions(lambda: one)


class Documents(DocumentSessions):
    """
    The smallest store of documents.
    """

    def __init__(self, kept: dict[str, str], folder: Path) -> None:
        super().__init__()
        self.kept, self.folder = kept, folder

    def read_document(self, key: str) -> str | None:
        return self.kept.get(key)

    def write_document(self, key: str, text: str | None, replaces: str | None) -> bool:
        if self.kept.get(key) != replaces:
            return False
        self.kept.pop(key, None)
        self.kept.update({} if text is None else {key: text})
        return True

    def list_keys(self) -> list[str]:
        return list(self.kept)

    def get_journal_location(self, session_id: str) -> JournalLocation:
        return JournalLocation(folder=self.folder / session_id.encode().hex()[:60])


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC232")
def test_a_store_of_documents_keeps_the_promises(tmp_path: Path) -> None:
    kept: dict[str, str] = {}
    check_sessions(lambda: Documents(kept, tmp_path))


@pytest.mark.parametrize("kind", ["folder", "database", "memory"])
def test_a_deleted_session_of_a_document_store_does_not_return(kind: str, tmp_path: Path) -> None:
    class Store(Documents):
        memory: dict[str, Any] = {}

        def get_journal_location(self, session_id: str) -> JournalLocation:
            places: dict[str, JournalLocation] = {
                "folder": JournalLocation(folder=tmp_path / session_id),
                "database": JournalLocation(database=tmp_path / "runs.db", prefix=f"{session_id}-"),
                "memory": JournalLocation(memory=self.memory.setdefault(session_id, {})),
            }
            return places[kind]

    model, store = ScriptedModel(["one", "two", "three"]), Store({}, tmp_path)
    with Engine([AgentDefinition("a", model="test/m")], models=model, sessions=store) as engine:
        for session_id, prompt in (("a", "my secret"), ("b", "other")):
            engine.run_sync("a", prompt, session_id=session_id)
        store.delete("a")
        engine.run_sync("a", "hello", session_id="a")
        kept = store.get_history("b")

    assert ["hello"] == [message.text for message in model.calls[2].messages]
    assert ["other", "two"] == [message.text for message in kept]


class ForgetsTheLast(Documents):
    def get_history(self, session_id: str) -> Any:
        return super().get_history(session_id)[:-1]


class IgnoresCase(Documents):
    def read_document(self, key: str) -> str | None:
        found = super().read_document(key.lower())
        return None if found is None else found.replace('"ann:chat"', f'"{key[-8:]}"')

    def write_document(self, key: str, text: str | None, replaces: str | None) -> bool:
        self.kept.pop(key.lower(), None)
        self.kept[key.lower()] = str(text)
        return True


class NeverForgets(Documents):
    def set_cached(self, key: str, value: object, ttl: float | None = None) -> None:
        super().set_cached(key, value)


class Overwrites(Documents):
    def save(self, session: Any) -> Any:
        saved = super().load(session.session_id).version
        return super().save(type(session)(info=session.info, messages=session.messages, version=saved))


class WritesInTwoSteps(Documents):
    def write_document(self, key: str, text: str | None, replaces: str | None) -> bool:
        import time

        if self.kept.get(key) != replaces:
            return False
        time.sleep(0.01)
        self.kept[key] = str(text)
        return True


class NeverDeletes(Documents):
    def delete(self, session_id: str) -> None:
        pass


class LosesJournals(Documents):
    def get_journal_location(self, session_id: str) -> JournalLocation:
        return JournalLocation(memory={})


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (ForgetsTheLast, "history"),
        (IgnoresCase, "ids"),
        (NeverForgets, "cache"),
        (Overwrites, "versions"),
        (WritesInTwoSteps, "writers"),
        (NeverDeletes, "list"),
        (LosesJournals, "question"),
    ],
)
def test_a_broken_promise_is_named_and_can_be_checked_alone(
    kind: type[Documents], promise: str, tmp_path: Path
) -> None:
    for only in (promise, ""):
        kept: dict[str, str] = {}
        with pytest.raises(AssertionError, match=f"broken promise '{promise}'") as caught:
            check_sessions(lambda kept=kept: kind(kept, tmp_path), only=only)  # type: ignore[misc]

        assert f"check_sessions(make, only={promise!r})" in str(caught.value)


class Loses(Histories):
    """
    An asynchronous store that stores one message less.
    """

    async def save_history(self, session_id: str, messages: Any) -> None:
        await super().save_history(session_id, messages[1:])


class KeepsDeleted(Histories):
    """
    A store of histories whose deleted sessions return.
    """

    async def delete(self, session_id: str) -> None:
        pass


@pytest.mark.spec("ecosystem:EC232")
def test_a_store_of_histories_that_does_not_delete_is_named() -> None:
    one = KeepsDeleted()
    with pytest.raises(AssertionError, match="broken promise 'delete'"):
        check_sessions(lambda: one, only="delete")


def test_an_asynchronous_store_that_loses_a_message_is_named() -> None:
    one = Loses()
    with pytest.raises(AssertionError, match="broken promise 'history'"):
        check_sessions(lambda: one)


@pytest.mark.parametrize("failing", [1, 8])
def test_a_store_that_fails_to_load_is_reported(failing: int, tmp_path: Path) -> None:
    """
    The other writers wait for those that fail.
    """
    kept: dict[str, str] = {}
    left = iter(range(failing))

    class Unreachable(Documents):
        def load(self, session_id: str) -> Any:
            if session_id.startswith("writers") and next(left, None) is not None:
                raise ConnectionError("the store is unreachable")
            return super().load(session_id)

    with pytest.raises(AssertionError, match="the store is unreachable"):
        check_sessions(lambda: Unreachable(kept, tmp_path), only="writers")
