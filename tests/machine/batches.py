"""Tools and a run for the tests of what one reply asks for."""

from __future__ import annotations

from tests.machine.world import ADD, STEP, World, adding, agent, binding, play

SAFE = binding("safe", parallel_safe=True)
ENDING = binding("ending", ends_turn=True)
SAFE_ENDING = binding("safe_ending", ends_turn=True, parallel_safe=True)
QUIET = binding("quiet", forces_next_step=False)
OPEN = binding("open", requires_permission=False)
STRICT = binding("strict", lambda value: None if "a" in value else "a: missing", parallel_safe=True)
TOOLS = [ADD, SAFE, ENDING, SAFE_ENDING, QUIET, OPEN, STRICT]
NAMES = [b.spec.name for b in TOOLS]
ANY = dict.fromkeys(NAMES, adding)


def run(*replies, hooks=None, handler=None, tools=NAMES, world=None, **fields):
    world = world or World(replies=[*replies], tools=ANY)
    return play(agent(handler, tools=tools, hooks=hooks, **fields), world, tools=TOOLS)


def statuses(played):
    return [m.status for m in played.history if m.role == "tool"]


def single(ctx):
    yield STEP
