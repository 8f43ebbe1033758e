"""
What is of the operating system and no tool: held folders, whole writes, commands, addresses, threads, forked processes.

Stands directly above values and errors, so that journals, sessions, rules and tools alike stand on it. Must not know of
tools, models or runs.
"""
