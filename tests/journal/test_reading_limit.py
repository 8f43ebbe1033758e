"""What is made of a journal has a bound, not only what is in it: texts and messages may be named again and again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.debugging import describe_compactions, describe_run, render_run, render_text
from stepengine.errors import DataError, JournalCorrupt, JournalError
from stepengine.evaluation import price
from stepengine.journal import FileJournal, check, diff, reading_limit, scan, scrub, verify
from stepengine.journal.origins import call_origins
from stepengine.testing import Cassette
from tests.journal.mutants import sealed

FP = "ab" * 16
HEAD = {"kind": "head", "format": "stepengine.journal/1", "engine": "0", "agent": "a", "definition": FP, "run": "r"}
HEAD |= {"seed": "0", "created": "2026-01-01T00:00:00.000Z"}
START = {"type": "agent_call", "agent_id": "a", "prompt": "go", "params": None, "run_id": "r"}
LIMIT = r"record \d+ of .*run\.jsonl is not valid: .* expand to more than [\d,]+ bytes in a journal of [\d,]+"
READERS: dict[str, Callable[[Path], object]] = {
    "show --json": describe_run,
    "show": render_text,
    "show --step": lambda path: describe_run(path, step="41"),
    "show --left-out": describe_compactions,
    "show --provenance": lambda path: call_origins(FileJournal(path)),
    "scrub": scrub,
    "diff": lambda path: diff(path, path),
    "price": lambda path: price(path, "test/m"),
}


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A limit that is reached in little time; the tests of one call that names a text often reach the true one.
    """
    monkeypatch.setattr(reading_limit, "MAX_MADE_BYTES", 1024 * 1024)


