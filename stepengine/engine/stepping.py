"""
``Stepper``: goes through a recorded run one result at a time, and can be asked where everybody stands.

It drives the machines of the run and of its children by itself: no event loop, no thread, no performer, and no copy of the
journal. Results come in the order in which they stand in the journal, those of the root and of children together; a
*position* is the number of results that were taken so far. What stands between two yields of author code runs again.

It goes forward only, because a generator cannot be copied; ``anew`` gives another one that shares what was read. Who wants
to go back walks again, or keeps steppers, or processes, that wait at positions on the way.
"""

from __future__ import annotations

import json
import linecache
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from traceback import walk_tb
from types import FrameType, GeneratorType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

import attrs

from stepengine.data.effects import (
    RUNS,
    AskPerson,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Effect,
    Gather,
    Leaf,
    Notify,
    Spawn,
)
from stepengine.data.functions import PACKAGE
from stepengine.data.hooks import HOOK_POINTS, Hooks
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import Yielding
from stepengine.data.transcript import Transcript
from stepengine.engine.options import AgentLike
from stepengine.errors import ReplayDivergence, StepEngineError
from stepengine.journal.divergence import diverged, parked_at
from stepengine.journal.encoding import describe
from stepengine.journal.history import History, parent_of
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.records import ROOT, Address, Intent, Result, shown_address
from stepengine.journal.replayer import NO_LEEWAY, Leeway, Past, Replayer
from stepengine.journal.store import Journal
from stepengine.machine.author import Author
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.run import parts_of
from stepengine.machine.signals import is_callers
from stepengine.machine.state import RunState
from stepengine.runtime.asking import shown_questions
from stepengine.runtime.performer import Item, child_path

if TYPE_CHECKING:
    from stepengine.engine.launching import Launcher

__all__ = ("Frame", "FrameKind", "HookCall", "Moment", "Stepper")

FrameKind: TypeAlias = Literal["handler", "helper", "hook", "tool", "package", "opaque"]
TOPS = ("handler", "hook", "tool")
STORED_AS: Mapping[type[Leaf], str] = {
    CallModel: "CallModel", CallTool: "CallTool", CallBody: "CallTool", Spawn: "Spawn", CallFunction: "Perform", AskPerson: "Ask",
}  # fmt: skip
"""The name of each effect in a record."""
MAX_FRAMES = 100
SHOWN = 200


@attrs.frozen(kw_only=True)
class Frame:
    """
    One frame of author code that waits.

    Attributes:
        function: The function's qualified name; of what is ``opaque``, the name of its type.
        file: Its file; ``""`` where there is none.
        line: The line that waits; 0 where there is none.
        source: The text of that line, as the file has it now; ``""`` where that cannot be read.
        locals: Its variables, a copy: the objects themselves.
        kind: ``handler``, ``hook`` and ``tool`` are the functions that the machine called, ``helper`` a generator that they wait for,
            ``package`` one of this package, ``opaque`` what cannot be looked into, such as an iterator.
        globals: What its code sees as globals.
    """

    function: str
    file: str = ""
    line: int = 0
    source: str = ""
    locals: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    kind: FrameKind = "helper"
    globals: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)


@attrs.frozen
class HookCall:
    """
    One call of a hook, made again by the replay.

    Attributes:
        point: Its point, such as ``"pre_step"``.
        hook: Its name.
        said: What it returned: a ``Change``, a ``Decision``, or ``None``; the error, when it raised one.
    """

    point: str
    hook: str
    said: Any = None


@attrs.frozen(kw_only=True)
class Moment:
    """
    What stands before the outcome at a position is sent.

    Attributes:
        position: How many results were taken.
        step: In which step of its run that is: the number of its model calls so far, this one included; 0 before the first.
        address: The address of the effect whose outcome comes next, such as ``"3.2#1"``; ``""`` after the last one.
        agent_id: The agent that waits for it.
        asked: What is asked for, in a line; as it is, with nothing taken out.
        effect: The effect; ``None`` after the last one.
        outcome: What is recorded of it; ``None`` where nothing is.
        state: The state of the run that waits.
        view: What its model is shown of its history.
        request: The last request that this run made, up to this effect; ``None`` before the first.
        frames: The author's frames, outermost first; none where nothing of the author's waits.
        location: ``file:line`` of the innermost of them that is the author's own.
        hooks: The hooks of this run that were called since its last outcome.
        at: Milliseconds since the root run was created, when the outcome came; the last known time where there is none.
    """

    position: int
    step: int
    address: str
    agent_id: str
    asked: str
    effect: Leaf | None
    outcome: Value | Failure | None
    state: AgentState
    view: Transcript
    request: ModelRequest | None
    frames: tuple[Frame, ...]
    location: str
    hooks: tuple[HookCall, ...]
    at: int


