"""
A run in viewers that others wrote, each a process of its own: what they show of it by their own interfaces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from stepengine import STEP_ALL, AgentCall, AgentDefinition, Engine, Usage, call, tool
from stepengine.adapters.otel import Tracing
from stepengine.errors import ModelError
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, failure, tool_call
from tests.waits import until

COUNTERPARTS = (
    (
        "pypi:arize-phoenix",
        "20.26.1",
        "works",
        "span kinds, nesting, input, output, tokens, errors, session",
    ),
    ("pypi:mlflow", "3.17.2", "works", "span kinds, nesting, input, output, tokens, errors, session"),
)

PHOENIX, MLFLOW = shutil.which("phoenix"), shutil.which("mlflow")
OF_MLFLOW = Path(str(MLFLOW)).resolve().with_name("python")
HOW = "needs the command {0}: pip install {1} into an environment of its own and put it on PATH"
SECONDS = 240
SPANS = 13
pytestmark = pytest.mark.deep


@contextmanager
def running(command: list[str], folder: Path, port: int, **variables: str) -> Iterator[str]:
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    env = {**kept, "HOME": str(folder), "DO_NOT_TRACK": "true", **variables}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or answers(url), seconds=SECONDS)
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@tool(in_thread=False, requires_permission=False)
def look(where: str) -> dict[str, str]:
    """
    Look somewhere.
    """
    return {"found": where}


def handler(ctx: Any) -> Any:
    yield from call(look, where="attic")
    yield AgentCall("kid", prompt="Look below.")
    yield STEP_ALL


KID = AgentDefinition("kid", model="anthropic/claude-haiku-4-5")
BOT = AgentDefinition(
    "bot", model="anthropic/claude-sonnet-4-5", tools=[look], spawnable_agents=[KID], handle_steps=handler
)
BROKEN = AgentDefinition("broken", model="anthropic/claude-sonnet-4-5")


async def sent_to(url: str, **headers: str) -> None:
    """
    Run an agent that completes, and one that fails, and export both.
    """
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", headers=headers)))
    last = ModelReply("It is empty.", usage=Usage(2_000, 100), cost=Decimal("0.008"))
    models = ScriptedModel(["Nothing.", tool_call("look", {"where": "cellar"}), last, failure(ModelError("broken"))])
    async with Engine([BOT, BROKEN], models=models, observers=[Tracing(provider, content=True)]) as engine:
        assert "It is empty." == (await engine.run("bot", "What is there?", session_id="thread-1")).unwrap()
        assert "failed" == (await engine.run("broken", "Fail.")).status
    provider.shutdown()


def nested(spans: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """
    Return name, kind and name of the parent of each span.
    """
    names = {span["id"]: span["name"] for span in spans}
    return {(span["name"], span["kind"], names.get(span["parent"], "")) for span in spans}


def expected(agent: str, step: str, model: str, work: str) -> set[tuple[str, str, str]]:
    chat, run = "chat claude-sonnet-4-5", "invoke_agent bot"
    return {
        (run, agent, ""), ("execute_tool look", work, run), ("invoke_agent kid", agent, run),
        ("stepengine.step 0", step, "invoke_agent kid"), ("chat claude-haiku-4-5", model, "stepengine.step 0"),
        ("stepengine.step 0", step, run), (chat, model, "stepengine.step 0"), ("execute_tool look", work, "stepengine.step 0"),
        ("stepengine.step 1", step, run), (chat, model, "stepengine.step 1"),
        ("invoke_agent broken", agent, ""), ("stepengine.step 0", step, "invoke_agent broken"),
    }  # fmt: skip


IN_PHOENIX = """{projects{edges{node{
  sessions(first: 10){edges{node{sessionId}}}
  spans(first: 100){edges{node{name spanId parentId spanKind statusCode statusMessage tokenCountTotal
    input{value} output{value} attributes}}}
}}}}"""


@pytest.mark.skipif(PHOENIX is None, reason=HOW.format("phoenix", "arize-phoenix"))
@pytest.mark.spec("requirements:O6", "ecosystem:EC135", "ecosystem:EC137")
async def test_phoenix_shows_run_inputs_outputs_and_span_kinds(tmp_path: Path) -> None:
    port = free_port()
    own = {"PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port), "PHOENIX_GRPC_PORT": str(free_port())}
    own |= {"PHOENIX_WORKING_DIR": str(tmp_path), "PHOENIX_TELEMETRY_ENABLED": "false"}
    with running([str(PHOENIX), "serve"], tmp_path, port, **own) as url:
        await sent_to(url)

        def shown() -> Any:
            body = json.dumps({"query": IN_PHOENIX}).encode()
            request = urllib.request.Request(f"{url}/graphql", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as reply:
                told = json.load(reply)
            assert "errors" not in told, told["errors"]
            (project,) = [edge["node"] for edge in told["data"]["projects"]["edges"]]
            return project if len(project["spans"]["edges"]) == SPANS else None

        project = until(shown, seconds=SECONDS)

    spans = [edge["node"] for edge in project["spans"]["edges"]]
    told = [{"id": s["spanId"], "parent": s["parentId"], "kind": s["spanKind"], "name": s["name"]} for s in spans]
    run, failed = [next(s for s in spans if s["name"] == f"invoke_agent {name}") for name in ("bot", "broken")]
    assert expected("agent", "chain", "llm", "tool") == nested(told)
    assert ("What is there?", "It is empty.") == (run["input"]["value"], run["output"]["value"])
    assert ("ERROR", "broken") == (failed["statusCode"], failed["statusMessage"])
    assert "ModelError" == json.loads(failed["attributes"])["error"]["type"]
    assert 2_100 in {span["tokenCountTotal"] for span in spans}
    assert ["thread-1"] == [edge["node"]["sessionId"] for edge in project["sessions"]["edges"]]


IN_MLFLOW = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
found = mlflow.search_traces(locations=["0"], return_type="list")
print(json.dumps([{
    "request": trace.info.request_preview, "response": trace.info.response_preview, "state": trace.info.state.value,
    "tokens": trace.info.token_usage, "session": trace.info.trace_metadata.get("mlflow.trace.session"),
    "spans": [
        {"name": s.name, "kind": s.span_type, "id": s.span_id, "parent": s.parent_id, "inputs": s.inputs, "outputs": s.outputs}
        for s in trace.data.spans
    ],
} for trace in found]))
"""


