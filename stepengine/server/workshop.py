"""
``InspectionService``: child processes in which a page inspects and evaluates runs with the current code of their authors.

The serving process does not import that code. A desk (``stepengine.debugging.desk``) inspects one run for one page, and ends with the
page. A job (``stepengine.debugging.jobs``) ends when it is done or cancelled. Both exchange lines of JSON with the server.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from stepengine.debugging.desk import EngineSpec
from stepengine.server.problems import Problem
from stepengine.server.processes import JsonChildProcess

if TYPE_CHECKING:
    from stepengine.server.access import Caller
    from stepengine.server.ledger import RunRow

JobKind: TypeAlias = Literal["impact", "blame", "pin", "ask"]
MOST_DESKS = 8
"""The most pages that inspect runs at a time: each has processes with the record in memory."""
MOST_JOBS = 4
JOBS_KEPT = 50
TESTS_FOLDER = "tests/journals"
"""The folder for the journals of runs that become tests."""
ANSWER_SECONDS = 30.0
"""A replay with two versions of the code is stopped after 5 s each."""
UNDER_WAY = ("begun", "priced", "running")


class InspectionProcess:
    """
    A child process in which a page inspects a run.

    Args:
        id: Its id in requests of the page.
        owner: The name of the caller that started it.
        run: The id of the run.
        process: The child process.
        folder: The temporary folder with the journal.
    """

    def __init__(self, id: str, owner: str, run: str, process: JsonChildProcess, folder: Path) -> None:
        self.id, self.owner, self.run = id, owner, run
        self._process = process
        self._folder = folder
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._hearing = asyncio.get_running_loop().create_task(self._dispatch_messages())

    async def _dispatch_messages(self) -> None:
        """Read the messages of the process until it ends: set replies on their futures, and queue the others."""
        try:
            async for told in self._process.read_messages():
                number = told.pop("id", None)
                if number is None:
                    self._events.put_nowait(told)
                elif (future := self._asked.pop(number, None)) is not None and not future.done():
                    future.set_result(told)
        finally:
            for future in self._asked.values():
                future.cancel()
            self._asked.clear()
            self._events.put_nowait(None)

    async def send_request(self, operation: str, **members: Any) -> dict[str, Any]:
        """
        Send the process a request, and return its reply; raise ``Problem`` if the process has ended or is too slow.

        Raises:
            Problem: 404 if the process has ended, 503 after 30 s without a reply, 422 if it refuses the request.
        """
        number = secrets.randbits(48)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if self._hearing.done():
                    raise _make_inspection_ended_problem(self.id)
                await self._process.send_message({"id": number, "do": operation, **members})
                told = await asyncio.shield(future)
        except TimeoutError:
            msg = f"the process that replays the run did not answer within {ANSWER_SECONDS:g} s"
            raise Problem(msg, status=503, kind="too_slow") from None
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            raise _make_inspection_ended_problem(self.id) from None
        finally:
            self._asked.pop(number, None)
        if "refused" in told:
            raise Problem(told["refused"], status=422, kind="no_such_place")
        return told

    async def read_unsolicited_messages(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the unsolicited messages of the process until it ends."""
        while (told := await self._events.get()) is not None:
            yield told

    async def close(self) -> None:
        """Terminate the process, and delete its folder."""
        await self._process.terminate()
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _make_inspection_ended_problem(inspection_id: str) -> Problem:
    msg = f"there is no desk {inspection_id[:100]!r}: a desk ends when its page disconnects; reload the page to get a new one"
    return Problem(msg, status=404, kind="no_such_desk")


