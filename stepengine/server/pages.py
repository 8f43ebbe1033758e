"""
Conversations with web pages, for any protocol: start a turn, stream it, and reconnect to it.

A turn is a run of the ledger that continues from the state of the last run of its conversation. Answers go to the run that asked. A
conversation is never only in memory, so a page finds it again after a restart and at any server of the store.

Code for a single protocol does not belong here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.data.waits import describe_waits
from stepengine.errors import AnswerRejected
from stepengine.server.access import require_caller
from stepengine.server.bodies import make_input_error
from stepengine.server.event_json import PING_SECONDS
from stepengine.server.ledger import OPEN
from stepengine.server.problems import Problem
from stepengine.server.run_requests import StartRequest

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.data.events import Event
    from stepengine.data.questions import AnswerLike
    from stepengine.data.state import AgentState
    from stepengine.server.access import Caller
    from stepengine.server.ledger import RunRow
    from stepengine.server.run_service import RunService
    from stepengine.server.run_turns import RunTurns

RUNNING = ("started", "running")
MAX_NAME = 200
"""Characters of the name of a conversation, as of a session's."""
PING = ": ping\n\n"


def require_turns(runs: RunService) -> RunTurns:
    """
    Return the turns of a server; raise ``Problem`` 501 if its runs are in a database.

    Raises:
        Problem: 501 for a server with a database, which does not support turns.
    """
    if runs.turns is None:
        msg = "AG-UI, Vercel's protocol and MCP are not supported for runs in a database; serve runs of a folder or of RUNS.db"
        raise Problem(msg, status=501, kind="not_offered")
    return runs.turns


def require_agent_id(request: Request) -> str:
    """
    Return the agent id in the path of a request; raise ``Problem`` 404 for an unknown one, 501 without turns.

    Raises:
        Problem: 404 for an unknown agent, 501 for a server with a database.
    """
    runs: RunService = request.app.state.runs
    require_turns(runs)
    name: str = request.path_params["agent"]
    if name not in runs.agents:
        msg = f"there is no agent {name[:MAX_NAME]!r}; GET /agents lists the agents"
        raise Problem(msg, status=404, kind="no_such_agent")
    return name


@frozen
class StartedTurn:
    """
    A started turn: its run, its events, and the event after which they start.

    Attributes:
        run: The id of its run.
        events: Its events, from the start of the turn.
        after: The id of the event of the run's journal after which it starts; ``None`` for the first turn of a run.
    """

    run: str
    events: AsyncGenerator[Event, None]
    after: str | None = None


