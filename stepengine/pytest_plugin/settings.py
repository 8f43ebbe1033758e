"""Options, ini settings, marks and environment variables, as they apply to a test."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

MODES = ("none", "once", "new", "extend", "rewrite")
FIXTURES = frozenset({"stepengine_journal", "stepengine_cassette", "stepengine_engine"})
MARK_ARGUMENTS = frozenset({
    "record", "ignore", "ignore_headers", "allow_unused", "extra", "chunks", "redact", "live", "patch", "record_errors",
})  # fmt: skip
CASSETTES = frozenset({"cassette", "stepengine_cassette"})
CHUNKS = ("events", "whole", "recorded", "random")


def uses_plugin(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture or the mark of this plugin."""
    names = getattr(item, "fixturenames", ())
    return not FIXTURES.isdisjoint(names) or item.get_closest_marker("stepengine") is not None


def requests_cassette(item: pytest.Item) -> bool:
    """Return True if the test itself asks for a cassette: by fixture, by ``patch=True``, or by a mark and no other fixture."""
    names = getattr(item, "fixturenames", ())
    if not CASSETTES.isdisjoint(names) or read_mark_arguments(item).get("patch"):
        return True
    own = any(mark.name == "stepengine" for mark in item.own_markers)
    return own and FIXTURES.isdisjoint(names)


def find_command_line_mode(config: pytest.Config) -> str | None:
    """Return the recording mode of the command line; ``None`` if none is given."""
    mode: str | None = config.getoption("--stepengine-record")
    return mode


def may_record(config: pytest.Config) -> bool:
    """Return True if recording is allowed; in CI only with an explicit setting."""
    return not os.environ.get("CI") or bool(config.getoption("--stepengine-allow-live"))


def refuse_unusable_modes(config: pytest.Config) -> None:
    """
    Raise an error for unknown recording modes, and for one that would record in CI and spend money by accident.

    Raises:
        pytest.UsageError: when such a mode is set.
    """
    given = find_command_line_mode(config)
    for mode in (given, config.getini("stepengine_record")):
        if mode:
            _refuse_unknown_mode(mode)
    if given not in (None, "none") and not may_record(config):
        msg = f"the mode {given!r} would record in CI; add --stepengine-allow-live if that is intended"
        raise pytest.UsageError(msg)


def _refuse_unknown_mode(mode: object) -> None:
    """Raise ``pytest.UsageError`` for an unknown recording mode."""
    if mode not in MODES:
        msg = f"{mode!r} is not a recording mode; valid modes: {', '.join(MODES)}"
        raise pytest.UsageError(msg)


def read_mark_arguments(item: pytest.Item) -> dict[str, Any]:
    """
    Return the arguments of the marks of *item*. Closer marks win.

    Raises:
        pytest.UsageError: when an argument is unknown or has an invalid value.
    """
    given: dict[str, object] = {}
    for mark in item.iter_markers("stepengine"):
        unknown = sorted(set(mark.kwargs) - MARK_ARGUMENTS)
        if mark.args or unknown:
            msg = f"the mark stepengine takes {', '.join(sorted(MARK_ARGUMENTS))} by name, not {unknown or mark.args}"
            raise pytest.UsageError(msg)
        given = {**mark.kwargs, **given}
    if given.get("record") is not None:
        _refuse_unknown_mode(given["record"])
    for name in ("ignore", "ignore_headers", "extra", "redact"):
        if isinstance(given.get(name, ()), str) or not hasattr(given.get(name, ()), "__iter__"):
            msg = f"the mark stepengine takes {name} as a list, not {given[name]!r}"
            raise pytest.UsageError(msg)
    chunks = given.get("chunks", "events")
    if chunks not in CHUNKS and not (isinstance(chunks, int) and chunks > 0):
        msg = (
            f"the mark stepengine takes chunks= as {', '.join(map(repr, CHUNKS))} or a number of bytes, not {chunks!r}"
        )
        raise pytest.UsageError(msg)
    return given


def is_live(item: pytest.Item) -> bool:
    """Return whether a test is marked ``@pytest.mark.stepengine(live=True)``: it calls real providers and has no recordings."""
    return bool(read_mark_arguments(item).get("live"))


def choose_record_mode(item: pytest.Item) -> Any:
    """
    Return the recording mode of a test: the command line beats the mark, but a test marked ``none`` replays.

    A live test is always recorded again. Other tests have the mode ``none`` in CI, unless ``--stepengine-allow-live`` is given.
    """
    given = read_mark_arguments(item)
    if given.get("live"):
        return "rewrite"
    wanted = given.get("record")
    if wanted == "none" or not may_record(item.config):
        return "none"
    return find_command_line_mode(item.config) or wanted or item.config.getini("stepengine_record") or "none"


def make_redaction_rules(item: pytest.Item) -> dict[str, Any]:
    """
    Return the rules for secrets in recordings: ``redact``, ``allow_secrets`` and ``machine``.

    The ini setting ``stepengine_redact`` lists regular expressions; the mark's ``redact`` takes every kind of rule.
    """
    from stepengine.journal import machine_data
    from stepengine.redaction import RedactPattern

    patterns = [RedactPattern(line, "stepengine_redact") for line in item.config.getini("stepengine_redact")]
    return {
        "redact": (*patterns, *read_mark_arguments(item).get("redact", ())),
        "allow_secrets": tuple(item.config.getini("stepengine_allow_secrets")),
        "machine": machine_data(item.config.rootpath),
    }


def get_node_id_without_group(item: pytest.Item) -> str:
    """Return the id of a test without the names of groups that pytest-xdist appends (``--dist=loadgroup``)."""
    group = "_".join(
        sorted(
            {str((mark.args or (mark.kwargs.get("name", "default"),))[0]) for mark in item.iter_markers("xdist_group")}
        )
    )
    return item.nodeid.removesuffix(f"@{group}") if group and hasattr(item.config, "workerinput") else item.nodeid


def make_rerun_command(item: pytest.Item) -> str:
    """Return the command that runs one test, from the folder in which pytest was called."""
    _, colons, name = get_node_id_without_group(item).partition("::")
    try:
        file = os.path.relpath(item.path, item.config.invocation_params.dir)
    except ValueError:  # another drive
        file = str(item.path)
    return f"pytest {shlex.quote(f'{Path(file).as_posix()}{colons}{name}')}"
