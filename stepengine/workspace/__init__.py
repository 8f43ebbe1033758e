"""
Access to the operating system without tools: confined folders, atomic writes, remote systems, commands, databases, threads, forks.

Web addresses are checked here, too. ``repository`` and ``skills`` read the instructions, skills and git status of a project.

Mistakes in these areas show only under attack or after a crash. Examples are a path that is checked and then opened by name, a file
that is half written at a power failure, and a child that leaves grandchildren. Others are a name that is looked up twice with two
answers, and a lock that a forked child inherits. This package solves each of them once, and higher packages never do it themselves.

It is directly above values, errors and redaction, so that journals, sessions, rules and tools can use it. It must not know tools, models
or runs: its input is paths, words and bytes.

Start reading with ``workspace`` (the location of the work: here, in a container, on another machine) and ``root`` (files below its folder).
A ``Root`` opens files with ``calls``, which uses ``os`` here, and ``remote_files``, ``connection`` and ``worker`` elsewhere.
``guard`` holds the rules of the current call, which ``root`` applies to each file.

Other entries are ``whole_files`` (atomic writes), ``environment`` and ``supervisor`` (commands), ``write_ahead`` (databases), ``urls``
(web addresses) and ``after_fork``.
"""
