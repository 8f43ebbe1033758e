"""
``code_mode``: the tool ``run_code``, which runs programs that call other tools.

The body of a ``run_code`` call runs turns of its program in the sandbox. It yields the calls of each turn as one ``Parallel``, in their
order. So the engine checks, records and suspends each call, and knows nothing about programs. A replay returns the recorded turns. A
resumed run executes a recorded program again only if a later turn needs its variables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, assert_never, cast

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import Compute, RunObjects, get_program_line
from stepengine.data.hooks import StepContext
from stepengine.data.json import MAX_DEPTH_LEVELS, find_differences, freeze, replace_lone_surrogates
from stepengine.data.messages import JsonPart, ToolMessage, ToolResult
from stepengine.data.programs import ProgramVariables, RunningProgram
from stepengine.data.state import ChildResult
from stepengine.data.tools import ToolSpec, has_timed_out
from stepengine.data.yields import AgentCall, Ask, Member, Sleep, StepResult, Steps, ToolCall, make_program_parallel
from stepengine.errors import BadYield, DefinitionError, ReplayDivergence, StepEngineError, ToolError, ToolInputError
from stepengine.redaction import PLACEHOLDER
from stepengine.sandbox.byte_counter import ANSWER_BYTES, approximate_byte_size, inner_values, min_shallow_bytes
from stepengine.sandbox.check_workers import STOPPED, StopSignal
from stepengine.sandbox.program_checks import ANY_NAME, find_defined_names, find_program_problems, format_problems
from stepengine.sandbox.sessions import (
    PRINTED,
    SLEEP,
    CallAnswer,
    MontySandbox,
    ProgramCall,
    ProgramRaised,
    ProgramSession,
    ProgramTurn,
    ProgramWaiting,
    Sandbox,
)
from stepengine.sandbox.stubs import ProgramFunction, Stubs, make_stubs
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool, with_sandbox
from stepengine.workspace.after_fork import Lock

MOST = 10**15
"""The maximum of any limit; above some number the sandbox cannot count."""
AFRESH = "\nThis run of yours began without variables: those of your programs before it are gone."
GONE = " The variables of earlier programs are gone."
SEEN, PRINTED_BEFORE = "\nWhat was seen before it ran:\n", "\nBefore that it printed:\n"
BUSY = (
    "Nothing was run: another program of this run has not ended yet. Programs share their variables and run one after another; "
    "send this one when that has ended."
)


def _check_positive(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    """Raise ``DefinitionError`` unless a limit is a number above 0 and not too large: an attrs validator."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        msg = f"ProgramLimits({field.name}=...) must be a number above 0 and at most {MOST:,}, not {value!r}"
        raise DefinitionError(msg)


def _check_whole(owner: object, field: attrs.Attribute[Any], value: Any) -> None:
    """Raise ``DefinitionError`` unless a limit is a positive whole number: an attrs validator."""
    _check_positive(owner, field, value)
    if not isinstance(value, int):
        msg = f"ProgramLimits({field.name}=...) must be a whole number, not {value!r}"
        raise DefinitionError(msg)


@frozen(kw_only=True)
class ProgramLimits:
    """
    The limits of one program, or of one sandboxed handler.

    A program can catch the ``MemoryError`` of *memory*, and the ``TypeError`` or ``ToolError`` of *value*. Another exceeded limit ends it
    with an error result that names the limit.

    Attributes:
        calls: The most calls, including waits. Handlers have no such limit.
        seconds: The computing time between two waits; waiting does not count.
        memory: The bytes that it may use.
        printed: The bytes of UTF-8 text that it may print.
        value: The bytes of JSON of one argument or result of a call, or of the text of its error.
        turn: The bytes that a handler may exchange with the host in one turn. Programs have no such limit.
        total: The bytes that it may exchange with the host in all; they are in the memory of this process.
    """

    calls: int = attrs.field(default=1_000, validator=_check_whole)
    seconds: float = attrs.field(default=5.0, validator=_check_positive)
    memory: int = attrs.field(default=64 * 1024 * 1024, validator=_check_whole)
    printed: int = attrs.field(default=100_000, validator=_check_whole)
    value: int = attrs.field(default=8 * 1024 * 1024, validator=_check_whole)
    turn: int = attrs.field(default=32 * 1024 * 1024, validator=_check_whole)
    total: int = attrs.field(default=128 * 1024 * 1024, validator=_check_whole)


