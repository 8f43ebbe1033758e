"""
The pure machine: a generator that turns an agent's yields and the world's outcomes into effects and states.

Lives here: the order of a step, batches, control and expanding tools, hooks, the author's generator, budgets of steps and
actions. Must not be here: a clock, ids from outside, randomness, files, threads, an event loop, an SDK, pydantic, or
anything that performs an effect.
"""

from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.run import run_agent

__all__ = ("Finished", "RunPlan", "run_agent")
