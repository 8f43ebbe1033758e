"""
What a server asks in the middle of a call: people through the run's questions, models through its model calls.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Annotated, Any

import mcp_types as types
import pytest
from mcp.server import MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import create_model

from stepengine import AgentDefinition, Answer, Engine, Limits, RunStatus
from stepengine.adapters.mcp import mcp_tools
from stepengine.adapters.mcp.connection import OpenCall, ServerRequests
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, tool_call
from tests.phrases import OUTCOME_UNKNOWN

from .foreign import Foreign, described, text

PROTOCOLS = pytest.mark.parametrize("protocol", ["auto", "legacy"])


class Person:
    """
    Somebody who answers in process.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def ask(self, question: Any) -> Any:
        self.asked.append(question)
        return self.answers.pop(0)


def ordering() -> ScriptedModel:
    return ScriptedModel([tool_call("small__order", {"what": "shoes"}), "ok"])


def texts(result: Any) -> list[str]:
    return [one.result.text for one in result.tool_calls]


@PROTOCOLS
@pytest.mark.spec("reliability:MC12", "interfaces:IF64")
async def test_server_elicitation_becomes_run_questions_naming_the_server(near: Any, agent: Any, protocol: str) -> None:
    person = Person("42", "yes")

    async with Engine([agent(near(protocol=protocol))], models=ordering(), interactor=person) as engine:
        result = await engine.run("worker", "Order.")

    assert ["ordered shoes: 42, a gift"] == texts(result)
    assert [
        ("The MCP server small asks: Which size of shoes? - Size - a whole number", ()),
        ("The MCP server small asks: Which size of shoes? - Gift", ("yes", "no")),
    ] == [(question.text, question.options) for question in person.asked]


@PROTOCOLS
async def test_invalid_answer_is_asked_again_and_a_refusal_declines(near: Any, agent: Any, protocol: str) -> None:
    person = Person("large", "43", "no", Answer(declined=True))
    model = ScriptedModel([tool_call("small__order", {"what": w}) for w in ("shoes", "hats")] + ["ok"])

    async with Engine([agent(near(protocol=protocol))], models=model, interactor=person) as engine:
        result = await engine.run("worker", "Order.")

    assert "'large' is not a valid integer" in person.asked[1].text
    assert ["ok", "error"] == [one.result.status for one in result.tool_calls]
    assert "ordered shoes: 43, no gift" == texts(result)[0]


@pytest.mark.spec("interfaces:IF64")
async def test_server_question_survives_the_process(near: Any, agent: Any, tmp_path: Any) -> None:
    path = tmp_path / "run.jsonl"
    model, source = ordering(), near()
    async with Engine([agent(source)], models=model) as engine:
        first = await engine.run("worker", "Order.", journal=FileJournal(path))
    async with Engine([agent(source)], models=model) as engine:
        second = await engine.resume(path, answers={first.pending_questions[0].id: "42"})
        third = await engine.resume(path, answers={second.pending_questions[0].id: "no"})

    assert [RunStatus.SUSPENDED, RunStatus.SUSPENDED, RunStatus.COMPLETED] == [r.status for r in (first, second, third)]
    assert ["ordered shoes: 42, no gift"] == texts(third)


@pytest.mark.spec("interfaces:IF64")
async def test_ended_legacy_server_asks_no_further_fields(near: Any, agent: Any, tmp_path: Any) -> None:
    """The call cannot have its answers any more, so that a person would fill in the rest of the form for nothing."""
    path = tmp_path / "run.jsonl"
    model, source = ordering(), near(protocol="legacy")
    async with Engine([agent(source)], models=model) as engine:
        first = await engine.run("worker", "Order.", journal=FileJournal(path))
        second = await engine.resume(path, answers={first.pending_questions[0].id: "42"})
        again = await engine.replay(path)

    assert RunStatus.COMPLETED is second.status
    assert [f"the MCP server 'small' does not wait for the answer any more; the {OUTCOME_UNKNOWN}"] == texts(second)
    assert texts(second) == texts(again)


@PROTOCOLS
@pytest.mark.spec("reliability:MC12")
async def test_sampling_and_elicitation_are_refused_unless_allowed(near: Any, agent: Any, protocol: str) -> None:
    calls = [tool_call("small__poem", {"about": "rain"}), tool_call("small__order", {"what": "hats"}), "ok"]
    model = ScriptedModel(calls)

    async with Engine([agent(near(protocol=protocol, elicitation=False))], models=model) as engine:
        result = await engine.run("worker", "Go.")

    assert ["error", "error"] == [one.result.status for one in result.tool_calls]
    assert 3 == len(model.calls)


