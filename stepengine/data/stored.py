"""
The names under which values are stored: the tag of each class and the name of each member.

Stored data outlives the code. These names are explicit, so that renaming a class or a field changes no journal, session or
definition: change the class and its row here, and leave the stored names.

The rows are in three tables that extend each other: ``VALUE_TYPES``, ``STATE_TYPES``, and this module's with all of them.

A row has the tag, the class and its members. A member whose field has another name is written ``field:member``.
"""

from __future__ import annotations

from stepengine.data.hooks import Change
from stepengine.data.models import (
    ModelReply,
    ModelRequest,
    ModelSettings,
    ReplyDone,
    TextChunk,
    Thinking,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.object_codec import StoredType
from stepengine.data.outcomes import Failure, Gathered, PartialUsage, Stop, Value
from stepengine.data.state import STATE_TYPES, ChildResult
from stepengine.data.stored_values import VALUE_TYPES
from stepengine.data.waits import Awaited, ChildRef, Received

STORED_TYPES: tuple[StoredType, ...] = (
    *VALUE_TYPES,
    *STATE_TYPES,
    # hooks
    StoredType("change", Change, "system_prompt messages view context tail input result"),
    # models
    StoredType(
        "model_reply",
        ModelReply,
        "content usage stop_reason cost raw_stop_reason model request_id provider_data",
    ),
    StoredType("model_request", ModelRequest, "model system_prompt messages tools tool_choice settings tail"),
    StoredType(
        "model_settings",
        ModelSettings,
        "temperature top_p max_tokens stop_sequences tool_choice parallel_tool_calls thinking response_schema "
        "continue_cut output service_tier seed logprobs store safety cache cache_key server_tools fallbacks unsupported "
        "oversize extra",
    ),
    StoredType("reply_done", ReplyDone, "reply"),
    StoredType("text_chunk", TextChunk, "text"),
    StoredType("thinking_settings", Thinking, "mode budget_tokens effort show", make=Thinking.from_stored),
    StoredType("thinking_chunk", ThinkingChunk, "text"),
    StoredType("tool_call_chunk", ToolCallChunk, "index text"),
    StoredType("tool_call_ended", ToolCallEnded, "index"),
    StoredType("tool_call_started", ToolCallStarted, "index tool_name"),
    # outcomes
    StoredType("partial_usage", PartialUsage, "usage cost"),
    StoredType("failure", Failure, "error at inputs"),
    StoredType("gathered", Gathered, "outcomes"),
    StoredType("stop", Stop, "kind at error questions child begun"),
    StoredType("value", Value, "value at inputs"),
    # state
    StoredType(
        "child_result",
        ChildResult,
        "agent_id run_id status output text error spending questions trust warnings text_trust",
    ),
    # waiting
    StoredType("wait_result", Awaited, "done open"),
    StoredType("child_ref", ChildRef, "id agent_id path"),
    StoredType("received_message", Received, "id value"),
)
