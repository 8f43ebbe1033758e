"""
A journal that this user's runs did not write performs nothing unasked; a run of this user that was killed goes on as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import (
    AgentCall,
    AgentDefinition,
    Answer,
    Ask,
    Complete,
    Engine,
    Hooks,
    Perform,
    RunResult,
    ToolCall,
    tool,
)
from stepengine.cli.commands.scrub import scrub
from stepengine.cli.exits import Exit
from stepengine.data.json import freeze, thaw
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.outcomes import Value
from stepengine.data.tools import ToolAnnotations
from stepengine.debugging import debug
from stepengine.errors import JournalError, JournalLocked
from stepengine.journal import FileJournal, Journal, MemoryJournal, SigningKey, SqliteJournal, repair, undo
from stepengine.journal import scrub as scrub_journal
from stepengine.journal.forks import branch
from stepengine.journal.history import History
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.pending_items import find_unreceived_input
from stepengine.journal.provenance import replace_records_by_derived
from stepengine.journal.records import Input, Intent, Result
from stepengine.journal.unknown_calls import refuse_unknown_calls
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import child_tools, file_tools, spawn_tools
from stepengine.workspace.atomic import create_folder_durably
from stepengine.workspace.user_state import RUNS, get_user_state_folder
from tests.journal.mutants import resealed

pytestmark = pytest.mark.spec("requirements:X72")

STORES: dict[str, Callable[..., Any]] = {
    "file": lambda folder, name, **options: FileJournal(folder / f"{name}.jsonl", **options),
    "sqlite": lambda folder, name: SqliteJournal(folder / "runs.db", name),
}


class World:
    """An agent with tools and a handler that act on the world, and what they did."""

    def __init__(self, *, by_model: bool = False) -> None:
        self.done: list[str] = []

        @tool(category="write", annotations=ToolAnnotations(idempotent=True), requires_permission=False)
        def put(text: str) -> str:
            """Write."""
            self.done.append(f"put {text}")
            return "written"

        @tool(category="execute", requires_permission=False)
        def run(text: str) -> str:
            """Run."""
            self.done.append(f"run {text}")
            return "ran"

        @tool(category="read", requires_permission=False)
        def look(text: str) -> str:
            """Look."""
            self.done.append(f"look {text}")
            return "seen"

        @tool(category="execute", requires_permission=False)
        def both(text: str) -> Generator[Any, Any, str]:
            """Run, and run again."""
            yield ToolCall("run", {"text": f"{text} 1"})
            yield ToolCall("run", {"text": f"{text} 2"})
            return "both"

        def note(text: str) -> str:
            self.done.append(f"note {text}")
            return text

        def handle_steps(ctx: Any) -> Generator[Any, Any, Any]:
            yield ToolCall("look", {"text": "a"})
            yield ToolCall("put", {"text": "b"})
            yield ToolCall("run", {"text": "c"})
            yield ToolCall("both", {"text": "d"})
            yield Perform(note, "e")
            yield Perform.idempotent(note, "f")

        tools: list[Any] = [put, run, look, both]
        calls = [
            tool_call(name, {"text": each}) for name, each in zip(("look", "put", "run", "both"), "abcd", strict=True)
        ]
        self._replies = [*calls, text("done")]
        steps = None if by_model else handle_steps
        self.agent = AgentDefinition("actor", tools=tools, handle_steps=steps)

    def engine(self, interactor: Any = None) -> Engine:
        return Engine([self.agent], models=ScriptedModel(self._replies), interactor=interactor)


@cache
def shared_world(*, by_model: bool) -> World:
    """Return the world of the runs that come one after the other: to make its tools takes longer than most of them."""
    return World(by_model=by_model)


class Says:
    """A person who gives the same answer to everything."""

    def __init__(self, answer: str) -> None:
        self.answer, self.asked = answer, list[Any]()

    def ask(self, question: Any) -> Any:
        self.asked.append(question)
        return self.answer


def resumed(
    journal: Journal, *, by_model: bool, person: Any = None, **options: Any
) -> tuple[list[str], RunResult[Any]]:
    world = shared_world(by_model=by_model)
    world.done.clear()
    with world.engine(person) as engine:
        result = engine.resume_sync(journal, on_divergence="stop", **options)
    return list(world.done), result


def recorded(folder: Path, *, by_model: bool = True, store: str = "file", **options: Any) -> Any:
    """Return the journal of a run that has ended."""
    whole = STORES[store](folder, "whole", **options)
    with shared_world(by_model=by_model).engine() as engine:
        engine.run_sync("actor", "act", journal=whole).unwrap()
    return whole


def lines_of(journal: Journal) -> list[bytes]:
    return journal.content().splitlines(keepends=True)


def cut_file(path: Path, lines: Sequence[bytes], **options: Any) -> FileJournal:
    """Return a journal of these lines, as a run leaves them that is killed behind them."""
    path.write_bytes(b"".join(lines))
    return FileJournal(path, **options)


ASKS_FOR_A_CALL = re.compile(rb'"effect":\{"type":"(?:tool_call|perform)"|"value":\{"type":"model_reply"')


def killed_everywhere(
    store: str, folder: Path, *, by_model: bool, at_calls: bool = False, step: int = 1
) -> Iterator[Any]:
    """
    Yield the journal of a run as it is after each of its lines, as if the run had been killed there.

    With *at_calls* only where its last line asks for something: a call that has begun, or a reply of the model.
    """
    lines = lines_of(recorded(folder, by_model=by_model, store=store))
    counts = [n for n in range(2, len(lines), step) if not at_calls or ASKS_FOR_A_CALL.search(lines[n - 1])]
    assert counts, "no line asks for a call"
    for count in counts:
        if store == "file":
            yield cut_file(folder / f"cut-{count}.jsonl", lines[:count])
            continue
        cut = STORES[store](folder, f"cut-{count}")
        cut.lock()()
        cut.append_bytes(b"".join(lines[:count]), 0)
        yield cut


def become_somebody_else(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(folder / "another-state"))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(("by_model", "in_doubt"), [(True, "retry"), (False, "fail")])
def test_unknown_journal_performs_no_recorded_call(
    by_model: bool, in_doubt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the handler asks for now is asked for by this user's own code, and is done; what the record asks for is not."""
    # Where nothing has begun, nothing is in doubt.
    cuts = list(killed_everywhere("file", tmp_path, by_model=by_model, at_calls=in_doubt != "retry"))
    become_somebody_else(monkeypatch, tmp_path)
    suspended = 0
    for cut in cuts:
        history = cut.history()
        begun = [
            i for a, i in history.intents.items() if a not in history.results and i.type in ("tool_call", "perform")
        ]
        done, result = resumed(cut, by_model=by_model, in_doubt=in_doubt)
        if begun and begun[0].subject != "look":
            assert [] == done
            assert "suspended" == result.status
            assert result.pending_questions[0].id.startswith("doubt:")
            suspended += 1
        elif by_model and "suspended" == result.status:
            assert [] == done
            suspended += 1

    assert suspended >= 4


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(("store", "by_model", "step"), [("file", False, 3), ("sqlite", True, 9)])
def test_own_killed_run_resumes_without_questions(store: str, by_model: bool, step: int, tmp_path: Path) -> None:
    for cut in killed_everywhere(store, tmp_path, by_model=by_model, step=step):
        person = Says("no")
        _, result = resumed(cut, by_model=by_model, person=person, in_doubt="retry")

        assert "completed" == result.status
        assert [] == person.asked


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(("said", "by_model"), [("yes", True), ("no", True), ("no", False)])
def test_person_decides_each_call_of_an_unknown_journal(
    said: str, by_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = list(killed_everywhere("file", tmp_path, by_model=by_model, at_calls=True))
    become_somebody_else(monkeypatch, tmp_path)
    asked_in_all = 0
    for cut in cuts:
        person = Says(said)
        done, result = resumed(cut, by_model=by_model, person=person, in_doubt="retry")
        asked = [q.details["text"] if "text" in q.details else q.details["args"][0] for q in person.asked]
        texts = [each.partition(" ")[2] for each in done]

        assert "suspended" != result.status
        assert len(asked) <= 2
        asked_in_all += len(asked)
        if said == "yes":
            assert all(any(each.startswith(one) for each in texts) for one in asked)
        if said == "no" and asked:
            # A model that is told of the denial goes on with its script, which begins here with a look.
            assert (
                ["look a"] == done[:1] if by_model else not any(each.startswith(one) for each in texts for one in asked)
            )
    assert asked_in_all


@pytest.mark.deep
@pytest.mark.smoke
def test_trusted_unknown_journal_resumes_without_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = list(killed_everywhere("file", tmp_path, by_model=True, at_calls=True))
    become_somebody_else(monkeypatch, tmp_path)
    for cut in cuts:
        assert "completed" == resumed(cut, by_model=True, in_doubt="retry", trust=True)[1].status


@pytest.mark.parametrize("is_own", [True, False])
def test_fork_of_an_unknown_journal_asks_about_its_calls(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a reply of the model, whose call then comes from the record alone."""
    whole = recorded(tmp_path)
    replies = [a[1] for a, i in whole.history().intents.items() if i.type == "model_call" and not a[0]]
    if not is_own:
        become_somebody_else(monkeypatch, tmp_path)
    forked = World(by_model=True)
    with forked.engine() as engine:
        for at in replies[1:4]:
            result = engine.fork_sync(whole, at=at, allow_repeat=True)
            assert is_own == (result.status != "suspended")
    assert is_own == bool(forked.done)
    trusted = World(by_model=True)
    with trusted.engine() as engine:
        assert "suspended" != engine.fork_sync(whole, at=replies[1], allow_repeat=True, trust=True).status


@pytest.mark.parametrize("is_edited", [True, False])
def test_fork_ignores_recorded_approval_of_an_unknown_journal(
    is_edited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is the handler's own, so only the recorded yes could let it run."""
    done = list[str]()
    agent = make_keeper(done)
    whole = FileJournal(tmp_path / "whole.jsonl")
    with Engine([agent], interactor=Says("yes"), permissions=ASKS) as engine:
        engine.run_sync("keeper", "act", journal=whole).unwrap()
    (asked,) = [address[1] for address, intent in whole.history().intents.items() if intent.type == "ask"]
    become_somebody_else(monkeypatch, tmp_path)
    with Engine([agent], permissions=ASKS) as engine:
        options: dict[str, Any] = {"edit": ["yes"]} if is_edited else {}
        result = engine.fork_sync(whole, at=asked, allow_repeat=True, **options)

    assert (["a", "a"] if is_edited else ["a"]) == done
    assert is_edited == (result.status != "suspended")


def make_run(done: list[str]) -> Any:
    """Return a tool that asks for no permission and notes its calls."""

    @tool(category="execute", requires_permission=False)
    def run(text: str) -> str:
        """Run."""
        done.append(text)
        return "ran"

    return run


def make_keeper(done: list[str]) -> AgentDefinition:
    """Return an agent whose handler calls a tool for which permission is asked."""

    @tool(category="write")
    def keep(text: str) -> str:
        """Write."""
        done.append(text)
        return "kept"

    def handle_steps(ctx: Any) -> Generator[Any, Any, Any]:
        yield Perform(str, "a")
        yield ToolCall("keep", {"text": "a"})

    return AgentDefinition("keeper", tools=[keep], handle_steps=handle_steps)


ASKS = Policy([Rule.ask_for_tool("keep")])


@pytest.mark.parametrize(("key", "entry"), [("text", "resume"), ("id", "resume, trust=False"), ("id", "fork")])
def test_recorded_answer_before_its_question_approves_nothing(
    key: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    agent = make_keeper(done)
    journal = FileJournal(tmp_path / "run.jsonl")
    with Engine([agent], permissions=ASKS) as engine:
        (question,) = engine.run_sync("keeper", "act", journal=journal).pending_questions
    records = list(journal.records())
    (place,) = [n for n, record in enumerate(records) if isinstance(record, Intent) and record.type == "ask"]
    answer = {"type": "answer", "question_id": getattr(question, key), "answer": {"type": "answer", "text": "yes"}}
    journal.replace([*records[:place], Input("", 0, 0, answer)])
    become_somebody_else(monkeypatch, tmp_path)
    with Engine([agent], permissions=ASKS) as engine:
        if entry == "fork":
            result = engine.fork_sync(journal, at=0)
        else:
            result = engine.resume_sync(journal, **({"trust": False} if "trust" in entry else {}))
            assert [] == done
            result = engine.resume_sync(journal, answers={question.id: "no"})

    assert [] == done
    assert ("suspended" if entry == "fork" else "completed") == result.status


@pytest.mark.parametrize("store", STORES)
@pytest.mark.spec("replay:J38")
def test_resume_changes_no_journal_that_a_run_writes(store: str, tmp_path: Path) -> None:
    """Not even to remove approvals, which happens before the run starts."""
    agent = make_keeper([])
    journal = STORES[store](tmp_path, "run")
    with Engine([agent], permissions=ASKS) as engine:
        (question,) = engine.run_sync("keeper", "act", journal=journal).pending_questions
        records = list(journal.records())
        (place,) = [n for n, record in enumerate(records) if isinstance(record, Intent) and record.type == "ask"]
        answer = {"type": "answer", "question_id": question.id, "answer": {"type": "answer", "text": "yes"}}
        journal.replace([*records[:place], Input("", 0, 0, answer)])
        before = journal.content()
        with contextlib.closing(journal.writer()):
            with pytest.raises(JournalLocked):
                engine.resume_sync(STORES[store](tmp_path, "run"), trust=False)
            with pytest.raises(JournalLocked):
                MemoryJournal(journal.lines()).copy_to(STORES[store](tmp_path, "run"))
        assert journal.content() == before


def test_mailbox_answer_next_to_an_unknown_journal_approves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stored question says that it is no permission; its fingerprint is still that of one."""
    done = list[str]()
    agent = make_keeper(done)
    journal = FileJournal(tmp_path / "run.jsonl")
    with Engine([agent], permissions=ASKS) as engine:
        (question,) = engine.run_sync("keeper", "act", journal=journal).pending_questions

    def lie(record: Any) -> Any:
        if not isinstance(record, Intent) or record.type != "ask":
            return record
        form = thaw(record.effect)
        del form["questions"][0]["tool_name"]
        return Intent(record.path, record.seq, freeze({**form, "purpose": "question"}), record.fp)

    journal.replace([lie(record) for record in journal.records()])
    journal.mailbox().send(MailboxMessage(kind="answer", topic=question.id, value="yes"))
    become_somebody_else(monkeypatch, tmp_path)
    with Engine([agent], permissions=ASKS) as engine:
        result = engine.resume_sync(journal)

    assert ([], "suspended") == (done, result.status)


def test_grandchild_from_an_unknown_journal_needs_approval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[str]()

    def grand_steps(ctx: Any) -> Generator[Any, Any, Any]:
        yield Perform(sent.append, f"grand {ctx.prompt}")

    def steps(ctx: Any) -> Generator[Any, Any, Any]:
        yield from AgentCall("grand", ctx.prompt)
        yield Perform(sent.append, ctx.prompt)

    grand = AgentDefinition("grand", handle_steps=grand_steps)
    kid = AgentDefinition("kid", spawnable_agents=["grand"], handle_steps=steps)
    lead = AgentDefinition("lead", tools=["start_agents"], spawnable_agents=["kid"])
    starts = tool_call("start_agents", {"agents": [{"agent_type": "kid", "prompt": "evil"}]})
    whole = FileJournal(tmp_path / "whole.jsonl")

    def make(*replies: Any) -> Engine:
        return Engine([lead, kid, grand], child_tools(), models=ScriptedModel([*replies, *[text("done")] * 5]))

    with make(starts) as engine:
        engine.run_sync("lead", "go", journal=whole).unwrap()
    assert ["grand evil", "evil"] == sent
    lines = lines_of(whole)
    begun = next(number for number, line in enumerate(lines) if b'"path":"1' in line)
    become_somebody_else(monkeypatch, tmp_path)
    sent.clear()
    for count in (begun, begun + 1, begun + 2):
        cut = cut_file(tmp_path / f"{count}.jsonl", lines[:count])
        with make() as engine:
            assert "suspended" == engine.resume_sync(cut, on_divergence="stop").status
        assert [] == sent, lines[count - 1]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("said", "way"),
    [("yes", "spawn_agents"), ("no", "start_agents"), (None, "start_agents")],
)
def test_child_from_an_unknown_journal_needs_approval(
    said: str | None, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each line, so that the child has not begun, or has begun and not ended."""
    sent = list[str]()

    def steps(ctx: Any) -> Generator[Any, Any, Any]:
        yield Perform(sent.append, ctx.prompt)

    mailer = AgentDefinition("mailer", handle_steps=steps)
    lead = AgentDefinition("lead", tools=[way], spawnable_agents=["mailer"])
    spawns = tool_call(way, {"agents": [{"agent_type": "mailer", "prompt": "evil"}]})

    def make(*replies: Any, interactor: Any = None) -> Engine:
        model = ScriptedModel([*replies, *[text("done")] * 5])
        return Engine([lead, mailer], [*spawn_tools(), *child_tools()], models=model, interactor=interactor)

    whole = FileJournal(tmp_path / "whole.jsonl")
    with make(spawns) as engine:
        engine.run_sync("lead", "go", journal=whole).unwrap()
    lines = lines_of(whole)
    replied = next(number for number, line in enumerate(lines) if b'"type":"model_reply"' in line)
    done = next(number for number, line in enumerate(lines) if b'"kind":"result","path":"1","seq":0' in line)
    become_somebody_else(monkeypatch, tmp_path)
    asked = 0
    for count in range(replied + 1, done):
        cut = cut_file(tmp_path / f"{count}.jsonl", lines[:count])
        sent.clear()
        person = Says(said) if said else None
        with make(interactor=person) as engine:
            result = engine.resume_sync(cut, on_divergence="stop")
            if said is None and result.status == "suspended":
                assert [] == sent
                answers = {question.id: "no" for question in result.pending_questions}
                result = engine.resume_sync(cut, answers=answers, on_divergence="stop")
                asked += 1
        asked += len(person.asked) if person else 0
        assert (["evil"] if said == "yes" else []) == sent[:1], lines[count - 1]
        assert "completed" == result.status, result.error

    assert asked


def test_changed_line_makes_a_journal_unknown(tmp_path: Path) -> None:
    """Though its checksums are right again; what comes before the change counts no more than what comes after it."""
    cut = list(killed_everywhere("file", tmp_path, by_model=False))[-1]
    lines = cut.content().splitlines(keepends=True)
    copy = FileJournal(tmp_path / "copy.jsonl")
    copy.path.write_bytes(b"".join(lines))
    assert "completed" == resumed(copy, by_model=False, in_doubt="retry")[1].status

    begun = next(n for n, line in enumerate(lines) if b'"tool_name":"put"' in line)
    forged = FileJournal(tmp_path / "forged.jsonl")
    forged.replace(cut.records()[: begun + 1])
    forged.path.write_bytes(forged.path.read_bytes().replace(b'"text":"b"', b'"text":"z"'))
    forged.path.write_bytes(resealed(forged.path.read_bytes()))
    done, result = resumed(forged, by_model=False)

    assert "suspended" == result.status
    assert [] == done


@pytest.mark.parametrize("why", ["none", "open to others"])
def test_without_private_state_folder_every_journal_is_unknown(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "none":
        for name in ("STEPENGINE_STATE_DIR", "XDG_STATE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
    else:
        folder = tmp_path / "state"
        folder.mkdir()
        folder.chmod(0o777)
        monkeypatch.setenv("STEPENGINE_STATE_DIR", str(folder))

    assert "suspended" == resumed(killed_at_reply(tmp_path), by_model=True)[1].status


def test_stable_recording_has_no_digests(tmp_path: Path) -> None:
    assert b'"mac"' not in recorded(tmp_path, stable=True).content()


def new_signing_key(folder: Path, name: str) -> Path:
    path = folder / name
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("forgery", ["a key of others", "a signature of nothing"])
def test_foreign_signature_makes_a_journal_unknown(
    forgery: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = killed_everywhere("file", tmp_path, by_model=False)
    cut = next(each for each in cuts if b'"tool_name":"put"' in each.content().splitlines()[-1])
    with monkeypatch.context() as other:
        become_somebody_else(other, tmp_path)
        FileJournal(cut.path, sign=new_signing_key(tmp_path, "evil")).writer().close()
    assert b'"type":"signature"' in cut.path.read_bytes().splitlines()[-1]
    if forgery == "a signature of nothing":
        *lines, last = lines_of(cut)
        cut.path.write_bytes(b"".join([*lines, re.sub(rb'"at":[0-9]+', b'"at":999999999999', last)]))
        cut.path.write_bytes(resealed(cut.path.read_bytes()))

    assert "suspended" == resumed(cut, by_model=False)[1].status


def test_killed_run_ending_with_its_signature_resumes_without_questions(tmp_path: Path) -> None:
    signer = SigningKey(new_signing_key(tmp_path, "audit"), records=9)
    lines = lines_of(recorded(tmp_path, sign=signer))
    for count in [n for n, line in enumerate(lines, 1) if b'"type":"signature"' in line][:-1]:
        cut = cut_file(tmp_path / f"cut-{count}.jsonl", lines[:count], sign=signer)
        person = Says("no")
        result = resumed(cut, by_model=True, person=person, in_doubt="retry")[1]

        assert "completed" == result.status
        assert [] == person.asked


# --- journals that are made of another one ----------------------------------------------------------------------------


def forked(source: FileJournal, target: FileJournal) -> None:
    last = max(seq for path, seq in source.history().results if not path)
    branch(source, last, into=target, allow_repeat=True)


def extended(source: FileJournal, target: FileJournal) -> None:
    target.path.write_bytes(source.path.read_bytes())
    with World(by_model=True).engine() as engine:
        assert "failed" != engine.resume_sync(target, on_divergence="extend").status


def forked_from_record(source: FileJournal, target: FileJournal) -> None:
    with World(by_model=True).engine() as engine:
        engine.fork_sync(source, tools="recorded", into=target)


def scrubbed(source: FileJournal, target: FileJournal) -> None:
    assert Exit.COMPLETED == scrub(str(source.path), target.path)


def repaired(source: FileJournal, target: FileJournal) -> None:
    repair(source, len(source.records()), target)


def signed(source: FileJournal, target: FileJournal) -> None:
    forked(source, FileJournal(target.path, sign=target.path.with_name("audit")))


COMMANDS = [forked, extended, forked_from_record, scrubbed, repaired, signed]


def is_known_after(commands: Sequence[Any], *, is_own: bool) -> bool:
    """Return whether the last journal of a chain resumes unasked after its run was killed: what tells it is in its lines."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        key = new_signing_key(folder, "audit")
        patch.setenv("STEPENGINE_STATE_DIR", str(folder / "state"))
        made: Any = recorded(folder)
        if not is_own:
            become_somebody_else(patch, folder)
        for number, command in enumerate(commands, 1):
            source, made = made, FileJournal(folder / f"{number}.jsonl")
            command(source, made)
        lines = lines_of(made)
        is_signed = b'"signed":"' in lines[0]
        killed = cut_file(folder / "killed.jsonl", lines[: line_of_reply(lines)], sign=key if is_signed else None)
        done, result = resumed(killed, by_model=True)
        assert bool(done) == (result.status != "suspended")
        return bool(done)


def line_of_reply(lines: Sequence[bytes]) -> int:
    """Return the number of the line of the reply that asks for a call of ``run``, from 1."""
    return next(n for n, line in enumerate(lines, 1) if b'"model_reply"' in line and b'"tool_name":"run"' in line)


def killed_at_reply(folder: Path) -> FileJournal:
    """Return the journal of a run that was killed behind the reply that asks for a call of ``run``."""
    lines = lines_of(recorded(folder))
    return cut_file(folder / "cut.jsonl", lines[: line_of_reply(lines)])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("is_own", [True, False])
def test_command_keeps_a_journal_as_known_as_its_source(command: Any, is_own: bool) -> None:
    assert is_own == is_known_after([command], is_own=is_own)


@pytest.mark.deep
@settings(max_examples=40)
@given(commands=st.lists(st.sampled_from(COMMANDS), min_size=2, max_size=4), is_own=st.booleans())
def test_chained_commands_keep_a_journal_as_known_as_before(commands: list[Any], is_own: bool) -> None:
    assert is_own == is_known_after(commands, is_own=is_own)


@pytest.mark.parametrize("made", ["fork", "replay", "scrub"])
@pytest.mark.parametrize("is_own", [True, False])
def test_in_memory_copy_of_an_unknown_journal_asks(
    made: str, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = killed_at_reply(tmp_path)
    if not is_own:
        become_somebody_else(monkeypatch, tmp_path)
    history = cut.history()
    with World(by_model=True).engine() as engine:
        if made == "fork":
            copy = branch(cut, max(seq for path, seq in history.results if not path))
        else:
            copy = scrub_journal(cut) if made == "scrub" else engine.replay_sync(cut).journal
    assert copy is not None
    done, result = resumed(copy, by_model=True, in_doubt="retry")

    assert is_own == (result.status != "suspended")
    assert is_own == bool(done)


@pytest.mark.parametrize("is_own", [True, False])
def test_fork_in_runs_folder_is_as_known_as_its_source(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recorded(tmp_path)
    if not is_own:
        become_somebody_else(monkeypatch, tmp_path)
    folder = get_user_state_folder()
    assert folder is not None
    create_folder_durably(folder, 0o700)
    create_folder_durably(folder / RUNS, 0o700)
    lines = lines_of(whole)
    replies = [r.seq for r in whole.records()[: line_of_reply(lines)] if r.kind == "result"]
    made = branch(whole, replies[-1], into=folder / RUNS / "fork.jsonl", allow_repeat=True)

    assert is_own == (resumed(made, by_model=True)[1].status != "suspended")


# --- other ways to perform what a record asks for -----------------------------------------------------------------------


@pytest.mark.parametrize(("by_model", "live"), [(True, ["tool_call"]), (False, ["tool_call", "perform"])])
def test_live_replay_performs_no_call_of_an_unknown_journal(
    by_model: bool, live: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except of a tool that only reads here. What the person trusts is performed."""
    whole = recorded(tmp_path, by_model=by_model)
    own, theirs, trusted = World(by_model=by_model), World(by_model=by_model), World(by_model=by_model)
    with own.engine() as engine:
        assert "completed" == engine.replay_sync(whole, live=live).status
    become_somebody_else(monkeypatch, tmp_path)
    with theirs.engine() as engine:
        result = engine.replay_sync(whole, live=live)
    with trusted.engine() as engine:
        assert "completed" == engine.replay_sync(whole, live=live, trust=True).status

    assert [each for each in own.done if each.startswith("look")] == theirs.done
    assert own.done == trusted.done
    assert bool(own.done) == ("a replay cannot ask you" in str(result.error))


@pytest.mark.deep
@pytest.mark.smoke
def test_live_replay_of_unknown_killed_journal_stops_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = list(killed_everywhere("file", tmp_path, by_model=True, at_calls=True))
    become_somebody_else(monkeypatch, tmp_path)
    for cut in cuts:
        world = shared_world(by_model=True)
        world.done.clear()
        with world.engine(Says("yes")) as engine:
            engine.replay_sync(cut, live=["tool_call", "perform"])
        assert {"look a"} >= set(world.done)


@pytest.mark.parametrize("is_own", [True, False])
def test_live_tool_fork_asks_about_calls_of_an_unknown_journal(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record ends the run right behind a reply, whose calls have no results there."""
    whole = recorded(tmp_path)
    records = whole.records()
    reply = line_of_reply(lines_of(whole))
    forged = FileJournal(tmp_path / "forged.jsonl")
    replace_records_by_derived(forged, [*records[:reply], records[-1]], whole)
    if not is_own:
        become_somebody_else(monkeypatch, tmp_path)
    world = World(by_model=True)
    with world.engine() as engine:
        report = engine.fork_sync(forged, tools="working-copy")
    trusted = World(by_model=True)
    with trusted.engine() as engine:
        engine.fork_sync(forged, tools="working-copy", trust=True)

    assert is_own == (report.result.status != "suspended")
    assert is_own == bool(world.done)
    assert trusted.done


@pytest.mark.deep
@pytest.mark.parametrize("by_model", [True, False])
def test_refusal_covers_every_case_where_resume_would_ask(
    by_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = list(killed_everywhere("file", tmp_path, by_model=by_model))
    for cut in cuts:
        refuse_unknown_calls(cut)
    become_somebody_else(monkeypatch, tmp_path)
    refused = 0
    for cut in cuts:
        refuse_unknown_calls(cut, trust=True)
        error = None
        try:
            refuse_unknown_calls(cut)
        except JournalError as raised:
            error = raised
        asks = resumed(cut, by_model=by_model)[1].status == "suspended"
        assert not asks or "would run calls that you did not request or approve" in str(error)
        refused += error is not None
    assert refused < len(cuts)


def test_journal_swapped_during_extend_stays_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = FileJournal(tmp_path / "own.jsonl"), FileJournal(tmp_path / "theirs.jsonl")
    with World(by_model=True).engine() as engine:
        engine.run_sync("actor", "act", journal=own).unwrap()
    with monkeypatch.context() as other:
        become_somebody_else(other, tmp_path)
        with World(by_model=True).engine() as engine:
            engine.run_sync("actor", "act", journal=theirs).unwrap()
    lines = lines_of(theirs)
    theirs.path.write_bytes(b"".join(lines[: line_of_reply(lines)]))

    class Exchanges(Says):
        def ask(self, question: Any) -> Any:
            theirs.path.write_bytes(own.path.read_bytes())
            return super().ask(question)

    with World(by_model=True).engine(Exchanges("yes")) as engine:
        assert "completed" == engine.resume_sync(theirs, on_divergence="extend").status
    made = lines_of(theirs)
    killed = cut_file(tmp_path / "killed.jsonl", made[: line_of_reply(made)])

    assert "suspended" == resumed(killed, by_model=True)[1].status


# --- records that say another thing than they answer ------------------------------------------------------------------


def make_looking_keeper(done: list[str]) -> AgentDefinition:
    """Return an agent whose handler looks, and then calls a tool for which permission is asked."""

    @tool(category="read", requires_permission=False)
    def look(text: str) -> str:
        """Look."""
        return "seen"

    @tool(category="write")
    def keep(text: str) -> str:
        """Write."""
        done.append(text)
        return "kept"

    def handle_steps(ctx: Any) -> Generator[Any, Any, Any]:
        yield ToolCall("look", {"text": "a"})
        yield ToolCall("keep", {"text": "b"})

    return AgentDefinition("keeper", tools=[look, keep], handle_steps=handle_steps)


def hide_purpose(asked: Intent, call_id: str) -> list[Any]:
    return [Intent(asked.path, asked.seq, freeze({**thaw(asked.effect), "purpose": "question"}), asked.fp)]


def accept_difference(asked: Intent, call_id: str) -> list[Any]:
    honest = Intent(asked.path, asked.seq, freeze({**thaw(asked.effect), "purpose": "question"}))
    return [honest, Input(asked.path, asked.seq, 0, {"type": "accepted_difference", "fp": asked.fp})]


def name_earlier_call(asked: Intent, call_id: str) -> list[Any]:
    return [Intent(asked.path, asked.seq, freeze({**thaw(asked.effect), "tool_call_id": call_id}), asked.fp)]


def claim_function(asked: Intent, call_id: str) -> list[Any]:
    form = {"type": "perform", "name": "f", "args": [], "kwargs": {}}
    return [Intent(asked.path, asked.seq, freeze(form), asked.fp)]


LIES = [hide_purpose, accept_difference, name_earlier_call, claim_function]


@cache
def approved_call() -> MemoryJournal:
    """Return the journal of a run whose call was approved."""
    journal = MemoryJournal()
    with Engine([make_looking_keeper([])], permissions=ASKS, interactor=Says("yes")) as engine:
        engine.run_sync("keeper", "act", journal=journal).unwrap()
    return MemoryJournal(journal.lines())


def lying_journal(lie: Any, folder: Path, patch: pytest.MonkeyPatch) -> FileJournal:
    """Return the journal of somebody else that ends behind its approval of a call, with a record that hides it."""
    history = approved_call().history()
    records = history.records
    (asked,) = [intent for intent in history.intents.values() if intent.type == "ask"]
    call_id = next(history.form(i)["tool_call_id"] for i in history.intents.values() if i.subject == "look")
    end = next(n for n, r in enumerate(records) if r is history.results[asked.address])
    begin = next(n for n, r in enumerate(records) if r is asked)
    made = FileJournal(folder / "lie.jsonl")
    made.macs = "none"
    made.replace([*records[:begin], *lie(asked, call_id), *records[begin + 1 : end + 1]])
    become_somebody_else(patch, folder)
    return made


@pytest.mark.parametrize(
    ("entry", "lie"),
    [
        *[("resume", lie) for lie in LIES],
        *[(entry, hide_purpose) for entry in ("keep", "extend", "fork", "recorded fork")],
    ],
)
def test_an_approval_that_its_record_hides_lets_nothing_run(
    entry: str, lie: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fingerprint covers the id of a call, and the one of a record may be that of another effect."""
    journal, done = lying_journal(lie, tmp_path, monkeypatch), list[str]()
    with Engine([make_looking_keeper(done)], permissions=ASKS) as engine:
        result: Any = None
        with contextlib.suppress(JournalError):
            if entry == "fork":
                result = engine.fork_sync(journal, at=1, allow_repeat=True)
            elif entry == "recorded fork":
                result = engine.fork_sync(journal, at=-1, tools="working-copy").result
            else:
                how: Any = {"resume": "stop"}.get(entry, entry)
                result = engine.resume_sync(journal, on_divergence=how, allow_repeat=entry == "extend")

    assert [] == done
    assert result is None or result.status in ("suspended", "failed")


@pytest.mark.parametrize("lie", [each for each in LIES if each is not accept_difference])
def test_an_import_refuses_an_approval_that_its_record_hides(
    lie: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database compares fingerprints alone."""
    with pytest.raises(JournalError, match="did not request or approve"):
        refuse_unknown_calls(lying_journal(lie, tmp_path, monkeypatch))


@pytest.mark.spec("requirements:X122")
def test_undo_restores_writes_of_a_newly_approved_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a recorded reply requests the call, so that it starts for the first time when a person approves it."""
    root, file = tmp_path / "root", tmp_path / "root" / "a.txt"
    root.mkdir()
    file.write_text("old")
    agent = AgentDefinition("writer", tools=file_tools(root, write=True))
    replacements = [{"old_string": "old", "new_string": "new"}]
    edit = tool_call("str_replace", {"path": "a.txt", "replacements": replacements})
    whole = FileJournal(tmp_path / "whole.jsonl")
    with Engine([agent], models=ScriptedModel([edit, text("done")])) as engine:
        engine.run_sync("writer", "edit", journal=whole).unwrap()
    lines = lines_of(whole)
    reply = next(number for number, line in enumerate(lines, 1) if b'"model_reply"' in line)
    cut = cut_file(tmp_path / "cut.jsonl", lines[:reply])
    file.write_text("old")
    become_somebody_else(monkeypatch, tmp_path)
    person = Says("yes")
    with Engine([agent], models=ScriptedModel([text("done")]), interactor=person) as engine:
        engine.resume_sync(cut).unwrap()

    assert (1, "new") == (len(person.asked), file.read_text())
    assert ("a.txt",) == undo(cut, root, trust=True).restored
    assert "old" == file.read_text()


def test_call_of_a_recorded_reply_asks_behind_a_reviewing_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook asks a model now, whose reply asks for no call."""
    done = list[str]()
    run = make_run(done)

    def review(ctx: Any, call: Any) -> Generator[Any, Any, None]:
        yield from Complete("Is this call fine?")

    agent = AgentDefinition("runner", tools=[run], hooks=Hooks(pre_tool=[review]))

    def make() -> Engine:
        return Engine([agent], models=ScriptedModel([tool_call("run", {"text": "a"}), *[text("fine")] * 3]))

    whole = FileJournal(tmp_path / "whole.jsonl")
    with make() as engine:
        engine.run_sync("runner", "act", journal=whole).unwrap()
    lines = lines_of(whole)
    cut = cut_file(tmp_path / "cut.jsonl", lines[: line_of_reply(lines)])
    become_somebody_else(monkeypatch, tmp_path)
    done.clear()
    with make() as engine:
        result = engine.resume_sync(cut)

    assert ([], "suspended") == (done, result.status)


@pytest.mark.parametrize(
    "member",
    ['"path":"7","x":{}', f'"fp":"{"0" * 32}","x":{{}}', '"effect":{"type":"sleep","seconds":1.0}'],
)
def test_a_line_with_a_member_twice_is_not_written_again(
    member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its start says decides what is asked, and what the whole of it says would be written."""
    cut = next(each for each in killed_everywhere("file", tmp_path, by_model=False) if len(each.records()) == 3)
    become_somebody_else(monkeypatch, tmp_path)
    *lines, last = lines_of(cut)
    body = re.sub(rb',"mac":"[0-9a-f]{32}","crc":"[0-9a-f]{8}"}\n', b"", last)
    cut.path.write_bytes(b"".join([*lines, body + b"," + member.encode() + b',"crc":"00000000"}\n']))
    cut.path.write_bytes(resealed(cut.path.read_bytes()))

    with pytest.raises(JournalError, match=r"second address|at the start of its line"):
        scrub_journal(cut)


# --- work ---------------------------------------------------------------------------------------------------------------


def answers_to_one_effect(count: int) -> list[Any]:
    form = {"type": "ask", "questions": [{"type": "question", "id": f"q{n}", "text": "?"} for n in range(count)]}
    yes = {"type": "answer", "text": "yes"}
    answers = [Input("", 0, 0, {"type": "answer", "question_id": f"q{n}", "answer": yes}) for n in range(count)]
    ended = Result("", 0, 0, Value(tuple([Answer("yes")] * count), 0))
    return [Intent("", 0, freeze({**form, "purpose": "question"})), *answers, ended]


@pytest.mark.speed
def test_third_party_journal_is_judged_with_constant_lookups_per_record(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, form, looked = list[Any](), History.form, list[int]()
    monkeypatch.setattr(History, "form", lambda history, intent: (looks.append(intent), form(history, intent))[1])
    for count in (10, 20, 30):
        journal = MemoryJournal()
        journal.replace([*start_of_a_run(), *answers_to_one_effect(count)])
        looks.clear()
        with contextlib.suppress(JournalError):
            refuse_unknown_calls(MemoryJournal(journal.lines()), trust=False)
        looked.append(len(looks))

    assert looked[1] == looked[2]


def test_effects_begin_together_only_one_after_the_other() -> None:
    """Else each could name another group, of which every effect would be looked at again."""
    call = freeze({"type": "tool_call", "tool_name": "x", "input": {}, "tool_call_id": "c", "source": "model"})
    done = Value(ToolResult.text("done"), 0)
    together = [Intent("", n, call, gather=0) for n in range(3)]
    ended = [Result("", n, 0, done) for n in range(3)]
    start = [*start_of_a_run(), *together, *ended]

    assert 3 == len(History([*start, Intent("", 3, call, gather=3)]).results)
    for gather in (1, 4):
        with pytest.raises(JournalError, match="the effect before it did not"):
            History([*start, Intent("", 3, call, gather=gather)])


@cache
def start_of_a_run() -> list[Any]:
    """Return the first two records of a run, its head and its start."""
    journal = MemoryJournal()
    with Engine([make_keeper([])], permissions=ASKS) as engine:
        engine.run_sync("keeper", "act", journal=journal)
    return journal.records()[:2]


@given(sent=st.lists(st.sampled_from("abc")), received=st.lists(st.sampled_from("abcd")))
def test_received_input_is_left_out_once_per_delivery(sent: list[str], received: list[str]) -> None:
    letters = [
        Input("", -1, 0, {"type": "mailbox_message", "id": f"i{n}", "kind": "input", "value": text})
        for n, text in enumerate(sent)
    ]
    call = freeze({"type": "tool_call", "tool_name": "x", "input": {}, "tool_call_id": "c", "source": "model"})
    outcome = Value(ToolResult.text("done"), 0, tuple([UserMessage(text) for text in received]))
    records = [*start_of_a_run(), *letters, Intent("", 0, call), Result("", 0, 0, outcome)]
    left = list(sent)
    for one in received:
        if one in left:
            left.remove(one)

    assert ({"": left} if sent else {}) == find_unreceived_input(History(records))


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("into", ["memory", "file"])
def test_debugger_fork_of_an_unknown_journal_asks(
    into: str, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a question whose answer is all that the debugger adds: the call behind it comes from the record."""
    done = list[str]()
    run = make_run(done)

    @tool(category="control", requires_permission=False)
    def confirm() -> Generator[Any, Any, str]:
        """Ask."""
        yield Ask("Really?")
        yield ToolCall("run", {"text": "evil"})
        return "asked"

    agent = AgentDefinition("asker", tools=[run, confirm])
    journal = FileJournal(tmp_path / "asked.jsonl")
    model = ScriptedModel([tool_call("confirm", {}), text("done")])
    with Engine([agent], models=model) as engine:
        assert "suspended" == engine.run_sync("asker", "act", journal=journal).status
    if not is_own:
        become_somebody_else(monkeypatch, tmp_path)
    with Engine([agent], models=ScriptedModel([text("done")])) as engine, debug(engine, journal) as debugger:
        debugger.move_to(debugger.last)
        target = FileJournal(tmp_path / "made.jsonl") if into == "file" else None
        result = asyncio.run(debugger.fork("yes", into=target))

    assert is_own == (result.status != "suspended")
    assert is_own == bool(done)
