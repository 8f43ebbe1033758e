"""Questions to a person, their answers, and decisions about tool calls."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, Protocol, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.checks import TEXT, format_repr_or_type, make_validator, with_keyword_hints
from stepengine.data.functions import accepts_one_argument
from stepengine.data.json import ABSENT, JsonDict, JsonValue, freeze, freeze_object
from stepengine.data.messages import to_string_tuple, to_tuple
from stepengine.data.origins import describe_origins
from stepengine.data.visible import cut_after
from stepengine.errors import AnswerRejected, DataError, DefinitionError

SEPARATOR = re.compile(r"\s*,\s*")
REMEMBERED = "remembered"
"""The ``by`` of an answer that an earlier one with ``remember`` gave."""
NOBODY = "nobody"
"""The ``by`` of an automatic denial if no one can answer."""
REFUSED = "refused"
"""The ``by`` of an automatic denial for a call that the tool itself would reject."""
PAGE = "page"
"""The ``by`` of a result that a page gives for a call of its own tool."""
NO_CALLER = (REMEMBERED, NOBODY, REFUSED, PAGE)
"""The values of ``by`` that name no person: no caller of a server has such a name."""
DOUBT = "doubt:"
"""The id of a question about an effect in doubt begins with it; the effect's address follows."""
YES, NO = ("yes", "y", "allow", "true"), ("no", "n", "deny", "false")
SMALLEST, LARGEST = Decimal("0.000001"), Decimal(10) ** 12
"""The numbers that answer a question lie between these."""
MAX_NUMBER_CHARS = 32
"""The longest number that is parsed: people type no longer one, and parsing a long decimal is slow."""
SHOWN_CHARS = 200
"""
An answer that is refused is quoted up to about three lines: enough to recognize it, and no pasted document in an
error.
"""
MAX_QUESTIONS = 100
"""
A run asks at most so many questions at once: a person can still go through the list, and a runaway loop is stopped.
"""


def _freeze_objects(value: Iterable[object]) -> tuple[JsonDict, ...]:
    return tuple([freeze_object(one) for one in to_tuple(value)])


def _to_option_texts(value: str | Iterable[Any]) -> tuple[str, ...]:
    return tuple([str(o["label"] if isinstance(o, Mapping) and "label" in o else o) for o in to_string_tuple(value)])


@frozen
class Question:
    """
    One question to a person.

    Attributes:
        id: Stable within the run tree, such as ``"q3"`` or ``"2.q3"`` for a child's; with ``Ask(key="size")`` it is
            ``"size"``, of a child ``"2:size"``.
        text: The question.
        options: Choices; empty means free text.
        multi_select: Whether several options may be chosen.
        tool_name: For a permission question, the tool that wants to run.
        details: Free JSON to show; for a permission question, the input that would run.
        path: The path of the run that asks.
        allow_text: Whether another text than the options is an answer; it matters only with options. A permission may always be
            refused with a text.
        preview: For a permission question, what the tool's own ``preview`` says of the call, as ``action`` and ``details``;
            ``None`` without one. It is made when a person is asked, so it does not count when questions are compared.
            If it has a ``problem``, the tool will refuse the call for that reason, and no one is asked.
        remember: For a permission question, the rule that ``Answer(remember=...)`` adds, as a policy file has it; its
            ``"id"`` says in words what that allows. ``None`` when a rule would not keep the question from being asked again.
        wider: Rules that allow more than *remember* does, the narrowest first and the last for any input of the tool. One
            is for all edits of files, where the mode ``accept_edits`` would allow the call.
            ``Answer(remember=..., covers=rule["id"])`` adds one of them in its place.
        number: Which numbers above 0 are answers beside the options: ``"whole"`` ones or ``"any"``; ``None`` for none. A limit that
            asks for more (``Limits(ask=True)``) has one; ``"yes"`` and ``"no"`` answer it, too.
        descriptions: What each of the options means, in their order; empty when nothing is said of them.
        provenance: For a permission question of a rule about untrusted data, where each argument that matters comes from, as
            ``stepengine.data.origins`` describes; and ``origins`` says in words.
    """

    id: str
    text: str
    options: tuple[str, ...] = attrs.field(default=(), converter=_to_option_texts)
    multi_select: bool = False
    tool_name: str | None = None
    details: JsonValue = attrs.field(default=None, converter=freeze)
    path: str = ""
    allow_text: bool = attrs.field(default=False, kw_only=True)
    preview: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), eq=False, kw_only=True
    )
    remember: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), eq=False, kw_only=True
    )
    wider: tuple[JsonDict, ...] = attrs.field(default=(), converter=_freeze_objects, eq=False, kw_only=True)
    descriptions: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple, eq=False, kw_only=True)
    number: Literal["whole", "any"] | None = attrs.field(default=None, kw_only=True)
    provenance: tuple[JsonDict, ...] = attrs.field(default=(), converter=_freeze_objects, eq=False, kw_only=True)

    @property
    def origins(self) -> tuple[str, ...]:
        """A sentence for each argument in ``provenance``, those of untrusted values first."""
        return describe_origins(self.provenance)

    @property
    def problem(self) -> str:
        """The reason why the tool will refuse the call anyway, so that no one is asked; ``""`` otherwise."""
        return "" if self.preview is None else str(self.preview.get("problem", ""))


