"""
The open questions and other waits of runs, and whether all of a tree is suspended. ``AnswerSender`` sends answers.

The waits of a run are found by its markers: steps that no outcome follows. A message that was sent and not received yet ends a wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.questions import AnswerLike, Question, require_valid_answer
from stepengine.data.waits import Waits
from stepengine.durable.database import CHILD_POLL_SECONDS, nul_free_sql
from stepengine.durable.deployment import WAIT_SECONDS, Deployment, parse_recorded_json
from stepengine.durable.indexes import child_condition_sql, root_id_sql
from stepengine.durable.wire import Reply, encode_answers
from stepengine.errors import AnswerRejected
from stepengine.journal.encoding import decode_stored

IN_TREES = f"(s.workflow_uuid = any(%s) or ({child_condition_sql('s.')} and {root_id_sql('s.')} = any(%s)))"
UNFINISHED_RUNS = f"""
    select s.workflow_uuid, s.status,
        count(*) filter (where o.function_name like 'spawn:%%'), count(*) filter (where o.function_name like 'child:%%')
    from dbos.workflow_status s left join dbos.operation_outputs o using (workflow_uuid)
    where {IN_TREES} and s.status in ('PENDING', 'ENQUEUED', 'DELAYED')
    group by s.workflow_uuid, s.status
"""  # noqa: S608
"""The runs of trees that have not ended, with the numbers of started and of ended children."""
OPEN_QUESTIONS = f"""
    select o.workflow_uuid, o.output,
        (select array_agg(n.topic) from dbos.notifications n where n.destination_uuid = o.workflow_uuid and not n.consumed)
    from dbos.workflow_status s join dbos.operation_outputs o using (workflow_uuid)
    where s.status in ('PENDING', 'ENQUEUED') and {IN_TREES}
        and o.function_name like 'ask:%%' and o.serialization = 'portable_json'
        and not exists (
            select 1 from dbos.operation_outputs r where r.workflow_uuid = o.workflow_uuid and r.function_id = o.function_id + 1
        )
    order by o.workflow_uuid, o.function_id
"""  # noqa: S608
"""
The open questions of trees: markers without a received answer, and the topics of answers that were sent and not received
yet. The wait for an answer has the number after that of its marker.
"""
STEPS_PER_EFFECT = 3
"""A question has its marker, the wait for its answer and that wait's time limit; no effect has more."""


def _race_end_sql(run: str, race: str, path: str) -> str:
    """
    Return SQL for whether a member of a race has an outcome: the race is over then, though its losers' outcomes are recorded later.

    Args:
        run: The run id.
        race: JSON with the numbers of the first and the last member; no race if it is NULL.
        path: The path of the run.
    """
    form = f"{nul_free_sql('e.output')}::json"
    return f"""exists (
        select from dbos.operation_outputs e
        where e.workflow_uuid = {run} and e.serialization = 'portable_json'
            and split_part(e.function_name, ':', 1) not in ('ask', 'body', 'intent', 'spawn', 'wait')
            and ({form}->>'seq')::int between ({race}->>0)::int and ({race}->>1)::int
            and coalesce({form}->>'path', split_part({run}, '/', 2)) = {path}
            and {form}->'stop' is null
    )"""


