"""
The shell tools: running programs below a root in a clean environment, with everything that they start ended with them.

``launcher`` is a program of its own, which becomes the command. ``process`` starts, reads and ends one command, ``jobs``
keeps those of a run that go on in the background, and ``tools`` is what agents see.
"""