@pytest.mark.skipif(MLFLOW is None, reason=HOW.format("mlflow", "mlflow"))
@pytest.mark.spec("requirements:O6", "ecosystem:EC135", "ecosystem:EC137")
async def test_mlflow_shows_run_inputs_outputs_and_span_kinds(tmp_path: Path) -> None:
    port = free_port()
    command = [str(MLFLOW), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    with running([*command, *store], tmp_path, port, MLFLOW_DISABLE_TELEMETRY="true") as url:
        await sent_to(url, **{"x-mlflow-experiment-id": "0"})

        def shown() -> Any:
            asked = [str(OF_MLFLOW), "-c", IN_MLFLOW, url]
            traces = json.loads(subprocess.check_output(asked, text=True, timeout=SECONDS).splitlines()[-1])
            return traces if sum(len(trace["spans"]) for trace in traces) == SPANS else None

        traces = until(shown, seconds=SECONDS)

    by_request = {json.loads(trace["request"]): trace for trace in traces}
    run, failed = by_request["What is there?"], by_request["Fail."]
    assert expected("AGENT", "CHAIN", "CHAT_MODEL", "TOOL") == nested([*run["spans"], *failed["spans"]])
    assert ("It is empty.", "OK", "thread-1") == (json.loads(run["response"]), run["state"], run["session"])
    assert "ERROR" == failed["state"]
    assert (2_000, 100) == (run["tokens"]["input_tokens"], run["tokens"]["output_tokens"])
    tools = [(s["inputs"], s["outputs"]) for s in run["spans"] if s["kind"] == "TOOL"]
    assert [({"where": w}, {"found": w}) for w in ("attic", "cellar")] == sorted(tools, key=str)
