"""
The pure machine: a generator that translates the yields of a handler into effects, and outcomes into the values sent to the handler.

``run_agent(plan, state)`` returns a ``Machine``. ``Machine.send(outcome)`` returns the next effect, and at the end the machine returns
``Finished``. It knows no clock, no ids, no files and no model: time and chance are in the outcomes. So every driver runs the same
machine: the loop of ``runtime``, a replay that answers from a record, a debugger, a simulation, and the workers of a database. To
go back, a debugger starts a new machine and sends it the same outcomes, since a generator cannot be copied.

Every part of the machine is a generator. A part that needs something from outside yields the effect and receives the outcome in the
same line; errors are raised there. ``relay_effects`` in ``run`` is the one function between these generators and the driver. It updates
the state of the run from each outcome, shows events, and raises ``Stopped`` after a stop. Only ``RunState`` and its parts are
mutable. In a conversation each call has its result at every moment, so the open step is held outside of the history until all of its
calls have results.

``author`` drives the author's generators (handlers, hooks, bodies of tools). It closes them on every way out and adds the author's
line to errors. ``signals`` has the exceptions that no ``except Exception`` of an author may catch.

Must not be here: I/O of any kind, third-party packages other than attrs, and code that only one driver needs.

Start reading with ``protocol``, the tables of valid sequences. Then read ``run``, ``handler``, ``step`` (one model call and its
tools), ``batch`` (the order of calls), ``calls`` (the effects of each call) and ``state``.
"""

from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.run import run_agent

__all__ = ("Finished", "RunPlan", "run_agent")
