"""
The background children, messages and waits of a simulated tree.

Each child runs to its end at the first wait for it, in a random order that is the same after a crash. So the seeds cover every
order of completion. Nothing sleeps: waits advance the simulated time.
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
from stepengine.data.waits import Awaited, ChildRef, Received
from stepengine.machine.plan import RunPlan
from stepengine.runtime.performer import Item

IMPATIENCE = 0.3
"""How often the timeout of a wait passes before its children have ended or its message arrives."""
MAX_BEFORE_END = 4
"""The number of effects that a cancelled child may perform before it ends."""


@attrs.define
class _SimulatedChild:
    """One background child: its plan, its start state, and its outcome after its end."""

    plan: RunPlan
    state: AgentState
    outcome: Single | None = None

    @property
    def result(self) -> ChildResult[Any] | None:
        """The result of the child; None until it has ended."""
        return self.outcome.value if isinstance(self.outcome, Value) else None


class SimulatedMailbox:
    """
    The messages to the runs of a simulated tree; they outlive its processes.

    Args:
        messages: By topic, in order.
    """

    def __init__(self, messages: Mapping[str, Sequence[object]]) -> None:
        self._messages = messages
        self._told: dict[tuple[str, str], dict[tuple[str, int], object]] = {}
        self._taken: dict[tuple[str, str], list[int]] = {}

    def store_message(self, item: Item, effect: SendToRun) -> None:
        """Store a message to a child once, even if the parent's process is restarted and sends it again."""
        said = self._told.setdefault((effect.child, effect.topic), {})
        said[item.path, effect.seq] = effect.value

    def list_inputs_before_effect(self, path: str, seq: int) -> tuple[UserMessage, ...]:
        """Return the messages without a topic for the run at *path*: all of them before its first effect, none later."""
        said = self._told.get((path, ""), {}) if seq == 0 else {}
        return tuple([UserMessage(str(value)) for value in said.values()])

    def find_and_claim_messages(self, item: Item, effect: AwaitMessage) -> Sequence[object] | None:
        """Return the messages of a topic that earlier waits of the run have not claimed; ``None`` if the topic has none."""
        key = item.path, effect.topic
        told = self._told.get(key)
        messages = self._messages.get(effect.topic) if told is None else [*told.values()]
        if messages is None:
            return None
        taken = self._taken.setdefault(key, [])
        if effect.seq not in taken:
            taken.append(effect.seq)
        return messages[taken.index(effect.seq) :]


