"""The output of a run, as set or returned: checked and decoded; ``final_output`` requests a missing one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from stepengine.data.json import NO_JSON, JsonValue, freeze, parse_json_answer
from stepengine.data.state import AgentState
from stepengine.errors import HandlerError, OutputMissing, StepEngineError
from stepengine.machine.history import LastTexts
from stepengine.machine.plan import RunPlan


def _copy_with_output(state: AgentState, output: object) -> AgentState:
    """Return *state* with an output of the author's own type."""
    # The constructor takes JSON alone, as everything else that makes a state should. This copy is for the handler's eyes.
    shown = copy.copy(state)
    object.__setattr__(shown, "output", output)
    return shown


class Output:
    """
    The output of a run so far.

    Attributes:
        value: The output as JSON.
        is_given: Whether there is an output; ``None`` may be one.
        is_of_turn: Whether it was set in the current turn.
        issues: What was wrong with the last attempt; empty once one was right.
        refused: The value of that attempt.
        last_texts: The last texts of the run, for a run whose output they are.
    """

    __slots__ = ("_decoded", "_plan", "_shown", "is_given", "is_of_turn", "issues", "last_texts", "refused", "value")

    def __init__(self, plan: RunPlan, value: Any, last_texts: LastTexts) -> None:
        """Start with *value*, the output in the state that the run continues."""
        self._plan = plan
        self.last_texts = last_texts
        self.value = value
        self.is_given = value is not None
        self.is_of_turn = False
        self.issues: tuple[str, ...] = ()
        self.refused: Any = None
        self._decoded: tuple[JsonValue, object] | None = None
        self._shown: tuple[AgentState, AgentState] | None = None

    @property
    def needs_validation(self) -> bool:
        """Whether it has to fit a schema."""
        return self._plan.agent.output_schema is not None

    def set(self, value: object) -> None:
        """Replace the output; *value* is not checked."""
        self.value = freeze(value)
        self.is_given = self.is_of_turn = True
        self.issues = ()

    def set_from_model(self, value: Any) -> bool:
        """
        Set the output to a model's *value*, or to its member ``data``; return whether one is valid.

        Where ``data`` is the only member and no field of the schema, it is tried first: the whole object may fit, too,
        such as a model whose fields all have defaults, and would hide it.
        """
        if not isinstance(value, Mapping) or "data" not in value:
            return self.set_first_valid(value)
        if len(value) > 1 or self._schema_has_data_field():
            return self.set_first_valid(value, value["data"])
        if self.set_first_valid(value["data"]):
            return True
        issues = self.issues
        if self.set_first_valid(value):
            return True
        self.issues = issues
        return False

    def set_from_text(self, text: str) -> None:
        """
        Set the output to the JSON in *text*, alone or in one fenced block, if it fits the schema; else record the issues.

        Without a schema or without JSON nothing changes.
        """
        found = parse_json_answer(text) if self.needs_validation else NO_JSON
        if found is not NO_JSON:
            self.set_from_model(found)

    def _schema_has_data_field(self) -> bool:
        own = self._plan.agent.output_schema
        return (
            own is not None
            and own.json_schema.get("type") == "object"
            and "data" in own.json_schema.get("properties", {})
        )

    def set_first_valid(self, *values: Any) -> bool:
        """Set the first valid one of *values*; if there is none, record the issues of the best one and return False."""
        refused: list[tuple[str, ...]] = []
        for value in values:
            try:
                self.set(self._validate(value))
            except OutputMissing as error:
                refused.append(error.issues or (error.message,))
            else:
                return True
        self.issues = min(refused, key=len)
        self.refused = values[0]
        return False

    def start_turn(self) -> None:
        """Record that a new turn starts, which has set no output yet."""
        self.is_of_turn = False

    def with_decoded_output(self, state: AgentState) -> AgentState:
        """Return *state* with its output decoded to the author's own type; *state* itself if there is nothing to decode."""
        schema = self._plan.agent.output_schema
        if schema is None or schema.decode is None or state.output is None:
            return state
        # The same object for the same state: whoever compares two states compares no transcripts.
        if self._shown is None or self._shown[0] is not state:
            self._shown = state, _copy_with_output(state, self.get_typed_value())
        return self._shown[1]

    def make_missing_error(self, remedy: str = "") -> OutputMissing:
        """Return the error for a run that ends without its required output; *remedy* ends its message."""
        why = f"; the last attempt was refused: {'; '.join(self.issues)}" if self.issues else ""
        where = f" (run {self._plan.path})" if self._plan.path else ""
        definition = self._plan.agent.definition
        remedy = remedy or (
            f". The model gave none with output_retries={definition.output_retries}; raise that, or say in the prompt to call "
            "set_output"
        )
        source = "output_schema" if self.needs_validation else "output_mode='structured_output'"
        msg = f"agent {definition.id!r}{where} ended without the output that its {source} requires{why}{remedy}"
        return OutputMissing(msg, issues=self.issues)

    def get_typed_value(self) -> object:
        """
        Return the output in the author's own type, if the schema is of one.

        Raises:
            HandlerError: when it cannot be made of the output again.
        """
        if self._decoded is not None and self._decoded[0] is self.value:
            return self._decoded[1]
        try:
            self._decoded = self.value, self._plan.agent.decode_output(self.value)
            return self._decoded[1]
        except Exception as error:
            msg = f"the output of agent {self._plan.agent.definition.id!r} cannot be read back: {type(error).__name__}: {error}"
            raise HandlerError(msg, kind=type(error).__name__) from error

    def _validate(self, value: Any) -> object:
        """
        Validate *value* and return it as the JSON to store.

        Raises:
            OutputMissing: when it does not fit the schema, or a validator of the author's raised.
        """
        schema = self._plan.agent.output_schema
        assert schema is not None  # noqa: S101 - the caller has asked
        try:
            return schema.validate(value)
        except StepEngineError:
            raise
        except Exception as error:
            issue = f"the check of the output raised {type(error).__name__}: {error}"
            msg = f"agent {self._plan.agent.definition.id!r}: {issue}"
            raise OutputMissing(msg, issues=(issue,)) from error
