"""
`stepengine compare blame`: the step that spoiled a run (evaluation JG76-JG78).
"""

from __future__ import annotations

import itertools
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stepengine import STEP, STEP_ALL, AgentCall, AgentDefinition, Ask, Engine, Tool
from stepengine.cli.exits import Exit
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import DataError, ModelError
from stepengine.evaluation import blame
from stepengine.evaluation.blame import estimate_blame_cost, find_pass_rate_drop
from stepengine.evaluation.checks import Check
from stepengine.evaluation.samples import CostEstimate
from stepengine.journal import MemoryJournal, SharedBudget
from stepengine.testing import ScriptedModel, failure, text, tool_call

PASSED = Check.from_expression("text == 'passed'")


class Work:
    """
    A job of some steps: each is done well or badly, which its tool says; at the end the run passes if none was bad.

    Args:
        steps: How many steps there are.
        noise: How likely a reply does its step badly by itself.
    """

    def __init__(self, steps: int = 6, noise: float = 0.0, *, seed: int = 0, idempotent: bool = True) -> None:
        self.steps, self.noise, self.chance = steps, noise, Random(seed)
        self.done: list[int] = []
        work = Tool(
            name="work", description="Work.", input_schema={"type": "object"}, run=self.worked, in_thread=False,
            annotations=ToolAnnotations(idempotent=idempotent),
        )  # fmt: skip
        self.agent = AgentDefinition("worker", model="t/m", tools=[work])

    def worked(self, given: Any) -> str:
        self.done.append(given["step"])
        return "good" if given["well"] else "bad"

    def reply(self, request: Any, spoilt: int = 0) -> Any:
        results = [m.text for m in request.messages if m.role == "tool"]
        step = len(results) + 1
        if step > self.steps - 1:
            bad = "bad" in results or spoilt == step or self.chance.random() < self.noise
            return text("failed" if bad else "passed", cost="0.01")
        well = spoilt != step and self.chance.random() >= self.noise
        return tool_call("work", {"step": step, "well": well}, cost="0.01")

    def recorded(self, spoilt: int) -> MemoryJournal:
        journal, noise = MemoryJournal(), self.noise
        self.noise = 0.0
        with self.engine(lambda request: self.reply(request, spoilt)) as engine:
            engine.run_sync("worker", "go", journal=journal)
        self.noise = noise
        self.done.clear()
        return journal

    def engine(self, model: Any = None) -> Engine:
        return Engine([self.agent], models=ScriptedModel(model or self.reply), pricing=None)

    async def blamed(self, journal: Any, **options: Any) -> Any:
        async with self.engine() as engine:
            return await blame(engine, journal, PASSED, **options)


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG76", "evaluation:JG77")
async def test_the_spoilt_step_is_found_in_18_of_20_runs() -> None:
    """
    Six steps, one spoilt, every reply wrong by itself one time in twenty: twenty runs, each with another seed.
    """
    right, named = 0, 0
    for seed in range(20):
        work = Work(noise=0.05, seed=seed)
        spoilt = 1 + seed % 6
        report = await work.blamed(work.recorded(spoilt))
        found = report.blamed
        right += found is not None and found.step.index == spoilt
        named += found is not None and found.first.index <= spoilt <= found.last.index

    assert right >= 18
    assert named >= right


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG76", "evaluation:JG78")
@pytest.mark.parametrize("spoilt", [1, 3, 6])
async def test_without_noise_blame_names_the_last_helpful_step(spoilt: int) -> None:
    """
    Asked anew up to the spoilt step every run passes, after it none; also when that is the first step or the last.
    """
    work = Work()
    report = await work.blamed(work.recorded(spoilt), k=4)

    assert [4] * spoilt + [0] * (6 - spoilt) == [step.ok for step in report.steps]
    assert (spoilt, spoilt, spoilt) == tuple(
        step.step for step in (report.blamed.step, report.blamed.first, report.blamed.last)
    )
    # The better reply makes a call that nobody recorded; it is made, and nothing else is.
    assert ({spoilt} if spoilt < 6 else set()) == set(work.done)
    assert len(work.done) == report.performed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG77", "evaluation:JG8")