@attrs.define(eq=False)
class EvaluationJob:
    """
    An evaluation of runs in a child process.

    Attributes:
        id: Its id.
        owner: The name of the caller that started it.
        kind: The kind of evaluation.
        runs: The ids of the runs.
        status: ``begun``, ``priced`` while it waits for an approval, ``running``, ``done``, ``failed``, ``cancelled``.
        created: When it was requested, in seconds since 1970.
        price: The number of model calls, and the least and most US dollars.
        progress: The reported progress.
        result: The result of a job that is done.
        error: Why the job failed.
    """

    id: str
    owner: str
    kind: JobKind
    runs: tuple[str, ...]
    status: str = "begun"
    created: float = attrs.field(factory=time.time)
    price: dict[str, Any] | None = None
    progress: dict[str, Any] = attrs.field(factory=dict)
    result: dict[str, Any] | None = None
    error: str = ""
    process: JsonChildProcess | None = attrs.field(default=None, repr=False)
    task: asyncio.Task[None] | None = attrs.field(default=None, repr=False)
    is_started: asyncio.Event = attrs.field(factory=asyncio.Event, repr=False)
    """Set when its process has started, or cannot be started."""

    def update_from_message(self, message: Mapping[str, Any]) -> None:
        """Store the price, progress, result or error in a message of the process; do not change a cancelled job."""
        if self.status == "cancelled":
            return
        if "price" in message:
            self.price, self.status = message["price"], "priced"
        elif "progress" in message:
            self.progress = {**self.progress, **message["progress"]}
        elif "done" in message:
            self.result, self.status = message["done"], "done"
        elif "failed" in message:
            self.error, self.status = message["failed"], "failed"


