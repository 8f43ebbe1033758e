"""The options of runs, and the types of the models, sessions and dependencies that an engine accepts."""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, Required, TypeAlias, TypedDict

from stepengine.data.alike import list_names
from stepengine.data.checks import FLAG, NUMBER, TEXT, FieldCheck, allow_none, make_instance_check
from stepengine.data.definition import AgentDefinition
from stepengine.data.limits import Limits
from stepengine.data.questions import AnswerLike
from stepengine.data.state import AgentState
from stepengine.errors import InputError, ReplayDivergence

if TYPE_CHECKING:
    from stepengine.journal import InDoubt, JournalLike, OnDivergence
    from stepengine.journal.file_undo import Roots
    from stepengine.journal.recorded_forks import SharedBudget, Simulator
    from stepengine.models import Models, Provider
    from stepengine.sessions import SessionStore, VersionedStore

__all__ = (
    "LIMITS",
    "AgentLike",
    "ForkOptions",
    "ModelsLike",
    "Overrides",
    "RecordedForkOptions",
    "ReplayOptions",
    "ResumeOptions",
    "RunOptions",
    "SessionsLike",
    "StartForkOptions",
    "StartOptions",
    "StartResumeOptions",
    "validate_options",
)

AgentLike: TypeAlias = str | AgentDefinition

ModelsLike: TypeAlias = "Models | Provider | Mapping[str, Any] | None"
SessionsLike: TypeAlias = "SessionStore | VersionedStore | None"
Overrides: TypeAlias = Mapping[Callable[..., Any], Callable[..., Any]]


class RunOptions(TypedDict, total=False):
    """
    The options of ``run``, ``stream``, ``start`` and ``run_sync``, in addition to agent and prompt.

    Attributes:
        params: A JSON object, or the pydantic model of the agent's ``input_schema``.
        previous: The state to continue: it keeps history, view and context; the run gets an id, budgets and usage of its
            own, and the state itself is not changed. An agent without a system prompt sends that of the state, such as
            ``AgentState.from_dicts`` returns, unless another agent left it. In a session it takes the place of what the store holds.
        session_id: The conversation's id, for hooks and tools. With ``Engine(sessions=...)`` the run goes on from what that
            session holds, and is saved in it however it ends; it waits for the run that is in the session before it. What
            is said where the same agent waits for an answer is that answer. Without an id a new one is made, which
            ``RunResult.session_id`` tells.
        user_id: The user's id, for hooks and tools; a store keeps it.
        metadata: A JSON object for hooks and tools; a store adds it to the session's own.
        limits: Limits of this run.
        agent_models: Models of this run and its children in place of those that agents name, by agent id; they go before
            those of ``Engine(agent_models=...)``, and that of ``""`` holds for all others. They are recorded, so that the run
            is resumed, forked and replayed with them.
        answers: Answers to questions that the run will ask, by question id or text; those that *previous* waits for are
            named as in its ``pending``, and the run continues with the step that was suspended. Only an agent without a
            handler goes on from a state alone; for others ``AnswerRejected`` is raised, they need their journal, which a
            session store keeps.
        journal: Where the run is recorded: a journal that holds no run yet, or the path of its file; ``RUNS.db`` holds many.
        on_divergence: In a session, what becomes of the run that waits for this message when its agent was edited since:
            ``"raise"`` (default), ``"stop"`` or ``"keep"``, as for ``resume``.
    """

    params: Any
    previous: AgentState | None
    session_id: str | None
    user_id: str | None
    metadata: Mapping[str, Any] | None
    limits: Limits | None
    agent_models: Mapping[str, str] | None
    answers: Mapping[str, AnswerLike] | None
    journal: JournalLike | None
    on_divergence: OnDivergence


class StartOptions(RunOptions, total=False):
    """
    The options of ``start``: those of ``run`` and the behaviour of the handle.

    Attributes:
        keep_open: Whether the handle stays when its run has ended, and takes the next input as the next turn of the same
            conversation, with the same options, until ``shutdown``. Each turn is a run of its own; it goes on from the state
            of the last one, or from what ``Engine(sessions=...)`` holds. ``journal`` does not go with it.
        wait_for_answers: How many seconds a question stays open for ``handle.answer`` before it suspends the run; ``None``
            for ever. By default a run that can be resumed, because it has a journal or a session, is suspended at once, and
            any other waits for ever. While somebody reads ``handle.events(answers=True)`` a question stays open.
        run_id: The run's id, such as one under which a service told of the run before it began; by default a new one. 1 to 200
            ASCII letters, digits, ``_``, ``-`` and ``.``; unique, which nobody checks. Of the first turn where the handle is
            kept open.
    """

    keep_open: bool
    wait_for_answers: float | None
    run_id: str


