"""
Samples of a recorded run: forks that run concurrently within one budget, and summaries of a run from an effect on.

``stepengine.journal.recorded_forks`` makes a single fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from decimal import Decimal
from typing import Any, TypeAlias, TypeVar

from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage, add_cost
from stepengine.engine import Engine
from stepengine.journal import ForkReport, Journal, SharedBudget
from stepengine.journal.history import History
from stepengine.journal.programs import find_program_text
from stepengine.journal.recorded_forks import ForkTools
from stepengine.journal.recorded_part import JournalCut, parse_address
from stepengine.journal.records import Address, Intent, format_address
from stepengine.journal.show import find_root_end, get_run_status
from stepengine.runtime.performer import child_path

AT_ONCE = 4
Models = Callable[[], Any]
"""Returns the models of one sample, such as a script from its start; it is called for each sample."""
Made = TypeVar("Made")


@frozen
class CostEstimate:
    """
    The estimated model calls of an evaluation, and their cost by the recorded prices.

    Attributes:
        calls: The number of model calls.
        low: The least cost in US dollars; ``None`` if it is unknown.
        high: The highest cost in US dollars; ``None`` if it is unknown.
    """

    calls: int
    low: Decimal | None
    high: Decimal | None


Confirm: TypeAlias = Callable[[CostEstimate], "Awaitable[SharedBudget | None] | SharedBudget | None"]
"""Approves the cost before models are called, or raises. If it returns a ``SharedBudget``, that pays."""


async def confirm_cost_and_get_budget(
    confirm: Confirm | None, estimate: Callable[[], CostEstimate], budget: SharedBudget | None
) -> SharedBudget:
    """
    Ask *confirm* to approve the estimate, and return the budget: the one that *confirm* returns, else *budget*, else an unlimited one.

    *confirm* is not called if no model will be called. Its errors are raised.
    """
    budget = SharedBudget() if budget is None else budget
    if confirm is None:
        return budget
    expected = estimate()
    if not expected.calls:
        return budget
    given = confirm(expected)
    approved = given if given is None or isinstance(given, SharedBudget) else await given
    return budget if approved is None else approved


async def fork_sample(
    engine: Engine,
    journal: Journal,
    *,
    budget: SharedBudget,
    models: Models | None,
    at: str | None = None,
    tools: ForkTools = "recorded",
    **options: Any,
) -> ForkReport | None:
    """
    Fork *journal* once, and call the model again from *at*, by default the first difference; return ``None`` without enough budget.

    *tools* and *options* are those of ``Engine.fork``.

    Returns:
        The report; ``None`` if the budget does not suffice.
    """
    if budget.is_empty:
        return None
    if at is not None:
        path, seq = parse_address(at)
        options["at"] = format_address(path, seq - 1)
    with nullcontext() if models is None else engine.override(models=models()):
        made = await engine.fork(journal, tools=tools, budget=budget, **options)
    return None if made.is_unpaid else made


async def run_concurrently(works: Sequence[Callable[[], Awaitable[Made]]], max_concurrent: int = AT_ONCE) -> list[Made]:
    """Call *works*, at most *max_concurrent* at a time, and return their results in order; the first error cancels the others."""
    gate = asyncio.Semaphore(max_concurrent)

    async def run_within_limit(work: Callable[[], Awaitable[Made]]) -> Made:
        """Wait for a free place, then do the work and return its result."""
        async with gate:
            return await work()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_within_limit(work)) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@frozen
class Course:
    """
    The effects and the end of a run from one effect on.

    Attributes:
        decision: The tools that the first model reply called, with their inputs. A program is replaced by its requests, since two
            programs are rarely equal. ``None`` without a model reply.
        tools: The names of the called tools, in program order.
        steps: The number of model calls.
        tokens: The number of tokens of these calls.
        cost: The cost of these calls in US dollars; ``None`` if it is unknown, for example because none has a reply.
        status: The status of the run.
        output: The output of the run as JSON, or its text if it has no output.
    """

    decision: tuple[tuple[str, Any], ...] | None
    tools: tuple[str, ...]
    steps: int
    tokens: int
    cost: Decimal | None
    status: str
    output: Any


def summarize_run_from(history: History, first_address: str) -> Course:
    """Return the course of a run from the effect *first_address* on, including the runs that it started."""
    address = parse_address(first_address)
    cut = JournalCut(history.tree)
    cut.cut_at(address)
    after = [i for a, i in sort_effects_in_program_order(history) if a[1] >= 0 and not cut.keeps_intent(a)]
    usage, decision = Usage(), None
    cost: Decimal | None = Decimal(0)
    models = [i for i in after if i.type == "model_call"]
    replies = [(intent, reply) for intent in models if (reply := _find_recorded_reply(history, intent)) is not None]
    for intent, reply in replies:
        usage, cost = usage + (reply.usage or Usage()), add_cost(cost, reply.cost)
        if decision is None and intent.path == address[0]:
            decision = tuple(_iterate_requested_calls(history, intent, reply))
    ended = find_root_end(history)
    return Course(
        decision=decision,
        tools=tuple([str(history.form(i)["tool_name"]) for i in after if i.type == "tool_call"]),
        steps=len(models),
        tokens=usage.total_tokens,
        cost=cost if replies or not models else None,
        status=get_run_status(history),
        output=None if ended is None else plain(ended.output) if ended.output is not None else ended.text,
    )


def _iterate_requested_calls(history: History, model_call: Intent, reply: ModelReply) -> Iterator[tuple[str, Any]]:
    """Yield the tool calls of a reply; a call that ran a program is replaced by the program's calls, agents and questions."""
    programs = list(_find_programs_after_reply(history, model_call))
    for call in reply.tool_calls:
        given = plain(call.input)
        found = next((one for one in programs if one[:2] == (call.tool_name, given.get("code"))), None)
        inner = []
        if found is not None:
            programs.remove(found)
            inner = list(_iterate_program_requests(history, found[2]))
        yield from inner or [(call.tool_name, given)]


