"""``Tool``: a name, a description, an input schema and a body."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from copy import copy
from typing import Any, Generic, TypedDict, cast, get_args, get_origin

import attrs
from attrs import frozen
from typing_extensions import ParamSpec, TypeVar, Unpack

from stepengine.data.alike import list_names
from stepengine.data.checks import COUNT, FLAG, NUMBER, TEXT, FieldCheck, allow_none, make_instance_check
from stepengine.data.definition import AgentDefinition
from stepengine.data.hooks import StepContext
from stepengine.data.json import JsonDict, JsonValue, freeze, freeze_object
from stepengine.data.messages import ToolResult
from stepengine.data.names import bind_arguments
from stepengine.data.provenance import Trust
from stepengine.data.schemas import find_keyword_problem, list_member_names
from stepengine.data.tools import (
    TOOL_SECONDS,
    Ordinary,
    Runs,
    ToolAnnotations,
    ToolBinding,
    ToolLike,
    ToolSpec,
    Yielding,
    list_template_parameters,
)
from stepengine.errors import DefinitionError, ToolError
from stepengine.tools.arguments import FunctionInputs
from stepengine.tools.context import ToolContext
from stepengine.tools.conversion import decode_result, encode, format_tool_error, make_tool_result
from stepengine.tools.depends import Overrides
from stepengine.tools.execution import bind_body, execute
from stepengine.tools.repair import Aliases, make_repairer
from stepengine.tools.schemas import SchemaInputs
from stepengine.tools.signatures import FunctionBody, Signature, make_schema_body

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_OVERRIDES: Overrides = {}
TRUSTS = get_args(Trust)


@frozen
class ToolPreview:
    """
    A description of one call, shown to a person before it runs.

    Attributes:
        action: The effect of the call in a few words, such as ``"Write src/app.py"``.
        details: Details, such as a diff or a command line.
        problem: The reason why the tool will fail; then no person is asked, and the model receives this text at once.
    """

    action: str
    details: JsonValue = attrs.field(default=None, converter=freeze)
    problem: str = attrs.field(default="", kw_only=True)


class ToolOptions(TypedDict, total=False):
    """
    The options of ``@tool(...)`` and ``Tool(...)`` in addition to name and description.

    Attributes:
        category: The category for permission rules: ``"read"``, ``"write"``, ``"execute"``, ``"network"`` or any other word;
            default ``""``. A function in the category ``"read"`` changes nothing, as with ``ToolAnnotations(read_only=True)``: the
            mode ``plan`` allows it, and a call that a crash interrupted is repeated.
        annotations: The kinds of effects as ``ToolAnnotations``; by default none.
        idempotent: Short for the annotation of this name: a call that a crash interrupted is repeated; default ``False``.
        parallel_safe: Whether calls may run at the same time as other parallel-safe calls of one reply; default ``False``.
        ends_turn: Whether the turn ends after a call; default ``False``.
        forces_next_step: Whether the turn continues until the model has received the result; default ``True``.
        requires_permission: Whether a person can be asked about a call. With ``False``, an ask of a rule or a mode counts as
            allow; a deny still denies. Default ``True``.
        ephemeral: The number of newest results of this tool that the view keeps; default ``None``, which keeps all.
        max_chars: The number of characters of a result for the model, its beginning and its end; the record, handlers and hooks
            have the whole result. Default ``None``: 100,000.
        timeout: The time limit of one call in seconds; 120 by default, ``math.inf`` for none. A synchronous function runs in a
            thread, which cannot be stopped: after this time ``ctx.cancelled`` is set, and the call waits up to 5 s more for the
            thread to end.
        retries: The number of further attempts after a failure; default 0. Only for idempotent tools.
        strict: Whether the provider is asked to guarantee inputs that match the schema, if it supports that for this schema;
            default ``False``.
        defer_loading: Whether a model receives the tool only after a search for it, by the search of its provider or else by the
            tool ``find_tools``; default ``False``.
        in_thread: Whether a synchronous body runs in a thread (default). With ``False`` it runs on the event loop, which is for
            bodies that take microseconds.
        deferred: Whether the result arrives later, by ``handle.send_tool_result``; the body only starts the work. The return value
            of the body is dropped, but an error of the body is the result. The timeout is that of the body; default ``False``.
        preview: A function of the input that returns a ``ToolPreview`` of one call, for the person who approves it; default
            ``None``.
        aliases: Other names that are accepted from a model, as lists by the dotted path of the parameter, such as
            ``"replacements.old_string"``.
        about: The files that a call accesses and the web addresses that it reaches, for permission rules: texts such as
            ``"{source}"`` or ``"reports/{name}.csv"``, in which ``{name}`` stands for each text of that parameter; ``()`` for a
            tool without any. Relative paths are below the engine's workspace, else the working directory. Default ``None``: rules
            check members such as ``path`` and ``url``.
        results: ``"trusted"`` if no result can contain text of third parties, ``"untrusted"`` (default) if one may, ``"names"``
            for a directory such as contacts, each text of which is trusted as a whole, or a function of the input that returns one
            of these words.
        destinations: The parameters with the targets of an effect: recipients, addresses, URLs, ids to delete or change. Dotted paths
            reach into objects and lists, such as ``"event.attendees"``. ``()`` for a tool without targets. Default ``None``: the
            targets are unknown, and rules about destinations check every parameter.
        texts: The parameters whose text leaves with the effect, such as the body of a mail: each address and URL in it is a
            destination, too. Default ``()``.
        uses: For a tool that yields: the tools and agents, or their names and ids, that it may call in addition to those of the
            calling agent. Default ``()``.
    """

    category: str
    annotations: ToolAnnotations
    idempotent: bool
    parallel_safe: bool
    ends_turn: bool
    forces_next_step: bool
    requires_permission: bool
    ephemeral: int | None
    max_chars: int | None
    timeout: float | None
    retries: int
    strict: bool
    defer_loading: bool
    in_thread: bool
    deferred: bool
    preview: Callable[[JsonDict], ToolPreview] | None
    aliases: Aliases
    about: str | Sequence[str] | None
    results: Trust | Callable[[JsonDict], Trust]
    destinations: str | Sequence[str] | None
    texts: str | Sequence[str]
    uses: Sequence[object]


NO_TEXT: Mapping[Any, str] = {kind: kind.__name__ for kind in (int, float, bool, list, dict)}
"""Annotations of return types that no text matches."""


OF_BODIES: Mapping[str, str] = {
    "retries": "to retry an effect, catch its error and yield it again",
    "idempotent": "the journal records each of its effects separately",
    "in_thread": "its body does not block, and the engine decides where each effect runs",
    "deferred": "to wait for a person, use `yield from Ask(...)`",
}
"""The options that have no effect for a tool that yields, each with what to do instead."""


def _is_tool_agent_or_name(value: object) -> bool:
    return isinstance(value, str | AgentDefinition | ToolLike) and not isinstance(value, type)


def _is_parameter_path_or_list(value: object) -> bool:
    """Return whether a value is a non-blank path of a parameter, or a list of such paths."""
    places = [value] if isinstance(value, str) else value
    return isinstance(places, list | tuple) and all(isinstance(place, str) and place.strip() for place in places)


OPTIONS = {
    "description": TEXT,
    "category": TEXT,
    "annotations": make_instance_check(ToolAnnotations, "ToolAnnotations(read_only=True)"),
    "idempotent": FLAG,
    "parallel_safe": FLAG,
    "ends_turn": FLAG,
    "forces_next_step": FLAG,
    "requires_permission": FLAG,
    "ephemeral": allow_none(COUNT),
    "max_chars": allow_none(COUNT),
    "timeout": allow_none(NUMBER),
    "retries": COUNT,
    "strict": FLAG,
    "defer_loading": FLAG,
    "in_thread": FLAG,
    "deferred": FLAG,
    "preview": allow_none(FieldCheck(callable, "a function of the input")),
    "aliases": FieldCheck(lambda value: isinstance(value, Mapping), "a mapping from a parameter to its other names"),
    "uses": FieldCheck(
        lambda value: isinstance(value, list | tuple) and all(map(_is_tool_agent_or_name, value)),
        "a list of tools and agents, or of their names",
    ),
    "results": FieldCheck(
        lambda value: value in TRUSTS or callable(value), "'trusted', 'names', 'untrusted' or a function of the input"
    ),
    "destinations": allow_none(
        FieldCheck(_is_parameter_path_or_list, 'a list of parameters such as ["to", "event.attendees"]')
    ),
    "texts": FieldCheck(_is_parameter_path_or_list, 'a list of parameters such as ["subject", "body"]'),
    "about": allow_none(
        FieldCheck(_is_parameter_path_or_list, 'a string or a list of strings such as "reports/{name}.csv"')
    ),
}


def _validate_options(name: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of a tool as a new dict; raise ``DefinitionError`` for an unknown option or a value of a wrong type."""
    problems = [OPTIONS[option].find_problem(option, value) for option, value in options.items() if option in OPTIONS]
    if unknown := options.keys() - OPTIONS.keys():
        known = list_names(sorted(OPTIONS.keys() - {"description"}), min(unknown))
        msg = f"tool {name!r} has no option {', '.join(sorted(unknown))}; valid options: {known}"
        raise DefinitionError(msg)
    for problem in filter(None, problems):
        msg = f"tool {name!r}: {problem}"
        raise DefinitionError(msg)
    return dict(options)


