# ruff: noqa: INP001
"""Write the tables of events in the reference: ``python docs/make_reference_tables.py``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepengine.data.events import EVENTS

EVENTS_PAGE = Path(__file__).parent / "reference" / "stepengine.events.md"
EVENTS_TEXT = """\
# stepengine.events: events

All events of a run, with their names in JSON.

The table is made from `EVENTS` by `python docs/make_reference_tables.py`. A recorded event has the same path, number and type when it is
read from a [journal](../journals.md#following-a-run-of-another-process). The other events come from the process that performs the run.

{table}

```{{names}} stepengine.events
```
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"| {' | '.join(line)} |" for line in lines])


def summary(cls: type) -> str:
    """Return the first sentence of the docstring of *cls*, as Markdown."""
    first = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return first.replace("``", "`")


def events() -> str:
    """Return the page of events."""
    rows = [
        (f"`{row.cls.__name__}`", f"`{row.cls.type}`", summary(row.cls), "yes" if row.is_recorded else "")
        for row in EVENTS
    ]
    return EVENTS_TEXT.format(table=table(("event", "`type` in JSON", "what it shows", "recorded"), rows))


if __name__ == "__main__":
    EVENTS_PAGE.write_text(events(), encoding="utf-8")
