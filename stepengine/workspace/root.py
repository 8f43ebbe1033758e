"""
``Root``: a folder that is opened once, and a walk that never leaves it.

Each component of a path is opened relative to the descriptor of the one before it, and never through a symbolic link.
There is no ``realpath``, no comparison of path prefixes, and no check followed by a second look-up by path: the checked file is
the opened one. Symbolic links within the root are resolved here, for reading only, each time with a new walk from the root.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from typing import NoReturn

from attrs import frozen

from stepengine.errors import DefinitionError, ToolError
from stepengine.workspace import calls
from stepengine.workspace.calls import FILE, FOLDER, WALK, Fd
from stepengine.workspace.guard import get_current_file_guard
from stepengine.workspace.path_policy import PathPolicy, is_home_or_above
from stepengine.workspace.path_rules import PROTECTED, SECRETS, UNPROTECTED, PathRules
from stepengine.workspace.paths import resolve_link_target, split_path, to_path
from stepengine.workspace.walk import WalkBudget, walk
from stepengine.workspace.workspace import Workspace
from stepengine.workspace.writes import root_id

SYMLINK_HOPS = 8
"""Real paths go through one or two; a longer chain is a loop or a trap. Linux allows 40."""
SECRET_SCAN_ENTRIES = 200_000
"""Some seconds of searching for withheld files. In a larger tree, a file with more than one link counts as withheld."""


LINK = {errno.ELOOP, errno.ENOTDIR, errno.EMLINK}


class Missing(ToolError):
    """A path does not exist; it never leaves the tools, a model gets its message."""


@frozen
class OpenedEntry:
    """
    The file or folder that a walk along a path has opened.

    Attributes:
        fd: Its descriptor; the caller closes it.
        parts: Its real path below the root, after symbolic links.
        info: The status of the descriptor when it was opened.
    """

    fd: Fd
    parts: tuple[str, ...]
    info: os.stat_result


class Root:
    """
    A folder and the access policy for the paths below it.

    Args:
        folder: The root, here or of a ``Workspace``; a symbolic link is resolved once, now.
        policy: The permissions below it.

    Attributes:
        id: Its id in records; see ``root_id``.
        system: The remote system; ``None`` for this machine.

    Raises:
        DefinitionError: when it is not a folder, too wide, or this system cannot walk by descriptor.
        WorkspaceLost: when its remote system cannot be reached.
    """

    fd: Fd
    real: tuple[str, ...]

    def __init__(self, folder: str | os.PathLike[str] | Workspace, policy: PathPolicy) -> None:
        self.policy = policy
        self.system = folder.system if isinstance(folder, Workspace) else None
        path = folder.root if isinstance(folder, Workspace) else to_path(folder, "the root folder")
        if self.system is None:
            self._open_local_root(path)
        else:
            self.fd, real = self.system.open_root(os.fspath(path), allow_wide=policy.allow_wide_root)
            self.real = tuple([p for p in real.split("/") if p])
        self._closer = weakref.finalize(self, calls.close, self.fd)
        self.info = calls.fstat(self.fd)
        self.id = root_id(self._root_identity(os.fspath(path)))
        self.secrets = PathRules((*SECRETS, *policy.withhold), policy.allow_secrets)
        self.protected = PathRules(PROTECTED, (*policy.allow_protected, *UNPROTECTED))
        self.trusted = PathRules(policy.trusted, ())
        if not policy.allow_wide_root:
            self._close_and_raise_if_wide(os.fspath(path))

    def _root_identity(self, path: str) -> tuple[str, ...]:
        """Return the identity of the root: its real path on this machine if it has one, else its system and path there."""
        if self.system is None:
            return self.real
        here = self.system.find_local_folder(path)
        return tuple([p for p in here.split("/") if p]) if here else (self.system.name, *self.real)

    def _open_local_root(self, folder: str | os.PathLike[str]) -> None:
        """Open a root on this machine, and store its descriptor and real path; raise ``DefinitionError`` if it cannot be opened."""
        if os.open not in os.supports_dir_fd or os.mkdir not in os.supports_dir_fd:
            msg = "this system cannot open files relative to an open folder, so tools cannot be confined to a root"
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

    def _close_and_raise_if_wide(self, path: str) -> None:
        """Close the root and raise an error if it, or a folder mounted above, at or below it, is ``/`` or contains the home folder."""
        if self.system is None:
            wide = is_home_or_above(self.info)
        else:
            real = "/" + "/".join(self.real)
            mounted = {
                here for one in (path, real) for here in self.system.list_mounted_folders(one, include_below=True)
            }
            wide = any(_is_home_or_above(here) for here in mounted)
        if wide:
            self.close()
            what = "is" if self.system is None else "has a mount that is"
            msg = f"the root {path!r} {what} / or contains the home folder; to allow it, pass allow_wide_root=True"
            raise DefinitionError(msg)

    def close(self) -> None:
        """Close the folder. This also happens when the root is garbage-collected."""
        self._closer()

    def may_enter(self, fd: Fd) -> bool:
        """
        Return whether an open folder may be entered: it is on the root's file system, or the policy allows others.

        If there are rules about files, a folder that is mounted a second time counts as another file system: it shows files
        under paths that no rule names, although its device is the same.
        """
        if self.policy.cross_mounts:
            return True
        return calls.fstat(fd).st_dev == self.info.st_dev and (
            get_current_file_guard() is None or self._is_on_root_mount(fd)
        )

    @cached_property
    def _root_mount(self) -> str:
        """The id of the root's mount."""
        return calls.get_mount_id(
            self.fd
        )  # cached: a walk needs it for every folder, and an open folder does not change it

    def _is_on_root_mount(self, fd: Fd) -> bool:
        """Return True if an open file or folder is on the same mount as the root."""
        # A remote folder is opened again after a lost connection, where its mount may have another id.
        return calls.get_mount_id(fd) == (self._root_mount if self.system is None else calls.get_mount_id(self.fd))

    def split_path(self, path: str) -> tuple[str, ...]:
        """Return the components of a path below the root; links in it are not followed."""
        return split_path(path, self.real)

    def open_file(self, path: str) -> OpenedEntry:
        """
        Open a regular file for reading.

        Raises:
            PathOutsideRoot: when the path or a link in it leads out of the root.
            ToolError: when the file is secret, missing, not a regular file, or on another file system.
        """
        opened = self._open_path(path, lambda folder, name: calls.open_at(name, FILE, folder))
        try:
            self.check_readable_file(opened, path)
        except ToolError:
            calls.close(opened.fd)
            raise
        return opened

    def is_trusted(self, path: str) -> bool:
        """Open a file, links followed, and return True if its real path matches a ``trusted`` pattern; False if it cannot be opened."""
        if self.trusted.patterns:
            try:
                opened = self.open_file(path)
            except ToolError:
                return False
            calls.close(opened.fd)
            return self.trusted.match(opened.parts)
        return False

    def open_folder(self, path: str) -> OpenedEntry:
        """Open a folder for listing; the errors are those of ``open_file``."""
        return self._open_path(path, lambda folder, name: calls.open_at(name, FOLDER, folder))

    def refuse_withheld(self, parts: Sequence[str], path: str) -> None:
        """Raise an error for a path that is secret or that the rules of the current call withhold."""
        # Before anything is opened, and again after a link (`_open_path`): a harmless name may lead to a secret file, and a
        # secret name to a harmless one.
        if self.secrets.match(parts):
            which = self.secrets.find_matching_pattern(parts)
            msg = f"{path!r} may hold secrets (it matches {which!r}) and is not available to tools"
            raise ToolError(msg)
        guard = get_current_file_guard()
        if guard is not None and (why := guard(self.real, parts)):
            msg = f"{path!r} {why}"
            raise ToolError(msg)

    def is_withheld(self, parts: Sequence[str]) -> bool:
        """Return whether listings and searches omit a file or folder."""
        guard = get_current_file_guard()
        return self.secrets.match(parts) or (guard is not None and bool(guard(self.real, parts)))

    def check_readable_file(self, opened: OpenedEntry, path: str) -> None:
        """Raise ``ToolError`` for a file that is not regular, or that is a hard link to a withheld file."""
        mode = opened.info.st_mode
        if stat.S_ISDIR(mode):
            msg = f"{path!r} is a folder; use list_directory"
            raise ToolError(msg)
        if not stat.S_ISREG(mode):
            msg = f"{path!r} is a {special_file_kind(mode)}, not a regular file"
            raise ToolError(msg)
        is_alias = (
            self.policy.cross_mounts and get_current_file_guard() is not None and not self._is_on_root_mount(opened.fd)
        )
        if opened.info.st_nlink > 1 or is_alias:
            self._refuse_withheld_hardlink(opened, path)

    def _refuse_withheld_hardlink(self, opened: OpenedEntry, path: str) -> None:
        """Raise ``ToolError`` for a file whose other name is withheld, or for any hard link if the policy refuses hard links."""
        if self.policy.refuse_hardlinks and opened.info.st_nlink > 1:
            msg = f"{path!r} has more than one name (a hard link), which this set of tools refuses"
            raise ToolError(msg)
        if self._has_withheld_name(opened.info):
            msg = f"{path!r} is another name of a file that may hold secrets or that a rule denies, or of one that could not be told from them"
            raise ToolError(msg)

    def _has_withheld_name(self, info: os.stat_result) -> bool:
        """Search the tree, and return True if a hard link of a file has a withheld name, or if the tree is too large to search."""
        # Nothing in a file shows its other names, so only a walk finds them. If the tree is too large for that, the file
        # counts as withheld.
        budget = WalkBudget(SECRET_SCAN_ENTRIES)
        with closing(self.iterate_files(self.is_withheld, budget)) as withheld:
            return any(os.path.samestat(found, info) for _, found in withheld) or bool(budget.cut)

    def iterate_files(
        self, is_wanted: Callable[[Sequence[str]], bool], budget: WalkBudget
    ) -> Generator[tuple[tuple[str, ...], os.stat_result], None, None]:
        """Yield path and status of the regular files that *is_wanted* selects, within the budget."""
        fd = calls.open_at(".", FOLDER, self.fd)
        try:
            with closing(walk(self.may_enter, fd, (), budget, lambda _, __: True)) as entries:
                for place, entry in entries:
                    if entry.is_file(follow_symlinks=False) and is_wanted(place):
                        with suppress(OSError):
                            yield place, entry.stat(follow_symlinks=False)
        finally:
            calls.close(fd)

    def _open_path(self, path: str, open_last: Callable[[Fd, str], Fd]) -> OpenedEntry:
        """Walk to the last component and open it with *open_last*, following links that stay inside."""
        parts = self.split_path(path)
        self.refuse_withheld(parts, path)
        todo, done, folder, hops = deque(parts or (".",)), deque[str](), self.fd, 0
        # Component by component, each opened relative to the one before and without following links. A check of the path
        # followed by opening it would leave a moment in which another process, such as a command of the model, replaces a
        # component by a link (CVE-2025-53109).
        try:
            while True:
                name = todo.popleft()
                if not todo:
                    self.refuse_withheld((*done, name), path)
                try:
                    fd = calls.open_at(name, WALK, folder) if todo else open_last(folder, name)
                except OSError as error:
                    todo.extendleft(reversed(self._resolve_link(error, folder, name, tuple(done), path)))
                    hops += 1
                    if hops > SYMLINK_HOPS:
                        msg = f"{path!r} goes through more than {SYMLINK_HOPS} symbolic links"
                        raise ToolError(msg) from None
                    todo = todo or deque(["."])
                    # The target of a link is inserted before the rest of the path, and the walk restarts at the root. So it passes
                    # the same checks as a path in its place.
                    folder, done = self._replace_fd(folder, self.fd), deque()
                    continue
                if name != ".":
                    done.append(name)
                if not todo:
                    return self._make_opened_entry(fd, tuple(done), path)
                folder = self._replace_fd(folder, fd)
                self._require_allowed_device(folder, path)
        finally:
            self._replace_fd(folder, self.fd)

    def _resolve_link(self, error: OSError, folder: Fd, name: str, done: tuple[str, ...], path: str) -> list[str]:
        """Return the components of a link's target inside the root; raise the ``ToolError`` for *error* if *name* is not a link."""
        target = read_link(folder, name) if error.errno in LINK else None
        if target is None:
            _raise_path_error(error, path)
        return resolve_link_target(done, target, self.real, path)

    def _make_opened_entry(self, fd: Fd, parts: tuple[str, ...], path: str) -> OpenedEntry:
        """Return the entry of an open descriptor; on a file system that may not be entered, close it and raise ``ToolError``."""
        try:
            return OpenedEntry(fd, parts, self._require_allowed_device(fd, path))
        except ToolError:
            calls.close(fd)
            raise

    def _require_allowed_device(self, fd: Fd, path: str) -> os.stat_result:
        """Return the status of an open file; raise ``ToolError`` if its file system may not be entered."""
        info = calls.fstat(fd)
        if not self.may_enter(fd):
            msg = f"{path!r} is on another file system than the root, which this set of tools does not enter"
            raise ToolError(msg)
        return info

    def _replace_fd(self, old: Fd, new: Fd) -> Fd:
        """Close the descriptor *old*, unless it is the root's or *new*, and return *new*."""
        if old not in {self.fd, new}:
            calls.close(old)
        return new

    @contextmanager
    def open_parent(self, path: str, *, create: bool, created: list[str] | None = None) -> Iterator[tuple[Fd, str]]:
        """
        Open the last component's folder for writing, yield (descriptor, name); *create* makes missing folders and adds them to *created*.

        No symbolic link is followed. With *create*, missing folders are created, and removed again if the block raises an error.
        Their paths below the root are appended to *created*, outermost first.

        Raises:
            PathOutsideRoot: when the path leads out of the root.
            ToolError: when the path is secret or protected, is the root itself, is behind a link, or cannot be reached.
        """
        parts = self.split_path(path)
        if not parts:
            msg = "the root folder itself cannot be written"
            raise ToolError(msg)
        self.refuse_withheld(parts, path)
        if self.protected.match(parts):
            which = self.protected.find_matching_pattern(parts)
            msg = f"{path!r} is protected from being written (it matches {which!r}), because other programs run or trust it"
            raise ToolError(msg)
        # A file that a run has written may contain text of third parties, and would be trusted when it is read again.
        if self.trusted.match(parts):
            msg = f"{path!r} is not written by tools (it matches {self.trusted.find_matching_pattern(parts)!r}), because what it holds is trusted"
            raise ToolError(msg)
        folder, created = calls.open_at(".", FOLDER, self.fd), [] if created is None else created
        try:
            for depth in range(1, len(parts)):
                folder = self._replace_fd(
                    folder, self._open_or_create_child_folder(folder, parts[:depth], path, created if create else None)
                )
            yield folder, parts[-1]
        except BaseException:
            self.remove_empty_folders(created)
            raise
        finally:
            self._replace_fd(folder, self.fd)

    def remove_empty_folders(self, folders: Sequence[str]) -> list[str]:
        """Remove those of *folders* that are empty, innermost first, and return them; *folders* is outermost first."""
        removed: list[str] = []
        for path in reversed(folders):
            with suppress(OSError, ToolError), self.open_parent(path, create=False) as (folder, name):
                calls.rmdir(name, folder)
                removed.append(path)
        return removed

    def find_removal_obstacles(self, path: str) -> list[str] | None:
        """
        Return the unsorted names in a folder; ``None`` if it is missing, behind a link, or not writable by tools.

        These names prevent ``remove_empty_folders`` from removing it.
        """
        with suppress(OSError, ToolError), self.open_parent(path, create=False) as (folder, name):
            fd = calls.open_at(name, FOLDER, folder)
            try:
                with calls.scandir(fd) as entries:
                    return [entry.name for entry in entries]
            finally:
                calls.close(fd)
        return None

    def _open_or_create_child_folder(
        self, parent: Fd, parts: Sequence[str], path: str, created: list[str] | None
    ) -> Fd:
        """Open the folder ``parts[-1]`` in *parent*. Create a missing one and append *parts* to *created*, unless *created* is ``None``."""
        name = parts[-1]
        try:
            fd = calls.open_at(name, FOLDER, parent)
        except FileNotFoundError as error:
            if created is None:
                _raise_path_error(error, path)
            fd = self._create_and_open_child_folder(parent, parts, path, created)
        except OSError as error:
            _raise_path_error(error, path, link=error.errno in LINK and read_link(parent, name) is not None and name)
        try:
            self._require_allowed_device(fd, path)
        except ToolError:
            calls.close(fd)
            raise
        return fd

    def _create_and_open_child_folder(self, parent: Fd, parts: Sequence[str], path: str, created: list[str]) -> Fd:
        """Create the folder ``parts[-1]`` in *parent*, append *parts* to *created*, and open it. If it exists, only open it."""
        name = parts[-1]
        try:
            with suppress(FileExistsError):  # another process created it; the next line checks its kind
                calls.mkdir(name, 0o755, parent)
                created.append("/".join(parts))
            return calls.open_at(name, FOLDER, parent)
        except OSError as error:
            _raise_path_error(error, path, link=error.errno in LINK and name)


def _raise_path_error(error: OSError, path: str, *, link: str | bool = False) -> NoReturn:
    """Raise the ``ToolError`` for a failed step along a path: ``Missing``, or one that names the link or the cause."""
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
    """Return the target of a symbolic link, or ``None`` if *name* is not a readable link."""
    try:
        return calls.readlink(name, folder)
    except OSError:
        return None


def _is_home_or_above(folder: str) -> bool:
    """Return whether a folder of this machine is ``/`` or contains the home folder; False if it does not exist."""
    try:
        return is_home_or_above(os.stat(folder))  # noqa: PTH116  (samestat takes this)
    except OSError:  # a container of another machine
        return False


def special_file_kind(mode: int) -> str:
    """Return the kind of a file that is neither a regular file nor a folder, such as ``"named pipe"``."""
    kinds = ((stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "character device"))
    return next((word for test, word in kinds if test(mode)), "block device")
