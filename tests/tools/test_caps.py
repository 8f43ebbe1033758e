"""The caps are what the reliability page says, and nothing else changes them."""

from __future__ import annotations

import pytest

from stepengine.tools import _caps

MIB = 1024 * 1024


@pytest.mark.spec("reliability:FP5")
def test_every_cap_has_the_number_of_the_specification() -> None:
    found = {name: value for name, value in vars(_caps).items() if name.isupper()}

    assert {
        "MIB": MIB,
        "TOOL_SECONDS": 120,
        "COMMAND_SECONDS": 30,
        "HOOK_SECONDS": 60,
        "CANCEL_GRACE_SECONDS": 5,
        "THREADS": 32,
        "RESULT_CHARS": 100_000,
        "ERROR_CHARS": 4_000,
        "IMAGE_BYTES": 5 * MIB,
        "DOCUMENT_BYTES": 32 * MIB,
        "ARGUMENT_BYTES": 4 * MIB,
        "ARGUMENT_DEPTH": 200,
        "READ_CHARS": 100_000,
        "READ_LINES": 2_000,
        "READ_LINE_CHARS": 2_000,
        "READ_WHOLE_BYTES": 10_000_000,
        "READ_PATHS": 50,
        "WRITE_BYTES": 4 * MIB,
        "LIST_ENTRIES": 20_000,
        "LIST_SECONDS": 10,
        "SYMLINK_HOPS": 8,
        "PATH_BYTES": 4_096,
        "SEARCH_MATCHES_PER_FILE": 15,
        "SEARCH_MATCHES": 250,
        "SEARCH_SECONDS": 10,
        "SEARCH_CHARS": 20_000,
        "SEARCH_FILE_BYTES": 4 * MIB,
        "SEARCH_PATTERN_CHARS": 512,
        "SEARCH_COLUMNS": 2_000,
        "GLOB_RESULTS": 100,
        "STEPS": 50,
        "ACTIONS": 1_000,
        "SPAWN_DEPTH": 5,
        "CHILDREN_PER_CALL": 16,
        "CHILDREN_AT_ONCE": 8,
        "CHILDREN_PER_TREE": 100,
        "CANDIDATES": 64,
        "MODEL_ATTEMPTS": 4,
        "MODEL_EXTRA_ATTEMPTS": 20,
        "MODEL_CONNECT_SECONDS": 10,
        "MODEL_FIRST_TOKEN_SECONDS": 120,
        "MODEL_IDLE_SECONDS": 60,
        "MODEL_TOTAL_SECONDS": 600,
        "REPLY_BYTES": 4 * MIB,
        "STREAM_BYTES": 64 * MIB,
        "RECORD_BYTES": 16 * MIB,
        "CASSETTE_BYTES": 256 * MIB,
        "EVENT_QUEUE": 10_000,
        "OBSERVER_ERRORS": 10,
        "IDENTICAL_CALLS_EVENT": 3,
        "LOOP_BLOCKED_SECONDS": 1,
        "HANDLER_SILENT_SECONDS": 5,
        "SHUTDOWN_GRACE_SECONDS": 5,
        "DENIALS": 10,
        "PENDING_QUESTIONS": 100,
    } == found