WAIT_FORM = f"{nul_free_sql('o.output')}::json"
OPEN_WAITS = f"""
    select o.workflow_uuid, o.output
    from dbos.workflow_status s join dbos.operation_outputs o using (workflow_uuid)
    where s.status in ('PENDING', 'ENQUEUED') and {IN_TREES}
        and o.function_name like 'wait:%%' and o.serialization = 'portable_json'
        and not exists (
            select 1 from dbos.operation_outputs r where r.workflow_uuid = o.workflow_uuid and r.function_id = o.function_id + 1
        )
        and not exists (
            select from dbos.notifications n
            where n.destination_uuid = split_part(o.workflow_uuid, '/', 1)
                and n.topic = 'post:' || ({WAIT_FORM}->>'path') || ':' || ({WAIT_FORM}->>'topic')
                and not exists (
                    select from dbos.operation_outputs h
                    where h.workflow_uuid = o.workflow_uuid and h.serialization = 'portable_json' and exists (
                        select from json_array_elements_text({nul_free_sql("h.output")}::json->'heard') as heard (key) where key = n.message_uuid
                    )
                )
        )
        and not {_race_end_sql("o.workflow_uuid", f"({WAIT_FORM}->'race')", f"{WAIT_FORM}->>'path'")}
    order by o.workflow_uuid, o.function_id
"""  # noqa: S608
"""The open waits of trees: markers without an outcome, except waits for a message that was sent already, and of races that are over."""
BUSY_RUNS = f"""
    select distinct mark.run
    from (
        select distinct on (o.workflow_uuid) o.workflow_uuid as run, o.function_id as number, {nul_free_sql("o.output")}::json as form
        from dbos.workflow_status s join dbos.operation_outputs o using (workflow_uuid)
        where s.status = 'PENDING' and {IN_TREES} and o.serialization = 'portable_json'
            and (o.function_name like 'ask:%%' or o.function_name like 'wait:%%') and position('"together"' in o.output) > 0
        order by o.workflow_uuid, o.function_id desc
    ) mark, json_array_elements_text(mark.form->'together') as together (seq)
    where not exists (
        select from dbos.operation_outputs e
        where e.workflow_uuid = mark.run and e.serialization = 'portable_json'
            and e.function_id >= mark.number - {STEPS_PER_EFFECT} * greatest(0, (mark.form->>'seq')::int - together.seq::int)
            and split_part(e.function_name, ':', 1) not in ('body', 'intent', 'spawn')
            and {nul_free_sql("e.output")}::json->>'seq' = together.seq
            and coalesce({nul_free_sql("e.output")}::json->>'path', split_part(mark.run, '/', 2)) = mark.form->>'path'
    )
    and not exists (
        select from json_array_elements(mark.form->'races') as race (members)
        where together.seq::int between (members->>0)::int and (members->>1)::int
            and {_race_end_sql("mark.run", "members", "mark.form->>'path'")}
    )
"""  # noqa: S608
"""The runs whose last group with a wait has an effect that neither has ended, nor lost its race, nor is marked as waiting."""
WAKE_SECONDS = 60.0
"""A run that wakes by itself within a minute counts as running."""


