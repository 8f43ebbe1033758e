"""``stepengine cassette``: record the HTTP traffic of any Python program, and replay the program without network."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.settings import UsageProblem

if TYPE_CHECKING:
    from stepengine.testing.processes.broker import Broker
    from stepengine.testing.processes.doctor import Finding, ObservedRun
    from stepengine.testing.processes.frozen_values import FrozenValues

__all__ = ("record", "replay")

SIGNALLED = 128
Cassette = Annotated[str, typer.Argument(metavar="FILE", help="The cassette, a YAML file.")]
Program = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")]


def record(
    file: Cassette,
    command: Program,
    *,
    freeze: Annotated[
        str, typer.Option(help="Record values of time, random and uuid, too; some of these words.", metavar="KIND,...")
    ] = "",
) -> Exit:
    """
    Run a program and record its HTTP traffic.

    The program needs no change. Requests of its Python processes by httpx, httpx2, aiohttp, requests, urllib3 and boto3 are recorded
    in FILE, error replies included and secrets replaced. FILE is written at the end. Exits with the code of the program. Where that is
    not 0, a FILE that exists stays as it was.

    With --freeze, FILE holds values that replay repeats: of time.time and time.time_ns, the seed of random, and uuid.uuid4.

    Examples:
      stepengine cassette record agent.yaml -- python agent.py
      stepengine cassette record a.yaml --freeze time,random -- python agent.py
      stepengine cassette replay agent.yaml -- python agent.py
    """
    from stepengine.testing import Cassette
    from stepengine.testing.processes.broker import Broker

    _refuse_uncovered(command)
    path = Path(file)
    existed = path.exists()
    frozen = _frozen(freeze)
    with Broker(Cassette(path=path), replays=False, frozen=frozen) as broker:
        code = _run(command, broker.environment({**os.environ}))
    _report_uncovered(broker)
    if code and existed:
        complain(
            f"{command[0]} exited with {code}, so {file} stays as it was. To record it nevertheless, name a new file"
        )
        raise typer.Exit(code)
    broker.cassette.extras = frozen.to_extras() if frozen is not None else {}
    return _save(broker, file, command, code)


def replay(
    file: Cassette,
    command: Program,
    *,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A host that the program may reach, such as that of a database; may be repeated.", metavar="NAME"
        ),
    ] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Run the program twice, and name what differs by file and line.")
    ] = False,
) -> Exit:
    """
    Run a program on recorded replies, without network.

    The network is blocked, loopback included, and keys are placeholders. Exits with 5 if a request is not in FILE, also in a thread,
    in a child process or behind `except:`, and prints the field that differs. Otherwise exits with the code of the program, and with 5
    if that is 0 and recorded requests were not made.

    With --doctor, the program runs twice with other hashes of texts, and the nearest recorded reply answers a request that is missing.
    Printed are the requests that differ between the two runs, and the lines of the program that call clocks, random functions and the
    like before them. Exits with 5 if a request differs.

    Examples:
      stepengine cassette replay agent.yaml -- python agent.py
      stepengine cassette replay agent.yaml --doctor -- python agent.py
      stepengine cassette replay agent.yaml --allow-host localhost -- pytest
    """
    _refuse_uncovered(command)
    if not Path(file).is_file():
        msg = f"there is no cassette {file!r}. To record it:\n  {_words('record', file, command)}"
        raise UsageProblem(msg)
    if doctor:
        return _examine(file, command, allow_host or ())
    broker = _replayed(file, command, allow_host or ())
    _report_uncovered(broker)
    return _judge(broker, file, command)


def _replayed(
    file: str, command: Sequence[str], allowed: Sequence[str], observed: ObservedRun | None = None, **variables: str
) -> Broker:
    """Run the program on recorded replies, and return the broker with the results."""
    from stepengine.testing import Cassette
    from stepengine.testing.cassette_files import parse_extras
    from stepengine.testing.placeholders import hosts_of, placeholder_variables
    from stepengine.testing.processes.broker import Broker
    from stepengine.testing.processes.frozen_values import FrozenValues

    cassette = Cassette.load(file, hint=_words("record", file, command))
    changes = placeholder_variables(os.environ, hosts_of([i.request.url for i in cassette.interactions]))
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    added = {name: value for name, value in changes.items() if value is not None}
    frozen = FrozenValues.from_extras(parse_extras(Path(file).read_bytes(), file), file)
    with Broker(cassette, replays=True, allowed=allowed, frozen=frozen, observed=observed) as broker:
        broker.exit_code = _run(command, broker.environment({**kept, **added, **variables}))
    return broker


# --- the program ----------------------------------------------------------------------------------------------------------------


def _words(operation: str, file: str, command: Sequence[str]) -> str:
    return f"stepengine cassette {operation} {shlex.quote(file)} -- {shlex.join(command)}"


def _frozen(words: str) -> FrozenValues | None:
    from stepengine.testing.processes.frozen import KINDS
    from stepengine.testing.processes.frozen_values import FrozenValues

    kinds = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        msg = f"--freeze has the unknown word {unknown[0]!r}; it takes {', '.join(KINDS)}, separated by commas"
        raise UsageProblem(msg)
    return FrozenValues(kinds) if kinds else None


def _refuse_uncovered(command: Sequence[str]) -> None:
    from stepengine.testing.processes.child_commands import uncovered_reason

    reason = uncovered_reason(command, None, "")
    if reason is not None:
        msg = f"{shlex.join(command)} cannot be recorded or replayed: {reason}. Start it without this option"
        raise UsageProblem(msg)
    if shutil.which(command[0]) is None:
        msg = f"there is no program {command[0]!r}. Write the command as in a shell: stepengine cassette record FILE -- python agent.py"
        raise UsageProblem(msg)


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the program to its end, and return its exit code as a shell does."""
    # Ctrl-C reaches the program by its terminal. A handler, not SIG_IGN, which the program would inherit.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
    try:
        with subprocess.Popen(command, env=environment) as process:  # noqa: S603 - the user's own command
            before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return SIGNALLED - code if code < 0 else code


