"""
Reserved room on each disk for the results of running effects when the disk is full.

An unnamed temporary file, one for all journals of a disk, takes the room, so no one sees it and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import ClassVar

from stepengine.workspace.after_fork import Lock, call_in_forked_child

RESERVE_BYTES = 1024 * 1024
"""Room for the results of some dozen effects that are in progress when the disk becomes full, and no loss to any disk."""
LESS = tuple([RESERVE_BYTES >> halved for halved in range(1, 5)])
"""Smaller reserves for running effects on a disk without room for ``RESERVE_BYTES``."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskReserve:
    """
    A mebibyte reserved on one disk, for results that arrive when the disk is full; made by ``acquire_for_disk_of(folder)``.

    Attributes:
        users: The number of journals that use this reserve.
        is_short: Whether less is reserved. Then no effect should start, as there may be no space for its result.
    """

    _known: ClassVar[dict[int, DiskReserve]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, device: int, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._descriptor: int | None = None
        self.users = 0
        self.is_short = True

    @classmethod
    def acquire_for_disk_of(cls, folder: Path) -> DiskReserve | None:
        """Return the reserve of the disk that holds *folder*, with one more user; ``None`` if no space can be reserved."""
        with cls._lock:
            try:
                device = folder.stat().st_dev
                known = cls._known.get(device)
                if known is None:
                    known = cls(device, folder)
                    known._allocate_largest((RESERVE_BYTES,))
                    cls._known[device] = known
            except (OSError, AttributeError):
                return None
            known.users += 1
            return known

    def free_reserved_space(self) -> bool:
        """Free the reserved space for results; return whether there was any."""
        with self._lock:
            return self._release_space()

    def restore_full_reserve(self, folder: Path) -> bool:
        """
        Reserve all the space again if the disk has enough; return True if all of it is reserved.

        Args:
            folder: An existing folder on the disk; the original one may have been removed.
        """
        with self._lock:
            if self.is_short:
                self._release_space()
                self._folder = folder
                try:
                    self._allocate_largest((RESERVE_BYTES, *LESS))
                except OSError:  # as in `acquire_for_disk_of`: where no room can be kept, nothing waits for it
                    self.is_short = False
            return not self.is_short

    def reserve_remaining_space(self) -> None:
        """Reserve as much as fits of the remaining disk space, for results of running effects."""
        with self._lock:
            self._release_space()
            with contextlib.suppress(OSError):
                self._allocate_largest(LESS)

    def remove_user(self) -> None:
        """Remove one user; the last one frees the reserved space."""
        with self._lock:
            self.users -= 1
            if self.users <= 0:
                self._release_space()
                if self._known.get(self._device) is self:
                    del self._known[self._device]

    def _allocate_largest(self, sizes: tuple[int, ...]) -> None:
        """Reserve the first of these sizes that fits; a full disk is not an error."""
        for size in sizes:
            try:
                self._descriptor = _create_reserve_file(self._folder, size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
            else:
                self.is_short = size < RESERVE_BYTES
                return

    def close_in_forked_child(self) -> None:
        """Close the inherited descriptor in a forked child."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _release_space(self) -> bool:
        """Release the space; return whether there was any."""
        descriptor, self._descriptor = self._descriptor, None
        self.is_short = True
        if descriptor is None:
            return False
        os.close(descriptor)
        return True


@call_in_forked_child
def _drop_reserves_after_fork() -> None:
    """Release the parent's disk reserve in a forked child, which would otherwise hold the disk space."""
    for reserve in list(DiskReserve._known.values()):  # noqa: SLF001 - it is what this module keeps of them
        reserve.close_in_forked_child()
    DiskReserve._known.clear()  # noqa: SLF001


def _create_reserve_file(folder: Path, size: int) -> int:
    """Create an unnamed file in *folder* that reserves *size* bytes of its disk; return the descriptor."""
    descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
