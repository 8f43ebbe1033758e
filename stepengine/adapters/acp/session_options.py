"""
The options of an editor's session: the permission mode and the model.

This module has the choices and their form in the protocol. Engines and sessions do not belong here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.data.messages import to_tuple
from stepengine.data.visible import visible
from stepengine.errors import DefinitionError
from stepengine.permissions.policy import MODES

if TYPE_CHECKING:
    from acp import schema

MODE, MODEL = "mode", "model"
AS_SET = "default"
"""Stands for no model in particular: an editor needs a word for it."""
ABOUT = {
    "default": ("Ask", "Asks before the agent changes a file or runs a program."),
    "plan": ("Plan", "Allows only actions that change nothing."),
    "accept_edits": ("Accept edits", "Allows changes to files; asks before the agent runs a program."),
    "dont_ask": ("Do not ask", "Denies every action that would need an approval."),
    "bypass": ("Allow all", "Allows every action that no rule denies, without asking."),
}


@frozen
class SessionChoices:
    """
    The permission mode and the model for the turns of a session.

    Attributes:
        mode: The mode of the policy; ``""`` for the mode of the engine's maker.
        model: The model of all agents; ``""`` for those that the agents and the engine's maker name.
    """

    mode: str = ""
    model: str = ""


@frozen
class OfferedChoices:
    """
    The permission modes and models that a person can choose from.

    Attributes:
        modes: Modes of a policy, the first one by default; with none of them nothing is offered.
        models: Models, likewise; ``""`` stands for those that the agents name.

    Raises:
        DefinitionError: For an unknown permission mode.
    """

    modes: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    models: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)

    def __attrs_post_init__(self) -> None:
        if unknown := [mode for mode in self.modes if mode not in MODES]:
            msg = f"unknown mode {unknown[0]!r} of a policy; valid modes: {', '.join(MODES)}"
            raise DefinitionError(msg)

    @property
    def defaults(self) -> SessionChoices:
        """The initial choices."""
        return SessionChoices(self.modes[0] if self.modes else "", self.models[0] if self.models else "")

    def replace_unoffered_choices(self, choices: SessionChoices) -> SessionChoices:
        """Return earlier choices, with the default in place of each one that is no longer offered."""
        # A kept choice may be of a time when more was offered. What is no longer offered is not in force, whatever an
        # editor remembers.
        first = self.defaults
        return SessionChoices(
            choices.mode if choices.mode in self.modes else first.mode,
            choices.model if choices.model in self.models else first.model,
        )

    def with_option_value(self, chosen: SessionChoices, option: str, value: object) -> SessionChoices | None:
        """Return *chosen* with *value* for an option; ``None`` if the value is not offered."""
        if option == MODE and value in self.modes:
            return attrs.evolve(chosen, mode=str(value))
        if option == MODEL:
            model = "" if value == AS_SET else value
            return attrs.evolve(chosen, model=str(model)) if model in self.models else None
        return None

    # --- in the protocol's words --------------------------------------------------------------------------------------

    def make_mode_state(self, chosen: SessionChoices) -> schema.SessionModeState | None:
        """Return the offered modes and the current one; ``None`` if there are no modes."""
        from acp import schema

        if not self.modes:
            return None
        modes = [schema.SessionMode(id=mode, name=ABOUT[mode][0], description=ABOUT[mode][1]) for mode in self.modes]
        return schema.SessionModeState(current_mode_id=chosen.mode, available_modes=modes)

    def make_config_options(self, chosen: SessionChoices) -> list[Any]:
        """Return all options with their values and the current value."""
        from acp.schema import SessionConfigSelectOption as Value

        found = list[Any]()
        # The protocol has two ways to offer a choice, and editors know one or the other: modes are the older, options
        # the newer, which also has models. So modes are offered by both, under one value.
        if self.modes:
            values = [Value(value=mode, name=ABOUT[mode][0], description=ABOUT[mode][1]) for mode in self.modes]
            about = "What the agent may do without asking, from the next turn on."
            found.append(_make_select_option(MODE, "Permissions", about, chosen.mode, values))
        if self.models:
            values = [Value(value=one or AS_SET, name=visible(one, strict=True) or "As set") for one in self.models]
            about = "The model of all agents, from the next turn on."
            found.append(_make_select_option(MODEL, "Model", about, chosen.model or AS_SET, values))
        return found


def _make_select_option(id: Any, name: str, about: str, current: str, values: list[Any]) -> object:
    """Return a session option that the editor shows as a list of values."""
    from acp.schema import SessionConfigOptionSelect

    return SessionConfigOptionSelect(
        type="select", id=id, name=name, description=about, category=id, current_value=current, options=values
    )
