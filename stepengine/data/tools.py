"""
The descriptions of tools that the packages share.

``ToolSpec`` is what a model is shown and the flags. ``stepengine.Tool`` is what an author holds; the layers below it know
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
    Hints about the effects of a tool.

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
"""The tool for messages that the model no longer receives; a run of an agent with it keeps the content of replaced records."""
READ_OUTPUT = "read_output"
"""The tool for a whole result of which the model receives a part."""

PARAMETER = re.compile(r"\{([^{}]+)\}")
MOST_PLACES = 10_000
"""The most files of one call that a guard checks one by one, in some milliseconds. A call with more counts as one about any file."""
ANYWHERE = ".."
"""A path outside the root; every rule that denies or asks matches it."""

NO_INPUT = freeze_object({"type": "object", "properties": {}})


@frozen
class ToolSpec:
    """
    The description of a tool, known without running it.

    Attributes:
        name: Unique name, ``[A-Za-z0-9_-]{1,64}``.
        description: For the model.
        input_schema: JSON Schema of the input, an object.
        category: For permission rules: ``"read"``, ``"write"``, ``"execute"``, ``"network"`` or any other word.
        annotations: Hints.
        parallel_safe: Whether calls may run at the same time as other parallel-safe calls of one reply.
        ends_turn: Whether the turn ends after it ran.
        forces_next_step: Whether the model must see its result before the turn can end.
        requires_permission: Whether an ask applies to it. With false, an ask is an allow; a deny still denies.
        ephemeral: The number of the newest results of this tool in the view; ``None`` for all.
        max_chars: The most characters of a result for the model; ``None`` for 100,000. Handlers and the record have all.
        timeout: The time limit of one call in seconds; ``None`` for the default. The thread of a synchronous function has up
            to 5 s more.
        retries: How often a failed call is repeated; only for idempotent tools.
        strict: Whether the provider must enforce the schema for inputs, if it can and the schema allows it.
        defer_loading: Whether the model receives it only after a search for it: by its provider's own search if there is one,
            else by the tool ``find_tools``. It requires ``find_tools``, which every step of a run with such tools has.
        about: The files and web addresses that a call is about, see ``ToolOptions``; ``None`` if the tool does not declare them.
        results: ``"trusted"`` if no result can contain text of third parties.
        destinations: Dotted paths of the parameters with the destinations of an effect, such as recipients, URLs and ids to
            delete. ``()`` for a tool without any, ``None`` if the tool does not declare them.
        texts: Dotted paths of the parameters whose text leaves with the effect; addresses and URLs in it are destinations.
        confined: Whether the rules check each file that it opens, as for the bundled tools. Then only the texts in members such
            as ``path`` are paths.
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
    def char_count(self) -> int:
        """The number of characters that it adds to a request: name, description and compact schema; counted once."""
        return len(self.name) + len(self.description) + len(compact(self.input_schema))

    def find_subjects(self, input: JsonDict) -> tuple[str, ...]:
        """Return the paths and addresses that a call with *input* concerns, as ``about`` defines them, unresolved."""
        found = [list(islice(_fill_template(place, input), MOST_PLACES + 1)) for place in self.about or ()]
        made = [place for places in found for place in places]
        return tuple(made) if len(made) <= MOST_PLACES else (ANYWHERE,)


