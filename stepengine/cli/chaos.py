"""``stepengine test --chaos``: an agent in simulated worlds with faults."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Options, parse_json_params
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import list_names

RUNS = 100


def run_chaos(
    agent: str, prompt: str, options: Options, *, params: str, results: str, faults: str, runs: int, seed: int
) -> Exit:
    """Run an agent in simulated worlds with faults, and print a failed check or the totals. Return the exit code."""
    from stepengine.engine import load_agent
    from stepengine.engine.agent_family import collect_agent_family
    from stepengine.testing import SimulationFailed, simulate
    from stepengine.testing.faults import FAULTS
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    kinds = [kind.strip() for kind in faults.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown:
        msg = (
            f"--faults has {unknown[0]!r}, which is not a kind of fault; valid kinds: {list_names(FAULTS, unknown[0])}"
        )
        raise UsageProblem(msg)
    loaded = load_agent(agent, folders=options.settings.agent_folders)
    known = collect_agent_family(loaded, agent, options.settings.agent_folders)
    named = {tool for one in known for tool in one.tools if isinstance(tool, str)}
    try:
        seen = simulate(
            loaded,
            range(seed, seed + runs),
            prompt=prompt,
            params=parse_json_params(params),
            tools=[tool for tool in list_all_workspace_tools(options.cwd.resolve()) if tool.spec.name in named],
            results=parse_json_params(results, "--results"),
            faults=kinds or None,
            agents=[one for one in known if one is not loaded],
        )
    except SimulationFailed as failed:
        if options.as_json:
            found = [attrs.asdict(fault) for fault in failed.faults]
            print(to_ascii_json({"seed": failed.seed, "row": failed.row, "faults": found, "message": str(failed)}))
        else:
            print_visible(str(failed))
        return print_error(f"a required property was violated, with the seed {failed.seed}", Exit.FAILED)
    ended = {status.value: count for status, count in seen.statuses.items()}
    if options.as_json:
        print(to_ascii_json({"runs": seen.runs, "effects": seen.effects, "statuses": ended, "faults": seen.faults}))
    else:
        print(f"{seen.runs} runs with {seen.effects} effects, from seed {seed}: every required property held")
        print(
            f"the runs ended as: {_format_counts(ended)}\ninjected faults: {_format_counts(seen.faults) or 'nothing'}"
        )
    return Exit.COMPLETED


def _format_counts(counts: Mapping[str, int]) -> str:
    """Return names with their counts as text, the highest count first."""
    most = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join([f"{name} {count}" for name, count in most])