@with_keyword_hints
@frozen
class Answer:
    """
    The answer of a person.

    Attributes:
        selected: The chosen options; a string is one.
        text: Free text.
        declined: The person did not want to answer.
        remember: ``"session"`` turns an approval into a rule for the rest of the session, or of the run tree without one:
            there are no more questions about such calls. ``"always"`` also stores the rule in the engine's ``PolicyFile``,
            for every process that uses the file. Without a file it is ``"session"``. *remember* alone is an approval.
        edited_input: For a permission question, a replacement for the input of the call. It alone is an approval. It is
            validated and checked like the first input, so a denied input stays denied.
        result: For a question about an effect in doubt, ``doubt:ADDRESS``, its result as found by the person: a
            ``ToolResult``, text or JSON of a tool, JSON of a ``Perform``, or an error of ``StepEngineError``. The effect is
            not repeated, and this result is recorded.
        by: The person who answered, for the record.
        reason: The reason, for the record; the model receives the reason of a denial.
        covers: With *remember*, the id of the rule to add: one of ``Question.wider``, or by default ``Question.remember``.
    """

    selected: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple)
    text: str = attrs.field(default="", validator=make_validator(TEXT, DataError))
    declined: bool = False
    remember: Literal["session", "always"] | None = None
    edited_input: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )
    result: Any = attrs.field(default=ABSENT, kw_only=True)
    by: str = attrs.field(default="", kw_only=True)
    reason: str = attrs.field(default="", kw_only=True)
    covers: str = attrs.field(default="", kw_only=True)

    @property
    def value(self) -> str:
        """The answer as one string: the choices joined by commas, else the text; ``""`` when declined."""
        return "" if self.declined else ", ".join(self.selected) or self.text

    @property
    def agrees(self) -> bool:
        """Whether it approves a permission question."""
        if self.declined or not self.value:
            return not self.declined and (self.remember is not None or self.edited_input is not None)
        return self.value.strip().lower() in YES


AnswerLike: TypeAlias = str | bool | Answer
"""An answer to a question, or its text or decision."""


def find_answers_problem(answers: object) -> str:
    """Return the problem with a caller's answers by the ids or texts of their questions; ``""`` if there is none."""
    if answers is None or (isinstance(answers, Mapping) and all(isinstance(key, str) for key in answers)):
        return ""
    shown = format_repr_or_type(answers)
    return f"answers must be a mapping from the id or text of a question, such as {{'q3': 'yes'}}, not {shown}"


