"""
Lists of servers as they come over the wire: what the package would refuse in one member costs that member alone.
"""

from __future__ import annotations

from typing import Any

import mcp_types as types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.message import SessionMessage
from mcp_types import methods

from stepengine.adapters.mcp.lenient_messages import ODD, MessageRepair
from tests.strategies import json_values

GOOD = st.builds(
    lambda name, about: {"name": name, "inputSchema": {"type": "object"}, "description": about},
    st.text(min_size=1, max_size=5),
    st.text(max_size=5),
)
ODD_ONES = json_values() | st.builds(
    lambda good, member, value: {**good, member: value},
    GOOD,
    st.sampled_from(["name", "inputSchema", "annotations", "outputSchema", "icons", "_meta", "execution"]),
    json_values(),
)


def message(result: Any) -> SessionMessage:
    return SessionMessage(types.JSONRPCResponse(jsonrpc="2.0", id=1, result=result))


def sifted(result: Any, version: str = "2025-11-25") -> Any:
    return MessageRepair(lambda: version)(message(result)).message.result  # type: ignore[union-attr]


def is_taken(tools: Any, version: str) -> bool:
    result = {"tools": tools, "resultType": "complete", "ttlMs": 1, "cacheScope": "private"}
    try:
        methods.validate_server_result("tools/list", version, result)
        types.ListToolsResult.model_validate(result, by_name=False)
    except ValueError:
        return False
    return True


@pytest.mark.deep
@pytest.mark.smoke
@given(tools=st.lists(GOOD | ODD_ONES, max_size=5), version=st.sampled_from(["2025-06-18", "2025-11-25", "2026-07-28"]))
@pytest.mark.spec("interfaces:IF62")
def test_list_repair_keeps_valid_tools_and_explains_the_rest(tools: list[Any], version: str) -> None:
    made = sifted({"tools": tools, "resultType": "complete", "ttlMs": 1, "cacheScope": "private"}, version)["tools"]

    good = [is_taken([one], version) for one in tools]
    assert is_taken(made, version)
    assert [one for one, fits in zip(tools, good, strict=True) if fits] == [
        one for one, fits in zip(made, good, strict=True) if fits
    ]
    assert all(one["_meta"][ODD] for one, fits in zip(made, good, strict=True) if not fits)
