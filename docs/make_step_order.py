# ruff: noqa: INP001
"""Write ``docs/step-order.md`` from ``YIELDS``, ``EFFECTS`` and the tables of the protocol: ``python docs/make_step_order.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from stepengine.data.effects import EFFECTS, RunInBackground
from stepengine.data.yields import YIELDS
from stepengine.machine.protocol import ANYWHERE, CALLS, STOPPED

TARGET = Path(__file__).with_name("step-order.md")

PAGE = """\
# Agent loop: the protocol and the order of a run

Made from `YIELDS`, `EFFECTS` and the tables in `stepengine/machine/protocol.py` by `python docs/make_step_order.py`, the pictures by
`python docs/make_diagrams.py`; do not edit them by hand. The
machine takes from these tables what handlers and hooks may yield, what that costs, and the phases that it shows; every run in
its tests is checked against them.

## What may be yielded

What a handler yields asks for something, which leads to effects; the machine hands them out, is sent their outcomes, and sends
the handler a `StepResult`. An action is what `Limits(max_actions=...)` counts. A token such as `CallTool handler` names an
effect and what tells its uses apart.

{yields}

What stands in `Parallel` is handed out with the other members as one `Gather`. Hooks and tools may yield what says so; the
effects of hooks are `CallTool hook`, `CallModel complete` and `CallFunction`. The body of a tool has no conversation: what
would go on with one is not for it.

| refused | reason |
|---|---|
| `AgentCall` and `Start` in a hook | The engine's hooks are called in children, too. A hook that starts a child would be called there again. |
| `Ask` in a hook | A `pre_tool` hook returns `Decision.ask(...)`, so that policies, remembered answers and `headless` apply to the question. The handler asks everything else. |
| `Parallel` in a hook | It could hold only functions and waits. One `Perform` may do several things at once, and a `Race` ends a wait. |
| `Complete` and `GenerateN` in `Parallel` and `Race` | Several model calls at once are children: each `AgentCall` has a status, a failure and a cost of its own. |
| `Race()` of nothing | It has no first member, so it would never end. |
| `Start()` of nothing | One call gives a reference and several give a tuple, so none has no result of a known type. |

`Wait()` and `Parallel()` of nothing are allowed: a list may turn out to be empty, and then there is nothing to wait for.

## How a called tool runs

{calls}

## What is handed out, and what comes back

{effects}

Every effect with a number may be answered with a `Failure` as well, which is thrown at the handler's `yield` or stays inside
its place in a `Parallel`, and with a `Stop`, which ends the run.

## One step

Ephemeral results expire, `pre_step` hooks, step prompt, model call; then for each call of the reply validation, `pre_tool`
hooks, permission, the call itself, `post_tool` hooks; then message and results are appended together, `post_step` hooks, and
the decision whether the turn ends.

![The phases of one step, and what leads from one to the next](diagrams/step.svg)

## The whole run

A phase is a box; beside it stands where it leads, and what is handed out or shown on the way. Arcs down are blue, arcs back up
brown. {anywhere} may stand anywhere. An effect that is answered
with a `Stop` leads to `{stopped}` from every state; after it nothing is asked for any more.

![The phases of a run, and what leads from one to the next](diagrams/run.svg)
"""


def said(token: str) -> str:
    """Return a token as the page shows it."""
    return token.replace(":", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"| {' | '.join(line)} |" for line in lines])


def tokens(names: Iterable[str]) -> str:
    """Return effects as a cell."""
    return ", ".join([f"`{said(name)}`" for name in names]) or "-"


def yields() -> str:
    """Return the table of what may be yielded."""
    head = (
        "yield",
        "asks for",
        "effect",
        "the handler is sent",
        "then",
        "actions",
        "in `Parallel`",
        "in hooks",
        "in tools",
    )
    rows = [
        (
            f"`{row.name}`",
            row.asks,
            tokens(row.effects),
            f"`{row.sent}`: {row.gives}",
            f"`{row.state}`",
            "one for each block" if row.actions is None else str(row.actions),
            "yes" if row.is_member else "",
            "yes" if row.for_hooks else "",
            "yes" if row.for_tools else "",
        )
        for row in YIELDS
    ]
    return table(head, rows)


def calls() -> str:
    """Return the table of how tools run."""
    rows = [
        (
            row.how,
            tokens([row.effect] if row.effect else []),
            row.done_by,
            "the machine" if row.is_shown else "the performer",
        )
        for row in CALLS.values()
    ]
    return table(("tool", "effect", "who does it", "start and end are shown by"), rows)


def effects() -> str:
    """Return the table of effects."""
    names = {object: "JSON", type(None): "nothing"}
    rows = []
    for row in [row for row in EFFECTS if row.cls is not RunInBackground]:
        kinds = row.outcome if isinstance(row.outcome, tuple) else (row.outcome,)
        value = " or ".join([names.get(kind, f"`{kind.__name__}`") for kind in kinds])
        rows.append((f"`{row.cls.__name__}`", row.asks, value))
    return table(("effect", "asks", "its value"), rows)


def page() -> str:
    """Return the whole page."""
    return PAGE.format(
        yields=yields(),
        calls=calls(),
        effects=effects(),
        anywhere=", ".join([f"`{token}`" for token in ANYWHERE]),
        stopped=STOPPED,
    )


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
