"""
Evaluations from Python: ``evaluate`` runs one and returns its report, as ``stepengine eval`` does on the command line.

Each sample works on a private copy of its files and is recorded. Nothing here prints, and nothing asks a person.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition
from stepengine.engine import Engine
from stepengine.engine.loader import load_agent
from stepengine.engine.options import ModelsLike
from stepengine.errors import DataError, JournalError
from stepengine.evaluation.case_runs import Evaluation, run_samples
from stepengine.evaluation.criteria import Case
from stepengine.evaluation.evaluation_files import load_evaluation, resolve_agent_path
from stepengine.evaluation.report_pages import failed_lines, summary_lines
from stepengine.evaluation.scoring import PASS, Scores, check_gates, parse_gates, score_outcome
from stepengine.journal import SharedBudget
from stepengine.models.scripted import ScriptedModel

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
        """Whether all samples were run; a spent budget ends an evaluation early."""
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
        msg = f"the report has no check {check!r} of the agent {side!r}; it has {known}"
        raise DataError(msg)

    def __str__(self) -> str:
        gates = [f"gate {text}: {problem or 'holds'}" for text, problem in self.gates.items()]
        return "\n".join([*summary_lines(self.scores), *failed_lines(self.scores, self.folder), *gates])


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
) -> EvaluationReport:
    """
    Run an evaluation and return its report.

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
        folder: The folder for the journals; a new temporary one by default.
        root: The folder that the paths of agents and files start from: that of the evaluation's file, or the working folder.

    Raises:
        DataError: when the evaluation cannot be run; all problems at once, and nothing was spent.
    """
    where = _find_root(evaluation, root)
    loaded = evaluation if isinstance(evaluation, Evaluation) else load_evaluation(Path(evaluation))
    loaded = loaded if n is None else attrs.evolve(loaded, n=n)
    asked = parse_gates(loaded, gates)
    load = partial(_load_agent, root=where)
    place = Path(tempfile.mkdtemp(prefix="stepengine-eval-") if folder is None else folder)
    outcome = await run_samples(
        loaded,
        place,
        partial(_make_engine, models=models, model=model),
        agents={name: load(agent) for name, agent in loaded.agents.items()},
        root=where,
        load=load,
        models=_script_models(replies),
        n=loaded.n,
        seed=random.randrange(MAX_SEED) if seed is None else seed,  # noqa: S311 - an order, no secret
        concurrency=concurrency,
        budget=_parse_budget(budget),
    )
    scores = score_outcome(outcome)
    return EvaluationReport(scores, {gate.text: problem for gate, problem in check_gates(asked, scores)}, place)


def evaluate_sync(evaluation: Evaluation | str | Path, **options: Any) -> EvaluationReport:
    """Run an evaluation without an event loop and return its report; options and errors are those of ``evaluate``."""
    return asyncio.run(evaluate(evaluation, **options))


def _find_root(evaluation: Evaluation | str | Path, root: str | Path | None) -> Path:
    if root is not None:
        return Path(root).resolve()
    return Path.cwd() if isinstance(evaluation, Evaluation) else Path(evaluation).resolve().parent


def _load_agent(agent: Any, *, root: Path) -> AgentDefinition:
    """Return an agent of an evaluation; a path starts from *root*."""
    return agent if isinstance(agent, AgentDefinition) else load_agent(resolve_agent_path(agent, root))


def _script_models(replies: Any) -> Callable[[Case], Any]:
    """Return the function that makes the models of one sample; it returns ``None`` for real models."""

    def make(case: Case) -> Any:
        script = replies if case.replies is None else case.replies
        return None if script is None else ScriptedModel(script)

    if replies is not None:
        ScriptedModel(replies)  # A script that cannot be used is reported before anything runs.
    return make


def _make_engine(agent: AgentDefinition, root: Path, *, models: ModelsLike, model: str | None, **_: bool) -> Engine:
    """Return the engine of one sample, whose bundled file and search tools work in *root*."""
    from stepengine.tools.bundled import file_tools, search_tools

    tools = [*file_tools(root, write=True, delete=True), *search_tools(root)]
    return Engine(
        [agent], tools=tools, workspace=root, models=models, agent_models={} if model is None else {"": model}
    )


def _parse_budget(budget: Decimal | float | str | None) -> Decimal | None:
    try:
        return SharedBudget(budget).dollars
    except JournalError:
        msg = f"budget={budget!r} is not an amount of US dollars; a number above 0 is, such as budget=2.50"
        raise DataError(msg) from None