def to_answer(value: AnswerLike, question: Question) -> Answer:
    """
    Return a caller's value as the ``Answer`` to *question*.

    A bool is yes or no; a string is a choice, several of them with commas where several can be chosen, or a text. Choices together with
    other texts become one text with commas, where several can be chosen and other texts are answers.
    """
    if isinstance(value, Answer):
        has_others = question.multi_select and not set(value.selected) <= set(question.options)
        is_text = has_others and (question.allow_text or not question.options)
        return attrs.evolve(value, selected=(), text=value.value) if is_text else value
    text = ("yes" if value else "no") if isinstance(value, bool) else value
    if text in question.options:
        return Answer(selected=(text,))
    several = _split_into_options(text, question.options) if question.multi_select else ()
    return Answer(selected=several) if several else Answer(text=text)


def _split_into_options(text: str, options: Sequence[str]) -> Sequence[str]:
    """Return the options that *text* names with commas between them; none if it has other parts. An option may contain commas."""
    parts = [part.strip() for part in text.split(",")]
    if set(parts) <= set(options):
        return parts
    # Each place in the text is looked at once, with the place before it and the option between them.
    text = text.strip()
    came_from: dict[int, tuple[int, str]] = {0: (0, "")}
    waiting = [0]
    while waiting:
        start = waiting.pop()
        for option in options:
            if not option or not text.startswith(option, start):
                continue
            end = start + len(option)
            if end == len(text):
                found = [option]
                while start:
                    start, name = came_from[start]
                    found.append(name)
                return found[::-1]
            comma = SEPARATOR.match(text, end)
            if comma and comma.end() not in came_from:
                came_from[comma.end()] = start, option
                waiting.append(comma.end())
    return ()


def find_answer_problem(value: AnswerLike, question: Question) -> str | None:
    """Return the reason why *value* is not an answer to *question*, or ``None``."""
    answer = to_answer(value, question)
    label, is_permission = f"the answer to {question.id!r}", question.tool_name is not None
    if answer.edited_input is not None and not (is_permission and answer.agrees):
        what = "refuses the call" if is_permission else "answers a question that is not about a tool call"
        return f"{label} has an edited_input, but it {what}"
    if problem := _find_covers_problem(answer, question):
        return f"{label} {problem}"
    if answer.result is not ABSENT:
        return f"{label} has a result, but the question is not about an effect in doubt"
    unknown = [option for option in answer.selected if option not in question.options]
    if unknown:
        return f"{label} selects {unknown}; its options are [{list_names(question.options, unknown[0], quoted=True)}]"
    if len(answer.selected) > 1 and not question.multi_select:
        return f"{label} selects {len(answer.selected)} options; only one can be chosen"
    if question.number and not answer.selected and not answer.declined:
        return _find_number_problem(answer, question, label)
    if answer.selected or answer.declined or is_permission or question.allow_text or not question.options:
        return None
    return f"{label} is {cut_after(answer.text, SHOWN_CHARS)!r}, which is not one of its options: {list_names(question.options, answer.text, quoted=True)}"


def require_valid_answer(value: AnswerLike, question: Question) -> Answer:
    """
    Return a caller's value as the ``Answer`` to *question*; raise ``AnswerRejected`` if it is not a valid one.

    Raises:
        AnswerRejected: when it is not an answer to it.
    """
    if problem := find_answer_problem(value, question):
        raise AnswerRejected(problem)
    return to_answer(value, question)


def parse_number_answer(answer: Answer) -> Decimal | None:
    """Return an answer as a number from a millionth to a million millions, or ``None``."""
    text = answer.value.strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() and SMALLEST <= number <= LARGEST else None


def _find_number_problem(answer: Answer, question: Question, label: str) -> str | None:
    number = parse_number_answer(answer)
    if number is None:
        is_fine = answer.value.strip().lower() in (*YES, *NO)
    else:
        is_fine = question.number == "any" or number == number.to_integral_value()
    if is_fine:
        return None
    what = "a whole number from 1" if question.number == "whole" else "a number above 0"
    return f"{label} must be {list_names(question.options, answer.value, quoted=True)} or {what}, not {cut_after(answer.value, SHOWN_CHARS)!r}"


