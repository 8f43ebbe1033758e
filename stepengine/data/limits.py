"""Budgets of a run. Every field of ``Limits`` that is ``None`` inherits: run, then agent, then engine, then the defaults."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from typing import Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.checks import AMOUNT, COUNT, FLAG, fine, named_fields, one_of, or_none

__all__ = ("DEFAULT_LIMITS", "Limits", "OnMaxSteps")

OnMaxSteps: TypeAlias = Literal["final_answer", "stop", "raise"]
ENDINGS = one_of("final_answer", "stop", "raise")
COUNTED = fine(or_none(COUNT))


@named_fields
@frozen(kw_only=True, cache_hash=True)
class Limits:
    """
    What a run may spend.

    ``AgentCall`` and ``Parallel`` of a handler are bound by the limits on children only when somebody set these. Where
    a limit has no room for all that the handler asks for at once, ``LimitExceeded``, an ordinary exception, is raised at
    its ``yield`` before anything has started. A child that would stand too deep fails alone.

    Attributes:
        max_steps: Model steps per run; default 50.
        max_actions: What the handler yields per run other than steps; a ``Parallel`` counts once, whatever it holds, a
            ``StepText`` with each of its calls; default 1000.
        max_tokens: Tokens of the run and its children.
        max_cost_usd: US dollars of the run and its children.
        allow_unpriced: Whether models whose price is unknown may be used although there is a ``max_cost_usd``, and then count
            as free; by default they are refused.
        max_seconds: Wall time of the run and its children. Synchronous code in the event loop is not interrupted; the run
            ends as soon as it returns.
        max_depth: Levels of children; default 5.
        max_total_children: Children of the whole tree. The default, 100, holds for those asked for through a tool.
        max_children: Children per call. The default, 16, holds for calls of tools such as ``spawn_agents``, by a model or a
            handler; ``AgentCall``, ``Parallel`` and ``map_agents`` have none.
        max_concurrent_children: Children of one reply or one ``Parallel`` that run at once; default 8, or what the
            ``Parallel`` says. With 1 the calls of a reply run one after another.
        max_concurrent_tools: Tool calls of a run that run at once; by default all that one reply, or one ``Parallel``, asks
            for.
        max_identical_calls: How often in a row the model may make the same tool call and get the same result; off by
            default, because polling is legal.
        max_denials: Tool calls of a run that rules, hooks or people may deny; with the last of them the run ends. After three
            denials of one tool in a row the model is told to stop calling it; default 10.
        max_wait_seconds: How long a model that has ended its turn waits for its children in the background; default seven days.
        ask: Whether a person is asked for more before ``max_steps``, ``max_tokens`` or ``max_cost_usd`` would be passed; off by
            default. Yes allows as much again, a number that much more, and the run goes on where it stood; with no, or where
            nobody can answer, it ends as it would have. A limit of a run and its children asks once for all of them.
        on_max_steps: At the step limit ``"final_answer"`` (default) asks the model once more without tools, ``"stop"``
            ends with what there is, ``"raise"`` makes the run raise ``LimitExceeded`` with the result.

    Raises:
        DefinitionError: for a value of another kind, or below 0.
    """

    max_steps: int | None = attrs.field(default=None, validator=COUNTED)
    max_actions: int | None = attrs.field(default=None, validator=COUNTED)
    max_tokens: int | None = attrs.field(default=None, validator=COUNTED)
    max_cost_usd: Decimal | float | None = attrs.field(default=None, validator=fine(or_none(AMOUNT)))
    allow_unpriced: bool | None = attrs.field(default=None, validator=fine(or_none(FLAG)))
    max_seconds: float | None = attrs.field(default=None, validator=fine(or_none(AMOUNT)))
    max_depth: int | None = attrs.field(default=None, validator=COUNTED)
    max_total_children: int | None = attrs.field(default=None, validator=COUNTED)
    max_children: int | None = attrs.field(default=None, validator=COUNTED)
    max_concurrent_children: int | None = attrs.field(default=None, validator=COUNTED)
    max_concurrent_tools: int | None = attrs.field(default=None, validator=COUNTED)
    max_identical_calls: int | None = attrs.field(default=None, validator=COUNTED)
    max_denials: int | None = attrs.field(default=None, validator=COUNTED)
    ask: bool | None = attrs.field(default=None, validator=fine(or_none(FLAG)))
    on_max_steps: OnMaxSteps | None = attrs.field(default=None, validator=fine(or_none(ENDINGS)))
    max_wait_seconds: float | None = attrs.field(default=None, validator=fine(or_none(AMOUNT)))

    def over(self, lower: Limits | None) -> Limits:
        """Return these limits with the gaps filled from *lower*."""
        return self if lower is None else _fill_gaps(self, lower)


@lru_cache(256)
def _fill_gaps(limits: Limits, lower: Limits) -> Limits:
    """Return limits with the gaps filled; kept, since most runs of a process have the same few."""
    gaps = {name: getattr(lower, name) for name in NAMES if getattr(limits, name) is None}
    filled = {name: value for name, value in gaps.items() if value is not None}
    return attrs.evolve(limits, **filled) if filled else limits


NAMES = tuple([field.name for field in attrs.fields(Limits)])
DEFAULT_LIMITS = Limits(
    max_steps=50,
    max_actions=1000,
    max_depth=5,
    max_total_children=100,
    max_children=16,
    max_concurrent_children=8,
    max_denials=10,
    max_wait_seconds=7 * 24 * 3600.0,
    on_max_steps="final_answer",
)
"""What holds when nobody said anything."""
