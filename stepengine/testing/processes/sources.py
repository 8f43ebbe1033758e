"""
Find calls of nondeterministic functions in the files of a program: clocks, random values, ids.

This module imports the standard library alone.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

IN_C = frozenset({
    ("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "gmtime"), ("time", "ctime"), ("time", "strftime"),
    ("posix", "urandom"), ("posix", "getpid"),
})  # fmt: skip
METHODS = frozenset(
    {"datetime.now", "datetime.utcnow", "datetime.today", "date.today", "Random.random", "Random.getrandbits"}
)
MODULES = frozenset({"random", "secrets"})
FUNCTIONS = frozenset({("uuid", "uuid1"), ("uuid", "uuid4"), ("tempfile", "mkdtemp"), ("tempfile", "mkstemp")})
FROZEN = {"random": ("random", "Random")}

_foreign = tuple({
    *[sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    str(Path(__file__).parents[2]) + os.sep,
})  # fmt: skip


def find_program_line(frame: FrameType | None) -> str:
    """Return the file and line of the program that *frame* was called from; ``""`` if there is none."""
    while frame is not None:
        if _is_program_frame(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_program_frame(frame: FrameType) -> bool:
    """Return True if a frame runs a file of the program: neither the standard library, an installed package nor stepengine."""
    name = frame.f_code.co_filename
    return not name.startswith(("<", *_foreign))


def start_reporting_source_calls(frozen: Iterable[str], report: Callable[[str, str], object]) -> None:
    """
    Start to report each program line that calls a source of nondeterminism, once, in all threads that start later.

    Args:
        frozen: Kinds of values that are replayed, so that their functions are no sources.
        report: Called with the name of the function and the line.
    """
    ignored = tuple([name for kind in frozen for name in FROZEN.get(kind, ())])
    seen: set[tuple[str, str]] = set()

    def report_source_call(frame: FrameType, event: str, arg: Any) -> None:
        """Report the first call of a nondeterministic function in each line of the program: a profile function."""
        if event == "c_call":
            caller, name = frame, _find_c_source_name(arg)
        elif event == "call" and frame.f_back is not None:
            caller, name = frame.f_back, _find_python_source_name(frame)
        else:
            return
        if not name or name.partition(".")[0] in ignored or not _is_program_frame(caller):
            return
        found = name, f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if found not in seen:
            seen.add(found)
            report(*found)

    threading.setprofile(report_source_call)
    sys.setprofile(report_source_call)


def _find_c_source_name(function: Any) -> str:
    """Return the full name of a nondeterministic C function; ``""`` for any other."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if (module, name) in IN_C:
        return f"os.{name}" if module == "posix" else f"{module}.{name}"
    return name if name in METHODS else ""


def _find_python_source_name(frame: FrameType) -> str:
    """Return the full name of a frame's function if it is nondeterministic; ``""`` for any other."""
    module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
    if (module in MODULES and not name.startswith("<")) or (module, name) in FUNCTIONS:
        return f"{module}.{name}"
    return ""
