"""
The values that a run has received, in the order of its outcomes, for policies that follow data.

They come from the plan, from the author's code and from recorded outcomes, so a replayed or resumed run has the same. A run without
such a policy stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from stepengine.data.call_text import find_call_subject
from stepengine.data.codec import plain
from stepengine.data.effects import (
    CHILD_ENDS,
    AskPerson,
    AwaitMessage,
    CallFunction,
    CallModel,
    CallTool,
    Compute,
    Gather,
    Leaf,
    Spawn,
)
from stepengine.data.hooks import Hooks
from stepengine.data.json import JsonDict, JsonValue
from stepengine.data.messages import CitationPart, OpaquePart, TextPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.outcomes import Failure, Gathered, Single, Value
from stepengine.data.programs import is_sandboxed
from stepengine.data.provenance import BREAK, Provenance, Source, Trust, is_word, iterate_leaves, tokenize
from stepengine.data.questions import NOBODY, REFUSED, REMEMBERED, Answer, Question
from stepengine.data.state import AgentState, ChildResult

if TYPE_CHECKING:
    from stepengine.data.tools import ToolBinding
    from stepengine.machine.plan import RunPlan

NO_PERSON = (REMEMBERED, NOBODY, REFUSED)
"""Who gave an answer in place of a person."""
COMPARED_TOKENS = 8
"""A result that repeats so many tokens of a call's input is its echo: fewer, such as a path or a name, occur in any text."""


def needs_provenance(hooks: Hooks) -> bool:
    """Return whether a ``pre_tool`` hook asks where the arguments of calls come from."""
    return any(getattr(hook, "keeps_provenance", False) for hook in hooks.pre_tool)


class HasStep(Protocol):
    """Tells which step is running."""

    @property
    def step(self) -> int:
        """The number of the step, from 0."""


def make_run_sources(plan: RunPlan, state: AgentState, progress: HasStep) -> RunSources:
    """Return the sources of a run that begins."""
    is_root, is_body, schema = plan.path == "", plan.body is not None, plan.agent.output_schema
    index = plan.provenance
    if index is None:
        index = Provenance() if plan.clean is None else Provenance(clean=plan.clean)
    made = RunSources(
        index,
        progress,
        tools=plan.tools,
        schema=None if schema is None else schema.json_schema,
        is_root=is_root,
        is_body=is_body or is_sandboxed(plan.agent.definition.handle_steps),
    )
    if plan.provenance is None or not (is_body or plan.is_inline):
        made.add_history(state)
    if plan.provenance is None:
        made.add_prompt(plan.input.prompt, plan.input.json)
        # A child in another process: what its parent has seen is not known there.
        index.saw_untrusted = index.saw_untrusted or not is_root
    return made


