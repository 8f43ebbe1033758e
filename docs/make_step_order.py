# ruff: noqa: INP001
"""Write ``docs/reference/step-order.md`` from ``YIELDS``, ``EFFECTS`` and the table of the protocol: ``python docs/make_step_order.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from stepengine.data.effects import EFFECTS, RunInBackground
from stepengine.data.yields import YIELDS
from stepengine.machine.protocol import ANYWHERE, STOPPED

TARGET = Path(__file__).parent / "reference" / "step-order.md"

PAGE = """\
# Agent loop: yieldables, effects and the order of a run

This page lists the values that a handler may yield, their effects, and the order in which a run performs them. It is made by
`docs/make_step_order.py`.

## What may be yielded

A bare `yield` returns a `StepResult`, and the third column names the field of this result. The second word of an effect is its source or
purpose. The [reference](stepengine.md) describes each yieldable.

{yields}

For `Limits(max_actions=...)`, each yield is one action, but a `{counted}` is one for each call, and {uncounted} are none.
The source of a `CallTool` is `hook` in a hook, and `tool` in the body of a tool.

| in place of | use |
|---|---|
| `Ask` in a hook | `Decision.ask(...)` of `pre_tool` |
| `Parallel` in a hook | one `Perform`, or `Race` to end a wait |
| `Complete` and `GenerateN` in `Parallel` and `Race` | an `AgentCall` for each |

`Race()` and `Start()` need members.

## Effects

All effects except {unnumbered} have a number in the journal. A tool that yields runs as a `CallBody`, a
separate run without a model. A tool that starts agents causes a `Gather` of `Spawn`s, and `ask_user` causes an `AskPerson question`. Control tools such as
`set_output` cause no effect. Hooks and policies may cause an `AskPerson permission`.

The outcome of an effect is a value, a `Failure` or a `Stop`. A `Failure` is raised at the handler's `yield`, or stored at its place in a
`Parallel`. A `Stop` ends the run.

## One step

1. Ephemeral results expire.
2. `pre_step` hooks run.
3. The model is called, with the step prompt.
4. Each call of the reply is processed: validation, `pre_tool` hooks, permission, the tool, `post_tool` hooks.
5. The reply and the results are appended together.
6. `post_step` hooks run. If the turn would end, `on_stop` hooks run, too.

In the pictures, hooks ask for the effects of the yieldables that are allowed in hooks, for more of a limit (`AskPerson limit`), or fail
(`HookFailed`). The steps of a tool ask for the effects of those that are allowed in tools, calls of tools and agents excepted.

![The phases of one step](../diagrams/step.svg)

## The whole run

Each box is a phase, with its effects and events, and the phases that can follow.
{anywhere} can occur in any phase.
A `Stop` leads from any phase to `{stopped}`, where no effects are requested.

![The phases of a run](../diagrams/run.svg)
"""


def said(token: str) -> str:
    """Return a token as the page shows it."""
    return token.replace(":", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *rest = [f"| {' | '.join(line)} |" for line in [head, *rows]]
    return "\n".join([first, f"|{'---|' * len(head)}", *rest])


def tokens(names: Iterable[str]) -> str:
    """Return effects as a cell."""
    return ", ".join([f"`{said(name)}`" for name in names]) or "-"


def yields() -> str:
    """Return the table of what may be yielded; yieldables that differ in nothing else share a row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for row in YIELDS:
        places = (("`Parallel`", row.is_member), ("hooks", row.for_hooks), ("tools", row.for_tools))
        where = ", ".join([place for place, is_allowed in places if is_allowed]) or "-"
        names.setdefault((tokens(row.effects), f"`{row.sent}`: {row.gives}", where), []).append(f"`{row.name}`")
    rows = [(", ".join(same), *cells) for cells, same in names.items()]
    return table(("yield", "effect", "the handler receives", "also allowed in"), rows)


def page() -> str:
    """Return the whole page."""
    (counted,) = [row.name for row in YIELDS if row.actions is None]
    *uncounted, last = [row.name for row in YIELDS if row.actions == 0]
    *unnumbered, last_unnumbered = [
        row.cls.__name__ for row in EFFECTS if not row.kind and row.cls is not RunInBackground
    ]
    return PAGE.format(
        yields=yields(),
        counted=counted,
        uncounted=f"{', '.join([f'`{name}`' for name in uncounted])} and `{last}`",
        unnumbered=f"{', '.join([f'`{name}`' for name in unnumbered])} and `{last_unnumbered}`",
        anywhere=", ".join([f"`{token}`" for token in ANYWHERE]),
        stopped=STOPPED,
    )


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