def _find_covers_problem(answer: Answer, question: Question) -> str | None:
    """Return the problem with the rule named in an answer; a question from a record offers no rules to check."""
    if not answer.covers:
        return None
    if answer.remember is None or not answer.agrees:
        return f"covers {answer.covers!r}, but it makes no rule; a rule needs an approval with remember='session' or 'always'"
    if question.remember is None or find_offered_rule(question, answer.covers) is not None:
        return None
    offered = [str(rule["id"]) for rule in list_offered_rules(question)]
    return f"covers {answer.covers!r}, which is not offered; offered rules: {offered}"


def find_offered_rule(question: Question, covers: str) -> JsonDict | None:
    """Return the rule with the id *covers* that a question offers, the narrowest for ``""``, or ``None``."""
    if not covers or question.remember is None:
        return question.remember
    return next((rule for rule in list_offered_rules(question) if rule["id"] == covers), None)


def list_offered_rules(question: Question) -> tuple[JsonDict, ...]:
    """Return the rules that an approval can add, the narrowest first."""
    return () if question.remember is None else (question.remember, *question.wider)


class Interactor(Protocol):
    """
    An object that asks a person in this process, by its method ``ask``.

    A plain ``ask`` runs in a thread of the engine and may block; an ``async def`` runs on the event loop. Questions of
    concurrent calls or children are asked at the same time; use a lock to show only one. An answer is a string, a bool or
    an ``Answer``.
    """

    def ask(self, question: Question, /) -> AnswerLike | Awaitable[AnswerLike | None] | None:
        """Return the answer to *question*, now or later; it stays open after ``None`` or an exception."""


def validate_interactor(value: Any, where: str) -> Interactor | None:
    """
    Return *value* if it is an interactor or ``None``; else raise.

    Raises:
        DefinitionError: if it is not an interactor; the message contains *where*.
    """
    ask = getattr(value, "ask", None)
    if value is None or (callable(ask) and accepts_one_argument(ask) and not isinstance(value, type)):
        interactor: Interactor | None = value
        return interactor
    hint = "; pass an instance, not the class" if isinstance(value, type) and callable(ask) else ""
    msg = (
        f"{where} must be an object with a method ask(question), plain or async, that returns a string, a bool or an Answer, "
        f"not {value!r}{hint}"
    )
    raise DefinitionError(msg)


@with_keyword_hints
@frozen
class Decision:
    """
    The opinion of a ``pre_tool`` hook about a call; ``None`` instead of a decision is no opinion.

    Make one with ``Decision.allow()``, ``.deny(message)`` or ``.ask(message)``. Deny beats ask beats allow.

    Attributes:
        kind: ``"allow"``, ``"deny"`` or ``"ask"``.
        message: For a deny, the text for the model; for an ask, the question.
        rule_id: The rule that decided, for the log.
        options: For an ask, the choices; ``yes`` and ``no`` by default.
        remember: For an ask, the rule against further questions about such calls; see ``Question.remember``.
        wider: For an ask, rules that allow more than that; see ``Question.wider``.
        provenance: For an ask, the origins of its arguments; see ``Question.provenance``.
    """

    kind: Literal["allow", "deny", "ask"]
    message: str = ""
    rule_id: str | None = None
    options: tuple[str, ...] = attrs.field(default=("yes", "no"), converter=_to_option_texts)
    remember: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )
    wider: tuple[JsonDict, ...] = attrs.field(default=(), converter=_freeze_objects, kw_only=True)
    provenance: tuple[JsonDict, ...] = attrs.field(default=(), converter=_freeze_objects, kw_only=True)

    @classmethod
    def allow(cls, *, rule_id: str | None = None) -> Decision:
        """Let the call run unless another hook objects."""
        return cls("allow", rule_id=rule_id)

    @classmethod
    def deny(cls, message: str = "", *, rule_id: str | None = None) -> Decision:
        """Do not run the call; the model receives *message*."""
        return cls("deny", message, rule_id)

    @classmethod
    def ask(cls, message: str = "", *, rule_id: str | None = None) -> Decision:
        """Ask a person before the call runs."""
        return cls("ask", message, rule_id)
