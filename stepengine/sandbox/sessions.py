"""
Sessions of programs in worker processes of Monty, which have no files, network, environment, clock or randomness of the host.

A session runs its program until it waits, returns the calls that it waits for, and receives their results. An idle session loses its
worker when another session needs one. It stores its inputs, and a new worker replays them. The replay reaches the same state, since a
program is a pure function of its text, seed, clock and answers. ``program_tool`` performs the calls.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, cast

from attrs import frozen

from stepengine.errors import DefinitionError, ToolError
from stepengine.sandbox.byte_counter import TooManyBytes, approximate_number_bytes, min_argument_bytes
from stepengine.sandbox.check_workers import STOPPED, CheckWorkers, StopSignal, kill_process
from stepengine.sandbox.program_checks import CheckedProgram, check_with_monty
from stepengine.sandbox.stubs import ALIASES, Stubs
from stepengine.workspace.after_fork import Lock

PRELUDE = "".join([f"{name} = {own}\n" for name, own in ALIASES.items()])
"""Monty has no custom exception classes, so the exception of a failed tool is an alias of a builtin one."""
SLEEP = "asyncio.sleep"
NAME = "program.py"
UNLIMITED_SUSPENSIONS = 2**31
"""The sandbox requires a number; ``program_tool`` counts the calls of a program itself."""
LOOK_SECONDS = 1.0
"""Rendering a variable takes microseconds; a ``__repr__`` of the program could be endless."""
GRACE_SECONDS = 0.5
"""A worker does not check the time while it parses, so it is killed this long after the limit of a check."""
SHOWN_CHARS = 200
"""Two lines for each variable: enough to recognize its value."""
MODULE = "<module "
TURN, SMALL = 500, 16
"""The weight in characters of a turn, which takes as long to replay, and of a small number, list or dict."""
MOST_TOLD = 1_000_000
"""The weight of a session's history, in characters, above which a snapshot replaces it; this bounds the time of a replay."""
MOST_CHECKED = 64
"""How many results of checks are cached; a program that is resumed after a wait is checked again."""
INPUT = "<python-input-{}>"
"""The sandbox's file name for each text of a session, counted from 0; the first one is ``PRELUDE``."""
FILE = INPUT.format(2)
"""The sandbox's file name for the agent file in a handler session; see ``open_handler_session``."""
HOST = "_se_host"
"""The function of a handler session that the host answers immediately."""
PRINTED = "printed"
"""The ``kind`` of a program that printed too much; not the name of a class."""

CROSSED = "crossed"
"""The ``kind`` of a handler that exchanged too many bytes; not the name of a class."""


class ProgramCall(NamedTuple):
    """
    A call of a function by a program.

    Attributes:
        id: Unique in its turn; ``ProgramSession.answer`` names the call by it.
        name: The function; ``"asyncio.sleep"`` for a wait, whose first argument is its seconds.
        args: Positional arguments, as JSON values.
        kwargs: Keyword arguments.
        line: The calling line, from 1; 0 if it is in a function of an earlier program.
        is_cut: Whether the arguments were dropped, because those of all calls of the turn have more bytes than ``memory``.
    """

    id: int
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    line: int
    is_cut: bool = False


class CallAnswer(NamedTuple):
    """
    The result of a call, as the program receives it.

    Attributes:
        value: The value, or with *error* the text of the exception.
        error: The name of the exception that the call raises in the program, such as ``"ToolError"``; ``""`` for a value.
    """

    value: Any = None
    error: str = ""


@frozen
class ProgramWaiting:
    """
    A program that waits for the results of calls.

    Attributes:
        calls: All calls since the program was last resumed, in their order, also those that it does not await yet.
        line: The waiting line, from 1; 0 if it is in a function of an earlier program.
    """

    calls: tuple[ProgramCall, ...]
    line: int


@frozen
class ProgramEnded:
    """
    A program that ended.

    Attributes:
        value: The value of its last expression; ``None`` without one.
        unawaited: Calls that it never awaited, so that they did not run.
    """

    value: Any
    unawaited: tuple[ProgramCall, ...] = ()


@frozen
class ProgramRaised:
    """
    A program that ended with an exception.

    Attributes:
        kind: The name of its class; ``"TimeoutError"``, ``"MemoryError"`` and ``"printed"`` for a limit.
        text: The traceback, as Python prints it.
        line: The innermost line of the program, from 1; 0 if it is unknown.
        is_fatal: Whether the session ended, too.
    """

    kind: str
    text: str
    line: int
    is_fatal: bool = False


