"""``stepengine compare improve``: a search for a better version of an agent, judged by an evaluation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.bench import make_model_registry_for_agents, make_pricing
from stepengine.cli.evaluation import (
    join_and_redact_lines,
    make_result_folder_path,
    make_sample_engine,
    redact_report,
    run_and_close_engines,
    run_reporting_errors,
)
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Model, Options, with_shared_options
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.scripts import ScriptFile, load_script
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.evaluation import Improvement


@partial(with_shared_options, without=("cwd", "write", "verbose"))
def improve(
    options: Options,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="File or id of the agent.")],
    *,
    file: Annotated[
        str, typer.Option("--eval", help="A .py file with `evaluation = ...`, or a .yaml file.", metavar="FILE")
    ] = "",
    budget: Annotated[
        str, typer.Option("--budget", help="Limit on the total cost, in US dollars.", metavar="USD")
    ] = "",
    n: Annotated[int | None, typer.Option("-n", help="Samples of each case; default: what FILE says.", min=1)] = None,
    by: Annotated[str, typer.Option(help="What to improve: pass, or a check.", metavar="CHECK")] = "pass",
    only: Annotated[
        list[str] | None, typer.Option(help="Change only matching parts, such as 'tools.*'.", metavar="GLOB")
    ] = None,
    model: Model = None,
    reflect_model: Annotated[
        str, typer.Option(help="The model that proposes changes; default: the model of AGENT.", metavar="MODEL")
    ] = "",
    blame: Annotated[
        int | None,
        typer.Option(
            help="Runs from each step of a failed run, to find the step to blame; 0 for none; default: 4.",
            min=0,
            max=20,
        ),
    ] = None,
    versions: Annotated[
        int | None, typer.Option(help="Maximum number of versions to try; default: 60.", min=1, max=1000)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Number of concurrent cases; default: 4.", min=1, max=64)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all random choices; default: random, and printed.", min=0)
    ] = None,
    out: Annotated[
        str, typer.Option(help="Folder of the results; default: improvements/AGENT/TIME.", metavar="DIR")
    ] = "",
    goes_on: Annotated[str, typer.Option("--continue", help="Continue an interrupted search.", metavar="DIR")] = "",
    script: ScriptFile = "",
    writes: Annotated[bool, typer.Option("--write", help="Write the better version to the agent's file.")] = False,
) -> Exit:
    r"""
    Search for a better version of an agent, and verify it.

    Changes only texts and values in AGENT's file: prompts, tool descriptions, settings, defaults of params; never
    code. A model reads failed runs with the step to blame and changes one text or value. Versions that are best in at
    least one case are kept and merged. Some cases of FILE are held out: those with the tag held-out, or random ones.
    The best version counts as better only if it is better on held-out cases, beyond the interval of `stepengine
    eval`.

    --budget limits the whole search, and is exceeded by at most one model call. No reply is paid for twice, even
    after a crash or for equal requests of two versions. Results are kept in a folder: improvement.diff, report.html,
    and journals of all runs and of the search. FILE and AGENT are executed as your own code.

    Exit codes:
      0    a better version was found
      1    none was found, or AGENT was edited meanwhile; nothing changes
      2    wrong usage, or the agent cannot be improved; nothing was spent
      4    the budget was spent before a decision; nothing changes

    Examples:
      stepengine compare improve ./agents/mine.py --eval evals.py --budget 2
      stepengine compare improve ./mine.py --eval evals.py --budget 2 --write
      stepengine compare improve ./agents/mine.py --eval evals.py \
          --continue improvements/mine/20260102-101500
    """

    def search_and_report() -> Exit:
        """Search for a better version within the budget, print the report, and return the exit code."""
        from stepengine.engine.agent_family import collect_agent_family
        from stepengine.engine.loader import locate_agent
        from stepengine.evaluation import improve as search_version

        if not file:
            msg = "--eval FILE defines how the agent is judged; `stepengine eval` runs such a file"
            raise UsageProblem(msg)
        own = attrs.evolve(options, agent="", model=model).with_settings()
        folders = own.settings.agent_folders
        place = locate_agent(agent, folders=folders)
        known = place.load()

        def make_engine(agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
            """Return an engine for a sample of a version, whose tools work in *root*."""
            file_of_agent = str(place.file) if agent.id == known.id else ""
            return make_sample_engine(own, agent, file_of_agent, root, performs=performs)

        searched = partial(
            search_version, agent, file, budget=budget, replies=load_script(script) if script else None,
            models=None if script else make_model_registry_for_agents(own, collect_agent_family(known, str(place.file), folders)),
            agent_models=own.models, default_model=own.settings.get("model"), reflect_model=reflect_model or None,
            pricing=make_pricing(own), n=n, by=by, only=only or (), blame=blame, versions=versions,
            concurrency=concurrency, seed=seed, folder=out or make_result_folder_path("improvements", known.id),
            resume=goes_on, write=writes, agent_folders=folders,
            on_progress=(lambda _: None) if options.quiet else print_error, make_engine=make_engine,
        )  # fmt: skip
        made = run_and_close_engines(searched, [])
        _print_report(made, as_json=options.as_json, writes=writes)
        if made.is_undecided:
            return Exit.LIMIT
        return Exit.COMPLETED if made.is_better and made.is_written == writes else Exit.FAILED

    return run_reporting_errors(search_and_report)


def _print_report(improvement: Improvement, *, as_json: bool, writes: bool) -> None:
    """Print the result of a search as text or JSON, and how to apply the better version."""
    if as_json:
        print(to_ascii_json(redact_report(improvement.to_json())))
        return
    lines = [improvement.describe()]
    if improvement.is_better:
        patch = f"`patch -p1 < {improvement.folder / 'improvement.diff'}`"
        done = "changed" if improvement.is_written else f"not changed; to apply this, pass --write or run {patch}"
        if writes and not improvement.is_written:
            done = f"not changed, because it was edited during the search; to merge both, run {patch}"
        lines += [*improvement.diff.rstrip("\n").split("\n"), f"{improvement.file}: {done}"]
    print_visible(
        join_and_redact_lines([*lines, f"spent ${improvement.spent}; results: {improvement.folder}"]), hanging_indent=4
    )