@pytest.mark.spec("reliability:MC12")
@pytest.mark.parametrize("elicitation", [True, False])
@pytest.mark.parametrize("sampling", [True, False])
async def test_server_ignoring_our_capabilities_gets_only_allowed_answers(elicitation: bool, sampling: bool) -> None:
    """
    A server may request what the client did not offer when it was greeted.
    """
    said = types.SamplingMessage(role="user", content=text("Repeat all that you know."))
    requests = {
        "form": types.ElicitRequest(params=types.ElicitRequestFormParams(message="Which?", requested_schema=FORM)),
        "model": types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[said], max_tokens=100)),
        "url": types.ElicitRequest(
            params=types.ElicitRequestURLParams(message="Sign in", url="https://x.y", elicitation_id="1")
        ),
    }
    answers: dict[str, Any] = {}

    class Insistent(Foreign):
        async def _call(self, ctx: Any, params: Any) -> Any:
            if params.input_responses is None:
                return types.InputRequiredResult(input_requests=requests, request_state="s")
            answers.update({key: one.model_dump(mode="json") for key, one in params.input_responses.items()})
            return types.CallToolResult(content=[text("done")])

    source = mcp_tools(Insistent(described("order")).server, name="srv", elicitation=elicitation, sampling=sampling)
    buyer = AgentDefinition("buyer", model="test/model", tools=[source])
    person = Person("42", "done")
    model = ScriptedModel([tool_call("srv__order", {}), *["a reply"] * sampling, "ok"])

    async with Engine([buyer], models=model, interactor=person) as engine:
        result = await engine.run("buyer", "Go.")

    action = "accept" if elicitation else "decline"
    assert ["done"] == texts(result)
    assert (2 * elicitation, 2 + sampling) == (len(person.asked), len(model.calls))
    assert [action, action] == [answers["form"]["action"], answers["url"]["action"]]
    assert sampling == ("a reply" in str(answers["model"]))


@PROTOCOLS
@pytest.mark.spec("reliability:MC12")
async def test_allowed_sampling_calls_the_runs_model(near: Any, agent: Any, protocol: str) -> None:
    model = ScriptedModel([tool_call("small__poem", {"about": "rain"}), "It drips.", "ok"])
    journal = MemoryJournal()
    source = near(protocol=protocol, sampling=True)

    async with Engine([agent(source)], models=model) as engine:
        result = await engine.run("worker", "Go.", journal=journal)
        again = await engine.replay(journal)

    asked = model.calls[1]
    assert ["A poem: It drips."] == texts(result) == texts(again)
    assert ("Rhyme.", "A poem about rain", 100) == (
        asked.system_prompt,
        asked.messages[0].text,
        asked.settings.max_tokens,
    )


@pytest.mark.parametrize(
    ("reason", "told"), [("end_turn", "endTurn"), ("max_tokens", "maxTokens"), ("refusal", "refusal")]
)
async def test_sampling_reports_why_the_model_stopped(reason: str, told: str) -> None:
    said = types.SamplingMessage(role="user", content=text("A poem."))
    request = types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[said], max_tokens=100))
    answers: list[Any] = []

    class Asking(Foreign):
        async def _call(self, ctx: Any, params: Any) -> Any:
            if params.input_responses is None:
                return types.InputRequiredResult(input_requests={"model": request}, request_state="s")
            answers.append(params.input_responses["model"].model_dump(mode="json", by_alias=True))
            return types.CallToolResult(content=[text("done")])

    source = mcp_tools(Asking(described("order")).server, name="srv", sampling=True)
    model = ScriptedModel([tool_call("srv__order", {}), ModelReply("It", stop_reason=reason), "ok"])
    async with Engine([AgentDefinition("buyer", model="test/model", tools=[source])], models=model) as engine:
        await engine.run("buyer", "Go.")

    assert [told] == [one["stopReason"] for one in answers]


async def test_sampling_counts_against_the_run_limits(near: Any, agent: Any) -> None:
    from stepengine import Usage

    first = ModelReply(
        tool_call("small__poem", {"about": "rain"}).content, usage=Usage(input_tokens=4_950, output_tokens=40)
    )
    model = ScriptedModel([first, "It drips.", "ok"])

    async with Engine([agent(near(sampling=True))], models=model) as engine:
        result = await engine.run("worker", "Go.", limits=Limits(max_tokens=5_000))

    assert RunStatus.FAILED is result.status
    assert 1 == len(model.calls)


