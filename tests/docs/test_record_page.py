"""
The table of recorders is what running them shows; the versions are those that the extra `recorders` installs.
"""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from typing import Any

import pytest

from .pages import ROOT, page

MADE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "make_recorders.py"))
SHOWN = MADE["shown"](page("record-and-replay.md"))


def test_the_table_has_every_recorder_and_case() -> None:
    rows = [MADE["EDITED"], MADE["THREADS"], "the key is in the recording", "replays without a key", MADE["SAME"]]

    assert len(MADE["RECORDERS"]) == len(SHOWN)
    assert all(rows == list(column) for column in SHOWN.values())
    assert all(cell for column in SHOWN.values() for cell in column.values())


@pytest.mark.deep
@pytest.mark.spec("replay:Y20")
@pytest.mark.parametrize("recorder", list(MADE["RECORDERS"]))
def test_a_recorder_behaves_as_the_table_shows(recorder: str) -> None:
    if find_spec("reeltime") is None or find_spec("pytest_recording") is None:
        pytest.skip(
            "all recorders run beside each other, which needs the extra 'recorders' in an environment of its own"
        )

    assert SHOWN[MADE["titled"](recorder)] == MADE["cells"](recorder)
