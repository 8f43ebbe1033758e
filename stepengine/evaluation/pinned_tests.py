"""
``pin``: turns a failed run into a test that fails until the agent is repaired.

The test repeats the recorded run. Up to the first effect that the repair changes, the record answers. From there on, the replies
and results in the test answer what is not recorded. It needs no key and no network, and calls no tool.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs
from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.definition import AgentDefinition, find_published_name, normalised_id
from stepengine.data.state import RunResult
from stepengine.data.visible import truncate_text, visible
from stepengine.engine import Engine, loader
from stepengine.engine.agent_family import collect_agent_family
from stepengine.engine.loader import AgentLocation
from stepengine.errors import DataError, ModelError
from stepengine.evaluation.checks import Check, load_file_member
from stepengine.evaluation.origins import Origin, find_agent_origin
from stepengine.journal import (
    ExternalCall,
    FileJournal,
    ForkReport,
    Journal,
    JournalLike,
    as_journal,
    scan,
    scrub,
)
from stepengine.journal.sources import get_journal_file
from stepengine.redaction import make_redactor

__tracebackhide__ = True  # a failed test ends at its author's line
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
SHOWN = 300


def make_pin_name(text: str) -> str:
    """
    Return a text with only the characters for file and function names, as a pin's name; raise ``DataError`` if none remains.

    Raises:
        DataError: when no valid name remains.
    """
    made = re.sub(r"[^a-z0-9]+", "_", text[:60].lower()).strip("_")
    made = f"run_{made}" if made[:1].isdigit() else made
    if NAME.fullmatch(made) is None:
        msg = f"{text[:60]!r} cannot be the name of a test; use letters and digits"
        raise DataError(msg)
    return made


def copy_without_secrets(journal: Journal, target: Path) -> int:
    """
    Copy *journal* to *target* without texts like secrets, return the number of changed records; raise ``DataError`` if one may remain.

    Raises:
        DataError: when *target* exists, or the copy still contains a possible secret; the copy is then deleted.
        JournalError: when the journal cannot be read.
    """
    if target.exists():
        msg = f"{target} exists already; give the pin another name"
        raise DataError(msg)
    made = scrub(journal)
    target.parent.mkdir(parents=True, exist_ok=True)
    made.copy_to(FileJournal(target, redact="off"))
    leaks = list(scan([target]))
    if leaks:
        target.unlink()
        found = ", ".join([f"{leak.rule} ({leak.length} characters)" for leak in leaks[:5]])
        msg = f"the copy without secrets still contains a possible secret: {found}; nothing was written"
        raise DataError(msg)
    before, after = journal.lines(), made.lines()
    return sum(a != b for a, b in zip(before, after, strict=False)) + abs(len(before) - len(after))


def render_pin_test(
    name: str, agents: Iterable[str], check: str, reason: str, journal: str, *, has_bundled_tools: bool
) -> str:
    """
    Return the source of a test.

    Args:
        name: The run's name: ``tests/test_pin_<name>.py``.
        agents: The paths or ids of its agents, the root's first.
        check: The check, as it was typed.
        reason: Why the run fails the check.
        journal: The path of the journal, relative to the project's folder.
        has_bundled_tools: Whether an agent names tools that come with stepengine.
    """
    shown = visible(truncate_text(" ".join(reason.split()), SHOWN), strict=True)
    return TEMPLATE.format(
        name=name,
        reason=shown.replace("\\", "\\\\").replace('"""', "'''"),
        journal=json.dumps(journal, ensure_ascii=False),
        check=json.dumps(check, ensure_ascii=False),
        agents=", ".join(map(_format_load_agent_call, agents)),
        tools=", tools=TOOLS" if has_bundled_tools else "",
        imported=BUNDLED_IMPORT if has_bundled_tools else "",
        bundled=BUNDLED if has_bundled_tools else "",
    )


def _format_load_agent_call(agent: str) -> str:
    """Return the source of the call ``load_agent(...)`` for the path or id of an agent."""
    place = AgentLocation.from_text(agent)
    if place is None:
        return f"load_agent({json.dumps(agent, ensure_ascii=False)})"
    named = json.dumps(str(attrs.evolve(place, sandboxed=False)), ensure_ascii=False)
    return f"load_agent(ROOT / {named}, sandboxed=True)" if place.sandboxed else f"load_agent(ROOT / {named})"


