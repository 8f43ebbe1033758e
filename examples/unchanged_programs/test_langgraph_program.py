import pytest

pytest.importorskip("langgraph", reason="langgraph is not installed")


@pytest.mark.stepengine(patch=True)
def test_answer():
    from langgraph_program import answer

    assert answer("Where is order 17?") == "Order 17 was shipped on Tuesday."
