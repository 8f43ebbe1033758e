"""How long a record may be: one rule for all journals, whoever made what is too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stepengine import AgentCall, AgentDefinition, Engine, Perform, RunStatus, ToolCall, tool
from stepengine.errors import HandlerError, JournalWriteFailed
from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal, encoding
from stepengine.testing import ScriptedModel

LIMIT, INLINE = 3_000, 1_024
"""What stands for 16 MiB and for 32,768 characters here."""
TEXTS = st.sampled_from(["a", "\n", "é", "\x00", "漢", "\U0001f600", '"']).flatmap(
    lambda one: st.sampled_from([0, 3, 300, 450, 490, 800, 990, 1_025, 2_999, 3_100]).map(lambda times: one * times)
)
ANYTHING = {"type": ["object", "array", "string", "number", "boolean", "null"]}
VALUES = st.recursive(
    TEXTS | st.integers() | st.lists(st.integers(0, 9), min_size=700, max_size=1_600) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS.map(lambda text: text[:40]), inner, max_size=3),
    max_leaves=6,
)


def agents(value):
    @tool(in_thread=False)
    def look() -> object:
        """Look."""
        return value

    def returns(ctx):
        yield from ()
        return value

    def fits(ctx):
        yield from ()
        return value

    def performs(ctx):
        yield from Perform(lambda: value)

    def calls(ctx):
        yield from ToolCall("look")

    def spawns(ctx):
        yield from AgentCall("returns")

    made = [AgentDefinition(each.__name__, handle_steps=each, tools=["look"]) for each in (returns, performs, calls)]
    made.append(AgentDefinition("fits", handle_steps=fits, output_mode="structured_output", output_schema=ANYTHING))
    return [*made, AgentDefinition("spawns", handle_steps=spawns, spawnable_agents=["returns"])], [look]


def journals(folder):
    for old in folder.iterdir():
        old.unlink()
    return [
        MemoryJournal(inline=INLINE),
        FileJournal(folder / "run.jsonl", inline=INLINE),
        SqliteJournal(folder / "runs.db", run="r", inline=INLINE),
    ]


def ends(value, agent, folder):
    made, tools = agents(value)
    for journal in (None, *journals(folder)):
        with Engine(made, tools=tools, models=ScriptedModel([]), pricing=None) as engine:
            result = engine.run_sync(agent, "go", journal=journal)
            again = None if journal is None else engine.replay_sync(journal)
        yield result, again


@pytest.mark.spec("reliability:GN16")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, agent=st.sampled_from(["returns", "fits", "performs", "calls", "spawns"]))
def test_what_one_journal_refuses_for_its_length_all_refuse_with_the_same_words(value, agent, tmp_path):
    assume(agent != "fits" or value is not None)  # None is no output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "MAX_LINE_BYTES", LIMIT)
        (alone, _), *kept = list(ends(value, agent, tmp_path))
    assert alone.status is RunStatus.COMPLETED
    # The number of bytes is that of a record, and one that has a later time may have a digit more.
    words = {(r.status, type(r.error), re.sub(r"[0-9,]+ bytes", "so many bytes", str(r.error))) for r, _ in kept}
    assert len(words) == 1
    for result, again in kept:
        assert result.status in (RunStatus.COMPLETED, RunStatus.FAILED)
        assert (again.status, again.output) == (result.status, result.output) or isinstance(
            result.error, JournalWriteFailed
        )


@pytest.mark.deep
@pytest.mark.spec("reliability:GN16")
@pytest.mark.parametrize("agent", ["returns", "performs"])
def test_an_output_of_100_mb_is_the_run_s_alone_and_no_journal_s(agent, tmp_path):
    (alone, _), *kept = list(ends("x" * 100_000_000, agent, tmp_path))
    assert alone.status is RunStatus.COMPLETED
    for result, _ in kept:
        assert result.status is RunStatus.FAILED
        assert isinstance(result.error, JournalWriteFailed if agent == "performs" else HandlerError)
        assert "at most 16" in str(result.error)
    if agent != "performs":
        assert all(Path(__file__).name in result.error.where for result, _ in kept)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1_000_000
