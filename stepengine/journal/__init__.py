"""
Recording, resuming, replaying, forking and comparing runs.

What lives here: the journal's stores (memory, file, SQLite), its entries and their codec, the recorder and the replayer,
and `diff`. Recorder and replayer wrap the performer from outside.

What must not: anything that the driver would have to know. The floors below have never heard of journals.
"""

__all__: tuple[str, ...] = ()
