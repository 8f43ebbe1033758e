"""
``Operator``: what can be done to durable runs from any process, with nothing but the database: no agents, no models.

Each method is one transaction or a few that may be repeated. Times are seconds, ids those of runs: ``ROOT`` or ``ROOT/PATH``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import canonical, freeze
from stepengine.data.limits import Limits
from stepengine.data.questions import AnswerLike, Question, check_answer
from stepengine.data.state import AgentState, RunInfo
from stepengine.data.waits import Waits
from stepengine.data.yields import check_topic
from stepengine.durable.database import (
    CHILD_POLL_SECONDS,
    WORKFLOW,
    DatabaseAway,
    check_deployment_name,
    connect,
    convert_database_errors,
    nul_free_sql,
    open_connection,
    parse_database_url,
    queue_name,
)
from stepengine.durable.indexes import child_condition_sql, root_id_sql
from stepengine.durable.messages import TOPIC, find_text_problem, make_database_topic, parse_message_form
from stepengine.durable.sessions import SENT, Sessions, resolve_answered_run, waiting_queue_name
from stepengine.durable.wire import Order, Reply, Seed, encode_answers, to_portable_json
from stepengine.engine.options import MAX_RUN_ID_CHARS
from stepengine.errors import AnswerRejected, InputError, JournalCorrupt, JournalError, StepEngineError
from stepengine.journal.encoding import restored
from stepengine.journal.mailbox import MAX_VALUE_BYTES

OVER = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")
"""The states of runs that no worker resumes by itself."""
UNREAD = """
    select topic, message, message_uuid from dbos.notifications
    where destination_uuid = %s and not consumed and serialization = 'portable_json' order by created_at_epoch_ms
"""
BELOW = f"select workflow_uuid from dbos.workflow_status where {child_condition_sql()} and {root_id_sql()} = %s"  # noqa: S608
SIZES = (
    "select workflow_uuid, count(*) from dbos.operation_outputs where workflow_uuid = any(%s) group by workflow_uuid"
)
OF_TREES = f"(s.workflow_uuid = any(%s) or ({child_condition_sql('s.')} and {root_id_sql('s.')} = any(%s)))"
LIVING = f"""
    select s.workflow_uuid, s.status,
        count(*) filter (where o.function_name like 'spawn:%%'), count(*) filter (where o.function_name like 'child:%%')
    from dbos.workflow_status s left join dbos.operation_outputs o using (workflow_uuid)
    where {OF_TREES} and s.status in ('PENDING', 'ENQUEUED', 'DELAYED')
    group by s.workflow_uuid, s.status
"""  # noqa: S608
"""The runs of trees that have not ended, with how many children they asked for, and of how many they know the end."""
WAIT_SECONDS = 0.1
"""One query looks at all runs that this process waits for, so ten in a second are cheap, and a short run is noticed at once."""
STEPS = """
    select function_id, function_name, output, serialization from dbos.operation_outputs
    where workflow_uuid = %s and function_id <> all(%s::int[]) order by function_id
"""
OPEN = f"""
    select o.workflow_uuid, o.output,
        (select array_agg(n.topic) from dbos.notifications n where n.destination_uuid = o.workflow_uuid and not n.consumed)
    from dbos.workflow_status s join dbos.operation_outputs o using (workflow_uuid)
    where s.status in ('PENDING', 'ENQUEUED') and {OF_TREES}
        and o.function_name like 'ask:%%' and o.serialization = 'portable_json'
        and not exists (
            select 1 from dbos.operation_outputs r where r.workflow_uuid = o.workflow_uuid and r.function_id = o.function_id + 1
        )
    order by o.workflow_uuid, o.function_id
