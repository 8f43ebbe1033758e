"""
Frozen values and their JSON codec.

Everything that the floors hand each other is declared here: messages and transcripts, states and definitions, what a handler may
yield, the effects that come of it and the outcomes that come back, events, results, and the small protocols between them. A value
flows upwards and downwards and is never changed on the way: whoever wants another one makes it (``attrs.evolve``). That is what lets
a state that somebody was given stay what it was, a record be compared with what is asked for now, and a thread look at anything
without a lock.

Three ways lead to a value. The constructor converts and checks, and stands at every door of the package. A quick maker
(``makers``) fills in fields that were just made or checked, for the few classes of which each step makes some: a call is made in
0.16 us so, where the constructor takes 0.9. And the codec (``codec``) reads what was stored: its list of classes is closed, so that
nothing which is loaded can run code. Text and numbers of others are made sound where they come in (``json``), so that no floor above
has to ask again whether a value can be stored.

Must not be here: a clock, ids, randomness, files, an event loop, an SDK, pydantic, or code that decides what happens next.

Begin with ``messages`` and ``transcript``, what a conversation is; then ``yields``, ``effects`` and ``outcomes``, which are the three
languages of a run; then ``state``.
"""

__all__: tuple[str, ...] = ()