def written(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """Write records as stepengine does, each with its checksum."""
    path.write_bytes(sealed([*records]))
    return path


def intent(seq: int, effect: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "intent", "path": "", "seq": seq, "fp": FP, "effect": effect}


def result(seq: int, value: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "result", "path": "", "seq": seq, "at": seq, "value": value}


def parts(text: object) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def user(text: str) -> dict[str, Any]:
    return {"type": "user_message", "content": parts(text)}


def piece(seq: int, stop: int) -> dict[str, Any]:
    return {"type": "slice", "seq": seq, "start": 0, "stop": stop}


def requests(path: Path, all_messages: Iterable[list[dict[str, Any]]]) -> Path:
    """Write a run of model calls with these messages."""
    records = [HEAD, intent(-1, START)]
    for seq, messages in enumerate(all_messages):
        asked = {"type": "model_call", "purpose": "step", "request": {"model": "test/m", "messages": messages}}
        records += [intent(seq, asked), result(seq, {"type": "model_reply", "content": parts("yes")})]
    return written(path, records)


def slices_of_slices(path: Path, doublings: int = 14) -> Path:
    """Each request has the messages of the one before twice; those behind them one of their own, or none of them."""
    doubled = [[user("hello")], *[[piece(n, 2**n)] * 2 for n in range(doublings)]]
    last = [piece(doublings, 2**doublings)]
    return requests(path, [*doubled, *[[*last, user(f"more {n}")] if n % 2 else [user("less")] for n in range(40)]])


def one_text_often(path: Path, times: int = 2_000, chars: int = 2_500_000, *, together: bool = False) -> Path:
    """A blob that many results name, or one call many times."""
    named, records = {"$blob": FP}, [HEAD, intent(-1, START), {"kind": "blob", "fp": FP, "data": "y" * chars}]
    call = {"type": "tool_call", "tool_name": "t", "source": "handler", "tool_call_id": "c"}
    if together:
        return written(path, [*records, intent(0, {**call, "input": {"texts": [named] * times}})])
    for seq in range(times):
        value = {"type": "tool_result", "content": parts(named)}
        records += [intent(seq, {**call, "tool_call_id": f"c{seq}", "input": {}}), result(seq, value)]
    return written(path, records)


@pytest.mark.spec("replay:J54")
@pytest.mark.parametrize("reader", ["show --step", "show --left-out", "scrub", "price"])
def test_nested_slices_exceed_the_reading_limit(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_limit, "MAX_MADE_BYTES", 64 * 1024)
    monkeypatch.setattr(reading_limit, "MAX_MADE_TIMES", 2)
    path = slices_of_slices(tmp_path / "run.jsonl")
    assert path.stat().st_size < 32_000

    with pytest.raises(JournalCorrupt, match=LIMIT):
        READERS[reader](path)


@pytest.mark.spec("replay:J54")
@pytest.mark.parametrize("reader", ["show --json", "show --provenance", "scrub", "diff"])
def test_text_named_by_many_results_exceeds_the_reading_limit(tmp_path: Path, reader: str, small_limit: None) -> None:
    with pytest.raises(JournalCorrupt, match=LIMIT):
        READERS[reader](one_text_often(tmp_path / "run.jsonl", times=400, chars=100_000))


@pytest.mark.spec("replay:J54")
@pytest.mark.parametrize("reader", ["show", "scrub"])
def test_text_named_often_by_one_call_exceeds_the_reading_limit(tmp_path: Path, reader: str) -> None:
    with pytest.raises(JournalCorrupt, match=LIMIT):
        READERS[reader](one_text_often(tmp_path / "run.jsonl", together=True))


@pytest.mark.spec("replay:J54")
def test_inputs_at_one_address_count_separately_towards_the_limit(tmp_path: Path) -> None:
    blob = {"kind": "blob", "fp": FP, "data": "y" * 2_500_000}
    prompt = {"kind": "input", "path": "", "seq": 0, "at": 0, "input": {"type": "system_prompt", "text": {"$blob": FP}}}
    path = written(tmp_path / "run.jsonl", [HEAD, intent(-1, START), blob, *[prompt] * 200])

    with pytest.raises(JournalCorrupt, match=LIMIT):
        FileJournal(path).history()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J54")
def test_html_page_and_check_report_the_reading_limit(tmp_path: Path) -> None:
    path = one_text_often(tmp_path / "run.jsonl", together=True)

    assert any("expand to more than" in problem for problem in check(path).problems)
    with pytest.raises(JournalError, match="expand to more than"):
        render_run(path)


@pytest.mark.spec("replay:J54")
def test_record_read_again_counts_once(tmp_path: Path) -> None:
    history = FileJournal(one_text_often(tmp_path / "run.jsonl", times=20)).history()

    for _ in range(100):
        assert all(len(history.outcome(one).value.text) == 2_500_000 for one in history.results.values())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J54")
def test_long_run_that_drops_messages_each_step_is_readable(tmp_path: Path, small_limit: None) -> None:
    """Its requests name pieces of earlier ones that name pieces of earlier ones, and none of them has many messages."""
    messages, length = [[user("first")]], 1
    for n in range(1, 100):
        rest = [{**piece(n - 1, length), "start": 2}] if length > 60 else [piece(n - 1, length)]
        messages.append([*rest, user(f"question {n} " * 50), user("and more " * 50)])
        length += 0 if length > 60 else 2
    path = requests(tmp_path / "run.jsonl", messages)

    assert length == len(describe_run(path, step="100")["request"]["messages"])
    assert length == len(describe_run(scrub(path), step="100")["request"]["messages"])


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:J54")
@pytest.mark.parametrize(
    ("command", "cost"),
    [
        *[("show", cost) for cost in ("1E+999999999999999999", "1E-999999999999", "NaN")],
        *[(each, "NaN") for each in ("journal check", "compare diff", "compare price --model test/m")],
    ],
)
def test_unaddable_cost_is_rejected_by_its_record(tmp_path: Path, command: str, cost: str) -> None:
    path = written(tmp_path / "run.jsonl", [HEAD, intent(-1, START), *calls_that_cost(cost, cost)])

    ended = CliRunner().invoke(app, [*command.split(), *[str(path)] * (2 if command == "compare diff" else 1)])

    said = " ".join(ended.output.split())
    assert ended.exit_code in (1, 2), said
    assert "record 4 of" in said
    assert "expected a decimal number as text" in said


@pytest.mark.spec("replay:J54")
@pytest.mark.parametrize("cost", ["1E+999999999999999999", "-1"])
def test_unaddable_cost_of_a_stopped_call_is_rejected(tmp_path: Path, cost: str) -> None:
    said = {"type": "partial_usage", "usage": {"type": "usage", "input_tokens": 1}, "cost": cost}
    stopped = {"kind": "input", "path": "", "seq": 0, "at": 0, "input": said}
    asked = calls_that_cost("1")[0]
    path = written(tmp_path / "run.jsonl", [HEAD, intent(-1, START), asked, stopped])

    with pytest.raises(JournalCorrupt, match=r"record 4 .*a cost must be a number of dollars"):
        describe_run(path)


def calls_that_cost(*costs: str) -> list[dict[str, Any]]:
    """Write model calls with their replies, which state these costs."""
    records = []
    for seq, cost in enumerate(costs):
        asked = {"type": "model_call", "purpose": "step", "request": {"model": "test/m", "messages": [user("a")]}}
        usage = {"type": "usage", "input_tokens": 5}
        reply = {"type": "model_reply", "content": parts("yes"), "usage": usage, "cost": cost}
        records += [intent(seq, asked), result(seq, reply)]
    return records


# --- pipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR17")
@pytest.mark.parametrize(
    "command", ["show", "journal scrub new.jsonl", "send hello", "test", "cassette record -- true"]
)
def test_commands_reject_a_pipe_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    words = command.split(" ")
    place = next(
        (n for n, word in enumerate(words) if word.startswith("-") or word in ("new.jsonl", "hello")), len(words)
    )

    ended = CliRunner().invoke(app, [*words[:place], "pipe.jsonl", *words[place:]])

    assert ended.exit_code in (1, 2), ended.output
    assert "not a regular file" in " ".join(ended.output.split()), ended.output


@pytest.mark.spec("reliability:JR17")
def test_keys_cassettes_and_scanned_files_may_not_be_pipes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(DataError, match="not a regular file"):
        list(scan([pipe]))
    with pytest.raises(DataError, match="not a regular file"):
        list(scan(["/dev/zero"]))
    with pytest.raises(DataError, match="not a regular file"):
        Cassette.load(pipe)
    with pytest.raises(JournalError, match="not a regular file"):
        verify(slices_of_slices(tmp_path / "run.jsonl", 1), pipe)
