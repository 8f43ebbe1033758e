"""
Runs that survive the process, on a database that many workers share.

The same machine and runtime drive a run as in one process. ``Steps`` takes the place of the recorder and makes each effect a step of a
durable workflow. The number of a step is reserved in program order before the effect starts, and the outcome is stored under it.
A worker that takes over runs the agent again. The database returns the stored outcomes and compares the names of steps, which contain
the fingerprints of effects. Children are workflows on the queue of their depth. Each child gets a part of its parent's limits, since
no ledger reaches over machines. Questions and messages are stored in the database.

The package contains ``DurableEngine``, which drives the machine inside durable workflows; ``Operator``, which submits, reads, answers,
cancels and retries runs without agents; ``Sessions``, whose turns are runs; and ``run_embedded_postgres``, a private database for development.
The package ``dbos`` is imported only here, by name and on first use, so that this facade is read without the extra.
It is not asked to retry, to time anything out or to unpickle: each of these would do behind the machine's back what the machine does.

Must not be here: rules of the machine, and anything that a lower layer would need.

A run is a tree of rows: ``ROOT`` for the root, ``ROOT/PATH`` for each child. A row's steps are named ``kind:fingerprint``.
The outcome of an effect is stored with its number, in a step of the effect's own kind, such as ``model``, ``tool``, ``child`` or ``ask``.
A ``spawn``, ``body``, ``intent`` or ``wait`` comes before it. ``turn`` and ``lookup`` are the first steps of a row, ``end`` is the last.

A worker: ``process`` takes runs from ``queues``, ``body`` executes one of them, ``executions`` contains the parts of an execution, and
``steps`` performs its effects with ``outcome_records`` and ``child_runs``. A client: ``operator`` uses ``deployment``, ``run_waits`` and
``sessions``. ``engine`` is the interface of both: ``submission`` checks what it submits, and ``journals`` converts runs and journals.
``records`` replays a stored run without performing anything: for journals, and for the events of ``follow_run`` and ``shared_events``.
``register``, ``rates``, ``workers`` and ``schedule_book`` have tables of their own; ``maintenance`` and ``schedules`` use the operator.
It differs from the local engine in its store and its scheduler.
"""

from __future__ import annotations

from stepengine.durable.database import run_embedded_postgres
from stepengine.durable.deployment import DurableRunView
from stepengine.durable.engine import DurableEngine, DurableHandle
from stepengine.durable.maintenance import (
    DeploymentMaintenance,
    DeploymentOverview,
    ExecutorView,
    QueueView,
    RateView,
    ReleaseView,
    TakeoverResult,
    migrate,
)
from stepengine.durable.operator import Operator
from stepengine.durable.run_waits import Waiting
from stepengine.durable.schedules import DurableScheduler
from stepengine.durable.sessions import DurableSessionView, TurnView

__all__ = (
    "DeploymentMaintenance",
    "DeploymentOverview",
    "DurableEngine",
    "DurableHandle",
    "DurableRunView",
    "DurableScheduler",
    "DurableSessionView",
    "ExecutorView",
    "Operator",
    "QueueView",
    "RateView",
    "ReleaseView",
    "TakeoverResult",
    "TurnView",
    "Waiting",
    "migrate",
    "run_embedded_postgres",
)
