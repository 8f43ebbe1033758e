"""
The pytest plugin: journals and cassettes as fixtures.

Each test has its own recordings. Their files are named after the test, in a folder next to its module. Option, mark and environment
decide before the test whether it records or replays. In CI nothing is recorded without an explicit setting; otherwise a changed agent
would replace its recording and pass. A test that replays has no network access, so a call that the recording lacks fails and costs
nothing. A recording is written after its test has passed; after a failure the old file stays. At the end of a complete test run,
files that no test owns are listed, such as those of renamed tests.

This package contains fixtures, options and hooks for tests of agents. Every option starts with `--stepengine-`. Its modules import
only `pytest`, the standard library and each other at module level, since pytest imports a registered plugin in every run of its
environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stepengine.pytest_plugin.environment import set_placeholder_keys
from stepengine.pytest_plugin.messages import (
    RecordingReport,
    add_advice_note,
    add_failed_evaluation_sections,
    add_recordings_to_report,
    format_hidden_errors,
    print_recordings_summary,
    trim_traceback_to_author,
    was_raised_by_test,
)
from stepengine.pytest_plugin.orphans import OrphanFinder
from stepengine.pytest_plugin.places import ROOT, get_extra_cassette_path, is_replayed_only, make_recording_path
from stepengine.pytest_plugin.settings import (
    MODES,
    choose_record_mode,
    get_node_id_without_group,
    is_live,
    make_redaction_rules,
    make_rerun_command,
    read_mark_arguments,
    refuse_unusable_modes,
    requests_cassette,
    uses_plugin,
)
from stepengine.pytest_plugin.snapshots import events_snapshot, request_snapshot, run_snapshot

if TYPE_CHECKING:
    from stepengine.testing.engines import EngineFactory
    from stepengine.testing.recordings import CassetteFixture, JournalFixture
    from stepengine.workspace.network import NetworkBlocked

__all__ = ("events_snapshot", "request_snapshot", "run_snapshot")

RECORDINGS = pytest.StashKey[list[Any]]()
TOLD = pytest.StashKey[RecordingReport]()
REFUSED = pytest.StashKey["list[NetworkBlocked]"]()
ALLOWED = pytest.StashKey["list[str] | None"]()
ORPHANS = pytest.StashKey[OrphanFinder]()
FOUND = pytest.StashKey[list[Path]]()
SHARED = pytest.StashKey[set[Path]]()
WORKER = "stepengine_orphans"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and ini settings."""
    group = parser.getgroup("stepengine", "recordings of agents and models (stepengine)")
    group.addoption(
        "--stepengine-record",
        choices=MODES,
        help="none: replay (default); once: record if there is no file; new: also record what is missing; "
        "extend: like new, and drop what is not used; rewrite: record everything again",
    )
    group.addoption("--stepengine-allow-live", action="store_true", help="record even if CI is set, and run live tests")
    group.addoption(
        "--stepengine-network",
        choices=("block", "allow", "all"),
        default="block",
        help="where to block the network. block: in tests that replay (default); allow: nowhere; all: in every test that does not record",
    )
    group.addoption(
        "--stepengine-orphans",
        choices=("report", "fail", "delete", "off"),
        default="report",
        help="what to do with recordings that no test uses, if the whole suite was collected",
    )
    group.addoption(
        "--stepengine-diff",
        choices=("short", "full"),
        default="short",
        help="how much of a miss or a divergence to show",
    )
    parser.addini("stepengine_record", "how tests record; see --stepengine-record", default="")
    for name in ("cassette", "journal"):
        parser.addini(
            f"stepengine_{name}_dir",
            f"folder of {name}s, relative to the folder of the test, or with {ROOT}/ at its start to that of the project",
            default=f"{name}s",
        )
    parser.addini("stepengine_network_allow", "hosts that replaying tests may reach", type="linelist", default=[])
    parser.addini(
        "stepengine_redact", "regular expressions for text that no recording may contain", type="linelist", default=[]
    )
    parser.addini(
        "stepengine_allow_secrets", "hashes of values that look like secrets but are not", type="linelist", default=[]
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and raise an error for unusable modes."""
    config.addinivalue_line(
        "markers",
        "stepengine(record=, ignore=, ignore_headers=, allow_unused=, extra=, chunks=, redact=, live=, patch=, "
        "record_errors=): how the fixtures `cassette`, `journal` and `stepengine_engine` behave",
    )
    refuse_unusable_modes(config)
    config.stash[ORPHANS] = OrphanFinder(config)
    config.stash[SHARED] = set()


# --- fixtures -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stepengine_cassette(request: pytest.FixtureRequest) -> CassetteFixture:
    """Return the cassette of the test: `cassette.transport()` for a provider, `cassette.clients()` for SDK clients."""
    from stepengine.redaction import make_redactor
    from stepengine.testing.patching import CACHE_HINTS
    from stepengine.testing.recordings import CassetteFixture

    item = request.node
    given, rules = read_mark_arguments(item), make_redaction_rules(item)
    if given.get("patch"):
        given["ignore"] = (*given.get("ignore", ()), *CACHE_HINTS)
    passed = ("ignore", "ignore_headers", "allow_unused", "chunks", "record_errors")
    cassette = CassetteFixture(
        make_recording_path(item, "cassette"),
        choose_record_mode(item),
        command=make_rerun_command(item),
        keeps=not is_live(item),
        requested=requests_cassette(item),
        redactor=make_redactor(rules.pop("redact") or "all", os.environ, **rules),
        extra=[get_extra_cassette_path(item, name) for name in given.get("extra", ())],
        **{name: given[name] for name in passed if name in given},
    )
    grouped = getattr(item.config.option, "loadgroup", False) and item.get_closest_marker("xdist_group")
    if hasattr(item.config, "workerinput") and not grouped:
        cassette.forbid_shared_recording(
            "other processes may be recording it: record without -n, or put those tests into one group with "
            "@pytest.mark.xdist_group and run with --dist=loadgroup"
        )
    cassette.set_recorded_files(item.config.stash[SHARED])
    item.config.stash[ORPHANS].record_owned_file(make_recording_path(item, "cassette"))
    item.stash.setdefault(RECORDINGS, []).append(cassette)
    return cassette


@pytest.fixture
def stepengine_journal(request: pytest.FixtureRequest) -> JournalFixture:
    """Return the journal of the test: `engine.run(agent, prompt, journal=journal)` records a run once and replays it afterwards."""
    from stepengine.testing.recordings import JournalFixture

    item = request.node
    journal = JournalFixture(
        make_recording_path(item, "journal"),
        choose_record_mode(item),
        command=make_rerun_command(item),
        allow_unused=bool(read_mark_arguments(item).get("allow_unused")),
        keeps=not is_live(item),
        **make_redaction_rules(item),
    )
    item.config.stash[ORPHANS].record_owned_file(make_recording_path(item, "journal"))
    item.stash.setdefault(RECORDINGS, []).append(journal)
    return journal


@pytest.fixture
def cassette(stepengine_cassette: CassetteFixture) -> CassetteFixture:
    """Return the cassette of the test."""
    return stepengine_cassette


@pytest.fixture
def journal(stepengine_journal: JournalFixture) -> JournalFixture:
    """Return the journal of the test."""
    return stepengine_journal


@pytest.fixture
def stepengine_engine(request: pytest.FixtureRequest) -> Iterator[EngineFactory]:
    """
    Return a function that creates engines with a test clock, a fixed seed and the test's cassette.

    Call it as `stepengine_engine(agents, ...)`. In a test with a journal and without a cassette, no cassette is used.
    """
    from stepengine.testing.engines import EngineFactory

    names = request.fixturenames
    alone = "stepengine_journal" in names and "stepengine_cassette" not in names
    factory = EngineFactory(None if alone else request.getfixturevalue("stepengine_cassette"))
    yield factory
    factory.close()


# --- a test -------------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Set placeholder keys for a test that replays, and block the network, also for its fixtures."""
    replays = True
    mine = uses_plugin(item)
    if mine:
        try:
            replays = is_replayed_only(item)
        except pytest.UsageError:  # reported when the test runs
            replays = False
    from stepengine.workspace.network import block_test_network

    network = item.config.getoption("--stepengine-network")
    blocks = replays and (network == "all" or (mine and network == "block"))
    with (
        set_placeholder_keys(item, replays=mine and replays),
        block_test_network(_read_allowed_hosts(item) if blocks else None) as refused,
    ):
        item.stash[REFUSED] = refused
        result = yield
    for recording in item.stash.get(RECORDINGS, []):
        for path in getattr(recording, "shared_files", ()):
            item.config.stash[ORPHANS].record_owned_file(path)
    return result


def _read_allowed_hosts(item: pytest.Item) -> list[str]:
    """Return the hosts of the ini setting that replaying tests may reach."""
    return list(item.config.getini("stepengine_network_allow"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Clear the recordings of a test. Skip a live test, unless live calls are allowed; raise an error for an invalid mark."""
    item.stash[RECORDINGS] = []  # a repeated test still has those of its failed run
    item.stash.get(REFUSED, []).clear()
    leftovers = sys.modules.get("stepengine.tools.leftovers")
    if leftovers is not None:  # only imported if the test has imported a tool
        leftovers.Checks.inline = True
    if uses_plugin(item) and is_live(item) and not item.config.getoption("--stepengine-allow-live"):
        pytest.skip("calls real providers; run it with --stepengine-allow-live")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Block the network of a replaying test. Then check its recordings, and store those of a passed test."""
    from stepengine.workspace.network import block_test_network

    everywhere = item.stash.get(REFUSED, [])
    recordings = item.stash.setdefault(RECORDINGS, [])  # the test may add to it by request.getfixturevalue
    mine = uses_plugin(item) or bool(recordings)
    told = item.stash[TOLD] = RecordingReport()
    replays = mine and not is_live(item) and all(r.replaying for r in recordings)
    blocks = replays and item.config.getoption("--stepengine-network") != "allow"
    allowed = item.stash[ALLOWED] = _read_allowed_hosts(item) if blocks else None
    try:
        with (
            block_test_network(allowed) as refused,
            _make_client_patch(item, recordings),
        ):
            result = yield
        if recordings:
            _require_valid_recording_usage(item, recordings)
        _raise_first_blocked([*everywhere, *refused])
        told.written += [usage.written for r in recordings for usage in r.write_recordings()]
        told.written += [line for r in recordings for line in getattr(r, "list_remarks", list)()]
        item.config.stash[ORPHANS].record_passed_test(item)
    except BaseException as error:
        if mine or recordings:
            _add_failure_notes(item, recordings, error)
        raise
    finally:
        told.lines += [f"{get_node_id_without_group(item)}: {usage}" for r in recordings for usage in r.list_usages()]
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Block the network of fixtures that end after a replaying test, and raise an error for an attempt that they swallowed."""
    from stepengine.workspace.network import block_test_network

    everywhere = item.stash.get(REFUSED, [])
    known = len(everywhere)
    with block_test_network(item.stash.get(ALLOWED, None)) as refused:
        result = yield
    _raise_first_blocked([*everywhere[known:], *refused])
    return result


def _make_client_patch(item: pytest.Item, recordings: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context in which the clients of a test marked ``patch=True`` use its cassette; for other tests, it does nothing."""
    if not read_mark_arguments(item).get("patch") or is_live(item):
        return nullcontext()
    from stepengine.testing.recordings import CassetteFixture

    patch: AbstractContextManager[None] = next(r for r in recordings if isinstance(r, CassetteFixture)).patch()
    return patch


def _require_valid_recording_usage(item: pytest.Item, recordings: Sequence[Any]) -> None:
    """Raise an error if a recording was not used as recorded, or if model calls in a journal bypassed its cassette."""
    from stepengine.testing.recordings import CassetteFixture

    cassettes = [r for r in recordings if isinstance(r, CassetteFixture)]
    calls = sum([r.calls for r in recordings if r not in cassettes])
    for cassette in cassettes:
        cassette.calls = max(cassette.calls, calls)
    try:
        for recording in recordings:
            recording.check_usage()
        return
    except AssertionError as error:
        if was_raised_by_test(item, error):
            raise
        said = f"{type(error).__name__}: {error}"
    # No line of the test is to blame, so no traceback is shown. Outside of the block, the error is reported only once.
    pytest.fail(said, pytrace=False)


def _raise_first_blocked(refused: Sequence[NetworkBlocked]) -> None:
    """Raise the first blocked network access, even if the test swallowed it or wrapped it in a group."""
    if refused:
        raise refused[0]


def _add_failure_notes(item: pytest.Item, recordings: Sequence[Any], error: BaseException) -> None:
    """Add a note on how to record again and a section with hidden misses and divergences; trim the traceback of a miss."""
    from stepengine.workspace.network import NetworkBlocked

    add_advice_note(item, error, replays=all(recording.replaying for recording in recordings))
    misses = [miss for recording in recordings for miss in recording.misses]
    if isinstance(error, NetworkBlocked) or any(error is miss for miss in misses):
        trim_traceback_to_author(item, error)
    hidden = [miss for miss in misses if miss is not error]
    if not isinstance(error, pytest.skip.Exception):
        item.stash[TOLD].hidden += hidden
    full = item.config.getoption("--stepengine-diff") == "full"
    shown = misses if full else hidden
    if shown:
        item.add_report_section("call", "stepengine", format_hidden_errors(shown, full=full))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Show a swallowed miss or divergence as the headline of the failure that it caused, and failed evaluations in full."""
    report = yield
    if call.when == "call" and call.excinfo is not None and report.failed:
        add_failed_evaluation_sections(report, call.excinfo.traceback[-1].frame.f_locals.values())
    told = item.stash.get(TOLD, None)
    if call.when == "call" and told is not None:
        add_recordings_to_report(report, told)
    return report


# --- the session --------------------------------------------------------------------------------------------------------


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Record that not all tests were collected."""
    if items:
        items[0].config.stash[ORPHANS].whole = False


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Record which recordings the collected tests own."""
    session.config.stash[ORPHANS].record_owned_files(session)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the cassette fixture to a test that requests one by its mark alone."""
    if item.get_closest_marker("stepengine") is None or not hasattr(item, "fixturenames"):
        return
    try:
        requested = requests_cassette(item)
    except pytest.UsageError:  # reported when the test runs
        return
    if requested and "stepengine_cassette" not in item.fixturenames:
        item.fixturenames.append("stepengine_cassette")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Merge the collected tests of a pytest-xdist worker."""
    state = None if error else getattr(node, "workeroutput", {}).get(WORKER)
    node.config.stash[ORPHANS].merge_worker_state(state)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Find the recordings that no test owns, once for all workers; delete them or fail the run if the option says so."""
    config = session.config
    orphans = config.stash[ORPHANS]
    if hasattr(config, "workeroutput"):
        config.workeroutput[WORKER] = orphans.to_dict()
        return
    found = [] if config.option.collectonly else orphans.find_orphans()
    config.stash[FOUND] = found
    if orphans.wanted_action == "delete":
        for path in found:
            path.unlink()
    elif found and orphans.wanted_action == "fail" and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: object, config: pytest.Config) -> None:
    """Print the new recordings, and the recordings that no test owns."""
    found = [
        path.relative_to(config.rootpath) if path.is_relative_to(config.rootpath) else path
        for path in config.stash.get(FOUND, [])
    ]
    print_recordings_summary(terminalreporter, found, config.stash[ORPHANS].wanted_action)