class RunSources:
    """
    The sources of one run.

    Args:
        index: What is known when the run begins.
        progress: Tells the step.
        tools: The tools of the run, by name.
        schema: The JSON Schema of its output.
        is_root: Whether people write to it.
        is_body: Whether its author's values may be a model's from the start: a tool's body, or a handler in the sandbox.

    Attributes:
        index: What was received.
    """

    __slots__ = ("_has_answered", "_is_root", "_progress", "_schema", "_tools", "_written", "index")

    def __init__(
        self,
        index: Provenance,
        progress: HasStep,
        *,
        tools: Mapping[str, ToolBinding],
        schema: JsonDict | None = None,
        is_root: bool,
        is_body: bool,
    ) -> None:
        self.index = index
        self._progress = progress
        self._tools = tools
        self._schema = schema
        self._is_root = is_root
        # A model has answered: what a handler makes from then on may be the model's.
        self._has_answered = is_body
        # What was written by calls: a source that only gives it back proves nothing.
        self._written = _WrittenTexts()

    def add_prompt(self, prompt: str, params: JsonValue) -> None:
        """Add the prompt and params of a run without inherited provenance; those of a root are the user's."""
        trust: Trust = "trusted" if self._is_root else "untrusted"
        self.index.add(Source("prompt", trust), prompt)
        self.index.add(Source("prompt", trust, tool="params"), params)

    def add_history(self, state: AgentState) -> None:
        """Add the conversation that the run continues: its user has typed the prompts, and the rest may be anybody's."""
        for message in state.message_history:
            if isinstance(message, ToolMessage):
                result = ToolResult(message.content, trust=message.trust)
                source = Source("history", message.trust, tool=message.tool_name, call_id=message.tool_call_id)
                for value in _get_content(result):
                    self.index.add(source, value)
            elif isinstance(message, UserMessage) and "INSTRUCTIONS_PROMPT" not in message.tags:
                is_prompt = self._is_root and "USER_PROMPT" in message.tags
                self.index.add(Source("history", "trusted" if is_prompt else "untrusted"), message.text)
            elif not isinstance(message, UserMessage):
                self._add_reply(Source("history"), message.content)

    # --- what is received -------------------------------------------------------------------------------------------

    def add_outcome(self, effect: Leaf | Gather | Compute, outcome: Single | Gathered) -> None:
        """Add the values in an outcome, and the messages that arrived with it, each with its trust."""
        if isinstance(effect, Gather):
            for one, member in zip(outcome.outcomes, effect.effects, strict=True):  # type: ignore[union-attr]
                self.add_outcome(member, one)
        elif isinstance(outcome, Value):
            self._add_inputs(outcome.inputs)
            self._add_value(effect, outcome.value)
        elif isinstance(outcome, Failure):
            self._add_inputs(outcome.inputs)
            if isinstance(effect, CallTool | CallFunction | Spawn):
                self.index.add(Source("error", step=self._progress.step), str(outcome.error))

    def _add_inputs(self, inputs: Iterable[UserMessage]) -> None:
        """Add arrived user messages, which are trusted only in the root run."""
        for message in inputs:
            # A person writes to the root; a child is written to by its parent, too, and nobody can tell from here.
            self.index.add(
                Source("person", "trusted" if self._is_root else "untrusted", self._progress.step), message.text
            )

    def _add_value(self, effect: Any, value: Any) -> None:
        """Add the result of an effect, with the trust of its kind."""
        step = self._progress.step
        match effect:
            case CallTool():
                self._add_result(effect, value)
            case CallModel():
                self._has_answered = True
                self._add_reply(Source("model", step=step), value.content)
            case CallFunction():
                trust: Trust = "trusted" if effect.call.is_trusted else "untrusted"
                self.index.add(Source("perform", trust, step, effect.call.name), value)
            case AskPerson():
                for question, answer in zip(effect.questions, value, strict=False):
                    self._add_answer(question, answer)
            case AwaitMessage() if value is not None:
                self.index.add(Source("message", step=step, tool=effect.topic), value.value)
            case _:
                self._add_children(effect, value)

    def _add_children(self, effect: Any, value: Any) -> None:
        """Add the children whose results are in *value*, if it has any."""
        if isinstance(value, ChildResult):
            self._add_child(value, effect if isinstance(effect, Spawn) else None)
        elif isinstance(effect, CHILD_ENDS):
            for child in value.ended.values():
                self._add_child(child)

    def _add_result(self, effect: CallTool, result: ToolResult) -> None:
        """Add the content of a tool's result; text that repeats untrusted input of calls stays untrusted."""
        about, step = find_call_subject(effect.input), self._progress.step
        source = Source("tool", result.trust, step, effect.tool_name, effect.tool_call_id, about)
        content = _get_content(result)
        binding = self._tools.get(effect.tool_name)
        given = [text for _, text in iterate_leaves(effect.input) if not self.index.is_trusted(text)]
        if binding is None or not binding.spec.annotations.read_only:
            self._written.add(given)
        if result.trust == "untrusted":
            for value in content:
                self.index.add(source, value)
            return
        # A contact list that is searched for an address says it again, and a file holds what was written into it.
        own = _WrittenTexts()
        own.add(given)
        echo = attrs.evolve(source, trust="untrusted")
        for path, text in [leaf for value in content for leaf in iterate_leaves(value)]:
            tokens = tokenize(text)
            is_echo = own.is_repeated_in(tokens) or self._written.is_repeated_in(tokens)
            self.index.add(echo if is_echo else source, text, at=path, taints=result.trust == "names")

    def _add_reply(self, source: Source, parts: Iterable[object]) -> None:
        """Add the results of server tools. The text of the model is not a source."""
        for part in parts:
            if isinstance(part, OpaquePart) and part.tool:
                self.index.add(source, [part.text, plain(part.data)])
            elif isinstance(part, CitationPart):
                self.index.add(source, [part.url or "", part.title or "", part.quote or ""])

    def _add_child(self, child: ChildResult, effect: Spawn | None = None) -> None:
        """Add text and output of a child; the run has seen untrusted text if the child hands on any."""
        source = Source(
            "child", child.trust, self._progress.step, child.agent_id, effect.tool_call_id if effect else ""
        )
        # A schema bounds the output alone: not the words of the child, its error, or the conversation that an inline child leaves.
        has_read = bool(child.run_id) and child.text_trust == "untrusted"
        leaves_more = child.error is not None or (effect is not None and effect.is_inline)
        if has_read and (leaves_more or child.trust == "untrusted"):
            self.index.saw_untrusted = True
        self.index.add(attrs.evolve(source, trust=child.text_trust), child.text, at="[0]")
        self.index.add(source, plain(child.output), at="[1]")

    def _add_answer(self, question: Question, answer: Answer) -> None:
        """Add the text that a person typed. A chosen option comes from the run itself."""
        if answer.by in NO_PERSON:
            return
        source = Source("person", "trusted", self._progress.step)
        offered = {option.strip().casefold() for option in question.options}
        for text in (answer.text, answer.reason):
            if text.strip().casefold() not in offered:
                self.index.add(source, text)
        if answer.edited_input is not None:
            before = dict(iterate_leaves(question.details))
            for path, text in iterate_leaves(answer.edited_input):
                if before.get(path) != text:
                    self.index.add(source, text, at=path)

    def add_handler_values(self, values: object) -> None:
        """Record values of the author's code as trusted, unless it may have them from a model or a third party."""
        if not self._has_answered and not self.index.saw_untrusted:
            self.index.add(Source("handler", "trusted"), values)

    # --- what is handed on ------------------------------------------------------------------------------------------

    def make_body_provenance(self) -> Provenance:
        """Return the provenance that the body of a tool starts with: that of its caller."""
        return Provenance(self.index)

    def make_child_provenance(self, prompt: str, params: JsonValue, *, inherits: bool = False) -> Provenance:
        """Return the provenance that a child starts with; a child that inherits the conversation starts with that of this run."""
        child = Provenance(self.index) if inherits else self.index.make_child_index([prompt, params])
        if inherits:
            child.add(Source("prompt"), [prompt, params], taints=False)
        return child

    def compute_output_trust(self, output: object) -> Trust:
        """
        Return ``untrusted`` if the output of this run may hold text of third parties, else ``trusted``.

        The output is trusted if the run has seen no such text, or if its schema allows only numbers, flags, fixed words and
        texts that trusted sources gave to the run.
        """
        schema = self._schema
        is_bounded = schema is not None and self._has_only_trusted_text(plain(output), schema, schema)
        return "trusted" if is_bounded or not self.index.saw_untrusted else "untrusted"

    def _has_only_trusted_text(self, value: object, schema: object, root: Mapping[str, Any]) -> bool:
        """Return whether each text in *value* is fixed by *schema* or came to the run from trusted sources."""
        if not isinstance(value, str | Mapping | list | tuple):
            return True
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            name = schema["$ref"].rpartition("/")[2]
            return self._has_only_trusted_text(
                value, root.get("$defs", {}).get(name), {**root, "$defs": {**root.get("$defs", {}), name: None}}
            )
        if not isinstance(schema, Mapping):
            return isinstance(value, str) and self.index.is_trusted(value)
        if any(self._has_only_trusted_text(value, one, root) for one in schema.get("anyOf", ())):
            return True
        if value in (schema.get("enum") or ()) or ("const" in schema and schema["const"] == value):
            return True
        if isinstance(value, str):
            return self.index.is_trusted(value)
        if isinstance(value, Mapping):
            members = schema.get("properties", {})
            return all(
                name in members and self._has_only_trusted_text(one, members[name], root) for name, one in value.items()
            )
        return all(self._has_only_trusted_text(one, schema.get("items"), root) for one in value)


class _WrittenTexts:
    """What calls have written: the beginning of each text, and each token that is no word."""

    __slots__ = ("_beginnings",)

    def __init__(self) -> None:
        self._beginnings: set[tuple[str, ...]] = set()

    def add(self, texts: Iterable[str]) -> None:
        """Add the beginning of each text, and those of its tokens that are not words."""
        for tokens in map(tokenize, texts):
            self._beginnings.add(tokens[:COMPARED_TOKENS])
            self._beginnings.update([(token,) for token in tokens if not is_word(token)])
        self._beginnings -= {(), (BREAK,)}

    def is_repeated_in(self, tokens: tuple[str, ...]) -> bool:
        """Return whether *tokens* contain the beginning of a written text, in time that is linear in *tokens*."""
        sizes = range(1, COMPARED_TOKENS + 1) if self._beginnings else ()
        return any(tokens[start : start + size] in self._beginnings for start in range(len(tokens)) for size in sizes)


def _get_content(result: ToolResult) -> list[object]:
    """Return the texts, media addresses and data of a result as JSON."""
    texts = [part.text for part in result.content if isinstance(part, TextPart)]
    media = [part.url or "" for part in result.media]
    return [*texts, *media, *([] if result.data is None else [result.data])]