async def test_unmeasurable_steps_are_named_with_the_missing_tool() -> None:
    """
    A better reply calls what is not recorded: that is unknown and no failure, and the tool is named.
    """
    work = Work(idempotent=False)
    journal = work.recorded(1)
    nothing = await work.blamed(journal, k=4)
    made_up = await work.blamed(journal, k=4, simulate=lambda call, recorded: "good" if call.input["well"] else "bad")

    assert nothing.blamed is None
    assert (4, "work") == (nothing.steps[0].unknown, nothing.steps[0].tool)
    assert "not measurable" in "\n".join(nothing.lines())
    assert 1 == made_up.blamed.step.step
    assert [] == work.done


@pytest.mark.spec("evaluation:JG77", "evaluation:JG86", "evaluation:JG12")
async def test_a_waiting_run_is_unmeasurable_and_unanswered_calls_unpriced() -> None:
    def asking(ctx: Any) -> Any:
        yield STEP
        return (yield from Ask("Ship it?"))

    agent, waiting, failed = (
        AgentDefinition("asking", model="t/m", handle_steps=asking),
        MemoryJournal(),
        MemoryJournal(),
    )
    async with Engine([agent], models=ScriptedModel(lambda _: text("well", cost="0.01"))) as engine:
        await engine.run("asking", "go", journal=waiting)
        report = await blame(engine, waiting, PASSED, k=2)
    async with Engine([agent], models=ScriptedModel([failure(ModelError("gone"))])) as engine:
        await engine.run("asking", "go", journal=failed)

    assert "not measurable: most runs wait for an unrecorded answer, or the budget did not cover them" in report.why
    assert CostEstimate(8, Decimal("0.08"), Decimal("0.16")) == estimate_blame_cost(waiting, 8)
    assert CostEstimate(8, None, None) == estimate_blame_cost(failed, 8)


@pytest.mark.spec("evaluation:JG86")
async def test_confirm_approves_the_estimate_and_sets_the_budget() -> None:
    work, estimates = Work(steps=2), []
    passed, failed = work.recorded(0), work.recorded(1)

    def refuse(estimate: CostEstimate) -> None:
        estimates.append(estimate)
        raise DataError("too expensive")

    async def approve(_: CostEstimate) -> SharedBudget:
        return SharedBudget("0.01", allow_unpriced=True)

    with pytest.raises(DataError, match="too expensive"):
        await work.blamed(failed, k=2, confirm=refuse)
    assert [] == work.done
    assert "this run passes" in (await work.blamed(passed, k=2, confirm=refuse)).why
    report = await work.blamed(failed, k=2, confirm=approve)

    assert [CostEstimate(6, Decimal("0.06"), Decimal("0.12"))] == estimates
    assert "the budget is spent" in report.stopped


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG78")
async def test_a_long_run_is_searched_by_halves() -> None:
    """
    Of 24 steps only some are tried, with twice as many runs beside the place.
    """
    work = Work(steps=24)
    report = await work.blamed(work.recorded(17), k=3)

    assert 17 == report.blamed.step.step
    assert len(report.steps) <= 10
    assert 3 + 2 * 3 == report.blamed.step.known


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG78", "evaluation:JG86")
async def test_the_estimate_of_a_long_run_grows_with_k() -> None:
    """
    The estimate is no smaller than half and no larger than three times what asking took.
    """
    work, asked, spoilt = Work(steps=24), [], 17
    journal = work.recorded(spoilt)
    expected = estimate_blame_cost(journal, 2)
    more = estimate_blame_cost(journal, 20).calls
    async with work.engine(lambda request: asked.append(request) or work.reply(request)) as engine:
        await blame(engine, journal, PASSED, k=2)

    assert len(asked) / 2 <= expected.calls <= 3 * len(asked)
    assert 10 * expected.calls == pytest.approx(more, rel=0.01)
    assert Decimal("0.01") * expected.calls == pytest.approx(expected.low, rel=Decimal("0.01"))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG78")
