"""
Records and lines: checksums, damage of every kind, versions, and the form that later versions must read for ever.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, Perform
from stepengine.data.codec import STORED
from stepengine.data.json import canonical, freeze
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Failure, Value
from stepengine.errors import JournalCorrupt, JournalVersion, StepEngineError
from stepengine.journal import FileJournal, MemoryJournal, Redactor, check
from stepengine.journal.encoding import (
    Encoder,
    decode_outcome,
    decode_with_blobs,
    encode_outcome_members,
    encode_with_blobs,
)
from stepengine.journal.fingerprints import fingerprint
from stepengine.journal.line_reader import read_lines
from stepengine.journal.records import TAIL_BYTES, Result, encode_line
from tests import strategies as stored

GOLDEN = Path(__file__).parent / "golden" / "format-1.jsonl"

characters = st.characters(exclude_categories=("Cs",))
texts = st.text(characters, max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("$blob"), inner, max_size=3),
    max_leaves=8,
)


# --- one line -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:J1", "replay:J3", "replay:J7")
@settings(max_examples=25)
@given(st.dictionaries(texts, values, max_size=4), st.integers(0, 2**32 - 1))
def test_line_is_one_physical_line_and_round_trips(members, previous):
    members = {"kind": "blob", **members}
    line, crc = encode_line(members, previous)
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == len(line.split(b"\n")) - 1 == 1
    read = json.loads(line)
    assert read.pop("crc") == f"{crc:08x}"
    assert read == members
    assert list(read) == list(members)


@pytest.mark.spec("replay:J4", "replay:J5")
def test_checksum_covers_its_line_and_links_to_the_previous():
    line, crc = encode_line({"kind": "blob", "fp": "x", "data": 1}, 0)
    assert line == b'{"kind":"blob","fp":"x","data":1,"crc":"%08x"}\n' % zlib.crc32(b'{"kind":"blob","fp":"x","data":1')
    linked, _ = encode_line({"kind": "blob", "fp": "x", "data": 1}, crc)
    assert linked != line


@pytest.mark.spec("replay:J10")
def test_fingerprints_match_the_specification():
    assert fingerprint({"b": 1.0, "a": [1, -0.0, "\u2028", None, True]}) == "f8ba2454ddee89d1a197e1f8f53383fa"
    assert canonical({"b": 1e21, "a": "e\u0301"}) == '{"a":"e\u0301","b":1e+21}'
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.0})
    assert fingerprint({"a": None}) != fingerprint({})


@pytest.mark.spec("replay:J8", "replay:J20")
@given(values, st.integers(0, 3))
def test_packing_texts_into_blobs_is_lossless(value, long):
    value = {"value": value, "long": ["x" * 40_000] * long, "$": {"$blob": "mine"}}
    blobs = {}
    stored = encode_with_blobs(value, blobs)
    assert len(blobs) == (1 if long else 0)
    assert len(json.dumps(stored)) < 40_000
    assert decode_with_blobs(json.loads(json.dumps(stored)), blobs) == value


@pytest.mark.spec("replay:J15", "reliability:R20")
def test_every_effect_error_round_trips():
    kinds = [kind for kind in STORED.values() if issubclass(kind, StepEngineError)]
    assert len(kinds) > 20
    for kind in kinds:
        failure = Failure(kind("it broke"), 5)
        assert decode_outcome({"at": 5, **json.loads(json.dumps(encode_outcome_members(failure)))}) == failure


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J15", "requirements:B17")
@settings(max_examples=20)
@given(st.sampled_from(["model_reply", "tool_result", "child_result"]).flatmap(lambda name: stored.STORED[name]))
def test_every_effect_outcome_round_trips(value):
    if isinstance(value, ToolResult) and value.change is not None and value.change.values:
        value = attrs.evolve(value, change=None)  # Python objects for later hooks are never stored
    members = json.loads(json.dumps(encode_outcome_members(Value(value, 3))))
    assert decode_outcome({"at": 3, **members}) == Value(value, 3)


@given(values)
def test_every_json_value_of_a_perform_round_trips(value):
    encoder = Encoder(Redactor({}, shapes=False), link=False)
    *_, line = encoder.encode_record_lines(Result("", 0, 3, Value(freeze(value), 3)))
    assert decode_outcome(decode_with_blobs(json.loads(line), {})).value == value


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(world):
    journal = MemoryJournal()
    world.rig().record(journal)
    return journal.lines()


@pytest.mark.spec("reliability:JR02")
def test_missing_repeated_or_swapped_record_breaks_the_link(lines):
    for number in range(1, len(lines) - 2):
        here = lines[number]
        for changed in (
            [*lines[:number], *lines[number + 1 :]],
            [*lines[: number + 1], here, *lines[number + 1 :]],
            [*lines[:number], lines[number + 1], here, *lines[number + 2 :]],
        ):
            with pytest.raises(JournalCorrupt, match=r"does not follow|damaged"):
                read_lines(b"".join(changed), "j")


@pytest.mark.spec("replay:J41")
def test_unlinked_journal_detects_the_same_damage_by_structure(world):
    journal = MemoryJournal(link=False)
    world.rig().record(journal)
    lines = journal.lines()
    told = [
        _problem(changed)
        for number, line in enumerate(lines)
        if b'"kind":"blob"' not in line[:20]
        for changed in ([*lines[:number], *lines[number + 1 :]], [*lines[: number + 1], *lines[number:]])
    ]
    # Only the last result of a run can be gone without a trace: those of two children, of the root, and its end.
    assert told.count("") == 4
    assert all("record" in problem for problem in told if problem)


def _problem(lines):
    try:
        MemoryJournal(lines).history()
    except JournalCorrupt as error:
        return str(error)
    return ""


@pytest.mark.spec("reliability:JR06")
@pytest.mark.parametrize("tail", [b"\0" * 512, b'{"kind":"intent"', b"\xff\xfe"])
def test_power_cut_residue_at_the_end_is_torn(lines, tail):
    assert read_lines(b"".join(lines) + tail, "j").torn == len(tail)
    assert read_lines(tail, "j").torn == len(tail)


# --- versions -------------------------------------------------------------------------------------------------------


def sealed(members):
    return encode_line({k: v for k, v in members.items() if k != "crc"}, 0)[0]


@pytest.mark.spec("replay:J34")
def test_newer_format_is_rejected_and_unknown_members_are_kept():
    head, *rest = [json.loads(line) for line in GOLDEN.read_bytes().splitlines()]
    with pytest.raises(JournalVersion, match=r"journal/2, written by stepengine 9.*upgrade"):
        MemoryJournal(sealed({**head, "format": "stepengine.journal/2", "engine": "9"}))
    with pytest.raises(JournalCorrupt, match="is not a stepengine format"):
        MemoryJournal(sealed({**head, "format": "other/1"}))
    with pytest.raises(JournalVersion, match="unknown kind 'snapshot'"):
        MemoryJournal(sealed(head) + sealed({"kind": "snapshot"}))
    marked = [sealed({**members, "from_later": number}) for number, members in enumerate([head, *rest])]
    assert MemoryJournal(marked).lines() == marked


@pytest.mark.spec("replay:J34", "replay:J23", "replay:J3", "replay:J11", "replay:J13", "replay:J25", "replay:J41")
def test_first_format_is_still_read_replayed_and_written(world):
    golden = FileJournal(GOLDEN)
    assert check(golden)
    result = world.rig().replay(golden)
    assert result.status == "completed"
    assert result.output["children"] == ["child: saw 4", "child: saw 5"]
    assert not world.done
    recorded = MemoryJournal(link=False, stable=True)
    world.rig().record(recorded)
    lines = golden.content().splitlines(keepends=True)
    assert recorded.lines()[1:] == lines[1:]
    # The head names the version of the engine.
    known, head = json.loads(lines[0]), json.loads(recorded.lines()[0])
    assert list(known) == list(head)
    assert {**known, "engine": "", "crc": ""} == {**head, "engine": "", "crc": ""}


@pytest.mark.spec("replay:J20")
@pytest.mark.parametrize("dollar", [b"$", rb"\u0024"])
def test_blob_reference_is_resolved_in_any_json_spelling(dollar):
    journal = MemoryJournal(link=False)
    with Engine([AgentDefinition("a", handle_steps=asking_for("x" * 40_000))]) as engine:
        engine.run_sync("a", journal=journal)
    body = [line[: -TAIL_BYTES - 1].replace(b'{"$blob"', b'{"' + dollar + b'blob"') for line in journal.lines()]
    history = MemoryJournal([b'%s,"crc":"%08x"}\n' % (text, zlib.crc32(text)) for text in body]).history()
    assert sum(b"blob" in text for text in body) >= 2
    assert history.outcome(history.results["", 0]).value == "x" * 40_000


def asking_for(value):
    def handle_steps(ctx):
        yield from Perform.idempotent(str, value)

    return handle_steps
