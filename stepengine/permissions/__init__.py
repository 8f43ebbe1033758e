"""
Who may do what.

What lives here: `Policy` and `Rule`: allow, ask or deny for a tool call, the explanation of a decision, and a policy's file form.

What must not: asking a person (that is an effect), running a tool, confining one (that is the tool's own duty).
"""

__all__: tuple[str, ...] = ()