def code_mode(
    *tools: Tool[..., Any] | ToolSpec,
    agents: Sequence[AgentDefinition[Any]] = (),
    ask: bool = False,
    direct: Sequence[Tool[..., Any]] = (),
    limits: ProgramLimits = ProgramLimits(),
    name: str = "run_code",
    sandbox: Sandbox | None = None,
    where: Literal["here", "provider"] = "here",
) -> Tool[..., Any]:
    """
    Return a tool with which a model runs programs that call other tools as functions.

    Each call of a program is checked and recorded like any other call. A run that waits for a person is suspended in the middle of its
    program. The model reads a typed function for each tool.

    Args:
        tools: The tools that programs may call; a ``ToolSpec`` means the engine's tool with its name. The agent that has ``run_code``
            does not need them in its own ``tools``.
        agents: The agents that programs may run, each a function of its prompt and params.
        ask: Whether programs may ask a person, with ``ask(question, options)``.
        direct: More tools that programs may call, and that the model may also call directly. They need not be in the agent's ``tools``.
        limits: The limits of one program.
        name: The tool's name.
        sandbox: The sandbox that runs the programs; by default Monty, in worker processes that all such tools of this process share.
        where: With ``"provider"``, the model's provider runs the programs if it supports that for the model; ``Programs`` then replaces
            this tool in the model's settings. In other cases, and by default, they run in *sandbox*.

    Raises:
        DefinitionError: without tools and agents, for a value of another type, and for a duplicate tool. If the extra ``programs`` is not
            installed, a run raises it when a program has to run. A replay of ended programs needs no sandbox.
    """
    _check_where(where, agents, ask=ask)
    tools = (*tools, *direct)
    specs = _check_and_collect_specs(tools, agents, name)
    stubs = make_stubs(specs, agents, ask=ask)
    # The tools themselves and not their names, so that the agent need not have them: the body of a tool may call the
    # tools in its `uses=`, and the model does not see them (programs:PG4).
    uses = [*[one if isinstance(one, Tool) else one.name for one in tools], *agents]
    programs = _ProgramConfig(name, stubs, limits, sandbox or get_shared_sandbox())

    # By itself a program reads and changes nothing; each of its calls is checked by its own category.
    @tool(name=name, description=stubs.description, uses=uses, category="read", about=())
    def run_code(ctx: StepContext[Any], code: str, restart: bool = False) -> Steps[str]:  # noqa: FBT001, FBT002 - the model's
        """
        Run a program.

        Args:
            ctx: The call's.
            code: The program.
            restart: Forget the variables of earlier programs.
        """
        return (yield from programs.run(ctx, code, restart=restart))

    return with_sandbox(
        run_code, lambda: programs.sandbox.name, [one.name for one in direct], at_provider=where == "provider"
    )


def _check_where(where: str, agents: Sequence[Any], *, ask: bool) -> None:
    """Raise ``DefinitionError`` for an unknown *where*, and for agents or ``ask`` at a provider."""
    if where not in {"here", "provider"}:
        msg = f"code_mode(where=...) must be 'here' or 'provider', not {where!r}"
        raise DefinitionError(msg)
    if where == "provider" and (agents or ask):
        given = "agents=[...]" if agents else "ask=True"
        msg = f"code_mode(where='provider') cannot have {given}: programs at a provider call only tools; leave out one of the two"
        raise DefinitionError(msg)


def _check_and_collect_specs(tools: Sequence[Any], agents: Sequence[Any], name: str) -> list[ToolSpec]:
    """Check the tools and agents, and return the specifications of the tools that programs may call."""
    given: list[tuple[Any, Any]] = [
        *[(one, Tool | ToolSpec) for one in tools],
        *[(one, AgentDefinition) for one in agents],
    ]
    for one, kind in given:
        if not isinstance(one, kind):
            msg = (
                f"code_mode takes tools, more tools in direct=[...], and agent definitions in agents=[...], not {one!r}"
            )
            raise DefinitionError(msg)
    if not given:
        msg = "code_mode needs at least one tool or agent that programs may call"
        raise DefinitionError(msg)
    specs = [one.spec if isinstance(one, Tool) else one for one in tools]
    own = next((spec.name for spec in specs if spec.ends_turn), None)
    if own is not None:
        msg = f"a program cannot call the tool {own!r}, which ends a turn; give it to the agent itself"
        raise DefinitionError(msg)
    names = [name, *[spec.name for spec in specs]]
    twice = next((one for n, one in enumerate(names) if one in names[:n]), None)
    if twice is not None:
        msg = (
            f"code_mode got two tools named {twice!r}, counting itself; rename one. Programs can also call the tools in "
            "direct=[...], so list each tool once"
        )
        raise DefinitionError(msg)
    return specs