class _Tape:
    """
    What all steppers of one journal share: its records, parsed once, and the order of its results.

    Attributes:
        verified: Up to which position the effects were compared with the record.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.history: History = journal.history()
        self.order: list[Address] = [
            (record.path, record.seq)
            for record in self.history.records
            if type(record) is Result and (record.path, record.seq) != ROOT
        ]
        self.places = {address: position for position, address in enumerate(self.order)}
        self.steps: dict[str, list[int]] = {}
        for (path, seq), intent in self.history.intents.items():
            if intent.type == "CallModel":
                self.steps.setdefault(path, []).append(seq)
        self.verified = 0

    def step_of(self, address: Address) -> int:
        """Return the step that an effect belongs to, as ``stepengine show`` numbers them."""
        return bisect_right(self.steps.get(address[0], ()), address[1])

    def waiting(self) -> Address | None:
        """Return the first effect that waits where the record ends: a question that is open goes before all others."""
        history = self.history
        if history.is_complete:
            return None
        asked = [address for address, _ in history.open_questions().values()]
        left = [a for a, i in history.intents.items() if a not in history.results and a != ROOT and not i.begins_run]
        # What was cancelled with a run that has ended never finishes.
        return next((a for a in [*asked, *left] if not self._is_over(a[0])), None)

    def _is_over(self, path: str) -> bool:
        while path:
            address = parent_of(path)
            if address in self.history.results:
                return True
            path = address[0]
        return False


class _Running:
    """One run of the tree: its machine, and what that waits for."""

    __slots__ = ("effect", "finished", "hooks", "machine", "path", "plan", "request", "slots", "state", "waits")

    def __init__(self, path: str, plan: RunPlan, state: AgentState) -> None:
        self.path = path
        self.plan = plan
        self.state = state
        self.machine: Generator[Effect, Outcome | None, Finished] = None  # type: ignore[assignment]
        self.effect: Effect | None = None
        self.waits: dict[int, Item] = {}
        self.slots: dict[int, Single] = {}
        self.request: ModelRequest | None = None
        self.hooks: list[HookCall] = []
        self.finished: Finished | None = None


class Stepper:
    """
    Goes through a recorded run; one that is made stands at position 0. Make one with ``Engine.stepper``.

    Args:
        launcher: What makes the plan of the recorded run.
        tape: The record.
        agent: Stands in for the agent that the journal names.
        leeway: What the run may do differently.

    Attributes:
        position: How many results were taken.
        diverged: Why the run is not the recorded one any more; it stands at the effect that differs, and goes no further.

    Raises:
        AgentError: when the engine has no such agent.
        JournalError: when the journal is damaged, of a newer version, or holds no run.
        ReplayDivergence: when the run begins with something else than is recorded.
    """

    def __init__(
        self, launcher: Launcher, tape: _Tape, agent: AgentLike | None = None, *, leeway: Leeway = NO_LEEWAY
    ) -> None:
        self.position = 0
        self.diverged: ReplayDivergence | None = None
        self._made_of = (launcher, tape, agent)
        self._leeway = leeway
        self._tape = tape
        self._at = 0
        self._session = session = JournaledRun.walk(tape.journal, tape.history, leeway=leeway)
        tree = launcher.again(session, agent=agent).tree
        self._services = tree.services
        self._replayer: Replayer = cast("Replayer", session.replayer)
        self._past: Past = cast("Past", session.past)
        self._runs: dict[str, _Running] = {}
        self._guarded(partial(self._start, tree.root.plan, tree.root.state, ""))

    @classmethod
    def of(cls, launcher: Launcher, journal: Journal, agent: AgentLike | None = None) -> Stepper:
        """Return a stepper for a journal, which is read once; errors as for the class."""
        return cls(launcher, _Tape(journal), agent)

    def anew(self) -> Stepper:
        """
        Return another stepper at position 0, which shares what was read.

        Effects that one of them compared with the record are compared by their kind alone.
        """
        return Stepper(*self._made_of, leeway=self._leeway)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all handlers and hooks, children first, so that their ``finally`` blocks run; may be called twice."""
        for path in sorted(self._runs, key=lambda path: path.count(".") + bool(path), reverse=True):
            self._runs.pop(path).machine.close()

    # --- places -------------------------------------------------------------------------------------------------------

    @property
    def journal(self) -> Journal:
        """The journal."""
        return self._tape.journal

    @property
    def history(self) -> History:
        """What is recorded."""
        return self._tape.history

    @property
    def last(self) -> int:
        """The last position: the number of results in the journal, that of the root run apart."""
        return len(self._tape.order)

    @property
    def is_in_address_order(self) -> bool:
        """Whether the record stands in the order of addresses, as that of a test, so that siblings follow one another."""
        return self.journal.stable and any(path for path, _ in self._tape.order)

    def address_at(self, position: int) -> Address | None:
        """Return whose outcome comes next at a position; at the last one, what waits there, ``None`` when nothing does."""
        order = self._tape.order
        return order[position] if position < len(order) else self._tape.waiting()

    def position_of(self, path: str, seq: int) -> int | None:
        """Return the position before the outcome of an effect is sent; ``None`` when there is no such effect in the record."""
        known = self._tape.places.get((path, seq))
        return self.last if known is None and self._tape.waiting() == (path, seq) else known

    def step_at(self, position: int) -> int:
        """Return the step of the run that waits at a position; 0 before its first."""
        address = self.address_at(position)
        return self._tape.step_of(address) if address is not None else len(self._tape.steps.get("", ()))

    def position_of_step(self, step: int, path: str = "") -> int | None:
        """Return the position before the reply of a step of a run, from 1; ``None`` when it has no such step."""
        calls = self._tape.steps.get(path, ())
        return self.position_of(path, calls[step - 1]) if 0 < step <= len(calls) else None

    def steps(self, path: str = "") -> int:
        """Return how many steps a run has."""
        return len(self._tape.steps.get(path, ()))

    # --- going --------------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """
        Take the next result; return whether there was one.

        Raises:
            ReplayDivergence: when the run does something else than is recorded then; it stands there, and stays.
        """
        if self.diverged is not None:
            raise self.diverged
        if self.position >= self.last:
            return False
        self.go(self.position + 1)
        return True

    def go(self, position: int) -> None:
        """Take results until so many were taken; raises as ``advance`` does."""
        if self.diverged is not None and self.position < position:
            raise self.diverged
        if self.position < (end := min(position, self.last)):
            self._guarded(partial(self._take_until, end))

    def _take_until(self, position: int) -> None:
        tape = self._tape
        order, take = tape.order, self._take
        try:
            while self.position < position:
                take(*order[self.position])
        finally:
            # What was answered was compared before.
            tape.verified = max(tape.verified, self.position)

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except ReplayDivergence as error:
            self.diverged = error
            raise
        if self.position == self.last and self._runs[""].finished is not None:
            unused = self._past.unused(self._runs[""].plan.definition.id)
            if unused is not None and self.history.is_complete:
                self.diverged = unused
                raise unused

    def _take(self, path: str, seq: int) -> None:
        run = self._reached(path)
        known = self.history.results[run.path, seq]
        item = run.waits.get(seq)
        if item is None:
            raise self._left(run, (run.path, seq))
        outcome = self._of_run(item, known) if type(item.effect) in RUNS else self._replayer.answer(known, item)
        self.position += 1
        self._at = max(self._at, known.at)
        run.slots[seq] = outcome
        if len(run.slots) == len(run.waits):
            self._answer(run)

    def _left(self, run: _Running, address: Address) -> StepEngineError:
        """Return the error for a run that has ended, or waits for something else, where it was to take a result."""
        unused = self._past.unused(run.plan.definition.id)
        if unused is None:
            said = "the run does not wait for the result that is recorded here"
            location = parked_at(run.machine)
            unused = diverged(self.history, address, "unused", asked=said, location=location)
        return self._session.fail(unused)

    def _start(self, plan: RunPlan, state: AgentState, path: str) -> _Running:
        run = self._runs[path] = _Running(path, plan, state)
        if plan.hooks:
            run.plan = plan = attrs.evolve(plan, hooks=_noting(plan.hooks, run.hooks.append))
        run.machine = self._services.machine(plan, state)
        self._send(run, None)
        return run

    def _send(self, run: _Running, outcome: Outcome | None) -> None:
        """Send an outcome to a machine, and let it go on to what it asks for next."""
        send = run.machine.send
        run.effect, run.waits, run.slots = None, {}, {}
        try:
            effect = send(outcome)
            while type(effect) is Notify:
                effect = send(None)
        except StopIteration as stop:
            run.finished = stop.value
            return
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or not is_callers(error):
                raise
            # What ends the program of who runs it, such as ``sys.exit``, ends the run, and nothing of who looks at it.
            run.finished = Finished(status=RunStatus.FAILED, state=_state_in(error) or run.state, error=error)
            return
        run.effect = effect
        members = effect.effects if type(effect) is Gather else (effect,)
        together = effect if type(effect) is Gather and len(members) > 1 else None
        for member in cast("Sequence[Leaf]", members):
            item = run.waits[member.seq] = Item(run.path, member, run.plan, together)
            if type(member) is CallModel:
                run.request = member.request
            self._meet(item)

    def _meet(self, item: Item) -> None:
        """Compare an effect with the record; once that was done, its kind is enough."""
        address = (item.path, item.effect.seq)
        place = self._tape.places.get(address)
        if (
            place is not None
            and place < self._tape.verified
            and self.history.intents[address].type == STORED_AS[type(item.effect)]
        ):
            self._past.use(address)
            return
        together = None if item.gather is None else item.gather.effects[0].seq
        self._replayer.meets(item, Intent(*address, describe(item), gather=together))

    def _answer(self, run: _Running) -> None:
        """Send a machine what it waits for."""
        run.hooks.clear()
        effect = run.effect
        outcomes = [run.slots[seq] for seq in run.waits]
        self._send(run, Gathered(tuple(outcomes)) if type(effect) is Gather else outcomes[0])

    # --- children -----------------------------------------------------------------------------------------------------

    def _reached(self, path: str) -> _Running:
        """Return the run at a path; a child starts when somebody first wants to know of it."""
        known = self._runs.get(path)
        if known is not None:
            return known
        above, seq = parent_of(path)
        parent = self._reached(above)
        item = parent.waits.get(seq)
        if item is None:
            raise self._left(parent, (above, seq))
        plan, state = self._services.planner(parent.plan, item.effect, path)
        return self._start(plan, state, path)

    def _of_run(self, item: Item, known: Result) -> Single:
        """Return what a child, or the body of a tool, gave, which is what is recorded of it."""
        effect, address = item.effect, (item.path, item.effect.seq)
        refused = self._replayer.refused_run(address, item)
        if refused is not None:
            return refused
        path = child_path(*address)
        try:
            run = self._reached(path)
        except ReplayDivergence:
            raise
        except StepEngineError as error:
            if type(effect) is CallBody:
                raise
            child: ChildResult = ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error)  # type: ignore[union-attr]
            given = Value(child, known.at)
        else:
            given = _given_by(self._ended(run), item, known.at)
            del self._runs[path]
        confirmed = self._replayer.confirm(known, given, item)
        assert confirmed is not None  # noqa: S101 - nothing is performed, so nothing can be new
        return confirmed

    def _ended(self, run: _Running) -> Finished:
        """Return how a run ended; one that waits where its record ends is stopped as it was when it was recorded."""
        while run.finished is None:
            for seq, item in run.waits.items():
                if seq not in run.slots:
                    run.slots[seq] = self._halted(item)
            self._answer(run)
        return run.finished

    def _halted(self, item: Item) -> Stop:
        address = (item.path, item.effect.seq)
        if type(item.effect) is AskPerson:
            return self._replayer.halt(item.path, shown_questions(item))
        if type(item.effect) not in RUNS or not self._replayer.has_begun(address):
            return attrs.evolve(self._replayer.halt(item.path, ()), begun=self._replayer.begun(item))
        path = child_path(*address)
        ended = self._ended(self._reached(path))
        del self._runs[path]
        if type(item.effect) is CallBody:
            return attrs.evolve(self._replayer.halt(item.path, ended.pending), body=ended.as_body())
        child = ended.as_child(is_inline=cast("Spawn", item.effect).is_inline)
        return attrs.evolve(self._replayer.halt(item.path, child.questions), child=child)

    # --- looking ------------------------------------------------------------------------------------------------------

    def moment(self) -> Moment:
        """Return where everybody stands; raises as ``advance`` does, where a child that is looked at begins differently."""
        address = self._here()
        if address is None:
            return self._last_moment()
        run, effect = self._runs[address[0]], self.effect()
        known = self.history.results.get(address) if self.diverged is None else None
        state = _state_of(run)
        return Moment(
            position=self.position,
            step=self._tape.step_of(address),
            address=shown_address(*address),
            agent_id=run.plan.definition.id,
            asked="" if effect is None else _said(effect),
            effect=effect,
            outcome=self.outcome(),
            state=state,
            view=state.view,
            request=run.request,
            frames=self.frames(),
            location=parked_at(run.machine),
            hooks=tuple(run.hooks),
            at=self._at if known is None else known.at,
        )

    def frames(self) -> tuple[Frame, ...]:
        """Return the frames of the moment alone; raises as ``moment``."""
        return tuple(self._frames())

    def outermost(self) -> Frame | None:
        """Return the frame of the handler or hook alone, if one waits; raises as ``moment``."""
        return next((frame for frame in self._frames() if frame.kind in TOPS), None)

    def _frames(self) -> Iterator[Frame]:
        address = self._here()
        return _frames(self._runs["" if address is None else address[0]].machine)

    def effect(self) -> Leaf | None:
        """Return the effect of the moment alone; raises as ``moment``."""
        address = self._here()
        item = None if address is None else self._runs[address[0]].waits.get(address[1])
        return None if item is None else item.effect

    def outcome(self) -> Value | Failure | None:
        """Return the recorded outcome of the moment alone; raises as ``moment``."""
        address = self._here()
        known = None if address is None or self.diverged is not None else self.history.results.get(address)
        return None if known is None else self.history.outcome(known)

    def _here(self) -> Address | None:
        """Return the effect whose outcome comes next, when its run was reached."""
        address = self._diverging() or self.address_at(self.position)
        if address is not None and address[0] not in self._runs:
            self._guarded(partial(self._reached, address[0]))
        return address

    def _diverging(self) -> Address | None:
        """Return where the run that differs stands, when one does and waits there."""
        if self.diverged is None:
            return None
        path, _, seq = self.diverged.address.rpartition("#")
        run = self._runs.get(path)
        return (path, int(seq)) if run is not None and int(seq) in run.waits else None

    def _last_moment(self) -> Moment:
        root = self._runs[""]
        state = root.finished.state if root.finished is not None else _state_of(root)
        return Moment(
            position=self.position,
            step=len(self._tape.steps.get("", ())),
            address="",
            agent_id=root.plan.definition.id,
            asked="nothing that is recorded" if root.finished is None else f"nothing more: {_ended(root.finished)}",
            effect=None,
            outcome=None,
            state=state,
            view=state.view,
            request=root.request,
            frames=tuple(_frames(root.machine)),
            location=parked_at(root.machine),
            hooks=tuple(root.hooks),
            at=self.history.last_at,
        )

    @property
    def finished(self) -> Finished | None:
        """How the root run ended; ``None`` before it has."""
        return self._runs[""].finished

    def moments(self) -> Iterator[Moment]:
        """Give the moment at each position from here to the last one; raises as ``advance`` does."""
        yield self.moment()
        while self.advance():
            yield self.moment()


def _ended(finished: Finished) -> str:
    """Return how a run ended, in a line."""
    error, said = finished.error, f"the run has ended, {finished.status.value}"
    return said if error is None else f"{said} with {type(error).__name__}: {getattr(error, 'message', error)}"


def _given_by(ended: Finished, item: Item, at: int) -> Value:
    """Return what the run that an effect started gave."""
    effect = item.effect
    if type(effect) is CallBody:
        runs = cast("Yielding", item.plan.tools[effect.tool_name].runs)
        return Value(ended.as_tool_result(runs), at, body=ended.as_body())
    return Value(ended.as_child(is_inline=cast("Spawn", effect).is_inline), at)


def _said(effect: Leaf) -> str:
    """Return what an effect asks for, in a line."""
    match effect:
        case CallModel(request=request):
            return f"model {request.model} with {len(request.messages)} messages"
        case CallTool(tool_name=name, input=given):
            return f"{name} {_short(given)}"
        case Spawn(agent_id=name, prompt=prompt):
            return f"agent {name} {_short(prompt)}"
        case CallFunction(call=call):
            return f"perform {call.name}"
        case AskPerson(questions=questions):
            return " / ".join([question.text for question in questions])


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# --- looking into machines ------------------------------------------------------------------------------------------


def _chain(generator: object) -> Iterator[object]:
    """Give a generator, what it delegates to, and so on; the last may be anything."""
    for _ in range(MAX_FRAMES):
        if generator is None:
            return
        yield generator
        generator = getattr(generator, "gi_yieldfrom", None)


def _locals_of(generator: object) -> Mapping[str, object]:
    frame: FrameType | None = getattr(generator, "gi_frame", None)
    return {} if frame is None else frame.f_locals


def _state_of(run: _Running) -> AgentState:
    """Return the state of a run whose machine waits, or has ended."""
    if run.finished is not None:
        return run.finished.state
    for part in parts_of(run.machine):
        for value in _locals_of(part).values():
            if type(value) is RunState:
                return value.frozen()
    return run.state


def _state_in(error: BaseException) -> AgentState | None:
    """Return the state of the run whose machine an error left, from the frames that it passed."""
    for frame, _ in walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if type(value) is RunState:
                return value.frozen()
    return None


def _top_of(author: Author) -> FrameKind:
    if author.what.startswith("handle_steps"):
        return "handler"
    return "tool" if author.what.startswith("the tool") else "hook"


def _frames(machine: object) -> Iterator[Frame]:
    """Give the frames of the author's generator that a machine waits for: of a hook, where one was called."""
    author: Author | None = None
    for part in parts_of(machine):
        for value in _locals_of(part).values():
            author = value if type(value) is Author else author
    if author is None:
        return
    top = _top_of(author)
    for generator in _chain(author.steps):
        frame: FrameType | None = getattr(generator, "gi_frame", None)
        if frame is None:
            yield Frame(function=type(generator).__name__, kind="opaque")
            return
        file, is_ours = frame.f_code.co_filename, frame.f_code.co_filename.startswith(PACKAGE)
        kind: FrameKind = "package" if is_ours and not file.startswith(f"{PACKAGE}_agents") else top
        yield Frame(
            function=frame.f_code.co_qualname,
            file=file,
            line=frame.f_lineno,
            source=linecache.getline(file, frame.f_lineno).rstrip(),
            locals=dict(frame.f_locals),
            kind=kind,
            globals=frame.f_globals,
        )
        top = top if kind == "package" and top != "handler" else "helper"


