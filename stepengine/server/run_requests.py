"""Requests about runs, and their checks, which are the same for each store: ``StartRequest``, ``ForkRun``, ``ResumeRun``, owners and scopes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs import frozen
from pydantic import Field

from stepengine.data.alike import list_names
from stepengine.data.codec import plain
from stepengine.data.limits import DEFAULT_LIMITS, Limits
from stepengine.data.messages import ImagePart, UserMessage
from stepengine.data.questions import DOUBT, PAGE, Answer, AnswerLike, Question
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.errors import InputError, StepEngineError
from stepengine.journal.messages import match_answers
from stepengine.journal.recorded_forks import ForkTools
from stepengine.server.bodies import MAX_TEXT, Body, make_input_error
from stepengine.server.ledger import OPEN, RunRow
from stepengine.server.problems import Problem

if TYPE_CHECKING:
    from stepengine.journal.store import Journal
    from stepengine.server.access import Caller


class ResumeRun(Body):
    """How to resume a run if its code diverges from its record."""

    on_divergence: Annotated[
        Literal["raise", "keep", "extend"],
        Field(
            description="`raise` leaves the run as it was; `keep` uses the recorded results of effects of the same kind; `extend` "
            "records again from the first difference on. `keep` and `extend` need the scope admin."
        ),
    ] = "raise"
    allow_repeat: Annotated[
        bool, Field(description="With `extend`: continue even if effects on the outside world may happen again.")
    ] = False


class AgentChanges(Body):
    """Changes to the agent of a forked run; null keeps the value."""

    system_prompt: Annotated[str | None, Field(max_length=MAX_TEXT)] = None
    instructions_prompt: Annotated[str | None, Field(max_length=MAX_TEXT)] = None
    step_prompt: Annotated[str | None, Field(max_length=MAX_TEXT)] = None
    model: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=10_000_000)] = None


class ForkRun(Body):
    """The effect at which a fork starts, its changes, and what answers its tools."""

    at: Annotated[
        int | str | None,
        Field(
            description="The last effect to keep: its number, or path#number. With `tools`, by default the one before the first difference."
        ),
    ] = None
    edit: Annotated[Any, Field(description="A new outcome for that effect.")] = None
    changes: Annotated[
        AgentChanges | None,
        Field(description="A new prompt, model or settings from there on; earlier replies are kept."),
    ] = None
    allow_repeat: Annotated[bool, Field(description="Fork even if effects on the outside world may happen again.")] = (
        False
    )
    tools: Annotated[
        ForkTools | None,
        Field(
            description="Answer tool calls from the record. Of the other calls, perform none, those that may be repeated, or all; "
            "all needs the scope admin."
        ),
    ] = None
    simulate: Annotated[
        dict[str, Any] | None,
        Field(description="With `tools`: results of calls that are not recorded, by tool name.", max_length=100),
    ] = None
    reuse: Annotated[bool, Field(description="With `tools`: answer model calls that match the record.")] = True
    budget: Annotated[
        float | None, Field(description="With `tools`: the most US dollars for its model calls.", gt=0)
    ] = None

    @property
    def given_changes(self) -> dict[str, Any]:
        """The changes of the agent that were given."""
        return {} if self.changes is None else self.changes.model_dump(exclude_none=True)

    @property
    def edit_options(self) -> dict[str, Any]:
        """The option ``edit`` of a fork, if the effect gets another outcome."""
        return {"edit": self.edit} if "edit" in self.model_fields_set else {}

    def require_valid_members_and_scopes(self, caller: Caller) -> None:
        """
        Raise unless the members can be combined and *caller* has the scopes for them.

        Raises:
            InputError: For members that cannot be combined.
            Problem: If *caller* sets the outcome of an effect, changes the agent or repeats effects without the scope ``admin``.
        """
        given = self.model_fields_set
        if self.tools is None:
            for name in ("simulate", "reuse", "budget"):
                if name in given:
                    msg = f"{name}: needs tools"
                    raise make_input_error(msg)
            if self.at is None:
                msg = "at: missing; give the last effect to keep. It may be left out only with tools"
                raise make_input_error(msg)
        elif self.edit_options or self.allow_repeat:
            msg = f"{'edit' if self.edit_options else 'allow_repeat'}: cannot be combined with tools"
            raise make_input_error(msg)
        if (
            self.edit_options
            or self.given_changes
            or self.allow_repeat
            or self.simulate
            or self.tools == "working-copy"
        ):
            caller.must("admin")
        if self.tools is not None:
            caller.must("read")  # the answer is a report with the outputs of the fork


@frozen(kw_only=True)
class StartRequest:
    """
    A request to start a run.

    Attributes:
        agent: The agent's id.
        prompt: The prompt of the run.
        params: A JSON object for the agent's schema.
        metadata: A JSON object for hooks and tools.
        session: The conversation, by the name that its owner gave it.
        limits: Members of ``Limits`` for this run, each at most the limit of the agent.
        model: The model of the agent in this run; ``None`` for its usual one.
        images: Pictures before the prompt, each with ``mime_type`` and ``data`` in base64.
        is_turn: Whether it is the next turn of the conversation, which starts from the state that the last run left.
        after: The last run of the conversation, as the client of a turn knows it; ``None`` if there is none.
        is_patient: Whether a question waits in memory for a while before the run is suspended.
    """

    agent: str
    prompt: str = ""
    params: Any = None
    metadata: Mapping[str, Any] | None = None
    session: str | None = None
    limits: Mapping[str, float] | None = None
    model: str | None = None
    images: Sequence[Mapping[str, str]] = ()
    is_turn: bool = False
    after: RunRow | None = None
    is_patient: bool = True


def require_listed_agent(agents: Sequence[str], name: str) -> str:
    """Return *name* if it is one of the ids *agents* that clients may start; otherwise raise ``InputError``."""
    # Exactly as listed: the engine itself would also accept paths and other spellings.
    if name not in agents:
        msg = f"there is no agent {name[:200]!r} here; available agents: {list_names(sorted(agents), name)}"
        raise InputError(msg, issues=(f"agent: {msg}",))
    return name


def validate_and_encode_request(agent_limits: Limits, asked: StartRequest) -> dict[str, Any]:
    """
    Return a request as the JSON that is stored with its run; raise ``InputError`` for limits above those of the agent.

    Raises:
        InputError: For a limit above *agent_limits*.
    """
    for name, value in (asked.limits or {}).items():
        here = getattr(agent_limits.resolve(DEFAULT_LIMITS), name)
        if here is not None and value > here:
            msg = f"limits.{name}: {value:g} exceeds the agent's limit on this server, {here:g}"
            raise make_input_error(msg)
    turn = {"after": None if asked.after is None else asked.after.run} if asked.is_turn else None
    extras = {
        "limits": asked.limits and dict(asked.limits),
        "models": asked.model and {asked.agent: asked.model},
        "images": [dict(one) for one in asked.images],
        "turn": turn,
    }
    request = {"prompt": asked.prompt, "params": plain(asked.params), "metadata": plain(asked.metadata)}
    request |= {name: value for name, value in extras.items() if value}
    return request if asked.is_patient else {**request, "is_patient": False}


def start_options_from_request(request: Mapping[str, Any], previous: AgentState | None = None) -> dict[str, Any]:
    """Return the options of ``Engine.start`` for a stored request; its images are added to the state *previous*."""
    options: dict[str, Any] = {}
    if request.get("limits"):
        options["limits"] = Limits(**request["limits"])
    if request.get("models"):
        options["agent_models"] = request["models"]
    if request.get("images"):
        parts = [ImagePart(data=base64.b64decode(one["data"]), mime_type=one["mime_type"]) for one in request["images"]]
        state = AgentState() if previous is None else previous
        pictures = [UserMessage(parts)]
        options["previous"] = attrs.evolve(
            state,
            message_history=Transcript([*state.message_history, *pictures]),
            view=Transcript([*state.view, *pictures]),
        )
    return options


def require_may_continue_session(caller: Caller, asked: StartRequest, *, stores_messages: bool) -> None:
    """Raise ``Problem`` 403 for a request in a stored conversation, unless *caller* has the scope ``answer``."""
    if asked.session is not None and stores_messages and not caller.may("answer"):
        msg = (
            "a message in a conversation may answer a question of the previous run, so it needs the scope 'answer' in addition to "
            "'run'; leave out `session_id`, or use another token"
        )
        raise Problem(msg, status=403, kind="scope_missing", members={"scope": "answer"})


def require_session_key(caller: Caller, session: str | None) -> str | None:
    """Return the key of a conversation of *caller*, ``None`` for none; raise ``InputError`` if its name is not printable."""
    if session is not None and not session.isprintable():
        msg = "the name of a conversation must have only printable characters, because it can be part of a URL"
        raise InputError(msg, issues=(f"session_id: {msg}",))
    return None if session is None else make_owner_session_key(caller.name, session)


def make_owner_session_key(owner: str, session: str) -> str:
    """Return the key of a conversation of *owner*; names of other owners never have the same key."""
    return f"{hashlib.sha256(owner.encode()).hexdigest()[:16]}:{session}"


def require_own_run(caller: Caller, run: str, row: RunRow | None) -> RunRow:
    """Return *row* for its owner or an admin; raise the same ``Problem`` for a missing run and for one of another owner."""
    if row is None or not (row.owner == caller.name or caller.may("admin")):
        msg = f"there is no run {run[:200]!r}"
        raise Problem(msg, status=404, kind="no_such_run")
    return row


def require_permitted_owner(caller: Caller, owner: str | None) -> str:
    """Return *caller*'s name, or for an admin the given *owner*; raise ``Problem`` if another caller gives an owner."""
    if owner is None or owner == caller.name:
        return caller.name
    caller.must("admin")
    return owner


