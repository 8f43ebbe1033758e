"""
Adapters: protocols of other programs, one package each. None imports another one, and each needs an extra of the same name.

``mcp``, ``acp``, ``ag_ui`` and ``vercel`` are both directions of a protocol; ``otel`` observes runs; ``external`` runs agents that
other programs execute. ``display_items`` orders the texts of a run for all of them.
"""