async def test_always_passing_and_always_failing_runs_have_no_blame() -> None:
    """
    The check has to fail on the journal; where it fails from everywhere, nothing is named.
    """
    work = Work()
    passes = await work.blamed(work.recorded(0), k=2)
    async with work.engine(lambda request: work.reply(request, 6)) as engine:
        never = await blame(engine, work.recorded(2), PASSED, k=8)

    assert (None, ()) == (passes.blamed, passes.steps)
    assert "this run passes" in passes.why
    assert never.blamed is None
    assert "no step is to blame: 0 of 48 runs pass" in never.why


@pytest.mark.spec("evaluation:JG78")
async def test_a_child_step_is_named_with_its_parents_step() -> None:
    """
    The child's second reply is spoilt: its address is told, and the step of the root in which it ran.
    """
    work = Work(steps=3)

    def handle_steps(ctx: Any) -> Any:
        yield STEP_ALL
        return (yield from AgentCall(work.agent, "go"))

    parent = AgentDefinition("parent", model="t/m", spawnable_agents=[work.agent], handle_steps=handle_steps)

    def reply(request: Any, spoilt: int = 0) -> Any:
        return work.reply(request, spoilt) if request.tools else text("well")

    journal = MemoryJournal()
    with Engine([parent], models=ScriptedModel(lambda r: reply(r, 2)), pricing=None) as engine:
        engine.run_sync("parent", "go", journal=journal)
    async with Engine([parent], models=ScriptedModel(reply), pricing=None) as engine:
        report = await blame(engine, journal, Check.from_expression("output == 'passed'"), k=4)

    assert ("1#2", 1, 3) == (report.blamed.step.address, report.blamed.step.step, report.blamed.step.index)


@pytest.mark.spec("evaluation:JG78")
def test_a_change_point_is_found_only_beyond_chance() -> None:
    """
    Clear falls at every place, none in level or rising rates, and neighbours that may be as well.
    """
    for place in range(1, 6):
        assert (place, place, place) == find_pass_rate_drop([(8, 8)] * place + [(0, 8)] * (6 - place))
    assert find_pass_rate_drop([(4, 8)] * 6) is None
    assert find_pass_rate_drop([(0, 8)] * 3 + [(8, 8)] * 3) is None
    assert find_pass_rate_drop([(1, 2), (0, 2)]) is None
    best, first, last = find_pass_rate_drop([(8, 8), (8, 8), (4, 8), (0, 8), (0, 8)]) or (0, 0, 0)
    assert (2, 3) == (first, last)
    assert best in (2, 3)


@pytest.mark.spec("evaluation:JG76")
async def test_a_check_is_an_expression_or_function_with_own_errors() -> None:
    """
    An assertion's text is the reason; any other error is the author's to repair.
    """
    work = Work()
    async with work.engine() as engine:
        result = await engine.run("worker", "go")

    def polite(ended: Any) -> bool:
        assert "please" in ended.text, "it says no please"
        return True

    assert "" == Check.from_expression("tools.count('work') == 5 and status == 'completed'").find_failure(result)
    assert "it says no please" == Check("polite", polite).find_failure(result)
    assert "steps > 99 does not hold" == Check.from_expression("steps > 99").find_failure(result)
    with pytest.raises(DataError, match="the check nonsense failed: NameError"):
        Check.from_expression("nonsense").find_failure(result)
    with pytest.raises(DataError, match="is not an expression"):
        Check.from_expression("import os")


