"""What an engine can be made of: its arguments are checked here, and what shows events, limits rates and keeps sessions comes of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.data.alike import list_names
from stepengine.data.checks import FLAG, TEXT, Fine, an_instance, or_none
from stepengine.data.hooks import Hooks
from stepengine.engine.options import AGENT_MODELS, LIMITS, SessionsLike
from stepengine.errors import DefinitionError
from stepengine.models.registry import Models
from stepengine.runtime.clock import Clock
from stepengine.runtime.hub import ObserverLike, Watcher
from stepengine.runtime.rates import RateLimit, RateLimits, RateLimitsLike
from stepengine.runtime.retry import RetryPolicy
from stepengine.tools.context import ResourceMap
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from stepengine.engine.session_turns import EngineSessions

__all__ = ("check_engine", "rates_of", "sessions_in", "watcher_of")


def _several(of_what: str) -> Fine:
    return Fine(lambda value: isinstance(value, Iterable) and not isinstance(value, str), f"a list of {of_what}")


def _is_policy(value: object) -> bool:
    from stepengine.permissions import Policy, PolicyFile

    return isinstance(value, Policy | PolicyFile)


def _is_store(value: object) -> bool:
    from stepengine.sessions import SessionStore, VersionedStore

    return isinstance(value, SessionStore | VersionedStore) and not isinstance(value, type)


ENGINE = {
    "agents": _several("AgentDefinition objects"),
    "tools": _several("Tool objects, and a model goes to Engine(agents, models=...)"),
    "hooks": or_none(an_instance(Hooks, "Hooks(pre_step=[check])")),
    "permissions": or_none(
        Fine(
            _is_policy,
            'a Policy such as Policy([Rule.allow_category("read")])',
        )
    ),
    "headless": or_none(FLAG),
    "limits": LIMITS,
    "observers": _several("functions of an event, or of objects with on_event"),
    "dependency_overrides": or_none(Fine(lambda value: isinstance(value, Mapping), "a mapping between functions")),
    "pricing": or_none(Fine(callable, "a function of model, usage and time")),
    "default_model": or_none(TEXT),
    "agent_models": AGENT_MODELS,
    "retry": or_none(an_instance(RetryPolicy, "RetryPolicy(attempts=2)")),
    "rate_limits": or_none(
        Fine(
            lambda value: (
                isinstance(value, RateLimit)
                or (isinstance(value, Mapping) and all(isinstance(limit, RateLimit) for limit in value.values()))
            ),
            "a RateLimit, or a mapping from provider prefixes to them",
        )
    ),
    "sessions": or_none(
        Fine(
            _is_store,
            'a session store, such as FileSessions("sessions"), or an object with get_history and save_history',
        )
    ),
    "sleep_in_process": Fine(
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= 0,
        "a number of seconds, such as 60, or math.inf",
    ),
    "child_sessions": Fine(lambda value: isinstance(value, bool), "True or False"),
    "resources": Fine(
        lambda value: (
            isinstance(value, ResourceMap) or (isinstance(value, Iterable) and not isinstance(value, str | Mapping))
        ),
        "a list of objects, each found by its own type; ResourceMap.insert(value, as_type=Base) files one under another",
    ),
    "workspace": or_none(Fine(lambda value: isinstance(value, Workspace | Path | str), "a folder or a Workspace")),
}


def check_engine(arguments: Mapping[str, Any]) -> None:
    """
    Refuse what an engine cannot be made of.

    Args:
        arguments: The arguments by name, and under ``"unknown"`` those that there are not.

    Raises:
        DefinitionError: saying what would have been fine.
    """
    for name in arguments["unknown"]:
        known = list_names([each for each in arguments if each not in ("self", "unknown")], name)
        msg = f"an Engine takes no {name!r}; it takes: {known}"
        raise DefinitionError(msg)
    for problem in filter(
        None, [what.problem(f"Engine({name}=...)", arguments[name]) for name, what in ENGINE.items()]
    ):
        raise DefinitionError(problem)


def watcher_of(observer: ObserverLike) -> Watcher:
    """
    Return what shows events to *observer*.

    Raises:
        DefinitionError: when it cannot be called, or is async.
    """
    call = getattr(observer, "on_event", observer)
    if not callable(call) or inspect.iscoroutinefunction(call):
        msg = f"an observer is a plain function of one event, or an object with such an on_event, not {observer!r}"
        raise DefinitionError(msg)
    return Watcher(observer)


def rates_of(given: RateLimitsLike, models: Models, clock: Clock) -> RateLimits | None:
    """
    Return the limiters for what ``Engine(rate_limits=...)`` was given.

    Raises:
        DefinitionError: when that names a provider that *models* does not have.
    """
    if given is None:
        return None
    unknown = [] if isinstance(given, RateLimit) else [name for name in given if name not in models.providers]
    if unknown:
        known = list_names(models.providers, unknown[0], quoted=True)
        msg = f"rate_limits names the provider {unknown[0]!r}, which is not registered; registered are: {known}"
        raise DefinitionError(msg)
    return RateLimits(given, clock)


def sessions_in(store: SessionsLike, *, children: bool) -> EngineSessions | None:
    """Return the sessions of ``Engine(sessions=..., child_sessions=...)``, if it has any."""
    if store is None and not children:
        return None
    from stepengine.engine.session_turns import EngineSessions

    return EngineSessions(store, children=children)
