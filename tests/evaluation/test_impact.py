"""
`stepengine compare impact`: what a change does to recorded runs (evaluation JG70-JG75, JG86, JG87).
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import STEP, AgentDefinition, Engine, Tool
from stepengine.cli.exits import Exit
from stepengine.evaluation.impact import ForkSample, Impact, Judged, RepeatedJournal, impact, replay_to_first_difference
from stepengine.evaluation.samples import CostEstimate, Course
from stepengine.journal import FileJournal, Journal, MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call
from tests.phrases import NO_AGENT


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG70", "evaluation:JG71", "evaluation:JG72", "evaluation:JG87")
def test_a_changed_tool_text_is_reported_for_ten_runs(ten: Any) -> None:
    """
    Of ten customers three are now counted first and one is sent to a shelf that nobody recorded; no tool runs.
    """
    report = ten.json("compare", "impact", "journals", "--agent", "now.py", "--script", "book.py", "-n", "2")

    kinds = [one["class"] for one in report["journals"]]
    changed = [one["file"][-8:-6] for one in report["journals"] if one["samples"][0]["changed"]]
    assert ["asked"] * 10 == kinds
    assert ["c0", "c1", "c2", "c3"] == changed
    first, fourth, last = [report["journals"][i]["samples"][0] for i in (0, 3, 9)]
    assert [{"tool": "count", "input": {"shelf": "c0"}}] == first["decision"]
    assert (["count", "look"], 2, None, True) == (
        first["tools"], first["served"], first["refused"], first["output_equal"],
    )  # fmt: skip
    assert {"tool": "look", "input": {"shelf": "another"}} == fourth["refused"]
    assert ("unknown", None) == (fourth["status"], fourth["output_equal"])
    assert ("completed", False, "0.050", 3) == (last["status"], last["changed"], last["cost"], last["steps"])
    summary = report["summary"]
    assert (0.4, 0.1, 0.0) == (summary["changed"], summary["left"], summary["failed"])
    # 0.04 dollars as recorded, 0.05 now, in each of the nine runs that have an end.
    assert 1.25 == pytest.approx(summary["cost_ratio"])
    assert "0.930" == report["spent"]  # twice nine runs of five cents and one of one and a half
    assert not Path("looked.txt").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG72")
def test_the_text_reports_changes_with_an_interval_and_noise(ten: Any) -> None:
    """
    The lines that a person reads; nothing of it is in the way of a pipe.
    """
    said = ten.type(
        "compare", "impact", "journals", "--agent", "now.py", "--script", "book.py", "-n", "1"
    ).stdout.splitlines()

    assert "10 journals: 0 unchanged, 10 repeated from step 1" == said[0]
    assert "4 of 10 chose another tool in most samples (40%, 17-69%)" == said[1]
    assert '1 left the record: look {"shelf": "another"}' == said[2]
    assert any("cost +25%" in line for line in said)
    assert any("model noise is not subtracted" in line for line in said)
    assert any("/tools/0/description" in line for line in said)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG71", "evaluation:JG8")
def test_a_decision_is_the_tools_and_their_inputs(ten: Any) -> None:
    """
    The same tools in the same order with another input are another decision; the same calls with other words are not.
    """
    ten.write("checks.py", "def made_up(call, recorded):\n    return f'{len(recorded)} known of {call.name}'\n")
    ten.write(
        "other.json", '[{"tool": "look", "input": {"shelf": "x"}}, {"tool": "count", "input": {"shelf": "x"}}, "3"]'
    )
    ten.write(
        "words.json",
        '[{"tool": "look", "input": {"shelf": "c0"}, "text": "Let me see."}, {"tool": "count", "input": {"shelf": "c0"}}, "3"]',
    )
    words = ("compare", "impact", "journals/c0.jsonl", "--agent", "now.py", "-n", "1", "--script")
    other, same = [
        ten.json(*words, script, "--simulate", "checks:made_up")["journals"][0]["samples"][0]
        for script in ("other.json", "words.json")
    ]

    assert (True, ["look", "count"], None) == (other["changed"], other["tools"], other["refused"])
    assert (False, ["look", "count"], 2) == (same["changed"], same["tools"], same["served"])
    assert "completed" == other["status"]


@pytest.mark.spec("evaluation:JG70")
def test_scripts_in_json_yaml_and_python_are_equal(ten: Any) -> None:
    ten.write("say.json", '[[{"tool": "count", "input": {"shelf": "c0"}, "text": "I count."}], "three"]')
    ten.write("say.yaml", "- - {tool: count, input: {shelf: c0}, text: I count.}\n- three\n")
    ten.write(
        "say.py", "from stepengine.testing import tool_call\nreplies = [tool_call('count', {'shelf': 'c0'}), 'three']\n"
    )
    words = ("compare", "impact", "journals/c0.jsonl", "--agent", "now.py", "-n", "1", "--script")

    found = [ten.json(*words, f"say.{kind}")["journals"][0]["samples"][0] for kind in ("json", "yaml", "py")]

    assert [["count"]] * 3 == [[each["tool"] for each in sample["decision"]] for sample in found]
    assert ["completed"] * 3 == [sample["status"] for sample in found]


@pytest.mark.spec("evaluation:JG70", "evaluation:JG12")
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: &x [1]\nb: *x\n", "contains a YAML alias"),
        ("a: &x [*x]\n", "contains a YAML alias"),
        ("- text: one\n  text: two\n", "has the key 'text' twice in the mapping at line 1; keep one of them"),
        ('[{"text": "one", "text": "two"}]', "has the key 'text' twice in one object; keep one of them"),
        ("- {tool: 3}\n", "a reply must be a text, a call"),
        ("[" * 100_000, "is not valid JSON or YAML"),
    ],
)
def test_a_script_that_cannot_be_read_is_wrong_usage(ten: Any, text: str | None, part: str) -> None:
    if text is not None:
        (ten.path / "say.yaml").write_text(text)

    said = ten.type(
        "compare", "impact", "journals/c0.jsonl", "--agent", "now.py", "--script", "say.yaml", code=Exit.USAGE
    )

    assert part in said.stderr


@pytest.mark.spec("evaluation:JG70")
def test_without_a_difference_no_model_is_asked(ten: Any) -> None:
    """
    The agent as it was: every run is the same, without script, key or consent.
    """
    report = ten.json("compare", "impact", "journals")

    assert ["same"] * 10 == [one["class"] for one in report["journals"]]
    assert ("0", None) == (report["spent"], report["stopped"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG72")
def test_mostly_unknown_results_are_reported_first(ten: Any) -> None:
    """
    With a model that calls what nobody recorded nothing is known of how the runs would have ended.
    """
    ten.write("wild.json", '[{"tool": "look", "input": {"shelf": "nowhere"}}]')
    said = ten.type("compare", "impact", "journals", "--agent", "now.py", "--script", "wild.json", "-n", "1").stdout

    assert said.startswith("mostly unknown: ")
    assert "--tools idempotent" in said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG72")
def test_a_baseline_removes_the_noise_of_the_old_agent(ten: Any) -> None:
    """
    A model that flips a coin changes its mind as often for the old agent as for the new one: no difference is told.
    """
    ten.write(
        "noisy.py",
        """
        from itertools import count
        from stepengine.testing import text, tool_call
        flips = count()

        def replies(request):
            done = [m for m in request.messages if m.role == "tool"]
            if len(done) == 2:
                return text("three")
            customer = next(m.text for m in request.messages if m.role == "user")
            first = "count" if not done and next(flips) // 2 % 2 else "look"
            second = "look" if any(m.tool_name == "count" for m in done) else "count"
            return tool_call(second if done else first, {"shelf": customer})
        """,
    )
    words = ("compare", "impact", "journals", "--agent", "now.py", "--script", "noisy.py", "-n", "2")
    alone = ten.json(*words)
    beside = ten.json(*words, "--baseline", "agents/shop.py")

    assert alone["summary"]["changed"] > 0.2
    assert beside["baseline"]
    assert [2] * 10 == [len(one["baseline"]) for one in beside["journals"]]
    assert abs(beside["summary"]["changed"]) < 0.2


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG75", "evaluation:JG12")
@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--fail-on", "changed > 0.1"), Exit.FAILED),
        (("--fail-on", "changed > 0.4"), Exit.COMPLETED),
        (("--fail-on", "cost > 1.1"), Exit.FAILED),
        (("--fail-on", "cheaper > 1"), Exit.USAGE),
        (("--tools", "all"), Exit.USAGE),
    ],
)
def test_the_exit_code_is_that_of_the_gates(ten: Any, more: tuple[str, ...], code: Exit) -> None:
    """
    Zero unless a condition holds; what is no condition is wrong usage, and is never run as code.
    """
    ten.type("compare", "impact", "journals", "--agent", "now.py", "--script", "book.py", "-n", "1", *more, code=code)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG75")
def test_a_changed_handler_is_its_own_class_and_strict_divergence(ten: Any) -> None:
    """
    Its runs go on from there all the same; what it calls that is not recorded has left the record.
    """
    ten.write(
        "handled.py",
        Path("agents/shop.py").read_text().replace(
            'agent = AgentDefinition("shop", model="t/m", tools=[look, count])',
            'def handle_steps(ctx):\n    yield STEP_ALL\n    yield ToolCall("look", {"shelf": "last"})\n\n'
            'agent = AgentDefinition("shop", model="t/m", tools=[look, count], handle_steps=handle_steps)',
        ),
    )  # fmt: skip
    report = ten.json(
        "compare", "impact", "journals/c0.jsonl", "--agent", "handled.py", "--script", "book.py", "-n", "1"
    )
    ten.type(
        "compare", "impact", "journals", "--agent", "handled.py", "--script", "book.py", "--strict", code=Exit.DIVERGED
    )

    assert ("handler changed", "#5") == (report["journals"][0]["class"], report["journals"][0]["break"])
    assert "last" == report["journals"][0]["samples"][0]["refused"]["input"]["shelf"]


@pytest.mark.spec("evaluation:JG71", "evaluation:JG75")
@pytest.mark.spec("evaluation:JG86", "evaluation:JG12")
def test_the_cost_range_is_shown_and_needs_consent(ten: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Without a terminal, --yes or --budget nothing is asked; a budget that runs out ends the command with 4.
    """
    monkeypatch.setattr("stepengine.cli.commands.impact.make_scripted_model_factory", lambda file: None)
    refused = ten.type("compare", "impact", "journals", "--agent", "now.py", code=Exit.USAGE)

    assert "this will make about 150 model calls for about $2.0000 to $4.0000" in refused.stderr
    assert "" == refused.stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG86", "evaluation:JG12")
