"""``stepengine config policy``: the rules of a policy file, and its decisions about the tool calls of recorded runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.exits import Exit
from stepengine.cli.settings import UsageProblem
from stepengine.data.json import compact

if TYPE_CHECKING:
    from stepengine.data.tools import ToolSpec
    from stepengine.permissions import Policy

SHOWN_CHARS = 200


def _print_policy(policy: Policy, *, as_json: bool) -> None:
    """Print the mode and the rules of a policy as text or JSON."""
    from stepengine.cli.screen.render import one_line, to_ascii_json

    if as_json:
        print(to_ascii_json(policy.to_json()))
        return
    print(f"mode {policy.mode}, {len(policy.rules)} rules")
    for rule in policy.rules:
        where = f", in {rule.scope}" if rule.scope.kind != "global" else ""
        first = f", priority {rule.priority}" if rule.priority else ""
        first += f", requested by a {rule.source}" if rule.source else ""
        said = f": {rule.description or rule.message}" if rule.description or rule.message else ""
        print(f"{rule.decision:5}  {one_line(f'{rule.matcher}{where}{first}{said}', 400)}")
    for rule in policy.remembered:
        print(f"always {one_line(f'{rule.matcher}, in {rule.scope}', 400)}")


def _judge_and_print_calls(policy: Policy, names: Sequence[str], agent: str, *, as_json: bool) -> Exit:
    """Print the recorded calls that *policy* would deny or ask about; return ``FAILED`` if there is one."""
    from stepengine.cli.journals import open_journal
    from stepengine.cli.screen.render import one_line, to_ascii_json
    from stepengine.journal import check_recorded_calls

    specs = _load_known_tool_specs(agent)
    judged = [(name, call) for name in names for call in check_recorded_calls(open_journal(name), policy, specs)]
    found = [(name, call) for name, call in judged if call.decision != "allow"]
    if as_json:
        print(to_ascii_json([{"journal": name, **attrs.asdict(call)} for name, call in found]))
    for name, call in () if as_json else found:
        print(f"{call.decision:5}  {one_line(f'{name} {call.address} {call.agent}', 200)}")
        print(f"       {one_line(f'{call.tool} {compact(call.input)}', SHOWN_CHARS)}")
        print(f"       {one_line(call.why, 400)}")
    unknown = {call.tool for _, call in judged} - specs.keys()
    if unknown:
        listed = one_line(", ".join(sorted(unknown)), 400)
        how = f"{agent} has no such tools" if agent else "name the agent's file with --agent"
        print(f"unknown tools, judged without a category: {listed}; {how}", file=sys.stderr)
    asked = sum(call.decision == "ask" for _, call in found)
    calls, runs = [f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in ((len(judged), "call"), (len(names), "run"))]
    print(f"{calls} in {runs}: {len(found) - asked} denied, {asked} asked about", file=sys.stderr)
    return Exit.FAILED if found else Exit.COMPLETED


def _load_known_tool_specs(agent: str) -> dict[str, ToolSpec]:
    """Return the bundled tools, and those of an agent, of the agents that it may spawn and of their files, by name."""
    from stepengine.cli.approvals import collect_tool_specs
    from stepengine.cli.options import Options
    from stepengine.cli.toolset import load_module_tools
    from stepengine.engine import load_agent
    from stepengine.engine.agent_family import collect_agent_family
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    specs = {tool.spec.name: tool.spec for tool in list_all_workspace_tools(Path.cwd())}
    if not agent:
        return specs
    options = Options(agent=agent).with_settings()
    folders = options.settings.agent_folders
    family = collect_agent_family(load_agent(agent, folders=folders), agent, folders)
    own = [*load_module_tools(options, family), *[tool for member in family for tool in member.tools]]
    return specs | {spec.name: spec for spec in collect_tool_specs(own)}


def policy(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="A policy file, as Policy.save writes it.")],
    *,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="A journal to judge; may be repeated; RUNS.db#RUN for a run in an SQLite file.", metavar="FILE..."
        ),
    ] = None,
    agent: Annotated[str, typer.Option(help="File or id of the agent that defines the tools.", metavar="PATH|ID")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> Exit:
    r"""
    Check a policy, and try it on recorded runs.

    Lists the rules in FILE; with --against, reports what it would have denied or asked in recorded runs.

    Nothing is run: the recorded tool calls are judged with the inputs that ran. Bundled tools are known by name.
    For others, pass the agent's file with --agent; otherwise rules about categories do not match them, and modes
    treat them as tools that may change something. Exits with 1 if a call would have been denied or asked about, for
    CI and for tests before you enable a policy.

    Examples:
      stepengine config policy policy.json
      stepengine config policy policy.json --against run.jsonl
      stepengine config policy policy.json --agent ./agents/mine.py --json \
          --against runs/*.jsonl
    """
    from stepengine.permissions import Policy

    path, *more = files
    policy = Policy.load(path)
    if against:
        return _judge_and_print_calls(policy, [*against, *more], agent, as_json=as_json)
    if more:
        typed = f"stepengine config policy {shlex.quote(path)} --against {shlex.quote(more[0])}"
        msg = f"one policy at a time; to judge the run in {more[0]!r}: {typed}"
        raise UsageProblem(msg)
    _print_policy(policy, as_json=as_json)
    return Exit.COMPLETED
