"""
``CorePerformer``: performs model calls, tool calls, functions, questions and children, with one method for each.

``WaitingEffects`` performs the rest. The performers that record, limit and trace wrap these. Outcomes contain the run's time and the
user messages that have arrived meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, assert_never, cast

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
from stepengine.data.functions import unwrap_function
from stepengine.data.json import JsonDict, freeze
from stepengine.data.messages import ToolCallPart, ToolResult
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
from stepengine.data.outcomes import Failure, PartialUsage, Single, Stop, Value, find_failure_usage
from stepengine.data.record_sizes import (
    cut_error_texts,
    find_length_problem,
    fit_child_result,
    fit_tool_result,
    may_exceed_value_limit,
    select_fitting_messages,
)
from stepengine.data.state import AgentState, ChildResult, RunStatus, estimate_next_prompt_tokens
from stepengine.data.tools import TOOL_SECONDS, Asking, Ordinary, ToolAnnotations, ToolBinding, ToolSpec, Yielding
from stepengine.data.usage import Usage, add_cost, add_lost_usage
from stepengine.data.waits import ChildRef
from stepengine.errors import (
    ContextOverflow,
    DataError,
    InputError,
    LimitExceeded,
    ModelError,
    PerformError,
    StepEngineError,
    TruncatedReply,
)
from stepengine.machine.plan import Finished, RunPlan
from stepengine.models._stopped_usage import (
    attach_usage_to_exception,
    find_attached_usage,
    find_failed_attempt_usage,
    may_have_been_sent,
)
from stepengine.models.base import Provider, get_raw_arguments, split_part_into_deltas
from stepengine.runtime.background import TreeWithBackground
from stepengine.runtime.logs import LineLogger
from stepengine.runtime.performer import IO, Item, child_path
from stepengine.runtime.rates import Notice, ParsingRegistry, WaitReason, make_rate_limited_provider
from stepengine.runtime.retry import Retries
from stepengine.runtime.services import ModelProvider
from stepengine.runtime.sizes import estimate_request_tokens
from stepengine.tools.context import ToolContext
from stepengine.tools.execution import BodyFailure, make_failure_result
from stepengine.workspace.guard import GUARD, PROJECT_RULES, CallGuard
from stepengine.workspace.workspace import WORKSPACE, Workspace

if TYPE_CHECKING:
    from stepengine.data.questions import Interactor
    from stepengine.permissions import Request
    from stepengine.runtime.prices import Prices


Waited = TypeVar("Waited")


class OutcomeMaker:
    """
    Makes the outcomes of performed effects, with the run's time and the user messages that have arrived.

    Args:
        tree: The tree.

    Attributes:
        elapsed: Returns the run's time in milliseconds.
    """

    def __init__(self, tree: TreeWithBackground) -> None:
        self._tree = tree
        self.elapsed = tree.clock.elapsed_ms
        self._inbox, self._inboxes = tree.inboxes.root, tree.inboxes.by_path

    def make_value_or_stop(self, item: Item, value: object) -> Single:
        """Return the outcome with *value* and the arrived messages, removed from the inbox; a stop after a time limit."""
        late = self._tree.clock.find_time_limit_stop(item.path) if self._tree.clock.deadlines else None
        if late is not None:
            # What did not end in time is cut off, also where nothing could cut it off in time; it is paid for nevertheless.
            return _add_usage_to_stop(late, value)
        # What was sent to the run travels in the outcome of the effect during which it came: so it is recorded with it,
        # and a replay hears it at the same place (replay:J16).
        # A reply was measured before it was priced.
        if not isinstance(value, ModelReply) and may_exceed_value_limit(value):
            value = _fit_value_to_record(item, value)
            if isinstance(value, StepEngineError):
                return self.make_failure_or_stop(item, value)
        inputs = self._pop_inbox(item.path) if self._inbox or self._inboxes else ()
        return Value(value, self.elapsed(), inputs)

    def make_failure_or_stop(self, item: Item, error: StepEngineError) -> Single:
        """Return the failure with *error* and the arrived messages, removed from the inbox; a stop after a time limit."""
        late = self._tree.clock.find_time_limit_stop(item.path)
        if late is not None:
            return _add_failure_usage_to_stop(late, error)
        # A traceback holds every frame with all its variables: the SDK's request, whole conversations. The error lives
        # as long as the run's record, so they would, too.
        drop_tracebacks(error)
        cut_error_texts(error)
        inputs = self._pop_inbox(item.path) if self._inbox or self._inboxes else ()
        return Failure(error, self.elapsed(), inputs)

    def make_child_outcome(self, item: Item, child: ChildResult) -> Single:
        """Return the outcome with the result of a child that has ended; a stop after a time limit, which also holds the result."""
        drop_tracebacks(child.error)
        ended = self.make_value_or_stop(item, fit_child_result(child))
        return attrs.evolve(ended, child=child) if isinstance(ended, Stop) else ended

    def _pop_inbox(self, path: str) -> tuple[Any, ...]:
        """Remove and return the oldest messages for the run at *path*, as many as fit into a record."""
        waiting = self._inboxes.get(path, []) if path else self._inbox
        inputs = select_fitting_messages(tuple(waiting))
        del waiting[: len(inputs)]  # another thread may have put more there since
        if path and not waiting:
            self._inboxes.pop(path, None)
        return inputs

    def make_stop_if_stopped(self, finished: Finished, **end: Any) -> Stop | None:
        """Return the stop of an effect whose run was suspended or stopped, with its *end*; ``None`` if the run ended by itself."""
        if finished.status is RunStatus.SUSPENDED:
            return Stop("suspended", self.elapsed(), questions=finished.pending, **end)
        stop = self._tree.root.stopping
        is_cut = self._tree.root.is_in_grace and finished.status is RunStatus.CANCELLED
        if stop is not None and (is_cut or self._tree.leftovers.reraise is not None):
            # It was stopped, or what happened in it is in doubt, so it has not ended for whoever records.
            return Stop(stop.kind, self.elapsed(), stop.error, **end)
        return None


class CorePerformer:
    """
    The core performer of one run tree, which all others wrap: it performs the effects.

    Args:
        tree: The tree.
        retries: How failed model calls of the tree are tried again.
        prices: Computes the cost of model calls.
        outcomes: Makes the outcomes.
        wait: Performs an effect that waits, or that concerns children in the background.
    """

    def __init__(
        self,
        tree: TreeWithBackground,
        retries: Retries,
        prices: Prices,
        outcomes: OutcomeMaker,
        wait: Callable[[Item, IO], Awaitable[Single]],
    ) -> None:
        self._tree = tree
        self._services = tree.services
        self._retries = retries
        self._outcomes = outcomes
        self._perform_wait = wait
        self._providers: dict[str, ModelProvider] = {}
        self._prices = prices

    async def begin(self, batch: Sequence[Item]) -> None:
        """Do nothing: effects need no preparation."""

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform one effect, and return its outcome."""
        return self._PERFORM[type(item.effect)](self, item, io)

    # --- model calls --------------------------------------------------------------------------------------------------

    async def _call_model(self, item: Item, io: IO) -> Single:
        """Call a model, with retries; the usage of failed attempts is added to the reply or error."""
        request: ModelRequest = item.effect.request  # type: ignore[union-attr]
        spent: Usage | None = None
        try:
            provider = self._get_provider(item, io, request)
        except StepEngineError as error:
            return self._outcomes.make_failure_or_stop(item, error)
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
                reply = await (_stream_reply(provider, request, item, io) if streams else provider.complete(request))
                shown = _emit_whole_reply(reply, item, io) if watched and not streams else reply
                reply = self._validate_and_price_reply(request.model, shown, spent)
            # All of it, since also a cancelled call has to say what it had used (reliability:R3); `_convert_or_raise` raises on
            # whatever is no failure of the provider.
            except BaseException as raised:  # noqa: BLE001
                failed = self._convert_or_raise(item, request.model, raised, spent)
                if not isinstance(failed, ModelError):
                    return self._outcomes.make_failure_or_stop(item, failed)
                used = find_failed_attempt_usage(failed)
                spent = spent + used if spent and used else spent or used
                wait = self._retries.count_retry_and_find_delay(failed, attempt, item.address)
                if wait is None:
                    failed.usage = spent
                    return self._outcomes.make_failure_or_stop(item, failed)
            else:
                return self._outcomes.make_value_or_stop(item, reply)
            room = io.report_failed_attempt(Failure(cut_error_texts(failed)), used)
            refusal = None if room is None else await self._await_or_store_usage(item, room(), spent)
            if refusal is not None:
                return self._outcomes.make_failure_or_stop(item, _add_limit_reason_to_error(failed, refusal, spent))
            await self._wait_before_retry(item, io, _make_retry_event(item, request, attempt, wait, failed), spent)
            attempt += 1

    async def _wait_before_retry(self, item: Item, io: IO, event: ModelRetry, spent: Usage | None) -> None:
        """Emit *event* and sleep its delay; if the sleep is cancelled, *spent* is stored as the usage of the call."""
        if io.watched:
            io.emit(event)
        await self._await_or_store_usage(item, self._services.time.clock.sleep(event.wait), spent)

    async def _await_or_store_usage(self, item: Item, wait: Awaitable[Waited], spent: Usage | None) -> Waited:
        """Await *wait* before the next attempt; if it is cancelled, store *spent* as the usage of the call and raise."""
        try:
            return await wait
        except BaseException:
            # Stopped between two requests; what failed ones used may be more than they said.
            used = attrs.evolve(spent, at_least=True) if spent else Usage()
            self._store_stopped_usage(item, item.effect.request.model, used)  # type: ignore[union-attr]
            raise

    def _convert_or_raise(self, item: Item, model: str, raised: BaseException, spent: Usage | None) -> StepEngineError:
        """
        Return a provider's error as a ``StepEngineError``; re-raise an interruption after storing the call's usage, with *spent*.

        Raises:
            BaseException: *raised* itself, when the call was stopped; what it had used is kept for its outcome.
        """
        if not self._is_interruption(raised):
            return _to_step_error(model, raised)
        # One that was sent may be billed, whether anything of its reply has come or not.
        used = attrs.evolve(find_attached_usage(raised) or Usage(), requests=1, at_least=True)
        self._store_stopped_usage(item, model, (spent or Usage()) + (used if may_have_been_sent(raised) else Usage()))
        raise raised

    def _is_interruption(self, raised: BaseException) -> bool:
        """Return whether an exception is a cancellation, or meant for the caller, and no error of a provider."""
        # Some HTTP libraries let a cancellation of their own out when a pool is closed. It counts as ours only if this task
        # was asked to end.
        if isinstance(raised, asyncio.CancelledError):
            return self._tree.root.is_task_cancelled()
        return not isinstance(raised, Exception)

    def _store_stopped_usage(self, item: Item, model: str, usage: Usage) -> None:
        """Store the usage of a stopped call until its outcome reports it."""
        # Nothing used costs nothing, also where the model has no price: `None` would make the sum unknown for ever
        # (reliability:I4).
        cost = self._prices.compute_usage_cost(model, usage) if usage.total_tokens else Decimal(0)
        self._tree.leftovers.stopped_calls[item.address] = PartialUsage(usage, cost)

    def _require_request_fits_window(self, request: ModelRequest) -> None:
        """Raise if a request is longer than its model's window."""
        # A model string with `|` is a chain of models to fall back on, which have windows of their own.
        window = None if "|" in request.model else self._services.models.window(request.model)
        if window is None or (size := estimate_request_tokens(request)) <= window:
            return
        msg = (
            f"{request.model!r} accepts {window} tokens, and the request has about {size}; shorten it with a context policy such as "
            "truncate(), or leave out oversize= of ModelSettings to let the provider decide"
        )
        raise ContextOverflow(msg, kind="context_overflow")

    def _get_provider(self, item: Item, io: IO, request: ModelRequest) -> ModelProvider:
        """Return the provider of a model, which waits for its turn under rate limits; raise if *request* is refused as too long."""
        if request.settings.oversize == "refuse":
            self._require_request_fits_window(request)
        model, models, rates = request.model, self._services.models.registry, self._services.models.rates
        if rates is not None:
            return make_rate_limited_provider(
                cast("ParsingRegistry", models), rates, model, _make_rate_limit_callback(item, io, request)
            )
        # One look-up for each model of a tree and not for each call: it parses the string and looks for a key.
        provider = self._providers.get(model)
        if provider is None:
            provider = self._providers[model] = models.provider_for(model)
        return provider

    def _validate_and_price_reply(self, model: str, reply: object, spent: Usage | None) -> ModelReply:
        """
        Return *reply* with its cost and the usage *spent* by failed attempts; raise ``ModelError`` for an invalid one.

        Raises:
            ModelError: when it is not a reply, or too long for a record.
        """
        # Providers may be anybody's. What they give goes into records and sums, so it is looked at once, here.
        if not isinstance(reply, ModelReply):
            msg = f"the provider of {model!r} returned a {type(reply).__name__} instead of a ModelReply"
            raise ModelError(msg, kind="provider")
        if why := find_length_problem(reply):
            msg = f"the reply of {model!r} is too long: {why}"
            raise ModelError(msg, kind="too_large", usage=reply.usage)
        usage, cost = reply.usage, reply.cost
        if usage is not None and usage.requests > 1 and "|" not in model:
            # Only a row of models to fall back on has lost requests before its reply.
            usage = attrs.evolve(usage, requests=1)
        # A bill that the provider states wins over our prices; these are only for replies that state none.
        if cost is None and usage is not None:
            cost = self._prices.compute_reply_cost(model, reply)
            if reply.provider_data and (missing := self._prices.list_unpriced_parts(model, reply)):
                usage = attrs.evolve(usage, at_least=True)
                reply = attrs.evolve(reply, provider_data={**reply.provider_data, "unpriced": missing})
        if spent is not None:
            cost = add_cost(cost, self._prices.compute_usage_cost(model, spent) if spent.total_tokens else Decimal(0))
            usage = add_lost_usage(spent, usage)
        if usage is reply.usage and cost is reply.cost:
            return reply
        return attrs.evolve(reply, usage=usage, cost=cost)

    # --- tool calls ---------------------------------------------------------------------------------------------------

    async def _call_tool(self, item: Item, io: IO) -> Single:
        """Run one tool, and wait for the result of a deferred one; a failing body is an error result."""
        effect: CallTool = item.effect  # type: ignore[assignment]
        binding = item.plan.tools.get(effect.tool_name)
        tool = binding.runs.tool if binding is not None and isinstance(binding.runs, Ordinary) else None
        try:
            if binding is None or tool is None:
                msg = f"the tool {effect.tool_name!r} of agent {item.plan.agent.definition.id!r} cannot be carried out here"
                raise StepEngineError(msg)  # noqa: TRY301
            # The body has returned in a process before this one, and only its result is missing (`deferred=True`): to
            # run it again would begin the work a second time.
            running = None if item.has_begun else self._make_body_call(item, effect, binding, tool)
            if running is None or getattr(tool, "deferred", False):
                result = await self._await_body_and_deferred_result(item, running, io)
            else:
                result = await running
            # Also that of a result from outside: whoever sends it does not decide whether it is trusted.
            trust = tool.trust(effect.input)
            result = result if result.trust == trust else attrs.evolve(result, trust=trust)
        except StepEngineError as error:
            return self._outcomes.make_failure_or_stop(item, error)
        # Of a task that was cancelled before it entered the run, only the run knows which cancellation is the body's own.
        except asyncio.CancelledError as error:
            if self._tree.root.is_task_cancelled():
                raise
            result = make_failure_result(effect.tool_name, BodyFailure(error))
        return self._outcomes.make_value_or_stop(item, result)

    def _make_body_call(
        self, item: Item, effect: CallTool, binding: ToolBinding, tool: Any
    ) -> Coroutine[object, Any, ToolResult]:
        """Return the coroutine that runs the body of a tool under the rules about files."""
        # The machine has validated the input and hands the converted arguments along. Only an effect that was made
        # from a record has none, and is validated here.
        arguments = effect.arguments
        if arguments is None:
            arguments = binding.validate(effect.input).arguments
        ctx: ToolContext = _LazyToolContext(item, effect, self._tree)  # type: ignore[assignment]
        running: Coroutine[object, Any, ToolResult] = tool.execute(
            arguments, ctx, overrides=self._services.tools.overrides, seconds=binding.spec.timeout
        )
        # Rules about files judge what is opened, and not the path that was written in the call: between the two
        # there may be links. So they travel with the call to where files are opened (reliability:FP4).
        if self._services.tools.guard is None:
            return running
        guard = self._services.tools.guard(
            _make_permission_request(item, binding.spec, effect.input, source=effect.source)
        )
        return _run_guarded_or_refuse(running, guard, self._services.tools.workspace)

    async def _await_body_and_deferred_result(
        self, item: Item, running: Awaitable[ToolResult] | None, io: IO
    ) -> ToolResult:
        """
        Wait for the result of a deferred call, after its body has run; return the body's error if it failed.

        *running* is ``None`` if the body ran in an earlier process, so that only the result is missing.
        """
        deferred = self._tree.deferred
        # Before the body runs, since the result may be there before the body has returned: a worker that is quicker
        # than its caller.
        delivered = deferred.expect_result(item)
        try:
            if running is not None:
                result = await running
                if result.is_error:
                    return result
                # That it only waits is recorded: whoever resumes then waits on, in place of calling the effect in doubt
                # (replay:J31).
                if not delivered.done():
                    await io.record_waiting_call(item)
            deferred.mark_waiting(item)
            if delivered.done():
                return delivered.result()
            with self._tree.mail.poll_in_block():
                return await delivered
        finally:
            deferred.forget_call(item)

    # --- functions, questions, children -------------------------------------------------------------------------------

    async def _call_function(self, item: Item, io: IO) -> Single:
        """Call the function of a ``Perform``; an exception, or a result that is not JSON, is a failure."""
        call = cast("CallFunction", item.effect).call
        token = WORKSPACE.set(self._services.tools.workspace)
        rules = PROJECT_RULES.set(partial(self._make_project_guard, item))
        try:
            # The JSON form is what the handler gets, live as on replay: with the object itself live, a handler could
            # use what a replay does not have (reliability:GN17).
            value = freeze(
                await self._call_in_place_or_thread(call.name, partial(call.fn, *call.args, **call.kwargs), call.fn)
            )
        except DataError as error:
            msg = f"Perform({call.name}) returned what is not JSON: {error.message}"
            return self._outcomes.make_failure_or_stop(item, _set_cause(PerformError(msg, kind="DataError"), error))
        # A function may raise one of its own accord, such as from a task that it cancelled. Only when our task was
        # asked to end is it ours (reliability:TL01).
        except asyncio.CancelledError as error:
            if self._tree.root.is_task_cancelled():
                raise
            return self._outcomes.make_failure_or_stop(item, _make_function_error(call.name, error))
        except (Exception, GeneratorExit) as error:  # noqa: BLE001
            return self._outcomes.make_failure_or_stop(item, _make_function_error(call.name, error))
        finally:
            PROJECT_RULES.reset(rules)
            WORKSPACE.reset(token)
        return self._outcomes.make_value_or_stop(item, value)

    def _make_project_guard(self, item: Item) -> CallGuard | None:
        """Return the guard of the rules about files for reading the project, or ``None`` if the engine has no such rules."""
        guard = self._services.tools.guard
        if guard is None:
            return None
        spec = ToolSpec("project_context", category="read", annotations=ToolAnnotations(read_only=True))
        return guard(_make_permission_request(item, spec, JsonDict(), source="handler", is_call=False))

    async def _call_in_place_or_thread(self, name: str, body: Callable[[], Any], fn: object) -> object:
        """Call an author's function, in a thread if it is synchronous, and return its result."""
        # Synchronous functions go to a thread: one that blocks would hold up every run of the loop.
        if inspect.iscoroutinefunction(unwrap_function(fn)):
            return await body()
        threads, leaked = self._services.tools.threads, self._tree.leftovers.leaked
        value, error = await threads.run(name, partial(_call_catching_errors, body), leaked=leaked)
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value

    async def _ask_questions_or_suspend(self, item: Item, io: IO) -> Single:
        """Ask the questions of an effect; the outcome is a suspension if any of them stays open."""
        questions = self._tree.questions.get_or_render_questions(item)
        try:
            # Only while somebody waits for something is the mailbox looked into, which is a look at a disk.
            with self._tree.mail.poll_in_block():
                if item.effect.purpose == "limit":  # type: ignore[union-attr]
                    answers = [
                        await self._tree.questions.limits.ask_or_share_answer(questions[0], self._tree.questions.ask)
                    ]
                else:
                    answers = await self._tree.questions.ask(questions, _find_ask_user_interactor(item))
        except LimitExceeded as error:
            return self._outcomes.make_failure_or_stop(item, error)
        finally:
            self._tree.questions.forget_rendered_questions(item)
        waiting = tuple([q for q, answer in zip(questions, answers, strict=True) if answer is None])
        # Some are open: the run is suspended with those, and what was answered is kept (`_record_partial_answers` of the
        # recorder).
        if waiting:
            return Stop("suspended", self._outcomes.elapsed(), questions=waiting)
        return self._outcomes.make_value_or_stop(item, tuple(answers))

    async def _start_or_run_child(self, item: Item, io: IO) -> Single:
        """Start a child in the background, or run it to its end; one that cannot be planned has failed."""
        effect = cast("Spawn", item.effect)
        path = child_path(item.path, effect.seq)
        try:
            plan, state = self._services.planner(item.plan, effect, path)
        # A child that cannot be planned (unknown agent, wrong params) is a failed child in its own entry, and its
        # siblings run (reliability:SP05).
        except StepEngineError as error:
            error.__traceback__ = None
            if effect.is_background:
                return self._outcomes.make_failure_or_stop(item, error)
            refused: ChildResult = ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error)
            return self._outcomes.make_value_or_stop(item, refused)
        self._tree.runs.spawned_by[path] = effect.tool_call_id
        if effect.is_background:
            started = self._outcomes.make_value_or_stop(item, ChildRef(state.run_id, plan.agent.definition.id, path))
            # Where the time of the run is over, the start has no outcome and must not happen.
            if isinstance(started, Value):
                self._tree.background.start_child(item, plan, state, self._tree.performers.recording)
            return started
        finished = await io.run_child(plan, state, path)
        child = finished.to_child_result(is_inline=effect.is_inline)
        # Asked here, though `make_stop_if_stopped` knows it: nearly every child is neither, and is spared the call.
        if finished.status is RunStatus.SUSPENDED or self._tree.root.stopping is not None:
            stop = self._outcomes.make_stop_if_stopped(finished, child=child)
            if stop is not None:
                return stop
        return self._outcomes.make_child_outcome(item, child)

    async def _run_yielding_tool_body(self, item: Item, io: IO) -> Single:
        """Run the body of a tool that yields; one that fails is an error result."""
        effect = cast("CallBody", item.effect)
        path = child_path(item.path, effect.seq)
        try:
            plan, state = self._services.planner(item.plan, effect, path)
        except StepEngineError as error:
            return self._outcomes.make_failure_or_stop(item, error)
        self._tree.runs.spawned_by[path] = effect.tool_call_id
        finished = await io.run_child(plan, state, path)
        body = finished.to_body_end()
        stop = self._outcomes.make_stop_if_stopped(finished, body=body)
        if stop is not None:
            return stop
        drop_tracebacks(finished.error)
        binding = item.plan.tools[effect.tool_name]
        result = finished.to_call_result(cast("Yielding", binding.runs), is_typed=effect.source != "model")
        result = result if result.trust == binding.spec.results else attrs.evolve(result, trust=binding.spec.results)
        ended = self._outcomes.make_value_or_stop(item, result)
        if isinstance(ended, Value):
            return Value(ended.value, ended.at, ended.inputs, body)
        return attrs.evolve(ended, body=body) if isinstance(ended, Stop) else ended

    def _delegate_wait(self, item: Item, io: IO) -> Awaitable[Single]:
        """Pass an effect on to the performer of waits and background children."""
        return self._perform_wait(item, io)

    _PERFORM: ClassVar[Mapping[type[Leaf], Callable[[CorePerformer, Item, IO], Awaitable[Single]]]] = {
        CallModel: _call_model,
        CallTool: _call_tool,
        CallBody: _run_yielding_tool_body,
        CallFunction: _call_function,
        Spawn: _start_or_run_child,
        AskPerson: _ask_questions_or_suspend,
        AwaitTime: _delegate_wait,
        AwaitMessage: _delegate_wait,
        AwaitRuns: _delegate_wait,
        SendToRun: _delegate_wait,
        EndRuns: _delegate_wait,
        RunInBackground: _delegate_wait,
    }
    """How each effect is performed."""


