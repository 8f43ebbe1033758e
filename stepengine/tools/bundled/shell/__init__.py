"""
The shell tools: running programs below a root in a clean environment, with everything that they start ended with them.

``process`` starts, reads and ends one command, beside which a supervisor stays, a program of its own; ``tools`` is what agents see,
with the commands of a run that go on in the background.
"""
