"""
Recording by default: the state folder of the user, what lies beside each journal, and which runs go when there are many.

A run is ``runs/<stem>.jsonl`` and its companion ``runs/<stem>.json``, which says what a journal does not: the agent's file,
the folder, the options. It is not part of the journal, and where it is lost the journal tells what is needed. Lives here:
folders, companions, their names and their end. Must not be here: how a run is started or shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import attrs

from stepengine.cli.options import Options
from stepengine.cli.screen.render import one_line, visible, waiting_for
from stepengine.cli.settings import UsageProblem
from stepengine.data.state import RunStatus
from stepengine.errors import DefinitionError, JournalError
from stepengine.redaction import ANY
from stepengine.workspace.calls import OTHERS_BITS, OTHERS_WRITE_BITS
from stepengine.workspace.installed import installed_version
from stepengine.workspace.user_state import RUNS

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.data.waiting import Waits
    from stepengine.engine.loading import AgentPlace
    from stepengine.journal import Journal
    from stepengine.permissions import Policy

__all__ = (
    "EDITORS",
    "GOES_ON",
    "HISTORY",
    "RecordedRun",
    "RunRecording",
    "StateProblem",
    "entries",
    "entry_of",
    "find_recorded",
    "history_file",
    "latest",
    "policy_changes",
    "recorded_as",
    "runs_folder",
    "script_again",
    "with_record",
)

EDITORS, HISTORY = "editors", "chat-history.jsonl"
"""Further content of the state folder: sessions of editors, what was said in chats."""
STEM = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
OWN = ("json", "jsonl", "jsonl.mail")
"""How the files of a run end; what it was before it was extended stands beside them."""
USER = re.compile("//[^/@]*@")
"""What an address may hold beside the place: a name and a password."""
COMPANION_BYTES = 256 * 1024
TITLE_CHARS = 80
QUESTION_CHARS = 400
LISTED = 5
MAX_WAITS = 50
ENDED = frozenset(s.value for s in RunStatus) - {RunStatus.SUSPENDED.value}
GOES_ON = ("suspended", "interrupted")
"""What can be resumed."""


class StateProblem(Exception):
    """Runs cannot be recorded by themselves; the message says why, in one line."""


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of recorded runs, whether there is one or not; ``None`` without a home."""
    from stepengine.workspace.user_state import state_folder

    state = state_folder(environ)
    return None if state is None else state / RUNS


def history_file() -> Path | None:
    """Return where what is said in chats is kept; ``None`` without a home."""
    runs = runs_folder()
    return None if runs is None else runs.parent / HISTORY


def _usable_folder() -> Path:
    """
    Return the folder of recorded runs, made for its owner only where it was missing.

    Raises:
        StateProblem: when it cannot be written, or others could have put something into it.
    """
    runs = runs_folder()
    if runs is None:
        msg = "there is no home folder to record it in; set STEPENGINE_STATE_DIR"
        raise StateProblem(msg)
    try:
        if not runs.parent.is_dir():
            runs.parent.mkdir(0o700, parents=True)
        if not runs.is_dir():
            runs.mkdir(0o700)
        _check_owner(runs)
        if runs.stat().st_mode & OTHERS_BITS:
            runs.chmod(0o700)
    except OSError as error:
        msg = f"{runs} cannot be used: {error.strerror}"
        raise StateProblem(msg) from None
    return runs


def _check_owner(runs: Path) -> None:
    """Raise unless only this user may put something into the folder: what lies there says which agent and options to use."""
    for folder in (runs.parent, runs):
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE_BITS:
            msg = f"others may write in {folder}; make it yours alone with `chmod 700`, or set STEPENGINE_STATE_DIR"
            raise StateProblem(msg)


# --- what is recorded -------------------------------------------------------------------------------------------------