def _find_ask_user_interactor(item: Item) -> Interactor | None:
    effect = cast("AskPerson", item.effect)
    of_tool = effect.tool_call_id and effect.purpose == "question"
    binding = item.plan.tools.get("ask_user") if of_tool else None
    return binding.runs.interactor if binding is not None and isinstance(binding.runs, Asking) else None


def _call_catching_errors(body: Callable[[], object]) -> tuple[Any, Exception | None]:
    """Return the result or exception of *body*; a ``StopIteration`` cannot pass through a future."""
    try:
        return body(), None
    except Exception as error:  # noqa: BLE001
        return None, error


def _fit_value_to_record(item: Item, value: object) -> object:
    """Return the value of an effect as a record can hold it, or the error in its place."""
    if isinstance(value, ToolResult):
        return fit_tool_result(value, item.effect.tool_name)  # type: ignore[union-attr]
    if isinstance(value, ChildResult):
        return fit_child_result(value)
    why = find_length_problem(value)
    if not why:
        return value
    if isinstance(item.effect, CallFunction):
        name = item.effect.call.name
        msg = f"Perform({name}) returned a value that is too long: {why}; write it to a file and return its path"
        return PerformError(msg, kind="too_long")
    return InputError(
        f"the value received for the {type(item.effect).__name__} of {item.path!r} is too long: {why}", issues=(why,)
    )


