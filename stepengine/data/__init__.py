"""
Frozen values and their JSON codec.

Lives here: every value that floors exchange (messages, transcripts, states, definitions, yieldables, effects, outcomes,
events, results) and the small protocols between them. Must not be here: a clock, ids, randomness, files, an event loop,
an SDK, pydantic, or code that decides what happens next.
"""

__all__: tuple[str, ...] = ()
