"""
``Debugger``: moves to any position of a recorded run, in both directions, with the real variables of the handler.

A walk moves the stepper, ``RunPlaces`` finds positions, and ``parse_condition`` makes the test of a search. Nothing here prints.
Texts for a screen come from ``SafeTexts``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import linecache
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import attrs

from stepengine.data.codec import plain
from stepengine.data.json import find_first_difference
from stepengine.data.outcomes import Failure
from stepengine.data.questions import Answer
from stepengine.data.state import AgentState, ChildResult, RunResult
from stepengine.data.visible import cut_after
from stepengine.debugging.expressions import (
    MAX_TEXT,
    ExpressionResult,
    call_in_fork,
    compile_expression,
    evaluate_expression,
    format_error_safely,
    has_read_only_syntax,
    merge_frame_variables,
    parse_condition,
)
from stepengine.debugging.run_places import RunPlaces
from stepengine.debugging.texts import COMPARED_CHARS, MORE, WIDTH, SafeTexts
from stepengine.debugging.walks import ForkedWalk, PausedWalk, find_os_fork_problem
from stepengine.engine.moments import Frame, Moment
from stepengine.engine.stepper import Stepper
from stepengine.engine.tape import Tape
from stepengine.errors import DataError, InputError, JournalError, StepEngineError
from stepengine.journal import Journal, JournalLike, MemoryJournal, as_journal
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.provenance import replace_records_by_derived
from stepengine.journal.questions import make_edited_outcome, split_edit_into_answers
from stepengine.journal.records import Address, Result, format_address

if TYPE_CHECKING:
    from stepengine.data.messages import Message
    from stepengine.engine import Engine
    from stepengine.engine.options import AgentLike


MESSAGE_CHARS = 100
BEFORE_DIFFERENCE = 40
"""The characters of a long value that are shown before the first difference."""

# --- texts ----------------------------------------------------------------------------------------------------------


def format_outcome(outcome: Any, texts: SafeTexts) -> str:
    """Return the outcome of an effect as safe text of one line."""
    if isinstance(outcome, Failure):
        return f"{type(outcome.error).__name__}: {texts.clean(outcome.error.message, 200)}"
    value = outcome.value
    if isinstance(value, ChildResult):
        return f"child {value.agent_id} {value.status.value}: {texts.clean(value.text, 160)}"
    if isinstance(value, tuple) and value and all(isinstance(answer, Answer) for answer in value):
        return texts.clean("; ".join([answer.value or "(declined)" for answer in value]), 200)
    text = getattr(value, "text", None)
    return texts.clean(text, 200) if isinstance(text, str) and text else texts.format_value(value)


def summarize_moment(moment: Moment, texts: SafeTexts) -> dict[str, Any]:
    """
    Return the values of a moment that ``diff`` compares: messages, context, budgets, usage and locals.

    All values are safe texts. A message is cut after 100 characters; a longer one also has its length and a digest, which differ for
    different messages. A variable is cut after 10,000 characters.
    """
    state: AgentState = moment.state
    compared = texts.copy_for_comparison()

    def format_for_comparison(values: Mapping[str, Any]) -> dict[str, str]:
        """Return values as long texts, in which differences can be found."""
        return {name: compared.format_variable(name, value, limit=COMPARED_CHARS) for name, value in values.items()}

    frame = next((each for each in moment.frames if each.kind in ("handler", "hook", "tool")), None)
    return {
        "agent": moment.agent_id,
        "messages": [_summarize_message(message, texts) for message in state.message_history],
        "context": format_for_comparison(state.context),
        "budgets": {"steps_remaining": state.steps_remaining},
        "usage": {"tokens": state.usage.total_tokens, "cost": None if state.cost is None else str(state.cost)},
        "locals": {} if frame is None else format_for_comparison(frame.locals),
    }


def format_message(message: Any) -> str:
    """Return the text of a message, and a line for each of its tool calls."""
    called = [
        f"{call.tool_name} {json.dumps(plain(call.input), ensure_ascii=False)}"
        for call in getattr(message, "tool_calls", ())
    ]
    return "\n".join([part for part in (message.text, *called) if part])


def _summarize_message(message: Message, texts: SafeTexts) -> str:
    """Return role and text of a message; a long text is cut after 100 characters, with its length and digest."""
    whole = texts.clean(format_message(message))
    if len(whole) <= MESSAGE_CHARS:
        return f"{message.role}: {whole}"
    # Summaries are passed between processes, so the rest of a long message is only told apart.
    digest = hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{message.role}: {whole[:MESSAGE_CHARS]}... ({len(whole):,} characters, {digest})"


def diff_summaries(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """
    Return the differences of two results of ``summarize_moment``, one per line: ``+`` added, ``-`` removed, ``~`` changed.

    Values are cut after 200 characters. If they differ only after that, they start shortly before the first difference.
    """
    lines: list[str] = []
    if before["agent"] != after["agent"]:
        lines.append(f"~ agent {before['agent']} -> {after['agent']}")
    old, new = before["messages"], after["messages"]
    same = find_first_difference(old, new)
    left = min(len(old), len(new)) - same
    alike = next((n for n in range(left) if old[-1 - n] != new[-1 - n]), left)
    lines += [f"- message {n} {text}" for n, text in enumerate(old[same : len(old) - alike], same)]
    lines += [f"+ message {n} {text}" for n, text in enumerate(new[same : len(new) - alike], same)]
    for part in ("context", "budgets", "usage", "locals"):
        name = "" if part == "locals" else f"{part} "
        for key in dict.fromkeys([*before[part], *after[part]]):
            was, now = before[part].get(key), after[part].get(key)
            if key not in before[part]:
                lines.append(f"+ {name}{key} {cut_after(str(now), WIDTH, MORE)}")
            elif key not in after[part]:
                lines.append(f"- {name}{key} {cut_after(str(was), WIDTH, MORE)}")
            elif was != now:
                lines.append(f"~ {name}{key} {' -> '.join(cut_to_difference(str(was), str(now)))}")
    return lines


def cut_to_difference(was: str, now: str) -> list[str]:
    """Return two texts cut after 200 characters; if they differ only after that, from shortly before the first difference."""
    at = find_first_difference(was, now)
    if at < WIDTH:
        return [cut_after(text, WIDTH, MORE) for text in (was, now)]
    return [f"{MORE}{cut_after(text[at - BEFORE_DIFFERENCE :], WIDTH, MORE)}" for text in (was, now)]


# --- the debugger ---------------------------------------------------------------------------------------------------


def debug(engine: Engine, journal: JournalLike, *, agent: AgentLike | None = None) -> Debugger:
    """
    Return a debugger at the start of a recorded run. It moves in both directions and is a context manager.

    Args:
        engine: The engine that the agents belong to; forks run in it.
        journal: The journal, or the path of its file; it is only read.
        agent: Id or definition of the agent; by default the engine's agent that the journal names.

    Raises:
        AgentError: when the engine has no agent of the recorded id.
        JournalError: when the journal is damaged, of a newer version, or holds no run.
        ReplayDivergence: when the first effect of the run differs from the record.
    """
    return Debugger(engine, PausedWalk(engine.stepper(journal, agent=agent)), agent)


class Debugger:
    """
    Moves forwards and backwards in a recorded run. Use it as a context manager, or close it.

    Make one with ``debug``. It returns the real objects of the replayed handler. The code between yields runs again,
    recorded effects do not.

    Args:
        engine: The engine, for forks.
        walk: Moves the stepper.
        agent: Replaces the recorded agent.

    Attributes:
        texts: Makes safe texts.
        places: The positions of the run, and the child to which moves are restricted.
        problem: The first error that the expression of the last search raised, in a line; ``""`` for none.
        looked_at: The number of positions that the last search tested.
    """

    def __init__(self, engine: Engine, walk: PausedWalk | ForkedWalk, agent: AgentLike | None = None) -> None:
        self.texts = SafeTexts()
        self.places = RunPlaces(walk.stepper.tape)
        self.problem = ""
        self.looked_at = 0
        self._engine = engine
        self._agent = agent
        self._walk = walk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all suspended handlers; with a ``ForkedWalk``, do so in the first process only."""
        self._walk.close()

    # --- where --------------------------------------------------------------------------------------------------------

    @property
    def stepper(self) -> Stepper:
        """The stepper at the current position."""
        return self._walk.stepper

    @property
    def journal(self) -> Journal:
        """The journal of the run."""
        return self.stepper.tape.journal

    @property
    def position(self) -> int:
        """The current position: the number of results sent to handlers."""
        return self.stepper.position

    @property
    def last(self) -> int:
        """The last position."""
        return self.stepper.tape.last_position

    def moment(self) -> Moment:
        """Return the state of the run that receives the next outcome at the current position."""
        return self.stepper.moment()

    def to_dict(self) -> dict[str, Any]:
        """
        Return the current position as JSON, with safe texts of the author's values.

        Its keys are ``position``, ``step``, ``address``, ``agent_id``, ``asked``, ``outcome``, ``location``, ``at``, ``messages`` (the
        number that the model sees), ``frames`` (of handlers, helpers, hooks, tools and programs, each with its ``locals``),
        ``hooks``, ``cost``, ``tokens`` and ``variables`` (of ended programs).
        """
        moment, texts = self.moment(), self.texts
        outcome = moment.outcome
        return {
            "position": moment.position,
            "step": moment.step,
            "address": moment.address,
            "agent_id": moment.agent_id,
            "asked": texts.clean(moment.asked, 200),
            "outcome": None if outcome is None else format_outcome(outcome, texts),
            "location": moment.location,
            "at": moment.at,
            "messages": len(moment.view),
            "frames": [
                {
                    "function": frame.function,
                    "file": frame.file,
                    "line": frame.line,
                    "kind": frame.kind,
                    "source": texts.clean(frame.source, 400),
                    **({"printed": self.get_program_output(frame)} if frame.kind == "program" else {}),
                    "locals": {name: texts.format_variable(name, value) for name, value in frame.locals.items()},
                }
                for frame in moment.frames
                if frame.kind != "package"
            ],
            "hooks": [{"point": h.point, "hook": h.hook, "said": texts.format_value(h.said)} for h in moment.hooks],
            "cost": None if moment.state.cost is None else str(moment.state.cost),
            "tokens": moment.state.usage.total_tokens,
            "variables": self.variables(),
        }

    def get_program_output(self, frame: Frame) -> str | None:
        """Return the output so far of a frame's program as safe text; ``None`` without a program, or if its sandbox reports none."""
        printed = frame.printed()
        return None if printed is None else self.texts.clean(printed, MAX_TEXT)

    def variables(self) -> dict[str, str]:
        """Return the variables that programs left in the run of the moment, by name as safe texts; none while a program runs."""
        found, texts = self.stepper.variables(), self.texts
        is_secret = {name for name, text in found.items() if texts.format_variable(name, text) == "<redacted>"}
        return {name: "<redacted>" if name in is_secret else texts.clean(text) for name, text in found.items()}

    # --- movement -----------------------------------------------------------------------------------------------------

    def goto(self, at: int | str, **message: object) -> Moment:
        """
        Move to a step or an effect, before its outcome is sent.

        Args:
            at: The number of a step, or the address of an effect such as ``"3.2#1"``.
            message: Values for the process that continues there, if the walk wakes another process.

        Raises:
            JournalError: when there is no such step or effect.
            ReplayDivergence: when the run differs from its record before it.
        """
        self._walk.move_to(self.places.get_position(at), **message)
        return self.moment()

    def move_to(self, position: int, **message: Any) -> Moment:
        """
        Move to the nearest valid position and return the moment there.

        Args:
            position: The position; one outside of the run is replaced by the first or last one.
            message: Values for the process that continues there, if the walk wakes another process.

        Raises:
            ReplayDivergence: when the run differs from its record before *position*.
        """
        self._walk.move_to(max(0, min(position, self.last)), **message)
        return self.moment()

    def next(self, count: int = 1) -> Moment:
        """Move forward by *count* positions, at most to the last one; if a child is followed, only its own positions count."""
        return self.move_to(self.places.get_relative_position(self.position, count))

    def back(self, count: int = 1) -> Moment:
        """Move back by *count* positions, at most to the first one; if a child is followed, only its own positions count."""
        return self.move_to(self.places.get_relative_position(self.position, -count))

    def run_until(self, condition: str, *, backwards: bool = False) -> bool:
        """
        Move to the next, *backwards* the previous, position where a condition holds; return True if there is one.

        Without one, move to the last position, *backwards* to the first. The search tests positions of the root run alone, or of
        the followed child.

        Args:
            condition: ``"file.py:41"`` or ``"41"``, a line that waits; ``"@name"``, a call of a tool; ``"error"``, a failure or an
                error result; else an expression with the variables of the handler, evaluated in this process. An expression that
                raises does not hold.
            backwards: Search towards the start.

        Raises:
            InputError: when *condition* is not an expression.
        """
        start = self.position
        first, last = (0, start - 1) if backwards else (start + 1, self.last)
        found = self.search(condition, first, last, backwards=backwards)
        self._walk.move_to(found if found is not None else (0 if backwards else self.last))
        return found is not None

    def search(self, condition: str, first: int, last: int, *, backwards: bool = False) -> int | None:
        """
        Move through the positions from *first* to *last*; return the first, *backwards* the last, where a condition holds, or ``None``.

        Conditions and errors are those of ``run_until``. Backwards it also goes forwards, so it evaluates at all positions.
        """
        holds = parse_condition(condition)
        self.problem, self.looked_at = "", 0
        found: int | None = None
        for position in filter(self.places.is_position_searchable, range(first, last + 1)):
            self._walk.move_to(position)
            self.looked_at += 1
            try:
                if holds(self.stepper):
                    found = position
            except StepEngineError:
                raise
            except Exception as error:  # noqa: BLE001 - the expression is the user's own
                if not self.problem:
                    self.problem = f"{type(error).__name__}: {self.texts.clean(format_error_safely(error), 200)}"
            if found is not None and not backwards:
                break
        if not has_read_only_syntax(condition):
            self._walk.undo_expression_effects()
        return found

    # --- looking at values --------------------------------------------------------------------------------------------

    def list_author_frames(self) -> list[Frame]:
        """Return the Python stack frames of the author's code at this position, the outermost first."""
        return [frame for frame in self.moment().frames if frame.kind != "package"]

    def evaluate(self, expression: str, frame: int = 0, *, pretty: bool = False) -> str:
        """
        Evaluate an expression in a frame, and return its value or error as safe text.

        It runs in a forked process, for at most two seconds, so that its changes to objects are lost. If this process cannot
        fork, it runs here without a time limit. If it may have side effects, the handler is then replayed to its position.

        Args:
            expression: An expression; the variables of the frame are its names.
            frame: The number of the frame; 0 is the outermost one, the handler or hook itself.
            pretty: Show each member in a line of its own.

        Raises:
            InputError: for a statement, or a frame that does not exist.
        """
        return self.evaluate_in_frame(self.frame(frame), expression, pretty=pretty).text

    def evaluate_in_frame(self, frame: Frame, expression: str, *, pretty: bool) -> ExpressionResult:
        """Evaluate an expression in a given frame; see ``evaluate``."""
        compile_expression(expression)
        names = merge_frame_variables(frame)
        if not find_os_fork_problem():
            said = call_in_fork(lambda: evaluate_expression(expression, names, pretty=pretty).to_text())
            return ExpressionResult.from_text(said or "")
        made = evaluate_expression(expression, names, pretty=pretty)
        if not has_read_only_syntax(expression):
            self._walk.undo_expression_effects()
        return made

    def frame(self, number: int) -> Frame:
        """Return one of the author's frames by its number, from the outermost one; raise ``InputError`` if there is none."""
        frames = self.list_author_frames()
        if not 0 <= number < len(frames):
            why = (
                f"it has frames 0 to {len(frames) - 1}"
                if frames
                else "no code of the author is waiting at this position"
            )
            msg = f"frame {number} does not exist: {why}"
            raise InputError(msg)
        return frames[number]

    def locals(self, frame: int | Frame = 0) -> dict[str, str]:
        """Return the variables of a frame, or of the one with this number, as safe texts; ``__repr__`` methods run only in a forked process."""
        values = (frame if isinstance(frame, Frame) else self.frame(frame)).locals

        def format_variables(made: SafeTexts) -> dict[str, str]:
            """Return the variables as texts by *made*."""
            return {name: made.format_variable(name, value) for name, value in values.items()}

        if find_os_fork_problem() or all("<" not in text for text in format_variables(self.texts).values()):
            return format_variables(self.texts)
        said = call_in_fork(lambda: json.dumps(format_variables(SafeTexts(runs_reprs=True))))
        with contextlib.suppress(ValueError, TypeError):
            found: dict[str, str] = json.loads(said or "")
            return found
        return format_variables(self.texts)

    def diff(self, a: int | str, b: int | str) -> list[str]:
        """
        Return the differences between two steps or effects, one per line. The debugger returns to its position.

        Lines are those of ``diff_summaries``. Variables that differ only after 10,000 characters have no line.

        Raises:
            JournalError: when there is no such step or effect.
            ReplayDivergence: when the run differs from its record before one of them.
        """
        stood, one, two = self.position, self.places.get_position(a), self.places.get_position(b)
        known: dict[int, dict[str, object]] = {}
        try:
            for position in sorted({one, two}):
                self._walk.move_to(position)
                known[position] = summarize_moment(self.moment(), self.texts)
        finally:
            self._walk.move_to(stood)
        return diff_summaries(known[one], known[two])

    # --- forks --------------------------------------------------------------------------------------------------------

    async def fork(
        self,
        edit: object = None,
        *,
        engine: Engine | None = None,
        models: Any = None,
        into: JournalLike | None = None,
        allow_repeat: bool = False,
        served: bool = False,
        limits: object = None,
        trust: bool | None = None,
    ) -> RunResult:
        """
        Copy the recorded run into a new journal, and continue it there from the waiting effect.

        Args:
            edit: A new outcome for the effect, as for ``Engine.fork``; for an open question, its answer. For several questions, a list with
                an answer for each; for a question that allows several options, a list of the chosen ones.
            engine: The engine that runs it; by default the debugger's.
            models: The models from there on, such as a ``ScriptedModel``; by default the engine's own models.
            into: The new journal; by default one in memory.
            allow_repeat: As for ``Engine.fork``; ignored with *served*.
            served: Run no tool, and return recorded results to equal calls, as ``Engine.fork(tools="recorded")``. It needs an *edit*.
            limits: As for ``Engine.fork``.
            trust: As for ``Engine.fork``.

        Raises:
            JournalError: as for ``Engine.fork``; also when no effect waits here, or a required *edit* is missing.
        """
        tape, engine = self.stepper.tape, engine or self._engine
        address = tape.find_address_at(self.position)
        if address is None:
            msg = "the run has ended at this position; go back to an effect and fork there"
            raise JournalError(msg)
        options: dict[str, Any] = {"agent": self._agent, "limits": limits, "trust": trust}
        with engine.override(models=models) if models is not None else contextlib.nullcontext():
            if served:
                edited = _copy_journal_with_edit(tape, address, edit)
                return (await engine.fork(edited, tools="recorded", into=into, **options)).result
            if address in tape.history.results:
                at = format_address(*address)
                return await engine.fork(
                    self.journal, at=at, edit=edit, into=into, allow_repeat=allow_repeat, **options
                )
            target, answers = _copy_journal_with_answers(tape, address, edit, into)
            return await engine.resume(target, answers=answers, **options)


