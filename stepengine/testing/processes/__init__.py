"""
Record and replay whole programs: a process and the Python processes that it starts.

``record_program`` and ``replay_program`` hold the only ``Cassette`` (``broker``) and start the program. Each Python process of the program
loads ``bootstrap`` before its first line, by a ``sitecustomize`` module on ``PYTHONPATH``. It patches the HTTP libraries when the program
imports them (``client``), and asks the broker for every reply over a Unix socket (``channel``). So all processes share one file without
locks on it: one process reads, matches and writes it.

``bootstrap``, ``channel``, ``child_commands`` and ``frozen`` import the standard library alone, since they run in processes that may have no
stepengine. In such a process the network is blocked while replaying, and the result names it as not covered.
"""
