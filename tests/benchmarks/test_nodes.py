"""What a reader has to read is counted without docstrings and annotations."""

from __future__ import annotations

import ast

from benchmarks.nodes import bare, large_classes

PLAIN = """
def double(n, by=2):
    total = None
    return n * by

class Kept:
    def get(self):
        return 1
"""
DESCRIBED = '''
"""A module."""

def double(n: int, by: int = 2) -> int:
    """Return the double."""
    total: int | None = None
    return n * by

class Kept:
    """Keeps."""
    def get(self) -> int:
        """Return one."""
        return 1
'''


def counted(text: str) -> int:
    return sum(1 for _ in ast.walk(bare(ast.parse(text))))


def test_docstrings_and_annotations_do_not_count() -> None:
    # An annotated assignment is one node more than a plain one: its empty annotation.
    assert counted(PLAIN) + 1 == counted(DESCRIBED)


def test_a_class_with_too_many_members_is_named() -> None:
    methods = "\n".join([f"    def m{n}(self): self.f = {n}" for n in range(26)])
    fields = "\n".join([f"    f{n}: int" for n in range(16)])
    tree = ast.parse(f"class A:\n{methods}\nclass B:\n{fields}\nclass C:\n    x: int\n")

    assert ["A (26 methods, 1 fields)", "B (0 methods, 16 fields)"] == [*large_classes(tree)]
