"""
What performs effects: model calls, tool calls, functions, questions and children, each by one method of ``Innermost``.

Everything here stands inside of what records, limits and traces. Outcomes are stamped with the run's time and hand over what
was sent to the run meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, assert_never, cast

import attrs

from stepengine.data.effects import (
    AskPerson,
    AwaitMessage,
    AwaitRuns,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    EndRuns,
    Leaf,
    RunInBackground,
    SendToRun,
    Spawn,
)
from stepengine.data.estimate import CHARS_PER_TOKEN
from stepengine.data.events import (
    Event,
    ModelRetry,
    RateLimited,
    ReplyDiscarded,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolLog,
)
from stepengine.data.json import JsonDict, freeze
from stepengine.data.messages import ToolCallPart, ToolResult, UserMessage
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    ReplyDone,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.outcomes import Begun, Failure, Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult, RunStatus, no_longer_waiting, prompt_tokens
from stepengine.data.tools import Asking, Ordinary, ToolAnnotations, ToolBinding, ToolSpec, Yielding
from stepengine.data.usage import Usage, add_cost
from stepengine.data.waiting import Awaited, ChildRef, Received
from stepengine.errors import (
    AgentError,
    ContextOverflow,
    DataError,
    LimitExceeded,
    ModelError,
    PerformError,
    StepEngineError,
    TruncatedReply,
)
from stepengine.machine.plan import Finished
from stepengine.models._stopping import note_usage, usage_when_stopped
from stepengine.models.base import Provider, deltas_of_part, raw_of
from stepengine.runtime.background import TreeWithBackground
from stepengine.runtime.logs import LineLogger
from stepengine.runtime.mail import Message, misfit_of
from stepengine.runtime.performer import IO, Item, child_path
from stepengine.runtime.rates import Notice, Obstacle, ParsingRegistry, queued
from stepengine.runtime.retry import Retries, known_usage
from stepengine.runtime.services import ModelProvider
from stepengine.runtime.sizes import estimated_tokens
from stepengine.runtime.standstill import waits_of
from stepengine.tools.context import ToolContext
from stepengine.workspace.guard import GUARD, PROJECT_RULES, CallGuard
from stepengine.workspace.workspace import WORKSPACE, Workspace

if TYPE_CHECKING:
    from stepengine.data.questions import Interactor
    from stepengine.permissions import Request
    from stepengine.runtime.prices import Prices

__all__ = ("NOTHING", "Innermost", "defers", "is_deferred")


class _Nothing:
    """An awaitable that is done at once, again and again; a coroutine would have to be made for every effect."""

    __slots__ = ()

    def __await__(self) -> Iterator[object]:
        return iter(())


NOTHING = cast("Awaitable[None]", _Nothing())


class Innermost:
    """
    The performer at the core of one run tree, which all others wrap: it does what is asked for.

    Args:
        tree: The tree.
        retries: How failed model calls of the tree are tried again.
        prices: Computes the cost of model calls.
    """

    def __init__(self, tree: TreeWithBackground, retries: Retries, prices: Prices) -> None:
        self._tree = tree
        self._services = tree.services
        self._retries = retries
        self._elapsed = tree.clock.elapsed
        self._by_kind = self._PERFORM
        self._inbox, self._inboxes = tree.inboxes.root, tree.inboxes.by_path
        self._providers: dict[str, ModelProvider] = {}
        self._prices = prices

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """Nothing needs to be prepared to perform something."""
        return NOTHING

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform one effect."""
        return self._by_kind[type(item.effect)](self, item, io)

    def _value(self, item: Item, value: object) -> Single:
        late = self._tree.clock.too_late(item.path) if self._tree.clock.deadlines else None
        if late is not None:
            # What did not end in time is cut off, also where nothing could cut it off in time; it is paid for nevertheless.
            return _with_use(late, value)
        # What was sent to the run travels in the outcome of the effect during which it came: so it is recorded with it,
        # and a replay hears it at the same place (replay:J16).
        inputs = self._take_inbox(item.path) if self._inbox or self._inboxes else ()
        elapsed = self._elapsed
        return Value(value, elapsed(), inputs)

    def _failure(self, item: Item, error: StepEngineError) -> Single:
        late = self._tree.clock.too_late(item.path)
        if late is not None:
            return late
        # A traceback holds every frame with all its variables: the SDK's request, whole conversations. The error lives
        # as long as the run's record, so they would, too.
        _drop_frames(error)
        inputs = self._take_inbox(item.path) if self._inbox or self._inboxes else ()
        return Failure(error, self._elapsed(), inputs)

    def _take_inbox(self, path: str) -> tuple[Any, ...]:
        if path:
            return tuple(self._inboxes.pop(path, ()))
        inputs = tuple(self._inbox)
        del self._inbox[: len(inputs)]  # another thread may have put more there since
        return inputs

    # --- model calls --------------------------------------------------------------------------------------------------

    async def _call_model(self, item: Item, io: IO) -> Single:
        """Ask a model, again if that may help; what failed attempts used is added to the usage and cost of the reply or error."""
        request: ModelRequest = item.effect.request  # type: ignore[union-attr]
        spent: Usage | None = None
        try:
            provider = self._provider(item, io, request)
        except StepEngineError as error:
            return self._failure(item, error)
        # Attempts are inside the one effect: the machine asked once and gets one reply, and the failed ones are members
        # of its result. So a retry moves no number, and a replay needs no luck (replay:J14).
        attempt = 1
        while True:
            try:
                # Streamed only where somebody watches: a reply in one piece is less work for both sides, and nobody
                # would see the pieces.
                # A provider that has no stream of its own gives a reply whole and then takes it apart. Nothing would be
                # shown earlier for it, and the stream and its pieces would cost a third of what such a step does.
                watched = io.watched
                streams = watched and getattr(provider.stream, "__func__", None) is not Provider.stream
                reply = await (_streamed(provider, request, item, io) if streams else provider.complete(request))
                shown = _shown_whole(reply, item, io) if watched and not streams else reply
                reply = self._priced(request.model, shown, spent)
            # All of it, since also a cancelled call has to say what it had used (reliability:MP30); `_to_our_error` raises on
            # whatever is no failure of the provider.
            except BaseException as raised:  # noqa: BLE001
                failed = self._to_our_error(item, request.model, raised, spent)
                if not isinstance(failed, ModelError):
                    return self._failure(item, failed)
                used = known_usage(failed)
                spent = spent + used if spent and used else spent or used
                wait = self._retries.wait_before_next(failed, attempt, (item.path, item.effect.seq))
                if wait is None:
                    failed.usage = spent
                    return self._failure(item, failed)
            else:
                return self._value(item, reply)
            io.attempt(Failure(failed), used)
            if io.watched:
                io.emit(_retry(item, request, attempt, wait, failed))
            await self._pause(item, wait, spent)
            attempt += 1

    async def _pause(self, item: Item, seconds: float, spent: Usage | None) -> None:
        """Wait before the next attempt; when the call is stopped meanwhile, what it *spent* counts."""
        try:
            await self._services.clock.sleep(seconds)
        except BaseException as raised:
            self._to_our_error(item, item.effect.request.model, raised, spent)  # type: ignore[union-attr]
            raise

    def _to_our_error(self, item: Item, model: str, raised: BaseException, spent: Usage | None) -> StepEngineError:
        """
        Return what a call ended with as an error of ours; *spent* is what its failed attempts had used.

        Raises:
            BaseException: *raised* itself, when the call was stopped; what it had used is kept for its outcome.
        """
        if not _is_stop(raised):
            return _as_ours(model, raised)
        used = usage_when_stopped(raised)
        usage = spent + used if spent and used else spent or used
        if usage is not None:
            # Nothing used costs nothing, also where the model has no price: `None` would make the sum unknown for ever
            # (reliability:I4).
            cost = self._prices.for_usage(model, usage) if usage.total_tokens else Decimal(0)
            self._tree.leftovers.stopped_calls[item.path, item.effect.seq] = Begun(
                attrs.evolve(usage, at_least=True), cost
            )
        raise raised

    def _refuse_oversize(self, request: ModelRequest) -> None:
        """Raise for a request that is longer than its model's window."""
        # A model string with `|` is a chain of models to fall back on, which have windows of their own.
        window = None if "|" in request.model else self._services.window(request.model)
        if window is None or (size := estimated_tokens(request)) <= window:
            return
        msg = (
            f"{request.model!r} takes {window} tokens, and the request has about {size}; shorten it with a context policy such as "
            "truncate(), or leave oversize= of ModelSettings out to let the provider judge"
        )
        raise ContextOverflow(msg, kind="context_overflow")

    def _provider(self, item: Item, io: IO, request: ModelRequest) -> ModelProvider:
        """Return the provider of a model; with rate limits it waits for its turn, and tells of that for this call."""
        if request.settings.oversize == "refuse":
            self._refuse_oversize(request)
        model, models, rates = request.model, self._services.models, self._services.rates
        if rates is not None:
            return queued(cast("ParsingRegistry", models), rates, model, _notice(item, io, request))
        # One look-up for each model of a tree and not for each call: it parses the string and looks for a key.
        provider = self._providers.get(model)
        if provider is None:
            provider = self._providers[model] = models.provider_for(model)
        return provider

    def _priced(self, model: str, reply: object, spent: Usage | None) -> ModelReply:
        """
        Return a reply with its cost, and with what failed attempts *spent*.

        Raises:
            ModelError: when it is not a reply.
        """
        # Providers may be anybody's. What they give goes into records and sums, so it is looked at once, here.
        if not isinstance(reply, ModelReply):
            msg = f"the provider of {model!r} gave a {type(reply).__name__} instead of a ModelReply"
            raise ModelError(msg, kind="provider")
        usage, cost = reply.usage, reply.cost
        # A bill that the provider states wins over our prices; these are only for replies that state none.
        if cost is None and usage is not None:
            cost = self._prices.for_reply(model, reply)
            if reply.provider_data and (missing := self._prices.unpriced_parts(model, reply)):
                usage = attrs.evolve(usage, at_least=True)
                reply = attrs.evolve(reply, provider_data={**reply.provider_data, "unpriced": missing})
        if spent is not None:
            cost = add_cost(cost, self._prices.for_usage(model, spent) if spent.total_tokens else Decimal(0))
            usage = spent + (usage or Usage(at_least=True))
        if usage is reply.usage and cost is reply.cost:
            return reply
        return attrs.evolve(reply, usage=usage, cost=cost)

    # --- tool calls ---------------------------------------------------------------------------------------------------

    async def _call_tool(self, item: Item, io: IO) -> Single:
        """Run one tool; a failing body is an error result."""
        effect: CallTool
        _, effect, plan, _, has_begun = item  # type: ignore[assignment]
        binding = plan.tools.get(effect.tool_name)
        tool = binding.runs.tool if binding is not None and isinstance(binding.runs, Ordinary) else None
        try:
            if binding is None or tool is None:
                msg = f"the tool {effect.tool_name!r} of agent {plan.definition.id!r} cannot be carried out here"
                raise StepEngineError(msg)  # noqa: TRY301
            # The body has returned in a process before this one, and only its result is missing (`deferred=True`): to
            # run it again would begin the work a second time.
            if has_begun:
                return self._value(item, await self._delivered(item, None, io))
            # The machine has validated the input and hands the converted arguments along. Only an effect that was made
            # from a record has none, and is validated here.
            arguments = effect.arguments
            if arguments is None:
                arguments = binding.validate(effect.input).arguments
            ctx: ToolContext = _Unmade(item, effect, self._tree)  # type: ignore[assignment]
            running = tool.execute(arguments, ctx, overrides=self._services.tools.overrides)
            # Rules about files judge what is opened, and not the path that was written in the call: between the two
            # there may be links. So they travel with the call to where files are opened (reliability:FP4).
            if self._services.tools.guard is not None:
                guard = self._services.tools.guard(_request(item, effect, binding.spec))
                running = _await_guarded(running, guard, self._services.tools.workspace)
            is_late = getattr(tool, "deferred", False)
            result = await (self._delivered(item, running, io) if is_late else running)
        except StepEngineError as error:
            return self._failure(item, error)
        return self._value(item, result)

    async def _delivered(self, item: Item, running: Awaitable[ToolResult] | None, io: IO) -> ToolResult:
        """
        Return what comes from outside, once the body has begun the work; its error, when it could not.

        Where it has done so in a process before, *running* is ``None``: then the result is all that is missing.
        """
        deferred = self._tree.deferred
        # Before the body runs, since the result may be there before the body has returned: a worker that is quicker
        # than its caller.
        delivered = deferred.expect(item)
        try:
            if running is not None:
                result = await running
                if result.is_error:
                    return result
                # That it only waits is recorded: whoever resumes then waits on, in place of calling the effect in doubt
                # (replay:J31).
                if not delivered.done():
                    await io.waits(item)
            deferred.waits(item)
            if delivered.done():
                return delivered.result()
            with self._tree.mail.watched():
                return await delivered
        finally:
            deferred.forget(item)

    # --- functions, questions, children -------------------------------------------------------------------------------

    async def _call_function(self, item: Item, io: IO) -> Single:
        call = cast("CallFunction", item.effect).call
        token = WORKSPACE.set(self._services.tools.workspace)
        rules = PROJECT_RULES.set(partial(self._project_rules, item))
        try:
            # The JSON form is what the handler gets, live as on replay: with the object itself live, a handler could
            # use what a replay does not have (reliability:GN17).
            value = freeze(await self._returned(call.name, partial(call.fn, *call.args, **call.kwargs), call.fn))
        except DataError as error:
            msg = f"Perform({call.name}) returned what is not JSON: {error.message}"
            return self._failure(item, _because(PerformError(msg, kind="DataError"), error))
        # A function may raise one of its own accord, such as from a task that it cancelled. Only when our task was
        # asked to end is it ours (reliability:TL03).
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._failure(item, _function_failed(call.name, error))
        except (Exception, GeneratorExit) as error:  # noqa: BLE001
            return self._failure(item, _function_failed(call.name, error))
        finally:
            PROJECT_RULES.reset(rules)
            WORKSPACE.reset(token)
        return self._value(item, value)

    def _project_rules(self, item: Item) -> CallGuard | None:
        """Return what rules say about the files of the project, as of a tool that reads them."""
        guard = self._services.tools.guard
        if guard is None:
            return None
        from stepengine.permissions import Request  # an engine without rules does not load them

        spec = ToolSpec("project_context", category="read", annotations=ToolAnnotations(read_only=True))
        info = item.plan.info
        return guard(
            Request(
                tool=spec,
                input=JsonDict(),
                agent_id=item.plan.definition.id,
                session_id=info.session_id,
                user_id=info.user_id,
                source="handler",
                is_call=False,
            )
        )

    async def _returned(self, name: str, body: Callable[[], Any], fn: object) -> object:
        # Synchronous functions go to a thread: one that blocks would hold up every run of the loop.
        if inspect.iscoroutinefunction(_innermost(fn)):
            return await body()
        threads, leaked = self._services.tools.threads, self._tree.leftovers.leaked
        value, error = await threads.run(name, partial(_caught, body), leaked=leaked)
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value

    async def _ask(self, item: Item, io: IO) -> Single:
        questions = self._tree.desk.shown(item)
        try:
            # Only while somebody waits for something is the mailbox looked into, which is a look at a disk.
            with self._tree.mail.watched():
                if item.effect.purpose == "limit":  # type: ignore[union-attr]
                    answers = [await self._tree.desk.ask_for_more(questions[0])]
                else:
                    answers = await self._tree.desk.ask(questions, _interactor_of(item))
        except LimitExceeded as error:
            return self._failure(item, error)
        finally:
            self._tree.desk.forget_shown(item)
        waiting = tuple([q for q, answer in zip(questions, answers, strict=True) if answer is None])
        # Some are open: the run is suspended with those, and what was answered is kept (`_keep_answers` of the
        # recorder).
        if waiting:
            return Stop("suspended", self._elapsed(), questions=waiting)
        return self._value(item, tuple(answers))

    async def _spawn(self, item: Item, io: IO) -> Single:
        effect = cast("Spawn", item.effect)
        path = child_path(item.path, effect.seq)
        try:
            plan, state = self._services.planner(item.plan, effect, path)
        # A child that cannot be planned (unknown agent, wrong params) is a failed child in its own entry, and its
        # siblings run (reliability:SP05).
        except StepEngineError as error:
            error.__traceback__ = None
            if effect.is_background:
                return self._failure(item, error)
            refused: ChildResult = ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error)
            return self._value(item, refused)
        self._tree.runs.spawned_by[path] = effect.tool_call_id
        if effect.is_background:
            self._tree.background.start(item, plan, state, self._tree.performers.recording)
            return self._value(item, ChildRef(state.run_id, plan.definition.id, path))
        finished = await io.drive(plan, state, path)
        child = finished.as_child(is_inline=effect.is_inline)
        # Asked here, though `_stopped_with` knows it: nearly every child is neither, and is spared the call.
        if finished.status is RunStatus.SUSPENDED or self._tree.root.stopping is not None:
            stop = self._stopped_with(finished, child=child)
            if stop is not None:
                return stop
        _drop_frames(child.error)
        ended = self._value(item, child)
        return attrs.evolve(ended, child=child) if isinstance(ended, Stop) else ended

    async def _call_body(self, item: Item, io: IO) -> Single:
        """Run the body of a tool that yields; one that fails is an error result."""
        effect = cast("CallBody", item.effect)
        path = child_path(item.path, effect.seq)
        try:
            plan, state = self._services.planner(item.plan, effect, path)
        except StepEngineError as error:
            return self._failure(item, error)
        self._tree.runs.spawned_by[path] = effect.tool_call_id
        finished = await io.drive(plan, state, path)
        body = finished.as_body()
        stop = self._stopped_with(finished, body=body)
        if stop is not None:
            return stop
        _drop_frames(finished.error)
        result = finished.as_tool_result(cast("Yielding", item.plan.tools[effect.tool_name].runs))
        ended = self._value(item, result)
        if isinstance(ended, Value):
            return Value(ended.value, ended.at, ended.inputs, body)
        return attrs.evolve(ended, body=body) if isinstance(ended, Stop) else ended

    # --- what only waits, and children in the background --------------------------------------------------------------

    async def _await_time(self, item: Item, _: IO) -> Single:
        effect: AwaitTime = item.effect  # type: ignore[assignment]
        services = self._services
        if effect.until is not None and services.since is None:
            # Of a recording whose times are made up only the date itself can be waited for.
            seconds = (effect.until - services.clock.now()).total_seconds()
        else:
            seconds = self._tree.clock.seconds_until(effect.wakes, effect.asked)
        if item.has_begun and services.wakes_now:
            seconds = 0.0
        if seconds > 0:
            with self._tree.mail.watched():
                if not await self._patient(item, seconds, partial(services.clock.sleep, seconds)):
                    return Stop("suspended", self._elapsed())
        return self._value(item, None)

    async def _await_message(self, item: Item, _: IO) -> Single:
        effect: AwaitMessage = item.effect  # type: ignore[assignment]
        mail, path, topic = self._tree.mail, item.path, effect.topic
        try:
            misfit = misfit_of(topic, effect.schema)
        except StepEngineError as error:
            return self._failure(item, error)
        with mail.watched():
            # What other processes have sent is looked for once before anything is waited for; from then on arrivals are
            # told.
            if mail.first(path, topic) is None:
                await mail.fetch()
            while True:
                while (message := mail.first(path, topic)) is not None:
                    problem = misfit(message.value)
                    if not problem:
                        mail.take(message)
                        return self._value(item, Received(message.id, message.value))
                    # Left out, and that is recorded: the next message may fit, and one that never fits would else stand
                    # before all others for ever.
                    mail.refuse(message, problem)
                    self._tree.hub.warnings.append(
                        f"a message on {topic!r} (id {message.id!r}) was left out, since it does not fit what waits for it: {problem}"
                    )
                try:
                    came = await self._in_time(item, effect, mail.arrival)
                except AgentError as error:
                    return self._failure(item, error)
                if came is not None:
                    return came

    async def _await_runs(self, item: Item, _: IO) -> Single:
        effect: AwaitRuns = item.effect  # type: ignore[assignment]
        background = self._tree.background
        with self._tree.mail.watched():
            while True:
                done = background.done(effect.children)
                if len(done) >= effect.need:
                    return self._awaited(item, effect.children, done)
                came = await self._in_time(item, effect, background.one_end)
                if came is not None:
                    if isinstance(came, Value):
                        return self._awaited(item, effect.children, background.done(effect.children))
                    return came

    def _awaited(self, item: Item, children: Sequence[str], done: Sequence[str]) -> Single:
        left = [path for path in children if path not in done]
        return self._value(item, Awaited(tuple(done), tuple(left), self._tree.background.results(done)))

    async def _in_time(
        self, item: Item, effect: AwaitMessage | AwaitRuns, coming: Callable[[], asyncio.Future[None]]
    ) -> Single | None:
        """Wait until something has come, and return ``None``, so that it is looked at; else return what ends the wait."""
        if effect.wakes is None:
            came = await self._tree.standstill.until(item, waits_of(item), coming)
            return None if came else Stop("suspended", self._elapsed())
        seconds = self._tree.clock.seconds_until(effect.wakes, effect.asked)
        if seconds <= 0 or (item.has_begun and self._services.wakes_now):
            return self._value(item, None)
        is_over = False

        async def sleep() -> None:
            nonlocal is_over
            await self._services.clock.sleep(seconds)
            is_over = True

        if not await self._patient(item, seconds, sleep, coming):
            return Stop("suspended", self._elapsed())
        # Where times are made up, no time passes by which the next look would see that the patience is over.
        return self._value(item, None) if is_over and self._services.since is None else None

    async def _patient(
        self,
        item: Item,
        seconds: float,
        sleep: Callable[[], Awaitable[None]],
        *coming: Callable[[], asyncio.Future[None]],
    ) -> bool:
        """Wait so many *seconds*, as *sleep* does, or for what is *coming*; return ``False`` if the tree came to rest first."""
        # A short wait is waited for here. A long one suspends the tree, once nothing else of it is at work: a process
        # that only sleeps for a day would have to live for a day.
        if seconds > self._services.sleep_in_process:
            return await self._tree.standstill.until(item, waits_of(item), *coming, sleep)
        if coming:
            await _first(sleep(), *[one() for one in coming])
        else:
            await sleep()
        return True

    async def _send_to_run(self, item: Item, _: IO) -> Single:
        effect: SendToRun = item.effect  # type: ignore[assignment]
        child = self._tree.background.child(effect.child)
        if child.result is not None:
            return self._value(item, value=False)
        address = f"{item.path}#{effect.seq}"
        is_new = self._tree.mail.arrive(Message(f"tell:{address}", effect.child, effect.topic, effect.value))
        if is_new and not effect.topic:
            self._tree.inboxes.add(effect.child, UserMessage(str(effect.value)))
        return self._value(item, value=True)

    async def _end_runs(self, item: Item, _: IO) -> Single:
        effect: EndRuns = item.effect  # type: ignore[assignment]
        background = self._tree.background
        background.end(effect.children, effect.reason)
        if not await background.all_ended(effect.children):
            return Stop("cancelled", self._elapsed())
        return self._awaited(item, effect.children, background.done(effect.children))

    async def _run_in_background(self, item: Item, io: IO) -> Single:
        """Run a child in the background; a child at rest ends only with its tree, or when its parent ends it."""
        effect: RunInBackground = item.effect  # type: ignore[assignment]
        finished = await io.drive(effect.plan, effect.state, item.path)
        child, known = finished.as_child(), self._tree.background.child(item.path)
        # One that waits is no end: its parent may still send it what it waits for. So it stands here until the whole
        # tree lies down.
        if finished.status is RunStatus.SUSPENDED and known.stopping is None:
            await self._tree.standstill.until(item, (), asyncio.get_running_loop().create_future)
        if finished.status is RunStatus.SUSPENDED and known.is_ended:
            error = known.stopping.error if known.stopping is not None else None
            child = attrs.evolve(child, status=RunStatus.CANCELLED, questions=(), error=cast("Any", error))
        elif known.stopping is not None and not known.is_ended:
            # It was stopped with its tree, so it has not ended for whoever records.
            stopping = known.stopping
            if stopping.kind != "suspended":
                child = no_longer_waiting(child)
            return Stop(stopping.kind, self._elapsed(), stopping.error, child=child)
        else:
            stop = self._stopped_with(finished, child=child)
            if stop is not None:
                return stop
        _drop_frames(child.error)
        return self._value(item, child)

    def _stopped_with(self, finished: Finished, **end: Any) -> Stop | None:
        """Return the stop of an effect whose run was stopped, with its *end* as ``child`` or ``body``; ``None`` if that run has ended."""
        if finished.status is RunStatus.SUSPENDED:
            return Stop("suspended", self._elapsed(), questions=finished.pending, **end)
        stop = self._tree.root.stopping
        is_cut = self._tree.root.spares and finished.status is RunStatus.CANCELLED
        if stop is not None and (is_cut or self._tree.leftovers.reraise is not None):
            # It was stopped, or what happened in it is in doubt, so it has not ended for whoever records.
            return Stop(stop.kind, self._elapsed(), stop.error, **end)
        return None

    _PERFORM: ClassVar[Mapping[type[Leaf], Callable[[Innermost, Item, IO], Awaitable[Single]]]] = {
        CallModel: _call_model,
        CallTool: _call_tool,
        CallBody: _call_body,
        CallFunction: _call_function,
        Spawn: _spawn,
        AskPerson: _ask,
        AwaitTime: _await_time,
        AwaitMessage: _await_message,
        AwaitRuns: _await_runs,
        SendToRun: _send_to_run,
        EndRuns: _end_runs,
        RunInBackground: _run_in_background,
    }
    """How each effect is performed."""


