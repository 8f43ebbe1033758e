"""What a function says about itself: what its parameters are, and what its docstring tells of them."""

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
from stepengine.tools.places import evaluate_hints, source_location


@frozen(eq=False)
class FunctionBody:
    """
    A function and the way it is called.

    Attributes:
        fn: The function.
        is_async: Whether calling it gives something to await.
        is_generator: Whether calling it gives a generator, which is driven as a handler is.
        wants_context: Whether its first parameter is the ``ToolContext``.
        needs: Parameter name to dependency and node.
        positional: Names of the parameters that can only be passed by position, in order.
        whole_input: Whether it takes the whole input as one object, as tools with a JSON Schema do.
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
        body: How it is called.
        parameters: The caller's parameters with evaluated annotations, in order.
        returns: The return annotation; ``Any`` when there is none.
    """

    body: FunctionBody
    parameters: tuple[inspect.Parameter, ...]
    returns: Any


def _raise_definition_error(fn: Callable[..., object], problem: str) -> NoReturn:
    msg = f"{source_location(fn)}: tool function {getattr(fn, '__name__', type(fn).__name__)!r} {problem}"
    raise DefinitionError(msg)


def _suggest_annotation(fn: Callable[..., object], parameter: inspect.Parameter) -> str:
    """Return a suggested annotation for a parameter that has none."""
    if parameter.name in {"ctx", "context"}:
        return f"{'StepContext' if inspect.isgeneratorfunction(_get_called_function(fn)) else 'ToolContext'} (from stepengine)"
    return "str, for example"


def _split_parameters(
    fn: Callable[..., object], hints: Mapping[str, object]
) -> tuple[bool, dict[str, Any], list[inspect.Parameter]]:
    """
    Return whether a function takes a context, its dependencies and its other parameters; a misplaced context raises ``DefinitionError``.
    """
    wants_context, needs, rest = False, {}, []
    for index, (name, parameter) in enumerate(inspect.signature(fn).parameters.items()):
        annotation = hints.get(name, parameter.empty)
        dependency = find_dependency(annotation, parameter.default)
        if dependency is not None:
            needs[name] = (dependency, make_factory_node(dependency.factory))
        elif annotation is ToolContext or get_origin(annotation) is StepContext or annotation is StepContext:
            _check_context_parameter(fn, name, index, of_handler=annotation is not ToolContext)
            wants_context = True
        else:
            rest.append(parameter.replace(annotation=annotation))
    return wants_context, needs, rest


def _check_context_parameter(fn: Callable[..., object], name: str, index: int, *, of_handler: bool) -> None:
    """Raise an error for a context that is not the first parameter, or of the wrong kind."""
    yields = inspect.isgeneratorfunction(_get_called_function(fn))
    if of_handler and not yields:
        _raise_definition_error(fn, f"takes a StepContext as {name!r} but does not yield; use a ToolContext")
    if yields and not of_handler:
        _raise_definition_error(fn, f"yields but takes a ToolContext as {name!r}; use a StepContext, or no context")
    if index:
        _raise_definition_error(
            fn,
            f"takes the {'StepContext' if of_handler else 'ToolContext'} as {name!r}; make it the first parameter",
        )


def _get_called_function(fn: Callable[..., object]) -> Callable[..., object]:
    """Return a routine or partial unchanged; of a callable object, the ``__call__`` of its class."""
    return fn if inspect.isroutine(fn) or hasattr(fn, "func") else type(fn).__call__


def _generator_return_type(annotation: Any) -> Any:
    """Return the return type in a generator annotation such as ``Steps[str]``; ``Any`` for other annotations."""
    arguments = get_args(annotation)
    return arguments[2] if len(arguments) == 3 else Any  # noqa: PLR2004 - what it yields, is sent and returns


