"""
Recording by default: the user's state folder, the files next to each journal, and the removal of old runs.

A run has a journal ``runs/<stem>.jsonl`` and a companion ``runs/<stem>.json`` with data that the journal lacks: the agent's file, the
working folder and the options. The companion is not part of the journal, and a run can be resumed without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from stepengine.cli.exits import print_error
from stepengine.cli.options import Options
from stepengine.cli.settings import UsageProblem
from stepengine.data.state import RunStatus
from stepengine.errors import DefinitionError, JournalError
from stepengine.journal.journal_files import lock_file, unlock_and_close
from stepengine.journal.recorded_runs import (
    STEM,
    RecordedRun,
    describe_unsafe_folder,
    find_process_start_ticks,
    get_runs_folder,
    list_runs,
    make_title,
    question_to_companion,
    read_companion,
    waits_to_companion,
)
from stepengine.redaction import ANY
from stepengine.workspace.atomic import replace_path
from stepengine.workspace.calls import OTHERS_BITS
from stepengine.workspace.installed import get_installed_version

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.engine.loader import AgentLocation
    from stepengine.journal import Journal
    from stepengine.permissions import Policy

EDITORS, HISTORY = "editors", "chat-history.jsonl"
"""Further content of the state folder: sessions of editors, inputs of chats."""
OWN = ("json", "jsonl", "jsonl.mail")
"""The suffixes of the files of a run; copies from before an extension have ``before-N.jsonl``."""
USER = re.compile("//[^/@]*@")
"""The user name and password in a URL."""
LISTED = 5


class StateProblem(Exception):
    """Runs cannot be recorded automatically. The message is one line with the reason."""


def find_chat_history_file() -> Path | None:
    """Return the path of the chat history; ``None`` without a home."""
    runs = get_runs_folder()
    return None if runs is None else runs.parent / HISTORY


def _get_or_create_runs_folder() -> Path:
    """
    Return the folder of recorded runs; create it for its owner if it is missing.

    Raises:
        StateProblem: when it cannot be written, or other users can write to it.
    """
    runs = get_runs_folder()
    if runs is None:
        msg = "no home folder found to record the run in; set STEPENGINE_STATE_DIR"
        raise StateProblem(msg)
    try:
        if not runs.parent.is_dir():
            runs.parent.mkdir(0o700, parents=True)
        if not runs.is_dir():
            runs.mkdir(0o700)
        if problem := describe_unsafe_folder(runs):
            raise StateProblem(problem)
        if runs.stat().st_mode & OTHERS_BITS:
            runs.chmod(0o700)
    except OSError as error:
        msg = f"{runs} cannot be used: {error.strerror}"
        raise StateProblem(msg) from None
    return runs


# --- lookup -----------------------------------------------------------------------------------------------------------


def list_recorded_runs(*, working_folder: Path | None = None, resumable_only: bool = False) -> list[RecordedRun]:
    """
    Return the recorded runs of this user, newest first, optionally only those of a folder or those that can be resumed.

    Raises:
        UsageProblem: when other users can write to the folder of runs.
    """
    try:
        return list_runs(working_folder=working_folder, waiting=resumable_only)
    except JournalError as error:
        raise UsageProblem(error.message) from None


def find_recorded_run_by_prefix(text: str) -> RecordedRun | None:
    """
    Return the run whose stem or run id starts with *text*; ``None`` if none does. Raise ``UsageProblem`` if several do.

    Raises:
        UsageProblem: when several runs match.
    """
    known = list_recorded_runs() if text and "/" not in text else []
    exact = [entry for entry in known if text in (entry.stem, entry.get_text("run_id"))]
    found = exact or [e for e in known if e.stem.startswith(text) or e.get_text("run_id").startswith(text)]
    if len(found) > 1:
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        msg = f"{text!r} is the start of several run names: {', '.join([e.stem for e in found[:LISTED]])}{more}"
        raise UsageProblem(msg)
    return found[0] if found else None


def get_newest_run(*, resumable_only: bool = False, skip: int = 0) -> RecordedRun:
    """
    Return the newest run of the working folder, after *skip* newer ones; raise ``UsageProblem`` if there is none.

    Args:
        resumable_only: Select the newest run that can be resumed.
        skip: The number of newer runs to skip.

    Raises:
        UsageProblem: when there is none.
    """
    found = list_recorded_runs(working_folder=Path.cwd(), resumable_only=resumable_only)[skip:]
    if not found:
        if resumable_only:
            what = (
                "that waits or was interrupted; one that ended can be repeated with `replay`, or branched with `fork`"
            )
        else:
            what = "before the last one" if skip else "yet; `stepengine run AGENT` records one"
        msg = f"this folder has no run {what}; `stepengine runs --all` lists those of all folders"
        raise UsageProblem(msg)
    return found[0]


def find_recorded_run_by_journal(journal: str) -> RecordedRun | None:
    """Return the recorded run with the journal of this name; ``None`` if there is none."""
    path = _make_journal_absolute(journal)
    try:
        return next(
            (entry for entry in list_recorded_runs() if path in (entry.journal, entry.get_text("journal"))), None
        )
    except UsageProblem:
        return None


def find_recorded_agent_file(entry: RecordedRun) -> str:
    """Return the recorded agent file, such as ``FILE#id``; ``""`` if none is recorded or it is gone, so that the id must be looked up."""
    from stepengine.engine.loader import AgentLocation

    file = entry.get_text("agent", "file")
    place = AgentLocation.from_text(file) if file else None
    return file if place is not None and place.file.is_file() else ""