def _find_programs_after_reply(history: History, model_call: Intent) -> Iterator[tuple[str, str, str]]:
    """Yield the programs that ran for the reply to a model call, as (tool name, source, run path of the program's effects)."""
    seq = model_call.seq + 1
    while (effect := history.intents.get((model_call.path, seq))) is not None and effect.type != "model_call":
        form = history.form(effect)
        text = find_program_text(form)
        if text is not None:
            yield form["tool_name"], text, child_path(model_call.path, seq)
        seq += 1


def _iterate_program_requests(history: History, run_path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tool calls, agent calls and questions of a program as (name, input), without waits and permission checks."""
    for form in map(history.form, history.tree.list_effects(run_path)):
        if form["type"] == "tool_call":
            yield form["tool_name"], plain(form["input"])
        elif form["type"] == "agent_call":
            yield form["agent_id"], {"prompt": form["prompt"], "params": plain(form["params"])}
        elif form["type"] == "ask" and form["purpose"] == "question":
            yield "ask", [question["text"] for question in form["questions"]]


def sort_effects_in_program_order(history: History) -> list[tuple[Address, Intent]]:
    """Return the effects of a run sorted by address; the effects of a child follow the effect that started the child."""

    def sort_key(effect: tuple[Address, Intent]) -> list[int]:
        """Return the numbers in the path of an effect, and its own number."""
        (path, seq), _ = effect
        return [*[int(n) for n in path.split(".") if n], seq]

    return sorted(history.intents.items(), key=sort_key)


def _find_recorded_reply(history: History, intent: Intent) -> ModelReply | None:
    """Return the recorded reply to a model call; ``None`` if it failed or has no result."""
    known = history.results.get((intent.path, intent.seq))
    value = None if known is None else getattr(history.outcome(known), "value", None)
    return value if isinstance(value, ModelReply) else None


def finished_model_call_addresses(history: History) -> list[str]:
    """Return the addresses of model calls that have a recorded result, in program order."""
    return [
        format_address(*address)
        for address, intent in sort_effects_in_program_order(history)
        if intent.type == "model_call" and address in history.results
    ]


def sum_costs(costs: Iterable[Decimal | None]) -> Decimal | None:
    """Return the sum of costs in US dollars; ``None`` if one is unknown."""
    total: Decimal | None = Decimal(0)
    for cost in costs:
        total = add_cost(total, cost)
    return total


def format_dollars(amount: Decimal | None) -> str:
    """Return an amount as readable text; small amounts have more digits."""
    if amount is None:
        return "an unknown amount"
    return f"${amount:.4f}" if amount >= Decimal("0.01") or not amount else f"${amount:.6f}"
