"""``stepengine config policy``: what a policy file says, and what it would have said to the tool calls of recorded runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.exits import Exit
from stepengine.cli.settings import UsageProblem

if TYPE_CHECKING:
    from stepengine.data.tools import ToolSpec
    from stepengine.journal import Journal
    from stepengine.permissions import Policy

__all__ = ("JudgedCall",)

SHOWN_CHARS = 200


@frozen
class JudgedCall:
    """
    A recorded tool call that a policy would not simply have allowed.

    Attributes:
        journal: The journal, as it was typed.
        address: Which effect of the run it is.
        agent: The agent that called.
        tool: The tool.
        input: The input that ran.
        decision: ``"deny"`` or ``"ask"``.
        why: One sentence.
    """

    journal: str
    address: str
    agent: str
    tool: str
    input: Mapping[str, Any]
    decision: str
    why: str


def _list(policy: Policy, *, as_json: bool) -> None:
    from stepengine.cli.screen.render import dumps, one_line

    if as_json:
        print(dumps(policy.to_json()))
        return
    print(f"mode {policy.mode}, {len(policy.rules)} rules")
    for rule in policy.rules:
        where = f", in {rule.scope}" if rule.scope.kind != "global" else ""
        first = f", priority {rule.priority}" if rule.priority else ""
        first += f", asked for by a {rule.source}" if rule.source else ""
        said = f": {rule.description or rule.message}" if rule.description or rule.message else ""
        print(f"{rule.decision:5}  {one_line(f'{rule.matcher}{where}{first}{said}', 400)}")
    for rule in policy.remembered:
        print(f"always {one_line(f'{rule.matcher}, in {rule.scope}', 400)}")


def _judge(policy: Policy, names: Sequence[str], agent: str, *, as_json: bool) -> Exit:
    from stepengine.cli.journals import journal_at
    from stepengine.cli.screen.render import dumps, one_line
    from stepengine.data.json import compact

    specs = _known_tools(agent)
    found: list[JudgedCall] = []
    unknown: set[str] = set()
    count = 0
    for name in names:
        for tool, judged in _calls(policy, name, journal_at(name), specs):
            count += 1
            unknown |= {tool} - specs.keys()
            found += [judged] if judged.decision != "allow" else []
    if as_json:
        print(dumps([attrs.asdict(call) for call in found]))
    for call in () if as_json else found:
        print(f"{call.decision:5}  {one_line(f'{call.journal} {call.address} {call.agent}', 200)}")
        print(f"       {one_line(f'{call.tool} {compact(call.input)}', SHOWN_CHARS)}")
        print(f"       {one_line(call.why, 400)}")
    if unknown:
        listed = one_line(", ".join(sorted(unknown)), 400)
        print(f"not known, so of no category: {listed}; name the agent's file with --agent", file=sys.stderr)
    asked = sum(call.decision == "ask" for call in found)
    calls, runs = [f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in ((count, "call"), (len(names), "run"))]
    print(f"{calls} in {runs}: {len(found) - asked} denied, {asked} asked about", file=sys.stderr)
    return Exit.FAILED if found else Exit.COMPLETED


def _calls(
    policy: Policy, name: str, journal: Journal, specs: Mapping[str, ToolSpec]
) -> Iterator[tuple[str, JudgedCall]]:
    """Give the tool and the judgement of every recorded tool call, in the order of the record."""
    from stepengine.data.json import freeze_object
    from stepengine.data.tools import ToolSpec
    from stepengine.journal.records import shown_address
    from stepengine.permissions import Request

    history = journal.history()
    root = history.root
    agents = {"": str(root["agent_id"])}
    for (path, seq), intent in history.intents.items():
        if intent.type == "agent_call":
            child = "" if seq < 0 else f"{path}.{seq}" if path else str(seq)
            agents[child] = str(intent.effect["agent_id"])  # type: ignore[index]  # only a model call is not a mapping
        elif intent.begins_run:
            agents[f"{path}.{seq}" if path else str(seq)] = agents.get(path, "")
        if intent.type != "tool_call":
            continue
        form: Any = history.form(intent)
        tool, agent = str(form["tool_name"]), agents.get(path, "")
        request = Request(
            tool=specs.get(tool) or ToolSpec(tool),
            input=freeze_object(form["input"]),
            agent_id=agent,
            session_id=root.get("session_id"),
            user_id=root.get("user_id"),
            source=str(form["source"]),
        )
        verdict = policy.check(request)
        yield (
            tool,
            JudgedCall(name, shown_address(path, seq), agent, tool, form["input"], verdict.decision, verdict.why),
        )


def _known_tools(agent: str) -> dict[str, ToolSpec]:
    """Return the tools that come with the package, and those of the agents in a file, by name."""
    from stepengine.cli.bench import family
    from stepengine.data.tools import ToolLike
    from stepengine.engine import load_agent
    from stepengine.tools.bundled.bundled import uncalled_tools

    specs = {tool.spec.name: tool.spec for tool in uncalled_tools(Path.cwd())}
    for definition in family(load_agent(agent), agent) if agent else ():
        own = [tool for tool in definition.tools if isinstance(tool, ToolLike)]
        specs |= {tool.spec.name: tool.spec for tool in own}
    return specs


def policy(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="A policy, such as Policy.save writes.")],
    *,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="A journal to judge; more may follow, RUNS.db#RUN for a run in an SQLite file.", metavar="FILE..."
        ),
    ] = None,
    agent: Annotated[str, typer.Option(help="File or id of an agent whose tools are meant.", metavar="PATH|ID")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> Exit:
    r"""
    Check a policy, and try it on recorded runs.

    Lists the rules in FILE; with --against, says what it would have denied or asked in recorded runs.

    Nothing is run: the tool calls of the journals are judged as they are recorded, with the inputs that ran. Tools are
    known by name when they come with stepengine; for others name the agent's file with --agent, else rules about
    categories do not see them and modes treat them as tools that may change something. Leaves with 1 when a call would
    have been denied or asked about: for a look before a policy is switched on, and for CI.

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
        return _judge(policy, [*against, *more], agent, as_json=as_json)
    if more:
        msg = f"one policy at a time; to judge the run in {more[0]!r}: stepengine config policy {path} --against {more[0]}"
        raise UsageProblem(msg)
    _list(policy, as_json=as_json)
    return Exit.COMPLETED