TEMPLATE = '''\
"""
A failed run, saved by `stepengine compare pin`: {reason}

The test passes when the agent is fixed. From the first request that the fix changes, it uses REPLIES and RESULTS.
"""

from pathlib import Path

from stepengine import Engine, load_agent
from stepengine.evaluation.pinned_tests import pinned
from stepengine.testing import ScriptedModel{imported}

ROOT = Path(__file__).resolve().parents[1]
REPLIES = []
"""Replies of the model to requests that are new since the fix, in order: texts, tool_call(...), ModelReply(...)."""
RESULTS = {{}}
"""Results of tool calls that are new since the fix, by tool name: a text, JSON, or a function of the input."""
{bundled}

def test_pin_{name}() -> None:
    with Engine([{agents}]{tools}, models=ScriptedModel(REPLIES)) as engine:
        pinned(engine, ROOT / {journal}, {check}, results=RESULTS, root=ROOT)
'''
BUNDLED_IMPORT = """
from stepengine.tools.bundled import file_tools, followup_tools, search_tools, shell_tools"""
BUNDLED = '''TOOLS = [
    *file_tools(ROOT, write=True, propose=True, allow_wide_root=True),
    *search_tools(ROOT, allow_wide_root=True),
    *shell_tools(ROOT, allow_wide_root=True),
    *followup_tools(),
]
"""For their names and schemas; none of them is called."""
'''


def pinned(
    engine: Engine,
    journal: JournalLike,
    check: str | Callable[[RunResult], object],
    *,
    agent: AgentDefinition | None = None,
    results: Mapping[str, object] | None = None,
    root: Path | None = None,
) -> RunResult:
    """
    Repeat a recorded run with the current code, and assert that it passes its check; no tool is called.

    From the first difference on, the engine's models answer new requests, and *results* answer new calls.

    Args:
        engine: An engine with the agent, and a scripted model for requests that are new.
        journal: The recorded run.
        check: An expression over ``output, text, status, tools, steps, cost, error, result``, ``MODULE:FN``, or a function of
            the result.
        agent: The agent; by default the engine's of the recorded id.
        results: The results of calls that are not recorded, by the name of the tool or function.
        root: The folder in which ``MODULE:FN`` is looked up; the working folder by default.

    Raises:
        AssertionError: when it does not pass, with the reason; or when a reply or result is neither recorded nor in the test.
        JournalError: when the journal cannot be read.
    """
    asked = Check.from_any(check, root)

    def answer_from_results(call: ExternalCall, _: Sequence[ExternalCall]) -> object:
        made = (results or {}).get(call.name)
        return made(call.input) if callable(made) else made

    made = engine.fork_sync(journal, tools="recorded", agent=agent, simulate=answer_from_results if results else None)
    _assert_nothing_unrecorded(made)
    failure = asked.find_failure(made.result)
    assert not failure, failure  # noqa: S101 - it is what a test asserts
    return made.result


def _assert_nothing_unrecorded(report: ForkReport) -> None:
    """Raise if the run made a call whose result is neither in the record nor in the test."""
    if report.refused is not None:
        called = truncate_text(json.dumps(plain(report.refused.input), ensure_ascii=False), SHOWN)
        msg = f"the run now calls {report.refused.name} {called} at {report.refused.address}, which is not recorded; add its result to RESULTS"
        raise AssertionError(msg)
    error: BaseException | None = report.result.error
    if isinstance(error, ModelError) and error.kind == "script":
        msg = f"from {report.broke_at} on, the run sends requests that are not recorded; add their replies to REPLIES: {error.message}"
        raise AssertionError(msg)


@frozen
class PinnedTest:
    """
    A pin that was written.

    Attributes:
        file: The test.
        journal: The journal of the repeated run.
        reason: Why the test fails.
        changed: The number of records from which possible secrets were removed.
    """

    file: Path
    journal: Path
    reason: str
    changed: int


