"""
``pin``: a run that failed becomes a test that fails, and passes once the agent is repaired.

The test runs the recorded run again: what the repair does not touch is answered from the record, what it changes goes on from
there with replies and results that stand in the test. No key, no network, no tool.
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
from stepengine.data.definition import AgentDefinition
from stepengine.data.state import RunResult
from stepengine.data.visible import visible
from stepengine.engine import Engine
from stepengine.engine.loading import AgentPlace
from stepengine.errors import DataError, ModelError
from stepengine.evaluation.checks import Check, member_of
from stepengine.journal import Called, FileJournal, ForkReport, Journal, JournalLike, MemoryJournal, scan, scrub

__all__ = (
    "Made",
    "Pinned",
    "WrittenTest",
    "clean_copy",
    "names_bundled_tools",
    "pin",
    "pin_name",
    "pinned",
    "seen_from",
    "why_it_fails",
    "written_test",
)

__tracebackhide__ = True  # a failed test ends at its author's line
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
SHOWN = 300


@frozen
class Pinned:
    """A journal that is fit for a repository, and how many records of it are others than they were."""

    journal: MemoryJournal
    changed: int


@frozen
class WrittenTest:
    """
    What the written test is made of.

    Attributes:
        name: The run's name: ``tests/test_pin_<name>.py``.
        agents: The paths or ids of its agents, the root's first.
        check: What the run has to do, as it was typed.
        reason: Why it does not.
        has_bundled_tools: Whether an agent names tools that come with stepengine.
        journal: Where the journal is, relative to the project's folder.
    """

    name: str
    agents: Sequence[str]
    check: str
    reason: str
    has_bundled_tools: bool
    journal: str


def pin_name(text: str) -> str:
    """
    Return the name of a pin as it stands in file names and functions.

    Raises:
        DataError: when it cannot.
    """
    made = re.sub(r"[^a-z0-9]+", "_", text[:60].lower()).strip("_")
    made = f"run_{made}" if made[:1].isdigit() else made
    if NAME.fullmatch(made) is None:
        msg = f"{text[:60]!r} makes no name of a test; give one of letters and digits"
        raise DataError(msg)
    return made


def clean_copy(journal: Journal, target: Path) -> Pinned:
    """
    Copy *journal* to *target* without what looks like a secret.

    Raises:
        DataError: when something is still found in the copy, which is then gone again, or *target* exists.
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
        msg = f"what was cleaned still holds what looks like a secret: {found}; nothing was written"
        raise DataError(msg)
    before, after = journal.lines(), made.lines()
    changed = sum(a != b for a, b in zip(before, after, strict=False)) + abs(len(before) - len(after))
    return Pinned(made, changed)


def written_test(test: WrittenTest) -> str:
    """Return the text of the test."""
    tools = ", tools=TOOLS" if test.has_bundled_tools else ""
    imported = BUNDLED_IMPORT if test.has_bundled_tools else ""
    bundled = BUNDLED if test.has_bundled_tools else ""
    agents = ", ".join([_agent(agent) for agent in test.agents])
    return TEMPLATE.format(
        name=test.name,
        reason=visible(" ".join(test.reason.split())[:SHOWN], strict=True).replace("\\", "\\\\").replace('"""', "'''"),
        journal=json.dumps(test.journal),
        check=json.dumps(test.check, ensure_ascii=False),
        agents=agents,
        tools=tools,
        imported=imported,
        bundled=bundled,
    )


def _agent(agent: str) -> str:
    place = AgentPlace.of_text(agent)
    if place is None:
        return f"load_agent({json.dumps(agent, ensure_ascii=False)})"
    named = json.dumps(str(attrs.evolve(place, sandboxed=False)), ensure_ascii=False)
    return f"load_agent(ROOT / {named}, sandboxed=True)" if place.sandboxed else f"load_agent(ROOT / {named})"


