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
import re
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
from stepengine.workspace.user_state import get_user_state_folder, is_writable_only_by_user

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
SEPARATORS = re.compile(r"[-_.]+")


@frozen
class UntrustedFolder:
    """
    A folder of agent files that is not trusted.

    Attributes:
        folder: The real path of the folder.
        owner: The user id of the folder's owner.
        files: The names of the agent files.
    """

    folder: Path
    owner: int
    files: tuple[str, ...]

    def __str__(self) -> str:
        # All of them: who trusts the folder agrees to run each.
        return f"{str(self.folder)!r} ({', '.join([repr(name) for name in self.files])})"

    @property
    def project(self) -> Path:
        """The parent folder."""
        return self.folder.parent

    @property
    def trust_command(self) -> str:
        """The shell command that trusts the folder."""
        return f"stepengine agents trust {shlex.quote(str(self.project))}"


@frozen
class AccessRequest:
    """
    The tools, agents, folders and hosts that the agents of an installed package ask for.

    Attributes:
        package: The name of the installed package, as pip shows it.
        version: The version of the package.
        publisher: The claimed publisher, with which the ids of its agents start.
        asks: The requested accesses, one line each.
    """

    package: str
    version: str
    publisher: str
    asks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.package} {self.version}, with the claimed publisher {self.publisher!r}"

    @property
    def approve_command(self) -> str:
        """The shell command that approves the requests."""
        return f"stepengine agents agree {self.package}"


class TrustGate(Protocol):
    """Decides whether untrusted folders and packages may run, and reports those that may not."""

    def allows(self, foreign: UntrustedFolder) -> bool:
        """Return whether its files may run."""

    def approves_access(self, request: AccessRequest) -> bool:
        """Return whether the requests of a package are approved."""

    def print_message(self, message: str) -> None:
        """Print a message for the user."""


GATE: ContextVar[TrustGate | None] = ContextVar("stepengine_trust", default=None)
"""The command line's; a program has none and is judged by what runs in it already."""

SANDBOXED: ContextVar[frozenset[str]] = ContextVar("stepengine_sandboxed", default=frozenset())
"""Real paths of files and folders, and names of installed packages, whose code runs in the sandbox alone."""

_RAN: set[Path] = set()


def is_sandboxed(file: Path) -> bool:
    """Return whether ``SANDBOXED`` lists a file or a folder above it, so that its code runs in the sandbox alone."""
    listed = SANDBOXED.get()
    return bool(listed) and any(str(place) in listed for place in (file.resolve(), *file.resolve().parents))


def is_package_sandboxed(name: str) -> bool:
    """Return whether ``SANDBOXED`` lists an installed package, in any spelling of its name."""
    plain = normalise_package_name(name)
    return any(normalise_package_name(listed) == plain for listed in SANDBOXED.get())


def find_untrusted_folder(folder: Path) -> UntrustedFolder | None:
    """Return a folder of agent files that is not trusted; ``None`` when it is trusted, holds none, or cannot be read."""
    try:
        real = folder.resolve(strict=True)
        files = tuple(sorted([f.name for f in real.glob("*.py") if not f.name.startswith("_")]))
        if not files or is_trusted(real):
            return None
        return UntrustedFolder(real, real.stat().st_uid, files)
    except (OSError, RuntimeError):
        return None


def may_run_agent_files(folder: Path) -> bool:
    """
    Return whether the agent files of a folder that is not in the command may run. Print a message if they may not.

    On the command line that takes trust. In a program it is enough that code of the folder runs already: its main file
    lies there, Python imports from there, a file of it was loaded by its path, or tests run, which a developer started.
    """
    foreign = find_untrusted_folder(folder)
    if foreign is None or foreign.folder in _RAN:
        return True
    gate = GATE.get()
    if gate is not None:
        return gate.allows(foreign)
    if _is_trusted_without_asking(foreign):
        return True
    log_once(f"{foreign} was not run: it is not trusted; to trust it, run `{foreign.trust_command}`")
    return False


def print_or_log_message(message: str) -> None:
    """Print a message on the command line; elsewhere log it. Repeated messages are skipped."""
    gate = GATE.get()
    (log_once if gate is None else gate.print_message)(message)


def mark_folder_as_run(file: Path) -> None:
    """Record that code of a file's folder runs in this process, which makes the folder trusted here; ignore a sandboxed file."""
    if not is_sandboxed(file):
        _RAN.add(file.resolve().parent)


