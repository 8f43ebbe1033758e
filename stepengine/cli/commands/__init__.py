"""The commands, one module for each or for a few related ones. Shared code is in the parent package."""
