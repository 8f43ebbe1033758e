"""
Sessions of durable runs: the order of turns, the state that a turn starts from, and the state that it stores for the next turn.

No table but that of the runs is used. A turn is a root run whose attributes name its session and its number. It waits in a queue that no
worker reads until all earlier turns are over. The first process that notices this moves it to the queue of its pool. The first step of
a turn records the end of the last turn. Each execution of the turn starts from that record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.codec import decode_stored, encode_stored
from stepengine.data.json import freeze
from stepengine.data.state import RunResult
from stepengine.data.usage import Usage
from stepengine.durable.database import ReopeningConnection, queue_name
from stepengine.durable.deployment import Deployment, DurableRunView
from stepengine.durable.indexes import (
    SESSION,
    session_key_sql,
    session_turns_sql,
    turn_condition_sql,
    turn_kind_sql,
    turn_number_sql,
)
from stepengine.durable.run_waits import AnswerSender, RunWaits
from stepengine.durable.wire import Reply, SubmittedRun
from stepengine.errors import AnswerRejected, DatabaseUnavailable, InputError, JournalError
from stepengine.runtime.logs import LOGGER
from stepengine.sessions import Session, SessionInfo
from stepengine.sessions.session import require_session_id

ENTERED = "turn"
"""The kind of the step that records the state from which a turn starts."""
LOCK_PAUSE_SECONDS = 0.05
"""The lock of a session is held for some queries, so for milliseconds."""
FIRST_LOOK_SECONDS = 0.1
"""After a turn has started, the next one of a short session may be ready soon."""
MAX_LOOK_SECONDS = 1.0
"""A turn takes seconds, so nobody notices that the next one starts up to a second later."""
IDLE_LOOK_SECONDS = 0.5
"""A first turn waits this long at most when no session has a line, and an idle worker asks twice in a second."""
LAST_TURN_NUMBER = 2**31 - 1
"""The largest ``integer`` of PostgreSQL, so above the number of each turn."""
LOCK = "select pg_try_advisory_lock(hashtextextended(%s, 0))"
UNLOCK = "select pg_advisory_unlock(hashtextextended(%s, 0))"
COLUMNS = "workflow_uuid, status, attributes, queue_name, created_at, updated_at"
KEY = session_key_sql(SESSION)
OF_SESSION = session_turns_sql("asked.app", "asked.session")
FIRST_IN_LINE = (
    f"select {KEY} as key, {SESSION} as session from dbos.workflow_status"  # noqa: S608
    f" where {turn_condition_sql()} and application_name = %s and status = 'ENQUEUED' and {turn_kind_sql()} = 'line'"
)
TURNS = f"""
    select {COLUMNS} from dbos.workflow_status
    where application_name = %s and attributes @> jsonb_build_object('session', %s::text)
    order by (attributes->>'turn')::int, workflow_uuid
"""  # noqa: S608
DECIDING_TURNS = f"""
    select turn.* from (select %s::text as app, %s::text as session) asked,
        unnest(array['line', 'open', 'done', 'gone']) as kinds (kind),
        lateral (
            (select {COLUMNS} from dbos.workflow_status
            where {OF_SESSION} and {turn_kind_sql()} = kind order by {turn_number_sql()}, workflow_uuid limit 2)
            union all
            (select {COLUMNS} from dbos.workflow_status
            where {OF_SESSION} and {turn_kind_sql()} = kind order by {turn_number_sql()} desc, workflow_uuid desc limit 1)
        ) turn
