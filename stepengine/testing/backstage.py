"""
What waits in a simulated tree: for a time, for messages, for children in the background.

Children run one after another, each as a whole and as soon as somebody waits for it, in an order that is drawn: so every order of
completion comes up, and each is the same again after a crash. Nothing sleeps; time passes by what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

import attrs

from stepengine.data.effects import AwaitMessage, AwaitRuns, EndRuns, RunInBackground, SendToRun
from stepengine.data.json import freeze
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.waiting import Awaited, ChildRef, Received
from stepengine.machine.plan import RunPlan
from stepengine.runtime.performer import Item

__all__ = ("Backstage", "Letters")

IMPATIENCE = 0.3
"""How often the patience of who waits ends before what is waited for has come."""
MAX_BEFORE_END = 4
"""How many effects a child may have before it is ended."""


@attrs.define
class _BackstageChild:
    """One child in the background: what it is started with, and how it ended once it has."""

    plan: RunPlan
    state: AgentState
    outcome: Single | None = None

    @property
    def result(self) -> ChildResult[Any] | None:
        return self.outcome.value if isinstance(self.outcome, Value) else None


class Letters:
    """
    What the runs of a simulated tree are sent, which outlives its processes.

    Args:
        messages: By topic, in order.
    """

    def __init__(self, messages: Mapping[str, Sequence[object]]) -> None:
        self._messages = messages
        self._told: dict[tuple[str, str], dict[tuple[str, int], object]] = {}
        self._taken: dict[tuple[str, str], list[int]] = {}

    def tell(self, item: Item, effect: SendToRun) -> None:
        """Keep what a child is told, once, however often its parent's process dies over it."""
        said = self._told.setdefault((effect.child, effect.topic), {})
        said[item.path, effect.seq] = effect.value

    def inbox(self, path: str, seq: int) -> tuple[UserMessage, ...]:
        """Return what the run at *path* was told before its effect *seq*: all of it before its first."""
        said = self._told.get((path, ""), {}) if seq == 0 else {}
        return tuple([UserMessage(str(value)) for value in said.values()])

    def of(self, item: Item, effect: AwaitMessage) -> Sequence[object] | None:
        """Return what is left on a topic for a run that waits; ``None`` where nobody said what is sent."""
        key = item.path, effect.topic
        told = self._told.get(key)
        letters = self._messages.get(effect.topic) if told is None else [*told.values()]
        if letters is None:
            return None
        taken = self._taken.setdefault(key, [])
        if effect.seq not in taken:
            taken.append(effect.seq)
        return letters[taken.index(effect.seq) :]


