"""
Limits that can be raised by a person: the question, and the raise from its answer.

The error of a limit contains the amount that an approval adds. The question follows from that alone. So all runs that reach
the same limit ask the same question, with one id. The new limit also follows from it, so the limit is raised only once.
"""

from __future__ import annotations

from decimal import Decimal
from math import isfinite
from typing import TypeGuard

from attrs import frozen

from stepengine.data.questions import Answer, Question, parse_number_answer
from stepengine.errors import LimitExceeded

UNITS = {"cost": "US dollars", "tokens": "tokens", "steps": "steps"}
"""The unit of each kind of limit that can be raised."""
ANSWERS = ("yes", "no")


@frozen
class Ceiling:
    """
    A raised limit, as people allowed it.

    Attributes:
        path: The path of the run whose limit it is.
        kind: ``"cost"``, ``"tokens"`` or ``"steps"``.
        most: How much it may be in all.
    """

    path: str
    kind: str
    most: Decimal


def is_raisable_limit_error(error: object) -> TypeGuard[LimitExceeded]:
    """Return whether an error is that of a limit that can be raised; one from a journal may lack the fields for it."""
    if not isinstance(error, LimitExceeded) or error.more is None or error.limit is None or error.kind not in UNITS:
        return False
    return isfinite(error.more) and isfinite(error.limit)


def make_limit_question(error: LimitExceeded) -> Question:
    """Return the question about raising a limit; ``more`` of *error* is the amount that an approval adds."""
    limit, more, unit = _to_decimal(error.limit), _to_decimal(error.more), UNITS[error.kind]
    name = f"limit:{error.kind}:{_format_amount(limit)}"
    whose = f" (the run at {error.path})" if error.path else ""
    text = (
        f"A limit is reached{whose}: {error.message}. Allow {_format_amount(more)} more {unit}, {_format_amount(limit + more)} in all? A number "
        "allows that much more; no ends it here."
    )
    return Question(
        f"{error.path}:{name}" if error.path else name,
        text,
        ANSWERS,
        details={"limit": error.kind, "reached": _to_number(limit), "more": _to_number(more)},
        path=error.path,
        allow_text=True,
        number="any" if error.kind == "cost" else "whole",
    )


def ceiling_from_answer(question: Question, answer: Answer) -> Ceiling | None:
    """Return the raised limit that an answer to a limit's question allows, or ``None`` for a denial."""
    told = question.details
    number = None if answer.declined else parse_number_answer(answer)
    if number is None and not answer.agrees:
        return None
    more = Decimal(str(told["more"])) if number is None else number  # type: ignore[call-overload,index]
    reached = Decimal(str(told["reached"]))  # type: ignore[call-overload,index]
    return Ceiling(question.path, str(told["limit"]), reached + more)  # type: ignore[call-overload,index]


def _to_decimal(number: float | None) -> Decimal:
    return Decimal(str(number or 0))


def _to_number(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _format_amount(number: Decimal) -> str:
    return f"{_to_number(number)}"
