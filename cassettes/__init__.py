"""Recordings, and the scripts that make them: ``python -m cassettes.record_demo``."""