"""  # noqa: S608
"""
What a run and those below it ask: a marker that no taken message follows; and the topics of those that were sent and not
taken yet. The wait for a message draws the number after that of its marker.
"""
WAITED = f"""
    select o.workflow_uuid, o.output
    from dbos.workflow_status s join dbos.operation_outputs o using (workflow_uuid)
    where s.status in ('PENDING', 'ENQUEUED') and {OF_TREES}
        and o.function_name like 'wait:%%' and o.serialization = 'portable_json'
        and not exists (
            select 1 from dbos.operation_outputs r where r.workflow_uuid = o.workflow_uuid and r.function_id = o.function_id + 1
        )
        and not exists (
            select from dbos.notifications n
            where n.destination_uuid = split_part(o.workflow_uuid, '/', 1)
                and n.topic = 'post:' || ({nul_free_sql("o.output")}::json->>'path') || ':' || ({nul_free_sql("o.output")}::json->>'topic')
                and not exists (
                    select from dbos.operation_outputs h
                    where h.workflow_uuid = o.workflow_uuid and h.serialization = 'portable_json' and exists (
                        select from json_array_elements_text({nul_free_sql("h.output")}::json->'heard') as heard (key) where key = n.message_uuid
                    )
                )
        )
    order by o.workflow_uuid, o.function_id
"""  # noqa: S608
"""What a run and those below it wait for: a marker that no outcome follows; not for a message that nobody has taken yet."""


def make_run_id() -> str:
    """Return an id for a root run; later ones sort after earlier ones."""
    return f"{int(time.time() * 1000):012x}{secrets.token_hex(5)}"


def check_limits_without_ask(limits: Limits | None, whose: str, error: type[StepEngineError]) -> None:
    """Raise *error* for limits with ``ask``, since each child of a durable run has its own part of the limit."""
    if limits is not None and limits.ask:
        msg = (
            f"{whose} has Limits(ask=True), which a durable run cannot have: its children are driven in processes of their own, each with "
            "its part of the limit; leave it out, or run it with a journal"
        )
        raise error(msg)


def get_parent_run_id(run: str) -> str:
    """Return the id of the parent by path, which may be a tool body inside its caller's run; ``""`` for a root."""
    root, _, path = run.partition("/")
    above = path.rpartition(".")[0]
    return "" if not path else f"{root}/{above}" if above else root


def check_run_id(run: str) -> str:
    """
    Return *run*.

    Raises:
        InputError: when no root run can have that id.
    """
    if not run or len(run) > MAX_RUN_ID_CHARS or "/" in run or not run.isprintable() or run != run.strip():
        msg = f"the id of a run is up to {MAX_RUN_ID_CHARS} printable characters without '/', not {run[:MAX_RUN_ID_CHARS]!r}"
        raise InputError(msg, issues=("id",))
    return run


@frozen(kw_only=True)
class DurableRunView:
    """
    A run in the database.

    Attributes:
        id: Its id.
        state: ``ENQUEUED``, ``DELAYED``, ``PENDING`` (a worker has it), or one of ``OVER``. A run that ended as failed is
            ``SUCCESS``: it has a result that says so.
        agent: The root's agent; of a child its own.
        executor: Who has it, or had it last.
        release: The release that it belongs to.
        queue: The queue that it waits in, or came from.
        created: When it was submitted, milliseconds since 1970.
        updated: When it was last changed.
        attempts: How often it was dispatched.
        attributes: What operators keep with it.
    """

    id: str
    state: str
    agent: str = ""
    executor: str | None = None
    release: str | None = None
    queue: str | None = None
    created: int = 0
    updated: int = 0
    attempts: int = 0
    attributes: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def root(self) -> str:
        """The id of its root."""
        return self.id.partition("/")[0]

    @property
    def is_over(self) -> bool:
        """Whether no worker resumes it by itself."""
        return self.state in OVER


@frozen
class Step:
    """
    A recorded step of a run.

    Attributes:
        number: Its number in the database, which is not that of an effect.
        name: ``kind:fingerprint``, or one of the package's own.
        form: What it returned, as JSON.
    """

    number: int
    name: str
    form: Any


def _parse_step(run: str, number: int, name: str, output: str | None, serialization: str | None) -> Step:
    if output is None:
        return Step(number, name, None)
    if serialization != "portable_json":
        msg = f"step {number} ({name}) of {run!r} holds {serialization}, which is never read; stepengine writes portable JSON"
        raise JournalCorrupt(msg)
    return Step(number, name, _parse_recorded_json(output, f"step {number} ({name}) of {run!r}"))


def _parse_recorded_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{where} holds no JSON: {error}"
        raise JournalCorrupt(msg) from None


def make_question_waits(asked: Iterable[Waiting]) -> list[Waits]:
    """Return the questions of *asked* as things that a run waits for."""
    return [
        Waits(kind="question", path=each.path, seq=each.seq, question=question)
        for each in asked
        for question in each.questions
    ]