def require_not_closing(*, is_closing: bool) -> None:
    """Raise ``Problem`` while the server shuts down."""
    if is_closing:
        msg = "the server is shutting down; try again in a moment"
        raise Problem(msg, status=503, kind="stopping", headers={"retry-after": "5"})


def require_not_ended(row: RunRow) -> None:
    """Raise ``Problem`` for a run that has ended."""
    if row.status not in OPEN:
        msg = f"the run {row.run} has ended ({row.status}) and accepts no input"
        raise Problem(msg, status=409, kind="ended", members={"run_status": row.status})


def validate_and_sign_answers(
    caller: Caller,
    answers: Mapping[str, AnswerLike],
    open_: Mapping[str, Question],
    page_questions: Collection[str] = (),
) -> dict[str, Answer]:
    """Return the answers with *caller* or the page as author; raise unless each fits an open question and *caller* may give it."""
    given = {
        question: attrs.evolve(answer, by=PAGE) if question in page_questions else answer
        for question, answer in match_answers(answers, open_, by=caller.name).items()
    }
    needs_admin = any(
        one.remember == "always" or one.edited_input is not None or (question.startswith(DOUBT) and one.agrees)
        for question, one in given.items()
    )
    if needs_admin and not caller.may("admin"):
        msg = (
            "an approval for all later runs, an edited input, and the repetition of an effect in doubt need the scope `admin`; "
            "no answer was accepted"
        )
        raise Problem(msg, status=403, kind="scope_missing", members={"scope": "admin"})
    return given


def make_client_error(
    error: StepEngineError, expected: type[StepEngineError], row: RunRow, journal: Journal, *, status: int, kind: str
) -> Exception:
    """
    Return the error for the client if a request about a run fails, with the path of the journal replaced.

    Args:
        error: The error.
        expected: Errors of exactly this class, which mean that the run does not allow the request, become a ``Problem``.
        row: The run.
        journal: Its journal, whose path the client must not see.
        status: The HTTP status for errors of class *expected*.
        kind: The kind of problem for errors of class *expected*.
    """
    message = error.message.replace(journal.name, f"run {row.run}")
    if isinstance(error, InputError):
        return InputError(message, issues=(message,))
    return Problem(message, status=status, kind=kind) if type(error) is expected else error
