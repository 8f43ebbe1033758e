"""
The descriptions of tools that the packages share.

``ToolSpec`` is what a model is shown and the flags. ``stepengine.Tool`` is what an author holds; the floors below it know
it as ``ToolLike``. ``ToolBinding`` is what the machine is given: the specification, the check of an input, and how a call
runs (``Runs``): ``Ordinary``, ``Control``, ``Spawning``, ``Asking``, ``Yielding`` or ``Driving``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, product
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import attrs
from attrs import frozen
from typing_extensions import ParamSpec, TypeVar

from stepengine.data.checks import FLAG, make_validator, with_keyword_hints
from stepengine.data.json import JsonDict, JsonValue, compact, freeze_object
from stepengine.data.messages import ToolResult, to_string_tuple
from stepengine.data.provenance import Trust
from stepengine.data.questions import Answer, Interactor, Question
from stepengine.data.result_cuts import ShortenJson
from stepengine.errors import StepEngineError

P = ParamSpec("P", default=...)
R_co = TypeVar("R_co", covariant=True, default=Any)

ToolChoice: TypeAlias = str
"""``"auto"``, ``"none"``, ``"required"``, or the name of the one tool that must be called."""


@with_keyword_hints
@frozen(kw_only=True)
class ToolAnnotations:
    """
    Hints about what a tool does to the world.

    Attributes:
        read_only: It changes nothing.
        destructive: It may destroy something; only meaningful when not read-only.
        idempotent: Doing it twice is like doing it once, so it may be run again after a crash.
        open_world: It reaches beyond this machine.
    """

    read_only: bool = attrs.field(default=False, validator=make_validator(FLAG))
    destructive: bool = attrs.field(default=False, validator=make_validator(FLAG))
    idempotent: bool = attrs.field(default=False, validator=make_validator(FLAG))
    open_world: bool = attrs.field(default=False, validator=make_validator(FLAG))


FIND_TOOLS = "find_tools"
"""The tool that searches those with ``defer_loading``."""
RECALL_HISTORY = "recall_history"
"""The tool that looks up what a model is shown no longer; a run whose agent has it keeps what a replaced record held."""
READ_OUTPUT = "read_output"
"""The tool that reads a result whole of which a model is shown a part."""

PARAMETER = re.compile(r"\{([^{}]+)\}")
MOST_PLACES = 10_000
"""Files of one call that are checked one by one, in some milliseconds. A call with more counts as one about any file."""
ANYWHERE = ".."
"""A path that leads out, which every rule that denies or asks takes for one of its own."""

NO_INPUT = freeze_object({"type": "object", "properties": {}})


@frozen
class ToolSpec:
    """
    What is known of a tool without running it.

    Attributes:
        name: Unique name, ``[A-Za-z0-9_-]{1,64}``.
        description: For the model.
        input_schema: JSON Schema of the input, an object.
        category: For permission rules: ``"read"``, ``"write"``, ``"execute"``, ``"network"`` or any other word.
        annotations: Hints.
        parallel_safe: Whether calls may run at the same time as other parallel-safe calls of one reply.
        ends_turn: Whether the turn ends after it ran.
        forces_next_step: Whether the model must see its result before the turn can end.
        requires_permission: Whether an ask applies to it; false means an ask counts as allow, a deny still denies.
        ephemeral: Keep only the newest so many results of this tool in the view; ``None`` keeps all.
        max_chars: How many characters of a result the model is shown; ``None`` for 100,000. Handlers and the record have all.
        timeout: Seconds that one call may take; ``None`` for the default. The thread of a synchronous function gets up to 5 s more.
        retries: How often a failed call is tried again; only for idempotent tools.
        strict: Whether the provider shall promise inputs that keep to the schema, where it can and the schema allows it.
        defer_loading: Whether a model is shown it only after it searched for it: by its provider's own search where there is
            one, else by the tool ``find_tools``. It counts where ``find_tools`` is offered beside it, as in every step of a
            run that has such tools.
        about: The files and web addresses that a call is about, as ``ToolOptions`` tells; ``None`` where the tool does not say.
        results: ``"trusted"`` where no result can hold text of third parties.
        destinations: Dotted paths of the parameters that say where an effect goes, such as recipients, URLs and ids to delete;
            ``()`` for a tool that has none, ``None`` where the tool does not say.
        texts: Dotted paths of the parameters whose text leaves with the effect; addresses and URLs in it are destinations.
        confined: Whether the rules judge each file that it opens, as those of the bundled tools. Then no text of its input is a path but
            those in members such as ``path``.
    """

    name: str
    description: str = ""
    input_schema: JsonDict = attrs.field(default=NO_INPUT, converter=freeze_object)
    category: str = attrs.field(default="", kw_only=True)
    annotations: ToolAnnotations = attrs.field(factory=ToolAnnotations, kw_only=True)
    parallel_safe: bool = attrs.field(default=False, kw_only=True)
    ends_turn: bool = attrs.field(default=False, kw_only=True)
    forces_next_step: bool = attrs.field(default=True, kw_only=True)
    requires_permission: bool = attrs.field(default=True, kw_only=True)
    ephemeral: int | None = attrs.field(default=None, kw_only=True)
    max_chars: int | None = attrs.field(default=None, kw_only=True)
    timeout: float | None = attrs.field(default=None, kw_only=True, metadata={"endless": True})
    retries: int = attrs.field(default=0, kw_only=True)
    strict: bool = attrs.field(default=False, kw_only=True)
    defer_loading: bool = attrs.field(default=False, kw_only=True)
    about: tuple[str, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(to_string_tuple), kw_only=True
    )
    results: Trust = attrs.field(default="untrusted", kw_only=True)
    destinations: tuple[str, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(to_string_tuple), kw_only=True
    )
    texts: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple, kw_only=True)
    confined: bool = attrs.field(default=False, kw_only=True)

    @cached_property
    def chars(self) -> int:
        """The number of characters that it adds to a request: name, description and compact schema; counted once."""
        return len(self.name) + len(self.description) + len(compact(self.input_schema))

    def places(self, input: JsonDict) -> tuple[str, ...]:
        """Return the paths and addresses that a call with *input* concerns, as ``about`` defines them, unresolved."""
        found = [list(islice(_fill_template(place, input), MOST_PLACES + 1)) for place in self.about or ()]
        made = [place for places in found for place in places]
        return tuple(made) if len(made) <= MOST_PLACES else (ANYWHERE,)


def find_values(input: JsonValue, path: str, place: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield the values at a dotted path of an input, each with its own place; lists on the way are gone through."""
    if isinstance(input, list | tuple) and path:
        for number, one in enumerate(input):
            yield from find_values(one, path, f"{place}[{number}]")
    elif not path:
        yield place, input
    elif isinstance(input, Mapping):
        name, _, rest = path.partition(".")
        if name in input:
            yield from find_values(input[name], rest, f"{place}.{name}" if place else name)