def drop_tracebacks(error: BaseException | None) -> None:
    """Remove the tracebacks of an error, its causes and its members, since frames keep whole transcripts alive."""
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


def _make_function_error(name: str, error: BaseException) -> PerformError:
    """Return the error of a ``Perform`` for the exception that its function raised, which becomes the cause."""
    kind = type(error).__name__
    return _set_cause(PerformError(f"Perform({name}) raised {kind}: {error}", kind=kind), error)


def _set_cause(error: PerformError, cause: BaseException) -> PerformError:
    error.__cause__ = cause
    return error


# --- what model calls need ---------------------------------------------------------------------------------------------


@attrs.define
class _StreamedChars:
    """How many characters of one reply were streamed."""

    said: int = 0
    thought: int = 0

    def count(self, delta: ModelDelta) -> None:
        """Add the characters of a streamed piece to those of text or of thoughts."""
        if isinstance(delta, TextChunk | ToolCallChunk):
            self.said += len(delta.text)
        elif isinstance(delta, ThinkingChunk):
            self.thought += len(delta.text)

    def attach_lower_bound_usage(self, stopped: BaseException) -> None:
        """
        Add the stream's usage to the exception that ended it: the provider's, at least the streamed size.

        Four characters are a token. The size of the prompt is left to the provider, who alone knows how much was cached.
        """
        # Providers bill what they had produced when the connection was cut, and tell of it at the end, which never
        # came. So it is counted from what was heard: a lower bound, and marked as one.
        told = find_attached_usage(stopped)
        if told is None and not self.said and not self.thought:
            return
        told = told or Usage()
        missing = max(0, (self.said + self.thought) // CHARS_PER_TOKEN - told.completion_tokens)
        thought = min(missing, self.thought // CHARS_PER_TOKEN)
        more = Usage(output_tokens=missing - thought, reasoning_tokens=thought, at_least=True)
        attach_usage_to_exception(stopped, told + more)


def _emit_whole_reply(reply: ModelReply, item: Item, io: IO) -> ModelReply:
    """Emit the events of a reply that arrived in one piece, and return it."""
    calls = 0
    if isinstance(
        reply, ModelReply
    ):  # else nobody knows what to show, and `_validate_and_price_reply` says what is wrong
        for part in reply.content:
            if isinstance(part, ToolCallPart):
                # Of a call only its arguments are shown, which are one piece.
                _emit_tool_input_delta(item, io, part.tool_name, _predict_call_id(item, calls), get_raw_arguments(part))
                calls += 1
            else:
                for delta in split_part_into_deltas(part, calls):
                    _emit_delta(delta, {}, item, io)
    return reply


def _emit_tool_input_delta(item: Item, io: IO, name: str, call_id: str, text: str) -> None:
    io.emit(ToolInputDelta(path=item.path, seq=item.effect.seq, tool_name=name, tool_call_id=call_id, text=text))


def _predict_call_id(item: Item, number: int) -> str:
    """Return the id that a call of the unfinished reply will have, for its events."""
    # It is ours, so it can be told before the provider's comes.
    call_id = item.effect.call_id  # type: ignore[union-attr]
    return "" if call_id is None else call_id(number)


async def _stream_reply(provider: ModelProvider, request: ModelRequest, item: Item, io: IO) -> ModelReply:
    """Stream a reply, emit its events and return it."""
    shown, heard = False, _StreamedChars()
    calls: dict[int, tuple[str, str]] = {}
    try:
        # Closed at once on every way out: a stream that is left to the collector keeps its connection, and the provider
        # goes on producing what is paid for.
        async with aclosing(cast("Any", provider.stream(request))) as deltas:
            async for delta in deltas:
                if isinstance(delta, ReplyDone):
                    return delta.reply
                heard.count(delta)
                shown = _emit_delta(delta, calls, item, io) or shown
        msg = f"the stream of {request.model!r} ended before its terminal marker, so the partial reply was discarded"
        raise TruncatedReply(msg, retryable=True, kind="truncated")  # noqa: TRY301 - discarded as after any other error
    except BaseException as raised:
        if shown:
            io.emit(ReplyDiscarded(path=item.path, seq=item.effect.seq, model=request.model))
        if not isinstance(raised, Exception):
            heard.attach_lower_bound_usage(raised)
        raise


def _emit_delta(delta: ModelDelta, calls: dict[int, tuple[str, str]], item: Item, io: IO) -> bool:
    """Emit a piece of a reply and return True; False for the start of a call, which is only stored in *calls*, and for the end."""
    path, seq = item.path, item.effect.seq
    match delta:
        case TextChunk(text=text):
            io.emit(TextDelta(path=path, seq=seq, text=text))
        case ThinkingChunk(text=text):
            io.emit(ThinkingDelta(path=path, seq=seq, text=text))
        case ToolCallStarted(index=index, tool_name=name):
            calls[index] = name, _predict_call_id(item, len(calls))
            return False
        case ToolCallChunk(index=index, text=text):
            _emit_tool_input_delta(item, io, *calls.get(index, ("", "")), text)
        case ToolCallEnded() | ReplyDone():
            return False
        case _ as never:
            assert_never(never)
    return True


def _add_limit_reason_to_error(failed: ModelError, refusal: StepEngineError, spent: Usage | None) -> ModelError:
    """Add a limit's reason and what all attempts *spent* to the error of an attempt that is not retried; return the error."""
    failed.usage = spent
    failed.message = f"{failed.message}; not retried: {refusal.message}"
    failed.args = (failed.message, *failed.args[1:])
    return failed


def _make_retry_event(item: Item, request: ModelRequest, attempt: int, wait: float, error: ModelError) -> ModelRetry:
    return ModelRetry(
        path=item.path, seq=item.effect.seq, model=request.model, attempt=attempt, wait=wait, error=error.message
    )


def _make_rate_limit_callback(item: Item, io: IO, request: ModelRequest) -> Notice:
    """Return a function that emits an event for a wait for a rate limit."""

    def emit_wait(provider: str, obstacle: WaitReason) -> None:
        if io.watched:
            at: dict[str, Any] = {"path": item.path, "seq": item.effect.seq, "model": request.model}
            io.emit(RateLimited(**at, provider=provider, limit=obstacle.limit, wait=obstacle.seconds))

    return emit_wait


def _add_usage_to_stop(late: Stop, value: object) -> Stop:
    """Return a stop that came after a reply, with the usage of the reply."""
    if not isinstance(value, ModelReply):
        return late
    usage = value.usage or Usage(at_least=True)
    cost = Decimal(0) if value.cost is None and value.usage is None else value.cost
    return attrs.evolve(late, begun=PartialUsage(attrs.evolve(usage, requests=usage.requests or 1), cost))


def _add_failure_usage_to_stop(late: Stop, error: StepEngineError) -> Stop:
    """Return a stop that came after a failure, with the usage of the failed attempts."""
    begun = find_failure_usage(error)
    return late if begun is None else attrs.evolve(late, begun=begun)


def _to_step_error(model: str, raised: BaseException) -> StepEngineError:
    """
    Return a provider's exception as a ``ModelError``, unless it is a stepengine error already.
    """
    if isinstance(raised, StepEngineError):
        return raised
    msg = f"the provider of {model!r} raised {type(raised).__name__}: {raised}"
    error = ModelError(msg, kind="provider")
    error.__cause__ = raised
    return error


# --- what tool calls need ----------------------------------------------------------------------------------------------


def _make_permission_request(
    item: Item, spec: ToolSpec, call_input: JsonDict, *, source: str, is_call: bool = True
) -> Request:
    """Return a call with the input *call_input*, or another access to files, in the form that permission rules use."""
    from stepengine.permissions import Request  # an engine without rules does not load them

    info = item.plan.info
    return Request(
        tool=spec,
        input=call_input,
        agent_id=item.plan.agent.definition.id,
        session_id=info.session_id,
        user_id=info.user_id,
        source=source,
        is_call=is_call,
    )


async def _run_guarded_or_refuse(
    running: Coroutine[object, Any, ToolResult], guard: CallGuard | None, workspace: Workspace | None
) -> ToolResult:
    """Await a call whose file access *guard* restricts, in threads too; a refused call does not start."""
    folder = None if workspace is None else workspace.local_folder or workspace.root
    is_here = workspace is None or workspace.local_folder is not None
    if guard is not None and (why := guard.find_refusal(folder, is_here=is_here)):
        running.close()
        return ToolResult.error(why)
    token = GUARD.set(guard)
    try:
        return await running
    finally:
        GUARD.reset(token)


class _LazyToolContext:
    """A tool context that is created on first use, since most bodies never use it."""

    __slots__ = ("_effect", "_item", "_made", "_tree", "is_typed")

    def __init__(self, item: Item, effect: CallTool, tree: TreeWithBackground) -> None:
        self._item = item
        self._effect = effect
        self._tree = tree
        self._made: ToolContext | None = None
        self.is_typed = effect.source != "model"

    def __getattr__(self, name: str) -> object:
        if self._made is None:
            self._made = _make_tool_context(self._item, self._effect, self._tree)
        return getattr(self._made, name)


def _make_tool_context(item: Item, effect: CallTool, tree: TreeWithBackground) -> ToolContext:
    plan, setting = item.plan, tree.services.tools
    state, agent, info = effect.state(), plan.agent.definition, plan.info
    voice, keep = _ToolOutput(item, effect, tree), tree.services.keep_write
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
        remaining_tokens=_estimate_remaining_context_tokens(item, effect, state, tree),
        emit=voice.emit,
        threads=setting.threads,
        leaked=tree.leftovers.leaked,
        belongings=partial(tree.runs.belongings.get_or_create, item.path),
        sleep=tree.services.time.clock.sleep,
        is_typed=effect.source != "model",
        keep_write=None if keep is None else partial(keep, item.path, effect.seq),
    )


def _estimate_remaining_context_tokens(
    item: Item, effect: CallTool, state: AgentState, tree: TreeWithBackground
) -> int | None:
    """Return the remaining context tokens; the model's data is looked up only if the run called its model."""
    plan = item.plan
    window = plan.context_window
    if window is None and plan.model and effect.measured is not None:
        window = tree.services.models.window(plan.model)
    limit = plan.agent.hooks.find_prompt_limit(window)
    return None if limit is None else max(0, limit - estimate_next_prompt_tokens(state, effect.measured))


class _ToolOutput(LineLogger):
    """The events and log lines of a running tool, with the address of its call."""

    __slots__ = ("_effect", "_item", "_tree")

    def __init__(self, item: Item, effect: CallTool, tree: TreeWithBackground) -> None:
        self._item = item
        self._effect = effect
        self._tree = tree

    def emit(self, event: Event) -> None:
        """Emit an event with the address of the call; a ``ToolLog`` is also logged."""
        event = attrs.evolve(event, path=self._item.path, seq=self._effect.seq)
        if isinstance(event, ToolLog):
            self._tree.hub.log.write(event, step=self._effect.step_index)
        self._tree.loop.call_or_schedule(self._tree.emit, event)

    def log_line(self, level: str, message: str, data: dict[str, object]) -> None:
        """Emit a log line as an event, and log it."""
        event = ToolLog(
            path=self._item.path,
            seq=self._effect.seq,
            message=str(message),
            level=level,
            tool_name=self._effect.tool_name,
            tool_call_id=self._effect.tool_call_id,
        )
        self._tree.hub.log.write(event, data or None, step=self._effect.step_index)
        self._tree.loop.call_or_schedule(self._tree.emit, event)


def get_call_timeout(plan: RunPlan, tool_name: str) -> float:
    """
    Return the time limit of a tool call in seconds: the tool's, or a default.

    A tool that yields has none by default, and only its own work counts.
    """
    binding = plan.tools[tool_name]
    return binding.spec.timeout or (TOOL_SECONDS if isinstance(binding.runs, Ordinary) else math.inf)


def is_deferred_call(item: Item) -> bool:
    """Return whether an effect is a call of a tool whose result comes from outside."""
    effect = item.effect
    binding = item.plan.tools.get(effect.tool_name) if isinstance(effect, CallTool) else None
    runs = None if binding is None else binding.runs
    return isinstance(runs, Ordinary) and getattr(runs.tool, "deferred", False)
