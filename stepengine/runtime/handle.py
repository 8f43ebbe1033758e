"""``RunHandle``: a run in the background, seen from outside; and the turns of such a handle."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeAlias

from attrs import frozen
from typing_extensions import TypeVar

from stepengine.data.effects import CallFunction
from stepengine.data.events import Event, Warned
from stepengine.data.inputs import AnswerInput, Interrupt, RunInput, Shutdown, ToolResultInput, UserInput
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.questions import AnswerLike, Question
from stepengine.data.record_sizes import find_length_problem
from stepengine.data.state import RunPhase, RunResult
from stepengine.data.transcript import Transcript
from stepengine.data.yields import require_topic
from stepengine.errors import InputError, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.messages import Message, choose_message_id, make_result_message
from stepengine.runtime.performer import Item
from stepengine.runtime.tree import RunTree

Out = TypeVar("Out", default=Any)


class ResultMaker(Protocol):
    """The function that runs a turn of a handle and returns its result."""

    async def __call__(self) -> RunResult:
        """Run to the end."""


Turns: TypeAlias = Callable[[RunResult, str], tuple[RunTree, ResultMaker]]
"""Returns the next turn of a kept-open handle, from the result of the last one and the user's text."""


@frozen
class ChildRun:
    """
    A running run below another one.

    Attributes:
        path: Its path in the tree, such as ``"3"``, or ``"3.0"`` for a child's child.
        run_id: Its id.
        agent_id: Its agent.
    """

    path: str
    run_id: str
    agent_id: str