TEMPLATE = '''\
"""
A run that failed, kept by `stepengine compare pin`: {reason}

It passes when the agent is repaired. What the repair changes goes on from there with REPLIES and RESULTS.
"""

from pathlib import Path

from stepengine import Engine, load_agent
from stepengine.evaluation.pinning import pinned
from stepengine.testing import ScriptedModel{imported}

ROOT = Path(__file__).resolve().parents[1]
REPLIES = []
"""What the model says to requests that are new since the repair: texts, tool_call(...), ModelReply(...), in order."""
RESULTS = {{}}
"""What tools give to calls that are new, by their names: a text, JSON, or a function of the input."""
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
    Run a recorded run again with the present code, and assert that it does what it has to; nothing is performed.

    Args:
        engine: An engine with the agent, and a scripted model for requests that are new.
        journal: The recorded run.
        check: An expression over ``output, text, status, tools, steps, cost, error, result``, ``MODULE:FN``, or a function of
            the result.
        agent: The agent; by default the engine's of the recorded id.
        results: What tools and functions give to calls that are not recorded, by name.
        root: The folder that ``MODULE:FN`` is looked for in; the working folder by default.

    Raises:
        AssertionError: when it does not, with the reason; or when the run needs a reply or a result that nobody wrote down.
        JournalError: when the journal cannot be read.
    """
    judge = check if callable(check) else None
    asked = Check(getattr(judge, "__name__", "the check"), judge) if judge else Check.of_text(str(check), root)

    def simulate(call: Called, _: Sequence[Called]) -> object:
        made = (results or {}).get(call.name)
        return made(call.input) if callable(made) else made

    made = engine.fork_sync(journal, tools="recorded", agent=agent, simulate=simulate if results else None)
    _assert_known(made)
    said = asked.of(made.result)
    assert said.passed, said.reason  # noqa: S101 - it is what a test asserts
    return made.result


def _assert_known(made: ForkReport) -> None:
    """Raise when the run went where neither the record nor the test says how it goes on."""
    if made.refused is not None:
        called = json.dumps(plain(made.refused.input), ensure_ascii=False)[:SHOWN]
        msg = f"the run now calls {made.refused.name} {called} at {made.refused.address}, which is not recorded; say in RESULTS what it gives"
        raise AssertionError(msg)
    error: BaseException | None = made.result.error
    if isinstance(error, ModelError) and error.kind == "script":
        msg = (
            f"from {made.broke_at} on the run asks what is not recorded, and needs a reply in REPLIES: {error.message}"
        )
        raise AssertionError(msg)


@frozen
class Made:
    """
    A pin that was made.

    Attributes:
        file: The test.
        journal: The journal that it runs again.
        reason: Why the test fails.
        changed: How many records of the journal were cleaned of what looks like a secret.
    """

    file: Path
    journal: Path
    reason: str
    changed: int


def pin(
    engine: Engine,
    journal: Journal,
    check: Check,
    agent: AgentDefinition,
    *,
    name: str,
    folder: Path,
    family: Sequence[AgentDefinition],
    places: Callable[[Path], Sequence[str]],
    clean: Callable[[str], str],
) -> Made | str:
    """
    Write a test of a run that failed beside *folder*, with its journal in there, and run it once: it has to fail for the same reason.

    Args:
        engine: An engine with the agent.
        journal: The run.
        check: What it was to do.
        agent: Its agent.
        name: The name of the pin.
        folder: Where journals are kept, below the folder of the tests.
        family: The agent, and those that it may start.
        places: Gives how the test in a file names its agents, the root's first.
        clean: Takes secrets out of a text.

    Returns:
        What was written, or why there is nothing to pin: the run does what it has to, with its secrets or without.

    Raises:
        DataError: when there is such a test, something that looks like a secret is left, or the test does not fail so; nothing is
            left behind then.
    """
    reason = why_it_fails(engine, journal, check, agent)
    if not reason:
        return "this run does what the check asks for, so there is nothing to pin"
    called = pin_name(name)
    kept, file = folder / f"{called}.jsonl", folder.parent / f"test_pin_{called}.py"
    if file.exists():
        msg = f"{file} exists already; give the pin another name"
        raise DataError(msg)
    copy = clean_copy(journal, kept)
    made = [kept]
    try:
        if not why_it_fails(engine, FileJournal(kept), check, agent):
            return "without its secrets the run does what the check asks for; nothing was written"
        test = WrittenTest(
            called, places(file), check.text, clean(reason), names_bundled_tools(family), seen_from(kept, file)
        )
        file.write_text(written_test(test), encoding="utf-8")
        made.append(file)
        said = _failure_of(file, called)
        if reason not in said:
            msg = f"the written test does not fail as it has to: {clean(said) or 'it passes'}"
            raise DataError(msg)
        made.clear()
    finally:
        for path in made:
            path.unlink()
    return Made(file, kept, clean(reason), copy.changed)


def seen_from(path: Path, file: Path) -> str:
    """Return where a file is, as the test in *file* sees it: from the folder above its own, whatever links lead there."""
    return os.path.relpath(path.resolve(), file.resolve().parents[1])


def _failure_of(file: Path, name: str) -> str:
    """Run the test; return why it fails, ``""`` when it passes."""
    test = member_of(file.resolve(), f"test_pin_{name}")
    try:
        test()
    except Exception as error:  # noqa: BLE001 - whatever keeps it from passing is what is asked for
        return f"{type(error).__name__}: {error}"
    return ""


def names_bundled_tools(agents: Iterable[AgentDefinition]) -> bool:
    """Return whether one of the agents names a tool that it does not bring along."""
    return any(isinstance(tool, str) for agent in agents for tool in agent.tools)


def why_it_fails(engine: Engine, journal: Journal, check: Check, agent: AgentDefinition) -> str:
    """
    Return why a recorded run does not do what it has to; ``""`` when it does.

    Raises:
        DataError: when the check itself fails.
        JournalError: when the journal cannot be read, or does not fit the code.
    """
    return check.of(engine.replay_sync(journal, agent=agent)).reason