def test_a_spent_budget_leaves_a_partial_report(ten: Any) -> None:
    """
    What is finished is told; nothing is spent beyond what was set aside.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepengine.models.pricing.ListPrices.__call__", lambda *_: Decimal("0.02"))
        report = ten.json(
            "compare", "impact", "journals", "--agent", "now.py", "--script", "book.py", "--budget", "0.2", "-n", "1",
            code=Exit.LIMIT,
        )  # fmt: skip

    assert 0.1 <= float(report["spent"]) <= 0.2
    assert "budget" in report["stopped"]
    assert 0 < sum(len(one["samples"]) for one in report["journals"]) < 10


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG86", "evaluation:JG13")
def test_a_comment_holds_hostile_texts_as_text_and_no_secret(folder: Any) -> None:
    """
    What a journal says can neither end the table nor be a link, a mention or a page; a key is taken out.
    """
    hostile = "`|[click](http://evil)@you<img src=x>\n# big"
    key = "sk-ant-api03-" + "a" * 90
    folder.write("agents/shop.py", Path("agents/shop.py").read_text().replace("Look at a shelf.", "Look."))
    folder.record("run.jsonl", "c0", lambda r: f"hello {key}")
    folder.write("now.py", Path("agents/shop.py").read_text().replace('"Look."', repr(f"{hostile} {key}")))
    folder.write("say.json", '["hi"]')
    said = folder.type(
        "compare", "impact", "run.jsonl", "--agent", "now.py", "--script", "say.json", "--markdown"
    ).stdout

    assert "<!-- stepengine-impact -->" == said.splitlines()[0]
    row = next(line for line in said.splitlines() if "/tools/0/description" in line)
    assert "\\|" in row
    assert 6 == len([c for i, c in enumerate(row) if c == "|" and row[i - 1] != "\\"])
    assert key not in said
    assert len(said) <= 65_000
    for how in ("--json", "-q"):
        assert (
            key
            not in folder.type(
                "compare", "impact", "run.jsonl", "--agent", "now.py", "--script", "say.json", how
            ).output
        )


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG86")
def test_a_comment_about_many_runs_is_cut_below_65000_characters(ten: Any) -> None:
    """
    Rows that have no room are counted; the comment stays below 65,000 characters.
    """
    for number in range(300):
        ten.write(f"many/{'a-rather-long-name-' * 10}{number}.jsonl", Path("journals/c9.jsonl").read_text())
    said = ten.type(
        "compare", "impact", "many", "--agent", "now.py", "--script", "book.py", "-n", "1", "--markdown"
    ).stdout

    assert 50_000 < len(said) <= 65_000
    assert "more | | | | |" in said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG11", "evaluation:JG119", "evaluation:JG12")
def test_an_unreadable_journal_is_reported_beside_the_rest(ten: Any) -> None:
    """
    A damaged journal and an unknown agent do not keep the others from being judged; the file of the agent is named.
    """
    ten.write("journals/bad.jsonl", "{}\n")
    result = ten.type("compare", "impact", "journals", "--json", code=Exit.USAGE)

    assert '"class": "unreadable"' in result.stdout
    assert 10 == result.stdout.count('"class": "same"')
    assert "agent shop of agents/shop.py" in result.stderr
    told = ten.type("compare", "impact", "journals/c0.jsonl", "--agent", "nobody", code=Exit.USAGE).stdout
    assert f"c0.jsonl  not compared: its agent cannot be loaded: {NO_AGENT} 'nobody'" in " ".join(told.split("\n"))
    assert (
        "bad.jsonl  not compared: its journal cannot be read: "
        in ten.type("compare", "impact", "journals", code=Exit.USAGE).stdout
    )
    marked = ten.type(
        "compare", "impact", "journals/c0.jsonl", "--agent", "nobody", "--markdown", code=Exit.USAGE
    ).stdout
    assert f"not compared: its agent cannot be loaded: {NO_AGENT}" in marked


@attrs.frozen
class Again:
    """What a report looks at of a fork."""

    refused: Any = None
    served: int = 0
    performed: int = 0
    broke_at: str = ""
    difference: Any = None
    reused: int = 0
    journal: Any = attrs.field(factory=MemoryJournal)


costs = st.sampled_from([None, Decimal(0), Decimal("0.01"), Decimal("0.02")])
courses = st.builds(
    Course, st.none(), st.just(()), st.integers(0, 3), st.integers(0, 30), costs, st.sampled_from(["completed", "failed"]),
    st.none(),
)  # fmt: skip
samples = st.lists(st.builds(ForkSample, courses, st.booleans(), st.booleans(), st.just(Again())), max_size=2).map(
    tuple
)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG72", "evaluation:JG75", "evaluation:JG86")
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from(["same", "asked", "handler changed", "unreadable"]), st.none() | courses, samples, samples
        ),
        max_size=4,
    ),
    n=st.integers(1, 2),
)
def test_an_impact_report_contains_no_nan_or_infinity(runs: Any, n: int) -> None:
    """
    With a budget some runs are asked by the new agent alone, some by the old one alone, some by none.
    """
    judged = [
        Judged(RepeatedJournal(f"{number}.jsonl", kind, MemoryJournal(), "#1", 1), recorded, new, old)
        for number, (kind, recorded, new, old) in enumerate(runs)
    ]
    report = Impact("a", n, "recorded", tuple(judged), Decimal(1), "the budget is spent")

    told = "\n".join(report.lines())
    assert "nan" not in told.replace("unknown", "")
    assert "inf" not in told
    json.dumps(report.to_json(), allow_nan=False, default=str)


def _count_shelves(ctx: Any) -> Any:
    yield STEP
    return {"shelves": 3}


COUNTER = AgentDefinition("counter", model="t/m", handle_steps=_count_shelves)


def _record(agent: AgentDefinition, journal: Journal) -> Journal:
    with Engine([agent], models=ScriptedModel([text("Three.")]), pricing=None) as engine:
        assert "completed" == engine.run_sync(agent.id, "Count.", journal=journal).status
    return journal


@pytest.mark.spec("evaluation:JG70")
async def test_a_cut_run_with_equal_effects_counts_as_same(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cut.jsonl"
    _record(COUNTER, FileJournal(file))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    journal = FileJournal(file)
    assert not journal.history().is_complete

    async with Engine([COUNTER], models=ScriptedModel(), pricing=None) as engine:
        assert "same" == (await replay_to_first_difference(engine, "cut", journal)).kind


@pytest.mark.spec("evaluation:JG86", "evaluation:JG72")
async def test_runs_of_several_engines_have_one_confirmation_and_report() -> None:
    estimates: list[CostEstimate] = []
    async with AsyncExitStack() as stack:
        found = []
        for name in ("one", "two"):
            journal, model = MemoryJournal(), ScriptedModel(lambda _: text("Fine.", cost="0.01"))
            async with Engine([AgentDefinition(name, model="t/m")], models=model, pricing=None) as engine:
                await engine.run(name, "Go", journal=journal)
            changed = AgentDefinition(name, model="t/m", system_prompt="Be short.")
            engine = await stack.enter_async_context(Engine([changed], models=model, pricing=None))
            found.append(await replay_to_first_difference(engine, name, journal))
        report = await impact(engine, found, n=2, confirm=estimates.append)

    assert [CostEstimate(4, Decimal("0.04"), Decimal("0.08"))] == estimates
    assert "one, two" == report.agent
    assert [2, 2] == [len(one.samples) for one in report.journals]


@pytest.mark.spec("evaluation:JG72")
@pytest.mark.parametrize("old", [False, True])
async def test_journals_in_memory_count_as_one_run_each(old: bool) -> None:
    replies = ["look", "look", "look", "peek"] if not old else ["look"] * 7 + ["peek"]
    answers = iter([reply for name in replies for reply in (tool_call(name, {}), text("done"))])
    tools = [
        Tool(name=n, description="Look.", input_schema={"type": "object"}, run=lambda _: "two")
        for n in ("look", "peek")
    ]
    before = AgentDefinition("shop", model="t/m", tools=tools)
    journals = [MemoryJournal() for _ in range(4)]
    for number, journal in enumerate(journals):
        async with Engine([before], models=ScriptedModel([tool_call("look", {}), text("done")])) as engine:
            await engine.run("shop", f"customer {number}", journal=journal)
    after = attrs.evolve(before, system_prompt="Look closely.")
    async with Engine([after]) as engine:
        report = await impact(
            engine, journals, n=1, old=before if old else None,
            models=lambda: ScriptedModel([next(answers), next(answers)]),
        )  # fmt: skip

    assert abs(report.values()["changed"] or 0) == 0.25
