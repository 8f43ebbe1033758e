"""
``Operator``: operations on durable runs from any process. They need the database alone, no agents and no models.

It delegates to ``Deployment``, ``RunWaits``, ``AnswerSender`` and ``Sessions``. Each method is one transaction or a few that may be repeated.
Times are seconds, ids those of runs: ``ROOT`` or ``ROOT/PATH``.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self

from stepengine.data.json import canonical, freeze
from stepengine.data.limits import Limits
from stepengine.data.questions import AnswerLike
from stepengine.data.state import AgentState, RunInfo
from stepengine.data.yields import require_topic
from stepengine.durable.database import queue_name, require_label
from stepengine.durable.deployment import (
    Deployment,
    DurableRunView,
    parse_recorded_json,
    refuse_asking_limits,
)
from stepengine.durable.messages import TOPIC, find_text_problem, make_database_topic
from stepengine.durable.run_waits import AnswerSender, RunWaits, Waiting, list_run_and_ancestors
from stepengine.durable.sessions import Sessions, resolve_answered_run, waiting_queue_name
from stepengine.durable.step_names import ENDED_BY_PARENT
from stepengine.durable.wire import SubmittedRun, to_portable_json
from stepengine.engine.options import MAX_RUN_ID_CHARS
from stepengine.errors import AnswerRejected, InputError, JournalError
from stepengine.journal.mailbox import MAX_VALUE_BYTES

UNREAD_MESSAGES = """
    select topic, message, message_uuid from dbos.notifications
    where destination_uuid = %s and not consumed and serialization = 'portable_json' order by created_at_epoch_ms
