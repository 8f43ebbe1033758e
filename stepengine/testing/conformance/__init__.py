"""
Conformance tests of the interfaces that other projects implement, one for each.

``check_journal(make)`` and its siblings have one shape. An interface has named promises. Each is checked alone, with what *make* returns.
A broken promise is an ``AssertionError`` with its text, the reason and the call that checks only this promise.

Must not be here: pytest, and anything that only our own implementations have.

Begin with ``promises``, then any of the others.
"""
