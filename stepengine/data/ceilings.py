"""
A limit that asks: what people are asked when it is reached, and what their answer allows.

Whoever keeps a limit says with its refusal how much more a yes would allow. The question follows from that alone, so that all
runs that have reached one limit ask the same, by one id; and so does what the limit is raised to, so that it is raised once.
"""

from __future__ import annotations

from decimal import Decimal
from math import isfinite
from typing import TypeGuard

from attrs import frozen

from stepengine.data.questions import Answer, Question, number_in
from stepengine.errors import LimitExceeded

__all__ = ("Ceiling", "asks", "ceiling_of", "question_about")

UNITS = {"cost": "US dollars", "tokens": "tokens", "steps": "steps"}
"""What each kind of limit that may ask counts."""
ANSWERS = ("yes", "no")


@frozen
class Ceiling:
    """
    What people allowed.

    Attributes:
        path: The path of the run whose limit it is.
        kind: ``"cost"``, ``"tokens"`` or ``"steps"``.
        most: How much it may be in all.
    """

    path: str
    kind: str
    most: Decimal


def asks(error: object) -> TypeGuard[LimitExceeded]:
    """Return whether an error is that of a limit that asks for more; one out of a record may say what no limit does."""
    if not isinstance(error, LimitExceeded) or error.more is None or error.limit is None or error.kind not in UNITS:
        return False
    return isfinite(error.more) and isfinite(error.limit)


def question_about(error: LimitExceeded) -> Question:
    """Return what people are asked about a limit that asks; *error* says how much ``more`` a yes allows."""
    limit, more, unit = _exact(error.limit), _exact(error.more), UNITS[error.kind]
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
        details={"limit": error.kind, "reached": _plain(limit), "more": _plain(more)},
        path=error.path,
        allow_text=True,
        number="any" if error.kind == "cost" else "whole",
    )


def ceiling_of(question: Question, answer: Answer) -> Ceiling | None:
    """Return what an answer to such a question allows; ``None`` for a no."""
    told = question.details
    number = None if answer.declined else number_in(answer)
    if number is None and not answer.agrees:
        return None
    more = Decimal(str(told["more"])) if number is None else number  # type: ignore[call-overload,index]
    reached = Decimal(str(told["reached"]))  # type: ignore[call-overload,index]
    return Ceiling(question.path, str(told["limit"]), reached + more)  # type: ignore[call-overload,index]


def _exact(number: float | None) -> Decimal:
    return Decimal(str(number or 0))


def _plain(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _format_amount(number: Decimal) -> str:
    return f"{_plain(number)}"