def _check_is_generator(fn: Callable[..., object], needs: Mapping[str, object]) -> bool:
    """Return True for a generator function; raise ``DefinitionError`` if it has dependencies, too."""
    yields = inspect.isgeneratorfunction(_get_called_function(fn))
    if yields and needs:
        _raise_definition_error(
            fn,
            f"yields, and {next(iter(needs))!r} is a dependency, which the journal cannot record; do its work with "
            "`yield from Perform(fn, ...)` or in a separate tool",
        )
    return yields


def _check_is_async(fn: Callable[..., object]) -> bool:
    """Return True for a coroutine function; raise ``DefinitionError`` for an async generator."""
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
    Return the checked signature of a tool function; raise ``DefinitionError`` for parameters that a tool cannot have.

    Args:
        fn: The function of a tool.
        names: Local names that its annotations may use.

    Raises:
        DefinitionError: naming file and line, for ``*args``, ``**kwargs``, a parameter without a type, an async generator, a
            generator with dependencies, a context that is not first, and dependencies that form a cycle.
    """
    if not callable(fn):
        msg = f"put @tool above a function, not above {fn!r}"
        raise DefinitionError(msg)
    hints = evaluate_hints(fn, names)
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
        fn, _check_is_async(fn), wants_context, needs, positional, is_generator=_check_is_generator(fn, needs)
    )
    returns = hints.get("return", Any)
    return Signature(body, tuple(rest), _generator_return_type(returns) if body.is_generator else returns)


def make_schema_body(fn: Callable[..., object]) -> FunctionBody:
    """
    Return the body of a tool with a JSON Schema; its function receives the whole input as one argument.

    Its first parameter may be a ``ToolContext``, further ones dependencies.

    Raises:
        DefinitionError: when it does not take exactly one other parameter.
    """
    if not callable(fn):
        msg = f"run= of a tool must be a function that takes the input, not {fn!r}"
        raise DefinitionError(msg)
    wants_context, needs, rest = _split_parameters(fn, evaluate_hints(fn))
    open_ended = [p for p in rest if p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    required = [p for p in rest if p not in open_ended and p.default is p.empty]
    if len(required) > 1 or len(rest) == 0:
        _raise_definition_error(
            fn, "must take the whole input as its only required parameter, as in `def run(input: dict)`"
        )
    yields = _check_is_generator(fn, needs)
    return FunctionBody(fn, _check_is_async(fn), wants_context, needs, whole_input=True, is_generator=yields)


HEADER = re.compile(r"^(?P<title>[A-Za-z][A-Za-z ]*):[ \t]*$", re.MULTILINE)
PARAMETERS = frozenset({"args", "arguments", "parameters", "params"})
DROPPED = PARAMETERS | {"returns", "return", "yields", "raises", "exceptions"}


# A bundled tool is made anew for each folder; parsing its text is a third of the time.
@functools.lru_cache(maxsize=256)
def parse_docstring(text: str | None) -> tuple[str, Mapping[str, str]]:
    """
    Return the description in a docstring and the text of each parameter, cached.

    Google, NumPy, reST and Epydoc docstrings are understood. The description keeps every section but those about
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
    return _parse_any_style(text)


def _split_sections(text: str) -> list[tuple[str, str]]:
    """Return the sections of a docstring as lower-case Google header and text; the text before the first header has the title ``""``."""
    starts = [m for m in HEADER.finditer(text) if text[m.end() : m.end() + 2].startswith("\n ")]
    edges = [0, *[m.start() for m in starts], len(text)]
    titles = ["", *[m["title"].lower() for m in starts]]
    return [(t, text[a:b].strip()) for t, a, b in zip(titles, edges, edges[1:], strict=False)]


def _parse_google_parameters(section: str) -> dict[str, str]:
    """Return the text of each parameter in a Google section."""
    import docstring_parser
    from docstring_parser.common import DocstringStyle

    return _get_parameter_texts(docstring_parser.parse("Parameters.\n\n" + section, style=DocstringStyle.GOOGLE))


def _parse_any_style(text: str) -> tuple[str, dict[str, str]]:
    """Return the description and the parameter texts of a docstring in any known style; all of it if it cannot be parsed."""
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