def pin(
    engine: Engine,
    journal: JournalLike,
    check: str,
    *,
    agent: AgentDefinition | None = None,
    agent_file: str = "",
    agent_folders: Iterable[Path] = (),
    by_origin: bool = False,
    name: str = "",
    folder: Path = Path("tests/journals"),
) -> PinnedTest | str:
    """
    Write a test for a failed run next to *folder*, and its journal into *folder*; run the test, which has to fail like the run.

    Both are without texts that look like secrets.

    Args:
        engine: An engine with the agent.
        journal: The run.
        check: The condition of *journal*: an expression over ``output, text, status, tools, steps, cost, error, result``, or ``MODULE:FN``.
        agent: The agent of the run; by default the engine's agent with the recorded id.
        agent_file: The file of the agent, as for ``load_agent``; by default the agent is looked up by its id.
        agent_folders: More folders in which the ids of agents are looked up.
        by_origin: Whether the test loads the engine's agents from the files that define them, and not by their ids.
        name: The name of the test; by default the name of the journal.
        folder: The folder of the journal, inside the folder of the tests.

    Returns:
        The written test, or why there is nothing to pin: the run passes, with its secrets or without.

    Raises:
        DataError: when the check is neither, the test exists, a text still looks like a secret, or the test does not fail like the
            run; no file is left.
        DefinitionError: when the file of an agent is not found.
        JournalError: when the journal cannot be read, or does not fit the code.
    """
    opened, folders, asked = as_journal(journal), tuple(agent_folders), Check.from_any(check)
    root = agent or engine.agent(str(opened.history().root["agent_id"]))
    family = _list_engine_family(engine, root) if by_origin else collect_agent_family(root, agent_file, folders)
    origins = _get_agent_origins(family) if by_origin else {}

    def list_agent_references(file: Path) -> list[str]:
        if by_origin:
            return [f"{relative_to_tests_parent(origin.file, file)}#{name}" for name, origin in origins.items()]
        named = [_format_agent_reference(one, "", folders, file) for one in _list_referenced_ids(family)]
        return [_format_agent_reference(root.id, agent_file, folders, file), *named]

    clean = make_redactor("all", os.environ).value
    if not replay_and_find_failure(engine, opened, asked, root):
        return "this run passes the check, so there is nothing to pin"
    called = make_pin_name(name or get_journal_file(opened.name).stem)
    kept, file = folder / f"{called}.jsonl", folder.parent / f"test_pin_{called}.py"
    if file.exists():
        msg = f"{file} exists already; give the pin another name"
        raise DataError(msg)
    changed = copy_without_secrets(opened, kept)
    made = [kept]
    try:
        # The reason may quote the run, and the test runs the copy.
        reason = replay_and_find_failure(engine, FileJournal(kept), asked, root)
        if not reason:
            return "without its secrets the run passes the check; nothing was written"
        source = render_pin_test(
            called,
            list_agent_references(file),
            check,
            clean(reason),
            relative_to_tests_parent(kept, file),
            has_bundled_tools=any(isinstance(tool, str) for one in family for tool in one.tools),
        )
        made.append(file)
        # A path that is not UTF-8 has lone surrogates; in a literal of Python, their escapes mean the same.
        file.write_text(source, encoding="utf-8", errors="backslashreplace")
        said = _run_test_and_find_failure(file, called)
        if reason not in said:
            msg = f"the written test does not fail as expected: {clean(said) or 'it passes'}"
            raise DataError(msg)
        made.clear()
    finally:
        for path in made:
            path.unlink(missing_ok=True)
    return PinnedTest(file, kept, clean(reason), changed)


def _list_engine_family(engine: Engine, root: AgentDefinition) -> list[AgentDefinition]:
    """Return an agent and the engine's agents that it may start, directly or through others."""
    found: set[str] = set()
    left = [root.id]
    while left:
        for child in engine.agent(left.pop()).spawnable_ids:
            if child not in found:
                found.add(child)
                left.append(child)
    return [root, *[one for one in engine.agents if one.id != root.id and one.id in found]]


def _get_agent_origins(agents: Iterable[AgentDefinition]) -> dict[str, Origin]:
    """
    Return file and line of each agent by its id; raise ``DataError`` for an agent that no file defines.

    Raises:
        DataError: for an agent that no file defines.
    """
    found = {one.id: find_agent_origin(one) for one in agents}
    lost = [name for name, origin in found.items() if origin is None]
    if lost:
        msg = f"no file defines the agent {lost[0]!r}, so a test cannot load it; move the agent into a file"
        raise DataError(msg)
    return {name: origin for name, origin in found.items() if origin is not None}


def _format_agent_reference(agent_id: str, agent_file: str, folders: Iterable[Path], test_file: Path) -> str:
    """Return the reference to an agent in a test: the id of a bundled agent, else the path of the agent's file."""
    location = loader.locate_agent(agent_file or agent_id, folders=folders)
    package = Path(loader.__file__).resolve().parents[1]
    if location.file.resolve().parent in (package / "_agents", package.parent / "agents"):
        return agent_id
    return str(attrs.evolve(location, file=Path(relative_to_tests_parent(location.file, test_file))))


def _list_referenced_ids(agents: Sequence[AgentDefinition]) -> list[str]:
    """Return the ids by which agents refer to others, except those whose definition another agent holds."""
    children = [child for agent in agents for child in agent.spawnable_agents]
    held = {normalised_id(child.id) for child in (*agents[:1], *children) if not isinstance(child, str)}
    named = [find_published_name(child) or child for child in children if isinstance(child, str)]
    return list({normalised_id(child): child for child in named if normalised_id(child) not in held}.values())


def relative_to_tests_parent(path: Path, test_file: Path) -> str:
    """Return the real path of *path*, relative to the folder above that of *test_file*."""
    return os.path.relpath(path.resolve(), test_file.resolve().parents[1])


def _run_test_and_find_failure(file: Path, name: str) -> str:
    """Load a written test, call it in this process, and return its failure message; ``""`` if it passes."""
    test = load_file_member(file.resolve(), f"test_pin_{name}")
    try:
        test()
    except Exception as error:  # noqa: BLE001 - whatever keeps it from passing is what is asked for
        return f"{type(error).__name__}: {error}"
    return ""


def replay_and_find_failure(engine: Engine, journal: Journal, check: Check, agent: AgentDefinition) -> str:
    """
    Replay a recorded run, and return why it fails its check, or ``""``. A divergence raises an error.

    Raises:
        DataError: when the check itself fails.
        JournalError: when the journal cannot be read, or does not fit the code.
    """
    return check.find_failure(engine.replay_sync(journal, agent=agent))
