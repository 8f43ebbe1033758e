import pytest
from google_sync import answer


@pytest.mark.stepengine(patch=True)
def test_answer():
    assert answer("Where is order 17?") == "Order 17 was shipped on Tuesday."