def fill_options_from_recorded(options: Options, entry: RecordedRun) -> Options:
    """Return *options* with options that were not typed filled from a recorded run; print a warning if the agent file has changed."""
    from stepengine.engine.loader import AgentLocation

    recorded = entry.info.get("options")
    recorded = recorded if isinstance(recorded, Mapping) else {}
    models = recorded.get("models")
    agents = models if isinstance(models, Mapping) else ()
    file = find_recorded_agent_file(entry)
    place = AgentLocation.from_text(file) if file else None
    if place is not None and not options.agent:
        known = entry.get_text("agent", "sha256")
        if known and known != _hash_file(place.file):
            print_error(f"warning: {place.file} has changed since this run was recorded")
    config = entry.get_text("options", "config")
    return attrs.evolve(
        options,
        journal=entry.journal,
        stem=entry.stem,
        agent=options.agent or file,
        cwd=options.cwd if options.cwd != Path() else Path(entry.get_text("options", "cwd") or entry.get_text("cwd")),
        workspace=options.workspace or entry.get_text("options", "workspace"),
        base_url=options.base_url or ("" if options.script else entry.get_text("options", "base_url")),
        # The key belongs to the recorded server: a typed server does not receive it.
        api_key_env=options.api_key_env
        or ("" if options.script or options.base_url else entry.get_text("options", "api_key_env")),
        price=options.price or entry.get_text("options", "price"),
        script=choose_script(options, entry),
        served=(entry.get_text("options", "model"), *[entry.get_text("options", "models", agent) for agent in agents]),
        web=options.web or entry.get_text("options", "web"),
        write=options.write or recorded.get("write") is True,
        shell=options.shell or recorded.get("shell") is True,
        code_mode=recorded.get("code_mode") is True,
        ask_for_more=recorded.get("ask_for_more") is True,
        asks=recorded.get("asks") is True,
        config=options.config or (Path(config) if config else None),
        chat_policy=read_chat_policy(entry),
    )


def read_chat_policy(entry: RecordedRun) -> Policy | None:
    """Return the policy of a chat at a recorded turn: its mode and session rules; ``None`` if none is recorded."""
    recorded = entry.info.get("options")
    changes = recorded.get("policy") if isinstance(recorded, Mapping) else None
    if changes is None:
        return None
    from stepengine.permissions import Policy

    return Policy.from_json(changes, where=f"the policy of {entry.stem}")


def _encode_chat_policy(options: Options) -> dict[str, Any] | None:
    """Return the mode and the session rules of the chat's policy as JSON; ``None`` if it has no policy."""
    policy: Policy | None = options.policy or options.chat_policy
    if policy is None:
        return None
    rules = [rule for rule in policy.rules if rule.scope.kind == "session"]
    return attrs.evolve(policy, rules=rules, remembered=()).to_json()


def choose_script(options: Options, entry: RecordedRun) -> str:
    """Return the typed script, else the recorded one unless a model, a server or a key variable was typed."""
    is_live = any((options.model, options.base_url, options.api_key_env))
    return options.script or ("" if is_live else entry.get_text("options", "script"))


# --- recording --------------------------------------------------------------------------------------------------------


def has_started_run(journal: Journal) -> bool:
    """Return whether a journal holds a run that has started, and not only a head."""
    try:
        return len(journal.records()) > 1
    except JournalError:
        return False


