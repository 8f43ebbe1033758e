"""
Access to the operating system without tools: open folders, atomic writes, commands, addresses, threads, forked processes.

Mistakes in these areas show only under attack or after a crash. Examples are a path that is checked and then opened by name, a file
that is half written at a power failure, and a child that leaves grandchildren. Others are a name that is looked up twice with two
answers, and a lock that a forked child inherits. This package solves each of them once, and higher packages never do it themselves.

It is directly above values and errors, so that journals, sessions, rules and tools can use it. It must not know tools, models or
runs: its input is paths, words and bytes.

Start reading with ``root`` (files below a folder), ``whole_files`` (atomic writes), ``connection`` and ``urls`` (addresses), and
``after_fork``.
"""
