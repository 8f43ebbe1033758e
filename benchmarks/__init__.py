"""Measurements, side by side with peers in the same run: ``python -m benchmarks``. Ratios hold, absolute times drift."""
