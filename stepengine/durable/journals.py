"""Runs of a database as journals: to export, continue, fork, compare and move them."""

from __future__ import annotations

import os

import attrs

from stepengine.durable.deployment import Deployment
from stepengine.durable.operator import Operator, make_run_id, require_run_id
from stepengine.durable.records import order_and_seed_from_journal, read_tree_record, replay_record_into_journal
from stepengine.durable.run_results import ResultReader
from stepengine.engine.launcher import Launcher
from stepengine.errors import JournalError, ReplayDivergence
from stepengine.journal import Journal, JournalLike, MemoryJournal, as_journal
from stepengine.journal.forks import branch
from stepengine.journal.pending_items import list_unread_messages
from stepengine.journal.unknown_calls import refuse_unknown_calls
from stepengine.redaction import make_redactor


async def export_run(
    launcher: Launcher, deployment: Deployment, results: ResultReader, run: str, into: JournalLike | None
) -> Journal:
    """
    Write the record of a run into a journal, and return it; see ``DurableEngine.export``.

    Args:
        launcher: The launcher of the engine with the agents.
        deployment: The deployment.
        results: The reader of the run's result.
        run: A root run's id.
        into: A journal that holds no run, or the path of its file; in memory for ``None``.
    """
    journal = MemoryJournal() if into is None else as_journal(into)
    tree_record = await read_tree_record(deployment, run)
    recorded = (
        await results.wait_for_result(run) if tree_record.is_begun and tree_record.runs[""].state == "SUCCESS" else None
    )
    return await replay_record_into_journal(launcher, tree_record, journal, recorded)


async def submit_unfinished_journal(
    operator: Operator, journal: JournalLike, *, release: str, trust: bool | None
) -> str:
    """Submit the run of an unfinished journal with its messages, and return its id; see ``DurableEngine.submit_journal``."""
    source = as_journal(journal)
    refuse_unknown_calls(source, trust=trust)
    order, seed = order_and_seed_from_journal(source, make_redactor("known", os.environ), pool=operator.pool)
    if await operator.deployment.has_run(order.root):
        msg = f"the database already has a run {order.root!r}; a journal can be submitted only once"
        raise JournalError(msg)
    # Before the run is submitted, since one whose mailbox cannot be read is submitted with all of its messages or not at all.
    messages = list_unread_messages(source)
    await operator.deployment.enqueue(order, seed=seed, release=release)
    for message in messages:
        await operator.send_message(order.root, message.topic, message.value, id=message.id, path=message.path)
    return order.root


async def fork_run(
    launcher: Launcher,
    operator: Operator,
    results: ResultReader,
    run: str,
    *,
    at: int | str,
    edit: object,
    allow_repeat: bool,
    id: str | None,
    release: str | None,
) -> str:
    """
    Submit a run that continues another one from an effect, and return its id; see ``DurableEngine.fork``.

    Args:
        launcher: The launcher of the engine with the agents.
        operator: The operator.
        results: The reader of the run's result.
        run: The other run's id.
        at: The last effect to keep.
        edit: Another outcome for it.
        allow_repeat: Whether effects that are cut off may happen again.
        id: The new run's id; drawn for ``None``.
        release: Which release resumes it; that of *run* for ``None``.
    """
    new = require_run_id(make_run_id() if id is None else id)
    made = branch(
        await export_run(launcher, operator.deployment, results, run, None), at, edit, allow_repeat=allow_repeat
    )
    order, seed = order_and_seed_from_journal(made, make_redactor("known", os.environ), pool=operator.pool)
    own = release or (await operator.run(run)).release
    await operator.deployment.enqueue(attrs.evolve(order, root=new), seed=seed, release=own)
    return new


async def find_divergence(launcher: Launcher, deployment: Deployment, run: str) -> ReplayDivergence | None:
    """Replay the record of a run over the agents of *launcher*, and return the divergence; ``None`` if there is none."""
    tree_record = await read_tree_record(deployment, run)
    if not tree_record.is_begun:
        return None
    try:
        await replay_record_into_journal(launcher, tree_record, MemoryJournal())
    except ReplayDivergence as error:
        return error
    return None


async def move_run(launcher: Launcher, operator: Operator, run: str, *, release: str) -> list[str]:
    """
    Cancel an unfinished tree of runs and retry it under another release; return the ids of the retried runs.

    Nothing is changed if the agents of *launcher* differ from the record; see ``DurableEngine.move``.
    """
    divergence = await find_divergence(launcher, operator.deployment, run)
    if divergence is not None:
        raise divergence
    if not await operator.cancel(run, hold_session=True):
        msg = f"the run {run!r} has ended, so it cannot continue; replay or fork it"
        raise JournalError(msg)
    return await operator.retry(run, release=release)
