"""``stepengine compare pin``: a failed run becomes a test."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
import typer

from stepengine.cli.evaluation import CheckText, load_recorded_case, run_reporting_errors
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import add_journal_to_options
from stepengine.cli.options import File, Last, Options, with_shared_options


@partial(with_shared_options, without=("write", "shell", "web", "as_json", "verbose"))
def pin(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    check: CheckText,
    name: Annotated[str, typer.Option(help="Name of the test; default: the journal's name.", metavar="NAME")] = "",
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for the journal, inside the folder of tests.", metavar="DIR")
    ] = Path("tests/journals"),
) -> Exit:
    """
    Turn a failed run into a test that fails until it is fixed.

    Copies the journal to --dir, without anything that looks like a secret, writes tests/test_pin_NAME.py next to
    that folder, and runs it once. The pin is created if the test fails for the reason in --check. Private
    content other than keys is still in the copy.

    The test replays the recorded run with the code at that time. If the fix changes a model request, the run
    continues from there with the replies that you write into REPLIES, and with RESULTS for new tool calls. If one
    is missing, the failure shows the request or call.

    Exit codes:
      0    the test is written, and fails as it should
      1    the run passes, so there is nothing to pin
      2    wrong usage; the copy still contains something like a secret
      5    the record does not fit the current code

    Examples:
      stepengine compare pin run.jsonl --check "'refund' not in tools"
      stepengine compare pin --last --check checks:is_polite --name polite
    """
    options = attrs.evolve(options, journal=file, last=last)
    return run_reporting_errors(
        lambda: _write_pin_test(add_journal_to_options(options).with_settings(), check, name, folder)
    )


def _write_pin_test(options: Options, check: str, name: str, folder: Path) -> Exit:
    """Write a test, with a copy of the journal, that fails until the run passes *check*; return the exit code."""
    from stepengine.evaluation import pin

    case = load_recorded_case(options.journal, options, performs=False)
    with case.bench.engine as engine:
        made = pin(
            engine,
            case.journal,
            check,
            agent=case.agent,
            agent_file=options.agent,
            agent_folders=options.settings.agent_folders,
            name=name or options.stem,
            folder=folder,
        )
    if isinstance(made, str):
        return print_error(made.replace("passes the check", "passes --check"), Exit.FAILED)
    print(f"{made.file}\n{made.journal}")
    if made.changed:
        print_error(f"what looks like a secret was removed from {made.changed} records")
    print_error(f"the test fails, as expected: {made.reason}")
    return Exit.COMPLETED