def _is_trusted_without_asking(untrusted: UntrustedFolder) -> bool:
    """Return whether this process runs tests, or already runs code from this user's (or root's) folder or project."""
    if PLUGIN in sys.modules:
        return True
    if untrusted.owner not in (0, os.geteuid()):
        return False
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and Path(main).resolve().is_relative_to(untrusted.project):
        return True
    return any(Path(entry).resolve() in (untrusted.project, untrusted.folder) for entry in sys.path)


def refuse_inside_tool(operation: str) -> None:
    """
    Raise if a tool runs this process, since only a person may do *operation*: a model could approve its own calls.

    Raises:
        DefinitionError: in a command that a tool runs.
    """
    from stepengine.workspace.environment import MARKER

    if os.environ.get(MARKER):
        msg = f"{operation} is only for people, and a tool of an agent called it. Run it in your own terminal"
        raise DefinitionError(msg)


# --- what is trusted --------------------------------------------------------------------------------------------------


def is_trusted(folder: Path) -> bool:
    """Return whether a person trusted a folder of agent files, at this real path and with this owner."""
    real = folder.resolve()
    place = _find_trust_record_folder(real)
    record = None if place is None else _read_trust_record(place / _make_record_file_name(real))
    return record is not None and record == {"path": str(real), "owner": real.stat().st_uid}


def trust_folder(folder: Path) -> Path:
    """
    Trust a folder of agent files from now on, such as ``Path("agents")``, and return its real path.

    Raises:
        DefinitionError: when there is no such folder or no place for the record outside of it, or in a command that a tool runs.
    """
    refuse_inside_tool("trust_folder")
    if not folder.is_dir():
        msg = f"there is no folder {str(folder)!r} of agent files; create it, or name another one"
        raise DefinitionError(msg)
    real = folder.resolve()
    place = _find_trust_record_folder(real)
    if place is None:
        msg = (
            f"{str(real)!r} cannot be trusted: trust is stored in your state folder, which is {_explain_unsafe_state_folder(real)}; "
            "set STEPENGINE_STATE_DIR to a folder of your own"
        )
        raise DefinitionError(msg)
    _store_record(place, _make_record_file_name(real), {"path": str(real), "owner": real.stat().st_uid})
    return real


def untrust_folder(folder: Path) -> bool:
    """Withdraw the trust in a folder of agent files, also one that is gone; return whether it was trusted."""
    real = folder.resolve()
    return _remove_record(_find_trust_record_folder(real), _make_record_file_name(real))


def list_trusted_folders() -> list[Path]:
    """Return the real paths of the trusted folders, those that are gone included."""
    state = get_user_state_folder()
    found = [] if state is None else [_read_trust_record(file) for file in sorted((state / TRUSTED).glob("*.json"))]
    return sorted([Path(record["path"]) for record in found if record is not None])


def _make_record_file_name(real: Path) -> str:
    return f"{sha256(os.fsencode(real)).hexdigest()}.json"


def _find_trust_record_folder(real: Path) -> Path | None:
    """Return the state folder with the trust records; ``None`` if it is not safe for a record of *real*."""
    state = get_user_state_folder()
    return None if state is None or _explain_unsafe_state_folder(real) else state / TRUSTED


def _explain_unsafe_state_folder(real: Path) -> str:
    """Return why the state folder cannot hold a trust record for the folder *real*; ``""`` if it can."""
    from stepengine.workspace.skills import get_project_root

    state = get_user_state_folder()
    if state is None:
        return "missing, because there is no home folder"
    top, home = get_project_root(real.parent), Path(os.path.expanduser("~")).resolve()  # noqa: PTH111  (never raises)
    if state.resolve().is_relative_to(top) and not home.is_relative_to(top):
        return f"{str(state)!r}, inside the project {str(top)!r} itself"
    for folder in (state, state / TRUSTED):
        if folder.exists() and not is_writable_only_by_user(folder):
            return f"{str(folder)!r}, where other users can write"
    return ""


def _read_trust_record(file: Path) -> dict[str, Any] | None:
    """Return the trust record in a file; ``None`` if it is missing or invalid."""
    record = _read_json_object(file) or {}
    known = isinstance(record.get("path"), str) and type(record.get("owner")) is int
    return record if known else None


# --- what packages want -----------------------------------------------------------------------------------------------


