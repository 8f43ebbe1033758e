"""``map_agents`` and ``best_of``: several children of one kind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import GeneratorType
from typing import Any, TypeVar, cast

from stepengine.data.checks import find_iteration_mistake
from stepengine.data.definition import AgentDefinition
from stepengine.data.state import ChildResult
from stepengine.data.yields import AgentCall, Parallel, StepResult, Yieldable
from stepengine.errors import BadYield

Item = TypeVar("Item")
Out = TypeVar("Out")
Steps = Generator[Yieldable, StepResult, Out]


def map_agents(
    agent: str | AgentDefinition[Out],
    items: Iterable[Item],
    *,
    prompt: str | Callable[[Item], str] | None = None,
    params: Callable[[Item], Any] | None = None,
    concurrency: int = 8,
) -> Generator[Yieldable, StepResult, tuple[ChildResult[Out], ...]]:
    """
    Run one child per item, *concurrency* at a time, and return their results in the order of the items.

    Without *prompt* and *params*, an item that is a string is the prompt of its child, and a mapping is its params.

    It is one ``Parallel``, so one action: as soon as a child has ended, the next one starts. Memory grows with the items and
    the results.

    Args:
        agent: The id of a spawnable agent, or its definition.
        items: One child each; all are read when ``map_agents`` is called.
        prompt: The prompt of every child, or a function that returns the prompt for an item.
        params: A function that returns the params for an item; none by default.
        concurrency: How many children run at once; a ``max_concurrent_children`` that was set also holds.

    A child that fails is an entry with ``is_error``; the others are not affected.

    Raises:
        BadYield: when *items* is a text, bytes or a mapping, or ``map_agents`` is called without *prompt* and *params*, and an item is neither a string nor a mapping.
        LimitExceeded: when a limit that was set has no room for that many children; none has started.
    """
    if problem := find_iteration_mistake(items):
        msg = f"map_agents starts one child for each item: {problem}"
        raise BadYield(msg)
    return _run_in_parallel(
        [_make_agent_call(agent, number, item, prompt, params) for number, item in enumerate(items)], concurrency
    )


def _make_agent_call(
    agent: str | AgentDefinition[Out],
    number: int,
    item: Item,
    prompt: str | Callable[[Item], str] | None,
    params: Callable[[Item], Any] | None,
) -> AgentCall[Out]:
    if prompt is not None or params is not None:
        text = prompt(item) if callable(prompt) else prompt or ""
        return AgentCall(agent, text, None if params is None else params(item))
    if isinstance(item, str):
        return AgentCall(agent, item)
    if isinstance(item, Mapping):
        return AgentCall(agent, "", item)
    msg = (
        f"item {number} of map_agents is a {type(item).__name__}, which is neither a prompt (a string) nor params (a mapping); "
        "pass prompt= or params= as a function of the item, such as prompt=str"
    )
    raise BadYield(msg)


def _run_in_parallel(calls: Sequence[AgentCall[Out]], concurrency: int) -> Steps[tuple[ChildResult[Out], ...]]:
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
