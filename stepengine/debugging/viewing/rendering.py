"""``render_run``: from journals to a page, within a size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.debugging.viewing.comparing import DETAILED, pairs_of
from stepengine.debugging.viewing.page import page_of
from stepengine.debugging.viewing.payload import FORMAT, NOT_RECORDED, RunPayload, Texts
from stepengine.debugging.viewing.walking import Walked, walk
from stepengine.engine.engine import Engine
from stepengine.engine.loading import load_agent
from stepengine.engine.stepping import Stepper
from stepengine.errors import JournalCorrupt, JournalError, StepEngineError
from stepengine.journal import JournalLike, as_journal, diff
from stepengine.journal.history import History
from stepengine.journal.store import Journal, MemoryJournal

__all__ = ("PageSource", "Payload", "Rendered", "payload_of", "render_run", "rendered", "whole_part")

KEPT = 4096
"""Characters that a long text keeps where a page would grow too large."""


@frozen(kw_only=True)
class PageSource:
    """
    A run that a page shows.

    Attributes:
        journal: Its journal.
        file: How the journal is named in commands.
        steppers: Make what goes through it with the agent's code, in the order in which they are tried: the first that comes to
            the end, else the one that comes furthest.
        without: Why there is none.
        damage: What is wrong with the journal, when only the records before that are shown.
    """

    journal: Journal
    file: str
    steppers: Sequence[Callable[[], Stepper]] = ()
    without: str = "No agent was given, so that there are no source lines and variables: name its file with --agent."
    damage: str = ""


@frozen(kw_only=True)
class Rendered:
    """
    A page.

    Attributes:
        html: The page.
        is_cut: Whether long texts were cut to keep it small.
        missing: Why handler lines and variables are missing, of each run of which they are.
    """

    html: str
    is_cut: bool = False
    missing: tuple[str, ...] = ()


AgentGiven: TypeAlias = "Engine | AgentDefinition | str | Path"


def render_run(
    journal: JournalLike, *, other: JournalLike | None = None, agent: AgentGiven | None = None, locals: bool = True
) -> str:
    """
    Return a recorded run as one HTML page, which loads nothing and needs nothing but a browser.

    Args:
        journal: The run.
        other: Another run, to show both side by side.
        agent: Whose code is run again to tell where its handler stood at each step: the file, the id or the definition of the
            agent, or an engine that has it. ``None`` leaves that out.
        locals: Whether the handler's variables are shown, too.

    Raises:
        DefinitionError: when there is no such agent.
        JournalError: when a journal cannot be read, or holds no run.
    """
    sources = [_source(as_journal(one), agent) for one in (journal, other) if one is not None]
    return rendered(*sources, locals=locals).html


def _source(journal: Journal, agent: AgentGiven | None) -> PageSource:
    if agent is None:
        return PageSource(journal=journal, file=journal.name)
    if isinstance(agent, Engine):
        return PageSource(journal=journal, file=journal.name, steppers=[lambda: agent.stepper(journal)])
    definition = agent if isinstance(agent, AgentDefinition) else load_agent(agent)
    steppers = [lambda: Engine([definition]).stepper(journal, agent=definition)]
    return PageSource(journal=journal, file=journal.name, steppers=steppers)


def rendered(
    source: PageSource,
    other: PageSource | None = None,
    *,
    locals: bool = True,
    title: str = "",
    most: int | None = None,
) -> Rendered:
    """
    Return the page of one run, or of two side by side.

    Args:
        source: The run.
        other: Another run to compare with it.
        locals: Whether the handler's variables are shown.
        title: The page's title; by default the agent and the journal.
        most: How many bytes the page should have at most: where it would be larger, long texts keep their ends alone.

    Raises:
        JournalError: when a journal cannot be read, or holds no run.
    """
    made = _page(source, other, locals=locals, title=title, longest=None)
    if most is None or len(made.html) <= most:
        return made
    return attrs.evolve(_page(source, other, locals=locals, title=title, longest=KEPT), is_cut=True)


def _page(source: PageSource, other: PageSource | None, *, locals: bool, title: str, longest: int | None) -> Rendered:
    made = payload_of(source, other, locals=locals, longest=longest)
    name = title or f"{made.agent} · {_names(source, other)}"
    return Rendered(html=page_of(made.told, str(made.texts.clean(name))), missing=made.missing)


@frozen(kw_only=True)
class Payload:
    """
    What a page shows, as JSON.

    Attributes:
        told: It.
        agent: The id of the root's agent.
        texts: What its texts were made safe with.
        missing: As of ``Rendered``.
    """

    told: dict[str, object]
    agent: str
    texts: Texts
    missing: tuple[str, ...]


def payload_of(
    source: PageSource, other: PageSource | None = None, *, locals: bool = True, longest: int | None = None
) -> Payload:
    """
    Return what the page of one run, or of two side by side, is made of; *longest* cuts texts.

    Raises:
        JournalError: when a journal cannot be read, or holds no run.
    """
    texts = Texts(longest)
    files: list[dict[str, str]] = []
    view, walked, told = _one(source, texts, files, locals=locals)
    found = [(source, walked)]
    payload: dict[str, object] = {"format": FORMAT, **told}
    if other is not None:
        second, walked_too, told_too = _one(other, texts, files, locals=locals)
        found.append((other, walked_too))
        payload |= {
            "other": told_too,
            "pairs": pairs_of(view, second, diff(source.journal, other.journal, detailed=DETAILED), texts),
        }
    missing = [{"text": each.damage, "banner": True} for each, _ in found if each.damage]
    missing += [{"text": text} for text in NOT_RECORDED]
    # Why there is nothing of a walk: of a run without an agent that is a remark, of one whose code changed it is news.
    reasons = [
        (f"{Path(s.file).name}: {text}" if text and other is not None else text, w is not None)
        for s, w in found
        for text in [s.without if w is None else w.missing]
    ]
    missing += [{"text": text, "handler": True, "banner": is_news} for text, is_news in dict.fromkeys(reasons) if text]
    payload |= {"texts": texts.all, "images": texts.images, "sources": files, "missing": texts.clean(missing)}
    return Payload(
        told=payload, agent=str(view.agents[0]["id"]), texts=texts, missing=tuple([text for text, _ in reasons if text])
    )


def _names(source: PageSource, other: PageSource | None) -> str:
    names = [Path(each.file).name for each in (source, other) if each is not None]
    return " → ".join(names)


def _one(
    source: PageSource, texts: Texts, files: list[dict[str, str]], *, locals: bool
) -> tuple[RunPayload, Walked | None, dict[str, object]]:
    view = RunPayload(texts, source.file)
    view.take(stored(source.journal))
    walked: Walked | None = None
    for make in source.steppers:
        now = _walk(make, view, files, locals=locals)
        walked = now if walked is None or len(now.locals) > len(walked.locals) or not now.missing else walked
        if not now.missing:
            break
    return view, walked, view.told() | ({} if walked is None else walked.told())


def _walk(make: Callable[[], Stepper], view: RunPayload, files: list[dict[str, str]], *, locals: bool) -> Walked:
    try:
        return walk(make(), view, with_locals=locals, sources=files)
    except StepEngineError as error:
        return Walked(sources=files, missing=f"No source lines and variables: {error.message}")


def stored(journal: Journal) -> History:
    """
    Return what a journal says, as it is stored; requests in memory would have to be compared to know what they share.

    Raises:
        JournalError: when it cannot be read, or holds no run.
    """
    history = journal.history()
    if any(intent.live is not None for intent in history.intents.values()):
        history = MemoryJournal(journal.lines()).history()
    _ = history.root
    return history


def whole_part(journal: Journal) -> tuple[MemoryJournal, int]:
    """
    Return the records before the first damaged one, and how many these are.

    Raises:
        JournalError: when there is not even a run.
    """
    lines = journal.content().splitlines(keepends=True)

    def of(number: int) -> MemoryJournal:
        return MemoryJournal(lines[:number])

    def is_whole(number: int) -> bool:
        try:
            RunPayload(Texts(), "").take(stored(of(number)))
        except (JournalError, StepEngineError):
            return False
        return True

    if not is_whole(2):
        msg = f"{journal.name} holds no run before its damage"
        raise JournalCorrupt(msg)
    low, high = 2, len(lines) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_whole(middle) else (low, middle)
    return of(low), low
