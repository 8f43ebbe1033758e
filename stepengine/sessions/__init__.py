"""
Conversations that continue over several runs.

A run starts from a state and ends with one. Between runs a session store stores it under an id of the caller. Before a run the state
is loaded. After the run the new state is saved with the loaded version. If another process has saved the session meanwhile, the save
raises ``SessionConflict``, so that of two messages at once neither loses the other's answer. The stores (memory, file, SQLite)
differ only in the storage location. A conversation from another program may have calls without results, or the reverse. It is repaired
when it is loaded, since every provider rejects it otherwise.

This package contains the stores, and the hooks that load and save a session around a run.

It must not contain effects and outcomes of a run (they belong to ``stepengine.journal``), or change the content of a conversation.

Start reading with ``session``, the protocol of stores, then ``run_hooks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.sessions.run_hooks import session_hooks
    from stepengine.sessions.session import (
        CacheStore,
        DeletingStore,
        JournalLocation,
        Session,
        SessionInfo,
        SessionStore,
        StateStore,
        TurnStore,
        VersionedStore,
        messages_from_json,
        messages_to_json,
    )
    from stepengine.sessions.stores import DocumentSessions, FileSessions, MemorySessions, SqliteSessions
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.sessions.run_hooks": ("session_hooks",),
            "stepengine.sessions.session": (
                "CacheStore",
                "DeletingStore",
                "Session",
                "SessionInfo",
                "SessionStore",
                "StateStore",
                "JournalLocation",
                "TurnStore",
                "VersionedStore",
                "messages_from_json",
                "messages_to_json",
            ),
            "stepengine.sessions.stores": (
                "DocumentSessions",
                "FileSessions",
                "MemorySessions",
                "SqliteSessions",
            ),
        },
    )

__all__ = (
    "CacheStore",
    "DeletingStore",
    "DocumentSessions",
    "FileSessions",
    "JournalLocation",
    "MemorySessions",
    "Session",
    "SessionInfo",
    "SessionStore",
    "SqliteSessions",
    "StateStore",
    "TurnStore",
    "VersionedStore",
    "messages_from_json",
    "messages_to_json",
    "session_hooks",
)
