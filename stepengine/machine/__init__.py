"""
The pure machine: a generator that turns what a handler yields into effects, and outcomes into what the handler is sent.

``run_agent`` is the whole of it from outside: ``send`` an outcome, get the next effect, and in the end ``Finished``. It knows no
clock, no ids, no files and no model; time and chance come in with what it is sent. So it can be driven by anybody: by the loop of
``runtime``, by a replay that answers from a record, by a debugger that goes back (a machine is made anew and sent the same
outcomes, since a generator cannot be copied), by a simulation that makes the world up, and by workers on a database. None of
them is a mode of it: there is no flag in here to be wrong.

It is generators all the way down, since everything in it may need the world in the middle: whoever does yields the effect and gets
the outcome at that very line, and errors are raised there. Between them and the driver stands ``exchange`` of ``run``, alone: it
gives what comes back to the run's state, shows events, and refuses after a stop. Mutable are only ``RunState`` and
its parts; what leaves it is frozen. A conversation pairs at every moment, so the open step is held beside the history until all its calls have results.

What is the author's (handlers, hooks, bodies of tools) is driven by ``author``, which closes it on every way out and says in which
of the author's lines something went wrong. Signals that no ``except Exception`` of theirs may swallow stand in ``signals``.

Must not be here: I/O of any kind, third-party packages but attrs, and what only one driver needs.

Begin with ``protocol``, the tables of what may follow what; then ``run``, ``handler``, ``step`` (one model call and its tools), ``batch``
(in which order calls go), ``calls`` (what each of them asks the world for) and ``state``.
"""

from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.run import run_agent

__all__ = ("Finished", "RunPlan", "run_agent")
