"""
The folders of agents that the tests of evaluation have.
"""

from tests.evaluation.conftest import folder, folders_are_trusted  # noqa: F401
