"""
The shell tools: running programs below a root in a clean environment, with everything that they start ended with them.

``supervisor`` is a program of its own, which starts the command and stays beside it. ``process`` starts, reads and ends one
command, and ``tools`` is what agents see, with the commands of a run that go on in the background.
"""
