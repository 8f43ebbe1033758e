"""
Evaluations as they are written in files: Python with ``evaluation = Evaluation(...)``, or YAML with the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from stepengine.data.alike import list_names
from stepengine.data.limits import Limits
from stepengine.engine.loader import AgentLocation
from stepengine.errors import DataError, StepEngineError
from stepengine.evaluation import criteria
from stepengine.evaluation.case_runs import Evaluation
from stepengine.evaluation.checks import load_file_member, load_json_or_yaml
from stepengine.evaluation.criteria import Case
from stepengine.workspace.paths import make_missing_path_hint

MAKERS: Mapping[str, Callable[..., criteria.Criterion]] = {
    name: getattr(criteria, name)
    for name in (
        "called",
        "command",
        "contains",
        "equals",
        "fits",
        "judge",
        "matches",
        "max_cost",
        "max_steps",
        "never_called",
        "only_changes",
    )
}
WHOLE = ("command", "equals", "fits")
"""The checks whose one argument may be a list."""


def load_evaluation(file: Path) -> Evaluation:
    """
    Return the evaluation of a file.

    Raises:
        DataError: when the file cannot be read or has no evaluation; for YAML with all problems.
    """
    if not file.is_file():
        msg = f"there is no evaluation file {str(file)!r}{make_missing_path_hint(file)}"
        raise DataError(msg)
    if file.suffix == ".py":
        found = load_file_member(file, "evaluation")
        if isinstance(found, Evaluation):
            return found
        msg = f"{file}: 'evaluation' must be an Evaluation(...), not {found!r}"
        raise DataError(msg)
    if file.suffix in (".yaml", ".yml"):
        return _EvaluationReader(str(file)).read_evaluation(load_json_or_yaml(file))
    msg = f"{str(file)!r} is neither a .py nor a .yaml file"
    raise DataError(msg)


def resolve_agent_path(agent: object, root: Path) -> str:
    """Return the path of an agent file, with a relative one joined to *root*; *agent* as text if there is no such file."""
    place = AgentLocation.from_text(str(agent))
    named = None if place is None else place.with_root(root)
    return str(named) if named is not None and named.file.is_file() else str(agent)


@attrs.define
class _EvaluationReader:
    """Reads an evaluation from plain values, and collects all errors."""

    name: str
    problems: list[str] = attrs.field(factory=list)

    def read_evaluation(self, data: object) -> Evaluation:
        """Parse an evaluation from plain values; raise ``DataError`` with all problems."""
        if not isinstance(data, Mapping):
            msg = f"{self.name} is not an evaluation: write an object with name, cases, agents and checks"
            raise DataError(msg)
        given = dict(data)
        given["cases"] = [
            case for each in self._read_list(given, "cases") if (case := self._read_case(each)) is not None
        ]
        given["checks"] = self._read_checks(given, "the evaluation")
        given["limits"] = self._read_limits(given.get("limits"))
        given.setdefault("name", Path(self.name).stem)
        made: Evaluation | None = self._make_object_or_add_problems(Evaluation, given, "the evaluation")
        if self.problems or made is None:
            msg = "\n  ".join([f"{self.name} has problems; correct them:", *self.problems])
            raise DataError(msg)
        return made

    def _read_case(self, data: object) -> Case | None:
        """Return a case; ``None`` for an invalid one, whose problem is added."""
        if not isinstance(data, Mapping):
            self.problems.append(f"a case must be an object with an id, not {data!r}")
            return None
        where = f"case {data.get('id')!r}"
        made: Case | None = self._make_object_or_add_problems(
            Case, {**data, "checks": self._read_checks(data, where)}, where
        )
        return made

    def _make_object_or_add_problems(self, kind: type[Any], members: Mapping[str, object], where: str) -> Any:
        """Return an object of *kind* from *members*, ``None`` after an error; add unknown members and errors to the problems."""
        known = [field.name for field in attrs.fields(kind)]
        unknown = [str(name) for name in members if name not in known]
        self.problems += [
            f"{where}: unknown field {name!r}; valid fields: {list_names(known, name)}" for name in unknown
        ]
        try:
            return kind(**{name: value for name, value in members.items() if name in known})
        except (TypeError, ValueError, StepEngineError) as error:
            self.problems.append(f"{where}: {error}")
            return None

    def _read_limits(self, data: object) -> Limits | None:
        """Return limits; ``None`` without any, or for invalid ones, whose problem is added."""
        return (
            None
            if data is None
            else self._make_object_or_add_problems(
                Limits, data if isinstance(data, Mapping) else {"limits": data}, "limits"
            )
        )

    def _read_list(self, data: Mapping[str, object], name: str) -> list[Any]:
        """Return a member that is a list; an empty list for a missing or another value, which adds a problem."""
        value = data.get(name) or []
        if isinstance(value, list):
            return value
        self.problems.append(f"{name} must be a list, not {value!r}")
        return []

    def _read_checks(self, data: Mapping[str, object], where: str) -> list[criteria.Criterion]:
        """Return the valid checks of a case or evaluation; others add problems."""
        return [made for each in self._read_list(data, "checks") if (made := self._read_check(each, where)) is not None]

    def _read_check(self, data: object, where: str) -> criteria.Criterion | None:
        """Return a check from its name and arguments; ``None`` for an invalid one, whose problem is added."""
        name, value = next(iter(data.items())) if isinstance(data, Mapping) and len(data) == 1 else (data, None)
        maker = MAKERS.get(name) if isinstance(name, str) else None
        if maker is None:
            self.problems.append(
                f"{where}: {data!r} is not a check; write one like 'contains: word'; valid checks: {list_names(MAKERS, name)}"
            )
            return None
        try:
            if isinstance(value, Mapping) and name not in ("equals", "fits"):
                return maker(**value)
            if isinstance(value, list) and name not in WHOLE:
                return maker(*value)
            is_expected = name == "equals" and isinstance(data, Mapping)
            return maker() if value is None and not is_expected else maker(value)
        except (TypeError, ValueError, ArithmeticError, StepEngineError) as error:
            self.problems.append(f"{where}: {name}: {error}")
            return None
