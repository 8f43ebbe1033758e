"""
Conversations that outlive a run.

A run starts from a state and leaves one; a session store keeps it in between, under an id of the caller's. Before the run the state is
loaded, after it the new one is saved with the version that was loaded, and a save over a version that somebody else has saved
meanwhile is a ``SessionConflict``: of two messages of one person at once neither may lose the other's answer. The stores (memory,
file, SQLite) differ in where, and not in what, they keep. A conversation that another program left with calls and results that do
not pair is mended when it is loaded, since every provider refuses it otherwise.

What lives here: the stores, and the hooks that load and save around a run.

Must not be here: effects and outcomes of a run (they belong to ``stepengine.journal``), and any change of what a conversation says.

Begin with ``session``, the protocol of stores; then ``around``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.sessions.around import session_hooks
    from stepengine.sessions.session import (
        CacheStore,
        DeletingStore,
        Session,
        SessionInfo,
        SessionStore,
        StateStore,
        TurnPlace,
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
            "stepengine.sessions.around": ("session_hooks",),
            "stepengine.sessions.session": (
                "CacheStore",
                "DeletingStore",
                "Session",
                "SessionInfo",
                "SessionStore",
                "StateStore",
                "TurnPlace",
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
    "MemorySessions",
    "Session",
    "SessionInfo",
    "SessionStore",
    "SqliteSessions",
    "StateStore",
    "TurnPlace",
    "TurnStore",
    "VersionedStore",
    "messages_from_json",
    "messages_to_json",
    "session_hooks",
)
