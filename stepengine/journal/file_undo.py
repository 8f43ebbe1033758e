"""
``undo``: restore the files that a run wrote, to their content before the run or before a part of it.

The records of the journal do not change. They contain the content of each file before a write, and its hash after it. The files are
compared with them under the rules of the file tools: below the root, through held folders, through no link.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Literal, TypeAlias

import attrs
from attrs import field, frozen

from stepengine.data.effects import KINDS
from stepengine.data.outcomes import Failure
from stepengine.errors import DefinitionError, ToolError, UndoRefused, UnknownOutcome
from stepengine.journal.divergence import describe_effect
from stepengine.journal.encoding import may_change_world_if_repeated
from stepengine.journal.history import History
from stepengine.journal.provenance import is_written_by_user
from stepengine.journal.recorded_part import JournalCut, parse_result_address
from stepengine.journal.records import Address, Intent, Result, format_address
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.journal.store import Journal
from stepengine.workspace import calls
from stepengine.workspace.atomic import hold_file_lock, replace_file, stat_regular_file
from stepengine.workspace.calls import FILE, Fd
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.root import Missing, OpenedEntry, Root
from stepengine.workspace.text import read_if_small
from stepengine.workspace.workspace import Workspace
from stepengine.workspace.writes import LARGE, FileWrite, OldFile, content_hash

Roots: TypeAlias = "str | os.PathLike[str] | Workspace | Sequence[str | os.PathLike[str] | Workspace]"
"""The folder or ``Workspace`` that ``file_tools`` was given, or all of them where there were several."""

Fate: TypeAlias = Literal["restored", "removed", "created", "unchanged"]
LISTED_FILES = 20
"""About one screen of files; further ones are only counted."""
CHANGES: tuple[Fate, ...] = ("restored", "removed", "created")
CHANGED = "it was changed later"
BETWEEN = "another program changed it between two writes of the run"
DOUBTFUL = "a write of it was interrupted and repeated, so its earlier content is unknown"
LOST = {
    LARGE: "not undoable: it had more than 4 MiB, too much for a journal to store",
    "": "not undoable: the journal does not store its content, which may be a secret",
}
ELSEWHERE = "it was written outside of the given folders"


@frozen(kw_only=True)
class UndoResult:
    """
    The result of an undo; paths are relative to their root.

    Attributes:
        restored: Files that have their earlier content again.
        removed: Removed files that the run had created, and removed empty folders that it had created for them.
        created: Files that the run had deleted and that exist again.
        unchanged: Files that were unchanged.
        left: Files that were left alone, each with the reason; only with *partial*.
        unknown: Started calls with an unknown outcome, such as ``"#3 tool_call str_replace"``.
        others: Other calls that may have changed the world and cannot be undone, such as
            ``"tool_call run_terminal_command (2 times)"``.
        dry_run: Whether nothing was changed and the result only lists the changes an undo would make.
        contents: After a dry run, the content that each restored or created file would have.
        modes: After a dry run, the permission bits that each of these files would have.
    """

    restored: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    dry_run: bool = False
    contents: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    modes: tuple[tuple[str, int], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        rows = [(word, path) for word in CHANGES for path in getattr(self, word)]
        lines = [f"{word:8}  {path}" for word, path in rows]
        lines += [f"{'left':8}  {path}: {why}" for path, why in self.left]
        if self.unchanged:
            lines.append(f"{len(self.unchanged)} unchanged")
        lines += [
            f"unknown: {call} started, and the journal does not record whether it finished" for call in self.unknown
        ]
        lines += [f"not undone: {call}, which records no undo data" for call in self.others]
        return "\n".join(lines or ["the run wrote no files"])


def undo(
    journal: JournalLike,
    root: Roots,
    *,
    at: int | str = -1,
    partial: bool = False,
    dry_run: bool = False,
    moved: bool = False,
    trust: bool = False,
    allow_secrets: Sequence[str] = (),
    allow_protected: Sequence[str] = (),
    cross_mounts: bool = False,
    allow_wide_root: bool = False,
) -> UndoResult:
    """
    Restore the files that a run and its children wrote with ``file_tools`` to their earlier content.

    If one file was changed since or cannot be restored, nothing is changed, unless *partial* is set. Effects of other tools, such as
    commands, are not undone; the result names them. An interrupted undo can be repeated.

    Args:
        journal: The journal of the run, or the path of its file. It is locked, and a torn tail is cut off; no record changes.
        root: The root folder or folders of ``file_tools``.
        at: The last effect whose writes stay: a number of the root's effects, or ``"path#number"``; by default none.
        partial: Restore the files that can be restored, and leave the others.
        dry_run: Only report the changes.
        moved: The root was moved since the run wrote; only for one root.
        trust: Also undo a journal that is not known as this user's in the state folder. Its content decides which
            files are written.
        allow_secrets: As with ``file_tools``.
        allow_protected: As with ``file_tools``.
        cross_mounts: As with ``file_tools``.
        allow_wide_root: As with ``file_tools``.

    Raises:
        UndoRefused: when a file cannot be restored, or the journal is not known as this user's; the error names the files,
            and nothing was changed.
        JournalLocked: when the run is still running.
        JournalError: when the journal is damaged, or there is no effect *at*.
        DefinitionError: when a root is not a folder or too wide.
        OSError: when the disk fails during the undo; repeat the undo to complete it.
    """
    source = as_journal(journal)
    policy = PathPolicy(
        allow_secrets=allow_secrets,
        allow_protected=allow_protected,
        cross_mounts=cross_mounts,
        allow_wide_root=allow_wide_root,
    )
    options = UndoOptions(partial=partial, dry_run=dry_run, moved=moved, policy=policy)
    history = source.history()
    if history.head is None:
        raise source.make_missing_error()
    is_refused = not (dry_run or trust or is_written_by_user(source))
    with ExitStack() as held:
        if not (dry_run or is_refused):
            # Nobody writes the journal meanwhile, so the run does not go on.
            history = held.enter_context(closing(source.writer())).history
        path, seq = parse_result_address(history, at)
        cut = JournalCut(history.tree)
        cut.cut_at((path, seq + 1))
        if is_refused:
            refuse_untrusted_undo(
                source,
                history,
                root,
                cut.keeps_result,
                options,
                remedy="undo(journal, root, trust=True) (--trust-journal)",
            )
        return undo_writes(history, root, cut.keeps_result, options)


@frozen(kw_only=True)
class UndoOptions:
    """How writes are undone; see ``undo``."""

    partial: bool = False
    dry_run: bool = False
    moved: bool = False
    policy: PathPolicy = PathPolicy()


def refuse_untrusted_undo(
    journal: Journal,
    history: History,
    root: Roots,
    keeps_effect: Callable[[Address], bool],
    options: UndoOptions,
    *,
    remedy: str,
) -> None:
    """
    Raise if the writes of a journal that is not known as this user's would change a file.

    Raises:
        UndoRefused: when a file would be changed; the error names each file with its change.
    """
    plan = undo_writes(history, root, keeps_effect, attrs.evolve(options, dry_run=True, partial=True))
    rows = [(path, f"would be {fate}") for fate in CHANGES for path in getattr(plan, fate)]
    if rows:
        # All of them: who trusts the journal agrees to each change.
        listed = "; ".join([f"{path} {change}" for path, change in rows])
        msg = (
            f"nothing was undone: {journal.name} is not known to come from a run of yours, and it would change these files: "
            f"{listed}. If you trust it: {remedy}"
        )
        raise UndoRefused(msg, files=rows)


def undo_writes(
    history: History,
    root: Roots,
    keeps_effect: Callable[[Address], bool],
    options: UndoOptions,
) -> UndoResult:
    """Undo the file writes of all results that *keeps_effect* rejects, or only report them for a dry run; see ``undo``."""
    with ExitStack() as held:
        files = _list_written_files(history, keeps_effect, _open_roots(root, options, held), moved=options.moved)
        for file in files:
            file.determine_fate()
        stuck = tuple([(file.path, file.problem) for file in files if file.problem])
        if stuck and not options.partial:
            raise _make_refused_error(stuck)
        whole = [file for file in files if not file.problem]
        for file in [] if options.dry_run else whole:
            file.restore_or_remove()
        removed = list(_find_folders_to_remove(whole) if options.dry_run else _remove_empty_folders(whole))
    written = [file for file in whole if options.dry_run and file.fate in ("restored", "created")]
    return UndoResult(
        restored=_list_paths_with_fate(whole, "restored"),
        removed=(*_list_paths_with_fate(whole, "removed"), *[f"{folder}/" for folder in removed]),
        created=_list_paths_with_fate(whole, "created"),
        unchanged=_list_paths_with_fate(whole, "unchanged"),
        left=stuck,
        unknown=tuple(_list_calls_in_doubt(history, keeps_effect)),
        others=tuple(_list_calls_without_undo(history, keeps_effect)),
        dry_run=options.dry_run,
        contents=tuple([(file.path, file.old_content) for file in written]),
        modes=tuple([(file.path, file.old_mode) for file in written]),
    )


def _list_paths_with_fate(files: Iterable[_WrittenFile], fate: Fate) -> tuple[str, ...]:
    return tuple([file.path for file in files if file.fate == fate])


def _remove_empty_folders(files: Iterable[_WrittenFile]) -> Iterator[str]:
    """Remove the empty folders created for the files, the deepest first, and yield them."""
    for root, folder in _list_created_folders(files):
        yield from root.remove_empty_folders([folder])


def _find_folders_to_remove(files: Sequence[_WrittenFile]) -> Iterator[str]:
    """Yield the folders that would be empty after the undo, the deepest first."""
    gone = {(file.root, file.path) for file in files if file.fate == "removed"}
    for root, folder in _list_created_folders(files):
        names = root.find_removal_obstacles(folder)
        if names is not None and all((root, f"{folder}/{name}") in gone for name in names):
            gone.add((root, folder))
            yield folder


def _list_created_folders(files: Iterable[_WrittenFile]) -> Iterator[tuple[Root, str]]:
    """Yield the folders created for the files, the deepest first."""
    places = {(file.root, folder) for file in files for folder in file.folders}
    for root, folder in sorted(places, key=lambda place: (-place[1].count("/"), place[1])):
        if root is not None:
            yield root, folder


def _make_refused_error(problems: Sequence[tuple[str, str]]) -> UndoRefused:
    """Return the error for an undo that was refused because of *problems*, pairs of path and reason."""
    listed = "; ".join([f"{path}: {why}" for path, why in problems[:LISTED_FILES]])
    more = f"; and {len(problems) - LISTED_FILES} more" if len(problems) > LISTED_FILES else ""
    msg = f"nothing was undone, because {len(problems)} of the files cannot be restored: {listed}{more}. partial=True (--partial) undoes the rest"
    return UndoRefused(msg, files=problems)


def _open_roots(root: Roots, options: UndoOptions, exit_stack: ExitStack) -> dict[str, Root]:
    """Open the root folders and return them by id; *exit_stack* closes them."""
    folders = [root] if isinstance(root, str | os.PathLike | Workspace) else list(root)
    if not folders or (options.moved and len(folders) > 1):
        msg = "undo needs the folder that you passed to file_tools, or several; with moved=True exactly one"
        raise DefinitionError(msg)
    made = [Root(folder, options.policy) for folder in folders]
    for each in made:
        exit_stack.callback(each.close)
    return {each.id: each for each in made}


# --- what the journal says ----------------------------------------------------------------------------------------------


def _list_written_files(
    history: History, keeps_effect: Callable[[Address], bool], roots: dict[str, Root], *, moved: bool
) -> list[_WrittenFile]:
    """Return the files that were written, each with all its writes, in the order of their first ones."""
    only = next(iter(roots.values()))
    files: dict[tuple[str, str], _WrittenFile] = {}
    for result in _list_dropped_results(history, keeps_effect):
        for write in history.writes(result) if result.writes else ():
            key = (write.root, write.path)
            if key not in files:
                files[key] = _WrittenFile(only if moved else roots.get(write.root), write)
            else:
                files[key].add_write(write)
    return list(files.values())


def _list_dropped_results(history: History, keeps_effect: Callable[[Address], bool]) -> Iterator[Result]:
    """Yield the results that *keeps_effect* rejects."""
    for record in history.records:
        if isinstance(record, Result) and not keeps_effect(record.address):
            yield record


def _list_dropped_changing_effects(
    history: History, keeps_effect: Callable[[Address], bool]
) -> Iterator[tuple[Intent, Result | None]]:
    """Yield the dropped effects that change the world, with their results; effects that start a run are left out."""
    for address, intent in history.intents.items():
        if KINDS[intent.type].changes_world and not intent.starts_child_or_body and not keeps_effect(address):
            yield intent, history.results.get(address)


def _list_calls_in_doubt(history: History, keeps_effect: Callable[[Address], bool]) -> Iterator[str]:
    """Yield the dropped calls with an unknown outcome."""
    for intent, result in _list_dropped_changing_effects(history, keeps_effect):
        outcome = None if result is None else history.outcome(result)
        if outcome is None or (isinstance(outcome, Failure) and isinstance(outcome.error, UnknownOutcome)):
            yield f"{format_address(intent.path, intent.seq)} {describe_effect(history.form(intent))}"


def _list_calls_without_undo(history: History, keeps_effect: Callable[[Address], bool]) -> Iterator[str]:
    """Yield the successful calls that may have changed the world and recorded nothing to undo it."""
    counted = Counter[str]()
    for intent, result in _list_dropped_changing_effects(history, keeps_effect):
        if result is None or result.writes or not may_change_world_if_repeated(history.form(intent)):
            continue
        outcome = history.outcome(result)
        if not isinstance(outcome, Failure) and not getattr(getattr(outcome, "value", None), "is_error", False):
            counted[describe_effect(history.form(intent))] += 1
    for call, times in counted.items():
        yield f"{call} ({times} time{'s' if times > 1 else ''})"


# --- one file -----------------------------------------------------------------------------------------------------------


class _WrittenFile:
    """
    A file that a run wrote: its content before the first write and after the last, and its fate.

    Attributes:
        path: The path, relative to the root.
        root: The root folder of the file; ``None`` if the caller did not pass that root.
        folders: The folders created for the file.
        problem: The reason why the file cannot be restored; ``""`` if it can.
        fate: What the undo does with the file.
    """

    def __init__(self, root: Root | None, first: FileWrite) -> None:
        self.path = first.path
        self.problem = "" if root is not None else ELSEWHERE
        self.fate: Fate = "unchanged"
        self.root = root
        self.folders = list(first.folders)
        self._before: OldFile | None = first.before
        # All that the run left there: after a part of it was undone the file may hold any of these.
        self._states = [first.hash_before, first.after]
        if first.doubtful:
            self.problem = self.problem or DOUBTFUL

    def add_write(self, write: FileWrite) -> None:
        """Add a further write, which must start from the content that the one before left, unless it is doubtful."""
        if write.hash_before != self._states[-1] and not write.doubtful:
            self.problem = self.problem or BETWEEN
        self._states.append(write.after)
        self.folders += write.folders

    @property
    def old_content(self) -> bytes:
        """The content before the first write."""
        return (self._before.content if self._before is not None else None) or b""

    @property
    def old_mode(self) -> int:
        """The permission bits before the first write; 0 if there was no file."""
        return 0 if self._before is None else self._before.mode

    def determine_fate(self) -> None:
        """Read the file, and set its ``fate`` or the ``problem`` that prevents undoing; nothing is changed."""
        if self.problem or self.root is None:
            return
        try:
            with self.root.open_parent(self.path, create=False) as (folder, name), hold_file_lock(folder, name):
                self._set_fate(*self._read_file_state(folder, name))
        except Missing:
            self._set_fate(None, None)
        except ToolError as error:
            self.problem = error.message
        except OSError as error:
            self.problem = f"it cannot be used: {error.strerror or type(error).__name__}"

    def _set_fate(self, info: os.stat_result | None, current_hash: str | None) -> None:
        """Set ``fate`` or ``problem`` from the present status and content hash of the file; ``None`` for a missing file."""
        old = self._before
        if current_hash == "":  # too large to be looked at, and no run leaves such a file
            self.problem = CHANGED
        elif current_hash == (None if old is None else old.hash) and (
            old is None or info is None or stat.S_IMODE(info.st_mode) & 0o777 == old.mode
        ):
            self.fate = "unchanged"
        elif current_hash not in self._states:
            self.problem = CHANGED if current_hash is not None else "it was deleted later"
        elif old is None:
            self.fate = "removed"
        elif old.content is None:
            self.problem = LOST.get(old.lost, LOST[""])
        else:
            self.fate = "created" if current_hash is None else "restored"

    def _read_file_state(self, folder: Fd, name: str) -> tuple[os.stat_result | None, str | None]:
        """Return the file's status and the hash of its content; ``""`` is the hash of one that is too large."""
        assert self.root is not None  # noqa: S101 - without one it has a problem
        info = stat_regular_file(folder, name, self.path)
        if info is None:
            return None, None
        fd = calls.open_at(name, FILE, folder)
        try:
            self.root.check_readable_file(OpenedEntry(fd, self.root.split_path(self.path), calls.fstat(fd)), self.path)
            data = read_if_small(fd)
        finally:
            calls.close(fd)
        return info, "" if data is None else content_hash(data)

    def restore_or_remove(self) -> None:
        """
        Restore or remove the file, according to its fate.

        Raises:
            UndoRefused: when the file was changed after ``determine_fate``.
        """
        if self.fate == "unchanged":
            return
        assert self.root is not None  # noqa: S101 - without one it has a problem
        fate = self.fate
        try:
            with (
                self.root.open_parent(self.path, create=fate == "created") as (folder, name),
                hold_file_lock(folder, name),
            ):
                info, now = self._read_file_state(folder, name)
                self._set_fate(info, now)
                if not self.problem and self.fate == fate:
                    self._write_or_unlink(folder, name, info)
                    return
            why = self.problem or CHANGED
        except ToolError as error:
            why = error.message
        msg = f"{self.path} was changed during the undo, which stopped there: {why}. Run the undo again to finish it"
        raise UndoRefused(msg, files=[(self.path, why)])

    def _write_or_unlink(self, folder: Fd, name: str, info: os.stat_result | None) -> None:
        """Write the former content of the file, or remove a file that did not exist."""
        old = self._before
        if old is None:
            calls.unlink(name, folder)
        else:
            replace_file(folder, name, old.content or b"", info, mode=old.mode)
