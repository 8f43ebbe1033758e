"""
The recordings of one test: what the fixtures ``cassette`` and ``journal`` of the pytest plugin give (replay M, Y).

What lives here knows files and modes and nothing of pytest; the plugin says where the files are, which mode holds, and
when the test is over.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepengine.errors import ReplayDivergence
from stepengine.testing.cassette import Cassette, CassetteMiss
from stepengine.testing.interactions import Interaction

if TYPE_CHECKING:
    from stepengine.data.run import RunResult
    from stepengine.engine import Engine
    from stepengine.testing.transport import Chunks

__all__ = ("MODES", "JournalFile", "Mode", "TestCassette")

Mode: TypeAlias = Literal["none", "once", "new", "extend", "rewrite"]
MODES: tuple[Mode, ...] = ("none", "once", "new", "extend", "rewrite")


class TestCassette(Cassette):
    """
    The cassette of a test; ``transport()`` is handed to providers or SDK clients.

    Args:
        path: Its file.
        mode: ``"none"`` replays; ``"once"`` records when there is no file and else replays; ``"new"`` replays what is known
            and records the rest; ``"extend"`` does so too and drops what was not played; ``"rewrite"`` records all again.
        allow_unused: Whether the test may leave interactions unplayed.
        options: As for ``Cassette``.
    """

    __test__ = False

    def __init__(self, path: Path, mode: Mode, *, allow_unused: bool = False, **options: Any) -> None:
        from stepengine.testing.reading import parse_cassette

        known: Iterable[Interaction] = ()
        if mode != "rewrite" and path.exists():
            known = parse_cassette(path.read_bytes(), str(path))
        self.existed = path.exists()
        super().__init__(known, path=path, **options)
        self.mode: Mode = mode
        self.allow_unused = allow_unused
        self.fresh = Cassette(path=path)
        self._taken: list[Interaction] = []

    @property
    def records(self) -> bool:
        """Whether requests that are not known go to the network."""
        return self.mode in ("new", "extend", "rewrite") or (self.mode == "once" and not self.existed)

    def transport(self, inner: Any = None, chunks: Chunks = "events") -> Any:
        """
        Return the transport of this test, for sync and async clients: ``transport=`` of a provider, or of an httpx2 client.

        Args:
            inner: What reaches the network while recording; httpx2's own transports by default.
            chunks: How a replayed stream is cut, see ``ReplayTransport``.
        """
        from stepengine.testing.transport import ReplayTransport

        if not self.records:
            return ReplayTransport(self, chunks)
        from stepengine.testing.recording import MixedTransport

        return MixedTransport(self, self.fresh, inner, chunks)

    def forget(self, miss: CassetteMiss) -> None:
        """Take back a miss: the request is recorded instead."""
        self.misses.remove(miss)

    def check(self) -> None:
        """
        Check what the test did with it.

        Raises:
            CassetteMiss: when a request was not known, also when somebody swallowed it.
            CassetteUnused: when interactions were not played, unless they may.
        """
        if self.misses:
            raise self.misses[0]
        if not self.records and not self.allow_unused:
            self.assert_all_used()

    def keep(self) -> Path | None:
        """
        Write what was recorded and return the file, if one was written.

        Raises:
            SecretFound: when a secret is left; the file stays as it was.
        """
        dropped = set(self.unused) if self.mode == "extend" else set()
        if not self.records or not (len(self.fresh) or dropped):
            return None
        kept = [held for index, held in enumerate(self.interactions) if index not in dropped]
        whole = Cassette([*kept, *self.fresh.interactions], path=self.path)
        # What one request kept secret must not stand in the reply to another.
        whole._secrets.update(self.fresh._secrets)  # noqa: SLF001
        return whole.save()


class JournalFile:
    """
    The journal of a test: ``run`` records a run once and repeats it from then on.

    Args:
        path: Its file.
        mode: ``"none"`` repeats; ``"once"`` and ``"new"`` record when there is no file and else repeat; ``"extend"``
            repeats as far as the record holds and goes on live; ``"rewrite"`` records again.
        hint: How to record, for the message when there is no file.
    """

    def __init__(self, path: Path, mode: Mode, hint: str) -> None:
        self.path = path
        self.mode: Mode = mode
        self.divergence: ReplayDivergence | None = None
        self._hint = hint
        self._others: dict[str, JournalFile] = {}
        self._started = False

    def __call__(self, name: str) -> JournalFile:
        """Return the journal of another run of the same test."""
        if name not in self._others:
            other = self.path.with_name(f"{self.path.stem}.{name}{self.path.suffix}")
            self._others[name] = JournalFile(other, self.mode, self._hint)
        return self._others[name]

    @property
    def records(self) -> bool:
        """Whether the run happens live."""
        return self.mode in ("extend", "rewrite") or (self.mode in ("once", "new") and not self.path.exists())

    async def run(self, engine: Engine, agent: Any, prompt: str = "", **options: Any) -> RunResult[Any]:
        """
        Record a run of *agent*, or repeat the recorded one with the present code; nothing is performed then.

        Args:
            engine: The engine; to repeat a run it needs no key, and its models and tools are not asked.
            agent: The agent, or its id.
            prompt: The prompt.
            options: As for ``Engine.run``.

        Raises:
            AssertionError: when there is no record and none is to be made, or for a second run in one journal.
            ReplayDivergence: when the present code does something else than is recorded.
        """
        from stepengine import journal as journals

        if self._started:
            msg = (
                f"{self.path.name} holds one run, and this is the second of its test; give it a name: journal('second')"
            )
            raise AssertionError(msg)
        self._started = True
        if not self.path.exists() and not self.records:
            msg = f"there is no journal {str(self.path)!r}; record it: {self._hint}"
            raise AssertionError(msg)
        if self.mode == "extend" and self.path.exists():
            made = journals.FileJournal(self._temporary, stable=True, link=False, redact="all")
            self._temporary.write_bytes(self.path.read_bytes())
            return await journals.extend(made, lambda session: engine._launch(session, agent))  # noqa: SLF001
        if self.records:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = journals.FileJournal(self._temporary, stable=True, link=False, redact="all")
            return await engine.run(agent, prompt, journal=made, **options)

        async def launch(session: Any) -> RunResult[Any]:
            self._expect_same(session.opening, prompt, options.get("params"))
            result: RunResult[Any] = await engine._launch(session, agent)  # noqa: SLF001
            return result

        try:
            return await journals.replay(journals.FileJournal(self.path), launch)
        except ReplayDivergence as error:
            self.divergence = error
            raise

    def run_sync(self, engine: Engine, agent: Any, prompt: str = "", **options: Any) -> RunResult[Any]:
        """Do what ``run`` does, for synchronous tests."""
        return engine._loop_thread.run(lambda: self.run(engine, agent, prompt, **options))  # noqa: SLF001

    def check(self) -> None:
        """
        Check what the test did with it.

        Raises:
            ReplayDivergence: when the run went otherwise, also when somebody swallowed it.
            AssertionError: when there is a record and no run.
        """
        for one in (self, *self._others.values()):
            if one.divergence is not None:
                raise one.divergence
            if not one._started and one.path.exists() and one.mode == "none":  # noqa: SLF001
                msg = f"the test did not run the journal {str(one.path)!r}; delete the file if it is not needed"
                raise AssertionError(msg)

    def keep(self) -> Path | None:
        """Put what was recorded in place and return the file, if there is one."""
        for other in self._others.values():
            other.keep()
        if not self._temporary.exists():
            return None
        return self._temporary.replace(self.path)

    def drop(self) -> None:
        """Throw away what was recorded."""
        for one in (self, *self._others.values()):
            one._temporary.unlink(missing_ok=True)  # noqa: SLF001

    @property
    def _temporary(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{os.getpid()}")

    def _expect_same(self, opening: Any, prompt: str, params: Any) -> None:
        from stepengine.data.json import freeze

        dump = getattr(params, "model_dump", None)
        given = freeze(dump(mode="json") if dump else params) if params is not None else None
        for name, recorded, now in (("prompt", opening.prompt, prompt), ("params", opening.params, given)):
            if (recorded or None) != (now or None):
                msg = f"the run of {self.path} was recorded with the {name} {recorded!r}, and now it is {now!r}; record again: {self._hint}"
                self.divergence = ReplayDivergence(msg)
                raise self.divergence
