"""
Runs that survive the process, on a database that many workers share.

What lives here: the adapter that drives the machine inside durable workflows. Its database package is imported only here, on
first use.

What must not: rules of the machine, and anything that a floor below would need.
"""

__all__: tuple[str, ...] = ()
