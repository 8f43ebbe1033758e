"""
Conversations that outlive a run.

What lives here: the session stores (memory, file, SQLite), which keep a conversation between runs and hand it back, and the hooks that do so around a run.

What must not: effects and outcomes of a run (they belong to `stepengine.journal`), and any change of what a conversation says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.sessions.around import session_hooks
    from stepengine.sessions.session import (
        CacheStore,
        Session,
        SessionInfo,
        SessionStore,
        StateStore,
        TurnPlace,
        TurnStore,
        VersionedStore,
        mended,
        messages_from_json,
        messages_to_json,
    )
    from stepengine.sessions.stores import FileSessions, MemorySessions, SqliteSessions
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "stepengine.sessions.around": ("session_hooks",),
            "stepengine.sessions.session": (
                "CacheStore",
                "Session",
                "SessionInfo",
                "SessionStore",
                "StateStore",
                "TurnPlace",
                "TurnStore",
                "VersionedStore",
                "mended",
                "messages_from_json",
                "messages_to_json",
            ),
            "stepengine.sessions.stores": (
                "FileSessions",
                "MemorySessions",
                "SqliteSessions",
            ),
        },
    )

__all__ = (
    "CacheStore",
    "FileSessions",
    "MemorySessions",
    "Session",
    "SessionInfo",
    "SessionStore",
    "SqliteSessions",
    "StateStore",
    "TurnPlace",
    "TurnStore",
    "VersionedStore",
    "mended",
    "messages_from_json",
    "messages_to_json",
    "session_hooks",
)
