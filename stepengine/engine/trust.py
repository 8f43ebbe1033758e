"""
Trust in the agent files of a working folder: ``./agents`` is searched by id only where its code may run.

An agent file is a program, and a repository that was just cloned is somebody else's. So a person trusts a folder once, by its
real path and owner, which is kept in the user's state and never in the folder; by content where nobody can be asked. An
installed package says what its agents want, and a person agrees to that once. Lives here: what is trusted and agreed to, and
whether a folder's files may run. Must not be here: asking and printing; the command line does that.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from stepengine.errors import DefinitionError
from stepengine.runtime.logs import log_once
from stepengine.workspace.user_state import is_private, state_folder

__all__ = (
    "GATE",
    "LOCAL",
    "SANDBOXED",
    "Foreign",
    "TrustGate",
    "Wishes",
    "agree",
    "content_of",
    "foreign_at",
    "forget",
    "has_run",
    "is_sandboxed",
    "is_trusted",
    "may_run",
    "not_agreed",
    "tell",
    "trust",
    "trusted_folders",
    "withdraw",
)

LOCAL = Path("agents")
"""Where the agents of a working folder are."""
TRUSTED = "trusted"
AGREED = "agreed"
MAX_RECORD_BYTES = 1024 * 1024
"""A record of trust has some kilobytes; a larger file was not written by this program."""
MAX_FILES = 10_000
"""All files are hashed at each start: of more, that alone takes seconds, and the folder holds more than agents."""
MAX_CONTENT_BYTES = 64 * 1024 * 1024
"""Hashed in well under a second; a larger folder holds data, and is trusted by its path."""
CACHE = "__pycache__"
"""Not content: agent files are compiled from their source, whatever lies there."""
PLUGIN = "stepengine.pytest_plugin"


@frozen
class Foreign:
    """
    A folder of agent files that nobody trusted.

    Attributes:
        folder: Its real path.
        owner: The number of the user whom it belongs to.
        files: The names of its agent files.
    """

    folder: Path
    owner: int
    files: tuple[str, ...]

    def __str__(self) -> str:
        # All of them: who trusts the folder agrees to run each.
        return f"{str(self.folder)!r} ({', '.join([repr(name) for name in self.files])})"

    @property
    def project(self) -> Path:
        """The folder that holds it."""
        return self.folder.parent

    @property
    def how(self) -> str:
        """The command that trusts it, as a shell takes it."""
        return f"stepengine agents trust {shlex.quote(str(self.project))}"


@frozen
class Wishes:
    """
    What an installed package says that its agents want.

    Attributes:
        package: What is installed, as pip names it.
        version: Its version.
        publisher: What its agents' ids begin with.
        asks: What it wants, a line each.
    """

    package: str
    version: str
    publisher: str
    asks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.package} {self.version}, of which {self.publisher!r} says to be the publisher"

    @property
    def how(self) -> str:
        """The command that agrees to it."""
        return f"stepengine agents agree {self.package}"


class TrustGate(Protocol):
    """Who says whether a folder that is not trusted may run, and is told what did not."""

    def allows(self, foreign: Foreign) -> bool:
        """Return whether its files may run."""
        ...

    def agrees(self, wishes: Wishes) -> bool:
        """Return whether what an installed package wants was agreed to."""
        ...

    def tell(self, message: str) -> None:
        """Tell a person."""
        ...


GATE: ContextVar[TrustGate | None] = ContextVar("stepengine_trust", default=None)
"""The command line's; a program has none and is judged by what runs in it already."""

SANDBOXED: ContextVar[frozenset[str]] = ContextVar("stepengine_sandboxed", default=frozenset())
"""Real paths of files and folders, and names of installed packages, whose code runs in the sandbox alone."""

_RAN: set[Path] = set()


def is_sandboxed(file: Path) -> bool:
    """Return whether a file's code runs in the sandbox alone, by what was set."""
    listed = SANDBOXED.get()
    return bool(listed) and any(str(place) in listed for place in (file.resolve(), *file.resolve().parents))


def foreign_at(folder: Path) -> Foreign | None:
    """Return what a folder of agent files holds that nobody trusted; ``None`` when it is trusted, or holds none."""
    try:
        real = folder.resolve(strict=True)
        files = tuple(sorted([f.name for f in real.glob("*.py") if not f.name.startswith("_")]))
        if not files or is_trusted(real):
            return None
        return Foreign(real, real.stat().st_uid, files)
    except (OSError, RuntimeError):
        return None


