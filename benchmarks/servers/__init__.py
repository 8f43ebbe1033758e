"""What is served in ``benchmarks.serving``: the same scripted work, as each project's own documentation advises."""
