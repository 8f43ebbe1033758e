"""
Many cases in one test, where one after the other they cost a fixture each: a failure says which case it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MAX_SHOWN = 200


@contextmanager
def case(*values: object) -> Iterator[None]:
    """
    Add the values of a case to an exception raised within the block, which ends the test, unlike one in pytest's ``subtests``.
    """
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(repr, values))}"[:MAX_SHOWN])
        raise