ProgramTurn = ProgramWaiting | ProgramEnded | ProgramRaised
"""How a turn of a program ends."""


BEFORE = datetime.fromtimestamp(0, UTC)
"""The time of the clock before any program runs; no program sees it."""
GONE = ProgramRaised("", STOPPED, 0, is_fatal=True)
OVER = ProgramRaised("TimeoutError", "TimeoutError", 0, is_fatal=True)
"""The text contains no duration, since a replay takes another time."""


Host: TypeAlias = Callable[[Sequence[Any]], "CallAnswer"]


class ProgramSession(Protocol):
    """
    A session of a sandbox. Its programs run one after the other and share their variables.

    A session may also have ``variables(names)``, which returns the values of variables as texts, for the debugger.

    Attributes:
        printed: The output of the latest program so far.
    """

    printed: str

    def feed(self, code: str, now: datetime) -> ProgramTurn:
        """Start a program and run it until it waits or ends; its clock shows *now*."""

    def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
        """Resume the program with the results of all its calls, by call id, and run it until it waits or ends."""

    def close(self) -> None:
        """End the session, from any thread; a running turn returns a fatal ``ProgramRaised`` or raises ``ToolError``."""


class Sandbox(Protocol):
    """
    Executes untrusted programs. Its methods are called in several threads at once.

    A program is a pure function of its text, seed, clock and answers: a resumed run starts it again and sends it the same answers.
    """

    @property
    def name(self) -> str:
        """The name and version, for journals; raises ``DefinitionError`` if the sandbox is not installed."""

    def check(self, code: str, stubs: Stubs, known: Collection[str], stop: StopSignal | None = None) -> CheckedProgram:
        """
        Check a program before any of it runs, after the engine's own check.

        Args:
            code: The program.
            stubs: The functions that it may call.
            known: The global names that earlier programs of the session defined; ``"*"`` if a text that they ran may define any name.
            stop: Ends the check from another thread.

        Raises:
            ToolError: when it was stopped, and when there is no worker.
        """

    def open(
        self, functions: Collection[str], *, seconds: float, memory: int, printed: int, seed: int
    ) -> ProgramSession:
        """
        Return a new session.

        Args:
            functions: The names of the functions that its programs may call.
            seconds: How long a program may compute between two waits.
            memory: How many bytes it may use.
            printed: How many bytes one program may print.
            seed: The seed of its random numbers.

        Raises:
            ToolError: when no session can be opened.
        """


