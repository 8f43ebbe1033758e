"""
``RecordedFacts``: the facts about runs and effects in the input records of a journal.

No effect asked for these values: a system prompt that was looked up, a difference that somebody accepted, the usage of a stopped call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from stepengine.data.outcomes import PartialUsage
from stepengine.data.usage import Usage, add_cost
from stepengine.journal.records import Address, Input, Intent, Result, parse_stopped_usage


class RecordedFacts:
    """
    The facts in the input records of one journal.

    Args:
        open_intents: The intents that have no result yet, by address; the caller updates them.
        results: The results by address; the caller updates them, too.

    Attributes:
        system_prompts: System prompts that were computed, by path.
        context_windows: Context lengths of models in tokens, by path.
        accepted: Addresses of effects, each with the fingerprint of another effect that its record may answer.
        partial_usage: The usage of stopped model calls, by address.
        pending_results: The addresses of deferred calls whose bodies have returned.
        computed: The results of ``Compute`` in bodies of tools, in order, by call.
    """

    def __init__(self, open_intents: Mapping[Address, Intent], results: Mapping[Address, Result]) -> None:
        self.system_prompts: dict[str, str] = {}
        self.context_windows: dict[str, int] = {}
        self.accepted: set[tuple[Address, str]] = set()
        self.partial_usage: dict[Address, PartialUsage] = {}
        self.pending_results: set[Address] = set()
        self.computed: dict[Address, Sequence[Any]] = {}
        self._stopped: set[Address] = set()
        self._open = open_intents
        self._results = results

    def add(self, record: Input) -> None:
        """Store the fact in an input record, such as a system prompt or a computed value; ignore input of other types."""
        said, address = record.input, record.address
        match said.get("type"):
            case "system_prompt":
                self.system_prompts[record.path] = said["text"]
            case "context_window":
                self.context_windows[record.path] = said["tokens"]
            case "accepted_difference":
                self.accepted.add((address, said["fp"]))
            case "partial_usage":
                self._add_usage(address, parse_stopped_usage(said))
            case "stop":
                self._stopped |= self._open.keys()
            case "result_pending":
                self.pending_results.add(address)
            case "computed":
                self.computed[address] = said["values"]
            case _:
                pass

    def _add_usage(self, address: Address, lost_usage: PartialUsage) -> None:
        """Add the usage of a stopped model call; each process that made the call may add one."""
        known = self.partial_usage.get(address)
        if known is not None:
            lost_usage = PartialUsage(known.usage + lost_usage.usage, add_cost(known.cost, lost_usage.cost))
        self.partial_usage[address] = lost_usage

    def list_lookup_types(self, path: str) -> list[str]:
        """Return the types of the recorded lookups of the run at *path*."""
        found = ["system_prompt"] if path in self.system_prompts else []
        return [*found, "context_window"] if path in self.context_windows else found

    def find_lost_usage(self, address: Address) -> PartialUsage | None:
        """Return the known usage of a model call without a result; ``None`` if no request was sent."""
        intent = self._open.get(address)
        # In a run that has ended, a call without a word of its usage was stopped before it was sent.
        is_over = address in self._stopped or (address[0], -1) in self._results
        if address in self.partial_usage or intent is None or intent.type != "model_call" or is_over:
            return self.partial_usage.get(address)
        # The process ended between the start and the reply of the call, without a word.
        return PartialUsage(Usage(requests=1, at_least=True), Decimal(0))
