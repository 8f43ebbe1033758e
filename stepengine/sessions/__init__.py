"""
Conversations that outlive a run.

What lives here: the session stores (memory, file, SQLite), which keep a conversation between runs and hand it back.

What must not: effects and outcomes of a run (they belong to `stepengine.journal`), and any change of what a conversation says.
"""

__all__: tuple[str, ...] = ()