class RunRecording:
    """
    The companion file of a run. As a context manager, it removes the companion of a run that never started.

    Attributes:
        journal: The journal of the run; ``None`` if it is not recorded.
    """

    def __init__(self, journal: Journal | None, entry: RecordedRun | None = None, *, is_new: bool = False) -> None:
        self.journal = journal
        self._entry = entry
        self._is_new = is_new

    @property
    def stem(self) -> str:
        """The name of the run; ``""`` without a companion."""
        return "" if self._entry is None else self._entry.stem

    @classmethod
    def create(cls, options: Options, journal: Journal | None, **about: Any) -> Self:
        """
        Create the companion, and the journal if needed, of a new run; remove old runs above the limits, and print an error.

        There is no companion if recording is switched off, or if the state folder cannot be used; the reason is then printed.

        Args:
            options: The options and settings of the command.
            journal: The requested journal; ``None`` for one in the state folder.
            about: Further data of the companion: ``command``, ``agent_id``, ``prompt``, ``forked_from``, ``session_id``.
        """
        settings = options.settings
        if options.no_journal or not settings.get("journal.record"):
            return cls(journal)
        from stepengine.journal import FileJournal

        try:
            folder = _get_or_create_runs_folder()
            _remove_runs_over_limits(folder, settings.get("journal.keep_runs"), settings.get("journal.keep_bytes"))
            stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
            made = journal or FileJournal(folder / f"{stem}.jsonl")
            entry = RecordedRun(stem, _make_companion_data(options, made.address, **about), folder)
            _write_companion_file(entry)
        except (OSError, StateProblem) as problem:
            what = "`stepengine runs` does not list this run" if journal else "this run is not recorded"
            print_error(f"{what}: {problem}")
            return cls(journal)
        return cls(made, entry, is_new=True)

    def record_start(self, run_id: str) -> None:
        """Write the run id to the companion; as the run has started, it is not removed at the end of the block."""
        self._is_new = False
        self._update_companion_file(run_id=run_id)

    def record_end(self, result: RunResult) -> None:
        """Write the status, questions, waits, usage and cost of an ended or suspended run to the companion."""
        status = result.status.value
        if self.journal is not None:
            from stepengine.journal.provenance import record_permission_review

            record_permission_review(self.journal)
        if self._entry is None:
            return
        if result.status is RunStatus.CANCELLED and self.journal is not None:
            with contextlib.suppress(JournalError):
                status = status if self.journal.history().is_complete else "interrupted"
        self._is_new = False
        self._update_companion_file(
            run_id=self._get_run_id(result),
            status=status,
            questions=[question_to_companion(question) for question in result.pending_questions],
            waits=waits_to_companion(result.waits_for),
            usage=attrs.asdict(result.usage),
            cost=None if result.cost is None else str(result.cost),
        )

    def _get_run_id(self, result: RunResult) -> str:
        """Return the run id: from the journal for a fork, else from the result."""
        if self.journal is None or self._entry is None or not self._entry.info.get("forked_from"):
            return result.state.run_id
        from stepengine.journal.show import get_run_id

        return get_run_id(self.journal.history())

    def _update_companion_file(self, **changes: object) -> None:
        """Read the companion again and write it with *changes*; print an error if it cannot be written."""
        if self._entry is None:
            return
        info = read_companion(self._entry.folder, self._entry.stem) or self._entry.info
        self._entry = self._entry._replace(info={**info, **changes, "updated": _format_now()})
        try:
            _write_companion_file(self._entry)
        except OSError as error:
            print_error(f"{self._entry.folder} cannot be written: {error.strerror or error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_new and self._entry is not None and not (self.journal and has_started_run(self.journal)):
            (self._entry.folder / f"{self._entry.stem}.json").unlink(missing_ok=True)


def _make_companion_data(
    options: Options,
    journal: str,
    *,
    command: str,
    agent_id: str,
    prompt: str = "",
    forked_from: object = None,
    session_id: str | None = None,
) -> dict[str, object]:
    """Return the content of the companion of a new run: command, agent, folder, journal and options."""
    installed = get_installed_version("stepengine") or ""
    place, now = _find_agent_location(options.agent or agent_id, options), _format_now()
    file = None if place is None else place.file
    return {
        "version": 1,
        "run_id": None,
        "command": command,
        "agent": {
            "id": agent_id,
            "file": None if place is None else str(place),
            "sha256": _hash_file(file) if file else None,
        },
        "cwd": str(Path.cwd()),
        "journal": _make_journal_absolute(journal),
        "created": now,
        "updated": now,
        "status": "running",
        "pid": os.getpid(),
        "pid_began": find_process_start_ticks(os.getpid()),
        "options": {
            "model": ANY.text(options.main_model),
            "models": {agent: ANY.text(model) for agent, model in options.models.items() if agent},
            "base_url": ANY.text(USER.sub("//", options.base_url)),
            "api_key_env": ANY.text(options.api_key_env),
            "price": options.price,
            "script": str(Path(options.script).absolute()) if options.script else "",
            "cwd": str(options.cwd.resolve()),
            "workspace": ANY.text(options.workspace),
            "write": options.write,
            "shell": options.shell,
            "code_mode": options.code_mode,
            "ask_for_more": options.ask_for_more,
            "asks": options.asks,
            "web": ANY.text(USER.sub("//", options.web)),
            "max_steps": options.max_steps,
            "max_cost": options.max_cost,
            "config": None if options.config is None else str(options.config.absolute()),
            "policy": _encode_chat_policy(options),
        },
        "session_id": session_id,
        "forked_from": forked_from,
        "title": make_title(prompt),
        "questions": [],
        "waits": [],
        "usage": None,
        "cost": None,
        "stepengine": installed,
    }


def _find_agent_location(agent: str, options: Options) -> AgentLocation | None:
    """Return the file of an agent with an absolute path; ``None`` if it is not found."""
    from stepengine.engine.loader import locate_agent

    try:
        place = locate_agent(agent, folders=options.settings.agent_folders)
        return attrs.evolve(place, file=place.file.resolve())
    except DefinitionError:
        return None


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    return sha256(file.read_bytes()).hexdigest()


def _make_journal_absolute(journal: str) -> str:
    """Return the name of a journal with an absolute path; ``#RUN`` of a database stays."""
    file, separator, run = journal.rpartition("#")
    return (
        f"{Path(file).absolute()}#{run}" if separator and not Path(journal).exists() else str(Path(journal).absolute())
    )


def _format_now() -> str:
    """Return the current time in ISO 8601, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _write_companion_file(entry: RecordedRun) -> None:
    """Replace the companion atomically; only its owner can read it."""
    replace_path(entry.folder / f"{entry.stem}.json", json.dumps(entry.info).encode(), mode=0o600)


# --- removal ----------------------------------------------------------------------------------------------------------


def _remove_runs_over_limits(folder: Path, keep_runs: int, keep_bytes: int) -> None:
    """Remove the oldest ended runs until *keep_runs* and *keep_bytes* hold; do nothing while another process removes runs."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock_file(descriptor, folder / ".lock", unsafe_no_lock=True)
        _remove_runs_while_locked(folder, keep_runs, keep_bytes)
    except JournalError:
        pass  # another process removes runs
    finally:
        unlock_and_close(descriptor)


def _remove_runs_while_locked(folder: Path, keep_runs: int, keep_bytes: int) -> None:
    """Remove the oldest ended runs until both limits hold; the caller holds the lock of the folder."""
    files = _list_run_files(folder)
    # This is called before every run: companions are read only if a limit is exceeded.
    if len(files) <= keep_runs and sum([sum(of.values()) for of in files.values()]) <= keep_bytes:
        return
    known = list_recorded_runs()
    alive = {e.get_text("forked_from", "stem") for e in known if not e.is_ended}
    ended = sorted([e for e in known if e.is_ended and e.stem not in alive], key=lambda e: e.get_text("updated"))
    sizes = {entry.stem: sum(files.get(entry.stem, {}).values()) for entry in ended}
    count, size = len(ended), sum(sizes.values())
    for entry in ended:
        if count <= keep_runs and size <= keep_bytes:
            return
        with entry.lock() as is_free:
            if is_free:
                for name in {f"{entry.stem}.json", *files.get(entry.stem, ())}:
                    (folder / name).unlink(missing_ok=True)
                count, size = count - 1, size - sizes[entry.stem]


def _list_run_files(folder: Path) -> dict[str, dict[str, int]]:
    """Return the sizes of the files of each run in the folder, by run and file name."""
    found: dict[str, dict[str, int]] = {}
    with os.scandir(folder) as listed:
        for file in listed:
            stem, _, kind = file.name.partition(".")
            if STEM.fullmatch(stem) and (kind in OWN or (kind.startswith("before-") and kind.endswith(".jsonl"))):
                found.setdefault(stem, {})[file.name] = _get_file_size(file)
    return found


def _get_file_size(file: os.DirEntry[str]) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