"""  # noqa: S608
"""The first two and the last of each kind of a session's turns, one of them maybe twice: as many of a long session as of a short one."""
LAST_RESULT = f"""
    select workflow_uuid, {turn_number_sql()}
    from (select %s::text as app, %s::text as session) asked, dbos.workflow_status
    where {OF_SESSION} and {turn_kind_sql()} = 'done' and {turn_number_sql()} < %s
    order by {turn_number_sql()} desc, workflow_uuid desc limit 1
"""  # noqa: S608
"""The last turn with a result that is before a number."""
WAITING_SESSIONS = f"""
    with recursive waiting as (
        ({FIRST_IN_LINE} order by 1 limit 1)
        union all
        select next.* from waiting, lateral ({FIRST_IN_LINE} and {KEY} > waiting.key order by 1 limit 1) next
    )
    select session from waiting
"""  # noqa: S608
"""
The sessions with turns in line, each met once however many it has. Of all pools: where no worker of a turn's own lives, it may
still be the answer that a run of another pool waits for.
"""
SESSIONS = """
    select distinct on (attributes->>'session')
        attributes->>'session', (attributes->>'turn')::int, status, attributes->>'agent', updated_at
    from dbos.workflow_status where application_name = %s and attributes ? 'session'
    order by attributes->>'session', (attributes->>'turn')::int desc, workflow_uuid desc
"""
FIRST_STATE: Mapping[str, Any] = {
    "turns": 0,
    "usage": encode_stored(Usage()),
    "metadata": {},
    "user_id": None,
    "rules": [],
}
"""What the first turn of a session finds."""


def waiting_queue_name(pool: str) -> str:
    """Return the queue of a pool in which turns wait; no worker listens to it."""
    return f"se.{pool}.line"


@frozen(kw_only=True)
class TurnView:
    """
    One turn of a session.

    Attributes:
        run: The id of its root run.
        number: Its place in the session; the first is 1.
        state: That of the run; see ``DurableRunView``. A message that became an answer is ``CANCELLED``, since it never ran.
        agent: Its agent.
        is_waiting: Whether it waits for a turn before it.
        answered: The run whose question it answered; ``None`` for a turn that runs itself.
        rejected: Why it is no answer to the question that waited; ``""`` for everything else.
        is_held: Whether the session waits for it although it was interrupted, because it is moved to another release.
        is_given_up: Whether the session continues without it although it could be retried.
        pool: The pool that it was submitted to, while it is in line.
        created: When it was submitted, milliseconds since 1970.
        updated: When it was last changed.
    """

    run: str
    number: int
    state: str
    agent: str = ""
    is_waiting: bool = False
    answered: str | None = None
    rejected: str = ""
    is_held: bool = False
    is_given_up: bool = False
    pool: str = ""
    created: int = 0
    updated: int = 0

    @property
    def sort_key(self) -> tuple[int, str]:
        """The sort key of the turn: of two turns, the one with the smaller key is earlier."""
        return self.number, self.run

    @property
    def blocks(self) -> bool:
        """Whether later turns wait for it: it has not ended, or stopped without a result and may be retried."""
        if self.state == "CANCELLED":
            return self.is_held
        return self.state != "SUCCESS" and not self.is_given_up

    @property
    def has_begun(self) -> bool:
        """Whether it has read the state of the turns before it, or may have."""
        return not self.is_waiting and self.state != "CANCELLED"


@frozen(kw_only=True)
class DurableSessionView:
    """
    A summary of a session in the database.

    Attributes:
        id: Its id.
        turns: The number of its last turn.
        state: The state of that turn's run.
        agent: That turn's agent.
        updated: When that run was last changed, milliseconds since 1970.
    """

    id: str
    turns: int
    state: str
    agent: str
    updated: int


@frozen(kw_only=True)
class _TurnAction:
    """The next action for the first waiting turn: start it, send its replies, or reject it."""

    turn: TurnView
    asking: str | None = None
    replies: tuple[Reply, ...] = ()
    problem: str = ""


