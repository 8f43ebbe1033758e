"""Validation of the arguments of an engine, and the observers, rate limits and sessions that are made from them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.data.alike import list_names
from stepengine.data.checks import FLAG, TEXT, FieldCheck, allow_none, make_instance_check
from stepengine.data.hooks import Hooks
from stepengine.engine.options import AGENT_MODELS, LIMITS, SessionsLike
from stepengine.errors import DefinitionError
from stepengine.models.registry import Models
from stepengine.runtime.clock import TimeSource
from stepengine.runtime.hub import ObserverLike, Watcher
from stepengine.runtime.rates import RateLimit, RateLimits, RateLimitsLike
from stepengine.runtime.retry import RetryPolicy
from stepengine.tools.context import ResourceMap
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from stepengine.engine.session_turns import EngineSessions


def _make_list_check(item_text: str) -> FieldCheck:
    """Return a check that accepts an iterable other than a string; *item_text* names its items in messages."""
    return FieldCheck(
        lambda value: isinstance(value, Iterable) and not isinstance(value, str), f"a list of {item_text}"
    )


def _is_policy(value: object) -> bool:
    from stepengine.permissions import Policy, PolicyFile

    return isinstance(value, Policy | PolicyFile)


def _is_session_store(value: object) -> bool:
    from stepengine.sessions import SessionStore, VersionedStore

    return isinstance(value, SessionStore | VersionedStore) and not isinstance(value, type)


ENGINE = {
    "agents": _make_list_check("AgentDefinition objects"),
    "tools": _make_list_check("Tool objects (models go to Engine(agents, models=...))"),
    "hooks": allow_none(make_instance_check(Hooks, "Hooks(pre_step=[check])")),
    "permissions": allow_none(
        FieldCheck(
            _is_policy,
            'a Policy such as Policy([Rule.allow_category("read")])',
        )
    ),
    "headless": allow_none(FLAG),
    "limits": LIMITS,
    "observers": _make_list_check("functions that take an event, or of objects with on_event"),
    "dependency_overrides": allow_none(
        FieldCheck(lambda value: isinstance(value, Mapping), "a mapping from functions to functions")
    ),
    "pricing": allow_none(FieldCheck(callable, "a function that takes model, usage and time")),
    "default_model": allow_none(TEXT),
    "agent_models": AGENT_MODELS,
    "retry": allow_none(make_instance_check(RetryPolicy, "RetryPolicy(attempts=2)")),
    "rate_limits": allow_none(
        FieldCheck(
            lambda value: (
                isinstance(value, RateLimit)
                or (isinstance(value, Mapping) and all(isinstance(limit, RateLimit) for limit in value.values()))
            ),
            "a RateLimit, or a mapping from provider prefixes to them",
        )
    ),
    "sessions": allow_none(
        FieldCheck(
            _is_session_store,
            'a session store, such as FileSessions("sessions"), or an object with get_history and save_history',
        )
    ),
    "sleep_in_process": FieldCheck(
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= 0,
        "a number of seconds, such as 60, or math.inf",
    ),
    "child_sessions": FLAG,
    "resources": FieldCheck(
        lambda value: (
            isinstance(value, ResourceMap) or (isinstance(value, Iterable) and not isinstance(value, str | Mapping))
        ),
        "a list of objects, each found by its type; ResourceMap.insert(value, as_type=Base) sets another type",
    ),
    "workspace": allow_none(
        FieldCheck(lambda value: isinstance(value, Workspace | Path | str), "a folder or a Workspace")
    ),
}


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """
    Raise ``DefinitionError`` for arguments that no engine can be created with.

    Args:
        arguments: The arguments by name, and under ``"unknown"`` those that there are not.

    Raises:
        DefinitionError: saying what would have been fine.
    """
    for name in arguments["unknown"]:
        known = list_names([each for each in arguments if each not in ("self", "unknown")], name)
        msg = f"Engine has no argument {name!r}; valid arguments: {known}"
        raise DefinitionError(msg)
    for problem in filter(
        None, [what.find_problem(f"Engine({name}=...)", arguments[name]) for name, what in ENGINE.items()]
    ):
        raise DefinitionError(problem)


def make_watcher(observer: ObserverLike) -> Watcher:
    """
    Return a ``Watcher`` for *observer*: a plain function of an event, or an object with ``on_event``.

    Raises:
        DefinitionError: when it cannot be called, or is async.
    """
    call = getattr(observer, "on_event", observer)
    if not callable(call) or inspect.iscoroutinefunction(call):
        msg = f"an observer must be a plain function that takes one event, or an object with such a method on_event, not {observer!r}"
        raise DefinitionError(msg)
    return Watcher(observer)


def make_rate_limits(argument: RateLimitsLike, models: Models, clock: TimeSource) -> RateLimits | None:
    """
    Return the limiters for the argument ``Engine(rate_limits=...)``; ``None`` if it is ``None``.

    Raises:
        DefinitionError: when that names a provider that *models* does not have.
    """
    if argument is None:
        return None
    unknown = [] if isinstance(argument, RateLimit) else [name for name in argument if name not in models.providers]
    if unknown:
        known = list_names(models.providers, unknown[0], quoted=True)
        msg = f"rate_limits names the provider {unknown[0]!r}, which is not registered; registered providers: {known}"
        raise DefinitionError(msg)
    return RateLimits(argument, clock)


def make_engine_sessions(store: SessionsLike, *, children: bool) -> EngineSessions | None:
    """Return the sessions of ``Engine(sessions=..., child_sessions=...)``, if it has any."""
    if store is None and not children:
        return None
    from stepengine.engine.session_turns import EngineSessions

    return EngineSessions(store, children=children)