_SHARED: list[MontySandbox] = []
_LOCK = Lock()


def get_shared_sandbox() -> MontySandbox:
    """Return the sandbox that all programs of this process share by default; the first call creates it."""
    with _LOCK:
        if not _SHARED:
            _SHARED.append(MontySandbox())
        return _SHARED[0]


class _RecordedTurn(NamedTuple):
    """A recorded turn that no session has executed in this process: its program, its request and its recorded result."""

    run: _ProgramRun
    ask: Callable[[ProgramSession], ProgramTurn]
    recorded: Mapping[str, Any]


class _RunSession(ProgramVariables):
    """The sandbox session of one run, which is opened when it is needed, and the names that earlier programs defined."""

    def __init__(self) -> None:
        self.session: ProgramSession | None = None
        self.names: set[str] = set()
        self.recalled: list[_RecordedTurn] = []
        self.seed = 0
        self.is_new = True
        self.programs: _ProgramConfig | None = None
        self.failure: StepEngineError | None = None
        """Why the recorded programs could not be executed again."""
        self._running: _ProgramRun | None = None

    def try_claim(self, run: _ProgramRun, recorded: Any) -> bool:
        """
        Claim the session, and return whether the program may run: False while another program runs.

        A recorded program gets the same answer as in its record.
        """
        if recorded is not None and recorded.get("refused") == BUSY:
            return False
        with _LOCK:
            if self._running is not None:
                # A recorded program has run, whichever program holds the claim.
                return recorded is not None
            self._running = run
            return True

    def release_claim(self, run: _ProgramRun) -> None:
        """End the claim of a program, so that the next program may run; nothing if it has no claim."""
        with _LOCK:
            if self._running is run:
                self._running = None

    def open_and_replay(self, programs: _ProgramConfig) -> ProgramSession:
        """
        Open the session if necessary, execute its stored recorded turns, and return it; raise an error if a turn differs from its record.

        Raises:
            ReplayDivergence: when a turn differs from its record.
            ToolError: when there is no worker, and when a recorded turn exceeds a limit now, for example on a slower machine.
        """
        if self.session is None:
            limits = programs.limits
            self.session = programs.sandbox.open(
                programs.stubs.functions,
                seconds=limits.seconds,
                memory=limits.memory,
                printed=limits.printed,
                seed=self.seed,
            )
        # A failed session stays failed. An inspection hides the error, so the next program raises it again:
        # it would otherwise continue with variables that differ from the record.
        if self.failure is not None:
            raise self.failure
        session, recalled, self.recalled = self.session, self.recalled, []
        for run, ask, recorded in recalled:
            try:
                turn = ask(session)
                if isinstance(turn, ProgramRaised) and turn.is_fatal:
                    limit = _explain_exceeded_limit(turn, programs.limits)
                    msg = f"the variables of earlier programs could not be restored, since one of these did not end again: {limit}{turn.text}"
                    raise ToolError(msg)
                run.require_matches_record(recorded, turn, session)
            except StepEngineError as error:
                self.failure = error
                raise
        return session

    def close(self) -> None:
        """Close the session, and forget its variables, its recorded turns and the error of an earlier replay."""
        session, self.session, self.failure = self.session, None, None
        self.names.clear()
        self.recalled.clear()
        if session is not None:
            session.close()

    async def aclose(self) -> list[str]:
        """Close the session, and return no sentences for the run's result."""
        self.close()
        return []

    def variables(self) -> Mapping[str, str]:
        """Return the ``repr`` of each variable of the session, opened and replayed if necessary; none if that fails."""
        session = self.try_open_and_replay()
        looked: Any = getattr(session, "variables", None)  # sessions of other sandboxes may lack it
        try:
            found: Mapping[str, str] = {} if looked is None else looked(sorted(self.names - {ANY_NAME}))
        except ToolError:
            return {}
        return found

    def try_open_and_replay(self) -> ProgramSession | None:
        """Open the session and execute its recorded turns for an inspection; return ``None`` if this fails or no program has started."""
        if self.programs is None or (self.session is None and not self.recalled):
            return None
        # An inspection does not fail because the sandbox is missing or the replay diverges.
        try:
            return self.open_and_replay(self.programs)
        except StepEngineError:  # not installed, a forked process, or a divergence
            return None


