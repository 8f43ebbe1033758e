"""
What a client is told of each error, and what it is not told.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from stepengine import errors
from stepengine.data.visible import visible
from stepengine.errors import (
    AnswerRejected,
    DataError,
    HandlerError,
    InputError,
    JournalCorrupt,
    JournalLocked,
    JournalMissing,
    LimitExceeded,
    MissingKey,
    ModelError,
    ReplayDivergence,
    StepEngineError,
    ToolInputError,
    UndoRefused,
)
from stepengine.server import Problem, problem_of

ALL = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, StepEngineError)
]  # fmt: skip


def document_of(error: Exception, **members: Any) -> dict[str, Any]:
    response = problem_of(error, members=members).response()
    document = json.loads(bytes(response.body))
    assert response.media_type == "application/problem+json"
    assert response.status_code == document["status"]
    assert {"type", "title", "status", "detail"} <= set(document)
    return document


@pytest.mark.spec("studio:SV4")
@pytest.mark.parametrize("kind", ALL)
def test_every_error_class_has_its_own_problem_kind(kind: type[StepEngineError]) -> None:
    document = document_of(kind("what was wrong"))

    assert 400 <= document["status"] < 600
    assert kind.__name__.lower() == document["type"].removeprefix("urn:stepengine:problem:").replace("_", "")


def test_configuration_error_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    document = document_of(MissingKey("ANTHROPIC_API_KEY is not set"))

    assert "ANTHROPIC_API_KEY" not in json.dumps(document)
    assert "ANTHROPIC_API_KEY is not set" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InputError("no", issues=["a: missing", "b: no number"]), 422, {"issues": ["a: missing", "b: no number"]}),
        (ToolInputError("no", issues=["a: missing"]), 422, {"issues": ["a: missing"]}),
        (DataError("an unknown field", path="$.x"), 422, {"path": "$.x", "issues": ["$.x: an unknown field"]}),
        (AnswerRejected("q3 is not open"), 409, {"detail": "q3 is not open", "open": [{"id": "q4"}]}),
        (JournalLocked("held by 7 of host", pid=7, host="host"), 409, {}),
        (JournalMissing("not at /srv/x", path="/srv/x", beside=["other"]), 404, {"detail": "there is no such run"}),
        (LimitExceeded("no more", kind="cost", limit=2.5), 409, {"limit_kind": "cost", "limit": 2.5}),
        (
            ReplayDivergence("at /srv/a.py:3", address="#5", step=2, site="/srv/a.py:3"),
            409,
            {"address": "#5", "step": 2},
        ),
        (UndoRefused("no", files=[("a.txt", "changed since")]), 409, {"files": [["a.txt", "changed since"]]}),
        (HTTPException(405, headers={"Allow": "GET"}), 405, {"type": "urn:stepengine:problem:method_not_allowed"}),
        (HTTPException(418), 418, {"type": "urn:stepengine:problem:http_418"}),
    ],
)
def test_errors_map_to_status_and_members(error: Exception, status: int, said: dict[str, Any]) -> None:
    document = document_of(error, **({"open": [{"id": "q4"}]} if isinstance(error, AnswerRejected) else {}))

    assert status == document["status"]
    assert said == {name: document[name] for name in said}
    assert "/srv" not in json.dumps(document)
    assert "host" not in json.dumps(document)


@pytest.mark.parametrize(
    "error", [KeyError("hunter2"), HandlerError("hunter2", location="/srv/a.py:3"), OSError(2, "hunter2")]
)
def test_internal_error_is_logged_and_hidden(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    document = document_of(error)

    assert 500 == document["status"]
    assert "hunter2" not in json.dumps(document)
    assert "hunter2" in caplog.text


@pytest.mark.parametrize(
    ("wait", "header"), [(1.2, "2"), (0, "0"), (None, None), (-1, None), (float("inf"), None), (float("nan"), None)]
)
def test_provider_retry_after_is_forwarded(wait: float | None, header: str | None) -> None:
    problem = problem_of(ModelError("key sk-1 is over its quota", retry_after=wait))

    assert (502, header) == (problem.status, problem.headers.get("Retry-After"))
    assert "sk-1" not in problem.message


WORDS = st.text(max_size=10)
FOREIGN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3) | st.tuples(inner),
    max_leaves=6,
)


@given(WORDS, st.dictionaries(WORDS, FOREIGN, max_size=2))
def test_problem_is_valid_json_for_any_text_and_members(message: str, members: dict[str, Any]) -> None:
    document = document_of(Problem(message, status=409, kind="odd", members=members))

    assert ("urn:stepengine:problem:odd", 409) == (document["type"], document["status"])
    assert document["detail"] == visible(document["detail"])


def test_problem_size_is_bounded() -> None:
    deep: Any = []
    for _ in range(1_000):
        deep = [deep]
    huge = Problem(
        "x" * 10**6, status=422, kind="huge", members={"a": [["y" * 5_000] * 500], "b": deep, "c": 10**5_000}
    )

    assert len(bytes(huge.response().body)) < 3_000_000


def test_members_do_not_override_problem_fields() -> None:
    made = Problem("no", status=409, kind="odd", members={"status": 200, "type": "x", "detail": "y"})

    assert (409, "urn:stepengine:problem:odd", "no") == tuple(made.document()[k] for k in ("status", "type", "detail"))
    assert made is problem_of(made)


@pytest.mark.spec("replay:J51", "studio:SV4")
def test_damaged_journal_is_409_with_its_record_and_no_path(caplog: pytest.LogCaptureFixture) -> None:
    document = document_of(
        JournalCorrupt("record 7 (byte 90) of /home/me/runs/a.jsonl is nested deeper than 232 levels")
    )

    assert 409 == document["status"]
    assert "record 7 " in document["detail"]
    assert "/home" not in str(document)
    assert "/home/me/runs/a.jsonl" in caplog.text