class SimulatedChildren:
    """
    The background children and waits of one simulated process.

    Args:
        key: The seed of all random choices.
        run: Runs a child and records its end.
        mailbox: The messages to the runs. For a topic without messages, *draw* makes one.
        draw: Makes a random message.

    Attributes:
        order: The paths of the ended children, in the order in which they ended.
        cut: The cancelled children, each with the number of the first effect that it does not perform.
    """

    def __init__(
        self,
        key: str,
        run: Callable[[Item], Single],
        mailbox: SimulatedMailbox,
        draw: Callable[[AwaitMessage, Random], object],
    ) -> None:
        self._key = key
        self._run = run
        self._mailbox = mailbox
        self._draw = draw
        self._children: dict[str, _SimulatedChild] = {}
        self.order: list[str] = []
        self.cut: dict[str, int] = {}

    def _make_seeded_random(self, item: Item, purpose: str) -> Random:
        """Return a random source that depends on the world, the effect and *purpose* alone."""
        return Random(f"{self._key}:{item.path}:{item.effect.seq}:{purpose}")  # noqa: S311

    # --- children -----------------------------------------------------------------------------------------------------

    def register_child(self, plan: RunPlan, state: AgentState) -> ChildRef[Any]:
        """Register a child and return its reference; it runs at the first wait for it."""
        self._children.setdefault(plan.path, _SimulatedChild(plan, state))
        return ChildRef(plan.run_id, plan.agent.definition.id, plan.path)

    def get_child_plan_and_state(self, path: str) -> tuple[RunPlan, AgentState]:
        """Return the plan and the start state of the child at *path*."""
        child = self._children[path]
        return child.plan, child.state

    def list_running_children(self, parent_path: str) -> list[str]:
        """Return the paths of the children of the run *parent_path* that have not ended."""
        return [
            path
            for path, child in self._children.items()
            if path.rpartition(".")[0] == parent_path and child.result is None
        ]

    def find_child_stop(self) -> Stop | None:
        """Return the stop of a child, which also stops its tree; ``None`` if no child was stopped."""
        for child in self._children.values():
            if isinstance(child.outcome, Stop) and child.outcome.kind != "suspended":
                return attrs.evolve(child.outcome, child=None, questions=())
        return None

    def run_children(self, paths: Sequence[str]) -> dict[str, ChildResult[Any]] | None:
        """Run the children at *paths* that have not ended, and return their results; ``None`` if one was stopped."""
        for path in paths:
            self._run_child_unless_ended(path)
        found = {path: self._children[path].result for path in paths}
        return None if None in found.values() else found  # type: ignore[return-value]

    def _run_child_unless_ended(self, path: str) -> None:
        """Run the child at *path* and store its outcome, unless it has ended or was stopped without being cancelled."""
        child = self._children[path]
        if child.outcome is None or (isinstance(child.outcome, Stop) and path in self.cut):
            effect = RunInBackground(child.plan.agent.definition.id, plan=child.plan, state=child.state)
            child.outcome = self._run(Item(path, effect, child.plan))
            self.order.append(path)

    def run_recorded_children(self, parent_path: str, recorded: Collection[str]) -> None:
        """Run the children of the run *parent_path* that have records and did not run yet, as far as their records reach."""
        for path in [path for path in self.list_running_children(parent_path) if path in recorded]:
            self._run_child_unless_ended(path)

    def find_cancellation(self, path: str, seq: int) -> Stop | None:
        """Return the stop that ends the run at *path* before its effect *seq*, if it or a run above it was cancelled; ``None`` otherwise."""
        while path:
            if seq >= self.cut.get(path, seq + 1):
                return Stop("cancelled")
            path, _, last = path.rpartition(".")
            seq = int(last or 0)
        return None

    def perform_wait(self, item: Item, now: int) -> Single:
        """Run the children that a ``Wait`` needs, fewer if its timeout passes first, and return its outcome."""
        effect: AwaitRuns = item.effect  # type: ignore[assignment]
        random = self._make_seeded_random(item, "ends")
        paths = [*effect.children]
        random.shuffle(paths)
        is_impatient = effect.timeout is not None and random.random() < IMPATIENCE
        enough = random.randrange(max(1, effect.need)) if is_impatient else random.randint(effect.need, len(paths))
        for path in paths:
            if len(self._list_paths_by_end(paths)) < enough:
                self._run_child_unless_ended(path)
        stop = self.find_child_stop()
        if stop is not None:
            return stop
        done = self._list_paths_by_end(paths)
        if len(done) < effect.need and effect.timeout is None:
            return Stop("suspended", now)
        return self._make_awaited_value(effect.children, done, now)

    def perform_cancel(self, item: Item) -> Single:
        """Cancel the running children of a ``Cancel`` after a few more effects, and return the results of all its children."""
        effect: EndRuns = item.effect  # type: ignore[assignment]
        for path in effect.children:
            if self._children[path].result is None:
                self.cut[path] = self._make_seeded_random(item, path).randrange(MAX_BEFORE_END)
                self._run_child_unless_ended(path)
        return self.find_child_stop() or self._make_awaited_value(
            effect.children, self._list_paths_by_end(effect.children), 0
        )

    def _list_paths_by_end(self, paths: Sequence[str]) -> list[str]:
        """Return those of *paths* whose children have ended, in the order in which they ended."""
        found = [path for path in paths if self._children[path].result is not None]
        return sorted(found, key=self.order.index)

    def _make_awaited_value(self, paths: Sequence[str], done: Sequence[str], now: int) -> Single:
        """Return the value of a wait: the *done* children with their results, and the paths of the others."""
        left = [path for path in paths if path not in done]
        return Value(Awaited(tuple(done), tuple(left), {path: self._children[path].result for path in done}), now)

    # --- messages -----------------------------------------------------------------------------------------------------

    def send_to_child(self, item: Item) -> bool:
        """Send a message to a child; return whether it is still running."""
        effect: SendToRun = item.effect  # type: ignore[assignment]
        if self._children[effect.child].result is not None:
            return False
        self._mailbox.store_message(item, effect)
        return True

    def perform_receive(self, item: Item, now: int) -> Single:
        """Return the outcome of a ``Receive``: the next message, ``None`` at the timeout, or a suspension if none comes."""
        effect: AwaitMessage = item.effect  # type: ignore[assignment]
        random, messages = (
            self._make_seeded_random(item, "message"),
            self._mailbox.find_and_claim_messages(item, effect),
        )
        if messages is None and (effect.timeout is None or random.random() > IMPATIENCE):
            messages = [self._draw(effect, random)]
        if messages:
            return Value(Received(f"m:{item.path}:{effect.seq}", freeze(messages[0])), now)
        return Stop("suspended", now) if effect.timeout is None else Value(None, now)
