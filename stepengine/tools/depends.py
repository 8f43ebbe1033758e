"""
``Depends``: values for parameters of a tool that no caller passes; factories create them for each call.

A factory may be sync or async, or a generator that yields once; the code after the ``yield`` is its teardown. Its parameters may
be dependencies and the ``ToolContext``. Teardowns run in reverse order, even if one fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from attrs import frozen

from stepengine.errors import DefinitionError
from stepengine.tools.context import ToolContext
from stepengine.tools.places import evaluate_annotations, source_location

Factory: TypeAlias = Callable[..., Any]
Overrides: TypeAlias = Mapping[Callable[..., Any], Callable[..., Any]]
Kind: TypeAlias = Literal["plain", "async", "generator", "async_generator"]
Runner: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]


@frozen
class Dependency:
    """
    The marker that ``Depends`` puts on a parameter.

    Attributes:
        factory: The function that creates the value.
        use_cache: Whether all uses within a call share one value.
    """

    factory: Factory
    use_cache: bool = True


def Depends(factory: Factory, *, use_cache: bool = True) -> Any:  # noqa: N802  (reads like a type at its use)
    """
    Declare that a factory provides the value of a parameter.

    Write ``db: Db = Depends(get_db)`` or ``db: Annotated[Db, Depends(get_db)]``.

    Args:
        factory: A sync or async function, a class, or a generator function that yields the value once. Its own
            parameters are dependencies, a ``ToolContext``, or have defaults.
        use_cache: Share one value in a call; ``False`` creates a value for every use.

    Raises:
        DefinitionError: If *factory* is not callable.
    """
    if not callable(factory):
        msg = f"Depends takes a function that makes the value, not {factory!r}"
        raise DefinitionError(msg)
    return Dependency(factory, use_cache)


@frozen(eq=False)
class FactoryNode:
    """
    A factory and its own dependencies.

    Attributes:
        factory: The function.
        kind: How it produces its value.
        needs: The dependency and node of each parameter that has one.
        context: The names of the parameters that receive the ``ToolContext``.
    """

    factory: Factory
    kind: Kind
    needs: Mapping[str, tuple[Dependency, FactoryNode]]
    context: tuple[str, ...]


def find_dependency(annotation: object, default: object) -> Dependency | None:
    """Return the ``Depends`` marker in a parameter's default value or ``Annotated`` type; ``None`` if there is none."""
    if isinstance(default, Dependency):
        return default
    if get_origin(annotation) is Annotated:
        return next((m for m in get_args(annotation)[1:] if isinstance(m, Dependency)), None)
    return None


@functools.lru_cache(maxsize=1024)
def make_factory_node(factory: Factory) -> FactoryNode:
    """
    Return the node of a factory with the nodes of its dependencies, cached.

    Raises:
        DefinitionError: For a cycle, and for a parameter without a dependency, context or default.
    """
    return _build_factory_node(factory, ())


def _build_factory_node(factory: Factory, chain: tuple[Factory, ...]) -> FactoryNode:
    """Return the node of a factory and its dependencies; raise ``DefinitionError`` for a cycle with *chain*, the factories that need it."""
    if factory in chain:
        names = " -> ".join(_get_factory_name(f) for f in (*chain[chain.index(factory) :], factory))
        msg = f"{source_location(factory)}: dependencies form a cycle: {names}"
        raise DefinitionError(msg)
    needs: dict[str, tuple[Dependency, FactoryNode]] = {}
    context: list[str] = []
    hints = evaluate_annotations(factory)
    for name, parameter in _get_factory_parameters(factory).items():
        annotation = hints.get(name)
        dependency = find_dependency(annotation, parameter.default)
        if dependency is not None:
            needs[name] = (dependency, _build_factory_node(dependency.factory, (*chain, factory)))
        elif annotation is ToolContext:
            context.append(name)
        elif parameter.default is parameter.empty and parameter.kind not in {
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        }:
            msg = (
                f"{source_location(factory)}: parameter {name!r} of the dependency {_get_factory_name(factory)!r} has no value; "
                "use Depends(...), ToolContext or a default"
            )
            raise DefinitionError(msg)
    return FactoryNode(factory, _get_factory_kind(factory), needs, tuple(context))


def _get_factory_name(factory: Factory) -> str:
    """Return the name of a factory function, or of a factory object's class."""
    return getattr(factory, "__name__", type(factory).__name__)


def _get_factory_parameters(factory: Factory) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a factory by name; ``{}`` if it has no signature."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return {}


def _get_factory_kind(factory: Factory) -> Kind:
    """Return whether a factory is a function, a coroutine function or a (async) generator function."""
    called = (
        factory
        if inspect.isroutine(factory) or isinstance(factory, type | functools.partial)
        else type(factory).__call__
    )
    if inspect.isasyncgenfunction(called):
        return "async_generator"
    if inspect.iscoroutinefunction(called):
        return "async"
    return "generator" if inspect.isgeneratorfunction(called) else "plain"


