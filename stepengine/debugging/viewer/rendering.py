"""``render_run``: converts one or two journals to a page, of a limited size if requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.debugging.viewer.handler_positions import HandlerPositions, replay_and_collect_positions
from stepengine.debugging.viewer.page import render_page
from stepengine.debugging.viewer.payload import FORMAT, NOT_RECORDED, PageTexts, RunPayload
from stepengine.debugging.viewer.side_by_side import DETAILED, pair_steps
from stepengine.engine.engine import Engine
from stepengine.engine.loader import load_agent
from stepengine.engine.stepper import Stepper
from stepengine.errors import JournalCorrupt, StepEngineError
from stepengine.journal import JournalLike, as_journal, diff
from stepengine.journal.show import load_stored_history
from stepengine.journal.store import Journal, MemoryJournal

KEPT = 4096
"""The characters that are kept of a long text if a page is too large."""


@frozen(kw_only=True)
class PageSource:
    """
    A journal and how its run is shown.

    Attributes:
        journal: Its journal.
        file: The name of the journal in commands.
        steppers: Functions that make steppers with the agent's code, in the order of the attempts. The first replay that reaches
            the end is shown, or else the longest.
        without: Why there are no steppers.
        damage: The damage of the journal, if only the records before it are shown.
    """

    journal: Journal
    file: str
    steppers: Sequence[Callable[[], Stepper]] = ()
    without: str = "No source lines and variables, because no agent was given: pass its file with --agent."
    damage: str = ""


@frozen(kw_only=True)
class RenderedPage:
    """
    An HTML page, and a list of the omitted data.

    Attributes:
        html: The page.
        is_cut: Whether long texts were cut to keep it small.
        missing: Why handler lines and variables are missing, for each run without all of them.
    """

    html: str
    is_cut: bool = False
    missing: tuple[str, ...] = ()


AgentGiven: TypeAlias = "Engine | AgentDefinition | str | Path"


def render_run(
    journal: JournalLike, *, other: JournalLike | None = None, agent: AgentGiven | None = None, locals: bool = True
) -> str:
    """
    Return a self-contained HTML page that shows a recorded run.

    Args:
        journal: The run.
        other: Another run, to show both side by side.
        agent: The agent whose code is replayed for the handler's position at each step: its file, id or definition, or an engine
            that has it. Without an agent, the page has no positions.
        locals: Whether the handler's variables are shown, too.

    Raises:
        DefinitionError: when there is no such agent.
        JournalError: when a journal cannot be read, or holds no run.
    """
    sources = [_make_page_source(as_journal(one), agent) for one in (journal, other) if one is not None]
    return render_sources(*sources, locals=locals).html


def _make_page_source(journal: Journal, agent: AgentGiven | None) -> PageSource:
    """Return a journal with the functions that make steppers for an agent; none without an agent."""
    steppers: list[Callable[[], Stepper]] = []
    if isinstance(agent, Engine):
        steppers.append(lambda: agent.stepper(journal))
    elif agent is not None:
        definition = agent if isinstance(agent, AgentDefinition) else load_agent(agent)
        steppers.append(lambda: Engine([definition]).stepper(journal, agent=definition))
    return PageSource(journal=journal, file=journal.name, steppers=steppers)


def render_sources(
    source: PageSource,
    other: PageSource | None = None,
    *,
    locals: bool = True,
    title: str = "",
    max_chars: int | None = None,
) -> RenderedPage:
    """
    Return the page of one run, or of two side by side.

    Args:
        source: The run.
        other: Another run to compare with it.
        locals: Whether the handler's variables are shown.
        title: The page's title; by default the agent and the journal.
        max_chars: The number of characters above which long texts are cut in their middle; the page may still be longer.

    Raises:
        JournalError: when a journal cannot be read, or holds no run.
    """
    made = _render_with_text_limit(source, other, locals=locals, title=title, max_text_chars=None)
    if max_chars is None or len(made.html) <= max_chars:
        return made
    return attrs.evolve(
        _render_with_text_limit(source, other, locals=locals, title=title, max_text_chars=KEPT), is_cut=True
    )


def _render_with_text_limit(
    source: PageSource, other: PageSource | None, *, locals: bool, title: str, max_text_chars: int | None
) -> RenderedPage:
    """Return the page of one or two runs; long texts are cut to *max_text_chars* characters."""
    made = make_payload(source, other, locals=locals, max_text_chars=max_text_chars)
    files = " → ".join([Path(each.file).name for each in (source, other) if each is not None])
    name = title or f"{made.agent} · {files}"
    return RenderedPage(html=render_page(made.told, made.texts.clean(name)), missing=made.missing)


@frozen(kw_only=True)
class PagePayload:
    """
    The data of a page.

    Attributes:
        told: The data of the page, as JSON.
        agent: The id of the root's agent.
        texts: Its texts, with their redactor.
        missing: As in ``RenderedPage``.
    """

    told: dict[str, object]
    agent: str
    texts: PageTexts
    missing: tuple[str, ...]


def make_payload(
    source: PageSource, other: PageSource | None = None, *, locals: bool = True, max_text_chars: int | None = None
) -> PagePayload:
    """
    Return the page data of one run, or of two side by side; *max_text_chars* cuts texts.

    Raises:
        JournalError: when a journal cannot be read, or holds no run.
    """
    texts = PageTexts(max_text_chars)
    files: list[dict[str, str]] = []
    view, walked, told = _load_run_and_replay_positions(source, texts, files, locals=locals)
    found = [(source, walked)]
    payload: dict[str, object] = {"format": FORMAT, **told}
    if other is not None:
        second, walked_too, told_too = _load_run_and_replay_positions(other, texts, files, locals=locals)
        found.append((other, walked_too))
        payload |= {
            "other": told_too,
            "pairs": pair_steps(view, second, diff(source.journal, other.journal, detailed=DETAILED), texts),
        }
    missing = [{"text": each.damage, "banner": True} for each, _ in found if each.damage]
    missing += [{"text": text} for text in NOT_RECORDED]
    # Missing positions are a remark for a run without an agent, and a banner for one whose code has changed.
    reasons = [
        (f"{Path(s.file).name}: {text}" if text and other is not None else text, w is not None)
        for s, w in found
        for text in [s.without if w is None else w.missing]
    ]
    missing += [{"text": text, "handler": True, "banner": is_news} for text, is_news in dict.fromkeys(reasons) if text]
    payload |= {"texts": texts.all, "images": texts.images, "sources": files, "missing": texts.clean(missing)}
    return PagePayload(
        told=payload, agent=str(view.agents[0]["id"]), texts=texts, missing=tuple([text for text, _ in reasons if text])
    )


def _load_run_and_replay_positions(
    source: PageSource, texts: PageTexts, files: list[dict[str, str]], *, locals: bool
) -> tuple[RunPayload, HandlerPositions | None, dict[str, object]]:
    """Return the data of a run, the handler positions of its best replay, and both as JSON."""
    view = RunPayload(texts, source.file)
    view.add_new_records(load_stored_history(source.journal))
    walked: HandlerPositions | None = None
    for make in source.steppers:
        now = _replay_positions_or_get_reason(make, view, files, locals=locals)
        walked = now if walked is None or len(now.locals) > len(walked.locals) or not now.missing else walked
        if not now.missing:
            break
    return view, walked, view.to_dict() | ({} if walked is None else walked.to_dict())


def _replay_positions_or_get_reason(
    make: Callable[[], Stepper], view: RunPayload, files: list[dict[str, str]], *, locals: bool
) -> HandlerPositions:
    """Replay a run, and return its handler positions; an error becomes the reason why they are missing."""
    try:
        return replay_and_collect_positions(make(), view, with_locals=locals, sources=files)
    except StepEngineError as error:
        return HandlerPositions(sources=files, missing=f"No source lines and variables: {error.message}")


def copy_undamaged_records(journal: Journal) -> tuple[MemoryJournal, int]:
    """
    Return (copy of the records before the first damaged one, their number with the head); raise ``JournalError`` without a run.

    Raises:
        JournalError: when the damage is before the start of the run.
    """
    lines = journal.content().splitlines(keepends=True)

    def copy_first_lines(number: int) -> MemoryJournal:
        return MemoryJournal(lines[:number])

    def are_first_lines_readable(number: int) -> bool:
        """Return whether a page can be made of the first *number* lines."""
        try:
            RunPayload(PageTexts(), "").add_new_records(load_stored_history(copy_first_lines(number)))
        except StepEngineError:
            return False
        return True

    if not are_first_lines_readable(2):
        msg = f"{journal.name} holds no run before its damaged part"
        raise JournalCorrupt(msg)
    low, high = 2, len(lines) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if are_first_lines_readable(middle) else (low, middle)
    return copy_first_lines(low), low
