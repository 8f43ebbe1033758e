"""
The pytest plugin: journals and cassettes as fixtures.

What lives here: fixtures and options for tests of agents. Every option starts with `--stepengine-`.

What must not: module-level imports other than `pytest` and the standard library, since pytest imports a registered plugin in
every run of its environment.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stepengine.testing.recordings import JournalFile, Mode, TestCassette

__all__: tuple[str, ...] = ()

MODES = ("none", "once", "new", "extend", "rewrite")
MARK_ARGUMENTS = frozenset({"record", "ignore", "match_headers", "allow_unused"})
ROOT = "{rootdir}"
UNFIT = re.compile(r"[^A-Za-z0-9._\[\]=,-]")
LONGEST = 120
RECORDINGS = pytest.StashKey[list[Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and ini settings."""
    group = parser.getgroup("stepengine", "recordings of agents and models (stepengine)")
    group.addoption(
        "--stepengine-record",
        choices=MODES,
        help="none: replay (default); once: record what has no file; new: record what is not known, too; "
        "extend: so, and drop what is not used; rewrite: record again",
    )
    group.addoption("--stepengine-allow-live", action="store_true", help="record even when CI is set")
    group.addoption("--stepengine-network", choices=("block", "allow"), default="block", help="in replaying tests")
    parser.addini("stepengine_record", "how tests record; see --stepengine-record", default="")
    for name in ("cassette", "journal"):
        parser.addini(
            f"stepengine_{name}_dir",
            f"folder of {name}s, in the folder of the test, or in that of the project with {ROOT}/ before it",
            default=f"{name}s",
        )
    parser.addini("stepengine_network_allow", "hosts that replaying tests may reach", type="linelist", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark and refuse modes that are none, or that a forgotten option would spend money with."""
    config.addinivalue_line(
        "markers",
        "stepengine(record=, ignore=, match_headers=, allow_unused=): how the fixtures `cassette` and `journal` behave",
    )
    told = _told(config)
    for mode in (told, config.getini("stepengine_record")):
        if mode and mode not in MODES:
            msg = f"{mode!r} is no mode of recording; there are {', '.join(MODES)}"
            raise pytest.UsageError(msg)
    if told not in (None, "none") and not _may_record(config):
        msg = f"the mode {told!r} would record in CI; give --stepengine-allow-live as well if that is meant"
        raise pytest.UsageError(msg)


def _told(config: pytest.Config) -> str | None:
    """Return the mode of the command line or the environment, if one is given."""
    return config.getoption("--stepengine-record") or os.environ.get("STEPENGINE_RECORD") or None


def _may_record(config: pytest.Config) -> bool:
    return not os.environ.get("CI") or bool(config.getoption("--stepengine-allow-live"))


def _marked(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of the marks at *item*, the nearest first."""
    given: dict[str, Any] = {}
    for mark in item.iter_markers("stepengine"):
        unknown = sorted(set(mark.kwargs) - MARK_ARGUMENTS)
        if mark.args or unknown:
            msg = f"the mark stepengine takes {', '.join(sorted(MARK_ARGUMENTS))} by name, not {unknown or mark.args}"
            raise pytest.UsageError(msg)
        given = {**mark.kwargs, **given}
    return given


def _mode_of(item: pytest.Item, marked: dict[str, Any]) -> Mode:
    """Return the mode of a test: the command line beats the mark, but a test that is marked `none` stays so."""
    wanted = marked.get("record")
    if wanted is not None and wanted not in MODES:
        msg = f"{wanted!r} is no mode of recording; there are {', '.join(MODES)}"
        raise pytest.UsageError(msg)
    mode: Any = _told(item.config) or wanted or item.config.getini("stepengine_record") or "none"
    # A mark or an ini setting is there for everybody's machine; in CI it replays.
    return "none" if wanted == "none" or not _may_record(item.config) else mode


def _file_of(item: pytest.Item, kind: str, suffix: str) -> Path:
    """Return the file of a test: ``<folder>/<module>/<Class>.<test>[<param>]``, made fit for every file system (Y7)."""
    setting = str(item.config.getini(f"stepengine_{kind}_dir"))
    here = item.path.parent
    root = item.config.rootpath
    if setting.startswith(ROOT):
        folder = root / setting.removeprefix(ROOT).lstrip("/")
        folder = folder / here.relative_to(root) if here.is_relative_to(root) else folder
    else:
        folder = here / setting
    owner = getattr(item, "cls", None)
    name = f"{owner.__name__}.{item.name}" if owner is not None else item.name
    fit = UNFIT.sub("-", name)
    if fit != name or len(fit) > LONGEST:
        fit = f"{fit[:LONGEST]}~{hashlib.sha256(item.nodeid.encode()).hexdigest()[:6]}"
    return folder / item.path.stem / f"{fit}{suffix}"


def _hint(item: pytest.Item, mode: str = "once") -> str:
    return f"pytest {item.nodeid!r} --stepengine-record={mode}"


# --- fixtures -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stepengine_cassette(request: pytest.FixtureRequest) -> TestCassette:
    """Return the cassette of the test; `cassette.transport()` goes into a provider or an SDK's client."""
    from stepengine.testing.recordings import TestCassette

    item = request.node
    marked = _marked(item)
    cassette = TestCassette(
        _file_of(item, "cassette", ".yaml"),
        _mode_of(item, marked),
        hint=_hint(item, "extend"),
        **{name: value for name, value in marked.items() if name != "record"},
    )
    item.stash.setdefault(RECORDINGS, []).append(cassette)
    return cassette


@pytest.fixture
def stepengine_journal(request: pytest.FixtureRequest) -> JournalFile:
    """Return the journal of the test; `journal.run(engine, agent, prompt)` records a run once and repeats it then."""
    from stepengine.testing.recordings import JournalFile

    item = request.node
    path = _file_of(item, "journal", ".jsonl")
    journal = JournalFile(path, _mode_of(item, _marked(item)), _hint(item, "rewrite"))
    item.stash.setdefault(RECORDINGS, []).append(journal)
    return journal


@pytest.fixture
def cassette(stepengine_cassette: TestCassette) -> TestCassette:
    """Return the cassette of the test."""
    return stepengine_cassette


@pytest.fixture
def journal(stepengine_journal: JournalFile) -> JournalFile:
    """Return the journal of the test."""
    return stepengine_journal


# --- the end of a test --------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Block the network of a test that replays; afterwards check its recordings, and keep what a passed test recorded."""
    recordings = item.stash.get(RECORDINGS, [])
    if not recordings:
        return (yield)
    replays = not any(recording.records for recording in recordings)
    blocks = replays and item.config.getoption("--stepengine-network") == "block"
    passed = False
    try:
        with _blocked(item.config.getini("stepengine_network_allow") if blocks else None) as refused:
            result = yield
        for recording in recordings:
            recording.check()
        _raise_first(refused)
        kept = [path for recording in recordings if (path := recording.keep()) is not None]
        passed = True
    except BaseException as error:
        _tell_misses(item, recordings, error)
        raise
    finally:
        if not passed:
            for recording in recordings:
                getattr(recording, "drop", int)()
    if kept:
        item.add_report_section("call", "stepengine", "\n".join([f"recorded {path}" for path in kept]))
    return result


def _raise_first(refused: list[NetworkBlocked]) -> None:
    """Raise what was refused, also when somebody swallowed it or wrapped it in a group."""
    if refused:
        raise refused[0]


def _tell_misses(item: pytest.Item, recordings: list[Any], error: BaseException) -> None:
    """Show misses and divergences that the test's own failure hides."""
    hidden = [miss for recording in recordings for miss in getattr(recording, "misses", ()) if miss is not error]
    hidden += [d for r in recordings if (d := getattr(r, "divergence", None)) is not None and d is not error]
    if hidden:
        item.add_report_section("call", "stepengine", "\n\n".join(map(str, hidden)))


# --- the network --------------------------------------------------------------------------------------------------------


class NetworkBlocked(BaseException):
    """A test that replays wanted to reach the network. No ``Exception``, so that nobody retries or swallows it."""


class _Network:
    """What the audit hook looks at: it cannot be removed, so it is told when it counts."""

    installed = False
    allowed: frozenset[str] | None = None
    refused: list[NetworkBlocked]


LOOKUPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
SENDING = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _Network.allowed is None or (event not in SENDING and event not in LOOKUPS):
        return
    address = args[1] if event in SENDING else args[0]
    if event in SENDING and not isinstance(address, tuple):
        return  # a path of a Unix socket, or a socket that is connected already
    host = address[0] if isinstance(address, tuple) else address
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    if name in _Network.allowed:
        return
    msg = f"{event} to {name!r}: this test replays its recordings and may not reach the network; allow a host with stepengine_network_allow, or everything with --stepengine-network=allow"
    error = NetworkBlocked(msg)
    _Network.refused.append(error)
    raise error


@contextmanager
def _blocked(allowed: list[str] | None) -> Iterator[list[NetworkBlocked]]:
    """Refuse every host but *allowed* for a while, and tell what was refused; ``None`` refuses nothing."""
    refused: list[NetworkBlocked] = []
    if allowed is None:
        yield refused
        return
    if not _Network.installed:
        _Network.installed = True
        sys.addaudithook(_audit)
    _Network.allowed, _Network.refused = frozenset(allowed), refused
    try:
        yield refused
    finally:
        _Network.allowed = None