class Sessions:
    """
    The sessions of a deployment, seen from any process.

    Args:
        deployment: The deployment.
        waits: Finds the questions that a turn may answer.
        answers: Sends a turn that is an answer.
    """

    def __init__(self, deployment: Deployment, waits: RunWaits, answers: AnswerSender) -> None:
        self._deployment = deployment
        self._waits = waits
        self._answers = answers
        self._mine = asyncio.Lock()
        self._locks = ReopeningConnection(deployment.url)

    async def close(self) -> None:
        """Close the connection that has the locks of sessions."""
        await self._locks.close()

    @contextlib.asynccontextmanager
    async def _lock_session(self, session: str, *, waits: bool = True) -> AsyncIterator[bool]:
        """Lock the order of turns in a session; without *waits*, yield ``False`` if another process has the lock."""
        name = f"stepengine-session:{self._deployment.app}:{session}"
        while True:
            async with self._mine:
                if await self._execute_lock_statement(LOCK, name):
                    try:
                        yield True
                    finally:
                        with contextlib.suppress(DatabaseUnavailable):
                            await self._execute_lock_statement(UNLOCK, name)
                    return
            if not waits:
                yield False
                return
            # Asked for again and not waited for: one that is frozen with a session's lock keeps no other session.
            await asyncio.sleep(LOCK_PAUSE_SECONDS)

    async def _execute_lock_statement(self, statement: str, name: str) -> bool:
        """Return the result of a statement for a lock; close the connection, and so release its locks, if it is interrupted."""
        try:
            ((said,),) = await self._locks.fetch_rows(statement, name)
            return bool(said)
        except BaseException:
            # Whoever is interrupted here may have the lock: it goes with its connection.
            await self._locks.close()
            raise

    # --- looking ------------------------------------------------------------------------------------------------------

    async def list_sessions(self) -> list[DurableSessionView]:
        """Return all sessions, in the order of their ids; raises ``DatabaseUnavailable``."""
        rows = await self._deployment.fetch_rows(SESSIONS, self._deployment.app)
        return [
            DurableSessionView(id=name, turns=number, state=state, agent=agent, updated=updated or 0)
            for name, number, state, agent, updated in rows
        ]

    async def list_turns(self, session: str) -> list[TurnView]:
        """Return the turns of a session in their order, none for one that is not known; raises ``DatabaseUnavailable``."""
        return [_parse_turn(row) for row in await self._deployment.fetch_rows(TURNS, self._deployment.app, session)]

    async def list_waiting_sessions(self) -> list[str]:
        """Return the ids of the sessions with a waiting turn; raises ``DatabaseUnavailable``."""
        return [
            session
            for (session,) in await self._deployment.fetch_rows(
                WAITING_SESSIONS, self._deployment.app, self._deployment.app
            )
        ]

    async def load(self, session: str) -> Session:
        """
        Return a session after its last turn with a result, as session stores return it.

        One that is not known, or of which no turn has ended yet, has no messages. ``journal`` is the id of the run that has its
        turn now.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
            SessionError: when the id is none.
        """
        turns = await self._list_deciding_turns(require_session_id(session))
        empty = Session(info=SessionInfo(session_id=session))
        if not turns:
            return empty
        under_way = next((turn for turn in turns if turn.blocks and not turn.is_waiting), None)
        _, form = await self.find_last_turn_result(session)
        info = attrs.evolve(
            empty.info,
            agent_id=turns[-1].agent,
            created_at=_time_from_milliseconds(turns[0].created),
            updated_at=_time_from_milliseconds(max([turn.updated for turn in turns])),
        )
        journal = None if under_way is None else under_way.run
        if form is None:
            return attrs.evolve(empty, info=info, journal=journal)
        left, stored = form["session"], _get_state_after_turn(form)
        state = None if stored is None else decode_stored(stored)
        return Session(
            info=attrs.evolve(info, status=form["status"], user_id=left["user_id"], metadata=left["metadata"]),
            messages=empty.messages if state is None else state.message_history,
            state=state,
            turns=left["turns"],
            journal=journal,
            usage=decode_stored(left["usage"]),
            version=left["turns"],
        )

    async def load_rules(self, session: str) -> tuple[Mapping[str, Any], ...]:
        """Return the lasting approvals of a session after its last turn with a result, as rules of policy files."""
        _, form = await self.find_last_turn_result(session)
        return () if form is None else tuple(form["session"]["rules"])

    async def find_last_turn_result(
        self, session: str, before: int = LAST_TURN_NUMBER
    ) -> tuple[str | None, Mapping[str, Any] | None]:
        """Return run id and stored result of the last turn before number *before* that has a result; two ``None`` without one."""
        while rows := await self._deployment.fetch_rows(LAST_RESULT, self._deployment.app, session, before):
            ((run, before),) = rows
            found = await self._deployment.client.list_workflows_async(workflow_ids=[run], load_input=False)
            if found:
                return run, found[0].output
        return None, None

    async def _list_deciding_turns(self, session: str) -> list[TurnView]:
        """Return the first and the last turn of each kind in a session, in their order; they determine the next turn."""
        rows = await self._deployment.fetch_rows(DECIDING_TURNS, self._deployment.app, session)
        return sorted({row[0]: _parse_turn(row) for row in rows}.values(), key=lambda turn: turn.sort_key)

    # --- submitting ---------------------------------------------------------------------------------------------------

    async def submit(self, order: SubmittedRun, *, release: str | None = None) -> None:
        """
        Add a turn to its session, and start it or deliver it as an answer if possible.

        Raises:
            AnswerRejected: when the session waits for an answer, and this is not one.
            DatabaseUnavailable: when the database cannot be reached.
            InputError: when the id of the session cannot be stored.
            SessionError: when it is none.
        """
        session, deployment = require_session_id(order.info.session_id or ""), self._deployment
        if "\0" in session:
            msg = f"the session id {session!r} contains a NUL, which the database cannot store"
            raise InputError(msg, issues=("session_id",))
        async with self._lock_session(session):
            if not await deployment.has_run(order.root):
                number = 1 + max([turn.number for turn in await self._list_deciding_turns(session)], default=0)
                await deployment.enqueue(
                    attrs.evolve(order, turn=number),
                    release=release,
                    queue=waiting_queue_name(order.pool),
                    attributes={"session": session, "turn": number},
                )
            await self._advance_locked_session(session)
        view = await deployment.get_run(order.root)
        if view.attributes.get("rejected"):
            raise AnswerRejected(view.attributes["rejected"])

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    async def dispatch_turns_until_cancelled(self) -> None:
        """Start each waiting turn when it is due, until cancelled. Retry while the database is unreachable."""
        pause = IDLE_LOOK_SECONDS
        while True:
            try:
                waiting = await self.list_waiting_sessions()
            except Exception as error:  # noqa: BLE001  (if nobody looked any more, no turn would begin)
                if not isinstance(error, DatabaseUnavailable):
                    LOGGER.warning("the waiting turns of sessions could not be listed: %s", error)
                waiting = []
                await asyncio.sleep(MAX_LOOK_SECONDS)
            moved = [await self._advance_or_log(session) for session in waiting]
            if any(moved):
                pause = FIRST_LOOK_SECONDS
            elif waiting:
                pause = min(2 * pause, MAX_LOOK_SECONDS)
            else:
                pause = IDLE_LOOK_SECONDS
            await asyncio.sleep(pause)

    async def _advance_or_log(self, session: str) -> bool:
        """Advance a session as ``advance_session`` does; log an error and return ``False``, so that it does not stop other sessions."""
        try:
            return await self.advance_session(session)
        except DatabaseUnavailable:
            return False
        except Exception as error:  # noqa: BLE001  (whatever a row holds, the others have their turns)
            LOGGER.warning("the next turn of the session %r could not be started: %s", session, error)
            return False

    async def advance_session(self, session: str) -> bool:
        """Start or deliver the first waiting turns of a session; return ``False`` if none was ready, or another process has the lock."""
        if await self._find_next_action(session) is None:
            return False
        # Whoever has the lock moves it on.
        async with self._lock_session(session, waits=False) as is_mine:
            return is_mine and await self._advance_locked_session(session)

    async def _advance_locked_session(self, session: str) -> bool:
        """Apply the actions for waiting turns until the first one has to wait; return whether any was applied."""
        moved = False
        while (move := await self._find_next_action(session)) is not None and await self._apply_action(move):
            moved = True
        return moved

    async def _find_next_action(self, session: str) -> _TurnAction | None:
        """Return the action for the first waiting turn; ``None`` while it has to wait."""
        turns = await self._list_deciding_turns(session)
        first = next((turn for turn in turns if turn.is_waiting), None)
        if first is None:
            return None
        before = [turn for turn in turns if turn.blocks and turn.sort_key < first.sort_key]
        if first.answered is not None:
            # Whoever began to deliver it did not come to the end.
            return await self._make_redelivery_action(first)
        if not before:
            return _TurnAction(turn=first)
        return await self._make_answer_action(first, before[0]) if len(before) == 1 else None

    async def _make_answer_action(self, turn: TurnView, asking: TurnView) -> _TurnAction | None:
        """Return the action that answers the questions of the previous turn *asking*; ``None`` if this turn cannot answer them."""
        if asking.agent != turn.agent or asking.state != "PENDING":
            return None
        asked, _ = await self._waits.find_waits_if_suspended(asking.run)
        if not asked:
            return None
        found = await self._deployment.client.list_workflows_async(workflow_ids=[turn.run], load_output=False)
        order = SubmittedRun.from_json(found[0].input["args"][0])
        given = dict(order.answers) or ({asked[0].questions[0].id: order.prompt} if order.prompt else {})
        if not given or order.previous is not None:
            return None
        try:
            replies = await self._answers.make_replies(asking.run, given, sender=turn.run)
        except AnswerRejected as error:
            return _TurnAction(turn=turn, problem=error.message)
        return _TurnAction(turn=turn, asking=asking.run, replies=tuple(replies))

    async def _make_redelivery_action(self, turn: TurnView) -> _TurnAction:
        """Return the action that sends the stored replies of a turn again, after a process died while sending them."""
        view = await self._deployment.get_run(turn.run)
        replies = tuple([Reply(**json.loads(reply)) for reply in view.attributes["replies"]])
        return _TurnAction(turn=turn, asking=turn.answered, replies=replies)

    async def _apply_action(self, move: _TurnAction) -> bool:
        """Apply the action for a turn; repeating it changes nothing. Return whether the next turn may follow."""
        client, turn = self._deployment.client, move.turn
        if move.problem:
            await client.update_workflow_attributes_async(turn.run, {"rejected": move.problem}, merge=True)
            await client.cancel_workflow_async(turn.run)
            return True
        if not move.replies:
            await client.resume_workflow_async(turn.run, queue_name=queue_name(turn.pool, 0))
            return True
        # Stored before it is sent, so that it is sent once even if a process dies in between: each reply has a key of its own.
        # As text: attributes hold no escapes of what is not text, which an answer may hold.
        replies = [json.dumps(attrs.asdict(reply)) for reply in move.replies]
        noted = {"answered": move.asking, "replies": replies}
        await client.update_workflow_attributes_async(turn.run, noted, merge=True)
        for reply in move.replies:
            await self._answers.send_reply(reply)
        if not await self._answers.is_reply_accepted(move.replies[0]):
            # Somebody else answered at the same moment.
            forgotten = {"answered": None, "replies": None}
            await client.update_workflow_attributes_async(turn.run, forgotten, merge=True)
            return False
        await client.cancel_workflow_async(turn.run)
        return True

    # --- turns that stopped -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lock_turn_session(self, view: DurableRunView) -> AsyncIterator[None]:
        """Lock the session of a turn for the block, so that no turn starts; do nothing for other runs."""
        if "turn" not in view.attributes:
            yield
            return
        async with self._lock_session(view.attributes["session"]):
            yield

    async def hold_session_for_turn(self, view: DurableRunView) -> None:
        """Let a session wait for its cancelled turn until ``lock_retryable_turn`` or ``release_session_from_turn``."""
        if "turn" in view.attributes:
            await self._deployment.client.update_workflow_attributes_async(view.id, {"held": True}, merge=True)

    async def release_session_from_turn(self, view: DurableRunView) -> bool:
        """Let a session continue without a stopped turn; return whether it waited for that turn."""
        is_held = view.state == "CANCELLED" and bool(view.attributes.get("held"))
        stopped = is_held or view.state in ("ERROR", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")
        if "turn" not in view.attributes or not stopped:
            return False
        news = {"held": None} if is_held else {"given_up": True}
        await self._deployment.client.update_workflow_attributes_async(view.id, news, merge=True)
        return True

    @contextlib.asynccontextmanager
    async def lock_retryable_turn(self, view: DurableRunView) -> AsyncIterator[None]:
        """
        Check that a stopped turn can be retried, and lock its session for the block; then the turn is no longer held or given up.

        Raises:
            JournalError: when the session has gone on without it, or it was an answer.
        """
        if "turn" not in view.attributes:
            yield
            return
        session = view.attributes["session"]
        async with self._lock_session(session):
            turns = await self.list_turns(session)
            own = next((turn for turn in turns if turn.run == view.id), None)
            if own is not None and (own.answered is not None or own.rejected):
                msg = f"the run {view.id!r} was a message to a run that waited for an answer, so it cannot be retried"
                raise JournalError(msg)
            later = [turn.run for turn in turns if own is not None and turn.sort_key > own.sort_key and turn.has_begun]
            if later:
                msg = (
                    f"the session {session!r} continued without the run {view.id!r}: {later[0]!r} has started, so the run cannot be "
                    "retried; submit it again"
                )
                raise JournalError(msg)
            yield
            free = {"held": None, "given_up": None}
            await self._deployment.client.update_workflow_attributes_async(view.id, free, merge=True)


def _parse_turn(row: Sequence[Any]) -> TurnView:
    run, state, attributes, queue, created, updated = row
    _, _, rest = (queue or "").partition("se.")
    pool, _, last = rest.rpartition(".")
    return TurnView(
        run=run,
        number=attributes["turn"],
        state=state,
        agent=attributes.get("agent", ""),
        is_waiting=state == "ENQUEUED" and last == "line",
        answered=attributes.get("answered"),
        rejected=attributes.get("rejected") or "",
        is_held=bool(attributes.get("held")),
        is_given_up=bool(attributes.get("given_up")),
        pool=pool,
        created=created or 0,
        updated=updated or 0,
    )


def _time_from_milliseconds(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


async def resolve_answered_run(deployment: Deployment, run: str) -> str:
    """Return the id of the run with the result of *run*: the run that it answered, else *run* itself."""
    attributes = (await deployment.get_run(run)).attributes
    answered: str = attributes.get("answered") or run
    return answered


# --- the state from which a turn starts, and the state that it stores ---------------------------------------------------


async def load_previous_turn(sessions: Sessions, order: SubmittedRun) -> dict[str, Any]:
    """Return the stored state from which a turn continues; retry while the database is unreachable."""
    session = order.info.session_id or ""
    after = form = None
    is_known = False
    while not is_known:
        try:
            after, form = await sessions.find_last_turn_result(session, order.turn)
            is_known = True
        except DatabaseUnavailable:
            await asyncio.sleep(MAX_LOOK_SECONDS)
    if form is None:
        return {"after": None, "state": None, "session": FIRST_STATE}
    return {"after": after, "state": _get_state_after_turn(form), "session": form["session"]}


def _get_state_after_turn(form: Mapping[str, Any]) -> object:
    """Return the state after a turn; for a turn that a hook refused, the state before the turn."""
    left = form["session"]
    return left["state"] if "state" in left else form["state"]


def with_previous_turn(order: SubmittedRun, turn_state: Mapping[str, Any]) -> SubmittedRun:
    """Return the order of a turn with the state and rules after the turn before; a state from the caller takes precedence."""
    stored = turn_state["state"]
    return attrs.evolve(
        order,
        previous=order.previous or (None if stored is None else decode_stored(stored)),
        rules=tuple(map(freeze, turn_state["session"]["rules"])),
        before=turn_state,
    )


def make_turn_record(
    order: SubmittedRun, result: RunResult, rules: Sequence[object], *, has_started: bool
) -> dict[str, Any]:
    """
    Return the members that a turn stores for the next turn in addition to its state.

    A turn that a hook refused (*has_started* is false) stores the members of the previous turn.
    """
    assert order.before is not None  # noqa: S101 - it has entered its session
    before = order.before["session"]
    if not has_started:
        return {**before, "state": order.before["state"], "is_saved": False}
    usage: Usage = decode_stored(before["usage"])
    return {
        "turns": before["turns"] + 1,
        "usage": encode_stored(usage + result.usage),
        "metadata": {**before["metadata"], **order.info.metadata},
        "user_id": order.info.user_id or before["user_id"],
        "rules": list(rules),
        "is_saved": True,
    }
