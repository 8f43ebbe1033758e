"""
Stores of sessions for tests: those that ship, by name, and the smallest one that there may be.
"""

from __future__ import annotations

from stepengine.sessions import FileSessions, MemorySessions, SqliteSessions

__all__ = ("KINDS", "Histories", "store_of")

KINDS = ("memory", "files", "sqlite")


def store_of(kind, folder, **options):
    if kind == "memory":
        return MemorySessions(**options)
    made, name = (FileSessions, "sessions") if kind == "files" else (SqliteSessions, "sessions.db")
    return made(folder / name, **options)


class Histories:
    """
    The smallest store that there may be.
    """

    def __init__(self):
        self.kept = {}

    async def get_history(self, session_id):
        return self.kept.get(session_id, [])

    async def save_history(self, session_id, messages):
        self.kept[session_id] = list(messages)
