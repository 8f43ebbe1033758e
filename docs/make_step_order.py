# ruff: noqa: INP001
"""Write ``docs/step-order.md`` from the table in ``stepengine.machine.protocol``: ``python docs/make_step_order.py``."""

from __future__ import annotations

from pathlib import Path

from stepengine.machine.protocol import ANYWHERE, FIRST, LAST, ORDER, SILENT, STOPPED

TARGET = Path(__file__).with_name("step-order.md")

HEAD = """\
# The order of a run

Made from the table in `stepengine/machine/protocol.py` by `python docs/make_step_order.py`; do not edit it by hand. Every run
in the tests of the machine is checked against that table.

One step: ephemeral results expire, `pre_step` hooks, step prompt, model call; then for each call of the reply validation,
`pre_tool` hooks, permission, the call itself, `post_tool` hooks; then message and results are appended together,
`post_step` hooks, and the decision whether the turn ends.

An arrow without words is taken without anything being shown. {anywhere} may stand anywhere. An effect that is answered
with a `Stop` leads to `{stopped}` from every state; after it nothing is asked for any more.
"""


def diagram() -> str:
    """Return the table as a mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {FIRST}"]
    for state, row in ORDER.items():
        targets: dict[str, list[str]] = {}
        for token, target in row.items():
            targets.setdefault(target, []).append(token.replace(":", " "))
        lines += [f"    {state} --> {target}: {', '.join(tokens)}" for target, tokens in targets.items()]
        lines += [f"    {state} --> {target}" for target in SILENT.get(state, ())]
    return "\n".join([*lines, f"    {LAST} --> [*]"])


def page() -> str:
    """Return the whole page."""
    anywhere = ", ".join([f"`{token}`" for token in ANYWHERE])
    return f"{HEAD.format(anywhere=anywhere, stopped=STOPPED)}\n```mermaid\n{diagram()}\n```\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