class TurnSequence:
    """
    The turns of one handle. Each is a separate run. A handle without ``keep_open`` has one turn.

    Args:
        tree: The run tree of the first turn.
        runner: Runs it.
        turns: Returns the next turn; ``None`` for a handle that is not kept open.

    Attributes:
        tree: The run tree of the running turn, or of the last one.
        task: The task of that turn.
        is_closing: Whether the handle was shut down, so that no further turn starts.
    """

    def __init__(self, tree: RunTree, runner: ResultMaker, turns: Turns | None) -> None:
        self._turns = turns
        self.is_closing = False
        self._callbacks: list[Callable[[], object]] = []
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self._attending = 0
        tree.hub.is_kept_open = turns is not None
        self._start_turn(tree, runner)

    def _start_turn(self, tree: RunTree, runner: ResultMaker) -> None:
        """Make *tree* the current turn, which keeps events and has the attendants, and start its task."""
        tree.hub.start_storing_events()
        tree.suspension.is_reachable = True
        self.tree = tree
        for _ in range(self._attending):
            tree.questions.add_attendant()
        self.task: asyncio.Task[RunResult] = self._loop.create_task(
            runner(), name=f"stepengine {tree.root.state.run_id}"
        )
        self.task.add_done_callback(self._on_turn_end)

    @property
    def done(self) -> bool:
        """Whether the last turn has ended and no further one can follow: one that crashed leaves no state to continue from."""
        task = self.task
        return task.done() and (
            self._turns is None or self.is_closing or task.cancelled() or task.exception() is not None
        )

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call *callback* when no further turn can follow."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def deliver_or_start_turn(self, message: UserMessage) -> None:
        """Add a user message to the running turn, or start the next turn with it. May be called from any thread."""
        if self._turns is None:
            self.tree.inboxes.root.append(message)
        elif self._is_in_loop():
            self._deliver_or_start_turn_in_loop(message)
        elif self._loop.is_closed():
            msg = (
                f"the event loop of the run {self.tree.root.state.run_id!r} is closed, so no turn can start; start another run "
                "with engine.start(...) in a running loop"
            )
            raise StepEngineError(msg)
        else:
            self._loop.call_soon_threadsafe(self._deliver_or_warn, message)

    def close(self) -> None:
        """Stop the running turn and start no further one. May be called from any thread."""
        self.is_closing = True
        self.tree.hub.is_kept_open = False
        self.tree.root.stop(Stop("shutdown"))
        self.call_in_loop(self._end_subscriptions_if_done)

    def call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a function in the event loop of the turns: directly if the caller is in it."""
        # At once where that is possible: put off to the next turn of the loop, an input would come behind a shutdown
        # that was called after it.
        if self._is_in_loop():
            call(*arguments)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _is_in_loop(self) -> bool:
        return asyncio._get_running_loop() is self._loop  # noqa: SLF001  (it is public, and None where no loop runs)

    def change_attendant_count(self, change: int) -> None:
        """Register a reader who can answer questions (1) or unregister one (-1); a waiting tree may be suspended at once."""
        self._attending += change
        (self.tree.questions.add_attendant if change > 0 else self.tree.questions.remove_attendant)()
        if self.tree.suspension.parked:
            # Whoever attended kept a run here that only waits.
            self.tree.suspension.release_or_suspend_idle_tree()

    def _deliver_or_start_turn_in_loop(self, message: UserMessage) -> None:
        """In the event loop, add a message to the running turn or start the next one with it; after the last turn raise."""
        if not self.task.done():
            self.tree.inboxes.root.append(message)
        elif self.done:
            raise self.make_ended_error()
        else:
            self._start_next_turn(message.text)

    def make_ended_error(self) -> StepEngineError:
        """Return the error for a text that is sent after the last turn."""
        msg = (
            f"the run {self.tree.root.state.run_id!r} has ended and accepts no input; start another run with previous=result.state, "
            "resume a suspended one with start_resume(journal, answers=...), or start with keep_open=True"
        )
        return StepEngineError(msg)

    def _deliver_or_warn(self, message: UserMessage) -> None:
        """Deliver a message from another thread; one that cannot start a turn stays unread."""
        try:
            self._deliver_or_start_turn_in_loop(message)
        except StepEngineError as error:
            self.tree.inboxes.root.append(message)
            self._warn_of_unread_text(error)

    def _start_next_turn(self, text: str) -> None:
        """Start the turn that answers *text*, in the context in which the handle was made."""
        turns, last = self._turns, self.task.result()
        assert turns is not None  # noqa: S101 - a handle that is not kept open has one
        # As the first turn: not in the context of whoever happens to send the text, which may be another run's.
        self._context.copy().run(lambda: self._start_turn(*turns(last, text)))

    def _on_turn_end(self, _: asyncio.Task[RunResult]) -> None:
        """Start the next turn with the texts that arrived too late, if there are any and another turn can follow."""
        self._end_subscriptions_if_done()
        late = [message.text for message in self.tree.inboxes.root]
        if self.done or not late:
            return
        inbox = self.tree.inboxes.root
        try:
            self._start_next_turn("\n\n".join(late))
        except StepEngineError as error:
            self._warn_of_unread_text(error)
        else:
            inbox.clear()

    def _warn_of_unread_text(self, error: StepEngineError) -> None:
        """Log, and emit as an event, that a text could not start another turn."""
        text = f"the text sent after the turn ended could not start another turn: {error.message}"
        LOGGER.warning(text)
        self.tree.hub.emit(Warned(message=text))

    def _end_subscriptions_if_done(self) -> None:
        """End the event stream and call the callbacks of ``on_end``, if no further turn can follow."""
        if not self.done:
            return
        self.tree.hub.is_kept_open = False
        self.tree.hub.end_stream_unless_kept_open()
        while self._callbacks:
            self._callbacks.pop()()


class RunHandle(Generic[Out]):
    """
    A run in the background; ``engine.start`` and ``engine.start_resume`` return one.

    ``async with`` ends the run on exit. The methods that send something may be called from any thread, and every property may be
    read from any thread; ``events()`` and ``result()`` belong to the run's event loop.

    A handle that is kept open (``engine.start(..., keep_open=True)``) is idle after its run. The next input starts the next turn,
    a separate run in the same conversation, until ``shutdown``. Its ``run_id``, ``phase``, ``history`` and ``result`` are those
    of the running turn, or of the last one.
    """

    def __init__(self, tree: RunTree, runner: ResultMaker, *, turns: Turns | None = None) -> None:
        self._turns = TurnSequence(tree, runner, turns)
        self._is_used = False

    @property
    def _tree(self) -> RunTree:
        return self._turns.tree

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id} of {self.agent_id!r}: {self.phase.value}>"

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._tree.root.state.run_id

    @property
    def agent_id(self) -> str:
        """The agent's id."""
        return self._tree.root.plan.agent.definition.id

    @property
    def path(self) -> str:
        """The run's path in its tree: always ``""``."""
        return ""

    @property
    def parent(self) -> str | None:
        """The id of the parent run, or ``None``."""
        return self._tree.root.state.parent_id

    @property
    def children(self) -> tuple[ChildRun, ...]:
        """The running runs below this one, at any depth."""
        labels = self._tree.hub.log.copy_labels()
        return tuple([ChildRun(path, label.run_id, label.agent_id) for path, label in labels.items() if path])

    @property
    def session_id(self) -> str | None:
        """The conversation's id, if there is one."""
        return self._tree.root.plan.info.session_id

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The caller's metadata."""
        return self._tree.root.plan.info.metadata

    @property
    def history(self) -> Transcript:
        """The messages of the conversation so far; those of a step are added at its end."""
        history, task = self._tree.hub.root.history, self._turns.task
        if history is not None:
            return history()
        if task.done() and not task.cancelled() and task.exception() is None:
            return task.result().state.message_history
        return self._tree.root.state.message_history

    @property
    def phase(self) -> RunPhase:
        """The phase of the run; a kept-open handle is ``IDLE`` between its turns."""
        return RunPhase.IDLE if self._turns.task.done() and not self.done else self._tree.hub.root.phase

    @property
    def questions(self) -> tuple[Question, ...]:
        """The questions that ``answer`` accepts now; those of a suspended run are in its result."""
        return self._tree.questions.open_questions

    @property
    def epoch(self) -> str:
        """The prefix of the ``id`` of this handle's events."""
        return self._tree.hub.numbers.ensure_epoch()

    @property
    def done(self) -> bool:
        """Whether the run has ended and no further turn can follow."""
        return self._turns.done

    @property
    def is_used(self) -> bool:
        """Whether the result or the events were requested, or ``shutdown`` was called."""
        return self._is_used

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call *callback* when the handle is done: its run has ended, or was cancelled before it started."""
        self._turns.on_end(callback)

    # --- what comes out -----------------------------------------------------------------------------------------------

    async def result(self) -> RunResult[Out]:
        """
        Return the result when the run has ended; cancelling the wait does not end the run.

        A kept-open handle returns the result of the running turn, or of the last one when it is idle.
        """
        self._is_used = True
        return await self.wait()

    async def wait(self) -> RunResult[Out]:
        """Return the result as ``result`` does, without marking it as used."""
        # Whoever stops waiting has not stopped the run.
        return await asyncio.shield(self._turns.task)

    def events(self, after: str | None = None, *, answers: bool = False) -> AsyncGenerator[Event, None]:
        """
        Yield every event from the run's first one to ``RunFinished``; iterate in the run's event loop.

        The newest 10,000 events are kept, also after the end of the run. A reader that starts too late for older ones first gets
        one ``EventsDropped``. At most 10,000 events wait for a reader, which never slows the run. A reader that starts late or
        falls behind gets consecutive deltas joined, and no deltas of ended model calls: ``TextCompleted``,
        ``ThinkingCompleted`` and ``ToolStarted`` contain the whole text.

        Args:
            after: The ``id`` of the last event that a reconnecting reader has. If the id is of another epoch, as after a
                restart, one ``EventsDropped(reason="epoch")`` comes before the stored events.
            answers: Whether the reader will answer questions; a question stays open while such a reader is connected.

        Raises:
            LimitExceeded: when the run has 100 readers already.
            StepEngineError: when *after* is not an id of an event of this stream.
        """
        self._is_used = True
        subscription = self._tree.hub.subscribe(after)
        shown = _iterate_attended(self._turns, subscription.events()) if answers else subscription.events()
        # One that is never iterated has no `finally`.
        weakref.finalize(shown, subscription.close).atexit = False
        return shown

    # --- what goes in -------------------------------------------------------------------------------------------------

    def send(self, given: RunInput) -> None:
        """
        Send something to the run; each of the methods below sends one kind.

        Raises:
            InputError: when *given* is not a ``RunInput``, such as a string.
            StepEngineError: as that method does.
        """
        match given:
            case UserInput(text):
                self.send_input(text)
            case ToolResultInput(call_id, result, path):
                self.send_tool_result(call_id, result, path=path)
            case AnswerInput(question_id, answer):
                self.answer(question_id, answer)
            case Interrupt():
                self.interrupt()
            case Shutdown():
                self._turns.close()
            case _:
                msg = (
                    f"handle.send() needs an input such as UserInput('Continue.'), not {given!r}; handle.send_input(text) "
                    "sends a text"
                )
                raise InputError(msg, issues=("given should be a RunInput",))

    def send_input(self, text: str) -> None:
        """
        Send *text* to the run; it becomes a user message before the next model call.

        In an idle handle that is kept open, the text starts the next turn. A text that arrives too late for a turn starts the next.

        Raises:
            DataError: when *text* is not a string.
            InputError: when it is too long for a record.
            StepEngineError: when the run has ended, or the next turn cannot start. If another thread sent the text, a warning
                and a ``Warned`` event report the latter, and the text stays in ``unread``.
        """
        if self.done or self._turns.is_closing:
            raise self._turns.make_ended_error()
        message = UserMessage(text)
        if why := find_length_problem(text):
            msg = f"the text for the run {self.run_id!r} is too long: {why}; write it to a file and send its path"
            raise InputError(msg, issues=(why,))
        self._turns.deliver_or_start_turn(message)

    @property
    def unread(self) -> tuple[str, ...]:
        """The texts sent to the run that it has not received; after its end, those that it never received."""
        return tuple([message.text for message in self._tree.inboxes.root])

    def send_tool_result(self, tool_call_id: str, result: object, *, path: str | None = None) -> None:
        """
        Send the result of a deferred tool call.

        Args:
            tool_call_id: The call's id, as ``ToolStarted`` has it.
            result: A ``ToolResult``, or whatever a tool may return: a text, JSON, a part.
            path: The path of the run that made the call; needed only where calls of several runs of the tree that have the
                same id wait.

        Raises:
            ToolError: when no call with that id waits for its result.
        """
        self._tree.deferred.deliver_result(tool_call_id, result, path)

    def send_message(self, topic: str, value: object, *, id: str | None = None, path: str = "") -> bool:
        """
        Send a message to the run, for its next ``Receive`` on that topic; return False if *id* was sent before.

        If the run is recorded, the message is in the mailbox next to the journal, on disk, when this returns.
        ``await engine.send_message(handle, ...)`` does not block the event loop meanwhile.

        Args:
            topic: The topic.
            value: The content, as JSON.
            id: The id of the message; a second message with the same id is ignored. By default a new id.
            path: The path of the receiving run, if that is a child.

        Returns:
            Whether it is new: ``False`` when it was sent before.

        Raises:
            BadYield: when *topic* is not a valid topic.
            DataError: when *value* is not JSON.
            InputError: when the message is over 1 MiB, or another message has its id.
            JournalError: when the message cannot be stored.
            StepEngineError: when the run has ended.
        """
        message = Message(choose_message_id(id), path, require_topic(topic), value)
        if self.done:
            msg = f"the run {self.run_id!r} has ended here and accepts no messages; engine.send_message(journal, ...) stores one until the run is resumed"
            raise StepEngineError(msg)
        mail = self._tree.mail
        is_new = mail.send(message)
        if is_new:
            self._turns.call_in_loop(mail.deliver, message)
        return is_new

    def store_tool_result(self, tool_call_id: str, result: object, *, path: str | None = None) -> bool:
        """
        Store the result of a deferred tool call durably; return False if the same result was sent before.

        Like ``send_tool_result``, but if the run is recorded, the result is in the mailbox next to the journal, on disk, when this
        returns. So a resumed run has it, too.

        Args:
            tool_call_id: The call's id, as ``ToolStarted`` has it.
            result: A text or JSON.
            path: The path of the run that made the call, as for ``send_tool_result``.

        Returns:
            Whether it is new: ``False`` when the same was sent before.

        Raises:
            ToolError: when no call with that id waits for its result.
            DataError: when *result* is not JSON.
            InputError: when the result is over 1 MiB, or the call has another result already.
            JournalError: when the result cannot be stored.
        """
        place = self._tree.deferred.get_call_address(tool_call_id, path)
        message = make_result_message(place, result)
        is_new = self._tree.mail.send(message)
        self._turns.call_in_loop(self._tree.mail.apply, message)
        return is_new

    async def fetch_mail(self) -> None:
        """
        Fetch the messages in the journal's mailbox now instead of with the next poll; in the run's event loop.

        A waiting run polls the mailbox every two seconds or more often. Without a journal there are no messages to fetch.
        """
        await self._tree.mail.fetch()

    @property
    def calls_to_finish(self) -> tuple[str, ...]:
        """The running calls that ``interrupt(grace=...)`` lets finish, such as ``"write_file (#3)"``."""
        return tuple([_format_call_label(item) for item in self._tree.runs.list_unrepeatable_effects()])

    def answer(self, question_id: str, answer: AnswerLike) -> None:
        """
        Answer an open question.

        Raises:
            AnswerRejected: when no question with that id is open, or *answer* is none to it, such as a text that is no
                option.
        """
        self._tree.questions.answer(question_id, answer)

    def interrupt(self, grace: float = 0.0) -> None:
        """
        End the turn with status ``cancelled``; may be called twice, from observers and from any thread.

        Args:
            grace: The seconds in which running effects that cannot be repeated may finish: calls of tools that are neither
                ``read_only`` nor ``idempotent``, and each ``Perform`` that is not ``idempotent``. Their results are recorded, so that
                ``resume`` continues after them. Nothing else starts, model calls are cancelled at once, and
                ``ToolContext.cancelled`` is set when the time is over. A second call ends everything at once.
        """
        self._tree.runs.interrupt(grace)

    async def shutdown(self) -> None:
        """End the run and its children and wait for them; may be called twice."""
        self._is_used = True
        self._turns.close()
        await asyncio.wait((self._turns.task,))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()


def _format_call_label(item: Item) -> str:
    effect = item.effect
    name = effect.call.name if isinstance(effect, CallFunction) else getattr(effect, "tool_name", "")
    return f"{name} ({item.path}#{effect.seq})"


async def _iterate_attended(turns: TurnSequence, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yield *events*; meanwhile their reader counts as one who can answer questions."""
    turns.change_attendant_count(1)
    try:
        async for event in events:
            yield event
    finally:
        turns.change_attendant_count(-1)
        await events.aclose()
