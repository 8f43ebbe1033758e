"""
``Root``: a folder that is opened once and held, and the walk that never leaves it.

Each component of a path is opened relative to the descriptor of the one before it, and never through a symbolic link.
There is no ``realpath``, no comparison of path prefixes, and no check that is followed by a second look-up by path: what
was opened is what was checked. Symbolic links that stay inside are followed by hand, for reading only, each time with a
new walk from the root.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from typing import NoReturn, TypeVar

from attrs import frozen

from stepengine.errors import DefinitionError, ToolError
from stepengine.workspace import calls
from stepengine.workspace.calls import FILE, FOLDER, WALK, Fd
from stepengine.workspace.guard import file_guard
from stepengine.workspace.path_policy import PathPolicy, is_wide
from stepengine.workspace.path_rules import PROTECTED, SECRETS, UNPROTECTED, PathRules
from stepengine.workspace.paths import parts_of, target_parts
from stepengine.workspace.walk import WalkBudget, walk
from stepengine.workspace.workspace import Workspace
from stepengine.workspace.writes import root_id

__all__ = ("Missing", "OpenedFolder", "Root")

SYMLINK_HOPS = 8
"""Real paths go through one or two; a longer chain is a loop or a trap. Linux allows 40."""
SECRET_SCAN_ENTRIES = 200_000
"""Some seconds of looking for files to hide; a larger folder is refused rather than searched in part."""

T = TypeVar("T")

LINK = {errno.ELOOP, errno.ENOTDIR, errno.EMLINK}


class Missing(ToolError):
    """Nothing stands under a path; never leaves the tools, a model gets its message."""


@frozen
class OpenedFolder:
    """
    What a walk has reached.

    Attributes:
        fd: Its descriptor; whoever asked for it closes it.
        parts: Its real place below the root, after symbolic links.
        info: What ``fstat`` says of the descriptor.
    """

    fd: Fd
    parts: tuple[str, ...]
    info: os.stat_result


class Root:
    """
    A folder and the policy for what is below it.

    Args:
        folder: The root, here or of a ``Workspace``; a symbolic link is resolved once, now.
        policy: What may be touched.

    Attributes:
        id: What stands for it in records.
        system: Where it is; ``None`` for here.

    Raises:
        DefinitionError: when it is not a folder, too wide, or this system cannot walk by descriptor.
        WorkspaceLost: when the system that it is on cannot be reached.
    """

    fd: Fd
    real: tuple[str, ...]

    def __init__(self, folder: str | os.PathLike[str] | Workspace, policy: PathPolicy) -> None:
        self.policy = policy
        self.system = folder.system if isinstance(folder, Workspace) else None
        path = folder.root if isinstance(folder, Workspace) else folder
        if self.system is None:
            self._open_here(path)
        else:
            self.fd, real = self.system.root(os.fspath(path), wide=policy.allow_wide_root)
            self.real = tuple([p for p in real.split("/") if p])
        self._closer = weakref.finalize(self, calls.close, self.fd)
        self.info = calls.fstat(self.fd)
        self.id = root_id(self._identity(os.fspath(path)))
        self.secrets = PathRules((*SECRETS, *policy.withhold), policy.allow_secrets)
        self.protected = PathRules(PROTECTED, (*policy.allow_protected, *UNPROTECTED))
        here = folder.here if isinstance(folder, Workspace) else path
        if here is not None and not policy.allow_wide_root:
            self._refuse_wide(path, here)

    def _identity(self, path: str) -> tuple[str, ...]:
        """Return what tells it from other roots: its real path here, where it stands here, too."""
        if self.system is None:
            return self.real
        here = self.system.here(path)
        return tuple([p for p in here.split("/") if p]) if here else (self.system.name, *self.real)

    def _open_here(self, folder: str | os.PathLike[str]) -> None:
        if os.open not in os.supports_dir_fd or os.mkdir not in os.supports_dir_fd:
            msg = "this system cannot open files relative to a held folder, so nothing could be confined to a root"
            raise DefinitionError(msg)
        try:
            # Held open from here on: every path is walked from this descriptor, so that renaming or replacing the
            # folder's name leads nowhere else.
            self.fd = os.open(folder, WALK & ~os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            msg = f"the root {os.fspath(folder)!r} cannot be opened as a folder: {why}"
            raise DefinitionError(msg) from error
        self.real = tuple([p for p in os.path.realpath(folder).split("/") if p])

    def _refuse_wide(self, folder: str | os.PathLike[str], here: str | os.PathLike[str]) -> None:
        try:
            info = self.info if self.system is None else os.stat(here)  # noqa: PTH116  (samestat takes this)
        except OSError:  # a container of another machine
            return
        if is_wide(info):
            self.close()
            msg = (
                f"the root {os.fspath(folder)!r} is / or contains the home folder; pass allow_wide_root=True to mean it"
            )
            raise DefinitionError(msg)

    def close(self) -> None:
        """Let go of the folder; it also happens when nobody uses the root any more."""
        self._closer()

    def holds(self, fd: Fd) -> bool:
        """
        Return whether something open may be entered: it is on the root's file system, or others may be entered.

        Where rules are about files, a folder that is mounted a second time counts as another file system: it shows files
        under paths that no rule names, and its device is the same.
        """
        if self.policy.cross_mounts:
            return True
        return calls.fstat(fd).st_dev == self.info.st_dev and (file_guard() is None or self._is_mounted_here(fd))

    @cached_property
    def _mount(self) -> str:
        return calls.mount_of(self.fd)  # asked once: a walk asks for every folder, and what is open stays where it is

    def _is_mounted_here(self, fd: Fd) -> bool:
        return calls.mount_of(fd) == self._mount

    def parts(self, path: str) -> tuple[str, ...]:
        """Return the components of a path as given; see ``parts_of``."""
        return parts_of(path, self.real)

    def open_file(self, path: str) -> OpenedFolder:
        """
        Open a regular file for reading.

        Raises:
            PathOutsideRoot: when the path or a link in it leads out.
            ToolError: when it is secret, missing, no regular file, or on another file system.
        """
        opened = self._reach(path, lambda folder, name: calls.open_at(name, FILE, folder))
        try:
            self.check_file(opened, path)
        except ToolError:
            calls.close(opened.fd)
            raise
        return opened

    def open_folder(self, path: str) -> OpenedFolder:
        """Open a folder for listing; the errors are those of ``open_file``."""
        return self._reach(path, lambda folder, name: calls.open_at(name, FOLDER, folder))

    def check_secret(self, parts: Sequence[str], path: str) -> None:
        """Refuse a secret path."""
        # Before anything is opened, and again where a link has led (`_reach`): a harmless name may lead to a secret
        # file, and a secret name to a harmless one.
        if self.secrets.match(parts):
            which = self.secrets.which(parts)
            msg = f"{path!r} may hold secrets (it matches {which!r}) and is not available to tools"
            raise ToolError(msg)
        guard = file_guard()
        if guard is not None and (why := guard(self.real, parts)):
            msg = f"{path!r} {why}"
            raise ToolError(msg)

    def withholds(self, parts: Sequence[str]) -> bool:
        """Return whether listings and searches leave a file or folder out."""
        guard = file_guard()
        return self.secrets.match(parts) or (guard is not None and bool(guard(self.real, parts)))

    def check_file(self, opened: OpenedFolder, path: str) -> None:
        """Refuse what is not a regular file, or another name of a secret one."""
        mode = opened.info.st_mode
        if stat.S_ISDIR(mode):
            msg = f"{path!r} is a folder; use list_directory"
            raise ToolError(msg)
        if not stat.S_ISREG(mode):
            msg = f"{path!r} is a {special(mode)}, not a regular file"
            raise ToolError(msg)
        is_alias = self.policy.cross_mounts and file_guard() is not None and not self._is_mounted_here(opened.fd)
        if opened.info.st_nlink > 1 or is_alias:
            self._check_hardlink(opened, path)

    def _check_hardlink(self, opened: OpenedFolder, path: str) -> None:
        if self.policy.refuse_hardlinks and opened.info.st_nlink > 1:
            msg = f"{path!r} has more than one name (a hard link), which this set of tools refuses"
            raise ToolError(msg)
        if self._names_a_secret(opened.info):
            msg = f"{path!r} is another name of a file that may hold secrets or that a rule denies, or of one that could not be told from them"
            raise ToolError(msg)

    def _names_a_secret(self, info: os.stat_result) -> bool:
        """Return whether a file is also known by a secret name; true as well when the tree is too large to tell."""
        # A hard link is no link: nothing in the file says that it has another name, and only a walk finds that. Where
        # the tree is too large to tell, it counts as secret.
        budget = WalkBudget(SECRET_SCAN_ENTRIES)
        fd = calls.open_at(".", FOLDER, self.fd)
        try:
            with closing(walk(self.holds, fd, (), budget, lambda _, __: True)) as entries:
                for place, entry in entries:
                    if entry.inode() == info.st_ino and self.withholds(place):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode) and os.path.samestat(found, info):
                            return True
        finally:
            calls.close(fd)
        return bool(budget.cut)

    def other_names(self) -> list[tuple[str, ...]]:
        """
        Return the places of files that are also known by a withheld name, as far as 200,000 entries tell.

        Almost no tree has any, and that takes no ``stat`` of what is not withheld to find out.
        """
        linked = {(info.st_dev, info.st_ino) for place, info in self._files(self.withholds) if info.st_nlink > 1}
        if not linked:
            return []
        found = self._files(lambda place: not self.withholds(place))
        return [place for place, info in found if (info.st_dev, info.st_ino) in linked]

    def withheld_in(self, folder: OpenedFolder, *, deep: bool) -> list[tuple[str, ...]]:
        """
        Return what listings leave out of an open folder, by its place below that; of a folder that is left out not its files.

        Args:
            folder: The folder; it stays open.
            deep: Whether what folders in it hold counts, too.

        Raises:
            ToolError: when the tree is too large to tell.
        """
        found: list[tuple[str, ...]] = []
        start = len(folder.parts)

        def enter(place: tuple[str, ...], _: Fd) -> bool:
            if not self.withholds(place):
                return True
            found.append(place[start:])
            return False

        budget = WalkBudget(SECRET_SCAN_ENTRIES)
        with closing(walk(self.holds if deep else lambda _: False, folder.fd, folder.parts, budget, enter)) as entries:
            found += [place[start:] for place, entry in entries if not entry.is_dir() and self.withholds(place)]
        if budget.cut:
            msg = f"what may be listed of it could not be told: {budget.cut}; name a smaller folder"
            raise ToolError(msg)
        return found

    def shows_one_of(self, folder: OpenedFolder, names: Collection[str], *, deep: bool) -> bool:
        """
        Return whether a file or folder of one of these names stands in an open folder, and is not withheld.

        Args:
            folder: The folder; it stays open.
            names: Single names.
            deep: Whether what folders in it hold counts, too.
        """
        holds = self.holds if deep else lambda _: False
        budget = WalkBudget(SECRET_SCAN_ENTRIES)
        with closing(
            walk(holds, folder.fd, folder.parts, budget, lambda place, _: not self.withholds(place))
        ) as entries:
            return any(entry.name in names and not self.withholds(place) for place, entry in entries)

    def _files(self, wanted: Callable[[Sequence[str]], bool]) -> Iterator[tuple[tuple[str, ...], os.stat_result]]:
        """Yield the places of files that are wanted, with what the system says of them."""
        fd = calls.open_at(".", FOLDER, self.fd)
        try:
            with closing(walk(self.holds, fd, (), WalkBudget(SECRET_SCAN_ENTRIES), lambda _, __: True)) as entries:
                for place, entry in entries:
                    if entry.is_file(follow_symlinks=False) and wanted(place):
                        with suppress(OSError):
                            yield place, entry.stat(follow_symlinks=False)
        finally:
            calls.close(fd)

    def _reach(self, path: str, use: Callable[[Fd, str], Fd]) -> OpenedFolder:
        """Walk to the last component and open it with *use*, following links that stay inside."""
        parts = self.parts(path)
        self.check_secret(parts, path)
        todo, done, folder, hops = deque(parts or (".",)), deque[str](), self.fd, 0
        # Component by component, each opened relative to the one before and without following links. To check a path
        # first and open it then leaves a moment in which somebody, such as a command that the model runs, puts a link
        # in between (CVE-2025-53109).
        try:
            while True:
                name = todo.popleft()
                if not todo:
                    self.check_secret((*done, name), path)
                try:
                    fd = calls.open_at(name, WALK, folder) if todo else use(folder, name)
                except OSError as error:
                    todo.extendleft(reversed(self._linked(error, folder, name, tuple(done), path)))
                    hops += 1
                    self._check_hops(hops, path)
                    todo = todo or deque(["."])
                    # A link is followed by hand: its target is put in front of what is left, and the walk begins again
                    # at the root, so that it passes the same checks as if it had been written.
                    folder, done = self._move(folder, self.fd), deque()
                    continue
                if name != ".":
                    done.append(name)
                if not todo:
                    return self._open_parts(fd, tuple(done), path)
                folder = self._move(folder, fd)
                self._same_device(folder, path)
        finally:
            self._move(folder, self.fd)

    def _linked(self, error: OSError, folder: Fd, name: str, done: tuple[str, ...], path: str) -> list[str]:
        """Return where a component that could not be opened points, when it is a link that stays inside."""
        target = read_link(folder, name) if error.errno in LINK else None
        if target is None:
            self._fail(error, path)
        return target_parts(done, target, self.real, path)

    def _check_hops(self, hops: int, path: str) -> None:
        if hops > SYMLINK_HOPS:
            msg = f"{path!r} goes through more than {SYMLINK_HOPS} symbolic links"
            raise ToolError(msg)

    def _open_parts(self, fd: Fd, parts: tuple[str, ...], path: str) -> OpenedFolder:
        try:
            return OpenedFolder(fd, parts, self._same_device(fd, path))
        except ToolError:
            calls.close(fd)
            raise

    def _same_device(self, fd: Fd, path: str) -> os.stat_result:
        """Return what ``fstat`` says; refuse another file system than the root's."""
        info = calls.fstat(fd)
        if not self.holds(fd):
            msg = f"{path!r} is on another file system than the root, which this set of tools does not enter"
            raise ToolError(msg)
        return info

    def _move(self, old: Fd, new: Fd) -> Fd:
        if old not in {self.fd, new}:
            calls.close(old)
        return new

    @contextmanager
    def parent(self, path: str, *, create: bool, made: list[str] | None = None) -> Iterator[tuple[Fd, str]]:
        """
        Give the descriptor of the folder that holds the last component, and its name, for writing.

        No symbolic link is followed. Missing folders are made with *create*, on the held descriptors, and removed again
        when nothing comes of it; *made* takes their paths below the root, outermost first.

        Raises:
            PathOutsideRoot: when the path leads out.
            ToolError: when it is secret or protected, the root itself, behind a link, or not reachable.
        """
        parts = self.parts(path)
        if not parts:
            msg = "the root folder itself cannot be written"
            raise ToolError(msg)
        self.check_secret(parts, path)
        if self.protected.match(parts):
            which = self.protected.which(parts)
            msg = f"{path!r} is protected from being written (it matches {which!r}), because other programs run or trust it"
            raise ToolError(msg)
        folder, made = calls.open_at(".", FOLDER, self.fd), [] if made is None else made
        try:
            for depth in range(1, len(parts)):
                folder = self._move(folder, self._enter(folder, parts[:depth], path, made if create else None))
            yield folder, parts[-1]
        except BaseException:
            self.remove_empty(made)
            raise
        finally:
            self._move(folder, self.fd)

    def remove_empty(self, folders: Sequence[str]) -> list[str]:
        """Remove folders that hold nothing, given outermost first; return those that were removed."""
        removed: list[str] = []
        for path in reversed(folders):
            with suppress(OSError, ToolError), self.parent(path, create=False) as (folder, name):
                calls.rmdir(name, folder)
                removed.append(path)
        return removed

    def _enter(self, folder: Fd, place: Sequence[str], path: str, made: list[str] | None) -> Fd:
        """Open the folder at *place*; a missing one is made, and noted, where *made* is a list."""
        name = place[-1]
        try:
            fd = calls.open_at(name, FOLDER, folder)
        except FileNotFoundError as error:
            if made is None:
                self._fail(error, path)
            fd = self._make(folder, place, path, made)
        except OSError as error:
            self._fail(error, path, link=error.errno in LINK and read_link(folder, name) is not None and name)
        try:
            self._same_device(fd, path)
        except ToolError:
            calls.close(fd)
            raise
        return fd

    def _make(self, folder: Fd, place: Sequence[str], path: str, made: list[str]) -> Fd:
        name = place[-1]
        try:
            with suppress(FileExistsError):  # somebody else made it; what it is, the next line finds out
                calls.mkdir(name, 0o755, folder)
                made.append("/".join(place))
            return calls.open_at(name, FOLDER, folder)
        except OSError as error:
            self._fail(error, path, link=error.errno in LINK and name)

    def _fail(self, error: OSError, path: str, *, link: str | bool = False) -> NoReturn:
        if link:
            msg = f"{path!r} goes through the symbolic link {link!r}; files are not written through links"
        elif error.errno == errno.ENOENT:
            msg = f"{path!r} does not exist"
            raise Missing(msg) from None
        elif error.errno == errno.ENOTDIR:
            msg = f"{path!r} goes through something that is not a folder"
        else:
            msg = f"{path!r} cannot be used: {error.strerror or type(error).__name__}"
        raise ToolError(msg) from None


def read_link(folder: Fd, name: str) -> str | None:
    """Return where a symbolic link points, or ``None`` when *name* is none."""
    try:
        return calls.readlink(name, folder)
    except OSError:
        return None


def special(mode: int) -> str:
    """Return what a file is that is neither regular nor a folder."""
    kinds = ((stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "character device"))
    return next((word for test, word in kinds if test(mode)), "block device")
