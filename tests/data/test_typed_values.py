"""
A typed value is stored only if an equal one can be read from its JSON.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from stepengine.data.typed_values import to_round_trip_json
from stepengine.errors import DataError


def keep(value: Any) -> Any:
    return value


def test_value_without_json_is_refused_with_the_first_reason() -> None:
    with pytest.raises(DataError, match="nan at size is not JSON"):
        to_round_trip_json(math.nan, dumps=[keep, repr], load=keep, name="size")


def test_first_form_that_is_read_back_equal_is_stored() -> None:
    assert {"n": 1} == to_round_trip_json({"n": 1}, dumps=[repr, keep], load=keep, name="size")
