"""
The shell tools: they run programs below a root in a clean environment, and end all processes that a program has started.

``process`` starts, reads and ends one command; a separate program supervises it. ``tools`` contains the tools, and the background
commands of a run.
"""