class MontySandbox:
    """
    A sandbox with sessions in worker processes of Monty; a process needs only one.

    Args:
        workers: The most workers at a time; by default one for each processor, from 2 to 8.

    Attributes:
        monty: The package ``pydantic_monty``; reading it raises ``DefinitionError`` if it is not installed.
        checks: The workers that check programs, separate from those that run them.
    """

    _process: ClassVar[int] = 0
    """The process in which the package started its threads, for all sandboxes; a forked child has none of them."""

    def __init__(self, workers: int | None = None) -> None:
        self._most = workers or min(8, max(2, os.cpu_count() or 2))
        self._pool: Any = None
        self.checks = CheckWorkers(partial(self._start_pool, turn_duration_limit_grace=GRACE_SECONDS))
        self._checking = Lock()
        self._checked: dict[tuple[str, str, frozenset[str]], CheckedProgram] = {}
        self._changed = threading.Condition()
        self._seats: list[_SessionWorker] = []  # the one that is idle for longest first

    @cached_property
    def monty(self) -> Any:
        """The package ``pydantic_monty``; raises ``DefinitionError`` if it is not installed."""
        try:
            import pydantic_monty
        except ImportError as error:
            msg = "programs need the package pydantic-monty: pip install 'stepengine[programs]'"
            raise DefinitionError(msg) from error
        return pydantic_monty

    @property
    def name(self) -> str:
        """The name and version, as recorded in journals."""
        return f"monty/{self.monty.__version__}"

    def check(self, code: str, stubs: Stubs, known: Collection[str], stop: StopSignal | None = None) -> CheckedProgram:
        """Check a program in a separate worker, or return the cached result of an earlier complete check."""
        self._raise_if_forked()
        asked = (code, stubs.text, frozenset(known))
        # The lock protects only the table: with a check under it, every engine would wait for the slowest check.
        with self._checking:
            checked = self._checked.get(asked)
        if checked is None:
            checked = check_with_monty(partial(self.checks.checkout, stop), code, stubs, known)
        if checked.is_whole:
            with self._checking:
                self._checked.pop(asked, None)
                self._checked[asked] = checked  # the last one is the youngest
                if len(self._checked) > MOST_CHECKED:
                    del self._checked[next(iter(self._checked))]
        return checked

    def open(
        self, functions: Collection[str], *, seconds: float, memory: int, printed: int, seed: int
    ) -> ProgramSession:
        """Return a new session. It gets a worker at its first turn, which may end an idle session's worker."""
        return _MontySession(self, functions, seconds=seconds, memory=memory, printed=printed, seed=seed)

    def open_handler_session(
        self, host: Host, *, seconds: float, memory: int, printed: int, seed: int
    ) -> ProgramSession:
        """
        Return a new session for a handler, with a function *host* that answers calls of ``_se_host`` at once.

        The other arguments are those of ``open``. A ``TooManyBytes`` that *host* raises ends the session.

        The caller feeds three texts: the prelude, the agent file and the call of the handler. Lines are those of the agent file.
        """
        return _MontySession(self, (), seconds=seconds, memory=memory, printed=printed, seed=seed, host=host)

    def start_worker(self, checkout: Mapping[str, Any], is_closed: Callable[[], bool]) -> _SessionWorker:
        """
        Start a worker for a turn and return it; if there are too many, end an idle one, or wait for one until *is_closed* returns true.

        If there are too many workers, an idle one is ended, or the call waits for one until *is_closed* returns true.
        """
        self._raise_if_forked()
        with self._changed:
            while True:
                if is_closed():
                    raise ToolError(STOPPED)
                if self._pool is None:
                    self._pool = self._start_pool()
                if len(self._seats) < self._most:
                    break
                idle = next((worker for worker in self._seats if not worker.is_busy), None)
                if idle is not None:
                    self._seats.remove(idle)
                    idle.end()
                else:
                    self._changed.wait(1.0)
            worker = _SessionWorker(self._pool.checkout(**checkout))
            self._seats.append(worker)
        try:
            worker.start()
        except BaseException as error:
            self.release_worker(worker)
            if not isinstance(error, self.monty.MontyError):
                raise
            msg = f"no worker could be started for a program: {error}"
            raise ToolError(msg) from None
        return worker

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked from one that had run a program."""
        # Checked before any lock is acquired: a lock that the parent held is never released in the child.
        return MontySandbox._process not in {0, os.getpid()}

    def _raise_if_forked(self) -> None:
        """Raise a ``ToolError`` in a process forked after a program ran; the first call records the process."""
        MontySandbox._process = MontySandbox._process or os.getpid()
        if self._is_forked:
            msg = "programs cannot run in a process that was forked after another program had run; start a new one"
            raise ToolError(msg)

    def _start_pool(self, **options: Any) -> Any:
        """Start a pool of worker processes of Monty, and return the pool."""
        pool = self.monty.Monty(max_processes=self._most, **options)
        pool.__enter__()
        return pool

    def close(self) -> None:
        """End the workers; the next program starts new ones. In a forked child the parent's workers are not affected."""
        if self._is_forked:
            return
        with self._changed:
            pool, self._pool = self._pool, None
            seats, self._seats = self._seats, []
        for worker in seats:
            worker.end()
        if pool is not None:
            pool.__exit__(None, None, None)
        self.checks.close()

    def try_claim_worker(self, worker: _SessionWorker) -> bool:
        """Claim the worker of a session for a turn; return False if it was ended for another session or has died."""
        self._raise_if_forked()
        with self._changed:
            if worker not in self._seats:
                return False
            worker.is_busy = True
        if worker.is_alive:
            return True
        self.release_worker(worker)
        return False

    def stop_turn(self, worker: _SessionWorker | None) -> None:
        """
        Kill a busy worker, so that its turn ends with a crash, or release an idle one; from any thread.

        ``None`` wakes the callers that wait for a worker, and they check whether they still need it.
        """
        if self._is_forked:
            return
        with self._changed:
            # A worker that is no longer listed was ended for another session.
            is_busy = worker is not None and worker in self._seats and worker.is_busy
            if worker is not None and is_busy:
                kill_process(worker.pid)
            self._changed.notify_all()
        if worker is not None and not is_busy:
            self.release_worker(worker)

    def mark_idle(self, worker: _SessionWorker) -> None:
        """Mark a worker as idle; its session stays loaded until another session needs a worker."""
        if self._is_forked:
            return
        with self._changed:
            worker.is_busy = False
            if worker in self._seats:
                self._seats.remove(worker)
                self._seats.append(worker)
            self._changed.notify()

    def release_worker(self, worker: _SessionWorker) -> None:
        """End a worker's session, so that another session may start."""
        if self._is_forked:
            return
        with self._changed:
            if worker not in self._seats:  # it was ended when it was removed
                return
            self._seats.remove(worker)
            self._changed.notify()
        worker.end()


