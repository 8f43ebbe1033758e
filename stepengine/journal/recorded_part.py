"""
``RecordedPart``: what a run must repeat: its records by address, and which of them were used.

A journal may be cut at an address ``p#n``: everything of ``p`` from n on is gone with the runs it spawned; on the way up, each ancestor
loses the result of the Spawn that leads to ``p`` and everything after it. What began together with that Spawn keeps what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cached_property

from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.effects import KINDS, ROWS, CallBody, Leaf
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Failure, Value, has_lost_or_stopped
from stepengine.data.state import ChildResult
from stepengine.errors import JournalError, ReplayDivergence
from stepengine.journal.divergence import (
    FieldDifference,
    compare_child_results,
    compare_outcomes,
    describe_effect,
    format_value,
    make_divergence_error,
)
from stepengine.journal.encoding import encode_stored, may_change_world_if_repeated, to_comparable_json
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import History, find_outside_stop
from stepengine.journal.recorded_calls import RecordedCalls
from stepengine.journal.recorded_tree import RecordedTree
from stepengine.journal.records import ROOT, Address, Intent, Result, format_address, get_starter_address
from stepengine.machine.plan import Finished
from stepengine.runtime.performer import child_path

LISTED_EFFECTS = 10
"""Enough to see which effects they are; further ones are only counted."""
TEXT_FORM = re.compile(r"(?:(?P<path>[0-9]{1,9}(?:\.[0-9]{1,9})*)?#)?(?P<seq>-1|[0-9]{1,9})")


def parse_result_address(history: History, at: int | str) -> Address:
    """
    Return the address of an effect that has a result, as ``parse_address`` does.

    Raises:
        JournalError: when *at* is not an address, there is no such effect, or the effect has no result.
    """
    address = parse_address(at)
    _require_result(history, address)
    return address


def parse_address(at: int | str) -> Address:
    """
    Return the address for a number of the root's effects, ``"#5"`` or ``"3.2#1"``.

    Raises:
        JournalError: when *at* is not such an address.
    """
    # `True` is an `int` to Python, and would mean effect 1.
    found = None if isinstance(at, bool) else TEXT_FORM.fullmatch(str(at))
    if found is None:
        msg = f"an address must be the number of an effect, or text such as '#5' or '3.2#1' (effect 1 of the child 3.2), not {at!r}"
        raise JournalError(msg)
    return found["path"] or "", int(found["seq"])


def _require_result(history: History, address: Address) -> None:
    """Raise unless the effect at an address has a recorded result; ``ROOT`` needs none."""
    where = format_address(*address)
    if address == ROOT:
        return
    # The commonest slip is a number that is too high, so the message says how far they go.
    if address not in history.intents:
        numbers = [seq for path, seq in history.intents if path == address[0] and seq >= 0]
        known = f"the run there has the effects 0 to {max(numbers)}" if numbers else "there is no run at that path"
        msg = f"{history.name} has no effect {where}: {known}"
        raise JournalError(msg)
    if address not in history.results:
        msg = f"effect {where} of {history.name} has no result yet; resume the run, or fork it at an earlier effect"
        raise JournalError(msg)


class JournalCut:
    """
    The addresses at which a journal was cut. Without cuts, every record stays.

    A parent's effects depend on a background child only after the parent has received the child's end.

    Args:
        tree: The runs of the journal.
    """

    def __init__(self, tree: RecordedTree) -> None:
        self._tree = tree
        self._ends: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    # Not a point in the file but a place in the tree: records of runs that go on beside each other stand in the order
    # in which their results came, so everything behind a line would cut siblings off that have nothing to do with the
    # edit, and what they did would be paid for again.
    def cut_at(self, address: Address) -> None:
        """Remove the effect at *address* and its consequences."""
        path, seq = address
        self._lower_run_end(path, seq)
        while path:
            # What began together with the `Spawn` on the way up stays, which is why the end is behind the last of the
            # group: siblings asked for nothing that the cut child gave. The child's own result goes with the cut, as
            # `keeps_result` says.
            if not self._tree.is_background(path):
                starter = get_starter_address(path)
                self._lower_run_end(starter[0], self._tree.find_group_end(starter) + 1)
            elif (report := self._tree.find_first_report_address(path)) is not None:
                self._lower_run_end(*report)
            else:
                break
            path = get_starter_address(path)[0]

    def _lower_run_end(self, path: str, seq: int) -> None:
        """Cut the run at *path* from effect *seq* on, unless it is cut earlier already."""
        self._ends[path] = min(seq, self._ends.get(path, seq))

    def keeps_intent(self, address: Address) -> bool:
        """Return whether the intent at *address* is kept."""
        # Asked for each effect of a replay, where nearly never anything was cut.
        if not self._ends or address == ROOT:
            return True
        path, seq = address
        while True:
            if seq >= self._ends.get(path, seq + 1):
                return False
            if not path:
                return True
            path, seq = get_starter_address(path)

    def keeps_result(self, address: Address) -> bool:
        """
        Return whether a cut keeps the result at *address*.

        The effect must be kept, and the run that it started, unless it is a background run. Any cut removes the root's result.
        """
        if not self._ends:
            return True
        path, seq = address
        if address == ROOT:
            return False
        if seq == -1:
            return path not in self._ends and self.keeps_intent(get_starter_address(path))
        if not self.keeps_intent(address):
            return False
        started = child_path(*address)
        return started not in self._ends or self._tree.is_background(started)


def require_no_repeats(history: History, cut: JournalCut, action: str, *, undone: bool = False) -> None:
    """
    Raise if *cut* removes an effect that changed the world and might be repeated; the error names *action* as the cause.

    Args:
        history: The recorded run.
        cut: The cut of the journal.
        action: The cause of the cut for the message, such as ``"forking at #3"``.
        undone: Whether the files written by removed effects are restored, so that writing them again is not a repetition.

    Raises:
        JournalError: when there are such effects; the error lists them.
    """
    # Refused before anything happens, with all of them listed: by the time a second mail has been sent it is too late
    # to ask (replay:D10).
    gone = {
        a: i for a, i in history.intents.items() if not cut.keeps_intent(a) and may_change_world_if_repeated(i.effect)
    }
    lost = [i for a, i in gone.items() if not (undone and a in history.results and history.results[a].writes)]
    if lost:
        listed = ", ".join(
            [f"{format_address(i.path, i.seq)} {describe_effect(history.form(i))}" for i in lost[:LISTED_EFFECTS]]
        )
        more = f" and {len(lost) - LISTED_EFFECTS} more" if len(lost) > LISTED_EFFECTS else ""
        msg = (
            f"{action} cuts off effects that changed the world and may happen again: {listed}{more}. "
            "Pass allow_repeat=True (--allow-repeat) to continue"
        )
        raise JournalError(msg)


LIVE_KINDS = (*[kind for kind, row in KINDS.items() if row.changes_world], "model_call")


def parse_live_kinds(names: Collection[str], *, has_pace: bool) -> frozenset[str]:
    """
    Return the types of effects that a replay performs; raise for unknown or contradictory names.

    Raises:
        JournalError: when a name is unknown, or model calls are combined with other types or with a pace.
    """
    # A text is a collection of its letters, and `live="perform"` is what everybody writes first.
    given = (names,) if isinstance(names, str) else names
    wrong = [name for name in given if name not in LIVE_KINDS]
    if wrong:
        msg = f"live={wrong[0]!r} is not a kind of effect that a replay can perform; those are: {list_names(LIVE_KINDS, wrong[0])}"
        raise JournalError(msg)
    if "model_call" in given and (len(given) > 1 or has_pace):
        msg = "live='model_call' cannot be combined: new replies lead to other calls, which have no recorded result or pace"
        raise JournalError(msg)
    return frozenset(given)


@frozen
class AllowedDifferences:
    """
    The allowed differences of a run from its record; by default none.

    Attributes:
        live: The types of effects that are performed again; the results must equal the recorded ones.
        may_leave: Whether the run may end before its record does.
        may_repeat: Whether effects that changed the world may be cut off, and so happen again.
        keeps: Whether an effect of the recorded kind but with other content is answered with the recorded outcome.
        keeps_replies: Whether a model call with a changed request is answered with the recorded reply.
        accepts: Returns whether a difference is accepted; ``None`` to accept none.
        doubts_yes: Whether recorded permissions are untrusted. Such a permission covers only the one call with a recorded result
            and starts no call.
        asks_about_calls: Whether a person is asked about each call that only the record requests; see ``UnknownCalls``.
    """

    live: frozenset[str] = frozenset()
    may_leave: bool = False
    may_repeat: bool = False
    keeps: bool = False
    keeps_replies: bool = False
    accepts: Callable[[ReplayDivergence], bool] | None = None
    doubts_yes: bool = False
    asks_about_calls: bool = False

    def performs_again(self, effect: Leaf) -> bool:
        """Return whether a recorded effect is performed anyway, to compare its result."""
        # The body of a tool that yields is repeated; its own effects are performed.
        return not isinstance(effect, CallBody) and ROWS[type(effect)].kind in self.live


# One value in place of ten parameters that are handed through five functions; frozen, as one of them is the default of
# all.
NO_LEEWAY = AllowedDifferences()


class RecordedPart:
    """
    The recorded part of a run.

    Args:
        history: The recorded run.
        prints: Computes the fingerprints of requested effects.

    Attributes:
        calls: The recorded tool calls.
        cut: The discarded part of the record.
        leeway: The allowed differences.
        has_new_effects: Whether unrecorded effects were performed.
        refused: The error that prevented a cut, or ``None``.
        answered: The number of effects answered from the record.
        handler_line: ``file:line`` of the root's handler, for errors; ``""`` without a handler.
    """

    def __init__(self, history: History, prints: Fingerprints, leeway: AllowedDifferences) -> None:
        self.history = history
        self.prints = prints
        self.leeway = leeway
        self.calls = RecordedCalls(history)
        self.cut = JournalCut(history.tree)
        self.has_new_effects = False
        self.refused: JournalError | None = None
        self.answered = 0
        self.handler_line = ""
        # Made when first asked: only a fork with `tools=` looks for an effect by what it is and not by where it stands.
        self._by_print: dict[str, dict[str, list[Address]]] | None = None
        # That a replay has come by every record is what makes it a test: an agent that silently stops doing something
        # gives no other sign (replay:D15).
        self._used: set[Address] = {ROOT}

    def find_intent(self, address: Address) -> Intent | None:
        """Return the recorded intent at an address, unless it was cut off."""
        known = self.history.intents.get(address)
        return known if known is None or not self.cut or self.cut.keeps_intent(address) else None

    def find_result(self, address: Address) -> Result | None:
        """Return the recorded result at an address, unless it was cut off."""
        # By address, never by position: children that run at once come by their records in an order of their own.
        known = self.history.results.get(address)
        return known if known is None or not self.cut or self.cut.keeps_result(address) else None

    def cut_off(self, address: Address) -> None:
        """
        Discard the record from *address* on; raise if an effect would be repeated that must not be.

        Raises:
            JournalError: when an effect that must not be repeated would be cut off; the error is also stored in ``refused``.
        """
        self.cut.cut_at(address)
        try:
            # Looked at after the cut and before anything follows from it: what would happen again is known only by what
            # the cut takes away.
            if not self.leeway.may_repeat:
                require_no_repeats(
                    self.history, self.cut, f"extending {self.history.name} from {format_address(*address)} on"
                )
        except JournalError as error:
            self.refused = error
            raise

    def discard_all(self) -> None:
        """Discard the whole record because the run starts differently; raises as ``cut_off`` does."""
        self.cut_off(("", 0))
        # What was looked up for another start, such as its system prompt, is no longer what this one would find.
        self.history.facts.system_prompts.clear()
        self.history.facts.context_windows.clear()

    @property
    def unreached_count(self) -> int:
        """The number of recorded effects that the run did not reach."""
        return len(self.history.intents) - len(self._used)

    def pop_equal_unused_address(self, requested: Intent, *, includes_model_calls: bool) -> Address | None:
        """
        Return the address of an equal recorded effect with a result that the run has not reached, each address once; or ``None``.

        Effects on the same path have priority, so that siblings do not use each other's.

        Args:
            requested: The effect.
            includes_model_calls: Whether recorded model calls may be returned, too; by default each model call is new.
        """
        # A child is not an answer but a run, with effects of its own below it. And a model that is asked the same twice
        # may say two things, so its recorded reply serves only where it is said to.
        if requested.starts_child_or_body or (requested.type == "model_call" and not includes_model_calls):
            return None
        if self._by_print is None:
            self._by_print = {}
            for address, intent in reversed(self.history.intents.items()):
                if not intent.starts_child_or_body and self._has_final_result(address, intent):
                    intent.fp = intent.fp or self.prints.for_effect(intent.effect)
                    self._by_print.setdefault(intent.fp, {}).setdefault(address[0], []).append(address)
        requested.fp = requested.fp or self.prints.for_effect(requested.effect)
        # Siblings run at once and often ask for the same. Each has its own records first, so that they do not take each
        # other's in an order that depends on who is faster.
        paths = self._by_print.get(requested.fp, {})
        own = [requested.path] if requested.path in paths else []
        # Each address is popped as it is looked at, so the whole search of a long run looks at each once (it was a scan
        # of all of them for each effect).
        for waiting in (paths[path] for path in [*own, *reversed(paths)]):
            while waiting:
                address = waiting.pop()
                if address not in self._used:
                    return address
        return None

    def _has_final_result(self, address: Address, intent: Intent) -> bool:
        """Return whether an effect has a result of its own and was not cancelled as the loser of a race."""
        known = self.history.results.get(address)
        return known is not None and (intent.gather is None or not has_lost_or_stopped(self.history.outcome(known)))

    def mark_used(self, address: Address) -> None:
        """Record that the run has reached this address."""
        self._used.add(address)

    def is_same_effect(self, recorded: Intent, requested: Intent) -> bool:
        """Return whether a requested effect equals the recorded one."""
        # Computed when first compared, and kept: a journal's intents carry their own, and only those that were edited
        # by hand have none.
        recorded.fp = recorded.fp or self.prints.for_effect(recorded.effect)
        requested.fp = requested.fp or self.prints.for_effect(requested.effect)
        return recorded.fp == requested.fp

    def was_difference_accepted(self, address: Address, fp: str) -> bool:
        """Return whether the record at an address was accepted for an effect with this fingerprint."""
        return (address, fp) in self.history.facts.accepted

    def is_same_child_end(self, recorded: Value, child: ChildResult) -> bool:
        """Return whether the end of a repeated child equals the recorded one."""
        return not compare_child_results(self.prints.redactor, recorded.value, child)

    def list_reached_permissions(self, path: str, tool_call_id: str) -> list[Address]:
        """Return the addresses of a call's recorded permission questions that the run has reached."""
        asked = [(path, intent.seq) for intent in self.calls.find_effects_of_call("ask", path, tool_call_id)]
        return [address for address in asked if address in self._used]

    def fingerprint_child_end(self, child: ChildResult) -> str:
        """Return the fingerprint of a child's end."""
        return self.prints.for_value(to_comparable_json(child))

    def fingerprint_result(self, result: ToolResult) -> str:
        """Return the fingerprint of the result of a tool that yields."""
        return self.prints.for_value(encode_stored(result))

    def is_same_outcome(self, recorded: Value | Failure, current: Value | Failure) -> bool:
        """Return whether a repeated effect had the recorded result."""
        return not compare_outcomes(self.prints.redactor, recorded, current)

    def find_end_difference(self, finished: Finished, *, is_record_only: bool) -> ReplayDivergence | None:
        """
        Return the error if a root run ends differently than recorded; ``None`` if not, if it was stopped, or if records are unused.

        Args:
            finished: The end of the run.
            is_record_only: Whether a recorded stop counts as an end, since nothing is performed after it.
        """
        # Whoever leaves records out has another end, too, and was allowed that. A stop from outside is none of the code's.
        if self.unreached_count or find_outside_stop(finished.status, finished.error) is not None:
            return None
        recorded, stop = self.find_root_end(), self.history.stop
        if recorded is not None:
            fields = compare_child_results(self.prints.redactor, recorded, finished.to_child_result())
        elif is_record_only and stop is not None and stop.input["kind"] != "suspended":
            was, now = f"stopped: {stop.input['kind']}", finished.status.value
            fields = [FieldDifference("/status", format_value(was), format_value(now))]
        else:
            return None
        if not fields:
            return None
        said = "every effect matches its record, but the run ends differently"
        location = getattr(finished.error, "where", "") or self.handler_line
        return make_divergence_error(
            self.history, ROOT, "end", problem=said, agent_id=finished.state.agent_id, location=location, fields=fields
        )

    def find_root_end(self) -> ChildResult | None:
        """Return the recorded end of the root run, unless it was cut off."""
        value = None if self.find_result(ROOT) is None else getattr(self.root_outcome, "value", None)
        return value if isinstance(value, ChildResult) else None

    @cached_property
    def root_outcome(self) -> Value | Failure | None:
        """The recorded outcome of the root run, also if it was cut off."""
        known = self.history.results.get(ROOT)
        return None if known is None else self.history.outcome(known)

    def find_unused_difference(self, agent_id: str, run_error: BaseException | None) -> ReplayDivergence | None:
        """Return the error for records that a run did not reach, or ``None``; *run_error* is the error of a failed run."""
        # Two counts tell it for nearly every replay; the first that is missing is searched only where something is. A
        # run that was cut, or may leave something, has a reason to.
        #
        # What is left over shows that the code does less than it did when the run was recorded, which no other check
        # would notice. It is returned and not raised, since the caller decides what it means
        # (`Replayer.handle_unused_records_error`): a replay raises it unless its mode may leave something, and a fork with
        # `tools=` notes it as the place where the runs part.
        if len(self._used) == len(self.history.intents) or self.cut or self.leeway.may_leave:
            return None
        address, left = next((a, i) for a, i in self.history.intents.items() if a not in self._used)
        said = f"the run ended, but {describe_effect(left.effect)} was recorded here"
        left_calls_model = left.type == "model_call"
        # The generator is gone: where it was written is all that is left of it, unless it raised.
        where = self.handler_line if not address[0] else ""
        if run_error is not None:
            said += f"\n  it failed: {run_error}"
            where = getattr(run_error, "location", "") or where
        return make_divergence_error(
            self.history,
            address,
            "unused",
            problem=said,
            agent_id=agent_id,
            location=where,
            now_calls_model=left_calls_model,
        )