def find_unapproved_access(request: AccessRequest) -> tuple[str, ...] | None:
    """Return the requests that are not approved; ``None`` if the package was never approved."""
    place = _find_approvals_folder()
    record = None if place is None else _read_json_object(place / _make_approval_file_name(request.package))
    if record is None or record.get("publisher") != request.publisher or not isinstance(record.get("asks"), list):
        return None
    return tuple([wanted for wanted in request.asks if wanted not in record["asks"]])


def approve_access(request: AccessRequest) -> None:
    """
    Approve the requests of a package, also for later versions that request no more.

    Raises:
        DefinitionError: when there is no place for the record.
    """
    place = _find_approvals_folder()
    if place is None:
        msg = "the approval cannot be stored: your state folder is missing, or other users can write to it; set STEPENGINE_STATE_DIR to a folder of your own"
        raise DefinitionError(msg)
    record = {
        "package": request.package,
        "version": request.version,
        "publisher": request.publisher,
        "asks": [*request.asks],
    }
    _store_record(place, _make_approval_file_name(request.package), record)


def withdraw_approval(package: str) -> bool:
    """Withdraw the approval of a package, also one that is gone; return whether it was approved."""
    return _remove_record(_find_approvals_folder(), _make_approval_file_name(package))


def _find_approvals_folder() -> Path | None:
    """Return the folder of approvals, existing or not; ``None`` without a state folder, or if other users can write there."""
    state = get_user_state_folder()
    if state is None or any(f.exists() and not is_writable_only_by_user(f) for f in (state, state / AGREED)):
        return None
    return state / AGREED


def _make_approval_file_name(package: str) -> str:
    return f"{sha256(normalise_package_name(package).encode()).hexdigest()}.json"


def normalise_package_name(name: str) -> str:
    """Return the name of a package as an index compares names (PEP 503)."""
    return SEPARATORS.sub("-", name).lower()


def _store_record(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Store a record in a folder of the user's state; raise ``DefinitionError`` if that cannot be written."""
    from stepengine.workspace.atomic import create_folder_durably, replace_path

    try:
        create_folder_durably(folder, 0o700)
        replace_path(folder / name, json.dumps(record).encode(), mode=0o600)
    except OSError as error:
        msg = f"{folder} cannot be written: {error.strerror or error}; set STEPENGINE_STATE_DIR to a folder of your own"
        raise DefinitionError(msg) from None


def _remove_record(folder: Path | None, name: str) -> bool:
    """Remove a record; return whether there was one."""
    if folder is None or not (folder / name).exists():
        return False
    (folder / name).unlink()
    return True


def _read_json_object(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; ``None`` if it cannot be read or is anything else."""
    try:
        with file.open("rb") as opened:
            record = json.loads(opened.read(MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


# --- by content -------------------------------------------------------------------------------------------------------


def hash_folder(folder: Path) -> str:
    """
    Return ``sha256:...`` of all files that a folder of agent files holds, below it too, names included.

    Raises:
        DefinitionError: when it has a link to a folder, more than 10,000 files or 64 MiB, or cannot be read.
    """
    digest, size = sha256(), 0
    try:
        for count, (name, file) in enumerate(_walk_files(folder.resolve(strict=True))):
            data = file.read_bytes() if file.stat().st_size <= MAX_CONTENT_BYTES else b""
            size += file.stat().st_size
            if count >= MAX_FILES or size > MAX_CONTENT_BYTES:
                msg = f"{str(folder)!r} has more than {MAX_FILES:,} files or {MAX_CONTENT_BYTES:,} bytes, and can be trusted only by its path"
                raise DefinitionError(msg)
            digest.update(b"%d %s %d " % (len(name), name, len(data)) + data)
    except (OSError, RuntimeError) as error:
        msg = f"{str(folder)!r} cannot be trusted by content: {error}"
        raise DefinitionError(msg) from None
    return f"sha256:{digest.hexdigest()}"


def _walk_files(folder: Path) -> Iterator[tuple[bytes, Path]]:
    """
    Yield the relative name and the path of each file, sorted within each folder; a link to a file counts as that file.

    Folders called ``__pycache__`` are left out.

    Raises:
        DefinitionError: for a link to a folder.
    """
    for above, folders, files in os.walk(folder):
        folders[:] = sorted([name for name in folders if name != CACHE])
        for name in folders:
            if Path(above, name).is_symlink():
                msg = f"{str(Path(above, name))!r} is a link to another folder; a folder without one is trusted by content"
                raise DefinitionError(msg)
        for file in [Path(above, name) for name in sorted(files)]:
            if file.is_file():
                yield os.fsencode(file.relative_to(folder)), file