SPOILT = """
from stepengine.testing import text, tool_call

def replies(request):
    looked = [m for m in request.messages if m.role == "tool"]
    return text("three on c0") if looked else tool_call("look", {"shelf": "c0"})
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG76", "evaluation:JG78", "evaluation:JG87", "evaluation:JG12")
def test_the_blame_command_names_the_step_and_its_exit_code(folder: Any) -> None:
    """
    A run that told nonsense at its end: its last step is to blame; the words of the report, JSON, and codes 0, 1, 2 and 5.
    """
    replies = itertools.chain([tool_call("look", {"shelf": "c0"}), text("no idea")])
    folder.record("bad.jsonl", "c0", replies)
    folder.write("script.py", SPOILT)
    folder.write(
        "checks.py", "def counts(result):\n    assert 'three' in result.text, 'it does not count'\n    return True\n"
    )
    Path("looked.txt").unlink()
    words = ("compare", "blame", "bad.jsonl", "--script", "script.py", "-n", "4", "--tools", "recorded")

    said = folder.type(*words, "--check", "'three' in text").stdout
    report = folder.json(*words, "--check", "checks:counts")

    assert "step   2  #2       4 of 4 pass" in said
    assert "<- blamed" in said
    assert "stepengine fork bad.jsonl --at '#2'" in said
    assert {"step": 2, "address": "#2", "first": 2, "last": 2} == report["blamed"]
    assert [(4, 0, 0), (4, 0, 0)] == [(s["ok"], s["failed"], s["unknown"]) for s in report["steps"]]
    assert "this run passes" in folder.type(*words, "--check", "text == 'no idea'", code=Exit.FAILED).stdout
    folder.type(*words, "--check", "text ==", code=Exit.USAGE)
    folder.type(*words, "--check", "checks:nothing", code=Exit.USAGE)
    folder.type(*words, "--check", "'three' in text", "--steps", "1:7", code=Exit.USAGE)
    folder.type(*words, "--check", "'three' in text", "--steps", "x", code=Exit.USAGE)
    folder.type("compare", "blame", "none.jsonl", "--check", "1", code=Exit.USAGE)
    folder.write("leaves.py", "import sys\nsys.exit(3)\n")
    assert "SystemExit: 3" in folder.type(*words, "--check", "leaves:fn", code=Exit.USAGE).stderr
    refused = folder.type(
        "compare", "blame", "bad.jsonl", "--check", "'three' in text", "--tools", "recorded", code=Exit.USAGE
    )
    assert "this will make about 24 model calls" in refused.stderr
    looks_first = "def looks_first(ctx):\n    yield ToolCall('look', {'shelf': 'c1'})\n\nagent ="
    changed = Path("agents/shop.py").read_text().replace("count])", "count], handle_steps=looks_first)")
    folder.write("changed.py", changed.replace("agent =", looks_first))
    folder.type(*words, "--agent", "changed.py", "--check", "0", code=Exit.DIVERGED)
    assert not Path("looked.txt").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG86", "evaluation:JG12")
def test_a_spent_budget_leaves_a_partial_blame_and_exit_code(folder: Any) -> None:
    """
    Whatever was found by then: a script that reads the code must not take it for the whole answer.
    """
    folder.record("bad.jsonl", "c0", itertools.chain([tool_call("look", {"shelf": "c0"}), text("no idea")]))
    folder.write("script.py", SPOILT)
    asked = ["-n", "4", "--tools", "recorded", "--check", "'three' in text"]
    words = ("compare", "blame", "bad.jsonl", "--script", "script.py", *asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepengine.models.pricing.ListPrices.__call__", lambda *_: Decimal("0.02"))
        enough = folder.json(*words, "--budget", "9")
        report = folder.json(*words, "--budget", "0.1", code=Exit.LIMIT)

    assert (enough["stopped"], enough["blamed"]["step"]) == (None, 2)
    assert "budget" in report["stopped"]
    assert 0 < float(report["spent"]) <= 0.1