@frozen
class CallerConversation:
    """
    A conversation of a caller and the state of its last run.

    Attributes:
        runs: The runs of the server.
        turns: Their turns.
        caller: Its owner.
        name: Its name: the thread, or the chat.
        last: Its last run; ``None`` without runs.
        state: The last state of that run; ``None`` without runs and while the run is running.
    """

    runs: RunService
    turns: RunTurns
    caller: Caller
    name: str
    last: RunRow | None
    state: AgentState | None

    @classmethod
    async def load(cls, request: Request, name: str) -> CallerConversation:
        """
        Return the caller's conversation by name, a new one without runs. Conversations of other owners are not visible.

        Raises:
            InputError: If *name* cannot be the name of a conversation.
            StepEngineError: If its last state cannot be read.
        """
        if not (1 <= len(name) <= MAX_NAME and name.isprintable()):
            msg = f"the name of a conversation must have 1 to {MAX_NAME} printable characters"
            raise make_input_error(msg)
        runs: RunService = request.app.state.runs
        turns, caller = require_turns(runs), require_caller(request)
        last = await turns.find_newest_run(caller, name)
        state = None if last is None or last.status in RUNNING else await turns.load_or_replay_state(last)
        return cls(runs, turns, caller, name, last, state)

    @property
    def has_running_run(self) -> bool:
        """Whether the last run is running: it has neither ended nor been suspended."""
        return self.last is not None and self.state is None

    def require_not_running(self) -> None:
        """
        Raise ``Problem`` if the last run is still running.

        Raises:
            Problem: 409 while its last run is running.
        """
        if self.last is not None and self.has_running_run:
            msg = (
                f"the run {self.last.run} of this conversation is running; reconnect to it, or cancel it with "
                f"`POST /runs/{self.last.run}/cancel`, then send the message again"
            )
            raise Problem(msg, status=409, kind="under_way", members={"run_id": self.last.run})

    async def start_next_turn(
        self,
        agent: str,
        prompt: str,
        answers: Mapping[str, AnswerLike],
        *,
        metadata: Mapping[str, Any] | None = None,
        page_questions: Collection[str] = (),
    ) -> StartedTurn:
        """
        Register and start the next turn: answer the questions of the last run, or start a new run.

        A prompt without answers is the answer to the first open question, if there is one.

        Args:
            agent: The id of the agent.
            prompt: The text of the user.
            answers: Answers, by the ids of their questions.
            metadata: The metadata of a new run.
            page_questions: The questions that a tool of the page answers, and not the caller.

        Raises:
            AnswerRejected: If an answer does not fit an open question.
            Problem: If the last run is running or does not wait for a person, or too many runs are running.
        """
        self.require_not_running()
        if self.last is None or self.state is None or self.last.status not in OPEN:
            if answers:
                msg = "this conversation has no open question, so no answer was accepted; reload the conversation"
                raise AnswerRejected(msg)
            asked = StartRequest(
                agent=agent, prompt=prompt, metadata=metadata, session=self.name, is_turn=True, after=self.last, is_patient=False
            )  # fmt: skip
            run, _ = await self.runs.launcher.start(self.caller, asked)
            return StartedTurn(run, self.stream_events(await self.runs.reader.get_run(self.caller, run)))
        await self._require_can_answer(agent, self.last, self.state)
        given = answers or {self.state.pending[0].id: prompt}
        return await self._resume_with_answers(
            self.last, given, page_questions=page_questions, user_input=prompt if answers else ""
        )

    async def _require_can_answer(self, agent: str, last: RunRow, state: AgentState) -> None:
        """Raise ``Problem`` unless the last run has an open question and is of *agent*."""
        if not state.pending:
            waits = (await self.turns.load_result(last)).waits_for
            msg = f"the last run of this conversation has not ended and accepts no message yet. {describe_waits(waits)}"
            raise Problem(msg.strip(), status=409, kind="waits", members={"run_id": last.run})
        if last.agent != agent:
            msg = f"the agent {last.agent!r} waits for an answer in this conversation; send the answer to that agent"
            raise Problem(msg, status=409, kind="waits", members={"run_id": last.run})

    async def _resume_with_answers(
        self, last: RunRow, answers: Mapping[str, AnswerLike], *, page_questions: Collection[str], user_input: str
    ) -> StartedTurn:
        after = await self.turns.find_last_event_id(last)
        events = await self.turns.answer_and_stream(
            self.caller, last, answers, after=after, page_questions=page_questions, user_input=user_input
        )
        return StartedTurn(last.run, events, after)

    def stream_events(self, row: RunRow, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Yield the events of a run from the first one, or after the event *after*."""
        return self.turns.events(self.caller, row, after)


async def add_ping_comments(lines: AsyncGenerator[str, None], stopping: asyncio.Event) -> AsyncIterator[str]:
    """Yield *lines*, and a comment after ``PING_SECONDS`` without one, until the server stops; close *lines* in any case."""
    coming: asyncio.Future[str | None] = asyncio.ensure_future(anext(lines, None))
    ending = asyncio.ensure_future(stopping.wait())
    try:
        while True:
            await asyncio.wait((coming, ending), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return
            if not coming.done():
                yield PING
                continue
            line = coming.result()
            if line is None:
                return
            coming = asyncio.ensure_future(anext(lines, None))
            yield line
    finally:
        ending.cancel()
        coming.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await coming
        await lines.aclose()
