"""
Journals that somebody changed and sealed again: whatever stands in them, it is refused with the number of the record, or serves.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stepengine import STEP, AgentDefinition, Ask, RunStatus
from stepengine.cli.commands.show import show
from stepengine.cli.exits import run_explaining_errors
from stepengine.errors import HandlerError, JournalCorrupt, JournalError, JournalVersion, ReplayDivergence
from stepengine.journal import FileJournal, MemoryJournal, check, diff, scrub, seal_journal
from stepengine.journal.forks import branch
from stepengine.journal.show import make_run_tree, render

from .mutants import mutant

CHUNK = 25
DEEP = 80
"""Chunks of mutants: the first is in the fast suite, each read in two ways; 2,000 are in the deep one, each read in every way."""


class Computed:
    """
    A system prompt that depends on the run.
    """

    def render(self, ctx: Any) -> str:
        return "You ask."


def asking(world: type) -> Any:
    """
    An agent with a computed prompt that waits for two answers and got one.
    """

    def handle_steps(ctx: Any) -> Any:
        yield STEP
        first = yield from Ask("First?")
        second = yield from Ask("Second?", options=["yes", "no"])
        return [first, second]

    agent = AgentDefinition("asking", model="t/m", system_prompt=Computed(), handle_steps=handle_steps)
    return type(world().rig())(agent, ["x"] * 9)


@pytest.fixture(autouse=True)
def no_collection_in_the_depth() -> Iterator[None]:
    """Collect between the tests: a mutant nested to the limit of recursion leaves no room for the finalizers of others."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def bases() -> Callable[[type], dict[str, tuple[list[bytes], Any]]]:
    """
    The lines of good journals, each with what makes an engine for it.
    """

    @cache
    def made(world: type) -> dict[str, tuple[list[bytes], Any]]:
        whole, asked = MemoryJournal(link=True), MemoryJournal(link=False)
        world().rig().record(whole)
        result = asking(world).record(asked, answers={"First?": "one"})
        assert result.status is RunStatus.SUSPENDED
        cut = MemoryJournal(whole.lines()[:-9])
        world().rig().replay(cut)
        rigs = {"whole": lambda: world().rig(), "cut": lambda: world().rig(), "asked": lambda: asking(world)}
        return {n: (j.lines(), rigs[n]) for n, j in (("whole", whole), ("cut", cut), ("asked", asked))}

    return made


def ways(data: bytes, good: list[bytes], rig: Any, path: Path) -> dict[str, Callable[[], Any]]:
    """
    Return what reads a journal.
    """
    path.unlink(missing_ok=True)
    path.write_bytes(data)

    def journal() -> MemoryJournal:
        return MemoryJournal(data)

    return {
        "replay": lambda: rig().replay(journal()),
        "resume": lambda: rig().resume(FileJournal(path, sync="write"), in_doubt="retry"),
        "tree": lambda: render(make_run_tree(journal())),
        "show": lambda: run_explaining_errors(lambda: show(str(path))),
        "step": lambda: run_explaining_errors(lambda: show(str(path), step="2", as_json=True)),
        "diff": lambda: str(diff(MemoryJournal(good), journal())),
        "scrub": lambda: scrub(journal()),
        "seal": lambda: seal_journal(journal()),
        "fork": lambda: branch(journal(), 0, edit="other", allow_repeat=True),
        "extend": lambda: rig().extend(journal(), allow_repeat=True),
    }


def judge(number: int, way: str, act: Callable[[], Any]) -> str:
    """
    Return what came of reading a mutant; fail for what is no documented error.
    """
    try:
        error = getattr(act(), "error", None)
    except Exception as raised:
        error = raised
    where = f"mutant {number}, {way}: {type(error).__name__}: {error}"
    if error is None or isinstance(error, HandlerError):
        return "served"
    assert isinstance(error, JournalError), where
    if type(error) is JournalCorrupt:
        # Without its first line it is not a journal any more.
        assert re.search(r"record \d+|is not a journal of stepengine", error.message), where
        return "corrupt"
    assert isinstance(error, JournalVersion | ReplayDivergence) or way == "fork", where
    return type(error).__name__


def fuzz(chunk: int, bases: Any, world: type, path: Path, *, every: bool) -> Counter[str]:
    came: Counter[str] = Counter()
    for number in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        random = Random(number)
        good, rig = random.choice(list(bases(world).values()))
        data = mutant(good, random)
        acts = ways(data, good, rig, path)
        report = check(path)
        came["sound" if report else "damaged"] += 1
        for way in acts if every else random.sample(list(acts), 2):
            came[judge(number, way, acts[way])] += 1
    return came


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR02", "reliability:R22")
def test_resealed_mutant_is_rejected_by_record_number_or_works(bases: Any, fresh_world: type, tmp_path: Path) -> None:
    came = fuzz(0, bases, fresh_world, tmp_path / "mutant.jsonl", every=False)

    assert came["corrupt"] > CHUNK / 4
    assert came["served"] > CHUNK / 10


@pytest.mark.deep
@pytest.mark.spec("reliability:JR02", "reliability:R22")
@pytest.mark.parametrize("chunk", range(DEEP))
def test_resealed_mutant_is_handled_by_every_reader(chunk: int, bases: Any, fresh_world: type, tmp_path: Path) -> None:
    fuzz(chunk, bases, fresh_world, tmp_path / "mutant.jsonl", every=True)
