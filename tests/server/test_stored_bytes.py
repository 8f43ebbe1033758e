"""Bytes that clients send are stored at most three times, whatever the protocol and however often they are part of something stored."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Ask, Engine
from stepengine.adapters.ag_ui import page_hooks
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.state import AgentState
from stepengine.errors import JournalError
from stepengine.journal import FileJournal
from stepengine.server.ledger import Ledger
from stepengine.server.stored_states import decode_state_with_references, encode_state_with_references
from stepengine.testing import ScriptedModel
from tests.server.house import House, ended

pytestmark = pytest.mark.leaks_allowed(
    "the server outlasts a test: its threads and what its runs hold are the module's"
)
MODEL = "anthropic/claude-sonnet-4-5"
RANDOM = random.Random(1)


def text_of(size: int, letters: str = string.ascii_lowercase) -> str:
    return "".join(RANDOM.choices(letters, k=size))


def asks(ctx: Any) -> Any:
    yield from Ask("On which day?")
    return "Thanks."


def make_house(folder: Path, **options: Any) -> House:
    house = House(folder, shares=["note"], **options)
    agents = [AgentDefinition("chat", model=MODEL), AgentDefinition("asker", handle_steps=asks)]
    house.engine = lambda: Engine(agents, models=ScriptedModel(lambda _: "Fine."), hooks=page_hooks())  # type: ignore[method-assign]
    return house


@pytest.fixture(scope="module", params=["folder", "database"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A server for all tests of the file: each has texts and conversations of its own."""
    pytest.importorskip("ag_ui", reason="needs the extra 'ag-ui'")
    folder = tmp_path_factory.mktemp("house")
    places = {} if request.param == "folder" else {"runs": folder / "runs.db"}
    with make_house(folder, **places).open() as opened:
        yield opened


def say(client: httpx2.Client, thread: str, text: str, **more: Any) -> httpx2.Response:
    body = {"threadId": thread, "runId": "r", "messages": [{"id": "m", "role": "user", "content": text}], **more}
    answer = client.post("/ag-ui/chat", json=body)
    assert "RUN_FINISHED" in answer.text, answer.text[-500:]
    return answer


def chat(client: httpx2.Client, chat: str, text: str) -> None:
    parts = [{"type": "text", "text": text}]
    answer = client.post("/vercel/chat", json={"id": chat, "messages": [{"id": "m", "role": "user", "parts": parts}]})
    assert "[DONE]" in answer.text, answer.text


def run(client: httpx2.Client, **body: Any) -> str:
    answer = client.post("/runs", json={"agent": "chat", "prompt": "hi", **body})
    assert 202 == answer.status_code, answer.text
    name = str(answer.json()["run_id"])
    assert "completed" == ended(client, name)["status"]
    return name


def send(client: httpx2.Client, what: str, marked: str, talk: str) -> None:
    """Send *marked*, a long text, in one of the places of a conversation where a client may send one."""
    match what:
        case "prompt of AG-UI":
            say(client, talk, marked)
        case "context of AG-UI":
            say(client, talk, "hi", context=[{"description": "d", "value": marked}])
        case "tools of AG-UI":
            tool = {"name": "look", "description": marked, "parameters": {"type": "object", "properties": {}}}
            say(client, talk, "hi", tools=[tool])
        case "state of AG-UI":
            say(client, talk, "hi", state={"note": marked})
        case "prompt of the AI SDK":
            chat(client, talk, marked)
        case "prompt":
            run(client, prompt=marked, session_id=talk, turn=True)
        case "params":
            run(client, params={"note": marked}, session_id=talk, turn=True)
        case "metadata":
            run(client, metadata={"note": marked}, session_id=talk, turn=True)
        case _:
            raise AssertionError(what)


SENT = [
    "prompt of AG-UI", "context of AG-UI", "tools of AG-UI", "state of AG-UI", "prompt of the AI SDK", "prompt", "params", "metadata",
]  # fmt: skip


SENT_TO = [
    *[("folder", what, 40_000) for what in SENT],
    ("folder", "prompt", 5_000),
    *[("database", what, 40_000) for what in ("prompt", "state of AG-UI")],
]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV35")
@pytest.mark.parametrize(("house", "what", "size"), SENT_TO, indirect=["house"])
def test_sent_text_is_stored_at_most_three_times(house: House, what: str, size: int) -> None:
    marked = text_of(size)
    with house.client() as client:
        send(client, what, marked, f"{what} of {size}")

    assert 1 <= sum(value.count(marked[-200:]) for value in stored_texts(house)) <= 3