"""
MAX_PRIORITY = 2**31 - 1
"""The largest number that DBOS accepts; it is stored in a column of 32 bits."""
END_SECONDS = 60.0
"""A wait for the end of a run is repeated after so long, to see whether it became the answer to another run."""


def make_run_id() -> str:
    """Return an id for a root run; later ones sort after earlier ones."""
    return f"{int(time.time() * 1000):012x}{secrets.token_hex(5)}"


def require_run_id(run: str) -> str:
    """
    Return *run* if it is valid as the id of a root run; else raise ``InputError``.

    Raises:
        InputError: For any other id.
    """
    if not run or len(run) > MAX_RUN_ID_CHARS or "/" in run or not run.isprintable() or run != run.strip():
        msg = f"the id of a run must have 1 to {MAX_RUN_ID_CHARS} printable characters without '/', not {run[:MAX_RUN_ID_CHARS]!r}"
        raise InputError(msg, issues=("id",))
    return run


class Operator:
    """
    A client of the database of durable runs. Make one with ``await Operator.connect(url)``; ``close`` it.

    Attributes:
        deployment: The database of the deployment.
        client: The package's own client.
        url: The database.
        app: The deployment's name.
        pool: The pool that runs are submitted to.
        run_waits: Finds the open questions and waits of its runs.
        sessions: Its sessions.
    """

    def __init__(self, deployment: Deployment, *, pool: str) -> None:
        self.deployment = deployment
        self.client: Any = deployment.client
        self.url = deployment.url
        self.app = deployment.app
        self.pool = pool
        self.run_waits = RunWaits(deployment)
        self._answers = AnswerSender(deployment, self.run_waits)
        self.sessions = Sessions(deployment, self.run_waits, self._answers)

    @classmethod
    async def connect(cls, url: str, *, app: str = "stepengine", pool: str = "default") -> Self:
        """
        Connect to a deployment, and return its operator.

        Args:
            url: The database, or ``@FILE`` with its URL.
            app: The deployment's name.
            pool: Where runs are submitted to.

        Raises:
            DatabaseUnavailable: when it cannot be reached.
            DefinitionError: when the URL or a name is not valid.
            StepEngineError: when the extra is not installed.
        """
        require_label("the name of a pool", pool)
        return cls(await Deployment.connect(url, app=app), pool=pool)

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        await self.sessions.close()
        await self.deployment.close()

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
            agent: The agent's id. A worker checks it.
            prompt: The prompt.
            id: The run's id, which makes submitting idempotent; drawn by default.
            params: A JSON object.
            limits: Limits of this run, without ``ask``.
            agent_models: Models of this run in place of those that agents name, by agent id.
            previous: The state that it continues.
            info: Session, user, metadata. A run in a session is a turn: it starts when earlier turns have ended, with the
                state after them. If the session waits for an answer, it is that answer instead.
            answers: Answers in advance, by question id or text.
            priority: 1 is first, larger numbers later; 0 goes before all of them.
            release: The release that runs it; by default the latest that a worker has registered.
            seed: The seed of its random numbers; drawn by default.

        Raises:
            AnswerRejected: when the session waits for an answer, and this is not one.
            InputError: when id, session or priority cannot be used.
            DataError: when something cannot be stored.
            SessionError: when the id of the session is not valid.
        """
        run = require_run_id(make_run_id() if id is None else id)
        refuse_asking_limits(limits, f"this run of {agent!r}", InputError)
        if not 0 <= priority <= MAX_PRIORITY:
            msg = f"a priority must be 0 to {MAX_PRIORITY:,}, not {priority}"
            raise InputError(msg, issues=("priority",))
        order = SubmittedRun(
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
            await self.deployment.enqueue(order, release=release)
        else:
            await self.sessions.submit(order, release=release)
        return run

    # --- looking ------------------------------------------------------------------------------------------------------

    async def run(self, run: str) -> DurableRunView:
        """Return one run; raise ``JournalError`` when there is none of that id."""
        return await self.deployment.get_run(run)

    async def tree(self, root: str) -> list[DurableRunView]:
        """Return a run and every run below it, the run first; raise ``JournalError`` when there is none of that id."""
        return await self.deployment.get_tree(root)

    async def list_questions(self, root: str) -> list[Waiting]:
        """
        Return the open questions of a run and its descendants, in the order of their ids.

        Raises:
            JournalCorrupt: when a row is not JSON.
        """
        return await self.run_waits.list_questions([root])

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
        for reply in await self._answers.make_replies(root, answers):
            await self._answers.send_reply(reply)

    async def answer_first(self, root: str, answers: Mapping[str, AnswerLike]) -> None:
        """
        Answer like ``answer``, and raise if another answer was first.

        Raises:
            AnswerRejected: As for ``answer``, and when another answer was sent at the same moment.
            JournalError: when there is no such run.
        """
        replies = await self._answers.make_replies(root, answers, sender=secrets.token_hex(8))
        for reply in replies:
            await self._answers.send_reply(reply)
        for reply in replies:
            if not await self._answers.is_reply_accepted(reply):
                msg = f"somebody else has answered {' or '.join(map(repr, answers))} in the meantime"
                raise AnswerRejected(msg)

    async def send_input(self, root: str, text: str, *, id: str | None = None) -> None:
        """
        Send user input to a running run, for its next model call.

        A run receives it once, even if processes die. A run that ends before it receives it never does.

        Args:
            root: A root run.
            text: The message.
            id: The id of the message, which counts once; drawn by default.

        Raises:
            InputError: when the text has a NUL or half of a surrogate pair.
            JournalError: when there is no such root run, or it has ended.
        """
        problem = find_text_problem(text)
        if problem:
            msg = f"a message contains {problem}"
            raise InputError(msg, issues=("text",))
        await self._require_running_root(root, "it is a child, and only root runs receive user input")
        await self.client.send_async(root, {"text": text}, TOPIC, idempotency_key=id or make_run_id())

    async def send_message(
        self, root: str, topic: str, value: object, *, id: str | None = None, path: str = ""
    ) -> bool:
        """
        Send a message to a running run, for its next ``Receive`` on that topic; return False if *id* was sent before.

        Args:
            root: A root run.
            topic: The topic.
            value: Its content, JSON of at most 1 MiB.
            id: The id of the message, which counts once; drawn by default.
            path: The path of the run that it is for, where that is a child.

        Raises:
            BadYield: when *topic* is not valid.
            DataError: when *value* is not JSON that the database stores.
            InputError: when it is too large, or *path* or *id* is not valid.
            JournalError: when there is no such root run, or it has ended.
        """
        where, key = (
            make_database_topic(path, require_topic(topic)),
            require_run_id(make_run_id() if id is None else id),
        )
        if not all(part.isdecimal() for part in path.split(".") if path):
            msg = f"the path of a run must be numbers separated by dots, such as '3.0', not {path[:MAX_RUN_ID_CHARS]!r}"
            raise InputError(msg, issues=("path",))
        said = to_portable_json({"value": freeze(value)})
        if len(canonical(said)) > MAX_VALUE_BYTES:
            msg = f"a message must be JSON of at most {MAX_VALUE_BYTES:,} bytes"
            raise InputError(msg, issues=("value",))
        await self._require_running_root(root, "it is a child; name its root, and its path with path=")
        is_known = id is not None and await self.deployment.find_message(root, key) is not None
        await self.client.send_async(root, said, where, idempotency_key=key)
        return not is_known

    async def _require_running_root(self, root: str, why_no_child: str) -> None:
        """Raise ``JournalError`` if a run has ended, or is no root."""
        view = await self.run(root)
        if view.is_over or "/" in root:
            why = f"it is {view.state}" if view.is_over else why_no_child
            msg = f"the run {root!r} accepts no messages: {why}"
            raise JournalError(msg)

    async def cancel(self, root: str, *, hold_session: bool = False) -> list[str]:
        """
        Cancel a run and everything below it, and return the ids of those that had not ended.

        A running effect is interrupted within a second, except a tool that must not be interrupted. The session of a turn continues
        without that turn, also if it had stopped without a result. In this case its id is returned, too.

        Args:
            root: The root run, or a child.
            hold_session: Whether the session waits for the cancelled turn until it is retried. Otherwise it continues without the turn.

        Raises:
            JournalError: when there is no such run.
        """
        async with self.sessions.lock_turn_session(await self.run(root)):
            known = await self.tree(root)
            tree = [each for each in known if not each.is_over]
            released: list[str] = []
            if hold_session and tree:
                await self.sessions.hold_session_for_turn(known[0])
            elif not hold_session and await self.sessions.release_session_from_turn(known[0]):
                released = [root]
            # In one statement: a parent that saw its child cancelled before itself would record that, and continue.
            running = [each.id for each in tree]
            await self.client.cancel_workflows_async(running)
            return [*released, *running]

    async def retry(self, root: str, *, release: str | None = None) -> list[str]:
        """
        Resume a tree that diverged, was cancelled, or killed its workers, after its last recorded steps.

        Children that their parent cancelled, or whose end it has recorded, stay as they are.

        Args:
            root: The root run, or a child.
            release: The release that resumes it; by default the one that it belongs to.

        Returns:
            The ids of the resumed runs.

        Raises:
            JournalError: when there is no such run, none of the tree has stopped without a result that is awaited, or its
                session went on without it.
        """
        tree = await self.tree(root)
        stopped = await self._find_retryable_runs(tree)
        if not stopped:
            msg = (
                f"no run of {root!r} has stopped without a result that is still needed, so there is nothing to retry; "
                f"`stepengine deploy status {shlex.quote(root)}` shows its state"
            )
            raise JournalError(msg)
        # A cancelled run has lost its queue.
        found = await self.client.list_workflows_async(workflow_ids=[root.partition("/")[0]], load_output=False)
        pool = SubmittedRun.from_json(found[0].input["args"][0]).pool
        async with self.sessions.lock_retryable_turn(tree[0]):
            for each in reversed(stopped):
                is_turn = "turn" in each.attributes
                queue = waiting_queue_name(pool) if is_turn else self.get_queue_name(each.id, pool)
                await self._requeue_stopped_run(each.id, release=release, queue=queue)
        return [each.id for each in stopped]

    async def _find_retryable_runs(self, tree: Sequence[DurableRunView]) -> list[DurableRunView]:
        """Return the stopped runs of a tree, without those below a run with a result, or whose parents cancelled them or recorded their end."""
        root = tree[0].root
        done = {each.id for each in tree if each.state == "SUCCESS" or ENDED_BY_PARENT in each.attributes}
        done |= await self.deployment.list_children_with_recorded_end(root)
        return [each for each in tree if each.is_over and done.isdisjoint(list_run_and_ancestors(each.id))]

    async def _requeue_stopped_run(self, run: str, *, queue: str, release: str | None) -> None:
        """
        Put a stopped run back on its queue, with its record and the answers sent to it.

        Args:
            run: The run; only it, nothing below it.
            queue: The queue.
            release: The release that resumes it; ``None`` for the one that it belongs to.

        Raises:
            JournalCorrupt: when an answer that waits is not JSON; the run stays as it is.
            JournalError: when it was resumed already.
        """
        # Rewinding deletes messages that were not received: they are read first, and sent again with their keys.
        unread = [
            (topic, parse_recorded_json(message, f"an answer to {run!r}"), key)
            for topic, message, key in await self.deployment.fetch_rows(UNREAD_MESSAGES, run)
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
            msg = f"the run {run!r} is already running: another process retried it"
            raise JournalError(msg) from error
        for topic, message, key in unread:
            await self.client.send_async(run, message, topic, idempotency_key=key.removesuffix(f"::{run}"))

    def get_queue_name(self, run: str, pool: str | None = None) -> str:
        """Return the queue of a run by its depth, in *pool* or that of this operator."""
        path = run.partition("/")[2]
        return queue_name(pool or self.pool, path.count(".") + 1 if path else 0)

    async def result(self, run: str) -> Any:
        """
        Wait for the end of a run, and return its stored result.

        Raises:
            JournalError: when there is no such run; when it was cancelled, or stopped without a result, and why.
        """
        state = None
        while state is None:
            state = await self.deployment.wait_for_end(run, END_SECONDS)
            run, asked = await resolve_answered_run(self.deployment, run), run
            state = state if run == asked else None
        found = await self.client.list_workflows_async(workflow_ids=[run], load_input=False)
        if state != "SUCCESS":
            error = found[0].error
            why = "" if error is None else f": {getattr(error, 'name', type(error).__name__)}: {error}"
            msg = f"the run {run!r} is {state} and has no result{why}"
            raise JournalError(msg)
        return found[0].output