def find_values_at_path(input: JsonValue, path: str, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield the values at a dotted path of an input, each after its own path, which starts with *prefix*; lists are searched by item."""
    if isinstance(input, list | tuple) and path:
        for number, one in enumerate(input):
            yield from find_values_at_path(one, path, f"{prefix}[{number}]")
    elif not path:
        yield prefix, input
    elif isinstance(input, Mapping):
        name, _, rest = path.partition(".")
        if name in input:
            yield from find_values_at_path(input[name], rest, f"{prefix}.{name}" if prefix else name)


def list_template_parameters(template: str) -> list[str]:
    """Return the names of the parameters in a template of ``ToolSpec.about``."""
    return PARAMETER.findall(template)


def _fill_template(template: str, input: JsonDict) -> Iterator[str]:
    """Yield a template of ``ToolSpec.about`` filled with each combination of its parameters' texts."""
    between = PARAMETER.split(template)
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
"""How a tool runs: by a performer, the machine, child runs, a person, a separate run without a model, or the calling run."""
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
"""The actions of the machine for its own run."""


@frozen
class Ordinary:
    """
    Performs a call as an effect, ``CallTool``.

    Attributes:
        tool: The ``stepengine.Tool`` with the body; ``None`` if calls cannot be performed here.
        follow: Continues a call whose body returned a result with the status ``"pending"``, because it needs the run first. It
            is a generator of ``Ask``, ``Complete`` and ``Perform`` that returns the result. Its only arguments are the input
            and the recorded pending result, so that a replay does the same.
    """

    how: ClassVar[How] = "ordinary"
    tool: Any = attrs.field(default=None, eq=False)
    follow: Callable[[JsonDict, ToolResult], Generator[Any, Any, ToolResult]] | None = attrs.field(
        default=None, eq=False
    )


@frozen
class Control:
    """
    Performs a call in the machine, without an effect or a record.

    Attributes:
        action: The action.
    """

    how: ClassVar[How] = "control"
    action: Action


class ChildRequest(NamedTuple):
    """
    A request for one child.

    Attributes:
        agent_id: The agent's id, as passed.
        prompt: Its prompt.
        params: Its params.
        definition: The agent itself, from tools with their own agents.
        refused: The error of an invalid request; the other children are still started.
    """

    agent_id: str
    prompt: str = ""
    params: JsonValue = None
    definition: Any = None
    refused: StepEngineError | None = None


@frozen
class Spawning:
    """
    Performs a call by children, one effect for each.

    Attributes:
        entries: Returns the requests for a validated input.
        shown: Returns the tool's result for the results of the children, ``ChildResult`` in that order.
        is_inline: Whether the only child continues the run's history and replaces it by its own.
        agents: The tool's own definitions; any agent with the tool may run them.
    """

    how: ClassVar[How] = "spawns"
    entries: Callable[[JsonDict], Sequence[ChildRequest]]
    shown: Callable[[Sequence[Any]], ToolResult]
    is_inline: bool = False
    agents: tuple[Any, ...] = ()


@frozen
class Asking:
    """
    Performs a call by questions to a person.

    Attributes:
        questions: Returns the questions for a validated input.
        shown: Returns the tool's result for their answers, in that order.
        interactor: The interactor for the questions; ``None`` for that of the engine.
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
    Performs a call as a separate run without a model: its body is a generator, like a handler.

    Attributes:
        steps: Starts the body, with its context and the validated Python arguments.
        shown: Returns the tool's result for the return value of the body or its exception; *is_typed* if the caller may
            read it by its type.
        uses: Tools, agents and their names that the body may call in addition to those of its caller.
        sandbox: Returns the name and version of the package that ``Compute`` of the body needs, for the record of a call. It
            raises ``DefinitionError`` if that is not installed, so that no run starts. ``None`` for a body without needs.
        offers: Names of tools among *uses* that models with this tool also receive.
        at_provider: Whether *uses*, which are tools, replace it if the provider of the model runs programs that call them.
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
    Performs a call within the calling run: its steps yield effects of that run, as a handler does.

    So it may start children in the background that continue after the call and report to the run.

    Attributes:
        steps: Starts the steps, with the validated input and the run's children in the background. They yield waits,
            `Perform`, `Complete` and `Ask`, one at a time, and return the tool's result.
        reports: Whether the run is notified of children that end by themselves, and waits for them at the end of a turn.
        agents: The definitions for the tool's own steps; no other code can run them, by any id.
        preview: Returns the preview of a call for a person, like that of an ordinary tool.
    """

    how: ClassVar[How] = "drives"
    steps: Callable[[JsonDict, Any], Generator[Any, Any, ToolResult]]
    reports: bool = False
    agents: tuple[Any, ...] = ()
    preview: Callable[[JsonDict], Any] | None = attrs.field(default=None, eq=False)


TOOL_SECONDS = 120.0
"""Most calls take seconds; a test suite or a slow server ends within two minutes, and one that hangs does not hold a run for long."""


def format_timeout_text(tool_name: str, seconds: float) -> str:
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
        spec: The specification of the tool.
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
    """The protocol of ``stepengine.Tool`` for lower packages: agent definitions, engines and ``call`` accept it."""

    @property
    def spec(self) -> ToolSpec:
        """The tool's specification."""

    def binding(self) -> ToolBinding:
        """Return the tool in the form that the machine uses."""

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> JsonDict:
        """Return Python arguments as the tool's JSON input."""

    def decode(self, result: ToolResult, /) -> R_co:
        """Return a result as the tool's return type."""
