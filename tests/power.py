"""
A disk in a machine whose power may go at any moment: it keeps what was synced, and of everything else what it likes.

``Power`` stands in for the two calls that make something durable. At each of them, and at the end, it notes what would be
left if the power went just then; ``Cut.images()`` gives the disks that one may find afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import pytest

__all__ = ("Cut", "Image", "Power")

SECTOR = 512

Names = Mapping[int, Mapping[str, int]]
"""The entries of each folder: a name and the number of what it stands for."""


@attrs.frozen
class Image:
    """
    A disk as it is found.

    Attributes:
        what: What became of what was not synced.
        files: The content of each file, by its path.
    """

    what: str
    files: Mapping[str, bytes]

    def written_to(self, folder: Path) -> Path:
        """Make the files in a folder, which is returned."""
        folder.mkdir(parents=True)
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder


@attrs.frozen
class Cut:
    """
    A moment at which the power goes.

    Attributes:
        noted: What the test noted at that moment.
        synced: Everything that was synced before.
        known: Everything that the system knows, synced or not.
    """

    noted: Any
    synced: tuple[Names, Mapping[int, bytes]]
    known: tuple[Names, Mapping[int, bytes]]
    top: int

    def images(self, grain: int = SECTOR) -> Iterator[Image]:
        """
        Give the disks that may be found: with nothing of the rest, with all of it, and with the last write torn.

        A write is torn after each multiple of *grain* and directly beside it; in another image zeros stand for it, as where
        a file had grown before its content came. Renamed and new files may have their names before their content is there.
        """
        names, contents = self.synced
        known_names, known = self.known
        yield Image("what was synced", self._files(names, contents))
        yield Image("everything", self._files(known_names, known))
        yield Image("names before contents", self._files(known_names, contents))
        for number, whole in known.items():
            kept = contents.get(number, b"")
            more = len(whole) - len(kept)
            if more <= 0 or not whole.startswith(kept):
                continue
            sizes = {size + beside for size in range(0, more, grain) for beside in (-1, 0, 1)} | {more - 1}
            for size in sorted(size for size in sizes if 0 < size < more):
                torn = {**contents, number: whole[: len(kept) + size]}
                yield Image(f"torn after {size} of {more} bytes", self._files(names, torn))
            yield Image("zeros", self._files(names, {**contents, number: kept + bytes(more)}))

    def _files(self, names: Names, contents: Mapping[int, bytes]) -> dict[str, bytes]:
        def below(folder: int, path: str) -> Iterator[tuple[str, bytes]]:
            for name, number in names.get(folder, {}).items():
                if number in self.known[0]:
                    yield from below(number, f"{path}{name}/")
                else:
                    yield f"{path}{name}", contents.get(number, b"")

        return dict(below(self.top, ""))


class Power:
    """
    The power of the machine that a folder is in; what stands there at first counts as synced.

    Args:
        top: The folder.
        note: Gives what a test wants to know of the moment of a cut.

    Attributes:
        cuts: The moments at which it may have gone.
    """

    def __init__(self, top: Path, note: Callable[[], Any] = lambda: None) -> None:
        self.top, self.note = top, note
        self.cuts: list[Cut] = []
        self._lock = threading.RLock()
        self._held: dict[int, int] = {}
        self._patch = pytest.MonkeyPatch()
        names, contents = self._known()
        self._names: dict[int, dict[str, int]] = names
        self._contents: dict[int, bytes] = contents

    def __enter__(self) -> Self:
        for name in ("fsync", "fdatasync"):
            self._patch.setattr(os, name, self._noting(getattr(os, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.undo()
        self._cut()
        for held in self._held.values():
            os.close(held)

    def _noting(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def synced(descriptor: int) -> None:
            with self._lock:
                self._cut()
                sync(descriptor)
                names, contents = self._known()
                number = os.fstat(descriptor).st_ino
                if number in names:
                    self._names[number] = names[number]
                elif number in contents:
                    self._contents[number] = contents[number]

        return synced

    def _cut(self) -> None:
        noted = self.note()
        synced = dict(self._names), dict(self._contents)
        self.cuts.append(Cut(noted, synced, self._known(), self.top.stat().st_ino))

    def _known(self) -> tuple[dict[int, dict[str, int]], dict[int, bytes]]:
        names: dict[int, dict[str, int]] = {}
        contents: dict[int, bytes] = {}
        for folder, _, files in os.walk(self.top):
            with os.scandir(folder) as entries:
                names[Path(folder).stat().st_ino] = {entry.name: entry.inode() for entry in entries}
            for name in files:
                path = Path(folder, name)
                try:
                    number, contents_of = path.stat().st_ino, path.read_bytes()
                except FileNotFoundError:
                    continue
                contents[number] = contents_of
                if number not in self._held:  # a number that is given away again would be taken for the same file
                    self._held[number] = os.open(path, os.O_RDONLY)
        return names, contents
