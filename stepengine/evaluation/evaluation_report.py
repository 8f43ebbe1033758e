"""
``evaluate`` runs an evaluation, writes its results and returns the report; ``stepengine eval`` calls it and prints that.

Each sample works on a private copy of its files and is recorded. Nothing here prints, and nothing asks a person.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import to_string_tuple
from stepengine.data.visible import to_ascii_json, visible
from stepengine.engine import Engine, loader
from stepengine.engine.options import ModelsLike
from stepengine.errors import DataError, JournalError
from stepengine.evaluation.case_runs import (
    EngineMaker,
    Evaluation,
    Sample,
    run_samples,
)
from stepengine.evaluation.criteria import Case
from stepengine.evaluation.evaluation_files import load_evaluation, resolve_agent_path
from stepengine.evaluation.report_pages import failed_sample_lines, render_report, summary_lines
from stepengine.evaluation.result_folders import (
    RESULTS,
    read_seed_and_sample_count,
    replace_file,
    require_own_result_folder,
)
from stepengine.evaluation.samples import Confirm, CostEstimate, confirm_cost_and_get_budget
from stepengine.evaluation.scoring import PASS, Scores, parse_gates, score_outcome
from stepengine.journal import SharedBudget
from stepengine.models.scripted import ScriptedModel
from stepengine.redaction import make_redactor

MAX_SEED = 2**31
"""Seeds are below it: short enough to type, and enough that two evaluations hardly ever draw the same one."""


@frozen(repr=False)
class EvaluationReport:
    """
    The result of an evaluation; as text, the report of ``stepengine eval``.

    Attributes:
        scores: The means, differences and ratios with their intervals, and all samples.
        gates: Each gate with the reason why it does not hold; ``""`` for a gate that holds.
        folder: The folder with the journals of all runs.
    """

    scores: Scores
    gates: Mapping[str, str]
    folder: Path

    def __repr__(self) -> str:
        """Return one line, since pytest shows it at a failed assertion; ``str`` is the whole report."""
        failed = "; ".join([f"gate {text}: {problem}" for text, problem in self.gates.items() if problem])
        said = "passed" if self.passed else failed or "incomplete, or a check is broken"
        return f"<EvaluationReport of {self.scores.outcome.evaluation.name!r}: {said}>"

    @property
    def is_complete(self) -> bool:
        """Whether there are all samples; a spent budget ends an evaluation early, and a recheck runs none."""
        return not self.scores.outcome.stopped

    @property
    def passed(self) -> bool:
        """Whether the evaluation is complete, no check is broken and every gate holds."""
        return self.is_complete and not self.scores.broken and not any(self.gates.values())

    @property
    def spent(self) -> Decimal:
        """The cost of the new runs in US dollars, as far as prices are known."""
        return self.scores.outcome.spent

    def mean(self, check: str = PASS, *, agent: str | None = None) -> float | None:
        """
        Return the mean of a check over the cases; ``None`` if it has no value.

        Args:
            check: The name of the check; ``"pass"`` is the share of cases in which all of them pass.
            agent: The name of an agent of the evaluation; the first one by default.

        Raises:
            DataError: when the evaluation has no such check or agent.
        """
        side = self.scores.outcome.sides[0].name if agent is None else agent
        for row in self.scores.rows:
            if (row.side, row.check) == (side, check):
                return row.mean.mean
        known = list_names([f"{row.side}.{row.check}" for row in self.scores.rows], f"{side}.{check}")
        msg = f"the report has no check {check!r} for the agent {side!r}; its checks: {known}"
        raise DataError(msg)

    @property
    def gate_lines(self) -> list[str]:
        """A line for each gate: that it holds, or why not."""
        return [f"gate {text}: {problem or 'holds'}" for text, problem in self.gates.items()]

    def __str__(self) -> str:
        return "\n".join(
            [*summary_lines(self.scores), *failed_sample_lines(self.scores, self.folder), *self.gate_lines]
        )


async def evaluate(
    evaluation: Evaluation | str | Path,
    *,
    replies: Any = None,
    models: ModelsLike = None,
    model: str | None = None,
    n: int | None = None,
    budget: Decimal | float | str | None = None,
    gates: Iterable[str] = (),
    concurrency: int = 4,
    seed: int | None = None,
    folder: str | Path | None = None,
    root: str | Path | None = None,
    cases: Iterable[str] = (),
    tags: Iterable[str] = (),
    agents: Mapping[str, Any] | None = None,
    against: str | Path | None = None,
    recheck: str | Path | None = None,
    resume: str | Path | None = None,
    keep: bool = False,
    confirm: Confirm | None = None,
    on_sample: Callable[[Sample], object] = lambda _: None,
    render_page: Callable[[Path], str] | None = None,
    load_agent: Callable[[Any], AgentDefinition] | None = None,
    make_engine: EngineMaker | None = None,
) -> EvaluationReport:
    """
    Run an evaluation, write ``results.json`` and return the report.

    The options are those of ``stepengine eval``. Without *replies*, models are requested for real, and *budget* bounds their cost.
    Bundled tools for files and search work in the copy of each sample; other bundled tools are not available.

    Args:
        evaluation: The evaluation, or the path of a file that holds one.
        replies: A script of model replies, as for ``ScriptedModel``; it starts anew for each sample. A case's own go first.
        models: The providers of the engines, as for ``Engine(models=...)``.
        model: A model in place of the models that the agents name.
        n: The number of samples of each case and agent; that of the evaluation by default.
        budget: The US dollars that all runs may cost together.
        gates: Conditions in addition to those of the evaluation, such as ``"pass >= 0.8"``.
        concurrency: The number of runs at a time.
        seed: Decides the order of the runs; random by default.
        folder: The folder for the results and journals; a new temporary one by default.
        root: The folder that the paths of agents and files start from: that of the evaluation's file, or the working folder.
        cases: Only cases whose id matches one of these patterns, such as ``"refund-*"``.
        tags: Only cases with one of these tags.
        agents: The agents to compare, by name, in place of those of the evaluation; the first is the base.
        against: A folder of earlier results: only samples that have changed since are run.
        recheck: A folder of earlier results: nothing is run, and the checks are repeated on its journals.
        resume: A folder of unfinished results: its missing samples are run.
        keep: Keep the working copies of the samples.
        confirm: Called before models are requested for real, with the number of runs as ``calls`` and an unknown cost. It raises
            to refuse, and may return the budget.
        on_sample: Called with each sample when it has ended.
        render_page: Also write ``report.html``, and the page of each run that this function renders from its journal, such as
            ``stepengine.debugging.render_run``.
        load_agent: Loads an agent that the evaluation names by path or id.
        make_engine: Creates the engine of a sample, in place of one with *models*, *model* and the bundled tools.

    Raises:
        DataError: when the evaluation cannot be run; all problems at once, and nothing was spent.
    """
    where = get_evaluation_root(evaluation, root)
    loaded = evaluation if isinstance(evaluation, Evaluation) else load_evaluation(Path(evaluation))
    loaded = _select_cases_and_agents(loaded, to_string_tuple(cases), to_string_tuple(tags), agents)
    earlier = _find_earlier_folder(against, recheck, resume)
    plan = read_seed_and_sample_count(earlier) if earlier is not None and not against else {}
    loaded = attrs.evolve(loaded, n=plan.get("n", loaded.n) if n is None else n)
    if problems := loaded.problems(where):
        msg = "\n  ".join([f"the evaluation {loaded.name!r} cannot be run:", *problems])
        raise DataError(msg)
    asked = parse_gates(loaded, gates)
    load = load_agent or partial(load_evaluation_agent, root=where)
    known = {name: load(agent) for name, agent in loaded.agents.items()}
    scripted, shared_budget = _make_case_models_factory(replies), _make_shared_budget(budget)
    make = make_engine or partial(make_sample_engine, models=models, agent_models={} if model is None else {"": model})
    if not recheck:
        await try_making_engines(known.values(), make)
        live = [case for case in loaded.cases if scripted(case) is None]
        runs = len(live) * len(known) * loaded.n
        estimate = partial(CostEstimate, runs, None, None)
        shared_budget = await confirm_cost_and_get_budget(confirm, estimate, shared_budget)
    place = Path(recheck or resume or folder or tempfile.mkdtemp(prefix="stepengine-eval-"))
    require_own_result_folder(place)
    outcome = await run_samples(
        loaded,
        place,
        make,
        agents=known,
        root=where,
        load=load,
        models=scripted,
        seed=plan.get("seed", random.randrange(MAX_SEED)) if seed is None else seed,  # noqa: S311 - an order, no secret
        concurrency=concurrency,
        budget=shared_budget.dollars,
        earlier=earlier,
        recheck=bool(recheck),
        keep=keep,
        done=on_sample,
    )
    scores = score_outcome(outcome)
    held = {gate.text: gate.find_problem(scores) for gate in asked}
    report = EvaluationReport(scores, held, place)
    _write_results(report, render_page)
    return report


def evaluate_sync(evaluation: Evaluation | str | Path, **options: Any) -> EvaluationReport:
    """Run an evaluation without an event loop and return its report; options and errors are those of ``evaluate``."""
    return asyncio.run(evaluate(evaluation, **options))


def get_evaluation_root(evaluation: Evaluation | str | Path, root: str | Path | None) -> Path:
    """Return the folder that the paths of an evaluation start from."""
    if root is not None:
        return Path(root).resolve()
    return Path.cwd() if isinstance(evaluation, Evaluation) else Path(evaluation).resolve().parent


def _select_cases_and_agents(
    evaluation: Evaluation, cases: Sequence[str], tags: Sequence[str], agents: Mapping[str, Any] | None
) -> Evaluation:
    """Return the evaluation with the chosen cases and agents; raise ``DataError`` if no case is chosen."""
    chosen = [
        case
        for case in evaluation.cases
        if (not cases or any(fnmatchcase(case.id, pattern) for pattern in cases))
        and (not tags or {*tags} & {*case.tags})
    ]
    if evaluation.cases and not chosen:
        known = list_names([case.id for case in evaluation.cases], cases[0] if cases else "")
        msg = f"no case of the evaluation {evaluation.name!r} has one of the chosen ids and tags; its cases: {known}"
        raise DataError(msg)
    return attrs.evolve(evaluation, cases=chosen, agents=agents or evaluation.agents)


def _find_earlier_folder(
    against: str | Path | None, recheck: str | Path | None, resume: str | Path | None
) -> Path | None:
    """Return the folder of earlier results, ``None`` if none is named; raise ``DataError`` for several, or one without results."""
    given = [Path(one) for one in (against, recheck, resume) if one]
    if len(given) > 1:
        msg = "against, recheck and resume cannot be combined; pass only one of them"
        raise DataError(msg)
    for earlier in given:
        # A killed evaluation has its cases alone. A recheck calls no model, so it may find nothing.
        if not (earlier.is_dir() if recheck else (earlier / RESULTS).is_file() or (earlier / "cases").is_dir()):
            msg = f"{str(earlier)!r} is not a folder of results; pass one that an evaluation printed"
            raise DataError(msg)
        return earlier
    return None


async def try_making_engines(agents: Iterable[AgentDefinition], make: EngineMaker) -> None:
    """Create and close an engine for each agent; raise if one cannot be created, for example for lack of a tool."""
    with tempfile.TemporaryDirectory(prefix="stepengine-eval-") as folder:
        for agent in agents:
            await _make_engine_in_folder(folder, agent, make).aclose()


def _make_engine_in_folder(folder: str, agent: AgentDefinition, make: EngineMaker) -> Engine:
    """Return the engine of an agent whose tools work in a folder."""
    return make(agent, Path(folder).resolve(), performs=True)


def load_evaluation_agent(agent: Any, *, root: Path, folders: Iterable[Path] = ()) -> AgentDefinition:
    """Return a definition unchanged, or load the agent of a path below *root* or of an id, also from *folders*."""
    if isinstance(agent, AgentDefinition):
        return agent
    return loader.load_agent(resolve_agent_path(agent, root), folders=folders)


def _make_case_models_factory(replies: Any) -> Callable[[Case], Any]:
    """Check the script *replies*, and return a function of a case that returns its scripted models, or ``None`` for real ones."""

    def make_models_of_case(case: Case) -> Any:
        """Return the scripted models of a case; ``None`` for the real ones."""
        script = replies if case.replies is None else case.replies
        return None if script is None else ScriptedModel(script)

    if replies is not None:
        ScriptedModel(replies)  # A script that cannot be used is reported before anything runs.
    return make_models_of_case


def make_sample_engine(agent: AgentDefinition, root: Path, *, performs: bool, **options: Any) -> Engine:  # noqa: ARG001
    """
    Return the engine of one sample, whose bundled file and search tools work in *root*.

    Args:
        agent: The agent.
        root: The working copy.
        performs: Not used: an engine that replays runs has the same tools, and calls none.
        options: Those of ``Engine``.
    """
    from stepengine.tools.bundled import file_tools, search_tools

    tools = [*file_tools(root, write=True, delete=True), *search_tools(root)]
    return Engine([agent], tools=tools, workspace=root, **options)


def _make_shared_budget(budget: Decimal | float | str | None) -> SharedBudget:
    """Return the budget for an amount of US dollars; raise ``DataError`` if it is not above 0."""
    try:
        return SharedBudget(budget)
    except JournalError:
        msg = f"budget={budget!r} is not an amount of US dollars; use a number above 0, such as budget=2.50"
        raise DataError(msg) from None


def _write_results(report: EvaluationReport, render_page: Callable[[Path], str] | None) -> None:
    report.folder.mkdir(parents=True, exist_ok=True)
    redactor = make_redactor("all", os.environ)
    results = {**report.scores.to_json(), "created": datetime.now(UTC).isoformat(timespec="seconds")}
    replace_file(report.folder / RESULTS, f"{to_ascii_json(redactor.value(results))}\n".encode())
    if render_page is not None:
        pages = _write_run_pages(report, render_page)
        page = render_report(report.scores, report.gate_lines, lambda text: visible(redactor.text(text)), pages)
        replace_file(report.folder / "report.html", page.encode())


def _write_run_pages(report: EvaluationReport, render_page: Callable[[Path], str]) -> dict[str, str]:
    """Write the page of each run next to its journal; return the paths of the pages by journal, without unreadable ones."""
    written: dict[str, str] = {}
    for sample in report.scores.outcome.samples:
        journal = report.folder / sample.journal
        # A run that ended before its first record has none; one that is damaged is named by the report as it is.
        with contextlib.suppress(JournalError):
            replace_file(journal.with_suffix(".html"), render_page(journal).encode())
            written[sample.journal] = Path(sample.journal).with_suffix(".html").as_posix()
    return written
