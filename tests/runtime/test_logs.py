"""
Where log lines and events go: loggers of every signature, standard records with fields, and a file of events.
"""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from decimal import Decimal
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, EventFile, Hooks, LogObserver, tool
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.redaction import GIVEN
from stepengine.testing import ScriptedModel, tool_call


def handle_steps(ctx: Any) -> Any:
    ctx.logger.debug("one")
    ctx.logger.info("two %s", why="{0}")
    ctx.logger.warning("three")
    ctx.logger.error("four")
    yield from ()


WORKER = AgentDefinition("worker", handle_steps=handle_steps)
LINES = ["one", "two %s", "three", "four"]


class Second:
    """
    The four methods as a log provider of another language has them: a message, and perhaps data.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []

    def info(self, message: str, data: Any = None) -> None:
        self.lines.append((message, data))

    debug = warn = error = info


class Named(Second):
    def info(self, msg: str, *, data: Any = None) -> None:
        self.lines.append((msg, data))

    debug = warning = error = info


class Keywords(Second):
    def info(self, message: str, **fields: Any) -> None:
        self.lines.append((message, fields))

    debug = warn = error = info


class Places(Second):
    def info(self, message: str, *more: Any) -> None:
        self.lines.append((message, more[0] if more else None))

    debug = warn = error = info


class Alone(Second):
    def info(self, message: str) -> None:
        self.lines.append((message, None))

    debug = warn = error = info


@pytest.mark.spec("requirements:O1", "requirements:O4", "reliability:UI09")
@pytest.mark.parametrize("kind", [Second, Named, Keywords, Places, Alone])
async def test_a_logger_of_any_signature_loses_no_line(kind: type[Second]) -> None:
    logger = kind()
    async with Engine([WORKER], logger=logger) as engine:
        result = await engine.run(WORKER, "Go.")

    place = {"run_id": result.state.run_id, "agent_id": "worker", "path": "", "step": 0}
    assert LINES == [message for message, _ in logger.lines]
    if kind is not Alone:
        assert [place, {"why": "{0}", **place}, place, place] == [data for _, data in logger.lines]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def standard(request: pytest.FixtureRequest) -> tuple[logging.Logger, Kept]:
    logger, kept = logging.getLogger(request.node.name), Kept()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(kept)
    return logger, kept


class Tagged(logging.LoggerAdapter):  # type: ignore[type-arg]
    def process(self, msg: Any, kwargs: Any) -> Any:
        return f"[app] {msg}", {**kwargs, "extra": self.extra}


@pytest.mark.spec("requirements:O1", "requirements:O4")
async def test_standard_log_records_carry_the_place_also_through_an_adapter(standard: Any) -> None:
    logger, kept = standard
    for given in (logger, Tagged(logger, {"tenant": "t1"})):
        async with Engine([WORKER], logger=given) as engine:
            result = await engine.run(WORKER, "Go.")
        place = (result.state.run_id, "worker", "", 0)
        assert [place] * 4 == [(r.run_id, r.agent_id, r.path, r.step) for r in kept.records[-4:]]
        assert {"why": "{0}"} == dict(kept.records[-3].data)
    assert [*LINES, *[f"[app] {line}" for line in LINES]] == [record.getMessage() for record in kept.records]
    assert ["t1"] * 4 == [record.tenant for record in kept.records[4:]]


@tool(in_thread=False, requires_permission=False)
def say(what: str) -> str:
    """
    Say.
    """
    return what.upper()


@pytest.mark.spec("reliability:GN32")
@pytest.mark.parametrize("point", ["pre_run", "pre_step", "post_step", "pre_tool", "post_tool", "on_stop", "post_run"])
async def test_a_failing_hook_is_logged(point: str, standard: Any) -> None:
    def failing(*_: Any) -> None:
        msg = "out of paper"
        raise ValueError(msg)

    logger, kept = standard
    async with talking(logger=logger, hooks=Hooks(**{point: failing})) as engine:
        result = await engine.run("bot", "Go.")

    record, *more = kept.records
    assert {record.getMessage()} >= {other.getMessage() for other in more}
    assert ("ERROR", result.state.run_id, "bot") == (record.levelname, record.run_id, record.agent_id)
    assert f"{point} hook" in record.getMessage()
    assert "out of paper" in record.getMessage()


def talking(**options: Any) -> Engine:
    replies = [tool_call("say", {"what": "secret words"}), ModelReply("done", usage=Usage(7, 2), cost=Decimal("0.25"))]
    return Engine([AgentDefinition("bot", model="m/m", tools=[say])], models=ScriptedModel(replies), **options)


@pytest.mark.spec("requirements:O2", "requirements:O4", "reliability:GN34")
async def test_log_observer_writes_records_without_message_content(
    standard: Any,
) -> None:
    logger, kept = standard
    async with talking(observers=[LogObserver(logger)]) as engine:
        result = await engine.run("bot", "Go.")

    assert ["step", "tool call", "tool result", "step", "run ended"] == [r.getMessage() for r in kept.records]
    assert {(result.state.run_id, "")} == {(r.run_id, r.path) for r in kept.records}
    assert {"tool_name": "say", "tool_call_id": "c1"} == kept.records[1].data
    assert ("INFO", "completed", 2) == (
        kept.records[-1].levelname, kept.records[-1].data["status"], kept.records[-1].data["output_tokens"],
    )  # fmt: skip
    assert "secret" not in str([vars(record) for record in kept.records]).lower()


@pytest.mark.spec("reliability:GN34", "interfaces:IF6")
async def test_event_file_has_one_line_per_event_of_every_run(tmp_path: Any) -> None:
    seen: list[Any] = []
    path = tmp_path / "events.jsonl"
    async with talking(observers=[EventFile(path), seen.append]) as engine:
        first = await engine.run("bot", "Go.")
    async with talking(observers=[EventFile(path, full=True), seen.append]) as engine:
        await asyncio.gather(engine.run("bot", "Again."), return_exceptions=True)

    lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    assert [(e.type, e.run_id, e.path, e.index) for e in seen] == [
        (line["type"], line["run_id"], line["path"], line["index"]) for line in lines
    ]
    ended, whole = [line["result"] for line in lines if line["type"] == "run_finished"]
    asked = [line["request"] for line in lines if line["type"] == "model_started"]
    assert first.text == ended["text"]
    assert [None, None] == asked[:2]
    assert "message_history" not in ended["state"]
    assert "Again." in str(asked[2])
    assert "message_history" in whole["state"]
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)


@pytest.mark.spec("reliability:R11", "reliability:SC15")
async def test_event_file_holds_no_provider_key(tmp_path: Any) -> None:
    key = "zq-0123456789abcdefghijklmnop"
    GIVEN.add(key, "test_api_key")
    try:
        agent = AgentDefinition("bot", model="m/m")
        for full in (False, True):
            engine = Engine(
                [agent], models=ScriptedModel([f"It is {key}."]), observers=[EventFile(tmp_path / "e", full=full)]
            )
            async with engine:
                assert f"It is {key}." == (await engine.run("bot", f"Say {key}")).text
        written = (tmp_path / "e").read_text()
    finally:
        GIVEN.clear()
    assert key not in written
    assert "<redacted:test_api_key>" in written
