"""
What the model is shown of the record.

What lives here: the context policies (cutting, masking, summarising, injecting), which turn the record into a view, and
`SystemPrompt`.

What must not: changes of the record itself, provider formats, I/O.
"""

__all__: tuple[str, ...] = ()