class _ProgramConfig:
    """The configuration that all calls of one program tool share."""

    def __init__(self, name: str, stubs: Stubs, limits: ProgramLimits, sandbox: Sandbox) -> None:
        self.name = name
        self.stubs = stubs
        self.limits = limits
        self.sandbox = sandbox

    def run(self, ctx: StepContext[Any], code: str, *, restart: bool) -> Steps[str]:
        """Run a program with all its calls, and return its result as text or raise its error."""
        run = _ProgramRun(self, ctx, code)
        turn: Mapping[str, Any] = {"calls": ()}
        try:
            turn = yield from run.start_program(restart=restart)
            while "calls" in turn:
                turn = yield from run.perform_and_answer_calls(turn)
        finally:
            if "calls" in turn:  # it was closed before its end, and is not resumed in this process
                run.close()
            run.release_session()
        return run.finish_program(turn)


class _ProgramRun(RunningProgram):
    """
    The execution of one program.

    Its turns are recorded as JSON.

    - A waiting program is ``{"calls": [...], "line": 5}``. Each call is ``{"id", "name", "line", "input"}``, and an invalid call has
      ``"error"`` and ``"words"`` instead of ``"input"``. The first such turn has the checker's warnings in ``"told"``, if there are any.
    - An ended program is ``{"said": ...}``, and a failed one ``{"error": ...}``, with ``"lost"`` if its session ended, too.
    - A refused program is ``{"refused": ...}``.
    """

    def __init__(self, programs: _ProgramConfig, ctx: StepContext[Any], code: str) -> None:
        self._programs = programs
        self._ctx = ctx
        self.code = code
        # From the body's own random numbers, which depend on seed and path: a program that runs again gets the same seed.
        self._seed = ctx.random.getrandbits(32)
        self._kept: _RunSession | None = None
        self._is_closed = False
        self._check = StopSignal()
        self._calls = 0
        self._moved = 0
        self._room = 0
        self.line = 0
        self._told = ""
        self._is_first = False

    # --- turns --------------------------------------------------------------------------------------------------------

    def start_program(self, *, restart: bool) -> Steps[Mapping[str, Any]]:
        """Check and start the program, and return its first turn as JSON."""
        # The recorded time. The sandbox has no clock, so a program that runs again sees the same times.
        now = self._ctx.now()

        def run_first_turn(run_objects: RunObjects, recorded: Any) -> Mapping[str, Any]:
            """Claim the session, check the program and run its first turn; return the turn or a refusal as JSON."""
            run_session: _RunSession = run_objects.get(self._programs, _RunSession)
            if not run_session.try_claim(self, recorded):
                return {"refused": BUSY}
            self._kept, run_session.programs = run_session, self._programs
            self._is_first, run_session.is_new = run_session.is_new and not restart, False
            if restart:
                run_session.close()
            # A recorded program is not checked again: a newer version must not refuse a program that has run, nor run one
            # that was refused.
            if recorded is None:
                refused = self._check_and_find_refusal(run_session)
                if refused:
                    return {"refused": refused}
            elif "refused" in recorded:
                return cast("Mapping[str, Any]", recorded)
            if run_session.session is None and not run_session.recalled:
                run_session.seed = self._seed
            return self._run_or_store_turn(run_session, lambda session: session.feed(self.code, now), recorded)

        return (yield from self._compute_turn(run_first_turn))

    def perform_and_answer_calls(self, waiting: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
        """Perform the calls for which the program waits, send it the results, and return its next turn."""
        self._told = waiting.get("told", self._told)
        self.line = waiting["line"]
        calls = waiting["calls"]
        # All calls of the turn start together, as one `Parallel`: that is the meaning of `asyncio.gather`. The engine checks,
        # records and suspends them (programs:PG22).
        self._calls += len(calls)
        asked = [(call, self._effect_from_call(call)) for call in calls]
        answers = {call["id"]: member for call, member in asked if isinstance(member, CallAnswer)}
        open_ = [(call, member) for call, member in asked if not isinstance(member, CallAnswer)]
        came = yield from self._perform_calls([member for _, member in open_], [call["line"] for call, _ in open_])
        answers |= {call["id"]: self._answer_from_result(value) for (call, _), value in zip(open_, came, strict=True)}
        # Counted here and not when a turn runs, so that a resumed run has the same count.
        self._moved += _approximate_input_bytes(calls) + sum(
            [ANSWER_BYTES + approximate_byte_size(answer.value) for answer in answers.values()]
        )
        now, kept = self._ctx.now(), cast("_RunSession", self._kept)
        return (
            yield from self._compute_turn(
                lambda _, known: self._run_or_store_turn(kept, lambda session: session.answer(answers, now), known)
            )
        )

    def _perform_calls(self, members: Sequence[Member[Any]], lines: Sequence[int]) -> Steps[Sequence[object]]:
        """Perform calls in parallel, and return the result of each, or the exception that prevented it."""
        if not members:
            return ()
        try:
            result: StepResult = yield make_program_parallel(members, lines)
        except StepEngineError as error:
            if len(members) == 1:
                return (error,)
        else:
            return cast("Sequence[object]", result.value)
        # One of them is invalid, so none has started: perform each alone, so that only the invalid one gets the error.
        came: list[object] = []
        for member, line in zip(members, lines, strict=True):
            came += yield from self._perform_calls([member], [line])
        return came

    def _compute_turn(self, work: Any) -> Steps[Mapping[str, Any]]:
        """Run *work* as a ``Compute`` effect, and return its turn as JSON."""
        turn: Mapping[str, Any] = (yield cast("Any", Compute(work, self.close, self))).value
        return turn

    def _check_and_find_refusal(self, run_session: _RunSession) -> str:
        """Check the program, and return why it must not start, or ``""``. Store possible problems for later error messages."""
        programs = self._programs
        # The check of the text comes first, since it is quick and needs no worker; the sandbox's own check is second
        # (programs:PG24).
        wrong = find_program_problems(self.code, programs.stubs, run_session.names)
        if not wrong:
            checked = programs.sandbox.check(self.code, programs.stubs, run_session.names, self._check)
            wrong = checked.refused
            self._told = format_problems(checked.told, self.code) if checked.told else ""
        return (
            f"Nothing was run, the program has to be mended first:\n{format_problems(wrong, self.code)}"
            if wrong
            else ""
        )

    def _run_or_store_turn(
        self, run_session: _RunSession, run_turn: Callable[[ProgramSession], ProgramTurn], recorded: Any
    ) -> Mapping[str, Any]:
        """Run a turn and return it as JSON; a *recorded* turn is returned unchanged, and stored until the session needs it."""
        # Most recorded programs had ended before the process died, and their variables are never read again. A stored turn
        # is executed when a later turn of the same session runs.
        if recorded is not None:
            if recorded.get("lost"):
                run_session.close()
            else:
                run_session.recalled.append(_RecordedTurn(self, run_turn, recorded))
            return cast("Mapping[str, Any]", recorded)
        try:
            session = run_session.open_and_replay(self._programs)
            if self._is_closed:  # closed before the session was opened
                raise ToolError(STOPPED)  # noqa: TRY301
            turn = run_turn(session)
        except ToolError as error:  # there is no worker
            run_session.close()
            return {"error": f"{error.message}{GONE}", "lost": True}
        form = self._encode_turn(turn, session)
        # The limit refuses all calls of the turn before any is made: the program could not know which half of a `gather`
        # was carried out.
        why = self._find_exceeded_limit(turn, form) if isinstance(turn, ProgramWaiting) else ""
        if why:
            where = f" in line {form['line']}" if form["line"] else ""
            why = f"The program was ended{where}: {why}.{GONE}"
            form = {"error": f"{why}{_format_output_for_error(session)}", "lost": True}
        if form.get("lost"):
            run_session.close()
        elif self._told and "calls" in form and not self._calls:
            form["told"] = self._told
        return form

    def _find_exceeded_limit(self, turn: ProgramWaiting, encoded_turn: Mapping[str, Any]) -> str:
        """Return which limit the calls of all turns exceed, or ``""``."""
        limits = self._programs.limits
        if self._calls + len(turn.calls) > limits.calls:
            return f"it made more than {limits.calls:,} calls"
        if self._moved + _approximate_input_bytes(encoded_turn["calls"]) > limits.total:
            return f"the values of its calls have more than {limits.total:,} bytes"
        return ""

    def require_matches_record(self, recorded: Mapping[str, Any], turn: ProgramTurn, session: ProgramSession) -> None:
        """Raise ``ReplayDivergence`` if a turn differs from its record. Redacted values are not compared."""
        # The checker's warnings are no result of the program, which is not checked again.
        now = _drop_warnings(freeze(self._encode_turn(turn, session)))
        recorded = _drop_warnings(recorded)
        # A redacted secret is no difference: the program has it, and the journal must not.
        # Lines are for display only.
        other = [
            one
            for one in find_differences(recorded, now)
            if not _has_placeholder(one.recorded) and not _is_line_pointer(one.pointer)
        ]
        if not other:
            return
        line = recorded.get("line") or now.get("line") or 1
        msg = (
            f"a recorded program behaves differently in line {line}, `{get_program_line(self.code, line)}`, when "
            f"{self._programs.sandbox.name} runs it again to restore its variables. "
            "Resume the run in the sandbox that recorded it, or fork the run before the program"
        )
        fields = [(one.pointer, repr(one.recorded), repr(one.now)) for one in other]
        raise ReplayDivergence(msg, kind="changed", diff=fields)

    def close(self) -> None:
        """Stop the check of the program and close the session of the run, from any thread."""
        self._is_closed = True
        self._check.send()
        if self._kept is not None:
            self._kept.close()

    def release_session(self) -> None:
        """Allow the next program of the session to start."""
        if self._kept is not None:
            self._kept.release_claim(self)

    # --- inspection ---------------------------------------------------------------------------------------------------

    def printed(self) -> str | None:
        """Return the output so far; ``None`` without a session. A session with recorded turns is opened and replayed first."""
        session = None if self._kept is None else self._kept.try_open_and_replay()
        return None if session is None else session.printed

    # --- records ------------------------------------------------------------------------------------------------------

    def _encode_turn(self, turn: ProgramTurn, session: ProgramSession) -> dict[str, Any]:
        """Return a turn as JSON: its calls, whose bytes are counted, its result as text, or its error with the output before it."""
        if isinstance(turn, ProgramWaiting):
            self._room = self._programs.limits.memory  # one value may be an argument of all calls
            return {"line": turn.line, "calls": [self._encode_call_and_count_bytes(call) for call in turn.calls]}
        if isinstance(turn, ProgramRaised):
            told = f"{SEEN}{self._told}" if self._told else ""
            lost = GONE if turn.is_fatal else ""
            text = f"{_explain_exceeded_limit(turn, self._programs.limits)}{turn.text}{lost}{told}{_format_output_for_error(session)}"
            return {"error": replace_lone_surrogates(text), **({"lost": True} if turn.is_fatal else {})}
        # A call that is never awaited raises no error, and the model would assume that it was made.
        forgotten = [
            f"{f'line {call.line}: ' if call.line else ''}{call.name}(...) was called and never awaited, so it did not run"
            for call in turn.unawaited
        ]
        value = "" if turn.value is None else _format_last_value(turn.value, self._programs.limits.value)
        said = "\n".join([part for part in (session.printed.rstrip("\n"), value, *forgotten) if part])
        return {"said": replace_lone_surrogates(said)}

    def _encode_call_and_count_bytes(self, call: ProgramCall) -> dict[str, Any]:
        """Return a call as JSON: its tool input, or the error of arguments that are wrong or exceed the memory limit."""
        form: dict[str, Any] = {"id": call.id, "name": call.name, "line": call.line}
        try:
            given = {} if call.is_cut else self._bind_arguments(call)
            self._room -= self._validate_and_measure_json(given)
            if call.is_cut or self._room < 0:
                msg = f"what is given to calls at once has more than {self._programs.limits.memory:,} bytes"
                raise ValueError(msg)  # noqa: TRY301 - answered as any other wrong argument
            given = freeze(given)
            freeze([[[[[[given]]]]]])  # the record is nested some levels deeper
            return {**form, "input": given}
        # The error of wrong arguments is recorded and not raised: it becomes an exception at that line of the program, which
        # may catch it, and a replay raises the same one.
        except (TypeError, ValueError, StepEngineError) as error:
            kind = (
                "ValueError" if call.name == SLEEP else "NameError" if isinstance(error, _NoFunction) else "TypeError"
            )
            return {**form, "error": kind, "words": replace_lone_surrogates(str(error))}

    def _bind_arguments(self, call: ProgramCall) -> dict[str, Any]:
        """
        Return the tool input for a call of the program.

        Raises:
            TypeError: for arguments that do not fit.
            ValueError: for an unknown function and an invalid sleep.
        """
        if call.name == SLEEP:
            return {"seconds": _get_sleep_seconds(call)}
        function = self._programs.stubs.functions.get(call.name)
        if function is None:
            msg = f"name {call.name!r} is not defined"
            raise _NoFunction(msg)
        return function.make_tool_input(call.args, call.kwargs)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _effect_from_call(self, call: Mapping[str, Any]) -> Member[Any] | CallAnswer:
        if "error" in call:
            return CallAnswer(call["words"], call["error"])
        given = call["input"]
        if call["name"] == SLEEP:
            return Sleep(given["seconds"])
        function = self._programs.stubs.functions.get(call["name"])
        if function is None:  # the function existed when the program was recorded
            return CallAnswer(f"name {call['name']!r} is not defined", "NameError")
        try:
            return self._make_effect_or_answer(function, given)
        except (TypeError, ValueError, StepEngineError) as error:
            return CallAnswer(str(error), "TypeError")

    def _make_effect_or_answer(
        self, function: ProgramFunction, tool_input: Mapping[str, Any]
    ) -> Member[Any] | CallAnswer:
        """Return the effect for a call of a tool, an agent or ``ask``; for the catalogue's functions the answer."""
        match function.kind:
            case "tool":
                return ToolCall(function.of, tool_input)
            case "agent":
                return AgentCall(function.of, tool_input.get("prompt") or "", params=tool_input.get("params"))
            case "ask":
                return Ask(tool_input["question"], options=tool_input.get("options") or ())
            # Answered here: a search of the catalogue is no effect, since its result depends only on the tools.
            case "search":
                return CallAnswer(self._programs.stubs.search(str(tool_input["query"])))
            case "describe":
                return CallAnswer(self._programs.stubs.describe(str(tool_input["name"])))
            case _ as never:
                assert_never(never)

    def _validate_and_measure_json(self, value: object) -> int:
        """Return the bytes of a value as JSON; raise ``ValueError`` if it is larger than the limit or nested too deeply."""
        most = self._programs.limits.value
        check_depth_and_size(value, most)
        size = len(json.dumps(value, ensure_ascii=False, default=_raise_not_json).encode(errors="replace"))
        if size > most:
            msg = f"a value of {size:,} bytes; one may have {most:,}"
            raise ValueError(msg)
        return size

    def _answer_from_result(self, result: object) -> CallAnswer:
        """Return the answer to the program for a result or an error; a too large one becomes an error that names its size."""
        answer = _make_full_answer(result)
        # Results and texts of errors are limited, too: a gigabyte would be copied into the worker, whose own limit would end it
        # without naming the call.
        try:
            self._validate_and_measure_json(answer.value)
        except ValueError as error:
            return CallAnswer(f"the call gave {error}", answer.error or "ToolError")
        return answer

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish_program(self, turn: Mapping[str, Any]) -> str:
        """Record the names that the ended program defined, and return its result or raise its error."""
        note = AFRESH if self._is_first and self._has_earlier_results() else ""
        if not {"refused", "lost"} & turn.keys():
            # It is unknown how far a failed program ran, so the next program may use any name that it may have defined.
            cast("_RunSession", self._kept).names |= find_defined_names(self.code)
        wrong = turn.get("refused") or turn.get("error")
        if wrong:
            msg = f"{wrong}{note}"
            raise ToolError(msg)
        return f"{turn['said'] or 'The program ended; it printed nothing, and its last line has no value.'}{note}"

    def _has_earlier_results(self) -> bool:
        name = self._programs.name
        messages = self._ctx.agent_state.message_history
        return any(isinstance(one, ToolMessage) and one.tool_name == name and one.status == "ok" for one in messages)


def _approximate_input_bytes(calls: Sequence[Mapping[str, Any]]) -> int:
    return sum([ANSWER_BYTES + approximate_byte_size(call.get("input", {})) for call in calls])


class _NoFunction(ValueError):
    """A program calls a function that it does not have."""


def _drop_warnings(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn as JSON without the checker's warnings."""
    kept = {name: value for name, value in turn.items() if name != "told"}
    if "error" not in kept:
        return kept
    before, _, seen = kept["error"].partition(SEEN)
    _, mark, printed = seen.partition(PRINTED_BEFORE)
    return {**kept, "error": f"{before}{mark}{printed}"}


def _is_line_pointer(pointer: str) -> bool:
    """Return True if a JSON pointer leads to a line number in a recorded turn."""
    return pointer == "/line" or (pointer.startswith("/calls/") and pointer.endswith("/line"))


def _has_placeholder(recorded: object) -> bool:
    """Return True if a secret or machine name in a recorded value was replaced by a placeholder."""
    return isinstance(recorded, str) and PLACEHOLDER.search(recorded) is not None


def _format_output_for_error(session: ProgramSession) -> str:
    """Return a section with the program's output for an error message; ``""`` if it printed nothing."""
    return f"{PRINTED_BEFORE}{replace_lone_surrogates(session.printed)}" if session.printed else ""


def _explain_exceeded_limit(turn: ProgramRaised, limits: ProgramLimits) -> str:
    """Return a sentence about the limit that ended a program; ``""`` if no limit did."""
    named = {
        "TimeoutError": f"A program may compute for {limits.seconds:g} s between two waits. ",
        "MemoryError": f"A program may use {limits.memory:,} bytes. ",
        PRINTED: f"A program may print {limits.printed:,} characters. ",
    }
    return named.get(turn.kind, "") if turn.is_fatal or turn.kind == PRINTED else ""


def _get_sleep_seconds(call: ProgramCall) -> float:
    """Return the seconds of a call of ``asyncio.sleep``; raise ``ValueError`` for an invalid duration."""
    seconds = call.args[0] if call.args else call.kwargs.get("delay", 0)
    try:
        Sleep(seconds)
    except BadYield:
        msg = f"asyncio.sleep takes seconds, from 0 to a hundred years, not {seconds!r}"
        raise ValueError(msg) from None
    return float(seconds)


def _exception_name(failed_result: ToolResult) -> str:
    """Return the name of the exception that a failed call raises in its program."""
    if failed_result.status == "denied":
        return "PermissionError"
    return "TimeoutError" if has_timed_out(failed_result) else "ToolError"


def _make_full_answer(result: object) -> CallAnswer:
    """Return the answer to the program for a result or an error, without a limit of its size."""
    if isinstance(result, ToolResult):
        if result.is_error:
            return CallAnswer(result.text, _exception_name(result))
        result = _tool_result_value(result)
    elif isinstance(result, ChildResult):
        if result.is_error:
            return CallAnswer(f"{result.agent_id} failed: {result.why or result.status.value}", "ToolError")
        result = result.output if result.output is not None else result.text
    elif isinstance(result, BaseException):
        return CallAnswer(str(result), "TypeError" if isinstance(result, ToolInputError) else "ToolError")
    return CallAnswer(_to_plain_json(result))


def _tool_result_value(result: ToolResult) -> Any:
    if result.structured is not None:
        return result.structured
    return next((part.value for part in result.content if isinstance(part, JsonPart)), result.text)


def _raise_not_json(value: object) -> object:
    """Raise ``TypeError`` for a value that is not JSON: the ``default`` of ``json.dumps``."""
    msg = f"a value of type {type(value).__name__} is no JSON"
    raise TypeError(msg)


def _to_plain_json(value: Any) -> Any:
    """Return a value as plain JSON: containers become lists and dicts, and values of other types become their text."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_json(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def check_depth_and_size(value: object, max_bytes: int) -> None:
    """
    Raise ``ValueError`` if a value is nested too deeply or certainly larger than *max_bytes* bytes, without encoding the value.

    A short program can make a value in which each list occurs twice in the next one, whose text would be endless. So each list is
    visited once for each level, with its number of occurrences.
    """
    level: dict[int, tuple[Any, int]] = {0: ((value,), 1)}
    size = 0
    for _ in range(MAX_DEPTH_LEVELS + 1):
        below: dict[int, tuple[Any, int]] = {}
        for holder, times in level.values():
            members = [*holder, *holder.values()] if isinstance(holder, Mapping) else holder
            size += times * (2 * len(members) + sum(map(_min_shallow_json_chars, members)))
            for one in members:
                if (inner := inner_values(one)) is not None:
                    below[id(one)] = inner, times + below.get(id(one), (None, 0))[1]
        if size > max_bytes + 2:
            msg = f"a value of more than {max_bytes:,} bytes; one may have {max_bytes:,}"
            raise ValueError(msg)
        if not below:
            return
        level = below
    msg = f"a value that is nested deeper than {MAX_DEPTH_LEVELS} levels"
    raise ValueError(msg)


def _min_shallow_json_chars(value: object) -> int:
    """Return a lower bound of the characters of a value in JSON, without its members."""
    if isinstance(value, int):
        return value.bit_length() * 3 // 10  # log10(2) is above 0.3
    return min_shallow_bytes(value)


def _format_last_value(value: Any, max_bytes: int) -> str:
    """Return the last value of a program as text: a text unchanged, else JSON or ``repr``; a note if it exceeds *max_bytes*."""
    if isinstance(value, str):
        return value
    try:
        check_depth_and_size(value, max_bytes)
    except ValueError as error:
        return f"The value of its last line is not shown: {error}."
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        pass
    try:
        return repr(value)
    except ValueError as error:
        return f"The value of its last line is not shown: {error}"
