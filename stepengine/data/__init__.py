"""
Frozen values and their JSON codec.

Every value that packages pass to each other is declared here: messages and transcripts, states and definitions, yieldables, effects
and outcomes, events, results, and small protocols. A value never changes; ``attrs.evolve`` makes another one. So a state stays
the same for each holder, a record can be compared with a new request, and threads read values without a lock. ``Provenance``, an
index of the data of a run, is the exception: it grows.

There are two ways to make a value. The constructor converts and checks its arguments. The codec (``codec``) reads stored values; its
list of classes is closed, so nothing that is loaded can run code. Text and numbers from outside are checked where they become values
(``json``), so no other package has to ask whether a value can be stored.

Must not be here: a clock, ids, randomness, files, an event loop, an SDK, pydantic, or code that decides what happens next.

Start reading with ``messages`` and ``transcript``, the conversation. Then read ``yields``, the requests of an author,
``effects``, the requests of the machine, and ``outcomes``, the answers to them; then ``state``.
"""

__all__: tuple[str, ...] = ()
