"""
Room on a disk that is kept for the last record: when the disk is full, a result that exists is still written (JR09).

An unnamed temporary file holds the room, one for all journals of a disk, so nothing of it is ever seen or left behind.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import ClassVar

__all__ = ("Reserve",)

ROOM = 1024 * 1024


class Reserve:
    """
    A mebibyte of one disk; make one with ``Reserve.near(path)``.

    Attributes:
        users: How many journals count on it.
    """

    _known: ClassVar[dict[int, Reserve]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: int, descriptor: int) -> None:
        self._device = device
        self._descriptor: int | None = descriptor
        self.users = 0

    @classmethod
    def near(cls, path: Path) -> Reserve | None:
        """Return the reserve of the disk that *path* is on; ``None`` where there can be none."""
        with cls._lock:
            try:
                device = path.parent.stat().st_dev
                known = cls._known.get(device)
                if known is None:
                    known = cls._known[device] = cls(device, _room(path.parent))
            except (OSError, AttributeError):
                return None
            known.users += 1
            return known

    def spend(self) -> bool:
        """Give the room back to the disk; return whether there was any left to give."""
        with self._lock:
            return self._release()

    def close(self) -> None:
        """Count one journal less; the last one gives the room back."""
        with self._lock:
            self.users -= 1
            if self.users <= 0:
                self._release()

    def _release(self) -> bool:
        if self._known.get(self._device) is self:
            del self._known[self._device]
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return False
        os.close(descriptor)
        return True


def _room(folder: Path) -> int:
    descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, ROOM)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