def _report_uncovered(broker: Broker) -> None:
    for one in broker.uncovered:
        complain(f"not covered: {shlex.join(one.command)} ({one.reason})")


def _no_python(command: Sequence[str]) -> str:
    return (
        f"{command[0]} started no Python process that could be covered. COMMAND has to be a Python program, or start one that "
        "imports the site module and keeps PYTHONPATH"
    )


# --- the end of a recording -----------------------------------------------------------------------------------------------------


def _save(broker: Broker, file: str, command: Sequence[str], code: int) -> Exit:
    from stepengine.testing.recordings import Account

    cassette = broker.cassette
    for left in cassette.left_out:
        complain(f"not recorded: {left}")
    if broker.lost:
        complain(f"not recorded: {broker.lost} request(s) whose process ended before the reply did")
    recorded = len(cassette.complete)
    if not recorded:
        complain(
            f"nothing was recorded: {_no_python(command)}"
            if not broker.processes
            else f"nothing was recorded: {command[0]} sent no request by httpx, httpx2, aiohttp, requests, urllib3 or boto3"
        )
        raise typer.Exit(code or Exit.FAILED)
    cassette.save()
    complain(Account(path=file, mode="rewrite", recorded=recorded).written)
    raise typer.Exit(code)


# --- the end of a replay --------------------------------------------------------------------------------------------------------


def _judge(broker: Broker, file: str, command: Sequence[str]) -> Exit:
    """
    Report the differences between the program and its recording.

    Raises:
        typer.Exit: with the code of the program, if that counts.
    """
    cassette, code = broker.cassette, broker.exit_code
    for message in dict.fromkeys([*map(str, cassette.misses), *broker.blocked]):
        complain(message)
    if cassette.misses or broker.blocked:
        return Exit.DIVERGED
    if not broker.processes:
        return complain(_no_python(command), Exit.USAGE)
    if code:
        raise typer.Exit(code)
    if cassette.unused:
        held = cassette.interactions
        listed = "".join(f"\n  {i}: {held[i].request.method} {held[i].request.url}" for i in cassette.unused)
        return complain(
            f"{len(cassette.unused)} of {len(held)} interactions of {file} were not played:{listed}\n"
            f"  to record again: {_words('record', file, command)}",
            Exit.DIVERGED,
        )
    complain(f"replayed {file}: {len(cassette)} interaction{'' if len(cassette) == 1 else 's'}")
    return Exit.COMPLETED


# --- the doctor -----------------------------------------------------------------------------------------------------------------

FREEZABLE = {"time.time": "time", "time.time_ns": "time", "uuid.uuid4": "uuid", "random": "random", "Random": "random"}
"""Functions, or prefixes of their names, and the word of ``--freeze`` that records them."""


def _examine(file: str, command: Sequence[str], allowed: Sequence[str]) -> Exit:
    from stepengine.testing.processes.doctor import ObservedRun, compare_runs

    first, second = ObservedRun(), ObservedRun()
    _replayed(file, command, allowed, first, PYTHONHASHSEED="1")
    broker = _replayed(file, command, allowed, second, PYTHONHASHSEED="2")
    _report_uncovered(broker)
    if not broker.processes:
        return complain(_no_python(command), Exit.USAGE)
    found = list(compare_runs(first, second))
    for finding in found:
        complain("\n".join(_explain(finding)))
    if not found and len(first.requests) != len(second.requests):
        return complain(f"one run sent {len(first.requests)} requests, the other {len(second.requests)}", Exit.DIVERGED)
    if not found:
        complain(f"{len(first.requests)} requests are equal in both runs")
    return Exit.DIVERGED if found else Exit.COMPLETED


def _explain(finding: Finding) -> list[str]:
    from stepengine.testing.cassette import describe_difference

    sent = f", sent by {_shown_line(finding.line)}," if finding.line else ""
    lines = [f"{finding.request.method} {finding.request.url}{sent} differs between two runs"]
    lines += [describe_difference(one, "first", "second") for one in finding.differences]
    if not finding.sources:
        return [
            *lines,
            "  no clock, id or random function was called before it: look for the order of a set, a file, or a thread",
        ]
    return [
        *lines,
        "  called before it, the last one first:",
        *[f"    {_shown_line(line)}  {name}{_advice(name)}" for name, line in finding.sources],
    ]


def _advice(name: str) -> str:
    kind = FREEZABLE.get(name) or FREEZABLE.get(name.partition(".")[0])
    return f"  (record with --freeze {kind})" if kind else ""


def _shown_line(line: str) -> str:
    from stepengine.testing.recordings import shown_path

    file, _, number = line.rpartition(":")
    return f"{shown_path(Path(file))}:{number}"
