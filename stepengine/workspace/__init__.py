"""
What is of the operating system and no tool: held folders, whole writes, commands, addresses, threads, forked processes.

Each of these is a thing that is easily done wrong in a way that shows only under attack or after a crash: a path that is checked and
then opened by name, a file that is half written when the power goes, a child that leaves grandchildren, a name that is looked up
twice with two answers, a lock that a forked child inherits. Here each is done once, with its reason, and packages above never do it
by themselves.

Stands directly above values and errors, so that journals, sessions, rules and tools alike stand on it. Must not know of tools, models
or runs: what comes in are paths, words and bytes.

Begin with ``root`` (files below a folder), ``whole_files`` (writes that are there whole or not at all), ``connection`` and ``urls``
(addresses), ``after_fork``.
"""
