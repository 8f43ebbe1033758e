import asyncio

import pytest

pytest.importorskip("agents.run", reason="openai-agents is not installed")


@pytest.mark.stepengine(patch=True)
def test_answer():
    from openai_agents_program import answer

    assert asyncio.run(answer("Where is order 17?")) == "Order 17 was shipped on Tuesday."
