"""
``WaitingEffects``: performs what only waits, and what concerns children in the background.

A wait ends with what it waits for, with its time, or when the tree is suspended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

import attrs

from stepengine.data.effects import AwaitMessage, AwaitRuns, AwaitTime, EndRuns, RunInBackground, SendToRun
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Single, Stop, Value
from stepengine.data.state import RunStatus, label_warning, mark_suspended_as_cancelled
from stepengine.data.waits import Awaited, Received
from stepengine.errors import AgentError, StepEngineError
from stepengine.runtime.background import TreeWithBackground
from stepengine.runtime.core_performer import OutcomeMaker
from stepengine.runtime.messages import Message, make_message_checker
from stepengine.runtime.performer import IO, Item
from stepengine.runtime.suspension import list_waits


class WaitingEffects:
    """
    Performs the waits of one run tree.

    Args:
        tree: The tree.
        outcomes: Makes the outcomes.
    """

    def __init__(self, tree: TreeWithBackground, outcomes: OutcomeMaker) -> None:
        self._tree = tree
        self._services = tree.services
        self._outcomes = outcomes

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform one effect that waits, or that concerns children in the background."""
        effect = item.effect
        match effect:
            case AwaitTime():
                return self._await_time(item, effect)
            case AwaitMessage():
                return self._await_message(item, effect)
            case AwaitRuns():
                return self._await_runs(item, effect)
            case SendToRun():
                return self._send_to_run(item, effect)
            case EndRuns():
                return self._end_runs(item, effect)
            case _:
                return self._run_in_background(item, cast("RunInBackground", effect), io)

    async def _await_time(self, item: Item, effect: AwaitTime) -> Single:
        """Wait until a time has come; the outcome is a suspension if the tree was suspended first."""
        services = self._services
        if effect.until is not None and services.time.since is None:
            # Of a recording whose times are made up only the date itself can be waited for.
            seconds = (effect.until - services.time.clock.now()).total_seconds()
        else:
            seconds = self._tree.clock.compute_seconds_left(effect.wakes, effect.asked)
        if item.has_begun and services.time.wakes_now:
            seconds = 0.0
        if seconds > 0:
            with self._tree.mail.poll_in_block():
                if not await self._wait_for_time_or_arrival(item, seconds, partial(services.time.clock.sleep, seconds)):
                    return Stop("suspended", self._outcomes.elapsed())
        return self._outcomes.make_value_or_stop(item, None)

    async def _await_message(self, item: Item, effect: AwaitMessage) -> Single:
        """Wait for the first message on the topic that fits the schema; refuse the others with a warning."""
        mail, path, topic = self._tree.mail, item.path, effect.topic
        try:
            misfit = make_message_checker(topic, effect.schema)
        except StepEngineError as error:
            return self._outcomes.make_failure_or_stop(item, error)
        with mail.poll_in_block():
            # What other processes have sent is looked for once before anything is waited for; from then on arrivals are
            # told.
            if mail.find_oldest_message(path, topic) is None:
                await mail.fetch()
            while True:
                while (message := mail.find_oldest_message(path, topic)) is not None:
                    problem = misfit(message.value)
                    if not problem:
                        mail.remove(message)
                        return self._outcomes.make_value_or_stop(item, Received(message.id, message.value))
                    # Left out, and that is recorded: the next message may fit, and one that never fits would else stand
                    # before all others for ever.
                    mail.refuse(message, problem)
                    text = f"a message on {topic!r} (id {message.id!r}) was ignored, because it does not fit the schema of its receiver: {problem}"
                    self._tree.hub.failures.warnings.append(label_warning(text, path, item.plan.agent.definition.id))
                try:
                    came = await self._wait_until_deadline(item, effect, mail.make_message_future)
                except AgentError as error:
                    return self._outcomes.make_failure_or_stop(item, error)
                if came is not None:
                    return came

    async def _await_runs(self, item: Item, effect: AwaitRuns) -> Single:
        """Wait until enough background children have ended, or for the timeout; return those that have."""
        background = self._tree.background
        with self._tree.mail.poll_in_block():
            while True:
                done = background.list_ended(effect.children)
                if len(done) >= effect.need:
                    return self._make_children_outcome(item, effect.children, done)
                came = await self._wait_until_deadline(item, effect, background.make_end_future)
                if came is not None:
                    if isinstance(came, Value):
                        return self._make_children_outcome(
                            item, effect.children, background.list_ended(effect.children)
                        )
                    return came

    def _make_children_outcome(self, item: Item, children: Sequence[str], done: Sequence[str]) -> Single:
        """Return the ended and the remaining children as an outcome, and mark the results as received."""
        left = [path for path in children if path not in done]
        background = self._tree.background
        outcome = self._outcomes.make_value_or_stop(
            item, Awaited(tuple(done), tuple(left), background.get_results(done))
        )
        # Where the run was stopped meanwhile it is told nothing.
        if isinstance(outcome, Value):
            background.mark_results_received(done)
        return outcome

    async def _wait_until_deadline(
        self, item: Item, effect: AwaitMessage | AwaitRuns, make_arrival: Callable[[], asyncio.Future[None]]
    ) -> Single | None:
        """Wait for an arrival and return ``None``; at the deadline or a suspension, return the outcome that ends the wait."""
        if effect.wakes is None:
            came = await self._tree.suspension.wait_for_first_or_suspension(item, list_waits(item), make_arrival)
            return None if came else Stop("suspended", self._outcomes.elapsed())
        seconds = self._tree.clock.compute_seconds_left(effect.wakes, effect.asked)
        if seconds <= 0 or (item.has_begun and self._services.time.wakes_now):
            return self._outcomes.make_value_or_stop(item, None)
        is_over = False

        async def sleep() -> None:
            nonlocal is_over
            await self._services.time.clock.sleep(seconds)
            is_over = True

        if not await self._wait_for_time_or_arrival(item, seconds, sleep, make_arrival):
            return Stop("suspended", self._outcomes.elapsed())
        # Where times are made up, no time passes by which the next look would see that the patience is over.
        return self._outcomes.make_value_or_stop(item, None) if is_over and self._services.time.since is None else None

    async def _wait_for_time_or_arrival(
        self,
        item: Item,
        seconds: float,
        sleep: Callable[[], Awaitable[None]],
        *make_arrivals: Callable[[], asyncio.Future[None]],
    ) -> bool:
        """Wait until *sleep* or one of *make_arrivals* is done; return False if the tree was suspended first."""
        # A short wait is waited for here. A long one suspends the tree, once nothing else of it is at work: a process
        # that only sleeps for a day would have to live for a day.
        if seconds > self._services.time.sleep_in_process:
            return await self._tree.suspension.wait_for_first_or_suspension(
                item, list_waits(item), *make_arrivals, sleep
            )
        if make_arrivals:
            await _wait_for_first_of(sleep(), *[one() for one in make_arrivals])
        else:
            await sleep()
        return True

    async def _send_to_run(self, item: Item, effect: SendToRun) -> Single:
        """
        Send a message, or without a topic a user message, to a background child.

        The value is False if the child has ended already.
        """
        child = self._tree.background.get_child(effect.child)
        if child.result is not None:
            return self._outcomes.make_value_or_stop(item, value=False)
        address = f"{item.path}#{effect.seq}"
        is_new = self._tree.mail.deliver(Message(f"tell:{address}", effect.child, effect.topic, effect.value))
        if is_new and not effect.topic:
            self._tree.inboxes.add(effect.child, UserMessage(str(effect.value)))
        return self._outcomes.make_value_or_stop(item, value=True)

    async def _end_runs(self, item: Item, effect: EndRuns) -> Single:
        """Cancel background children, wait for them and return their results; a stop if their tree was stopped."""
        background = self._tree.background
        background.cancel_children(effect.children, effect.reason)
        if not await background.wait_for_ends(effect.children):
            return Stop("cancelled", self._outcomes.elapsed())
        return self._make_children_outcome(item, effect.children, background.list_ended(effect.children))

    async def _run_in_background(self, item: Item, effect: RunInBackground, io: IO) -> Single:
        """Run a child in the background; a suspended child ends only with its tree or by its parent."""
        finished = await io.run_child(effect.plan, effect.state, item.path)
        child, known = finished.to_child_result(), self._tree.background.get_child(item.path)
        # One that waits is no end: its parent may still send it what it waits for. So it stands here until the whole
        # tree lies down.
        if finished.status is RunStatus.SUSPENDED and known.stopping is None:
            await self._tree.suspension.wait_for_first_or_suspension(item, (), asyncio.get_running_loop().create_future)
        if finished.status is RunStatus.SUSPENDED and known.is_ended:
            error = known.stopping.error if known.stopping is not None else None
            child = attrs.evolve(child, status=RunStatus.CANCELLED, questions=(), error=cast("Any", error))
            self._tree.questions.forget_unanswered(finished.pending)
        elif known.stopping is not None and not known.is_ended:
            # It was stopped with its tree, so it has not ended for whoever records.
            stopping = known.stopping
            if stopping.kind != "suspended":
                child = mark_suspended_as_cancelled(child)
            return Stop(stopping.kind, self._outcomes.elapsed(), stopping.error, child=child)
        else:
            stop = self._outcomes.make_stop_if_stopped(finished, child=child)
            if stop is not None:
                return stop
        return self._outcomes.make_child_outcome(item, child)


async def _wait_for_first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until the first of these is done, and cancel the others."""
    waiting = [asyncio.ensure_future(one) for one in awaitables]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
