"""
The cassette of a process that belongs to a recorded or replayed program: it asks the broker for each reply.

``patch_process`` patches the HTTP libraries for the rest of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import attrs

from stepengine.testing.cassette import OpenExchange, Slot, UnrecordedReply
from stepengine.testing.cassette_files import Interaction, RecordedRequest
from stepengine.testing.cassette_misses import CassetteMiss
from stepengine.testing.exchanges import Exchanges
from stepengine.testing.patching import patch_clients
from stepengine.testing.processes.channel import BrokerGone, ask_broker, get_current_mode
from stepengine.testing.processes.forms import interaction_from_json, interaction_to_json, request_to_json

_patches = contextlib.ExitStack()


def patch_process(before_request: Callable[[], object]) -> Any:
    """
    Patch the HTTP libraries that this process has imported, and return the finder that patches later imports.

    Args:
        before_request: Called before each request; it may return the line of the program that sends it.
    """
    remote = RemoteCassette(before_request)
    replays = get_current_mode() == "replay"
    _patches.enter_context(
        patch_clients(Exchanges(remote if replays else None, None if replays else remote, record_errors=True))
    )
    atexit.register(remote.finish_open_exchanges)
    return sys.meta_path[0]


@attrs.define(eq=False)
class _RemoteSlot(Slot):
    """A place in the cassette of the broker; a forked process that inherits it does not fill it."""

    number: int = -1
    process: int = attrs.field(factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """Whether a parent process reserved it."""
        return self.process != os.getpid()


class RemoteCassette:
    """
    The cassette of the broker, for a program's process.

    Args:
        before_request: Called before each request; it may return the line of the program that sends it.

    Attributes:
        open_exchanges: Requests of this process that are being recorded.
    """

    def __init__(self, before_request: Callable[[], object]) -> None:
        self._before_request = before_request
        self.open_exchanges: set[OpenExchange] = set()

    def consume(self, request: RecordedRequest) -> Interaction:
        """
        Return the recorded interaction of *request*; raise ``CassetteMiss`` if there is none.

        Raises:
            CassetteMiss: if there is none.
        """
        try:
            answer = ask_broker("take", request=request_to_json(request), line=self._before_request())
        except BrokerGone as error:
            answer = {"miss": str(error), "reason": "no_file"}
        if "miss" in answer:
            raise CassetteMiss(answer["miss"], reason=answer["reason"], request=request, candidates=())
        return interaction_from_json(answer["interaction"])

    def remove_miss(self, miss: CassetteMiss) -> None:
        """Do nothing: in a replay every miss is reported."""

    def has_replies_of_transport(self, name: str) -> bool:
        """Return True if the broker's cassette has replies of the program's own transport *name*."""
        try:
            return bool(ask_broker("has_transport", name=name)["known"])
        except BrokerGone:
            return False

    def reserve(self, secrets: dict[str, str] | None = None) -> Slot:
        """Reserve the next position in the broker's cassette, after a call of ``before_request``."""
        self._before_request()
        try:
            number = ask_broker("reserve", secrets=secrets or {})["slot"]
        except BrokerGone:
            number = -1
        return _RemoteSlot(secrets=secrets or {}, number=number)

    def finish(self, slot: Slot, interaction: Interaction) -> None:
        """Send a recorded interaction to the broker; one of another process or without its end is dropped."""
        if not isinstance(slot, _RemoteSlot) or slot.is_inherited or not interaction.is_playable:
            return
        with contextlib.suppress(BrokerGone):
            ask_broker("finish", slot=slot.number, interaction=interaction_to_json(interaction))

    def store_unrecorded_reply(self, reply: UnrecordedReply, slot: Slot | None = None) -> None:
        """Report a reply that is not recorded, unless its request is of another process."""
        if isinstance(slot, _RemoteSlot) and slot.is_inherited:
            return
        with contextlib.suppress(BrokerGone):
            ask_broker("leave_out", left=attrs.asdict(reply), slot=getattr(slot, "number", None))

    def finish_open_exchanges(self) -> None:
        """Finish every exchange that the program has not closed, with the part of its reply that has arrived."""
        for exchange in [*self.open_exchanges]:
            exchange.finish(read_to_end=False)
