"""
Tasks that tell whether `stepengine compare improve` finds a better agent where there is one, and none where there is none.

Each file holds an agent and its evaluation. Functions play the models, and how well they do depends on the agent's texts and values
by construction. `python -m benchmarks.improving` measures the search beside a naive one.
"""
