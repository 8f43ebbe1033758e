"""google-adk's ``LlmAgent`` in its ``InMemoryRunner`` with a ``BaseLlm``; over HTTP its ``Gemini``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.events import Event
from google.adk.models import BaseLlm, Gemini, LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types

from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments

PACKAGE = "google-adk"
PROTOCOL = "google"
USAGE = types.GenerateContentResponseUsageMetadata(
    prompt_token_count=10, candidates_token_count=5, total_token_count=15
)


async def add(a: int, b: int) -> dict[str, int]:
    """
    Add two numbers.

    Args:
        a: One number.
        b: Another number.

    Returns:
        The sum, under the name ``result``.
    """
    return {"result": a + b}


class Scripted(BaseLlm):
    """A model that asks for *steps* calls and then stops."""

    steps: int
    calls: int = 0

    async def generate_content_async(self, *_: Any, **__: Any) -> AsyncGenerator[LlmResponse, None]:
        """Give the next reply."""
        number, self.calls = self.calls, self.calls + 1
        part = types.Part.from_function_call(name="add", args=arguments(number))
        if number == self.steps:
            part = types.Part(text="done")
        yield LlmResponse(content=types.Content(role="model", parts=[part]), usage_metadata=USAGE)


async def new_session(runner: InMemoryRunner) -> Any:
    """Return a new session."""
    return await runner.session_service.create_session(app_name=runner.app_name, user_id="user")


async def performed(runner: InMemoryRunner, steps: int, session: Any = None) -> list[types.Part]:
    """Run an agent, in a new session if there is none, and return what its events hold."""
    session = session or await new_session(runner)
    message = types.Content(role="user", parts=[types.Part(text="add")])
    config = RunConfig(max_llm_calls=steps + 2)
    parts: list[types.Part] = []
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=config):
        parts += (event.content and event.content.parts) or []
    return parts


def work_of(calls: int, parts: list[types.Part]) -> Work:
    """Return the work of a run."""
    results = [part.function_response.response["result"] for part in parts if part.function_response]  # type: ignore[index]
    return Work(calls, results, parts[-1].text or "")


def runner_for(model: BaseLlm) -> InMemoryRunner:
    """Return a runner of an agent with the tool."""
    return InMemoryRunner(LlmAgent(name="adder", model=model, tools=[add]), app_name="adding")


async def run(steps: int) -> Told:
    """Run the peer's agent; see the package's docstring."""
    model = Scripted(model="scripted", steps=steps)
    parts = await performed(runner_for(model), steps)
    return lambda: work_of(model.calls, parts)


def http_runner(url: str) -> InMemoryRunner:
    """Return the runner over HTTP."""
    return runner_for(Gemini(model="m", base_url=url, client_kwargs={"api_key": "k"}))


def over_http(url: str) -> Run:
    """Return runs over HTTP; see the package's docstring."""
    runner = http_runner(url)

    async def http_run(steps: int) -> Told:
        parts = await performed(runner, steps)
        return lambda: work_of(UNCOUNTED, parts)

    return http_run


def behind(url: str, count: int) -> Callable[[], Awaitable[str]]:
    """Return one call behind a history; see the package's docstring. A session is filled once, event by event."""
    runner, sessions = http_runner(url), list[Any]()

    async def filled() -> Any:
        session = await new_session(runner)
        parts = [("user", types.Part(text="add"))]
        for number in range((count - 1) // 2):
            parts.append(("adder", types.Part.from_function_call(name="add", args=arguments(number))))
            parts.append(("adder", types.Part.from_function_response(name="add", response={"result": number + 1})))
        for author, part in parts:
            role = "model" if author == "adder" and part.function_call else "user"
            content = types.Content(role=role, parts=[part])
            await runner.session_service.append_event(session, Event(author=author, content=content, invocation_id="i"))
        return session

    async def ask() -> str:
        sessions.extend([] if sessions else [await filled()])
        return (await performed(runner, 1, sessions[0]))[-1].text or ""

    return ask
