"""Budgets of a run. Every field of ``Limits`` that is ``None`` inherits: run, then agent, then engine, then the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.checks import (
    AMOUNT,
    COUNT,
    FLAG,
    FieldCheck,
    allow_none,
    make_choice_check,
    make_validator,
    with_keyword_hints,
)

MAX_LEVELS = 100
"""The most levels of children. Readers of a run recurse through its children, and Python's stack has a few hundred levels."""
OnMaxSteps: TypeAlias = Literal["final_answer", "stop", "raise"]
ENDINGS = make_choice_check("final_answer", "stop", "raise")


def _make_limit_field(check: FieldCheck, *, setting: str = "", tree_wide: bool = False) -> Any:
    """
    Return an attrs field of ``Limits`` that is ``None`` by default, with its check and metadata.

    Args:
        check: The valid values.
        setting: The help of the command line's setting for it; ``""`` for a limit that only programs set.
        tree_wide: Whether a child has at most what its parent has.
    """
    metadata = {"check": check, "setting": setting, "tree_wide": tree_wide}
    return attrs.field(default=None, validator=make_validator(allow_none(check)), metadata=metadata)


@with_keyword_hints
@frozen(kw_only=True, cache_hash=True)
class Limits:
    """
    The limits of a run's spending.

    ``AgentCall`` and ``Parallel`` of a handler respect the limits on children only if these are set explicitly. If a limit has
    no room for all children of one request, ``LimitExceeded``, an ordinary exception, is raised at its ``yield`` before any
    starts. A child that would be too deep fails alone.

    Attributes:
        max_steps: Model steps per run; default 50.
        max_actions: Values that a handler yields, except steps (a ``Parallel`` counts as one); a ``StepText`` counts with each of
            its calls; default 1000.
        max_tokens: Tokens of the run and its children.
        max_cost_usd: US dollars of the run and its children.
        allow_unpriced: Whether models whose price is unknown may be used although there is a ``max_cost_usd``, and then count
            as free; by default they are refused.
        max_seconds: Wall-clock seconds of the run and its children. Synchronous code in the event loop is not interrupted; the run
            ends as soon as it returns.
        max_depth: Levels of children; default 5, and 100 at most, whatever is set.
        max_total_children: Children of the whole tree. The default, 100, holds for those asked for through a tool.
        max_children: Children per call. The default, 16, holds for calls of tools such as ``spawn_agents``, by a model or a
            handler; ``AgentCall``, ``Parallel`` and ``map_agents`` have none.
        max_concurrent_children: Concurrent children of one reply or ``Parallel``; default 8, or what the ``Parallel`` says. With 1 the
            calls of a reply run one after another.
        max_concurrent_tools: Concurrent tool calls of a run; by default all that one reply, or one ``Parallel``, asks for.
        max_identical_calls: Identical tool calls by a model in a row, with identical results unless they run in parallel; off by
            default, because polling is legal.
        max_denials: Denied tool calls of a run; with the last of them the run ends. After three denials of one tool in a row the
            model is told to stop calling it; default 10.
        max_wait_seconds: Seconds that an ended turn waits for background children; default seven days.
        ask: Whether a person is asked for more before ``max_steps``, ``max_tokens`` or ``max_cost_usd`` would be passed; off by
            default. Yes allows as much again, a number that much more, and the run continues. After no, or if no one can
            answer, it ends as without *ask*. A limit of a run and its children asks once for all of them.
        on_max_steps: At the step limit ``"final_answer"`` (default) asks the model once more without tools, ``"stop"``
            ends with what there is, ``"raise"`` makes the run raise ``LimitExceeded`` with the result.

    Raises:
        DefinitionError: for a value of another kind, or below 0.
    """

    max_steps: int | None = _make_limit_field(COUNT, setting="Model steps of a run.")
    max_actions: int | None = _make_limit_field(COUNT)
    max_tokens: int | None = _make_limit_field(COUNT, setting="Tokens of a run and its children.", tree_wide=True)
    max_cost_usd: Decimal | float | None = _make_limit_field(
        AMOUNT, setting="US dollars of a run and its children.", tree_wide=True
    )
    allow_unpriced: bool | None = _make_limit_field(FLAG)
    max_seconds: float | None = _make_limit_field(AMOUNT, setting="Seconds that a run may take.", tree_wide=True)
    max_depth: int | None = _make_limit_field(
        COUNT, setting="How many levels deep agents may spawn agents.", tree_wide=True
    )
    max_total_children: int | None = _make_limit_field(COUNT, tree_wide=True)
    max_children: int | None = _make_limit_field(COUNT)
    max_concurrent_children: int | None = _make_limit_field(COUNT)
    max_concurrent_tools: int | None = _make_limit_field(COUNT)
    max_identical_calls: int | None = _make_limit_field(COUNT)
    max_denials: int | None = _make_limit_field(COUNT)
    ask: bool | None = _make_limit_field(
        FLAG, setting="At a limit of steps, tokens or dollars, ask for more before the run ends."
    )
    on_max_steps: OnMaxSteps | None = _make_limit_field(ENDINGS)
    max_wait_seconds: float | None = _make_limit_field(AMOUNT)

    def cap(self, caps: Mapping[str, float | Decimal | None]) -> Limits:
        """Return these limits, each at most its cap; *caps* maps names of limits to caps, ``None`` for no cap."""
        lower: dict[str, Any] = {}
        for name, most in caps.items():
            own = getattr(self, name)
            # `Decimal` of the text: a limit in dollars may be a float here and a Decimal there, and 0.1 as a float is more than 0.1.
            if most is not None and (own is None or Decimal(str(own)) > Decimal(str(most))):
                lower[name] = most
        return attrs.evolve(self, **lower) if lower else self

    def resolve(self, fallback: Limits | None) -> Limits:
        """Return these limits with the gaps filled from *fallback*."""
        return self if fallback is None else _fill_gaps(self, fallback)


@lru_cache(256)  # an entry for each agent, and some dozen ways to call each
def _fill_gaps(limits: Limits, fallback: Limits) -> Limits:
    """Return *limits* with the gaps filled from *fallback*; cached, since most runs of a process have the same few."""
    gaps = {name: getattr(fallback, name) for name in NAMES if getattr(limits, name) is None}
    filled = {name: value for name, value in gaps.items() if value is not None}
    return attrs.evolve(limits, **filled) if filled else limits


NAMES = tuple([field.name for field in attrs.fields(Limits)])
TREE_WIDE = tuple([field.name for field in attrs.fields(Limits) if field.metadata["tree_wide"]])
"""The limits that count for a run and its children; ``max_steps`` and the like are each run's own."""
DEFAULT_LIMITS = Limits(
    # A model that needs more requests for one task is usually in a circle.
    max_steps=50,
    # A loop in a handler that never ends stops within seconds; ordinary programs do a few hundred things.
    max_actions=1000,
    # People divide work into two or three levels. Agents that call each other for ever stop here.
    max_depth=5,
    max_total_children=100,
    # A model can read the results of some ten children at once; more would fill its context.
    max_children=16,
    # Providers limit requests per minute and key.
    max_concurrent_children=8,
    # A model that was denied ten times asks for the same thing again.
    max_denials=10,
    # People are away for a week.
    max_wait_seconds=7 * 24 * 3600.0,
    # The work of all steps before would be lost without it.
    on_max_steps="final_answer",
)
"""The limits of a run that sets none."""
