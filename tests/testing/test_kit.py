"""
The kit as a whole: what it exports, and what importing it costs.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import stepengine.testing


def test_every_public_name_is_there_and_no_other():
    for name in stepengine.testing.__all__:
        assert getattr(stepengine.testing, name).__module__.startswith(
            ("stepengine.testing.", "stepengine.models.scripted")
        )
    assert sorted(stepengine.testing.__all__) == dir(stepengine.testing)
    with pytest.raises(AttributeError, match="no attribute 'run_everything'"):
        stepengine.testing.run_everything


@pytest.mark.deep
@pytest.mark.smoke
def test_the_kit_stays_light():
    heavy = (
        "pydantic", "httpx2", "yaml", "anthropic", "openai", "google", "google.genai", "stepengine.engine", "genai_prices", "pytest", "vcr",
    )  # fmt: skip
    code = f"import json, sys, stepengine.testing; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [] == json.loads(ran.stdout)
