"""
What programs save: twenty lookups and one sum, asked for one by one, all in one reply, and by a program that the model writes.

The same scripted model answers stepengine and pydantic-ai over HTTP. `python -m benchmarks.programs` measures.
"""