def _may_have_parameter_path(spec: ToolSpec, path: str) -> bool:
    """Return True if a dotted path starts with a parameter, and each of its other names occurs somewhere in the schema."""
    first, *rest = path.split(".")
    return first in _get_schema_properties(spec) and set(rest) <= set(list_member_names(spec.input_schema))


def _get_schema_properties(spec: ToolSpec) -> JsonDict:
    """Return the ``properties`` of a tool's input schema; an empty object without them."""
    found = spec.input_schema.get("properties")
    return found if isinstance(found, JsonDict) else JsonDict()


def check_tool_name(name: object, where: str = "") -> None:
    """
    Raise ``DefinitionError`` unless *name* is 1 to 64 letters, digits, ``_`` and ``-``; *where* starts the message.

    Raises:
        DefinitionError: For any other name, since providers reject it.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        msg = f"{where}{name!r} is not a valid tool name; use 1 to 64 letters, digits, '_' and '-'"
        raise DefinitionError(msg)


def _make_raising_body(name: str) -> Callable[[Any], object]:
    """Return a tool body that only raises ``ToolError``, for tools that only a run can execute."""

    def raise_tool_error(_: object) -> Any:
        """Raise ``ToolError``: only a run can execute the tool."""
        msg = f"tool {name!r} runs only as part of an agent run; it cannot be executed on its own"
        raise ToolError(msg, tool_name=name)

    return raise_tool_error


class Tool(Generic[P, R]):
    """
    A tool, made by ``@tool`` from a typed function, or by this class from a JSON Schema.

    Args:
        name: A unique name, ``[A-Za-z0-9_-]{1,64}``.
        description: The description for the model.
        input_schema: The JSON Schema of the input, an object.
        run: The body, sync or async. Its only required parameter is the whole input; a ``ToolContext`` before it and
            dependencies are optional.
        **options: See ``ToolOptions``.

    Raises:
        DefinitionError: For an invalid name, a schema that cannot be checked, or contradicting options.
    """

    def __init__(
        self,
        name: str,
        description: str,
        input_schema: Mapping[str, object],
        run: Callable[..., object],
        **options: Unpack[ToolOptions],
    ) -> None:
        check_tool_name(name)
        inputs = SchemaInputs(name, input_schema)
        if problem := find_keyword_problem(inputs.schema):
            msg = f"input_schema of tool {name!r} at {problem}"
            raise DefinitionError(msg)
        self._set_up(name, description, inputs, make_schema_body(run), options)
        self._signature: Signature | None = None
        self._inputs: FunctionInputs | None = None

    @classmethod
    def from_function(
        cls, name: str, description: str, inputs: FunctionInputs, signature: Signature, options: ToolOptions
    ) -> Tool[P, R]:
        """Return the tool for a typed function: the constructor that ``@tool`` uses."""
        made = cls.__new__(cls)
        made._set_up(name, description, inputs, signature.body, options)  # noqa: SLF001  (a second constructor)
        made._signature, made._inputs = signature, inputs  # noqa: SLF001
        made.result_type = signature.returns
        made.returns = NO_TEXT.get(get_origin(signature.returns) or signature.returns)
        return made

    @classmethod
    def for_binding(cls, binding: ToolBinding) -> Tool[P, R]:
        """Return a tool that the run itself executes, for example as child agents or questions; its own body always raises."""
        made = cls.__new__(cls)
        made.spec, made.in_thread, made.runs_inline = binding.spec, False, True
        made.folder = made.returns = None
        made.result_type = Any
        # The result of `make_schema_body`, which takes 0.1 ms; each process creates a dozen such tools.
        made.body = FunctionBody(
            _make_raising_body(binding.spec.name), is_async=False, wants_context=False, needs={}, whole_input=True
        )
        made.results = None
        made._binding, made._preview, made._signature = binding, None, None  # noqa: SLF001  (a third constructor)
        return made

    def _set_up(
        self,
        name: str,
        description: str,
        inputs: FunctionInputs | SchemaInputs,
        body: FunctionBody,
        options: ToolOptions,
    ) -> None:
        """Validate the options, and set the attributes, the specification and the binding of the tool."""
        flags = _validate_options(name, {**options, "description": description})
        del flags["description"]
        if "idempotent" in flags:
            annotations = flags.get("annotations", ToolAnnotations())
            flags["annotations"] = attrs.evolve(annotations, idempotent=flags.pop("idempotent"))
        # A body that yields has no effect itself, but the effects that it yields may change something.
        if flags.get("category") == "read" and not body.is_generator:
            flags["annotations"] = attrs.evolve(flags.get("annotations", ToolAnnotations()), read_only=True)
        self.in_thread: bool = flags.pop("in_thread", True)
        self.deferred: bool = flags.pop("deferred", False)
        self.result_type: Any = Any
        self.returns: str | None = None  # the annotated return type, if no text can have it
        self.folder: tuple[str, ...] | None = None  # the folder of a bundled tool, as the components of its real path
        self._preview: Callable[[JsonDict], ToolPreview] | None = flags.pop("preview", None)
        results = flags.get("results")
        self.results: Callable[[JsonDict], Trust] | None = flags.pop("results") if callable(results) else None
        aliases: Aliases = flags.pop("aliases", {})
        uses: Sequence[object] = flags.pop("uses", ())
        repair = make_repairer(inputs.schema, aliases)
        self.body = body
        self.spec = ToolSpec(name, description, inputs.schema, **flags)
        self.runs_inline = not (body.is_async or body.needs or self.in_thread)
        runs: Runs = (
            Yielding(self._create_generator, self._make_body_result, tuple(uses))
            if body.is_generator
            else Ordinary(self)
        )
        self._binding = ToolBinding(self.spec, inputs.validate, repair, runs=runs)
        self._check_option_conflicts(options)

    def _create_generator(self, ctx: StepContext, arguments: Mapping[str, Any]) -> Generator[Any, Any, Any]:
        """Call the body of a generator tool, and return the generator, which has not started."""
        steps: Generator[Any, Any, Any] = bind_body(self.body, ctx, arguments)()
        return steps

    def _make_body_result(self, returned: Any, error: BaseException | None, *, is_typed: bool) -> ToolResult:
        """Return the result of a generator tool: its return value, or an error result if it raised *error*."""
        if error is not None:
            return ToolResult.error(format_tool_error(error))
        return make_tool_result(returned, result_type=self.result_type if is_typed else Any)

    def _check_option_conflicts(self, options: Mapping[str, object]) -> None:  # noqa: C901 - one line for each problem
        """Raise ``DefinitionError`` for options that contradict each other, the body or the input schema."""
        spec = self.spec
        problem = ""
        if self.body.is_generator and (useless := [name for name in OF_BODIES if name in options]):
            problem = f"yields, so {useless[0]}= has no effect; remove it: {OF_BODIES[useless[0]]}"
        elif not self.body.is_generator and options.get("uses"):
            problem = "does not yield, so it cannot call tools; remove uses=, or make it a generator function"
        elif spec.category == "read" and spec.annotations.destructive:
            problem = "has category='read', which changes nothing, and destructive=True; remove one of them"
        elif spec.retries and not spec.annotations.idempotent:
            problem = "has retries= but is not idempotent; set idempotent=True if it is safe to repeat"
        elif spec.timeout is not None and not spec.timeout > 0:
            problem = f"has timeout={spec.timeout!r}; use seconds above 0, None for the default, or math.inf"
        elif self.runs_inline and spec.timeout not in {None, math.inf}:
            problem = "has a timeout and in_thread=False; a synchronous body on the event loop cannot be timed out; remove one of them"
        elif unknown := [
            p
            for place in spec.about or ()
            for p in list_template_parameters(place)
            if p not in _get_schema_properties(spec)
        ]:
            known = list_names(_get_schema_properties(spec), unknown[0])
            problem = f"uses {unknown[0]!r} in about=, but has no such parameter; its parameters: {known}"
        elif missing := [
            path for path in (*(spec.destinations or ()), *spec.texts) if not _may_have_parameter_path(spec, path)
        ]:
            known = list_names(_get_schema_properties(spec), missing[0])
            problem = (
                f"uses {missing[0]!r} in {'texts' if missing[0] in spec.texts else 'destinations'}=, but has no such parameter; "
                f"its parameters: {known}"
            )
        if problem:
            msg = f"tool {spec.name!r} {problem}"
            raise DefinitionError(msg)

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.spec.name

    @property
    def fn(self) -> Callable[..., Any]:
        """The function."""
        return self.body.fn

    def mark_confined(self) -> None:
        """Mark the tool as confined: file rules are then applied when it opens a file, and not to its input."""
        self.spec = attrs.evolve(self.spec, confined=True)
        self._binding = attrs.evolve(self._binding, spec=self.spec)

    def binding(self) -> ToolBinding:
        """Return the specification of the tool and how a run executes it."""
        return self._binding

    def execute(
        self,
        arguments: Mapping[str, object],
        ctx: ToolContext,
        *,
        overrides: Overrides = NO_OVERRIDES,
        seconds: float | None = None,
    ) -> Coroutine[Any, Any, ToolResult]:
        """
        Run the body with validated arguments and return its result; an exception becomes an error result.

        Args:
            arguments: ``Validated.arguments``.
            ctx: The context of this call.
            overrides: The factories that replace others, by the replaced factory.
            seconds: The time limit of the call; by default that of the tool.

        Raises:
            asyncio.CancelledError: If this task was cancelled.
            KeyboardInterrupt: If the body raised it; the same for ``SystemExit``.
            ToolError: For a tool that yields, which only a run can execute.
        """
        if self.body.is_generator:
            msg = f"tool {self.spec.name!r} yields, so it runs only as part of an agent run"
            raise ToolError(msg, tool_name=self.spec.name)
        return execute(self, arguments, ctx, overrides, seconds or self.spec.timeout or TOOL_SECONDS)

    def trust(self, input: JsonDict) -> Trust:
        """Return how far the result of a call is trusted; ``"untrusted"`` if the ``results`` function fails or returns an unknown word."""
        if self.results is None:
            return self.spec.results
        try:
            found = self.results(input)
            return found if found in TRUSTS else "untrusted"
        except Exception:  # noqa: BLE001  (the author's code, and this fails closed)
            return "untrusted"

    def preview(self, input: JsonDict) -> ToolPreview | None:
        """Return what a call would do, for the person who approves it; ``None`` if the tool has no preview function."""
        return None if self._preview is None else self._preview(input)

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> JsonDict:
        """
        Return the JSON input for a call with Python arguments.

        Raises:
            TypeError: If the arguments do not match the function's parameters.
            DataError: If a value has no JSON form that validates to an equal value.
        """
        if self._signature is None or self._inputs is None:
            return freeze_object(encode(args[0] if args else kwargs))
        free = [p.replace(annotation=p.empty) for p in self._signature.parameters]
        return self._inputs.encode_arguments(bind_arguments(self.spec.name, inspect.Signature(free), *args, **kwargs))

    def decode(self, result: ToolResult) -> R:
        """
        Return a result as the type that the function is annotated to return.

        Raises:
            ToolError: If the result is an error.
            DataError: If the result does not match the annotation.
        """
        value: R = decode_result(self.spec.name, Any if self._signature is None else self._signature.returns, result)
        return value

    def __repr__(self) -> str:
        return f"Tool({self.spec.name!r})"

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Raise ``TypeError``, since a direct call would not be validated, recorded or limited."""
        name, hint = self.spec.name, f"`{self.spec.name}.fn(...)`"
        if self.body.is_generator:
            hint = f"`Walk({name}, params={{...}})` (from stepengine.testing)"
        msg = (
            f"do not call tool {name!r} directly; in a handler write `yield from call({name}, ...)`, "
            f"in a unit test {hint}"
        )
        raise TypeError(msg)


def with_sandbox(
    tool: Tool[P, R], sandbox: Callable[[], str], offers: Sequence[str], *, at_provider: bool
) -> Tool[P, R]:
    """Return a copy of a generator tool with *sandbox*, *offers* and *at_provider* set, which ``Yielding`` documents."""
    made, binding = copy(tool), tool.binding()
    runs = attrs.evolve(cast("Yielding", binding.runs), sandbox=sandbox, offers=tuple(offers), at_provider=at_provider)
    made._binding = attrs.evolve(binding, runs=runs)  # noqa: SLF001 - a copy of ours
    return made