class ReplayOptions(TypedDict, total=False):
    """
    The options of ``replay``, in addition to the journal.

    Attributes:
        agent: Id or definition of the agent; by default the engine's agent that the journal names.
        agent_models: Other models than the recorded ones, as for ``resume``.
        live: Kinds of effects that are performed for real: ``"tool_call"`` and ``"perform"``, whose results
            must be the recorded ones; or ``"model_call"`` alone: models answer anew, calls get the recorded results of equal
            calls, and the first call that is not recorded is the divergence.
        speed: How fast results come: 1.0 as they did, 2.0 twice as fast, no pause longer than ten seconds; by default all
            at once.
        complete: Whether the run has to come by every record (default), or may end before.
        on_divergence: ``"raise"`` (default), ``"stop"`` for a result with status ``failed``, ``"keep"`` as for ``resume``, or
            a function that looks at the ``ReplayDivergence`` of an effect of the same kind with another content, or of
            another end (``.kind``, ``.address``, ``.diff``), and returns whether what is recorded serves nevertheless.
        trust: Whether the journal is this user's. If not, nothing runs that *live* names, except tools that only read here:
            others may have written the calls and their permissions. A replay asks nobody, so it ends there with a
            ``JournalError``. By default (``None``) the user's state folder says it, as for ``resume``.
    """

    agent: AgentLike | None
    agent_models: Mapping[str, str] | None
    live: Collection[str]
    speed: float | None
    complete: bool
    on_divergence: OnDivergence | Callable[[ReplayDivergence], bool]
    trust: bool | None


class ResumeOptions(TypedDict, total=False):
    """
    The options of ``resume``, in addition to the journal.

    Attributes:
        answers: Answers to the open questions, by question id or text; with ``on_divergence="extend"`` also to those that
            the run will ask.
        agent: Id or definition of the agent; by default the engine's agent that the journal names.
        limits: Other limits than the recorded ones, such as more steps.
        agent_models: Other models than the recorded ones, as for ``run``, for what is not recorded yet. A step that is
            recorded with another model has diverged; see *on_divergence*.
        in_doubt: What becomes of an effect that was begun before a crash, has no result, and is not idempotent:
            ``"fail"`` (default) throws ``UnknownOutcome`` at the handler's yield, ``"retry"`` does it again, ``"ask"``
            suspends the run with a question.
        on_divergence: What becomes of a run whose agent was edited since: ``"raise"`` (default) raises ``ReplayDivergence``
            at the first effect that is not the recorded one, ``"stop"`` gives a result with status ``failed`` and that
            error, ``"keep"`` uses the recorded outcome where an effect of the same kind (a model call, a tool call, ...) is
            recorded there, with another prompt, model, tool description or input. What was accepted is written down, so
            that later replays accept exactly that. Where the kinds differ, or effects were added or removed, it raises.
            After the last record the code runs as it is now. ``"extend"`` keeps what is still equal, records anew from the
            first difference on, and replaces the journal at the end unless the run failed.
        allow_repeat: With ``on_divergence="extend"``: continue although effects that are cut off changed the world and may
            happen again.
        trust: Whether the journal is this user's. If not, a person is asked before anything runs that only the journal asks
            for: calls that it has begun and not ended, calls that a recorded reply of a model asks for, and permissions that it
            holds for calls which have not begun, or for good. What stood there is kept beside the journal. Permissions that
            somebody posted into its mailbox are not believed then, either. By default (``None``) the user's state folder says
            it: known are journals that this user's runs wrote from their first record on, also after a crash and wherever
            they were moved, those in the folder of recorded runs, and those in memory.
        now: Whether what the run sleeps for, and its patience for messages and children, is over at once, whatever time it
            is; false by default. What begins after that takes its time.
    """

    answers: Mapping[str, AnswerLike] | None
    agent: AgentLike | None
    limits: Limits | None
    agent_models: Mapping[str, str] | None
    in_doubt: InDoubt
    on_divergence: OnDivergence | Literal["extend"]
    allow_repeat: bool
    trust: bool | None
    now: bool


class StartResumeOptions(ResumeOptions, total=False):
    """
    The options of ``start_resume``: those of ``resume``, and how long questions stay open.

    Attributes:
        wait_for_answers: As with ``start``; 0 by default, so that the next question suspends the run again unless somebody
            reads ``handle.events(answers=True)`` by then.
    """

    wait_for_answers: float | None


