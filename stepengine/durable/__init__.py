"""
Runs that survive the process, on a database that many workers share.

The same machine and runtime drive a run as in one process; what differs stands where a recorder stands. ``Steps`` makes of each effect
a step of a durable workflow: before it begins its place is drawn, in program order, and when it has its outcome that is stored there.
A worker that takes over runs the agent again; the database answers what is stored, and compares the names of steps, in which the
fingerprints of effects stand. Children are workflows of their own on the queue of their depth, and share limits by portions, since
no ledger reaches over machines. Questions and messages are the database's.

What lives here: ``DurableEngine``, which drives the machine inside durable workflows; ``Operator``, which does to runs from outside what
needs no agents: submit, look, answer, cancel, retry; ``Sessions``, whose turns are runs; ``embedded``, a private database for
development. The package ``dbos`` is imported only here, by name and on first use, so that this facade is read without the extra.
It is not asked to retry, to time anything out or to unpickle: each of these would do behind the machine's back what the machine does.

Must not be here: rules of the machine, and anything that a floor below would need.

A run is a tree of rows: ``ROOT`` for the root, ``ROOT/PATH`` for each child. A row's steps are named ``kind:fingerprint``:
``model``, ``tool``, ``perform``, ``child`` and ``ask`` have an outcome with the effect's number; ``spawn`` and ``intent``
stand before it, ``turn`` and ``lookup`` first, ``end`` last.

Begin with ``body``, one execution of one run; then ``steps``, and ``engine`` and ``operate`` for both sides of a deployment.
"""

from __future__ import annotations

from stepengine.durable.database import DatabaseAway, embedded
from stepengine.durable.deployment import DurableRunView
from stepengine.durable.engine import DurableEngine, DurableHandle
from stepengine.durable.operate import Operator
from stepengine.durable.process import ExecutorBusy
from stepengine.durable.run_waits import Waiting
from stepengine.durable.schedules import DurableScheduler
from stepengine.durable.sessions import DurableSessionView, Sessions, TurnView
from stepengine.durable.upkeep import (
    ExecutorView,
    Overview,
    QueueView,
    RateView,
    ReleaseView,
    TakenOver,
    Upkeep,
    migrate,
)

__all__ = (
    "DatabaseAway",
    "DurableEngine",
    "DurableHandle",
    "DurableRunView",
    "DurableScheduler",
    "DurableSessionView",
    "ExecutorBusy",
    "ExecutorView",
    "Operator",
    "Overview",
    "QueueView",
    "RateView",
    "ReleaseView",
    "Sessions",
    "TakenOver",
    "TurnView",
    "Upkeep",
    "Waiting",
    "embedded",
    "migrate",
)
