"""
The files of `examples/deploy` are well-formed, and every command line in them is one that the command line understands.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from stepengine.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
BINARY = "/opt/stepengine/bin/stepengine"


def command_lines() -> Iterator[list[str]]:
    """
    Give what is run: the lists of the services that run us, and the units' ExecStart.
    """
    for service in COMPOSE["services"].values():
        if isinstance(service["command"], list):
            yield service["command"]
    for unit in UNITS:
        for line in re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE):
            yield shlex.split(line)


LINES = list(command_lines())


def parsed(arguments: list[str]) -> dict[str, Any]:
    """
    Return what the command line makes of arguments, without doing it; an option that there is none of is an error.
    """
    command, names = typer.main.get_command(app), ["stepengine"]
    context = command.make_context("stepengine", list(arguments))
    left = arguments
    while hasattr(command, "resolve_command"):
        name, command, left = command.resolve_command(context, left)
        names.append(name)
        context = command.make_context(name, list(left), parent=context)
    return {"command": names[1:], **context.params}


@pytest.mark.deep
@pytest.mark.smoke
def test_compose_and_units_have_workers_watcher_and_database() -> None:
    commands = [parsed(line[1:])["command"] for line in LINES]

    assert {"db", "migrate", "worker-1", "worker-2", "watcher"} == set(COMPOSE["services"])
    assert 3 == commands.count(["deploy", "worker"])
    assert 2 == commands.count(["deploy", "takeover"])
    assert {("deploy", name) for name in ("worker", "takeover", "gc", "migrate")} == {(*words,) for words in commands}


@pytest.mark.spec("durable:UC1", "durable:UC6", "durable:UC8", "durable:U46")
@pytest.mark.parametrize("line", LINES, ids=[f"{line[2]}-{number}" for number, line in enumerate(LINES)])
def test_every_command_line_parses_and_contains_no_url(line: list[str]) -> None:
    given = parsed(line[1:])

    assert Path(line[0]).name == "stepengine"
    assert given["db"].startswith("@")


@pytest.mark.spec("durable:U30", "durable:U40")
def test_every_worker_has_a_unique_id_and_time_to_stop() -> None:
    """
    The id stays the same over restarts; whoever stops a worker waits longer than the worker lets its effects go on.
    """
    workers = {name: parsed(s["command"][1:]) for name, s in COMPOSE["services"].items() if "worker" in name}
    unit = (DEPLOY / "systemd" / "stepengine-worker@.service").read_text()
    (started,) = [parsed(line[1:]) for line in LINES if line[:3] == [BINARY, "deploy", "worker"]]
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)

    assert set(workers) == {given["executor"] for given in workers.values()}
    assert all(
        given["drain"] < int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
        for name, given in workers.items()
    )
    assert "%H-%i" == started["executor"]
    assert started["drain"] < int(seconds)


@pytest.mark.spec("durable:U45", "durable:UK3")
def test_the_database_commits_synchronously_and_fits_all_workers() -> None:
    options = dict(re.findall(r"-c (\w+)=(\w+)", COMPOSE["services"]["db"]["command"]))

    assert "on" == options["synchronous_commit"]
    assert 9 * 11 <= int(options["max_connections"])
    # A lost machine's lock is free when the database notices: within half a minute.
    noticed = int(options["tcp_keepalives_idle"]) + int(options["tcp_keepalives_interval"]) * int(
        options["tcp_keepalives_count"]
    )
    assert noticed <= 30


def test_every_unit_file_is_valid_for_systemd(tmp_path: Path) -> None:
    """
    Each line is an option that systemd knows; where there is no systemd, at least every line is a section or an option.
    """
    for unit in UNITS:
        for line in filter(None, unit.read_text().splitlines()):
            assert re.match(r"#|\[(Unit|Service|Timer|Install)\]$|[A-Z]\w+=", line), (unit.name, line)
        # It refuses a program that is not there, which here is none of ours.
        (tmp_path / unit.name).write_text(unit.read_text().replace(BINARY, "/bin/true"))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed, so that options are not looked up")
    files = [str(tmp_path / unit.name.replace("@.", "@1.")) for unit in UNITS]
    command = ["systemd-analyze", "verify", "--man=no", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert [] == [line for line in done.stderr.splitlines() if str(tmp_path) in line or "stepengine" in line]