class ForkOptions(TypedDict, total=False):
    """
    The options of ``fork``; for a fork with ``tools=`` see ``RecordedForkOptions``.

    Attributes:
        at: The last effect to keep: a number of the root's effects, or ``"path#number"``; -1 keeps none.
        edit: Another outcome for the last effect that is kept: a value, or a function from the recorded one to it.
        answers: Answers to questions that are open there, by question id or text.
        agent: Id or definition of the agent; by default the engine's agent that the journal names.
        limits: Other limits than the recorded ones.
        agent_models: Other models than the recorded ones, as for ``resume``.
        allow_repeat: Go on although effects that are cut off have changed the world and may happen again.
        into: Where the new journal goes; by default into memory.
        restore_files: The folder that ``file_tools`` was given, or several: the files that were written after that place are
            brought back to what they were then, or ``UndoRefused`` is raised; by default files stay as they are.
        run_id: The id of the new run; by default one that begins with the id of its parent.
        trust: Whether the journal is this user's, as for ``resume``.
    """

    at: Required[int | str]
    edit: Any
    answers: Mapping[str, AnswerLike] | None
    agent: AgentLike | None
    limits: Limits | None
    agent_models: Mapping[str, str] | None
    allow_repeat: bool
    into: JournalLike | None
    restore_files: Roots | None
    run_id: str
    trust: bool | None


class RecordedForkOptions(TypedDict, total=False):
    """
    Further options of ``fork`` with ``tools=``.

    Attributes:
        at: The last effect to keep: a number of the root's effects, or ``"path#number"``; -1 keeps none. By default that
            before the first one that is not as recorded. With -1, and *reuse* false, a model answers anew from its first call on.
        agent: Id or definition of the agent; by default the engine's agent that the journal names.
        simulate: A function of a ``ExternalCall`` and of the recorded calls of the same name, which makes up what a call gives that
            is not recorded: a ``ToolResult``, text, JSON, an error, or ``None`` when it cannot say.
        reuse: Whether a model call that equals a recorded one is answered by that (default), or asked anew.
        limits: Other limits than the recorded ones.
        agent_models: Other models than the recorded ones, as for ``resume``.
        budget: US dollars that model calls may cost, or a ``SharedBudget`` that several forks share.
        into: Where the new journal goes; by default into memory.
        trust: Whether the journal is this user's, as for ``resume``.
    """

    at: int | str | None
    agent: AgentLike | None
    simulate: Simulator | None
    reuse: bool
    limits: Limits | None
    agent_models: Mapping[str, str] | None
    budget: SharedBudget | Decimal | float | str | None
    into: JournalLike | None
    trust: bool | None


class StartForkOptions(ForkOptions, total=False):
    """
    The options of ``start_fork``: those of ``fork``, and how long questions stay open.

    Attributes:
        wait_for_answers: As with ``start_resume``.
    """

    wait_for_answers: float | None


LIMITS = allow_none(make_instance_check(Limits, "Limits(max_steps=20)"))
AGENT_MODELS = allow_none(
    FieldCheck(
        lambda value: isinstance(value, Mapping) and all(isinstance(m, str) for pair in value.items() for m in pair),
        'a mapping from agent ids to models, such as {"editor": "anthropic/claude-sonnet-4-5"}',
    )
)
RUN_ID = frozenset(string.ascii_letters + string.digits + "_-.")
MAX_RUN_ID_CHARS = 200
"""With the ending of a journal it is the name of a file, and file systems allow 255 bytes."""


def _is_run_id(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_RUN_ID_CHARS and RUN_ID.issuperset(value)


RUN = {
    "limits": LIMITS,
    "agent_models": AGENT_MODELS,
    "run_id": FieldCheck(_is_run_id, f"1 to {MAX_RUN_ID_CHARS} ASCII letters, digits, _, - and ."),
    "session_id": allow_none(TEXT),
    "user_id": allow_none(TEXT),
    "keep_open": FLAG,
    "wait_for_answers": allow_none(NUMBER),
    "now": FLAG,
}
MODEL_HINT = "; set a model with AgentDefinition(model=...), Engine(default_model=...), or for one run with agent_models={id: model}"


def validate_options(method: str, kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a copy of an engine method's options after validating names and values; *kind* is the ``TypedDict`` with the valid names.

    Raises:
        InputError: for one that does not exist, or that is of another kind.
    """
    for name in options:
        if name not in kind.__annotations__:
            hint = MODEL_HINT if name == "model" else ""
            msg = f"{method}() has no option {name!r}; valid options: {list_names(kind.__annotations__, name)}{hint}"
            raise InputError(msg, issues=(f"{name} is not an option",))
    issues = [RUN[name].find_problem(name, value) for name, value in options.items() if name in RUN]
    for issue in filter(None, issues):
        msg = f"{method}(): {issue}"
        raise InputError(msg, issues=(issue,))
    return dict(options)
