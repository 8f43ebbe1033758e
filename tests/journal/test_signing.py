"""
Signed journals: each alteration is named, a tail that nobody signed is told, and a run goes on with its chain.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Answer, Ask, Engine, Parallel, ToolContext, call, tool
from stepengine.data.state import RunStatus
from stepengine.errors import DefinitionError, JournalCorrupt, JournalError
from stepengine.journal import (
    FileJournal,
    Journal,
    MemoryJournal,
    SigningKey,
    SqliteJournal,
    check,
    decisions,
    seal_journal,
    verify,
)
from stepengine.journal.records import TAIL_BYTES
from stepengine.permissions import Policy, Rule
from stepengine.redaction import GIVEN
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import file_tools
from tests.journal.mutants import resealed


def new_key(folder: Path, name: str = "audit", key: Any = None) -> Path:
    """
    Make a key as ``ssh-keygen`` does; its public half is beside it.
    """
    made = key or Ed25519PrivateKey.generate()
    path = folder / name
    path.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    public = made.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(b"# who signs\n\n" + public + b" audit@example\n")
    return path


@tool(in_thread=False)
def note(text: str) -> str:
    """
    Note a text.
    """
    return f"noted {text}"


@tool(in_thread=False)
def leak(ctx: ToolContext, path: str) -> str:
    """
    Show a file that no agent should see.
    """
    return Path(path).read_text(encoding="utf-8")


def steps(ctx: Any) -> Any:
    for number in range(6):
        yield from call(note, text=f"{number}")
    said = yield from Ask("Go on?")
    for number in range(3):
        yield from call(note, text=f"{said} {number}")
    return "done"


def leaking(ctx: Any) -> Any:
    return (yield from call(leak, path=ctx.prompt)).text


def asks_twice(ctx: Any) -> Any:
    return list((yield from Parallel(Ask("One?"), Ask("Two?"))))


DOUBLE = AgentDefinition("double", handle_steps=asks_twice)
AGENT = AgentDefinition("noter", tools=[note], handle_steps=steps)
LEAKING = AgentDefinition("leaking", tools=[leak], handle_steps=leaking)


def engine() -> Engine:
    return Engine([AGENT, LEAKING], models=ScriptedModel([]))


async def recorded(journal: Journal, *, answered: bool = True) -> Journal:
    run = await engine().run(AGENT, "", journal=journal)
    assert run.status is RunStatus.SUSPENDED
    assert run.journal is not None
    if answered:
        run = await engine().resume(run.journal, answers={"Go on?": "yes"})
        assert run.status is RunStatus.COMPLETED
        assert run.journal is not None
    return run.journal


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_key(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def public(keys: Path) -> Path:
    return keys.with_suffix(".pub")


@pytest.fixture(scope="module")
def whole(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """
    A journal of a run that was suspended and gone on with, a signature after five records each.
    """
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    asyncio.run(recorded(FileJournal(path, sign=SigningKey(keys, records=5))))
    return path.read_bytes()


@pytest.fixture
def journal(whole: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_bytes(whole)
    return path


def _listed(first: int, to: int) -> str:
    return f"record {first} " if first == to else f"each of the records {first} to {to} "


def problems_of(lines: list[bytes], journal: Path, public: Path) -> tuple[str, ...]:
    """
    Return what is wrong with a journal of these lines, whose checksums are made anew.
    """
    journal.write_bytes(resealed(b"".join(lines)))
    return verify(journal, public).problems


def signatures_in(lines: list[bytes]) -> list[int]:
    """
    The numbers of the records that are signatures.
    """
    return [number for number, line in enumerate(lines, 1) if b'"type":"signature"' in line]


# --- what holds -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR44")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
async def test_run_is_signed_to_its_end_when_suspended_or_finished(kind: str, keys: Path, public: Path, tmp_path: Path):
    key = SigningKey(keys, records=5)
    given = (
        FileJournal(tmp_path / "a.jsonl", sign=key) if kind == "file" else SqliteJournal(tmp_path / "a.db", sign=key)
    )
    suspended = await recorded(given, answered=False)
    before = verify(suspended, public)
    await engine().resume(suspended, answers={"Go on?": "yes"})
    after = verify(suspended, [public])

    assert (True, (), ()) == (bool(before), before.problems, before.unsigned)
    assert (True, (), ()) == (bool(after), after.problems, after.unsigned)
    assert before.records == before.signed < after.signed == after.records
    assert before.signatures < after.signatures
    assert ("noter", before.run) == (after.agent, after.run)
    assert verify(suspended, public, seen=before.digest)
    assert check(suspended)
    assert RunStatus.COMPLETED is (await engine().replay(suspended)).status


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
@pytest.mark.spec("reliability:JR44")
def test_ssh_keygen_keys_sign_and_match_its_fingerprint(tmp_path: Path):
    key = tmp_path / "k"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    named = subprocess.run(["ssh-keygen", "-l", "-f", f"{key}.pub"], check=True, capture_output=True, text=True).stdout
    journal = asyncio.run(recorded(FileJournal(tmp_path / "run.jsonl", sign=key), answered=False))

    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "locked", "-f", str(tmp_path / "locked")], check=True)

    with pytest.raises(JournalError, match="it has a passphrase"):
        SigningKey(tmp_path / "locked")
    verified = verify(journal, f"{key}.pub")
    assert (True, named.split()[1]) == (bool(verified), verified.key)


# --- what was changed is named ----------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR45")
def test_altered_removed_swapped_moved_and_added_records_are_named(journal: Path, public: Path):
    lines = lines_of(journal)
    number = next(n for n, line in enumerate(lines, 1) if b"noted 3" in line)
    altered = [line.replace(b"noted 3", b"noted 4") if n == number else line for n, line in enumerate(lines, 1)]
    assert (f"record {number} was altered",) == problems_of(altered, journal, public)

    removed = [*lines[:7], *lines[8:]]
    assert ("one record before record 8 was removed",) == problems_of(removed, journal, public)

    assert {8, 11}.isdisjoint(signatures_in(lines))
    swapped = [*lines[:7], lines[10], *lines[8:10], lines[7], *lines[11:]]
    assert ("records 8 and 11 were swapped",) == problems_of(swapped, journal, public)

    moved = lines[:7] + lines[8:10] + [lines[7]] + lines[10:]
    assert ("record 10 was moved: it was signed as record 8",) == problems_of(moved, journal, public)

    added = [*lines[:8], lines[2].replace(b"noted", b"NOTED"), *lines[8:]]
    assert ("record 9 was added",) == problems_of(added, journal, public)


@pytest.mark.spec("reliability:JR45")
def test_removed_altered_or_repeated_signature_is_reported(journal: Path, public: Path):
    lines = lines_of(journal)
    first, second, *_ = signatures_in(lines)
    without_first = [*lines[: first - 1], *lines[first:]]
    assert (f"the signature of each of the records 1 to {first - 1} was removed or altered",) == problems_of(
        without_first, journal, public
    )

    changed = list(lines)
    changed[first - 1] = changed[first - 1].replace(b'"found":0', b'"found":3')
    assert (f"record {first}, a signature, was altered or was made with another key",) == problems_of(
        changed, journal, public
    )

    without_both = [*lines[: first - 1], *lines[second:]]
    assert (
        f"each of {second - first + 1} records before record {first} was removed, including the signature",
    ) == problems_of(without_both, journal, public)

    repeated = [*lines[:second], lines[first - 1], *lines[second:]]
    assert f"record {second + 1}, a signature, is out of order: it was moved or repeated" in problems_of(
        repeated, journal, public
    )


@pytest.mark.spec("reliability:JR45")
def test_cut_tail_and_appended_record_are_reported(journal: Path, public: Path):
    lines = lines_of(journal)
    count, signatures = len(lines), signatures_in(lines)
    journal.write_bytes(b"".join(lines[:-1]))
    cut = verify(journal, public)
    assert (False, True) == (bool(cut), cut.is_unaltered)
    (told,) = cut.unsigned
    assert told.startswith(_listed(signatures[-2] + 1, count - 1))
    assert "is not signed" in told

    journal.write_bytes(b"".join(lines[: signatures[0]]))
    (told,) = verify(journal, public).unsigned
    assert (
        f"record {signatures[0]} is the last one and does not close the journal: a crash ended the run, or later records were removed"
        == told
    )

    forged = lines[3][: -TAIL_BYTES - 1].replace(b'"at":', b'"at":1')
    crc = zlib.crc32(forged, int(lines[-1][-11:-3], 16))
    journal.write_bytes(b"".join([*lines, forged + b',"crc":"%08x"}\n' % crc]))
    (told,) = verify(journal, public).unsigned
    assert told == (
        f"record {count + 1} is not signed and follows the signature that closed the journal: anyone may have written it"
    )


@pytest.mark.spec("reliability:JR45")
def test_truncation_after_a_closing_signature_needs_the_seen_digest(journal: Path, public: Path):
    lines = lines_of(journal)
    closing = [n for n in signatures_in(lines) if b'"closes":true' in lines[n - 1]]
    seen = verify(journal, public).digest
    journal.write_bytes(b"".join(lines[: closing[0]]))

    assert verify(journal, public)
    (told,) = verify(journal, public, seen=seen).problems
    assert told.startswith("it does not start with the records seen before")


@pytest.mark.spec("reliability:JR45")
async def test_other_or_missing_signatures_do_not_verify(journal: Path, public: Path, tmp_path: Path):
    other = new_key(tmp_path, "other")
    theirs = await recorded(FileJournal(tmp_path / "theirs.jsonl", sign=other))
    assert "its signatures are made with SHA256:" in verify(theirs, public).problems[0]

    plain = await recorded(FileJournal(tmp_path / "plain.jsonl"))
    assert "it has no signature" in verify(plain, public).problems[0]

    made_valid = tmp_path / "sealed.jsonl"
    lines = lines_of(journal)
    made_valid.write_bytes(b"".join(lines).replace(b"noted 2", b"noted two"))
    seal_journal(made_valid).journal.copy_to(FileJournal(made_valid))
    assert check(made_valid)
    assert 1 == len(verify(made_valid, public).problems)
    assert "was altered" in verify(made_valid, public).problems[0]


@st.composite
def alterations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """
    Ways to alter a journal: one of each kind, with checksums that are right afterwards or not.
    """
    kind = draw(st.sampled_from(["byte", "remove", "swap", "repeat", "cut", "shorten", "insert"]))
    at, other, value = draw(st.integers(0, 10**6)), draw(st.integers(0, 10**6)), draw(st.integers(1, 255))
    anew = draw(st.booleans())

    def altered(whole: bytes) -> bytes:
        lines = whole.splitlines(keepends=True)
        first, second = at % len(lines), other % len(lines)
        if kind == "byte":
            line = bytearray(lines[first])
            line[other % len(line)] ^= value
            lines[first] = bytes(line)
        elif kind == "remove":
            del lines[first]
        elif kind == "swap":
            lines[first], lines[second] = lines[second], lines[first]
        elif kind == "repeat":
            lines.insert(second, lines[first])
        elif kind == "insert":
            lines.insert(first, lines[second].replace(b'"at":', b'"at":1'))
        elif kind == "cut":
            lines = lines[:first]
        else:
            return whole[: at % len(whole)]
        return resealed(b"".join(lines)) if anew and kind != "byte" else b"".join(lines)

    return altered


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR45")
@given(altered=alterations())
def test_no_alteration_passes_verification(
    whole: bytes, public: Path, tmp_path_factory: pytest.TempPathFactory, altered: Callable[[bytes], bytes]
):
    content = altered(whole)
    lines = whole.splitlines(keepends=True)
    once_whole = [b"".join(lines[:n]) for n in signatures_in(lines) if b'"closes":true' in lines[n - 1]]
    assume(content not in once_whole)
    path = tmp_path_factory.mktemp("altered") / "run.jsonl"
    path.write_bytes(content)

    verified = verify(path, public)

    assert not verified
    assert all("record" in told or "signed" in told for told in (*verified.problems, *verified.unsigned))


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR44", "reliability:JR46")
async def test_crash_tail_is_reported_and_the_chain_continues(keys: Path, public: Path, tmp_path: Path):
    path, key = tmp_path / "run.jsonl", SigningKey(keys, records=5)
    await recorded(FileJournal(path, sign=key), answered=False)
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[: signatures_in(lines)[0] + 3]))
    crashed = verify(path, public)
    assert (False, True) == (bool(crashed), crashed.is_unaltered)
    assert 0 < crashed.signed < crashed.records
    assert "is not signed" in crashed.unsigned[0]

    await engine().resume(FileJournal(path, sign=key), in_doubt="retry")
    verified = verify(path, public)
    assert () == verified.problems
    (told,) = verified.unsigned
    assert told.startswith(("record", "each of the records"))
    assert f"{crashed.signed + 1}" in told
    assert told.endswith("was unsigned when the run was resumed, and was signed then")
    assert verified.signed == verified.records


@pytest.mark.spec("reliability:JR46")
async def test_signed_run_resumes_only_unaltered_with_its_key(keys: Path, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    await recorded(FileJournal(path, sign=SigningKey(keys, records=5)), answered=False)
    before = path.read_bytes()

    with pytest.raises(JournalError, match=r"is signed with SHA256:\S+\. Resume it with that key"):
        await engine().resume(FileJournal(path), answers={"Go on?": "yes"})
    with pytest.raises(JournalError, match="Resume with the first key"):
        await engine().resume(FileJournal(path, sign=new_key(tmp_path, "other")), answers={"Go on?": "yes"})
    assert before == path.read_bytes()

    path.write_bytes(resealed(before.replace(b"noted 2", b"noted 5")))
    with pytest.raises(JournalCorrupt, match=r"does not match its signatures: record \d+ was altered"):
        await engine().resume(FileJournal(path, sign=keys), answers={"Go on?": "yes"})


@pytest.mark.spec("reliability:JR46")
async def test_fork_has_its_own_signatures_or_none(keys: Path, public: Path, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    await recorded(FileJournal(path, sign=SigningKey(keys, records=5)), answered=False)
    plain = await engine().fork(path, at="#3", allow_repeat=True, answers={"Go on?": "yes"})
    assert plain.journal is not None
    assert b"igned" not in plain.journal.content()

    into = FileJournal(tmp_path / "fork.jsonl", sign=SigningKey(keys, records=5))
    await engine().fork(path, at="#3", allow_repeat=True, answers={"Go on?": "yes"}, into=into)
    verified = verify(into, public)
    assert () == verified.problems
    assert verified.signed == verified.records
    assert "was unsigned when the run was resumed" in verified.unsigned[0]


def secrets_in(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if len(line) >= 16 and not line.startswith("-----")]


# --- who decided ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR48")
async def test_decisions_list_person_time_and_reason(tmp_path: Path):
    asked = AgentDefinition("asked", model="test/model", tools=[note])
    rules = Policy([Rule.ask_for_tool("note")])
    models = ScriptedModel([tool_call("note", {"text": "x"}), text("ok")])
    path = tmp_path / "run.jsonl"
    async with Engine([asked, DOUBLE], models=models, permissions=rules) as both:
        waits = await both.run("asked", "go", journal=path)
        answer = Answer("yes", by="Ann", reason="I looked", edited_input={"text": "y"})
        await both.resume(path, answers={waits.pending_questions[0].id: answer})
        several = tmp_path / "several.jsonl"
        await both.run("double", "", journal=several)
        await both.resume(several, answers={"One?": Answer(text="a", by="Bob")})
        first = decisions(several)
        await both.resume(several, answers={"Two?": Answer(declined=True, by="Cleo")})

    (one,) = decisions(path)
    assert ("permission", "note", "Ann", "I looked", "yes", True) == (
        one.kind, one.tool, one.by, one.reason, one.said, one.edited,
    )  # fmt: skip
    assert datetime.now(UTC) - timedelta(minutes=5) < one.time <= datetime.now(UTC)
    assert b"I looked" in lines_of(path)[one.record - 1]
    assert [("One?", "a", "Bob", False)] == [(d.asked, d.said, d.by, d.declined) for d in first]
    assert [("One?", "Bob", False), ("Two?", "Cleo", True)] == [(d.asked, d.by, d.declined) for d in decisions(several)]
    with pytest.raises(JournalError, match="there is no journal"):
        decisions(tmp_path / "none.jsonl")


# --- the key ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR47")
@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_signing_key_is_redacted_from_everything_written(kind: str, keys: Path, tmp_path: Path):
    SigningKey(keys)
    journal: Journal = FileJournal(tmp_path / "run.jsonl") if kind == "file" else MemoryJournal()
    run = await engine().run(LEAKING, str(keys), journal=journal)

    assert run.journal is not None
    secret = secrets_in(keys)
    assert len(secret) > 3
    assert [] == [line for line in secret if line.encode() in run.journal.content()]
    assert b"<redacted:signing-key>" in run.journal.content()
    assert "signing-key" in GIVEN.names.values()
    assert secret[1] not in repr(SigningKey(keys))


@pytest.mark.spec("reliability:JR47")
@pytest.mark.filterwarnings("ignore::stepengine.engine.handler_sources.SourceWarning")
@pytest.mark.parametrize("whose", ["its child", "the engine", "a carried tool"])
async def test_agent_with_tools_in_the_keys_folder_is_rejected(whose: str, tmp_path: Path):
    (tmp_path / "deep").mkdir()
    key = new_key(tmp_path / "deep")
    near = file_tools(tmp_path)[0]

    @tool(uses=[near])
    def carries() -> Any:
        """
        Carry a tool.
        """
        return (yield from Ask("?"))

    child = AgentDefinition("child", model="m/m", tools=[near])
    agent = AgentDefinition(
        "able",
        tools=[carries] if whose == "a carried tool" else [],
        spawnable_agents=[child] if whose == "its child" else [],
        handle_steps=leaking,
    )
    path = tmp_path / "run.jsonl"
    one = Engine([agent], models=ScriptedModel([]), tools=[near] if whose == "the engine" else [])
    with pytest.raises(DefinitionError, match=r"works in a folder with the signing key '.*audit'"):
        await one.run(agent, "", journal=FileJournal(path, sign=key))
    assert not path.exists()


@pytest.mark.spec("reliability:JR47")
def test_unusable_signing_key_is_rejected_with_advice(keys: Path, tmp_path: Path):
    def refused(path: Path) -> str:
        with pytest.raises(JournalError) as caught:
            SigningKey(path)
        return caught.value.message

    assert "cannot be read: No such file" in refused(tmp_path / "none")
    assert "not a private key in OpenSSH format" in refused(tmp_path)
    rsa = generate_private_key(public_exponent=65537, key_size=2048)
    assert "not an ed25519 key; make one with `ssh-keygen -t ed25519" in refused(new_key(tmp_path, "rsa", rsa))
    (tmp_path / "junk").write_bytes(b"\xff" * 100_000)
    (tmp_path / "junk").chmod(0o600)
    assert "not a private key in OpenSSH format" in refused(tmp_path / "junk")
    assert "not a private key in OpenSSH format" in refused(
        _copied(keys.with_suffix(".pub"), tmp_path / "k.pub", 0o600)
    )
    assert "can be read or changed by other users" in refused(_copied(keys, tmp_path / "open", 0o640))
    with pytest.raises(JournalError, match="records must be a whole number from 1, and seconds a number above 0"):
        SigningKey(keys, records=0)
    with pytest.raises(JournalError, match="a journal with stable=True cannot be signed"):
        FileJournal(tmp_path / "s.jsonl", stable=True, sign=keys)
    with pytest.raises(JournalError, match="a journal in memory cannot be signed"):
        MemoryJournal(sign=keys)


@pytest.mark.spec("reliability:JR45")
def test_invalid_public_key_or_digest_is_rejected(journal: Path, keys: Path, tmp_path: Path):
    with pytest.raises(JournalError, match=r"is a private key; verification needs the public key in its \.pub"):
        verify(journal, keys)
    (tmp_path / "k").write_bytes(b"ssh-rsa AAAA\n")
    with pytest.raises(JournalError, match="holds a line that is not a public ed25519 key: 'ssh-rsa AAAA'"):
        verify(journal, tmp_path / "k")
    (tmp_path / "k").write_bytes(b"# nothing\n")
    with pytest.raises(JournalError, match="holds no public key"):
        verify(journal, tmp_path / "k")
    with pytest.raises(JournalError, match="64 hexadecimal digits"):
        verify(journal, keys.with_suffix(".pub"), seen="XYZ")
    with pytest.raises(JournalError, match="cannot be read"):
        verify(journal, tmp_path / "none")
    with pytest.raises(JournalError, match="there is no journal"):
        verify(tmp_path / "none.jsonl", keys.with_suffix(".pub"))


def test_key_below_a_missing_home_folder_is_a_journal_error(journal: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])

    for act in (lambda: SigningKey("~/audit"), lambda: verify(journal, "~/audit.pub")):
        with pytest.raises(JournalError, match="cannot be read: No such file"):
            act()


def _copied(source: Path, target: Path, mode: int) -> Path:
    target.write_bytes(source.read_bytes())
    target.chmod(mode)
    return target
