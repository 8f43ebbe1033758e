"""
The choice of the model of each run, from the engine, the caller of the run and its record.

``EngineModels`` has the choices of an engine, and makes the ``RunModels`` of a root run and its children (in ``run_plans``).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import attrs

from stepengine.data.alike import list_names
from stepengine.data.definition import normalised_id
from stepengine.engine.overrides import Override
from stepengine.engine.run_plans import RecordedModels, RunModels, RunRequest, normalise_model_name
from stepengine.errors import InputError, UnknownModel

if TYPE_CHECKING:
    from stepengine.journal import Journal
    from stepengine.journal.journaled_run import JournaledRun
    from stepengine.models import Models


def read_recorded_models(session: JournaledRun, forked: Journal | None) -> RecordedModels:
    """Return the models in the journal of *session*, or in the one that it was forked from."""
    assert session.recorded_part is not None  # noqa: S101 - only recorded runs are started again
    history = session.recorded_part.history if forked is None else forked.history()
    # Of a fork the journal that it was forked from is asked: its own holds only what stands before the cut, which may
    # be before the first model call.
    models: dict[str, str] = {}
    for (path, _), intent in history.intents.items():
        if intent.type == "model_call":
            models.setdefault(history.model(intent), path)
    root = history.root.get("model") or next((model for model, path in models.items() if not path), None)
    if root is not None:
        models.setdefault(root, "")
    is_whole = session.mode.is_record_only(session.recorded_part.history)
    chosen, own = history.root.get("models") or {}, history.root.get("run_models") or {}
    return RecordedModels(frozenset([*models, *chosen.values(), *own.values()]), root, chosen, own, is_whole)


@attrs.define(kw_only=True, eq=False)
class EngineModels:
    """
    The models that an engine chooses.

    Attributes:
        registry: Its registry.
        keep_names: Whether model strings stay as written, because one provider serves them all.
        default: The model of roots that name none.
        by_agent: Models in place of those that agents name, by agent id; that of ``""`` for all others.
        has_pricing: Whether price data are loaded, which also have the context length of each model.
    """

    registry: Models
    keep_names: bool
    default: str | None
    by_agent: Mapping[str, str]
    has_pricing: bool
    # By registry, as another one (`override`) may know other windows; weak, so that a registry of one test is not kept
    # for ever.
    _windows: weakref.WeakKeyDictionary[Models, dict[str, int | None]] = attrs.field(
        factory=weakref.WeakKeyDictionary, init=False
    )

    def __attrs_post_init__(self) -> None:
        self.by_agent = self._normalise_agent_models(self.by_agent)

    def _normalise_agent_models(self, models: Mapping[str, str]) -> dict[str, str]:
        """Return models by normalised agent id, with their providers unless names are kept."""
        # Ids are written with `-` or `_`, and a model with or without its provider; both are brought into one form
        # here, once, or a choice for `code_searcher` would silently not hold for `code-searcher`.
        return {
            normalised_id(agent): model if self.keep_names else normalise_model_name(self.registry, model)
            for agent, model in models.items()
        }

    def make_run_models(self, request: RunRequest, recorded: RecordedModels, override: Override) -> RunModels:
        """Return the models of a root run; *override* has a registry in place of the engine's. Raises as ``get_models_chosen_for_run``."""
        registry = (override.models or self.registry).for_run()
        return RunModels(
            registry=registry,
            default=self._choose_root_default(registry, recorded),
            chosen={**(self.by_agent or recorded.chosen), **self.get_models_chosen_for_run(request, recorded)},
            recorded=recorded,
            keep_names=override.keep_names if override.models else self.keep_names,
            window=partial(self._find_context_window, registry, offline=recorded.is_whole),
        )

    def get_models_chosen_for_run(self, request: RunRequest, recorded: RecordedModels) -> Mapping[str, str]:
        """
        Return the models chosen for this run alone, by agent id: by the caller, or else in the record.

        Args:
            request: The request of the caller, with its agent and choice.
            recorded: The models in the record of the run.

        Raises:
            InputError: when the choice names an agent that does not run here.
        """
        if not request.agent_models:
            return recorded.own
        own = self._normalise_agent_models(request.agent_models)
        known = {"", *[normalised_id(one.definition.id) for one in (request.agent, *request.agent.known_agents)]}
        for agent_id in own:
            if agent_id not in known:
                msg = f"agent_models names {agent_id!r}, which does not run here; agents that do: {list_names(sorted(known - {''}), agent_id)}"
                raise InputError(msg, issues=(msg,))
        # A model for all is for those, too, that had one of their own when the run was recorded.
        return own if "" in own else {**recorded.own, **own}

    def _choose_root_default(self, models: Models, recorded: RecordedModels) -> str | None:
        """Return the model of roots that name none: the engine's, unless the record has another one; else the only provider's."""
        # A recorded run keeps the model that it had, though the engine's default is another one today: it is to be
        # repeated, not improved. Only a default that the record knows itself is taken.
        own = self.default
        if own is None or not recorded.models or own in recorded.models:
            return own or recorded.default or (None if recorded.is_whole else models.default_model)
        return own if normalise_model_name(models, own) in recorded.models else recorded.default or own

    def _find_context_window(self, models: Models, model: str, *, offline: bool) -> int | None:
        """Return a model's context length; ``None`` without pricing or, with *offline*, for an unknown model, which raises otherwise."""
        if not self.has_pricing:
            return None
        windows = self._windows.setdefault(models, {})
        known = windows.get(model)
        if known is None:  # nor was it known before: the provider may have been asked since
            try:
                known = windows[model] = models.info(model).context_window
            except UnknownModel:
                if not offline:
                    raise
        return known
