"""
Judges regular expressions for Python's ``re``, which backtracks (reliability FS23).

Repetitions inside of repetitions can take exponential time, so they are refused, as are long rows of optional parts and
more than two unbounded repetitions. For what is left, the time per line is bounded by how much of the line is searched.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

from stepengine.errors import ToolError

__all__ = ("safe_columns",)

SEARCH_COLUMNS = 2_000

UNBOUNDED = 20
LIMITS = ((SEARCH_COLUMNS, 1_024), (SEARCH_COLUMNS, 64), (300, 16))
"""By the number of unbounded repetitions: how much of a line is searched, and how many ways the rest may match."""

REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})
REFUSED = frozenset({"GROUPREF", "GROUPREF_EXISTS", "ATOMIC_GROUP"})
GROUPS = {"SUBPATTERN": 3, "ASSERT": 1, "ASSERT_NOT": 1}


def safe_columns(pattern: str) -> int:
    """
    Return how many characters of a line may be searched with a pattern.

    Raises:
        ToolError: when it is no regular expression, or one that could take for ever.
    """
    try:
        re.compile(pattern)
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]  # noqa: SLF001  (the only parser of its syntax)
    except (re.error, RecursionError, OverflowError) as error:
        msg = f"the pattern is no regular expression: {error}"
        raise ToolError(msg) from None
    unbounded, ways = _cost(parsed, inside=False)
    if unbounded >= len(LIMITS) or ways > LIMITS[unbounded][1]:
        msg = f"without ripgrep a pattern has at most {len(LIMITS) - 1} repetitions such as '.*' and few optional parts"
        raise ToolError(msg)
    return LIMITS[unbounded][0]


def _cost(parsed: Any, *, inside: bool) -> tuple[int, int]:
    """Return how many unbounded repetitions there are, and in how many ways the rest may match."""
    costs = [_cost_of(str(operation), argument, inside=inside) for operation, argument in parsed]
    return sum(c[0] for c in costs), math.prod(c[1] for c in costs)


def _cost_of(name: str, argument: Any, *, inside: bool) -> tuple[int, int]:
    if name in REFUSED or (inside and (name in REPEATS or name == "BRANCH")):
        _refuse()
    if name in REPEATS:
        low, high, body = int(argument[0]), int(argument[1]), argument[2]
        unbounded, ways = _cost(body, inside=high > 1)
        return (unbounded + 1, ways) if high > UNBOUNDED else (unbounded, ways * (high - low + 1))
    if name == "BRANCH":
        costs = [_cost(branch, inside=inside) for branch in argument[1]]
        return max(c[0] for c in costs), sum(c[1] for c in costs)
    if name in GROUPS:
        return _cost(argument[GROUPS[name]], inside=inside)
    return 0, 1


def _refuse() -> NoReturn:
    msg = "without ripgrep a pattern may not nest repetitions, repeat alternatives or refer back to groups"
    raise ToolError(msg)