def may_run(folder: Path) -> bool:
    """
    Return whether the agent files of a folder that nobody typed may run; a person is told when they may not.

    On the command line that takes trust. In a program it is enough that code of the folder runs already: its main file
    lies there, Python imports from there, a file of it was loaded by its path, or tests run, which a developer started.
    """
    foreign = foreign_at(folder)
    if foreign is None or foreign.folder in _RAN:
        return True
    gate = GATE.get()
    if gate is not None:
        return gate.allows(foreign)
    if _runs_already(foreign):
        return True
    log_once(f"{foreign} was not run: nobody trusts it yet; `{foreign.how}` does")
    return False


def tell(message: str) -> None:
    """Tell a person, once: at the command line or in the log."""
    gate = GATE.get()
    (log_once if gate is None else gate.tell)(message)


def has_run(file: Path) -> None:
    """Note that a file was named by its path: code of its folder runs in this process from now on."""
    _RAN.add(file.resolve().parent)


def _runs_already(foreign: Foreign) -> bool:
    if PLUGIN in sys.modules:
        return True
    if foreign.owner not in (0, os.geteuid()):
        return False
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and Path(main).resolve().is_relative_to(foreign.project):
        return True
    return any(Path(entry).resolve() in (foreign.project, foreign.folder) for entry in sys.path)


# --- what is trusted --------------------------------------------------------------------------------------------------


def is_trusted(folder: Path) -> bool:
    """Return whether a person trusted a folder of agent files, at this real path and with this owner."""
    real = folder.resolve()
    place = _records(real)
    if place is None:
        return False
    record = _read(place / _name(real))
    return record is not None and record == {"path": str(real), "owner": real.stat().st_uid}


def trust(folder: Path) -> Path:
    """
    Trust a folder of agent files from now on, and return its real path.

    Raises:
        DefinitionError: when there is no such folder, or nowhere to keep that outside of it.
    """
    from stepengine.workspace.atomic import make_folder, replace_path

    if not folder.is_dir():
        msg = f"there is no folder {str(folder)!r}; the folder that holds './agents' would be fine"
        raise DefinitionError(msg)
    real = folder.resolve()
    place = _records(real)
    if place is None:
        msg = (
            f"{str(real)!r} cannot be trusted: that is kept in your state folder, which is {_why_not(real)}; "
            "set STEPENGINE_STATE_DIR to a folder of your own"
        )
        raise DefinitionError(msg)
    try:
        make_folder(place, 0o700)
        record = {"path": str(real), "owner": real.stat().st_uid}
        replace_path(place / _name(real), json.dumps(record).encode(), mode=0o600)
    except OSError as error:
        msg = f"{place} cannot be written: {error.strerror or error}; set STEPENGINE_STATE_DIR to a folder of your own"
        raise DefinitionError(msg) from None
    return real


def forget(folder: Path) -> bool:
    """Trust a folder of agent files no longer, also one that is gone; return whether it was trusted."""
    real = folder.resolve()
    place = _records(real)
    if place is None or not (place / _name(real)).exists():
        return False
    (place / _name(real)).unlink()
    return True


def trusted_folders() -> list[Path]:
    """Return the real paths of the folders that are trusted, those that are gone included."""
    state = state_folder()
    found = [] if state is None else [_read(file) for file in sorted((state / TRUSTED).glob("*.json"))]
    return sorted([Path(record["path"]) for record in found if record is not None])


def _name(real: Path) -> str:
    return f"{sha256(os.fsencode(real)).hexdigest()}.json"


def _records(real: Path) -> Path | None:
    """Return where trust in a folder is kept; ``None`` where others may write, or the folder itself could bring it along."""
    state = state_folder()
    return None if state is None or _why_not(real) else state / TRUSTED


def _why_not(real: Path) -> str:
    from stepengine.workspace.skills import project_top

    state = state_folder()
    if state is None:
        return "nowhere, without a home folder"
    top, home = project_top(real.parent), Path(os.path.expanduser("~")).resolve()  # noqa: PTH111  (never raises)
    if state.resolve().is_relative_to(top) and not home.is_relative_to(top):
        return f"{str(state)!r}, inside of {str(top)!r} itself"
    for folder in (state, state / TRUSTED):
        if folder.exists() and not is_private(folder):
            return f"{str(folder)!r}, where others may write"
    return ""


