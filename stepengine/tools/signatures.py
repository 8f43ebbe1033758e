"""The signature and the docstring of a tool function: its parameters and their descriptions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, get_args, get_origin

from attrs import frozen

from stepengine.data.hooks import StepContext
from stepengine.errors import DefinitionError
from stepengine.tools.context import ToolContext
from stepengine.tools.depends import Dependency, FactoryNode, find_dependency, make_factory_node
from stepengine.tools.places import evaluate_annotations, source_location


@frozen(eq=False)
class FunctionBody:
    """
    A function and the way it is called.

    Attributes:
        fn: The function.
        is_async: Whether it is a coroutine function.
        is_generator: Whether it is a generator function, which runs like a handler.
        wants_context: Whether its first parameter is the context.
        needs: The dependency and node of each parameter that has one.
        positional: Names of the parameters that can only be passed by position, in order.
        whole_input: Whether it receives the whole input as one object, as tools with a JSON Schema do.
    """

    fn: Callable[..., Any]
    is_async: bool
    wants_context: bool
    needs: Mapping[str, tuple[Dependency, FactoryNode]]
    positional: tuple[str, ...] = ()
    whole_input: bool = False
    is_generator: bool = False


@frozen(eq=False)
class Signature:
    """
    The parameters and the return type of a function.

    Attributes:
        body: The function and the way it is called.
        parameters: The caller's parameters with evaluated annotations, in order.
        returns: The return annotation; ``Any`` without one.
    """

    body: FunctionBody
    parameters: tuple[inspect.Parameter, ...]
    returns: Any


def _raise_definition_error(fn: Callable[..., object], problem: str) -> NoReturn:
    """Raise ``DefinitionError`` with the location and name of a tool function and the *problem*."""
    msg = f"{source_location(fn)}: tool function {getattr(fn, '__name__', type(fn).__name__)!r} {problem}"
    raise DefinitionError(msg)


def _suggest_annotation(fn: Callable[..., object], parameter: inspect.Parameter) -> str:
    if parameter.name in {"ctx", "context"}:
        return f"{'StepContext' if inspect.isgeneratorfunction(_get_called_function(fn)) else 'ToolContext'} (from stepengine)"
    return "str, for example"


def _split_parameters(
    fn: Callable[..., object], hints: Mapping[str, object]
) -> tuple[bool, dict[str, Any], list[inspect.Parameter]]:
    """
    Return (takes a context, dependencies by parameter, other parameters with types) of a function.

    Raises:
        DefinitionError: If the context is not the first parameter, or of the wrong kind.
    """
    wants_context, needs, rest = False, {}, []
    for index, (name, parameter) in enumerate(inspect.signature(fn).parameters.items()):
        annotation = hints.get(name, parameter.empty)
        dependency = find_dependency(annotation, parameter.default)
        if dependency is not None:
            needs[name] = (dependency, make_factory_node(dependency.factory))
        elif annotation is ToolContext or get_origin(annotation) is StepContext or annotation is StepContext:
            _check_context_parameter(fn, name, index, is_step_context=annotation is not ToolContext)
            wants_context = True
        else:
            rest.append(parameter.replace(annotation=annotation))
    return wants_context, needs, rest


def _check_context_parameter(fn: Callable[..., object], name: str, index: int, *, is_step_context: bool) -> None:
    """Raise ``DefinitionError`` for a context that is not the first parameter, or of the wrong kind."""
    yields = inspect.isgeneratorfunction(_get_called_function(fn))
    if is_step_context and not yields:
        _raise_definition_error(fn, f"takes a StepContext as {name!r} but does not yield; use a ToolContext")
    if yields and not is_step_context:
        _raise_definition_error(fn, f"yields but takes a ToolContext as {name!r}; use a StepContext, or no context")
    if index:
        _raise_definition_error(
            fn,
            f"takes the {'StepContext' if is_step_context else 'ToolContext'} as {name!r}; make it the first parameter",
        )


def _get_called_function(fn: Callable[..., object]) -> Callable[..., object]:
    """Return a routine or partial unchanged; for another callable object, the ``__call__`` of its class."""
    return fn if inspect.isroutine(fn) or hasattr(fn, "func") else type(fn).__call__


def _get_generator_return_type(annotation: Any) -> Any:
    """Return the third type argument of an annotation such as ``Steps[str]``; ``Any`` for other annotations."""
    arguments = get_args(annotation)
    return arguments[2] if len(arguments) == 3 else Any  # noqa: PLR2004 - the yield, send and return types


def _validate_and_detect_generator(fn: Callable[..., object], needs: Mapping[str, object]) -> bool:
    """Return whether a function is a generator function; raise ``DefinitionError`` for one with dependencies."""
    yields = inspect.isgeneratorfunction(_get_called_function(fn))
    if yields and needs:
        _raise_definition_error(
            fn,
            f"yields, and {next(iter(needs))!r} is a dependency, which the journal cannot record; do its work with "
            "`yield from Perform(fn, ...)` or in a separate tool",
        )
    return yields


def _validate_and_detect_async(fn: Callable[..., object]) -> bool:
    """Return whether a function is a coroutine function; raise ``DefinitionError`` for an async generator."""
    called = _get_called_function(fn)
    if inspect.isasyncgenfunction(called):
        _raise_definition_error(
            fn,
            "is an async generator; to yield effects, make it a plain generator: `def` with `yield from`. To report progress, "
            "call ctx.emit(ToolProgress(...))",
        )
    return inspect.iscoroutinefunction(called)


def read_signature(fn: Callable[..., object], names: Mapping[str, object]) -> Signature:
    """
    Return the validated signature of a tool function.

    Args:
        fn: The function of a tool.
        names: Local names for its annotations.

    Raises:
        DefinitionError: With file and line, for ``*args``, ``**kwargs``, a parameter without a type, an async generator, a
            generator with dependencies, a context that is not first, and dependencies that form a cycle.
    """
    if not callable(fn):
        msg = f"put @tool above a function, not above {fn!r}"
        raise DefinitionError(msg)
    hints = evaluate_annotations(fn, names)
    wants_context, needs, rest = _split_parameters(fn, hints)
    for parameter in rest:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            _raise_definition_error(
                fn, f"takes {str(parameter.replace(annotation=parameter.empty))!r}; declare each parameter by name"
            )
        if parameter.annotation is parameter.empty:
            _raise_definition_error(
                fn,
                f"has no type for parameter {parameter.name!r}; write {parameter.name}: {_suggest_annotation(fn, parameter)}",
            )
    positional = tuple([p.name for p in rest if p.kind is p.POSITIONAL_ONLY])
    body = FunctionBody(
        fn,
        _validate_and_detect_async(fn),
        wants_context,
        needs,
        positional,
        is_generator=_validate_and_detect_generator(fn, needs),
    )
    returns = hints.get("return", Any)
    return Signature(body, tuple(rest), _get_generator_return_type(returns) if body.is_generator else returns)


def make_schema_body(fn: Callable[..., object]) -> FunctionBody:
    """
    Return the body of a tool with a JSON Schema; *fn* gets the whole input as its only required argument, else raise ``DefinitionError``.

    Its first parameter may be a ``ToolContext``; further parameters may be dependencies or have defaults.

    Raises:
        DefinitionError: If it has no other parameter, or more than one required parameter.
    """
    if not callable(fn):
        msg = f"run= of a tool must be a function that takes the input, not {fn!r}"
        raise DefinitionError(msg)
    wants_context, needs, rest = _split_parameters(fn, evaluate_annotations(fn))
    open_ended = [p for p in rest if p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    required = [p for p in rest if p not in open_ended and p.default is p.empty]
    if len(required) > 1 or len(rest) == 0:
        _raise_definition_error(
            fn, "must take the whole input as its only required parameter, as in `def run(input: dict)`"
        )
    yields = _validate_and_detect_generator(fn, needs)
    return FunctionBody(fn, _validate_and_detect_async(fn), wants_context, needs, whole_input=True, is_generator=yields)


HEADER = re.compile(r"^(?P<title>[A-Za-z][A-Za-z ]*):[ \t]*$", re.MULTILINE)
PARAMETERS = frozenset({"args", "arguments", "parameters", "params"})
DROPPED = PARAMETERS | {"returns", "return", "yields", "raises", "exceptions"}


# A bundled tool is created again for each folder; parsing its docstring is a third of the time.
@functools.lru_cache(maxsize=256)
def parse_docstring(text: str | None) -> tuple[str, Mapping[str, str]]:
    """
    Return the description in a docstring and the text of each parameter, cached.

    The formats Google, NumPy, reST and Epydoc are supported. The description contains all sections except those about
    parameters, results and exceptions.
    """
    if not text or not text.strip():
        return "", {}
    text = inspect.cleandoc(text)
    sections = _split_sections(text)
    if any(title in PARAMETERS for title, _ in sections):
        kept = [body for title, body in sections if title not in DROPPED]
        parameters = "\n\n".join(body for title, body in sections if title in PARAMETERS)
        return "\n\n".join(filter(None, kept)), _parse_google_parameters(parameters)
    return _parse_docstring_in_any_style(text)


def _split_sections(text: str) -> list[tuple[str, str]]:
    """Return the (title, text) sections of a docstring, with Google headers in lower case; the first section has the title ``""``."""
    starts = [m for m in HEADER.finditer(text) if text[m.end() : m.end() + 2].startswith("\n ")]
    edges = [0, *[m.start() for m in starts], len(text)]
    titles = ["", *[m["title"].lower() for m in starts]]
    return [(t, text[a:b].strip()) for t, a, b in zip(titles, edges, edges[1:], strict=False)]


def _parse_google_parameters(section: str) -> dict[str, str]:
    import docstring_parser
    from docstring_parser.common import DocstringStyle

    return _get_parameter_texts(docstring_parser.parse("Parameters.\n\n" + section, style=DocstringStyle.GOOGLE))


def _parse_docstring_in_any_style(text: str) -> tuple[str, dict[str, str]]:
    """Return (description, parameter descriptions) of a docstring in any known style; (the text, {}) if it cannot be parsed."""
    import docstring_parser

    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return text, {}
    texts = _get_parameter_texts(parsed)
    if not texts:
        kept = [body for title, body in _split_sections(text) if title not in DROPPED]
        return "\n\n".join(filter(None, kept)), {}
    return "\n\n".join(filter(None, (parsed.short_description, parsed.long_description))), texts


def _get_parameter_texts(parsed: object) -> dict[str, str]:
    """Return the description of each parameter in a parsed docstring, on one line."""
    params = getattr(parsed, "params", ())
    return {p.arg_name: " ".join(p.description.split()) for p in params if p.description}
