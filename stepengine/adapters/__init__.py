"""
Adapters: protocols of other programs, one package each. They do not import each other, except that ``acp`` uses ``external``.

``mcp`` and ``acp`` are the client and the server of a protocol. ``ag_ui`` and ``vercel`` send events to web pages and parse their
requests. ``otel`` observes runs. ``external`` runs agents of other programs and servers. ``mcp``, ``acp``, ``ag_ui`` and ``otel`` need the
extra of the same name (``ag-ui``); the others need none. ``display_items`` orders texts and calls for ``acp``, ``ag_ui`` and ``vercel``.
"""