def _read(file: Path) -> dict[str, Any] | None:
    record = _object(file) or {}
    known = isinstance(record.get("path"), str) and type(record.get("owner")) is int
    return record if known else None


# --- what packages want -----------------------------------------------------------------------------------------------


def not_agreed(wishes: Wishes) -> tuple[str, ...] | None:
    """Return the part that nobody has agreed to yet; ``None`` where nobody ever agreed to the package."""
    place = _agreements()
    record = None if place is None else _object(place / _file_of(wishes.package))
    if record is None or record.get("publisher") != wishes.publisher or not isinstance(record.get("asks"), list):
        return None
    return tuple([wanted for wanted in wishes.asks if wanted not in record["asks"]])


def agree(wishes: Wishes) -> None:
    """
    Agree to what a package wants, from now on, and in later versions as long as they want no more.

    Raises:
        DefinitionError: when there is nowhere to keep that.
    """
    from stepengine.workspace.atomic import make_folder, replace_path

    place = _agreements()
    if place is None:
        msg = "that cannot be kept: your state folder is not there, or others may write it; set STEPENGINE_STATE_DIR to a folder of your own"
        raise DefinitionError(msg)
    record = {
        "package": wishes.package,
        "version": wishes.version,
        "publisher": wishes.publisher,
        "asks": [*wishes.asks],
    }
    try:
        make_folder(place, 0o700)
        replace_path(place / _file_of(wishes.package), json.dumps(record).encode(), mode=0o600)
    except OSError as error:
        msg = f"{place} cannot be written: {error.strerror or error}; set STEPENGINE_STATE_DIR to a folder of your own"
        raise DefinitionError(msg) from None


def withdraw(package: str) -> bool:
    """Agree no longer to what a package wants, also one that is gone; return whether that was agreed to."""
    place = _agreements()
    if place is None or not (place / _file_of(package)).exists():
        return False
    (place / _file_of(package)).unlink()
    return True


def _agreements() -> Path | None:
    state = state_folder()
    if state is None or any(f.exists() and not is_private(f) for f in (state, state / AGREED)):
        return None
    return state / AGREED


def _file_of(package: str) -> str:
    # As an index compares names.
    plain = package.lower().replace("_", "-").replace(".", "-")
    return f"{sha256(plain.encode()).hexdigest()}.json"


def _object(file: Path) -> dict[str, Any] | None:
    try:
        with file.open("rb") as opened:
            record = json.loads(opened.read(MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


# --- by content -------------------------------------------------------------------------------------------------------


def content_of(folder: Path) -> str:
    """
    Return ``sha256:...`` of all files that a folder of agent files holds, below it too, names included.

    Raises:
        DefinitionError: when it has a link to a folder, more than 10,000 files or 64 MiB, or cannot be read.
    """
    digest, size = sha256(), 0
    try:
        for count, (name, file) in enumerate(_files_of(folder.resolve(strict=True))):
            data = file.read_bytes() if file.stat().st_size <= MAX_CONTENT_BYTES else b""
            size += file.stat().st_size
            if count >= MAX_FILES or size > MAX_CONTENT_BYTES:
                msg = f"{str(folder)!r} has more than {MAX_FILES:,} files or {MAX_CONTENT_BYTES:,} bytes, and is trusted by its path only"
                raise DefinitionError(msg)
            digest.update(b"%d %s %d " % (len(name), name, len(data)) + data)
    except (OSError, RuntimeError) as error:
        msg = f"{str(folder)!r} cannot be trusted by content: {error}"
        raise DefinitionError(msg) from None
    return f"sha256:{digest.hexdigest()}"


def _files_of(folder: Path) -> Iterator[tuple[bytes, Path]]:
    """Give the names below the folder and the files, in the order of their names; a link to a file counts as that file."""
    for above, folders, files in os.walk(folder):
        folders[:] = sorted([name for name in folders if name != CACHE])
        for name in folders:
            if Path(above, name).is_symlink():
                msg = f"{str(Path(above, name))!r} is a link to another folder; a folder without one is trusted by content"
                raise DefinitionError(msg)
        for file in [Path(above, name) for name in sorted(files)]:
            if file.is_file():
                yield os.fsencode(file.relative_to(folder)), file
