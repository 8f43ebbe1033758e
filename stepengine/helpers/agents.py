"""``map_agents`` and ``best_of``: several children of one kind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from types import GeneratorType
from typing import Any, TypeVar, cast

from stepengine.data.definition import AgentDefinition
from stepengine.data.state import ChildResult
from stepengine.data.yields import AgentCall, Parallel, StepResult, Yieldable
from stepengine.errors import BadYield

__all__ = ("best_of", "map_agents")

Item = TypeVar("Item")
Out = TypeVar("Out")
Steps = Generator[Yieldable, StepResult, Out]


def map_agents(
    agent: str | AgentDefinition[Out],
    items: Iterable[Item],
    *,
    prompt: str | Callable[[Item], str] = "",
    params: Callable[[Item], Any] | None = None,
    concurrency: int = 8,
) -> Generator[Yieldable, StepResult, tuple[ChildResult[Out], ...]]:
    """
    Run one child per item, *concurrency* at a time, and return their results in the order of the items.

    It is one ``Parallel``, so one action: as soon as a child has ended, the next one starts. Memory grows with the items and
    the results.

    Args:
        agent: The id of a spawnable agent, or its definition.
        items: One child each; all are taken before the first child starts.
        prompt: The prompt of every child, or a function that makes it from the item.
        params: A function that makes the params from the item; none by default.
        concurrency: How many children run at once; a ``max_concurrent_children`` that was set holds beside it.

    A child that fails is an entry with ``is_error``; the others are not affected.

    Raises:
        LimitExceeded: when a limit that was set has no room for that many children; none has started.
    """
    calls = [
        AgentCall(agent, prompt(item) if callable(prompt) else prompt, params(item) if params else None)
        for item in items
    ]
    return (yield from Parallel(calls, concurrency=max(concurrency, 1))) if calls else ()


def best_of(
    agent: str | AgentDefinition[Out],
    prompt: str = "",
    params: object = None,
    *,
    n: int = 3,
    concurrency: int = 8,
    judge: Callable[[Sequence[Out]], int | Steps[int]],
) -> Generator[Yieldable, StepResult, Out]:
    """
    Run *n* children with the same task and return the output that *judge* picks.

    Args:
        agent: The id of a spawnable agent, or its definition.
        prompt: The prompt of every child.
        params: The params of every child.
        n: How many children.
        concurrency: How many children run at once, as for ``map_agents``.
        judge: Gets the outputs of the children that completed and returns the index of the best; it may be a generator
            function, to ask another agent.

    Raises:
        ChildError: when no child completed.
        LimitExceeded: when a limit that was set has no room for *n* children.
        BadYield: when *judge* gives an index that no output has.
    """
    many = range(max(n, 1))
    children = yield from map_agents(agent, many, prompt=prompt, params=lambda _: params, concurrency=concurrency)
    outputs = [child.output for child in children if not child.is_error]
    if not outputs:
        return children[0].unwrap()
    choice = judge(outputs)
    index = (yield from choice) if isinstance(choice, GeneratorType) else cast("int", choice)
    if not isinstance(index, int) or not 0 <= index < len(outputs):
        msg = f"the judge of best_of chose {index!r}; there are {len(outputs)} outputs, counted from 0"
        raise BadYield(msg)
    return outputs[index]
