"""What of an error a replay compares: class, kind and words, without what differs by machine and edit."""

from __future__ import annotations

import attrs
import pytest

from stepengine.data.state import ChildResult, RunStatus
from stepengine.errors import LimitExceeded, ToolError
from stepengine.journal.encoding import to_comparable_json

FAILED = ChildResult(agent_id="scout", run_id="r1", status=RunStatus.FAILED)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("no", "never", False),
        ("no (/home/ann/tools.py:3)", "no (<cwd>/tools.py:17)", True),
        ("no file '/home/ann/a.txt'", "no file '<home>/a.txt'", True),
        ("no file '/home/ann/a.txt'", "no file '/home/ann/b.txt'", False),
        ("<Thing object at 0x7f00>", "<Thing object at 0x10ab>", True),
        ("3/4 done", "1/4 done", False),
    ],
)
def test_error_words_are_compared_without_differences_by_machine(first, second, same) -> None:
    one, other = (to_comparable_json(attrs.evolve(FAILED, error=ToolError(words))) for words in (first, second))

    assert same == (one == other)


def test_the_words_about_a_spent_limit_are_not_compared() -> None:
    spent, failed = (attrs.evolve(FAILED, status=status) for status in (RunStatus.MAX_STEPS, RunStatus.FAILED))
    first, second = (LimitExceeded(words, kind="tokens", limit=3) for words in ("no more", "spent"))

    assert to_comparable_json(spent) == to_comparable_json(attrs.evolve(spent, error=first))
    assert to_comparable_json(attrs.evolve(failed, error=first)) == to_comparable_json(
        attrs.evolve(failed, error=second)
    )