def _copy_journal_with_edit(tape: Tape, address: Address, edit: object) -> Journal:
    """
    Return a copy of the journal in which the effect at *address* has the outcome *edit*; raise ``JournalError`` without an outcome there.

    Raises:
        JournalError: when *edit* is ``None``, or the effect has no recorded outcome.
    """
    history = tape.history
    known = history.results.get(address)
    if known is None or edit is None:
        msg = f"served=True needs an effect with a recorded outcome, and a new outcome for {format_address(*address)} as edit="
        raise JournalError(msg)
    made = make_edited_outcome(history, history.intents[address], edit, known.at)
    changed = Result(known.path, known.seq, known.at, attrs.evolve(made, inputs=history.outcome(known).inputs))
    copy = MemoryJournal(redact="off", link=tape.journal.link).copy_redaction_rules_from(tape.journal)
    records = [changed if record is known else record for record in history.records]
    replace_records_by_derived(copy, records, tape.journal)
    return copy


def _copy_journal_with_answers(
    tape: Tape, address: Address, answer: Any, into: JournalLike | None
) -> tuple[Journal, dict[str, Any]]:
    """
    Return a copy of the journal and the answers to the questions open at *address*, by id; raise ``JournalError`` if they do not fit.

    A list or tuple has one answer for each question, in order; for a single question it may have several chosen options. Any other
    answer is for all questions.

    Raises:
        JournalError: when no question is open there, *answer* is ``None`` or has another number of answers than there are questions, or
            the journal *into* holds a run already.
    """
    questions = [q for where, q in find_open_questions(tape.history).values() if where == address]
    if not questions or answer is None:
        msg = f"effect {format_address(*address)} has no result"
        raise JournalError(f"{msg}; pass an answer for its question" if questions else f"{msg}: fork before it")
    try:
        given = split_edit_into_answers(
            answer if isinstance(answer, list | tuple) else [answer] * len(questions), questions
        )
    except DataError as error:
        msg = f"this answer does not fit effect {format_address(*address)}: {error.message}"
        raise JournalError(msg) from error
    target = MemoryJournal(redact="off") if into is None else as_journal(into)
    if target.records():
        msg = f"{target.name} holds a run already; a fork needs its own journal"
        raise JournalError(msg)
    replace_records_by_derived(target, tape.history.records, tape.journal)
    return target, {question.id: one for question, one in zip(questions, given, strict=True)}


def make_frame(frame: FrameType) -> Frame:
    """Return a running frame as a ``Frame``, for ``breakpoint()``."""
    code = frame.f_code
    return Frame(
        function=code.co_qualname,
        file=code.co_filename,
        line=frame.f_lineno,
        locals=dict(frame.f_locals),
        globals=frame.f_globals,
    )


def iterate_source_lines_around(frame: Frame, max_lines: int = 5) -> Iterator[tuple[int, str]]:
    """Yield up to *max_lines* source lines around the current line of a frame, with their numbers, from the cache of read files."""
    line = frame.line
    lines = frame.text.removesuffix("\n").split("\n") if frame.kind == "program" else linecache.getlines(frame.file)
    first = max(1, line - max_lines // 2)
    for number in range(first, min(len(lines), first + max_lines - 1) + 1):
        yield number, lines[number - 1].rstrip("\r\n")