def needs_event_loop(node: FactoryNode, overrides: Overrides, replaced: tuple[Factory, ...] = ()) -> bool:
    """
    Return True if the node or one of its dependencies, after *overrides*, is async and has to run on the event loop.

    Args:
        node: The node.
        overrides: The factories that replace others, by the replaced factory.
        replaced: The replaced factories above the node; as in ``Resolver``, they are not replaced again below their override.
    """
    override = overrides.get(node.factory)
    if override is not None and node.factory not in replaced:
        replaced = (*replaced, node.factory)
        node = make_factory_node(override)
    return node.kind in {"async", "async_generator"} or any(
        needs_event_loop(n, overrides, replaced) for _, n in node.needs.values()
    )


class Resolver:
    """
    Creates the dependencies of one call and closes them afterwards.

    Args:
        context: The context for factories with a parameter for it.
        overrides: The factories that replace others, by the replaced factory.
        run: Runs synchronous factories.
    """

    def __init__(self, context: ToolContext, overrides: Overrides, run: Runner) -> None:
        self._context = context
        self._overrides = overrides
        self._run = run
        self._values: dict[Factory, Any] = {}
        self._teardowns: list[tuple[str, Any]] = []
        self._replaced: list[Factory] = []

    async def resolve_dependency(self, dependency: Dependency, node: FactoryNode) -> Any:
        """Create and return the value of one dependency, after those that its factory needs; a shared value is reused."""
        override = self._overrides.get(node.factory)
        if override is None or node.factory in self._replaced:
            return await self._create_or_reuse_value(dependency, node)
        self._replaced.append(node.factory)
        try:
            return await self._create_or_reuse_value(dependency, make_factory_node(override))
        finally:
            self._replaced.pop()

    async def _create_or_reuse_value(self, dependency: Dependency, node: FactoryNode) -> object:
        """Return the value of a factory: the shared value of this call, or a new value, created with its own dependencies."""
        if dependency.use_cache and node.factory in self._values:
            return self._values[node.factory]
        arguments: dict[str, object] = dict.fromkeys(node.context, self._context)
        for name, (needed, of) in node.needs.items():
            arguments[name] = await self.resolve_dependency(needed, of)
        value = await self._create_value(node, functools.partial(node.factory, **arguments))
        if dependency.use_cache:
            self._values[node.factory] = value
        return value

    async def _create_value(self, node: FactoryNode, make: Callable[[], Any]) -> Any:
        """Call a factory and return its value; for a generator, register its teardown and return the yielded value."""
        if node.kind == "async":
            return await make()
        if node.kind == "async_generator":
            source = make()
            value = await anext(source, _NOTHING)
        elif node.kind == "generator":
            source = make()
            value = await self._run(functools.partial(next, source, _NOTHING))
        else:
            value = await self._run(make)
            return await value if inspect.isawaitable(value) else value
        if value is _NOTHING:
            msg = f"the dependency {_get_factory_name(node.factory)!r} yielded nothing"
            raise RuntimeError(msg)
        self._teardowns.append((_get_factory_name(node.factory), source))
        return value

    async def close_dependencies(self, failure: BaseException | None) -> list[BaseException]:
        """
        Finish the generator factories in reverse order; *failure* is raised at their ``yield``.

        Returns:
            The exceptions of the teardowns, except *failure* itself.
        """
        broken: list[BaseException] = []
        while self._teardowns:
            name, source = self._teardowns.pop()
            try:
                if inspect.isasyncgen(source):
                    await _finish_async_generator(source, failure)
                else:
                    await self._run(functools.partial(_finish_generator, source, failure))
            except BaseException as error:  # noqa: BLE001  (the other teardowns must run; the caller raises it)
                if error is not failure:
                    error.add_note(f"in the teardown of the dependency {name!r}")
                    broken.append(error)
        return broken


_NOTHING = object()


def _finish_generator(source: Any, failure: BaseException | None) -> None:
    """Run a generator factory to its end, after raising *failure* in it; raise ``RuntimeError`` if it yields again."""
    try:
        if failure is None:
            next(source)
        else:
            source.throw(failure)
    except StopIteration:
        return
    source.close()
    msg = "a dependency yields once, this one yielded again"
    raise RuntimeError(msg)


async def _finish_async_generator(source: Any, failure: BaseException | None) -> None:
    """Run an async generator factory to its end, after raising *failure* in it; raise ``RuntimeError`` if it yields again."""
    try:
        if failure is None:
            await anext(source)
        else:
            await source.athrow(failure)
    except StopAsyncIteration:
        return
    await source.aclose()
    msg = "a dependency yields once, this one yielded again"
    raise RuntimeError(msg)
