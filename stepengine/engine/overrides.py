"""The temporary replacements of ``Engine.override``."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import attrs

from stepengine.engine.options import ModelsLike, Overrides
from stepengine.models.base import Provider
from stepengine.models.registry import Models

if TYPE_CHECKING:
    from stepengine.journal.recorded_forks import SharedBudget
    from stepengine.runtime.services import Services, ToolSetting


class Override(NamedTuple):
    """
    The replacements that ``Engine.override`` makes in one context.

    Attributes:
        models: The registry in force; ``None`` for the engine's.
        keep_names: Whether model strings stay as written, because one provider serves them all.
        dependencies: Dependency factories that replace others.
        budget: A shared budget that model calls are charged to in addition to their own limits; ``None`` without one.
    """

    models: Models | None = None
    keep_names: bool = False
    dependencies: Overrides = MappingProxyType({})
    budget: SharedBudget | None = None

    def replace_tool_dependencies(self, tools: ToolSetting) -> ToolSetting:
        """Return *tools* with the dependencies replaced."""
        if not self.dependencies:
            return tools
        return attrs.evolve(tools, overrides={**tools.overrides, **self.dependencies})

    def charge_calls_to_budget(self, services: Services) -> Services:
        """Return *services* whose model calls the budget pays for, if there is one."""
        budget = self.budget
        if budget is None:
            return services
        from stepengine.journal.recorded_forks import PaidPerformer

        return attrs.evolve(
            services,
            middlewares=(*services.middlewares, lambda inner: PaidPerformer(inner, budget, services.estimate_call)),
        )

    def with_replacements(
        self, models: ModelsLike, dependencies: Overrides | None, budget: SharedBudget | None
    ) -> Override:
        """Return this override with the given models, dependencies or budget added or replaced."""
        return Override(
            self.models if models is None else Models.from_value(models),
            self.keep_names if models is None else isinstance(models, Provider),
            {**self.dependencies, **(dependencies or {})},
            budget or self.budget,
        )


overrides: ContextVar[Mapping[int, Override]] = ContextVar("stepengine_overrides", default=MappingProxyType({}))
"""By the identity of the engine's launcher. A context variable: overrides of concurrent tasks do not meet."""