class Backstage:
    """
    What waits in one simulated process.

    Args:
        key: What chance depends on.
        run: Runs a child, and records how it ended.
        letters: What runs are sent; on a topic of which nothing is known they get what *draw* makes.
        draw: Makes a message.

    Attributes:
        order: The children that have ended, in the order in which they did.
        cut: The children that are ended, and from which of their effects on they come no further.
    """

    def __init__(
        self,
        key: str,
        run: Callable[[Item], Single],
        letters: Letters,
        draw: Callable[[AwaitMessage, Random], object],
    ) -> None:
        self._key = key
        self._run = run
        self._letters = letters
        self._draw = draw
        self._children: dict[str, _BackstageChild] = {}
        self.order: list[str] = []
        self.cut: dict[str, int] = {}

    def _random(self, item: Item, what: str) -> Random:
        return Random(f"{self._key}:{item.path}:{item.effect.seq}:{what}")  # noqa: S311

    # --- children -----------------------------------------------------------------------------------------------------

    def start(self, plan: RunPlan, state: AgentState) -> ChildRef[Any]:
        """Start a child, which runs once somebody waits for it."""
        self._children.setdefault(plan.path, _BackstageChild(plan, state))
        return ChildRef(plan.run_id, plan.definition.id, plan.path)

    def planned(self, path: str) -> tuple[RunPlan, AgentState]:
        """Return what the child at *path* is started with."""
        child = self._children[path]
        return child.plan, child.state

    def at_work(self, of: str) -> list[str]:
        """Return the children of the run at *of* that have not ended."""
        return [path for path, child in self._children.items() if _parent(path) == of and child.result is None]

    def stopped(self) -> Stop | None:
        """Return what stopped a child, and with it its tree, if anything did."""
        for child in self._children.values():
            if isinstance(child.outcome, Stop) and child.outcome.kind != "suspended":
                return attrs.evolve(child.outcome, child=None, questions=())
        return None

    def results(self, paths: Sequence[str]) -> dict[str, ChildResult[Any]] | None:
        """Return how children ended, each of which is run if it was not; ``None`` when one was stopped."""
        for path in paths:
            self._end(path)
        found = {path: self._children[path].result for path in paths}
        return None if None in found.values() else found  # type: ignore[return-value]

    def _end(self, path: str) -> None:
        child = self._children[path]
        if child.outcome is None or (isinstance(child.outcome, Stop) and path in self.cut):
            effect = RunInBackground(child.plan.definition.id, plan=child.plan, state=child.state)
            child.outcome = self._run(Item(path, effect, child.plan))
            self.order.append(path)

    def finish(self, of: str, recorded: Collection[str]) -> None:
        """Run the children of the run at *of* that have records and did not run, as far as these go."""
        for path in [path for path in self.at_work(of) if path in recorded]:
            self._end(path)

    def cuts(self, path: str, seq: int) -> Stop | None:
        """Return why the run at *path* comes no further than its effect *seq*, if it was ended before; so do those below it."""
        while path:
            if seq >= self.cut.get(path, seq + 1):
                return Stop("cancelled")
            path, _, last = path.rpartition(".")
            seq = int(last or 0)
        return None

    def waited(self, item: Item, now: int) -> Single:
        """Return what a ``Wait`` finds, once as many have ended as it needs, some more, or some less where its patience ends."""
        effect: AwaitRuns = item.effect  # type: ignore[assignment]
        random = self._random(item, "ends")
        paths = [*effect.children]
        random.shuffle(paths)
        is_impatient = effect.timeout is not None and random.random() < IMPATIENCE
        enough = random.randrange(max(1, effect.need)) if is_impatient else random.randint(effect.need, len(paths))
        for path in paths:
            if len(self._finished_among(paths)) < enough:
                self._end(path)
        stop = self.stopped()
        if stop is not None:
            return stop
        done = self._finished_among(paths)
        if len(done) < effect.need and effect.timeout is None:
            return Stop("suspended", now)
        return self._await_outcome(effect.children, done, now)

    def ended(self, item: Item, now: int) -> Single:
        """Return how children end that are ended: some had come to their end before, some come a little further."""
        effect: EndRuns = item.effect  # type: ignore[assignment]
        for path in effect.children:
            if self._children[path].result is None:
                self.cut[path] = self._random(item, path).randrange(MAX_BEFORE_END)
                self._end(path)
        return self.stopped() or self._await_outcome(effect.children, self._finished_among(effect.children), now)

    def _finished_among(self, paths: Sequence[str]) -> list[str]:
        found = [path for path in paths if self._children[path].result is not None]
        return sorted(found, key=self.order.index)

    def _await_outcome(self, paths: Sequence[str], done: Sequence[str], now: int) -> Single:
        left = [path for path in paths if path not in done]
        return Value(Awaited(tuple(done), tuple(left), {path: self._children[path].result for path in done}), now)

    # --- messages -----------------------------------------------------------------------------------------------------

    def told(self, item: Item) -> bool:
        """Say something to a child; return whether it is still at work."""
        effect: SendToRun = item.effect  # type: ignore[assignment]
        if self._children[effect.child].result is not None:
            return False
        self._letters.tell(item, effect)
        return True

    def received(self, item: Item, now: int) -> Single:
        """Return the next message, ``None`` at the timeout, or that the run waits for ever."""
        effect: AwaitMessage = item.effect  # type: ignore[assignment]
        random, letters = self._random(item, "message"), self._letters.of(item, effect)
        if letters is None and (effect.timeout is None or random.random() > IMPATIENCE):
            letters = [self._draw(effect, random)]
        if letters:
            return Value(Received(f"m:{item.path}:{effect.seq}", freeze(letters[0])), now)
        return Stop("suspended", now) if effect.timeout is None else Value(None, now)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
