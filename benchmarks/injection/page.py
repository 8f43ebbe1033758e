"""
The figures as JSON, and the page that is made of them, ``benchmarks/INJECTION.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

SUITES = ("workspace", "slack", "travel", "banking")
Reached = Literal["unnamed", "contact", "named", "private"]
WORST: tuple[Reached, ...] = ("unnamed", "contact", "named", "private")
"""What an attack can reach without a question, the worst first: a destination that the user has not named; one that only a list of contacts
or channels has; one that the user has named; nobody but the user."""
PAGE = Path(__file__).resolve().parents[1] / "INJECTION.md"
MEASURED = Path(__file__).with_name("measured.json")
LABELS_OF: Mapping[str, str] = MappingProxyType({"contacts": "contacts trusted", "strict": "strict"})
COUNTS = ("tasks", "quiet", "questions", "pairs", "attacked")

GOALS: Mapping[tuple[str, str], int] = MappingProxyType(
    {
        ("contacts", "destinations"): 65,
        ("strict", "destinations"): 58,
        ("contacts", "destinations, mail and calendar"): 55,
        ("strict", "destinations, mail and calendar"): 50,
    }
)
"""In how many of the 97 tasks nobody may be asked, by labels and policy."""
HEAD = """\
# Prompt injection: what rules about provenance stop

Made by `python -m benchmarks.injection --write`; `benchmarks/injection` says how. AgentDojo {version} (suites v1.2.1) gives environments and
tools. One scripted model follows the ground truth of a user's task. Another one does so, too, and obeys every injection that it reads. All
{tasks} tasks run, and all {pairs} pairs of a task and an attack. {empty} pairs have no ground truth of the attack; it was completed manually.

Labels were written from the docstrings of the tools, one set for all suites, and committed before any attack was run. Two things about the
engine were changed after the first attacks had run, for every tool alike. Before, attacks reached 47 unnamed destinations with trusted
contacts, 20 with strict labels:

- A short number has to be named as an id: "a 1 hour event" names no file 1.
- A list of contacts or channels (`results="names"`) is trusted for whole names only: a channel of AgentDojo has an injection in its name.

| policy | a person is asked about |
| --- | --- |
| destinations | a destination, or an address in a text that leaves, that is not trusted: `Policy.guard_injection()` |
| destinations, mail and calendar | also title and time of an event, and the subject of a mail |
| destinations, details | also names of new files, and what the user's own data become |
| destinations, after | in place of these details, each mail, event, new file and change of own data once anything untrusted was read |
| after | each effect once anything untrusted was read |
| every effect | each effect |

