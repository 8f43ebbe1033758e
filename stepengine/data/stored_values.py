"""
The names under which messages, tools, questions, usage, limits and errors are stored; ``stepengine.data.stored`` has the whole table.

These classes refer to no transcript and to no state. So a transcript and a state can be stored and loaded with these rows.
"""

from __future__ import annotations

from stepengine.data.limits import NAMES, Limits
from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    SideEffect,
    TextPart,
    ThinkingPart,
    ToolCallLog,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    ToolResult,
    UserMessage,
)
from stepengine.data.object_codec import StoredType
from stepengine.data.questions import Answer, Decision, Question
from stepengine.data.server_tools import CodeExecution, FileSearch, Programs, UrlContext, WebSearch
from stepengine.data.tools import ToolAnnotations, ToolSpec
from stepengine.data.usage import Spending, Usage
from stepengine.errors import (
    AgentError,
    AnswerRejected,
    BadYield,
    BlockedAddress,
    ChildError,
    ContextOverflow,
    DatabaseUnavailable,
    DataError,
    DefinitionError,
    ExecutorBusy,
    ExternalAgentError,
    HandlerError,
    InputError,
    JournalCorrupt,
    JournalError,
    JournalLocked,
    JournalMissing,
    JournalVersion,
    JournalWriteFailed,
    LimitExceeded,
    MissingKey,
    ModelError,
    OutputMissing,
    PathOutsideRoot,
    PerformError,
    PermissionDenied,
    RaceLost,
    ReplayDivergence,
    SecretFound,
    SessionConflict,
    SessionError,
    StepEngineError,
    ToolError,
    ToolInputError,
    ToolNotAvailable,
    ToolServerError,
    TranscriptError,
    TruncatedReply,
    UndoRefused,
    UnknownModel,
    UnknownOutcome,
    WorkspaceLost,
)

VALUE_TYPES: tuple[StoredType, ...] = (
    # limits
    StoredType("limits", Limits, " ".join(NAMES)),
    # messages
    StoredType("assistant_message", AssistantMessage, "content tags ttl"),
    StoredType("citation", CitationPart, "url title quote said source"),
    StoredType("document", DocumentPart, "url data mime_type name provider_data file_id provider"),
    StoredType("image", ImagePart, "url data mime_type provider_data file_id provider"),
    StoredType("json_content", JsonPart, "value"),
    StoredType("opaque", OpaquePart, "provider data tool text"),
    StoredType("refusal", RefusalPart, "text provider_data"),
    StoredType("side_effect", SideEffect, "kind target details"),
    StoredType("text", TextPart, "text provider_data"),
    StoredType("thinking", ThinkingPart, "text provider_data"),
    StoredType("tool_call_log", ToolCallLog, "tool_name input result step duration_ms tool_call_id source path"),
    StoredType("tool_call", ToolCallPart, "tool_call_id tool_name input raw_input input_error provider_data"),
    StoredType("tool_message", ToolMessage, "tool_call_id tool_name content status trust"),
    StoredType("tool_reference", ToolReferencePart, "tool_name"),
    StoredType(
        "tool_result",
        ToolResult,
        "content status tool_name tool_call_id credits_used side_effects change structured usage cost trust",
    ),
    StoredType("user_message", UserMessage, "content tags ttl"),
    # questions
    StoredType("answer", Answer, "selected text declined remember edited_input result by reason covers"),
    StoredType("decision", Decision, "kind message rule_id options remember wider provenance"),
    StoredType(
        "question",
        Question,
        "id text options multi_select tool_name details path allow_text preview remember wider descriptions number "
        "provenance",
    ),
    # server_tools
    StoredType("code_execution", CodeExecution, "files"),
    StoredType("file_search", FileSearch, "stores max_results"),
    StoredType("programs", Programs, "tools direct"),
    StoredType("url_context", UrlContext, "max_uses allowed_domains blocked_domains"),
    StoredType("web_search", WebSearch, "max_uses allowed_domains blocked_domains location"),
    # tools
    StoredType("tool_annotations", ToolAnnotations, "read_only destructive idempotent open_world"),
    StoredType(
        "tool_spec",
        ToolSpec,
        "name description input_schema category annotations parallel_safe ends_turn forces_next_step "
        "requires_permission ephemeral max_chars timeout retries strict defer_loading about results destinations texts "
        "confined",
    ),
    # usage
    StoredType("spending", Spending, "usage cost credits_used by_agent by_model agent_costs model_costs"),
    StoredType(
        "usage",
        Usage,
        "input_tokens output_tokens cache_read_tokens cache_write_tokens reasoning_tokens requests at_least",
    ),
    # errors
    StoredType("agent_error", AgentError, "message"),
    StoredType("answer_rejected", AnswerRejected, "message"),
    StoredType("bad_yield", BadYield, "message location"),
    StoredType("blocked_address", BlockedAddress, "message tool_name"),
    StoredType("child_error", ChildError, "message agent_id status"),
    StoredType("context_overflow", ContextOverflow, "message retryable status request_id retry_after kind usage"),
    StoredType("data_error", DataError, "message path"),
    StoredType("database_unavailable", DatabaseUnavailable, "message"),
    StoredType("definition_error", DefinitionError, "message"),
    StoredType("executor_busy", ExecutorBusy, "message"),
    StoredType("external_agent_error", ExternalAgentError, "message kind"),
    StoredType("handler_error", HandlerError, "message kind location"),
    StoredType("input_error", InputError, "message issues"),
    StoredType("journal_corrupt", JournalCorrupt, "message"),
    StoredType("journal_error", JournalError, "message"),
    StoredType("journal_locked", JournalLocked, "message pid host"),
    StoredType("journal_missing", JournalMissing, "message path beside"),
    StoredType("journal_version", JournalVersion, "message"),
    StoredType("journal_write_failed", JournalWriteFailed, "message"),
    StoredType("limit_exceeded", LimitExceeded, "message kind limit path more"),
    StoredType("missing_key", MissingKey, "message retryable status request_id retry_after kind usage"),
    StoredType("model_error", ModelError, "message retryable status request_id retry_after kind usage"),
    StoredType("output_missing", OutputMissing, "message issues"),
    StoredType("path_outside_root", PathOutsideRoot, "message tool_name"),
    StoredType("perform_error", PerformError, "message kind"),
    StoredType("permission_denied", PermissionDenied, "message tool_name"),
    StoredType("race_lost", RaceLost, "message"),
    StoredType("replay_divergence", ReplayDivergence, "message kind address step site diff"),
    StoredType("secret_found", SecretFound, "message path rule"),
    StoredType("session_conflict", SessionConflict, "message"),
    StoredType("session_error", SessionError, "message"),
    StoredType("error", StepEngineError, "message"),
    StoredType("tool_error", ToolError, "message tool_name"),
    StoredType("tool_input_error", ToolInputError, "message tool_name issues"),
    StoredType("tool_not_available", ToolNotAvailable, "message tool_name available"),
    StoredType("tool_server_error", ToolServerError, "message tool_name"),
    StoredType("transcript_error", TranscriptError, "message"),
    StoredType("truncated_reply", TruncatedReply, "message retryable status request_id retry_after kind usage"),
    StoredType("undo_refused", UndoRefused, "message files"),
    StoredType("unknown_model", UnknownModel, "message retryable status request_id retry_after kind usage"),
    StoredType("unknown_outcome", UnknownOutcome, "message"),
    StoredType("workspace_lost", WorkspaceLost, "message"),
)
