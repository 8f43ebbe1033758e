"""
The search of `stepengine compare improve` beside a naive one, on the same tasks, with the same models, seeds and budget.

The naive search shows the model that reflects the agent alone, not how it failed, runs each version that comes of it on all cases, and
goes on from the best. Who decides is the same: held-out cases, and the interval.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from typer.testing import CliRunner

from benchmarks.improving.reflecting import replies
from stepengine import Engine, Transcript, UserMessage
from stepengine.cli.app import app
from stepengine.engine.loader import AgentLocation
from stepengine.errors import LimitExceeded
from stepengine.evaluation.alterations import AgentFile
from stepengine.evaluation.evaluation_files import load_evaluation
from stepengine.evaluation.improvement import Trials, split_cases
from stepengine.evaluation.reply_book import CachingProvider, ReplyBook
from stepengine.models import ModelRequest, Models
from stepengine.models.pricing import LIST_PRICES
from stepengine.testing import ScriptedModel

HERE = Path(__file__).resolve().parent
TASKS = ("letters", "lengths", "lists", "coins")
"""The last one has no better agent."""
BUDGET = "0.60"
SEEDS = range(10)
FOUND = HERE / "found.json"
"""What `compare improve` found, by task and seed: the table is made of it, and a test repeats some of its searches."""
MARKS = ("<!-- made by python -m benchmarks.improving -->", "<!-- until here -->")


class Found(NamedTuple):
    """What a search came to."""

    is_better: bool
    spent: Decimal
    versions: int


def improved(task: str, seed: int, folder: Path) -> Found:
    """Search as the command does."""
    file, script = f"{HERE / task}.py", f"{HERE / 'reflecting.py'}"
    typed = [
        "compare",
        "improve",
        file,
        "--eval",
        file,
        "--script",
        script,
        "--budget",
        BUDGET,
        "--seed",
        str(seed),
        "--out",
        str(folder),
        "-q",
    ]
    ended = CliRunner().invoke(app, typed)
    if ended.exit_code not in (0, 1):
        raise AssertionError(ended.output)
    told = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return Found(told["is_better"], Decimal(told["spent"]), len(told["versions"]) - 1)


def naive(task: str, seed: int, folder: Path) -> Found:
    """Search by guessing."""
    folder.mkdir(parents=True)
    file = AgentFile.load(AgentLocation(HERE / f"{task}.py"))
    evaluation = load_evaluation(HERE / f"{task}.py")
    search, held_out = split_cases(evaluation, seed)
    with ReplyBook(folder / "bought.jsonl", Decimal(BUDGET)) as book:
        trials = Trials(
            file, evaluation, folder, book, lambda agent, _, **__: Engine([agent]), HERE, lambda agent: agent,
            lambda case: Models.from_value(ScriptedModel(case.replies)), LIST_PRICES, is_scripted=lambda _: True,
        )  # fmt: skip
        return asyncio.run(_guessed(trials, search, held_out, seed))


async def _guessed(trials: Trials, search: list[str], held_out: list[str], seed: int) -> Found:
    reflecting = CachingProvider(
        trials.book, "reflecting", Models.from_value(ScriptedModel(replies)), trials.pricing, may_be_unpriced=True
    )
    parts = {name: part.value for name, part in trials.file.parts.items()}
    chance, tried = Random(seed), 0
    best: dict[str, Any] = {}
    score, each = await _mean(trials, best, search)
    while (
        score < 1
        and trials.book.spent + each * (len(search) + 2 * len(held_out)) * Decimal("1.2") <= trials.book.budget
    ):
        shown = "\n\n".join([f"<part name={name!r}>\n{value}\n</part>" for name, value in {**parts, **best}.items()])
        request = ModelRequest(
            "scripted/model", messages=Transcript([UserMessage(f"{shown}\n\nHow it did: {chance.random()}")])
        )
        try:
            given = (await reflecting.complete(request)).tool_calls[0].input
        except LimitExceeded:
            break
        made, tried = {**best, given["part"]: given["value"]}, tried + 1
        reached, _ = await _mean(trials, made, search)
        if reached > score:
            best, score = made, reached
    if not best:
        return Found(False, trials.book.spent, tried)
    for version in ({}, best):
        await _mean(trials, version, held_out)
    scores = await trials.compare_with_original(best, held_out, seed)
    (low,) = [pair.difference.low for pair in scores.pairs if pair.check == "pass"]
    return Found(low is not None and low > 0, trials.book.spent, tried)


async def _mean(trials: Trials, changes: dict[str, Any], cases: list[str]) -> tuple[float, Decimal]:
    runs = [await trials.run_case(changes, case, None) for case in cases]
    return fmean([run["score"] or 0.0 for run in runs]), sum([Decimal(run["cost"]) for run in runs], Decimal(0)) / len(
        runs
    )


def measured(
    task: str, search: Callable[[str, int, Path], Found], folder: Path, seeds: Iterable[int] = SEEDS
) -> list[Found]:
    """Return what a search finds, by seed."""
    return [search(task, seed, folder / search.__name__ / task / str(seed)) for seed in seeds]


def read_found() -> dict[str, list[Found]]:
    """Return what `compare improve` found when the table was made, by task."""
    tasks = json.loads(FOUND.read_text(encoding="utf-8"))
    return {
        task: [Found(better, Decimal(spent), versions) for better, spent, versions in found]
        for task, found in tasks.items()
    }


def write_found(tasks: dict[str, list[Found]]) -> None:
    """Write what `compare improve` found."""
    lines = [f"{json.dumps(task)}: {json.dumps(found, default=str)}" for task, found in tasks.items()]
    FOUND.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n", encoding="utf-8")


def cells_of(found: list[Found]) -> list[str]:
    """Return how many seeds found a better agent, the mean cost and the mean number of versions."""
    spent, tried = fmean([float(one.spent) for one in found]), fmean([one.versions for one in found])
    return [f"{sum(one.is_better for one in found)} of {len(found)}", f"${spent:.2f}", f"{tried:.0f}"]


def table(found: dict[str, list[Found]], folder: Path) -> str:
    """Return the table of the documentation: what `compare improve` found, beside what guessing finds."""
    lines = [
        "| task | there is a better one | found by `compare improve` | for | after versions | found by guessing | for | after versions |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for task in TASKS:
        cells = [f"`{task}`", "no" if task == TASKS[-1] else "yes"]
        for each in (found[task], measured(task, naive, folder)):
            cells += cells_of(each)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with(text: str, made: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"
