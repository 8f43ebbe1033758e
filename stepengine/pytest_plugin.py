"""
The pytest plugin: journals and cassettes as fixtures.

What lives here: fixtures and options for tests of agents. Every option starts with `--stepengine-`.

What must not: module-level imports other than `pytest` and the standard library, since pytest imports a registered plugin in
every run of its environment.
"""

__all__: tuple[str, ...] = ()