@frozen(kw_only=True)
class Waiting:
    """
    An open ``Ask`` of a run.

    Attributes:
        run: The run that asks: a root, or a child.
        path: Its path; of a question that the body of a tool asks in that run, the path of the body.
        seq: The number of its ``Ask``.
        questions: What it asks; all are answered at once.
    """

    run: str
    path: str
    seq: int
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """The key that makes its answer count once."""
        root = self.run.partition("/")[0]
        return f"{root}/{self.path}:{self.seq}" if self.path else f"{root}:{self.seq}"

    @property
    def topic(self) -> str:
        """Where its answer is sent."""
        return f"ask:{self.path}:{self.seq}"


class _AsyncClient:
    """The client of ``dbos``, whose asynchronous methods raise ``DatabaseAway``."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self.destroy: Callable[[], None] = client.destroy

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._client, name)

        async def asked(*args: Any, **kwargs: Any) -> Any:
            with convert_database_errors(self._url):
                return await method(*args, **kwargs)

        return asked


class _EndWatcher:
    """Polls for the ends of all awaited runs with one query."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._waiting: dict[str, set[asyncio.Future[str]]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def ended(self, run: str, seconds: float) -> str | None:
        """Return the state of a run once it is over, ``None`` when it is not after *seconds*."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run, set()).add(future)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._poll_states())
        try:
            await asyncio.wait((future,), timeout=seconds)
            return future.result() if future.done() else None
        finally:
            waiting = self._waiting[run]
            waiting.discard(future)
            future.cancel()
            if not waiting:
                del self._waiting[run]

    async def _poll_states(self) -> None:
        while self._waiting:
            runs = list(self._waiting)
            try:
                states = await self._operator.states(runs)
            except StepEngineError as error:
                for run in runs:
                    self._notify_waiters(run, error)
            else:
                for run in runs:
                    state = states.get(run)
                    if state is None:
                        self._notify_waiters(run, _make_missing_run_error(run))
                    elif state in OVER:
                        self._notify_waiters(run, state)
            await asyncio.sleep(WAIT_SECONDS)

    def _notify_waiters(self, run: str, news: str | StepEngineError) -> None:
        for future in self._waiting.get(run, ()):
            if future.done():
                continue
            if isinstance(news, str):
                future.set_result(news)
            else:
                future.set_exception(news)

    async def close(self) -> None:
        """Stop polling."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))


