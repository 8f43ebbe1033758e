"""
The effects performed in a simulated world, and the checks that a run receives their outcomes.

The clock, the faults and the records outlive the processes of the world, as a database or another server would.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import attrs

from stepengine.data.effects import RUNS, CallFunction, CallModel, Leaf, RunInBackground
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Single, Stop, Value, has_lost_or_stopped
from stepengine.errors import ModelError, UnknownOutcome
from stepengine.journal.encoding import encode_outcome_members
from stepengine.journal.records import Address
from stepengine.runtime.performer import Item, is_repeatable
from stepengine.testing.faults import KINDS, Fault, RandomFaults
from stepengine.testing.invariants import describe_effect, describe_outcome, format_address, raise_violation
from stepengine.testing.walk import is_same_yield

__tracebackhide__ = True  # a failed test ends at its author's line

MAX_EFFECTS = 2_000


@attrs.define
class WorldClock:
    """
    The simulated time in milliseconds.

    Attributes:
        now: The time since the world began.
        started: When the present process started.
    """

    now: int = 0
    started: int = 0
    _asked: dict[Address, int] = attrs.field(factory=dict, init=False)

    @property
    def elapsed(self) -> int:
        """The time since the present process started."""
        return self.now - self.started

    def advance_past_effect(self, address: Address, duration: int) -> None:
        """Advance the clock by the duration of an effect; a repeated effect takes no extra time."""
        if address not in self._asked:
            self._asked[address] = self.now
            self.now += duration

    def advance_to_wait_end(self, address: Address, timeout_ms: int) -> None:
        """Advance to the end of a wait. Waits that started together end together."""
        self.now = max(self.now, self._asked[address] + timeout_ms)


class PlannedFaults:
    """
    The faults of the effects of a world.

    Args:
        faults: The faults that happen, or the source that draws those of an effect at its first call.

    Attributes:
        happened: The faults that occurred.
    """

    def __init__(self, faults: RandomFaults | Sequence[Fault]) -> None:
        self.happened: list[Fault] = []
        self._faults = faults
        self._kinds: dict[Address, list[str]] = {}
        self._crashes: set[tuple[Address, str]] = set()

    def find_or_draw_faults(self, item: Item) -> Sequence[str]:
        """Return the faults of an effect, drawn and stored at its first call; the same when it is repeated."""
        at = item.address
        if at not in self._kinds:
            if isinstance(self._faults, RandomFaults):
                kinds = self._faults.draw_faults(item.path, item.effect)
            else:
                listed = [fault.kind for fault in self._faults if (fault.path, fault.seq) == at]
                kinds = [kind for kind in listed if type(item.effect) in KINDS[kind]]
            self._kinds[at] = kinds
            self.happened += [Fault(item.effect.seq, kind, item.path) for kind in kinds]
        return self._kinds[at]

    def get_known_faults(self, address: Address) -> Sequence[str]:
        """Return the faults of an effect that was performed; nothing for others."""
        return self._kinds.get(address, ())

    def consume_planned_crash(self, address: Address, kind: str) -> bool:
        """Return True, at the first call only, if a crash of this *kind* is planned at the effect."""
        if kind not in self.get_known_faults(address) or (address, kind) in self._crashes:
            return False
        self._crashes.add((address, kind))
        return True


class EffectRecords:
    """
    The effects of a world with their outcomes, and checks of the values that a run receives.

    Args:
        clock: The clock of the world.

    Attributes:
        performed: Each effect that was answered, and its outcome, by path and number.
        lost: The effects that lost a race.
        is_replay: Whether the run is repeated over its records.
        has_unknown: Whether an effect with an unknown outcome may have happened.
    """

    def __init__(self, clock: WorldClock) -> None:
        self.performed: dict[Address, tuple[Leaf, Single]] = {}
        self.lost: set[Address] = set()
        self.is_replay = False
        self.has_unknown = False
        self._clock = clock
        self._given: dict[Address, Single] = {}
        self._open: set[Address] = set()
        self._doubtful: set[Address] = set()
        self._met: set[Address] = set()

    @property
    def repetition_prefix(self) -> str:
        """The words that begin a message about a repeated effect."""
        return "in a replay of its records," if self.is_replay else "after a crash"

    def start_effects(self, path: str, members: Sequence[Leaf]) -> None:
        """Record that effects of a run start."""
        self._open |= {(path, member.seq) for member in members}

    def store_outcome(self, item: Item, outcome: Single) -> Single:
        """Store the outcome in the world before the run records it, and return it."""
        self._given[item.address] = outcome
        return outcome

    def record_crash(self) -> None:
        """Record that the process crashed: the outcomes of running effects are in doubt."""
        self._doubtful |= self._open
        self._given.clear()

    def start_replay(self) -> None:
        """Check from now on that the run only repeats recorded effects."""
        self.is_replay = True
        self._met.clear()

    def expect_all_repeated(self) -> None:
        """Raise ``Violation`` if a replay did not request an effect that is recorded."""
        missing = self.performed.keys() - self._met
        if missing:
            raise_violation(
                "I3", f"in a replay of its records, the run does not request {format_address(min(missing))}"
            )

    def is_recorded(self, address: Address) -> bool:
        """Return whether the journal must have the outcome of an effect, which it has unless the effect was stopped."""
        return address in self.performed and not isinstance(self.performed[address][1], Stop)

    def expect_performable(self, item: Item) -> None:
        """Raise ``Violation`` if an effect is performed whose outcome is recorded, or that must not happen twice."""
        at = item.address
        if isinstance(item.effect, (*RUNS, RunInBackground)):
            return
        if self.is_replay or self.is_recorded(at):
            raise_violation(
                "I3", f"{self.repetition_prefix} {_describe_item(item)} happens although its outcome is recorded"
            )
        if at in self._doubtful and not is_repeatable(item):
            raise_violation(
                "R3", f"{self.repetition_prefix} {_describe_item(item)} happens although it may have happened before"
            )

    def check_and_record_outcome(self, item: Item, outcome: Single) -> bool:
        """Raise ``Violation`` for another outcome than the world's; record a new one and return True, return False for a repeated one."""
        at, effect = item.address, item.effect
        self._met.add(at)
        if self.is_recorded(at) or (self.is_replay and at in self.performed):
            self._expect_recorded_outcome(item, outcome)
            return False
        if self.is_replay:
            raise_violation(
                "I3",
                f"{self.repetition_prefix} the run requests {_describe_item(item)}, which it did not request before",
            )
        if len(self.performed) >= MAX_EFFECTS:
            raise_violation(
                "R1", f"the run does not end: {MAX_EFFECTS} effects, the last of them {describe_effect(effect)}"
            )
        self._check_and_count_new_outcome(item, outcome)
        self.performed[at] = (effect, outcome)
        if not isinstance(outcome, Stop):
            self._open.discard(at)
        return True

    def _expect_recorded_outcome(self, item: Item, outcome: Single) -> None:
        """Check that a repeated effect is the same as before and has the same outcome; all stops of one type are equal."""
        recorded, due = self.performed[item.address]
        if not _is_same_effect(recorded, item.effect):
            place, now = format_address(item.address), describe_effect(item.effect)
            raise_violation("I3", f"{self.repetition_prefix} {place} is {now}, but was {describe_effect(recorded)}")
        if not _is_equal_outcome(outcome, due):
            given = f"returns {describe_outcome(outcome)}, but returned {describe_outcome(due)} before"
            raise_violation("I3", f"{self.repetition_prefix} {_describe_item(item)} {given}")

    def _check_and_count_new_outcome(self, item: Item, outcome: Single) -> None:
        """Raise ``Violation`` unless a new outcome equals the world's; one unknown after a crash takes time and is marked."""
        at = item.address
        given, is_doubtful = self._given.get(at), at in self._doubtful
        if given is not None:
            was_lost = is_doubtful and isinstance(item.effect, CallModel)
            if not _is_equal_outcome(_with_last_request_usage(outcome, given) if was_lost else outcome, given):
                sent = f"returned {describe_outcome(given)}, but the run receives {describe_outcome(outcome)}"
                raise_violation("R1", f"{_describe_item(item)} {sent}")
        elif (at in self.lost and has_lost_or_stopped(outcome)) or (
            isinstance(outcome, Stop) and self._has_recorded_end(at[0])
        ):
            self._clock.now += 1  # that another one has won, or that the run was ended there, stands in the record
        elif is_doubtful and not is_repeatable(item) and isinstance(getattr(outcome, "error", None), UnknownOutcome):
            self._clock.now += 1
            self.has_unknown = True
        else:
            raise_violation(
                "R1", f"{_describe_item(item)} did not happen, but the run receives {describe_outcome(outcome)}"
            )

    def _has_recorded_end(self, path: str) -> bool:
        """Return whether the end of the run at *path*, as a child in the background or below one, is recorded."""
        while path and (path, -1) not in self.performed:
            path = path.rpartition(".")[0]
        return bool(path)


