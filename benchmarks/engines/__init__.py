"""
One module per engine, each with ``async def run(steps: int) -> int``.

``run`` performs one agent run of *steps* model steps; every reply asks for one call of ``add(a, b)``, whose input is
validated, and the last reply ends the turn. It returns the sum of all results, so that nobody can skip the work.
"""
