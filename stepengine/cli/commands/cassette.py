"""``stepengine cassette``: record the HTTP traffic of any Python program, and replay the program without network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Never

import typer

from stepengine.cli.exits import Exit, print_error

if TYPE_CHECKING:
    from stepengine.testing import ProgramRun
    from stepengine.testing.processes.doctor import RequestDifference

Cassette = Annotated[str, typer.Argument(metavar="FILE", help="The cassette, a YAML file.")]
Program = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")]


def record(
    file: Cassette,
    command: Program,
    *,
    freeze: Annotated[
        str, typer.Option(help="Also record values of these modules: time, random, uuid.", metavar="KIND,...")
    ] = "",
) -> Exit:
    """
    Run a program and record its HTTP traffic.

    The program needs no change. Requests of its Python processes with httpx, httpx2, aiohttp, urllib, requests, urllib3
    and boto3 are recorded in FILE, error replies included and secrets replaced. FILE is written at the end. Exits with
    the code of the program. If that is not 0, an existing FILE does not change.

    With --freeze, FILE holds values that replay repeats: of time.time and time.time_ns, the seed of random, and uuid.uuid4.

    Examples:
      stepengine cassette record agent.yaml -- python agent.py
      stepengine cassette record a.yaml --freeze time,random -- python agent.py
      stepengine cassette replay agent.yaml -- python agent.py
    """
    from stepengine.testing import record_program

    run = record_program(file, command, freeze=[word.strip() for word in freeze.split(",") if word.strip()])
    _print_uncovered_programs(run)
    if run.exit_code and not run.saved and Path(file).exists():
        print_error(
            f"{command[0]} exited with {run.exit_code}, so {file} was not changed. To record it anyway, name a new file"
        )
        raise typer.Exit(run.exit_code)
    return _report_recording_and_exit(run, file, command)


def replay(
    file: Cassette,
    command: Program,
    *,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host that the program may reach, such as a database server; may be repeated.", metavar="NAME"
        ),
    ] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Run the program twice, and report each difference with file and line.")
    ] = False,
) -> Exit:
    """
    Run a program on recorded replies, without network.

    The network is blocked, loopback included, and keys are placeholders. Exits with 5 if a request is not in FILE, also in a thread,
    in a child process or behind `except:`, and prints the field that differs. Otherwise exits with the code of the program, and with 5
    if that is 0 and recorded requests were not made.

    With --doctor, the program runs twice with different string hashes, and a request without a recording gets the
    nearest recorded reply. The command prints the requests that differ between the two runs, and the lines of the
    program that call clocks, random functions and the like before them. Exits with 5 if a request differs.

    Examples:
      stepengine cassette replay agent.yaml -- python agent.py
      stepengine cassette replay agent.yaml --doctor -- python agent.py
      stepengine cassette replay agent.yaml --allow-host localhost -- pytest
    """
    from stepengine.testing import replay_program

    run = replay_program(file, command, allow_hosts=allow_host or (), twice=doctor)
    _print_uncovered_programs(run)
    return _report_replay_comparison(run, command) if doctor else _report_replay_result(run, file, command)


def _print_uncovered_programs(run: ProgramRun) -> None:
    """Print the programs whose traffic was neither recorded nor replayed."""
    for one in run.uncovered:
        print_error(f"not covered: {one}")


def _make_no_python_process_message(command: Sequence[str]) -> str:
    return (
        f"{command[0]} started no Python process that can be recorded or replayed. COMMAND must be a Python program, or start one that "
        "imports the site module and keeps PYTHONPATH"
    )


# --- the end of a recording -----------------------------------------------------------------------------------------------------


def _report_recording_and_exit(run: ProgramRun, file: str, command: Sequence[str]) -> Never:
    """Print the recorded and the missing traffic, and raise ``typer.Exit`` with the exit code of the program."""
    from stepengine.testing.recordings import RecordingUsage

    for left in run.cassette.left_out:
        print_error(f"not recorded: {left}")
    for line in run.cassette.unscanned_bodies:
        print_error(f"not searched for secrets: {line}")
    if run.lost:
        print_error(f"not recorded: {run.lost} request(s) whose process ended before the reply was complete")
    if not run.saved:
        print_error(
            f"nothing was recorded: {_make_no_python_process_message(command)}"
            if not run.processes
            else f"nothing was recorded: {command[0]} sent no request with httpx, httpx2, aiohttp, urllib, requests, urllib3 or boto3"
        )
        raise typer.Exit(run.exit_code or Exit.FAILED)
    print_error(RecordingUsage(path=file, mode="rewrite", recorded=len(run.cassette.complete_interactions)).written)
    raise typer.Exit(run.exit_code)


# --- the end of a replay --------------------------------------------------------------------------------------------------------


def _report_replay_result(run: ProgramRun, file: str, command: Sequence[str]) -> Exit:
    """
    Report requests that differ from the recording; return the exit code, or raise ``typer.Exit`` with that of the program.

    Raises:
        typer.Exit: with the code of the program, if that counts.
    """
    cassette = run.cassette
    for message in dict.fromkeys([*map(str, cassette.misses), *run.blocked]):
        print_error(message)
    if run.ended:
        print_error(f"{command[0]} did not exit after a request that is not in {file}, so it was stopped")
    if cassette.misses or run.blocked:
        return Exit.DIVERGED
    if not run.processes:
        return print_error(_make_no_python_process_message(command), Exit.USAGE)
    if run.exit_code:
        raise typer.Exit(run.exit_code)
    if cassette.unused:
        held = cassette.interactions
        listed = "".join(f"\n  {i}: {held[i].request.method} {held[i].request.url}" for i in cassette.unused)
        return print_error(
            f"{len(cassette.unused)} of {len(held)} interactions of {file} were not played:{listed}\n"
            f"  to record again: {cassette.hint}",
            Exit.DIVERGED,
        )
    print_error(f"replayed {file}: {len(cassette)} interaction{'' if len(cassette) == 1 else 's'}")
    return Exit.COMPLETED


# --- the doctor -----------------------------------------------------------------------------------------------------------------

FREEZABLE = {"time.time": "time", "time.time_ns": "time", "uuid.uuid4": "uuid", "random": "random", "Random": "random"}
"""Functions, or prefixes of their names, and the word of ``--freeze`` that records them."""


def _report_replay_comparison(run: ProgramRun, command: Sequence[str]) -> Exit:
    """Report the requests that differ between two replays, and return the exit code."""
    first, second = run.requests
    if not run.processes:
        return print_error(_make_no_python_process_message(command), Exit.USAGE)
    for finding in run.differences:
        print_error("\n".join(_describe_difference(finding)))
    if run.differences:
        return Exit.DIVERGED
    if first != second:
        return print_error(f"one run sent {first} requests, the other {second}", Exit.DIVERGED)
    return print_error(f"{first} requests are equal in both runs", Exit.COMPLETED)


def _describe_difference(finding: RequestDifference) -> list[str]:
    """Return the lines about a request that differs between two runs, with its likely sources."""
    from stepengine.testing.cassette_misses import describe_difference

    sent = f", sent by {_shorten_source_location(finding.line)}," if finding.line else ""
    lines = [f"{finding.request.method} {finding.request.url}{sent} differs between two runs"]
    lines += [describe_difference(one, "first", "second") for one in finding.differences]
    if not finding.sources:
        return [
            *lines,
            "  no clock, id or random function was called before it; check the order of a set, a file, or a thread",
        ]
    return [
        *lines,
        "  called before it, the last call first:",
        *[f"    {_shorten_source_location(line)}  {name}{_make_freeze_hint(name)}" for name, line in finding.sources],
    ]


def _make_freeze_hint(name: str) -> str:
    """Return the ``--freeze`` option that records a function such as ``time.time``; ``""`` if none does."""
    kind = FREEZABLE.get(name) or FREEZABLE.get(name.partition(".")[0])
    return f"  (record with --freeze {kind})" if kind else ""


def _shorten_source_location(line: str) -> str:
    """Return ``FILE:LINE`` with the file relative to the working folder."""
    from stepengine.testing.recordings import make_path_relative_to_cwd

    file, _, number = line.rpartition(":")
    return f"{make_path_relative_to_cwd(Path(file))}:{number}"