def template_parameters(place: str) -> list[str]:
    """Return the names of the parameters in a template of ``ToolSpec.about``."""
    return PARAMETER.findall(place)


def _fill_template(place: str, input: JsonDict) -> Iterator[str]:
    """Yield a template of ``ToolSpec.about`` filled with each combination of its parameters' texts."""
    between = PARAMETER.split(place)
    for texts in product(*[list(islice(_find_texts(input.get(name)), MOST_PLACES + 1)) for name in between[1::2]]):
        yield "".join([between[0], *[part for pair in zip(texts, between[2::2], strict=True) for part in pair]])


def _find_texts(value: JsonValue) -> Iterator[str]:
    """Yield the texts in a JSON value, nested ones included, and whole numbers as text."""
    if isinstance(value, str):
        yield value
    elif type(value) is int:
        yield str(value)
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _find_texts(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _find_texts(member)


@frozen(weakref_slot=False)
class Validated:
    """
    The input of a tool call after validation.

    Attributes:
        input: As JSON, defaults filled in and values coerced: what is approved, recorded and fingerprinted.
        arguments: As Python values for the tool's body.
    """

    input: JsonDict
    arguments: Mapping[str, Any]


How: TypeAlias = Literal["ordinary", "control", "spawns", "asks", "yields", "drives"]
"""How a tool runs: a performer does it, the machine itself, child runs, a person, a run without a model, or the run that calls it."""
Action: TypeAlias = Literal[
    "set_output",
    "set_messages",
    "add_message",
    "end_turn",
    "hand_off",
    "task_completed",
    "write_todos",
    "think_deeply",
    "lookup_agent_info",
    "find_tools",
]
"""What the machine can do to a run by itself."""


@frozen
class Ordinary:
    """
    A call is an effect of its own, ``CallTool``.

    Attributes:
        tool: What has the body, a ``stepengine.Tool``; ``None`` where nobody can carry a call out.
        follow: Goes on with a call whose body gave a result with the status ``"pending"``, because it needs something of the
            run first: a generator of ``Ask``, ``Complete`` and ``Perform`` that returns the result. It is given the input and
            the pending result, which stands in the record, and nothing else, so that a replay goes the same way.
    """

    how: ClassVar[How] = "ordinary"
    tool: Any = attrs.field(default=None, eq=False)
    follow: Callable[[JsonDict, ToolResult], Generator[Any, Any, ToolResult]] | None = attrs.field(
        default=None, eq=False
    )


@frozen
class Control:
    """
    The machine does it itself, with no effect and no record.

    Attributes:
        action: What it does.
    """

    how: ClassVar[How] = "control"
    action: Action


class ChildRequest(NamedTuple):
    """
    One child that is asked for.

    Attributes:
        agent_id: The agent's id as it was given.
        prompt: What it should do.
        params: Its params.
        definition: The agent itself, from tools that carry the agents which they run.
        refused: Why this one cannot be started, when what was asked for is wrong; the others are.
    """

    agent_id: str
    prompt: str = ""
    params: JsonValue = None
    definition: Any = None
    refused: StepEngineError | None = None


@frozen
class Spawning:
    """
    A call becomes children, one effect for each.

    Attributes:
        entries: Turns a validated input into what is asked for.
        shown: Turns the results of the children, ``ChildResult`` in that order, into the tool's result.
        is_inline: Whether the one child goes on from the run's history and leaves its own in its place.
        agents: The definitions that the tool carries; whoever has it may run them.
    """

    how: ClassVar[How] = "spawns"
    entries: Callable[[JsonDict], Sequence[ChildRequest]]
    shown: Callable[[Sequence[Any]], ToolResult]
    is_inline: bool = False
    agents: tuple[Any, ...] = ()


@frozen
class Asking:
    """
    A call becomes questions to a person.

    Attributes:
        questions: Turns a validated input into the questions.
        shown: Turns their answers, in that order, into the tool's result.
        interactor: Who answers in process; ``None`` leaves it to the engine's.
    """

    how: ClassVar[How] = "asks"
    questions: Callable[[JsonDict], Sequence[Question]]
    shown: Callable[[Sequence[Answer]], ToolResult]
    interactor: Interactor | None = None


class _BodyResultMaker(Protocol):
    def __call__(self, returned: Any, error: BaseException | None, /, *, is_typed: bool) -> ToolResult: ...


@frozen
class Yielding:
    """
    A call is a run of its own, without a model: what a generator yields, as a handler's does.

    Attributes:
        steps: Begins the body, with its context and the validated Python arguments.
        shown: Turns what the body returned, or the exception that it ended with instead, into the tool's result; *is_typed*
            where the caller may read it by its type.
        uses: What the body may call beside what its caller has: tools, and the names of such; agents, and their ids.
        sandbox: Names what the body's ``Compute`` needs, with its version, as the record of a call has it; it raises
            ``DefinitionError`` where that is not installed, so that no run begins there. ``None`` for a body that needs nothing.
        offers: Names of tools among *uses* that the model of an agent which is offered the tool is offered, too.
        at_provider: Whether *uses*, which are tools, take its place where the provider of the model runs programs that call them.
    """

    how: ClassVar[How] = "yields"
    steps: Callable[[Any, Mapping[str, Any]], Generator[Any, Any, Any]]
    shown: _BodyResultMaker
    uses: tuple[Any, ...] = ()
    sandbox: Callable[[], str] | None = attrs.field(default=None, eq=False)
    offers: tuple[str, ...] = ()
    at_provider: bool = False


@frozen
class Driving:
    """
    A call is carried out in the run that makes it: what its steps yield is the run's own, as if a handler had yielded it.

    So it may start children in the background that outlive the call, and what they did is told to the run.

    Attributes:
        steps: Begins them, with the validated input and the run's children in the background; they yield what waits, `Perform`,
            `Complete` and `Ask`, one at a time, and return the tool's result.
        reports: Whether the run is told of children that end by themselves, and waits for them at the end of a turn.
        agents: The definitions that the tool carries for its own steps; nobody else runs them, by whatever id.
        preview: Returns how a call looks to a person who is asked about it, as that of an ordinary tool does.
    """

    how: ClassVar[How] = "drives"
    steps: Callable[[JsonDict, Any], Generator[Any, Any, ToolResult]]
    reports: bool = False
    agents: tuple[Any, ...] = ()
    preview: Callable[[JsonDict], Any] | None = attrs.field(default=None, eq=False)


def timeout_text(tool_name: str, seconds: float) -> str:
    """Return the text of the result of a call that exceeded its time limit."""
    return f"tool {tool_name!r} timed out after {seconds:g} s"


def has_timed_out(result: ToolResult) -> bool:
    """Return whether a call exceeded its time limit, judged by the text of its result."""
    return result.is_error and result.text.startswith(f"tool {result.tool_name!r} timed out after ")


Runs: TypeAlias = Ordinary | Control | Spawning | Asking | Yielding | Driving
"""How a call of a tool runs."""


@frozen
class ToolBinding:
    """
    A tool as the machine knows it.

    Attributes:
        spec: What is known of it.
        validate: Turns an input into ``Validated`` or raises ``ToolInputError``.
        repair: Corrects common mistakes before validation, in names and values.
        runs: How a call runs.
        shorten_json: Shortens a JSON result for the model; by default the middle of its text is cut.
    """

    spec: ToolSpec
    validate: Callable[[JsonDict], Validated]
    repair: Callable[[JsonDict], JsonDict] | None = None
    runs: Runs = attrs.field(factory=Ordinary, kw_only=True)
    shorten_json: ShortenJson | None = attrs.field(default=None, kw_only=True)


@runtime_checkable
class ToolLike(Protocol[P, R_co]):
    """``stepengine.Tool`` as the floors below it know it: what an agent definition, an engine and ``call`` accept."""

    @property
    def spec(self) -> ToolSpec:
        """The tool's specification."""

    def binding(self) -> ToolBinding:
        """Return the tool as the machine knows it."""

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> JsonDict:
        """Return Python arguments as the tool's JSON input."""

    def decode(self, result: ToolResult, /) -> R_co:
        """Return a result as the tool's return type."""
