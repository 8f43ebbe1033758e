import asyncio

import pytest
from anthropic_async import answer


@pytest.mark.stepengine(patch=True)
def test_answer():
    assert asyncio.run(answer("Where is order 17?")) == "Order 17 was shipped on Tuesday."