async def _first(*coming: Awaitable[Any]) -> None:
    """Wait until the first of these has come, and give up the others."""
    waiting = [asyncio.ensure_future(one) for one in coming]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def _interactor_of(item: Item) -> Interactor | None:
    """Return the interactor that was given to ``ask_user_tool(interactor)``; ``None`` for none."""
    effect = cast("AskPerson", item.effect)
    of_tool = effect.tool_call_id and effect.purpose == "question"
    binding = item.plan.tools.get("ask_user") if of_tool else None
    return binding.runs.interactor if binding is not None and isinstance(binding.runs, Asking) else None


def _innermost(fn: object) -> object:
    while isinstance(fn, partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004


def _caught(body: Callable[[], object]) -> tuple[Any, Exception | None]:
    """Return what *body* returns or raises: a ``StopIteration`` cannot travel through a future."""
    try:
        return body(), None
    except Exception as error:  # noqa: BLE001
        return None, error


def _drop_frames(error: BaseException | None) -> None:
    """Strip frames and causes from an error that is passed on: frames keep whole transcripts alive."""
    found, seen = [error], set[int]()
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        found += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions


def _function_failed(name: str, error: BaseException) -> PerformError:
    kind = type(error).__name__
    return _because(PerformError(f"Perform({name}) raised {kind}: {error}", kind=kind), error)


def _because(error: PerformError, cause: BaseException) -> PerformError:
    error.__cause__ = cause
    return error


# --- what model calls need ---------------------------------------------------------------------------------------------


class _StreamedChars:
    """How many characters of one reply were streamed."""

    # By hand: what attrs writes for a class takes each start 0.3 ms.
    __slots__ = ("said", "thought")

    def __init__(self) -> None:
        self.said = self.thought = 0

    def take(self, delta: ModelDelta) -> None:
        """Count what a piece of the stream holds."""
        if isinstance(delta, ToolCallChunk):
            self.said += len(delta.text)
        elif isinstance(delta, ThinkingChunk):
            self.thought += len(delta.text)

    def tell(self, stopped: BaseException) -> None:
        """
        Add to *stopped*, which ended the stream, what the stream had used: what the provider said, and no less than was streamed.

        Four characters are a token. The size of the prompt is left to the provider, who alone knows how much was cached.
        """
        # Providers bill what they had produced when the connection was cut, and tell of it at the end, which never
        # came. So it is counted from what was heard: a lower bound, and marked as one.
        told = usage_when_stopped(stopped)
        if told is None and not self.said and not self.thought:
            return
        told = told or Usage()
        missing = max(0, (self.said + self.thought) // CHARS_PER_TOKEN - told.completion_tokens)
        thought = min(missing, self.thought // CHARS_PER_TOKEN)
        more = Usage(output_tokens=missing - thought, reasoning_tokens=thought, at_least=True)
        note_usage(stopped, told + more)


def _shown_whole(reply: ModelReply, item: Item, io: IO) -> ModelReply:
    """Show a reply that came in one piece, as its pieces would be, and return it."""
    calls = 0
    if isinstance(reply, ModelReply):  # else nobody knows what to show, and `_priced` says what is wrong
        for part in reply.content:
            if isinstance(part, ToolCallPart):
                # Of a call only its arguments are shown, which are one piece.
                effect: CallModel = item.effect  # type: ignore[assignment]
                coming = effect.call_id
                call_id = "" if coming is None else coming(calls)
                io.emit(
                    ToolInputDelta(
                        path=item.path,
                        seq=effect.seq,
                        tool_name=part.tool_name,
                        tool_call_id=call_id,
                        text=raw_of(part),
                    )
                )
                calls += 1
            else:
                for delta in deltas_of_part(part, calls):
                    _show_delta(delta, {}, item, io)
    return reply


def _show_input(item: Item, io: IO, name: str, call_id: str, text: str) -> None:
    io.emit(ToolInputDelta(path=item.path, seq=item.effect.seq, tool_name=name, tool_call_id=call_id, text=text))


def _coming_id(item: Item, number: int) -> str:
    """Return the id that a call of the reply will have when that is whole, so that who watches can put pieces, start and end together."""
    # It is ours, so it can be told before the provider's comes.
    call_id = item.effect.call_id  # type: ignore[union-attr]
    return "" if call_id is None else call_id(number)


async def _streamed(provider: ModelProvider, request: ModelRequest, item: Item, io: IO) -> ModelReply:
    shown, heard = False, _StreamedChars()
    calls: dict[int, tuple[str, str]] = {}
    path, seq, emit = item.path, item.effect.seq, io.emit
    try:
        # Closed at once on every way out: a stream that is left to the collector keeps its connection, and the provider
        # goes on producing what is paid for.
        async with aclosing(cast("Any", provider.stream(request))) as deltas:
            async for delta in deltas:
                if isinstance(delta, TextChunk):  # most are, so nothing more is called for it
                    text = delta.text
                    heard.said += len(text)
                    emit(TextDelta(path=path, seq=seq, text=text))
                    shown = True
                    continue
                if isinstance(delta, ReplyDone):
                    return delta.reply
                heard.take(delta)
                shown = _show_delta(delta, calls, item, io) or shown
    except BaseException as raised:
        if shown:
            io.emit(ReplyDiscarded(path=item.path, seq=item.effect.seq, model=request.model))
        if not isinstance(raised, Exception):
            heard.tell(raised)
        raise
    if shown:
        io.emit(ReplyDiscarded(path=item.path, seq=item.effect.seq, model=request.model))
    msg = f"the stream of {request.model!r} ended before its terminal marker; nothing of it counts"
    raise TruncatedReply(msg, retryable=True, kind="truncated")


def _show_delta(delta: ModelDelta, calls: dict[int, tuple[str, str]], item: Item, io: IO) -> bool:
    path, seq = item.path, item.effect.seq
    match delta:
        case TextChunk(text=text):
            io.emit(TextDelta(path=path, seq=seq, text=text))
        case ThinkingChunk(text=text):
            io.emit(ThinkingDelta(path=path, seq=seq, text=text))
        case ToolCallStarted(index=index, tool_name=name):
            calls[index] = name, _coming_id(item, len(calls))
            return False
        case ToolCallChunk(index=index, text=text):
            _show_input(item, io, *calls.get(index, ("", "")), text)
        case ToolCallEnded() | ReplyDone():
            return False
        case _ as never:
            assert_never(never)
    return True


def _retry(item: Item, request: ModelRequest, attempt: int, wait: float, error: ModelError) -> ModelRetry:
    return ModelRetry(
        path=item.path, seq=item.effect.seq, model=request.model, attempt=attempt, wait=wait, error=error.message
    )


def _notice(item: Item, io: IO, request: ModelRequest) -> Notice:
    def notice(provider: str, obstacle: Obstacle) -> None:
        if io.watched:
            at: dict[str, Any] = {"path": item.path, "seq": item.effect.seq, "model": request.model}
            io.emit(RateLimited(**at, provider=provider, limit=obstacle.limit, wait=obstacle.seconds))

    return notice


def _is_stop(raised: BaseException) -> bool:
    """Return whether a call ended for a reason other than its provider: a cancellation of ours, or an exception for the caller."""
    # Some HTTP libraries let a cancellation of their own out when a pool is closed. It counts as ours only if this task
    # was asked to end.
    if isinstance(raised, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return not isinstance(raised, Exception)


def _with_use(late: Stop, value: object) -> Stop:
    """Return *late*, an outcome that came too late, with what it had used if it is a reply."""
    if not isinstance(value, ModelReply) or (value.usage is None and value.cost is None):
        return late
    return attrs.evolve(late, begun=Begun(value.usage or Usage(at_least=True), value.cost))


def _as_ours(model: str, raised: BaseException) -> StepEngineError:
    """
    Return what a provider raised as an error of ours: a ``ModelError``, unless it is one of another kind already.
    """
    if isinstance(raised, StepEngineError):
        return raised
    msg = f"the provider of {model!r} raised {type(raised).__name__}: {raised}"
    error = ModelError(msg, kind="provider")
    error.__cause__ = raised
    return error


# --- what tool calls need ----------------------------------------------------------------------------------------------


def _request(item: Item, effect: CallTool, spec: ToolSpec) -> Request:
    """Return a call as rules see it."""
    from stepengine.permissions import Request  # an engine without rules does not load them

    info = item.plan.info
    return Request(
        tool=spec,
        input=effect.input,
        agent_id=item.plan.definition.id,
        session_id=info.session_id,
        user_id=info.user_id,
        source=effect.source,
    )


async def _await_guarded(
    running: Coroutine[object, Any, ToolResult], guard: CallGuard | None, workspace: Workspace | None
) -> ToolResult:
    """Await a call whose files are bound by *guard*; its threads see it, too. It does not begin where *guard* refuses it."""
    folder = None if workspace is None else workspace.here or workspace.root
    is_here = workspace is None or workspace.here is not None
    if guard is not None and (why := guard.refusal(folder, is_here=is_here)):
        running.close()
        return ToolResult.error(why)
    token = GUARD.set(guard)
    try:
        return await running
    finally:
        GUARD.reset(token)


class _Unmade:
    """A tool context that is made when somebody looks at it: most bodies never do, and making one costs microseconds."""

    __slots__ = ("_effect", "_item", "_made", "_tree")

    def __init__(self, item: Item, effect: CallTool, tree: TreeWithBackground) -> None:
        self._item = item
        self._effect = effect
        self._tree = tree
        self._made: ToolContext | None = None

    def __getattr__(self, name: str) -> object:
        if self._made is None:
            self._made = _context(self._item, self._effect, self._tree)
        return getattr(self._made, name)


def _context(item: Item, effect: CallTool, tree: TreeWithBackground) -> ToolContext:
    plan, setting = item.plan, tree.services.tools
    state, agent, info = effect.state(), plan.definition, plan.info
    voice, keep = _Voice(item, effect, tree), tree.services.keep_write
    return ToolContext(
        agent_state=state,
        tool_call_id=effect.tool_call_id,
        tool_name=effect.tool_name,
        run_id=state.run_id,
        address=f"{item.path}#{effect.seq}",
        input=effect.input,
        agent_id=agent.id,
        agent_name=agent.display_name,
        agent_description=agent.description,
        session_id=info.session_id,
        user_id=info.user_id,
        parent_session_id=info.session_id if item.path else None,
        parent_tool_call_id=tree.runs.spawned_by.get(item.path),
        ancestor_run_ids=cast("Any", state.ancestor_run_ids),
        step_index=effect.step_index,
        metadata=info.metadata,
        workspace=setting.workspace,
        resources=setting.resources,
        logger=voice,
        cancelled=tree.runs.signal,
        remaining_tokens=_remaining(item, effect, state, tree),
        emit=voice.emit,
        threads=setting.threads,
        leaked=tree.leftovers.leaked,
        belongings=partial(tree.runs.belongings.get, item.path),
        sleep=tree.services.clock.sleep,
        keep_write=None if keep is None else partial(keep, item.path, effect.seq),
    )


def _remaining(item: Item, effect: CallTool, state: AgentState, tree: TreeWithBackground) -> int | None:
    """Return how many tokens of context are left; only a run that called its model has the model's data looked up."""
    plan = item.plan
    window = plan.context_window
    if window is None and plan.model and effect.measured is not None:
        window = tree.services.window(plan.model)
    return None if window is None else max(0, window - prompt_tokens(state, effect.measured))


class _Voice(LineLogger):
    """What a tool says while it runs: its events and log lines, with the address of its call."""

    __slots__ = ("_effect", "_item", "_tree")

    def __init__(self, item: Item, effect: CallTool, tree: TreeWithBackground) -> None:
        self._item = item
        self._effect = effect
        self._tree = tree

    def emit(self, event: Event) -> None:
        """Show an event, with the address of the call."""
        event = attrs.evolve(event, path=self._item.path, seq=self._effect.seq)
        if isinstance(event, ToolLog):
            self._tree.hub.log(event, step=self._effect.step_index)
        self._tree.loop.call(self._tree.emit, event)

    def line(self, level: str, message: str, data: dict[str, object]) -> None:
        """Show a line, and log it."""
        event = ToolLog(
            path=self._item.path,
            seq=self._effect.seq,
            message=str(message),
            level=level,
            tool_name=self._effect.tool_name,
            tool_call_id=self._effect.tool_call_id,
        )
        self._tree.hub.log(event, data or None, step=self._effect.step_index)
        self._tree.loop.call(self._tree.emit, event)


def is_deferred(item: Item) -> bool:
    """Return whether an effect is a call of a tool whose result comes from outside."""
    effect = item.effect
    return type(effect) is CallTool and defers(item.plan.tools.get(effect.tool_name))


def defers(binding: ToolBinding | None) -> bool:
    """Return whether the results of a tool come from outside."""
    runs = None if binding is None else binding.runs
    return isinstance(runs, Ordinary) and getattr(runs.tool, "deferred", False)
