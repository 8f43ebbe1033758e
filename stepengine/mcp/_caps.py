"""What a server may send, and how long it may take: every number of this adapter in one place."""

from __future__ import annotations

MIB = 1024 * 1024

# a server as a process
LINE_BYTES = 16 * MIB
"""The longest message; a longer one ends the connection."""
JUNK_LINES = 100
JUNK_KEPT = 3
JUNK_CHARS = 200
STDERR_BYTES = 64 * 1024
STDERR_SHOWN = 2_000
FLUSH_SECONDS = 0.5
CLOSE_SECONDS = 2.0
"""How long a process has to end after its input was closed, and once more after SIGTERM."""
RESTART_WAITS = (0.5, 2.0)
"""How long is waited before a server is started again, in one run; after the last one it is gone."""
RUNS_KEPT = 1_000
OWNER_IDLE_SECONDS = 600.0
"""How long the session of one owner stays open without a request."""

# lists
PAGES = 100
TOOLS = 1_000
LIST_BYTES = 4 * MIB
"""How much of the tools of one list is kept."""
RUN_LIST_BYTES = 8 * MIB
"""How much of all lists of a server one run keeps: a journal holds each list, and a state holds each tool."""
PROMPTS, PROMPT_CHARS = 100, 128
DESCRIPTION_CHARS = 4_096
SCHEMA_BYTES = 64 * 1024
SCHEMA_DEPTH = 32
NAME_CHARS = 64
DEFER_TOOLS = 40
DEFER_TOKENS = 8_000

# results
PARTS = 100
MEDIA_BYTES = 12 * MIB
"""How much the media and pages of one result may have in base64: they are in one record of a journal, which has a limit of its own."""
PAGE_SCHEME, PAGE_ADDRESS_CHARS = "ui://", 2_000
"""How the address of a server's page starts, and how long it may be."""
ERROR_CHARS = 4_000
CHALLENGE_CHARS = 300
"""How much is shown of what a refusal says about signing in."""

# questions
QUESTION_CHARS = 1_000
FIELDS = 25
"""From how many on it is asked first whether the form is to be filled in at all."""
OPTIONS = 50
"""From how many on a choice is asked for as text."""
REQUEST_BYTES = 64 * 1024
"""How much one round of requests may have. It is recorded as the result of a tool, which is cut at 100,000 characters."""
STUBS_BYTES = 16 * 1024
"""The limit of the records of declined requests, in bytes."""
ROUNDS = 10
TRIES = 3
SAMPLED_TOKENS = 8_192

# what it says of its own accord
ODD_CHARS = 300
LOG_LINES, LOG_CHARS = 1_000, 1_000
"""How many lines of a server are logged before it is started again, and how much of each."""
LISTEN_SECONDS, LISTEN_MOST = 1.0, 60.0
"""How long is waited before a server whose stream of changes ended is listened to again: twice as long each time, and at most so long."""

# tasks
POLL_SECONDS = 1.0
"""How often a task is asked for when its server does not say."""
LEAST_POLL, MOST_POLL = 0.05, 10.0
