"""
The OpenAPI document lists the operations and their scopes, and a client that another generator makes of it runs agents.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openapi_spec_validator
import pytest

from stepengine.server import Tokens, Webhooks, app, openapi
from stepengine.server.access import SCOPES
from stepengine.server.debug_pages import OPERATIONS as LOOKING
from stepengine.server.routes import OPERATIONS as ALWAYS

from .house import House

SECRET = "sixteen characters and more"
GENERATOR = "openapi-python-client"
COUNTERPARTS = (
    ("pypi:openapi-python-client", "0.29.1", "works", "a generated client runs agents"),
    ("pypi:openapi-spec-validator", "0.9.0", "works", "the OpenAPI document of `stepengine serve` is valid"),
)
HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.leaks_allowed(
    "the server outlasts a test: its threads and what its runs hold are the module's"
)
OPERATIONS = (*ALWAYS, *LOOKING)
"""All that a server has which was told how its engine is made again."""
NAMES = [one.name for one in OPERATIONS]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    webhooks = Webhooks.parse(
        json.dumps({"topics": {"go": {"secrets": [SECRET], "run": "/run"}}}).encode(), "webhooks.json"
    )
    with House(tmp_path_factory.mktemp("house"), webhooks=webhooks).open() as opened:
        yield opened


@pytest.fixture(scope="module")
def document(house: House) -> dict[str, Any]:
    with house.client(None) as client:
        return dict(client.get("/openapi.json").json())


# --- the document ---------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("studio:SV1")
def test_openapi_document_is_valid(document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)

    assert "3.1.0" == document["openapi"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV1")
def test_document_lists_exactly_the_routes_and_scopes(document: dict[str, Any]) -> None:
    there = {(one.path, one.method.lower(), one.name, one.scope) for one in OPERATIONS}
    said = {
        (path, method, one["operationId"], one.get("x-scope"))
        for path, ways in document["paths"].items()
        for method, one in ways.items()
    }

    assert there == said
    assert len(NAMES) == len(set(NAMES))


@pytest.fixture(scope="module")
def bearers(house: House) -> dict[str | None, dict[str, dict[str, str]]]:
    """
    By each scope: the headers of a token that has only it, of one that has all the others but `admin`, and of nobody.
    """
    tokens = Tokens.open(house.folder / "tokens.json")

    def bearer(name: str, scopes: list[str]) -> dict[str, str]:
        return {"authorization": f"Bearer {tokens.add(name, scopes)}"}

    return {
        scope: {
            "with": bearer(f"with.{scope}", [scope or "read"]),
            "without": bearer(f"without.{scope}", [one for one in SCOPES if one not in (scope, "admin")]),
            "nobody": {},
        }
        for scope in {one.scope for one in OPERATIONS}
    }


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_operation_requires_the_documented_scope(operation: Any, bearers: dict[str | None, Any], house: House) -> None:
    path = re.sub(r"\{\w+\}", "nothing", operation.path)
    with house.client(None) as client:
        told = {
            who: client.request(operation.method, path, headers=headers)
            for who, headers in bearers[operation.scope].items()
        }

    assert 403 != told["with"].status_code
    if operation.path.startswith("/hooks/"):
        # A signature, and nothing else.
        assert [401, 401, 401] == [told[who].status_code for who in ("with", "without", "nobody")]
    elif operation.scope is None:
        assert [200, 200] == [told["without"].status_code, told["nobody"].status_code]
    else:
        assert [403, 401] == [told["without"].status_code, told["nobody"].status_code]
        assert operation.scope == told["without"].json()["scope"]


def test_document_is_generated_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError

    with house.client(None) as client:
        first = client.get("/openapi.json")
        monkeypatch.setattr(openapi, "make_document", make_nothing)
        again = client.get("/openapi.json")

    assert (200, first.content) == (again.status_code, again.content)


@pytest.mark.spec("studio:SV1")
@pytest.mark.parametrize("tags", ["{}", "W/{}", '"another", {}'])
def test_matching_etag_gets_304(house: House, tags: str) -> None:
    with house.client(None) as client:
        etag = client.get("/openapi.json").headers["etag"]
        known = client.get("/openapi.json", headers={"if-none-match": tags.format(etag)})
        other = client.get("/openapi.json", headers={"if-none-match": '"another"'})

    assert (304, b"", etag) == (known.status_code, known.content, known.headers["etag"])
    assert 200 == other.status_code


@pytest.mark.deep
@pytest.mark.smoke
def test_document_names_its_mount_path() -> None:
    document = openapi.OpenApiDocument(OPERATIONS, version="1")
    root, mounted = [document.make_response(base) for base in ("", '/a"b')]

    assert [{"url": "/"}] == json.loads(root.body)["servers"]
    assert [{"url": '/a"b'}] == json.loads(mounted.body)["servers"]
    assert root.etag != mounted.etag


# --- the answers ----------------------------------------------------------------------------------------------------


async def test_unopened_server_reports_not_ready(tmp_path: Path) -> None:
    house = House(tmp_path)
    async with house.engine() as engine:
        served = app(engine, runs=tmp_path / "runs", tokens=house.folder / "tokens.json")
        transport = httpx2.ASGITransport(app=served)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = await client.get("/ready")

    assert (503, "stopping") == (answer.status_code, answer.json()["status"])


def test_wrong_method_gets_405_with_all_allowed_methods(house: House, document: dict[str, Any]) -> None:
    with house.client() as client:
        for path, ways in document["paths"].items():
            answer = client.request("PATCH", re.sub(r"\{\w+\}", "nothing", path))
            allowed = set(answer.headers["allow"].lower().split(", "))

            assert (405, set(ways)) == (answer.status_code, allowed - {"head"})
            assert "application/problem+json" == answer.headers["content-type"]


# --- a client of somebody else's ------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV1")
@pytest.mark.skipif(
    shutil.which(GENERATOR) is None, reason=f"needs the command {GENERATOR} on PATH, from an environment of its own"
)
def test_a_generated_client_starts_watches_and_answers_a_run(
    house: House, document: dict[str, Any], tmp_path: Path
) -> None:
    command = shutil.which(GENERATOR)
    assert command is not None
    python = Path(command).resolve().with_name("python")
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    # What it formats the code with would be looked for on PATH; types that it does not know are given as text.
    config = {
        "post_hooks": [],
        "content_type_overrides": dict.fromkeys(("application/x-ndjson", "application/openmetrics-text"), "text/plain"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    options = ["--path", "openapi.json", "--meta", "none", "--output-path", "made", "--config", "config.yaml"]
    made = subprocess.run(
        [command, "generate", *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50
    )
    assert (0, "") == (
        made.returncode,
        re.sub(r"Generating .*", "", made.stdout + made.stderr, flags=re.DOTALL).strip(),
    )
    assert "WARNING" not in made.stdout + made.stderr

    told = subprocess.run(
        [python, HERE / "generated_client.py", house.url, house.tokens["root"]],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert 0 == told.returncode, told.stderr
    said = json.loads(told.stdout)

    assert ["asker", "booker", "listener", "quick", "talker", "writer"] == sorted(said["agents"])
    assert "On which day?" == said["question"]
    assert ["run_started", "question_asked", "answer_received", "run_finished"] == [
        kind for kind in said["events"] if kind != "phase_changed"
    ]
    assert ("completed", "Rome: Monday") == (said["status"], said["output"])
    assert "head" == said["journal"]
    assert [404, "urn:stepengine:problem:no_such_run"] == said["missing"]
