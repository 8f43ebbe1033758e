import asyncio

import pytest

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")


@pytest.mark.stepengine(patch=True)
def test_answer():
    from pydantic_ai_program import answer

    assert asyncio.run(answer("Where is order 17?")) == "Order 17 was shipped on Tuesday."
