"""What the world of a simulated run answers when nothing goes wrong: replies, results and answers, from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import attrs

from stepengine.data.effects import Ask, CallModel, CallTool, Leaf, Perform
from stepengine.data.json import freeze
from stepengine.data.messages import TextPart, ToolCallPart, ToolResult
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure, Single, Value
from stepengine.data.questions import AnswerLike, answered
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, StepEngineError
from stepengine.testing.scripted import Failing
from stepengine.tools.definition import Tool

__all__ = ("Canned", "Replies", "drawn", "stand_in")

Replies: TypeAlias = "Sequence[Any] | Callable[[ModelRequest, Random], Any] | None"
CALL_RATE = 0.6
MANY = 2
NAMING = ("agent_type", "agent_id")
"""Members of inputs that name an agent."""
TEXTS = ("x", "a.py", "some text")
PLAIN: Mapping[str, Callable[[Random], Any]] = {
    "integer": lambda random: random.randint(1, 9),
    "number": lambda _: 1.5,
    "boolean": lambda random: random.random() < 0.5,  # noqa: PLR2004
    "null": lambda _: None,
}
"""Values of the types that hold no others."""
LAST = "done"


def stand_in(name: str) -> Tool[..., Any]:
    """Return a tool that nobody described: it takes every input."""
    return Tool(name, "", {}, lambda _: None)


@attrs.frozen
class Canned:
    """
    What a simulated world says.

    Attributes:
        seed: What it depends on.
        replies: Replies of the model in order, then ``"done"``; a function of request and random source; or ``None`` for
            replies that are drawn: texts, and calls of the offered tools.
        results: By name of a tool or of the function of a ``Perform``: what it gives, or a function of the tool's input,
            or of the arguments of the ``Perform``.
        answers: By text of a question: the answer. Others get the first option, or ``"yes"``.
        agents: Ids of agents that a drawn call may name.
    """

    seed: int
    replies: Replies = None
    results: Mapping[str, Any] = attrs.field(factory=dict)
    answers: Mapping[str, AnswerLike] = attrs.field(factory=dict)
    agents: tuple[str, ...] = ()
    _asked: dict[tuple[str, int], int] = attrs.field(factory=dict, init=False)

    def outcome(self, path: str, effect: Leaf, at: int) -> Single:
        """Return what *effect* gives."""
        if isinstance(effect, CallModel):
            return self._reply(path, effect, at)
        if isinstance(effect, CallTool):
            result = attrs.evolve(self._result(effect), tool_name=effect.tool_name, tool_call_id=effect.tool_call_id)
            return Value(result, at)
        if isinstance(effect, Perform):
            return Value(freeze(self._performed(effect)), at)
        if isinstance(effect, Ask):
            return Value(tuple([answered(self._answer(q), q) for q in effect.questions]), at)
        msg = f"a child is run, not answered: {effect!r}"
        raise TypeError(msg)

    def _reply(self, path: str, effect: CallModel, at: int) -> Single:
        random = Random(f"{self.seed}:{path}:{effect.seq}:reply")  # noqa: S311
        # By address, so that a call that is made again after a crash gets the same reply.
        index = self._asked.setdefault((path, effect.seq), len(self._asked))
        if self.replies is None:
            item: Any = drawn(effect.request, random, self.agents)
        elif callable(self.replies):
            item = self.replies(effect.request, random)
        else:
            item = self.replies[index] if index < len(self.replies) else LAST
            item = item(effect.request) if callable(item) else item
        if isinstance(item, Failing):
            error = item.error
            known = isinstance(error, StepEngineError)
            return Failure(error if known else ModelError(str(error)), at)  # type: ignore[arg-type]
        return Value(ModelReply(item, usage=Usage(3, 1)) if isinstance(item, str) else item, at)

    def _result(self, effect: CallTool) -> ToolResult:
        made = self.results.get(effect.tool_name, f"result {effect.seq} of {effect.tool_name}")
        made = made(effect.input) if callable(made) else made
        if isinstance(made, ToolResult):
            return made
        return ToolResult.text(made) if isinstance(made, str) else ToolResult.json(made)

    def _performed(self, effect: Perform) -> Any:
        call = effect.call
        made = self.results.get(call.name)
        return made(*call.args, **call.kwargs) if callable(made) else made

    def _answer(self, question: Any) -> AnswerLike:
        return self.answers.get(question.text, question.options[0] if question.options else "yes")


def drawn(request: ModelRequest, random: Random, agents: tuple[str, ...] = ()) -> ModelReply:
    """Return a reply as a model might give it: a text, or calls of what it was offered, sometimes with wrong input."""
    usage = Usage(random.randint(1, 99), random.randint(1, 9))
    if not request.tools or random.random() > CALL_RATE:
        return ModelReply((TextPart("fine"),), usage=usage)
    specs = [random.choice(request.tools) for _ in range(random.randint(1, 3))]
    return ModelReply([ToolCallPart("", s.name, _input(s.input_schema, random, agents)) for s in specs], usage=usage)


def _input(schema: Mapping[str, Any], random: Random, agents: tuple[str, ...]) -> Mapping[str, Any]:
    if random.random() < 0.1:  # noqa: PLR2004
        return {}
    made = _Drawing(random, schema.get("$defs", {}), agents).value(schema)
    return made if isinstance(made, Mapping) else {}


@attrs.frozen
class _Drawing:
    """Draws values that roughly fit a schema; what does not is refused by the tool, which is a case too."""

    random: Random
    known: Mapping[str, Any]
    agents: tuple[str, ...]

    def value(self, schema: Any, depth: int = 0) -> Any:
        if not isinstance(schema, Mapping) or depth > 5:  # noqa: PLR2004
            return "x"
        if "$ref" in schema:
            return self.value(self.known.get(schema["$ref"].rpartition("/")[2]), depth + 1)
        choices: Iterable[Any] = schema.get("enum") or ([schema["const"]] if "const" in schema else ())
        if choices:
            return self.random.choice(list(choices))
        for word in ("anyOf", "oneOf"):
            if schema.get(word):
                return self.value(self.random.choice(list(schema[word])), depth + 1)
        return self._of_type(schema, schema.get("type", "object" if "properties" in schema else "string"), depth + 1)

    def _of_type(self, schema: Mapping[str, Any], kind: Any, depth: int) -> Any:
        random = self.random
        if kind == "object":
            required, members = schema.get("required", ()), schema.get("properties", {}).items()
            given = {name: s for name, s in members if name in required or random.random() < 0.2}  # noqa: PLR2004
            return {name: self._member(name, member, depth) for name, member in given.items()}
        if kind == "array":
            return [self.value(schema.get("items"), depth) for _ in range(random.randint(1, MANY))]
        made = PLAIN.get(kind) if isinstance(kind, str) else None
        return made(random) if made is not None else random.choice(TEXTS)

    def _member(self, name: str, schema: Any, depth: int) -> Any:
        if name in NAMING and self.agents:
            return self.random.choice(self.agents)
        return self.value(schema, depth)
