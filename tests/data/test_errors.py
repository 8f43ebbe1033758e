"""
Errors: one tree, filed by whose fault it is; values that compare, copy and are stored.
"""

from __future__ import annotations

import copy
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import errors
from stepengine.errors import (
    DataError,
    LimitExceeded,
    LimitReached,
    ModelError,
    StepEngineError,
    ToolError,
    ToolNotAvailable,
)
from tests import strategies


def documented() -> dict[str, str]:
    """
    Return each class of the tree in the docstring of `stepengine.errors` with its base.
    """
    tree = textwrap.dedent((errors.__doc__ or "").split("  StepEngineError\n", 1)[1].split("\n\n", 1)[0])
    bases, base = {}, ""
    for line in tree.splitlines():
        words = re.findall(r"\b[A-Z]\w+[a-z]\w*\b", line)
        if not line.startswith(" "):
            base, *words = words
            bases[base] = "StepEngineError"
        bases.update(dict.fromkeys(words, base))
    return bases


@pytest.mark.spec("requirements:X16")
def test_the_tree_of_errors_is_the_documented_one() -> None:
    real = {
        name: getattr(errors, name).__bases__[0].__name__
        for name in errors.__all__
        if name not in {"StepEngineError", "LimitReached"}
    }

    assert documented() == real
    assert (Exception,) == StepEngineError.__bases__


@pytest.mark.spec("reliability:GN09")
def test_the_signal_of_a_spent_limit_is_no_exception() -> None:
    error = LimitExceeded("50 steps are spent", kind="steps", limit=50)
    signal = LimitReached(error)

    assert (BaseException,) == LimitReached.__bases__
    assert not isinstance(signal, Exception)
    assert signal.error is error
    assert "50 steps are spent" == str(signal)
    assert copy.copy(signal).error is error
    with pytest.raises(LimitReached):
        try:
            raise signal
        except Exception:
            pass


@pytest.mark.deep
@pytest.mark.smoke
@given(strategies.engine_errors)
def test_an_error_is_a_value(error: StepEngineError) -> None:
    twin = copy.copy(error)

    assert error == twin == copy.deepcopy(error)
    assert hash(error) == hash(twin)
    assert type(error) is type(twin)
    assert error.message == str(error) == twin.args[0]
    assert {f: getattr(error, f) for f in error.fields} == {f: getattr(twin, f) for f in error.fields}


@pytest.mark.deep
@pytest.mark.smoke
@given(strategies.engine_errors, st.data())
def test_errors_with_another_class_message_or_field_are_not_equal(error: StepEngineError, data: st.DataObject) -> None:
    class Other(type(error)):  # type: ignore[misc]
        pass

    fields = {f: getattr(error, f) for f in error.fields}

    assert error != Other(error.message, **fields)
    assert error != type(error)(error.message + "!", **fields)
    assert error != error.message
    if fields:
        field = data.draw(st.sampled_from(sorted(fields)))
        changed = type(error)(error.message, **fields)
        setattr(changed, field, object())
        assert error != changed


def test_transient_error_fields_are_copied_but_not_compared() -> None:
    error = ToolError("boom", tool_name="t", result=["anything"])

    assert ["anything"] == copy.copy(error).result
    assert error == ToolError("boom", tool_name="t")
    assert ("a", "b") == ToolNotAvailable("no tool", tool_name="x", available=["a", "b"]).available


def test_error_message_replaces_lone_surrogates() -> None:
    assert "\ufffd and \U0001f600" == DataError("\ud800 and \ud83d\ude00").message
    assert "ascii" == ModelError("ascii").message