@frozen(kw_only=True)
class Waiting:
    """
    An open ``Ask`` of a run.

    Attributes:
        run: The run that asks: a root, or a child.
        path: Its path; of a question that the body of a tool asks in that run, the path of the body.
        seq: The number of its ``Ask``.
        questions: Its questions; all are answered at once.
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


def make_question_waits(questions: Iterable[Waiting]) -> list[Waits]:
    """Return *questions* as things that a run waits for."""
    return [
        Waits(kind="question", path=each.path, seq=each.seq, question=question)
        for each in questions
        for question in each.questions
    ]


class RunWaits:
    """
    Finds the open questions and waits of a deployment's runs.

    Args:
        deployment: The deployment.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def list_questions(self, roots: Sequence[str]) -> list[Waiting]:
        """
        Return the open questions of trees of runs, in the order of their ids.

        Raises:
            JournalCorrupt: when a row is not JSON.
        """
        return _parse_questions(await self._deployment.fetch_rows(OPEN_QUESTIONS, list(roots), list(roots)))

    async def list_waits(self, roots: Sequence[str]) -> list[tuple[str, Waits]]:
        """
        Return the waits of trees of runs except questions, each with its run; arrived messages are left out.

        Raises:
            JournalCorrupt: when a row is not JSON.
        """
        return _parse_waits(await self._deployment.fetch_rows(OPEN_WAITS, list(roots), list(roots)))

    async def find_waits_if_suspended(
        self, root: str, *, beyond: float = WAKE_SECONDS
    ) -> tuple[list[Waiting], list[Waits]]:
        """Return the open questions and other waits of a tree if all of it is suspended; nothing if a run is active."""
        return (await self.list_waits_of_suspended([root], beyond=beyond)).get(root, ([], []))

    async def list_waits_of_suspended(
        self, roots: Sequence[str], *, beyond: float = WAKE_SECONDS
    ) -> dict[str, tuple[list[Waiting], list[Waits]]]:
        """
        Return the open questions and other waits of each tree of which all is suspended, with a constant number of queries.

        Args:
            roots: The root runs.
            beyond: Seconds; a run that wakes within this time counts as running.
        """
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
        """Return the open questions and other waits of each suspended tree, as the database has them at one moment."""
        # At one moment: a run that continues between two of these would look suspended in a group that it has only begun.
        async with self._deployment.open_snapshot() as fetch_rows:
            asked = _parse_questions(await fetch_rows(OPEN_QUESTIONS, list(roots), list(roots)))
            waits = _parse_waits(await fetch_rows(OPEN_WAITS, list(roots), list(roots)))
            having = {run.partition("/")[0] for run in (*[each.run for each in asked], *[run for run, _ in waits])}
            if not having:
                return {}
            rows = await fetch_rows(UNFINISHED_RUNS, list(having), list(having))
            busy = await fetch_rows(BUSY_RUNS, list(having), list(having))
        soon = datetime.now(UTC) + timedelta(seconds=beyond)
        # Of several waits of a run, as of the members of a race, the first that ends by itself continues it.
        waking = {run for run, wait in waits if wait.wakes_at is not None and wait.wakes_at <= soon}
        asking = {*[each.run for each in asked], *[run for run, _ in waits]} - waking
        left = {run: (state, spawned - ended) for run, state, spawned, ended in rows}
        below = Counter([_find_nearest_known_run(_get_parent_run_id(run), left) for run in left])
        active = {
            run.partition("/")[0]
            for run, (state, outstanding) in left.items()
            if state != "PENDING" or not (run in asking or 0 < outstanding <= below[run])
        }
        idle = having - active - {run.partition("/")[0] for (run,) in busy}
        return {
            root: (
                [each for each in asked if each.run.partition("/")[0] == root],
                [wait for run, wait in waits if run.partition("/")[0] == root],
            )
            for root in idle
        }


class AnswerSender:
    """
    Sends answers to the open questions of runs.

    Args:
        deployment: The deployment.
        waits: Finds the open questions.
    """

    def __init__(self, deployment: Deployment, waits: RunWaits) -> None:
        self._deployment = deployment
        self._waits = waits

    async def make_replies(self, root: str, answers: Mapping[str, AnswerLike], *, sender: str = "") -> list[Reply]:
        """
        Return the messages that answer open questions.

        Args:
            root: The root run.
            answers: Answers by question id or text.
            sender: An id of the sender, which distinguishes its answers from those that others send at the same time.

        Raises:
            AnswerRejected: when one fits no open question, or one that was asked with it has no answer.
            JournalError: when there is no such run.
        """
        view = await self._deployment.get_run(root)
        if view.is_over:
            msg = f"the run {root!r} is {view.state} and does not wait for an answer"
            raise AnswerRejected(msg)
        open_ = await self._waits.list_questions([root])
        answers = _resolve_question_ids(answers, open_)
        chosen = [asked for asked in open_ if any(question.id in answers for question in asked.questions)]
        _require_valid_answers(answers, open_, chosen)
        # In the run's own time: milliseconds since it was submitted.
        at = max(0, int(time.time() * 1000) - view.created)
        said = {"of": sender} if sender else {}
        return [
            Reply(
                run=asked.run,
                topic=asked.topic,
                key=asked.key,
                message={"at": at, "answers": encode_answers(asked.questions, answers), **said},
            )
            for asked in chosen
        ]

    async def send_reply(self, reply: Reply) -> None:
        """Send the answers to the run that waits for them; a repeated one has no effect."""
        await self._deployment.client.send_async(reply.run, reply.message, reply.topic, idempotency_key=reply.key)

    async def is_reply_accepted(self, reply: Reply) -> bool:
        """Return whether a sent reply counts: of several, only the first does."""
        found = await self._deployment.find_message(reply.run, reply.key) or {}
        return bool(found.get("of") == reply.message["of"])


