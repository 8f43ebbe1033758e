"""
Conditions on the result of a run, as an expression or a function; and functions that load Python, JSON and YAML files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.state import RunResult
from stepengine.engine.neighbour_imports import load_fresh_module
from stepengine.errors import DataError
from stepengine.journal import Journal
from stepengine.journal.programs import find_program_text
from stepengine.runtime.performer import child_path
from stepengine.workspace.file_formats import read_regular_file
from stepengine.workspace.paths import make_missing_path_hint

PLACE = re.compile(r"[A-Za-z0-9_./-]{1,200}:[A-Za-z_][A-Za-z0-9_]{0,100}")
MAX_FILE = 4 * 1024 * 1024
NAMES = "output, text, status, tools, steps, cost, error, result"
EXAMPLES = {
    "evaluation": 'evaluation = Evaluation("greet", [Case("one", "Hi", checks=[contains("Hello")])], {"base": "agents/mine.py"})',
    "replies": 'replies = ["Hello", tool_call("look", {"path": "a.py"})]',
}
"""Examples of the objects that files have to contain, by name, for error messages."""
HELPERS: Mapping[str, Any] = {
    f.__name__: f
    for f in (
        abs,
        all,
        any,
        bool,
        dict,
        float,
        int,
        isinstance,
        len,
        list,
        max,
        min,
        round,
        set,
        sorted,
        str,
        sum,
        tuple,
    )
}


@frozen
class Check:
    """
    A condition that a run has to meet.

    Attributes:
        text: The condition as it was written.
        judge: Returns whether a result passes; the text of an ``AssertionError`` is the reason of the failure.
    """

    text: str
    judge: Callable[[RunResult], Any]

    @classmethod
    def from_any(cls, check: Check | str | Callable[[RunResult], object], root: Path | None = None) -> Check:
        """
        Return *check* as a ``Check``: the function ``MODULE:FN``, an expression, or a function of the result.

        Raises:
            DataError: when a text is neither a function nor an expression.
        """
        if isinstance(check, Check):
            return check
        if callable(check):
            return cls(getattr(check, "__name__", "the check"), check)
        return cls(check, load_function(check, root)) if PLACE.fullmatch(check) else cls.from_expression(check)

    @classmethod
    def from_expression(cls, text: str) -> Check:
        """
        Return a check of an expression over ``output, text, status, tools, steps, cost, error, result``.

        The expression is evaluated as code, so it must be trusted.

        Raises:
            DataError: when *text* is not an expression.
        """
        try:
            code = compile(text, "--check", "eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            msg = f"{text!r} is not an expression: {error}; write one like 'output == 3' (names: {NAMES}), or MODULE:FN"
            raise DataError(msg) from None

        def evaluate_condition(result: RunResult) -> object:
            return eval(code, {"__builtins__": HELPERS, **_expression_variables(result)})  # noqa: S307 - the caller's own, as typed

        return cls(text, evaluate_condition)

    def find_failure(self, result: RunResult) -> str:
        """
        Evaluate the condition for *result*, and return why it does not pass, or ``""``.

        Raises:
            DataError: when the check itself fails.
        """
        try:
            return "" if self.judge(result) else f"{self.text} does not hold"
        except AssertionError as error:
            # pytest, where it has loaded the module, adds what it knows of the values.
            return str(error).partition("\n")[0] or f"{self.text} does not hold"
        except Exception as error:
            msg = f"the check {self.text} failed: {type(error).__name__}: {error}"
            raise DataError(msg) from error


def _expression_variables(result: RunResult) -> dict[str, object]:
    """Return the variables of an expression for a run: output, text, status, tools, steps, cost, error and result."""
    return {
        "output": plain(result.output),
        "text": result.text,
        "status": result.status.value,
        "tools": [*[call.tool_name for call in result.tool_calls], *_list_tools_called_by_programs(result)],
        "steps": result.state.step_index,
        "cost": None if result.cost is None else float(result.cost),
        "error": None if result.error is None else str(result.error),
        "result": result,
    }


def _list_tools_called_by_programs(result: RunResult) -> Iterator[str]:
    """Yield the tools that programs of the run called, in order, from the journal."""
    if not isinstance(result.journal, Journal):
        return
    history = result.journal.history()
    for (path, seq), intent in sorted(history.intents.items()):
        if not path and intent.starts_child_or_body and find_program_text(history.form(intent)) is not None:
            yield from [
                str(form["tool_name"])
                for form in map(history.form, history.tree.list_effects(child_path(path, seq)))
                if form["type"] == "tool_call"
            ]


def load_function(reference: str, root: Path | None = None) -> Callable[..., object]:
    """
    Import the module of ``MODULE:FN``, such as ``checks:is_short`` or ``./checks.py:is_short``, and return the function.

    Args:
        reference: The module and the function.
        root: The folder in which modules and files are looked up first; the working folder by default. It is added to ``sys.path``.

    Raises:
        DataError: when there is no such function, or the module cannot be imported.
    """
    module, _, name = reference.rpartition(":")
    folder = root or Path.cwd()
    # The search path of an installed command does not contain the working folder, which the caller means.
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    beside = folder / f"{module.removesuffix('.py')}.py"
    if module.endswith(".py") or beside.is_file():
        found = load_file_member(beside, name)
    else:
        try:
            found = getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:
            msg = f"{reference} cannot be loaded: {type(error).__name__}: {error}"
            raise DataError(msg) from error
    if not callable(found):
        msg = f"{reference} is {found!r}, which is not a function"
        raise DataError(msg)
    made: Callable[..., object] = found
    return made


def load_file_member(file: Path, name: str) -> Any:
    """
    Run a Python file, which may import others of its folder, and return its object *name*; raise ``DataError`` if that fails.

    Raises:
        DataError: when the file cannot be loaded, or does not define *name*.
    """
    if not file.is_file():
        msg = f"there is no file {str(file)!r}{make_missing_path_hint(file)}"
        raise DataError(msg)
    try:
        module = load_fresh_module(file)
    except (Exception, SystemExit) as error:
        msg = f"{file} cannot be loaded: {type(error).__name__}: {error}"
        raise DataError(msg) from error
    if not hasattr(module, name):
        example = f"; for example:\n    {EXAMPLES[name]}" if name in EXAMPLES else ""
        msg = f"{file} does not define {name!r}{example}"
        raise DataError(msg)
    return getattr(module, name)


def load_json_or_yaml(file: Path) -> Any:
    """
    Return the plain values in a file, JSON or YAML by its content, not its suffix; raise ``DataError`` if it cannot be parsed.

    Raises:
        DataError: when the file cannot be read, is larger than 4 MiB, is neither JSON nor YAML, contains an alias, or has a key twice
            in one object.
    """
    import yaml

    try:
        raw = read_regular_file(file, MAX_FILE)
    except OSError as error:
        near = make_missing_path_hint(file) if isinstance(error, FileNotFoundError) else ""
        msg = f"{file} cannot be read: {error.strerror}{near}"
        raise DataError(msg) from None
    if len(raw) > MAX_FILE:
        msg = f"{file} is larger than {MAX_FILE} bytes"
        raise DataError(msg)
    try:
        # Nearly all JSON is YAML, but not its numbers such as 1e3; what is too deep for JSON would keep YAML for minutes.
        with contextlib.suppress(ValueError):
            return json.loads(raw, object_pairs_hook=partial(_make_unique_object, file))
        loader = yaml.SafeLoader(raw)
        root = loader.get_single_node()
        if problem := _find_yaml_problem(root):
            msg = f"{file} {problem}"
            raise DataError(msg)
        return None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        msg = f"{file} is not valid JSON or YAML: {' '.join(str(error).split())[:300]}"
        raise DataError(msg) from None


def _make_unique_object(file: Path, members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ``DataError`` if a key occurs twice, as its first value would be lost."""
    made = dict[str, Any]()
    for key, value in members:
        if key in made:
            msg = f"{file} has the key {key!r} twice in one object; keep one of them"
            raise DataError(msg)
        made[key] = value
    return made


def _find_yaml_problem(root: Any) -> str:
    """Return why a YAML document is refused: an alias, or a key that occurs twice in one mapping; ``""`` if it has neither."""
    import yaml

    nodes, known = [root], {id(root)}
    for node in nodes:  # it grows meanwhile
        inner = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            inner = [one for pair in node.value for one in pair]
            keys = Counter([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            for key, count in keys.most_common(1):
                if count > 1:
                    return (
                        f"has the key {key!r} twice in the mapping at line {node.start_mark.line + 1}; keep one of them"
                    )
        # An alias stands for a value as often as it is written, so that a few lines may become millions.
        if any(id(one) in known for one in inner):
            return "contains a YAML alias (*name); write the value instead"
        nodes += inner
        known |= {id(one) for one in inner}
    return ""
