"""What floors say to each other about tools: ``ToolSpec``, ``ToolAnnotations`` and the protocol ``ToolLike``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from stepengine.data.checks import FLAG, fine
from stepengine.data.json import JsonDict, compact, freeze_object
from stepengine.data.makers import maker_of

__all__ = (
    "ToolAnnotations",
    "ToolBinding",
    "ToolChoice",
    "ToolKind",
    "ToolLike",
    "ToolSpec",
    "Validated",
    "quick_validated",
)

ToolKind: TypeAlias = Literal["ordinary", "control", "expanding"]
ToolChoice: TypeAlias = str
"""``"auto"``, ``"none"``, ``"required"``, or the name of the one tool that must be called (requirements G19)."""


@attrs.frozen(kw_only=True)
class ToolAnnotations:
    """
    Hints about what a tool does to the world (requirements E17).

    Attributes:
        read_only: It changes nothing.
        destructive: It may destroy something; only meaningful when not read-only.
        idempotent: Doing it twice is like doing it once, so it may be run again after a crash.
        open_world: It reaches beyond this machine.
    """

    read_only: bool = attrs.field(default=False, validator=fine(FLAG))
    destructive: bool = attrs.field(default=False, validator=fine(FLAG))
    idempotent: bool = attrs.field(default=False, validator=fine(FLAG))
    open_world: bool = attrs.field(default=False, validator=fine(FLAG))


NO_INPUT = freeze_object({"type": "object", "properties": {}})


@attrs.frozen
class ToolSpec:
    """
    What is known of a tool without running it (design 2, 7).

    Attributes:
        name: Unique name, ``[A-Za-z0-9_-]{1,64}``.
        description: For the model.
        input_schema: JSON Schema of the input, an object.
        kind: Who carries it out: ``"ordinary"`` a performer, ``"control"`` the machine itself, ``"expanding"`` other effects.
        category: For permission rules: ``"read"``, ``"write"``, ``"execute"``, ``"network"`` or any other word.
        annotations: Hints.
        parallel_safe: Whether calls may run at the same time as other parallel-safe calls of one reply.
        ends_turn: Whether the turn ends after it ran (requirements D5).
        forces_next_step: Whether the model must see its result before the turn can end (generator-contract T3).
        requires_permission: Whether an ask applies to it; false means an ask counts as allow, a deny still denies.
        ephemeral: Keep only the newest so many results of this tool in the view; ``None`` keeps all (requirements I12).
        timeout: Seconds that one call may take; ``None`` for the default.
        retries: How often a failed call is tried again; only for idempotent tools.
    """

    name: str
    description: str = ""
    input_schema: JsonDict = attrs.field(default=NO_INPUT, converter=freeze_object)
    kind: ToolKind = attrs.field(default="ordinary", kw_only=True)
    category: str = attrs.field(default="", kw_only=True)
    annotations: ToolAnnotations = attrs.field(factory=ToolAnnotations, kw_only=True)
    parallel_safe: bool = attrs.field(default=False, kw_only=True)
    ends_turn: bool = attrs.field(default=False, kw_only=True)
    forces_next_step: bool = attrs.field(default=True, kw_only=True)
    requires_permission: bool = attrs.field(default=True, kw_only=True)
    ephemeral: int | None = attrs.field(default=None, kw_only=True)
    timeout: float | None = attrs.field(default=None, kw_only=True, metadata={"endless": True})
    retries: int = attrs.field(default=0, kw_only=True)

    @cached_property
    def chars(self) -> int:
        """How many characters of a request it takes: name, description, and its schema as compact JSON; counted once."""
        return len(self.name) + len(self.description) + len(compact(self.input_schema))


@attrs.frozen(weakref_slot=False)
class Validated:
    """
    The input of a tool call after validation.

    Attributes:
        input: As JSON, defaults filled in and values coerced: what is approved, recorded and fingerprinted.
        arguments: As Python values for the tool's body.
    """

    input: JsonDict
    arguments: Mapping[str, Any]


quick_validated = maker_of(Validated)


@attrs.frozen
class ToolBinding:
    """
    A tool as the machine knows it (design 3).

    Attributes:
        spec: What is known of it.
        validate: Turns an input into ``Validated`` or raises ``ToolInputError``.
        repair: Mends what models often get wrong before validation; never used for a handler's input (generator-contract T2).
    """

    spec: ToolSpec
    validate: Callable[[JsonDict], Validated]
    repair: Callable[[JsonDict], JsonDict] | None = None


@runtime_checkable
class ToolLike(Protocol):
    """Anything that an agent definition or an engine accepts as a tool."""

    @property
    def spec(self) -> ToolSpec:
        """What is known of the tool without running it."""

    def binding(self) -> ToolBinding:
        """Return the tool as the machine knows it."""
