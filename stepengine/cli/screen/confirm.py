"""Answers that a command reads without a console: a confirmation at the terminal, and the result of an effect in doubt."""

from __future__ import annotations

import json
import os
import signal
import sys

from stepengine.data.questions import DOUBT, Answer

YES, NO = ("y", "yes"), ("n", "no")
RESULT = "result:"
"""The start of an answer that supplies the result of an effect in doubt."""
BY = "command line"


def can_ask_at_terminal() -> bool:
    """Return True if stdin and stderr are terminals, and the command was not started by a tool of an agent."""
    from stepengine.workspace.environment import MARKER

    return sys.stdin.isatty() and sys.stderr.isatty() and not os.environ.get(MARKER)


def confirm(question: str) -> bool:
    """Ask *question* on stderr, and return True only if the person types ``y`` or ``yes``; Ctrl-C raises at once."""
    before = signal.getsignal(signal.SIGINT)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        # A handler of the event loop would wait until the line is read.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return sys.stdin.readline().strip().lower() in YES
    finally:
        signal.signal(signal.SIGINT, before)


def is_doubt_result_answer(question_id: str, text: str) -> bool:
    """Return whether an answer supplies the result of an effect in doubt."""
    return is_about_effect_in_doubt(question_id) and text.startswith(RESULT)


def is_about_effect_in_doubt(question_id: str) -> bool:
    """Return whether a question is about an effect in doubt."""
    return question_id.startswith(DOUBT)


def parse_result_answer(text: str) -> Answer:
    """Return an answer with the result after ``result:``, parsed as JSON if possible."""
    given = text.removeprefix(RESULT)
    try:
        result = json.loads(given)
    except (ValueError, RecursionError):
        result = given
    return Answer(result=result, by=BY)
