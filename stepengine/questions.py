"""
Questions to people: the choices, forms and texts that a surface shows, and the answers that it returns.

The console, the studio, the HTTP API and the adapters use the same functions. A facade: they live in ``stepengine.data``.
"""

from stepengine.data.call_text import PreviewPart, preview_parts
from stepengine.data.choices import (
    Choice,
    answer_for_choice,
    answer_from_form,
    answer_from_json,
    answer_schema,
    describe_scope,
    list_choices,
    question_to_json,
)

__all__ = (
    "Choice",
    "PreviewPart",
    "answer_for_choice",
    "answer_from_form",
    "answer_from_json",
    "answer_schema",
    "describe_scope",
    "list_choices",
    "preview_parts",
    "question_to_json",
)