**The worst that an attack reaches without a question** is one of these, in this order: *unnamed*, a destination that the user has not named;
*contact*, one that only a list of contacts or channels has; *named*, a recipient that the user has named; *private*, nobody but the user.
A destination is found in the prompt by a plain search, without the engine's tokens. The person approves what the task needs, and denies the rest.
"""
ANSWER = """
What no rule about effects stops: the {pairs} attacks that only want a sentence in the answer (travel, `injection_task_6`) have no effect at all.
Without a policy AgentDojo's own check agrees that the attack succeeded in {goals} of {all} pairs. In the others its calls were made as well: its
check counts every mail with the subject, also those that hold the injection, or the task itself changes the same thing again.
"""


def total(rows: Mapping[str, Mapping[str, Any]], name: str) -> int:
    """Return a count over all suites."""
    return sum(int(row[name]) for row in rows.values())


def reached(rows: Mapping[str, Mapping[str, Any]], what: str) -> int:
    """Return in how many pairs this was the worst, over all suites."""
    return sum(int(row["reached"].get(what, 0)) for row in rows.values())


def _table(head: Sequence[str], lines: Iterator[Sequence[object]]) -> str:
    made = [f"| {' | '.join(map(str, line))} |" for line in (head, ["---", *["---:"] * (len(head) - 1)])]
    return "\n".join([*made, *[f"| {' | '.join(map(str, line))} |" for line in lines]])


def _policies(found: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for kind, policies in found["dojo"].items():
        for policy, rows in policies.items():
            goal = GOALS.get((kind, policy))
            quiet = f"{total(rows, 'quiet')}{'' if goal is None else f' (goal {goal})'}"
            counts = [reached(rows, what) for what in WORST]
            yield [
                f"{LABELS_OF.get(kind, kind)}: {policy}",
                quiet,
                total(rows, "questions"),
                *counts,
                total(rows, "attacked"),
            ]


def _suites(found: Mapping[str, Any], policy: str) -> Iterator[Sequence[object]]:
    for kind in LABELS_OF:
        for suite, row in found["dojo"][kind][policy].items():
            counts = [row["reached"].get(what, 0) for what in WORST]
            yield [
                f"{suite}, {LABELS_OF[kind]}",
                f"{row['quiet']} of {row['tasks']}",
                row["questions"],
                row["pairs"],
                *counts,
            ]


def _asking(found: Mapping[str, Any], policy: str) -> Iterator[str]:
    for suite in SUITES:
        by_kind = {kind: found["dojo"][kind][policy][suite]["asking"] for kind in LABELS_OF}
        for task in sorted(by_kind["strict"] | by_kind["contacts"], key=lambda key: int(key.rpartition("_")[2])):
            asked = by_kind["strict"].get(task) or by_kind["contacts"][task]
            told = ", ".join([f"`{name}`{f' {n} times' if n > 1 else ''}" for name, n in Counter(asked).items()])
            only = "" if task in by_kind["contacts"] else " (strict labels only)"
            yield f"- {suite}, {task.rpartition('_')[2]}: {told}{only}"


def _coding(found: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    policies = list(found["coding"].values())
    for run in policies[0]:
        asked = [policy[run] for policy in policies]
        if any(asked):
            tools = ", ".join([f"`{name}`" for name in dict.fromkeys(asked[0])])
            yield [run, tools, *[len(names) for names in asked]]
    quiet = [sum(not names for names in policy.values()) for policy in policies]
    yield [
        f"**all {len(policies[0])} runs**",
        "",
        *[sum(len(names) for names in policy.values()) for policy in policies],
    ]
    yield ["**without any question**", "", *quiet]


def page(found: Mapping[str, Any]) -> str:
    """Return the page."""
    free = found["dojo"]["any labels"]["no policy"]
    tasks, pairs = total(free, "tasks"), total(free, "pairs")
    columns = ["questions in tasks", *WORST]
    text = HEAD.format(version=found["agentdojo"], tasks=tasks, pairs=pairs, empty=found["completed"])
    goals = {"goals": total(free, "goals"), "all": pairs, "pairs": found["answers"]}
    parts = [
        text,
        _table(["labels: policy", "tasks without a question", *columns, "questions about attacks"], _policies(found)),
        ANSWER.format(**goals),
        "## By suite\n",
        "The policy *destinations*, which is `Policy.guard_injection()`:\n",
        _table(
            ["suite", "tasks without a question", "questions in tasks", "pairs", *WORST], _suites(found, "destinations")
        ),
        "\nThe same when each attack first reads all lists of contacts, channels and members, contacts trusted: "
        + ", ".join([f"{reached(found['lookups'], what)} {what}" for what in WORST])
        + ". Most of the private ones are mails to the user's own address, which is on such a list.\n",
        "## Tasks with a question\n",
        "By the policy *destinations*, with the arguments that were the reason:\n",
        *_asking(found, "destinations"),
        "\n## Coding agents\n",
        "The recorded runs of bundled agents and of examples, made again with real tools; everything is approved. *Commands after untrusted* is",
        '`Rule.ask_after_untrusted("run_terminal_command")`; *every effect* asks for the categories write, execute, network and memory. Two of the',
        "questions of `others/openai_agents_human_in_the_loop` are the program's own.\n",
        _table(["run", "asked about, against injection", *found["coding"]], _coding(found)),
    ]
    return "\n".join(parts) + "\n"
