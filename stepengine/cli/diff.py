"""``stepengine diff``: what two runs did differently."""

from __future__ import annotations

from stepengine.cli.exits import Exit, complain, explained, leave
from stepengine.cli.journals import journal_at
from stepengine.cli.options import File, Json, Last
from stepengine.cli.recording import latest
from stepengine.cli.render import dumps, visible
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError

__all__ = (
    "diff",
    "diff_command",
)

DIFF = """\
Show what the runs in A and B did differently: effects added, removed, changed, with other outcomes; tokens and cost.

Ids and times that differ in every run do not count. Leaves with 0 when there is no difference, with 1 when there is.

\b
Examples:
  stepengine diff before.jsonl after.jsonl
  stepengine diff before.jsonl --last          the newest run of this folder
  stepengine diff --last                       the two newest ones
  stepengine diff before.jsonl after.jsonl --json"""


def diff(a: File = "", b: File = "", *, last: Last = False, as_json: Json = False) -> None:
    """Compare two runs; ``DIFF`` is what users read."""
    leave(diff_command(a, b, last=last, as_json=as_json))


def diff_command(a: str, b: str, *, last: bool, as_json: bool) -> Exit:
    """Print what two runs did differently; *last* stands for the newest one, alone for the one before it and it."""

    def command() -> Exit:
        from stepengine.journal import diff

        try:
            before, after = _two(a, b, last=last)
            found = diff(journal_at(before), journal_at(after))
        except JournalError as error:
            return complain(error.message, Exit.FAILED)
        print(dumps(found.to_json()) if as_json else visible(str(found)))
        return Exit.FAILED if found else Exit.COMPLETED

    return explained(command)


def _two(a: str, b: str, *, last: bool) -> tuple[str, str]:
    if last and b:
        msg = f"--last, {a!r} and {b!r} name three runs; give two of them"
        raise UsageProblem(msg)
    if last:
        return a or latest(before=1).journal, latest().journal
    if not a or not b:
        msg = "name two runs, A and B, as files or as `stepengine runs` lists them; --last stands for the newest one"
        raise UsageProblem(msg)
    return a, b