def stored_texts(house: House) -> list[str]:
    """Return the texts of all journals and the values of the ledger."""
    place = Path(house.options.get("runs", house.folder / "runs"))
    ledger = Ledger(place)
    try:
        tables = [name for (name,) in ledger.read("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [row for table in tables for row in ledger.read(f"SELECT * FROM {table}")]
    finally:
        ledger.close()
    values = [value if isinstance(value, str) else value.decode() for row in rows for value in row if isinstance(value, str | bytes)]  # fmt: skip
    return [*values, *[path.read_text() for path in (place.glob("*.jsonl") if place.is_dir() else ())]]


@pytest.mark.spec("studio:SV35")
def test_non_latin_text_is_stored_unescaped_and_found(house: House) -> None:
    with house.client() as client:
        name = run(client, prompt="Ärger mit \u0434\u043e\u043c\u043e\u043c")
        found = [one["run_id"] for one in client.get("/runs", params={"search": "\u0434\u043e\u043c"}).json()["runs"]]

    assert [name] == found
    assert not [value for value in stored_texts(house) if "\\u0434" in value]


@pytest.mark.spec("studio:SV11", "studio:SV35")
def test_session_continues_with_its_long_texts(house: House) -> None:
    first, second = text_of(40_000), text_of(3_000)
    with house.client() as client:
        say(client, "t", first)
        say(client, "t", second)
        answer = client.post("/ag-ui/chat/connect", json={"threadId": "t", "runId": "r", "messages": []})
    lines = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    (shown,) = [one["messages"] for one in lines if one["type"] == "MESSAGES_SNAPSHOT"]

    assert [first, "Fine.", second, "Fine."] == [one["content"] for one in shown]


@pytest.mark.spec("studio:SV32")
def test_stored_session_state_counts_as_stored_bytes(house: House) -> None:
    with house.client("bob") as client:
        name = run(client, session_id="s", turn=True)
    place = Path(house.options.get("runs", house.folder / "runs"))
    ledger = Ledger(place)
    try:
        before = ledger.measure_usage("bob").stored_bytes
        more = "UPDATE served_left SET state = state || 'abc' WHERE run = ?"
        ledger.write([lambda database: database.execute(more, (name,))])
        after = ledger.measure_usage("bob").stored_bytes
    finally:
        ledger.close()

    assert 3 == after - before


# --- the parts --------------------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=30),
    st.integers(400, 700).map(lambda size: "a" * size),
    st.text(max_size=4).map(lambda text: text * 300),
)
"""Texts on both sides of the length from which they are shared."""


@given(
    st.lists(TEXTS, max_size=6),
    st.dictionaries(st.sampled_from(["$blob", "$obj", "a"]), TEXTS),
    st.lists(TEXTS, max_size=3),
)
def test_state_roundtrips_with_or_without_its_texts_in_the_journal(
    said: list[str], context: dict[str, str], recorded: list[str]
) -> None:
    messages = [UserMessage(text) if number % 2 == 0 else AssistantMessage(text) for number, text in enumerate(said)]
    state = AgentState.from_messages(messages, context=context)
    journal: Any = FakeJournal([*said[::2], *recorded])

    assert state == decode_state_with_references(encode_state_with_references(state, journal), journal)


class FakeJournal:
    """A journal with some texts in one record."""

    name = "a journal"

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def content(self) -> bytes:
        return json.dumps({"kind": "blob", "data": {"texts": self.texts}}).encode()


def test_state_is_stored_whole_without_a_readable_journal(tmp_path: Path) -> None:
    state = AgentState.from_messages([UserMessage("a" * 1_000)])
    journal = FileJournal(tmp_path / "missing.jsonl")

    assert state == decode_state_with_references(encode_state_with_references(state, journal), journal)


def test_state_with_a_missing_text_raises() -> None:
    state, journal = AgentState.from_messages([UserMessage("a" * 1_000)]), FakeJournal(["a" * 1_000])
    stored = encode_state_with_references(state, journal)  # type: ignore[arg-type]
    journal.texts = []

    with pytest.raises(JournalError, match="a journal lacks a text"):
        decode_state_with_references(stored, journal)  # type: ignore[arg-type]
