"""
``TestCassette``: the cassette of one test, which is recorded once and played from then on (replay M, Y4).

What lives here knows files and modes and nothing of pytest; the plugin says where the files are, which mode holds, and
when the test is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.testing.cassette import Cassette, CassetteMiss, CassetteUnused
from stepengine.testing.cassette_files import Interaction, RecordedRequest
from stepengine.testing.modes import Account, Mode, replays, shown_path

if TYPE_CHECKING:
    from stepengine.testing.clients import Clients
    from stepengine.testing.transport import Chunks

__all__ = ("TestCassette", "interactions_of")
__tracebackhide__ = True  # a failed test ends at its author's line

MAX_SHARED = 32


class TestCassette(Cassette):
    """
    The cassette of a test. ``transport()`` is handed to providers or SDK clients, ``clients()`` are ready SDK clients.

    Args:
        path: Its file.
        mode: ``"none"`` replays; ``"once"`` records when there is no file and else replays; ``"new"`` replays what is known
            and records the rest; ``"extend"`` does so too and drops what was not played; ``"rewrite"`` records all again.
        command: The command that runs the test, for messages.
        allow_unused: Whether the test may leave interactions unplayed.
        extra: Further files that are only read; what is unused in them does not matter.
        chunks: How a replayed stream is cut, see ``ReplayTransport``.
        keeps: Whether ``keep`` writes what was recorded.
        options: As for ``Cassette``.

    Attributes:
        mode: As given.
        allow_unused: As given.
        existed: Whether there was a file when the test began.
        fresh: What was recorded in this test.
        calls: Model calls that somebody made with what this cassette gave; they must show up in it (replay C41).
        cost: US dollars of those calls; ``None`` when unknown.
    """

    __test__ = False

    def __init__(
        self,
        path: Path,
        mode: Mode,
        *,
        command: str = "pytest",
        allow_unused: bool = False,
        extra: Sequence[Path] = (),
        chunks: Chunks = "events",
        keeps: bool = True,
        **options: Any,
    ) -> None:
        self.existed = path.exists()
        known: Iterable[Interaction] = interactions_of(path) if mode != "rewrite" and self.existed else ()
        hint = f"{command} --stepengine-record={'extend' if self.existed else 'once'}"
        super().__init__(known, path=path, hint=hint, **options)
        self.mode: Mode = mode
        self.allow_unused = allow_unused
        self.calls = 0
        self.cost: Decimal | None = None
        self.fresh = Cassette(path=path, **options)
        self._options = {"command": command, "chunks": chunks, "keeps": keeps, **options}
        self._command = command
        self._chunks = chunks
        self._keeps = keeps
        self._extra = [Cassette(interactions_of(file), path=file, **options) for file in extra]
        self._shared: dict[str, TestCassette] = {}
        self._may_share = ""

    def __call__(self, name: str) -> TestCassette:
        """
        Return the cassette *name* of the test's module, which several tests may read.

        Raises:
            AssertionError: when it would be recorded while other processes run tests that share it.
        """
        if name not in self._shared:
            path = self.path.with_name(f"{name}.yaml") if self.path is not None else Path(f"{name}.yaml")
            shared = TestCassette(path, self.mode, allow_unused=True, **self._options)
            if self._may_share and not shared.replaying:
                msg = f"{shown_path(path)} is shared by several tests, and {self._may_share}"
                raise AssertionError(msg)
            self._shared[name] = shared
        return self._shared[name]

    def refuse_sharing(self, why: str) -> None:
        """Let no shared cassette be recorded from now on, and say why."""
        self._may_share = why

    @property
    def replaying(self) -> bool:
        """Whether everything is played and nothing reaches the network."""
        return replays(self.mode, existed=self.existed)

    def take(self, request: RecordedRequest) -> Interaction:
        """
        Return the first unused interaction whose request equals *request*; if there is none, one of the extra files.

        Raises:
            CassetteMiss: when there is none.
        """
        try:
            return super().take(request)
        except CassetteMiss as miss:
            for extra in self._extra:
                try:
                    found = extra.take(request)
                except CassetteMiss:
                    continue
                self.forget(miss)
                return found
            raise

    def transport(self, inner: Any = None, chunks: Chunks | None = None) -> Any:
        """
        Return the transport of this test, for sync and async clients: ``transport=`` of a provider, or of an httpx2 client.

        Args:
            inner: What reaches the network while recording; httpx2's own transports by default.
            chunks: How a replayed stream is cut, see ``ReplayTransport``; by default as the test's mark says.
        """
        cut = self._chunks if chunks is None else chunks
        if self.replaying:
            from stepengine.testing.transport import ReplayTransport

            return ReplayTransport(self, cut)
        from stepengine.testing.transport import MixedTransport

        return MixedTransport(self, self.fresh, inner, cut)

    def clients(self, inner: Any = None) -> Clients:
        """
        Return SDK clients that use this cassette: ``anthropic``, ``async_anthropic``, ``openai``, ``async_openai``, ``google``.

        Args:
            inner: What reaches the network while recording; httpx2's own transports by default.
        """
        from stepengine.testing.clients import Clients

        return Clients(self.transport(inner), key="replay" if self.replaying else None)

    def forget(self, miss: CassetteMiss) -> None:
        """Take back a miss: the request is answered otherwise."""
        self.misses.remove(miss)

    def check(self) -> None:
        """
        Check what the test did with it.

        Raises:
            CassetteMiss: when a request was not known, also when somebody swallowed it.
            CassetteUnused: when interactions were not played, unless they may.
            AssertionError: when model calls were made that did not come by here, so that nothing was recorded of them.
        """
        for shared in self._shared.values():
            shared.check()
        if self.misses:
            raise self.misses[0]
        if self.replaying and not self.allow_unused:
            self._refuse_unused()
        if not self.replaying and self.calls and not len(self.fresh) and not self._played:
            msg = (
                f"{self.calls} model calls were made, but no request came by the cassette {self._source}: this client does not "
                "use the given transport, so nothing can be recorded of it. Give it transport=cassette.transport(), or a "
                "client of cassette.clients()"
            )
            raise AssertionError(msg)

    def _refuse_unused(self) -> None:
        try:
            self.assert_all_used()
        except CassetteUnused as error:
            msg = (
                f"{error}\n  to drop them: {self._command} --stepengine-record=extend\n"
                "  to keep them: @pytest.mark.stepengine(allow_unused=True)"
            )
            raise CassetteUnused(msg, unused=error.unused) from None

    def keep(self) -> list[Account]:
        """
        Write what was recorded and return an account of each file that was written.

        Raises:
            SecretFound: when a secret is left; the file stays as it was.
        """
        kept = [account for shared in self._shared.values() for account in shared.keep()]
        return [*kept, self.account()] if self._write() else kept

    def _write(self) -> bool:
        dropped = set(self.unused) if self.mode == "extend" and not self.allow_unused else set()
        if not self._keeps or self.replaying:
            return False
        if not (len(self.fresh) or dropped):
            if self.mode == "rewrite" and self.existed and self.path is not None:
                self.path.unlink()
            return False
        kept = [held for index, held in enumerate(self.interactions) if index not in dropped]
        whole = self._joined([*kept, *self.fresh.interactions])
        whole.save()
        return True

    def _joined(self, interactions: Iterable[Interaction]) -> Cassette:
        options = {n: v for n, v in self._options.items() if n not in ("command", "chunks", "keeps")}
        whole = Cassette(interactions, path=self.path, **options)
        # What one request kept secret must not stand in the reply to another.
        whole._secrets.update(self.fresh._secrets)  # noqa: SLF001
        return whole

    @property
    def _played(self) -> int:
        return len(self) - len(self.unused)

    @property
    def _source(self) -> str:
        return shown_path(self.path) if self.path else super()._source

    def accounts(self) -> list[Account]:
        """Return what was done with each of the test's cassettes."""
        own = [self.account()] if len(self) or len(self.fresh) else []
        return [*own, *(account for shared in self._shared.values() for account in shared.accounts())]

    def account(self) -> Account:
        """Return what was done with this cassette."""
        return Account(
            path=self._source,
            mode=self.mode,
            replayed=self._played,
            recorded=len(self.fresh),
            unused=len(self.unused),
            cost=self.cost,
        )


def interactions_of(path: Path) -> tuple[Interaction, ...]:
    """Return what the file at *path* holds; a file that several tests read is parsed once (replay Y13)."""
    status = path.stat()
    return _parsed(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=MAX_SHARED)
def _parsed(path: Path, changed: int, size: int) -> tuple[Interaction, ...]:  # noqa: ARG001 - another file is another key
    from stepengine.testing.cassette_files import parse_cassette

    return tuple(parse_cassette(path.read_bytes(), str(path)))
