"""
What a person chooses in an editor: the mode of permissions, and the model.

What lives here: which choices there are, and how the protocol shows them. What must not: engines and sessions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.data.visible import visible
from stepengine.errors import DefinitionError
from stepengine.permissions.policy import MODES

if TYPE_CHECKING:
    from acp import schema

__all__ = ("MODE", "MODEL", "Chosen", "Offer")

MODE, MODEL = "mode", "model"
AS_SET = "default"
"""Stands for no model in particular: an editor needs a word for it."""
ABOUT = {
    "default": ("Ask", "What changes a file or runs a program is asked about."),
    "plan": ("Plan", "Only what changes nothing may be done."),
    "accept_edits": ("Accept edits", "Files are changed without asking; programs are asked about."),
    "dont_ask": ("Do not ask", "What would have to be asked about is refused."),
    "bypass": ("Allow all", "Nothing is asked about. What a rule denies stays denied."),
}


@frozen
class Chosen:
    """
    What holds for the turns of a session.

    Attributes:
        mode: The mode of the policy; ``""`` for that of the engine's maker.
        model: The model of all agents; ``""`` for those that the agents and the engine's maker name.
    """

    mode: str = ""
    model: str = ""


def _texts(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)


@frozen
class Offer:
    """
    What can be chosen.

    Attributes:
        modes: Modes of a policy, the first one by default; with none of them nothing is offered.
        models: Models, likewise; ``""`` stands for those that the agents name.

    Raises:
        DefinitionError: for a mode that no policy has.
    """

    modes: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    models: tuple[str, ...] = attrs.field(default=(), converter=_texts)

    def __attrs_post_init__(self) -> None:
        if unknown := [mode for mode in self.modes if mode not in MODES]:
            msg = f"{unknown[0]!r} is not a mode of a policy; {', '.join(MODES)} are"
            raise DefinitionError(msg)

    @property
    def first(self) -> Chosen:
        """What holds before anybody has chosen."""
        return Chosen(self.modes[0] if self.modes else "", self.models[0] if self.models else "")

    def again(self, kept: Chosen) -> Chosen:
        """Return what was chosen before, as far as it is still offered."""
        # A kept choice may be of a time when more was offered. What is no longer offered is not in force, whatever an
        # editor remembers.
        first = self.first
        return Chosen(
            kept.mode if kept.mode in self.modes else first.mode,
            kept.model if kept.model in self.models else first.model,
        )

    def with_value(self, chosen: Chosen, option: str, value: object) -> Chosen | None:
        """Return *chosen* with another *value* of an option; ``None`` when that is not offered."""
        if option == MODE and value in self.modes:
            return attrs.evolve(chosen, mode=str(value))
        if option == MODEL:
            model = "" if value == AS_SET else value
            return attrs.evolve(chosen, model=str(model)) if model in self.models else None
        return None

    # --- in the protocol's words --------------------------------------------------------------------------------------

    def mode_state(self, chosen: Chosen) -> schema.SessionModeState | None:
        """Return the modes and the one in force; ``None`` when there is nothing to choose."""
        from acp import schema

        if not self.modes:
            return None
        modes = [schema.SessionMode(id=mode, name=ABOUT[mode][0], description=ABOUT[mode][1]) for mode in self.modes]
        return schema.SessionModeState(current_mode_id=chosen.mode, available_modes=modes)

    def options(self, chosen: Chosen) -> list[Any]:
        """Return every option with its values and the one in force."""
        from acp.schema import SessionConfigSelectOption as Value

        found = list[Any]()
        # The protocol has two ways to offer a choice, and editors know one or the other: modes are the older, options
        # the newer, which also has models. So modes are offered by both, under one value.
        if self.modes:
            values = [Value(value=mode, name=ABOUT[mode][0], description=ABOUT[mode][1]) for mode in self.modes]
            about = "What may be done without asking, from the next turn on."
            found.append(_option(MODE, "Permissions", about, chosen.mode, values))
        if self.models:
            values = [Value(value=one or AS_SET, name=visible(one, strict=True) or "As set") for one in self.models]
            about = "The model of all agents, from the next turn on."
            found.append(_option(MODEL, "Model", about, chosen.model or AS_SET, values))
        return found


def _option(id: Any, name: str, about: str, current: str, values: list[Any]) -> object:
    from acp.schema import SessionConfigOptionSelect

    return SessionConfigOptionSelect(
        type="select", id=id, name=name, description=about, category=id, current_value=current, options=values
    )