# --- noting hooks ---------------------------------------------------------------------------------------------------


def _noting(hooks: Hooks, note: Callable[[HookCall], None]) -> Hooks:
    """Return hooks that behave as these do, and tell what they said."""
    points = {point: tuple([_Noted(hook, point, note) for hook in hooks.at(point)]) for point in HOOK_POINTS}
    return Hooks(**points)


class _Noted:
    """A hook that tells what it said. For whoever asks who it is, it is the hook itself: names and places stand in messages."""

    def __init__(self, hook: Callable[..., object], point: str, note: Callable[[HookCall], None]) -> None:
        self._hook = hook
        self._point = point
        self._note = note

    def __call__(self, *args: object) -> Any:
        try:
            said = self._hook(*args)
        except BaseException as error:
            self._tell(error)
            raise
        return self._told(said) if type(said) is GeneratorType else self._tell(said)

    def _told(self, steps: Generator[object, Any, object]) -> Generator[object, Any, object]:
        said = yield from steps
        return self._tell(said)

    def _tell(self, said: object) -> object:
        self._note(HookCall(self._point, self.__qualname__, said))
        return said

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__":
            return getattr(self._hook, name, type(self._hook).__qualname__)
        return getattr(self._hook, name)

    def __repr__(self) -> str:
        return repr(self._hook)
