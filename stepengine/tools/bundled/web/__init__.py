"""The web tools and what they stand on: address table, strict addresses, ``SafeFetcher``, readable text, back ends."""