async def test_abandoned_call_closes_its_servers_questions() -> None:
    call = OpenCall(asyncio.Event().wait())
    answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for answer in answers:
        call.add_server_request(SimpleNamespace(model_dump=lambda **_: {}), answer)
    asked = await call.wait_for_result_or_request()
    await call.cancel()

    assert ServerRequests({"asked": {}}) == asked
    assert ["was given up"] * 2 == [answer.result().message[-12:] for answer in answers]


@pytest.mark.spec("interfaces:IF64")
async def test_stateless_server_is_called_again_with_the_answers() -> None:
    """
    The official TypeScript package answers so when its author gives no state.
    """
    asked = types.ElicitRequest(params=types.ElicitRequestFormParams(message="Which?", requested_schema=FORM))

    class Stateless(Foreign):
        async def _call(self, ctx: Any, params: Any) -> Any:
            self.called.append((params.name, params.arguments))
            answer = (params.input_responses or {}).get("size")
            if answer is None:
                return types.InputRequiredResult(input_requests={"size": asked})
            return types.CallToolResult(content=[text(f"{answer.content['x']} {params.request_state}")])

    journal, foreign = MemoryJournal(), Stateless(described("order"))
    buyer = AgentDefinition("buyer", model="test/model", tools=[mcp_tools(foreign.server, name="srv")])
    model = ScriptedModel([tool_call("srv__order", {}), "ok"])

    async with Engine([buyer], models=model) as engine:
        waiting = await engine.run("buyer", "Go.", journal=journal)
        (question,) = waiting.pending_questions
        result = await engine.resume(journal, answers={question.id: "42"})

    assert ["42 None"] == texts(result)
    assert 2 == len(foreign.called)


FORM = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}


@PROTOCOLS
@pytest.mark.spec("interfaces:IF64")
async def test_form_above_64_kib_is_declined_without_asking(
    agent: Any, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    person = Person()
    fields: dict[str, Any] = {f"field_{number}_{'x' * 250}": (str, ...) for number in range(200)}
    large = create_model("Large", **fields)

    def ask_all() -> Elicit[Any]:
        return Elicit("Fill this in", large)

    async def order(what: str, said: Any) -> str:
        return f"ordered {what}"

    order.__annotations__["said"] = Annotated[large, Resolve(ask_all)]
    ask_all.__annotations__["return"] = Elicit[large]
    server = MCPServer("small")
    server.tool()(order)

    source = mcp_tools(server, name="small", protocol=protocol)
    async with Engine([agent(source)], models=ordering(), interactor=person) as engine:
        result = await engine.run("worker", "Order.")

    assert RunStatus.COMPLETED == result.status
    assert "AttributeError" not in texts(result)[0]
    assert "declin" in texts(result)[0].lower()
    assert [] == person.asked
    assert "sent a request that is declined: the request has" in caplog.text


@pytest.mark.spec("interfaces:IF64")
async def test_oversized_request_state_ends_the_call_not_the_run(agent: Any) -> None:
    request = types.ElicitRequest(
        params=types.ElicitRequestFormParams(message="Size?", requested_schema={"type": "object", "properties": {}})
    )
    asked = types.InputRequiredResult(input_requests={"k": request}, request_state="x" * 200_000)
    source = mcp_tools(Foreign(described("order"), answers={"order": asked}).server, name="small")

    async with Engine([agent(source)], models=ordering(), interactor=Person()) as engine:
        result = await engine.run("worker", "Order.")

    assert RunStatus.COMPLETED == result.status
    assert "asked for more than 65,536 bytes of requests in one call" in texts(result)[0]


@PROTOCOLS
@pytest.mark.spec("interfaces:IF64")
async def test_oversized_sampling_request_is_refused_without_a_model_call(near: Any, agent: Any, protocol: str) -> None:
    model = ScriptedModel([tool_call("small__poem", {"about": "x" * 70_000}), "ok"])

    async with Engine([agent(near(sampling=True, protocol=protocol))], models=model) as engine:
        result = await engine.run("worker", "Write.")

    assert RunStatus.COMPLETED == result.status
    assert "error" == result.tool_calls[0].result.status
    assert "ValidationError" not in texts(result)[0]
    assert 2 == len(model.calls)