def _describe_item(item: Item) -> str:
    """Return address and description of an effect, for messages."""
    return f"{format_address(item.address)}, {describe_effect(item.effect)},"


def _is_same_effect(a: Leaf, b: Leaf) -> bool:
    """Return whether two effects are equal; function calls are compared by number and name."""
    if isinstance(a, CallFunction) and isinstance(b, CallFunction):
        return a.seq == b.seq and is_same_yield(a.call, b.call)
    return type(a) is type(b) and a == b


def _is_equal_outcome(a: Single, b: Single) -> bool:
    """Return whether two outcomes are equal; a stop is compared less strictly, since it is not recorded."""
    if isinstance(a, Stop) or isinstance(b, Stop):
        return type(a) is type(b)
    if isinstance(a, Value) and isinstance(b, Value) and a.value is b.value:
        return a.inputs == b.inputs
    return encode_outcome_members(a) == encode_outcome_members(b)


def _with_last_request_usage(outcome: Single, world_outcome: Single) -> Single:
    """Return the outcome of a repeated model call with only the usage of the last request, from *world_outcome*."""
    if isinstance(outcome, Value) and isinstance(world_outcome, Value) and isinstance(outcome.value, ModelReply):
        return attrs.evolve(
            outcome, value=attrs.evolve(outcome.value, usage=world_outcome.value.usage, cost=world_outcome.value.cost)
        )
    if isinstance(outcome, Failure) and isinstance(world_outcome, Failure) and isinstance(outcome.error, ModelError):
        error = copy.copy(outcome.error)
        error.usage = getattr(world_outcome.error, "usage", None)
        return attrs.evolve(outcome, error=error)
    return outcome