def _parse_questions(rows: Iterable[tuple[Any, ...]]) -> list[Waiting]:
    """Return the questions of rows of ``OPEN_QUESTIONS`` to which no answer was sent."""
    found = []
    for run, text, sent in rows:
        form = parse_recorded_json(text, f"a question of {run!r}")
        if "questions" in form:
            questions = tuple(map(decode_stored, form["questions"]))
            asked = Waiting(run=run, path=form["path"], seq=form["seq"], questions=questions)
            found += [] if asked.topic in (sent or ()) else [asked]
    return found


def _parse_waits(rows: Iterable[tuple[Any, ...]]) -> list[tuple[str, Waits]]:
    found: list[tuple[str, Waits]] = []
    for run, text in rows:
        form = parse_recorded_json(text, f"a wait of {run!r}")
        until = form["wakes_at"]
        wait = Waits(
            kind=form["kind"], path=form["path"], seq=form["seq"], topic=form.get("topic", ""),
            wakes_at=None if until is None else datetime.fromisoformat(until), children=form.get("children", ()),
        )  # fmt: skip
        found.append((run, wait))
    return found


def _get_parent_run_id(run: str) -> str:
    """Return the id of the parent by path, which may be a tool body inside its caller's run; ``""`` for a root."""
    root, _, path = run.partition("/")
    above = path.rpartition(".")[0]
    return "" if not path else f"{root}/{above}" if above else root


def list_run_and_ancestors(run: str) -> list[str]:
    """Return a run's id and those of its ancestors up to the root; some may be tool bodies, which have no run of their own."""
    found = []
    while run:
        found.append(run)
        run = _get_parent_run_id(run)
    return found


def _find_nearest_known_run(run: str, known: Collection[str]) -> str:
    """Return *run* or its nearest ancestor in *known*, since a tool body may be part of its caller's run."""
    while run and run not in known:
        run = _get_parent_run_id(run)
    return run


def _resolve_question_ids(answers: Mapping[str, AnswerLike], open_: Sequence[Waiting]) -> dict[str, AnswerLike]:
    """Return answers by question id; keys that are the text of a question are replaced by its id."""
    questions = [question for asked in open_ for question in asked.questions]
    ids = {question.id for question in questions}
    found: dict[str, AnswerLike] = {}
    for key, value in answers.items():
        meant = [key] if key in ids else [question.id for question in questions if question.text == key]
        found |= dict.fromkeys(meant or [key], value)
    return found


def _require_valid_answers(
    answers: Mapping[str, AnswerLike], open_: Sequence[Waiting], chosen: Sequence[Waiting]
) -> None:
    """Raise ``AnswerRejected`` for an unknown or invalid answer, or for an unanswered question of a *chosen* group."""
    known = {question.id: question for asked in open_ for question in asked.questions}
    for key, value in answers.items():
        if key not in known:
            listed = list_names([f"{q.id!r} ({q.text})" for q in known.values()])
            msg = f"{key!r} is not an open question of this run; open questions: {listed}"
            raise AnswerRejected(msg)
        require_valid_answer(value, known[key])
    for asked in chosen:
        missing = [question.id for question in asked.questions if question.id not in answers]
        if missing:
            msg = f"{missing[0]!r} has no answer; it was asked together with another question, so answer both at once"
            raise AnswerRejected(msg)