class RecordedRun(NamedTuple):
    """
    A recorded run.

    Attributes:
        stem: Its name.
        info: Its companion.
        folder: Where that lies.
    """

    stem: str
    info: Mapping[str, Any]
    folder: Path

    @property
    def journal(self) -> str:
        """How its journal is named on the command line."""
        own = self.folder / f"{self.stem}.jsonl"
        return str(own) if own.exists() else str(self.info.get("journal") or own)

    @property
    def status(self) -> str:
        """How it ended, or ``suspended``, ``running`` or ``interrupted``."""
        status = str(self.info.get("status"))
        return "interrupted" if status == "running" and not self._is_alive() else status

    @property
    def is_ended(self) -> bool:
        """Whether nothing of it can be resumed."""
        return self.status in ENDED

    def text(self, *names: str) -> str:
        """Return a text of the companion; ``""`` where there is none."""
        value = self._member(names)
        return value if isinstance(value, str) else ""

    def flag(self, *names: str) -> bool:
        """Return whether something of the companion is true."""
        return self._member(names) is True

    def _member(self, names: tuple[str, ...]) -> object:
        value: object = self.info
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def _is_alive(self) -> bool:
        pid = self.info.get("pid")
        if type(pid) is not int or pid < 1:
            return False
        try:
            os.kill(pid, 0)
        except OSError:
            with self.locked() as is_mine:  # the number may be one of another container
                return not is_mine
        return self.info.get("pid_began") in (None, _began(pid))  # another process may have the number by now

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the journal for as long as the block lasts, if nobody else has it; a journal that is gone is free."""
        from stepengine.journal.places import close_locked, lock_file

        path = Path(self.journal.rpartition("#")[0] or self.journal)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            yield True
            return
        try:
            lock_file(descriptor, path, unsafe_no_lock=True)
        except JournalError:
            yield False
        else:
            yield True
        finally:
            close_locked(descriptor)


def entries() -> list[RecordedRun]:
    """
    Return the recorded runs, newest first; a companion that is lost or broken is made from its journal.

    Raises:
        UsageProblem: when others could have put something there.
    """
    place = runs_folder()
    if place is None or not place.is_dir():
        return []
    try:
        _check_owner(place)
    except StateProblem as problem:
        raise UsageProblem(str(problem)) from None
    stems = {path.stem for path in place.iterdir() if path.suffix in (".json", ".jsonl") and STEM.fullmatch(path.stem)}
    found = [RecordedRun(stem, _read(place, stem) or _rebuilt(place, stem), place) for stem in stems]
    return sorted([e for e in found if e.info], key=lambda e: (e.text("created"), e.stem), reverse=True)


def entry_of(folder: Path, stem: str) -> RecordedRun | None:
    """Return the run of that name in a folder, by its companion; ``None`` when there is none."""
    info = _read(folder, stem) if STEM.fullmatch(stem) else None
    return None if info is None else RecordedRun(stem, info, folder)


def _read(folder: Path, stem: str) -> dict[str, Any] | None:
    try:
        with (folder / f"{stem}.json").open("rb") as file:
            info = json.loads(file.read(COMPANION_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return info if isinstance(info, dict) and isinstance(info.get("status"), str) else None


def _rebuilt(folder: Path, stem: str) -> dict[str, object]:
    """Return what the journal of a run tells of it; nothing when there is none."""
    from stepengine.journal import FileJournal
    from stepengine.journal.show import run_id_of, spending_of, status_of

    path = folder / f"{stem}.jsonl"
    if not path.is_file():
        return {}
    try:
        history = FileJournal(path).history()
        root, spending, status = history.root, spending_of(history), status_of(history)
        questions = [_question(q) for _, q in history.open_questions().values()]
    except JournalError:
        return {"version": 1, "status": "unreadable", "journal": str(path)}
    return {
        "version": 1,
        "run_id": run_id_of(history),
        "agent": {"id": root["agent_id"] if history.head is None else history.head.agent},
        "journal": str(path),
        "created": history.head.created if history.head is not None else None,
        "status": status if status in ENDED | {"suspended"} else "interrupted",
        "title": _title(str(root.get("prompt", ""))),
        "questions": [] if history.is_complete else questions,
        "waits": _waits(history.waits()) if status == "suspended" else [],
        "usage": attrs.asdict(spending.usage),
        "cost": None if spending.cost is None else str(spending.cost),
    }


def _title(prompt: str) -> str:
    return one_line(ANY.beginning(prompt, TITLE_CHARS), TITLE_CHARS)


def _question(question: Any) -> dict[str, str]:
    return {"id": question.id, "text": ANY.beginning(question.text, QUESTION_CHARS)[:QUESTION_CHARS]}


def _waits(waits: Sequence[Waits]) -> list[dict[str, object]]:
    """Return what a run waits for beside people, as it is kept: in words, and when the time for it comes."""
    others = [one for one in waits if one.kind != "question"][:MAX_WAITS]
    return [{"kind": o.kind, "said": waiting_for(o), "wakes_at": o.wakes_at and o.wakes_at.isoformat()} for o in others]


# --- naming one -------------------------------------------------------------------------------------------------------


def find_recorded(text: str) -> RecordedRun | None:
    """
    Return the run whose stem or run id begins with *text*; ``None`` when there is none.

    Raises:
        UsageProblem: when there are several.
    """
    known = entries() if text and "/" not in text else []
    exact = [entry for entry in known if text in (entry.stem, entry.text("run_id"))]
    found = exact or [e for e in known if e.stem.startswith(text) or e.text("run_id").startswith(text)]
    if len(found) > 1:
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        msg = f"{text!r} is the beginning of several runs: {', '.join([e.stem for e in found[:LISTED]])}{more}"
        raise UsageProblem(msg)
    return found[0] if found else None


def latest(*, waiting: bool = False, before: int = 0) -> RecordedRun:
    """
    Return the newest run of the working folder.

    Args:
        waiting: Take the newest one that can be resumed.
        before: How many newer ones are passed over.

    Raises:
        UsageProblem: when there is none.
    """
    here = str(Path.cwd())
    found = [e for e in entries() if e.text("cwd") == here and (not waiting or e.status in GOES_ON)][before:]
    if not found:
        what = "that waits or was interrupted" if waiting else "yet" if not before else "before the last one"
        how = "; `stepengine run AGENT` records one" if not (before or waiting) else ""
        how = "; one that ended can be repeated with `replay`, or branched with `fork`" if waiting else how
        msg = f"there is no run of this folder {what}{how}; `stepengine runs --all` lists those of all folders"
        raise UsageProblem(msg)
    return found[0]


def recorded_as(journal: str) -> RecordedRun | None:
    """Return the companion of the journal of this name, wherever the journal is; ``None`` when there is none."""
    path = _absolute(journal)
    try:
        return next((entry for entry in entries() if path in (entry.journal, entry.text("journal"))), None)
    except UsageProblem:
        return None


def with_record(options: Options, entry: RecordedRun) -> Options:
    """Return *options* with what was not typed as it was when the run was recorded."""
    from stepengine.engine.loading import AgentPlace

    recorded = entry.info.get("options")
    recorded = recorded if isinstance(recorded, Mapping) else {}
    file = entry.text("agent", "file")
    place = AgentPlace.of_text(file) if file else None
    if place is not None and not options.agent:
        known = entry.text("agent", "sha256")
        if known and place.file.is_file() and known != _hash(place.file):
            _complain(f"warning: {place.file} has changed since this run was recorded")
    config = entry.text("options", "config")
    return attrs.evolve(
        options,
        journal=entry.journal,
        stem=entry.stem,
        agent=options.agent or (file if place is not None and place.file.is_file() else ""),
        cwd=options.cwd if options.cwd != Path() else Path(entry.text("options", "cwd") or entry.text("cwd")),
        workspace=options.workspace or entry.text("options", "workspace"),
        base_url=options.base_url or ("" if options.script else entry.text("options", "base_url")),
        api_key_env=options.api_key_env or entry.text("options", "api_key_env"),
        price=options.price or entry.text("options", "price"),
        script=script_again(options, entry),
        served=(entry.text("options", "model"), *map(str, (recorded.get("models") or {}).values())),
        web=options.web or entry.text("options", "web"),
        write=options.write or recorded.get("write") is True,
        shell=options.shell or recorded.get("shell") is True,
        code_mode=recorded.get("code_mode") is True,
        ask_for_more=recorded.get("ask_for_more") is True,
        asks=recorded.get("asks") is True,
        config=options.config or (Path(config) if config else None),
        policy_changes=policy_changes(entry),
    )


def policy_changes(entry: RecordedRun) -> Policy | None:
    """Return the policy changes of a chat at a recorded turn; ``None`` without changes."""
    recorded = entry.info.get("options")
    changes = recorded.get("policy") if isinstance(recorded, Mapping) else None
    if changes is None:
        return None
    from stepengine.permissions import Policy

    return Policy.from_json(changes, where=f"the policy of {entry.stem}")


def _stored_changes(options: Options) -> dict[str, Any] | None:
    """Return the policy changes of a chat as JSON: the mode, and the rules of the conversation."""
    policy: Policy | None = options.policy or options.policy_changes
    if policy is None:
        return None
    rules = [rule for rule in policy.rules if rule.scope.kind == "session"]
    return attrs.evolve(policy, rules=rules, remembered=()).to_json()


def script_again(options: Options, entry: RecordedRun) -> str:
    """Return the typed script, or else the recorded one unless a model was typed."""
    is_live = any((options.model, options.base_url, options.api_key_env))
    return options.script or ("" if is_live else entry.text("options", "script"))


# --- recording --------------------------------------------------------------------------------------------------------


class RunRecording:
    """
    What is kept beside the journal of a run. As a context: a run that never began leaves nothing.

    Attributes:
        journal: Where the run is recorded; ``None`` for nowhere.
    """

    def __init__(self, journal: Journal | None, entry: RecordedRun | None = None, *, is_new: bool = False) -> None:
        self.journal = journal
        self._entry = entry
        self._is_new = is_new

    @property
    def stem(self) -> str:
        """The name of the run; ``""`` where it has no companion."""
        return "" if self._entry is None else self._entry.stem

    @classmethod
    def begun(cls, options: Options, journal: Journal | None, **about: Any) -> Self:
        """
        Begin to record a new run.

        Args:
            options: What was typed, and what is set.
            journal: The journal that was asked for; ``None`` for one in the state folder.
            about: More of the companion: ``command``, ``agent_id``, ``prompt``, ``forked_from``, ``session_id``.
        """
        settings = options.settings
        if options.no_journal or not settings.get("journal.record"):
            return cls(journal)
        from stepengine.journal import FileJournal

        try:
            folder = _usable_folder()
            _prune(folder, settings.get("journal.keep_runs"), settings.get("journal.keep_bytes"))
            stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
            made = journal or FileJournal(folder / f"{stem}.jsonl")
            entry = RecordedRun(stem, _companion(options, made.name, **about), folder)
            _write(entry)
        except (OSError, StateProblem) as problem:
            what = "`stepengine runs` does not list this run" if journal else "this run is not recorded"
            _complain(f"{what}: {problem}")
            return cls(journal)
        return cls(made, entry, is_new=True)

    def started(self, run_id: str) -> None:
        """Say that the run has begun: what is recorded stays."""
        self._is_new = False
        self._update(run_id=run_id)

    def ended(self, result: RunResult) -> None:
        """Say how the run ended, or that it waits."""
        status = result.status.value
        if self.journal is not None:
            from stepengine.journal.provenance import record_reviewed

            record_reviewed(self.journal)
        if self._entry is None:
            return
        if result.status is RunStatus.CANCELLED and self.journal is not None:
            with contextlib.suppress(JournalError):
                status = status if self.journal.history().is_complete else "interrupted"
        self._is_new = False
        self._update(
            run_id=self._run_id(result),
            status=status,
            questions=[_question(question) for question in result.pending_questions],
            waits=_waits(result.waits_for),
            usage=attrs.asdict(result.usage),
            cost=None if result.cost is None else str(result.cost),
        )

    def _run_id(self, result: RunResult) -> str:
        if self.journal is None or self._entry is None or not self._entry.info.get("forked_from"):
            return result.state.run_id
        from stepengine.journal.show import run_id_of

        return run_id_of(self.journal.history())

    def _update(self, **changes: object) -> None:
        if self._entry is None:
            return
        info = _read(self._entry.folder, self._entry.stem) or self._entry.info
        self._entry = self._entry._replace(info={**info, **changes, "updated": _now()})
        try:
            _write(self._entry)
        except OSError as error:
            _complain(f"{self._entry.folder} cannot be written: {error.strerror or error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_new and self._entry is not None:
            (self._entry.folder / f"{self._entry.stem}.json").unlink(missing_ok=True)


def _companion(
    options: Options,
    journal: str,
    *,
    command: str,
    agent_id: str,
    prompt: str = "",
    forked_from: object = None,
    session_id: str | None = None,
) -> dict[str, object]:
    installed = installed_version("stepengine") or ""
    place, now = _place_of(options.agent or agent_id, options), _now()
    file = None if place is None else place.file
    return {
        "version": 1,
        "run_id": None,
        "command": command,
        "agent": {
            "id": agent_id,
            "file": None if place is None else str(place),
            "sha256": _hash(file) if file else None,
        },
        "cwd": str(Path.cwd()),
        "journal": _absolute(journal),
        "created": now,
        "updated": now,
        "status": "running",
        "pid": os.getpid(),
        "pid_began": _began(os.getpid()),
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
            "config": None if options.config is None else str(options.config.absolute()),
            "policy": _stored_changes(options),
        },
        "session_id": session_id,
        "forked_from": forked_from,
        "title": _title(prompt),
        "questions": [],
        "waits": [],
        "usage": None,
        "cost": None,
        "stepengine": installed,
    }


def _place_of(agent: str, options: Options) -> AgentPlace | None:
    from stepengine.engine.loading import agent_place

    try:
        place = agent_place(agent, folders=options.settings.agent_folders)
        return attrs.evolve(place, file=place.file.resolve())
    except DefinitionError:
        return None


def _began(pid: int) -> int | None:
    """Return when a process began, in the system's own count; ``None`` where nobody knows."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _hash(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _absolute(journal: str) -> str:
    file, separator, run = journal.rpartition("#")
    return (
        f"{Path(file).absolute()}#{run}" if separator and not Path(journal).exists() else str(Path(journal).absolute())
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _complain(message: str) -> None:
    print(f"stepengine: {visible(message)}", file=sys.stderr)


def _write(entry: RecordedRun) -> None:
    """Put the companion in its place, at once or not at all; only its owner can read it."""
    from stepengine.workspace.atomic import replace_path

    replace_path(entry.folder / f"{entry.stem}.json", json.dumps(entry.info).encode(), mode=0o600)


# --- what goes --------------------------------------------------------------------------------------------------------


def _prune(folder: Path, keep_runs: int, keep_bytes: int) -> None:
    """Remove ended runs, the oldest first, until there are no more than *keep_runs* with *keep_bytes* together."""
    from stepengine.journal.places import close_locked, lock_file

    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock_file(descriptor, folder / ".lock", unsafe_no_lock=True)
        _prune_alone(folder, keep_runs, keep_bytes)
    except JournalError:
        pass  # another process is at it
    finally:
        close_locked(descriptor)


def _prune_alone(folder: Path, keep_runs: int, keep_bytes: int) -> None:
    files = _files(folder)
    # Before every run: where all that lies there may stay, no companion is read.
    if len(files) <= keep_runs and sum([sum(of.values()) for of in files.values()]) <= keep_bytes:
        return
    known = entries()
    alive = {e.text("forked_from", "stem") for e in known if not e.is_ended}
    ended = sorted([e for e in known if e.is_ended and e.stem not in alive], key=lambda e: e.text("updated"))
    sizes = {entry.stem: sum(files.get(entry.stem, {}).values()) for entry in ended}
    count, size = len(ended), sum(sizes.values())
    for entry in ended:
        if count <= keep_runs and size <= keep_bytes:
            return
        with entry.locked() as is_free:
            if is_free:
                for name in {f"{entry.stem}.json", *files.get(entry.stem, ())}:
                    (folder / name).unlink(missing_ok=True)
                count, size = count - 1, size - sizes[entry.stem]


def _files(folder: Path) -> dict[str, dict[str, int]]:
    """Return what is removed with each run, by its name, with the bytes of each file; a journal that was put elsewhere stays."""
    found: dict[str, dict[str, int]] = {}
    with os.scandir(folder) as listed:
        for file in listed:
            stem, _, kind = file.name.partition(".")
            if STEM.fullmatch(stem) and (kind in OWN or (kind.startswith("before-") and kind.endswith(".jsonl"))):
                found.setdefault(stem, {})[file.name] = _size(file)
    return found


def _size(file: os.DirEntry[str]) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