class _SessionWorker:
    """A worker that serves one session."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.is_busy = True
        self.pid = 0

    def start(self) -> None:
        """Open the session in a worker process."""
        self.session.__enter__()
        self.pid = self.session.worker_pid

    @property
    def is_alive(self) -> bool:
        """Whether the worker process still runs; always True on systems without ``os.waitid``. The system may kill an idle worker."""
        if not hasattr(os, "waitid"):
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def end(self) -> None:
        """Close the session and its worker; errors of a crashed worker are ignored."""
        with contextlib.suppress(Exception):  # a worker that has crashed already
            self.session.__exit__(None, None, None)


class _ProgramInputs(NamedTuple):
    """A program of a session, the answers that it received with their times, and the immediate answers of the host."""

    code: str
    now: datetime
    answers: list[tuple[Mapping[int, CallAnswer], datetime]]
    said: list[CallAnswer]


class _MontySession:
    def __init__(
        self,
        sandbox: MontySandbox,
        functions: Collection[str],
        *,
        seconds: float,
        memory: int,
        printed: int,
        seed: int,
        host: Host | None = None,
    ) -> None:
        self._host = host
        self._telling: _ProgramInputs | None = None
        self._heard = 0
        self._functions = {name: _make_stand_in_function(name) for name in functions}
        self._most_printed = printed
        self._most_argued = memory
        self._seconds = seconds
        self._sandbox = sandbox
        self._checkout = {
            "script_name": NAME,
            "limits": {
                "max_turn_duration_secs": seconds,
                "max_memory": memory,
                # Of a session, which lives for many programs; their calls are counted one by one.
                "max_suspensions": UNLIMITED_SUSPENSIONS,
            },
            "os_policy": {"datetime": "call_host", "sleep": "call_host", "random_start": {"seed": seed}},
        }
        self._seat: _SessionWorker | None = None
        self._lock = Lock()
        self._is_closed = False
        self._snapshot: Any = None
        self._told: list[_ProgramInputs] = []
        self._weight = 0
        self._fed = 0
        self._base: bytes | None = None  # what it held before the programs of `_told`
        self._output: Any = None
        self._waits = False
        self.printed = ""

    def feed(self, code: str, now: datetime) -> ProgramTurn:
        """Record a program, run it until it waits or ends, and return the turn; its clock shows *now*."""

        def record_and_feed(worker: _SessionWorker) -> ProgramTurn:
            told = _ProgramInputs(code, now, [], [])
            self._told.append(told)
            self._fed += 1
            self._weight += len(code) + TURN
            return self._feed_program(worker, told)

        return self._run_turn(record_and_feed)

    def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
        """Record the answers to all calls, run the waiting program until it waits or ends, and return the turn."""

        def record_and_send(_: _SessionWorker) -> ProgramTurn:
            """Record the answers, and run the next turn."""
            self._told[-1].answers.append((answers, now))
            self._weight += sum([_approximate_char_count(answer.value) for answer in answers.values()], TURN)
            return self._send_answers(answers, now)

        return self._run_turn(record_and_send)

    def variables(self, names: Sequence[str]) -> dict[str, str]:
        """
        Return the ``repr`` of variables, at most 200 characters each, without modules; nothing while a program waits.

        A variable whose ``repr`` fails is shown as ``"<cannot be shown>"``. A name without a value is left out. The variables are read in
        a copy of the session, so nothing changes for later programs, not even their names in tracebacks.

        Raises:
            ToolError: when there is no worker.
        """
        if self._waits:
            return {}
        copied: bytes | None = None
        try:
            worker, lost = self._claim_or_replace_worker()
            if lost is not None:
                raise ToolError(lost.text)
            copied = worker.session.dump()
        finally:
            if self._seat is not None:
                # After a failed replay a worker has only some of the session's variables.
                (self._sandbox.release_worker if copied is None else self._sandbox.mark_idle)(self._seat)
        limits: Any = self._checkout["limits"]
        checkout = {**self._checkout, "limits": {**limits, "max_turn_duration_secs": LOOK_SECONDS}}
        copy = self._sandbox.start_worker(checkout, lambda: self._is_closed)
        try:
            copy.session.load_session(copied)
            return self._read_variables(copy.session, names)
        finally:
            self._sandbox.release_worker(copy)

    def _read_variables(self, session: Any, names: Sequence[str]) -> dict[str, str]:
        """Return the shortened ``repr`` of each variable that has a value; modules are left out."""
        monty, found = self._sandbox.monty, dict[str, str]()
        for name in names:
            found[name] = "<cannot be shown>"
            try:
                came = session.feed_start(f"repr({name})[:{SHOWN_CHARS}]")
                if isinstance(came, monty.NameLookupSnapshot) and came.variable_name == name:
                    del found[name]  # such as that of an exception after its handler
                    came.resume()  # raises a `NameError`
            except monty.MontyCrashedError:
                break
            except monty.MontyError:
                continue
            if not isinstance(came, monty.MontyComplete):  # its ``__repr__`` calls a tool
                break
            found[name] = str(came.output)
        return {name: text for name, text in found.items() if not text.startswith(MODULE)}

    def close(self) -> None:
        """Mark the session as closed, and stop its running turn, from any thread."""
        with self._lock:
            self._is_closed = True
            worker = self._seat
        self._sandbox.stop_turn(worker)

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _run_turn(self, run: Callable[[_SessionWorker], ProgramTurn]) -> ProgramTurn:
        """Run a turn on the worker, then mark it idle, or release it after a failed turn or a snapshot."""
        turn: ProgramTurn | None = None
        try:
            worker, turn = self._claim_or_replace_worker()
            if turn is None:
                turn = run(worker)
            self._waits = isinstance(turn, ProgramWaiting)
        finally:
            if self._seat is not None:
                leaves = turn is None or self._try_snapshot_history(self._seat, turn)
                (self._sandbox.release_worker if leaves else self._sandbox.mark_idle)(self._seat)
        if self._is_closed or (isinstance(turn, ProgramRaised) and turn.is_fatal):
            self.close()  # also if it was closed after its end: it is not resumed
        return turn

    def _claim_or_replace_worker(self) -> tuple[_SessionWorker, ProgramRaised | None]:
        """Claim the session's worker, or start one that replays the session; return it with the error of the replay, or ``None``."""
        worker = self._seat
        return (
            (worker, None)
            if worker is not None and self._sandbox.try_claim_worker(worker)
            else self._replay_in_new_worker()
        )

    def _replay_in_new_worker(self) -> tuple[_SessionWorker, ProgramRaised | None]:
        """
        Start a worker, replay the session in it, and return it with the error of the replay, or ``None``.

        The worker replaces one that was ended for another session, or that died while it was idle.
        """
        worker = self._sandbox.start_worker(self._checkout, lambda: self._is_closed)
        with self._lock:
            self._seat = worker
            is_closed = self._is_closed
        turn = GONE if is_closed else self._run_turn_with_byte_limit(lambda: self._load_initial_state(worker), BEFORE)
        for told in self._told:
            for given, at in [(None, told.now), *told.answers]:
                if isinstance(turn, ProgramRaised) and turn.is_fatal:
                    return worker, self._explain_lost_replay(turn)
                turn = self._feed_program(worker, told) if given is None else self._send_answers(given, at)
        return worker, self._explain_lost_replay(turn) if isinstance(turn, ProgramRaised) and turn.is_fatal else None

    def _load_initial_state(self, worker: _SessionWorker) -> Any:
        """Load the last snapshot into a new worker and return ``None``; without one, run the prelude and return its end."""
        if self._base is None:
            return worker.session.feed_start(PRELUDE)
        worker.session.load_session(self._base)
        return None

    def _explain_lost_replay(self, turn: ProgramRaised) -> ProgramRaised:
        """Return the error of a failed replay with an explanation; unchanged if the session was closed."""
        if self._is_closed:
            return turn
        said = f"the variables of earlier programs could not be brought back, since one of these did not end again: {turn.text}"
        return ProgramRaised(turn.kind, said, 0, is_fatal=True)

    def _try_snapshot_history(self, worker: _SessionWorker, turn: ProgramTurn) -> bool:
        """
        Replace the history of the session by a snapshot if it is long, and return True if it was replaced.

        The caller then releases the worker, so that the session resumes from the snapshot in every process. In a restored session objects
        have other addresses, which a program can see. Only the session's inputs decide when a snapshot is made.
        """
        if (
            self._weight <= MOST_TOLD
            or isinstance(turn, ProgramWaiting)
            or (isinstance(turn, ProgramRaised) and turn.is_fatal)
        ):
            return False
        try:
            self._base = worker.session.dump()
        except self._sandbox.monty.MontyError:
            return False
        self._told, self._weight = [], 0
        return True

    def _feed_program(self, worker: _SessionWorker, program: _ProgramInputs) -> ProgramTurn:
        """Run a program in a worker until it waits or ends, and collect its output."""
        monty = self._sandbox.monty
        self._telling, self._heard = program, 0
        self._output = monty.CollectString(self._most_printed)
        return self._run_turn_with_byte_limit(
            lambda: worker.session.feed_start(program.code, print_callback=self._output), program.now
        )

    def _send_answers(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
        """Send the answers of all calls to the waiting program, and run it until it waits or ends."""
        settled = {id_: _answer_to_dict(answers[id_]) for id_ in sorted(answers)}
        return self._run_turn_with_byte_limit(lambda: self._snapshot.resume(settled), now)

    def _run_turn_with_byte_limit(self, start: Any, now: datetime) -> ProgramTurn:
        """Run until the program waits or ends, and return the turn; a ``TooManyBytes`` of the host becomes a fatal end."""
        try:
            return self._run_until_waiting_or_ended(start, now)
        except TooManyBytes as error:
            return ProgramRaised(CROSSED, str(error), 0, is_fatal=True)

    def _run_until_waiting_or_ended(self, start: Any, now: datetime) -> ProgramTurn:
        """Run until the program waits, ends or fails, answer its look-ups, collect its calls, and return the turn."""
        monty, calls = self._sandbox.monty, list[ProgramCall]()
        self._argued = 0
        # The sandbox restarts its own time limit after each request to the host, even for the time.
        until = time.monotonic() + self._seconds
        try:
            snapshot = start()
            while True:
                if snapshot is None:
                    return ProgramEnded(None)
                if isinstance(snapshot, monty.MontyComplete):
                    return ProgramEnded(snapshot.output, tuple(calls))
                if isinstance(snapshot, monty.FutureSnapshot):
                    self._snapshot = snapshot
                    return ProgramWaiting(tuple(calls), self._line_number(snapshot.position))
                if time.monotonic() > until:
                    return OVER
                snapshot = self._resume_snapshot(snapshot, calls, now)
        except monty.MontyCrashedError as error:
            kind = "TimeoutError" if getattr(error, "timed_out", False) else "MemoryError"
            return ProgramRaised(kind, f"the sandbox of the program ended: {error}", 0, is_fatal=True)
        except monty.MontyError as error:
            return self._program_raised_from_error(error)
        finally:
            self.printed = self._output.output if self._output is not None else ""

    def _resume_snapshot(self, snapshot: Any, calls: list[ProgramCall], now: datetime) -> Any:
        """Answer a look-up, clock or host call at once, add another call to *calls*, and return the next snapshot."""
        monty = self._sandbox.monty
        if isinstance(
            snapshot, monty.NameLookupSnapshot
        ):  # a function as a value, such as `f = price`; else there is no such name
            known = self._functions.get(snapshot.variable_name)
            return snapshot.resume() if known is None else snapshot.resume(value=known)
        name = str(snapshot.function_name)
        if snapshot.is_os_function and name != SLEEP:
            clock = _compute_clock_result(name, snapshot.args, now)
            return snapshot.resume_not_handled() if clock is None else snapshot.resume({"return_value": clock})
        if name == HOST and self._host is not None:
            return snapshot.resume(_answer_to_dict(self._replay_or_call_host(snapshot.args)))
        calls.append(self._count_and_make_call(snapshot, name))
        return snapshot.resume({"future": ...})

    def _count_and_make_call(self, snapshot: Any, name: str) -> ProgramCall:
        """Count a call's bytes, and return the call. Above the limit its arguments are dropped; with a host, raise ``TooManyBytes``."""
        args, kwargs, line = snapshot.args, snapshot.kwargs, self._line_number(snapshot.position)
        most = self._most_argued
        self._argued += min_argument_bytes(args) + min_argument_bytes(kwargs)
        if self._argued <= most:
            return ProgramCall(snapshot.call_id, name, args, kwargs, line)
        if self._host is not None:
            msg = f"more than {most:,} bytes were given to calls at once"
            raise TooManyBytes(msg)
        return ProgramCall(snapshot.call_id, name, (), {}, line, is_cut=True)

    def _replay_or_call_host(self, args: Sequence[Any]) -> CallAnswer:
        """Return the host's recorded answer during a replay; else call the host, and record and return its answer."""
        said = cast("_ProgramInputs", self._telling).said
        if self._heard == len(said):
            answer = cast("Host", self._host)(args)
            said.append(answer)
            self._weight += _approximate_char_count(answer.value)
        self._heard += 1
        return said[self._heard - 1]

    def _line_number(self, position: Any) -> int:
        """Return the line of a position in the latest program, or in the agent file of a handler; 0 outside of the file."""
        if position.filename != self._file_name or (self._host is not None and len(self._told) < 2):  # noqa: PLR2004 - see `open_handler_session`
            return 0
        text = self._told[-1 if self._host is None else 1].code.encode()
        return text[: position.start].count(b"\n") + 1

    @property
    def _file_name(self) -> str:
        """The sandbox's name of the text whose lines are reported: the latest program, or the agent file of a handler."""
        return FILE if self._host is not None else INPUT.format(self._fed)

    def _program_raised_from_error(self, error: Any) -> ProgramRaised:
        """Return the end of a program for an error of Monty; a limit that the program could not catch is fatal."""
        inner = error.exception()
        kind = type(inner).__name__
        frames = error.traceback() if hasattr(error, "traceback") else []
        text = error.display() if hasattr(error, "display") else str(error)
        is_fatal = kind in {"TimeoutError", "MemoryError", "RecursionError"} and not frames
        frames = [frame for frame in frames if frame.filename == self._file_name]
        if self._host is not None and not is_fatal:
            text = str(inner)
        if kind == "MemoryError" and f"> {self._most_printed} bytes" in text:
            kind = PRINTED
        if is_fatal and kind == "TimeoutError":
            return OVER
        return ProgramRaised(kind, text, frames[-1].line if frames else 0, is_fatal=is_fatal)


RAISED: Mapping[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        FileExistsError, FileNotFoundError, IsADirectoryError, KeyboardInterrupt, NameError, NotADirectoryError, OSError,
        PermissionError, SystemExit, TimeoutError, TypeError, ValueError,
    )
}  # fmt: skip
"""The exceptions that the host may raise in a program, by name; others are raised as ``RuntimeError``."""