class InspectionService:
    """
    The inspection processes and evaluation jobs of one server.

    Args:
        read_journal: Returns the bytes of the journal of a run.
        maker: How a child process makes the engine.
    """

    def __init__(
        self,
        read_journal: Callable[[RunRow], Awaitable[bytes]],
        maker: EngineSpec,
    ) -> None:
        self.maker = maker
        self._read_journal = read_journal
        self._desks: dict[str, InspectionProcess] = {}
        self._opening = 0
        self._ending: set[InspectionProcess] = set()
        self._is_closed = False
        self._jobs: OrderedDict[str, EvaluationJob] = OrderedDict()

    async def close(self) -> None:
        """End all inspection processes and jobs."""
        self._is_closed = True
        for desk in [*self._desks.values(), *self._ending]:
            await self.end_inspection(desk)
        for job in list(self._jobs.values()):
            await self._end_job(job)

    # --- desks --------------------------------------------------------------------------------------------------------

    async def start_inspection(self, caller: Caller, row: RunRow, at: str) -> InspectionProcess:
        """
        Start a process in which a page inspects a run.

        Raises:
            JournalMissing: If the run has no record yet.
            Problem: 429 if too many pages inspect runs, 503 if the server stops meanwhile.
        """
        if len(self._desks) + self._opening >= MOST_DESKS:
            msg = f"{MOST_DESKS} pages already inspect runs, which is the maximum of this server; close one of them"
            raise Problem(msg, status=429, kind="too_many_desks", headers={"retry-after": "5"})
        self._opening += 1
        try:
            process, folder = await self._start_child_process(
                "desk", [row], lambda files: {"file": files[row.run], "at": at}
            )
        finally:
            self._opening -= 1
        desk = InspectionProcess(secrets.token_hex(8), caller.name, row.run, process, folder)
        if self._is_closed:
            await desk.close()
            msg = "the server is shutting down; try again in a moment"
            raise Problem(msg, status=503, kind="stopping", headers={"retry-after": "5"})
        self._desks[desk.id] = desk
        return desk

    def get_inspection(self, caller: Caller, run: str, inspection_id: str) -> InspectionProcess:
        """
        Return an inspection of *caller* by its id; raise ``Problem`` 404 if there is none.

        Raises:
            Problem: 404 if *caller* has no such process for the run.
        """
        found = self._desks.get(inspection_id)
        if found is None or (found.owner, found.run) != (caller.name, run):
            raise _make_inspection_ended_problem(inspection_id)
        return found

    async def end_inspection(self, inspection: InspectionProcess) -> None:
        """End the inspection process of a page that was closed; may be called twice."""
        self._desks.pop(inspection.id, None)
        self._ending.add(inspection)
        try:
            await inspection.close()
        finally:
            self._ending.discard(inspection)

    async def _start_child_process(
        self,
        module_name: str,
        rows: Sequence[RunRow],
        make_first_message: Callable[[Mapping[str, str]], Mapping[str, Any]],
    ) -> tuple[JsonChildProcess, Path]:
        """
        Write the journals of runs to a temporary folder, start a module of ``stepengine.debugging`` as a process, and return both.

        If the process cannot be started, the folder is deleted.
        """
        contents = {row.run: await self._read_journal(row) for row in rows}
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="stepengine-"))
        files = {run: folder / f"{run}.jsonl" for run in contents}

        def write_journals() -> None:
            """Write the journals to their files in the temporary folder."""
            for run, content in contents.items():
                files[run].write_bytes(content)

        try:
            await asyncio.to_thread(write_journals)
            first = {
                "maker": attrs.asdict(self.maker),
                **make_first_message({run: str(file) for run, file in files.items()}),
            }
            return await JsonChildProcess.start(f"stepengine.debugging.{module_name}", first), folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def start_job(
        self, caller: Caller, kind: JobKind, rows: Sequence[RunRow], options: Mapping[str, Any]
    ) -> EvaluationJob:
        """
        Start to evaluate runs; a job that costs money waits for approval.

        Raises:
            JournalMissing: If a run has no record yet.
            Problem: 429 if too many jobs have not ended.
        """
        if sum([job.status in UNDER_WAY for job in self._jobs.values()]) >= MOST_JOBS:
            msg = f"{MOST_JOBS} jobs have not ended, which is the maximum of this server; cancel one of them"
            raise Problem(msg, status=429, kind="too_many_jobs", headers={"retry-after": "5"})
        job = EvaluationJob(secrets.token_hex(8), caller.name, kind, tuple([row.run for row in rows]))
        # It counts from now on: others ask for jobs while this one is made.
        self._jobs[job.id] = job
        more = {"kind": kind, "asked": {**options, "folder": TESTS_FOLDER}}
        try:
            job.process, folder = await self._start_child_process("jobs", rows, lambda files: {"files": files, **more})
            job.task = asyncio.get_running_loop().create_task(self._update_job_until_end(job, job.process, folder))
        except BaseException:
            self._jobs.pop(job.id, None)
            raise
        finally:
            job.is_started.set()
        over = [one for one in self._jobs.values() if one.status not in UNDER_WAY]
        for one in over[: max(0, len(self._jobs) - JOBS_KEPT)]:
            del self._jobs[one.id]
        return job

    async def _update_job_until_end(self, job: EvaluationJob, process: JsonChildProcess, folder: Path) -> None:
        """Update a job from the messages of its process until the process ends, then delete its files; without a result, the job fails."""
        try:
            async for told in process.read_messages():
                job.update_from_message(told)
        finally:
            if job.status in UNDER_WAY:
                job.status, job.error = "failed", "its process ended without a result"
            await process.terminate()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def list_jobs(self, caller: Caller) -> list[EvaluationJob]:
        """Return the jobs of *caller*, newest first."""
        return [job for job in reversed(self._jobs.values()) if job.owner == caller.name]

    def get_job(self, caller: Caller, job_id: str) -> EvaluationJob:
        """
        Return a job of *caller*; raise ``Problem`` 404 if there is none.

        Raises:
            Problem: 404 if *caller* has no such job.
        """
        found = self._jobs.get(job_id)
        if found is None or found.owner != caller.name:
            msg = f"there is no job {job_id[:100]!r}; jobs are lost when the server stops"
            raise Problem(msg, status=404, kind="no_such_job")
        return found

    async def approve_job(self, job: EvaluationJob, budget: str | None) -> None:
        """
        Approve the model calls of a job, up to *budget* US dollars.

        Raises:
            Problem: If the job does not wait for an approval.
        """
        if job.status != "priced" or job.process is None:
            msg = f"the job {job.id} does not wait for an approval: its status is {job.status}"
            raise Problem(msg, status=409, kind="not_waiting")
        job.status = "running"
        await job.process.send_message({"go": True, "budget": budget})

    async def cancel_job(self, job: EvaluationJob) -> None:
        """Mark a job as cancelled, terminate its process, and wait for its end. The status of an ended job is not changed."""
        if job.status in UNDER_WAY:
            job.status = "cancelled"
        await self._end_job(job)

    async def _end_job(self, job: EvaluationJob) -> None:
        """Terminate the process of a job once it has started, and wait until its messages are read."""
        await job.is_started.wait()
        if job.process is not None:
            await job.process.terminate()
        if job.task is not None:
            await asyncio.gather(job.task, return_exceptions=True)