class Operator:
    """
    A client of the database of durable runs. Make one with ``await Operator.connect(url)``; ``close`` it.

    Attributes:
        client: The package's own client.
        url: The database.
        app: The deployment's name.
        pool: The pool that runs are submitted to.
        sessions: Its sessions.
    """

    def __init__(self, client: object, url: str, *, app: str, pool: str) -> None:
        self.client: Any = _AsyncClient(client, url)
        self.url = url
        self.app = app
        self.pool = pool
        self._connection: Any = None
        self._asking = asyncio.Lock()
        self._watch = _EndWatcher(self)
        self.sessions = Sessions(self)

    @classmethod
    async def connect(cls, url: str, *, app: str = "stepengine", pool: str = "default") -> Self:
        """
        Return an operator.

        Args:
            url: The database, or ``@FILE`` with its URL.
            app: The deployment's name.
            pool: Where runs are submitted to.

        Raises:
            DatabaseAway: when it cannot be reached.
            DefinitionError: when the URL or the name is not valid.
            StepEngineError: when the extra is not installed.
        """
        real, name = parse_database_url(url), check_deployment_name(app, "the name of a deployment")
        return cls(await connect(real, app=name), real, app=name, pool=pool)

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        await self._watch.close()
        await self.sessions.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        await asyncio.to_thread(self.client.destroy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- submitting ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        agent: str,
        prompt: str = "",
        *,
        id: str | None = None,
        params: object = None,
        limits: Limits | None = None,
        agent_models: Mapping[str, str] | None = None,
        previous: AgentState | None = None,
        info: RunInfo | None = None,
        answers: Mapping[str, AnswerLike] | None = None,
        priority: int = 0,
        release: str | None = None,
        seed: str | None = None,
    ) -> str:
        """
        Submit a run and return its id; a repeated id returns the same run.

        Args:
            agent: The agent's id. A worker finds out whether there is such an agent.
            prompt: What it should do.
            id: The run's id, which makes submitting idempotent; drawn by default.
            params: A JSON object.
            limits: Limits of this run; none that asks for more.
            agent_models: Models of this run in place of those that agents name, by agent id.
            previous: The state that it continues.
            info: Session, user, metadata. A run in a session is a turn: it begins when those before it are over, and goes on
                from what they left. Where the session waits for an answer to its agent, it is that answer instead.
            answers: Answers to questions that it will ask, by question id or text.
            priority: 1 is first, larger numbers later; 0 goes before all of them.
            release: Which release runs it; by default the latest that a worker has registered.
            seed: What its randomness depends on; drawn by default.

        Raises:
            AnswerRejected: when the session waits for an answer, and this is not one.
            InputError: when id, session or priority cannot be used.
            DataError: when something cannot be stored.
            SessionError: when the id of the session is none.
        """
        run = check_run_id(make_run_id() if id is None else id)
        check_limits_without_ask(limits, f"this run of {agent!r}", InputError)
        if priority < 0:
            msg = f"a priority is 0 or a larger number, not {priority}"
            raise InputError(msg, issues=("priority",))
        order = Order(
            root=run,
            agent_id=agent,
            prompt=prompt,
            params=None if params is None else freeze(params, "params"),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            seed=seed or secrets.token_hex(8),
            info=info or RunInfo(),
            limits=limits,
            models=dict(agent_models or {}),
            previous=previous,
            answers=dict(answers or {}),
            priority=priority,
            pool=self.pool,
        )
        if order.info.session_id is None:
            await self.enqueue(order, release=release)
        else:
            await self.sessions.submit(order, release=release)
        return run

    async def enqueue(
        self,
        order: Order,
        *,
        seed: Seed | None = None,
        release: str | None = None,
        queue: str | None = None,
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        """
        Put an order on its queue, unless it is there.

        Args:
            order: What is ordered.
            seed: Where it goes on.
            release: Which release runs it; by default the latest.
            queue: Another queue than that of its depth.
            attributes: What is kept with it beside its agent.

        Raises:
            InputError: when its limits ask for more.
        """
        check_limits_without_ask(order.limits, f"the run {order.id!r}", InputError)
        options: dict[str, object] = {
            "workflow_name": WORKFLOW,
            "queue_name": queue or queue_name(order.pool, len(order.spawns)),
            "workflow_id": order.id,
            "attributes": {"agent": order.agent_id, **(attributes or {})},
        }
        options |= {"priority": order.priority} if order.priority else {}
        options |= {"app_version": release} if release is not None else {}
        await self.client.enqueue_async(options, order.form(), *([] if seed is None else [seed.form()]))

    # --- looking ------------------------------------------------------------------------------------------------------

    async def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """
        Return the rows of a query.

        Args:
            statement: The statement.
            values: What stands in its places, or one mapping where these have names.

        Raises:
            DatabaseAway: when the database cannot be reached.
        """
        async with self._asking:
            was_open = self._connection is not None and not (self._connection.broken or self._connection.closed)
            try:
                return await self._execute_query(statement, values)
            except DatabaseAway:
                # One that was kept does not know that the database was started again since.
                if not was_open:
                    raise
                return await self._execute_query(statement, values)

    async def _execute_query(self, statement: str, values: Sequence[object]) -> list[tuple[object, ...]]:
        if self._connection is None or self._connection.broken or self._connection.closed:
            self._connection = await open_connection(self.url)
        with convert_database_errors(self.url):
            named = len(values) == 1 and isinstance(values[0], Mapping)
            found = await self._connection.execute(statement, values[0] if named else values)
            return list(await found.fetchall())

    async def states(self, runs: Sequence[str]) -> dict[str, str]:
        """
        Return the state of each of *runs* that there is, as in ``DurableRunView.state``; one query however many.

        Raises:
            DatabaseAway: when the database cannot be reached.
        """
        found = await self.client.list_workflows_async(workflow_ids=list(runs), load_input=False, load_output=False)
        return {status.workflow_id: str(status.status) for status in found}

    async def run(self, run: str) -> DurableRunView:
        """
        Return one run.

        Raises:
            JournalError: when there is none of that id.
        """
        found = await self.client.list_workflows_async(workflow_ids=[run], load_input=False, load_output=False)
        if not found:
            raise _make_missing_run_error(run)
        return make_run_view(found[0])

    async def tree(self, root: str) -> list[DurableRunView]:
        """
        Return a root run and every run below it, the root first.

        Raises:
            JournalError: when there is none of that id.
        """
        below = [run for (run,) in await self.rows(BELOW, root)]
        found = await self.client.list_workflows_async(workflow_ids=[root, *below], load_input=False, load_output=False)
        views = sorted(map(make_run_view, found), key=lambda view: view.id != root)
        if not views or views[0].id != root:
            raise _make_missing_run_error(root)
        return views

    async def steps(self, run: str, known: Collection[int] = ()) -> list[Step]:
        """
        Return the recorded steps of one run in order, without those whose numbers are *known*.

        Raises:
            JournalCorrupt: when a row is not what stepengine writes.
        """
        return [_parse_step(run, *row) for row in await self.rows(STEPS, run, list(known))]

    async def sizes(self, runs: Sequence[str]) -> dict[str, int]:
        """Return how many steps of these runs are recorded, by id; a run without any is left out."""
        return {str(run): int(size) for run, size in await self.rows(SIZES, list(runs))}

    async def waiting(self, root: str) -> list[Waiting]:
        """
        Return the open questions of a run and its descendants, in the order of their ids.

        Raises:
            JournalCorrupt: when a row is not JSON.
        """
        return await self._find_questions([root])

    async def _find_questions(self, roots: Sequence[str]) -> list[Waiting]:
        asked = [
            (
                Waiting(run=run, path=form["path"], seq=form["seq"], questions=tuple(map(restored, form["questions"]))),
                sent,
            )
            for run, text, sent in await self.rows(OPEN, list(roots), list(roots))
            if "questions" in (form := _parse_recorded_json(text, f"a question of {run!r}"))
        ]
        return [each for each, sent in asked if each.topic not in (sent or ())]

    async def waits(self, root: str) -> list[tuple[str, Waits]]:
        """
        Return the waits of a run and its descendants except questions, each with its run; arrived messages are left out.

        Raises:
            JournalCorrupt: when a row is not JSON.
        """
        return await self._find_waits([root])

    async def _find_waits(self, roots: Sequence[str]) -> list[tuple[str, Waits]]:
        found: list[tuple[str, Waits]] = []
        for run, text in await self.rows(WAITED, list(roots), list(roots)):
            form = _parse_recorded_json(text, f"a wait of {run!r}")
            until = form["wakes_at"]
            wait = Waits(
                kind=form["kind"], path=form["path"], seq=form["seq"], topic=form.get("topic", ""),
                wakes_at=None if until is None else datetime.fromisoformat(until), children=form.get("children", ()),
            )  # fmt: skip
            found.append((run, wait))
        return found

    async def list_blocking_questions(self, root: str) -> list[Waiting]:
        """Return the open questions of a tree of runs that all wait; an empty list if one of them is running."""
        return (await self.rests(root))[0]

    async def rests(self, root: str, *, beyond: float = 60.0) -> tuple[list[Waiting], list[Waits]]:
        """
        Return the open questions and other waits of a tree if all of it is suspended; nothing if a run is active.

        Args:
            root: The root run.
            beyond: Seconds; a run that wakes by itself before is one that goes on.
        """
        return (await self.resting([root], beyond=beyond)).get(root, ([], []))

    async def resting(
        self, roots: Sequence[str], *, beyond: float = 60.0
    ) -> dict[str, tuple[list[Waiting], list[Waits]]]:
        """Return the result of ``rests`` for each suspended tree of *roots*, with a constant number of queries."""
        found = await self._find_suspended_trees(roots, beyond)
        unsure = [root for root, (_, waits) in found.items() if any(wait.kind == "child" for wait in waits)]
        if unsure:
            # A child may have ended, and its parent not have seen it yet.
            await asyncio.sleep(2 * WAIT_SECONDS + CHILD_POLL_SECONDS)
            again = await self._find_suspended_trees(unsure, beyond)
            for root in unsure:
                if again.get(root) != found[root]:
                    del found[root]
        return found

    async def _find_suspended_trees(
        self, roots: Sequence[str], beyond: float
    ) -> dict[str, tuple[list[Waiting], list[Waits]]]:
        asked, waits = await self._find_questions(roots), await self._find_waits(roots)
        soon = datetime.now(UTC) + timedelta(seconds=beyond)
        asking = {each.run for each in asked} | {
            run for run, wait in waits if wait.wakes_at is None or wait.wakes_at > soon
        }
        having = {run.partition("/")[0] for run in (*asking, *[run for run, _ in waits])}
        if not having:
            return {}
        rows = await self.rows(LIVING, list(having), list(having))
        left = {run: (state, spawned - ended) for run, state, spawned, ended in rows}
        below = Counter([_find_nearest_known(get_parent_run_id(run), left) for run in left])
        going_on = {
            run.partition("/")[0]
            for run, (state, outstanding) in left.items()
            if state != "PENDING" or not (run in asking or 0 < outstanding <= below[run])
        }
        return {
            root: (
                [each for each in asked if each.run.partition("/")[0] == root],
                [wait for run, wait in waits if run.partition("/")[0] == root],
            )
            for root in having - going_on
        }

    # --- acting -------------------------------------------------------------------------------------------------------

    async def answer(self, root: str, answers: Mapping[str, AnswerLike]) -> None:
        """
        Answer open questions of a run or those below it; questions that were asked at once are answered at once.

        Args:
            root: The root run.
            answers: Answers by question id or text.

        Raises:
            AnswerRejected: when one fits no open question, or one that was asked with it has no answer; nothing is sent.
            JournalError: when there is no such run.
        """
        for reply in await self.replies(root, answers):
            await self.send(reply)

    async def answer_first(self, root: str, answers: Mapping[str, AnswerLike]) -> None:
        """
        Answer like ``answer``, and raise if another answer was first.

        Raises:
            AnswerRejected: as ``answer``, and when somebody else has answered at the same moment.
            JournalError: when there is no such run.
        """
        replies = await self.replies(root, answers, of=secrets.token_hex(8))
        for reply in replies:
            await self.send(reply)
        for reply in replies:
            rows = await self.rows(SENT, reply.run, f"{reply.key}::{reply.run}")
            if not rows or parse_message_form(rows[0][0]).get("of") != reply.message["of"]:
                msg = f"somebody else has answered {' or '.join(map(repr, answers))} in the meantime"
                raise AnswerRejected(msg)

    async def replies(self, root: str, answers: Mapping[str, AnswerLike], *, of: str = "") -> list[Reply]:
        """
        Return the messages that answer open questions; errors as ``answer``.

        Args:
            root: The root run.
            answers: Answers by question id or text.
            of: The run that says it, if one does.
        """
        view = await self.run(root)
        if view.is_over:
            msg = f"the run {root!r} is {view.state} and waits for no answer"
            raise AnswerRejected(msg)
        open_ = await self.waiting(root)
        answers = _resolve_question_ids(answers, open_)
        chosen = [asked for asked in open_ if any(question.id in answers for question in asked.questions)]
        _check_all_answers(answers, open_, chosen)
        # In the run's own time: milliseconds since it was submitted.
        at = max(0, int(time.time() * 1000) - view.created)
        said = {"of": of} if of else {}
        return [
            Reply(
                run=asked.run,
                topic=asked.topic,
                key=asked.key,
                message={"at": at, "answers": encode_answers(asked.questions, answers), **said},
            )
            for asked in chosen
        ]

    async def send(self, reply: Reply) -> None:
        """Send a message to the run that waits for it; the same one counts once."""
        await self.client.send_async(reply.run, reply.message, reply.topic, idempotency_key=reply.key)

    async def say(self, root: str, text: str, *, id: str | None = None) -> None:
        """
        Send user input to a running run, for its next model call.

        What a run hears it has heard, whatever dies. One that ends before it has heard it is not told any more.

        Args:
            root: A root run.
            text: The message.
            id: What makes the same message count once; drawn by default.

        Raises:
            InputError: when the text holds what the database does not store.
            JournalError: when there is no such root run, or it has ended.
        """
        problem = find_text_problem(text)
        if problem:
            msg = f"a message holds {problem}"
            raise InputError(msg, issues=("text",))
        view = await self.run(root)
        if view.is_over or "/" in root:
            why = f"it is {view.state}" if view.is_over else "it is a child, and only roots are spoken to"
            msg = f"the run {root!r} takes no messages: {why}"
            raise JournalError(msg)
        await self.client.send_async(root, {"text": text}, TOPIC, idempotency_key=id or make_run_id())

    async def post(self, root: str, topic: str, value: object, *, id: str | None = None, path: str = "") -> bool:
        """
        Send a message to a running run, for its next ``Receive`` on that topic.

        Returns whether no message with its *id* was there before.

        Args:
            root: A root run.
            topic: The topic.
            value: What it says, JSON of at most 1 MiB.
            id: What makes the same message count once; drawn by default.
            path: The path of the run that it is for, where that is a child.

        Raises:
            BadYield: when *topic* is none.
            DataError: when *value* is no JSON that the database stores.
            InputError: when it is too large, or *path* or *id* is none.
            JournalError: when there is no such root run, or it has ended.
        """
        where, key = make_database_topic(path, check_topic(topic)), check_run_id(make_run_id() if id is None else id)
        if not all(part.isdecimal() for part in path.split(".") if path):
            msg = f"the path of a run is numbers with dots between them, such as '3.0', not {path[:MAX_RUN_ID_CHARS]!r}"
            raise InputError(msg, issues=("path",))
        said = to_portable_json({"value": freeze(value)})
        if len(canonical(said)) > MAX_VALUE_BYTES:
            msg = f"a message is JSON of at most {MAX_VALUE_BYTES:,} bytes"
            raise InputError(msg, issues=("value",))
        view = await self.run(root)
        if view.is_over or "/" in root:
            why = f"it is {view.state}" if view.is_over else "it is a child; name its root, and its path with path="
            msg = f"the run {root!r} takes no messages: {why}"
            raise JournalError(msg)
        is_known = id is not None and bool(await self.rows(SENT, root, f"{key}::{root}"))
        await self.client.send_async(root, said, where, idempotency_key=key)
        return not is_known

    async def cancel(self, root: str, *, is_held: bool = False) -> list[str]:
        """
        Cancel a run and everything below it, and return the ids of those that had not ended.

        What a worker has is interrupted within a second; a tool that must not be is let end first. The session of a turn goes
        on without it, also where it had stopped without a result.

        Args:
            root: The root run.
            is_held: Whether the session of a turn waits until it is tried again.

        Raises:
            JournalError: when there is no such run.
        """
        async with self.sessions.stopping(await self.run(root)):
            known = await self.tree(root)
            tree = [each for each in known if not each.is_over]
            if is_held and tree:
                await self.sessions.hold(known[0])
            elif not is_held and await self.sessions.give_up(known[0]):
                return [root]
            for each in tree:
                await self.client.cancel_workflow_async(each.id)
            return [each.id for each in tree]

    async def retry(self, root: str, *, release: str | None = None) -> list[str]:
        """
        Resume a tree that diverged, was cancelled, or killed its workers, after its last recorded steps.

        Args:
            root: The root run.
            release: The release that resumes it; by default the one that it belongs to.

        Returns:
            The ids of the runs that go on.

        Raises:
            JournalError: when there is no such run, none of the tree has stopped without a result, or its session went on
                without it.
        """
        tree = await self.tree(root)
        stopped = [each for each in tree if each.is_over and each.state != "SUCCESS"]
        if not stopped:
            msg = f"no run of {root!r} has stopped without a result, so there is nothing to try again"
            raise JournalError(msg)
        # Whatever was cancelled does not know its queue any more.
        found = await self.client.list_workflows_async(workflow_ids=[root.partition("/")[0]], load_output=False)
        pool = Order.from_form(found[0].input["args"][0]).pool
        async with self.sessions.again(tree[0]):
            for each in reversed(stopped):
                is_turn = "turn" in each.attributes
                queue = waiting_queue_name(pool) if is_turn else self.queue_of(each.id, pool)
                await self.rewind(each.id, release=release, queue=queue)
        return [each.id for each in stopped]

    async def rewind(self, run: str, *, queue: str, release: str | None = None) -> None:
        """
        Put a stopped run back on its queue, with its record and the answers sent to it.

        Args:
            run: The run; only it, nothing below it.
            queue: The queue.
            release: The release that resumes it; by default the one that it belongs to.

        Raises:
            JournalCorrupt: when an answer that waits is not JSON; the run stays as it is.
            JournalError: when it goes on already.
        """
        # Rewinding deletes messages that were not taken: read before, they are sent again with their keys.
        unread = [
            (topic, _parse_recorded_json(message, f"an answer to {run!r}"), key)
            for topic, message, key in await self.rows(UNREAD, run)
        ]
        steps = await self.client.list_workflow_steps_async(run, load_output=False)
        options = {"application_version": release} if release is not None else {}
        await self.client.update_workflow_attributes_async(run, {"again": True}, merge=True)
        start = 1 + max([step["function_id"] for step in steps], default=0)
        try:
            await self.client.rewind_workflow_async(run, start_step=start, queue_name=queue, **options)
        except Exception as error:
            if (await self.run(run)).is_over:
                raise
            msg = f"the run {run!r} goes on already: somebody else tried it again"
            raise JournalError(msg) from error
        for topic, message, key in unread:
            await self.client.send_async(run, message, topic, idempotency_key=key.removesuffix(f"::{run}"))

    def queue_of(self, run: str, pool: str | None = None) -> str:
        """Return the queue of a run by its depth, in *pool* or that of this operator."""
        path = run.partition("/")[2]
        return queue_name(pool or self.pool, path.count(".") + 1 if path else 0)

    async def ended(self, run: str, seconds: float) -> str | None:
        """
        Wait up to *seconds* for the end of a run and return its state; ``None`` if it has not ended.

        Raises:
            DatabaseAway: when the database cannot be reached.
            JournalError: when there is no such run.
        """
        return await self._watch.ended(run, seconds)

    async def result(self, run: str) -> Any:
        """
        Wait for the end of a run, and return its stored result.

        Raises:
            JournalError: when there is no such run; when it was cancelled, or stopped without a result, and why.
        """
        state = None
        while state is None:
            state = await self.ended(run, 60.0)
            run, asked = await resolve_answered_run(self, run), run
            state = state if run == asked else None
        found = await self.client.list_workflows_async(workflow_ids=[run], load_input=False)
        if state != "SUCCESS":
            error = found[0].error
            why = "" if error is None else f": {getattr(error, 'name', type(error).__name__)}: {error}"
            msg = f"the run {run!r} is {state} and has no result{why}"
            raise JournalError(msg)
        return found[0].output


def make_run_view(status: Any) -> DurableRunView:
    """Return a view of the status that ``dbos`` returns."""
    attributes = dict(status.attributes or {})
    return DurableRunView(
        id=status.workflow_id,
        state=status.status,
        agent=attributes.get("agent", ""),
        executor=status.executor_id,
        release=status.app_version,
        queue=status.queue_name,
        created=status.created_at or 0,
        updated=status.updated_at or 0,
        attempts=status.recovery_attempts or 0,
        attributes=attributes,
    )


def _find_nearest_known(run: str, known: Collection[str]) -> str:
    """Return *run* or its nearest ancestor in *known*, since a tool body may be part of its caller's run."""
    while run and run not in known:
        run = get_parent_run_id(run)
    return run


def _make_missing_run_error(run: str) -> JournalError:
    return JournalError(f"there is no run {run!r} in this database")


def _resolve_question_ids(answers: Mapping[str, AnswerLike], open_: Sequence[Waiting]) -> dict[str, AnswerLike]:
    """Return answers by question id; keys that are the text of a question are replaced by its id."""
    questions = [question for asked in open_ for question in asked.questions]
    ids = {question.id for question in questions}
    found: dict[str, AnswerLike] = {}
    for key, value in answers.items():
        meant = [key] if key in ids else [question.id for question in questions if question.text == key]
        found |= dict.fromkeys(meant or [key], value)
    return found


def _check_all_answers(answers: Mapping[str, AnswerLike], open_: Sequence[Waiting], chosen: Sequence[Waiting]) -> None:
    known = {question.id: question for asked in open_ for question in asked.questions}
    for key, value in answers.items():
        if key not in known:
            listed = list_names([f"{q.id!r} ({q.text})" for q in known.values()])
            msg = f"{key!r} is not an open question of this run; open are: {listed}"
            raise AnswerRejected(msg)
        check_answer(value, known[key])
    for asked in chosen:
        missing = [question.id for question in asked.questions if question.id not in answers]
        if missing:
            msg = f"{missing[0]!r} was asked together with another question and is answered with it; it has no answer"
            raise AnswerRejected(msg)
