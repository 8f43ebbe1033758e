"""
What rules about provenance stop, and what they cost: AgentDojo's tasks and attacks through the engine, and recorded coding runs.

``labels`` says of each tool what its docstring says, for all suites alike. ``python -m benchmarks.injection`` measures.
"""