def _approximate_char_count(value: object) -> int:
    """Return the approximate number of characters of a value that is sent to a program; the same number in a replay."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return approximate_number_bytes(value)
    if isinstance(value, Mapping):
        return sum([len(key) + _approximate_char_count(inner) for key, inner in value.items()], SMALL)
    return sum(map(_approximate_char_count, value), SMALL) if isinstance(value, list) else SMALL


def _make_stand_in_function(name: str) -> Callable[..., Any]:
    """Return a function for the sandbox whose call is reported as a call of *name*."""

    def function(*_: object, **__: object) -> None:
        raise RuntimeError(name)

    function.__name__ = name
    return function


def _answer_to_dict(answer: CallAnswer) -> dict[str, Any]:
    """Return an answer in the sandbox's form: a return value, or an exception object."""
    if not answer.error:
        return {"return_value": answer.value}
    return {"exception": RAISED.get(answer.error, RuntimeError)(answer.value)}


def _compute_clock_result(name: str, args: Sequence[Any], now: datetime) -> Any:
    """Return the result of a clock function such as ``time.time`` for the time *now*; ``None`` for other functions."""
    if name == "datetime.now":
        zone = args[0] if args else None
        return now.replace(tzinfo=None) if zone is None else now.astimezone(zone)
    if name == "date.today":
        return now.date()
    if name == "time.time_ns":
        return int(now.timestamp() * 1e9)
    if name.startswith("time.") and name != "time.sleep":
        return now.timestamp()
    return None
