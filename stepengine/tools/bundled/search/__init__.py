"""The search tools: ``glob`` and ``code_search``."""
